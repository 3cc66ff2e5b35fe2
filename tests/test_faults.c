/* --inject: what is read, what is refused, when a fault comes, and that it does not come twice. */
#define _GNU_SOURCE
#include "tests/test.h"

#include "training/faults.h"

/* Faults of one rank of two; fails the test when they cannot be read. */
static struct faults begin(int rank, int n, char **texts)
{
	struct faults f;
	if (faults_read(&f, n, texts, 2) < 0 || faults_begin(&f, scratch, rank, 1, true) < 0)
		fail_msg("%s", error_text);
	return f;
}

static void test_refused(void **state)
{
	(void)state;
	static const char *const bad[][2] = {
		{"", "no such kind"}, {"kill", "step is missing"}, {"burn@step=3", "no such kind"},
		{"kill@", "a setting has no ="}, {"kill@step", "a setting has no ="}, {"kill@step=0", "from 1"},
		{"kill@step=-1", "from 1"}, {"kill@step=1.5", "from 1"}, {"kill@step=99999999999999999999", "from 1"},
		{"kill@rank=1", "step is missing"}, {"kill@step=3,rank=x", "rank is"}, {"slow@step=3,ms=0", "ms is"},
		{"slow@step=3,ms=", "ms is"}, {"slow@step=3,ms=7s", "ms is"}, {"slow@step=3,ms=-1", "ms is"},
		{"slow@step=3,ms=1e9", "ms is"},
		{"kill@step=3,ms=5", "has no such setting"}, {"poison@step=3,ms=5", "has no such setting"},
		{"nan@step=3,during=save", "has one moment only"},
		{"kill@step=3,during=sleep", "during is step, save, norms or synchronisation"},
		{"stop@step=3,during=update", "during is step, save, norms"},
		{"nan@step=3,during=norms", "has one moment only"},
		{"flip@step=3,during=save", "during is step or update"},
		{"kill@step=3,probability=0", "probability is"}, {"kill@step=3,probability=1.1", "probability is"},
		{"kill@step=3,probability=nan", "probability is"}, {"slow@step=3,probability=2", "probability is"},
		{"kill@step=3,colour=red", "there is no such setting"}, {"kill@step=3,", "a setting has no ="},
		{"kill@step=3,rank=2", "there is no rank 2; expected 0 to 1"},
		{"stop@step=1", "it is there twice"},
	};
	for (int i = 0; i < COUNT(bad); i++) {
		struct faults f;
		char *texts[] = {"stop@step=1", (char *)bad[i][0]};
		assert_int_equal(faults_read(&f, 2, texts, 2), -1);
		if (!strstr(error_text, bad[i][1]) || !strstr(error_text, bad[i][0]))
			fail_msg("%s: expected %s", error_text, bad[i][1]);
		faults_free(&f);
	}
}

/* As faults_act does: the event of a fault that comes. Whether it comes. */
static bool comes(struct faults *f, enum fault_kind kind, int64_t step, enum fault_moment moment)
{
	const struct fault *x = fault_comes(f, kind, step, moment);
	if (x)
		fault_write(f, x, step, NULL);
	return x;
}

static void test_comes(void **state)
{
	(void)state;
	char *texts[] = {"kill@step=5,rank=1", "stop@step=4,during=save", "flip@step=3,during=update", "slow@step=2,ms=6.6",
		"kill@step=5"};
	struct faults f[2] = {begin(0, 5, texts), begin(1, 5, texts)};
	for (int64_t step = 1; step < 8; step++)
		for (int rank = 0; rank < 2; rank++) {
			assert_true(comes(&f[rank], FAULT_KILL, step, MOMENT_STEP) == (step == 5));
			assert_false(comes(&f[rank], FAULT_KILL, step, MOMENT_STEP)); /* not twice */
			assert_false(comes(&f[rank], FAULT_KILL, step, MOMENT_SAVE));
			assert_false(comes(&f[rank], FAULT_STOP, step, MOMENT_STEP));
			assert_true(comes(&f[rank], FAULT_STOP, step, MOMENT_SAVE) == (step == 4 && rank == 0));
			assert_false(comes(&f[rank], FAULT_FLIP, step, MOMENT_STEP));
			assert_true(comes(&f[rank], FAULT_FLIP, step, MOMENT_UPDATE) == (step == 3 && rank == 0));
			const struct fault *x = fault_comes(&f[rank], FAULT_SLOW, step, MOMENT_STEP);
			assert_true(x ? rank == 0 && step >= 2 && x->ms == 6.6 : rank == 1 || step < 2);
		}
	for (int rank = 0; rank < 2; rank++)
		faults_free(&f[rank]);
	/* another start of the run: what has come does not come again, but what is slow stays so */
	f[0] = begin(0, 5, texts);
	assert_false(comes(&f[0], FAULT_KILL, 5, MOMENT_STEP));
	assert_false(comes(&f[0], FAULT_STOP, 4, MOMENT_SAVE));
	assert_false(comes(&f[0], FAULT_FLIP, 3, MOMENT_UPDATE));
	assert_null(fault_comes(&f[0], FAULT_SLOW, 1, MOMENT_STEP));
	assert_non_null(fault_comes(&f[0], FAULT_SLOW, 2, MOMENT_STEP));
	faults_free(&f[0]);
}

/* The targets of poisoned samples are random, the same ones each time, on each rank, and after another start. */
static void test_poison(void **state)
{
	(void)state;
	char *texts[] = {"poison@step=3"};
	struct faults f[2] = {begin(0, 1, texts), begin(1, 1, texts)};
	for (int rank = 0; rank < 2; rank++) {
		assert_null(fault_poisons(&f[rank], 2));
		const struct fault *x = fault_poisons(&f[rank], 3);
		assert_non_null(x);
		faults_poison(&f[rank], x, 3, json_pack("[[i,i,i],[i,i,i]]", 0, 5, 7, 2, 9, 9));
		assert_null(fault_poisons(&f[rank], 3));
	}
	enum { L = 64 };
	int32_t first[L], again[L];
	for (int file = 0; file < 3; file++)
		for (int64_t number = 4; number < 11; number++) {
			for (int t = 0; t < L; t++)
				first[t] = again[t] = t % 8 ? 1 : -1;
			faults_poison_targets(&f[0], file, number, first, L, 10);
			faults_poison_targets(&f[1], file, number, again, L, 10);
			assert_memory_equal(first, again, sizeof first);
			const bool poisoned = (file == 0 && number >= 5 && number <= 7) || (file == 2 && number == 9);
			int changed = 0;
			for (int t = 0; t < L; t++) {
				assert_true(t % 8 ? first[t] >= 0 && first[t] < 10 : first[t] == -1);
				changed += first[t] != (t % 8 ? 1 : -1);
			}
			assert_true(poisoned ? changed > L / 2 : changed == 0);
		}
	memcpy(first, (int32_t[L]){0}, sizeof first);
	memcpy(again, first, sizeof first);
	faults_poison_targets(&f[0], 0, 6, first, L, 1000);
	for (int rank = 0; rank < 2; rank++)
		faults_free(&f[rank]);
	f[0] = begin(1, 1, texts);
	assert_null(fault_poisons(&f[0], 3));
	faults_poison_targets(&f[0], 0, 6, again, L, 1000);
	assert_memory_equal(first, again, sizeof first);
	faults_poison_targets(&f[0], 0, 7, again, L, 1000);
	assert_memory_not_equal(first, again, sizeof first);
	faults_free(&f[0]);
}

static void test_probability(void **state)
{
	(void)state;
	struct faults f = begin(0, 1, (char *[]){"nan@step=100,probability=0.25"});
	int n = 0;
	for (int64_t step = 1; step < 4100; step++) {
		const bool now = fault_comes(&f, FAULT_NAN, step, MOMENT_UPDATE);
		assert_false(now && step < 100);
		n += now;
	}
	assert_true(n > 900 && n < 1100); /* 1000 +- 27 */
	faults_free(&f);
	f = begin(0, 1, (char *[]){"slow@step=100,probability=0.05"});
	n = 0;
	for (int64_t step = 1; step < 4100; step++) {
		const bool now = fault_comes(&f, FAULT_SLOW, step, MOMENT_STEP);
		assert_false(now && step < 100);
		n += now;
	}
	assert_true(n > 150 && n < 250); /* 200 +- 14 */
	faults_free(&f);
	/* of several slow ones the first that comes: steps of 5 ms, of which some take 12 */
	f = begin(0, 2, (char *[]){"slow@step=1,probability=0.05,ms=12", "slow@step=1,ms=5"});
	n = 0;
	for (int64_t step = 1; step < 4001; step++) {
		const struct fault *x = fault_comes(&f, FAULT_SLOW, step, MOMENT_STEP);
		assert_true(x && (x->ms == 5 || x->ms == 12));
		n += x->ms == 12;
	}
	assert_true(n > 150 && n < 250);
	faults_free(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {TEST(test_refused), TEST(test_comes), TEST(test_poison),
		TEST(test_probability)};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
