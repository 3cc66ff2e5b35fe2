/*
 * fuzz_gguf.c - libFuzzer target for what is read of a GGUF file, and of a tokenizer.json on its way into one. The
 * first byte chooses: a file as it is; a file behind a magic and counts that fit, so that its metadata are looked at;
 * a tokenizer.json. A model that is accepted must come out of a conversion, and its tensors be readable.
 */
#define _GNU_SOURCE
#include "tests/fuzz.h"

#include "files/config.h"
#include "files/tensors.h"
#include "files/gguf.h"
#include "files/checkpoint.h"
#include "files/convert.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* Opens a file; whatever it describes, a few parameters are sought in it. */
static void convert_file(const char *path)
{
	const char *to = fuzz_path("out");
	struct model_config c;
	struct converted result;
	struct source_model *s = source_model_open(path, &c);
	const struct named_tensor params[] = {
		{"model.word_embeddings.weight", 4, 2, NULL}, {"model.layers.0.mlp.experts.0.up_proj.weight", 2, 2, NULL},
		{"model.layers.0.attention.query_key_value.weight", 6, 2, NULL}, {"model.norm.weight", 2, 0, NULL},
		{"lm_head.weight", 4, 2, NULL}, {"model.layers.0.mlp.gate.expert_bias", 2, 0, NULL},
	};
	directory_remove(to);
	for (int n = s ? 1 : 7; n <= 6; n++) {
		const struct conversion conversion = {.path = to, .max_shard_size = 1 << 20, .dtype = n % 2 ? "bf16" : NULL};
		if (convert_model(s, params, n, &conversion, &result) == 0)
			directory_remove(to);
	}
	source_model_close(s);
}

/* Every tensor of an accepted file lies within it. */
static void read_tensors(const char *path)
{
	struct tensors *w = allocate(sizeof *w);
	if (gguf_open(w, path) == 0)
		for (int i = 0; i < w->count; i++)
			crc_of(0, tensor_bytes(&w->tensors[i]), w->tensors[i].end - w->tensors[i].begin);
	tensors_close(w);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	if (n < 4)
		return 0;
	error_text[0] = 0;
	if (*data % 3 == 2) {
		struct metadata m = {0};
		fuzz_file("tokenizer.json", data + 1, n - 1);
		if (tokenizer_to_gguf(&m, fuzz_path(""), NULL, &(struct model_config){.vocab_size = 300}) < 0 && !*error_text)
			abort();
		free(m.bytes.data);
		return 0;
	}
	struct text file = {0};
	uint8_t head[24] = GGUF_MAGIC "\3\0\0\0";
	head[8] = data[1] % 8, head[16] = data[2] % 32;
	text_append(&file, (const char *)head, *data % 3 ? sizeof head : 0);
	text_append(&file, (const char *)data + 3, n - 3);
	const char *gguf = fuzz_file("m.gguf", file.data, file.size);
	free(file.data);
	read_tensors(gguf);
	convert_file(gguf);
	return 0;
}
