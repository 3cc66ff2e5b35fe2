/*
 * commands/align_runs.c - the curves of two runs beside each other, and whether they differ more than runs do whose
 * first weights differ by rounding alone.
 */
#define _GNU_SOURCE
#include "commands/align_runs.h"

#include "files/base.h"
#include "commands/result.h"
#include "commands/runs.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ROUNDING 1e-6 /* a relative difference of curves below this always passes */

static const char *const curves[] = {"loss", "valid_loss", "balance_loss", "z_loss", "grad_norm"}; /* loss first */
enum { NUM_CURVES = sizeof curves / sizeof *curves };

/* The value of a series at a step. *has: whether there is one. */
static double value_at(const struct series *s, double step, bool *has)
{
	int low = 0, high = s->count;
	while (low < high) {
		const int middle = (low + high) / 2;
		if (s->step[middle] < step)
			low = middle + 1;
		else
			high = middle;
	}
	*has = low < s->count && s->step[low] == step;
	return *has ? s->value[low] : NAN;
}

/* ------------------------------------------------------------------------------------------------- two curves */

/* A curve of run a beside that of b; NULL where they have no step in common. */
static json_t *compare_curves(const char *name, const struct series *a, const struct series *b, int64_t skip,
		double tolerance)
{
	const double most = 1e9;     /* as which larger ones count, and any difference from 0 */
	double sum = 0, sum_abs = 0, largest = 0, a_at = NAN, b_at = NAN;
	int64_t n = 0, at = 0, first_different = 0, first_beyond = 0, nonfinite_a = 0, nonfinite_b = 0, unlike = 0;
	for (int i = 0; i < a->count; i++) {
		bool has;
		const double x = a->value[i], y = value_at(b, a->step[i], &has);
		const int64_t step = (int64_t)a->step[i];
		if (!has || step <= skip)
			continue;
		const double relative = x == y ? 0 : fmax(-most, fmin((y - x) / fabs(x), most));
		nonfinite_a += !isfinite(x), nonfinite_b += !isfinite(y);
		unlike += isfinite(x) != isfinite(y);
		if (x != y && !first_different && !(isnan(x) && isnan(y)))
			first_different = step;
		if (!isfinite(x) || !isfinite(y))
			continue;
		if (fabs(relative) > tolerance && !first_beyond)
			first_beyond = step;
		if (fabs(relative) >= largest)
			largest = fabs(relative), at = step, a_at = x, b_at = y;
		n++, sum += relative, sum_abs += fabs(relative);
	}
	if (!n && !nonfinite_a && !nonfinite_b)
		return NULL;
	return json_pack("{s:s, s:I, s:f, s:f, s:f, s:I, s:o, s:o, s:o, s:o, s:I, s:I, s:I}", "name", name,
			"steps", (json_int_t)n, "mean", n ? sum / n : 0, "mean_absolute", n ? sum_abs / n : 0, "largest", largest,
			"largest_step", (json_int_t)at, "a", result_number(a_at), "b", result_number(b_at),
			"first_different", first_different ? json_integer(first_different) : json_null(),
			"first_beyond", first_beyond ? json_integer(first_beyond) : json_null(), "nonfinite_a",
			(json_int_t)nonfinite_a, "nonfinite_b", (json_int_t)nonfinite_b, "nonfinite_unlike", (json_int_t)unlike);
}

/* ---------------------------------------------------------------------------------------------------- the floor
 *
 * Training is chaotic: a difference in the last bit of the first weights grows, slowly at first, then by a leap when it
 * sends a token to another expert, until the curves differ like those of two runs with other noise. How much that is,
 * is measured: a and the floor runs are n runs that differ by rounding alone. If b does so too, it is one more run of
 * that kind. Long before they part, it must differ from them by rounding alone, as they do; and once all of them have
 * parted, its curves must differ from theirs like theirs from each other.
 */

#define PARTED 1e-4   /* two runs have parted when a curve differs by more, as no rounding does at once, */
#define SETTLED 1e-3  /* and by so much when what follows is judged */
enum {
	EARLY = 4,         /* long before: in the first 1 / EARLY of the steps until the first of them parts */
	OTHER_ROUNDING = 10, /* of another kind, as by another order of sums, which may be so many times as large */
	FEWEST_STEPS = 8,  /* that a mean is taken of */
};

/* P(|T| <= t) of Student's t: Abramowitz and Stegun, 26.7.3 and 26.7.4. */
static double student_probability(double t, int freedom)
{
	const double angle = atan(t / sqrt(freedom)), cosine = cos(angle), sine = sin(angle);
	double sum = 0, term = freedom % 2 ? cosine : 1;
	for (int i = freedom % 2 ? 3 : 2; i <= freedom; i += 2) {
		sum += term;
		term *= cosine * cosine * (i - 1) / i;
	}
	return freedom % 2 ? M_2_PI * (angle + sine * sum) : sine * sum;
}

double student_t(double probability, int freedom)
{
	double low = 1e-6, high = 1e9;
	for (int i = 0; i < 100; i++) {
		const double middle = sqrt(low * high);
		if (student_probability(middle, freedom) < 1 - probability)
			low = middle;
		else
			high = middle;
	}
	return high;
}

struct bundle {               /* one curve of n runs that differ by rounding, and behind them of b */
	int n, steps;
	int64_t *step;             /* [steps] */
	double *log;               /* [n + 1, steps] logarithms */
};

/* The mean of log x - log y, or of its absolute value, over the steps from `first` on and before `end`. */
static double log_difference(const struct bundle *u, int x, int y, int first, int end, bool absolute)
{
	double sum = 0;
	for (int s = first; s < end; s++) {
		const double d = u->log[(int64_t)x * u->steps + s] - u->log[(int64_t)y * u->steps + s];
		sum += absolute ? fabs(d) : d;
	}
	return sum / (end - first);
}

/* The mean distance of run x to the n runs, itself left out. */
static double distance(const struct bundle *u, int x, int first, int end)
{
	double sum = 0;
	for (int y = 0; y < u->n; y++)
		sum += y == x ? 0 : log_difference(u, x, y, first, end, true);
	return sum / (x < u->n ? u->n - 1 : u->n);
}

static void mean_and_deviation(const double *x, int n, double *mean, double *deviation)
{
	double sum = 0, square = 0;
	for (int i = 0; i < n; i++)
		sum += x[i];
	*mean = sum / n;
	for (int i = 0; i < n; i++)
		square += (x[i] - *mean) * (x[i] - *mean);
	*deviation = n > 1 ? sqrt(square / (n - 1)) : 0;
}

static void add_test(json_t *tests, const char *name, const char *what, double found, double limit)
{
	limit = fmax(limit, ROUNDING);
	json_array_append_new(tests, json_pack("{s:s, s:s, s:f, s:f, s:b}", "series", name, "what", what, "found", found,
			"limit", limit, "passes", fabs(found) <= limit));
}

/* The mean over the steps from `first` on: is b's beyond what the n runs' spread allows? The limit is that of a
 * prediction interval for one more value of a normal distribution. */
static void test_mean(json_t *tests, const char *name, const struct bundle *u, int first, double t)
{
	double *x = allocate(u->n * sizeof *x), mean, deviation;
	for (int i = 0; i < u->n; i++)
		x[i] = log_difference(u, i, u->n, first, u->steps, false);
	mean_and_deviation(x, u->n, &mean, &deviation);
	add_test(tests, name, "mean", -mean, t * deviation * sqrt(1 + 1.0 / u->n));
	free(x);
}

/* The distance to the n runs, in the mean over the steps and them: the same for its logarithm. If a pair's distance is
 * a sum of a part of each run, the n values have only (n - 2) / (n - 1) of the spread of the parts, for each pair
 * counts for both. */
static void test_distance(json_t *tests, const char *name, const struct bundle *u, int first, double t)
{
	double *x = allocate(u->n * sizeof *x), mean, deviation;
	for (int i = 0; i < u->n; i++)
		x[i] = log(fmax(distance(u, i, first, u->steps), 1e-300));
	mean_and_deviation(x, u->n, &mean, &deviation);
	deviation *= (u->n - 1.0) / (u->n - 2);
	add_test(tests, name, "distance", distance(u, u->n, first, u->steps),
			exp(fmin(mean + t * deviation * sqrt(1 + 1.0 / u->n), 700)));
	free(x);
}

/* The first step in which a curve of run x differs by more than `most` from those of all the n runs but itself;
 * INT64_MAX when there is none. */
static int64_t parting(const struct bundle *bundles, int num, int x, double most)
{
	int64_t first = INT64_MAX;
	for (int i = 0; i < num; i++) {
		const struct bundle *u = &bundles[i];
		for (int s = 0; s < u->steps && u->step[s] < first; s++) {
			double least = INFINITY;
			for (int y = 0; y < u->n; y++)
				if (y != x)
					least = fmin(least, fabs(log_difference(u, x, y, s, s + 1, false)));
			if (least > most)
				first = u->step[s];
		}
	}
	return first;
}

/* Fills a bundle with the steps after `skip` in which all runs have a positive, finite value of a curve. */
static void bundle_init(struct bundle *u, const struct run *runs, int num, const char *name, int64_t skip)
{
	struct series *s = allocate(num * sizeof *s);
	for (int r = 0; r < num; r++)
		s[r] = run_series(&runs[r], name);
	*u = (struct bundle){.n = num - 1, .step = allocate(s[0].count * sizeof *u->step)};
	for (int i = 0; i < s[0].count; i++) {
		bool all = s[0].step[i] > (double)skip;
		for (int r = 0; r < num && all; r++) {
			const double x = value_at(&s[r], s[0].step[i], &all);
			all = all && x > 0 && isfinite(x);
		}
		if (all)
			u->step[u->steps++] = (int64_t)s[0].step[i];
	}
	u->log = allocate((size_t)num * u->steps * sizeof *u->log);
	for (int r = 0; r < num; r++) {
		bool has;
		for (int i = 0; i < u->steps; i++)
			u->log[(int64_t)r * u->steps + i] = log(value_at(&s[r], (double)u->step[i], &has));
		series_free(&s[r]);
	}
	free(s);
}

static json_t *step_or_null(int64_t step)
{
	return step == INT64_MAX ? json_null() : json_integer(step);
}

/* The first steps, before `end`: the largest difference of b from the nearest of the n runs, beside the largest one
 * between two of these. */
static void test_early(json_t *tests, const char *name, const struct bundle *u, int end)
{
	double found = 0, floor = 0;
	for (int s = 0; s < end; s++) {
		double least = INFINITY;
		for (int x = 0; x < u->n; x++) {
			least = fmin(least, fabs(log_difference(u, x, u->n, s, s + 1, false)));
			for (int y = 0; y < x; y++)
				floor = fmax(floor, fabs(log_difference(u, x, y, s, s + 1, false)));
		}
		found = fmax(found, least);
	}
	add_test(tests, name, "early", found, OTHER_ROUNDING * floor);
}

/* The tests of b, the last one of the runs, against the others. */
static json_t *compare_with_floor(const struct run *runs, int num, int64_t skip)
{
	json_t *tests = json_array(), *names = json_array(), *partings = json_array();
	struct bundle bundles[NUM_CURVES];
	int most = 0, first[NUM_CURVES], judged = 0;
	int64_t settled = 0, earliest = INT64_MAX, last = skip;
	for (int i = 0; i < NUM_CURVES; i++) {
		struct bundle *u = &bundles[i];
		bundle_init(u, runs, num, curves[i], skip);
		most = u->steps > most ? u->steps : most;
		last = u->steps && u->step[u->steps - 1] > last ? u->step[u->steps - 1] : last;
	}
	for (int x = 0; x < num - 1; x++) {
		const int64_t parted = parting(bundles, NUM_CURVES, x, PARTED), step = parting(bundles, NUM_CURVES, x, SETTLED);
		json_array_append_new(partings, step_or_null(parted));
		earliest = parted < earliest ? parted : earliest;
		settled = step > settled ? step : settled;
	}
	const int64_t early = skip + ((earliest < last ? earliest : last) - skip + EARLY - 1) / EARLY;
	for (int i = 0; i < NUM_CURVES; i++) {
		const struct bundle *u = &bundles[i];
		int end = 0;
		while (end < u->steps && u->step[end] <= early)
			end++;
		if (end)
			test_early(tests, curves[i], u, end);
		for (first[i] = 0; first[i] < u->steps && u->step[first[i]] <= settled; first[i]++) {}
		judged += u->steps - first[i] >= FEWEST_STEPS;
	}
	/* of two runs there is one distance, which has no spread */
	const bool has_distance = num > 3;
	const double t = judged ? student_t(FLOOR_LEVEL / judged / (has_distance ? 2 : 1), num - 2) : 0;
	for (int i = 0; i < NUM_CURVES; i++) {
		if (bundles[i].steps - first[i] < FEWEST_STEPS)
			continue;
		test_mean(tests, curves[i], &bundles[i], first[i], t);
		if (has_distance)
			test_distance(tests, curves[i], &bundles[i], first[i], t);
	}
	for (int r = 1; r < num - 1; r++)
		json_array_append_new(names, json_cstring(runs[r].dir));
	const int64_t parted_b = parting(bundles, NUM_CURVES, num - 1, PARTED);
	json_t *result = json_pack("{s:o, s:i, s:o, s:o, s:I, s:o, s:f, s:f, s:b, s:b, s:o}", "runs", names, "steps", most,
			"partings", partings, "parting_b", step_or_null(parted_b), "early", (json_int_t)early, "settled",
			step_or_null(settled), "level", FLOOR_LEVEL, "t", t, "judged", judged > 0, "too_short",
			!judged && parting(bundles, NUM_CURVES, num - 1, SETTLED) < earliest, "tests", tests);
	for (int i = 0; i < NUM_CURVES; i++)
		free(bundles[i].step), free(bundles[i].log);
	return result;
}

/* ---------------------------------------------------------------------------------------------------- configs */

/* Lists the keys whose values differ between two values of a config, NULL being none; but that of the directory. key:
 * the path to them. */
static void list_differences(json_t *out, const char *key, const json_t *a, const json_t *b)
{
	if (!json_is_object(a) || !json_is_object(b)) {
		if (strcmp(key, "train.output_dir") && (!a || !b || !json_equal((json_t *)a, (json_t *)b)))
			json_array_append_new(out, json_pack("{s:s, s:O?, s:O?}", "key", key, "a", a, "b", b));
		return;
	}
	const json_t *const both[] = {a, b};
	for (int i = 0; i < 2; i++) {
		const char *name;
		json_t *value;
		json_object_foreach((json_t *)both[i], name, value) {
			struct text path = {0};
			text_append_string(&path, key);
			text_append_string(&path, *key ? "." : "");
			text_append_string(&path, name);
			const json_t *other = json_object_get(both[1 - i], name);
			if (i == 0)
				list_differences(out, path.data, value, other);
			else if (!other)
				list_differences(out, path.data, NULL, value);
			free(path.data);
		}
	}
}

/* --------------------------------------------------------------------------------------------------- the whole */

/* How many steps of a, after `skip`, b has not. */
static int64_t steps_only_in(const struct run *a, const struct run *b, int64_t skip)
{
	int64_t n = 0;
	for (int i = 0, j = 0; i < a->count; i++) {
		while (j < b->count && b->step[j] < a->step[i])
			j++;
		n += a->step[i] > skip && (j == b->count || b->step[j] != a->step[i]);
	}
	return n;
}

/* Compares the runs: the first one is a, the last one b, and between them is the floor. */
static json_t *compare_runs(const struct run *runs, int num, int64_t skip, double tolerance)
{
	const struct run *a = &runs[0], *b = &runs[num - 1];
	json_t *report = json_pack("{s:s, s:o, s:o, s:I, s:f, s:I, s:I, s:[], s:n}", "kind", "runs", "a",
			json_cstring(a->dir), "b", json_cstring(b->dir), "skip", (json_int_t)skip, "tolerance", tolerance,
			"steps_only_a", (json_int_t)steps_only_in(a, b, skip), "steps_only_b",
			(json_int_t)steps_only_in(b, a, skip), "series", "floor");
	json_t *list = json_object_get(report, "series"), *config = a->config && b->config ? json_array() : json_null();
	if (json_is_array(config))
		list_differences(config, "", a->config, b->config);
	json_object_set_new(report, "config", config);
	bool agree = true;
	for (int i = 0; i < NUM_CURVES; i++) {
		struct series of_a = run_series(a, curves[i]), of_b = run_series(b, curves[i]);
		json_t *result = compare_curves(curves[i], &of_a, &of_b, skip, tolerance);
		series_free(&of_a), series_free(&of_b);
		if (!result)
			continue;
		agree = agree && !result_integer(result, "nonfinite_unlike") &&
				(num > 2 || i > 0 || result_double(result, "mean_absolute") <= tolerance);
		json_array_append_new(list, result);
	}
	int rc = json_array_size(list) ? 0
			: fail("%s and %s have no step after step %lld in common: the first ends at step %lld, the second at %lld",
			a->dir, b->dir, (long long)skip, (long long)a->step[a->count - 1], (long long)b->step[b->count - 1]);
	if (rc == 0 && num > 2) {
		json_t *floor = compare_with_floor(runs, num, skip);
		json_object_set_new(report, "floor", floor);
		rc = result_integer(floor, "steps") ? 0
				: fail("there is no step after step %lld that all runs have", (long long)skip);
		const json_t *test;
		size_t i;
		json_array_foreach(json_object_get(floor, "tests"), i, test)
			agree = agree && json_is_true(json_object_get(test, "passes"));
		agree = agree && !json_is_true(json_object_get(floor, "too_short"));
	}
	if (rc < 0) {
		json_decref(report);
		return NULL;
	}
	json_object_set_new(report, "agree", json_boolean(agree));
	return report;
}

json_t *align_runs(char *const *dirs, int num, int64_t skip, double tolerance)
{
	struct run *runs = allocate(num * sizeof *runs);
	json_t *report = NULL;
	int rc = runs_open(runs, dirs, num);
	for (int i = 0; i < num && rc == 0; i++)
		rc = run_needs_steps(&runs[i], "compare");
	if (rc == 0)
		report = compare_runs(runs, num, skip, tolerance);
	for (int i = 0; i < num; i++)
		run_free(&runs[i]);
	free(runs);
	return report;
}
