/*
 * tests/test_kv_pool.c - the pool of keys and values and the tree of computed beginnings: exact cases, and 10^6 random
 * operations beside a shadow model. A row's stamp is a number in its first element, in each layer another one; by it
 * every row tells of which token it is.
 */
#define _GNU_SOURCE
#include "commands/kv_pool.h"
#include "commands/prefix_tree.h"
#include "files/collections.h"
#include "test.h"

enum { LAYERS = 2, WIDTH = 3 };

/* ---- what the tests share ---- */

static uint64_t random_state;

static int64_t below(int64_t n)
{
	random_state = random_state * 6364136223846793005 + 1442695040888963407;
	return (int64_t)((random_state >> 33) % n);
}

/* Where the row of a position has its first element. */
static real *row_of(const struct kv_sequence *s, int layer, int64_t position)
{
	const struct kv_cache *c = &s->cache;
	return c->kv + (layer * c->rows + c->block[position / KV_BLOCK] + position % KV_BLOCK) * WIDTH;
}

/* Stamps are at most 24 bits long, which a float holds. */
static void put_stamp(struct kv_sequence *s, int64_t position, int32_t stamp)
{
	for (int l = 0; l < LAYERS; l++)
		row_of(s, l, position)[0] = stamp ^ l, row_of(s, l, position)[WIDTH - 1] = stamp ^ l;
}

static void check_stamp(const struct kv_sequence *s, int64_t position, int32_t stamp)
{
	for (int l = 0; l < LAYERS; l++) {
		const real *row = row_of(s, l, position);
		if (row[0] != (stamp ^ l) || row[WIDTH - 1] != (stamp ^ l))
			fail_msg("position %lld, layer %d: %.0f and %.0f, not %d", (long long)position, l, (double)row[0],
					(double)row[WIDTH - 1], stamp ^ l);
	}
}

/* The stamp of a token is a function of it and of all before it, as its keys and values are. */
static int32_t stamp_behind(int32_t before, int32_t token)
{
	const int32_t both[] = {before, token};
	return (int32_t)(hash_bytes(both, sizeof both) & 0xffffff);
}

static struct kv_pool open_pool(int64_t rows)
{
	struct kv_pool p;
	assert_int_equal(kv_pool_open(&p, LAYERS, WIDTH, rows), 0);
	return p;
}

/* Nothing is held. */
static void close_empty(struct kv_pool *p)
{
	const struct kv_free_rows f = kv_pool_free_rows(p);
	assert_int_equal(p->used, 0);
	assert_int_equal(p->in_sequences, 0);
	assert_int_equal(p->free_frames, p->rows / KV_BLOCK);
	assert_int_equal(f.rows, p->rows);
	assert_int_equal(f.ranges, 1);
	assert_int_equal(f.longest, p->rows);
	kv_pool_close(p);
}

/* Adds n tokens with the stamps first, first + 1, ... */
static void add(struct kv_pool *p, struct kv_sequence *s, int64_t n, int32_t first)
{
	assert_true(kv_sequence_grow(p, s, n));
	for (int64_t i = 0; i < n; i++)
		put_stamp(s, s->cache.length + i, first + (int32_t)i);
	s->cache.length += n;
}

static void check_stamps(const struct kv_sequence *s, int64_t from, int64_t to, int32_t first)
{
	for (int64_t i = from; i < to; i++)
		check_stamp(s, i, first + (int32_t)(i - from));
}

/* Counts everything anew: no two blocks overlap, every unit in use is in a block, every holder is counted, every frame
 * is in its list. others: the holders that are no sequences. */
static void check_pool(const struct kv_pool *p, const struct kv_sequence *sequences, int n, int64_t others)
{
	const int64_t units = p->rows / KV_UNIT, frames = p->rows / KV_BLOCK;
	int32_t *holders = calloc(units, sizeof *holders);
	int64_t used = 0, in_sequences = 0, listed = 0, unit = 0;
	for (int i = 0; i < n; i++) {
		const struct kv_sequence *s = &sequences[i];
		assert_true((int64_t)s->num_blocks * KV_BLOCK >= s->cache.length);
		for (size_t b = 0; b < s->num_blocks; b++) {
			holders[s->block[b] / KV_UNIT]++;
			assert_int_equal(s->block[b] % KV_UNIT, 0);
		}
	}
	while (unit < units) {
		const struct kv_block *k = &p->block[unit];
		const int64_t frame = unit / UNITS_OF_BLOCK;
		assert_int_equal(holders[unit], k->sequences);
		others -= k->holders - k->sequences;
		if (!k->holders) {
			assert_int_equal(p->frame[frame].used >> unit % UNITS_OF_BLOCK & 1, 0);
			unit++;
			continue;
		}
		assert_true(k->units > 0 && k->filled <= k->units * KV_UNIT);
		assert_int_equal((unit + k->units - 1) / UNITS_OF_BLOCK, frame);
		used += k->units * KV_UNIT;
		in_sequences += k->sequences ? k->units * KV_UNIT : 0;
		for (const int64_t end = unit + k->units, begin = unit; unit < end; unit++) {
			assert_int_equal(p->frame[frame].used >> unit % UNITS_OF_BLOCK & 1, 1);
			assert_true(unit == begin || !p->block[unit].holders);
		}
	}
	assert_int_equal(others, 0);
	assert_int_equal(used, p->used);
	assert_int_equal(in_sequences, p->in_sequences);
	for (int run = 0; run <= UNITS_OF_BLOCK; run++)
		for (int64_t f = p->with_run[run], before = -1; f >= 0; before = f, f = p->frame[f].next, listed++) {
			int longest = 0;
			for (int u = 0, free_units = 0; u < UNITS_OF_BLOCK; u++) {
				free_units = p->frame[f].used >> u & 1 ? 0 : free_units + 1;
				longest = free_units > longest ? free_units : longest;
			}
			assert_int_equal(longest, run);
			assert_int_equal(p->frame[f].previous, before);
		}
	assert_int_equal(listed, frames);
	free(holders);
}

/* to, an empty sequence, gets the first `length` tokens of another one, by sharing its blocks. */
static void share_blocks(struct kv_pool *p, struct kv_sequence *to, const struct kv_sequence *from, int64_t length)
{
	for (int64_t begin = 0; begin < length; begin += KV_BLOCK)
		kv_sequence_share(p, to, from->block[begin / KV_BLOCK], length - begin < KV_BLOCK ? length - begin : KV_BLOCK);
}

/* ---- the pool ---- */

static void test_units(void **state)
{
	(void)state;
	struct kv_pool p = open_pool(1000); /* 4 frames */
	struct kv_sequence s = {0};
	assert_int_equal(p.rows, 1024);
	assert_true(kv_sequence_grow(&p, &s, 0));
	assert_int_equal(p.used, 0);
	static const int64_t lengths[][2] = {{1, 32}, {32, 32}, {33, 64}, {255, 256}, {256, 256}, {257, 288}, {700, 704},
			{1024, 1024}};
	for (int i = 0; i < COUNT(lengths); i++) {
		add(&p, &s, lengths[i][0] - s.cache.length, (int32_t)s.cache.length);
		assert_int_equal(p.used, lengths[i][1]);
		assert_int_equal(kv_sequence_rows(&p, &s), lengths[i][1]);
		assert_int_equal(p.in_sequences, lengths[i][1]);
		check_pool(&p, &s, 1, 0);
	}
	check_stamps(&s, 0, 1024, 0);
	assert_int_equal(p.copies, 0);
	assert_false(kv_sequence_grow(&p, &s, 1));
	for (int i = COUNT(lengths) - 1; i >= 0; i--) {
		kv_sequence_truncate(&p, &s, lengths[i][0]);
		assert_int_equal(p.used, lengths[i][1]);
		check_pool(&p, &s, 1, 0);
	}
	check_stamps(&s, 0, 1, 0);
	kv_sequence_free(&p, &s);
	assert_null(s.block);
	assert_int_equal(p.most_used, 1024);
	close_empty(&p);
}

static void test_open(void **state)
{
	(void)state;
	struct kv_pool p;
	assert_int_equal(kv_pool_open(&p, 80, 2048, INT64_MAX), -1);
	assert_int_equal(kv_pool_open(&p, 80, 2048, 1000000000000000), -1);
	assert_string_equal(error_text,
			"out of memory for the keys and values of 1000000000000000 tokens, 655360000000.0 GB");
	assert_null(p.kv);
	kv_pool_close(&p);
	kv_pool_close(&(struct kv_pool){0});
}

/* While there are frames enough, a block grows in place beside others; then blocks share frames, and are copied. */
static void test_places(void **state)
{
	(void)state;
	struct kv_pool p = open_pool(4 * KV_BLOCK);
	struct kv_sequence s[6] = {0};
	for (int i = 0; i < 3; i++)
		add(&p, &s[i], 10, 1000 * i);
	assert_int_equal(p.free_frames, 1);
	for (int i = 0; i < 3; i++)
		add(&p, &s[i], 150, 1000 * i + 10); /* 160: 5 units, in frames of 8 */
	assert_int_equal(p.copies, 0);
	add(&p, &s[3], 96, 3000);
	add(&p, &s[4], 96, 4000);
	assert_int_equal(p.free_frames, 1); /* the rests of frames were used, not the one that is free */
	assert_int_not_equal(s[3].block[0] / KV_BLOCK, s[4].block[0] / KV_BLOCK);
	assert_int_equal(kv_pool_free_rows(&p).ranges, 2); /* a rest of 3 units, and the frame */
	assert_int_equal(kv_pool_free_rows(&p).longest, KV_BLOCK);
	add(&p, &s[3], 1, 3096); /* 4 units: not in place, and in no rest */
	assert_int_equal(p.copies, 1);
	assert_int_equal(p.copied_rows, 96);
	assert_int_equal(p.free_frames, 0);
	assert_false(kv_sequence_grow(&p, &s[5], KV_BLOCK));
	add(&p, &s[5], 128, 5000); /* the rest of its frame */
	assert_false(kv_sequence_grow(&p, &s[3], 32)); /* not even to the 4 units that it would need beside its own */
	assert_int_equal(s[3].cache.length, 97);
	for (int i = 0; i < 3; i++)
		check_stamps(&s[i], 0, 160, 1000 * i);
	check_stamps(&s[3], 0, 97, 3000);
	check_stamps(&s[4], 0, 96, 4000);
	check_stamps(&s[5], 0, 128, 5000);
	check_pool(&p, s, 6, 0);
	for (int i = 0; i < 6; i++)
		kv_sequence_free(&p, &s[i]);
	close_empty(&p);
}

/* A sequence alone in the pool fills it, wherever its last block was; it moves within its frame. */
static void test_alone(void **state)
{
	(void)state;
	struct kv_pool p = open_pool(2 * KV_BLOCK);
	struct kv_sequence s[2] = {0};
	add(&p, &s[0], 64, 0);
	add(&p, &s[1], 256, 5000);
	kv_sequence_truncate(&p, &s[1], 192);
	kv_sequence_free(&p, &s[0]);
	add(&p, &s[0], 256, 0);
	kv_sequence_truncate(&p, &s[1], 0);
	add(&p, &s[1], 32, 5000);
	kv_sequence_truncate(&p, &s[0], 0);
	add(&p, &s[0], 256, 0);
	add(&p, &s[0], 40, 256); /* behind the other's */
	assert_int_equal(s[0].block[1] % KV_BLOCK, 32);
	kv_sequence_free(&p, &s[1]);
	assert_int_equal(p.copies, 0);
	add(&p, &s[0], 216, 296);
	assert_int_equal(p.copies, 1);
	assert_int_equal(p.copied_rows, 40);
	assert_int_equal(p.used, p.rows);
	check_stamps(&s[0], 0, 512, 0);
	assert_false(kv_sequence_grow(&p, &s[0], 1));
	check_stamps(&s[0], 0, 512, 0);
	kv_sequence_free(&p, &s[0]);
	close_empty(&p);
}

static void test_fork(void **state)
{
	(void)state;
	struct kv_pool p = open_pool(16 * KV_BLOCK);
	struct kv_sequence s[4] = {0};
	add(&p, &s[0], 600, 0);
	const int64_t used = p.used;
	for (int i = 1; i < 4; i++)
		share_blocks(&p, &s[i], &s[0], i < 3 ? 600 : 530); /* nothing is copied yet */
	assert_int_equal(p.used, used);
	assert_int_equal(kv_block_sequences(&p, s[0].block[2]), 4);
	const int64_t first = s[0].block[0], last = s[0].block[2];
	add(&p, &s[1], 100, 10000); /* goes on in place; the others must not overwrite that */
	assert_int_equal(s[1].block[2], last);
	assert_int_equal(p.copies, 0);
	add(&p, &s[0], 100, 20000);
	add(&p, &s[2], 100, 30000);
	add(&p, &s[3], 170, 40000);
	assert_int_equal(p.copies, 3);
	assert_int_equal(p.copied_rows, 88 + 88 + 18);
	for (int i = 0; i < 4; i++) {
		assert_int_equal(s[i].block[0], first);
		check_stamps(&s[i], 0, i < 3 ? 600 : 530, 0);
	}
	check_stamps(&s[1], 600, 700, 10000);
	check_stamps(&s[0], 600, 700, 20000);
	check_stamps(&s[2], 600, 700, 30000);
	check_stamps(&s[3], 530, 700, 40000);
	/* Back into a block that others have, and on. */
	kv_sequence_truncate(&p, &s[1], 100);
	add(&p, &s[1], 50, 50000);
	check_stamps(&s[1], 0, 100, 0);
	check_stamps(&s[1], 100, 150, 50000);
	check_stamps(&s[0], 0, 600, 0);
	check_pool(&p, s, 4, 0);
	for (int i = 0; i < 4; i++)
		kv_sequence_free(&p, &s[i]);
	close_empty(&p);
}

/* A call that fails changes nothing, also where the last block could grow in place, and others have it too. */
static void test_no_room(void **state)
{
	(void)state;
	struct kv_pool p = open_pool(3 * KV_BLOCK);
	struct kv_sequence s[3] = {0};
	add(&p, &s[0], 300, 0);
	share_blocks(&p, &s[2], &s[0], 290);
	assert_false(kv_sequence_grow(&p, &s[2], 800)); /* more frames than are free: no need to copy first */
	assert_int_equal(p.copies, 0);
	kv_sequence_free(&p, &s[2]);
	share_blocks(&p, &s[1], &s[0], 300);
	const int64_t used = p.used, last = s[0].block[1];
	for (int i = 0; i < 4; i++) {
		assert_false(kv_sequence_grow(&p, &s[i % 2], 600));
		assert_false(kv_sequence_grow(&p, &s[i % 2], 469)); /* one more than there is */
		assert_int_equal(p.used, used);
		assert_int_equal(p.copies, 0);
		check_pool(&p, s, 2, 0);
	}
	add(&p, &s[0], 10, 300);
	assert_int_equal(s[0].block[1], last);
	assert_int_equal(p.copies, 0);
	/* What was asked for but not written is asked for anew. */
	assert_true(kv_sequence_grow(&p, &s[0], 400));
	assert_int_equal(p.used, 736);
	assert_true(kv_sequence_grow(&p, &s[0], 0));
	assert_int_equal(p.used, 2 * KV_BLOCK); /* its last block, which the other has too, keeps its units */
	kv_sequence_free(&p, &s[1]);
	add(&p, &s[0], 458, 310);
	check_stamps(&s[0], 0, 768, 0);
	kv_sequence_free(&p, &s[0]);
	close_empty(&p);
}

/* A block that something else holds than sequences stays where it is, with its rows, when its sequence goes on, goes
 * back, and ends. */
static void test_holders(void **state)
{
	(void)state;
	struct kv_pool p = open_pool(2 * KV_BLOCK);
	struct kv_sequence s[2] = {0}, kept = {0};
	add(&p, &s[0], 100, 0);
	const int64_t block = s[0].block[0];
	kv_block_hold(&p, block);
	add(&p, &s[0], 20, 100);
	assert_int_equal(s[0].block[0], block);
	kv_sequence_truncate(&p, &s[0], 90);
	add(&p, &s[0], 20, 2000);
	assert_int_not_equal(s[0].block[0], block);
	assert_int_equal(kv_block_sequences(&p, block), 0);
	kv_sequence_share(&p, &kept, block, 120);
	check_stamps(&kept, 0, 120, 0);
	check_stamps(&s[0], 0, 90, 0);
	check_stamps(&s[0], 90, 110, 2000);
	kv_sequence_free(&p, &kept);
	kv_sequence_free(&p, &s[0]);
	assert_int_equal(p.used, 128);
	assert_int_equal(p.in_sequences, 0);
	check_pool(&p, s, 2, 1);
	kv_block_release(&p, block);
	close_empty(&p);
}

/* ---- 10^6 operations on the pool ---- */

enum { FUZZ_SEQUENCES = 24, FUZZ_HOLDS = 16, FUZZ_FRAMES = 48, FUZZ_LENGTH = 1500 };

struct fuzz {
	struct kv_pool pool;
	struct kv_sequence s[FUZZ_SEQUENCES];
	int32_t stamp[FUZZ_SEQUENCES][FUZZ_LENGTH]; /* of each position */
	struct hold { int64_t rows; int64_t block; int32_t stamp[KV_BLOCK]; } held[FUZZ_HOLDS]; /* rows 0: none */
	int32_t next_stamp;
	int64_t refused, grown, forks, holds;
};

static void fuzz_check_all(struct fuzz *f)
{
	int64_t holds = 0;
	for (int i = 0; i < FUZZ_SEQUENCES; i++)
		for (int64_t t = 0; t < f->s[i].cache.length; t++)
			check_stamp(&f->s[i], t, f->stamp[i][t]);
	for (int i = 0; i < FUZZ_HOLDS; i++) {
		const struct hold *h = &f->held[i];
		const struct kv_sequence view = {.cache = {.kv = f->pool.kv, .rows = f->pool.rows, .block = &h->block}};
		for (int64_t t = 0; t < h->rows; t++)
			check_stamp(&view, t, h->stamp[t]);
		holds += h->rows > 0;
	}
	check_pool(&f->pool, f->s, FUZZ_SEQUENCES, holds);
}

static void fuzz_grow(struct fuzz *f, int i)
{
	struct kv_sequence *s = &f->s[i];
	const int64_t length = s->cache.length, room = FUZZ_LENGTH - length;
	int64_t n = below(8) ? 1 + below(40) : 1 + below(600);
	n = n < room ? n : room;
	if (!kv_sequence_grow(&f->pool, s, n)) {
		assert_true(f->pool.free_frames <= n / KV_BLOCK + 2); /* with more, there was room */
		f->refused++;
		return;
	}
	assert_int_equal(s->cache.length, length);
	if (below(50) == 0) /* not written */
		return;
	for (int64_t t = length; t < length + n; t++) {
		f->stamp[i][t] = f->next_stamp = (f->next_stamp + 1) & 0xffffff;
		put_stamp(s, t, f->stamp[i][t]);
	}
	s->cache.length += n;
	f->grown++;
}

static void fuzz_fork(struct fuzz *f, int to, int from)
{
	const int64_t n = f->s[from].cache.length ? 1 + below(f->s[from].cache.length) : 0;
	if (to == from)
		return;
	kv_sequence_free(&f->pool, &f->s[to]);
	share_blocks(&f->pool, &f->s[to], &f->s[from], below(4) ? n : f->s[from].cache.length);
	memcpy(f->stamp[to], f->stamp[from], f->s[to].cache.length * sizeof **f->stamp);
	f->forks++;
}

/* Holds a block of a sequence as a prefix tree does, or lets one go. */
static void fuzz_hold(struct fuzz *f, int i)
{
	const struct kv_sequence *s = &f->s[i];
	struct hold *h = &f->held[below(FUZZ_HOLDS)];
	if (h->rows) {
		kv_block_release(&f->pool, h->block);
		h->rows = 0;
	} else if (s->cache.length) {
		const int64_t first = below(s->cache.length) / KV_BLOCK * KV_BLOCK, rest = s->cache.length - first;
		h->rows = rest < KV_BLOCK ? rest : KV_BLOCK;
		h->block = s->block[first / KV_BLOCK];
		memcpy(h->stamp, f->stamp[i] + first, h->rows * sizeof *h->stamp);
		kv_block_hold(&f->pool, h->block);
		f->holds++;
	}
}

static void test_fuzz(void **state)
{
	(void)state;
	struct fuzz *f = calloc(1, sizeof *f);
	f->pool = open_pool(FUZZ_FRAMES * KV_BLOCK);
	random_state = 1;
	for (int64_t n = 0; n < 1000000; n++) {
		const int i = (int)below(FUZZ_SEQUENCES);
		struct kv_sequence *s = &f->s[i];
		switch (below(32)) {
		case 0: kv_sequence_free(&f->pool, s); break;
		case 1: fuzz_fork(f, i, (int)below(FUZZ_SEQUENCES)); break;
		case 2: case 3: fuzz_hold(f, i); break;
		case 4: kv_sequence_truncate(&f->pool, s, below(s->cache.length + 1)); break;
		case 5: kv_sequence_truncate(&f->pool, s, s->cache.length - (s->cache.length > 0)); break;
		default: fuzz_grow(f, i);
		}
		for (int k = 0; k < 2 && s->cache.length; k++) {
			const int64_t t = below(s->cache.length);
			check_stamp(s, t, f->stamp[i][t]);
		}
		if (n % 5000 == 0)
			fuzz_check_all(f);
	}
	fuzz_check_all(f);
	/* It was worth it: the pool was full, and blocks were moved. */
	assert_true(f->refused > 10000 && f->grown > 100000 && f->forks > 10000 && f->holds > 10000);
	assert_true(f->pool.copies > 50000 && f->pool.most_used > f->pool.rows * 9 / 10);
	for (int i = 0; i < FUZZ_SEQUENCES; i++)
		kv_sequence_free(&f->pool, &f->s[i]);
	for (int i = 0; i < FUZZ_HOLDS; i++)
		if (f->held[i].rows)
			kv_block_release(&f->pool, f->held[i].block);
	close_empty(&f->pool);
	free(f);
}

/* ---- the tree ---- */

enum { TEST_TOKENS = 2000 };

/* A sequence and its ids. stamp[t] is that of token t - 1, so stamp[0] = 0 stands before the first. */
struct tokens_of { struct kv_sequence s; int32_t id[TEST_TOKENS]; int32_t stamp[TEST_TOKENS + 1]; };

/* Sets ids from `from` on to first, first + 1, ... */
static void number_ids(struct tokens_of *x, int64_t from, int32_t first)
{
	for (int64_t t = from; t < TEST_TOKENS; t++)
		x->id[t] = first + (int32_t)(t - from);
}

/* Writes the rows of the next n tokens, as a forward pass does. */
static void write_tokens(struct tokens_of *x, int64_t n)
{
	for (int64_t t = x->s.cache.length; t < x->s.cache.length + n; t++) {
		x->stamp[t + 1] = stamp_behind(x->stamp[t], x->id[t]);
		put_stamp(&x->s, t, x->stamp[t + 1]);
	}
	x->s.cache.length += n;
}

static void compute(struct kv_pool *p, struct tokens_of *x, int64_t n)
{
	assert_true(kv_sequence_grow(p, &x->s, n));
	write_tokens(x, n);
}

/* Takes from the tree what it has of the first n ids; checks how many that are, and their rows. */
static void find(struct prefix_tree *t, struct tokens_of *x, int64_t n, int64_t expected)
{
	assert_int_equal(prefix_tree_length(t, x->id, n), expected);
	assert_int_equal(prefix_tree_find(t, x->id, n, &x->s), expected);
	assert_int_equal(x->s.cache.length, expected);
	for (int64_t i = 0; i < expected; i++) {
		x->stamp[i + 1] = stamp_behind(x->stamp[i], x->id[i]);
		check_stamp(&x->s, i, x->stamp[i + 1]);
	}
}

/* Every node is newer than its children and begins where its parent ends, and no two children begin with one token.
 * Returns the nodes below a node. */
static int64_t check_nodes(const struct prefix_tree *t, const struct prefix_node *node, int64_t *tokens)
{
	int64_t n = 0;
	for (const struct prefix_node *c = node->child; c; c = c->next) {
		assert_ptr_equal(c->parent, node);
		assert_int_equal(c->first, node->end % KV_BLOCK);
		assert_true(c->first < c->end && c->end <= KV_BLOCK);
		for (const struct prefix_node *other = c->next; other; other = other->next)
			assert_int_not_equal(t->token[c->block + c->first], t->token[other->block + other->first]);
		*tokens += c->end - c->first;
		n += 1 + check_nodes(t, c, tokens);
	}
	return n;
}

static void check_tree(const struct prefix_tree *t)
{
	int64_t tokens = 0, ring = 0;
	assert_int_equal(check_nodes(t, &t->root, &tokens), t->nodes);
	assert_int_equal(tokens, t->tokens);
	for (const struct prefix_node *node = t->root.older, *newer = &t->root; node != &t->root; node = node->older) {
		assert_ptr_equal(node->newer, newer);
		for (const struct prefix_node *other = newer; other != node->parent; other = other->newer)
			assert_ptr_not_equal(other, &t->root); /* the parent is newer */
		newer = node;
		ring++;
	}
	assert_int_equal(ring, t->nodes);
}

static void close_tree(struct prefix_tree *t, struct kv_pool *p)
{
	check_tree(t);
	check_pool(p, NULL, 0, t->nodes);
	prefix_tree_close(t);
	close_empty(p);
}

static void test_find(void **state)
{
	(void)state;
	struct kv_pool p = open_pool(64 * KV_BLOCK);
	struct prefix_tree t;
	struct tokens_of *x = calloc(4, sizeof *x);
	assert_int_equal(prefix_tree_open(&t, &p), 0);
	number_ids(&x[0], 0, 0);
	find(&t, &x[0], 1000, 0);
	prefix_tree_insert(&t, x[0].id, &x[0].s); /* no tokens yet */
	assert_int_equal(t.nodes, 0);
	for (int i = 0; i < 10; i++) { /* the tree follows a sequence as it grows */
		compute(&p, &x[0], 71);
		prefix_tree_insert(&t, x[0].id, &x[0].s);
		assert_int_equal(t.tokens, x[0].s.cache.length);
	}
	assert_int_equal(t.nodes, 3); /* of 256, 256 and 198 tokens */
	/* Exact to the token; by reference, without a row more. */
	static const int64_t lengths[] = {1, 2, 255, 256, 257, 511, 512, 513, 709, 710};
	const int64_t used = p.used;
	for (int i = 0; i < COUNT(lengths); i++) {
		number_ids(&x[1], 0, 0);
		find(&t, &x[1], lengths[i], lengths[i]);
		kv_sequence_free(&p, &x[1].s);
		x[1].id[lengths[i]] = -1;
		find(&t, &x[1], 1000, lengths[i]);
		for (int b = 0; b * KV_BLOCK < lengths[i]; b++)
			assert_int_equal(x[1].s.block[b], x[0].s.block[b]);
		kv_sequence_free(&p, &x[1].s);
	}
	assert_int_equal(p.used, used);
	assert_int_equal(t.nodes, 3);
	/* Two that go another way inside a block; the tree divides its node. */
	for (int i = 1; i < 4; i++) {
		number_ids(&x[i], 0, 0);
		number_ids(&x[i], 200 + 100 * i, 10000 * i); /* 300, 400, 500 */
		find(&t, &x[i], 800, 200 + 100 * i);
		compute(&p, &x[i], 300);
		prefix_tree_insert(&t, x[i].id, &x[i].s);
		check_tree(&t);
	}
	assert_int_equal(p.copied_rows, 44 + 144 + 244);
	assert_int_equal(t.nodes, 3 + 3 + 2 + 2 + 3); /* three more where they leave; their own in two blocks, or three */
	assert_int_equal(t.tokens, 710 + 3 * 300);
	for (int i = 0; i < 4; i++) {
		const int64_t length = x[i].s.cache.length;
		kv_sequence_free(&p, &x[i].s); /* what is in the tree stays */
		find(&t, &x[i], 1000, length);
		kv_sequence_free(&p, &x[i].s);
	}
	free(x);
	close_tree(&t, &p);
}

/* Two sequences compute the same and then differ: full blocks are there once. */
static void test_duplicates(void **state)
{
	(void)state;
	struct kv_pool p = open_pool(64 * KV_BLOCK);
	struct prefix_tree t;
	struct tokens_of *x = calloc(3, sizeof *x);
	assert_int_equal(prefix_tree_open(&t, &p), 0);
	for (int i = 0; i < 3; i++) {
		number_ids(&x[i], 0, 0);
		number_ids(&x[i], 600, 10000 * i);
		compute(&p, &x[i], 700);
	}
	assert_int_equal(p.used, 3 * (512 + 192));
	for (int i = 0; i < 3; i++)
		prefix_tree_insert(&t, x[i].id, &x[i].s);
	assert_int_equal(p.used, 512 + 3 * 192);
	for (int i = 0; i < 3; i++)
		for (int b = 0; b < 2; b++)
			assert_int_equal(x[i].s.block[b], x[0].s.block[b]);
	assert_int_equal(t.nodes, 2 + 1 + 3);
	assert_int_equal(t.tokens, 600 + 3 * 100);
	/* One that ends inside a block of the tree changes nothing. */
	struct tokens_of *y = calloc(1, sizeof *y);
	number_ids(y, 0, 0);
	compute(&p, y, 300);
	prefix_tree_insert(&t, y->id, &y->s);
	assert_int_equal(y->s.block[0], x[0].s.block[0]);
	assert_int_not_equal(y->s.block[1], x[0].s.block[1]);
	assert_int_equal(t.nodes, 6);
	for (int i = 0; i < 3; i++) {
		for (int64_t k = 0; k < 700; k++)
			check_stamp(&x[i].s, k, x[i].stamp[k + 1]);
		compute(&p, &x[i], 100);
		kv_sequence_free(&p, &x[i].s);
	}
	kv_sequence_free(&p, &y->s);
	free(x), free(y);
	close_tree(&t, &p);
}

/* The oldest leave first, ends before beginnings, and what sequences hold stays. */
static void test_evict(void **state)
{
	(void)state;
	struct kv_pool p = open_pool(64 * KV_BLOCK);
	struct prefix_tree t;
	struct tokens_of *x = calloc(4, sizeof *x);
	assert_int_equal(prefix_tree_open(&t, &p), 0);
	for (int i = 0; i < 4; i++) { /* 0 and 1 have 100 tokens in common, 2 and 3 none */
		number_ids(&x[i], i == 1 ? 100 : 0, 10000 * i);
		if (i == 1)
			number_ids(&x[i], 0, 0), number_ids(&x[i], 100, 10000);
		find(&t, &x[i], 400, i == 1 ? 100 : 0);
		compute(&p, &x[i], i == 1 ? 300 : 400);
		prefix_tree_insert(&t, x[i].id, &x[i].s);
	}
	assert_int_equal(t.nodes, 3 + 2 + 2 + 2);
	assert_false(prefix_tree_evict(&t)); /* all is held */
	for (int i = 0; i < 4; i++)
		if (i != 3)
			kv_sequence_free(&p, &x[i].s);
	find(&t, &x[0], 256, 256); /* now its first block is newer than all others */
	kv_sequence_free(&p, &x[0].s);
	/* What is left of each sequence after each call. */
	static const int64_t left[][4] = {{256, 400, 400, 400}, {256, 256, 400, 400}, {256, 100, 400, 400},
			{256, 100, 256, 400}, {256, 100, 0, 400}, {100, 100, 0, 400}, {0, 0, 0, 400}};
	for (int i = 0; i < COUNT(left); i++) {
		assert_true(prefix_tree_evict(&t));
		for (int k = 0; k < 4; k++)
			assert_int_equal(prefix_tree_length(&t, x[k].id, 1000), left[i][k]);
		check_tree(&t);
	}
	assert_false(prefix_tree_evict(&t));
	assert_int_equal(t.evicted, 400 + 300 + 400);
	assert_int_equal(p.used, 256 + 160);
	kv_sequence_free(&p, &x[3].s);
	prefix_tree_clear(&t);
	assert_int_equal(t.nodes, 0);
	assert_int_equal(t.tokens, 0);
	free(x);
	close_tree(&t, &p);
}

/* prefix_tree_grow: takes from the tree what must go, and no more; nothing where that is no help; and one that is alone
 * gets the whole pool, even where the tree holds its last block. */
static void test_tree_grow(void **state)
{
	(void)state;
	struct kv_pool p = open_pool(6 * KV_BLOCK);
	struct prefix_tree t;
	struct tokens_of *x = calloc(3, sizeof *x);
	assert_int_equal(prefix_tree_open(&t, &p), 0);
	for (int i = 0; i < 3; i++)
		number_ids(&x[i], 0, 10000 * i);
	for (int i = 0; i < 2; i++) {
		compute(&p, &x[i], 500);
		prefix_tree_insert(&t, x[i].id, &x[i].s);
	}
	kv_sequence_free(&p, &x[0].s);
	assert_false(prefix_tree_grow(&t, &x[2].s, 4 * KV_BLOCK + 1)); /* x[1] has two frames */
	assert_int_equal(t.tokens, 1000);
	assert_true(prefix_tree_grow(&t, &x[2].s, 3 * KV_BLOCK));
	write_tokens(&x[2], 3 * KV_BLOCK);
	assert_int_equal(t.tokens, 756);
	prefix_tree_insert(&t, x[2].id, &x[2].s);
	assert_true(prefix_tree_grow(&t, &x[1].s, 12)); /* in place */
	write_tokens(&x[1], 12);
	assert_true(prefix_tree_grow(&t, &x[2].s, 60));
	write_tokens(&x[2], 60);
	assert_int_equal(t.tokens, 500 + 768); /* the last of x[0] is gone */
	prefix_tree_insert(&t, x[2].id, &x[2].s);
	assert_false(prefix_tree_grow(&t, &x[2].s, 3 * KV_BLOCK - 12 - 60));
	assert_int_equal(t.tokens, 500 + 768 + 60);
	kv_sequence_free(&p, &x[1].s);
	for (int64_t k = 0; k < 828; k++)
		check_stamp(&x[2].s, k, x[2].stamp[k + 1]);
	assert_true(prefix_tree_grow(&t, &x[2].s, 6 * KV_BLOCK - 828));
	write_tokens(&x[2], 6 * KV_BLOCK - 828);
	assert_int_equal(p.used, p.rows);
	assert_false(prefix_tree_grow(&t, &x[2].s, 1));
	kv_sequence_free(&p, &x[2].s);

	/* A last block that the tree holds, amid its frame, when no other frame is free. */
	prefix_tree_clear(&t);
	compute(&p, &x[0], 32);
	compute(&p, &x[2], 5 * KV_BLOCK);
	compute(&p, &x[2], 32);
	prefix_tree_insert(&t, x[2].id, &x[2].s);
	assert_int_equal(x[2].s.block[5] % KV_BLOCK, KV_UNIT);
	kv_sequence_free(&p, &x[0].s);
	assert_true(prefix_tree_grow(&t, &x[2].s, KV_BLOCK - 32));
	write_tokens(&x[2], KV_BLOCK - 32);
	for (int64_t k = 0; k < 6 * KV_BLOCK; k++)
		check_stamp(&x[2].s, k, x[2].stamp[k + 1]);
	kv_sequence_free(&p, &x[2].s);
	free(x);
	close_tree(&t, &p);
}

/* ---- random operations on the tree, beside a tree of single tokens ---- */

enum { TREE_FRAMES = 40, TREE_SEQUENCES = 12, TREE_LENGTH = 700, TREE_IDS = 3, TREE_PROMPTS = 24 };

struct tree_fuzz {
	struct kv_pool pool;
	struct prefix_tree tree;
	struct tokens_of x[TREE_SEQUENCES];
	int32_t prompt[TREE_PROMPTS][TREE_LENGTH]; /* with which sequences begin, to some length */
	/* The tokens in the tree: child[node][id], 0: none; node 0 is the root. Those that are free are in a list by
	 * child[node][0]. */
	int32_t child[TREE_FRAMES * KV_BLOCK + 1][TREE_IDS];
	int32_t free_node;
	int64_t in_tree;
	int64_t found, divided;
};

static int64_t shadow_length(const struct tree_fuzz *f, const int32_t *ids, int64_t n)
{
	int32_t node = 0;
	int64_t length = 0;
	while (length < n && f->child[node][ids[length]])
		node = f->child[node][ids[length++]];
	return length;
}

static void shadow_insert(struct tree_fuzz *f, const int32_t *ids, int64_t n)
{
	for (int32_t i = 0, node = 0; i < n; i++) {
		int32_t *at = &f->child[node][ids[i]];
		if (!*at) {
			assert_int_not_equal(f->free_node, 0);
			*at = f->free_node;
			f->free_node = f->child[*at][0];
			memset(f->child[*at], 0, sizeof *f->child);
			f->in_tree++;
		}
		node = *at;
	}
}

/* Takes a token out, which must have no other behind it, but the n - 1 that are ids. */
static void shadow_remove(struct tree_fuzz *f, int32_t *at, const int32_t *ids, int64_t n)
{
	const int32_t node = *at;
	if (n > 1)
		shadow_remove(f, &f->child[node][ids[1]], ids + 1, n - 1);
	for (int i = 0; i < TREE_IDS; i++)
		assert_int_equal(f->child[node][i], 0);
	f->child[node][0] = f->free_node;
	f->free_node = node;
	*at = 0;
	f->in_tree--;
}

/* The ids of a node and of all above it, from ids on. Returns how many they are. */
static int64_t ids_of_node(const struct prefix_tree *t, const struct prefix_node *node, int32_t *ids)
{
	if (node == &t->root)
		return 0;
	const int64_t n = ids_of_node(t, node->parent, ids);
	memcpy(ids + n, t->token + node->block + node->first, (node->end - node->first) * sizeof *ids);
	return n + node->end - node->first;
}

/* The nodes of these ids are the newest, in the order of the ids. */
static void check_newest(const struct prefix_tree *t, const int32_t *ids, int64_t n)
{
	const struct prefix_node *node = t->root.older, *parent = &t->root;
	for (int64_t i = 0; i < n; i += parent->end - parent->first) {
		assert_ptr_equal(node->parent, parent);
		assert_int_equal(t->token[node->block + node->first], ids[i]);
		parent = node;
		node = node->older;
	}
}

/* Takes one node out: the oldest that may go. */
static bool fuzz_evict(struct tree_fuzz *f)
{
	struct prefix_node *node = f->tree.root.newer;
	while (node != &f->tree.root && (node->child || kv_block_sequences(&f->pool, node->block)))
		node = node->newer;
	int32_t ids[TREE_LENGTH];
	const int64_t n = ids_of_node(&f->tree, node, ids), nodes = f->tree.nodes, own = node->end - node->first;
	const bool any = node != &f->tree.root;
	assert_int_equal(prefix_tree_evict(&f->tree), any);
	assert_int_equal(f->tree.nodes, nodes - any);
	if (!any)
		return false;
	int32_t *at = NULL;
	for (int64_t i = 0, parent = 0; i <= n - own; i++, parent = *at)
		at = &f->child[parent][ids[i]];
	shadow_remove(f, at, ids + n - own, own);
	return true;
}

static void fuzz_begin(struct tree_fuzz *f, struct tokens_of *x)
{
	const int32_t *prompt = f->prompt[below(TREE_PROMPTS)];
	const int64_t same = below(3) ? below(TREE_LENGTH) : TREE_LENGTH;
	kv_sequence_free(&f->pool, &x->s);
	for (int64_t i = 0; i < TREE_LENGTH; i++)
		x->id[i] = i < same ? prompt[i] : below(10) ? 0 : (int32_t)below(TREE_IDS);
	const int64_t n = 1 + below(TREE_LENGTH), expected = shadow_length(f, x->id, n), used = f->pool.used;
	find(&f->tree, x, n, expected);
	assert_int_equal(f->pool.used, used);
	check_newest(&f->tree, x->id, expected);
	f->found += expected;
}

static void tree_fuzz_grow(struct tree_fuzz *f, struct tokens_of *x)
{
	const int64_t length = x->s.cache.length, room = TREE_LENGTH - length;
	int64_t n = below(4) ? 1 + below(20) : 1 + below(300);
	n = n < room ? n : room;
	while (!kv_sequence_grow(&f->pool, &x->s, n))
		if (!fuzz_evict(f)) {
			kv_sequence_free(&f->pool, &f->x[below(TREE_SEQUENCES)].s);
			if (x->s.cache.length != length)
				return;
		}
	write_tokens(x, n);
}

static void fuzz_insert(struct tree_fuzz *f, struct tokens_of *x)
{
	const int64_t n = x->s.cache.length, nodes = f->tree.nodes, known = shadow_length(f, x->id, n);
	prefix_tree_insert(&f->tree, x->id, &x->s);
	shadow_insert(f, x->id, n);
	assert_int_equal(f->tree.tokens, f->in_tree);
	assert_true(f->tree.nodes >= nodes && (known < n || f->tree.nodes == nodes));
	assert_int_equal(x->s.cache.length, n);
	check_newest(&f->tree, x->id, n);
	f->divided += known > 0 && f->tree.nodes > nodes + 1;
}

static void test_tree_fuzz(void **state)
{
	(void)state;
	struct tree_fuzz *f = calloc(1, sizeof *f);
	f->pool = open_pool(TREE_FRAMES * KV_BLOCK);
	assert_int_equal(prefix_tree_open(&f->tree, &f->pool), 0);
	random_state = 2;
	for (int32_t i = TREE_FRAMES * KV_BLOCK; i > 0; i--)
		f->child[i][0] = f->free_node, f->free_node = i;
	for (int64_t n = 0; n < 100000; n++) {
		struct tokens_of *x = &f->x[below(TREE_SEQUENCES)];
		if (n % 3000 == 0) /* prompts come and go; some are alike for a while */
			for (int k = 0; k < TREE_PROMPTS; k++)
				for (int64_t i = 0, same = below(2) * below(TREE_LENGTH); i < TREE_LENGTH; i++)
					f->prompt[k][i] = i < same ? f->prompt[k / 2][i] : (int32_t)below(TREE_IDS);
		switch (below(12)) {
		case 0: kv_sequence_free(&f->pool, &x->s); break;
		case 1: fuzz_begin(f, x); break;
		case 2: kv_sequence_truncate(&f->pool, &x->s, below(x->s.cache.length + 1)); break;
		case 3: fuzz_evict(f); break;
		case 4: case 5: case 6: fuzz_insert(f, x); break;
		default: tree_fuzz_grow(f, x);
		}
		for (int k = 0; k < 8 && x->s.cache.length; k++) {
			const int64_t t = below(x->s.cache.length);
			check_stamp(&x->s, t, x->stamp[t + 1]);
		}
		if (n % 500 == 0) {
			struct kv_sequence s[TREE_SEQUENCES];
			for (int i = 0; i < TREE_SEQUENCES; i++) {
				s[i] = f->x[i].s;
				for (int64_t t = 0; t < s[i].cache.length; t++)
					check_stamp(&s[i], t, f->x[i].stamp[t + 1]);
			}
			check_tree(&f->tree);
			check_pool(&f->pool, s, TREE_SEQUENCES, f->tree.nodes);
		}
	}
	assert_true(f->found > 100000 && f->divided > 1000 && f->tree.evicted > 100000);
	for (int i = 0; i < TREE_SEQUENCES; i++)
		kv_sequence_free(&f->pool, &f->x[i].s);
	while (fuzz_evict(f))
		;
	assert_int_equal(f->in_tree, 0);
	assert_int_equal(f->tree.nodes, 0);
	close_tree(&f->tree, &f->pool);
	free(f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_units), cmocka_unit_test(test_open), cmocka_unit_test(test_places),
		cmocka_unit_test(test_alone), cmocka_unit_test(test_fork), cmocka_unit_test(test_no_room),
		cmocka_unit_test(test_holders), cmocka_unit_test(test_fuzz), cmocka_unit_test(test_find),
		cmocka_unit_test(test_duplicates), cmocka_unit_test(test_evict), cmocka_unit_test(test_tree_grow),
		cmocka_unit_test(test_tree_fuzz),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
