/*
 * fuzz_tokenizer.c - libFuzzer target for tokenizers. The input's first byte chooses what the rest is: a whole
 * tokenizer.json; members that replace those of the tests' own, of `model` too; a pattern; or a text, which is encoded
 * whole and in two parts, and decoded. Runs in the project's folder.
 */
#define _GNU_SOURCE
#include "tests/fuzz.h"

#include "files/encoder.h"
#include "files/tokenizer.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char sample[] = "The quick fox's 123 \xe5\xa4\xa9\xe6\xb0\x94 e\xcc\x81  \r\n\n <role>\xff<|endoftext|>";

/* Encodes a text whole and in parts, which must be the same, and decodes it, which must give it back. */
static void encode_and_compare(const struct tokenizer *t, const char *text, size_t n, size_t known, size_t stop,
		bool special, bool inverse)
{
	struct encoder *e = encoder_open(t);
	struct ids whole = {0}, parts = {0};
	struct text back = {0};
	if (encode(e, text, n, special, &whole) == 0) {
		int64_t done = encode_part(e, text, known, stop, known < n, special, &parts);
		if (done < 0 || (size_t)done > known || encode(e, text + done, n - done, special, &parts) < 0)
			abort();
		if (whole.count != parts.count || (whole.count && memcmp(whole.id, parts.id,
				whole.count * sizeof *whole.id)))
			abort();
		for (int64_t i = 0; i < whole.count; i++)
			tokenizer_decode(t, whole.id[i], true, &back);
		if (inverse && (back.size != n || (n && memcmp(back.data, text, n))))
			abort();
	}
	encoder_close(e);
	free(whole.id), free(parts.id), free(back.data);
}

static struct tokenizer *open_file(const void *data, size_t n)
{
	return tokenizer_open(fuzz_file("tokenizer.json", data, n));
}

/* The tests' tokenizer with the members of a patch. */
static struct tokenizer *open_patched(json_t *patch)
{
	json_t *root = json_read("tests/fixtures/tokenizer/tokenizer.json"), *model = json_object_get(patch, "model");
	if (!root)
		abort();
	if (json_is_object(model)) {
		json_object_update(json_object_get(root, "model"), model);
		json_object_del(patch, "model");
	}
	if (json_is_object(patch))
		json_object_update(root, patch);
	char *text = json_text(root, 0);
	struct tokenizer *t = open_file(text, strlen(text));
	free(text);
	json_decref(root), json_decref(patch);
	return t;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	enum { VARIANTS = 11 };
	static struct tokenizer *variants[VARIANTS];
	static bool changes_text[VARIANTS]; /* decoding may give another text */
	if (!*variants) {
		const char *key;
		json_t *list = json_read("tests/fixtures/tokenizer/variants.json"), *patch;
		int i = 0;
		if (!list)
			abort();
		json_object_foreach(list, key, patch)
			if (strcmp(key, "added")) {
				char *text = json_text(patch, 0);
				changes_text[i] = strstr(text, "\"NFC\"") || strstr(text, "\"Removed\"");
				free(text);
				if (!(variants[i++] = open_patched(json_deep_copy(patch))))
					abort();
			}
		json_decref(list);
	}
	if (n < 4)
		return 0;
	const int choice = data[0] % 4;
	const char *rest = (const char *)data + 4;
	n -= 4;
	struct tokenizer *t = NULL;
	if (choice == 0)
		t = open_file(rest, n);
	else if (choice == 1) {
		json_t *patch = json_loadb(rest, n, 0, NULL);
		if (patch)
			t = open_patched(patch);
	} else if (choice == 2) {
		json_t *pattern = json_stringn(rest, n);
		if (pattern)
			t = open_patched(json_pack("{s:{s:s, s:[{s:s, s:{s:o}, s:s}, {s:s, s:b, s:b}]}}", "pre_tokenizer", "type",
					"Sequence", "pretokenizers", "type",
					"Split", "pattern", "Regex", pattern, "behavior", "Isolated", "type", "ByteLevel",
							"add_prefix_space", 0, "use_regex", 0));
	} else {
		const int v = data[1] % (VARIANTS - 1);
		encode_and_compare(variants[v], rest, n, data[2] * n / 255, 1 + data[3], data[1] & 128, !changes_text[v]);
	}
	if (t)
		encode_and_compare(t, sample, sizeof sample - 1, data[1] % sizeof sample, 1 + data[2], data[3] & 1, false);
	tokenizer_close(t);
	return 0;
}
