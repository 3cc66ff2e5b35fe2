/*
 * commands/engine.h - generation: KV caches, batches of sequences, sampling.
 */
#ifndef LING_COMMANDS_ENGINE_H
#define LING_COMMANDS_ENGINE_H

#include "files/base.h"
#include "kernels.h"
#include "files/tokenizer.h"
#include "ling.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A sequence that remembers its keys and values, see struct kv_cache: an empty one, with room for `capacity` tokens, which may be more than
 * m->seq_len. */
int kv_cache_init(struct kv_cache *c, struct model *m, int64_t capacity);
void kv_cache_free(struct kv_cache *c);
/* Makes `to` the first n tokens of `from`. */
void kv_cache_copy(const struct model *m, struct kv_cache *to, const struct kv_cache *from, int64_t n);

/* How a token is chosen. At temperature 0: the most likely one, the lower id among equals. Else it is drawn with the probabilities
 * softmax(logits / temperature) among the top_k most likely (0: all), and of these among the fewest that have top_p of their probability (1: all). */
struct sampling { double temperature, top_p; int top_k; uint64_t seed; };
/* The token at `position` of sequence `number` from its logits [V]: of nothing else than these does it depend. -1 when they are not finite.
 * scratch [V]. */
int32_t choose_token(const struct sampling *s, const real *logits, int64_t V, uint32_t number, int64_t position, int32_t *scratch);

struct request {          /* of one prompt */
	struct ids ids;              /* the prompt's num_prompt, at least one, and then its own, less the end token */
	int64_t num_prompt;
	uint32_t number;             /* its draws are its own */
	struct text text;            /* of its own tokens, less the stop text and what came behind it */
	enum ended { RUNNING, ENDED_BY_TOKEN, ENDED_BY_STOP, ENDED_BY_LENGTH } ended; /* by the end token, the stop text, max_tokens */
};
struct generation_config {
	struct sampling sampling;
	int64_t max_tokens;          /* of a continuation, at least 1 */
	struct strings stop;         /* a continuation ends before the first of these */
	int batch;                   /* sequences at a time */
	bool no_cache;               /* compute every sequence anew for each of its tokens: a check, and slow */
	int (*show)(void *context, const struct request *c); /* NULL, or called after each token; -1 ends all */
	void *context;
};
/* Continues n prompts, those that are finished already left out. The result is the same for any batch, with the cache and without. */
int generate(struct model *m, const struct tokenizer *t, struct request *requests, int n, const struct generation_config *g);

/* Where the first of some stop texts begins in a text, which has none before `from`; its size where there is none. */
size_t find_stop(const struct text *text, size_t from, const struct strings *stop);

size_t longest_stop(const struct strings *stop);

#endif
