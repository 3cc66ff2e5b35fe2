/*
 * parallel.h - ranks: process groups, collectives, layouts, and which rank computes which part of a batch. Only
 * parallel.c calls MPI.
 *
 * A rank is one process; a launcher (mpirun, srun) starts several. Without a launcher there is one rank, every group
 * has size 1, and MPI is not started. The names of the collectives are those of MPI and PyTorch.
 */
#ifndef LING_PARALLEL_H
#define LING_PARALLEL_H

#include "files/base.h"
#include "files/trace.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* -- start and end -- */

/* Starts MPI if a launcher started this process. Call once, before everything below but parallel_rank. */
void parallel_start(void);
/* Ends MPI: with status 0 when all ranks come here; with any other status it ends all ranks at once, and does not
 * return. */
void parallel_stop(int status);
/* The rank of this process, from 0. Before parallel_start, what the launcher's environment says. */
int parallel_rank(void);
int parallel_size(void);
/* Ranks on this machine. */
int parallel_local_ranks(void);
/* The name of this rank's machine. */
const char *parallel_host(void);
/* The name of the machine of another rank. */
const char *parallel_rank_host(int rank);
/* host [parallel_size()]: the number of each rank's machine, in the order of their first ranks. Returns how many
 * machines there are. */
int parallel_hosts(int *host);

/* The ranks, their threads and the cores that they may run on, of this machine. `first`: this rank is the first of all
 * ranks whose machine has more threads than cores. Collective: all ranks call it, each with its number of threads. */
struct oversubscription { int ranks, threads, cores; bool first; };
struct oversubscription parallel_oversubscription(int threads);

/* -- errors: what one rank finds, all must know -- */

/* Collective. Returns rc if every rank's is at least 0. Else it fails on every rank, with the message of the first
 * rank whose rc is -1, which it names unless all failed. */
int parallel_agree(int rc);
/* From now on the ranks of this group, which are consecutive ones, agree among themselves: every "collective" of this
 * part is one of the group. At first all ranks agree. */
struct group;
void parallel_agree_within(const struct group *g);
/* Collective. Fails on every rank if some rank's value is not that of rank 0; `what` names it in the message. */
int parallel_same(uint64_t value, const char *what);
/* True if every rank calls this within a second: then all failed in the same way, and one message is enough. */
bool parallel_all_failed(void);

/* -- groups and layouts -- */

/* A group of ranks, in which this process is number `rank` of `size`; comm is MPI's handle. */
struct group { int rank, size, comm; };

/* The groups that a rank is in. World = data x tensor; expert and expert_data divide the world in another way. With
 * local SGD (docs/local-sgd.md) the ranks are several worlds of the same form, the replicas: consecutive ranks, each
 * with a whole model. Else there is one replica, and `all` and `world` are the same ranks. */
struct layout {
	struct group all;            /* all ranks of the run */
	struct group replicas;       /* ranks with the same place in their replica: the same shards of the same weights */
	struct group world;          /* the ranks of this replica */
	struct group data;           /* ranks with the same shard of heads and vocabulary, which divide the batch */
	struct group tensor;         /* ranks that divide heads, vocabulary and, in between, the tokens of a micro-batch */
	struct group expert;         /* ranks that divide the experts */
	struct group expert_data;    /* ranks with the same experts */
};

/* Refuses a layout that does not fit a model with so many query heads, key-value heads, vocabulary entries and experts,
 * naming the values that would. prefix: what stands before "tensor" and "expert" where they are set, "parallel." or
 * "--". */
int layout_check(int heads, int kv_heads, int vocab_size, int num_experts, int ranks, int tensor, int expert,
		const char *prefix);
/* The layout of rank `rank` of `ranks`, with `tensor` ranks in a tensor group and `expert` in an expert group. It is
 * not connected: it serves to plan, and the collectives cannot use it. */
struct layout layout_of_rank(int rank, int ranks, int tensor, int expert);
/* The same where the ranks are `replicas` replicas, which divides their number. */
struct layout layout_of_replica(int rank, int ranks, int replicas, int tensor, int expert);
/* The same for inference, where ranks that divide no model between them need nothing of each other: as many replicas
 * as there can be, each of the fewest ranks that are whole tensor groups and whole expert groups. */
struct layout layout_of_inference(int rank, int ranks, int tensor, int expert);
/* Collective. Makes MPI's communicators, so that the collectives can be used. */
void layout_connect(struct layout *l);

/* Where shard i of n elements in `shards` contiguous shards begins, 0 <= i <= shards: sizes differ by at most 1. */
int64_t shard_begin(int64_t n, int i, int shards);

/* The micro-batches of a rank. The global batch is cut into micro-batches in order, of which the last may be short;
 * data ranks take them in turn. So every layout has the same micro-batches. Number i of this rank, 0 <= i < num,
 * begins with sequence first + i * step of the global batch; it is empty if that is beyond the batch. */
struct micro_batches {
	int64_t num, first, step;
	int64_t size, batch;         /* sequences of a whole micro-batch, and of the global batch */
};
struct micro_batches micro_batches_of_rank(const struct group *data, int64_t batch, int micro_batch);
/* Of `data` data ranks, those that no micro-batch of a batch is left for: they compute nothing. */
int64_t idle_data_ranks(int data, int64_t batch, int micro_batch);
/* Prints a warning when there are such ranks, with what would help: in a whole batch, or in the first one, which may be
 * smaller. */
void warn_of_idle_ranks(int data, int batch, int micro_batch, int first_batch);
/* Sequences of micro-batch i of the rank, 0 .. size. */
int64_t micro_batch_sequences(const struct micro_batches *m, int64_t i);
/* The place of sequence i of the global batch among the sequences of the rank, which stand one micro-batch after the
 * other; -1 when another rank has it. */
int64_t micro_batch_place(const struct micro_batches *m, int64_t i);

/* -- collectives -- All ranks of a group call these together, in the same order. A group of size 1 needs no MPI.
 * Results are the same bits each time: sums are taken in the order of the ranks. A matrix [rows, width] of reals is
 * divided by rows: the shard of rank r has the rows from shard_begin(rows, r, size) to shard_begin(rows, r + 1, size)
 * - 1. Counts of rows, and of what is sent at once, must be less than 2^31; a larger one ends all ranks with a
 * message. */

/* What a collective is for (enum traffic) is in files/trace.h, which counts the time and the bytes of each. */

/* A collective that was started, and is not finished: between an all_gather_start or all_to_all_start and
 * collective_finish. */
struct collective {
	void *request;               /* MPI_Request; NULL with a group of size 1 */
	int *counts, type;           /* what MPI reads meanwhile; MPI's handle of the type of a row */
	enum traffic traffic;
	uint64_t begun;              /* trace_now() */
	int64_t bytes;               /* that this rank sends */
};
/* Waits until it is done. */
void collective_finish(struct collective *c);

/* x [n]: the sum over the ranks, or the largest of any rank, in place on every rank. */
void all_reduce_sum(const struct group *g, enum traffic traffic, double *x, int64_t n);
void all_reduce_max(const struct group *g, enum traffic traffic, real *x, int64_t n);

/* out [rows, width] from the shards of all ranks. in: this rank's shard, which may be in its place in out already.
 * With a group of size 1 nothing is done: the shard must be in its place. */
void all_gather(const struct group *g, enum traffic traffic, real *out, const real *in, int64_t rows, int64_t width);
/* The same of n numbers in bfloat16; with a group of size 1 they are copied. */
void all_gather_bf16(const struct group *g, enum traffic traffic, uint16_t *out, const uint16_t *in, int64_t n);

/* The same with this rank's shard in its place in `out`, in two parts: from start to finish, `out` may not be
 * touched. */
void all_gather_start(struct collective *c, const struct group *g, enum traffic traffic, real *out, int64_t rows,
		int64_t width);

/* out = (or with accumulate, += ) this rank's shard of the sum over the ranks of in [rows, width]; out may be that
 * shard of in itself. scratch [reduce_scatter_scratch()]. In two parts: from start to finish, neither `in` nor scratch
 * may be changed. bf16: the numbers travel in bfloat16, rounded to nearest, ties to even; the sums are taken as
 * otherwise, in reals, and what this rank itself adds is not rounded. */
struct reduce_scatter {
	struct group group;
	enum traffic traffic;
	const real *in;              /* [rows, width] */
	int64_t rows, width;
	real *scratch;               /* [size, rows of the shard, width] what came from each rank */
	uint16_t *halves;            /* the same in bfloat16, and then `in` [rows, width] as it is sent; else NULL */
	uint64_t begun;              /* trace_now() */
	int64_t bytes;               /* that this rank sends */
	void *requests;              /* [num_requests] MPI_Request */
	int num_requests;
};
int64_t reduce_scatter_scratch(const struct group *g, int64_t rows, int64_t width);
void reduce_scatter(const struct group *g, enum traffic traffic, real *out, bool accumulate, const real *in,
		int64_t rows, int64_t width, real *scratch);
void reduce_scatter_start(struct reduce_scatter *s, const struct group *g, enum traffic traffic, const real *in,
		int64_t rows, int64_t width, bool bf16, real *scratch);
void reduce_scatter_finish(struct reduce_scatter *s, real *out, bool accumulate);

/* out [size, n]: out[r] is what rank r has in its in[this rank]; in [size, n]. */
void all_to_all_counts(const struct group *g, enum traffic traffic, int64_t *out, const int64_t *in, int n);

/* Sends send_rows[r] rows of `in` to each rank r, and receives receive_rows[r] rows from it into `out`; both arrays
 * are in the order of the ranks, [sum of rows, width]. From start to finish, `in` must not be changed and `out` not be
 * read. */
void all_to_all_start(struct collective *c, const struct group *g, enum traffic traffic, real *out,
		const int64_t *receive_rows, const real *in, const int64_t *send_rows, int64_t width);

/* Moves on the collectives that were started and are not finished. MPI moves data only while it is called, so call this
 * now and then between start and finish. On rank 0 it also answers the ranks that ask a shared counter. Does nothing
 * when neither is under way; not collective. */
void parallel_progress(void);

/* x [bytes] becomes that of rank 0 on every rank. */
void broadcast(const struct group *g, void *x, int64_t bytes);

/* The rank whose `seconds` are largest, the first among equals. */
int slowest_rank(const struct group *g, double seconds);

/* -- messages from one rank to another -- */

/* Sends x to rank `to`, where receive_message with the same tag, 0 .. 32767, takes it. Returns as soon as x may be
 * changed. */
void send_message(const struct group *g, int to, int tag, const void *x, int64_t bytes);
enum { ANY_RANK = -1 };
/* Receives the next message with this tag from rank `from`, or from ANY_RANK, of at most `bytes`. */
void receive_message(const struct group *g, int from, int tag, void *x, int64_t bytes);

/* Sends a copy of x, of any size, without waiting: the copy is kept until it has been received. */
struct posted_message;
struct outbox { struct posted_message *list; size_t count, capacity; }; /* begins as {0} */
void post_message(struct outbox *o, const struct group *g, int to, int tag, const void *x, int64_t bytes);
/* Waits until all have been received. */
void outbox_wait(struct outbox *o);
/* The next message that post_message has sent with this tag, from whichever rank, and its size; the caller frees it.
 * Without `wait`, NULL when none has come. */
void *take_message(const struct group *g, int tag, bool wait, int64_t *bytes);

/* -- a shared counter -- Work whose parts take times that nobody knows is not divided beforehand: a rank that is free
 * takes the next numbers. Rank 0 has the counter, and answers whenever it waits for other ranks, and in
 * parallel_progress. So the numbers come as messages, which move over any network; a counter that others read in rank
 * 0's memory (MPI's one-sided calls) would over TCP too have to wait until rank 0 calls MPI. */

struct shared_counter {
	int64_t count, next;         /* how many numbers there are; the next one, as far as this rank knows */
	int takers;
	bool asked;                  /* an answer is awaited */
	int64_t question, answer[2]; /* how many numbers are asked for; the first number given, and how many they are */
	void *requests;              /* [2] MPI_Request of both */
	int64_t (*answers)[2];       /* of rank 0, [ranks] the last answer to each, */
	void *sending;               /* [ranks] and MPI_Request of its message */
};
/* Collective, all ranks. The numbers 0 .. count - 1 will be given, each once. `takers`: the ranks that will ask, about.
 * There is one shared counter at a time. */
void counter_open(struct shared_counter *c, int64_t count, int takers);
/* Takes the next numbers: returns how many, 1 .. most, and the first of them. Towards the end a taker gets fewer than
 * it asks for, so that all end together. 0: no number is left. */
int64_t counter_take(struct shared_counter *c, int64_t most, int64_t *first);
/* The same without waiting for rank 0: COUNTER_ASKED when its answer has not come yet. Then call it again, later. */
enum { COUNTER_ASKED = -1 };
int64_t counter_poll(struct shared_counter *c, int64_t most, int64_t *first);
/* No rank gets a number any more: for a rank that has failed. */
void counter_stop(struct shared_counter *c);
/* Collective: rank 0 answers until all ranks are here. */
void counter_close(struct shared_counter *c);

#endif
