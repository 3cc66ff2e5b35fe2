/*
 * test_kernels.c - the program's own self-check of every kernel, and what a comparison with a reference does not show:
 * exact zeros, order, bits that do not depend on neighbours or threads, and extreme values. Built twice: in float, as
 * ling runs, and in double, where the errors are much smaller.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "kernels.h"
#include "commands/self_check.h"

#include <math.h>
#include <omp.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test.h"

/* n reals that are NaN, which stays if a kernel does not write an element or adds to it. Release with free(). */
static real *nan_array(int64_t n)
{
	real *x = allocate(n * sizeof *x);
	for (int64_t i = 0; i < n; i++)
		x[i] = NAN;
	return x;
}

/* n standard normal numbers, which depend on the seed. Release with free(). */
static real *normal_array(int64_t n, uint64_t seed)
{
	real *x = allocate(n * sizeof *x);
	random_normal(x, n, &(struct random_stream){.seed = seed}, 0);
	return x;
}

static void test_self_check(void **state)
{
	(void)state;
	struct check checks[MAX_CHECKS];
	double *work = allocate(self_check_scratch() * sizeof *work);
	const int n = self_check(checks, work);
	for (int i = 0; i < n; i++)
		if (!(checks[i].forward <= (sizeof(real) == 8 ? 1e-12 : CHECK_BOUND) && checks[i].backward <= CHECK_BOUND))
			fail_msg("%s: relative error %g forward, %g backward", checks[i].operation, checks[i].forward,
					checks[i].backward);
	assert_in_range(n, 14, MAX_CHECKS);
	free(work);
}

/* ------------------------------------------------------------------------------------------------------------
 * Matrix products
 * ------------------------------------------------------------------------------------------------------------ */

/* The gradient of an expert without tokens is exactly 0, and with `accumulate` it stays what it was. */
static void test_empty_group(void **state)
{
	(void)state;
	enum { R = 6, K = 13, N = 27 };
	const int64_t offset[] = {0, 1, 1, R};
	real *x = normal_array(R * K, 1), *dy = normal_array(R * N, 2), *dw = nan_array(3 * N * K);
	grouped_matmul_backward_weight(dw, dy, NULL, x, NULL, offset, 3, K, N, false);
	for (int64_t i = 0; i < N * K; i++)
		assert_true(dw[N * K + i] == 0);
	dw[N * K] = 3;
	grouped_matmul_backward_weight(dw, dy, NULL, x, NULL, offset, 3, K, N, true);
	assert_true(dw[N * K] == 3);
	free(x), free(dy), free(dw);
}

/* A product with a list of rows gives the bits of a product with a copy of these rows. */
static void test_row_lists(void **state)
{
	(void)state;
	enum { T = 40, R = 97, K = 37, N = 45, G = 3 };
	const int64_t offset[G + 1] = {0, 60, 60, R};
	int32_t row[R];
	for (int r = 0; r < R; r++)
		row[r] = (r * 29 + 3) % T;
	real *x = normal_array(T * K, 1), *dy = normal_array(R * N, 2), *w = normal_array(G * N * K, 3);
	real *rows = nan_array(R * K), *dy_rows = nan_array(R * N);
	real *listed = nan_array(G * N * K), *copied = nan_array(G * N * K);
	gather_rows(rows, x, row, R, K);
	struct weight weights[G];
	stack_weights(weights, w, G, N * K);
	grouped_matmul_forward(listed, x, row, weights, offset, G, K, N, false);
	grouped_matmul_forward(copied, rows, NULL, weights, offset, G, K, N, false);
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

/* A weight in two parts, in float or in bfloat16, as a file may have it, gives the bits of the same numbers in one
 * array of reals; for few rows and for many. */
static void test_weights_in_place(void **state)
{
	(void)state;
	enum { G = 3 };
	static const int64_t sizes[][3] = {{1, 5, 2}, {4, 37, 46}, {14, 401, 90}, {16, 800, 64}, {3, 3101, 70},
			{40, 385, 902}, {130, 64, 34}, {5, 9, 3100}};
	for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
		const int64_t R = sizes[c][0], K = sizes[c][1], N = sizes[c][2], offset[G + 1] = {0, R - R / 3, R - R / 3, R};
		real *x = normal_array(R * K, 1), *w = normal_array(G * N * K, 2), *y = nan_array(R * N);
		real *again = nan_array(R * N), *act = nan_array(R * N / 2), *act_again = nan_array(R * N / 2);
		/* The first halves of all weights, then the second ones, with NaN after each; at an address that is no
		 * multiple of 4. */
		const int64_t size = N / 2 * K;
		real *apart = nan_array(4 * G * size);
		uint16_t *half = malloc((4 * G * size + 1) * sizeof *half), *halves = half + 1;
		double sums[K], sums_again[K];
		for (int64_t i = 0; i < 4 * G * size; i++)
			halves[i] = 0x7fc0;
		for (int64_t i = 0; i < G * N * K; i++) {
			const int64_t at = (i / size % 2 * G + i / size / 2) * 2 * size + i % size;
			float f = (float)w[i];
			uint32_t bits;
			memcpy(&bits, &f, 4);
			halves[at] = bits >> 16;
			bits &= 0xffff0000;
			memcpy(&f, &bits, 4);
			apart[at] = w[i] = f;
		}
		struct weight weights[G];
		stack_weights(weights, w, G, N * K);
		grouped_matmul_forward(y, x, NULL, weights, offset, G, K, N, false);
		swiglu_forward(act, again, x, NULL, weights, NULL, offset, G, K, N / 2);
		for (int form = 0; form < 2; form++) {
			for (int64_t g = 0; g < G; g++) {
				const int64_t first = g * 2 * size, second = (G + g) * 2 * size;
				weights[g] = form == 0 ? (struct weight){.data = apart + first, .second = apart + second}
						: (struct weight){.data = halves + first, .second = halves + second, .bf16 = true};
			}
			grouped_matmul_forward(again, x, NULL, weights, offset, G, K, N, false);
			assert_memory_equal(again, y, R * N * sizeof *y);
			for (int64_t i = 0; i < R * N; i++)
				again[i] = NAN;
			swiglu_forward(act_again, again, x, NULL, weights, NULL, offset, G, K, N / 2);
			assert_memory_equal(again, y, R * N * sizeof *y);
			assert_memory_equal(act_again, act, R * N / 2 * sizeof *act);
		}
		const int32_t token[] = {(int32_t)N / 2 - 1, 0};
		real rows[2 * K];
		weights[0] = (struct weight){.data = halves, .bf16 = true}; /* the first half of the first weight */
		embedding_forward(rows, token, weights, 0, 2, K, N / 2);
		assert_memory_equal(rows, w + (N / 2 - 1) * K, K * sizeof *rows);
		assert_memory_equal(rows + K, w, K * sizeof *rows);
		column_sum_of_squares(sums, &(struct weight){.data = w}, N / 2, K);
		column_sum_of_squares(sums_again, weights, N / 2, K);
		assert_memory_equal(sums, sums_again, sizeof sums);
		free(x), free(w), free(y), free(again), free(act), free(act_again), free(half), free(apart);
	}
}

/* The largest error of an element c[i, j] of c [m, n] = the sum over p < k of a[i * a_row + p * a_k] * b[j * b_col + p
 * * b_k], relative to the sum of the absolute values of the terms; NaN if an element is NaN. */
static double product_difference(const real *c, int64_t m, int64_t n, int64_t k, const real *a, int64_t a_row,
		int64_t a_k, const real *b, int64_t b_col, int64_t b_k)
{
	double worst = 0;
	for (int64_t i = 0; i < m; i++)
		for (int64_t j = 0; j < n; j++) {
			double sum = 0, size = 0;
			for (int64_t p = 0; p < k; p++) {
				const double term = (double)a[i * a_row + p * a_k] * b[j * b_col + p * b_k];
				sum += term;
				size += fabs(term);
			}
			worst = fmax(worst, fabs(c[i * n + j] - sum) / size);
			if (isnan(c[i * n + j]))
				return NAN;
		}
	return worst;
}

/* Sizes that are beyond MR, NR, MC, NC and KC, and leading dimensions with which A is read in place (256) and with
 * which it is packed. The bits of a row do not depend on the other rows or on the number of threads. */
static void test_product_blocks(void **state)
{
	(void)state;
	static const int64_t sizes[][3] = {{301, 403, 801}, {256, 256, 256}, {130, 256, 100}, {5, 771, 31}, {1, 1, 1},
			{33, 1702, 50}};
	for (size_t c = 0; c < sizeof sizes / sizeof *sizes; c++) {
		const int64_t T = sizes[c][0], K = sizes[c][1], N = sizes[c][2];
		real *x = normal_array(T * K, 1), *w = normal_array(N * K, 2), *y = nan_array(T * N);
		real *again = nan_array(T * N), *dw = nan_array(N * K), *dx = nan_array(T * K);
		const struct weight weight = {.data = w};
		matmul_forward(y, x, &weight, NULL, T, K, N, false);
		matmul_backward_input(dx, y, w, T, K, N, false);
		matmul_backward_weight(dw, y, x, T, K, N, false);
		const double bound = sizeof(real) == 4 ? 1e-6 : 1e-15;
		assert_true(product_difference(y, T, N, K, x, K, 1, w, K, 1) < bound);
		assert_true(product_difference(dx, T, K, N, y, N, 1, w, 1, K) < bound);
		assert_true(product_difference(dw, N, K, T, y, 1, N, x, 1, K) < bound);
		for (int64_t t = 0; t < T; t += 7)
			matmul_forward(again + t * N, x + t * K, &weight, NULL, T - t < 7 ? T - t : 7, K, N, false);
		assert_memory_equal(again, y, T * N * sizeof *y);
		const int threads = omp_get_max_threads();
		real *other = nan_array(N * K);
		for (int n = 1; n <= 5; n++) {
			omp_set_num_threads(n);
			matmul_forward(again, x, &weight, NULL, T, K, N, false);
			assert_memory_equal(again, y, T * N * sizeof *y);
			matmul_backward_weight(other, y, x, T, K, N, false);
			assert_memory_equal(other, dw, N * K * sizeof *dw);
		}
		omp_set_num_threads(threads);
		free(x), free(w), free(y), free(again), free(dw), free(dx), free(other);
	}
}

/* A product of few rows has the bits of these rows in a product of many: for each number of rows, in groups and with a
 * list of rows; with sizes that are no multiples of blocks, and sums that become -0; written and added to; by several
 * threads; with weights in float and in bfloat16. */
static void test_few_rows(void **state)
{
	(void)state;
	enum { MANY = 200 }; /* one thread has tiles of at least 88 of these rows, which are no few rows */
	static const int64_t sizes[][2] = {{1, 1}, {7, 33}, {16, 16}, {17, 31}, {95, 130}, {384, 48}, {385, 65}, {801, 77},
			{1551, 40}, {3101, 19}};
	const int threads = omp_get_max_threads();
	for (size_t c = 0; c < COUNT(sizes); c++) {
		const int64_t K = sizes[c][0], N = sizes[c][1];
		real *x = normal_array(MANY * K, 1), *w = normal_array(3 * N * K, 2), *y = normal_array(MANY * N, 3);
		real *written = nan_array(MANY * N), *added = nan_array(MANY * N), *few = nan_array(MANY * N);
		uint16_t *half = malloc(3 * N * K * sizeof *half);
		for (int64_t i = 0; i < K; i++) { /* all terms of the first element become 0 or -0 */
			x[i] *= sizeof(real) == 4 ? (real)1e-30 : (real)1e-300;
			w[i] *= (real)1e-30;
		}
		for (int64_t i = 0; i < 3 * N * K; i++) {
			half[i] = float_to_bf16((float)w[i]);
			w[i] = bf16_to_float(half[i]);
		}
		struct weight weights[2][3];
		int32_t row[MANY];
		stack_weights(weights[0], w, 3, N * K);
		for (int64_t g = 0; g < 3; g++)
			weights[1][g] = (struct weight){.data = half + g * N * K, .bf16 = true};
		for (int r = 0; r < MANY; r++)
			row[r] = (r * 29 + 3) % MANY;
		memcpy(added, y, MANY * N * sizeof *y);
		omp_set_num_threads(1);
		matmul_forward(written, x, weights[0], NULL, MANY, K, N, false);
		matmul_forward(added, x, weights[0], NULL, MANY, K, N, true);
		for (int64_t rows = 1; rows < 70; rows += rows < 18 ? 1 : 9)
			for (int form = 0; form < 6; form++) {
				const struct weight *weight = weights[form % 2];
				omp_set_num_threads(1 + form / 2);
				matmul_forward(few, x, weight, NULL, rows, K, N, false);
				assert_memory_equal(few, written, rows * N * sizeof *few);
				memcpy(few, y, rows * N * sizeof *few);
				matmul_forward(few, x, weight, NULL, rows, K, N, true);
				assert_memory_equal(few, added, rows * N * sizeof *few);
			}
		for (int64_t each = 0; each < 9; each += 2) { /* groups of `each` rows; 1 more in the middle; by a list */
			const int64_t offset[] = {0, each, 2 * each + 1, 3 * each + 1}, R = offset[3];
			real *grouped = nan_array(R * N), *one = nan_array(MANY * N);
			for (int form = 0; form < 2; form++) {
				omp_set_num_threads(1 + 2 * form);
				grouped_matmul_forward(grouped, x, row, weights[form], offset, 3, K, N, false);
				omp_set_num_threads(1);
				for (int g = 0; g < 3; g++) {
					matmul_forward(one, x, &weights[form][g], NULL, MANY, K, N, false);
					for (int64_t r = offset[g]; r < offset[g + 1]; r++)
						assert_memory_equal(grouped + r * N, one + row[r] * N, N * sizeof *one);
				}
			}
			free(grouped), free(one);
		}
		omp_set_num_threads(threads);
		free(x), free(w), free(y), free(written), free(added), free(few), free(half);
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * Extremes
 * ------------------------------------------------------------------------------------------------------------ */

/* Values whose squares are beyond float give the right result: otherwise they would become 0, and a run that diverges
 * would look well. */
static void test_rmsnorm_large(void **state)
{
	(void)state;
	const real x[2] = {(real)1e25, (real)-1e25}, w[2] = {1, 1};
	real out[2], rstd;
	rmsnorm_forward(out, &rstd, x, w, 1, 2, 1e-5);
	assert_true(fabs(out[0] - 1) < 1e-6 && fabs(out[1] + 1) < 1e-6);
}

/* Scores far beyond the range of exp: the output of each query is the value of its best key. */
static void test_attention_large_scores(void **state)
{
	(void)state;
	const real qkv[3][6] = {{1000, 0, 1000, 0, 1, 2}, {0, 1000, 0, 1000, 3, 4}, {1000, 0, 500, 500, 5, 6}};
	const real expected[3][2] = {{1, 2}, {3, 4}, {1, 2}};
	real out[3][2], lse[3], *work = nan_array(attention_scratch(2));
	attention_forward(out[0], lse, qkv[0], NULL, 1, 3, 1, 1, 2, work);
	assert_memory_equal(out, expected, sizeof out);
	free(work);
}

/* ------------------------------------------------------------------------------------------------------------
 * Router
 * ------------------------------------------------------------------------------------------------------------ */

/* Among equals the lower index is chosen. With NaN, k different experts are chosen. */
static void test_topk_ties(void **state)
{
	(void)state;
	const real p[4][5] = {{0.2f, 0.2f, 0.2f, 0.2f, 0.2f}, {0.1f, 0.3f, 0.1f, 0.3f, 0.2f}, {0, 0, 0, 1, 0},
			{NAN, NAN, NAN, NAN, NAN}};
	const int32_t expected[4][3] = {{0, 1, 2}, {1, 3, 4}, {3, 0, 1}, {0, 1, 2}};
	int32_t index[4][3];
	real weight[4][3];
	topk_forward(index[0], weight[0], p[0], NULL, 4, 5, &(struct routing){.k = 3, .groups = 1, .top_groups = 1,
			.normalise = true, .scale = 1});
	assert_memory_equal(index, expected, sizeof expected);
	assert_true(isnan(weight[3][0]));
}

/* A sigmoid's scores, in float and in double, at both ends and in between; the log-sum-exp is that of the logits. */
static void test_sigmoid_scores(void **state)
{
	(void)state;
	enum { N = 401 };
	real s[N], p[N], again[N], lse;
	double sum = 0;
	for (int i = 0; i < N; i++) {
		s[i] = (real)((i - N / 2) * 0.5); /* -100 .. 100 */
		sum += exp(s[i] - 100);
	}
	scores_forward(p, &lse, s, 1, N, true);
	for (int i = 0; i < N; i++) {
		const double expected = s[i] >= 0 ? 1 / (1 + exp(-s[i])) : exp(s[i]) / (1 + exp(s[i]));
		/* below 2^-126 a float has fewer digits, down to 1.4e-45 */
		assert_true(fabs(p[i] - expected) <= 3 * (sizeof(real) == 4 ? 1.2e-7 : 2.3e-16) * expected + 1.5e-45);
		assert_true(p[i] > 0 && p[i] <= 1);
	}
	assert_true(fabs(lse - (100 + log(sum))) < 1e-5);
	memcpy(again, s, sizeof s);
	scores_forward(again, NULL, again, 1, N, true); /* in place */
	assert_memory_equal(again, p, sizeof p);
	const real wild[3] = {NAN, INFINITY, -INFINITY};
	scores_forward(p, NULL, wild, 1, 3, true);
	assert_true(isnan(p[0]) && p[1] == 1 && p[2] == 0);
}

/* Groups: those with the largest sums of two; ties go to the lower group and the lower expert, a bias counts in the
 * choice alone, and NaN is chosen. */
static void test_topk_groups(void **state)
{
	(void)state;
	enum { E = 8, K = 3 };
	const struct routing r = {.sigmoid = true, .k = K, .groups = 4, .top_groups = 2, .normalise = true, .scale = 2};
	const real p[5][E] = {
		{0.9f, 0.1f, 0.5f, 0.6f, 0.5f, 0.6f, 0.2f, 0.2f}, /* sums 1, 1.1, 1.1, 0.4: the best expert is left out */
		{0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f, 0.5f}, /* all alike */
		{0.1f, 0.1f, 0.2f, 0.2f, 0.1f, 0.1f, 0.2f, 0.2f}, /* groups 1 and 3 */
		{0.1f, 0.2f, 0.1f, 0.2f, 0.1f, NAN, 0.9f, 0.9f}, /* group 2, for NaN is not hidden, and group 3 */
		{1, 1, 0.5f, 0.5f, 0.25f, 0.25f, 0, 0},
	}, bias[E] = {-2, -2, -1.5f, -1.5f, -1.5f, -0.5f, -3, -3}; /* all scores are negative then */
	const int32_t expected[5][K] = {{3, 5, 2}, {0, 1, 2}, {2, 3, 6}, {5, 6, 7}, {5, 0, 1}}, /* the last with the bias */
			unbiased[K] = {0, 1, 2};
	int32_t index[5][K];
	real weight[5][K];
	topk_forward(index[0], weight[0], p[0], NULL, 4, E, &r);
	topk_forward(index[4], weight[4], p[4], bias, 1, E, &r);
	assert_memory_equal(index, expected, sizeof expected);
	assert_true(fabs(weight[0][0] - 2 * 0.6 / 1.7) < 1e-6 && fabs(weight[1][2] - 2.0 / 3) < 1e-6);
	assert_true(isnan(weight[3][1]));
	assert_true(fabs(weight[4][0] - 2 * 0.25 / 2.25) < 1e-6 && fabs(weight[4][1] - 2 / 2.25) < 1e-6);
	topk_forward(index[4], weight[4], p[4], NULL, 1, E, &r);
	assert_memory_equal(index[4], unbiased, sizeof unbiased);

	/* scores so small that their sum is nothing beside 1e-20, or zero: the weights are finite */
	real s[E], small[E];
	for (int e = 0; e < E; e++)
		s[e] = (real)(-100 - e);
	scores_forward(small, NULL, s, 1, E, true);
	topk_forward(index[0], weight[0], small, NULL, 1, E, &r);
	assert_memory_equal(index[0], unbiased, sizeof unbiased);
	assert_true(weight[0][0] >= 0 && weight[0][0] < 1e-20);
}

/* Many experts in groups beside plain loops that mark what is chosen; many scores and biases are equal. */
static void test_topk_many(void **state)
{
	(void)state;
	enum { T = 200, E = 256, K = 8, G = 8, TOP = 4, SIZE = E / G };
	const struct routing r = {.sigmoid = true, .k = K, .groups = G, .top_groups = TOP, .normalise = true, .scale = 2.5};
	real *p = allocate(T * E * sizeof *p), bias[E], weight[T * K];
	int32_t index[T * K];
	random_uniform(p, T * E, &(struct random_stream){.seed = 3}, 0);
	random_uniform(bias, E, &(struct random_stream){.seed = 4}, 0);
	for (int i = 0; i < T * E; i++)
		p[i] = (real)(ceil(p[i] * 64) / 64);
	for (int e = 0; e < E; e++)
		bias[e] = (real)(floor(bias[e] * 8) / 8 - 0.5);
	topk_forward(index, weight, p, bias, T, E, &r);
	for (int t = 0; t < T; t++) {
		double x[E], group[G], sum = 0;
		for (int e = 0; e < E; e++)
			x[e] = (double)p[t * E + e] + bias[e];
		for (int g = 0; g < G; g++) {
			group[g] = -INFINITY;
			for (int i = 0; i < SIZE; i++)
				for (int j = 0; j < i; j++)
					group[g] = fmax(group[g], x[g * SIZE + i] + x[g * SIZE + j]);
		}
		for (int g = 0; g < G; g++) {
			int better = 0;
			for (int h = 0; h < G; h++)
				better += group[h] > group[g] || (group[h] == group[g] && h < g);
			for (int i = 0; i < SIZE && better >= TOP; i++)
				x[g * SIZE + i] = -INFINITY;
		}
		for (int j = 0; j < K; j++) {
			int best = 0;
			for (int e = 1; e < E; e++)
				best = x[e] > x[best] ? e : best;
			assert_int_equal(index[t * K + j], best);
			x[best] = -INFINITY;
			sum += p[t * E + best];
		}
		for (int j = 0; j < K; j++)
			assert_true(fabs(weight[t * K + j] - 2.5 * p[t * E + index[t * K + j]] / sum) < 1e-5);
	}
	free(p);
}

/* The gradients of sigmoid scores far out: finite, and 0 where the score is 0 or 1; that of the z-loss is softmax's. */
static void test_sigmoid_extremes(void **state)
{
	(void)state;
	enum { E = 4, K = 2 };
	const struct routing r = {.sigmoid = true, .k = K, .groups = 1, .top_groups = 1, .normalise = true, .scale = 1};
	const real s[2 * E] = {100, -100, 99, -100, -100, -101, -102, -103}, dweight[2 * K] = {1, -1, 2, -3};
	const real factor[E] = {1, 2, 3, 4};
	real p[2 * E], lse[2], weight[2 * K], ds[2 * E];
	int32_t index[2 * K];
	scores_forward(p, lse, s, 2, E, true);
	topk_forward(index, weight, p, NULL, 2, E, &r);
	topk_backward(ds, dweight, index, weight, p, 2, E, &r);
	for (int i = 0; i < 2 * E; i++)
		assert_true(fabs(ds[i]) < 1e-20);
	router_loss_backward(ds, s, p, lse, factor, NULL, 0, 2, 2, E, 0, 0.5, &r);
	for (int i = 0; i < 2 * E; i++) { /* lse softmax(s) */
		const double expected = lse[i / E] * exp((double)s[i] - lse[i / E]);
		assert_true(fabs(ds[i] - expected) <= 1e-5 * fabs(expected) + 1e-30);
	}
	memset(ds, 0, sizeof ds);
	router_loss_backward(ds, s, p, lse, factor, NULL, 0, 2, 2, E, 1, 0, &r);
	for (int i = 0; i < 2 * E; i++)
		assert_true(fabs(ds[i]) < 1e-20);
}

/* The counts and sums of each sequence, against plain loops. */
static void test_router_statistics(void **state)
{
	(void)state;
	enum { B = 2, L = 3, E = 5, K = 2 };
	const struct routing r = {.k = K, .groups = 1, .top_groups = 1, .normalise = true, .scale = 1};
	real s[B * L * E], p[B * L * E], lse[B * L], weight[B * L * K];
	int32_t index[B * L * K];
	struct router_sums sums[B];
	double count[B * E], p_sum[B * E];
	random_normal(s, B * L * E, &(struct random_stream){.seed = 7}, 0);
	scores_forward(p, lse, s, B * L, E, false);
	topk_forward(index, weight, p, NULL, B * L, E, &r);
	router_statistics(sums, count, p_sum, s, p, lse, index, NULL, 0, B * L, B, L, E, &r);
	for (int b = 0; b < B; b++) {
		double total = 0, sum = 0, squares = 0;
		for (int e = 0; e < E; e++) {
			double n = 0;
			for (int i = b * L * K; i < (b + 1) * L * K; i++)
				n += index[i] == e;
			assert_true(count[b * E + e] == n);
			total += n;
		}
		assert_true(total == L * K);
		for (int i = b * L * E; i < (b + 1) * L * E; i++)
			sum += s[i], squares += (double)s[i] * s[i];
		assert_true(fabs(sums[b].s - sum) < 1e-12 && fabs(sums[b].s_squared - squares) < 1e-12);
	}

	/* Padding, here the last token of the first sequence and the last two of the second, is left out: the sums are
	 * those of the tokens before it, and its gradient stays. Also where a rank has the tokens from number 1 on. */
	const int32_t length[B] = {2, 1};
	real ds[B * L * E], factor[B * E];
	random_normal(factor, B * E, &(struct random_stream){.seed = 8}, 0);
	for (int first = 0; first < 2; first++) {
		const int n = B * L - first;
		struct router_sums padded[B];
		double padded_count[B * E], padded_p[B * E];
		router_statistics(padded, padded_count, padded_p, s + first * E, p + first * E, lse + first, index + first * K,
				length, first, n, B, L, E, &r);
		for (int b = 0; b < B; b++) {
			double z = 0, p0 = 0, counted = 0;
			for (int t = b == 0 ? first : 0; t < length[b]; t++)
				z += (double)lse[b * L + t] * lse[b * L + t], p0 += p[(b * L + t) * E], counted += K;
			for (int e = 0; e < E; e++)
				counted -= padded_count[b * E + e];
			assert_true(counted == 0 && fabs(padded[b].z - z) < 1e-12 && fabs(padded_p[b * E] - p0) < 1e-12);
		}
		memset(ds, 0, sizeof ds);
		router_loss_backward(ds, NULL, p + first * E, lse + first, factor, length, first, n, L, E, 1, 1, &r);
		for (int t = 0; t < n; t++) {
			const bool padding = (t + first) % L >= length[(t + first) / L];
			double size = 0;
			for (int e = 0; e < E; e++)
				size += fabs(ds[t * E + e]);
			assert_true(padding ? size == 0 : size > 0);
		}
	}
}

static void test_routing_noise(void **state)
{
	(void)state;
	const int64_t T = 500, E = 7;
	struct random_stream stream = {.seed = 11, .purpose = RANDOM_ROUTING, .step = 3};
	real *s = allocate(T * E * sizeof *s), *noisy = nan_array(T * E), *part = nan_array(2 * E), eps[7];
	double sum = 0, squares = 0;
	for (int64_t i = 0; i < T * E; i++)
		s[i] = (real)i;
	routing_noise_forward(noisy, s, 0, 5, 2, &stream, T, E); /* alpha 0: only noise */
	for (int64_t i = 0; i < T * E; i++)
		sum += noisy[i], squares += (noisy[i] - 5.0) * (noisy[i] - 5);
	assert_true(fabs(sum / (T * E) - 5) < 0.1 && fabs(squares / (T * E) - 4) < 0.3);
	/* The noise of a token does not depend on where its micro-batch begins. */
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
	const int32_t index[T * K] = {3, 0, 0, 3, 0, 1, 3, 1, 1, 0}; /* no token chose expert 2 */
	int64_t offset[E + 1];
	int32_t position[T * K], token[T * K];
	dispatch_plan(offset, position, token, index, T * K, K, E);
	const int64_t expected_offset[] = {0, 4, 7, 7, 10};
	const int32_t expected_token[] = {0, 1, 2, 4, 2, 3, 4, 0, 1, 3};
	const int32_t expected_position[] = {7, 0, 1, 8, 2, 4, 9, 5, 6, 3};
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

/* A target < 0 gives a loss of 0 and a gradient of exactly 0. */
static void test_cross_entropy_ignored(void **state)
{
	(void)state;
	const int32_t target[] = {-1, 1};
	real logits[2][3] = {{1, 2, 3}, {1, 2, 3}}, max[2];
	double loss[2], sum[2];
	logits_max(max, logits[0], 2, 3);
	cross_entropy_forward(loss, sum, logits[0], max, target, 0, 2, 3);
	cross_entropy_backward(logits[0], sum, target, 0, 0.25, 2, 3);
	for (int v = 0; v < 3; v++)
		assert_true(logits[0][v] == 0);
	assert_true(loss[0] == 0 && sum[0] == 0 && loss[1] + log(sum[1]) > 0 && logits[1][1] < 0);
}

/* A vocabulary in two parts: embedding, loss and gradients are those of the whole vocabulary. */
static void test_vocabulary_parts(void **state)
{
	(void)state;
	enum { T = 3, H = 5, V = 7, CUT = 3 };
	const int32_t token[T] = {2, 6, 3}, target[T] = {6, 0, -1};
	const int first[3] = {0, CUT, V};
	real w[V * H], dout[T * H], logits[T * V], whole[T * H], part[T * H], dw[V * H], dpart[V * H], max[T], highest[T],
			some[T * V];
	double loss[T] = {0}, sum[T] = {0}, whole_loss[T], whole_sum[T];
	random_normal(w, V * H, &(struct random_stream){.seed = 1}, 0);
	random_normal(dout, T * H, &(struct random_stream){.seed = 2}, 0);
	random_normal(logits, T * V, &(struct random_stream){.seed = 3}, 0);
	embedding_forward(whole, token, &(struct weight){.data = w}, 0, T, H, V);
	embedding_backward(dw, token, dout, 0, T, H, V, false);
	for (int p = 0; p < 2; p++) {
		embedding_forward(part, token, &(struct weight){.data = w + first[p] * H}, first[p], T, H,
				first[p + 1] - first[p]);
		for (int t = 0; t < T; t++) {
			const bool here = token[t] >= first[p] && token[t] < first[p + 1];
			for (int j = 0; j < H; j++)
				assert_true(part[t * H + j] == (here ? whole[t * H + j] : 0));
		}
		embedding_backward(dpart + first[p] * H, token, dout, first[p], T, H, first[p + 1] - first[p], false);
	}
	assert_memory_equal(dpart, dw, sizeof dw);

	logits_max(max, logits, T, V);
	for (int p = 0; p < 2; p++) {
		const int n = first[p + 1] - first[p];
		double part_loss[T], part_sum[T];
		for (int t = 0; t < T; t++)
			memcpy(some + t * n, logits + t * V + first[p], n * sizeof *some);
		logits_max(highest, some, T, n);
		for (int t = 0; t < T; t++)
			assert_true(highest[t] <= max[t]);
		cross_entropy_forward(part_loss, part_sum, some, max, target, first[p], T, n);
		for (int t = 0; t < T; t++)
			loss[t] += part_loss[t], sum[t] += part_sum[t];
	}
	memcpy(some, logits, sizeof some);
	cross_entropy_forward(whole_loss, whole_sum, logits, max, target, 0, T, V);
	for (int t = 0; t < T; t++)
		assert_true(loss[t] == whole_loss[t] && fabs(sum[t] - whole_sum[t]) < 1e-6);
	cross_entropy_backward(logits, whole_sum, target, 0, 0.5, T, V);
	for (int p = 0; p < 2; p++) {
		const int n = first[p + 1] - first[p];
		real part_logits[T * V];
		double ignored[T], part_sum[T];
		for (int t = 0; t < T; t++)
			memcpy(part_logits + t * n, some + t * V + first[p], n * sizeof *some);
		cross_entropy_forward(ignored, part_sum, part_logits, max, target, first[p], T, n);
		cross_entropy_backward(part_logits, whole_sum, target, first[p], 0.5, T, n);
		for (int t = 0; t < T; t++)
			assert_memory_equal(part_logits + t * n, logits + t * V + first[p], n * sizeof *logits);
	}
}

/* The loss of huge logits is finite and right; with a NaN it is NaN. */
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

/* Sums are in double: exact for small integers, whatever the number of rows and blocks. */
static void test_double_sums(void **state)
{
	(void)state;
	const int64_t sizes[] = {0, 1, 63, 64, 65, 100000};
	for (int c = 0; c < 6; c++) {
		const int64_t n = sizes[c];
		real *x = allocate(n * sizeof *x);
		double column[1], expected = 0;
		for (int64_t i = 0; i < n; i++) {
			x[i] = (real)(4096 + i % 7);
			expected += (double)x[i] * x[i];
		}
		column_sum_of_squares(column, &(struct weight){.data = x}, n, 1);
		assert_true(sum_of_squares(x, n) == expected && column[0] == expected);
		free(x);
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * Random numbers
 * ------------------------------------------------------------------------------------------------------------ */

static void test_philox(void **state)
{
	(void)state;
	/* Known answers that were published with Random123, the authors' library. */
	const uint32_t counter[3][4] = {{0, 0, 0, 0}, {~0u, ~0u, ~0u, ~0u},
			{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}};
	const uint32_t key[3][2] = {{0, 0}, {~0u, ~0u}, {0xa4093822, 0x299f31d0}};
	const uint32_t expected[3][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
			{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}, {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}};
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
	for (int first = 0; first < 9; first++) { /* numbers do not depend on where a call begins */
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
		bool *seen = allocate(n);
		struct random_stream s = {.seed = 3, .purpose = RANDOM_SHUFFLE, .step = 1};
		for (uint64_t i = 0; i < n; i++) {
			uint64_t image = random_permute(i, n, &s);
			assert_true(image < n && !seen[image]);
			seen[image] = true;
			fixed += image == i;
		}
		if (n >= 1000)
			assert_true(fixed < 10); /* the expected number of fixed points is 1 */
		free(seen);
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * Threads
 * ------------------------------------------------------------------------------------------------------------ */

/* Results do not depend on the number of threads. */
static void test_threads(void **state)
{
	(void)state;
	enum { T = 300, H = 130, SIZE = 3 * T * H };
	real *x = normal_array(T * H, 1), *w = normal_array(H * H, 2), *rstd = nan_array(T), *results[3];
	real *work = nan_array(row_sum_scratch(H));
	const int before = omp_get_max_threads();
	for (int threads = 1; threads <= 3; threads++) {
		omp_set_num_threads(threads);
		real *out = results[threads - 1] = allocate(SIZE * sizeof *out), *dx = out + T * H, *product = dx + T * H;
		rmsnorm_forward(out, rstd, x, w, T, H, 1e-5);
		rmsnorm_backward(dx, out, x, x, w, rstd, T, H, true, work);
		embedding_backward(out, (int32_t[]){1, 1, 0, 2, 2}, x, 0, 5, H, 3, true);
		out[0] = (real)sum_of_squares(x, T * H);
		matmul_forward(product, x, &(struct weight){.data = w}, w, T, H, H, false);
	}
	omp_set_num_threads(before);
	for (int i = 0; i < 3; i++)
		assert_memory_equal(results[i], results[0], SIZE * sizeof *results[0]);
	free(results[0]), free(results[1]), free(results[2]);
	free(x), free(w), free(rstd), free(work);
}

/* The bits of attention, forward and backward, for any number of threads: one key-value head may be shared by all of
 * them, or each thread have one or several; with few blocks and with many, and with documents. The gradients of one
 * thread are checked in test_self_check and in the models' tests. */
static void test_attention_threads(void **state)
{
	(void)state;
	static const struct { int64_t B, L; int nh, nkv; int64_t d; bool documents; } shapes[] = {
		{1, 300, 4, 1, 32, false}, {1, 700, 4, 2, 40, true}, {3, 130, 3, 1, 8, false}, {1, 2600, 2, 1, 8, false},
		{1, 2100, 1, 1, 16, true}, {1, 520, 7, 1, 16, false}, {35, 20, 2, 1, 8, true}, {2, 600, 4, 4, 16, false},
	};
	static const int threads[] = {1, 2, 3, 8, 32, 8, 32, 32};
	/* how many pairs of blocks, of 131,072 elements each, the threads may share: with few, windows are small and heads
	 * take turns */
	static const int pairs[] = {40, 40, 40, 40, 40, 1, 3, 0};
	const int before = omp_get_max_threads();
	for (size_t c = 0; c < sizeof shapes / sizeof *shapes; c++) {
		const int64_t B = shapes[c].B, L = shapes[c].L, d = shapes[c].d, T = B * L;
		const int nh = shapes[c].nh, nkv = shapes[c].nkv;
		const int64_t width = (nh + 2 * nkv) * d, size = T * (nh * d + nh + width);
		real *qkv = normal_array(T * width, 1), *dout = normal_array(T * nh * d, 2), *first = NULL;
		int32_t *document = allocate(T * sizeof *document);
		for (int64_t t = 0; t < T; t++) /* documents of 290 tokens, another place in each sequence */
			document[t] = (int32_t)((t % L + 7 * (t / L)) / 290 ? (t % L + 7 * (t / L)) / 290 * 290 - 7 * (t / L) : 0);
		for (size_t i = 0; i < sizeof threads / sizeof *threads; i++) {
			omp_set_num_threads(threads[i]);
			real *out = nan_array(size), *lse = out + T * nh * d, *dqkv = lse + T * nh;
			const int64_t shared_size = pairs[i] * 131072 + pairs[i] / 2; /* a part of a pair is left over */
			real *work = nan_array(attention_scratch(d)), *shared = nan_array(shared_size + 1);
			const int32_t *own = shapes[c].documents ? document : NULL;
			attention_forward(out, lse, qkv, own, B, L, nh, nkv, d, work);
			attention_backward(dqkv, dout, out, lse, qkv, own, B, L, nh, nkv, d, work, shared, shared_size);
			first = i ? first : out;
			for (int64_t j = 0; j < size; j++)
				if (isnan(out[j]) || memcmp(&out[j], &first[j], sizeof *out))
					fail_msg("shape %zu, %d threads, %d pairs: element %lld is %g, not %g", c, threads[i], pairs[i],
							(long long)j, out[j], first[j]);
			free(work), free(shared);
			if (i)
				free(out);
		}
		free(first), free(document), free(qkv), free(dout);
	}
	omp_set_num_threads(before);
}

/* Uniform numbers, like normal ones, do not depend on where a call begins, nor on the stream's `first`. */
static void test_uniform_positions(void **state)
{
	(void)state;
	enum { N = 64 };
	real all[N], part[N];
	struct random_stream s = {.seed = 42, .purpose = RANDOM_ROUTING, .step = 9};
	random_uniform(all, N, &s, 0);
	for (int first = 0; first < 9; first++)
		for (int n = 1; n < 11; n++) {
			for (int i = 0; i < N; i++)
				part[i] = -1;
			random_uniform(part, n, &s, first);
			assert_memory_equal(part, all + first, n * sizeof *part);
			assert_true(part[n] == -1);
		}
	s.first = 7;
	random_uniform(part, 20, &s, 6);
	assert_memory_equal(part, all + 13, 20 * sizeof *part);
	/* No two numbers of a stream are alike, and neither are those of another seed, purpose or step. */
	for (int i = 0; i < N; i++)
		for (int j = 0; j < i; j++)
			assert_true(all[i] != all[j]);
	const struct random_stream others[] = {
		{.seed = 43, .purpose = RANDOM_ROUTING, .step = 9}, {.seed = 42, .purpose = RANDOM_INIT, .step = 9},
		{.seed = 42, .purpose = RANDOM_ROUTING, .step = 10},
		{.seed = 42 + (UINT64_C(1) << 32), .purpose = RANDOM_ROUTING, .step = 9},
	};
	for (int k = 0; k < 4; k++) {
		random_uniform(part, N, &others[k], 0);
		for (int i = 0; i < N; i++)
			assert_true(part[i] != all[i]);
	}
}

/* The order of an epoch depends on the seed, all 64 bits of it, and on the epoch. */
static void test_permutations_differ(void **state)
{
	(void)state;
	enum { N = 1000, ORDERS = 7 };
	uint64_t image[ORDERS][N];
	for (int k = 0; k < ORDERS; k++) {
		const struct random_stream s = {.seed = k == 5 ? 4 : k == 6 ? 3 + (UINT64_C(1) << 40) : 3,
				.purpose = RANDOM_SHUFFLE, .step = k < 5 ? k : 0};
		for (uint64_t i = 0; i < N; i++)
			image[k][i] = random_permute(i, N, &s);
		for (int j = 0; j < k; j++) {
			int same = 0;
			for (int i = 0; i < N; i++)
				same += image[k][i] == image[j][i];
			assert_true(same < 12); /* the expected number is 1 */
		}
	}
}

/* The sum of squares of what AdamW changes: that of a plain loop over the weights before and after, and the same bits
 * for any number of threads. */
static void test_update_norm(void **state)
{
	(void)state;
	enum { N = 10007 };
	const int before = omp_get_max_threads();
	double first = 0;
	for (int threads = 1; threads <= 5; threads++) {
		real *w = normal_array(N, 1), *old = normal_array(N, 1), *m = normal_array(N, 2), *v = normal_array(N, 3),
				*g = normal_array(N, 4);
		double sum = 0;
		for (int i = 0; i < N; i++)
			v[i] *= v[i];
		omp_set_num_threads(threads);
		const double square = adamw_update(w, m, v, g, N, &(struct adamw){.lr = 0.01, .beta1 = 0.9, .beta2 = 0.95,
				.eps = 1e-8, .weight_decay = 0.1, .grad_scale = 0.5, .step = 3});
		for (int i = 0; i < N; i++)
			sum += ((double)w[i] - old[i]) * ((double)w[i] - old[i]);
		if (!(fabs(square - sum) <= 1e-6 * sum && sum > 0.1))
			fail_msg("%g is not %g", square, sum);
		first = threads == 1 ? square : first;
		assert_same(square, first);
		free(w), free(old), free(m), free(v), free(g);
	}
	omp_set_num_threads(before);
	assert_true(adamw_update(NULL, NULL, NULL, NULL, 0, &(struct adamw){.step = 1}) == 0);
}

/* Sockets are counted over the cores of this process alone, by the files of a pretended system. */
static void test_sockets(void **state)
{
	(void)state;
	char root[] = "/tmp/ling-sockets-XXXXXX", path[256], text[256];
	cpu_set_t cpus;
	const int before = omp_get_max_threads();
	assert_true(mkdtemp(root) && sched_getaffinity(0, sizeof cpus, &cpus) == 0);
	assert_int_equal(process_sockets(root), 1); /* there is no file */
	int cores = 0;
	for (int i = 0; i < CPU_SETSIZE; i++) {
		if (!CPU_ISSET(i, &cpus))
			continue;
		snprintf(path, sizeof path, "mkdir -p %s/sys/devices/system/cpu/cpu%d/topology && echo %d >"
				"%s/sys/devices/system/cpu/cpu%d/topology/physical_package_id", root, i, cores++ % 2, root, i);
		assert_int_equal(system(path), 0);
	}
	const int expected = cores > 1 ? 2 : 1;
	assert_int_equal(process_sockets(root), expected);
	omp_set_num_threads(1);
	assert_string_equal(socket_warning(text, root), "");
	omp_set_num_threads(6);
	assert_true((strstr(socket_warning(text, root), "on 2 sockets") && strstr(text, "OMP_NUM_THREADS=3 ")) ==
			(expected == 2));
	omp_set_num_threads(before);
	snprintf(path, sizeof path, "rm -r %s", root);
	assert_int_equal(system(path), 0);
}

int main(void)
{
	kernels_init(false);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_self_check), cmocka_unit_test(test_empty_group), cmocka_unit_test(test_row_lists),
		cmocka_unit_test(test_weights_in_place), cmocka_unit_test(test_product_blocks),
		cmocka_unit_test(test_few_rows),
		cmocka_unit_test(test_rmsnorm_large), cmocka_unit_test(test_attention_large_scores),
		cmocka_unit_test(test_topk_ties), cmocka_unit_test(test_sigmoid_scores), cmocka_unit_test(test_topk_groups),
		cmocka_unit_test(test_topk_many), cmocka_unit_test(test_sigmoid_extremes),
		cmocka_unit_test(test_router_statistics),
		cmocka_unit_test(test_routing_noise), cmocka_unit_test(test_dispatch),
		cmocka_unit_test(test_cross_entropy_ignored), cmocka_unit_test(test_vocabulary_parts),
		cmocka_unit_test(test_cross_entropy_extremes), cmocka_unit_test(test_double_sums),
		cmocka_unit_test(test_philox), cmocka_unit_test(test_random_streams), cmocka_unit_test(test_permutation),
		cmocka_unit_test(test_threads), cmocka_unit_test(test_attention_threads),
		cmocka_unit_test(test_update_norm), cmocka_unit_test(test_uniform_positions),
		cmocka_unit_test(test_permutations_differ), cmocka_unit_test(test_sockets),
	};
	return cmocka_run_group_tests_name("kernels", tests, NULL, NULL);
}
