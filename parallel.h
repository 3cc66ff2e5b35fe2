/*
 * parallel.h - ranks: process groups, collectives over them, layouts, and who computes which part of a batch. The only file that calls MPI.
 */
#ifndef LING_PARALLEL_H
#define LING_PARALLEL_H

#include "files/base.h"

#include <stdbool.h>
#include <stdint.h>

struct group { int rank, size, comm; }; /* comm: MPI's handle */
struct layout {
	struct group world;
	struct group data;           /* ranks with the same part of heads and vocabulary, which split the batch */
	struct group tensor;         /* ranks that split heads, vocabulary and, between them, the tokens of a micro-batch */
	struct group expert;         /* ranks that split the experts */
	struct group expert_data;         /* ranks with the same experts */
};

/* What the ranks of a group exchange something for: a collective's name, and the account on which the bytes go that this rank sends. */
enum traffic {
	TRAFFIC_GATHER, TRAFFIC_SUM, /* of tokens, over the tensor group: slices, and partial_sums of a sum */
	TRAFFIC_PLAN, TRAFFIC_DISPATCH, TRAFFIC_RETURN, /* expert rows: how many there will be, on their way, and back; forward and backward */
	TRAFFIC_GRADIENTS, TRAFFIC_WEIGHTS,
	TRAFFIC_HEAD,                /* the sums of a split vocabulary */
	TRAFFIC_STATISTICS,          /* counts of the router, losses, norms */
	NUM_TRAFFIC
};
extern const char *const traffic_names[NUM_TRAFFIC];

/* Starts MPI if a launcher started this process; parallel_stop(0) ends it, any other status ends all ranks at once. */
void parallel_start(void);
void parallel_stop(int status);
int parallel_rank(void); /* before the start, what the launcher says */
int parallel_size(void);
int parallel_local_ranks(void); /* on this machine */
const char *parallel_host(void); /* the name of this rank's machine */
/* Moves on the collectives that were started and are not finished: MPI sends and receives only while it is called, so whoever computes
 * between start and finish calls this now and then. Does nothing when none is under way. */
void parallel_progress(void);
double parallel_seconds(void); /* spent in communication so far */
/* Bytes that this rank has sent so far. A block that several ranks get counts once for each, whatever way MPI takes. */
void parallel_bytes(int64_t bytes[NUM_TRAFFIC]);
/* The ranks on this machine, their threads, and the cores they may run on. On all ranks together. `first` says whether this rank is the
 * first of all that have more threads than cores. */
struct oversubscription { int ranks, threads, cores; bool first; };
struct oversubscription parallel_oversubscription(int threads);
/* On all ranks together: -1 on every one if one of them brings -1, and error_text then names the first such rank. */
int parallel_agree(int rc);
/* On all ranks together: fails on those whose value is not rank 0's, and then on all. `what` names it. */
int parallel_same(uint64_t value, const char *what);
/* Whether every rank comes here within a second: then one message will do for all. */
bool parallel_all_failed(void);

/* The groups of a rank, not yet connected: enough to plan with. */
struct layout layout_of_rank(int rank, int ranks, int tensor, int expert);
void layout_connect(struct layout *l);
/* n elements in `parts` contiguous slices: where slice i begins. */
int64_t shard_begin(int64_t n, int i, int parts);
/* A rank's part of a global batch: the batch is cut into micro-batches in order, the last one short, and these are dealt out in turn, so
 * that every layout has the same ones. Micro-batch i of a rank begins with sequence first + i * step; beyond the batch it is empty. */
struct micro_batches { int64_t num, first, step, size, batch; }; /* size: sequences of a whole one; batch: of the global batch */
struct micro_batches micro_batches_of_rank(const struct group *data, int64_t batch, int micro_batch);
/* Sequences of micro-batch i, 0 .. size. */
int64_t micro_batch_sequences(const struct micro_batches *m, int64_t i);
/* Which of the rank's sequences, micro-batch after micro-batch, sequence i of the global batch is; -1 when another rank has it. */
int64_t micro_batch_place(const struct micro_batches *m, int64_t i);

/* All ranks of the group call these together. Rows are `width` reals; rank r's slice of `rows` rows begins at shard_begin(rows, r, size). */
/* The sum, or the largest, of x over the ranks, in place on every one. */
void all_reduce_sum(const struct group *g, enum traffic traffic, double *x, int64_t n);
void all_reduce_max(const struct group *g, enum traffic traffic, real *x, int64_t n);
/* out [rows, width] from every rank's slice, which may stand in its place in out already. A group of one leaves out as it is. */
void all_gather(const struct group *g, enum traffic traffic, real *out, const real *in, int64_t rows, int64_t width);
/* out = this rank's slice of the sum over the ranks of in [rows, width]: out may be the slice of `in`. scratch [reduce_scatter_scratch()].
 * Between start and finish, `in` must not change. */
struct reduce_scatter { struct group group; enum traffic traffic; const real *in; int64_t rows, width; real *scratch; void *requests; int num_requests; };
int64_t reduce_scatter_scratch(const struct group *g, int64_t rows, int64_t width);
void reduce_scatter(const struct group *g, enum traffic traffic, real *out, bool accumulate, const real *in, int64_t rows, int64_t width,
		real *scratch);
void reduce_scatter_start(struct reduce_scatter *s, const struct group *g, enum traffic traffic, const real *in, int64_t rows, int64_t width,
		real *scratch);
void reduce_scatter_finish(struct reduce_scatter *s, real *out, bool accumulate);
/* out [size, n]: what each rank has for this one in its own `in` [size, n]. */
void all_to_all_counts(const struct group *g, enum traffic traffic, int64_t *out, const int64_t *in, int n);
/* Sends send[r] rows of `in` to each rank r and takes receive[r] rows from it into out, both in rank order. Until it is finished, `in` must not
 * change nor out be read. */
struct all_to_all { void *request; int *counts, type; enum traffic traffic; };
void all_to_all_start(struct all_to_all *e, const struct group *g, enum traffic traffic, real *out, const int64_t *receive, const real *in,
		const int64_t *send, int64_t width);
void all_to_all_finish(struct all_to_all *e);
/* One message; a received one may come from any rank, and takes up to `bytes`. */
void send_message(const struct group *g, int to, int tag, const void *x, int64_t bytes);
void receive_message(const struct group *g, int tag, void *x, int64_t bytes);
/* The rank with the largest value. */
int slowest_rank(const struct group *g, double seconds);
/* Rank 0's bytes to all. */
void broadcast(const struct group *g, void *x, int64_t bytes);

#endif
