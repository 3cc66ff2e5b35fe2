/*
 * fuzz_tokens.c - libFuzzer target for token files. The input: one byte of flags, one byte n, n bytes of a first file,
 * and the rest, a second file. They are .bin and .idx; or, by the flags, the loss mask and the manifest of a good
 * pair, or a file given alone, an llm.c file or bare ids, and its mask.
 */
#define _GNU_SOURCE
#include "tests/fuzz.h"

#include "files/config.h"
#include "data.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* What could be opened can be read, and is as it should be. */
static void read_all(struct tokens *t, int vocab_size)
{
	int32_t ids[512], target[512], document[512];
	if (t->count > 512 || t->documents < -1)
		abort();
	if (tokens_read(t, 0, t->count, ids) < 0)
		abort();
	for (int64_t i = 0; i < t->count; i++)
		if (ids[i] < 0 || ids[i] >= vocab_size)
			abort();
	t->document_token = 1;
	for (int64_t start = 0; start + 1 < t->count; start += 1 + start / 2) {
		const int64_t n = t->count - start - 1;
		memcpy(target, ids + start + 1, n * sizeof *ids);
		tokens_mask(t, start, n, target);
		if (tokens_documents(t, start, n, document, target) < 0)
			abort();
		for (int64_t i = 0; i < n; i++)
			if (document[i] < 0 || document[i] > i || (i > 0 && document[i] < document[i - 1]) ||
					(target[i] != -1 && target[i] != ids[start + 1 + i] &&
					(target[i] != t->end_token || target[i] >= vocab_size)))
				abort();
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	/* one document of three uint16 tokens */
	static const uint8_t idx[] = "MMIDIDX\0\0" "\1\0\0\0\0\0\0\0" "\10" "\1\0\0\0\0\0\0\0" "\2\0\0\0\0\0\0\0"
		"\3\0\0\0" "\0\0\0\0\0\0\0\0" "\0\0\0\0\0\0\0\0" "\1\0\0\0\0\0\0\0";
	static const uint8_t bin[] = {'h', 0, 'i', 0, 0, 1};
	static const char *const files[] = {"t.bin", "t.idx", "t.mask.bin", "t.json"};
	if (n < 2)
		return 0;
	const bool manifest = data[0] & 1, alone = data[0] & 4, mask = data[0] & 8;
	const size_t first = data[1] < n - 2 ? data[1] : n - 2, second = n - 2 - first;
	static const char *const dtypes[] = {"none", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"};
	const char *dtype = alone && data[0] & 16 ? dtypes[data[0] >> 5] : "none";
	if (alone) {
		fuzz_file("t.bin", data + 2 + first, second < 4096 ? second : 4096);
		if (mask)
			fuzz_file("t.mask.bin", data + 2, first);
	} else if (manifest) {
		fuzz_file("t.bin", bin, sizeof bin);
		fuzz_file("t.idx", idx, sizeof idx - 1);
		if (mask)
			fuzz_file("t.mask.bin", data + 2, first);
		fuzz_file("t.json", data + 2 + first, second);
	} else {
		fuzz_file("t.bin", data + 2, first);
		fuzz_file("t.idx", data + 2 + first, second);
	}
	struct tokens t;
	const int vocab_size = data[0] & 2 ? 257 : INT32_MAX;
	bool good[2];
	const char *path = fuzz_path(alone ? "t.bin" : "t");
	for (int i = 0; i < 2; i++) { /* once more by the manifest that the first time leaves */
		good[i] = tokens_open(&t, path, dtype, vocab_size) == 0;
		if (good[i] && t.count <= 512)
			read_all(&t, vocab_size);
		tokens_close(&t);
	}
	if (good[0] != good[1])
		abort();
	for (int i = 0; i < 4; i++)
		unlink(fuzz_path(files[i]));
	return 0;
}
