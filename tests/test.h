/* What the test programs share: cmocka, and comparison of arrays by norm. */
#ifndef LING_TEST_H
#define LING_TEST_H

#include "../ling.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#undef fail /* cmocka has its own */
#include <cmocka.h>
#include <math.h>

/* Fails unless |found - expected| <= tolerance |expected|, by the L2 norms of the whole arrays; NaN never passes. */
static inline void assert_close(const real *found, const double *expected, int64_t n, double tolerance, const char *what)
{
	double difference = 0, norm = 0;
	for (int64_t i = 0; i < n; i++) {
		difference += (found[i] - expected[i]) * (found[i] - expected[i]);
		norm += expected[i] * expected[i];
	}
	if (!(sqrt(difference) <= tolerance * sqrt(norm)))
		fail_msg("%s: off by %g of its norm %g", what, sqrt(difference / norm), sqrt(norm));
}

#endif
