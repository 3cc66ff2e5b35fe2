/*
 * commands/tasks.h - the tasks of `ling eval --tasks`: the task file and its samples, the comparison of replies with
 * answers, and the reports.
 */
#ifndef LING_COMMANDS_TASKS_H
#define LING_COMMANDS_TASKS_H

#include "files/base.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* -- the task file: a YAML list of tasks, each with a JSON lines file of samples. docs/evaluation.md says what the
 * keys mean. -- */

enum task_type { TASK_MULTIPLE_CHOICE, TASK_PERPLEXITY, TASK_EXACT_MATCH };
enum answer_form { ANSWER_INDEX, ANSWER_NUMBER, ANSWER_LETTER, ANSWER_TEXT, ANSWER_LABEL };
enum on_null { NULL_ERROR, NULL_EMPTY, NULL_SKIP };
enum choose { CHOOSE_RANDOM, CHOOSE_FIRST };
enum which_match { MATCH_FIRST, MATCH_LAST };

struct sample {                /* a record of a task's data, its fields put into the templates of the task */
	int64_t line;                /* its line in the file, from 1; see one_value: its record's number */
	struct text prompt;          /* perplexity: the document */
	struct text target;          /* what follows the prompt where the sample is an example; perplexity: empty */
	struct text *choice;         /* [num_choices] the options; exact match: the right answers, normalized */
	int num_choices;             /* options: 2 to 1000 */
	int answer;                  /* multiple choice: index of the right option, from 0 */
};
struct samples {
	struct sample *sample;       /* [count] */
	int64_t count;
	size_t capacity;
	int64_t skipped;             /* left out because of a null; see on_null */
	bool one_value;              /* the file is one JSON value, not lines */
};

struct task {                  /* the values of the keys (task_keys in tasks.c), NULL or 0: off; the samples */
	char name[MAX_NAME], group[MAX_NAME];
	enum task_type type;
	char data[PATH_LEN];         /* a path from where ling was started, as the one of examples.data */
	char *field;
	int64_t limit;
	enum on_null on_null;
	char *prompt, *text, *option, *target, *separator;
	struct strings options, stop;
	char *answer, *labels, *extract, *extract_answer;
	enum answer_form answer_form;
	enum which_match match;
	struct { bool strip, lowercase, punctuation, number; struct strings ignore; } normalize;
	struct { int count; char *text, data[PATH_LEN]; enum choose choose; uint64_t seed; } examples;
	bool chat;
	int max_tokens;
	int64_t stride;
	struct samples samples;      /* of `data`; only the first num_samples are scored, the others serve as examples */
	int64_t num_samples;
	struct samples pool;         /* of examples.data; empty when the examples come from `samples` */
};
struct tasks { struct task *task; int64_t count; size_t capacity; };

/* Reads a task file and the samples of all its tasks: at least one task, each with at least one sample. Errors name
 * the file, the line, and the key or field. tasks_free may follow in any case. */
int tasks_load(struct tasks *t, const char *path);
void tasks_free(struct tasks *t);
/* Prints every key of a task file with its default and meaning. */
void tasks_print_keys(FILE *out);

/* Whether the reply to a sample of an exact match task is right: appends to `extracted` what the pattern `extract`
 * takes from the reply (without a pattern, all of it), normalizes that, and compares it with the answers. Where the
 * pattern does not match, *matched is false, nothing is appended, and the reply is wrong. */
bool task_reply_is_right(const struct task *t, const struct sample *s, const struct text *reply,
		struct text *extracted, bool *matched);

/* -- results -- */

/* What a multiple choice prediction is made by: the log-likelihood, or that over the option's bytes or tokens, or over
 * its characters as lm-evaluation-harness counts them for acc_norm. */
enum { ACCURACY_RAW, ACCURACY_BYTES, ACCURACY_TOKENS, ACCURACY_CHARACTERS, NUM_ACCURACIES };

struct scored_tokens { double log_likelihood; const int32_t *id; int64_t num_tokens; }; /* in nats; id [num_tokens] */

struct sample_result {
	const struct sample *sample;
	/* multiple choice, exact match: what the model was given, with examples and after cutting; not of documents */
	struct text context;
	bool cut;                    /* the context lost its first tokens; perplexity: the document took several windows */
	/* [num_choices] the options; perplexity: the document, id NULL; exact match: the reply, log_likelihood 0 */
	const struct scored_tokens *scored;
	int prediction[NUM_ACCURACIES]; /* multiple choice: index of the option, from 0 */
	int64_t words;               /* perplexity: of the document */
	struct text reply, extracted; /* exact match, see task_reply_is_right */
	bool matched, correct;
};

/* The standard error of a single sample is NaN; a perplexity may be infinite. */
struct score { const char *name; double value, standard_error; };
enum { MAX_SCORES = 4 };

struct task_result {
	const struct task *task;
	int num_scores;
	struct score score[MAX_SCORES];
	int64_t cut;                 /* samples whose sample_result.cut is true */
	int64_t ties[NUM_ACCURACIES]; /* multiple choice: samples with several best options */
	int64_t unmatched;           /* exact match: replies that `extract` does not match */
	int64_t tokens, words, bytes; /* perplexity: of all documents */
};

/* What the report says beside the results: paths as the user gave them, and the window in tokens. */
struct evaluation_facts { const char *model, *tasks; uint32_t tokenizer_hash; int64_t seq_len; };
/* The report of an evaluation, result [count]: what results.json holds and `ling eval --json` prints. Numbers that are
 * not finite are null. The caller owns it. */
json_t *results_report(const struct evaluation_facts *facts, const struct task_result *result, int64_t count);
/* Prints a report as a table on standard output. */
void print_results(const json_t *report);

/* The files dir/samples.jsonl, a line for each sample, and dir/results.json. They take the place of older ones only
 * when both are whole. In both, bytes that are not UTF-8 (of paths, of replies) are U+FFFD. */
struct results;
/* Makes the directory and begins the files. NULL on error; else results_finish must follow. */
struct results *results_open(const char *dir);
/* Adds the line of a sample. A write error is told by results_finish. */
void results_add(struct results *r, const struct task *t, const struct sample_result *s);
/* Writes the report to results.json, brings both files to disk, and frees r. On an error of its own, and with NULL for
 * the report, which stands for an error of the evaluation, it makes neither file. */
int results_finish(struct results *r, const json_t *report);

#endif
