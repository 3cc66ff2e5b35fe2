/*
 * ling.c - the model and one training run.
 *
 * First what is to be read, in the order of a training step:
 *   Sizes, operations, tokens of a rank     a few helpers
 *   Forward                             embedding; attention, router and experts of a layer; final norm
 *   Head and loss                       logits and cross-entropy, and their backward pass
 *   Backward                            the layers from the last one down
 *   Gradient reduction                  sums of the gradients over the ranks
 *   Schedules                           learning rate, batch size
 *   The step                            gradients, decision, update, report
 *   The loop                            batch, step, evaluation, metrics, checkpoint
 * Then what the above stands on:
 *   Checkpoints                         saving one
 *   Making a trainer                    new, or continued from a checkpoint
 * In comments, "alone" means: with one process, where every group of ranks has size 1.
 */
#define _GNU_SOURCE
#include "ling.h"

#include "files/base.h"
#include "files/trace.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "files/tensors.h"
#include "files/safetensors.h"
#include "files/tokenizer.h"
#include "files/checkpoint.h"
#include "data.h"
#include "model/parameters.h"
#include "model/weight_files.h"
#include "model/memory.h"
#include "model/weights.h"
#include "model/dump.h"
#include "training/events.h"
#include "training/saving.h"
#include "training/spikes.h"
#include "training/decision.h"
#include "training/faults.h"
#include "training/health.h"
#include "training/local_sgd.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ============================================================================================================
 * Sizes, operations, tokens of a rank
 * ========================================================================================================== */

/* An operation begins, which the trace counts (files/trace.h). Also lets the collectives that are under way proceed,
 * since an operation is a good length of time between two calls of MPI. */
static void begin(enum operation op, enum pass pass, int layer, double work)
{
	trace_begin(op, pass, layer, work);
	parallel_progress();
}

/* The work of a product of [T, K] and [K, N], in FLOPs. */
static double product(int64_t T, int64_t K, int64_t N)
{
	return 2.0 * T * K * N;
}

/* The work of reading or writing n numbers, in bytes. */
static double moved(int64_t n)
{
	return (double)n * sizeof(real);
}

/* The FLOPs of causal attention of T tokens in windows of L, forward: two products for each of the (L + 1) / 2 keys
 * that a query sees in the mean. Where documents are masked it is less: this is then too much. */
static double attention_work(const struct model *m, int64_t T)
{
	return 2 * product(T, attention_width(&m->config), 1) * (m->seq_len + 1) / 2;
}

/* Those of the T tokens of a micro-batch that this rank has between attention and head: returns their number N, and
 * the first of them. Alone: all T, and 0. */
static int64_t own_tokens(const struct model *m, int64_t T, int64_t *first)
{
	const struct group *g = &m->layout.tensor;
	*first = shard_begin(T, g->rank, g->size);
	return shard_begin(T, g->rank + 1, g->size) - *first;
}

/* Gathers all T tokens [T, H] from the tensor group, of which each rank has its N. Alone: they are `own`. The backward
 * pass of a gathered value is reduce_scatter_sequence. */
static const real *all_gather_sequence(struct model *m, const real *own, int64_t T)
{
	if (m->layout.tensor.size == 1)
		return own;
	all_gather(&m->layout.tensor, TRAFFIC_GATHER, m->acts.gathered, own, T, m->config.hidden_size);
	return m->acts.gathered;
}

/* Where this rank puts its summand [T, H] of a sum over the tensor group, which reduce_scatter_sequence then adds to
 * `own` or writes there. Alone: `own` itself, to which a product can add at once. */
static real *partial_sums(struct model *m, real *own)
{
	return m->layout.tensor.size == 1 ? own : m->acts.partial;
}

/* own [N, H] = (accumulate: +=) this rank's tokens of the sum over the tensor group of all partial_sums. Alone:
 * nothing is left to do. */
static void reduce_scatter_sequence(struct model *m, real *own, bool accumulate, int64_t T)
{
	if (m->layout.tensor.size > 1)
		reduce_scatter(&m->layout.tensor, TRAFFIC_SUM, own, accumulate, m->acts.partial, T, m->config.hidden_size,
				m->acts.reduce_scatter_scratch);
}

struct step_sums step_sums_shape(const struct model_config *c)
{
	const int64_t stride = sizeof(struct layer_sums) / sizeof(double) + c->num_experts;
	return (struct step_sums){.size = NUM_SUMS + stride * c->num_hidden_layers, .stride = stride};
}

/* Allocates the sums; the caller frees s->values. */
static int step_sums_init(struct step_sums *s, const struct model_config *c)
{
	*s = step_sums_shape(c);
	s->values = calloc(s->size, sizeof *s->values);
	return s->values ? 0 : fail("out of memory for the sums of %d layers", c->num_hidden_layers);
}

static struct layer_sums *layer_sums(const struct step_sums *s, int layer)
{
	return (struct layer_sums *)(s->values + NUM_SUMS + s->stride * layer);
}

/* ============================================================================================================
 * Forward
 *
 *     h = E[token]
 *     per layer:  h += Attention(RMSNorm(h));  h += MoE(RMSNorm(h))
 *     logits = NormHead(RMSNorm(h))
 *
 * h is the residual stream. T tokens are those of B whole windows, or, with segments, the next tokens of n sequences
 * whose earlier keys and values are in caches.
 * ========================================================================================================== */

/* The attention of the next tokens of some sequences. Their keys and values enter the caches here; model_extend counts
 * them. */
static void attention_segments(struct model *m, int l, const struct segment *segments, int n)
{
	const struct model_config *c = &m->config;
	struct layer_activations *x = &m->acts.layer[l];
	const int nh = c->num_attention_heads, nkv = c->num_key_value_heads, d = c->head_dim;
	const int width = qkv_width(c), kv_width = 2 * nkv * d;
	real *qkv = x->qkv;
	for (int i = 0; i < n; i++) {
		const struct kv_cache *cache = segments[i].cache;
		real *kv = cache->kv + (l * cache->capacity + cache->length) * kv_width;
		rope_forward(qkv, m->rope + cache->length * d, NULL, segments[i].num_tokens, segments[i].num_tokens, nh, nkv,
				d);
		for (int64_t t = 0; t < segments[i].num_tokens; t++, qkv += width, kv += kv_width)
			memcpy(kv, qkv + nh * d, kv_width * sizeof *kv);
	}
	attention_extend(x->attention, x->qkv, segments, n, l, nh, nkv, d, m->acts.attention_scratch);
}

/* attention [T, nh d] = the heads' outputs for RMSNorm(input), before the output product. */
static void attention_core_forward(struct model *m, int l, int64_t T, const struct segment *segments, int n)
{
	const struct model_config *c = &m->config;
	const struct layer_params *p = &m->params.layer[l];
	struct layer_activations *x = &m->acts.layer[l];
	int64_t first;
	const int64_t L = m->seq_len, H = c->hidden_size, N = own_tokens(m, T, &first);
	const int nh = c->num_attention_heads, nkv = c->num_key_value_heads, d = c->head_dim;
	begin(OP_ATTENTION_NORM, PASS_FORWARD, l, moved(2 * N * H));
	rmsnorm_forward(m->acts.normed, x->attention_rstd, x->input, p->attention_norm, N, H, c->rms_norm_eps);
	dump_output(m, DUMP_ATTENTION_NORM, l, m->acts.normed);
	begin(OP_QKV, PASS_FORWARD, l, product(T, H, qkv_width(c)));
	const real *normed = all_gather_sequence(m, m->acts.normed, T);
	matmul_forward(x->qkv, normed, &m->weights[l].qkv, p->qkv_bias, T, H, qkv_width(c), false);
	dump_output(m, DUMP_QKV, l, x->qkv);
	if (segments) {
		double work = 0;
		for (int i = 0; i < n; i++) /* a token sees what is in the cache, and half of the new ones in the mean */
			work += 2 * product(segments[i].num_tokens, attention_width(c), 1) *
					(segments[i].cache->length + (segments[i].num_tokens + 1) / 2.0);
		begin(OP_ATTENTION_CORE, PASS_FORWARD, l, work);
		attention_segments(m, l, segments, n);
		return;
	}
	begin(OP_ROPE, PASS_FORWARD, l, moved(2 * T * (nh + nkv) * d));
	rope_forward(x->qkv, m->rope, m->document, T, L, nh, nkv, d);
	dump_output(m, DUMP_ROPE, l, x->qkv);
	/* softmax(q k^T / sqrt(d)) v of each head */
	begin(OP_ATTENTION_CORE, PASS_FORWARD, l, attention_work(m, T));
	attention_forward(x->attention, x->lse, x->qkv, m->document, T / L, L, nh, nkv, d, m->acts.attention_scratch);
	dump_output(m, DUMP_ATTENTION_CORE, l, x->attention);
}

/* residual = input + Attention(RMSNorm(input)) */
static void attention_layer_forward(struct model *m, int l, int64_t T, const struct segment *segments, int n)
{
	const struct layer_params *p = &m->params.layer[l];
	struct layer_activations *x = &m->acts.layer[l];
	int64_t first;
	const int64_t H = m->config.hidden_size, N = own_tokens(m, T, &first);
	const struct group *tensor = &m->layout.tensor;
	attention_core_forward(m, l, T, segments, n);
	begin(OP_ATTENTION_OUTPUT, PASS_FORWARD, l, product(T, attention_width(&m->config), H));
	copy_array(x->residual, x->input, N * H);
	/* The output product sums over all heads: with a tensor group each rank has its heads' summand, and rank 0 adds
	 * the bias. */
	matmul_forward(partial_sums(m, x->residual), x->attention, &m->weights[l].dense,
			tensor->rank == 0 ? p->dense_bias : NULL, T, attention_width(&m->config), H, tensor->size == 1);
	reduce_scatter_sequence(m, x->residual, true, T);
	dump_output(m, DUMP_ATTENTION_OUTPUT, l, x->residual);
}

/* Adds to the step's sums what the router's losses and statistics need of this micro-batch's tokens, and leaves E f_e
 * for the backward pass: balance loss = E sum_e f_e P_e, f_e = assignments to e / (k tokens), P_e the mean of p_e;
 * z-loss = the mean of logsumexp(s)^2. */
static void router_losses(struct model *m, int l, int64_t T, const struct step *step, struct step_sums *sums)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t L = m->seq_len, B = T / L, E = c->num_experts, N = own_tokens(m, T, &first);
	const int k = c->num_experts_per_tok;
	double *count = a->sequence_count, *p_sum = a->sequence_p; /* [B, E] */
	router_statistics(a->router_sums, count, p_sum, a->logits, x->p, x->router_lse, x->index, m->length, first, N, B, L,
			E, k);
	struct layer_sums *sum = layer_sums(sums, l);
	for (int b = 0; b < B; b++) {
		for (int64_t e = 0; e < E; e++)
			sum->count[e] += count[b * E + e];
		sum->s += a->router_sums[b].s;
		sum->s_squared += a->router_sums[b].s_squared;
		sum->z += a->router_sums[b].z / step->num_tokens;
	}
	/* f_e needs the assignments of all tokens, whichever rank of the tensor group has them; of P_e each rank adds its
	 * own tokens' share. */
	all_reduce_sum(&m->layout.tensor, TRAFFIC_STATISTICS, count, B * E);
	int64_t all = 0; /* tokens of the micro-batch without padding */
	for (int b = 0; b < B; b++)
		all += m->length ? m->length[b] : L;
	if (c->router.balance_loss_scope == SCOPE_MICRO_BATCH) {
		for (int64_t e = 0; e < E; e++) {
			for (int b = 1; b < B; b++) {
				count[e] += count[b * E + e];
				p_sum[e] += p_sum[b * E + e];
			}
			for (int b = 1; b < B; b++)
				count[b * E + e] = count[e], p_sum[b * E + e] = 0;
		}
	}
	for (int64_t i = 0; i < B * E; i++) {
		/* tokens that count together: those of the sequence, or of the whole micro-batch */
		const int64_t together = c->router.balance_loss_scope == SCOPE_MICRO_BATCH ? all
				: m->length ? m->length[i / E] : L;
		double f = count[i] / ((double)k * together);
		x->balance_factor[i] = (real)(E * f);
		/* P_e is p_sum / together; weighted with the tokens' part of the step, together / num_tokens */
		sum->balance += E * f * p_sum[i] / step->num_tokens;
	}
}

/* p, index and weight of the tokens in acts.normed: their probabilities, the k chosen experts, and the experts'
 * weights. */
static void router_forward(struct model *m, int l, int64_t T, const struct step *step, struct step_sums *sums)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t L = m->seq_len, E = c->num_experts, N = own_tokens(m, T, &first);
	const int k = c->num_experts_per_tok;
	/* s = x W^T, p = softmax(s) */
	begin(OP_ROUTER_LOGITS, PASS_FORWARD, l, product(N, c->hidden_size, E));
	matmul_forward(a->logits, a->normed, &m->weights[l].router, NULL, N, c->hidden_size, E, false);
	dump_output(m, DUMP_ROUTER_LOGITS, l, a->logits);
	begin(OP_ROUTER_SOFTMAX, PASS_FORWARD, l, moved(2 * N * E));
	softmax_forward(x->p, x->router_lse, a->logits, N, E);
	const real *p = x->p;
	if (step && step->index < c->router.warmup_steps) {
		/* s_hat = a s + (1 - a)(mu + sigma eps), a = i/W; p_hat = softmax(s_hat) */
		struct random_stream noise = {.seed = step->seed, .purpose = RANDOM_ROUTING + l, .step = (uint32_t)step->index,
				.first = (uint64_t)((step->first_sequence * L + first) * E)};
		routing_noise_forward(x->p_hat, a->logits, (double)step->index / c->router.warmup_steps, step->router_mean[l],
				step->router_std[l], &noise, N, E);
		softmax_forward(x->p_hat, NULL, x->p_hat, N, E);
		p = x->p_hat;
	}
	dump_output(m, DUMP_ROUTER_SOFTMAX, l, p);
	/* weight = p of the k largest, over their sum */
	begin(OP_ROUTER_TOPK, PASS_FORWARD, l, moved(N * E));
	topk_forward(x->index, x->weight, p, N, E, k, c->norm_topk_prob && k > 1);
	dump_output(m, DUMP_ROUTER_TOPK, l, x->index);
	dump_output(m, DUMP_ROUTER_WEIGHTS, l, x->weight);
	if (sums) {
		begin(OP_ROUTER_LOSSES, PASS_FORWARD, l, moved(2 * N * E));
		router_losses(m, l, T, step, sums);
	}
}

static int64_t sum_of(const int64_t *x, int n)
{
	int64_t sum = 0;
	for (int i = 0; i < n; i++)
		sum += x[i];
	return sum;
}

/* Copies the row of `tokens` [N, H] of each token and rank that has experts of it, and starts to send the rows. They
 * arrive in `arrivals` [P, H]. */
static void dispatch_start(struct model *m, struct layer_activations *x, const real *tokens, real *arrivals)
{
	const int64_t H = m->config.hidden_size;
	gather_rows(m->acts.rows, tokens, x->sent_token, sum_of(x->sent_rows, m->layout.expert.size), H);
	all_to_all_start(&m->dispatch, &m->layout.expert, TRAFFIC_DISPATCH, arrivals, x->received_rows, m->acts.rows,
			x->sent_rows, H);
}

/* Adds up the rows of expert_rows [A, H], which are sorted by expert, that belong to the same arrived row, and sends
 * the sums back to the ranks that the rows came from: acts.rows [S, H]. */
static void return_rows(struct model *m, struct layer_activations *x)
{
	const int64_t H = m->config.hidden_size;
	struct collective e;
	combine_arrivals(m->acts.returns, m->acts.expert_rows, x->place, x->begin,
			sum_of(x->received_rows, m->layout.expert.size), H);
	all_to_all_start(&e, &m->layout.expert, TRAFFIC_RETURN, m->acts.rows, x->sent_rows, m->acts.returns,
			x->received_rows, H);
	collective_finish(&e);
}

/* Sends the N tokens in acts.normed to the ranks of their experts, with each assignment's expert and weight, and makes
 * the lists by which the experts read what arrives. The rows are still on their way when it returns. */
static void dispatch_forward(struct model *m, struct layer_activations *x, int64_t N)
{
	const struct group *g = &m->layout.expert;
	const int k = m->config.num_experts_per_tok, experts = m->num_experts;
	real *sent = m->acts.sent_assignments, *arrived = m->acts.arrived_assignments;
	int64_t *count = m->acts.rank_counts, *arrived_count = count + 2 * g->size; /* [ranks, 2] rows and assignments */
	struct collective e;
	send_plan(x->sent_rows, x->sent_assignments, x->sent_token, x->position, x->sent_row, x->index, N, k, g->size,
			experts);
	pack_assignments(sent, x->weight, x->index, x->position, x->sent_row, N * k, experts);
	for (int r = 0; r < g->size; r++) {
		count[2 * r] = x->sent_rows[r];
		count[2 * r + 1] = x->sent_assignments[r];
	}
	all_to_all_counts(g, TRAFFIC_PLAN, arrived_count, count, 2);
	for (int r = 0; r < g->size; r++) {
		x->received_rows[r] = arrived_count[2 * r];
		x->received_assignments[r] = arrived_count[2 * r + 1];
	}
	x->num_rows = sum_of(x->received_assignments, g->size);
	all_to_all_start(&e, g, TRAFFIC_DISPATCH, arrived, x->received_assignments, sent, x->sent_assignments, 2);
	collective_finish(&e);
	dispatch_start(m, x, m->acts.normed, x->arrivals);
	arrival_plan(x->expert_offset, x->row, x->expert_weight, x->place, x->begin, arrived, x->num_rows, experts);
}

/* The gradients of the routing weights, dexpert_weight [A] sorted by expert, go back to their tokens: dweight [N,
 * k]. */
static void return_weight_gradients(struct model *m, struct layer_activations *x, int64_t N)
{
	struct activations *a = &m->acts;
	const int k = m->config.num_experts_per_tok;
	struct collective e;
	if (m->layout.expert.size == 1) {
		permute_backward(a->dweight, a->dexpert_weight, x->position, N * k);
		return;
	}
	permute_backward(a->arrived_assignments, a->dexpert_weight, x->place, x->num_rows);
	all_to_all_start(&e, &m->layout.expert, TRAFFIC_RETURN, a->sent_assignments, x->sent_assignments,
			a->arrived_assignments, x->received_assignments, 1);
	collective_finish(&e);
	permute_backward(a->dweight, a->sent_assignments, x->position, N * k);
}

/* Rows that this rank sends to its expert group for N tokens, itself included, when the experts are balanced. */
static double balanced_sent_rows(const struct model *m, int64_t N)
{
	return N * m->layout.expert.size * dispatch_share(&m->config, m->layout.expert.size);
}

/* out = residual + MoE(RMSNorm(residual)): the routed experts, if the layer has them, plus the shared (or dense)
 * SwiGLU. With out NULL only what the backward pass needs is computed. */
static void ffn_layer_forward(struct model *m, int l, int64_t T, real *out, const struct step *step,
		struct step_sums *sums)
{
	const struct model_config *c = &m->config;
	const struct layer_params *p = &m->params.layer[l];
	const struct layer_weights *w = &m->weights[l];
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t N = own_tokens(m, T, &first), H = c->hidden_size, I = c->moe_intermediate_size,
			W = shared_width(c, l);
	const int64_t all_rows[] = {0, N}; /* the shared SwiGLU is one group of all tokens */
	const int k = c->num_experts_per_tok;
	const bool experts = has_experts(c, l), expert_parallel = m->layout.expert.size > 1;
	begin(OP_FFN_NORM, PASS_FORWARD, l, moved(2 * N * H));
	rmsnorm_forward(a->normed, x->ffn_rstd, x->residual, p->ffn_norm, N, H, c->rms_norm_eps);
	if (out)
		copy_array(out, x->residual, N * H);
	dump_output(m, DUMP_FFN_NORM, l, a->normed);
	if (experts) {
		router_forward(m, l, T, step, sums);
		begin(OP_DISPATCH, PASS_FORWARD, l, expert_parallel ? 2 * balanced_sent_rows(m, N) * moved(H) : 0);
		if (expert_parallel)
			dispatch_forward(m, x, N);
		else { /* Sort the rows by expert. None is copied: the products read row r from token x->row[r]. */
			dispatch_plan(x->expert_offset, x->position, x->row, x->index, N * k, k, c->num_experts);
			permute_forward(x->expert_weight, x->weight, x->position, N * k);
			x->num_rows = N * k;
		}
	}
	if (W) { /* out += down(silu(gate x) * up x), while the rows are on their way */
		begin(experts ? OP_SHARED_GATE_UP : OP_DENSE_GATE_UP, PASS_FORWARD, l, product(N, H, 2 * W));
		swiglu_forward(a->shared_act, x->shared_gate_up, a->normed, NULL, &w->shared_gate_up, NULL, all_rows, 1, H, W);
		dump_output(m, DUMP_SHARED_GATE_UP, l, x->shared_gate_up);
		begin(experts ? OP_SHARED_DOWN : OP_DENSE_DOWN, PASS_FORWARD, l, product(N, W, H));
		if (out)
			matmul_forward(out, a->shared_act, &w->shared_down, NULL, N, W, H, true);
	}
	if (experts) { /* out += the sum over a token's k experts of down(weight silu(gate x) * up x) */
		begin(OP_EXPERTS_GATE_UP, PASS_FORWARD, l, product(x->num_rows, H, 2 * I));
		if (expert_parallel)
			collective_finish(&m->dispatch);
		swiglu_forward(a->act, x->gate_up, expert_parallel ? x->arrivals : a->normed, x->row, w->gate_up,
				x->expert_weight, x->expert_offset, m->num_experts, H, I);
		dump_output(m, DUMP_EXPERTS_GATE_UP, l, x->gate_up);
		if (out) {
			begin(OP_EXPERTS_DOWN, PASS_FORWARD, l, product(x->num_rows, I, H));
			grouped_matmul_forward(a->expert_rows, a->act, NULL, w->down, x->expert_offset, m->num_experts, I, H,
					false);
			dump_output(m, DUMP_EXPERTS_DOWN, l, a->expert_rows);
			begin(OP_COMBINE, PASS_FORWARD, l, moved((k + 2) * N * H));
			if (expert_parallel)
				return_rows(m, x); /* alone expert_rows and rows are the same array, and sent_row is position */
			combine_rows(out, a->rows, x->sent_row, N, k, H, true);
		}
	}
	if (out)
		dump_output(m, DUMP_LAYER_OUTPUT, l, out);
}

/* The forward pass is about to read the weights of a block. */
static void before_block(struct model *m, int block)
{
	if (m->before_block)
		m->before_block(m->before_block_context, block);
}

/* The forward pass from the embedding on, which is in the first layer's partial_sums. */
static void layers_forward(struct model *m, int64_t T, const struct segment *segments, int n, const struct step *step,
		struct step_sums *sums)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	const int layers = c->num_hidden_layers;
	int64_t first;
	const int64_t N = own_tokens(m, T, &first);
	reduce_scatter_sequence(m, a->layer[0].input, false, T);
	dump_output(m, DUMP_EMBEDDING, -1, a->layer[0].input);
	for (int l = 0; l < layers; l++) {
		before_block(m, 1 + l);
		attention_layer_forward(m, l, T, segments, n);
		ffn_layer_forward(m, l, T, l + 1 < layers ? a->layer[l + 1].input : a->output, step, sums);
	}
	before_block(m, 1 + layers);
	begin(OP_NORM, PASS_FORWARD, -1, moved(2 * N * c->hidden_size));
	rmsnorm_forward(a->normed, a->rstd, a->output, m->params.norm, N, c->hidden_size, c->rms_norm_eps);
	dump_output(m, DUMP_NORM, -1, a->normed);
}

void model_forward(struct model *m, const int32_t *input, int B, const struct step *step, struct step_sums *sums)
{
	const int64_t T = (int64_t)B * m->seq_len, H = m->config.hidden_size;
	/* A rank of a tensor group has a part of the vocabulary, and 0 for tokens of the others': the embedding is the sum
	 * over the group. */
	before_block(m, 0);
	begin(OP_EMBEDDING, PASS_FORWARD, -1, moved(2 * T * H));
	embedding_forward(partial_sums(m, m->acts.layer[0].input), input, &m->embedding, m->first_vocab, T, H,
			m->config.vocab_size);
	layers_forward(m, T, NULL, 0, step, sums);
}

/* The final norm's results of all tokens: with a tensor group, those that model_extend has gathered. */
static real *all_results(struct model *m)
{
	return m->layout.tensor.size == 1 ? m->acts.normed : m->acts.gathered;
}

real *model_extend(struct model *m, const struct segment *segments, int n)
{
	const int64_t H = m->config.hidden_size;
	real *embedded = partial_sums(m, m->acts.layer[0].input);
	int64_t T = 0;
	begin(OP_EMBEDDING, PASS_FORWARD, -1, 0);
	for (int i = 0; i < n; i++) {
		const struct segment *s = &segments[i];
		assert(s->num_tokens <= s->cache->capacity - s->cache->length);
		embedding_forward(embedded + T * H, s->token, &m->embedding, m->first_vocab, s->num_tokens, H,
				m->config.vocab_size);
		T += s->num_tokens;
	}
	assert(T <= (int64_t)m->max_sequences * m->seq_len);
	layers_forward(m, T, segments, n, NULL, NULL);
	for (int i = 0; i < n; i++)
		segments[i].cache->length += segments[i].num_tokens;
	all_gather_sequence(m, m->acts.normed, T);
	return all_results(m);
}

/* ============================================================================================================
 * Head and loss, chunk by chunk of tokens: logits of all tokens are never there at once
 * ========================================================================================================== */

/* What the head multiplies with W^T: with NormHead normed[t, j] / (n_j + 1e-7), which is the same as dividing column j
 * of W. */
static const real *head_input(struct model *m, const real *normed, int64_t n)
{
	if (!m->head_scale)
		return normed;
	scale_columns(m->acts.head_input, normed, m->head_scale, n, m->config.hidden_size);
	return m->acts.head_input;
}

void model_logits(struct model *m, real *logits, int64_t first, int64_t n)
{
	const struct group *tensor = &m->layout.tensor;
	const int64_t H = m->config.hidden_size, V = m->global.vocab_size, own = m->config.vocab_size;
	real *out = tensor->size == 1 ? logits : m->acts.head_logits;
	begin(OP_HEAD_LOGITS, PASS_FORWARD, -1, product(n, H, own));
	matmul_forward(out, head_input(m, all_results(m) + first * H, n), &m->lm_head, NULL, n, H, own, false);
	for (int64_t i = 0; i < n && tensor->size > 1; i++)
		all_gather(tensor, TRAFFIC_HEAD, logits + i * V, out + i * own, V, 1);
}

double model_loss(struct model *m, const int32_t *target, int B, const struct step *step)
{
	struct activations *a = &m->acts;
	const struct group *tensor = &m->layout.tensor;
	const int64_t T = (int64_t)B * m->seq_len, H = m->config.hidden_size, V = m->config.vocab_size;
	const int64_t C = head_chunk(m->global.vocab_size, tensor->size);
	const real *normed = NULL;
	real *dnormed = step ? partial_sums(m, a->dnormed) : NULL;
	/* the weight of a token's loss in that of the step, which is a mean */
	const double scale = step && step->num_targets ? 1.0 / step->num_targets : 0;
	double total = 0;
	/* an empty micro-batch has one turn too, which writes 0 to its gradient */
	for (int64_t first = 0; first == 0 || first < T; first += C) {
		int64_t n = T - first < C ? T - first : C;
		begin(OP_HEAD_LOGITS, PASS_FORWARD, -1, product(n, H, V));
		if (first == 0)
			normed = all_gather_sequence(m, a->normed, T);
		const real *in = head_input(m, normed + first * H, n);
		matmul_forward(a->head_logits, in, &m->lm_head, NULL, n, H, V, false);
		dump_logits(m, a->head_logits, first, n);
		/* loss = log(sum_v e^(logit_v - max)) - (logit_target - max). Of max, sum and loss each rank has its part of
		 * the vocabulary's. */
		begin(OP_HEAD_LOSS, PASS_FORWARD, -1, moved(3 * n * V));
		logits_max(a->head_max, a->head_logits, n, V);
		all_reduce_max(tensor, TRAFFIC_HEAD, a->head_max, n);
		double *loss = a->head_loss, *sum = loss + n;
		cross_entropy_forward(loss, sum, a->head_logits, a->head_max, target + first, m->first_vocab, n, V);
		all_reduce_sum(tensor, TRAFFIC_HEAD, loss, 2 * n);
		for (int64_t t = 0; t < n; t++)
			total += target[first + t] < 0 ? 0 : loss[t] + log(sum[t]);
		dump_losses(m, loss, sum, target + first, first, n);
		if (!step)
			continue;
		/* dlogits = (softmax(logits) - onehot(target)) / num_targets */
		begin(OP_HEAD_LOSS, PASS_BACKWARD, -1, moved(2 * n * V));
		cross_entropy_backward(a->head_logits, sum, target + first, m->first_vocab, scale, n, V);
		dump_logits_gradient(m, a->head_logits, first, n);
		begin(OP_HEAD_LOGITS, PASS_BACKWARD, -1, product(n, H, V));
		matmul_backward_input(dnormed + first * H, a->head_logits, m->params.lm_head, n, H, V, false);
		/* With NormHead too: dW[v, j] = sum_t dlogits[t, v] normed[t, j] / (n_j + 1e-7), n being a constant */
		begin(OP_HEAD_LOGITS, PASS_WEIGHT, -1, product(n, H, V));
		matmul_backward_weight(m->grads.lm_head, a->head_logits, in, n, H, V, step->accumulate || first > 0);
		if (m->head_scale)
			scale_columns(dnormed + first * H, dnormed + first * H, m->head_scale, n, H);
	}
	if (step)
		reduce_scatter_sequence(m, a->dnormed, false, T);
	return total;
}

/* ============================================================================================================
 * Backward: acts.dstream is the gradient of the residual stream; each layer adds to it, the last one first
 * ========================================================================================================== */

static void start_reduction(struct gradient_reduction *r, struct model *m, int block);
static void finish_reduction(struct gradient_reduction *r, struct model *m);

/* dlogits, from dweight and the auxiliary losses; then the router's weight gradient, and what it adds to dnormed. */
static void router_backward(struct model *m, int l, int B, const struct step *step)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t L = m->seq_len, N = own_tokens(m, B * L, &first), H = c->hidden_size, E = c->num_experts;
	const int k = c->num_experts_per_tok;
	const bool noisy = step->index < c->router.warmup_steps;
	const real *p = noisy ? x->p_hat : x->p;
	begin(OP_ROUTER_TOPK, PASS_BACKWARD, l, moved(2 * N * E));
	topk_backward(a->dlogits, a->dweight, x->index, x->weight, p, N, E, k, c->norm_topk_prob && k > 1);
	if (noisy) { /* s_hat = a s + (1 - a)(mu + sigma eps), so ds = a ds_hat */
		real alpha = (real)((double)step->index / c->router.warmup_steps);
		for (int64_t i = 0; i < N * E; i++)
			a->dlogits[i] *= alpha;
	}
	/* ds += the gradient of  balance_loss_coef E sum_e f_e P_e + z_loss_coef mean(logsumexp(s)^2),  f_e being
	 * constants, P_e and the mean sums over the tokens divided by the step's tokens */
	begin(OP_ROUTER_LOSSES, PASS_BACKWARD, l, moved(3 * N * E));
	router_loss_backward(a->dlogits, x->p, x->router_lse, x->balance_factor, m->length, first, N, L, E,
			c->router.balance_loss_coef / step->num_tokens, c->router.z_loss_coef / step->num_tokens);
	dump_gradient(m, DUMP_ROUTER_LOGITS, l, a->dlogits);
	begin(OP_ROUTER_LOGITS, PASS_WEIGHT, l, product(N, H, E));
	matmul_backward_weight(m->grads.layer[l].router, a->dlogits, a->normed, N, H, E, step->accumulate);
	begin(OP_ROUTER_LOGITS, PASS_BACKWARD, l, product(N, H, E));
	matmul_backward_input(a->dnormed, a->dlogits, m->params.layer[l].router, N, H, E, true);
}

/* The backward pass of the routed experts. Alone:
 *   the A = R rows are the tokens' rows sorted by expert: row r is of token x->row[r], and expert e's begin at
 *     expert_offset[e];
 *   tokens = normed and dout = dstream: the products read row x->row[r] of them, no row is copied;
 *   expert_rows, the gradients of the rows, is the same array as rows, which combine_rows adds up for each token.
 * With an expert group, tokens and dout are the P rows that arrived, in the order of arrival, which dispatch_start has
 * sent; of each, return_rows adds up the gradients of its experts here, and combine_rows those of the ranks. */
static void experts_backward(struct model *m, int l, int B, const struct step *step)
{
	const struct model_config *c = &m->config;
	const struct layer_params *p = &m->params.layer[l], *g = &m->grads.layer[l];
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t N = own_tokens(m, (int64_t)B * m->seq_len, &first), H = c->hidden_size, I = c->moe_intermediate_size;
	const int k = c->num_experts_per_tok, experts = m->num_experts;
	const bool add = step->accumulate, expert_parallel = m->layout.expert.size > 1;
	const real *tokens = a->normed, *dout = a->dstream;
	begin(OP_EXPERTS_DOWN, PASS_BACKWARD, l, product(x->num_rows, H, I));
	if (expert_parallel) {
		collective_finish(&m->dispatch);
		tokens = x->arrivals;
		dout = a->returns;
	}
	/* y = down(w act), act = silu(gate) * up. With z = down^T dy:  dw = z . act  and  d(act) = w z, so y itself is not
	 * needed. */
	swiglu_backward(a->dgate_up, a->act, a->dexpert_weight, dout, x->row, p->down, x->gate_up, x->expert_weight,
			x->expert_offset, experts, H, I);
	dump_gradient(m, DUMP_EXPERTS_GATE_UP, l, a->dgate_up);
	begin(OP_EXPERTS_DOWN, PASS_WEIGHT, l, product(x->num_rows, H, I));
	grouped_matmul_backward_weight(g->down, dout, x->row, a->act, NULL, x->expert_offset, experts, I, H, add);
	begin(OP_EXPERTS_GATE_UP, PASS_WEIGHT, l, product(x->num_rows, H, 2 * I));
	grouped_matmul_backward_weight(g->gate_up, a->dgate_up, NULL, tokens, x->row, x->expert_offset, experts, H, 2 * I,
			add);
	begin(OP_EXPERTS_GATE_UP, PASS_BACKWARD, l, product(x->num_rows, H, 2 * I));
	grouped_matmul_backward_input(a->expert_rows, a->dgate_up, NULL, p->gate_up, x->expert_offset, experts, H, 2 * I,
			false);
	begin(OP_DISPATCH, PASS_BACKWARD, l, moved((k + 2) * N * H));
	return_weight_gradients(m, x, N);
	if (expert_parallel)
		return_rows(m, x);
	combine_rows(a->dnormed, a->rows, x->sent_row, N, k, H, shared_width(c, l) > 0);
	dump_gradient(m, DUMP_ROUTER_WEIGHTS, l, a->dweight);
}

/* The backward pass of ffn_layer_forward: out = residual + MoE(RMSNorm(residual)). dstream [N, H] is d(out) before and
 * d(residual) after. */
static void ffn_layer_backward(struct model *m, int l, int B, const struct step *step)
{
	const struct model_config *c = &m->config;
	const struct layer_params *p = &m->params.layer[l], *g = &m->grads.layer[l];
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t N = own_tokens(m, (int64_t)B * m->seq_len, &first), H = c->hidden_size, W = shared_width(c, l);
	const int64_t all_rows[] = {0, N}; /* the shared SwiGLU is one group of all tokens */
	const bool add = step->accumulate, experts = has_experts(c, l);
	dump_gradient(m, DUMP_LAYER_OUTPUT, l, a->dstream);
	/* normed [N, H] was not kept: it is cheap to compute again */
	begin(OP_FFN_NORM, PASS_FORWARD, l, moved(2 * N * H));
	rmsnorm_forward(a->normed, x->ffn_rstd, x->residual, p->ffn_norm, N, H, c->rms_norm_eps);
	/* the gradients of the rows' results go to the experts, as the rows did */
	if (experts && m->layout.expert.size > 1) {
		begin(OP_COMBINE, PASS_BACKWARD, l, moved(2 * sum_of(x->sent_rows, m->layout.expert.size) * H));
		dispatch_start(m, x, a->dstream, a->returns);
	}
	if (W) { /* the shared SwiGLU, while the rows are on their way: dnormed = its input's gradient */
		const enum operation down = experts ? OP_SHARED_DOWN : OP_DENSE_DOWN,
				gate_up = experts ? OP_SHARED_GATE_UP : OP_DENSE_GATE_UP;
		begin(down, PASS_BACKWARD, l, product(N, H, W));
		swiglu_backward(a->dshared_gate_up, a->shared_act, NULL, a->dstream, NULL, p->shared_down, x->shared_gate_up,
				NULL, all_rows, 1, H, W);
		dump_gradient(m, DUMP_SHARED_GATE_UP, l, a->dshared_gate_up);
		begin(down, PASS_WEIGHT, l, product(N, W, H));
		matmul_backward_weight(g->shared_down, a->dstream, a->shared_act, N, W, H, add);
		begin(gate_up, PASS_WEIGHT, l, product(N, H, 2 * W));
		matmul_backward_weight(g->shared_gate_up, a->dshared_gate_up, a->normed, N, H, 2 * W, add);
		begin(gate_up, PASS_BACKWARD, l, product(N, H, 2 * W));
		matmul_backward_input(a->dnormed, a->dshared_gate_up, p->shared_gate_up, N, H, 2 * W, false);
	}
	if (experts) { /* dnormed += the experts' and the router's */
		experts_backward(m, l, B, step);
		router_backward(m, l, B, step);
	}
	dump_gradient(m, DUMP_FFN_NORM, l, a->dnormed);
	begin(OP_FFN_NORM, PASS_BACKWARD, l, moved(3 * N * H));
	rmsnorm_backward(a->dstream, g->ffn_norm, a->dnormed, x->residual, p->ffn_norm, x->ffn_rstd, N, H, add,
			a->sum_scratch);
}

/* The backward pass of attention_layer_forward: residual = input + Attention(RMSNorm(input)). dstream [N, H] is
 * d(residual) before and d(input) after. Alone N = T, and dout = dstream. */
static void attention_layer_backward(struct model *m, int l, int B, const struct step *step)
{
	const struct model_config *c = &m->config;
	const struct layer_params *p = &m->params.layer[l], *g = &m->grads.layer[l];
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t L = m->seq_len, T = B * L, H = c->hidden_size, N = own_tokens(m, T, &first);
	const int nh = c->num_attention_heads, nkv = c->num_key_value_heads, d = c->head_dim;
	const bool add = step->accumulate;
	dump_gradient(m, DUMP_ATTENTION_OUTPUT, l, a->dstream);
	if (m->mode == TRAIN_RECOMPUTE_ATTENTION)
		attention_core_forward(m, l, T, NULL, 0);
	begin(OP_ATTENTION_OUTPUT, PASS_WEIGHT, l, product(T, nh * d, H));
	const real *dout = all_gather_sequence(m, a->dstream, T);
	matmul_backward_weight(g->dense, dout, x->attention, T, nh * d, H, add);
	if (g->dense_bias)
		bias_backward(g->dense_bias, a->dstream, N, H, add, a->sum_scratch);
	begin(OP_ATTENTION_OUTPUT, PASS_BACKWARD, l, product(T, nh * d, H));
	matmul_backward_input(a->dattention, dout, p->dense, T, nh * d, H, false);
	dump_gradient(m, DUMP_ATTENTION_CORE, l, a->dattention);
	begin(OP_ATTENTION_CORE, PASS_BACKWARD, l, 2.5 * attention_work(m, T)); /* five products, one computed again */
	attention_backward(a->dqkv, a->dattention, x->attention, x->lse, x->qkv, m->document, B, L, nh, nkv, d,
			a->attention_scratch, a->attention_shared, a->attention_shared_size);
	dump_gradient(m, DUMP_ROPE, l, a->dqkv);
	begin(OP_ROPE, PASS_BACKWARD, l, moved(2 * T * (nh + nkv) * d));
	rope_backward(a->dqkv, m->rope, m->document, T, L, nh, nkv, d);
	dump_gradient(m, DUMP_QKV, l, a->dqkv);
	/* normed [N, H] was not kept: it is cheap to compute again */
	begin(OP_ATTENTION_NORM, PASS_FORWARD, l, moved(2 * N * H));
	rmsnorm_forward(a->normed, x->attention_rstd, x->input, p->attention_norm, N, H, c->rms_norm_eps);
	begin(OP_QKV, PASS_WEIGHT, l, product(T, H, qkv_width(c)));
	matmul_backward_weight(g->qkv, a->dqkv, all_gather_sequence(m, a->normed, T), T, H, qkv_width(c), add);
	if (g->qkv_bias)
		bias_backward(g->qkv_bias, a->dqkv, T, qkv_width(c), add, a->sum_scratch);
	begin(OP_QKV, PASS_BACKWARD, l, product(T, H, qkv_width(c)));
	matmul_backward_input(partial_sums(m, a->dnormed), a->dqkv, p->qkv, T, H, qkv_width(c), false);
	reduce_scatter_sequence(m, a->dnormed, false, T);
	dump_gradient(m, DUMP_ATTENTION_NORM, l, a->dnormed);
	begin(OP_ATTENTION_NORM, PASS_BACKWARD, l, moved(3 * N * H));
	rmsnorm_backward(a->dstream, g->attention_norm, a->dnormed, x->input, p->attention_norm, x->attention_rstd, N, H,
			add, a->sum_scratch);
}

void model_backward(struct model *m, const int32_t *input, int B, const struct step *step,
		struct gradient_reduction *reduction)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	const int layers = c->num_hidden_layers;
	int64_t first;
	const int64_t T = (int64_t)B * m->seq_len, H = c->hidden_size, N = own_tokens(m, T, &first);
	dump_gradient(m, DUMP_NORM, -1, a->dnormed);
	begin(OP_NORM, PASS_BACKWARD, -1, moved(3 * N * H));
	memset(a->dstream, 0, N * H * sizeof *a->dstream);
	rmsnorm_backward(a->dstream, m->grads.norm, a->dnormed, a->output, m->params.norm, a->rstd, N, H, step->accumulate,
			a->sum_scratch);
	start_reduction(reduction, m, 1 + layers);
	for (int l = layers - 1; l >= 0; l--) {
		if (m->mode == TRAIN_RECOMPUTE_LAYER && l < layers - 1) { /* the last layer's activations are still there */
			attention_layer_forward(m, l, T, NULL, 0);
			ffn_layer_forward(m, l, T, NULL, step, NULL);
		}
		ffn_layer_backward(m, l, B, step);
		attention_layer_backward(m, l, B, step);
		start_reduction(reduction, m, 1 + l);
	}
	dump_gradient(m, DUMP_EMBEDDING, -1, a->dstream);
	begin(OP_EMBEDDING, PASS_WEIGHT, -1, moved(2 * T * H));
	/* Tied, the head has written this gradient already. */
	embedding_backward(m->grads.embedding, input, all_gather_sequence(m, a->dstream, T), m->first_vocab, T, H,
			c->vocab_size, step->accumulate || c->tie_word_embeddings);
	start_reduction(reduction, m, 0);
	finish_reduction(reduction, m);
}

/* ============================================================================================================
 * Gradient reduction: bucket by bucket, overlapped with the backward pass. The ranks that share a bucket add it up by
 * a reduce_scatter: each receives the sum of the shard that it updates.
 * ========================================================================================================== */

static void finish_oldest_bucket(struct gradient_reduction *r, struct model *m)
{
	const int place = r->finished++ % MAX_REDUCTIONS;
	const struct bucket *b = &m->table.buckets[r->under_way[place].bucket];
	int64_t size;
	reduce_scatter_finish(&r->under_way[place].scatter, m->grads.memory + b->offset + own_shard(&m->layout, b, &size),
			false);
}

/* The gradients of a block are complete on this rank: starts to reduce its buckets. Nothing happens when r is NULL. */
static void start_reduction(struct gradient_reduction *r, struct model *m, int block)
{
	for (int i = 0; r && i < m->table.num_buckets; i++) {
		const struct bucket *b = &m->table.buckets[i];
		const struct group *g = sharing_group(&m->layout, b->sharing);
		if (b->block != block || g->size == 1)
			continue;
		begin(OP_REDUCTION, PASS_FORWARD, block >= 1 && block <= m->config.num_hidden_layers ? block - 1 : -1, 0);
		if (r->started - r->finished == MAX_REDUCTIONS)
			finish_oldest_bucket(r, m);
		const int place = r->started++ % MAX_REDUCTIONS;
		r->under_way[place].bucket = i;
		reduce_scatter_start(&r->under_way[place].scatter, g, TRAFFIC_GRADIENTS, m->grads.memory + b->offset, b->size,
				1, r->changes != NULL, r->scratch + place * r->scratch_size);
	}
}

/* Waits until all buckets are reduced. */
static void finish_reduction(struct gradient_reduction *r, struct model *m)
{
	if (r && r->finished < r->started)
		begin(OP_REDUCTION, PASS_FORWARD, -1, 0);
	while (r && r->finished < r->started)
		finish_oldest_bucket(r, m);
	if (r)
		r->started = r->finished = 0;
}

double gradient_square(const struct model *m)
{
	double sum = 0;
	begin(OP_GRADIENT_NORM, PASS_FORWARD, -1, moved(m->table.num_state));
	for (int i = 0; i < m->table.num_buckets; i++) {
		int64_t size;
		const int64_t first = own_shard(&m->layout, &m->table.buckets[i], &size);
		sum += sum_of_squares(m->grads.memory + m->table.buckets[i].offset + first, size);
	}
	all_reduce_sum(&m->layout.world, TRAFFIC_STATISTICS, &sum, 1);
	return sum;
}

/* ============================================================================================================
 * Schedules
 * ========================================================================================================== */

double learning_rate(const struct config *c, int64_t step, int64_t steps, double progress)
{
	/* WSD (Hu et al. 2024, arXiv:2404.06395): a constant level, lowered by the drops, then a decay over the last
	 * `steps`. A decay longer than the run has begun before its first step. */
	double lr = c->schedule.peak_lr;
	for (int i = 0; i < c->schedule.num_drops; i++)
		if (progress >= c->schedule.drops[i].at)
			lr *= c->schedule.drops[i].factor;
	const int64_t begin = steps - c->schedule.decay.steps;
	if (c->schedule.decay.steps && step > begin) {
		const double x = (double)(step - begin) / c->schedule.decay.steps, final = c->schedule.decay.final_lr;
		switch (c->schedule.decay.shape) {
		case DECAY_LINEAR: lr = final + (lr - final) * (1 - x); break;
		case DECAY_COSINE: lr = final + (lr - final) * (1 + cos(M_PI * x)) / 2; break;
		case DECAY_1_SQRT: lr = final + (lr - final) * (1 - sqrt(x)); break;
		/* 1/lr^2 grows linearly */
		case DECAY_INVERSE_SQRT: lr = 1 / sqrt((1 - x) / (lr * lr) + x / (final * final)); break;
		}
	}
	/* The warm-up rises from 0 and reaches 1 at update number warmup_steps. */
	if (step < c->schedule.warmup_steps)
		lr *= (double)step / c->schedule.warmup_steps;
	return lr;
}

/* ============================================================================================================
 * The step: compute the gradients, decide, update, report
 * ========================================================================================================== */

volatile sig_atomic_t stop_requested;

bool is_rank0(const struct trainer *t)
{
	return t->model.layout.all.rank == 0;
}

/* The ranks that take the current step together: all, or, in a period of local SGD, those of the replica. */
static const struct group *step_group(const struct trainer *t)
{
	return t->local.in_period ? &t->model.layout.world : &t->model.layout.all;
}

/* The sequences of a global batch that are of one replica. Replica r has those from r times as many on. */
static int64_t replica_batch(const struct trainer *t, int64_t batch)
{
	return batch / t->model.layout.replicas.size;
}

/* The micro-batches of the replica's part of the global batch that this rank computes. */
static struct micro_batches own_micro_batches(const struct trainer *t, int64_t batch)
{
	return micro_batches_of_rank(&t->model.layout.data, replica_batch(t, batch), t->config.train.micro_batch);
}

/* The place of sequence i of the global batch among the sequences of this rank; -1 when another rank has it. */
static int64_t own_place(const struct trainer *t, const struct micro_batches *own, int64_t i)
{
	const int64_t place = i - t->model.layout.replicas.rank * own->batch; /* in the replica's part */
	return place < 0 || place >= own->batch ? -1 : micro_batch_place(own, place);
}

/* --inject poison: the targets of the poisoned samples among the batch become random. */
static void poison(struct trainer *t, const struct micro_batches *own, int64_t batch)
{
	const int64_t L = t->config.data.seq_len, step = t->state.step + 1;
	const struct fault *x = fault_poisons(&t->faults, step);
	if (x) {
		const int64_t part = replica_batch(t, batch);
		const int64_t first = x->rank < 0 ? 0 : x->rank / t->model.layout.world.size * part;
		faults_poison(&t->faults, x, step, list_samples(t->samples + first, x->rank < 0 ? batch : part));
	}
	for (int64_t i = 0; i < batch; i++) {
		const int64_t at = own_place(t, own, i) * L;
		if (at >= 0)
			faults_poison_targets(&t->faults, t->samples[i].file, t->samples[i].number, t->target + at, L,
					t->config.model.vocab_size);
	}
}

/* Draws the samples [batch] of a global batch: those to be tried again, then those that a period of local SGD left out,
 * then new ones. Every rank draws all of them. */
static void draw_batch(struct trainer *t, int64_t batch)
{
	struct local_sgd *local = &t->local;
	retry_queue_draw(&t->retry, t->samples, batch, t->config.train.seed, ++t->state.batches);
	for (int64_t i = 0; i < batch; i++) {
		struct batch_sample *s = &t->samples[i];
		if (s->file >= 0)
			continue;
		if (local->pending.taken < local->pending.count) {
			*s = local->pending.list[local->pending.taken++];
			continue;
		}
		const struct blend_sample sample = blend_next(&t->train, t->state.sources);
		s->file = sample.file;
		s->number = sample.number;
	}
	if (local->in_period && local->options.seconds)
		local_sgd_record(local, t->samples, batch);
}

int64_t trainer_next_batch(struct trainer *t)
{
	const int64_t L = t->config.data.seq_len, batch = batch_size(&t->config, t->state.tokens);
	const struct micro_batches own = own_micro_batches(t, batch);
	draw_batch(t, batch);
	for (int64_t i = 0; i < batch; i++) {
		const struct batch_sample *s = &t->samples[i];
		const int64_t place = own_place(t, &own, i), at = place * L;
		if (place < 0)
			continue;
		const struct blend_sample sample = blend_sample_at(&t->train, t->state.sources, s->file, s->number);
		if (place >= 0 && (t->length[place] = blend_read(&t->train, &sample, t->input + at, t->target + at,
				t->document ? t->document + at : NULL)) < 0)
			return -1;
	}
	if (t->faults.count)
		poison(t, &own, batch);
	return batch;
}

/* Counts the tokens of the global batch that are no padding, and the targets that count. Every rank of the data group
 * has its sequences' numbers; a double holds their sums exactly. */
static void count_tokens(const struct trainer *t, const struct micro_batches *own, struct step *step)
{
	const int64_t L = t->config.data.seq_len;
	double count[2] = {0};
	begin(OP_COUNT_TOKENS, PASS_FORWARD, -1, 0);
	for (int64_t i = 0; i < own->num; i++)
		for (int64_t b = 0; b < micro_batch_sequences(own, i); b++) {
			const int64_t place = i * own->size + b;
			count[0] += t->length[place];
			for (int64_t j = 0; j < L; j++)
				count[1] += t->target[place * L + j] >= 0;
		}
	all_reduce_sum(&t->model.layout.data, TRAFFIC_STATISTICS, count, 2);
	if (!t->local.in_period)
		all_reduce_sum(&t->model.layout.replicas, TRAFFIC_STATISTICS, count, 2);
	step->num_tokens = (int64_t)count[0];
	step->num_targets = (int64_t)count[1];
}

/* Tells of a save that has ended: see saver_report. */
static void report_save(struct trainer *t, int ended)
{
	t->saved_step = ended > 0 ? t->saver.step : t->saved_step;
	saver_report(&t->saver, ended, t->save_seconds, &t->events);
}

/* Multiply-adds of the last forward pass, of T tokens, on this rank: its share of the tokens, and the expert rows that
 * it was sent. */
static double forward_work(const struct model *m, int64_t T)
{
	const struct model_config *c = &m->config;
	int64_t first;
	const int64_t H = c->hidden_size, N = own_tokens(m, T, &first);
	double work = (double)T * H * c->vocab_size;
	for (int l = 0; l < c->num_hidden_layers; l++) {
		work += (double)T * ((qkv_width(c) + attention_width(c)) * H + attention_width(c) * (int64_t)m->seq_len);
		work += (double)N * 3 * H * shared_width(c, l);
		if (has_experts(c, l))
			work += (double)N * H * c->num_experts +
					(double)m->acts.layer[l].num_rows * 3 * H * c->moe_intermediate_size;
	}
	return work;
}

/* Forward, loss and backward pass of every micro-batch of this rank, and the sums over all ranks that take the step:
 * the gradient of
 * cross-entropy + sum over layers (balance_loss_coef balance + z_loss_coef z), t->sums, t->first_loss, t->work and
 * t->stop. Returns the counts of tokens and targets. */
static struct step compute_gradients(struct trainer *t, int64_t batch)
{
	struct model *m = &t->model;
	const int64_t L = t->config.data.seq_len;
	const struct micro_batches own = own_micro_batches(t, batch);
	struct step step = {.seed = t->config.train.seed, .index = t->state.step, .router_mean = t->state.router_mean,
			.router_std = t->state.router_std};
	count_tokens(t, &own, &step);
	memset(t->sums.values, 0, t->sums.size * sizeof *t->sums.values);
	dump_begin(t->dump, m, step.index + 1, batch);
	t->work = 0;
	for (int64_t i = 0; i < own.num; i++) {
		const int B = (int)micro_batch_sequences(&own, i);
		const int64_t at = i * own.size * L;
		const int32_t *input = t->input + at, *target = t->target + at;
		const bool reduce = i + 1 == own.num && m->layout.world.size > 1;
		step.first_sequence = B ? m->layout.replicas.rank * own.batch + own.first + i * own.step : 0;
		step.accumulate = i > 0;
		m->document = t->document ? t->document + at : NULL;
		m->length = t->length + i * own.size;
		dump_micro_batch(m, i, B);
		model_forward(m, input, B, &step, &t->sums);
		const double loss = model_loss(m, target, B, &step);
		t->first_loss = i == 0 ? loss : t->first_loss;
		t->work += forward_work(m, B * L);
		/* the ranks of a tensor group have the same tokens */
		t->sums.values[SUM_LOSS] += m->layout.tensor.rank == 0 ? loss : 0;
		model_backward(m, input, B, &step, reduce ? &t->reduction : NULL);
	}
	if (m->layout.replicas.size > 1 && !t->local.in_period)
		reduce_over_replicas(&t->local, &m->table, m->grads.memory);
	begin(OP_STATISTICS, PASS_FORWARD, -1, 0);
	t->sums.values[SUM_STOP] = stop_requested;
	t->sums.values[SUM_SAVE_DUE] = is_rank0(t) && t->config.checkpoint.every == EVERY_AUTO &&
			save_schedule_due(&t->schedule, t->state.step + 1);
	saver_flags(&t->saver, &t->sums.values[SUM_SAVE_BUSY]);
	all_reduce_sum(step_group(t), TRAFFIC_STATISTICS, t->sums.values, t->sums.size);
	t->stop = t->sums.values[SUM_STOP] > 0;
	t->save_due |= t->sums.values[SUM_SAVE_DUE] > 0;
	if (!t->local.in_period)
		report_save(t, saver_advance(&t->saver, &t->sums.values[SUM_SAVE_BUSY]));
	m->length = NULL;
	m->dump = NULL;
	return step;
}

/* Whether the metrics of a step count the tokens of each expert: with log.experts auto at most 200 lines of a run. */
static bool counts_experts(const struct trainer *t, int64_t step)
{
	const int64_t every = t->config.log.experts == EVERY_AUTO ? (t->steps + 199) / 200 : t->config.log.experts;
	return every && step % every == 0;
}

/* Fills in *m from the step's sums: balance loss and z-loss, as means over the layers that have experts, and the expert
 * load of each, and in some steps the tokens of each expert. */
static void report_sums(struct trainer *t, struct metrics *m)
{
	const struct model_config *c = &t->config.model;
	const int first = c->first_k_dense_replace, n = c->num_hidden_layers - first;
	for (int l = first; l < c->num_hidden_layers; l++) {
		const struct layer_sums *sum = layer_sums(&t->sums, l);
		m->balance_loss += sum->balance / n;
		m->z_loss += sum->z / n;
		double largest = 0, total = 0;
		for (int e = 0; e < c->num_experts; e++) {
			largest = sum->count[e] > largest ? sum->count[e] : largest;
			total += sum->count[e];
			t->expert_counts[(int64_t)(l - first) * c->num_experts + e] = (int64_t)sum->count[e];
		}
		t->expert_load[l - first] = largest * c->num_experts / total;
	}
	m->num_layers = n;
	m->expert_load = t->expert_load;
	if (n && counts_experts(t, m->step)) {
		m->num_experts = c->num_experts;
		m->expert_counts = t->expert_counts;
	}
}

/* Names samples that are trained no more, and why. Sorts them on rank 0. */
static void report_drop(struct trainer *t, const char *why, struct batch_sample *samples, int64_t n)
{
	char line[160];
	if (!n || !is_rank0(t))
		return;
	json_t *list = samples_to_json(samples, n), *windows = json_array();
	for (int64_t i = 0; i < n; i++)
		json_array_append_new(windows, json_pack("[i, I]", samples[i].file, (json_int_t)
				blend_sample_at(&t->train, t->state.sources, samples[i].file, samples[i].number).window));
	snprintf(line, sizeof line, "%lld samples are dropped (%s) and named in events.jsonl", (long long)n, why);
	print_status(stdout, line, true);
	event_write(&t->events, t->state.step, "drop", json_pack("{s:I, s:s, s:o, s:o}", "batch",
			(json_int_t)t->state.batches, "why", why, "samples", list, "windows", windows));
}

/* What a batch that is not taken leaves: its samples go into the queue, or are dropped and named. */
static void skip(struct trainer *t, struct decision *d, const struct metrics *m)
{
	const struct spike_options *o = &t->config.spikes;
	int64_t dropped = m->batch;
	if (o->action == SPIKES_LADDER)
		dropped = retry_queue_add(&t->retry, t->samples, m->batch, t->config.train.seed, t->state.batches,
				o->window / 4);
	report_drop(t, o->action == SPIKES_LADDER ? "skipped too often" : "skipped", t->samples, dropped);
	if (!spike_skipped(&t->spikes, t->state.batches))
		return;
	d->result = STEP_SKIPPED_TOO_MANY;
	fail("step %lld: %d of the last %d batches were skipped; spikes.max_skips allows %d. The last one has loss %g, "
			"balance loss %g, z-loss %g, gradient norm %g. Nothing new is saved, and the checkpoints stay: continue "
			"from one before the trouble (remove the later ones; spikes.rollback does that by itself); lower "
			"schedule.peak_lr, or look at the data that events.jsonl names", (long long)m->step, t->spikes.num_skips,
			o->window, o->max_skips, plain_nan(m->loss), plain_nan(m->balance_loss), plain_nan(m->z_loss),
			plain_nan(m->grad_norm));
}

/* For the routing warmup: the running mean and standard deviation of each layer's router logits s become
 * 0.9 times their old value plus 0.1 times that of s over the global batch, num_tokens tokens. Written with fma():
 * of a b + c d a compiler may fuse either product, so that two builds could differ in the last bit. */
static void update_router_statistics(struct trainer *t, int64_t num_tokens)
{
	const double n = (double)num_tokens * t->config.model.num_experts, momentum = 0.9;
	for (int l = t->config.model.first_k_dense_replace; l < t->config.model.num_hidden_layers; l++) {
		const struct layer_sums *sum = layer_sums(&t->sums, l);
		const double mean = sum->s / n, variance = fma(-mean, mean, sum->s_squared / n),
				std = sqrt(variance > 0 ? variance : 0);
		t->state.router_mean[l] = fma(momentum, t->state.router_mean[l], (1 - momentum) * mean);
		t->state.router_std[l] = fma(momentum, t->state.router_std[l], (1 - momentum) * std);
	}
}

/* With parallel.reduce bf16: leaves what the optimizer changes of n weights in t->reduction.changes, rounded, and the
 * weights as they were: all ranks, this one too, will add the same changes to them. first, state: where they begin in
 * the block of memory, and among this rank's moments. Returns the sum of squares of the changes before rounding. */
static double round_update(struct trainer *t, const struct adamw *o, int64_t first, int64_t state, int64_t n)
{
	struct model *m = &t->model;
	real *before = t->reduction.scratch;
	const int64_t room = MAX_REDUCTIONS * t->reduction.scratch_size;
	double square = 0;
	for (int64_t i = 0; i < n; i += room) {
		const int64_t count = n - i < room ? n - i : room;
		real *w = m->params.memory + first + i;
		copy_array(before, w, count);
		square += adamw_update(w, m->exp_avg + state + i, m->exp_avg_sq + state + i, m->grads.memory + first + i,
				count, o);
		take_change(t->reduction.changes + state + i, w, before, count);
	}
	return square;
}

/* All ranks gather the shards of a bucket's weights. With parallel.reduce bf16 they gather the changes and add
 * them. */
static void gather_weights(struct trainer *t, const struct bucket *b)
{
	const struct model *m = &t->model;
	const struct group *g = sharing_group(&m->layout, b->sharing);
	int64_t size;
	real *weights = m->params.memory + b->offset, *own = weights + own_shard(&m->layout, b, &size);
	if (!t->reduction.changes) {
		all_gather(g, TRAFFIC_WEIGHTS, weights, own, b->size, 1);
		return;
	}
	uint16_t *changes = (uint16_t *)t->reduction.scratch;
	all_gather_bf16(g, TRAFFIC_WEIGHTS, changes, t->reduction.changes + b->state, b->size);
	add_change(weights, changes, b->size);
}

/* AdamW: m <- beta1 m + (1 - beta1) g,  v <- beta2 v + (1 - beta2) g^2,  w <- (1 - lr decay) w - lr m_hat /
 * (sqrt(v_hat) + eps), on the shards that this rank updates, neighbours with the same decay together. Then all ranks
 * gather all shards. Returns the norm of what the weights changed by, every distinct parameter once. */
static double update_weights(struct trainer *t, const struct adamw *optimizer)
{
	struct model *m = &t->model;
	struct optimizer_shard_iterator walk = {0};
	struct optimizer_shard p;
	double square = 0;
	begin(OP_OPTIMIZER, PASS_FORWARD, -1, moved(7 * m->table.num_state)); /* reads 4 arrays, writes 3 */
	for (bool more = next_optimizer_shard(&m->table, &walk, &p); more;) {
		const bool decay = p.parameter->cols > 0;
		const int64_t first = p.parameter->offset + p.from, state = p.state;
		int64_t end = first;
		while (more && p.parameter->offset + p.from == end && (p.parameter->cols > 0) == decay) {
			end += p.end - p.from;
			more = next_optimizer_shard(&m->table, &walk, &p);
		}
		struct adamw o = *optimizer;
		o.weight_decay = decay ? o.weight_decay : 0;
		square += t->reduction.changes ? round_update(t, &o, first, state, end - first)
				: adamw_update(m->params.memory + first, m->exp_avg + state, m->exp_avg_sq + state,
				m->grads.memory + first, end - first, &o);
	}
	begin(OP_WEIGHTS, PASS_FORWARD, -1, 0);
	for (int i = 0; i < m->table.num_buckets; i++)
		gather_weights(t, &m->table.buckets[i]);
	model_update_head_scale(m);
	begin(OP_STATISTICS, PASS_FORWARD, -1, 0);
	all_reduce_sum(&m->layout.world, TRAFFIC_STATISTICS, &square, 1);
	return sqrt(square);
}

/* Weights, moments, router statistics, counters, the window of the detector: all that an update changes. num_tokens:
 * those of the batch that are no padding. */
static void update(struct trainer *t, const struct decision *d, struct metrics *m, int64_t num_tokens)
{
	const struct config *c = &t->config;
	m->update_norm = update_weights(t, &(struct adamw){.lr = m->lr, .beta1 = c->optimizer.beta1,
			.beta2 = c->optimizer.beta2, .eps = c->optimizer.eps, .weight_decay = c->optimizer.weight_decay,
			.grad_scale = d->grad_scale, .step = m->step});
	update_router_statistics(t, num_tokens);
	t->state.step = m->step;
	t->state.samples = m->samples;
	t->state.tokens = m->tokens;
	if (!d->accept)
		return;
	const double deviation = spike_deviation(&t->spikes, SPIKE_UPDATE_NORM, m->update_norm);
	if (deviation > c->spikes.grad_threshold && is_rank0(t)) /* only told */
		event_write(&t->events, t->state.step, "spike", json_pack("{s:I, s:o, s:o}", "batch",
				(json_int_t)t->state.batches, "update_norm", json_number(m->update_norm), "update_norm_deviation",
				json_number(deviation)));
	spike_accept(&t->spikes, (double[]){m->loss, m->grad_norm, m->update_norm});
}

/* The accounts of the trace when a step began. */
struct step_account { double clock, waited; int64_t sent[NUM_TRAFFIC]; };

static struct step_account open_account(void)
{
	struct step_account a = {.clock = trace_clock(), .waited = trace_waited()};
	trace_bytes(a.sent);
	return a;
}

/* Fills in what the step took, in *m and in the trainer: samples of each source, time, bytes. */
static void report_costs(const struct step_account *a, struct trainer *t, struct metrics *m)
{
	const struct group *group = step_group(t);
	m->num_sources = t->state.num_sources > 1 ? t->state.num_sources : 0;
	for (int i = 0; i < m->num_sources; i++)
		t->source_samples[i] = t->state.sources[i].taken;
	m->source_samples = t->source_samples;
	m->seconds = trace_clock() - a->clock;
	m->tokens_per_second = m->batch * t->config.data.seq_len / m->seconds;
	t->communication = trace_waited() - a->waited;
	heartbeat_own_seconds(m->seconds - t->communication);
	t->slowest = slowest_rank(group, m->seconds - t->communication);
	trace_bytes(t->bytes_sent);
	for (int i = 0; i < NUM_TRAFFIC; i++)
		t->bytes_sent[i] -= a->sent[i];
	m->num_kinds = t->model.layout.all.size > 1 ? NUM_TRAFFIC : 0;
	m->kinds = traffic_names;
	m->bytes_sent = t->bytes_sent;
}

/* Whether the ranks are compared in step number `step`. */
static bool is_checked(const struct trainer *t, int64_t step)
{
	return t->config.health.every && step % t->config.health.every == 0;
}

/* In a step that is checked: the forward pass and loss of this rank's first micro-batch, which compute_gradients will
 * compute again. Returns what t->first_loss must then be. Leaves nothing that the step reads, and is not in its
 * account. */
static double loss_beforehand(struct trainer *t, int64_t batch)
{
	struct model *m = &t->model;
	if (!is_checked(t, t->state.step + 1))
		return 0;
	parallel_agree(0); /* a wait for a rank that comes late is the step's, not the check's */
	trace_check(true);
	const struct micro_batches own = own_micro_batches(t, batch);
	const int B = (int)micro_batch_sequences(&own, 0);
	const struct step step = {.seed = t->config.train.seed, .index = t->state.step,
			.first_sequence = B ? m->layout.replicas.rank * own.batch + own.first : 0,
			.router_mean = t->state.router_mean, .router_std = t->state.router_std};
	m->document = t->document;
	m->length = t->length;
	model_forward(m, t->input, B, &step, NULL);
	const double loss = model_loss(m, t->target, B, NULL);
	trace_check(false);
	return loss;
}

/* In a step that is checked: compares what the ranks must have alike; see training/health.h. before: what
 * loss_beforehand returned. It is not in the step's account. */
static int compare_ranks(struct trainer *t, int64_t batch, double before)
{
	const struct trainer_state *s = &t->state;
	if (!is_checked(t, s->step + 1))
		return 0;
	trace_check(true);
	int64_t counters[4 + 2 * MAX_SOURCES] = {s->step, s->samples, s->tokens, s->batches};
	for (int i = 0; i < s->num_sources; i++) {
		counters[4 + 2 * i] = s->sources[i].taken;
		counters[5 + 2 * i] = s->sources[i].credit;
	}
	uint32_t samples = 0, windows = 0;
	for (int64_t i = 0; i < batch; i++) {
		const int64_t sample[] = {t->samples[i].file, t->samples[i].number, t->samples[i].attempts};
		samples = crc_of(samples, (const uint8_t *)sample, sizeof sample);
	}
	for (int i = 0; i < NUM_SPIKE_SIGNALS; i++)
		windows = crc_of(windows, (const uint8_t *)t->spikes.values[i], t->spikes.count * sizeof *t->spikes.values[i]);
	const struct replicated values[] = {
		{"router_mean", s->router_mean, s->num_layers * sizeof *s->router_mean},
		{"router_std", s->router_std, s->num_layers * sizeof *s->router_std},
		{"position in the data", counters, sizeof counters},
		{"samples of the batch", &samples, sizeof samples},
		{"detector of spikes", &windows, sizeof windows},
	};
	const struct health_input in = {.table = &t->model.table, .config = &t->model.global,
			.weights = t->model.params.memory, .values = values, .num_values = sizeof values / sizeof *values,
			.loss = {before, t->first_loss}};
	const int rc = health_check(&in, &t->events, s->step);
	trace_check(false);
	return rc;
}

/* What the gradient of a batch says of it, before a decision. counts: what compute_gradients returned. */
static struct metrics measure_gradients(struct trainer *t, int64_t batch, const struct step *counts)
{
	struct metrics m = {
		.step = t->state.step + 1, .samples = t->state.samples + batch,
		.tokens = t->state.tokens + batch * t->config.data.seq_len, .batch = (int)batch,
		.loss = counts->num_targets ? t->sums.values[SUM_LOSS] / counts->num_targets : 0,
		.grad_norm = sqrt(gradient_square(&t->model)),
		.lr = learning_rate(&t->config, t->state.step + 1, t->steps, (double)t->state.tokens / t->tokens),
	};
	report_sums(t, &m);
	return m;
}

/* fail() for a step whose gradient is not finite. */
static void fail_not_finite(const struct trainer *t, const struct metrics *m)
{
	fail("step %lld: loss %g, balance loss %g, z-loss %g, gradient norm %g, learning rate %g: not finite, so the "
			"weights were left as they were and the run ends; the checkpoints stay. Lower schedule.peak_lr or "
			"lengthen its warm-up, and continue from an earlier checkpoint (remove the later ones) or from the "
			"start; or look at the data of samples %lld to %lld", (long long)m->step, plain_nan(m->loss),
			plain_nan(m->balance_loss), plain_nan(m->z_loss), plain_nan(m->grad_norm), plain_nan(m->lr),
			(long long)t->state.samples, (long long)(t->state.samples + m->batch - 1));
}

/* Writes the dump of the step, if it has one; see model/dump.h. */
static void write_dump(struct trainer *t, const struct metrics *m, enum step_result result)
{
	dump_write(t->dump, &t->model, &(struct dump_result){.loss = m->loss, .balance_loss = m->balance_loss,
			.z_loss = m->z_loss, .grad_norm = m->grad_norm, .taken = result == STEP_TAKEN,
			.skipped = result == STEP_SKIPPED || result == STEP_SKIPPED_TOO_MANY, .batch = t->state.batches});
}

enum step_result trainer_step(struct trainer *t, int64_t batch, struct metrics *m)
{
	const int64_t step = t->state.step + 1;
	const struct fault_target target = {&t->model.table, t->model.params.memory, t->model.grads.memory};
	const struct step_account account = open_account();

	faults_act(&t->faults, step, MOMENT_STEP, &target);
	const double before = loss_beforehand(t, batch);
	const struct step counts = compute_gradients(t, batch);
	faults_act(&t->faults, step, MOMENT_UPDATE, &target);
	*m = measure_gradients(t, batch, &counts);
	if (compare_ranks(t, batch, before) < 0) {
		write_dump(t, m, STEP_GO_BACK);
		report_costs(&account, t, m);
		return STEP_GO_BACK;
	}

	begin(OP_DECISION, PASS_FORWARD, -1, 0);
	struct decision decision = decide(&t->spikes, t->config.train.grad_clip, t->samples, m);
	m->lr *= decision.lr_scale;
	m->attempts = decision.attempts;
	if (decision.result == STEP_TAKEN)
		update(t, &decision, m, counts.num_tokens);
	if (is_rank0(t))
		report_decision(&decision, m, &t->events, t->state.step, t->state.batches, t->samples);
	if (decision.result == STEP_SKIPPED)
		skip(t, &decision, m);
	write_dump(t, m, decision.result);

	begin(OP_STATISTICS, PASS_FORWARD, -1, 0);
	report_costs(&account, t, m);
	if (!t->local.in_period || t->model.layout.replicas.rank == 0) /* whose ranks are the first of all */
		slow_ranks_step(&t->slow_ranks, step_group(t), m->seconds - t->communication, t->work, &t->events,
				t->state.step);
	trace_end();
	if (decision.result == STEP_GO_BACK)
		fail_not_finite(t, m);
	return decision.result;
}

/* ============================================================================================================
 * The loop
 * ========================================================================================================== */

static int load_checkpoint(struct trainer *t, const char *dir, FILE *notes);
static void complete_weights(struct trainer *t);

int evaluate(struct model *m, const struct tokens *data, const struct tokenizer *tokenizer, int64_t max_windows,
		struct evaluation *e)
{
	const int64_t L = m->seq_len, all = count_windows(data, L);
	const int64_t windows = max_windows && max_windows < all ? max_windows : all;
	int32_t *input = calloc(3 * L, sizeof *input), *target = input + L;
	int32_t *document = data->document_mask ? target + L : NULL;
	if (parallel_agree(input ? 0 : fail("out of memory for a window of %lld tokens", (long long)L)) < 0) {
		free(input);
		return -1;
	}
	*e = (struct evaluation){0};
	double sums[3] = {0}; /* loss, its tokens, bytes */
	int rc = 0;
	struct progress p = progress_start("evaluating", windows * L, 1, "tokens");
	struct progress *shown = m->layout.all.rank == 0 ? &p : NULL;
	const struct group *data_group = &m->layout.data, *replicas = &m->layout.replicas;
	const int64_t sharing = replicas->size * data_group->size; /* so many share the windows; a tensor group is one */
	const int64_t stop_every = 1 + 1024 / L; /* windows of a rank, after which the ranks ask one another */
	for (int64_t first = 0; first < windows; first += sharing) {
		const int64_t i = first + replicas->rank * data_group->size + data_group->rank;
		const int B = i < windows; /* a rank without a window still takes part in the collectives */
		double stop = stop_requested;
		if (first / sharing % stop_every == 0)
			all_reduce_sum(&m->layout.all, TRAFFIC_STATISTICS, &stop, 1), e->stopped = stop > 0;
		if (e->stopped)
			break;
		if (B && rc == 0 && read_window(data, i, L, NULL, input, target, document) < 0) {
			rc = -1;
			memset(input, 0, 3 * L * sizeof *input); /* so that it can take part, without the bad ids, up to the end */
		}
		m->document = document;
		model_forward(m, input, B, NULL, NULL);
		const double loss = model_loss(m, target, B, NULL);
		sums[0] += m->layout.tensor.rank == 0 ? loss : 0; /* the ranks of a tensor group have the same tokens */
		for (int64_t t = 0; B && m->layout.tensor.rank == 0 && t < L; t++) {
			sums[1] += target[t] >= 0;
			sums[2] += tokenizer && target[t] >= 0 ? tokenizer_bytes(tokenizer, target[t]) : 0;
		}
		const int64_t left = windows - first;
		progress(shown, (left < sharing ? left : sharing) * L);
	}
	progress_end(shown);
	m->document = NULL;
	all_reduce_sum(&m->layout.all, TRAFFIC_STATISTICS, sums, 3);
	free(input);
	e->tokens = (int64_t)sums[1], e->bytes = (int64_t)sums[2];
	e->loss = sums[0] / e->tokens;
	return parallel_agree(rc);
}

/* Puts the mean loss over all targets of the validation files into *m, and that of each named set. A stop ends it:
 * then *m says so, and the run that continues makes up for it, so that its metrics are those of a run that was not
 * stopped. */
static int validate(struct trainer *t, struct metrics *m)
{
	const struct config *c = &t->config;
	double sum = 0, set_sum = 0;
	int64_t tokens = 0, set_tokens = 0;
	int set = -1; /* of this file: the files of a set stand together */
	for (int i = 0; i < c->data.num_valid; i++) {
		const char *name = c->data.valid[i].set;
		struct evaluation e;
		if (evaluate(&t->model, &t->valid[i], NULL, c->eval.max_windows, &e) < 0)
			return -1;
		if (e.stopped) {
			m->validation_stopped = t->stop = true;
			return 0;
		}
		sum += e.loss * e.tokens;
		tokens += e.tokens;
		if (!*name)
			continue;
		if (i == 0 || strcmp(name, c->data.valid[i - 1].set)) {
			set++;
			set_sum = 0, set_tokens = 0;
		}
		set_sum += e.loss * e.tokens;
		set_tokens += e.tokens;
		memcpy(t->valid_losses[set].set, name, sizeof t->valid_losses[set].set);
		t->valid_losses[set].loss = set_sum / set_tokens;
	}
	m->has_valid_loss = c->data.num_valid > 0;
	m->valid_loss = m->has_valid_loss ? sum / tokens : 0;
	m->num_valid_sets = set + 1;
	m->valid_losses = t->valid_losses;
	return 0;
}

/* Whether one of the steps after `before`, up to `step`, is a multiple of `every`; 0: never. */
static bool is_due(int64_t every, int64_t before, int64_t step)
{
	return every && step / every > before / every;
}

/* Whether the weights after `step` are evaluated. before: the last step before it at which they could be. */
static bool has_evaluation(const struct trainer *t, int64_t before, int64_t step)
{
	const struct config *c = &t->config;
	return (c->data.num_valid || t->write_samples) && (step == t->steps || is_due(c->eval.every, before, step));
}

/* An evaluation of the current weights: the validation, whose result is put into *m, and the samples. A stop in either
 * ends it as a whole. */
static int evaluate_step(struct trainer *t, struct metrics *m)
{
	const double start = clock_seconds();
	complete_weights(t);
	trace_phase(HEARTBEAT_EVALUATION, t->state.step);
	if (validate(t, m) < 0)
		return -1;
	const bool samples = t->write_samples && !m->validation_stopped && (!m->has_valid_loss || isfinite(m->valid_loss));
	const int stopped = samples ? t->write_samples(t) : 0;
	if (stopped < 0)
		return -1;
	if (stopped) {
		m->has_valid_loss = false;
		m->validation_stopped = t->stop = true;
	}
	if (m->validation_stopped)
		return 0;
	t->evaluation_seconds += clock_seconds() - start;
	t->num_evaluations++;
	return 0;
}

/* The seconds that the run will still take after step m->step: its tokens at the rate of this process so far, and its
 * evaluations at the mean of those so far. */
static double seconds_left(const struct trainer *t, const struct metrics *m, double seconds_per_token)
{
	const struct config *c = &t->config;
	int64_t evaluations = 0;
	if (m->step < t->steps) {
		if (c->eval.every)
			evaluations = t->steps / c->eval.every - m->step / c->eval.every;
		evaluations += !c->eval.every || t->steps % c->eval.every != 0; /* at the end */
	}
	const double one = t->num_evaluations ? t->evaluation_seconds / t->num_evaluations : 0;
	return (t->tokens - m->tokens) * seconds_per_token + evaluations * one;
}

/* Appends the validation loss, if there is one, and those of the named sets. */
static void describe_validation(struct text *line, const struct metrics *m)
{
	char loss[SET_NAME_LEN + 32];
	if (!m->has_valid_loss)
		return;
	snprintf(loss, sizeof loss, "  valid %.4f", m->valid_loss);
	text_append_string(line, loss);
	for (int i = 0; i < m->num_valid_sets; i++) {
		snprintf(loss, sizeof loss, "%s%s %.4f%s", i ? ", " : " (", m->valid_losses[i].set, m->valid_losses[i].loss,
				i + 1 == m->num_valid_sets ? ")" : "");
		text_append_string(line, loss);
	}
}

static void print_progress(const struct trainer *t, const struct metrics *m, double seconds_per_token)
{
	char part[240], left[32], ranks[64] = "", share[32] = "";
	struct text line = {0};
	snprintf(part, sizeof part, "step %lld/%lld %.0f%%  loss %.4f", (long long)m->step, (long long)t->steps,
			100.0 * m->tokens / t->tokens, m->loss);
	text_append_string(&line, part);
	describe_validation(&line, m);
	if (t->model.layout.all.size > 1)
		snprintf(ranks, sizeof ranks, "  communication %.0f%%, slowest rank %d", 100 * t->communication / m->seconds,
				t->slowest);
	if (t->peak_flops)
		snprintf(share, sizeof share, "  %.0f%% of peak", 100 * m->tokens_per_second * t->flops_per_token /
				t->peak_flops);
	snprintf(part, sizeof part, "  lr %.2e  grad %.3f  batch %d  %.0f tokens/s%s%s  %s left", m->lr, m->grad_norm,
			m->batch, m->tokens_per_second, share, ranks,
			format_duration(left, seconds_left(t, m, seconds_per_token)));
	text_append_string(&line, part);
	print_status(stdout, line.data, m->has_valid_loss || m->step == t->steps);
	free(line.data);
}

/* What the run must remember of spikes. */
static json_t *spikes_to_json(const struct trainer *t)
{
	json_t *state = spike_detector_to_json(&t->spikes);
	json_object_set_new(state, "queue", retry_queue_to_json(&t->retry));
	json_object_set_new(state, "rollbacks", json_integer(t->rollbacks));
	return state;
}

/* Appends the line of a step to the metrics, behind those that could not be written before. Where the disk is full, it
 * waits in memory for the next one: the run must not end for it. */
static void write_metrics(struct trainer *t, FILE *metrics_file, const struct metrics *m)
{
	const bool waiting = t->unwritten.size > 0;
	char *line = metrics_line(m);
	text_append_string(&t->unwritten, line);
	free(line);
	if (metrics_append(metrics_file, t->unwritten.data) == 0)
		t->unwritten.size = 0;
	else if (!waiting)
		fprintf(stderr, "ling: warning: step %lld: %s; lines of metrics wait in memory until they can be written\n",
				(long long)m->step, error_text);
}

/* Fails, alike on all ranks, when weights or moments are not finite: a checkpoint of them would be of no use. */
static int check_state(const struct trainer *t)
{
	const struct model *m = &t->model;
	const bool finite = isfinite(sum_of_squares(m->params.memory, m->table.num_elements)) &&
			isfinite(sum_of_squares(m->exp_avg, m->table.num_state)) &&
			isfinite(sum_of_squares(m->exp_avg_sq, m->table.num_state));
	return parallel_agree(finite ? 0 : fail("after step %lld weights or optimizer state are not finite, and are not "
			"saved; the earlier checkpoints stay. Lower schedule.peak_lr or lengthen its warm-up",
			(long long)t->state.step));
}

/* Begins to save the current step; none is under way. See saver_begin for the result. */
static int begin_save(struct trainer *t, FILE *metrics_file, bool async)
{
	struct model *m = &t->model;
	json_decref(t->state.spikes);
	t->state.spikes = spikes_to_json(t);
	json_decref(t->state.local);
	t->state.local = t->local.replicas > 1 ? local_sgd_to_json(&t->local) : NULL;
	t->saver.weights.fault = faults_in_save(&t->faults, t->state.step, t->saver.weights.elements * sizeof(real));
	return saver_begin(&t->saver, &(struct save_request){.config = &t->config, .state = &t->state,
			.arrays = {m->params.memory, m->exp_avg, m->exp_avg_sq, t->local.momentum},
			.sync = {metrics_file ? fileno(metrics_file) : -1, t->events.fd}, .async = async});
}

int trainer_save(struct trainer *t)
{
	complete_weights(t);
	report_save(t, saver_finish(&t->saver));
	if (check_state(t) < 0)
		return -1;
	return begin_save(t, NULL, false) < 0 ? -1 : 0;
}

/* Saves a checkpoint, with the metrics on disk before it: no checkpoint is ahead of its metrics. `last`: the run ends
 * here, so that it must succeed now; else a failure is reported, and training goes on. When output_dir was moved or
 * deleted meanwhile, the checkpoint is saved where its directory is now, or in a new one, and then the run fails, with
 * what to do. */
static enum run_result save_progress(struct trainer *t, FILE *metrics_file, bool last)
{
	const double start = clock_seconds();
	char now[PATH_LEN] = "", reason[sizeof error_text] = "", named[PATH_LEN];
	struct { int place, metrics; } found = {0};
	const bool waits = last || t->saver.stage != SAVE_NONE; /* for all files, of this save or the one before */
	complete_weights(t);
	trace_phase(waits ? HEARTBEAT_WRITE : HEARTBEAT_SAVE, t->state.step);
	report_save(t, saver_finish(&t->saver));
	if (check_state(t) < 0)
		return RUN_GO_BACK;
	memcpy(named, t->config.train.output_dir, sizeof named);
	if (is_rank0(t)) {
		found.metrics = t->unwritten.size ? metrics_append(metrics_file, t->unwritten.data) : 0;
		if (found.metrics == 0)
			t->unwritten.size = 0;
		found.place = metrics_place(metrics_file, named, now);
		if (found.place != METRICS_IN_PLACE)
			memcpy(reason, error_text, sizeof reason);
	}
	const int metrics = parallel_agree(found.metrics);
	broadcast(&t->model.layout.all, &found, sizeof found);
	if (found.place == METRICS_LOST) {
		parallel_agree(is_rank0(t) ? fail("%s", reason) : 0);
		return RUN_FAILED;
	}
	const bool stays = found.place == METRICS_IN_PLACE;
	if (found.place == METRICS_MOVED)
		memcpy(t->config.train.output_dir, now, sizeof now);
	t->saver.step = t->state.step;
	int rc = metrics < 0 ? -1 : begin_save(t, metrics_file, stays && !last);
	memcpy(t->config.train.output_dir, named, sizeof named);
	t->save_seconds = t->unreported_save_seconds = clock_seconds() - start;
	if (rc < 0 && (last || !stays)) {
		saver_fail_last(&t->saver, t->saved_step);
		return RUN_FAILED;
	}
	report_save(t, rc < 0 ? -1 : rc == 0 && t->saver.stage == SAVE_NONE);
	if (is_rank0(t) && t->config.checkpoint.every == EVERY_AUTO && rc <= 0)
		save_schedule_saved(&t->schedule, t->state.step, rc < 0 ? -1 : t->save_seconds);
	fflush(stdout);
	return parallel_agree(is_rank0(t) && !stays ? fail("%s", reason) : 0) < 0 ? RUN_FAILED : RUN_DONE;
}

/* Says so before the first step of a continued run whose schedule makes the learning rate rise again that drops or
 * decay had lowered. before: the last step of the run so far. */
static void print_raised_rate(const struct trainer *t, const struct metrics *before)
{
	const struct config *c = &t->config;
	const int64_t step = t->state.step, tokens = step ? before->batch * (int64_t)c->data.seq_len : 0;
	/* the rate that the last step would have had under the schedule as it is now */
	const double same = learning_rate(c, step, t->steps, (double)(t->state.tokens - tokens) / t->tokens),
			next = learning_rate(c, step + 1, t->steps, (double)t->state.tokens / t->tokens);
	if (step && before->step == step && !before->attempts && next > before->lr && before->lr < same * (1 - 1e-6))
		printf("the learning rate was %.2e at step %lld and is %.2e at step %lld: the schedule of %lld steps undoes a "
				"drop, decay or lower peak of the run so far; if that is not wanted, stop, and lower schedule.peak_lr "
				"or go back to a checkpoint from before the decay\n", before->lr, (long long)step, next,
				(long long)step + 1, (long long)t->steps);
	fflush(stdout);
}

/* Goes back to the newest checkpoint from before the first of the skipped batches that the detector remembers. The
 * position in the data stays: the samples since that checkpoint, and those that waited at it, are passed over, and
 * named. Later checkpoints and metrics are removed. */
static enum run_result roll_back(struct trainer *t, FILE **metrics_file)
{
	const struct config *c = &t->config;
	const int64_t from = t->state.step, batches = t->state.batches;
	/* The batches since the first skip were skips or steps. */
	const int64_t before = from - (batches - t->spikes.skips[0] + 1 - t->spikes.num_skips);
	char dir[PATH_LEN] = "", reason[sizeof error_text];
	memcpy(reason, error_text, sizeof reason);
	trace_phase(HEARTBEAT_START, from); /* it takes as long as a start */
	report_save(t, saver_finish(&t->saver));
	if (checkpoint_choose(&t->config, &t->model.table, &t->events, before, dir) < 0)
		return RUN_FAILED;
	if (!*dir) {
		fail("%s. There is no checkpoint from step %lld or before to go back to", reason, (long long)before);
		return RUN_GO_BACK;
	}
	struct source_state now[MAX_SOURCES];
	const int rollbacks = t->rollbacks + 1;
	memcpy(now, t->state.sources, sizeof now);
	if (load_checkpoint(t, dir, NULL) < 0)
		return RUN_FAILED;
	json_t *passed_over = samples_to_json(t->retry.list, t->retry.count);
	for (int i = 0; i < t->state.num_sources; i++)
		if (now[i].taken > t->state.sources[i].taken)
			json_array_append_new(passed_over, json_pack("[i, I, I]", i, (json_int_t)t->state.sources[i].taken,
					(json_int_t)now[i].taken - 1));
	memcpy(t->state.sources, now, sizeof now);
	t->state.batches = batches;
	t->schedule.last = t->state.step;
	t->unwritten.size = 0; /* lines of steps that are undone */
	t->retry.count = 0;
	spike_detector_forget_skips(&t->spikes); /* the windows are those of the checkpoint, as the weights are */
	t->rollbacks = rollbacks;
	int rc = 0;
	if (is_rank0(t)) {
		char line[PATH_LEN + 160];
		snprintf(line, sizeof line, "too many batches were skipped: back from step %lld to %s, rollback %d of %d; the "
				"samples since are passed over", (long long)from, dir, rollbacks, c->spikes.rollback);
		print_status(stdout, line, true);
		checkpoint_remove_after(c->train.output_dir, t->state.step);
		event_write(&t->events, t->state.step, "rollback", json_pack("{s:I, s:I, s:i, s:O}", "batch",
				(json_int_t)batches, "from_step", (json_int_t)from, "rollbacks", rollbacks, "samples", passed_over));
		fclose(*metrics_file);
		*metrics_file = metrics_open(c->train.output_dir, t->state.step, NULL);
		rc = *metrics_file && samples_cut(c->train.output_dir, t->state.step) == 0 ? 0 : -1;
	}
	json_decref(passed_over);
	return parallel_agree(rc) < 0 ? RUN_FAILED : RUN_DONE;
}

/* eval.at_start: the evaluation before the first step of a run, whose result is an event, for no step has a line in
 * the metrics yet. A stop ends it: then t->stop is set, and the same command begins the run again. */
static int evaluate_start(struct trainer *t)
{
	struct metrics m = {0};
	if (t->state.batches || !t->config.eval.at_start)
		return 0;
	if (evaluate_step(t, &m) < 0)
		return -1;
	if (m.validation_stopped) {
		if (is_rank0(t))
			print_status(stdout, "stopped in the evaluation before the first step; the same command begins again",
					true);
		return 0;
	}
	if (is_rank0(t) && m.has_valid_loss) {
		char begin[64];
		struct text line = {0};
		snprintf(begin, sizeof begin, "step 0/%lld", (long long)t->steps);
		text_append_string(&line, begin);
		describe_validation(&line, &m);
		print_status(stdout, line.data, true);
		free(line.data);
		json_t *members = json_pack("{s:o}", "valid_loss", json_number(m.valid_loss));
		if (m.num_valid_sets)
			json_object_set_new(members, "valid", valid_losses_to_json(&m, NULL));
		event_write(&t->events, 0, "validation", members);
	}
	return !m.has_valid_loss || isfinite(m.valid_loss) ? 0 : fail("the validation loss before the first step is %g; "
			"expected a finite one: look at the weights of train.init_from", plain_nan(m.valid_loss));
}

/* ============================================================================================================
 * Periods of local SGD
 * ========================================================================================================== */

/* Begins a period: from here on the ranks of a replica wait for each other alone. */
static void begin_period(struct trainer *t)
{
	struct local_sgd *s = &t->local;
	local_sgd_begin(s, &t->model.table, t->model.params.memory, t->state.step);
	s->begun_samples = t->state.samples;
	s->begun_tokens = t->state.tokens;
	s->loss = s->balance_loss = s->z_loss = 0;
	parallel_agree_within(&t->model.layout.world);
}

/* Counts a step of a period. Returns whether it was the last one. A period by time ends when its time is over or a stop
 * is asked for; one by steps never earlier, for a run that stops and continues must be the same. */
static bool end_step_of_period(struct trainer *t, const struct metrics *m)
{
	const struct group *g = &t->model.layout.world;
	double late = t->stop || (g->rank == 0 && clock_seconds() - t->local.clock >= t->local.options.seconds);
	if (t->local.options.seconds)
		all_reduce_sum(g, TRAFFIC_STATISTICS, &late, 1);
	t->local.loss += m->loss;
	t->local.balance_loss += m->balance_loss;
	t->local.z_loss += m->z_loss;
	return local_sgd_is_over(&t->local, t->state.step, t->steps, late > 0);
}

/* Sets the data right after a period in which replica r took steps[r] steps, not all equally many: each replica has
 * drawn the batches up to its last one. Now all draw up to the last one of any; the samples that replicas would have
 * taken in the steps that they did not take are those that come first from here on. Sets samples and tokens. */
static void settle_data(struct trainer *t, const double *steps)
{
	struct local_sgd *s = &t->local;
	const int64_t L = t->config.data.seq_len;
	int64_t most = 0, tokens = t->state.tokens;
	for (int r = 0; r < s->replicas; r++)
		most = steps[r] > most ? (int64_t)steps[r] : most;
	for (int64_t i = t->state.step - s->begun; i < most; i++) {
		const int64_t batch = batch_size(&t->config, tokens);
		draw_batch(t, batch);
		tokens += batch * L;
	}
	t->state.samples = s->begun_samples;
	t->state.tokens = tokens = s->begun_tokens;
	local_sgd_drop_taken(s);
	int64_t left = 0, first = 0; /* samples left out; the first sample of the batch */
	for (int64_t i = 0; i < most; i++) {
		const int64_t batch = batch_size(&t->config, tokens), part = replica_batch(t, batch);
		for (int r = 0; r < s->replicas; r++) {
			if (i < steps[r]) {
				t->state.samples += part;
				t->state.tokens += part * L;
				continue;
			}
			memmove(s->drawn + left, s->drawn + first + r * part, part * sizeof *s->drawn);
			left += part;
		}
		first += batch;
		tokens += batch * L;
	}
	local_sgd_put_back(s, left);
}

/* For model.before_block, after a synchronisation: gives the blocks up to this one their new weights. */
static void complete_block(void *trainer, int block)
{
	struct trainer *t = trainer;
	struct model *m = &t->model;
	while (t->local.completed <= block) {
		begin(OP_WEIGHTS, PASS_FORWARD, -1, 0);
		local_sgd_advance(&t->local, &m->table, m->params.memory);
	}
	if (t->local.completed == t->local.num_blocks) {
		m->before_block = NULL;
		model_update_head_scale(m);
	}
}

/* Completes the synchronisation that is under way, if one is. */
static void complete_weights(struct trainer *t)
{
	if (t->model.before_block)
		complete_block(t, t->local.num_blocks - 1);
}

/* Fails, on all ranks, where a replica has other weights than the first one after a synchronisation. Collective. */
static int compare_replicas(struct trainer *t)
{
	const struct model *m = &t->model;
	complete_weights(t);
	trace_check(true);
	const uint32_t own = crc_of(0, (const uint8_t *)m->params.memory, m->table.num_elements * sizeof(real));
	uint32_t first = own;
	broadcast(&m->layout.replicas, &first, sizeof first);
	const int rc = parallel_agree(own == first ? 0 : fail("step %lld: replica %d has other weights than replica 0 "
			"after they were brought together; nothing is saved, and the run must go back to a checkpoint: start it "
			"again, without that machine if it is named again", (long long)t->state.step, m->layout.replicas.rank));
	trace_check(false);
	return rc;
}

/* Ends a period: all ranks meet, and bring together what the replicas have each for themselves but their moments. *m,
 * the line of replica 0's last step, becomes that of the run. Fails when the replicas are not alike then. */
static int end_period(struct trainer *t, struct metrics *m)
{
	struct local_sgd *s = &t->local;
	struct model *model = &t->model;
	const struct layout *l = &model->layout;
	enum { STOP, SAVE_DUE, SAVE_BUSY, SAVE_FAILED, STEPS };
	double sums[STEPS + s->replicas];
	parallel_agree_within(&l->all);
	begin(OP_STATISTICS, PASS_FORWARD, -1, 0);
	memset(sums, 0, sizeof sums);
	sums[STOP] = stop_requested;
	sums[SAVE_DUE] = is_rank0(t) && t->save_due;
	sums[STEPS + l->replicas.rank] = l->world.rank == 0 ? (double)(t->state.step - s->begun) : 0;
	saver_flags(&t->saver, &sums[SAVE_BUSY]);
	all_reduce_sum(&l->all, TRAFFIC_STATISTICS, sums, STEPS + s->replicas);
	const double *steps = sums + STEPS;
	t->stop = sums[STOP] > 0;
	t->save_due = sums[SAVE_DUE] > 0;
	report_save(t, saver_advance(&t->saver, &sums[SAVE_BUSY]));

	const int64_t own = t->state.step - s->begun;
	if (s->options.seconds)
		settle_data(t, steps);
	for (int r = 0; r < s->replicas; r++) {
		s->carry += (int64_t)steps[r];
		s->counts[r] += (int64_t)steps[r];
	}
	t->state.step = s->begun + s->carry / s->replicas;
	s->carry %= s->replicas;
	for (int i = 0; i < t->state.num_layers; i++) {
		double both[2] = {t->state.router_mean[i], t->state.router_std[i]};
		all_reduce_sum(&l->replicas, TRAFFIC_STATISTICS, both, 2);
		t->state.router_mean[i] = both[0] / s->replicas;
		t->state.router_std[i] = both[1] / s->replicas;
	}
	begin(OP_WEIGHTS, PASS_FORWARD, -1, 0);
	local_sgd_synchronise(s, &model->table, model->params.memory, &t->synchronisation);
	model->before_block = complete_block; /* the weights come with the next forward pass, or when they are needed */
	model->before_block_context = t;
	trace_end();
	local_sgd_report(s, &t->synchronisation, steps, &t->events, t->state.step);

	m->step = t->state.step;
	m->samples = t->state.samples;
	m->tokens = t->state.tokens;
	if (s->options.seconds) { /* one line for the period */
		m->loss = s->loss / own;
		m->balance_loss = s->balance_loss / own;
		m->z_loss = s->z_loss / own;
		m->seconds = clock_seconds() - s->clock;
		m->tokens_per_second = (t->state.tokens - s->begun_tokens) / m->seconds;
	}
	return is_due(t->config.health.every, s->begun, t->state.step) ? compare_replicas(t) : 0;
}

/* Trains from where the trainer stands to the end, or to a stop. */
static enum run_result training_loop(struct trainer *t, FILE **metrics_file)
{
	const struct config *c = &t->config;
	int64_t first_token = t->state.tokens;
	double start = clock_seconds();
	t->evaluation_seconds = t->num_evaluations = 0;
	if (evaluate_start(t) < 0)
		return RUN_FAILED;
	if (t->stop)
		return RUN_STOPPED;
	int64_t before = t->state.step; /* where the ranks were together last: what is due since then comes now */
	for (bool first = true; t->state.step < t->steps; first = false) {
		struct metrics m;
		if (t->local.replicas > 1 && !t->local.in_period && t->state.step >= c->local.warmup_steps)
			begin_period(t);
		trace_phase(first ? HEARTBEAT_FIRST_STEP : HEARTBEAT_STEP, t->state.step + 1);
		begin(OP_BATCH, PASS_FORWARD, -1, 0);
		const int64_t batch = trainer_next_batch(t);
		if (parallel_agree(batch < 0 ? -1 : 0) < 0)
			return RUN_FAILED;
		const enum step_result result = trainer_step(t, batch, &m);
		const bool taken = result == STEP_TAKEN;
		if (t->local.in_period && taken) {
			if (!end_step_of_period(t, &m)) {
				if (is_rank0(t) && !c->local.seconds)
					write_metrics(t, *metrics_file, &m);
				if (is_rank0(t) && m.step % c->log.every == 0)
					print_progress(t, &m, (clock_seconds() - start - t->evaluation_seconds) / (m.tokens - first_token));
				continue;
			}
			if (end_period(t, &m) < 0)
				return RUN_GO_BACK;
		}
		if (result == STEP_GO_BACK) {
			char reason[sizeof error_text];
			memcpy(reason, error_text, sizeof reason);
			if (is_rank0(t))
				write_metrics(t, *metrics_file, &m); /* shows the step that failed */
			fail("%s", reason);
			return RUN_GO_BACK;
		}
		if (result == STEP_SKIPPED_TOO_MANY) {
			const enum run_result back = t->rollbacks < c->spikes.rollback ? roll_back(t, metrics_file) : RUN_GO_BACK;
			if (back != RUN_DONE)
				return back;
			first_token = t->state.tokens;
			start = clock_seconds();
			t->evaluation_seconds = t->num_evaluations = 0;
			before = t->state.step;
		}
		const int64_t step = t->state.step;
		const bool last = step == t->steps;
		if (taken && has_evaluation(t, before, step) && evaluate_step(t, &m) < 0)
			return RUN_FAILED;
		if (taken && is_rank0(t)) {
			save_schedule_step(&t->schedule, m.seconds);
			m.save_seconds = t->unreported_save_seconds;
			t->unreported_save_seconds = 0;
			write_metrics(t, *metrics_file, &m);
		}
		if (taken && m.has_valid_loss && !isfinite(m.valid_loss)) {
			fail("step %lld: the validation loss is %g, and the weights are not saved; the earlier checkpoints stay",
					(long long)step, plain_nan(m.valid_loss));
			return RUN_GO_BACK;
		}
		const bool stop = t->stop || (taken && c->train.stop_at_step > before && step >= c->train.stop_at_step);
		if (taken && is_rank0(t) && (last || stop || is_due(c->log.every, before, step) || m.has_valid_loss))
			print_progress(t, &m, (clock_seconds() - start - t->evaluation_seconds) / (m.tokens - first_token));
		const bool due = c->checkpoint.every == EVERY_AUTO ? t->save_due
				: is_due(c->checkpoint.every, before, step);
		t->save_due = false;
		before = taken ? step : before;
		if (last || stop || (taken && due)) {
			const enum run_result saved = save_progress(t, *metrics_file, last || stop);
			if (saved != RUN_DONE)
				return saved;
		}
		if (stop && (!last || m.validation_stopped)) {
			char line[160];
			const bool beyond = c->train.stop_at_step && c->train.stop_at_step < step;
			snprintf(line, sizeof line, "stopped after step %lld of %lld and saved; the same command%s continues",
					(long long)step, (long long)t->steps, beyond ? " without train.stop_at_step" : "");
			if (is_rank0(t))
				print_status(stdout, line, true);
			return t->stop ? RUN_STOPPED : RUN_DONE;
		}
	}
	if (is_rank0(t))
		printf("done: %lld steps, %lld tokens, checkpoint %s/step-%07lld\n", (long long)t->state.step,
				(long long)t->state.tokens, c->train.output_dir, (long long)t->state.step);
	return RUN_DONE;
}

/* Opens events.jsonl on rank 0, unless it is open. */
static int open_events(struct trainer *t)
{
	return is_rank0(t) && t->events.fd < 0 ? events_open(&t->events, t->config.train.output_dir) : 0;
}

/* Makes up for the validation of the current step if a stop ended it. */
static int finish_validation(struct trainer *t)
{
	const char *dir = t->config.train.output_dir;
	struct metrics m = {.step = t->state.step};
	bool lacks = is_rank0(t) && metrics_lack_validation(dir, m.step);
	broadcast(&t->model.layout.all, &lacks, sizeof lacks);
	const int64_t before = t->local.replicas > 1 ? 0 : m.step - 1; /* the evaluation may have come late */
	if (!lacks || !has_evaluation(t, before, m.step))
		return 0;
	if (is_rank0(t))
		printf("validating step %lld, where the run was stopped\n", (long long)m.step), fflush(stdout);
	if (evaluate_step(t, &m) < 0 || m.validation_stopped)
		return m.validation_stopped ? 0 : -1;
	if (parallel_agree(is_rank0(t) ? metrics_set_validation(dir, &m) : 0) < 0)
		return -1;
	return isfinite(m.valid_loss) ? 0 : fail("step %lld: the validation loss is %g; remove its checkpoint to continue "
			"from an earlier one", (long long)m.step, plain_nan(m.valid_loss));
}

enum run_result trainer_run(struct trainer *t)
{
	t->stop = false;
	if (finish_validation(t) < 0)
		return -1;
	if (t->stop) {
		if (is_rank0(t))
			printf("stopped before the validation of step %lld was complete; the same command continues\n",
					(long long)t->state.step);
		return RUN_STOPPED;
	}
	if (t->state.step >= t->steps) {
		if (is_rank0(t))
			printf("nothing is left to do: %lld of %lld steps are done\n", (long long)t->state.step,
					(long long)t->steps);
		return 0;
	}
	if (t->config.train.stop_at_step && t->config.train.stop_at_step < t->state.step) {
		if (is_rank0(t))
			printf("stopped at once: train.stop_at_step is %lld, and %lld of %lld steps are done; make it larger, or "
					"off, to continue\n", (long long)t->config.train.stop_at_step, (long long)t->state.step,
					(long long)t->steps);
		return 0;
	}
	struct metrics before = {0};
	FILE *f = NULL;
	int rc = 0;
	if (is_rank0(t)) {
		const int64_t samples_until = t->state.batches ? t->state.step : -1; /* a run that begins has none of step 0 */
		f = metrics_open(t->config.train.output_dir, t->state.step, &before);
		rc = f && samples_cut(t->config.train.output_dir, samples_until) == 0 && open_events(t) == 0 ? 0 : -1;
	}
	if (parallel_agree(rc) < 0) {
		if (f)
			fclose(f);
		return RUN_FAILED;
	}
	dump_close(t->dump);
	if (dump_open(&t->dump, &t->config, &t->model, t->state.step) < 0) {
		if (f)
			fclose(f);
		return RUN_FAILED;
	}
	if (is_rank0(t)) {
		print_raised_rate(t, &before);
		event_write(&t->events, t->state.step, t->state.batches ? "resume" : "start", json_pack(
				"{s:I, s:I, s:I, s:i, s:i, s:f, s:o, s:o}", "batch", (json_int_t)t->state.batches, "total_steps",
				(json_int_t)t->steps, "total_tokens", (json_int_t)t->tokens, "ranks", t->model.layout.all.size,
				"threads", kernels_threads(), "flops_per_token", t->flops_per_token, "peak_flops",
				t->peak_flops ? json_real(t->peak_flops) : json_null(), "config", run_to_json(&t->config)));
	}
	t->schedule = save_schedule_start(&t->config, t->state.step);
	enum run_result result = training_loop(t, &f);
	char reason[sizeof error_text];
	memcpy(reason, error_text, sizeof reason);
	if (t->saver.stage != SAVE_NONE)
		trace_phase(HEARTBEAT_WRITE, t->state.step);
	if (!t->local.in_period) /* else a replica has failed alone, and the end of its ranks ends all */
		report_save(t, saver_finish(&t->saver));
	set_error("%s", reason);
	if (is_rank0(t) && t->unwritten.size && metrics_append(f, t->unwritten.data) == 0)
		t->unwritten.size = 0;
	if (is_rank0(t)) {
		static const char *const why[] = {"failed", "done", "signal", "go back"}; /* by enum run_result */
		if (result != RUN_DONE && result != RUN_STOPPED && is_terminal(stdout))
			printf("\n"); /* the error goes on a line of its own */
		event_write(&t->events, t->state.step, "stop", json_pack("{s:I, s:s, s:o}", "batch",
				(json_int_t)t->state.batches, "why", why[result - RUN_FAILED], "waiting",
				list_samples(t->retry.list, t->retry.count)));
		events_close(&t->events);
	}
	if (f && fclose(f) && result >= RUN_DONE) {
		fail("%s/metrics.jsonl: %s", t->config.train.output_dir, strerror(errno));
		return RUN_FAILED;
	}
	return result;
}

/* ============================================================================================================
 * Checkpoints
 * ========================================================================================================== */

/* The same back, from the state that was read from checkpoint `dir`. One from before there was anything to remember
 * leaves all empty. */
static int spikes_from_json(struct trainer *t, const char *dir)
{
	const json_t *state = t->state.spikes;
	char where[PATH_LEN + 32];
	int64_t taken[MAX_SOURCES], rollbacks = 0;
	snprintf(where, sizeof where, "%s/trainer.json: spikes", dir);
	for (int i = 0; i < t->state.num_sources; i++)
		taken[i] = t->state.sources[i].taken;
	spike_detector_clear(&t->spikes);
	t->retry.count = 0;
	if (state && (spike_detector_from_json(&t->spikes, state, where) < 0 || retry_queue_from_json(&t->retry,
			json_object_get(state, "queue"), where, t->state.num_sources, taken, t->state.batches) < 0 ||
			field_int(state, where, "rollbacks", 0, INT32_MAX, &rollbacks) < 0))
		return -1;
	t->rollbacks = (int)rollbacks;
	return 0;
}

/* ============================================================================================================
 * Making a trainer
 * ========================================================================================================== */

/* Decides whether saves may go on while training does: whether there is memory for the copy. */
static int init_saver(struct trainer *t)
{
	const struct config *c = &t->config;
	const struct layout *l = &t->model.layout;
	struct memory_plan plan;
	if (plan_memory(&plan, &c->model, l, c->train.micro_batch, c->data.seq_len, c->train.recompute) < 0)
		return -1;
	plan.reduction += c->parallel.reduce == REDUCE_BF16 ? plan.changes : 0;
	const double without = planned_bytes(&plan) + plan.balanced_arrivals,
			machine = fmin(usable_memory("") / parallel_local_ranks(), process_memory());
	const bool fits = without + plan.copy <= machine;
	const bool wanted = c->checkpoint.every && c->checkpoint.async != ASYNC_FALSE;
	if (wanted && !fits && c->checkpoint.async == ASYNC_TRUE)
		return fail("checkpoint.async is true: the copy that is written while training goes on takes %.1f GB beside "
				"the %.1f GB of training, and %.1f GB may be used here: set it to auto or false, or take more ranks",
				plan.copy / 1e9, without / 1e9, machine / 1e9);
	return saver_init(&t->saver, &t->model.table, c, wanted && fits);
}

int trainer_allocate(struct trainer *t, const struct config *c)
{
	const int layers = c->model.num_hidden_layers;
	*t = (struct trainer){.config = *c, .events.fd = -1, .faults.log.fd = -1, .saved_step = -1};
	run_length(c, 0, 0, &t->steps, &t->tokens);
	const int replicas = count_replicas(c, parallel_size(), c->parallel.tensor, c->parallel.expert);
	if (parallel_agree(replicas < 0 ? -1 : layout_check(c->model.num_attention_heads, c->model.num_key_value_heads,
			c->model.vocab_size, c->model.num_experts, parallel_size() / replicas, c->parallel.tensor,
			c->parallel.expert)) < 0)
		return -1;
	struct layout layout = layout_of_replica(parallel_rank(), parallel_size(), replicas, c->parallel.tensor,
			c->parallel.expert);
	layout_connect(&layout);
	if (parallel_rank() == 0)
		warn_of_idle_ranks(layout.data.size * replicas, c->train.batch, c->train.micro_batch,
				c->train.batch_warmup.tokens ? c->train.batch_warmup.start : c->train.batch);
	int rc = model_init(&t->model, &c->model, &layout, c->train.micro_batch, c->data.seq_len, c->train.recompute);
	if (rc == 0)
		rc = gradient_reduction_init(&t->reduction, &t->model.table, c->parallel.reduce == REDUCE_BF16);
	if (rc == 0)
		rc = local_sgd_init(&t->local, &t->model.table, &c->local);
	if (rc == 0)
		rc = step_sums_init(&t->sums, &c->model);
	if (rc == 0)
		rc = init_saver(t);
	if (rc == 0)
		rc = spike_detector_init(&t->spikes, &c->spikes);
	struct parameter_count count[NUM_PARAMETER_PARTS + 1];
	if (rc == 0)
		rc = count_parameters(count, &t->flops_per_token, &c->model, c->data.seq_len);
	const int64_t sequences = rc == 0 ? own_micro_batches(t, c->train.batch).num * c->train.micro_batch : 0;
	const size_t tokens = sequences * c->data.seq_len;
	t->state.num_layers = layers;
	t->state.router_mean = calloc(layers, sizeof(double));
	t->state.router_std = calloc(layers, sizeof(double));
	t->synchronisation.norm = calloc(replicas, sizeof(double));
	t->synchronisation.set_aside = calloc(replicas, sizeof(int));
	t->expert_load = calloc(layers, sizeof(double));
	t->expert_counts = calloc((size_t)layers * c->model.num_experts + 1, sizeof *t->expert_counts);
	t->valid_losses = calloc(c->data.num_valid + 1, sizeof *t->valid_losses);
	t->length = calloc(sequences, sizeof(int32_t));
	t->input = calloc(tokens, sizeof(int32_t));
	t->target = calloc(tokens, sizeof(int32_t));
	t->samples = calloc(c->train.batch, sizeof *t->samples);
	const bool documents = c->data.document_mask || c->data.packing != PACKING_WINDOWS; /* trainer_start knows better */
	t->document = documents ? calloc(tokens, sizeof(int32_t)) : NULL;
	if (rc == 0 && (!t->synchronisation.norm || !t->synchronisation.set_aside || !t->state.router_mean ||
			!t->state.router_std || !t->expert_load || !t->expert_counts || !t->valid_losses || !t->length ||
			!t->input || !t->target || !t->samples || (documents && !t->document)))
		rc = fail("out of memory for the %zu tokens that a rank has of a batch of %d x %d", tokens, c->train.batch,
				c->data.seq_len);
	if (parallel_agree(rc) < 0) {
		trainer_free(t);
		return -1;
	}
	for (int l = 0; l < layers; l++)
		t->state.router_std[l] = 1;
	for (int64_t i = 0; i < sequences; i++)
		t->length[i] = c->data.seq_len;
	return 0;
}

void trainer_free(struct trainer *t)
{
	blend_close(&t->train);
	for (int i = 0; i < MAX_SOURCES; i++)
		tokens_close(&t->valid[i]);
	gradient_reduction_free(&t->reduction);
	saver_free(&t->saver);
	free(t->unwritten.data);
	model_free(&t->model);
	model_files_free(&t->files);
	free(t->sums.values);
	free(t->state.router_mean);
	free(t->state.router_std);
	free(t->expert_load);
	free(t->expert_counts);
	free(t->valid_losses);
	free(t->input);
	free(t->target);
	free(t->document);
	free(t->length);
	free(t->samples);
	dump_close(t->dump);
	retry_queue_free(&t->retry);
	spike_detector_free(&t->spikes);
	json_decref(t->state.spikes);
	json_decref(t->state.local);
	local_sgd_free(&t->local);
	free(t->synchronisation.norm);
	free(t->synchronisation.set_aside);
	events_close(&t->events);
	faults_free(&t->faults);
	slow_ranks_free(&t->slow_ranks);
	*t = (struct trainer){.events.fd = -1, .faults.log.fd = -1};
}

static int open_data_files(struct trainer *t)
{
	const struct config *c = &t->config;
	struct data_options o;
	int rc = data_options_init(&o, c, t->tokenizer);
	if (rc == 0)
		rc = blend_open(&t->train, c, &o);
	for (int i = 0; i < c->data.num_valid && rc == 0; i++)
		rc = open_data(&t->valid[i], &c->data.valid[i], &o, c->eval.max_windows);
	return rc;
}

/* Finds the tokenizer of the run, and reads what goes along into its checkpoints, from the checkpoint `dir` that the
 * run continues from or, where that is "", from `start`, the directory of init_from, whose config.json must describe
 * the same model. */
static int take_along(struct trainer *t, const char *dir, const char *start)
{
	struct config *c = &t->config;
	const char *from = *dir ? dir : start;
	const bool named = strcmp(c->data.tokenizer, "none");
	struct tokenizer *theirs;
	int rc = path_copy(t->tokenizer, c->data.tokenizer);
	if (!*from || rc < 0)
		return rc;
	struct model_config described;
	if (!*dir && (config_from_huggingface(&described, from) < 0 ||
			config_check_init(&described, &c->model, from) < 0))
		return -1;
	if (is_rank0(t))
		rc = model_files_read(&t->files, from);
	t->state.files = &t->files;
	if (rc == 0 && named && !*dir && is_rank0(t))
		model_files_compare_tokenizer(&t->files, c->data.tokenizer, from);
	if (rc < 0 || named)
		return rc;
	const int found = tokenizer_find(&theirs, from, NULL);
	if (found < 0 && is_rank0(t)) /* perhaps one that ling does not read: then only data that names none is right */
		fprintf(stderr, "note: the tokenizer of %s cannot be compared with that of the data: %s\n", from, error_text);
	if (found > 0 && tokenizer_hash(theirs) == byte_tokenizer_hash())
		rc = path_copy(c->data.tokenizer, BYTE_TOKENIZER) < 0 ? -1 : path_copy(t->tokenizer, BYTE_TOKENIZER);
	else if (found > 0)
		rc = path_copy(t->tokenizer, from);
	tokenizer_close(theirs);
	return rc;
}

/* Names the samples that wait, but whose files are in the blend no more. */
static int drop_lost(struct trainer *t, const int *index)
{
	struct batch_sample *lost = allocate(t->retry.count * sizeof *lost);
	const int64_t n = retry_queue_remap(&t->retry, index, lost);
	const int rc = parallel_agree(n ? open_events(t) : 0);
	if (n && rc == 0 && is_rank0(t)) {
		json_t *list = samples_to_json(lost, n);
		char *text = json_text(list, JSON_COMPACT);
		printf("%lld samples that were to be tried again are dropped, their files are in data.train no more; file, "
				"first and last number: %s\n", (long long)n, text);
		free(text);
		event_write(&t->events, t->state.step, "drop", json_pack("{s:I, s:s, s:o}", "batch",
				(json_int_t)t->state.batches, "why", "their files left the blend", "samples", list));
	}
	free(lost);
	return rc;
}

/* Takes state, weights and moments from a checkpoint, which checkpoint_choose has found to be whole. Config and data
 * must be those of the same run. What differs in the config is written to notes; NULL: not. */
static int load_checkpoint(struct trainer *t, const char *dir, FILE *notes)
{
	struct model *m = &t->model;
	FILE *nowhere = notes ? NULL : fopen("/dev/null", "w");
	int index[MAX_SOURCES], rc = notes || nowhere ? 0 : fail("/dev/null: %s", strerror(errno));
	if (rc == 0)
		rc = checkpoint_read_state(dir, &t->config, &t->state, notes ? notes : nowhere);
	if (nowhere)
		fclose(nowhere);
	if (rc == 1)
		rc = blend_check_tokenizer(&t->train, t->config.data.tokenizer, dir);
	if (rc == 0)
		rc = spikes_from_json(t, dir);
	if (rc == 0 && t->local.replicas > 1)
		rc = local_sgd_from_json(&t->local, t->state.local, dir, t->state.num_sources);
	if (parallel_agree(rc) < 0)
		return -1;
	if (!t->state.num_sources) /* the checkpoint is a converted model, which has seen no data: any data is right */
		blend_begin(&t->train, &t->config, &t->state);
	else if ((rc = blend_resume(&t->train, &t->config, &t->state, dir, index)) < 0 || drop_lost(t, index) < 0)
		return -1;
	if (t->state.num_sources && t->local.replicas > 1)
		local_sgd_remap(&t->local, index);
	if (rc == 1 && notes)
		printf("the blend of data.train changes at step %lld\n", (long long)t->state.step);
	if (load_moments(&m->table, &m->global, dir, m->exp_avg, m->exp_avg_sq, t->local.momentum) < 0 ||
			load_weights(m, dir, DO_NOT_VERIFY) < 0)
		return -1;
	t->saved_step = t->state.step;
	run_length(&t->config, t->state.step, t->state.tokens, &t->steps, &t->tokens);
	return 0;
}

/* Continues from a checkpoint. */
static int resume(struct trainer *t, const char *dir)
{
	if (load_checkpoint(t, dir, is_rank0(t) ? stdout : NULL) < 0)
		return -1;
	if (is_rank0(t))
		printf("continuing from %s\n", dir);
	const int before = t->state.local ? (int)json_integer_value(json_object_get(t->state.local, "replicas")) : 1;
	if (is_rank0(t) && before != t->model.layout.replicas.size)
		printf("the checkpoint is of %d replica%s, and now there %s %d: each takes its moments of AdamW from one of "
				"them, in turn\n", before, before > 1 ? "s" : "", t->model.layout.replicas.size > 1 ? "are" : "is",
				t->model.layout.replicas.size);
	return 0;
}

/* Opens the data, on which the ranks must agree. Then sets the weights: from the checkpoint `dir` or, where that is
 * "", from init_from or at random. */
static int trainer_start(struct trainer *t, const char *dir)
{
	const struct config *c = &t->config;
	char start[PATH_LEN] = ""; /* the config keeps init_from as it was asked for, to compare it */
	int rc = 0;
	if ((!*dir && *c->train.init_from && find_model(start, c->train.init_from) < 0) ||
			parallel_agree(take_along(t, dir, start)) < 0)
		return -1;
	/* Rank 0 first: it may have to examine all of the files, and leaves what it found for the others. */
	if (parallel_agree(is_rank0(t) ? open_data_files(t) : 0) < 0 ||
			parallel_agree(is_rank0(t) ? 0 : open_data_files(t)) < 0)
		return -1;
	for (int i = 0; i < t->train.num_files; i++)
		if (parallel_same(t->train.files[i].crc32, "data.train") < 0)
			return -1;
	for (int i = 0; i < c->data.num_valid; i++)
		if (parallel_same(t->valid[i].crc32, "data.valid") < 0)
			return -1;
	if (!blend_has_documents(&t->train)) {
		free(t->document);
		t->document = NULL;
	}
	if (is_rank0(t) && (print_windows("data.train", t->train.files, c->data.num_train, c->data.seq_len) < 0 ||
			print_windows("data.valid", t->valid, c->data.num_valid, c->data.seq_len) < 0))
		rc = -1;
	if (parallel_agree(rc) < 0)
		return -1;
	blend_begin(&t->train, c, &t->state);
	if (*dir)
		return resume(t, dir);
	struct tokenizer *theirs;
	if (is_rank0(t) && !strcmp(t->tokenizer, "none") && (!*start || tokenizer_find(&theirs, start, NULL) == 0))
		blend_note_tokenizer(&t->train);
	if (*start && model_load(&t->model, start) < 0)
		return -1;
	if (!*start)
		model_randomize(&t->model, c->train.seed);
	if (c->train.perturb)
		model_perturb(&t->model, c->train.perturb);
	return 0;
}

int trainer_init(struct trainer *t, const struct config *c)
{
	char dir[PATH_LEN];
	const struct layout all = layout_of_rank(parallel_rank(), parallel_size(), 1, 1);
	uint32_t program = 0;
	int rc = file_crc32("/proc/self/exe", &program);
	if (rc == 0 && all.world.rank == 0)
		rc = checkpoint_clean(c->train.output_dir);
	if (parallel_agree(rc < 0 ? -1 : 0) < 0 || parallel_same(program, "the program") < 0 ||
			parallel_same(config_crc32(c), "the config") < 0 || trainer_allocate(t, c) < 0)
		return -1;
	rc = checkpoint_choose(c, &t->model.table, &t->events, INT64_MAX, dir);
	if (rc >= 0)
		rc = trainer_start(t, dir);
	if (rc < 0)
		trainer_free(t);
	return rc;
}
