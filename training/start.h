/*
 * training/start.h - making a trainer: new, or continued from a checkpoint.
 */
#ifndef LING_TRAINING_START_H
#define LING_TRAINING_START_H

#include "ling.h"

#include <stdio.h>

/* Makes a trainer without data and with weights not set. trainer_free may follow a failure. */
int trainer_allocate(struct trainer *t, const struct config *c);
/* Makes a trainer: data opened and checked; weights random, from init_from, or from the newest checkpoint of
 * output_dir. */
int trainer_init(struct trainer *t, const struct config *c);
void trainer_free(struct trainer *t);
/* Takes state, weights and moments from a checkpoint, which checkpoint_choose has found to be whole. Config and data
 * must be those of the same run. What differs in the config is written to notes; NULL: not. */
int trainer_load(struct trainer *t, const char *dir, FILE *notes);
/* Opens events.jsonl on rank 0, unless it is open. */
int trainer_open_events(struct trainer *t);

#endif
