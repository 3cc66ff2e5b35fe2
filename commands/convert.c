/*
 * commands/convert.c - `ling convert-checkpoint`: a model from one format to another.
 */
#define _GNU_SOURCE
#include "commands/convert.h"

#include "files/base.h"
#include "files/checkpoint.h"
#include "files/convert.h"
#include "ling.h"
#include "commands/result.h"

#include <stdio.h>
#include <string.h>

struct convert_options {
	int to, dtype;               /* of format_names, of output_dtypes */
	double max_shard_size;       /* bytes; 0: not given */
	bool fold_norm_head, no_tokenizer, json;
};

static const char *const format_names[] = {"hf", "checkpoint", "gguf", NULL}; /* in the order of enum model_format */

/* Fails where options do not go together. dtype: NULL where none is given. */
static int check_conversion(const struct convert_options *o, enum model_format format, const char *dtype)
{
	if (format == FORMAT_CHECKPOINT && dtype && strcmp(dtype, "f32"))
		return fail("--dtype %s: a checkpoint holds f32, for training computes in it", dtype);
	if (format == FORMAT_CHECKPOINT && o->fold_norm_head)
		return fail("--fold-norm-head is for inference: expected --to hf");
	if (format != FORMAT_HUGGINGFACE && o->max_shard_size)
		return fail("--max-shard-size goes with --to hf; other formats are one file");
	return 0;
}

static void print_conversion(const json_t *report)
{
	printf("%s: %lld tensors, %.3g GB\n", result_text(report, "path"), (long long)result_integer(report, "tensors"),
			result_double(report, "bytes") / 1e9);
}

static int run_convert(const struct command_line *line)
{
	const struct convert_options *o = line->options;
	const char *path = line->words[1];
	char source_path[PATH_LEN];
	const int format = option_given(line, "to") ? o->to
			: has_suffix(path, ".gguf") ? FORMAT_GGUF : FORMAT_HUGGINGFACE;
	const char *dtype = option_given(line, "dtype") ? output_dtypes[o->dtype] : NULL;
	if (check_conversion(o, format, dtype) < 0)
		return EXIT_WRONG_USE;
	const struct conversion to = {.path = path, .format = format, .dtype = dtype, .fold_norm_head = o->fold_norm_head,
			.max_shard_size = o->max_shard_size ? (int64_t)o->max_shard_size : MAX_SHARD_SIZE,
			.no_tokenizer = o->no_tokenizer};

	struct model_config c;
	struct source_model *source = find_model(source_path, line->words[0]) < 0 ? NULL
			: source_model_open(source_path, &c);
	if (!source)
		return EXIT_WORK_FAILED;
	struct converted result;
	const int rc = convert_parameters(source, &c, &to, &result);
	if (rc == 0)
		result_print(json_pack("{s:s, s:I, s:I, s:o}", "format", format_names[format],
				"tensors", (json_int_t)result.tensors, "bytes", (json_int_t)result.bytes,
				"path", json_cstring(path)), o->json, print_conversion);
	source_model_close(source);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static const struct command_option options[] = {
	CHOICE_OPTION(convert_options, to, "to", "FORMAT", format_names,
			"hf, a Hugging Face directory (the default); gguf, a file that llama.cpp loads (the default for a "
			"DST.gguf); checkpoint: DST is RUN/step-0000000, from which ling train continues with "
			"train.output_dir=RUN"),
	CHOICE_OPTION(convert_options, dtype, "dtype", "TYPE", output_dtypes,
			"f32, bf16 or f16 (default: as each tensor is in SRC)"),
	SIZE_OPTION(convert_options, max_shard_size, "max-shard-size",
			"Most bytes of a file of weights, such as 500MB (default: 5GB)"),
	FLAG_OPTION(convert_options, fold_norm_head, "fold-norm-head",
			"Divide lm_head by its columns' norms, and set norm_head to false"),
	FLAG_OPTION(convert_options, no_tokenizer, "no-tokenizer",
			"Leave the tokenizer out of a GGUF file, or of what is made from one"),
	FLAG_OPTION(convert_options, json, "json", "Print one JSON object"),
};

const struct command convert_command = {
	.name = "convert-checkpoint", .usage = "SRC DST [--to hf|checkpoint|gguf]", .min_words = 2, .max_words = 2,
	.help = "Convert a model: SRC is a Hugging Face directory, a checkpoint, a run (its newest checkpoint), or a GGUF "
		"file (f32, bf16, f16); DST must not exist.",
	.run = run_convert, COMMAND_OPTIONS(convert_options, options), .has_threads = true,
};
