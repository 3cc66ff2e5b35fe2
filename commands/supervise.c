/*
 * commands/supervise.c - `ling supervise`: runs a training command, and starts it again after a crash or a hang. The
 * command itself continues from the newest checkpoint.
 *
 *   The command       starting it, and ending all of its processes
 *   One start         watching it: its end, its heartbeat, signals to the supervisor
 *   The run           what follows an end: done, stopped, back, again, giving up
 *   The summary
 * The command runs in a process group of its own, and its processes stay descendants of the supervisor even when those
 * between them have died (PR_SET_CHILD_SUBREAPER): so none is left when it is started again. When the supervisor is
 * killed, the system sends SIGUSR1 to the command (PR_SET_PDEATHSIG), which saves and ends; nobody would watch it.
 */
#define _GNU_SOURCE
#include "commands/supervise.h"

#include "commands/child.h"
#include "commands/hang.h"
#include "commands/result.h"
#include "data.h"
#include "files/base.h"
#include "files/checkpoint.h"
#include "files/config.h"
#include "files/heartbeat.h"
#include "training/events.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MOST_FAILURES = 3, MOST_FAILED_STARTS = 2 }; /* in a row: without progress; without a step, of one layout */
enum { NOT_FOUND = 127, NOT_EXECUTABLE = 126 };     /* what a shell exits with when it cannot start a command */
static const double longest_pause = 60;             /* seconds between two starts */

struct supervise_options {
	const char *run;
	int max_restarts;
	double hang_factor, hang_least, hang_unseen, grace, pause;
	struct strings fewer_ranks;
	bool json;
};

/* How a start ended. */
enum end { END_EXIT, END_SIGNAL, END_HANG };

struct supervisor {
	const struct supervise_options *o;
	char **command;              /* argv of the first layout, ends with NULL */
	int64_t layout;              /* 0: command; n: the n-th of --fewer-ranks */
	char run[PATH_LEN];
	struct new_file lock;        /* no other supervisor may have this run */
	struct event_log events;
	struct child_signals signals;
	int stops;                   /* signals to it that ask for a stop */
	bool passed_on;              /* the first of them, to the command */
	struct hang_history history;
	/* the current start */
	pid_t pid;                   /* 0: none runs */
	uint64_t old_heartbeat;      /* the heartbeat file that was there before */
	struct hang_watch watch;
	double failed;               /* clock_seconds() of the failure that it comes after; 0: none, or it was recovered */
	/* the run */
	double began;
	int64_t first_step, best;    /* steps done at the beginning, and the most that were ever done */
	int restarts, crashes, hangs, backs;
	int64_t back_to;             /* the step that it last went back to */
	int failures, failed_starts; /* in a row: without progress; without a step */
	int64_t steps_lost;
	json_t *incidents;
};

/* A line for the user. */
#define say(...) command_say("supervise", __VA_ARGS__)

/* The step of the newest checkpoint of the run, and its path; 0 when there is none, or when it cannot be told. */
static int64_t newest_checkpoint(const struct supervisor *s, char path[PATH_LEN])
{
	if (checkpoint_newest(s->run, path) <= 0)
		return 0;
	const char *digits = strrchr(path, '-');
	return digits ? strtoll(digits + 1, NULL, 10) : 0;
}

/* ============================================================================================================
 * The command
 * ========================================================================================================== */

/* Starts it. With --json its standard output goes to standard error, as the summary has standard output. */
static int start(struct supervisor *s)
{
	struct heartbeat old;
	s->old_heartbeat = heartbeat_read(&old, s->run) > 0 ? old.id : 0;
	if (s->old_heartbeat)
		heartbeat_free(&old);
	const pid_t pid = child_fork(&s->signals);
	if (pid < 0)
		return -1;
	if (pid == 0) {
		if (s->o->json)
			dup2(STDERR_FILENO, STDOUT_FILENO);
		if (s->layout)
			execl("/bin/sh", "sh", "-c", s->o->fewer_ranks.text[s->layout - 1], (char *)NULL);
		else
			execvp(s->command[0], s->command);
		const int error = errno;
		fprintf(stderr, "ling supervise: %s: cannot be started: %s\n", s->layout ? "/bin/sh" : s->command[0],
				strerror(error));
		_exit(error == ENOENT ? NOT_FOUND : NOT_EXECUTABLE);
	}
	s->pid = pid;
	hang_watch_begin(&s->watch, &s->history, clock_seconds());
	return 0;
}

/* Sends a signal to all descendants of this process. Returns how many there are that have not ended. */
static int signal_descendants(int signal)
{
	struct { int pid, parent; } *list = NULL;
	size_t capacity = 0;
	int n = 0, found = 0;
	DIR *dir = opendir("/proc");
	for (struct dirent *e; dir && (e = readdir(dir));) {
		struct process p;
		const int pid = isdigit((unsigned char)e->d_name[0]) ? atoi(e->d_name) : 0;
		if (pid <= 0 || !process_look(&p, pid) || p.state == 'Z')
			continue;
		list = grow(list, n, &capacity, 1, sizeof *list);
		list[n].pid = pid;
		list[n++].parent = p.parent;
	}
	if (dir)
		closedir(dir);
	/* Those whose parent is this process or has been found come to the front, until there are no more. */
	for (int more = 1; more;) {
		more = 0;
		for (int i = found; i < n; i++) {
			bool mine = list[i].parent == getpid();
			for (int j = 0; j < found && !mine; j++)
				mine = list[i].parent == list[j].pid;
			if (!mine)
				continue;
			const __typeof__(*list) one = list[i];
			list[i] = list[found];
			list[found++] = one;
			more = 1;
		}
	}
	for (int i = 0; i < found && signal; i++)
		kill(list[i].pid, signal);
	free(list);
	return found;
}

/* Ends all processes of the command: asks them first, and kills what is left after --grace seconds. */
static void end_command(struct supervisor *s)
{
	const struct timespec moment = {.tv_nsec = 50 * 1000 * 1000};
	const double asked = clock_seconds();
	bool killed = false;
	if (s->pid)
		kill(-s->pid, SIGTERM);
	for (int left = signal_descendants(SIGTERM); left;) {
		nanosleep(&moment, NULL);
		while (waitpid(-1, NULL, WNOHANG) > 0) {}
		killed |= clock_seconds() - asked > s->o->grace;
		left = signal_descendants(killed ? SIGKILL : 0);
		if (clock_seconds() - asked > s->o->grace + 60)
			break; /* not even SIGKILL ends a process that waits for a disk or a server that is gone */
	}
	while (waitpid(-1, NULL, WNOHANG) > 0) {}
	s->pid = 0;
}

/* Passes the wish for a stop on: as SIGUSR1, after which every rank saves and ends, and which mpirun and srun pass on;
 * after SIGTERM mpirun would kill the ranks before they have saved. To the ranks of this machine directly where there
 * are any: the command may be a shell that would die of it. */
static void pass_on_stop(struct supervisor *s)
{
	const struct heartbeat *h = &s->watch.now;
	bool told = false;
	s->passed_on = true;
	for (int i = 0; i < h->ranks; i++) {
		const enum hang_process state = hang_process(&h->rank[i]);
		if (state != PROCESS_ELSEWHERE && state != PROCESS_GONE)
			told |= kill(h->rank[i].pid, SIGUSR1) == 0;
	}
	if (!told)
		kill(s->pid, SIGUSR1);
}

/* ============================================================================================================
 * One start
 * ========================================================================================================== */

/* Waits for a signal to this process, or the end of a child, at the most so many seconds. Counts wishes for a stop. */
static void wait_for_signal(struct supervisor *s, double seconds)
{
	const int number = child_signal_wait(&s->signals, seconds);
	if (number)
		say("SIG%s: %s", sigabbrev_np(number), s->stops++ ? "ending the run at once" : "the run saves and stops");
}

/* Reads the heartbeat, and completes the last incident when the first step of the new start is done. */
static void look(struct supervisor *s)
{
	struct heartbeat h;
	const double time = clock_seconds();
	if (heartbeat_read(&h, s->run) > 0) {
		if (h.id != s->old_heartbeat)
			hang_watch_take(&s->watch, &h, time);
		heartbeat_free(&h);
	}
	if (s->failed && s->watch.stepped) {
		json_t *last = json_array_get(s->incidents, json_array_size(s->incidents) - 1);
		json_object_set_new(last, "restart_seconds", json_real(time - s->failed));
		s->failed = 0;
	}
}

/* Watches the command until it has ended, or hangs. *status: its exit status, or the signal that ended it. *text: what
 * hangs, and *members of the event. */
static enum end watch(struct supervisor *s, int *status, char **text, json_t **members)
{
	const struct hang_limits limits = {s->o->hang_factor, s->o->hang_least, s->o->hang_unseen};
	int wait_status;
	for (pid_t ended; ; look(s)) {
		while ((ended = waitpid(-1, &wait_status, WNOHANG)) > 0 && ended != s->pid) {}
		if (ended == s->pid)
			break;
		if (s->stops && !s->passed_on)
			pass_on_stop(s);
		double limit;
		const double time = clock_seconds(), since = hang_detect(&s->watch, &limits, time, &limit);
		if (since || s->stops > 1) {
			if (since) {
				*text = hang_describe(&s->watch, time, members);
				json_object_set_new(*members, "limit_seconds", json_real(limit));
				json_object_set_new(*members, "detect_seconds", json_real(since));
			}
			*status = 0;
			return since ? END_HANG : END_SIGNAL;
		}
		wait_for_signal(s, fmin(fmax(hang_median_step(&s->history) / 4, 0.1), 1));
	}
	look(s);
	const bool exited = WIFEXITED(wait_status);
	*status = exited ? WEXITSTATUS(wait_status) : WTERMSIG(wait_status);
	return exited ? END_EXIT : END_SIGNAL;
}

/* Seconds since a rank last gave a sign of life; 0 when none did. */
static double seconds_since_sign(const struct supervisor *s)
{
	struct timespec t;
	double last = 0;
	clock_gettime(CLOCK_REALTIME, &t);
	for (int i = 0; i < s->watch.now.ranks; i++)
		last = fmax(last, s->watch.now.rank[i].changed + s->watch.now.rank[i].waited);
	return last ? fmax(t.tv_sec + t.tv_nsec / 1e9 - last, 0) : 0;
}

/* ============================================================================================================
 * The run
 * ========================================================================================================== */

/* Waits until no ling train holds the directory of the run: that of a supervisor that was killed may still be saving.
 * Returns 1 when a signal ended the wait. */
static int wait_for_lock(struct supervisor *s)
{
	const double start = clock_seconds();
	bool told = false;
	while (!s->stops) {
		if (!child_holds_run(s->run))
			return 0;
		if (!told)
			say("another ling train is writing in %s; waiting for its end", s->run);
		told = true;
		if (clock_seconds() - start > s->o->hang_unseen)
			return fail("%s: another ling train has been writing there for %.0f s; end it, or wait for it", s->run,
					s->o->hang_unseen);
		wait_for_signal(s, 0.5);
	}
	return 1;
}

/* Moves the newest checkpoint aside, as gone-back-step-NNNNNNN, and appends its new path to `aside`. Returns 1; 0 when
 * there is none; -1 on error. */
static int set_newest_aside(const struct supervisor *s, json_t *aside)
{
	char path[PATH_LEN], other[PATH_LEN], name[320];
	const int found = checkpoint_newest(s->run, path);
	if (found <= 0)
		return found;
	for (int i = 1, taken = 1; taken; i++) {
		if (i == 1)
			snprintf(name, sizeof name, "gone-back-%.200s", file_name(path));
		else
			snprintf(name, sizeof name, "gone-back-%.200s.%d", file_name(path), i);
		if (path_join(other, s->run, name) < 0 || (taken = path_exists(other)) < 0)
			return -1;
	}
	if (rename(path, other) < 0)
		return fail("%s: cannot be renamed to %s: %s", path, other, strerror(errno));
	json_array_append_new(aside, json_cstring(other));
	return sync_path(s->run) < 0 ? -1 : 1;
}

/* Goes back to the checkpoint before the newest one; when the run made no progress since it last went back, further
 * back than that time: what it then started from was no better. Returns the step that it will start from, -1 on
 * error. aside: the checkpoints that were set aside. */
static int64_t go_back(struct supervisor *s, json_t *aside)
{
	char path[PATH_LEN];
	const int64_t before = s->failures && s->backs ? s->back_to : INT64_MAX;
	int found;
	do
		found = set_newest_aside(s, aside);
	while (found > 0 && newest_checkpoint(s, path) >= before && before > 0);
	s->backs++;
	s->back_to = newest_checkpoint(s, path);
	return found < 0 ? -1 : s->back_to;
}

/* How a start ended, in words, for a person. */
static void describe_end(char out[256], enum end end, int status)
{
	if (end == END_SIGNAL)
		snprintf(out, 256, "the command was ended by signal %d (%s)", status, strsignal(status));
	else if (status > 128 && status < 128 + NSIG)
		snprintf(out, 256, "the command ended with exit status %d: a process was ended by signal %d (%s)", status,
				status - 128, strsignal(status - 128));
	else
		snprintf(out, 256, "the command ended with exit status %d%s", status,
				status == EXIT_GO_BACK ? ": it must go back" : "");
}

/* Records a failure as an event and for the summary. members: of the event; it is released. */
static void record(struct supervisor *s, const char *kind, int64_t done, const char *text, json_t *members)
{
	json_object_set_new(members, "text", json_cstring(text));
	json_t *incident = json_deep_copy(members);
	json_object_set_new(incident, "kind", json_string(kind));
	json_object_set_new(incident, "step", json_integer(done));
	json_object_del(incident, "ranks"), json_object_del(incident, "waiting");
	json_array_append_new(s->incidents, incident);
	event_write(&s->events, done, kind, members);
}

/* What follows a failure; `done`: the steps that were done. Returns the exit status when that is the end, else -1. */
static int after_failure(struct supervisor *s, int status, int64_t done)
{
	char path[PATH_LEN];
	const bool back = status == EXIT_GO_BACK;
	int64_t from = newest_checkpoint(s, path);
	const int64_t most = done > from ? done : from;
	s->failures = most > s->best ? 0 : s->failures + 1;
	s->best = most > s->best ? most : s->best;
	s->failed_starts = s->watch.stepped ? 0 : s->failed_starts + 1;
	if (s->stops)
		return EXIT_STOPPED;
	const char *reason = NULL;
	char words[1024] = "";
	json_t *aside = json_array(); /* paths of checkpoints */
	if (s->failed_starts >= MOST_FAILED_STARTS && s->layout < s->o->fewer_ranks.count) {
		s->layout++;
		s->failures = s->failed_starts = 0;
	} else if (s->failures >= MOST_FAILURES) {
		snprintf(words, sizeof words, "%d starts in a row came no further than step %lld", s->failures,
				(long long)s->best);
		reason = words;
	}
	if (!reason && s->restarts >= s->o->max_restarts) {
		snprintf(words, sizeof words, "the run was started again %d time%s, which is --max-restarts", s->restarts,
				s->restarts == 1 ? "" : "s");
		reason = words;
	}
	if (!reason && back) {
		from = go_back(s, aside);
		if (from < 0)
			reason = memcpy(words, error_text, sizeof words - 1);
	}
	if (reason) {
		json_decref(aside);
		event_write(&s->events, most, "giving_up", json_pack("{s:o}", "reason", json_cstring(reason)));
		fail("giving up: %s", reason);
		return back ? EXIT_GO_BACK : EXIT_WORK_FAILED;
	}
	const int64_t lost = done > from ? done - from : 0;
	const double pause = fmin(s->o->pause * (1 << (s->failures < 10 ? s->failures : 10)), longest_pause);
	s->steps_lost += lost;
	json_object_set_new(json_array_get(s->incidents, json_array_size(s->incidents) - 1), "steps_lost",
			json_integer(lost));
	for (size_t i = 0; i < json_array_size(aside); i++)
		say("going back: the newest checkpoint is now %s", json_string_value(json_array_get(aside, i)));
	say("starting again in %.0f s, from %s%lld%s%s", pause, from ? "step " : "the beginning, step ", (long long)from,
			s->layout ? ", with " : "", s->layout ? s->o->fewer_ranks.text[s->layout - 1] : "");
	const double until = clock_seconds() + pause;
	for (double left; !s->stops && (left = until - clock_seconds()) > 0;)
		wait_for_signal(s, left);
	if (s->stops) {
		json_decref(aside);
		return EXIT_STOPPED;
	}
	s->restarts++;
	json_t *members = json_pack("{s:i, s:I, s:I, s:f}", "restart", s->restarts, "from", (json_int_t)from, "steps_lost",
			(json_int_t)lost, "pause_seconds", pause);
	if (back)
		json_object_set(members, "set_aside", aside);
	json_decref(aside);
	if (s->layout)
		json_object_set_new(members, "command", json_cstring(s->o->fewer_ranks.text[s->layout - 1]));
	event_write(&s->events, from, "restart", members);
	return -1;
}

/* Starts the command, watches it, and says what follows: an exit status when that is the end, else -1. */
static int start_once(struct supervisor *s)
{
	char *hang = NULL, words[256];
	json_t *members = NULL;
	int status;
	const int held = wait_for_lock(s);
	if (held)
		return held < 0 ? EXIT_WORK_FAILED : EXIT_STOPPED;
	if (start(s) < 0)
		return EXIT_WORK_FAILED;
	const enum end end = watch(s, &status, &hang, &members);
	const double now = clock_seconds(), silent = seconds_since_sign(s);
	char path[PATH_LEN];
	int64_t done = hang_steps_done(&s->watch);
	done = done < 0 ? newest_checkpoint(s, path) : done;
	int rc = -1;
	if (end == END_EXIT && (status == EXIT_DONE || status == EXIT_STOPPED))
		rc = status;
	else if (end == END_EXIT && (status == EXIT_WRONG_USE || status == NOT_FOUND || status == NOT_EXECUTABLE)) {
		describe_end(words, end, status);
		fail("%s: it is not started again", words);
		rc = EXIT_WRONG_USE;
	} else if (end == END_HANG) {
		s->hangs++;
		say("hang: %s", hang);
		record(s, "hang", done, hang, members);
		end_command(s);
	} else if (s->stops) {
		rc = EXIT_STOPPED; /* it was asked to end, and its newest checkpoint is there */
		end_command(s);
	} else {
		s->crashes += status != EXIT_GO_BACK || end != END_EXIT;
		describe_end(words, end, status);
		say("%s", words);
		record(s, "crash", done, words, json_pack("{s:i, s:f}", end == END_EXIT ? "status" : "signal", status,
				"detect_seconds", silent));
		end_command(s);
	}
	if (rc < 0) {
		s->failed = now;
		rc = after_failure(s, end == END_EXIT ? status : EXIT_WORK_FAILED, done);
	}
	free(hang);
	hang_watch_end(&s->watch);
	s->pid = 0;
	return rc;
}

/* ============================================================================================================
 * The summary
 * ========================================================================================================== */

/* Seconds of the steps that the run has kept since the supervisor began, by its metrics. */
static double useful_seconds(const struct supervisor *s)
{
	struct metrics *m;
	int n;
	double sum = 0;
	char reason[sizeof error_text];
	memcpy(reason, error_text, sizeof reason); /* the summary does not change why the command ended */
	if (metrics_read(s->run, &m, &n) == 0) {
		for (int i = 0; i < n; i++)
			if (m[i].step > s->first_step && isfinite(m[i].seconds))
				sum += m[i].seconds;
		free(m);
	}
	memcpy(error_text, reason, sizeof reason);
	return sum;
}

static void print_summary(const json_t *r)
{
	size_t i;
	json_t *incident;
	printf("%lld restart%s: %lld crash%s, %lld hang%s, %lld time%s back; %lld steps lost. Goodput %.1f%%: %.0f s in "
			"steps that the run kept, of %.0f s\n", (long long)result_integer(r, "restarts"),
			result_integer(r, "restarts") == 1 ? "" : "s", (long long)result_integer(r, "crashes"),
			result_integer(r, "crashes") == 1 ? "" : "es", (long long)result_integer(r, "hangs"),
			result_integer(r, "hangs") == 1 ? "" : "s", (long long)result_integer(r, "went_back"),
			result_integer(r, "went_back") == 1 ? "" : "s", (long long)result_integer(r, "steps_lost"),
			100 * result_double(r, "goodput"), result_double(r, "step_seconds"), result_double(r, "seconds"));
	json_array_foreach(json_object_get(r, "incidents"), i, incident) {
		const json_t *restart = json_object_get(incident, "restart_seconds"), *lost = json_object_get(incident,
				"steps_lost");
		printf("  %s at step %lld: seen after %.1f s", result_text(incident, "kind"),
				(long long)result_integer(incident, "step"), result_double(incident, "detect_seconds"));
		if (lost)
			printf(", %lld steps lost", (long long)json_integer_value(lost));
		if (restart)
			printf(", training again after %.1f s", json_number_value(restart));
		printf(". %s\n", result_text(incident, "text"));
	}
}

static void summarize(struct supervisor *s, int status)
{
	char path[PATH_LEN];
	const double seconds = clock_seconds() - s->began, useful = useful_seconds(s);
	json_t *r = json_pack("{s:i, s:i, s:i, s:i, s:i, s:I, s:f, s:f, s:f}", "status", status, "restarts", s->restarts,
			"crashes", s->crashes, "hangs", s->hangs, "went_back", s->backs, "steps_lost", (json_int_t)s->steps_lost,
			"seconds", seconds, "step_seconds", useful, "goodput", useful / seconds);
	event_write(&s->events, newest_checkpoint(s, path), "end", json_copy(r));
	json_object_set(r, "incidents", s->incidents);
	result_print(r, s->o->json, print_summary);
}

/* ============================================================================================================
 * The command line
 * ========================================================================================================== */

/* Finds the directory of the run: --run, or train.output_dir in the config of the `ling train` in the command. */
static int find_run(char run[PATH_LEN], const struct supervise_options *o, char **words, int n)
{
	if (o->run)
		return path_copy(run, o->run);
	int i = 0;
	while (i + 1 < n && (strcmp(file_name(words[i]), "ling") || strcmp(words[i + 1], "train")))
		i++;
	char **arguments = allocate((n + 1) * sizeof *arguments);
	int count = 0;
	for (i += 2; i < n; i++) {
		if (strncmp(words[i], "--", 2))
			arguments[count++] = words[i];
		else if (!strchr(words[i], '='))
			i++; /* an option, and its value in the next word */
	}
	struct config c;
	int rc = count ? config_load(&c, arguments[0], count - 1, arguments + 1, false)
			: fail("the command has no `ling train CONFIG` in it: give the run's directory with --run DIR");
	free(arguments);
	return rc < 0 ? rc : path_copy(run, c.train.output_dir);
}

static int run_supervise(const struct command_line *line)
{
	struct supervisor s = {.o = line->options, .command = allocate((line->num_words + 1) * sizeof *s.command),
			.events = {.fd = -1}, .incidents = json_array(), .began = clock_seconds()};
	char path[PATH_LEN];
	memcpy(s.command, line->words, line->num_words * sizeof *s.command);
	int status = -1;
	if (launcher_rank() >= 0) {
		fail("it was started by mpirun or srun: start ling supervise once, and mpirun or srun behind the `--`");
		status = EXIT_WRONG_USE;
	} else if (find_run(s.run, s.o, line->words, line->num_words) < 0)
		status = EXIT_WRONG_USE;
	else if (make_directories(s.run) < 0 || path_join(path, s.run, "supervise") < 0 ||
			new_file_lock(&s.lock, path) < 0 || events_open(&s.events, s.run) < 0)
		status = EXIT_WORK_FAILED;
	if (status < 0) {
		child_signals_init(&s.signals);
		prctl(PR_SET_CHILD_SUBREAPER, 1);
		s.first_step = s.best = newest_checkpoint(&s, path);
		while (status < 0)
			status = start_once(&s);
		summarize(&s, status);
	}
	events_close(&s.events);
	new_file_abandon(&s.lock);
	json_decref(s.incidents);
	free(s.command);
	return status;
}

static const struct command_option options[] = {
	TEXT_OPTION(supervise_options, run, "run", "DIR",
		"The run's directory (default: train.output_dir of the `ling train` in the command)"),
	WHOLE_OPTION(supervise_options, max_restarts, "max-restarts", "N", 0, 1000000,
		"Give up when the run was started again so many times", .initial = "100"),
	NUMBER_OPTION(supervise_options, hang_factor, "hang-factor", "F", 2, 1e6,
		"A step hangs when it takes F times the median of the last ones; a start, first step, evaluation or save when "
		"it takes F times the longest one seen", .initial = "10"),
	NUMBER_OPTION(supervise_options, hang_least, "hang-least", "SECONDS", 0, 1e9,
		"But nothing hangs before so many seconds", .initial = "60"),
	NUMBER_OPTION(supervise_options, hang_unseen, "hang-unseen", "SECONDS", 0, 1e9,
		"The limit of what was not seen yet: the first start, step, evaluation and save", .initial = "3600"),
	NUMBER_OPTION(supervise_options, grace, "grace", "SECONDS", 0, 1e6,
		"Time to end by itself for what hangs, or is left of a crash, before it is killed", .initial = "10"),
	NUMBER_OPTION(supervise_options, pause, "pause", "SECONDS", 0, 1e6,
		"Before it starts again; doubled, up to a minute, for each time that the run made no progress", .initial = "1"),
	TEXTS_OPTION(supervise_options, fewer_ranks, "fewer-ranks", "COMMAND",
		"The command in one word, for a shell, that goes on when the one before failed twice in a row without a step, "
		"as when a machine does not come back; may be given several times"),
	FLAG_OPTION(supervise_options, json, "json",
		"Print the summary as one JSON object; the standard output of the command goes to standard error"),
};

const struct command supervise_command = {
	.name = "supervise", .usage = "-- COMMAND ...", .min_words = 1, .max_words = ANY_NUMBER,
	.help = "Run a command such as `mpirun -n 4 ling train CONFIG`, and start it again, from the newest checkpoint, "
		"when it crashes or hangs. Exit status 0, 2 and 3 of the command end it; after 4 it goes back to the "
		"checkpoint before. SIGTERM, SIGINT, SIGHUP and SIGUSR1 let the run save and stop, with exit status 3.",
	.run = run_supervise, COMMAND_OPTIONS(supervise_options, options), .handles_signals = true,
	.prints_progress = true,
};
