/*
 * test_products.c - the products that are computed at the start of every command that computes: a library whose
 * products are wrong, or a wrong kernel of ling's own, is found there. Linked so that each product of that check may be
 * spoilt (Makefile).
 */
#define _GNU_SOURCE
#include "tests/test.h"

#include "commands/doctor.h"
#include "kernels.h"

#include <fcntl.h>
#include <unistd.h>

static enum { NONE, OWN, OPENBLAS } spoilt; /* whose products */
static real spoil;                          /* what their last element is multiplied with */

void __real_single_gemm(real *c, const real *a, bool transpose_a, const real *b, bool transpose_b, int64_t m, int64_t n,
		int64_t k, int openblas_threads);
void __wrap_single_gemm(real *c, const real *a, bool transpose_a, const real *b, bool transpose_b, int64_t m, int64_t n,
		int64_t k, int openblas_threads);

void __wrap_single_gemm(real *c, const real *a, bool transpose_a, const real *b, bool transpose_b, int64_t m, int64_t n,
		int64_t k, int openblas_threads)
{
	__real_single_gemm(c, a, transpose_a, b, transpose_b, m, n, k, openblas_threads);
	if (spoilt == (openblas_threads ? OPENBLAS : OWN))
		c[m * n - 1] *= spoil;
}

/* The check with what is said on standard error, in `said`. */
static int check(bool openblas, char said[512])
{
	const int saved = dup(2), file = open(at("said"), O_RDWR | O_CREAT | O_TRUNC, 0666);
	dup2(file, 2);
	const int rc = check_before_work(openblas);
	dup2(saved, 2);
	const ssize_t n = pread(file, said, 511, 0);
	said[n > 0 ? n : 0] = 0;
	close(saved), close(file);
	return rc;
}

static void products_are_checked(void **state)
{
	(void)state;
	static const real by[] = {1.01, NAN, -1, 0};
	char said[512];
	for (int openblas = 0; openblas < 2; openblas++) {
		spoilt = NONE;
		assert_int_equal(check(openblas, said), 0);
		assert_string_equal(said, "");
	}
	for (int i = 0; i < COUNT(by); i++) {
		spoil = by[i];
		/* ling's own kernel computes some products in any case */
		spoilt = OWN;
		for (int openblas = 0; openblas < 2; openblas++) {
			assert_int_equal(check(openblas, said), -1);
			expect_error("ling's products are wrong on this processor|make clean && make");
		}
		spoilt = OPENBLAS;
		assert_int_equal(check(true, said), -1);
		expect_error("OpenBLAS's |computes wrong products on this processor|OPENBLAS_CORETYPE=");
		assert_string_equal(said, "");
		/* where it computes nothing, it is told and no error */
		assert_int_equal(check(false, said), 0);
		assert_non_null(strstr(said, "warning: OpenBLAS's "));
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {TEST(products_are_checked)};
	kernels_init(false);
	return cmocka_run_group_tests(tests, NULL, NULL);
}
