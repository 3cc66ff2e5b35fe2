/*
 * kernels.h - arithmetic on arrays: each operation as a forward and backward pair, the optimizer, random numbers.
 */
#ifndef LING_KERNELS_H
#define LING_KERNELS_H

#include "files/base.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Call once, before any other kernel. `openblas`: the library computes the matrix products instead of ling's own kernel, as a second
 * opinion on a doubtful number, or where it is the faster; but for those whose rows come by a list, or from a bfloat16 file. */
void kernels_init(bool openblas);
int kernels_threads(void); /* threads that a kernel uses */

/* -- plain arrays -- */
double sum_of_squares(const real *x, int64_t n);
void copy_array(real *out, const real *in, int64_t n);
/* out[t, j] = x[t, j] * scale[j]; out may be x. */
void scale_columns(real *out, const real *x, const real *scale, int64_t T, int64_t N);
/* Elements of the `scratch` that bias_backward and rmsnorm_backward need for rows of N. */
int64_t row_sum_scratch(int64_t N);

/* A weight [N, K] where it lies: reals; or bfloat16, as a mapped file may have it. If `second` is not NULL, the second half of its rows
 * stands there: gate and up are two tensors of a file and one product. */
struct weight { const void *data, *second; bool bf16; };
/* out[g] is matrix g of G in memory, each of `size` elements, one behind the other from w on. */
void stack_weights(struct weight *out, const real *w, int G, int64_t size);

/* -- matrix products: y [T, N] = x [T, K] w^T, w [N, K]; bias [N] or NULL -- */
void matmul_forward(real *y, const real *x, const struct weight *w, const real *bias, int64_t T, int64_t K, int64_t N, bool accumulate);
void matmul_backward_input(real *dx, const real *dy, const real *w, int64_t T, int64_t K, int64_t N, bool accumulate);
void matmul_backward_weight(real *dw, const real *dy, const real *x, int64_t T, int64_t K, int64_t N, bool accumulate);
void bias_backward(real *dbias, const real *dy, int64_t T, int64_t N, bool accumulate, real *scratch);
/* The same for G weights w[G], in memory w [G, N, K]: rows offset[g] .. offset[g+1]-1 belong to group g, which may be empty. With a list `row` [R] row r of
 * that operand is its row[r]: a gather without a copy. */
void grouped_matmul_forward(real *y, const real *x, const int32_t *row_index, const struct weight *w, const int64_t *offset, int G, int64_t K,
		int64_t N, bool accumulate);
void grouped_matmul_backward_input(real *dx, const real *dy, const int32_t *row_index, const real *w, const int64_t *offset, int G, int64_t K,
		int64_t N, bool accumulate);
void grouped_matmul_backward_weight(real *dw, const real *dy, const int32_t *dy_row_index, const real *x, const int32_t *x_row_index,
		const int64_t *offset, int G, int64_t K, int64_t N, bool accumulate);

/* -- embedding: out [T, H] = w[token[t] - first], w [V, H] the part of the vocabulary from `first` on; 0 for a token of another part -- */
void embedding_forward(real *out, const int32_t *token, const struct weight *w, int64_t first, int64_t T, int64_t H, int64_t V);
void embedding_backward(real *dw, const int32_t *token, const real *dout, int64_t first, int64_t T, int64_t H, int64_t V, bool accumulate);

/* -- RMSNorm: out, x [T, H], w [H], rstd [T] = 1/sqrt(mean(x^2) + eps). The backward pass ADDS to dx: the residual stream's
 *    own gradient is there already. -- */
void rmsnorm_forward(real *out, real *rstd, const real *x, const real *w, int64_t T, int64_t H, double eps);
void rmsnorm_backward(real *dx, real *dw, const real *dout, const real *x, const real *w, const real *rstd, int64_t T, int64_t H,
		bool accumulate, real *scratch);

/* -- rotary embedding, in place on qkv [T, (nh + 2 nkv) d]; table [L, d]: d/2 cosines, then d/2 sines, of each position. `document` [T], here and
 *    for attention: where in its sequence the document of each token begins, from which positions count and beyond which attention does not
 *    reach; NULL: all of a sequence is one -- */
void rope_table(real *table, int64_t L, int64_t d, double theta);
void rope_forward(real *qkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv, int64_t d);
void rope_backward(real *dqkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv, int64_t d);

/* -- causal attention: qkv [B*L, (nh + 2 nkv) d] = query heads, key heads, value heads; out [B*L, nh d]; lse [B*L, nh] -- */
int64_t attention_scratch(int64_t d); /* elements of `scratch` */
void attention_forward(real *out, real *lse, const real *qkv, const int32_t *document, int64_t B, int64_t L, int nh, int nkv, int64_t d,
		real *scratch);
void attention_backward(real *dqkv, const real *dout, const real *out, const real *lse, const real *qkv, const int32_t *document, int64_t B,
		int64_t L, int nh, int nkv, int64_t d, real *scratch);

/* Generation: a sequence that remembers its keys and values, kv [layers, capacity, 2 nkv d] after RoPE, of `length` tokens so far; and its next
 * tokens. To take tokens back, lower length. */
struct kv_cache { real *kv; int64_t length, capacity; };
struct segment { struct kv_cache *cache; const int32_t *token; int64_t num_tokens; };
/* The same for the next tokens of n sequences, whose rows stand one segment behind the other in qkv and out; their keys and values are in
 * the caches already, from position `length` on. The bits are those of the forward pass over the whole sequence. */
void attention_extend(real *out, const real *qkv, const struct segment *segments, int n, int layer, int nh, int nkv, int64_t d, real *scratch);

/* -- SwiGLU and the product before it, in groups of rows as above: gate_up [R, 2I] = gate, up = x w^T, w[G] of [2I, H];
 *    act [R, I] = weight[r] silu(gate) up; weight [R], or NULL for 1. The backward pass begins with the product behind it: dout are the gradients
 *    of that product's outputs without the weight, w_down [G, H, I]. It also gives act again (it is not kept from the forward pass) and
 *    dweight [R] (or NULL). A list `row` is that of x, or of dout. -- */
void swiglu_forward(real *act, real *gate_up, const real *x, const int32_t *row_index, const struct weight *w, const real *weight,
		const int64_t *offset, int G, int64_t H, int64_t I);
void swiglu_backward(real *dgate_up, real *act, real *dweight, const real *dout, const int32_t *row_index, const real *w_down, const real *gate_up,
		const real *weight, const int64_t *offset, int G, int64_t H, int64_t I);

/* -- random numbers: a value depends on (seed, purpose, step, position) alone -- */
enum { RANDOM_INIT = 1 << 16, RANDOM_SHUFFLE = 2 << 16, RANDOM_ROUTING = 3 << 16, RANDOM_SAMPLING = 4 << 16,
	RANDOM_EXAMPLES = 5 << 16 }; /* the low 16 bits: a layer, say */
struct random_stream {
	uint64_t seed;
	uint32_t purpose, step;
	uint64_t first;              /* added to every position */
};
void philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);
/* out[i] is the value at position + i: standard normal, or uniform in (0, 1). */
void random_normal(real *out, int64_t n, const struct random_stream *s, uint64_t position);
void random_uniform(real *out, int64_t n, const struct random_stream *s, uint64_t position);
/* The image of i under a random permutation of [0, n), without a table. */
uint64_t random_permute(uint64_t i, uint64_t n, const struct random_stream *s);

/* -- router: logits s [T, E] -> probabilities p [T, E] -> index, weight [T, k] -- */
/* p = softmax(s) by row; lse [T] its log-sum-exp, or NULL. p may be s. */
void softmax_forward(real *p, real *lse, const real *s, int64_t T, int64_t E);
/* Stochastic routing warmup: s_hat = alpha s + (1 - alpha) (mean + std eps), eps standard normal at position t*E + e. */
void routing_noise_forward(real *s_hat, const real *s, double alpha, double mean, double std, const struct random_stream *noise,
		int64_t T, int64_t E);
/* The k largest of each row, in falling order, the lower index first among equals; weight is p, over the winners' sum if
 * renormalise. The backward pass gives the gradient with respect to the logits behind p. */
void topk_forward(int32_t *index, real *weight, const real *p, int64_t T, int64_t E, int k, bool renormalise);
void topk_backward(real *ds, const real *dweight, const int32_t *index, const real *weight, const real *p, int64_t T, int64_t E,
		int k, bool renormalise);
/* Sums over T tokens from token `first` of a micro-batch [B, L] on, for each of its sequences: count [B, E] assignments, p_sum [B, E]
 * probabilities, and sums[B]. */
struct router_sums { double s, s_squared, z; }; /* of the logits, their squares, and lse^2 */
void router_statistics(struct router_sums *sums, double *count, double *p_sum, const real *s, const real *p, const real *lse,
		const int32_t *index, int64_t first, int64_t T, int64_t B, int64_t L, int64_t E, int k);
/* Adds to ds the gradient of  balance_scale * sum_e factor[b, e] p_e + z_scale * lse^2  of each of these tokens, b its sequence; factor
 * [B, E]. */
void router_loss_backward(real *ds, const real *p, const real *lse, const real *factor, int64_t first, int64_t T, int64_t L, int64_t E,
		double balance_scale, double z_scale);

/* -- token dispatch: R = T*k rows, sorted by expert; index [T, k] -- */
/* offset [E + 1]: where each expert's rows start; position [R]: the row of assignment i = t*k + j; token [R]: the token of each row. */
void dispatch_plan(int64_t *offset, int32_t *position, int32_t *token, const int32_t *index, int64_t R, int k, int E);
/* rows [R, H] = x[token[r]]; and its transpose y [T, H] = the sum of a token's k rows. Each is the other's backward. */
void gather_rows(real *rows, const real *x, const int32_t *token, int64_t R, int64_t H);
void combine_rows(real *y, const real *rows, const int32_t *position, int64_t T, int k, int64_t H, bool accumulate);
/* Rows arrive rank by rank, each rank's sorted by expert, count [ranks, experts]: offset [experts + 1] and row [R] sort them by expert. */
void arrival_plan(int64_t *offset, int32_t *row, const int64_t *count, int ranks, int experts);
/* out[row[r]] = rows[r]: back to the order of arrival, or any list that names each row once. */
void scatter_rows(real *out, const real *rows, const int32_t *row, int64_t R, int64_t H);
/* out[position[i]] = in[i]: the routing weights in row order, and back. */
void permute_forward(real *out, const real *in, const int32_t *position, int64_t R);
void permute_backward(real *din, const real *dout, const int32_t *position, int64_t R);

/* -- head -- */
/* sum [H] = the sum over v of w[v, j]^2, w [V, H]. */
void column_sum_of_squares(double *sum, const struct weight *w, int64_t V, int64_t H);
/* Cross-entropy over a vocabulary of which V entries from `first` on are here, logits [T, V]. With max [T] the largest of all logits, loss =
 * sum over the parts of loss[t], plus log of the sum over the parts of sum[t], in nats; a target < 0 is ignored: 0 and 0.
 * In place, logits become e^(logit - max). */
void logits_max(real *max, const real *logits, int64_t T, int64_t V);
void cross_entropy_forward(double *loss, double *sum, real *logits, const real *max, const int32_t *target, int64_t first, int64_t T,
		int64_t V);
/* In place, from what the forward pass left, with the whole vocabulary's sum: scale * (softmax - onehot(target)); ignored rows become 0. */
void cross_entropy_backward(real *dlogits, const double *sum, const int32_t *target, int64_t first, double scale, int64_t T, int64_t V);

/* -- optimizer -- */
struct adamw {
	double lr, beta1, beta2, eps, weight_decay;
	double grad_scale;           /* the gradient is multiplied by this first: the clip */
	int64_t step;                /* updates done, this one included */
};
void adamw_update(real *w, real *exp_avg, real *exp_avg_sq, const real *grad, int64_t n, const struct adamw *o);

/* -- the machine -- */
const char *blas_core(void);   /* the kernel that the library chose, such as "Haswell" */
/* The best kernel this processor can run if the library chose a lesser one (an old release does not know a new processor), else
 * NULL. It takes effect through OPENBLAS_CORETYPE, which the library reads only while it is loaded. */
const char *blas_better_core(void);
/* Seconds of the fastest of `repeats` products of n x n matrices with the library's own threads; with all of them, the roof that
 * training is measured against. a, b, c [n, n]. */
double blas_roof(real *a, real *b, real *c, int64_t n, int repeats, int threads);
/* Error of the products, OpenBLAS's or ling's own, against plain loops, relative, by norm, the worst of the three forms that training uses.
 * Some builds of the library compute wrong products on newer processors. */
double product_error(bool openblas);
/* Bytes a second of the fastest of some copies by all threads, reads and writes counted. */
double memory_bandwidth(real *out, const real *in, int64_t n);
const char *cpu_features(char out[256]); /* those that decide which kernels can run */

/* The larger of two errors; a NaN is the largest. */
double worse(double a, double b);

#endif
