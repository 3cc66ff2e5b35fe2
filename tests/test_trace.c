/*
 * tests/test_trace.c - `ling trace`: totals of traces whose numbers are known, places of ranks, trace events; and
 * reading of trace files that are torn, foreign, or have random bytes.
 */
#define _GNU_SOURCE
#include "commands/trace.h"
#include "files/base.h"
#include "files/heartbeat.h"
#include "files/trace.h"
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MS = 1000000 };           /* nanoseconds */

/* -- traces made up by the tests -- */

struct counters {
	struct trace_counter operation[NUM_PARTS][NUM_OPERATIONS][NUM_PASSES], collective[NUM_PARTS][NUM_COLLECTIVES];
	struct trace_record records[256];
};

/* A rank whose clock showed 1000 s at 5000 s after 1970. */
static struct trace make_trace(int rank, int ranks)
{
	struct counters *c = allocate(sizeof *c);
	struct trace t = {.id = 7, .rank = rank, .ranks = ranks, .pid = 4000 + rank, .started = 1000000 * (uint64_t)MS,
		.started_unix = 5000, .operation = c->operation, .collective = c->collective, .records = c->records,
		.memory = c};
	snprintf(t.host, sizeof t.host, "box%d", rank / 2);
	return t;
}

/* n durations of so many milliseconds, of which `waited` were waits. */
static void add(struct trace_counter *c, int n, double ms, double waited, double work)
{
	int bucket = 0;
	while (trace_bucket_seconds(bucket + 1) <= ms * 1e-3)
		bucket++;
	c->count += n;
	c->nanoseconds += (uint64_t)(n * ms * MS);
	c->waited += (uint64_t)(n * waited * MS);
	c->work += n * work;
	c->histogram[bucket] += n;
}

/* A record, its times in milliseconds after `started`; end 0: it is not over. The step is 3. */
static struct trace_record *put(struct trace *t, enum record_kind kind, int what, double begin, double arrived,
		double end)
{
	struct trace_record *r = &t->records[t->num_records++];
	*r = (struct trace_record){.place = t->num_records, .kind = kind, .what = what, .layer = -1, .part = PART_STEP,
		.step = 3, .begin = t->started + (uint64_t)(begin * MS), .arrived = t->started + (uint64_t)(arrived * MS),
		.end = end ? t->started + (uint64_t)(end * MS) : 0};
	return r;
}

static void put_operation(struct trace *t, enum operation op, double begin, double end)
{
	put(t, RECORD_OPERATION, op, begin, begin, end);
}

static void number(const json_t *result, const char *path, double expected, double tolerance)
{
	const json_t *value = json_at(result, path);
	if (!json_is_number(value) || !(fabs(json_number_value(value) - expected) <= tolerance * fabs(expected)))
		fail_msg("%s is %s; expected %.17g", path, value ? json_dumps(value, JSON_ENCODE_ANY) : "missing", expected);
}

static void words(const json_t *result, const char *path, const char *expected)
{
	const char *value = json_string_value(json_at(result, path));
	if (!value || strcmp(value, expected))
		fail_msg("%s is `%s`; expected `%s`", path, value ? value : "missing", expected);
}

/* Two ranks, 10 steps of 100 ms each. */
static void test_totals(void **state)
{
	(void)state;
	struct trace t[3];
	for (int i = 0; i < 3; i++) {
		t[i] = make_trace(i, 3);
		t[i].peak_flops = 200e9;
		t[i].peak_bandwidth = i == 1 ? 0 : 10e9; /* one does not know it */
		add(&t[i].steps, 10, 100, i == 1 ? 20 : 50, 0);
		/* 1 GFLOP in 20 ms is 50 GFLOP/s; rank 1 takes 50 ms, 20 GFLOP/s */
		add(&t[i].operation[PART_STEP][OP_QKV][PASS_BACKWARD], 10, i == 1 ? 50 : 20, 0, 1e9);
		/* 10 MB in 10 ms without the wait; rank 1 waits less */
		add(&t[i].operation[PART_STEP][OP_REDUCTION][PASS_FORWARD], 10, i == 1 ? 30 : 60, i == 1 ? 20 : 50, 10e6);
		add(&t[i].operation[PART_STEP][OP_DECISION][PASS_FORWARD], 10, 10, 0, 0);
		add(&t[i].operation[PART_EVALUATION][OP_QKV][PASS_FORWARD], 5, 8, 0, 1e9);
		add(&t[i].collective[PART_STEP][TRAFFIC_GRADIENTS], 10, i == 1 ? 20 : 50, i == 1 ? 20 : 50, 4e6);
	}
	json_t *r = trace_totals(t, 3, PART_STEP, 0);
	number(r, "steps", 10, 0);
	number(r, "median_step_seconds", 0.1, 0.035);
	number(r, "seconds", 1, 1e-12);
	number(r, "own_share", 0.6, 1e-12); /* waits: 50, 20, 50 of 100 */
	number(r, "waiting_share", 0.4, 1e-12);
	number(r, "no_operation_share", 0.1, 1e-12); /* 90 of 100 ms each have a name */
	/* the longest first: reduction 150 ms of the three ranks, qkv 90 */
	words(r, "operations.0.operation", "reduction");
	number(r, "operations.0.count", 30, 0);
	number(r, "operations.0.seconds", 0.5, 1e-12);
	number(r, "operations.0.own_seconds", 0.1, 1e-12);
	number(r, "operations.0.waiting_seconds", 0.4, 1e-12);
	number(r, "operations.0.own_share", 0.1, 1e-12);
	number(r, "operations.0.waiting_share", 0.4, 1e-12);
	number(r, "operations.0.median_seconds", 0.06, 0.035);
	number(r, "operations.0.rate", 1e9, 1e-12); /* of own time */
	words(r, "operations.0.unit", "B");
	assert_true(json_is_null(json_at(r, "operations.0.peak_share")));
	words(r, "operations.1.operation", "attention / qkv");
	words(r, "operations.1.pass", "backward");
	number(r, "operations.1.median_seconds", 0.02, 0.035);
	number(r, "operations.1.p99_seconds", 0.05, 0.035);
	number(r, "operations.1.rate", 30e9 / 0.9, 1e-12);
	number(r, "operations.1.peak_share", 30e9 / (0.9 * 200e9), 1e-12);
	assert_true(json_is_null(json_at(r, "operations.2.rate"))); /* a decision has no work */
	assert_null(json_at(r, "operations.3"));
	words(r, "collectives.0.collective", "gradients");
	number(r, "collectives.0.count", 30, 0);
	number(r, "collectives.0.waiting_seconds", 0.4, 1e-12);
	number(r, "collectives.0.bytes", 40e6, 0);
	number(r, "collectives.0.bytes_per_second", 40e6 / 0.4, 1e-12);
	number(r, "by_rank.1.own_seconds", 0.08, 1e-12);
	number(r, "by_rank.2.waiting_seconds", 0.05, 1e-12);
	number(r, "slowest.rank", 1, 0);
	words(r, "slowest.host", "box0");
	number(r, "slowest.own_seconds", 0.08, 1e-12);
	number(r, "slowest.median_own_seconds", 0.05, 1e-12);
	words(r, "slowest.operation", "attention / qkv");
	number(r, "slowest.operation_excess_seconds", 0.03, 1e-12);
	json_decref(r);
	/* a share of the peak is that of the ranks that know it, if all do */
	t[1].peak_bandwidth = 10e9;
	r = trace_totals(t, 3, PART_STEP, 0);
	number(r, "operations.0.peak_share", 0.1, 1e-12);
	json_decref(r);
	r = trace_totals(t, 3, PART_EVALUATION, 0);
	number(r, "operations.0.rate", 1e9 / 8e-3, 1e-12);
	number(r, "seconds", 0.04, 1e-12);
	assert_true(json_is_null(json_at(r, "no_operation_share")));
	json_decref(r);
	/* one rank, in the middle of a step: the operations of that step are not more than its time */
	t[0].phase = HEARTBEAT_STEP;
	t[0].phase_begun = t[0].started + 1000 * MS;
	put_operation(&t[0], OP_QKV, 1000, 1050);
	add(&t[0].operation[PART_STEP][OP_QKV][PASS_FORWARD], 1, 50, 0, 0);
	r = trace_totals(t, 1, PART_STEP, 0);
	number(r, "seconds", 1.05, 1e-12);
	number(r, "no_operation_share", 0.1 / 1.05, 1e-9);
	number(r, "by_rank.0.seconds", 0.1, 1e-12);
	assert_true(json_is_null(json_at(r, "slowest")));
	json_decref(r);
	for (int i = 0; i < 3; i++)
		trace_free(&t[i]);
}

/* A run in which nothing was done yet. */
static void test_nothing(void **state)
{
	(void)state;
	struct trace t = make_trace(0, 1);
	for (int part = 0; part < NUM_PARTS; part++) {
		json_t *r = trace_totals(&t, 1, part, 5);
		assert_int_equal(json_array_size(json_at(r, "operations")), 0);
		assert_int_equal(json_array_size(json_at(r, "by_step")), 0);
		assert_true(json_is_null(json_at(r, "own_share")));
		json_decref(r);
	}
	json_t *r = trace_places(&t, 1, 5001);
	words(r, "text", "rank 0 on box0 has been in its start for 1 s");
	json_decref(r);
	trace_free(&t);
}

/* Steps of the ring: waits, checks in their middle, a step of the same number twice, and a rank that is behind. */
static void test_steps(void **state)
{
	(void)state;
	struct trace t[2] = {make_trace(0, 2), make_trace(1, 2)};
	for (int i = 0; i < 2; i++)
		for (int k = 0; k < 4; k++) { /* steps 1, 2, 2, 3 of 100 ms */
			const double at = 1000 + 100 * k;
			if (i == 1 && k == 3)
				break;
			put(&t[i], RECORD_PHASE, HEARTBEAT_STEP, at, at, at + 100)->step = k < 2 ? k + 1 : k;
			put(&t[i], RECORD_COLLECTIVE, TRAFFIC_GRADIENTS, at, at + 30, at + (i ? 40 : 60 + k));
			put_operation(&t[i], OP_QKV, at + 70, at + 80);
			t[i].records[t[i].num_records - 1].part = PART_CHECK;
			/* waits that are no part of the step */
			put(&t[i], RECORD_COLLECTIVE, TRAFFIC_CHECKPOINT, at + 70, at + 70, at + 80)->part = PART_CHECK;
			put(&t[i], RECORD_COLLECTIVE, TRAFFIC_AGREEMENT, at + 99, at + 99, 0);
		}
	json_t *r = trace_totals(t, 2, PART_STEP, 3);
	assert_int_equal(json_array_size(json_at(r, "by_step")), 3);
	number(r, "by_step.0.step", 2, 0);
	number(r, "by_step.1.step", 2, 0);
	number(r, "by_step.2.step", 3, 0);
	number(r, "by_step.1.ranks", 2, 0);
	number(r, "by_step.2.ranks", 1, 0);
	number(r, "by_step.0.seconds", 0.09, 1e-9);
	number(r, "by_step.0.own_seconds", ((90 - 31) + (90 - 10)) / 2e3, 1e-9);
	number(r, "by_step.1.own_seconds", ((90 - 32) + (90 - 10)) / 2e3, 1e-9);
	number(r, "by_step.0.waiting_seconds", (31 + 10) / 2e3, 1e-9);
	number(r, "by_step.0.slowest_rank", 1, 0);
	number(r, "by_step.2.slowest_rank", 0, 0);
	number(r, "by_step.0.slowest_own_seconds", 0.08, 1e-9);
	json_decref(r);
	trace_free(&t[0]);
	trace_free(&t[1]);
}

/* -- where ranks are -- */

static void expect_text(struct trace *t, int ranks, double now, const char *run, const char *text)
{
	json_t *r = trace_places(t, ranks, now);
	words(r, "state", run);
	if (text)
		words(r, "text", text);
	else
		assert_true(json_is_null(json_at(r, "text")));
	json_decref(r);
}

static void test_places(void **state)
{
	(void)state;
	struct trace t[4];
	for (int i = 0; i < 4; i++) {
		t[i] = make_trace(i, 4);
		add(&t[i].steps, 10, 100, 0, 0);
		t[i].phase = HEARTBEAT_STEP;
		t[i].step = 812;
		t[i].phase_begun = t[i].started + 2000 * (uint64_t)MS;
		put_operation(&t[i], OP_DISPATCH, 2000, i == 2 ? 2010 : 0);
		struct trace_record *r = put(&t[i], RECORD_COLLECTIVE, TRAFFIC_DISPATCH, 2001, 2001, i == 2 ? 2009 : 0);
		r->number = i == 2 ? 7710 : 7711;
		r->layer = i == 2 ? 2 : 3;
		t[i].last_sign = t[i].started + 302900 * (uint64_t)MS;
	}
	put_operation(&t[2], OP_EXPERTS_DOWN, 2010, 0);
	t[2].records[t[2].num_records - 1].layer = 2;
	t[2].records[t[2].num_records - 1].pass = PASS_BACKWARD;
	t[2].last_sign = 0;
	/* one computes, three wait */
	expect_text(t, 4, 5303, "stands still", "rank 2 on box1 has been in experts / down, backward of layer 2 of step "
			"812 for 301 s; ranks 0, 1, 3 wait in expert dispatch (number 7711) of layer 3 of step 812");
	json_t *r = trace_places(t, 4, 5303);
	number(r, "since_seconds", 300.99, 1e-6);
	words(r, "places.2.operation", "experts / down");
	words(r, "places.2.pass", "backward");
	number(r, "places.2.layer", 2, 0);
	number(r, "places.2.number", 7710, 0);
	assert_true(json_is_null(json_at(r, "places.2.collective")));
	words(r, "places.0.collective", "expert dispatch");
	words(r, "places.0.process", "is of another machine");
	number(r, "places.0.sign_seconds", 0.1, 1e-3);
	assert_int_equal(json_array_size(json_at(r, "in_the_way")), 1);
	assert_int_equal(json_array_size(json_at(r, "waiting")), 3);
	json_decref(r);
	/* a moment after it began that: it is simply computing */
	for (int i = 0; i < 4; i++)
		t[i].last_sign = i == 2 ? 0 : t[i].started + 2015 * (uint64_t)MS;
	r = trace_places(t, 4, 5002.02);
	words(r, "state", "goes on");
	json_decref(r);
	for (int i = 0; i < 4; i++)
		t[i].last_sign = t[i].started + 302900 * (uint64_t)MS;
	/* the one that stopped while it waited gives no sign; what it waits in is another step */
	t[2].records[t[2].num_records - 1].end = t[2].started + 2011 * (uint64_t)MS;
	put(&t[2], RECORD_COLLECTIVE, TRAFFIC_STATISTICS, 2012, 2012, 0)->number = 7700;
	t[2].step = 811;
	t[2].last_sign = t[2].started + 2100 * (uint64_t)MS;
	expect_text(t, 4, 5303, "stands still", "rank 2 on box1 has been in the wait for statistics (number 7700) of step "
			"811 for 301 s without a sign; ranks 0, 1, 3 wait in expert dispatch (number 7711) of layer 3 of step 812");
	/* all give signs */
	t[2].last_sign = t[0].last_sign;
	expect_text(t, 4, 5303, "stands still", "all ranks wait, and none computes; ranks 0, 1, 3 wait in expert dispatch "
			"(number 7711) of layer 3 of step 812; rank 2 waits in statistics (number 7700) of step 811");
	/* in a save, and ranks without a trace */
	t[3].phase = HEARTBEAT_SAVE;
	t[3].records[t[3].num_records - 1].end = t[3].started + 2011 * (uint64_t)MS;
	put_operation(&t[3], OP_WRITE, 2013, 0);
	expect_text(t + 2, 2, 5303, "stands still", "rank 3 on box1 has been in save / write of the save of step 812 for "
			"301 s; rank 2 waits in statistics (number 7700) of step 811");
	/* all have ended */
	for (int i = 0; i < 4; i++)
		t[i].phase = HEARTBEAT_END;
	expect_text(t, 4, 5303, "ended", NULL);
	for (int i = 0; i < 4; i++)
		trace_free(&t[i]);
}

/* A process of this machine that is no more, and one that is stopped. */
static void test_processes(void **state)
{
	(void)state;
	struct trace t[2];
	struct process self;
	char expected[256], host[64] = "";
	gethostname(host, sizeof host - 1);
	assert_true(process_look(&self, getpid()));
	for (int i = 0; i < 2; i++) {
		t[i] = make_trace(i, 2);
		strcpy(t[i].host, host);
		t[i].pid = getpid();
		t[i].pid_started = self.started + i; /* of rank 1 there is none: another process has its number */
		t[i].phase = HEARTBEAT_STEP;
		t[i].step = 9;
		t[i].phase_begun = t[i].started;
		put_operation(&t[i], OP_QKV, 1, 2);
		put(&t[i], RECORD_COLLECTIVE, TRAFFIC_GRADIENTS, 3, 3, 0)->number = 5;
		t[i].last_sign = t[i].started + 500 * MS;
	}
	snprintf(expected, sizeof expected, "rank 1 on %s has been in the wait for gradients (number 5) of step 9 for 1 s "
			"without a sign; rank 0 waits in gradients (number 5) of step 9; process %d of rank 1 is gone", host,
			getpid());
	expect_text(t, 2, 5000.6, "stands still", expected);
	t[0].pid_started++; /* both are gone: at their end, whenever that was, both waited */
	expect_text(t, 2, 9000, "broke off", "all ranks wait, and none computes; ranks 0, 1 wait in gradients (number 5) "
			"of step 9");
	json_t *r = trace_places(t, 2, 9000);
	number(r, "sign_seconds", 3999.5, 1e-6);
	json_decref(r);
	/* rank 1 was killed while it waited, and mpirun ended the other 0.9 s later */
	t[0].last_sign = t[0].started + 1400 * MS;
	expect_text(t, 2, 9000, "broke off", expected);
	trace_free(&t[0]);
	trace_free(&t[1]);
}

/* -- trace events -- */

/* Nanoseconds of a member of an event. Slices are a little shorter than they were, see begin_slice. */
static int64_t when(const json_t *event, const char *key)
{
	const json_t *value = json_object_get(event, key);
	assert_true(json_is_number(value));
	return llround(json_number_value(value) * 1e3);
}

enum { MOST_DEPTH = 8 };

/* What every file of trace events must be: strict JSON, names of processes and threads, slices of a thread in order and
 * within each other or apart, asynchronous events in pairs. Returns the array, and the number of slices. */
static json_t *read_events(const char *path, int *slices)
{
	json_error_t error;
	json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error), *event;
	if (!root)
		fail_msg("%s: line %d: %s", path, error.line, error.text);
	json_t *events = json_object_get(root, "traceEvents");
	int64_t stack[64][3][MOST_DEPTH] = {0}, last[64][3];
	double ends[64][3][MOST_DEPTH + 1];
	int depth[64][3] = {0}, names[64][3] = {0};
	size_t i;
	memset(last, 0x80, sizeof last);
	*slices = 0;
	json_array_foreach(events, i, event) {
		const char *kind = json_string_value(json_object_get(event, "ph"));
		const char *name = json_string_value(json_object_get(event, "name"));
		const int pid = json_integer_value(json_object_get(event, "pid"));
		const int tid = json_integer_value(json_object_get(event, "tid"));
		assert_true(name && *name && pid >= 1 && pid < 64 && tid >= 1 && tid < 3);
		assert_true(json_is_string(json_object_get(event, "cat")));
		names[pid][tid] += !strcmp(name, "thread_name");
		if (strcmp(kind, "X"))
			continue;
		(*slices)++;
		assert_int_equal(names[pid][tid], 1);
		const int64_t ts = when(event, "ts"), end = ts + when(event, "dur");
		assert_true(end >= ts && ts >= last[pid][tid]);
		last[pid][tid] = ts;
		int *d = &depth[pid][tid];
		const int64_t rounded = llabs(ts) >> 50; /* of times that a double does not hold to the nanosecond */
		while (*d && stack[pid][tid][*d - 1] <= ts + rounded)
			--*d;
		/* what ends where another one begins must do so also for a reader that adds doubles */
		const double double_end = json_number_value(json_object_get(event, "ts")) +
				json_number_value(json_object_get(event, "dur"));
		if (*d && rounded == 0)
			assert_true(double_end < ends[pid][tid][*d - 1]);
		ends[pid][tid][*d] = double_end;
		if (*d && end > stack[pid][tid][*d - 1] + rounded)
			fail_msg("%s at %lld ends at %lld, what it lies in at %lld", name, (long long)ts, (long long)end,
					(long long)stack[pid][tid][*d - 1]);
		assert_true(*d < MOST_DEPTH);
		stack[pid][tid][(*d)++] = end;
	}
	json_incref(events);
	json_decref(root);
	return events;
}

/* The n-th event of that name and kind. */
static json_t *find_event(const json_t *events, const char *kind, const char *name, int n)
{
	size_t i;
	json_t *event;
	json_array_foreach(events, i, event)
		if (!strcmp(json_string_value(json_object_get(event, "name")), name) &&
				!strcmp(json_string_value(json_object_get(event, "ph")), kind) && n-- == 0)
			return event;
	fail_msg("no event %s of kind %s", name, kind);
	return NULL;
}

static void test_events(void **state)
{
	(void)state;
	struct trace t[3] = {make_trace(0, 3), make_trace(1, 3), make_trace(2, 3)};
	int slices;
	/* Ranks 0 and 1 are on one machine and have one clock, though rank 1 read the time of day 0.1 s too late. Rank 2
	 * has another clock, and began 1.5 s later. */
	t[1].started_unix += 0.1;
	t[2].started = 77 * (uint64_t)MS;
	t[2].started_unix += 1.5;
	for (int i = 0; i < 3; i++) {
		put(&t[i], RECORD_PHASE, HEARTBEAT_STEP, 100, 100, 200);
		put_operation(&t[i], OP_QKV, 100, 150);
		t[i].records[1].layer = 5;
		t[i].records[1].work = 1e6;
		t[i].records[1].pass = PASS_WEIGHT;
		struct trace_record *r = put(&t[i], RECORD_COLLECTIVE, TRAFFIC_GRADIENTS, 110, 140, 150.5);
		r->number = 12, r->work = 4096;
		put_operation(&t[i], OP_REDUCTION, 150, 200);
		put_operation(&t[i], OP_OPTIMIZER, 200, 0);
		t[i].phase = HEARTBEAT_STEP;
		t[i].step = 4;
		t[i].phase_begun = t[i].started + 200 * MS;
		t[i].last_sign = t[i].started + 250 * MS;
	}
	strcpy(t[1].host, "b\"ox\x01\xff"); /* a name that JSON must escape, of another machine then */
	assert_int_equal(trace_write_events(t, 3, at("events.json")), 0);
	json_t *events = read_events(at("events.json"), &slices), *e;
	assert_int_equal(slices, 3 * 6);
	words(find_event(events, "M", "process_name", 0), "args.name", "rank 0 on box0");
	words(find_event(events, "M", "process_name", 1), "args.name", "rank 1 on b\"ox\x01\xef\xbf\xbd");
	e = find_event(events, "X", "attention / qkv, weight gradient", 0);
	assert_true(when(e, "ts") == 100 * MS && when(e, "dur") == 50 * MS - 3);
	number(e, "args.layer", 5, 0);
	number(e, "args.step", 3, 0);
	number(e, "args.FLOPs", 1e6, 0);
	assert_true(when(find_event(events, "X", "attention / qkv, weight gradient", 1), "ts") == 200 * MS);
	assert_true(when(find_event(events, "X", "attention / qkv, weight gradient", 2), "ts") == 1600 * MS);
	e = find_event(events, "X", "gradients", 0);
	assert_true(when(e, "ts") == 140 * MS && when(e, "dur") == 10 * MS + MS / 2 - 3);
	number(e, "args.bytes", 4096, 0);
	number(e, "args.number", 12, 0);
	number(e, "args.arrived", 140e3, 1e-12);
	number(e, "args.begun", 110e3, 1e-12);
	assert_true(when(find_event(events, "b", "gradients", 0), "ts") == 110 * MS);
	assert_true(when(find_event(events, "e", "gradients", 0), "ts") == 150 * MS + MS / 2);
	e = find_event(events, "X", "optimizer", 0); /* it was not over when the rank gave its last sign */
	assert_true(when(e, "ts") == 200 * MS && when(e, "dur") == 50 * MS - 3);
	assert_true(json_is_false(json_at(e, "args.over")));
	e = find_event(events, "X", "step 4", 0);
	assert_true(when(e, "ts") == 200 * MS && when(e, "dur") == 50 * MS - 1 && json_is_false(json_at(e, "args.over")));
	json_decref(events);
	/* one machine */
	strcpy(t[1].host, t[0].host);
	assert_int_equal(trace_write_events(t, 3, at("events.json")), 0);
	events = read_events(at("events.json"), &slices);
	assert_true(when(find_event(events, "X", "attention / qkv, weight gradient", 1), "ts") == 100 * MS);
	json_decref(events);
	/* no directory: an error, and nothing is left */
	assert_int_equal(trace_write_events(t, 3, at("none/events.json")), -1);
	expect_error("none");
	for (int i = 0; i < 3; i++)
		trace_free(&t[i]);
}

/* Two replicas of local SGD, ranks 0, 1 and 2, 3, whose steps take 100 ms. At 2000 ms rank 3 began an operation that
 * lasts, and rank 2 waits for it. */
static void make_replicas(struct trace t[4])
{
	for (int i = 0; i < 4; i++) {
		t[i] = make_trace(i, 4);
		add(&t[i].steps, 10, 100, 0, 0);
		t[i].phase = HEARTBEAT_STEP;
		t[i].step = 40;
		t[i].phase_begun = t[i].started + 2000 * (uint64_t)MS;
		t[i].replica = i / 2;
		t[i].alone = true;
		t[i].last_sign = t[i].started + 5900 * (uint64_t)MS;
	}
	put_operation(&t[3], OP_QKV, 2000, 0);
	t[3].last_sign = 0;
	put(&t[2], RECORD_COLLECTIVE, TRAFFIC_DISPATCH, 2001, 2001, 0)->number = 77;
}

static void test_replicas(void **state)
{
	(void)state;
	struct trace t[4];
	const char *const hung = "rank 3 on box1 has been in attention / qkv of step 40 for 4 s; rank 2 waits in expert "
			"dispatch (number 77) of step 40; the other replicas go on";
	/* in a period the other replica goes on, be it that it computes or waits within itself */
	make_replicas(t);
	put_operation(&t[0], OP_QKV, 5890, 0);
	put(&t[1], RECORD_COLLECTIVE, TRAFFIC_DISPATCH, 5890, 5890, 0)->number = 900;
	expect_text(t, 4, 5006, "stands still", hung);
	json_t *r = trace_places(t, 4, 5006);
	number(r, "replicas", 2, 0);
	number(r, "replicas_going_on.0", 0, 0);
	number(r, "since_seconds", 3.999, 1e-6);
	number(r, "places.3.replica", 1, 0);
	assert_true(json_is_true(json_at(r, "places.3.in_the_way")) && json_is_false(json_at(r, "places.0.in_the_way")));
	assert_int_equal(json_array_size(json_at(r, "in_the_way")), 1);
	assert_int_equal(json_array_size(json_at(r, "waiting")), 1);
	json_decref(r);
	/* the processes of all are gone: the replica whose rank fell silent first */
	for (int i = 0; i < 4; i++)
		gethostname(t[i].host, sizeof t[i].host - 1);
	r = trace_places(t, 4, 9000);
	words(r, "state", "broke off");
	number(r, "in_the_way.0.rank", 3, 0);
	number(r, "replicas_going_on.0", 0, 0);
	assert_int_equal(json_array_size(json_at(r, "in_the_way")), 1);
	json_decref(r);
	for (int i = 0; i < 4; i++)
		snprintf(t[i].host, sizeof t[i].host, "box%d", i / 2);
	/* the same by the trace of one replica alone, or of a rank, whose run then is no other */
	expect_text(t + 2, 2, 5006, "stands still", "rank 3 on box1 has been in attention / qkv of step 40 for 4 s; rank 2 "
			"waits in expert dispatch (number 77) of step 40");
	/* it is at the synchronisation and waits for this one: then it does not go on */
	t[0].records[0].end = t[0].started + 5891 * (uint64_t)MS;
	put(&t[0], RECORD_COLLECTIVE, TRAFFIC_STATISTICS, 5892, 5892, 0)->number = 901;
	t[0].alone = false;
	expect_text(t, 4, 5006, "stands still", "rank 3 on box1 has been in attention / qkv of step 40 for 4 s; rank 0 "
			"waits in statistics (number 901) of step 40; rank 1 waits in expert dispatch (number 900) of step 40; "
			"rank 2 waits in expert dispatch (number 77) of step 40");
	/* it waits for long, alive, while this one is slow, but goes on */
	for (int i = 0; i < 4; i++)
		trace_free(&t[i]);
	make_replicas(t);
	for (int i = 0; i < 2; i++) {
		put(&t[i], RECORD_COLLECTIVE, TRAFFIC_STATISTICS, 2001, 2001, 0)->number = 901;
		t[i].alone = false;
	}
	t[3].records[0].begin = t[3].records[0].arrived = t[3].started + 5000 * (uint64_t)MS;
	r = trace_places(t, 4, 5006);
	words(r, "state", "goes on");
	assert_int_equal(json_array_size(json_at(r, "replicas_going_on")), 0);
	json_decref(r);
	for (int i = 0; i < 4; i++)
		trace_free(&t[i]);
}

/* -- files -- */

/* Writes the trace of a run of one rank through the functions that a run calls. */
static void write_run(const char *run, int rank, int ranks)
{
	if (rank == 0) {
		heartbeat_create(run, ranks);
		trace_create(run, true);
	}
	heartbeat_join(run, rank, "box");
	trace_join(run, rank, ranks, "box", 1024);
	trace_peak(1e11, 1e10);
	trace_replica(ranks - 1);
	trace_alone(true);
	for (int step = 1; step <= 5; step++) {
		trace_phase(step == 1 ? HEARTBEAT_FIRST_STEP : HEARTBEAT_STEP, step);
		for (int layer = 0; layer < 3; layer++) {
			trace_begin(OP_QKV, PASS_FORWARD, layer, 1e6);
			trace_begin(OP_DISPATCH, PASS_BACKWARD, layer, 100);
			trace_wait(TRAFFIC_DISPATCH, true, trace_now(), 800);
			trace_still_waiting(0.1);
			trace_wait_end();
		}
		trace_check(true);
		nanosleep(&(struct timespec){0, 50 * 1000000}, NULL); /* what has no name of its own is no part of the step */
		trace_begin(OP_QKV, PASS_FORWARD, 0, 1e6);
		trace_check(false);
		trace_end();
	}
	trace_phase(HEARTBEAT_SAVE, 5);
	trace_begin(OP_WRITE, PASS_FORWARD, -1, 0);
	trace_phase(HEARTBEAT_END, 5);
	trace_leave();
	heartbeat_leave();
}

/* All that the command does with traces. */
static void use(struct trace *list, int count)
{
	int slices;
	for (int part = 0; part < NUM_PARTS; part++)
		json_decref(trace_totals(list, count, part, 10));
	json_decref(trace_places(list, count, 5000));
	assert_int_equal(trace_write_events(list, count, at("events.json")), 0);
	json_decref(read_events(at("events.json"), &slices));
}

static void test_file(void **state)
{
	(void)state;
	struct trace *list;
	int count;
	write_run(scratch, 0, 2);
	assert_int_equal(traces_read(&list, &count, scratch, false), 0);
	assert_int_equal(count, 1); /* rank 1 is missing, which is no error */
	assert_int_equal(list[0].steps.count, 5);
	assert_true(list[0].phase == HEARTBEAT_END && list[0].step == 5 && list[0].peak_flops == 1e11);
	assert_true(list[0].replica == 1 && list[0].alone);
	json_t *r = trace_totals(list, count, PART_STEP, 10);
	number(r, "steps", 5, 0);
	assert_int_equal(json_array_size(json_at(r, "operations")), 2);
	assert_int_equal(json_array_size(json_at(r, "by_step")), 5);
	number(r, "by_step.4.step", 5, 0);
	double seconds = 0;
	for (int i = 0; i < 5; i++)
		seconds += json_number_value(json_object_get(json_array_get(json_at(r, "by_step"), i), "seconds"));
	assert_true(seconds < 0.15);
	number(r, "collectives.0.count", 15, 0);
	number(r, "collectives.0.bytes", 15 * 800, 0);
	json_decref(r);
	r = trace_totals(list, count, PART_CHECK, 0);
	number(r, "operations.0.count", 5, 0);
	assert_string_equal(json_string_value(json_at(r, "operations.0.operation")), "check");
	assert_true(json_number_value(json_at(r, "operations.0.median_seconds")) >= 0.048);
	json_decref(r);
	use(list, count);
	traces_free(list, count);
	/* the start before */
	assert_int_equal(traces_read(&list, &count, scratch, true), -1);
	expect_error("trace-before");
	write_run(scratch, 0, 1);
	assert_int_equal(traces_read(&list, &count, scratch, true), 0);
	assert_int_equal(list[0].ranks, 2);
	traces_free(list, count);
}

/* Files that are no trace, torn, or of another version or another start. */
static void test_bad_files(void **state)
{
	(void)state;
	struct trace t, *list;
	int count;
	size_t n;
	assert_int_equal(traces_read(&list, &count, at("none"), false), -1);
	expect_error("none/trace|No such file|trace.events");
	write_run(scratch, 0, 1);
	uint8_t *good = get_file(at("trace/rank-0.trace"), &n);
	assert_int_equal(trace_read(&t, at("trace/rank-0.trace")), 0);
	trace_free(&t);
	for (size_t cut = 0; cut < n; cut += n / 37 + 1) {
		put_file(at("torn"), good, cut);
		assert_int_equal(trace_read(&t, at("torn")), -1);
		expect_error("torn");
	}
	good[8]++;
	put_file(at("other"), good, n);
	assert_int_equal(trace_read(&t, at("other")), -1);
	expect_error("other|version 2");
	good[8]--;
	good[0]++;
	put_file(at("other"), good, n);
	assert_int_equal(trace_read(&t, at("other")), -1);
	expect_error("other|no trace");
	free(good);
	/* no file that can be read; and without rank 0 */
	put_string(at("trace/rank-0.trace"), "no trace");
	assert_int_equal(traces_read(&list, &count, scratch, false), -1);
	expect_error("rank-0.trace|no trace");
	write_run(scratch, 1, 3);
	assert_int_equal(traces_read(&list, &count, scratch, false), 0);
	assert_true(count == 1 && list[0].rank == 1 && list[0].ranks == 3);
	traces_free(list, count);
	assert_int_equal(rename(at("trace/rank-1.trace"), at("trace/rank-2.trace")), 0); /* not its own name */
	assert_int_equal(traces_read(&list, &count, scratch, false), -1);
	expect_error("rank-2.trace|rank 1");
	assert_int_equal(remove_tree(at("trace")), 0);
	assert_int_equal(mkdir(at("trace"), 0777), 0);
	assert_int_equal(traces_read(&list, &count, scratch, false), -1);
	expect_error("trace|no traces");
	/* rank 1's file is of another start */
	write_run(scratch, 0, 2);
	assert_int_equal(rename(at("trace/rank-0.trace"), at("kept")), 0);
	heartbeat_create(scratch, 2);
	write_run(scratch, 1, 2);
	assert_int_equal(rename(at("kept"), at("trace/rank-0.trace")), 0);
	assert_int_equal(traces_read(&list, &count, scratch, false), 0);
	assert_int_equal(count, 1);
	traces_free(list, count);
}

/* Random bytes change in a trace file: it is refused, or read and used without harm. */
static void test_random_bytes(void **state)
{
	(void)state;
	size_t n;
	int used = 0;
	unsigned seed = 1;
	write_run(scratch, 0, 1);
	uint8_t *good = get_file(at("trace/rank-0.trace"), &n), *bad = allocate(n);
	const size_t ring = n - 1024 * sizeof(struct trace_record);
	for (int i = 0; i < 400; i++) {
		struct trace t;
		memcpy(bad, good, n);
		for (int flips = 1 + rand_r(&seed) % 20; flips > 0; flips--) {
			/* in the header but its sizes; in the counters; in the records that are used; a byte, or eight of them */
			const size_t from[] = {32, 4096, ring}, to[] = {256, ring - 8, ring + 100 * sizeof(struct trace_record)};
			const int where = rand_r(&seed) % 3;
			const size_t place = from[where] + (size_t)rand_r(&seed) % (to[where] - from[where]);
			for (int j = rand_r(&seed) % 4 ? 1 : 8; j > 0; j--)
				bad[place + j] = rand_r(&seed) % 3 ? (uint8_t)rand_r(&seed) : 0xff;
		}
		put_file(at("bad"), bad, n);
		if (trace_read(&t, at("bad")) < 0)
			continue;
		used++;
		t.rank = 0; /* which traces_read checks */
		use(&t, 1);
		trace_free(&t);
	}
	free(good);
	free(bad);
	assert_true(used > 100);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_totals), cmocka_unit_test(test_nothing), cmocka_unit_test(test_steps),
		cmocka_unit_test(test_places), cmocka_unit_test(test_replicas), cmocka_unit_test(test_processes),
		TEST(test_events), TEST(test_file), TEST(test_bad_files), TEST(test_random_bytes),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
