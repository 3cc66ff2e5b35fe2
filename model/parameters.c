/*
 * model/parameters.c - the table of a model's parameters; which part of each a rank holds, and which part of the
 * optimizer's state it keeps.
 */
#include "model/parameters.h"

#include "files/base.h"
#include "parallel.h"
#include "files/config.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ============================================================================================================
 * Sizes
 * ========================================================================================================== */

int num_layers(const struct model_config *c)
{
	return c->num_hidden_layers + c->num_nextn_predict_layers;
}

bool is_mtp(const struct model_config *c, int layer)
{
	return layer >= c->num_hidden_layers;
}

int trained_layers(const struct model_config *c)
{
	return c->mtp_loss_scaling_factor > 0 ? num_layers(c) : c->num_hidden_layers;
}

int trained_mtp_layers(const struct model_config *c)
{
	return trained_layers(c) - c->num_hidden_layers;
}

int block_of_layer(const struct model_config *c, int layer)
{
	return 1 + layer + is_mtp(c, layer);
}

int head_block(const struct model_config *c)
{
	return 1 + c->num_hidden_layers;
}

int layer_of_block(const struct model_config *c, int block)
{
	return block == 0 || block == head_block(c) ? -1 : block - 1 - (block > head_block(c));
}

int last_block(const struct model_config *c)
{
	return 1 + num_layers(c);
}

bool is_trained(const struct model_config *c, int block)
{
	return block <= 1 + trained_layers(c);
}

bool has_experts(const struct model_config *c, int layer)
{
	return layer >= c->first_k_dense_replace;
}

int shared_width(const struct model_config *c, int layer)
{
	return has_experts(c, layer) ? c->num_shared_experts * c->moe_intermediate_size : c->intermediate_size;
}

int qkv_width(const struct model_config *c)
{
	return (c->num_attention_heads + 2 * c->num_key_value_heads) * c->head_dim;
}

int attention_width(const struct model_config *c)
{
	return c->num_attention_heads * c->head_dim;
}

/* ============================================================================================================
 * The table: names, sizes, and which part of each parameter a rank holds
 * ========================================================================================================== */

/* A walk over the parameters that a rank holds, in the order of memory. It counts them, and fills the table and the
 * pointers where these are given. */
struct parameter_walk {
	const struct layout *layout;
	struct parameter *parameters; /* NULL: only count */
	real *memory;                /* NULL: only count */
	int num_parameters, block, expert;
	int64_t num_elements;
};

int64_t parameter_size(const struct parameter *t)
{
	return (t->shard.num_rows[0] + t->shard.num_rows[1] + t->shard.num_rows[2]) * t->shard.num_cols;
}

/* Adds the given shard of a parameter, whose name is "prefix" + "name", to the walk. Returns where it is in memory. */
static real *add_shard(struct parameter_walk *w, const char *prefix, const char *name, int64_t rows, int64_t cols,
		enum init init, enum sharing sharing, struct shard shard)
{
	struct parameter t = {.rows = rows, .cols = cols, .shard = shard, .offset = w->num_elements, .block = w->block,
			.expert = w->expert, .init = init, .sharing = sharing};
	if (w->parameters) {
		snprintf(t.name, sizeof t.name, "%s%s", prefix, name);
		w->parameters[w->num_parameters] = t;
	}
	w->num_parameters++;
	w->num_elements += parameter_size(&t);
	return w->memory ? w->memory + t.offset : NULL;
}

/* Adds a parameter of which this rank holds everything. */
static real *add_parameter(struct parameter_walk *w, const char *prefix, const char *name, int64_t rows, int64_t cols,
		enum init init, enum sharing sharing)
{
	const struct shard all = {.num_rows = {rows}, .num_cols = cols ? cols : 1};
	return add_shard(w, prefix, name, rows, cols, init, sharing, all);
}

/* Adds this rank's rows of a parameter that the tensor group splits by vocabulary. */
static real *add_vocabulary(struct parameter_walk *w, const char *name, int64_t V, int64_t H)
{
	const struct group *g = &w->layout->tensor;
	const int64_t first = shard_begin(V, g->rank, g->size), end = shard_begin(V, g->rank + 1, g->size);
	const struct shard rows = {.row = {first}, .num_rows = {end - first}, .num_cols = H};
	return add_shard(w, "", name, V, H, INIT_NORMAL, SHARED_BY_DATA, rows);
}

/* Adds the gate, up and down matrices of one SwiGLU of the given width. Gate and up are neighbours: one product
 * computes both. */
static void add_swiglu(struct parameter_walk *w, const char *prefix, int64_t H, int64_t width, real **gate_up,
		real **down, enum sharing sharing)
{
	*gate_up = add_parameter(w, prefix, "gate_proj.weight", width, H, INIT_NORMAL, sharing);
	add_parameter(w, prefix, "up_proj.weight", width, H, INIT_NORMAL, sharing);
	if (down)
		*down = add_parameter(w, prefix, "down_proj.weight", H, width, INIT_NORMAL, sharing);
}

/* Adds what this rank holds of layer l; c is the whole model's config. First what all ranks have, then heads, then
 * experts. */
static void add_layer(struct parameter_walk *w, const struct model_config *c, int l, struct layer_params *p)
{
	const int64_t H = c->hidden_size, I = c->moe_intermediate_size, d = c->head_dim;
	char layer[48], prefix[96]; /* well within MAX_NAME with what follows */
	snprintf(layer, sizeof layer, "model.layers.%d.", l);
	*p = (struct layer_params){0};
	p->attention_norm = add_parameter(w, layer, "input_layernorm.weight", H, 0, INIT_ONES, SHARED_BY_WORLD);
	p->ffn_norm = add_parameter(w, layer, "post_attention_layernorm.weight", H, 0, INIT_ONES, SHARED_BY_WORLD);
	if (c->use_qk_norm) {
		p->qk_norm = add_parameter(w, layer, "attention.query_layernorm.weight", d, 0, INIT_ONES, SHARED_BY_WORLD);
		add_parameter(w, layer, "attention.key_layernorm.weight", d, 0, INIT_ONES, SHARED_BY_WORLD);
	}
	if (is_mtp(c, l)) {
		p->embedding_norm = add_parameter(w, layer, "enorm.weight", H, 0, INIT_ONES, SHARED_BY_WORLD);
		p->hidden_norm = add_parameter(w, layer, "hnorm.weight", H, 0, INIT_ONES, SHARED_BY_WORLD);
		p->final_norm = add_parameter(w, layer, "final_layernorm.weight", H, 0, INIT_ONES, SHARED_BY_WORLD);
		p->eh_proj = add_parameter(w, layer, "eh_proj.weight", H, 2 * H, INIT_NORMAL, SHARED_BY_WORLD);
	}
	if (c->use_bias)
		p->dense_bias = add_parameter(w, layer, "attention.dense.bias", H, 0, INIT_ZEROS, SHARED_BY_WORLD);
	if (has_experts(c, l))
		p->router = add_parameter(w, layer, "mlp.gate.weight", c->num_experts, H, INIT_ROUTER, SHARED_BY_WORLD);
	if (has_experts(c, l) && c->architecture == BAILING_MOE_V2)
		p->expert_bias = add_parameter(w, layer, EXPERT_BIAS, c->num_experts, 0, INIT_ZEROS, SHARED_BY_WORLD);
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
		p->qkv_bias = add_shard(w, layer, "attention.query_key_value.bias", qkv_width(c), 0, INIT_ZEROS,
				SHARED_BY_DATA, qkv);
	qkv.num_cols = H;
	p->qkv = add_shard(w, layer, "attention.query_key_value.weight", qkv_width(c), H, INIT_NORMAL, SHARED_BY_DATA,
			qkv);
	p->dense = add_shard(w, layer, "attention.dense.weight", H, attention_width(c), INIT_NORMAL, SHARED_BY_DATA,
			(struct shard){.num_rows = {H}, .col = rank * q_rows, .num_cols = q_rows});

	/* [experts, 2I, H] and [experts, H, I]: all the gates and ups first, then all the downs, for the grouped
	 * products. */
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

/* Adds what this rank holds of the model; c is the whole model's config. p->layer must have room for all layers. */
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
	p->lm_head = c->tie_word_embeddings ? p->embedding :
			add_vocabulary(w, "lm_head.weight", c->vocab_size, c->hidden_size);
	for (int l = c->num_hidden_layers; l < num_layers(c); l++) {
		w->block++;
		add_layer(w, c, l, &p->layer[l]);
	}
}

void place_params(struct params *p, real *memory, const struct model_config *c, const struct layout *layout)
{
	add_model(&(struct parameter_walk){.layout = layout, .memory = memory}, c, p);
}

/* The table of a rank of a layout, in the order of memory; tensors that all ranks hold come in the same order
 * everywhere. To be freed; NULL when memory is short. */
static struct parameter *list_parameters(const struct model_config *c, const struct layout *layout, int *n)
{
	struct params params = {.layer = calloc(num_layers(c), sizeof *params.layer)};
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

struct model_config local_config(const struct model_config *c, const struct layout *l)
{
	struct model_config local = *c;
	local.num_attention_heads /= l->tensor.size;
	local.num_key_value_heads /= l->tensor.size;
	local.vocab_size = (int)(shard_begin(c->vocab_size, l->tensor.rank + 1, l->tensor.size) -
			shard_begin(c->vocab_size, l->tensor.rank, l->tensor.size));
	return local;
}

const struct parameter_part parameter_parts[NUM_PARAMETER_PARTS] = {
	{"embedding", "word_embeddings"}, {"head", "lm_head"}, {"norms", "norm"}, {"attention", "attention."},
	{"router", "mlp.gate."}, {"experts", "mlp.experts."}, {"shared and dense", "mlp."}, {"MTP layers", "model.layers."},
};

/* The part of a parameter of the whole model. */
static int part_of(const struct parameter *t, const struct model_config *c)
{
	int part = 0;
	if (t->block > head_block(c))
		return NUM_PARAMETER_PARTS - 1;
	while (!strstr(t->name, parameter_parts[part].pattern))
		part++;
	return part;
}

int count_parameters(struct parameter_count count[NUM_PARAMETER_PARTS + 1], double *flops,
		const struct model_config *c, int64_t seq_len)
{
	int n;
	struct parameter *global = global_parameters(c, &n);
	double products = (double)trained_mtp_layers(c) * c->vocab_size * c->hidden_size; /* by the head */
	int64_t experts[NUM_PARAMETER_PARTS] = {0}; /* of each part, those of routed experts */
	if (!global)
		return -1;
	memset(count, 0, (NUM_PARAMETER_PARTS + 1) * sizeof *count);
	for (int i = 0; i < n; i++) {
		const struct parameter *t = &global[i];
		const bool looked_up = i == 0 && !c->tie_word_embeddings;
		const int part = part_of(t, c);
		count[part].total += parameter_size(t);
		if (strstr(t->name, "mlp.experts."))
			experts[part] += parameter_size(t);
		else if (t->cols && !looked_up && is_trained(c, t->block))
			products += parameter_size(t);
	}
	for (int part = 0; part < NUM_PARAMETER_PARTS; part++) {
		const int64_t chosen = experts[part] ? experts[part] / c->num_experts * c->num_experts_per_tok : 0;
		count[part].active = count[part].total - experts[part] + chosen;
		if (trained_mtp_layers(c) || part < NUM_PARAMETER_PARTS - 1)
			products += chosen;
		count[NUM_PARAMETER_PARTS].total += count[part].total;
		count[NUM_PARAMETER_PARTS].active += count[part].active;
	}
	*flops = 6.0 * products + 6.0 * trained_layers(c) * attention_width(c) * seq_len;
	free(global);
	return 0;
}

/* ============================================================================================================
 * Sharded optimizer state: of each bucket, one shard a rank
 * ========================================================================================================== */

const struct group *sharing_group(const struct layout *l, enum sharing sharing)
{
	return sharing == SHARED_BY_WORLD ? &l->world : sharing == SHARED_BY_DATA ? &l->data : &l->expert_data;
}

int64_t own_shard(const struct layout *l, const struct bucket *b, int64_t *size)
{
	const struct group *g = sharing_group(l, b->sharing);
	const int64_t begin = shard_begin(b->size, g->rank, g->size);
	*size = shard_begin(b->size, g->rank + 1, g->size) - begin;
	return begin;
}

/* Divides the parameters of a table into buckets. Returns their number, and fills them in unless `buckets` is NULL.
 * *num_state: elements of this rank's shards. */
static int make_buckets(struct bucket *buckets, int64_t *num_state, const struct parameter *parameters,
		int num_parameters, const struct model_config *c, const struct layout *l)
{
	int n = 0;
	*num_state = 0;
	for (int i = 0; i < num_parameters;) {
		const struct parameter *first = &parameters[i];
		int64_t size = 0;
		for (; i < num_parameters && parameters[i].block == first->block &&
				parameters[i].sharing == first->sharing; i++)
			size += parameter_size(&parameters[i]);
		for (int64_t done = 0; done < size; done += BUCKET_SIZE) {
			const int64_t left = size - done;
			const struct bucket b = {.offset = first->offset + done, .size = left < BUCKET_SIZE ? left : BUCKET_SIZE,
					.state = *num_state, .block = first->block, .trained = is_trained(c, first->block),
					.sharing = first->sharing};
			int64_t own;
			own_shard(l, &b, &own);
			*num_state += own;
			if (buckets)
				buckets[n] = b;
			n++;
		}
	}
	return n;
}

int parameter_table_init(struct parameter_table *table, const struct model_config *c, const struct layout *layout)
{
	*table = (struct parameter_table){.layout = *layout};
	if (!(table->parameters = list_parameters(c, layout, &table->num_parameters)))
		return -1;
	for (int i = 0; i < table->num_parameters; i++)
		table->num_elements += parameter_size(&table->parameters[i]);
	const int n = make_buckets(NULL, &table->num_state, table->parameters, table->num_parameters, c, layout);
	if (!(table->buckets = calloc(n, sizeof *table->buckets))) {
		parameter_table_free(table);
		return fail("out of memory for the model's %d gradient buckets", n);
	}
	table->num_buckets = make_buckets(table->buckets, &table->num_state, table->parameters, table->num_parameters, c,
			layout);
	return 0;
}

void parameter_table_free(struct parameter_table *table)
{
	free(table->parameters);
	free(table->buckets);
	*table = (struct parameter_table){0};
}

bool next_optimizer_shard(const struct parameter_table *table, struct optimizer_shard_iterator *w,
		struct optimizer_shard *p)
{
	for (; w->bucket < table->num_buckets; w->bucket++) {
		const struct bucket *b = &table->buckets[w->bucket];
		const struct parameter *t = &table->parameters[w->parameter],
				*end_of_table = table->parameters + table->num_parameters;
		int64_t size;
		const int64_t begin = b->offset + own_shard(&table->layout, b, &size), end = begin + size;
		while (t < end_of_table && t->offset + parameter_size(t) <= begin)
			t++;
		w->parameter = (int)(t - table->parameters);
		if (t == end_of_table || t->offset >= end)
			continue;
		const int64_t last = t->offset + parameter_size(t), from = t->offset > begin ? t->offset : begin,
				to = last < end ? last : end;
		*p = (struct optimizer_shard){t, from - t->offset, to - t->offset, b->state + from - begin};
		if (last <= end)
			w->parameter++;
		if (last >= end)
			w->bucket++;
		return true;
	}
	return false;
}

/* ============================================================================================================
 * Shards in the whole tensor
 * ========================================================================================================== */

int64_t global_row(const struct shard *s, int64_t r)
{
	int i = 0;
	for (; i < 2 && r >= s->num_rows[i]; i++)
		r -= s->num_rows[i];
	return s->row[i] + r;
}

int64_t global_run(const struct parameter *t, int64_t from, int64_t end, int64_t *first)
{
	const struct shard *s = &t->shard;
	const int64_t cols = t->cols ? t->cols : 1, row = from / s->num_cols, col = from % s->num_cols;
	*first = global_row(s, row) * cols + s->col + col;
	if (s->num_cols < cols)
		return end - from < s->num_cols - col ? end - from : s->num_cols - col;
	/* Whole rows: up to where this range of rows ends, and the ranges that follow it in the whole tensor too. */
	int64_t rows_end = s->num_rows[0];
	for (int i = 1; i < 3 && (rows_end <= row || s->row[i] == s->row[i - 1] + s->num_rows[i - 1]); i++)
		rows_end += s->num_rows[i];
	return end < rows_end * cols ? end - from : rows_end * cols - from;
}
