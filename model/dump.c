/*
 * model/dump.c - what a training step computed, whole over all ranks, in a file.
 *
 * While the step goes on, each rank copies what it computes. At the end the ranks send it to rank 0, tensor by tensor
 * in the order of the file, and rank 0 puts it together and writes.
 */
#define _GNU_SOURCE
#include "model/dump.h"

#include "files/base.h"
#include "files/heartbeat.h"
#include "files/trace.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "files/tensors.h"
#include "files/safetensors.h"
#include "model/parameters.h"
#include "model/weight_files.h"
#include "model/memory.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifndef DUMP_BLOCK              /* a build for tests has less */
#define DUMP_BLOCK (16 << 20)   /* bytes of rows that are put together at a time, or one row */
#endif

/* How an array is divided among the ranks of a tensor group. */
enum form {
	OWN_TOKENS,                  /* whole rows of the rank's N tokens */
	OWN_HEADS,                   /* of all T tokens the columns of the rank's heads */
	OWN_VOCABULARY,              /* of all T tokens the columns of the rank's vocabulary entries */
	EVERYWHERE,                  /* all ranks have the same: rank 0 of the group gives it */
};

static const struct {
	const char *name;
	enum form form;
	bool gradient;               /* ling computes its gradient */
} arrays[NUM_DUMPED] = {
	[DUMP_EMBEDDING] = {"embedding", OWN_TOKENS, true},
	[DUMP_MTP_EMBEDDING_NORM] = {"mtp / enorm", OWN_TOKENS, true},
	[DUMP_MTP_HIDDEN_NORM] = {"mtp / hnorm", OWN_TOKENS, true},
	[DUMP_MTP_PROJECTION] = {"mtp / eh_proj", OWN_TOKENS, true},
	[DUMP_ATTENTION_NORM] = {"attention / norm", OWN_TOKENS, true},
	[DUMP_QKV] = {"attention / qkv", OWN_HEADS, true},
	[DUMP_QK_NORM] = {"attention / qk norm", OWN_HEADS, true},
	[DUMP_ROPE] = {"attention / rope", OWN_HEADS, true},
	[DUMP_ATTENTION_CORE] = {"attention / core", OWN_HEADS, true},
	[DUMP_ATTENTION_OUTPUT] = {"attention / output", OWN_TOKENS, true},
	[DUMP_FFN_NORM] = {"ffn / norm", OWN_TOKENS, true},
	[DUMP_ROUTER_LOGITS] = {"router / logits", OWN_TOKENS, true},
	[DUMP_ROUTER_SOFTMAX] = {"router / softmax", OWN_TOKENS, false},
	[DUMP_ROUTER_TOPK] = {"router / top-k", OWN_TOKENS, false},
	[DUMP_ROUTER_WEIGHTS] = {"router / weights", OWN_TOKENS, true},
	[DUMP_EXPERTS_GATE_UP] = {"experts / gate_up", OWN_TOKENS, true},
	[DUMP_EXPERTS_DOWN] = {"experts / down", OWN_TOKENS, false},
	[DUMP_SHARED_GATE_UP] = {"shared / gate_up", OWN_TOKENS, true},
	[DUMP_LAYER_OUTPUT] = {"output", OWN_TOKENS, true},
	[DUMP_NORM] = {"norm", OWN_TOKENS, true},
	[DUMP_HEAD_LOGITS] = {"head / logits", OWN_VOCABULARY, true},
	[DUMP_HEAD_LOSS] = {"head / loss", EVERYWHERE, false},
};

/* What this rank has of one array, micro-batch after micro-batch. */
struct kept { uint8_t *data; int64_t micro_batches; }; /* how many of them have been recorded */

struct dump {
	int64_t steps[MAX_DUMPS];
	int num_steps;
	char dir[PATH_LEN];
	char run[PATH_LEN];          /* on rank 0: the run's directory, by which its files are known */
	struct model_config config;  /* of the whole model */
	struct layout layout;
	int micro_batch, seq_len;    /* sequences of a whole micro-batch, tokens of a sequence */
	struct parameter *global;    /* [num_parameters] the whole model's, */
	int num_parameters;
	struct optimizer_shard_iterator *walks; /* [num_parameters] and where this rank's shards of each begin */
	/* of the current step */
	bool active;
	int64_t step, batch;
	int64_t i, T;                /* the micro-batch of this rank, and its tokens */
	struct kept *kept;           /* [trained_layers() + 1, NUM_DUMPED, 2] see kept_of */
	uint8_t *memory;             /* of all of them */
};

/* ============================================================================================================
 * The tensors: names, shapes, and which part of each a rank has
 * ========================================================================================================== */

/* A row, what belongs to one token: [cols, depth] elements of `size` bytes; cols 0 and depth 0 where there is no such
 * dimension. elements 0: the model has no such tensor. */
struct row { int64_t cols, depth, elements; int size; };

static struct row row_of(const struct model_config *c, enum dumped what, int l)
{
	struct row r = {.cols = c->hidden_size, .size = sizeof(real)};
	const bool in_layer = what >= DUMP_ATTENTION_NORM && what <= DUMP_LAYER_OUTPUT;
	const bool of_mtp = what >= DUMP_MTP_EMBEDDING_NORM && what <= DUMP_MTP_PROJECTION;
	const bool there = in_layer ? l >= 0 : is_mtp(c, l) || (l < 0 && !of_mtp);
	const bool of_experts = what >= DUMP_ROUTER_LOGITS && what <= DUMP_EXPERTS_DOWN;
	if (!there || (of_experts && !has_experts(c, l)) ||
			(what == DUMP_QK_NORM && !c->use_qk_norm) || (what == DUMP_SHARED_GATE_UP && !shared_width(c, l)))
		return (struct row){0};
	switch (what) {
	case DUMP_QKV: case DUMP_QK_NORM: case DUMP_ROPE: r.cols = qkv_width(c); break;
	case DUMP_ATTENTION_CORE: r.cols = attention_width(c); break;
	case DUMP_ROUTER_LOGITS: case DUMP_ROUTER_SOFTMAX: r.cols = c->num_experts; break;
	case DUMP_ROUTER_TOPK: r.size = sizeof(int32_t); r.cols = c->num_experts_per_tok; break;
	case DUMP_ROUTER_WEIGHTS: r.cols = c->num_experts_per_tok; break;
	case DUMP_EXPERTS_GATE_UP: r.cols = c->num_experts_per_tok; r.depth = 2 * c->moe_intermediate_size; break;
	case DUMP_EXPERTS_DOWN: r.cols = c->num_experts_per_tok; r.depth = c->hidden_size; break;
	case DUMP_SHARED_GATE_UP: r.cols = 2 * shared_width(c, l); break;
	case DUMP_HEAD_LOGITS: r.cols = c->vocab_size; break;
	case DUMP_HEAD_LOSS: r.cols = 0; break;
	default: break;
	}
	r.elements = (r.cols ? r.cols : 1) * (r.depth ? r.depth : 1);
	return r;
}

/* The elements of a row that rank `rank` of a tensor group has: up to three ranges, one after the other in its memory.
 * Returns how many they are. */
struct range { int64_t begin, num; };
static int64_t own_columns(struct range range[3], const struct dump *d, enum dumped what, int l, int rank)
{
	const int size = d->layout.tensor.size;
	const struct model_config *c = &d->config;
	memset(range, 0, 3 * sizeof *range);
	if (arrays[what].form == OWN_HEADS) { /* query, key, value heads: each a range of its kind */
		const int kinds = what == DUMP_ATTENTION_CORE ? 1 : 3;
		int64_t before = 0;
		for (int i = 0; i < kinds; i++) {
			const int64_t all = (int64_t)(i ? c->num_key_value_heads : c->num_attention_heads) * c->head_dim;
			range[i] = (struct range){before + rank * all / size, all / size};
			before += all;
		}
	} else if (arrays[what].form == OWN_VOCABULARY) {
		range[0].begin = shard_begin(c->vocab_size, rank, size);
		range[0].num = shard_begin(c->vocab_size, rank + 1, size) - range[0].begin;
	} else if (arrays[what].form == OWN_TOKENS || rank == 0)
		range[0].num = row_of(c, what, l).elements;
	return range[0].num + range[1].num + range[2].num;
}

/* Of the T tokens of a micro-batch, those whose rows rank `rank` of a tensor group has. Returns how many. */
static int64_t own_rows(const struct dump *d, enum dumped what, int rank, int64_t T, int64_t *first)
{
	const int size = d->layout.tensor.size;
	const bool split = arrays[what].form == OWN_TOKENS;
	*first = split ? shard_begin(T, rank, size) : 0;
	return split ? shard_begin(T, rank + 1, size) - *first : T;
}

static struct kept *kept_of(const struct dump *d, enum dumped what, int l, bool gradient)
{
	return &d->kept[((int64_t)(l + 1) * NUM_DUMPED + what) * 2 + gradient];
}

/* Where row `row` of micro-batch i is in this rank's memory of an array. */
static uint8_t *kept_row(const struct dump *d, enum dumped what, int l, bool gradient, int64_t i, int64_t row)
{
	struct range range[3];
	int64_t first;
	const int rank = d->layout.tensor.rank;
	const int64_t rows = own_rows(d, what, rank, (int64_t)d->micro_batch * d->seq_len, &first);
	return kept_of(d, what, l, gradient)->data +
			(i * rows + row) * own_columns(range, d, what, l, rank) * row_of(&d->config, what, l).size;
}

/* Gives each array its place in this rank's memory for a batch, and returns the bytes of all. memory NULL: only
 * counts. */
static double place_arrays(struct dump *d, uint8_t *memory, int64_t batch)
{
	const int64_t num = micro_batches_of_rank(&d->layout.data, batch, d->micro_batch).num;
	double bytes = 0;
	for (int l = -1; l < trained_layers(&d->config); l++)
		for (enum dumped what = 0; what < NUM_DUMPED; what++)
			for (int gradient = 0; gradient <= arrays[what].gradient; gradient++) {
				struct range range[3];
				int64_t first;
				const struct row row = row_of(&d->config, what, l);
				if (!row.elements)
					continue;
				const int64_t size = num * own_rows(d, what, d->layout.tensor.rank, (int64_t)d->micro_batch *
						d->seq_len, &first) * own_columns(range, d, what, l, d->layout.tensor.rank) * row.size;
				if (memory)
					*kept_of(d, what, l, gradient) = (struct kept){.data = memory + (int64_t)bytes};
				bytes += (size + 7) / 8 * 8;
			}
	return bytes;
}

/* ============================================================================================================
 * The list of a file's tensors
 * ========================================================================================================== */

enum source { FROM_ARRAY, FROM_VALUE, FROM_GRADIENT, FROM_MOMENT_1, FROM_MOMENT_2, FROM_WEIGHT };
static const char *const parameter_suffixes[] = {
	[FROM_GRADIENT] = " / gradient", [FROM_MOMENT_1] = " / moment 1", [FROM_MOMENT_2] = " / moment 2",
	[FROM_WEIGHT] = " / updated"};

struct entry {
	char name[MAX_NAME + 16];
	enum source source;
	enum dumped what; int layer; bool gradient; /* FROM_ARRAY */
	double value;                /* FROM_VALUE */
	int parameter;               /* else: which of the whole model's */
};
struct list { struct entry *entries; int n; size_t capacity; };

static struct entry *add_entry(struct list *list, struct entry e)
{
	list->entries = grow(list->entries, list->n, &list->capacity, 1, sizeof *list->entries);
	list->entries[list->n] = e;
	return &list->entries[list->n++];
}

static void add_array(struct list *list, const struct dump *d, enum dumped what, int l, bool gradient)
{
	char layer[32] = "";
	if (!row_of(&d->config, what, l).elements)
		return;
	const bool dense = what == DUMP_SHARED_GATE_UP && !has_experts(&d->config, l);
	if (l >= 0)
		snprintf(layer, sizeof layer, "layer %d / ", l);
	struct entry *e = add_entry(list, (struct entry){.source = FROM_ARRAY, .what = what, .layer = l,
			.gradient = gradient});
	snprintf(e->name, sizeof e->name, "%s%s%s", layer, dense ? "dense / gate_up" : arrays[what].name,
			gradient ? " / gradient" : "");
}

static void add_value(struct list *list, const char *name, double value)
{
	struct entry *e = add_entry(list, (struct entry){.source = FROM_VALUE, .value = value});
	snprintf(e->name, sizeof e->name, "%s", name);
}

static void add_parameter(struct list *list, const struct dump *d, int i, enum source source)
{
	struct entry *e = add_entry(list, (struct entry){.source = source, .parameter = i});
	snprintf(e->name, sizeof e->name, "%s%s", d->global[i].name, parameter_suffixes[source]);
}

/* Adds the gradients of all parameters whose names begin with the prefix of layer l (-1: of none) and hold `part`; and
 * hold `also`, which may be "". */
static void add_gradients(struct list *list, const struct dump *d, int l, const char *part, const char *also)
{
	char prefix[48] = "";
	if (l >= 0)
		snprintf(prefix, sizeof prefix, "model.layers.%d.", l);
	for (int i = 0; i < d->num_parameters; i++) {
		const char *name = d->global[i].name;
		if (!strncmp(name, prefix, strlen(prefix)) && strstr(name, part) && strstr(name, also))
			add_parameter(list, d, i, FROM_GRADIENT);
	}
}

/* The gradients of layer l in the order of the backward pass: behind that of an operation's output, those of its
 * weights. The outputs of the experts' and the shared down products are summands of the layer's, and have its
 * gradient. */
static void list_layer_backward(struct list *list, const struct dump *d, int l)
{
	static const char *const gate_up[] = {".gate_proj.", ".up_proj."};
	const char *const shared = has_experts(&d->config, l) ? "mlp.shared_experts." : "mlp.";
	add_array(list, d, DUMP_LAYER_OUTPUT, l, true);
	add_gradients(list, d, l, ".down_proj.", "");
	if (has_experts(&d->config, l)) {
		add_array(list, d, DUMP_EXPERTS_GATE_UP, l, true);
		for (int i = 0; i < 2; i++)
			add_gradients(list, d, l, gate_up[i], "mlp.experts.");
		add_array(list, d, DUMP_ROUTER_WEIGHTS, l, true);
		add_array(list, d, DUMP_ROUTER_LOGITS, l, true);
		add_gradients(list, d, l, "mlp.gate.weight", "");
	}
	add_array(list, d, DUMP_SHARED_GATE_UP, l, true);
	for (int i = 0; i < 2; i++)
		add_gradients(list, d, l, gate_up[i], shared);
	add_array(list, d, DUMP_FFN_NORM, l, true);
	add_gradients(list, d, l, "post_attention_layernorm.", "");
	add_array(list, d, DUMP_ATTENTION_OUTPUT, l, true);
	add_gradients(list, d, l, "attention.dense.", "");
	add_array(list, d, DUMP_ATTENTION_CORE, l, true);
	add_array(list, d, DUMP_ROPE, l, true);
	add_array(list, d, DUMP_QK_NORM, l, true);
	add_gradients(list, d, l, "attention.query_layernorm.", "");
	add_gradients(list, d, l, "attention.key_layernorm.", "");
	add_array(list, d, DUMP_QKV, l, true);
	add_gradients(list, d, l, "attention.query_key_value.", "");
	add_array(list, d, DUMP_ATTENTION_NORM, l, true);
	add_gradients(list, d, l, "input_layernorm.", "");
}

/* The same of an MTP layer, with its own norms and projection. Its gradient of the embedding is part of the model's. */
static void list_mtp_backward(struct list *list, const struct dump *d, int l)
{
	add_array(list, d, DUMP_NORM, l, true);
	add_gradients(list, d, l, "final_layernorm.", "");
	list_layer_backward(list, d, l);
	add_array(list, d, DUMP_MTP_PROJECTION, l, true);
	add_gradients(list, d, l, "eh_proj.", "");
	add_array(list, d, DUMP_MTP_HIDDEN_NORM, l, true);
	add_gradients(list, d, l, "hnorm.", "");
	add_array(list, d, DUMP_MTP_EMBEDDING_NORM, l, true);
	add_gradients(list, d, l, "enorm.", "");
	add_array(list, d, DUMP_EMBEDDING, l, true);
}

/* All tensors of a file, in its order. */
static struct list list_tensors(const struct dump *d, const struct dump_result *r)
{
	struct list list = {0};
	const int layers = d->config.num_hidden_layers, all = trained_layers(&d->config);
	add_array(&list, d, DUMP_EMBEDDING, -1, false);
	for (int l = 0; l < layers; l++)
		for (enum dumped what = DUMP_ATTENTION_NORM; what <= DUMP_LAYER_OUTPUT; what++)
			add_array(&list, d, what, l, false);
	add_array(&list, d, DUMP_NORM, -1, false);
	for (int l = layers; l < all; l++)
		for (enum dumped what = DUMP_EMBEDDING; what <= DUMP_NORM; what++)
			add_array(&list, d, what, l, false);
	add_array(&list, d, DUMP_HEAD_LOGITS, -1, false);
	add_array(&list, d, DUMP_HEAD_LOSS, -1, false);
	add_value(&list, "loss", r->loss);
	for (int l = layers; l < all; l++) {
		add_array(&list, d, DUMP_HEAD_LOGITS, l, false);
		add_array(&list, d, DUMP_HEAD_LOSS, l, false);
	}
	if (all > layers)
		add_value(&list, "mtp loss", r->mtp_loss);
	add_value(&list, "balance loss", r->balance_loss);
	add_value(&list, "z-loss", r->z_loss);

	add_array(&list, d, DUMP_HEAD_LOGITS, -1, true);
	for (int l = layers; l < all; l++)
		add_array(&list, d, DUMP_HEAD_LOGITS, l, true);
	add_gradients(&list, d, -1, "lm_head.", ""); /* tied, there is none: the embedding's is the sum of both */
	for (int l = all - 1; l >= layers; l--)
		list_mtp_backward(&list, d, l);
	add_array(&list, d, DUMP_NORM, -1, true);
	add_gradients(&list, d, -1, "model.norm.", "");
	for (int l = layers - 1; l >= 0; l--)
		list_layer_backward(&list, d, l);
	add_array(&list, d, DUMP_EMBEDDING, -1, true);
	add_gradients(&list, d, -1, "word_embeddings.", "");

	add_value(&list, "gradient norm", r->grad_norm);
	for (int i = 0; i < d->num_parameters && r->taken; i++)
		for (enum source s = FROM_MOMENT_1; s <= FROM_WEIGHT; s++)
			add_parameter(&list, d, i, s);
	return list;
}

/* ============================================================================================================
 * While the step goes on
 * ========================================================================================================== */

void dump_micro_batch(struct model *m, int64_t i, int B)
{
	if (!m->dump)
		return;
	m->dump->i = i;
	m->dump->T = (int64_t)B * m->seq_len;
}

/* out [N k, width] = the rows of this rank's assignments, by token and choice; rows [N k, width] are in the order of
 * x->position. */
static void rows_by_choice(real *out, const real *rows, const struct layer_activations *x, int64_t R, int64_t width)
{
	for (int64_t i = 0; i < R; i++)
		copy_array(out + i * width, rows + x->position[i] * width, width);
}

/* The same from the expert rows of this rank, sorted by expert, one for each assignment: they first go back to their
 * tokens' ranks. */
static void expert_rows_by_choice(real *out, const real *expert_rows, const struct model *m,
		const struct layer_activations *x, int64_t R, int64_t width)
{
	if (m->layout.expert.size == 1) {
		rows_by_choice(out, expert_rows, x, R, width);
		return;
	}
	real *returns = malloc((x->num_rows + 1) * width * sizeof *returns), *rows = malloc((R + 1) * width * sizeof *rows);
	if (!returns || !rows)
		out_of_memory((x->num_rows + R) * width * sizeof *rows);
	struct collective e;
	gather_rows(returns, expert_rows, x->place, x->num_rows, width);
	all_to_all_start(&e, &m->layout.expert, TRAFFIC_RETURN, rows, x->sent_assignments, returns,
			x->received_assignments, width);
	collective_finish(&e);
	rows_by_choice(out, rows, x, R, width);
	free(returns);
	free(rows);
}

void dump_array(struct model *m, enum dumped what, int l, bool gradient, const void *x)
{
	struct dump *d = m->dump;
	struct kept *kept = kept_of(d, what, l, gradient);
	struct range range[3];
	int64_t first;
	if (kept->micro_batches > d->i)
		return;
	kept->micro_batches = d->i + 1;
	trace_check(true);
	const int rank = d->layout.tensor.rank;
	const struct row row = row_of(&d->config, what, l);
	const int64_t N = own_rows(d, what, rank, d->T, &first), R = N * row.cols;
	uint8_t *out = kept_row(d, what, l, gradient, d->i, 0);
	if (what == DUMP_EXPERTS_GATE_UP || what == DUMP_EXPERTS_DOWN)
		expert_rows_by_choice((real *)out, x, m, &m->acts.layer[l], R, row.depth);
	else
		memcpy(out, x, N * own_columns(range, d, what, l, rank) * row.size);
	trace_check(false);
}

void dump_head(struct model *m, enum dumped what, int l, bool gradient, const real *x, int64_t first, int64_t n)
{
	struct dump *d = m->dump;
	struct range range[3];
	trace_check(true);
	memcpy(kept_row(d, what, l, gradient, d->i, first), x,
			n * own_columns(range, d, what, l, d->layout.tensor.rank) * sizeof *x);
	trace_check(false);
}

void dump_head_losses(struct model *m, int l, const double *loss, const double *sum, const int32_t *target,
		int64_t first, int64_t n)
{
	struct dump *d = m->dump;
	real *out = (real *)kept_row(d, DUMP_HEAD_LOSS, l, false, d->i, first);
	trace_check(true);
	for (int64_t t = 0; d->layout.tensor.rank == 0 && t < n; t++)
		out[t] = target[t] < 0 ? 0 : (real)(loss[t] + log(sum[t]));
	trace_check(false);
}

/* ============================================================================================================
 * At the end of the step: rank 0 puts each tensor together, and writes the file
 * ========================================================================================================== */

struct collector {
	uint8_t *rows, *piece;       /* of an array: rows that are being put together, and what another rank sent of them */
	real *tensor;                /* of a parameter; on rank 0 */
	struct shard_message *message;
	struct safetensors_writer *file; /* on rank 0 */
	int rc;                      /* of writing the file: after an error the others' messages are still received */
	int64_t num_parameters;      /* collected so far */
};

/* Bytes of the rows of any array that are put together at a time: DUMP_BLOCK, or the longest row. */
static int64_t block_bytes(const struct dump *d)
{
	int64_t most = DUMP_BLOCK;
	for (int l = -1; l < trained_layers(&d->config); l++)
		for (enum dumped what = 0; what < NUM_DUMPED; what++) {
			const struct row row = row_of(&d->config, what, l);
			most = row.elements * row.size > most ? row.elements * row.size : most;
		}
	return most;
}

/* Rows `first` .. `end` - 1 of micro-batch j of the global batch, which has T tokens, come to c->rows on rank 0. */
static void collect_rows(struct collector *c, const struct dump *d, const struct entry *e, int64_t j, int64_t T,
		int64_t first, int64_t end)
{
	const struct group *world = &d->layout.world;
	const int data = d->layout.data.size, tensor = d->layout.tensor.size;
	const struct row row = row_of(&d->config, e->what, e->layer);
	for (int r = 0; r < tensor; r++) {
		struct range range[3];
		int64_t begin;
		const int64_t cols = own_columns(range, d, e->what, e->layer, r),
				own_end = own_rows(d, e->what, r, T, &begin) + begin,
				from = begin > first ? begin : first, to = own_end < end ? own_end : end;
		const int owner = (int)(j % data) * tensor + r; /* see layout_of_rank and micro_batches_of_rank */
		if (from >= to || !cols)
			continue;
		const uint8_t *piece = c->piece;
		const int64_t bytes = (to - from) * cols * row.size;
		if (world->rank == owner)
			piece = kept_row(d, e->what, e->layer, e->gradient, j / data, from - begin);
		if (world->rank == owner && owner != 0)
			send_message(world, 0, OTHER_TAG, piece, bytes);
		else if (world->rank == 0 && owner != 0)
			receive_message(world, owner, OTHER_TAG, c->piece, bytes);
		for (int64_t t = from; world->rank == 0 && t < to; t++)
			for (int i = 0; i < 3; piece += range[i++].num * row.size)
				memcpy(c->rows + ((t - first) * row.elements + range[i].begin) * row.size, piece,
						range[i].num * row.size);
	}
}

/* A whole array comes to rank 0 and into the file: the micro-batches in the order of the global batch, some rows at a
 * time. */
static void collect_array(struct collector *c, const struct dump *d, const struct entry *e)
{
	const struct row row = row_of(&d->config, e->what, e->layer);
	const int64_t at_once = block_bytes(d) / (row.elements * row.size);
	for (int64_t j = 0; j * d->micro_batch < d->batch; j++) {
		const int64_t left = d->batch - j * d->micro_batch, T = (left < d->micro_batch ? left : d->micro_batch) *
				d->seq_len;
		for (int64_t first = 0; first < T; first += at_once) {
			const int64_t end = T - first < at_once ? T : first + at_once;
			collect_rows(c, d, e, j, T, first, end);
			if (c->file && c->rc == 0)
				c->rc = safetensors_append_bytes(c->file, c->rows, (end - first) * row.elements * row.size, row.size);
		}
	}
}

/* A whole gradient, moment or weight comes to rank 0 and into the file. */
static void collect_weights(struct collector *c, const struct dump *d, const struct model *m, const struct entry *e)
{
	const struct parameter *t = &d->global[e->parameter];
	struct optimizer_shard_iterator walk = d->walks[e->parameter];
	const real *data = e->source == FROM_GRADIENT ? m->grads.memory : e->source == FROM_MOMENT_1 ? m->exp_avg
			: e->source == FROM_MOMENT_2 ? m->exp_avg_sq : m->params.memory;
	const bool moments = e->source == FROM_MOMENT_1 || e->source == FROM_MOMENT_2;
	collect_parameter(&m->table, &walk, t, data, moments, true, 0, (int)(c->num_parameters++ % SHARD_TAGS), c->message,
			c->tensor);
	if (c->file && c->rc == 0)
		c->rc = safetensors_append(c->file, c->tensor, parameter_size(t));
}

static void collect_value(struct collector *c, const struct entry *e)
{
	const real value = (real)e->value;
	if (c->file && c->rc == 0)
		c->rc = safetensors_append(c->file, &value, 1);
}

/* Creates the file on rank 0. */
static struct safetensors_writer *create_file(const struct dump *d, const char *path, const struct list *list)
{
	struct tensor *tensors = allocate(list->n * sizeof *tensors);
	char step[24];
	for (int i = 0; i < list->n; i++) {
		const struct entry *e = &list->entries[i];
		struct tensor *t = &tensors[i];
		*t = (struct tensor){.name = e->name, .shape = {1}, .num_dims = 1, .dtype = REAL_DTYPE};
		if (e->source == FROM_ARRAY) {
			const struct row row = row_of(&d->config, e->what, e->layer);
			*t = (struct tensor){.name = e->name, .shape = {d->batch * d->seq_len, row.cols, row.depth},
					.num_dims = 1 + (row.cols > 0) + (row.depth > 0),
					.dtype = e->what == DUMP_ROUTER_TOPK ? I32 : REAL_DTYPE};
		} else if (e->source != FROM_VALUE) {
			const struct parameter *p = &d->global[e->parameter];
			*t = (struct tensor){.name = e->name, .shape = {p->rows, p->cols}, .num_dims = p->cols ? 2 : 1,
					.dtype = REAL_DTYPE};
		}
	}
	struct safetensors_writer *file = safetensors_create_any(path, tensors, list->n);
	snprintf(step, sizeof step, "%lld", (long long)d->step);
	if (file && (safetensors_set_metadata(file, "format", "ling dump 1") < 0 ||
			safetensors_set_metadata(file, "step", step) < 0 || safetensors_set_metadata(file, "run", d->run) < 0)) {
		safetensors_abandon(file);
		file = NULL;
	}
	free(tensors);
	return file;
}

/* Takes the memory for collecting. Agreed, since nobody may send what rank 0 cannot take. */
static int make_collector(struct collector *c, const struct dump *d)
{
	int64_t largest = 1;
	for (int i = 0; i < d->num_parameters; i++)
		largest = parameter_size(&d->global[i]) > largest ? parameter_size(&d->global[i]) : largest;
	*c = (struct collector){.message = new_shard_message()};
	const bool rank0 = d->layout.world.rank == 0;
	if (rank0) {
		c->rows = malloc(block_bytes(d));
		c->piece = malloc(block_bytes(d));
		c->tensor = malloc(largest * sizeof *c->tensor);
	}
	return parallel_agree(c->message && (!rank0 || (c->rows && c->piece && c->tensor)) ? 0 : fail("out of memory for a "
			"tensor of %lld elements", (long long)largest));
}

static void free_collector(struct collector *c)
{
	free(c->rows);
	free(c->piece);
	free(c->tensor);
	free(c->message);
}

/* DIR/step-NNNNNNN.safetensors, or the name for a skipped batch. */
static int dump_path(char path[PATH_LEN], const struct dump *d, int64_t step, int64_t skipped)
{
	char name[96];
	int n = snprintf(name, sizeof name, "step-%07lld", (long long)step);
	if (skipped)
		n += snprintf(name + n, sizeof name - n, "-skipped-%07lld", (long long)skipped);
	snprintf(name + n, sizeof name - n, ".safetensors");
	return path_join(path, d->dir, name);
}

/* Collects all tensors of the list; on rank 0 into the file `path`. */
static int write_file(const struct dump *d, const struct model *m, const char *path, const struct list *list)
{
	struct collector c;
	struct new_file file = {0};
	int rc = make_collector(&c, d);
	if (rc < 0) {
		free_collector(&c);
		return -1;
	}
	if (d->layout.world.rank == 0) {
		c.rc = new_member_begin(&file, path);
		c.file = c.rc == 0 ? create_file(d, file.temporary, list) : NULL;
		c.rc = c.file ? 0 : -1;
	}
	for (int i = 0; i < list->n; i++) {
		const struct entry *e = &list->entries[i];
		if (e->source == FROM_ARRAY)
			collect_array(&c, d, e);
		else if (e->source == FROM_VALUE)
			collect_value(&c, e);
		else
			collect_weights(&c, d, m, e);
	}
	rc = c.rc;
	if (c.file && rc == 0)
		rc = safetensors_finish(c.file);
	else
		safetensors_abandon(c.file);
	if (*file.path)
		rc = new_file_publish(&file, rc);
	free_collector(&c);
	return parallel_agree(rc);
}

static void release(struct dump *d)
{
	free(d->memory);
	d->memory = NULL;
	d->active = false;
}

void dump_write(struct dump *d, const struct model *m, const struct dump_result *result)
{
	char path[PATH_LEN] = "", reason[sizeof error_text];
	if (!d || !d->active)
		return;
	trace_check(true);
	trace_begin(OP_WRITE, PASS_FORWARD, -1, 0);
	heartbeat_phase(HEARTBEAT_WRITE, d->step); /* it may take longer than a step: nobody should take it for a hang */
	memcpy(reason, error_text, sizeof reason); /* of the step, if it failed */
	struct list list = list_tensors(d, result);
	int rc = dump_path(path, d, d->step, result->skipped ? result->batch : 0);
	if (rc == 0)
		rc = write_file(d, m, path, &list);
	if (rc < 0 && d->layout.world.rank == 0)
		fprintf(stderr, "ling: warning: step %lld is not dumped: %s\n", (long long)d->step, error_text);
	free(list.entries);
	release(d);
	set_error("%s", reason);
	heartbeat_phase(HEARTBEAT_STEP, d->step);
	trace_check(false);
}

/* ============================================================================================================
 * Beginning
 * ========================================================================================================== */

/* Whether the file of a step may be written: there is none, or one of this run. */
static int check_place(const struct dump *d, int64_t step)
{
	char path[PATH_LEN];
	if (dump_path(path, d, step, 0) < 0)
		return -1;
	const int there = path_exists(path);
	if (there <= 0)
		return there;
	struct tensors *w = tensors_open(path, "model");
	const char *run = w ? json_string_value(json_object_get(json_object_get(w->files->header, "__metadata__"), "run"))
			: NULL;
	const bool own = run && !strcmp(run, d->run);
	tensors_close(w);
	return own ? 0 : fail("%s is there already, and is not this run's; remove it, or choose another train.dump.dir",
			path);
}

/* Fails where the memory for the dumps does not suffice: of what the run takes for certain, its expert rows, and a copy
 * of the state where saves go on while training does, dumps may take what is left. */
static int check_memory(struct dump *d, const struct config *c)
{
	struct memory_plan plan;
	if (plan_memory(&plan, &c->model, &d->layout, c->train.micro_batch, c->data.seq_len, c->train.recompute) < 0)
		return -1;
	plan.reduction += c->parallel.reduce == REDUCE_BF16 ? plan.changes : 0;
	const double machine = fmin(usable_memory("") / parallel_local_ranks(), process_memory()),
			run = planned_bytes(&plan) + plan.balanced_arrivals,
			copy = c->checkpoint.every && c->checkpoint.async != ASYNC_FALSE && run + plan.copy <= machine
					? plan.copy : 0,
			dump = place_arrays(d, NULL, c->train.batch) + 2.0 * block_bytes(d);
	return run + copy + dump <= machine ? 0 : fail("train.dump takes %.3f GB for a batch of %d x %d tokens beside the "
			"%.3f GB of training, and %.3f GB may be used here: make train.batch or data.seq_len smaller for a dump, "
			"take more ranks, or dump nothing (train.dump=off)", dump / 1e9, c->train.batch, c->data.seq_len,
			(run + copy) / 1e9, machine / 1e9);
}

/* Looks up the whole model's parameters, and where this rank's shards of each begin. */
static int find_shards(struct dump *d, const struct parameter_table *table)
{
	d->global = global_parameters(&d->config, &d->num_parameters);
	d->walks = d->global ? calloc(d->num_parameters, sizeof *d->walks) : NULL;
	if (!d->walks)
		return fail("out of memory for the list of the tensors");
	struct optimizer_shard_iterator walk = {0}, next = walk;
	struct optimizer_shard p;
	bool more = next_optimizer_shard(table, &next, &p);
	for (int i = 0; i < d->num_parameters; i++) {
		d->walks[i] = walk;
		while (more && !strcmp(p.parameter->name, d->global[i].name)) {
			walk = next;
			more = next_optimizer_shard(table, &next, &p);
		}
	}
	return 0;
}

int dump_open(struct dump **out, const struct config *c, const struct model *m, int64_t step)
{
	struct dump *d = allocate(sizeof *d);
	*d = (struct dump){.config = c->model, .layout = m->layout, .micro_batch = c->train.micro_batch,
			.seq_len = c->data.seq_len};
	*out = NULL;
	for (int i = 0; i < c->train.dump.num_steps; i++)
		if (c->train.dump.steps[i].number > step)
			d->steps[d->num_steps++] = c->train.dump.steps[i].number;
	if (d->num_steps < c->train.dump.num_steps && m->layout.world.rank == 0)
		printf("train.dump: steps up to %lld are done, and are not dumped now; another train.output_dir begins a new "
				"run\n", (long long)step);
	if (!d->num_steps) {
		dump_close(d);
		return 0;
	}
	memcpy(d->dir, c->train.dump.dir, sizeof d->dir);
	const bool rank0 = d->layout.world.rank == 0;
	int rc = find_shards(d, &m->table);
	d->kept = calloc((size_t)(trained_layers(&c->model) + 1) * NUM_DUMPED * 2, sizeof *d->kept);
	if (rc == 0 && !d->kept)
		rc = fail("out of memory for the list of the tensors");
	if (rc == 0)
		rc = check_memory(d, c);
	if (rc == 0 && rank0) {
		char *run = realpath(c->train.output_dir, NULL);
		rc = path_copy(d->run, run ? run : c->train.output_dir) < 0 || make_directories(d->dir) < 0 ? -1 : 0;
		free(run);
	}
	for (int i = 0; i < d->num_steps && rank0 && rc == 0; i++)
		rc = check_place(d, d->steps[i]);
	if (parallel_agree(rc) < 0) {
		dump_close(d);
		return -1;
	}
	*out = d;
	return 0;
}

void dump_close(struct dump *d)
{
	if (!d)
		return;
	release(d);
	free(d->kept);
	free(d->global);
	free(d->walks);
	free(d);
}

void dump_begin(struct dump *d, struct model *m, int64_t step, int64_t batch)
{
	bool wanted = false;
	for (int i = 0; d && i < d->num_steps; i++)
		wanted = wanted || d->steps[i] == step;
	if (!wanted)
		return;
	d->step = step;
	d->batch = batch;
	const double bytes = place_arrays(d, NULL, batch);
	trace_check(true);
	d->memory = malloc((size_t)bytes + 1);
	const int rc = parallel_agree(d->memory ? 0 : fail("out of memory: it takes %.3f GB", bytes / 1e9));
	trace_check(false);
	if (rc < 0) {
		if (d->layout.world.rank == 0)
			fprintf(stderr, "ling: warning: step %lld is not dumped: %s\n", (long long)step, error_text);
		release(d);
		return;
	}
	place_arrays(d, d->memory, batch);
	d->active = true;
	m->dump = d;
}
