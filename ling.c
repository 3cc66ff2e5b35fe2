/*
 * ling.c - the model and one training step.
 *
 * In the order of a training step:
 *   Sizes, operations, tokens of a rank     a few helpers
 *   Forward                             embedding; attention, router and experts of a layer; final norm
 *   Head and loss                       logits and cross-entropy, and their backward pass
 *   Backward                            the layers from the last one down
 *   Multi-token prediction              MTP layers, forward and backward
 *   Gradient reduction                  sums of the gradients over the ranks
 *   Schedules                           learning rate, batch size
 *   The step                            gradients, decision, update, report
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
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
	return (struct step_sums){.size = NUM_SUMS + stride * num_layers(c) + trained_mtp_layers(c), .stride = stride};
}

/* Allocates the sums; the caller frees s->values. */
int step_sums_init(struct step_sums *s, const struct model_config *c)
{
	*s = step_sums_shape(c);
	s->values = calloc(s->size, sizeof *s->values);
	return s->values ? 0 : fail("out of memory for the sums of %d layers", num_layers(c));
}

static struct layer_sums *layer_sums(const struct step_sums *s, int layer)
{
	return (struct layer_sums *)(s->values + NUM_SUMS + s->stride * layer);
}

/* Of the MTP layers that are trained, the last of the sums: [trained_mtp_layers()]. */
static double *mtp_losses(const struct step_sums *s, const struct model_config *c)
{
	return s->values + s->size - trained_mtp_layers(c);
}

/* The layer of a depth of prediction; -1 for depth 0, which is the model itself. */
static int layer_of_depth(const struct model_config *c, int depth)
{
	return depth ? c->num_hidden_layers + depth - 1 : -1;
}

/* The value of x [B, L] at place t, shifted `depth` places to the left: `freed` where that is behind the window, or,
 * where documents are masked, in another document than place t. */
static int32_t shifted(const int32_t *x, const int32_t *document, int64_t t, int64_t L, int depth, int32_t freed)
{
	const bool there = t % L + depth < L && (!document || document[t + depth] == document[t]);
	return there ? x[t + depth] : freed;
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
	const int width = qkv_width(c), kv_width = 2 * nkv * d, rot = rotary_dim(c);
	real *qkv = x->qkv;
	for (int i = 0; i < n; i++) {
		const struct kv_cache *cache = segments[i].cache;
		real *kv = cache->kv + l * cache->rows * kv_width;
		rope_forward(qkv, m->rope + cache->length * rot, NULL, segments[i].num_tokens, segments[i].num_tokens, nh,
				nkv, d, rot);
		for (int64_t p = cache->length; p < cache->length + segments[i].num_tokens; p++, qkv += width)
			memcpy(kv + (cache->block[p / KV_BLOCK] + p % KV_BLOCK) * kv_width, qkv + nh * d, kv_width * sizeof *kv);
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
	if (c->use_qk_norm) {
		begin(OP_QK_NORM, PASS_FORWARD, l, moved(2 * T * (nh + nkv) * d));
		qk_norm_forward(x->qkv, x->qk, x->qk_rstd, p->qk_norm, T, nh, nkv, d, c->rms_norm_eps);
		dump_output(m, DUMP_QK_NORM, l, x->qkv);
	}
	if (segments) {
		double work = 0;
		for (int i = 0; i < n; i++) /* a token sees what is in the cache, and half of the new ones in the mean */
			work += 2 * product(segments[i].num_tokens, attention_width(c), 1) *
					(segments[i].cache->length + (segments[i].num_tokens + 1) / 2.0);
		begin(OP_ATTENTION_CORE, PASS_FORWARD, l, work);
		attention_segments(m, l, segments, n);
		return;
	}
	begin(OP_ROPE, PASS_FORWARD, l, moved(2 * T * (nh + nkv) * rotary_dim(c)));
	rope_forward(x->qkv, m->rope, m->document, T, L, nh, nkv, d, rotary_dim(c));
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

/* The rules of the model's routers. */
static struct routing routing_of(const struct model_config *c)
{
	return (struct routing){.sigmoid = c->score_function == SCORE_SIGMOID, .k = c->num_experts_per_tok,
			.groups = c->n_group, .top_groups = c->topk_group, .scale = c->routed_scaling_factor,
			.normalise = c->norm_topk_prob && c->num_experts_per_tok > 1};
}

/* Adds to the step's sums what the router's losses and statistics need of this micro-batch's tokens, and leaves E f_e
 * for the backward pass: balance loss = E sum_e f_e Q_e, f_e = assignments to e / (k tokens), Q_e the mean of q_e: see
 * router_statistics; z-loss = the mean of logsumexp(s)^2. */
static void router_losses(struct model *m, int l, int64_t T, const struct step *step, struct step_sums *sums)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t L = m->seq_len, B = T / L, E = c->num_experts, N = own_tokens(m, T, &first);
	const struct routing routing = routing_of(c);
	double *count = a->sequence_count, *q_sum = a->sequence_q; /* [B, E] */
	router_statistics(a->router_sums, count, q_sum, x->logits, x->p, x->router_lse, x->index, m->length, first, N, B, L,
			E, &routing);
	struct layer_sums *sum = layer_sums(sums, l);
	for (int b = 0; b < B; b++) {
		for (int64_t e = 0; e < E; e++)
			sum->count[e] += count[b * E + e];
		sum->s += a->router_sums[b].s;
		sum->s_squared += a->router_sums[b].s_squared;
		sum->z += a->router_sums[b].z / step->num_tokens;
	}
	/* f_e needs the assignments of all tokens, whichever rank of the tensor group has them; of Q_e each rank adds its
	 * own tokens' share. */
	all_reduce_sum(&m->layout.tensor, TRAFFIC_STATISTICS, count, B * E);
	int64_t all = 0; /* tokens of the micro-batch without padding */
	for (int b = 0; b < B; b++)
		all += m->length ? m->length[b] : L;
	if (c->router.balance_loss_scope == SCOPE_MICRO_BATCH) {
		for (int64_t e = 0; e < E; e++) {
			for (int b = 1; b < B; b++) {
				count[e] += count[b * E + e];
				q_sum[e] += q_sum[b * E + e];
			}
			for (int b = 1; b < B; b++)
				count[b * E + e] = count[e], q_sum[b * E + e] = 0;
		}
	}
	for (int64_t i = 0; i < B * E; i++) {
		/* tokens that count together: those of the sequence, or of the whole micro-batch */
		const int64_t together = c->router.balance_loss_scope == SCOPE_MICRO_BATCH ? all
				: m->length ? m->length[i / E] : L;
		double f = count[i] / ((double)routing.k * together);
		x->balance_factor[i] = (real)(E * f);
		/* Q_e is q_sum / together; weighted with the tokens' part of the step, together / num_tokens */
		sum->balance += E * f * q_sum[i] / step->num_tokens;
	}
}

/* p, index and weight of the tokens in acts.normed: their scores, the k chosen experts, and the experts' weights. */
static void router_forward(struct model *m, int l, int64_t T, const struct step *step, struct step_sums *sums)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t L = m->seq_len, E = c->num_experts, N = own_tokens(m, T, &first);
	const struct routing routing = routing_of(c);
	/* s = x W^T, p = softmax(s) or sigmoid(s) */
	begin(OP_ROUTER_LOGITS, PASS_FORWARD, l, product(N, c->hidden_size, E));
	matmul_forward(x->logits, a->normed, &m->weights[l].router, NULL, N, c->hidden_size, E, false);
	dump_output(m, DUMP_ROUTER_LOGITS, l, x->logits);
	begin(OP_ROUTER_SOFTMAX, PASS_FORWARD, l, moved(2 * N * E));
	scores_forward(x->p, x->router_lse, x->logits, N, E, routing.sigmoid);
	const real *p = x->p;
	if (step && step->index < c->router.warmup_steps) {
		/* s_hat = a s + (1 - a)(mu + sigma eps), a = i/W; p_hat = softmax(s_hat) or sigmoid(s_hat) */
		struct random_stream noise = {.seed = step->seed, .purpose = RANDOM_ROUTING + l, .step = (uint32_t)step->index,
				.first = (uint64_t)((step->first_sequence * L + first) * E)};
		routing_noise_forward(x->p_hat, x->logits, (double)step->index / c->router.warmup_steps, step->router_mean[l],
				step->router_std[l], &noise, N, E);
		scores_forward(x->p_hat, NULL, x->p_hat, N, E, routing.sigmoid);
		p = x->p_hat;
	}
	dump_output(m, DUMP_ROUTER_SOFTMAX, l, p);
	/* weight = p of those with the k largest p + bias, over their sum */
	begin(OP_ROUTER_TOPK, PASS_FORWARD, l, moved(N * E));
	topk_forward(x->index, x->weight, p, m->params.layer[l].expert_bias, N, E, &routing);
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

/* The final norm of a depth of prediction. */
static void final_norm_forward(struct model *m, int depth, int64_t N)
{
	const struct model_config *c = &m->config;
	const int l = layer_of_depth(c, depth);
	struct depth_activations *x = &m->acts.depth[depth];
	begin(OP_NORM, PASS_FORWARD, l, moved(2 * N * c->hidden_size));
	rmsnorm_forward(x->normed, x->rstd, x->output, depth ? m->params.layer[l].final_norm : m->params.norm, N,
			c->hidden_size, c->rms_norm_eps);
	dump_output(m, DUMP_NORM, l, x->normed);
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
		before_block(m, block_of_layer(c, l));
		attention_layer_forward(m, l, T, segments, n);
		ffn_layer_forward(m, l, T, l + 1 < layers ? a->layer[l + 1].input : a->depth[0].output, step, sums);
	}
	before_block(m, head_block(c));
	final_norm_forward(m, 0, N);
}

static void mtp_forward(struct model *m, const int32_t *input, int depth, int64_t T, const struct step *step,
		struct step_sums *sums);

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
	for (int depth = 1; sums && depth <= trained_mtp_layers(&m->config); depth++)
		mtp_forward(m, input, depth, T, step, sums);
	before_block(m, last_block(&m->config));
}

/* The final norm's results of all tokens: with a tensor group, those that model_extend has gathered. */
static real *all_results(struct model *m)
{
	return m->layout.tensor.size == 1 ? m->acts.depth[0].normed : m->acts.gathered;
}

real *model_extend(struct model *m, const struct segment *segments, int n)
{
	const int64_t H = m->config.hidden_size;
	real *embedded = partial_sums(m, m->acts.layer[0].input);
	int64_t T = 0;
	begin(OP_EMBEDDING, PASS_FORWARD, -1, 0);
	for (int i = 0; i < n; i++) {
		const struct segment *s = &segments[i];
		embedding_forward(embedded + T * H, s->token, &m->embedding, m->first_vocab, s->num_tokens, H,
				m->config.vocab_size);
		T += s->num_tokens;
	}
	assert(T <= (int64_t)m->max_sequences * m->seq_len);
	layers_forward(m, T, segments, n, NULL, NULL);
	for (int i = 0; i < n; i++)
		segments[i].cache->length += segments[i].num_tokens;
	all_gather_sequence(m, m->acts.depth[0].normed, T);
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
	begin(OP_HEAD_LOGITS, PASS_FORWARD, -1, product(n, H, own));
	matmul_forward(logits, head_input(m, all_results(m) + first * H, n), &m->lm_head, NULL, n, H, own, false);
	if (tensor->size == 1)
		return;
	/* Each rank has its columns now, [n, own]. Some rows at a time, from the last on, whose places no other row's
	 * columns are in: the columns of all ranks, one rank after the other, and from there to the rows. */
	const int64_t room = head_chunk(V, tensor->size) * (V / tensor->size) / V, most = room > 1 ? room : 1;
	real *columns = m->acts.head_logits;
	for (int64_t end = n, rows; end > 0; end -= rows) {
		rows = end < most ? end : most;
		all_gather(tensor, TRAFFIC_HEAD, columns, logits + (end - rows) * own, V, rows);
		for (int r = 0; r < tensor->size; r++) {
			const int64_t column = shard_begin(V, r, tensor->size);
			const int64_t width = shard_begin(V, r + 1, tensor->size) - column;
			for (int64_t i = 0; i < rows; i++)
				copy_array(logits + (end - rows + i) * V + column, columns + column * rows + i * width, width);
		}
	}
}

/* The loss of a depth of prediction, and its gradient: what model_loss says, for target [T]. */
static double depth_loss(struct model *m, int depth, const int32_t *target, int64_t T, const struct step *step,
		double *window_loss)
{
	struct activations *a = &m->acts;
	struct depth_activations *x = &a->depth[depth];
	const struct group *tensor = &m->layout.tensor;
	const int64_t H = m->config.hidden_size, V = m->config.vocab_size;
	const int64_t C = head_chunk(m->global.vocab_size, tensor->size);
	const int l = layer_of_depth(&m->config, depth);
	const real *normed = NULL;
	real *dnormed = step ? partial_sums(m, x->dnormed) : NULL;
	/* the weight of a token's loss in that of the step, where each depth has a mean */
	const double scale = !step || !step->num_targets[depth] ? 0
			: (depth ? m->config.mtp_loss_scaling_factor : 1) / step->num_targets[depth];
	double total = 0;
	for (int64_t b = 0; window_loss && b * m->seq_len < T; b++)
		window_loss[b] = 0;
	/* an empty micro-batch has one turn too, which writes 0 to its gradient */
	for (int64_t first = 0; first == 0 || first < T; first += C) {
		int64_t n = T - first < C ? T - first : C;
		begin(OP_HEAD_LOGITS, PASS_FORWARD, l, product(n, H, V));
		if (first == 0)
			normed = all_gather_sequence(m, x->normed, T);
		const real *in = head_input(m, normed + first * H, n);
		matmul_forward(a->head_logits, in, &m->lm_head, NULL, n, H, V, false);
		dump_logits(m, l, a->head_logits, first, n);
		/* loss = log(sum_v e^(logit_v - max)) - (logit_target - max). Of max, sum and loss each rank has its part of
		 * the vocabulary's. */
		begin(OP_HEAD_LOSS, PASS_FORWARD, l, moved(3 * n * V));
		logits_max(a->head_max, a->head_logits, n, V);
		all_reduce_max(tensor, TRAFFIC_HEAD, a->head_max, n);
		double *loss = a->head_loss, *sum = loss + n;
		cross_entropy_forward(loss, sum, a->head_logits, a->head_max, target + first, m->first_vocab, n, V);
		all_reduce_sum(tensor, TRAFFIC_HEAD, loss, 2 * n);
		for (int64_t t = 0; t < n; t++) {
			const double of_token = target[first + t] < 0 ? 0 : loss[t] + log(sum[t]);
			total += of_token;
			if (window_loss)
				window_loss[(first + t) / m->seq_len] += of_token;
		}
		dump_losses(m, l, loss, sum, target + first, first, n);
		if (!step)
			continue;
		/* dlogits = (softmax(logits) - onehot(target)) scale */
		begin(OP_HEAD_LOSS, PASS_BACKWARD, l, moved(2 * n * V));
		cross_entropy_backward(a->head_logits, sum, target + first, m->first_vocab, scale, n, V);
		dump_logits_gradient(m, l, a->head_logits, first, n);
		begin(OP_HEAD_LOGITS, PASS_BACKWARD, l, product(n, H, V));
		matmul_backward_input(dnormed + first * H, a->head_logits, m->params.lm_head, n, H, V, false);
		/* With NormHead too: dW[v, j] = sum_t dlogits[t, v] normed[t, j] / (n_j + 1e-7), n being a constant */
		begin(OP_HEAD_LOGITS, PASS_WEIGHT, l, product(n, H, V));
		matmul_backward_weight(m->grads.lm_head, a->head_logits, in, n, H, V,
				step->accumulate || depth > 0 || first > 0);
		if (m->head_scale)
			scale_columns(dnormed + first * H, dnormed + first * H, m->head_scale, n, H);
	}
	if (step)
		reduce_scatter_sequence(m, x->dnormed, false, T);
	return x->loss = total;
}

double model_loss(struct model *m, const int32_t *target, int B, const struct step *step, double *window_loss)
{
	const int64_t L = m->seq_len, T = B * L;
	const double loss = depth_loss(m, 0, target, T, step, window_loss);
	for (int depth = 1; step && depth <= trained_mtp_layers(&m->config); depth++) {
		for (int64_t t = 0; t < T; t++)
			m->acts.shifted[t] = shifted(target, m->document, t, L, depth, -1);
		depth_loss(m, depth, m->acts.shifted, T, step, NULL);
	}
	return loss;
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
	const struct routing routing = routing_of(c);
	const bool noisy = step->index < c->router.warmup_steps;
	const real *p = noisy ? x->p_hat : x->p;
	begin(OP_ROUTER_TOPK, PASS_BACKWARD, l, moved(2 * N * E));
	topk_backward(a->dlogits, a->dweight, x->index, x->weight, p, N, E, &routing);
	if (noisy) { /* s_hat = a s + (1 - a)(mu + sigma eps), so ds = a ds_hat */
		real alpha = (real)((double)step->index / c->router.warmup_steps);
		for (int64_t i = 0; i < N * E; i++)
			a->dlogits[i] *= alpha;
	}
	/* ds += the gradient of  balance_loss_coef E sum_e f_e Q_e + z_loss_coef mean(logsumexp(s)^2),  f_e being
	 * constants, Q_e and the mean sums over the tokens divided by the step's tokens */
	begin(OP_ROUTER_LOSSES, PASS_BACKWARD, l, moved(3 * N * E));
	router_loss_backward(a->dlogits, x->logits, x->p, x->router_lse, x->balance_factor, m->length, first, N, L, E,
			c->router.balance_loss_coef / step->num_tokens, c->router.z_loss_coef / step->num_tokens, &routing);
	dump_gradient(m, DUMP_ROUTER_LOGITS, l, a->dlogits);
	if (m->grads.layer[l].expert_bias) /* the loss has none */
		memset(m->grads.layer[l].expert_bias, 0, E * sizeof(real));
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
	begin(OP_ROPE, PASS_BACKWARD, l, moved(2 * T * (nh + nkv) * rotary_dim(c)));
	rope_backward(a->dqkv, m->rope, m->document, T, L, nh, nkv, d, rotary_dim(c));
	if (c->use_qk_norm) {
		dump_gradient(m, DUMP_QK_NORM, l, a->dqkv);
		begin(OP_QK_NORM, PASS_BACKWARD, l, moved(3 * T * (nh + nkv) * d));
		qk_norm_backward(a->dqkv, g->qk_norm, x->qk, x->qk_rstd, p->qk_norm, T, nh, nkv, d, add, a->sum_scratch);
	}
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

/* The backward pass of layer l, dstream as above. */
static void layer_backward(struct model *m, int l, int B, const struct step *step)
{
	const int64_t T = (int64_t)B * m->seq_len;
	if (m->mode == TRAIN_RECOMPUTE_LAYER && l < trained_layers(&m->config) - 1) { /* the last one's are still there */
		attention_layer_forward(m, l, T, NULL, 0);
		ffn_layer_forward(m, l, T, NULL, step, NULL);
	}
	ffn_layer_backward(m, l, B, step);
	attention_layer_backward(m, l, B, step);
}

/* The backward pass of the final norm of a depth of prediction: dstream [N, H] is then d(its input). */
static void final_norm_backward(struct model *m, int depth, int64_t N, const struct step *step)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	const struct depth_activations *x = &a->depth[depth];
	const int l = layer_of_depth(c, depth);
	const int64_t H = c->hidden_size;
	dump_gradient(m, DUMP_NORM, l, x->dnormed);
	begin(OP_NORM, PASS_BACKWARD, l, moved(3 * N * H));
	memset(a->dstream, 0, N * H * sizeof *a->dstream);
	rmsnorm_backward(a->dstream, depth ? m->grads.layer[l].final_norm : m->grads.norm, x->dnormed, x->output,
			depth ? m->params.layer[l].final_norm : m->params.norm, x->rstd, N, H, step->accumulate, a->sum_scratch);
}

/* The gradient of the embedding of a depth's tokens, token [T], from dstream. The depths come from the last one down.
 * Tied, the head has written this gradient already. */
static void embedding_layer_backward(struct model *m, int depth, const int32_t *token, int64_t T,
		const struct step *step)
{
	const struct model_config *c = &m->config;
	const int64_t H = c->hidden_size;
	const int l = layer_of_depth(c, depth);
	dump_gradient(m, DUMP_EMBEDDING, l, m->acts.dstream);
	begin(OP_EMBEDDING, PASS_WEIGHT, l, moved(2 * T * H));
	embedding_backward(m->grads.embedding, token, all_gather_sequence(m, m->acts.dstream, T), m->first_vocab, T, H,
			c->vocab_size, step->accumulate || c->tie_word_embeddings || depth < trained_mtp_layers(c));
}

static void mtp_backward(struct model *m, const int32_t *input, int depth, int B, const struct step *step);
static void clear_untrained_gradients(struct model *m);

void model_backward(struct model *m, const int32_t *input, int B, const struct step *step,
		struct gradient_reduction *reduction)
{
	const struct model_config *c = &m->config;
	int64_t first;
	const int64_t T = (int64_t)B * m->seq_len, N = own_tokens(m, T, &first);
	if (!step->accumulate)
		clear_untrained_gradients(m);
	for (int depth = trained_mtp_layers(c); depth > 0; depth--) {
		mtp_backward(m, input, depth, B, step);
		start_reduction(reduction, m, block_of_layer(c, layer_of_depth(c, depth)));
	}
	final_norm_backward(m, 0, N, step);
	start_reduction(reduction, m, head_block(c));
	for (int l = c->num_hidden_layers - 1; l >= 0; l--) {
		layer_backward(m, l, B, step);
		start_reduction(reduction, m, block_of_layer(c, l));
	}
	embedding_layer_backward(m, 0, input, T, step);
	start_reduction(reduction, m, 0);
	finish_reduction(reduction, m);
}

/* ============================================================================================================
 * Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2)
 *
 *     h_0 = RMSNorm(the residual stream after the last layer)
 *     MTP layer i - 1:  h_i = RMSNorm(Layer(W [RMSNorm(E[token i places further]), RMSNorm(h_{i-1})])),  W = eh_proj
 *     logits of depth i, for the token that is i + 1 places further = Head(h_i)
 *
 * Embedding E and head are the model's own. A place whose token is behind the end of the window, or in another document
 * where documents are masked, has token 0 instead, and no target.
 * ========================================================================================================== */

/* acts.mtp_input [N, 2 H] = [RMSNorm(embedding), RMSNorm(hidden state)] of a depth. */
static void mtp_norms_forward(struct model *m, int depth, int64_t N)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	struct depth_activations *x = &a->depth[depth];
	const int l = layer_of_depth(c, depth);
	const struct layer_params *p = &m->params.layer[l];
	const int64_t H = c->hidden_size;
	begin(OP_MTP_EMBEDDING_NORM, PASS_FORWARD, l, moved(4 * N * H));
	rmsnorm_forward(a->normed, x->embedding_rstd, x->embedding, p->embedding_norm, N, H, c->rms_norm_eps);
	dump_output(m, DUMP_MTP_EMBEDDING_NORM, l, a->normed);
	copy_columns(a->mtp_input, 2 * H, a->normed, H, N, H);
	begin(OP_MTP_HIDDEN_NORM, PASS_FORWARD, l, moved(4 * N * H));
	rmsnorm_forward(a->normed, x->hidden_rstd, x[-1].normed, p->hidden_norm, N, H, c->rms_norm_eps);
	dump_output(m, DUMP_MTP_HIDDEN_NORM, l, a->normed);
	copy_columns(a->mtp_input + H, 2 * H, a->normed, H, N, H);
}

/* The tokens of a depth, [T], where the model itself has `input`. */
static const int32_t *mtp_tokens(struct model *m, const int32_t *input, int depth, int64_t T)
{
	for (int64_t t = 0; t < T; t++)
		m->acts.shifted[t] = shifted(input, m->document, t, m->seq_len, depth, 0);
	return m->acts.shifted;
}

static void mtp_forward(struct model *m, const int32_t *input, int depth, int64_t T, const struct step *step,
		struct step_sums *sums)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	struct depth_activations *x = &a->depth[depth];
	const int l = layer_of_depth(c, depth);
	int64_t first;
	const int64_t H = c->hidden_size, N = own_tokens(m, T, &first);
	before_block(m, block_of_layer(c, l));
	begin(OP_EMBEDDING, PASS_FORWARD, l, moved(2 * T * H));
	embedding_forward(partial_sums(m, x->embedding), mtp_tokens(m, input, depth, T), &m->embedding, m->first_vocab, T,
			H, c->vocab_size);
	reduce_scatter_sequence(m, x->embedding, false, T);
	dump_output(m, DUMP_EMBEDDING, l, x->embedding);
	mtp_norms_forward(m, depth, N);
	begin(OP_MTP_PROJECTION, PASS_FORWARD, l, product(N, 2 * H, H));
	matmul_forward(a->layer[l].input, a->mtp_input, &(struct weight){.data = m->params.layer[l].eh_proj}, NULL, N,
			2 * H, H, false);
	dump_output(m, DUMP_MTP_PROJECTION, l, a->layer[l].input);
	attention_layer_forward(m, l, T, NULL, 0);
	ffn_layer_forward(m, l, T, x->output, step, sums);
	final_norm_forward(m, depth, N);
}

/* The backward pass of mtp_forward, which adds to the gradient of the depth before. */
static void mtp_backward(struct model *m, const int32_t *input, int depth, int B, const struct step *step)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	struct depth_activations *x = &a->depth[depth];
	const int l = layer_of_depth(c, depth);
	const struct layer_params *p = &m->params.layer[l], *g = &m->grads.layer[l];
	int64_t first;
	const int64_t T = (int64_t)B * m->seq_len, H = c->hidden_size, N = own_tokens(m, T, &first);
	const bool add = step->accumulate;
	final_norm_backward(m, depth, N, step);
	layer_backward(m, l, B, step);
	dump_gradient(m, DUMP_MTP_PROJECTION, l, a->dstream);
	mtp_norms_forward(m, depth, N); /* was not kept: it is cheap to compute again */
	begin(OP_MTP_PROJECTION, PASS_WEIGHT, l, product(N, 2 * H, H));
	matmul_backward_weight(g->eh_proj, a->dstream, a->mtp_input, N, 2 * H, H, add);
	begin(OP_MTP_PROJECTION, PASS_BACKWARD, l, product(N, 2 * H, H));
	matmul_backward_input(a->mtp_input, a->dstream, p->eh_proj, N, 2 * H, H, false);
	begin(OP_MTP_HIDDEN_NORM, PASS_BACKWARD, l, moved(5 * N * H));
	copy_columns(a->dnormed, H, a->mtp_input + H, 2 * H, N, H);
	dump_gradient(m, DUMP_MTP_HIDDEN_NORM, l, a->dnormed);
	rmsnorm_backward(x[-1].dnormed, g->hidden_norm, a->dnormed, x[-1].normed, p->hidden_norm, x->hidden_rstd, N, H,
			add, a->sum_scratch);
	begin(OP_MTP_EMBEDDING_NORM, PASS_BACKWARD, l, moved(5 * N * H));
	copy_columns(a->dnormed, H, a->mtp_input, 2 * H, N, H);
	dump_gradient(m, DUMP_MTP_EMBEDDING_NORM, l, a->dnormed);
	memset(a->dstream, 0, N * H * sizeof *a->dstream);
	rmsnorm_backward(a->dstream, g->embedding_norm, a->dnormed, x->embedding, p->embedding_norm, x->embedding_rstd, N,
			H, add, a->sum_scratch);
	embedding_layer_backward(m, depth, mtp_tokens(m, input, depth, T), T, step);
}

/* The gradients of MTP layers that are not trained are 0. */
static void clear_untrained_gradients(struct model *m)
{
	for (int i = 0; i < m->table.num_buckets; i++) {
		const struct bucket *b = &m->table.buckets[i];
		if (!b->trained)
			memset(m->grads.memory + b->offset, 0, b->size * sizeof *m->grads.memory);
	}
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
		begin(OP_REDUCTION, PASS_FORWARD, layer_of_block(&m->config, block), 0);
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

int64_t replica_batch(const struct trainer *t, int64_t batch)
{
	return batch / t->model.layout.replicas.size;
}

struct micro_batches own_micro_batches(const struct trainer *t, int64_t batch)
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

void trainer_draw(struct trainer *t, int64_t batch)
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
	trainer_draw(t, batch);
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
	const int depths = 1 + trained_mtp_layers(&t->config.model);
	double count[2 + MAX_MTP_LAYERS] = {0}; /* tokens, and targets of each depth */
	begin(OP_COUNT_TOKENS, PASS_FORWARD, -1, 0);
	for (int64_t i = 0; i < own->num; i++)
		for (int64_t b = 0; b < micro_batch_sequences(own, i); b++) {
			const int64_t place = i * own->size + b;
			count[0] += t->length[place];
			for (int depth = 0; depth < depths; depth++)
				for (int64_t j = place * L; j < (place + 1) * L; j++)
					count[1 + depth] += shifted(t->target, t->document, j, L, depth, -1) >= 0;
		}
	all_reduce_sum(&t->model.layout.data, TRAFFIC_STATISTICS, count, 1 + depths);
	if (!t->local.in_period)
		all_reduce_sum(&t->model.layout.replicas, TRAFFIC_STATISTICS, count, 1 + depths);
	step->num_tokens = (int64_t)count[0];
	for (int depth = 0; depth < depths; depth++)
		step->num_targets[depth] = (int64_t)count[1 + depth];
}

void report_save(struct trainer *t, int ended)
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
	const double head = (double)T * H * c->vocab_size;
	double work = head + trained_mtp_layers(c) * (head + (double)N * 2 * H * H);
	for (int l = 0; l < trained_layers(c); l++) {
		work += (double)T * ((qkv_width(c) + attention_width(c)) * H + attention_width(c) * (int64_t)m->seq_len);
		work += (double)N * 3 * H * shared_width(c, l);
		if (has_experts(c, l))
			work += (double)N * H * c->num_experts +
					(double)m->acts.layer[l].num_rows * 3 * H * c->moe_intermediate_size;
	}
	return work;
}

/* Forward, loss and backward pass of every micro-batch of this rank. Leaves in grads the gradient, summed over all
 * ranks that take the step, of
 *   cross-entropy + mtp_loss_scaling_factor sum over MTP layers (cross-entropy)
 *     + sum over layers (balance_loss_coef balance + z_loss_coef z),
 * and fills t->sums, t->first_loss, t->work and t->stop. Returns the counts of tokens and targets. */
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
		const double loss = model_loss(m, target, B, &step, NULL);
		t->first_loss = i == 0 ? loss : t->first_loss;
		t->work += forward_work(m, B * L);
		if (m->layout.tensor.rank == 0) { /* the ranks of a tensor group have the same tokens */
			t->sums.values[SUM_LOSS] += loss;
			for (int k = 0; k < trained_mtp_layers(&m->config); k++)
				mtp_losses(&t->sums, &m->config)[k] += m->acts.depth[1 + k].loss;
		}
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

/* Fills in *m from the step's sums: the mean loss of the MTP layers; balance loss and z-loss, as means over the layers
 * that have experts, and the expert load of each, and in some steps the tokens of each expert. counts: what
 * compute_gradients returned. */
static void report_sums(struct trainer *t, struct metrics *m, const struct step *counts)
{
	const struct model_config *c = &t->config.model;
	const double *mtp = mtp_losses(&t->sums, c);
	m->num_mtp_layers = trained_mtp_layers(c);
	for (int i = 0; i < m->num_mtp_layers; i++)
		m->mtp_loss += counts->num_targets[1 + i] ? mtp[i] / counts->num_targets[1 + i] / m->num_mtp_layers : 0;
	const int first = c->first_k_dense_replace, n = trained_layers(c) - first;
	for (int l = first; l < trained_layers(c); l++) {
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

/* Fills in the largest |bias| of the experts of each layer, as the step leaves them. */
static void report_expert_bias(struct trainer *t, struct metrics *m)
{
	const struct model_config *c = &t->config.model;
	if (!c->moe_router_enable_expert_bias)
		return;
	for (int i = 0; i < m->num_layers; i++) {
		const real *bias = t->model.params.layer[c->first_k_dense_replace + i].expert_bias;
		t->expert_bias[i] = 0;
		for (int e = 0; e < c->num_experts; e++)
			t->expert_bias[i] = fmax(t->expert_bias[i], fabs(bias[e]));
	}
	m->expert_bias = t->expert_bias;
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
	for (int l = t->config.model.first_k_dense_replace; l < trained_layers(&t->config.model); l++) {
		const struct layer_sums *sum = layer_sums(&t->sums, l);
		const double mean = sum->s / n, variance = fma(-mean, mean, sum->s_squared / n),
				std = sqrt(variance > 0 ? variance : 0);
		t->state.router_mean[l] = fma(momentum, t->state.router_mean[l], (1 - momentum) * mean);
		t->state.router_std[l] = fma(momentum, t->state.router_std[l], (1 - momentum) * std);
	}
}

/* The bias of each expert moves towards balance (Wang et al. 2024, arXiv:2408.15664, with the zero mean of Ling 2.0's
 * training): b_e += rate (d_e - mean of d), d_e = sign(mean load - load of e). Loads are the assignments of the global
 * batch, padding not counted: whole numbers, the same on all ranks. So is the bias, which no rank sends. */
static void update_expert_bias(struct trainer *t)
{
	const struct model_config *c = &t->config.model;
	const int E = c->num_experts;
	for (int l = c->first_k_dense_replace; l < trained_layers(c) && c->moe_router_enable_expert_bias; l++) {
		real *bias = t->model.params.layer[l].expert_bias;
		const double *count = layer_sums(&t->sums, l)->count;
		double total = 0, signs = 0;
		for (int e = 0; e < E; e++)
			total += count[e];
		for (int e = 0; e < E; e++)
			signs += (total > E * count[e]) - (total < E * count[e]);
		for (int e = 0; e < E; e++) {
			const double sign = (total > E * count[e]) - (total < E * count[e]);
			bias[e] = (real)fma(c->router.bias_update_rate, sign - signs / E, bias[e]);
		}
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

/* The next shard of a parameter that is trained. */
static bool next_trained_shard(const struct model *m, struct optimizer_shard_iterator *walk, struct optimizer_shard *p)
{
	return next_optimizer_shard(&m->table, walk, p) && is_trained(&m->config, p->parameter->block);
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
	for (bool more = next_trained_shard(m, &walk, &p); more;) {
		const bool decay = p.parameter->cols > 0;
		const int64_t first = p.parameter->offset + p.from, state = p.state;
		int64_t end = first;
		while (more && p.parameter->offset + p.from == end && (p.parameter->cols > 0) == decay) {
			end += p.end - p.from;
			more = next_trained_shard(m, &walk, &p);
		}
		struct adamw o = *optimizer;
		o.weight_decay = decay ? o.weight_decay : 0;
		square += t->reduction.changes ? round_update(t, &o, first, state, end - first)
				: adamw_update(m->params.memory + first, m->exp_avg + state, m->exp_avg_sq + state,
				m->grads.memory + first, end - first, &o);
	}
	begin(OP_WEIGHTS, PASS_FORWARD, -1, 0);
	for (int i = 0; i < m->table.num_buckets; i++)
		if (m->table.buckets[i].trained)
			gather_weights(t, &m->table.buckets[i]);
	model_update_head_scale(m);
	begin(OP_STATISTICS, PASS_FORWARD, -1, 0);
	all_reduce_sum(&m->layout.world, TRAFFIC_STATISTICS, &square, 1);
	return sqrt(square);
}

/* Weights, moments, expert bias, router statistics, counters, the window of the detector: all that an update changes.
 * num_tokens: those of the batch that are no padding. */
static void update(struct trainer *t, const struct decision *d, struct metrics *m, int64_t num_tokens)
{
	const struct config *c = &t->config;
	m->update_norm = update_weights(t, &(struct adamw){.lr = m->lr, .beta1 = c->optimizer.beta1,
			.beta2 = c->optimizer.beta2, .eps = c->optimizer.eps, .weight_decay = c->optimizer.weight_decay,
			.grad_scale = d->grad_scale, .step = m->step});
	update_expert_bias(t);
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
	const double loss = model_loss(m, t->target, B, NULL, NULL);
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
		.loss = counts->num_targets[0] ? t->sums.values[SUM_LOSS] / counts->num_targets[0] : 0,
		.grad_norm = sqrt(gradient_square(&t->model)),
		.lr = learning_rate(&t->config, t->state.step + 1, t->steps, (double)t->state.tokens / t->tokens),
	};
	report_sums(t, &m, counts);
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
	dump_write(t->dump, &t->model, &(struct dump_result){.loss = m->loss, .mtp_loss = m->mtp_loss,
			.balance_loss = m->balance_loss, .z_loss = m->z_loss, .grad_norm = m->grad_norm,
			.taken = result == STEP_TAKEN, .skipped = result == STEP_SKIPPED || result == STEP_SKIPPED_TOO_MANY,
			.batch = t->state.batches});
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
	report_expert_bias(t, m);
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
