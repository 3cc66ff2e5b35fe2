/*
 * ling.c - the model and one training run.
 */
#define _GNU_SOURCE
#include "ling.h"

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "files/tensors.h"
#include "files/safetensors.h"
#include "files/tokenizer.h"
#include "files/checkpoint.h"
#include "data.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ============================================================================================================
 * Parameters
 * ========================================================================================================== */

bool has_experts(const struct model_config *c, int layer)
{
	return layer >= c->first_k_dense_replace;
}

int shared_width(const struct model_config *c, int layer)
{
	return has_experts(c, layer) ? c->num_shared_experts * c->moe_intermediate_size : c->intermediate_size;
}

static int qkv_width(const struct model_config *c)
{
	return (c->num_attention_heads + 2 * c->num_key_value_heads) * c->head_dim;
}

static int attention_width(const struct model_config *c)
{
	return c->num_attention_heads * c->head_dim;
}

/* A walk over the parameters that a rank holds, in the order of memory. It counts them, and fills the table and the pointers if they are
 * there. */
struct parameter_walk {
	const struct layout *layout;
	struct parameter *parameters;      /* NULL while counting */
	real *memory;                /* NULL while counting */
	int num_parameters, block, expert;
	int64_t num_elements;
};

/* Elements of the part of a tensor that a rank holds. */
static int64_t parameter_size(const struct parameter *t)
{
	return (t->shard.num_rows[0] + t->shard.num_rows[1] + t->shard.num_rows[2]) * t->shard.num_cols;
}

/* Adds the given part of a parameter to the walk; its name is "prefix" + "name". Returns where it lies. */
static real *add_part(struct parameter_walk *w, const char *prefix, const char *name, int64_t rows, int64_t cols, enum init init,
		enum sharing sharing, struct shard shard)
{
	struct parameter t = {.rows = rows, .cols = cols, .shard = shard, .offset = w->num_elements, .block = w->block, .expert = w->expert,
			.init = init, .sharing = sharing};
	if (w->parameters) {
		snprintf(t.name, sizeof t.name, "%s%s", prefix, name);
		w->parameters[w->num_parameters] = t;
	}
	w->num_parameters++;
	w->num_elements += parameter_size(&t);
	return w->memory ? w->memory + t.offset : NULL;
}

/* Adds a parameter that this rank holds all of. */
static real *add_parameter(struct parameter_walk *w, const char *prefix, const char *name, int64_t rows, int64_t cols, enum init init,
		enum sharing sharing)
{
	return add_part(w, prefix, name, rows, cols, init, sharing, (struct shard){.num_rows = {rows}, .num_cols = cols ? cols : 1});
}

/* Adds this rank's rows of a parameter that the tensor group splits by vocabulary. */
static real *add_vocabulary(struct parameter_walk *w, const char *name, int64_t V, int64_t H)
{
	const struct group *g = &w->layout->tensor;
	const int64_t first = shard_begin(V, g->rank, g->size), end = shard_begin(V, g->rank + 1, g->size);
	return add_part(w, "", name, V, H, INIT_NORMAL, SHARED_BY_DATA, (struct shard){.row = {first}, .num_rows = {end - first}, .num_cols = H});
}

/* Adds one SwiGLU: gate, up and down of the given width. Gate and up lie one behind the other, as one product wants them. */
static void add_swiglu(struct parameter_walk *w, const char *prefix, int64_t H, int64_t width, real **gate_up, real **down,
		enum sharing sharing)
{
	*gate_up = add_parameter(w, prefix, "gate_proj.weight", width, H, INIT_NORMAL, sharing);
	add_parameter(w, prefix, "up_proj.weight", width, H, INIT_NORMAL, sharing);
	if (down)
		*down = add_parameter(w, prefix, "down_proj.weight", H, width, INIT_NORMAL, sharing);
}

/* Adds layer l of the whole model's config, less what other ranks hold of it: what all ranks share first, then heads, then experts. */
static void add_layer(struct parameter_walk *w, const struct model_config *c, int l, struct layer_params *p)
{
	const int64_t H = c->hidden_size, I = c->moe_intermediate_size, d = c->head_dim;
	char layer[48], prefix[96]; /* well within MAX_NAME with what follows */
	snprintf(layer, sizeof layer, "model.layers.%d.", l);
	*p = (struct layer_params){0};
	p->attention_norm = add_parameter(w, layer, "input_layernorm.weight", H, 0, INIT_ONES, SHARED_BY_WORLD);
	p->ffn_norm = add_parameter(w, layer, "post_attention_layernorm.weight", H, 0, INIT_ONES, SHARED_BY_WORLD);
	if (c->use_bias)
		p->dense_bias = add_parameter(w, layer, "attention.dense.bias", H, 0, INIT_ZEROS, SHARED_BY_WORLD);
	if (has_experts(c, l))
		p->router = add_parameter(w, layer, "mlp.gate.weight", c->num_experts, H, INIT_ROUTER, SHARED_BY_WORLD);
	if (shared_width(c, l)) {
		snprintf(prefix, sizeof prefix, "%smlp.%s", layer, has_experts(c, l) ? "shared_experts." : "");
		add_swiglu(w, prefix, H, shared_width(c, l), &p->shared_gate_up, &p->shared_down, SHARED_BY_WORLD);
	}

	/* All query heads stand before all key heads before all value heads: a rank's rows are a range of each. */
	const int64_t rank = w->layout->tensor.rank, heads = c->num_attention_heads, kv = c->num_key_value_heads;
	const int64_t q_rows = heads / w->layout->tensor.size * d, kv_rows = kv / w->layout->tensor.size * d;
	struct shard qkv = {.row = {rank * q_rows, heads * d + rank * kv_rows, (heads + kv) * d + rank * kv_rows},
			.num_rows = {q_rows, kv_rows, kv_rows}, .num_cols = 1};
	if (c->use_qkv_bias)
		p->qkv_bias = add_part(w, layer, "attention.query_key_value.bias", qkv_width(c), 0, INIT_ZEROS, SHARED_BY_DATA, qkv);
	qkv.num_cols = H;
	p->qkv = add_part(w, layer, "attention.query_key_value.weight", qkv_width(c), H, INIT_NORMAL, SHARED_BY_DATA, qkv);
	p->dense = add_part(w, layer, "attention.dense.weight", H, attention_width(c), INIT_NORMAL, SHARED_BY_DATA,
			(struct shard){.num_rows = {H}, .col = rank * q_rows, .num_cols = q_rows});

	/* [experts, 2I, H] and [experts, H, I]: all the gates and ups first, then all the downs, for the grouped products. */
	const int experts = c->num_experts / w->layout->expert.size, first = w->layout->expert.rank * experts;
	for (int e = first; has_experts(c, l) && e < first + experts; e++) {
		real *gate_up;
		snprintf(prefix, sizeof prefix, "%smlp.experts.%d.", layer, w->expert = e);
		add_swiglu(w, prefix, H, I, &gate_up, NULL, SHARED_BY_EXPERT_DATA);
		if (e == first)
			p->gate_up = gate_up;
	}
	for (int e = first; has_experts(c, l) && e < first + experts; e++) {
		snprintf(prefix, sizeof prefix, "%smlp.experts.%d.", layer, w->expert = e);
		real *down = add_parameter(w, prefix, "down_proj.weight", H, I, INIT_NORMAL, SHARED_BY_EXPERT_DATA);
		if (e == first)
			p->down = down;
	}
}

/* Walks over the model that the whole config describes. layer[] of p must have room for all layers. */
static void add_model(struct parameter_walk *w, const struct model_config *c, struct params *p)
{
	p->memory = w->memory;
	p->embedding = add_vocabulary(w, "model.word_embeddings.weight", c->vocab_size, c->hidden_size);
	for (int l = 0; l < c->num_hidden_layers; l++) {
		w->block++;
		add_layer(w, c, l, &p->layer[l]);
	}
	w->block++;
	p->norm = add_parameter(w, "", "model.norm.weight", c->hidden_size, 0, INIT_ONES, SHARED_BY_WORLD);
	p->lm_head = c->tie_word_embeddings ? p->embedding : add_vocabulary(w, "lm_head.weight", c->vocab_size, c->hidden_size);
}

/* The tensors that a rank of a layout holds, in the order of memory, which is the same for all ranks. To be freed; NULL when memory is short. */
static struct parameter *list_parameters(const struct model_config *c, const struct layout *layout, int *n)
{
	struct params params = {.layer = calloc(c->num_hidden_layers, sizeof *params.layer)};
	struct parameter_walk count = {.layout = layout}, fill = count;
	if (params.layer)
		add_model(&count, c, &params);
	fill.parameters = params.layer ? calloc(count.num_parameters, sizeof *fill.parameters) : NULL;
	if (fill.parameters)
		add_model(&fill, c, &params);
	else
		fail("out of memory for the names of the model's tensors");
	free(params.layer);
	*n = count.num_parameters;
	return fill.parameters;
}

struct parameter *global_parameters(const struct model_config *c, int *n)
{
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	return list_parameters(c, &alone, n);
}

/* The model as one rank of a layout computes it: its heads and its part of the vocabulary. */
static struct model_config local_config(const struct model_config *c, const struct layout *l)
{
	struct model_config local = *c;
	local.num_attention_heads /= l->tensor.size;
	local.num_key_value_heads /= l->tensor.size;
	local.vocab_size = (int)(shard_begin(c->vocab_size, l->tensor.rank + 1, l->tensor.size) -
			shard_begin(c->vocab_size, l->tensor.rank, l->tensor.size));
	return local;
}

static const struct group *sharing_group(const struct layout *l, enum sharing sharing)
{
	return sharing == SHARED_BY_WORLD ? &l->world : sharing == SHARED_BY_DATA ? &l->data : &l->expert_data;
}

/* The slice of a chunk that this rank keeps the moments of: returns its first element, from the chunk's own first. */
static int64_t own_shard(const struct layout *l, const struct bucket *c, int64_t *size)
{
	const struct group *g = sharing_group(l, c->sharing);
	const int64_t begin = shard_begin(c->size, g->rank, g->size);
	*size = shard_begin(c->size, g->rank + 1, g->size) - begin;
	return begin;
}

/* Cuts the parameters of a table into chunks; returns their number, and fills them in if there is room for them. */
static int make_buckets(struct bucket *buckets, int64_t *num_state, const struct parameter *parameters, int num_parameters, const struct layout *l)
{
	int n = 0;
	*num_state = 0;
	for (int i = 0; i < num_parameters;) {
		const struct parameter *first = &parameters[i];
		int64_t size = 0;
		for (; i < num_parameters && parameters[i].block == first->block && parameters[i].sharing == first->sharing; i++)
			size += parameter_size(&parameters[i]);
		for (int64_t done = 0; done < size; done += BUCKET_SIZE) {
			struct bucket c = {.offset = first->offset + done, .size = size - done < BUCKET_SIZE ? size - done : BUCKET_SIZE, .state = *num_state,
					.block = first->block, .sharing = first->sharing};
			int64_t own;
			own_shard(l, &c, &own);
			*num_state += own;
			if (buckets)
				buckets[n] = c;
			n++;
		}
	}
	return n;
}

/* ============================================================================================================
 * Memory: counted first, then taken in one piece, then cut
 * ========================================================================================================== */

struct arena {
	uint8_t *memory;             /* NULL while counting */
	size_t used;
};

/* The next `count` elements of `size` bytes, on a cache line; NULL while counting. */
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
	/* 16 MB of logits, to stay near the cores, but enough tokens for each pass over the head's weights and their gradient to pay. Alike on
	 * all ranks of a tensor group, whose parts of the vocabulary may differ by an entry. */
	int64_t tokens = (4 << 20) / ((V + tensor - 1) / tensor);
	return tokens < 256 ? 256 : tokens > 2048 ? 2048 : tokens;
}

/* The widest dense SwiGLU of all layers. */
static int64_t widest_shared(const struct model_config *c)
{
	int64_t first = shared_width(c, 0), last = shared_width(c, c->num_hidden_layers - 1);
	return first > last ? first : last;
}

/* What attention leaves for its backward pass, for T tokens. */
static void alloc_attention(struct arena *a, struct layer_activations *x, const struct model_config *c, int64_t T)
{
	x->qkv = arena_alloc_real(a, T * qkv_width(c));
	x->attention = arena_alloc_real(a, T * attention_width(c));
	x->lse = arena_alloc_real(a, T * c->num_attention_heads);
}

/* The two kinds of memory for activations: what is needed for certain, and room for expert rows that may arrive, of which
 * the system gives pages only as they are written. Without expert parallel both are one. */
struct activation_memory { struct arena *certain, *arrivals; const struct layout *layout; };

/* Most tokens of T that a rank of a tensor group holds. */
static int64_t most_tokens(int64_t T, const struct layout *l)
{
	return (T + l->tensor.size - 1) / l->tensor.size;
}

/* What the rest of a layer leaves, for N tokens: with routed experts or without, and a dense SwiGLU of the given width. */
static void alloc_layer(const struct activation_memory *mem, struct layer_activations *x, const struct model_config *c, int64_t N, bool experts,
		int64_t width, bool noise)
{
	struct arena *a = mem->certain;
	const int ranks = mem->layout->expert.size;
	const int64_t E = c->num_experts, R = N * c->num_experts_per_tok, A = R * ranks;
	x->attention_rstd = arena_alloc_real(a, N);
	x->residual = arena_alloc_real(a, N * c->hidden_size);
	x->ffn_rstd = arena_alloc_real(a, N);
	x->shared_gate_up = arena_alloc_real(a, N * 2 * width);
	if (!experts)
		return;
	x->p = arena_alloc_real(a, N * E);
	x->p_hat = noise ? arena_alloc_real(a, N * E) : x->p;
	x->router_lse = arena_alloc_real(a, N);
	x->index = arena_alloc(a, R, sizeof(int32_t));
	x->weight = arena_alloc_real(a, R);
	x->row_weight = arena_alloc_real(a, R);
	x->position = arena_alloc(a, R, sizeof(int32_t));
	x->token = arena_alloc(a, R, sizeof(int32_t));
	x->offset = arena_alloc(a, E + 1, sizeof(int64_t));
	x->gate_up = arena_alloc_real(mem->arrivals, A * 2 * c->moe_intermediate_size);
	x->expert_offset = x->offset;
	x->row = x->token;
	x->expert_weight = x->row_weight;
	if (ranks > 1) {
		x->expert_offset = arena_alloc(a, E / ranks + 1, sizeof(int64_t));
		x->arrived = arena_alloc(a, E, sizeof(int64_t));
		x->sent = arena_alloc(a, ranks, sizeof(int64_t));
		x->received = arena_alloc(a, ranks, sizeof(int64_t));
		x->row = arena_alloc(mem->arrivals, A, sizeof(int32_t));
		x->expert_weight = arena_alloc_real(mem->arrivals, A);
		x->arrivals = arena_alloc_real(mem->arrivals, A * c->hidden_size);
	}
}

/* Cuts the activations of a rank for B windows of L tokens of the whole model. acts->layer must have room for all layers. */
static void alloc_activations(const struct activation_memory *mem, struct activations *acts, const struct model_config *whole, int64_t B,
		int64_t L, enum model_mode mode)
{
	const struct model_config local = local_config(whole, mem->layout), *c = &local;
	struct arena *a = mem->certain;
	const struct group *tensor = &mem->layout->tensor;
	const int64_t T = B * L, N = most_tokens(T, mem->layout), H = c->hidden_size, E = c->num_experts, I = c->moe_intermediate_size;
	const int64_t R = N * c->num_experts_per_tok, A = R * mem->layout->expert.size, W = widest_shared(c);
	const int64_t C = head_chunk(whole->vocab_size, tensor->size);
	const int layers = c->num_hidden_layers;
	const bool training = mode != EVALUATE, own_layer = mode == TRAIN_KEEP_ALL || mode == TRAIN_RECOMPUTE_ATTENTION;
	const bool noise = training && c->router.warmup_steps > 0;
	struct layer_activations shared = {0}; /* what all layers use in turn, since they keep nothing there: room for any of them */
	if (mode != TRAIN_KEEP_ALL)
		alloc_attention(a, &shared, c, T);
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
			alloc_attention(a, x, c, T);
		if (own_layer)
			alloc_layer(mem, x, c, N, has_experts(c, l), shared_width(c, l), noise);
	}
	acts->output = training ? arena_alloc_real(a, N * H) : acts->layer[0].input;
	acts->rstd = arena_alloc_real(a, N);
	acts->normed = arena_alloc_real(a, N * H);
	if (tensor->size > 1) {
		acts->gathered = arena_alloc_real(a, T * H);
		acts->partial = arena_alloc_real(a, T * H);
		acts->reduce_scatter_scratch = arena_alloc_real(a, reduce_scatter_scratch(tensor, T, H));
	}
	acts->logits = arena_alloc_real(a, N * E);
	acts->expert_rows = acts->rows = arena_alloc_real(a, R * H);
	if (mem->layout->expert.size > 1) {
		acts->expert_rows = arena_alloc_real(mem->arrivals, A * H);
		acts->returns = arena_alloc_real(mem->arrivals, A * H);
		acts->arrived_weight = arena_alloc_real(mem->arrivals, A);
	}
	acts->act = arena_alloc_real(mem->arrivals, A * I);
	acts->shared_act = arena_alloc_real(a, N * W);
	acts->attention_scratch = arena_alloc_real(a, attention_scratch(c->head_dim));
	acts->expert_count = arena_alloc(a, E, sizeof(int64_t));
	acts->sequence_count = arena_alloc(a, B * E, sizeof(double));
	acts->sequence_p = arena_alloc(a, B * E, sizeof(double));
	acts->router_sums = arena_alloc(a, B, sizeof(struct router_sums));
	acts->head_logits = arena_alloc_real(a, C * c->vocab_size);
	acts->head_input = arena_alloc_real(a, C * H);
	acts->head_max = arena_alloc_real(a, C);
	acts->head_loss = arena_alloc(a, 2 * C, sizeof(double));
	acts->head_norm = arena_alloc(a, H, sizeof(double));
	if (!training)
		return;
	int64_t widest = H > qkv_width(c) ? H : qkv_width(c);
	acts->sum_scratch = arena_alloc_real(a, row_sum_scratch(widest));
	acts->dstream = arena_alloc_real(a, N * H);
	acts->dnormed = arena_alloc_real(a, N * H);
	acts->dqkv = arena_alloc_real(a, T * qkv_width(c));
	acts->dattention = arena_alloc_real(a, T * attention_width(c));
	acts->dlogits = arena_alloc_real(a, N * E);
	acts->dgate_up = arena_alloc_real(mem->arrivals, A * 2 * I);
	acts->dexpert_weight = arena_alloc_real(mem->arrivals, A);
	acts->dweight = arena_alloc_real(a, R);
	acts->dshared_gate_up = arena_alloc_real(a, N * 2 * W);
}

int plan_memory(struct memory_plan *plan, const struct model_config *c, const struct layout *layout, int64_t B, int64_t L,
		enum model_mode mode)
{
	const bool training = mode != EVALUATE, split = layout->expert.size > 1;
	if ((double)B * L * (c->num_experts_per_tok + 1) * layout->expert.size > INT32_MAX)
		return fail("%lld x %lld tokens with %d experts each, from %d ranks: more than %d rows at a time; make micro_batch or seq_len smaller",
				(long long)B, (long long)L, c->num_experts_per_tok, layout->expert.size, INT32_MAX);
	int n;
	struct activations acts = {.layer = calloc(c->num_hidden_layers, sizeof *acts.layer)};
	struct parameter *parameters = list_parameters(c, layout, &n);
	struct arena certain = {0}, arrivals = {0};
	if (!acts.layer || !parameters) {
		free(acts.layer);
		free(parameters);
		return fail("out of memory for %d layers", c->num_hidden_layers);
	}
	alloc_activations(&(struct activation_memory){&certain, split ? &arrivals : &certain, layout}, &acts, c, B, L, mode);
	*plan = (struct memory_plan){.num_parameters = n, .activations = certain.used, .arrivals = arrivals.used};
	for (int i = 0; i < n; i++) {
		/* A checkpoint is written by way of one whole tensor and one piece, see write_parameters. */
		const size_t bytes = (parameters[i].rows * (parameters[i].cols ? parameters[i].cols : 1) + BUCKET_SIZE) * sizeof(real);
		plan->saving = training && bytes > plan->saving ? bytes : plan->saving;
		plan->num_elements += parameter_size(&parameters[i]);
	}
	plan->num_buckets = make_buckets(NULL, &plan->num_state, parameters, n, layout);
	plan->weights = plan->num_elements * sizeof(real);
	plan->gradients = training ? plan->weights : 0;
	plan->optimizer = training ? 2 * plan->num_state * sizeof(real) : 0;
	plan->reduction = training && layout->world.size > 1
			? PENDING * reduce_scatter_scratch(&layout->world, plan->num_elements < BUCKET_SIZE ? plan->num_elements : BUCKET_SIZE, 1) * sizeof(real) : 0;
	free(parameters);
	free(acts.layer);
	return 0;
}

/* `bytes` of zeros for a large array, or NULL: on huge pages where the system has them, since products stride over all of it, and
 * touched first by the threads, so that each page lies near one of them. */
static void *allocate_large(size_t bytes)
{
	const size_t page = 2 << 20, size = (bytes / page + 1) * page;
	char *p = aligned_alloc(page, size);
	if (!p)
		return NULL;
	madvise(p, size, MADV_HUGEPAGE);
	#pragma omp parallel for
	for (size_t i = 0; i < size; i += page)
		memset(p + i, 0, page);
	return p;
}

/* Address space whose pages come when they are written: for expert rows, which cost what arrives, up to all rows of the group; and for the
 * weights of a model that is only evaluated, which cost what cannot be mapped. */
static void *reserve_memory(size_t bytes)
{
	void *p = bytes ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) : NULL;
	return p == MAP_FAILED ? NULL : p;
}

/* The weight that has its place in params.memory at `at` (NULL: none); as a pair, with the one behind it, gate and up. */
static struct weight weight_at(const struct model *m, const real *at, bool pair)
{
	struct weight w = {.data = at};
	int low = 0, high = m->num_parameters - 1;
	while (at && low < high) {
		const int mid = (low + high + 1) / 2;
		if (m->parameters[mid].offset <= at - m->params.memory)
			low = mid;
		else
			high = mid - 1;
	}
	const struct parameter *t = &m->parameters[low];
	if (at && t->mapped)
		w = (struct weight){.data = t->mapped, .second = pair ? t[1].mapped : NULL, .bf16 = t->bf16};
	return w;
}

/* Lets the forward pass find its weights where they are. */
static void place_weights(struct model *m)
{
	const int64_t H = m->config.hidden_size, I = m->config.moe_intermediate_size;
	m->embedding = weight_at(m, m->params.embedding, false);
	m->lm_head = weight_at(m, m->params.lm_head, false);
	for (int l = 0; l < m->config.num_hidden_layers; l++) {
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

int place_rope(struct model *m, int64_t n)
{
	if (n <= m->num_positions)
		return 0;
	real *rope = realloc(m->rope, (size_t)n * m->config.head_dim * sizeof *rope);
	if (!rope)
		return -1;
	m->rope = rope;
	m->num_positions = n;
	rope_table(rope, n, m->config.head_dim, m->config.rope_theta);
	return 0;
}

int model_init(struct model *m, const struct model_config *c, const struct layout *layout, int max_sequences, int seq_len,
		enum model_mode mode)
{
	const bool training = mode != EVALUATE;
	*m = (struct model){.global = *c, .config = local_config(c, layout), .max_sequences = max_sequences, .seq_len = seq_len, .mode = mode,
			.layout = *layout, .num_experts = c->num_experts / layout->expert.size,
			.first_vocab = shard_begin(c->vocab_size, layout->tensor.rank, layout->tensor.size)};
	struct memory_plan plan = {0};
	if (plan_memory(&plan, c, layout, max_sequences, seq_len, mode) < 0)
		return -1;
	const int layers = c->num_hidden_layers;
	const size_t weights = training ? plan.weights : 0; /* else model_load knows */
	const double total = (double)weights + plan.gradients + plan.optimizer + plan.activations + plan.reduction + plan.saving;
	const double machine = usable_memory("") / parallel_local_ranks();
	bool fits = total <= machine;
	if (fits) {
		m->parameters = calloc(plan.num_parameters, sizeof *m->parameters);
		m->buckets = calloc(plan.num_buckets, sizeof *m->buckets);
		m->params.layer = calloc(layers, sizeof *m->params.layer);
		m->grads.layer = calloc(layers, sizeof *m->grads.layer);
		m->acts.layer = calloc(layers, sizeof *m->acts.layer);
		m->weights = calloc(layers, sizeof *m->weights);
		m->expert_weights = calloc((size_t)layers * 2 * m->num_experts + 1, sizeof *m->expert_weights);
		m->params.memory = training ? allocate_large(plan.weights) : reserve_memory(m->reserved_bytes = plan.weights);
		m->head_scale = c->norm_head ? calloc(c->hidden_size, sizeof(real)) : NULL;
		m->acts_memory = allocate_large(m->acts_bytes = plan.activations);
		m->arrivals_memory = reserve_memory(m->arrivals_bytes = plan.arrivals);
		fits = m->parameters && m->buckets && m->params.layer && m->grads.layer && m->acts.layer && m->weights && m->expert_weights && m->params.memory &&
				place_rope(m, seq_len) == 0 && (m->head_scale || !c->norm_head) && m->acts_memory && (m->arrivals_memory || !plan.arrivals);
		if (training) {
			m->grads.memory = allocate_large(plan.gradients);
			m->exp_avg = allocate_large(plan.optimizer / 2);
			m->exp_avg_sq = allocate_large(plan.optimizer / 2);
			m->pending_scratch = allocate_large(plan.reduction);
			fits = fits && m->grads.memory && m->exp_avg && m->exp_avg_sq && m->pending_scratch;
		}
	}
	if (!fits) {
		model_free(m);
		return fail("%lld parameters and %d x %d tokens at a time need %.1f GB (weights %.1f, gradients %.1f, optimizer %.1f, "
				"activations %.1f); %.1f GB may be used here: make the model, micro_batch or seq_len smaller",
				(long long)plan.num_elements, max_sequences, seq_len, total / 1e9, weights / 1e9, plan.gradients / 1e9,
				plan.optimizer / 1e9, plan.activations / 1e9, machine / 1e9);
	}
	m->num_parameters = plan.num_parameters;
	m->num_elements = plan.num_elements;
	m->pending_size = plan.reduction / sizeof(real) / PENDING;
	add_model(&(struct parameter_walk){.layout = layout, .parameters = m->parameters, .memory = m->params.memory}, c, &m->params);
	if (training)
		add_model(&(struct parameter_walk){.layout = layout, .memory = m->grads.memory}, c, &m->grads);
	place_weights(m);
	m->num_buckets = make_buckets(m->buckets, &m->num_state, m->parameters, m->num_parameters, layout);
	struct arena certain = {.memory = m->acts_memory}, arrivals = {.memory = m->arrivals_memory};
	alloc_activations(&(struct activation_memory){&certain, plan.arrivals ? &arrivals : &certain, layout}, &m->acts, c, max_sequences,
			seq_len, mode);
	return 0;
}

void model_free(struct model *m)
{
	free(m->parameters);
	free(m->buckets);
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
	free(m->pending_scratch);
	free(m->acts.layer);
	free(m->acts_memory);
	if (m->arrivals_memory)
		munmap(m->arrivals_memory, m->arrivals_bytes);
	free(m->rope);
	free(m->head_scale);
	*m = (struct model){0};
}

/* Where row `r` of the part that this rank holds stands in the whole tensor. */
static int64_t whole_row(const struct shard *p, int64_t r)
{
	int i = 0;
	for (; i < 2 && r >= p->num_rows[i]; i++)
		r -= p->num_rows[i];
	return p->row[i] + r;
}

/* The longest run, from element `at` of a rank's part on and up to `end`, that is a run in the whole tensor too: returns its length, and
 * where it stands there. */
static int64_t whole_run(const struct parameter *t, int64_t at, int64_t end, int64_t *first)
{
	const struct shard *p = &t->shard;
	const int64_t cols = t->cols ? t->cols : 1, row = at / p->num_cols, col = at % p->num_cols;
	*first = whole_row(p, row) * cols + p->col + col;
	if (p->num_cols < cols)
		return end - at < p->num_cols - col ? end - at : p->num_cols - col;
	int64_t rows_end = p->num_rows[0]; /* of the range of rows that this row is in, and of those that follow it in the whole too */
	for (int i = 1; i < 3 && (rows_end <= row || p->row[i] == p->row[i - 1] + p->num_rows[i - 1]); i++)
		rows_end += p->num_rows[i];
	return end < rows_end * cols ? end - at : rows_end * cols - at;
}

/* A tensor's own stream of random numbers: keyed by its name (FNV-1a), so that no layout of ranks can change it. */
static struct random_stream parameter_stream(const struct parameter *t, uint64_t seed)
{
	uint64_t hash = 0xcbf29ce484222325u;
	for (const char *c = t->name; *c; c++)
		hash = (hash ^ (uint8_t)*c) * 0x100000001b3u;
	return (struct random_stream){.seed = seed, .purpose = RANDOM_INIT + (hash >> 32 & 0xffff), .step = (uint32_t)hash};
}

void model_randomize(struct model *m, uint64_t seed)
{
	const double bound = 1 / sqrt(m->config.hidden_size);
	for (int i = 0; i < m->num_parameters; i++) {
		const struct parameter *t = &m->parameters[i];
		const struct random_stream stream = parameter_stream(t, seed);
		const int64_t n = t->shard.num_cols;
		real *w = m->params.memory + t->offset;
		#pragma omp parallel for
		for (int64_t r = 0; r < parameter_size(t) / n; r++) {
			const int64_t at = whole_row(&t->shard, r) * (t->cols ? t->cols : 1) + t->shard.col;
			real *row = w + r * n;
			if (t->init == INIT_NORMAL)
				random_normal(row, n, &stream, at);
			else if (t->init == INIT_ROUTER)
				random_uniform(row, n, &stream, at);
			for (int64_t j = 0; j < n; j++)
				row[j] = t->init == INIT_NORMAL ? (real)(row[j] * m->config.initializer_range)
						: t->init == INIT_ROUTER ? (real)((2 * row[j] - 1) * bound) : t->init == INIT_ONES;
		}
	}
	model_update_head_scale(m);
}

/* A piece of a tensor that this rank keeps the moments of, and answers for in a checkpoint: elements from .. end of the rank's part, and
 * where their moments begin. */
struct optimizer_shard { const struct parameter *tensor; int64_t from, end, state; };

/* The next piece in the order of memory: false after the last one. A walk begins with {0}. */
struct optimizer_shard_iterator { int bucket, parameter; };
static bool next_optimizer_shard(const struct model *m, struct optimizer_shard_iterator *w, struct optimizer_shard *p)
{
	for (; w->bucket < m->num_buckets; w->bucket++) {
		const struct bucket *c = &m->buckets[w->bucket];
		int64_t size;
		const int64_t begin = c->offset + own_shard(&m->layout, c, &size), end = begin + size;
		while (w->parameter < m->num_parameters && m->parameters[w->parameter].offset + parameter_size(&m->parameters[w->parameter]) <= begin)
			w->parameter++;
		if (w->parameter == m->num_parameters || m->parameters[w->parameter].offset >= end)
			continue;
		const struct parameter *t = &m->parameters[w->parameter];
		const int64_t last = t->offset + parameter_size(t), from = t->offset > begin ? t->offset : begin, to = last < end ? last : end;
		*p = (struct optimizer_shard){t, from - t->offset, to - t->offset, c->state + from - begin};
		if (last <= end)
			w->parameter++;
		if (last >= end)
			w->bucket++;
		return true;
	}
	return false;
}

/* Opens the files of one kind, which must hold one tensor prefix + NAME for each of the whole model's and each of the prefixes, and no
 * others; the ranks share the checks of the checksums. */
static struct tensors *open_tensors(const struct model *m, const char *dir, const char *kind, int num_prefixes, const char *const *prefixes)
{
	int n, rc = 0;
	struct parameter *whole = global_parameters(&m->global, &n);
	struct tensors *w = whole ? tensors_open(dir, kind) : NULL;
	char name[MAX_NAME + 16];
	if (!w) {
		free(whole);
		return NULL;
	}
	for (int p = 0; p < num_prefixes; p++)
		for (int i = 0; i < n && rc == 0; i++) {
			snprintf(name, sizeof name, "%s%s", prefixes[p], whole[i].name);
			if (!tensors_has(w, name))
				rc = fail("%s: tensor %s is missing", dir, name);
		}
	if (rc == 0 && tensors_count(w) != num_prefixes * n) {
		/* All of ours are there, so there are more: name one. Names are sought once, in a rare case; a plain search will do. */
		for (int i = 0; i < tensors_count(w) && rc == 0; i++) {
			bool known = false;
			for (int j = 0; j < num_prefixes * n && !known; j++) {
				snprintf(name, sizeof name, "%s%s", prefixes[j / n], whole[j % n].name);
				known = !strcmp(name, tensors_name(w, i));
			}
			if (!known)
				rc = fail("%s: tensor %s is not a part of the model that config.json describes", dir, tensors_name(w, i));
		}
	}
	const bool fits = tensors_bytes(w) <= usable_memory("");
	if (!fits && m->mode == EVALUATE && m->layout.world.rank == 0)
		fprintf(stderr, "note: %s is larger than this machine's memory: what is read where it stands is not checked against its checksums first\n", dir);
	for (int i = m->layout.world.rank; i < tensors_count(w) && rc == 0 && (fits || m->mode != EVALUATE); i += m->layout.world.size)
		rc = tensors_verify(w, i);
	free(whole);
	if (rc < 0) {
		tensors_close(w);
		w = NULL;
	}
	return w;
}

/* Reads elements from .. end of a rank's part of a tensor. */
static int read_part(struct tensors *w, const char *prefix, const struct parameter *t, int64_t from, int64_t end, real *out)
{
	char name[MAX_NAME + 16];
	int rc = 0;
	snprintf(name, sizeof name, "%s%s", prefix, t->name);
	for (int64_t at = from, n, first; at < end && rc == 0; at += n) {
		n = whole_run(t, at, end, &first);
		rc = tensors_read_range(w, name, t->rows, t->cols, first, n, out + at - from);
	}
	return rc;
}

/* Finds the matrices that can be used where they stand in the files: this rank's part of them a run of elements, of a type and at an address
 * that products can read. Gate and up must be alike. Memory must suffice for the others. */
static int map_parameters(struct model *m, const struct tensors *w, const char *dir)
{
	double bytes = 0;
	for (int i = 0; i < m->num_parameters; i++) {
		struct parameter *t = &m->parameters[i];
		int64_t first;
		t->mapped = NULL;
		if (t->cols && whole_run(t, 0, parameter_size(t), &first) == parameter_size(t) &&
				tensors_map_range(w, t->name, t->rows, t->cols, first, parameter_size(t), &t->mapped, &t->bf16) < 0)
			return -1;
	}
	for (int i = 0; i < m->num_parameters; i++) {
		struct parameter *t = &m->parameters[i];
		if (strstr(t->name, ".gate_proj.") && (!t[0].mapped || !t[1].mapped || t[0].bf16 != t[1].bf16))
			t[0].mapped = t[1].mapped = NULL;
		if (!t->mapped)
			bytes += parameter_size(t) * sizeof(real);
	}
	const double machine = usable_memory("") / parallel_local_ranks(), total = bytes + m->acts_bytes;
	if (total > machine)
		return fail("%s: weights that cannot be used as they stand in the file need %.1f GB, activations %.1f GB; %.1f GB may be used here: bring them to "
				"bfloat16 with ling convert-checkpoint, or make the windows shorter", dir, bytes / 1e9, m->acts_bytes / 1e9, machine / 1e9);
	/* Scattered norms would take a whole huge page each. */
	madvise(m->params.memory, m->reserved_bytes, bytes > m->reserved_bytes / 2 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	return 0;
}

int model_load(struct model *m, const char *dir)
{
	const bool map = m->mode == EVALUATE;
	struct tensors *w = open_tensors(m, dir, "model", 1, (const char *[]){""});
	int rc = w ? 0 : -1;
	if (rc == 0 && map)
		rc = map_parameters(m, w, dir);
	for (int i = 0; i < m->num_parameters && rc == 0; i++)
		if (!m->parameters[i].mapped)
			rc = read_part(w, "", &m->parameters[i], 0, parameter_size(&m->parameters[i]), m->params.memory + m->parameters[i].offset);
	tensors_close(map ? m->files : w); /* those of an earlier load, or these */
	m->files = map ? w : NULL;
	rc = parallel_agree(rc);
	if (rc == 0) {
		place_weights(m);
		model_update_head_scale(m);
	}
	return rc;
}

static const char *const moment_prefixes[2] = {"exp_avg.", "exp_avg_sq."};

/* Reads the pieces of the optimizer's moments that this rank keeps. */
static int load_moments(struct model *m, const char *dir)
{
	struct tensors *w = open_tensors(m, dir, "optimizer", 2, moment_prefixes);
	int rc = w ? 0 : -1;
	struct optimizer_shard p;
	for (struct optimizer_shard_iterator walk = {0}; rc == 0 && next_optimizer_shard(m, &walk, &p);) {
		rc = read_part(w, moment_prefixes[0], p.tensor, p.from, p.end, m->exp_avg + p.state);
		if (rc == 0)
			rc = read_part(w, moment_prefixes[1], p.tensor, p.from, p.end, m->exp_avg_sq + p.state);
	}
	tensors_close(w);
	return parallel_agree(rc);
}

/* The rank that writes a tensor: one that holds it, where it is an expert's; the others in turn. */
static int writer_of(const struct layout *l, const struct parameter *t, int number, int num_experts)
{
	if (t->sharing != SHARED_BY_EXPERT_DATA)
		return number % l->world.size;
	return t->block % l->expert_data.size * l->expert.size + t->expert / (num_experts / l->expert.size);
}

/* A piece on its way to the rank that writes its tensor. */
struct shard_message { struct shard shard; int64_t from, end; real data[]; };

/* A message's tag tells its tensor. MPI promises tags up to 32767 only, and a model may have more tensors. The double build has fewer, so
 * that small models need them again. */
#ifndef CHECKPOINT_TAGS
#define CHECKPOINT_TAGS 32768
#endif

static void place_shard(real *whole, const struct parameter *t, const struct shard_message *p)
{
	const struct parameter theirs = {.rows = t->rows, .cols = t->cols, .shard = p->shard};
	for (int64_t at = p->from, n, first; at < p->end; at += n) {
		n = whole_run(&theirs, at, p->end, &first);
		memcpy(whole + first, p->data + at - p->from, n * sizeof *whole);
	}
}

/* Writes this rank's tensors of the given blocks to a file. Tensor by tensor, in the same order everywhere, the ranks that hold pieces of
 * it send them to its writer: no rank needs more memory than one tensor and one piece. blocks[b] holds the weights, or the moments. A
 * failure is kept until the others' pieces have been received. */
static int write_parameters(const struct model *m, const struct parameter *whole, int n, const char *path, bool moments, int num_blocks,
		real *const *blocks, const char *const *prefixes)
{
	const struct group *world = &m->layout.world;
	struct named_tensor *arrays = calloc((size_t)n * num_blocks, sizeof *arrays);
	char (*names)[MAX_NAME + 16] = calloc((size_t)n * num_blocks, sizeof *names);
	struct shard_message *message = malloc(sizeof *message + (BUCKET_SIZE + 1) * sizeof(real));
	struct safetensors_writer *w = NULL;
	int64_t largest = 1;
	int count = 0, rc = arrays && names && message ? 0 : fail("%s: out of memory for the names of %d tensors", path, n);
	for (int b = 0; b < num_blocks && rc == 0; b++)
		for (int i = 0; i < n; i++)
			if (writer_of(&m->layout, &whole[i], i, m->config.num_experts) == world->rank) {
				snprintf(names[count], sizeof *names, "%s%s", prefixes[b], whole[i].name);
				arrays[count] = (struct named_tensor){.name = names[count], .rows = whole[i].rows, .cols = whole[i].cols};
				largest = parameter_size(&whole[i]) > largest ? parameter_size(&whole[i]) : largest;
				count++;
			}
	real *tensor = rc == 0 ? malloc(largest * sizeof *tensor) : NULL;
	if (rc == 0 && !tensor)
		rc = fail("%s: out of memory for a tensor of %lld elements", path, (long long)largest);
	rc = parallel_agree(rc); /* nobody sends what another could not take */
	if (rc < 0) {
		free(tensor);
		tensor = NULL;
	}
	if (rc == 0 && !(w = safetensors_create(path, arrays, count)))
		rc = -1;
	for (int b = 0; b < num_blocks && tensor; b++) {
		struct optimizer_shard_iterator walk = {0};
		struct optimizer_shard piece;
		bool more = next_optimizer_shard(m, &walk, &piece);
		for (int i = 0; i < n; i++) {
			const int writer = writer_of(&m->layout, &whole[i], i, m->config.num_experts), tag = (b * n + i) % CHECKPOINT_TAGS;
			/* A tag is used again when every rank has received all messages that had it before. */
			if (tag == 0)
				parallel_agree(0);
			int64_t left = parameter_size(&whole[i]);
			for (; more && !strcmp(piece.tensor->name, whole[i].name); more = next_optimizer_shard(m, &walk, &piece)) {
				const int64_t size = piece.end - piece.from;
				message->shard = piece.tensor->shard;
				message->from = piece.from;
				message->end = piece.end;
				memcpy(message->data, blocks[b] + (moments ? piece.state : piece.tensor->offset + piece.from), size * sizeof(real));
				if (writer != world->rank) {
					send_message(world, writer, tag, message, sizeof *message + size * sizeof(real));
					continue;
				}
				place_shard(tensor, &whole[i], message);
				left -= size;
			}
			while (writer == world->rank && left > 0) {
				receive_message(world, tag, message, sizeof *message + BUCKET_SIZE * sizeof(real));
				place_shard(tensor, &whole[i], message);
				left -= message->end - message->from;
			}
			if (writer == world->rank && rc == 0)
				rc = safetensors_append(w, tensor, parameter_size(&whole[i]));
		}
	}
	if (rc == 0)
		rc = safetensors_finish(w);
	else
		safetensors_abandon(w);
	free(tensor);
	free(message);
	free(names);
	free(arrays);
	return parallel_agree(rc);
}

/* ============================================================================================================
 * Time: a step is divided among its parts
 * ========================================================================================================== */

void model_timer(struct model *m, enum phase part)
{
	const double t = clock_seconds();
	m->phase_seconds[part] += t - m->phase_start;
	m->phase_start = t;
	for (int i = m->buckets_finished; i < m->buckets_started; i++) /* MPI moves data only when it is called */
		reduce_scatter_progress(&m->pending[i % PENDING].scatter);
	all_to_all_progress(&m->dispatch);
}

/* ============================================================================================================
 * Forward
 * ========================================================================================================== */

void model_update_head_scale(struct model *m)
{
	if (!m->head_scale)
		return;
	const int64_t H = m->config.hidden_size;
	double *norm = m->acts.head_norm;
	column_sum_of_squares(norm, &m->lm_head, m->config.vocab_size, H);
	all_reduce_sum(&m->layout.tensor, TRAFFIC_HEAD, norm, H); /* the vocabulary may be split: a norm of a part would be too small */
	for (int64_t j = 0; j < H; j++)
		m->head_scale[j] = (real)(1 / (sqrt(norm[j]) + 1e-7));
}

/* Those of the T tokens of a micro-batch that this rank holds between attention and head: their number, and the first one. */
static int64_t own_tokens(const struct model *m, int64_t T, int64_t *first)
{
	const struct group *g = &m->layout.tensor;
	*first = shard_begin(T, g->rank, g->size);
	return shard_begin(T, g->rank + 1, g->size) - *first;
}

/* All T tokens [T, H] of which this rank holds its slice. In the backward pass of a gathered value comes reduce_scatter_sequence, so that each rank's
 * part of the gradient counts once. */
static const real *all_gather_sequence(struct model *m, const real *slice, int64_t T)
{
	if (m->layout.tensor.size == 1)
		return slice;
	all_gather(&m->layout.tensor, TRAFFIC_GATHER, m->acts.gathered, slice, T, m->config.hidden_size);
	return m->acts.gathered;
}

/* Where the ranks of a tensor group put their partial_sums of a sum [T, H] that reduce_scatter_sequence adds to, or writes to, their slices: with one rank
 * the slice itself, to which a product can add at once. */
static real *partial_sums(struct model *m, real *slice)
{
	return m->layout.tensor.size == 1 ? slice : m->acts.partial;
}

static void reduce_scatter_sequence(struct model *m, real *slice, bool accumulate, int64_t T)
{
	if (m->layout.tensor.size > 1)
		reduce_scatter(&m->layout.tensor, TRAFFIC_SUM, slice, accumulate, m->acts.partial, T, m->config.hidden_size,
				m->acts.reduce_scatter_scratch);
}

/* The attention of the next tokens of some sequences. Their keys and values enter the caches here; model_extend counts them. */
static void attention_segments(struct model *m, int l, const struct segment *segments, int n)
{
	const struct model_config *c = &m->config;
	struct layer_activations *x = &m->acts.layer[l];
	const int nh = c->num_attention_heads, nkv = c->num_key_value_heads, d = c->head_dim, width = qkv_width(c), kv_width = 2 * nkv * d;
	real *qkv = x->qkv;
	for (int i = 0; i < n; i++) {
		const struct kv_cache *cache = segments[i].cache;
		real *kv = cache->kv + (l * cache->capacity + cache->length) * kv_width;
		rope_forward(qkv, m->rope + cache->length * d, NULL, segments[i].num_tokens, segments[i].num_tokens, nh, nkv, d);
		for (int64_t t = 0; t < segments[i].num_tokens; t++, qkv += width, kv += kv_width)
			memcpy(kv, qkv + nh * d, kv_width * sizeof *kv);
	}
	attention_extend(x->attention, x->qkv, segments, n, l, nh, nkv, d, m->acts.attention_scratch);
}

/* attention = Attention(RMSNorm(input)), less its output product, for T tokens: whole windows, or, with segments, those of the segments. */
static void attention_core_forward(struct model *m, int l, int64_t T, const struct segment *segments, int n)
{
	const struct model_config *c = &m->config;
	const struct layer_params *p = &m->params.layer[l];
	struct layer_activations *x = &m->acts.layer[l];
	int64_t first;
	const int64_t L = m->seq_len, H = c->hidden_size, N = own_tokens(m, T, &first);
	const int nh = c->num_attention_heads, nkv = c->num_key_value_heads, d = c->head_dim;
	rmsnorm_forward(m->acts.normed, x->attention_rstd, x->input, p->attention_norm, N, H, c->rms_norm_eps);
	matmul_forward(x->qkv, all_gather_sequence(m, m->acts.normed, T), &m->weights[l].qkv, p->qkv_bias, T, H, qkv_width(c), false);
	if (segments) {
		attention_segments(m, l, segments, n);
		return;
	}
	rope_forward(x->qkv, m->rope, m->document, T, L, nh, nkv, d);
	attention_forward(x->attention, x->lse, x->qkv, m->document, T / L, L, nh, nkv, d, m->acts.attention_scratch);
}

/* middle = input + Attention(RMSNorm(input)) */
static void attention_layer_forward(struct model *m, int l, int64_t T, const struct segment *segments, int n)
{
	const struct layer_params *p = &m->params.layer[l];
	struct layer_activations *x = &m->acts.layer[l];
	int64_t first;
	const int64_t H = m->config.hidden_size, N = own_tokens(m, T, &first);
	const bool alone = m->layout.tensor.size == 1;
	attention_core_forward(m, l, T, segments, n);
	copy_array(x->residual, x->input, N * H);
	matmul_forward(partial_sums(m, x->residual), x->attention, &m->weights[l].dense, m->layout.tensor.rank == 0 ? p->dense_bias : NULL, T,
			attention_width(&m->config), H, alone);
	reduce_scatter_sequence(m, x->residual, true, T);
	model_timer(m, PHASE_ATTENTION);
}

/* Probabilities, chosen experts and weights of normed's tokens; and, in training, what the auxiliary losses need. */
static void router_forward(struct model *m, int l, int64_t T, const struct step *step, struct step_sums *sums)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t L = m->seq_len, B = T / L, E = c->num_experts, N = own_tokens(m, T, &first);
	const int k = c->num_experts_per_tok;
	matmul_forward(a->logits, a->normed, &m->weights[l].router, NULL, N, c->hidden_size, E, false);
	softmax_forward(x->p, x->router_lse, a->logits, N, E);
	const real *p = x->p;
	if (step && step->index < c->router.warmup_steps) {
		struct random_stream noise = {.seed = step->seed, .purpose = RANDOM_ROUTING + l, .step = (uint32_t)step->index,
				.first = (uint64_t)((step->first_sequence * L + first) * E)};
		routing_noise_forward(x->p_hat, a->logits, (double)step->index / c->router.warmup_steps, step->router_mean[l],
				step->router_std[l], &noise, N, E);
		softmax_forward(x->p_hat, NULL, x->p_hat, N, E);
		p = x->p_hat;
	}
	topk_forward(x->index, x->weight, p, N, E, k, c->norm_topk_prob && k > 1);
	if (!sums)
		return;

	/* f_e is a share of the tokens that count together: each sequence alone, or the whole micro-batch. */
	router_statistics(a->router_sums, a->sequence_count, a->sequence_p, a->logits, x->p, x->router_lse, x->index, first, N, B, L, E, k);
	struct layer_sums *sum = layer_sums(sums, l);
	for (int b = 0; b < B; b++) {
		for (int64_t e = 0; e < E; e++)
			sum->count[e] += a->sequence_count[b * E + e];
		sum->s += a->router_sums[b].s;
		sum->s_squared += a->router_sums[b].s_squared;
		sum->z += a->router_sums[b].z / step->num_tokens;
	}
	all_reduce_sum(&m->layout.tensor, TRAFFIC_STATISTICS, a->sequence_count, B * E); /* the partial_sums are those of all tokens; of P each rank adds its own */
	int64_t together = L;
	if (c->router.balance_loss_scope == SCOPE_MICRO_BATCH) {
		together = T;
		for (int64_t e = 0; e < E; e++) {
			for (int b = 1; b < B; b++) {
				a->sequence_count[e] += a->sequence_count[b * E + e];
				a->sequence_p[e] += a->sequence_p[b * E + e];
			}
			for (int b = 1; b < B; b++)
				a->sequence_count[b * E + e] = a->sequence_count[e], a->sequence_p[b * E + e] = 0;
		}
	}
	for (int64_t i = 0; i < B * E; i++) {
		double f = a->sequence_count[i] / ((double)k * together);
		x->balance_factor[i] = (real)(E * f);
		sum->balance += E * f * a->sequence_p[i] / step->num_tokens;
	}
}

/* Starts to send the rows of this rank's tokens to their experts; what arrives goes to `arrivals`. */
static void dispatch_start(struct model *m, struct layer_activations *x, const real *tokens, real *arrivals)
{
	gather_rows(m->acts.rows, tokens, x->token, x->offset[m->config.num_experts], m->config.hidden_size);
	all_to_all_start(&m->dispatch, &m->layout.expert, TRAFFIC_DISPATCH, arrivals, x->received, m->acts.rows, x->sent, m->config.hidden_size);
}

/* Sends rows back to where they came from: expert_rows, in the order of the experts, become acts.rows. */
static void return_rows(struct model *m, struct layer_activations *x)
{
	struct all_to_all e;
	scatter_rows(m->acts.returns, m->acts.expert_rows, x->row, x->num_rows, m->config.hidden_size);
	all_to_all_start(&e, &m->layout.expert, TRAFFIC_RETURN, m->acts.rows, x->sent, m->acts.returns, x->received, m->config.hidden_size);
	all_to_all_finish(&e);
}

/* Tells every rank of the expert group how many rows it gets, with their weights, and sorts what will arrive by expert. */
static void plan_arrivals(struct model *m, struct layer_activations *x)
{
	const struct group *g = &m->layout.expert;
	const int E = m->config.num_experts, mine = m->num_experts;
	int64_t *count = m->acts.expert_count;
	struct all_to_all e;
	for (int i = 0; i < E; i++)
		count[i] = x->offset[i + 1] - x->offset[i];
	all_to_all_counts(g, TRAFFIC_PLAN, x->arrived, count, mine);
	for (int r = 0; r < g->size; r++) {
		x->sent[r] = x->offset[(r + 1) * mine] - x->offset[r * mine];
		x->received[r] = 0;
		for (int i = 0; i < mine; i++)
			x->received[r] += x->arrived[r * mine + i];
	}
	arrival_plan(x->expert_offset, x->row, x->arrived, g->size, mine);
	x->num_rows = x->expert_offset[mine];
	all_to_all_start(&e, g, TRAFFIC_DISPATCH, m->acts.arrived_weight, x->received, x->row_weight, x->sent, 1);
	all_to_all_finish(&e);
	for (int64_t r = 0; r < x->num_rows; r++)
		x->expert_weight[r] = m->acts.arrived_weight[x->row[r]];
}

/* out = middle + MoE(RMSNorm(middle)): routed experts, if the layer has them, plus the shared (or dense) SwiGLU. With out NULL only what the
 * backward pass needs is computed. */
static void ffn_layer_forward(struct model *m, int l, int64_t T, real *out, const struct step *step, struct step_sums *sums)
{
	const struct model_config *c = &m->config;
	const struct layer_params *p = &m->params.layer[l];
	const struct layer_weights *w = &m->weights[l];
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t N = own_tokens(m, T, &first), H = c->hidden_size, I = c->moe_intermediate_size, W = shared_width(c, l), all_rows[] = {0, N};
	const int E = c->num_experts, k = c->num_experts_per_tok;
	const bool experts = has_experts(c, l), split = m->layout.expert.size > 1;
	rmsnorm_forward(a->normed, x->ffn_rstd, x->residual, p->ffn_norm, N, H, c->rms_norm_eps);
	if (out)
		copy_array(out, x->residual, N * H);
	model_timer(m, PHASE_OTHER);
	if (experts) {
		router_forward(m, l, T, step, sums);
		model_timer(m, PHASE_ROUTER);
		dispatch_plan(x->offset, x->position, x->token, x->index, N * k, k, E);
		permute_forward(x->row_weight, x->weight, x->position, N * k);
		x->num_rows = N * k;
		if (split) {
			plan_arrivals(m, x);
			dispatch_start(m, x, a->normed, x->arrivals);
		}
		model_timer(m, PHASE_PERMUTE);
	}
	if (W) { /* while the rows are on their way */
		swiglu_forward(a->shared_act, x->shared_gate_up, a->normed, NULL, &w->shared_gate_up, NULL, all_rows, 1, H, W);
		if (out)
			matmul_forward(out, a->shared_act, &w->shared_down, NULL, N, W, H, true);
		model_timer(m, PHASE_EXPERTS);
	}
	if (experts) {
		if (split)
			all_to_all_finish(&m->dispatch);
		model_timer(m, PHASE_PERMUTE);
		swiglu_forward(a->act, x->gate_up, split ? x->arrivals : a->normed, x->row, w->gate_up, x->expert_weight, x->expert_offset,
				m->num_experts, H, I);
		if (out) {
			grouped_matmul_forward(a->expert_rows, a->act, NULL, w->down, x->expert_offset, m->num_experts, I, H, false);
			model_timer(m, PHASE_EXPERTS);
			if (split)
				return_rows(m, x);
			combine_rows(out, a->rows, x->position, N, k, H, true);
			model_timer(m, PHASE_PERMUTE);
		}
	}
}

/* The forward pass from the layers' first input on, see attention_core_forward. */
static void layers_forward(struct model *m, int64_t T, const struct segment *segments, int n, const struct step *step, struct step_sums *sums)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	int64_t first;
	const int64_t N = own_tokens(m, T, &first);
	reduce_scatter_sequence(m, a->layer[0].input, false, T);
	for (int l = 0; l < c->num_hidden_layers; l++) {
		attention_layer_forward(m, l, T, segments, n);
		ffn_layer_forward(m, l, T, l + 1 < c->num_hidden_layers ? a->layer[l + 1].input : a->output, step, sums);
	}
	rmsnorm_forward(a->normed, a->rstd, a->output, m->params.norm, N, c->hidden_size, c->rms_norm_eps);
	model_timer(m, PHASE_OTHER);
}

void model_forward(struct model *m, const int32_t *input, int B, const struct step *step, struct step_sums *sums)
{
	const int64_t T = (int64_t)B * m->seq_len, H = m->config.hidden_size;
	embedding_forward(partial_sums(m, m->acts.layer[0].input), input, &m->embedding, m->first_vocab, T, H, m->config.vocab_size);
	layers_forward(m, T, NULL, 0, step, sums);
}

void model_extend(struct model *m, const struct segment *segments, int n)
{
	const int64_t H = m->config.hidden_size;
	real *embedded = partial_sums(m, m->acts.layer[0].input);
	int64_t T = 0;
	for (int i = 0; i < n; i++) {
		assert(segments[i].num_tokens <= segments[i].cache->capacity - segments[i].cache->length);
		embedding_forward(embedded + T * H, segments[i].token, &m->embedding, m->first_vocab, segments[i].num_tokens, H, m->config.vocab_size);
		T += segments[i].num_tokens;
	}
	assert(T <= (int64_t)m->max_sequences * m->seq_len);
	layers_forward(m, T, segments, n, NULL, NULL);
	for (int i = 0; i < n; i++)
		segments[i].cache->length += segments[i].num_tokens;
}

/* ============================================================================================================
 * Head and loss, over chunks of tokens: logits never exist for all of them
 * ========================================================================================================== */

/* What the head multiplies with W: normed / n_j with NormHead, which is the same as dividing W's columns. */
static const real *head_input(struct model *m, const real *normed, int64_t n)
{
	if (!m->head_scale)
		return normed;
	scale_columns(m->acts.head_input, normed, m->head_scale, n, m->config.hidden_size);
	return m->acts.head_input;
}

void model_logits(struct model *m, real *logits, int64_t first, int64_t n)
{
	const int64_t H = m->config.hidden_size;
	matmul_forward(logits, head_input(m, m->acts.normed + first * H, n), &m->lm_head, NULL, n, H, m->config.vocab_size, false);
}

double model_loss(struct model *m, const int32_t *target, int B, const struct step *step)
{
	struct activations *a = &m->acts;
	const struct group *tensor = &m->layout.tensor;
	const int64_t T = (int64_t)B * m->seq_len, H = m->config.hidden_size, V = m->config.vocab_size, C = head_chunk(m->global.vocab_size, tensor->size);
	const real *normed = all_gather_sequence(m, a->normed, T);
	real *dnormed = step ? partial_sums(m, a->dnormed) : NULL;
	double total = 0;
	for (int64_t first = 0; first == 0 || first < T; first += C) { /* once for an empty micro-batch: it writes a gradient of 0 */
		int64_t n = T - first < C ? T - first : C;
		const real *in = head_input(m, normed + first * H, n);
		matmul_forward(a->head_logits, in, &m->lm_head, NULL, n, H, V, false);
		/* The vocabulary may be split: the largest logit, then loss and sum, are those of all its parts. */
		logits_max(a->head_max, a->head_logits, n, V);
		all_reduce_max(tensor, TRAFFIC_HEAD, a->head_max, n);
		double *loss = a->head_loss, *sum = loss + n;
		cross_entropy_forward(loss, sum, a->head_logits, a->head_max, target + first, m->first_vocab, n, V);
		all_reduce_sum(tensor, TRAFFIC_HEAD, loss, 2 * n);
		for (int64_t t = 0; t < n; t++)
			total += target[first + t] < 0 ? 0 : loss[t] + log(sum[t]);
		if (!step)
			continue;
		cross_entropy_backward(a->head_logits, sum, target + first, m->first_vocab, step->num_targets ? 1.0 / step->num_targets : 0, n, V);
		matmul_backward_input(dnormed + first * H, a->head_logits, m->params.lm_head, n, H, V, false);
		matmul_backward_weight(m->grads.lm_head, a->head_logits, in, n, H, V, step->accumulate || first > 0);
		if (m->head_scale)
			scale_columns(dnormed + first * H, dnormed + first * H, m->head_scale, n, H);
	}
	if (step)
		reduce_scatter_sequence(m, a->dnormed, false, T);
	model_timer(m, PHASE_HEAD);
	return total;
}

/* ============================================================================================================
 * Gradients over the ranks: chunk by chunk while the backward pass goes on, each rank receiving the sum of its slice
 * ========================================================================================================== */

static void finish_oldest_bucket(struct model *m)
{
	const int slot = m->buckets_finished++ % PENDING;
	const struct bucket *c = &m->buckets[m->pending[slot].bucket];
	int64_t size;
	reduce_scatter_finish(&m->pending[slot].scatter, m->grads.memory + c->offset + own_shard(&m->layout, c, &size), false);
}

/* Sends a bucket's gradients on when the last micro-batch has added to them. */
static void reduce_block(struct model *m, int block, const struct step *step)
{
	if (!step->last || m->layout.world.size == 1)
		return;
	for (int i = 0; i < m->num_buckets; i++) {
		const struct bucket *c = &m->buckets[i];
		const struct group *g = sharing_group(&m->layout, c->sharing);
		if (c->block != block || g->size == 1)
			continue;
		if (m->buckets_started - m->buckets_finished == PENDING)
			finish_oldest_bucket(m);
		const int slot = m->buckets_started++ % PENDING;
		m->pending[slot].bucket = i;
		reduce_scatter_start(&m->pending[slot].scatter, g, TRAFFIC_GRADIENTS, m->grads.memory + c->offset, c->size, 1,
				m->pending_scratch + slot * m->pending_size);
	}
}

static void finish_buckets(struct model *m)
{
	while (m->buckets_finished < m->buckets_started)
		finish_oldest_bucket(m);
	m->buckets_started = m->buckets_finished = 0;
}

/* ============================================================================================================
 * Backward: acts.dstream is the gradient of the residual stream; each layer adds its part on the way down
 * ========================================================================================================== */

/* Writes dlogits from the routing weights' gradient and the auxiliary losses; then the router's weight and input gradients. */
static void router_backward(struct model *m, int l, int B, const struct step *step)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t L = m->seq_len, N = own_tokens(m, B * L, &first), H = c->hidden_size, E = c->num_experts;
	const int k = c->num_experts_per_tok;
	const bool noisy = step->index < c->router.warmup_steps;
	topk_backward(a->dlogits, a->dweight, x->index, x->weight, noisy ? x->p_hat : x->p, N, E, k, c->norm_topk_prob && k > 1);
	if (noisy) { /* s_hat = alpha s + noise */
		real alpha = (real)((double)step->index / c->router.warmup_steps);
		for (int64_t i = 0; i < N * E; i++)
			a->dlogits[i] *= alpha;
	}
	router_loss_backward(a->dlogits, x->p, x->router_lse, x->balance_factor, first, N, L, E,
			c->router.balance_loss_coef / step->num_tokens, c->router.z_loss_coef / step->num_tokens);
	matmul_backward_weight(m->grads.layer[l].router, a->dlogits, a->normed, N, H, E, step->accumulate);
	matmul_backward_input(a->dnormed, a->dlogits, m->params.layer[l].router, N, H, E, true);
}

static void ffn_layer_backward(struct model *m, int l, int B, const struct step *step)
{
	const struct model_config *c = &m->config;
	const struct layer_params *p = &m->params.layer[l], *g = &m->grads.layer[l];
	struct activations *a = &m->acts;
	struct layer_activations *x = &a->layer[l];
	int64_t first;
	const int64_t N = own_tokens(m, (int64_t)B * m->seq_len, &first), H = c->hidden_size, I = c->moe_intermediate_size, W = shared_width(c, l);
	const int64_t all_rows[] = {0, N};
	const int k = c->num_experts_per_tok, E = m->num_experts;
	const bool add = step->accumulate, experts = has_experts(c, l), split = m->layout.expert.size > 1;
	rmsnorm_forward(a->normed, x->ffn_rstd, x->residual, p->ffn_norm, N, H, c->rms_norm_eps); /* not kept: cheap to make again */
	model_timer(m, PHASE_OTHER);
	if (experts && split) {
		dispatch_start(m, x, a->dstream, a->returns);
		model_timer(m, PHASE_PERMUTE);
	}
	if (W) {
		swiglu_backward(a->dshared_gate_up, a->shared_act, NULL, a->dstream, NULL, p->shared_down, x->shared_gate_up, NULL, all_rows, 1, H, W);
		model_timer(m, PHASE_EXPERTS);
		matmul_backward_weight(g->shared_down, a->dstream, a->shared_act, N, W, H, add);
		matmul_backward_weight(g->shared_gate_up, a->dshared_gate_up, a->normed, N, H, 2 * W, add);
		matmul_backward_input(a->dnormed, a->dshared_gate_up, p->shared_gate_up, N, H, 2 * W, false);
		model_timer(m, PHASE_EXPERTS);
	}
	if (experts) {
		/* y = down(w act): with z = down^T dy,  dw = z . act  and  d(act) = w z, so the expert's output itself is not needed. */
		const real *in = a->normed, *dy = a->dstream;
		if (split) {
			all_to_all_finish(&m->dispatch);
			in = x->arrivals;
			dy = a->returns;
		}
		model_timer(m, PHASE_PERMUTE);
		swiglu_backward(a->dgate_up, a->act, a->dexpert_weight, dy, x->row, p->down, x->gate_up, x->expert_weight, x->expert_offset, E, H, I);
		grouped_matmul_backward_weight(g->down, dy, x->row, a->act, NULL, x->expert_offset, E, I, H, add);
		grouped_matmul_backward_weight(g->gate_up, a->dgate_up, NULL, in, x->row, x->expert_offset, E, H, 2 * I, add);
		grouped_matmul_backward_input(a->expert_rows, a->dgate_up, NULL, p->gate_up, x->expert_offset, E, H, 2 * I, false);
		model_timer(m, PHASE_EXPERTS);
		if (split) {
			struct all_to_all weights;
			for (int64_t r = 0; r < x->num_rows; r++)
				a->arrived_weight[x->row[r]] = a->dexpert_weight[r];
			all_to_all_start(&weights, &m->layout.expert, TRAFFIC_RETURN, a->dexpert_weight, x->sent, a->arrived_weight, x->received, 1);
			all_to_all_finish(&weights);
			return_rows(m, x);
		}
		combine_rows(a->dnormed, a->rows, x->position, N, k, H, W > 0);
		permute_backward(a->dweight, a->dexpert_weight, x->position, N * k);
		model_timer(m, PHASE_PERMUTE);
		router_backward(m, l, B, step);
		model_timer(m, PHASE_ROUTER);
	}
	rmsnorm_backward(a->dstream, g->ffn_norm, a->dnormed, x->residual, p->ffn_norm, x->ffn_rstd, N, H, add, a->sum_scratch);
	model_timer(m, PHASE_OTHER);
}

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
	if (m->mode == TRAIN_RECOMPUTE_ATTENTION)
		attention_core_forward(m, l, T, NULL, 0);
	const real *dout = all_gather_sequence(m, a->dstream, T);
	matmul_backward_weight(g->dense, dout, x->attention, T, nh * d, H, add);
	if (g->dense_bias)
		bias_backward(g->dense_bias, a->dstream, N, H, add, a->sum_scratch);
	matmul_backward_input(a->dattention, dout, p->dense, T, nh * d, H, false);
	attention_backward(a->dqkv, a->dattention, x->attention, x->lse, x->qkv, m->document, B, L, nh, nkv, d, a->attention_scratch);
	rope_backward(a->dqkv, m->rope, m->document, T, L, nh, nkv, d);
	rmsnorm_forward(a->normed, x->attention_rstd, x->input, p->attention_norm, N, H, c->rms_norm_eps);
	matmul_backward_weight(g->qkv, a->dqkv, all_gather_sequence(m, a->normed, T), T, H, qkv_width(c), add);
	if (g->qkv_bias)
		bias_backward(g->qkv_bias, a->dqkv, T, qkv_width(c), add, a->sum_scratch);
	matmul_backward_input(partial_sums(m, a->dnormed), a->dqkv, p->qkv, T, H, qkv_width(c), false);
	reduce_scatter_sequence(m, a->dnormed, false, T);
	rmsnorm_backward(a->dstream, g->attention_norm, a->dnormed, x->input, p->attention_norm, x->attention_rstd, N, H, add,
			a->sum_scratch);
	model_timer(m, PHASE_ATTENTION);
}

void model_backward(struct model *m, const int32_t *input, int B, const struct step *step)
{
	const struct model_config *c = &m->config;
	struct activations *a = &m->acts;
	int64_t first;
	const int64_t T = (int64_t)B * m->seq_len, H = c->hidden_size, N = own_tokens(m, T, &first);
	memset(a->dstream, 0, N * H * sizeof *a->dstream);
	rmsnorm_backward(a->dstream, m->grads.norm, a->dnormed, a->output, m->params.norm, a->rstd, N, H, step->accumulate,
			a->sum_scratch);
	reduce_block(m, 1 + c->num_hidden_layers, step);
	for (int l = c->num_hidden_layers - 1; l >= 0; l--) {
		if (m->mode == TRAIN_RECOMPUTE_LAYER && l < c->num_hidden_layers - 1) { /* the last layer's are still there */
			attention_layer_forward(m, l, T, NULL, 0);
			ffn_layer_forward(m, l, T, NULL, step, NULL);
		}
		ffn_layer_backward(m, l, B, step);
		attention_layer_backward(m, l, B, step);
		reduce_block(m, 1 + l, step);
	}
	/* Tied, the head has written this gradient already. */
	embedding_backward(m->grads.embedding, input, all_gather_sequence(m, a->dstream, T), m->first_vocab, T, H, c->vocab_size,
			step->accumulate || c->tie_word_embeddings);
	reduce_block(m, 0, step);
	finish_buckets(m);
	model_timer(m, PHASE_OTHER);
}

struct step_sums step_sums_shape(const struct model_config *c)
{
	const int64_t stride = sizeof(struct layer_sums) / sizeof(double) + c->num_experts;
	return (struct step_sums){.size = 2 + stride * c->num_hidden_layers, .stride = stride};
}

int step_sums_init(struct step_sums *s, const struct model_config *c)
{
	*s = step_sums_shape(c);
	s->values = calloc(s->size, sizeof *s->values);
	return s->values ? 0 : fail("out of memory for the sums of %d layers", c->num_hidden_layers);
}

struct layer_sums *layer_sums(const struct step_sums *s, int layer)
{
	return (struct layer_sums *)(s->values + 2 + s->stride * layer);
}

/* ============================================================================================================
 * Schedules
 * ========================================================================================================== */

double learning_rate(const struct config *c, int64_t step, int64_t steps, double progress)
{
	/* WSD (Hu et al. 2024, arXiv:2404.06395): a constant level, lowered by the drops, then a decay over the last `steps`. A decay
	 * longer than the run has begun before its first step. */
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
		case DECAY_INVERSE_SQRT: lr = 1 / sqrt((1 - x) / (lr * lr) + x / (final * final)); break; /* 1/lr^2 grows linearly */
		}
	}
	/* The warm-up rises from 0 and reaches 1 at update number warmup_steps. */
	if (step < c->schedule.warmup_steps)
		lr *= (double)step / c->schedule.warmup_steps;
	return lr;
}

int64_t batch_size(const struct config *c, int64_t tokens)
{
	const int64_t start = c->train.batch_warmup.start, increment = c->train.batch_warmup.increment, ramp = c->train.batch_warmup.tokens;
	if (tokens >= ramp)
		return c->train.batch;
	int64_t increments = (c->train.batch - start + increment - 1) / increment;
	int64_t batch = start + (int64_t)((__int128)tokens * increments / ramp) * increment;
	return batch < c->train.batch ? batch : c->train.batch;
}

void run_length(const struct config *c, int64_t step, int64_t token, int64_t *steps, int64_t *tokens)
{
	const int64_t L = c->data.seq_len, ramp = c->train.batch_warmup.tokens;
	const bool by_steps = c->train.steps > 0;
	while (by_steps ? step < c->train.steps : token < c->train.tokens) {
		/* The batch stays the same up to `end`: the next level of the ramp, or the end of the run. */
		const int64_t batch = batch_size(c, token);
		int64_t end = INT64_MAX;
		if (token < ramp) {
			const int64_t start = c->train.batch_warmup.start, increment = c->train.batch_warmup.increment;
			const int64_t levels = (c->train.batch - start + increment - 1) / increment;
			const int64_t level = levels ? (int64_t)((__int128)token * levels / ramp) + 1 : 1;
			end = levels ? (int64_t)(((__int128)level * ramp + levels - 1) / levels) : ramp;
		}
		if (!by_steps && c->train.tokens < end)
			end = c->train.tokens;
		int64_t n = (end - token - 1) / (batch * L) + 1;
		if (by_steps && c->train.steps - step < n)
			n = c->train.steps - step;
		step += n;
		token += n * batch * L;
	}
	*steps = step;
	*tokens = token;
}

/* ============================================================================================================
 * The trainer
 * ========================================================================================================== */

volatile sig_atomic_t stop_requested;

bool is_rank0(const struct trainer *t)
{
	return t->model.layout.world.rank == 0;
}

/* Takes the weights of a Hugging Face directory, whose config.json must describe the same model. */
static int trainer_start_from(struct trainer *t, const char *dir)
{
	struct model_config theirs;
	const bool fits = config_from_huggingface(&theirs, dir) == 0 && config_check_init(&theirs, &t->config.model, dir) == 0;
	return parallel_agree(fits ? 0 : -1) < 0 ? -1 : model_load(&t->model, dir);
}

/* The sources of the config's blend, before any sample. */
static int fresh_sources(const struct trainer *t, struct source_state *s)
{
	const struct config *c = &t->config;
	const double whole = 4294967296.0;
	double weights = 0;
	for (int i = 0; i < c->data.num_train; i++)
		weights += c->data.train[i].weight;
	for (int i = 0; i < c->data.num_train; i++) {
		const int64_t share = llround(c->data.train[i].weight / weights * whole);
		s[i] = (struct source_state){.tokens = t->train[i].count, .crc32 = t->train[i].crc32, .order = i,
				.share = c->data.train[i].weight > 0 && share == 0 ? 1 : share};
	}
	return c->data.num_train;
}

/* Fails where the blend is not that of the checkpoint, saying what differs. */
static int check_blend(const struct trainer *t, const struct source_state *now, int n, const char *dir)
{
	char what[2 * PATH_LEN];
	const struct trainer_state *s = &t->state;
	int i = 0;
	while (i < n && i < s->num_sources && now[i].tokens == s->sources[i].tokens && now[i].crc32 == s->sources[i].crc32 &&
			now[i].share == s->sources[i].share)
		i++;
	if (i == n && n == s->num_sources)
		return 0;
	if (n != s->num_sources)
		snprintf(what, sizeof what, "data.train: found %d token files; the run of %s has %d", n, dir, s->num_sources);
	else if (now[i].share != s->sources[i].share)
		snprintf(what, sizeof what, "data.train: %s gives %.4g%% of the samples; in the run of %s it is %.4g%%", t->train[i].path,
				now[i].share / 42949672.96, dir, s->sources[i].share / 42949672.96);
	else
		snprintf(what, sizeof what, "data.train: %s holds other tokens (%lld, CRC-32 %08x) than the run of %s was started with (%lld, %08x)",
				t->train[i].path, (long long)now[i].tokens, now[i].crc32, dir, (long long)s->sources[i].tokens, s->sources[i].crc32);
	return fail("%s; set it back, or choose another train.output_dir, or, to change the blend here on purpose, set data.blend_from_step=%lld",
			what, (long long)s->step);
}

/* Compares the blend with that of the checkpoint. Where the config says that it changes at this step, each file that was in it before goes on
 * from where it stands. */
static int resume_sources(struct trainer *t, const char *dir)
{
	struct trainer_state *s = &t->state;
	struct source_state now[MAX_SOURCES], before[MAX_SOURCES];
	const int n = fresh_sources(t, now), num_before = s->num_sources;
	if (check_blend(t, now, n, dir) == 0)
		return 0;
	if (s->step != t->config.data.blend_from_step)
		return -1;
	memcpy(before, s->sources, sizeof before);
	int next_order = 0;
	for (int j = 0; j < num_before; j++)
		next_order = before[j].order >= next_order ? before[j].order + 1 : next_order;
	for (int i = 0; i < n; i++) {
		int j = 0;
		while (j < num_before && (before[j].tokens != now[i].tokens || before[j].crc32 != now[i].crc32))
			j++;
		now[i].order = j < num_before ? before[j].order : next_order++;
		now[i].taken = j < num_before ? before[j].taken : 0;
		if (j < num_before)
			before[j].tokens = -1; /* the same file may be there twice */
	}
	memcpy(s->sources, now, sizeof now);
	s->num_sources = n;
	if (is_rank0(t))
		printf("the blend of data.train changes at step %lld\n", (long long)s->step);
	return 0;
}

/* Continues from a checkpoint: state, weights, optimizer; the config and the data must be those of the same run. */
static int trainer_resume(struct trainer *t, const char *dir)
{
	FILE *notes = is_rank0(t) ? stdout : fopen("/dev/null", "w");
	int rc = notes ? checkpoint_read_state(dir, &t->config, &t->state, notes) : fail("/dev/null: %s", strerror(errno));
	if (notes && !is_rank0(t))
		fclose(notes);
	if (parallel_agree(rc) < 0)
		return -1;
	if (!t->state.num_sources) /* a converted model, which has seen no data: any will do */
		t->state.num_sources = fresh_sources(t, t->state.sources);
	else if (resume_sources(t, dir) < 0)
		return -1;
	if (load_moments(&t->model, dir) < 0 || model_load(&t->model, dir) < 0)
		return -1;
	run_length(&t->config, t->state.step, t->state.tokens, &t->steps, &t->tokens);
	if (is_rank0(t))
		printf("continuing from %s\n", dir);
	return 0;
}

int trainer_allocate(struct trainer *t, const struct config *c)
{
	const int layers = c->model.num_hidden_layers;
	const size_t tokens = (size_t)c->train.batch * c->data.seq_len;
	*t = (struct trainer){.config = *c};
	run_length(c, 0, 0, &t->steps, &t->tokens);
	if (parallel_agree(layout_check(&c->model, parallel_size(), c->parallel.tensor, c->parallel.expert)) < 0)
		return -1;
	struct layout layout = layout_of_rank(parallel_rank(), parallel_size(), c->parallel.tensor, c->parallel.expert);
	layout_connect(&layout);
	int rc = model_init(&t->model, &c->model, &layout, c->train.micro_batch, c->data.seq_len, c->train.recompute);
	if (rc == 0)
		rc = step_sums_init(&t->sums, &c->model);
	t->state.num_layers = layers;
	t->state.router_mean = calloc(layers, sizeof(double));
	t->state.router_std = calloc(layers, sizeof(double));
	t->expert_load = calloc(layers, sizeof(double));
	t->input = calloc(tokens, sizeof(int32_t));
	t->target = calloc(tokens, sizeof(int32_t));
	t->document = c->data.document_mask ? calloc(tokens, sizeof(int32_t)) : NULL;
	if (rc == 0 && (!t->state.router_mean || !t->state.router_std || !t->expert_load || !t->input || !t->target ||
			(c->data.document_mask && !t->document)))
		rc = fail("out of memory for a batch of %d x %d tokens", c->train.batch, c->data.seq_len);
	if (parallel_agree(rc) < 0) {
		trainer_free(t);
		return -1;
	}
	for (int l = 0; l < layers; l++)
		t->state.router_std[l] = 1;
	return 0;
}

static int open_all(struct trainer *t)
{
	const struct config *c = &t->config;
	struct reading r;
	int rc = reading_of(&r, c);
	for (int i = 0; i < c->data.num_train && rc == 0; i++)
		rc = open_data(&t->train[i], &c->data.train[i], &r, 0);
	for (int i = 0; i < c->data.num_valid && rc == 0; i++)
		rc = open_data(&t->valid[i], &c->data.valid[i], &r, c->eval.max_windows);
	return rc;
}

/* Opens the data and, with the ranks agreed on it, sets the weights: random, from init_from, or from the checkpoint `dir`. */
static int trainer_start(struct trainer *t, const char *dir)
{
	const struct config *c = &t->config;
	/* Rank 0 first: it may have to look at all of the files, and leaves what it found for the others. */
	if (parallel_agree(is_rank0(t) ? open_all(t) : 0) < 0 || parallel_agree(is_rank0(t) ? 0 : open_all(t)) < 0)
		return -1;
	for (int i = 0; i < c->data.num_train; i++)
		if (parallel_same(t->train[i].crc32, "data.train") < 0)
			return -1;
	for (int i = 0; i < c->data.num_valid; i++)
		if (parallel_same(t->valid[i].crc32, "data.valid") < 0)
			return -1;
	t->state.num_sources = fresh_sources(t, t->state.sources);
	if (*dir && trainer_resume(t, dir) < 0)
		return -1;
	if (!*dir && *c->train.init_from && trainer_start_from(t, c->train.init_from) < 0)
		return -1;
	if (!*dir && !*c->train.init_from)
		model_randomize(&t->model, c->train.seed);
	return 0;
}

int trainer_init(struct trainer *t, const struct config *c)
{
	char dir[PATH_LEN] = "";
	const struct layout all = layout_of_rank(parallel_rank(), parallel_size(), 1, 1);
	uint32_t program = 0;
	int rc = file_crc32("/proc/self/exe", &program);
	if (rc == 0 && all.world.rank == 0)
		rc = checkpoint_find(c->train.output_dir, dir);
	if (parallel_agree(rc < 0 ? -1 : 0) < 0 || parallel_same(program, "the program") < 0 || parallel_same(config_crc32(c), "the config") < 0 ||
			trainer_allocate(t, c) < 0)
		return -1;
	broadcast(&t->model.layout.world, dir, sizeof dir);
	rc = trainer_start(t, dir);
	if (rc < 0)
		trainer_free(t);
	return rc;
}

void trainer_free(struct trainer *t)
{
	for (int i = 0; i < MAX_SOURCES; i++) {
		tokens_close(&t->train[i]);
		tokens_close(&t->valid[i]);
	}
	model_free(&t->model);
	free(t->sums.values);
	free(t->state.router_mean);
	free(t->state.router_std);
	free(t->expert_load);
	free(t->input);
	free(t->target);
	free(t->document);
	*t = (struct trainer){0};
}

/* The source of the next sample: every source is credited with its share, and the one with the most credit, the first among equals, pays for
 * the sample. So no source is ever ahead of its share by a whole sample, and the order is a function of the partial_sums alone. */
static struct source_state *next_source(struct source_state *sources, int n)
{
	struct source_state *best = NULL;
	int64_t whole = 0;
	for (struct source_state *s = sources; s < sources + n; s++) {
		s->credit += s->share;
		whole += s->share;
		if (s->share && (!best || s->credit > best->credit))
			best = s;
	}
	best->credit -= whole;
	return best;
}

int64_t trainer_next_batch(struct trainer *t)
{
	const int64_t L = t->config.data.seq_len, batch = batch_size(&t->config, t->state.tokens);
	memcpy(t->next_sources, t->state.sources, sizeof t->next_sources);
	for (int64_t i = 0; i < batch; i++) {
		/* The order of each file's windows is a function of the sample's number in it alone. */
		struct source_state *source = next_source(t->next_sources, t->state.num_sources);
		const struct tokens *data = &t->train[source - t->next_sources];
		const int64_t windows = count_windows(data, L), sample = source->taken++;
		const struct random_stream order = {.seed = t->config.train.seed, .purpose = RANDOM_SHUFFLE + source->order,
				.step = (uint32_t)(sample / windows)};
		const int64_t window = t->config.data.shuffle ? (int64_t)random_permute(sample % windows, windows, &order) : sample % windows;
		if (read_window(data, window, L, t->input + i * L, t->target + i * L, t->document ? t->document + i * L : NULL) < 0)
			return -1;
	}
	return batch;
}

/* Running mean and standard deviation of each layer's router logits, for the routing warmup. */
static void update_router_statistics(struct trainer *t, int64_t num_tokens)
{
	const double n = (double)num_tokens * t->config.model.num_experts, momentum = 0.9;
	for (int l = t->config.model.first_k_dense_replace; l < t->config.model.num_hidden_layers; l++) {
		const struct layer_sums *sum = layer_sums(&t->sums, l);
		double mean = sum->s / n, variance = sum->s_squared / n - mean * mean;
		t->state.router_mean[l] = momentum * t->state.router_mean[l] + (1 - momentum) * mean;
		t->state.router_std[l] = momentum * t->state.router_std[l] + (1 - momentum) * sqrt(variance > 0 ? variance : 0);
	}
}

/* Applies AdamW to the slices that this rank answers for, neighbours with the same decay together, and gathers the others. */
static void update_weights(struct trainer *t, const struct adamw *optimizer)
{
	struct model *m = &t->model;
	struct optimizer_shard_iterator walk = {0};
	struct optimizer_shard p;
	for (bool more = next_optimizer_shard(m, &walk, &p); more;) {
		const bool decay = p.tensor->cols > 0;
		const int64_t begin = p.tensor->offset + p.from, state = p.state;
		int64_t end = begin;
		for (; more && p.tensor->offset + p.from == end && (p.tensor->cols > 0) == decay; more = next_optimizer_shard(m, &walk, &p))
			end += p.end - p.from;
		struct adamw o = *optimizer;
		o.weight_decay = decay ? o.weight_decay : 0;
		adamw_update(m->params.memory + begin, m->exp_avg + state, m->exp_avg_sq + state, m->grads.memory + begin, end - begin, &o);
	}
	for (int i = 0; i < m->num_buckets; i++) {
		const struct bucket *c = &m->buckets[i];
		int64_t size;
		real *chunk = m->params.memory + c->offset;
		all_gather(sharing_group(&m->layout, c->sharing), TRAFFIC_WEIGHTS, chunk, chunk + own_shard(&m->layout, c, &size), c->size, 1);
	}
	model_update_head_scale(m);
}

double gradient_square(const struct model *m)
{
	double sum = 0;
	for (int i = 0; i < m->num_buckets; i++) {
		int64_t size;
		const int64_t begin = own_shard(&m->layout, &m->buckets[i], &size);
		sum += sum_of_squares(m->grads.memory + m->buckets[i].offset + begin, size);
	}
	all_reduce_sum(&m->layout.world, TRAFFIC_STATISTICS, &sum, 1);
	return sum;
}

/* Fills the metrics' loss parts and loads from the sums of a step: means over the layers that have experts. */
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
		}
		t->expert_load[l - first] = largest * c->num_experts / total;
	}
	m->num_layers = n;
	m->expert_load = t->expert_load;
}

int trainer_step(struct trainer *t, int64_t batch, struct metrics *m)
{
	struct model *model = &t->model;
	const struct config *c = &t->config;
	const int64_t L = c->data.seq_len, num_tokens = batch * L, step_number = t->state.step + 1;
	const double start = clock_seconds(), communication = parallel_seconds();
	struct step step = {.seed = c->train.seed, .index = t->state.step, .num_tokens = num_tokens,
			.router_mean = t->state.router_mean, .router_std = t->state.router_std};
	for (int64_t i = 0; i < num_tokens; i++)
		step.num_targets += t->target[i] >= 0;

	int64_t sent[NUM_TRAFFIC];
	parallel_bytes(sent);
	memset(model->phase_seconds, 0, sizeof model->phase_seconds);
	model->phase_start = start;
	memset(t->sums.values, 0, t->sums.size * sizeof *t->sums.values);
	const struct micro_batches mine = micro_batches_of_rank(&model->layout.data, batch, c->train.micro_batch);
	for (int64_t i = 0; i < mine.num; i++) {
		const int64_t first = mine.first + i * mine.step, left = batch - first;
		const int B = left < 0 ? 0 : left < c->train.micro_batch ? left : c->train.micro_batch;
		step.first_sequence = left < 0 ? 0 : first;
		step.accumulate = i > 0;
		step.last = i + 1 == mine.num;
		const int32_t *input = t->input + step.first_sequence * L, *target = t->target + step.first_sequence * L;
		model->document = t->document ? t->document + step.first_sequence * L : NULL;
		model_forward(model, input, B, &step, &t->sums);
		const double loss = model_loss(model, target, B, &step);
		t->sums.values[0] += model->layout.tensor.rank == 0 ? loss : 0; /* its ranks have the same tokens */
		model_backward(model, input, B, &step);
	}
	t->sums.values[1] = stop_requested;
	all_reduce_sum(&model->layout.world, TRAFFIC_STATISTICS, t->sums.values, t->sums.size);
	t->stop = t->sums.values[1] > 0;

	const double norm = sqrt(gradient_square(model));
	*m = (struct metrics){
		.step = step_number, .samples = t->state.samples + batch, .tokens = t->state.tokens + num_tokens, .batch = batch,
		.loss = step.num_targets ? t->sums.values[0] / step.num_targets : 0, .grad_norm = norm,
		.lr = learning_rate(c, step_number, t->steps, (double)t->state.tokens / t->tokens),
	};
	report_sums(t, m);
	const bool finite = isfinite(m->loss) && isfinite(norm) && isfinite(m->balance_loss) && isfinite(m->z_loss) && isfinite(m->lr);
	if (finite) {
		const bool clip = c->train.grad_clip > 0 && norm > c->train.grad_clip;
		update_weights(t, &(struct adamw){.lr = m->lr, .beta1 = c->optimizer.beta1, .beta2 = c->optimizer.beta2,
				.eps = c->optimizer.eps, .weight_decay = c->optimizer.weight_decay,
				.grad_scale = clip ? c->train.grad_clip / norm : 1, .step = step_number});
		update_router_statistics(t, num_tokens);
		t->state.step = step_number;
		t->state.samples = m->samples;
		t->state.tokens = m->tokens;
		memcpy(t->state.sources, t->next_sources, sizeof t->state.sources);
	}
	m->num_sources = t->state.num_sources > 1 ? t->state.num_sources : 0;
	for (int i = 0; i < m->num_sources; i++)
		t->source_samples[i] = t->next_sources[i].taken;
	m->source_samples = t->source_samples;
	model_timer(model, PHASE_OPTIMIZER);
	m->seconds = model->phase_start - start;
	t->communication = parallel_seconds() - communication;
	t->slowest = slowest_rank(&model->layout.world, m->seconds - t->communication);
	m->tokens_per_second = num_tokens / m->seconds;
	parallel_bytes(t->bytes_sent);
	for (int i = 0; i < NUM_TRAFFIC; i++)
		t->bytes_sent[i] -= sent[i];
	m->num_kinds = model->layout.world.size > 1 ? NUM_TRAFFIC : 0;
	m->kinds = traffic_names;
	m->bytes_sent = t->bytes_sent;
	if (!finite)
		return fail("step %lld: loss %g, balance loss %g, z-loss %g, gradient norm %g, learning rate %g: not finite, so the weights were "
				"left as they were and the run ends; the checkpoints stay. Lower schedule.peak_lr or lengthen its warm-up, and continue from a "
				"checkpoint before the trouble (remove later ones) or start anew; or look at the data of samples %lld to %lld",
				(long long)step_number, plain_nan(m->loss), plain_nan(m->balance_loss), plain_nan(m->z_loss), plain_nan(norm),
				plain_nan(m->lr), (long long)t->state.samples, (long long)(t->state.samples + batch - 1));
	return 0;
}

/* All ranks write their parts of a checkpoint into its temporary directory. */
static int write_parts(struct trainer *t, const char *dir)
{
	struct model *m = &t->model;
	const struct group *world = &m->layout.world;
	char path[PATH_LEN];
	int n, rc = -1;
	struct parameter *whole = global_parameters(&m->global, &n);
	if (parallel_agree(whole ? 0 : -1) == 0) {
		checkpoint_file(path, dir, "model", world->rank, world->size);
		rc = write_parameters(m, whole, n, path, false, 1, &m->params.memory, (const char *[]){""});
	}
	if (rc == 0) {
		checkpoint_file(path, dir, "optimizer", world->rank, world->size);
		rc = write_parameters(m, whole, n, path, true, 2, (real *[]){m->exp_avg, m->exp_avg_sq}, moment_prefixes);
	}
	free(whole);
	return rc;
}

int trainer_save(struct trainer *t)
{
	struct model *m = &t->model;
	const struct group *world = &m->layout.world;
	struct { int begun; char dir[PATH_LEN]; } directory = {0};
	int rc = 0;
	if (!isfinite(sum_of_squares(m->params.memory, m->num_elements)) || !isfinite(sum_of_squares(m->exp_avg, m->num_state)) ||
			!isfinite(sum_of_squares(m->exp_avg_sq, m->num_state)))
		rc = fail("after step %lld weights or optimizer state are not finite, and are not saved; the earlier checkpoints stay. Lower "
				"schedule.peak_lr or lengthen its warm-up", (long long)t->state.step);
	if (parallel_agree(rc) < 0)
		return -1;
	if (is_rank0(t))
		rc = directory.begun = checkpoint_begin(&t->config, &t->state, directory.dir);
	if (parallel_agree(rc < 0 ? -1 : 0) < 0)
		return -1;
	broadcast(world, &directory, sizeof directory);
	if (directory.begun == 1) /* it is there already */
		return 0;
	rc = write_parts(t, directory.dir);
	if (is_rank0(t)) {
		if (rc == 0)
			rc = checkpoint_commit(&t->config, &t->state, directory.dir, world->size);
		else
			checkpoint_abandon(directory.dir);
	}
	return parallel_agree(rc);
}

static void request_stop(int signal)
{
	(void)signal;
	stop_requested = 1;
}

void catch_signals(void)
{
	const struct sigaction stop = {.sa_handler = request_stop, .sa_flags = SA_RESTART | SA_RESETHAND};
	sigaction(SIGTERM, &stop, NULL);
	sigaction(SIGINT, &stop, NULL);
	sigaction(SIGHUP, &stop, NULL);
	sigaction(SIGUSR1, &stop, NULL);
	signal(SIGPIPE, SIG_IGN);
}

static void print_progress(const struct trainer *t, const struct metrics *m, double seconds_per_token)
{
	char line[320], left[32], valid[32] = "", ranks[64] = "";
	if (m->has_valid_loss)
		snprintf(valid, sizeof valid, "  valid %.4f", m->valid_loss);
	if (t->model.layout.world.size > 1)
		snprintf(ranks, sizeof ranks, "  communication %.0f%%, slowest rank %d", 100 * t->communication / m->seconds, t->slowest);
	snprintf(line, sizeof line, "step %lld/%lld %.0f%%  loss %.4f%s  lr %.2e  grad %.3f  batch %d  %.0f tokens/s%s  %s left", (long long)m->step,
			(long long)t->steps, 100.0 * m->tokens / t->tokens, m->loss, valid, m->lr, m->grad_norm, m->batch, m->tokens_per_second, ranks,
			format_duration(left, (t->tokens - m->tokens) * seconds_per_token));
	print_status(stdout, line, m->has_valid_loss || m->step == t->steps);
}

/* Saves, with the metrics so far on disk before the checkpoint that counts on them. */
static int save_progress(struct trainer *t, FILE *metrics_file)
{
	return parallel_agree(is_rank0(t) ? metrics_sync(metrics_file) : 0) < 0 ? -1 : trainer_save(t);
}

/* The mean loss over all tokens of the validation files. */
static int validate(struct trainer *t, double *loss)
{
	const struct config *c = &t->config;
	double sum = 0;
	int64_t tokens = 0;
	for (int i = 0; i < c->data.num_valid; i++) {
		struct evaluation e;
		if (evaluate(&t->model, &t->valid[i], NULL, c->data.document_mask, c->eval.max_windows, &e) < 0)
			return -1;
		sum += e.loss * e.tokens;
		tokens += e.tokens;
	}
	*loss = sum / tokens;
	return 0;
}

/* Trains from where the trainer stands to the end, or to a stop: batch, step, evaluation, metrics, checkpoint. */
static int training_loop(struct trainer *t, FILE *metrics_file)
{
	const struct config *c = &t->config;
	const int64_t first_token = t->state.tokens;
	const double start = clock_seconds();
	while (t->state.step < t->steps) {
		struct metrics m;
		const int64_t batch = trainer_next_batch(t);
		if (parallel_agree(batch < 0 ? -1 : 0) < 0)
			return -1;
		if (trainer_step(t, batch, &m) < 0) {
			char reason[sizeof error_text];
			memcpy(reason, error_text, sizeof reason);
			if (is_rank0(t))
				metrics_write(metrics_file, &m); /* shows the step that failed; its own failure matters less */
			return fail("%s", reason);
		}
		const bool last = m.step == t->steps;
		if (c->data.num_valid && (last || (c->eval.every && m.step % c->eval.every == 0))) {
			if (validate(t, &m.valid_loss) < 0)
				return -1;
			m.has_valid_loss = true;
		}
		if (is_rank0(t) && metrics_write(metrics_file, &m) < 0)
			return -1;
		if (m.has_valid_loss && !isfinite(m.valid_loss))
			return fail("step %lld: the validation loss is %g, and the weights are not saved; the earlier checkpoints stay",
					(long long)m.step, plain_nan(m.valid_loss));
		const bool stop = t->stop || m.step == c->train.stop_at_step;
		if (is_rank0(t) && (last || stop || m.step % c->log.every == 0 || m.has_valid_loss))
			print_progress(t, &m, (clock_seconds() - start) / (m.tokens - first_token));
		if ((last || stop || (c->checkpoint.every && m.step % c->checkpoint.every == 0)) && save_progress(t, metrics_file) < 0)
			return -1;
		if (stop && !last) {
			char line[128];
			snprintf(line, sizeof line, "stopped after step %lld of %lld and saved; the same command continues", (long long)m.step,
					(long long)t->steps);
			if (is_rank0(t))
				print_status(stdout, line, true);
			return 0;
		}
	}
	if (is_rank0(t))
		printf("done: %lld steps, %lld tokens, checkpoint %s/step-%07lld\n", (long long)t->state.step, (long long)t->state.tokens,
			c->train.output_dir, (long long)t->state.step);
	return 0;
}

int trainer_run(struct trainer *t)
{
	if (t->state.step >= t->steps) {
		if (is_rank0(t))
			printf("nothing is left to do: %lld of %lld steps are done\n", (long long)t->state.step, (long long)t->steps);
		return 0;
	}
	FILE *f = is_rank0(t) ? metrics_open(t->config.train.output_dir, t->state.step) : NULL;
	if (parallel_agree(is_rank0(t) && !f ? -1 : 0) < 0)
		return -1;
	int rc = training_loop(t, f);
	if (rc < 0 && is_rank0(t) && is_terminal(stdout))
		printf("\n"); /* the error goes on a line of its own */
	if (f && fclose(f) && rc == 0)
		rc = fail("%s/metrics.jsonl: %s", t->config.train.output_dir, strerror(errno));
	return rc;
}

/* ============================================================================================================
 * Evaluation
 * ========================================================================================================== */

int evaluate(struct model *m, const struct tokens *data, const struct tokenizer *tokenizer, bool document_mask, int64_t max_windows,
		struct evaluation *e)
{
	const int64_t L = m->seq_len, all = count_windows(data, L), windows = max_windows && max_windows < all ? max_windows : all;
	int32_t *input = calloc(3 * L, sizeof *input), *target = input + L, *document = document_mask ? target + L : NULL;
	if (!input)
		return fail("out of memory for a window of %lld tokens", (long long)L);
	*e = (struct evaluation){0};
	double sums[3] = {0}, start = clock_seconds(), shown = start; /* loss, its tokens, bytes */
	int rc = 0;
	const bool terminal = is_terminal(stderr);
	const struct group *data_group = &m->layout.data;
	for (int64_t first = 0; first < windows; first += data_group->size) {
		const int64_t i = first + data_group->rank;
		const int B = i < windows; /* a rank without a window still takes part in what the ranks do together */
		if (m->layout.world.rank == 0 && clock_seconds() - shown > (terminal ? 1 : 30)) { /* long ones show how far they are */
			char line[128], left[32];
			shown = clock_seconds();
			snprintf(line, sizeof line, "evaluating %.0f%%  %.0f tokens/s  %s left", 100.0 * i / windows, i * L / (shown - start),
					format_duration(left, (windows - i) * (shown - start) / (i + 1)));
			print_status(stderr, line, false);
		}
		if (B && rc == 0 && (rc = read_window(data, i, L, input, target, document)) < 0)
			memset(input, 0, 3 * L * sizeof *input); /* what the other ranks compute with this one needs no bad ids */
		m->document = document;
		model_forward(m, input, B, NULL, NULL);
		const double loss = model_loss(m, target, B, NULL);
		sums[0] += m->layout.tensor.rank == 0 ? loss : 0;
		for (int64_t t = 0; B && m->layout.tensor.rank == 0 && t < L; t++) {
			sums[1] += target[t] >= 0;
			sums[2] += tokenizer && target[t] >= 0 ? tokenizer_bytes(tokenizer, target[t]) : 0;
		}
	}
	m->document = NULL;
	all_reduce_sum(&m->layout.world, TRAFFIC_STATISTICS, sums, 3);
	e->tokens = (int64_t)sums[1], e->bytes = (int64_t)sums[2];
	if (terminal && shown > start)
		fprintf(stderr, "\r\033[K");
	free(input);
	e->loss = sums[0] / e->tokens;
	return parallel_agree(rc);
}

const struct parameter_parts_row parameter_parts[NUM_PARAMETER_PARTS] = {
	{"embedding", "word_embeddings"}, {"head", "lm_head"}, {"norms", "norm"}, {"attention", "attention."},
	{"router", "mlp.gate.weight"}, {"experts", "mlp.experts."}, {"shared and dense", "mlp."},
};

int count_parameters(struct parameter_count count[NUM_PARAMETER_PARTS + 1], double *flops, const struct model_config *c,
		int64_t seq_len)
{
	int n;
	struct parameter *whole = global_parameters(c, &n);
	int64_t products = 0;
	if (!whole)
		return -1;
	memset(count, 0, (NUM_PARAMETER_PARTS + 1) * sizeof *count);
	for (int i = 0; i < n; i++) {
		const struct parameter *t = &whole[i];
		const bool expert = strstr(t->name, "mlp.experts."), looked_up = i == 0 && !c->tie_word_embeddings;
		int part = 0;
		while (!strstr(t->name, parameter_parts[part].pattern))
			part++;
		count[part].total += parameter_size(t);
		if (!expert) {
			count[part].active += parameter_size(t);
			products += t->cols && !looked_up ? parameter_size(t) : 0;
		}
	}
	for (int part = 0; part < NUM_PARAMETER_PARTS; part++) {
		if (!strcmp(parameter_parts[part].name, "experts") && c->num_experts) {
			count[part].active = count[part].total / c->num_experts * c->num_experts_per_tok;
			products += count[part].active;
		}
		count[NUM_PARAMETER_PARTS].total += count[part].total;
		count[NUM_PARAMETER_PARTS].active += count[part].active;
	}
	*flops = 6.0 * products + 6.0 * c->num_hidden_layers * attention_width(c) * seq_len;
	free(whole);
	return 0;
}

/* "1, 2, 4": the divisors of both numbers. */
static const char *common_divisors(char out[128], int a, int b)
{
	int n = 0;
	for (int d = 1; d <= a && d <= b && n < 100; d++)
		if (a % d == 0 && b % d == 0)
			n += snprintf(out + n, 128 - n, "%s%d", n ? ", " : "", d);
	return out;
}

int layout_check(const struct model_config *c, int ranks, int tensor, int expert)
{
	char values[128];
	const int heads = c->num_key_value_heads, all_heads = c->num_attention_heads;
	if (ranks % tensor || heads % tensor || all_heads % tensor) {
		int both = 1;
		for (int d = 1; d <= heads; d++)
			if (heads % d == 0 && all_heads % d == 0)
				both = d;
		return fail("parallel.tensor is %d: it must divide the %d ranks, %d query heads and %d key-value heads; %s would work", tensor, ranks,
				all_heads, heads, common_divisors(values, ranks, both));
	}
	if (c->vocab_size < tensor)
		return fail("parallel.tensor is %d: it must not be more than the %d entries of the vocabulary", tensor, c->vocab_size);
	if (ranks % expert || c->num_experts % expert)
		return fail("parallel.expert is %d: it must divide the %d ranks and %d experts; %s would work", expert, ranks, c->num_experts,
				common_divisors(values, ranks, c->num_experts));
	return 0;
}
