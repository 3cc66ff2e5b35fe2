/*
 * commands/watched.h - a run that is watched while it trains: what its metrics, events, heartbeat and traces say, and
 * what they say together. Only what is new is read, and nothing is written.
 */
#ifndef LING_COMMANDS_WATCHED_H
#define LING_COMMANDS_WATCHED_H

#include "commands/follow.h"
#include "commands/hang.h"
#include "files/base.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum run_state {
	RUN_MISSING,                 /* there is no such directory */
	RUN_NONE,                    /* other files are in it, and nothing of a run */
	RUN_EMPTY,                   /* nothing is in it */
	RUN_UNKNOWN,                 /* it has no heartbeat, and no event says that it ended */
	RUN_STARTING, RUN_TRAINING, RUN_VALIDATING, RUN_SAVING,
	RUN_DIED,                    /* its processes, all on this machine, are gone, and it did not end itself */
	RUN_ENDED,                   /* from here on it has ended: how is not known; */
	RUN_IS_DONE, RUN_WAS_STOPPED, RUN_HAS_FAILED, RUN_MUST_GO_BACK,
	NUM_RUN_STATES
};
extern const char *const run_state_names[NUM_RUN_STATES]; /* in words */

struct watched {
	const char *dir;
	struct follow metrics, events;
	struct point *points;        /* [metrics.count] what each line of the metrics says */
	size_t points_room;
	/* of the events */
	json_t *start, *stop;        /* the newest start or resume, and the stop behind it; NULL: none */
	json_t *restart;             /* the newest of a supervisor that will start the run again, behind both; or NULL */
	json_t *validation;          /* the newest that is no line of the metrics: before the first step */
	json_t *recent;              /* an array of the newest incidents */
	int64_t num_incidents, saved; /* of all that were read; the step of the newest checkpoint, -1: none */
	/* of the heartbeat */
	struct hang_history history;
	struct hang_watch hang;      /* without ranks: there is no heartbeat */
	int gone;                    /* ranks on this machine whose process is gone */
	/* of the traces */
	uint64_t trace_id;
	double trace_looked;         /* clock_seconds(); 0: not yet */
	int trace_ranks;
	struct account *accounts;    /* [trace_ranks] what was counted at the last look */
	json_t *time;                /* `time` of the report; NULL: nothing is known */
	/* all together */
	enum run_state state;
	double state_since;          /* clock_seconds() */
	char problem[sizeof error_text]; /* what could not be read; "" */
};

/* Begins to watch the run in a directory, which must live as long and need not be there yet. Fails for what can never
 * be one. */
int watched_init(struct watched *w, const char *dir);
void watched_free(struct watched *w);
/* Looks for what has changed. */
void watched_look(struct watched *w);
/* Whether nothing more will come: the run has ended, and, if it ended badly, has not been started again since. */
bool watched_is_over(const struct watched *w);
/* The state of the run as a new object, see docs/watch.md. Numbers that are not known are null. */
json_t *watched_report(const struct watched *w);
/* How the run in a directory that has metrics stands or has ended, by its events and its heartbeat: `state` and
 * `waiting` of the report, a new object. NULL: that cannot be read. */
json_t *watched_state(const char *dir);

#endif
