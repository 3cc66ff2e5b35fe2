/* What health_check and slow_ranks_compare find on one rank, and what they write. What several ranks find is in
 * test_faults.sh. */
#define _GNU_SOURCE
#include "tests/test.h"

#include "training/health.h"

#include <math.h>

static const struct model_config shape = {.hidden_size = 8, MODEL_DEFAULTS,
		.num_hidden_layers = 1, .num_attention_heads = 2,
		.num_key_value_heads = 2, .head_dim = 4, .vocab_size = 16, .num_experts = 2, .num_experts_per_tok = 1,
		.moe_intermediate_size = 4};

/* The last event of the kind that is looked for. */
static json_t *last;
static int kept_kind(void *context, const json_t *event)
{
	const char *kind = *(const char **)context;
	if (!strcmp(json_string_value(json_object_get(event, "kind")), kind)) {
		json_decref(last);
		last = json_deep_copy(event);
	}
	return 0;
}

/* The last event of a kind; NULL when there is none. */
static const json_t *last_event(const char *kind)
{
	json_decref(last);
	last = NULL;
	assert_int_equal(events_read(scratch, kept_kind, &kind), 0);
	return last;
}

static void test_computed_twice(void **state)
{
	(void)state;
	struct event_log log;
	struct parameter_table table;
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	assert_int_equal(events_open(&log, scratch), 0);
	assert_int_equal(parameter_table_init(&table, &shape, &alone), 0);
	real *weights = allocate(table.num_elements * sizeof *weights);
	const int64_t counters[] = {1, 2};
	struct health_input in = {.table = &table, .config = &shape, .weights = weights,
			.values = &(struct replicated){"counters", counters, sizeof counters}, .num_values = 1, .loss = {1.5, 1.5}};
	assert_int_equal(health_check(&in, &log, 7), 0);
	assert_null(last_event("miscomputed"));
	in.loss[0] = in.loss[1] = NAN; /* the same bits: that is no fault of the machine */
	assert_int_equal(health_check(&in, &log, 8), 0);
	assert_null(last_event("miscomputed"));
	in.loss[0] = 1.5;
	in.loss[1] = nextafter(1.5, 2);
	assert_int_equal(health_check(&in, &log, 9), 0); /* named, and training goes on */
	const json_t *e = last_event("miscomputed");
	assert_non_null(e);
	assert_int_equal(json_integer_value(json_object_get(e, "step")), 9);
	assert_int_equal(json_integer_value(json_object_get(e, "rank")), 0);
	assert_true(fabs(json_real_value(json_object_get(e, "difference")) / (in.loss[1] - in.loss[0]) - 1) < 1e-12);
	assert_null(last_event("replicas_differ"));
	parameter_table_free(&table);
	free(weights);
	events_close(&log);
	json_decref(last);
	last = NULL;
}

/* Compares the pace of four ranks at a step. */
static void pace(struct slow_ranks *s, const struct event_log *log, int64_t step, double a, double b, double c,
		double d)
{
	slow_ranks_compare(s, (double[]){a, b, c, d}, 4, false, log, step);
}

static int64_t step_of(const json_t *event)
{
	return event ? json_integer_value(json_object_get(event, "step")) : -1;
}

static void test_slow(void **state)
{
	(void)state;
	struct event_log log;
	struct slow_ranks s = {0};
	assert_int_equal(events_open(&log, scratch), 0);
	pace(&s, &log, 50, 1, 1.29, 1, 1.1);
	pace(&s, &log, 100, 1, 1.29, 1.1, 1);
	pace(&s, &log, 150, 1, 1, 1, 9); /* one long pause */
	pace(&s, &log, 200, 1, 1, 0, 1); /* a rank without work is neither slow nor the measure */
	pace(&s, &log, 250, 0, 0, 0, 1);
	pace(&s, &log, 300, 0, 0, 0, 1);
	assert_int_equal(step_of(last_event("slow_rank")), -1);
	pace(&s, &log, 350, 1, 1, 1.6, 1);
	pace(&s, &log, 400, 1, 1, 1.6, 1);
	const json_t *e = last_event("slow_rank");
	assert_int_equal(step_of(e), 400);
	assert_int_equal(json_integer_value(json_object_get(e, "rank")), 2);
	assert_true(fabs(json_real_value(json_object_get(e, "ratio")) - 1.6) < 1e-12);
	assert_true(fabs(json_real_value(json_object_get(e, "expected_loss")) - 0.375) < 1e-12);
	for (int64_t step = 450; step < 600; step += 50)
		pace(&s, &log, step, 1, 1, 1.6, 1);
	assert_int_equal(step_of(last_event("slow_rank")), 400); /* told once */
	assert_int_equal(step_of(last_event("slow_rank_over")), -1);
	pace(&s, &log, 600, 1, 1, 1.2, 1);
	assert_int_equal(step_of(last_event("slow_rank_over")), 600);
	for (int64_t step = 650; step < 1500; step += 50) /* again, but 1000 steps have not passed; another rank is told */
		pace(&s, &log, step, step < 1000 ? 1 : 2, 1, 1.6, 1);
	assert_int_equal(step_of(last_event("slow_rank")), 1400);
	assert_int_equal(step_of(last_event("slow_rank_over")), 600);
	slow_ranks_free(&s);
	/* of two ranks the faster one is the measure */
	for (int64_t step = 2000; step < 2101; step += 50)
		slow_ranks_compare(&s, (double[]){1.4, 1}, 2, false, &log, step);
	assert_int_equal(step_of(last_event("slow_rank")), 2050);
	slow_ranks_free(&s);
	events_close(&log);
	json_decref(last);
	last = NULL;
}

int main(void)
{
	const struct CMUnitTest tests[] = {TEST(test_computed_twice), TEST(test_slow)};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
