/*
 * files/trace.h - the trace: where the time of a process goes, and what each rank of a training run is doing.
 *
 * A process does one operation after the other: trace_begin() ends the one before. Within an operation it may wait for
 * other ranks in a collective. Of each operation and collective there are a counter and a histogram, which lose
 * nothing, and a record in a ring, which holds the newest. In a training run all of it is in RUN/trace/rank-N.trace, a
 * mapped file of constant size, which is there also when the process is killed. `ling trace` reads it.
 *
 * The names of operations and collectives are those of the dumps (model/dump.h), of messages, and of the documents.
 */
#ifndef LING_FILES_TRACE_H
#define LING_FILES_TRACE_H

#include "files/heartbeat.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum operation {
	OP_NONE,                     /* nothing that has a name */
	OP_START, OP_BATCH, OP_COUNT_TOKENS,
	OP_EMBEDDING,
	OP_MTP_EMBEDDING_NORM, OP_MTP_HIDDEN_NORM, OP_MTP_PROJECTION, /* the input of an MTP layer */
	OP_ATTENTION_NORM, OP_QKV, OP_QK_NORM, OP_ROPE, OP_ATTENTION_CORE, OP_ATTENTION_OUTPUT,
	OP_FFN_NORM,
	OP_ROUTER_LOGITS, OP_ROUTER_SOFTMAX, OP_ROUTER_TOPK, OP_ROUTER_LOSSES,
	OP_DISPATCH, OP_EXPERTS_GATE_UP, OP_EXPERTS_DOWN, OP_COMBINE,
	OP_SHARED_GATE_UP, OP_SHARED_DOWN, OP_DENSE_GATE_UP, OP_DENSE_DOWN,
	OP_NORM, OP_HEAD_LOGITS, OP_HEAD_LOSS, OP_HEAD_NORM,
	OP_REDUCTION, OP_GRADIENT_NORM, OP_DECISION, OP_OPTIMIZER, OP_WEIGHTS, OP_STATISTICS,
	OP_COLLECT, OP_WRITE,
	OP_CHECK,                    /* what has no other name between trace_check(true) and (false) */
	NUM_OPERATIONS
};

/* What `work` of an operation counts. */
enum work_unit { WORK_NONE, WORK_FLOPS, WORK_BYTES };

struct operation_name {
	const char *group;           /* "attention"; at most 15 bytes */
	const char *name;            /* "attention / qkv" */
	enum work_unit unit;
};
extern const struct operation_name operations[NUM_OPERATIONS];

/* Forward pass, gradient of the input, gradient of the weight. What belongs to no such thing is PASS_FORWARD. */
enum pass { PASS_FORWARD, PASS_BACKWARD, PASS_WEIGHT, NUM_PASSES };
extern const char *const pass_names[NUM_PASSES]; /* "", "backward", "weight gradient" */

/* What a collective is for. */
enum traffic {
	TRAFFIC_GATHER, TRAFFIC_SUM, /* activations over the tensor group: all_gather and reduce_scatter */
	TRAFFIC_PLAN, TRAFFIC_DISPATCH, TRAFFIC_RETURN, /* expert rows: their numbers; to the experts; back. Both passes */
	TRAFFIC_GRADIENTS, TRAFFIC_WEIGHTS,
	TRAFFIC_HEAD,                /* the sums of a vocabulary in shards */
	TRAFFIC_STATISTICS,          /* counts of the router, losses, norms */
	NUM_TRAFFIC,                 /* those whose bytes are in the metrics; and not of a step: */
	TRAFFIC_CHECKPOINT = NUM_TRAFFIC,
	TRAFFIC_AGREEMENT,           /* whether all can go on; what rank 0 decides */
	NUM_COLLECTIVES
};
extern const char *const traffic_names[NUM_COLLECTIVES]; /* at most 15 bytes each */

/* The parts of a run, whose operations are counted apart. PART_CHECK: comparing the ranks; no part of the step, though
 * it comes in the middle of one. */
enum trace_part { PART_OTHER, PART_STEP, PART_EVALUATION, PART_SAVE, PART_CHECK, NUM_PARTS };
extern const char *const part_names[NUM_PARTS];

/* -- writing: by the main thread of a process. Without a file all but the ring works, in memory. -- */

/* Moves the trace of an earlier start of the run, RUN/trace, to RUN/trace-before, where it replaces an older one, and
 * makes RUN/trace unless `make` is false. By one rank, before the others join. A failure is a warning. */
void trace_create(const char *run_dir, bool make);
/* Makes the file of this rank, with room for `events` records in the ring, rounded up to a power of two. Where it
 * cannot be made, rank 0 prints a warning, and the run goes on without. */
void trace_join(const char *run_dir, int rank, int ranks, const char *host, int64_t events);
/* What this rank's machine can do at best: FLOP/s and bytes/s. 0: not known. */
void trace_peak(double flops, double bandwidth);
/* heartbeat_replica and heartbeat_alone, which the trace says too. */
void trace_replica(int replica);
void trace_alone(bool alone);
/* Removes the mapping; the file stays. */
void trace_leave(void);
/* After trace_leave, by the rank that called trace_create: a start that has done no step leaves the traces that were
 * there before it. */
void trace_end_start(const char *run_dir, bool stepped);

/* A phase of the run begins: heartbeat_phase, and the part that what follows is counted in. Ends the operation. */
void trace_phase(enum heartbeat_phase phase, int64_t step);
/* Between trace_check(true), which begins OP_CHECK, and trace_check(false) operations are counted in PART_CHECK, and
 * the accounts below stand still. */
void trace_check(bool begins);

/* An operation begins, and the one before ends. layer: from 0; -1 where it is of none. work: what it will do, in the
 * operation's unit. */
void trace_begin(enum operation op, enum pass pass, int layer, double work);
/* The operation ends, and what comes has no name. */
void trace_end(void);

/* This rank waits for others in a collective: before the wait, now and then in it with the seconds so far, and after
 * it. begun: trace_now() when it was started; 0: now. bytes: what this rank sends in it. Those that are `numbered` are
 * counted; a message from one rank to another is not, so that ranks that are equally far have the same number. */
void trace_wait(enum traffic what, bool numbered, uint64_t begun, int64_t bytes);
void trace_still_waiting(double seconds);
void trace_wait_end(void);
/* Communication without a wait: starting a collective that began at `begun` took until now. Counted as waiting. */
void trace_posted(uint64_t begun);
/* Bytes that this rank sends; counted for the part of the run, but not between trace_check(true) and (false). */
void trace_sent(enum traffic what, int64_t bytes);

/* From now on ended(observer, op, pass) is called when an operation of a step ends, for what measures more than its
 * time; NULL: no more. */
void trace_observe(void (*ended)(void *observer, enum operation op, enum pass pass), void *observer);

/* Nanoseconds of a clock that never goes back, never 0. */
uint64_t trace_now(void);

/* -- the accounts of this process so far -- */

/* Seconds since the first call; and of them, waiting for other ranks. Both stand still while ranks are compared. */
double trace_clock(void);
double trace_waited(void);
/* Bytes sent in each kind of collective. */
void trace_bytes(int64_t bytes[NUM_TRAFFIC]);
/* Seconds of each operation in a part, all passes and layers together, waiting included. */
void trace_seconds(enum trace_part part, double seconds[NUM_OPERATIONS]);

/* -- reading a trace file -- */

enum { TRACE_BUCKETS = 576 };     /* of a histogram, see trace_bucket_seconds */
struct trace_counter {
	uint64_t count, nanoseconds, waited; /* waited: within it, for other ranks; of a collective: the whole wait */
	double work;
	uint32_t histogram[TRACE_BUCKETS]; /* of the times without waiting; of a collective: of the waits */
};
/* The lowest duration of a bucket, in seconds: 16 buckets of equal width for each doubling, and below 16 ns one for
 * each nanosecond. */
double trace_bucket_seconds(int bucket);
/* The duration below which the share q (0 .. 1) of the histogram lies, in seconds: the middle of a bucket, so within
 * 3.2 %; below 16 ns within half a nanosecond. 0 for an empty one. */
double trace_quantile(const struct trace_counter *c, double q);

enum record_kind { RECORD_OPERATION = 1, RECORD_COLLECTIVE, RECORD_PHASE };
struct trace_record {
	uint64_t place;              /* 1 + its number among all records of the rank; 0: it was never written */
	uint64_t begin, arrived, end; /* trace_now(); arrived: when the rank began to wait, else begin; end 0: not over */
	double work;                 /* of an operation; bytes sent of a collective */
	int64_t step;
	uint32_t number;             /* of a collective, see trace_wait */
	int16_t layer;
	uint8_t kind, what, pass, part; /* what: operation, traffic, or enum heartbeat_phase */
	uint8_t numbered, reserved[5];
};
_Static_assert(sizeof(struct trace_record) == 64, "one cache line");

struct trace {                  /* what was read */
	uint64_t id;                 /* of the start of the run; the same in the files of all its ranks */
	int rank, ranks, pid;
	uint64_t pid_started;        /* see struct process */
	char host[64];
	uint64_t started;            /* trace_now() when the file was made, */
	double started_unix;         /* and the time then, seconds since 1970 */
	double peak_flops, peak_bandwidth; /* of this rank; 0: not known */
	struct trace_counter (*operation)[NUM_OPERATIONS][NUM_PASSES]; /* [NUM_PARTS] */
	struct trace_counter (*collective)[NUM_COLLECTIVES];           /* [NUM_PARTS] */
	struct trace_counter steps;  /* the steps themselves, from the begin of one to the begin of what follows */
	enum heartbeat_phase phase;  /* in which the rank is; the ring has those that are over */
	int64_t step;                /* of the phase */
	uint64_t phase_begun;        /* trace_now() */
	uint64_t last_sign;          /* when it last said that it still waits; 0: never */
	int replica;                 /* of local SGD, from 0; 0 where there are none */
	bool alone;                  /* it waits for ranks of its replica alone; else it may wait for any */
	struct trace_record *records; /* [num_records] the newest, in the order in which they began; of those that began
	                              * together a phase comes first, then an operation */
	int64_t num_records, lost;   /* lost: older ones, which the ring has no more */
	void *memory;
};
/* Reads a file, which may be written meanwhile: a record that changed while it was read is left out. */
int trace_read(struct trace *t, const char *path);
void trace_free(struct trace *t);
/* Opens the trace of all ranks of a run, rank 0 first: *ranks_read in *list, which is owned; before: RUN/trace-before.
 * A rank whose file is missing, damaged, or of another start of the run, is left out with a warning. Fails when there
 * is none. */
int traces_read(struct trace **list, int *count, const char *run_dir, bool before);
void traces_free(struct trace *list, int count);

#endif
