/*
 * commands/sampling.c - how the next token of a text is chosen, and what ends a text.
 */
#define _GNU_SOURCE
#include "commands/sampling.h"

#include "files/base.h"
#include "files/checkpoint.h"
#include "files/tokenizer.h"
#include "files/collections.h"
#include "kernels.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------ the next token */

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

/* A number in [0, 1) that depends on the seed and the draw alone. A position has less than 32 bits. */
static double uniform_number(const struct sampling *s, const struct draw *d)
{
	uint32_t word[4];
	philox(word, (uint32_t[]){(uint32_t)d->position, d->draw, d->number, RANDOM_SAMPLING},
			(uint32_t[]){(uint32_t)s->seed, (uint32_t)(s->seed >> 32)});
	return (word[0] + (word[1] >> 11) * 0x1p-21) * 0x1p-32;
}

int32_t choose_token(const struct sampling *s, const real *logits, int64_t V, const struct draw *d, int32_t *scratch)
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
	const double target = sum * uniform_number(s, d);
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

/* ------------------------------------------------------------------------------------ what ends a text */

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
