/*
 * commands/watched.c - a run that is watched while it trains: what its files say, and what they say together.
 */
#define _GNU_SOURCE
#include "commands/watched.h"

#include "commands/result.h"
#include "files/heartbeat.h"
#include "files/trace.h"

#include <dirent.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

/* ============================================================================================================
 * What the files say
 * ========================================================================================================== */

const char *const run_state_names[NUM_RUN_STATES] = {"no such directory yet", "no run", "nothing here yet",
	"no heartbeat", "starting", "training", "validating", "saving", "died", "ended", "done", "stopped and saved",
	"failed", "must go back"};

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

static void look_at_heartbeat(struct watched *w, double now)
{
	struct heartbeat h;
	const int rc = heartbeat_read(&h, w->dir);
	w->gone = 0;
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
		hang_watch_age(&w->hang, now, unix_time());
	for (int i = 0; i < w->hang.now.ranks; i++) {
		const enum hang_process process = hang_process(&w->hang.now.rank[i]);
		w->gone += process == PROCESS_ENDED || process == PROCESS_GONE;
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
static enum run_state end_state(const struct watched *w)
{
	static const char *const why[] = {"done", "signal", "failed", "go back"}; /* from RUN_IS_DONE on */
	const char *reason = json_string_value(json_object_get(w->stop, "why"));
	for (int i = 0; reason && i < 4; i++)
		if (!strcmp(reason, why[i]))
			return RUN_IS_DONE + i;
	return RUN_ENDED;
}

/* Whether a directory has files, but for hidden ones, such as the lock of a run that is about to begin. */
static bool has_files(const char *dir)
{
	DIR *d = opendir(dir);
	const struct dirent *entry = NULL;
	while (d && (entry = readdir(d)) && *entry->d_name == '.')
		;
	if (d)
		closedir(d);
	return entry;
}

static enum run_state find_state(const struct watched *w)
{
	static const enum run_state of_phase[NUM_HEARTBEAT_PHASES] = {RUN_STARTING, RUN_STARTING, RUN_TRAINING,
		RUN_TRAINING, RUN_VALIDATING, RUN_SAVING, RUN_SAVING, RUN_ENDED};
	const struct heartbeat *h = &w->hang.now;
	if (path_exists(w->dir) == 0)
		return RUN_MISSING;
	if (h->ranks == 0)
		return w->stop ? end_state(w) : w->metrics.there || w->events.there ? RUN_UNKNOWN
				: has_files(w->dir) ? RUN_NONE : RUN_EMPTY;
	if (h->rank[0].phase == HEARTBEAT_END)
		return end_state(w);
	return w->gone == h->ranks ? RUN_DIED : of_phase[h->rank[0].phase];
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

void watched_look(struct watched *w)
{
	const double now = clock_seconds();
	*w->problem = 0;
	struct follow *files[2] = {&w->metrics, &w->events};
	for (int i = 0; i < 2; i++)
		if (follow_look(files[i]) < 0)
			snprintf(w->problem, sizeof w->problem, "%s", error_text);
	look_at_heartbeat(w, now);
	look_at_traces(w, now);
	const enum run_state state = find_state(w);
	if (state != w->state || !w->state_since)
		w->state_since = now;
	w->state = state;
}

bool watched_is_over(const struct watched *w)
{
	if (w->restart && unix_time() - number(w->restart, "time") < restart_within)
		return false;
	if (w->state == RUN_IS_DONE || w->state == RUN_WAS_STOPPED || w->state == RUN_NONE)
		return true;
	return w->state >= RUN_DIED && clock_seconds() - w->state_since >= ended_for;
}

int watched_init(struct watched *w, const char *dir)
{
	*w = (struct watched){.dir = dir, .recent = json_array(), .saved = -1,
		.metrics = {.add = add_point, .cut = cut_points}, .events = {.add = add_event, .cut = cut_events}};
	w->metrics.context = w->events.context = w;
	return check_directory(dir) < 0 || path_join(w->metrics.path, dir, "metrics.jsonl") < 0 ||
			path_join(w->events.path, dir, "events.jsonl") < 0 ? -1 : 0;
}

void watched_free(struct watched *w)
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

/* Where the ranks of a run that died were, in words, and which of them went first: one that computed, or whose last
 * sign is older than those of the others. mpirun ends the others within some 2 s. What the other replicas of local SGD
 * computed meanwhile says nothing. The caller frees it. */
static char *describe_death(const struct heartbeat *h)
{
	struct hang_place *places = allocate(h->ranks * sizeof *places);
	int *numbers = allocate(h->ranks * sizeof *numbers), count = 0, first = 0; /* first: the replica that went first */
	double last = -INFINITY, progress = -INFINITY, oldest = INFINITY; /* of all ranks, which are of this machine */
	struct text out = {0};
	json_t *members;
	for (int i = 0; i < h->ranks; i++) {
		const struct heartbeat_rank *r = &h->rank[i];
		const double sign = r->changed + (r->waits ? r->waited : 0);
		last = fmax(last, sign);
		first = sign < oldest ? r->replica : first;
		oldest = fmin(oldest, sign);
		progress = fmax(progress, r->changed);
	}
	for (int i = 0; i < h->ranks; i++) {
		const struct heartbeat_rank *r = &h->rank[i];
		if (r->replica != first && !r->waits)
			continue;
		numbers[count] = i;
		places[count++] = (struct hang_place){r, last - r->changed,
				!r->waits || last - r->changed - r->waited > fmax((last - progress) / 2, 0.5), false};
	}
	char *words = hang_words(places, numbers, count, &members);
	text_append_string(&out, "the processes of all ranks are gone, without an end; at their last sign ");
	text_append_string(&out, words);
	json_decref(members);
	free(words);
	free(places);
	free(numbers);
	return out.data;
}

/* Who is in the way when nothing has moved for long, or that nobody is there; else NULL. The caller frees it. Long is
 * three times the last step, and 2 seconds; where no step is computed, 10. */
static char *describe_waiting(const struct watched *w)
{
	const struct heartbeat *h = &w->hang.now;
	const double now = clock_seconds(), since = hang_since(&w->hang, now);
	double longest = 0;
	bool in_step = true;
	if (w->state == RUN_DIED)
		return h->ranks > 1 ? describe_death(h) : copy_string("the process is gone, without an end");
	for (int i = 0; i < h->ranks; i++) {
		longest = fmax(longest, h->rank[i].step_seconds);
		in_step &= h->rank[i].phase == HEARTBEAT_STEP;
	}
	if (w->state < RUN_STARTING || w->state > RUN_DIED || since < (in_step && longest ? fmax(3 * longest, 2) : 10))
		return NULL;
	json_t *members;
	char words[64], *who = hang_describe(&w->hang, now, &members);
	struct text out = {0};
	snprintf(words, sizeof words, "no progress for %.0f s: ", since);
	text_append_string(&out, words);
	text_append_string(&out, who);
	json_decref(members);
	free(who);
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

json_t *watched_report(const struct watched *w)
{
	const size_t n = w->metrics.count;
	static const struct point none = {.loss = NAN, .valid_loss = NAN, .balance_loss = NAN, .lr = NAN, .grad_norm = NAN,
		.tokens_per_second = NAN, .expert_load = NAN};
	const struct point *last = n ? &w->points[n - 1] : &none;
	json_t *r = json_pack("{s:o, s:s, s:b}", "run", json_cstring(w->dir), "state", run_state_names[w->state], "ended",
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

json_t *watched_state(const char *dir)
{
	struct watched w;
	json_t *r = NULL;
	if (watched_init(&w, dir) == 0 && follow_look(&w.events) >= 0) {
		w.metrics.there = true;
		look_at_heartbeat(&w, clock_seconds());
		w.state = find_state(&w);
		char *waiting = describe_waiting(&w);
		r = json_pack("{s:s, s:o}", "state", run_state_names[w.state], "waiting",
				waiting ? json_cstring(waiting) : json_null());
		free(waiting);
	}
	watched_free(&w);
	return r;
}
