/*
 * test_files.c - the files chapter of data.c: safetensors, checkpoints, token files, metrics. Good files must come back
 * as they were; broken ones, made here by patching good ones, must give the error that names the place.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "files/config.h"
#include "files/tensors.h"
#include "files/safetensors.h"
#include "files/tokenizer.h"
#include "files/checkpoint.h"
#include "data.h"
#include "commands/tokenize.h"

#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include <zlib.h>

#include "test.h"

#define COUNT(a) ((int)(sizeof(a) / sizeof *(a)))

/* The bytes of a file and a 0 behind them; free them. */
static uint8_t *get_file(const char *path, size_t *n)
{
	FILE *f = fopen(path, "r");
	assert_non_null(f);
	struct stat st;
	assert_int_equal(fstat(fileno(f), &st), 0);
	uint8_t *data = allocate(st.st_size + 1);
	*n = fread(data, 1, st.st_size, f);
	assert_int_equal(*n, st.st_size);
	fclose(f);
	return data;
}

static bool exists(const char *path)
{
	struct stat st;
	return lstat(path, &st) == 0;
}

/* The value that %.17g and a comparison of bits call the same. */
static void assert_same(double a, double b)
{
	if (memcmp(&a, &b, sizeof a) && !(isnan(a) && isnan(b)))
		fail_msg("%.17g is not %.17g", a, b);
}

/* ---- safetensors ---- */

/* Writes header length, header, data. */
static void put_safetensors(const char *path, const char *header, const void *data, size_t n)
{
	uint64_t length = strlen(header);
	uint8_t *file = allocate(8 + length + n);
	memcpy(file, &length, 8);
	memcpy(file + 8, header, length);
	if (n)
		memcpy(file + 8 + length, data, n);
	put_file(path, file, 8 + length + n);
	free(file);
}

static void safetensors_round_trip(void **state)
{
	(void)state;
	real a[6] = {1, -2, (real)0.1, INFINITY, -0.0, NAN}, b[3] = {4, 5, 6}, none[1], out[6];
	struct named_tensor arrays[] = {{"model.z \"quoted\".weight", 2, 3, a}, {"a", 3, 0, b}, {"none", 0, 0, none}};
	char *path = at("model.safetensors");
	assert_int_equal(safetensors_write(path, arrays, 3), 0);
	size_t n;
	uint8_t *file = get_file(path, &n);
	assert_int_equal(load_i64(file) % 8, 0);
	assert_int_equal(n, 8 + load_i64(file) + 9 * sizeof(real));
	assert_memory_equal(file + n - 9 * sizeof(real), a, sizeof a); /* data in array order */
	free(file);

	for (int as_directory = 0; as_directory < 2; as_directory++) {
		struct tensors *w = tensors_open(as_directory ? scratch : path, "model");
		assert_non_null(w);
		assert_int_equal(tensors_count(w), 3);
		assert_string_equal(tensors_name(w, 0), "a");
		assert_string_equal(tensors_name(w, 1), arrays[0].name);
		assert_true(tensors_has(w, "none") && !tensors_has(w, "nothing"));
		assert_int_equal(tensors_read(w, &(struct named_tensor){arrays[0].name, 2, 3, out}), 0);
		assert_memory_equal(out, a, sizeof a);
		assert_int_equal(tensors_read(w, &(struct named_tensor){"a", 3, 0, out}), 0);
		assert_memory_equal(out, b, sizeof b);
		assert_int_equal(tensors_read(w, &(struct named_tensor){"none", 0, 0, out}), 0);

		assert_int_equal(tensors_read(w, &(struct named_tensor){"a", 4, 0, out}), -1);
		expect_error("model.safetensors: tensor a: shape [3]; expected [4]");
		assert_int_equal(tensors_read(w, &(struct named_tensor){"a", 3, 1, out}), -1);
		expect_error("shape [3]; expected [3, 1]");
		assert_int_equal(tensors_read(w, &(struct named_tensor){"model.a", 3, 0, out}), -1);
		expect_error("tensor model.a is missing; there is one named a");
		assert_int_equal(tensors_read(w, &(struct named_tensor){"z \"quoted\".weight", 2, 3, out}), -1);
		expect_error("is missing; there is one named model.z");
		assert_int_equal(tensors_read(w, &(struct named_tensor){"b", 3, 0, out}), -1);
		expect_error("tensor b is missing");
		int32_t ints[3];
		assert_int_equal(tensors_read_int(w, "a", 3, ints), -1);
		expect_error("tensor a: dtype F|expected I32 or I64");
		tensors_close(w);
	}
	assert_int_equal(safetensors_write(at("none.safetensors"), NULL, 0), 0);
	struct tensors *w = tensors_open(at("none.safetensors"), "model");
	assert_int_equal(tensors_count(w), 0);
	tensors_close(w);
	tensors_close(NULL);
	arrays[1].name = arrays[0].name;
	assert_int_equal(safetensors_write(path, arrays, 3), -1);
	expect_error("is there twice");
}

/* Pieces of any size give the same file, byte for byte that of the format; any part of it can be read by itself. */
static void safetensors_pieces(void **state)
{
	(void)state;
	enum { N = 11 };
	real data[N] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, out[N];
	const struct named_tensor arrays[] = {{"b", 2, 3, NULL}, {"empty", 0, 0, NULL}, {"a", 5, 0, NULL}, {"last", 0, 4, NULL}};
	char *path = at("pieces.safetensors"), expected[1024];
	int length = snprintf(expected, sizeof expected, "{\"__metadata__\":{\"format\":\"pt\",\"crc32.b\":\"%08x\","
			"\"crc32.empty\":\"00000000\",\"crc32.a\":\"%08x\",\"crc32.last\":\"00000000\"},"
			"\"b\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
			"\"empty\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[24,24]},"
			"\"a\":{\"dtype\":\"F32\",\"shape\":[5],\"data_offsets\":[24,44]},"
			"\"last\":{\"dtype\":\"F32\",\"shape\":[0,4],\"data_offsets\":[44,44]}}",
			(unsigned)crc32(0, (uint8_t *)data, 24), (unsigned)crc32(0, (uint8_t *)(data + 6), 20));
	for (; length % 8; length++)
		strcat(expected, " ");
	for (int piece = 1; piece <= N; piece++) {
		struct safetensors_writer *writer = safetensors_create(path, arrays, 4);
		assert_non_null(writer);
		assert_int_equal(safetensors_append(writer, NULL, 0), 0);
		for (int i = 0; i < N; i += piece)
			assert_int_equal(safetensors_append(writer, data + i, i + piece <= N ? piece : N - i), 0);
		assert_int_equal(safetensors_finish(writer), 0);
		size_t n;
		uint8_t *file = get_file(path, &n);
		assert_int_equal(n, 8 + length + sizeof data);
		assert_int_equal(load_i64(file), length);
		assert_memory_equal(file + 8, expected, length);
		assert_memory_equal(file + 8 + length, data, sizeof data);
		free(file);
	}

	struct tensors *w = tensors_open(path, "model");
	assert_non_null(w);
	for (int first = 0; first <= 6; first++)
		for (int n = 0; first + n <= 6; n++) {
			out[n] = -1;
			assert_int_equal(tensors_read_range(w, "b", 2, 3, first, n, out), 0);
			assert_memory_equal(out, data + first, n * sizeof *out);
			assert_same(out[n], -1);
		}
	assert_int_equal(tensors_read_range(w, "a", 5, 0, 4, 1, out), 0);
	assert_same(out[0], 11);
	assert_int_equal(tensors_read_range(w, "last", 0, 4, 0, 0, out), 0);
	static const struct { int64_t first, n; } outside[] = {{0, 7}, {6, 1}, {7, 0}, {-1, 1}, {2, -1}, {INT64_MAX, 1}, {1, INT64_MAX}};
	for (int i = 0; i < COUNT(outside); i++) {
		assert_int_equal(tensors_read_range(w, "b", 2, 3, outside[i].first, outside[i].n, out), -1);
		expect_error("pieces.safetensors: tensor b: |elements from element |it holds 6");
	}
	assert_int_equal(tensors_read_range(w, "b", 3, 2, 0, 1, out), -1);
	expect_error("tensor b: shape [2, 3]; expected [3, 2]");
	assert_int_equal(tensors_read_range(w, "c", 3, 2, 0, 1, out), -1);
	expect_error("tensor c is missing");
	for (int i = 0; i < tensors_count(w); i++)
		assert_int_equal(tensors_verify(w, i), 0);
	tensors_close(w);

	/* A range is read without a checksum, which is asked for apart. */
	size_t n;
	uint8_t *file = get_file(path, &n);
	file[n - 1] ^= 1;
	put_file(path, file, n);
	free(file);
	w = tensors_open(path, "model");
	assert_int_equal(tensors_read_range(w, "a", 5, 0, 4, 1, out), 0);
	for (int i = 0; i < tensors_count(w); i++)
		assert_int_equal(tensors_verify(w, i), strcmp(tensors_name(w, i), "a") ? 0 : -1);
	expect_error("pieces.safetensors: tensor a is damaged: checksum");
	tensors_close(w);

	/* Too few, too many, none. */
	struct safetensors_writer *writer = safetensors_create(path, arrays, 4);
	assert_int_equal(safetensors_append(writer, data, 8), 0);
	assert_int_equal(safetensors_finish(writer), -1);
	expect_error("pieces.safetensors: tensor a: the last 3 of its elements were not given");
	assert_false(exists(path));
	writer = safetensors_create(path, arrays, 2);
	assert_int_equal(safetensors_append(writer, data, 7), -1);
	expect_error("pieces.safetensors: 1 elements more than its 2 tensors hold");
	safetensors_abandon(writer);
	safetensors_abandon(NULL);
	assert_false(exists(path));
	assert_int_equal(safetensors_finish(safetensors_create(path, NULL, 0)), 0);
	for (int i = 0; i < 2; i++) {
		w = tensors_open(path, "model");
		assert_non_null(w);
		assert_int_equal(tensors_count(w), 0);
		tensors_close(w);
		put_safetensors(path, "{}", NULL, 0);
	}
}

/* Many tensors: no quadratic work, and each is found. */
static void safetensors_many(void **state)
{
	(void)state;
	enum { N = 20000 };
	struct named_tensor *arrays = allocate(N * sizeof *arrays);
	char (*names)[32] = allocate(N * sizeof *names);
	real *data = allocate(N * sizeof *data);
	for (int i = 0; i < N; i++) {
		snprintf(names[i], sizeof names[i], "layers.%d.w", i * 7919 % N);
		data[i] = i;
		arrays[i] = (struct named_tensor){names[i], 1, 0, &data[i]};
	}
	assert_int_equal(safetensors_write(at("many.safetensors"), arrays, N), 0);
	struct tensors *w = tensors_open(at("many.safetensors"), "model");
	assert_int_equal(tensors_count(w), N);
	for (int i = 0; i < N; i++) {
		real x;
		assert_int_equal(tensors_read(w, &(struct named_tensor){names[i], 1, 0, &x}), 0);
		assert_same(x, i);
	}
	tensors_close(w);
	free(arrays), free(names), free(data);
}

static void safetensors_conversion(void **state)
{
	(void)state;
	static const struct { uint16_t bits; double value; } half[] = {
		{0x0000, 0}, {0x8000, -0.0}, {0x3c00, 1}, {0xc000, -2}, {0x3555, 0.333251953125}, {0x7bff, 65504}, {0xfbff, -65504},
		{0x0400, 0x1p-14}, {0x03ff, 0x1.ff8p-15}, {0x0001, 0x1p-24}, {0x8001, -0x1p-24}, {0x7c00, INFINITY},
		{0xfc00, -INFINITY}, {0x7e00, NAN}, {0x7c01, NAN},
	}, brain[] = {
		{0x0000, 0}, {0x8000, -0.0}, {0x3f80, 1}, {0xc000, -2}, {0x3eab, 0.333984375}, {0x7f7f, 0x1.fep127},
		{0x0080, 0x1p-126},
		{0x0001, 0x1p-133}, {0x8001, -0x1p-133}, {0x7f80, INFINITY}, {0xff80, -INFINITY}, {0x7fc0, NAN}, {0xff81, NAN},
	};
	struct { uint16_t half[COUNT(half)], brain[COUNT(brain)]; float f[2]; double d[2]; int32_t i[2]; int64_t l[3]; } data;
	for (int i = 0; i < COUNT(half); i++)
		data.half[i] = half[i].bits;
	for (int i = 0; i < COUNT(brain); i++)
		data.brain[i] = brain[i].bits;
	data.f[0] = 0.1f, data.f[1] = NAN;
	data.d[0] = 0.1, data.d[1] = -INFINITY;
	data.i[0] = -5, data.i[1] = INT32_MAX;
	data.l[0] = -7, data.l[1] = 1 << 30, data.l[2] = INT64_C(1) << 31;
	_Static_assert(sizeof data == 2 * 28 + 8 + 16 + 8 + 24, "no padding");
	/* Once with each alignment of the data: any header length is legal. */
	for (int pad = 0; pad < 8; pad++) {
		char header[1024];
		snprintf(header, sizeof header, "{\"h\":{\"dtype\":\"F16\",\"shape\":[15],\"data_offsets\":[0,30]},"
				"\"b\":{\"dtype\":\"BF16\",\"shape\":[13,1],\"data_offsets\":[30,56]},"
				"\"f\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[56,64]},"
				"\"d\":{\"dtype\":\"F64\",\"shape\":[2],\"data_offsets\":[64,80]},"
				"\"i\":{\"dtype\":\"I32\",\"shape\":[2],\"data_offsets\":[80,88]},"
				"\"l\":{\"dtype\":\"I64\",\"shape\":[2],\"data_offsets\":[88,104]},"
				"\"big\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[104,112]}}%*s", pad, "");
		put_safetensors(at("c.safetensors"), header, &data, sizeof data);
		struct tensors *w = tensors_open(at("c.safetensors"), "model");
		assert_non_null(w);
		real out[15];
		int32_t ints[2];
		assert_int_equal(tensors_read(w, &(struct named_tensor){"h", 15, 0, out}), 0);
		for (int i = 0; i < COUNT(half); i++)
			assert_same(out[i], half[i].value);
		assert_int_equal(tensors_read_range(w, "h", 15, 0, 3, 7, out), 0);
		for (int i = 0; i < 7; i++)
			assert_same(out[i], half[3 + i].value);
		assert_int_equal(tensors_read(w, &(struct named_tensor){"b", 13, 1, out}), 0);
		for (int i = 0; i < COUNT(brain); i++)
			assert_same(out[i], brain[i].value);
		assert_int_equal(tensors_read(w, &(struct named_tensor){"f", 2, 0, out}), 0);
		assert_same(out[0], 0.1f), assert_same(out[1], NAN);
		/* What can be used where it stands: bfloat16 and float32 at an address that is a multiple of their size. */
		const void *stands;
		bool bf16;
		const size_t data_at = 8 + strlen(header);
		assert_int_equal(tensors_map_range(w, "b", 13, 1, 2, 5, &stands, &bf16), 0);
		assert_true(bf16 && !stands == ((data_at + 30) % 2 != 0));
		if (stands)
			assert_memory_equal(stands, data.brain + 2, 5 * sizeof *data.brain);
		assert_int_equal(tensors_map_range(w, "f", 2, 0, 1, 1, &stands, &bf16), 0);
		assert_true(!bf16 && !stands == ((data_at + 56) % 4 != 0));
		if (stands)
			assert_memory_equal(stands, data.f + 1, sizeof *data.f);
		assert_int_equal(tensors_map_range(w, "h", 15, 0, 0, 15, &stands, &bf16), 0);
		assert_null(stands);
		assert_int_equal(tensors_map_range(w, "d", 2, 0, 0, 2, &stands, &bf16), 0);
		assert_null(stands);
		assert_int_equal(tensors_map_range(w, "b", 13, 1, 9, 5, &stands, &bf16), -1);
		expect_error("tensor b: |5 elements from element 9|it holds 13");
		assert_int_equal(tensors_map_range(w, "b", 1, 13, 0, 1, &stands, &bf16), -1);
		expect_error("tensor b: shape [13, 1]; expected [1, 13]");
		assert_int_equal(tensors_bytes(w), data_at + sizeof data);
		assert_int_equal(tensors_read(w, &(struct named_tensor){"d", 2, 0, out}), 0);
		assert_same(out[0], (real)0.1), assert_same(out[1], -INFINITY);
		assert_int_equal(tensors_read_int(w, "i", 2, ints), 0);
		assert_true(ints[0] == -5 && ints[1] == INT32_MAX);
		assert_int_equal(tensors_read_int(w, "l", 2, ints), 0);
		assert_true(ints[0] == -7 && ints[1] == 1 << 30);
		assert_int_equal(tensors_read_int(w, "big", 1, ints), -1);
		expect_error("tensor big: element 0 is 2147483648");
		assert_int_equal(tensors_read_int(w, "l", 3, ints), -1);
		expect_error("tensor l: 2 elements; expected 3");
		assert_int_equal(tensors_read(w, &(struct named_tensor){"i", 2, 0, out}), -1);
		expect_error("tensor i: dtype I32; expected F32");
		tensors_close(w);
	}
}

static void safetensors_broken(void **state)
{
	(void)state;
	static const struct { const char *header; size_t n; const char *error; } cases[] = {
		{"", 0, "does not begin with '{'"},
		{" {}", 0, "does not begin with '{'"},
		{"[]", 0, "does not begin with '{'"},
		{"{", 0, "bad JSON in the header"},
		{"{}x", 0, "bad JSON in the header"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
			"\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "duplicate"},
		{"{\"a\":5}", 0, "tensor a: is an integer"},
		{"{\"a\":{}}", 0, "tensor a: `dtype` is missing"},
		{"{\"a\":{\"dtype\":32,\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "tensor a: `dtype` is an integer"},
		{"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "tensor a: `shape` is missing"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":1,\"data_offsets\":[0,4]}}", 4, "tensor a: `shape` is an integer"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4, "`shape` is longer; expected an array of at most 8"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4, "`shape` entry 0 is negative"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4, "`shape` entry 0 is a real number"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "too large"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[4611686018427387905],\"data_offsets\":[0,4]}}", 4, "too large"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]}}", 4, "bad JSON"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "`data_offsets`"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", 4, "`data_offsets`"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4, "`data_offsets`"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,\"4\"]}}", 4, "`data_offsets`"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", 4, "data_offsets are [-4, 0]"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4, "data_offsets are [4, 0]"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4, "within the file's 4 bytes"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,4]}}", 4, "hold 4 bytes; expected 8"},
		{"{\"a\":{\"dtype\":\"F16\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "hold 4 bytes; expected 2"},
		{"{\"a\":{\"dtype\":\"U8\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, "hold 4 bytes; expected 1"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
			"\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12, "tensors a and b overlap at data byte 4"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
			"\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "overlap at data byte 0"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
			"\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}", 12, "data bytes 4 to 8, before tensor b"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "data bytes 0 to 4, before tensor a"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 5, "end at data byte 4 but the file holds 5"},
		{"{}", 1, "end at data byte 0 but the file holds 1"},
		{"{\"__metadata__\":[]}", 0, "`__metadata__` is an array"},
		{"{\"__metadata__\":{\"step\":1}}", 0, "`step` is an integer"},
		{"{\"__metadata__\":{\"crc32.a\":\"12\"},\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
			"`crc32.a` is \"12\"; expected eight"},
		{"{\"__metadata__\":{\"crc32.a\":\"1234567G\"},\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
			"expected eight"},
	};
	char *path = at("broken.safetensors");
	for (int i = 0; i < COUNT(cases); i++) {
		put_safetensors(path, cases[i].header, "0123456789abcdef", cases[i].n);
		assert_null(tensors_open(path, "model"));
		expect_error("broken.safetensors: ");
		assert_null(tensors_open(path, "model"));
		expect_error(cases[i].error);
	}

	/* A dtype that nobody knows is an error only for who reads it. */
	put_safetensors(path, "{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,2]},"
			"\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}", "xx\0\0\x80?", 6);
	struct tensors *w = tensors_open(path, "model");
	real x[3];
	assert_non_null(w);
	assert_int_equal(tensors_read(w, &(struct named_tensor){"b", 1, 0, x}), 0);
	assert_same(x[0], 1);
	assert_int_equal(tensors_read(w, &(struct named_tensor){"a", 3, 0, x}), -1);
	expect_error("tensor a: dtype F4; expected");
	tensors_close(w);

	uint64_t huge = UINT64_MAX;
	put_file(path, &huge, 8);
	assert_null(tensors_open(path, "model"));
	expect_error("header length 18446744073709551615");
	put_string(path, "");
	assert_null(tensors_open(path, "model"));
	expect_error("0 bytes; expected a safetensors file");
	assert_null(tensors_open(at("nowhere"), "model"));
	expect_error("nowhere: cannot open");
	assert_null(tensors_open(scratch, "model"));
	expect_error("looked for model.safetensors.index.json and model.safetensors");
	assert_int_equal(mkdir(at("model.safetensors"), 0777), 0);
	assert_null(tensors_open(scratch, "model"));
	expect_error("model.safetensors: expected a file, found a directory");
}

/* Opens a file and reads all that can be read, whatever the shapes: 0 or -1. */
static int read_everything(const char *path, const char *kind)
{
	struct tensors *w = tensors_open(path, kind);
	int rc = w ? 0 : -1;
	for (int i = 0; !rc && i < tensors_count(w); i++) {
		real out[64];
		const struct tensor *t = tensor_find(w, tensors_name(w, i));
		struct named_tensor a = {t->name, t->shape[0], 0, out};
		if (t->num_dims == 2)
			a.cols = t->shape[1];
		rc = t->end - t->begin > sizeof out ? -1 : tensors_read(w, &a);
	}
	tensors_close(w);
	return rc;
}

static void safetensors_damaged(void **state)
{
	(void)state;
	real a[6] = {1, 2, 3, 4, 5, 6}, b[3] = {7, 8, 9};
	char *path = at("d.safetensors");
	assert_int_equal(safetensors_write(path, (struct named_tensor[]){{"a", 2, 3, a}, {"b", 3, 0, b}}, 2), 0);
	size_t n;
	uint8_t *file = get_file(path, &n);
	for (size_t i = 0; i < n; i++) { /* truncated at every length */
		put_file(path, file, i);
		assert_int_equal(read_everything(path, "model"), -1);
		expect_error("d.safetensors: ");
	}
	for (size_t i = n - sizeof a - sizeof b; i < n; i++) { /* a wrong bit in each byte of data */
		file[i] ^= 16;
		put_file(path, file, n);
		file[i] ^= 16;
		assert_int_equal(read_everything(path, "model"), -1);
		expect_error(i < n - sizeof b ? "tensor a is damaged: checksum" : "tensor b is damaged: checksum");
	}
	for (size_t i = 0; i < n - sizeof a - sizeof b; i++) /* header bytes: an error or not, but no crash */
		for (int bit = 1; bit < 256; bit *= 2) {
			file[i] ^= bit;
			put_file(path, file, n);
			file[i] ^= bit;
			read_everything(path, "model");
		}
	put_file(path, file, n);
	assert_int_equal(read_everything(path, "model"), 0);
	free(file);
}

static void safetensors_shards(void **state)
{
	(void)state;
	real a[2] = {1, 2}, b[3] = {3, 4, 5}, out[3];
	char *index = at("model.safetensors.index.json");
	struct named_tensor arrays[] = {{"a", 2, 0, a}, {"b", 3, 0, b}};
	assert_int_equal(safetensors_write(at("one.safetensors"), &arrays[0], 1), 0);
	assert_int_equal(safetensors_write(at("two.safetensors"), &arrays[1], 1), 0);
	assert_int_equal(safetensors_write(at("both.safetensors"), arrays, 2), 0);
	put_string(at("model.safetensors"), "not looked at: the index wins");
	put_string(index, "{\"metadata\":{\"total_size\":20},"
			"\"weight_map\":{\"b\":\"two.safetensors\",\"a\":\"one.safetensors\"}}");
	struct tensors *w = tensors_open(scratch, "model");
	assert_non_null(w);
	assert_int_equal(tensors_count(w), 2);
	assert_int_equal(tensors_read(w, &(struct named_tensor){"b", 3, 0, out}), 0);
	assert_memory_equal(out, b, sizeof b);
	assert_int_equal(tensors_read(w, &(struct named_tensor){"a", 2, 0, out}), 0);
	assert_memory_equal(out, a, sizeof a);
	assert_int_equal(tensors_read(w, &(struct named_tensor){"c", 2, 0, out}), -1);
	expect_error("tensor c is missing");
	tensors_close(w);
	assert_null(tensors_open(scratch, "optimizer"));
	expect_error("looked for optimizer.safetensors.index.json and optimizer.safetensors");

	static const struct { const char *index, *error; } cases[] = {
		{"", "model.safetensors.index.json:|bad JSON"},
		{"[]", "expected a JSON object"},
		{"{}", "`weight_map` is missing"},
		{"{\"weight_map\":[]}", "`weight_map` is an array"},
		{"{\"weight_map\":{\"a\":1}}", "tensor a: is an integer"},
		{"{\"weight_map\":{\"a\":\"\"}}", "is no plain file name"},
		{"{\"weight_map\":{\"a\":\"sub/one.safetensors\"}}", "\"sub/one.safetensors\" is no plain file name"},
		{"{\"weight_map\":{\"a\":\"x\\u001b[31m\\n/y\"}}", "\"x?[31m?/y\" is no plain file name"},
		{"{\"weight_map\":{\"a\":\"..\"}}", "\"..\" is no plain file name"},
		{"{\"weight_map\":{\"a\":\"three.safetensors\"}}", "three.safetensors: is not there|for tensor a"},
		{"{\"weight_map\":{\"a\":\"one.safetensors\",\"c\":\"one.safetensors\"}}", "one.safetensors: tensor c is missing"},
		{"{\"weight_map\":{\"a\":\"both.safetensors\"}}", "both.safetensors: holds tensor b|in no file"},
		{"{\"weight_map\":{\"a\":\"one.safetensors\",\"b\":\"one.safetensors\"}}", "tensor b is missing"},
		{"{\"weight_map\":{\"a\":\"both.safetensors\",\"b\":\"two.safetensors\"}}",
			"holds tensor b|it is in two.safetensors"},
		{"{\"weight_map\":{\"a\":\"one.safetensors\",\"a\":\"two.safetensors\"}}", "duplicate"},
		{"{\"weight_map\":{\"a\":\"model.safetensors\"}}", "model.safetensors: header length"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		put_string(index, cases[i].index);
		assert_null(tensors_open(scratch, "model"));
		expect_error(cases[i].error);
	}
}

static void write_failure(void **state)
{
	(void)state;
	static real big[1 << 20];
	limit_files(1 << 16);
	char *path = at("big.safetensors");
	int rc = safetensors_write(path, &(struct named_tensor){"big", 1 << 20, 0, big}, 1);
	limit_files(RLIM_INFINITY);
	assert_int_equal(rc, -1);
	expect_error("big.safetensors: cannot write: File too large; free some space");
	assert_false(exists(path));
	/* Pieces that only stop fitting when they leave the buffer. */
	struct safetensors_writer *w = safetensors_create(path, &(struct named_tensor){"big", 1 << 20, 0, NULL}, 1);
	limit_files(1 << 16);
	for (rc = 0; !rc;)
		rc = safetensors_append(w, big, 100);
	limit_files(RLIM_INFINITY);
	expect_error("big.safetensors: cannot write: File too large");
	safetensors_abandon(w);
	assert_false(exists(path));
	w = safetensors_create(path, &(struct named_tensor){"small", 100, 0, NULL}, 1);
	limit_files(1 << 8);
	assert_int_equal(safetensors_append(w, big, 100), 0);
	assert_int_equal(safetensors_finish(w), -1);
	limit_files(RLIM_INFINITY);
	expect_error("big.safetensors: cannot write: File too large");
	assert_false(exists(path));
	assert_int_equal(safetensors_write(at("no/such/x.safetensors"), NULL, 0), -1);
	expect_error("x.safetensors: cannot create");
}

/* ---- checkpoints ---- */

static void load_config(struct config *c)
{
	char *path = at("run.yaml"), text[4096];
	snprintf(text, sizeof text,
		"model: { hidden_size: 16, num_hidden_layers: 3, num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8,\n"
		"  vocab_size: 257, num_experts: 4, num_experts_per_tok: 2, num_shared_experts: 1, moe_intermediate_size: 8 }\n"
		"data: { train: t, tokenizer: byte, seq_len: 16 }\n"
		"train: { output_dir: %s, seed: 7, steps: 20, micro_batch: 2, batch: 4 }\n"
		"schedule: { peak_lr: 1.0e-3 }\n", at("run"));
	put_string(path, text);
	if (config_load(c, path, 0, NULL, false) < 0)
		fail_msg("%s", error_text);
}

struct example {               /* what a checkpoint test saves */
	struct config config;
	struct trainer_state state;
	double mean[3], std[3];
	real w[6], m[6], v[6];
	struct named_tensor model[2], optimizer[4];
};

static void example_init(struct example *x)
{
	memset(x, 0, sizeof *x);
	load_config(&x->config);
	for (int i = 0; i < 6; i++)
		x->w[i] = i + (real)0.1, x->m[i] = -i, x->v[i] = i * i;
	for (int i = 0; i < 3; i++)
		x->mean[i] = -1.0 / (3 + i), x->std[i] = 1 / sqrt(2 + i);
	x->state = (struct trainer_state){.step = 5, .samples = 20, .tokens = 320, .num_layers = 3, .router_mean = x->mean,
		.router_std = x->std, .num_sources = 2, .sources = {{1234567890123, 0xfedcba98, INT64_C(3) << 30, -(INT64_C(5) << 30), 17, 0},
		{300, 1, 1 << 30, INT64_C(5) << 30, INT64_MAX / 2, 4}}};
	x->model[0] = (struct named_tensor){"model.w", 2, 3, x->w};
	x->model[1] = (struct named_tensor){"model.b", 2, 0, x->w + 3};
	x->optimizer[0] = (struct named_tensor){"exp_avg.model.w", 2, 3, x->m};
	x->optimizer[1] = (struct named_tensor){"exp_avg.model.b", 2, 0, x->m + 1};
	x->optimizer[2] = (struct named_tensor){"exp_avg_sq.model.w", 2, 3, x->v};
	x->optimizer[3] = (struct named_tensor){"exp_avg_sq.model.b", 2, 0, x->v + 2};
}

/* Writes part `part` of a kind: of its n arrays those that are dealt to it in turn, element by element. */
static int write_part(const char *dir, const char *kind, const struct named_tensor *arrays, int n, int part, int parts)
{
	char path[PATH_LEN];
	struct named_tensor mine[4];
	int count = 0, rc = 0;
	for (int i = part; i < n; i += parts)
		mine[count++] = arrays[i];
	shard_path(path, dir, kind, part, parts);
	struct safetensors_writer *w = safetensors_create(path, mine, count);
	if (!w)
		return -1;
	for (int i = 0; i < count; i++)
		for (int64_t j = 0; j < named_tensor_size(&mine[i]) && !rc; j++)
			rc = safetensors_append(w, mine[i].data + j, 1);
	if (!rc)
		return safetensors_finish(w);
	safetensors_abandon(w);
	return -1;
}

static int write_parts(const struct example *x, const char *dir, int parts)
{
	int rc = 0;
	for (int part = 0; part < parts && !rc; part++)
		rc = write_part(dir, "model", x->model, COUNT(x->model), part, parts) < 0 ? -1 :
				write_part(dir, "optimizer", x->optimizer, COUNT(x->optimizer), part, parts);
	return rc;
}

static int save_parts(struct example *x, int64_t step, int parts)
{
	char dir[PATH_LEN];
	x->state.step = step;
	int rc = checkpoint_begin(&x->config, &x->state, dir);
	if (rc)
		return rc;
	if (write_parts(x, dir, parts) == 0)
		return checkpoint_commit(&x->config, &x->state, dir, parts);
	checkpoint_abandon(dir);
	return -1;
}

static int example_save(struct example *x, int64_t step)
{
	return save_parts(x, step, 1);
}

/* All that a resumed run reads: 0, or -1 when any of it is refused. */
static int example_read(const char *dir, const struct config *c, struct trainer_state *s)
{
	return checkpoint_read_state(dir, c, s, stderr) < 0 || read_everything(dir, "model") < 0 ? -1 : read_everything(dir, "optimizer");
}

/* A wrong bit in any byte of any file is found, unless it makes no difference: the last of 17 digits may not. So is a missing byte, and a
 * missing file. */
static void break_files(const struct example *x, struct example *y, const char *dir, int parts)
{
	char name[64], file_path[PATH_LEN];
	for (int k = -1; k < 0 || checkpoint_file_name(name, k, parts); k++) {
		if (k < 0)
			strcpy(name, "trainer.json");
		assert_int_equal(path_join(file_path, dir, name), 0);
		size_t n;
		uint8_t *file = get_file(file_path, &n);
		for (size_t i = 0; i < n; i++) {
			file[i] ^= 1;
			put_file(file_path, file, n);
			file[i] ^= 1;
			if (example_read(dir, &x->config, &y->state) < 0)
				expect_error(name);
			else {
				assert_int_equal(k, -1);
				assert_memory_equal(x->mean, y->mean, sizeof x->mean);
				assert_memory_equal(x->std, y->std, sizeof x->std);
				assert_true(y->state.step == 5 && y->state.samples == 20 && y->state.tokens == 320);
			}
		}
		put_file(file_path, file, n - 1);
		if (k >= 0) {
			assert_int_equal(example_read(dir, &x->config, &y->state), -1);
			expect_error(name);
		}
		unlink(file_path);
		assert_int_equal(example_read(dir, &x->config, &y->state), -1);
		expect_error(name);
		put_file(file_path, file, n);
		free(file);
	}
	assert_int_equal(example_read(dir, &x->config, &y->state), 0);
}

static void checkpoint_round_trip(void **state)
{
	(void)state;
	static struct example x, y;
	char path[PATH_LEN];
	example_init(&x);
	y.state = (struct trainer_state){.num_layers = 3, .router_mean = y.mean, .router_std = y.std};
	assert_int_equal(checkpoint_find(at("run"), path), 0);
	assert_int_equal(example_save(&x, 5), 0);
	assert_int_equal(checkpoint_find(at("run"), path), 1);
	assert_string_equal(path, at("run/step-0000005"));
	if (example_read(path, &x.config, &y.state) < 0)
		fail_msg("%s", error_text);
	assert_true(y.state.step == 5 && y.state.samples == 20 && y.state.tokens == 320);
	assert_memory_equal(x.mean, y.mean, sizeof x.mean);
	assert_memory_equal(x.std, y.std, sizeof x.std);
	assert_int_equal(y.state.num_sources, 2);
	for (int i = 0; i < 2; i++) {
		const struct source_state *a = &x.state.sources[i], *b = &y.state.sources[i];
		assert_true(a->tokens == b->tokens && a->crc32 == b->crc32 && a->share == b->share && a->credit == b->credit && a->taken == b->taken &&
				a->order == b->order);
	}

	break_files(&x, &y, path, 1);

	y.state.num_layers = 2;
	assert_int_equal(checkpoint_read_state(path, &x.config, &y.state, stderr), -1);
	expect_error("`router_mean` has 3 entries; expected one for each of 2 layers");
	/* Another model is reported as that, not as what follows from it. */
	struct config asked = x.config;
	asked.model.num_hidden_layers = 2;
	assert_int_equal(checkpoint_read_state(path, &asked, &y.state, stderr), -1);
	expect_error("trainer.json: model.num_hidden_layers was 3 in the checkpoint, found 2");
	/* A renamed directory. */
	y.state.num_layers = 3;
	assert_int_equal(rename(path, at("run/step-0000004")), 0);
	assert_int_equal(checkpoint_read_state(at("run/step-0000004"), &x.config, &y.state, stderr), -1);
	expect_error("run/step-0000004/trainer.json: `step` is 5, but the directory's name says 4");
	assert_int_equal(rename(at("run/step-0000004"), path), 0);
	x.std[1] = NAN;
	assert_int_equal(example_save(&x, 6), -1);
	expect_error("router_std of layer 1 is ");
	assert_false(exists(at("run/.tmp-step-0000006")));
	assert_false(exists(at("run/step-0000006")));
	assert_int_equal(checkpoint_find(at("run"), path), 1);
	assert_string_equal(path, at("run/step-0000005"));
}

/* Whether DIR/name is there. */
static bool holds(const char *dir, const char *name)
{
	return exists(at("%s/%s", dir, name));
}

/* One part is what Hugging Face expects of a small model, several are what it expects of a large one. */
static void checkpoint_parts(void **state)
{
	(void)state;
	static struct example x, y;
	char path[PATH_LEN];
	example_init(&x);
	y.state = (struct trainer_state){.num_layers = 3, .router_mean = y.mean, .router_std = y.std};
	assert_int_equal(example_save(&x, 4), 0);
	static const char *const single[] = {"config.json", "model.safetensors", "optimizer.safetensors", "trainer.json"};
	for (int i = 0; i < COUNT(single); i++)
		assert_int_equal(unlink(at("run/step-0000004/%s", single[i])), 0);
	assert_int_equal(rmdir(at("run/step-0000004")), 0); /* there was nothing else */

	assert_int_equal(save_parts(&x, 5, 3), 0);
	assert_int_equal(save_parts(&x, 5, 2), 1);
	assert_int_equal(checkpoint_find(at("run"), path), 1);
	assert_true(holds("run/step-0000005", "model-00003-of-00003.safetensors"));
	assert_false(holds("run/step-0000005", "model.safetensors") || exists(at("run/.tmp-step-0000005")));
	size_t n;
	uint8_t *index = get_file(at("run/step-0000005/model.safetensors.index.json"), &n);
	assert_string_equal(index, "{\n  \"metadata\": {\n    \"total_size\": 32\n  },\n  \"weight_map\": {\n"
			"    \"model.b\": \"model-00002-of-00003.safetensors\",\n"
			"    \"model.w\": \"model-00001-of-00003.safetensors\"\n  }\n}\n");
	free(index);
	if (example_read(path, &x.config, &y.state) < 0)
		fail_msg("%s", error_text);
	real out[6];
	struct tensors *w = tensors_open(path, "optimizer");
	assert_int_equal(tensors_count(w), 4);
	for (int i = 0; i < COUNT(x.optimizer); i++) {
		const struct named_tensor *a = &x.optimizer[i];
		assert_int_equal(tensors_read(w, &(struct named_tensor){a->name, a->rows, a->cols, out}), 0);
		assert_memory_equal(out, a->data, named_tensor_size(a) * sizeof *out);
	}
	assert_int_equal(tensors_read_range(w, "exp_avg_sq.model.w", 2, 3, 1, 4, out), 0);
	assert_memory_equal(out, x.v + 1, 4 * sizeof *out);
	tensors_close(w);
	break_files(&x, &y, path, 3);

	/* What no seal guards when weights are read by themselves. */
	char *shard = at("run/step-0000005/optimizer-00002-of-00003.safetensors");
	assert_int_equal(truncate(shard, 20), 0);
	assert_null(tensors_open(path, "optimizer"));
	expect_error("optimizer-00002-of-00003.safetensors: header of |the file is truncated");
	assert_int_equal(write_part(path, "optimizer", x.optimizer, 2, 0, 1), 0);
	assert_int_equal(rename(at("run/step-0000005/optimizer.safetensors"), shard), 0);
	assert_null(tensors_open(path, "optimizer"));
	expect_error("optimizer-00002-of-00003.safetensors: holds tensor exp_avg.model.w, but |it is in optimizer-00001-of-00003");
	assert_int_equal(unlink(shard), 0);
	assert_null(tensors_open(path, "optimizer"));
	expect_error("optimizer-00002-of-00003.safetensors: is not there, but |names it for tensor exp_avg.model.b");
}

/* A checkpoint whose parts are not all there, or not sound, does not come to be. */
static void checkpoint_refused(void **state)
{
	(void)state;
	static struct example x;
	char dir[PATH_LEN], second[PATH_LEN], third[PATH_LEN];
	example_init(&x);
	for (int i = 0; i < 7; i++) {
		int parts = i == 3 ? 4 : i == 4 ? 0 : i == 5 ? 1 : 3;
		assert_int_equal(checkpoint_begin(&x.config, &x.state, dir), 0);
		assert_string_equal(dir, at("run/.tmp-step-0000005"));
		assert_int_equal(write_parts(&x, dir, 3), 0);
		shard_path(second, dir, i == 6 ? "optimizer" : "model", 1, 3);
		shard_path(third, dir, "model", 2, 3);
		size_t n;
		free(get_file(second, &n));
		if (i == 0)
			assert_int_equal(unlink(second), 0);
		else if (i == 1)
			assert_int_equal(truncate(second, n - 1), 0);
		else if (i == 2)
			assert_int_equal(safetensors_write(third, &x.model[1], 1), 0);
		else if (i == 6)
			assert_int_equal(truncate(second, 100), 0);
		static const char *const errors[] = {
			"model-00002-of-00003.safetensors: cannot open: No such file",
			"model-00002-of-00003.safetensors: tensor model.b: data_offsets are [0, 8]; expected a range within the file's 7",
			"of-00003.safetensors: tensor model.b is in |of-00003.safetensors as well; expected it once",
			"model-00001-of-00004.safetensors: cannot open", ".tmp-step-0000005: 0 shards; expected 1 to 99999",
			"model.safetensors: cannot open", "optimizer-00002-of-00003.safetensors: header of |truncated",
		};
		assert_int_equal(checkpoint_commit(&x.config, &x.state, dir, parts), -1);
		expect_error(errors[i]);
		assert_false(exists(dir) || exists(at("run/step-0000005")));
	}
	assert_int_equal(checkpoint_begin(&x.config, &x.state, dir), 0);
	assert_int_equal(write_parts(&x, dir, 3), 0);
	checkpoint_abandon(dir);
	assert_false(exists(dir));
}

/* Members of trainer.json that are wrong although its checksum is right. */
#define SOURCE_JSON(share, credit) \
	"{\"tokens\":5,\"crc32\":\"00000000\",\"share\":" share ",\"credit\":" credit ",\"taken\":1,\"order\":0}"

static void checkpoint_wrong_fields(void **state)
{
	(void)state;
	static struct example x;
	example_init(&x);
	assert_int_equal(example_save(&x, 5), 0);
	char path[PATH_LEN];
	strcpy(path, at("run/step-0000005/trainer.json"));
	FILE *notes = fopen(at("notes"), "w");
	static const struct { const char *key, *json, *error; } cases[] = {
		{"format", "[1]", "`format` is an integer"}, {"format", "[\"other\"]", "`format` is \"other\""},
		{"version", "[1]", "version 1; this program reads version 2"}, {"version", "[null]", "`version` is null"},
		{"step", "[-1]", "`step` is -1"}, {"step", "[1.5]", "`step` is a real number"}, {"step", "[]", "`step` is missing"},
		{"samples", "[\"1\"]", "`samples` is a string"}, {"tokens", "[-5]", "`tokens` is -5"},
		{"router_mean", "[[0,1]]", "`router_mean` has 2 entries"}, {"router_mean", "[{}]", "`router_mean` is an object"},
		{"router_mean", "[[0,null,1]]", "`router_mean` entry 1 is null"},
		{"router_std", "[[1,1,-1]]", "`router_std` entry 2 is -1"},
		{"router_std", "[]", "`router_std` is missing"}, {"files", "[]", "`files` entry `config.json` is missing"},
		{"files", "[{\"config.json\":{\"size\":3,\"crc32\":\"00000000\"}}]",
			"config.json: |expected the 3 that were saved"},
		{"files", "[{\"config.json\":{\"crc32\":\"00000000\"}}]", "`size` is missing"},
		{"parts", "[0]", "`parts` is 0; expected 1 to 99999"}, {"parts", "[\"3\"]", "`parts` is a string"},
		{"parts", "[2]", "`files` entry `model-00001-of-00002.safetensors` is missing"},
		{"config", "[]", "`config` is missing"}, {"config", "[3]", "`config` is an integer"},
		{"sources", "[]", "`sources` is missing"}, {"sources", "[{}]", "`sources` is an object; expected an array of at most 64"},
		{"sources", "[[{}]]", "source 1: `tokens` is missing"}, {"sources", "[[5]]", "source 1: `tokens` is missing"},
		{"sources", "[[" SOURCE_JSON("\"-1\"", "0") "]]", "source 1: `share` is a string"},
		{"sources", "[[" SOURCE_JSON("5", "0") "," SOURCE_JSON("4294967297", "0") "]]", "source 2: `share` is 4294967297"},
		{"sources", "[[" SOURCE_JSON("5", "-9223372036854775807") "]]", "source 1: `credit` is -9223372036854775807"},
		{"step", "[6]", "`step` is 6, but the directory's name says 5"},
		{"config", "[{\"model\":{\"head_dim\":4}}]", "model.head_dim was 4 in the checkpoint, found 8"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		json_t *good = json_read(path), *value = json_loads(cases[i].json, 0, NULL), *bad = json_deep_copy(good);
		if (json_array_size(value))
			json_object_set(bad, cases[i].key, json_array_get(value, 0));
		else
			json_object_del(bad, cases[i].key);
		json_object_set_new(bad, "crc32", crc_to_json(trainer_crc(bad)));
		assert_int_equal(json_write(path, bad), 0);
		if (checkpoint_read_state(at("run/step-0000005"), &x.config, &x.state, notes) == 0)
			fail_msg("%s %s was accepted", cases[i].key, cases[i].json);
		expect_error(cases[i].error);
		assert_int_equal(json_write(path, good), 0);
		json_decref(good), json_decref(value), json_decref(bad);
	}
	json_t *older = json_read(path); /* from when there was but one part */
	json_object_del(older, "parts");
	json_object_set_new(older, "crc32", crc_to_json(trainer_crc(older)));
	assert_int_equal(json_write(path, older), 0);
	json_decref(older);
	assert_int_equal(checkpoint_read_state(at("run/step-0000005"), &x.config, &x.state, notes), 0);
	put_string(path, "");
	assert_int_equal(checkpoint_read_state(at("run/step-0000005"), &x.config, &x.state, notes), -1);
	fclose(notes);
	expect_error("trainer.json:");
}

/* The order of some system calls, while they are recorded: r rename, s fsync, u unlinkat. */
static char calls[4096];
static int num_calls = -1;

static void record_call(char call)
{
	if (num_calls >= 0 && num_calls < (int)sizeof calls - 1)
		calls[num_calls++] = call;
}

int fsync(int fd)
{
	record_call('s');
	return syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to)
{
	record_call('r');
	return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int unlinkat(int dir, const char *name, int flags)
{
	record_call('u');
	return syscall(SYS_unlinkat, dir, name, flags);
}

static void checkpoint_prunes(void **state)
{
	(void)state;
	static struct example x;
	char path[PATH_LEN];
	example_init(&x);
	x.config.checkpoint.keep = 0;
	for (int64_t step = 1; step <= 3; step++)
		assert_int_equal(example_save(&x, step), 0);
	assert_true(exists(at("run/step-0000001")));
	/* What is not ours: other names, and our name without our content. */
	static const char *const others[] = {"step-1", "step-00000001", "step-0000000x", "xstep-0000001",
		"step-0000000", "step-",
		"step-99999999999999999999", ".tmp-step-x"};
	for (int i = 0; i < COUNT(others); i++)
		assert_int_equal(mkdir(at("run/%s", others[i]), 0777), 0);
	x.config.checkpoint.keep = 2;
	num_calls = 0;
	assert_int_equal(example_save(&x, 12345678), 0);
	assert_non_null(strstr(calls, "srsrsu")); /* saved; renamed; old one renamed, and that is on disk before it is removed */
	num_calls = -1;
	assert_false(exists(at("run/step-0000001")) || exists(at("run/step-0000002")));
	assert_true(exists(at("run/step-0000003")) && exists(at("run/step-12345678")));
	for (int i = 0; i < COUNT(others); i++)
		assert_true(exists(at("run/%s", others[i])));
	assert_int_equal(checkpoint_find(at("run"), path), 1);
	assert_string_equal(path, at("run/step-12345678"));
	for (int i = 0; i < COUNT(others); i++)
		assert_true(exists(at("run/%s", others[i])));
	/* The one just saved stays, even when it is not the newest. */
	assert_int_equal(example_save(&x, 2), 0);
	assert_true(exists(at("run/step-0000002")));
	/* A symbolic link goes, what it points to stays. */
	assert_int_equal(rename(at("run/step-0000003"), at("elsewhere")), 0);
	assert_int_equal(symlink(at("elsewhere"), at("run/step-0000003")), 0);
	x.config.checkpoint.keep = 1;
	assert_int_equal(example_save(&x, 12345679), 0);
	assert_false(exists(at("run/step-0000003")));
	assert_true(exists(at("elsewhere/trainer.json")));
	/* What cannot be removed is no failure: the new checkpoint is there. */
	assert_int_equal(make_directories(at("run/.tmp-step-12345679/in/the/way")), 0);
	assert_int_equal(example_save(&x, 12345680), 0);
	assert_true(exists(at("run/step-12345679")) && exists(at("run/step-12345680")));
}

/* A newest checkpoint that is not whole is not passed over. */
static void checkpoint_not_whole(void **state)
{
	(void)state;
	static struct example x;
	char path[PATH_LEN], trainer[PATH_LEN];
	example_init(&x);
	x.config.checkpoint.keep = 0;
	assert_int_equal(mkdir(at("run"), 0777), 0);
	assert_int_equal(mkdir(at("run/step-0000003"), 0777), 0);
	assert_int_equal(checkpoint_find(at("run"), path), -1);
	expect_error("run/step-0000003/trainer.json: cannot be read (No such file or directory)|"
			"remove that directory to start from the beginning");
	assert_int_equal(example_save(&x, 5), 0);
	assert_int_equal(checkpoint_find(at("run"), path), 1); /* an older one is nobody's concern */
	assert_int_equal(example_save(&x, 6), 0);
	strcpy(trainer, at("run/step-0000006/trainer.json"));
	assert_int_equal(unlink(trainer), 0);
	assert_int_equal(mkdir(at("run/step-0000007"), 0777), 0);
	assert_int_equal(checkpoint_find(at("run"), path), -1);
	expect_error("run/step-0000007/trainer.json: cannot be read|"
			"repair it, or remove that directory to continue from step 5");
	/* What hides it is told too: here a link in a circle. */
	assert_int_equal(rmdir(at("run/step-0000007")), 0);
	assert_int_equal(symlink(trainer, trainer), 0);
	assert_int_equal(checkpoint_find(at("run"), path), -1);
	expect_error("run/step-0000006/trainer.json: cannot be read (Too many levels of symbolic links)|"
			"continue from step 5");
	remove_tree(at("run/step-0000006"));
	assert_int_equal(checkpoint_find(at("run"), path), 1);
	assert_string_equal(path, at("run/step-0000005"));
	put_string(at("run/step-0000008"), "a file");
	assert_int_equal(checkpoint_find(at("run"), path), -1);
	expect_error("step-0000008/trainer.json: cannot be read (Not a directory)");
}

static void checkpoint_interrupted(void **state)
{
	(void)state;
	static struct example x;
	char path[PATH_LEN];
	example_init(&x);
	assert_int_equal(example_save(&x, 5), 0);
	/* While writing step 6. */
	assert_int_equal(mkdir(at("run/.tmp-step-0000006"), 0777), 0);
	put_string(at("run/.tmp-step-0000006/model.safetensors"), "half");
	assert_int_equal(checkpoint_find(at("run"), path), 1);
	assert_string_equal(path, at("run/step-0000005"));
	assert_false(exists(at("run/.tmp-step-0000006")));
	/* A temporary does not hinder the next try. */
	assert_int_equal(mkdir(at("run/.tmp-step-0000006"), 0777), 0);
	put_string(at("run/.tmp-step-0000006/rubbish"), "half");
	assert_int_equal(example_save(&x, 6), 0);
	assert_false(exists(at("run/step-0000006/rubbish")));
	/* The same step again: what is there stays. */
	x.state.samples = 99;
	assert_int_equal(example_save(&x, 6), 1);
	assert_false(exists(at("run/.tmp-step-0000006")));
	assert_int_equal(example_read(at("run/step-0000006"), &x.config, &x.state), 0);
	assert_int_equal(x.state.samples, 20);
	/* What is in its place and no checkpoint stays too. */
	assert_int_equal(make_directories(at("run/step-0000007/mine")), 0);
	assert_int_equal(example_save(&x, 7), -1);
	expect_error("step-0000007: cannot rename to |step-0000007: Directory not empty; "
			"if that is an old checkpoint, remove it");
	assert_false(exists(at("run/.tmp-step-0000007")));
	assert_true(exists(at("run/step-0000007/mine")));

	assert_int_equal(checkpoint_find(at("run.yaml"), path), -1);
	expect_error("run.yaml: cannot list");
	snprintf(x.config.train.output_dir, PATH_LEN, "%s", at("run.yaml"));
	assert_int_equal(example_save(&x, 7), -1);
	expect_error("run.yaml");
}

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
		{2, -1, "token 4: id -1 "}, {3, -300, "token 4: id -300 "}, {4, -5, "token 4: id -5 "}, {5, -5, "token 4: id -5 "},
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
		{78, 4, 8, "document entry 1 is 4"}, {78, -1, 8, "document entry 1 is -1"}, {86, 0, 8, "document entry 2 is 0"},
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
	if (tokenize_files(at("out/deep/t"), "byte", false, num_files, files, &result) < 0 ||
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
	put_file(at("a.txt"), "h\0\xff\n", 4);
	put_string(at("empty.txt"), "");
	put_string(at("b.jsonl"), "{\"text\":\"one\"}\n\n  \t\r\n"
			"{\"id\":99999999999999999999999,\"text\":\"\\u00e9\\n\\u0000\\ud83d\\ude00\"}\r\n"
			"{\"text\":\"\"}\n{\"text\":\"last\",\"text2\":[1,{}]}");
	char a[PATH_LEN], b[PATH_LEN], e[PATH_LEN], big[PATH_LEN];
	strcpy(a, at("a.txt")), strcpy(b, at("b.jsonl")), strcpy(e, at("empty.txt")), strcpy(big, at("big.txt"));
	static const char both[] = "h\0\xff\n|one|\xc3\xa9\n\0\xf0\x9f\x98\x80|last|";
	check_tokens(3, (char *[]){a, e, b}, both, sizeof both - 1, 4);
	check_tokens(1, (char *[]){a}, "h\0\xff\n|", 5, 1); /* replaces */

	/* Longer than a sequence: 0, 1 and 2 cuts, at the cut and beside it. */
	static const int sizes[] = {SEQUENCE_MAX - 1, SEQUENCE_MAX, SEQUENCE_MAX + 1, 2 * SEQUENCE_MAX,
		2 * SEQUENCE_MAX + 1, 3000000};
	for (int i = 0; i < COUNT(sizes); i++) {
		int n = sizes[i];
		char *text = allocate(n + 6);
		for (int k = 0; k < n; k++)
			text[k] = 'a' + k % 26;
		put_file(big, text, n);
		memcpy(text + n, "|h\0\xff\n|", 6);
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
	if (tokenize_files(at("t\xff"), dir, false, 1, (char *[]){text}, &result) < 0 || tokens_open(&t, at("t\xff"), "none", INT32_MAX) < 0)
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

/* Elsewhere than on a terminal progress is a plain line every half minute. */
static void tokenize_progress(void **state)
{
	(void)state;
	double now = clock_seconds();
	struct progress p = {.what = "tokenize", .total = 400, .scale = 0.01, .unit = "hundreds", .started = now - 40, .shown = now - 40};
	fflush(stderr);
	int saved = dup(2), file = open(at("err"), O_WRONLY | O_CREAT, 0666);
	dup2(file, 2);
	progress(&p, 100);
	progress(&p, 100); /* too soon */
	p.shown -= 31;
	progress(&p, 300); /* more than the files held at first */
	dup2(saved, 2);
	close(saved), close(file);
	size_t n;
	char *text = (char *)get_file(at("err"), &n);
	assert_string_equal(text, "tokenize: 25%  0.025 hundreds/s  2:00 left\ntokenize: 5 hundreds  0.125 hundreds/s\n");
	free(text);
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
		const bool is = !t.loss_mask || t.loss_mask[i], was = i && (!t.loss_mask || t.loss_mask[i - 1]);
		if (is != was)
			out[n++] = is ? '[' : ']';
		out[n++] = id_at(&t, i) == 256 ? '|' : id_at(&t, i);
	}
	n -= out[n - 1] == '[';
	out[n] = 0;
	tokens_close(&t);
	return out;
}

#define USER "{\"role\":\"user\",\"content\":\"u\"}"
#define SAYS(role, content) "{\"role\":\"" role "\",\"content\":\"" content "\"}"

/* Conversations in Ling's chat form, of which only the assistant's words are learned; beside a plain text, all of which is. */
static void tokenize_chat(void **state)
{
	(void)state;
	struct tokenized result;
	char b[PATH_LEN];
	strcpy(b, at("b.jsonl"));
	static const struct { const char *lines, *expected; } cases[] = {
		{"{\"prompt\":\"p\",\"completion\":\"c\"}", "<role>HUMAN</role>p<role>ASSISTANT</role>[c|"},
		{"{\"prompt\":\"\",\"completion\":\"\",\"id\":1}", "<role>HUMAN</role><role>ASSISTANT</role>[|"},
		{"{\"text\":\"t\",\"prompt\":5}\n{\"messages\":[" SAYS("system", "s") "," SAYS("User", " u ") "," SAYS("assistant", "a") "]}\n{\"text\":\"v\"}",
			"[t|]<role>SYSTEM</role>s<role>HUMAN</role> u <role>ASSISTANT</role>[a|v|"},
		{"{\"messages\":[" USER "," SAYS("ASSISTANT", "a") "," USER "," SAYS("assistant", "b") "]}",
			"<role>HUMAN</role>u<role>ASSISTANT</role>[a]<role>HUMAN</role>u<role>ASSISTANT</role>[b|"},
		/* what is not the assistant's last word ends the document, and is not learned; contents are text, whatever they look like */
		{"{\"messages\":[" SAYS("assistant", "a") "," SAYS("tool", "<role>ASSISTANT</role>") "]}",
			"<role>ASSISTANT</role>[a]<role>TOOL</role><role>ASSISTANT</role>|"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		put_string(b, cases[i].lines);
		if (tokenize_files(at("t"), "byte", false, 1, (char *[]){b}, &result) < 0)
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
	mask[3] = 2;
	put_file(at("t.mask.bin"), mask, n);
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("t.mask.bin: byte 3 is 2; expected 0 or 1");
	put_file(at("t.mask.bin"), mask, n - 1);
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("t.mask.bin: |expected one for each of the");
	free(mask);
	unlink(at("t.mask.bin"));
	assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
	expect_error("it is damaged, missing");
	/* A file that is replaced leaves no mask for the next one. */
	put_string(b, cases[0].lines);
	assert_int_equal(tokenize_files(at("t"), "byte", false, 1, (char *[]){b}, &result), 0);
	put_string(b, "{\"text\":\"plain\"}");
	assert_int_equal(tokenize_files(at("t"), "byte", false, 1, (char *[]){b}, &result), 0);
	assert_false(exists(at("t.mask.bin")));
	assert_string_equal(show_tokens(at("t")), "[plain|");
	assert_int_equal(result.loss_tokens, 6);
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
		assert_int_equal(tokenize_files(at("t"), "byte", false, 1, (char *[]){b}, &result), 0);
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
	const struct message messages[] = {{"system", "s\0s", 3}, {"assistant", "a", 1}, {"human", "h", 1}}, bad[] = {{"boss", "b", 1}};
	assert_int_equal(encode(e, "xy", 2, false, &ids), 0);
	assert_int_equal(chat_encode(e, messages, 3, true, &ids, &loss_mask), 0);
	static const char expected[] = "xy<role>SYSTEM</role>s\0s<role>ASSISTANT</role>a<role>HUMAN</role>h<role>ASSISTANT</role>";
	assert_int_equal(ids.count, sizeof expected - 1);
	assert_int_equal(loss_mask.size, ids.count);
	for (int64_t i = 0; i < ids.count; i++) {
		assert_int_equal(ids.id[i], (uint8_t)expected[i]);
		assert_int_equal(loss_mask.data[i], expected[i] == 'a');
	}
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
		{1, 1, 1040, "an llm.c file of version 1; expected 7"}, {0, 20240520, 1040, "version 7; expected 1"}, {2, 5, 1040, "tells of 5 ids of 4 bytes; 16 bytes"},
		{2, -1, 1040, "tells of -1 ids"}, {2, 4, 1036, "tells of 4 ids"}, {0, 20240802, 1040, "found neither an index"}, {2, 4, 1023, "found neither an index"},
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

/* As long as a manifest names the files as they are, opening reads none of the ids; but ids that are read are checked. */
static void manifest_vouches(void **state)
{
	(void)state;
	static uint16_t ids[1000];
	struct tokens t;
	int32_t out[2];
	struct stamp before;
	char path[PATH_LEN];
	strcpy(path, at("t.bin"));
	put_file(path, ids, sizeof ids);
	assert_int_equal(tokens_open(&t, path, "uint16", 10), 0);
	const uint32_t crc = t.crc32;
	assert_int_equal(crc, crc32_z(0, (uint8_t *)ids, sizeof ids));
	tokens_close(&t);
	assert_int_equal(stamp_file(&before, path), 0);
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
	struct manifest m = {.dtype = UINT32, .tokens = count / 2, .documents = -1, .largest_id = 70000, .loss_tokens = count / 2};
	struct tokens t;
	int32_t out[4];
	char path[PATH_LEN];
	strcpy(path, at("t.bin"));
	int fd = open(path, O_RDWR | O_CREAT, 0666);
	const uint32_t ids[] = {7, 70000, 9};
	assert_int_equal(ftruncate(fd, 2 * count), 0);
	assert_int_equal(pwrite(fd, ids, sizeof ids, 2 * count - sizeof ids), sizeof ids);
	close(fd);
	assert_int_equal(stamps_take(m.stamps, path, at("t"), BARE_IDS), 0);
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
					fail_msg("window %d + %d, token %d: document %d, target %d", (int)start, (int)n, (int)i, document[i], target[i]);
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
	struct stamp stamp;
	assert_int_equal(stamp_file(&stamp, at("t.idx")), 0);
	memset(idx.bytes + 34 + 12 * 8 + 8 * 3, 0xff, 8);
	put_file(at("t.idx"), idx.bytes, idx.n);
	set_time(at("t.idx"), stamp.modified);
	assert_int_equal(tokens_open(&t, at("t"), "none", 10), 0);
	int32_t document[19], target[19];
	assert_int_equal(tokens_documents(&t, 0, 19, document, target), -1);
	expect_error("t.bin: its index was changed while it was in use");
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

static void tokenize_bad(void **state)
{
	(void)state;
	static const struct { const char *text, *error; } cases[] = {
		{"{\"text\":\"a\"}\n{\"text\":\"b\"\n", "b.jsonl:2: bad JSON"}, {"\n\n[1]\n", "b.jsonl:3: is an array"},
		{"{\"txt\":\"a\"}", "b.jsonl:1: found none of `text`"}, {"{\"text\":1}", "b.jsonl:1: `text` is a"},
		{"{\"text\":null}", "`text` is null"}, {"{\"text\":\"a\"} x", "b.jsonl:1: bad JSON"},
		{"nonsense", "b.jsonl:1: bad JSON"},
		{"{\"text\":\"\xff\"}", "b.jsonl:1: bad JSON"}, {"{\"text\":\"\\ud800\"}", "b.jsonl:1: bad JSON"},
		{"{\"text\":\"a\",\"text\":\"b\"}", "b.jsonl:1: bad JSON: duplicate"}, {"", "t: nothing to write"},
		{"{\"text\":\"\"}\n", "t: nothing to write"},
		{"{\"text\":\"a\",\"messages\":[]}", "b.jsonl:1: found several of `text`"}, {"{\"messages\":[],\"completion\":1}", "found several"},
		{"{\"prompt\":\"a\"}", "found none of"}, {"{\"completion\":\"a\"}", "b.jsonl:1: `prompt` is missing"},
		{"{\"prompt\":1,\"completion\":\"a\"}", "`prompt` is an integer"}, {"{\"prompt\":\"a\",\"completion\":null}", "`completion` is null"},
		{"{\"messages\":{}}", "b.jsonl:1: `messages` is an object"}, {"{\"messages\":[]}", "`messages` is empty"},
		{"{\"messages\":[5]}", "b.jsonl:1: message 1: is an integer"},
		{"{\"messages\":[" USER ",{\"content\":\"a\"}]}", "b.jsonl:1: message 2: `role` is missing"},
		{"{\"messages\":[{\"role\":\"user\"}]}", "message 1: `content` is missing"},
		{"{\"messages\":[{\"role\":\"user\",\"content\":[\"a\"]}]}", "message 1: `content` is an array"},
		{"{\"messages\":[{\"role\":\"assistent\",\"content\":\"a\"}]}", "message 1: `role` is \"assistent\"; expected system, user,"},
		{"{\"messages\":[" USER "]}", "no message is the assistant's"},
	};
	struct tokenized result;
	char b[PATH_LEN], dir[PATH_LEN], none[PATH_LEN], own[PATH_LEN];
	strcpy(b, at("b.jsonl")), strcpy(dir, scratch), strcpy(none, at("none.txt")), strcpy(own, at("t.json"));
	for (int i = 0; i < COUNT(cases); i++) {
		put_string(b, cases[i].text);
		assert_int_equal(tokenize_files(at("t"), "byte", false, 1, (char *[]){b}, &result), -1);
		expect_error(cases[i].error);
		assert_false(exists(at("t.bin")) || exists(at("t.idx")) || exists(at("t.json")));
		assert_false(holds_temporary(scratch));
	}
	assert_int_equal(tokenize_files(at("t"), "gpt2", false, 1, (char *[]){b}, &result), -1);
	expect_error("tokenizer `gpt2`: No such file or directory; expected byte, a tokenizer.json, or a directory that holds one");
	assert_int_equal(tokenize_files(at("t"), "byte", false, 1, (char *[]){none}, &result), -1);
	expect_error("none.txt: cannot open");
	assert_int_equal(tokenize_files(at("t"), "byte", false, 1, (char *[]){dir}, &result), -1);
	expect_error("expected a text or .jsonl file, found a directory");
	static const char *const nameless[] = {"", "/", ".", "..", "out/", "out/.", "/.."};
	for (int i = 0; i < COUNT(nameless); i++) {
		assert_int_equal(tokenize_files(*nameless[i] == 'o' ? at("%s", nameless[i]) : nameless[i], "byte", false, 1, (char *[]){b},
				&result), -1);
		expect_error("has no name in it; expected a prefix");
	}
	assert_false(exists(at("out")));
	put_string(own, "precious");
	assert_int_equal(tokenize_files(at("t"), "byte", false, 1, (char *[]){own}, &result), -1);
	expect_error("t.json: is an input, but would be replaced");
	assert_int_equal(tokenize_files(at("b.jsonl/t"), "byte", false, 1, (char *[]){own}, &result), -1);
	expect_error("b.jsonl");
}

static void manifest_broken(void **state)
{
	(void)state;
	struct tokens t;
	struct tokenized result;
	char a[PATH_LEN];
	strcpy(a, at("a.txt"));
	put_string(a, "hello");
	assert_int_equal(tokenize_files(at("t"), "byte", false, 1, (char *[]){a}, &result), 0);
	char too_long[PATH_LEN + 8] = "[\"";
	memset(too_long + 2, 'x', PATH_LEN);
	strcpy(too_long + 2 + PATH_LEN, "\"]");
	const struct { const char *key, *json, *error; } cases[] = {
		{"format", "[\"x\"]", "`format` is \"x\""}, {"format", "[]", "`format` is \"\""},
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
		json_t *good = json_read(at("t.json")), *value = json_loads(cases[i].json, 0, NULL), *bad = json_deep_copy(good);
		json_object_del(bad, "files"); /* as long as it names the files as they are, its word is taken */
		if (json_array_size(value))
			json_object_set(bad, cases[i].key, json_array_get(value, 0));
		else
			json_object_del(bad, cases[i].key);
		assert_int_equal(json_write(at("t.json"), bad), 0);
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
		expect_error("t.json: ");
		assert_int_equal(tokens_open(&t, at("t"), "none", 257), -1);
		expect_error(cases[i].error);
		assert_int_equal(json_write(at("t.json"), good), 0);
		json_decref(good), json_decref(value), json_decref(bad);
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

/* ---- metrics ---- */

static struct metrics example_metrics(int64_t step, double *load)
{
	load[0] = 1.0 / 3 + step, load[1] = 2;
	return (struct metrics){.step = step, .samples = 8 * step, .tokens = 1 << step, .batch = 8, .loss = 5.0 / (3 + step),
		.balance_loss = 1.1, .z_loss = 1e-300, .lr = 1e-4 / 3, .grad_norm = 0.1, .seconds = 1, .tokens_per_second = 1e6 / 7,
		.num_layers = 2, .expert_load = load, .has_valid_loss = step == 2, .valid_loss = step == 2 ? 0.7 : 0};
}

static void write_metrics(int64_t after, int64_t first, int64_t last)
{
	double load[2];
	FILE *f = metrics_open(scratch, after);
	if (!f)
		fail_msg("%s", error_text);
	for (int64_t step = first; step <= last; step++) {
		struct metrics m = example_metrics(step, load);
		assert_int_equal(metrics_write(f, &m), 0);
	}
	assert_int_equal(metrics_sync(f), 0);
	fclose(f);
}

/* The file must hold the steps 1 to last, exactly as written. */
static void check_metrics(int last)
{
	struct metrics *m;
	int n;
	double load[2];
	if (metrics_read(scratch, &m, &n) < 0)
		fail_msg("%s", error_text);
	assert_int_equal(n, last);
	for (int i = 0; i < n; i++) {
		struct metrics e = example_metrics(i + 1, load);
		assert_memory_equal(m[i].expert_load, load, sizeof load);
		e.expert_load = m[i].expert_load;
		assert_true(m[i].step == e.step && m[i].samples == e.samples && m[i].tokens == e.tokens && m[i].batch == e.batch);
		assert_memory_equal(&m[i].loss, &e.loss, offsetof(struct metrics, num_layers) - offsetof(struct metrics, loss));
		assert_int_equal(m[i].has_valid_loss, e.has_valid_loss);
		assert_same(m[i].valid_loss, e.valid_loss);
	}
	free(m);
}

static void metrics_resume(void **state)
{
	(void)state;
	char *path = at("metrics.jsonl");
	write_metrics(0, 1, 5);
	check_metrics(5);
	size_t n, whole;
	uint8_t *good = get_file(path, &n), *text;
	assert_int_equal(strncmp((char *)good, "{\"step\": 1, \"samples\": 8, \"tokens\": 2, \"batch\": 8, \"loss\": 1.25, "
			"\"balance_loss\": 1.1000000000000001, \"z_loss\": ", 110), 0);
	/* Resumed after any step, with the file torn at any byte: each step once, and the same bytes as never stopped. */
	for (int64_t step = 0; step <= 5; step++) {
		for (size_t cut = 0; cut <= n; cut++) {
			put_file(path, good, cut);
			size_t kept = 0, lines = 0;
			for (size_t i = 0; i < n && lines < (size_t)step; i++)
				if (good[i] == '\n' && ++lines && i <= cut) /* a line without its newline is whole too */
					kept = lines;
			if (cut && kept < (size_t)step) { /* lines are missing */
				char ends[128];
				snprintf(ends, sizeof ends, "metrics.jsonl: ends at step %zu, but the run goes on after step %lld", kept,
						(long long)step);
				assert_null(metrics_open(scratch, step));
				expect_error(ends);
				continue;
			}
			write_metrics(step, kept + 1, 5);
			text = get_file(path, &whole);
			if (whole != n || memcmp(text, good, n))
				fail_msg("step %d, cut %zu: %s", (int)step, cut, text);
			free(text);
		}
	}
	write_metrics(2, 3, 3);
	check_metrics(3);
	assert_null(metrics_open(scratch, 7));
	expect_error("metrics.jsonl: ends at step 3, but the run goes on after step 7; bring the missing lines back");
	check_metrics(3);
	write_metrics(0, 1, 2);
	check_metrics(2);
	free(good);
	put_string(path, "");
	check_metrics(0);
	unlink(path);
	struct metrics *m;
	int count;
	assert_int_equal(metrics_read(scratch, &m, &count), -1);
	expect_error("metrics.jsonl: cannot open");
	FILE *f = metrics_open(at("new/run"), 0);
	assert_non_null(f);
	fclose(f);
	assert_true(exists(at("new/run/metrics.jsonl")));
}

static void metrics_nonfinite(void **state)
{
	(void)state;
	double load[2];
	struct metrics x = example_metrics(2, load), *m;
	x.loss = NAN, x.grad_norm = INFINITY, x.valid_loss = -INFINITY, load[0] = NAN, load[1] = INFINITY;
	FILE *f = metrics_open(scratch, 0);
	assert_int_equal(metrics_write(f, &x), 0);
	fclose(f);
	json_t *root = json_read(at("metrics.jsonl"));
	char *text = json_dumps(json_object_get(root, "nonfinite"), JSON_COMPACT);
	assert_string_equal(text, "[\"loss\",\"grad_norm\",\"expert_load\",\"valid_loss\"]");
	assert_true(json_is_null(json_object_get(root, "loss")));
	free(text);
	json_decref(root);
	int n;
	assert_int_equal(metrics_read(scratch, &m, &n), 0);
	assert_true(n == 1 && isnan(m->loss) && isnan(m->grad_norm) && isnan(m->valid_loss) && m->has_valid_loss);
	assert_true(isnan(m->expert_load[0]) && isnan(m->expert_load[1]) && m->lr == x.lr);
	free(m);
	f = fopen(at("full"), "w");
	limit_files(10);
	int rc = metrics_write(f, &x);
	limit_files(RLIM_INFINITY);
	assert_int_equal(rc, -1);
	expect_error("cannot write step 2: File too large");
	fclose(f);
	f = fopen(at("full"), "w");
	fputs("a line of more than ten", f);
	limit_files(10);
	rc = metrics_sync(f);
	limit_files(RLIM_INFINITY);
	assert_int_equal(rc, -1);
	expect_error("metrics.jsonl: cannot bring to disk: File too large");
	fclose(f);
}

static void metrics_broken(void **state)
{
	(void)state;
#define LINE(n) "{\"step\":" #n ",\"samples\":1,\"tokens\":1,\"batch\":1,\"loss\":1,\"balance_loss\":1," \
	"\"z_loss\":1,\"lr\":1," \
	"\"grad_norm\":1,\"seconds\":1,\"tokens_per_second\":1,\"expert_load\":[1,1]}\n"
	static const struct { const char *text, *error; } cases[] = {
		{LINE(1) "nonsense\n" LINE(2), "metrics.jsonl:2: bad JSON"},
		{LINE(1) "\n" LINE(2), "metrics.jsonl:2: bad JSON"},
		{LINE(1) "{\"step\":2}{}\n", "metrics.jsonl:2: bad JSON"},
		{LINE(1) "{\"step\":2,\n" LINE(3), "metrics.jsonl:2: bad JSON"},
		{LINE(1) "{\"step\":2,\"step\":3}\n", "metrics.jsonl:2: bad JSON: duplicate"},
		{LINE(1) "[2]\n", "metrics.jsonl:2: is an array"},
		{"{}\n", "metrics.jsonl:1: `step` is missing"},
		{"{\"step\":1.5}\n", "metrics.jsonl:1: `step` is a real number"},
		{"{\"step\":-1}\n", "metrics.jsonl:1: `step` is -1"},
		{LINE(2) LINE(2), "metrics.jsonl:2: step 2 after step 2"},
		{LINE(2) LINE(3) LINE(1), "metrics.jsonl:3: step 1 after step 3"},
		{LINE(1) "{\"step\":2}\n", "metrics.jsonl:2: `samples` is missing"},
		{"{\"step\":2,\"samples\":1,\"tokens\":1,\"batch\":4294967296}\n", "`batch` is 4294967296"},
		{"{\"step\":2,\"samples\":1,\"tokens\":1,\"batch\":1,\"loss\":\"x\"}\n", "`loss` is a string"},
		{LINE(1) LINE(2) "{\"step\":3,\"samples\":1,\"tokens\":1,\"batch\":1,"
			"\"loss\":1,\"balance_loss\":1,\"z_loss\":1,\"lr\":1,"
			"\"grad_norm\":1,\"seconds\":1,\"tokens_per_second\":1,\"expert_load\":[1,true]}\n",
			"metrics.jsonl:3: `expert_load` is true"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		struct metrics *m;
		int n;
		put_string(at("metrics.jsonl"), cases[i].text);
		assert_int_equal(metrics_read(scratch, &m, &n), -1);
		expect_error(cases[i].error);
		assert_null(metrics_open(scratch, 1)); /* refuses what would not be read later */
		expect_error(cases[i].error);
	}
	struct metrics *m;
	int n;
	put_string(at("metrics.jsonl"), LINE(1) "{\"step\":2,\"sam"); /* while the run goes on */
	assert_int_equal(metrics_read(scratch, &m, &n), 0);
	assert_int_equal(n, 1);
	free(m);
}

/* Text of any bytes as a JSON string, and what of it may be shown while it goes on. */
static void text_as_json(void **state)
{
	(void)state;
	static const struct { const char *text; size_t size; const char *json; size_t whole; } cases[] = {
		{"", 0, "\"\"", 0}, {"a\"b\\c/", 6, "\"a\\\"b\\\\c/\"", 6}, {"\n\t\0\x1f\x7f", 5, "\"\\u000a\\u0009\\u0000\\u001f\x7f\"", 5},
		{"\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80", 9, "\"\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80\"", 9},
		{"x\xe4\xb8", 3, "\"x\\ufffd\\ufffd\"", 1}, {"x\xf0\x9f\x98", 4, "\"x\\ufffd\\ufffd\\ufffd\"", 1}, {"x\xc3", 2, "\"x\\ufffd\"", 1},
		{"\xff\x80y", 3, "\"\\ufffd\\ufffdy\"", 3}, {"\xed\xa0\x80", 3, "\"\\ufffd\\ufffd\\ufffd\"", 3}, {"\xc0\xaf", 2, "\"\\ufffd\\ufffd\"", 2},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		char *written = NULL;
		size_t n;
		FILE *f = open_memstream(&written, &n);
		json_write_text(f, cases[i].text, cases[i].size);
		assert_int_equal(fclose(f), 0);
		assert_string_equal(written, cases[i].json);
		assert_int_equal(utf8_whole(cases[i].text, cases[i].size), cases[i].whole);
		json_t *read = json_loads(written, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL), *made = json_bytes(cases[i].text, cases[i].size);
		assert_true(read && json_equal(read, made));
		json_decref(read);
		json_decref(made);
		free(written);
	}
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, make_scratch, drop_scratch)

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(safetensors_round_trip), TEST(safetensors_pieces), TEST(safetensors_many), TEST(safetensors_conversion), TEST(safetensors_broken),
		TEST(safetensors_damaged), TEST(safetensors_shards), TEST(write_failure),
		TEST(checkpoint_round_trip), TEST(checkpoint_parts), TEST(checkpoint_refused), TEST(checkpoint_wrong_fields), TEST(checkpoint_prunes),
		TEST(checkpoint_not_whole), TEST(checkpoint_interrupted),
		TEST(tokens_types), TEST(tokens_broken), TEST(tokenize_good), TEST(tokenize_foreign_path), TEST(tokenize_progress),
		TEST(tokenize_bad), TEST(tokenize_chat), TEST(tokenize_long_chat), TEST(chat_prompt), TEST(tokens_formats),
		TEST(manifest_vouches), TEST(tokens_large), TEST(tokens_documents_all), TEST(manifest_broken),
		TEST(metrics_resume), TEST(metrics_nonfinite), TEST(metrics_broken), TEST(text_as_json),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
