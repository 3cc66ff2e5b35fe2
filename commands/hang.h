/*
 * commands/hang.h - tells a run that hangs from one that is slow, by its heartbeat, and says in words who is in the
 * way. It reads no file: `ling supervise` and `ling trace --hang` give it what they have read, and the time.
 *
 * A run goes on as long as some rank begins another step or phase. It hangs when none does for longer than a limit,
 * which is a multiple of what the same took before in this run: of the median step, of the longest start, first step,
 * evaluation or save. Times are measured by the reader's own clock, so that the clocks of the ranks need not agree.
 *
 * With local SGD the same is true of each replica: in a period one may hang while the others go on. A replica that
 * waits for others hangs with the whole run alone. A step then is one of the slowest replica.
 */
#ifndef LING_COMMANDS_HANG_H
#define LING_COMMANDS_HANG_H

#include "files/heartbeat.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct hang_limits {
	double factor;               /* a limit is so many times what was seen, */
	double least;                /* but at least so many seconds; */
	double unseen;               /* and so many seconds for what was not seen yet */
};

/* What was seen in all starts of a run. */
enum { HANG_STEPS = 128 };
struct hang_history {
	double steps[HANG_STEPS];    /* seconds of the last steps, in a ring */
	int64_t num_steps;           /* of all that were seen */
	double longest[NUM_HEARTBEAT_PHASES]; /* seconds; 0: none was seen */
};

/* One start of a run. */
struct hang_watch {
	struct hang_history *history;
	struct heartbeat now;        /* as it was read last; no ranks before the first time */
	struct rank_watch { double phase_begun, changed, sign; } *rank; /* times of the reader's clock; sign: any change */
	double started, progress;    /* when the watch began; when some rank last began a step or phase */
	int replicas;
	double *replica;             /* [now.ranks] when each replica last made progress or, alive, waited for others */
	bool stepped;                /* a step was finished */
};

/* A watch begins: the run is started at `time`. */
void hang_watch_begin(struct hang_watch *w, struct hang_history *history, double time);
/* Takes what was read at `time`, whose ranks it then owns. */
void hang_watch_take(struct hang_watch *w, struct heartbeat *read, double time);
/* After the first look: how long its ranks have been where they are, by their own clocks. unix_time: now, as `time`. */
void hang_watch_age(struct hang_watch *w, double time, double unix_time);
void hang_watch_end(struct hang_watch *w);

/* Seconds that a phase may take. For HEARTBEAT_WRITE that is never less than for what was not seen. */
double hang_limit(const struct hang_history *h, const struct hang_limits *limits, enum heartbeat_phase phase);
/* The median of the last steps, in seconds; 0 when none was seen. */
double hang_median_step(const struct hang_history *h);
/* The seconds without progress, of the run or of the replica that has made none for longest. */
double hang_since(const struct hang_watch *w, double time);
/* The same when they are too many, else 0; *limit: those that are allowed now. */
double hang_detect(const struct hang_watch *w, const struct hang_limits *limits, double time, double *limit);

/* The updates that are done, as far as the heartbeat says; -1 when it says nothing. */
int64_t hang_steps_done(const struct hang_watch *w);

/* What the system says of the process of a rank. */
enum hang_process {
	PROCESS_ELSEWHERE,           /* it is of another machine */
	PROCESS_RUNS, PROCESS_STOPPED, PROCESS_WAITS_FOR_DISK, PROCESS_ENDED, PROCESS_GONE,
	NUM_PROCESS_STATES
};
/* "is stopped" and the like; NULL for the first two. */
extern const char *const hang_process_words[NUM_PROCESS_STATES];
enum hang_process hang_process(const struct heartbeat_rank *r);

/* A rank at a time. */
struct hang_place {
	const struct heartbeat_rank *rank;
	double seconds;              /* for which it has been where it is */
	bool in_the_way;             /* it computes, or it gives no sign that it waits; else it waits for others */
	bool goes_on;                /* neither: it is of a replica that goes on, while another one does not */
};
/* Who is in the way, in words: "rank 2 on HOST has been in attention of layer 3 of step 812 for 41 s; ranks 0, 1, 3
 * wait in gradients (number 7711) of step 812; process 4711 of rank 2 is stopped". Ranks that go on are not named.
 * numbers: the number of each rank; NULL: 0, 1, ... *members: the same for an event, a new object. The caller frees the
 * text. */
char *hang_words(const struct hang_place *ranks, const int *numbers, int n, json_t **members);
/* The same of what was watched. */
char *hang_describe(const struct hang_watch *w, double time, json_t **members);

#endif
