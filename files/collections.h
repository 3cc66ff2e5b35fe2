/*
 * files/collections.h - a hash table of byte strings, and a binary heap.
 */
#ifndef LING_FILES_COLLECTIONS_H
#define LING_FILES_COLLECTIONS_H

#include "files/base.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* -- a hash table of byte strings -- */

struct string_entry { size_t at; uint32_t size; uint64_t count; }; /* its bytes in string_table.bytes; a sum for the caller */

/* Distinct byte strings, numbered from 0 in the order in which they were added. {0} is an empty table. */
struct string_table {
	struct text bytes;           /* of all strings, one behind the other */
	struct string_entry *entry;  /* [count] by number */
	size_t count, capacity;
	uint32_t *slot;              /* [mask + 1], a power of two: a string's number + 1, or 0; at most half of them are used */
	size_t mask;
};
/* Adds `times` to the count of a string, which is added to the table if it is not there. Returns its number, or -1: more than 2^31 strings, or a
 * string of more than 2^31 bytes. */
int64_t string_table_add(struct string_table *t, const char *bytes, size_t n, uint64_t times);
/* The number of a string; -1 when it is not in the table. */
int64_t string_table_find(const struct string_table *t, const char *bytes, size_t n);
void string_table_free(struct string_table *t);

/* -- a binary heap: an array of n items in which none comes before its parent, item (i - 1) / 2 for item i. So item 0 comes first of all. --
 *    Inlined, because then `before` is too, and a heap costs no more than one written for its type. */

/* Whether item a comes before item b. `context` is the caller's. */
typedef bool heap_order(const void *a, const void *b, const void *context);

/* Moves parents down until `item`, of `size` bytes, has its place at i or above, and puts it there. To add an item: i is the number of items before. */
static inline __attribute__((always_inline)) void heap_raise(void *heap, size_t i, size_t size, const void *item, heap_order *before,
		const void *context)
{
	char *at = heap;
	for (size_t parent; i && before(item, at + (parent = (i - 1) / 2) * size, context); i = parent)
		memcpy(at + i * size, at + parent * size, size);
	memcpy(at + i * size, item, size);
}

/* Moves children up until `item`, of `size` bytes, has its place at i or below, and puts it there. n items. To take item 0: put the last item in its
 * place, n then being one less. */
static inline __attribute__((always_inline)) void heap_sink(void *heap, size_t i, size_t n, size_t size, const void *item, heap_order *before,
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
