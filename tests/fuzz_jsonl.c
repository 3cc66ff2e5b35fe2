/*
 * fuzz_jsonl.c - libFuzzer target for the readers of JSON lines: tokenize_files and the metrics. The input's first byte
 * chooses; the rest is the file.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "data.h"
#include "commands/tokenize.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static char dir[] = "/tmp/fuzz_jsonl.XXXXXX";

static void put_file(const char *path, const void *data, size_t n)
{
	FILE *f = fopen(path, "w");
	if (!f || fwrite(data, 1, n, f) != n || fclose(f) != 0)
		abort();
}

/* What could be tokenized must be a good token file. */
static void tokenize(char *path)
{
	char prefix[PATH_LEN];
	struct tokens t;
	struct tokenized result;
	if (path_join(prefix, dir, "t") < 0 || tokenize_files(prefix, "byte", false, 1, &path, &result) < 0)
		return;
	int64_t loss_tokens = 0;
	if (tokens_open(&t, prefix, "none", 257) < 0 || t.documents < 1 || t.count < 1 || t.count != result.tokens)
		abort();
	for (int64_t i = 0; i < t.count; i++)
		loss_tokens += t.loss_mask ? t.loss_mask[i] : 1;
	if (loss_tokens != result.loss_tokens || (loss_tokens == t.count) != !t.loss_mask)
		abort();
	tokens_close(&t);
}

/* What could be read must be readable after lines are cut off too, unless lines are missing; nothing else can be opened. */
static void read_metrics(int64_t step, bool empty)
{
	struct metrics *m;
	int n, kept = 0;
	int64_t last = 0;
	if (metrics_read(dir, &m, &n) < 0) {
		if (metrics_open(dir, step))
			abort();
		return;
	}
	for (int i = 0; i < n; i++)
		if (m[i].step <= step)
			kept++, last = m[i].step;
	free(m);
	FILE *f = metrics_open(dir, step);
	if (!f != (last < step && !empty))
		abort();
	if (f && (fclose(f) != 0 || metrics_read(dir, &m, &n) < 0 || n != kept))
		abort();
	if (f)
		free(m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static char lines[PATH_LEN], text[PATH_LEN], metrics[PATH_LEN];
	if (!*lines && (!mkdtemp(dir) || path_join(lines, dir, "in.jsonl") < 0 || path_join(text, dir, "in.txt") < 0 ||
			path_join(metrics, dir, "metrics.jsonl") < 0))
		abort();
	if (!n)
		return 0;
	int kind = *data++;
	if (kind < 100) {
		put_file(lines, data, n - 1);
		tokenize(lines);
	} else if (kind < 110) {
		put_file(text, data, n - 1);
		tokenize(text);
	} else {
		put_file(metrics, data, n - 1);
		read_metrics(kind - 110, n == 1);
	}
	return 0;
}
