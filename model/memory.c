/*
 * model/memory.c - what a model holds in memory: counted first, then allocated at once, then divided.
 */
#define _GNU_SOURCE
#include "model/memory.h"

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "files/rope.h"
#include "files/tensors.h"
#include "model/parameters.h"
#include "model/weight_files.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct arena {
	uint8_t *memory;             /* NULL: only count */
	size_t used;                 /* bytes */
};

/* The next `count` elements of `size` bytes, at the beginning of a cache line. NULL while counting. */
static void *arena_alloc(struct arena *a, int64_t count, size_t size)
{
	void *p = a->memory ? a->memory + a->used : NULL;
	a->used += ((size_t)count * size + 63) / 64 * 64;
	return p;
}

static real *arena_alloc_real(struct arena *a, int64_t count)
{
	return arena_alloc(a, count, sizeof(real));
}

int64_t head_chunk(int64_t V, int tensor)
{
	/* 16 MB of logits, to stay near the cores, but enough tokens for each pass over the head's weights and their
	 * gradient to pay. Alike on all ranks of a tensor group, whose parts of the vocabulary may differ by an entry. */
	int64_t tokens = (4 << 20) / ((V + tensor - 1) / tensor);
	return tokens < 256 ? 256 : tokens > 2048 ? 2048 : tokens;
}

/* The widest dense SwiGLU of all layers. */
static int64_t widest_shared(const struct model_config *c)
{
	int64_t first = shared_width(c, 0), last = shared_width(c, trained_layers(c) - 1);
	return first > last ? first : last;
}

/* What attention leaves for its backward pass, for T tokens. */
static void alloc_attention(struct arena *a, struct layer_activations *x, const struct model_config *c, int64_t T,
		bool training)
{
	const int64_t heads = c->num_attention_heads + c->num_key_value_heads;
	x->qkv = arena_alloc_real(a, T * qkv_width(c));
	if (c->use_qk_norm && training) {
		x->qk = arena_alloc_real(a, T * heads * c->head_dim);
		x->qk_rstd = arena_alloc_real(a, T * heads);
	}
	x->attention = arena_alloc_real(a, T * attention_width(c));
	x->lse = arena_alloc_real(a, T * c->num_attention_heads);
}

/* The two arenas of activations: one for what is needed for certain; and one for expert rows that may arrive, of which
 * the system gives pages only as they are written. Without expert parallel both are the same. */
struct activation_memory {
	struct arena *certain, *arrivals;
	const struct layout *layout;
	bool balanced;               /* only count: expert rows as they are when the experts are balanced */
};

double dispatch_share(const struct model_config *c, int ranks)
{
	const int E = c->num_experts, others = E - E / ranks;
	double none = 1;
	for (int j = 0; j < c->num_experts_per_tok; j++)
		none *= others > j ? (double)(others - j) / (E - j) : 0;
	return 1 - none;
}

/* The numbers of expert rows that there must be room for, for N tokens: A computed, S sent, P arrived; see struct
 * layer_activations. Alone nothing is sent. */
struct expert_row_numbers { int64_t A, S, P; };
static struct expert_row_numbers expert_row_numbers(const struct activation_memory *mem, const struct model_config *c,
		int64_t N)
{
	const int64_t ranks = mem->layout->expert.size, k = c->num_experts_per_tok, R = N * k;
	if (ranks == 1)
		return (struct expert_row_numbers){.A = R};
	const int64_t balanced = (int64_t)ceil(ranks * N * dispatch_share(c, (int)ranks));
	return (struct expert_row_numbers){.A = mem->balanced ? R : ranks * R, .S = N * (k < ranks ? k : ranks),
			.P = mem->balanced ? balanced : ranks * N};
}

/* Most tokens of T that a rank of a tensor group has. */
static int64_t most_tokens(int64_t T, const struct layout *l)
{
	return (T + l->tensor.size - 1) / l->tensor.size;
}

/* What the rest of a layer leaves, for N tokens: with routed experts or without, and a dense SwiGLU of the given
 * width. */
static void alloc_layer(const struct activation_memory *mem, struct layer_activations *x, const struct model_config *c,
		int64_t N, bool experts, int64_t width, bool noise)
{
	struct arena *a = mem->certain;
	const int ranks = mem->layout->expert.size;
	const int64_t E = c->num_experts, R = N * c->num_experts_per_tok;
	const struct expert_row_numbers n = expert_row_numbers(mem, c, N);
	x->attention_rstd = arena_alloc_real(a, N);
	x->residual = arena_alloc_real(a, N * c->hidden_size);
	x->ffn_rstd = arena_alloc_real(a, N);
	x->shared_gate_up = arena_alloc_real(a, N * 2 * width);
	if (!experts)
		return;
	if (c->score_function == SCORE_SIGMOID) /* its backward pass needs them */
		x->logits = arena_alloc_real(a, N * E);
	x->p = arena_alloc_real(a, N * E);
	x->p_hat = noise ? arena_alloc_real(a, N * E) : x->p;
	x->router_lse = arena_alloc_real(a, N);
	x->index = arena_alloc(a, R, sizeof(int32_t));
	x->weight = arena_alloc_real(a, R);
	x->position = arena_alloc(a, R, sizeof(int32_t));
	x->gate_up = arena_alloc_real(mem->arrivals, n.A * 2 * c->moe_intermediate_size);
	x->expert_offset = arena_alloc(a, E / ranks + 1, sizeof(int64_t));
	x->row = arena_alloc(mem->arrivals, n.A, sizeof(int32_t));
	x->expert_weight = arena_alloc_real(mem->arrivals, n.A);
	x->sent_row = x->position;
	if (ranks > 1) {
		x->sent_row = arena_alloc(a, R, sizeof(int32_t));
		x->sent_token = arena_alloc(a, n.S, sizeof(int32_t));
		int64_t **numbers[] = {&x->sent_rows, &x->received_rows, &x->sent_assignments, &x->received_assignments};
		for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
			*numbers[i] = arena_alloc(a, ranks, sizeof(int64_t));
		x->place = arena_alloc(mem->arrivals, n.A, sizeof(int32_t));
		x->begin = arena_alloc(mem->arrivals, n.P + 1, sizeof(int32_t));
		x->arrivals = arena_alloc_real(mem->arrivals, n.P * c->hidden_size);
	}
}

/* What the MTP layers leave beside what all layers do, for T tokens of which the rank has N. */
static void alloc_mtp(struct arena *a, struct activations *acts, const struct model_config *c, int64_t T, int64_t N)
{
	const int64_t H = c->hidden_size;
	acts->shifted = arena_alloc(a, T, sizeof *acts->shifted);
	acts->mtp_input = arena_alloc_real(a, N * 2 * H);
	for (int i = 0; i <= trained_mtp_layers(c); i++) {
		struct depth_activations *x = &acts->depth[i];
		x->normed = arena_alloc_real(a, N * H);
		x->dnormed = arena_alloc_real(a, N * H);
		if (i == 0)
			continue;
		x->output = arena_alloc_real(a, N * H);
		x->rstd = arena_alloc_real(a, N);
		x->embedding = arena_alloc_real(a, N * H);
		x->embedding_rstd = arena_alloc_real(a, N);
		x->hidden_rstd = arena_alloc_real(a, N);
	}
}

/* The activations of a rank for B windows of L tokens. acts->layer must have room for all layers. */
static void alloc_activations(const struct activation_memory *mem, struct activations *acts,
		const struct model_config *global, int64_t B, int64_t L, enum model_mode mode)
{
	const struct model_config local = local_config(global, mem->layout), *c = &local;
	struct arena *a = mem->certain;
	const struct group *tensor = &mem->layout->tensor;
	const int64_t T = B * L, N = most_tokens(T, mem->layout), H = c->hidden_size, E = c->num_experts,
			I = c->moe_intermediate_size;
	const int64_t R = N * c->num_experts_per_tok, W = widest_shared(c);
	const struct expert_row_numbers n = expert_row_numbers(mem, c, N);
	const int64_t C = head_chunk(global->vocab_size, tensor->size);
	const bool training = mode != EVALUATE, own_layer = mode == TRAIN_KEEP_ALL || mode == TRAIN_RECOMPUTE_ATTENTION;
	const bool noise = training && c->router.warmup_steps > 0;
	const int mtp = training ? trained_mtp_layers(c) : 0, layers = c->num_hidden_layers + mtp;
	/* what all layers use in turn, since they keep nothing there: room for any of them */
	struct layer_activations shared = {0};
	if (c->score_function == SCORE_SOFTMAX)
		shared.logits = arena_alloc_real(a, N * E);
	if (mode != TRAIN_KEEP_ALL)
		alloc_attention(a, &shared, c, T, training);
	if (!own_layer)
		alloc_layer(mem, &shared, c, N, has_experts(c, layers - 1), W, noise);
	if (!training)
		shared.input = arena_alloc_real(a, N * H);
	for (int l = 0; l < layers; l++) {
		struct layer_activations *x = &acts->layer[l];
		*x = shared;
		if (!training)
			continue;
		x->input = arena_alloc_real(a, N * H);
		if (has_experts(c, l))
			x->balance_factor = arena_alloc_real(a, B * E);
		if (mode == TRAIN_KEEP_ALL)
			alloc_attention(a, x, c, T, true);
		if (own_layer)
			alloc_layer(mem, x, c, N, has_experts(c, l), shared_width(c, l), noise);
	}
	acts->depth[0].output = training ? arena_alloc_real(a, N * H) : acts->layer[0].input;
	acts->depth[0].rstd = arena_alloc_real(a, N);
	acts->depth[0].normed = acts->normed = arena_alloc_real(a, N * H);
	if (tensor->size > 1) {
		acts->gathered = arena_alloc_real(a, T * H);
		acts->partial = arena_alloc_real(a, T * H);
		acts->reduce_scatter_scratch = arena_alloc_real(a, reduce_scatter_scratch(tensor, T, H));
	}
	acts->expert_rows = acts->rows = arena_alloc_real(mem->arrivals, n.A * H);
	if (mem->layout->expert.size > 1) {
		acts->rows = arena_alloc_real(a, n.S * H);
		acts->returns = arena_alloc_real(mem->arrivals, n.P * H);
		acts->sent_assignments = arena_alloc_real(a, 2 * R);
		acts->arrived_assignments = arena_alloc_real(mem->arrivals, 2 * n.A);
		acts->rank_counts = arena_alloc(a, 4 * mem->layout->expert.size, sizeof(int64_t));
	}
	acts->act = arena_alloc_real(mem->arrivals, n.A * I);
	acts->shared_act = arena_alloc_real(a, N * W);
	acts->attention_scratch = arena_alloc_real(a, attention_scratch(c->head_dim));
	acts->sequence_count = arena_alloc(a, B * E, sizeof(double));
	acts->sequence_q = arena_alloc(a, B * E, sizeof(double));
	acts->router_sums = arena_alloc(a, B, sizeof(struct router_sums));
	acts->head_logits = arena_alloc_real(a, C * c->vocab_size);
	acts->head_input = arena_alloc_real(a, C * H);
	acts->head_max = arena_alloc_real(a, C);
	acts->head_loss = arena_alloc(a, 2 * C, sizeof(double));
	acts->head_norm = arena_alloc(a, H, sizeof(double));
	if (!training)
		return;
	int64_t widest = H > qkv_width(c) ? H : qkv_width(c); /* two heads of QK-norm are no wider than qkv */
	acts->sum_scratch = arena_alloc_real(a, row_sum_scratch(widest));
	acts->dstream = arena_alloc_real(a, N * H);
	acts->depth[0].dnormed = acts->dnormed = arena_alloc_real(a, N * H);
	if (mtp)
		alloc_mtp(a, acts, c, T, N);
	acts->dqkv = arena_alloc_real(a, T * qkv_width(c));
	acts->dattention = arena_alloc_real(a, T * attention_width(c));
	acts->dlogits = arena_alloc_real(a, N * E);
	acts->dgate_up = arena_alloc_real(mem->arrivals, n.A * 2 * I);
	acts->dexpert_weight = arena_alloc_real(mem->arrivals, n.A);
	acts->dweight = arena_alloc_real(a, R);
	acts->dshared_gate_up = arena_alloc_real(a, N * 2 * W);
	const bool head = C * c->vocab_size >= R * 2 * I; /* its array is the larger one */
	acts->attention_shared = head ? acts->head_logits : acts->dgate_up;
	acts->attention_shared_size = head ? C * c->vocab_size : R * 2 * I;
}

/* Elements of scratch that the reduction of one bucket needs. */
static int64_t bucket_scratch(const struct layout *layout, int64_t num_elements)
{
	return reduce_scatter_scratch(&layout->world, num_elements < BUCKET_SIZE ? num_elements : BUCKET_SIZE, 1);
}

/* Bytes of the changes of a rank's num_state weights in bfloat16. One process sends none. */
static size_t changes_bytes(const struct layout *layout, int64_t num_state)
{
	return layout->world.size > 1 ? (num_state + 1) * sizeof(uint16_t) : 0;
}

int64_t outer_scratch(const struct parameter_table *table)
{
	int64_t largest = 0, sum = 0, size;
	for (int i = 0; i < table->num_buckets; i++) {
		own_shard(&table->layout, &table->buckets[i], &size);
		sum = i && table->buckets[i].block != table->buckets[i - 1].block ? 0 : sum;
		sum += reduce_scatter_scratch(&table->layout.replicas, size, 1);
		largest = sum > largest ? sum : largest;
	}
	return largest;
}

int plan_memory(struct memory_plan *plan, const struct model_config *c, const struct layout *layout, int64_t B,
		int64_t L, enum model_mode mode)
{
	const bool training = mode != EVALUATE, split = layout->expert.size > 1;
	if ((double)B * L * (c->num_experts_per_tok + 1) * layout->expert.size > INT32_MAX)
		return fail("%lld x %lld tokens with %d experts each, from %d ranks: more than %d rows at a time; make "
				"micro_batch or seq_len smaller", (long long)B, (long long)L, c->num_experts_per_tok,
				layout->expert.size, INT32_MAX);
	struct activations acts = {.layer = calloc(num_layers(c), sizeof *acts.layer)};
	struct parameter_table table;
	struct arena certain = {0}, arrivals = {0}, balanced = {0}, counted = {0};
	if (!acts.layer || parameter_table_init(&table, c, layout) < 0) {
		free(acts.layer);
		return fail("out of memory for %d layers", num_layers(c));
	}
	alloc_activations(&(struct activation_memory){&certain, split ? &arrivals : &certain, layout, false}, &acts, c, B,
			L, mode);
	if (split)
		alloc_activations(&(struct activation_memory){&counted, &balanced, layout, true}, &acts, c, B, L, mode);
	*plan = (struct memory_plan){.num_elements = table.num_elements, .num_state = table.num_state,
			.activations = certain.used, .arrivals = arrivals.used, .balanced_arrivals = balanced.used};
	for (int i = 0; i < table.num_buckets; i++) {
		int64_t own;
		own_shard(layout, &table.buckets[i], &own);
		plan->num_foreign += table.buckets[i].trained ? table.buckets[i].size - own : 0;
	}
	if (training && plan_saving(&plan->saving, &plan->copy, c, layout) < 0) {
		parameter_table_free(&table);
		free(acts.layer);
		return -1;
	}
	plan->weights = plan->num_elements * sizeof(real);
	plan->gradients = training ? plan->weights : 0;
	plan->optimizer = training ? 2 * plan->num_state * sizeof(real) : 0;
	plan->reduction = training ? MAX_REDUCTIONS * bucket_scratch(layout, plan->num_elements) * sizeof(real) : 0;
	plan->changes = training ? changes_bytes(layout, plan->num_state) : 0;
	if (training && layout->replicas.size > 1)
		plan->outer = (2 * plan->num_state + outer_scratch(&table)) * sizeof(real);
	parameter_table_free(&table);
	free(acts.layer);
	return 0;
}

double planned_bytes(const struct memory_plan *p)
{
	return (double)p->weights + p->gradients + p->optimizer + p->activations + p->reduction + p->outer +
			p->saving;
}

/* Address space whose pages come when they are written, or NULL: for expert rows, which take what arrives, up to all
 * rows of the group; and for the weights of a model that is only evaluated, which take what cannot be mapped. */
static void *reserve_memory(size_t bytes)
{
	void *p = bytes ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
			: NULL;
	return p == MAP_FAILED ? NULL : p;
}

int gradient_reduction_init(struct gradient_reduction *r, const struct parameter_table *table, bool bf16)
{
	*r = (struct gradient_reduction){.scratch_size = bucket_scratch(&table->layout, table->num_elements)};
	const size_t scratch = MAX_REDUCTIONS * r->scratch_size * sizeof *r->scratch,
			changes = bf16 ? changes_bytes(&table->layout, table->num_state) : 0;
	r->scratch = scratch ? allocate_large(scratch) : NULL;
	r->changes = changes ? allocate_large(changes) : NULL;
	return (r->scratch || !scratch) && (r->changes || !changes) ? 0
			: fail("out of memory for the reduction of gradients: %.1f GB", (scratch + changes) / 1e9);
}

void gradient_reduction_free(struct gradient_reduction *r)
{
	free(r->scratch);
	free(r->changes);
	*r = (struct gradient_reduction){0};
}

static void fill_rope(struct model *m)
{
	const int rot = rotary_dim(&m->config);
	double frequency[rot / 2];
	rope_frequencies(frequency, &m->config, m->rope_length);
	rope_table(m->rope, m->num_positions, rot, frequency, rope_attention_factor(&m->config));
}

void set_rope_length(struct model *m, int64_t length)
{
	m->rope_length = length;
	fill_rope(m);
}

int extend_rope(struct model *m, int64_t n)
{
	if (n <= m->num_positions)
		return 0;
	real *rope = realloc(m->rope, (size_t)n * rotary_dim(&m->config) * sizeof *rope);
	if (!rope)
		return -1;
	m->rope = rope;
	m->num_positions = n;
	fill_rope(m);
	return 0;
}

/* The weight whose place in params.memory is `at` (NULL: none): there, or in its mapped file. pair: together with the
 * next one, gate and up. */
static struct weight weight_at(const struct model *m, const real *at, bool pair)
{
	struct weight w = {.data = at};
	int low = 0, high = m->table.num_parameters - 1;
	while (at && low < high) {
		const int mid = (low + high + 1) / 2;
		if (m->table.parameters[mid].offset <= at - m->params.memory)
			low = mid;
		else
			high = mid - 1;
	}
	const struct parameter *t = &m->table.parameters[low];
	if (at && t->mapped)
		w = (struct weight){.data = t->mapped, .second = pair ? t[1].mapped : NULL, .bf16 = t->bf16};
	return w;
}

void place_weights(struct model *m)
{
	const int64_t H = m->config.hidden_size, I = m->config.moe_intermediate_size;
	m->embedding = weight_at(m, m->params.embedding, false);
	m->lm_head = weight_at(m, m->params.lm_head, false);
	for (int l = 0; l < num_layers(&m->config); l++) {
		const struct layer_params *p = &m->params.layer[l];
		struct layer_weights *w = &m->weights[l];
		*w = (struct layer_weights){.qkv = weight_at(m, p->qkv, false), .dense = weight_at(m, p->dense, false),
				.router = weight_at(m, p->router, false), .shared_gate_up = weight_at(m, p->shared_gate_up, true),
				.shared_down = weight_at(m, p->shared_down, false)};
		w->gate_up = m->expert_weights + 2 * l * m->num_experts;
		w->down = w->gate_up + m->num_experts;
		for (int e = 0; p->gate_up && e < m->num_experts; e++) {
			w->gate_up[e] = weight_at(m, p->gate_up + e * 2 * I * H, true);
			w->down[e] = weight_at(m, p->down + e * H * I, false);
		}
	}
}

int model_init(struct model *m, const struct model_config *c, const struct layout *layout, int max_sequences,
		int seq_len, enum model_mode mode)
{
	const bool training = mode != EVALUATE;
	*m = (struct model){.global = *c, .config = local_config(c, layout), .max_sequences = max_sequences,
			.seq_len = seq_len, .rope_length = seq_len, .mode = mode, .layout = *layout,
			.num_experts = c->num_experts / layout->expert.size,
			.first_vocab = shard_begin(c->vocab_size, layout->tensor.rank, layout->tensor.size)};
	struct memory_plan plan = {0};
	if (plan_memory(&plan, c, layout, max_sequences, seq_len, mode) < 0)
		return -1;
	const int layers = num_layers(c);
	const size_t weights = training ? plan.weights : 0; /* else model_load knows */
	const double total = planned_bytes(&plan) - plan.weights + weights;
	const double machine = fmin(usable_memory("") / parallel_local_ranks(), process_memory());
	bool fits = total <= machine;
	if (fits) {
		m->params.layer = calloc(layers, sizeof *m->params.layer);
		m->grads.layer = calloc(layers, sizeof *m->grads.layer);
		m->acts.layer = calloc(layers, sizeof *m->acts.layer);
		m->weights = calloc(layers, sizeof *m->weights);
		m->expert_weights = calloc((size_t)layers * 2 * m->num_experts + 1, sizeof *m->expert_weights);
		m->params.memory = training ? allocate_large(plan.weights) : reserve_memory(m->reserved_bytes = plan.weights);
		m->head_scale = c->norm_head ? calloc(c->hidden_size, sizeof(real)) : NULL;
		m->acts_memory = allocate_large(m->acts_bytes = plan.activations);
		m->arrivals_memory = reserve_memory(m->arrivals_bytes = plan.arrivals);
		fits = parameter_table_init(&m->table, c, layout) == 0 && m->params.layer && m->grads.layer && m->acts.layer &&
				m->weights && m->expert_weights && m->params.memory && extend_rope(m, seq_len) == 0 &&
				(m->head_scale || !c->norm_head) && m->acts_memory && (m->arrivals_memory || !plan.arrivals);
		if (training) {
			m->grads.memory = allocate_large(plan.gradients);
			m->exp_avg = allocate_large(plan.optimizer / 2);
			m->exp_avg_sq = allocate_large(plan.optimizer / 2);
			fits = fits && m->grads.memory && m->exp_avg && m->exp_avg_sq;
		}
	}
	if (!fits) {
		model_free(m);
		return fail("%lld parameters and %d x %d tokens at a time need %.3f GB (weights %.1f, gradients %.1f, "
				"optimizer %.1f, activations %.1f); %.3f GB may be used here: make the model, micro_batch (ling eval: "
				"--batch) or seq_len smaller", (long long)plan.num_elements, max_sequences, seq_len, total / 1e9,
				weights / 1e9, plan.gradients / 1e9, plan.optimizer / 1e9, plan.activations / 1e9, machine / 1e9);
	}
	place_params(&m->params, m->params.memory, c, layout);
	if (training)
		place_params(&m->grads, m->grads.memory, c, layout);
	place_weights(m);
	struct arena certain = {.memory = m->acts_memory}, arrivals = {.memory = m->arrivals_memory};
	alloc_activations(&(struct activation_memory){&certain, plan.arrivals ? &arrivals : &certain, layout, false},
			&m->acts, c, max_sequences, seq_len, mode);
	return 0;
}

void model_free(struct model *m)
{
	parameter_table_free(&m->table);
	free(m->params.layer);
	free(m->weights);
	free(m->expert_weights);
	if (m->mode != EVALUATE)
		free(m->params.memory);
	else if (m->params.memory)
		munmap(m->params.memory, m->reserved_bytes);
	tensors_close(m->files);
	free(m->grads.layer);
	free(m->grads.memory);
	free(m->exp_avg);
	free(m->exp_avg_sq);
	free(m->acts.layer);
	free(m->acts_memory);
	if (m->arrivals_memory)
		munmap(m->arrivals_memory, m->arrivals_bytes);
	free(m->rope);
	free(m->head_scale);
	*m = (struct model){0};
}
