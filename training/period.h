/*
 * training/period.h - a period of local SGD in a run: the steps that each replica takes alone, and the synchronisation
 * after them. training/local_sgd.h has what is computed.
 */
#ifndef LING_TRAINING_PERIOD_H
#define LING_TRAINING_PERIOD_H

#include "data.h"
#include "ling.h"

#include <stdbool.h>

/* Begins a period: from here on the ranks of a replica wait for each other alone. */
void period_begin(struct trainer *t);
/* Counts a step of a period. Returns whether it was the last one. A period by time ends when its time is over or a stop
 * is asked for; one by steps never earlier, for a run that stops and continues must be the same. */
bool period_end_step(struct trainer *t, const struct metrics *m);
/* Ends a period: all ranks meet, and bring together what the replicas have each for themselves but their moments. The
 * weights come with the next forward pass, or with complete_weights. *m, the line of replica 0's last step, becomes
 * that of the run. */
void period_end(struct trainer *t, struct metrics *m);
/* Completes the synchronisation that is under way, if one is. */
void complete_weights(struct trainer *t);
/* Fails, on all ranks, where a replica has other weights than the first one after a synchronisation. Collective. */
int compare_replicas(struct trainer *t);

#endif
