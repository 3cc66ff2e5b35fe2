/*
 * commands/replicas.h - inference on several ranks: options --tensor and --expert, the layout that they make, and who
 * computes what. The ranks of a replica (struct layout) hold one model together. Each tensor group takes work as it
 * gets free.
 */
#ifndef LING_COMMANDS_REPLICAS_H
#define LING_COMMANDS_REPLICAS_H

#include "parallel.h"
#include "files/config.h"
#include "model/memory.h"
#include "commands/command.h"
#include "commands/engine.h"

#include <stdbool.h>
#include <stdint.h>

/* The two options, for the tables of commands whose struct of options, with tag s, has this as its member
 * `replicas`. */
struct replica_options { int tensor, expert; };
#define REPLICA_OPTIONS(s) \
	WHOLE_OPTION(s, replicas.tensor, "tensor", "N", 1, 1000000, \
			"Under mpirun: N neighbouring ranks divide attention heads and vocabulary", .initial = "1"), \
	WHOLE_OPTION(s, replicas.expert, "expert", "N", 1, 1000000, \
			"Under mpirun: N neighbouring ranks divide the experts", .initial = "1")

/* Collective. Makes the layout of this rank, connected, for a model. Fails on all ranks when the model or the number of
 * ranks does not allow it. */
int replicas_connect(struct layout *l, const struct model_config *c, const struct replica_options *o);
/* Where a replica has several ranks, rank 0 prints on standard error what it has sent, and how long it waited. */
void replicas_report(const struct layout *l);

/* Work that the tensor groups of all replicas share: `count` units, numbered from 0. */
struct shared_work {
	int64_t count;
	/* Adds the requests of a unit to the engine, if any. The ranks of a tensor group call it alike. Returns -1, with
	 * the error set, to end everything. */
	int (*add)(void *data, struct engine *e, int64_t number);
	/* Takes what another rank has sent with shared_work_send; on rank 0, may be NULL. Returns likewise. */
	int (*receive)(void *data, const void *message, int64_t bytes);
	void *data;                  /* their first argument */

	/* set by shared_work_run */
	const struct model *m;
	struct shared_counter counter; /* counter.next, on rank 0: units that the ranks have taken so far */
	struct outbox outbox;
	int max_requests;
	bool none_left;
	int ended;                   /* on rank 0: other tensor groups that have nothing more to send */
};
/* Runs the engine until all units are done, on all ranks. Which rank computes a unit is not determined. Collective.
 * max_requests: the engine's. Returns as engine_run; parallel_agree must follow. After an error no rank takes further
 * units. */
int shared_work_run(struct shared_work *w, struct engine *e, const struct model *m, int max_requests);
/* Sends the result of a request to rank 0: for the engine's on_token, on the first rank of each tensor group but rank
 * 0. */
void shared_work_send(struct shared_work *w, const void *message, int64_t bytes);
/* Takes what has come: for the engine's on_step on rank 0, so that results do not wait there until its own requests
 * have ended. Returns -1 where w->receive does. */
int shared_work_receive(struct shared_work *w);

#endif
