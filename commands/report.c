/*
 * commands/report.c - `ling report`: gathers what a run has left behind as one JSON value, thins it, and puts it into
 * report_page.html, which draws it.
 */
#define _GNU_SOURCE
#include "commands/report.h"

#include "files/base.h"
#include "files/trace.h"
#include "commands/runs.h"
#include "commands/watched.h"
#include "ling.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* The page, from report_page.html, with a 0 behind it. The assembler reads the file: see the Makefile. */
extern const char report_page[];
__asm__(".pushsection .rodata\n"
	".balign 1\n"
	"report_page:\n"
	".incbin \"commands/report_page.html\"\n"
	".byte 0\n"
	".popsection\n");
#define PLACE_OF_DATA "@DATA@"

enum {
	MAX_VALIDATIONS = 1000,      /* points of a validation set; of more, the lowest and highest of neighbours */
	MAX_LOAD_COLUMNS = 1000,     /* of the heat map of layers */
	MAX_EXPERT_COLUMNS = 300, MAX_EXPERT_CELLS = 1000000, /* of the heat maps of experts */
	MAX_EVENTS = 1000,           /* that are listed: so many of the first, and of the last */
	MAX_SAMPLES = 2000,          /* the newest */
};

/* A number for the page: null where it is not finite, and a whole number without a point. */
static json_t *plain_number(double x)
{
	if (!isfinite(x))
		return json_null();
	return x == floor(x) && fabs(x) < 1e15 ? json_integer((json_int_t)x) : json_real(x);
}

static void append_number(json_t *array, double x)
{
	json_array_append_new(array, plain_number(x));
}

/* -- series over steps -- */

/* The rows of a run but that of step 0, in buckets of `per` neighbours; the last may have fewer. */
struct buckets { const struct run *run; int first, per, count; };

static struct buckets make_buckets(const struct run *r, int most)
{
	struct buckets b = {.run = r, .first = r->count && r->step[0] == 0};
	const int rows = r->count - b.first;
	b.per = rows > most ? (rows + most - 1) / most : 1;
	b.count = (rows + b.per - 1) / b.per;
	return b;
}

/* The last row of a bucket. */
static int last_row(const struct buckets *b, int bucket)
{
	const int end = b->first + (bucket + 1) * b->per;
	return (end < b->run->count ? end : b->run->count) - 1;
}

/* What the buckets are: for each its first step (step) and its last (end), and after that one the tokens and the
 * seconds of all steps so far. */
static json_t *bucket_axis(const struct buckets *b, const double *seconds)
{
	const struct run *r = b->run;
	json_t *step = json_array(), *end = json_array(), *tokens = json_array(), *time = json_array();
	for (int i = 0; i < b->count; i++) {
		const int last = last_row(b, i);
		append_number(step, r->step[b->first + i * b->per]);
		append_number(end, r->step[last]);
		append_number(tokens, r->tokens[last]);
		append_number(time, seconds[last]);
	}
	return json_pack("{s:o, s:o, s:o, s:o}", "step", step, "end", end, "tokens", tokens, "seconds", time);
}

/* A series in buckets: mean, low and high of the values of each, null without one, and in `bad` the buckets that have
 * values that are not finite. Without low and high where a bucket has one row. NULL for an empty series. */
static json_t *bucket_series(const struct buckets *b, struct series s)
{
	json_t *mean = json_array(), *low = json_array(), *high = json_array(), *bad = json_array();
	for (int bucket = 0, i = 0; bucket < b->count; bucket++) {
		double sum = 0, lo = INFINITY, hi = -INFINITY;
		int n = 0, not_finite = 0;
		for (const int64_t end = b->run->step[last_row(b, bucket)]; i < s.count && s.step[i] <= end; i++) {
			if (b->first && s.step[i] == 0)
				continue;
			if (isfinite(s.value[i]))
				sum += s.value[i], n++, lo = fmin(lo, s.value[i]), hi = fmax(hi, s.value[i]);
			else
				not_finite++;
		}
		append_number(mean, n ? sum / n : NAN);
		append_number(low, lo), append_number(high, hi);
		if (not_finite)
			append_number(bad, bucket);
	}
	json_t *out = s.count ? json_pack("{s:O, s:O}", "mean", mean, "bad", bad) : NULL;
	if (out && b->per > 1)
		json_object_set(out, "low", low), json_object_set(out, "high", high);
	json_decref(mean), json_decref(low), json_decref(high), json_decref(bad);
	series_free(&s);
	return out;
}

/* -- validation -- */

/* The values of a validation set at their steps. *s is freed. */
static json_t *validation_series(const char *name, struct series *s)
{
	json_t *step = json_array(), *mean = json_array(), *bad = json_array();
	struct series thin = s->count > MAX_VALIDATIONS ? series_thin(s, false, MAX_VALIDATIONS / 2) : *s;
	for (int i = 0; i < thin.count; i++) {
		append_number(step, thin.step[i]);
		append_number(mean, thin.value[i]);
		if (!isfinite(thin.value[i]))
			append_number(bad, i);
	}
	if (thin.step != s->step)
		series_free(&thin);
	series_free(s);
	return json_pack("{s:s, s:o, s:o, s:o}", "name", name, "step", step, "mean", mean, "bad", bad);
}

/* Sets `valid`, the mean of all sets and then each named set, and the last and the best value of that mean. */
static void add_validation(json_t *out, const struct run *r)
{
	struct series all = run_series(r, "valid_loss");
	if (!all.count) {
		series_free(&all);
		return;
	}
	int best = 0;
	for (int i = 1; i < all.count; i++)
		if (!(all.value[i] >= all.value[best]) && isfinite(all.value[i]))
			best = i;
	json_object_set_new(out, "last_valid", plain_number(all.value[all.count - 1]));
	json_object_set_new(out, "best_valid", plain_number(all.value[best]));
	json_object_set_new(out, "best_valid_step", plain_number(all.step[best]));
	json_t *list = json_array();
	json_array_append_new(list, validation_series("validation", &all));
	for (int i = 0; i < r->num_columns; i++)
		if (!strncmp(r->columns[i].name, "valid.", 6)) {
			struct series set = run_series(r, r->columns[i].name);
			json_array_append_new(list, validation_series(r->columns[i].name, &set));
		}
	json_object_set_new(out, "valid", list);
}

/* -- experts -- */

/* Largest load over mean load of each layer with experts, in columns that stand for some steps each: the highest value,
 * null where one is not finite. NULL without such layers. first_layer: the number of the first of them. */
static json_t *layer_load(const struct run *r)
{
	const int layers = run_elements(r, "expert_load");
	const struct buckets b = make_buckets(r, MAX_LOAD_COLUMNS);
	json_t *list = json_array(), *step = json_array(), *end = json_array();
	for (int layer = 0; layer < layers; layer++) {
		char name[MAX_NAME];
		snprintf(name, sizeof name, "expert_load.%d", layer);
		const struct column *c = run_column(r, name);
		json_t *row = json_array();
		for (int bucket = 0, i = 0; bucket < b.count; bucket++) {
			double highest = -INFINITY;
			for (const int last = last_row(&b, bucket); i < c->count && c->row[i] <= last; i++)
				highest = highest > c->value[i] || isnan(highest) ? highest : c->value[i];
			append_number(row, highest);
		}
		json_array_append_new(list, row);
	}
	for (int bucket = 0; bucket < b.count; bucket++) {
		append_number(step, r->step[b.first + bucket * b.per]);
		append_number(end, r->step[last_row(&b, bucket)]);
	}
	json_t *out = layers ? json_pack("{s:O, s:O, s:O}", "step", step, "end", end, "layers", list) : NULL;
	json_decref(step), json_decref(end), json_decref(list);
	return out;
}

/* Adds the counts of the tokens of expert `e` of a layer to sum[columns]: `per` neighbours of the rows that have counts
 * to each column. Where an expert has more of them than the first one, which no run of ling writes, the rest is left
 * out. */
static void add_counts(const struct run *r, int layer, int e, int per, int columns, double *sum)
{
	char name[MAX_NAME];
	snprintf(name, sizeof name, "expert_counts.%d.%d", layer, e);
	const struct column *c = run_column(r, name);
	for (int i = 0; c && i < c->count && i / per < columns; i++)
		sum[i / per] += isfinite(c->value[i]) ? c->value[i] : 0;
}

/* The load of each expert over the mean of its layer in percent, layers[layer][column][expert], in columns that stand
 * for one row with counts, or for the sum of some; step: the last of each column. NULL without counts. */
static json_t *expert_load(const struct run *r)
{
	const int experts = run_elements(r, "expert_counts.0");
	const struct column *c = run_column(r, "expert_counts.0.0");
	char name[MAX_NAME];
	int layers = 0;
	while (snprintf(name, sizeof name, "expert_counts.%d", layers) > 0 && run_elements(r, name) == experts && experts)
		layers++;
	if (!layers)
		return NULL;
	const int most = (int)fmax(20, fmin(MAX_EXPERT_COLUMNS, (double)MAX_EXPERT_CELLS / layers / experts));
	const int per = (c->count + most - 1) / most, columns = (c->count + per - 1) / per;
	double *counts = allocate((size_t)columns * experts * sizeof *counts); /* [experts, columns] */
	json_t *list = json_array(), *step = json_array();
	for (int layer = 0; layer < layers; layer++) {
		json_t *values = json_array();
		memset(counts, 0, (size_t)columns * experts * sizeof *counts);
		for (int e = 0; e < experts; e++)
			add_counts(r, layer, e, per, columns, counts + (size_t)e * columns);
		for (int column = 0; column < columns; column++) {
			json_t *row = json_array();
			double total = 0;
			for (int e = 0; e < experts; e++)
				total += counts[(size_t)e * columns + column];
			for (int e = 0; e < experts; e++)
				append_number(row, round(100 * counts[(size_t)e * columns + column] * experts / total));
			json_array_append_new(values, row);
		}
		json_array_append_new(list, values);
	}
	for (int column = 0; column < columns; column++) {
		const int last = (column + 1) * per - 1;
		append_number(step, r->step[c->row[last < c->count ? last : c->count - 1]]);
	}
	free(counts);
	return json_pack("{s:i, s:o, s:o}", "experts", experts, "step", step, "layers", list);
}

/* -- events -- */

/* Whether an event belongs to an ordinary run; it is counted, and not listed. */
static bool is_ordinary(const char *kind)
{
	static const char *const kinds[] = {"start", "stop", "save", "validation", "end", "synchronisation"};
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		if (!strcmp(kind, kinds[i]))
			return true;
	return false;
}

/* The members of an event but step, time and kind, as one line; lists and objects that are long by their size. */
static json_t *event_text(const json_t *event)
{
	struct text out = {0};
	const char *key;
	json_t *value;
	json_object_foreach((json_t *)event, key, value) {
		if (!strcmp(key, "step") || !strcmp(key, "time") || !strcmp(key, "kind"))
			continue;
		char *text = json_text(value, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(6)), size[64];
		snprintf(size, sizeof size, "%zu of them", json_array_size(value) + json_object_size(value)); /* one is 0 */
		text_append_string(&out, out.size ? ", " : "");
		text_append_string(&out, key);
		text_append_string(&out, " ");
		const bool long_list = strlen(text) > 100 && (json_is_array(value) || json_is_object(value));
		text_append_string(&out, json_is_string(value) ? json_string_value(value) : long_list ? size : text);
		free(text);
	}
	json_t *all = json_bytes(out.data ? out.data : "", out.size);
	free(out.data);
	return all;
}

/* An event for the page. `loss` is there where the event has one. */
static json_t *event_for_page(const json_t *event)
{
	char time_text[32] = "";
	const json_t *when = json_object_get(event, "time"), *loss = json_object_get(event, "loss");
	const time_t seconds = (time_t)json_number_value(when);
	struct tm tm;
	if (json_is_number(when) && gmtime_r(&seconds, &tm))
		strftime(time_text, sizeof time_text, "%Y-%m-%d %H:%M:%S", &tm);
	json_t *out = json_pack("{s:O, s:O, s:s, s:o}", "step", json_object_get(event, "step"), "kind",
			json_object_get(event, "kind"), "time", time_text, "text", event_text(event));
	if (json_is_number(loss) || json_is_null(loss))
		json_object_set(out, "loss", (json_t *)loss);
	return out;
}

/* Sets `events`, at most the first and the last MAX_EVENTS incidents; events_left_out, how many are between them;
 * skipped, how many of all are skipped batches; and other_events, the number of each other kind. */
static void add_events(json_t *out, const struct run *r)
{
	json_t *incidents = json_array(), *list = json_array(), *other = json_object();
	const json_t *event;
	size_t i, left_out = 0, skipped = 0;
	json_array_foreach(r->events, i, event) {
		const char *kind = json_string_value(json_object_get(event, "kind"));
		skipped += !strcmp(kind, "skip");
		if (is_ordinary(kind))
			json_object_set_new(other, kind, json_integer(json_integer_value(json_object_get(other, kind)) + 1));
		else
			json_array_append(incidents, (json_t *)event);
	}
	const size_t n = json_array_size(incidents);
	json_array_foreach(incidents, i, event)
		if (i < MAX_EVENTS || n - i <= MAX_EVENTS)
			json_array_append_new(list, event_for_page(event));
		else
			left_out++;
	json_decref(incidents);
	json_object_set_new(out, "events", list);
	json_object_set_new(out, "events_left_out", json_integer((json_int_t)left_out));
	json_object_set_new(out, "skipped", json_integer((json_int_t)skipped));
	json_object_set_new(out, "other_events", other);
}

/* Sets `state`, as `ling watch` says it, and `waiting`, what is to be said of that; null where it is not known. */
static void add_state(json_t *out, const struct run *r)
{
	json_t *state = watched_state(r->dir);
	json_object_set_new(out, "state", state ? json_incref(json_object_get(state, "state")) : json_null());
	json_object_set_new(out, "waiting", state ? json_incref(json_object_get(state, "waiting")) : json_null());
	json_decref(state);
}

/* -- config -- */

/* Adds the values within v to `out`, each under its dotted key, as text. name: that of v, of n bytes. */
static void flatten(json_t *out, char name[PATH_LEN], size_t n, const json_t *v)
{
	const char *key;
	json_t *member;
	json_object_foreach((json_t *)v, key, member) {
		const int more = snprintf(name + n, PATH_LEN - n, "%s%s", n ? "." : "", key);
		if (more > 0 && (size_t)more < PATH_LEN - n)
			flatten(out, name, n + more, member);
	}
	if (json_is_object(v))
		return;
	char *text = json_text(v, JSON_COMPACT | JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
	if (json_is_real(v) && strtod(text, NULL) != json_real_value(v)) /* it needs more digits */
		free(text), text = json_text(v, JSON_ENCODE_ANY | JSON_REAL_PRECISION(17));
	json_object_set_new(out, name, json_is_string(v) ? json_deep_copy(v) : json_cstring(text));
	free(text);
}

static void add_config(json_t *out, const struct run *r)
{
	char name[PATH_LEN] = "";
	json_t *flat = json_object();
	if (r->config)
		flatten(flat, name, 0, r->config);
	json_object_set_new(out, "config", r->config ? json_incref(flat) : json_null());
	json_decref(flat);
	json_object_set_new(out, "clip", plain_number(json_number_value(json_at(r->config, "train.grad_clip"))));
}

/* -- time by operation -- */

/* Adds to *seconds the mean time of an operation in a step, and to *waited what of it was waiting, of one rank, over
 * the number of ranks. */
static void add_time(const struct trace *t, int ranks, int op, int pass, double *seconds, double *waited)
{
	const struct trace_counter *c = &t->operation[PART_STEP][op][pass];
	*seconds += c->nanoseconds / 1e9 / t->steps.count / ranks;
	*waited += c->waited / 1e9 / t->steps.count / ranks;
}

/* The mean time of each operation in a step: its passes, in seconds, and of all of them the waiting. */
static json_t *operation_times(const struct trace *traces, int ranks)
{
	json_t *list = json_array();
	for (int op = OP_NONE + 1; op < NUM_OPERATIONS; op++) {
		double all = 0, waited = 0;
		json_t *passes = json_array();
		for (int pass = 0; pass < NUM_PASSES; pass++) {
			double seconds = 0;
			for (int rank = 0; rank < ranks; rank++)
				add_time(&traces[rank], ranks, op, pass, &seconds, &waited);
			if (seconds > 0)
				json_array_append_new(passes, json_pack("{s:s, s:f}", "name", pass_names[pass], "seconds", seconds));
			all += seconds;
		}
		if (all > 0)
			json_array_append_new(list, json_pack("{s:s, s:f, s:f, s:O}", "name", operations[op].name, "seconds", all,
					"waited", waited, "passes", passes));
		json_decref(passes);
	}
	return list;
}

/* Sets `operations` and the mean seconds of a step, if the run has a trace with steps in it. A trace that cannot be
 * read is a warning. */
static void add_operations(json_t *out, const struct run *r)
{
	char path[PATH_LEN];
	struct trace *traces;
	int ranks;
	if (path_join(path, r->dir, "trace") < 0 || path_exists(path) <= 0)
		return;
	if (traces_read(&traces, &ranks, r->dir, false) < 0) {
		fprintf(stderr, "warning: %s; the page has no times of operations of this run\n", error_text);
		return;
	}
	double seconds = 0;
	bool steps = true;
	for (int rank = 0; rank < ranks; rank++) {
		steps &= traces[rank].steps.count > 0;
		seconds += traces[rank].steps.nanoseconds / 1e9 / fmax(traces[rank].steps.count, 1) / ranks;
	}
	if (steps) {
		json_object_set_new(out, "operations", operation_times(traces, ranks));
		json_object_set_new(out, "step_seconds", json_real(seconds));
		json_object_set_new(out, "traced_steps", json_integer((json_int_t)traces[0].steps.count));
		json_object_set_new(out, "ranks", json_integer(ranks));
	}
	traces_free(traces, ranks);
}

/* -- samples of text -- */

/* A member that is a text, of any characters: models write \u0000, too. NULL: it is none, which fails. */
static json_t *text_member(const json_t *line, const char *where, const char *key)
{
	json_t *text = json_object_get(line, key);
	if (json_is_string(text))
		return text;
	fail("%s: `%s` is %s; expected a string", where, key, json_kind(text));
	return NULL;
}

/* Sets `samples`, the newest MAX_SAMPLES of RUN/samples.jsonl, and samples_left_out. No file is no sample. */
static int add_samples(json_t *out, const struct run *r)
{
	char path[PATH_LEN];
	const uint8_t *data = NULL;
	size_t size = 0, left_out = 0;
	if (path_join(path, r->dir, "samples.jsonl") < 0)
		return -1;
	const int there = path_exists(path);
	if (there < 0 || (there > 0 && map_file(path, &data, &size) < 0))
		return -1;
	json_t *list = json_array();
	int rc = 0;
	int64_t number = 0;
	for (size_t at = 0; rc == 0 && at < size;) {
		const uint8_t *end = memchr(data + at, '\n', size - at);
		char where[PATH_LEN + 32];
		if (!end)
			break; /* the run is writing it */
		const size_t n = end + 1 - (data + at);
		snprintf(where, sizeof where, "%s:%lld", path, (long long)++number);
		json_t *line = json_line(where, (const char *)data + at, n);
		int64_t step;
		json_t *prompt = line ? text_member(line, where, "prompt") : NULL;
		json_t *text = prompt ? text_member(line, where, "text") : NULL;
		rc = text ? field_int(line, where, "step", 0, INT64_MAX, &step) : -1;
		if (rc == 0)
			json_array_append_new(list, json_pack("{s:I, s:O, s:O}", "step", (json_int_t)step, "prompt", prompt, "text",
					text));
		for (; json_array_size(list) > MAX_SAMPLES; left_out++)
			json_array_remove(list, 0);
		json_decref(line);
		at += n;
	}
	unmap_file(data, size);
	json_object_set_new(out, "samples", list);
	json_object_set_new(out, "samples_left_out", json_integer((json_int_t)left_out));
	return rc;
}

/* -- the page -- */

/* The middle of the values that are finite, in a series that is freed; NaN without one. */
static double median(struct series s)
{
	int n = 0;
	for (int i = 0; i < s.count; i++)
		if (isfinite(s.value[i]))
			s.value[n++] = s.value[i];
	qsort(s.value, n, sizeof *s.value, compare_doubles);
	const double middle = n ? s.value[n / 2] : NAN;
	series_free(&s);
	return middle;
}

/* Steps whose loss or gradient norm is not finite. */
static int count_nonfinite(const struct run *r)
{
	const struct column *loss = run_column(r, "loss"), *norm = run_column(r, "grad_norm");
	bool *bad = allocate(r->count * sizeof *bad);
	int n = 0;
	for (int i = 0; loss && i < loss->count; i++)
		bad[loss->row[i]] |= !isfinite(loss->value[i]);
	for (int i = 0; norm && i < norm->count; i++)
		bad[norm->row[i]] |= !isfinite(norm->value[i]);
	for (int i = 0; i < r->count; i++)
		n += bad[i];
	free(bad);
	return n;
}

/* What depends on the steps that a run has done. */
static void add_steps(json_t *out, const struct run *r, int points)
{
	static const char *const names[] = {"loss", "lr", "batch", "grad_norm", "update_norm", "balance_loss", "z_loss",
		"tokens_per_second", "peak_share"};
	const struct buckets b = make_buckets(r, points);
	const struct column *seconds = run_column(r, "seconds"), *loss = run_column(r, "loss");
	double *so_far = allocate(r->count * sizeof *so_far);
	for (int i = 0; seconds && i < seconds->count; i++)
		so_far[seconds->row[i]] = isfinite(seconds->value[i]) ? seconds->value[i] : 0;
	for (int i = 1; i < r->count; i++)
		so_far[i] += so_far[i - 1];
	json_t *series = json_object();
	for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
		json_t *one = bucket_series(&b, run_series(r, names[i]));
		if (one)
			json_object_set_new(series, names[i], one);
	}
	json_object_set_new(out, "bucket", json_integer(b.per));
	json_object_set_new(out, "x", bucket_axis(&b, so_far));
	json_object_set_new(out, "series", series);
	json_object_set_new(out, "tokens", json_integer(r->tokens[r->count - 1]));
	json_object_set_new(out, "seconds", json_real(so_far[r->count - 1]));
	json_object_set_new(out, "last_loss", plain_number(loss && loss->count ? loss->value[loss->count - 1] : NAN));
	json_object_set_new(out, "tokens_per_second", plain_number(median(run_series(r, "tokens_per_second"))));
	json_object_set_new(out, "peak_share", plain_number(median(run_series(r, "peak_share"))));
	json_object_set_new(out, "nonfinite", json_integer(count_nonfinite(r)));
	free(so_far);
	add_validation(out, r);
	json_t *load = layer_load(r), *experts = expert_load(r);
	if (load)
		json_object_set_new(out, "load", load);
	if (experts)
		json_object_set_new(out, "experts", experts);
}

/* A run for the page; NULL on error. */
static json_t *run_for_page(const struct run *r, int points)
{
	const int rows = r->count - (r->count && r->step[0] == 0);
	json_t *out = json_pack("{s:o, s:o, s:i, s:I}", "name", json_cstring(r->name), "directory", json_cstring(r->dir),
			"steps", rows, "first_layer",
			(json_int_t)json_integer_value(json_at(r->config, "model.first_k_dense_replace")));
	if (rows)
		add_steps(out, r, points);
	add_events(out, r);
	add_state(out, r);
	add_config(out, r);
	add_operations(out, r);
	if (add_samples(out, r) < 0) {
		json_decref(out);
		return NULL;
	}
	return out;
}

/* Writes the page with its data. In JSON a '<' is always within a string, where it can be written in another way: so no
 * tag or comment of HTML can begin in the data. */
static int write_page(const json_t *data, const char *path)
{
	struct new_file file;
	if (new_file_begin(&file, path) < 0)
		return -1;
	char *text = json_text(data, JSON_COMPACT | JSON_REAL_PRECISION(6));
	const char *place = strstr(report_page, PLACE_OF_DATA), *from = text;
	fwrite(report_page, 1, place - report_page, file.stream);
	for (const char *tag; (tag = strchr(from, '<')); from = tag + 1) {
		fwrite(from, 1, tag - from, file.stream);
		fputs("\\u003c", file.stream);
	}
	fputs(from, file.stream);
	fputs(place + strlen(PLACE_OF_DATA), file.stream);
	free(text);
	return new_file_publish(&file, 0);
}

int report_write(char *const *run_dirs, int n, int points, const char *path)
{
	char made[64];
	const time_t now = time(NULL);
	struct tm tm;
	strftime(made, sizeof made, "%Y-%m-%d %H:%M UTC", gmtime_r(&now, &tm));
	struct run *runs = allocate(n * sizeof *runs);
	int rc = runs_check_output(run_dirs, n, path) < 0 ? -1 : runs_open(runs, run_dirs, n);
	json_t *list = json_array();
	for (int i = 0; i < n && rc == 0; i++) {
		json_t *one = run_for_page(&runs[i], points);
		rc = one ? json_array_append_new(list, one) : -1;
	}
	json_t *data = json_pack("{s:s, s:s, s:o}", "version", LING_VERSION, "made", made, "runs", list);
	if (rc == 0)
		rc = write_page(data, path);
	json_decref(data);
	for (int i = 0; i < n; i++)
		run_free(&runs[i]);
	free(runs);
	return rc;
}

struct report_options { const char *out; int points; };

static int run_report(const struct command_line *line)
{
	const struct report_options *o = line->options;
	char path[PATH_LEN];
	if (!o->out && path_join(path, line->words[0], "report.html") < 0)
		return EXIT_WORK_FAILED;
	const char *out = o->out ? o->out : path;
	if (report_write(line->words, line->num_words, o->points, out) < 0)
		return EXIT_WORK_FAILED;
	printf("%s\n", out);
	return EXIT_DONE;
}

static const struct command_option options[] = {
	TEXT_OPTION(report_options, out, "out", "FILE", "The page (default: report.html in the first RUN_DIR)"),
	WHOLE_OPTION(report_options, points, "points", "N", 100, 1000000,
		"Points of a line; where a run has more steps, a point stands for several, with their mean, lowest and highest "
		"value. More points make a larger page, in which a zoom shows more", .initial = "4000"),
};

const struct command report_command = {
	.name = "report", .usage = "RUN_DIR...", .min_words = 1, .max_words = ANY_NUMBER,
	.help = "Write a page for a browser about one or several runs: losses, learning rate, gradient norm, speed, expert "
		"load, incidents, samples of text, differences of the configs.",
	.run = run_report, COMMAND_OPTIONS(report_options, options),
};
