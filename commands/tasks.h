/*
 * commands/tasks.h - tasks of `ling eval --tasks`: the task file, its samples, and the files of results.
 */
#ifndef LING_COMMANDS_TASKS_H
#define LING_COMMANDS_TASKS_H

#include "files/base.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* -- tasks: what `ling eval --tasks` asks a model, and what came of it -- */

enum task_type { TASK_MULTIPLE_CHOICE, TASK_PERPLEXITY, TASK_EXACT_MATCH };
enum answer_form { ANSWER_INDEX, ANSWER_NUMBER, ANSWER_LETTER, ANSWER_TEXT };
enum which_match { MATCH_FIRST, MATCH_LAST };

struct sample {                /* one line of a JSONL file, in the words of its task's templates */
	int64_t line;
	struct text prompt;          /* perplexity: the document */
	struct text target;          /* what follows the prompt where the sample is an example; perplexity: none */
	struct text *choice;         /* [num_choices] the options; exact match: the answers that are right */
	int num_choices, answer;     /* the right option */
};
struct samples { struct sample *sample; int64_t count; size_t capacity; };

struct task {                  /* the keys of a task file (see task_keys in data.c), what is off is NULL or 0; and the samples */
	char name[MAX_NAME];
	enum task_type type;
	char data[PATH_LEN];
	int64_t limit;
	char *prompt, *text, *option, *target, *separator;
	struct strings options, stop;
	char *answer, *extract, *extract_answer;
	enum answer_form answer_form;
	enum which_match match;
	struct { bool strip, lowercase, punctuation; } normalize;
	struct { int count; char data[PATH_LEN]; uint64_t seed; } examples;
	bool chat;
	int max_tokens;
	int64_t stride;
	struct samples samples;      /* of `data`; the first num_samples are scored */
	int64_t num_samples;
	struct samples pool;         /* of examples.data; empty when the examples are from samples */
};
struct tasks { struct task *task; int64_t count; size_t capacity; };

/* Reads a task file and the samples of all its tasks. Errors name the file, the line and the key or field. tasks_free in any case. */
int tasks_load(struct tasks *t, const char *path);
void tasks_free(struct tasks *t);
/* Prints every key of a task file with default and meaning. */
void tasks_print_keys(FILE *out);
/* Whether a reply is right: what is extracted from it and made plain is equal to one of the answers made plain. `extracted` gets that text, and
 * is left empty, with *found false, where the pattern does not match. */
bool task_reply_is_right(const struct task *t, const struct sample *s, const struct text *reply, struct text *extracted, bool *found);

enum { ACCURACY_RAW, ACCURACY_BYTES, ACCURACY_TOKENS, NUM_ACCURACIES };

struct scored_text { double log_likelihood; const int32_t *token; int64_t num_tokens; }; /* the tokens that it is the sum over */

struct sample_result {
	const struct sample *sample;
	bool cut;                    /* the context did not fit into the window */
	const struct scored_text *text; /* [num_choices] the options; perplexity: the document; exact match: the reply, which has no likelihood */
	int prediction[NUM_ACCURACIES]; /* by log-likelihood, over bytes, over tokens */
	int64_t words;               /* of the document */
	struct text reply, extracted;
	bool found, correct;         /* exact match */
};

struct score { const char *name; double value, standard_error; }; /* NaN: cannot be told from one sample */
enum { MAX_SCORES = 4 };

struct task_result {
	const struct task *task;
	int num_scores;
	struct score score[MAX_SCORES];
	int64_t cut;                 /* samples whose context was cut; perplexity: documents in several windows */
	int64_t ties[NUM_ACCURACIES], unmatched;
	int64_t tokens, words, bytes; /* perplexity: of all documents */
};

/* DIR/samples.jsonl and DIR/results.json appear when both are whole. NULL on error. */
struct results *results_open(const char *dir);
void results_add(struct results *r, const struct task *t, const struct sample_result *s);
struct evaluation_facts { const char *model, *tasks; uint32_t tokenizer_hash; int64_t seq_len; };
/* r is gone whatever the result; with failed, so are the files. */
int results_finish(struct results *r, const struct evaluation_facts *facts, const struct task_result *result, int64_t count, bool failed);
/* The text of results.json; the caller frees it. */
char *results_text(const struct evaluation_facts *facts, const struct task_result *result, int64_t count);

enum { RESULT_SAMPLES, RESULT_SUMMARY, NUM_RESULT_FILES };
struct results { struct new_file file[NUM_RESULT_FILES]; };

#endif
