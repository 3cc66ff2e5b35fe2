/*
 * commands/random_steps.h - training steps on random tokens, to time them.
 */
#ifndef LING_COMMANDS_RANDOM_STEPS_H
#define LING_COMMANDS_RANDOM_STEPS_H

#include "ling.h"

/* Fills the batch of step i with random tokens, the same for each replica of local SGD. */
void random_batch(struct trainer *t, int i);

#endif
