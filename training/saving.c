/*
 * training/saving.c - saving the checkpoints of a run: the thread that writes while training goes on.
 */
#define _GNU_SOURCE
#include "training/saving.h"

#include "files/base.h"
#include "files/trace.h"
#include "parallel.h"
#include "training/events.h"

#include <errno.h>
#include <math.h>
#include <omp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

int saver_init(struct saver *s, const struct parameter_table *table, const struct config *c, bool copies)
{
	const struct group *world = &table->layout.all;
	int *host = calloc(world->size, sizeof *host), rc;
	*s = (struct saver){.copies = copies, .rank = world->rank, .ranks = world->size, .sync = {-1, -1}};
	if (!host)
		return fail("out of memory for the hosts of %d ranks", world->size);
	if (!c->checkpoint.hosts)
		parallel_hosts(host);
	for (int r = 0; r < world->size && c->checkpoint.hosts; r++)
		host[r] = (int)((int64_t)r * c->checkpoint.hosts / world->size);
	rc = weight_writer_init(&s->weights, table, &c->model, host);
	free(host);
	if (rc == 0 && copies) /* now: in the first save, training would wait for the system to find the memory */
		s->copies = reserve_copy(&s->weights) == 0;
	return rc;
}

/* ============================================================================================================
 * The work of a stage, on this rank
 * ========================================================================================================== */

/* Completes the checkpoint, when the files of all ranks are there: no checkpoint is ahead of its metrics. */
static int commit(struct saver *s)
{
	json_t *trainer = s->trainer;
	s->trainer = NULL;
	for (int i = 0; i < 2; i++)
		if (s->sync[i] >= 0 && fsync(s->sync[i]) < 0 && errno != EINVAL) {
			json_decref(trainer);
			checkpoint_abandon(s->dir);
			return fail("%s/%s: cannot bring to disk: %s", s->config.train.output_dir, i ? "events.jsonl"
					: "metrics.jsonl", strerror(errno));
		}
	return checkpoint_publish(&s->config, s->files, trainer, s->dir);
}

static int run_stage(struct saver *s)
{
	return s->stage == SAVE_COMMITS ? commit(s) : write_copy(&s->weights, s->dir);
}

/* What the thread does. Training has the cores first: this is one thread, without OpenMP's, and with low priority. */
static void *run_thread(void *saver)
{
	struct saver *s = saver;
	omp_set_num_threads(1);
	setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), 5); /* of the thread, on Linux; a failure does no harm */
	s->rc = run_stage(s);
	memcpy(s->error, error_text, sizeof s->error);
	atomic_store_explicit(&s->ended, true, memory_order_release);
	return NULL;
}

/* Starts the thread for a stage, which gets no signals. Where there can be none, the work is done at once. */
static void start_stage(struct saver *s, enum save_stage stage)
{
	sigset_t all, before;
	s->stage = stage;
	s->rc = 0;
	atomic_store(&s->ended, true);
	if (stage == SAVE_COMMITS && s->rank > 0)
		return;
	atomic_store(&s->ended, false);
	sigfillset(&all);
	pthread_sigmask(SIG_BLOCK, &all, &before);
	s->running = pthread_create(&s->thread, NULL, run_thread, s) == 0;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (s->running)
		return;
	s->rc = run_stage(s);
	memcpy(s->error, error_text, sizeof s->error);
	atomic_store(&s->ended, true);
}

static void join_thread(struct saver *s)
{
	if (s->running)
		pthread_join(s->thread, NULL);
	s->running = false;
}

void saver_free(struct saver *s)
{
	join_thread(s);
	if (s->stage != SAVE_NONE && s->rank == 0 && !(s->stage == SAVE_COMMITS && s->rc == 0))
		checkpoint_abandon(s->dir);
	json_decref(s->trainer);
	weight_writer_free(&s->weights);
	*s = (struct saver){.sync = {-1, -1}};
}

/* ============================================================================================================
 * The save, which all ranks do together
 * ========================================================================================================== */

/* Rank 0's part of the beginning: what trainer.json says, the directory, room on the disk. 1: it is there already. */
static int prepare(struct saver *s, const struct save_request *r)
{
	const int begun = checkpoint_begin(&s->config, r->state, s->dir);
	if (begun)
		return begun;
	s->trainer = checkpoint_room(s->config.train.output_dir, s->files, s->weights.file_bytes) < 0 ? NULL
			: trainer_to_json(&s->config, r->state, s->ranks);
	if (s->trainer)
		return 0;
	checkpoint_abandon(s->dir);
	return -1;
}

/* Ends a save that failed, with its reason in error_text. */
static int give_up(struct saver *s)
{
	if (s->rank == 0)
		checkpoint_abandon(s->dir);
	json_decref(s->trainer);
	s->trainer = NULL;
	s->stage = SAVE_NONE;
	return -1;
}

int saver_begin(struct saver *s, const struct save_request *r)
{
	const struct group *world = &s->weights.table->layout.all;
	struct { int begun; char dir[PATH_LEN]; } directory = {0};
	s->config = *r->config;
	s->files = r->state->files;
	s->step = r->state->step;
	s->began = clock_seconds();
	memcpy(s->sync, r->sync, sizeof s->sync);
	if (s->rank == 0) {
		directory.begun = prepare(s, r);
		memcpy(directory.dir, s->dir, sizeof directory.dir);
	}
	if (parallel_agree(directory.begun < 0 ? -1 : 0) < 0)
		return -1;
	broadcast(world, &directory, sizeof directory);
	memcpy(s->dir, directory.dir, sizeof s->dir);
	if (directory.begun == 1)
		return 1;
	int rc;
	trace_begin(OP_COLLECT, PASS_FORWARD, -1, 0);
	s->async = r->async && parallel_agree(s->copies ? 0 : fail("no memory for a copy")) == 0;
	if (s->async && (rc = copy_weights(&s->weights, &r->arrays)) == 0) {
		start_stage(s, SAVE_WRITES);
		return 0;
	}
	s->async = false; /* also when there was no memory for the copy after all */
	trace_begin(OP_WRITE, PASS_FORWARD, -1, 0);
	rc = write_weight_files(&s->weights, s->dir, &r->arrays);
	if (rc < 0)
		return give_up(s);
	rc = parallel_agree(s->rank == 0 ? commit(s) : 0);
	s->seconds = clock_seconds() - s->began;
	return rc;
}

void saver_flags(const struct saver *s, double flags[2])
{
	const bool ended = atomic_load_explicit(&s->ended, memory_order_acquire);
	flags[0] = s->stage != SAVE_NONE && !ended;
	flags[1] = s->stage != SAVE_NONE && ended && s->rc < 0;
}

/* All ranks have done the stage, this one with the result s->rc; `failed`: one has failed. */
static int end_stage(struct saver *s, bool failed)
{
	join_thread(s);
	if (failed) {
		if (s->rc < 0)
			set_error("%s", s->error);
		parallel_agree(s->rc);
		return give_up(s);
	}
	if (s->stage == SAVE_WRITES) {
		start_stage(s, SAVE_COMMITS);
		return 0;
	}
	s->stage = SAVE_NONE;
	s->seconds = clock_seconds() - s->began;
	return 1;
}

int saver_advance(struct saver *s, const double flags[2])
{
	return s->stage == SAVE_NONE || flags[0] > 0 ? 0 : end_stage(s, flags[1] > 0);
}

int saver_finish(struct saver *s)
{
	int rc = 0;
	while (s->stage != SAVE_NONE && rc == 0) {
		trace_begin(OP_WRITE, PASS_FORWARD, -1, 0);
		join_thread(s);
		rc = end_stage(s, parallel_agree(s->rc) < 0);
	}
	return rc;
}

void saver_report(const struct saver *s, int ended, double stall, const struct event_log *events)
{
	if (!ended || s->rank > 0)
		return;
	if (ended > 0) {
		event_write(events, s->step, "save", json_pack("{s:o, s:o, s:I, s:I, s:I, s:b}", "stall_seconds",
				json_number(stall), "write_seconds", json_number(s->seconds), "bytes",
				(json_int_t)s->weights.bytes, "rank_bytes_min", (json_int_t)s->weights.least, "rank_bytes_max",
				(json_int_t)s->weights.most, "async", s->async));
		return;
	}
	if (is_terminal(stdout))
		printf("\n");
	fflush(stdout);
	fprintf(stderr, "ling: warning: step %lld: the checkpoint was not saved: %s. Training goes on, older checkpoints "
			"are as they were, and the next one is tried as planned\n", (long long)s->step, error_text);
	event_write(events, s->step, "save_failed", json_pack("{s:o}", "reason", json_cstring(error_text)));
}

int saver_fail_last(const struct saver *s, int64_t saved_step)
{
	char reason[sizeof error_text];
	memcpy(reason, error_text, sizeof reason);
	if (saved_step < 0)
		return fail("step %lld could not be saved: %s. The run has no checkpoint, all its steps are lost: make room, "
				"and start it again", (long long)s->step, reason);
	return fail("step %lld could not be saved: %s. Lost is what was trained after step %lld, the newest checkpoint: "
			"make room, and the same command goes on from there", (long long)s->step, reason,
			(long long)saved_step);
}

/* ============================================================================================================
 * The newest whole checkpoint
 * ========================================================================================================== */

/* Sets aside the damaged checkpoints of these n steps, since an older one is whole. reasons [n]: what is wrong. */
static int set_aside(const char *dir, bool is_rank0, struct event_log *events, const int64_t *steps, int n,
		char *const *reasons)
{
	int rc = is_rank0 && events->fd < 0 ? events_open(events, dir) : 0;
	for (int i = 0; i < n && rc == 0 && is_rank0; i++) {
		rc = checkpoint_set_aside(dir, steps[i]);
		if (rc < 0)
			break;
		fprintf(stderr, "ling: warning: the checkpoint of step %lld is damaged and is now %s/damaged-step-%07lld: %s\n",
				(long long)steps[i], dir, (long long)steps[i], reasons[i]);
		event_write(events, steps[i], "checkpoint_damaged", json_pack("{s:o}", "reason",
				json_cstring(reasons[i])));
	}
	return parallel_agree(rc);
}

/* Where a run would begin anew: fails when its only checkpoints are damaged ones that were set aside. When a
 * supervisor has gone back from the last whole one, the beginning is what it wants. */
static int check_beginning(const char *dir)
{
	int64_t *damaged, *gone_back;
	const int n = checkpoint_list(dir, "damaged-step-", &damaged);
	const int back = n > 0 ? checkpoint_list(dir, "gone-back-step-", &gone_back) : 0;
	const int64_t newest = n > 0 ? damaged[n - 1] : 0;
	if (n > 0)
		free(gone_back);
	free(damaged);
	if (n < 0 || back < 0)
		return -1;
	return !n || back ? 0 : fail("%s: its only checkpoints are %d damaged ones, the newest damaged-step-%07lld. Repair "
			"one and give it its name back, step-%07lld, or remove them to start from the beginning", dir, n,
			(long long)newest, (long long)newest);
}

int checkpoint_choose(const struct config *c, const struct parameter_table *table, struct event_log *events,
		int64_t most, char dir[PATH_LEN])
{
	const struct group *world = &table->layout.all;
	const bool is_rank0 = world->rank == 0;
	int64_t *steps = NULL;
	char **reasons = NULL;
	int n = is_rank0 ? checkpoint_list(c->train.output_dir, "step-", &steps) : 0, num_damaged = 0, rc, whole = 0;
	*dir = 0;
	if (n == 0 && is_rank0 && most == INT64_MAX && check_beginning(c->train.output_dir) < 0)
		n = -1;
	while (n > 0 && steps[n - 1] > most)
		n--;
	if ((rc = parallel_agree(n < 0 ? -1 : 0)) < 0)
		return -1;
	broadcast(world, &n, sizeof n);
	reasons = allocate((n + 1) * sizeof *reasons);
	for (int i = n - 1; i >= 0 && rc == 0 && !whole; i--) {
		whole = !is_rank0 ? 1 : checkpoint_path(dir, c->train.output_dir, "step-", steps[i]) < 0 ? -1
				: checkpoint_check(dir, c);
		if ((rc = parallel_agree(whole < 0 ? -1 : 0)) < 0)
			break;
		struct { int whole; char dir[PATH_LEN]; } found = {whole, ""};
		memcpy(found.dir, dir, sizeof found.dir);
		broadcast(world, &found, sizeof found);
		memcpy(dir, found.dir, sizeof found.dir);
		whole = found.whole && verify_weight_files(table, &c->model, dir) == 0;
		if (whole)
			break;
		reasons[num_damaged++] = copy_string(error_text);
		if (c->checkpoint.strict)
			rc = parallel_agree(is_rank0 ? fail("%s: this newest checkpoint is damaged: %s; repair it, or set "
					"checkpoint.strict=false to set it aside and continue from the one before", dir, reasons[0])
					: 0);
	}
	if (rc == 0 && n > 0 && !whole)
		rc = parallel_agree(is_rank0 ? fail("%s: none of its %d checkpoints is whole; what is wrong with the "
				"newest: %s. Repair one, or remove them all to start from the beginning", c->train.output_dir, n,
				reasons[0]) : 0);
	if (rc == 0 && num_damaged) {
		int64_t damaged[num_damaged];
		for (int i = 0; i < num_damaged && is_rank0; i++)
			damaged[i] = steps[n - 1 - i];
		rc = set_aside(c->train.output_dir, is_rank0, events, damaged, num_damaged, reasons);
	}
	for (int i = 0; i < num_damaged; i++)
		free(reasons[i]);
	free(reasons);
	free(steps);
	return rc;
}

/* ============================================================================================================
 * How often
 * ========================================================================================================== */

enum { FIRST_STEPS = 10, FIRST_SECONDS = 60 }; /* the first save comes after the one or the other */

struct save_schedule save_schedule_start(const struct config *c, int64_t step)
{
	return (struct save_schedule){.mtbf = c->checkpoint.mtbf * 3600, .last = step, .began = clock_seconds()};
}

void save_schedule_step(struct save_schedule *s, double seconds)
{
	const int64_t most = 100; /* steps that count: batches may grow */
	/* The first step is slower than the others, and counts only as long as it is alone. */
	const int64_t n = s->num_steps < most ? s->num_steps : most - 1;
	s->step_seconds += (seconds - s->step_seconds) / (n <= 1 ? 1 : n);
	s->num_steps++;
}

bool save_schedule_due(const struct save_schedule *s, int64_t step)
{
	if (s->interval)
		return step - s->last >= s->interval;
	return step - s->last >= FIRST_STEPS || clock_seconds() - s->began >= FIRST_SECONDS;
}

bool save_schedule_saved(struct save_schedule *s, int64_t step, double cost)
{
	s->last = step;
	s->began = clock_seconds();
	if (cost < 0)
		return false;
	s->cost = s->interval ? (s->cost + cost) / 2 : cost;
	const double steps = sqrt(2 * s->cost * s->mtbf) / (s->step_seconds > 0 ? s->step_seconds : 1);
	const int64_t interval = steps < 1 ? 1 : steps > 1e12 ? (int64_t)1e12 : (int64_t)steps;
	if (s->interval && llabs(interval - s->interval) * 10 < s->interval)
		return false;
	s->interval = interval;
	printf("checkpoints come every %lld steps: one costs %.3f s, a step takes %.3f s, checkpoint.mtbf is %g h\n",
			(long long)interval, s->cost, s->step_seconds, s->mtbf / 3600);
	return true;
}
