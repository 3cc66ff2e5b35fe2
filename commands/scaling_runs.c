/*
 * commands/scaling_runs.c - the runs that scaling laws are fitted to: from the directory of a run, from and to a table.
 */
#define _GNU_SOURCE
#include "commands/scaling_runs.h"

#include "commands/runs.h"
#include "model/parameters.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

const char *const scaling_columns[NUM_SCALING_COLUMNS] = {
	"parameters", "active_parameters", "non_embedding", "active_non_embedding", "tokens", "flops", "loss",
	"learning_rate", "batch_tokens", "seed", "activation_ratio", "granularity",
};

void scaling_runs_free(struct scaling_runs *runs)
{
	for (int i = 0; i < runs->count; i++)
		free(runs->run[i].name), free(runs->run[i].rest), free(runs->run[i].text), free(runs->run[i].left_out);
	free(runs->run);
	*runs = (struct scaling_runs){0};
}

/* Adds a run of which nothing is known but its name, n bytes, in which control characters become question marks. */
static struct scaling_run *add_run(struct scaling_runs *runs, const char *name, size_t n)
{
	runs->run = grow(runs->run, runs->count, &runs->room, 1, sizeof *runs->run);
	struct scaling_run *r = &runs->run[runs->count++];
	*r = (struct scaling_run){.name = strndup(name, n)};
	if (!r->name)
		out_of_memory(n);
	for (char *at = r->name; *at; at++)
		*at = (uint8_t)*at < 32 || *at == 127 ? '?' : *at;
	for (int c = 0; c < NUM_SCALING_COLUMNS; c++)
		r->value[c] = NAN;
	return r;
}

/* ------------------------------------------------------------------------------------------ the directory of a run */

int scaling_run_describe(struct scaling_run *r, const struct model_config *m, int seq_len, double peak_lr,
		double batch, double seed)
{
	struct parameter_count count[NUM_PARAMETER_PARTS + 1];
	double flops, *v = r->value;
	if (count_parameters(count, &flops, m, seq_len) < 0)
		return -1;
	v[SCALING_PARAMETERS] = count[NUM_PARAMETER_PARTS].total;
	v[SCALING_ACTIVE] = count[NUM_PARAMETER_PARTS].active;
	v[SCALING_NON_EMBEDDING] = v[SCALING_PARAMETERS], v[SCALING_ACTIVE_NON_EMBEDDING] = v[SCALING_ACTIVE];
	for (int i = 0; i < NUM_PARAMETER_PARTS; i++)
		if (!strcmp(parameter_parts[i].name, "embedding") || !strcmp(parameter_parts[i].name, "head")) {
			v[SCALING_NON_EMBEDDING] -= count[i].total;
			v[SCALING_ACTIVE_NON_EMBEDDING] -= count[i].active;
		}
	v[SCALING_FLOPS] = flops * v[SCALING_TOKENS];
	v[SCALING_LEARNING_RATE] = peak_lr;
	v[SCALING_BATCH] = batch * seq_len;
	v[SCALING_SEED] = seed;
	const bool dense = m->first_k_dense_replace >= m->num_hidden_layers;
	v[SCALING_ACTIVATION_RATIO] = dense ? 1 : (double)(m->num_experts_per_tok + m->num_shared_experts) /
			(m->num_experts + m->num_shared_experts);
	v[SCALING_GRANULARITY] = dense ? NAN : 2.0 * m->hidden_size / m->moe_intermediate_size;
	return 0;
}

/* The config of a run without the seed and what cannot change its final loss, but by rounding; as text. */
static char *config_rest(const json_t *config)
{
	static const char *const sections[] = {"checkpoint", "health", "log", "trace"}, *const keys[][2] = {
		{"train", "seed"}, {"train", "output_dir"}, {"train", "micro_batch"}, {"train", "recompute"},
		{"train", "stop_at_step"}, {"train", "dump"}, {"parallel", "tensor"}, {"parallel", "expert"},
		{"eval", "every"}, {"eval", "at_start"}, {"eval", "samples"}, {"eval", "sample_file"},
		{"eval", "sample_tokens"}, {"eval", "sample_temperature"},
	};
	json_t *copy = json_deep_copy(config);
	for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
		json_object_del(copy, sections[i]);
	for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
		json_object_del(json_object_get(copy, keys[i][0]), keys[i][1]);
	char *text = json_text(copy, JSON_COMPACT | JSON_SORT_KEYS);
	json_decref(copy);
	return text;
}

/* What a validation loss is of: other files, or another vocabulary, and it cannot be compared. */
static char *config_validation(const json_t *config)
{
	json_t *of = json_pack("{s:O*, s:O*, s:O*}", "data.valid", json_at(config, "data.valid"), "data.tokenizer",
			json_at(config, "data.tokenizer"), "eval.max_windows", json_at(config, "eval.max_windows"));
	char *text = json_text(of, JSON_COMPACT | JSON_SORT_KEYS);
	json_decref(of);
	return text;
}

/* The last step of a run by the newest event that tells; 0: none does. */
static int64_t last_step(const struct run *r)
{
	for (size_t i = json_array_size(r->events); i-- > 0;) {
		const json_t *steps = json_object_get(json_array_get(r->events, i), "total_steps");
		if (json_is_integer(steps))
			return json_integer_value(steps);
	}
	return 0;
}

/* Why a run has no final loss, or NULL; else *loss is it. */
static const char *final_loss(const struct run *r, double *loss, char why[128])
{
	const int64_t end = last_step(r), step = r->count ? r->step[r->count - 1] : 0;
	const struct column *c = run_column(r, "valid_loss");
	if (!r->config)
		return "no event and no checkpoint has its config";
	if (!end)
		return "no event says how many steps it has";
	if (step < end) {
		snprintf(why, 128, "it has not ended: step %" PRId64 " of %" PRId64, step, end);
		return why;
	}
	if (!c || c->row[c->count - 1] != r->count - 1)
		return "it was not validated after its last step (data.valid)";
	*loss = c->value[c->count - 1];
	return isfinite(*loss) && *loss > 0 ? NULL : "its validation loss is not finite";
}

static double number_at(const json_t *config, const char *path)
{
	const json_t *number = json_at(config, path);
	return json_is_number(number) ? json_number_value(number) : NAN;
}

static int add_directory(struct scaling_runs *runs, const char *dir)
{
	struct run run;
	struct model_config model;
	char why[128];
	if (run_open(&run, dir) < 0)
		return -1;
	struct scaling_run *r = add_run(runs, run.name, strlen(run.name));
	const char *reason = final_loss(&run, &r->value[SCALING_LOSS], why);
	const json_t *config = run.config;
	int rc = 0;
	if (!reason && !json_is_object(json_object_get(config, "model")))
		reason = "its config has no model";
	if (!reason && !(number_at(config, "data.seq_len") >= 1))
		reason = "its config has no data.seq_len";
	if (!reason) {
		json_t *shape = json_copy(json_object_get(config, "model"));
		json_object_del(shape, "rope_scaling"); /* it counts for nothing here, and Hugging Face writes it otherwise */
		r->value[SCALING_TOKENS] = run.tokens[run.count - 1];
		rc = config_from_json(&model, shape, dir) < 0 ? -1 : scaling_run_describe(r, &model,
				(int)number_at(config, "data.seq_len"), number_at(config, "schedule.peak_lr"),
				number_at(config, "train.batch"), number_at(config, "train.seed"));
		json_decref(shape);
	}
	r->rest = config ? config_rest(config) : copy_string("");
	r->text = config ? config_validation(config) : copy_string("");
	r->left_out = reason ? copy_string(reason) : NULL;
	run_free(&run);
	return rc;
}

/* -------------------------------------------------------------------------------------------------------- a table */

enum { COLUMN_RUN = NUM_SCALING_COLUMNS, COLUMN_REST }; /* beside those of numbers */

struct table {
	const char *path;
	int line;                    /* from 1 */
	int *column;                 /* [num] which one each is */
	char **name;                 /* [num] */
	int num;
};

/* Cuts a line, which it changes, at its tabs. Returns the number of parts, of which at most `most` are in parts. */
static int cut(char *line, char **parts, int most)
{
	int n = 0;
	line[strcspn(line, "\r\n")] = 0;
	for (char *at = line; at; n++) {
		char *tab = strchr(at, '\t');
		if (tab)
			*tab = 0;
		if (n < most)
			parts[n] = at;
		at = tab ? tab + 1 : NULL;
	}
	return n;
}

/* The column of that name; -1 with the reason where there is none. */
static int find_column(const struct table *t, const char *name)
{
	char shown[64];
	const char *nearest = "run";
	int best = edit_distance(name, nearest);
	if (!strcmp(name, "run"))
		return COLUMN_RUN;
	if (strchr(name, '.'))
		return COLUMN_REST;
	for (int i = 0; i < NUM_SCALING_COLUMNS; i++) {
		const int distance = edit_distance(name, scaling_columns[i]);
		if (!distance)
			return i;
		if (distance < best)
			best = distance, nearest = scaling_columns[i];
	}
	return fail("%s:%d: `%s` is no column of a table of runs; the nearest is `%s`. A key of a config, with a dot in "
			"its name, may be a column too", t->path, t->line, printable(shown, name), nearest);
}

/* Reads the line that names the columns. */
static int read_header(struct table *t, char *line)
{
	static const int required[] = {COLUMN_RUN, SCALING_FLOPS, SCALING_LOSS};
	t->num = 1;
	for (const char *c = line; *c; c++)
		t->num += *c == '\t';
	t->column = allocate(t->num * sizeof *t->column);
	t->name = allocate(t->num * sizeof *t->name);
	char **parts = allocate(t->num * sizeof *parts);
	cut(line, parts, t->num);
	int rc = 0;
	for (int i = 0; i < t->num && rc == 0; i++) {
		t->name[i] = copy_string(parts[i]);
		t->column[i] = find_column(t, parts[i]);
		rc = t->column[i] < 0 ? -1 : 0;
		for (int j = 0; j < i && rc == 0; j++)
			if (!strcmp(t->name[i], t->name[j]))
				rc = fail("%s:%d: column `%s` is there twice; expected it once", t->path, t->line, t->name[i]);
	}
	for (size_t i = 0; i < sizeof required / sizeof *required && rc == 0; i++) {
		bool found = false;
		for (int j = 0; j < t->num; j++)
			found |= t->column[j] == required[i];
		if (!found)
			rc = fail("%s:%d: has no column `%s`; expected the names of the columns, with a tab between two, and among "
					"them run, flops and loss", t->path, t->line,
					required[i] == COLUMN_RUN ? "run" : scaling_columns[required[i]]);
	}
	free(parts);
	return rc;
}

/* Reads a number of column c. */
static int read_number(const struct table *t, struct scaling_run *r, int c, const char *text)
{
	char *end, shown[64];
	if (!strcmp(text, "-") || (c == SCALING_LOSS && !strcasecmp(text, "nan")))
		return 0;
	errno = 0;
	const double x = strtod(text, &end);
	const double most = c == SCALING_ACTIVATION_RATIO ? 1 : c == SCALING_LEARNING_RATE ? 1e6 : c == SCALING_LOSS ? 1e4
			: 1e40;
	const bool number = end != text && !*end && isfinite(x) && (*text < 9 || *text > 32);
	if (c == SCALING_SEED ? number && x >= 0 && x == floor(x) : number && x > 1e-40 && x <= most) {
		r->value[c] = x;
		return 0;
	}
	if (c == SCALING_SEED)
		return fail("%s:%d: seed `%s` of run %s; expected a whole number, or - where it is not known", t->path, t->line,
				printable(shown, text), r->name);
	return fail("%s:%d: %s `%s` of run %s; expected a number above 0 and at most %g, or - where it is not known",
			t->path, t->line, scaling_columns[c], printable(shown, text), r->name, most);
}

/* Reads the line of a run. */
static int read_line(const struct table *t, struct scaling_runs *runs, char *line)
{
	char **parts = allocate(t->num * sizeof *parts);
	const int n = cut(line, parts, t->num);
	int rc = n == t->num ? 0 : fail("%s:%d: has %d columns; expected %d, as the first line names them, with a tab "
			"between two", t->path, t->line, n, t->num);
	struct scaling_run *r = NULL;
	struct text rest = {0};
	for (int i = 0; i < t->num && rc == 0; i++)
		if (t->column[i] == COLUMN_RUN) {
			rc = *parts[i] ? 0 : fail("%s:%d: the run has no name in column `run`", t->path, t->line);
			r = rc == 0 ? add_run(runs, parts[i], strlen(parts[i])) : NULL;
		}
	for (int i = 0; i < t->num && rc == 0; i++)
		if (t->column[i] == COLUMN_REST)
			text_printf(&rest, "%s=%s\t", t->name[i], parts[i]);
		else if (t->column[i] != COLUMN_RUN)
			rc = read_number(t, r, t->column[i], parts[i]);
	if (r) {
		r->rest = rest.data ? rest.data : copy_string("");
		r->text = copy_string("");
		r->left_out = isnan(r->value[SCALING_LOSS]) ? copy_string("it has no loss") : isnan(r->value[SCALING_FLOPS])
				? copy_string("its FLOPs are not known") : NULL;
	}
	free(parts);
	return rc;
}

static int add_table(struct scaling_runs *runs, const char *path)
{
	struct table t = {.path = path};
	FILE *f = fopen(path, "r");
	char *line = NULL;
	size_t room = 0;
	ssize_t n;
	int rc = f ? 0 : fail("%s: %s; expected the directory of a run, or a table of runs", path, strerror(errno));
	while (rc == 0 && (n = getline(&line, &room, f)) >= 0) {
		t.line++;
		if (strlen(line) != (size_t)n)
			rc = fail("%s:%d: holds a byte 0; expected a table as text", path, t.line);
		else if (*line != '#' && line[strspn(line, " \t\r\n")])
			rc = t.num ? read_line(&t, runs, line) : read_header(&t, line);
	}
	if (rc == 0 && ferror(f))
		rc = fail("%s: %s", path, strerror(errno));
	if (rc == 0 && !t.num)
		rc = fail("%s: is empty; expected a line with the names of the columns, and a line for each run", path);
	for (int i = 0; i < t.num && t.name; i++)
		free(t.name[i]);
	free(t.name), free(t.column), free(line);
	if (f)
		fclose(f);
	return rc;
}

int scaling_runs_add(struct scaling_runs *runs, const char *path)
{
	struct stat st;
	const bool is_there = stat(path, &st) == 0;
	if ((is_there && !S_ISDIR(st.st_mode)) || (!is_there && has_suffix(path, ".tsv")))
		return add_table(runs, path);
	return add_directory(runs, path);
}

/* Whether two runs are the same but for the loss and, unless with_seed, the seed. */
static bool same_run(const struct scaling_run *a, const struct scaling_run *b, bool with_seed)
{
	for (int c = 0; c < NUM_SCALING_COLUMNS; c++) {
		const bool same = a->value[c] == b->value[c] || (isnan(a->value[c]) && isnan(b->value[c]));
		if (!same && c != SCALING_LOSS && (c != SCALING_SEED || with_seed))
			return false;
	}
	return !strcmp(a->rest, b->rest);
}

bool scaling_runs_differ_in_seed(const struct scaling_run *a, const struct scaling_run *b)
{
	return !isnan(a->value[SCALING_SEED]) && !isnan(b->value[SCALING_SEED]) && same_run(a, b, false);
}

int scaling_runs_check(const struct scaling_runs *runs)
{
	for (int i = 0; i < runs->count; i++)
		for (int j = 0; j < i; j++) {
			const struct scaling_run *a = &runs->run[j], *b = &runs->run[i];
			if (!strcmp(a->name, b->name))
				return fail("two runs have the name %s; expected each run once, under a name of its own "
						"(the table.tsv of a sweep has all of its runs)", a->name);
			if (a->left_out || b->left_out)
				continue;
			if (same_run(a, b, true))
				return fail("the runs %s and %s are the same but for the loss; expected each run once, and where only "
						"the seed differs the seed in column `seed`", a->name, b->name);
			if (strcmp(a->text, b->text))
				return fail("the losses of %s and %s are of different texts: %s and %s; expected the same validation "
						"of all runs", a->name, b->name, a->text, b->text);
		}
	return 0;
}

/* With as few digits as give the same number again; "-" for NaN. */
static void write_value(FILE *f, double x)
{
	char text[32] = "-";
	if (!isnan(x) && x == floor(x) && fabs(x) < 1e15)
		snprintf(text, sizeof text, "%.0f", x);
	else if (!isnan(x))
		for (int digits = 6; snprintf(text, sizeof text, "%.*g", digits, x), digits < 17 && strtod(text, NULL) != x;)
			digits++;
	fputs(text, f);
}

void scaling_table_header(FILE *f, const struct strings *keys)
{
	fputs("run", f);
	for (int c = 0; c < NUM_SCALING_COLUMNS; c++)
		fprintf(f, "\t%s", scaling_columns[c]);
	for (int64_t i = 0; i < keys->count; i++)
		fprintf(f, "\t%s", keys->text[i]);
	putc('\n', f);
}

void scaling_table_row(FILE *f, const struct scaling_run *r, const char *const *values, int num_values)
{
	fputs(r->name, f);
	for (int c = 0; c < NUM_SCALING_COLUMNS; c++) {
		putc('\t', f);
		write_value(f, r->value[c]);
	}
	for (int i = 0; i < num_values; i++)
		fprintf(f, "\t%s", values[i]);
	putc('\n', f);
}
