/*
 * commands/scaling.c - scaling laws: their forms, how they are fitted to runs, and what they predict.
 */
#define _GNU_SOURCE
#include "commands/scaling.h"

#include "files/base.h"
#include "kernels.h"

#include <math.h>
#include <nlopt.h>
#include <stdlib.h>
#include <string.h>

const struct scaling_law_form scaling_forms[NUM_LAWS] = {
	{"compute", "L = E + A C^-a", 3, {"E", "A", "a"}},
	{"size", "L = E + A N^-a + B D^-b", 5, {"E", "A", "a", "B", "b"}},
};

/* -------------------------------------------------------------------------------------------- the law at a point */

/* The logarithm of the loss. share [num terms + 1], or NULL: what part of the loss E and each term are. */
static double log_loss(enum scaling_form form, const double *at, double x, double y, double share[3])
{
	const int terms = form == LAW_SIZE ? 2 : 1;
	double part[3] = {at[0], at[1] - exp(at[2]) * x, terms == 2 ? at[3] - exp(at[4]) * y : -INFINITY};
	const double most = fmax(part[0], fmax(part[1], part[2]));
	double sum = 0;
	for (int i = 0; i <= terms; i++)
		sum += part[i] = exp(part[i] - most);
	for (int i = 0; share && i <= terms; i++)
		share[i] = part[i] / sum;
	return most + log(sum);
}

/* The points as the fit sees them: logarithms, centred. */
struct logs { int count; double *x, *y, *loss; };

/* The derivatives of the log loss by the coordinates; returns the log loss. */
static double log_loss_gradient(enum scaling_form form, const double *at, double x, double y,
		double gradient[MAX_LAW_PARAMETERS])
{
	double share[3];
	const double value = log_loss(form, at, x, y, share);
	gradient[0] = share[0];
	gradient[1] = share[1], gradient[2] = -share[1] * x * exp(at[2]);
	if (form == LAW_SIZE)
		gradient[3] = share[2], gradient[4] = -share[2] * y * exp(at[4]);
	return value;
}

static double objective_of_logs(enum scaling_form form, const struct logs *l, const double *at, double *gradient)
{
	const int num = scaling_forms[form].num;
	double sum = 0, point[MAX_LAW_PARAMETERS];
	for (int k = 0; gradient && k < num; k++)
		gradient[k] = 0;
	for (int i = 0; i < l->count; i++) {
		const double r = (log_loss_gradient(form, at, l->x[i], l->y[i], point) - l->loss[i]) / HUBER_DELTA;
		const bool near = fabs(r) <= 1;
		sum += near ? 0.5 * r * r : fabs(r) - 0.5;
		for (int k = 0; gradient && k < num; k++)
			gradient[k] += (near ? r : copysign(1, r)) * point[k] / HUBER_DELTA;
	}
	return sum;
}

static struct logs logs_create(int count)
{
	struct logs l = {.count = count, .x = allocate(3 * (size_t)count * sizeof(double))};
	l.y = l.x + count, l.loss = l.y + count;
	return l;
}

static struct logs logs_of(enum scaling_form form, const struct scaling_points *points, const double centre[2])
{
	struct logs l = logs_create(points->count);
	for (int i = 0; i < l.count; i++) {
		l.x[i] = log(points->x[i]) - centre[0];
		l.y[i] = form == LAW_SIZE ? log(points->y[i]) - centre[1] : 0;
		l.loss[i] = log(points->loss[i]);
	}
	return l;
}

double scaling_objective(enum scaling_form form, const struct scaling_points *points, const double centre[2],
		const double *at, double *gradient)
{
	struct logs l = logs_of(form, points, centre);
	const double value = objective_of_logs(form, &l, at, gradient);
	free(l.x);
	return value;
}

/* ------------------------------------------------------------------------------------------------- minimisation */

/* L-BFGS works in coordinates z with at = start + M z, in which the sum of squares has about the same curvature in every
 * direction at the start. In `at` itself the valley is so narrow that it needs hundreds of steps. */
struct problem {
	enum scaling_form form;
	const struct logs *logs;
	double start[MAX_LAW_PARAMETERS], map[MAX_LAW_PARAMETERS][MAX_LAW_PARAMETERS];
	double best[MAX_LAW_PARAMETERS], lowest; /* seen so far */
};

/* Coordinates beyond these are of no use, and would overflow: E far below or above any loss, exponents likewise. */
static bool within_reach(const double *at, int num)
{
	for (int k = 0; k < num; k++)
		if (!(fabs(at[k]) < 60))
			return false;
	return true;
}

static double evaluate(unsigned n, const double *z, double *gradient, void *data)
{
	struct problem *p = data;
	double at[MAX_LAW_PARAMETERS] = {0}, slope[MAX_LAW_PARAMETERS];
	for (unsigned i = 0; i < n; i++) {
		at[i] = p->start[i];
		for (unsigned k = 0; k < n; k++)
			at[i] += p->map[i][k] * z[k];
	}
	if (!within_reach(at, (int)n))
		return HUGE_VAL;
	const double value = objective_of_logs(p->form, p->logs, at, slope);
	for (unsigned k = 0; gradient && k < n; k++) {
		gradient[k] = 0;
		for (unsigned i = 0; i < n; i++)
			gradient[k] += p->map[i][k] * slope[i];
	}
	if (value < p->lowest) {
		p->lowest = value;
		memcpy(p->best, at, n * sizeof *at);
	}
	return value;
}

/* Fills p->map for the start: the inverse of the transposed Cholesky factor of J^T J / HUBER_DELTA^2, J the derivatives
 * of the log losses, with a small multiple of the identity added, since directions may be flat. */
static void set_map(struct problem *p, int num)
{
	double a[MAX_LAW_PARAMETERS][MAX_LAW_PARAMETERS] = {{0}}, g[MAX_LAW_PARAMETERS], trace = 0;
	for (int i = 0; i < p->logs->count; i++) {
		log_loss_gradient(p->form, p->start, p->logs->x[i], p->logs->y[i], g);
		for (int j = 0; j < num; j++)
			for (int k = 0; k <= j; k++)
				a[j][k] += g[j] * g[k] / (HUBER_DELTA * HUBER_DELTA);
	}
	for (int j = 0; j < num; j++)
		trace += a[j][j];
	for (int j = 0; j < num; j++) { /* a becomes its Cholesky factor, lower triangular */
		a[j][j] += 1e-9 * trace;
		for (int k = 0; k <= j; k++) {
			double sum = a[j][k];
			for (int m = 0; m < k; m++)
				sum -= a[j][m] * a[k][m];
			a[j][k] = j == k ? sqrt(fmax(sum, 1e-12 * trace)) : sum / a[k][k];
		}
	}
	memset(p->map, 0, sizeof p->map);
	for (int k = 0; k < num; k++) /* column k of the inverse of the transposed factor */
		for (int i = k; i >= 0; i--) {
			double sum = i == k;
			for (int m = i + 1; m <= k; m++)
				sum -= a[m][i] * p->map[m][k];
			p->map[i][k] = sum / a[i][i];
		}
}

/* Minimises from `at`, which becomes the best that was found. Returns its objective. */
static double minimise(enum scaling_form form, const struct logs *l, double *at, int rounds, int evaluations)
{
	const int num = scaling_forms[form].num;
	struct problem p = {.form = form, .logs = l, .lowest = INFINITY};
	memcpy(p.best, at, num * sizeof *at);
	for (int round = 0; round < rounds; round++) {
		const double before = p.lowest;
		double z[MAX_LAW_PARAMETERS] = {0}, value;
		memcpy(p.start, p.best, num * sizeof *at);
		set_map(&p, num);
		nlopt_opt o = nlopt_create(NLOPT_LD_LBFGS, num);
		if (!o)
			out_of_memory(0);
		nlopt_set_min_objective(o, evaluate, &p);
		nlopt_set_maxeval(o, evaluations);
		nlopt_set_ftol_rel(o, 1e-12);
		nlopt_set_ftol_abs(o, 1e-16);
		nlopt_optimize(o, z, &value); /* whatever ends it, the best point seen counts */
		nlopt_destroy(o);
		if (!(p.lowest < before * (1 - 1e-9)))
			break;
	}
	memcpy(at, p.best, num * sizeof *at);
	return p.lowest;
}

/* The coordinates of a start: E as a share of the lowest loss, and the exponents; the amplitudes follow from the
 * points: each term has an equal part of what is above E. */
static void set_start(enum scaling_form form, const struct logs *l, double *at, double share, double a, double b)
{
	const int terms = form == LAW_SIZE ? 2 : 1;
	double lowest = INFINITY;
	for (int i = 0; i < l->count; i++)
		lowest = fmin(lowest, l->loss[i]);
	at[0] = lowest + log(share);
	at[1] = at[3] = 0, at[2] = log(a), at[4] = log(b);
	for (int i = 0; i < l->count; i++) {
		const double above = log((exp(l->loss[i]) - exp(at[0])) / terms);
		at[1] += (above + a * l->x[i]) / l->count;
		at[3] += (above + b * l->y[i]) / l->count;
	}
}

/* Minimises from a grid of starts. Returns the objective. */
static double minimise_from_grid(enum scaling_form form, const struct logs *l, double *at)
{
	static const double shares[] = {0.05, 0.4, 0.7, 0.85, 0.95, 0.99}, exponents[] = {0.05, 0.15, 0.35, 0.8};
	enum { SHARES = sizeof shares / sizeof *shares, EXPONENTS = sizeof exponents / sizeof *exponents };
	double lowest = INFINITY;
	for (int e = 0; e < SHARES; e++)
		for (int i = 0; i < EXPONENTS; i++)
			for (int j = 0; j < (form == LAW_SIZE ? EXPONENTS : 1); j++) {
				double try[MAX_LAW_PARAMETERS];
				set_start(form, l, try, shares[e], exponents[i], exponents[j]);
				const double value = minimise(form, l, try, 1, 60);
				if (value < lowest) {
					lowest = value;
					memcpy(at, try, sizeof try);
				}
			}
	return minimise(form, l, at, 20, 1000);
}

/* -------------------------------------------------------------------------------------------------- the bootstrap */

static double residual_sigma(enum scaling_form form, const struct logs *l, const double *at)
{
	double sum = 0;
	for (int i = 0; i < l->count; i++) {
		const double r = log_loss(form, at, l->x[i], l->y[i], NULL) - l->loss[i];
		sum += r * r;
	}
	return sqrt(sum / (l->count - scaling_forms[form].num));
}

static void make_draw(struct scaling_draw *draw, const struct scaling_law *law, const struct logs *l, uint64_t seed,
		int number)
{
	const int freedom = l->count - scaling_forms[law->form].num, n = l->count + freedom;
	const struct random_stream stream = {.seed = seed, .purpose = RANDOM_SCALING, .step = number};
	real *normal = allocate(n * sizeof *normal);
	struct logs drawn = logs_create(l->count);
	double chi_square = 0;
	random_normal(normal, n, &stream, 0);
	for (int i = l->count; i < n; i++)
		chi_square += (double)normal[i] * normal[i];
	draw->sigma = law->fit.sigma * sqrt(freedom / chi_square);
	for (int i = 0; i < l->count; i++) {
		drawn.x[i] = l->x[i], drawn.y[i] = l->y[i];
		drawn.loss[i] = log_loss(law->form, law->fit.at, l->x[i], l->y[i], NULL) + draw->sigma * normal[i];
	}
	memcpy(draw->at, law->fit.at, sizeof draw->at);
	minimise(law->form, &drawn, draw->at, 3, 200);
	free(drawn.x), free(normal);
}

/* The value of a parameter at coordinates. */
static double parameter_at(const double *at, const double centre[2], int parameter)
{
	if (parameter == 0)
		return exp(at[0]);
	if (parameter % 2 == 0)
		return exp(at[parameter]);
	return exp(at[parameter] + exp(at[parameter + 1]) * centre[parameter / 2]);
}

int scaling_fit(struct scaling_law *law, enum scaling_form form, const struct scaling_points *points, int draws,
		uint64_t seed)
{
	const int num = scaling_forms[form].num, n = points->count;
	*law = (struct scaling_law){.form = form, .count = n, .num_draws = draws};
	for (int i = 0; i < n; i++) {
		law->centre[0] += log(points->x[i]) / n;
		law->centre[1] += form == LAW_SIZE ? log(points->y[i]) / n : 0;
		law->most_x = fmax(law->most_x, points->x[i]);
		law->most_y = form == LAW_SIZE ? fmax(law->most_y, points->y[i]) : 0;
	}
	struct logs l = logs_of(form, points, law->centre);
	law->objective = minimise_from_grid(form, &l, law->fit.at);
	law->fit.sigma = residual_sigma(form, &l, law->fit.at);
	for (int k = 0; k < num; k++)
		law->value[k] = parameter_at(law->fit.at, law->centre, k);
	law->draw = allocate(draws * sizeof *law->draw);
#pragma omp parallel for schedule(dynamic)
	for (int i = 0; i < draws; i++)
		make_draw(&law->draw[i], law, &l, seed, i);
	free(l.x);
	return 0;
}

void scaling_law_free(struct scaling_law *law)
{
	free(law->draw);
	*law = (struct scaling_law){0};
}

/* ---------------------------------------------------------------------------------------------------- predictions */

static double loss_at(const struct scaling_law *law, const double *at, double x, double y)
{
	return log_loss(law->form, at, log(x) - law->centre[0], law->form == LAW_SIZE ? log(y) - law->centre[1] : 0, NULL);
}

double scaling_loss(const struct scaling_law *law, double x, double y)
{
	return exp(loss_at(law, law->fit.at, x, y));
}

/* Quantiles of n values, which it sorts: the k-th of n splits the rest as k : n + 1 - k. */
static struct scaling_interval interval_of(double *values, int n, double confidence)
{
	if (!n)
		return (struct scaling_interval){NAN, NAN};
	qsort(values, n, sizeof *values, compare_doubles);
	const int k = (int)fmax(1, floor((n + 1) * (1 - confidence) / 2 + 1e-9));
	return (struct scaling_interval){values[k - 1], values[n - k]};
}

struct scaling_interval scaling_parameter_interval(const struct scaling_law *law, int parameter, double confidence)
{
	double *values = allocate(law->num_draws * sizeof *values);
	for (int i = 0; i < law->num_draws; i++)
		values[i] = parameter_at(law->draw[i].at, law->centre, parameter);
	const struct scaling_interval out = interval_of(values, law->num_draws, confidence);
	free(values);
	return out;
}

struct scaling_interval scaling_loss_interval(const struct scaling_law *law, double x, double y, double confidence)
{
	double *values = allocate(law->num_draws * sizeof *values);
	for (int i = 0; i < law->num_draws; i++)
		values[i] = exp(loss_at(law, law->draw[i].at, x, y));
	const struct scaling_interval out = interval_of(values, law->num_draws, confidence);
	free(values);
	return out;
}
