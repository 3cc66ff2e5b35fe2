/*
 * commands/convert.c - `ling convert-checkpoint`: a model from one format to another.
 */
#define _GNU_SOURCE
#include "commands/convert.h"

#include "files/base.h"
#include "files/convert.h"
#include "ling.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What the conversion's options cannot mean together. */
static int check_conversion_usage(const struct arguments *a, enum model_format format)
{
	if (format == FORMAT_CHECKPOINT && a->weight_type && strcmp(a->weight_type, "f32"))
		return fail("--dtype %s: a checkpoint holds f32, for training computes in it", a->weight_type);
	if (format == FORMAT_CHECKPOINT && a->fold_norm_head)
		return fail("--fold-norm-head is for inference: expected --to hf");
	if (format != FORMAT_HUGGINGFACE && a->max_shard_size)
		return fail("--max-shard-size goes with --to hf; other formats are one file");
	if (a->max_shard_size > 1e18)
		return fail("--max-shard-size: expected at most 1000000 TB");
	return 0;
}

int command_convert(const struct arguments *a)
{
	const char *source_path = a->words[0], *path = a->words[1];
	const size_t length = strlen(path);
	int format = length > 5 && !strcmp(path + length - 5, ".gguf") ? FORMAT_GGUF : FORMAT_HUGGINGFACE;
	for (int i = 0; a->to && format_names[i]; i++)
		if (!strcmp(a->to, format_names[i]))
			format = i;
	if (check_conversion_usage(a, format) < 0)
		return EXIT_WRONG_USE;
	const struct conversion to = {.path = path, .format = format, .dtype = a->weight_type, .fold_norm_head = a->fold_norm_head,
			.max_shard_size = a->max_shard_size ? (int64_t)a->max_shard_size : 5000000000, .no_tokenizer = a->no_tokenizer};

	struct model_config c;
	struct source *source = source_open(source_path, &c);
	if (!source) {
		explain_run(source_path);
		return EXIT_WORK_FAILED;
	}
	c.tie_word_embeddings = false; /* so that lm_head.weight is listed */
	int n;
	struct parameter *parameters = global_parameters(&c, &n);
	struct named_tensor *params = parameters ? calloc(n, sizeof *params) : NULL;
	struct converted result;
	int rc = params ? 0 : fail("out of memory for the names of the model's tensors");
	for (int i = 0; i < n && rc == 0; i++)
		params[i] = (struct named_tensor){.name = parameters[i].name, .rows = parameters[i].rows, .cols = parameters[i].cols};
	if (rc == 0)
		rc = convert_model(source, params, n, &to, &result);
	if (rc == 0 && a->json)
		printf("{\"format\": \"%s\", \"tensors\": %lld, \"bytes\": %lld}\n", format_names[format], (long long)result.tensors,
				(long long)result.bytes);
	else if (rc == 0)
		printf("%s: %lld tensors, %.3g GB\n", path, (long long)result.tensors, result.bytes / 1e9);
	free(params);
	free(parameters);
	source_close(source);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}
