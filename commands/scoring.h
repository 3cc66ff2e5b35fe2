/*
 * commands/scoring.h - scored evaluation: encodes a task's samples, runs them through the model, and computes the
 * scores.
 *
 * The words are those of lm-evaluation-harness: a context, its continuations, and the log-likelihood of each.
 *   multiple choice   a sample is one context, and each of its options a continuation
 *   perplexity        each window of a document is a context with one continuation
 *   exact match       a sample is one context without continuations: the model generates a reply to it
 */
#ifndef LING_COMMANDS_SCORING_H
#define LING_COMMANDS_SCORING_H

#include "files/tokenizer.h"
#include "ling.h"
#include "commands/engine.h"
#include "commands/tasks.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A sequence is the tokens of a context and then those of one of its continuations. The context holds all tokens that
 * they share, also where options begin alike. The engine computes what sequences share once. */
struct task_context {
	int64_t sample;              /* index in task->samples */
	int64_t begin, num_tokens;   /* in task_work.ids; at least one token. Exact match: the prompt */
	int64_t first_continuation;  /* in task_work.continuations */
	int num_continuations;       /* exact match: 0 */
	int64_t text, text_size;     /* in task_work.texts: of the context, but for what was cut; not of perplexity */
	bool cut;                    /* lost its first tokens to fit into the window; perplexity: one of several windows */
};
struct task_continuation {
	int64_t begin, num_tokens;   /* in task_work.ids; at least one token. The last one is predicted, never an input */
	int64_t first_scored;        /* position in the sequence, from 0, of the first scored token: at least 1 */
};
struct task_work {             /* a task as tokens, and what the model made of it */
	const struct task *task;
	const struct tokenizer *tokenizer;
	const struct ids *ends;      /* that end a reply, see struct request; set before task_run, or NULL */
	struct ids ids;              /* of all contexts and continuations */
	struct text texts;           /* of all contexts */
	struct task_context *contexts;           /* [num_contexts] in the order of the samples */
	struct task_continuation *continuations; /* [num_continuations] */
	int64_t num_contexts, num_continuations;
	size_t contexts_capacity, continuations_capacity;
	int64_t longest;             /* inputs of the longest sequence, with a whole reply */
	double *log_likelihood;      /* [num_continuations] in nats, summed over the scored tokens */
	/* exact match: [num_contexts, 1 + max_tokens] number of generated ids, and these; doubles for all_reduce_sum */
	double *reply;
	double *documents;           /* perplexity: [4, num_samples] work space of task_score */
};

/* Encodes the samples of a task that are to be scored, for windows of at most L tokens of input. Keeps `task` and
 * `tokenizer`. Fails, naming the sample, when one does not fit into the window; also when memory is short.
 * task_work_free may follow in any case. */
int task_encode(struct task_work *w, const struct task *task, const struct tokenizer *tokenizer, int64_t L);
void task_work_free(struct task_work *w);
/* Fills log_likelihood, or reply, by an engine with these options, but for its callbacks and useful_tokens. All ranks
 * call it together; each computes a part of the samples, and all get all results. These are the same, bit for bit,
 * whatever the options, the ranks and m->seq_len. Rank 0 shows the progress on standard error. Fails when memory is
 * short or a log-likelihood is not finite. Call it once after task_encode. */
int task_run(struct task_work *w, struct model *m, const struct engine_options *o);
/* The scores of a task that was run; with `results` (or NULL) also a line of samples.jsonl for each sample. */
void task_score(struct task_work *w, struct task_result *result, struct results *results);

#endif
