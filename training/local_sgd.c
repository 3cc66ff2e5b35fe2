/*
 * training/local_sgd.c - local SGD: the outer step that brings the weights of the replicas together.
 */
#include "training/local_sgd.h"

#include "files/base.h"
#include "files/trace.h"
#include "parallel.h"
#include "model/memory.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ============================================================================================================
 * Making it
 * ========================================================================================================== */

int count_replicas(const struct config *c, int ranks, int tensor, int expert)
{
	int size = tensor; /* of a replica */
	if (c->parallel.sync == SYNC_STEP)
		return 1;
	while (size % expert)
		size += tensor;
	size = c->local.ranks == EVERY_AUTO ? size : (int)c->local.ranks;
	if (ranks % size || ranks / size < 2)
		return fail("parallel.sync is local: %d ranks do not make two replicas or more of %d ranks each; start a "
				"multiple of %d ranks, or change local.ranks", ranks, size, size);
	const int replicas = ranks / size;
	if (c->train.batch % replicas)
		return fail("train.batch is %d: expected a multiple of the %d replicas, which share it", c->train.batch,
				replicas);
	if (c->train.batch_warmup.start % replicas || c->train.batch_warmup.increment % replicas)
		return fail("train.batch_warmup has start %d and increment %d: expected multiples of the %d replicas, which "
				"share the batch", c->train.batch_warmup.start, c->train.batch_warmup.increment, replicas);
	return replicas;
}

int local_sgd_init(struct local_sgd *s, const struct parameter_table *table, const struct local_options *o)
{
	const int replicas = table->layout.replicas.size;
	*s = (struct local_sgd){.options = *o, .replicas = replicas};
	if (replicas == 1)
		return 0;
	for (int i = 0; i < table->num_buckets; i++)
		s->num_blocks = table->buckets[i].block >= s->num_blocks ? table->buckets[i].block + 1 : s->num_blocks;
	const size_t bytes = (table->num_state + 1) * sizeof(real);
	const int64_t scratch = outer_scratch(table);
	s->completed = s->num_blocks;
	s->statistics = calloc((size_t)(s->num_blocks + 1) * replicas, sizeof *s->statistics);
	s->weight = calloc((size_t)s->num_blocks * replicas, sizeof *s->weight);
	s->norm = calloc((size_t)(s->num_blocks + 1) * replicas, sizeof *s->norm);
	s->exchanges = calloc(table->num_buckets, sizeof *s->exchanges);
	s->counts = calloc(replicas, sizeof *s->counts);
	s->w_sync = allocate_large(bytes);
	s->momentum = allocate_large(bytes);
	s->scratch = allocate_large((scratch + 1) * sizeof *s->scratch);
	if (s->statistics && s->weight && s->norm && s->exchanges && s->counts && s->w_sync && s->momentum && s->scratch) {
		memset(s->momentum, 0, bytes);
		return 0;
	}
	return fail("out of memory for the outer step of local SGD: %.1f GB", (2.0 * bytes + scratch * sizeof(real)) / 1e9);
}

void local_sgd_free(struct local_sgd *s)
{
	free(s->statistics);
	free(s->weight);
	free(s->norm);
	free(s->exchanges);
	free(s->counts);
	free(s->w_sync);
	free(s->momentum);
	free(s->scratch);
	free(s->pending.list);
	free(s->drawn);
	*s = (struct local_sgd){.replicas = 1};
}

/* ============================================================================================================
 * Decisions
 * ========================================================================================================== */

/* Whether a norm is far above those before. The smallest standard deviation that counts is a hundredth of the mean:
 * norms that are almost equal by chance must not make a small difference a large one. */
static bool is_anomalous(const struct norm_statistics *s, double norm, const struct local_options *o)
{
	if (!isfinite(norm))
		return true;
	if (!o->penalty || !o->anomaly_deviations || s->count < o->anomaly_warmup)
		return false;
	const double deviation = fmax(sqrt(s->variance), 0.01 * s->mean);
	return norm > s->mean + o->anomaly_deviations * deviation;
}

/* Takes a norm into the statistics: the n-th with weight 1 / n, at least 1 - decay. */
static void take_norm(struct norm_statistics *s, double norm, const struct local_options *o)
{
	const double a = fmax(1.0 / ++s->count, 1 - o->anomaly_decay), difference = norm - s->mean;
	s->mean = fma(a, difference, s->mean);
	s->variance = (1 - a) * fma(a * difference, difference, s->variance);
	s->in_row = 0;
}

int replica_weights(double *weight, struct norm_statistics *statistics, const double *norm, const double *whole, int n,
		const struct local_options *o)
{
	double sum = 0, total = 0;
	int set_aside = 0;
	for (int r = 0; r < n; r++) {
		struct norm_statistics *s = &statistics[r];
		const bool excluded = whole && whole[r] == 0;
		bool anomalous = excluded || is_anomalous(s, norm[r], o);
		if (anomalous && !excluded && isfinite(norm[r]) && ++s->in_row > o->anomaly_warmup) { /* a new level */
			*s = (struct norm_statistics){0};
			anomalous = false;
		}
		if (!anomalous)
			take_norm(s, norm[r], o);
		weight[r] = !anomalous;
		set_aside += anomalous;
		sum += anomalous ? 0 : norm[r];
	}
	const double mean = sum / (n - set_aside);
	for (int r = 0; r < n; r++) {
		if (weight[r] > 0 && o->penalty && mean > 0)
			weight[r] = exp(-norm[r] / mean);
		total += weight[r];
	}
	for (int r = 0; r < n && total > 0; r++)
		weight[r] /= total;
	return set_aside;
}

/* ============================================================================================================
 * Sums over the replicas
 * ========================================================================================================== */

/* x [n] becomes the sum over the replicas, the same bits on all. */
static void sum_over_replicas(struct local_sgd *s, const struct layout *l, real *x, int64_t n)
{
	real *own = x + shard_begin(n, l->replicas.rank, l->replicas.size);
	reduce_scatter(&l->replicas, TRAFFIC_GRADIENTS, own, false, x, n, 1, s->scratch);
	all_gather(&l->replicas, TRAFFIC_GRADIENTS, x, own, n, 1);
}

void reduce_over_replicas(struct local_sgd *s, const struct parameter_table *table, real *grads)
{
	for (int i = 0; i < table->num_buckets; i++) {
		int64_t size;
		const int64_t begin = own_shard(&table->layout, &table->buckets[i], &size);
		sum_over_replicas(s, &table->layout, grads + table->buckets[i].offset + begin, size);
	}
}

/* ============================================================================================================
 * The period and its end
 * ========================================================================================================== */

void local_sgd_begin(struct local_sgd *s, const struct parameter_table *table, const real *weights, int64_t step)
{
	s->in_period = true;
	s->begun = step;
	s->clock = clock_seconds();
	s->num_drawn = 0;
	local_sgd_drop_taken(s);
	for (int i = 0; i < table->num_buckets && !s->w_sync_holds; i++) {
		int64_t size;
		const int64_t begin = own_shard(&table->layout, &table->buckets[i], &size);
		copy_array(s->w_sync + table->buckets[i].state, weights + table->buckets[i].offset + begin, size);
	}
}

void local_sgd_record(struct local_sgd *s, const struct batch_sample *samples, int64_t n)
{
	s->drawn = grow(s->drawn, s->num_drawn, &s->drawn_capacity, n, sizeof *s->drawn);
	memcpy(s->drawn + s->num_drawn, samples, n * sizeof *samples);
	s->num_drawn += n;
}

void local_sgd_drop_taken(struct local_sgd *s)
{
	struct pending_samples *p = &s->pending;
	p->count -= p->taken;
	if (p->taken && p->count)
		memmove(p->list, p->list + p->taken, p->count * sizeof *p->list);
	p->taken = 0;
}

void local_sgd_put_back(struct local_sgd *s, int64_t n)
{
	struct pending_samples *p = &s->pending;
	if (!n)
		return;
	p->list = grow(p->list, p->count, &p->capacity, n, sizeof *p->list);
	memmove(p->list + n, p->list, p->count * sizeof *p->list);
	memcpy(p->list, s->drawn, n * sizeof *p->list);
	p->count += n;
}

void local_sgd_remap(struct local_sgd *s, const int *index)
{
	struct pending_samples *p = &s->pending;
	int64_t kept = 0;
	for (int64_t i = 0; i < p->count; i++)
		if (index[p->list[i].file] >= 0) {
			p->list[kept] = p->list[i];
			p->list[kept++].file = index[p->list[i].file];
		}
	p->count = kept;
}

bool local_sgd_is_over(const struct local_sgd *s, int64_t step, int64_t steps, bool late)
{
	return step >= steps || (s->options.seconds ? late : step - s->begun >= s->options.steps);
}

/* The next bucket of a block from bucket *i on, and what this rank updates of it; NULL after the last one. */
struct outer_shard { real *w, *w_sync, *momentum; int64_t size; };
static const struct bucket *next_bucket(const struct local_sgd *s, const struct parameter_table *table, real *weights,
		int block, int *i, struct outer_shard *x)
{
	while (*i < table->num_buckets && table->buckets[*i].block != block)
		++*i;
	if (*i == table->num_buckets)
		return NULL;
	const struct bucket *b = &table->buckets[(*i)++];
	const int64_t begin = own_shard(&table->layout, b, &x->size);
	*x = (struct outer_shard){weights + b->offset + begin, s->w_sync + b->state, s->momentum + b->state, x->size};
	return b;
}

/* The sum of squares of what this rank updates of a block. */
static double own_square(const struct local_sgd *s, const struct parameter_table *table, real *weights, int block)
{
	struct outer_shard x;
	double square = 0;
	for (int i = 0; next_bucket(s, table, weights, block, &i, &x);)
		square += sum_of_squares(x.w, x.size);
	return square;
}

/* w of the shards becomes d_i. norm [num_blocks + 1, replicas]: of each block, and last of the whole. The same bits on
 * all ranks. */
static void measure(const struct local_sgd *s, const struct parameter_table *table, real *weights, double *norm)
{
	const struct layout *l = &table->layout;
	const int replicas = s->replicas, blocks = s->num_blocks;
	double square[blocks];
	struct outer_shard x;
	for (int b = 0; b < blocks; b++) {
		for (int i = 0; next_bucket(s, table, weights, b, &i, &x);)
			#pragma omp parallel for
			for (int64_t j = 0; j < x.size; j++)
				x.w[j] -= x.w_sync[j];
		square[b] = own_square(s, table, weights, b);
	}
	all_reduce_sum(&l->world, TRAFFIC_STATISTICS, square, blocks);
	memset(norm, 0, (size_t)(blocks + 1) * replicas * sizeof *norm);
	for (int b = 0; b < blocks; b++)
		norm[b * replicas + l->replicas.rank] = square[b];
	all_reduce_sum(&l->replicas, TRAFFIC_STATISTICS, norm, (int64_t)blocks * replicas); /* gathers: the rest is 0 */
	for (int r = 0; r < replicas; r++) {
		for (int b = 0; b < blocks; b++) {
			norm[blocks * replicas + r] += norm[b * replicas + r];
			norm[b * replicas + r] = sqrt(norm[b * replicas + r]);
		}
		norm[blocks * replicas + r] = sqrt(norm[blocks * replicas + r]);
	}
}

/* Multiplies this rank's d_i of a block by its weight, and starts to add up those of the replicas. */
static void start_reduction(struct local_sgd *s, const struct parameter_table *table, real *weights, int block)
{
	const struct group *g = &table->layout.replicas;
	const real weight = (real)s->weight[block * s->replicas + g->rank];
	struct outer_shard x;
	real *scratch = s->scratch;
	for (int i = 0; next_bucket(s, table, weights, block, &i, &x);) {
		#pragma omp parallel for
		for (int64_t j = 0; j < x.size; j++)
			x.w[j] = weight > 0 ? weight * x.w[j] : 0; /* what is set aside may be NaN */
		reduce_scatter_start(&s->exchanges[i - 1].scatter, g, TRAFFIC_GRADIENTS, x.w, x.size, 1, false, scratch);
		scratch += reduce_scatter_scratch(g, x.size, 1);
	}
}

/* Waits for these sums, and starts to gather them. */
static void start_gather(struct local_sgd *s, const struct parameter_table *table, real *weights, int block)
{
	const struct group *g = &table->layout.replicas;
	struct outer_shard x;
	for (int i = 0; next_bucket(s, table, weights, block, &i, &x);)
		reduce_scatter_finish(&s->exchanges[i - 1].scatter, x.w + shard_begin(x.size, g->rank, g->size), false);
	for (int i = 0; next_bucket(s, table, weights, block, &i, &x);)
		all_gather_start(&s->exchanges[i - 1].gather, g, TRAFFIC_GRADIENTS, x.w, x.size, 1);
}

void outer_update(real *w_sync, real *b, const real *d, int64_t n, real scale, const struct local_options *o)
{
	const real momentum = (real)o->outer_momentum, lr = (real)o->outer_lr;
	#pragma omp parallel for
	for (int64_t j = 0; j < n; j++) {
		const real x = scale * d[j];
		b[j] = momentum * b[j] + x;
		w_sync[j] += lr * (x + momentum * b[j]);
	}
}

real clip_scale(double square, const struct local_options *o)
{
	const double norm = sqrt(square);
	return (real)(o->penalty && o->clip && norm > o->clip ? o->clip / norm : 1);
}

/* Waits for the mean d of a block, and takes the outer step. */
static void finish_block(struct local_sgd *s, const struct parameter_table *table, real *weights, int block)
{
	const struct layout *l = &table->layout;
	bool undone = true;
	struct outer_shard x;
	const struct bucket *b;
	for (int r = 0; r < s->replicas; r++)
		undone &= s->weight[block * s->replicas + r] == 0;
	double square = 0;
	if (s->options.penalty && s->options.clip && !undone) {
		square = own_square(s, table, weights, block);
		all_reduce_sum(&l->world, TRAFFIC_STATISTICS, &square, 1);
	}
	const real scale = clip_scale(square, &s->options);
	for (int i = 0; (b = next_bucket(s, table, weights, block, &i, &x));) {
		if (!undone && b->trained) /* else its momentum would move it on */
			outer_update(x.w_sync, x.momentum, x.w, x.size, scale, &s->options);
		copy_array(x.w, x.w_sync, x.size);
		all_gather(sharing_group(l, b->sharing), TRAFFIC_WEIGHTS, weights + b->offset, x.w, b->size, 1);
	}
}

void local_sgd_advance(struct local_sgd *s, const struct parameter_table *table, real *weights)
{
	const int block = s->completed++;
	for (int i = 0; i < table->num_buckets; i++)
		if (table->buckets[i].block == block)
			collective_finish(&s->exchanges[i].gather);
	if (block + 1 < s->num_blocks)
		start_gather(s, table, weights, block + 1);
	if (block + 2 < s->num_blocks)
		start_reduction(s, table, weights, block + 2);
	finish_block(s, table, weights, block);
}

void local_sgd_average_bias(struct local_sgd *s, const struct parameter_table *table, real *weights)
{
	struct optimizer_shard_iterator walk = {0};
	struct optimizer_shard p;
	while (next_optimizer_shard(table, &walk, &p)) { /* the same shards on the ranks that share them out */
		if (!has_suffix(p.parameter->name, EXPERT_BIAS))
			continue;
		const int64_t n = p.end - p.from;
		real *bias = weights + p.parameter->offset + p.from;
		double sum[n];
		for (int64_t e = 0; e < n; e++)
			sum[e] = bias[e];
		all_reduce_sum(&table->layout.replicas, TRAFFIC_STATISTICS, sum, n);
		for (int64_t e = 0; e < n; e++)
			s->w_sync[p.state + e] = bias[e] = (real)(sum[e] / s->replicas);
	}
}

void local_sgd_synchronise(struct local_sgd *s, const struct parameter_table *table, real *weights,
		struct synchronisation *out)
{
	const int replicas = s->replicas, blocks = s->num_blocks;
	double *norm = s->norm, *whole = norm + (int64_t)blocks * replicas, whole_weight[replicas];
	measure(s, table, weights, norm);
	replica_weights(whole_weight, s->statistics + (int64_t)blocks * replicas, whole, NULL, replicas, &s->options);
	out->undone = 0;
	memset(out->set_aside, 0, replicas * sizeof *out->set_aside);
	memcpy(out->norm, whole, replicas * sizeof *whole);
	for (int b = 0; b < blocks; b++) {
		double *weight = s->weight + (int64_t)b * replicas;
		out->undone += replicas == replica_weights(weight, s->statistics + (int64_t)b * replicas, norm + b * replicas,
				whole_weight, replicas, &s->options);
		for (int r = 0; r < replicas; r++)
			out->set_aside[r] += weight[r] == 0;
	}
	s->synchronisations++;
	s->in_period = false;
	s->w_sync_holds = true;
	s->completed = 0;
	start_reduction(s, table, weights, 0);
	start_gather(s, table, weights, 0);
	if (blocks > 1)
		start_reduction(s, table, weights, 1);
}

void local_sgd_report(const struct local_sgd *s, const struct synchronisation *x, const double *steps,
		const struct event_log *log, int64_t step)
{
	json_t *counts = json_array(), *norms = json_array(), *set_aside = json_array();
	for (int r = 0; r < s->replicas; r++) {
		json_array_append_new(counts, json_integer((json_int_t)steps[r]));
		json_array_append_new(norms, json_number(x->norm[r]));
		json_array_append_new(set_aside, json_integer(x->set_aside[r]));
	}
	event_write(log, step, "synchronisation", json_pack("{s:I, s:o, s:o, s:o, s:i}", "number",
			(json_int_t)s->synchronisations, "steps", counts, "norms", norms, "blocks_set_aside", set_aside,
			"blocks_undone", x->undone));
}

/* ============================================================================================================
 * In the checkpoint
 * ========================================================================================================== */

/* The pending samples that are not taken yet. */
static json_t *pending_to_json(const struct local_sgd *s)
{
	json_t *pending = json_array();
	for (int64_t i = s->pending.taken, n; i < s->pending.count; i += n) { /* runs of samples: [file, first, last] */
		const struct batch_sample *x = s->pending.list + i;
		for (n = 1; i + n < s->pending.count && x[n].file == x->file && x[n].number == x->number + n;)
			n++;
		json_array_append_new(pending, json_pack("[i, I, I]", x->file, (json_int_t)x->number,
				(json_int_t)(x->number + n - 1)));
	}
	return pending;
}

json_t *local_sgd_to_json(const struct local_sgd *s)
{
	json_t *statistics, *counts, *pending = pending_to_json(s);
	if (s->replicas == 1 && json_array_size(pending) == 0) {
		json_decref(pending);
		return NULL;
	}
	if (s->replicas == 1)
		return json_pack("{s:i, s:o}", "replicas", 1, "pending", pending);
	statistics = json_array();
	counts = json_array();
	for (int i = 0; i < (s->num_blocks + 1) * s->replicas; i++) {
		const struct norm_statistics *x = &s->statistics[i];
		json_array_append_new(statistics, json_pack("[f, f, I, I]", x->mean, x->variance, (json_int_t)x->count,
				(json_int_t)x->in_row));
	}
	for (int r = 0; r < s->replicas; r++)
		json_array_append_new(counts, json_integer(s->counts[r]));
	return json_pack("{s:i, s:I, s:I, s:o, s:o, s:o}", "replicas", s->replicas, "synchronisations",
			(json_int_t)s->synchronisations, "carry", (json_int_t)s->carry, "counts", counts, "pending", pending,
			"statistics", statistics);
}

/* Reads entry i of a list, the statistics of one replica and block. */
static int read_statistics(struct norm_statistics *x, const json_t *list, size_t i, const char *where)
{
	const json_t *v = json_array_get(list, i);
	x->mean = json_number_value(json_array_get(v, 0));
	x->variance = json_number_value(json_array_get(v, 1));
	x->count = json_integer_value(json_array_get(v, 2));
	x->in_row = json_integer_value(json_array_get(v, 3));
	return json_array_size(v) == 4 && x->mean >= 0 && x->variance >= 0 && x->count >= 0 && x->in_row >= 0 ? 0
			: fail("%s: `statistics` entry %zu is wrong; expected a mean, a variance and two counts, from 0", where, i);
}

/* Reads entry i of a list, a run of samples that wait. */
static int read_pending(struct pending_samples *p, const json_t *list, size_t i, const char *where, int num_files)
{
	const json_t *v = json_array_get(list, i);
	const int64_t file = json_integer_value(json_array_get(v, 0)), first = json_integer_value(json_array_get(v, 1)),
			last = json_integer_value(json_array_get(v, 2));
	if (json_array_size(v) != 3 || file < 0 || file >= num_files || first < 0 || last < first ||
			last - first > INT32_MAX)
		return fail("%s: `pending` entry %zu is wrong; expected a file, 0 to %d, and its first and last sample", where,
				i, num_files - 1);
	p->list = grow(p->list, p->count, &p->capacity, last - first + 1, sizeof *p->list);
	for (int64_t number = first; number <= last; number++)
		p->list[p->count++] = (struct batch_sample){.file = (int)file, .number = number};
	return 0;
}

/* Reads what replicas remember of each other. */
static int read_replicas(struct local_sgd *s, const json_t *state, const char *where, int64_t theirs)
{
	const json_t *statistics = json_object_get(state, "statistics"), *counts = json_object_get(state, "counts");
	s->synchronisations = s->carry = 0;
	s->in_period = false;
	s->w_sync_holds = false;
	s->completed = s->num_blocks;
	memset(s->statistics, 0, (size_t)(s->num_blocks + 1) * s->replicas * sizeof *s->statistics);
	memset(s->counts, 0, s->replicas * sizeof *s->counts);
	if (theirs == 1)
		return 0;
	if (field_int(state, where, "synchronisations", 0, INT64_MAX / 2, &s->synchronisations) < 0 ||
			field_int(state, where, "carry", 0, theirs - 1, &s->carry) < 0)
		return -1;
	if (json_array_size(statistics) != (size_t)theirs * (s->num_blocks + 1) ||
			json_array_size(counts) != (size_t)theirs)
		return fail("%s: %zu statistics and %zu counts; expected those of %d blocks and %lld replicas", where,
				json_array_size(statistics), json_array_size(counts), s->num_blocks, (long long)theirs);
	for (int b = 0; b <= s->num_blocks; b++)
		for (int r = 0; r < s->replicas; r++)
			if (read_statistics(&s->statistics[(int64_t)b * s->replicas + r], statistics, b * theirs + r % theirs,
					where) < 0)
				return -1;
	if (theirs == s->replicas)
		for (int r = 0; r < s->replicas; r++)
			s->counts[r] = json_integer_value(json_array_get(counts, r));
	else
		s->carry = s->carry * s->replicas / theirs;
	return 0;
}

int local_sgd_from_json(struct local_sgd *s, const json_t *state, const char *where, int num_files)
{
	const json_t *pending = json_object_get(state, "pending");
	int64_t theirs = 1;
	s->pending.count = s->pending.taken = 0;
	if (state && field_int(state, where, "replicas", 1, INT32_MAX, &theirs) < 0)
		return -1;
	if (s->replicas > 1 && read_replicas(s, state, where, theirs) < 0)
		return -1;
	for (size_t i = 0; i < json_array_size(pending); i++)
		if (read_pending(&s->pending, pending, i, where, num_files) < 0)
			return -1;
	return 0;
}
