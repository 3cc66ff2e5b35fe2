/*
 * commands/doctor.c - `ling doctor`: whether this machine, and what runs on it, is fit to train.
 */
#define _GNU_SOURCE
#include "commands/doctor.h"

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "commands/result.h"
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

enum { PEAK_SIZE = 2048 }; /* see peak_flops */

/* Fails when products are wrong, ling's own or OpenBLAS's. Float rounding gives an error of about 1e-7. */
static int check_products(bool openblas)
{
	const double error = gemm_error(openblas);
	if (error < 1e-5)
		return 0;
	if (openblas)
		return fail("OpenBLAS's %s kernel computes wrong products on this processor (relative error %.2g against "
				"plain loops); choose another with OPENBLAS_CORETYPE=Haswell or =Nehalem, or install a newer "
				"OpenBLAS", blas_core(), plain_nan(error));
	return fail("ling's products are wrong on this processor (relative error %.2g against plain loops); build it "
			"again on this machine with make clean && make", plain_nan(error));
}

int check_before_work(bool openblas)
{
	if (check_products(true) < 0) {
		if (openblas)
			return -1;
		fprintf(stderr, "warning: %s\n", error_text);
	}
	return check_products(false); /* with OpenBLAS too: ling's own kernel computes the products with row lists */
}

/* What the doctor finds. */
struct examination {
	char features[256];          /* of the processor */
	int cores, threads;          /* of this process */
	int machine_cores, ranks;    /* of and on this machine */
	double own_error, library_error; /* of matrix products, see gemm_error */
	double one_core, all_threads, bandwidth; /* FLOP/s, FLOP/s, bytes/s */
	struct check checks[MAX_CHECKS];
	int num_checks, num_warnings;
	char warnings[8][256];       /* each says what to change, and how */
};

/* Adds a warning. */
__attribute__((format(printf, 2, 3))) static void warn(struct examination *x, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vsnprintf(x->warnings[x->num_warnings++], sizeof *x->warnings, format, args);
	va_end(args);
}

/* Whether an operation computes what its plain form does, up to rounding. A NaN is not right. */
static bool is_right(const struct check *c)
{
	return c->forward <= CHECK_BOUND && c->backward <= CHECK_BOUND;
}

/* Counts cores, ranks and threads, and warns where they do not suit each other. */
static void examine_threads(struct examination *x)
{
	cpu_set_t cpus;
	x->machine_cores = sysconf(_SC_NPROCESSORS_ONLN);
	x->cores = sched_getaffinity(0, sizeof cpus, &cpus) == 0 ? CPU_COUNT(&cpus) : x->machine_cores;
	x->ranks = parallel_local_ranks();
	x->threads = kernels_threads();
	const int ranks = x->ranks < x->machine_cores ? x->ranks : x->machine_cores;
	if (x->ranks > 1 && (x->threads > x->cores || (int64_t)x->ranks * x->threads > x->machine_cores))
		warn(x, "%d ranks x %d threads are more than the cores: mpirun --bind-to none -n %d env OMP_NUM_THREADS=%d "
				"ling ...", x->ranks, x->threads, ranks, x->machine_cores / ranks);
	else if (x->threads > x->cores)
		warn(x, "more threads than cores: set OMP_NUM_THREADS=%d", x->cores);
	else if (x->ranks == 1 && x->threads < x->cores)
		warn(x, "%d cores stay idle: OMP_NUM_THREADS is %d", x->cores - x->threads, x->threads);
}

/* Warns of threads that cross sockets. */
static void examine_sockets(struct examination *x)
{
	char text[256];
	if (*socket_warning(text, ""))
		warn(x, "%s", text);
}

/* Measures the machine and checks every operation. Fails when memory is short. */
static int examine_machine(struct examination *x)
{
	const int64_t n = 64 << 20; /* elements; in float 256 MB, more than any cache holds */
	const size_t bytes = 2 * n * sizeof(real), scratch = self_check_scratch() * sizeof(double);
	void *memory = malloc(bytes > scratch ? bytes : scratch);
	if (!memory)
		return fail("out of memory for %zu MB to measure and check with", (bytes > scratch ? bytes : scratch) >> 20);
	cpu_features(x->features);
	examine_threads(x);
	examine_sockets(x);
	if (blas_better_core())
		warn(x, "this processor can run OpenBLAS's %s kernel: set OPENBLAS_CORETYPE=%s", blas_better_core(),
				blas_better_core());
	x->own_error = gemm_error(false);
	x->library_error = gemm_error(true);
	x->one_core = peak_flops(PEAK_SIZE, 5, INFINITY, 1);
	x->all_threads = peak_flops(PEAK_SIZE, 5, INFINITY, x->threads);
	if (x->threads <= x->cores && x->all_threads < 0.7 * x->threads * x->one_core)
		warn(x, "the cores slow each other down: other work on this machine, or two threads on one core "
				"(hyper-threading)");
	memset(memory, 0, bytes);
	x->bandwidth = memory_bandwidth(memory, (real *)memory + n, n, INFINITY);
	x->num_checks = self_check(x->checks, memory);
	free(memory);
	return 0;
}

static json_t *machine_report(const struct examination *x)
{
	json_t *checked = json_array(), *warnings = json_array();
	for (const struct check *c = x->checks; c < x->checks + x->num_checks; c++)
		json_array_append_new(checked, json_pack("{s:s, s:b, s:o, s:b, s:o}", "name", c->operation,
				"ok", is_right(c), "forward", result_number(c->forward), "has_backward", c->has_backward,
				"backward", c->has_backward ? result_number(c->backward) : json_null()));
	for (int i = 0; i < x->num_warnings; i++)
		json_array_append_new(warnings, json_cstring(x->warnings[i]));
	return json_pack("{s:o, s:o, s:i, s:i, s:i, s:i, s:o, s:o, s:o, s:o, s:o, s:f, s:o, s:o}",
			"processor", json_cstring(x->features), "blas_core", json_cstring(blas_core()), "cores", x->cores,
			"machine_cores", x->machine_cores, "ranks", x->ranks, "threads", x->threads,
			"products_error", result_number(x->own_error), "blas_products_error", result_number(x->library_error),
			"one_core_gflops", result_number(x->one_core / 1e9), "gflops", result_number(x->all_threads / 1e9),
			"memory_gb_per_second", result_number(x->bandwidth / 1e9), "error_bound", CHECK_BOUND,
			"operations", checked, "warnings", warnings);
}

static void print_machine(const json_t *report)
{
	const int threads = (int)result_integer(report, "threads"), ranks = (int)result_integer(report, "ranks");
	const double one_core = result_double(report, "one_core_gflops"), all_threads = result_double(report, "gflops");
	size_t i;
	json_t *value;
	printf("processor       %s\n", result_text(report, "processor"));
	printf("cores           %d for this process, %d threads", (int)result_integer(report, "cores"), threads);
	if (ranks > 1)
		printf("; %d ranks x %d threads on the machine's %d cores", ranks, threads,
				(int)result_integer(report, "machine_cores"));
	printf("\nOpenBLAS        %s\n", result_text(report, "blas_core"));
	printf("products        relative error against plain loops: ling %.2g, OpenBLAS %.2g\n",
			result_double(report, "products_error"), result_double(report, "blas_products_error"));
	printf("sgemm           %.1f GFLOP/s on one core, %.1f on %d (%.0f%% of %d times one)\n", one_core, all_threads,
			threads, 100 * all_threads / (threads * one_core), threads);
	printf("memory          %.1f GB/s for a copy by all threads\n", result_double(report, "memory_gb_per_second"));
	printf("\nRelative error against plain loops in double. Rounding gives up to about 1e-6; at most %.0e is "
			"expected.\n%-24s %8s %9s\n", result_double(report, "error_bound"), "operation", "forward", "backward");
	json_array_foreach(json_object_get(report, "operations"), i, value) {
		char backward[32] = "-";
		if (json_is_true(json_object_get(value, "has_backward")))
			snprintf(backward, sizeof backward, "%.1e", result_double(value, "backward"));
		printf("%-24s %8.1e %9s  %s\n", result_text(value, "name"), result_double(value, "forward"), backward,
				json_is_true(json_object_get(value, "ok")) ? "ok" : "! wrong");
	}
	json_array_foreach(json_object_get(report, "warnings"), i, value)
		printf("! %s\n", json_string_value(value));
}

/* Fails when an operation or a product is wrong, and names it. */
static int judge_machine(const struct examination *x)
{
	for (const struct check *c = x->checks; c < x->checks + x->num_checks; c++)
		if (!is_right(c))
			return fail("%s is wrong on this machine: relative error %.2g forward, %.2g backward against plain "
					"loops, expected at most %.0e; build ling again here with make clean && make, or with another "
					"compiler", c->operation, plain_nan(c->forward), plain_nan(c->backward), CHECK_BOUND);
	return check_products(false) < 0 ? -1 : check_products(true);
}

struct report_options { bool json; };

static const struct command_option options[] = {
	FLAG_OPTION(report_options, json, "json", "Print one JSON object"),
};

static int run_doctor(const struct command_line *line)
{
	const struct report_options *o = line->options;
	struct examination x = {0};
	if (examine_machine(&x) < 0)
		return EXIT_WORK_FAILED;
	result_print(machine_report(&x), o->json, print_machine);
	return judge_machine(&x) < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

const struct command doctor_command = {
	.name = "doctor", .usage = "",
	.help = "Examine the machine: processor, OpenBLAS kernel, rates, bandwidth, threads, and whether every operation "
		"computes what its plain form does.",
	.run = run_doctor, COMMAND_OPTIONS(report_options, options), .computes = true, .measures_openblas = true,
	.checks_products = true,
};
