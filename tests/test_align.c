/*
 * test_align.c - dumps beside each other: the errors of a tensor, the first that differs, routing; and curves of runs,
 * alone and against a floor.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "files/tensors.h"
#include "data.h"
#include "commands/align_dumps.h"
#include "commands/align_runs.h"
#include "commands/result.h"

#include "test.h"

#include <unistd.h>

/* ---- dumps, made here byte by byte ---- */

static json_t *header;
static struct text bytes;

static void begin(void)
{
	header = json_object();
	bytes = (struct text){0};
}

/* Adds a tensor of n numbers in a type; shape is JSON. */
static void add(const char *name, enum dtype dtype, const char *shape, const double *x, int64_t n)
{
	const json_int_t at = (json_int_t)bytes.size;
	for (int64_t i = 0; i < n; i++) {
		const float f = (float)x[i];
		const int32_t whole = isfinite(x[i]) ? (int32_t)x[i] : 0;
		const uint16_t half = dtype == F16 ? float_to_half(f) : float_to_bf16(f);
		if (dtype == F64)
			text_append(&bytes, (const char *)&x[i], 8);
		else if (dtype == F32)
			text_append(&bytes, (const char *)&f, 4);
		else if (dtype == I32)
			text_append(&bytes, (const char *)&whole, 4);
		else
			text_append(&bytes, (const char *)&half, 2);
	}
	json_object_set_new(header, name, json_pack("{s:s, s:o, s:[I,I]}", "dtype", dtypes[dtype].name, "shape",
			json_loads(shape, 0, NULL), "data_offsets", at, (json_int_t)bytes.size));
}

#define ADD(name, dtype, shape, ...) \
	add(name, dtype, shape, (double[]){__VA_ARGS__}, sizeof((double[]){__VA_ARGS__}) / sizeof(double))

/* Writes DIR/step-NNNNNNN.safetensors with the tensors since begin(). */
static void end(const char *dir, int step)
{
	char *text = json_text(header, JSON_COMPACT);
	const uint64_t length = strlen(text);
	struct text file = {0};
	text_append(&file, (const char *)&length, 8);
	text_append(&file, text, length);
	text_append(&file, bytes.data ? bytes.data : "", bytes.size);
	mkdir(at("%s", dir), 0777);
	put_file(at("%s/step-%07d.safetensors", dir, step), file.data, file.size);
	free(text), free(file.data), free(bytes.data);
	json_decref(header);
}

static json_t *align(double tolerance)
{
	json_t *report = align_dumps(at("a"), at("b"), tolerance);
	if (!report)
		fail_msg("%s", error_text);
	return report;
}

static void expect_agreement(bool agree)
{
	json_t *report = align(0);
	if (json_is_true(json_object_get(report, "agree")) != agree)
		fail_msg("they should %s: %s", agree ? "agree" : "differ", json_text(report, JSON_INDENT(1)));
	json_decref(report);
}

static void refused(const char *parts)
{
	assert_null(align_dumps(at("a"), at("b"), 0));
	expect_error(parts);
}

static void errors_of_a_tensor(void **state)
{
	(void)state;
	begin(), ADD("norm", F32, "[2,3]", 1, 2, 3, 4, 5, -6), end("a", 1);
	begin(), ADD("norm", F32, "[2,3]", 1, 2.5, 3, 4, 4, -6), end("b", 1);
	json_t *report = align(0), *first = json_object_get(json_array_get(json_object_get(report, "steps"), 0), "first");
	assert_false(json_is_true(json_object_get(report, "agree")));
	assert_string_equal(result_text(first, "name"), "norm");
	assert_string_equal(result_text(first, "pass"), "forward");
	assert_float_equal(result_double(first, "largest"), 1, 0);
	assert_float_equal(result_double(first, "mean"), 0.25, 1e-15);
	assert_float_equal(result_double(first, "relative"), sqrt(1.25 / 91), 1e-15);
	assert_float_equal(result_double(first, "cosine"), (1 + 5 + 9 + 16 + 20 + 36) / sqrt(91 * 84.25), 1e-15);
	assert_int_equal(result_integer(first, "at.0"), 1);
	assert_int_equal(result_integer(first, "at.1"), 1);
	assert_float_equal(result_double(first, "a"), 5, 0);
	assert_float_equal(result_double(first, "b"), 4, 0);
	assert_int_equal(result_integer(first, "rows.differ"), 2);
	assert_int_equal(result_integer(first, "columns.differ"), 1);
	assert_int_equal(result_integer(first, "columns.first"), 1);
	json_decref(report);
	report = align(0.5); /* wide enough */
	assert_true(json_is_true(json_object_get(report, "agree")));
	json_decref(report);
}

/* Both zero: equal. One zero: as different as can be. */
static void zeros(void **state)
{
	(void)state;
	begin(), ADD("norm", F32, "[2]", 0, 0), ADD("x", F32, "[0]", 0), end("a", 1);
	begin(), ADD("norm", F32, "[2]", 0, 0), end("b", 1);
	refused("expected 0"); /* a tensor that is not what its shape says */
	begin(), ADD("norm", F32, "[2]", 0, 0), end("a", 1);
	expect_agreement(true);
	begin(), ADD("norm", F32, "[2]", 0, 1e-20), end("b", 1);
	json_t *report = align(0), *step = json_array_get(json_object_get(report, "steps"), 0);
	assert_float_equal(result_double(step, "first.relative"), 1, 0);
	assert_true(json_is_true(json_at(step, "first.zero_a")));
	assert_false(json_is_true(json_at(step, "first.zero_b")));
	json_decref(report);
}

static void not_finite(void **state)
{
	(void)state;
	begin(), ADD("norm", F32, "[4]", NAN, INFINITY, 1, 2), end("a", 1);
	begin(), ADD("norm", F32, "[4]", NAN, INFINITY, 1, 2), end("b", 1);
	expect_agreement(true);
	begin(), ADD("norm", F32, "[4]", NAN, -INFINITY, 1, NAN), end("b", 1);
	json_t *report = align(1), *step = json_array_get(json_object_get(report, "steps"), 0);
	assert_false(json_is_true(json_object_get(report, "agree")));
	assert_int_equal(result_integer(step, "first.nonfinite_a"), 2);
	assert_int_equal(result_integer(step, "first.nonfinite_b"), 3);
	assert_int_equal(result_integer(step, "first.nonfinite_unlike"), 2);
	json_decref(report);
	/* squares, sums and differences that overflow */
	begin(), ADD("norm", F64, "[2]", 1.7e308, -1.7e308), ADD("other", F64, "[1]", 1), end("a", 1);
	begin(), ADD("norm", F64, "[2]", 1.7e308, -1.7e308), ADD("other", F64, "[1]", 1), end("b", 1);
	expect_agreement(true);
	begin(), ADD("norm", F64, "[2]", -1.7e308, 1.7e308), ADD("other", F64, "[1]", 1), end("b", 1);
	expect_agreement(false);
}

/* What passes in which type; the coarser one decides. */
static void types(void **state)
{
	(void)state;
	const struct { enum dtype a, b; double passes, fails; } cases[] = {
		{F64, F64, 5e-11, 2e-10}, {F64, F32, 5e-6, 2e-5}, {F32, F32, 5e-6, 2e-5}, {F16, F32, 1e-3, 4e-3},
		{BF16, F64, 5e-3, 2e-2},
	};
	for (int i = 0; i < COUNT(cases); i++)
		for (int fails = 0; fails < 2; fails++) {
			begin(), ADD("norm", cases[i].a, "[1]", 1), end("a", 1);
			begin(), ADD("norm", cases[i].b, "[1]", 1 + (fails ? cases[i].fails : cases[i].passes)), end("b", 1);
			expect_agreement(!fails);
		}
	for (int step = 1; step < 3; step++) { /* after the first step ten times as much passes */
		begin(), ADD("norm", F32, "[1]", 1), end("a", step);
		begin(), ADD("norm", F32, "[1]", step == 1 ? 1 : 1 + 5e-5), end("b", step);
	}
	expect_agreement(true);
	begin(), ADD("norm", F32, "[1]", 1 + 2e-4), end("b", 2);
	expect_agreement(false);
	unlink(at("a/step-0000002.safetensors"));
	begin(), ADD("x", I32, "[2]", 5, 1000000), end("a", 1);
	begin(), ADD("x", I32, "[2]", 5, 1000001), end("b", 1);
	expect_agreement(false);
}

/* An updated weight is not judged where its moment is rounding alone: there AdamW makes a whole step of it. */
static void updated_weights(void **state)
{
	(void)state;
	const char *const moment = "lm_head.weight / moment 1", *const updated = "lm_head.weight / updated";
	begin(), ADD(moment, F32, "[3]", 1e-3, 1e-12, 2e-3), ADD(updated, F32, "[3]", 0.5, 0.4, 0.3), end("a", 1);
	begin(), ADD(moment, F32, "[3]", 1e-3, -1e-12, 2e-3), ADD(updated, F32, "[3]", 0.5, 0.5, 0.3), end("b", 1);
	json_t *report = align(0);
	assert_true(json_is_true(json_object_get(report, "agree")));
	assert_int_equal(result_integer(report, "steps.0.tensors.1.left_out"), 1);
	json_decref(report);
	begin(), ADD(moment, F32, "[3]", 1e-3, -1e-12, 2e-3), ADD(updated, F32, "[3]", 0.5, 0.5, 0.301), end("b", 1);
	report = align(0);
	assert_string_equal(result_text(report, "steps.0.first.name"), updated);
	assert_string_equal(result_text(report, "steps.0.first.pass"), "optimizer");
	json_decref(report);
	begin(), ADD(updated, F32, "[3]", 0.5, 0.5, 0.3), end("b", 1); /* without moments all is judged */
	expect_agreement(false);
}

/* The order of the data in a decides, not the order of the names or that of b. */
static void order(void **state)
{
	(void)state;
	const char *const late = "layer 0 / router / logits / gradient", *const early = "norm";
	begin(), ADD(early, F32, "[1]", 1), ADD(late, F32, "[1]", 1),
		ADD("model.layers.3.mlp.experts.5.up_proj.weight / gradient", F32, "[1]", 1), end("a", 1);
	begin(), ADD(late, F32, "[1]", 2), ADD("model.layers.3.mlp.experts.5.up_proj.weight / gradient", F32, "[1]", 3),
		ADD(early, F32, "[1]", 1.5), end("b", 1);
	json_t *report = align(0), *step = json_array_get(json_object_get(report, "steps"), 0);
	assert_string_equal(result_text(step, "first.name"), early);
	assert_string_equal(result_text(step, "worst"), "model.layers.3.mlp.experts.5.up_proj.weight / gradient");
	assert_true(json_is_null(json_at(step, "before_first")));
	assert_string_equal(result_text(step, "tensors.1.pass"), "backward");
	assert_string_equal(result_text(step, "tensors.1.operation"), "router / logits");
	assert_int_equal(result_integer(step, "tensors.1.layer"), 0);
	assert_string_equal(result_text(step, "tensors.2.pass"), "weight gradient");
	assert_string_equal(result_text(step, "tensors.2.operation"), "experts / gate_up");
	assert_int_equal(result_integer(step, "tensors.2.layer"), 3);
	assert_int_equal(result_integer(step, "tensors.2.expert"), 5);
	json_decref(report);
}

static void shapes(void **state)
{
	(void)state;
	begin(), ADD("norm", F32, "[2,2]", 1, 2, 3, 4), end("a", 1);
	begin(), ADD("norm", F32, "[1,2,2]", 1, 2, 3, 4), end("b", 1);
	expect_agreement(true);
	begin(), ADD("norm", F32, "[4,1]", 1, 2, 3, 4), end("b", 1);
	refused("tensor norm|[2, 2]|[4, 1]");
	begin(), ADD("norm", F32, "[2]", 1, 2), end("b", 1);
	refused("tensor norm|[2, 2]|[2]");
	begin(), ADD("loss", F32, "[1]", 1), end("b", 1);
	refused("no tensor of the same name");
}

static void steps_and_tensors_of_one(void **state)
{
	(void)state;
	for (int step = 1; step < 4; step++)
		begin(), ADD("norm", F32, "[1]", step), ADD("loss", F32, "[1]", 1), end(step < 3 ? "a" : "b", step);
	refused("no step in common");
	begin(), ADD("norm", F32, "[1]", 2), ADD("head / loss", F32, "[1]", 1), end("b", 2);
	json_t *report = align(0), *step = json_array_get(json_object_get(report, "steps"), 0);
	assert_true(json_is_true(json_object_get(report, "agree")));
	assert_int_equal(json_array_size(json_object_get(report, "steps")), 1);
	assert_int_equal(result_integer(report, "steps_only_a.0"), 1);
	assert_int_equal(result_integer(report, "steps_only_b.0"), 3);
	assert_string_equal(result_text(step, "only_a.0"), "loss");
	assert_string_equal(result_text(step, "only_b.0"), "head / loss");
	json_decref(report);
	report = align_dumps(at("a/step-0000002.safetensors"), at("b/step-0000002.safetensors"), 0);
	assert_non_null(report);
	json_decref(report);
	assert_null(align_dumps(at("a/step-0000002.safetensors"), at("b"), 0));
	expect_error("is a directory");
	put_string(at("b/step-0000002.safetensors"), "no such file");
	refused("header");
	assert_true(is_dump(at("a")) && is_dump(at("b/step-0000002.safetensors")) && !is_dump(scratch));
}

/* ---- routing: 4 tokens, 2 of 3 experts each, hidden size 1 ---- */

/* What a program dumps of one layer: its probabilities; its choices; a value of each choice, and of each token. */
static void put_layer(const char *dir, const double p[12], const double top[8], const double choices[8],
		const double tokens[4], double gradient)
{
	begin();
	if (p)
		add("layer 0 / router / softmax", F32, "[4,3]", p, 12);
	add("layer 0 / router / top-k", I32, "[4,2]", top, 8);
	add("layer 0 / experts / down", F32, "[4,2,1]", choices, 8);
	add("layer 0 / output", F32, "[4,1]", tokens, 4);
	ADD("model.layers.0.mlp.gate.weight / gradient", F32, "[1]", gradient);
	end(dir, 1);
}

static const double p_a[] = {.5, .3, .2, .2, .4000001, .4, .1, .5000001, .4, .45, .1, .45},
		top_a[] = {0, 1, 1, 2, 1, 2, 0, 2}, choices_a[] = {1, 2, 3, 4, 5, 6, 7, 8}, tokens_a[] = {1, 2, 3, 4};

static void same_set_in_another_order(void **state)
{
	(void)state;
	put_layer("a", p_a, top_a, choices_a, tokens_a, 1);
	put_layer("b", p_a, (double[]){0, 1, 2, 1, 1, 2, 2, 0}, (double[]){1, 2, 4, 3, 5, 6, 8, 7}, tokens_a, 1);
	expect_agreement(true);
	put_layer("b", p_a, (double[]){0, 1, 2, 1, 1, 2, 2, 0}, choices_a, tokens_a, 1);
	json_t *report = align(0), *step = json_array_get(json_object_get(report, "steps"), 0);
	assert_string_equal(result_text(step, "first.name"), "layer 0 / experts / down");
	assert_int_equal(result_integer(step, "routing.0.reordered_tokens"), 2);
	assert_int_equal(result_integer(step, "routing.0.flipped_tokens"), 0);
	json_decref(report);
}

/* Token 1 of the layer has probabilities .3, .3, .4: which one wins beside expert 2 is for rounding to decide. */
static void flip_by_rounding(void **state)
{
	(void)state;
	const double near_a[] = {.5, .3, .2, .3000001, .3, .4, .1, .5, .4, .4, .2, .4},
			near_b[] = {.5, .3, .2, .3, .3000001, .4, .1, .5, .4, .4, .2, .4};
	put_layer("a", near_a, (double[]){0, 1, 2, 0, 1, 2, 0, 2}, choices_a, tokens_a, 1);
	put_layer("b", near_b, (double[]){0, 1, 2, 1, 1, 2, 0, 2}, (double[]){1, 2, 3, 9, 5, 6, 7, 8},
			(double[]){1, 9, 3, 4}, 1);
	json_t *report = align(0), *step = json_array_get(json_object_get(report, "steps"), 0);
	assert_true(json_is_true(json_object_get(report, "agree"))); /* without the token */
	assert_int_equal(result_integer(step, "routing.0.flipped_tokens"), 1);
	assert_int_equal(result_integer(step, "routing.0.flipped_choices"), 1);
	assert_int_equal(result_integer(step, "routing.0.flips.0.token"), 1);
	assert_int_equal(result_integer(step, "routing.0.flips.0.from"), 0);
	assert_int_equal(result_integer(step, "routing.0.flips.0.to"), 1);
	assert_float_equal(result_double(step, "routing.0.flips.0.gap"), 1e-7, 3e-8);
	assert_float_equal(result_double(step, "routing.0.flips.0.difference"), 2e-7, 6e-8);
	assert_true(json_is_true(json_at(step, "routing.0.rounding")));
	json_decref(report);
	/* a gradient after it: it differs, and the flip may be why */
	put_layer("b", near_b, (double[]){0, 1, 2, 1, 1, 2, 0, 2}, (double[]){1, 2, 3, 9, 5, 6, 7, 8},
			(double[]){1, 9, 3, 4}, 2);
	report = align(0), step = json_array_get(json_object_get(report, "steps"), 0);
	assert_false(json_is_true(json_object_get(report, "agree")));
	assert_string_equal(result_text(step, "first.name"), "model.layers.0.mlp.gate.weight / gradient");
	assert_true(json_is_true(json_at(step, "first.after_flip")));
	json_decref(report);
	/* another token differs: no flip of its own explains that */
	put_layer("b", near_b, (double[]){0, 1, 2, 1, 1, 2, 0, 2}, (double[]){1, 2, 3, 9, 5, 6, 7, 8.1},
			(double[]){1, 9, 3, 4}, 1);
	report = align(0), step = json_array_get(json_object_get(report, "steps"), 0);
	assert_string_equal(result_text(step, "first.name"), "layer 0 / experts / down");
	assert_int_equal(result_integer(step, "first.left_out"), 1);
	json_decref(report);
}

/* A choice that its own probabilities do not explain is no rounding. */
static void wrong_choice(void **state)
{
	(void)state;
	put_layer("a", p_a, top_a, choices_a, tokens_a, 1);
	put_layer("b", p_a, (double[]){0, 2, 1, 2, 1, 2, 0, 2}, choices_a, tokens_a, 1);
	json_t *report = align(0), *step = json_array_get(json_object_get(report, "steps"), 0);
	assert_string_equal(result_text(step, "first.name"), "layer 0 / router / top-k");
	assert_int_equal(result_integer(step, "routing.0.not_largest_a"), 0);
	assert_int_equal(result_integer(step, "routing.0.not_largest_b"), 1);
	assert_float_equal(result_double(step, "routing.0.flips.0.gap"), 0.1, 1e-7);
	json_decref(report);
	/* without the probabilities it cannot be told */
	put_layer("a", NULL, top_a, choices_a, tokens_a, 1);
	put_layer("b", NULL, (double[]){0, 2, 1, 2, 1, 2, 0, 2}, choices_a, tokens_a, 1);
	expect_agreement(false);
	put_layer("b", NULL, (double[]){0, 0, 1, 2, 1, 2, 0, 2}, choices_a, tokens_a, 1);
	refused("layer 0 / router / top-k|token 0 has expert 0 twice");
	put_layer("a", p_a, top_a, choices_a, tokens_a, 1);
	put_layer("b", p_a, (double[]){0, 1, 1, 2, 1, 3, 0, 2}, choices_a, tokens_a, 1);
	refused("token 2 has no expert number at choice 1|below 3");
	put_layer("b", p_a, (double[]){0, 1, 1, 2, 1, -1, 0, 2}, choices_a, tokens_a, 1);
	refused("token 2 has no expert number");
}

/* ---- curves ---- */

enum { STEPS = 64 };

/* Writes a run whose loss is 4 / sqrt(step), times 1 + shift + noise * a number in -1..1 from the seed, in the steps
 * after `from`. */
static const char *put_run(const char *name, double shift, double noise, unsigned seed, int from)
{
	mkdir(at("%s", name), 0777);
	FILE *f = metrics_open(at("%s", name), 0, NULL);
	assert_non_null(f);
	for (int step = 1; step <= STEPS; step++) {
		seed = seed * 1664525 + 1013904223;
		const double change = step > from ? 1 + shift + noise * (seed / 2147483648.0 - 1) : 1;
		struct metrics m = {.step = step, .samples = step, .tokens = step, .batch = 1, .loss = 4 / sqrt(step) * change,
				.balance_loss = 1, .z_loss = 2, .grad_norm = step == 10 ? NAN : 1, .tokens_per_second = 1,
				.seconds = 1};
		assert_int_equal(metrics_write(f, &m), 0);
	}
	assert_int_equal(fclose(f), 0);
	return at("%s", name);
}

static json_t *align_names(int64_t skip, double tolerance, int num, const char *const *names)
{
	char *dirs[16] = {0};
	for (int i = 0; i < num; i++)
		assert_true(asprintf(&dirs[i], "%s/%s", scratch, names[i]) > 0);
	json_t *report = align_runs(dirs, num, skip, tolerance);
	for (int i = 0; i < num; i++)
		free(dirs[i]);
	return report;
}
#define ALIGN(skip, tolerance, ...) align_names(skip, tolerance, \
	sizeof((const char *[]){__VA_ARGS__}) / sizeof(char *), (const char *[]){__VA_ARGS__})

static bool agree(json_t *report)
{
	if (!report)
		fail_msg("%s", error_text);
	const bool result = json_is_true(json_object_get(report, "agree"));
	json_decref(report);
	return result;
}

static void two_curves(void **state)
{
	(void)state;
	put_run("a", 0, 0, 1, 0);
	put_run("b", 0.01, 0, 1, 16);
	json_t *report = ALIGN(0, 1e-3, "a", "b"), *loss = json_array_get(json_object_get(report, "series"), 0);
	assert_non_null(report);
	assert_string_equal(result_text(loss, "name"), "loss");
	assert_float_equal(result_double(loss, "mean"), 0.01 * 48 / 64, 1e-12);
	assert_float_equal(result_double(loss, "mean_absolute"), 0.01 * 48 / 64, 1e-12);
	assert_float_equal(result_double(loss, "largest"), 0.01, 1e-12);
	assert_int_equal(result_integer(loss, "first_different"), 17);
	assert_int_equal(result_integer(loss, "first_beyond"), 17);
	assert_false(agree(report));
	assert_true(agree(ALIGN(0, 8e-3, "a", "b")));
	assert_false(agree(ALIGN(16, 8e-3, "a", "b")));
	report = ALIGN(60, 1e-3, "a", "b");
	assert_int_equal(result_integer(report, "series.0.steps"), 4);
	json_decref(report);
	assert_null(ALIGN(64, 1e-3, "a", "b"));
	expect_error("no step after step 64 in common|ends at step 64");
	/* differences of both signs do not cancel */
	put_run("b", 0, 0.01, 1, 0);
	assert_false(agree(ALIGN(0, 1e-3, "a", "b")));
	put_run("b", NAN, 0, 1, 63);
	report = ALIGN(0, 1e-3, "a", "b");
	assert_int_equal(result_integer(report, "series.0.nonfinite_unlike"), 1);
	assert_false(agree(report));
	/* differences that no double holds, from 0 too, are differences; the curve is not left out */
	const double far[] = {-1, -1 + 1e-310};
	for (int i = 0; i < COUNT(far); i++) {
		put_run("a", far[i], 0, 1, 0);
		put_run("b", 1e300, 0, 1, 0);
		report = ALIGN(0, 1e-3, "a", "b");
		assert_string_equal(result_text(report, "series.0.name"), "loss");
		assert_int_equal(result_integer(report, "series.0.steps"), 64);
		assert_false(agree(report));
	}
}

/* Tables of Student's t, two-sided. */
static void quantiles(void **state)
{
	(void)state;
	const struct { double level; int freedom; double t; } known[] = {
		{0.05, 1, 12.7062}, {0.05, 2, 4.30265}, {0.05, 3, 3.18245}, {0.01, 4, 4.60409}, {0.01, 5, 4.03214},
		{0.001, 10, 4.58689}, {0.05, 30, 2.04227},
	};
	for (int i = 0; i < COUNT(known); i++)
		assert_float_equal(student_t(known[i].level, known[i].freedom), known[i].t, 1e-4);
}

/* The test of the loss against the floor. */
static const json_t *find_test(const json_t *report, const char *what)
{
	const json_t *test;
	size_t i;
	json_array_foreach(json_at(report, "floor.tests"), i, test)
		if (!strcmp(result_text(test, "what"), what) && !strcmp(result_text(test, "series"), "loss"))
			return test;
	fail_msg("no test %s", what);
	return NULL;
}

static void floors(void **state)
{
	(void)state;
	put_run("a", 0, 0.01, 1, 8);
	put_run("f1", 0, 0.01, 2, 8);
	put_run("f2", 0, 0.01, 3, 8);
	put_run("f3", 0, 0.01, 4, 9);
	put_run("b", 0, 0.01, 5, 8);
	assert_false(agree(ALIGN(0, 1e-3, "a", "b")));
	assert_true(agree(ALIGN(0, 1e-3, "a", "f1", "f2", "f3", "b")));
	put_run("b", 0.03, 0.01, 5, 8); /* a shift beyond the spread of the means */
	json_t *report = ALIGN(0, 1e-3, "a", "f1", "f2", "f3", "b");
	assert_int_equal(result_integer(report, "floor.partings.0"), 9);
	assert_int_equal(result_integer(report, "floor.parting_b"), 9);
	assert_int_equal(result_integer(report, "floor.early"), 3);
	assert_true(result_integer(report, "floor.settled") >= 10);
	const json_t *test = find_test(report, "early");
	assert_true(json_is_true(json_object_get(test, "passes")));
	test = find_test(report, "mean");
	assert_float_equal(result_double(test, "found"), 0.03, 3e-3);
	assert_false(json_is_true(json_object_get(test, "passes")));
	assert_false(agree(report));
	put_run("b", 0, 0.06, 5, 8); /* no shift, but more noise */
	report = ALIGN(0, 1e-3, "a", "f1", "f2", "f3", "b");
	assert_false(json_is_true(json_object_get(find_test(report, "distance"), "passes")));
	assert_false(agree(report));
	put_run("b", 0, 0.01, 5, 2); /* differs before the others do */
	report = ALIGN(0, 1e-3, "a", "f1", "f2", "f3", "b");
	assert_int_equal(result_integer(report, "floor.parting_b"), 3);
	assert_false(json_is_true(json_object_get(find_test(report, "early"), "passes")));
	assert_false(agree(report));
	put_run("b", 0, 0.01, 5, 3);
	assert_true(agree(ALIGN(0, 1e-3, "a", "f1", "f2", "f3", "b")));
	put_run("b", 0, 0.01, 5, 0);
	assert_true(agree(ALIGN(8, 1e-3, "a", "f1", "f2", "f3", "b"))); /* after it, it is like the others */
	put_run("b", 0, 0.01, 5, 8);
	assert_true(agree(ALIGN(0, 1e-3, "a", "f1", "b"))); /* a weak floor, but one */
	assert_null(ALIGN(64, 1e-3, "a", "f1", "b"));
	expect_error("no step after step 64");
	/* b alone parts, after the first quarter, and no later step is judged: that does not pass */
	put_run("a", 0, 1e-8, 1, 0);
	put_run("f1", 0, 1e-8, 2, 0);
	put_run("f2", 0, 1e-8, 3, 0);
	put_run("b", 0.02, 0, 5, 20);
	report = ALIGN(0, 1e-3, "a", "f1", "f2", "b");
	assert_true(json_is_true(json_at(report, "floor.too_short")));
	assert_true(json_is_true(json_object_get(find_test(report, "early"), "passes")));
	assert_false(agree(report));
	put_run("b", 0, 1e-8, 4, 0);
	assert_true(agree(ALIGN(0, 1e-3, "a", "f1", "f2", "b")));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(errors_of_a_tensor), TEST(zeros), TEST(not_finite), TEST(types), TEST(updated_weights), TEST(order),
		TEST(shapes),
		TEST(steps_and_tensors_of_one), TEST(same_set_in_another_order), TEST(flip_by_rounding), TEST(wrong_choice),
		TEST(two_curves), TEST(quantiles), TEST(floors),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
