/*
 * commands/info.c - `ling info`: parameters, memory and FLOPs of a model; with --ranks, memory and traffic of
 * each layout of ranks, in training or, with --inference, in evaluation and generation.
 */
#define _GNU_SOURCE
#include "commands/info.h"

#include "files/base.h"
#include "parallel.h"
#include "files/config.h"
#include "files/checkpoint.h"
#include "ling.h"
#include "commands/engine.h"
#include "commands/replicas.h"
#include "commands/result.h"

#include <jansson.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Sets usual sizes where a config has none: those of configs/ that describe only a model, and model directories. */
static void usual_sizes(struct config *c, int ranks)
{
	const int longest = default_sequence(&c->model);
	c->data.seq_len = c->data.seq_len ? c->data.seq_len : longest < 4096 ? longest : 4096;
	c->train.micro_batch = c->train.micro_batch ? c->train.micro_batch : 1;
	c->train.batch = c->train.batch ? c->train.batch : ranks * c->train.micro_batch;
}

/* The report of a model, for the config's seq_len and micro_batch. NULL on error. */
static json_t *model_report(const struct config *config)
{
	const struct model_config *c = &config->model;
	const int L = config->data.seq_len, B = config->train.micro_batch;
	struct memory_plan plan = {0};
	struct parameter_count count[NUM_PARAMETER_PARTS + 1];
	double flops;
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	if (plan_memory(&plan, c, &alone, B, L, config->train.recompute) < 0 || count_parameters(count, &flops, c, L) < 0)
		return NULL;
	json_t *parts = json_object();
	for (int i = 0; i < NUM_PARAMETER_PARTS; i++)
		json_object_set_new(parts, parameter_parts[i].name, json_pack("{s:I, s:I}",
				"parameters", (json_int_t)count[i].total, "active", (json_int_t)count[i].active));
	json_t *memory = json_pack("{s:I, s:I, s:I, s:I, s:I}", "weights", (json_int_t)plan.weights,
			"gradients", (json_int_t)plan.gradients, "optimizer", (json_int_t)plan.optimizer,
			"activations", (json_int_t)plan.activations,
			"total", (json_int_t)(plan.weights + plan.gradients + plan.optimizer + plan.activations));
	const struct parameter_count *all = &count[NUM_PARAMETER_PARTS];
	return json_pack("{s:I, s:I, s:o, s:i, s:i, s:o, s:o}", "parameters", (json_int_t)all->total,
			"active_parameters", (json_int_t)all->active, "parts", parts, "micro_batch", B, "seq_len", L,
			"memory_bytes", memory, "flops_per_token", result_whole(flops));
}

static void print_model(const json_t *report)
{
	const char *name;
	json_t *part, *bytes;
	printf("%-18s %18s %18s\n", "parameters", "total", "active a token");
	json_object_foreach(json_object_get(report, "parts"), name, part)
		printf("%-18s %18lld %18lld\n", name, (long long)result_integer(part, "parameters"),
				(long long)result_integer(part, "active"));
	printf("%-18s %18lld %18lld\n", "total", (long long)result_integer(report, "parameters"),
			(long long)result_integer(report, "active_parameters"));
	printf("\nmemory of a training step, micro-batch of %d x %d tokens\n", (int)result_integer(report, "micro_batch"),
			(int)result_integer(report, "seq_len"));
	const bool large = result_double(report, "memory_bytes.weights") > 1e8;
	json_object_foreach(json_object_get(report, "memory_bytes"), name, bytes)
		printf("%-18s %15.3f %s\n", name, json_number_value(bytes) / (large ? 1e9 : 1e6), large ? "GB" : "MB");
	printf("\nFLOPs of training on a token at seq_len %d: %.4g\n", (int)result_integer(report, "seq_len"),
			result_double(report, "flops_per_token"));
}

/* What a layout of ranks costs: the memory of the last rank, which holds most, because the last shard of anything is
 * never smaller than the others; and the bytes that rank 0, which has most micro-batches, sends in a step, if all
 * experts get the same number of tokens. */
struct layout_plan {
	struct layout layout;
	struct memory_plan memory;
	double certain, rows;        /* bytes: all but the expert rows; expert rows when balanced */
	double sent[NUM_TRAFFIC + 1]; /* bytes; the last one is the sum of the others */
	double sent_outer;           /* bytes, between replicas at the end of a period of local SGD */
	int64_t idle;                /* data ranks that no micro-batch is left for */
};

/* Sums over a rank's micro-batches of a step: sequences, and the tokens of them that the rank holds between attention
 * and head. */
struct work { int64_t micro_batches, sequences, tokens; };
static struct work plan_work(const struct config *c, const struct layout *l)
{
	const struct micro_batches mine = micro_batches_of_rank(&l->data, c->train.batch / l->replicas.size,
			c->train.micro_batch);
	struct work w = {.micro_batches = mine.num};
	for (int64_t i = 0; i < mine.num; i++) {
		const int64_t B = micro_batch_sequences(&mine, i);
		const int64_t T = B * c->data.seq_len;
		w.sequences += B;
		w.tokens += shard_begin(T, l->tensor.rank + 1, l->tensor.size) -
				shard_begin(T, l->tensor.rank, l->tensor.size);
	}
	return w;
}

/* Fills p->sent: the bytes that rank 0 sends in a training step, added up over the collectives that the step calls. */
static void plan_traffic(struct layout_plan *p, const struct config *config)
{
	const struct model_config *c = &config->model;
	const struct layout *l = &p->layout;
	const int layers = trained_layers(c), moe = layers - c->first_k_dense_replace; /* moe: layers with experts */
	const int E = c->num_experts, e = l->expert.size, depths = 1 + trained_mtp_layers(c); /* of prediction */
	const double H = c->hidden_size, others = l->tensor.size - 1, world = l->world.size - 1;
	/* Layers, and layers with experts, whose forward pass is computed again in the backward pass: all but the last
	 * one, whose activations are still there. */
	const int again = config->train.recompute == TRAIN_RECOMPUTE_LAYER ? layers - 1 : 0;
	const int moe_again = again && moe ? moe - 1 : 0;
	const int attention_again = config->train.recompute == TRAIN_RECOMPUTE_ATTENTION ? layers : again;
	const struct work w = plan_work(config, l);
	const double tokens = (double)w.sequences * config->data.seq_len, own = w.tokens;
	double group = 0;            /* tokens of the whole expert group: each rank computes 1/e of their rows */
	for (int i = 0; i < e; i++) {
		const struct layout member = layout_of_replica(l->expert_data.rank * e + i, l->all.size, l->replicas.size,
				l->tensor.size, e);
		group += plan_work(config, &member).tokens;
	}
	/* Rows and assignments that leave this rank in a forward pass, and that come to it from other ranks. A token's row
	 * goes once to each rank that has some of its experts. */
	const double share = dispatch_share(c, e), rows = own * (e - 1) * share, foreign_rows = (group - own) * share;
	const double assignments = own * c->num_experts_per_tok * (e - 1) / e;
	const double foreign_assignments = (group - own) * c->num_experts_per_tok / e;
	double *sent = p->sent;
	/* A layer gathers before query, key and value, again in their backward pass, and in that of the output product;
	 * it sums after the output product and after the backward pass of the first. Head and embedding have a gather and
	 * a sum each, for each depth of prediction. */
	sent[TRAFFIC_GATHER] = (3 * layers + attention_again + 2 * depths) * others * own * H * sizeof(real);
	sent[TRAFFIC_SUM] = (2 * layers + again + 2 * depths) * (tokens - own) * H * sizeof(real);
	/* Rows go to the experts' ranks, with two numbers for each assignment; the rows' gradients go there too, and come
	 * back with those of the assignments' weights. */
	sent[TRAFFIC_PLAN] = (double)w.micro_batches * (moe + moe_again) * (e - 1) * 2 * sizeof(int64_t);
	sent[TRAFFIC_DISPATCH] = ((moe + moe_again) * (rows * H + 2 * assignments) + moe * rows * H) * sizeof(real);
	sent[TRAFFIC_RETURN] = moe * (2 * H * foreign_rows + foreign_assignments) * sizeof(real);
	/* A rank sends all gradients but its own shard of each bucket, and later that shard of the weights, or of their
	 * changes, to all other ranks of its group, which is as much. */
	sent[TRAFFIC_GRADIENTS] = (double)p->memory.num_foreign *
			(config->parallel.reduce == REDUCE_BF16 ? sizeof(uint16_t) : sizeof(real));
	sent[TRAFFIC_WEIGHTS] = sent[TRAFFIC_GRADIENTS];
	const double head_norm = c->norm_head ? H * sizeof(double) : 0;
	sent[TRAFFIC_HEAD] = others * (depths * tokens * (sizeof(real) + 2 * sizeof(double)) + head_norm);
	sent[TRAFFIC_STATISTICS] = others * moe * w.sequences * E * sizeof(double) +
			world * (step_sums_shape(c).size + 4) * sizeof(double) +
			(l->data.size - 1) * (1 + depths) * sizeof(double); /* the last one: the numbers of tokens and targets */
	for (int i = 0; i < NUM_TRAFFIC; i++)
		sent[NUM_TRAFFIC] += sent[i];
	/* local SGD: the sum of the pseudo-gradients over the replicas, a reduce_scatter and an all_gather */
	p->sent_outer = 2.0 * p->memory.num_state * sizeof(real) * (l->replicas.size - 1) / l->replicas.size;
}

/* Plans a layout, on ranks that have `room` bytes each. Fails when the model cannot have it. */
static int plan_layout(struct layout_plan *p, const struct config *c, int ranks, int tensor, int expert, double room)
{
	const int replicas = count_replicas(c, ranks, tensor, expert);
	if (replicas < 0)
		return -1;
	*p = (struct layout_plan){.layout = layout_of_replica(0, ranks, replicas, tensor, expert)};
	const struct layout last = layout_of_replica(ranks - 1, ranks, replicas, tensor, expert);
	struct memory_plan *m = &p->memory;
	if (layout_check(c->model.num_attention_heads, c->model.num_key_value_heads, c->model.vocab_size,
			c->model.num_experts, ranks / replicas, tensor, expert, "parallel.") < 0 ||
			plan_memory(m, &c->model, &last, c->train.micro_batch, c->data.seq_len, c->train.recompute) < 0)
		return -1;
	m->reduction += c->parallel.reduce == REDUCE_BF16 ? m->changes : 0;
	p->certain = planned_bytes(m);
	p->rows = m->balanced_arrivals;
	if (!c->checkpoint.every || c->checkpoint.async == ASYNC_FALSE ||
			(c->checkpoint.async == ASYNC_AUTO && p->certain + p->rows + m->copy > room))
		m->copy = 0; /* saves are not asynchronous */
	p->certain += m->copy;
	p->idle = idle_data_ranks(p->layout.data.size, c->train.batch / replicas, c->train.micro_batch);
	plan_traffic(p, c);
	return 0;
}

/* A comparison for qsort: layouts without idle ranks first, then those that send least. */
static int compare_plans(const void *a, const void *b)
{
	const struct layout_plan *x = a, *y = b;
	if (!x->idle != !y->idle)
		return x->idle ? 1 : -1;
	return compare_doubles(&x->sent[NUM_TRAFFIC], &y->sent[NUM_TRAFFIC]);
}

/* Writes bytes as, for example, 1.234 GB. Returns `out`. */
static const char *format_bytes(char out[32], double bytes)
{
	static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
	int i = 0;
	for (; bytes >= 1000 && i < 5; i++)
		bytes /= 1000;
	snprintf(out, 32, "%.*f %s", i ? 3 : 0, bytes, units[i]);
	return out;
}

static json_t *layout_to_json(const struct layout_plan *p)
{
	return json_pack("{s:i, s:i, s:i, s:I, s:o, s:o, s:o}", "data", p->layout.data.size,
			"tensor", p->layout.tensor.size, "expert", p->layout.expert.size,
			"idle_data_ranks", (json_int_t)p->idle, "memory_bytes", result_whole(p->certain + p->rows),
			"memory_bytes_at_most", result_whole(p->certain + p->memory.arrivals),
			"bytes_sent", result_whole(p->sent[NUM_TRAFFIC]));
}

/* The report of the config's layout for this many ranks, and of all others that fit `room` bytes a rank while experts
 * are balanced, those that leave no rank idle and send least first. NULL on error. */
static json_t *plan_report(const struct config *c, int ranks, double room)
{
	struct layout_plan asked, smallest = {0}, *plans = NULL;
	size_t n = 0, capacity = 0;
	const int max_expert = c->model.num_experts ? c->model.num_experts : 1;
	if (plan_layout(&asked, c, ranks, c->parallel.tensor, c->parallel.expert, room) < 0)
		return NULL;
	for (int tensor = 1; tensor <= ranks && tensor <= c->model.num_key_value_heads; tensor++)
		for (int expert = 1; expert <= ranks && expert <= max_expert; expert++) {
			struct layout_plan p;
			if (ranks % tensor || ranks % expert || plan_layout(&p, c, ranks, tensor, expert, room) < 0)
				continue;
			if (!smallest.certain || p.certain + p.rows < smallest.certain + smallest.rows)
				smallest = p;
			if (p.certain + p.rows > room)
				continue;
			plans = grow(plans, n, &capacity, 1, sizeof *plans);
			plans[n++] = p;
		}
	if (n)
		qsort(plans, n, sizeof *plans, compare_plans);

	const struct memory_plan *m = &asked.memory;
	const struct { const char *name; double bytes; } memory[] = {{"weights", m->weights}, {"gradients", m->gradients},
			{"optimizer", m->optimizer}, {"activations", m->activations}, {"reduction", m->reduction},
			{"outer step", m->outer}, {"saving", m->saving}, {"copy for saves", m->copy}, {"expert rows", asked.rows},
			{"total", asked.certain + asked.rows},
			{"expert rows at most", m->arrivals}, {"total at most", asked.certain + m->arrivals}};
	json_t *memory_bytes = json_object(), *bytes_sent = json_object(), *layouts = json_array();
	for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
		json_object_set_new(memory_bytes, memory[i].name, result_whole(memory[i].bytes));
	for (int i = 0; i <= NUM_TRAFFIC; i++)
		json_object_set_new(bytes_sent, i < NUM_TRAFFIC ? traffic_names[i] : "total", result_whole(asked.sent[i]));
	for (size_t i = 0; i < n; i++)
		json_array_append_new(layouts, layout_to_json(&plans[i]));
	free(plans);
	const struct layout *l = &asked.layout;
	if (l->replicas.size == 1)
		json_object_del(memory_bytes, "outer step");
	json_t *report = json_pack("{s:i, s:i, s:i, s:i, s:I, s:i, s:i, s:i, s:o, s:o, s:o, s:o, s:o}", "ranks", ranks,
			"data", l->data.size, "tensor", l->tensor.size, "expert", l->expert.size,
			"idle_data_ranks", (json_int_t)asked.idle, "batch", c->train.batch,
			"micro_batch", c->train.micro_batch, "seq_len", c->data.seq_len, "memory_bytes", memory_bytes,
			"bytes_sent", bytes_sent, "memory_of_a_rank", result_whole(room), "layouts", layouts,
			"smallest_layout", layout_to_json(&smallest));
	if (l->replicas.size > 1) {
		json_object_set_new(report, "replicas", json_integer(l->replicas.size));
		json_object_set_new(report, "bytes_sent_in_a_synchronisation", result_whole(asked.sent_outer));
	}
	return report;
}

/* The members of an object of bytes, a line each, those that are 0 left out. */
static void print_bytes(json_t *object)
{
	const char *name;
	json_t *bytes;
	char size[32];
	json_object_foreach(object, name, bytes)
		if (json_number_value(bytes))
			printf("%-20s %13s\n", name, format_bytes(size, json_number_value(bytes)));
}

static void print_plan(const json_t *report)
{
	char size[3][32];
	if (json_object_get(report, "replicas"))
		printf("%d replicas, each with a layout of its own; ", (int)result_integer(report, "replicas"));
	printf("%d ranks: data %d x tensor %d, expert %d; a step of %d sequences, micro-batches of %d x %d tokens\n",
			(int)result_integer(report, "ranks"), (int)result_integer(report, "data"),
			(int)result_integer(report, "tensor"), (int)result_integer(report, "expert"),
			(int)result_integer(report, "batch"), (int)result_integer(report, "micro_batch"),
			(int)result_integer(report, "seq_len"));
	if (result_integer(report, "idle_data_ranks")) {
		const int data = (int)result_integer(report, "data"), batch = (int)result_integer(report, "batch");
		printf("%d of %d data ranks have nothing to do: set train.%s=%d\n", (int)result_integer(report,
				"idle_data_ranks"), data, batch < data ? "batch" : "micro_batch", batch < data ? data : batch / data);
	}
	printf("\nmemory of a rank; expert rows when balanced, and when all of a group go to one rank\n");
	print_bytes(json_object_get(report, "memory_bytes"));
	printf("\nsent by a rank in a step%s\n", result_double(report, "bytes_sent.total") ? "" : ": nothing");
	print_bytes(json_object_get(report, "bytes_sent"));
	if (json_object_get(report, "replicas"))
		printf("\nsent by a rank to the other replicas in a synchronisation\n%-20s %13s\n", "outer step",
				format_bytes(size[0], result_double(report, "bytes_sent_in_a_synchronisation")));

	const json_t *layouts = json_object_get(report, "layouts");
	format_bytes(size[0], result_double(report, "memory_of_a_rank"));
	if (!json_array_size(layouts)) {
		printf("\nno layout fits %s a rank; parallel.tensor=%d parallel.expert=%d needs least, %s: take more ranks, "
				"a smaller micro_batch or seq_len, or train.recompute=layer\n", size[0],
				(int)result_integer(report, "smallest_layout.tensor"),
				(int)result_integer(report, "smallest_layout.expert"),
				format_bytes(size[1], result_double(report, "smallest_layout.memory_bytes")));
		return;
	}
	bool idle = false;
	for (size_t i = 0; i < json_array_size(layouts); i++)
		idle |= result_integer(json_array_get(layouts, i), "idle_data_ranks") > 0;
	printf("\nlayouts that fit %s a rank%s\n%6s %6s %6s %12s %12s %12s%s\n", size[0],
			idle ? "; idle: data ranks without work" : "", "data", "tensor", "expert", "memory", "at most", "sent",
			idle ? "   idle" : "");
	for (size_t i = 0; i < json_array_size(layouts); i++) {
		const json_t *l = json_array_get(layouts, i);
		printf("%6d %6d %6d %12s %12s %12s", (int)result_integer(l, "data"), (int)result_integer(l, "tensor"),
				(int)result_integer(l, "expert"), format_bytes(size[0], result_double(l, "memory_bytes")),
				format_bytes(size[1], result_double(l, "memory_bytes_at_most")),
				format_bytes(size[2], result_double(l, "bytes_sent")));
		if (idle)
			printf(" %6d", (int)result_integer(l, "idle_data_ranks"));
		printf("\n");
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * Inference
 * ------------------------------------------------------------------------------------------------------------ */

struct info_options {
	int ranks, ranks_per_node;   /* ranks 0: not given */
	double memory_per_node;      /* bytes; 0: not given */
	bool inference, json;
	struct replica_options replicas;
	int tokens, weights;         /* of a forward pass, 0: ENGINE_TOKENS; which of weight_types */
};

static const char *const weight_types[] = {"files", "f32", "bf16", "f16", NULL};
static const enum dtype dtype_of_weights[] = {UNKNOWN_DTYPE, F32, BF16, F16};

/* What a layout of ranks costs in inference: the memory of the last rank, which holds most; and what a rank sends, if
 * all experts get the same number of tokens. */
struct inference_plan {
	struct layout layout;
	struct weight_bytes weights;
	struct memory_plan memory;
	double kv_token;             /* bytes of the keys and values of a token */
	double fixed;                /* bytes of all but keys and values, when the experts' rows are balanced */
	int64_t kv_tokens;           /* for which there is room beside that, with all rows at one rank */
	/* Bytes that a rank sends for each token of its own requests; besides, for each new or scored token of generation
	 * and tasks; for each forward pass. */
	double token[NUM_TRAFFIC + 1], new_token[NUM_TRAFFIC + 1], pass[NUM_TRAFFIC + 1];
};

/* Fills p->token, new_token and pass, each with the sum of all kinds at its end. A tensor group has the requests; each
 * of its t ranks has T/t of the T tokens of a forward pass. */
static void plan_inference_traffic(struct inference_plan *p, const struct model_config *c)
{
	const struct layout *l = &p->layout;
	const int layers = c->num_hidden_layers, moe = layers - c->first_k_dense_replace, e = l->expert.size;
	const double H = c->hidden_size, own = 1.0 / l->tensor.size, others = l->tensor.size - 1;
	const double share = dispatch_share(c, e), rows = own * (e - 1) * share;
	/* each layer gathers before query, key and value and sums after the output product; the embedding is summed, and
	 * the final norm's results are gathered */
	p->token[TRAFFIC_GATHER] = (layers + 1) * others * own * H * sizeof(real);
	p->token[TRAFFIC_SUM] = (layers + 1) * (1 - own) * H * sizeof(real);
	p->token[TRAFFIC_DISPATCH] = moe * (rows * H + 2 * own * c->num_experts_per_tok * (e - 1) / e) * sizeof(real);
	p->token[TRAFFIC_RETURN] = moe * rows * H * sizeof(real);
	p->new_token[TRAFFIC_HEAD] = others * own * c->vocab_size * sizeof(real);
	p->pass[TRAFFIC_PLAN] = (double)moe * (e - 1) * 2 * sizeof(int64_t);
	for (int i = 0; i < NUM_TRAFFIC; i++) {
		p->token[NUM_TRAFFIC] += p->token[i];
		p->new_token[NUM_TRAFFIC] += p->new_token[i];
		p->pass[NUM_TRAFFIC] += p->pass[i];
	}
}

/* Plans a layout on ranks that have `room` bytes each. dir: of the model, whose files are looked at; NULL: they would
 * be of this type. */
static int plan_inference(struct inference_plan *p, const struct model_config *c, int ranks,
		const struct replica_options *o, const char *dir, enum dtype dtype, int tokens, double room)
{
	*p = (struct inference_plan){.layout = layout_of_inference(ranks - 1, ranks, o->tensor, o->expert)};
	struct parameter_table table;
	struct tensors *files = NULL;
	if (plan_memory(&p->memory, c, &p->layout, 1, tokens, EVALUATE) < 0)
		return -1;
	if (parameter_table_init(&table, c, &p->layout) < 0)
		return fail("out of memory for the list of the tensors");
	int rc = dir && !(files = open_weights(&table, c, dir, DO_NOT_VERIFY)) ? -1
			: find_mapped(&table, files, dtype, &p->weights);
	tensors_close(files);
	parameter_table_free(&table);
	const struct model_config own = local_config(c, &p->layout);
	p->kv_token = 2.0 * own.num_key_value_heads * own.head_dim * own.num_hidden_layers * sizeof(real);
	p->fixed = (double)p->weights.mapped + p->weights.copied + p->memory.activations + p->memory.balanced_arrivals;
	const double left = room - p->fixed + p->memory.balanced_arrivals - p->memory.arrivals;
	p->kv_tokens = left > 0 ? (int64_t)(left / p->kv_token) : 0;
	plan_inference_traffic(p, c);
	return rc;
}

/* Tokens for whose keys and values all replicas have room. */
static double all_kv_tokens(const struct inference_plan *p)
{
	return (double)p->kv_tokens * p->layout.replicas.size * p->layout.data.size;
}

/* A comparison for qsort: the layouts that send least for a token first, then those with most room for keys and
 * values. */
static int compare_inference(const void *a, const void *b)
{
	const struct inference_plan *x = a, *y = b;
	const double more = all_kv_tokens(x), less = all_kv_tokens(y);
	const int order = compare_doubles(&x->token[NUM_TRAFFIC], &y->token[NUM_TRAFFIC]);
	return order ? order : compare_doubles(&less, &more);
}

static json_t *inference_to_json(const struct inference_plan *p)
{
	return json_pack("{s:i, s:i, s:i, s:i, s:o, s:o, s:o, s:o}", "replicas", p->layout.replicas.size,
			"data", p->layout.data.size, "tensor", p->layout.tensor.size, "expert", p->layout.expert.size,
			"memory_bytes", result_whole(p->fixed), "kv_tokens", result_whole(p->kv_tokens),
			"kv_tokens_of_all_ranks", result_whole(all_kv_tokens(p)),
			"bytes_sent_for_a_token", result_whole(p->token[NUM_TRAFFIC]));
}

static json_t *traffic_to_json(const double sent[NUM_TRAFFIC + 1])
{
	json_t *object = json_object();
	for (int i = 0; i <= NUM_TRAFFIC; i++)
		if (i == NUM_TRAFFIC || sent[i])
			json_object_set_new(object, i < NUM_TRAFFIC ? traffic_names[i] : "total", result_whole(sent[i]));
	return object;
}

/* The report of the layout that is asked for, and of all that fit `room` bytes a rank. NULL on error. */
static json_t *inference_report(const struct config *config, const struct info_options *o, const char *dir,
		double room)
{
	const struct model_config *c = &config->model;
	const int ranks = o->ranks, max_expert = c->num_experts ? c->num_experts : 1;
	const int tokens = o->tokens ? o->tokens : ENGINE_TOKENS;
	const enum dtype dtype = o->weights ? dtype_of_weights[o->weights] : F32;
	struct inference_plan asked, smallest = {0}, *plans = NULL;
	size_t n = 0, capacity = 0;
	dir = o->weights ? NULL : dir;
	if (layout_check(c->num_attention_heads, c->num_key_value_heads, c->vocab_size, c->num_experts, ranks,
			o->replicas.tensor, o->replicas.expert, "--") < 0 ||
			plan_inference(&asked, c, ranks, &o->replicas, dir, dtype, tokens, room) < 0)
		return NULL;
	for (int tensor = 1; tensor <= ranks && tensor <= c->num_key_value_heads; tensor++)
		for (int expert = 1; expert <= ranks && expert <= max_expert; expert++) {
			struct inference_plan p;
			if (layout_check(c->num_attention_heads, c->num_key_value_heads, c->vocab_size, c->num_experts, ranks,
					tensor, expert, "--") < 0 || plan_inference(&p, c, ranks,
					&(struct replica_options){tensor, expert}, dir, dtype, tokens, room) < 0)
				continue;
			if (!smallest.fixed || p.fixed < smallest.fixed)
				smallest = p;
			if (!p.kv_tokens)
				continue;
			plans = grow(plans, n, &capacity, 1, sizeof *plans);
			plans[n++] = p;
		}
	if (n)
		qsort(plans, n, sizeof *plans, compare_inference);
	json_t *layouts = json_array();
	for (size_t i = 0; i < n; i++)
		json_array_append_new(layouts, inference_to_json(&plans[i]));
	free(plans);
	const struct memory_plan *m = &asked.memory;
	const struct { const char *name; double bytes; } memory[] = {{"weights in files", asked.weights.mapped},
			{"weights in memory", asked.weights.copied}, {"activations", m->activations},
			{"expert rows", m->balanced_arrivals}, {"total", asked.fixed}, {"expert rows at most", m->arrivals}};
	json_t *bytes = json_object();
	for (size_t i = 0; i < sizeof memory / sizeof *memory; i++)
		json_object_set_new(bytes, memory[i].name, result_whole(memory[i].bytes));
	json_t *report = inference_to_json(&asked);
	json_object_set_new(report, "ranks", json_integer(ranks));
	json_object_set_new(report, "tokens", json_integer(tokens));
	json_object_set_new(report, "memory_bytes", bytes);
	json_object_set_new(report, "kv_bytes_of_a_token", result_whole(asked.kv_token));
	json_object_set_new(report, "memory_of_a_rank", result_whole(room));
	json_object_set_new(report, "bytes_sent", json_pack("{s:o, s:o, s:o}", "token", traffic_to_json(asked.token),
			"new token", traffic_to_json(asked.new_token), "forward pass", traffic_to_json(asked.pass)));
	json_object_set_new(report, "layouts", layouts);
	json_object_set_new(report, "smallest_layout", inference_to_json(&smallest));
	return report;
}

static void print_inference(const json_t *report)
{
	char size[3][32];
	const char *name;
	json_t *sent;
	printf("%d ranks: %d replica%s of data %d x tensor %d, expert %d; forward passes of %d tokens\n",
			(int)result_integer(report, "ranks"), (int)result_integer(report, "replicas"),
			result_integer(report, "replicas") == 1 ? "" : "s", (int)result_integer(report, "data"),
			(int)result_integer(report, "tensor"), (int)result_integer(report, "expert"),
			(int)result_integer(report, "tokens"));
	printf("\nmemory of a rank; expert rows when balanced, and when all of a group go to one rank\n");
	print_bytes(json_object_get(report, "memory_bytes"));
	printf("\nkeys and values of a token take %s; of %s a rank there is room for %lld tokens, on all ranks for %lld\n",
			format_bytes(size[0], result_double(report, "kv_bytes_of_a_token")),
			format_bytes(size[1], result_double(report, "memory_of_a_rank")),
			(long long)result_integer(report, "kv_tokens"),
			(long long)result_integer(report, "kv_tokens_of_all_ranks"));
	json_object_foreach(json_object_get(report, "bytes_sent"), name, sent) {
		if (!result_double(sent, "total"))
			continue;
		printf("\nsent by a rank for each %s\n", !strcmp(name, "new token") ? "new or scored token, besides" : name);
		print_bytes(sent);
	}
	const json_t *layouts = json_object_get(report, "layouts");
	format_bytes(size[0], result_double(report, "memory_of_a_rank"));
	if (!json_array_size(layouts)) {
		printf("\nno layout fits %s a rank; --tensor %d --expert %d needs least, %s: take more ranks, weights in "
				"bfloat16, or fewer --tokens\n", size[0], (int)result_integer(report, "smallest_layout.tensor"),
				(int)result_integer(report, "smallest_layout.expert"),
				format_bytes(size[1], result_double(report, "smallest_layout.memory_bytes")));
		return;
	}
	printf("\nlayouts that fit %s a rank; sent: by a rank for a token\n%8s %6s %6s %6s %12s %12s %14s\n", size[0],
			"replicas", "data", "tensor", "expert", "memory", "sent", "KV tokens");
	for (size_t i = 0; i < json_array_size(layouts); i++) {
		const json_t *l = json_array_get(layouts, i);
		printf("%8d %6d %6d %6d %12s %12s %14lld\n", (int)result_integer(l, "replicas"),
				(int)result_integer(l, "data"), (int)result_integer(l, "tensor"), (int)result_integer(l, "expert"),
				format_bytes(size[0], result_double(l, "memory_bytes")),
				format_bytes(size[1], result_double(l, "bytes_sent_for_a_token")),
				(long long)result_integer(l, "kv_tokens_of_all_ranks"));
	}
}

/* ------------------------------------------------------------------------------------------------------------
 * The command
 * ------------------------------------------------------------------------------------------------------------ */

static int run_info(const struct command_line *line)
{
	const struct info_options *o = line->options;
	const char *path = line->words[0];
	struct config c = {.parallel = {.tensor = 1, .expert = 1}};
	struct stat st;
	char dir[PATH_LEN];
	const bool is_dir = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
	if (!o->ranks && (option_given(line, "memory-per-node") || option_given(line, "ranks-per-node"))) {
		fail("--memory-per-node and --ranks-per-node go with --ranks");
		return EXIT_WRONG_USE;
	}
	if (o->inference ? !o->ranks : option_given(line, "tensor") || option_given(line, "expert") ||
			option_given(line, "tokens") || option_given(line, "weights")) {
		fail(o->inference ? "--inference goes with --ranks, which may be 1"
				: "--tensor, --expert, --tokens and --weights go with --inference; layouts of training are "
				"parallel.tensor=N and parallel.expert=N");
		return EXIT_WRONG_USE;
	}
	if (is_dir) {
		if (line->num_words > 1) {
			fail("%s: key=value goes with a config file, not with a model directory", line->words[1]);
			return EXIT_WRONG_USE;
		}
		if (find_model(dir, path) < 0 || config_from_huggingface(&c.model, dir) < 0)
			return EXIT_WORK_FAILED;
	} else if (config_load(&c, path, line->num_words - 1, line->words + 1, true) < 0)
		return EXIT_WRONG_USE;
	usual_sizes(&c, o->ranks ? o->ranks : 1);
	const double node = o->memory_per_node ? o->memory_per_node : usable_memory("");
	json_t *report = o->inference ? inference_report(&c, o, is_dir ? dir : NULL, node / o->ranks_per_node)
			: o->ranks ? plan_report(&c, o->ranks, node / o->ranks_per_node) : model_report(&c);
	if (!report)
		return EXIT_WORK_FAILED;
	result_print(report, o->json, o->inference ? print_inference : o->ranks ? print_plan : print_model);
	return EXIT_DONE;
}

static const struct command_option options[] = {
	WHOLE_OPTION(info_options, ranks, "ranks", "N", 1, 1000000, "Plan for N ranks"),
	WHOLE_OPTION(info_options, ranks_per_node, "ranks-per-node", "R", 1, 1000000,
			"Ranks that share the memory of a node", .initial = "1"),
	SIZE_OPTION(info_options, memory_per_node, "memory-per-node",
			"Memory of a node, such as 256GB (default: this machine's)"),
	FLAG_OPTION(info_options, inference, "inference",
			"With --ranks: plan evaluation and generation (ling eval, ling generate), not training"),
	REPLICA_OPTIONS(info_options),
	WHOLE_OPTION(info_options, tokens, "tokens", "N", 1, 1000000,
			"Tokens of a forward pass of inference (default: as many as ling eval and ling generate take, 4096)"),
	CHOICE_OPTION(info_options, weights, "weights", "TYPE", weight_types,
			"Type of the weights in inference: that of a model's files; for a config f32", .initial = "files"),
	FLAG_OPTION(info_options, json, "json", "Print one JSON object"),
};

const struct command info_command = {
	.name = "info", .usage = "CONFIG.yaml|MODEL_DIR [--ranks N] [key.path=value ...]",
	.min_words = 1, .max_words = ANY_NUMBER,
	.help = "Parameters, memory of a training step and FLOPs a token, of a config (with key=value) or of a model's "
		"directory. With --ranks: memory of a rank and what it sends in a step, for parallel.tensor and "
		"parallel.expert, and the layouts that fit.",
	.run = run_info, COMMAND_OPTIONS(info_options, options),
};
