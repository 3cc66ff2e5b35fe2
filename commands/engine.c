/*
 * commands/engine.c - text generation: key-value caches, batches of requests, sampling.
 */
#define _GNU_SOURCE
#include "commands/engine.h"

#include "files/base.h"
#include "files/checkpoint.h"
#include "files/collections.h"
#include "kernels.h"
#include "parallel.h"
#include "files/tokenizer.h"
#include "ling.h"

#include <math.h>
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
	*c = (struct kv_cache){.kv = malloc(bytes ? bytes : 1), .capacity = capacity};
	if (c->kv && extend_rope(m, capacity) == 0)
		return 0;
	kv_cache_free(c);
	return fail("out of memory for the keys and values of %lld tokens, %.1f GB", (long long)capacity, bytes / 1e9);
}

void kv_cache_free(struct kv_cache *c)
{
	free(c->kv);
	*c = (struct kv_cache){0};
}

/* ------------------------------------------------------------------------------------------------ sampling */

/* Token ids in the order of falling logits, the lower id first among equals; sorted only as far as they are asked for.
 * The first size - taken entries of `id` are a heap with the highest rank on top; after it come the ids that were
 * taken from it, the first one last. */
struct ranking { const real *logits; int32_t *id; int64_t size, taken; };

/* A heap_order of ids; the context is the logits. */
static bool ranks_before(const void *a, const void *b, const void *context)
{
	const real *logits = context;
	const int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
	return logits[x] > logits[y] || (logits[x] == logits[y] && x < y);
}

/* Puts an id into its place at or below entry i of a heap of n entries. */
static void sift_down(struct ranking *r, int64_t i, int64_t n, int32_t id)
{
	heap_sink(r->id, i, n, sizeof id, &id, ranks_before, r->logits);
}

/* The id of rank i, counted from 0. */
static int32_t id_of_rank(struct ranking *r, int64_t i)
{
	while (r->taken <= i) {
		const int64_t last = r->size - 1 - r->taken++;
		const int32_t id = r->id[last];
		r->id[last] = r->id[0];
		sift_down(r, 0, last, id);
	}
	return r->id[r->size - 1 - i];
}

/* A number in [0, 1) that depends on (seed, number, position) alone. */
static double uniform_number(const struct sampling *s, uint32_t number, int64_t position)
{
	uint32_t word[4];
	philox(word, (uint32_t[]){(uint32_t)position, (uint32_t)(position >> 32), number, RANDOM_SAMPLING},
			(uint32_t[]){(uint32_t)s->seed, (uint32_t)(s->seed >> 32)});
	return (word[0] + (word[1] >> 11) * 0x1p-21) * 0x1p-32;
}

int32_t choose_token(const struct sampling *s, const real *logits, int64_t V, uint32_t number, int64_t position,
		int32_t *scratch)
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

#define PROBABILITY(v) exp(((double)logits[v] - logits[best]) / s->temperature) /* times a constant */
	const int64_t k = s->top_k > 0 && s->top_k < V ? s->top_k : V;
	const bool all = k == V && s->top_p >= 1; /* then the order of the ids need not be known */
	struct ranking r = {.logits = logits, .id = scratch, .size = V};
	for (int64_t v = 0; v < V; v++)
		scratch[v] = (int32_t)v;
	for (int64_t i = V / 2 - 1; i >= 0 && !all; i--)
		sift_down(&r, i, V, scratch[i]);
	double total = 0, sum = 0;
	for (int64_t i = 0; i < k; i++)
		total += PROBABILITY(k == V ? i : id_of_rank(&r, i));
	int64_t n = 0; /* tokens to draw from */
	for (; n < k && (n == 0 || all || sum < s->top_p * total); n++)
		sum += PROBABILITY(all ? n : id_of_rank(&r, n));
	const double target = sum * uniform_number(s, number, position);
	double passed = 0;
	for (int64_t i = 0; i < n; i++) {
		const int32_t v = (int32_t)(all ? i : id_of_rank(&r, i));
		passed += PROBABILITY(v);
		if (passed > target)
			return v;
	}
#undef PROBABILITY
	return (int32_t)best; /* by rounding, `passed` stayed below a target that is almost the whole sum */
}

/* ---------------------------------------------------------------------------------------------- generation */

/* Appends the `eos_token_id` of a JSON object that was read from `path`; none where it has none. */
static int append_end_ids(struct ids *out, const json_t *root, const char *path)
{
	const json_t *eos = json_object_get(root, "eos_token_id");
	const size_t n = json_is_array(eos) ? json_array_size(eos) : eos && !json_is_null(eos);
	for (size_t k = 0; k < n; k++) {
		const json_t *id = json_is_array(eos) ? json_array_get(eos, k) : eos;
		if (!json_is_integer(id) || json_integer_value(id) < 0 || json_integer_value(id) > INT32_MAX)
			return fail("%s: `eos_token_id` has %s where an id should be; expected a whole number from 0 on, or a "
					"list of such", path,
					json_is_integer(id) ? "a number outside of 0 to 2147483647" : json_kind(id));
		append_id(out, json_integer_value(id));
	}
	return 0;
}

int end_ids_read(struct ids *out, const char *dir)
{
	static const char *const names[] = {"generation_config.json", "config.json"};
	const int64_t before = out->count;
	for (int i = 0; i < 2 && out->count == before; i++) {
		char path[PATH_LEN];
		const int there = path_join(path, dir, names[i]) < 0 ? -1 : path_exists(path);
		json_t *root = there > 0 ? json_read(path) : NULL;
		const int rc = there < 0 || (there && !root) ? -1 : append_end_ids(out, root, path);
		json_decref(root);
		if (rc < 0)
			return -1;
	}
	return 0;
}

int end_ids_of_files(struct ids *out, const struct model_files *files)
{
	const int64_t before = out->count;
	for (int i = 0; i < files->count; i++) {
		const struct model_file *f = &files->list[i];
		if (strcmp(f->name, "generation_config.json"))
			continue;
		json_t *root = json_line(f->name, f->data, f->size);
		const int rc = root ? append_end_ids(out, root, f->name) : -1;
		json_decref(root);
		if (rc < 0)
			return -1;
	}
	return out->count > before ? 0 : append_end_ids(out, files->config, "config.json");
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
		chosen[i] = choose_token(&g->sampling, logits + i * V, num_ids, r->number, r->ids.count, scratch);
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
