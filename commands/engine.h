/*
 * commands/engine.h - text generation: key-value caches, batches of requests, sampling. `ling generate` uses it,
 * and `ling eval` for exact-match tasks.
 */
#ifndef LING_COMMANDS_ENGINE_H
#define LING_COMMANDS_ENGINE_H

#include "files/base.h"
#include "kernels.h"
#include "files/checkpoint.h"
#include "files/tokenizer.h"
#include "ling.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the keys and values of `capacity` tokens in all layers, on this rank. */
size_t kv_cache_bytes(const struct model *m, int64_t capacity);
/* Makes the empty cache of a sequence (struct kv_cache, kernels.h), with room for `capacity` tokens. That may be more
 * than m->seq_len: the model's RoPE table is made long enough. Fails with the size when memory is short, and then
 * leaves nothing to free. */
int kv_cache_init(struct kv_cache *c, struct model *m, int64_t capacity);
void kv_cache_free(struct kv_cache *c); /* a cache of zeros is fine */

/* How the next token is chosen. Temperature 0: the most likely token, the lowest id among equals. Above 0: a draw with
 * the probabilities softmax(logits / temperature) from the top_k most likely tokens (0: from all), and of these from
 * the fewest, most likely first, whose probabilities add up to top_p of the total (1: from all). */
struct sampling { double temperature, top_p; int top_k; uint64_t seed; };
/* The token at `position` of the sequence of request `number`, from its logits [V]. A draw depends on the seed, the
 * number, the position and the logits alone. scratch [V]. Returns -1 when a logit is NaN or the largest one is
 * infinite. */
int32_t choose_token(const struct sampling *s, const real *logits, int64_t V, uint32_t number, int64_t position,
		int32_t *scratch);

struct request {               /* a prompt, and what is generated after it. The caller frees ids.id and text.data. */
	struct ids ids;              /* the prompt's num_prompt ids, at least one; then the generated ids, no end token */
	int64_t num_prompt;
	uint32_t number;             /* from 0, see choose_token; messages count from 1 */
	struct text text;            /* of the generated ids, up to the first stop text */
	/* ended by the end token, by a stop text, by max_tokens */
	enum ended { RUNNING, ENDED_BY_TOKEN, ENDED_BY_STOP, ENDED_BY_LENGTH } ended;
};
struct generation_config {
	struct sampling sampling;
	int64_t max_tokens;          /* most tokens to generate for a request, at least 1 */
	struct strings stop;         /* a request ends before the first of these texts */
	const struct ids *ends;      /* ids that end a request, as the tokenizer's end token does; or NULL */
	int batch;                   /* requests that run at the same time */
	bool together;               /* all ranks generate for the same requests, and rank 0 chooses the tokens */
	bool no_cache;               /* computes the whole sequence anew for each token; slow, to check the caches */
	int (*on_token)(void *data, const struct request *r); /* called after each token, -1 ends everything; or NULL */
	void *on_token_data;         /* its first argument */
};
/* Generates for n requests; those that have ended already are passed over. What a request gets depends neither on the
 * batch nor on the cache. Ids that the tokenizer does not have are never chosen. Fails when the caches do not fit into
 * memory, when logits are not finite, and when on_token fails; the requests then hold what was generated so far. With
 * g->together it is collective, and must be so where ranks divide the model; on_token must do the same on all ranks. */
int generate(struct model *m, const struct tokenizer *t, struct request *requests, int n,
		const struct generation_config *g);

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
