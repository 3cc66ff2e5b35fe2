/*
 * commands/doctor.c - `ling doctor` and `ling bench`: is this machine, and what runs on it, fit to train, and how fast.
 */
#define _GNU_SOURCE
#include "commands/doctor.h"

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "data.h"
#include "ling.h"
#include "commands/self_check.h"

#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static double median(double *x, int n)
{
	qsort(x, n, sizeof *x, compare_doubles);
	return (x[(n - 1) / 2] + x[n / 2]) / 2;
}

/* FLOP/s of the best of several products of 2048 x 2048 matrices; 0 when memory is short. */
static double measure_roof(int repeats, int threads)
{
	const int64_t n = 2048;
	real *a = malloc(3 * n * n * sizeof *a);
	if (!a)
		return 0;
	for (int64_t i = 0; i < 2 * n * n; i++)
		a[i] = (real)(i % 17 - 8);
	double seconds = blas_roof(a, a + n * n, a + 2 * n * n, n, repeats, threads);
	free(a);
	return 2.0 * n * n * n / seconds;
}

int measure_steps(struct bench *b, struct trainer *t)
{
	const int64_t batch = t->config.train.batch, L = t->config.data.seq_len, V = t->config.model.vocab_size;
	double step[BENCH_STEPS], communication[BENCH_STEPS], part[NUM_PHASES][BENCH_STEPS];
	const struct micro_batches mine = micro_batches_of_rank(&t->model.layout.data, batch, t->config.train.micro_batch);
	model_randomize(&t->model, 1);
	b->roof = measure_roof(10, kernels_threads());
	all_reduce_sum(&t->model.layout.world, TRAFFIC_STATISTICS, &b->roof, 1); /* all ranks measured at once */
	for (int i = -1; i < BENCH_STEPS; i++) {
		struct metrics m;
		struct random_stream stream = {.seed = 1, .step = (uint32_t)(i + 1)};
		for (int64_t j = 0; j < batch * L; j++) {
			const int64_t place = micro_batch_place(&mine, j / L) * L + j % L;
			if (place < 0) /* another rank's */
				continue;
			t->input[place] = (int32_t)random_permute(j % V, V, &stream);
			t->target[place] = (int32_t)random_permute((j + 1) % V, V, &stream);
		}
		if (trainer_step(t, batch, &m) < 0)
			return -1;
		for (int p = 0; p < NUM_PHASES && i >= 0; p++)
			part[p][i] = t->model.phase_seconds[p];
		if (i >= 0) {
			step[i] = m.seconds;
			communication[i] = t->communication;
		}
	}
	double after = measure_roof(10, kernels_threads());
	all_reduce_sum(&t->model.layout.world, TRAFFIC_STATISTICS, &after, 1);
	b->roof = after > b->roof ? after : b->roof;
	b->step_seconds = median(step, BENCH_STEPS);
	b->communication_seconds = median(communication, BENCH_STEPS);
	b->ranks = t->model.layout.world.size;
	for (int p = 0; p < NUM_PHASES; p++)
		b->phase_seconds[p] = median(part[p], BENCH_STEPS);
	b->tokens = batch * L;
	struct parameter_count count[NUM_PARAMETER_PARTS + 1];
	if (count_parameters(count, &b->flops, &t->config.model, L) < 0)
		return -1;
	b->flops *= b->tokens;
	return 0;
}

void print_bench(const struct bench *b, const char *name, bool json)
{
	static const char *const names[NUM_PHASES] = {"attention", "router", "permute", "expert products", "head", "optimizer", "other"};
	const double rate = b->flops / b->step_seconds;
	if (json) {
		printf("{\"config\": \"%s\", \"ranks\": %d, \"threads\": %d, \"blas_core\": \"%s\", \"roof_gflops\": %.2f, \"step_seconds\": %.5f, "
				"\"tokens_per_second\": %.2f, \"gflops\": %.2f, \"roof_percent\": %.2f, \"communication_seconds\": %.5f, \"parts\": {",
				name, b->ranks, kernels_threads(), blas_core(),
				b->roof / 1e9, b->step_seconds, b->tokens / b->step_seconds, rate / 1e9, 100 * rate / b->roof, b->communication_seconds);
		for (int p = 0; p < NUM_PHASES; p++)
			printf("%s\"%s\": %.5f", p ? ", " : "", names[p], b->phase_seconds[p]);
		printf("}}\n");
		return;
	}
	if (b->ranks > 1)
		printf("%d ranks, communication %.3f s of a step, ", b->ranks, b->communication_seconds);
	printf("%s: %d threads, OpenBLAS %s, roof %.1f GFLOP/s\n", name, kernels_threads(), blas_core(), b->roof / 1e9);
	printf("  step %.3f s   %.1f tokens/s   %.1f GFLOP/s   %.1f%% of the roof\n", b->step_seconds, b->tokens / b->step_seconds,
			rate / 1e9, 100 * rate / b->roof);
	for (int p = 0; p < NUM_PHASES; p++)
		printf("  %-16s %8.3f s %6.1f%%\n", names[p], b->phase_seconds[p], 100 * b->phase_seconds[p] / b->step_seconds);
}

/* ============================================================================================================
 * ling doctor: is this machine, and what runs on it, fit to train
 * ========================================================================================================== */

/* Fails when products are wrong, ling's own or OpenBLAS's. Float rounding gives an error of about 1e-7. */
static int check_products(bool openblas)
{
	const double error = product_error(openblas);
	if (error < 1e-5)
		return 0;
	if (openblas)
		return fail("OpenBLAS's %s kernel computes wrong products on this processor (relative error %.2g against plain loops); choose another with "
				"OPENBLAS_CORETYPE=Haswell or =Nehalem, or install a newer OpenBLAS", blas_core(), plain_nan(error));
	return fail("ling's products are wrong on this processor (relative error %.2g against plain loops); build it again on this machine with "
			"make clean && make", plain_nan(error));
}

int check_before_work(bool openblas)
{
	if (!openblas && check_products(true) < 0)
		fprintf(stderr, "warning: %s\n", error_text);
	return check_products(openblas);
}

__attribute__((format(printf, 2, 3))) static void warn(struct examination *x, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vsnprintf(x->warnings[x->num_warnings++], sizeof *x->warnings, format, args);
	va_end(args);
}

static bool is_right(const struct check *c)
{
	return c->forward <= CHECK_BOUND && c->backward <= CHECK_BOUND; /* a NaN is not */
}

static void examine_threads(struct examination *x)
{
	cpu_set_t cpus;
	x->machine_cores = sysconf(_SC_NPROCESSORS_ONLN);
	x->cores = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : x->machine_cores;
	x->ranks = parallel_local_ranks();
	x->threads = kernels_threads();
	const int ranks = x->ranks < x->machine_cores ? x->ranks : x->machine_cores;
	if (x->ranks > 1 && (x->threads > x->cores || (int64_t)x->ranks * x->threads > x->machine_cores))
		warn(x, "%d ranks x %d threads are more than the cores: mpirun --bind-to none -n %d env OMP_NUM_THREADS=%d ling ...", x->ranks, x->threads,
				ranks, x->machine_cores / ranks);
	else if (x->threads > x->cores)
		warn(x, "more threads than cores: set OMP_NUM_THREADS=%d", x->cores);
	else if (x->ranks == 1 && x->threads < x->cores)
		warn(x, "%d cores stay idle: OMP_NUM_THREADS is %d", x->cores - x->threads, x->threads);
}

int examine_machine(struct examination *x)
{
	const int64_t n = 64 << 20; /* 256 MB: beyond any cache */
	const size_t bytes = 2 * n * sizeof(real), scratch = self_check_scratch() * sizeof(double);
	void *memory = malloc(bytes > scratch ? bytes : scratch);
	if (!memory)
		return fail("out of memory for %zu MB to measure and check with", (bytes > scratch ? bytes : scratch) >> 20);
	cpu_features(x->features);
	examine_threads(x);
	if (blas_better_core())
		warn(x, "this processor can run OpenBLAS's %s kernel: set OPENBLAS_CORETYPE=%s", blas_better_core(), blas_better_core());
	x->own_error = product_error(false);
	x->library_error = product_error(true);
	x->one_core = measure_roof(5, 1);
	x->all_threads = measure_roof(5, x->threads);
	if (x->threads <= x->cores && x->all_threads < 0.7 * x->threads * x->one_core)
		warn(x, "the cores slow each other down: other work on this machine, or two threads on one core (hyper-threading)");
	memset(memory, 0, bytes);
	x->bandwidth = memory_bandwidth(memory, (real *)memory + n, n);
	x->num_checks = self_check(x->checks, memory);
	free(memory);
	return 0;
}

void print_examination(const struct examination *x)
{
	printf("processor       %s\n", x->features);
	printf("cores           %d for this process, %d threads", x->cores, x->threads);
	if (x->ranks > 1)
		printf("; %d ranks x %d threads on the machine's %d cores", x->ranks, x->threads, x->machine_cores);
	printf("\nOpenBLAS        %s\n", blas_core());
	printf("products        relative error against plain loops: ling %.2g, OpenBLAS %.2g\n", plain_nan(x->own_error), plain_nan(x->library_error));
	printf("sgemm           %.1f GFLOP/s on one core, %.1f on %d (%.0f%% of %d times one)\n", x->one_core / 1e9, x->all_threads / 1e9, x->threads,
			100 * x->all_threads / (x->threads * x->one_core), x->threads);
	printf("memory          %.1f GB/s for a copy by all threads\n", x->bandwidth / 1e9);
	printf("\nRelative error against plain loops in double. Rounding gives up to about 1e-6; at most %.0e is expected.\n%-24s %8s %9s\n", CHECK_BOUND,
			"operation", "forward", "backward");
	for (const struct check *c = x->checks; c < x->checks + x->num_checks; c++) {
		char backward[32] = "-";
		if (c->has_backward)
			snprintf(backward, sizeof backward, "%.1e", plain_nan(c->backward));
		printf("%-24s %8.1e %9s  %s\n", c->operation, plain_nan(c->forward), backward, is_right(c) ? "ok" : "! wrong");
	}
	for (int i = 0; i < x->num_warnings; i++)
		printf("! %s\n", x->warnings[i]);
}

/* A number of a JSON object, behind a comma: null if it is not finite. */
static void print_json(const char *name, double value)
{
	printf(isfinite(value) ? ", \"%s\": %.6g" : ", \"%s\": null", name, value);
}

void print_examination_json(const struct examination *x)
{
	printf("{\"processor\": \"%s\", \"blas_core\": \"%s\", \"cores\": %d, \"machine_cores\": %d, \"ranks\": %d, \"threads\": %d", x->features,
			blas_core(), x->cores, x->machine_cores, x->ranks, x->threads);
	print_json("products_error", x->own_error);
	print_json("blas_products_error", x->library_error);
	print_json("one_core_gflops", x->one_core / 1e9);
	print_json("gflops", x->all_threads / 1e9);
	print_json("memory_gb_per_second", x->bandwidth / 1e9);
	print_json("error_bound", CHECK_BOUND);
	printf(", \"operations\": [");
	for (const struct check *c = x->checks; c < x->checks + x->num_checks; c++) {
		printf("%s{\"name\": \"%s\", \"ok\": %s", c == x->checks ? "" : ", ", c->operation, is_right(c) ? "true" : "false");
		print_json("forward", c->forward);
		print_json("backward", c->has_backward ? c->backward : NAN);
		printf("}");
	}
	printf("], \"warnings\": [");
	for (int i = 0; i < x->num_warnings; i++)
		printf("%s\"%s\"", i ? ", " : "", x->warnings[i]);
	printf("]}\n");
}

int judge_machine(const struct examination *x)
{
	for (const struct check *c = x->checks; c < x->checks + x->num_checks; c++)
		if (!is_right(c))
			return fail("%s is wrong on this machine: relative error %.2g forward, %.2g backward against plain loops, expected at most %.0e; build ling "
					"again here with make clean && make, or with another compiler", c->operation, plain_nan(c->forward), plain_nan(c->backward), CHECK_BOUND);
	return check_products(false) < 0 ? -1 : check_products(true);
}
