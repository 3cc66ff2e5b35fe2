/*
 * training/faults.h - faults to order: what `ling train --inject` makes happen, so that recovery can be tried.
 *
 * A fault is KIND@step=N[,rank=R][,during=WHEN][,ms=M][,probability=P]. It comes when a rank begins step N (counted
 * from 1); with during=update between the gradient and the update of step N; with during=save while the checkpoint
 * after step N is written; with during=norms and during=synchronisation in the synchronisation of local SGD after step
 * N, when the rank comes to the exchange of the norms, and in the middle of the exchange of the blocks. With a
 * probability P it comes at each step from N on with that probability, which the seed and the step decide. Each time
 * it comes it is written to events.jsonl, kind `fault`, before it acts. Where that file says that it has come at a
 * step, it does not come there again: so a run that is started again gets past it.
 */
#ifndef LING_TRAINING_FAULTS_H
#define LING_TRAINING_FAULTS_H

#include "files/base.h"
#include "files/safetensors.h"
#include "model/parameters.h"
#include "training/events.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

enum fault_kind {
	FAULT_KILL,                  /* the rank dies, as by kill -9 */
	FAULT_STOP,                  /* the rank stands still, as by kill -STOP */
	FAULT_NAN, FAULT_INF,        /* an element of the summed gradient is so on the rank that updates it */
	FAULT_FLIP,                  /* one bit of one weight of the rank is turned */
	FAULT_SLOW,                  /* the rank sleeps ms milliseconds in every step from N on */
	FAULT_DISKFULL,              /* the rank has no room on the disk for the checkpoint after step N */
	FAULT_POISON,                /* the batch's targets are random, also when its samples come back; on all ranks */
	NUM_FAULT_KINDS
};

/* When in a step faults come: before the forward pass; between the gradient and the update; while the checkpoint after
 * it is written; at two moments of the synchronisation after it. */
enum fault_moment {
	MOMENT_STEP, MOMENT_UPDATE, MOMENT_SAVE, MOMENT_NORMS, MOMENT_SYNCHRONISATION,
	NUM_FAULT_MOMENTS
};

struct fault {
	enum fault_kind kind;
	const char *text;            /* as it was given */
	int64_t step;
	/* the rank that it comes to; FAULT_POISON: to the samples of its replica (local SGD), or, -1, of all */
	int rank;
	enum fault_moment moment;
	double ms;                   /* of FAULT_SLOW */
	double probability;          /* 1: at step N alone (FAULT_SLOW: in it and all later ones) */
	int64_t *past;               /* [num_past] steps at which it has come */
	int num_past;
	size_t capacity;
};

struct faults {
	struct fault *list;          /* [count] */
	int count;
	int rank;                    /* of this process */
	uint64_t seed;
	struct event_log log;
	json_t *poisoned;            /* array of [file, first, last]: samples whose targets are random; or NULL */
};

/* Reads n texts, which must outlive *f. Fails, naming the text, at the first that is no fault, or that is for a rank
 * beyond the `ranks` of the run. faults_free may follow in any case. */
int faults_read(struct faults *f, int n, char *const *texts, int ranks);
/* Takes the rank of this process, and what RUN_DIR/events.jsonl says about faults that have come. Fails where a fault
 * is to come in a synchronisation and there are none, parallel.sync not being local. No rank may write events before
 * all have come back from here. */
int faults_begin(struct faults *f, const char *run_dir, int rank, uint64_t seed, bool synchronises);
void faults_free(struct faults *f);

/* The first fault of that kind that comes to this rank at that moment of the step; NULL if none does. It does not come
 * there again. FAULT_POISON comes to all ranks. */
const struct fault *fault_comes(struct faults *f, enum fault_kind kind, int64_t step, enum fault_moment moment);
/* Writes the event of a fault that has come; of FAULT_POISON on rank 0. members: more of it, which is released; or
 * NULL. */
void fault_write(const struct faults *f, const struct fault *x, int64_t step, json_t *members);

/* What a fault can harm: this rank's weights and gradients, [table->num_elements] each. */
struct fault_target { const struct parameter_table *table; real *weights, *gradients; };
/* Does what comes to this rank at a moment other than MOMENT_SAVE, but for FAULT_POISON. */
void faults_act(struct faults *f, int64_t step, enum fault_moment moment, const struct fault_target *target);

/* What comes while this rank writes the checkpoint after `step`, of which it writes so many bytes of weights: it comes
 * after half of them. The event is written at once. */
struct write_fault faults_in_save(struct faults *f, int64_t step, int64_t bytes);

/* Whether FAULT_POISON comes to the batch of this step. If so its samples, as samples_to_json (training/spikes.h) lists
 * them, must be given to faults_poison, which remembers them and writes the event. */
const struct fault *fault_poisons(struct faults *f, int64_t step);
void faults_poison(struct faults *f, const struct fault *x, int64_t step, json_t *samples);
/* Makes the targets [L] that count of sample `number` of a file random ids, 0 .. vocab_size - 1, if the sample is
 * poisoned: the same ones whenever it comes. */
void faults_poison_targets(const struct faults *f, int file, int64_t number, int32_t *target, int64_t L,
		int vocab_size);

#endif
