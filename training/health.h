/*
 * training/health.h - sick hardware: replicas that are no longer equal, results that are not the same twice, and ranks
 * that are slow.
 */
#ifndef LING_TRAINING_HEALTH_H
#define LING_TRAINING_HEALTH_H

#include "files/base.h"
#include "files/config.h"
#include "model/parameters.h"
#include "parallel.h"
#include "training/events.h"

#include <stddef.h>
#include <stdint.h>

/* -- replicas -- */

/* Something besides weights that all ranks have alike. */
struct replicated { const char *name; const void *data; size_t size; };

struct health_input {
	const struct parameter_table *table;
	const struct model_config *config; /* of the whole model */
	const real *weights;         /* [table->num_elements] */
	const struct replicated *values; /* [num_values] */
	int num_values;
	double loss[2];              /* of one micro-batch of this rank, computed twice: the same bits, or it is sick */
};
/* Compares by checksums what ranks must have alike: each parameter over the ranks of its sharing group, and the values
 * over all ranks. First one checksum of all parameters with the same sharing; only if these differ one for each
 * parameter. Fails on all ranks when something differs: error_text and the event replicas_differ name the tensors, and
 * the ranks that have something else than most of their group; all of the group where no majority agrees. A rank whose
 * two losses differ is no failure: it is named in an event, miscomputed, and on standard error. step: updates done.
 * Collective. log: of rank 0. */
int health_check(const struct health_input *in, const struct event_log *log, int64_t step);

/* -- slow ranks -- */

enum { SLOW_WINDOW = 50, SLOW_AGAIN = 1000 }; /* steps */
#define SLOW_RATIO 1.3

/* The speed of the ranks. A rank is slow when the time that it computes for a unit of work is more than SLOW_RATIO
 * times the median of all ranks, as a mean over SLOW_WINDOW steps and again over the next SLOW_WINDOW: so one long
 * pause is not enough. An even number of ranks has two medians; the smaller one is taken, so that of two ranks the
 * faster one is the measure. */
struct slow_ranks {
	double seconds, work;        /* of this rank, in the current window */
	int steps;                   /* of the current window so far */
	int num_ranks;
	struct rank_speed {
		bool above;              /* in the last window */
		bool named;              /* it is slow, and not well again yet */
		int64_t told;            /* the step at which it was last named; 0: never */
	} *rank;                     /* [num_ranks] owned */
};
void slow_ranks_free(struct slow_ranks *s);
/* Adds a step: the seconds that this rank computed, waiting not counted, and its work, in any unit, the same for all;
 * 0: it had none. After each SLOW_WINDOW steps the ranks compare. Collective. log: of rank 0. step: updates done. */
void slow_ranks_step(struct slow_ranks *s, const struct group *world, double seconds, double work,
		const struct event_log *log, int64_t step);
/* What they do then: pace [num_ranks] has each rank's seconds for a unit of work; 0: it had no work, and is not judged.
 * A rank that is slow is named, on standard error and in an event slow_rank, at most once in SLOW_AGAIN steps; when it
 * no longer is, there is an event slow_rank_over. Only rank 0 tells (`tell`). */
void slow_ranks_compare(struct slow_ranks *s, const double *pace, int num_ranks, bool tell,
		const struct event_log *log, int64_t step);

#endif
