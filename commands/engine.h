/*
 * commands/engine.h - the engine of evaluation and generation: requests, continuous batching, one pool of keys and
 * values, shared prefixes. `ling generate` and `ling chat` use it, `ling eval` for tasks, and a training run for its
 * samples.
 *
 *     struct engine *e = engine_open(&model, tokenizer, &options);
 *     engine_add(e, &request) ...;
 *     engine_run(e, NULL, NULL);         until all requests have ended
 *     engine_close(e);
 *
 * A request is a prompt, and what is wanted of it: new tokens, or the log-probabilities of given ones. Each forward
 * pass computes the next token of every request that generates, and then parts of prompts, up to the tokens for which
 * the model has room, max_sequences * seq_len. A request joins as soon as there is room. Nothing is reserved for the
 * tokens that it may still get: when the pool is full, the youngest one gives its memory back, waits, and is computed
 * again.
 *
 * What a request gets does not depend on the others, nor on the batch, the pool, the room of a forward pass, sharing
 * or threads: it has the bits of model_forward over its whole sequence.
 */
#ifndef LING_COMMANDS_ENGINE_H
#define LING_COMMANDS_ENGINE_H

#include "files/base.h"
#include "kernels.h"
#include "files/tokenizer.h"
#include "ling.h"
#include "commands/command.h"
#include "commands/sampling.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ENGINE_TOKENS: tokens of a forward pass for which the model should have room where requests have so many: more are
 * hardly faster, fewer give the experts too few rows. */
enum { ENGINE_TOKENS = 4096 };
/* Tokens whose logits an engine allocates where a tensor group divides the vocabulary. */
enum { ENGINE_LOGITS = 64 };

/* How a request ended: by an end token, by a stop text, by max_tokens (also one that wants scores alone), by the caller
 * (see on_token, on_step). RUNNING: it waits, is computed, or its engine has failed. */
enum ended { RUNNING, ENDED_BY_TOKEN, ENDED_BY_STOP, ENDED_BY_LENGTH, ENDED_BY_CALLER };

/* The caller keeps it in its place until it has ended, and then calls request_free; on_token may do so. Fields that
 * are not set are 0. */
struct request {
	/* set by the caller */
	struct ids ids;              /* the prompt's num_prompt ids, at least one; then the generated ids, no end token */
	int64_t num_prompt;
	uint32_t number;             /* of the prompt, from 0: see struct draw; messages count from 1 */
	uint32_t draw;               /* the same */
	int priority;                /* those of a higher one come first, and keep their memory longer */
	int64_t max_tokens;          /* most tokens to generate; 0: only scores */
	struct sampling sampling;
	const struct strings *stop;  /* it ends before the first of these texts; or NULL */
	const struct ids *ends;      /* ids that end it, as the tokenizer's end token does; or NULL */
	/* The position in ids, at least 1, of the first token whose log-probability is wanted: of it and of all that
	 * follow, given or generated, but an end token. 0: none. */
	int64_t score_from;

	/* set by the engine */
	struct text text;            /* of the generated ids, up to the first stop text */
	/* [num_log_probs] in nats, of the tokens from score_from on: log softmax(logits), whatever the temperature */
	double *log_prob;
	int64_t num_log_probs;
	size_t log_prob_capacity;
	enum ended ended;
	int64_t shared;              /* tokens whose keys and values it found computed */
	int64_t recomputed;          /* tokens that were computed once more, since the request had given its memory back */
	struct engine_sequence *sequence; /* the engine's own; NULL when it has ended */
};

/* Frees ids, text and log_prob; {0} is fine. */
void request_free(struct request *r);

/* Counts of an engine since it was opened. */
struct engine_statistics {
	int64_t requests;            /* that have ended */
	int64_t tokens_in;           /* of their prompts, computed or shared: each once */
	int64_t tokens_out;          /* generated */
	int64_t shared;              /* of tokens_in, those that were found computed */
	int64_t recomputed;          /* computed once more */
	int64_t forward_passes, computed; /* and the tokens in them */
	int64_t preemptions;         /* times that a request gave its memory back */
	int64_t waits;               /* times that a request waited for a prefix under computation by another */
	int64_t running, waiting;    /* requests, now */
	int64_t most_running;
	int64_t kv_tokens;           /* for which the pool has room */
	int64_t kv_used, most_kv_used; /* of these, in use by requests and by shared prefixes: now, and the most so far */
	double seconds;              /* of engine_run */
};

/* Most tokens that the memory for keys and values may be asked for. */
#define MAX_KV_TOKENS 1000000000000
/* The option of a command whose struct of options s has `int64_t kv_tokens`. */
#define KV_TOKENS_OPTION(s) \
	WHOLE_OPTION(s, kv_tokens, "kv-tokens", "N", 1, MAX_KV_TOKENS, \
			"Memory for the keys and values of N tokens, in blocks of 256 (default: for as many as are of use, if " \
			"there is room)")

struct engine;
struct engine_options {
	/* Tokens for whose keys and values there is memory. 0: for as many as the memory has room for that this process
	 * may use, but not more than `useful_tokens`, unless that is 0. */
	int64_t kv_tokens, useful_tokens; /* kv_tokens: at most MAX_KV_TOKENS */
	int max_requests;            /* most requests that run at the same time, at least 1 */
	bool no_sharing;             /* equal beginnings are computed for each request */
	bool no_cache;               /* computes the whole sequence anew for each token; slow, to check the caches */
	/* All ranks of the replica have the same requests. Else it is only the ranks of a tensor group that have, and
	 * must add them in the same order. */
	bool together;
	/* Called after each new token of a request, and when a request ends. Returns 0; 1: this request ends as
	 * ENDED_BY_CALLER; -1, with the error set: all ends. Or NULL. Ranks with the same requests must return the same; -1
	 * may come from one alone where engine_run has `more`. */
	int (*on_token)(void *data, struct request *r);
	/* Called after each forward pass, also amid a long prompt. Returns 0; 1: all requests end as ENDED_BY_CALLER; -1,
	 * with the error set: all ends. Or NULL. */
	int (*on_step)(void *data, const struct engine_statistics *s);
	void *data;                  /* their first argument */
};
/* Keeps `m` and `t`. Ids that the tokenizer does not have are never chosen. NULL, with the error set, when the memory
 * is not there. Where ranks divide the model it is collective, as all that follows. */
struct engine *engine_open(struct model *m, const struct tokenizer *t, const struct engine_options *o);
/* Requests that have not ended are forgotten. NULL is fine. */
void engine_close(struct engine *e);
/* Fails when the pool has no room for a request alone with max_tokens new tokens, telling what it needs. */
int engine_check(const struct engine *e, const struct request *r);
/* Adds a request, which waits for its turn: by priority, then in the order in which they were added. Fails as
 * engine_check. */
int engine_add(struct engine *e, struct request *r);
/* Computes until all requests have ended and `more`, which may be NULL, adds no other ones: it is called whenever
 * another request could start and none waits. It adds requests with engine_add, none at the end, and returns -1, with
 * the error set, to end everything. Fails when logits are not finite, and where a callback fails; requests that have
 * not ended then hold what was generated so far, and the engine has forgotten them. May be called again: what was
 * computed stays in the pool for later requests that begin alike, as long as there is room. Returns 1 where only
 * another rank of the replica has failed, which parallel_agree will tell. */
int engine_run(struct engine *e, int (*more)(void *data, struct engine *e), void *data);
const struct engine_statistics *engine_statistics(struct engine *e);
/* The same as a JSON object, with the fragmentation of the pool. */
json_t *engine_report(struct engine *e);

/* Bytes of the keys and values of `capacity` tokens in all layers, on this rank. */
size_t kv_cache_bytes(const struct model *m, int64_t capacity);

#endif
