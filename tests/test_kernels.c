/*
 * Every kernel against its plain form: loops in double, straight from the formula. Forward results must agree with the loops,
 * backward results with central differences of the loops. Built twice: in float, as ling runs, and in double, where the
 * agreement is close to the last digit.
 */
#define _GNU_SOURCE
#include "../ling.h"
#include "test.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

#ifdef LING_DOUBLE
#define TOLERANCE 1e-8 /* of central differences */
#else
#define TOLERANCE 2e-5
#endif

/* ------------------------------------------------------------------------------------------------------------
 * The harness
 * ------------------------------------------------------------------------------------------------------------ */

enum { MAX_IN = 4, SAMPLES = 75 };

/* An operation in plain form: out = f(in[0], in[1], ...). Sizes come with `s`. */
struct plain {
	const int64_t *s;
	void (*forward)(double *out, double *const in[], const int64_t *s);
	int num_in;
	int64_t in_size[MAX_IN], out_size;
	double *in[MAX_IN], *out, *probe;
	real *rin[MAX_IN], *rout, *rprobe; /* the same numbers for the kernel */
};

static void *take(int64_t n, size_t size)
{
	void *p = calloc(n ? n : 1, size);
	assert_non_null(p);
	return p;
}

/* Random inputs, the same in both precisions; the loss of the test is sum(out * probe). */
static void plain_init(struct plain *p)
{
	struct random_stream stream = {.seed = 7};
	uint64_t position = 0;
	for (int i = 0; i <= p->num_in; i++) {
		bool probe = i == p->num_in;
		int64_t n = probe ? p->out_size : p->in_size[i];
		real *r = take(n, sizeof *r);
		double *d = take(n, sizeof *d);
		random_normal(r, n, &stream, position);
		position += n;
		for (int64_t j = 0; j < n; j++)
			d[j] = r[j];
		if (probe)
			p->rprobe = r, p->probe = d;
		else
			p->rin[i] = r, p->in[i] = d;
	}
	p->out = take(p->out_size, sizeof *p->out);
	p->rout = take(p->out_size, sizeof *p->rout);
	p->forward(p->out, p->in, p->s);
}

static void plain_free(struct plain *p)
{
	for (int i = 0; i < p->num_in; i++)
		free(p->in[i]), free(p->rin[i]);
	free(p->out), free(p->rout), free(p->probe), free(p->rprobe);
}

static double plain_loss(struct plain *p)
{
	double sum = 0;
	p->forward(p->out, p->in, p->s);
	for (int64_t i = 0; i < p->out_size; i++)
		sum += p->out[i] * p->probe[i];
	return sum;
}

static void check_forward(struct plain *p, const char *what)
{
	p->forward(p->out, p->in, p->s);
	assert_close(p->rout, p->out, p->out_size, sizeof(real) == 8 ? 1e-12 : 1e-5, what);
}

/* Compares a kernel's gradient of in[i] with central differences of the plain form, at SAMPLES places. */
static void check_backward(struct plain *p, int i, const real *gradient, const char *what)
{
	double difference = 0, norm = 0;
	int64_t n = p->in_size[i], stride = n > SAMPLES ? n / SAMPLES : 1;
	for (int64_t j = 0; j < n; j += stride) {
		/* four points: the error is of order h^4, so that h can be large and rounding small */
		static const double steps[4] = {1, -1, 2, -2}, factors[4] = {8, -8, -1, 1};
		const double keep = p->in[i][j], h = 1e-3;
		double numeric = 0;
		for (int k = 0; k < 4; k++) {
			p->in[i][j] = keep + steps[k] * h;
			numeric += factors[k] * plain_loss(p) / (12 * h);
		}
		p->in[i][j] = keep;
		difference += (numeric - gradient[j]) * (numeric - gradient[j]);
		norm += numeric * numeric;
	}
	if (!(sqrt(difference) <= TOLERANCE * sqrt(norm)) || norm == 0)
		fail_msg("%s: gradient is off by %g of its norm %g", what, sqrt(difference / norm), sqrt(norm));
}

static real *garbage(int64_t n)
{
	real *x = take(n, sizeof *x);
	for (int64_t i = 0; i < n; i++)
		x[i] = NAN; /* what a kernel must write, and not add to */
	return x;
}

/* ------------------------------------------------------------------------------------------------------------
 * Matrix products
 * ------------------------------------------------------------------------------------------------------------ */

/* s = T, K, N */
static void plain_matmul(double *y, double *const in[], const int64_t *s)
{
	for (int64_t t = 0; t < s[0]; t++)
		for (int64_t n = 0; n < s[2]; n++) {
			double sum = in[2][n];
			for (int64_t k = 0; k < s[1]; k++)
				sum += in[0][t * s[1] + k] * in[1][n * s[1] + k];
			y[t * s[2] + n] = sum;
		}
}

static void test_matmul(void **state)
{
	(void)state;
	const int64_t sizes[][3] = {{1, 1, 1}, {5, 3, 7}, {33, 20, 65}, {300, 17, 270}};
	for (int c = 0; c < 4; c++) {
		const int64_t *s = sizes[c], T = s[0], K = s[1], N = s[2];
		struct plain p = {.s = s, .forward = plain_matmul, .num_in = 3, .in_size = {T * K, N * K, N}, .out_size = T * N};
		plain_init(&p);
		matmul_forward(p.rout, p.rin[0], p.rin[1], p.rin[2], T, K, N, false);
		check_forward(&p, "matmul forward");
		real *dx = garbage(T * K), *dw = garbage(N * K), *db = garbage(N), *scratch = take(row_sum_scratch(N), sizeof(real));
		matmul_backward_input(dx, p.rprobe, p.rin[1], T, K, N, false);
		check_backward(&p, 0, dx, "matmul dx");
		matmul_backward_weight(dw, p.rprobe, p.rin[0], T, K, N, false);
		check_backward(&p, 1, dw, "matmul dw");
		bias_backward(db, p.rprobe, T, N, false, scratch);
		check_backward(&p, 2, db, "matmul dbias");
		/* accumulate: twice the gradient */
		matmul_backward_input(dx, p.rprobe, p.rin[1], T, K, N, true);
		matmul_backward_weight(dw, p.rprobe, p.rin[0], T, K, N, true);
		bias_backward(db, p.rprobe, T, N, true, scratch);
		for (int64_t i = 0; i < T * K; i++)
			dx[i] /= 2;
		for (int64_t i = 0; i < N * K; i++)
			dw[i] /= 2;
		for (int64_t i = 0; i < N; i++)
			db[i] /= 2;
		check_backward(&p, 0, dx, "matmul dx, added");
		check_backward(&p, 1, dw, "matmul dw, added");
		check_backward(&p, 2, db, "matmul dbias, added");
		free(dx), free(dw), free(db), free(scratch);
		plain_free(&p);
	}
}

/* Groups of very different sizes, some empty. s = R, K, N, G, then G + 1 offsets. */
static void plain_grouped(double *y, double *const in[], const int64_t *s)
{
	for (int64_t g = 0; g < s[3]; g++)
		for (int64_t r = s[4 + g]; r < s[5 + g]; r++)
			for (int64_t n = 0; n < s[2]; n++) {
				double sum = 0;
				for (int64_t k = 0; k < s[1]; k++)
					sum += in[0][r * s[1] + k] * in[1][(g * s[2] + n) * s[1] + k];
				y[r * s[2] + n] = sum;
			}
}

static void test_grouped_matmul(void **state)
{
	(void)state;
	const int64_t s[] = {303, 13, 270, 5, 0, 1, 1, 280, 303, 303}, R = s[0], K = s[1], N = s[2], G = s[3];
	struct plain p = {.s = s, .forward = plain_grouped, .num_in = 2, .in_size = {R * K, G * N * K}, .out_size = R * N};
	plain_init(&p);
	grouped_matmul_forward(p.rout, p.rin[0], NULL, p.rin[1], s + 4, G, K, N, false);
	check_forward(&p, "grouped forward");
	real *dx = garbage(R * K), *dw = garbage(G * N * K);
	grouped_matmul_backward_input(dx, p.rprobe, NULL, p.rin[1], s + 4, G, K, N, false);
	check_backward(&p, 0, dx, "grouped dx");
	grouped_matmul_backward_weight(dw, p.rprobe, NULL, p.rin[0], NULL, s + 4, G, K, N, false);
	check_backward(&p, 1, dw, "grouped dw");
	/* An expert without tokens: its gradient was NaN before and is exactly zero now; adding nothing leaves it alone. */
	for (int64_t i = 0; i < N * K; i++) {
		assert_true(dw[1 * N * K + i] == 0);
		assert_true(dw[4 * N * K + i] == 0);
	}
	dw[1 * N * K] = 3;
	grouped_matmul_backward_weight(dw, p.rprobe, NULL, p.rin[0], NULL, s + 4, G, K, N, true);
	assert_true(dw[1 * N * K] == 3);
	free(dx), free(dw);
	plain_free(&p);
}

/* Rows taken by a list are the rows that a copy would have gathered, bit for bit. */
static void test_row_lists(void **state)
{
	(void)state;
	enum { T = 40, R = 97, K = 37, N = 45, G = 3 };
	const int64_t offset[G + 1] = {0, 60, 60, R};
	int32_t row[R];
	for (int r = 0; r < R; r++)
		row[r] = (r * 29 + 3) % T;
	real *x = garbage(T * K), *rows = garbage(R * K), *dy = garbage(R * N), *dy_rows = garbage(R * N), *w = garbage(G * N * K);
	real *listed = garbage(G * N * K), *copied = garbage(G * N * K);
	random_normal(x, T * K, &(struct random_stream){.seed = 1}, 0);
	random_normal(dy, R * N, &(struct random_stream){.seed = 2}, 0);
	random_normal(w, G * N * K, &(struct random_stream){.seed = 3}, 0);
	gather_rows(rows, x, row, R, K);
	grouped_matmul_forward(listed, x, row, w, offset, G, K, N, false);
	grouped_matmul_forward(copied, rows, NULL, w, offset, G, K, N, false);
	assert_memory_equal(listed, copied, R * N * sizeof *listed);
	gather_rows(dy_rows, dy, row, R, N);
	grouped_matmul_backward_input(listed, dy, row, w, offset, G, K, N, false);
	grouped_matmul_backward_input(copied, dy_rows, NULL, w, offset, G, K, N, false);
	assert_memory_equal(listed, copied, R * K * sizeof *listed);
	grouped_matmul_backward_weight(listed, dy, row, x, row, offset, G, K, N, false);
	grouped_matmul_backward_weight(copied, dy_rows, NULL, rows, NULL, offset, G, K, N, false);
	assert_memory_equal(listed, copied, G * N * K * sizeof *listed);
	free(x), free(rows), free(dy), free(dy_rows), free(w), free(listed), free(copied);
}

/* Sizes that cross every block of the product; strides where its tiles read A in place (256) and where they do not. A row's results do not
 * depend on the rows beside it, nor on the number of threads. */
static void test_product_blocks(void **state)
{
	(void)state;
	static const int64_t sizes[][3] = {{301, 403, 801}, {256, 256, 256}, {130, 256, 100}, {5, 771, 31}, {1, 1, 1}};
	for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
		const int64_t T = sizes[c][0], K = sizes[c][1], N = sizes[c][2];
		real *x = garbage(T * K), *w = garbage(N * K), *y = garbage(T * N), *again = garbage(T * N), *dw = garbage(N * K), *dx = garbage(T * K);
		random_normal(x, T * K, &(struct random_stream){.seed = 1}, 0);
		random_normal(w, N * K, &(struct random_stream){.seed = 2}, 0);
		matmul_forward(y, x, w, NULL, T, K, N, false);
		matmul_backward_input(dx, y, w, T, K, N, false);
		matmul_backward_weight(dw, y, x, T, K, N, false);
		double worst = 0; /* relative to the largest that a sum of so many terms could be */
		for (int64_t t = 0; t < T; t++)
			for (int64_t n = 0; n < N; n++) {
				double sum = 0;
				for (int64_t k = 0; k < K; k++)
					sum += (double)x[t * K + k] * w[n * K + k];
				worst = fmax(worst, fabs(y[t * N + n] - sum) / (16.0 * K));
			}
		for (int64_t t = 0; t < T; t++)
			for (int64_t k = 0; k < K; k++) {
				double sum = 0;
				for (int64_t n = 0; n < N; n++)
					sum += (double)y[t * N + n] * w[n * K + k];
				worst = fmax(worst, fabs(dx[t * K + k] - sum) / (16.0 * N * sqrt((double)K)));
			}
		for (int64_t n = 0; n < N; n++)
			for (int64_t k = 0; k < K; k++) {
				double sum = 0;
				for (int64_t t = 0; t < T; t++)
					sum += (double)y[t * N + n] * x[t * K + k];
				worst = fmax(worst, fabs(dw[n * K + k] - sum) / (16.0 * T * sqrt((double)K)));
			}
		assert_true(worst < (sizeof(real) == 4 ? 1e-7 : 1e-16));
		for (int64_t t = 0; t < T; t += 7)
			matmul_forward(again + t * N, x + t * K, w, NULL, T - t < 7 ? T - t : 7, K, N, false);
		assert_memory_equal(again, y, T * N * sizeof *y);
		const int threads = omp_get_max_threads();
		real *other = garbage(N * K);
		for (int n = 1; n <= 5; n++) {
			omp_set_num_threads(n);
			matmul_forward(again, x, w, NULL, T, K, N, false);
			assert_memory_equal(again, y, T * N * sizeof *y);
			matmul_backward_weight(other, y, x, T, K, N, false);
			assert_memory_equal(other, dw, N * K * sizeof *dw);
		}
		omp_set_num_threads(threads);
		free(x), free(w), free(y), free(again), free(dw), free(dx), free(other);
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * Embedding, RMSNorm, RoPE
 * ------------------------------------------------------------------------------------------------------------ */

static const int32_t embedding_tokens[] = {3, 0, 3, 3, 6, 1, 0};

static void plain_embedding(double *out, double *const in[], const int64_t *s)
{
	for (int64_t t = 0; t < 7; t++)
		for (int64_t j = 0; j < s[0]; j++)
			out[t * s[0] + j] = in[0][embedding_tokens[t] * s[0] + j];
}

static void test_embedding(void **state)
{
	(void)state;
	const int64_t H = 70, V = 8;
	struct plain p = {.s = &H, .forward = plain_embedding, .num_in = 1, .in_size = {V * H}, .out_size = 7 * H};
	plain_init(&p);
	embedding_forward(p.rout, embedding_tokens, p.rin[0], 0, 7, H, V);
	check_forward(&p, "embedding forward");
	real *dw = garbage(V * H);
	embedding_backward(dw, embedding_tokens, p.rprobe, 0, 7, H, V, false);
	check_backward(&p, 0, dw, "embedding dw");
	for (int64_t j = 0; j < H; j++)
		assert_true(dw[7 * H + j] == 0); /* a token that does not occur */
	free(dw);
	plain_free(&p);
}

static const double norm_eps = 1e-2; /* large, so that a misplaced eps shows */

static void plain_rmsnorm(double *out, double *const in[], const int64_t *s)
{
	for (int64_t t = 0; t < s[0]; t++) {
		double sum = 0;
		for (int64_t j = 0; j < s[1]; j++)
			sum += in[0][t * s[1] + j] * in[0][t * s[1] + j];
		for (int64_t j = 0; j < s[1]; j++)
			out[t * s[1] + j] = in[1][j] * in[0][t * s[1] + j] / sqrt(sum / s[1] + norm_eps);
	}
}

static void test_rmsnorm(void **state)
{
	(void)state;
	const int64_t s[] = {131, 37}, T = s[0], H = s[1];
	struct plain p = {.s = s, .forward = plain_rmsnorm, .num_in = 2, .in_size = {T * H, H}, .out_size = T * H};
	plain_init(&p);
	real *rstd = garbage(T), *dx = take(T * H, sizeof(real)), *dw = garbage(H), *scratch = garbage(row_sum_scratch(H));
	rmsnorm_forward(p.rout, rstd, p.rin[0], p.rin[1], T, H, norm_eps);
	check_forward(&p, "rmsnorm forward");
	for (int64_t i = 0; i < T * H; i++)
		dx[i] = 3; /* the backward pass adds to it */
	rmsnorm_backward(dx, dw, p.rprobe, p.rin[0], p.rin[1], rstd, T, H, false, scratch);
	for (int64_t i = 0; i < T * H; i++)
		dx[i] -= 3;
	check_backward(&p, 0, dx, "rmsnorm dx");
	check_backward(&p, 1, dw, "rmsnorm dw");
	free(rstd), free(dx), free(dw), free(scratch);
	plain_free(&p);
}

/* s = T, L, nh, nkv, d; rotates pairs (i, i + d/2) of query and key heads, leaves values. */
static void plain_rope(double *out, double *const in[], const int64_t *s)
{
	const int64_t T = s[0], L = s[1], nh = s[2], nkv = s[3], d = s[4], width = (nh + 2 * nkv) * d;
	memcpy(out, in[0], T * width * sizeof *out);
	for (int64_t t = 0; t < T; t++)
		for (int64_t head = 0; head < nh + nkv; head++)
			for (int64_t i = 0; i < d / 2; i++) {
				double angle = (t % L) * pow(100, -2.0 * i / d), *lo = out + t * width + head * d + i, *hi = lo + d / 2, a = *lo, b = *hi;
				*lo = a * cos(angle) - b * sin(angle);
				*hi = a * sin(angle) + b * cos(angle);
			}
}

/* Values whose squares overflow a float keep their size: a run that diverges must not look calm. */
static void test_rmsnorm_large(void **state)
{
	(void)state;
	const real x[2] = {(real)1e25, (real)-1e25}, w[2] = {1, 1};
	real out[2], rstd;
	rmsnorm_forward(out, &rstd, x, w, 1, 2, 1e-5);
	assert_true(fabs(out[0] - 1) < 1e-6 && fabs(out[1] + 1) < 1e-6);
}

static void test_rope(void **state)
{
	(void)state;
	const int64_t s[] = {14, 7, 4, 2, 6}, n = s[0] * 8 * s[4];
	struct plain p = {.s = s, .forward = plain_rope, .num_in = 1, .in_size = {n}, .out_size = n};
	plain_init(&p);
	real *table = take(s[1] * s[4], sizeof(real)), *dqkv = take(n, sizeof(real));
	rope_table(table, s[1], s[4], 100);
	memcpy(p.rout, p.rin[0], n * sizeof(real));
	rope_forward(p.rout, table, s[0], s[1], s[2], s[3], s[4]);
	check_forward(&p, "rope forward");
	memcpy(dqkv, p.rprobe, n * sizeof(real));
	rope_backward(dqkv, table, s[0], s[1], s[2], s[3], s[4]);
	check_backward(&p, 0, dqkv, "rope backward");
	free(table), free(dqkv);
	plain_free(&p);
}

/* ------------------------------------------------------------------------------------------------------------
 * Attention
 * ------------------------------------------------------------------------------------------------------------ */

/* s = B, L, nh, nkv, d */
static void plain_attention(double *out, double *const in[], const int64_t *s)
{
	const int64_t L = s[1], nh = s[2], nkv = s[3], d = s[4], width = (nh + 2 * nkv) * d;
	double *p = take(L, sizeof *p);
	for (int64_t b = 0; b < s[0]; b++)
		for (int64_t head = 0; head < nh; head++)
			for (int64_t i = 0; i < L; i++) {
				const double *q = in[0] + (b * L + i) * width + head * d, *keys = in[0] + b * L * width + (nh + head * nkv / nh) * d;
				double sum = 0, *o = out + ((b * L + i) * nh + head) * d;
				memset(o, 0, d * sizeof *o);
				for (int64_t j = 0; j <= i; j++) {
					double score = 0;
					for (int64_t c = 0; c < d; c++)
						score += q[c] * keys[j * width + c];
					sum += p[j] = exp(score / sqrt(d));
				}
				for (int64_t j = 0; j <= i; j++)
					for (int64_t c = 0; c < d; c++)
						o[c] += p[j] / sum * keys[j * width + nkv * d + c];
			}
	free(p);
}

static void test_attention(void **state)
{
	(void)state;
	/* lengths about the blocks of 64 to 256 queries and 512 keys */
	const int64_t sizes[][5] = {{1, 1, 1, 1, 2}, {3, 7, 4, 2, 6}, {2, 64, 2, 2, 4}, {1, 150, 6, 2, 4}, {2, 65, 3, 1, 8}, {1, 513, 1, 1, 2},
		{1, 1100, 2, 1, 2}};
	for (int c = 0; c < 7; c++) {
		const int64_t *s = sizes[c], B = s[0], L = s[1], nh = s[2], nkv = s[3], d = s[4], n = B * L * (nh + 2 * nkv) * d;
		struct plain p = {.s = s, .forward = plain_attention, .num_in = 1, .in_size = {n}, .out_size = B * L * nh * d};
		plain_init(&p);
		real *lse = garbage(B * L * nh), *dqkv = garbage(n), *scratch = garbage(attention_scratch());
		attention_forward(p.rout, lse, p.rin[0], B, L, nh, nkv, d, scratch);
		check_forward(&p, "attention forward");
		attention_backward(dqkv, p.rprobe, p.rout, lse, p.rin[0], B, L, nh, nkv, d, scratch);
		check_backward(&p, 0, dqkv, "attention backward");
		free(lse), free(dqkv), free(scratch);
		plain_free(&p);
	}
}

/* Scores far beyond exp's range: each query takes the value of the key that it likes most. */
static void test_attention_large_scores(void **state)
{
	(void)state;
	const real qkv[3][6] = {{1000, 0, 1000, 0, 1, 2}, {0, 1000, 0, 1000, 3, 4}, {1000, 0, 500, 500, 5, 6}};
	const real expected[3][2] = {{1, 2}, {3, 4}, {1, 2}};
	real out[3][2], lse[3], *scratch = garbage(attention_scratch());
	attention_forward(out[0], lse, qkv[0], 1, 3, 1, 1, 2, scratch);
	assert_memory_equal(out, expected, sizeof out);
	free(scratch);
}

/* ------------------------------------------------------------------------------------------------------------
 * SwiGLU
 * ------------------------------------------------------------------------------------------------------------ */

/* s = rows, I; in = gate_up, weight */
static void plain_swiglu(double *out, double *const in[], const int64_t *s)
{
	for (int64_t r = 0; r < s[0]; r++)
		for (int64_t i = 0; i < s[1]; i++) {
			double gate = in[0][r * 2 * s[1] + i], up = in[0][r * 2 * s[1] + s[1] + i];
			out[r * s[1] + i] = in[1][r] * up * gate / (1 + exp(-gate));
		}
}

static void test_swiglu(void **state)
{
	(void)state;
	const int64_t s[] = {9, 21}, rows = s[0], I = s[1];
	struct plain p = {.s = s, .forward = plain_swiglu, .num_in = 2, .in_size = {rows * 2 * I, rows}, .out_size = rows * I};
	plain_init(&p);
	real *dgate_up = garbage(rows * 2 * I), *act = garbage(rows * I), *dweight = garbage(rows);
	swiglu_forward(p.rout, p.rin[0], p.rin[1], rows, I);
	check_forward(&p, "swiglu forward");
	swiglu_backward(dgate_up, act, dweight, p.rprobe, p.rin[0], p.rin[1], rows, I);
	check_backward(&p, 0, dgate_up, "swiglu dgate_up");
	check_backward(&p, 1, dweight, "swiglu dweight");
	memcpy(p.rout, act, rows * I * sizeof(real));
	check_forward(&p, "swiglu activation, made again");
	/* without weights: as if all were 1 */
	for (int64_t r = 0; r < rows; r++)
		p.in[1][r] = 1;
	swiglu_forward(p.rout, p.rin[0], NULL, rows, I);
	check_forward(&p, "swiglu forward, no weight");
	swiglu_backward(dgate_up, act, NULL, p.rprobe, p.rin[0], NULL, rows, I);
	check_backward(&p, 0, dgate_up, "swiglu dgate_up, no weight");
	free(dgate_up), free(act), free(dweight);
	plain_free(&p);
}

/* ------------------------------------------------------------------------------------------------------------
 * Router
 * ------------------------------------------------------------------------------------------------------------ */

static void plain_softmax(double *p, const double *s, int64_t E)
{
	double max = -INFINITY, sum = 0;
	for (int64_t e = 0; e < E; e++)
		max = fmax(max, s[e]);
	for (int64_t e = 0; e < E; e++)
		sum += p[e] = exp(s[e] - max);
	for (int64_t e = 0; e < E; e++)
		p[e] /= sum;
}

/* s = T, E, k, renormalise; in = logits; out = weights [T, k] in falling order. */
static void plain_topk(double *out, double *const in[], const int64_t *s)
{
	const int64_t T = s[0], E = s[1], k = s[2];
	double p[64];
	for (int64_t t = 0; t < T; t++) {
		double sum = 0;
		plain_softmax(p, in[0] + t * E, E);
		for (int64_t j = 0; j < k; j++) {
			int64_t best = 0;
			for (int64_t e = 1; e < E; e++)
				best = p[e] > p[best] ? e : best;
			sum += out[t * k + j] = p[best];
			p[best] = -1;
		}
		for (int64_t j = 0; j < k && s[3]; j++)
			out[t * k + j] /= sum;
	}
}

static void test_topk(void **state)
{
	(void)state;
	const int64_t sizes[][4] = {{11, 8, 3, 1}, {11, 8, 3, 0}, {5, 7, 1, 0}, {5, 4, 4, 1}, {5, 4, 4, 0}};
	for (int c = 0; c < 5; c++) {
		const int64_t *s = sizes[c], T = s[0], E = s[1], k = s[2];
		struct plain p = {.s = s, .forward = plain_topk, .num_in = 1, .in_size = {T * E}, .out_size = T * k};
		plain_init(&p);
		real *prob = garbage(T * E), *ds = garbage(T * E), *lse = garbage(T);
		int32_t *index = take(T * k, sizeof *index);
		softmax_forward(prob, lse, p.rin[0], T, E);
		topk_forward(index, p.rout, prob, T, E, k, s[3]);
		check_forward(&p, "top-k weights");
		topk_backward(ds, p.rprobe, index, p.rout, prob, T, E, k, s[3]);
		check_backward(&p, 0, ds, "top-k backward");
		free(prob), free(ds), free(lse), free(index);
		plain_free(&p);
	}
}

/* Ties go to the lower index; NaN neither crashes nor chooses an expert twice. */
static void test_topk_ties(void **state)
{
	(void)state;
	const real p[4][5] = {{0.2f, 0.2f, 0.2f, 0.2f, 0.2f}, {0.1f, 0.3f, 0.1f, 0.3f, 0.2f}, {0, 0, 0, 1, 0}, {NAN, NAN, NAN, NAN, NAN}};
	const int32_t expected[4][3] = {{0, 1, 2}, {1, 3, 4}, {3, 0, 1}, {0, 1, 2}};
	int32_t index[4][3];
	real weight[4][3];
	topk_forward(index[0], weight[0], p[0], 4, 5, 3, true);
	assert_memory_equal(index, expected, sizeof expected);
	assert_true(isnan(weight[3][0]));
}

/* s = B, L, E, k; in = logits; out[0] = 0.3 * sum_e f_e p_e + 0.7 * lse^2, summed over tokens, with f fixed. */
static const real router_factor[] = {0.5f, 2, 0.1f, 1, 0.7f, 3, 0, 0.2f, 1, 1.5f};

static void plain_router_loss(double *out, double *const in[], const int64_t *s)
{
	double p[8];
	out[0] = 0;
	for (int64_t t = 0; t < s[0] * s[1]; t++) {
		const double *logits = in[0] + t * s[2];
		double sum = 0;
		plain_softmax(p, logits, s[2]);
		for (int64_t e = 0; e < s[2]; e++) {
			out[0] += 0.3 * router_factor[t / s[1] * s[2] + e] * p[e];
			sum += exp(logits[e]);
		}
		out[0] += 0.7 * log(sum) * log(sum);
	}
}

static void test_router_losses(void **state)
{
	(void)state;
	const int64_t s[] = {2, 3, 5, 2}, T = 6, E = 5;
	struct plain p = {.s = s, .forward = plain_router_loss, .num_in = 1, .in_size = {T * E}, .out_size = 1};
	plain_init(&p);
	p.probe[0] = 1;
	real *prob = garbage(T * E), *ds = take(T * E, sizeof(real)), *lse = garbage(T), *weight = garbage(T * 2);
	int32_t *index = take(T * 2, sizeof *index);
	struct router_sums sums[2];
	double count[10], p_sum[10], expected_loss = 0;
	softmax_forward(prob, lse, p.rin[0], T, E);
	topk_forward(index, weight, prob, T, E, 2, true);
	router_statistics(sums, count, p_sum, p.rin[0], prob, lse, index, 0, T, 2, 3, E, 2);
	for (int i = 0; i < 10; i++)
		expected_loss += 0.3 * router_factor[i] * p_sum[i];
	p.rout[0] = (real)(expected_loss + 0.7 * (sums[0].z + sums[1].z));
	check_forward(&p, "router losses");
	router_loss_backward(ds, prob, lse, router_factor, 0, T, 3, E, 0.3, 0.7);
	check_backward(&p, 0, ds, "router losses backward");
	/* The statistics, counted again by hand. */
	for (int b = 0; b < 2; b++) {
		double total = 0, sum = 0, squares = 0;
		for (int e = 0; e < 5; e++) {
			double n = 0;
			for (int i = b * 6; i < b * 6 + 6; i++)
				n += index[i] == e;
			assert_true(count[b * 5 + e] == n);
			total += n;
		}
		assert_true(total == 6);
		for (int i = b * 15; i < b * 15 + 15; i++)
			sum += p.rin[0][i], squares += (double)p.rin[0][i] * p.rin[0][i];
		assert_true(fabs(sums[b].s - sum) < 1e-12 && fabs(sums[b].s_squared - squares) < 1e-12);
	}
	free(prob), free(ds), free(lse), free(weight), free(index);
	plain_free(&p);
}

static void test_routing_noise(void **state)
{
	(void)state;
	const int64_t T = 500, E = 7;
	struct random_stream stream = {.seed = 11, .purpose = RANDOM_ROUTING, .step = 3};
	real *s = take(T * E, sizeof *s), *noisy = garbage(T * E), *part = garbage(2 * E), eps[7];
	double sum = 0, squares = 0;
	for (int64_t i = 0; i < T * E; i++)
		s[i] = (real)i;
	routing_noise_forward(noisy, s, 0, 5, 2, &stream, T, E); /* alpha 0: noise alone */
	for (int64_t i = 0; i < T * E; i++)
		sum += noisy[i], squares += (noisy[i] - 5.0) * (noisy[i] - 5);
	assert_true(fabs(sum / (T * E) - 5) < 0.1 && fabs(squares / (T * E) - 4) < 0.3);
	/* A token's noise does not depend on where its micro-batch begins. */
	stream.first = 123 * E;
	routing_noise_forward(part, s, 0, 5, 2, &stream, 2, E);
	assert_memory_equal(part, noisy + 123 * E, 2 * E * sizeof *part);
	stream.first = 0;
	random_normal(eps, E, &stream, 4 * E);
	routing_noise_forward(noisy, s, 0.25, 5, 2, &stream, T, E);
	for (int e = 0; e < 7; e++)
		assert_true(fabs(noisy[4 * E + e] - (0.25 * s[4 * E + e] + 0.75 * (5 + 2.0 * eps[e]))) < 1e-5);
	free(s), free(noisy), free(part);
}

/* ------------------------------------------------------------------------------------------------------------
 * Dispatch
 * ------------------------------------------------------------------------------------------------------------ */

static void test_dispatch(void **state)
{
	(void)state;
	enum { T = 5, K = 2, E = 4, H = 3 };
	const int32_t index[T * K] = {3, 0, 0, 3, 0, 1, 3, 1, 1, 0}; /* nobody chose expert 2 */
	int64_t offset[E + 1];
	int32_t position[T * K], token[T * K];
	dispatch_plan(offset, position, token, index, T * K, K, E);
	const int64_t expected_offset[] = {0, 4, 7, 7, 10};
	const int32_t expected_token[] = {0, 1, 2, 4, 2, 3, 4, 0, 1, 3}, expected_position[] = {7, 0, 1, 8, 2, 4, 9, 5, 6, 3};
	assert_memory_equal(offset, expected_offset, sizeof offset);
	assert_memory_equal(token, expected_token, sizeof token);
	assert_memory_equal(position, expected_position, sizeof position);
	real x[T * H], rows[T * K * H], y[T * H], weight[T * K], sorted[T * K], back[T * K];
	for (int i = 0; i < T * H; i++)
		x[i] = (real)(i + 1);
	gather_rows(rows, x, token, T * K, H);
	for (int r = 0; r < T * K; r++)
		assert_memory_equal(rows + r * H, x + token[r] * H, sizeof(real) * H);
	combine_rows(y, rows, position, T, K, H, false);
	for (int i = 0; i < T * H; i++)
		assert_true(y[i] == K * x[i]);
	combine_rows(y, rows, position, T, K, H, true);
	for (int i = 0; i < T * H; i++)
		assert_true(y[i] == 2 * K * x[i]);
	for (int i = 0; i < T * K; i++)
		weight[i] = (real)i;
	permute_forward(sorted, weight, position, T * K);
	for (int i = 0; i < T * K; i++)
		assert_true(sorted[position[i]] == weight[i]);
	permute_backward(back, sorted, position, T * K);
	assert_memory_equal(back, weight, sizeof weight);
}

/* ------------------------------------------------------------------------------------------------------------
 * Head
 * ------------------------------------------------------------------------------------------------------------ */

static const int32_t targets[] = {4, -1, 0, 8, 8};

/* in = logits [5, V]; out = the loss summed over valid targets, times 0.25. */
static void plain_cross_entropy(double *out, double *const in[], const int64_t *s)
{
	out[0] = 0;
	for (int t = 0; t < 5; t++) {
		double p[9];
		plain_softmax(p, in[0] + t * s[0], s[0]);
		out[0] -= targets[t] < 0 ? 0 : 0.25 * log(p[targets[t]]);
	}
}

static void test_cross_entropy(void **state)
{
	(void)state;
	const int64_t V = 9;
	struct plain p = {.s = &V, .forward = plain_cross_entropy, .num_in = 1, .in_size = {5 * V}, .out_size = 1};
	plain_init(&p);
	p.probe[0] = 1;
	double loss[5], sums[5], sum = 0;
	real max[5];
	logits_max(max, p.rin[0], 5, V);
	cross_entropy_forward(loss, sums, p.rin[0], max, targets, 0, 5, V);
	for (int t = 0; t < 5; t++)
		sum += targets[t] < 0 ? 0 : 0.25 * (loss[t] + log(sums[t]));
	assert_true(loss[1] == 0);
	p.rout[0] = (real)sum;
	check_forward(&p, "cross-entropy forward");
	cross_entropy_backward(p.rin[0], sums, targets, 0, 0.25, 5, V);
	check_backward(&p, 0, p.rin[0], "cross-entropy backward");
	for (int v = 0; v < V; v++)
		assert_true(p.rin[0][V + v] == 0);
	plain_free(&p);
}

/* Huge logits stay finite; NaN and infinity show. */
static void test_cross_entropy_extremes(void **state)
{
	(void)state;
	const int32_t target[] = {0, 1, 0};
	real logits[] = {1e4f, -1e4f, 0, 1e4f, -1e4f, 0, 1, NAN, 1}, max[3];
	double loss[3], sum[3];
	logits_max(max, logits, 3, 3);
	cross_entropy_forward(loss, sum, logits, max, target, 0, 3, 3);
	for (int t = 0; t < 3; t++)
		loss[t] += log(sum[t]);
	assert_true(fabs(loss[0]) < 1e-6);
	assert_true(fabs(loss[1] - 2e4) < 1e-2);
	assert_true(isnan(loss[2]));
}

static void test_column_norms(void **state)
{
	(void)state;
	enum { V = 5, H = 70 };
	real w[V * H];
	double sum[H];
	for (int i = 0; i < V * H; i++)
		w[i] = (real)(i % 13 - 6);
	column_sum_of_squares(sum, w, V, H);
	for (int j = 0; j < H; j++) {
		double expected = 0;
		for (int v = 0; v < V; v++)
			expected += (double)w[v * H + j] * w[v * H + j];
		assert_true(sum[j] == expected);
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * Optimizer and norms
 * ------------------------------------------------------------------------------------------------------------ */

static void test_adamw(void **state)
{
	(void)state;
	enum { N = 1003 };
	real w[N], g[N], m[N] = {0}, v[N] = {0};
	double pw[N], pm[N] = {0}, pv[N] = {0};
	struct random_stream stream = {.seed = 5};
	random_normal(w, N, &stream, 0);
	for (int i = 0; i < N; i++)
		pw[i] = w[i];
	struct adamw o = {.lr = 1e-2, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_scale = 0.5};
	for (o.step = 1; o.step <= 5; o.step++) {
		random_normal(g, N, &stream, o.step * 1000000);
		adamw_update(w, m, v, g, N, &o);
		for (int i = 0; i < N; i++) {
			double gradient = 0.5 * g[i];
			pm[i] = 0.9 * pm[i] + 0.1 * gradient;
			pv[i] = 0.95 * pv[i] + 0.05 * gradient * gradient;
			double m_hat = pm[i] / (1 - pow(0.9, o.step)), v_hat = pv[i] / (1 - pow(0.95, o.step));
			pw[i] -= 1e-2 * (m_hat / (sqrt(v_hat) + 1e-8) + 0.1 * pw[i]);
		}
	}
	assert_close(w, pw, N, sizeof(real) == 8 ? 1e-12 : 1e-6, "AdamW");
}

static void test_sums(void **state)
{
	(void)state;
	const int64_t sizes[] = {0, 1, 63, 64, 65, 100000};
	for (int c = 0; c < 6; c++) {
		real *x = take(sizes[c], sizeof *x);
		double expected = 0;
		for (int64_t i = 0; i < sizes[c]; i++) {
			x[i] = (real)(i % 7);
			expected += (double)x[i] * x[i];
		}
		assert_true(sum_of_squares(x, sizes[c]) == expected);
		free(x);
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * Random numbers
 * ------------------------------------------------------------------------------------------------------------ */

static void test_philox(void **state)
{
	(void)state;
	/* Known answers published with Random123. */
	const uint32_t counter[3][4] = {{0, 0, 0, 0}, {~0u, ~0u, ~0u, ~0u}, {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}};
	const uint32_t key[3][2] = {{0, 0}, {~0u, ~0u}, {0xa4093822, 0x299f31d0}};
	const uint32_t expected[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}, {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd},
			{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
	for (int i = 0; i < 3; i++) {
		uint32_t out[4];
		philox(out, counter[i], key[i]);
		assert_memory_equal(out, expected[i], sizeof out);
	}
}

static void test_random_streams(void **state)
{
	(void)state;
	enum { N = 100001 };
	static real all[N], part[N];
	struct random_stream s = {.seed = 42, .purpose = RANDOM_INIT, .step = 9};
	double mean = 0, variance = 0;
	random_normal(all, N, &s, 0);
	for (int i = 0; i < N; i++)
		mean += all[i] / (double)N, variance += (double)all[i] * all[i] / N;
	assert_true(fabs(mean) < 0.02 && fabs(variance - 1) < 0.02);
	for (int first = 0; first < 9; first++) { /* any piece equals the same piece of the whole */
		random_normal(part, 57, &s, first);
		assert_memory_equal(part, all + first, 57 * sizeof *part);
	}
	random_uniform(part, N, &s, 0);
	mean = 0;
	for (int i = 0; i < N; i++) {
		assert_true(part[i] > 0 && part[i] <= 1);
		mean += part[i] / (double)N;
	}
	assert_true(fabs(mean - 0.5) < 0.01);
	s.step = 10;
	random_normal(part, N, &s, 0);
	assert_memory_not_equal(part, all, sizeof all);
}

static void test_permutation(void **state)
{
	(void)state;
	const uint64_t sizes[] = {1, 2, 3, 4, 5, 16, 17, 1000, 65537};
	for (int c = 0; c < 9; c++) {
		uint64_t n = sizes[c], fixed = 0;
		bool *seen = take(n, 1);
		struct random_stream s = {.seed = 3, .purpose = RANDOM_SHUFFLE, .step = 1};
		for (uint64_t i = 0; i < n; i++) {
			uint64_t image = random_permute(i, n, &s);
			assert_true(image < n && !seen[image]);
			seen[image] = true;
			fixed += image == i;
		}
		if (n >= 1000)
			assert_true(fixed < 10); /* about one is expected */
		free(seen);
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * Threads
 * ------------------------------------------------------------------------------------------------------------ */

/* Results do not depend on the number of threads, but for matrix products, which are the same for the same number. */
static void test_threads(void **state)
{
	(void)state;
	enum { T = 300, H = 130 };
	real *x = take(T * H, sizeof *x), *w = take(H * H, sizeof *w), *out[3], *product[2], *rstd = take(T, sizeof *rstd);
	struct random_stream s = {.seed = 1};
	const int before = omp_get_max_threads();
	random_normal(x, T * H, &s, 0);
	random_normal(w, H * H, &s, T * H);
	for (int threads = 1; threads <= 3; threads++) {
		omp_set_num_threads(threads);
		real *y = out[threads - 1] = take(2 * T * H, sizeof *y), *scratch = take(row_sum_scratch(H), sizeof *scratch);
		rmsnorm_forward(y, rstd, x, w, T, H, 1e-5);
		rmsnorm_backward(y + T * H, y, x, x, w, rstd, T, H, true, scratch);
		embedding_backward(y, (int32_t[]){1, 1, 0, 2, 2}, x, 0, 5, H, 3, true);
		y[0] = (real)sum_of_squares(x, T * H);
		for (int i = 0; i < 2; i++) {
			product[i] = take(T * H, sizeof *product[i]);
			matmul_forward(product[i], x, w, w, T, H, H, false);
		}
		assert_memory_equal(product[0], product[1], T * H * sizeof *product[0]);
		free(scratch), free(product[0]), free(product[1]);
	}
	omp_set_num_threads(before);
	for (int i = 1; i < 3; i++) {
		assert_memory_equal(out[i], out[0], 2 * T * H * sizeof *out[0]);
		free(out[i]);
	}
	free(x), free(w), free(rstd), free(out[0]);
}

int main(void)
{
	kernels_init(false);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_matmul), cmocka_unit_test(test_grouped_matmul), cmocka_unit_test(test_row_lists),
		cmocka_unit_test(test_product_blocks), cmocka_unit_test(test_embedding),
		cmocka_unit_test(test_rmsnorm), cmocka_unit_test(test_rmsnorm_large), cmocka_unit_test(test_rope), cmocka_unit_test(test_attention),
		cmocka_unit_test(test_attention_large_scores), cmocka_unit_test(test_swiglu), cmocka_unit_test(test_topk),
		cmocka_unit_test(test_topk_ties), cmocka_unit_test(test_router_losses), cmocka_unit_test(test_routing_noise),
		cmocka_unit_test(test_dispatch), cmocka_unit_test(test_cross_entropy), cmocka_unit_test(test_cross_entropy_extremes),
		cmocka_unit_test(test_column_norms), cmocka_unit_test(test_adamw), cmocka_unit_test(test_sums),
		cmocka_unit_test(test_philox), cmocka_unit_test(test_random_streams), cmocka_unit_test(test_permutation),
		cmocka_unit_test(test_threads),
	};
	return cmocka_run_group_tests_name("kernels", tests, NULL, NULL);
}
