/*
 * training/local_sgd.h - local SGD after EDiT (arXiv 2412.07210): replicas train alone for a period, then bring their
 * weights together. docs/local-sgd.md has the algorithm, and why it is as it is.
 *
 * At the end of a period each replica i has moved from the weights of the last synchronisation, w_sync, to w_i. For
 * each block of the model (struct parameter), d_i = w_i - w_sync is its pseudo-gradient. The weighted mean d of the d_i
 * is clipped, and an outer SGD with Nesterov momentum makes the new weights of all replicas: b <- momentum b + d, and
 * w_sync <- w_sync + outer_lr (d + momentum b).
 */
#ifndef LING_TRAINING_LOCAL_SGD_H
#define LING_TRAINING_LOCAL_SGD_H

#include "files/config.h"
#include "kernels.h"
#include "model/parameters.h"
#include "parallel.h"
#include "training/events.h"
#include "training/spikes.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* The norms of the pseudo-gradients of one block and one replica so far, those that were set aside left out. */
struct norm_statistics {
	double mean, variance;       /* over the first 1 / (1 - decay) of them plain, then exponential */
	int64_t count;
	int64_t in_row;              /* set aside since the last one that was not */
};

/* The weight of each replica in the mean, weight [n], from its norm [n] and statistics [n], which take the norm in. A
 * replica whose norm is not finite, or above its mean by more than anomaly_deviations standard deviations once
 * anomaly_warmup norms are known, is set aside: its weight is 0. The others have softmax(-norm / mean norm). More than
 * anomaly_warmup set aside in a row are a new level: the statistics begin again with the last of them. Without
 * o->penalty all finite ones have the same weight. whole [n]: the weights for the whole model, or NULL for itself: who
 * is set aside there is so here. Returns how many are set aside. The same numbers give the same bits. */
int replica_weights(double *weight, struct norm_statistics *statistics, const double *norm, const double *whole, int n,
		const struct local_options *o);

/* The outer step of n weights, with `scale` times the mean d: b <- momentum b + scale d, w_sync <- w_sync + outer_lr
 * (scale d + momentum b), which is PyTorch's SGD with nesterov=True and the gradient -scale d. */
void outer_update(real *w_sync, real *b, const real *d, int64_t n, real scale, const struct local_options *o);

/* What is left of a mean whose squares sum to `square` when it is scaled down to the norm o->clip: at most 1. */
real clip_scale(double square, const struct local_options *o);

/* The samples of a run that a period of uneven counts left out, in the order of the data: the next ones are taken from
 * here first. */
struct pending_samples {
	struct batch_sample *list;   /* [count], of which the first `taken` are taken since the period or, without
	                              * replicas, this process began */
	int64_t count, taken;
	size_t capacity;
};

/* The exchange of a bucket between the replicas. */
struct outer_exchange { struct reduce_scatter scatter; struct collective gather; };

struct local_sgd {
	struct local_options options;
	int replicas;                /* 1: parallel.sync is step, and of what follows only `pending` is used */
	int num_blocks;              /* of the model */
	struct norm_statistics *statistics; /* [num_blocks + 1, replicas] of each block; last, of the whole model */
	real *w_sync, *momentum;     /* [table->num_state] of the shards that this rank updates */
	bool w_sync_holds;           /* it has the weights of the last synchronisation; else they are only in the model */
	real *scratch;
	int64_t synchronisations;    /* so far */
	int64_t carry;               /* steps of single replicas that do not make a step of the run yet, < replicas */
	int64_t *counts;             /* [replicas] steps that each has taken in all */
	/* the synchronisation under way */
	int completed;               /* blocks that have their new weights; num_blocks: none is under way */
	double *weight;              /* [num_blocks, replicas] of each d_i in the mean */
	double *norm;                /* [num_blocks + 1, replicas] of each d_i, as statistics */
	struct outer_exchange *exchanges; /* [table->num_buckets] */
	/* the period under way */
	bool in_period;
	int64_t begun, begun_samples, begun_tokens; /* steps, samples and tokens when it began */
	double clock;                /* clock_seconds() then */
	double loss, mtp_loss, balance_loss, z_loss; /* sums over its steps, of the replica */
	/* data: what was drawn in the period, which begins with these */
	struct pending_samples pending;
	struct batch_sample *drawn;  /* [num_drawn] batch after batch */
	int64_t num_drawn;
	size_t drawn_capacity;
};

/* What became of a synchronisation, the same on all replicas. */
struct synchronisation {
	double *norm;                /* [replicas] of the whole pseudo-gradient of each */
	int *set_aside;              /* [replicas] blocks of each that were; all of them where the whole was anomalous */
	int undone;                  /* blocks of which all replicas were set aside: w_sync stays */
};

/* The replicas that so many ranks make, with `tensor` and `expert` in place of the config's own: 1 unless parallel.sync
 * is local. -1 where they do not fit. */
int count_replicas(const struct config *c, int ranks, int tensor, int expert);
/* Allocates what the layout's rank needs; nothing with one replica. local_sgd_free may follow a failure. */
int local_sgd_init(struct local_sgd *s, const struct parameter_table *table, const struct local_options *o);
void local_sgd_free(struct local_sgd *s);

/* Gradients become their sum over the replicas, in the shards that this rank updates, the same bits on all: for steps
 * that all replicas take together. Collective of the replicas. */
void reduce_over_replicas(struct local_sgd *s, const struct parameter_table *table, real *grads);

/* Begins a period with these weights [table->num_elements], which all replicas have alike. step: updates done. */
void local_sgd_begin(struct local_sgd *s, const struct parameter_table *table, const real *weights, int64_t step);
/* Whether the period ends after this step. late: its seconds are over, or a stop was asked for; alike on the
 * replica. */
bool local_sgd_is_over(const struct local_sgd *s, int64_t step, int64_t steps, bool late);
/* Remembers the samples of a batch that was drawn. */
void local_sgd_record(struct local_sgd *s, const struct batch_sample *samples, int64_t n);
/* Removes the pending samples that have been taken. */
void local_sgd_drop_taken(struct local_sgd *s);
/* Puts the first n of the samples that were drawn before the pending ones. */
void local_sgd_put_back(struct local_sgd *s, int64_t n);
/* Gives the pending samples the index of their file in a new blend; those of files that left it, -1, are dropped. */
void local_sgd_remap(struct local_sgd *s, const int *index);
/* What no gradient moves, the expert bias, becomes its mean over the replicas, and w_sync with it: the outer step
 * then leaves it so. Before local_sgd_synchronise. Collective of all ranks. */
void local_sgd_average_bias(struct local_sgd *s, const struct parameter_table *table, real *weights);
/* Ends the period: measures what the replicas have learnt, decides, and starts to bring their weights together. The
 * arrays of *out are given. Collective of all ranks. */
void local_sgd_synchronise(struct local_sgd *s, const struct parameter_table *table, real *weights,
		struct synchronisation *out);
/* Gives the next block, number s->completed, its new weights, and moves on the exchange of the two after it. Until then
 * its weights are not to be read. Collective of all ranks. */
void local_sgd_advance(struct local_sgd *s, const struct parameter_table *table, real *weights);

/* Writes the event of it. steps [replicas]: those that each took in the period; step: updates done. */
void local_sgd_report(const struct local_sgd *s, const struct synchronisation *x, const double *steps,
		const struct event_log *log, int64_t step);

/* What must be remembered, and back, where `where` names it in messages; num_files, taken: as for
 * retry_queue_from_json. From another number of replicas, replica r takes the statistics of replica r modulo theirs.
 * With one replica: the samples that wait; NULL when there are none. */
json_t *local_sgd_to_json(const struct local_sgd *s);
int local_sgd_from_json(struct local_sgd *s, const json_t *state, const char *where, int num_files);

#endif
