/*
 * training/saving.h - saving the checkpoints of a run: room on the disk, the thread that writes while training goes on,
 * what happens when writing fails, and how often to save.
 *
 * A save begins at the end of a step (saver_begin). Without a copy it is then complete. With a copy, each rank's thread
 * writes that rank's files and brings them to disk; when all ranks have, rank 0's thread completes the directory, and
 * gives it its name. MPI is not called in threads: the ranks tell each other with two numbers in the all_reduce that
 * every step has (saver_flags, saver_advance). A run that is killed meanwhile loses that checkpoint alone, of which a
 * temporary directory stays that the next start removes.
 */
#ifndef LING_TRAINING_SAVING_H
#define LING_TRAINING_SAVING_H

#include "files/base.h"
#include "files/config.h"
#include "files/checkpoint.h"
#include "model/parameters.h"
#include "model/weight_files.h"
#include "training/events.h"

#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum save_stage { SAVE_NONE, SAVE_WRITES, SAVE_COMMITS };

struct saver {
	struct weight_writer weights;
	bool copies;                 /* there is memory for copies */
	int rank, ranks;
	/* of the save under way, or of the last one */
	enum save_stage stage;
	struct config config;
	const struct model_files *files;
	json_t *trainer;             /* on rank 0, until it is committed */
	char dir[PATH_LEN];          /* the temporary directory */
	int64_t step;
	int sync[2];                 /* on rank 0: files that are brought to disk before it has its name; -1: none */
	bool async;
	double began, seconds;       /* clock_seconds() at its beginning; seconds until it was complete */
	/* this rank's thread, in which `stage` runs */
	pthread_t thread;
	bool running;                /* it is to be joined */
	atomic_bool ended;           /* it has set these: */
	int rc;
	char error[sizeof error_text];
};

/* table must live as long as s. copies: there is memory for them (see plan_saving). saver_free may follow a failure. */
int saver_init(struct saver *s, const struct parameter_table *table, const struct config *c, bool copies);
/* Waits for this rank's thread; a checkpoint that is not complete is lost, and removed. */
void saver_free(struct saver *s);

/* What is saved, and where. */
struct save_request {
	const struct config *config; /* of the run, with the output_dir where it is now */
	const struct trainer_state *state;
	struct saved_arrays arrays;
	int sync[2];                 /* see struct saver */
	bool async;                  /* may go on in a thread, if there is memory for the copy */
};
/* Begins a save; none may be under way. 1: the checkpoint of that step is there already; 0: it is complete, or, with
 * s->stage other than SAVE_NONE, it goes on in the thread; -1: it failed, nothing of it is left, and older checkpoints
 * are as they were. Collective, the same on all ranks. */
int saver_begin(struct saver *s, const struct save_request *request);

/* What this rank says of the save under way: 1 or 0 for "my thread is at work", and for "it failed". */
void saver_flags(const struct saver *s, double flags[2]);
/* With the sums of these over the ranks, which were taken at one time: 1: the save under way is complete; 0: none is,
 * or it goes on; -1: it failed. Collective, the same on all ranks. */
int saver_advance(struct saver *s, const double flags[2]);
/* Waits for the save under way, if there is one. The same results, 0 only when there was none. Collective. */
int saver_finish(struct saver *s);

/* Tells, on rank 0, of a save that has ended, in an event and, of a failure, on stderr: 1: well; -1: not, with the
 * reason in error_text; 0: none has. stall: the seconds that training waited for it. */
void saver_report(const struct saver *s, int ended, double stall, const struct event_log *events);

/* fail() for a save that failed, with the reason in error_text, where the run ends. saved_step: of the newest
 * checkpoint that there is; -1: none. */
int saver_fail_last(const struct saver *s, int64_t saved_step);

/* Finds the newest whole checkpoint of the run that is not of a later step than `most`: `dir` is its path, or "" when
 * there is none at all. Damaged newer ones are set aside, with an event in `events`, which is opened if it is not;
 * checkpoint.strict: they are an error. It is an error when there are checkpoints, but none is whole, also when all
 * were set aside before: a run never begins anew in silence. Collective. */
int checkpoint_choose(const struct config *c, const struct parameter_table *table, struct event_log *events,
		int64_t most, char dir[PATH_LEN]);

/* How often to save: checkpoint.every auto. Saving every sqrt(2 C M) seconds loses least, where a save costs C seconds
 * of training and a failure, one in M seconds on average, half an interval of work (Young 1974). The first save comes
 * early, to measure C. */
struct save_schedule {
	double mtbf;                 /* M */
	double cost, step_seconds;   /* C; mean of a step */
	int64_t num_steps;           /* that step_seconds is the mean of */
	int64_t interval;            /* steps; 0: C is not known yet */
	int64_t last;                /* step of the last save, or where the run began */
	double began;                /* clock_seconds() then */
};
struct save_schedule save_schedule_start(const struct config *c, int64_t step);
/* A step has taken so many seconds. */
void save_schedule_step(struct save_schedule *s, double seconds);
/* Whether to save after a step. */
bool save_schedule_due(const struct save_schedule *s, int64_t step);
/* A save was begun at a step, and kept training waiting for `cost` seconds; negative: it failed. Returns whether the
 * interval has changed, by a tenth at least; then it is printed. */
bool save_schedule_saved(struct save_schedule *s, int64_t step, double cost);

#endif
