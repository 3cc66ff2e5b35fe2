/*
 * commands/sampling.h - how the next token of a text is chosen, and what ends a text.
 */
#ifndef LING_COMMANDS_SAMPLING_H
#define LING_COMMANDS_SAMPLING_H

#include "files/base.h"
#include "kernels.h"
#include "files/checkpoint.h"
#include "files/tokenizer.h"

#include <stddef.h>
#include <stdint.h>

/* How the next token is chosen. Temperature 0: the most likely token, the lowest id among equals. Above 0: a draw with
 * the probabilities softmax(logits / temperature) from the top_k most likely tokens (0: from all), and of these from
 * the fewest, most likely first, whose probabilities add up to top_p of the total (1: from all). */
struct sampling { double temperature, top_p; int top_k; uint64_t seed; };
/* What a draw depends on besides the logits and the settings: `position` of the token in its sequence, the `number` of
 * the prompt, and which `draw` from this prompt it is, from 0. */
struct draw { int64_t position; uint32_t number, draw; };
/* The next token from its logits [V]. scratch [V]. Returns -1 when a logit is NaN or the largest one is infinite. */
int32_t choose_token(const struct sampling *s, const real *logits, int64_t V, const struct draw *d, int32_t *scratch);

/* Appends the ids that end a text by the model's own word: `eos_token_id`, an id or a list, of
 * DIR/generation_config.json or, where that has none, of DIR/config.json, as in transformers. One that is no id is an
 * error. */
int end_ids_read(struct ids *out, const char *dir);
/* The same of the files that go along into a run's checkpoints: what end_ids_read will find there. */
int end_ids_of_files(struct ids *out, const struct model_files *files);

/* Where the first of the stop texts begins in a text, in bytes, searched from `from` on; the text's size where there
 * is none. */
size_t find_stop(const struct text *text, size_t from, const struct strings *stop);
/* Bytes of the longest stop text; 0 without one. */
size_t longest_stop(const struct strings *stop);

#endif
