/*
 * commands/self_check.c - each kernel beside a reference, the products beside plain loops, and how fast the machine
 * is.
 *
 * The reference of a kernel, reference_x, is plain loops in double, straight from the formula. run_x calls the kernel
 * forward and backward. check_forward compares the results. check_backward compares the kernel's gradient with central
 * differences of the reference along random directions: every element of the gradient takes part, and no rounding of
 * the kernel is in the differences.
 */
#define _GNU_SOURCE
#include "commands/self_check.h"

#include "files/base.h"
#include "kernels.h"

#include <math.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* The larger of two errors. NaN counts as the largest. */
static double larger_error(double a, double b)
{
	return a > b || isnan(a) ? a : b;
}

/* ============================================================================================================
 * Matrix products
 * ========================================================================================================== */

double gemm_error(bool openblas)
{
	enum { M = 67, N = 101, K = 389 }; /* the kernels' main loops, and their edges */
	/* whether A and B are transposed: as in forward, backward of the input, backward of the weight */
	static const bool transposed[3][2] = {{false, true}, {false, false}, {true, false}};
	real a[M * K], b[N * K], c[M * N];
	double worst = 0;
	random_normal(a, M * K, &(struct random_stream){.seed = 1}, 0);
	random_normal(b, N * K, &(struct random_stream){.seed = 2}, 0);
	for (int f = 0; f < 3; f++) {
		const bool ta = transposed[f][0], tb = transposed[f][1];
		double difference = 0, norm = 0;
		single_gemm(c, a, ta, b, tb, M, N, K, openblas ? 1 : 0);
		for (int i = 0; i < M; i++)
			for (int j = 0; j < N; j++) {
				double sum = 0;
				for (int k = 0; k < K; k++)
					sum += (double)a[ta ? k * M + i : i * K + k] * b[tb ? j * K + k : k * N + j];
				difference += (c[i * N + j] - sum) * (c[i * N + j] - sum);
				norm += sum * sum;
			}
		worst = larger_error(worst, sqrt(difference / norm));
	}
	return worst;
}

/* ============================================================================================================
 * Each operation: its reference, and a call of its kernel
 *
 * Letters and array names are those of kernels.h.
 * ========================================================================================================== */

enum { MAX_IN = 4, MAX_SIZES = 10 };

/* The arguments of one call of a kernel, forward and backward, for the loss sum(out * dout). The shapes depend on the
 * operation. */
struct call {
	const int64_t *s;            /* sizes: named above each reference */
	const real *in[MAX_IN], *dout;
	real *out, *gradient[MAX_IN]; /* gradient[i] has the shape of in[i] */
	bool accumulate;             /* add to out and gradients where the kernel can */
	real *scratch;
};

/* s = T, K, N; in = x, w, bias */
static void reference_matmul(double *y, double *const in[], const int64_t *s)
{
	for (int64_t t = 0; t < s[0]; t++)
		for (int64_t n = 0; n < s[2]; n++) {
			double sum = in[2][n];
			for (int64_t k = 0; k < s[1]; k++)
				sum += in[0][t * s[1] + k] * in[1][n * s[1] + k];
			y[t * s[2] + n] = sum;
		}
}

static void run_matmul(const struct call *x)
{
	const int64_t T = x->s[0], K = x->s[1], N = x->s[2];
	matmul_forward(x->out, x->in[0], &(struct weight){.data = x->in[1]}, x->in[2], T, K, N, x->accumulate);
	matmul_backward_input(x->gradient[0], x->dout, x->in[1], T, K, N, x->accumulate);
	matmul_backward_weight(x->gradient[1], x->dout, x->in[0], T, K, N, x->accumulate);
	bias_backward(x->gradient[2], x->dout, T, N, x->accumulate, x->scratch);
}

/* s = K, N, G, then G + 1 offsets; in = x, w */
static void reference_grouped_matmul(double *y, double *const in[], const int64_t *s)
{
	const int64_t K = s[0], N = s[1], *offset = s + 3;
	for (int64_t g = 0; g < s[2]; g++)
		for (int64_t r = offset[g]; r < offset[g + 1]; r++)
			for (int64_t n = 0; n < N; n++) {
				y[r * N + n] = 0;
				for (int64_t k = 0; k < K; k++)
					y[r * N + n] += in[0][r * K + k] * in[1][(g * N + n) * K + k];
			}
}

static void run_grouped_matmul(const struct call *x)
{
	const int64_t K = x->s[0], N = x->s[1], G = x->s[2], *offset = x->s + 3;
	struct weight w[MAX_SIZES] = {0};
	stack_weights(w, x->in[1], G, N * K);
	grouped_matmul_forward(x->out, x->in[0], NULL, w, offset, G, K, N, x->accumulate);
	grouped_matmul_backward_input(x->gradient[0], x->dout, NULL, x->in[1], offset, G, K, N, x->accumulate);
	grouped_matmul_backward_weight(x->gradient[1], x->dout, NULL, x->in[0], NULL, offset, G, K, N, x->accumulate);
}

enum { EMBEDDED = 7, EMBEDDING_V = 8 };
static const int32_t embedding_token[EMBEDDED] = {3, 0, 3, 3, 6, 1, 0};

/* s = H; in = w */
static void reference_embedding(double *out, double *const in[], const int64_t *s)
{
	for (int64_t t = 0; t < EMBEDDED; t++)
		for (int64_t j = 0; j < s[0]; j++)
			out[t * s[0] + j] = in[0][embedding_token[t] * s[0] + j];
}

static void run_embedding(const struct call *x)
{
	embedding_forward(x->out, embedding_token, &(struct weight){.data = x->in[0]}, 0, EMBEDDED, x->s[0], EMBEDDING_V);
	embedding_backward(x->gradient[0], embedding_token, x->dout, 0, EMBEDDED, x->s[0], EMBEDDING_V, x->accumulate);
}

static const double check_eps = 1e-2; /* large, so that a misplaced eps shows */

/* s = T, H; in = x, w */
static void reference_rmsnorm(double *out, double *const in[], const int64_t *s)
{
	for (int64_t t = 0; t < s[0]; t++) {
		const double *x = in[0] + t * s[1];
		double sum = 0;
		for (int64_t j = 0; j < s[1]; j++)
			sum += x[j] * x[j];
		for (int64_t j = 0; j < s[1]; j++)
			out[t * s[1] + j] = in[1][j] * x[j] / sqrt(sum / s[1] + check_eps);
	}
}

static void run_rmsnorm(const struct call *x)
{
	const int64_t T = x->s[0], H = x->s[1];
	real *rstd = x->scratch + row_sum_scratch(H);
	if (!x->accumulate)
		memset(x->gradient[0], 0, T * H * sizeof(real)); /* rmsnorm_backward always adds to dx */
	rmsnorm_forward(x->out, rstd, x->in[0], x->in[1], T, H, check_eps);
	rmsnorm_backward(x->gradient[0], x->gradient[1], x->dout, x->in[0], x->in[1], rstd, T, H, x->accumulate,
			x->scratch);
}

static const double check_theta = 100;

/* The position in its sequence of L where the document of token t begins. The documents of sequence b are b positions
 * further on than those of sequence 0. Without documents (packed false): 0. */
static int32_t check_document(int64_t t, int64_t L, bool packed)
{
	static const int64_t beginnings[] = {0, 1, 3, 50, 64, 70, 255, 256, 257, 400, 900, INT64_MAX};
	const int64_t b = t / L, position = t % L;
	int n = 0;
	while (packed && beginnings[n + 1] <= position - b)
		n++;
	return beginnings[n] ? beginnings[n] + b : 0;
}

/* document [B L] of all tokens; returns it, or NULL without documents. */
static const int32_t *check_documents(int32_t *document, int64_t B, int64_t L, bool packed)
{
	for (int64_t t = 0; t < B * L; t++)
		document[t] = check_document(t, L, packed);
	return packed ? document : NULL;
}

/* s = T, nh, nkv, d; in = qkv, w */
static void reference_qk_norm(double *out, double *const in[], const int64_t *s)
{
	const int64_t heads = s[1] + 2 * s[2], d = s[3];
	for (int64_t i = 0; i < s[0] * heads; i++) {
		const int64_t head = i % heads, kind = head < s[1] ? 0 : 1;
		const double *x = in[0] + i * d;
		double sum = 0;
		for (int64_t j = 0; j < d; j++)
			sum += x[j] * x[j];
		for (int64_t j = 0; j < d; j++) /* the value heads stay */
			out[i * d + j] = head < s[1] + s[2] ? in[1][kind * d + j] * x[j] / sqrt(sum / d + check_eps) : x[j];
	}
}

static void run_qk_norm(const struct call *x)
{
	const int64_t T = x->s[0], nh = x->s[1], nkv = x->s[2], d = x->s[3], n = T * (nh + 2 * nkv) * d;
	real *heads = x->scratch + row_sum_scratch(2 * d), *rstd = heads + T * (nh + nkv) * d;
	memcpy(x->out, x->in[0], n * sizeof(real));
	qk_norm_forward(x->out, heads, rstd, x->in[1], T, nh, nkv, d, check_eps);
	memcpy(x->gradient[0], x->dout, n * sizeof(real));
	qk_norm_backward(x->gradient[0], x->gradient[1], heads, rstd, x->in[1], T, nh, nkv, d, x->accumulate, x->scratch);
}

/* s = B, L, nh, nkv, d, packed (whether there are documents), rot; in = qkv */
static void reference_rope(double *out, double *const in[], const int64_t *s)
{
	const int64_t L = s[1], T = s[0] * L, heads = s[2] + s[3], d = s[4], rot = s[6], width = (heads + s[3]) * d;
	memcpy(out, in[0], T * width * sizeof *out);
	for (int64_t t = 0; t < T; t++)
		for (int64_t head = 0; head < heads; head++)
			for (int64_t i = 0; i < rot / 2; i++) {
				const double angle = (t % L - check_document(t, L, s[5])) * pow(check_theta, -2.0 * i / rot);
				double *lo = out + t * width + head * d + i, *hi = lo + rot / 2, a = *lo, b = *hi;
				*lo = a * cos(angle) - b * sin(angle);
				*hi = a * sin(angle) + b * cos(angle);
			}
}

static void run_rope(const struct call *x)
{
	const int64_t B = x->s[0], L = x->s[1], T = B * L, nh = x->s[2], nkv = x->s[3], d = x->s[4], rot = x->s[6],
			n = T * (nh + 2 * nkv) * d;
	int32_t memory[T];
	const int32_t *document = check_documents(memory, B, L, x->s[5]);
	double frequency[rot / 2];
	for (int64_t i = 0; i < rot / 2; i++)
		frequency[i] = pow(check_theta, -2.0 * i / rot);
	rope_table(x->scratch, L, rot, frequency, 1);
	memcpy(x->out, x->in[0], n * sizeof(real));
	rope_forward(x->out, x->scratch, document, T, L, nh, nkv, d, rot);
	memcpy(x->gradient[0], x->dout, n * sizeof(real));
	rope_backward(x->gradient[0], x->scratch, document, T, L, nh, nkv, d, rot);
}

/* s = B, L, nh, nkv, d, packed (whether there are documents); in = qkv */
static void reference_attention(double *out, double *const in[], const int64_t *s)
{
	const int64_t L = s[1], nh = s[2], nkv = s[3], d = s[4], width = (nh + 2 * nkv) * d;
	for (int64_t t = 0; t < s[0] * L; t++)
		for (int64_t head = 0; head < nh; head++) {
			const double *q = in[0] + t * width + head * d;
			double sum = 0, *o = out + (t * nh + head) * d;
			memset(o, 0, d * sizeof *o);
			for (int64_t seen = t - t % L + check_document(t, L, s[5]); seen <= t; seen++) {
				const double *k = in[0] + seen * width + (nh + head * nkv / nh) * d, *v = k + nkv * d;
				double score = 0;
				for (int64_t i = 0; i < d; i++)
					score += q[i] * k[i];
				const double p = exp(score / sqrt(d));
				sum += p;
				for (int64_t i = 0; i < d; i++)
					o[i] += p * v[i];
			}
			for (int64_t i = 0; i < d; i++)
				o[i] /= sum;
		}
}

enum { ATTENTION_SHARED = 1 << 19 }; /* elements of attention_backward's shared_scratch */
static void run_attention(const struct call *x)
{
	const int64_t B = x->s[0], L = x->s[1], nh = x->s[2], nkv = x->s[3], d = x->s[4];
	real *lse = x->scratch + attention_scratch(d), *shared = lse + B * L * nh;
	int32_t memory[B * L];
	const int32_t *document = check_documents(memory, B, L, x->s[5]);
	attention_forward(x->out, lse, x->in[0], document, B, L, nh, nkv, d, x->scratch);
	attention_backward(x->gradient[0], x->dout, x->out, lse, x->in[0], document, B, L, nh, nkv, d, x->scratch, shared,
			ATTENTION_SHARED);
}

static double reference_silu(double x)
{
	return x / (1 + exp(-x));
}

/* s = rows, I, weighted (whether there is a weight); in = gate_up, weight */
static void reference_swiglu(double *out, double *const in[], const int64_t *s)
{
	for (int64_t r = 0; r < s[0]; r++)
		for (int64_t i = 0; i < s[1]; i++)
			out[r * s[1] + i] = (s[2] ? in[1][r] : 1) * reference_silu(in[0][r * 2 * s[1] + i]) * in[0][r * 2 * s[1]
					+ s[1] + i];
}

/* The kernels include a product with a weight: that before SwiGLU, and in the backward pass that after it. Here these
 * weights are unit matrices. */
static void run_swiglu(const struct call *x)
{
	const int64_t rows = x->s[0], I = x->s[1], offset[] = {0, rows};
	const real *weight = x->s[2] ? x->in[1] : NULL;
	real *gate_up = x->scratch, *act = gate_up + rows * 2 * I, *unit = act + rows * I, *unit_down = unit + 4 * I * I;
	memset(unit, 0, 5 * I * I * sizeof *unit);
	for (int64_t i = 0; i < 2 * I; i++)
		unit[i * 2 * I + i] = 1;
	for (int64_t i = 0; i < I; i++)
		unit_down[i * I + i] = 1;
	swiglu_forward(x->out, gate_up, x->in[0], NULL, &(struct weight){.data = unit}, weight, offset, 1, 2 * I, I);
	swiglu_backward(x->gradient[0], act, weight ? x->gradient[1] : NULL, x->dout, NULL, unit_down, gate_up, weight,
			offset, 1, I, I);
}

/* p = softmax(s); returns the log-sum-exp. */
static double reference_softmax(double *p, const double *s, int64_t E)
{
	double sum = 0;
	for (int64_t e = 0; e < E; e++)
		sum += exp(s[e]);
	for (int64_t e = 0; e < E; e++)
		p[e] = exp(s[e]) / sum;
	return log(sum);
}

enum { CHECK_EXPERTS = 12 };
static const real check_bias[CHECK_EXPERTS] = {0.3f, -0.2f, 0, 0.1f, -0.4f, 0.2f, 0.05f, -0.1f, 0.4f, 0, -0.3f, 0.15f};
static const real balance_factor[] = {0.5f, 2, 0.1f, 1, 0.7f, 3, 0, 0.2f, 1, 1.5f};

/* p = the scores; returns the log-sum-exp. */
static double reference_scores(double *p, const double *s, int64_t E, bool sigmoid)
{
	const double lse = reference_softmax(p, s, E);
	for (int64_t e = 0; e < E && sigmoid; e++)
		p[e] = 1 / (1 + exp(-s[e]));
	return lse;
}

/* The n largest of x [count] are marked in `chosen`, and their numbers written to `number` in that order. */
static void reference_largest(bool *chosen, int64_t *number, const double *x, int64_t count, int64_t n)
{
	memset(chosen, 0, count * sizeof *chosen);
	for (int64_t j = 0; j < n; j++) {
		number[j] = -1;
		for (int64_t e = 0; e < count; e++)
			if (!chosen[e] && (number[j] < 0 || x[e] > x[number[j]]))
				number[j] = e;
		chosen[number[j]] = true;
	}
}

/* With sigmoids there are a bias and a scale too. */
static struct routing check_routing(const int64_t *s)
{
	return (struct routing){.k = s[2], .normalise = s[3], .sigmoid = s[4], .groups = s[5], .top_groups = s[6],
			.scale = s[4] ? 2.5 : 1};
}

/* s = T, E, k, normalise, sigmoid, groups, top groups; in = logits; out = weights, largest p + bias first */
static void reference_topk(double *out, double *const in[], const int64_t *s)
{
	const int64_t E = s[1], k = s[2], groups = s[5], size = E / groups;
	for (int64_t t = 0; t < s[0]; t++) {
		double p[CHECK_EXPERTS], biased[CHECK_EXPERTS], group[CHECK_EXPERTS], sum = 0;
		bool chosen[CHECK_EXPERTS];
		int64_t number[CHECK_EXPERTS];
		reference_scores(p, in[0] + t * E, E, s[4]);
		for (int64_t e = 0; e < E; e++)
			biased[e] = p[e] + (s[4] ? check_bias[e] : 0);
		for (int64_t g = 0; g < groups && size > 1; g++) {
			reference_largest(chosen, number, biased + g * size, size, 2);
			group[g] = biased[g * size + number[0]] + biased[g * size + number[1]];
		}
		reference_largest(chosen, number, group, groups, groups > 1 ? s[6] : 0);
		for (int64_t e = 0; e < E && groups > 1; e++)
			biased[e] = chosen[e / size] ? biased[e] : -INFINITY;
		reference_largest(chosen, number, biased, E, k);
		for (int64_t j = 0; j < k; j++)
			sum += out[t * k + j] = p[number[j]];
		for (int64_t j = 0; j < k; j++)
			out[t * k + j] *= (s[4] ? 2.5 : 1) / (s[3] ? sum : 1);
	}
}

static void run_topk(const struct call *x)
{
	const int64_t T = x->s[0], E = x->s[1];
	const struct routing r = check_routing(x->s);
	int32_t index[T * r.k];
	scores_forward(x->scratch, NULL, x->in[0], T, E, r.sigmoid);
	topk_forward(index, x->out, x->scratch, r.sigmoid ? check_bias : NULL, T, E, &r);
	topk_backward(x->gradient[0], x->dout, index, x->out, x->scratch, T, E, &r);
}

/* s = B, L, E, sigmoid; in = logits; out [2] = the sums over tokens of factor . q, and of lse^2 */
static void reference_router_losses(double *out, double *const in[], const int64_t *s)
{
	out[0] = out[1] = 0;
	for (int64_t t = 0; t < s[0] * s[1]; t++) {
		double p[CHECK_EXPERTS], sum = 0;
		const double lse = reference_scores(p, in[0] + t * s[2], s[2], s[3]);
		for (int64_t e = 0; e < s[2]; e++)
			sum += p[e]; /* 1 with softmax */
		for (int64_t e = 0; e < s[2]; e++)
			out[0] += balance_factor[t / s[1] * s[2] + e] * p[e] / sum;
		out[1] += lse * lse;
	}
}

static void run_router_losses(const struct call *x)
{
	const int64_t B = x->s[0], L = x->s[1], E = x->s[2];
	const struct routing r = {.k = 1, .sigmoid = x->s[3]};
	real *p = x->scratch, *lse = p + B * L * E;
	struct router_sums sums[B];
	double count[B * E], q_sum[B * E];
	int32_t index[B * L];
	memset(index, 0, sizeof index); /* no loss depends on the counts */
	scores_forward(p, lse, x->in[0], B * L, E, r.sigmoid);
	router_statistics(sums, count, q_sum, x->in[0], p, lse, index, NULL, 0, B * L, B, L, E, &r);
	x->out[0] = x->out[1] = 0;
	for (int64_t b = 0; b < B; b++) {
		for (int64_t e = 0; e < E; e++)
			x->out[0] += (real)(balance_factor[b * E + e] * q_sum[b * E + e]);
		x->out[1] += (real)sums[b].z;
	}
	if (!x->accumulate)
		memset(x->gradient[0], 0, B * L * E * sizeof(real)); /* router_loss_backward always adds to ds */
	router_loss_backward(x->gradient[0], x->in[0], p, lse, balance_factor, NULL, 0, B * L, L, E, x->dout[0], x->dout[1],
			&r);
}

enum { ROUTED_T = 5, ROUTED_K = 2, ROUTED_E = 4, ROUTED_R = ROUTED_T * ROUTED_K };
static const int32_t routed_index[ROUTED_R] = {3, 0, 0, 3, 0, 1, 3, 1, 1, 0}; /* no token chose expert 2 */

/* s = H, I; in = x [T, H], weight [T, k], gate_up [E, 2I, H], down [E, H, I] */
static void reference_experts(double *y, double *const in[], const int64_t *s)
{
	const int64_t H = s[0], I = s[1];
	memset(y, 0, ROUTED_T * H * sizeof *y);
	for (int64_t r = 0; r < ROUTED_R; r++) {
		const double *x = in[0] + r / ROUTED_K * H, *gate = in[2] + routed_index[r] * 2 * I * H, *down =
				in[3] + routed_index[r] * H * I;
		for (int64_t i = 0; i < I; i++) {
			double gate_x = 0, up_x = 0;
			for (int64_t j = 0; j < H; j++) {
				gate_x += gate[i * H + j] * x[j];
				up_x += gate[(I + i) * H + j] * x[j];
			}
			for (int64_t j = 0; j < H; j++)
				y[r / ROUTED_K * H + j] += in[1][r] * down[j * I + i] * reference_silu(gate_x) * up_x;
		}
	}
}

static void run_experts(const struct call *x)
{
	const int64_t H = x->s[0], I = x->s[1];
	int64_t offset[ROUTED_E + 1];
	int32_t position[ROUTED_R], token[ROUTED_R];
	real weight[ROUTED_R], dweight[ROUTED_R], *rows = x->scratch, *gate_up = rows + ROUTED_R * H, *dgate_up =
			gate_up + ROUTED_R * 2 * I;
	real *act = dgate_up + ROUTED_R * 2 * I;
	dispatch_plan(offset, position, token, routed_index, ROUTED_R, ROUTED_K, ROUTED_E);
	permute_forward(weight, x->in[1], position, ROUTED_R);
	struct weight w_gate_up[ROUTED_E], w_down[ROUTED_E];
	stack_weights(w_gate_up, x->in[2], ROUTED_E, 2 * I * H);
	stack_weights(w_down, x->in[3], ROUTED_E, H * I);
	swiglu_forward(act, gate_up, x->in[0], token, w_gate_up, weight, offset, ROUTED_E, H, I);
	grouped_matmul_forward(rows, act, NULL, w_down, offset, ROUTED_E, I, H, false);
	combine_rows(x->out, rows, position, ROUTED_T, ROUTED_K, H, x->accumulate);
	swiglu_backward(dgate_up, act, dweight, x->dout, token, x->in[3], gate_up, weight, offset, ROUTED_E, H, I);
	permute_backward(x->gradient[1], dweight, position, ROUTED_R);
	grouped_matmul_backward_weight(x->gradient[3], x->dout, token, act, NULL, offset, ROUTED_E, I, H, x->accumulate);
	grouped_matmul_backward_weight(x->gradient[2], dgate_up, NULL, x->in[0], token, offset, ROUTED_E, H, 2 * I,
			x->accumulate);
	grouped_matmul_backward_input(rows, dgate_up, NULL, x->in[2], offset, ROUTED_E, H, 2 * I, false);
	combine_rows(x->gradient[0], rows, position, ROUTED_T, ROUTED_K, H, x->accumulate);
}

enum { NUM_TARGETS = 5 };
static const int32_t check_target[NUM_TARGETS] = {4, -1, 0, 8, 8};

/* s = V; in = logits; out = the loss, summed over valid targets */
static void reference_cross_entropy(double *out, double *const in[], const int64_t *s)
{
	out[0] = 0;
	for (int64_t t = 0; t < NUM_TARGETS; t++) {
		const double *logits = in[0] + t * s[0];
		double sum = 0;
		for (int64_t v = 0; v < s[0]; v++)
			sum += exp(logits[v]);
		out[0] += check_target[t] < 0 ? 0 : log(sum) - logits[check_target[t]];
	}
}

static void run_cross_entropy(const struct call *x)
{
	const int64_t V = x->s[0];
	double loss[NUM_TARGETS], exp_sum[NUM_TARGETS], sum = 0;
	real max[NUM_TARGETS];
	memcpy(x->gradient[0], x->in[0], NUM_TARGETS * V * sizeof(real));
	logits_max(max, x->in[0], NUM_TARGETS, V);
	cross_entropy_forward(loss, exp_sum, x->gradient[0], max, check_target, 0, NUM_TARGETS, V);
	cross_entropy_backward(x->gradient[0], exp_sum, check_target, 0, x->dout[0], NUM_TARGETS, V);
	for (int t = 0; t < NUM_TARGETS; t++)
		sum += check_target[t] < 0 ? 0 : loss[t] + log(exp_sum[t]);
	x->out[0] = (real)sum;
}

static const struct adamw check_adamw = {.lr = 0.5, .beta1 = 0.9, .beta2 = 0.95, .eps = 0.1, .weight_decay = 0.1,
		.grad_scale = 0.5};

/* s = n; in = w, then the gradient of each of three steps; out = w, exp_avg, exp_avg_sq */
static void reference_adamw(double *out, double *const in[], const int64_t *s)
{
	const struct adamw *o = &check_adamw;
	for (int64_t i = 0; i < s[0]; i++) {
		double w = in[0][i], m = 0, v = 0;
		for (int step = 1; step < MAX_IN; step++) {
			const double g = o->grad_scale * in[step][i];
			m = o->beta1 * m + (1 - o->beta1) * g;
			v = o->beta2 * v + (1 - o->beta2) * g * g;
			const double m_hat = m / (1 - pow(o->beta1, step)), v_hat = v / (1 - pow(o->beta2, step));
			w -= o->lr * (m_hat / (sqrt(v_hat) + o->eps) + o->weight_decay * w);
		}
		out[i] = w;
		out[s[0] + i] = m;
		out[2 * s[0] + i] = v;
	}
}

static void run_adamw(const struct call *x)
{
	const int64_t n = x->s[0];
	struct adamw o = check_adamw;
	memcpy(x->out, x->in[0], n * sizeof(real));
	memset(x->out + n, 0, 2 * n * sizeof(real));
	for (o.step = 1; o.step < MAX_IN; o.step++)
		adamw_update(x->out, x->out + n, x->out + 2 * n, x->in[o.step], n, &o);
}

/* s = V, H; in = w */
static void reference_column_sums(double *out, double *const in[], const int64_t *s)
{
	for (int64_t j = 0; j < s[1]; j++) {
		out[j] = 0;
		for (int64_t v = 0; v < s[0]; v++)
			out[j] += in[0][v * s[1] + j] * in[0][v * s[1] + j];
	}
}

static void run_column_sums(const struct call *x)
{
	double sum[x->s[1]];
	column_sum_of_squares(sum, &(struct weight){.data = x->in[0]}, x->s[0], x->s[1]);
	for (int64_t j = 0; j < x->s[1]; j++)
		x->out[j] = (real)sum[j];
}

static void run_sum_of_squares(const struct call *x)
{
	x->out[0] = (real)sum_of_squares(x->in[0], x->s[0]);
}

/* ============================================================================================================
 * The check
 * ========================================================================================================== */

/* Bits for `out` and for the gradients of in[0] .. in[3]. */
enum { OUT = 1, D0 = 2, D1 = 4, D2 = 8, D3 = 16 };

/* What is checked: each operation at several sizes, at and beside the edges of the kernel's blocks. */
static const struct operation {
	const char *name;
	void (*reference)(double *out, double *const in[], const int64_t *s);
	void (*run)(const struct call *x);
	int64_t s[MAX_SIZES], out_size, in_size[MAX_IN];
	int num_gradients;           /* of in[0] .. in[num_gradients - 1]; 0: no backward pass */
	unsigned accumulated;        /* which of out and gradients the kernel can add to: bits OUT, D0, ... */
} operations[] = {
#define MATMUL(T, K, N) {"matmul", reference_matmul, run_matmul, \
		{T, K, N}, (T) * (N), {(T) * (K), (N) * (K), N}, 3, OUT | D0 | D1 | D2}
	MATMUL(1, 1, 1), MATMUL(5, 3, 7), MATMUL(33, 20, 65), MATMUL(300, 17, 270), MATMUL(29, 256, 40),
	MATMUL(5, 771, 31), MATMUL(771, 5, 31), MATMUL(5, 31, 771),
#define GROUPED(K, N) {"grouped matmul", reference_grouped_matmul, run_grouped_matmul, \
		{K, N, 5, 0, 1, 1, 280, 303, 303}, 303 * (N), \
		{303 * (K), 5 * (N) * (K)}, 2, OUT | D0 | D1}
	GROUPED(13, 270), GROUPED(256, 3),
#define EMBEDDING(H) {"embedding", reference_embedding, run_embedding, \
		{H}, EMBEDDED * (H), {EMBEDDING_V * (H)}, 1, D0}
	EMBEDDING(70),
#define RMSNORM(T, H) {"RMSNorm", reference_rmsnorm, run_rmsnorm, \
		{T, H}, (T) * (H), {(T) * (H), H}, 2, D0 | D1}
	RMSNORM(131, 37),
#define QK_NORM(T, nh, nkv, d) {"QK-norm", reference_qk_norm, run_qk_norm, \
		{T, nh, nkv, d}, (T) * (nh + 2 * nkv) * (d), {(T) * (nh + 2 * nkv) * (d), 2 * (d)}, 2, D1}
	QK_NORM(131, 4, 2, 6), QK_NORM(3, 1, 1, 17),
#define ROPE(B, L, nh, nkv, d, packed, rot) {"RoPE", reference_rope, run_rope, \
		{B, L, nh, nkv, d, packed, rot}, (B) * (L) * (nh + 2 * nkv) * (d), \
		{(B) * (L) * (nh + 2 * nkv) * (d)}, 1, 0}
	ROPE(2, 7, 4, 2, 6, false, 6), ROPE(2, 7, 4, 2, 6, true, 6), ROPE(2, 7, 4, 2, 6, true, 4),
	ROPE(1, 3, 1, 1, 5, false, 2),
#define ATTENTION(B, L, nh, nkv, d, packed) {"attention", reference_attention, run_attention, \
		{B, L, nh, nkv, d, packed}, (B) * (L) * (nh) * (d), \
		{(B) * (L) * (nh + 2 * nkv) * (d)}, 1, 0}
	ATTENTION(1, 1, 1, 1, 2, false), ATTENTION(3, 7, 4, 2, 6, false), ATTENTION(2, 64, 2, 2, 4, false),
	ATTENTION(1, 150, 6, 2, 4, false), ATTENTION(2, 65, 3, 1, 8, false), ATTENTION(1, 70, 10, 2, 4, false),
	ATTENTION(1, 513, 1, 1, 2, false), ATTENTION(1, 1100, 2, 1, 2, false),
	ATTENTION(3, 7, 4, 2, 6, true), ATTENTION(2, 300, 6, 2, 4, true), ATTENTION(1, 1100, 2, 1, 2, true),
#define SWIGLU(rows, I, weighted) {"SwiGLU", reference_swiglu, run_swiglu, \
		{rows, I, weighted}, (rows) * (I), {(rows) * 2 * (I), rows}, 1 + weighted, 0}
	SWIGLU(9, 21, true), SWIGLU(9, 21, false), SWIGLU(5, 400, true),
#define TOPK(T, E, k, normalise) {"softmax, top-k", reference_topk, run_topk, \
		{T, E, k, normalise, false, 1, 1}, (T) * (k), {(T) * (E)}, 1, 0}
	TOPK(11, 8, 3, true), TOPK(11, 8, 3, false), TOPK(5, 7, 1, false), TOPK(5, 4, 4, true), TOPK(5, 4, 4, false),
#define SIGMOID_TOPK(T, E, k, normalise, groups, top_groups) {"sigmoid, top-k", reference_topk, run_topk, \
		{T, E, k, normalise, true, groups, top_groups}, (T) * (k), {(T) * (E)}, 1, 0}
	SIGMOID_TOPK(11, 8, 3, true, 1, 1), SIGMOID_TOPK(11, 8, 3, false, 1, 1), SIGMOID_TOPK(5, 7, 1, false, 1, 1),
	SIGMOID_TOPK(11, 12, 4, true, 4, 2), SIGMOID_TOPK(11, 12, 2, true, 6, 1), SIGMOID_TOPK(9, 12, 3, true, 3, 3),
#define ROUTER_LOSSES(B, L, E, sigmoid) {"balance, z losses", reference_router_losses, run_router_losses, \
		{B, L, E, sigmoid}, 2, {(B) * (L) * (E)}, 1, D0}
	ROUTER_LOSSES(2, 3, 5, false), ROUTER_LOSSES(2, 3, 5, true),
#define EXPERTS(H, I) {"dispatch, combine", reference_experts, run_experts, {H, I}, ROUTED_T * (H), \
		{ROUTED_T * (H), ROUTED_R, ROUTED_E * 2 * (I) * (H), ROUTED_E * (H) * (I)}, 4, OUT | D0 | D2 | D3}
	EXPERTS(37, 45), EXPERTS(256, 3),
#define CROSS_ENTROPY(V) {"cross-entropy", reference_cross_entropy, run_cross_entropy, \
		{V}, 1, {NUM_TARGETS * (V)}, 1, 0}
	CROSS_ENTROPY(9), CROSS_ENTROPY(3000),
	{"AdamW", reference_adamw, run_adamw, {1003}, 3 * 1003, {1003, 1003, 1003, 1003}, 0, 0},
#define COLUMN_SUMS(V, H) {"column sum of squares", reference_column_sums, run_column_sums, \
		{V, H}, H, {(V) * (H)}, 0, 0}
	COLUMN_SUMS(5, 70),
#define SUM_OF_SQUARES(n) {"sum of squares", reference_column_sums, run_sum_of_squares, {n, 1}, 1, {n}, 0, 0}
	SUM_OF_SQUARES(1), SUM_OF_SQUARES(63), SUM_OF_SQUARES(65), SUM_OF_SQUARES(10000),
};

/* Doubles for all arrays of an operation, and its scratch but for attention's; and the largest d above. */
enum { CHECK_DOUBLES = 1 << 20, CHECK_MAX_HEAD_DIM = 8 };

int64_t self_check_scratch(void)
{
	return CHECK_DOUBLES + (attention_scratch(CHECK_MAX_HEAD_DIM) + ATTENTION_SHARED) * sizeof(real) / sizeof(double);
}

/* Takes n doubles, or reals, from a block of memory. */
static void *take_doubles(double **memory, int64_t n)
{
	double *start = *memory;
	*memory += n;
	return start;
}

/* Compares out with the reference; c->forward becomes the larger error. */
static void check_forward(struct check *c, const struct operation *o, const struct call *x, double *const in[],
		double *out)
{
	double difference = 0, norm = 0;
	o->reference(out, in, o->s);
	for (int64_t j = 0; j < o->out_size; j++) {
		const double actual = o->accumulated & OUT ? x->out[j] / 2 : x->out[j];
		difference += (actual - out[j]) * (actual - out[j]);
		norm += out[j] * out[j];
	}
	c->forward = larger_error(c->forward, sqrt(difference / norm));
}

/* Compares the gradient of in[i] with differences of the reference along random directions; c->backward becomes the
 * larger error. `moved` and `direction` have the size of in[i]. */
static void check_backward(struct check *c, const struct operation *o, const struct call *x, double *in[], double *out,
		int i, double *moved, real *direction)
{
	enum { DIRECTIONS = 4 };
	double *const start = in[i];
	/* Central differences of four points: their error is of order h^4, so h can be large enough for rounding to be
	 * small. It must be so small that top-k chooses the same experts at all four. */
	const double h = 1e-4;
	const double steps[4] = {h, -h, 2 * h, -2 * h}, factors[4] = {8 / (12 * h), -8 / (12 * h), -1 / (12 * h),
			1 / (12 * h)};
	double difference = 0, norm = 0;
	in[i] = moved;
	for (int d = 0; d < DIRECTIONS; d++) {
		double actual = 0, expected = 0;
		random_normal(direction, o->in_size[i], &(struct random_stream){.seed = 2, .purpose = i, .step = d}, 0);
		for (int64_t j = 0; j < o->in_size[i]; j++)
			actual += (o->accumulated & D0 << i ? 0.5 : 1) * x->gradient[i][j] * direction[j];
		for (int k = 0; k < 4; k++) {
			for (int64_t j = 0; j < o->in_size[i]; j++)
				moved[j] = start[j] + steps[k] * direction[j];
			o->reference(out, in, o->s);
			for (int64_t j = 0; j < o->out_size; j++)
				expected += factors[k] * out[j] * x->dout[j];
		}
		difference += (actual - expected) * (actual - expected);
		norm += expected * expected;
	}
	in[i] = start;
	c->backward = larger_error(c->backward, sqrt(difference / norm));
}

int self_check(struct check checks[MAX_CHECKS], double *scratch)
{
	int n = 0;
	for (size_t k = 0; k < sizeof operations / sizeof *operations; k++) {
		const struct operation *o = &operations[k];
		if (n == 0 || strcmp(o->name, checks[n - 1].operation))
			checks[n++] = (struct check){.operation = o->name, .has_backward = o->num_gradients > 0};
		double *memory = scratch, *in[MAX_IN], *out = take_doubles(&memory, o->out_size);
		real *dout = take_doubles(&memory, o->out_size);
		struct call x = {.s = o->s, .dout = dout, .out = take_doubles(&memory, o->out_size)};
		random_normal(dout, o->out_size, &(struct random_stream){.seed = 1}, 0);
		for (int i = 0; i < MAX_IN; i++) {
			const int64_t size = o->in_size[i];
			real *value = take_doubles(&memory, size);
			x.in[i] = value, in[i] = take_doubles(&memory, size), x.gradient[i] = take_doubles(&memory, size);
			random_normal(value, size, &(struct random_stream){.seed = 1, .purpose = i + 1}, 0);
			for (int64_t j = 0; j < size; j++)
				/* NaN stays, should a kernel not write an element, or add to it */
				in[i][j] = value[j], x.gradient[i][j] = NAN;
		}
		for (int64_t j = 0; j < o->out_size; j++)
			x.out[j] = NAN;
		x.scratch = (real *)memory;
		o->run(&x);
		x.accumulate = true; /* a second time: what is added to is now twice its value */
		o->run(&x);
		check_forward(&checks[n - 1], o, &x, in, out);
		for (int i = 0; i < o->num_gradients; i++)
			check_backward(&checks[n - 1], o, &x, in, out, i, memory, (real *)(memory + o->in_size[i]));
	}
	return n;
}

/* ============================================================================================================
 * The machine
 * ========================================================================================================== */

const char *cpu_features(char out[256])
{
	*out = 0;
#ifdef __x86_64__
	static const char *const names[] = {"sse4.2", "avx", "fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl"};
	const bool has[] = {__builtin_cpu_supports("sse4.2"), __builtin_cpu_supports("avx"), __builtin_cpu_supports("fma"),
			__builtin_cpu_supports("avx2"), __builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"),
			__builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512vl")};
	for (size_t i = 0, n = 0; i < sizeof has / sizeof *has; i++)
		if (has[i])
			n += snprintf(out + n, 256 - n, "%s%s", n ? " " : "", names[i]);
#endif
	return out;
}

double peak_flops(int64_t n, int repeats, double seconds, int threads)
{
	real *a = malloc(3 * n * n * sizeof *a);
	if (!a)
		return 0;
	real *b = a + n * n, *c = b + n * n;
	for (int64_t i = 0; i < 2 * n * n; i++)
		a[i] = (real)(i % 17 - 8);
	const double begun = clock_seconds();
	double best = INFINITY;
	for (int i = 0; i < repeats && (i < 2 || clock_seconds() - begun < seconds); i++) {
		const double start = clock_seconds();
		single_gemm(c, a, false, b, true, n, n, n, threads);
		best = fmin(best, clock_seconds() - start);
	}
	free(a);
	return 2.0 * n * n * n / best;
}

double memory_bandwidth(real *out, const real *in, int64_t n, double seconds)
{
	const double begun = clock_seconds();
	double best = INFINITY;
	for (int i = 0; i < 5 && (i < 2 || clock_seconds() - begun < seconds); i++) {
		const double start = clock_seconds();
		copy_array(out, in, n);
		best = fmin(best, clock_seconds() - start);
	}
	return 2.0 * n * sizeof *out / best;
}

struct machine_rates quick_rates(void)
{
	const int64_t n = (16 << 20) / sizeof(real); /* two arrays of 16 MB */
	struct machine_rates r = {0};
	/* Under a limit of memory each thread of OpenBLAS would ask for a buffer that may not be there. */
	real *memory = isinf(process_memory()) ? malloc(2 * n * sizeof *memory) : NULL;
	if (!memory)
		return r;
	memset(memory, 0, 2 * n * sizeof *memory);
	r.bandwidth = memory_bandwidth(memory, memory + n, n, 0.010);
	free(memory);
	r.flops = peak_flops(768, 100, 0.020, kernels_threads());
	return r;
}

int process_sockets(const char *root)
{
	enum { MAX_SOCKETS = 256 };
	cpu_set_t cpus;
	bool seen[MAX_SOCKETS] = {false};
	int sockets = 0;
	if (sched_getaffinity(0, sizeof cpus, &cpus) < 0)
		return 1;
	for (int i = 0; i < CPU_SETSIZE; i++) {
		char path[PATH_LEN];
		int socket;
		if (!CPU_ISSET(i, &cpus))
			continue;
		snprintf(path, sizeof path, "%s/sys/devices/system/cpu/cpu%d/topology/physical_package_id", root, i);
		FILE *f = fopen(path, "r");
		if (f && fscanf(f, "%d", &socket) == 1 && socket >= 0 && socket < MAX_SOCKETS && !seen[socket]) {
			seen[socket] = true;
			sockets++;
		}
		if (f)
			fclose(f);
	}
	return sockets ? sockets : 1;
}

const char *socket_warning(char out[256], const char *root)
{
	const int threads = kernels_threads(), sockets = threads > 1 ? process_sockets(root) : 1;
	*out = 0;
	if (sockets > 1)
		snprintf(out, 256, "the %d threads of a rank are on %d sockets, and memory of another socket is slower: start "
				"a rank on each, mpirun -n %d --map-by socket --bind-to socket env OMP_NUM_THREADS=%d ling ...",
				threads, sockets, sockets, threads / sockets > 1 ? threads / sockets : 1);
	return out;
}
