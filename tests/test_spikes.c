/*
 * test_spikes.c - spikes: the detector against plain statistics, its borders, new levels, its state; the queue; what a
 * run does with bad batches, sample by sample; and events.jsonl.
 */
#define _GNU_SOURCE
#include "tests/test.h"

#include "kernels.h"
#include "ling.h"
#include "training/start.h"
#include "training/loop.h"
#include "training/events.h"
#include "training/spikes.h"

#include <float.h>

static const struct spike_options options = {.action = SPIKES_LADDER, .window = 16, .warmup = 8, .loss_threshold = 8,
		.grad_threshold = 20, .retry_lr = 0.1, .max_skips = 3};

static struct spike_detector make_detector(void)
{
	struct spike_detector d;
	assert_int_equal(spike_detector_init(&d, &options), 0);
	return d;
}

static enum spike_verdict judge(struct spike_detector *d, const double x[NUM_DECIDING_SIGNALS])
{
	double deviation[NUM_DECIDING_SIGNALS], expected[NUM_DECIDING_SIGNALS];
	for (int i = 0; i < NUM_DECIDING_SIGNALS; i++)
		expected[i] = spike_deviation(d, i, x[i]);
	const enum spike_verdict verdict = spike_judge(d, x, deviation);
	for (int i = 0; i < NUM_DECIDING_SIGNALS; i++)
		assert_same(deviation[i], expected[i]);
	return verdict;
}

/* Accepts n steps around loss 2 and gradient norm 1, with a spread of 1 % and 20 %. */
static void accept_ordinary(struct spike_detector *d, int n)
{
	for (int i = 0; i < n; i++) {
		const double u = i * 7 % 11 / 5.0 - 1; /* -1 .. 1 */
		spike_accept(d, (double[]){2 + 0.02 * u, 1 + 0.2 * u, 0.01});
	}
}

/* The numbers 1 to 16, of which the median is 8.5 and the median distance from it 4. */
static void test_deviation(void **state)
{
	(void)state;
	struct spike_detector d = make_detector();
	for (int i = 0; i < 16; i++)
		spike_accept(&d, (double[]){i * 5 % 16 + 1, 7, i + 1});
	for (int signal = 0; signal < NUM_SPIKE_SIGNALS; signal += 2) {
		assert_same(spike_deviation(&d, signal, 8.5), 0);
		assert_true(fabs(spike_deviation(&d, signal, 8.5 + 1.4826 * 4) - 1) < 1e-12);
		assert_true(fabs(spike_deviation(&d, signal, 8.5 - 3 * 1.4826 * 4) + 3) < 1e-12);
	}
	/* all alike: the floor, 10 % of the median */
	assert_true(fabs(spike_deviation(&d, SPIKE_GRAD_NORM, 7 * 1.3) - 3) < 1e-12);
	/* the window forgets: sixteen more, of which the last eight and eight others are left */
	for (int i = 0; i < 8; i++)
		spike_accept(&d, (double[]){100, 7, 1});
	assert_true(spike_deviation(&d, SPIKE_LOSS, 100) > 0);
	for (int i = 0; i < 8; i++)
		spike_accept(&d, (double[]){100, 7, 1});
	assert_same(spike_deviation(&d, SPIKE_LOSS, 100), 0);
	assert_true(fabs(spike_deviation(&d, SPIKE_LOSS, 104) - 2) < 1e-12); /* the floor, 2 % */
	spike_detector_free(&d);
}

/* A loss that falls in a straight line, with noise of 0.01: the next value is expected on the line. A rise is no
 * excuse. */
static void test_trend(void **state)
{
	(void)state;
	struct spike_detector d = make_detector();
	for (int i = 0; i < 16; i++)
		spike_accept(&d, (double[]){6 - 0.1 * i + (i % 2 ? 0.01 : -0.01), 1, 1});
	const double next = 6 - 0.1 * 16, deviation = 0.02 * next; /* the floor */
	assert_true(fabs(spike_deviation(&d, SPIKE_LOSS, next)) < 0.2);
	assert_true(fabs(spike_deviation(&d, SPIKE_LOSS, next + 9 * deviation) - 9) < 0.2);
	for (int i = 0; i < 16; i++)
		spike_accept(&d, (double[]){4 + 0.1 * i, 1, 1});
	assert_same(spike_deviation(&d, SPIKE_LOSS, 4.75), 0); /* the median; 1.4826 MAD is 0.593 */
	assert_true(fabs(spike_deviation(&d, SPIKE_LOSS, 5.6) - 0.85 / 0.59304) < 1e-9);
	spike_detector_free(&d);
}

static void test_warmup_and_not_finite(void **state)
{
	(void)state;
	struct spike_detector d = make_detector();
	assert_int_equal(judge(&d, (double[]){1e30, 1e30}), SPIKE_NONE);
	assert_int_equal(judge(&d, (double[]){NAN, 1}), SPIKE_FOUND);
	assert_int_equal(judge(&d, (double[]){1, INFINITY}), SPIKE_FOUND);
	assert_int_equal(judge(&d, (double[]){1, -INFINITY}), SPIKE_FOUND);
	accept_ordinary(&d, 7);
	assert_int_equal(judge(&d, (double[]){1e30, 1}), SPIKE_NONE);
	accept_ordinary(&d, 1);
	assert_int_equal(judge(&d, (double[]){1e30, 1}), SPIKE_FOUND);
	assert_int_equal(judge(&d, (double[]){2, 1e30}), SPIKE_FOUND);
	assert_int_equal(judge(&d, (double[]){-1e30, 0}), SPIKE_NONE); /* one-sided */
	assert_int_equal(judge(&d, (double[]){2 + 2 * 0.02 * 7.9, 1}), SPIKE_NONE);
	assert_int_equal(judge(&d, (double[]){2 + 2 * 0.02 * 8.6, 1}), SPIKE_FOUND);
	spike_detector_free(&d);
}

/* A level that stays is accepted with the fifth spike, and not before; one that goes on rising, or that is not finite,
 * never. */
static void test_level_shift(void **state)
{
	(void)state;
	struct spike_detector d = make_detector();
	accept_ordinary(&d, 16);
	for (int i = 0; i < 4; i++)
		assert_int_equal(judge(&d, (double[]){3 + 0.1 * i, 1}), SPIKE_FOUND);
	assert_int_equal(judge(&d, (double[]){3, 1}), SPIKE_LEVEL_SHIFT);
	assert_int_equal(d.count, 4);
	spike_accept(&d, (double[]){3, 1, 0.01});
	accept_ordinary(&d, 11);
	assert_int_equal(judge(&d, (double[]){3.5, 1}), SPIKE_FOUND);
	spike_detector_free(&d);

	d = make_detector();
	accept_ordinary(&d, 16);
	for (int i = 0; i < 4; i++)
		assert_int_equal(judge(&d, (double[]){3, 1}), SPIKE_FOUND);
	assert_int_equal(judge(&d, (double[]){2, 1}), SPIKE_NONE); /* the run is over */
	for (int i = 0; i < 4; i++)
		assert_int_equal(judge(&d, (double[]){3, 1}), SPIKE_FOUND);
	assert_int_equal(judge(&d, (double[]){NAN, 1}), SPIKE_FOUND);
	for (int i = 0; i < 20; i++) /* always more than twice as far */
		assert_int_equal(judge(&d, (double[]){3 * pow(1.5, i), 1}), SPIKE_FOUND);
	for (int i = 0; i < 20; i++)
		assert_int_equal(judge(&d, (double[]){INFINITY, 1}), SPIKE_FOUND);
	spike_detector_free(&d);
}

static void test_skips(void **state)
{
	(void)state;
	struct spike_detector d = make_detector();
	assert_false(spike_skipped(&d, 1));
	assert_false(spike_skipped(&d, 2));
	assert_false(spike_skipped(&d, 3));
	assert_true(spike_skipped(&d, 16));  /* 1, 2, 3, 16: four of the last 16 */
	assert_false(spike_skipped(&d, 18)); /* 3, 16, 18 */
	assert_true(spike_skipped(&d, 18 + 0));
	spike_detector_clear(&d);
	for (int i = 0; i < 100; i++)
		assert_false(spike_skipped(&d, 6 * i)); /* never more than three of 16 */
	spike_detector_free(&d);
}

/* What a detector decides does not change when its state goes through JSON. */
static void test_state(void **state)
{
	(void)state;
	struct spike_detector a = make_detector();
	uint32_t random = 1;
	for (int i = 0; i < 300; i++) {
		struct spike_detector b = make_detector();
		json_t *saved = spike_detector_to_json(&a);
		assert_int_equal(spike_detector_from_json(&b, saved, "state"), 0);
		json_decref(saved);
		random = random * 1664525 + 1013904223;
		const double u = random / 4294967296.0, loss = i % 50 > 40 ? 4 + u : 2 + 0.02 * u,
				norm = i % 37 == 0 ? 50 : i % 101 == 100 ? NAN : 1 + u;
		const enum spike_verdict verdict = judge(&a, (double[]){loss, norm});
		assert_int_equal(judge(&b, (double[]){loss, norm}), verdict);
		if (verdict != SPIKE_FOUND) {
			spike_accept(&a, (double[]){loss, norm, u});
			spike_accept(&b, (double[]){loss, norm, u});
		} else {
			assert_int_equal(spike_skipped(&a, i), spike_skipped(&b, i));
		}
		json_t *left = spike_detector_to_json(&a), *right = spike_detector_to_json(&b);
		assert_true(json_equal(left, right));
		json_decref(left);
		json_decref(right);
		spike_detector_free(&b);
	}
	spike_detector_free(&a);
}

static void test_bad_state(void **state)
{
	(void)state;
	static const char *const bad[][2] = {
		{"{}", "`loss` is missing"},
		{"{'loss': [1], 'grad_norm': [1, 2], 'update_norm': [1], 'run_loss': [], 'run_grad_norm': [], 'skips': []}",
			"windows of 1, 2 and 1 values"},
		{"{'loss': ['a'], 'grad_norm': [1], 'update_norm': [1], 'run_loss': [], 'run_grad_norm': [], 'skips': []}",
			"`loss` has a string"},
		{"{'loss': [], 'grad_norm': [], 'update_norm': [], 'run_loss': [], 'run_grad_norm': [], 'skips': [1.5]}",
			"`skips` has a real number"},
	};
	for (int i = 0; i < COUNT(bad); i++) {
		struct spike_detector d = make_detector();
		char text[512];
		snprintf(text, sizeof text, "%s", bad[i][0]);
		for (char *c = text; *c; c++)
			*c = *c == '\'' ? '"' : *c;
		json_t *saved = json_loads(text, 0, NULL);
		assert_int_equal(spike_detector_from_json(&d, saved, "trainer.json"), -1);
		if (!strstr(error_text, bad[i][1]))
			fail_msg("%s: expected %s", error_text, bad[i][1]);
		json_decref(saved);
		spike_detector_free(&d);
	}
}

static int count_event(void *context, const json_t *event)
{
	int *n = context;
	assert_int_equal(json_integer_value(json_object_get(event, "step")), *n);
	assert_true(json_number_value(json_object_get(event, "time")) > 1.7e9);
	return ++*n, 0;
}

static void test_events(void **state)
{
	(void)state;
	struct event_log log;
	int n = 0;
	assert_int_equal(events_read(scratch, count_event, &n), 0);
	assert_int_equal(n, 0);
	assert_int_equal(events_open(&log, scratch), 0);
	event_write(&log, 0, "start", NULL);
	event_write(&log, 1, "spike", json_pack("{s:o, s:o}", "loss", json_number(NAN), "grad_norm", json_number(2)));
	events_close(&log);
	event_write(&log, 9, "lost", NULL); /* closed: nothing happens */
	FILE *f = fopen(log.path, "a");
	fputs("{\"time\": 1, \"step\": 2, \"ki", f);
	fclose(f);
	assert_int_equal(events_read(scratch, count_event, &n), 0);
	assert_int_equal(n, 2);
	assert_int_equal(events_open(&log, scratch), 0);
	event_write(&log, 2, "resume", NULL);
	events_close(&log);
	n = 0;
	assert_int_equal(events_read(scratch, count_event, &n), 0);
	assert_int_equal(n, 3);
}

/* Where the disk is full in the middle of an event, that event is lost, and not the file. */
static void test_event_cut_short(void **state)
{
	(void)state;
	struct event_log log;
	struct rlimit before, limit;
	struct stat st;
	int n = 0;
	assert_int_equal(events_open(&log, scratch), 0);
	assert_int_equal(ftruncate(log.fd, 0), 0);
	event_write(&log, 0, "start", NULL);
	assert_int_equal(fstat(log.fd, &st), 0);
	assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
	limit = before;
	limit.rlim_cur = st.st_size + 10;
	signal(SIGXFSZ, SIG_IGN);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
	event_write(&log, 1, "save_failed", NULL);
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
	event_write(&log, 1, "save", NULL);
	events_close(&log);
	if (events_read(scratch, count_event, &n) < 0)
		fail_msg("%s", error_text);
	assert_int_equal(n, 2);
}

/* ---- the queue ---- */

static struct batch_sample sample(int file, int64_t number, int attempts)
{
	return (struct batch_sample){.file = file, .number = number, .attempts = attempts};
}

/* Samples that are skipped come back: none in the next batch, all within the time, no two of few in the same batch; at
 * most half of a batch is old, the oldest first; the third time they are given back. */
static void test_queue(void **state)
{
	(void)state;
	enum { N = 8, WITHIN = 32 };
	struct retry_queue q = {0};
	struct batch_sample skipped[2 * N], batch[N];
	for (int i = 0; i < N; i++)
		skipped[i] = sample(i % 2, 100 + i, 0);
	assert_int_equal(retry_queue_add(&q, skipped, N, 7, 50, WITHIN), 0);
	assert_int_equal(q.count, N);
	retry_queue_draw(&q, batch, N, 7, 51);
	assert_int_equal(q.count, N);
	int came = 0, places = 0;
	for (int b = 52; b < 52 + WITHIN; b++) {
		int here = 0;
		retry_queue_draw(&q, batch, N, 7, b);
		for (int i = 0; i < N; i++)
			if (batch[i].file >= 0) {
				assert_true(batch[i].attempts == 1 && batch[i].due == b && batch[i].number >= 100);
				here++;
				places |= 1 << i;
			}
		assert_true(here <= 1);
		came += here;
	}
	assert_int_equal(came, N);
	assert_int_equal(q.count, 0);
	assert_true(places & (places - 1)); /* not always the same place */

	for (int i = 0; i < 2 * N; i++)
		skipped[i] = sample(0, i, i % 2);
	assert_int_equal(retry_queue_add(&q, skipped, 2 * N, 7, 1, 4), 0);
	for (int b = 7, from = 0; b < 11; b++, from += N / 2) { /* all are due */
		int64_t sum = 0;
		retry_queue_draw(&q, batch, N, 7, b);
		int old = 0;
		for (int i = 0; i < N; i++)
			if (batch[i].file >= 0)
				old++, sum += batch[i].number;
		assert_int_equal(old, N / 2);
		assert_int_equal(sum, 4 * from + 6);
	}
	assert_int_equal(q.count, 0);
	for (int i = 0; i < N; i++)
		skipped[i] = sample(0, i, i % 3);
	assert_int_equal(retry_queue_add(&q, skipped, N, 7, 1, 4), 2);
	assert_true(skipped[0].number == 2 && skipped[1].number == 5 && q.count == 6);
	retry_queue_draw(&q, batch, 1, 7, 100); /* one at least */
	assert_int_equal(batch[0].number, 0);
	retry_queue_free(&q);
}

static void test_queue_json(void **state)
{
	(void)state;
	static const int64_t taken[] = {10, 20, 5};
	struct retry_queue q = {0}, back = {0};
	struct batch_sample some[] = {sample(1, 19, 0), sample(0, 9, 1), sample(1, 4, 0), sample(1, 5, 1), sample(2, 4, 0)};
	retry_queue_add(&q, some, COUNT(some), 3, 77, 8);
	json_t *saved = retry_queue_to_json(&q);
	assert_int_equal(retry_queue_from_json(&back, saved, "here", 3, taken, 77), 0);
	assert_int_equal(back.count, q.count);
	assert_memory_equal(back.list, q.list, q.count * sizeof *q.list);
	json_decref(saved);
	/* file 0 is gone, the others changed places */
	struct batch_sample lost[COUNT(some)];
	assert_int_equal(retry_queue_remap(&back, (int[]){-1, 0, 1}, lost), 1);
	assert_true(lost[0].number == 9 && back.count == 4 && back.list[0].file == 0 && back.list[3].file == 1);
	json_t *list = samples_to_json(back.list, back.count);
	char *text = json_dumps(list, JSON_COMPACT);
	assert_string_equal(text, "[[0,4,5],[0,19,19],[1,4,4]]");
	free(text);
	json_decref(list);
	static const char *const bad[] = {
		"{}", "[1]", "[[0, 1, 1]]", "[[0, 1, 1, 80.5]]", "[[3, 1, 1, 80]]", "[[-1, 1, 1, 80]]", "[[0, 10, 1, 80]]",
		"[[0, -1, 1, 80]]", "[[0, 1, 0, 80]]", "[[0, 1, 3, 80]]", "[[0, 1, 1, 0]]", "[[0, 1, 1, 99999]]",
	};
	for (int i = 0; i < COUNT(bad); i++) {
		json_t *root = json_loads(bad[i], 0, NULL);
		if (retry_queue_from_json(&back, root, "here", 3, taken, 77) == 0)
			fail_msg("%s was read", bad[i]);
		expect_error("here: `queue`");
		json_decref(root);
	}
	retry_queue_free(&q);
	retry_queue_free(&back);
}

/* ---- a run ---- */

#define assert_done(call) do { if ((call) < 0) fail_msg("%s", error_text); } while (0)

enum { BATCH = 4, LENGTH = 8, WINDOWS = 3000 };

/* A run of a small model, of two files in which each id follows from the one before, in scratch/run. */
static void make_config(struct config *c, const char *run, const char *more)
{
	char yaml[4096];
	static uint16_t ids[WINDOWS * LENGTH + 1];
	for (int file = 0; file < 2; file++) {
		for (int i = 0; i < COUNT(ids); i++)
			ids[i] = (i * 7 + file) % 33;
		put_file(at("ids%d.bin", file), ids, sizeof ids);
	}
	char first[PATH_LEN], second[PATH_LEN];
	strcpy(first, at("ids0.bin")), strcpy(second, at("ids1.bin"));
	snprintf(yaml, sizeof yaml,
		"model: { hidden_size: 8, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1,\n"
		"  head_dim: 4, vocab_size: 33, num_experts: 4, num_experts_per_tok: 2, num_shared_experts: 1,\n"
		"  moe_intermediate_size: 4, initializer_range: 0.1, router: { warmup_steps: 20 } }\n"
		"data: { train: [{ path: %s, dtype: uint16, weight: 2 }, { path: %s, dtype: uint16 }], seq_len: %d }\n"
		"train: { output_dir: %s, steps: 240, micro_batch: 2, batch: %d }\nschedule: { peak_lr: 1.0e-2 }\n"
		"spikes: { window: 32, warmup: 16, loss_threshold: 6, grad_threshold: 12, max_skips: 4000 }\n%s", first,
		second, LENGTH, at("%s", run), BATCH, more);
	assert_done(config_load(c, put_string(at("run.yaml"), yaml), 0, NULL, false));
}

/* Whether a sample's targets are noise, always. */
static bool is_bad(const struct batch_sample *s)
{
	return (s->number * 2 + s->file) % 61 == 0;
}

/* Draws a batch, spoils the targets of its bad samples, and does the step. Some samples, and some batches whatever
 * is in them, make a loss that is not finite. */
static enum step_result spoiled_step(struct trainer *t, struct metrics *m, struct batch_sample samples[BATCH])
{
	assert_int_equal(trainer_next_batch(t), BATCH);
	memcpy(samples, t->samples, BATCH * sizeof *samples);
	for (int i = 0; i < BATCH; i++)
		for (int j = 0; j < LENGTH && is_bad(&t->samples[i]); j++)
			t->target[i * LENGTH + j] = (t->samples[i].number * 5 + j * j * 3) % 33;
	real *weight = &t->model.params.lm_head[7], before = *weight;
	const int64_t b = t->state.batches;
	bool infinite = b % 50 == 0 || (b > 200 && b < 206);
	for (int i = 0; i < BATCH; i++)
		infinite |= samples[i].number % 97 == 13;
	if (infinite)
		*weight = NAN;
	const enum step_result result = trainer_step(t, BATCH, m);
	if (result == STEP_SKIPPED)
		*weight = before;
	return result;
}

/* All that a step changes, in one block. */
static size_t everything(const struct trainer *t, uint8_t **out)
{
	const struct model *m = &t->model;
	const size_t w = m->table.num_elements * sizeof(real), s = m->table.num_state * sizeof(real),
			r = t->state.num_layers * sizeof(double), counters = 3 * sizeof(int64_t);
	uint8_t *p = *out = allocate(w + 2 * s + 2 * r + counters);
	memcpy(p, m->params.memory, w);
	memcpy(p + w, m->exp_avg, s);
	memcpy(p + w + s, m->exp_avg_sq, s);
	memcpy(p + w + 2 * s, t->state.router_mean, r);
	memcpy(p + w + 2 * s + r, t->state.router_std, r);
	memcpy(p + w + 2 * s + 2 * r, (int64_t[]){t->state.step, t->state.samples, t->state.tokens}, counters);
	return w + 2 * s + 2 * r + counters;
}

enum fate { NEVER_DRAWN, WAITING, TRAINED, DROPPED };

/* Each sample is trained once, or dropped, or waits; and a batch that is skipped leaves everything as it was. Stopped
 * and continued at any time, the run is the same to the bit. */
static void each_sample_once(void **state)
{
	(void)state;
	static const struct { const char *run, *more; int every; } cases[] = {
		{"straight", "", 0}, {"often", "", 19}, {"skip", "  action: skip\n", 0},
	};
	uint8_t *final[COUNT(cases)];
	size_t size = 0;
	int64_t drawn[COUNT(cases)];
	for (int k = 0; k < COUNT(cases); k++) {
		struct config c;
		struct trainer t;
		static enum fate fate[2][WINDOWS];
		int64_t next[2] = {0}, count[4] = {0}, skips = 0, retries = 0;
		memset(fate, 0, sizeof fate);
		make_config(&c, cases[k].run, "");
		if (*cases[k].more)
			c.spikes.action = SPIKES_SKIP;
		assert_done(trainer_init(&t, &c));
		while (t.state.step < c.train.steps) {
			struct metrics m;
			uint8_t *before, *after;
			everything(&t, &before);
			struct batch_sample samples[BATCH];
			const enum step_result result = spoiled_step(&t, &m, samples);
			size = everything(&t, &after);
			assert_true(result == STEP_TAKEN || result == STEP_SKIPPED);
			if (result == STEP_SKIPPED)
				assert_memory_equal(before, after, size);
			free(before), free(after);
			skips += result == STEP_SKIPPED;
			retries += result == STEP_TAKEN && m.lr < 0.5e-2;
			for (int i = 0; i < BATCH; i++) {
				enum fate *f = &fate[samples[i].file][samples[i].number];
				assert_int_equal(*f, samples[i].attempts ? WAITING : NEVER_DRAWN);
				if (*f == NEVER_DRAWN)
					assert_int_equal(samples[i].number, next[samples[i].file]++);
				*f = result == STEP_TAKEN ? TRAINED : DROPPED;
			}
			for (int64_t i = 0; i < t.retry.count; i++) {
				enum fate *f = &fate[t.retry.list[i].file][t.retry.list[i].number];
				assert_true(*f == WAITING || (*f == DROPPED && result == STEP_SKIPPED));
				*f = WAITING;
			}
			if (cases[k].every && t.state.batches % cases[k].every == 0) {
				t.config.checkpoint.keep = 1;
				const int64_t at_step = t.state.step, batches = t.state.batches;
				if (exists(at("%s/step-%07d", cases[k].run, (int)at_step)))
					continue; /* it is there, from before batches that were skipped since */
				assert_done(trainer_save(&t));
				trainer_free(&t);
				assert_done(trainer_init(&t, &c));
				assert_true(t.state.step == at_step && t.state.batches == batches);
			}
		}
		for (int file = 0; file < 2; file++) {
			assert_int_equal(next[file], t.state.sources[file].taken);
			for (int64_t i = 0; i < next[file]; i++)
				count[fate[file][i]]++;
		}
		printf("%s: %d batches, %d skipped, %d at a low rate; samples: %d trained, %d dropped, %d wait\n", cases[k].run,
				(int)t.state.batches, (int)skips, (int)retries, (int)count[TRAINED], (int)count[DROPPED],
				(int)count[WAITING]);
		assert_int_equal(count[NEVER_DRAWN], 0);
		assert_int_equal(count[TRAINED], t.state.samples);
		assert_int_equal(count[WAITING], t.retry.count);
		assert_true(skips > 5 && count[DROPPED] > 0 && (k == 2 || retries > 0));
		everything(&t, &final[k]);
		drawn[k] = t.state.batches;
		trainer_free(&t);
	}
	assert_memory_equal(final[0], final[1], size);
	assert_int_equal(drawn[0], drawn[1]);
	assert_true(memcmp(final[0], final[2], size));
	for (int k = 0; k < COUNT(cases); k++)
		free(final[k]);
}

int main(void)
{
	kernels_init(false);
	const struct CMUnitTest tests[] = {
		TEST(test_deviation), TEST(test_trend), TEST(test_warmup_and_not_finite), TEST(test_level_shift),
		TEST(test_skips),
		TEST(test_state), TEST(test_bad_state), TEST(test_events), TEST(test_event_cut_short),
		TEST(test_queue), TEST(test_queue_json),
		TEST(each_sample_once),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
