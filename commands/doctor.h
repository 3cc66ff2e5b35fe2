/*
 * commands/doctor.h - `ling doctor` and `ling bench`: is this machine, and what runs on it, fit to train, and how fast.
 */
#ifndef LING_COMMANDS_DOCTOR_H
#define LING_COMMANDS_DOCTOR_H

#include "ling.h"
#include "commands/self_check.h"

#include <stdbool.h>

/* Of all ranks: roof in FLOP/s, flops and tokens of a step; times of this rank, of which communication is a part of the others. */
struct bench { double roof, step_seconds, phase_seconds[NUM_PHASES], communication_seconds, flops, tokens; int ranks; };

enum { BENCH_STEPS = 5 };

/* Trains on random tokens: one step to warm up, then BENCH_STEPS, the roof measured before and after. */
int measure_steps(struct bench *b, struct trainer *t);

void print_bench(const struct bench *b, const char *name, bool json);

/* Fails when the products that will be used are wrong; warns when OpenBLAS's are, which others on the machine may use. */
int check_before_work(bool openblas);

struct examination {
	char features[256];
	int cores, machine_cores, ranks, threads; /* cores: of this process; ranks: on this machine */
	double own_error, library_error; /* of the products, see gemm_error */
	double one_core, all_threads, bandwidth; /* FLOP/s, FLOP/s, bytes/s */
	struct check checks[MAX_CHECKS];
	int num_checks, num_warnings;
	char warnings[8][256];       /* each says what to mend, and how */
};

/* Finds out what decides speed and correctness here. */
int examine_machine(struct examination *x);

void print_examination(const struct examination *x);

void print_examination_json(const struct examination *x);

/* Fails when an operation or a product is wrong, naming it. */
int judge_machine(const struct examination *x);

#endif
