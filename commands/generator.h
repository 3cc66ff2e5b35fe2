/*
 * commands/generator.h - a model that is open for generation, with its tokenizer: what `ling generate` and `ling chat`
 * share.
 */
#ifndef LING_COMMANDS_GENERATOR_H
#define LING_COMMANDS_GENERATOR_H

#include "files/base.h"
#include "files/tokenizer.h"
#include "ling.h"
#include "commands/command.h"
#include "commands/engine.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The options of a command whose struct of options s has `struct sampling sampling`. */
#define SAMPLING_OPTIONS(s) \
	NUMBER_OPTION(s, sampling.temperature, "temperature", "T", 0, 100, \
			"Draw from softmax(logits / T); 0: take the most likely token", .initial = "0"), \
	WHOLE_OPTION(s, sampling.top_k, "top-k", "K", 1, INT32_MAX, "Draw from the K most likely tokens"), \
	NUMBER_OPTION(s, sampling.top_p, "top-p", "P", 0, 1, \
			"Draw from the fewest tokens that have P of the probability", .above = true, .initial = "1"), \
	WHOLE_OPTION(s, sampling.seed, "seed", "S", 0, INT64_MAX, \
			"Seed of the draws, which depend on it, the prompt's number, the draw's number and the position alone", \
			.initial = "0")
#define TOKENIZER_OPTION(s) \
	TEXT_OPTION(s, tokenizer, "tokenizer", "NAME", \
			"byte, a tokenizer.json, or its directory (default: the model's own)")
#define SEQ_LEN_OPTION(s) \
	WHOLE_OPTION(s, seq_len, "seq-len", "L", 1, INT32_MAX, \
			"Longest sequence, prompt and reply together (default: the model's longest; with rope_scaling of type " \
			"dynamic its max_position_embeddings, beyond which L changes the results)")

/* Fails when an option that goes with draws is given, and nothing is drawn. */
int check_sampling(const struct command_line *line, const struct sampling *s);

struct generator {
	char dir[PATH_LEN];          /* the model's */
	struct model_config config;
	int positions;               /* of the longest sequence */
	struct tokenizer *tokenizer; /* its chat form is chosen */
	struct ids ends;             /* ids that end a text, as the tokenizer's end token does */
	struct layout layout;        /* of the ranks that hold the model: one process, unless the caller changes it */
	struct model model;          /* all zero before generator_load */
};
/* Finds the model that `name` means (see find_model), and opens its tokenizer, or the one that is named. `chat`: what
 * ends a message ends a text too. seq_len: of --seq-len; 0: the model's. Call generator_close after an error too. */
int generator_open(struct generator *g, const char *name, const char *tokenizer, const char *chat_form, bool chat,
		int seq_len);
/* Loads the weights, with room for that many tokens in a forward pass, but at most ENGINE_TOKENS. Collective. */
int generator_load(struct generator *g, int64_t forward_tokens);
void generator_close(struct generator *g);

/* A checksum of what the results depend on: config.json, samples of the weights, the tokenizer, the ids that end a
 * text. It reads some bytes of each tensor, not all. */
int generator_checksum(const struct generator *g, uint32_t *crc);

/* Bytes of a request's text that can be shown now: whole UTF-8 characters, and nothing that may become a part of a
 * stop text, of which the longest has stop_size bytes. All, when it has ended, but for a character in the midst of
 * which the caller ended it. */
size_t text_to_show(const struct request *r, size_t stop_size);

#endif
