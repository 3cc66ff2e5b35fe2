/*
 * Token files: made from text and JSON lines, read in every format. Good files must come back as they were; broken
 * ones, made here by patching good ones, must give the error that names the place.
 */
#define _GNU_SOURCE
#include "tests/test.h"

#include "commands/tokenize.h"
#include "data.h"
#include "files/encoder.h"

#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>

/* ---- token files ---- */

struct index_file { uint8_t bytes[512]; size_t n; };

/* An index of sequences and document entries as given; pointers follow from the lengths. */
static void make_index(struct index_file *f, int dtype, int n, const int32_t *lengths, int entries,
		const int64_t *documents)
{
	memset(f, 0, sizeof *f);
	memcpy(f->bytes, "MMIDIDX", 7);
	f->bytes[9] = 1, f->bytes[17] = dtype, f->bytes[18] = n, f->bytes[26] = entries;
	f->n = 34;
	int64_t pointer = 0;
	for (int i = 0; i < n; i++, f->n += 4)
		memcpy(f->bytes + f->n, &lengths[i], 4);
	for (int i = 0; i < n; i++, f->n += 8) {
		memcpy(f->bytes + f->n, &pointer, 8);
		pointer += lengths[i] * (int64_t)token_types[dtype].size;
	}
	for (int i = 0; i < entries; i++, f->n += 8)
		memcpy(f->bytes + f->n, &documents[i], 8);
}

static void tokens_types(void **state)
{
	(void)state;
	static const int32_t lengths[] = {2, 0, 3};
	static const int64_t documents[] = {0, 1, 1, 3};
	static const uint8_t u8[] = {0, 255, 1, 2, 3};
	static const int8_t i8[] = {0, 127, 1, 2, 3};
	static const int16_t i16[] = {0, 32767, 1, 2, 3};
	static const int32_t i32[] = {0, 126463, 65536, 70000, 3};
	static const int64_t i64[] = {0, 126463, 65536, 70000, 3};
	static const uint16_t u16[] = {0, 65535, 1, 40000, 3};
	static const struct { int dtype; const void *data; size_t size; int32_t largest; int64_t fourth; } cases[] = {
		{1, u8, sizeof u8, 255, 2}, {2, i8, sizeof i8, 127, 2}, {3, i16, sizeof i16, 32767, 2},
		{4, i32, sizeof i32, 126463, 70000}, {5, i64, sizeof i64, 126463, 70000}, {8, u16, sizeof u16, 65535, 40000},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		struct index_file idx;
		struct tokens t;
		int32_t out[5];
		make_index(&idx, cases[i].dtype, 3, lengths, 4, documents);
		put_file(at("t.idx"), idx.bytes, idx.n + (i % 2 ? 3 : 0)); /* with and without modes */
		put_file(at("t.bin"), cases[i].data, cases[i].size);
		if (tokens_open(&t, at("t"), "none", cases[i].largest + 1) < 0)
			fail_msg("%s", error_text);
		assert_true(t.count == 5 && t.documents == 3 && t.dtype == cases[i].dtype && !*t.tokenizer);
		assert_int_equal(tokens_read(&t, 0, 5, out), 0);
		assert_true(out[0] == 0 && out[1] == cases[i].largest && out[3] == cases[i].fourth && out[4] == 3);
		assert_int_equal(tokens_read(&t, 4, 1, out), 0);
		assert_int_equal(out[0], 3);
		t.vocab_size = cases[i].largest; /* as if the file had been changed since it was opened */
		assert_int_equal(tokens_read(&t, 0, 5, out), -1);
		expect_error("t.bin: token 1: id ");
		tokens_close(&t);
		assert_int_equal(tokens_open(&t, at("t"), "none", cases[i].largest), -1);
		assert_true(!t.bin.data && !t.count && !t.ids);
		char expected[100];
		snprintf(expected, sizeof expected, "t.bin: token 1: id %d is outside the vocabulary of %d", cases[i].largest,
				cases[i].largest);
		expect_error(expected);
	}
	/* Negative ids, and ids beyond 32 bits. */
	static const struct { int dtype; int64_t id; const char *error; } bad[] = {
		{2, -1, "token 4: id -1 "}, {3, -300, "token 4: id -300 "}, {4, -5, "token 4: id -5 "},
		{5, -5, "token 4: id -5 "},
		{5, INT64_MIN, "token 4: id -9223372036854775808 "}, {5, INT64_C(1) << 32, "token 4: id 4294967296 "},
	};
	for (int i = 0; i < COUNT(bad); i++) {
		int width = token_types[bad[i].dtype].size;
		uint8_t data[40] = {0};
		struct index_file idx;
		struct tokens t;
		make_index(&idx, bad[i].dtype, 3, lengths, 4, documents);
		put_file(at("t.idx"), idx.bytes, idx.n);
		memcpy(data + 4 * width, &bad[i].id, width);
		put_file(at("t.bin"), data, 5 * width);
		assert_int_equal(tokens_open(&t, at("t"), "none", INT32_MAX), -1);
		expect_error(bad[i].error);
	}
}

static void tokens_broken(void **state)
{
	(void)state;
	static const int32_t lengths[] = {2, 0, 3};
	static const int64_t documents[] = {0, 1, 3};
	static const uint16_t ids[] = {1, 2, 3, 4, 256};
	struct index_file good, bad;
	struct tokens t;
	make_index(&good, 8, 3, lengths, 3, documents);
	put_file(at("t.bin"), ids, sizeof ids);
	/* Offsets: lengths 34, pointers 46, documents 70, end 94. */
	static const struct { int offset; int64_t value; int width; const char *error; } cases[] = {
		{0, 'X', 1, "not a Megatron index"}, {8, 1, 1, "not a Megatron index"}, {9, 2, 8, "version 2; expected 1"},
		{17, 0, 1, "unknown dtype code 0"}, {17, 6, 1, "dtype float64"}, {17, 7, 1, "dtype float32"},
		{17, 9, 1, "unknown dtype code 9"}, {17, 255, 1, "unknown dtype code 255"},
		{17, 4, 1, "expected 8, where the one before ends"},
		{18, -1, 8, "do not fit"}, {18, 4, 8, "do not fit"}, {18, 2, 8, "12 bytes after the document index"},
		{18, INT64_C(0x1555555555555556), 8, "do not fit"}, {26, -1, 8, "do not fit"},
		{26, INT64_C(1) << 61, 8, "do not fit"},
		{26, 4, 8, "do not fit"}, {26, 2, 8, "8 bytes after the document index"},
		{34, -1, 4, "sequence 0: length -1"}, {34, 3, 4, "sequence 1: begins at byte 4; expected 6"},
		{42, 2, 4, "have 8 bytes but the .bin file has 10"}, {42, 4, 4, "sequence 2: 4 tokens at byte 4 reach beyond"},
		{42, INT32_MAX, 4, "reach beyond"}, {46, 2, 8, "sequence 0: begins at byte 2; expected 0"},
		{62, -4, 8, "sequence 2: begins at byte -4"}, {70, 1, 8, "document entry 0 is 1"},
		{70, -1, 8, "document entry 0 is -1"},
		{78, 4, 8, "document entry 1 is 4"}, {78, -1, 8, "document entry 1 is -1"},
		{86, 0, 8, "document entry 2 is 0"},
		{86, 2, 8, "document entry 2 is 2"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		bad = good;
		memcpy(bad.bytes + cases[i].offset, &cases[i].value, cases[i].width);
		put_file(at("t.idx"), bad.bytes, bad.n);
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
		expect_error("t.idx: ");
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
		expect_error(cases[i].error);
		assert_null(t.bin.data);
	}
	for (size_t n = 0; n < good.n + 8; n++) {
		put_file(at("t.idx"), good.bytes, n);
		if (n == good.n || n == good.n + 3) { /* whole; with modes */
			assert_int_equal(tokens_open(&t, at("t"), "none", 257), 0);
			tokens_close(&t);
		} else {
			assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
			expect_error("t.idx: ");
		}
	}
	put_file(at("t.idx"), good.bytes, good.n);
	for (size_t n = 0; n < sizeof ids; n++) {
		put_file(at("t.bin"), ids, n);
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
		expect_error("t.idx: |.bin file");
	}
	make_index(&good, 8, 0, NULL, 0, NULL);
	put_file(at("t.idx"), good.bytes, good.n);
	put_file(at("t.bin"), ids, 0);
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("no document index");
	unlink(at("t.idx"));
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("t.idx: cannot open");
	assert_int_equal(tokens_open(&t, at("u"), "none", 257), -1);
	expect_error("u.bin: cannot open");
	assert_int_equal(mkdir(at("v.bin"), 0777), 0);
	assert_int_equal(tokens_open(&t, at("v"), "none", 257), -1);
	expect_error("v.bin: expected a file, found a directory");
}

/* Tokenizes files, opens the result and compares the tokens, written as text with | for the end of a document. */
static void check_tokens(int num_files, char **files, const char *expected, size_t length, int documents)
{
	struct tokens t;
	struct tokenized result;
	if (tokenize_files(at("out/deep/t"), "byte", NULL, false, NULL, num_files, files, &result) < 0 ||
			tokens_open(&t, at("out/deep/t"), "none", 257) < 0)
		fail_msg("%s", error_text);
	assert_int_equal(t.count, length);
	assert_int_equal(t.documents, documents);
	assert_true(result.documents == documents && result.tokens == t.count && result.bytes == t.count - documents);
	assert_string_equal(t.tokenizer, "byte");
	assert_int_equal(t.crc32, crc32_z(0, t.bin.data, t.bin.size));
	int32_t *ids = allocate(length * sizeof *ids);
	assert_int_equal(tokens_read(&t, 0, length, ids), 0);
	for (size_t i = 0; i < length; i++)
		assert_int_equal(ids[i], expected[i] == '|' ? 256 : (uint8_t)expected[i]);
	free(ids);
	tokens_close(&t);
	assert_false(exists(at("out/deep/t.mask.bin")) || holds_temporary(at("out/deep")));
}

static void tokenize_good(void **state)
{
	(void)state;
	put_file(at("a.txt"), "h\1\xff\n", 4);
	put_string(at("empty.txt"), "");
	put_string(at("b.jsonl"), "{\"text\":\"one\"}\n\n  \t\r\n"
			"{\"id\":99999999999999999999999,\"text\":\"\\u00e9\\n\\u0000\\ud83d\\ude00\"}\r\n"
			"{\"text\":\"\"}\n{\"text\":\"last\",\"text2\":[1,{}]}");
	char a[PATH_LEN], b[PATH_LEN], e[PATH_LEN], big[PATH_LEN];
	strcpy(a, at("a.txt")), strcpy(b, at("b.jsonl")), strcpy(e, at("empty.txt")), strcpy(big, at("big.txt"));
	static const char both[] = "h\1\xff\n|one|\xc3\xa9\n\0\xf0\x9f\x98\x80|last|";
	check_tokens(3, (char *[]){a, e, b}, both, sizeof both - 1, 4);
	check_tokens(1, (char *[]){a}, "h\1\xff\n|", 5, 1); /* replaces */

	/* Longer than a sequence: 0, 1 and 2 cuts, at the cut and beside it. */
	static const int sizes[] = {SEQUENCE_MAX - 1, SEQUENCE_MAX, SEQUENCE_MAX + 1, 2 * SEQUENCE_MAX,
		2 * SEQUENCE_MAX + 1, 3000000};
	for (int i = 0; i < COUNT(sizes); i++) {
		int n = sizes[i];
		char *text = allocate(n + 6);
		for (int k = 0; k < n; k++)
			text[k] = 'a' + k % 26;
		put_file(big, text, n);
		memcpy(text + n, "|h\1\xff\n|", 6);
		check_tokens(2, (char *[]){big, a}, text, n + 6, 2);
		free(text);
		size_t size;
		uint8_t *idx = get_file(at("out/deep/t.idx"), &size);
		assert_int_equal(load_i64(idx + 18), n / SEQUENCE_MAX + 2); /* the end token counts too */
		free(idx);
	}
}

/* A tokenizer whose path is not UTF-8: the manifest, which is JSON, tells all the same what made the ids. */
static void tokenize_foreign_path(void **state)
{
	(void)state;
	char dir[PATH_LEN], text[PATH_LEN], expected[PATH_LEN];
	struct tokenized result;
	struct tokens t;
	strcpy(dir, at("tok\xff")), strcpy(text, put_string(at("a\xfe.txt"), "some text"));
	strcpy(expected, at("tok\xef\xbf\xbd"));
	assert_int_equal(mkdir(dir, 0777), 0);
	assert_int_equal(copy_file("tests/fixtures/tokenizer/tokenizer.json", at("tok\xff/tokenizer.json")), 0);
	if (tokenize_files(at("t\xff"), dir, NULL, false, NULL, 1, (char *[]){text}, &result) < 0 ||
			tokens_open(&t, at("t\xff"), "none", INT32_MAX) < 0)
		fail_msg("%s", error_text);
	struct tokenizer *tokenizer = tokenizer_open(dir);
	assert_string_equal(t.tokenizer, expected);
	assert_int_equal(t.tokenizer_hash, tokenizer_hash(tokenizer));
	json_t *manifest = json_read(at("t\xff.json"));
	assert_int_equal(json_integer_value(json_object_get(manifest, "vocab_size")), tokenizer_size(tokenizer));
	json_decref(manifest);
	tokenizer_close(tokenizer);
	tokens_close(&t);
}

/* Makes a file as old as that. */
static void set_time(const char *path, struct timespec when)
{
	assert_int_equal(utimensat(AT_FDCWD, path, (struct timespec[]){when, when}, 0), 0);
}

/* The tokens of a file as text: learned ones between brackets, | for the end of a document. */
static const char *show_tokens(const char *prefix)
{
	static char out[1024];
	struct tokens t;
	int n = 0;
	if (tokens_open(&t, prefix, "none", 257) < 0)
		fail_msg("%s", error_text);
	assert_true(t.count < 400);
	for (int64_t i = 0; i < t.count; i++) {
		const bool is = !t.loss_mask || t.loss_mask[i] == LOSS_TOKEN;
		const bool was = i && (!t.loss_mask || t.loss_mask[i - 1] == LOSS_TOKEN);
		if (is != was)
			out[n++] = is ? '[' : ']';
		if (t.loss_mask && t.loss_mask[i] == LOSS_END)
			out[n++] = '^';
		out[n++] = id_at(&t, i) == 256 ? '|' : id_at(&t, i);
	}
	n -= out[n - 1] == '[';
	out[n] = 0;
	tokens_close(&t);
	return out;
}

#define USER "{\"role\":\"user\",\"content\":\"u\"}"
#define SAYS(role, content) "{\"role\":\"" role "\",\"content\":\"" content "\"}"

#define WEIGHS(role, content, weight) "{\"role\":\"" role "\",\"content\":\"" content "\",\"weight\":" weight "}"

/* Conversations in Ling's chat form, of which only the assistant's words are learned; beside a plain text, all of
 * which is. */
static void tokenize_chat(void **state)
{
	(void)state;
	struct tokenized result;
	char b[PATH_LEN];
	strcpy(b, at("b.jsonl"));
	static const struct { const char *lines, *expected; } cases[] = {
		{"{\"prompt\":\"p\",\"completion\":\"c\"}", "<role>HUMAN</role>p<role>ASSISTANT</role>[c|"},
		{"{\"prompt\":\"\",\"completion\":\"\",\"id\":1}", "<role>HUMAN</role><role>ASSISTANT</role>[|"},
		{"{\"text\":\"t\",\"prompt\":5}\n{\"messages\":[" SAYS("system", "s") "," SAYS("User",
			" u ") "," SAYS("assistant", "a") "]}\n{\"text\":\"v\"}",
			"[t|]<role>SYSTEM</role>s<role>HUMAN</role> u <role>ASSISTANT</role>[a|v|"},
		{"{\"messages\":[" USER "," SAYS("ASSISTANT", "a") "," USER "," SAYS("assistant", "b") "]}",
			"<role>HUMAN</role>u<role>ASSISTANT</role>[a]^<role>HUMAN</role>u<role>ASSISTANT</role>[b|"},
		/* weight 0 masks a reply, and its end; null is none; two replies in a row end one by one */
		{"{\"messages\":[" USER "," WEIGHS("assistant", "a", "0") "," USER "," WEIGHS("assistant", "b", "1.0") ","
			WEIGHS("assistant", "", "null") "," WEIGHS("user", "u", "0") "]}",
			"<role>HUMAN</role>u<role>ASSISTANT</role>a<role>HUMAN</role>u<role>ASSISTANT</role>[b]"
			"^<role>ASSISTANT</role>^<role>HUMAN</role>u|"},
		{"{\"messages\":[" SAYS("assistant", "a") ",{\"role\":\"assistant\",\"content\":\"b\",\"train\":false}]}",
			"<role>ASSISTANT</role>[a]^<role>ASSISTANT</role>b|"},
		{"{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"training\":false},"
			"{\"role\":\"assistant\",\"content\":\"b\",\"loss_scale\":0},"
			"{\"role\":\"assistant\",\"content\":\"c\",\"loss_weight\":1}],\"label\":true,\"weight\":1.0}",
			"<role>ASSISTANT</role>a<role>ASSISTANT</role>b<role>ASSISTANT</role>[c|"},
		/* ShareGPT, and its list with the other spelling */
		{"{\"conversations\":[{\"from\":\"system\",\"value\":\"s\"},{\"from\":\"human\",\"value\":\"h\"},"
			"{\"from\":\"gpt\",\"value\":\"g\",\"weight\":1}," SAYS("user", "u") "," SAYS("assistant", "a") "]}",
			"<role>SYSTEM</role>s<role>HUMAN</role>h<role>ASSISTANT</role>[g]^"
			"<role>HUMAN</role>u<role>ASSISTANT</role>[a|"},
		/* text parts; developer; members that are null, empty, or say nothing about the text */
		{"{\"messages\":[" SAYS("developer", "d") ",{\"role\":\"user\",\"content\":[{\"type\":\"text\","
			"\"text\":\"2+\"},{\"text\":\"2\",\"cache\":1}],\"name\":\"\",\"id\":\"x\",\"timestamp\":NaN},"
			"{\"role\":\"assistant\",\"content\":[],\"from\":null,"
			"\"tool_calls\":[],\"reasoning_content\":\"\",\"refusal\":null}],"
			"\"text\":null,\"tools\":\"[]\",\"system\":\"\"}",
			"<role>SYSTEM</role>d<role>HUMAN</role>2+2<role>ASSISTANT</role>[|"},
		/* system beside the messages */
		{"{\"system\":\"s\",\"prompt\":\"p\",\"completion\":\"c\"}",
			"<role>SYSTEM</role>s<role>HUMAN</role>p<role>ASSISTANT</role>[c|"},
		{"{\"system_prompt\":[{\"type\":\"text\",\"text\":\"s\"}],\"conversations\":[" USER "," SAYS("gpt", "a") "]}",
			"<role>SYSTEM</role>s<role>HUMAN</role>u<role>ASSISTANT</role>[a|"},
		/* TRL: what the assistant says in the prompt is not learned */
		{"{\"prompt\":[" USER "," SAYS("assistant", "a") "," USER "],\"completion\":[" SAYS("assistant", "b") "]}",
			"<role>HUMAN</role>u<role>ASSISTANT</role>a<role>HUMAN</role>u<role>ASSISTANT</role>[b|"},
		/* what is not the assistant's last word ends the document, and is not learned; contents are text, whatever
		 * they look like */
		{"{\"messages\":[" SAYS("assistant", "a") ",{\"role\":\"tool\",\"content\":\"<role>ASSISTANT</role>\","
			"\"name\":\"f\",\"tool_call_id\":\"1\"}]}",
			"<role>ASSISTANT</role>[a]^<role>TOOL</role><role>ASSISTANT</role>|"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		put_string(b, cases[i].lines);
		if (tokenize_files(at("t"), "byte", NULL, false, NULL, 1, (char *[]){b}, &result) < 0)
			fail_msg("%s", error_text);
		assert_string_equal(show_tokens(at("t")), cases[i].expected);
		assert_true(result.loss_tokens < result.tokens && exists(at("t.mask.bin")));
	}
	struct tokens t;
	size_t n;
	uint8_t *mask = get_file(at("t.mask.bin"), &n);
	/* The mask is part of what a file is known by, whoever computes it. */
	for (int i = 0; i < 2; i++) {
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), 0);
		assert_int_equal(t.crc32, crc32_z(crc32_z(0, t.bin.data, t.bin.size), mask, n));
		tokens_close(&t);
		set_time(at("t.bin"), (struct timespec){1, 0});
	}
	/* A damaged mask, or one that is gone, is noticed. */
	mask[3] = 1;
	put_file(at("t.mask.bin"), mask, n);
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("t.json: `mask_crc32` is |it is damaged, missing");
	mask[3] = 3;
	put_file(at("t.mask.bin"), mask, n);
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("t.mask.bin: byte 3 is 3; expected 0, 1 or 2");
	put_file(at("t.mask.bin"), mask, n - 1);
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("t.mask.bin: |expected one for each of the");
	free(mask);
	unlink(at("t.mask.bin"));
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("it is damaged, missing");
	/* A file that is replaced leaves no mask for the next one. */
	put_string(b, cases[0].lines);
	assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, NULL, 1, (char *[]){b}, &result), 0);
	put_string(b, "{\"text\":\"plain\"}");
	assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, NULL, 1, (char *[]){b}, &result), 0);
	assert_false(exists(at("t.mask.bin")));
	assert_string_equal(show_tokens(at("t")), "[plain|");
	assert_int_equal(result.loss_tokens, 6);
}

/* Behind each learned reply the target is the end token, although the next token opens the next round; and a mask that
 * says so needs the id. */
static void end_targets(void **state)
{
	(void)state;
	enum { L = 84 };               /* tokens less one */
	struct tokenized result;
	struct tokens t;
	char b[PATH_LEN];
	int32_t input[L], target[L], document[L];
	strcpy(b, at("b.jsonl"));
	put_string(b, "{\"messages\":[" USER "," SAYS("assistant", "a") "," USER "," SAYS("assistant", "b") "]}");
	assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, NULL, 1, (char *[]){b}, &result), 0);
	assert_true(result.loss_tokens == 4);
	for (int i = 0; i < 2; i++) { /* the second time without a manifest that vouches for the files */
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), 0);
		assert_int_equal(t.count, L + 1);
		for (int k = 0; k < 2; k++) {
			int counted = 0;
			t.document_mask = k;
			assert_int_equal(read_window(&t, 0, L, NULL, input, target, k ? document : NULL), L);
			for (int p = 0; p < L; p++) {
				const bool says_a = input[p] == 'a', says_b = input[p] == 'b';
				counted += target[p] >= 0;
				if (says_a || says_b)
					assert_int_equal(target[p], 256);
				if (says_a)
					assert_true(input[p + 1] == '<' && target[p - 1] == 'a');
			}
			assert_int_equal(counted, 4);
		}
		tokens_close(&t);
		set_time(at("t.bin"), (struct timespec){1, 0});
	}
	/* An end token outside the vocabulary, or none. */
	size_t n;
	char *manifest = (char *)get_file(at("t.json"), &n), *at_end = strstr(manifest, "\"end_token\": 256");
	assert_non_null(at_end);
	at_end[15] = '9';
	put_file(at("t.json"), manifest, n);
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("t.json: `end_token` is 259|outside the vocabulary of 257");
	memcpy(at_end, "\"end_tokem\"", 11);
	put_file(at("t.json"), manifest, n);
	set_time(at("t.bin"), (struct timespec){2, 0});
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("t.mask.bin: byte |is 2, which makes the end token a target; expected its id as `end_token` in");
	free(manifest);
}

/* Longer than a piece that is written at once, and than a sequence: the mask is a byte a token throughout. */
static void tokenize_long_chat(void **state)
{
	(void)state;
	struct tokenized result;
	struct tokens t;
	const int n = SEQUENCE_MAX + 9000;
	char b[PATH_LEN], *line = allocate(2 * n + 100);
	strcpy(b, at("b.jsonl"));
	for (int all = 0; all < 2; all++) {
		int size = sprintf(line, "{\"text\":\"12345\"}\n{\"prompt\":\"");
		memset(line + size, 'p', all ? 1 : n);
		size += all ? 1 : n;
		size += sprintf(line + size, "\",\"completion\":\"");
		memset(line + size, 'c', all ? n : 1);
		size += all ? n : 1;
		size += sprintf(line + size, "\"}");
		put_file(b, line, size);
		assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, NULL, 1, (char *[]){b}, &result), 0);
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), 0);
		assert_int_equal(result.loss_tokens, 6 + (all ? n : 1) + 1);
		for (int64_t i = 0; i < t.count; i++)
			assert_int_equal(t.loss_mask[i], i < 6 || i >= t.count - 1 - (all ? n : 1));
		tokens_close(&t);
	}
	free(line);
}

/* A prompt for a reply ends with its opening; ids and marks are appended to what is there. */
static void chat_prompt(void **state)
{
	(void)state;
	struct tokenizer *t = tokenizer_open("byte");
	struct encoder *e = encoder_open(t);
	struct ids ids = {0};
	struct text loss_mask = {0};
	const struct message messages[] = {{.role = "system", .content = "s\0s", .content_size = 3},
		{.role = "assistant", .content = "a", .content_size = 1}, {.role = "human", .content = "h", .content_size = 1}},
		bad[] = {{.role = "boss", .content = "b", .content_size = 1}};
	assert_int_equal(encode(e, "xy", 2, false, &ids), 0);
	assert_int_equal(chat_encode(e, messages, 3, true, &ids, &loss_mask), 0);
	static const char expected[] =
			"xy<role>SYSTEM</role>s\0s<role>ASSISTANT</role>a<role>HUMAN</role>h<role>ASSISTANT</role>";
	assert_int_equal(ids.count, sizeof expected - 1);
	assert_int_equal(loss_mask.size, ids.count);
	for (int64_t i = 0; i < ids.count; i++) {
		assert_int_equal(ids.id[i], (uint8_t)expected[i]);
		assert_int_equal(loss_mask.data[i], expected[i] == 'a' ? LOSS_TOKEN :
				i && expected[i - 1] == 'a' && expected[i] == '<' ? LOSS_END : LOSS_NONE);
	}
	/* A reply that has begun is continued: no second opening, and no end. */
	ids.count = 0;
	assert_int_equal(chat_encode(e, messages, 2, true, &ids, NULL), 0);
	assert_int_equal(ids.count, sizeof "<role>SYSTEM</role>s\0s<role>ASSISTANT</role>a" - 1);
	assert_int_equal(ids.id[ids.count - 1], 'a');
	ids.count = 0;
	assert_int_equal(chat_encode(e, messages, 2, false, &ids, NULL), 0);
	assert_true(ids.id[ids.count - 1] == 256 && ids.id[ids.count - 2] == 'a');
	assert_int_equal(chat_encode(e, bad, 1, true, &ids, NULL), -1);
	expect_error("message 1: the role is `boss`");
	free(ids.id), free(loss_mask.data);
	encoder_close(e);
	tokenizer_close(t);
}

/* llm.c's two kinds of files, and bare ids. */
static void tokens_formats(void **state)
{
	(void)state;
	static const uint16_t u16[] = {5, 300, 65535, 0};
	static const uint32_t u32[] = {5, 300, 128255, 0};
	struct { int32_t header[256]; uint8_t ids[16]; } file = {.header = {20240520, 1, 4}};
	struct tokens t;
	int32_t out[4];
	memcpy(file.ids, u16, sizeof u16);
	put_file(at("gpt.bin"), &file, 1024 + sizeof u16);
	for (int i = 0; i < 2; i++) { /* the second time by the manifest */
		assert_int_equal(tokens_open(&t, at("gpt.bin"), "none", 65536), 0);
		assert_true(t.count == 4 && t.documents == -1 && !t.loss_mask);
		assert_int_equal(tokens_read(&t, 1, 3, out), 0);
		assert_true(out[0] == 300 && out[1] == 65535 && out[2] == 0);
		tokens_close(&t);
		assert_true(exists(at("gpt.json")));
	}
	assert_int_equal(tokens_open(&t, at("gpt.bin"), "none", 65535), -1);
	expect_error("gpt.bin: token 2: id 65535 is outside the vocabulary of 65535");

	memcpy(file.header, (int32_t[]){20240801, 7, 4}, 12);
	memcpy(file.ids, u32, sizeof u32);
	put_file(at("llama"), &file, 1024 + sizeof u32);
	assert_int_equal(tokens_open(&t, at("llama"), "none", 128256), 0);
	assert_int_equal(tokens_read(&t, 0, 4, out), 0);
	assert_true(out[2] == 128255 && t.count == 4);
	tokens_close(&t);
	assert_true(exists(at("llama.json")));

	static const struct { int at; int32_t value; size_t size; const char *error; } bad[] = {
		{1, 1, 1040, "an llm.c file of version 1; expected 7"}, {0, 20240520, 1040, "version 7; expected 1"},
		{2, 5, 1040, "tells of 5 ids of 4 bytes; 16 bytes"},
		{2, -1, 1040, "tells of -1 ids"}, {2, 4, 1036, "tells of 4 ids"},
		{0, 20240802, 1040, "found neither an index"}, {2, 4, 1023, "found neither an index"},
		{2, 4, 0, "found neither an index"},
	};
	for (int i = 0; i < COUNT(bad); i++) {
		const int32_t good = file.header[bad[i].at];
		file.header[bad[i].at] = bad[i].value;
		put_file(at("bad.bin"), &file, bad[i].size);
		file.header[bad[i].at] = good;
		assert_int_equal(tokens_open(&t, at("bad.bin"), "none", 128256), -1);
		expect_error("bad.bin: ");
		assert_int_equal(tokens_open(&t, at("bad.bin"), "none", 128256), -1);
		expect_error(bad[i].error);
	}

	put_file(at("bare.bin"), u16, sizeof u16);
	assert_int_equal(tokens_open(&t, at("bare.bin"), "uint16", 65536), 0);
	assert_int_equal(tokens_read(&t, 0, 4, out), 0);
	assert_true(t.count == 4 && t.documents == -1 && out[2] == 65535);
	tokens_close(&t);
	assert_int_equal(tokens_open(&t, at("bare.bin"), "int32", 65536), -1); /* 0x012c0005 */
	expect_error("bare.bin: token 0: id 19660805 ");
	assert_int_equal(tokens_open(&t, at("bare.bin"), "int16", 65536), -1);
	expect_error("bare.bin: token 2: id -1 ");
	assert_int_equal(tokens_open(&t, at("bare.bin"), "uint99", 65536), -1);
	expect_error("dtype `uint99` is not known");
	put_file(at("bare.bin"), u16, 7);
	assert_int_equal(tokens_open(&t, at("bare.bin"), "uint16", 65536), -1);
	expect_error("bare.bin: its 7 bytes are no whole number of uint16 ids");
}

/* As long as a manifest names the files as they are, opening reads none of the ids; but ids that are read are checked.
 * */
static void manifest_vouches(void **state)
{
	(void)state;
	static uint16_t ids[1000];
	struct tokens t;
	int32_t out[2];
	struct file_state before;
	char path[PATH_LEN];
	strcpy(path, at("t.bin"));
	put_file(path, ids, sizeof ids);
	assert_int_equal(tokens_open(&t, path, "uint16", 10), 0);
	const uint32_t crc = t.crc32;
	assert_int_equal(crc, crc32_z(0, (uint8_t *)ids, sizeof ids));
	tokens_close(&t);
	assert_int_equal(file_state_read(&before, path), 0);
	ids[500] = 11;
	put_file(path, ids, sizeof ids);
	set_time(path, before.modified);
	assert_int_equal(tokens_open(&t, path, "uint16", 10), 0);
	assert_int_equal(t.crc32, crc);
	assert_int_equal(tokens_read(&t, 498, 2, out), 0);
	assert_int_equal(tokens_read(&t, 499, 2, out), -1);
	expect_error("t.bin: token 500: id 11 is outside the vocabulary of 10");
	tokens_close(&t);
	/* A nanosecond, or a byte, makes it another file. What nobody claims is found anew, and left for the next time. */
	set_time(path, (struct timespec){before.modified.tv_sec, before.modified.tv_nsec ^ 1});
	assert_int_equal(tokens_open(&t, path, "uint16", 10), -1);
	expect_error("t.bin: token 500: id 11 ");
	assert_int_equal(tokens_open(&t, path, "uint16", 12), 0);
	assert_int_not_equal(t.crc32, crc);
	tokens_close(&t);
	assert_int_equal(tokens_open(&t, path, "uint16", 11), -1); /* from the manifest */
	expect_error("t.bin: token 500: id 11 ");
	/* What cannot be left is not missed; nor is the manifest of another type. */
	unlink(at("t.json"));
	limit_files(10);
	assert_int_equal(tokens_open(&t, path, "uint16", 12), 0);
	limit_files(RLIM_INFINITY);
	tokens_close(&t);
	assert_false(exists(at("t.json")));
	assert_int_equal(tokens_open(&t, path, "uint16", 12), 0);
	tokens_close(&t);
	assert_int_equal(tokens_open(&t, path, "uint8", 12), 0);
	assert_int_equal(t.count, 2000);
	tokens_close(&t);
}

/* A file of more than 4 GiB, most of it a hole, for which a manifest vouches. */
static void tokens_large(void **state)
{
	(void)state;
	const int64_t count = INT64_C(5) << 29; /* 5 GiB */
	struct manifest m = {.dtype = UINT32, .tokens = count / 2, .documents = -1, .largest_id = 70000,
			.loss_tokens = count / 2};
	struct tokens t;
	int32_t out[4];
	char path[PATH_LEN];
	strcpy(path, at("t.bin"));
	int fd = open(path, O_RDWR | O_CREAT, 0666);
	const uint32_t ids[] = {7, 70000, 9};
	assert_int_equal(ftruncate(fd, 2 * count), 0);
	assert_int_equal(pwrite(fd, ids, sizeof ids, 2 * count - sizeof ids), sizeof ids);
	close(fd);
	assert_int_equal(token_file_states(m.files, path, at("t"), BARE_IDS), 0);
	json_t *json = manifest_to_json(&m);
	assert_int_equal(json_write(at("t.json"), json), 0);
	json_decref(json);
	assert_int_equal(tokens_open(&t, path, "uint32", 70001), 0);
	assert_int_equal(t.count, count / 2);
	t.document_token = 70000;
	assert_int_equal(tokens_read(&t, count / 2 - 4, 4, out), 0);
	assert_true(out[0] == 0 && out[1] == 7 && out[2] == 70000 && out[3] == 9);
	int32_t document[3];
	assert_int_equal(tokens_documents(&t, count / 2 - 4, 3, document, out), 0);
	assert_true(document[0] == 0 && document[2] == 0 && out[2] == -1 && out[1] == 7);
	tokens_close(&t);
}

/* Documents of windows against plain loops: `first` tells whether a token is its document's first. */
static void check_documents(const struct tokens *t, const bool *first, const bool *ends, int64_t count)
{
	for (int64_t n = 1; n < count; n++)
		for (int64_t start = 0; start + n < count; start++) {
			int32_t document[64], target[64], begin = 0;
			memset(target, 0, sizeof target);
			assert_int_equal(tokens_documents(t, start, n, document, target), 0);
			for (int64_t i = 0; i < n; i++) {
				begin = first[start + i] ? i : begin;
				if (document[i] != begin || target[i] != (ends[start + i] ? -1 : 0))
					fail_msg("window %d + %d, token %d: document %d, target %d", (int)start, (int)n, (int)i,
							document[i], target[i]);
			}
		}
}

static void tokens_documents_all(void **state)
{
	(void)state;
	enum { COUNT_IDS = 20 };
	static const uint16_t ids[COUNT_IDS] = {9, 1, 2, 9, 9, 3, 4, 5, 6, 9, 1, 1, 1, 9, 2, 2, 2, 2, 2, 9};
	bool first[COUNT_IDS + 1] = {true}, ends[COUNT_IDS] = {0};
	struct tokens t;
	/* Sequences, of which documents have none, one or several. */
	static const int32_t lengths[] = {3, 0, 1, 6, 2, 4, 0, 4};
	static const int64_t documents[] = {0, 0, 1, 2, 3, 5, 5, 7, 7, 8, 8};
	struct index_file idx;
	make_index(&idx, 8, 8, lengths, 11, documents);
	put_file(at("t.idx"), idx.bytes, idx.n);
	put_file(at("t.bin"), ids, sizeof ids);
	for (int at = 0, i = 0; i < 8; at += lengths[i++])
		for (int k = 0; k < 11; k++)
			if (documents[k] == i && lengths[i])
				first[at] = true;
	for (int i = 0; i < COUNT_IDS - 1; i++)
		ends[i] = first[i + 1];
	assert_int_equal(tokens_open(&t, at("t"), "none", 10), 0);
	check_documents(&t, first, ends, COUNT_IDS);
	/* An index that changes under the reader's hands is an error. */
	tokens_close(&t);
	struct file_state unchanged;
	assert_int_equal(file_state_read(&unchanged, at("t.idx")), 0);
	memset(idx.bytes + 34 + 12 * 8 + 8 * 3, 0xff, 8);
	put_file(at("t.idx"), idx.bytes, idx.n);
	set_time(at("t.idx"), unchanged.modified);
	assert_int_equal(tokens_open(&t, at("t"), "none", 10), 0);
	int32_t document[19], target[19];
	assert_int_equal(tokens_documents(&t, 0, 19, document, target), -1);
	expect_error("t.bin: its index was changed while it was in use");
	/* The numbers in its header are not read again. */
	memcpy(idx.bytes + 34 + 12 * 8 + 8 * 3, &(int64_t){2}, 8);
	memset(idx.bytes + 18, 0x7f, 16);
	put_file(at("t.idx"), idx.bytes, idx.n);
	assert_int_equal(tokens_documents(&t, 0, 19, document, target), 0);
	tokens_close(&t);

	/* Bare ids: 9 ends a document. llm.c's: it begins one, and is learned as what ends the one before. */
	for (int i = 0; i < COUNT_IDS; i++)
		first[i] = i == 0 || ids[i - 1] == 9, ends[i] = ids[i] == 9;
	assert_int_equal(tokens_open(&t, at("t.bin"), "uint16", 10), 0);
	t.document_token = 9;
	check_documents(&t, first, ends, COUNT_IDS);
	tokens_close(&t);
	struct { int32_t header[256]; uint16_t ids[COUNT_IDS]; } file = {.header = {20240520, 1, COUNT_IDS}};
	memcpy(file.ids, ids, sizeof ids);
	put_file(at("l.bin"), &file, sizeof file);
	for (int i = 0; i < COUNT_IDS; i++)
		first[i] = ids[i] == 9, ends[i] = false;
	assert_int_equal(tokens_open(&t, at("l.bin"), "none", 10), 0);
	t.document_token = 9;
	check_documents(&t, first, ends, COUNT_IDS);
	tokens_close(&t);
}

/* ---- packed documents ---- */

enum { PACKED_L = 256, PACKED_DOCUMENTS = 10000 };

/* Writes a token file of documents with these lengths; token i has id i, so a window tells where it is from. */
static void put_documents(const int32_t *length, int n)
{
	int64_t count = 0;
	uint8_t *index = calloc(1, 34 + 12 * n + 8 * (n + 1));
	memcpy(index, "MMIDIDX", 7);
	index[9] = 1, index[17] = INT32;
	memcpy(index + 18, &(int64_t){n}, 8), memcpy(index + 26, &(int64_t){n + 1}, 8);
	for (int i = 0; i <= n; i++) {
		memcpy(index + 34 + 12 * n + 8 * i, &(int64_t){i}, 8);
		if (i == n)
			break;
		memcpy(index + 34 + 4 * i, &length[i], 4);
		memcpy(index + 34 + 4 * n + 8 * i, &(int64_t){4 * count}, 8);
		count += length[i];
	}
	int32_t *ids = malloc((count + 1) * sizeof *ids);
	for (int64_t i = 0; i < count; i++)
		ids[i] = i;
	put_file(at("t.idx"), index, 34 + 12 * n + 8 * (n + 1));
	put_file(at("t.bin"), ids, count * sizeof *ids);
	free(index), free(ids);
}

static struct config packed_config(void)
{
	struct config c = {.model.vocab_size = INT32_MAX, .data = {.num_train = 1, .tokenizer = "none", 
			.seq_len = PACKED_L, .packing = PACKING_DOCUMENTS, .shuffle = true, .document_token = -1},
			.train.seed = 7};
	c.data.train[0] = (struct data_source){.dtype = "none", .weight = 1};
	strcpy(c.data.train[0].path, at("t"));
	return c;
}

/* Checks a window: whole documents (of at most L + 1 tokens), each seen once more in `seen`, then padding without
 * targets. document_of [tokens]: which document a token is of; begin [documents + 1]. Returns the places of
 * padding. */
static int check_packed(const int32_t *input, const int32_t *target, const int32_t *document,
		const int32_t *document_of, const int32_t *begin, int *seen)
{
	int i = 0;
	while (i < PACKED_L && target[i] >= 0) {
		const int d = document_of[input[i]], first = i;
		assert_int_equal(input[i], begin[d]);
		for (; i < PACKED_L && document[i] == first && target[i] >= 0; i++)
			assert_true(input[i] == begin[d] + i - first && target[i] == input[i] + 1);
		assert_int_equal(i - first, begin[d + 1] - begin[d] - 1); /* not cut */
		seen[d]++;
	}
	for (int j = i; j < PACKED_L; j++)
		assert_true(target[j] == -1 && document[j] == i && input[j] == input[j - i]);
	return PACKED_L - i;
}

/* Conversations of log-normal lengths: each document is once in each epoch, none is cut, little is wasted, and a
 * sample depends on its number alone. */
static void packed_documents(void **state)
{
	(void)state;
	static int32_t length[PACKED_DOCUMENTS], begin[PACKED_DOCUMENTS + 1], room[PACKED_DOCUMENTS];
	static int seen[PACKED_DOCUMENTS];
	static real normal[PACKED_DOCUMENTS];
	int32_t input[PACKED_L], target[PACKED_L], document[PACKED_L], again[3 * PACKED_L];
	random_normal(normal, PACKED_DOCUMENTS, &(struct random_stream){.seed = 3}, 0);
	int64_t places = 0;
	int first_fit = 0;
	for (int i = 0; i < PACKED_DOCUMENTS; i++) {
		const double n = exp(log(80) + 0.8 * normal[i]);
		length[i] = n > PACKED_L + 1 ? PACKED_L + 1 : n < 2 ? 2 : (int)n;
		begin[i + 1] = begin[i] + length[i];
		places += length[i] - 1;
		int w = 0;
		while (w < first_fit && room[w] < length[i] - 1)
			w++;
		if (w == first_fit)
			room[first_fit++] = PACKED_L;
		room[w] -= length[i] - 1;
	}
	int32_t *document_of = malloc(begin[PACKED_DOCUMENTS] * sizeof *document_of);
	for (int i = 0; i < PACKED_DOCUMENTS; i++)
		for (int32_t j = begin[i]; j < begin[i + 1]; j++)
			document_of[j] = i;
	put_documents(length, PACKED_DOCUMENTS);
	const struct config c = packed_config();
	struct data_options o;
	struct blend b;
	struct trainer_state s = {0};
	assert_int_equal(data_options_init(&o, &c, "none"), 0);
	assert_int_equal(blend_open(&b, &c, &o), 0);
	blend_begin(&b, &c, &s);
	const int64_t windows = count_windows(&b.files[0], PACKED_L);
	const double wasted = 1 - (double)places / (windows * PACKED_L);
	const double wasted_first_fit = 1 - (double)places / ((double)first_fit * PACKED_L);
	printf("%d documents of log-normal length, windows of %d: %.2f%% padding, first fit without sorting %.2f%%\n",
			PACKED_DOCUMENTS, PACKED_L, 100 * wasted, 100 * wasted_first_fit);
	assert_true(blend_has_documents(&b) && s.sources[0].packed_windows == windows);
	assert_true(wasted >= 0 && wasted < wasted_first_fit && wasted < 0.01);
	char line[PATH_LEN + 320];
	assert_int_equal(describe_windows(line, sizeof line, &b.files[0], PACKED_L), 0);
	assert_non_null(strstr(line, "documents packed: 0 of 10000 documents cut (0.0%), "));
	int moved = 0, exchanged = 0;
	int64_t padding = 0;
	static int32_t first_epoch[PACKED_DOCUMENTS];
	for (int epoch = 0; epoch < 3; epoch++) {
		for (int64_t n = 0; n < windows; n++) {
			struct trainer_state alone = {0}; /* sample n of the epoch, as a run that was stopped before it sees it */
			blend_begin(&b, &c, &alone);
			alone.sources[0].taken = epoch * windows + n;
			const struct blend_sample sample = blend_next(&b, s.sources), other = blend_next(&b, alone.sources);
			const int real_tokens = blend_read(&b, &sample, input, target, document);
			assert_int_equal(blend_read(&b, &other, again, again + PACKED_L, again + 2 * PACKED_L), real_tokens);
			assert_memory_equal(input, again, sizeof input);
			assert_memory_equal(target, again + PACKED_L, sizeof target);
			assert_memory_equal(document, again + 2 * PACKED_L, sizeof document);
			const int padded = check_packed(input, target, document, document_of, begin, seen);
			assert_int_equal(padded, PACKED_L - real_tokens);
			padding += padded;
			moved += epoch > 0 && first_epoch[n] != input[0];
			assert_int_equal(read_window(&b.files[0], sample.window, PACKED_L, NULL, again, target, document),
					real_tokens);
			exchanged += memcmp(again, input, sizeof input) != 0;
			if (epoch == 0)
				first_epoch[n] = input[0];
		}
		for (int i = 0; i < PACKED_DOCUMENTS; i++)
			assert_int_equal(seen[i], epoch + 1);
	}
	assert_int_equal(padding, 3 * (windows * PACKED_L - places));
	assert_true(moved > windows && exchanged > windows); /* each epoch has an order of its own */
	/* another packing, as of a run from before there was a choice, or other documents of the same tokens */
	s.step = 1;
	s.sources[0].packed_windows = 0;
	assert_int_equal(blend_resume(&b, &c, &s, "run", NULL), -1);
	expect_error("are packed into windows; the run of run is with data.packing windows; set it back");
	s.sources[0].packed_windows = windows + 1;
	assert_int_equal(blend_resume(&b, &c, &s, "run", NULL), -1);
	expect_error("t.bin has other documents (");
	s.sources[0].packed_windows = windows;
	assert_int_equal(blend_resume(&b, &c, &s, "run", NULL), 0);
	blend_close(&b);
	free(document_of);
}

/* The windows of a file of documents, the longest first: each goes into the fullest window that has room for it. */
static int best_fit_windows(const int32_t *length, int n)
{
	static int room[300], sorted[300];
	int windows = 0;
	for (int i = 0; i < n; i++) {
		int j = i;
		for (; j > 0 && sorted[j - 1] < length[i] - 1; j--)
			sorted[j] = sorted[j - 1];
		sorted[j] = length[i] - 1;
	}
	for (int i = 0; i < n; i++) {
		int best = -1;
		for (int w = 0; w < windows; w++)
			if (room[w] >= sorted[i] && (best < 0 || room[w] < room[best]))
				best = w;
		if (best < 0)
			room[best = windows++] = PACKED_L;
		room[best] -= sorted[i];
	}
	return windows;
}

static void packing_is_best_fit(void **state)
{
	(void)state;
	static const struct { int32_t length[8]; int n, windows; } cases[] = { /* a document of n tokens has n - 1 places */
		{{201, 151, 107, 57}, 4, 2}, /* exactly full */
		{{201, 151, 41, 37, 36, 36}, 6, 2}, /* 200 + 40 and 150 + 36 + 35 + 35 */
		{{PACKED_L + 1, 2, PACKED_L, 2}, 4, 3}, {{129, 129, 130, 129}, 4, 3},
	};
	static int32_t length[300];
	const struct config c = packed_config();
	struct data_options o;
	struct tokens t;
	assert_int_equal(data_options_init(&o, &c, "none"), 0);
	for (int i = 0; i < COUNT(cases) + 10; i++) {
		int n = COUNT(length), windows;
		const int32_t *documents = length;
		if (i < COUNT(cases)) {
			documents = cases[i].length, n = cases[i].n, windows = cases[i].windows;
			assert_int_equal(best_fit_windows(documents, n), windows);
		} else {
			uint32_t x = i;
			for (int k = 0; k < n; k++)
				x = 1664525 * x + 1013904223, length[k] = 2 + (x >> 8) % (PACKED_L - 20 * (i % 10));
			windows = best_fit_windows(length, n);
		}
		put_documents(documents, n);
		assert_int_equal(open_data(&t, &c.data.train[0], &o, 0), 0);
		assert_int_equal(count_windows(&t, PACKED_L), windows);
		tokens_close(&t);
	}
}

/* Documents of each length have an order of their own, also where there are as many of one length as of another. */
static void lengths_have_orders_of_their_own(void **state)
{
	(void)state;
	enum { EACH = 40 };
	int32_t length[2 * EACH], input[PACKED_L], target[PACKED_L], document[PACKED_L], order[2][EACH];
	int taken[2] = {0, 0}, equal = 0;
	for (int i = 0; i < 2 * EACH; i++)
		length[i] = i < EACH ? PACKED_L + 1 : PACKED_L;
	put_documents(length, 2 * EACH);
	const struct config c = packed_config();
	const struct random_stream shuffle = {.seed = 7, .purpose = RANDOM_SHUFFLE};
	struct data_options o;
	struct tokens t;
	assert_int_equal(data_options_init(&o, &c, "none"), 0);
	assert_int_equal(open_data(&t, &c.data.train[0], &o, 0), 0);
	assert_int_equal(count_windows(&t, PACKED_L), 2 * EACH);
	for (int i = 0; i < 2 * EACH; i++) {
		assert_true(read_window(&t, i, PACKED_L, &shuffle, input, target, document) > 0);
		const int k = *input >= EACH * (PACKED_L + 1), begin = k * EACH * (PACKED_L + 1);
		assert_true(taken[k] < EACH);
		order[k][taken[k]++] = (*input - begin) / length[k * EACH];
	}
	for (int i = 0; i < EACH; i++)
		equal += order[0][i] == order[1][i];
	assert_true(equal < EACH / 2);
	tokens_close(&t);
}

/* Documents that are longer than a window, that have nothing to learn, and files that cannot be packed. */
static void packed_edges(void **state)
{
	(void)state;
	static const int32_t length[] = {0, PACKED_L + 1, 1, PACKED_L + 2, 3 * PACKED_L + 10, 5, 2, PACKED_L};
	const struct config c = packed_config();
	struct data_options o;
	struct tokens t;
	int32_t input[PACKED_L], target[PACKED_L], document[PACKED_L];
	int seen[5 * PACKED_L + PACKED_L * 2] = {0};
	assert_int_equal(data_options_init(&o, &c, "none"), 0);
	put_documents(length, COUNT(length));
	assert_int_equal(open_data(&t, &c.data.train[0], &o, 0), 0);
	/* one; one and a rest of 1; three and a rest of 9; 4; 1; and L - 1, which takes a rest of 1: 7 windows */
	assert_int_equal(count_windows(&t, PACKED_L), 7);
	for (int i = 0; i < 7; i++) {
		assert_true(read_window(&t, i, PACKED_L, NULL, input, target, document) > 0);
		for (int j = 0; j < PACKED_L; j++)
			if (target[j] >= 0) {
				assert_int_equal(target[j], input[j] + 1);
				seen[target[j]]++;
			}
	}
	for (int d = 0, i = 0; d < COUNT(length); d++) /* each token but a document's first is a target once */
		for (int j = 0; j < length[d]; j++, i++)
			assert_int_equal(seen[i], j > 0);
	char line[PATH_LEN + 320];
	assert_int_equal(describe_windows(line, sizeof line, &t, PACKED_L), 0);
	assert_non_null(strstr(line, "2 of 6 documents cut (33.3%)"));
	assert_non_null(strstr(line, "only those longer than a window are cut"));
	tokens_close(&t);
	/* auto: packed where there is a loss mask */
	o.packing = PACKING_AUTO;
	assert_int_equal(open_data(&t, &c.data.train[0], &o, 0), 0);
	assert_true(!t.packing && !t.document_mask);
	assert_int_equal(describe_windows(line, sizeof line, &t, PACKED_L), 0);
	assert_non_null(strstr(line, "one after the other: "));
	assert_null(strstr(line, "documents cut")); /* which does a plain text no harm */
	uint8_t mask[7 * PACKED_L];
	memset(mask, 1, sizeof mask);
	put_file(at("t.mask.bin"), mask, t.count);
	tokens_close(&t);
	assert_int_equal(open_data(&t, &c.data.train[0], &o, 0), 0);
	assert_true(t.packing && t.document_mask);
	tokens_close(&t);
	o.packing = PACKING_WINDOWS;
	assert_int_equal(open_data(&t, &c.data.train[0], &o, 0), 0);
	assert_true(!t.packing && !t.document_mask);
	assert_int_equal(describe_windows(line, sizeof line, &t, PACKED_L), 0);
	assert_non_null(strstr(line, "one after the other: 3 of 6 documents cut"));
	tokens_close(&t);
	/* nothing to pack; no index */
	o.packing = PACKING_DOCUMENTS;
	remove(at("t.mask.bin"));
	put_documents((int32_t[]){1, 0, 1}, 3);
	assert_int_equal(open_data(&t, &c.data.train[0], &o, 0), -1);
	expect_error("has no document of at least two tokens");
	struct data_source bare = {.dtype = "int32"};
	strcpy(bare.path, at("t.bin"));
	assert_int_equal(open_data(&t, &bare, &o, 0), -1);
	expect_error("has no index that tells where documents begin, so they cannot be packed");
}

static void tokenize_bad(void **state)
{
	(void)state;
	static const struct { const char *text, *error; } cases[] = {
		{"{\"text\":\"a\"}\n{\"text\":\"b\"\n", "b.jsonl:2: bad JSON"}, {"\n\n[1]\n", "b.jsonl:3: is an array"},
		{"{\"txt\":\"a\"}", "b.jsonl:1: found `txt`; expected one of a string `text`"},
		{"{\"title\":\"a\",\"n\":1,\"body\":\"b\",\"x\":NaN}",
			"--text-field NAME takes the text from another string: `title`, `body`; --skip-bad-lines"},
		{"{\"n\":1}", "takes the text from another string: none"},
		{"{\"text\":1}", "b.jsonl:1: `text` is a"},
		{"{\"text\":null}", "`text` is null"}, {"{\"text\":\"a\"} x", "b.jsonl:1: bad JSON"},
		{"nonsense", "b.jsonl:1: bad JSON"},
		{"{\"text\":\"\xff\"}", "b.jsonl:1: `text` is broken text, not UTF-8 at its byte 0xff; expected a string"},
		{"{\"text\":\"a\"}\n{\"text\":\"cut \\ud800\"}",
			"b.jsonl:2: `text` is broken text, with half of a surrogate pair, \\ud800; expected a string; "
			"--skip-bad-lines"},
		{"{\"text\":NaN}", "b.jsonl:1: `text` is NaN; expected a string"},
		{"{\"messages\":[" SAYS("assistant", "\\udc00") "]}",
			"b.jsonl:1: message 1: `content` is broken text, with half of a surrogate pair"},
		{"{\"messages\":[" WEIGHS("assistant", "a", "1e999") "]}",
			"message 1: `weight` is too large a number, 1e999; expected 0 or 1"},
		{"{\"messages\":[" USER ",NaN]}", "message 2: `role` is missing"},
		{"{\"messages\":[" SAYS("assistant", "a") "],\"tools\":Infinity}", "b.jsonl:1: `tools` has no place"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"name\":\"Ann\"}]}",
			"message 1: `name` has no place here in the model's chat form"},
		{"{\"conversations\":[{\"from\":\"gpt\",\"value\":\"a\",\"name\":\"Ann\"}]}",
			"message 1: `name` has no place"},
		{"{\"messages\":[{\"role\":\"assistant\",\"content\":\"a\",\"thoughts\":\"t\"}]}", "`thoughts` has no place"},
		{"{\"messages\":[" USER "," SAYS("assistant", "a") "],\"history\":[[\"q\",\"a\"]]}", "`history` has no place"},
		{"{\"text\":\"a\",\"text\":\"b\"}", "b.jsonl:1: bad JSON: duplicate"}, {"", "t: nothing to write"},
		{"{\"text\":\"\"}\n", "t: nothing to write"},
		{"{\"text\":\"a\",\"messages\":[]}", "b.jsonl:1: found `text`, `messages`; expected one of"},
		{"{\"messages\":[],\"completion\":1}", "found `messages`, `completion`; expected one of"},
		{"{}", "b.jsonl:1: found no members; expected one of"},
		{"{\"prompt\":\"a\"}", "found `prompt`; expected one of"},
		{"{\"completion\":\"a\"}", "b.jsonl:1: `prompt` is missing"},
		{"{\"prompt\":1,\"completion\":\"a\"}", "`prompt` is an integer"},
		{"{\"prompt\":\"a\",\"completion\":null}", "`completion` is null"},
		{"{\"messages\":{}}", "b.jsonl:1: `messages` is an object"}, {"{\"messages\":[]}", "`messages` is empty"},
		{"{\"messages\":[5]}", "b.jsonl:1: message 1: is an integer"},
		{"{\"messages\":[" USER ",{\"content\":\"a\"}]}", "b.jsonl:1: message 2: `role` is missing"},
		{"{\"messages\":[{\"role\":\"user\"}]}", "message 1: `content` is missing"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":[\"a\"]}]}", "message 1: `content`, part 1: is a string"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]}",
			"message 1: `content`, part 1: `type` is image_url; expected \"text\""},
		{"{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}",
			"message 1: `content`, part 1: `text` is missing"},
		{"{\"messages\":[{\"role\":\"assistant\",\"content\":null}]}",
			"message 1: `content` is null; expected a string"},
		{"{\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":1}]}]}",
			"message 1: `tool_calls` has no place here in the model's chat form"},
		{"{\"messages\":[" USER ",{\"role\":\"assistant\",\"content\":\"a\",\"reasoning_content\":\"r\"}]}",
			"message 2: `reasoning_content` has no place"},
		{"{\"messages\":[" USER "," SAYS("assistant", "a") "],\"tools\":[{\"type\":\"function\"}]}",
			"b.jsonl:1: `tools` has no place"},
		{"{\"prompt\":\"p\",\"completion\":\"c\",\"reasoning\":\"r\"}", "b.jsonl:1: `reasoning` has no place"},
		{"{\"messages\":[" SAYS("system", "t") "," USER "," SAYS("assistant", "a") "],\"system\":\"s\"}",
			"b.jsonl:1: found a system text beside the messages and a system message"},
		{"{\"messages\":[" USER "," SAYS("assistant", "a") "],\"system\":\"s\",\"system_prompt\":\"s\"}",
			"found both `system` and `system_prompt`"},
		{"{\"messages\":[" USER "," SAYS("assistant", "a") "],\"system\":{\"a\":1}}", "`system` is an object"},
		{"{\"messages\":[" WEIGHS("assistant", "a", "0.5") "]}", "message 1: `weight` is 0.5; expected 0 or 1"},
		{"{\"messages\":[" WEIGHS("assistant", "a", "\"1\"") "]}", "message 1: `weight` is a string; expected 0 or 1"},
		{"{\"messages\":[" WEIGHS("user", "a", "1") "]}", "message 1: `weight` is 1, and the role is \"user\""},
		{"{\"prompt\":\"p\",\"completion\":\"bad\",\"label\":false}", "b.jsonl:1: `label` is false"},
		{"{\"messages\":[" SAYS("assistant", "a") "],\"weight\":0}", "b.jsonl:1: `weight` beside the messages is"},
		{"{\"messages\":[" SAYS("assistant", "a") "],\"weight\":\"1\"}", "`weight` beside the messages is not 1"},
		{"{\"messages\":[" USER "," WEIGHS("assistant", "a", "0") "]}", "none of the assistant's messages is learned"},
		{"{\"prompt\":[" USER "," SAYS("assistant", "a") "],\"completion\":[" USER "]}",
			"none of the assistant's messages is learned"},
		{"{\"prompt\":[" USER "],\"completion\":\"a\"}", "b.jsonl:1: `completion` is a string"},
		{"{\"prompt\":\"a\",\"completion\":[" SAYS("assistant", "a") "]}", "b.jsonl:1: `prompt` is a string"},
		{"{\"prompt\":[{}],\"completion\":[" SAYS("assistant", "a") "]}", "`prompt`, message 1: `role` is missing"},
		{"{\"conversations\":[{\"from\":\"bing\",\"value\":\"a\"}]}",
			"message 1: `from` is \"bing\"; expected system,"},
		{"{\"conversations\":[{\"from\":\"gpt\"}]}", "message 1: `value` is missing"},
		{"{\"conversations\":[{\"from\":\"gpt\",\"value\":\"a\",\"content\":\"b\"}]}",
			"message 1: found `content` beside `from`"},
		{"{\"messages\":[" USER "],\"conversations\":[" USER "]}",
			"found `messages`, `conversations`; expected one of"},
		{"{\"messages\":[{\"role\":\"assistent\",\"content\":\"a\"}]}",
			"message 1: `role` is \"assistent\"; expected system, developer, user,"},
		{"{\"messages\":[" USER "]}", "no message is the assistant's"},
	};
	struct tokenized result;
	char b[PATH_LEN], dir[PATH_LEN], none[PATH_LEN], own[PATH_LEN];
	strcpy(b, at("b.jsonl")), strcpy(dir, scratch), strcpy(none, at("none.txt")), strcpy(own, at("t.json"));
	for (int i = 0; i < COUNT(cases); i++) {
		put_string(b, cases[i].text);
		assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, NULL, 1, (char *[]){b}, &result), -1);
		expect_error(cases[i].error);
		assert_false(exists(at("t.bin")) || exists(at("t.idx")) || exists(at("t.json")));
		assert_false(holds_temporary(scratch));
	}
	assert_int_equal(tokenize_files(at("t"), "gpt2", NULL, false, NULL, 1, (char *[]){b}, &result), -1);
	expect_error("tokenizer `gpt2`: No such file or directory; expected byte, a tokenizer.json, or a directory that "
			"holds one");
	assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, NULL, 1, (char *[]){none}, &result), -1);
	expect_error("none.txt: cannot open");
	assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, NULL, 1, (char *[]){dir}, &result), -1);
	expect_error("expected a text or .jsonl file, found a directory");
	static const char *const nameless[] = {"", "/", ".", "..", "out/", "out/.", "/.."};
	for (int i = 0; i < COUNT(nameless); i++) {
		assert_int_equal(tokenize_files(*nameless[i] == 'o' ? at("%s", nameless[i]) : nameless[i], "byte", NULL, false,
				NULL, 1,
				(char *[]){b},
				&result), -1);
		expect_error("has no name in it; expected a prefix");
	}
	assert_false(exists(at("out")));
	static const char *const outputs[] = {".bin", ".mask.bin", ".idx", ".json"};
	for (int i = 0; i < COUNT(outputs); i++) {
		char output[PATH_LEN], link_to_it[PATH_LEN], error[64];
		strcpy(output, put_string(at("t%s", outputs[i]), "precious"));
		strcpy(link_to_it, at("link%d.txt", i));
		assert_int_equal(link(output, link_to_it), 0);
		snprintf(error, sizeof error, "%s: is an input, but would be replaced", file_name(output));
		for (int linked = 0; linked < 2; linked++) {
			assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, NULL, 1,
					(char *[]){linked ? link_to_it : output}, &result), -1);
			expect_error(linked ? "txt: is an input, but would be replaced" : error);
		}
		assert_int_equal(unlink(output), 0);
	}
	put_string(own, "precious");
	assert_int_equal(tokenize_files(at("b.jsonl/t"), "byte", NULL, false, NULL, 1, (char *[]){own},
			&result), -1);
	expect_error("b.jsonl");
}

/* The member that holds the text, and lines that cannot be used: left out, counted, named in order. */
static void text_field_and_bad_lines(void **state)
{
	(void)state;
	struct tokenized result;
	struct tokens t;
	char b[PATH_LEN], c[PATH_LEN];
	strcpy(b, at("b.jsonl")), strcpy(c, at("c.jsonl"));
	put_string(b, "{\"body\":\"one\",\"text\":NaN,\"score\":1e400}\n{\"text\":\"t\"}\nnonsense\n"
			"{\"body\":\"cut \\ud83d\"}\n\n{\"messages\":[" USER "," SAYS("assistant", "a") "]}\n{\"body\":\"two\"");
	put_string(c, "{\"body\":5}\n{\"body\":\"\"}\n[]\n{\"prompt\":\"\",\"body\":\"three\"}\n{}\n");
	char *files[] = {b, c};
	const struct text_options strict = {.text_field = "body"}, o = {.text_field = "body", .skip_bad_lines = true};
	assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, &strict, 2, files, &result), -1);
	expect_error("b.jsonl:2: found `text`; expected one of a string `body`, |; --skip-bad-lines leaves such lines out");
	const int kept = dup(2), log = open(at("err.txt"), O_RDWR | O_CREAT, 0600);
	dup2(log, 2);
	const int rc = tokenize_files(at("t"), "byte", NULL, false, &o, 2, files, &result);
	dup2(kept, 2), close(kept), close(log);
	assert_int_equal(rc, 0);
	assert_string_equal(show_tokens(at("t")), "[one|]<role>HUMAN</role>u<role>ASSISTANT</role>[a|three|");
	assert_true(result.documents == 3 && result.lines_skipped == 7);
	size_t n;
	uint8_t *said = get_file(at("err.txt"), &n);
	const char *at_line = (char *)said;
	static const char *const lines[] = {"b.jsonl:2: found `text`", "b.jsonl:3: bad JSON",
		"b.jsonl:4: `body` is broken", "b.jsonl:7: bad JSON", "c.jsonl:1: `body` is an integer", "skipped: ...",
		"7 lines could not be used, and were skipped"};
	for (int i = 0; i < COUNT(lines); i++)
		assert_non_null(at_line = strstr(at_line, lines[i]));
	assert_null(strstr((char *)said, "c.jsonl:3"));
	free(said);
	/* The manifest knows both, also when another program writes it again. */
	for (int i = 0; i < 2; i++) {
		json_t *manifest = json_read(at("t.json"));
		assert_string_equal(json_string_value(json_object_get(manifest, "text_field")), "body");
		assert_int_equal(json_integer_value(json_object_get(manifest, "skipped_lines")), 7);
		json_decref(manifest);
		set_time(at("t.bin"), (struct timespec){1, 0});
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), 0);
		tokens_close(&t);
	}
	/* A member that usually is a conversation's can be the text; a text file has no members. */
	put_string(b, "{\"prompt\":\"p\",\"completion\":\"c\"}");
	const struct text_options completion = {.text_field = "completion"};
	assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, &completion, 1, files, &result), 0);
	assert_string_equal(show_tokens(at("t")), "[c|");
	strcpy(c, put_string(at("a.txt"), "words"));
	assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, &completion, 1, &files[1], &result), -1);
	expect_error("a.txt: is text; expected a file of JSON lines, to which --text-field belongs");
	char name[MAX_NAME + 1] = "";
	memset(name, 'n', MAX_NAME);
	const struct text_options too_long = {.text_field = name};
	assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, &too_long, 1, files, &result), -1);
	expect_error("--text-field: a name of 128 bytes; expected at most 127");
}

static void manifest_broken(void **state)
{
	(void)state;
	struct tokens t;
	struct tokenized result;
	char a[PATH_LEN];
	strcpy(a, at("a.txt"));
	put_string(a, "hello");
	assert_int_equal(tokenize_files(at("t"), "byte", NULL, false, NULL, 1, (char *[]){a}, &result), 0);
	char too_long[PATH_LEN + 8] = "[\"";
	memset(too_long + 2, 'x', PATH_LEN);
	strcpy(too_long + 2 + PATH_LEN, "\"]");
	const struct { const char *key, *json, *error; } cases[] = {
		{"format", "[\"x\"]", "`format` is \"x\""}, {"format", "[]", "`format` is missing"},
		{"tokenizer", "[]", "`tokenizer` is missing"},
		{"tokenizer", too_long, "`tokenizer` is too long"},
		{"tokenizer_hash", "[\"00000000\"]", "`tokenizer_hash` is 00000000"},
		{"tokenizer_hash", "[\"xyz\"]", "eight hexadecimal"},
		{"vocab_size", "[0]", "`vocab_size` is 0"}, {"vocab_size", "[258]", "`vocab_size` is 258"},
		{"dtype", "[\"int32\"]", "`dtype` is \"int32\"; the file's is uint16"},
		{"documents", "[2]", "`documents` is 2; the files hold 1"},
		{"tokens", "[5]", "`tokens` is 5; the files hold 6"}, {"tokens", "[6.0]", "`tokens` is a real number"},
		{"bytes", "[6]", "`bytes` is 6; the files hold 5"}, {"bytes", "[-1]", "`bytes` is -1"},
		{"crc32", "[\"00000000\"]", "`crc32` is 00000000; that of "}, {"crc32", "[5]", "`crc32` is an integer"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		json_t *good = json_read(at("t.json")), *bad = json_changed(good, cases[i].key, cases[i].json);
		json_object_del(bad, "files"); /* as long as it names the files as they are, its word is taken */
		assert_int_equal(json_write(at("t.json"), bad), 0);
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
		expect_error("t.json: ");
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
		expect_error(cases[i].error);
		assert_int_equal(json_write(at("t.json"), good), 0);
		json_decref(good), json_decref(bad);
	}
	size_t n;
	uint8_t *text = get_file(at("t.json"), &n), *bin;
	for (size_t i = 0; i < n - 2; i++) {
		put_file(at("t.json"), text, i);
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
		expect_error("t.json:");
	}
	put_file(at("t.json"), text, n);
	free(text);
	bin = get_file(at("t.bin"), &n);
	for (size_t i = 0; i < n; i++) {
		bin[i] ^= 1;
		put_file(at("t.bin"), bin, n);
		bin[i] ^= 1;
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
		expect_error("it is damaged");
	}
	put_file(at("t.bin"), bin, n);
	free(bin);
	assert_int_equal(tokens_open(&t, at("t"), "none", 256), -1); /* id 256 == vocab_size */
	expect_error("t.bin: token 5: id 256 is outside the vocabulary of 256 that the model has");

	/* Another tokenizer's manifest that claims less than the file holds. */
	json_t *root = json_read(at("t.json"));
	json_object_set_new(root, "tokenizer", json_string("other"));
	json_object_set_new(root, "vocab_size", json_integer(200));
	json_write(at("t.json"), root);
	json_decref(root);
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("outside the vocabulary of 200 that its manifest has");
}

/* A window needs a target behind its last input: k L tokens are k - 1 windows. The last window ends within the file. */
static void windows_end_in_the_file(void **state)
{
	(void)state;
	enum { L = 5, MOST = 43 };
	uint16_t ids[MOST];
	int32_t input[L], target[L];
	for (int i = 0; i < MOST; i++)
		ids[i] = 100 + i;
	for (int n = 1; n <= MOST; n++) {
		struct tokens t;
		put_file(at("ids.bin"), ids, n * sizeof *ids);
		if (tokens_open(&t, at("ids.bin"), "uint16", 1000) < 0)
			fail_msg("%s", error_text);
		const int64_t windows = count_windows(&t, L);
		assert_int_equal(windows, (n - 1) / L);
		for (int64_t w = 0; w < windows; w++) {
			assert_int_equal(read_window(&t, w, L, NULL, input, target, NULL), L);
			for (int i = 0; i < L; i++)
				assert_true(input[i] == 100 + w * L + i && target[i] == input[i] + 1);
		}
		if (windows)
			assert_true(target[L - 1] < 100 + n);
		tokens_close(&t);
		assert_int_equal(unlink(at("ids.json")), 0);
	}
}

/* Each epoch of a file has each window once, in an order of its own: another than all before it, than the other file's,
 * than with another seed. Without shuffling all are in the order of the file. */
static void epochs_have_orders_of_their_own(void **state)
{
	(void)state;
	enum { WINDOWS = 24, EPOCHS = 6, ORDERS = 3 * EPOCHS };
	static int64_t order[ORDERS][WINDOWS];
	struct blend b = {.num_files = 2, .seq_len = 8, .seed = 3, .shuffle = true};
	b.files[0].count = b.files[1].count = WINDOWS * 8 + 1;
	for (int run = 0; run < 2; run++) {
		struct source_state sources[MAX_SOURCES] = {{.share = INT64_C(1) << 31, .order = 0},
				{.share = INT64_C(1) << 31, .order = 1}};
		int taken[2] = {0, 0};
		b.seed = 3 + run;
		for (int i = 0; i < 2 * EPOCHS * WINDOWS; i++) {
			const struct blend_sample s = blend_next(&b, sources);
			const int n = taken[s.file]++, k = (run ? 2 : s.file) * EPOCHS + n / WINDOWS;
			assert_true(s.window >= 0 && s.window < WINDOWS);
			if (!run || s.file == 0)
				order[k][n % WINDOWS] = s.window;
		}
		assert_true(taken[0] == EPOCHS * WINDOWS && taken[1] == taken[0]);
	}
	for (int k = 0; k < ORDERS; k++) {
		bool seen[WINDOWS] = {false}, sorted = true;
		for (int i = 0; i < WINDOWS; i++) {
			assert_false(seen[order[k][i]]);
			seen[order[k][i]] = true;
			sorted = sorted && order[k][i] == i;
		}
		assert_false(sorted);
		for (int j = 0; j < k; j++)
			assert_memory_not_equal(order[j], order[k], sizeof order[k]);
	}
	b.shuffle = false;
	struct source_state sources[MAX_SOURCES] = {{.share = INT64_C(1) << 32}};
	b.num_files = 1;
	for (int i = 0; i < 2 * WINDOWS; i++)
		assert_int_equal(blend_next(&b, sources).window, i % WINDOWS);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(tokens_types), TEST(tokens_broken), TEST(tokenize_good), TEST(tokenize_foreign_path),
		TEST(tokenize_bad), TEST(tokenize_chat), TEST(tokenize_long_chat), TEST(chat_prompt), TEST(tokens_formats),
		TEST(end_targets), TEST(manifest_vouches), TEST(tokens_large), TEST(tokens_documents_all),
				TEST(packed_documents),
		TEST(packed_edges), TEST(packing_is_best_fit), TEST(lengths_have_orders_of_their_own), TEST(manifest_broken),
		TEST(text_field_and_bad_lines),
		TEST(windows_end_in_the_file), TEST(epochs_have_orders_of_their_own),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
