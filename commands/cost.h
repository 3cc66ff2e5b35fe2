/*
 * commands/cost.h - `ling cost`: time, money and energy of training, on machines of one's own or of others.
 */
#ifndef LING_COMMANDS_COST_H
#define LING_COMMANDS_COST_H

#include "commands/command.h"
#include "commands/runs.h"

/* How fast a run was, measured from its metrics and events. */
struct run_rate {
	double tokens_per_second;    /* of its steps, all ranks together, without the first ones */
	int64_t first_step, last_step; /* that count */
	/* The seconds of steps over all the time that passed while it ran, in its newest start: the rest are validations,
	 * saves, the start itself. NaN: no event tells */
	double goodput;
	double peak_flops;           /* FLOP/s of all ranks' machines together; 0: not known */
	double flops_per_token;
	const json_t *config;        /* of that start, in the run's events; NULL: it has none */
};
/* Fails when the run has too few steps. */
int measure_run(struct run_rate *rate, const struct run *r);

extern const struct command cost_command;

#endif
