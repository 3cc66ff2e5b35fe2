/*
 * kernels.h - arithmetic on arrays: each operation as a forward and backward pair, the optimizer, random numbers.
 *
 * Letters for sizes, here and in ling.h: B sequences of L tokens, T = B L tokens, H hidden size, V vocabulary, nh and
 * nkv query and key-value heads, d head_dim, E experts, k experts of a token, I the width of an expert, R = T k expert
 * rows. Arrays are row-major; in [A, B] the elements of B are contiguous. Shapes are given as `name [sizes]`.
 *
 * In a backward function dX is the gradient of the loss with respect to X and has the shape of X. It is written; with
 * `accumulate` true it is added to. "Adds to" means that it always is. No two arrays of a call may overlap, except
 * where it says so. No function can fail.
 */
#ifndef LING_KERNELS_H
#define LING_KERNELS_H

#include "files/base.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* -- OpenBLAS, and the number of threads -- */

/* Call once, before any other kernel. `openblas`: OpenBLAS computes the matrix products instead of ling's own kernel,
 * to check a doubtful number or where it is faster; but not those that take rows by a list or weights in bfloat16 or
 * in two parts. */
void kernels_init(bool openblas);
/* The threads that a kernel uses: OMP_NUM_THREADS. */
int kernels_threads(void);
/* Uses so many threads from now on, also where they are more than the cores. */
void kernels_set_threads(int threads);
/* Measures how the work is cut: from now on each thread calls task(observer, true) when a task begins that goes to
 * whichever thread is free, and task(observer, false) when it ends. NULL: no more. */
void kernels_observe(void (*task)(void *observer, bool begins), void *observer);

/* A single product c [m, n] = A B, to check and measure: a is A [m, k], or if transpose_a its transpose [k, m]; b is
 * B [k, n], or if transpose_b its transpose [n, k]. By OpenBLAS with so many threads, or if openblas_threads is 0 by
 * ling's kernel on one thread. */
void single_gemm(real *c, const real *a, bool transpose_a, const real *b, bool transpose_b, int64_t m, int64_t n,
		int64_t k, int openblas_threads);

/* The name of the kernel that OpenBLAS chose for this processor, such as "Haswell". */
const char *blas_core(void);
/* The name of the best kernel for this processor, if OpenBLAS chose a lesser one (an old release does not know a new
 * processor); else NULL. To use it, set OPENBLAS_CORETYPE to it before the program starts: OpenBLAS reads it only
 * while it is loaded. */
const char *blas_better_core(void);

/* -- plain arrays -- */

/* The sum of x[i]^2 over n elements, in double. */
double sum_of_squares(const real *x, int64_t n);
/* `bytes` of zeros for a large array, to be released with free(), or NULL. On huge pages where the system has them,
 * since products read all of it; and written first by all threads, so that each page is near one of them. */
void *allocate_large(size_t bytes);
/* out [n] = in [n]. */
void copy_array(real *out, const real *in, int64_t n);
/* out[t, j] = x[t, j] for the first `cols` columns of T rows; rows are out_width and x_width apart. */
void copy_columns(real *out, int64_t out_width, const real *x, int64_t x_width, int64_t T, int64_t cols);
/* out [T, N]: out[t, j] = x[t, j] * scale[j]; x [T, N], scale [N]. out may be x. */
void scale_columns(real *out, const real *x, const real *scale, int64_t T, int64_t N);
/* Elements of the `scratch` that bias_backward and rmsnorm_backward need for rows of N elements. */
int64_t row_sum_scratch(int64_t N);

/* -- matrix products -- */

/* A weight [N, K] as it is stored: reals, or bfloat16 as in a mapped file. If `second` is not NULL, the rows from N /
 * 2 on begin there: gate and up, two tensors of a file, are one weight. */
struct weight { const void *data, *second; bool bf16; };
/* out [G]: the G weights of `size` elements each that are in memory one after the other from w on. */
void stack_weights(struct weight *out, const real *w, int G, int64_t size);

/* y [T, N] (+)= x [T, K] w^T + bias; w [N, K]; bias [N] or NULL. */
void matmul_forward(real *y, const real *x, const struct weight *w, const real *bias, int64_t T, int64_t K, int64_t N,
		bool accumulate);
/* dx [T, K] (+)= dy [T, N] w; w [N, K] */
void matmul_backward_input(real *dx, const real *dy, const real *w, int64_t T, int64_t K, int64_t N, bool accumulate);
/* dw [N, K] (+)= dy^T x; dy [T, N], x [T, K] */
void matmul_backward_weight(real *dw, const real *dy, const real *x, int64_t T, int64_t K, int64_t N, bool accumulate);
/* dbias [N] (+)= the sum of dy [T, N] over t; scratch [row_sum_scratch(N)] */
void bias_backward(real *dbias, const real *dy, int64_t T, int64_t N, bool accumulate, real *scratch);

/* The same in G groups of rows, of which each has its weight: rows offset[g] .. offset[g + 1] - 1 (none, if they are
 * equal) are those of group g; offset [G + 1], offset[0] = 0, R = offset[G]. A list of rows, row_index [R], may be
 * given for an operand, or NULL: row r of the product is then row row_index[r] of that array. This is a gather without
 * a copy; the array has as many rows as the list needs. */
/* y [R, N] (+)= x [R, K] w[g]^T; w [G] weights of [N, K]; row_index is that of x. */
void grouped_matmul_forward(real *y, const real *x, const int32_t *row_index, const struct weight *w,
		const int64_t *offset, int G, int64_t K, int64_t N, bool accumulate);
/* dx [R, K] (+)= dy [R, N] w[g]; w [G, N, K]; row_index is that of dy. */
void grouped_matmul_backward_input(real *dx, const real *dy, const int32_t *row_index, const real *w,
		const int64_t *offset, int G, int64_t K, int64_t N, bool accumulate);
/* dw [G, N, K]: dw[g] (+)= dy^T x over the rows of group g, 0 without rows; dy [R, N], x [R, K]. */
void grouped_matmul_backward_weight(real *dw, const real *dy, const int32_t *dy_row_index, const real *x,
		const int32_t *x_row_index, const int64_t *offset, int G, int64_t K, int64_t N, bool accumulate);

/* -- embedding -- */

/* out [T, H]: out[t] = w[token[t] - first], or 0 where that is no row of w [V, H]. w holds the vocabulary's entries
 * from `first` on, V of them: a rank may have a part. token [T]. w is in one part (second NULL). */
void embedding_forward(real *out, const int32_t *token, const struct weight *w, int64_t first, int64_t T, int64_t H,
		int64_t V);
/* dw [V, H] (+)= the sums of dout [T, H] over the tokens of each row. */
void embedding_backward(real *dw, const int32_t *token, const real *dout, int64_t first, int64_t T, int64_t H,
		int64_t V, bool accumulate);

/* -- RMSNorm -- */

/* out [T, H] = w x rstd, rstd [T] = 1 / sqrt(mean(x^2) + eps); x [T, H], w [H]. */
void rmsnorm_forward(real *out, real *rstd, const real *x, const real *w, int64_t T, int64_t H, double eps);
/* Adds to dx [T, H], in which the residual stream's own gradient already is. dw [H]; scratch [row_sum_scratch(H)]. */
void rmsnorm_backward(real *dx, real *dw, const real *dout, const real *x, const real *w, const real *rstd, int64_t T,
		int64_t H, bool accumulate, real *scratch);

/* -- RMSNorm of each query and key head -- In place on qkv [T, (nh + 2 nkv) d], of which a row is all query heads, then
 * all key heads, then all value heads. */

/* w [2, d]: that of the query heads, then that of the key heads. heads [T, (nh + nkv) d]: the queries and keys before;
 * rstd [T, nh + nkv]; both are for the backward pass, and may be NULL. */
void qk_norm_forward(real *qkv, real *heads, real *rstd, const real *w, int64_t T, int nh, int nkv, int64_t d,
		double eps);
/* dqkv is the gradient with respect to the result before, and to the argument after. dw [2, d]; scratch
 * [row_sum_scratch(2 d)]. */
void qk_norm_backward(real *dqkv, real *dw, const real *heads, const real *rstd, const real *w, int64_t T, int nh,
		int nkv, int64_t d, bool accumulate, real *scratch);

/* -- rotary position embedding -- In place on the first `rot` elements of each query and key head of qkv; rot is even,
 * 2 .. d. T = B L; token t has position t % L. `document` [T], here and in attention, gives the position in its
 * sequence where each token's document begins: positions count from there, and attention does not reach before it.
 * NULL: each sequence is one document, document[t] = 0. */

/* table [L, rot]: of each position t rot/2 cosines, then rot/2 sines, of the angles t frequency[i], times scale.
 * frequency [rot/2]. */
void rope_table(real *table, int64_t L, int64_t rot, const double *frequency, double scale);
void rope_forward(real *qkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv,
		int64_t d, int64_t rot);
void rope_backward(real *dqkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv,
		int64_t d, int64_t rot);

/* -- causal attention -- */

/* Elements of `scratch`, for all threads. */
int64_t attention_scratch(int64_t d);
/* out [B L, nh d] from qkv [B L, (nh + 2 nkv) d] after RoPE; lse [B L, nh] the log-sum-exp of each query's scores. */
void attention_forward(real *out, real *lse, const real *qkv, const int32_t *document, int64_t B, int64_t L, int nh,
		int nkv, int64_t d, real *scratch);
/* dqkv [B L, (nh + 2 nkv) d] with respect to qkv after RoPE; out and lse are those of the forward pass. Where there are
 * fewer key-value heads than threads, the threads share them in shared_scratch [shared_size], which may have any size:
 * with fewer than 131,072 elements they are not shared, and of more than four times as many for each thread the rest is
 * not used. No bit depends on it. */
void attention_backward(real *dqkv, const real *dout, const real *out, const real *lse, const real *qkv,
		const int32_t *document, int64_t B, int64_t L, int nh, int nkv, int64_t d, real *scratch, real *shared_scratch,
		int64_t shared_size);

/* Generation: the keys and values of a sequence so far, of which `length` positions are filled. They are rows of a
 * pool, kv [layers, rows, 2 nkv d] after RoPE (a row is all key heads, then all value heads), in which sequences may
 * share rows. Position p has row block[p / KV_BLOCK] + p % KV_BLOCK of each layer: a block is contiguous, and may be
 * anywhere. To take tokens back, lower length. */
enum { KV_BLOCK = 256 };       /* positions of a block: as many keys as attention takes at a time */
struct kv_cache { real *kv; int64_t rows; const int64_t *block; int64_t length; };
/* The next tokens of the sequence in `cache`; token [num_tokens]. */
struct segment { struct kv_cache *cache; const int32_t *token; int64_t num_tokens; };
/* Attention for the next tokens of n sequences, whose rows are in qkv and out one segment after the other. Their keys
 * and values are in the caches already, at positions length .. length + num_tokens - 1 of `layer`. The bits are those
 * of attention_forward over the whole sequences. */
void attention_extend(real *out, const real *qkv, const struct segment *segments, int n, int layer, int nh, int nkv,
		int64_t d, real *scratch);

/* -- SwiGLU, with the product before it --
 * In groups of rows, with a list of rows or NULL, as in the grouped products above. */

/* gate_up [R, 2I] = x w[g]^T: gate, then up; x [R, H], w [G] weights of [2I, H]; row_index is that of x.
 * act [R, I] = weight[r] silu(gate) up; weight [R], or NULL for 1. */
void swiglu_forward(real *act, real *gate_up, const real *x, const int32_t *row_index, const struct weight *w,
		const real *weight, const int64_t *offset, int G, int64_t H, int64_t I);
/* The backward pass from y [R, H] = act w_down[g]^T, the product after SwiGLU; w_down [G, H, I]. dout [R, H] is the
 * gradient of y; row_index is that of dout. Gives dgate_up [R, 2I], dweight [R] (or NULL), and act [R, I] once more,
 * which need not be kept from the forward pass. */
void swiglu_backward(real *dgate_up, real *act, real *dweight, const real *dout, const int32_t *row_index,
		const real *w_down, const real *gate_up, const real *weight, const int64_t *offset, int G, int64_t H,
		int64_t I);

/* -- random numbers: each depends on (seed, purpose, step, position) alone -- */

/* Purposes; the low 16 bits are free for the caller, for a layer's number for example. */
enum { RANDOM_INIT = 1 << 16, RANDOM_SHUFFLE = 2 << 16, RANDOM_ROUTING = 3 << 16, RANDOM_SAMPLING = 4 << 16,
	RANDOM_EXAMPLES = 5 << 16, RANDOM_RETRY = 6 << 16, RANDOM_FAULTS = 7 << 16, RANDOM_SAMPLES = 8 << 16,
	RANDOM_PERTURB = 9 << 16, RANDOM_SCALING = 10 << 16 };
struct random_stream {
	uint64_t seed;
	uint32_t purpose, step;
	uint64_t first;              /* added to every position */
};
/* Philox4x32-10: four words from a counter and a key. */
void philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);
/* out [n]: out[i] is the number at position + i, standard normal, or uniform in (0, 1) (1 itself after rounding to
 * float). */
void random_normal(real *out, int64_t n, const struct random_stream *s, uint64_t position);
void random_uniform(real *out, int64_t n, const struct random_stream *s, uint64_t position);
/* Where a random permutation of 0 .. n - 1 takes i < n; no table is needed. */
uint64_t random_permute(uint64_t i, uint64_t n, const struct random_stream *s);

/* -- router -- */

/* What a router makes of its logits s: scores p, and of these the k experts of a token and their weights. */
struct routing {
	bool sigmoid;                /* p = sigmoid(s) of each expert alone; else p = softmax(s) */
	int k;
	int groups, top_groups;      /* see topk_forward; 1, 1: no groups */
	bool normalise;              /* the weights of a token are p over the sum of the k chosen, plus 1e-20; else p, */
	double scale;                /* both times this; 1 with softmax */
};

/* p [T, E] = the scores of each row of s [T, E]; lse [T] the log-sum-exp of each row, or NULL: then p may be s. */
void scores_forward(real *p, real *lse, const real *s, int64_t T, int64_t E, bool sigmoid);
/* Stochastic routing warmup: s_hat [T, E] = alpha s + (1 - alpha) (mean + std eps), eps the standard normal number of
 * `noise` at position t E + e. */
void routing_noise_forward(real *s_hat, const real *s, double alpha, double mean, double std,
		const struct random_stream *noise, int64_t T, int64_t E);
/* index [T, k]: the experts with the k largest of p + bias, largest first, among equals the lower index first; p [T,
 * E], bias [E] or NULL for zeros. With groups, each a run of E / groups experts, those of the top_groups groups alone
 * whose two largest p + bias have the largest sums, among equals the lower group first; groups then have two experts or
 * more, and top_groups of them k or more. NaN counts as the largest: it is not hidden. weight [T, k]: from p alone. */
void topk_forward(int32_t *index, real *weight, const real *p, const real *bias, int64_t T, int64_t E,
		const struct routing *r);
/* ds [T, E], with respect to the logits whose scores p are, from dweight [T, k]. The choice has no gradient. */
void topk_backward(real *ds, const real *dweight, const int32_t *index, const real *weight, const real *p, int64_t T,
		int64_t E, const struct routing *r);

/* For each of the B sequences of L tokens of a micro-batch, sums over its tokens among the T tokens from token `first`
 * of the micro-batch on. These T are the ones of s, p [T, E], lse [T] and index [T, k]. Of each sequence the first
 * length[b] tokens count, the rest is padding; length [B], NULL: all do. count [B, E]: assignments; q_sum [B, E]: sums
 * of q, which is p, or with sigmoids p over the token's sum of them, plus 1e-20; sums [B]. */
struct router_sums { double s, s_squared, z; }; /* of the logits, of their squares, and of lse^2 */
void router_statistics(struct router_sums *sums, double *count, double *q_sum, const real *s, const real *p,
		const real *lse, const int32_t *index, const int32_t *length, int64_t first, int64_t T, int64_t B, int64_t L,
		int64_t E, const struct routing *r);
/* Adds to ds [T, E] the gradient of balance_scale * sum_e factor[b, e] q_e + z_scale * lse^2 of each of these tokens,
 * b being its sequence; factor [B, E]. Nothing for padding. s [T, E] is only read with sigmoids. */
void router_loss_backward(real *ds, const real *s, const real *p, const real *lse, const real *factor,
		const int32_t *length, int64_t first, int64_t T, int64_t L, int64_t E, double balance_scale, double z_scale,
		const struct routing *r);

/* -- token dispatch: R = T k rows, sorted by expert -- */

/* From index [T, k]: offset [E + 1], where the rows of each expert begin, R in the end; position [R], the row of
 * assignment i = t k + j (choice j of token t); token [R], the token of each row. The rows of an expert are in the
 * order of the tokens. */
void dispatch_plan(int64_t *offset, int32_t *position, int32_t *token, const int32_t *index, int64_t R, int k, int E);
/* rows [R, H]: rows[r] = x[token[r]]; x [T, H]. The backward pass of combine_rows. */
void gather_rows(real *rows, const real *x, const int32_t *token, int64_t R, int64_t H);
/* y [T, H]: y[t] (+)= the sum of the rows of token t, in the order of its k choices. The backward pass of gather_rows.
 * position < 0: no row for this choice. The first choice always has one. */
void combine_rows(real *y, const real *rows, const int32_t *position, int64_t T, int k, int64_t H, bool accumulate);
/* Where the experts are on `ranks` ranks, rank r has experts r `experts` .. (r + 1) `experts` - 1, and a token's row
 * goes once to each rank that has some of its experts. Rows and assignments are sent in the order of the ranks; those
 * for a rank in the order of the tokens, and of a token's choices.
 * From index [T, k]: rows, assignments [ranks], how many go to each rank; token [sum of rows], the token of each row;
 * position [R], the place of assignment i among all that are sent; row [R], the row of assignment i if it is the first
 * of its token that goes to this rank, else -1. */
void send_plan(int64_t *rows, int64_t *assignments, int32_t *token, int32_t *position, int32_t *row,
		const int32_t *index, int64_t T, int k, int ranks, int experts);
/* out [R, 2]: what the experts' ranks are told of each assignment, in the order of sending: its weight; and 2 e + 1 if
 * a new row begins with it, else 2 e, e being the number of its expert on that rank. weight, index, position and row
 * [R] as in send_plan. */
void pack_assignments(real *out, const real *weight, const int32_t *index, const int32_t *position, const int32_t *row,
		int64_t R, int experts);
/* What the A assignments [A, 2] that arrived say, sorted by expert: offset [experts + 1]; row, weight [A], the arrived
 * row and the weight of each. And in the order of arrival: place [A], where each is in that order; begin [rows + 1],
 * the first assignment of each arrived row, A in the end. */
void arrival_plan(int64_t *offset, int32_t *row, real *weight, int32_t *place, int32_t *begin, const real *assignments,
		int64_t A, int experts);
/* out [P, H]: out[p] = the sum of rows[place[i]], i from begin[p] to begin[p + 1] - 1, at least one. */
void combine_arrivals(real *out, const real *rows, const int32_t *place, const int32_t *begin, int64_t P, int64_t H);
/* out[position[i]] = in[i]: routing weights in the order of the rows; in, out [R]. */
void permute_forward(real *out, const real *in, const int32_t *position, int64_t R);
/* din[i] = dout[position[i]] */
void permute_backward(real *din, const real *dout, const int32_t *position, int64_t R);

/* -- NormHead and cross-entropy -- */

/* sum [H]: sum[j] = the sum over v of w[v, j]^2; w [V, H] in one part. */
void column_sum_of_squares(double *sum, const struct weight *w, int64_t V, int64_t H);

/* The cross-entropy, in nats, of T tokens. Each rank may have a part of the vocabulary: logits [T, V] are those of the
 * V entries from `first` on. target [T]; one < 0 does not count. The loss of token t is the sum of loss[t] over the
 * parts, plus the logarithm of the sum of sum[t] over the parts. */
/* max [T]: the largest logit of each token in this part. */
void logits_max(real *max, const real *logits, int64_t T, int64_t V);
/* loss [T] and sum [T], both 0 where the target does not count; max [T] is the largest over all parts. logits becomes
 * e^(logit - max) in place. */
void cross_entropy_forward(double *loss, double *sum, real *logits, const real *max, const int32_t *target,
		int64_t first, int64_t T, int64_t V);
/* dlogits [T, V] = scale (softmax - onehot(target)), or 0 where the target does not count; in place of what
 * cross_entropy_forward left there. sum [T] is that over all parts. */
void cross_entropy_backward(real *dlogits, const double *sum, const int32_t *target, int64_t first, double scale,
		int64_t T, int64_t V);

/* -- changes of weights in bfloat16, rounded to nearest, ties to even -- */

/* change [n] = w - before in bfloat16; and w = before. */
void take_change(uint16_t *change, real *w, const real *before, int64_t n);
/* w [n] += change */
void add_change(real *w, const uint16_t *change, int64_t n);

/* -- optimizer -- */

struct adamw {
	double lr, beta1, beta2, eps, weight_decay;
	double grad_scale;           /* the gradient is multiplied by it first: 1, or less where it is clipped */
	int64_t step;                /* updates done, this one included */
};
/* One update of n parameters w from grad, and of their moments exp_avg and exp_avg_sq; all [n]. Returns the sum of
 * squares of what w changed by. */
double adamw_update(real *w, real *exp_avg, real *exp_avg_sq, const real *grad, int64_t n, const struct adamw *o);

#endif
