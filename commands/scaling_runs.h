/*
 * commands/scaling_runs.h - the runs that scaling laws are fitted to: what each was and which loss it reached; from
 * the directory of a run, from and to a table.
 *
 * The table is text, a line for each run, with a tab between two columns. The first one names the columns, in any
 * order. Empty lines and lines that begin with # are skipped. Columns whose name has a dot are keys of a config. What
 * they hold, as the values of schedule.warmup_steps, is not read, only compared: see `rest`. The others are these; a
 * value that is not known is "-", and only `run`, `flops` and `loss` must be there:
 *
 *   run                 its name; each once
 *   parameters          all of them, as `ling info` counts them
 *   active_parameters   those that one token uses, as `ling info` counts them: embedding and head too
 *   non_embedding       all without embedding and head
 *   active_non_embedding
 *   tokens              D: that it was trained on
 *   flops               C: of its training, count_parameters() times tokens
 *   loss                of the validation after its last step, in nats a token. "-" or nan: the run failed or has not
 *                       ended, and is left out
 *   learning_rate       schedule.peak_lr
 *   batch_tokens        of an optimizer step: train.batch times data.seq_len
 *   seed                train.seed
 *   activation_ratio    (k + S) / (E + S): the share of the experts that a token uses; 1 in a dense model
 *   granularity         2 H / I: how fine the experts are; "-" in a dense model
 */
#ifndef LING_COMMANDS_SCALING_RUNS_H
#define LING_COMMANDS_SCALING_RUNS_H

#include "files/base.h"
#include "files/config.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* The columns of numbers, in the order in which they are written. */
enum scaling_column {
	SCALING_PARAMETERS, SCALING_ACTIVE, SCALING_NON_EMBEDDING, SCALING_ACTIVE_NON_EMBEDDING, SCALING_TOKENS,
	SCALING_FLOPS, SCALING_LOSS, SCALING_LEARNING_RATE, SCALING_BATCH, SCALING_SEED, SCALING_ACTIVATION_RATIO,
	SCALING_GRANULARITY, NUM_SCALING_COLUMNS
};
extern const char *const scaling_columns[NUM_SCALING_COLUMNS];

struct scaling_run {
	char *name;
	double value[NUM_SCALING_COLUMNS]; /* NaN: not known. All are above 0, but a seed may be 0 */
	char *rest;                  /* what else the runs may differ in, as text, never NULL: of a table the columns with
	                              * a dot; of a directory its config, less the seed and what does not change a loss */
	char *text;                  /* what the loss is of: validation data and how much of it; "": not known */
	char *left_out;              /* why it cannot be used; NULL: it can */
};

struct scaling_runs { struct scaling_run *run; int count; size_t room; };
void scaling_runs_free(struct scaling_runs *runs); /* a struct of zeros is fine */

/* Adds what a word of the command line names: the directory of a run, or a table. A run that has not ended, or that has
 * no finite loss, is added with the reason in left_out. Fails when the file is no such table, and for the directory of
 * no run. */
int scaling_runs_add(struct scaling_runs *runs, const char *path);
/* Fails when two have the same name, or agree in all but the loss; and when their losses are of different texts. Those
 * that are left out do not count. */
int scaling_runs_check(const struct scaling_runs *runs);

/* Whether two runs agree in all but the seed and the loss. */
bool scaling_runs_differ_in_seed(const struct scaling_run *a, const struct scaling_run *b);

/* Fills what a config tells: the columns of parameters, FLOPs for value[SCALING_TOKENS], learning rate, batch, seed,
 * activation ratio and granularity. */
int scaling_run_describe(struct scaling_run *r, const struct model_config *m, int seq_len, double peak_lr,
		double batch, double seed);

/* Both write a line of a table. keys, values: columns with a dot behind the others; of texts without tabs and line
 * ends. */
void scaling_table_header(FILE *f, const struct strings *keys);
void scaling_table_row(FILE *f, const struct scaling_run *r, const char *const *values, int num_values);

#endif
