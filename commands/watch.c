/*
 * commands/watch.c - `ling watch`: follows training runs in a terminal, by the files that they write.
 *
 *   What a run says    metrics.jsonl, events.jsonl, the heartbeat and the traces, and what they say together
 *   The report         of one run, as JSON, from which all output is made
 *   The picture        that report as lines of text
 *   The screen         the lines of all runs, drawn again and again
 */
#define _GNU_SOURCE
#include "commands/watch.h"

#include "commands/follow.h"
#include "commands/hang.h"
#include "commands/result.h"
#include "files/base.h"
#include "files/heartbeat.h"
#include "files/trace.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* ============================================================================================================
 * What a run says
 * ========================================================================================================== */

enum state {
	RUN_MISSING,                 /* there is no such directory */
	RUN_EMPTY,                   /* nothing of a run is in it */
	RUN_UNKNOWN,                 /* it has no heartbeat, and no event says that it ended */
	RUN_STARTING, RUN_TRAINING, RUN_VALIDATING, RUN_SAVING,
	RUN_DIED,                    /* its processes, all on this machine, are gone, and it did not end itself */
	RUN_ENDED,                   /* from here on it has ended: how is not known; */
	RUN_IS_DONE, RUN_WAS_STOPPED, RUN_HAS_FAILED, RUN_MUST_GO_BACK
};
static const char *const state_names[] = {"no such directory yet", "nothing here yet", "no heartbeat", "starting",
	"training", "validating", "saving", "died", "ended", "done", "stopped and saved", "failed", "must go back"};

enum { MOST_EVENTS = 8, RATE_STEPS = 100, CURVE_POINTS = 120 };
static const double trace_every = 5;   /* between two looks at the traces, which are some MB for each rank */
static const double ended_for = 5;    /* a run that ended badly is not over before that: it may be started again, */
static const double restart_within = 120; /* and so long when a supervisor has said that it does so */

struct point {                 /* a line of the metrics; NaN: not finite, or not in the line */
	int64_t step, tokens, batch;
	double loss, valid_loss, balance_loss, lr, grad_norm, seconds, tokens_per_second;
	double expert_load;          /* the largest of all layers */
	json_t *valid;               /* the validation losses by name; NULL: there are none */
};

/* Nanoseconds of each operation in the steps of a start, by the counters of one rank. */
struct account { double all[NUM_OPERATIONS], waited[NUM_OPERATIONS]; };

struct watched {
	const char *dir;
	struct follow metrics, events;
	struct point *points;        /* [metrics.count] */
	size_t points_room;
	/* of the events */
	json_t *start, *stop;        /* the newest start or resume, and the stop behind it; NULL: none */
	json_t *restart;             /* the newest of a supervisor that will start the run again, behind both; or NULL */
	json_t *validation;          /* the newest that is no line of the metrics: before the first step */
	json_t *recent;              /* an array of the newest incidents, at most MOST_EVENTS */
	int64_t num_incidents, saved; /* of all that were read; the step of the newest checkpoint, -1: none */
	/* of the heartbeat */
	struct hang_history history;
	struct hang_watch hang;      /* without ranks: there is no heartbeat */
	int local, dead, suspended;  /* ranks on this machine; of them, those whose process is gone, or stopped */
	int first_dead, first_suspended;
	/* of the traces */
	uint64_t trace_id;
	double trace_looked;
	int trace_ranks;
	struct account *accounts;    /* [trace_ranks] at the last look */
	json_t *time;                /* what they said, see trace_report(); NULL: nothing */
	/* all together */
	enum state state;
	double state_since;          /* clock_seconds() */
	char problem[sizeof error_text];          /* what could not be read; "" */
	/* what was printed last, where lines are printed one after the other */
	int64_t said_step, said_incidents;
	enum state said_state;
	bool said_waiting, said;
	char said_problem[sizeof error_text];
};

static double number(const json_t *object, const char *key)
{
	const json_t *value = json_object_get(object, key);
	return json_is_number(value) ? json_number_value(value) : NAN;
}

static int64_t whole(const json_t *object, const char *key)
{
	return json_integer_value(json_object_get(object, key));
}

/* Puts a copy of an event, or NULL, in the place of another one. */
static void keep(json_t **place, const json_t *event)
{
	json_decref(*place);
	*place = json_deep_copy(event);
}

static int add_point(void *context, const json_t *line)
{
	struct watched *w = context;
	char where[PATH_LEN + 32];
	struct point p = {.loss = number(line, "loss"), .valid_loss = number(line, "valid_loss"),
		.balance_loss = number(line, "balance_loss"), .lr = number(line, "lr"),
		.grad_norm = number(line, "grad_norm"), .seconds = number(line, "seconds"),
		.tokens_per_second = number(line, "tokens_per_second"), .expert_load = NAN,
		.valid = json_deep_copy(json_object_get(line, "valid"))};
	size_t i;
	const json_t *load;
	snprintf(where, sizeof where, "%s:%zu", w->metrics.path, w->metrics.count + 1);
	if (field_int(line, where, "step", 0, INT64_MAX, &p.step) < 0 ||
			field_int(line, where, "tokens", 0, INT64_MAX, &p.tokens) < 0 ||
			field_int(line, where, "batch", 0, INT32_MAX, &p.batch) < 0) {
		json_decref(p.valid);
		return -1;
	}
	json_array_foreach(json_object_get(line, "expert_load"), i, load)
		if (json_is_number(load))
			p.expert_load = fmax(p.expert_load, json_number_value(load));
	w->points = grow(w->points, w->metrics.count, &w->points_room, 1, sizeof *w->points);
	w->points[w->metrics.count] = p;
	return 0;
}

/* Lines from `count` on are gone. They are released here, up to those that were read before. */
static void cut_points(void *context, size_t count, size_t before)
{
	struct watched *w = context;
	for (size_t i = count; i < before; i++)
		json_decref(w->points[i].valid);
}

static void forget_events(struct watched *w)
{
	keep(&w->start, NULL), keep(&w->stop, NULL), keep(&w->restart, NULL), keep(&w->validation, NULL);
	json_array_clear(w->recent);
	w->num_incidents = 0;
	w->saved = -1;
}

/* The file is only ever appended to. If it was changed nevertheless, all of it is read again. */
static void cut_events(void *context, size_t count, size_t before)
{
	struct watched *w = context;
	(void)count, (void)before;
	forget_events(w);
	w->events.count = 0;
}

static bool is_one_of(const char *word, const char *const *words)
{
	while (*words && strcmp(word, *words))
		words++;
	return *words;
}

static int add_event(void *context, const json_t *event)
{
	static const char *const starts[] = {"start", "resume", NULL}, *const again[] = {"crash", "hang", "restart", NULL},
			*const over[] = {"giving_up", "end", NULL}, *const ordinary[] = {"start", "save", "stop", "end",
			"validation", NULL}, *const long_members[] = {"samples", "windows", "waiting", "ranks", NULL};
	struct watched *w = context;
	char where[PATH_LEN + 32];
	int64_t step;
	snprintf(where, sizeof where, "%s:%zu", w->events.path, w->events.count + 1);
	const char *kind = field_text(event, where, "kind");
	if (!kind || field_int(event, where, "step", 0, INT64_MAX, &step) < 0)
		return -1;
	if (is_one_of(kind, starts))
		keep(&w->start, event), keep(&w->stop, NULL), keep(&w->restart, NULL);
	else if (!strcmp(kind, "stop"))
		keep(&w->stop, event);
	else if (is_one_of(kind, again))
		keep(&w->restart, event);
	else if (is_one_of(kind, over))
		keep(&w->restart, NULL);
	else if (!strcmp(kind, "validation"))
		keep(&w->validation, event);
	else if (!strcmp(kind, "save"))
		w->saved = step;
	if (is_one_of(kind, ordinary))
		return 0;
	json_t *incident = json_deep_copy(event);
	for (size_t i = 0; long_members[i]; i++)
		json_object_del(incident, long_members[i]);
	json_array_append_new(w->recent, incident);
	if (json_array_size(w->recent) > MOST_EVENTS)
		json_array_remove(w->recent, 0);
	w->num_incidents++;
	return 0;
}

static double unix_time(void)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return now.tv_sec + 1e-9 * now.tv_nsec;
}

/* After the first look at a heartbeat: how long its ranks have been where they are, by their own clocks. */
static void age_heartbeat(struct hang_watch *h, double now)
{
	double least = INFINITY; /* since any of them changed */
	for (int i = 0; i < h->now.ranks; i++) {
		const struct heartbeat_rank *r = &h->now.rank[i];
		const double age = r->phase ? fmax(0, unix_time() - r->changed) : 0;
		h->rank[i] = (struct rank_watch){.phase_begun = now - age, .changed = now - age,
			.sign = now - fmax(0, age - (r->waits ? r->waited : 0))};
		least = fmin(least, age);
	}
	h->progress = now - least;
}

static void look_at_heartbeat(struct watched *w, double now)
{
	struct heartbeat h;
	char host[64] = "";
	const int rc = heartbeat_read(&h, w->dir);
	w->local = w->dead = w->suspended = 0;
	if (rc <= 0) {
		if (rc < 0)
			snprintf(w->problem, sizeof w->problem, "%s", error_text);
		hang_watch_end(&w->hang);
		return;
	}
	const bool first = h.id != w->hang.now.id || h.ranks != w->hang.now.ranks;
	if (first) {
		hang_watch_end(&w->hang);
		hang_watch_begin(&w->hang, &w->history, now);
	}
	hang_watch_take(&w->hang, &h, now);
	if (first)
		age_heartbeat(&w->hang, now);
	gethostname(host, sizeof host - 1);
	for (int i = w->hang.now.ranks - 1; i >= 0; i--) {
		const struct heartbeat_rank *r = &w->hang.now.rank[i];
		struct process p;
		if (strcmp(host, r->host))
			continue;
		w->local++;
		const bool there = process_look(&p, r->pid) && p.started == r->pid_started && p.state != 'Z';
		if (!there)
			w->dead++, w->first_dead = i;
		else if (p.state == 'T' || p.state == 't')
			w->suspended++, w->first_suspended = i;
	}
}

/* What the counters say of the steps since the last look; of the first look, since the start of the run: shares of the
 * time of all ranks, by group of operations, and waiting apart; and the rank that worked longest. */
static json_t *trace_report(const struct account *now, const struct account *before, int ranks)
{
	double all = 0, waited = 0, own_sum = 0, longest = 0, of_group[NUM_OPERATIONS] = {0};
	int slowest = 0;
	for (int rank = 0; rank < ranks; rank++) {
		double own = 0;
		for (int op = 0; op < NUM_OPERATIONS; op++) {
			const double time = now[rank].all[op] - before[rank].all[op],
					wait = now[rank].waited[op] - before[rank].waited[op];
			int group = 0; /* the first operation of the same group stands for it */
			while (strcmp(operations[group].group, operations[op].group))
				group++;
			of_group[group] += time - wait;
			all += time, waited += wait, own += time - wait;
		}
		own_sum += own;
		if (own > longest)
			longest = own, slowest = rank;
	}
	if (all <= 0)
		return NULL;
	json_t *groups = json_object();
	for (int op = 0; op < NUM_OPERATIONS; op++)
		if (of_group[op] > 0 && *operations[op].group)
			json_object_set_new(groups, operations[op].group, json_real(of_group[op] / all));
	return json_pack("{s:o, s:f, s:i, s:f}", "groups", groups, "waiting", waited / all, "slowest_rank", slowest,
			"slowest_over_mean", longest * ranks / own_sum);
}

/* Looks at the traces now and then. A rank whose trace cannot be read says nothing, and then no rank does. */
static void look_at_traces(struct watched *w, double now)
{
	const int ranks = w->hang.now.ranks;
	if (ranks == 0 || (w->trace_looked && now - w->trace_looked < trace_every))
		return;
	w->trace_looked = now;
	struct account *accounts = allocate(ranks * sizeof *accounts);
	uint64_t id = 0;
	int read = 0;
	for (int rank = 0; rank < ranks; rank++, read++) {
		char name[64], path[PATH_LEN];
		struct trace t;
		snprintf(name, sizeof name, "trace/rank-%d.trace", rank);
		if (path_join(path, w->dir, name) < 0 || path_exists(path) <= 0 || trace_read(&t, path) < 0)
			break;
		const bool same = rank == 0 || t.id == id;
		id = t.id;
		for (int op = 0; op < NUM_OPERATIONS; op++)
			for (int pass = 0; pass < NUM_PASSES; pass++) {
				accounts[rank].all[op] += t.operation[PART_STEP][op][pass].nanoseconds;
				accounts[rank].waited[op] += t.operation[PART_STEP][op][pass].waited;
			}
		trace_free(&t);
		if (!same)
			break;
	}
	if (read < ranks) {
		free(accounts);
		return;
	}
	if (id != w->trace_id || ranks != w->trace_ranks) {
		free(w->accounts);
		w->accounts = allocate(ranks * sizeof *accounts);
		w->trace_id = id;
		w->trace_ranks = ranks;
	}
	json_t *report = trace_report(accounts, w->accounts, ranks);
	if (report) { /* else no step was computed since then, and what was said still holds */
		json_decref(w->time);
		w->time = report;
	}
	free(w->accounts);
	w->accounts = accounts;
}

/* How a run ended that its newest event says has ended. */
static enum state end_state(const struct watched *w)
{
	static const char *const why[] = {"done", "signal", "failed", "go back"}; /* from RUN_IS_DONE on */
	const char *reason = json_string_value(json_object_get(w->stop, "why"));
	for (int i = 0; reason && i < 4; i++)
		if (!strcmp(reason, why[i]))
			return RUN_IS_DONE + i;
	return RUN_ENDED;
}

static enum state find_state(const struct watched *w)
{
	static const enum state of_phase[NUM_HEARTBEAT_PHASES] = {RUN_STARTING, RUN_STARTING, RUN_TRAINING, RUN_TRAINING,
		RUN_VALIDATING, RUN_SAVING, RUN_SAVING, RUN_ENDED};
	const struct heartbeat *h = &w->hang.now;
	if (path_exists(w->dir) == 0)
		return RUN_MISSING;
	if (h->ranks == 0)
		return w->stop ? end_state(w) : w->metrics.there || w->events.there ? RUN_UNKNOWN : RUN_EMPTY;
	if (h->rank[0].phase == HEARTBEAT_END)
		return end_state(w);
	return w->dead == h->ranks ? RUN_DIED : of_phase[h->rank[0].phase];
}

/* Fails for what can never become the directory of a run. */
static int check_directory(const char *dir)
{
	char path[PATH_LEN], parent[PATH_LEN];
	struct stat st;
	if (is_home_path(dir) && path_exists(dir) == 0)
		return fail("%s: there is no such directory; " HOME_PATH_HINT, dir);
	if (stat(dir, &st) == 0 && !S_ISDIR(st.st_mode))
		return fail("%s is no directory; expected that of a run (its train.output_dir)", dir);
	if (path_join(path, dir, "trainer.json") < 0)
		return -1;
	if (path_exists(path) <= 0)
		return 0;
	parent_of(parent, dir);
	return fail("%s is a checkpoint; expected the directory of its run: give %s", dir, parent);
}

static void look(struct watched *w)
{
	const double now = clock_seconds();
	*w->problem = 0;
	struct follow *files[2] = {&w->metrics, &w->events};
	for (int i = 0; i < 2; i++)
		if (follow_look(files[i]) < 0)
			snprintf(w->problem, sizeof w->problem, "%s", error_text);
	look_at_heartbeat(w, now);
	look_at_traces(w, now);
	const enum state state = find_state(w);
	if (state != w->state || !w->state_since)
		w->state_since = now;
	w->state = state;
}

/* Whether nothing more will come. */
static bool is_over(const struct watched *w)
{
	if (w->restart && unix_time() - number(w->restart, "time") < restart_within)
		return false;
	if (w->state == RUN_IS_DONE || w->state == RUN_WAS_STOPPED)
		return true;
	return w->state >= RUN_DIED && clock_seconds() - w->state_since >= ended_for;
}

static int watched_init(struct watched *w, const char *dir)
{
	*w = (struct watched){.dir = dir, .recent = json_array(), .saved = -1,
		.metrics = {.add = add_point, .cut = cut_points}, .events = {.add = add_event, .cut = cut_events}};
	w->metrics.context = w->events.context = w;
	return check_directory(dir) < 0 || path_join(w->metrics.path, dir, "metrics.jsonl") < 0 ||
			path_join(w->events.path, dir, "events.jsonl") < 0 ? -1 : 0;
}

static void watched_free(struct watched *w)
{
	cut_points(w, 0, w->metrics.count);
	forget_events(w);
	json_decref(w->recent);
	json_decref(w->time);
	follow_free(&w->metrics), follow_free(&w->events);
	hang_watch_end(&w->hang);
	free(w->points);
	free(w->accounts);
}

/* ============================================================================================================
 * The report
 * ========================================================================================================== */

/* Who is in the way when nothing has moved for long, else NULL: the caller frees it. Long is three times the last step,
 * and 2 seconds; where no step is computed, 10. */
static char *describe_waiting(const struct watched *w)
{
	const struct heartbeat *h = &w->hang.now;
	const double now = clock_seconds(), since = now - w->hang.progress;
	double longest = 0;
	bool in_step = true;
	for (int i = 0; i < h->ranks; i++) {
		longest = fmax(longest, h->rank[i].step_seconds);
		in_step &= h->rank[i].phase == HEARTBEAT_STEP;
	}
	if (w->state < RUN_STARTING || w->state > RUN_DIED || since < (in_step && longest ? fmax(3 * longest, 2) : 10))
		return NULL;
	struct text out = {0};
	char words[128];
	if (w->state == RUN_DIED) {
		snprintf(words, sizeof words, "the process%s gone, without an end", h->ranks > 1 ? "es of all ranks are" :
				" is");
		text_append_string(&out, words);
	} else {
		json_t *members;
		char *who = hang_describe(&w->hang, now, &members);
		snprintf(words, sizeof words, "no progress for %.0f s: ", since);
		text_append_string(&out, words);
		text_append_string(&out, who);
		json_decref(members);
		free(who);
		if (w->dead)
			snprintf(words, sizeof words, "; the process of rank %d is gone", w->first_dead);
		else if (w->suspended)
			snprintf(words, sizeof words, "; the process of rank %d is stopped (kill -CONT %d)", w->first_suspended,
					h->rank[w->first_suspended].pid);
		if (w->dead || w->suspended)
			text_append_string(&out, words);
	}
	return out.data;
}

/* Seconds since a rank has last done anything that can be seen. */
static double seconds_since_sign(const struct watched *w)
{
	double last = 0;
	for (int i = 0; i < w->hang.now.ranks; i++)
		last = fmax(last, w->hang.rank[i].sign);
	return clock_seconds() - last;
}

/* Means of the loss over at most CURVE_POINTS parts of the run, from its begin; null: none was finite. */
static json_t *loss_curve(const struct watched *w)
{
	const size_t n = w->metrics.count, parts = n < CURVE_POINTS ? n : CURVE_POINTS;
	json_t *curve = json_array();
	for (size_t i = 0; i < parts; i++) {
		double sum = 0, finite = 0;
		for (size_t j = n * i / parts; j < n * (i + 1) / parts; j++)
			if (isfinite(w->points[j].loss))
				sum += w->points[j].loss, finite++;
		json_array_append_new(curve, result_number(sum / finite));
	}
	return curve;
}

/* The seconds that are left by the rate of the last steps, without validations and saves; NaN: that is not known. */
static double seconds_left(const struct watched *w)
{
	const size_t n = w->metrics.count;
	double seconds = 0;
	size_t i = n;
	while (i > 1 && n - i < RATE_STEPS && isfinite(w->points[i - 1].seconds))
		seconds += w->points[--i].seconds;
	if (i == n || !w->start || w->state >= RUN_DIED)
		return NAN;
	const int64_t tokens = w->points[n - 1].tokens, total = whole(w->start, "total_tokens");
	return total ? (double)(total - tokens) * seconds / (tokens - w->points[i - 1].tokens) : NAN;
}

/* The state of a run. Numbers that are not known are null. */
static json_t *run_report(const struct watched *w)
{
	const size_t n = w->metrics.count;
	static const struct point none = {.loss = NAN, .valid_loss = NAN, .balance_loss = NAN, .lr = NAN, .grad_norm = NAN,
		.tokens_per_second = NAN, .expert_load = NAN};
	const struct point *last = n ? &w->points[n - 1] : &none;
	json_t *r = json_pack("{s:o, s:s, s:b}", "run", json_cstring(w->dir), "state", state_names[w->state], "ended",
			w->state >= RUN_DIED);
	json_object_set_new(r, "problem", *w->problem ? json_cstring(w->problem) : json_null());
	char *waiting = describe_waiting(w);
	json_object_set_new(r, "waiting", waiting ? json_cstring(waiting) : json_null());
	free(waiting);
	json_object_set_new(r, "step", json_integer(last->step));
	json_object_set_new(r, "tokens", json_integer(last->tokens));
	static const char *const of_start[] = {"total_steps", "total_tokens", "ranks", "threads"};
	for (size_t i = 0; i < sizeof of_start / sizeof *of_start; i++) {
		const json_t *value = json_object_get(w->start, of_start[i]);
		json_object_set_new(r, of_start[i], json_is_integer(value) ? json_deep_copy(value) : json_null());
	}
	const struct { const char *key; double value; } numbers[] = {
		{"loss", last->loss}, {"lr", last->lr}, {"grad_norm", last->grad_norm}, {"balance_loss", last->balance_loss},
		{"expert_load", last->expert_load}, {"tokens_per_second", last->tokens_per_second},
		{"peak_share", last->tokens_per_second * number(w->start, "flops_per_token") /
				number(w->start, "peak_flops")},
		{"seconds_left", seconds_left(w)},
		{"seconds_since_sign", w->hang.now.ranks ? seconds_since_sign(w) : NAN},
	};
	for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
		json_object_set_new(r, numbers[i].key, result_number(numbers[i].value));
	json_object_set_new(r, "batch", json_integer(last->batch));
	json_object_set_new(r, "saved_step", w->saved < 0 ? json_null() : json_integer(w->saved));
	json_object_set_new(r, "loss_curve", loss_curve(w));
	size_t i = n;
	while (i && isnan(w->points[i - 1].valid_loss))
		i--;
	const struct point *v = i ? &w->points[i - 1] : NULL;
	const json_t *sets = v ? v->valid : json_object_get(w->validation, "valid");
	json_object_set_new(r, "valid_loss", result_number(v ? v->valid_loss : number(w->validation, "valid_loss")));
	json_object_set_new(r, "valid_step", json_integer(v ? v->step : 0));
	json_object_set_new(r, "valid", sets ? json_deep_copy(sets) : json_null());
	json_object_set_new(r, "time", w->time ? json_incref(w->time) : json_null());
	json_object_set_new(r, "incidents", json_deep_copy(w->recent));
	return r;
}

/* ============================================================================================================
 * The picture
 * ========================================================================================================== */

static void append(struct text *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(struct text *out, const char *format, ...)
{
	char part[2048];
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(part, sizeof part, format, arguments);
	va_end(arguments);
	text_append_string(out, part);
}

/* Whether the terminal shows UTF-8, as far as the environment says. */
static bool shows_utf8(void)
{
	static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
	for (int i = 0; i < 3; i++) {
		const char *value = getenv(names[i]);
		if (value && *value)
			return strcasestr(value, "utf-8") || strcasestr(value, "utf8");
	}
	return false;
}

/* A curve as one line of at most `columns` signs, between its lowest and its highest value. What is not finite is a
 * question mark. */
static void append_curve(struct text *out, const json_t *curve, int columns)
{
	static const char *const bars[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"},
		*const plain[] = {"_", ".", "-", "~", "=", "+", "*", "#"};
	const char *const *signs = shows_utf8() ? bars : plain;
	const int n = (int)json_array_size(curve), parts = n < columns ? n : columns;
	double low = INFINITY, high = -INFINITY, *values = allocate(parts * sizeof *values);
	for (int i = 0; i < parts; i++) {
		double sum = 0, finite = 0;
		for (int j = n * i / parts; j < n * (i + 1) / parts; j++)
			if (json_is_number(json_array_get(curve, j)))
				sum += json_number_value(json_array_get(curve, j)), finite++;
		values[i] = sum / finite;
		low = fmin(low, values[i]);
		high = fmax(high, values[i]);
	}
	for (int i = 0; i < parts; i++)
		append(out, "%s", isnan(values[i]) ? "?" : signs[high > low ? (int)(7.99 * (values[i] - low) / (high - low))
				: 0]);
	free(values);
}

/* Appends a number of a report, unless it is null. */
#define APPEND_NUMBER(out, r, key, format, factor) \
	do { \
		const double appended = (factor) * result_double(r, key); \
		if (isfinite(appended)) \
			append(out, format, appended); \
	} while (0)

/* An incident in a few words: "step 120: skip, loss 9.1234". */
static void append_incident(struct text *out, const json_t *event)
{
	static const char *const texts[][2] = {{"text", ""}, {"reason", ""}, {"why", ""}, {"fault", ""}, {"host", "on "}},
		*const numbers[][2] = {{"rank", "rank "}, {"from_step", "from step "}, {"from", "from step "},
			{"loss", "loss "}, {"grad_norm", "grad "}, {"ratio", "ratio "}};
	append(out, "step %lld: ", (long long)whole(event, "step"));
	for (const char *c = result_text(event, "kind"); *c; c++)
		text_append(out, *c == '_' ? " " : c, 1);
	for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
		if (json_is_number(json_object_get(event, numbers[i][0])))
			append(out, ", %s%.5g", numbers[i][1], number(event, numbers[i][0]));
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
		if (json_is_string(json_object_get(event, texts[i][0])))
			append(out, ", %s%s", texts[i][1], result_text(event, texts[i][0]));
}

/* "training  step 312/450 69%  0:12 left", and the like. */
static void append_progress(struct text *out, const json_t *r)
{
	const int64_t step = result_integer(r, "step"), steps = whole(r, "total_steps");
	char left[32];
	text_append_string(out, result_text(r, "state"));
	if (step || steps)
		append(out, "  step %lld", (long long)step);
	if (steps)
		append(out, "/%lld %.0f%%", (long long)steps, 100.0 * whole(r, "tokens") / whole(r, "total_tokens"));
	if (isfinite(result_double(r, "seconds_left")))
		append(out, "  %s left", format_duration(left, result_double(r, "seconds_left")));
}

/* "loss 3.1234", and the like. */
static void append_rates(struct text *out, const json_t *r)
{
	APPEND_NUMBER(out, r, "lr", "  lr %.2e", 1);
	APPEND_NUMBER(out, r, "grad_norm", "  grad %.3f", 1);
	if (result_integer(r, "batch"))
		append(out, "  batch %lld", (long long)result_integer(r, "batch"));
	APPEND_NUMBER(out, r, "tokens_per_second", "  %.0f tokens/s", 1);
	APPEND_NUMBER(out, r, "peak_share", "  %.0f%% of peak", 100);
}

static void append_validation(struct text *out, const json_t *r)
{
	const char *name;
	json_t *value;
	bool first = true;
	if (!isfinite(result_double(r, "valid_loss")))
		return;
	append(out, "  valid %.4f at step %lld", result_double(r, "valid_loss"), (long long)result_integer(r,
			"valid_step"));
	json_object_foreach(json_object_get(r, "valid"), name, value) {
		append(out, "%s%.40s %.4f", first ? " (" : ", ", name, json_number_value(value));
		first = false;
	}
	append(out, first ? "" : ")");
}

/* Shares of the time of all ranks, the largest first, as many as there is room for. */
static void append_time(struct text *out, const json_t *time, int columns)
{
	struct share { const char *name; double value; } shares[NUM_OPERATIONS + 1];
	int n = 0;
	const char *name;
	json_t *value;
	json_object_foreach(json_object_get(time, "groups"), name, value)
		if (n < NUM_OPERATIONS)
			shares[n++] = (struct share){name, json_number_value(value)};
	shares[n++] = (struct share){"waiting", result_double(time, "waiting")};
	append(out, "  time");
	columns -= (int)strlen("  time");
	for (int i = 0; i < n; i++) {
		char part[64];
		int largest = i;
		for (int j = i + 1; j < n; j++)
			largest = shares[j].value > shares[largest].value ? j : largest;
		const struct share next = shares[largest];
		shares[largest] = shares[i];
		shares[i] = next;
		columns -= snprintf(part, sizeof part, "  %s %.0f%%", next.name, 100 * next.value);
		if (next.value < 0.005 || columns < 0)
			break;
		append(out, "%s", part);
	}
	append(out, "\n");
}

/* The bytes of the first `columns` characters of n bytes. */
static size_t columns_of(const char *line, size_t n, int columns)
{
	size_t i = 0;
	for (; i < n; i++)
		if ((line[i] & 0xc0) != 0x80 && columns-- == 0)
			break;
	return i;
}

/* Appends a text as lines of at most `columns` characters, broken at spaces. */
static void append_folded(struct text *out, const char *words, int columns)
{
	const int room = columns > 24 ? columns - 4 : 20;
	for (const char *begin = "  ! "; *words; begin = "    ") {
		size_t n = columns_of(words, strlen(words), room), space = n;
		while (words[n] && space && words[space] != ' ')
			space--;
		n = space ? space : n;
		append(out, "%s", begin);
		text_append(out, words, n);
		append(out, "\n");
		words += n;
		words += strspn(words, " ");
	}
}

/* The lines of a run, each ended by a newline, the most important first. columns: of the screen. */
static void append_run(struct text *out, const json_t *r, int columns)
{
	const json_t *time = json_object_get(r, "time"), *incidents = json_object_get(r, "incidents");
	const int64_t ranks = whole(r, "ranks");
	append(out, "%s  ", result_text(r, "run"));
	append_progress(out, r);
	if (!json_is_true(json_object_get(r, "ended")))
		APPEND_NUMBER(out, r, "seconds_since_sign", "  last sign %.0f s ago", 1);
	append(out, "\n");
	for (int i = 0; i < 2; i++)
		if (json_is_string(json_object_get(r, i ? "waiting" : "problem")))
			append_folded(out, result_text(r, i ? "waiting" : "problem"), columns);
	if (result_integer(r, "step")) {
		struct text after = {0};
		append_validation(&after, r);
		append(out, "  loss");
		APPEND_NUMBER(out, r, "loss", " %.4f  ", 1);
		const int room = columns - 18 - (int)after.size;
		append_curve(out, json_object_get(r, "loss_curve"), room > 8 ? room : 8);
		append(out, "%s\n", after.data ? after.data : "");
		free(after.data);
		append_rates(out, r);
		append(out, "\n");
	}
	if (json_is_object(time))
		append_time(out, time, columns);
	if (ranks > 1) {
		const double over = json_is_object(time) ? result_double(time, "slowest_over_mean") - 1 : 0;
		append(out, "  %lld ranks", (long long)ranks);
		if (over >= 0.01)
			append(out, ", rank %lld is the slowest: it works %.0f%% longer than the mean",
					(long long)result_integer(time, "slowest_rank"), 100 * over);
		append(out, "\n");
	}
	if (result_integer(r, "step")) {
		APPEND_NUMBER(out, r, "balance_loss", "  balance %.3f", 1);
		APPEND_NUMBER(out, r, "expert_load", "  largest expert load %.2f", 1);
		APPEND_NUMBER(out, r, "saved_step", "  saved step %.0f", 1);
		append(out, "\n");
	}
	for (size_t i = json_array_size(incidents); i-- > 0;) { /* the latest first */
		append(out, "  ");
		append_incident(out, json_array_get(incidents, i));
		append(out, "\n");
	}
}

/* Appends the first `most` lines of a picture, cut to the width. Control characters, which a foreign name may hold,
 * become question marks. `end` ends each line. Returns the number of lines. */
static int append_lines(struct text *out, const char *picture, int columns, int most, const char *end)
{
	int count = 0;
	for (size_t n; *picture && count < most; picture += n + 1, count++) {
		n = strcspn(picture, "\n");
		const size_t shown = columns_of(picture, n, columns);
		for (size_t i = 0; i < shown; i++)
			text_append(out, (unsigned char)picture[i] < ' ' || picture[i] == 127 ? "?" : picture + i, 1);
		text_append_string(out, end);
	}
	return count;
}

/* ============================================================================================================
 * The screen
 * ========================================================================================================== */

struct watch_options { bool once, json, keep; double every; };

/* The alternate screen, where the shell's lines stay untouched; no cursor, no wrapped lines. And back. */
static const char enter_screen[] = "\033[?1049h\033[?25l\033[?7l\033[2J", leave_screen[] =
		"\033[?7h\033[?25h\033[?1049l";

static struct winsize screen_size(void)
{
	struct winsize size = {.ws_col = 80, .ws_row = 24};
	struct winsize found;
	if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &found) == 0 && found.ws_col && found.ws_row)
		size = found;
	return size;
}

/* Draws all runs over what is on the screen. Where there is no room for all lines, each run gets as many as the others;
 * and where there are more runs than lines, the last ones are left out. */
static void draw(const struct watched *runs, int n, double every)
{
	const struct winsize size = screen_size();
	const int columns = size.ws_col - 1; /* in the last column some terminals wrap, and clearing would reach back */
	int rows = size.ws_row, left = n;
	const time_t now = time(NULL);
	char clock[32];
	struct text out = {0}, head = {0};
	strftime(clock, sizeof clock, "%H:%M:%S", localtime(&now));
	text_append_string(&out, "\033[H");
	append(&head, "ling watch  %s  every %g s, Ctrl-C ends\n", clock, every);
	if (rows > 1)
		rows -= append_lines(&out, head.data, columns, 1, "\033[K\r\n");
	free(head.data);
	for (int i = 0; i < n && rows > 0; i++, left--) {
		struct text picture = {0};
		json_t *r = run_report(&runs[i]);
		append_run(&picture, r, columns);
		json_decref(r);
		rows -= append_lines(&out, picture.data, columns, rows / left > 1 ? rows / left : 1, "\033[K\r\n");
		free(picture.data);
	}
	if (rows == 0) /* the last line does not end: that would move all lines up */
		out.size -= strlen("\r\n"), out.data[out.size] = 0;
	text_append_string(&out, rows > 0 ? "\033[J\033[H" : "\033[H"); /* where what is typed does the least harm */
	fwrite(out.data, 1, out.size, stdout);
	fflush(stdout);
	free(out.data);
}

/* Prints a line for each thing that has changed since the last time. */
static void say_changes(struct watched *w)
{
	struct text out = {0};
	json_t *r = run_report(w);
	const json_t *incidents = json_object_get(r, "incidents");
	const int64_t fresh = w->num_incidents - w->said_incidents, kept = (int64_t)json_array_size(incidents);
	for (int64_t i = fresh > 0 ? kept - (fresh < kept ? fresh : kept) : kept; i < kept; i++) {
		append(&out, "%s: ", w->dir);
		append_incident(&out, json_array_get(incidents, i));
		append(&out, "\n");
	}
	const json_t *waiting = json_object_get(r, "waiting");
	if (!w->said || result_integer(r, "step") != w->said_step || w->state != w->said_state) {
		append(&out, "%s: ", w->dir);
		append_progress(&out, r);
		APPEND_NUMBER(&out, r, "loss", "  loss %.4f", 1);
		append_validation(&out, r);
		append_rates(&out, r);
		append(&out, "\n");
	}
	if (json_is_string(waiting) && !w->said_waiting)
		append(&out, "%s: %s\n", w->dir, json_string_value(waiting));
	if (*w->problem && strcmp(w->problem, w->said_problem))
		append(&out, "%s: %s\n", w->dir, w->problem);
	w->said = true;
	w->said_step = result_integer(r, "step");
	w->said_state = w->state;
	w->said_incidents = w->num_incidents;
	w->said_waiting = json_is_string(waiting);
	memcpy(w->said_problem, w->problem, sizeof w->problem);
	json_decref(r);
	struct text lines = {0};
	append_lines(&lines, out.data ? out.data : "", INT32_MAX, INT32_MAX, "\n");
	if (lines.data)
		fputs(lines.data, stdout);
	fflush(stdout);
	free(out.data);
	free(lines.data);
}

static void print_runs(const json_t *report)
{
	const int columns = isatty(STDOUT_FILENO) ? screen_size().ws_col : 100;
	size_t i;
	json_t *r;
	json_array_foreach(json_object_get(report, "runs"), i, r) {
		struct text picture = {0}, lines = {0};
		append_run(&picture, r, columns);
		append_lines(&lines, picture.data, INT32_MAX, INT32_MAX, "\n");
		printf("%s%s", i ? "\n" : "", lines.data);
		free(picture.data);
		free(lines.data);
	}
}

static void print_once(const struct watched *runs, int n, bool json)
{
	json_t *list = json_array();
	for (int i = 0; i < n; i++)
		json_array_append_new(list, run_report(&runs[i]));
	result_print(json_pack("{s:o}", "runs", list), json, print_runs);
}

/* Waits for a signal, at most until `time` of clock_seconds(). Returns it; 0: none came. */
static int wait_for_signal(const sigset_t *signals, double time)
{
	const double seconds = fmax(0, time - clock_seconds());
	const struct timespec most = {(time_t)seconds, (long)(fmod(seconds, 1) * 1e9)};
	const int signal = sigtimedwait(signals, NULL, &most);
	return signal > 0 ? signal : 0;
}

/* Follows the runs until all have ended, or a signal ends the program. Returns that signal, or 0. */
static int follow_runs(struct watched *runs, int n, const struct watch_options *o)
{
	const bool screen = is_terminal(stdout);
	sigset_t signals, before;
	sigemptyset(&signals);
	static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
	for (int i = 0; i < 3; i++)
		sigaddset(&signals, ends[i]);
	if (screen)
		sigaddset(&signals, SIGWINCH), sigaddset(&signals, SIGTSTP);
	sigprocmask(SIG_BLOCK, &signals, &before);
	if (screen)
		fputs(enter_screen, stdout);
	int signal = 0;
	for (double next = clock_seconds();;) {
		bool over = !o->keep;
		if (signal == 0)
			for (int i = 0; i < n; i++)
				look(&runs[i]);
		for (int i = 0; i < n; i++) {
			over &= is_over(&runs[i]);
			if (!screen)
				say_changes(&runs[i]);
		}
		if (screen)
			draw(runs, n, o->every);
		signal = 0;
		if (over || ferror(stdout))
			break;
		if (clock_seconds() >= next)
			next = clock_seconds() + o->every;
		signal = wait_for_signal(&signals, next);
		if (signal == SIGTSTP) {
			fputs(leave_screen, stdout);
			fflush(stdout);
			kill(getpid(), SIGSTOP);
			fputs(enter_screen, stdout);
		} else if (signal == SIGWINCH) {
			fputs("\033[2J", stdout);
		} else if (signal) {
			break;
		}
	}
	if (screen) {
		fputs(leave_screen, stdout);
		fflush(stdout);
		print_once(runs, n, false); /* so that it stays to be read */
	}
	sigprocmask(SIG_SETMASK, &before, NULL);
	return signal;
}

static int run_watch(const struct command_line *line)
{
	const struct watch_options *o = line->options;
	const int n = line->num_words;
	if (o->json && !o->once) {
		fail("--json prints the state once; give it with --once");
		return EXIT_WRONG_USE;
	}
	struct watched *runs = allocate(n * sizeof *runs);
	int rc = 0, made = 0;
	for (; made < n && rc == 0; made++)
		rc = watched_init(&runs[made], line->words[made]);
	int status = rc < 0 ? EXIT_WRONG_USE : EXIT_DONE;
	if (rc == 0 && o->once) {
		for (int i = 0; i < n; i++)
			look(&runs[i]);
		print_once(runs, n, o->json);
		for (int i = 0; i < n && status == EXIT_DONE; i++)
			if (*runs[i].problem || runs[i].state <= RUN_EMPTY) {
				if (*runs[i].problem)
					fail("%s", runs[i].problem);
				else
					fail("%s: %s", runs[i].dir, runs[i].state == RUN_MISSING ? "there is no such directory"
							: "there is no run in it: neither metrics.jsonl, events.jsonl nor a heartbeat");
				status = EXIT_WORK_FAILED;
			}
	} else if (rc == 0 && follow_runs(runs, n, o) == 0) {
		for (int i = 0; i < n && status == EXIT_DONE; i++)
			if (runs[i].state != RUN_IS_DONE) {
				fail("%s: %s", runs[i].dir, state_names[runs[i].state]);
				status = runs[i].state == RUN_WAS_STOPPED ? EXIT_STOPPED : EXIT_WORK_FAILED;
			}
	}
	for (int i = 0; i < made; i++)
		watched_free(&runs[i]);
	free(runs);
	return status;
}

static const struct command_option options[] = {
	FLAG_OPTION(watch_options, once, "once", "Print the state and end"),
	FLAG_OPTION(watch_options, json, "json", "With --once: print one JSON object"),
	FLAG_OPTION(watch_options, keep, "keep", "Go on when all runs have ended, as one may be started again"),
	NUMBER_OPTION(watch_options, every, "every", "SECONDS", 0.1, 3600, "Seconds between two looks", .initial = "1"),
};

const struct command watch_command = {
	.name = "watch", .usage = "RUN [RUN ...]", .min_words = 1, .max_words = ANY_NUMBER,
	.help = "Follow training runs in a terminal, also those of other people on a shared disk: losses, speed, what each "
		"rank waits for, incidents. It only reads.",
	.run = run_watch, COMMAND_OPTIONS(watch_options, options), .handles_signals = true,
};
