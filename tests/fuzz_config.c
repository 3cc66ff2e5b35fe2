/*
 * fuzz_config.c - libFuzzer target for the config readers. The first byte chooses: a YAML file, an override on top of
 * a valid file, a Hugging Face config.json. What is accepted must survive a round trip.
 */
#define _GNU_SOURCE
#include "tests/fuzz.h"

#include "files/config.h"

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char base[] =
	"model: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 300, num_experts: 8,\n"
	"  num_experts_per_tok: 2, moe_intermediate_size: 16}\n"
	"data: {train: a, seq_len: 128}\n"
	"train: {output_dir: out, micro_batch: 4, batch: 16, steps: 10, "
	"batch_warmup: {start: 4, increment: 4, tokens: 99}}\n"
	"schedule: {peak_lr: 1e-3, drops: [{at: 0.5, factor: 0.1}, {at: 0.6, factor: 0.1}]}\n";

/* An accepted config must be equal to itself in a checkpoint. */
static void check_config(const struct config *c)
{
	json_t *made = config_to_json(c);
	char *text = json_dumps(made, 0);
	json_t *read = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
	FILE *notes = tmpfile();
	if (config_compare(read, c, "trainer.json", notes) < 0 || ftell(notes) > 0) {
		fprintf(stderr, "%s\n", error_text);
		abort();
	}
	fclose(notes);
	free(text);
	json_decref(made);
	json_decref(read);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 1)
		return 0;
	int mode = *data++ % 3;
	size--;
	struct config c;
	struct model_config m;
	error_text[0] = 0;
	int rc = -1;
	if (mode == 0) {
		rc = config_load(&c, fuzz_file("run.yaml", data, size), 0, NULL, false);
		if (!rc)
			check_config(&c);
	} else if (mode == 1) {
		char *override = strndup((const char *)data, size);
		rc = config_load(&c, fuzz_file("run.yaml", base, sizeof base - 1), 1, &override, false);
		if (!rc)
			check_config(&c);
		free(override);
	} else {
		const char *json = fuzz_file("config.json", data, size), *directory = fuzz_path("");
		rc = config_from_huggingface(&m, directory);
		json_t *theirs = rc ? NULL : json_read(json);
		for (int i = 0; i < 2 && !rc; i++) { /* alone, and over what it came with, as a conversion writes it */
			struct model_config back;
			if (config_write(json, &m, "bfloat16", i ? theirs : NULL, NULL) < 0 ||
					config_from_huggingface(&back, directory) < 0 ||
					memcmp(&m, &back, sizeof m))
				abort();
		}
		json_decref(theirs);
	}
	if (rc && !*error_text)
		abort();
	return 0;
}
