/*
 * commands/hang.c - tells a run that hangs from one that is slow, by its heartbeat.
 */
#define _GNU_SOURCE
#include "commands/hang.h"

#include "files/base.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void hang_watch_begin(struct hang_watch *w, struct hang_history *history, double time)
{
	*w = (struct hang_watch){.history = history, .started = time, .progress = time};
}

void hang_watch_end(struct hang_watch *w)
{
	heartbeat_free(&w->now);
	free(w->rank);
	w->rank = NULL;
}

/* A rank has left a phase for the next one, after so many seconds as the reader saw. Rank 0's count for all. */
static void learn(struct hang_watch *w, const struct heartbeat_rank *before, const struct heartbeat_rank *after,
		double seconds)
{
	struct hang_history *h = w->history;
	if (before->phase == HEARTBEAT_STEP) {
		w->stepped = true;
		if (after->step_seconds > 0) /* the last of the steps since the last look */
			h->steps[h->num_steps++ % HANG_STEPS] = after->step_seconds;
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

void hang_watch_take(struct hang_watch *w, struct heartbeat *read, double time)
{
	if (read->ranks != w->now.ranks || read->id != w->now.id) { /* the first look */
		hang_watch_end(w);
		w->rank = allocate(read->ranks * sizeof *w->rank);
		for (int i = 0; i < read->ranks; i++)
			w->rank[i] = (struct rank_watch){w->started, time, time};
		w->progress = time;
		if (read->rank[0].phase > HEARTBEAT_START)
			learn(w, &(struct heartbeat_rank){.phase = HEARTBEAT_START}, &read->rank[0], time - w->started);
	}
	for (int i = 0; i < w->now.ranks; i++) {
		const struct heartbeat_rank *before = &w->now.rank[i], *after = &read->rank[i];
		struct rank_watch *r = &w->rank[i];
		if (!same_phase(before, after)) {
			if (i == 0 && before->phase)
				learn(w, before, after, time - r->phase_begun);
			r->phase_begun = w->progress = time;
		}
		if (!same_place(before, after))
			r->changed = r->sign = time;
		if (before->waited != after->waited)
			r->sign = time;
	}
	heartbeat_free(&w->now);
	w->now = *read;
	*read = (struct heartbeat){0};
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

double hang_detect(const struct hang_watch *w, const struct hang_limits *limits, double time, double *limit)
{
	*limit = w->now.ranks ? 0 : hang_limit(w->history, limits, HEARTBEAT_START);
	for (int i = 0; i < w->now.ranks; i++) /* one may save while the others are in the next step already */
		*limit = fmax(*limit, hang_limit(w->history, limits, w->now.rank[i].phase));
	const double since = time - w->progress;
	return since > *limit ? since : 0;
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

static void append(struct text *out, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void append(struct text *out, const char *format, ...)
{
	char part[512];
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(part, sizeof part, format, arguments);
	va_end(arguments);
	text_append_string(out, part);
}

/* Where a rank is: "attention of layer 3 of step 812", "the save of step 40", "its start". */
static void append_place(struct text *out, const struct heartbeat_rank *r)
{
	const char *name = r->waits ? r->collective : r->operation;
	if (r->phase == HEARTBEAT_NONE || r->phase == HEARTBEAT_START) {
		append(out, "its start");
		return;
	}
	if (r->phase == HEARTBEAT_END) {
		append(out, "the end of the run, after step %lld", (long long)r->step);
		return;
	}
	if (r->waits)
		append(out, "the wait for %s (number %u) of ", name, r->number);
	else if (*name && r->layer >= 0)
		append(out, "%s of layer %d of ", name, r->layer);
	else if (*name)
		append(out, "%s of ", name);
	if (r->phase == HEARTBEAT_EVALUATION || r->phase == HEARTBEAT_SAVE || r->phase == HEARTBEAT_WRITE)
		append(out, "the %s of ", heartbeat_phase_names[r->phase == HEARTBEAT_WRITE ? HEARTBEAT_SAVE : r->phase]);
	append(out, "step %lld", (long long)r->step);
}

/* "rank 2" or "ranks 0, 1, 3": the ranks i for which what[i] is `value`. Returns their number. */
static int append_ranks(struct text *out, const int *what, int n, int value)
{
	int count = 0, named = 0;
	for (int i = 0; i < n; i++)
		count += what[i] == value;
	append(out, "rank%s ", count > 1 ? "s" : "");
	for (int i = 0; i < n && named < 2 * MOST_NAMED; i++)
		if (what[i] == value)
			append(out, "%s%d", named++ ? ", " : "", i);
	if (count > named)
		append(out, " and %d others", count - named);
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

char *hang_describe(const struct hang_watch *w, double time, json_t **members)
{
	const int n = w->now.ranks;
	const double since = time - w->progress;
	struct text out = {0};
	json_t *stuck = json_array(), *waiting = json_array();
	*members = json_pack("{s:o, s:o}", "ranks", stuck, "waiting", waiting);
	if (n == 0) {
		append(&out, "no rank has begun to train for %.0f s", since);
		return out.data;
	}
	/* Of each rank: -1, it is in the way: it computes, or it gives no sign that it waits; else it waits, in a place
	 * that has the number of the first rank that waits there. */
	int *place = allocate(n * sizeof *place), named = 0;
	for (int i = 0; i < n; i++) {
		const struct heartbeat_rank *r = &w->now.rank[i];
		place[i] = r->waits && time - w->rank[i].sign < since / 2 ? i : -1;
		for (int j = 0; j < i && place[i] == i; j++)
			if (place[j] == j && w->now.rank[j].number == r->number &&
					!strcmp(w->now.rank[j].collective, r->collective))
				place[i] = j;
		json_array_append_new(place[i] < 0 ? stuck : waiting, rank_to_json(r, i, time - w->rank[i].changed));
	}
	for (int i = 0; i < n; i++)
		if (place[i] < 0 && named++ < MOST_NAMED) {
			const struct heartbeat_rank *r = &w->now.rank[i];
			append(&out, "%srank %d on %s has been in ", named > 1 ? "; " : "", i,
					*r->host ? r->host : "an unknown host");
			append_place(&out, r);
			append(&out, " for %.0f s%s", time - w->rank[i].changed, r->waits ? " without a sign" : "");
		}
	if (named > MOST_NAMED)
		append(&out, "; so have %d other ranks", named - MOST_NAMED);
	if (named == 0)
		append(&out, "all ranks wait, and none computes");
	named = 0;
	for (int i = 0; i < n; i++)
		if (place[i] == i && named++ < MOST_NAMED) {
			append(&out, "; ");
			const int count = append_ranks(&out, place, n, i);
			append(&out, " wait%s in %s (number %u)", count > 1 ? "" : "s", w->now.rank[i].collective,
					w->now.rank[i].number);
		}
	free(place);
	return out.data;
}
