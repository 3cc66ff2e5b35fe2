/*
 * test_runs.c - reading the directory of a run: columns, events that stay, errors, thinned and smoothed series.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "commands/runs.h"

#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "test.h"

/* Appends a step's line to scratch/run/metrics.jsonl. */
static void put_step(int step, const char *loss, const char *more)
{
	FILE *f = fopen(at("run/metrics.jsonl"), "a");
	assert_non_null(f);
	fprintf(f, "{\"step\": %d, \"samples\": %d, \"tokens\": %d, \"batch\": 8, \"loss\": %s, \"balance_loss\": 1.0, "
			"\"z_loss\": 0.5, \"lr\": 0.001, \"grad_norm\": 1.5, \"update_norm\": 0.1, \"seconds\": 0.5, "
			"\"tokens_per_second\": 1000.0, \"expert_load\": [1.5, %d]%s}\n", step, step * 8, step * 1024, loss, step,
			more);
	assert_int_equal(fclose(f), 0);
}

static void make_run_directory(void)
{
	assert_int_equal(mkdir(at("run"), 0700), 0);
	put_string(at("run/metrics.jsonl"), "");
}

static void open_run(struct run *r)
{
	if (run_open(r, at("run")) < 0)
		fail_msg("%s", error_text);
}

static void expect_values(const struct run *r, const char *name, int n, const double *step, const double *value)
{
	struct series s = run_series(r, name);
	if (s.count != n)
		fail_msg("%s has %d values; expected %d", name, s.count, n);
	for (int i = 0; i < n; i++) {
		assert_same(s.step[i], step[i]);
		assert_same(s.tokens[i], 1024 * step[i]);
		assert_same(s.value[i], value[i]);
	}
	series_free(&s);
}

static void members_become_columns(void **state)
{
	(void)state;
	make_run_directory();
	put_step(1, "3.5", "");
	put_step(2, "null", ", \"valid_loss\": 3, \"valid\": {\"web\": 2.5, \"chat x\": null}, \"nonfinite\": [\"loss\"]");
	put_step(3, "2.5", ", \"bytes_sent\": {\"head\": 11}, \"bytes_sent.head\": 12, \"validation_stopped\": true");
	put_step(5, "2.25", ", \"expert_counts\": [[1, 2], [3, 4]], \"valid_loss\": 2.75, \"valid\": {\"web\": 2}");
	struct run r;
	open_run(&r);
	assert_string_equal(r.name, "run");
	assert_int_equal(r.count, 4);
	assert_true(r.step[3] == 5 && r.tokens[3] == 5120);
	assert_null(r.config);
	expect_values(&r, "loss", 4, (double[]){1, 2, 3, 5}, (double[]){3.5, NAN, 2.5, 2.25});
	expect_values(&r, "valid_loss", 2, (double[]){2, 5}, (double[]){3, 2.75});
	expect_values(&r, "valid.web", 2, (double[]){2, 5}, (double[]){2.5, 2});
	expect_values(&r, "valid.chat x", 1, (double[]){2}, (double[]){NAN});
	expect_values(&r, "bytes_sent.head", 1, (double[]){3}, (double[]){12});
	expect_values(&r, "validation_stopped", 1, (double[]){3}, (double[]){1});
	expect_values(&r, "expert_counts.1.0", 1, (double[]){5}, (double[]){3});
	expect_values(&r, "expert_load.1", 4, (double[]){1, 2, 3, 5}, (double[]){1, 2, 3, 5});
	expect_values(&r, "expert_load", 4, (double[]){1, 2, 3, 5}, (double[]){1.5, 2, 3, 5});
	assert_int_equal(run_elements(&r, "expert_load"), 2);
	assert_int_equal(run_elements(&r, "valid"), 0);
	expect_values(&r, "nonfinite.0", 0, NULL, NULL);
	expect_values(&r, "los", 0, NULL, NULL);
	expect_values(&r, "peak_share", 0, NULL, NULL);
	run_free(&r);
}

static void going_back_undoes_decisions(void **state)
{
	(void)state;
	make_run_directory();
	for (int step = 1; step <= 6; step++)
		put_step(step, "2", step == 4 ? ", \"save_seconds\": 3.0" : "");
	put_string(at("run/events.jsonl"),
			"{\"time\": 1000.0, \"step\": 0, \"kind\": \"start\", \"batch\": 0, \"flops_per_token\": 100, "
			"\"peak_flops\": 200000}\n"
			"{\"time\": 1000.5, \"step\": 0, \"kind\": \"validation\", \"valid_loss\": 9.5, \"valid\": {\"web\": 8}}\n"
			"{\"time\": 1001.0, \"step\": 2, \"kind\": \"save\"}\n"
			"{\"time\": 1002.0, \"step\": 2, \"kind\": \"skip\", \"batch\": 3}\n"
			"{\"time\": 1003.0, \"step\": 4, \"kind\": \"save\"}\n"
			"{\"time\": 1004.0, \"step\": 4, \"kind\": \"crash\"}\n"
			"{\"time\": 1100.0, \"step\": 2, \"kind\": \"resume\", \"batch\": 2, \"flops_per_token\": 100, "
			"\"peak_flops\": 400000}\n"
			"{\"time\": 1101.0, \"step\": 3, \"kind\": \"skip\", \"batch\": 4}\n"
			"{\"time\": 1101.0, \"step\": 5, \"kind\": \"retry\", \"batch\": 6}\n"
			"{\"time\": 1200.0, \"step\": 3, \"kind\": \"rollback\", \"batch\": 7}\n");
	struct run r;
	open_run(&r);
	static const char *const kinds[] = {"start", "validation", "save", "crash", "resume", "skip", "rollback"};
	assert_int_equal(json_array_size(r.events), COUNT(kinds));
	for (int i = 0; i < COUNT(kinds); i++)
		assert_string_equal(json_string_value(json_object_get(json_array_get(r.events, i), "kind")), kinds[i]);
	assert_true(r.flops_per_token == 100 && r.peak_flops == 400000);
	expect_values(&r, "peak_share", 6, (double[]){1, 2, 3, 4, 5, 6}, (double[]){0.5, 0.5, 0.25, 0.25, 0.25, 0.25});
	expect_values(&r, "valid_loss", 1, (double[]){0}, (double[]){9.5});
	expect_values(&r, "valid.web", 1, (double[]){0}, (double[]){8});
	assert_true(r.count == 7 && r.step[0] == 0 && r.step[6] == 6);
	double times[7];
	run_times(&r, times);
	static const double expected[] = {1000, 1000.5, 1001, 1100.5, 1203.5, 1204, 1204.5};
	for (int i = 0; i < 7; i++)
		assert_same(times[i], expected[i]);
	run_free(&r);
}

static void without_events_the_file_tells_the_time(void **state)
{
	(void)state;
	make_run_directory();
	put_step(1, "2", ""), put_step(2, "2", "");
	const struct timespec time[2] = {{.tv_sec = 5000}, {.tv_sec = 5000}};
	assert_int_equal(utimensat(AT_FDCWD, at("run/metrics.jsonl"), time, 0), 0);
	struct run r;
	open_run(&r);
	double times[2];
	run_times(&r, times);
	assert_true(times[0] == 4999.5 && times[1] == 5000);
	run_free(&r);
}

static void the_config_is_that_of_the_newest_checkpoint(void **state)
{
	(void)state;
	make_run_directory();
	put_step(1, "2", "");
	assert_int_equal(mkdir(at("run/step-0000001"), 0700), 0);
	put_string(at("run/step-0000001/trainer.json"), "{\"config\": {\"train\": {\"batch\": 8}}}");
	struct run r;
	open_run(&r);
	assert_int_equal(json_integer_value(json_at(r.config, "train.batch")), 8);
	run_free(&r);
	put_string(at("run/step-0000001/trainer.json"), "{\"config\": ");
	assert_int_equal(run_open(&r, at("run")), -1);
	expect_error("step-0000001/trainer.json");
	put_string(at("run/step-0000001/trainer.json"), "{\"config\": 1}");
	assert_int_equal(run_open(&r, at("run")), -1);
	expect_error("step-0000001/trainer.json: `config` is|expected an object");
}

static void what_is_no_run_is_an_error(void **state)
{
	(void)state;
	struct run r;
	make_run_directory();
	open_run(&r); /* no step yet */
	assert_int_equal(r.count, 0);
	assert_int_equal(run_needs_steps(&r, "draw"), -1);
	expect_error("run/metrics.jsonl: no steps to draw|ling train");
	run_free(&r);
	put_step(1, "2", ""), put_step(1, "2", "");
	assert_int_equal(run_open(&r, at("run")), -1);
	expect_error("metrics.jsonl:2|rising");
	put_string(at("run/metrics.jsonl"), ""), put_step(0, "2", "");
	put_string(at("run/events.jsonl"), "{\"step\": 0, \"kind\": \"validation\", \"valid_loss\": 9.5}\n");
	assert_int_equal(run_open(&r, at("run")), -1);
	expect_error("metrics.jsonl|step 0");
	put_string(at("run/events.jsonl"), "{\"step\": \n");
	assert_int_equal(run_open(&r, at("run")), -1);
	expect_error("events.jsonl:1");
	assert_int_equal(run_open(&r, at("nowhere")), -1);
	expect_error("nowhere: No such file|train.output_dir");
	assert_int_equal(run_open(&r, at("run/metrics.jsonl")), -1);
	expect_error("is no directory");
	assert_int_equal(run_open(&r, scratch), -1);
	expect_error("has no metrics.jsonl");
	put_string(at("trainer.json"), "{}");
	assert_int_equal(run_open(&r, scratch), -1);
	expect_error("is a checkpoint|give /tmp");
	char *dirs[] = {at("nowhere"), at("run")};
	struct run runs[2];
	assert_int_equal(runs_open(runs, dirs, 2), -1);
}

static void runs_of_one_name_are_told_apart(void **state)
{
	(void)state;
	make_run_directory();
	char *dirs[3] = {copy_string(at("run")), copy_string(at("b/run")), copy_string(at("other"))};
	char command[512];
	snprintf(command, sizeof command, "mkdir %s && cp -r %s %s && cp -r %s %s", at("b"), dirs[0], dirs[1], dirs[0],
			dirs[2]);
	assert_int_equal(system(command), 0);
	struct run runs[3];
	assert_int_equal(runs_open(runs, dirs, 3), 0);
	assert_string_equal(runs[0].name, dirs[0]);
	assert_string_equal(runs[1].name, dirs[1]);
	assert_string_equal(runs[2].name, "other");
	for (int i = 0; i < 3; i++)
		run_free(&runs[i]), free(dirs[i]);
}

/* A series with a value for each step from 1 on. */
static struct series series_from(struct series *s, double *block, int n)
{
	*s = (struct series){n, block, block + n, block + 2 * n};
	for (int i = 0; i < n; i++)
		s->step[i] = i + 1, s->tokens[i] = 10.0 * (i + 1), s->value[i] = sin(i);
	return *s;
}

static void thinning_keeps_every_extreme(void **state)
{
	(void)state;
	enum { N = 100000 };
	static double block[3 * N];
	struct series s;
	series_from(&s, block, N);
	s.value[0] = 0.5, s.value[N - 1] = 0.25;
	s.value[61234] = 1000, s.value[61235] = -1000, s.value[777] = NAN, s.value[61236] = INFINITY;
	for (int by_tokens = 0; by_tokens < 2; by_tokens++) {
		struct series t = series_thin(&s, by_tokens, 500);
		assert_true(t.count <= 3 * 500 + 2 && t.count >= 2 * 500);
		assert_true(t.step[0] == 1 && t.value[0] == 0.5);
		assert_true(t.step[t.count - 1] == N && t.value[t.count - 1] == 0.25);
		int found = 0;
		for (int i = 0; i < t.count; i++) {
			const int from = (int)t.step[i] - 1;
			assert_same(t.value[i], s.value[from]);
			assert_same(t.tokens[i], s.tokens[from]);
			assert_true(i == 0 || t.step[i] > t.step[i - 1]);
			found += from == 61234 || from == 61235 || from == 777 || from == 61236;
		}
		assert_int_equal(found, 4);
		series_free(&t);
	}
	static const struct { int count, buckets, left; } cases[] = {{0, 10, 0}, {1, 10, 1}, {5, 10, 5}, {5, 1, 3}};
	for (int i = 0; i < COUNT(cases); i++) {
		series_from(&s, block, cases[i].count); /* 0 0.84 0.91 0.14 -0.76: the highest, the lowest, and both ends */
		struct series t = series_thin(&s, false, cases[i].buckets);
		assert_int_equal(t.count, cases[i].left);
		series_free(&t);
	}
}

static void smoothing_is_a_mean_of_neighbours(void **state)
{
	(void)state;
	double block[3 * 9] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 40, 50, 60, 70, 80, 90, 8, 2, 4, NAN, 6, 1, 3, 5, 9};
	const struct series s = {9, block, block + 9, block + 18};
	struct series t = series_smooth(&s, 1, false);
	const double three[] = {8, 14 / 3.0, 3, NAN, 3.5, 10 / 3.0, 3, 17 / 3.0, 9};
	assert_int_equal(t.count, 9);
	for (int i = 0; i < 9; i++) {
		assert_true(t.step[i] == i + 1 && t.tokens[i] == 10 * (i + 1));
		assert_true(isnan(three[i]) ? isnan(t.value[i]) : fabs(t.value[i] - three[i]) < 1e-12);
	}
	series_free(&t);
	t = series_smooth(&s, 4, false); /* at the ends, of as many as a quarter of 4 on each side */
	assert_true(fabs(t.value[0] - 5) < 1e-12 && fabs(t.value[1] - 14 / 3.0) < 1e-12 && fabs(t.value[8] - 7) < 1e-12);
	assert_true(fabs(t.value[4] - 38 / 8.0) < 1e-12);
	series_free(&t);
	t = series_smooth(&s, 1, true);
	assert_true(fabs(t.value[1] - cbrt(64)) < 1e-12 && isnan(t.value[3]) && fabs(t.value[4] - sqrt(6)) < 1e-12);
	series_free(&t);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(members_become_columns), TEST(going_back_undoes_decisions), TEST(without_events_the_file_tells_the_time),
		TEST(the_config_is_that_of_the_newest_checkpoint), TEST(what_is_no_run_is_an_error),
		TEST(runs_of_one_name_are_told_apart), TEST(thinning_keeps_every_extreme),
		TEST(smoothing_is_a_mean_of_neighbours),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
