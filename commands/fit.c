/*
 * commands/fit.c - `ling fit`: scaling laws from runs; the largest run held out; the report and the picture.
 */
#define _GNU_SOURCE
#include "commands/fit.h"

#include "commands/fit_picture.h"
#include "commands/result.h"
#include "commands/scaling.h"
#include "commands/scaling_runs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define CONFIDENCE 0.95
#define SAME 1.01      /* numbers that are no further apart count as the same tokens, FLOPs */
#define SAME_COMPUTE 1.1 /* and these as the same compute */

enum { FIT_ALL, FIT_COMPUTE, FIT_SIZE, FIT_LEARNING_RATE, FIT_BATCH, FIT_LEVERAGE, NUM_FITS };
static const char *const fit_names[] = {"all", "compute", "size", "learning-rate", "batch", "leverage", NULL};
static const char *const size_names[] = {"parameters", "active_parameters", "non_embedding", "active_non_embedding",
	NULL};                       /* as enum scaling_column has them */

struct fit_options { int law, size, draws; uint64_t seed; const char *out; bool json; };

/* ------------------------------------------------------------------------------------------- what belongs together */

/* A run that can be used. Runs of one setting differ in the seed alone. Settings of one grid have the same model,
 * tokens and FLOPs, and differ in learning rate, batch or other keys. A level is of one compute. Laws are of models
 * with one activation ratio, which is that of most runs; the others count for efficiency leverage alone. */
struct member {
	const struct scaling_run *run;
	int setting, grid, level;
	double mean;                 /* loss of the setting: the mean over its seeds */
	bool best;                   /* its setting has the lowest mean of its grid */
	bool main;                   /* it has the activation ratio of most runs */
};

struct study {
	const struct fit_options *options;
	struct scaling_runs runs;
	struct member *member;       /* [count] by rising FLOPs */
	int count, settings, grids, levels;
	int top;                     /* the level of the largest compute, of runs that are `main`: it is held out */
};

static double value_of(const struct member *m, int column)
{
	return m->run->value[column];
}

/* For qsort: by FLOPs, then by the order in which they were given. */
static int compare_members(const void *a, const void *b)
{
	const struct scaling_run *x = ((const struct member *)a)->run, *y = ((const struct member *)b)->run;
	const double p = x->value[SCALING_FLOPS], q = y->value[SCALING_FLOPS];
	return p != q ? (p > q) - (p < q) : (x > y) - (x < y);
}

static bool near(double a, double b)
{
	return a == b || (isnan(a) && isnan(b)) || fmax(a, b) <= SAME * fmin(a, b);
}

static bool same_grid(const struct member *a, const struct member *b)
{
	static const int columns[] = {SCALING_PARAMETERS, SCALING_ACTIVE, SCALING_NON_EMBEDDING,
		SCALING_ACTIVE_NON_EMBEDDING, SCALING_TOKENS, SCALING_FLOPS, SCALING_ACTIVATION_RATIO, SCALING_GRANULARITY};
	for (size_t i = 0; i < sizeof columns / sizeof *columns; i++) {
		const double p = value_of(a, columns[i]), q = value_of(b, columns[i]);
		const bool about = columns[i] == SCALING_TOKENS || columns[i] == SCALING_FLOPS;
		if (about ? !near(p, q) : p != q && !(isnan(p) && isnan(q)))
			return false;
	}
	return true;
}

static bool same_ratio(const struct member *a, const struct member *b)
{
	return near(value_of(a, SCALING_ACTIVATION_RATIO), value_of(b, SCALING_ACTIVATION_RATIO));
}

/* Fills s->member from the runs that can be used. */
static void study_runs(struct study *s)
{
	s->member = allocate(s->runs.count * sizeof *s->member);
	for (int i = 0; i < s->runs.count; i++)
		if (!s->runs.run[i].left_out)
			s->member[s->count++].run = &s->runs.run[i];
	if (s->count)
		qsort(s->member, s->count, sizeof *s->member, compare_members);
	for (int i = 0, first = 0; i < s->count; i++) {
		struct member *m = &s->member[i];
		m->setting = m->grid = -1;
		for (int j = 0; j < i; j++) {
			m->setting = scaling_runs_differ_in_seed(s->member[j].run, m->run) ? s->member[j].setting : m->setting;
			m->grid = m->grid < 0 && same_grid(&s->member[j], m) ? s->member[j].grid : m->grid;
		}
		m->setting = m->setting < 0 ? s->settings++ : m->setting;
		m->grid = m->grid < 0 ? s->grids++ : m->grid;
		if (i == 0 || value_of(m, SCALING_FLOPS) > SAME_COMPUTE * value_of(&s->member[first], SCALING_FLOPS))
			s->levels++, first = i;
		m->level = s->levels - 1;
	}
	for (int i = 0; i < s->count; i++) {
		double sum = 0;
		int n = 0;
		for (int j = 0; j < s->count; j++)
			if (s->member[j].setting == s->member[i].setting)
				sum += value_of(&s->member[j], SCALING_LOSS), n++;
		s->member[i].mean = sum / n;
	}
	for (int i = 0; i < s->count; i++) {
		int best = i;
		for (int j = 0; j < s->count; j++)
			if (s->member[j].grid == s->member[i].grid && s->member[j].mean < s->member[best].mean)
				best = j;
		s->member[i].best = s->member[best].mean == s->member[i].mean;
	}
	const struct member *most = NULL;
	for (int i = 0, runs = 0; i < s->count; i++) {
		int n = 0;
		for (int j = 0; j < s->count; j++)
			n += same_ratio(&s->member[i], &s->member[j]);
		if (n > runs)
			runs = n, most = &s->member[i];
	}
	for (int i = 0; i < s->count; i++) {
		s->member[i].main = same_ratio(&s->member[i], most);
		s->top = s->member[i].main ? s->member[i].level : s->top;
	}
}

/* The noise between seeds; JSON null where no two runs differ in the seed alone. */
static json_t *seed_noise(const struct study *s)
{
	double square = 0, mean = 0;
	int runs = 0, settings = 0;
	for (int k = 0; k < s->settings; k++) {
		int n = 0;
		double sum = 0, at = 0;
		for (int i = 0; i < s->count; i++)
			if (s->member[i].setting == k)
				n++, at = s->member[i].mean, sum += pow(value_of(&s->member[i], SCALING_LOSS) - at, 2);
		if (n > 1)
			settings++, runs += n, square += sum, mean += n * at;
	}
	if (!settings)
		return json_null();
	const double noise = sqrt(square / (runs - settings));
	return json_pack("{s:f, s:f, s:i, s:i}", "nats", noise, "percent", 100 * noise / (mean / runs), "runs", runs,
			"settings", settings);
}

/* ------------------------------------------------------------------------------------------------- a selection */

/* The runs that a law is fitted to: which members. */
struct selection { bool *in; int count; };

static bool has_family(const struct member *m, const struct member *family)
{
	return same_ratio(m, family) && near(value_of(m, SCALING_GRANULARITY), value_of(family, SCALING_GRANULARITY));
}

/* The compute-optimal frontier below level `end`: of each level the setting of the lowest loss, where no level below
 * has a lower one. family: of models with its experts; NULL: of those that are `main`. */
static struct selection select_frontier(const struct study *s, int end, const struct member *family)
{
	struct selection out = {.in = allocate(s->count * sizeof *out.in)};
	double lowest = INFINITY;
	for (int level = 0; level < end; level++) {
		const struct member *best = NULL;
		for (int i = 0; i < s->count; i++) {
			const struct member *m = &s->member[i];
			if (m->level == level && (family ? has_family(m, family) : m->main) && (!best || m->mean < best->mean))
				best = m;
		}
		if (!best || best->mean >= lowest)
			continue;
		lowest = best->mean;
		for (int i = 0; i < s->count; i++)
			if (s->member[i].setting == best->setting && s->member[i].level == level)
				out.in[i] = true, out.count++;
	}
	return out;
}

/* What a law of the loss is fitted to: the frontier, or for LAW_SIZE the best settings of all grids. */
static struct selection select_for(const struct study *s, enum scaling_form form, int end)
{
	if (form == LAW_COMPUTE)
		return select_frontier(s, end, NULL);
	struct selection out = {.in = allocate(s->count * sizeof *out.in)};
	for (int i = 0; i < s->count; i++)
		if (s->member[i].best && s->member[i].main && s->member[i].level < end)
			out.in[i] = true, out.count++;
	return out;
}

/* The columns of x and y. */
static int column_of(const struct study *s, enum scaling_form form, bool y)
{
	return form == LAW_COMPUTE ? SCALING_FLOPS : y ? SCALING_TOKENS : (int)s->options->size;
}

/* Fits a law to a selection. */
static int fit_selection(struct scaling_law *law, enum scaling_form form, const struct study *s,
		const struct selection *selection, uint64_t seed)
{
	const int n = selection->count;
	double *x = allocate(3 * n * sizeof *x), *y = x + n, *loss = y + n;
	int count = 0, rc = 0;
	for (int i = 0; i < s->count && rc == 0; i++) {
		const struct member *m = &s->member[i];
		if (!selection->in[i])
			continue;
		x[count] = value_of(m, column_of(s, form, false)), y[count] = value_of(m, column_of(s, form, true));
		for (int d = 0; d < 2 && rc == 0; d++)
			if (isnan(d ? y[count] : x[count]))
				rc = fail("%s: `%s` of run %s is not known; expected it of each run", scaling_forms[form].formula,
						scaling_columns[column_of(s, form, d)], m->run->name);
		loss[count++] = value_of(m, SCALING_LOSS);
	}
	const struct scaling_points points = {count, x, y, loss};
	if (rc == 0)
		rc = scaling_fit(law, form, &points, s->options->draws, seed);
	free(x);
	return rc;
}

/* ------------------------------------------------------------------------------------------------ the laws of loss */

/* The run that is held out: of the largest compute that of the lowest loss. */
static const struct member *held_out_member(const struct study *s)
{
	const struct member *held = NULL;
	for (int i = 0; i < s->count; i++) {
		const struct member *m = &s->member[i];
		if (m->level == s->top && m->main && (!held || m->mean < held->mean))
			held = m;
	}
	return held;
}

/* What the law that was fitted without the largest level says of it. */
static json_t *held_out_report(const struct study *s, const struct scaling_law *law, const struct selection *rest,
		const struct member *held)
{
	const double x = value_of(held, column_of(s, law->form, false)), y = value_of(held, column_of(s, law->form, true));
	const double predicted = scaling_loss(law, x, y), error = predicted - held->mean;
	const struct scaling_interval interval = scaling_run_interval(law, x, y, CONFIDENCE);
	double largest = 0;
	int seeds = 0;
	json_t *without = json_array();
	for (int i = 0; i < s->count; i++) {
		largest = rest->in[i] ? fmax(largest, value_of(&s->member[i], SCALING_FLOPS)) : largest;
		seeds += s->member[i].setting == held->setting;
		if (s->member[i].level == s->top && s->member[i].main)
			json_array_append_new(without, json_cstring(s->member[i].run->name));
	}
	return json_pack("{s:o, s:i, s:o, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:f, s:o}", "run",
			json_cstring(held->run->name), "seeds", seeds, "without", without, "flops", value_of(held, SCALING_FLOPS),
			"ratio", value_of(held, SCALING_FLOPS) / largest, "loss", held->mean, "predicted", predicted, "low",
			interval.low, "high", interval.high, "error", error, "percent", 100 * error / held->mean, "law",
			scaling_law_to_json(law, CONFIDENCE, false));
}

static json_t *names_of(const struct study *s, const struct selection *selection)
{
	json_t *names = json_array();
	for (int i = 0; i < s->count; i++)
		if (selection->in[i])
			json_array_append_new(names, json_cstring(s->member[i].run->name));
	return names;
}

/* Fits a law of the loss to all runs, and to all but those of the largest compute, and adds it to the report. The laws
 * are the caller's: of all runs, and of the others. */
static int fit_loss(json_t *report, const struct study *s, enum scaling_form form, struct scaling_law laws[2])
{
	struct selection all = select_for(s, form, s->top + 1), rest = select_for(s, form, s->top);
	const struct member *held = held_out_member(s);
	char why[sizeof error_text];
	int rc = fit_selection(&laws[0], form, s, &all, s->options->seed);
	if (rc < 0 && form == LAW_COMPUTE && all.count < s->count) {
		memcpy(why, error_text, sizeof why);
		rc = fail("the compute-optimal frontier has %d of %d runs, and that is too few: %.2000s", all.count, s->count,
				why);
	} else if (rc == 0 && fit_selection(&laws[1], form, s, &rest, s->options->seed) < 0) {
		memcpy(why, error_text, sizeof why);
		rc = fail("the largest run, %s, is held out, and the others are too few: %.2000s", held->run->name, why);
	}
	if (rc == 0) {
		json_t *law = scaling_law_to_json(&laws[0], CONFIDENCE, true);
		if (form == LAW_SIZE)
			json_object_set_new(law, "column", json_string(scaling_columns[s->options->size]));
		json_object_set_new(law, "runs", names_of(s, &all));
		json_object_set_new(law, "held_out", held_out_report(s, &laws[1], &rest, held));
		json_object_set_new(report, scaling_forms[form].name, law);
	}
	free(all.in), free(rest.in);
	return rc;
}

/* ------------------------------------------------------------------------------------- learning rate and batch */

/* Settings of a grid, for scaling_optimum(). */
struct grid_settings { double *rate, *batch, *loss; int count; };

static struct grid_settings settings_of(const struct study *s, int number)
{
	struct grid_settings g = {.rate = allocate(3 * (size_t)s->count * sizeof *g.rate)};
	g.batch = g.rate + s->count, g.loss = g.batch + s->count;
	for (int i = 0; i < s->count; i++) {
		const struct member *m = &s->member[i];
		const double rate = value_of(m, SCALING_LEARNING_RATE), batch = value_of(m, SCALING_BATCH);
		if (m->grid != number || isnan(rate) || isnan(batch))
			continue;
		int at = 0;
		while (at < g.count && (g.rate[at] != rate || g.batch[at] != batch))
			at++;
		if (at == g.count)
			g.rate[at] = rate, g.batch[at] = batch, g.loss[at] = m->mean, g.count++;
		g.loss[at] = fmin(g.loss[at], m->mean);
	}
	return g;
}

/* Adds the best learning rate (which 0) or batch (1) of each compute, and a power law through them. */
static int fit_optimum(json_t *report, const struct study *s, int which, struct power_law *law)
{
	static const char *const names[] = {"learning_rate", "batch_tokens"};
	double *compute = allocate(2 * (size_t)s->levels * sizeof *compute), *value = compute + s->levels;
	json_t *optima = json_array();
	int n = 0;
	for (int level = 0; level < s->levels; level++) {
		struct optimum best = {.method = {OPTIMUM_NONE, OPTIMUM_NONE}};
		double lowest = INFINITY, flops = 0;
		int runs = 0;
		for (int i = 0; i < s->count; i++) {
			if (s->member[i].level != level || !s->member[i].main || s->member[i].mean >= lowest)
				continue;
			struct grid_settings g = settings_of(s, s->member[i].grid);
			const struct optimum o = g.count ? scaling_optimum(g.rate, g.batch, g.loss, g.count) : best;
			if (g.count && o.method[which] != OPTIMUM_NONE)
				best = o, lowest = g.loss[o.best], flops = value_of(&s->member[i], SCALING_FLOPS), runs = g.count;
			free(g.rate);
		}
		if (best.method[which] == OPTIMUM_NONE)
			continue;
		compute[n] = flops, value[n++] = best.value[which];
		json_array_append_new(optima, json_pack("{s:f, s:f, s:s, s:b, s:f, s:i}", "flops", flops, "value",
				best.value[which], "method", optimum_methods[best.method[which]], "edge",
				best.method[which] == OPTIMUM_EDGE, "lowest_loss", lowest, "settings", runs));
	}
	int rc = n >= 2 ? power_law_fit(law, compute, value, n) : fail("%s: expected runs of at least 2 computes in which "
			"it varies while model and tokens stay the same, found %d", names[which], n);
	if (rc == 0) {
		json_t *json = power_law_to_json(law, CONFIDENCE);
		json_object_set(json, "optima", optima);
		json_object_set_new(report, names[which], json);
	}
	json_decref(optima);
	free(compute);
	return rc;
}

/* ------------------------------------------------------------------------------------------- efficiency leverage */

/* The leverage of the models with the experts of `m` over those of the law `base`, at nine computes; where their runs
 * determine no law, the reason instead. number: another one for each family, so that their draws are independent of
 * each other and of the base's. */
static json_t *family_report(const struct study *s, const struct scaling_law *base, const struct member *m, int number)
{
	json_t *family = json_pack("{s:f, s:o}", "activation_ratio", value_of(m, SCALING_ACTIVATION_RATIO), "granularity",
			result_number(value_of(m, SCALING_GRANULARITY)));
	struct selection chosen = select_frontier(s, s->levels, m);
	struct scaling_law law = {0};
	if (fit_selection(&law, LAW_COMPUTE, s, &chosen, s->options->seed + 1000003 * (uint64_t)number) < 0) {
		json_object_set_new(family, "why", json_cstring(error_text));
		free(chosen.in);
		return family;
	}
	json_t *at = json_array();
	double least = law.most_x;
	for (int i = 0; i < s->count; i++)
		least = chosen.in[i] ? fmin(least, value_of(&s->member[i], SCALING_FLOPS)) : least;
	for (int k = 0; k <= 8; k++) {
		const double compute = least * pow(law.most_x / least, k / 8.0);
		const double leverage = scaling_leverage(base, &law, compute);
		const struct scaling_interval interval = scaling_leverage_interval(base, &law, compute, CONFIDENCE);
		json_array_append_new(at, json_pack("{s:f, s:f, s:o, s:o, s:o, s:b}", "flops", compute, "loss",
				scaling_loss(&law, compute, 0), "leverage", result_number(leverage), "low", result_number(interval.low),
				"high", result_number(interval.high), "extrapolates", !(compute * leverage <= base->most_x)));
	}
	json_object_set_new(family, "at", at);
	json_object_set_new(family, "law", scaling_law_to_json(&law, CONFIDENCE, false));
	free(chosen.in);
	scaling_law_free(&law);
	return family;
}

/* Fits L(C) to the dense runs and to those of each activation ratio and granularity, and adds the leverages. */
static int fit_leverage(json_t *report, const struct study *s)
{
	const struct member *dense = NULL;
	json_t *families = json_array();
	struct scaling_law base = {0};
	int rc = 0, fitted = 0;
	for (int i = 0; i < s->count; i++)
		dense = value_of(&s->member[i], SCALING_ACTIVATION_RATIO) == 1 ? &s->member[i] : dense;
	if (!dense)
		rc = fail("efficiency leverage: expected runs of dense models, of activation_ratio 1, found none");
	if (rc == 0) {
		struct selection chosen = select_frontier(s, s->levels, dense);
		rc = fit_selection(&base, LAW_COMPUTE, s, &chosen, s->options->seed);
		free(chosen.in);
	}
	for (int i = 0; i < s->count && rc == 0; i++) {
		const struct member *m = &s->member[i];
		bool seen = !(value_of(m, SCALING_ACTIVATION_RATIO) < 1);
		for (int j = 0; j < i; j++)
			seen |= has_family(&s->member[j], m);
		if (!seen) {
			json_t *family = family_report(s, &base, m, (int)json_array_size(families) + 1);
			fitted += !json_object_get(family, "why");
			json_array_append_new(families, family);
		}
	}
	if (rc == 0 && !fitted)
		rc = json_array_size(families) ? -1 : fail("efficiency leverage: expected runs of models with experts, of "
				"activation_ratio below 1, found none");
	if (rc == 0)
		json_object_set_new(report, "leverage", json_pack("{s:o, s:O}", "dense_law", scaling_law_to_json(&base,
				CONFIDENCE, false), "families", families));
	json_decref(families);
	scaling_law_free(&base);
	return rc;
}

/* -------------------------------------------------------------------------------------------------------- report */

static const char *interval_text(char out[64], const json_t *value, const char *low, const char *high)
{
	const double a = result_double(value, low), b = result_double(value, high);
	if (isnan(a) && isnan(b))
		return "(no interval)";
	if (isnan(b))
		snprintf(out, 64, "[%.4g, no bound]", a);
	else
		snprintf(out, 64, "[%.4g, %.4g]", a, b);
	return out;
}

static void print_parameters(const json_t *law)
{
	const char *name;
	json_t *parameter;
	char interval[64];
	json_object_foreach(json_object_get(law, "parameters"), name, parameter)
		printf("  %s  %-11.5g %s\n", name, result_double(parameter, "value"), interval_text(interval, parameter, "low",
				"high"));
	printf("  residuals %.2g %%\n", 100 * result_double(law, "sigma"));
	if (json_object_get(law, "allocation"))
		printf("  for the lowest loss, N grows as C^%.3f %s, D as C^%.3f\n", result_double(law, "allocation.value"),
				interval_text(interval, law, "allocation.low", "allocation.high"), 1 - result_double(law,
				"allocation.value"));
}

static void print_loss_law(const json_t *law)
{
	const json_t *held = json_object_get(law, "held_out");
	char interval[64];
	const bool size = json_object_get(law, "column");
	printf("\n%s, %d runs%s%s\n", result_text(law, "formula"), (int)result_integer(law, "points"), size ? ", N: " :
			" of the compute-optimal frontier", size ? result_text(law, "column") : "");
	print_parameters(law);
	printf("  held out: %s, %.4g FLOPs, %.2f times the largest of the others\n", result_text(held, "run"),
			result_double(held, "flops"), result_double(held, "ratio"));
	printf("    loss %.4f%s, predicted %.4f %s: error %+.4f nats (%+.2f %%)\n", result_double(held, "loss"),
			result_integer(held, "seeds") > 1 ? " (mean over seeds)" : "", result_double(held, "predicted"),
			interval_text(interval, held, "low", "high"), result_double(held, "error"), result_double(held, "percent"));
}

static void print_optimum(const json_t *law, const char *name)
{
	const json_t *optimum;
	char interval[64];
	size_t i;
	int edges = 0;
	printf("\n%s = %.4g C^%.4f, exponent %s\n", name, result_double(law, "coefficient"), result_double(law,
			"exponent.value"), interval_text(interval, law, "exponent.low", "exponent.high"));
	json_array_foreach(json_object_get(law, "optima"), i, optimum) {
		printf("  %.4g FLOPs  %.4g  %s\n", result_double(optimum, "flops"), result_double(optimum, "value"),
				result_text(optimum, "method"));
		edges += json_is_true(json_object_get(optimum, "edge"));
	}
	if (edges)
		printf("  at %d of %d computes the best is at the edge of the grid: a wider grid may change this law\n", edges,
				(int)result_integer(law, "points"));
}

static void print_leverage(const json_t *leverage)
{
	const json_t *family, *at;
	size_t i, k;
	char interval[64];
	json_array_foreach(json_object_get(leverage, "families"), i, family) {
		const double granularity = result_double(family, "granularity");
		printf("\nefficiency leverage at activation ratio %.4g", result_double(family, "activation_ratio"));
		if (!isnan(granularity))
			printf(", granularity %.4g", granularity);
		printf("\n");
		if (json_object_get(family, "why"))
			printf("  not known: %s\n", result_text(family, "why"));
		json_array_foreach(json_object_get(family, "at"), k, at) {
			if (k % 4)
				continue;
			printf("  %.4g FLOPs, loss %.4f  ", result_double(at, "flops"), result_double(at, "loss"));
			if (isnan(result_double(at, "leverage")))
				printf("dense models never reach it, by their law");
			else
				printf("%.3g", result_double(at, "leverage"));
			printf(" %s%s\n", interval_text(interval, at, "low", "high"), json_is_true(json_object_get(at,
					"extrapolates")) ? ", beyond the dense runs" : "");
		}
	}
}

static void print_report(const json_t *report)
{
	const json_t *item, *noise = json_object_get(report, "seed_noise");
	size_t i;
	printf("%d runs\n", (int)result_integer(report, "runs"));
	json_array_foreach(json_object_get(report, "left_out"), i, item)
		printf("  left out: %s: %s\n", result_text(item, "run"), result_text(item, "why"));
	if (json_is_object(noise))
		printf("  noise between seeds: %.4f nats (%.2f %%), of %d runs in %d groups\n", result_double(noise, "nats"),
				result_double(noise, "percent"), (int)result_integer(noise, "runs"), (int)result_integer(noise,
				"settings"));
	if (result_integer(report, "other_activation_ratio"))
		printf("  %d of another activation ratio than most count for efficiency leverage alone\n", (int)result_integer(
				report, "other_activation_ratio"));
	printf("  intervals hold the truth with %g %% confidence\n", 100 * result_double(report, "confidence"));
	for (int form = 0; form < NUM_LAWS; form++)
		if ((item = json_object_get(report, scaling_forms[form].name)))
			print_loss_law(item);
	if ((item = json_object_get(report, "learning_rate")))
		print_optimum(item, "best learning rate");
	if ((item = json_object_get(report, "batch_tokens")))
		print_optimum(item, "best tokens of a batch");
	if ((item = json_object_get(report, "leverage")))
		print_leverage(item);
	json_array_foreach(json_object_get(report, "not_fitted"), i, item)
		printf("%snot fitted: %s: %s\n", i ? "" : "\n", result_text(item, "law"), result_text(item, "why"));
}

/* ------------------------------------------------------------------------------------------------------- picture */

static const uint32_t colours[] = {0x0072b2, 0xd55e00, 0x009e73, 0xcc79a7, 0xe69f00, 0x56b4e9, 0x8c6d31, 0x000000};
enum { NUM_COLOURS = sizeof colours / sizeof *colours, CURVE_POINTS = 60 };
#define FAINT 0xb8b8b8

/* Adds the runs of which `wanted` is true, at a column and their loss. */
static void mark_runs(struct picture_panel *p, const struct study *s, const bool *wanted, int column,
		struct picture_set look)
{
	struct picture_set *set = picture_add(p, look, s->count);
	for (int i = 0; i < s->count; i++)
		if (wanted[i])
			picture_point(set, value_of(&s->member[i], column), value_of(&s->member[i], SCALING_LOSS), NAN, NAN);
}

/* Adds the curve of a law between two values of C, or with N fixed of D. */
static void mark_law(struct picture_panel *p, const struct scaling_law *law, double size, double from, double to,
		struct picture_set look)
{
	struct picture_set *set = picture_add(p, look, CURVE_POINTS);
	for (int i = 0; i < CURVE_POINTS; i++) {
		const double at = from * pow(to / from, i / (CURVE_POINTS - 1.0));
		const double x = law->form == LAW_SIZE ? size : at, y = law->form == LAW_SIZE ? at : 0;
		const struct scaling_interval band = scaling_loss_interval(law, x, y, CONFIDENCE);
		picture_point(set, at, scaling_loss(law, x, y), band.low, band.high);
	}
}

/* The loss by compute: all runs, the frontier, the law without the largest run, and that run. */
static void compute_panel(struct picture_panel *p, const struct study *s, const struct scaling_law laws[2])
{
	*p = (struct picture_panel){.heading = "Loss by compute", .x_name = "training FLOPs", .y_name =
			"validation loss (nats per token)"};
	bool *wanted = allocate(s->count * sizeof *wanted);
	struct selection rest = select_frontier(s, s->top, NULL);
	const struct member *held = held_out_member(s);
	mark_law(p, &laws[1], 0, value_of(&s->member[0], SCALING_FLOPS) / 1.3, value_of(held, SCALING_FLOPS) * 1.5,
			(struct picture_set){.legend = "fit without the largest run, 95 % interval", .colour = colours[0]});
	for (int i = 0; i < s->count; i++)
		wanted[i] = !rest.in[i] && s->member[i].setting != held->setting;
	mark_runs(p, s, wanted, SCALING_FLOPS, (struct picture_set){.legend = "other runs", .colour = FAINT, .marks = true,
			.shape = DISC});
	mark_runs(p, s, rest.in, SCALING_FLOPS, (struct picture_set){.legend = "frontier", .colour = colours[0],
			.marks = true, .shape = DISC});
	for (int i = 0; i < s->count; i++)
		wanted[i] = s->member[i].setting == held->setting;
	mark_runs(p, s, wanted, SCALING_FLOPS, (struct picture_set){.legend = "held out", .colour = colours[1],
			.marks = true, .shape = DIAMOND});
	free(wanted), free(rest.in);
}

/* The loss by tokens, a curve for each N. */
static void size_panel(struct picture_panel *p, const struct study *s, const struct scaling_law laws[2])
{
	int sizes = 0;
	struct selection all = select_for(s, LAW_SIZE, s->top + 1);
	bool *wanted = allocate(s->count * sizeof *wanted), *seen = allocate(s->count * sizeof *seen);
	double least = INFINITY, most = 0;
	*p = (struct picture_panel){.heading = "Loss by parameters and tokens (diamond: held out)", .x_name = "tokens",
			.y_name = "validation loss (nats per token)"};
	for (int i = 0; i < s->count; i++)
		if (all.in[i]) {
			least = fmin(least, value_of(&s->member[i], SCALING_TOKENS));
			most = fmax(most, value_of(&s->member[i], SCALING_TOKENS));
		}
	for (int i = 0; i < s->count && sizes < NUM_COLOURS; i++) {
		const double size = value_of(&s->member[i], (int)s->options->size);
		if (!all.in[i] || seen[i])
			continue;
		char number[32];
		format_number(number, size, size / 100, size);
		struct picture_set curve = {.colour = colours[sizes]};
		snprintf(curve.legend, sizeof curve.legend, "N = %s", number);
		for (int held = 0; held < 2; held++) {
			for (int j = 0; j < s->count; j++) {
				const bool same = all.in[j] && near(size, value_of(&s->member[j], (int)s->options->size));
				seen[j] |= same;
				wanted[j] = same && (s->member[j].level == s->top) == held;
			}
			mark_runs(p, s, wanted, SCALING_TOKENS, (struct picture_set){.colour = colours[sizes], .marks = true,
					.shape = held ? DIAMOND : DISC});
		}
		mark_law(p, &laws[1], size, least / 1.2, most * 1.2, curve);
		sizes++;
	}
	free(wanted), free(seen), free(all.in);
}

/* The best learning rate or batch by compute. */
static void optimum_panel(struct picture_panel *p, const json_t *law_report, const struct power_law *law, int which)
{
	*p = (struct picture_panel){.heading = which ? "Best batch by compute" : "Best learning rate by compute",
			.x_name = "training FLOPs", .y_name = which ? "tokens of a batch" : "learning rate"};
	const json_t *optima = json_object_get(law_report, "optima"), *optimum;
	const size_t n = json_array_size(optima);
	const double from = result_double(json_array_get(optima, 0), "flops") / 1.3, to =
			result_double(json_array_get(optima, n - 1), "flops") * 1.5;
	struct picture_set *set = picture_add(p, (struct picture_set){.legend = "power law, 95 % interval", .colour =
			colours[0]}, CURVE_POINTS);
	for (int i = 0; i < CURVE_POINTS; i++) {
		const double at = from * pow(to / from, i / (CURVE_POINTS - 1.0));
		const struct scaling_interval band = power_law_interval(law, at, CONFIDENCE);
		picture_point(set, at, power_law_at(law, at), band.low, band.high);
	}
	for (int edge = 0; edge < 2; edge++) {
		size_t i;
		set = picture_add(p, edge ? (struct picture_set){.legend = "best run, at an edge", .colour = colours[1],
				.marks = true, .shape = TRIANGLE} : (struct picture_set){.legend = "lowest loss", .colour = colours[0],
				.marks = true, .shape = DISC}, (int)n);
		json_array_foreach(optima, i, optimum)
			if (json_is_true(json_object_get(optimum, "edge")) == edge)
				picture_point(set, result_double(optimum, "flops"), result_double(optimum, "value"), NAN, NAN);
	}
}

static void leverage_panel(struct picture_panel *p, const json_t *leverage)
{
	const json_t *family, *at;
	size_t i, k;
	*p = (struct picture_panel){.heading = "Efficiency leverage: FLOPs of dense models over FLOPs, for the same loss",
			.x_name = "training FLOPs", .y_name = "leverage", .wide = 5};
	json_array_foreach(json_object_get(leverage, "families"), i, family) {
		if (i >= NUM_COLOURS)
			break;
		struct picture_set *set = picture_add(p, (struct picture_set){.colour = colours[i]},
				(int)json_array_size(json_object_get(family, "at")));
		snprintf(set->legend, sizeof set->legend, "activation ratio %.3g", result_double(family, "activation_ratio"));
		json_array_foreach(json_object_get(family, "at"), k, at)
			picture_point(set, result_double(at, "flops"), result_double(at, "leverage"), result_double(at, "low"),
					result_double(at, "high"));
	}
}

static int draw_fit(const struct study *s, const json_t *report, struct scaling_law laws[NUM_LAWS][2],
		const struct power_law optima[2])
{
	static const char *const optimum_names[] = {"learning_rate", "batch_tokens"};
	struct picture_panel panels[NUM_FITS];
	int n = 0;
	if (json_object_get(report, "compute"))
		compute_panel(&panels[n++], s, laws[LAW_COMPUTE]);
	if (json_object_get(report, "size"))
		size_panel(&panels[n++], s, laws[LAW_SIZE]);
	for (int d = 0; d < 2; d++)
		if (json_object_get(report, optimum_names[d]))
			optimum_panel(&panels[n++], json_object_get(report, optimum_names[d]), &optima[d], d);
	if (json_object_get(report, "leverage"))
		leverage_panel(&panels[n++], json_object_get(report, "leverage"));
	const int rc = fit_picture_write(panels, n, s->options->out);
	for (int i = 0; i < n; i++)
		picture_free(&panels[i]);
	return rc;
}

/* ------------------------------------------------------------------------------------------------------- command */

/* Fits what was asked for, or all that the runs determine. Where nothing is, that is an error. */
static int fit_laws(json_t *report, const struct study *s, struct scaling_law laws[NUM_LAWS][2],
		struct power_law optima[2])
{
	json_t *not_fitted = json_array();
	char first[sizeof error_text] = "";
	int fitted = 0;
	for (int law = FIT_COMPUTE; law < NUM_FITS; law++) {
		if (s->options->law != FIT_ALL && s->options->law != law)
			continue;
		const int rc = law == FIT_COMPUTE ? fit_loss(report, s, LAW_COMPUTE, laws[LAW_COMPUTE]) : law == FIT_SIZE
				? fit_loss(report, s, LAW_SIZE, laws[LAW_SIZE]) : law == FIT_LEVERAGE ? fit_leverage(report, s)
				: fit_optimum(report, s, law - FIT_LEARNING_RATE, &optima[law - FIT_LEARNING_RATE]);
		fitted += rc == 0;
		if (rc < 0) {
			if (!*first)
				memcpy(first, error_text, sizeof first);
			json_array_append_new(not_fitted, json_pack("{s:s, s:o}", "law", fit_names[law], "why",
					json_cstring(error_text)));
		}
	}
	json_object_set_new(report, "not_fitted", not_fitted);
	return fitted ? 0 : fail("%s", first);
}

static int run_fit(const struct command_line *line)
{
	const struct fit_options *o = line->options;
	struct study s = {.options = o};
	struct scaling_law laws[NUM_LAWS][2] = {0};
	struct power_law optima[2] = {0};
	int rc = 0;
	for (int i = 0; i < line->num_words && rc == 0; i++)
		rc = scaling_runs_add(&s.runs, line->words[i]);
	if (rc == 0)
		rc = scaling_runs_check(&s.runs);
	if (rc == 0 && o->out)
		rc = fit_picture_check(o->out, line->words, line->num_words);
	json_t *report = json_object();
	if (rc == 0) {
		json_t *left_out = json_array();
		study_runs(&s);
		for (int i = 0; i < s.runs.count; i++)
			if (s.runs.run[i].left_out)
				json_array_append_new(left_out, json_pack("{s:o, s:o}", "run", json_cstring(s.runs.run[i].name), "why",
						json_cstring(s.runs.run[i].left_out)));
		json_object_set_new(report, "runs", json_integer(s.count));
		json_object_set_new(report, "left_out", left_out);
		int other = 0;
		for (int i = 0; i < s.count; i++)
			other += !s.member[i].main;
		json_object_set_new(report, "other_activation_ratio", json_integer(other));
		json_object_set_new(report, "confidence", json_real(CONFIDENCE));
		json_object_set_new(report, "seed_noise", seed_noise(&s));
		if (!s.runs.count)
			rc = fail("%s: has no run; expected a line for each behind the names of the columns", line->words[0]);
		else if (!s.count)
			rc = fail("none of the %d runs can be used: %s: %s", s.runs.count, s.runs.run[0].name,
					s.runs.run[0].left_out);
	}
	if (rc == 0)
		rc = fit_laws(report, &s, laws, optima);
	if (rc == 0 && o->out)
		rc = draw_fit(&s, report, laws, optima);
	if (rc == 0)
		result_print(json_incref(report), o->json, print_report);
	for (int form = 0; form < NUM_LAWS; form++)
		scaling_law_free(&laws[form][0]), scaling_law_free(&laws[form][1]);
	json_decref(report);
	free(s.member);
	scaling_runs_free(&s.runs);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static const struct command_option options[] = {
	CHOICE_OPTION(fit_options, law, "law", "LAW", fit_names, "What is fitted; all: whatever the runs determine",
			.initial = "all"),
	CHOICE_OPTION(fit_options, size, "size", "COLUMN", size_names, "The parameters that N of L(N, D) counts",
			.initial = "active_parameters"),
	WHOLE_OPTION(fit_options, draws, "draws", "N", 99, 100000, "Draws of the bootstrap", .initial = "999"),
	WHOLE_OPTION(fit_options, seed, "seed", "N", 0, INT64_MAX, "Of the draws", .initial = "1"),
	TEXT_OPTION(fit_options, out, "out", "FILE", "Draw the laws: an SVG file if its name ends with .svg, else PNG"),
	FLAG_OPTION(fit_options, json, "json", "Print one JSON object, which ling plan reads"),
};

const struct command fit_command = {
	.name = "fit", .usage = "RUN_DIR...|TABLE.tsv...", .min_words = 1, .max_words = ANY_NUMBER,
	.help = "Scaling laws from runs, or from a table of runs: the loss by compute, by parameters and tokens; the best "
		"learning rate and batch by compute; efficiency leverage of experts. The largest run is held out.",
	.run = run_fit, COMMAND_OPTIONS(fit_options, options),
};
