/*
 * commands/kv_pool.c - memory for keys and values. Blocks never cross the border of a frame, so the free rows of a
 * frame are a mask of UNITS_OF_BLOCK bits, in which neighbours merge by themselves.
 */
#include "commands/kv_pool.h"

#include "files/base.h"
#include "kernels.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

static int64_t min64(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

static int units_of(int64_t rows)
{
	return (int)((rows + KV_UNIT - 1) / KV_UNIT);
}

/* The mask of n units of a frame, of which the first is unit u. */
static uint32_t unit_mask(int u, int n)
{
	return ((UINT32_C(1) << n) - 1) << u;
}

static struct kv_block *block_at(const struct kv_pool *p, int64_t block)
{
	return &p->block[block / KV_UNIT];
}

double kv_pool_bytes(int64_t layers, int64_t width, int64_t rows)
{
	return (double)layers * width * rows * sizeof(real);
}

/* ---- frames ---- */

/* The first of n free units one behind the other, or -1. */
static int find_run(const struct kv_frame *f, int n)
{
	for (int u = 0; u + n <= UNITS_OF_BLOCK; u++)
		if (!(f->used & unit_mask(u, n)))
			return u;
	return -1;
}

static int longest_run(const struct kv_frame *f)
{
	int n = UNITS_OF_BLOCK;
	while (n > 0 && find_run(f, n) < 0)
		n--;
	return n;
}

static void list_frame(struct kv_pool *p, int32_t f)
{
	struct kv_frame *frame = &p->frame[f];
	const int run = longest_run(frame);
	*frame = (struct kv_frame){.next = p->with_run[run], .previous = -1, .used = frame->used};
	if (frame->next >= 0)
		p->frame[frame->next].previous = f;
	p->with_run[run] = f;
	p->free_frames += run == UNITS_OF_BLOCK;
}

static void unlist_frame(struct kv_pool *p, int32_t f)
{
	const struct kv_frame *frame = &p->frame[f];
	const int run = longest_run(frame);
	if (frame->next >= 0)
		p->frame[frame->next].previous = frame->previous;
	if (frame->previous >= 0)
		p->frame[frame->previous].next = frame->next;
	else
		p->with_run[run] = frame->next;
	p->free_frames -= run == UNITS_OF_BLOCK;
}

/* Marks n units, from the one of a row on, as used or free. */
static void mark(struct kv_pool *p, int64_t row, int n, bool used)
{
	const int32_t f = (int32_t)(row / KV_BLOCK);
	const uint32_t mask = unit_mask(row % KV_BLOCK / KV_UNIT, n);
	if (n == 0)
		return;
	unlist_frame(p, f);
	assert((p->frame[f].used & mask) == (used ? 0 : mask));
	p->frame[f].used ^= mask;
	list_frame(p, f);
}

/* Takes n units for a block and returns their first row, or -1. While more than a quarter of the frames are free, it
 * gets one to itself, to grow in place; then the tightest rest of a frame that has the room. */
static int64_t take_units(struct kv_pool *p, int n)
{
	const bool roomy = 4 * p->free_frames > p->rows / KV_BLOCK;
	for (int run = roomy ? UNITS_OF_BLOCK : n; run <= UNITS_OF_BLOCK; run++) {
		const int64_t f = p->with_run[run];
		if (f < 0)
			continue;
		const int64_t row = f * KV_BLOCK + find_run(&p->frame[f], n) * KV_UNIT;
		mark(p, row, n, true);
		return row;
	}
	return -1;
}

/* ---- blocks ---- */

/* Counts the rows of a block in (sign 1) or out (-1). */
static void count_rows(struct kv_pool *p, const struct kv_block *k, int sign)
{
	p->used += sign * k->units * KV_UNIT;
	p->in_sequences += k->sequences ? sign * k->units * KV_UNIT : 0;
	p->most_used = p->used > p->most_used ? p->used : p->most_used;
}

/* Changes how many holders a block has; without any it is free. */
static void change_holders(struct kv_pool *p, int64_t block, int holders, int sequences)
{
	struct kv_block *k = block_at(p, block);
	count_rows(p, k, -1);
	k->holders += holders;
	k->sequences += sequences;
	assert(k->sequences >= 0 && k->holders >= k->sequences);
	if (k->holders) {
		count_rows(p, k, 1);
		return;
	}
	mark(p, block, k->units, false);
	*k = (struct kv_block){0};
}

void kv_block_hold(struct kv_pool *p, int64_t block)
{
	assert(block_at(p, block)->holders > 0);
	change_holders(p, block, 1, 0);
}

void kv_block_release(struct kv_pool *p, int64_t block)
{
	change_holders(p, block, -1, 0);
}

int kv_block_sequences(const struct kv_pool *p, int64_t block)
{
	return block_at(p, block)->sequences;
}

/* A block for `rows` rows, which a sequence holds; -1 without room. */
static int64_t new_block(struct kv_pool *p, int64_t rows)
{
	const int units = units_of(rows);
	const int64_t block = take_units(p, units);
	if (block < 0)
		return -1;
	*block_at(p, block) = (struct kv_block){.holders = 1, .sequences = 1, .units = units, .filled = rows};
	count_rows(p, block_at(p, block), 1);
	return block;
}

/* Gives a block the units that `rows` rows need, in place. False: those behind it are not free. */
static bool resize_block(struct kv_pool *p, int64_t block, int64_t rows)
{
	struct kv_block *k = block_at(p, block);
	const int units = units_of(rows), more = units - k->units, end = block % KV_BLOCK / KV_UNIT + k->units;
	if (more > 0 && (end + more > UNITS_OF_BLOCK || (p->frame[block / KV_BLOCK].used & unit_mask(end, more))))
		return false;
	count_rows(p, k, -1);
	if (more > 0)
		mark(p, block + k->units * KV_UNIT, more, true);
	else
		mark(p, block + units * KV_UNIT, -more, false);
	k->units = units;
	k->filled = rows;
	count_rows(p, k, 1);
	return true;
}

/* Copies the first n rows of a block; the places may overlap. */
static void copy_rows(struct kv_pool *p, int64_t to, int64_t from, int64_t n)
{
	for (int64_t l = 0; l < p->layers; l++)
		memmove(p->kv + (l * p->rows + to) * p->width, p->kv + (l * p->rows + from) * p->width,
				n * p->width * sizeof(real));
	p->copies++;
	p->copied_rows += n;
}

/* Makes `rows` rows of a sequence's block its own to write, behind the first `kept` ones, which it has written. May
 * change *block. False: no room. */
static bool extend_block(struct kv_pool *p, int64_t *block, int64_t kept, int64_t rows)
{
	const struct kv_block old = *block_at(p, *block);
	const int64_t from = *block;
	const bool alone = old.holders == 1;
	if ((alone || old.filled == kept) && resize_block(p, from, rows))
		return true;
	if (!alone) { /* the others keep theirs */
		const int64_t to = new_block(p, rows);
		if (to < 0)
			return false;
		copy_rows(p, to, from, kept);
		change_holders(p, from, -1, -1);
		*block = to;
		return true;
	}
	change_holders(p, from, -1, -1); /* first, since the new place may overlap the old one */
	const int64_t to = new_block(p, rows);
	if (to < 0) {
		mark(p, from, old.units, true);
		*block_at(p, from) = old;
		count_rows(p, &old, 1);
		return false;
	}
	copy_rows(p, to, from, kept);
	*block = to;
	return true;
}

/* ---- the pool ---- */

int kv_pool_open(struct kv_pool *p, int64_t layers, int64_t width, int64_t rows)
{
	const int64_t frames = rows / KV_BLOCK + (rows % KV_BLOCK > 0);
	const double bytes = kv_pool_bytes(layers, width, rows);
	*p = (struct kv_pool){.layers = layers, .width = width};
	if (frames <= INT32_MAX && kv_pool_bytes(layers, width, frames) < (double)(PTRDIFF_MAX / KV_BLOCK / 2)) {
		p->rows = frames * KV_BLOCK;
		p->kv = malloc(p->rows * layers * width * sizeof(real));
		p->block = calloc(p->rows / KV_UNIT, sizeof *p->block);
		p->frame = calloc(frames, sizeof *p->frame);
	}
	if (!p->kv || !p->block || !p->frame) {
		kv_pool_close(p);
		return fail("out of memory for the keys and values of %lld tokens, %.1f GB", (long long)rows, bytes / 1e9);
	}
	for (int run = 0; run <= UNITS_OF_BLOCK; run++)
		p->with_run[run] = -1;
	for (int64_t f = frames - 1; f >= 0; f--)
		list_frame(p, (int32_t)f);
	return 0;
}

void kv_pool_close(struct kv_pool *p)
{
	free(p->kv);
	free(p->block);
	free(p->frame);
	*p = (struct kv_pool){0};
}

struct kv_free_rows kv_pool_free_rows(const struct kv_pool *p)
{
	struct kv_free_rows r = {.rows = p->rows - p->used};
	int64_t run = 0;
	for (int64_t unit = 0; unit < p->rows / KV_UNIT; unit++) {
		const bool used = p->frame[unit / UNITS_OF_BLOCK].used >> unit % UNITS_OF_BLOCK & 1;
		r.ranges += !used && run == 0;
		run = used ? 0 : run + KV_UNIT;
		r.longest = run > r.longest ? run : r.longest;
	}
	return r;
}

/* ---- sequences ---- */

static void append_block(struct kv_pool *p, struct kv_sequence *s, int64_t block)
{
	s->block = grow(s->block, s->num_blocks, &s->capacity, 1, sizeof *s->block);
	s->block[s->num_blocks++] = block;
	s->cache.kv = p->kv;
	s->cache.rows = p->rows;
	s->cache.block = s->block;
}

bool kv_sequence_grow(struct kv_pool *p, struct kv_sequence *s, int64_t n)
{
	const int64_t length = s->cache.length, end = length + n, partial = length % KV_BLOCK;
	kv_sequence_truncate(p, s, length); /* what an earlier call got and nobody wrote */
	if (n == 0)
		return true;
	if (end / KV_BLOCK - (int64_t)s->num_blocks > p->free_frames) /* full blocks more than there can be */
		return false;
	if (partial && !extend_block(p, &s->block[s->num_blocks - 1], partial, min64(KV_BLOCK, partial + n)))
		return false;
	for (int64_t begin; (begin = s->num_blocks * KV_BLOCK) < end;) {
		const int64_t block = new_block(p, min64(KV_BLOCK, end - begin));
		if (block < 0) {
			kv_sequence_truncate(p, s, length);
			if (partial) /* which others may hold too */
				resize_block(p, s->block[s->num_blocks - 1], partial);
			return false;
		}
		append_block(p, s, block);
	}
	return true;
}

void kv_sequence_truncate(struct kv_pool *p, struct kv_sequence *s, int64_t length)
{
	assert(length >= 0 && length <= s->cache.length);
	s->cache.length = length;
	while ((int64_t)s->num_blocks * KV_BLOCK >= length + KV_BLOCK)
		change_holders(p, s->block[--s->num_blocks], -1, -1);
	if (length % KV_BLOCK && block_at(p, s->block[s->num_blocks - 1])->holders == 1)
		resize_block(p, s->block[s->num_blocks - 1], length % KV_BLOCK);
}

void kv_sequence_free(struct kv_pool *p, struct kv_sequence *s)
{
	kv_sequence_truncate(p, s, 0);
	free(s->block);
	*s = (struct kv_sequence){0};
}

void kv_sequence_share(struct kv_pool *p, struct kv_sequence *s, int64_t block, int64_t rows)
{
	assert(s->cache.length % KV_BLOCK == 0 && rows > 0 && rows <= block_at(p, block)->filled);
	kv_sequence_truncate(p, s, s->cache.length);
	change_holders(p, block, 1, 1);
	append_block(p, s, block);
	s->cache.length += rows;
}

void kv_sequence_replace(struct kv_pool *p, struct kv_sequence *s, size_t b, int64_t block)
{
	assert((int64_t)(b + 1) * KV_BLOCK <= s->cache.length && block_at(p, block)->filled == KV_BLOCK);
	change_holders(p, block, 1, 1); /* first: it may be the same one */
	change_holders(p, s->block[b], -1, -1);
	s->block[b] = block;
}

int64_t kv_sequence_rows(const struct kv_pool *p, const struct kv_sequence *s)
{
	int64_t rows = 0;
	for (size_t b = 0; b < s->num_blocks; b++)
		rows += block_at(p, s->block[b])->units * KV_UNIT;
	return rows;
}
