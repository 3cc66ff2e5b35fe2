/*
 * test_convert.c - files/convert.c and files/gguf.c: numbers against their definition, models of mixed types to GGUF
 * and back against rows placed by hand, tokenizers both ways, and what must be refused.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "files/checkpoint.h"
#include "files/config.h"
#include "files/convert.h"
#include "files/gguf.h"
#include "files/safetensors.h"
#include "files/tensors.h"

#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include "test.h"

/* ---- numbers ---- */

/* The value of a number of `bits` fraction bits and an exponent above them, by the definition. */
static double value_of(uint32_t number, int bits, int bias)
{
	const uint32_t exponent = number >> bits, fraction = number & ((1u << bits) - 1);
	return exponent ? ldexp(fraction + (1u << bits), (int)exponent - bias - bits) : ldexp(fraction, 1 - bias - bits);
}

static void numbers_read(void **state)
{
	(void)state;
	for (uint32_t h = 0; h < 0x8000; h++) {
		const float f = half_to_float(h), b = bf16_to_float(h);
		if (h < 0x7c00 ? f != value_of(h, 10, 15) : h == 0x7c00 ? f != INFINITY : !isnan(f))
			fail_msg("float16 %04x is read as %g", h, f);
		if (h < 0x7f80 ? b != value_of(h, 7, 127) : h == 0x7f80 ? b != INFINITY : !isnan(b))
			fail_msg("bfloat16 %04x is read as %g", h, b);
		const uint32_t minus = h | 0x8000;
		assert_true(float_to_bits(half_to_float(minus)) == (float_to_bits(f) | 0x80000000));
		assert_true(float_to_bits(bf16_to_float(minus)) == (float_to_bits(b) | 0x80000000));
		assert_true(isnan(f) ? isnan(half_to_float(float_to_half(f))) : float_to_half(f) == h &&
				float_to_half(-f) == minus);
		assert_true(isnan(b) ? isnan(bf16_to_float(float_to_bf16(b))) : float_to_bf16(b) == h &&
				float_to_bf16(-b) == minus);
	}
	assert_true(isnan(bf16_to_float(float_to_bf16(bits_to_float(0x7f800001))))); /* whose fraction is cut off */
	assert_true(isnan(half_to_float(float_to_half(bits_to_float(0xff800001)))));
}

/* Between any two neighbours: nearer to the one, to the even one from the middle, nearer to the other. */
static void check_rounding(uint32_t last, double (*value)(uint32_t), uint16_t (*round)(float))
{
	for (uint32_t h = 0; h < last; h++) {
		const float middle = (float)((value(h) + value(h + 1)) / 2);
		const uint32_t below = round(nextafterf(middle, 0)), even = round(middle), above = round(nextafterf(middle,
				INFINITY));
		if (middle > value(h) && (below != h || even != h + (h & 1) || above != h + 1 ||
				round(-middle) != (even | 0x8000)))
			fail_msg("between %g and %g: found %04x %04x %04x, the first is %04x", value(h), value(h + 1), below, even,
					above, h);
	}
}

static double half_value(uint32_t h) { return value_of(h, 10, 15); }
static double bf16_value(uint32_t h) { return value_of(h, 7, 127); }
static uint16_t round_half(float f) { return float_to_half(f); }
static uint16_t round_bf16(float f) { return float_to_bf16(f); }

static void numbers_round(void **state)
{
	(void)state;
	check_rounding(0x7bff, half_value, round_half); /* up to 65504 */
	check_rounding(0x7f7f, bf16_value, round_bf16);
	assert_int_equal(float_to_half(65519.996f), 0x7bff);
	assert_int_equal(float_to_half(65520), 0x7c00);
	assert_int_equal(float_to_half(1e-30f), 0);
	assert_int_equal(float_to_bf16(3.3895314e38f), 0x7f7f);
	assert_int_equal(float_to_bf16(3.4e38f), 0x7f80);
}

/* Rows of doubles round once, not by way of float; what becomes infinite is told, what was so is not. */
static void numbers_convert(void **state)
{
	(void)state;
	const double doubles[] = {1 + 0x1p-8 + 0x1p-40, 1 + 0x1p-8 - 0x1p-40, 1 + 0x1p-8, -1 - 0x1p-8 - 0x1p-40};
	const uint16_t expected[] = {0x3f81, 0x3f80, 0x3f80, 0xbf81};
	uint16_t out[4];
	assert_false(convert_row((uint8_t *)out, BF16, (const uint8_t *)doubles, F64, 4, NULL));
	assert_memory_equal(out, expected, sizeof out);

	const struct { double value; enum dtype to; bool overflow; } cases[] = {
		{65520, F16, true}, {-65520, F16, true}, {65519, F16, false}, {INFINITY, F16, false}, {NAN, F16, false},
		{1e300, F32, true}, {-1e39, BF16, true},
		{3.4e38, F32, false}, {3.4e38, BF16, true}, {-INFINITY, BF16, false}, {NAN, BF16, false},
		{INFINITY, F32, false},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		const float single = (float)cases[i].value;
		if (convert_row((uint8_t *)out, cases[i].to, (const uint8_t *)&cases[i].value, F64, 1,
				NULL) != cases[i].overflow)
			fail_msg("%g to %s: overflow should be %d", cases[i].value, dtypes[cases[i].to].name, cases[i].overflow);
		if (fabs(cases[i].value) < 1e38 && cases[i].to != F32 &&
				convert_row((uint8_t *)out, cases[i].to, (const uint8_t *)&single, F32, 1, NULL) != cases[i].overflow)
			fail_msg("%g from float to %s: overflow should be %d", cases[i].value, dtypes[cases[i].to].name,
					cases[i].overflow);
	}
	/* long rows, in pieces */
	enum { N = 2 * CONVERT_RUN + 5 };
	static float in[N];
	static double fold[N];
	static uint16_t whole[N];
	for (int i = 0; i < N; i++)
		in[i] = (float)sin(i), fold[i] = 1 + i % 3;
	assert_false(convert_row((uint8_t *)whole, BF16, (const uint8_t *)in, F32, N, fold));
	for (int i = 0; i < N; i++)
		assert_int_equal(whole[i], float_to_bf16((float)(in[i] / fold[i])));
}

/* The checksum by all threads is that by one. */
static void checksum_of_slices(void **state)
{
	(void)state;
	const size_t sizes[] = {0, 1, (2 << 20) - 1, 2 << 20, (3 << 20) + 7, (70 << 20) + 1};
	uint8_t *data = allocate(71 << 20);
	for (size_t i = 0; i < 71 << 20; i++)
		data[i] = i * 2654435761u >> 24;
	for (int i = 0; i < COUNT(sizes); i++)
		assert_int_equal(crc_of(12345, data, sizes[i]), crc32_z(12345, data, sizes[i]));
	free(data);
}

/* ---- a small model ---- */

enum { V = 7, H = 4, HEADS = 2, KV = 1, D = 6, E = 3, I = 5, QKV = (HEADS + 2 * KV) * D };

static const struct named_tensor params[] = {
	{"model.word_embeddings.weight", V, H, NULL},
	{"model.layers.0.input_layernorm.weight", H, 0, NULL},
	{"model.layers.0.post_attention_layernorm.weight", H, 0, NULL},
	{"model.layers.0.mlp.gate.weight", E, H, NULL},
	{"model.layers.0.mlp.shared_experts.gate_proj.weight", I, H, NULL},
	{"model.layers.0.mlp.shared_experts.up_proj.weight", I, H, NULL},
	{"model.layers.0.mlp.shared_experts.down_proj.weight", H, I, NULL},
	{"model.layers.0.attention.query_key_value.weight", QKV, H, NULL},
	{"model.layers.0.attention.dense.weight", H, HEADS * D, NULL},
	{"model.layers.0.mlp.experts.0.gate_proj.weight", I, H, NULL},
	{"model.layers.0.mlp.experts.0.up_proj.weight", I, H, NULL},
	{"model.layers.0.mlp.experts.1.gate_proj.weight", I, H, NULL},
	{"model.layers.0.mlp.experts.1.up_proj.weight", I, H, NULL},
	{"model.layers.0.mlp.experts.2.gate_proj.weight", I, H, NULL},
	{"model.layers.0.mlp.experts.2.up_proj.weight", I, H, NULL},
	{"model.layers.0.mlp.experts.0.down_proj.weight", H, I, NULL},
	{"model.layers.0.mlp.experts.1.down_proj.weight", H, I, NULL},
	{"model.layers.0.mlp.experts.2.down_proj.weight", H, I, NULL},
	{"model.norm.weight", H, 0, NULL}, {"lm_head.weight", V, H, NULL},
};
enum { N = COUNT(params), NORM = N - 2, HEAD = N - 1, ROUTER = 3, QUERY_KEY_VALUE = 7 };

static const char config_text[] =
		"{\"hidden_size\": 4, \"num_hidden_layers\": 1, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, "
		"\"head_dim\": 6,"
	"\"vocab_size\": 7, \"num_experts\": 3, \"num_experts_per_tok\": 2, \"num_shared_experts\": 1, "
			"\"moe_intermediate_size\": 5, \"use_bias\": false,"
	"\"norm_head\": true, \"rms_norm_eps\": 1e-6, \"rope_theta\": 600000, \"auto_map\": {\"AutoModel\": "
			"\"modeling_bailing_moe.X\"}, \"eos_token_id\": 5}";

/* Element i of parameter p: exact in every type. */
static double element(int p, int64_t i)
{
	return (double)((p * 31 + i * 7) % 251 - 125) / 16;
}

/* Writes a directory of that model, each parameter in its type. */
static void make_model(const char *dir, const char *config, const enum dtype types[N])
{
	char path[PATH_LEN];
	assert_int_equal(make_directories(dir), 0);
	snprintf(path, sizeof path, "%s/config.json", dir);
	put_string(path, config);
	snprintf(path, sizeof path, "%s/model.safetensors", dir);
	struct safetensors_writer *w = safetensors_create_typed(path, params, types, N);
	assert_non_null(w);
	for (int p = 0; p < N; p++)
		for (int64_t i = 0; i < named_tensor_size(&params[p]); i++) {
			const double d = element(p, i);
			const float f = (float)d;
			const uint16_t h = types[p] == F16 ? float_to_half(f) : float_to_bf16(f);
			const void *number = types[p] == F64 ? (const void *)&d : types[p] == F32 ? (const void *)&f :
					(const void *)&h;
			assert_int_equal(safetensors_append_bytes(w, number, dtypes[types[p]].size, dtypes[types[p]].size), 0);
		}
	assert_int_equal(safetensors_finish(w), 0);
}

static void mixed_types(enum dtype types[N])
{
	for (int p = 0; p < N; p++)
		types[p] = p % 4 == 0 ? BF16 : p % 4 == 1 ? F32 : p % 4 == 2 ? F16 : F64;
}

/* What a conversion says; 0 or -1. */
static int convert(const char *from, const char *path, enum model_format format, const char *dtype, bool fold,
		bool no_tokenizer)
{
	struct model_config config;
	struct converted result;
	struct source_model *s = source_model_open(from, &config);
	if (!s)
		return -1;
	const struct conversion to = {.path = path, .format = format, .dtype = dtype, .max_shard_size = 1000,
			.fold_norm_head = fold,
			.no_tokenizer = no_tokenizer};
	int rc = convert_model(s, params, N, &to, &result);
	source_model_close(s);
	return rc;
}

/* All elements of a parameter; free them. */
static real *read_all(struct tensors *w, int p)
{
	real *data = allocate(named_tensor_size(&params[p]) * sizeof *data);
	struct named_tensor a = params[p];
	a.data = data;
	if (tensors_read(w, &a) < 0)
		fail_msg("%s", error_text);
	return data;
}

/* What column j of the head is divided by. */
static double fold_of(int64_t j)
{
	double sum = 0;
	for (int64_t v = 0; v < V; v++)
		sum += element(HEAD, v * H + j) * element(HEAD, v * H + j);
	return sqrt(sum) + 1e-7;
}

/* A directory holds the small model's numbers, lm_head's folded or not; and of these types, if any are given. */
static void check_model_directory(const char *dir, bool folded, const enum dtype *types)
{
	struct tensors *w = tensors_open(dir, "model");
	if (!w)
		fail_msg("%s", error_text);
	assert_int_equal(tensors_count(w), N);
	for (int p = 0; p < N; p++) {
		real *found = read_all(w, p);
		for (int64_t i = 0; i < named_tensor_size(&params[p]); i++) {
			const double expected = p == HEAD && folded ? (float)(element(p, i) / fold_of(i % H)) : element(p, i);
			if (found[i] != expected)
				fail_msg("%s: element %lld is %g, expected %g", params[p].name, (long long)i, (double)found[i],
						expected);
		}
		if (types)
			assert_string_equal(tensor_find(w, params[p].name)->dtype_name, dtypes[types[p]].name);
		free(found);
	}
	tensors_close(w);
}

static json_t *read_json(const char *path)
{
	json_t *root = json_read(path);
	if (!root)
		fail_msg("%s", error_text);
	return root;
}

static void directory_to_directory(void **state)
{
	(void)state;
	enum dtype types[N], own[N], singles[N];
	mixed_types(types);
	for (int p = 0; p < N; p++)
		own[p] = types[p] == F64 ? F32 : types[p], singles[p] = F32;
	make_model(at("mixed"), config_text, types);
	put_string(at("mixed/tokenizer.json"), "{}");
	put_string(at("mixed/notes.bin"), "no");
	put_string(at("mixed/pytorch_model.bin.index.json"), "{}");
	assert_int_equal(convert(at("mixed"), at("own"), FORMAT_HUGGINGFACE, NULL, false, false), 0);
	check_model_directory(at("own"), false, own);
	assert_int_equal(convert(at("own"), at("singles"), FORMAT_HUGGINGFACE, "f32", false, false), 0);
	check_model_directory(at("singles"), false, singles);
	assert_true(exists(at("singles/model-00002-of-00003.safetensors")) &&
			exists(at("singles/model.safetensors.index.json")));
	assert_true(exists(at("singles/tokenizer.json")));
	assert_false(exists(at("singles/notes.bin")) || exists(at("singles/pytorch_model.bin.index.json")));
	assert_false(exists(at(".tmp-singles")));

	json_t *config = read_json(at("singles/config.json")),
			*index = read_json(at("singles/model.safetensors.index.json"));
	assert_string_equal(json_string_value(json_object_get(config, "torch_dtype")), "float32");
	assert_string_equal(json_string_value(json_at(config, "auto_map.AutoModel")), "modeling_bailing_moe.X");
	assert_int_equal(json_integer_value(json_object_get(config, "eos_token_id")), 5);
	int64_t total = 0;
	for (int p = 0; p < N; p++)
		total += 4 * named_tensor_size(&params[p]);
	assert_int_equal(json_integer_value(json_at(index, "metadata.total_size")), total);
	json_decref(config);
	json_decref(index);

	config = read_json(at("own/config.json"));
	assert_string_equal(json_string_value(json_object_get(config, "torch_dtype")), "bfloat16"); /* the embedding's */
	json_decref(config);
	assert_int_equal(convert(at("mixed"), at("folded"), FORMAT_HUGGINGFACE, "f32", true, false), 0);
	check_model_directory(at("folded"), true, singles);
	assert_int_equal(convert(at("folded"), at("twice"), FORMAT_HUGGINGFACE, NULL, true, false), -1);
	expect_error("folded: norm_head is off|folded before");
}

static struct tensors *open_gguf(const char *path)
{
	struct tensors *w = allocate(sizeof *w);
	if (gguf_open(w, path) < 0)
		fail_msg("%s", error_text);
	return w;
}

/* Row r of a GGUF tensor against that row of a parameter. */
static void expect_row(const struct tensors *w, const char *name, int64_t r, int p, int64_t row)
{
	const struct tensor *t = tensor_find(w, name);
	if (!t)
		fail_msg("no tensor %s", name);
	const int64_t cols = params[p].cols;
	for (int64_t j = 0; j < cols; j++) {
		float f;
		memcpy(&f, tensor_bytes(t) + (r * cols + j) * 4, 4);
		const double expected = p == HEAD ? (float)(element(p, row * cols + j) / fold_of(j)) : element(p,
				row * cols + j);
		if (f != expected)
			fail_msg("%s row %lld is not row %lld of %s", name, (long long)r, (long long)row, params[p].name);
	}
}

static void directory_to_gguf(void **state)
{
	(void)state;
	enum dtype types[N], singles[N];
	mixed_types(types);
	make_model(at("hf"), config_text, types);
	assert_int_equal(convert(at("hf"), at("m.gguf"), FORMAT_GGUF, "f32", false, false), -1);
	expect_error("tokenizer.json: is not there|--no-tokenizer");
	assert_false(exists(at("m.gguf")) || exists(at(".tmp-m.gguf")));
	assert_int_equal(convert(at("hf"), at("m.gguf"), FORMAT_GGUF, "f32", false, true), 0);

	/* Row by row: a head's rows i and i + d/2 become rows 2i and 2i + 1; an expert's rows stand behind the one's
	 * before it. */
	struct tensors *w = open_gguf(at("m.gguf"));
	assert_int_equal(w->count, 16);
	for (int64_t head = 0; head < HEADS + KV; head++)
		for (int64_t i = 0; i < D / 2; i++)
			for (int half = 0; half < 2; half++)
				expect_row(w, head < HEADS ? "blk.0.attn_q.weight" : "blk.0.attn_k.weight", (head < HEADS ? head * D :
						0) + 2 * i + half,
						QUERY_KEY_VALUE, head * D + half * D / 2 + i);
	for (int64_t i = 0; i < KV * D; i++)
		expect_row(w, "blk.0.attn_v.weight", i, QUERY_KEY_VALUE, (HEADS + KV) * D + i);
	for (int e = 0; e < E; e++)
		for (int64_t i = 0; i < I; i++) {
			expect_row(w, "blk.0.ffn_gate_exps.weight", e * I + i, 9 + 2 * e, i);
			expect_row(w, "blk.0.ffn_up_exps.weight", e * I + i, 10 + 2 * e, i);
			if (i < H)
				expect_row(w, "blk.0.ffn_down_exps.weight", e * H + i, 15 + e, i);
		}
	for (int64_t i = 0; i < V; i++) {
		expect_row(w, "token_embd.weight", i, 0, i);
		expect_row(w, "output.weight", i, HEAD, i);
	}
	for (int64_t i = 0; i < H; i++) {
		expect_row(w, "blk.0.attn_output.weight", i, 8, i);
		expect_row(w, "blk.0.ffn_down_shexp.weight", i, 6, i);
	}
	expect_row(w, "blk.0.ffn_gate_shexp.weight", 3, 4, 3);
	expect_row(w, "blk.0.ffn_up_shexp.weight", 3, 5, 3);
	expect_row(w, "blk.0.ffn_gate_inp.weight", 2, ROUTER, 2);
	assert_true(has_shape(tensor_find(w, "blk.0.ffn_down_exps.weight"), (int64_t[]){3, 4, 5}, 3));
	const json_t *metadata = json_object_get(w->files->header, "metadata");
	const struct { const char *key; double value; } numbers[] = {
		{"bailingmoe.block_count", 1}, {"bailingmoe.context_length", 16384}, {"bailingmoe.embedding_length", 4},
		{"bailingmoe.attention.head_count", 2},
		{"bailingmoe.attention.head_count_kv", 1}, {"bailingmoe.attention.key_length", 6},
		{"bailingmoe.attention.value_length", 6},
		{"bailingmoe.rope.dimension_count", 6}, {"bailingmoe.rope.freq_base", 600000},
		{"bailingmoe.attention.layer_norm_rms_epsilon", 1e-6},
		{"bailingmoe.expert_count", 3}, {"bailingmoe.expert_used_count", 2}, {"bailingmoe.expert_shared_count", 1},
		{"bailingmoe.expert_feed_forward_length", 5}, {"bailingmoe.expert_weights_scale", 1},
		{"bailingmoe.leading_dense_block_count", 0},
		{"bailingmoe.vocab_size", 7}, {"general.file_type", 0}, {"general.alignment", 32},
		{"general.quantization_version", 2},
	};
	for (int i = 0; i < COUNT(numbers); i++)
		if (!json_is_number(json_object_get(metadata, numbers[i].key)) ||
				json_number_value(json_object_get(metadata, numbers[i].key)) != numbers[i].value)
			fail_msg("%s is %g, expected %g", numbers[i].key, json_number_value(json_object_get(metadata,
					numbers[i].key)), numbers[i].value);
	assert_true(json_is_true(json_object_get(metadata, "bailingmoe.expert_weights_norm")));
	tensors_close(w);

	/* and back; the other types keep norms and router as they are */
	assert_int_equal(convert(at("m.gguf"), at("back"), FORMAT_HUGGINGFACE, NULL, false, false), 0);
	for (int p = 0; p < N; p++)
		singles[p] = F32;
	check_model_directory(at("back"), true, singles);
	struct model_config config, expected;
	assert_int_equal(config_from_huggingface(&config, at("back")), 0);
	assert_int_equal(config_from_huggingface(&expected, at("hf")), 0);
	assert_true(expected.norm_head && !config.norm_head);
	expected.norm_head = false;
	assert_memory_equal(&config, &expected, sizeof config);
	for (int half = 0; half < 2; half++) {
		assert_int_equal(convert(at("back"), at(half ? "h.gguf" : "b.gguf"), FORMAT_GGUF, half ? "f16" : "bf16", false,
				true), 0);
		assert_int_equal(convert(at(half ? "h.gguf" : "b.gguf"), at(half ? "h" : "b"), FORMAT_HUGGINGFACE, NULL, false,
				false), 0);
		assert_int_equal(convert(at("back"), at(half ? "direct-h" : "direct-b"), FORMAT_HUGGINGFACE, half ? "f16" :
				"bf16", false, false), 0);
		struct tensors *a = tensors_open(at(half ? "h" : "b"), "model"), *b = tensors_open(at(half ? "direct-h" :
				"direct-b"), "model");
		for (int p = 0; p < N; p++) {
			const bool single = !params[p].cols || p == ROUTER;
			assert_string_equal(tensor_find(a, params[p].name)->dtype_name, single ? "F32" : half ? "F16" : "BF16");
			real *x = read_all(a, p), *y = read_all(b, p);
			if (!single)
				assert_memory_equal(x, y, named_tensor_size(&params[p]) * sizeof *x);
			free(x);
			free(y);
		}
		tensors_close(a);
		tensors_close(b);
	}
	/* from one GGUF file to another no row changes its place */
	assert_int_equal(convert(at("b.gguf"), at("again.gguf"), FORMAT_GGUF, "f32", false, true), 0);
	assert_int_equal(convert(at("b"), at("directly.gguf"), FORMAT_GGUF, "f32", false, true), 0);
	assert_int_equal(convert(at("again.gguf"), at("again"), FORMAT_HUGGINGFACE, NULL, false, false), 0);
	assert_int_equal(convert(at("directly.gguf"), at("directly"), FORMAT_HUGGINGFACE, NULL, false, false), 0);
	struct tensors *a = tensors_open(at("again"), "model"), *b = tensors_open(at("directly"), "model");
	for (int p = 0; p < N; p++) {
		real *x = read_all(a, p), *y = read_all(b, p);
		assert_memory_equal(x, y, named_tensor_size(&params[p]) * sizeof *x);
		free(x);
		free(y);
	}
	tensors_close(a);
	tensors_close(b);
}

/* A tied model has no lm_head; the same one beside it is dropped, another is refused. GGUF and folding need one of its
 * own. */
static void ties(void **state)
{
	(void)state;
	enum dtype types[N];
	for (int p = 0; p < N; p++)
		types[p] = F32;
	char text[1024];
	snprintf(text, sizeof text, "{\"tie_word_embeddings\": true, %s", config_text + 1);
	make_model(at("contradicts"), text, types);
	assert_int_equal(convert(at("contradicts"), at("x"), FORMAT_HUGGINGFACE, NULL, false, false), -1);
	expect_error("tie_word_embeddings is true|lm_head.weight is there and differs");
	assert_false(exists(at("x")));

	/* the embedding over the head: the data end with it */
	size_t size = 0;
	const uint8_t *file;
	assert_int_equal(map_file(at("contradicts/model.safetensors"), &file, &size), 0);
	uint8_t *copy = allocate(size);
	memcpy(copy, file, size);
	memcpy(copy + size - V * H * 4, copy + 8 + load_i64(copy), V * H * 4);
	unmap_file(file, size);
	char *crc = memmem(copy, size, "\"crc32.lm_head.weight\":\"", 24), *theirs = memmem(copy, size,
			"\"crc32.model.word_embeddings.weight\":\"", 38);
	assert_true(crc && theirs);
	memcpy(crc + 24, theirs + 38, 8);
	put_file(at("contradicts/model.safetensors"), copy, size);
	free(copy);
	assert_int_equal(convert(at("contradicts"), at("tied"), FORMAT_HUGGINGFACE, NULL, false, false), 0);
	struct tensors *w = tensors_open(at("tied"), "model");
	assert_int_equal(tensors_count(w), N - 1);
	assert_false(tensors_has(w, "lm_head.weight"));
	tensors_close(w);
	assert_int_equal(convert(at("tied"), at("tied.gguf"), FORMAT_GGUF, NULL, false, true), 0);
	assert_int_equal(convert(at("tied"), at("folded"), FORMAT_HUGGINGFACE, NULL, true, false), 0);
	assert_int_equal(convert(at("tied.gguf"), at("untied"), FORMAT_HUGGINGFACE, NULL, false, false), 0);
	for (int i = 0; i < 2; i++) {
		struct model_config c;
		const char *dir = at(i ? "folded" : "untied");
		assert_int_equal(config_from_huggingface(&c, dir), 0);
		assert_false(c.tie_word_embeddings || c.norm_head);
		w = tensors_open(dir, "model");
		assert_int_equal(tensors_count(w), N);
		real *head = read_all(w, HEAD), *embedding = read_all(w, 0);
		double squares = 0;
		for (int64_t v = 0; v < V; v++)
			squares += (double)head[v * H] * head[v * H];
		assert_true(fabs(squares - 1) < 1e-5 && embedding[0] == element(0, 0));
		free(head);
		free(embedding);
		tensors_close(w);
	}
	/* without the tie the head is needed */
	put_string(at("tied/config.json"), config_text);
	assert_int_equal(convert(at("tied"), at("y"), FORMAT_HUGGINGFACE, NULL, false, false), -1);
	expect_error("tensor lm_head.weight is missing");
}

static void checkpoint(void **state)
{
	(void)state;
	enum dtype types[N], singles[N];
	mixed_types(types);
	for (int p = 0; p < N; p++)
		singles[p] = REAL_DTYPE;
	make_model(at("hf"), config_text, types);
	assert_int_equal(convert(at("hf"), at("run"), FORMAT_CHECKPOINT, NULL, false, false), -1);
	expect_error("expected RUN/step-0000000");
	assert_int_equal(convert(at("hf"), at("run/step-0000000"), FORMAT_CHECKPOINT, NULL, false, false), 0);
	check_model_directory(at("run/step-0000000"), false, singles);
	char found[PATH_LEN];
	assert_int_equal(find_newest(at("run"), found), 1);
	struct config asked = {.data.seq_len = 16, .train.steps = 10};
	assert_int_equal(config_from_huggingface(&asked.model, at("hf")), 0);
	double mean[1], std[1];
	struct trainer_state s = {.num_layers = 1, .router_mean = mean, .router_std = std, .step = 9};
	FILE *notes = tmpfile();
	if (checkpoint_read_state(found, &asked, &s, notes) < 0)
		fail_msg("%s", error_text);
	assert_int_equal(ftell(notes), 0);
	assert_true(s.step == 0 && s.samples == 0 && s.tokens == 0 && mean[0] == 0 && std[0] == 1);
	asked.model.rope_theta = 1;
	assert_int_equal(checkpoint_read_state(found, &asked, &s, notes), -1);
	expect_error("model.rope_theta was 600000|found 1");
	fclose(notes);
	struct tensors *w = tensors_open(found, "optimizer");
	assert_int_equal(tensors_count(w), 2 * N);
	real zeros[V * H];
	assert_int_equal(tensors_read(w, &(struct named_tensor){"exp_avg_sq.lm_head.weight", V, H, zeros}), 0);
	for (int i = 0; i < V * H; i++)
		assert_true(zeros[i] == 0);
	tensors_close(w);
	assert_int_equal(convert(found, at("hf2"), FORMAT_HUGGINGFACE, NULL, false, false), 0);
	check_model_directory(at("hf2"), false, NULL);
	put_string(at("run/step-0000000/config.json"), "{}");
	assert_int_equal(convert(found, at("hf3"), FORMAT_HUGGINGFACE, NULL, false, false), -1);
	expect_error("config.json");
}

/* ---- what is refused ---- */

/* Puts text in the place of another, equally long, in a file; its first place only. */
static void patch(const char *path, const char *from, const char *to)
{
	size_t size;
	const uint8_t *file;
	assert_int_equal(map_file(path, &file, &size), 0);
	uint8_t *copy = allocate(size);
	memcpy(copy, file, size);
	unmap_file(file, size);
	uint8_t *place = memmem(copy, size, from, strlen(from));
	if (!place || strlen(from) != strlen(to))
		fail_msg("%s: no `%s` to replace", path, from);
	memcpy(place, to, strlen(to));
	put_file(path, copy, size);
	free(copy);
}

static void refused_directories(void **state)
{
	(void)state;
	enum dtype types[N];
	for (int p = 0; p < N; p++)
		types[p] = F32;
	const struct { const char *from, *to, *error; } cases[] = {
		{"\"model.norm.weight\"", "\"model.norm.weighs\"", "tensor model.norm.weight is missing"},
		{"\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[7,4]",
			"\"lm_head.weight\":{\"dtype\":\"F32\",\"shape\":[4,7]", "lm_head.weight: shape [4, 7]; expected [7, 4]"},
		{"\"lm_head.weight\":{\"dtype\":\"F32\"", "\"lm_head.weight\":{\"dtype\":\"I32\"",
			"lm_head.weight: dtype I32"},
		{"\"lm_head.weight\":{\"dtype\"", "\"mm_head.weight\":{\"dtype\"", "lm_head.weight is missing"},
		{"\"crc32.lm_head.weight\":\"", "\"crc32.lm_head.weighz\":\"", NULL}, /* a checksum less */
	};
	for (int i = 0; i < COUNT(cases); i++) {
		make_model(at("hf"), config_text, types);
		patch(at("hf/model.safetensors"), cases[i].from, cases[i].to);
		int rc = convert(at("hf"), at("x%d", i), FORMAT_HUGGINGFACE, NULL, false, false);
		assert_int_equal(rc, cases[i].error ? -1 : 0);
		if (rc < 0) {
			expect_error(cases[i].error);
			assert_false(exists(at("x%d", i)) || exists(at(".tmp-x%d", i)));
		}
	}
	/* damage that only the checksum shows is found while converting */
	make_model(at("hf"), config_text, types);
	size_t size;
	const uint8_t *file;
	assert_int_equal(map_file(at("hf/model.safetensors"), &file, &size), 0);
	uint8_t *copy = allocate(size);
	memcpy(copy, file, size);
	unmap_file(file, size);
	copy[size - 1] ^= 1;
	put_file(at("hf/model.safetensors"), copy, size);
	free(copy);
	assert_int_equal(convert(at("hf"), at("damaged"), FORMAT_HUGGINGFACE, NULL, false, false), -1);
	expect_error("tensor lm_head.weight is damaged");
	assert_false(exists(at("damaged")) || exists(at(".tmp-damaged")));

	/* configs that llama.cpp does not compute, and names that are taken */
	make_model(at("hf"), config_text, types);
	assert_int_equal(convert(at("hf"), at("hf"), FORMAT_HUGGINGFACE, NULL, false, false), -1);
	expect_error("hf: is there already");
	assert_int_equal(convert(at("nothere"), at("y"), FORMAT_HUGGINGFACE, NULL, false, false), -1);
	expect_error("nothere: cannot open");
	assert_int_equal(convert(at("hf/model.safetensors"), at("y"), FORMAT_HUGGINGFACE, NULL, false, false), -1);
	expect_error("model.safetensors: no GGUF file");
	assert_int_equal(convert(at("hf"), at("y/"), FORMAT_HUGGINGFACE, NULL, false, false), -1);
	expect_error("has no name");
	char text[1024];
	snprintf(text, sizeof text, "{\"first_k_dense_replace\": 1, \"intermediate_size\": 5, %s", config_text + 1);
	put_string(at("hf/config.json"), text);
	assert_int_equal(convert(at("hf"), at("y.gguf"), FORMAT_GGUF, NULL, false, true), -1);
	snprintf(text, sizeof text, "%.*s", (int)(strstr(config_text, "\"num_shared") - config_text), config_text);
	strcat(text, strstr(config_text, "\"moe_inter"));
	put_string(at("hf/config.json"), text);
	assert_int_equal(convert(at("hf"), at("y.gguf"), FORMAT_GGUF, NULL, false, true), -1);
	expect_error("shared_experts");
	struct metadata m = {0};
	const struct model_config biased = {.use_qkv_bias = true, .num_shared_experts = 1},
			dense = {.first_k_dense_replace = 1, .num_shared_experts = 1},
			unshared = {MODEL_DEFAULTS, .num_hidden_layers = 1};
	assert_int_equal(config_to_gguf(&m, &biased, "c"), -1);
	expect_error("c: use_qkv_bias is set");
	assert_int_equal(config_to_gguf(&m, &dense, "c"), -1);
	expect_error("c: first_k_dense_replace is set");
	assert_int_equal(config_to_gguf(&m, &unshared, "c"), -1);
	expect_error("c: num_shared_experts is 0");
	/* a lone expert's weight is not made 1 there either */
	const struct model_config lone = {.norm_topk_prob = true, .num_experts_per_tok = 1, .num_shared_experts = 1};
	assert_int_equal(config_to_gguf(&m, &lone, "c"), 0);
	const char *norm = memmem(m.bytes.data, m.bytes.size, "expert_weights_norm", 19);
	assert_true(norm && norm[19] == GGUF_BOOL && norm[23] == 0);
	free(m.bytes.data);
}

static void refused_numbers(void **state)
{
	(void)state;
	enum dtype types[N];
	for (int p = 0; p < N; p++)
		types[p] = F32;
	make_model(at("hf"), config_text, types);
	struct tensors *w = tensors_open(at("hf"), "model");
	const struct tensor *t = tensor_find(w, "model.layers.0.attention.query_key_value.weight");
	const long begin = t->file->data_at + t->begin;
	tensors_close(w);
	FILE *f = fopen(at("hf/model.safetensors"), "r+");
	for (int row = 9; row < QKV; row++) { /* whatever thread finds one: the first is reported */
		fseek(f, begin + 4 * (row * H + 2), SEEK_SET);
		fwrite(&(float){row == 9 ? 70000 : 80000}, 4, 1, f);
	}
	fclose(f);
	patch(at("hf/model.safetensors"), "\"crc32.model.layers.0.attention.query_key_value",
			"\"crc32.nodel.layers.0.attention.query_key_value");
	assert_int_equal(convert(at("hf"), at("x"), FORMAT_HUGGINGFACE, "f16", false, false), -1);
	expect_error("tensor model.layers.0.attention.query_key_value.weight: 70000 in column 2|float16|--dtype");
	assert_int_equal(convert(at("hf"), at("x.gguf"), FORMAT_GGUF, "f16", false, true), -1);
	expect_error("70000 in column 2");
	assert_false(exists(at("x")) || exists(at(".tmp-x")) || exists(at("x.gguf")) || exists(at(".tmp-x.gguf")));
	assert_int_equal(convert(at("hf"), at("x"), FORMAT_HUGGINGFACE, "bf16", false, false), 0);
}

/* A full disk leaves nothing behind. */
static void full_disk(void **state)
{
	(void)state;
	enum dtype types[N];
	for (int p = 0; p < N; p++)
		types[p] = F32;
	make_model(at("hf"), config_text, types);
	limit_files(500);
	assert_int_equal(convert(at("hf"), at("x"), FORMAT_HUGGINGFACE, NULL, false, false), -1);
	expect_error("cannot write");
	assert_int_equal(convert(at("hf"), at("x.gguf"), FORMAT_GGUF, NULL, false, true), -1);
	expect_error("cannot write");
	assert_int_equal(convert(at("hf"), at("run/step-0000000"), FORMAT_CHECKPOINT, NULL, false, false), -1);
	limit_files(RLIM_INFINITY);
	assert_false(exists(at("x")) || exists(at(".tmp-x")) || exists(at("x.gguf")) || exists(at(".tmp-x.gguf")));
	assert_false(exists(at("run/step-0000000")) || exists(at("run/.tmp-step-0000000")));
}

/* ---- GGUF headers, made by hand ---- */

/* Appends one tensor's entry. */
static void append_tensor(struct text *out, const char *name, uint32_t dimensions, const uint64_t *sizes,
		uint32_t type, uint64_t offset)
{
	append_text(out, name);
	append_u32(out, dimensions);
	for (uint32_t i = 0; i < dimensions && i < 6; i++)
		append_u64(out, sizes[i]);
	append_u32(out, type);
	append_u64(out, offset);
}

static int open_bytes(const struct text *bytes)
{
	struct tensors *w = allocate(sizeof *w);
	put_file(at("case.gguf"), bytes->data, bytes->size);
	int rc = gguf_open(w, at("case.gguf"));
	tensors_close(w);
	return rc;
}

static void refused_headers(void **state)
{
	(void)state;
	const uint64_t four[6] = {4, 1, 1, 1, 1, 1}, huge[2] = {UINT64_C(1) << 40, UINT64_C(1) << 40},
			negative[1] = {UINT64_C(1) << 63};
	const struct {
		uint32_t version;
		uint64_t tensors, entries;
		const char *key, *second_key;
		uint32_t type;
		uint64_t alignment;
		uint32_t dimensions;
		const uint64_t *sizes;
		uint32_t dtype;
		uint64_t offset, second;   /* of two tensors */
		const char *error;
	} cases[] = {
		{3, 2, 2, "a", "b", GGUF_U32, 32, 1, four, 0, 0, 32, NULL},
		{1, 2, 2, "a", "b", GGUF_U32, 32, 1, four, 0, 0, 32, "version 1; expected 2 or 3"},
		{0x03000000, 2, 2, "a", "b", GGUF_U32, 32, 1, four, 0, 0, 32, "big-endian"},
		{3, UINT64_C(1) << 60, 2, "a", "b", GGUF_U32, 32, 1, four, 0, 0, 32, "do not fit"},
		{3, 2, UINT64_C(1) << 60, "a", "b", GGUF_U32, 32, 1, four, 0, 0, 32, "do not fit"},
		{3, 2, 2, "a", "a", GGUF_U32, 32, 1, four, 0, 0, 32, "`a` is there twice"},
		{3, 2, 2, "a", "b", 13, 32, 1, four, 0, 0, 32, "`a` is of type 13"},
		{3, 2, 2, "\xff", "b", GGUF_U32, 32, 1, four, 0, 0, 32, "a key is not UTF-8"},
		{3, 2, 2, "a", "general.alignment", GGUF_U32, 24, 1, four, 0, 0, 32, "expected a power of 2"},
		{3, 2, 2, "a", "general.alignment", GGUF_U32, 0, 1, four, 0, 0, 32, "expected 8 to"},
		{3, 2, 2, "a", "b", GGUF_U32, 32, 0, four, 0, 0, 32, "has 0 dimensions"},
		{3, 2, 2, "a", "b", GGUF_U32, 32, 5, four, 0, 0, 32, "has 5 dimensions"},
		{3, 2, 2, "a", "b", GGUF_U32, 32, 2, huge, 0, 0, 32, "too large"},
		{3, 2, 2, "a", "b", GGUF_U32, 32, 1, negative, 0, 0, 32, "too large"},
		{3, 2, 2, "a", "b", GGUF_U32, 32, 1, four, 0, 0, 16, "t2: offset 16; expected a multiple of 32"},
		{3, 2, 2, "a", "b", GGUF_U32, 32, 1, four, 0, 0, 0, "overlap"},
		{3, 2, 2, "a", "b", GGUF_U32, 32, 1, four, 0, 0, 64, "truncated"},
		{3, 2, 2, "a", "b", GGUF_U32, 32, 1, four, 0, UINT64_C(1) << 63, 32, "offset"},
		{3, 2, 2, "a", "b", GGUF_U32, 32, 1, four, 12, 0, 32, NULL}, /* Q4_K: refused where it is needed */
	};
	for (int i = 0; i < COUNT(cases); i++) {
		struct text b = {0};
		text_append(&b, GGUF_MAGIC, 4);
		append_u32(&b, cases[i].version);
		append_u64(&b, cases[i].tensors);
		append_u64(&b, cases[i].entries);
		append_text(&b, cases[i].key);
		append_u32(&b, cases[i].type);
		append_u32(&b, 7);
		append_text(&b, cases[i].second_key);
		append_u32(&b, GGUF_U32);
		append_u32(&b, cases[i].alignment);
		append_tensor(&b, "t1", cases[i].dimensions, cases[i].sizes, cases[i].dtype, cases[i].offset);
		append_tensor(&b, "t2", 1, four, cases[i].dtype, cases[i].second);
		const size_t header = b.size;
		while (b.size % 32)
			text_append(&b, "", 1);
		for (int k = 0; k < 48; k++)
			text_append(&b, "", 1);
		int rc = open_bytes(&b);
		if (rc != (cases[i].error ? -1 : 0))
			fail_msg("case %d: %d, %s", i, rc, error_text);
		if (cases[i].error)
			expect_error(cases[i].error);
		/* cut anywhere, it is never taken for whole */
		for (size_t n = 0; i == 0 && n < b.size; n++) {
			const struct text cut = {.data = b.data, .size = n};
			assert_int_equal(open_bytes(&cut), -1);
			if (n > 4 && n < header)
				expect_error("case.gguf");
		}
		free(b.data);
	}
}

/* What a file must say of itself, and what it must not. */
static void refused_metadata(void **state)
{
	(void)state;
	enum dtype types[N];
	for (int p = 0; p < N; p++)
		types[p] = F32;
	make_model(at("hf"), config_text, types);
	const struct { const char *from, *to, *error; } cases[] = {
		{"\x0a\0\0\0\0\0\0\0bailingmoe", "\x0a\0\0\0\0\0\0\0bailingmop",
			"architecture `bailingmop`; expected bailingmoe, which Ling-Lite and Ling-Plus are, or bailingmoe2"},
		{"bailingmoe.expert_count", "bailingmoe.expert_cound", "the key `bailingmoe.expert_cound` is not known"},
		{"bailingmoe.attention.value_length\x04\0\0\0\x06", "bailingmoe.attention.value_length\x04\0\0\0\x08",
			"gives another head_dim"},
		{"bailingmoe.expert_weights_scale\x06\0\0\0\0\0\x80\x3f",
			"bailingmoe.expert_weights_scale\x06\0\0\0\0\0\0\x40", "`bailingmoe.expert_weights_scale` is not 1"},
		{"bailingmoe.attention.head_count_kv\x04\0\0\0\x01", "bailingmoe.attention.head_count_kv\x04\0\0\0\x02",
			"attn_k.weight: shape [6, 4]; expected [12, 4]"},
		{"output_norm.weight", "output_torm.weight", "tensor output_norm.weight is missing"},
		{"blk.0.attn_q.weight\x02\0\0\0\x04\0\0\0\0\0\0\0\x0c\0\0\0\0\0\0\0\0\0\0\0",
			"blk.0.attn_q.weight\x02\0\0\0\x04\0\0\0\0\0\0\0\x0c\0\0\0\0\0\0\0\x0c\0\0\0",
			"tensor blk.0.attn_q.weight: dtype Q4_K; expected F32"},
	};
	const size_t lengths[] = {18, 0, 38, 39, 39, 0, 43};
	for (int i = 0; i < COUNT(cases); i++) {
		unlink(at("m.gguf"));
		assert_int_equal(convert(at("hf"), at("m.gguf"), FORMAT_GGUF, "f32", false, true), 0);
		size_t size, n = lengths[i] ? lengths[i] : strlen(cases[i].from);
		const uint8_t *file;
		assert_int_equal(map_file(at("m.gguf"), &file, &size), 0);
		uint8_t *copy = allocate(size);
		memcpy(copy, file, size);
		unmap_file(file, size);
		uint8_t *place = memmem(copy, size, cases[i].from, n);
		if (!place)
			fail_msg("case %d: not in the file", i);
		memcpy(place, cases[i].to, n);
		put_file(at("m.gguf"), copy, size);
		free(copy);
		if (convert(at("m.gguf"), at("x"), FORMAT_HUGGINGFACE, NULL, false, false) == 0)
			fail_msg("case %d was accepted", i);
		expect_error(cases[i].error);
		assert_false(exists(at("x")));
	}
}

/* RoPE scaling of type none, which older converters write, is none; another without its factor is refused. */
static void rope_scaling(void **state)
{
	(void)state;
	enum dtype types[N];
	for (int p = 0; p < N; p++)
		types[p] = F32;
	make_model(at("hf"), config_text, types);
	assert_int_equal(convert(at("hf"), at("plain.gguf"), FORMAT_GGUF, "f32", false, true), 0);
	/* Two more entries of 96 bytes together, so that all that follows stays aligned. */
	char entries[] = "\x1c\0\0\0\0\0\0\0bailingmoe.rope.scaling.type\x08\0\0\0\x04\0\0\0\0\0\0\0none"
			"\x13\0\0\0\0\0\0\0general.description\x08\0\0\0\x05\0\0\0\0\0\0\0words";
	assert_int_equal(sizeof entries - 1, 96);
	size_t size;
	const uint8_t *file;
	assert_int_equal(map_file(at("plain.gguf"), &file, &size), 0);
	for (int i = 0; i < 2; i++) {
		uint8_t *copy = allocate(size + 96);
		memcpy(copy, file, 24);
		copy[16] += 2; /* the number of entries */
		memcpy(copy + 24, entries, 96);
		memcpy(copy + 24 + 96, file + 24, size - 24);
		put_file(at("scaled.gguf"), copy, size + 96);
		free(copy);
		const int rc = convert(at("scaled.gguf"), at("scaled%d", i), FORMAT_HUGGINGFACE, NULL, false, true);
		if (i == 0 && rc < 0)
			fail_msg("%s", error_text);
		if (i == 1) {
			assert_int_equal(rc, -1);
			expect_error("`bailingmoe.rope.scaling.type` is rope; expected none, linear or yarn");
		}
		memcpy(strstr(entries + 8, "type") + 16, "rope", 4);
	}
	unmap_file(file, size);
}

/* Makes a model with that rope_scaling, and converts it to GGUF and back: 0, or -1 with error_text set. */
static int scaled_round_trip(const char *scaling, struct model_config *before, struct model_config *after)
{
	static int n; /* models so far */
	enum dtype types[N];
	char text[1024];
	for (int p = 0; p < N; p++)
		types[p] = F32;
	snprintf(text, sizeof text, "%.*s, \"max_position_embeddings\": 4096, \"rope_scaling\": %s}",
			(int)(sizeof config_text - 2), config_text, scaling);
	make_model(at("from%d", n), text, types);
	int rc = convert(at("from%d", n), at("to%d.gguf", n), FORMAT_GGUF, "f32", true, true);
	if (rc == 0)
		rc = convert(at("to%d.gguf", n), at("back%d", n), FORMAT_HUGGINGFACE, NULL, false, true);
	if (rc == 0) {
		assert_int_equal(config_from_huggingface(before, at("from%d", n)), 0);
		assert_int_equal(config_from_huggingface(after, at("back%d", n)), 0);
	}
	n++;
	return rc;
}

static void rope_scaling_round_trip(void **state)
{
	(void)state;
	static const char *const cases[] = {
		"{\"type\": \"linear\", \"factor\": 2.5}",
		"{\"rope_type\": \"yarn\", \"factor\": 4.0}",
		"{\"type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 1024}",
		"{\"type\": \"yarn\", \"factor\": 4, \"attention_factor\": 1.0}",
	};
	struct model_config before, after;
	for (int i = 0; i < COUNT(cases); i++) {
		if (scaled_round_trip(cases[i], &before, &after) < 0)
			fail_msg("%s: %s", cases[i], error_text);
		assert_memory_equal(&before.rope_scaling, &after.rope_scaling, sizeof before.rope_scaling);
	}
	/* mscale becomes the attention factor that it gives */
	assert_int_equal(scaled_round_trip("{\"type\": \"yarn\", \"factor\": 40, \"mscale\": 0.707, "
			"\"mscale_all_dim\": 0.5}", &before, &after), 0);
	const double expected = (0.0707 * log(40) + 1) / (0.05 * log(40) + 1);
	assert_true(fabs(after.rope_scaling.attention_factor / expected - 1) < 1e-6);
	assert_int_equal(scaled_round_trip("{\"type\": \"dynamic\", \"factor\": 4}", &before, &after), -1);
	expect_error("type dynamic, which llama.cpp");
	assert_int_equal(scaled_round_trip("{\"type\": \"yarn\", \"factor\": 4, \"truncate\": false}", &before, &after),
			-1);
	expect_error("truncate false, but llama.cpp");
	assert_int_equal(scaled_round_trip("{\"type\": \"yarn\", \"factor\": 4, \"beta_fast\": 24}", &before, &after), -1);
	expect_error("beta_fast 24 and beta_slow 1, but llama.cpp");
}

static void expect_same_files(const char *a, const char *b)
{
	const uint8_t *x, *y;
	size_t n, m;
	char other[PATH_LEN];
	strcpy(other, b);
	assert_int_equal(map_file(a, &x, &n), 0);
	assert_int_equal(map_file(other, &y, &m), 0);
	assert_int_equal(n, m);
	assert_memory_equal(x, y, n);
	unmap_file(x, n);
	unmap_file(y, m);
}

/* What GGUF has no place for, and what Hugging Face has none for, comes back from a round trip. */
static void round_trip(void **state)
{
	(void)state;
	enum dtype types[N];
	char text[1024];
	for (int p = 0; p < N; p++)
		types[p] = F32;
	snprintf(text, sizeof text, "{\"initializer_range\": 0.0061, %s", config_text + 1);
	make_model(at("named"), text, types);
	assert_int_equal(convert(at("named"), at("1.gguf"), FORMAT_GGUF, "f32", false, true), 0);
	assert_int_equal(convert(at("1.gguf"), at("second"), FORMAT_HUGGINGFACE, NULL, false, true), 0);
	json_t *config = read_json(at("second/config.json"));
	assert_true(json_number_value(json_at(config, "initializer_range")) == 0.0061);
	assert_string_equal(json_string_value(json_object_get(config, "general.name")), "named");
	json_decref(config);
	assert_int_equal(convert(at("second"), at("third"), FORMAT_HUGGINGFACE, NULL, false, true), 0);
	assert_int_equal(convert(at("third"), at("2.gguf"), FORMAT_GGUF, "f32", false, true), 0);
	assert_int_equal(convert(at("2.gguf"), at("3.gguf"), FORMAT_GGUF, "f32", false, true), 0);
	expect_same_files(at("1.gguf"), at("2.gguf"));
	expect_same_files(at("1.gguf"), at("3.gguf"));
	/* by way of a checkpoint that training can go on from */
	assert_int_equal(convert(at("1.gguf"), at("run/step-0000000"), FORMAT_CHECKPOINT, NULL, false, true), 0);
	assert_int_equal(convert(at("run/step-0000000"), at("4.gguf"), FORMAT_GGUF, "f32", false, true), 0);
	expect_same_files(at("1.gguf"), at("4.gguf"));
	assert_int_equal(convert(at("run/step-0000000"), at("fourth"), FORMAT_HUGGINGFACE, NULL, false, true), 0);
	config = read_json(at("fourth/config.json"));
	assert_string_equal(json_string_value(json_object_get(config, "general.name")), "named");
	json_decref(config);
}

/* ---- a small model of Ling 2.0: a dense layer, one with experts, and one for multi-token prediction ---- */

enum { V2_H = 8, V2_HEADS = 2, V2_KV = 1, V2_D = 4, V2_E = 4, V2_I = 3, V2_DENSE = 5,
	V2_QKV = (V2_HEADS + 2 * V2_KV) * V2_D, MAX_V2 = 80 };

static const char v2_config[] = "{\"architectures\": [\"BailingMoeV2ForCausalLM\"], \"model_type\": \"bailing_moe\", "
	"\"hidden_size\": 8, \"num_hidden_layers\": 2, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, "
	"\"head_dim\": 4, \"vocab_size\": 7, \"num_experts\": 4, \"num_experts_per_tok\": 2, \"num_shared_experts\": 2, "
	"\"moe_intermediate_size\": 3, \"intermediate_size\": 5, \"n_group\": 2, \"topk_group\": 1, "
	"\"partial_rotary_factor\": 0.5, \"routed_scaling_factor\": 2.5, \"num_nextn_predict_layers\": 1, "
	"\"mtp_loss_scaling_factor\": 0.1, \"eos_token_id\": 5, \"auto_map\": {\"AutoModel\": \"x.Y\"}}";

static struct v2_model { struct named_tensor params[MAX_V2]; char names[MAX_V2][MAX_NAME]; int n; } v2;

static void add_v2(int64_t rows, int64_t cols, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vsnprintf(v2.names[v2.n], MAX_NAME, format, args);
	va_end(args);
	assert_true(v2.n < MAX_V2);
	v2.params[v2.n] = (struct named_tensor){v2.names[v2.n], rows, cols, NULL};
	v2.n++;
}

static void add_v2_swiglu(int64_t width, const char *prefix)
{
	add_v2(width, V2_H, "%sgate_proj.weight", prefix);
	add_v2(width, V2_H, "%sup_proj.weight", prefix);
	add_v2(V2_H, width, "%sdown_proj.weight", prefix);
}

/* Lists its parameters. */
static void list_v2(void)
{
	char prefix[MAX_NAME];
	v2.n = 0;
	add_v2(V, V2_H, "model.word_embeddings.weight");
	for (int l = 0; l < 3; l++) {
		static const char *const of_mtp[] = {"enorm", "hnorm", "final_layernorm"};
		add_v2(V2_H, 0, "model.layers.%d.input_layernorm.weight", l);
		add_v2(V2_H, 0, "model.layers.%d.post_attention_layernorm.weight", l);
		add_v2(V2_QKV, V2_H, "model.layers.%d.attention.query_key_value.weight", l);
		add_v2(V2_D, 0, "model.layers.%d.attention.query_layernorm.weight", l);
		add_v2(V2_D, 0, "model.layers.%d.attention.key_layernorm.weight", l);
		add_v2(V2_H, V2_HEADS * V2_D, "model.layers.%d.attention.dense.weight", l);
		for (int i = 0; i < 3 && l == 2; i++)
			add_v2(V2_H, 0, "model.layers.2.%s.weight", of_mtp[i]);
		if (l == 2)
			add_v2(V2_H, 2 * V2_H, "model.layers.2.eh_proj.weight");
		snprintf(prefix, sizeof prefix, "model.layers.%d.mlp.%s", l, l ? "shared_experts." : "");
		add_v2_swiglu(l ? 2 * V2_I : V2_DENSE, prefix);
		if (!l)
			continue;
		add_v2(V2_E, V2_H, "model.layers.%d.mlp.gate.weight", l);
		add_v2(V2_E, 0, "model.layers.%d.mlp.gate.expert_bias", l);
		for (int e = 0; e < V2_E; e++) {
			snprintf(prefix, sizeof prefix, "model.layers.%d.mlp.experts.%d.", l, e);
			add_v2_swiglu(V2_I, prefix);
		}
	}
	add_v2(V2_H, 0, "model.norm.weight");
	add_v2(V, V2_H, "lm_head.weight");
}

static int find_v2(const char *format, ...)
{
	char name[MAX_NAME];
	va_list args;
	va_start(args, format);
	vsnprintf(name, sizeof name, format, args);
	va_end(args);
	for (int p = 0; p < v2.n; p++)
		if (!strcmp(v2.names[p], name))
			return p;
	fail_msg("no parameter %s", name);
	return -1;
}

static bool is_bias(int p)
{
	return strstr(v2.names[p], "expert_bias") != NULL;
}

/* Appends element i of parameter p. */
static void put_element(struct safetensors_writer *w, int p, int64_t i, enum dtype type)
{
	const float f = (float)element(p, i);
	const uint16_t h = float_to_bf16(f);
	assert_int_equal(safetensors_append_bytes(w, type == F32 ? (const void *)&f : (const void *)&h, dtypes[type].size,
			dtypes[type].size), 0);
}

enum form { PLAIN, NO_BIAS, SPLIT, STACKED, COPIES, OTHER_COPY };

/* Writes its directory: all but the biases in that type. In other forms: without biases; with query_key_value in three
 * parts; with the experts of a layer in one tensor; with copies of embedding and head in the MTP layer, the last one
 * changed by OTHER_COPY. */
static void make_v2(const char *dir, const char *config, enum dtype type, enum form form)
{
	struct tensor t[2 * MAX_V2];
	int first[2 * MAX_V2], row[2 * MAX_V2], n = 0;
	char path[PATH_LEN], names[2 * MAX_V2][MAX_NAME];
	static const int begin[4] = {0, V2_HEADS * V2_D, (V2_HEADS + V2_KV) * V2_D, V2_QKV};
	list_v2();
	assert_int_equal(make_directories(dir), 0);
	snprintf(path, sizeof path, "%s/config.json", dir);
	put_string(path, config);
#define ADD(p, r, rows_, ...) do { \
		first[n] = p, row[n] = r; \
		snprintf(names[n], MAX_NAME, __VA_ARGS__); \
		t[n] = (struct tensor){.name = names[n], .shape = {rows_, v2.params[p].cols}, \
				.num_dims = v2.params[p].cols ? 2 : 1, .dtype = is_bias(p) ? F32 : type}; \
		n++; \
	} while (0)
	for (int p = 0; p < v2.n; p++) {
		int l, e, length = 0;
		char matrix[8];
		const char *name = v2.names[p];
		const bool qkv = sscanf(name, "model.layers.%d.attention.query_key_value%n", &l, &length) == 1 && length;
		if (qkv && form == SPLIT)
			for (int part = 0; part < 3; part++)
				ADD(p, begin[part], begin[part + 1] - begin[part], "model.layers.%d.attention.%c_proj.weight", l,
						"qkv"[part]);
		else if (form == STACKED && sscanf(name, "model.layers.%d.mlp.experts.%d.%4[a-z]_", &l, &e, matrix) == 3) {
			if (e)
				continue;
			ADD(p, 0, V2_E, "model.layers.%d.mlp.switch_mlp.%s_proj.weight", l, matrix);
			t[n - 1].shape[1] = v2.params[p].rows, t[n - 1].shape[2] = v2.params[p].cols, t[n - 1].num_dims = 3;
		} else if (form == STACKED && has_suffix(name, "mlp.gate.weight"))
			ADD(p, 0, V2_E, "%.*s.gate_proj.weight", (int)(strlen(name) - strlen(".weight")), name);
		else if (form != NO_BIAS || !is_bias(p))
			ADD(p, 0, v2.params[p].rows, "%s", name);
	}
	if (form == COPIES || form == OTHER_COPY) {
		ADD(0, 0, V, "model.layers.2.embed_tokens.weight");
		ADD(form == COPIES ? v2.n - 1 : 0, 0, V, "model.layers.2.shared_head.head.weight");
	}
#undef ADD
	snprintf(path, sizeof path, "%s/model.safetensors", dir);
	struct safetensors_writer *w = safetensors_create_any(path, t, n);
	assert_non_null(w);
	for (int k = 0; k < n; k++) {
		const int64_t cols = v2.params[first[k]].cols ? v2.params[first[k]].cols : 1;
		const bool stack = t[k].num_dims == 3;
		const int64_t size = (stack ? t[k].shape[1] : t[k].shape[0]) * cols;
		for (int e = 0; e < (stack ? V2_E : 1); e++) /* three parameters an expert */
			for (int64_t i = 0; i < size; i++)
				put_element(w, first[k] + 3 * e, row[k] * cols + i, t[k].dtype);
	}
	assert_int_equal(safetensors_finish(w), 0);
}

/* The same as convert(). */
static int convert_v2(const char *from, const char *path, enum model_format format, const char *dtype)
{
	struct model_config config;
	struct converted result;
	struct source_model *s = source_model_open(from, &config);
	if (!s)
		return -1;
	const struct conversion to = {.path = path, .format = format, .dtype = dtype, .max_shard_size = 1000,
			.no_tokenizer = true};
	int rc = convert_model(s, v2.params, v2.n, &to, &result);
	source_model_close(s);
	return rc;
}

/* A directory holds its numbers in that type, the biases in float32; without_bias: and these are 0. */
static void check_v2(const char *dir, enum dtype type, bool without_bias)
{
	struct tensors *w = tensors_open(dir, "model");
	if (!w)
		fail_msg("%s", error_text);
	assert_int_equal(tensors_count(w), v2.n);
	for (int p = 0; p < v2.n; p++) {
		struct named_tensor a = v2.params[p];
		real data[V2_H * V2_H * 4];
		a.data = data;
		assert_true(named_tensor_size(&a) <= COUNT(data));
		if (tensors_read(w, &a) < 0)
			fail_msg("%s", error_text);
		for (int64_t i = 0; i < named_tensor_size(&a); i++)
			if (data[i] != (is_bias(p) && without_bias ? 0 : element(p, i)))
				fail_msg("%s: %s: element %lld is %g", dir, a.name, (long long)i, (double)data[i]);
		assert_string_equal(tensor_find(w, a.name)->dtype_name, is_bias(p) && type != F64 ? "F32" : dtypes[type].name);
	}
	tensors_close(w);
}

static void v2_directories(void **state)
{
	(void)state;
	for (int half = 0; half < 2; half++) {
		const enum dtype type = half ? BF16 : F32;
		char hf[PATH_LEN], path[PATH_LEN];
		strcpy(hf, at("hf%d", half));
		make_v2(hf, v2_config, type, PLAIN);
		assert_int_equal(convert_v2(hf, at("same%d", half), FORMAT_HUGGINGFACE, NULL), 0);
		check_v2(at("same%d", half), type, false);
		assert_true(exists(at("same%d/model.safetensors.index.json", half)));
		assert_int_equal(convert_v2(hf, at("half%d", half), FORMAT_HUGGINGFACE, "bf16"), 0);
		check_v2(at("half%d", half), BF16, false);
		assert_int_equal(convert_v2(hf, at("run%d/step-0000000", half), FORMAT_CHECKPOINT, NULL), 0);
		check_v2(at("run%d/step-0000000", half), REAL_DTYPE, false);
		strcpy(path, at("run%d/step-0000000", half));
		assert_int_equal(convert_v2(path, at("back%d", half), FORMAT_HUGGINGFACE, half ? "bf16" : "f32"), 0);
		check_v2(at("back%d", half), type, false);
		struct model_config before, after;
		assert_int_equal(config_from_huggingface(&before, hf), 0);
		assert_int_equal(config_from_huggingface(&after, at("back%d", half)), 0);
		assert_memory_equal(&before, &after, sizeof before);
		assert_int_equal(before.num_nextn_predict_layers, 1);
		json_t *config = read_json(at("back%d/config.json", half));
		assert_string_equal(json_string_value(json_at(config, "auto_map.AutoModel")), "x.Y");
		assert_string_equal(json_string_value(json_at(config, "torch_dtype")), half ? "bfloat16" : "float32");
		json_decref(config);
		/* a run goes on from it: each router has statistics, that of the MTP layer too */
		struct config asked = {.model = before, .data.seq_len = 16, .train.steps = 10};
		double mean[3], std[3] = {0};
		struct trainer_state s = {.num_layers = 3, .router_mean = mean, .router_std = std};
		FILE *notes = tmpfile();
		if (checkpoint_read_state(path, &asked, &s, notes) < 0)
			fail_msg("%s", error_text);
		assert_true(std[0] == 1 && std[2] == 1 && ftell(notes) == 0);
		fclose(notes);
	}
}

/* What other programs write: missing biases are 0 where the config says that there are none; parts and stacks; copies
 * that MTP layers do not need. */
static void v2_forms(void **state)
{
	(void)state;
	static const struct { enum form form; const char *error; } cases[] = {
		{NO_BIAS, "tensor model.layers.1.mlp.gate.expert_bias is missing"}, {SPLIT, NULL}, {STACKED, NULL},
		{COPIES, NULL}, {OTHER_COPY, "model.layers.2.shared_head.head.weight differs from lm_head.weight|a copy"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		char hf[PATH_LEN];
		strcpy(hf, at("hf%d", i));
		make_v2(hf, v2_config, BF16, cases[i].form);
		const int rc = convert_v2(hf, at("to%d", i), FORMAT_HUGGINGFACE, NULL);
		if (rc != (cases[i].error ? -1 : 0))
			fail_msg("form %d: %d, %s", cases[i].form, rc, error_text);
		if (rc)
			expect_error(cases[i].error);
		else
			check_v2(at("to%d", i), BF16, false);
		if (rc == 0 && convert_v2(hf, at("to%d.gguf", i), FORMAT_GGUF, NULL) < 0)
			fail_msg("%s", error_text);
		assert_true(rc < 0 || convert_v2(at("to%d.gguf", i), at("from%d", i), FORMAT_HUGGINGFACE, "bf16") == 0);
		if (rc == 0)
			check_v2(at("from%d", i), BF16, false);
	}
	/* no bias at all */
	char text[2048], hf[PATH_LEN];
	snprintf(text, sizeof text, "{\"moe_router_enable_expert_bias\": false, %s", v2_config + 1);
	strcpy(hf, at("none"));
	make_v2(hf, text, BF16, NO_BIAS);
	assert_int_equal(convert_v2(hf, at("zeros"), FORMAT_HUGGINGFACE, NULL), 0);
	check_v2(at("zeros"), BF16, true);
	assert_int_equal(convert_v2(hf, at("zeros.gguf"), FORMAT_GGUF, NULL), 0);
	assert_int_equal(convert_v2(at("zeros.gguf"), at("back"), FORMAT_HUGGINGFACE, "bf16"), 0);
	check_v2(at("back"), BF16, true);
	struct model_config config;
	assert_int_equal(config_from_huggingface(&config, at("back")), 0);
	assert_false(config.moe_router_enable_expert_bias);
	/* a part is not there */
	make_v2(at("twice"), v2_config, F32, SPLIT);
	patch(at("twice/model.safetensors"), "\"model.layers.0.attention.v_proj.weight",
			"\"model.layers.0.attention.w_proj.weight");
	assert_int_equal(convert_v2(at("twice"), at("x"), FORMAT_HUGGINGFACE, NULL), -1);
	expect_error("tensor model.layers.0.attention.query_key_value.weight is missing");
	/* MTP layers alone, as a tool of Ling-V2 writes them */
	make_v2(at("alone"), v2_config, F32, PLAIN);
	patch(at("alone/model.safetensors"), "\"model.layers.2.eh_proj.weight", "\"model.layers.0.eh_proj.weight");
	assert_int_equal(convert_v2(at("alone"), at("x"), FORMAT_HUGGINGFACE, NULL), -1);
	expect_error("model.layers.0.eh_proj.weight: layer 0 is one for multi-token prediction|expected a whole model");
}

/* Row r of a GGUF tensor against that row of a parameter. */
static void expect_v2_row(const struct tensors *w, const char *name, int64_t r, int p, int64_t row)
{
	const struct tensor *t = tensor_find(w, name);
	if (!t)
		fail_msg("no tensor %s", name);
	const int64_t cols = v2.params[p].cols ? v2.params[p].cols : v2.params[p].rows;
	for (int64_t j = 0; j < cols; j++) {
		float f;
		memcpy(&f, tensor_bytes(t) + (r * cols + j) * 4, 4);
		if (f != element(p, row * cols + j))
			fail_msg("%s row %lld is not row %lld of %s", name, (long long)r, (long long)row, v2.names[p]);
	}
}

/* As llama.cpp's loader of bailingmoe2 wants it: its keys, names, and rows in Hugging Face's order. */
static void v2_gguf(void **state)
{
	(void)state;
	make_v2(at("hf"), v2_config, F32, PLAIN);
	if (convert_v2(at("hf"), at("m.gguf"), FORMAT_GGUF, NULL) < 0)
		fail_msg("%s", error_text);
	struct tensors *w = open_gguf(at("m.gguf"));
	assert_int_equal(w->count, 3 + 9 + 14 + 18);
	static const struct { const char *gguf, *huggingface; } names[] = {
		{"token_embd.weight", "model.word_embeddings.weight"}, {"output_norm.weight", "model.norm.weight"},
		{"output.weight", "lm_head.weight"}, {"blk.0.attn_norm.weight", "model.layers.0.input_layernorm.weight"},
		{"blk.0.attn_qkv.weight", "model.layers.0.attention.query_key_value.weight"},
		{"blk.1.attn_q_norm.weight", "model.layers.1.attention.query_layernorm.weight"},
		{"blk.1.attn_k_norm.weight", "model.layers.1.attention.key_layernorm.weight"},
		{"blk.1.attn_output.weight", "model.layers.1.attention.dense.weight"},
		{"blk.0.ffn_norm.weight", "model.layers.0.post_attention_layernorm.weight"},
		{"blk.0.ffn_gate.weight", "model.layers.0.mlp.gate_proj.weight"},
		{"blk.0.ffn_up.weight", "model.layers.0.mlp.up_proj.weight"},
		{"blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"},
		{"blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight"},
		{"blk.1.exp_probs_b.bias", "model.layers.1.mlp.gate.expert_bias"},
		{"blk.1.ffn_gate_shexp.weight", "model.layers.1.mlp.shared_experts.gate_proj.weight"},
		{"blk.1.ffn_up_shexp.weight", "model.layers.1.mlp.shared_experts.up_proj.weight"},
		{"blk.1.ffn_down_shexp.weight", "model.layers.1.mlp.shared_experts.down_proj.weight"},
		{"blk.2.attn_qkv.weight", "model.layers.2.attention.query_key_value.weight"},
		{"blk.2.exp_probs_b.bias", "model.layers.2.mlp.gate.expert_bias"},
		{"blk.2.nextn.eh_proj.weight", "model.layers.2.eh_proj.weight"},
		{"blk.2.nextn.enorm.weight", "model.layers.2.enorm.weight"},
		{"blk.2.nextn.hnorm.weight", "model.layers.2.hnorm.weight"},
		{"blk.2.layer_output_norm.weight", "model.layers.2.final_layernorm.weight"},
	};
	for (int i = 0; i < COUNT(names); i++) {
		const int p = find_v2("%s", names[i].huggingface);
		for (int64_t r = 0; r < (v2.params[p].cols ? v2.params[p].rows : 1); r++)
			expect_v2_row(w, names[i].gguf, r, p, r);
	}
	for (int e = 0; e < V2_E; e++)
		for (int64_t i = 0; i < V2_I; i++) {
			expect_v2_row(w, "blk.2.ffn_gate_exps.weight", e * V2_I + i,
					find_v2("model.layers.2.mlp.experts.%d.gate_proj.weight", e), i);
			expect_v2_row(w, "blk.1.ffn_up_exps.weight", e * V2_I + i,
					find_v2("model.layers.1.mlp.experts.%d.up_proj.weight", e), i);
		}
	static const struct { const char *key; double value; } numbers[] = {
		{"block_count", 3}, {"nextn_predict_layers", 1}, {"context_length", 32768}, {"embedding_length", 8},
		{"feed_forward_length", 5}, {"attention.head_count", 2}, {"attention.head_count_kv", 1},
		{"attention.key_length", 4}, {"attention.value_length", 4}, {"rope.dimension_count", 2},
		{"rope.freq_base", 600000}, {"attention.layer_norm_rms_epsilon", 1e-6}, {"expert_count", 4},
		{"expert_used_count", 2}, {"expert_shared_count", 2}, {"expert_feed_forward_length", 3},
		{"expert_shared_feed_forward_length", 3}, {"expert_weights_scale", 2.5}, {"expert_gating_func", 2},
		{"expert_group_count", 2}, {"expert_group_used_count", 1}, {"leading_dense_block_count", 1}, {"vocab_size", 7},
	};
	const json_t *metadata = json_object_get(w->files->header, "metadata");
	int keys = 0;
	const char *key;
	json_t *value;
	for (int i = 0; i < COUNT(numbers); i++) {
		char name[MAX_NAME];
		snprintf(name, sizeof name, "bailingmoe2.%s", numbers[i].key);
		if (json_number_value(json_object_get(metadata, name)) != numbers[i].value)
			fail_msg("%s is %g", name, json_number_value(json_object_get(metadata, name)));
	}
	json_object_foreach((json_t *)metadata, key, value)
		keys += !strncmp(key, "bailingmoe2.", 12);
	assert_int_equal(keys, COUNT(numbers) + 1);
	assert_true(json_is_true(json_object_get(metadata, "bailingmoe2.expert_weights_norm")));
	assert_string_equal(json_string_value(json_object_get(metadata, "general.architecture")), "bailingmoe2");
	tensors_close(w);

	/* there and back, also by way of another GGUF file */
	assert_int_equal(convert_v2(at("m.gguf"), at("m2.gguf"), FORMAT_GGUF, NULL), 0);
	expect_same_files(at("m.gguf"), at("m2.gguf"));
	assert_int_equal(convert_v2(at("m2.gguf"), at("back"), FORMAT_HUGGINGFACE, NULL), 0);
	check_v2(at("back"), F32, false);
	struct model_config before, after;
	assert_int_equal(config_from_huggingface(&before, at("hf")), 0);
	assert_int_equal(config_from_huggingface(&after, at("back")), 0);
	assert_memory_equal(&before, &after, sizeof before);
}

/* Changes of the config that llama.cpp computes in its way, and such that it does not. */
static void v2_gguf_configs(void **state)
{
	(void)state;
	struct metadata m = {0};
	struct model_config c, plain;
	make_v2(at("hf"), v2_config, F32, PLAIN);
	assert_int_equal(config_from_huggingface(&plain, at("hf")), 0);
	static const struct { size_t offset; int value; const char *error; } ints[] = {
		{offsetof(struct model_config, num_shared_experts), 0,
			"c: num_shared_experts is 0, but llama.cpp's bailingmoe2"},
		{offsetof(struct model_config, head_dim), 6, "head_dim is 12|hidden_size, which is 8"},
	};
	static const struct { size_t offset; bool value; const char *error; } bools[] = {
		{offsetof(struct model_config, use_bias), true, "c: use_bias is set"},
		{offsetof(struct model_config, use_qkv_bias), true, "c: use_qkv_bias is set"},
		{offsetof(struct model_config, use_qk_norm), false, "c: use_qk_norm is false"},
	};
	for (int i = 0; i < COUNT(ints); i++) {
		c = plain;
		*(int *)((char *)&c + ints[i].offset) = ints[i].value;
		assert_int_equal(config_to_gguf(&m, &c, "c"), -1);
		expect_error(ints[i].error);
	}
	for (int i = 0; i < COUNT(bools); i++) {
		c = plain;
		*(bool *)((char *)&c + bools[i].offset) = bools[i].value;
		assert_int_equal(config_to_gguf(&m, &c, "c"), -1);
		expect_error(bools[i].error);
	}
	free(m.bytes.data);

	/* all groups are none; a tied head becomes one of its own; yarn; a rotation of the whole head */
	static const struct { const char *change, *with; int n_group, rot; bool yarn; } kept[] = {
		{"\"topk_group\": 1", "\"topk_group\": 2", 1, 2, false},
		{"\"n_group\": 2", "\"n_group\": 0", 1, 2, false},
		{"\"partial_rotary_factor\": 0.5", "\"partial_rotary_factor\": 1.0", 2, 4, false},
		{"\"eos_token_id\": 5,", "\"rope_scaling\": {\"rope_type\": \"yarn\", \"factor\": 4.0, "
			"\"original_max_position_embeddings\": 8192},", 2, 2, true},
	};
	for (int i = 0; i < COUNT(kept); i++) {
		char text[2048];
		const char *place = strstr(v2_config, kept[i].change);
		snprintf(text, sizeof text, "%.*s%s%s", (int)(place - v2_config), v2_config, kept[i].with,
				place + strlen(kept[i].change));
		put_string(at("hf/config.json"), text);
		if (convert_v2(at("hf"), at("k%d.gguf", i), FORMAT_GGUF, NULL) < 0 ||
				convert_v2(at("k%d.gguf", i), at("k%d", i), FORMAT_HUGGINGFACE, NULL) < 0)
			fail_msg("%s: %s", kept[i].with, error_text);
		check_v2(at("k%d", i), F32, false);
		assert_int_equal(config_from_huggingface(&c, at("k%d", i)), 0);
		assert_true(c.n_group == kept[i].n_group && rotary_dim(&c) == kept[i].rot);
		assert_true(c.rope_scaling.type == (kept[i].yarn ? ROPE_YARN : ROPE_DEFAULT));
		if (kept[i].yarn)
			assert_true(c.rope_scaling.factor == 4 && c.rope_scaling.original_max_position_embeddings == 8192);
	}

	/* what other files say */
	put_string(at("hf/config.json"), v2_config);
	static const struct { const char *from, *to; size_t length; const char *error; } files[] = {
		{"expert_gating_func\x04\0\0\0\x02", "expert_gating_func\x04\0\0\0\x01", 23,
			"`bailingmoe2.expert_gating_func` is 1; expected 2"},
		{"bailingmoe2.expert_gating_func", "bailingmop2.expert_gating_func", 30,
			"the key `bailingmoe2.expert_gating_func` is missing"},
		{"bailingmoe2.expert_group_count", "bailingmoe2.expert_group_coins", 30,
			"the key `bailingmoe2.expert_group_coins` is not known"},
		{"expert_shared_feed_forward_length\x04\0\0\0\x03", "expert_shared_feed_forward_length\x04\0\0\0\x05", 38,
			"`bailingmoe2.expert_shared_feed_forward_length` is 5; expected that of an expert, 3"},
		{"expert_shared_feed_forward_length\x04\0\0\0\x03", "expert_shared_feed_forward_length\x04\0\0\0\x06", 38,
			NULL},
		{"expert_weights_scale\x06\0\0\0\0\0\x20\x40", "expert_weights_scale\x06\0\0\0\0\0\0\0", 28, NULL}, /* 0 is 1 */
		{"blk.1.exp_probs_b.bias", "blk.1.exp_probs_c.bias", 22, "tensor blk.1.exp_probs_b.bias is missing"},
		{"expert_group_count\x04\0\0\0", "expert_group_count\x06\0\0\0", 22,
			"`bailingmoe2.expert_group_count` is a real number; expected a whole number"},
		{"nextn_predict_layers\x04\0\0\0\x01\0\0\0", "nextn_predict_layers\x05\0\0\0\xff\xff\xff\xff", 28,
			"`bailingmoe2.nextn_predict_layers` is an integer below 0"},
		{"nextn_predict_layers\x04\0\0\0\x01", "nextn_predict_layers\x04\0\0\0\x03", 25,
			"num_hidden_layers: found 0 (out of range)"},
		{"bailingmoe2.expert_group_used_count", "bailingmop2.expert_group_used_count", 35,
			"the key `bailingmoe2.expert_group_used_count` is missing beside expert_group_count"},
	};
	for (int i = 0; i < COUNT(files); i++) {
		unlink(at("f.gguf"));
		assert_int_equal(convert_v2(at("hf"), at("f.gguf"), FORMAT_GGUF, NULL), 0);
		size_t size;
		uint8_t *copy = get_file(at("f.gguf"), &size), *place = memmem(copy, size, files[i].from, files[i].length);
		assert_non_null(place);
		memcpy(place, files[i].to, files[i].length);
		put_file(at("f.gguf"), copy, size);
		free(copy);
		const int rc = convert_v2(at("f.gguf"), at("f%d", i), FORMAT_HUGGINGFACE, NULL);
		if (rc != (files[i].error ? -1 : 0))
			fail_msg("file %d: %d, %s", i, rc, error_text);
		if (rc < 0)
			expect_error(files[i].error);
	}
	assert_int_equal(config_from_huggingface(&c, at("f5")), 0);
	assert_true(c.routed_scaling_factor == 1);
}

/* ---- tokenizers ---- */

/* A tokenizer.json for the small model: 7 ids. */
static char *tokenizer_text(char out[2048], const char *pattern, const char *merges, const char *vocab,
		const char *added)
{
	json_t *pre = pre_tokenizer_json(pattern);
	char *text = json_text(pre, 0);
	snprintf(out, 2048,
			"{\"version\": \"1.0\", \"normalizer\": null, \"pre_tokenizer\": %s, \"added_tokens\": [%s], \"model\": "
			"{\"type\": \"BPE\", "
			"\"vocab\": {%s}, \"merges\": [%s]}}", text, added, vocab, merges);
	free(text);
	json_decref(pre);
	return out;
}

static const char vocab[] = "\"a\": 0, \"b\": 1, \"ab\": 2, \"c\": 3, \"\\u0120\": 4";
static const char added[] =
		"{\"id\": 5, \"content\": \"<|endoftext|>\", \"special\": true}, {\"id\": 6, \"content\": \"<x>\", "
		"\"special\": false}";

static void tokenizers(void **state)
{
	(void)state;
	enum dtype types[N];
	char text[2048];
	for (int p = 0; p < N; p++)
		types[p] = F32;
	make_model(at("hf"), config_text, types);
	for (int kind = 0; kind < 4; kind++) { /* three patterns; merges as pairs */
		const char *pattern = pre_tokenizers[kind % 3].pattern;
		put_string(at("hf/tokenizer.json"), tokenizer_text(text, pattern, kind < 3 ? "\"a b\"" : "[\"a\", \"b\"]",
				vocab, added));
		put_string(at("hf/tokenizer_config.json"),
				"{\"bos_token\": null, \"eos_token\": {\"content\": \"<|endoftext|>\"}, \"pad_token\": \"<x>\", "
				"\"chat_template\": [{\"name\": \"tool\", \"template\": \"T\"}, {\"name\": \"default\", "
						"\"template\": \"{{ x }}\"}]}");
		if (convert(at("hf"), at("k%d.gguf", kind), FORMAT_GGUF, "bf16", false, false) < 0)
			fail_msg("kind %d: %s", kind, error_text);
		struct tensors *w = open_gguf(at("k%d.gguf", kind));
		json_t *m = json_object_get(w->files->header, "metadata");
		json_t *expected =
				json_pack("{s:[s,s,s,s,s,s,s], s:[i,i,i,i,i,i,i], s:[s], s:i, s:i, s:s, s:s, s:s, s:i, s:b}",
				"tokenizer.ggml.tokens", "a", "b", "ab",
				"c", "\xc4\xa0", "<|endoftext|>", "<x>", "tokenizer.ggml.token_type", 1, 1, 1, 1, 1, 3, 4,
						"tokenizer.ggml.merges", "a b",
				"tokenizer.ggml.eos_token_id", 5, "tokenizer.ggml.padding_token_id", 6, "tokenizer.ggml.model", "gpt2",
						"tokenizer.ggml.pre",
				pre_tokenizers[kind % 3].name, "tokenizer.chat_template", "{{ x }}", "general.file_type", 32,
						"tokenizer.ggml.add_bos_token", 0);
		const char *key;
		json_t *value;
		json_object_foreach(expected, key, value)
			if (!json_equal(value, json_object_get(m, key)))
				fail_msg("kind %d: %s is %s", kind, key, json_text(json_object_get(m, key), JSON_ENCODE_ANY));
		assert_null(json_object_get(m, "tokenizer.ggml.bos_token_id"));
		json_decref(expected);
		tensors_close(w);

		assert_int_equal(convert(at("k%d.gguf", kind), at("k%d", kind), FORMAT_HUGGINGFACE, NULL, false, false), 0);
		json_t *back = read_json(at("k%d/tokenizer.json", kind)), *config = read_json(at("k%d/tokenizer_config.json",
				kind));
		json_t *original = json_loads(tokenizer_text(text, pre_tokenizers[kind == 1 ? 0 : kind % 3].pattern, "\"a b\"",
				vocab, added), 0, NULL);
		assert_true(json_equal(json_at(back, "model.vocab"), json_at(original, "model.vocab")));
		assert_true(json_equal(json_at(back, "model.merges"), json_at(original, "model.merges")));
		assert_true(json_equal(json_at(back, "pre_tokenizer"), json_at(original, "pre_tokenizer")));
		assert_int_equal(json_array_size(json_at(back, "added_tokens")), 2);
		assert_true(json_is_true(json_object_get(json_array_get(json_at(back, "added_tokens"), 0), "special")));
		assert_string_equal(json_string_value(json_at(config, "eos_token")), "<|endoftext|>");
		assert_string_equal(json_string_value(json_at(config, "chat_template")), "{{ x }}");
		json_decref(back);
		json_decref(config);
		json_decref(original);
	}
	/* fewer tokens than the model has ids: the rest are filled; the end by its usual name; a template in its own
	 * file */
	put_string(at("hf/tokenizer.json"), tokenizer_text(text, NULL, "", "\"a\": 0",
			"{\"id\": 5, \"content\": \"<|endoftext|>\", \"special\": true}"));
	unlink(at("hf/tokenizer_config.json"));
	put_string(at("hf/chat_template.jinja"), "{{ y }}");
	assert_int_equal(convert(at("hf"), at("few.gguf"), FORMAT_GGUF, NULL, false, false), 0);
	struct tensors *w = open_gguf(at("few.gguf"));
	json_t *m = json_object_get(w->files->header, "metadata");
	assert_string_equal(json_string_value(json_array_get(json_object_get(m, "tokenizer.ggml.tokens"), 6)), "[PAD6]");
	assert_int_equal(json_integer_value(json_array_get(json_object_get(m, "tokenizer.ggml.token_type"), 6)),
			TOKEN_UNUSED);
	assert_int_equal(json_integer_value(json_object_get(m, "tokenizer.ggml.eos_token_id")), 5);
	assert_string_equal(json_string_value(json_object_get(m, "tokenizer.chat_template")), "{{ y }}");
	tensors_close(w);
	assert_int_equal(convert(at("few.gguf"), at("few"), FORMAT_HUGGINGFACE, NULL, false, false), 0);
	json_t *back = read_json(at("few/tokenizer.json"));
	assert_int_equal(json_object_size(json_at(back, "model.vocab")), 1);
	json_decref(back);
	assert_int_equal(convert(at("few.gguf"), at("bare"), FORMAT_HUGGINGFACE, NULL, false, true), 0);
	assert_false(exists(at("bare/tokenizer.json")));
	assert_int_equal(convert(at("few.gguf"), at("other.gguf"), FORMAT_GGUF, NULL, false, false), -1);
	expect_error("--no-tokenizer");
}

/* Foreign bytes: the name of a directory, which a GGUF file holds; a template; a number of 31 digits. */
static void foreign_bytes(void **state)
{
	(void)state;
	enum dtype types[N];
	char text[2048], dir[PATH_LEN];
	struct model_config config;
	for (int p = 0; p < N; p++)
		types[p] = F32;
	strcpy(dir, at("h\xff\xc3\xa9"));
	make_model(dir, config_text, types);
	put_string(at("h\xff\xc3\xa9/tokenizer.json"), tokenizer_text(text, NULL, "", vocab, added));
	put_string(at("h\xff\xc3\xa9/tokenizer_config.json"), "{\"model_max_length\": 1000000000000000019884624838656}");
	put_string(at("h\xff\xc3\xa9/chat_template.jinja"), "a\xff");
	assert_int_equal(convert(dir, at("x.gguf"), FORMAT_GGUF, NULL, false, false), -1);
	expect_error("chat_template.jinja: is not UTF-8");
	assert_false(exists(at("x.gguf")) || exists(at(".tmp-x.gguf")));
	put_string(at("h\xff\xc3\xa9/chat_template.jinja"), "a\xc3\xa9");
	if (convert(dir, at("x.gguf"), FORMAT_GGUF, NULL, false, false) < 0)
		fail_msg("%s", error_text);
	struct source_model *s = source_model_open(at("x.gguf"), &config);
	if (!s)
		fail_msg("%s", error_text);
	source_model_close(s);
	struct tensors *w = allocate(sizeof *w);
	assert_int_equal(gguf_open(w, at("x.gguf")), 0);
	const json_t *metadata = json_object_get(w->files->header, "metadata");
	assert_string_equal(json_string_value(json_object_get(metadata, "general.name")), "h\xef\xbf\xbd\xc3\xa9");
	assert_string_equal(json_string_value(json_object_get(metadata, "tokenizer.chat_template")), "a\xc3\xa9");
	tensors_close(w);
	/* The way back, into a directory of such a name. */
	strcpy(dir, at("back\xff"));
	if (convert(at("x.gguf"), dir, FORMAT_HUGGINGFACE, NULL, false, false) < 0)
		fail_msg("%s", error_text);
	assert_true(exists(at("back\xff/config.json")));
}

static void refused_tokenizers(void **state)
{
	(void)state;
	enum dtype types[N];
	char text[2048];
	for (int p = 0; p < N; p++)
		types[p] = F32;
	make_model(at("hf"), config_text, types);
	patch(at("hf/config.json"), "\"eos_token_id\": 5", "\"eos_token_ix\": 5");
	const struct { const char *pattern, *merges, *vocab, *added, *error; } cases[] = {
		{"\\w+", "", vocab, added, "pre_tokenizers of Ling and of GPT-2"},
		{NULL, "3", vocab, added, "merge 0 is an integer"},
		{NULL, "[\"a\", \"b\", \"c\"]", vocab, added, "merge 0 is an array"},
		{NULL, "[\"a \", \"b\"]", vocab, added, "merge 0 is an array"},
		{NULL, "", "\"a\": 7", added,
			"token `a` has the id 7; expected 0 to 6, for the model's vocab_size is 7"},
		{NULL, "", "\"a\": -1", added, "token `a` has the id -1"},
		{NULL, "", "\"a\": 1, \"b\": 1", added, "both have the id 1"},
		{NULL, "", vocab, "{\"id\": 0, \"content\": \"z\"}", "`a` and `z` both have the id 0"},
		{NULL, "", vocab, "{\"id\": 6, \"content\": \"z\"}", "no token ends a text"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		put_string(at("hf/tokenizer.json"), tokenizer_text(text, cases[i].pattern, cases[i].merges, cases[i].vocab,
				cases[i].added));
		assert_int_equal(convert(at("hf"), at("x.gguf"), FORMAT_GGUF, NULL, false, false), -1);
		expect_error(cases[i].error);
		assert_false(exists(at("x.gguf")) || exists(at(".tmp-x.gguf")));
	}
	put_string(at("hf/tokenizer.json"), "{\"model\": {\"type\": \"Unigram\"}}");
	assert_int_equal(convert(at("hf"), at("x.gguf"), FORMAT_GGUF, NULL, false, false), -1);
	expect_error("no BPE");
	tokenizer_text(text, NULL, "", vocab, added);
	char *model = strstr(text, "\"BPE\", ");
	memmove(model + 29, model + 7, strlen(model + 7) + 1);
	memcpy(model + 7, "\"ignore_merges\": true,", 22);
	put_string(at("hf/tokenizer.json"), text);
	assert_int_equal(convert(at("hf"), at("x.gguf"), FORMAT_GGUF, NULL, false, false), -1);
	expect_error("ignore_merges");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(numbers_read), cmocka_unit_test(numbers_round), cmocka_unit_test(numbers_convert),
				cmocka_unit_test(checksum_of_slices),
		TEST(directory_to_directory), TEST(directory_to_gguf), TEST(ties), TEST(checkpoint), TEST(refused_directories),
				TEST(refused_numbers),
		TEST(full_disk), TEST(refused_headers), TEST(refused_metadata), TEST(rope_scaling),
		TEST(rope_scaling_round_trip), TEST(round_trip),
				TEST(v2_directories), TEST(v2_forms), TEST(v2_gguf), TEST(v2_gguf_configs),
		TEST(tokenizers), TEST(foreign_bytes),
				TEST(refused_tokenizers),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
