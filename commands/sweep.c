/*
 * commands/sweep.c - `ling sweep`: trains the runs of a grid, each by a `ling train` in a directory of its own.
 *
 *   A run             what its directory says of it
 *   Directories       whose runs are taken up, by their configs
 *   Results           the table; the report
 *   Processes         starting a run, its end, stopping it
 *   Hopeless runs
 *   The sweep
 * All that the sweep remembers is in the directories of the runs: a sweep that was killed is begun again, and goes on.
 * When it is killed, the system sends SIGUSR1 to the runs that train, which save and end; until then they hold their
 * directories, and the next sweep waits for them.
 */
#define _GNU_SOURCE
#include "commands/sweep.h"

#include "commands/child.h"
#include "commands/grid.h"
#include "commands/result.h"
#include "commands/runs.h"
#include "commands/scaling_runs.h"
#include "commands/self_check.h"
#include "files/base.h"
#include "files/checkpoint.h"
#include "files/config.h"
#include "files/heartbeat.h"
#include "kernels.h"
#include "training/events.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct sweep_options {
	int jobs;
	bool dry_run, stop_hopeless, fail_fast, json;
	double every;
};

enum state { STATE_WAITING, STATE_TRAINING, STATE_STOPPED, STATE_FINISHED, STATE_HOPELESS, STATE_FAILED, NUM_STATES };
static const char *const state_names[NUM_STATES] = {"waiting", "training", "stopped", "finished", "hopeless", "failed"};

struct swept_run {
	const struct grid_run *grid;
	char *name, dir[PATH_LEN];
	enum state state;
	/* by its directory */
	int64_t step;                /* steps done */
	double loss;                 /* of a finished run, of the validation after its last step */
	double seconds;              /* of its steps and saves */
	struct series losses;        /* validation losses so far */
	/* while it trains */
	pid_t pid;
	int64_t first_step;          /* steps done when it was started */
	double started;              /* clock_seconds() */
	bool told;                   /* that it is hopeless, and saves and stops: */
	double median;               /* of the others */
	char *error;                 /* of a failed run; or NULL */
};

struct sweep {
	const struct sweep_options *o;
	struct grid grid;
	struct hopeless_rule hopeless;
	struct swept_run *runs;      /* [grid.num_runs] in its order */
	int num_training, threads;   /* threads of a run */
	struct new_file lock;        /* no other sweep may have this directory */
	struct child_signals signals;
	int stops;                   /* signals to it that ask for a stop */
	bool passed_on, failing;     /* the wish for a stop, to the runs; a failure ends the sweep: --fail-fast */
	double began;                /* clock_seconds() */
	double shown, looked, look_pause; /* when the last line was shown; the runs that train looked at, and how often */
	double session_flops;        /* that runs which this process started have done, those that train not counted */
	char *waited_for;            /* the directory that another process holds, as was told; or NULL */
};

/* A line for the user. */
#define say(...) command_say("sweep", __VA_ARGS__)

/* ============================================================================================================
 * A run
 * ========================================================================================================== */

static double flops_of(const struct swept_run *r)
{
	return r->grid->row.value[SCALING_FLOPS];
}

/* Whether the newest event that tells is that the run was stopped as hopeless. */
static bool was_hopeless(const struct run *run)
{
	for (size_t i = json_array_size(run->events); i-- > 0;) {
		const char *kind = json_string_value(json_object_get(json_array_get(run->events, i), "kind"));
		if (!strcmp(kind, "hopeless"))
			return true;
		if (!strcmp(kind, "start") || !strcmp(kind, "resume"))
			return false;
	}
	return false;
}

/* Fails when the run that a directory has is not the one of the grid. */
static int check_config(const struct swept_run *r, const json_t *config)
{
	const size_t flags = JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(12);
	const char *key = grid_difference(r->grid->config, config);
	char shown[2][64];
	if (!key)
		return 0;
	char *ours = json_text(json_at(r->grid->config, key), flags);
	char *theirs = json_text(json_at(config, key), flags);
	fail("%s: has a run with another config: %s is %s there and %s in the grid; expected the same, or another "
			"output_dir or name, or that directory removed", r->dir, key, printable(shown[0], theirs),
			printable(shown[1], ours));
	free(ours), free(theirs);
	return -1;
}

/* Takes what a run that has been read says. */
static void take(struct swept_run *r, const struct run *run, bool stops_hopeless)
{
	static const char *const members[] = {"seconds", "save_seconds"};
	char path[PATH_LEN];
	r->step = run->count ? run->step[run->count - 1] : 0;
	r->seconds = 0;
	for (int m = 0; m < 2; m++) {
		const struct column *c = run_column(run, members[m]);
		for (int i = 0; c && i < c->count; i++)
			r->seconds += isfinite(c->value[i]) ? c->value[i] : 0;
	}
	series_free(&r->losses);
	r->losses = run_series(run, "valid_loss");
	const int last = r->losses.count - 1;
	const bool saved = checkpoint_newest(r->dir, path) > 0 &&
			strtoll(strrchr(path, '-') + 1, NULL, 10) >= r->grid->steps;
	const bool validated = last >= 0 && r->losses.step[last] >= r->grid->steps;
	if (saved && validated) {
		r->state = STATE_FINISHED;
		r->loss = r->losses.value[last];
	} else if (was_hopeless(run) && stops_hopeless)
		r->state = STATE_HOPELESS;
}

/* Whether there is a run in a directory: 1 or 0; -1: that cannot be told. */
static int has_run(const char *dir)
{
	char path[PATH_LEN];
	return path_join(path, dir, "metrics.jsonl") < 0 ? -1 : path_exists(path);
}

/* Reads what the directory of a run says. Fails when there is another run in it. */
static int look_at(const struct sweep *s, struct swept_run *r)
{
	struct run run;
	const int there = has_run(r->dir);
	if (there <= 0)
		return there;
	if (run_open(&run, r->dir) < 0)
		return -1;
	const int rc = run.config ? check_config(r, run.config) : 0;
	if (rc == 0 && run.config)
		take(r, &run, s->hopeless.margin > 0);
	run_free(&run);
	return rc;
}

/* ============================================================================================================
 * Directories
 * ========================================================================================================== */

/* Gives a run that has no directory yet the one under output_dir that has a run of its config under another name: the
 * grid may have got another axis since. Returns 1 when there is one. */
static int adopt(struct sweep *s, struct swept_run *r, const struct run *others, int n)
{
	for (int i = 0; i < n; i++) {
		bool taken = !others[i].config || grid_difference(r->grid->config, others[i].config);
		for (int j = 0; j < s->grid.num_runs && !taken; j++)
			taken = !strcmp(s->runs[j].name, others[i].name);
		if (taken)
			continue;
		free(r->name);
		r->name = copy_string(others[i].name);
		return path_join(r->dir, s->grid.output_dir, r->name) < 0 ? -1 : 1;
	}
	return 0;
}

/* The runs in output_dir whose directories the grid does not name, as far as they can be read. Returns their number. */
static int find_others(const struct sweep *s, struct run **others)
{
	int n = 0;
	size_t room = 0;
	char path[PATH_LEN];
	*others = NULL;
	DIR *d = opendir(s->grid.output_dir);
	for (struct dirent *e; d && (e = readdir(d));) {
		bool named = *e->d_name == '.';
		for (int i = 0; i < s->grid.num_runs && !named; i++)
			named = !strcmp(s->runs[i].name, e->d_name);
		if (named || path_join(path, s->grid.output_dir, e->d_name) < 0 || has_run(path) <= 0)
			continue;
		*others = grow(*others, n, &room, 1, sizeof **others);
		n += run_open(&(*others)[n], path) == 0;
	}
	if (d)
		closedir(d);
	return n;
}

/* Finds the directory of each run, and reads what is there. */
static int look_at_all(struct sweep *s)
{
	struct run *others;
	int rc = 0;
	for (int i = 0; i < s->grid.num_runs; i++) {
		struct swept_run *r = &s->runs[i];
		r->grid = &s->grid.runs[i];
		r->loss = NAN;
		r->name = copy_string(r->grid->name);
	}
	const int n = find_others(s, &others);
	for (int i = 0; i < s->grid.num_runs && rc >= 0; i++) {
		struct swept_run *r = &s->runs[i];
		rc = path_join(r->dir, s->grid.output_dir, r->name);
		if (rc == 0 && has_run(r->dir) == 0)
			rc = adopt(s, r, others, n);
		rc = rc < 0 ? -1 : look_at(s, r);
	}
	for (int i = 0; i < n; i++)
		run_free(&others[i]);
	free(others);
	return rc;
}

/* ============================================================================================================
 * Results
 * ========================================================================================================== */

/* A column of the table for each key under `grid`, but for those of which scaling_columns has one. */
static bool has_column(const char *key)
{
	return strchr(key, '.') && strcmp(key, "schedule.peak_lr") && strcmp(key, "train.batch");
}

/* Writes OUTPUT_DIR/table.tsv, a line for each run. */
static int write_table(const struct sweep *s)
{
	struct new_file file;
	char path[PATH_LEN];
	const struct grid *g = &s->grid;
	struct strings columns = {.text = allocate(g->num_keys * sizeof *columns.text)};
	const char **values = allocate(g->num_keys * sizeof *values);
	int rc = path_join(path, g->output_dir, "table.tsv") < 0 || new_file_begin(&file, path) < 0 ? -1 : 0;
	for (int k = 0; k < g->num_keys; k++)
		if (has_column(g->keys[k]))
			columns.text[columns.count++] = g->keys[k];
	if (rc == 0)
		scaling_table_header(file.stream, &columns);
	for (int i = 0; rc == 0 && i < g->num_runs; i++) {
		const struct swept_run *r = &s->runs[i];
		struct scaling_run row = r->grid->row;
		row.name = r->name;
		row.value[SCALING_LOSS] = r->state == STATE_FINISHED && isfinite(r->loss) ? r->loss : NAN;
		int n = 0;
		for (int k = 0; k < g->num_keys; k++)
			if (has_column(g->keys[k]))
				values[n++] = r->grid->values[k];
		scaling_table_row(file.stream, &row, values, n);
	}
	free(columns.text), free(values);
	return rc < 0 ? -1 : new_file_publish(&file, 0);
}

/* The finished run of least loss, of a group (NULL: of all); NULL when none is finished. */
static const struct swept_run *best_run(const struct sweep *s, const char *group)
{
	const struct swept_run *best = NULL;
	for (const struct swept_run *r = s->runs; r < s->runs + s->grid.num_runs; r++)
		if (r->state == STATE_FINISHED && isfinite(r->loss) && (!group || !strcmp(r->grid->group, group)) &&
				(!best || r->loss < best->loss))
			best = r;
	return best;
}

static int count_state(const struct sweep *s, enum state state)
{
	int n = 0;
	for (int i = 0; i < s->grid.num_runs; i++)
		n += s->runs[i].state == state;
	return n;
}

/* FLOPs a second of the finished runs, by their own metrics; 0 when there are none. */
static double measured_rate(const struct sweep *s)
{
	double flops = 0, seconds = 0;
	for (const struct swept_run *r = s->runs; r < s->runs + s->grid.num_runs; r++)
		if (r->state == STATE_FINISHED)
			flops += flops_of(r), seconds += r->seconds;
	return seconds > 0 ? flops / seconds : 0;
}

static const double usual_share = 0.5; /* of the machine's peak FLOP/s: taken where nothing was measured */

/* The report. rate: FLOPs a second that times are estimated by; 0: not known. */
static json_t *make_report(const struct sweep *s, double rate, bool measured)
{
	const struct swept_run *best = best_run(s, NULL);
	json_t *runs = json_array(), *states = json_object();
	double left = 0;
	for (int i = 0; i < s->grid.num_runs; i++) {
		const struct swept_run *r = &s->runs[i];
		const double *v = r->grid->row.value;
		const struct swept_run *group_best = best_run(s, r->grid->group);
		const bool open = r->state != STATE_FINISHED && r->state != STATE_HOPELESS;
		const double flops_left = open ? flops_of(r) * (1 - fmin((double)r->step / r->grid->steps, 1)) : 0;
		json_t *one = json_pack("{s:o, s:o, s:s, s:I, s:I}", "run", json_cstring(r->name), "dir", json_cstring(r->dir),
				"state", state_names[r->state], "step", (json_int_t)r->step, "steps", (json_int_t)r->grid->steps);
		for (int c = 0; c < NUM_SCALING_COLUMNS; c++)
			if (c != SCALING_LOSS)
				json_object_set_new(one, scaling_columns[c], v[c] == floor(v[c]) ? result_whole(v[c])
						: result_number(v[c]));
		json_t *keys = json_object();
		for (int k = 0; k < s->grid.num_keys; k++)
			json_object_set_new(keys, s->grid.keys[k], json_cstring(r->grid->values[k]));
		json_object_set_new(one, "keys", keys);
		json_object_set_new(one, "loss", result_number(r->loss));
		json_object_set_new(one, "best_of_its_size", json_boolean(r == group_best));
		json_object_set_new(one, "seconds", result_number(r->seconds));
		json_object_set_new(one, "seconds_left", result_number(rate > 0 ? flops_left / rate : NAN));
		if (r->error)
			json_object_set_new(one, "error", json_cstring(r->error));
		json_array_append_new(runs, one);
		left += flops_left;
	}
	for (int state = 0; state < NUM_STATES; state++)
		json_object_set_new(states, state_names[state], json_integer(count_state(s, state)));
	return json_pack("{s:o, s:b, s:i, s:i, s:o, s:o, s:b, s:o, s:o, s:o}", "output_dir",
			json_cstring(s->grid.output_dir), "dry_run", s->o->dry_run, "jobs", s->o->jobs, "threads", s->threads,
			"states", states, "flops_per_second", result_number(rate > 0 ? rate : NAN), "rate_is_measured", measured,
			"seconds_left", result_number(rate > 0 ? left / rate : NAN), "best",
			best ? json_cstring(best->name) : json_null(), "runs", runs);
}

/* The length of the longest name, at least that of "run". */
static int name_width(const json_t *report)
{
	size_t i, width = 3;
	json_t *run;
	json_array_foreach(json_object_get(report, "runs"), i, run) {
		const size_t n = strlen(result_text(run, "run"));
		width = n > width ? n : width;
	}
	return (int)width;
}

static void print_report(const json_t *report)
{
	size_t i;
	json_t *run;
	char time[32];
	const int width = name_width(report);
	const bool dry = json_is_true(json_object_get(report, "dry_run"));
	bool marked = false;
	printf("%-*s  %-9s %12s %12s %12s %10s %9s  %s\n", width, "run", "state", "parameters", "active *", "tokens",
			"FLOPs", "loss", dry ? "time left" : "time");
	json_array_foreach(json_object_get(report, "runs"), i, run) {
		const double loss = result_double(run, "loss");
		const double seconds = result_double(run, dry ? "seconds_left" : "seconds");
		char text[32] = "-";
		const bool best = json_is_true(json_object_get(run, "best_of_its_size"));
		if (isfinite(loss))
			snprintf(text, sizeof text, "%.4f", loss);
		printf("%-*s  %-9s %12lld %12lld %12lld %10.3g %9s%s %s\n", width, result_text(run, "run"),
				result_text(run, "state"), (long long)result_integer(run, "parameters"),
				(long long)result_integer(run, "active_non_embedding"), (long long)result_integer(run, "tokens"),
				result_double(run, "flops"), text, best ? "+" : " ",
				isfinite(seconds) ? format_duration(time, seconds) : "-");
		marked |= best;
	}
	printf("* active parameters without embedding and head%s\n", marked ? ". + best of its size and length" : "");
	json_array_foreach(json_object_get(report, "runs"), i, run)
		if (json_object_get(run, "error"))
			printf("failed: %s: %s\n", result_text(run, "run"), result_text(run, "error"));
	if (json_is_string(json_object_get(report, "best"))) {
		const char *name = result_text(report, "best");
		json_array_foreach(json_object_get(report, "runs"), i, run)
			if (!strcmp(result_text(run, "run"), name))
				printf("best: %s, validation loss %.4f\n", name, result_double(run, "loss"));
	}
	const double left = result_double(report, "seconds_left"), rate = result_double(report, "flops_per_second");
	if (dry && isfinite(left))
		printf("%s left, without validations, at %.3g FLOP/s, %s\n", format_duration(time, left), rate,
				json_is_true(json_object_get(report, "rate_is_measured")) ? "the rate of the finished runs"
				: "half of what this machine does at best");
}

/* ============================================================================================================
 * Processes
 * ========================================================================================================== */

/* Whether a shell takes a word as it is. */
static bool is_plain(const char *word)
{
	for (; *word; word++)
		if (!isalnum((unsigned char)*word) && !strchr("/._+=,-", *word))
			return false;
	return true;
}

/* The arguments of `ling train` for a run; the caller frees the last of the words, and the array. */
static char **train_arguments(const struct sweep *s, const struct swept_run *r)
{
	const int64_t n = r->grid->overrides.count;
	char **words = allocate((n + 5) * sizeof *words);
	json_t *dir = json_cstring(r->dir);
	char *quoted = is_plain(r->dir) ? copy_string(r->dir) : json_text(dir, JSON_ENCODE_ANY);
	words[0] = "ling", words[1] = "train", words[2] = (char *)s->grid.config;
	memcpy(words + 3, r->grid->overrides.text, n * sizeof *words);
	if (asprintf(&words[n + 3], "train.output_dir=%s", quoted) < 0)
		out_of_memory(0);
	free(quoted);
	json_decref(dir);
	return words;
}

/* Opens the log of a run, output.log in its directory, and writes the command line there. Returns the descriptor. */
static int open_log(const struct swept_run *r, char **words)
{
	char path[PATH_LEN];
	if (make_directories(r->dir) < 0 || path_join(path, r->dir, "output.log") < 0)
		return -1;
	const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
	if (fd < 0)
		return fail("%s: cannot open: %s", path, strerror(errno));
	struct text line = {0};
	text_append_string(&line, "$");
	for (; *words; words++)
		text_printf(&line, is_plain(*words) ? " %s" : " '%s'", *words);
	text_append_string(&line, "\n");
	const ssize_t written = write(fd, line.data, line.size);
	const int error = errno;
	const bool whole = written == (ssize_t)line.size;
	free(line.data);
	if (whole)
		return fd;
	close(fd);
	return fail_write(path, written < 0 ? error : ENOSPC);
}

/* Fails when `ling train` would now read another config than when the sweep began. */
static int check_base(const struct sweep *s, const struct swept_run *r)
{
	struct config *c = allocate(sizeof *c);
	int rc = grid_run_config(&s->grid, r->grid, c);
	json_t *now = rc == 0 ? config_to_json(c) : NULL;
	const char *key = now ? grid_difference(r->grid->config, now) : NULL;
	if (key)
		rc = fail("%s: has changed since the sweep began: %s; start the sweep again", s->grid.config, key);
	json_decref(now);
	free(c);
	return rc;
}

static void set_failed(struct swept_run *r, const char *error)
{
	r->state = STATE_FAILED;
	free(r->error);
	r->error = copy_string(error);
}

/* Starts the training of a run. */
static int start(struct sweep *s, struct swept_run *r)
{
	if (check_base(s, r) < 0)
		return -1;
	char **words = train_arguments(s, r), *last = words[r->grid->overrides.count + 3];
	const int log = open_log(r, words);
	const pid_t pid = log < 0 ? -1 : child_fork(&s->signals);
	if (pid == 0) {
		char number[16];
		snprintf(number, sizeof number, "%d", s->threads);
		dup2(log, STDOUT_FILENO);
		dup2(log, STDERR_FILENO);
		if (s->o->jobs > 1)
			setenv("OMP_NUM_THREADS", number, 1);
		execv("/proc/self/exe", words);
		fprintf(stderr, "ling: cannot be started again: %s\n", strerror(errno));
		_exit(EXIT_WORK_FAILED);
	}
	free(last), free(words);
	if (log >= 0)
		close(log);
	if (pid < 0)
		return -1;
	r->pid = pid;
	r->state = STATE_TRAINING;
	r->first_step = r->step;
	r->started = clock_seconds();
	r->told = false;
	s->num_training++;
	return 0;
}

/* The last line of a run's log that `ling train` ends with when it fails, without its name; NULL when there is none
 * since it was last started. The caller frees it. */
static char *last_error(const struct swept_run *r)
{
	char path[PATH_LEN], *line = NULL, *found = NULL;
	size_t room = 0;
	FILE *f = path_join(path, r->dir, "output.log") < 0 ? NULL : fopen(path, "re");
	while (f && getline(&line, &room, f) >= 0)
		if (!strncmp(line, "$ ling train", 12)) {
			free(found);
			found = NULL;
		} else if (!strncmp(line, "ling: ", 6)) {
			free(found);
			line[strcspn(line, "\n")] = 0;
			found = copy_string(line + 6);
		}
	free(line);
	if (f)
		fclose(f);
	return found;
}

/* How a run failed, in words. */
static void describe_failure(struct swept_run *r, int wait_status)
{
	char text[256];
	char *error = last_error(r);
	if (WIFSIGNALED(wait_status))
		snprintf(text, sizeof text, "ended by signal %d (%s)", WTERMSIG(wait_status), strsignal(WTERMSIG(wait_status)));
	else
		snprintf(text, sizeof text, "exit status %d", WEXITSTATUS(wait_status));
	set_failed(r, error && WIFEXITED(wait_status) ? error : text);
	free(error);
}

/* Notes in the events of a run that it was stopped as hopeless. */
static void note_hopeless(const struct sweep *s, const struct swept_run *r)
{
	struct event_log log = {.fd = -1};
	const int last = r->losses.count - 1;
	if (events_open(&log, r->dir) < 0) {
		say("warning: %s", error_text);
		return;
	}
	event_write(&log, r->step, "hopeless", json_pack("{s:o, s:o, s:f, s:f, s:i}", "valid_loss",
			json_number(last < 0 ? NAN : r->losses.value[last]), "median", json_number(r->median), "margin",
			s->hopeless.margin, "after", s->hopeless.after, "runs", s->hopeless.runs));
	events_close(&log);
}

/* Share of the sweep's FLOPs that is done, *flops those that this process has done, *left those that are not done. A
 * run that has failed or is hopeless counts as done. */
static double share_done(const struct sweep *s, double *flops, double *left)
{
	double all = 0;
	*flops = s->session_flops;
	*left = 0;
	for (const struct swept_run *r = s->runs; r < s->runs + s->grid.num_runs; r++) {
		const bool open = r->state == STATE_WAITING || r->state == STATE_TRAINING || r->state == STATE_STOPPED;
		all += flops_of(r);
		*left += open ? flops_of(r) * (1 - fmin((double)r->step / r->grid->steps, 1)) : 0;
		if (r->state == STATE_TRAINING)
			*flops += flops_of(r) * fmax(r->step - r->first_step, 0) / r->grid->steps;
	}
	return 1 - *left / all;
}

/* "35% of the sweep, 2:10 left" */
static const char *describe_share(const struct sweep *s, char out[80])
{
	double flops, left;
	char time[32];
	const double share = share_done(s, &flops, &left), seconds = clock_seconds() - s->began;
	const double rate = flops > 0 && seconds > 0 ? flops / seconds : measured_rate(s);
	if (left > 0 && rate > 0)
		snprintf(out, 80, "%.0f%% of the sweep, %s left", 100 * share, format_duration(time, left / rate));
	else
		snprintf(out, 80, "%.0f%% of the sweep", 100 * share);
	return out;
}

/* A run's process has ended. */
static int end_run(struct sweep *s, struct swept_run *r, int wait_status)
{
	char share[80], time[32];
	const int status = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : -1;
	const bool asked = s->passed_on || r->told;
	r->pid = 0;
	s->num_training--;
	r->state = STATE_WAITING;
	if (look_at(s, r) < 0)
		set_failed(r, error_text);
	s->session_flops += flops_of(r) * fmax(r->step - r->first_step, 0) / r->grid->steps;
	if (r->state == STATE_FINISHED) {
		say("%s: done, validation loss %.4f, %s; %s", r->name, plain_nan(r->loss), format_duration(time,
				clock_seconds() - r->started), describe_share(s, share));
	} else if (r->state == STATE_WAITING && (status == EXIT_STOPPED || (asked && WIFSIGNALED(wait_status)))) {
		r->state = r->told ? STATE_HOPELESS : STATE_STOPPED;
		if (r->told)
			note_hopeless(s, r);
		say("%s: %s at step %lld of %lld%s%s", r->name, r->told ? "stopped as hopeless" : "stopped", (long long)r->step,
				(long long)r->grid->steps, r->told ? "; " : "", r->told ? describe_share(s, share) : "");
	} else if (r->state != STATE_HOPELESS) {
		if (r->state == STATE_WAITING)
			describe_failure(r, wait_status);
		say("%s: failed: %s", r->name, r->error);
		s->failing |= s->o->fail_fast;
	}
	return write_table(s);
}

/* Takes the ends of processes. */
static int reap(struct sweep *s)
{
	int wait_status, rc = 0;
	for (pid_t pid; rc == 0 && (pid = waitpid(-1, &wait_status, WNOHANG)) > 0;)
		for (int i = 0; i < s->grid.num_runs; i++)
			if (s->runs[i].pid == pid)
				rc = end_run(s, &s->runs[i], wait_status);
	return rc;
}

/* Sends a signal to all runs that train. */
static void signal_all(const struct sweep *s, int number)
{
	for (int i = 0; i < s->grid.num_runs; i++)
		if (s->runs[i].pid)
			kill(s->runs[i].pid, number);
}

/* ============================================================================================================
 * Hopeless runs
 * ========================================================================================================== */

/* The validation loss of a run after so many tokens, on a line between the two validations around; NaN where there are
 * none. */
static double loss_at(const struct series *s, double tokens)
{
	for (int i = 0; i < s->count; i++) {
		if (s->tokens[i] == tokens)
			return s->value[i];
		if (i && s->tokens[i - 1] < tokens && tokens < s->tokens[i])
			return s->value[i - 1] + (s->value[i] - s->value[i - 1]) * (tokens - s->tokens[i - 1]) /
					(s->tokens[i] - s->tokens[i - 1]);
	}
	return NAN;
}

/* Whether a run that trains is hopeless by the rule. *median: of the others. */
static bool is_hopeless(const struct sweep *s, const struct swept_run *r, double *median)
{
	const int last = r->losses.count - 1;
	const double all = r->grid->row.value[SCALING_TOKENS], tokens = last < 0 ? 0 : r->losses.tokens[last];
	if (last < 0 || tokens < s->hopeless.after * all || tokens >= all)
		return false;
	double *losses = allocate(s->grid.num_runs * sizeof *losses);
	int n = 0;
	for (const struct swept_run *o = s->runs; o < s->runs + s->grid.num_runs; o++) {
		const double loss = o != r && !strcmp(o->grid->group, r->grid->group) ? loss_at(&o->losses, tokens) : NAN;
		if (isfinite(loss))
			losses[n++] = loss;
	}
	qsort(losses, n, sizeof *losses, compare_doubles);
	*median = n ? (losses[(n - 1) / 2] + losses[n / 2]) / 2 : NAN;
	free(losses);
	return n >= s->hopeless.runs && !(r->losses.value[last] <= *median + s->hopeless.margin);
}

/* Reads how far the runs that train have come, as often as takes no more than a twentieth of the time; and stops those
 * that are hopeless. */
static void watch(struct sweep *s)
{
	const double now = clock_seconds();
	if (now - s->looked < s->look_pause)
		return;
	for (int i = 0; i < s->grid.num_runs; i++) {
		struct swept_run *r = &s->runs[i];
		struct heartbeat h;
		if (r->state != STATE_TRAINING)
			continue;
		if (heartbeat_read(&h, r->dir) > 0) {
			if (h.rank[0].pid == r->pid && h.rank[0].step > 0)
				r->step = h.rank[0].step - 1;
			heartbeat_free(&h);
		}
		if (s->hopeless.margin <= 0 || r->told)
			continue;
		struct run run;
		if (has_run(r->dir) > 0 && run_open(&run, r->dir) == 0) {
			series_free(&r->losses);
			r->losses = run_series(&run, "valid_loss");
			run_free(&run);
		}
		if (is_hopeless(s, r, &r->median)) {
			say("%s: hopeless: validation loss %.4f after %.0f tokens, where the median of the others is %.4f; it "
					"saves and stops", r->name, plain_nan(r->losses.value[r->losses.count - 1]),
					r->losses.tokens[r->losses.count - 1], r->median);
			r->told = true;
			kill(r->pid, SIGUSR1);
		}
	}
	s->looked = clock_seconds();
	s->look_pause = fmax(0.1, 20 * (s->looked - now));
}

/* ============================================================================================================
 * The sweep
 * ========================================================================================================== */

/* The next run to start; NULL when there is none now. *held: the directory of one that waits for another process. */
static struct swept_run *next_run(const struct sweep *s, const char **held)
{
	*held = NULL;
	for (int i = 0; i < s->grid.num_runs; i++) {
		struct swept_run *r = &s->runs[i];
		if (r->state != STATE_WAITING)
			continue;
		if (!child_holds_run(r->dir))
			return r;
		*held = *held ? *held : r->dir;
	}
	return NULL;
}

/* Starts as many runs as may train at once. Returns whether there is anything to wait for. */
static bool start_runs(struct sweep *s)
{
	const char *held = NULL;
	while (s->num_training < s->o->jobs) {
		struct swept_run *r = next_run(s, &held);
		if (!r)
			break;
		/* another process may have trained it since it was looked at */
		if (look_at(s, r) < 0 || (r->state == STATE_WAITING && start(s, r) < 0)) {
			set_failed(r, error_text);
			say("%s: failed: %s", r->name, r->error);
			s->failing |= s->o->fail_fast;
			if (s->failing)
				break;
		} else if (r->state == STATE_TRAINING) {
			char from[64] = "";
			if (r->step)
				snprintf(from, sizeof from, ", from step %lld", (long long)r->step);
			say("%s: run %d of %d begins: %lld steps, %.3g tokens, %.3g FLOPs%s", r->name, (int)(r - s->runs) + 1,
					s->grid.num_runs, (long long)r->grid->steps, r->grid->row.value[SCALING_TOKENS], flops_of(r), from);
		}
	}
	if (held && !s->num_training && (!s->waited_for || strcmp(s->waited_for, held))) {
		say("another ling train is writing in %s; waiting for its end", held);
		free(s->waited_for);
		s->waited_for = copy_string(held);
	}
	return held || s->num_training;
}

/* A line that says how far the runs that train are, now and then. */
static void show_progress(struct sweep *s)
{
	const double now = clock_seconds();
	char share[80];
	struct text line = {0};
	if (now - s->shown < s->o->every || !s->num_training)
		return;
	s->shown = now;
	for (const struct swept_run *r = s->runs; r < s->runs + s->grid.num_runs; r++)
		if (r->state == STATE_TRAINING)
			text_printf(&line, "%s%s %.0f%%", line.size ? ", " : "", r->name, 100.0 * r->step / r->grid->steps);
	say("%s; %s", line.data, describe_share(s, share));
	free(line.data);
}

/* Trains all runs that are neither finished nor hopeless. */
static int train_all(struct sweep *s)
{
	int rc = 0;
	s->began = s->shown = clock_seconds();
	while (rc == 0) {
		const bool ending = s->stops || s->failing;
		if (ending && !s->passed_on) {
			signal_all(s, SIGUSR1);
			s->passed_on = true;
		}
		if (s->stops > 1)
			signal_all(s, SIGKILL);
		if (ending ? !s->num_training : !start_runs(s) && !s->failing)
			break;
		const int number = child_signal_wait(&s->signals, 0.1);
		if (number)
			say("SIG%s: %s", sigabbrev_np(number), s->stops++ ? "ending the runs at once"
					: s->num_training ? "the runs save and stop" : "stopping");
		rc = reap(s);
		watch(s);
		show_progress(s);
	}
	if (rc < 0) { /* the table cannot be written: the runs save and stop all the same */
		signal_all(s, SIGUSR1);
		while (waitpid(-1, NULL, 0) > 0) {}
	}
	return rc;
}

/* How the sweep has ended: an exit status. */
static int final_status(const struct sweep *s)
{
	const int failed = count_state(s, STATE_FAILED), stopped = count_state(s, STATE_STOPPED);
	if (s->stops)
		return EXIT_STOPPED;
	for (const struct swept_run *r = s->runs; failed && r < s->runs + s->grid.num_runs; r++)
		if (r->state == STATE_FAILED) {
			fail("%d of %d runs failed, %s%s: %s", failed, s->grid.num_runs, failed > 1 ? "the first of them " : "",
					r->name, r->error);
			return EXIT_WORK_FAILED;
		}
	return stopped ? EXIT_STOPPED : EXIT_DONE;
}

/* The directory, its lock, the runs. */
static int sweep(struct sweep *s)
{
	char path[PATH_LEN], reason[sizeof error_text];
	if (make_directories(s->grid.output_dir) < 0 || path_join(path, s->grid.output_dir, "sweep") < 0)
		return EXIT_WORK_FAILED;
	if (new_file_lock(&s->lock, path) < 0) {
		memcpy(reason, error_text, sizeof reason);
		fail("another ling sweep is at work in %s: %s", s->grid.output_dir, reason);
		return EXIT_WORK_FAILED;
	}
	if (look_at_all(s) < 0 || write_table(s) < 0)
		return EXIT_WORK_FAILED;
	say("%d runs, of which %d are finished; %d at once, with %d thread%s each", s->grid.num_runs,
			count_state(s, STATE_FINISHED), s->o->jobs, s->threads, s->threads == 1 ? "" : "s");
	child_signals_init(&s->signals);
	if (train_all(s) < 0 || write_table(s) < 0)
		return EXIT_WORK_FAILED;
	const double rate = measured_rate(s);
	result_print(make_report(s, rate, rate > 0), s->o->json, print_report);
	return final_status(s);
}

/* Lists the runs. */
static int list_runs(struct sweep *s)
{
	if (look_at_all(s) < 0)
		return EXIT_WORK_FAILED;
	const double measured = measured_rate(s), rate = measured > 0 ? measured : usual_share * quick_rates().flops;
	result_print(make_report(s, rate, measured > 0), s->o->json, print_report);
	return EXIT_DONE;
}

static int run_sweep(const struct command_line *line)
{
	struct sweep s = {.o = line->options};
	int status = EXIT_WRONG_USE;
	if (launcher_rank() >= 0)
		fail("it was started by mpirun or srun: start ling sweep once, by itself; its runs have one process each");
	else if (grid_read(&s.grid, line->words[0]) == 0) {
		s.runs = allocate(s.grid.num_runs * sizeof *s.runs);
		s.hopeless = s.grid.hopeless;
		if (s.o->stop_hopeless && s.hopeless.margin <= 0)
			s.hopeless = (struct hopeless_rule){.margin = 0.1, .after = 0.25, .runs = 3};
		s.threads = kernels_threads() / s.o->jobs > 1 ? kernels_threads() / s.o->jobs : 1;
		status = s.o->dry_run ? list_runs(&s) : sweep(&s);
	}
	new_file_abandon(&s.lock);
	for (int i = 0; s.runs && i < s.grid.num_runs; i++) {
		free(s.runs[i].name), free(s.runs[i].error);
		series_free(&s.runs[i].losses);
	}
	free(s.runs), free(s.waited_for);
	grid_free(&s.grid);
	return status;
}

static const struct command_option options[] = {
	FLAG_OPTION(sweep_options, dry_run, "dry-run",
		"List the runs with their parameters, tokens, FLOPs and estimated time, and train nothing"),
	WHOLE_OPTION(sweep_options, jobs, "jobs", "N", 1, 4096,
		"Train N runs at once; each has the threads of this machine (or OMP_NUM_THREADS) over N", .initial = "1"),
	FLAG_OPTION(sweep_options, stop_hopeless, "stop-hopeless",
		"Stop runs that are hopeless, as by stop_hopeless: {margin: 0.1} where the file does not have the key "
		"(docs/scaling.md)"),
	FLAG_OPTION(sweep_options, fail_fast, "fail-fast",
		"When a run fails, the others save and stop; else they go on"),
	NUMBER_OPTION(sweep_options, every, "every", "SECONDS", 0.1, 1e6,
		"Between two lines that say how far it is", .initial = "60"),
	FLAG_OPTION(sweep_options, json, "json", "Print the results as one JSON object"),
	PRINT_OPTION("keys", grid_print_keys, "Print every key of the file with its default and meaning"),
};

const struct command sweep_command = {
	.name = "sweep", .usage = "GRID.yaml", .min_words = 1, .max_words = 1,
	.help = "Train the runs of a grid, each in a directory of its own, and write a table of their losses. The same "
		"command again continues; finished runs stay as they are. SIGTERM, SIGINT, SIGHUP and SIGUSR1 let the runs "
		"save and stop, with exit status 3. Exit status 1: a run has failed.",
	.run = run_sweep, COMMAND_OPTIONS(sweep_options, options), .has_threads = true, .measures_peak = true,
	.handles_signals = true,
};
