/*
 * files/collections.h - hash tables, one of byte strings among them, and a binary heap.
 *
 * What takes functions of the caller is inlined, because then they are too: it costs no more than code for one type.
 */
#ifndef LING_FILES_COLLECTIONS_H
#define LING_FILES_COLLECTIONS_H

#include "files/base.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* -- a hash table -- */

/* Tells where in an array of the caller the item with a key is. Items are numbered from 0 in the order in which they
 * were added, and never removed. {0} is an empty table; free(slot). */
struct hash_table {
	uint32_t *slot;              /* [mask + 1], a power of two: an item's number + 1, or 0; at most half are used */
	size_t mask;
	size_t count;                /* items */
};
typedef uint64_t hash_of_item(const void *items, size_t number);
typedef bool has_key(const void *items, size_t number, const void *key);

/* A hash of n bytes. It is not for files: it may change between versions. */
uint64_t hash_bytes(const void *bytes, size_t n);

/* Gives the table twice as many slots, at first 2^12. Is called by hash_table_add. */
void hash_table_enlarge(struct hash_table *t, const void *items, hash_of_item *hash_of);

/* The slot of a key: that of its item, or the empty one where that would be. There must be an empty slot. */
ALWAYS_INLINE uint32_t *hash_table_slot(const struct hash_table *t, uint64_t hash, const void *key, const void *items,
		has_key *same)
{
	for (size_t i = hash;; i++) {
		uint32_t *slot = &t->slot[i & t->mask];
		if (!*slot || same(items, *slot - 1, key))
			return slot;
	}
}

/* The number of the item with a key. If it is the number of items before the call, the item is new, and the caller
 * appends it to the array. There must be less than 2^32 - 1 items. */
ALWAYS_INLINE size_t hash_table_add(struct hash_table *t, uint64_t hash, const void *key, const void *items,
		has_key *same, hash_of_item *hash_of)
{
	if (2 * t->count >= t->mask)
		hash_table_enlarge(t, items, hash_of);
	uint32_t *slot = hash_table_slot(t, hash, key, items, same);
	if (!*slot)
		*slot = ++t->count;
	return *slot - 1;
}

/* -- a hash table of distinct byte strings. {0} is an empty one -- */

/* at, size: its bytes in string_table.bytes; count: a sum for the caller */
struct string_entry { size_t at; uint32_t size; uint64_t count; };

struct string_table {
	struct text bytes;           /* of all strings, one behind the other */
	struct string_entry *entry;  /* [count] by number */
	size_t count, capacity;
	struct hash_table numbers;
};
/* Adds `times` to the count of a string, which is added to the table if it is not there. Returns its number, or -1:
 * more than 2^31 strings, or a string of more than 2^31 bytes. */
int64_t string_table_add(struct string_table *t, const char *bytes, size_t n, uint64_t times);
/* The number of a string; -1 when it is not in the table. */
int64_t string_table_find(const struct string_table *t, const char *bytes, size_t n);
void string_table_free(struct string_table *t);

/* -- a binary heap: an array in which no item comes before its parent, which is item (i - 1) / 2 for item i; so item 0
 *    comes before all others -- */

/* Whether item a comes before item b. `context` is the caller's. */
typedef bool heap_order(const void *a, const void *b, const void *context);

/* Moves parents down until `item`, of `size` bytes, has its place at i or above, and puts it there. To add an item: i
 * is the number of items before. */
ALWAYS_INLINE void heap_raise(void *heap, size_t i, size_t size, const void *item, heap_order *before,
		const void *context)
{
	char *at = heap;
	for (size_t parent; i && before(item, at + (parent = (i - 1) / 2) * size, context); i = parent)
		memcpy(at + i * size, at + parent * size, size);
	memcpy(at + i * size, item, size);
}

/* Moves children up until `item`, of `size` bytes, has its place at i or below, and puts it there. n items. To take
 * item 0: put the last item in its place, n then being one less. */
ALWAYS_INLINE void heap_sink(void *heap, size_t i, size_t n, size_t size, const void *item, heap_order *before,
		const void *context)
{
	char *at = heap;
	for (size_t child; (child = 2 * i + 1) < n; i = child) {
		child += child + 1 < n && before(at + (child + 1) * size, at + child * size, context);
		if (!before(at + child * size, item, context))
			break;
		memcpy(at + i * size, at + child * size, size);
	}
	memcpy(at + i * size, item, size);
}

#endif
