/*
 * training/decision.h - what is done with a batch: an ordinary step, a step with a lower learning rate, no step, or the
 * end of the run; and telling of it.
 */
#ifndef LING_TRAINING_DECISION_H
#define LING_TRAINING_DECISION_H

#include "data.h"
#include "training/events.h"
#include "training/spikes.h"

#include <stdbool.h>
#include <stdint.h>

/* What became of a batch, the same on all ranks. */
enum step_result {
	STEP_GO_BACK = -1,           /* the gradient is not finite and spikes.action does not skip, or replicas differ;
	                              * error_text says what */
	STEP_TAKEN,
	STEP_SKIPPED,                /* a spike: its samples wait in the queue, or are dropped */
	STEP_SKIPPED_TOO_MANY,       /* so were more than spikes.max_skips of the last batches; error_text says so */
};

/* What all ranks do with a batch. */
struct decision {
	enum step_result result;
	const char *kind, *message;  /* of the event that tells of it, and in words; NULL: it is an ordinary step */
	bool accept;                 /* its values enter the window of the detector */
	double lr_scale, grad_scale; /* the update is of these times the learning rate, and times the gradient */
	double deviation[NUM_DECIDING_SIGNALS]; /* of loss and gradient norm, see training/spikes.h */
	int attempts;                /* the most that a sample of the batch had been tried before */
};

/* Decides what to do with the batch of *m, whose samples are samples [m->batch], from numbers that are the same on all
 * ranks. grad_clip: the largest gradient norm that is not scaled down; 0: any. Of the detector only the run of spikes
 * changes and, on a level shift, what spike_judge says. The result is STEP_GO_BACK, STEP_TAKEN or STEP_SKIPPED. */
struct decision decide(struct spike_detector *detector, double grad_clip, const struct batch_sample *samples,
		const struct metrics *m);

/* Tells what was decided, and why, unless it is an ordinary step: a line on standard output, and an event. For rank 0.
 * step: updates done, that of this batch included if there was one. batch: the number of the batch. */
void report_decision(const struct decision *d, const struct metrics *m, const struct event_log *events, int64_t step,
		int64_t batch, const struct batch_sample *samples);

/* Which samples they are, for an event: see samples_to_json, which sorts its list. This does not. */
json_t *list_samples(const struct batch_sample *samples, int64_t n);

#endif
