/*
 * fuzz_jsonl.c - libFuzzer target for the readers of JSON lines: tokenize_files and the metrics. The input's first
 * byte chooses; the rest is the file.
 */
#define _GNU_SOURCE
#include "tests/fuzz.h"

#include "data.h"
#include "files/tokenizer.h"
#include "commands/tokenize.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* What could be tokenized must be a good token file. Where no line is bad, none is skipped. */
static void tokenize(char *path, bool json_lines)
{
	const char *prefix = fuzz_path("t");
	const struct text_options skip = {.skip_bad_lines = true};
	struct tokens t;
	struct tokenized result, skipping;
	const bool good = tokenize_files(prefix, "byte", NULL, false, NULL, 1, &path, &result) == 0;
	const int rc = json_lines ? tokenize_files(prefix, "byte", NULL, false, &skip, 1, &path, &skipping) : -1;
	if (good && json_lines && (rc < 0 || skipping.lines_skipped || skipping.tokens != result.tokens ||
			skipping.documents != result.documents))
		abort();
	if (!good && rc < 0)
		return;
	result = json_lines ? skipping : result;
	if (!good && !result.lines_skipped)
		abort();
	int64_t loss_tokens = 0;
	if (tokens_open(&t, prefix, "none", 257) < 0 || t.documents < 1 || t.count < 1 || t.count != result.tokens)
		abort();
	for (int64_t i = 0; i < t.count; i++)
		loss_tokens += !t.loss_mask || t.loss_mask[i] != LOSS_NONE;
	if (loss_tokens != result.loss_tokens || (loss_tokens == t.count) != !t.loss_mask)
		abort();
	tokens_close(&t);
}

/* What could be read must be readable after lines are cut off too, unless lines are missing; nothing else can be
 * opened. */
static void read_metrics(int64_t step, bool empty)
{
	const char *dir = fuzz_path("");
	struct metrics *m;
	int n, kept = 0;
	int64_t last = 0;
	if (metrics_read(dir, &m, &n) < 0) {
		if (metrics_open(dir, step, NULL))
			abort();
		return;
	}
	for (int i = 0; i < n; i++)
		if (m[i].step <= step)
			kept++, last = m[i].step;
	free(m);
	FILE *f = metrics_open(dir, step, NULL);
	if (!f != (last < step && !empty))
		abort();
	if (f && (fclose(f) != 0 || metrics_read(dir, &m, &n) < 0 || n != kept))
		abort();
	if (f)
		free(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	if (!n)
		return 0;
	int kind = *data++;
	if (kind < 110)
		tokenize(fuzz_file(kind < 100 ? "in.jsonl" : "in.txt", data, n - 1), kind < 100);
	else {
		fuzz_file("metrics.jsonl", data, n - 1);
		read_metrics(kind - 110, n == 1);
	}
	return 0;
}
