/*
 * commands/replicas.h - inference on several ranks: options --tensor and --expert, and the layout that they make. The
 * ranks of a replica (struct layout) hold one model together. Replicas share the work.
 */
#ifndef LING_COMMANDS_REPLICAS_H
#define LING_COMMANDS_REPLICAS_H

#include "parallel.h"
#include "files/config.h"
#include "commands/command.h"

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

#endif
