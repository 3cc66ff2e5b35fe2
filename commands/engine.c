/*
 * commands/engine.c - the engine of evaluation and generation. A step: requests start as far as there is room; a plan
 * says how many tokens of each go into the next forward pass, and gets rows of the pool for them; the forward pass;
 * then log-probabilities and new tokens.
 */
#define _GNU_SOURCE
#include "commands/engine.h"

#include "files/base.h"
#include "files/collections.h"
#include "files/tokenizer.h"
#include "kernels.h"
#include "parallel.h"
#include "ling.h"
#include "commands/kv_pool.h"
#include "commands/prefix_tree.h"
#include "commands/sampling.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* A request from engine_add until it has ended. */
struct engine_sequence {
	struct request *request;
	int64_t order;               /* counts engine_add */
	struct kv_sequence kv;       /* without tokens while it waits */
	bool started;                /* it has looked for shared tokens, and computes its own */
	bool waited;                 /* for a prefix, once at least */
	int64_t planned;             /* tokens in the next forward pass */
	int64_t computed;            /* the most tokens that kv has had */
};

/* A row of the results of a forward pass from which a token is predicted: the one behind `position`. */
struct wanted_row { struct engine_sequence *sequence; int64_t position; };

struct engine {
	struct model *m;
	const struct tokenizer *tokenizer;
	struct engine_options options;
	struct kv_pool pool;
	struct prefix_tree tree;
	int64_t forward_tokens;      /* most in a forward pass */
	struct engine_sequence **running; /* [num_running] in the order of comes_before; room for max_requests */
	struct engine_sequence **queue; /* [num_queue] those that wait, a heap in the same order */
	size_t num_running, num_queue, queue_capacity;
	int64_t added;               /* requests, so far */
	/* A request has given its memory back, and none has ended since: no other one starts. */
	bool full;
	/* Of a forward pass */
	struct segment *segments;    /* [max_requests] */
	struct engine_sequence **planned; /* [max_requests] those of the segments */
	struct wanted_row *wanted;   /* [forward_tokens] */
	real *logits;                /* [chunk, V] */
	int64_t chunk;
	real *own_logits;            /* the same memory where the engine has allocated it, or NULL */
	int32_t *scratch;            /* [V] */
	const struct group *alike;   /* the ranks with the same requests */
	bool in_step;                /* all ranks of the replica make each forward pass together: see any_rank_runs */
	struct engine_statistics statistics;
};

size_t kv_cache_bytes(const struct model *m, int64_t capacity)
{
	const size_t width = 2 * (size_t)m->config.num_key_value_heads * m->config.head_dim;
	return m->config.num_hidden_layers * (size_t)capacity * width * sizeof(real);
}

void request_free(struct request *r)
{
	free(r->ids.id);
	free(r->text.data);
	free(r->log_prob);
	*r = (struct request){0};
}

/* --------------------------------------------------------------------------------------- open and close */

/* Tokens for whose keys and values this process has memory, beside its weights and activations; some is left to the
 * rest of the program. Where the weights fill the memory, from where the system drops and reads them as needed, an
 * eighth of it. */
static int64_t tokens_in_memory(const struct model *m)
{
	double weights = 0; /* those that this rank reads */
	for (const struct parameter *t = m->table.parameters; t < m->table.parameters + m->table.num_parameters; t++)
		weights += (double)parameter_size(t) * (t->mapped && t->bf16 ? sizeof(uint16_t) : sizeof(real));
	const double all = usable_memory("") / parallel_local_ranks();
	const double rest = fmax(all - weights - m->acts_bytes - m->arrivals_bytes, all / 8);
	return (int64_t)(0.8 * fmin(rest, process_memory()) / kv_cache_bytes(m, 1));
}

/* Rows of the pool. */
static int64_t pool_rows(const struct model *m, const struct engine_options *o)
{
	int64_t rows = o->kv_tokens ? o->kv_tokens : tokens_in_memory(m);
	if (!o->kv_tokens && o->useful_tokens) {
		const int64_t useful = o->useful_tokens + (int64_t)o->max_requests * KV_BLOCK; /* blocks are partly filled */
		rows = useful < rows ? useful : rows;
	}
	return rows > 1 ? rows : 1;
}

struct engine *engine_open(struct model *m, const struct tokenizer *t, const struct engine_options *o)
{
	const int64_t V = m->global.vocab_size, forward_tokens = (int64_t)m->max_sequences * m->seq_len;
	const struct model_config *c = &m->config;
	struct engine *e = allocate(sizeof *e);
	*e = (struct engine){.m = m, .tokenizer = t, .options = *o, .forward_tokens = forward_tokens,
			.alike = o->together ? &m->layout.world : &m->layout.tensor,
			.in_step = !o->together && m->layout.world.size > 1};
	/* The model's own array has the logits, but not with a tensor group: there it has a part of the vocabulary. */
	const bool own = m->layout.tensor.size > 1;
	const int64_t chunk = own ? ENGINE_LOGITS : head_chunk(V, 1);
	e->chunk = chunk < forward_tokens ? chunk : forward_tokens;
	e->running = allocate(o->max_requests * sizeof *e->running);
	e->planned = allocate(o->max_requests * sizeof *e->planned);
	e->segments = allocate(o->max_requests * sizeof *e->segments);
	e->wanted = malloc(forward_tokens * sizeof *e->wanted);
	e->scratch = malloc(V * sizeof *e->scratch);
	e->own_logits = own ? malloc(e->chunk * V * sizeof *e->logits) : NULL;
	e->logits = own ? e->own_logits : m->acts.head_logits;
	int rc = e->wanted && e->scratch && e->logits ? 0 : fail("out of memory for the logits of %lld tokens, %.1f GB",
			(long long)e->chunk, (double)e->chunk * V * sizeof *e->logits / 1e9);
	/* Ranks with the same requests must decide alike: they take the smallest pool, in frames, which a real counts. */
	real frames = -(real)((pool_rows(m, o) + KV_BLOCK - 1) / KV_BLOCK);
	all_reduce_max(e->alike, TRAFFIC_STATISTICS, &frames, 1);
	if (rc == 0)
		rc = kv_pool_open(&e->pool, c->num_hidden_layers, 2 * (int64_t)c->num_key_value_heads * c->head_dim,
				(int64_t)-frames * KV_BLOCK);
	if (rc == 0)
		rc = prefix_tree_open(&e->tree, &e->pool);
	if (parallel_agree(rc) < 0) {
		engine_close(e);
		return NULL;
	}
	e->statistics.kv_tokens = e->pool.rows;
	return e;
}

/* Takes a sequence out of the engine, whose request no longer knows it. */
static void forget(struct engine *e, struct engine_sequence *s)
{
	kv_sequence_free(&e->pool, &s->kv);
	s->request->sequence = NULL;
	free(s);
}

/* Forgets all requests; they have ended in this way. */
static void forget_all(struct engine *e, enum ended ended)
{
	for (size_t i = 0; i < e->num_running + e->num_queue; i++) {
		struct engine_sequence *s = i < e->num_running ? e->running[i] : e->queue[i - e->num_running];
		s->request->ended = ended;
		forget(e, s);
	}
	e->num_running = e->num_queue = 0;
}

void engine_close(struct engine *e)
{
	if (!e)
		return;
	forget_all(e, RUNNING);
	prefix_tree_close(&e->tree);
	kv_pool_close(&e->pool);
	free(e->running);
	free(e->queue);
	free(e->segments);
	free(e->planned);
	free(e->wanted);
	free(e->own_logits);
	free(e->scratch);
	free(e);
}

/* ------------------------------------------------------------------------------------- who comes first */

static bool before(const struct engine_sequence *a, const struct engine_sequence *b)
{
	const int p = a->request->priority, q = b->request->priority;
	return p > q || (p == q && a->order < b->order);
}

/* A heap_order of pointers to sequences. */
static bool comes_before(const void *a, const void *b, const void *context)
{
	(void)context;
	return before(*(struct engine_sequence *const *)a, *(struct engine_sequence *const *)b);
}

static void queue_add(struct engine *e, struct engine_sequence *s)
{
	e->queue = grow(e->queue, e->num_queue, &e->queue_capacity, 1, sizeof *e->queue);
	heap_raise(e->queue, e->num_queue++, sizeof s, &s, comes_before, NULL);
}

static struct engine_sequence *queue_take(struct engine *e)
{
	struct engine_sequence *first = e->queue[0], *last = e->queue[--e->num_queue];
	if (e->num_queue)
		heap_sink(e->queue, 0, e->num_queue, sizeof last, &last, comes_before, NULL);
	return first;
}

static void running_add(struct engine *e, struct engine_sequence *s)
{
	size_t i = e->num_running++;
	for (; i > 0 && before(s, e->running[i - 1]); i--)
		e->running[i] = e->running[i - 1];
	e->running[i] = s;
}

static void running_remove(struct engine *e, const struct engine_sequence *s)
{
	size_t i = 0;
	while (e->running[i] != s)
		i++;
	e->num_running--;
	memmove(e->running + i, e->running + i + 1, (e->num_running - i) * sizeof *e->running);
}

/* Inputs of a request with all its new tokens: the last one is never an input. */
static int64_t most_inputs(const struct request *r)
{
	return r->ids.count + r->max_tokens - 1;
}

int engine_check(const struct engine *e, const struct request *r)
{
	const int64_t need = most_inputs(r);
	if (need <= e->pool.rows)
		return 0;
	if (!r->max_tokens)
		return fail("sequence %lld has %lld tokens: their keys and values need room for %lld tokens, and there is "
				"memory for %lld; give more (--kv-tokens), or score shorter ones", (long long)r->number + 1,
				(long long)r->num_prompt, (long long)need, (long long)e->pool.rows);
	return fail("prompt %lld has %lld tokens, and %lld more are wanted: their keys and values need room for %lld "
			"tokens, and there is memory for %lld; give more (--kv-tokens), or ask for fewer tokens",
			(long long)r->number + 1, (long long)r->num_prompt, (long long)r->max_tokens, (long long)need,
			(long long)e->pool.rows);
}

int engine_add(struct engine *e, struct request *r)
{
	const int64_t need = most_inputs(r);
	if (engine_check(e, r) < 0)
		return -1;
	if (extend_rope(e->m, need) < 0)
		return fail("out of memory for the rotary embedding of %lld tokens", (long long)need);
	struct engine_sequence *s = r->sequence = allocate(sizeof *s);
	*s = (struct engine_sequence){.request = r, .order = e->added++};
	r->ended = RUNNING;
	queue_add(e, s);
	return 0;
}

/* ------------------------------------------------------------------------------- start, and give back */

/* Tokens that the model must have seen for what the request wants next. */
static int64_t inputs_of(const struct request *r)
{
	return r->ids.count - (r->max_tokens == 0);
}

static int64_t missing(const struct engine_sequence *s)
{
	return inputs_of(s->request) - s->kv.cache.length;
}

/* The first tokens of a request that need not be computed where their keys and values are there: those whose results
 * are not wanted. */
static int64_t shareable(const struct request *r)
{
	const int64_t inputs = inputs_of(r), next = r->score_from + r->num_log_probs - 1;
	const int64_t most = r->max_tokens ? inputs - 1 : inputs;
	return r->score_from && next < most ? next : most;
}

/* What is computed of a sequence can serve others from now on. */
static void share(struct engine *e, struct engine_sequence *s)
{
	if (!e->options.no_sharing && !e->options.no_cache && s->kv.cache.length)
		prefix_tree_insert(&e->tree, s->request->ids.id, &s->kv);
}

/* The request has ended as r->ended says. */
static void finish(struct engine *e, struct engine_sequence *s)
{
	share(e, s);
	running_remove(e, s);
	e->statistics.requests++;
	e->full = false;
	forget(e, s);
}

/* A request gives its memory back, and waits. */
static void preempt(struct engine *e, struct engine_sequence *s)
{
	share(e, s);
	running_remove(e, s);
	kv_sequence_free(&e->pool, &s->kv);
	s->started = false;
	s->planned = 0;
	e->full = true;
	e->statistics.preemptions++;
	queue_add(e, s);
}

/* Rows for the inputs of a request and for some 80 tokens more: with fewer, many give their memory back soon; with
 * more, fewer run. */
static int64_t rows_needed(const struct request *r)
{
	return (inputs_of(r) / KV_UNIT + 3) * KV_UNIT;
}

/* Whether the first one that waits could be computed without another's giving back its memory soon. */
static bool has_room(struct engine *e)
{
	struct engine_sequence *s = e->queue[0];
	int64_t need = 0;
	for (size_t i = 0; i < e->num_running; i++) {
		const int64_t more = rows_needed(e->running[i]->request) - kv_sequence_rows(&e->pool, &e->running[i]->kv);
		need += more > 0 ? more : 0;
	}
	if (need + rows_needed(s->request) <= e->pool.rows - e->pool.in_sequences)
		return true;
	/* it may find some computed: of these, whole blocks are shared, and a partial one is copied */
	const int64_t found = prefix_tree_find(&e->tree, s->request->ids.id, shareable(s->request), &s->kv);
	need += rows_needed(s->request) - found / KV_BLOCK * KV_BLOCK;
	const bool room = need <= e->pool.rows - e->pool.in_sequences;
	kv_sequence_free(&e->pool, &s->kv);
	return room;
}

static bool could_start(const struct engine *e)
{
	return e->num_running == 0 || (e->num_running < (size_t)e->options.max_requests && !e->full);
}

/* The requests that wait run, as far as there is room. */
static int start_requests(struct engine *e, int (*more)(void *data, struct engine *e), void *data)
{
	while (could_start(e)) {
		if (e->num_queue == 0 && more && more(data, e) < 0)
			return -1;
		if (e->num_queue == 0 || (e->num_running && !has_room(e)))
			break;
		running_add(e, queue_take(e));
	}
	if (e->num_running > (size_t)e->statistics.most_running)
		e->statistics.most_running = (int64_t)e->num_running;
	return 0;
}

/* Whether a running request is about to compute tokens that s needs, so many that it is better to wait for them. found:
 * tokens of s that are computed already. */
static bool better_wait(const struct engine *e, const struct engine_sequence *s, int64_t found)
{
	const int64_t most = shareable(s->request);
	for (size_t i = 0; i < e->num_running; i++) {
		const struct engine_sequence *r = e->running[i];
		int64_t alike = found, from = r->kv.cache.length > found ? r->kv.cache.length : found;
		if (!r->started || missing(r) == 0 || memcmp(r->request->ids.id, s->request->ids.id,
				(found < inputs_of(r->request) ? found : inputs_of(r->request)) * sizeof *r->request->ids.id))
			continue;
		while (alike < most && alike < inputs_of(r->request) &&
				r->request->ids.id[alike] == s->request->ids.id[alike])
			alike++;
		if (alike > from && (alike - from >= KV_UNIT || 2 * (alike - from) >= inputs_of(s->request) - found))
			return true;
	}
	return false;
}

/* A running request begins to be computed: with the tokens that are there, but not while another computes some of its
 * first ones. False: it waits. */
static bool start(struct engine *e, struct engine_sequence *s)
{
	const struct request *r = s->request;
	if (e->options.no_sharing || e->options.no_cache)
		return s->started = true;
	if (better_wait(e, s, prefix_tree_length(&e->tree, r->ids.id, shareable(r)))) {
		e->statistics.waits += !s->waited;
		s->waited = true;
		return false;
	}
	const int64_t found = prefix_tree_find(&e->tree, r->ids.id, shareable(r), &s->kv);
	if (found > s->computed) { /* what it had computed before it gave its memory back is not shared */
		s->request->shared += found - s->computed;
		e->statistics.shared += found - s->computed;
		e->statistics.tokens_in += found - s->computed;
		s->computed = found;
	}
	return s->started = true;
}

/* ---------------------------------------------------------------------------------------------- the plan */

/* Gets rows for the next n tokens of a sequence. Where there are none, the youngest gives its memory back: that may be
 * the sequence itself, which then does not run any more. *room: tokens for which the forward pass has room. */
static void plan_tokens(struct engine *e, struct engine_sequence *s, int64_t n, int64_t *room)
{
	while (!prefix_tree_grow(&e->tree, &s->kv, n)) {
		size_t i = e->num_running - 1;
		while (e->running[i] != s && e->running[i]->kv.num_blocks == 0)
			i--;
		struct engine_sequence *youngest = e->running[i];
		/* alone, it can grow until it fills the pool, as engine_add has made sure */
		assert(youngest != s || e->num_running > 1);
		*room += youngest->planned;
		preempt(e, youngest);
		if (youngest == s)
			return;
	}
	s->planned = n;
	*room -= n;
}

/* Plans the next forward pass: first the next token of each request that has no other one to be computed, then the
 * tokens of the rest. */
static void plan(struct engine *e)
{
	int64_t room = e->forward_tokens;
	for (size_t i = 0; i < e->num_running; i++)
		e->running[i]->planned = 0;
	for (int prompts = 0; prompts < 2; prompts++)
		for (size_t i = 0; i < e->num_running && room > 0;) {
			struct engine_sequence *s = e->running[i];
			const bool next = s->started && !s->planned && missing(s) == 1;
			if (next == !prompts && !s->planned && (s->started || start(e, s)))
				plan_tokens(e, s, missing(s) < room ? missing(s) : room, &room);
			i += i < e->num_running && e->running[i] == s; /* else it has given its place to the next one */
		}
}

/* --------------------------------------------------------------------------------------- what is wanted */

/* Adds a new token to a request, and sets `ended` if that ends it. */
static void add_token(struct request *r, int32_t id, const struct tokenizer *t)
{
	bool ends = id == tokenizer_end(t);
	for (int64_t i = 0; r->ends && i < r->ends->count; i++)
		ends |= id == r->ends->id[i];
	if (ends) {
		r->ended = ENDED_BY_TOKEN;
		return;
	}
	/* A stop text may have begun in the tokens before. */
	const size_t longest = r->stop ? longest_stop(r->stop) : 0;
	const size_t from = r->text.size < longest ? 0 : r->text.size - longest;
	append_id(&r->ids, id);
	tokenizer_decode(t, id, false, &r->text);
	const size_t end = r->stop ? find_stop(&r->text, from, r->stop) : r->text.size;
	if (end < r->text.size) {
		r->text.size = end;
		r->text.data[end] = 0;
		r->ended = ENDED_BY_STOP;
	} else if (r->ids.count - r->num_prompt == r->max_tokens)
		r->ended = ENDED_BY_LENGTH;
}

/* Whether the row of a position gives a log-probability that is not known yet, or predicts a new token. */
static bool is_wanted(const struct request *r, int64_t position)
{
	return (position + 1 == r->ids.count && r->max_tokens) ||
			(r->score_from && position + 1 >= r->score_from + r->num_log_probs && position + 1 < r->ids.count);
}

/* Tells the caller of a new token, or of the end of a request. */
static int tell(struct engine *e, struct request *r)
{
	if (r->ended)
		finish(e, r->sequence);
	const int rc = e->options.on_token ? e->options.on_token(e->options.data, r) : 0;
	if (rc > 0 && r->sequence) {
		r->ended = ENDED_BY_CALLER;
		finish(e, r->sequence);
	}
	return rc < 0 ? -1 : 0;
}

/* The tokens behind n wanted rows, from result `first` on: id[n] those that are there, and new ones. */
static int next_tokens(struct engine *e, int32_t *id, const struct wanted_row *rows, int64_t n)
{
	const int64_t V = e->m->global.vocab_size;
	/* The vocabulary may be padded: only ids that the tokenizer has may be chosen. */
	const int64_t num_ids = tokenizer_size(e->tokenizer) < V ? tokenizer_size(e->tokenizer) : V;
	for (int64_t i = 0; i < n; i++) {
		const struct request *r = rows[i].sequence->request;
		const int64_t position = rows[i].position + 1;
		if (position < r->ids.count)
			id[i] = r->ids.id[position];
		else if (e->alike->rank == 0)
			id[i] = choose_token(&r->sampling, e->logits + i * V, num_ids,
					&(struct draw){position, r->number, r->draw}, e->scratch);
	}
	if (e->alike->size > 1)
		broadcast(e->alike, id, n * sizeof *id);
	for (int64_t i = 0; i < n; i++)
		if (id[i] < 0)
			return fail("the logits after %lld tokens of prompt %lld are not finite", (long long)rows[i].position + 1,
					(long long)rows[i].sequence->request->number + 1);
	return 0;
}

/* n wanted rows, which are the results from `first` on; n <= chunk. */
static int use_rows(struct engine *e, const struct wanted_row *rows, int64_t first, int64_t n)
{
	struct activations *a = &e->m->acts;
	const int64_t V = e->m->global.vocab_size;
	double *sum = a->head_loss + n; /* before it the losses, which nobody needs: any target will do */
	int32_t id[n], any[n];
	double logit[n]; /* of the token, less the largest of its row */
	bool scores = false;
	memset(any, 0, sizeof any);
	model_logits(e->m, e->logits, first, n);
	if (next_tokens(e, id, rows, n) < 0)
		return -1;
	for (int64_t i = 0; i < n; i++)
		scores |= rows[i].sequence->request->score_from > 0;
	if (scores) {
		logits_max(a->head_max, e->logits, n, V);
		for (int64_t i = 0; i < n; i++)
			logit[i] = (double)e->logits[i * V + id[i]] - a->head_max[i];
		cross_entropy_forward(a->head_loss, sum, e->logits, a->head_max, any, 0, n, V);
	}
	for (int64_t i = 0; i < n; i++) {
		struct request *r = rows[i].sequence->request;
		const bool new = rows[i].position + 1 == r->ids.count;
		if (new)
			add_token(r, id[i], e->tokenizer);
		if (r->score_from && r->ids.count >= r->score_from + r->num_log_probs + 1) {
			r->log_prob = grow(r->log_prob, r->num_log_probs, &r->log_prob_capacity, 1, sizeof *r->log_prob);
			r->log_prob[r->num_log_probs++] = logit[i] - log(sum[i]);
		}
		if (!new)
			continue;
		e->statistics.tokens_out += r->ended != ENDED_BY_TOKEN;
		if (e->options.no_cache)
			kv_sequence_truncate(&e->pool, &rows[i].sequence->kv, 0);
		if (tell(e, r) < 0)
			return -1;
	}
	return 0;
}

/* ------------------------------------------------------------------------------------------------- a step */

/* Counts the tokens of a forward pass. */
static void count_tokens(struct engine *e, struct engine_sequence *s)
{
	struct engine_statistics *n = &e->statistics;
	struct request *r = s->request;
	const int64_t end = s->kv.cache.length, begin = end - s->planned;
	const int64_t again = (s->computed < end ? s->computed : end) - begin; /* tokens that were computed before */
	n->computed += s->planned;
	if (again > 0 && !e->options.no_cache) {
		r->recomputed += again;
		n->recomputed += again;
	}
	if (end > s->computed) {
		const int64_t prompt = r->num_prompt < end ? r->num_prompt : end;
		n->tokens_in += prompt > s->computed ? prompt - s->computed : 0;
		s->computed = end;
	}
}

/* The planned forward pass, and what follows from it. */
static int forward(struct engine *e)
{
	const int64_t H = e->m->config.hidden_size;
	int64_t n = 0, row = 0;
	int num_segments = 0;
	for (size_t i = 0; i < e->num_running; i++) {
		struct engine_sequence *s = e->running[i];
		if (s->planned == 0)
			continue;
		const int32_t *ids = s->request->ids.id + s->kv.cache.length;
		e->segments[num_segments] = (struct segment){&s->kv.cache, ids, s->planned};
		e->planned[num_segments++] = s;
	}
	if (num_segments == 0 && !e->in_step)
		return 0;
	real *results = model_extend(e->m, e->segments, num_segments);
	e->statistics.forward_passes++;
	for (int i = 0; i < num_segments; i++) {
		struct engine_sequence *s = e->planned[i];
		const int64_t end = s->kv.cache.length;
		count_tokens(e, s);
		/* The wanted rows move to the front: one matrix product for all. */
		for (int64_t position = end - s->planned; position < end; position++, row++) {
			if (!is_wanted(s->request, position))
				continue;
			memmove(results + n * H, results + row * H, H * sizeof *results);
			e->wanted[n++] = (struct wanted_row){s, position};
		}
		if (s->planned > 1 || end == s->request->num_prompt)
			share(e, s);
	}
	int rc = 0;
	for (int64_t first = 0; first < n; first += e->chunk) /* all of them: a tensor group makes the logits together */
		if (use_rows(e, e->wanted + first, first, n - first < e->chunk ? n - first : e->chunk) < 0)
			rc = -1;
	return rc;
}

/* Ends the requests without new tokens whose tokens have all been seen. */
static int finish_scores(struct engine *e)
{
	for (size_t i = 0; i < e->num_running;) {
		struct engine_sequence *s = e->running[i];
		struct request *r = s->request;
		if (r->max_tokens == 0 && (missing(s) <= 0)) {
			r->ended = ENDED_BY_LENGTH;
			if (tell(e, r) < 0)
				return -1;
		}
		i += i < e->num_running && e->running[i] == s;
	}
	return 0;
}

/* Ranks with the same requests agree whether one of them has failed: `more` may let them act together. Returns rc, or 1
 * where only another one has failed. */
static int agree(struct engine *e, int rc)
{
	double failed = rc < 0;
	all_reduce_sum(e->alike, TRAFFIC_STATISTICS, &failed, 1);
	return rc == 0 && failed > 0 ? 1 : rc;
}

/* Whether any rank that makes the forward passes together with this one has requests. Returns rc, or 1 where only
 * another one has failed. */
static int any_rank_runs(struct engine *e, int rc, bool *runs)
{
	double ranks[2] = {*runs, rc < 0};
	if (e->in_step) {
		all_reduce_sum(&e->m->layout.world, TRAFFIC_STATISTICS, ranks, 2);
		*runs = ranks[0] > 0;
	}
	return rc == 0 && ranks[1] > 0 ? 1 : rc;
}

static void update_statistics(struct engine *e)
{
	struct engine_statistics *n = &e->statistics;
	n->running = (int64_t)e->num_running;
	n->waiting = (int64_t)e->num_queue;
	n->kv_used = e->pool.used;
	n->most_kv_used = e->pool.most_used;
}

int engine_run(struct engine *e, int (*more)(void *data, struct engine *e), void *data)
{
	const double begun = clock_seconds(), before_it = e->statistics.seconds;
	int rc = 0;
	bool stopped = false;
	for (;;) {
		if (rc == 0 && !stopped)
			rc = start_requests(e, more, data);
		bool runs = rc == 0 && !stopped && e->num_running > 0;
		rc = any_rank_runs(e, rc, &runs);
		if (rc || !runs)
			break;
		plan(e);
		rc = forward(e);
		if (rc == 0)
			rc = finish_scores(e);
		e->statistics.seconds = before_it + clock_seconds() - begun;
		update_statistics(e);
		const int said = rc == 0 && e->options.on_step ? e->options.on_step(e->options.data, &e->statistics) : 0;
		if (said > 0) {
			forget_all(e, ENDED_BY_CALLER);
			stopped = true;
		}
		rc = said < 0 ? -1 : rc;
		if (more)
			rc = agree(e, rc);
	}
	if (rc)
		forget_all(e, RUNNING);
	e->full = false;
	update_statistics(e);
	return rc;
}

const struct engine_statistics *engine_statistics(struct engine *e)
{
	update_statistics(e);
	return &e->statistics;
}

json_t *engine_report(struct engine *e)
{
	const struct engine_statistics *n = engine_statistics(e);
	const struct kv_free_rows free_rows = kv_pool_free_rows(&e->pool);
	return json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:{s:I, s:I, s:I, s:I, s:I, s:I}}",
			"requests", (json_int_t)n->requests, "tokens_in", (json_int_t)n->tokens_in,
			"tokens_out", (json_int_t)n->tokens_out, "tokens_shared", (json_int_t)n->shared,
			"tokens_recomputed", (json_int_t)n->recomputed, "tokens_computed", (json_int_t)n->computed,
			"forward_passes", (json_int_t)n->forward_passes, "most_running", (json_int_t)n->most_running,
			"preemptions", (json_int_t)n->preemptions, "waits", (json_int_t)n->waits, "seconds", n->seconds,
			"pool", "tokens", (json_int_t)n->kv_tokens, "used", (json_int_t)n->kv_used,
			"most_used", (json_int_t)n->most_kv_used, "copied", (json_int_t)e->pool.copied_rows,
			"free_ranges", (json_int_t)free_rows.ranges, "longest_free_range", (json_int_t)free_rows.longest);
}
