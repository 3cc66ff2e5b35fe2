/*
 * training/faults.c - faults to order: what `ling train --inject` makes happen.
 */
#define _GNU_SOURCE
#include "training/faults.h"

#include "files/base.h"
#include "kernels.h"
#include "training/events.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const char *const kind_names[NUM_FAULT_KINDS] = {"kill", "stop", "nan", "inf", "flip", "slow", "diskfull",
	"poison"};

#define FORM "KIND@step=N[,rank=R][,during=save][,ms=M][,probability=P], KIND being kill, stop, nan, inf, flip, slow, " \
	"diskfull or poison"

/* Reads a whole number, low .. high; false when the text is none. */
static bool read_whole(const char *text, int64_t low, int64_t high, int64_t *out)
{
	char *end;
	errno = 0;
	const long long n = strtoll(text, &end, 10);
	*out = n;
	return text[0] >= '0' && text[0] <= '9' && !*end && !errno && n >= low && n <= high;
}

/* Reads one key=value of a fault. Returns what is wrong, or NULL. */
static const char *read_setting(struct fault *x, const char *key, const char *value)
{
	int64_t n;
	char *end;
	if (!strcmp(key, "step"))
		return read_whole(value, 1, INT64_MAX / 2, &x->step) ? NULL : "step is a whole number from 1";
	if (!strcmp(key, "rank") && x->kind != FAULT_POISON) {
		const bool good = read_whole(value, 0, INT32_MAX, &n);
		x->rank = (int)n;
		return good ? NULL : "rank is a whole number from 0";
	}
	if (!strcmp(key, "ms") && x->kind == FAULT_SLOW) {
		const bool good = read_whole(value, 1, 3600 * 1000, &n);
		x->ms = (int)n;
		return good ? NULL : "ms is a whole number from 1 to 3600000";
	}
	if (!strcmp(key, "during") && (x->kind == FAULT_KILL || x->kind == FAULT_STOP)) {
		x->during_save = !strcmp(value, "save");
		return x->during_save || !strcmp(value, "step") ? NULL : "during is step or save";
	}
	if (!strcmp(key, "probability") && x->kind != FAULT_SLOW) {
		x->probability = strtod(value, &end);
		return *value && !*end && x->probability > 0 && x->probability <= 1 ? NULL
			: "probability is a number above 0, at most 1";
	}
	return !strcmp(key, "rank") || !strcmp(key, "ms") || !strcmp(key, "during") || !strcmp(key, "probability")
		? "this kind of fault has no such setting" : "there is no such setting";
}

static int read_fault(struct fault *x, const char *text)
{
	char copy[256];
	*x = (struct fault){.text = text, .probability = 1, .ms = 100};
	char *rest = copy, *kind, *setting;
	const char *wrong = snprintf(copy, sizeof copy, "%s", text) < (int)sizeof copy ? NULL : "it is too long";
	if (!wrong && !(kind = strsep(&rest, "@")))
		wrong = "it has no kind";
	while (!wrong && x->kind < NUM_FAULT_KINDS && strcmp(kind, kind_names[x->kind]))
		x->kind++;
	if (!wrong && x->kind == NUM_FAULT_KINDS)
		wrong = "there is no such kind";
	x->during_save = x->kind == FAULT_DISKFULL;
	while (!wrong && (setting = strsep(&rest, ","))) {
		const char *key = strsep(&setting, "=");
		wrong = setting ? read_setting(x, key, setting) : "a setting has no =";
	}
	if (!wrong && !x->step)
		wrong = "step is missing";
	return wrong ? fail("--inject %s: %s; expected " FORM, text, wrong) : 0;
}

int faults_read(struct faults *f, int n, char **texts)
{
	*f = (struct faults){.log.fd = -1, .list = calloc(n + 1, sizeof *f->list)};
	if (!f->list)
		return fail("out of memory for %d faults", n);
	for (f->count = 0; f->count < n; f->count++)
		if (read_fault(&f->list[f->count], texts[f->count]) < 0)
			return -1;
	return 0;
}

/* Notes that a fault has come at a step. */
static void note_past(struct fault *x, int64_t step)
{
	x->past = grow(x->past, x->num_past, &x->capacity, 1, sizeof *x->past);
	x->past[x->num_past++] = step;
}

/* For events_read: a fault that has come in an earlier start of the run. */
static int read_event(void *context, const json_t *event)
{
	struct faults *f = context;
	const char *kind = json_string_value(json_object_get(event, "kind")),
			*text = json_string_value(json_object_get(event, "fault"));
	for (int i = 0; i < f->count && text && !strcmp(kind, "fault"); i++)
		if (!strcmp(f->list[i].text, text))
			note_past(&f->list[i], json_integer_value(json_object_get(event, "step")));
	return 0;
}

int faults_begin(struct faults *f, const char *run_dir, int rank, int ranks, uint64_t seed)
{
	f->rank = rank;
	f->seed = seed;
	for (int i = 0; i < f->count; i++)
		if (f->list[i].rank >= ranks)
			return fail("--inject %s: there is no rank %d; expected 0 to %d", f->list[i].text, f->list[i].rank,
					ranks - 1);
	return !f->count ? 0 : events_read(run_dir, read_event, f) < 0 ? -1 : events_open(&f->log, run_dir);
}

/* Whether fault number i comes at this step for the first time. */
static bool comes_now(const struct faults *f, int i, int64_t step)
{
	const struct fault *x = &f->list[i];
	for (int j = 0; j < x->num_past; j++)
		if (x->past[j] == step)
			return false;
	if (x->probability == 1)
		return step == x->step;
	const struct random_stream stream = {.seed = f->seed, .purpose = RANDOM_FAULTS + i, .step = (uint32_t)step};
	real u;
	random_uniform(&u, 1, &stream, 0);
	return step >= x->step && u < x->probability;
}

const struct fault *fault_comes(struct faults *f, enum fault_kind kind, int64_t step, bool save)
{
	for (int i = 0; i < f->count; i++) {
		struct fault *x = &f->list[i];
		const bool here = kind == FAULT_POISON || x->rank == f->rank;
		if (x->kind != kind || !here || x->during_save != save)
			continue;
		if (kind == FAULT_SLOW && x->num_past && step >= x->step)
			return x; /* it has begun, and stays */
		if (!comes_now(f, i, step) && !(kind == FAULT_SLOW && step > x->step))
			continue;
		note_past(x, step);
		if (here && (kind != FAULT_POISON || f->rank == 0))
			event_write(&f->log, step, "fault", json_pack("{s:s, s:i}", "fault", x->text, "rank", f->rank));
		return x;
	}
	return NULL;
}

void faults_free(struct faults *f)
{
	for (int i = 0; i < f->count; i++)
		free(f->list[i].past);
	free(f->list);
	events_close(&f->log);
	*f = (struct faults){.log.fd = -1};
}
