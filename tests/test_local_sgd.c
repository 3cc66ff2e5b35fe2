/* Local SGD on one rank: weights of the replicas, samples that wait, what the checkpoint remembers. The outer step
 * itself is in test_local.sh. */
#define _GNU_SOURCE
#include "tests/test.h"

#include "training/local_sgd.h"

static const struct local_options options = {.steps = 8, .outer_lr = 0.8, .outer_momentum = 0.85, .penalty = true,
		.clip = 10, .anomaly_deviations = 3, .anomaly_decay = 0.98, .anomaly_warmup = 4};

/* The weights are softmax(-norm / mean norm); numbers of Python 3: [exp(-x / 2) / z for x in (1, 2, 3)]. */
static void test_weights(void **state)
{
	(void)state;
	struct norm_statistics s[3] = {0};
	double weight[3];
	assert_int_equal(replica_weights(weight, s, (double[]){1, 2, 3}, NULL, 3, &options), 0);
	const double expected[] = {0.50648039, 0.30719589, 0.18632372};
	for (int r = 0; r < 3; r++)
		assert_true(fabs(weight[r] - expected[r]) < 1e-8);
	assert_same(s[2].mean, 3); /* begins with the first norm */
	assert_same(s[2].variance, 0);
	struct local_options plain = options;
	plain.penalty = false;
	replica_weights(weight, s, (double[]){1, 2, NAN}, NULL, 3, &plain);
	assert_true(weight[0] == 0.5 && weight[1] == 0.5 && weight[2] == 0);
	assert_int_equal(replica_weights(weight, s, (double[]){0, 0, 0}, NULL, 3, &options), 0);
	assert_true(weight[0] == weight[2] && fabs(weight[0] - 1.0 / 3) < 1e-15);
}

/* A norm far above the earlier ones of its replica sets it aside, once so many are known; a small one never does. */
static void test_set_aside(void **state)
{
	(void)state;
	struct norm_statistics s[2] = {0};
	double weight[2];
	assert_int_equal(replica_weights(weight, s, (double[]){9, 1}, NULL, 2, &options), 0); /* too early */
	memset(s, 0, sizeof s);
	for (int i = 0; i < 8; i++) /* means 1 and 5, standard deviations 0.1 */
		assert_int_equal(0, replica_weights(weight, s, (double[]){i % 2 ? 1.1 : 0.9, i % 2 ? 5.1 : 4.9}, NULL, 2,
				&options));
	assert_true(fabs(s[0].mean - 1) < 1e-12 && fabs(s[0].variance - 0.01) < 1e-12);
	const struct norm_statistics before = s[0];
	assert_int_equal(replica_weights(weight, s, (double[]){1.31, 5}, NULL, 2, &options), 1);
	assert_true(weight[0] == 0 && weight[1] == 1);
	assert_true(s[0].mean == before.mean && s[0].count == before.count && s[0].in_row == 1);
	assert_int_equal(replica_weights(weight, s, (double[]){INFINITY, 5}, NULL, 2, &options), 1);
	assert_int_equal(replica_weights(weight, s, (double[]){1.29, 0.1}, NULL, 2, &options), 0);
	assert_int_equal(s[0].in_row, 0);
	assert_int_equal(replica_weights(weight, s, (double[]){NAN, 50}, NULL, 2, &options), 2);
	assert_true(weight[0] == 0 && weight[1] == 0);
	/* who is set aside as a whole is so in each block, and its norm there counts nowhere */
	const struct norm_statistics first = s[0];
	assert_int_equal(replica_weights(weight, s, (double[]){1, 1}, (double[]){0, 1}, 2, &options), 1);
	assert_true(weight[0] == 0 && weight[1] == 1 && !memcmp(&first, &s[0], sizeof first));
}

/* As many in a row as the warm-up has are a new level, not an anomaly: a run must not stand still for ever. */
static void test_new_level(void **state)
{
	(void)state;
	struct norm_statistics s[1] = {0};
	double weight[1];
	for (int i = 0; i < 6; i++)
		replica_weights(weight, s, (double[]){1}, NULL, 1, &options);
	for (int i = 0; i < 4; i++)
		assert_int_equal(replica_weights(weight, s, (double[]){2}, NULL, 1, &options), 1);
	assert_int_equal(replica_weights(weight, s, (double[]){2}, NULL, 1, &options), 0);
	assert_true(s[0].mean == 2 && s[0].count == 1);
}

/* Numbers of torch.optim.SGD([w], lr=0.8, momentum=0.85, nesterov=True) with the gradients -1, -1, 0.5, worked out by
 * hand: b = 1, 1.85, 1.0725; w = 0.8 (1 + 0.85), + 0.8 (1 + 0.85 1.85), + 0.8 (-0.5 + 0.85 1.0725). */
static void test_outer_update(void **state)
{
	(void)state;
	real w[1] = {0}, b[1] = {0};
	outer_update(w, b, (real[]){2}, 1, 0.5, &options);
	assert_true(fabs(w[0] - 1.48) < 1e-6 && b[0] == 1);
	outer_update(w, b, (real[]){1}, 1, 1, &options);
	assert_true(fabs(w[0] - 3.538) < 1e-6);
	outer_update(w, b, (real[]){-0.5}, 1, 1, &options);
	assert_true(fabs(w[0] - 3.8673) < 1e-6 && fabs(b[0] - 1.0725) < 1e-6);
}

/* The mean is scaled down to the norm local.clip, never up. */
static void test_clip(void **state)
{
	(void)state;
	struct local_options o = options;
	assert_true(clip_scale(99, &o) == 1 && clip_scale(100, &o) == 1 && clip_scale(1600, &o) == 0.25);
	o.clip = 0; /* off */
	assert_true(clip_scale(1600, &o) == 1);
	o.clip = 10, o.penalty = false;
	assert_true(clip_scale(1600, &o) == 1);
}

/* Makes what two replicas of a model with one block remember; no part that needs other ranks. */
static struct local_sgd make(int replicas)
{
	return (struct local_sgd){.options = options, .replicas = replicas, .num_blocks = 1,
			.statistics = calloc(2 * (size_t)replicas, sizeof(struct norm_statistics)),
			.counts = calloc(replicas, sizeof(int64_t))};
}

static void test_remembers(void **state)
{
	(void)state;
	struct local_sgd s = make(2), t = make(2), u = make(3);
	for (int i = 0; i < 4; i++)
		s.statistics[i] = (struct norm_statistics){.mean = i + 0.1, .variance = i / 3.0, .count = i, .in_row = 1};
	s.synchronisations = 7, s.carry = 1, s.counts[0] = 30, s.counts[1] = 25;
	const struct batch_sample drawn[] = {{.file = 1, .number = 5}, {.file = 1, .number = 6}, {.file = 0, .number = 9},
			{.file = 1, .number = 4}};
	local_sgd_record(&s, drawn, 2);
	local_sgd_put_back(&s, 2);
	s.pending.taken = 1;
	local_sgd_drop_taken(&s);
	s.num_drawn = 0;
	local_sgd_record(&s, drawn, 4);
	local_sgd_put_back(&s, 4); /* before those that waited already: 5 6 | 9 | 4 | 6 */
	json_t *json = local_sgd_to_json(&s);
	char *text = json_dumps(json_object_get(json, "pending"), JSON_COMPACT);
	assert_string_equal(text, "[[1,5,6],[0,9,9],[1,4,4],[1,6,6]]");
	free(text);
	assert_int_equal(local_sgd_from_json(&t, json, "here", 2), 0);
	assert_true(t.synchronisations == 7 && t.carry == 1 && t.counts[1] == 25 && t.pending.count == 5);
	assert_memory_equal(s.statistics, t.statistics, 4 * sizeof *s.statistics);
	for (int i = 0; i < 5; i++)
		assert_memory_equal(&s.pending.list[i], &t.pending.list[i], sizeof *s.pending.list);
	/* three replicas take the statistics of 0, 1, 0 */
	assert_int_equal(local_sgd_from_json(&u, json, "here", 2), 0);
	assert_same(u.statistics[2].mean, s.statistics[0].mean);
	assert_same(u.statistics[4].mean, s.statistics[3].mean);
	assert_int_equal(u.counts[0], 0);
	local_sgd_remap(&t, (int[]){-1, 0});
	assert_true(t.pending.count == 4 && t.pending.list[2].file == 0 && t.pending.list[2].number == 4);
	/* what no run writes */
	assert_int_equal(local_sgd_from_json(&u, json, "here", 1), -1);
	json_object_set_new(json, "carry", json_integer(2));
	assert_int_equal(local_sgd_from_json(&u, json, "here", 2), -1);
	json_object_set_new(json, "carry", json_integer(1));
	json_array_remove(json_object_get(json, "statistics"), 0);
	assert_int_equal(local_sgd_from_json(&u, json, "here", 2), -1);
	json_decref(json);
	local_sgd_free(&s);
	local_sgd_free(&t);
	local_sgd_free(&u);
}

/* A run without replicas remembers the samples that wait, and nothing else; so does one with replicas that follows. */
static void test_waits_without_replicas(void **state)
{
	(void)state;
	struct local_sgd s = make(2), one = {.replicas = 1};
	const struct batch_sample drawn[] = {{.file = 0, .number = 5}, {.file = 0, .number = 6}};
	s.synchronisations = 7;
	local_sgd_record(&s, drawn, 2);
	local_sgd_put_back(&s, 2);
	json_t *json = local_sgd_to_json(&s);
	assert_int_equal(local_sgd_from_json(&one, json, "here", 1), 0);
	json_decref(json);
	assert_int_equal(one.pending.count, 2);
	one.pending.taken = 1;
	json = local_sgd_to_json(&one);
	char *text = json_dumps(json, JSON_COMPACT);
	assert_string_equal(text, "{\"replicas\":1,\"pending\":[[0,6,6]]}");
	free(text);
	assert_int_equal(local_sgd_from_json(&s, json, "here", 1), 0);
	assert_true(s.pending.count == 1 && s.pending.list[0].number == 6 && s.synchronisations == 0);
	json_decref(json);
	one.pending.taken = 2;
	assert_null(local_sgd_to_json(&one));
	assert_int_equal(local_sgd_from_json(&one, NULL, "here", 1), 0);
	assert_int_equal(one.pending.count, 0);
	local_sgd_free(&s);
	local_sgd_free(&one);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_weights), cmocka_unit_test(test_set_aside), cmocka_unit_test(test_new_level),
		cmocka_unit_test(test_outer_update), cmocka_unit_test(test_clip), cmocka_unit_test(test_remembers),
		cmocka_unit_test(test_waits_without_replicas),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
