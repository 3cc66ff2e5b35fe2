/*
 * commands/prefix_tree.c - which beginnings of sequences are computed. The ids of a node are not in the node: they
 * stand beside the rows of its block, each in token[row].
 */
#include "commands/prefix_tree.h"

#include "commands/kv_pool.h"
#include "files/base.h"
#include "kernels.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

int prefix_tree_open(struct prefix_tree *t, struct kv_pool *pool)
{
	*t = (struct prefix_tree){.pool = pool, .token = malloc(pool->rows * sizeof *t->token)};
	t->root.newer = t->root.older = &t->root;
	t->root.block = -1;
	if (!t->token)
		return fail("out of memory for the token ids of %lld keys and values", (long long)pool->rows);
	return 0;
}

void prefix_tree_close(struct prefix_tree *t)
{
	if (t->pool)
		prefix_tree_clear(t);
	free(t->token);
	*t = (struct prefix_tree){0};
}

/* ---- the order of use: a ring, from the root, whose `older` is the newest node ---- */

static void unlink_use(struct prefix_node *node)
{
	node->newer->older = node->older;
	node->older->newer = node->newer;
}

static void link_use(struct prefix_node *node, struct prefix_node *newer)
{
	node->newer = newer;
	node->older = newer->older;
	node->older->newer = newer->older = node;
}

/* Makes a node and those above it the newest, the highest of them newest of all. */
static void touch(struct prefix_tree *t, struct prefix_node *node)
{
	for (; node != &t->root; node = node->parent) {
		unlink_use(node);
		link_use(node, &t->root);
	}
}

/* ---- nodes ---- */

/* Where a node's parent has the pointer to it. */
static struct prefix_node **place_of(const struct prefix_node *node)
{
	struct prefix_node **at = &node->parent->child;
	while (*at != node)
		at = &(*at)->next;
	return at;
}

/* Whoever calls this or split() then touches the new node. */
static struct prefix_node *add_child(struct prefix_tree *t, struct prefix_node *parent, int64_t block, int first,
		int end)
{
	struct prefix_node *node = allocate(sizeof *node);
	*node = (struct prefix_node){.parent = parent, .next = parent->child, .block = block, .first = first, .end = end};
	parent->child = node;
	link_use(node, &t->root);
	kv_block_hold(t->pool, block);
	t->nodes++;
	t->tokens += end - first;
	return node;
}

/* Takes out a node without children. */
static void remove_leaf(struct prefix_tree *t, struct prefix_node *node)
{
	*place_of(node) = node->next;
	unlink_use(node);
	kv_block_release(t->pool, node->block);
	t->nodes--;
	t->tokens -= node->end - node->first;
	free(node);
}

/* Divides a node. Returns the new one, which has the tokens before `at`, and the rest as its only child. */
static struct prefix_node *split(struct prefix_tree *t, struct prefix_node *node, int at)
{
	struct prefix_node *upper = allocate(sizeof *upper);
	*place_of(node) = upper;
	*upper = *node;
	upper->end = node->first = at;
	upper->child = node;
	node->parent = upper;
	node->next = NULL;
	link_use(upper, &t->root);
	kv_block_hold(t->pool, upper->block);
	t->nodes++;
	return upper;
}

/* ---- beginnings ---- */

/* The child that begins with ids[0], of n; *matched: how many of its tokens are ids. NULL: there is none. */
static struct prefix_node *step(const struct prefix_tree *t, const struct prefix_node *node, const int32_t *ids,
		int64_t n, int64_t *matched)
{
	struct prefix_node *child = n > 0 ? node->child : NULL;
	while (child && t->token[child->block + child->first] != ids[0])
		child = child->next;
	*matched = 0;
	if (!child)
		return NULL;
	const int32_t *token = t->token + child->block + child->first;
	const int64_t most = child->end - child->first < n ? child->end - child->first : n;
	while (*matched < most && token[*matched] == ids[*matched])
		++*matched;
	return child;
}

/* Follows ids from the root as far as they are in the tree, *length tokens, which become those of s where it is not
 * NULL. Returns the node of the last of them. */
static struct prefix_node *descend(const struct prefix_tree *t, const int32_t *ids, int64_t n, int64_t *length,
		struct kv_sequence *s)
{
	struct prefix_node *node = (struct prefix_node *)&t->root, *child;
	int64_t matched;
	*length = 0;
	while ((child = step(t, node, ids + *length, n - *length, &matched))) {
		node = child;
		*length += matched;
		if (s && *length % KV_BLOCK == 0)
			kv_sequence_share(t->pool, s, node->block, KV_BLOCK);
		if (matched < node->end - node->first)
			break;
	}
	if (s && *length % KV_BLOCK)
		kv_sequence_share(t->pool, s, node->block, *length % KV_BLOCK);
	return node;
}

int64_t prefix_tree_length(const struct prefix_tree *t, const int32_t *ids, int64_t n)
{
	int64_t length;
	descend(t, ids, n, &length, NULL);
	return length;
}

int64_t prefix_tree_find(struct prefix_tree *t, const int32_t *ids, int64_t n, struct kv_sequence *s)
{
	int64_t length;
	assert(s->cache.length == 0);
	touch(t, descend(t, ids, n, &length, s));
	return length;
}

void prefix_tree_insert(struct prefix_tree *t, const int32_t *ids, struct kv_sequence *s)
{
	const int64_t n = s->cache.length;
	int64_t length;
	struct prefix_node *node = descend(t, ids, n, &length, NULL);
	if (length < n && length > 0 && (length - 1) % KV_BLOCK + 1 < node->end)
		node = split(t, node, (length - 1) % KV_BLOCK + 1);
	/* The full blocks of the tree on the way here take the place of the sequence's. */
	int64_t end = length;
	for (struct prefix_node *x = node; end > 0; x = x->parent) {
		if (end % KV_BLOCK == 0)
			kv_sequence_replace(t->pool, s, end / KV_BLOCK - 1, x->block);
		end = (end - 1) / KV_BLOCK * KV_BLOCK + x->first;
	}
	while (length < n) {
		const int64_t block = s->block[length / KV_BLOCK];
		const int first = length % KV_BLOCK, rest = KV_BLOCK - first;
		const int more = n - length < rest ? (int)(n - length) : rest;
		if (!node->child && node->block == block && node->end == first) {
			node->end += more; /* it is the sequence's own, which has gone on since */
			t->tokens += more;
		} else
			node = add_child(t, node, block, first, first + more);
		memcpy(t->token + block + first, ids + length, more * sizeof *ids);
		length += more;
	}
	touch(t, node);
}

/* ---- short of room ---- */

bool prefix_tree_evict(struct prefix_tree *t)
{
	for (struct prefix_node *node = t->root.newer; node != &t->root; node = node->newer)
		if (!node->child && !kv_block_sequences(t->pool, node->block)) {
			t->evicted += node->end - node->first;
			remove_leaf(t, node);
			return true;
		}
	return false;
}

void prefix_tree_clear(struct prefix_tree *t)
{
	while (t->root.newer != &t->root) /* the oldest node has no children */
		remove_leaf(t, t->root.newer);
}

bool prefix_tree_grow(struct prefix_tree *t, struct kv_sequence *s, int64_t n)
{
	struct kv_pool *p = t->pool;
	if (n > 0 && s->cache.length + n - kv_sequence_rows(p, s) > p->rows - p->in_sequences)
		return false;
	while (!kv_sequence_grow(p, s, n)) {
		if (prefix_tree_evict(t))
			continue;
		if (t->nodes == 0 || p->in_sequences != kv_sequence_rows(p, s))
			return false;
		prefix_tree_clear(t);
	}
	return true;
}
