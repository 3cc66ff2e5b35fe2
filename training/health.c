/*
 * training/health.c - sick hardware: replicas that differ, results that are not the same twice, slow ranks.
 */
#define _GNU_SOURCE
#include "training/health.h"

#include "files/base.h"
#include "model/parameters.h"
#include "parallel.h"
#include "training/events.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What is compared: the parameters of each sharing (enum sharing), and last the values. */
enum { CLASS_VALUES = SHARED_BY_EXPERT_DATA + 1, NUM_CLASSES };

/* [size, n]: what each rank of a group has in its `mine` [n]. The caller frees it. */
static int64_t *gather(const struct group *g, const int64_t *mine, int n)
{
	int64_t *in = allocate((size_t)g->size * n * sizeof *in), *all = allocate((size_t)g->size * n * sizeof *all);
	for (int r = 0; r < g->size; r++)
		for (int i = 0; i < n; i++)
			in[(int64_t)r * n + i] = mine[i];
	all_to_all_counts(g, TRAFFIC_STATISTICS, all, in, n);
	free(in);
	return all;
}

/* Bits of a double as an integer, and back. */
static int64_t bits_of(double x)
{
	int64_t bits;
	memcpy(&bits, &x, sizeof bits);
	return bits;
}

static double double_of(int64_t bits)
{
	double x;
	memcpy(&x, &bits, sizeof x);
	return x;
}

/* ============================================================================================================
 * Replicas
 * ========================================================================================================== */

static const struct group *class_group(const struct layout *l, int class)
{
	return class == CLASS_VALUES ? &l->world : sharing_group(l, class);
}

/* The first of the ranks that have the same as this one of a class. */
static int first_replica(const struct layout *l, int class)
{
	return class == SHARED_BY_DATA ? l->tensor.rank : class == SHARED_BY_EXPERT_DATA ? l->expert.rank : 0;
}

/* The number among all ranks of the first rank of the world, which is a replica's (struct layout). */
static int first_rank(const struct layout *l)
{
	return l->all.rank - l->world.rank;
}

/* Things are numbered: the parameters of the table, then the values. */
static int num_things(const struct health_input *in)
{
	return in->table->num_parameters + in->num_values;
}

static int class_of(const struct health_input *in, int thing)
{
	return thing < in->table->num_parameters ? (int)in->table->parameters[thing].sharing : CLASS_VALUES;
}

/* The checksum of a thing, which continues another one. */
static uint32_t checksum(const struct health_input *in, int thing, uint32_t crc)
{
	if (class_of(in, thing) == CLASS_VALUES) {
		const struct replicated *v = &in->values[thing - in->table->num_parameters];
		return crc_of(crc, v->data, v->size);
	}
	const struct parameter *p = &in->table->parameters[thing];
	return crc_of(crc, (const uint8_t *)(in->weights + p->offset), parameter_size(p) * sizeof *in->weights);
}

/* Whether rank `me` of `size` is to be named: its value, all[me * stride], is not what most ranks have, or no value is,
 * and they differ. */
static bool is_odd(const int64_t *all, int64_t stride, int size, int me)
{
	int64_t candidate = 0;
	int count = 0; /* of the candidate over all others: who has the majority is left at the end */
	for (int r = 0; r < size; r++) {
		if (count == 0)
			candidate = all[r * stride];
		count += all[r * stride] == candidate ? 1 : -1;
	}
	count = 0;
	for (int r = 0; r < size; r++)
		count += all[r * stride] == candidate;
	return 2 * count <= size || all[me * stride] != candidate;
}

/* What a rank is named for: how many things, and the first of them. */
enum { NAMED_THINGS = 8 };
struct odd_things { int64_t count, thing[NAMED_THINGS]; };
enum { ODD_THINGS = sizeof(struct odd_things) / sizeof(int64_t) };

/* The things of this rank that are not what its replicas have. Collective. */
static struct odd_things find_odd_things(const struct health_input *in)
{
	struct odd_things odd = {0};
	int64_t *mine = allocate(num_things(in) * sizeof *mine);
	int *number = allocate(num_things(in) * sizeof *number);
	for (int class = 0; class < NUM_CLASSES; class++) {
		const struct group *g = class_group(&in->table->layout, class);
		int n = 0;
		for (int i = 0; i < num_things(in); i++)
			if (class_of(in, i) == class) {
				number[n] = i;
				mine[n++] = checksum(in, i, 0);
			}
		int64_t *all = gather(g, mine, n);
		for (int i = 0; i < n; i++)
			if (is_odd(all + i, n, g->size, g->rank)) {
				if (odd.count < NAMED_THINGS)
					odd.thing[odd.count] = number[i];
				odd.count++;
			}
		free(all);
	}
	free(mine);
	free(number);
	return odd;
}

/* The names of what a rank is named for, from that rank's table. */
static json_t *names_of(const struct health_input *in, int rank, const struct odd_things *odd)
{
	const struct layout *l = &in->table->layout;
	const struct layout its = layout_of_rank(rank, l->world.size, l->tensor.size, l->expert.size);
	struct parameter_table table;
	const int rc = parameter_table_init(&table, in->config, &its);
	json_t *names = json_array();
	for (int i = 0; i < odd->count && i < NAMED_THINGS; i++) {
		const int64_t value = odd->thing[i] - (rc == 0 ? table.num_parameters : 0);
		json_array_append_new(names, json_string(rc < 0 ? "?" : value >= 0 ? in->values[value].name
				: table.parameters[odd->thing[i]].name));
	}
	if (rc == 0)
		parameter_table_free(&table);
	return names;
}

/* Finds out what differs, and on which ranks, and tells. Returns -1. Collective. */
static int report_difference(const struct health_input *in, const struct event_log *log, int64_t step, bool twice)
{
	const struct group *world = &in->table->layout.world;
	const struct odd_things odd = find_odd_things(in);
	int64_t *all = gather(world, (const int64_t *)&odd, ODD_THINGS);
	json_t *ranks = json_array();
	struct text who = {0};
	for (int r = 0; r < world->size; r++) {
		const struct odd_things *its = (const struct odd_things *)(all + (int64_t)r * ODD_THINGS);
		char line[256];
		if (!its->count)
			continue;
		const int rank = first_rank(&in->table->layout) + r;
		json_t *names = names_of(in, r, its);
		snprintf(line, sizeof line, "%srank %d on %s differs in %s", who.size ? "; " : "", rank,
				parallel_rank_host(rank), json_string_value(json_array_get(names, 0)));
		text_append_string(&who, line);
		snprintf(line, sizeof line, " and %lld more", (long long)its->count - 1);
		text_append_string(&who, its->count > 1 ? line : "");
		json_array_append_new(ranks, json_pack("{s:i, s:s, s:o, s:I}", "rank", rank, "host", parallel_rank_host(rank),
				"tensors", names, "count", (json_int_t)its->count));
	}
	event_write(log, step, "replicas_differ", json_pack("{s:o, s:s}", "ranks", ranks, "computed_twice",
			twice ? "agrees: the fault repeats itself, or is in memory or on the way between ranks" : "differs"));
	fail("step %lld: replicas differ: %.3000s. %sThe step was not taken, nothing is saved, and the run must go back to "
			"a checkpoint: start it again, without that machine if it is named again", (long long)step + 1,
			who.size ? who.data : "the ranks disagree in what they sent each other", twice
			? "A micro-batch computed twice gave the same, so the fault repeats itself, or is in memory. "
			: "A micro-batch computed twice differed too. ");
	free(who.data);
	free(all);
	return -1;
}

int health_check(const struct health_input *in, const struct event_log *log, int64_t step)
{
	enum { LOSS = NUM_CLASSES, NUM_NUMBERS = LOSS + 2 };
	const struct layout *l = &in->table->layout;
	const int size = l->world.size;
	int64_t mine[NUM_NUMBERS] = {[LOSS] = bits_of(in->loss[0]), [LOSS + 1] = bits_of(in->loss[1])};
	bool twice = true, equal = true;
	for (int i = 0; i < num_things(in); i++) {
		int64_t *total = &mine[class_of(in, i)];
		/* alone in its group, a parameter has no replica */
		if (class_group(l, class_of(in, i))->size > 1)
			*total = checksum(in, i, (uint32_t)*total);
	}
	int64_t *all = gather(&l->world, mine, NUM_NUMBERS);
	for (int r = 0; r < size; r++) {
		const int64_t *its = all + (int64_t)r * NUM_NUMBERS;
		const struct layout its_layout = layout_of_rank(r, size, l->tensor.size, l->expert.size);
		for (int class = 0; class < NUM_CLASSES; class++)
			if (its[class] != all[(int64_t)first_replica(&its_layout, class) * NUM_NUMBERS + class])
				equal = false;
		if (its[LOSS] == its[LOSS + 1])
			continue;
		twice = false;
		const int rank = first_rank(l) + r;
		event_write(log, step, "miscomputed", json_pack("{s:i, s:s, s:o, s:o}", "rank", rank, "host",
				parallel_rank_host(rank), "loss", json_number(double_of(its[LOSS])), "difference",
				json_number(double_of(its[LOSS + 1]) - double_of(its[LOSS]))));
		if (l->world.rank == 0)
			fprintf(stderr, "warning: step %lld: rank %d on %s computed a micro-batch twice, and the losses %.17g and "
					"%.17g differ: a passing fault of that machine%s\n", (long long)step + 1, rank,
					parallel_rank_host(rank), double_of(its[LOSS]), double_of(its[LOSS + 1]),
					l->tensor.size > 1 || l->expert.size > 1 ? ", or of one that computes with it" : "");
	}
	free(all);
	return equal ? 0 : report_difference(in, log, step, twice);
}

/* ============================================================================================================
 * Slow ranks
 * ========================================================================================================== */

void slow_ranks_free(struct slow_ranks *s)
{
	free(s->rank);
	*s = (struct slow_ranks){0};
}

void slow_ranks_step(struct slow_ranks *s, const struct group *world, double seconds, double work,
		const struct event_log *log, int64_t step)
{
	if (world->size == 1)
		return;
	s->seconds += seconds;
	s->work += work;
	if (++s->steps < SLOW_WINDOW)
		return;
	const int64_t mine = bits_of(s->work > 0 ? s->seconds / s->work : 0);
	int64_t *all = gather(world, &mine, 1);
	double *pace = allocate(world->size * sizeof *pace);
	for (int r = 0; r < world->size; r++)
		pace[r] = double_of(all[r]);
	slow_ranks_compare(s, pace, world->size, world->rank == 0, log, step);
	free(pace);
	free(all);
	s->seconds = s->work = s->steps = 0;
}

void slow_ranks_compare(struct slow_ranks *s, const double *pace, int num_ranks, bool tell,
		const struct event_log *log, int64_t step)
{
	double *sorted = allocate(num_ranks * sizeof *sorted);
	int n = 0;
	for (int r = 0; r < num_ranks; r++)
		if (pace[r] > 0)
			sorted[n++] = pace[r];
	qsort(sorted, n, sizeof *sorted, compare_doubles);
	const double median = n ? sorted[(n - 1) / 2] : 1;
	free(sorted);
	if (s->num_ranks != num_ranks) {
		slow_ranks_free(s);
		s->rank = allocate(num_ranks * sizeof *s->rank);
		s->num_ranks = num_ranks;
	}
	for (int r = 0; r < num_ranks; r++) {
		struct rank_speed *x = &s->rank[r];
		const double ratio = pace[r] / median;
		const bool above = ratio > SLOW_RATIO, slow = above && x->above;
		x->above = above;
		if (slow && !x->named && (!x->told || step >= x->told + SLOW_AGAIN)) {
			x->named = true;
			x->told = step;
			event_write(log, step, "slow_rank", json_pack("{s:i, s:s, s:f, s:f}", "rank", r, "host",
					parallel_rank_host(r), "ratio", ratio, "expected_loss", 1 - 1 / ratio));
			if (tell)
				fprintf(stderr, "warning: step %lld: rank %d on %s is slow: it computes %.2f times as long as the "
						"median of the ranks. As all wait for it, the run loses up to %.0f%% of its speed\n",
						(long long)step, r, parallel_rank_host(r), ratio, 100 * (1 - 1 / ratio));
		} else if (!above && x->named) {
			x->named = false;
			event_write(log, step, "slow_rank_over", json_pack("{s:i, s:s, s:f}", "rank", r, "host",
					parallel_rank_host(r), "ratio", ratio));
		}
	}
}
