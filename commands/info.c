/*
 * commands/info.c - `ling info`: parameters, memory, FLOPs, and the plan of a layout.
 */
#define _GNU_SOURCE
#include "commands/info.h"

#include "files/base.h"
#include "parallel.h"
#include "files/config.h"
#include "ling.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

void usual_sizes(struct config *c, int ranks)
{
	const int longest = c->model.max_position_embeddings;
	c->data.seq_len = c->data.seq_len ? c->data.seq_len : longest < 4096 ? longest : 4096;
	c->train.micro_batch = c->train.micro_batch ? c->train.micro_batch : 1;
	c->train.batch = c->train.batch ? c->train.batch : ranks * c->train.micro_batch;
}

int print_info(const struct config *config, bool json)
{
	const struct model_config *c = &config->model;
	const int L = config->data.seq_len, B = config->train.micro_batch;
	struct memory_plan plan = {0};
	struct parameter_count count[NUM_PARAMETER_PARTS + 1];
	double flops;
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	if (plan_memory(&plan, c, &alone, B, L, config->train.recompute) < 0 || count_parameters(count, &flops, c, L) < 0)
		return -1;
	const struct parameter_count *all = &count[NUM_PARAMETER_PARTS];
	const struct { const char *name; size_t bytes; } memory[] = {{"weights", plan.weights}, {"gradients", plan.gradients},
			{"optimizer", plan.optimizer}, {"activations", plan.activations},
			{"total", plan.weights + plan.gradients + plan.optimizer + plan.activations}};
	if (json) {
		printf("{\"parameters\": %lld, \"active_parameters\": %lld, \"parts\": {", (long long)all->total, (long long)all->active);
		for (int i = 0; i < NUM_PARAMETER_PARTS; i++)
			printf("%s\"%s\": {\"parameters\": %lld, \"active\": %lld}", i ? ", " : "", parameter_parts[i].name,
					(long long)count[i].total, (long long)count[i].active);
		printf("}, \"micro_batch\": %d, \"seq_len\": %d, \"memory_bytes\": {", B, L);
		for (int i = 0; i < 5; i++)
			printf("%s\"%s\": %zu", i ? ", " : "", memory[i].name, memory[i].bytes);
		printf("}, \"flops_per_token\": %.0f}\n", flops);
		return 0;
	}
	printf("%-18s %18s %18s\n", "parameters", "total", "active a token");
	for (int i = 0; i <= NUM_PARAMETER_PARTS; i++)
		printf("%-18s %18lld %18lld\n", i < NUM_PARAMETER_PARTS ? parameter_parts[i].name : "total", (long long)count[i].total,
				(long long)count[i].active);
	printf("\nmemory of a training step, micro-batch of %d x %d tokens\n", B, L);
	for (int i = 0; i < 5; i++)
		printf("%-18s %15.3f %s\n", memory[i].name, memory[i].bytes / (plan.weights > 1e8 ? 1e9 : 1e6), plan.weights > 1e8 ? "GB" : "MB");
	printf("\nFLOPs of training on a token at seq_len %d: %.4g\n", L, flops);
	return 0;
}

/* What a layout of ranks costs: the memory of the last rank, which holds most, since the last slice of anything is never the smaller one; and
 * the bytes that rank 0 sends in a step, which has the most micro-batches, if every expert gets as many tokens. */
struct layout_plan {
	struct layout layout;
	struct memory_plan memory;
	double certain, rows;        /* bytes without expert rows; of those, when balanced */
	double sent[NUM_TRAFFIC + 1]; /* the last one is the sum */
};

/* Sums over a rank's micro-batches of a step: sequences, and the tokens of them that the rank holds between attention and head. */
struct work { int64_t micro_batches, sequences, tokens; };
static struct work plan_work(const struct config *c, const struct layout *l)
{
	const struct micro_batches mine = micro_batches_of_rank(&l->data, c->train.batch, c->train.micro_batch);
	struct work w = {.micro_batches = mine.num};
	for (int64_t i = 0; i < mine.num; i++) {
		const int64_t left = c->train.batch - mine.first - i * mine.step;
		const int64_t B = left < 0 ? 0 : left < c->train.micro_batch ? left : c->train.micro_batch, T = B * c->data.seq_len;
		w.sequences += B;
		w.tokens += shard_begin(T, l->tensor.rank + 1, l->tensor.size) - shard_begin(T, l->tensor.rank, l->tensor.size);
	}
	return w;
}

/* Adds up what the calls of a training step send. */
static void plan_traffic(struct layout_plan *p, const struct config *config)
{
	const struct model_config *c = &config->model;
	const struct layout *l = &p->layout;
	const int layers = c->num_hidden_layers, moe = layers - c->first_k_dense_replace, E = c->num_experts, e = l->expert.size;
	const double H = c->hidden_size, others = l->tensor.size - 1, world = l->world.size - 1;
	/* The layers, and those with experts, that the backward pass computes again: the last one's activations are still there. */
	const int again = config->train.recompute == TRAIN_RECOMPUTE_LAYER ? layers - 1 : 0, moe_again = again && moe ? moe - 1 : 0;
	const int attention_again = config->train.recompute == TRAIN_RECOMPUTE_ATTENTION ? layers : again;
	const struct work w = plan_work(config, l);
	const double tokens = (double)w.sequences * config->data.seq_len, own = w.tokens;
	double group = 0;            /* tokens of the whole expert group: a share of 1/e of their rows comes to each rank */
	for (int i = 0; i < e; i++) {
		const struct layout member = layout_of_rank(l->expert_data.rank * e + i, l->world.size, l->tensor.size, e);
		group += plan_work(config, &member).tokens;
	}
	const double rows = own * c->num_experts_per_tok * (e - 1) / e, foreign_rows = (group - own) * c->num_experts_per_tok / e;
	double *sent = p->sent;
	/* A layer gathers before query, key and value, again in their backward pass, and in that of the output product; it sums after the output
	 * product and after the backward pass of the first. Head and embedding have a gather and a sum each. */
	sent[TRAFFIC_GATHER] = (3 * layers + attention_again + 2) * others * own * H * sizeof(real);
	sent[TRAFFIC_SUM] = (2 * layers + again + 2) * (tokens - own) * H * sizeof(real);
	/* Rows and their weights go to the experts; the rows' gradients too, and come back with those of the weights. */
	sent[TRAFFIC_PLAN] = (double)w.micro_batches * (moe + moe_again) * (e - 1) * (E / e) * sizeof(int64_t);
	sent[TRAFFIC_DISPATCH] = rows * ((moe + moe_again) * (H + 1) + moe * H) * sizeof(real);
	sent[TRAFFIC_RETURN] = foreign_rows * moe * (2 * H + 1) * sizeof(real);
	/* Of each chunk a rank sends all but its own slice, and later that slice to all others. */
	sent[TRAFFIC_GRADIENTS] = sent[TRAFFIC_WEIGHTS] = (double)(p->memory.num_elements - p->memory.num_state) * sizeof(real);
	sent[TRAFFIC_HEAD] = others * (tokens * (sizeof(real) + 2 * sizeof(double)) + (c->norm_head ? H * sizeof(double) : 0));
	sent[TRAFFIC_STATISTICS] = others * moe * w.sequences * E * sizeof(double) + world * (step_sums_shape(c).size + 3) * sizeof(double) +
			(l->data.size - 1) * sizeof(double); /* the last one: the number of targets */
	for (int i = 0; i < NUM_TRAFFIC; i++)
		sent[NUM_TRAFFIC] += sent[i];
}

/* Fails for a layout that the model cannot have. */
static int plan_layout(struct layout_plan *p, const struct config *c, int ranks, int tensor, int expert)
{
	*p = (struct layout_plan){.layout = layout_of_rank(0, ranks, tensor, expert)};
	const struct layout last = layout_of_rank(ranks - 1, ranks, tensor, expert);
	struct memory_plan *m = &p->memory;
	if (layout_check(&c->model, ranks, tensor, expert) < 0 ||
			plan_memory(m, &c->model, &last, c->train.micro_batch, c->data.seq_len, c->train.recompute) < 0)
		return -1;
	p->certain = (double)m->weights + m->gradients + m->optimizer + m->activations + m->reduction + m->saving;
	p->rows = (double)m->arrivals / expert;
	plan_traffic(p, c);
	return 0;
}

static int compare_sent(const void *a, const void *b)
{
	return compare_doubles(&((const struct layout_plan *)a)->sent[NUM_TRAFFIC], &((const struct layout_plan *)b)->sent[NUM_TRAFFIC]);
}

/* Such as 1.234 GB. */
static const char *format_bytes(char out[32], double bytes)
{
	static const char *const units[] = {"B", "kB", "MB", "GB", "TB", "PB"};
	int i = 0;
	for (; bytes >= 1000 && i < 5; i++)
		bytes /= 1000;
	snprintf(out, 32, "%.*f %s", i ? 3 : 0, bytes, units[i]);
	return out;
}

int print_plan(const struct config *c, int ranks, double room, bool json)
{
	struct layout_plan asked, smallest = {0}, *plans = NULL;
	int n = 0;
	if (plan_layout(&asked, c, ranks, c->parallel.tensor, c->parallel.expert) < 0)
		return -1;
	for (int tensor = 1; tensor <= ranks && tensor <= c->model.num_key_value_heads; tensor++)
		for (int expert = 1; expert <= ranks && expert <= (c->model.num_experts ? c->model.num_experts : 1); expert++) {
			struct layout_plan p;
			if (ranks % tensor || ranks % expert || plan_layout(&p, c, ranks, tensor, expert) < 0)
				continue;
			if (!smallest.certain || p.certain + p.rows < smallest.certain + smallest.rows)
				smallest = p;
			if (p.certain + p.rows > room)
				continue;
			struct layout_plan *more = realloc(plans, (n + 1) * sizeof *plans);
			if (!more) {
				free(plans);
				return fail("out of memory for %d layouts", n + 1);
			}
			plans = more;
			plans[n++] = p;
		}
	if (n)
		qsort(plans, n, sizeof *plans, compare_sent);

	const struct layout *l = &asked.layout;
	const struct memory_plan *m = &asked.memory;
	const struct { const char *name; double bytes; } memory[] = {{"weights", m->weights}, {"gradients", m->gradients},
			{"optimizer", m->optimizer}, {"activations", m->activations}, {"reduction", m->reduction}, {"saving", m->saving},
			{"expert rows", asked.rows}, {"total", asked.certain + asked.rows}, {"expert rows at most", m->arrivals},
			{"total at most", asked.certain + m->arrivals}};
	const int num_memory = sizeof memory / sizeof *memory;
	if (json) {
		printf("{\"ranks\": %d, \"data\": %d, \"tensor\": %d, \"expert\": %d, \"batch\": %d, \"micro_batch\": %d, \"seq_len\": %d, \"memory_bytes\": {",
				ranks, l->data.size, l->tensor.size, l->expert.size, c->train.batch, c->train.micro_batch, c->data.seq_len);
		for (int i = 0; i < num_memory; i++)
			printf("%s\"%s\": %.0f", i ? ", " : "", memory[i].name, memory[i].bytes);
		printf("}, \"bytes_sent\": {");
		for (int i = 0; i <= NUM_TRAFFIC; i++)
			printf("%s\"%s\": %.0f", i ? ", " : "", i < NUM_TRAFFIC ? traffic_names[i] : "total", asked.sent[i]);
		printf("}, \"memory_of_a_rank\": %.0f, \"layouts\": [", room);
		for (int i = 0; i < n; i++)
			printf("%s{\"tensor\": %d, \"expert\": %d, \"memory_bytes\": %.0f, \"memory_bytes_at_most\": %.0f, \"bytes_sent\": %.0f}", i ? ", " : "",
					plans[i].layout.tensor.size, plans[i].layout.expert.size, plans[i].certain + plans[i].rows,
					plans[i].certain + plans[i].memory.arrivals, plans[i].sent[NUM_TRAFFIC]);
		printf("]}\n");
		free(plans);
		return 0;
	}
	char size[3][32];
	printf("%d ranks: data %d x tensor %d, expert %d; a step of %d sequences, micro-batches of %d x %d tokens\n", ranks, l->data.size, l->tensor.size,
			l->expert.size, c->train.batch, c->train.micro_batch, c->data.seq_len);
	printf("\nmemory of a rank; expert rows when balanced, and when all of a group go to one rank\n");
	for (int i = 0; i < num_memory; i++)
		if (memory[i].bytes)
			printf("%-20s %13s\n", memory[i].name, format_bytes(size[0], memory[i].bytes));
	printf("\nsent by a rank in a step\n");
	for (int i = 0; i <= NUM_TRAFFIC; i++)
		if (asked.sent[i])
			printf("%-20s %13s\n", i < NUM_TRAFFIC ? traffic_names[i] : "total", format_bytes(size[0], asked.sent[i]));
	if (n)
		printf("\nlayouts that fit %s a rank\n%6s %6s %6s %12s %12s %12s\n", format_bytes(size[0], room), "data", "tensor", "expert", "memory",
				"at most", "sent");
	else
		printf("\nno layout fits %s a rank; parallel.tensor=%d parallel.expert=%d needs least, %s: take more ranks, a smaller micro_batch or "
				"seq_len, or train.recompute=layer\n", format_bytes(size[0], room), smallest.layout.tensor.size, smallest.layout.expert.size,
				format_bytes(size[1], smallest.certain + smallest.rows));
	for (int i = 0; i < n; i++)
		printf("%6d %6d %6d %12s %12s %12s\n", plans[i].layout.data.size, plans[i].layout.tensor.size, plans[i].layout.expert.size,
				format_bytes(size[0], plans[i].certain + plans[i].rows), format_bytes(size[1], plans[i].certain + plans[i].memory.arrivals),
				format_bytes(size[2], plans[i].sent[NUM_TRAFFIC]));
	free(plans);
	return 0;
}
