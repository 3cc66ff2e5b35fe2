/*
 * files/collections.c - hash tables with open addressing: after a collision the next slot is tried.
 */
#include "files/collections.h"

#include "files/base.h"

#include <stdlib.h>
#include <string.h>

uint64_t hash_bytes(const void *bytes, size_t n)
{
	const char *at = bytes;
	uint64_t hash = n, eight;
	for (; n; n -= n < 8 ? n : 8, at += 8) {
		eight = 0;
		memcpy(&eight, at, n < 8 ? n : 8);
		hash = (hash ^ eight) * 0x9E3779B97F4A7C15; /* 2^64 / the golden ratio */
		hash ^= hash >> 32;
	}
	return hash;
}

static bool never(const void *items, size_t number, const void *key)
{
	(void)items, (void)number, (void)key;
	return false;
}

void hash_table_enlarge(struct hash_table *t, const void *items, hash_of_item *hash_of)
{
	free(t->slot);
	t->mask = t->mask ? 2 * t->mask + 1 : (1 << 12) - 1;
	t->slot = allocate((t->mask + 1) * sizeof *t->slot);
	for (size_t k = 0; k < t->count; k++)
		*hash_table_slot(t, hash_of(items, k), NULL, NULL, never) = k + 1;
}

/* -- byte strings -- */

struct string_key { const char *bytes; size_t n; };

static uint64_t hash_of_string(const void *items, size_t number)
{
	const struct string_table *t = items;
	return hash_bytes(t->bytes.data + t->entry[number].at, t->entry[number].size);
}

static bool same_string(const void *items, size_t number, const void *key)
{
	const struct string_table *t = items;
	const struct string_entry *entry = &t->entry[number];
	const struct string_key *k = key;
	return entry->size == k->n && !memcmp(t->bytes.data + entry->at, k->bytes, k->n);
}

int64_t string_table_add(struct string_table *t, const char *bytes, size_t n, uint64_t times)
{
	if (n > INT32_MAX || t->count == INT32_MAX)
		return fail("%s", n > INT32_MAX ? "a word of more than 2^31 bytes" : "more than 2^31 distinct words");
	const struct string_key key = {bytes, n};
	const size_t number = hash_table_add(&t->numbers, hash_bytes(bytes, n), &key, t, same_string, hash_of_string);
	if (number == t->count) {
		t->entry = grow(t->entry, t->count, &t->capacity, 1, sizeof *t->entry);
		t->entry[t->count++] = (struct string_entry){t->bytes.size, n, 0};
		text_append(&t->bytes, bytes, n);
	}
	t->entry[number].count += times;
	return number;
}

int64_t string_table_find(const struct string_table *t, const char *bytes, size_t n)
{
	const struct string_key key = {bytes, n};
	return t->count ? (int64_t)*hash_table_slot(&t->numbers, hash_bytes(bytes, n), &key, t, same_string) - 1 : -1;
}

void string_table_free(struct string_table *t)
{
	free(t->bytes.data), free(t->entry), free(t->numbers.slot);
	*t = (struct string_table){0};
}
