/*
 * commands/command.h - what a command is, and what several commands share.
 */
#ifndef LING_COMMANDS_COMMAND_H
#define LING_COMMANDS_COMMAND_H

#include "files/config.h"
#include "commands/engine.h"

#include <argp.h>
#include <stdbool.h>
#include <stdint.h>

enum { EXIT_DONE = 0, EXIT_WORK_FAILED = 1, EXIT_WRONG_USE = 2 };

enum { MAX_SPECIAL = 64 };      /* tokens that train-tokenizer is given */

/* What the command line of any command may hold. */
struct arguments {
	const struct command *command;
	uint64_t given;              /* a bit for each option that was given, see OPTION_BIT */
	char **words;                /* the words that are no options */
	int num_words;
	const char *special_tokens[MAX_SPECIAL];
	int num_special, vocab_size;
	const char *tokenizer, *out, *decode, *pattern, *data, *dtype, *tasks, *prompt, *prompts;
	bool chat, document_mask;
	struct generation_config generation;
	char *stop;
	int document_token, seq_len, ranks, ranks_per_node;
	int64_t max_windows;
	double memory_per_node;      /* bytes */
	bool json, special_as_text;
	const char *to, *weight_type;
	double max_shard_size;       /* bytes */
	bool fold_norm_head, no_tokenizer;
};

enum { OPTION_TOKENIZER = 256, OPTION_OUT, OPTION_DECODE, OPTION_SPECIAL_AS_TEXT, OPTION_VOCAB_SIZE, OPTION_PATTERN, OPTION_SPECIAL_TOKEN, OPTION_DATA,
	OPTION_DTYPE, OPTION_DOCUMENT_MASK, OPTION_DOCUMENT_TOKEN, OPTION_SEQ_LEN, OPTION_MAX_WINDOWS, OPTION_RANKS, OPTION_RANKS_PER_NODE,
	OPTION_MEMORY_PER_NODE, OPTION_PROMPT, OPTION_PROMPTS, OPTION_CHAT, OPTION_MAX_TOKENS, OPTION_TEMPERATURE, OPTION_TOP_K, OPTION_TOP_P,
	OPTION_SEED, OPTION_BATCH, OPTION_STOP, OPTION_NO_CACHE, OPTION_TASKS, OPTION_JSON, OPTION_TO, OPTION_WEIGHT_TYPE,
	OPTION_MAX_SHARD_SIZE, OPTION_FOLD_NORM_HEAD, OPTION_NO_TOKENIZER, OPTION_KEYS };

#define OPTION_BIT(option) (UINT64_C(1) << ((option) - OPTION_TOKENIZER))

enum { ANY_NUMBER = INT32_MAX, MAX_BATCH = 256 };

struct command {
	const char *name;
	int (*run)(const struct arguments *);
	bool computes;               /* worth the best environment, see use_best_environment */
	int min_words, max_words;
	uint64_t required;           /* options that must be given */
	const char *usage, *help;
	struct argp_option options[16];
};

extern const char *const format_names[]; /* in the order of enum model_format */

/* Says so if a directory that is no model is that of a run. */
void explain_run(const char *dir);

/* The config of a model's directory. */
int model_of_directory(struct model_config *c, const char *dir);

#endif
