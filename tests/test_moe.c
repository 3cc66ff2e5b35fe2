/*
 * The worked example of docs/moe.md: 5 tokens through a router, 4 experts and back. ling's kernels compute it, plain
 * loops in double check it, and the page must hold exactly the blocks of text that are printed from it here.
 *
 * Blocks of the page that begin with ```text are these; the figure begins with ``` alone. Where the page differs, the
 * test prints the block that it should have.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "kernels.h"
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { T = 5, E = 4, K = 2, H = 2, I = 2, R = T * K };

/* The weights of the two losses, far larger than in training (0.015 and 1e-4): their part shows in four digits. */
static const double balance_coef = 0.1, z_coef = 0.01;

/* What the example begins with. All are numbers of one type, so that a loop can differentiate the plain form by each
 * of them. `ds` is added to the logits and `dw` to the weights: they are 0, and there to differentiate by. */
#define INPUTS(type) { type x[T][H], dy[T][H], router[E][H], gate_up[E][2][I][H], down[E][H][I], ds[T][E], dw[T][K]; }
struct inputs INPUTS(real);
struct plain_inputs INPUTS(double);
enum { NUM_INPUTS = sizeof(struct inputs) / sizeof(real) };

static const struct inputs in = {
	.x = {{1, 2.5f}, {2, 1.5f}, {0.5f, 2}, {-2, 0.5f}, {1, -1.5f}},
	.dy = {{1, 0}, {0, 1}, {-0.5f, 1}, {-1, 0.5f}, {0.5f, -0.5f}},
	.router = {{1, 0.1f}, {-0.5f, 1}, {-0.1f, 0.1f}, {-0.5f, -1}},
	.gate_up = {{{{1, -1}, {0.5f, 1}}, {{-0.5f, -0.5f}, {-0.5f, 0.5f}}},
		{{{-0.5f, 1}, {1, -0.5f}}, {{0.5f, 1}, {1, 0.5f}}},
		{{{1, 0.5f}, {1, 1}}, {{0.5f, -1}, {1, 1}}},
		{{{-1, -0.5f}, {0.5f, 1}}, {{0.5f, -0.5f}, {-0.5f, -0.5f}}}},
	.down = {{{-0.5f, 1}, {-1, 1}}, {{-1, 0.5f}, {-0.5f, -0.5f}}, {{-0.5f, -1}, {1, -1}}, {{-1, 0.5f}, {0.5f, 1}}},
};

/* Everything that the kernels give, in the order of computation; letters as in ling.h. */
static struct {
	real s[T][E], p[T][E], lse[T], weight[T][K];
	int32_t index[T][K], position[R], token[R];
	int64_t offset[E + 1];
	real row_weight[R], rows[R][H], gate_up[R][2][I], act[R][I], out_rows[R][H], y[T][H];
	struct router_sums sums;
	double count[E], p_sum[E], f[E], P[E], balance, z;
	real row_dweight[R], dgate_up[R][2][I], act_again[R][I], dx_rows[R][H], dx_experts[T][H];
	real dweight[T][K], ds_topk[T][E], ds[T][E], dx[T][H];
	real d_router[E][H], d_gate_up[E][2][I][H], d_down[E][H][I];
} ex;

static void compute_v2(void);

static int compute(void **state)
{
	(void)state;
	struct weight gate_up[E], down[E];
	real factor[E];
	const struct routing routing = {.k = K, .groups = 1, .top_groups = 1, .normalise = true, .scale = 1};
	kernels_init(false);
	stack_weights(gate_up, in.gate_up[0][0][0], E, 2 * I * H);
	stack_weights(down, in.down[0][0], E, H * I);

	matmul_forward(ex.s[0], in.x[0], &(struct weight){.data = in.router}, NULL, T, H, E, false);
	scores_forward(ex.p[0], ex.lse, ex.s[0], T, E, false);
	topk_forward(ex.index[0], ex.weight[0], ex.p[0], NULL, T, E, &routing);
	dispatch_plan(ex.offset, ex.position, ex.token, ex.index[0], R, K, E);
	permute_forward(ex.row_weight, ex.weight[0], ex.position, R);
	gather_rows(ex.rows[0], in.x[0], ex.token, R, H);
	swiglu_forward(ex.act[0], ex.gate_up[0][0], in.x[0], ex.token, gate_up, ex.row_weight, ex.offset, E, H, I);
	grouped_matmul_forward(ex.out_rows[0], ex.act[0], NULL, down, ex.offset, E, I, H, false);
	combine_rows(ex.y[0], ex.out_rows[0], ex.position, T, K, H, false);
	router_statistics(&ex.sums, ex.count, ex.p_sum, ex.s[0], ex.p[0], ex.lse, ex.index[0], NULL, 0, T, 1, T, E,
			&routing);
	for (int e = 0; e < E; e++) {
		ex.f[e] = ex.count[e] / R;
		ex.P[e] = ex.p_sum[e] / T;
		ex.balance += E * ex.f[e] * ex.P[e];
		factor[e] = (real)(E * ex.f[e]);
	}
	ex.z = ex.sums.z / T;

	swiglu_backward(ex.dgate_up[0][0], ex.act_again[0], ex.row_dweight, in.dy[0], ex.token, in.down[0][0],
			ex.gate_up[0][0], ex.row_weight, ex.offset, E, H, I);
	grouped_matmul_backward_weight(ex.d_down[0][0], in.dy[0], ex.token, ex.act_again[0], NULL, ex.offset, E, I, H,
			false);
	grouped_matmul_backward_weight(ex.d_gate_up[0][0][0], ex.dgate_up[0][0], NULL, in.x[0], ex.token, ex.offset,
			E, H, 2 * I, false);
	grouped_matmul_backward_input(ex.dx_rows[0], ex.dgate_up[0][0], NULL, in.gate_up[0][0][0], ex.offset, E, H,
			2 * I, false);
	combine_rows(ex.dx_experts[0], ex.dx_rows[0], ex.position, T, K, H, false);
	permute_backward(ex.dweight[0], ex.row_dweight, ex.position, R);
	topk_backward(ex.ds_topk[0], ex.dweight[0], ex.index[0], ex.weight[0], ex.p[0], T, E, &routing);
	copy_array(ex.ds[0], ex.ds_topk[0], T * E);
	router_loss_backward(ex.ds[0], ex.s[0], ex.p[0], ex.lse, factor, NULL, 0, T, T, E, balance_coef / T, z_coef / T,
			&routing);
	matmul_backward_weight(ex.d_router[0], ex.ds[0], in.x[0], T, H, E, false);
	copy_array(ex.dx[0], ex.dx_experts[0], T * H);
	matmul_backward_input(ex.dx[0], ex.ds[0], in.router[0], T, H, E, true);
	compute_v2();
	return 0;
}

/* ------------------------------------------------------------------------------------------------------------
 * The same in plain loops: no rows are sorted
 * ------------------------------------------------------------------------------------------------------------ */

struct plain {
	double s[T][E], p[T][E], lse[T], weight[T][K], gate_up[T][K][2][I], act[T][K][I], out[T][K][H], y[T][H];
	double f[E], P[E], balance, z;
	int index[T][K];
};

/* Returns the loss: sum(y * dy), and with `losses` + balance_coef * balance + z_coef * z. With `shares` f is taken from
 * there: f has no gradient. */
static double plain_layer(struct plain *o, const struct plain_inputs *a, const double *shares, bool losses)
{
	double loss = 0;
	*o = (struct plain){0};
	for (int t = 0; t < T; t++) {
		double sum = 0, won = 0;
		for (int e = 0; e < E; e++) {
			o->s[t][e] = a->ds[t][e];
			for (int h = 0; h < H; h++)
				o->s[t][e] += a->x[t][h] * a->router[e][h];
			sum += exp(o->s[t][e]);
		}
		o->lse[t] = log(sum);
		o->z += o->lse[t] * o->lse[t] / T;
		for (int e = 0; e < E; e++) {
			o->p[t][e] = exp(o->s[t][e]) / sum;
			o->P[e] += o->p[t][e] / T;
		}
		for (int j = 0; j < K; j++) {
			int best = -1;
			for (int e = 0; e < E; e++)
				if ((j == 0 || e != o->index[t][0]) && (best < 0 || o->p[t][e] > o->p[t][best]))
					best = e;
			o->index[t][j] = best;
			o->f[best] += 1.0 / R;
			won += o->p[t][best];
		}
		for (int j = 0; j < K; j++) {
			const int e = o->index[t][j];
			o->weight[t][j] = o->p[t][e] / won + a->dw[t][j];
			for (int i = 0; i < I; i++) {
				double *gate = &o->gate_up[t][j][0][i], *up = &o->gate_up[t][j][1][i];
				for (int h = 0; h < H; h++) {
					*gate += a->gate_up[e][0][i][h] * a->x[t][h];
					*up += a->gate_up[e][1][i][h] * a->x[t][h];
				}
				o->act[t][j][i] = o->weight[t][j] * *gate / (1 + exp(-*gate)) * *up;
				for (int h = 0; h < H; h++)
					o->out[t][j][h] += a->down[e][h][i] * o->act[t][j][i];
			}
			for (int h = 0; h < H; h++)
				o->y[t][h] += o->out[t][j][h];
		}
		for (int h = 0; h < H; h++)
			loss += o->y[t][h] * a->dy[t][h];
	}
	for (int e = 0; e < E; e++)
		o->balance += E * (shares ? shares[e] : o->f[e]) * o->P[e];
	return losses ? loss + balance_coef * o->balance + z_coef * o->z : loss;
}

static void plain_start(struct plain_inputs *a)
{
	for (int i = 0; i < NUM_INPUTS; i++)
		((double *)a)[i] = ((const real *)&in)[i];
}

static void test_forward(void **state)
{
	(void)state;
	struct plain_inputs a;
	struct plain o;
	plain_start(&a);
	plain_layer(&o, &a, NULL, true);
	assert_close(ex.s[0], o.s[0], T * E, 1e-6, "logits");
	assert_close(ex.p[0], o.p[0], T * E, 1e-6, "probabilities");
	assert_close(ex.lse, o.lse, T, 1e-6, "log-sum-exp");
	assert_close(ex.weight[0], o.weight[0], T * K, 1e-6, "weights");
	assert_close(ex.y[0], o.y[0], T * H, 1e-6, "combined output");
	for (int t = 0; t < T; t++)
		for (int j = 0; j < K; j++) {
			const int32_t row = ex.position[t * K + j], e = ex.index[t][j];
			assert_int_equal(e, o.index[t][j]);
			assert_int_equal(ex.token[row], t);
			assert_in_range(row, ex.offset[e], ex.offset[e + 1] - 1);
			assert_close(ex.rows[row], a.x[t], H, 0, "sorted rows");
			assert_close(ex.gate_up[row][0], o.gate_up[t][j][0], 2 * I, 1e-6, "gate and up");
			assert_close(ex.act[row], o.act[t][j], I, 1e-6, "act");
			assert_close(ex.out_rows[row], o.out[t][j], H, 1e-6, "rows of the experts");
		}
	for (int e = 0; e < E; e++) {
		assert_true(fabs(ex.f[e] - o.f[e]) < 1e-12);
		assert_true(fabs(ex.P[e] - o.P[e]) < 1e-6);
	}
	assert_true(fabs(ex.balance - o.balance) < 1e-6);
	assert_true(fabs(ex.z - o.z) < 1e-5);
}

/* Gradients by central differences of the plain form, with the losses of the router or without. */
static void plain_gradients(struct plain_inputs *d, bool losses)
{
	struct plain_inputs a;
	struct plain o;
	const double h = 1e-5;
	plain_start(&a);
	for (int i = 0; i < NUM_INPUTS; i++) {
		double *const value = (double *)&a + i, before = *value;
		*value = before + h;
		const double above = plain_layer(&o, &a, ex.f, losses);
		*value = before - h;
		((double *)d)[i] = (above - plain_layer(&o, &a, ex.f, losses)) / (2 * h);
		*value = before;
	}
}

static void test_backward(void **state)
{
	(void)state;
	struct plain_inputs d;
	plain_gradients(&d, false);
	assert_close(ex.ds_topk[0], d.ds[0], T * E, 1e-5, "gradient of the logits by the weights");
	plain_gradients(&d, true);
	assert_close(ex.dweight[0], d.dw[0], T * K, 1e-5, "gradient of the weights");
	assert_close(ex.ds[0], d.ds[0], T * E, 1e-5, "gradient of the logits");
	assert_close(ex.dx[0], d.x[0], T * H, 1e-5, "gradient of x");
	assert_close(ex.d_router[0], d.router[0], E * H, 1e-5, "gradient of the router");
	assert_close(ex.d_gate_up[0][0][0], d.gate_up[0][0][0], E * 2 * I * H, 1e-5, "gradient of gate and up");
	assert_close(ex.d_down[0][0], d.down[0][0], E * H * I, 1e-5, "gradient of down");
}

/* ------------------------------------------------------------------------------------------------------------
 * The router of Ling 2.0, for the same logits
 * ---------------------------------------------------------------------------------------------------------- */

enum { GROUPS = 2, TOP_GROUPS = 1, SIZE = E / GROUPS };
static const real expert_bias[E] = {-0.4f, -0.2f, 0.2f, 0.1f};
static const real given_dweight[T][K] = {{0.5f}, {0.5f}, {0.5f}, {0.5f}, {0.5f}}; /* 0 for the second expert */
static const double routed_scale = 2.5;

static struct {
	real p[T][E], lse[T], biased[T][E], group[T][GROUPS], weight[T][K], ds[T][E];
	int32_t index[T][K];
} v2;

static void compute_v2(void)
{
	const struct routing routing = {.sigmoid = true, .k = K, .groups = GROUPS, .top_groups = TOP_GROUPS,
			.normalise = true, .scale = routed_scale};
	scores_forward(v2.p[0], v2.lse, ex.s[0], T, E, true);
	topk_forward(v2.index[0], v2.weight[0], v2.p[0], expert_bias, T, E, &routing);
	topk_backward(v2.ds[0], given_dweight[0], v2.index[0], v2.weight[0], v2.p[0], T, E, &routing);
	for (int t = 0; t < T; t++) /* for the page: topk_forward does not tell them. A group's two experts are its best */
		for (int e = 0; e < E; e++) {
			v2.biased[t][e] = v2.p[t][e] + expert_bias[e];
			v2.group[t][e / SIZE] += v2.biased[t][e];
		}
}

/* The weights of a token's experts, best first. Returns their sum with dy as factors. */
static double plain_weights(double weight[K], int index[K], const double s[E], const real dy[K])
{
	double biased[E], group[GROUPS] = {0}, sum = 0, loss = 0;
	for (int e = 0; e < E; e++) {
		biased[e] = 1 / (1 + exp(-s[e])) + expert_bias[e];
		group[e / SIZE] += biased[e];
	}
	const int first = group[1] > group[0] ? SIZE : 0, swapped = biased[first + 1] > biased[first];
	for (int j = 0; j < K; j++) {
		index[j] = first + (j ^ swapped);
		sum += 1 / (1 + exp(-s[index[j]]));
	}
	for (int j = 0; j < K; j++) {
		weight[j] = routed_scale / (1 + exp(-s[index[j]])) / sum;
		loss += weight[j] * dy[j];
	}
	return loss;
}

static void test_router_v2(void **state)
{
	(void)state;
	for (int t = 0; t < T; t++) {
		double s[E], weight[K], ds[E];
		int index[K];
		for (int e = 0; e < E; e++)
			s[e] = ex.s[t][e];
		for (int e = 0; e < E; e++) {
			const double h = 1e-5, before = s[e];
			s[e] = before + h;
			const double above = plain_weights(weight, index, s, given_dweight[t]);
			s[e] = before - h;
			ds[e] = (above - plain_weights(weight, index, s, given_dweight[t])) / (2 * h);
			s[e] = before;
		}
		plain_weights(weight, index, s, given_dweight[t]);
		for (int j = 0; j < K; j++)
			assert_int_equal(v2.index[t][j], index[j]);
		assert_close(v2.weight[t], weight, K, 1e-6, "weights of Ling 2.0");
		assert_close(v2.ds[t], ds, E, 1e-5, "gradient of the logits of Ling 2.0");
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * The experts on several ranks, one after the other in this process
 * ------------------------------------------------------------------------------------------------------------ */

/* A token's row goes once to each rank that has some of its experts, and the results come back as one row. */
static void test_ranks(void **state)
{
	(void)state;
	struct weight gate_up[E], down[E];
	stack_weights(gate_up, in.gate_up[0][0][0], E, 2 * I * H);
	stack_weights(down, in.down[0][0], E, H * I);
	for (int ranks = 1; ranks <= E; ranks *= 2) {
		const int experts = E / ranks;
		int64_t rows[E], assignments[E], offset[E + 1], first_row = 0, first_assignment = 0;
		int32_t token[R], position[R], sent_row[R], row[R], place[R], begin[R + 1];
		real sent[R][2], arrivals[R][H], weight[R], act[R][I], gate[R][2][I], out[R][H], back[R][H], y[T][H];
		send_plan(rows, assignments, token, position, sent_row, ex.index[0], T, K, ranks, experts);
		pack_assignments(sent[0], ex.weight[0], ex.index[0], position, sent_row, R, experts);
		for (int r = 0; r < ranks; r++) {
			int64_t tokens = 0, all = 0;
			for (int t = 0; t < T; t++) {
				int here = 0;
				for (int j = 0; j < K; j++)
					here += ex.index[t][j] / experts == r;
				if (here)
					assert_int_equal(token[first_row + tokens++], t);
				all += here;
			}
			assert_true(rows[r] == tokens && assignments[r] == all);
			gather_rows(arrivals[0], in.x[0], token + first_row, tokens, H);
			arrival_plan(offset, row, weight, place, begin, sent[first_assignment], all, experts);
			assert_true(offset[experts] == all && begin[tokens] == all);
			swiglu_forward(act[0], gate[0][0], arrivals[0], row, gate_up + r * experts, weight, offset, experts, H, I);
			grouped_matmul_forward(out[0], act[0], NULL, down + r * experts, offset, experts, I, H, false);
			combine_arrivals(back[first_row], out[0], place, begin, tokens, H);
			first_row += tokens;
			first_assignment += all;
		}
		assert_true(first_assignment == R && first_row == (ranks == 1 ? T : ranks == 2 ? 7 : R));
		combine_rows(y[0], back[0], sent_row, T, K, H, false);
		for (int t = 0; t < T; t++)
			for (int i = 0; i < H; i++)
				assert_true(fabs(y[t][i] - ex.y[t][i]) <= 1e-6 * fabs(ex.y[t][i]));
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * The page
 * ------------------------------------------------------------------------------------------------------------ */

static char page[1 << 16];     /* docs/moe.md */
static char block[1 << 12];    /* the block that is being printed */

static void put(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void put(const char *format, ...)
{
	const size_t n = strlen(block);
	va_list args;
	va_start(args, format);
	vsnprintf(block + n, sizeof block - n, format, args);
	va_end(args);
}

/* Numbers as they were given, 6 characters each. */
static void put_given(const real *x, int n)
{
	for (int i = 0; i < n; i++)
		put("%6.1f", x[i]);
}

/* Numbers rounded to so many digits behind the point, with 4 characters more each. None may lie so near the middle
 * between two of these that a float's last bits decide. */
static void put_digits(const real *x, int n, int digits)
{
	const double unit = pow(10, -digits);
	for (int i = 0; i < n; i++) {
		const double scaled = x[i] / unit, rounded = round(scaled);
		if (fabs(fabs(scaled - rounded) - 0.5) < 0.02)
			fail_msg("%.8f is too near the middle between two numbers of %d digits: choose other inputs", x[i], digits);
		put("%*.*f", digits + 4, digits, rounded * unit + 0.0); /* + 0.0: -0 becomes 0 */
	}
}

static void put_real(const real *x, int n)
{
	put_digits(x, n, 4);
}

static void put_double(double x)
{
	put_real(&(real){(real)x}, 1);
}

static void fail_page(const char *problem, const char *what)
{
	fprintf(stderr, "%s %s:\n%s\n", problem, what, block); /* too long for fail_msg */
	fail_msg("%s %s", problem, what);
}

/* The page's next block must be what was printed. */
static void expect_block(const char **at, const char *what)
{
	static const char fence[] = "```text\n";
	const char *start = strstr(*at, fence), *end = start ? strstr(start + sizeof fence - 1, "```\n") : NULL;
	if (!end)
		fail_page("docs/moe.md has no block for", what);
	start += sizeof fence - 1;
	if ((size_t)(end - start) != strlen(block) || memcmp(start, block, strlen(block)))
		fail_page("docs/moe.md does not hold what is computed for", what);
	*at = end;
	block[0] = 0;
}

static void test_page(void **state)
{
	(void)state;
	FILE *f = fopen("docs/moe.md", "r");
	assert_non_null(f);
	page[fread(page, 1, sizeof page - 1, f)] = 0;
	fclose(f);
	const char *at_block = page;

	put("token    x           dy\n");
	for (int t = 0; t < T; t++) {
		put("%d    ", t);
		put_given(in.x[t], H);
		put_given(in.dy[t], H);
		put("\n");
	}
	put("expert   Wr          gate                    up                      down\n");
	for (int e = 0; e < E; e++) {
		put("%d    ", e);
		put_given(in.router[e], H);
		put_given(in.gate_up[e][0][0], 2 * I * H);
		put_given(in.down[e][0], H * I);
		put("\n");
	}
	expect_block(&at_block, "what is given");

	put("token  s = x Wr^T                     p = softmax(s)                       lse    chosen       w\n");
	for (int t = 0; t < T; t++) {
		put("%d  ", t);
		put_real(ex.s[t], E);
		put("  ");
		put_real(ex.p[t], E);
		put_real(&ex.lse[t], 1);
		put("    %d %d ", ex.index[t][0], ex.index[t][1]);
		put_real(ex.weight[t], K);
		put("\n");
	}
	expect_block(&at_block, "the router");

	put("offset   ");
	for (int e = 0; e <= E; e++)
		put("%3d", (int)ex.offset[e]);
	put("\nposition ");
	for (int i = 0; i < R; i++)
		put("%3d", ex.position[i]);
	put("\ntoken    ");
	for (int i = 0; i < R; i++)
		put("%3d", ex.token[i]);
	put("\n");
	expect_block(&at_block, "the plan");

	put("row expert token     w  x[token]        gate            up              act             down act\n");
	for (int r = 0, e = 0; r < R; r++) {
		while (r >= ex.offset[e + 1])
			e++;
		put("%d      %d     %d ", r, e, ex.token[r]);
		put_real(&ex.row_weight[r], 1);
		put_real(ex.rows[r], H);
		put_real(ex.gate_up[r][0], 2 * I);
		put_real(ex.act[r], I);
		put_real(ex.out_rows[r], H);
		put("\n");
	}
	expect_block(&at_block, "the experts");

	put("token  rows    y\n");
	for (int t = 0; t < T; t++) {
		put("%d      %d + %d", t, ex.position[t * K], ex.position[t * K + 1]);
		put_real(ex.y[t], H);
		put("\n");
	}
	expect_block(&at_block, "the combined output");

	put("expert  count       f       P   E f P\n");
	for (int e = 0; e < E; e++) {
		put("%d       %5.0f", e, ex.count[e]);
		put_double(ex.f[e]);
		put_double(ex.P[e]);
		put_double(E * ex.f[e] * ex.P[e]);
		put("\n");
	}
	put("balance loss");
	put_double(ex.balance);
	put("    z-loss");
	put_double(ex.z);
	put("\n");
	expect_block(&at_block, "the losses");

	put("row token  dy[token]            dw   dgate           dup             dx of the row\n");
	for (int r = 0; r < R; r++) {
		put("%d       %d", r, ex.token[r]);
		put_real(in.dy[ex.token[r]], H);
		put_real(&ex.row_dweight[r], 1);
		put_real(ex.dgate_up[r][0], 2 * I);
		put_real(ex.dx_rows[r], H);
		put("\n");
	}
	expect_block(&at_block, "the experts' backward pass");

	put("token  dw             ds of top-k                    ds with the losses             dx of rows      dx\n");
	for (int t = 0; t < T; t++) {
		put("%d", t);
		put_real(ex.dweight[t], K);
		put_real(ex.ds_topk[t], E);
		put_real(ex.ds[t], E);
		put_real(ex.dx_experts[t], H);
		put_real(ex.dx[t], H);
		put("\n");
	}
	expect_block(&at_block, "the router's backward pass");

	put("expert dWr             dgate                           dup                             ddown\n");
	for (int e = 0; e < E; e++) {
		put("%d", e);
		put_real(ex.d_router[e], H);
		put_real(ex.d_gate_up[e][0][0], 2 * I * H);
		put_real(ex.d_down[e][0], H * I);
		put("\n");
	}
	expect_block(&at_block, "the weights' gradients");

	enum { DIGITS = 5 };
	put("bias                                       ");
	put_digits(expert_bias, E, DIGITS);
	put("\ntoken  p = sigmoid(s)                       p + bias\n");
	for (int t = 0; t < T; t++) {
		put("%d    ", t);
		put_digits(v2.p[t], E, DIGITS);
		put("  ");
		put_digits(v2.biased[t], E, DIGITS);
		put("\n");
	}
	put("token  groups            chosen      w\n");
	for (int t = 0; t < T; t++) {
		put("%d    ", t);
		put_digits(v2.group[t], GROUPS, DIGITS);
		put("    %d %d  ", v2.index[t][0], v2.index[t][1]);
		put_real(v2.weight[t], K);
		put("\n");
	}
	expect_block(&at_block, "the router of Ling 2.0");

	put("token  ds\n");
	for (int t = 0; t < T; t++) {
		put("%d    ", t);
		put_real(v2.ds[t], E);
		put("\n");
	}
	expect_block(&at_block, "the backward pass of the router of Ling 2.0");

	/* Two micro-batches, of tokens 0 to 3 and of token 4. */
	double mean_of_first = 0;
	for (int t = 0; t < T - 1; t++)
		mean_of_first += (double)ex.lse[t] * ex.lse[t] / (T - 1);
	put("mean of the micro-batch of tokens 0 to 3");
	put_double(mean_of_first);
	put("\nmean of the micro-batch of token 4      ");
	put_double((double)ex.lse[T - 1] * ex.lse[T - 1]);
	put("\nsum over the step / its 5 tokens        ");
	put_double(ex.z);
	put("\nmean of the two means                   ");
	put_double((mean_of_first + (double)ex.lse[T - 1] * ex.lse[T - 1]) / 2);
	put("\n");
	expect_block(&at_block, "the division");
	if (strstr(at_block, "```text\n"))
		fail_msg("docs/moe.md has one more ```text block than this test prints");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_forward),
		cmocka_unit_test(test_backward),
		cmocka_unit_test(test_router_v2),
		cmocka_unit_test(test_ranks),
		cmocka_unit_test(test_page),
	};
	return cmocka_run_group_tests(tests, compute, NULL);
}
