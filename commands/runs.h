/*
 * commands/runs.h - reading the directory of a run: its metrics by name, its events, its config.
 *
 * Every number of metrics.jsonl is in a column. The name of a column is the path of its member: "loss", "valid.web",
 * "expert_load.0" (the first layer with experts), "bytes_sent.gradients", "expert_counts.3.17". Two more names have no
 * column, and run_series() computes them: "expert_load", the largest of all layers, and "peak_share", tokens_per_second
 * as a share of what the machines can do at best.
 */
#ifndef LING_COMMANDS_RUNS_H
#define LING_COMMANDS_RUNS_H

#include "files/base.h"
#include "files/collections.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct column {                /* the lines that have the member */
	char *name;
	int count;
	int *row;                    /* [count] rising */
	double *value;               /* [count] NaN: the number was not finite. true and false are 1 and 0 */
	size_t row_room, value_room;
};

struct run {
	char dir[PATH_LEN];          /* as it was given */
	char name[PATH_LEN];         /* the last part of its path; where several runs have the same, see runs_open */
	int count;                   /* rows: one for each line of the metrics, steps rising; and before them one for step
	                              * 0, where the run was validated before its first step. It has valid_loss alone */
	int64_t *step, *tokens;      /* [count] tokens: after the step */
	int num_columns;
	struct column *columns;      /* [num_columns] in the order in which they first appear */
	json_t *events;              /* an array, in the order of the file, without what a start, a resume or a rollback
	                              * undid: decisions about batches, spikes, saves, validations */
	json_t *config;              /* an object, from the newest checkpoint; NULL: there is none */
	double flops_per_token;      /* of forward and backward pass, and what the machines of all ranks can do at best, */
	double peak_flops;           /* FLOP/s: of the newest start or resume that tells; 0: none does */
	struct string_table names;
	size_t columns_room, rows_room, tokens_room;
};

/* Reads a run. That it has no step yet is no error. On error *r is empty. */
int run_open(struct run *r, const char *dir);
void run_free(struct run *r);    /* a struct of zeros is fine */
/* Opens n runs. The name of each becomes the path as it was given where two would have the same name. On error none is
 * open. */
int runs_open(struct run *runs, char *const *dirs, int n);
/* Fails when `out`, a file that is to be written, is there and is one of those that `ling train` keeps in one of these
 * n directories: metrics, events, samples, heartbeat, traces, checkpoints. */
int runs_check_output(char *const *dirs, int n, const char *out);
/* Fails when the run has no step: "... has no step to <use>". */
int run_needs_steps(const struct run *r, const char *use);

/* The column of that name, or NULL. */
const struct column *run_column(const struct run *r, const char *name);
/* The number of columns `name`.0, `name`.1, ..., such as the layers of "expert_load". */
int run_elements(const struct run *r, const char *name);
/* When a row's step ended, in seconds since 1970: from the times of starts in the events and the seconds of steps, so
 * that what a run does between steps is left out. Without events, from the time of the file. times [r->count] */
void run_times(const struct run *r, double *times);

/* Values over steps. */
struct series {
	int count;
	double *step, *tokens, *value; /* [count] each, one block: free(step) */
};
/* A series by the name of a column, or one of the two above. Empty when the run does not have it. */
struct series run_series(const struct run *r, const char *name);
/* At most 3 points for each of `buckets` parts of equal width, of the steps or the tokens: the lowest value, the
 * highest, and one that is not finite; and the first point and the last. */
struct series series_thin(const struct series *s, bool by_tokens, int buckets);
/* At each point the mean of 2 half + 1 values, of which it is the middle: so the mean does not lag behind, as one of
 * the past does. Towards the ends they are fewer. What is not finite is left out and leaves a gap. geometric: the
 * geometric mean, of positive values. */
struct series series_smooth(const struct series *s, int half, bool geometric);
void series_free(struct series *s);

#endif
