/*
 * commands/trace.c - `ling trace`: where the time of a training run went, by the trace that each rank leaves.
 *
 *   Totals         by operation, by collective, by rank, by step
 *   Places         --hang: where each rank is, and who is in the way
 *   Trace events   --perfetto: the records as a file for ui.perfetto.dev
 *   Text, and the command line
 * What is printed is built as JSON first. Own time is time without waiting for other ranks.
 */
#define _GNU_SOURCE
#include "commands/trace.h"

#include "commands/hang.h"
#include "commands/result.h"
#include "commands/runs.h"
#include "files/base.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* When a rank last wrote something: trace_now() there. */
static uint64_t newest_time(const struct trace *t)
{
	uint64_t newest = t->phase_begun > t->started ? t->phase_begun : t->started;
	newest = t->last_sign > newest ? t->last_sign : newest;
	for (int64_t i = 0; i < t->num_records; i++) {
		const struct trace_record *r = &t->records[i];
		const uint64_t last = r->end > r->arrived ? r->end : r->arrived;
		newest = last > newest ? last : newest;
	}
	return newest;
}

/* ============================================================================================================
 * Totals
 * ========================================================================================================== */

/* A counter of several ranks, passes or layers together, in seconds. */
struct sum {
	struct trace_counter all;    /* its histogram, and its count */
	double seconds, waited, work;
	double possible;             /* work that the ranks could have done in the same own time; NaN: not known */
};

/* peak: what the rank can do in a second, of the unit of the work; 0: not known. */
static void sum_add(struct sum *s, const struct trace_counter *c, double peak)
{
	const double seconds = c->nanoseconds * 1e-9, waited = fmin(c->waited * 1e-9, seconds);
	s->all.count += c->count;
	s->seconds += seconds;
	s->waited += waited;
	s->work += c->work;
	s->possible += c->count == 0 ? 0 : peak > 0 ? (seconds - waited) * peak : NAN;
	for (int i = 0; i < TRACE_BUCKETS; i++) {
		const uint64_t n = (uint64_t)s->all.histogram[i] + c->histogram[i];
		s->all.histogram[i] = n < UINT32_MAX ? (uint32_t)n : UINT32_MAX;
	}
}

static double rank_peak(const struct trace *t, enum work_unit unit)
{
	return unit == WORK_FLOPS ? t->peak_flops : unit == WORK_BYTES ? t->peak_bandwidth : 0;
}

/* a / b; NaN where b is 0. */
static double ratio(double a, double b)
{
	return b != 0 ? a / b : NAN;
}

/* A row of a table, with the seconds that it is sorted by. */
struct row { double seconds; json_t *json; };

/* For qsort: the longest first. */
static int compare_rows(const void *a, const void *b)
{
	return compare_doubles(&((const struct row *)b)->seconds, &((const struct row *)a)->seconds);
}

static json_t *sorted_rows(struct row *rows, int n)
{
	json_t *array = json_array();
	qsort(rows, n, sizeof *rows, compare_rows);
	for (int i = 0; i < n; i++)
		json_array_append_new(array, rows[i].json);
	return array;
}

/* total: the seconds of all ranks that shares are of. Seconds in the result are those of a rank, as a mean. */
static json_t *operations_to_json(const struct trace *list, int count, enum trace_part part, double total)
{
	struct row rows[NUM_OPERATIONS * NUM_PASSES];
	int n = 0;
	for (int op = OP_NONE + 1; op < NUM_OPERATIONS; op++)
		for (int pass = 0; pass < NUM_PASSES; pass++) {
			const enum work_unit unit = operations[op].unit;
			struct sum s = {0};
			for (int i = 0; i < count; i++)
				sum_add(&s, &list[i].operation[part][op][pass], rank_peak(&list[i], unit));
			if (!s.all.count)
				continue;
			const double own = s.seconds - s.waited;
			rows[n].seconds = s.seconds;
			rows[n++].json = json_pack("{s:s, s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}",
					"operation", operations[op].name, "pass", pass_names[pass],
					"count", result_whole(s.all.count), "median_seconds", result_number(trace_quantile(&s.all, 0.5)),
					"p99_seconds", result_number(trace_quantile(&s.all, 0.99)),
					"seconds", result_number(s.seconds / count), "own_seconds", result_number(own / count),
					"waiting_seconds", result_number(s.waited / count),
					"own_share", result_number(ratio(own, total)),
					"waiting_share", result_number(ratio(s.waited, total)),
					"unit", unit ? json_string(unit == WORK_FLOPS ? "FLOP" : "B") : json_null(),
					"rate", result_number(s.work > 0 ? ratio(s.work, own) : NAN),
					"peak_share", result_number(s.work > 0 ? ratio(s.work, s.possible) : NAN));
		}
	return sorted_rows(rows, n);
}

static json_t *collectives_to_json(const struct trace *list, int count, enum trace_part part, double total)
{
	struct row rows[NUM_COLLECTIVES];
	int n = 0;
	for (int what = 0; what < NUM_COLLECTIVES; what++) {
		struct sum s = {0};
		for (int i = 0; i < count; i++)
			sum_add(&s, &list[i].collective[part][what], 0);
		if (!s.all.count)
			continue;
		rows[n].seconds = s.waited;
		rows[n++].json = json_pack("{s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "collective", traffic_names[what],
				"count", result_whole(s.all.count), "median_wait_seconds", result_number(trace_quantile(&s.all, 0.5)),
				"p99_wait_seconds", result_number(trace_quantile(&s.all, 0.99)),
				"waiting_seconds", result_number(s.waited / count),
				"waiting_share", result_number(ratio(s.waited, total)),
				"bytes", result_whole(s.work / count), "bytes_per_second", result_number(ratio(s.work, s.seconds)));
	}
	return sorted_rows(rows, n);
}

/* What a rank did in a part. In PART_STEP `seconds` and `waited` are of the steps, else of the operations. */
struct rank_time {
	double seconds, waited, unnamed; /* unnamed: outside of all operations */
	double times;                /* the steps, also a share of one that was not finished; of another part 1 */
	double own[NUM_OPERATIONS];  /* own seconds of each operation, all passes; [OP_NONE]: of what has no name */
};

static struct rank_time time_of_rank(const struct trace *t, enum trace_part part)
{
	struct rank_time r = {.times = 1};
	for (int op = OP_NONE + 1; op < NUM_OPERATIONS; op++)
		for (int pass = 0; pass < NUM_PASSES; pass++) {
			struct sum s = {0};
			sum_add(&s, &t->operation[part][op][pass], 0);
			r.own[op] += s.seconds - s.waited;
			r.seconds += s.seconds;
			r.waited += s.waited;
		}
	if (part == PART_STEP && t->steps.count) {
		const bool in_step = t->phase == HEARTBEAT_STEP || t->phase == HEARTBEAT_FIRST_STEP;
		const uint64_t newest = in_step ? newest_time(t) : 0;
		const double whole = t->steps.nanoseconds * 1e-9, named = r.seconds, waited = r.waited;
		const double unfinished = newest > t->phase_begun ? (newest - t->phase_begun) * 1e-9 : 0;
		r.seconds = fmax(whole + unfinished, named);
		r.waited = fmin(fmax(t->steps.waited * 1e-9, waited), r.seconds);
		r.unnamed = r.seconds - named;
		r.own[OP_NONE] = fmax(r.unnamed - (r.waited - waited), 0);
		r.times = t->steps.count * (whole > 0 ? (whole + unfinished) / whole : 1);
	}
	return r;
}

/* The median of n values; of two the smaller one, so that of two ranks the faster one is the measure. */
static double median(const double *values, int n)
{
	double *sorted = allocate(n * sizeof *sorted);
	memcpy(sorted, values, n * sizeof *sorted);
	qsort(sorted, n, sizeof *sorted, compare_doubles);
	const double middle = sorted[(n - 1) / 2];
	free(sorted);
	return middle;
}

/* The rank that takes longer than the others time after time, and in which operation: where the median duration of an
 * operation, without waiting, times how often it is done in a step, is furthest above that of the median rank. A rank
 * that was disturbed a few times, on a machine with other work for example, does not count here. Null for one rank. */
static json_t *steadily_slow_to_json(const struct trace *list, const struct rank_time *time, int count,
		enum trace_part part)
{
	double *seconds = allocate(count * sizeof *seconds), most = 0;
	int slowest = 0, where = OP_NONE;
	for (int op = OP_NONE + 1; op < NUM_OPERATIONS; op++)
		for (int pass = 0; pass < NUM_PASSES; pass++) {
			for (int i = 0; i < count; i++) {
				const struct trace_counter *c = &list[i].operation[part][op][pass];
				seconds[i] = trace_quantile(c, 0.5) * c->count / time[i].times;
			}
			const double usual = median(seconds, count);
			for (int i = 0; i < count; i++)
				if (seconds[i] - usual > most)
					most = seconds[i] - usual, slowest = i, where = op;
		}
	free(seconds);
	return count < 2 ? json_null() : json_pack("{s:i, s:s, s:o}", "rank", list[slowest].rank, "operation",
			operations[where].name, "excess_seconds", result_number(most));
}

/* The rank with most own time, by how much it is more than the median of the ranks, and in which operation most of
 * that is. Null for one rank. */
static json_t *slowest_to_json(const struct trace *list, const struct rank_time *time, int count)
{
	double *own = allocate(count * sizeof *own), most = 0;
	int slowest = 0, where = OP_NONE;
	for (int i = 0; i < count; i++) {
		own[i] = (time[i].seconds - time[i].waited) / time[i].times;
		slowest = own[i] > own[slowest] ? i : slowest;
	}
	const double usual = median(own, count), slow = own[slowest];
	for (int op = 0; op < NUM_OPERATIONS; op++) {
		for (int i = 0; i < count; i++)
			own[i] = time[i].own[op] / time[i].times;
		const double more = own[slowest] - median(own, count);
		if (more > most)
			most = more, where = op;
	}
	free(own);
	if (count < 2)
		return json_null();
	return json_pack("{s:i, s:o, s:o, s:o, s:s, s:o}", "rank", list[slowest].rank, "host",
			json_cstring(list[slowest].host), "own_seconds", result_number(slow), "median_own_seconds",
			result_number(usual), "operation", operations[where].name, "operation_excess_seconds", result_number(most));
}

static json_t *ranks_to_json(const struct trace *list, const struct rank_time *time, int count)
{
	json_t *array = json_array();
	for (int i = 0; i < count; i++) {
		const struct rank_time *r = &time[i];
		json_array_append_new(array, json_pack("{s:i, s:o, s:o, s:o, s:o, s:o, s:o}", "rank", list[i].rank, "host",
				json_cstring(list[i].host), "seconds", result_number(r->seconds / r->times),
				"own_seconds", result_number((r->seconds - r->waited) / r->times),
				"waiting_seconds", result_number(r->waited / r->times),
				"own_share", result_number(ratio(r->seconds - r->waited, r->seconds)),
				"lost_records", json_integer(list[i].lost)));
	}
	return array;
}

/* -- step by step -- */

/* A step of one rank as the ring has it. `again`: how many later records are of a step of the same number, which a
 * skipped batch or going back leaves. */
struct ring_step { int64_t step, again; double seconds, waited; };

/* The whole steps in a ring, the newest first: an owned array of *n. */
static struct ring_step *steps_of_ring(const struct trace *t, int64_t most, int *n)
{
	struct ring_step *steps = NULL;
	size_t capacity = 0;
	*n = 0;
	for (int64_t i = t->num_records - 1; i >= 0 && *n < most; i--) {
		const struct trace_record *p = &t->records[i];
		if (p->kind != RECORD_PHASE || p->part != PART_STEP || !p->end)
			continue;
		struct ring_step s = {.step = p->step, .seconds = (p->end - p->begin) * 1e-9};
		for (int64_t j = i; j < t->num_records && t->records[j].begin < p->end; j++) {
			const struct trace_record *r = &t->records[j];
			if (r->kind == RECORD_COLLECTIVE && r->part == PART_STEP && r->end)
				s.waited += (r->end - r->arrived) * 1e-9;
			else if (r->kind == RECORD_OPERATION && r->part == PART_CHECK && r->end)
				s.seconds -= (r->end - r->begin) * 1e-9;
		}
		s.waited = fmin(s.waited, s.seconds);
		for (int j = 0; j < *n; j++)
			s.again += steps[j].step == s.step;
		steps = grow(steps, *n, &capacity, 1, sizeof *steps);
		steps[(*n)++] = s;
	}
	return steps;
}

/* The same step of another rank, NULL if its ring has it no more. It is near place k of its list. */
static const struct ring_step *find_step(const struct ring_step *steps, int n, const struct ring_step *wanted, int k)
{
	for (int i = 0; i < 2 * n; i++) {
		const int j = i % 2 ? k - (i + 1) / 2 : k + i / 2;
		if (j >= 0 && j < n && steps[j].step == wanted->step && steps[j].again == wanted->again)
			return &steps[j];
	}
	return NULL;
}

/* The newest steps, the oldest of them first. */
static json_t *steps_to_json(const struct trace *list, int count, int64_t most)
{
	json_t *array = json_array();
	struct ring_step **steps = allocate(count * sizeof *steps);
	int *n = allocate(count * sizeof *n);
	for (int i = 0; i < count; i++) /* a rank may be some steps behind */
		steps[i] = steps_of_ring(&list[i], most + (i ? 16 : 0), &n[i]);
	for (int k = n[0] - 1; k >= 0; k--) {
		double seconds = 0, own = 0, waited = 0, most_own = -1;
		int ranks = 0, slowest = 0;
		for (int i = 0; i < count; i++) {
			const struct ring_step *s = find_step(steps[i], n[i], &steps[0][k], k);
			if (!s)
				continue;
			ranks++;
			seconds = fmax(seconds, s->seconds);
			own += s->seconds - s->waited;
			waited += s->waited;
			if (s->seconds - s->waited > most_own)
				most_own = s->seconds - s->waited, slowest = list[i].rank;
		}
		json_array_append_new(array, json_pack("{s:I, s:i, s:o, s:o, s:o, s:i, s:o}", "step",
				(json_int_t)steps[0][k].step, "ranks", ranks, "seconds", result_number(seconds),
				"own_seconds", result_number(own / ranks), "waiting_seconds", result_number(waited / ranks),
				"slowest_rank", slowest, "slowest_own_seconds", result_number(most_own)));
	}
	for (int i = 0; i < count; i++)
		free(steps[i]);
	free(steps);
	free(n);
	return array;
}

/* A peak of a rank; null where it measured none. */
static json_t *known_peak(double peak)
{
	return result_number(peak > 0 ? peak : NAN);
}

json_t *trace_totals(const struct trace *list, int count, enum trace_part part, int64_t steps)
{
	struct rank_time *time = allocate(count * sizeof *time);
	struct sum all_steps = {0};
	double total = 0, waited = 0, unnamed = 0;
	for (int i = 0; i < count; i++) {
		time[i] = time_of_rank(&list[i], part);
		total += time[i].seconds;
		waited += time[i].waited;
		unnamed += time[i].unnamed;
		sum_add(&all_steps, &list[i].steps, 0);
	}
	json_t *result = json_pack("{s:s, s:i, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, "
			"s:o}", "part", part_names[part], "ranks", list[0].ranks, "ranks_read", count,
			"steps", result_whole((double)list[0].steps.count),
			"median_step_seconds", result_number(trace_quantile(&all_steps.all, 0.5)),
			"p99_step_seconds", result_number(trace_quantile(&all_steps.all, 0.99)),
			"seconds", result_number(total / count),
			"own_share", result_number(ratio(total - waited, total)),
			"waiting_share", result_number(ratio(waited, total)),
			"no_operation_share", result_number(part == PART_STEP ? ratio(unnamed, total) : NAN),
			"peak_flops", known_peak(list[0].peak_flops), "peak_bandwidth", known_peak(list[0].peak_bandwidth),
			"operations", operations_to_json(list, count, part, total),
			"collectives", collectives_to_json(list, count, part, total),
			"by_rank", ranks_to_json(list, time, count), "slowest", slowest_to_json(list, time, count),
			"steadily_slow", steadily_slow_to_json(list, time, count, part));
	if (steps)
		json_object_set_new(result, "by_step", steps_to_json(list, count, steps));
	free(time);
	return result;
}

/* ============================================================================================================
 * Places
 * ========================================================================================================== */

/* A rank as its trace shows it, for the words that it shares with `ling supervise`. */
struct rank_place {
	struct heartbeat_rank rank;
	const struct trace_record *operation, *collective; /* that are not over, or NULL */
	enum hang_process process;
	double progress;             /* when it last began or ended something: seconds since 1970 */
	double sign;                 /* the same, or when it last said that it waits */
};

static double unix_time(const struct trace *t, uint64_t time)
{
	return t->started_unix + (double)(int64_t)(time - t->started) * 1e-9;
}

/* The newest record of a kind that is not over, NULL if none is. */
static const struct trace_record *open_record(const struct trace *t, enum record_kind kind)
{
	const struct trace_record *newest = NULL;
	for (int64_t i = 0; i < t->num_records; i++)
		if (t->records[i].kind == kind && (!newest || t->records[i].place > newest->place))
			newest = &t->records[i];
	return newest && !newest->end ? newest : NULL;
}

static struct rank_place place_of_rank(const struct trace *t)
{
	const struct trace_record *op = open_record(t, RECORD_OPERATION), *wait = open_record(t, RECORD_COLLECTIVE);
	struct rank_place p = {.operation = op, .collective = wait,
			.rank = {.step = t->step, .phase = t->phase ? t->phase : HEARTBEAT_START, .layer = -1,
			.pid = t->pid, .pid_started = t->pid_started, .replica = t->replica, .alone = t->alone}};
	struct heartbeat_rank *r = &p.rank;
	memcpy(r->host, t->host, sizeof r->host);
	uint64_t begun = t->phase_begun ? t->phase_begun : t->started, progress = begun, last = 0;
	for (int64_t i = 0; i < t->num_records; i++) {
		const struct trace_record *x = &t->records[i];
		const uint64_t changed = x->end > x->arrived ? x->end : x->arrived;
		progress = changed > progress ? changed : progress;
		if (x->kind == RECORD_COLLECTIVE && x->place > last)
			last = x->place, r->number = x->number;
	}
	if (op) {
		if (op->what != OP_START) /* which the phase says */
			snprintf(r->operation, sizeof r->operation, "%s%s%s", operations[op->what].name, op->pass ? ", " : "",
					pass_names[op->pass]);
		r->layer = op->layer;
		begun = op->begin;
	}
	if (wait) {
		r->waits = true;
		snprintf(r->collective, sizeof r->collective, "%s", traffic_names[wait->what]);
		r->layer = wait->layer;
		begun = wait->arrived;
	}
	r->changed = unix_time(t, begun);
	p.process = hang_process(r);
	p.progress = unix_time(t, progress);
	p.sign = unix_time(t, newest_time(t));
	return p;
}

/* What --hang says of a run. */
enum hang_state { STATE_ENDED, STATE_BROKE_OFF, STATE_STANDS_STILL, STATE_GOES_ON };
static const char *const state_names[] = {"ended", "broke off", "stands still", "goes on"};

/* What a rank of another machine writes may be seen so many seconds late. */
static const double seen_late = 60;

/* Seconds without anything new after which ranks that are so far stand still: in a step; in what may be one long
 * operation. */
static double still_limit(enum heartbeat_phase phase, double median_step)
{
	const double limit = median_step > 0 ? fmax(2, 10 * median_step) : 60;
	return phase == HEARTBEAT_STEP ? limit : fmax(limit, 60);
}

/* Whether the process of a rank does nothing more, in a run that is still there. */
static bool is_stopped(const struct rank_place *p, bool all_gone)
{
	return !all_gone && hang_process_words[p->process] && p->process != PROCESS_WAITS_FOR_DISK;
}

/* Whether a rank is in the way of those that wait, when the newest progress of all was `since` seconds ago. */
static bool is_in_the_way(const struct rank_place *p, bool all_gone, double now, double since)
{
	/* Of a run that is no more the last signs are final: mpirun ends the others within some 2 s. */
	const double least = p->process == PROCESS_ELSEWHERE ? seen_late : all_gone ? 0.5 : 2;
	return is_stopped(p, all_gone) || !p->rank.waits || now - p->sign > fmax(since / 2, least);
}

/* A replica of local SGD, by the ranks of it that were read. Without local SGD the whole run is one. */
struct replica_place {
	int ranks;
	struct sum steps;
	double progress;             /* of any of its ranks, as in struct rank_place, */
	double sign;                 /* and the sign of that rank whose last one is oldest */
	double limit;                /* see still_limit() */
	bool waits, for_others;      /* all ranks wait; some not for their replica alone */
	bool alone, stopped;         /* a rank is in a period; a process is stopped or gone */
	bool goes_on;                /* it makes progress in a period, while another one stands still */
};

/* Sums up the ranks of each replica: an owned array of *n. */
static struct replica_place *places_of_replicas(const struct trace *list, const struct rank_place *p, int count,
		bool all_gone, int *n)
{
	*n = 0;
	for (int i = 0; i < count; i++)
		*n = p[i].rank.replica >= *n ? p[i].rank.replica + 1 : *n;
	struct replica_place *replicas = allocate(*n * sizeof *replicas);
	for (int r = 0; r < *n; r++)
		replicas[r] = (struct replica_place){.progress = -INFINITY, .sign = INFINITY, .waits = true};
	for (int i = 0; i < count; i++) {
		struct replica_place *r = &replicas[p[i].rank.replica];
		r->ranks++;
		sum_add(&r->steps, &list[i].steps, 0);
		r->progress = fmax(r->progress, p[i].progress);
		r->sign = fmin(r->sign, p[i].sign);
		r->waits = r->waits && p[i].rank.waits;
		r->for_others = r->for_others || !p[i].rank.alone;
		r->alone = r->alone || p[i].rank.alone;
		r->stopped = r->stopped || is_stopped(&p[i], all_gone);
	}
	return replicas;
}

/* The seconds for which the run makes no progress at `at`, or that replica which makes none for longest: one that waits
 * for others makes some as long as its ranks give signs. Says of each replica whether it goes on while another one
 * stands still; in a run that is no more that is the one whose rank went first. progress: the newest of all ranks. */
static double judge_replicas(struct replica_place *replicas, int n, bool all_gone, double at, double progress)
{
	double since = at - progress;
	int read = 0, first = 0;
	bool any_still = false;
	for (int r = 0; r < n; r++) {
		struct replica_place *x = &replicas[r];
		read += x->ranks > 0;
		first = x->sign < replicas[first].sign ? r : first;
		x->progress = x->waits && x->for_others ? fmax(x->progress, x->sign) : x->progress;
	}
	for (int r = 0; r < n && read > 1; r++)
		since = replicas[r].ranks ? fmax(since, at - replicas[r].progress) : since;
	for (int r = 0; r < n; r++) {
		struct replica_place *x = &replicas[r];
		const bool still = all_gone ? r == first : x->stopped || at - x->progress > fmax(since / 2, 2);
		x->goes_on = x->ranks && !still && x->alone && !(x->waits && x->for_others);
		any_still = any_still || (x->ranks && still);
	}
	for (int r = 0; r < n; r++)
		replicas[r].goes_on = replicas[r].goes_on && any_still;
	return since;
}

static json_t *place_to_json(const struct trace *t, const struct rank_place *p, int replicas, bool in_the_way,
		double now)
{
	static const char *const process_names[NUM_PROCESS_STATES] = {"is of another machine", "runs", "is stopped",
			"waits for a disk or a server", "has ended", "is gone"};
	const struct heartbeat_rank *r = &p->rank;
	return json_pack("{s:i, s:o, s:b, s:o, s:i, s:s, s:s, s:I, s:o, s:o, s:o, s:o, s:I, s:o, s:o}", "rank", t->rank,
			"replica", replicas > 1 ? json_integer(t->replica) : json_null(), "in_the_way", in_the_way,
			"host", json_cstring(t->host), "pid", t->pid,
			"process", process_names[p->process], "phase", heartbeat_phase_names[r->phase], "step", (json_int_t)r->step,
			"layer", r->layer < 0 ? json_null() : json_integer(r->layer),
			"operation", p->operation ? json_string(operations[p->operation->what].name) : json_null(),
			"pass", p->operation ? json_string(pass_names[p->operation->pass]) : json_null(),
			"collective", r->waits ? json_string(r->collective) : json_null(), "number", (json_int_t)r->number,
			"seconds", result_number(fmax(now - r->changed, 0)),
			"sign_seconds", result_number(fmax(now - p->sign, 0)));
}

json_t *trace_places(const struct trace *list, int count, double now)
{
	struct rank_place *p = allocate(count * sizeof *p);
	struct hang_place *places = allocate(count * sizeof *places);
	int *numbers = allocate(count * sizeof *numbers);
	double progress = -INFINITY, sign = -INFINITY, usual = 0, limit = 0;
	bool all_gone = true, ended = true, some_stopped = false, late = false;
	int num_replicas;
	int64_t step = 0;
	for (int i = 0; i < count; i++) {
		p[i] = place_of_rank(&list[i]);
		const bool gone = p[i].process == PROCESS_GONE || p[i].process == PROCESS_ENDED;
		progress = fmax(progress, p[i].progress);
		sign = fmax(sign, p[i].sign);
		all_gone = all_gone && gone;
		ended = ended && p[i].rank.phase == HEARTBEAT_END && (gone || p[i].process == PROCESS_ELSEWHERE);
		some_stopped = some_stopped || gone || p[i].process == PROCESS_STOPPED;
		late = late || p[i].process == PROCESS_ELSEWHERE;
		step = p[i].rank.step > step ? p[i].rank.step : step;
		numbers[i] = list[i].rank;
	}
	const double at = all_gone ? sign : fmax(now, sign); /* the end of a run that is no more */
	struct replica_place *replicas = places_of_replicas(list, p, count, all_gone, &num_replicas);
	const double since = judge_replicas(replicas, num_replicas, all_gone, at, progress);
	for (int r = 0; r < num_replicas; r++)
		usual = fmax(usual, trace_quantile(&replicas[r].steps.all, 0.5));
	for (int i = 0; i < count; i++) {
		struct replica_place *r = &replicas[p[i].rank.replica];
		const bool goes_on = !ended && r->goes_on;
		places[i] = (struct hang_place){&p[i].rank, fmax(at - p[i].rank.changed, 0),
				!ended && !goes_on && is_in_the_way(&p[i], all_gone, at, since), goes_on};
		r->limit = fmax(r->limit, still_limit(p[i].rank.phase, usual));
		limit = fmax(limit, r->limit);
	}
	bool still = some_stopped || at - progress > limit;
	json_t *members, *ranks = json_array(), *going_on = json_array();
	for (int r = 0; r < num_replicas; r++) {
		still = still || (replicas[r].ranks && at - replicas[r].progress > replicas[r].limit);
		if (!ended && replicas[r].goes_on)
			json_array_append_new(going_on, json_integer(r));
	}
	const enum hang_state state = ended ? STATE_ENDED : all_gone ? STATE_BROKE_OFF
			: still ? STATE_STANDS_STILL : STATE_GOES_ON;
	char *words = hang_words(places, numbers, count, &members);
	for (int i = 0; i < count; i++)
		json_array_append_new(ranks, place_to_json(&list[i], &p[i], num_replicas,
				places[i].in_the_way, at));
	json_t *result = json_pack("{s:s, s:I, s:i, s:i, s:i, s:o, s:o, s:o, s:o, s:b, s:o, s:O, s:O, s:o}",
			"state", state_names[state], "step", (json_int_t)step, "ranks", list[0].ranks, "ranks_read", count,
			"replicas", num_replicas, "replicas_going_on", going_on, "since_seconds",
			result_number(fmax(now - (state == STATE_GOES_ON ? progress : at - since), 0)),
			"median_step_seconds", result_number(usual),
			"text", state == STATE_ENDED ? json_null() : json_cstring(words), "seen_late", late && since < seen_late,
			"sign_seconds", result_number(fmax(now - sign, 0)),
			"in_the_way", json_object_get(members, "ranks"), "waiting", json_object_get(members, "waiting"),
			"places", ranks);
	if (ended) /* whoever is no more waits for nobody */
		json_object_set_new(result, "waiting", json_array());
	json_decref(members);
	free(words);
	free(replicas);
	free(numbers);
	free(places);
	free(p);
	return result;
}

/* ============================================================================================================
 * Trace events. The format: "Trace Event Format" of Chrome's tracing, JSON object format. Times are in microseconds.
 * A rank is a process, with the number rank + 1, as some readers leave process 0 out. Its thread 1 has phases with
 * their operations, its thread 2 the waits for other ranks. What was begun before it was waited for is also an
 * asynchronous event, from its begin to its end.
 * ========================================================================================================== */

enum { OPERATIONS_THREAD = 1, WAITS_THREAD = 2 };
#define METADATA ",\"cat\":\"__metadata\",\"ts\":0" /* some readers expect both in all events */

struct event_writer {
	FILE *out;
	bool any;                    /* an event was written */
	const struct trace *t;       /* of the rank whose events are written */
	uint64_t started;            /* a time of its clock, and the same in nanoseconds of the file */
	int64_t offset;
	int64_t async;               /* asynchronous events so far */
};

/* The seconds of the file's time 0: since 1970. */
static double time_zero(const struct trace *list, int count)
{
	double zero = INFINITY;
	for (int i = 0; i < count; i++)
		zero = fmin(zero, list[i].started_unix);
	return isfinite(zero) ? floor(zero) : 0;
}

/* Ranks of one machine have the same clock. The clocks of machines are compared by what time it was when each file was
 * made. */
static void align_clock(struct event_writer *w, const struct trace *list, int rank, double zero)
{
	const struct trace *t = &list[rank], *first = t;
	for (int i = 0; i < rank && first == t; i++)
		if (!strcmp(list[i].host, t->host) && fabs(unix_time(&list[i], t->started) - t->started_unix) < 1)
			first = &list[i];
	const double seconds = first->started_unix - zero;
	w->t = t;
	w->started = first->started;
	w->offset = fabs(seconds) < 1e9 ? llround(seconds * 1e9) : 0;
}

static void write_microseconds(FILE *out, int64_t nanoseconds)
{
	const uint64_t n = nanoseconds < 0 ? -(uint64_t)nanoseconds : (uint64_t)nanoseconds;
	fprintf(out, "%s%" PRIu64 ".%03d", nanoseconds < 0 ? "-" : "", n / 1000, (int)(n % 1000));
}

static int64_t file_time(const struct event_writer *w, uint64_t time)
{
	return (int64_t)(time - w->started + (uint64_t)w->offset);
}

/* Begins an event; its further members and the bracket that ends it follow. */
static void begin_event(struct event_writer *w, char kind, int thread, const char *name, const char *more)
{
	fprintf(w->out, "%s\n{\"ph\":\"%c\",\"pid\":%d,\"tid\":%d,\"name\":\"%s%s%s\"", w->any ? "," : "", kind,
			w->t->rank + 1, thread, name, *more ? ", " : "", more);
	w->any = true;
}

static void write_name(struct event_writer *w, const char *what, int thread, const char *name)
{
	json_t *value = json_cstring(name);
	char *text = json_text(value, JSON_ENCODE_ANY);
	begin_event(w, 'M', thread, what, "");
	fprintf(w->out, METADATA ",\"args\":{\"name\":%s}}", text);
	free(text);
	json_decref(value);
}

/* A slice of a thread, without the bracket that ends it. It is written as `gap` nanoseconds shorter. Readers compute
 * ends in floating point, or round begin and duration to nanoseconds: without gaps they would take a slice that begins
 * where another one ends for a part of it. Phases have a smaller gap than what lies in them. */
enum { PHASE_GAP = 1, SLICE_GAP = 3 };
static void begin_slice(struct event_writer *w, int thread, const char *name, const char *more, uint64_t begin,
		uint64_t end, int gap)
{
	begin_event(w, 'X', thread, name, more);
	fprintf(w->out, ",\"ts\":");
	write_microseconds(w->out, file_time(w, begin));
	fprintf(w->out, ",\"dur\":");
	write_microseconds(w->out, (int64_t)(end > begin + gap ? end - begin - gap : 0));
}

/* The members of a record that say where it belongs to. */
static void write_place(struct event_writer *w, const struct trace_record *r)
{
	fprintf(w->out, ",\"cat\":\"%s\",\"args\":{\"step\":%lld", part_names[r->part], (long long)r->step);
	if (r->layer >= 0)
		fprintf(w->out, ",\"layer\":%d", r->layer);
	if (!r->end)
		fprintf(w->out, ",\"over\":false");
}

static void write_phase(struct event_writer *w, enum heartbeat_phase phase, int64_t step, uint64_t begin, uint64_t end,
		bool over)
{
	char name[64];
	const bool is_step = phase == HEARTBEAT_STEP || phase == HEARTBEAT_FIRST_STEP;
	if (is_step)
		snprintf(name, sizeof name, "step %lld", (long long)step);
	begin_slice(w, OPERATIONS_THREAD, is_step ? name : heartbeat_phase_names[phase], "", begin, end, PHASE_GAP);
	fprintf(w->out, ",\"cat\":\"phase\",\"args\":{\"step\":%lld%s}}", (long long)step, over ? "" : ",\"over\":false");
}

static void write_operation(struct event_writer *w, const struct trace_record *r, uint64_t end)
{
	begin_slice(w, OPERATIONS_THREAD, operations[r->what].name, pass_names[r->pass], r->begin, end, SLICE_GAP);
	write_place(w, r);
	if (operations[r->what].unit && isfinite(r->work))
		fprintf(w->out, ",\"%s\":%.17g", operations[r->what].unit == WORK_FLOPS ? "FLOPs" : "bytes", r->work);
	fprintf(w->out, "}}");
}

static void write_wait(struct event_writer *w, const struct trace_record *r, uint64_t end)
{
	begin_slice(w, WAITS_THREAD, traffic_names[r->what], "", r->arrived, end, SLICE_GAP);
	write_place(w, r);
	fprintf(w->out, ",\"number\":%u,\"bytes\":%.17g,\"arrived\":", r->number, isfinite(r->work) ? r->work : 0);
	write_microseconds(w->out, file_time(w, r->arrived));
	fprintf(w->out, ",\"begun\":");
	write_microseconds(w->out, file_time(w, r->begin));
	fprintf(w->out, "}}");
	if (r->begin == r->arrived)
		return;
	w->async++;
	for (int last = 0; last < 2; last++) {
		begin_event(w, last ? 'e' : 'b', WAITS_THREAD, traffic_names[r->what], "");
		fprintf(w->out, ",\"cat\":\"in flight\",\"id2\":{\"local\":\"0x%llx\"},\"ts\":", (long long)w->async);
		write_microseconds(w->out, file_time(w, last ? end : r->begin));
		fprintf(w->out, "}");
	}
}

/* For qsort: pointers to records, in the order in which the rank arrived. */
static int compare_arrivals(const void *a, const void *b)
{
	const struct trace_record *x = *(const struct trace_record *const *)a, *y = *(const struct trace_record *const *)b;
	return (x->arrived > y->arrived) - (x->arrived < y->arrived);
}

/* Writes the waits of a rank. Slices of a thread must lie within each other or apart: those of a damaged file are
 * cut. */
static void write_waits(struct event_writer *w)
{
	const struct trace *t = w->t;
	const struct trace_record **waits = allocate(t->num_records * sizeof *waits);
	const uint64_t newest = newest_time(t);
	int64_t n = 0;
	for (int64_t i = 0; i < t->num_records; i++)
		if (t->records[i].kind == RECORD_COLLECTIVE)
			waits[n++] = &t->records[i];
	if (n)
		qsort(waits, n, sizeof *waits, compare_arrivals);
	for (int64_t i = 0; i < n; i++) {
		const uint64_t end = waits[i]->end ? waits[i]->end : newest;
		write_wait(w, waits[i], i + 1 < n && end > waits[i + 1]->arrived ? waits[i + 1]->arrived : end);
	}
	free(waits);
}

/* Writes the phases and operations of a rank, cut in the same way. */
static void write_operations(struct event_writer *w)
{
	const struct trace *t = w->t;
	const int64_t n = t->num_records;
	const bool in_phase = t->phase != HEARTBEAT_NONE && t->phase != HEARTBEAT_END;
	const uint64_t newest = newest_time(t);
	uint64_t *end = allocate(n * sizeof *end), next[RECORD_PHASE + 1];
	for (int kind = 0; kind <= RECORD_PHASE; kind++)
		next[kind] = UINT64_MAX;
	if (in_phase)
		next[RECORD_PHASE] = t->phase_begun;
	for (int64_t i = n - 1; i >= 0; i--) { /* no slice ends after the next one begins */
		const struct trace_record *r = &t->records[i];
		end[i] = r->end ? r->end : newest;
		end[i] = end[i] < next[r->kind] ? end[i] : next[r->kind];
		if (r->kind == RECORD_OPERATION && r->begin < next[RECORD_PHASE] && end[i] > next[RECORD_PHASE])
			end[i] = next[RECORD_PHASE];
		next[r->kind] = r->begin;
	}
	uint64_t phase_end = 0;
	bool phase_written = !in_phase;
	for (int64_t i = 0; i < n; i++) {
		const struct trace_record *r = &t->records[i];
		if (!phase_written && r->begin >= t->phase_begun) {
			write_phase(w, t->phase, t->step, t->phase_begun, newest, false);
			phase_written = true;
		}
		if (r->kind == RECORD_PHASE)
			write_phase(w, r->what, r->step, r->begin, phase_end = end[i], true);
		else if (r->kind == RECORD_OPERATION)
			write_operation(w, r, r->begin < phase_end && end[i] > phase_end ? phase_end : end[i]);
	}
	if (!phase_written)
		write_phase(w, t->phase, t->step, t->phase_begun, newest, false);
	free(end);
}

static void write_events(FILE *out, const struct trace *list, int count)
{
	struct event_writer w = {.out = out};
	const double zero = time_zero(list, count);
	fprintf(w.out, "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"program\":\"ling\",\"time_zero\":%.17g},\n"
			"\"traceEvents\":[", zero);
	for (int i = 0; i < count && !ferror(w.out); i++) {
		char name[128];
		align_clock(&w, list, i, zero);
		snprintf(name, sizeof name, "rank %d on %s", list[i].rank, list[i].host);
		write_name(&w, "process_name", OPERATIONS_THREAD, name);
		write_name(&w, "thread_name", OPERATIONS_THREAD, "operations");
		write_name(&w, "thread_name", WAITS_THREAD, "waiting for other ranks");
		begin_event(&w, 'M', OPERATIONS_THREAD, "process_sort_index", "");
		fprintf(w.out, METADATA ",\"args\":{\"sort_index\":%d}}", list[i].rank);
		write_operations(&w);
		write_waits(&w);
	}
	fprintf(w.out, "\n]}\n");
}

int trace_write_events(const struct trace *list, int count, const char *path)
{
	struct new_file file;
	if (!strcmp(path, "-")) {
		write_events(stdout, list, count);
		return 0;
	}
	if (new_file_begin(&file, path) < 0)
		return -1;
	write_events(file.stream, list, count);
	return new_file_publish(&file, 0);
}

/* ============================================================================================================
 * Text, and the command line
 * ========================================================================================================== */

/* A share in percent, "-" where it is not known. */
static const char *percent(char out[16], double share)
{
	if (isnan(share))
		snprintf(out, 16, "-");
	else
		snprintf(out, 16, "%.1f", 100 * share);
	return out;
}

/* Seconds as milliseconds, with four digits. */
static const char *milliseconds(char out[32], double seconds)
{
	const double ms = 1e3 * seconds;
	snprintf(out, 32, "%.*f", ms < 1 ? 4 : ms < 10 ? 3 : ms < 100 ? 2 : ms < 1000 ? 1 : 0, ms);
	return out;
}

/* A rate of bytes or FLOPs, "-" where it is not known. */
static const char *rate_text(char out[32], double rate, const char *unit)
{
	if (isnan(rate))
		snprintf(out, 32, "-");
	else if (rate < 1e9)
		snprintf(out, 32, "%.*f M%s/s", rate < 1e7 ? 2 : rate < 1e8 ? 1 : 0, rate / 1e6, unit);
	else
		snprintf(out, 32, "%.*f G%s/s", rate < 1e10 ? 2 : rate < 1e11 ? 1 : 0, rate / 1e9, unit);
	return out;
}

static void print_operations(const json_t *result)
{
	char a[32], b[32], c[16], d[16], e[32], f[16];
	size_t i;
	json_t *row;
	printf("\n%-34s %8s %9s %9s %9s %5s %9s %5s %13s %6s\n", "operation", "count", "median ms", "p99 ms", "own s", "%",
			"waiting s", "%", "rate", "% peak");
	json_array_foreach(json_object_get(result, "operations"), i, row) {
		char name[80];
		const char *pass = result_text(row, "pass");
		const json_t *unit = json_object_get(row, "unit");
		snprintf(name, sizeof name, "%s%s%s", result_text(row, "operation"), *pass ? ", " : "", pass);
		printf("%-34s %8lld %9s %9s %9.3f %5s %9.3f %5s %13s %6s\n", name, (long long)result_integer(row, "count"),
				milliseconds(a, result_double(row, "median_seconds")),
				milliseconds(b, result_double(row, "p99_seconds")), result_double(row, "own_seconds"),
				percent(c, result_double(row, "own_share")), result_double(row, "waiting_seconds"),
				percent(d, result_double(row, "waiting_share")),
				rate_text(e, result_double(row, "rate"), json_is_string(unit) ? json_string_value(unit) : ""),
				percent(f, result_double(row, "peak_share")));
	}
	if (!isnan(result_double(result, "peak_flops")))
		printf("the peak of rank %lld as measured when the run began: %s, %s\n",
				(long long)result_integer(json_array_get(json_object_get(result, "by_rank"), 0), "rank"),
				rate_text(a, result_double(result, "peak_flops"), "FLOP"),
				rate_text(b, result_double(result, "peak_bandwidth"), "B"));
}

static void print_collectives(const json_t *result)
{
	char a[32], b[32], c[16], d[32];
	size_t i;
	json_t *row;
	if (!json_array_size(json_object_get(result, "collectives")))
		return;
	printf("\n%-34s %8s %9s %9s %9s %5s %9s %15s\n", "collective", "count", "median ms", "p99 ms", "waiting s", "%",
			"MB sent", "rate");
	json_array_foreach(json_object_get(result, "collectives"), i, row)
		printf("%-34s %8lld %9s %9s %9.3f %5s %9.2f %15s\n", result_text(row, "collective"),
				(long long)result_integer(row, "count"), milliseconds(a, result_double(row, "median_wait_seconds")),
				milliseconds(b, result_double(row, "p99_wait_seconds")), result_double(row, "waiting_seconds"),
				percent(c, result_double(row, "waiting_share")), result_double(row, "bytes") / 1e6,
				rate_text(d, result_double(row, "bytes_per_second"), "B"));
}

enum { MOST_RANKS = 32 };        /* that the text shows */

/* The own seconds of a rank of which MOST_RANKS - 1 others have more; 0 where there are no more ranks than that. */
static double least_own_shown(const json_t *by_rank)
{
	const size_t n = json_array_size(by_rank);
	double *own = allocate(n * sizeof *own);
	for (size_t i = 0; i < n; i++)
		own[i] = result_double(json_array_get(by_rank, i), "own_seconds");
	qsort(own, n, sizeof *own, compare_doubles);
	const double least = n > MOST_RANKS ? own[n - MOST_RANKS] : 0;
	free(own);
	return least;
}

static void print_ranks(const json_t *result)
{
	const bool steps = !strcmp(result_text(result, "part"), part_names[PART_STEP]);
	const json_t *slowest = json_object_get(result, "slowest"), *by_rank = json_object_get(result, "by_rank");
	const double least = least_own_shown(by_rank);
	char a[32], b[32], c[32], d[16];
	size_t i;
	json_t *row;
	printf("\n%-34s %8s %9s %9s %5s\n", steps ? "rank: ms a step" : "rank: ms", "all", "own", "waiting", "own %");
	json_array_foreach(by_rank, i, row) {
		char name[128];
		if (result_double(row, "own_seconds") < least)
			continue;
		snprintf(name, sizeof name, "%lld on %s", (long long)result_integer(row, "rank"), result_text(row, "host"));
		printf("%-34s %8s %9s %9s %5s\n", name, milliseconds(a, result_double(row, "seconds")),
				milliseconds(b, result_double(row, "own_seconds")),
				milliseconds(c, result_double(row, "waiting_seconds")),
				percent(d, result_double(row, "own_share")));
	}
	if (json_array_size(by_rank) > MOST_RANKS)
		printf("these are the %d ranks with most own time of %zu; --json has all\n", MOST_RANKS,
				json_array_size(by_rank));
	if (json_is_null(slowest))
		return;
	const char *operation = result_text(slowest, "operation");
	printf("the slowest is rank %lld on %s: own %s ms, the median rank %s ms; of the difference %s ms in %s\n",
			(long long)result_integer(slowest, "rank"), result_text(slowest, "host"),
			milliseconds(a, result_double(slowest, "own_seconds")),
			milliseconds(b, result_double(slowest, "median_own_seconds")),
			milliseconds(c, result_double(slowest, "operation_excess_seconds")),
			*operation ? operation : "no operation");
	const json_t *steady = json_object_get(result, "steadily_slow");
	if (result_double(steady, "excess_seconds") > 0)
		printf("steadily, by medians: rank %lld takes %s ms more than the median rank in %s\n",
				(long long)result_integer(steady, "rank"), milliseconds(a, result_double(steady, "excess_seconds")),
				result_text(steady, "operation"));
}

static void print_steps(const json_t *result)
{
	char a[32], b[32], c[32], d[32];
	size_t i;
	json_t *row;
	printf("\n%-12s %6s %9s %9s %9s   %s\n", "step: ms", "ranks", "all", "own", "waiting", "slowest rank, own");
	json_array_foreach(json_object_get(result, "by_step"), i, row)
		printf("%-12lld %6lld %9s %9s %9s   %lld, %s\n", (long long)result_integer(row, "step"),
				(long long)result_integer(row, "ranks"), milliseconds(a, result_double(row, "seconds")),
				milliseconds(b, result_double(row, "own_seconds")),
				milliseconds(c, result_double(row, "waiting_seconds")),
				(long long)result_integer(row, "slowest_rank"),
				milliseconds(d, result_double(row, "slowest_own_seconds")));
}

static void print_totals(const json_t *result)
{
	const long long read = result_integer(result, "ranks_read"), ranks = result_integer(result, "ranks");
	const double missing = result_double(result, "no_operation_share");
	char a[32], b[32], c[16], d[16];
	if (read < ranks)
		printf("%lld of ", read);
	printf("%lld rank%s, %lld steps, median %s ms, p99 %s ms\n", ranks, ranks > 1 ? "s" : "",
			(long long)result_integer(result, "steps"), milliseconds(a, result_double(result, "median_step_seconds")),
			milliseconds(b, result_double(result, "p99_step_seconds")));
	printf("%s: %.3f s per rank: %s %% own work", result_text(result, "part"), result_double(result, "seconds"),
			percent(c, result_double(result, "own_share")));
	if (!isnan(missing))
		printf(" (%s %% in no operation)", percent(c, missing));
	printf(", %s %% waiting for other ranks\n", percent(d, result_double(result, "waiting_share")));
	if (json_array_size(json_object_get(result, "operations")))
		print_operations(result);
	print_collectives(result);
	print_ranks(result);
	if (json_object_get(result, "by_step"))
		print_steps(result);
}

static void print_place(const json_t *p)
{
	const char *phase = result_text(p, "phase");
	printf("  rank %lld", (long long)result_integer(p, "rank"));
	if (json_is_integer(json_object_get(p, "replica")))
		printf(" of replica %lld", (long long)result_integer(p, "replica"));
	printf(" on %s, process %lld, which %s: ", result_text(p, "host"),
			(long long)result_integer(p, "pid"), result_text(p, "process"));
	if (!strcmp(phase, heartbeat_phase_names[HEARTBEAT_STEP]))
		printf("step %lld", (long long)result_integer(p, "step"));
	else
		printf("%s, step %lld", phase, (long long)result_integer(p, "step"));
	if (json_is_integer(json_object_get(p, "layer")))
		printf(", layer %lld", (long long)result_integer(p, "layer"));
	if (json_is_string(json_object_get(p, "operation"))) {
		const char *pass = result_text(p, "pass");
		printf(", %s%s%s", result_text(p, "operation"), *pass ? ", " : "", pass);
	}
	if (json_is_string(json_object_get(p, "collective")))
		printf(", waits in %s", result_text(p, "collective"));
	printf(", for %.1f s; collective %lld, last sign %.1f s ago\n", result_double(p, "seconds"),
			(long long)result_integer(p, "number"), result_double(p, "sign_seconds"));
}

static void print_places(const json_t *result)
{
	const char *state = result_text(result, "state");
	const long long step = result_integer(result, "step"), read = result_integer(result, "ranks_read"),
			ranks = result_integer(result, "ranks");
	const json_t *text = json_object_get(result, "text");
	const size_t going_on = json_array_size(json_object_get(result, "replicas_going_on"));
	char takes[64] = "";
	size_t i;
	json_t *place;
	if (result_double(result, "median_step_seconds") > 0)
		snprintf(takes, sizeof takes, ", where a step takes %.3g s", result_double(result, "median_step_seconds"));
	if (!strcmp(state, state_names[STATE_ENDED]))
		printf("the run ended after step %lld\n", step);
	else if (!strcmp(state, state_names[STATE_BROKE_OFF]))
		printf("the run broke off in step %lld, %.0f s ago. Then\n%s\n", step,
				result_double(result, "sign_seconds"), json_string_value(text));
	else if (!strcmp(state, state_names[STATE_GOES_ON]))
		printf("the run goes on in step %lld: its newest record is %.1f s old%s\n", step,
				result_double(result, "since_seconds"), takes);
	else if (going_on)
		printf("the run stands still, but for %zu of its %lld replicas: for %.1f s no rank of another one has begun "
				"or ended anything%s:\n%s\n", going_on, (long long)result_integer(result, "replicas"),
				result_double(result, "since_seconds"), takes, json_string_value(text));
	else
		printf("the run stands still: no rank has begun or ended anything for %.1f s%s:\n%s\n",
				result_double(result, "since_seconds"), takes, json_string_value(text));
	if (json_is_true(json_object_get(result, "seen_late")))
		printf("what ranks of other machines write may be seen up to %.0f s late: look again then\n", seen_late);
	if (read < ranks)
		printf("%lld of %lld ranks have no trace that could be read\n", ranks - read, ranks);
	if (strcmp(state, state_names[STATE_ENDED]) == 0)
		return;
	/* of many ranks, those in the way */
	int shown = 0;
	json_array_foreach(json_object_get(result, "places"), i, place)
		if ((read <= MOST_RANKS || json_is_true(json_object_get(place, "in_the_way"))) && shown++ < MOST_RANKS)
			print_place(place);
	if (read > MOST_RANKS)
		printf("  --json has all %lld ranks\n", read);
}

struct trace_options {
	int rank, part;              /* rank: if it was given; part: of `parts` */
	int64_t steps;
	const char *perfetto;
	bool before, hang, json;
};

static const char *const parts[] = {"step", "evaluation", "save", "check", "other", NULL};
static const enum trace_part part_of_choice[] = {PART_STEP, PART_EVALUATION, PART_SAVE, PART_CHECK, PART_OTHER};

/* Keeps the trace of one rank alone. */
static int keep_rank(struct trace *list, int *count, int rank, const char *run)
{
	int found = 0;
	while (found < *count && list[found].rank != rank)
		found++;
	if (found == *count)
		return fail("%s: no trace of rank %d: the run has %d ranks, from 0, and %d of them have one", run, rank,
				list[0].ranks, *count);
	const struct trace kept = list[found];
	list[found] = list[0];
	list[0] = kept;
	for (int i = 1; i < *count; i++)
		trace_free(&list[i]);
	*count = 1;
	return 0;
}

/* --perfetto: prints the name of the file, as every command does that draws one, unless that is standard output. */
static int write_perfetto(const struct trace *list, int count, const char *path)
{
	if (trace_write_events(list, count, path) < 0)
		return -1;
	if (strcmp(path, "-"))
		printf("%s\n", path);
	return 0;
}

static int run_trace(const struct command_line *line)
{
	const struct trace_options *o = line->options;
	const char *run = line->words[0];
	struct timespec now;
	struct trace *list;
	int count;
	if (o->hang && (o->perfetto || option_given(line, "part") || option_given(line, "steps"))) {
		fail("--hang goes alone, or with --before, --rank and --json");
		return EXIT_WRONG_USE;
	}
	if (o->perfetto && (o->json || option_given(line, "part") || option_given(line, "steps"))) {
		fail("--perfetto writes all records, and goes with --before and --rank alone");
		return EXIT_WRONG_USE;
	}
	if ((o->perfetto && runs_check_output(line->words, 1, o->perfetto) < 0) ||
			traces_read(&list, &count, run, o->before) < 0)
		return EXIT_WORK_FAILED;
	int rc = option_given(line, "rank") ? keep_rank(list, &count, o->rank, run) : 0;
	clock_gettime(CLOCK_REALTIME, &now);
	if (rc == 0 && o->perfetto)
		rc = write_perfetto(list, count, o->perfetto);
	else if (rc == 0 && o->hang)
		result_print(trace_places(list, count, now.tv_sec + now.tv_nsec * 1e-9), o->json, print_places);
	else if (rc == 0)
		result_print(trace_totals(list, count, part_of_choice[o->part], o->steps), o->json, print_totals);
	traces_free(list, count);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static const struct command_option options[] = {
	WHOLE_OPTION(trace_options, steps, "steps", "N", 0, 1000000,
		"Also the newest N steps that the rings still hold, one by one"),
	CHOICE_OPTION(trace_options, part, "part", "PART", parts,
		"The part of the run: step, evaluation, save, check (comparing ranks), other", .initial = "step"),
	WHOLE_OPTION(trace_options, rank, "rank", "N", 0, INT32_MAX, "This rank alone (default: all ranks together)"),
	FLAG_OPTION(trace_options, hang, "hang",
		"Where each rank is, or was when it ended, and who is in the way of the others"),
	TEXT_OPTION(trace_options, perfetto, "perfetto", "FILE.json",
		"Write the records as Chrome trace events, which ui.perfetto.dev shows (- for standard output)"),
	FLAG_OPTION(trace_options, before, "before", "The trace of the start before the newest one"),
	FLAG_OPTION(trace_options, json, "json", "Print one JSON object"),
};

const struct command trace_command = {
	.name = "trace", .usage = "RUN", .min_words = 1, .max_words = 1,
	.help = "Where the time of a run goes, while it trains or afterwards: by operation, collective and rank. With "
		"--hang who is in the way of the other ranks.",
	.run = run_trace, COMMAND_OPTIONS(trace_options, options),
};
