/*
 * commands/engine.c - generation: KV caches, batches of sequences, sampling.
 */
#define _GNU_SOURCE
#include "commands/engine.h"

#include "files/base.h"
#include "kernels.h"
#include "files/tokenizer.h"
#include "ling.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static size_t kv_cache_bytes(const struct model *m, int64_t capacity)
{
	return m->config.num_hidden_layers * (size_t)capacity * 2 * m->config.num_key_value_heads * m->config.head_dim * sizeof(real);
}

int kv_cache_init(struct kv_cache *c, struct model *m, int64_t capacity)
{
	const size_t bytes = kv_cache_bytes(m, capacity);
	*c = (struct kv_cache){.kv = malloc(bytes ? bytes : 1), .capacity = capacity};
	if (c->kv && place_rope(m, capacity) == 0)
		return 0;
	kv_cache_free(c);
	return fail("out of memory for the keys and values of %lld tokens, %.1f GB", (long long)capacity, bytes / 1e9);
}

void kv_cache_free(struct kv_cache *c)
{
	free(c->kv);
	*c = (struct kv_cache){0};
}

void kv_cache_copy(const struct model *m, struct kv_cache *to, const struct kv_cache *from, int64_t n)
{
	const int64_t width = 2 * m->config.num_key_value_heads * m->config.head_dim;
	assert(n <= from->length && n <= to->capacity);
	for (int l = 0; l < m->config.num_hidden_layers; l++)
		memcpy(to->kv + l * to->capacity * width, from->kv + l * from->capacity * width, n * width * sizeof *to->kv);
	to->length = n;
}

/* ============================================================================================================
 * Generation
 * ========================================================================================================== */

/* Token ids by falling logit, the lower id first among equals, as far as they are asked for: a heap, behind which those taken from it stand. */
struct ranking { const real *logits; int32_t *id; int64_t size, taken; };

static bool ranks_before(const struct ranking *r, int32_t a, int32_t b)
{
	return r->logits[a] > r->logits[b] || (r->logits[a] == r->logits[b] && a < b);
}

/* Lets entry i of the first n sink to its place in the heap. */
static void sink(struct ranking *r, int64_t i, int64_t n)
{
	const int32_t id = r->id[i];
	for (int64_t child; (child = 2 * i + 1) < n; i = child) {
		child += child + 1 < n && ranks_before(r, r->id[child + 1], r->id[child]);
		if (!ranks_before(r, r->id[child], id))
			break;
		r->id[i] = r->id[child];
	}
	r->id[i] = id;
}

/* The id of rank i, from 0. */
static int32_t ranked(struct ranking *r, int64_t i)
{
	for (int64_t last; r->taken <= i; sink(r, 0, last)) {
		last = r->size - 1 - r->taken++;
		const int32_t id = r->id[last];
		r->id[last] = r->id[0];
		r->id[0] = id;
	}
	return r->id[r->size - 1 - i];
}

/* A number in [0, 1) that depends on (seed, number, position) alone. */
static double sampling_number(const struct sampling *s, uint32_t number, int64_t position)
{
	uint32_t word[4];
	philox(word, (uint32_t[]){(uint32_t)position, (uint32_t)(position >> 32), number, RANDOM_SAMPLING},
			(uint32_t[]){(uint32_t)s->seed, (uint32_t)(s->seed >> 32)});
	return (word[0] + (word[1] >> 11) * 0x1p-21) * 0x1p-32;
}

int32_t choose_token(const struct sampling *s, const real *logits, int64_t V, uint32_t number, int64_t position, int32_t *scratch)
{
	int64_t best = 0;
	for (int64_t v = 0; v < V; v++) {
		if (isnan(logits[v]))
			return -1;
		best = logits[v] > logits[best] ? v : best;
	}
	if (!isfinite(logits[best]))
		return -1;
	if (s->temperature == 0)
		return (int32_t)best;

#define LIKELIHOOD(v) exp(((double)logits[v] - logits[best]) / s->temperature)
	const int64_t most = s->top_k > 0 && s->top_k < V ? s->top_k : V;
	const bool all = most == V && s->top_p >= 1; /* then any order will do */
	struct ranking r = {.logits = logits, .id = scratch, .size = V};
	for (int64_t v = 0; v < V; v++)
		scratch[v] = (int32_t)v;
	for (int64_t i = V / 2 - 1; i >= 0 && !all; i--)
		sink(&r, i, V);
	double total = 0, sum = 0;
	for (int64_t i = 0; i < most; i++)
		total += LIKELIHOOD(most == V ? i : ranked(&r, i));
	int64_t n = 0; /* those to draw from */
	for (; n < most && (n == 0 || all || sum < s->top_p * total); n++)
		sum += LIKELIHOOD(all ? n : ranked(&r, n));
	const double target = sum * sampling_number(s, number, position);
	double passed = 0;
	for (int64_t i = 0; i < n; i++) {
		const int32_t v = (int32_t)(all ? i : ranked(&r, i));
		passed += LIKELIHOOD(v);
		if (passed > target)
			return v;
	}
#undef LIKELIHOOD
	return (int32_t)best; /* rounding: the number was all but 1 */
}

size_t find_stop(const struct text *text, size_t from, const struct strings *stop)
{
	size_t first = text->size;
	for (int64_t i = 0; i < stop->count && from < text->size; i++) {
		const char *at = memmem(text->data + from, text->size - from, stop->text[i], strlen(stop->text[i]));
		if (at && (size_t)(at - text->data) < first)
			first = at - text->data;
	}
	return first;
}

size_t longest_stop(const struct strings *stop)
{
	size_t longest = 0;
	for (int64_t i = 0; i < stop->count; i++)
		longest = strlen(stop->text[i]) > longest ? strlen(stop->text[i]) : longest;
	return longest;
}

/* Adds a token to a continuation, and says whether and how that ends it. */
static void add_token(struct request *c, int32_t id, const struct tokenizer *t, const struct generation_config *g)
{
	if (id == tokenizer_end(t)) {
		c->ended = ENDED_BY_TOKEN;
		return;
	}
	const size_t stop = longest_stop(&g->stop), from = c->text.size < stop ? 0 : c->text.size - stop; /* it may have begun before */
	put_id(&c->ids, id);
	tokenizer_decode(t, id, false, &c->text);
	const size_t end = find_stop(&c->text, from, &g->stop);
	if (end < c->text.size) {
		c->text.size = end;
		c->text.data[end] = 0;
		c->ended = ENDED_BY_STOP;
	} else if (c->ids.count - c->num_prompt == g->max_tokens)
		c->ended = ENDED_BY_LENGTH;
}

/* A place for a sequence that is being continued. */
struct slot { struct request *c; struct kv_cache cache; };

/* The forward pass for the tokens that the slots' caches lack, as many as there is room for; then the next token of each whose prompt is read. */
static int generate_step(struct model *m, const struct tokenizer *t, struct slot *slots, const struct generation_config *g, real *logits,
		int32_t *scratch)
{
	const int64_t V = m->config.vocab_size, H = m->config.hidden_size, size = tokenizer_size(t);
	int64_t room = (int64_t)m->max_sequences * m->seq_len, row = 0;
	struct segment segments[g->batch];
	struct slot *slot_of[g->batch];
	int n = 0, ready = 0;
	for (struct slot *s = slots; s < slots + g->batch; s++) {
		const int64_t lacking = s->c ? s->c->ids.count - s->cache.length : 0, num = lacking < room ? lacking : room;
		if (num == 0)
			continue;
		slot_of[n] = s;
		segments[n++] = (struct segment){&s->cache, s->c->ids.id + s->cache.length, num};
		room -= num;
	}
	model_extend(m, segments, n);
	for (int i = 0; i < n; i++) { /* one product for all: their last rows come to the front */
		row += segments[i].num_tokens;
		if (slot_of[i]->cache.length < slot_of[i]->c->ids.count)
			continue;
		memmove(m->acts.normed + ready * H, m->acts.normed + (row - 1) * H, H * sizeof(real));
		slot_of[ready++] = slot_of[i];
	}
	model_logits(m, logits, 0, ready);
	for (int i = 0; i < ready; i++) {
		struct slot *s = slot_of[i];
		struct request *c = s->c;
		/* The vocabulary may be padded: only ids that the tokenizer has are drawn. */
		const int32_t id = choose_token(&g->sampling, logits + i * V, size < V ? size : V, c->number, c->ids.count, scratch);
		if (id < 0)
			return fail("the logits after %lld tokens of prompt %u are not finite", (long long)c->ids.count, c->number + 1);
		add_token(c, id, t, g);
		if (g->no_cache)
			s->cache.length = 0;
		if (c->ended)
			s->c = NULL;
		if (g->show && g->show(g->context, c) < 0)
			return -1;
	}
	return 0;
}

int generate(struct model *m, const struct tokenizer *t, struct request *requests, int n, const struct generation_config *g)
{
	const int64_t V = m->config.vocab_size;
	int64_t longest = 0;
	for (int i = 0; i < n; i++)
		longest = requests[i].num_prompt > longest ? requests[i].num_prompt : longest;
	struct slot slots[g->batch];
	memset(slots, 0, sizeof slots);
	const double caches = (double)(g->batch < n ? g->batch : n) * kv_cache_bytes(m, longest + g->max_tokens);
	if (caches + m->acts_bytes > usable_memory(""))
		return fail("keys and values of %d x %lld tokens need %.1f GB; %.1f GB may be used here: make batch or max_tokens smaller",
				g->batch, (long long)(longest + g->max_tokens), caches / 1e9, usable_memory("") / 1e9);
	real *logits = malloc(g->batch * V * sizeof *logits);
	int32_t *scratch = malloc(V * sizeof *scratch);
	int rc = logits && scratch ? 0 : fail("out of memory for the logits of %d sequences", g->batch), next = 0, running = 0;
	for (int i = 0; i < g->batch && i < n && rc == 0; i++)
		rc = kv_cache_init(&slots[i].cache, m, longest + g->max_tokens);
	while (rc == 0) {
		running = 0;
		for (struct slot *s = slots; s < slots + g->batch; s++) {
			while (!s->c && s->cache.kv && next < n) {
				struct request *c = &requests[next++];
				if (!c->ended) {
					s->c = c;
					s->cache.length = 0;
				}
			}
			running += s->c != NULL;
		}
		if (running == 0)
			break;
		rc = generate_step(m, t, slots, g, logits, scratch);
	}
	for (int i = 0; i < g->batch; i++)
		kv_cache_free(&slots[i].cache);
	free(logits);
	free(scratch);
	return rc;
}
