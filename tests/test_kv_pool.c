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
__attribute__((unused))
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
		kv_sequence_fork(&p, &s[i], &s[0], i < 3 ? 600 : 530); /* nothing is copied yet */
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
	struct kv_sequence s[2] = {0};
	add(&p, &s[0], 300, 0);
	kv_sequence_fork(&p, &s[1], &s[0], 300);
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
	assert_int_equal(p.used, 256 + 64 + 64);
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
	kv_sequence_fork(&f->pool, &f->s[to], &f->s[from], below(4) ? n : f->s[from].cache.length);
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

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_units), cmocka_unit_test(test_open), cmocka_unit_test(test_places),
		cmocka_unit_test(test_alone), cmocka_unit_test(test_fork), cmocka_unit_test(test_no_room),
		cmocka_unit_test(test_holders), cmocka_unit_test(test_fuzz),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
