/* --inject: what is read, what is refused, when a fault comes, and that it does not come twice. */
#define _GNU_SOURCE
#include "tests/test.h"

#include "training/faults.h"

/* Faults of one rank of two; fails the test when they cannot be read. */
static struct faults begin(int rank, int n, char **texts)
{
	struct faults f;
	if (faults_read(&f, n, texts) < 0 || faults_begin(&f, scratch, rank, 2, 1) < 0)
		fail_msg("%s", error_text);
	return f;
}

static void test_refused(void **state)
{
	(void)state;
	static const char *const bad[][2] = {
		{"", "no such kind"}, {"kill", "step is missing"}, {"burn@step=3", "no such kind"}, {"kill@", "a setting has no ="},
		{"kill@step", "a setting has no ="}, {"kill@step=0", "from 1"}, {"kill@step=-1", "from 1"},
		{"kill@step=1.5", "from 1"}, {"kill@step=99999999999999999999", "from 1"}, {"kill@rank=1", "step is missing"},
		{"kill@step=3,rank=x", "rank is"}, {"slow@step=3,ms=0", "ms is"}, {"kill@step=3,ms=5", "has no such setting"},
		{"poison@step=3,rank=1", "has no such setting"}, {"nan@step=3,during=save", "has no such setting"},
		{"kill@step=3,during=sleep", "during is"}, {"kill@step=3,probability=0", "probability is"},
		{"kill@step=3,probability=1.1", "probability is"}, {"kill@step=3,probability=nan", "probability is"},
		{"kill@step=3,colour=red", "there is no such setting"}, {"kill@step=3,", "a setting has no ="},
	};
	for (int i = 0; i < COUNT(bad); i++) {
		struct faults f;
		char *texts[] = {"stop@step=1", (char *)bad[i][0]};
		assert_int_equal(faults_read(&f, 2, texts), -1);
		if (!strstr(error_text, bad[i][1]) || !strstr(error_text, bad[i][0]))
			fail_msg("%s: expected %s", error_text, bad[i][1]);
		faults_free(&f);
	}
	struct faults f;
	assert_int_equal(faults_read(&f, 1, (char *[]){"kill@step=3,rank=2"}), 0);
	assert_int_equal(faults_begin(&f, scratch, 0, 2, 1), -1);
	assert_non_null(strstr(error_text, "there is no rank 2; expected 0 to 1"));
	faults_free(&f);
}

static void test_comes(void **state)
{
	(void)state;
	char *texts[] = {"kill@step=5,rank=1", "stop@step=4,during=save", "poison@step=3", "slow@step=2,ms=7", "kill@step=5"};
	struct faults f[2] = {begin(0, 5, texts), begin(1, 5, texts)};
	for (int64_t step = 1; step < 8; step++)
		for (int rank = 0; rank < 2; rank++) {
			const struct fault *x = fault_comes(&f[rank], FAULT_KILL, step, false);
			assert_ptr_equal(x, step == 5 ? &f[rank].list[rank ? 0 : 4] : NULL);
			assert_null(fault_comes(&f[rank], FAULT_KILL, step, false)); /* not twice */
			assert_null(fault_comes(&f[rank], FAULT_KILL, step, true));
			assert_null(fault_comes(&f[rank], FAULT_STOP, step, false));
			assert_true(!fault_comes(&f[rank], FAULT_STOP, step, true) == !(step == 4 && rank == 0));
			assert_true(!fault_comes(&f[rank], FAULT_POISON, step, false) == (step != 3));
			x = fault_comes(&f[rank], FAULT_SLOW, step, false);
			assert_true(x ? rank == 0 && step >= 2 && x->ms == 7 : rank == 1 || step < 2);
		}
	for (int rank = 0; rank < 2; rank++)
		faults_free(&f[rank]);
	/* another start of the run: what has come does not come again, but what is slow stays so */
	f[0] = begin(0, 5, texts);
	assert_null(fault_comes(&f[0], FAULT_KILL, 5, false));
	assert_null(fault_comes(&f[0], FAULT_STOP, 4, true));
	assert_null(fault_comes(&f[0], FAULT_POISON, 3, false));
	assert_null(fault_comes(&f[0], FAULT_SLOW, 1, false));
	assert_non_null(fault_comes(&f[0], FAULT_SLOW, 2, false));
	faults_free(&f[0]);
}

static void test_probability(void **state)
{
	(void)state;
	struct faults f = begin(0, 1, (char *[]){"nan@step=100,probability=0.25"});
	int n = 0;
	for (int64_t step = 1; step < 4100; step++) {
		const bool comes = fault_comes(&f, FAULT_NAN, step, false);
		assert_false(comes && step < 100);
		n += comes;
	}
	assert_true(n > 900 && n < 1100); /* 1000 +- 27 */
	faults_free(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {TEST(test_refused), TEST(test_comes), TEST(test_probability)};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
