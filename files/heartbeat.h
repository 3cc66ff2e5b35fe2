/*
 * files/heartbeat.h - the heartbeat of a training run: the file RUN/heartbeat, in which each rank says all the time
 * what it is doing, and from which `ling supervise` tells a run that hangs from one that is slow.
 *
 * The file has a page for the header, then a page for each rank. A rank maps its page into memory and writes there with
 * plain stores, which the file's other readers on that machine see at once: what changes often is one cache line. A
 * rank has a page of its own since the system writes whole pages back: on a file system that several machines share, no
 * machine can then overwrite what another one's ranks wrote.
 *
 * Readers on another machine. A mapped file is not coherent over NFS and its like. There each rank brings its page to
 * the server with msync() at most once a second, when it begins a step or another phase and while it waits for others.
 * So what a reader sees of a rank on another machine is complete, but some seconds old. A rank that stops between two
 * collectives is last seen in the phase that it began, without the operation.
 */
#ifndef LING_FILES_HEARTBEAT_H
#define LING_FILES_HEARTBEAT_H

#include <stdbool.h>
#include <stdint.h>

/* What a training run does, as far as a limit of time is concerned. HEARTBEAT_SAVE: a save in which training waits as
 * long as in any other; HEARTBEAT_WRITE: one in which it waits for all files, while most saves go on in the
 * background. */
enum heartbeat_phase {
	HEARTBEAT_NONE,              /* the rank has not written yet */
	HEARTBEAT_START, HEARTBEAT_FIRST_STEP, HEARTBEAT_STEP, HEARTBEAT_EVALUATION, HEARTBEAT_SAVE,
	HEARTBEAT_WRITE, HEARTBEAT_END,
	NUM_HEARTBEAT_PHASES
};
extern const char *const heartbeat_phase_names[NUM_HEARTBEAT_PHASES];

/* -- writing: by the main thread of a rank. Nothing is written, and all of these are cheap, until heartbeat_join. -- */

/* Makes a new heartbeat file for a run of so many ranks; the old one, if any, is removed, and ranks of an earlier run
 * that still write there write nowhere. By one rank. A failure is a warning: the run can do without. */
void heartbeat_create(const char *run_dir, int ranks);
/* This process becomes rank `rank`, on `host`, of the file; it does nothing where the file cannot be used. */
void heartbeat_join(const char *run_dir, int rank, const char *host);
/* The id of the file that was joined, see struct heartbeat; 0 without one. */
uint64_t heartbeat_id(void);
/* Removes the mapping. The file stays. */
void heartbeat_leave(void);
/* Removes the file. */
void heartbeat_remove(const char *run_dir);

/* A phase begins. step: the step that is computed, or of which the weights are evaluated or saved. */
void heartbeat_phase(enum heartbeat_phase phase, int64_t step);
/* An operation begins, such as "attention"; at most 15 bytes are kept. layer: from 0; -1 where it is of none. */
void heartbeat_operation(const char *name, int layer);
/* The rank waits for others in a collective, whose name ("gradients") has at most 15 bytes: before the wait, each
 * tenth of a second in it with the seconds so far, and after it. Collectives are numbered as they are waited for, but
 * with `numbered` false, for a message from one rank to another: then ranks that are equally far have the same
 * number, which is returned. Those of replicas may differ. */
uint32_t heartbeat_wait(const char *collective, bool numbered);
void heartbeat_still_waiting(double seconds);
void heartbeat_wait_end(void);
/* The replica of local SGD that this rank is in, from 0. */
void heartbeat_replica(int replica);
/* Whether the rank works with its replica alone now, as in a period: then it waits for none of another one. */
void heartbeat_alone(bool alone);
/* The seconds that this rank computed in the last step, its waiting not counted. */
void heartbeat_own_seconds(double seconds);

/* -- reading -- */

struct heartbeat_rank {
	int64_t step;
	enum heartbeat_phase phase;
	int phases;                  /* phases begun, modulo 65536: the same step may be begun again */
	bool waits;                  /* in `collective`, the number-th; else it computes `operation` */
	double waited;               /* seconds in this wait, as the rank last said */
	int layer;                   /* of the operation; -1: none */
	uint32_t number;             /* collectives that were waited for */
	double changed;              /* when any of this but `waited` last changed: seconds since 1970 by that machine */
	int replica;                 /* of local SGD; 0 where there are none */
	bool alone;                  /* it waits for ranks of its replica alone; else it may wait for any */
	double own_seconds;          /* computed in the last step */
	double step_seconds;         /* the last step, from its begin to the begin of what came after; 0: none yet */
	char operation[64], collective[16]; /* of a heartbeat at most 15 bytes each */
	char host[64];
	int pid;
	uint64_t pid_started;        /* as in struct process: no two processes have the same two numbers */
};
struct heartbeat {
	uint64_t id;                 /* another one each time that the file is made */
	int ranks;
	struct heartbeat_rank *rank; /* [ranks] owned */
};
/* Reads RUN/heartbeat. Returns 1; 0 when there is none that is complete; -1 on error. */
int heartbeat_read(struct heartbeat *h, const char *run_dir);
void heartbeat_free(struct heartbeat *h);

/* What the system says of a process of this machine. */
struct process {
	char state;                  /* R running, S or D sleeping, T stopped, Z ended but not waited for, ... */
	int parent;
	uint64_t started;            /* since the machine's start, in ticks of the clock */
};
/* Whether there is such a process. */
bool process_look(struct process *p, int pid);

#endif
