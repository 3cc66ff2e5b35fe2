/*
 * training/faults.c - faults to order: what `ling train --inject` makes happen.
 */
#define _GNU_SOURCE
#include "training/faults.h"

#include "files/base.h"
#include "kernels.h"
#include "files/safetensors.h"
#include "model/parameters.h"
#include "training/events.h"

#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const char *const kind_names[NUM_FAULT_KINDS] = {"kill", "stop", "nan", "inf", "flip", "slow", "diskfull",
	"poison"};
static const char *const moment_names[NUM_FAULT_MOMENTS] = {"step", "update", "save", "norms", "synchronisation"};
/* The moments at which a kind may come, a bit each; the first one is the default. */
enum {
	AT_STEP = 1 << MOMENT_STEP, AT_UPDATE = 1 << MOMENT_UPDATE, AT_SAVE = 1 << MOMENT_SAVE,
	AT_SYNCHRONISATION = 1 << MOMENT_NORMS | 1 << MOMENT_SYNCHRONISATION
};
static const unsigned moments[NUM_FAULT_KINDS] = {
	[FAULT_KILL] = AT_STEP | AT_SAVE | AT_SYNCHRONISATION, [FAULT_STOP] = AT_STEP | AT_SAVE | AT_SYNCHRONISATION,
	[FAULT_NAN] = AT_UPDATE, [FAULT_INF] = AT_UPDATE, [FAULT_FLIP] = AT_STEP | AT_UPDATE, [FAULT_SLOW] = AT_STEP,
	[FAULT_DISKFULL] = AT_SAVE, [FAULT_POISON] = AT_STEP,
};

#define FORM "KIND@step=N[,rank=R][,during=step|update|save|norms|synchronisation][,ms=M][,probability=P], KIND " \
	"being kill, stop, nan, inf, flip, slow, diskfull or poison"

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
	if (!strcmp(key, "rank")) {
		const bool good = read_whole(value, 0, INT32_MAX, &n);
		x->rank = (int)n;
		return good ? NULL : "rank is a whole number from 0";
	}
	if (!strcmp(key, "ms") && x->kind == FAULT_SLOW) {
		x->ms = strtod(value, &end);
		return value[0] >= '0' && value[0] <= '9' && !*end && x->ms >= 0.001 && x->ms <= 3600e3 ? NULL
			: "ms is a number from 0.001 to 3600000";
	}
	if (!strcmp(key, "during")) {
		for (int i = 0; i < NUM_FAULT_MOMENTS; i++)
			if (moments[x->kind] & 1u << i && !strcmp(value, moment_names[i])) {
				x->moment = i;
				return NULL;
			}
		return !(moments[x->kind] & (moments[x->kind] - 1)) ? "this kind of fault has one moment only"
			: x->kind == FAULT_FLIP ? "during is step or update" : "during is step, save, norms or synchronisation";
	}
	if (!strcmp(key, "probability")) {
		x->probability = strtod(value, &end);
		return *value && !*end && x->probability > 0 && x->probability <= 1 ? NULL
			: "probability is a number above 0, at most 1";
	}
	return !strcmp(key, "ms")
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
	if (!wrong) {
		x->moment = __builtin_ctz(moments[x->kind]);
		x->rank = x->kind == FAULT_POISON ? -1 : 0;
	}
	while (!wrong && (setting = strsep(&rest, ","))) {
		const char *key = strsep(&setting, "=");
		wrong = setting ? read_setting(x, key, setting) : "a setting has no =";
	}
	if (!wrong && !x->step)
		wrong = "step is missing";
	return wrong ? fail("--inject %s: %s; expected " FORM, text, wrong) : 0;
}

int faults_read(struct faults *f, int n, char *const *texts, int ranks)
{
	*f = (struct faults){.log.fd = -1, .list = allocate(n * sizeof *f->list)};
	for (f->count = 0; f->count < n; f->count++) {
		struct fault *x = &f->list[f->count];
		if (read_fault(x, texts[f->count]) < 0)
			return -1;
		if (x->rank >= ranks)
			return fail("--inject %s: there is no rank %d; expected 0 to %d", x->text, x->rank, ranks - 1);
		for (const struct fault *other = f->list; other < x; other++)
			if (!strcmp(other->text, x->text)) /* events.jsonl could not tell which of them has come */
				return fail("--inject %s: it is there twice; a fault comes once at a step", x->text);
	}
	return 0;
}

/* Notes that a fault has come at a step. */
static void note_past(struct fault *x, int64_t step)
{
	x->past = grow(x->past, x->num_past, &x->capacity, 1, sizeof *x->past);
	x->past[x->num_past++] = step;
}

/* Adds samples, an array of [file, first, last], to the poisoned ones. */
static void add_poisoned(struct faults *f, const json_t *samples)
{
	f->poisoned = f->poisoned ? f->poisoned : json_array();
	json_array_extend(f->poisoned, (json_t *)samples);
}

/* For events_read: a fault that has come in an earlier start of the run. */
static int read_event(void *context, const json_t *event)
{
	struct faults *f = context;
	const char *kind = json_string_value(json_object_get(event, "kind")),
			*text = json_string_value(json_object_get(event, "fault"));
	for (int i = 0; i < f->count && text && !strcmp(kind, "fault"); i++)
		if (!strcmp(f->list[i].text, text)) {
			note_past(&f->list[i], json_integer_value(json_object_get(event, "at_step")));
			if (json_is_array(json_object_get(event, "samples")))
				add_poisoned(f, json_object_get(event, "samples"));
			break;
		}
	return 0;
}

int faults_begin(struct faults *f, const char *run_dir, int rank, uint64_t seed, bool synchronises)
{
	f->rank = rank;
	f->seed = seed;
	for (int i = 0; i < f->count && !synchronises; i++)
		if (f->list[i].moment >= MOMENT_NORMS)
			return fail("--inject %s: there is no synchronisation: parallel.sync is step; expected local",
					f->list[i].text);
	return !f->count ? 0 : events_read(run_dir, read_event, f) < 0 ? -1 : events_open(&f->log, run_dir);
}

/* Whether chance says that fault number i comes at this step. */
static bool is_drawn(const struct faults *f, int i, int64_t step)
{
	const struct random_stream stream = {.seed = f->seed, .purpose = RANDOM_FAULTS + i, .step = (uint32_t)step};
	real u;
	random_uniform(&u, 1, &stream, 0);
	return f->list[i].probability == 1 || u < f->list[i].probability; /* u may be 1 */
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
	return step >= x->step && is_drawn(f, i, step);
}

const struct fault *fault_comes(struct faults *f, enum fault_kind kind, int64_t step, enum fault_moment moment)
{
	for (int i = 0; i < f->count; i++) {
		struct fault *x = &f->list[i];
		if (x->kind != kind || x->moment != moment || (kind != FAULT_POISON && x->rank != f->rank))
			continue;
		if (kind == FAULT_SLOW ? step >= x->step && is_drawn(f, i, step) : comes_now(f, i, step)) {
			if (kind != FAULT_SLOW || !x->num_past)
				note_past(x, step);
			return x;
		}
	}
	return NULL;
}

void fault_write(const struct faults *f, const struct fault *x, int64_t step, json_t *members)
{
	json_t *event = json_pack("{s:s, s:I}", "fault", x->text, "at_step", (json_int_t)step);
	if (x->kind != FAULT_POISON)
		json_object_set_new(event, "rank", json_integer(f->rank));
	if (members)
		json_object_update(event, members);
	json_decref(members);
	if (x->kind != FAULT_POISON || f->rank == 0)
		event_write(&f->log, x->moment >= MOMENT_SAVE ? step : step - 1, "fault", event);
	else
		json_decref(event);
}

/* A random number of 64 bits that a fault at a step decides by. */
static uint64_t random_bits(const struct faults *f, const struct fault *x, int64_t step)
{
	const struct random_stream s = {.seed = f->seed, .purpose = RANDOM_FAULTS + 256 + (int)(x - f->list),
			.step = (uint32_t)step};
	return random_permute((uint64_t)f->rank, UINT64_MAX, &s);
}

/* Turns one bit of one of this rank's weights. */
static void flip(const struct faults *f, const struct fault *x, int64_t step, const struct fault_target *target)
{
	const uint64_t bits = random_bits(f, x, step);
	const int64_t at = (int64_t)((bits >> 8) % target->table->num_elements);
	const int bit = bits % (8 * sizeof(real));
	const struct parameter *p = target->table->parameters;
	while (at >= p->offset + parameter_size(p))
		p++;
	fault_write(f, x, step, json_pack("{s:s, s:I, s:i}", "tensor", p->name, "element", (json_int_t)(at - p->offset),
			"bit", bit));
	((uint8_t *)&target->weights[at])[bit / 8] ^= 1 << bit % 8;
}

/* Gives one of the gradient's elements that this rank updates another value. */
static void spoil_gradient(const struct faults *f, const struct fault *x, int64_t step,
		const struct fault_target *target, real value)
{
	struct optimizer_shard_iterator walk = {0};
	struct optimizer_shard s;
	int64_t at = target->table->num_state ? (int64_t)(random_bits(f, x, step) % target->table->num_state) : 0;
	while (next_optimizer_shard(target->table, &walk, &s)) {
		if (at < s.end - s.from) {
			fault_write(f, x, step, json_pack("{s:s, s:I}", "tensor", s.parameter->name, "element",
					(json_int_t)(s.from + at)));
			target->gradients[s.parameter->offset + s.from + at] = value;
			return;
		}
		at -= s.end - s.from;
	}
}

void faults_act(struct faults *f, int64_t step, enum fault_moment moment, const struct fault_target *target)
{
	const struct fault *x;
	if (f->count == 0)
		return;
	if ((x = fault_comes(f, FAULT_SLOW, step, moment))) {
		if (x->past[x->num_past - 1] == step)
			fault_write(f, x, step, NULL);
		nanosleep(&(struct timespec){(time_t)(x->ms / 1e3), (long)(fmod(x->ms, 1e3) * 1e6)}, NULL);
	}
	while ((x = fault_comes(f, FAULT_FLIP, step, moment)))
		flip(f, x, step, target);
	while ((x = fault_comes(f, FAULT_NAN, step, moment)))
		spoil_gradient(f, x, step, target, NAN);
	while ((x = fault_comes(f, FAULT_INF, step, moment)))
		spoil_gradient(f, x, step, target, INFINITY);
	if ((x = fault_comes(f, FAULT_STOP, step, moment))) {
		fault_write(f, x, step, NULL);
		raise(SIGSTOP);
	}
	if ((x = fault_comes(f, FAULT_KILL, step, moment))) {
		fault_write(f, x, step, NULL);
		raise(SIGKILL);
	}
}

struct write_fault faults_in_save(struct faults *f, int64_t step, int64_t bytes)
{
	static const struct { enum fault_kind kind; int signal; } kinds[] = {{FAULT_DISKFULL, 0}, {FAULT_STOP, SIGSTOP},
		{FAULT_KILL, SIGKILL}};
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
		const struct fault *x = fault_comes(f, kinds[i].kind, step, MOMENT_SAVE);
		if (x) {
			fault_write(f, x, step, NULL);
			return (struct write_fault){.after = bytes / 2, .signal = kinds[i].signal};
		}
	}
	return (struct write_fault){.after = INT64_MAX};
}

const struct fault *fault_poisons(struct faults *f, int64_t step)
{
	return fault_comes(f, FAULT_POISON, step, MOMENT_STEP);
}

void faults_poison(struct faults *f, const struct fault *x, int64_t step, json_t *samples)
{
	add_poisoned(f, samples);
	fault_write(f, x, step, json_pack("{s:o}", "samples", samples));
}

void faults_poison_targets(const struct faults *f, int file, int64_t number, int32_t *target, int64_t L,
		int vocab_size)
{
	bool poisoned = false;
	size_t i;
	json_t *range;
	json_array_foreach(f->poisoned, i, range)
		if (json_integer_value(json_array_get(range, 0)) == file &&
				number >= json_integer_value(json_array_get(range, 1)) &&
				number <= json_integer_value(json_array_get(range, 2)))
			poisoned = true;
	const struct random_stream s = {.seed = f->seed, .purpose = RANDOM_FAULTS + 512 + file};
	for (int64_t t = 0; poisoned && t < L; t++) {
		real u;
		random_uniform(&u, 1, &s, (uint64_t)(number * L + t));
		if (target[t] >= 0)
			target[t] = (int32_t)(u * vocab_size) % vocab_size;
	}
}

void faults_free(struct faults *f)
{
	for (int i = 0; i < f->count; i++)
		free(f->list[i].past);
	free(f->list);
	json_decref(f->poisoned);
	events_close(&f->log);
	*f = (struct faults){.log.fd = -1};
}
