/*
 * commands/runs.c - reading the directory of a run: its metrics by name, its events, its config.
 */
#define _GNU_SOURCE
#include "commands/runs.h"

#include "files/checkpoint.h"
#include "data.h"
#include "training/events.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* -- the metrics -- */

/* Adds a value to the column `name`, of n bytes and a 0, in the newest row. *guess: the column that it most likely is;
 * becomes the next one, because most lines have the same members in the same order. */
static void add_value(struct run *r, int *guess, const char *name, size_t n, double value)
{
	int64_t i = *guess;
	if (i >= r->num_columns || strcmp(r->columns[i].name, name))
		i = string_table_add(&r->names, name, n, 1);
	if (i == r->num_columns) {
		r->columns = grow(r->columns, r->num_columns, &r->columns_room, 1, sizeof *r->columns);
		r->columns[r->num_columns++] = (struct column){.name = copy_string(name)};
	}
	struct column *c = &r->columns[i];
	if (c->count && c->row[c->count - 1] == r->count - 1)
		c->count--; /* {"a": {"b": 1}, "a.b": 2}: the last one counts */
	c->row = grow(c->row, c->count, &c->row_room, 1, sizeof *c->row);
	c->value = grow(c->value, c->count, &c->value_room, 1, sizeof *c->value);
	c->row[c->count] = r->count - 1;
	c->value[c->count++] = value;
	*guess = (int)i + 1;
}

/* Adds the numbers within v, whose name are the first n bytes of `name`. Texts are left out. */
static void add_values(struct run *r, int *guess, char name[MAX_NAME], size_t n, const json_t *v)
{
	const char *key;
	json_t *element;
	size_t i;
	if (json_is_number(v) || json_is_null(v))
		add_value(r, guess, name, n, json_is_null(v) ? NAN : json_number_value(v));
	else if (json_is_boolean(v))
		add_value(r, guess, name, n, json_is_true(v));
	json_object_foreach((json_t *)v, key, element) {
		const int more = snprintf(name + n, MAX_NAME - n, "%s%s", n ? "." : "", key);
		if (more > 0 && (size_t)more < MAX_NAME - n)
			add_values(r, guess, name, n + more, element);
	}
	json_array_foreach(v, i, element) {
		const int more = snprintf(name + n, MAX_NAME - n, ".%zu", i);
		if ((size_t)more < MAX_NAME - n)
			add_values(r, guess, name, n + more, element);
	}
}

/* Adds a row. */
static void add_row(struct run *r, int64_t step, int64_t tokens)
{
	r->step = grow(r->step, r->count, &r->rows_room, 1, sizeof *r->step);
	r->tokens = grow(r->tokens, r->count, &r->tokens_room, 1, sizeof *r->tokens);
	r->step[r->count] = step;
	r->tokens[r->count++] = tokens;
}

/* A line of metrics.jsonl: a row. */
static int add_line(void *context, const json_t *line)
{
	struct run *r = context;
	char name[MAX_NAME];
	int guess = 0;
	add_row(r, json_integer_value(json_object_get(line, "step")), json_integer_value(json_object_get(line, "tokens")));
	add_values(r, &guess, name, 0, line);
	return 0;
}

/* A validation before the first step, which is an event: the row of step 0. */
static void add_first_validation(struct run *r)
{
	const json_t *event, *found = NULL;
	size_t i;
	json_array_foreach(r->events, i, event)
		if (!strcmp(json_string_value(json_object_get(event, "kind")), "validation") &&
				json_integer_value(json_object_get(event, "step")) == 0)
			found = event;
	static const char *const members[] = {"step", "valid_loss", "valid"};
	char name[MAX_NAME];
	int guess = 0;
	if (found)
		add_row(r, 0, 0);
	for (int m = 0; found && m < 3; m++)
		if (json_object_get(found, members[m]))
			add_values(r, &guess, strcpy(name, members[m]), strlen(members[m]), json_object_get(found, members[m]));
}

/* -- the events -- */

/* Whether an event is about the training itself: going back undoes it. Others, such as a crash, have happened. */
static bool can_be_undone(const char *kind)
{
	static const char *const kinds[] = {"skip", "retry", "drop", "level_shift", "spike", "save", "validation",
		"synchronisation"};
	for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
		if (!strcmp(kind, kinds[i]))
			return true;
	return false;
}

static int64_t member(const json_t *event, const char *key)
{
	return json_integer_value(json_object_get(event, key));
}

/* Adds an event, and removes those that it undid: a start or resume, decisions about batches that are drawn again, and
 * all later steps; going back, later steps. */
static int add_event(void *context, const json_t *event)
{
	struct run *r = context;
	const char *kind = json_string_value(json_object_get(event, "kind"));
	const bool restart = !strcmp(kind, "start") || !strcmp(kind, "resume");
	for (size_t i = json_array_size(r->events); (restart || !strcmp(kind, "rollback")) && i-- > 0;) {
		const json_t *old = json_array_get(r->events, i);
		const bool later = member(old, "step") > member(event, "step") ||
				(restart && member(old, "batch") > member(event, "batch"));
		if (later && can_be_undone(json_string_value(json_object_get(old, "kind"))))
			json_array_remove(r->events, i);
	}
	if (restart && json_is_number(json_object_get(event, "flops_per_token")))
		r->flops_per_token = json_number_value(json_object_get(event, "flops_per_token"));
	if (restart && json_is_number(json_object_get(event, "peak_flops")))
		r->peak_flops = json_number_value(json_object_get(event, "peak_flops"));
	json_array_append_new(r->events, json_deep_copy(event));
	return 0;
}

/* -- the run -- */

/* Reads the config of the newest checkpoint; NULL without one, also when the run has just removed it. */
static int read_checkpoint_config(const char *dir, json_t **config)
{
	char path[PATH_LEN], file[PATH_LEN];
	const int found = checkpoint_newest(dir, path);
	*config = NULL;
	if (found <= 0 || path_join(file, path, "trainer.json") < 0)
		return found < 0 ? -1 : 0;
	json_t *trainer = json_read(file), *member = json_object_get(trainer, "config");
	int rc = 0;
	if (!trainer)
		rc = path_exists(file) == 0 ? 0 : -1;
	else if (json_is_object(member))
		*config = json_incref(member);
	else
		rc = fail("%s: `config` is %s; expected an object", file, json_kind(member));
	json_decref(trainer);
	return rc;
}

/* The config of the newest start, as events.jsonl has it, for a run without a checkpoint; NULL without one. */
static json_t *started_config(const struct run *r)
{
	for (size_t i = json_array_size(r->events); i-- > 0;) {
		json_t *config = json_object_get(json_array_get(r->events, i), "config");
		if (json_is_object(config))
			return config;
	}
	return NULL;
}

/* Fails unless `dir` looks like the directory of a run. */
static int check_directory(const char *dir)
{
	char path[PATH_LEN], parent[PATH_LEN];
	struct stat st;
	if (stat(dir, &st) < 0)
		return fail("%s: %s; expected the directory of a run (its train.output_dir)%s", dir, strerror(errno),
				is_home_path(dir) ? "; " HOME_PATH_HINT : "");
	if (!S_ISDIR(st.st_mode))
		return fail("%s: is no directory; expected that of a run (its train.output_dir)", dir);
	if (path_join(path, dir, "metrics.jsonl") < 0)
		return -1;
	if (path_exists(path) != 0)
		return 0;
	if (path_join(path, dir, "trainer.json") == 0 && path_exists(path) > 0) {
		parent_of(parent, dir);
		return fail("%s is a checkpoint; expected the directory of its run: give %s", dir, parent);
	}
	if (path_join(path, dir, "table.tsv") == 0 && path_exists(path) > 0)
		return fail("%s: has no metrics.jsonl but a table of runs, as the directory of a sweep has; expected that of "
				"one run in it, or, for `ling fit`, %s", dir, path);
	return fail("%s: has no metrics.jsonl; expected the directory of a run (its train.output_dir), where `ling train` "
			"writes a line for each step", dir);
}

int run_open(struct run *r, const char *dir)
{
	*r = (struct run){.events = json_array()};
	int rc = path_copy(r->dir, dir) < 0 || check_directory(dir) < 0 ? -1 : events_read(dir, add_event, r);
	if (rc == 0)
		add_first_validation(r);
	if (rc == 0)
		rc = metrics_each(dir, add_line, r);
	if (rc == 0 && r->count > 1 && r->step[1] == 0) /* a later version's metrics may have step 0 themselves */
		rc = fail("%s/metrics.jsonl: has step 0, which events.jsonl has too; expected steps from 1 on", dir);
	if (rc == 0)
		rc = read_checkpoint_config(dir, &r->config);
	if (rc == 0 && !r->config)
		r->config = json_incref(started_config(r));
	if (rc < 0) {
		run_free(r);
		return -1;
	}
	char *full = realpath(dir, NULL); /* so that "." has a name */
	const char *name = file_name(full ? full : dir);
	path_copy(r->name, *name ? name : dir);
	free(full);
	return 0;
}

void run_free(struct run *r)
{
	for (int i = 0; i < r->num_columns; i++)
		free(r->columns[i].name), free(r->columns[i].row), free(r->columns[i].value);
	free(r->columns), free(r->step), free(r->tokens);
	string_table_free(&r->names);
	json_decref(r->events), json_decref(r->config);
	*r = (struct run){0};
}

int runs_open(struct run *runs, char *const *dirs, int n)
{
	for (int i = 0; i < n; i++)
		if (run_open(&runs[i], dirs[i]) < 0) {
			while (i-- > 0)
				run_free(&runs[i]);
			return -1;
		}
	bool same[n];
	memset(same, 0, sizeof same);
	for (int i = 0; i < n; i++)
		for (int j = 0; j < n; j++)
			same[i] |= i != j && !strcmp(runs[i].name, runs[j].name);
	for (int i = 0; i < n; i++)
		if (same[i])
			path_copy(runs[i].name, runs[i].dir);
	return 0;
}

/* Whether a path within the directory of a run is of a file that `ling train` keeps there. */
static bool is_of_training(const char *path)
{
	static const char *const names[] = {"metrics.jsonl", "events.jsonl", "samples.jsonl", "heartbeat"},
		*const directories[] = {"trace/", "trace-before/", "step-"};
	bool found = false;
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		found = found || !strcmp(path, names[i]);
	for (size_t i = 0; i < sizeof directories / sizeof *directories; i++)
		found = found || (!strncmp(path, directories[i], strlen(directories[i])) && strchr(path, '/'));
	return found;
}

int runs_check_output(char *const *dirs, int n, const char *out)
{
	char *file = realpath(out, NULL); /* NULL: it is not there */
	int rc = 0;
	for (int i = 0; file && rc == 0 && i < n; i++) {
		char *dir = realpath(dirs[i], NULL);
		const size_t length = dir ? strlen(dir) : 0;
		if (dir && !strncmp(file, dir, length) && file[length] == '/' && is_of_training(file + length + 1))
			rc = fail("%s: belongs to the run in %s, which would lose it; expected another name for the output", out,
					dirs[i]);
		free(dir);
	}
	free(file);
	return rc;
}

int run_needs_steps(const struct run *r, const char *use)
{
	return r->count ? 0 : fail("%s/metrics.jsonl: no steps to %s; expected a line for each step; let `ling train` do "
			"its first step", r->dir, use);
}

const struct column *run_column(const struct run *r, const char *name)
{
	const int64_t i = string_table_find(&r->names, name, strlen(name));
	return i < 0 ? NULL : &r->columns[i];
}

int run_elements(const struct run *r, const char *name)
{
	char element[MAX_NAME];
	int n = 0;
	while (snprintf(element, sizeof element, "%s.%d", name, n) < MAX_NAME && run_column(r, element))
		n++;
	return n;
}

/* Whether a process begins, or begins again, at an event's step: at its time the step before was over. */
static bool is_start(const json_t *event)
{
	const char *kind = json_string_value(json_object_get(event, "kind"));
	return !strcmp(kind, "start") || !strcmp(kind, "resume") || !strcmp(kind, "rollback");
}

/* Sets the times of the steps that follow `step`, and of step 0 if it is that, where step `step` ended at `time`. */
static void times_from(const struct run *r, const double *seconds, int64_t step, double time, double *times)
{
	for (int i = 0; i < r->count; i++)
		if (r->step[i] > step || step == 0)
			times[i] = time += seconds[i];
}

void run_times(const struct run *r, double *times)
{
	static const char *const members[] = {"seconds", "save_seconds"};
	double *seconds = allocate(r->count * sizeof *seconds), all = 0;
	char path[PATH_LEN];
	struct stat st = {0};
	for (int m = 0; m < 2; m++) {
		const struct column *c = run_column(r, members[m]);
		for (int i = 0; c && i < c->count; i++)
			seconds[c->row[i]] += isfinite(c->value[i]) ? c->value[i] : 0;
	}
	for (int i = 0; i < r->count; i++)
		all += seconds[i];
	if (path_join(path, r->dir, "metrics.jsonl") == 0)
		stat(path, &st);
	times_from(r, seconds, 0, st.st_mtim.tv_sec - all, times);
	const json_t *event;
	size_t i;
	json_array_foreach(r->events, i, event)
		if (is_start(event) && json_is_number(json_object_get(event, "time")))
			times_from(r, seconds, member(event, "step"), json_number_value(json_object_get(event, "time")), times);
	free(seconds);
}

/* -- series -- */

static struct series series_create(int count)
{
	struct series s = {.count = count, .step = allocate(3 * (size_t)count * sizeof *s.step)};
	s.tokens = s.step + count, s.value = s.tokens + count;
	return s;
}

void series_free(struct series *s)
{
	free(s->step);
	*s = (struct series){0};
}

/* Copies a point; value: of the copy. */
static void series_put(struct series *s, int i, const struct series *from, int at, double value)
{
	s->step[i] = from->step[at], s->tokens[i] = from->tokens[at], s->value[i] = value;
}

/* The values of a column. */
static struct series series_of(const struct run *r, const struct column *c)
{
	struct series s = series_create(c->count);
	for (int i = 0; i < c->count; i++) {
		s.step[i] = r->step[c->row[i]], s.tokens[i] = r->tokens[c->row[i]];
		s.value[i] = c->value[i];
	}
	return s;
}

/* For each row with columns name.0, name.1, ... the largest of them; NaN where one is. */
static struct series series_largest(const struct run *r, const char *name)
{
	double *largest = allocate(r->count * sizeof *largest);
	for (int i = 0; i < r->count; i++)
		largest[i] = -INFINITY; /* the row has none */
	for (int e = 0, n = run_elements(r, name); e < n; e++) {
		char element[MAX_NAME];
		snprintf(element, sizeof element, "%s.%d", name, e);
		const struct column *c = run_column(r, element);
		for (int i = 0; i < c->count; i++)
			if (!(c->value[i] <= largest[c->row[i]])) /* larger, or one of them is NaN */
				largest[c->row[i]] = isnan(largest[c->row[i]]) ? NAN : c->value[i];
	}
	struct series s = series_create(r->count);
	s.count = 0;
	for (int i = 0; i < r->count; i++)
		if (largest[i] != -INFINITY) {
			s.step[s.count] = r->step[i], s.tokens[s.count] = r->tokens[i];
			s.value[s.count++] = largest[i];
		}
	free(largest);
	return s;
}

/* Of each step, FLOP/s over the peak that the start or resume before it tells. */
static struct series series_peak_share(const struct run *r)
{
	const struct column *c = run_column(r, "tokens_per_second");
	struct series s = c ? series_of(r, c) : series_create(0), out = series_create(s.count);
	double *factor = allocate(s.count * sizeof *factor);
	const json_t *event;
	size_t e;
	json_array_foreach(r->events, e, event) {
		const double flops = json_number_value(json_object_get(event, "flops_per_token"));
		const double peak = json_number_value(json_object_get(event, "peak_flops"));
		const char *kind = json_string_value(json_object_get(event, "kind"));
		for (int i = 0; (!strcmp(kind, "start") || !strcmp(kind, "resume")) && i < s.count; i++)
			if (s.step[i] > member(event, "step"))
				factor[i] = flops > 0 && peak > 0 ? flops / peak : 0;
	}
	out.count = 0;
	for (int i = 0; i < s.count; i++)
		if (factor[i] > 0)
			series_put(&out, out.count++, &s, i, s.value[i] * factor[i]);
	series_free(&s);
	free(factor);
	return out;
}

struct series run_series(const struct run *r, const char *name)
{
	const struct column *c = run_column(r, name);
	if (c)
		return series_of(r, c);
	if (!strcmp(name, "expert_load"))
		return series_largest(r, name);
	if (!strcmp(name, "peak_share"))
		return series_peak_share(r);
	return series_create(0);
}

struct series series_thin(const struct series *s, bool by_tokens, int buckets)
{
	const double *x = by_tokens ? s->tokens : s->step;
	struct series out = series_create(s->count);
	out.count = 0;
	const double width = s->count ? (x[s->count - 1] - x[0]) / buckets : 0;
	for (int first = 0, end; first < s->count; first = end) {
		const double bucket = fmin(floor((x[first] - x[0]) / width), buckets - 1);
		int low = -1, high = -1, bad = -1;
		for (end = first; end < s->count && fmin(floor((x[end] - x[0]) / width), buckets - 1) == bucket; end++) {
			const double v = s->value[end];
			bad = bad < 0 && !isfinite(v) ? end : bad;
			low = isfinite(v) && (low < 0 || v < s->value[low]) ? end : low;
			high = isfinite(v) && (high < 0 || v > s->value[high]) ? end : high;
		}
		for (int i = first; i < end; i++)
			if (i == low || i == high || i == bad || i == 0 || i == s->count - 1)
				series_put(&out, out.count++, s, i, s->value[i]);
	}
	return out;
}

struct series series_smooth(const struct series *s, int half, bool geometric)
{
	const int n = s->count;
	struct series out = series_create(n);
	double *sum = allocate(2 * (size_t)(n + 1) * sizeof *sum), *number = sum + n + 1; /* of the values before i */
	for (int i = 0; i < n; i++) {
		const double value = geometric ? log(s->value[i]) : s->value[i];
		sum[i + 1] = sum[i] + (isfinite(value) ? value : 0);
		number[i + 1] = number[i] + (isfinite(value) ? 1 : 0);
	}
	for (int i = 0; i < n; i++) {
		const int near = i < n - 1 - i ? i : n - 1 - i, reach = near > half ? half : near > half / 4 ? near : half / 4;
		const int first = i < reach ? 0 : i - reach, end = i + reach + 1 < n ? i + reach + 1 : n;
		const double mean = (sum[end] - sum[first]) / (number[end] - number[first]);
		series_put(&out, i, s, i, number[i] == number[i + 1] ? NAN : geometric ? exp(mean) : mean);
	}
	free(sum);
	return out;
}
