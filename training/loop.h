/*
 * training/loop.h - one training run: steps, evaluations, metrics, checkpoints, until its end.
 */
#ifndef LING_TRAINING_LOOP_H
#define LING_TRAINING_LOOP_H

#include "ling.h"

/* Writes the checkpoint of the current step, and removes old ones; does nothing when it is there already. Collective.
 * Fails, and writes nothing, when weights or moments are not finite. */
int trainer_save(struct trainer *t);
/* How a run ended, the same on all ranks. RUN_DONE: at its end, or at stop_at_step; RUN_STOPPED: a signal asked for a
 * stop, and the step is saved; RUN_GO_BACK: it must continue from an earlier checkpoint, error_text says why. */
enum run_result { RUN_FAILED = -1, RUN_DONE, RUN_STOPPED, RUN_GO_BACK };
/* Trains to the end, or until a rank is asked to stop; not at all beyond stop_at_step. */
enum run_result trainer_run(struct trainer *t);

#endif
