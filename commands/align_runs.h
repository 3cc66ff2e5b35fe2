/*
 * commands/align_runs.h - the curves of two runs beside each other, and whether they differ more than runs do whose
 * first weights differ by rounding alone.
 */
#ifndef LING_COMMANDS_ALIGN_RUNS_H
#define LING_COMMANDS_ALIGN_RUNS_H

#include <jansson.h>
#include <stdint.h>

/* The probability that the tests against the floor, all together, find a difference where there is none, if the curves'
 * means are normally distributed. */
#define FLOOR_LEVEL 0.001

/* Compares the curves of two runs, dirs[0] and dirs[num - 1], in the steps after `skip` that both have; docs/align.md
 * has the formulas. They agree when the mean of the absolute relative differences of their losses is at most
 * `tolerance`; or, where there are more runs between the two, when all their curves differ by no more than those of the
 * other runs do among each other. Returns the result, whose members are those that `ling align --json` prints, or NULL
 * on error. */
json_t *align_runs(char *const *dirs, int num, int64_t skip, double tolerance);

/* The value that Student's t with so many degrees of freedom exceeds, in either direction, with this probability. */
double student_t(double probability, int freedom);

#endif
