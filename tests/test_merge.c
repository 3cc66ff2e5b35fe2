/*
 * test_merge.c - commands/merge.c: the weights against runs of plain SGD with and without a decay, and checkpoints made
 * by hand of such a run, merged by the command.
 */
#define _GNU_SOURCE
#include "ling.h"
#include "commands/merge.h"
#include "commands/options.h"

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test.h"

enum { SHAPES = DECAY_INVERSE_SQRT + 1 };
static const char *const shape_names[SHAPES] = {"linear", "cosine", "1-sqrt", "inverse_sqrt"};

/* A number in -1 .. 1 that depends on i alone. */
static double some_number(int64_t i)
{
	return sin(12.9898 * (double)(i + 1));
}

/* The rate of update `step` over that before the decay, in a run with a decay that lasts from step `begin` to `end`. */
static double factor(int64_t step, int64_t begin, int64_t end, enum decay_shape shape, double final)
{
	static struct config c;
	c.schedule.peak_lr = 3e-3;
	c.schedule.decay.steps = end - begin;
	c.schedule.decay.shape = shape;
	c.schedule.decay.final_lr = final * 3e-3;
	return learning_rate(&c, step, end, 0) / 3e-3;
}

/* The weights written by hand where they are short. */
static void weights_by_hand(void **state)
{
	(void)state;
	double w[5];
	/* factors 3/4, 1/2, 1/4, 0 of updates 11 .. 14 */
	decay_weights(w, (int64_t[]){10, 11, 12, 13, 14}, 5, DECAY_LINEAR, 0);
	for (int i = 0; i < 5; i++)
		assert_same(w[i], i < 4 ? 0.25 : 0);
	/* of the first two updates 5/8, of the last two 1/8 */
	decay_weights(w, (int64_t[]){10, 12, 14}, 3, DECAY_LINEAR, 0);
	assert_same(w[0], 0.375);
	assert_same(w[1], 0.5);
	assert_same(w[2], 0.125);
	/* 1/2, 1/2 and then 0: 1 - sqrt(1/4), 1 - sqrt(1) */
	decay_weights(w, (int64_t[]){0, 1, 4}, 3, DECAY_1_SQRT, 0);
	assert_true(fabs(w[0] - 0.5) < 1e-15 && fabs(w[2] - (2 - sqrt(0.5) - sqrt(0.75)) / 3) < 1e-15);
	/* final 1: no decay, and the last checkpoint alone counts */
	for (int shape = 0; shape < SHAPES; shape++) {
		decay_weights(w, (int64_t[]){3, 7, 20}, 3, shape, 1);
		assert_true(fabs(w[0]) < 1e-15 && fabs(w[1]) < 1e-15 && fabs(w[2] - 1) < 1e-15);
	}
}

/* SGD whose gradients are given. With a checkpoint after each step, the merged run is the decayed one for any
 * gradients; where checkpoints are apart, for gradients that are the same between two of them. */
static void weights_of_sgd(void **state)
{
	(void)state;
	static const int64_t steps[][6] = {{700, 701, 702, 703, 704, 705}, {50, 51, 60, 61, 100, 300},
		{0, 20, 40, 60, 80, 100}};
	static const double finals[] = {0, 0.1, 0.5};
	for (int shape = 0; shape < SHAPES; shape++)
		for (int k = 0; k < COUNT(steps) * COUNT(finals); k++) {
			const int64_t *s = steps[k / COUNT(finals)];
			const double final = finals[k % COUNT(finals)];
			double w[6], constant = 5, decayed = 5, merged = 0, sum = 0;
			if (shape == DECAY_INVERSE_SQRT && final == 0)
				continue;
			decay_weights(w, s, 6, shape, final);
			for (int i = 0; i < 6; i++) {
				for (int64_t t = i ? s[i - 1] + 1 : s[0] + 1; i && t <= s[i]; t++) {
					const double update = 0.01 * some_number(i);
					constant -= update;
					decayed -= update * factor(t, s[0], s[5], shape, final);
				}
				assert_true(w[i] > -1e-15);
				merged += w[i] * constant;
				sum += w[i];
			}
			if (!(fabs(merged - decayed) < 1e-12) || !(fabs(sum - 1) < 1e-14))
				fail_msg("%s to %g, steps %lld ..: merged %.17g, decayed %.17g; the weights' sum less 1: %g",
						shape_names[shape], final, (long long)s[0], merged, decayed, sum - 1);
		}
}

/* ---- checkpoints by hand ---- */

enum { CHECKPOINTS = 4, MAX_ELEMENTS = 400 };
static const int64_t saved[CHECKPOINTS] = {8, 10, 15, 16};

static const struct model_config small = {.hidden_size = 4, .num_hidden_layers = 1, .num_attention_heads = 2,
	.num_key_value_heads = 1, .head_dim = 2, .vocab_size = 5, .num_experts = 2, .num_experts_per_tok = 1,
	.num_shared_experts = 1, .moe_intermediate_size = 3, .max_position_embeddings = 16, .norm_topk_prob = true,
	.norm_head = true, .rope_theta = 1e4, .rms_norm_eps = 1e-5, .initializer_range = 0.02};

/* The update of a weight at a step between checkpoints i - 1 and i. */
static double update_of(int64_t weight, int i)
{
	return 0.05 * some_number(1000 * weight + i);
}

/* Weight number `weight` of the run, before the decay, and with one. shape SHAPES: at a constant rate. */
static double weight_at(int64_t weight, int checkpoint, int shape, double final)
{
	double x = some_number(weight);
	for (int i = 1; i <= checkpoint; i++)
		for (int64_t t = saved[i - 1] + 1; t <= saved[i]; t++)
			x -= update_of(weight, i) * (shape == SHAPES ? 1 : factor(t, saved[0], saved[CHECKPOINTS - 1], shape,
					final));
	return x;
}

/* Writes a checkpoint, in float64 so that no rounding is in the way. */
static void save_by_hand(const char *run, int checkpoint)
{
	static struct config c;
	char dir[PATH_LEN], path[PATH_LEN];
	double mean = 0, std = 1;
	int n;
	struct parameter *p = global_parameters(&small, &n);
	struct named_tensor tensors[64];
	enum dtype types[64];
	assert_true(n <= 64);
	c.model = small;
	strcpy(c.data.tokenizer, "none");
	assert_int_equal(path_copy(c.train.output_dir, run), 0);
	const struct trainer_state s = {.step = saved[checkpoint], .tokens = 100 * saved[checkpoint], .num_layers = 1,
		.router_mean = &mean, .router_std = &std};
	assert_int_equal(checkpoint_begin(&c, &s, dir), 0);
	for (int i = 0; i < n; i++) {
		tensors[i] = (struct named_tensor){.name = p[i].name, .rows = p[i].rows, .cols = p[i].cols};
		types[i] = F64;
	}
	shard_path(path, dir, "model", 0, 1);
	struct safetensors_writer *w = safetensors_create_typed(path, tensors, types, n);
	assert_non_null(w);
	int64_t weight = 0;
	for (int i = 0; i < n; i++)
		for (int64_t k = 0; k < named_tensor_size(&tensors[i]); k++) {
			const double x = weight_at(weight++, checkpoint, SHAPES, 0);
			assert_int_equal(safetensors_append_bytes(w, (const uint8_t *)&x, 8, 8), 0);
		}
	assert_int_equal(safetensors_finish(w), 0);
	shard_path(path, dir, "optimizer", 0, 1);
	assert_int_equal(safetensors_write(path, NULL, 0), 0);
	if (checkpoint_commit(&c, &s, dir, 1) < 0)
		fail_msg("%s", error_text);
	free(p);
}

/* Runs `ling merge` with these words. Returns its exit status. */
static int merge(const char *first, ...)
{
	char *words[32] = {"ling merge", (char *)first};
	int n = 2;
	va_list args;
	va_start(args, first);
	while ((words[n] = va_arg(args, char *)))
		n++;
	va_end(args);
	struct command_line line = {0};
	command_line_read(&line, &merge_command, n, words);
	const int status = merge_command.run(&line);
	command_line_free(&line);
	return status;
}

/* Compares a merged model with the numbers that expected() gives: they are those, rounded to float once; where the sum
 * in double fell beside the middle of two floats, the neighbour. */
static void check_merged(const char *dir, double (*expected)(int64_t weight, int shape), int shape)
{
	int n, neighbours = 0;
	struct parameter *p = global_parameters(&small, &n);
	struct tensors *w = tensors_open(dir, "model");
	int64_t weight = 0;
	if (!w)
		fail_msg("%s", error_text);
	assert_int_equal(tensors_count(w), n);
	for (int i = 0; i < n; i++) {
		real found[MAX_ELEMENTS];
		struct named_tensor a = {.name = p[i].name, .rows = p[i].rows, .cols = p[i].cols, .data = found};
		assert_true(named_tensor_size(&a) <= MAX_ELEMENTS);
		assert_int_equal(tensors_read(w, &a), 0);
		assert_int_equal(tensor_find(w, p[i].name)->dtype, F32);
		for (int64_t k = 0; k < named_tensor_size(&a); k++, weight++) {
			const double x = expected(weight, shape);
			neighbours += found[k] != (float)x;
			if (found[k] != (float)x && !(fabs(found[k] - x) < 6e-8 * fabs(x) + 1e-15))
				fail_msg("%s: element %lld of %s is %.9g, expected %.17g", dir, (long long)k, p[i].name,
						(double)found[k], x);
		}
	}
	assert_true(weight > 100 && neighbours <= 1);
	tensors_close(w);
	free(p);
}

static double decayed_weight(int64_t weight, int shape)
{
	return weight_at(weight, CHECKPOINTS - 1, shape, 0.25);
}

static double mean_weight(int64_t weight, int shape)
{
	double sum = 0;
	for (int i = 0; i < CHECKPOINTS; i++)
		sum += weight_at(weight, i, SHAPES, 0);
	return sum / CHECKPOINTS + 0 * shape;
}

static double given_weight(int64_t weight, int shape)
{
	const double first = weight_at(weight, 0, SHAPES, 0), third = weight_at(weight, 2, SHAPES, 0);
	return (7 * weight_at(weight, 3, SHAPES, 0) - first + 2 * third) / 8 + 0 * shape;
}

/* Whether two merged models are the same, bit for bit, config.json too. */
static void check_equal(const char *a, const char *b)
{
	static const char *const files[] = {"model.safetensors", "config.json"};
	for (int i = 0; i < COUNT(files); i++) {
		char x[PATH_LEN], y[PATH_LEN];
		size_t n, m;
		snprintf(x, sizeof x, "%s/%s", a, files[i]);
		snprintf(y, sizeof y, "%s/%s", b, files[i]);
		uint8_t *p = get_file(x, &n), *q = get_file(y, &m);
		if (n != m || memcmp(p, q, n))
			fail_msg("%s and %s differ", x, y);
		free(p);
		free(q);
	}
}

static void merged_is_decayed(void **state)
{
	(void)state;
	for (int i = 0; i < CHECKPOINTS; i++)
		save_by_hand(at("run"), i);
	char *s[CHECKPOINTS];
	for (int i = 0; i < CHECKPOINTS; i++)
		s[i] = strdup(at("run/step-%07d", (int)saved[i]));
	for (int shape = 0; shape < SHAPES; shape++) {
		char *out = at("merged-%d", shape), *other = at("other-%d", shape), *newest = at("newest-%d", shape);
		if (merge(s[0], s[1], s[2], s[3], "--out", out, "--decay", shape_names[shape], "--final", "0.25", NULL))
			fail_msg("%s", error_text);
		check_merged(out, decayed_weight, shape);
		/* whatever the order of the arguments */
		assert_int_equal(merge("--decay", shape_names[shape], s[2], s[0], "--final", "0.25", s[3], s[1], "--out",
				other, NULL), EXIT_DONE);
		check_equal(out, other);
		assert_int_equal(merge(at("run"), "--last", "4", "--out", newest, "--decay", shape_names[shape], "--final",
				"0.25", NULL), EXIT_DONE);
		check_equal(out, newest);
	}
	assert_int_equal(merge(s[3], s[0], s[1], s[2], "--out", at("mean"), "--decay", "mean", NULL), EXIT_DONE);
	check_merged(at("mean"), mean_weight, 0);
	assert_int_equal(merge(s[3], s[0], s[2], "--out", at("given"), "--weights", "7,-1,2", NULL), EXIT_DONE);
	check_merged(at("given"), given_weight, 0);
	assert_int_equal(merge(s[0], s[2], s[3], "--out", at("given2"), "--weights", "-0.125,.25,0.875", NULL), EXIT_DONE);
	check_equal(at("given"), at("given2"));
	for (int i = 0; i < CHECKPOINTS; i++)
		free(s[i]);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(weights_by_hand), cmocka_unit_test(weights_of_sgd), TEST(merged_is_decayed),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
