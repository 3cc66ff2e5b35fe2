/*
 * tests/test_hang.c - hung or slow: what the watch of a run's heartbeat takes for a hang, and whom it names; and the
 * heartbeat file itself.
 */
#define _GNU_SOURCE
#include "commands/hang.h"
#include "files/base.h"
#include "files/heartbeat.h"
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const struct hang_limits limits = {.factor = 10, .least = 5, .unseen = 1000};

/* A run of `ranks` ranks, as the tests set it. */
static struct heartbeat_rank run[8];
static int ranks;
static struct hang_history history;
static struct hang_watch watch;

static void begin(int n)
{
	ranks = n;
	memset(run, 0, sizeof run);
	memset(&history, 0, sizeof history);
	for (int i = 0; i < n; i++) {
		run[i].phase = HEARTBEAT_START;
		run[i].layer = -1;
		strcpy(run[i].host, "box");
	}
	hang_watch_begin(&watch, &history, 0);
}

/* The watch looks at the run as it is. */
static void look(double time)
{
	struct heartbeat h = {.id = 7, .ranks = ranks, .rank = allocate(ranks * sizeof *h.rank)};
	memcpy(h.rank, run, ranks * sizeof *h.rank);
	hang_watch_take(&watch, &h, time);
	heartbeat_free(&h);
}

/* All ranks begin a phase; the step before took so many seconds. */
static void all(enum heartbeat_phase phase, int64_t step, double seconds, double time)
{
	for (int i = 0; i < ranks; i++) {
		run[i].phase = phase;
		run[i].step = step;
		run[i].phases++;
		run[i].step_seconds = seconds;
		run[i].waits = false;
	}
	look(time);
}

static double hung(double time)
{
	double limit;
	return hang_detect(&watch, &limits, time, &limit);
}

/* Steps of one second up to time 100, after a start of 30 s and a first step of 20. */
static void hundred_seconds(int n)
{
	begin(n);
	look(1);
	assert_true(hung(900) == 0 && hung(1002) > 1000); /* a start was not seen yet */
	all(HEARTBEAT_FIRST_STEP, 1, 0, 30);
	assert_true(hung(1029) == 0);
	all(HEARTBEAT_STEP, 2, 0, 50);
	assert_true(hung(900) == 0); /* nor a step */
	for (int i = 1; i <= 50; i++)
		all(HEARTBEAT_STEP, 2 + i, 1, 50 + i);
}

/* A step that takes 3 times, or 9 times as long is slow; one that takes 11 times as long hangs. */
static void test_slow_is_not_hung(void **state)
{
	(void)state;
	hundred_seconds(1);
	assert_true(hang_median_step(&history) == 1);
	assert_true(hung(103) == 0 && hung(109) == 0 && hung(111) == 11);
	for (int i = 1; i <= 20; i++) /* the machine is 3 times slower now: the median has hardly moved, nothing hangs */
		all(HEARTBEAT_STEP, 52 + i, 3, 100 + 3 * i), assert_true(hung(100 + 3 * i + 2.9) == 0);
	assert_true(hang_steps_done(&watch) == 71 && watch.stepped);
	hang_watch_end(&watch);
	/* short steps: the least number of seconds counts */
	begin(1);
	all(HEARTBEAT_STEP, 2, 0, 1);
	all(HEARTBEAT_STEP, 3, 0.01, 1.01);
	assert_true(hung(5.9) == 0 && hung(6.1) > 5);
	/* the same step again, as after a batch that was skipped, is progress too */
	run[0].phases++;
	look(6);
	assert_true(hung(10.9) == 0 && hung(11.1) > 5);
	hang_watch_end(&watch);
}

/* Start, first step, evaluation and save have limits of their own, by the longest of each that was seen, also in a
 * start before this one. */
static void test_phases_have_their_own_limits(void **state)
{
	(void)state;
	hundred_seconds(2);
	all(HEARTBEAT_SAVE, 52, 1, 101);
	assert_true(hung(1100) == 0 && hung(1102) > 1000);
	all(HEARTBEAT_STEP, 53, 1, 104);
	all(HEARTBEAT_EVALUATION, 53, 1, 105);
	assert_true(hung(1104) == 0);
	all(HEARTBEAT_STEP, 54, 1, 185);
	all(HEARTBEAT_SAVE, 54, 1, 186);
	assert_true(hung(186 + 29) == 0 && hung(186 + 31) > 30); /* ten saves */
	/* short saves do not tell how long one takes that training waits for */
	all(HEARTBEAT_WRITE, 54, 1, 186);
	assert_true(hung(186 + 999) == 0 && hung(186 + 1001) > 1000);
	all(HEARTBEAT_SAVE, 54, 1, 186);
	all(HEARTBEAT_WRITE, 54, 1, 186);
	assert_true(hung(186 + 999) == 0);
	all(HEARTBEAT_SAVE, 54, 1, 186);
	/* one rank still saves, and the other is in the next step: the longer limit counts */
	run[0].phase = HEARTBEAT_STEP, run[0].step = 55, run[0].phases++;
	look(187);
	assert_true(hung(187 + 29) == 0 && hung(187 + 31) > 30);
	hang_watch_end(&watch);
	hang_watch_begin(&watch, &history, 0);
	assert_true(hung(290) == 0 && hung(302) > 300); /* no rank gives a sign: ten starts of 30 s */
	for (int i = 0; i < 2; i++)
		run[i].phase = HEARTBEAT_FIRST_STEP, run[i].step = 55;
	look(20);
	assert_true(hung(20 + 199) == 0 && hung(20 + 201) > 200);
	all(HEARTBEAT_EVALUATION, 55, 1, 30);
	assert_true(hung(30 + 799) == 0 && hung(30 + 801) > 800);
	hang_watch_end(&watch);
}

static void expect_description(double time, const char *expected)
{
	json_t *members;
	char *text = hang_describe(&watch, time, &members);
	assert_string_equal(text, expected);
	free(text);
	json_decref(members);
}

/* A rank waits in a collective, and says so as long as it is alive. */
static void waits(int i, const char *collective, int number, double waited)
{
	run[i].waits = true;
	strcpy(run[i].collective, collective);
	run[i].number = number;
	run[i].waited = waited;
}

/* The rank that computes, or that gives no sign while it waits, is named with its operation; the others with the
 * collective that they wait in. */
static void test_description(void **state)
{
	(void)state;
	hundred_seconds(4);
	strcpy(run[2].operation, "experts");
	run[2].layer = 3;
	run[2].changed = 1;
	for (int i = 0; i < 4; i++)
		if (i != 2)
			waits(i, "gradients", 7711, 0.1);
	look(100.2);
	for (int t = 101; t <= 141; t++) {
		for (int i = 0; i < 4; i++)
			run[i].waited += run[i].waits;
		look(t);
	}
	expect_description(141.2, "rank 2 on box has been in experts of layer 3 of step 52 for 41 s; ranks 0, 1, 3 wait in "
			"gradients (number 7711) of step 52");
	json_t *members;
	free(hang_describe(&watch, 141.2, &members));
	assert_int_equal(json_array_size(json_object_get(members, "ranks")), 1);
	assert_int_equal(json_array_size(json_object_get(members, "waiting")), 3);
	assert_int_equal(json_integer_value(json_at(members, "ranks.0.rank")), 2);
	assert_int_equal(json_integer_value(json_at(members, "waiting.2.rank")), 3);
	assert_string_equal(json_string_value(json_at(members, "ranks.0.operation")), "experts");
	json_decref(members);
	hang_watch_end(&watch);

	/* stopped while it waits in a save, and one that waits for a message from it */
	hundred_seconds(3);
	all(HEARTBEAT_SAVE, 52, 1, 101);
	for (int i = 0; i < 3; i++)
		waits(i, i ? "agreement" : "checkpoint", 70 + (i > 0), 0);
	for (int t = 102; t <= 132; t++) {
		run[0].waited++, run[2].waited++;
		look(t);
	}
	expect_description(132, "rank 1 on box has been in the wait for agreement (number 71) of the save of step 52 for "
			"30 s without a sign; rank 0 waits in checkpoint (number 70) of the save of step 52; rank 2 waits in "
			"agreement (number 71) of the save of step 52");
	for (int t = 133; t <= 200; t++) {
		run[0].waited++, run[1].waited++, run[2].waited++;
		look(t);
	}
	expect_description(200, "all ranks wait, and none computes; rank 0 waits in checkpoint (number 70) of the save of "
			"step 52; ranks 1, 2 wait in agreement (number 71) of the save of step 52");
	hang_watch_end(&watch);
	begin(1);
	expect_description(12, "no rank has begun to train for 12 s");
	hang_watch_end(&watch);
}

/* Steps of one second of four ranks, of which 2 and 3 are another replica, in a period, up to time 100. */
static void two_replicas(void)
{
	begin(4);
	for (int i = 0; i < 4; i++) {
		run[i].replica = i / 2;
		run[i].alone = true;
	}
	all(HEARTBEAT_STEP, 1, 0, 50);
	for (int i = 1; i <= 50; i++)
		all(HEARTBEAT_STEP, 1 + i, 1, 50 + i);
}

/* Replica 0 begins another step, a second after the last. */
static void replica_0_steps(double time)
{
	for (int i = 0; i < 2; i++)
		run[i].step++, run[i].phases++;
	look(time);
}

/* In the start the ranks say one after the other in which replica they are: one of which no rank is known yet does not
 * hang, neither for who has watched the start, nor for who comes to it. */
static void test_replica_without_ranks(void **state)
{
	(void)state;
	begin(3);
	run[2].replica = 2;
	look(1);
	assert_true(hung(1.001) == 0 && hung(999) == 0 && hung(1002) > 1000);
	hang_watch_age(&watch, 1, 1);
	assert_true(hang_since(&watch, 2) == 2 && hung(2) == 0);
	look(3);
	assert_true(hung(3.001) == 0);
	run[1].replica = 1;
	look(4);
	assert_true(hung(4.001) == 0 && hung(999) == 0 && hang_since(&watch, 5) == 5);
	hang_watch_end(&watch);
}

/* In a period a replica hangs while the other goes on; one that waits for a slow one does not. */
static void test_replicas(void **state)
{
	(void)state;
	two_replicas();
	waits(2, "gradients", 900, 0);
	for (int t = 101; t <= 111; t++) {
		run[2].waited++;
		assert_true(hung(t - 1) == 0);
		replica_0_steps(t);
	}
	assert_true(hung(111) == 11);
	expect_description(111, "rank 3 on box has been in step 51 for 11 s; rank 2 waits in gradients (number 900) of "
			"step 51; the other replicas go on");
	hang_watch_end(&watch);

	/* Replica 0 is at the end of its period: rank 0 waits for all, rank 1 for rank 0. Replica 1 goes on for 40 s, each
	 * of its steps taking 4 s, which is in the limit. */
	two_replicas();
	waits(0, "statistics", 950, 0), waits(1, "statistics", 950, 0);
	run[0].alone = false;
	for (int t = 101; t <= 140; t++) {
		run[0].waited++, run[1].waited++;
		for (int i = 2; i < 4 && t % 4 == 0; i++)
			run[i].step++, run[i].phases++, run[i].step_seconds = 4;
		look(t);
		assert_true(hung(t) == 0);
	}
	/* Now it ends too, and replica 0 computes: it has its whole time again. */
	run[0].waits = run[1].waits = false;
	look(141);
	assert_true(hung(149) == 0 && hung(152) > 10);
	hang_watch_end(&watch);

	/* Rank 1 is stopped while rank 0 waits for all: replica 0 does not only wait for others. */
	two_replicas();
	waits(0, "statistics", 950, 0);
	run[0].alone = false;
	for (int t = 101; t <= 111; t++) {
		run[0].waited++;
		run[2].step++, run[2].phases++;
		look(t);
	}
	assert_true(hung(111) == 11);
	expect_description(111, "rank 1 on box has been in step 51 for 11 s; rank 0 waits in statistics (number 950) of "
			"step 51; the other replicas go on");
	hang_watch_end(&watch);

	/* Both wait for each other, by steps of their own count: the run hangs. Rank 2 gives no sign, and is named. */
	two_replicas();
	for (int i = 0; i < 4; i++) {
		waits(i, "gradients", 950 + i / 2, 0);
		run[i].step = 60 + i / 2;
		run[i].alone = false;
	}
	for (int t = 101; t <= 112; t++) {
		for (int i = 0; i < 4; i++)
			run[i].waited += i != 2;
		look(t);
	}
	assert_true(hung(112) == 11);
	expect_description(112, "rank 2 on box has been in the wait for gradients (number 951) of step 61 for 11 s without "
			"a sign; ranks 0, 1, 3 wait in gradients (number 950) of step 60");
	hang_watch_end(&watch);
	/* A step is one of the slowest replica. */
	two_replicas();
	for (int i = 1; i <= 100; i++) {
		run[3].step_seconds = 7;
		replica_0_steps(100 + i);
	}
	assert_true(hang_median_step(&history) == 7);
	hang_watch_end(&watch);
}

/* What a rank writes is what a reader sees. */
static void test_file(void **state)
{
	(void)state;
	struct heartbeat h;
	struct stat st;
	char dir[] = "build/scratch-heartbeat-XXXXXX", path[PATH_LEN];
	assert_non_null(mkdtemp(dir));
	path_join(path, dir, "heartbeat");
	assert_int_equal(heartbeat_read(&h, dir), 0);
	heartbeat_operation("nowhere", 1); /* before there is a file: nothing */
	heartbeat_create(dir, 3);
	assert_int_equal(stat(path, &st), 0);
	assert_true(st.st_size == 4 * 4096);
	heartbeat_join(dir, 1, "box");
	heartbeat_phase(HEARTBEAT_STEP, 812);
	heartbeat_operation("a name of more than 15 bytes", 4094);
	heartbeat_wait("gradients", true);
	heartbeat_still_waiting(1.5);
	heartbeat_own_seconds(0.25);
	heartbeat_replica(3);
	heartbeat_alone(true);
	assert_int_equal(heartbeat_read(&h, dir), 1);
	assert_int_equal(h.ranks, 3);
	const struct heartbeat_rank *r = &h.rank[1];
	assert_true(r->phase == HEARTBEAT_STEP && r->step == 812 && r->waits && r->number == 1 && r->waited == 1.5);
	assert_true(r->layer == 4094 && r->own_seconds == 0.25 && r->pid == getpid() && r->phases == 2);
	assert_true(r->replica == 3 && r->alone);
	assert_string_equal(r->operation, "a name of more ");
	assert_string_equal(r->collective, "gradients");
	assert_string_equal(r->host, "box");
	struct process self;
	assert_true(process_look(&self, getpid()) && self.parent == getppid() && self.started == r->pid_started);
	assert_true(h.rank[0].phase == HEARTBEAT_NONE && h.rank[2].pid == 0);
	const uint64_t id = h.id;
	heartbeat_free(&h);
	heartbeat_wait_end();
	heartbeat_wait("checkpoint", false);
	heartbeat_wait_end();
	heartbeat_operation("head", -1);
	usleep(20000);
	heartbeat_phase(HEARTBEAT_SAVE, 812);
	assert_int_equal(heartbeat_read(&h, dir), 1);
	r = &h.rank[1];
	assert_true(r->phase == HEARTBEAT_SAVE && !r->waits && r->number == 1 && r->layer == -1 && r->phases == 3);
	assert_true(r->step_seconds >= 0.02 && r->step_seconds < 10);
	assert_string_equal(r->operation, "");
	heartbeat_free(&h);
	/* a new file: the rank of the old run writes nowhere */
	heartbeat_create(dir, 2);
	heartbeat_phase(HEARTBEAT_STEP, 813);
	assert_int_equal(heartbeat_read(&h, dir), 1);
	assert_true(h.ranks == 2 && h.id != id && h.rank[1].phase == HEARTBEAT_NONE);
	heartbeat_free(&h);
	heartbeat_leave();
	heartbeat_join(dir, 2, "box"); /* no such rank */
	heartbeat_phase(HEARTBEAT_STEP, 1);
	/* cut short, of another version, and no heartbeat */
	assert_int_equal(truncate(path, 5000), 0);
	assert_int_equal(heartbeat_read(&h, dir), 0);
	FILE *f = fopen(path, "wb");
	fwrite("lingbeat\2\0\0\0\1\0\0\0\0\0\0\0\0\0\0\0", 1, 24, f);
	fclose(f);
	assert_int_equal(heartbeat_read(&h, dir), -1);
	assert_non_null(strstr(error_text, "version 2"));
	assert_int_equal(truncate(path, 3), 0);
	assert_int_equal(heartbeat_read(&h, dir), 0);
	unlink(path);
	rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_slow_is_not_hung),
		cmocka_unit_test(test_phases_have_their_own_limits),
		cmocka_unit_test(test_description), cmocka_unit_test(test_replicas),
		cmocka_unit_test(test_replica_without_ranks),
		cmocka_unit_test(test_file),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
