/*
 * commands/scoring.h - scored evaluation: a task is encoded, run through the model, and counted.
 */
#ifndef LING_COMMANDS_SCORING_H
#define LING_COMMANDS_SCORING_H

#include "files/tokenizer.h"
#include "ling.h"
#include "commands/tasks.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct task_branch {
	int64_t rest, num_rest;      /* the sequence's tokens behind what the branches share, in task_work.ids; the last one is only a target */
	int64_t scored;              /* where in the sequence the scored tokens begin: never at 0 */
};
struct task_item {
	int64_t sample;
	int64_t shared, num_shared;  /* in task_work.ids; at least one token */
	int64_t first_branch;
	int num_branches;            /* exact match: 0, the shared tokens are the prompt */
	bool cut;
};
struct task_work {             /* a task in tokens */
	const struct task *task;
	const struct tokenizer *tokenizer;
	struct ids ids;
	struct task_item *item;
	struct task_branch *branch;
	int64_t num_items, num_branches;
	size_t item_room, branch_room;
	int64_t longest;             /* tokens of the longest sequence that must fit into the model's window */
	/* what the model makes of it: each branch's log-likelihood; exact match: each item's reply, as its length and max_tokens ids */
	double *value;
	int64_t num_values;
};
/* Encodes a task for windows of up to L tokens. task_work_free in any case. */
int task_encode(struct task_work *w, const struct task *task, const struct tokenizer *tokenizer, int64_t L);
void task_work_free(struct task_work *w);
/* Runs the items of the samples that are this rank's, up to `batch` at a time; on all ranks together, which then have all values. The bits of a value
 * depend neither on batch or ranks nor on how many tokens the model takes at a time. */
int task_run(struct task_work *w, struct model *m, int batch);
/* The scores; with `results`, a line of each sample. */
void task_score(const struct task_work *w, struct task_result *result, struct results *results);

void print_results(const struct task_result *result, int64_t count);

#endif
