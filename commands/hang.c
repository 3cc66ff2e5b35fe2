/*
 * commands/hang.c - tells a run that hangs from one that is slow, by its heartbeat, and says who is in the way.
 */
#define _GNU_SOURCE
#include "commands/hang.h"

#include "files/base.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void hang_watch_begin(struct hang_watch *w, struct hang_history *history, double time)
{
	*w = (struct hang_watch){.history = history, .started = time, .progress = time};
}

void hang_watch_end(struct hang_watch *w)
{
	heartbeat_free(&w->now);
	free(w->rank);
	free(w->replica);
	w->rank = NULL;
	w->replica = NULL;
}

/* A rank has left a phase for the next one, after so many seconds as the reader saw, its last step having taken
 * step_seconds. Rank 0's count for all. */
static void learn(struct hang_watch *w, const struct heartbeat_rank *before, const struct heartbeat_rank *after,
		double seconds, double step_seconds)
{
	struct hang_history *h = w->history;
	if (before->phase == HEARTBEAT_STEP) {
		w->stepped = true;
		if (step_seconds > 0) /* the last of the steps since the last look */
			h->steps[h->num_steps++ % HANG_STEPS] = step_seconds;
	} else if (seconds > h->longest[before->phase])
		h->longest[before->phase] = seconds;
	w->stepped |= after->phase > HEARTBEAT_FIRST_STEP;
}

static bool same_phase(const struct heartbeat_rank *a, const struct heartbeat_rank *b)
{
	return a->step == b->step && a->phase == b->phase && a->phases == b->phases;
}

static bool same_place(const struct heartbeat_rank *a, const struct heartbeat_rank *b)
{
	return same_phase(a, b) && a->waits == b->waits && a->number == b->number && a->layer == b->layer &&
			a->changed == b->changed && !strcmp(a->operation, b->operation);
}

/* The seconds of the last step of rank 0 or, if one took longer, of another replica. */
static double last_step(const struct heartbeat *h)
{
	double seconds = h->rank[0].step_seconds;
	for (int i = 1; i < h->ranks; i++)
		if (h->rank[i].replica != h->rank[0].replica)
			seconds = fmax(seconds, h->rank[i].step_seconds);
	return seconds;
}

/* Whether a replica waits for others: all of its ranks wait, and some not only for each other. *sign: since when one of
 * them has given no sign of life; INFINITY: it has no ranks. */
static bool waits_for_others(const struct hang_watch *w, int replica, double *sign)
{
	bool all_wait = true, for_others = false;
	*sign = INFINITY;
	for (int i = 0; i < w->now.ranks; i++)
		if (w->now.rank[i].replica == replica) {
			all_wait &= w->now.rank[i].waits;
			for_others |= !w->now.rank[i].alone;
			*sign = fmin(*sign, w->rank[i].sign);
		}
	return all_wait && for_others;
}

/* A replica that waits for others makes progress as long as all of its ranks give a sign of life. One of which no rank
 * is known yet, since ranks say one after the other in which replica they are, makes progress too. */
static void count_waits_as_progress(struct hang_watch *w, double time)
{
	double sign;
	for (int r = 0; r < w->replicas; r++) {
		const bool waits = waits_for_others(w, r, &sign);
		if (isinf(sign))
			w->replica[r] = time;
		else if (w->replicas > 1 && waits)
			w->replica[r] = fmax(w->replica[r], sign);
	}
}

/* Counts the replicas of what was read, and makes a new watch of each when they are others than before. */
static void count_replicas_of(struct hang_watch *w, struct heartbeat *h, double time)
{
	const int before = w->replicas;
	w->replicas = 1;
	for (int i = 0; i < h->ranks; i++) {
		int *replica = &h->rank[i].replica;
		*replica = *replica < 0 || *replica >= h->ranks ? 0 : *replica; /* what is no heartbeat may have any number */
		w->replicas = *replica >= w->replicas ? *replica + 1 : w->replicas;
	}
	for (int r = 0; r < w->replicas && w->replicas != before; r++)
		w->replica[r] = time;
}

void hang_watch_take(struct hang_watch *w, struct heartbeat *read, double time)
{
	if (read->ranks != w->now.ranks || read->id != w->now.id) { /* the first look */
		hang_watch_end(w);
		w->rank = allocate(read->ranks * sizeof *w->rank);
		w->replica = allocate(read->ranks * sizeof *w->replica);
		w->replicas = 0;
		for (int i = 0; i < read->ranks; i++)
			w->rank[i] = (struct rank_watch){w->started, time, time};
		w->progress = time;
		if (read->rank[0].phase > HEARTBEAT_START)
			learn(w, &(struct heartbeat_rank){.phase = HEARTBEAT_START}, &read->rank[0], time - w->started, 0);
	}
	count_replicas_of(w, read, time);
	for (int i = 0; i < w->now.ranks; i++) {
		const struct heartbeat_rank *before = &w->now.rank[i], *after = &read->rank[i];
		struct rank_watch *r = &w->rank[i];
		if (!same_phase(before, after)) {
			if (i == 0 && before->phase)
				learn(w, before, after, time - r->phase_begun, last_step(read));
			r->phase_begun = w->progress = w->replica[after->replica] = time;
		}
		if (!same_place(before, after))
			r->changed = r->sign = time;
		if (before->waited != after->waited)
			r->sign = time;
	}
	heartbeat_free(&w->now);
	w->now = *read;
	*read = (struct heartbeat){0};
	count_waits_as_progress(w, time);
}

void hang_watch_age(struct hang_watch *w, double time, double unix_time)
{
	w->progress = -INFINITY; /* when any of them changed */
	for (int r = 0; r < w->replicas; r++)
		w->replica[r] = -INFINITY;
	for (int i = 0; i < w->now.ranks; i++) {
		const struct heartbeat_rank *r = &w->now.rank[i];
		const double age = r->phase ? fmax(0, unix_time - r->changed) : 0;
		w->rank[i] = (struct rank_watch){.phase_begun = time - age, .changed = time - age,
			.sign = time - fmax(0, age - (r->waits ? r->waited : 0))};
		w->progress = fmax(w->progress, time - age);
		w->replica[r->replica] = fmax(w->replica[r->replica], time - age);
	}
	count_waits_as_progress(w, time);
}

double hang_median_step(const struct hang_history *h)
{
	double sorted[HANG_STEPS];
	const int n = h->num_steps < HANG_STEPS ? (int)h->num_steps : HANG_STEPS;
	if (n == 0)
		return 0;
	memcpy(sorted, h->steps, n * sizeof *sorted);
	qsort(sorted, n, sizeof *sorted, compare_doubles);
	return (sorted[(n - 1) / 2] + sorted[n / 2]) / 2;
}

double hang_limit(const struct hang_history *h, const struct hang_limits *limits, enum heartbeat_phase phase)
{
	const double seen = phase == HEARTBEAT_STEP ? hang_median_step(h)
			: h->longest[phase == HEARTBEAT_NONE ? HEARTBEAT_START : phase == HEARTBEAT_END ? HEARTBEAT_WRITE : phase];
	/* A wait for files may have begun when they were almost written: a short one says nothing of the next. Ranks that
	 * are at their end wait for the last one to write. */
	if (phase == HEARTBEAT_WRITE || phase == HEARTBEAT_END)
		return fmax(limits->factor * seen, limits->unseen);
	return seen > 0 ? fmax(limits->factor * seen, limits->least) : limits->unseen;
}

double hang_since(const struct hang_watch *w, double time)
{
	double since = time - w->progress;
	for (int r = 0; r < w->replicas && w->replicas > 1; r++)
		since = fmax(since, time - w->replica[r]);
	return since;
}

double hang_detect(const struct hang_watch *w, const struct hang_limits *limits, double time, double *limit)
{
	*limit = w->now.ranks ? 0 : hang_limit(w->history, limits, HEARTBEAT_START);
	for (int i = 0; i < w->now.ranks; i++) /* one may save while the others are in the next step already */
		*limit = fmax(*limit, hang_limit(w->history, limits, w->now.rank[i].phase));
	if (time - w->progress > *limit)
		return time - w->progress;
	for (int r = 0; r < w->replicas && w->replicas > 1; r++) {
		double own = -1; /* the limit of its ranks; -1: it has none */
		for (int i = 0; i < w->now.ranks; i++)
			if (w->now.rank[i].replica == r)
				own = fmax(own, hang_limit(w->history, limits, w->now.rank[i].phase));
		if (own >= 0 && time - w->replica[r] > own) {
			*limit = own;
			return time - w->replica[r];
		}
	}
	return 0;
}

int64_t hang_steps_done(const struct hang_watch *w)
{
	int64_t done = -1;
	for (int i = 0; i < w->now.ranks; i++) {
		const struct heartbeat_rank *r = &w->now.rank[i];
		const int64_t mine = r->phase == HEARTBEAT_FIRST_STEP || r->phase == HEARTBEAT_STEP ? r->step - 1
			: r->phase > HEARTBEAT_STEP ? r->step : -1;
		done = mine > done ? mine : done;
	}
	return done;
}

/* ============================================================================================================
 * In words
 * ========================================================================================================== */

enum { MOST_NAMED = 8 };         /* ranks, or places, that the words name; the event has all */

const char *const hang_process_words[NUM_PROCESS_STATES] = {NULL, NULL, "is stopped",
	"waits for a disk or a server", "has ended", "is gone"};

enum hang_process hang_process(const struct heartbeat_rank *r)
{
	char host[sizeof r->host] = "";
	struct process p;
	gethostname(host, sizeof host - 1);
	if (strcmp(host, r->host))
		return PROCESS_ELSEWHERE;
	if (!process_look(&p, r->pid) || p.started != r->pid_started)
		return PROCESS_GONE;
	return p.state == 'Z' ? PROCESS_ENDED : p.state == 'T' ? PROCESS_STOPPED
		: p.state == 'D' ? PROCESS_WAITS_FOR_DISK : PROCESS_RUNS;
}

/* In which part of the run a rank is: " of layer 3 of step 812", " of the save of step 40". */
static void append_part(struct text *out, const struct heartbeat_rank *r)
{
	const bool named = r->waits || *r->operation;
	if (named && r->layer >= 0)
		text_printf(out, " of layer %d", r->layer);
	if (r->phase == HEARTBEAT_NONE || r->phase == HEARTBEAT_START)
		text_printf(out, "%s its start", named ? " of" : "");
	else if (r->phase == HEARTBEAT_END)
		text_printf(out, "%s the end of the run, after step %lld", named ? " of" : "", (long long)r->step);
	else if (r->phase == HEARTBEAT_EVALUATION || r->phase == HEARTBEAT_SAVE || r->phase == HEARTBEAT_WRITE)
		text_printf(out, "%s the %s of step %lld", named ? " of" : "",
				heartbeat_phase_names[r->phase == HEARTBEAT_WRITE ? HEARTBEAT_SAVE : r->phase], (long long)r->step);
	else
		text_printf(out, "%s step %lld", named ? " of" : "", (long long)r->step);
}

/* Where a rank is: " attention of layer 3 of step 812", " the wait for gradients (number 7) of step 812", " step 2". */
static void append_place(struct text *out, const struct heartbeat_rank *r)
{
	if (r->waits)
		text_printf(out, " the wait for %s (number %u)", r->collective, r->number);
	else if (*r->operation)
		text_printf(out, " %s", r->operation);
	append_part(out, r);
}

/* "rank 2" or "ranks 0, 1, 3": the ranks i for which what[i] is `value`. Returns their number. */
static int append_ranks(struct text *out, const int *what, const int *numbers, int n, int value)
{
	int count = 0, named = 0;
	for (int i = 0; i < n; i++)
		count += what[i] == value;
	text_printf(out, "rank%s ", count > 1 ? "s" : "");
	for (int i = 0; i < n && named < 2 * MOST_NAMED; i++)
		if (what[i] == value)
			text_printf(out, "%s%d", named++ ? ", " : "", numbers ? numbers[i] : i);
	if (count > named)
		text_printf(out, " and %d others", count - named);
	return count;
}

static json_t *rank_to_json(const struct heartbeat_rank *r, int rank, double seconds)
{
	json_t *o = json_pack("{s:i, s:o, s:s, s:I, s:f}", "rank", rank, "host", json_cstring(r->host), "phase",
			heartbeat_phase_names[r->phase], "step", (json_int_t)r->step, "seconds", seconds);
	if (r->waits)
		json_object_set_new(o, "collective", json_cstring(r->collective)),
				json_object_set_new(o, "number", json_integer(r->number));
	else
		json_object_set_new(o, "operation", json_cstring(r->operation)),
				json_object_set_new(o, "layer", r->layer < 0 ? json_null() : json_integer(r->layer));
	return o;
}

/* Whether two ranks wait in the same place. Ranks of different replicas that wait for all count neither steps nor
 * collectives alike. */
static bool wait_together(const struct heartbeat_rank *a, const struct heartbeat_rank *b)
{
	if (a->replica != b->replica)
		return !a->alone && !b->alone && a->phase == b->phase && a->layer == b->layer &&
				!strcmp(a->collective, b->collective);
	return a->number == b->number && a->phase == b->phase && a->step == b->step && a->layer == b->layer &&
			!strcmp(a->collective, b->collective);
}

char *hang_words(const struct hang_place *ranks, const int *numbers, int n, json_t **members)
{
	struct text out = {0};
	json_t *stuck = json_array(), *waiting = json_array();
	*members = json_pack("{s:o, s:o}", "ranks", stuck, "waiting", waiting);
	enum { IN_THE_WAY = -1, GOES_ON = -2 };
	int *place = allocate(n * sizeof *place), named = 0; /* one of these, or the first rank that waits there */
	bool others = false;
	for (int i = 0; i < n; i++) {
		if (ranks[i].goes_on) {
			place[i] = GOES_ON;
			others = true;
			continue;
		}
		place[i] = ranks[i].in_the_way ? IN_THE_WAY : i;
		for (int j = 0; j < i && place[i] == i; j++)
			if (place[j] == j && wait_together(ranks[j].rank, ranks[i].rank))
				place[i] = j;
		json_array_append_new(place[i] == IN_THE_WAY ? stuck : waiting, rank_to_json(ranks[i].rank,
				numbers ? numbers[i] : i, ranks[i].seconds));
	}
	for (int i = 0; i < n; i++)
		if (place[i] == IN_THE_WAY && named++ < MOST_NAMED) {
			const struct heartbeat_rank *r = ranks[i].rank;
			text_printf(&out, "%srank %d on %s has been in", named > 1 ? "; " : "", numbers ? numbers[i] : i,
					*r->host ? r->host : "an unknown host");
			append_place(&out, r);
			text_printf(&out, " for %.0f s%s", ranks[i].seconds, r->waits ? " without a sign" : "");
		}
	if (named > MOST_NAMED)
		text_printf(&out, "; so have %d other ranks", named - MOST_NAMED);
	if (named == 0)
		text_printf(&out, "all ranks wait, and none computes");
	named = 0;
	for (int i = 0; i < n; i++)
		if (place[i] == i && named++ < MOST_NAMED) {
			text_printf(&out, "; ");
			const int count = append_ranks(&out, place, numbers, n, i);
			text_printf(&out, " wait%s in %s (number %u)", count > 1 ? "" : "s", ranks[i].rank->collective,
					ranks[i].rank->number);
			append_part(&out, ranks[i].rank);
		}
	named = 0;
	for (int i = 0; i < n; i++) {
		const char *state = place[i] == IN_THE_WAY ? hang_process_words[hang_process(ranks[i].rank)] : NULL;
		if (state && named++ < MOST_NAMED)
			text_printf(&out, "; process %d of rank %d %s", ranks[i].rank->pid, numbers ? numbers[i] : i, state);
	}
	if (others)
		text_printf(&out, "; the other replicas go on");
	free(place);
	return out.data;
}

/* Whether a replica has made progress where the run, or another replica, has made none for so many seconds. */
static bool goes_on(const struct hang_watch *w, int replica, double time, double since)
{
	double sign;
	return w->replicas > 1 && time - w->replica[replica] < since / 2 && !waits_for_others(w, replica, &sign);
}

char *hang_describe(const struct hang_watch *w, double time, json_t **members)
{
	const int n = w->now.ranks;
	const double since = hang_since(w, time);
	if (n == 0) {
		struct text out = {0};
		*members = json_pack("{s:[], s:[]}", "ranks", "waiting");
		text_printf(&out, "no rank has begun to train for %.0f s", since);
		return out.data;
	}
	struct hang_place *places = allocate(n * sizeof *places);
	for (int i = 0; i < n; i++) {
		const struct heartbeat_rank *r = &w->now.rank[i];
		places[i] = (struct hang_place){r, time - w->rank[i].changed,
				!r->waits || time - w->rank[i].sign >= since / 2, goes_on(w, r->replica, time, since)};
	}
	char *text = hang_words(places, NULL, n, members);
	free(places);
	return text;
}
