/*
 * commands/merge.h - `ling merge`: checkpoints of a run at a constant learning rate become one model, with the weights
 * that stand for a decay of that rate.
 */
#ifndef LING_COMMANDS_MERGE_H
#define LING_COMMANDS_MERGE_H

#include "commands/command.h"
#include "files/config.h"

#include <stdint.h>

/* The weights [n] of checkpoints at n >= 2 rising steps that stand for a decay of the learning rate, which begins at
 * the first one and ends at the last one with `final` times the rate that it began with. The weights sum to 1. See the
 * comment in merge.c. */
void decay_weights(double *weights, const int64_t *steps, int n, enum decay_shape shape, double final);

extern const struct command merge_command;

#endif
