/*
 * training/faults.h - faults to order: what `ling train --inject` makes happen, so that recovery can be tried.
 *
 * A fault is KIND@step=N[,rank=R][,during=save][,ms=M][,probability=P]. It comes when a rank begins step N (counted
 * from 1), or with during=save the checkpoint after step N; with a probability P, at each step from N on with that
 * probability, which the seed and the step decide. Each time it comes it is written to events.jsonl, kind `fault`,
 * before it acts. Where that file says that it has come at a step, it does not come there again: so a run that is
 * started again gets past it.
 */
#ifndef LING_TRAINING_FAULTS_H
#define LING_TRAINING_FAULTS_H

#include "files/base.h"
#include "training/events.h"

#include <stdbool.h>
#include <stdint.h>

enum fault_kind {
	FAULT_KILL,                  /* the rank dies, as by kill -9 */
	FAULT_STOP,                  /* the rank stands still, as by kill -STOP */
	FAULT_NAN, FAULT_INF,        /* an element of the rank's gradient is NaN, or infinite */
	FAULT_FLIP,                  /* one bit of one weight of the rank is turned */
	FAULT_SLOW,                  /* the rank sleeps ms milliseconds in every step from N on */
	FAULT_DISKFULL,              /* the rank has no room on the disk for the checkpoint after step N */
	FAULT_POISON,                /* the batch's targets are random, also when its samples come back; on all ranks */
	NUM_FAULT_KINDS
};

struct fault {
	enum fault_kind kind;
	const char *text;            /* as it was given */
	int64_t step;
	int rank;                    /* the rank that it comes to; of FAULT_POISON without meaning */
	bool during_save;
	int ms;
	double probability;          /* 1: at step N alone (FAULT_SLOW: and in all later ones) */
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
};

/* Reads n texts, which must outlive *f. Fails, naming the text, at the first that is no fault. faults_free may follow
 * in any case. */
int faults_read(struct faults *f, int n, char **texts);
/* Takes the rank of this process, of `ranks`, and what RUN_DIR/events.jsonl says about faults that have come. Fails when
 * a fault names a rank that is not there. */
int faults_begin(struct faults *f, const char *run_dir, int rank, int ranks, uint64_t seed);
/* The first fault of that kind that comes to this rank at the beginning of `step`, or of the save after it; NULL if none
 * does. It is then in events.jsonl. FAULT_POISON comes to all ranks, and rank 0 writes the event. */
const struct fault *fault_comes(struct faults *f, enum fault_kind kind, int64_t step, bool save);
void faults_free(struct faults *f);

#endif
