/*
 * commands/bench.c - `ling bench`: how fast this machine trains, and how its cores share the work.
 *
 * Speed is the rate of training steps beside that of large products, which run before and after each step: other work
 * on the machine slows both. Balance needs no such machine: it is the processor time that each thread spends.
 */
#define _GNU_SOURCE
#include "commands/bench.h"

#include "files/base.h"
#include "files/trace.h"
#include "kernels.h"
#include "parallel.h"
#include "data.h"
#include "ling.h"
#include "training/start.h"
#include "commands/random_steps.h"
#include "commands/result.h"

#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

enum { MAX_STEPS = 1000, MAX_THREADS = 1024 };

struct bench_options { bool json; int steps, balance; };

/* ============================================================================================================
 * Speed
 * ========================================================================================================== */

/* The large product that a step is compared with, of n x n matrices by OpenBLAS with all threads. */
enum { PRODUCT_SIZE = 2048, PRODUCTS = 3 };
struct product { real *a, *b, *c; int64_t n; };

/* The rate of PRODUCTS of them one after the other, in FLOP/s, the sum over all ranks, which measure at the same
 * time. */
static double product_rate(const struct product *p, const struct group *all)
{
	const double begin = clock_seconds();
	for (int i = 0; i < PRODUCTS; i++)
		single_gemm(p->c, p->a, false, p->b, true, p->n, p->n, p->n, kernels_threads());
	double rate = PRODUCTS * 2.0 * p->n * p->n * p->n / (clock_seconds() - begin);
	all_reduce_sum(all, TRAFFIC_STATISTICS, &rate, 1);
	return rate;
}

/* What a benchmark measures, an element for each step. product (FLOP/s) is the mean of the rates just before and after
 * the step; share is the step's rate over it. Both are of all ranks together. The times, in seconds, are of this rank;
 * communication is contained in the step and its operations. */
struct speed {
	double step[MAX_STEPS], communication[MAX_STEPS], operation[NUM_OPERATIONS][MAX_STEPS];
	double product[MAX_STEPS], share[MAX_STEPS];
	double flops, tokens;        /* of a step, of all ranks */
	int steps, ranks;
};

/* Sorts x. */
static double median(double *x, int n)
{
	qsort(x, n, sizeof *x, compare_doubles);
	return (x[(n - 1) / 2] + x[n / 2]) / 2;
}

/* Trains on random tokens: one step to warm up, then s->steps. */
static int measure_steps(struct speed *s, struct trainer *t, const struct product *p)
{
	const struct group *all = &t->model.layout.all;
	s->tokens = (double)t->config.train.batch * t->config.data.seq_len;
	s->flops = t->flops_per_token * s->tokens;
	s->ranks = all->size;
	model_randomize(&t->model, 1);
	double product_before = 0;
	for (int i = -1; i < s->steps; i++) {
		struct metrics m;
		double before[NUM_OPERATIONS], after[NUM_OPERATIONS];
		random_batch(t, i + 1);
		trace_phase(HEARTBEAT_STEP, i + 1);
		trace_seconds(PART_STEP, before);
		if (trainer_step(t, t->config.train.batch, &m) < 0)
			return -1;
		trace_end(); /* the products are no part of it */
		trace_seconds(PART_STEP, after);
		const double product_after = product_rate(p, all);
		if (i >= 0) {
			s->step[i] = m.seconds;
			s->communication[i] = t->communication;
			s->product[i] = (product_before + product_after) / 2;
			s->share[i] = s->flops / m.seconds / s->product[i];
			for (int op = 0; op < NUM_OPERATIONS; op++)
				s->operation[op][i] = after[op] - before[op];
		}
		product_before = product_after;
	}
	return 0;
}

/* Sorts the arrays of s. */
static json_t *speed_report(struct speed *s, const char *path)
{
	const int n = s->steps;
	const double seconds = median(s->step, n);
	json_t *parts = json_object(); /* the groups of the operations */
	for (int op = 0; op < NUM_OPERATIONS; op++) {
		const double own = median(s->operation[op], n);
		const char *group = operations[op].group;
		if (own > 0)
			json_object_set_new(parts, group, result_number(own + json_number_value(json_object_get(parts, group))));
	}
	const double share = median(s->share, n); /* which also sorts */
	return json_pack("{s:o, s:i, s:i, s:o, s:i, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}",
			"config", json_cstring(path), "ranks", s->ranks, "threads", kernels_threads(),
			"blas_core", json_cstring(blas_core()), "steps", n,
			"roof_gflops", result_number(median(s->product, n) / 1e9),
			"step_seconds", result_number(seconds), "tokens_per_second", result_number(s->tokens / seconds),
			"gflops", result_number(s->flops / seconds / 1e9), "roof_percent", result_number(100 * share),
			"roof_percent_min", result_number(100 * s->share[0]),
			"roof_percent_max", result_number(100 * s->share[n - 1]),
			"communication_seconds", result_number(median(s->communication, n)), "parts", parts);
}

static void print_speed(const json_t *report)
{
	const double seconds = result_double(report, "step_seconds");
	const char *name;
	json_t *part;
	if (result_integer(report, "ranks") > 1)
		printf("%d ranks, communication %.3f s of a step, ", (int)result_integer(report, "ranks"),
				result_double(report, "communication_seconds"));
	printf("%s: %d threads, OpenBLAS %s, peak %.1f GFLOP/s\n", result_text(report, "config"),
			(int)result_integer(report, "threads"), result_text(report, "blas_core"),
			result_double(report, "roof_gflops"));
	printf("  step %.3f s   %.1f tokens/s   %.1f GFLOP/s   %.1f%% of the peak (%.1f to %.1f in %d steps)\n", seconds,
			result_double(report, "tokens_per_second"), result_double(report, "gflops"),
			result_double(report, "roof_percent"), result_double(report, "roof_percent_min"),
			result_double(report, "roof_percent_max"), (int)result_integer(report, "steps"));
	json_object_foreach(json_object_get(report, "parts"), name, part)
		printf("  %-16s %8.3f s %6.1f%%\n", name, json_number_value(part), 100 * json_number_value(part) / seconds);
}

/* ============================================================================================================
 * Balance
 * ========================================================================================================== */

/* The processor time of the threads. They wait for each other at the end of an operation, so on a machine with a core
 * for each it takes as long as its largest thread. Here the threads may be more than the cores: the few that run would
 * take most of the tasks that go to whichever thread is free. So such tasks are measured one by one, and each is
 * counted for the thread that would be free first if each had a core. What a thread computes by itself, its fixed part
 * of a loop, is counted for that thread. */
struct balance {
	clockid_t clock[MAX_THREADS]; /* of each thread */
	double read[MAX_THREADS];    /* what it was when the last operation ended */
	double begun[MAX_THREADS];   /* when the thread's task began */
	int64_t place[MAX_THREADS];  /* of the thread's task */
	double in_tasks[MAX_THREADS]; /* of this operation */
	int threads;
	double *task;                /* [MAX_TASKS] seconds of the tasks of this operation, in the order of their begin */
	int64_t num_tasks;
	/* Sums over the calls of each operation: the seconds of the largest thread, and of the mean thread. */
	double largest[NUM_OPERATIONS][NUM_PASSES], mean[NUM_OPERATIONS][NUM_PASSES];
};
enum { MAX_TASKS = 1 << 20 };    /* of an operation; those after them count as parts of their threads */

static double processor_seconds(clockid_t clock)
{
	struct timespec now = {0};
	clock_gettime(clock, &now);
	return (double)now.tv_sec + now.tv_nsec * 1e-9;
}

/* Called by the kernels, on the thread of the task. */
static void observe_task(void *observer, bool begins)
{
	struct balance *b = observer;
	const int thread = omp_get_thread_num();
	const double now = processor_seconds(CLOCK_THREAD_CPUTIME_ID);
	if (begins) {
		b->begun[thread] = now;
		b->place[thread] = __atomic_fetch_add(&b->num_tasks, 1, __ATOMIC_RELAXED);
	} else if (b->place[thread] < MAX_TASKS) {
		b->task[b->place[thread]] = now - b->begun[thread];
		b->in_tasks[thread] += now - b->begun[thread];
	}
}

/* Called by the trace, on the main thread, when the others wait. */
static void operation_ended(void *observer, enum operation op, enum pass pass)
{
	struct balance *b = observer;
	double busy[MAX_THREADS], sum = 0;
	for (int i = 0; i < b->threads; i++) {
		const double seconds = processor_seconds(b->clock[i]);
		busy[i] = fmax(seconds - b->read[i] - b->in_tasks[i], 0);
		b->read[i] = seconds;
		b->in_tasks[i] = 0;
	}
	for (int64_t k = 0; k < b->num_tasks && k < MAX_TASKS; k++) {
		int first = 0; /* the thread that is free first */
		for (int i = 1; i < b->threads; i++)
			first = busy[i] < busy[first] ? i : first;
		busy[first] += b->task[k];
	}
	b->num_tasks = 0;
	double largest = 0;
	for (int i = 0; i < b->threads; i++) {
		largest = fmax(largest, busy[i]);
		sum += busy[i];
	}
	b->largest[op][pass] += largest;
	b->mean[op][pass] += sum / b->threads;
}

/* Finds the clocks of the threads that all parallel regions of this size use. Fails when there are fewer. */
static int find_clocks(struct balance *b, int threads)
{
	int errors = 0;
	b->threads = 0;
	#pragma omp parallel reduction(+ : errors)
	{
		#pragma omp single
		b->threads = omp_get_num_threads();
		errors += omp_get_thread_num() >= MAX_THREADS ||
				pthread_getcpuclockid(pthread_self(), &b->clock[omp_get_thread_num()]) != 0;
	}
	if (errors || b->threads != threads)
		return fail("--balance %d: OpenMP gives %d threads: unset OMP_THREAD_LIMIT and OMP_DYNAMIC", threads,
				b->threads);
	return 0;
}

/* Threads that spin while they wait would seem to work. */
static int check_waiting(void)
{
	const char *policy = getenv("OMP_WAIT_POLICY"), *spins = getenv("GOMP_SPINCOUNT");
	if ((policy && !strcasecmp(policy, "active")) || (spins && (strspn(spins, "0123456789") < strlen(spins) ||
			strtod(spins, NULL) > 1000)))
		return fail("--balance needs threads that sleep while they wait, and %s is %s: unset it",
				policy && !strcasecmp(policy, "active") ? "OMP_WAIT_POLICY" : "GOMP_SPINCOUNT",
				policy && !strcasecmp(policy, "active") ? policy : spins);
	return 0;
}

/* One step to warm up, then `steps`. */
static int measure_balance(struct balance *b, struct trainer *t, int steps)
{
	struct metrics m;
	int rc = find_clocks(b, kernels_threads());
	model_randomize(&t->model, 1);
	for (int i = -1; i < steps && rc == 0; i++) {
		random_batch(t, i + 1);
		trace_phase(HEARTBEAT_STEP, i + 1);
		if (i == 0) {
			kernels_observe(observe_task, b);
			trace_observe(operation_ended, b);
			operation_ended(b, OP_NONE, PASS_FORWARD); /* reads the clocks */
			b->largest[OP_NONE][PASS_FORWARD] = b->mean[OP_NONE][PASS_FORWARD] = 0;
		}
		rc = trainer_step(t, t->config.train.batch, &m) < 0 ? -1 : 0;
	}
	trace_end();
	trace_observe(NULL, NULL);
	kernels_observe(NULL, NULL);
	return rc;
}

struct balance_row { int op, pass; double largest; };

static int by_share(const void *a, const void *b)
{
	return compare_doubles(&((const struct balance_row *)b)->largest, &((const struct balance_row *)a)->largest);
}

static json_t *balance_report(const struct balance *b, const char *path, int steps)
{
	struct balance_row rows[NUM_OPERATIONS * NUM_PASSES];
	double largest = 0, mean = 0;
	int n = 0;
	for (int op = 0; op < NUM_OPERATIONS; op++)
		for (int pass = 0; pass < NUM_PASSES; pass++)
			if (b->largest[op][pass] > 0) {
				rows[n++] = (struct balance_row){op, pass, b->largest[op][pass]};
				largest += b->largest[op][pass];
				mean += b->mean[op][pass];
			}
	qsort(rows, n, sizeof *rows, by_share);
	json_t *list = json_array();
	for (const struct balance_row *r = rows; r < rows + n; r++)
		json_array_append_new(list, json_pack("{s:s, s:s, s:o, s:o, s:o}", "operation", operations[r->op].name,
				"pass", pass_names[r->pass], "seconds", result_number(r->largest / steps),
				"share_percent", result_number(100 * r->largest / largest),
				"balance_percent", result_number(100 * b->mean[r->op][r->pass] / r->largest)));
	return json_pack("{s:o, s:i, s:i, s:o, s:o, s:o}", "config", json_cstring(path), "threads", b->threads,
			"steps", steps, "seconds", result_number(largest / steps),
			"balance_percent", result_number(100 * mean / largest), "operations", list);
}

static void print_balance(const json_t *report)
{
	size_t i;
	json_t *row;
	printf("%s: %d threads, balance %.1f%%\n  %-36s %9s %9s\n", result_text(report, "config"),
			(int)result_integer(report, "threads"), result_double(report, "balance_percent"), "operation", "of a step",
			"balance");
	json_array_foreach(json_object_get(report, "operations"), i, row) {
		const double share = result_double(row, "share_percent"), balance = result_double(row, "balance_percent");
		char name[64];
		snprintf(name, sizeof name, "%s%s%s", result_text(row, "operation"), *result_text(row, "pass") ? ", " : "",
				result_text(row, "pass"));
		if (share >= 0.05)
			printf("  %-36s %8.1f%% %8.1f%%%s\n", name, share, balance, share > 2 && balance < 90 ? "  !" : "");
	}
}

/* ============================================================================================================
 * The command
 * ========================================================================================================== */

static const struct command_option options[] = {
	FLAG_OPTION(bench_options, json, "json", "Print one JSON object"),
	WHOLE_OPTION(bench_options, steps, "steps", "N", 1, MAX_STEPS, "Measure so many steps",
			.initial = "5"),
	WHOLE_OPTION(bench_options, balance, "balance", "THREADS", 1, MAX_THREADS, "Do not measure the speed, but with so "
			"many threads, which may be more than the cores, how evenly they share the work: for each operation the "
			"mean thread's processor time over the largest"),
};

/* The speed, printed by rank 0. */
static int run_speed(struct trainer *t, const struct bench_options *o, const char *path)
{
	const int64_t n = PRODUCT_SIZE, size = n * n;
	struct speed *s = calloc(1, sizeof *s);
	struct product p = {.a = malloc(3 * size * sizeof *p.a), .n = n};
	int rc = s && p.a ? 0 : fail("out of memory for products of %d x %d", PRODUCT_SIZE, PRODUCT_SIZE);
	if (parallel_agree(rc) == 0) {
		p.b = p.a + size;
		p.c = p.b + size;
		for (int64_t i = 0; i < 3 * size; i++)
			p.a[i] = (real)(i % 17 - 8);
		s->steps = o->steps;
		rc = measure_steps(s, t, &p);
		if (rc == 0 && parallel_rank() == 0)
			result_print(speed_report(s, path), o->json, print_speed);
	} else
		rc = -1;
	free(p.a);
	free(s);
	return rc;
}

static int run_balance(struct trainer *t, const struct bench_options *o, const char *path)
{
	struct balance *b = calloc(1, sizeof *b);
	double *task = malloc(MAX_TASKS * sizeof *task);
	int rc = b && task ? 0 : fail("out of memory for the clocks of %d threads", o->balance);
	if (rc == 0) {
		b->task = task;
		rc = measure_balance(b, t, o->steps);
	}
	if (rc == 0)
		result_print(balance_report(b, path, o->steps), o->json, print_balance);
	free(task);
	free(b);
	return rc;
}

static int run_bench(const struct command_line *line)
{
	const struct bench_options *o = line->options;
	const bool named = line->num_words && !strchr(line->words[0], '=');
	const char *path = named ? line->words[0] : "configs/bench.yaml";
	struct config c;
	struct trainer t;
	if (config_load(&c, path, line->num_words - named, line->words + named, true) < 0)
		return EXIT_WRONG_USE;
	if (!c.data.seq_len || !c.train.batch || !c.train.micro_batch) {
		fail("%s: a benchmark needs data.seq_len, train.batch and train.micro_batch", path);
		return EXIT_WRONG_USE;
	}
	if (o->balance && (parallel_size() > 1 ? fail("--balance is for one process") : check_waiting()) < 0)
		return EXIT_WRONG_USE;
	if (o->balance)
		kernels_set_threads(o->balance);
	c.train.steps = o->steps + 1;
	c.spikes.action = SPIKES_OFF;
	c.train.batch_warmup.tokens = 0;
	int rc = trainer_allocate(&t, &c);
	if (rc == 0) {
		rc = o->balance ? run_balance(&t, o, path) : run_speed(&t, o, path);
		trainer_free(&t);
	}
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

const struct command bench_command = {
	.name = "bench", .usage = "[CONFIG.yaml] [key.path=value ...]", .max_words = ANY_NUMBER,
	.help = "Time training steps on random tokens and compare them with the machine's own rate of large products "
		"(default: configs/bench.yaml, of the sources' folder).",
	.run = run_bench, COMMAND_OPTIONS(bench_options, options), .computes = true, .measures_openblas = true,
};
