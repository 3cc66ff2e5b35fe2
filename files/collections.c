/*
 * files/collections.c - a hash table of byte strings: open addressing, the next slot after a collision.
 */
#include "files/collections.h"

#include "files/base.h"

#include <stdlib.h>
#include <string.h>

static uint64_t hash_bytes(const char *bytes, size_t n)
{
	uint64_t hash = n, eight;
	for (; n; n -= n < 8 ? n : 8, bytes += 8) {
		eight = 0;
		memcpy(&eight, bytes, n < 8 ? n : 8);
		hash = (hash ^ eight) * 0x9E3779B97F4A7C15; /* 2^64 / the golden ratio */
		hash ^= hash >> 32;
	}
	return hash;
}

/* The slot of a string: its own, or the empty one where it would be. There are empty ones. */
static uint32_t *find_slot(const struct string_table *t, const char *bytes, size_t n)
{
	for (size_t i = hash_bytes(bytes, n);; i++) {
		uint32_t *slot = &t->slot[i & t->mask];
		if (!*slot)
			return slot;
		const struct string_entry *s = &t->entry[*slot - 1];
		if (s->size == n && !memcmp(t->bytes.data + s->at, bytes, n))
			return slot;
	}
}

/* Doubles the number of slots. */
static void enlarge(struct string_table *t)
{
	free(t->slot);
	t->mask = t->mask ? 2 * t->mask + 1 : (1 << 12) - 1;
	t->slot = allocate((t->mask + 1) * sizeof *t->slot);
	for (size_t k = 0; k < t->count; k++)
		*find_slot(t, t->bytes.data + t->entry[k].at, t->entry[k].size) = k + 1;
}

int64_t string_table_add(struct string_table *t, const char *bytes, size_t n, uint64_t times)
{
	if (n > INT32_MAX || t->count == INT32_MAX)
		return fail("%s", n > INT32_MAX ? "a word of more than 2^31 bytes" : "more than 2^31 distinct words");
	if (2 * t->count >= t->mask)
		enlarge(t);
	uint32_t *slot = find_slot(t, bytes, n);
	if (!*slot) {
		t->entry = grow(t->entry, t->count, &t->capacity, 1, sizeof *t->entry);
		t->entry[t->count] = (struct string_entry){t->bytes.size, n, 0};
		text_append(&t->bytes, bytes, n);
		*slot = ++t->count;
	}
	t->entry[*slot - 1].count += times;
	return *slot - 1;
}

int64_t string_table_find(const struct string_table *t, const char *bytes, size_t n)
{
	return t->slot ? (int64_t)*find_slot(t, bytes, n) - 1 : -1;
}

void string_table_free(struct string_table *t)
{
	free(t->bytes.data), free(t->entry), free(t->slot);
	*t = (struct string_table){0};
}
