/*
 * commands/prefix_tree.h - which beginnings of sequences are computed: a radix tree over token ids, whose nodes hold
 * blocks of keys and values (commands/kv_pool.h).
 *
 * A new sequence gets the longest beginning that is there, exact to the token: whole blocks are shared, and the
 * partial one behind them is copied when the sequence grows. What is in the tree stays when its sequences have ended,
 * until the pool is short.
 */
#ifndef LING_COMMANDS_PREFIX_TREE_H
#define LING_COMMANDS_PREFIX_TREE_H

#include "commands/kv_pool.h"

#include <stdbool.h>
#include <stdint.h>

/* Tokens that follow those of the parent, inside one block: in the block they are at first .. end - 1, and a parent's
 * end is the first of its children, or KV_BLOCK where the children begin a block. No two children of a node begin with
 * the same token. */
struct prefix_node {
	struct prefix_node *parent, *child, *next; /* child: the first one; next: the next child of the same parent */
	struct prefix_node *newer, *older; /* in the order of use, in which a node is newer than its children */
	int64_t block;               /* row of the pool; the node is a holder of it */
	int first, end;
};

struct prefix_tree {
	struct kv_pool *pool;
	int32_t *token;              /* [pool->rows] the token of each row that a node has */
	struct prefix_node root;     /* without tokens; newer and older make a ring with all nodes, the newest in older */
	int64_t nodes, tokens;       /* in the tree */
	int64_t evicted;             /* tokens, so far */
};

/* An empty tree. prefix_tree_close must come before kv_pool_close. The tree must not be moved in memory. Fails when
 * memory is short. */
int prefix_tree_open(struct prefix_tree *t, struct kv_pool *pool);
void prefix_tree_close(struct prefix_tree *t); /* {0} is fine */

/* How many of the n ids, from the first on, are in the tree. */
int64_t prefix_tree_length(const struct prefix_tree *t, const int32_t *ids, int64_t n);
/* The same; they become the tokens of s, an empty sequence, and are now the newest of the tree. (For a prompt whose
 * next token is wanted, n is one less than its length: the last one must be computed.) */
int64_t prefix_tree_find(struct prefix_tree *t, const int32_t *ids, int64_t n, struct kv_sequence *s);
/* All tokens that a sequence has, ids [s->cache.length], enter the tree, as the newest. Whole blocks of the sequence
 * that are there already are given back, and those of the tree take their place. */
void prefix_tree_insert(struct prefix_tree *t, const int32_t *ids, struct kv_sequence *s);

/* kv_sequence_grow, for which the oldest tokens that no sequence has leave the tree, until the pool has room; all of
 * them where s is alone in the pool. False: there still is none. Nothing leaves the tree where that is clear before. */
bool prefix_tree_grow(struct prefix_tree *t, struct kv_sequence *s, int64_t n);

/* Takes the oldest node out that has no children and whose block no sequence holds. False: there is none. */
bool prefix_tree_evict(struct prefix_tree *t);
/* Takes all nodes out. */
void prefix_tree_clear(struct prefix_tree *t);

#endif
