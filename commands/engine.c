/*
 * commands/engine.c - text generation: key-value caches, batches of requests, sampling.
 */
#define _GNU_SOURCE
#include "commands/engine.h"

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/tokenizer.h"
#include "ling.h"

#include <stdlib.h>
#include <string.h>

size_t kv_cache_bytes(const struct model *m, int64_t capacity)
{
	const size_t width = 2 * (size_t)m->config.num_key_value_heads * m->config.head_dim;
	return m->config.num_hidden_layers * (size_t)capacity * width * sizeof(real);
}

int kv_cache_init(struct kv_cache *c, struct model *m, int64_t capacity)
{
	const size_t bytes = kv_cache_bytes(m, capacity);
	int64_t *block = allocate((capacity / KV_BLOCK + 1) * sizeof *block);
	for (int64_t i = 0; i <= capacity / KV_BLOCK; i++)
		block[i] = i * KV_BLOCK;
	*c = (struct kv_cache){.kv = malloc(bytes ? bytes : 1), .rows = capacity, .block = block};
	if (c->kv && extend_rope(m, capacity) == 0)
		return 0;
	kv_cache_free(c);
	return fail("out of memory for the keys and values of %lld tokens, %.1f GB", (long long)capacity, bytes / 1e9);
}

void kv_cache_free(struct kv_cache *c)
{
	free(c->kv);
	free((void *)c->block);
	*c = (struct kv_cache){0};
}

/* ---------------------------------------------------------------------------------------------- generation */

/* Adds a token to a request, and sets `ended` if that ends it. */
static void add_token(struct request *r, int32_t id, const struct tokenizer *t, const struct generation_config *g)
{
	bool ends = id == tokenizer_end(t);
	for (int64_t i = 0; g->ends && i < g->ends->count; i++)
		ends |= id == g->ends->id[i];
	if (ends) {
		r->ended = ENDED_BY_TOKEN;
		return;
	}
	/* A stop text may have begun in the tokens before. */
	const size_t longest = longest_stop(&g->stop), from = r->text.size < longest ? 0 : r->text.size - longest;
	append_id(&r->ids, id);
	tokenizer_decode(t, id, false, &r->text);
	const size_t end = find_stop(&r->text, from, &g->stop);
	if (end < r->text.size) {
		r->text.size = end;
		r->text.data[end] = 0;
		r->ended = ENDED_BY_STOP;
	} else if (r->ids.count - r->num_prompt == g->max_tokens)
		r->ended = ENDED_BY_LENGTH;
}

/* One of the places of a batch: the request that runs there, or NULL, and the cache of its sequence. */
struct slot { struct request *request; struct kv_cache cache; };

/* One forward pass over the tokens that the caches of the slots lack, as many as the model takes at a time; then the
 * next token of each request whose cache is complete. logits [batch, V], scratch [V]. */
static int generate_step(struct model *m, const struct tokenizer *t, struct slot *slots,
		const struct generation_config *g, real *logits, int32_t *scratch)
{
	const int64_t V = m->global.vocab_size, H = m->config.hidden_size;
	/* The vocabulary may be padded: only ids that the tokenizer has may be chosen. */
	const int64_t num_ids = tokenizer_size(t) < V ? tokenizer_size(t) : V;
	int64_t room = (int64_t)m->max_sequences * m->seq_len, row = 0;
	struct segment segments[g->batch];
	struct slot *slot_of[g->batch];
	int32_t chosen[g->batch];
	int n = 0, ready = 0;
	for (struct slot *s = slots; s < slots + g->batch; s++) {
		const int64_t missing = s->request ? s->request->ids.count - s->cache.length : 0;
		const int64_t num = missing < room ? missing : room;
		if (num == 0)
			continue;
		slot_of[n] = s;
		segments[n++] = (struct segment){&s->cache, s->request->ids.id + s->cache.length, num};
		room -= num;
	}
	real *results = model_extend(m, segments, n);
	for (int i = 0; i < n; i++) { /* the last row of each sequence moves to the front: one matrix product for all */
		row += segments[i].num_tokens;
		if (slot_of[i]->cache.length < slot_of[i]->request->ids.count)
			continue;
		memmove(results + ready * H, results + (row - 1) * H, H * sizeof(real));
		slot_of[ready++] = slot_of[i];
	}
	model_logits(m, logits, 0, ready);
	for (int i = 0; i < ready && (!g->together || m->layout.world.rank == 0); i++) {
		const struct request *r = slot_of[i]->request;
		chosen[i] = choose_token(&g->sampling, logits + i * V, num_ids,
				&(struct draw){r->ids.count, r->number, 0}, scratch);
	}
	if (g->together)
		broadcast(&m->layout.world, chosen, ready * sizeof *chosen);
	for (int i = 0; i < ready; i++) {
		struct slot *s = slot_of[i];
		struct request *r = s->request;
		if (chosen[i] < 0)
			return fail("the logits after %lld tokens of prompt %u are not finite", (long long)r->ids.count,
					r->number + 1);
		add_token(r, chosen[i], t, g);
		if (g->no_cache)
			s->cache.length = 0;
		if (r->ended)
			s->request = NULL;
		if (g->on_token && g->on_token(g->on_token_data, r) < 0)
			return -1;
	}
	return 0;
}

int generate(struct model *m, const struct tokenizer *t, struct request *requests, int n,
		const struct generation_config *g)
{
	const int64_t V = m->global.vocab_size;
	const int num_slots = g->batch < n ? g->batch : n;
	int64_t capacity = 0;
	for (int i = 0; i < n; i++)
		capacity = requests[i].num_prompt > capacity ? requests[i].num_prompt : capacity;
	capacity += g->max_tokens;
	struct slot slots[g->batch];
	memset(slots, 0, sizeof slots);
	const double bytes = (double)num_slots * kv_cache_bytes(m, capacity);
	int rc = 0;
	if (bytes + m->acts_bytes > usable_memory(""))
		rc = fail("keys and values of %d x %lld tokens need %.1f GB; %.1f GB may be used here: "
				"make batch or max_tokens smaller", num_slots, (long long)capacity, bytes / 1e9,
				usable_memory("") / 1e9);
	real *logits = rc == 0 ? malloc(g->batch * V * sizeof *logits) : NULL;
	int32_t *scratch = malloc(V * sizeof *scratch);
	if (rc == 0 && (!logits || !scratch))
		rc = fail("out of memory for the logits of %d sequences, %.1f GB", g->batch,
				g->batch * V * sizeof *logits / 1e9);
	for (int i = 0; i < num_slots && rc == 0; i++)
		rc = kv_cache_init(&slots[i].cache, m, capacity);
	if (g->together)
		rc = parallel_agree(rc);
	for (int next = 0; rc == 0;) {
		int running = 0;
		for (struct slot *s = slots; s < slots + num_slots; s++) {
			while (!s->request && next < n) {
				struct request *r = &requests[next++];
				if (!r->ended) {
					s->request = r;
					s->cache.length = 0;
				}
			}
			running += s->request != NULL;
		}
		if (running == 0)
			break;
		rc = generate_step(m, t, slots, g, logits, scratch);
	}
	for (int i = 0; i < num_slots; i++)
		kv_cache_free(&slots[i].cache);
	free(logits);
	free(scratch);
	return rc;
}
