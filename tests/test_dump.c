/*
 * Dumps of training steps: names, shapes and order against a list; logits, losses, gradients and weights against
 * PyTorch's (tests/fixtures); and the chain: every product, norm and sum of the forward and the backward pass is
 * computed again, in double, from what the dump says went into it. Built with sanitizers, and in double.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "files/config.h"
#include "files/safetensors.h"
#include "files/tensors.h"
#include "ling.h"
#include "training/start.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "test.h"

#define FIXTURES "tests/fixtures/"
#ifdef LING_DOUBLE
#define FIXTURE_TOLERANCE 2e-7  /* the expected arrays are stored in float32 */
#define CHAIN_TOLERANCE 1e-12
#else
#define FIXTURE_TOLERANCE 1e-5
#define CHAIN_TOLERANCE 1e-5
#endif

static const char *const cases[] = {"base", "no_norm_head", "tied_norm_head", "tied_plain", "shared0", "head_dim",
	"dense_first", "scope_sequence", "biases", "routing_warmup", "k1_no_renorm", "no_topk_norm", "odd_sizes"};

#define assert_done(call) do { if ((call) < 0) fail_msg("%s", error_text); } while (0)

/* ---------------------------------------------------------------------------------------------- one dumped run */

/* A trainer of a fixture with the weights of the fixture; dump: "", or what train.dump is. */
static struct tensors *begin(struct trainer *t, struct config *c, const char *name, const char *dump, const char *more)
{
	char path[256], option[PATH_LEN + 64], other[128];
	char *options[] = {option, other};
	snprintf(path, sizeof path, FIXTURES "%s/case.yaml", name);
	snprintf(option, sizeof option, "train.dump=%s", *dump ? dump : "off");
	snprintf(other, sizeof other, "%s", more);
	assert_done(config_load(c, path, *more ? 2 : 1, options, false));
	assert_done(trainer_allocate(t, c));
	for (int64_t i = 0; i < t->model.table.num_elements; i++)
		t->model.grads.memory[i] = NAN;
	snprintf(path, sizeof path, FIXTURES "%s/weights.safetensors", name);
	assert_done(model_load(&t->model, path));
	assert_done(dump_open(&t->dump, c, &t->model, 0));
	snprintf(path, sizeof path, FIXTURES "%s/expected.safetensors", name);
	struct tensors *expected = tensors_open(path, "model");
	assert_non_null(expected);
	return expected;
}

static void take_step(struct trainer *t, const struct tensors *expected, int step)
{
	char name[32];
	struct metrics m;
	const int64_t n = (int64_t)t->config.train.batch * t->config.data.seq_len;
	snprintf(name, sizeof name, "input.%d", step);
	assert_done(tensors_read_int(expected, name, n, t->input));
	snprintf(name, sizeof name, "target.%d", step);
	assert_done(tensors_read_int(expected, name, n, t->target));
	assert_int_equal(trainer_step(t, t->config.train.batch, &m), STEP_TAKEN);
}

static struct tensors *open_dump(const char *path)
{
	struct tensors *w = tensors_open(path, "model");
	if (!w)
		fail_msg("%s", error_text);
	for (int i = 0; i < w->count; i++)
		assert_done(tensor_verify(&w->tensors[i]));
	return w;
}

static const char *dump_option(const char *steps)
{
	static char option[PATH_LEN + 32];
	snprintf(option, sizeof option, "{steps: %s, dir: %s}", steps, scratch);
	return option;
}

/* ---------------------------------------------------------------------------------------------------- matrices */

/* A tensor as a matrix of doubles: its first dimension, and the product of the others. */
struct matrix { int64_t rows, cols; double *x; };

static void *blocks[8192]; /* of all matrices of a test */
static int num_blocks;

static struct matrix make(int64_t rows, int64_t cols)
{
	assert_true(num_blocks < COUNT(blocks));
	blocks[num_blocks] = calloc(rows * cols + 1, sizeof(double));
	return (struct matrix){rows, cols, blocks[num_blocks++]};
}

static void free_matrices(void)
{
	while (num_blocks)
		free(blocks[--num_blocks]);
}

__attribute__((format(printf, 2, 3)))
static struct matrix get(const struct tensors *w, const char *format, ...)
{
	char name[MAX_NAME + 16];
	va_list args;
	va_start(args, format);
	vsnprintf(name, sizeof name, format, args);
	va_end(args);
	const struct tensor *t = tensor_find(w, name);
	if (!t)
		fail_msg("%s: no tensor %s", w->path, name);
	int64_t cols = 1;
	for (int i = 1; i < t->num_dims; i++)
		cols *= t->shape[i];
	struct matrix m = make(t->shape[0], cols);
	real *x = calloc(m.rows * cols + 1, sizeof *x);
	if (t->dtype != I32)
		to_real(x, tensor_bytes(t), m.rows * cols, t->dtype);
	for (int64_t i = 0; i < m.rows * cols; i++)
		m.x[i] = t->dtype == I32 ? load_i32(tensor_bytes(t) + 4 * i) : (double)x[i];
	free(x);
	return m;
}

/* Fails unless the two are near, by their norms. */
static void near(struct matrix found, struct matrix expected, double tolerance, const char *where, const char *what,
		int l)
{
	double difference = 0, norm = 0;
	if (found.rows != expected.rows || found.cols != expected.cols)
		fail_msg("%s: %s of layer %d: [%lld, %lld] is not [%lld, %lld]", where, what, l, (long long)found.rows,
				(long long)found.cols, (long long)expected.rows, (long long)expected.cols);
	for (int64_t i = 0; i < found.rows * found.cols; i++) {
		difference += (found.x[i] - expected.x[i]) * (found.x[i] - expected.x[i]);
		norm += expected.x[i] * expected.x[i];
	}
	if (!(sqrt(difference) <= tolerance * sqrt(norm)))
		fail_msg("%s: %s of layer %d: off by %g of its norm %g", where, what, l, sqrt(difference / norm), sqrt(norm));
}

/* y [n, m] += x [n, k] w^T, w [m, k] */
static void add_product(struct matrix y, struct matrix x, struct matrix w)
{
	assert_true(x.cols == w.cols && y.rows == x.rows && y.cols == w.rows);
	for (int64_t i = 0; i < y.rows; i++)
		for (int64_t j = 0; j < y.cols; j++)
			for (int64_t k = 0; k < x.cols; k++)
				y.x[i * y.cols + j] += x.x[i * x.cols + k] * w.x[j * w.cols + k];
}

/* dx [n, k] += dy [n, m] w */
static void add_input_gradient(struct matrix dx, struct matrix dy, struct matrix w)
{
	assert_true(dy.cols == w.rows && dx.rows == dy.rows && dx.cols == w.cols);
	for (int64_t i = 0; i < dy.rows; i++)
		for (int64_t j = 0; j < dy.cols; j++)
			for (int64_t k = 0; k < w.cols; k++)
				dx.x[i * dx.cols + k] += dy.x[i * dy.cols + j] * w.x[j * w.cols + k];
}

/* dw [m, k] += dy^T [m, n] x [n, k] */
static void add_weight_gradient(struct matrix dw, struct matrix dy, struct matrix x)
{
	assert_true(dy.rows == x.rows && dw.rows == dy.cols && dw.cols == x.cols);
	for (int64_t i = 0; i < dy.rows; i++)
		for (int64_t j = 0; j < dy.cols; j++)
			for (int64_t k = 0; k < x.cols; k++)
				dw.x[j * dw.cols + k] += dy.x[i * dy.cols + j] * x.x[i * x.cols + k];
}

static void add(struct matrix y, struct matrix x)
{
	assert_true(y.rows * y.cols == x.rows * x.cols);
	for (int64_t i = 0; i < y.rows * y.cols; i++)
		y.x[i] += x.x[i];
}

/* Rows a .. b - 1. */
static struct matrix part(struct matrix m, int64_t a, int64_t b)
{
	return (struct matrix){b - a, m.cols, m.x + a * m.cols};
}

/* Columns a .. b - 1, copied. */
static struct matrix columns(struct matrix m, int64_t a, int64_t b)
{
	struct matrix y = make(m.rows, b - a);
	for (int64_t i = 0; i < m.rows; i++)
		memcpy(y.x + i * y.cols, m.x + i * m.cols + a, y.cols * sizeof *y.x);
	return y;
}

static struct matrix column_sums(struct matrix m)
{
	struct matrix y = make(m.cols, 1);
	for (int64_t i = 0; i < m.rows * m.cols; i++)
		y.x[i % m.cols] += m.x[i];
	return y;
}

/* ------------------------------------------------------------------------------------- names, shapes, and order */

/* The list that docs/align.md describes. */
struct expected { char name[MAX_NAME + 16]; int64_t shape[3]; int dims; };
static struct expected list[2048];
static int listed;

__attribute__((format(printf, 4, 5)))
static void expect(int64_t a, int64_t b, int64_t c, const char *format, ...)
{
	struct expected *e = &list[listed++];
	va_list args;
	*e = (struct expected){.shape = {a, b, c}, .dims = 1 + (b > 0) + (c > 0)};
	va_start(args, format);
	vsnprintf(e->name, sizeof e->name, format, args);
	va_end(args);
}

static void expect_layer(const struct model_config *c, int64_t T, int l)
{
	const int64_t H = c->hidden_size, E = c->num_experts, k = c->num_experts_per_tok, I = c->moe_intermediate_size,
			a = c->num_attention_heads * c->head_dim, q = a + 2 * c->num_key_value_heads * c->head_dim;
	const bool dense = l < c->first_k_dense_replace;
	const int64_t W = dense ? c->intermediate_size : c->num_shared_experts * I;
	expect(T, H, 0, "layer %d / attention / norm", l);
	expect(T, q, 0, "layer %d / attention / qkv", l);
	expect(T, q, 0, "layer %d / attention / rope", l);
	expect(T, a, 0, "layer %d / attention / core", l);
	expect(T, H, 0, "layer %d / attention / output", l);
	expect(T, H, 0, "layer %d / ffn / norm", l);
	if (!dense) {
		expect(T, E, 0, "layer %d / router / logits", l);
		expect(T, E, 0, "layer %d / router / softmax", l);
		expect(T, k, 0, "layer %d / router / top-k", l);
		expect(T, k, 0, "layer %d / router / weights", l);
		expect(T, k, 2 * I, "layer %d / experts / gate_up", l);
		expect(T, k, H, "layer %d / experts / down", l);
	}
	if (W)
		expect(T, 2 * W, 0, "layer %d / %s / gate_up", l, dense ? "dense" : "shared");
	expect(T, H, 0, "layer %d / output", l);
}

static void expect_layer_backward(const struct model_config *c, int64_t T, int l)
{
	const int64_t H = c->hidden_size, E = c->num_experts, k = c->num_experts_per_tok, I = c->moe_intermediate_size,
			a = c->num_attention_heads * c->head_dim, q = a + 2 * c->num_key_value_heads * c->head_dim;
	const bool dense = l < c->first_k_dense_replace;
	const int64_t W = dense ? c->intermediate_size : c->num_shared_experts * I;
	const char *shared = dense ? "" : "shared_experts.";
	expect(T, H, 0, "layer %d / output / gradient", l);
	if (W)
		expect(H, W, 0, "model.layers.%d.mlp.%sdown_proj.weight / gradient", l, shared);
	for (int e = 0; !dense && e < E; e++)
		expect(H, I, 0, "model.layers.%d.mlp.experts.%d.down_proj.weight / gradient", l, e);
	if (!dense) {
		expect(T, k, 2 * I, "layer %d / experts / gate_up / gradient", l);
		for (int e = 0; e < E; e++)
			expect(I, H, 0, "model.layers.%d.mlp.experts.%d.gate_proj.weight / gradient", l, e);
		for (int e = 0; e < E; e++)
			expect(I, H, 0, "model.layers.%d.mlp.experts.%d.up_proj.weight / gradient", l, e);
		expect(T, k, 0, "layer %d / router / weights / gradient", l);
		expect(T, E, 0, "layer %d / router / logits / gradient", l);
		expect(E, H, 0, "model.layers.%d.mlp.gate.weight / gradient", l);
	}
	if (W) {
		expect(T, 2 * W, 0, "layer %d / %s / gate_up / gradient", l, dense ? "dense" : "shared");
		expect(W, H, 0, "model.layers.%d.mlp.%sgate_proj.weight / gradient", l, shared);
		expect(W, H, 0, "model.layers.%d.mlp.%sup_proj.weight / gradient", l, shared);
	}
	expect(T, H, 0, "layer %d / ffn / norm / gradient", l);
	expect(H, 0, 0, "model.layers.%d.post_attention_layernorm.weight / gradient", l);
	expect(T, H, 0, "layer %d / attention / output / gradient", l);
	if (c->use_bias)
		expect(H, 0, 0, "model.layers.%d.attention.dense.bias / gradient", l);
	expect(H, a, 0, "model.layers.%d.attention.dense.weight / gradient", l);
	expect(T, a, 0, "layer %d / attention / core / gradient", l);
	expect(T, q, 0, "layer %d / attention / rope / gradient", l);
	expect(T, q, 0, "layer %d / attention / qkv / gradient", l);
	if (c->use_qkv_bias)
		expect(q, 0, 0, "model.layers.%d.attention.query_key_value.bias / gradient", l);
	expect(q, H, 0, "model.layers.%d.attention.query_key_value.weight / gradient", l);
	expect(T, H, 0, "layer %d / attention / norm / gradient", l);
	expect(H, 0, 0, "model.layers.%d.input_layernorm.weight / gradient", l);
}

static void expect_everything(const struct model_config *c, int64_t T)
{
	const int64_t H = c->hidden_size, V = c->vocab_size;
	const int layers = c->num_hidden_layers, all = layers + c->num_nextn_predict_layers;
	listed = 0;
	expect(T, H, 0, "embedding");
	for (int l = 0; l < layers; l++)
		expect_layer(c, T, l);
	expect(T, H, 0, "norm");
	for (int l = layers; l < all; l++) {
		expect(T, H, 0, "layer %d / embedding", l);
		expect(T, H, 0, "layer %d / mtp / enorm", l);
		expect(T, H, 0, "layer %d / mtp / hnorm", l);
		expect(T, H, 0, "layer %d / mtp / eh_proj", l);
		expect_layer(c, T, l);
		expect(T, H, 0, "layer %d / norm", l);
	}
	expect(T, V, 0, "head / logits");
	expect(T, 0, 0, "head / loss");
	expect(1, 0, 0, "loss");
	for (int l = layers; l < all; l++) {
		expect(T, V, 0, "layer %d / head / logits", l);
		expect(T, 0, 0, "layer %d / head / loss", l);
	}
	if (all > layers)
		expect(1, 0, 0, "mtp loss");
	expect(1, 0, 0, "balance loss");
	expect(1, 0, 0, "z-loss");
	expect(T, V, 0, "head / logits / gradient");
	for (int l = layers; l < all; l++)
		expect(T, V, 0, "layer %d / head / logits / gradient", l);
	if (!c->tie_word_embeddings)
		expect(V, H, 0, "lm_head.weight / gradient");
	for (int l = all - 1; l >= layers; l--) {
		expect(T, H, 0, "layer %d / norm / gradient", l);
		expect(H, 0, 0, "model.layers.%d.final_layernorm.weight / gradient", l);
		expect_layer_backward(c, T, l);
		expect(T, H, 0, "layer %d / mtp / eh_proj / gradient", l);
		expect(H, 2 * H, 0, "model.layers.%d.eh_proj.weight / gradient", l);
		expect(T, H, 0, "layer %d / mtp / hnorm / gradient", l);
		expect(H, 0, 0, "model.layers.%d.hnorm.weight / gradient", l);
		expect(T, H, 0, "layer %d / mtp / enorm / gradient", l);
		expect(H, 0, 0, "model.layers.%d.enorm.weight / gradient", l);
		expect(T, H, 0, "layer %d / embedding / gradient", l);
	}
	expect(T, H, 0, "norm / gradient");
	expect(H, 0, 0, "model.norm.weight / gradient");
	for (int l = layers - 1; l >= 0; l--)
		expect_layer_backward(c, T, l);
	expect(T, H, 0, "embedding / gradient");
	expect(V, H, 0, "model.word_embeddings.weight / gradient");
	expect(1, 0, 0, "gradient norm");
}

static void check_list(const struct tensors *w, const struct trainer *t, const char *where)
{
	struct tensor *order = calloc(w->count, sizeof *order);
	const json_t *metadata = json_object_get(w->files->header, "__metadata__");
	memcpy(order, w->tensors, w->count * sizeof *order);
	qsort(order, w->count, sizeof *order, by_offset);
	expect_everything(&t->config.model, (int64_t)t->config.train.batch * t->config.data.seq_len);
	for (int i = 0; i < listed; i++) {
		assert_true(i < w->count);
		if (strcmp(order[i].name, list[i].name) || !has_shape(&order[i], list[i].shape, list[i].dims))
			fail_msg("%s: tensor %d is %s; expected %s with %d dimensions", where, i, order[i].name, list[i].name,
					list[i].dims);
		assert_int_equal(order[i].dtype, strstr(order[i].name, "top-k") ? I32 : REAL_DTYPE);
	}
	for (int i = 0; i < t->model.table.num_parameters; i++) {
		const struct parameter *p = &t->model.table.parameters[i];
		const char *const kinds[] = {"moment 1", "moment 2", "updated"};
		const int64_t shape[] = {p->rows, p->cols};
		for (int k = 0; k < 3; k++) {
			char name[MAX_NAME + 16];
			snprintf(name, sizeof name, "%s / %s", p->name, kinds[k]);
			const struct tensor *found = &order[listed + 3 * i + k];
			assert_true(found < order + w->count);
			assert_true(has_shape(found, shape, p->cols ? 2 : 1));
			assert_non_null(tensor_find(w, name));
		}
	}
	assert_int_equal(w->count, listed + 3 * t->model.table.num_parameters);
	assert_string_equal(json_string_value(json_object_get(metadata, "format")), "ling dump 1");
	assert_string_equal(json_string_value(json_object_get(metadata, "step")), "1");
	free(order);
}

/* ----------------------------------------------------------------------------------------------- the fixtures */

static void check_fixture(const struct tensors *dump, const struct tensors *expected, const struct trainer *t,
		const char *where)
{
	static const struct { const char *ours, *theirs; } values[] = {{"loss", "loss"}, {"balance loss", "balance_loss"},
		{"z-loss", "z_loss"}, {"gradient norm", "grad_norm"}};
	near(get(dump, "head / logits"), get(expected, "logits"), FIXTURE_TOLERANCE, where, "logits", -1);
	for (int i = 0; i < COUNT(values); i++)
		near(get(dump, "%s", values[i].ours), part(get(expected, "%s", values[i].theirs), 0, 1), FIXTURE_TOLERANCE,
				where, values[i].ours, -1);
	for (int i = 0; i < t->model.table.num_parameters; i++) {
		const char *name = t->model.table.parameters[i].name;
		near(get(dump, "%s / gradient", name), get(expected, "grad.%s", name), FIXTURE_TOLERANCE, where, name, -1);
	}
}

/* --------------------------------------------------------------------------------------------------- the chain */

struct chain {
	const struct tensors *dump, *weights; /* of a step, and before it */
	const struct config *c;
	const struct trainer *t;
	const char *where;
	const char *ending;          /* of the names of the weights: "", or that of a dump */
};

static struct matrix weight(const struct chain *x, int l, const char *name)
{
	return l < 0 ? get(x->weights, "%s%s", name, x->ending)
			: get(x->weights, "model.layers.%d.%s%s", l, name, x->ending);
}

static struct matrix weight_gradient(const struct chain *x, int l, const char *name)
{
	return l < 0 ? get(x->dump, "%s / gradient", name) : get(x->dump, "model.layers.%d.%s / gradient", l, name);
}

static struct matrix output(const struct chain *x, int l, const char *name)
{
	return l < 0 ? get(x->dump, "%s", name) : get(x->dump, "layer %d / %s", l, name);
}

static struct matrix gradient(const struct chain *x, int l, const char *name)
{
	return l < 0 ? get(x->dump, "%s / gradient", name) : get(x->dump, "layer %d / %s / gradient", l, name);
}

static void is(const struct chain *x, int l, const char *what, struct matrix found, struct matrix expected)
{
	near(found, expected, CHAIN_TOLERANCE, x->where, what, l);
}

/* The residual stream `in`, its RMSNorm `out` with weight w, and their gradients: dstream is what comes to the stream
 * from above, dbefore what goes on. */
static void check_norm(const struct chain *x, int l, const char *what, struct matrix in, struct matrix out,
		struct matrix dout, struct matrix dstream, struct matrix dbefore, const char *name)
{
	const struct matrix w = weight(x, l, name);
	const int64_t H = in.cols;
	struct matrix normed = make(in.rows, H), dw = make(H, 1), dx = make(in.rows, H);
	for (int64_t t = 0; t < in.rows; t++) {
		double square = 0, dot = 0;
		for (int64_t j = 0; j < H; j++)
			square += in.x[t * H + j] * in.x[t * H + j];
		const double rstd = 1 / sqrt(square / H + x->c->model.rms_norm_eps);
		for (int64_t j = 0; j < H; j++) {
			const double unit = in.x[t * H + j] * rstd, d = dout.x[t * H + j];
			normed.x[t * H + j] = unit * w.x[j];
			dw.x[j] += d * unit;
			dot += d * w.x[j] * unit / H;
		}
		for (int64_t j = 0; j < H; j++)
			dx.x[t * H + j] = rstd * (dout.x[t * H + j] * w.x[j] - in.x[t * H + j] * rstd * dot);
	}
	if (dstream.x)
		add(dx, dstream);
	is(x, l, what, normed, out);
	is(x, l, what, dw, weight_gradient(x, l, name));
	is(x, l, what, dx, dbefore);
}

/* y = x W^T + bias, dW = dy^T x, dbias = the sum of dy. Returns dy W. */
static struct matrix check_product(const struct chain *x, int l, const char *name, const char *bias, struct matrix in,
		struct matrix out, struct matrix dout)
{
	const struct matrix w = weight(x, l, name);
	struct matrix y = make(out.rows, out.cols), dw = make(w.rows, w.cols), dx = make(in.rows, in.cols);
	add_product(y, in, w);
	for (int64_t i = 0; bias && i < y.rows * y.cols; i++)
		y.x[i] += weight(x, l, bias).x[i % y.cols];
	is(x, l, name, y, out);
	add_weight_gradient(dw, dout, in);
	is(x, l, name, dw, weight_gradient(x, l, name));
	if (bias)
		is(x, l, bias, column_sums(dout), weight_gradient(x, l, bias));
	add_input_gradient(dx, dout, w);
	return dx;
}

/* The rows of one SwiGLU, of input x, gate_up and its gradient, with the gradient dout of its result, which is scaled
 * by scale [rows] (NULL: 1). Its result is added to y, what comes to its input to dx; dscale [rows]. */
static void check_swiglu(const struct chain *x, int l, const char *prefix, struct matrix in, struct matrix gate_up,
		struct matrix dgate_up, struct matrix dout, const double *scale, struct matrix y, struct matrix dx,
		double *dscale)
{
	char gate[64], up[64], down[64];
	snprintf(gate, sizeof gate, "%sgate_proj.weight", prefix);
	snprintf(up, sizeof up, "%sup_proj.weight", prefix);
	snprintf(down, sizeof down, "%sdown_proj.weight", prefix);
	const int64_t n = in.rows, W = gate_up.cols / 2;
	const struct matrix w = weight(x, l, down), dg = columns(dgate_up, 0, W), du = columns(dgate_up, W, 2 * W),
			g = columns(gate_up, 0, W), u = columns(gate_up, W, 2 * W);
	add(dx, check_product(x, l, gate, NULL, in, g, dg));
	add(dx, check_product(x, l, up, NULL, in, u, du));
	struct matrix act = make(n, W), dact = make(n, W), dw = make(w.rows, w.cols), expected = make(n, 2 * W);
	add_input_gradient(dact, dout, w);
	for (int64_t i = 0; i < n * W; i++) {
		const double s = 1 / (1 + exp(-g.x[i])), by = scale ? scale[i / W] : 1;
		act.x[i] = by * g.x[i] * s * u.x[i];
		expected.x[i / W * 2 * W + i % W] = by * dact.x[i] * u.x[i] * s * (1 + g.x[i] * (1 - s));
		expected.x[i / W * 2 * W + W + i % W] = by * dact.x[i] * g.x[i] * s;
		if (dscale)
			dscale[i / W] += dact.x[i] * g.x[i] * s * u.x[i];
	}
	is(x, l, prefix, expected, dgate_up);
	add_product(y, act, w);
	add_weight_gradient(dw, dout, act);
	is(x, l, down, dw, weight_gradient(x, l, down));
}

/* The gradient of the router's logits: of the weights of the chosen experts, of the balance loss, whose shares are
 * those of a micro-batch or of a sequence, and of the z-loss. No routing noise, no padding. */
static struct matrix router_gradient(const struct chain *x, struct matrix logits, struct matrix p, struct matrix index,
		struct matrix dweights)
{
	const struct config *c = x->c;
	const int64_t T = p.rows, E = p.cols, L = c->data.seq_len;
	const int k = c->model.num_experts_per_tok;
	const int64_t together = c->model.router.balance_loss_scope == SCOPE_MICRO_BATCH ? c->train.micro_batch * L : L;
	struct matrix ds = make(T, E), dp = make(T, E), share = make(T, E);
	for (int64_t i = 0; i < T * k; i++) {
		const int64_t first = i / k / together * together, end = first + together < T ? first + together : T;
		for (int64_t t = first; t < end; t++)
			share.x[t * E + (int64_t)index.x[i]] += 1.0 / (k * (end - first));
	}
	for (int64_t t = 0; t < T; t++) {
		double chosen = 1, dot = 0, sum = 0;
		if (c->model.norm_topk_prob && k > 1) {
			chosen = 0;
			for (int j = 0; j < k; j++)
				chosen += p.x[t * E + (int64_t)index.x[t * k + j]];
			for (int j = 0; j < k; j++)
				dot += dweights.x[t * k + j] * p.x[t * E + (int64_t)index.x[t * k + j]] / chosen;
		}
		for (int j = 0; j < k; j++)
			dp.x[t * E + (int64_t)index.x[t * k + j]] += (dweights.x[t * k + j] - dot) / chosen;
		double mean = 0;
		for (int64_t e = 0; e < E; e++) {
			dp.x[t * E + e] += c->model.router.balance_loss_coef * E * share.x[t * E + e] / T;
			mean += p.x[t * E + e] * dp.x[t * E + e];
			sum += exp(logits.x[t * E + e]);
		}
		for (int64_t e = 0; e < E; e++)
			ds.x[t * E + e] = p.x[t * E + e] * (dp.x[t * E + e] - mean +
					2 * c->model.router.z_loss_coef * log(sum) / T);
	}
	return ds;
}

/* Router and routed experts: their results are added to y, what comes to their input to dx. */
static void check_experts(const struct chain *x, int l, struct matrix in, struct matrix dout, struct matrix y,
		struct matrix dx)
{
	const struct model_config *c = &x->c->model;
	const int64_t T = in.rows, H = in.cols, I2 = 2 * c->moe_intermediate_size, E = c->num_experts;
	const int k = c->num_experts_per_tok;
	const struct matrix logits = output(x, l, "router / logits"), p = output(x, l, "router / softmax"),
			index = output(x, l, "router / top-k"), weights = output(x, l, "router / weights"),
			gate_up = output(x, l, "experts / gate_up"), dgate_up = gradient(x, l, "experts / gate_up"),
			down = output(x, l, "experts / down");
	add(dx, check_product(x, l, "mlp.gate.weight", NULL, in, logits, gradient(x, l, "router / logits")));

	/* softmax (of s itself, where there is no routing noise), the k largest, their weights */
	struct matrix softmax = make(T, E), expected = make(T, k), dweights = make(T, k);
	for (int64_t t = 0; t < T; t++) {
		double sum = 0, chosen = 0;
		for (int64_t e = 0; e < E; e++)
			sum += exp(logits.x[t * E + e]);
		for (int64_t e = 0; e < E; e++)
			softmax.x[t * E + e] = exp(logits.x[t * E + e]) / sum;
		for (int j = 0; j < k; j++) {
			const int64_t best = (int64_t)index.x[t * k + j];
			chosen += p.x[t * E + best];
			for (int64_t e = 0; e < E; e++) { /* not chosen before: not larger */
				bool before = false;
				for (int i = 0; i < j; i++)
					before = before || index.x[t * k + i] == e;
				assert_true(before || p.x[t * E + e] <= p.x[t * E + best]);
			}
		}
		for (int j = 0; j < k; j++)
			expected.x[t * k + j] = p.x[t * E + (int64_t)index.x[t * k + j]] /
					(c->norm_topk_prob && k > 1 ? chosen : 1);
	}
	if (!c->router.warmup_steps)
		is(x, l, "router / softmax", softmax, p);
	is(x, l, "router / weights", expected, weights);

	struct matrix results = make(T, k * H);
	for (int e = 0; e < E; e++) { /* the rows of each expert */
		char prefix[48];
		int64_t n = 0, *where = calloc(T * k + 1, sizeof *where);
		for (int64_t i = 0; i < T * k; i++)
			if ((int)index.x[i] == e)
				where[n++] = i;
		struct matrix in_e = make(n, H), gu = make(n, I2), dgu = make(n, I2), dy = make(n, H), y_e = make(n, H),
				dx_e = make(n, H), scale = make(n, 1), dscale = make(n, 1);
		for (int64_t r = 0; r < n; r++) {
			const int64_t i = where[r], t = i / k;
			memcpy(in_e.x + r * H, in.x + t * H, H * sizeof(double));
			memcpy(dy.x + r * H, dout.x + t * H, H * sizeof(double));
			memcpy(gu.x + r * I2, gate_up.x + i * I2, I2 * sizeof(double));
			memcpy(dgu.x + r * I2, dgate_up.x + i * I2, I2 * sizeof(double));
			scale.x[r] = weights.x[i];
		}
		snprintf(prefix, sizeof prefix, "mlp.experts.%d.", e);
		check_swiglu(x, l, prefix, in_e, gu, dgu, dy, scale.x, y_e, dx_e, dscale.x);
		for (int64_t r = 0; r < n; r++) {
			const int64_t i = where[r], t = i / k;
			memcpy(results.x + i * H, y_e.x + r * H, H * sizeof(double));
			dweights.x[i] = dscale.x[r];
			for (int64_t j = 0; j < H; j++) {
				y.x[t * H + j] += y_e.x[r * H + j];
				dx.x[t * H + j] += dx_e.x[r * H + j];
			}
		}
		free(where);
	}
	is(x, l, "experts / down", results, down);
	is(x, l, "router / weights / gradient", dweights, gradient(x, l, "router / weights"));
	if (!c->router.warmup_steps)
		is(x, l, "router / logits / gradient", router_gradient(x, logits, p, index, dweights),
				gradient(x, l, "router / logits"));
}

/* Rotates pairs (i, i + d / 2) of each query and key head by position * theta^(-2i/d); back: the other way. */
static struct matrix rotate(const struct chain *x, struct matrix qkv, bool back)
{
	const struct model_config *c = &x->c->model;
	const int64_t d = c->head_dim, L = x->c->data.seq_len;
	struct matrix y = make(qkv.rows, qkv.cols);
	memcpy(y.x, qkv.x, qkv.rows * qkv.cols * sizeof(double));
	for (int64_t t = 0; t < qkv.rows; t++)
		for (int64_t h = 0; h < c->num_attention_heads + c->num_key_value_heads; h++)
			for (int64_t i = 0; i < d / 2; i++) {
				const double angle = (back ? -1 : 1) * (double)(t % L) * pow(c->rope_theta, -2.0 * i / d);
				const double *in = qkv.x + t * qkv.cols + h * d + i;
				double *out = y.x + t * qkv.cols + h * d + i;
				out[0] = in[0] * cos(angle) - in[d / 2] * sin(angle);
				out[d / 2] = in[d / 2] * cos(angle) + in[0] * sin(angle);
			}
	return y;
}

/* Causal attention from the rotated qkv: *out, and *dqkv from dout. */
static void attention(const struct chain *x, struct matrix qkv, struct matrix dout, struct matrix *out,
		struct matrix *dqkv)
{
	const struct model_config *c = &x->c->model;
	const int64_t d = c->head_dim, L = x->c->data.seq_len, nh = c->num_attention_heads, nkv = c->num_key_value_heads;
	double *p = calloc(L, sizeof *p), *dp = calloc(L, sizeof *dp);
	*out = make(qkv.rows, nh * d);
	*dqkv = make(qkv.rows, qkv.cols);
	for (int64_t t = 0; t < qkv.rows; t++)
		for (int64_t h = 0; h < nh; h++) {
			const int64_t first = t - t % L, k_at = (nh + h / (nh / nkv)) * d, v_at = k_at + nkv * d;
			const double *q = qkv.x + t * qkv.cols + h * d, *dy = dout.x + t * nh * d + h * d;
			double *dq = dqkv->x + t * qkv.cols + h * d, *y = out->x + t * nh * d + h * d, sum = 0, dot = 0;
			for (int64_t s = first; s <= t; s++) {
				double score = 0;
				for (int64_t i = 0; i < d; i++)
					score += q[i] * qkv.x[s * qkv.cols + k_at + i] / sqrt(d);
				sum += p[s - first] = exp(score);
			}
			for (int64_t s = first; s <= t; s++) {
				p[s - first] /= sum;
				dp[s - first] = 0;
				for (int64_t i = 0; i < d; i++) {
					const double v = qkv.x[s * qkv.cols + v_at + i];
					y[i] += p[s - first] * v;
					dp[s - first] += dy[i] * v;
					dqkv->x[s * qkv.cols + v_at + i] += p[s - first] * dy[i];
				}
				dot += p[s - first] * dp[s - first];
			}
			for (int64_t s = first; s <= t; s++)
				for (int64_t i = 0; i < d; i++) {
					const double ds = p[s - first] * (dp[s - first] - dot) / sqrt(d);
					dq[i] += ds * qkv.x[s * qkv.cols + k_at + i];
					dqkv->x[s * qkv.cols + k_at + i] += ds * q[i];
				}
		}
	free(p);
	free(dp);
}

static void check_layer(const struct chain *x, int l)
{
	const struct model_config *c = &x->c->model;
	const bool dense = l < c->first_k_dense_replace;
	const bool mtp = l >= c->num_hidden_layers;
	const char *before = mtp ? "mtp / eh_proj" : l ? "output" : "embedding";
	const struct matrix input = output(x, l - !mtp, before), dinput = gradient(x, l - !mtp, before),
			norm = output(x, l, "attention / norm"), qkv = output(x, l, "attention / qkv"),
			rope = output(x, l, "attention / rope"), core = output(x, l, "attention / core"),
			residual = output(x, l, "attention / output"), ffn_norm = output(x, l, "ffn / norm"),
			out = output(x, l, "output"), dout = gradient(x, l, "output"),
			dresidual = gradient(x, l, "attention / output"), dffn_norm = gradient(x, l, "ffn / norm");
	struct matrix attended, dqkv, update = make(out.rows, out.cols);
	for (int64_t i = 0; i < out.rows * out.cols; i++)
		update.x[i] = residual.x[i] - input.x[i];

	check_norm(x, l, "attention / norm", input, norm, gradient(x, l, "attention / norm"), dresidual, dinput,
			"input_layernorm.weight");
	is(x, l, "attention / norm / gradient", check_product(x, l, "attention.query_key_value.weight", c->use_qkv_bias ?
			"attention.query_key_value.bias" : NULL, norm, qkv, gradient(x, l, "attention / qkv")),
			gradient(x, l, "attention / norm"));
	is(x, l, "attention / rope", rotate(x, qkv, false), rope);
	attention(x, rope, gradient(x, l, "attention / core"), &attended, &dqkv);
	is(x, l, "attention / core", attended, core);
	is(x, l, "attention / rope / gradient", dqkv, gradient(x, l, "attention / rope"));
	is(x, l, "attention / qkv / gradient", rotate(x, dqkv, true), gradient(x, l, "attention / qkv"));
	is(x, l, "attention / core / gradient", check_product(x, l, "attention.dense.weight", c->use_bias ?
			"attention.dense.bias" : NULL, core, update, dresidual), gradient(x, l, "attention / core"));

	struct matrix y = make(out.rows, out.cols), dx = make(out.rows, out.cols);
	check_norm(x, l, "ffn / norm", residual, ffn_norm, dffn_norm, dout, dresidual, "post_attention_layernorm.weight");
	add(y, residual);
	if (!dense)
		check_experts(x, l, ffn_norm, dout, y, dx);
	if (dense || c->num_shared_experts) {
		const char *name = dense ? "dense / gate_up" : "shared / gate_up";
		check_swiglu(x, l, dense ? "mlp." : "mlp.shared_experts.", ffn_norm, output(x, l, name), gradient(x, l, name),
				dout, NULL, y, dx, NULL);
	}
	is(x, l, "output", y, out);
	is(x, l, "ffn / norm / gradient", dx, dffn_norm);
}

/* The head and the loss of a depth of prediction, whose layer is l. What comes to the head is added to dhead; returns
 * what comes to the final norm's output from it. scale [H]: of NormHead. */
static struct matrix check_head(const struct chain *x, int depth, int l, struct matrix head, struct matrix dhead,
		const double *scale, double *mean)
{
	const struct config *c = x->c;
	const int64_t H = c->model.hidden_size, V = c->model.vocab_size, L = c->data.seq_len;
	const struct matrix norm = output(x, l, "norm"), logits = output(x, l, "head / logits"),
			dlogits = gradient(x, l, "head / logits");
	const int64_t T = norm.rows;
	struct matrix in = make(T, H), y = make(T, V), din = make(T, H), softmax = make(T, V), loss = make(T, 1);
	int *target = calloc(T, sizeof *target);
	int64_t targets = 0;
	for (int64_t i = 0; i < T * H; i++)
		in.x[i] = norm.x[i] * scale[i % H];
	add_product(y, in, head);
	is(x, l, "head / logits", y, logits);
	for (int64_t t = 0; t < T; t++) {
		target[t] = t % L + depth < L ? x->t->target[t + depth] : -1;
		targets += target[t] >= 0;
	}
	const double by = (depth ? c->model.mtp_loss_scaling_factor : 1) / targets;
	for (int64_t t = 0; t < T; t++) {
		double sum = 0;
		for (int64_t v = 0; v < V; v++)
			sum += exp(logits.x[t * V + v]);
		for (int64_t v = 0; target[t] >= 0 && v < V; v++)
			softmax.x[t * V + v] = (exp(logits.x[t * V + v]) / sum - (v == target[t])) * by;
		loss.x[t] = target[t] < 0 ? 0 : log(sum) - logits.x[t * V + target[t]];
		*mean += loss.x[t] / targets;
	}
	is(x, l, "head / loss", loss, output(x, l, "head / loss"));
	is(x, l, "head / logits / gradient", softmax, dlogits);
	add_weight_gradient(dhead, dlogits, in);
	add_input_gradient(din, dlogits, head);
	for (int64_t i = 0; i < T * H; i++)
		din.x[i] *= scale[i % H];
	free(target);
	return din;
}

/* The embedding of the tokens that a depth sees; its gradient is added to dembedding. */
static void check_embedding(const struct chain *x, int depth, int l, struct matrix embedding, struct matrix dembedding)
{
	const struct matrix embedded = output(x, l, "embedding"), dembedded = gradient(x, l, "embedding");
	const int64_t H = embedding.cols, L = x->c->data.seq_len;
	struct matrix looked_up = make(embedded.rows, H);
	for (int64_t i = 0; i < embedded.rows * H; i++) {
		const int64_t t = i / H, token = t % L + depth < L ? x->t->input[t + depth] : 0, at = token * H + i % H;
		looked_up.x[i] = embedding.x[at];
		dembedding.x[at] += dembedded.x[i];
	}
	is(x, l, "embedding", looked_up, embedded);
}

/* The input of MTP layer l, and its final norm. dhead: what comes to the hidden state of the depth before, which is of
 * layer `before`, from its head. */
static void check_mtp(const struct chain *x, int l, int before, struct matrix dhead)
{
	const struct matrix e = output(x, l, "mtp / enorm"), h = output(x, l, "mtp / hnorm"),
			de = gradient(x, l, "mtp / enorm"), dh = gradient(x, l, "mtp / hnorm");
	const int64_t H = e.cols;
	struct matrix joined = make(e.rows, 2 * H);
	for (int64_t i = 0; i < e.rows * H; i++) {
		joined.x[i / H * 2 * H + i % H] = e.x[i];
		joined.x[i / H * 2 * H + H + i % H] = h.x[i];
	}
	check_norm(x, l, "mtp / enorm", output(x, l, "embedding"), e, de, (struct matrix){0}, gradient(x, l, "embedding"),
			"enorm.weight");
	check_norm(x, l, "mtp / hnorm", output(x, before, "norm"), h, dh, dhead, gradient(x, before, "norm"),
			"hnorm.weight");
	const struct matrix d = check_product(x, l, "eh_proj.weight", NULL, joined, output(x, l, "mtp / eh_proj"),
			gradient(x, l, "mtp / eh_proj"));
	is(x, l, "mtp / enorm / gradient", columns(d, 0, H), de);
	is(x, l, "mtp / hnorm / gradient", columns(d, H, 2 * H), dh);
	check_norm(x, l, "norm", output(x, l, "output"), output(x, l, "norm"), gradient(x, l, "norm"), (struct matrix){0},
			gradient(x, l, "output"), "final_layernorm.weight");
}

static void check_chain(const struct chain *x)
{
	const struct model_config *c = &x->c->model;
	const int layers = c->num_hidden_layers, mtp = c->num_nextn_predict_layers;
	const int64_t H = c->hidden_size, V = c->vocab_size;
	const struct matrix embedding = weight(x, -1, "model.word_embeddings.weight"),
			head = c->tie_word_embeddings ? embedding : weight(x, -1, "lm_head.weight");
	struct matrix dhead = make(V, H), scale = make(1, H), dembedding = make(V, H), mean = make(2, 1), dnorm;
	for (int l = 0; l < layers + mtp; l++)
		check_layer(x, l);
	check_norm(x, -1, "norm", output(x, layers - 1, "output"), output(x, -1, "norm"), gradient(x, -1, "norm"),
			(struct matrix){0}, gradient(x, layers - 1, "output"), "model.norm.weight");
	for (int64_t j = 0; j < H; j++) {
		double square = 0;
		for (int64_t v = 0; v < V; v++)
			square += head.x[v * H + j] * head.x[v * H + j];
		scale.x[j] = c->norm_head ? 1 / (sqrt(square) + 1e-7) : 1;
	}
	for (int depth = 0, l = -1; depth <= mtp; l = layers + depth++) {
		if (depth)
			check_mtp(x, l, depth > 1 ? l - 1 : -1, dnorm);
		dnorm = check_head(x, depth, l, head, dhead, scale.x, &mean.x[depth > 0]);
		check_embedding(x, depth, l, embedding, dembedding);
		if (depth == mtp)
			is(x, l, "norm / gradient", dnorm, gradient(x, l, "norm"));
	}
	is(x, -1, "loss", part(mean, 0, 1), output(x, -1, "loss"));
	if (mtp) {
		mean.x[1] /= mtp;
		is(x, -1, "mtp loss", part(mean, 1, 2), output(x, -1, "mtp loss"));
	}
	if (c->tie_word_embeddings)
		add(dembedding, dhead);
	else
		is(x, -1, "lm_head", dhead, weight_gradient(x, -1, "lm_head.weight"));
	is(x, -1, "word_embeddings", dembedding, weight_gradient(x, -1, "model.word_embeddings.weight"));
}

/* The gradient norm, the first step of AdamW, and its moments, from the dumped gradients. */
static void check_update(const struct chain *x)
{
	const struct config *c = x->c;
	const struct parameter_table *table = &x->t->model.table;
	double square = 0;
	for (int i = 0; i < table->num_parameters; i++) {
		const struct matrix g = get(x->dump, "%s / gradient", table->parameters[i].name);
		for (int64_t j = 0; j < g.rows * g.cols; j++)
			square += g.x[j] * g.x[j];
	}
	struct matrix norm = make(1, 1);
	norm.x[0] = sqrt(square);
	is(x, -1, "gradient norm", norm, get(x->dump, "gradient norm"));
	const double clip = norm.x[0] > c->train.grad_clip && c->train.grad_clip ? c->train.grad_clip / norm.x[0] : 1;
	const double lr = learning_rate(c, 1, x->t->steps, 0);
	for (int i = 0; i < table->num_parameters; i++) {
		const struct parameter *p = &table->parameters[i];
		struct matrix g = get(x->dump, "%s / gradient", p->name), w = get(x->weights, "%s", p->name),
				m = make(w.rows, w.cols), v = make(w.rows, w.cols);
		for (int64_t j = 0; j < w.rows * w.cols; j++) {
			m.x[j] = (1 - c->optimizer.beta1) * g.x[j] * clip;
			v.x[j] = (1 - c->optimizer.beta2) * g.x[j] * clip * g.x[j] * clip;
			w.x[j] -= lr * (p->cols ? c->optimizer.weight_decay : 0) * w.x[j] + lr * g.x[j] * clip /
					(fabs(g.x[j] * clip) + c->optimizer.eps);
		}
		is(x, -1, p->name, m, get(x->dump, "%s / moment 1", p->name));
		is(x, -1, p->name, v, get(x->dump, "%s / moment 2", p->name));
		is(x, -1, p->name, w, get(x->dump, "%s / updated", p->name));
	}
}

/* ------------------------------------------------------------------------------------------------------- tests */

static void test_step(void **state)
{
	const char *name = *state;
	struct config c;
	struct trainer t;
	char path[256];
	make_scratch(NULL);
	struct tensors *expected = begin(&t, &c, name, dump_option("[1, 5]"), "");
	take_step(&t, expected, 1);
	snprintf(path, sizeof path, FIXTURES "%s/weights.safetensors", name);
	struct tensors *weights = tensors_open(path, "model"), *dump = open_dump(at("step-0000001.safetensors"));
	const struct chain x = {dump, weights, &c, &t, name, ""};
	check_list(dump, &t, name);
	check_fixture(dump, expected, &t, name);
	check_chain(&x);
	check_update(&x);
	free_matrices();
	tensors_close(dump);
	tensors_close(weights);
	for (int step = 2; step <= 5; step++)
		take_step(&t, expected, step);
	dump = open_dump(at("step-0000005.safetensors"));
	for (int i = 0; i < t.model.table.num_parameters; i++) {
		const char *parameter = t.model.table.parameters[i].name;
		near(get(dump, "%s / updated", parameter), get(expected, "after.%s", parameter), FIXTURE_TOLERANCE, name,
				parameter, -1);
	}
	assert_false(exists(at("step-0000002.safetensors")));
	free_matrices();
	tensors_close(dump);
	tensors_close(expected);
	trainer_free(&t);
	drop_scratch(NULL);
}

/* A model with two MTP layers: the list of the first step, and the chain of the second one, whose weights are those
 * that the first one has left. */
static void test_mtp(void **state)
{
	(void)state;
	static const char *const names[] = {"dense_first", "tied_plain"};
	for (int i = 0; i < COUNT(names); i++) {
		struct config c;
		struct trainer t;
		char path[256], option[PATH_LEN + 64], *options[] = {option};
		make_scratch(NULL);
		snprintf(path, sizeof path, FIXTURES "%s/case.yaml", names[i]);
		snprintf(option, sizeof option, "train.dump=%s", dump_option("[1, 2]"));
		assert_done(config_load(&c, path, 1, options, false));
		c.model.num_nextn_predict_layers = 2;
		c.model.mtp_loss_scaling_factor = 0.3;
		assert_done(trainer_allocate(&t, &c));
		model_randomize(&t.model, 1);
		assert_done(dump_open(&t.dump, &c, &t.model, 0));
		snprintf(path, sizeof path, FIXTURES "%s/expected.safetensors", names[i]);
		struct tensors *expected = tensors_open(path, "model");
		take_step(&t, expected, 1);
		take_step(&t, expected, 2);
		struct tensors *first = open_dump(at("step-0000001.safetensors")),
				*second = open_dump(at("step-0000002.safetensors"));
		const struct chain x = {second, first, &c, &t, names[i], " / updated"};
		check_list(first, &t, names[i]);
		check_chain(&x);
		free_matrices();
		tensors_close(first);
		tensors_close(second);
		tensors_close(expected);
		trainer_free(&t);
		drop_scratch(NULL);
	}
}

/* A dump changes no bit of what is trained, and recomputing changes no bit of a dump. */
static void test_bits(void **state)
{
	(void)state;
	static const char *const modes[] = {"train.recompute=none", "train.recompute=attention", "train.recompute=layer"};
	struct config c;
	struct trainer with, without;
	uint8_t *first = NULL;
	size_t first_size = 0, size;
	for (int i = 0; i < COUNT(modes); i++) {
		struct tensors *expected = begin(&with, &c, "routing_warmup", dump_option("[1, 2, 3]"), modes[i]);
		tensors_close(begin(&without, &c, "routing_warmup", "", modes[i]));
		assert_null(without.dump);
		for (int step = 1; step <= 4; step++) {
			take_step(&with, expected, step);
			take_step(&without, expected, step);
		}
		const struct model *a = &with.model, *b = &without.model;
		assert_memory_equal(a->params.memory, b->params.memory, a->table.num_elements * sizeof(real));
		assert_memory_equal(a->exp_avg, b->exp_avg, a->table.num_state * sizeof(real));
		assert_memory_equal(a->exp_avg_sq, b->exp_avg_sq, a->table.num_state * sizeof(real));
		uint8_t *bytes = get_file(at("step-0000003.safetensors"), &size);
		if (i) {
			assert_int_equal(size, first_size);
			assert_memory_equal(bytes, first, size);
			free(bytes);
		} else
			first = bytes, first_size = size;
		assert_int_equal(unlink(at("step-0000001.safetensors")) | unlink(at("step-0000002.safetensors")) |
				unlink(at("step-0000003.safetensors")), 0);
		tensors_close(expected);
		trainer_free(&with);
		trainer_free(&without);
	}
	free(first);
}

/* A step that is not finite has a dump, with its NaN and without an update. */
static void test_not_finite(void **state)
{
	(void)state;
	struct config c;
	struct trainer t;
	struct metrics m;
	struct tensors *expected = begin(&t, &c, "base", dump_option("1"), "spikes.action=off");
	const int64_t n = (int64_t)c.train.batch * c.data.seq_len;
	assert_done(tensors_read_int(expected, "input.1", n, t.input));
	assert_done(tensors_read_int(expected, "target.1", n, t.target));
	t.model.params.layer[1].ffn_norm[3] = NAN;
	assert_int_equal(trainer_step(&t, c.train.batch, &m), STEP_GO_BACK);
	expect_error("not finite");
	struct tensors *dump = open_dump(at("step-0000001.safetensors"));
	const struct matrix before = get(dump, "layer 1 / attention / output"), after = get(dump, "layer 1 / ffn / norm");
	for (int64_t i = 0; i < n * 16; i++) {
		assert_true(isfinite(before.x[i]));
		assert_int_equal(isnan(after.x[i]), i % 16 == 3);
	}
	assert_true(isnan(get(dump, "loss").x[0]) && isnan(get(dump, "gradient norm").x[0]));
	for (int i = 0; i < dump->count; i++)
		assert_true(!strstr(dump->tensors[i].name, "moment") && !strstr(dump->tensors[i].name, "updated"));
	free_matrices();
	tensors_close(dump);
	tensors_close(expected);
	trainer_free(&t);
}

/* A file of the step is there: of this run, it is replaced; of another, or of another program, refused. */
static void test_other_files(void **state)
{
	(void)state;
	char output[PATH_LEN + 32];
	struct config c;
	struct trainer t;
	struct dump *d;
	snprintf(output, sizeof output, "train.output_dir=%s", at("run"));
	assert_int_equal(mkdir(at("run"), 0777) | mkdir(at("other"), 0777), 0);
	struct tensors *expected = begin(&t, &c, "base", dump_option("[1, 2]"), output);
	take_step(&t, expected, 1);
	assert_true(exists(at("step-0000001.safetensors")));
	assert_done(dump_open(&d, &c, &t.model, 0));
	dump_close(d);
	snprintf(c.train.output_dir, sizeof c.train.output_dir, "%s", at("other"));
	assert_int_equal(dump_open(&d, &c, &t.model, 0), -1);
	expect_error("step-0000001.safetensors is there already|train.dump.dir");
	assert_null(d);
	assert_done(dump_open(&d, &c, &t.model, 1)); /* that step is done */
	dump_close(d);
	assert_done(dump_open(&d, &c, &t.model, 2));
	assert_null(d);
	put_string(at("step-0000002.safetensors"), "text");
	assert_int_equal(dump_open(&d, &c, &t.model, 1), -1);
	expect_error("step-0000002.safetensors is there already");
	tensors_close(expected);
	trainer_free(&t);
}

/* A disk that is full costs the dump, and not the step; nothing is left. */
static void test_full_disk(void **state)
{
	(void)state;
	struct config c;
	struct trainer t;
	struct tensors *expected = begin(&t, &c, "base", dump_option("1"), "");
	struct rlimit before;
	assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
	limit_files(10000);
	take_step(&t, expected, 1);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
	assert_false(exists(at("step-0000001.safetensors")));
	assert_false(holds_temporary(scratch));
	assert_false(exists(at("step-0000001.safetensors.lock")));
	tensors_close(expected);
	trainer_free(&t);
}

static void test_memory(void **state)
{
	(void)state;
	struct config c;
	struct trainer t;
	struct dump *d;
	struct tensors *expected = begin(&t, &c, "base", "", "");
	char option[PATH_LEN + 64], *options[] = {option};
	snprintf(option, sizeof option, "train.dump=%s", dump_option("3"));
	assert_done(config_load(&c, FIXTURES "base/case.yaml", 1, options, false));
	assert_done(dump_open(&d, &c, &t.model, 0));
	dump_close(d);
	c.train.batch = 10000000; /* times 8 tokens of some 8 kB */
	assert_int_equal(dump_open(&d, &c, &t.model, 0), -1);
	expect_error("train.dump takes|GB for a batch of 10000000 x 8 tokens beside");
	tensors_close(expected);
	trainer_free(&t);
}

/* train.perturb: every weight moves by one unit in the last place, half of them up. */
static void test_perturb(void **state)
{
	(void)state;
	struct config c;
	struct trainer t;
	struct tensors *expected = begin(&t, &c, "biases", "", "");
	struct model *m = &t.model;
	const int64_t n = m->table.num_elements;
	real *before = calloc(n, sizeof *before), *first = calloc(n, sizeof *first);
	memcpy(before, m->params.memory, n * sizeof *before);
	int64_t up = 0, alike = 0;
	model_perturb(m, 7);
	for (int64_t i = 0; i < n; i++) {
		const real x = before[i], y = m->params.memory[i], higher = sizeof x == 8 ? (real)nextafter(x, INFINITY)
				: (real)nextafterf((float)x, INFINITY), lower = sizeof x == 8 ? (real)nextafter(x, -INFINITY)
				: (real)nextafterf((float)x, -INFINITY);
		assert_true(y == higher || y == lower);
		up += y == higher;
	}
	assert_true(up > 0.45 * n && up < 0.55 * n);
	memcpy(first, m->params.memory, n * sizeof *first);
	memcpy(m->params.memory, before, n * sizeof *before);
	model_perturb(m, 7);
	assert_memory_equal(first, m->params.memory, n * sizeof *first);
	memcpy(m->params.memory, before, n * sizeof *before);
	model_perturb(m, 8);
	for (int64_t i = 0; i < n; i++)
		alike += first[i] == m->params.memory[i];
	assert_true(alike > 0.45 * n && alike < 0.55 * n);
	free(before);
	free(first);
	tensors_close(expected);
	trainer_free(&t);
}

int main(void)
{
	struct CMUnitTest tests[COUNT(cases) + 7] = {0};
	char names[COUNT(cases)][64];
	int n = 0;
	for (; n < COUNT(cases); n++) {
		snprintf(names[n], sizeof names[n], "test_step %s", cases[n]);
		tests[n] = (struct CMUnitTest){.name = names[n], .test_func = test_step, .initial_state = (void *)cases[n]};
	}
	tests[n++] = (struct CMUnitTest)cmocka_unit_test(test_mtp);
	tests[n++] = (struct CMUnitTest)TEST(test_bits);
	tests[n++] = (struct CMUnitTest)TEST(test_not_finite);
	tests[n++] = (struct CMUnitTest)TEST(test_other_files);
	tests[n++] = (struct CMUnitTest)TEST(test_full_disk);
	tests[n++] = (struct CMUnitTest)TEST(test_memory);
	tests[n++] = (struct CMUnitTest)TEST(test_perturb);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
