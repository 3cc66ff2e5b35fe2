/*
 * training/spikes.h - loss and gradient spikes: a detector over the steps of a run, and the queue of samples that wait
 * to be tried again.
 *
 * A spike is a batch whose loss or gradient norm lies far above those of the last steps, or is not finite. "Far" is
 * measured by robust statistics, which a few large values cannot move: x deviates by
 *     (x - median) / max(1.4826 MAD, floor |median|)
 * robust standard deviations from the last `window` accepted values, where MAD is the median of their distances from
 * their median; 1.4826 MAD estimates the standard deviation of a normal distribution (Hampel 1974). The relative floor
 * keeps a flat stretch, where MAD is nearly 0, from making a spike of every small rise.
 * Where the values fall, as the loss does early in a run, the fall itself would count as deviation, and hide a spike.
 * So if the median of the window's second half is below that of the first by more than a standard deviation, all values
 * are first moved down along the line through these two medians, to where they would be now, unless they then lie
 * further apart. A rise is not taken out.
 */
#ifndef LING_TRAINING_SPIKES_H
#define LING_TRAINING_SPIKES_H

#include "files/base.h"
#include "files/config.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* What is watched. The first two decide what is done with a batch; the third is only reported. */
enum spike_signal { SPIKE_LOSS, SPIKE_GRAD_NORM, SPIKE_UPDATE_NORM, NUM_SPIKE_SIGNALS };
enum { NUM_DECIDING_SIGNALS = 2 };

/* Spikes one after the other that make a new level: see SPIKE_LEVEL_SHIFT. */
enum { LEVEL_SHIFT_RUN = 5 };

struct spike_detector {
	struct spike_options options;
	int count;                   /* accepted steps in the windows, 0 .. options.window */
	double *values[NUM_SPIKE_SIGNALS]; /* [options.window] of the accepted steps, oldest first */
	int run;                     /* spikes with finite values one after the other, up to the last batch */
	double run_values[NUM_DECIDING_SIGNALS][LEVEL_SHIFT_RUN]; /* theirs, oldest first */
	int num_skips;               /* batches skipped of the last options.window */
	int64_t *skips;              /* [options.max_skips + 1] their numbers, ascending */
};

enum spike_verdict {
	SPIKE_NONE,
	SPIKE_FOUND,
	/* The level has changed for good: LEVEL_SHIFT_RUN batches one after the other were spikes with finite values that
	 * agree with each other: they differ by less than half of what they lie above the old median. */
	SPIKE_LEVEL_SHIFT,
};

/* Makes a detector that has seen nothing. Fails when memory is short; spike_detector_free may follow. */
int spike_detector_init(struct spike_detector *d, const struct spike_options *o);
void spike_detector_free(struct spike_detector *d);
/* Forgets all steps and skips. */
void spike_detector_clear(struct spike_detector *d);
/* Forgets the skips and the run of spikes; the windows stay. */
void spike_detector_forget_skips(struct spike_detector *d);

/* The deviation of x in robust standard deviations: infinity if x is not finite; 0 while fewer than options.warmup
 * steps have been accepted. */
double spike_deviation(const struct spike_detector *d, enum spike_signal signal, double x);

/* Judges a batch by its loss and gradient norm, and gives their deviations. Changes only the run of spikes; a level
 * shift also forgets the skips and the windows, which then hold the values of the run before this batch. */
enum spike_verdict spike_judge(struct spike_detector *d, const double x[NUM_DECIDING_SIGNALS],
		double deviation[NUM_DECIDING_SIGNALS]);

/* Adds a step that was taken to the windows. A value that is not finite, of a signal that is only reported, counts as
 * the largest of its window. */
void spike_accept(struct spike_detector *d, const double x[NUM_SPIKE_SIGNALS]);

/* Notes that batch number `batch` of the run was skipped. Returns whether more than options.max_skips of the last
 * options.window batches were. */
bool spike_skipped(struct spike_detector *d, int64_t batch);

/* The state as JSON, which the caller owns, and back, where `where` names it in messages. A detector with a smaller
 * window than the state's keeps the newest values. */
json_t *spike_detector_to_json(const struct spike_detector *d);
int spike_detector_from_json(struct spike_detector *d, const json_t *state, const char *where);

/* A sample of a batch, or one that waits in the queue. */
struct batch_sample {
	int file;                    /* index in data.train */
	int64_t number;              /* of that file's samples: see blend_sample_at */
	int attempts;                /* batches with it that were skipped, 0 .. MAX_ATTEMPTS - 1 */
	int64_t due;                 /* in the queue: the first batch that it may be in */
};
/* With so many skipped batches a sample is dropped. */
enum { MAX_ATTEMPTS = 3 };

/* Samples of skipped batches, until they are in another batch: the longest waiting first. */
struct retry_queue {
	struct batch_sample *list;   /* [count] */
	int64_t count;
	size_t capacity;
};
void retry_queue_free(struct retry_queue *q);
/* Puts the n samples of batch number `batch`, which was skipped, into the queue, each with one attempt more. Each is
 * due at a random one of the next `within` batches but the very next one; of `within` samples no two at the same. Those
 * that have had MAX_ATTEMPTS are left out: they become the first of samples [n], and their number is returned. */
int64_t retry_queue_add(struct retry_queue *q, struct batch_sample *samples, int64_t n, uint64_t seed, int64_t batch,
		int within);
/* Takes what is due from the queue into batch number `batch`: at most half of its n samples, but one at least, to
 * random places of samples [n]. The other places become a sample of file -1: they are to be filled with new samples. */
void retry_queue_draw(struct retry_queue *q, struct batch_sample *samples, int64_t n, uint64_t seed, int64_t batch);
/* Moves the samples of files that are in the blend no more (index [num_files] -1) to `lost`, which has room for
 * q->count, and returns their number; the others get the index of their file in the new blend. */
int64_t retry_queue_remap(struct retry_queue *q, const int *index, struct batch_sample *lost);

/* Which samples they are, for events: an array of [file, first number, last number], sorted. Sorts the list. */
json_t *samples_to_json(struct batch_sample *samples, int64_t n);
/* The queue as JSON, which the caller owns, and back: a sample's file must be below num_files, its number below
 * taken[file], and it must be due within MAX_SPIKE_WINDOW batches of batch number `batch`. */
json_t *retry_queue_to_json(const struct retry_queue *q);
int retry_queue_from_json(struct retry_queue *q, const json_t *state, const char *where, int num_files,
		const int64_t *taken, int64_t batch);

#endif
