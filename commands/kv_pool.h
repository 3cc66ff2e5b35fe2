/*
 * commands/kv_pool.h - memory for keys and values: one pool of rows, which sequences take in blocks and give back.
 *
 * A row holds the keys and values of one position in all layers. Positions 0 .. KV_BLOCK - 1 of a sequence are its
 * first block, and so on; the rows of a block are one behind the other. The pool is cut into frames of KV_BLOCK rows.
 * A full block has a frame to itself. The last block of a sequence, while it is partial, has as many units of KV_UNIT
 * rows as its positions need, and may share its frame with partial blocks of others. It grows in place if the rows
 * behind it are free; else it is copied to where there is room. So nothing is reserved for tokens that may never come:
 * a sequence holds less than KV_UNIT rows that it does not need. While much of the pool is free, a new block gets a
 * frame to itself, and is not copied; later the rests of frames are used first.
 *
 * A block may have several holders: sequences with an equal beginning, and nodes of a prefix tree. What one of them
 * can read, no other overwrites: a sequence that goes on behind the beginning of such a block gets its own copy first.
 *
 * A sequence alone in the pool can grow until it fills it.
 */
#ifndef LING_COMMANDS_KV_POOL_H
#define LING_COMMANDS_KV_POOL_H

#include "files/base.h"
#include "kernels.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
	KV_UNIT = 32,                    /* rows */
	UNITS_OF_BLOCK = KV_BLOCK / KV_UNIT,
};

/* The block that begins at a unit. */
struct kv_block {
	int32_t holders;             /* sequences and nodes of a prefix tree; 0: no block begins here */
	int32_t sequences;           /* of them */
	int16_t units;
	int16_t filled;              /* rows from the first on that some holder reads, or may write now */
};
/* A frame is in the list of those whose longest run of free units is as long. */
struct kv_frame { int32_t next, previous; uint32_t used; }; /* used: bit u is unit u of the frame; -1 ends a list */

struct kv_pool {
	real *kv;                    /* [layers, rows, width] */
	int64_t layers, width;       /* width: reals of a row in one layer, 2 nkv d */
	int64_t rows;
	struct kv_block *block;      /* [rows / KV_UNIT] */
	struct kv_frame *frame;      /* [rows / KV_BLOCK] */
	int32_t with_run[UNITS_OF_BLOCK + 1]; /* the first frame whose longest run of free units is u units; -1: none */
	int64_t free_frames;
	int64_t used, most_used;     /* rows in blocks, now, and the most at a time */
	int64_t in_sequences;        /* of the rows in use, those in blocks that a sequence holds */
	int64_t copies, copied_rows; /* of blocks that could not grow in place, or had other holders */
};

/* A sequence's rows. cache is what model_extend takes (kernels.h); its block is the block table. {0} is an empty one,
 * of any pool. The structure may be moved in memory. */
struct kv_sequence {
	struct kv_cache cache;
	int64_t *block;              /* [num_blocks] pool row at which each block begins */
	size_t num_blocks, capacity; /* blocks that it holds; for which the table has room */
};

/* Bytes of the keys and values of so many rows. */
double kv_pool_bytes(int64_t layers, int64_t width, int64_t rows);
/* Makes a pool of at least `rows` rows (> 0), rounded up to frames. Its pages come as they are written. Fails with the
 * size when the memory is not there, and then leaves nothing to close. */
int kv_pool_open(struct kv_pool *p, int64_t layers, int64_t width, int64_t rows);
void kv_pool_close(struct kv_pool *p); /* {0} is fine */

/* Rows for the next n tokens (n >= 0) of a sequence, behind the cache.length that it has. They are to be written, as
 * model_extend does, before the next call for the sequence. False: the pool has no room for them; the tokens so far
 * are kept. */
bool kv_sequence_grow(struct kv_pool *p, struct kv_sequence *s, int64_t n);
/* Takes tokens back: the first `length` are kept, at most those there are. Gives back what they do not need. */
void kv_sequence_truncate(struct kv_pool *p, struct kv_sequence *s, int64_t length);
/* Gives all back; the sequence is then {0}. */
void kv_sequence_free(struct kv_pool *p, struct kv_sequence *s);
/* The next `rows` tokens of a sequence, whose length is a multiple of KV_BLOCK, are those at the beginning of a block
 * that others hold: nothing is copied now. */
void kv_sequence_share(struct kv_pool *p, struct kv_sequence *s, int64_t block, int64_t rows);
/* Block b of a sequence, a full one, is given back, and another with the same keys and values takes its place. */
void kv_sequence_replace(struct kv_pool *p, struct kv_sequence *s, size_t b, int64_t block);
/* Rows of the blocks that it holds. */
int64_t kv_sequence_rows(const struct kv_pool *p, const struct kv_sequence *s);

/* Holders that are no sequences: a block, by its first row, is there until its last holder lets it go. It is not moved
 * while it has more than one, or one that is no sequence. */
void kv_block_hold(struct kv_pool *p, int64_t block);
void kv_block_release(struct kv_pool *p, int64_t block);
/* How many sequences hold a block. */
int kv_block_sequences(const struct kv_pool *p, int64_t block);

/* How the free rows lie: how many they are, in how many ranges, the rows of the longest. Looks at the whole pool. */
struct kv_free_rows { int64_t rows, ranges, longest; };
struct kv_free_rows kv_pool_free_rows(const struct kv_pool *p);

#endif
