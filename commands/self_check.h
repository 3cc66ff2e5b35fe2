/*
 * commands/self_check.h - is this machine, with this build, right and fast: each kernel beside a reference, the matrix
 * products beside plain loops, and a few measurements. `ling doctor`, `ling bench` and the tests use it.
 */
#ifndef LING_COMMANDS_SELF_CHECK_H
#define LING_COMMANDS_SELF_CHECK_H

#include "files/base.h"

#include <stdbool.h>
#include <stdint.h>

/* The relative error |actual - expected| / |expected| of an operation of kernels.h, by L2 norms of whole arrays. It is
 * the largest of several sizes and, in the backward pass, of several gradients. NaN: a result was NaN. */
struct check {
	const char *operation;
	bool has_backward;
	double forward, backward;
};
/* The largest error that counts as right: ten times what is usual. Rounding gives up to about 1e-6 in float; in double
 * the central differences that gradients are compared with give up to about 1e-9. */
#define CHECK_BOUND (sizeof(real) == 4 ? 1e-5 : 1e-8)
enum { MAX_CHECKS = 20 };

/* Checks every operation. Writes a row for each and returns their number. scratch [self_check_scratch()] doubles. */
int self_check(struct check checks[MAX_CHECKS], double *scratch);
int64_t self_check_scratch(void);

/* The relative error of matrix products, by OpenBLAS or by ling's own kernel, against plain loops: the largest of the
 * three forms that training uses. Some builds of OpenBLAS give wrong products on newer processors. */
double gemm_error(bool openblas);

/* The names of the processor's features that decide which kernels it can run, with spaces between; "" where that is
 * not known. Returns out. */
const char *cpu_features(char out[256]);

/* FLOP/s of the fastest of `repeats` products of n x n matrices by OpenBLAS with `threads` threads: the peak that
 * training is measured against. From the third on, none begins when `seconds` are over. 0 when memory is short. */
double peak_flops(int64_t n, int repeats, double seconds, int threads);

/* Bytes a second, read and written, of the fastest of five copies of in [n] to out [n] by all threads. From the third
 * on, none begins when `seconds` are over. */
double memory_bandwidth(real *out, const real *in, int64_t n, double seconds);

/* Both, with all threads and smaller arrays, in about 50 ms, for the start of a training. 0: not known, since memory is
 * short, or limited for this process. A short measurement moves more than one of `ling doctor`, most of all on a
 * machine that has other work, see docs/performance.md. */
struct machine_rates { double flops, bandwidth; };
struct machine_rates quick_rates(void);

/* How many sockets the cores of this process are on, by the files of `root` ("" for those of the system); 1 where they
 * do not tell. */
int process_sockets(const char *root);
/* Says in out that this process's threads cross sockets, and what to do; "" where they do not. Returns out. */
const char *socket_warning(char out[256], const char *root);

#endif
