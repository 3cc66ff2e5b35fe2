/*
 * commands/self_check.h - each kernel beside its plain form: what `ling doctor` and the tests compare.
 */
#ifndef LING_COMMANDS_SELF_CHECK_H
#define LING_COMMANDS_SELF_CHECK_H

#include "files/base.h"

#include <stdbool.h>
#include <stdint.h>

/* -- self-check: each operation beside its plain form, loops in double straight from the formula -- */
struct check {
	const char *operation;
	bool has_backward;
	double forward, backward;    /* relative errors, by norm: the worst of several sizes and gradients */
};
/* Rounding gives errors of up to about 1e-6 in float, and in double of 1e-9, the central differences' own: what is beyond ten times that is wrong. */
#define CHECK_BOUND (sizeof(real) == 4 ? 1e-5 : 1e-8)
enum { MAX_CHECKS = 16 };
int self_check(struct check checks[MAX_CHECKS], double *scratch); /* returns their number */
int64_t self_check_scratch(void); /* doubles of `scratch` */

#endif
