/* The detector of spikes: against plain statistics, its borders, new levels, its state; and events.jsonl. */
#define _GNU_SOURCE
#include "tests/test.h"

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

static void test_warmup_and_not_finite(void **state)
{
	(void)state;
	struct spike_detector d = make_detector();
	assert_int_equal(spike_judge(&d, (double[]){1e30, 1e30}), SPIKE_NONE);
	assert_int_equal(spike_judge(&d, (double[]){NAN, 1}), SPIKE_FOUND);
	assert_int_equal(spike_judge(&d, (double[]){1, INFINITY}), SPIKE_FOUND);
	assert_int_equal(spike_judge(&d, (double[]){1, -INFINITY}), SPIKE_FOUND);
	accept_ordinary(&d, 7);
	assert_int_equal(spike_judge(&d, (double[]){1e30, 1}), SPIKE_NONE);
	accept_ordinary(&d, 1);
	assert_int_equal(spike_judge(&d, (double[]){1e30, 1}), SPIKE_FOUND);
	assert_int_equal(spike_judge(&d, (double[]){2, 1e30}), SPIKE_FOUND);
	assert_int_equal(spike_judge(&d, (double[]){-1e30, 0}), SPIKE_NONE); /* one-sided */
	assert_int_equal(spike_judge(&d, (double[]){2 + 2 * 0.02 * 7.9, 1}), SPIKE_NONE);
	assert_int_equal(spike_judge(&d, (double[]){2 + 2 * 0.02 * 8.6, 1}), SPIKE_FOUND);
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
		assert_int_equal(spike_judge(&d, (double[]){3 + 0.1 * i, 1}), SPIKE_FOUND);
	assert_int_equal(spike_judge(&d, (double[]){3, 1}), SPIKE_LEVEL_SHIFT);
	assert_int_equal(d.count, 4);
	spike_accept(&d, (double[]){3, 1, 0.01});
	accept_ordinary(&d, 11);
	assert_int_equal(spike_judge(&d, (double[]){3.5, 1}), SPIKE_FOUND);
	spike_detector_free(&d);

	d = make_detector();
	accept_ordinary(&d, 16);
	for (int i = 0; i < 4; i++)
		assert_int_equal(spike_judge(&d, (double[]){3, 1}), SPIKE_FOUND);
	assert_int_equal(spike_judge(&d, (double[]){2, 1}), SPIKE_NONE); /* the run is over */
	for (int i = 0; i < 4; i++)
		assert_int_equal(spike_judge(&d, (double[]){3, 1}), SPIKE_FOUND);
	assert_int_equal(spike_judge(&d, (double[]){NAN, 1}), SPIKE_FOUND);
	for (int i = 0; i < 20; i++) /* always more than twice as far */
		assert_int_equal(spike_judge(&d, (double[]){3 * pow(1.5, i), 1}), SPIKE_FOUND);
	for (int i = 0; i < 20; i++)
		assert_int_equal(spike_judge(&d, (double[]){INFINITY, 1}), SPIKE_FOUND);
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
		const enum spike_verdict verdict = spike_judge(&a, (double[]){loss, norm});
		assert_int_equal(spike_judge(&b, (double[]){loss, norm}), verdict);
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

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_deviation), TEST(test_warmup_and_not_finite), TEST(test_level_shift), TEST(test_skips),
		TEST(test_state), TEST(test_bad_state), TEST(test_events),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
