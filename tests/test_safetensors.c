/* Safetensors files: what is written is read back; every broken or damaged file gives the error that names the
 * place. */
#define _GNU_SOURCE
#include "tests/test.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

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
	const struct named_tensor arrays[] = {{"b", 2, 3, NULL}, {"empty", 0, 0, NULL}, {"a", 5, 0, NULL},
		{"last", 0, 4, NULL}};
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
	static const struct { int64_t first, n; } outside[] = {{0, 7}, {6, 1}, {7, 0}, {-1, 1}, {2, -1}, {INT64_MAX, 1},
		{1, INT64_MAX}};
	for (int i = 0; i < COUNT(outside); i++) {
		assert_int_equal(tensors_read_range(w, "b", 2, 3, outside[i].first, outside[i].n, out), -1);
		expect_error("pieces.safetensors: tensor b: |elements from element |it holds 6");
	}
	assert_int_equal(tensors_read_range(w, "b", 3, 2, 0, 1, out), -1);
	expect_error("tensor b: shape [2, 3]; expected [3, 2]");
	assert_int_equal(tensors_read_range(w, "c", 3, 2, 0, 1, out), -1);
	expect_error("tensor c is missing");
	for (int i = 0; i < tensors_count(w); i++)
		assert_int_equal(tensor_verify(&w->tensors[i]), 0);
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
		assert_int_equal(tensor_verify(&w->tensors[i]), strcmp(tensors_name(w, i), "a") ? 0 : -1);
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
		{0x0000, 0}, {0x8000, -0.0}, {0x3c00, 1}, {0xc000, -2}, {0x3555, 0.333251953125}, {0x7bff, 65504},
		{0xfbff, -65504},
		{0x0400, 0x1p-14}, {0x03ff, 0x1.ff8p-15}, {0x0001, 0x1p-24}, {0x8001, -0x1p-24}, {0x7c00, INFINITY},
		{0xfc00, -INFINITY}, {0x7e00, NAN}, {0x7c01, NAN},
	}, brain[] = {
		{0x0000, 0}, {0x8000, -0.0}, {0x3f80, 1}, {0xc000, -2}, {0x3eab, 0.333984375}, {0x7f7f, 0x1.fep127},
		{0x0080, 0x1p-126},
		{0x0001, 0x1p-133}, {0x8001, -0x1p-133}, {0x7f80, INFINITY}, {0xff80, -INFINITY}, {0x7fc0, NAN}, {0xff81, NAN},
	};
	struct { uint16_t half[COUNT(half)], brain[COUNT(brain)];
		float f[2]; double d[2]; int32_t i[2]; int64_t l[3]; } data;
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
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
			"`shape` is longer; expected an array of at most 8"},
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
			"\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}", 12,
					"tensors a and b overlap at data byte 4"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
			"\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, "overlap at data byte 0"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
			"\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}", 12,
					"data bytes 4 to 8, before tensor b"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", 8, "data bytes 0 to 4, before tensor a"},
		{"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 5,
			"end at data byte 4 but the file holds 5"},
		{"{}", 1, "end at data byte 0 but the file holds 1"},
		{"{\"__metadata__\":[]}", 0, "`__metadata__` is an array"},
		{"{\"__metadata__\":{\"step\":1}}", 0, "`step` is an integer"},
		{"{\"__metadata__\":{\"crc32.a\":\"12\"},\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}", 0,
			"`crc32.a` is \"12\"; expected eight"},
		{"{\"__metadata__\":{\"crc32.a\":\"1234567G\"},\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
			0,
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
		{"{\"weight_map\":{\"a\":\"one.safetensors\",\"c\":\"one.safetensors\"}}",
			"one.safetensors: tensor c is missing"},
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
	expect_error("big.safetensors: cannot write: File too large: files are limited to 65536 bytes here");
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

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(safetensors_round_trip), TEST(safetensors_pieces), TEST(safetensors_many), TEST(safetensors_conversion),
		TEST(safetensors_broken), TEST(safetensors_damaged), TEST(safetensors_shards), TEST(write_failure),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
