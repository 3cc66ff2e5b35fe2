/*
 * commands/scaling.c - scaling laws: their forms, how they are fitted to runs, and what they predict.
 */
#define _GNU_SOURCE
#include "commands/scaling.h"

#include "files/base.h"
#include "kernels.h"
#include "commands/align_runs.h"
#include "commands/result.h"

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

enum { MAX_UNKNOWNS = 6 };       /* of a quadratic in two variables */

/* The lower triangle of a symmetric matrix [n, n], with `added` on its diagonal, becomes its Cholesky factor. Where the
 * matrix is not positive definite, the factor is that of one with a larger diagonal. Returns whether it was. */
static bool cholesky(double a[MAX_UNKNOWNS][MAX_UNKNOWNS], int n, double added)
{
	double largest = 0;
	bool definite = true;
	for (int j = 0; j < n; j++)
		largest = fmax(largest, a[j][j] += added);
	for (int j = 0; j < n; j++)
		for (int k = 0; k <= j; k++) {
			double sum = a[j][k];
			for (int m = 0; m < k; m++)
				sum -= a[j][m] * a[k][m];
			definite &= j != k || sum > 1e-12 * largest;
			a[j][k] = j == k ? sqrt(fmax(sum, 1e-12 * largest)) : sum / a[k][k];
		}
	return definite;
}

/* Least squares: out [n] so that the rows [count, n] times it come nearest to y. Returns false where the rows do not
 * determine it. */
static bool least_squares(double out[MAX_UNKNOWNS], double (*rows)[MAX_UNKNOWNS], const double *y, int count, int n)
{
	double a[MAX_UNKNOWNS][MAX_UNKNOWNS] = {{0}};
	memset(out, 0, n * sizeof *out);
	for (int i = 0; i < count; i++)
		for (int j = 0; j < n; j++) {
			out[j] += rows[i][j] * y[i];
			for (int k = 0; k <= j; k++)
				a[j][k] += rows[i][j] * rows[i][k];
		}
	if (count < n || !cholesky(a, n, 0))
		return false;
	for (int j = 0; j < n; j++) {
		for (int k = 0; k < j; k++)
			out[j] -= a[j][k] * out[k];
		out[j] /= a[j][j];
	}
	for (int j = n - 1; j >= 0; j--) {
		for (int k = j + 1; k < n; k++)
			out[j] -= a[k][j] * out[k];
		out[j] /= a[j][j];
	}
	return true;
}

/* L-BFGS works in coordinates z with at = start + M z, in which the sum of squares has about the same curvature in
 * every direction at the start. In `at` itself the valley is so narrow that it needs hundreds of steps. */
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
	double a[MAX_UNKNOWNS][MAX_UNKNOWNS] = {{0}}, g[MAX_LAW_PARAMETERS], trace = 0;
	for (int i = 0; i < p->logs->count; i++) {
		log_loss_gradient(p->form, p->start, p->logs->x[i], p->logs->y[i], g);
		for (int j = 0; j < num; j++)
			for (int k = 0; k <= j; k++)
				a[j][k] += g[j] * g[k] / (HUBER_DELTA * HUBER_DELTA);
	}
	for (int j = 0; j < num; j++)
		trace += a[j][j];
	cholesky(a, num, 1e-9 * trace);
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

/* Minimises from a grid of starts. */
static void minimise_from_grid(enum scaling_form form, const struct logs *l, double *at)
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
	minimise(form, l, at, 20, 1000);
}

/* -------------------------------------------------------------------------------------------------- the bootstrap
 *
 * A draw is a fit to losses that the law might have given: at the same points, the losses of the fit times exp(sigma z)
 * with z normal. This is the parametric bootstrap (Davison and Hinkley, Bootstrap Methods and their Application, 1997)
 * with one change: sigma is not the standard deviation of the residuals, which of few points is itself uncertain, but
 * drawn for each draw as that times sqrt(freedom / chi^2 of `freedom` degrees), which is the posterior of a linear
 * model's sigma without prior knowledge (Box and Tiao, Bayesian Inference in Statistical Analysis, 1973). In a linear
 * model the percentiles of the draws are then exactly the intervals of Student's t. Resampling points instead, with 6
 * to 30 points and 3 to 5 parameters, often draws too few different points to determine the law at all, and its
 * percentiles are too narrow, in a linear model by about sqrt((n - p) / n) and the step from the normal distribution to
 * Student's. tests/test_fit.c counts how often these intervals hold the truth.
 */

static double residual_sigma(enum scaling_form form, const struct logs *l, const double *at)
{
	double sum = 0;
	for (int i = 0; i < l->count; i++) {
		const double r = log_loss(form, at, l->x[i], l->y[i], NULL) - l->loss[i];
		sum += r * r;
	}
	return sqrt(sum / (l->count - scaling_forms[form].num));
}

/* Whether a fit is where the objective is flat in a coordinate, so that no minimisation leaves from there: E is nearly
 * nothing of the loss, or a term nearly constant or nearly nothing. */
static bool is_flat(const struct scaling_law *law, const struct logs *l)
{
	double lowest = INFINITY;
	for (int i = 0; i < l->count; i++)
		lowest = fmin(lowest, l->loss[i]);
	bool flat = law->fit.at[0] < lowest + log(0.1);
	for (int k = 2; k < scaling_forms[law->form].num; k += 2)
		flat |= law->fit.at[k] < log(0.01) || law->fit.at[k] > log(3);
	return flat;
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
	const double lowest = minimise(law->form, &drawn, draw->at, 3, 200);
	if (is_flat(law, l)) {
		double other[MAX_LAW_PARAMETERS];
		set_start(law->form, &drawn, other, 0.7, 0.2, 0.2);
		if (minimise(law->form, &drawn, other, 3, 200) < lowest)
			memcpy(draw->at, other, sizeof other);
	}
	free(drawn.x), free(normal);
}

/* The value of a parameter at coordinates. An E below 10^-6 nats is 0, which its logarithm never reaches. */
static double parameter_at(const double *at, const double centre[2], int parameter)
{
	if (parameter == 0)
		return at[0] > log(1e-6) ? exp(at[0]) : 0;
	if (parameter % 2 == 0)
		return exp(at[parameter]);
	return exp(at[parameter] + exp(at[parameter + 1]) * centre[parameter / 2]);
}

/* Different values among n: those that are more than a per cent apart. */
static int count_different(const double *values, int n)
{
	double *sorted = allocate(n * sizeof *sorted);
	int different = 0;
	for (int i = 0; i < n; i++)
		sorted[i] = values[i];
	if (n)
		qsort(sorted, n, sizeof *sorted, compare_doubles);
	for (int i = 0, last = 0; i < n; i++)
		if (i == 0 || sorted[i] > 1.01 * sorted[last])
			different++, last = i;
	free(sorted);
	return different;
}

/* Fails where points do not determine a law. */
static int check_points(enum scaling_form form, const struct scaling_points *points)
{
	const int n = points->count, num = scaling_forms[form].num, x = count_different(points->x, n);
	if (form == LAW_COMPUTE && x < num + 1)
		return fail("%s has %d parameters: expected points of at least %d different computes, found %d of %d points",
				scaling_forms[form].formula, num, num + 1, x, n);
	if (form == LAW_COMPUTE)
		return 0;
	const int y = count_different(points->y, n);
	if (n < num + 1 || x < 3 || y < 3)
		return fail("%s has %d parameters: expected at least %d points, of at least 3 different N and 3 different D; "
				"found %d points of %d N and %d D", scaling_forms[form].formula, num, num + 1, n, x, y);
	double mean[2] = {0}, square[2] = {0}, product = 0;
	for (int i = 0; i < n; i++)
		mean[0] += log(points->x[i]) / n, mean[1] += log(points->y[i]) / n;
	for (int i = 0; i < n; i++) {
		const double p = log(points->x[i]) - mean[0], q = log(points->y[i]) - mean[1];
		square[0] += p * p, square[1] += q * q, product += p * q;
	}
	if (product * product > 0.99 * square[0] * square[1])
		return fail("%s: N and D of the %d points grow together, so their terms cannot be told apart; expected runs of "
				"one N with different D, and of one D with different N", scaling_forms[form].formula, n);
	return 0;
}

int scaling_fit(struct scaling_law *law, enum scaling_form form, const struct scaling_points *points, int draws,
		uint64_t seed)
{
	const int num = scaling_forms[form].num, n = points->count;
	*law = (struct scaling_law){0};
	if (check_points(form, points) < 0)
		return -1;
	*law = (struct scaling_law){.form = form, .count = n, .num_draws = draws};
	for (int i = 0; i < n; i++) {
		law->centre[0] += log(points->x[i]) / n;
		law->centre[1] += form == LAW_SIZE ? log(points->y[i]) / n : 0;
		law->most_x = fmax(law->most_x, points->x[i]);
		law->most_y = form == LAW_SIZE ? fmax(law->most_y, points->y[i]) : 0;
	}
	struct logs l = logs_of(form, points, law->centre);
	minimise_from_grid(form, &l, law->fit.at);
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

/* The loss at coordinates. */
static double loss_at(const struct scaling_law *law, const double *at, double x, double y)
{
	return exp(log_loss(law->form, at, log(x) - law->centre[0], law->form == LAW_SIZE ? log(y) - law->centre[1] : 0,
			NULL));
}

double scaling_loss(const struct scaling_law *law, double x, double y)
{
	return loss_at(law, law->fit.at, x, y);
}

static double compute_at(const struct scaling_law *law, const double *at, double loss)
{
	const double above = loss - exp(at[0]);
	return above > 0 ? exp((at[1] - log(above)) / exp(at[2]) + law->centre[0]) : INFINITY;
}

double scaling_compute(const struct scaling_law *law, double loss)
{
	return compute_at(law, law->fit.at, loss);
}

/* The interval that holds the middle of n values, which it sorts: of n + 1 gaps between and around them, as many are
 * beyond each end. Releases them. */
static struct scaling_interval interval_of(double *values, int n, double confidence)
{
	struct scaling_interval out = {NAN, NAN};
	if (n) {
		qsort(values, n, sizeof *values, compare_doubles);
		const int k = (int)fmax(1, floor((n + 1) * (1 - confidence) / 2 + 1e-9));
		out = (struct scaling_interval){values[k - 1], values[n - k]};
	}
	free(values);
	return out;
}

struct scaling_interval scaling_parameter_interval(const struct scaling_law *law, int parameter, double confidence)
{
	double *values = allocate(law->num_draws * sizeof *values);
	for (int i = 0; i < law->num_draws; i++)
		values[i] = parameter_at(law->draw[i].at, law->centre, parameter);
	return interval_of(values, law->num_draws, confidence);
}

struct scaling_interval scaling_loss_interval(const struct scaling_law *law, double x, double y, double confidence)
{
	double *values = allocate(law->num_draws * sizeof *values);
	for (int i = 0; i < law->num_draws; i++)
		values[i] = loss_at(law, law->draw[i].at, x, y);
	return interval_of(values, law->num_draws, confidence);
}

static double allocation_at(const double *at)
{
	return 1 / (1 + exp(at[2] - at[4]));
}

struct scaling_interval scaling_allocation_interval(const struct scaling_law *law, double confidence, double *value)
{
	double *values = allocate(law->num_draws * sizeof *values);
	for (int i = 0; i < law->num_draws; i++)
		values[i] = allocation_at(law->draw[i].at);
	*value = allocation_at(law->fit.at);
	return interval_of(values, law->num_draws, confidence);
}

/* The log loss that a run is below with this probability: each draw says that it is normal about the draw's loss. */
static double run_quantile(const struct scaling_law *law, double x, double y, double probability)
{
	double low = log(1e-6), high = log(1e6);
	for (int i = 0; i < 100; i++) {
		const double middle = (low + high) / 2;
		double below = 0;
		for (int k = 0; k < law->num_draws; k++)
			below += erfc((log(loss_at(law, law->draw[k].at, x, y)) - middle) /
					(M_SQRT2 * fmax(law->draw[k].sigma, 1e-12))) / 2 / law->num_draws;
		if (below < probability)
			low = middle;
		else
			high = middle;
	}
	return exp(high);
}

struct scaling_interval scaling_run_interval(const struct scaling_law *law, double x, double y, double confidence)
{
	if (!law->num_draws)
		return (struct scaling_interval){NAN, NAN};
	const double beyond = (1 - confidence) / 2;
	return (struct scaling_interval){run_quantile(law, x, y, beyond), run_quantile(law, x, y, 1 - beyond)};
}

double scaling_leverage(const struct scaling_law *a, const struct scaling_law *b, double compute)
{
	return scaling_compute(a, scaling_loss(b, compute, 0)) / compute;
}

struct scaling_interval scaling_leverage_interval(const struct scaling_law *a, const struct scaling_law *b,
		double compute, double confidence)
{
	const int n = a->num_draws < b->num_draws ? a->num_draws : b->num_draws;
	double *values = allocate(n * sizeof *values);
	for (int i = 0; i < n; i++)
		values[i] = compute_at(a, a->draw[i].at, loss_at(b, b->draw[i].at, compute, 0)) / compute;
	return interval_of(values, n, confidence);
}

/* ---------------------------------------------------------------------------------------------------- power laws */

int power_law_fit(struct power_law *law, const double *x, const double *y, int n)
{
	double mean = 0, square = 0, product = 0, residual = 0;
	*law = (struct power_law){0};
	if (n < 2 || count_different(x, n) < 2)
		return fail("a power law has 2 parameters: expected points of at least 2 different computes, found %d",
				count_different(x, n));
	law->count = n;
	for (int i = 0; i < n; i++)
		law->centre += log(x[i]) / n, mean += log(y[i]) / n;
	for (int i = 0; i < n; i++) {
		const double at = log(x[i]) - law->centre;
		square += at * at, product += at * (log(y[i]) - mean);
	}
	law->exponent = product / square;
	law->deviation = sqrt(square);
	law->coefficient = exp(mean - law->exponent * law->centre);
	for (int i = 0; i < n; i++) {
		const double r = log(y[i]) - mean - law->exponent * (log(x[i]) - law->centre);
		residual += r * r;
	}
	law->sigma = n > 2 ? sqrt(residual / (n - 2)) : NAN;
	return 0;
}

double power_law_at(const struct power_law *law, double x)
{
	return law->coefficient * pow(x, law->exponent);
}

struct scaling_interval power_law_exponent_interval(const struct power_law *law, double confidence)
{
	const double half = law->count > 2 ? student_t(1 - confidence, law->count - 2) * law->sigma / law->deviation : NAN;
	return (struct scaling_interval){law->exponent - half, law->exponent + half};
}

struct scaling_interval power_law_interval(const struct power_law *law, double x, double confidence)
{
	const double away = (log(x) - law->centre) / law->deviation, middle = power_law_at(law, x);
	const double half = law->count > 2 ? student_t(1 - confidence, law->count - 2) * law->sigma *
			sqrt(1.0 / law->count + away * away) : NAN;
	return (struct scaling_interval){middle * exp(-half), middle * exp(half)};
}

/* ----------------------------------------------------------------------------------------------- the best of a grid */

const char *const optimum_methods[NUM_OPTIMUM_METHODS] = {
	"quadratic in learning rate and batch", "quadratic", "best run", "best run, at the edge of the grid", "not varied",
};

/* Where the value at `at` stands among the different values of v [n]: how many are below it. */
static int rank_of(const double *v, int n, double at)
{
	int rank = 0;
	for (int i = 0; i < n; i++) {
		bool first = v[i] < at;
		for (int j = 0; j < i && first; j++)
			first = v[j] != v[i];
		rank += first;
	}
	return rank;
}

enum { NEAR = 2 };               /* a quadratic is fitted to the best run and so many values to either side of it */

/* The lowest point of the quadratic in log v alone, among the runs that have the other value of the best one. */
static enum optimum_method optimum_in_one(double *value, const double *v, const double *other, const double *loss,
		int n, int best)
{
	double (*rows)[MAX_UNKNOWNS] = allocate(n * sizeof *rows), *y = allocate(2 * n * sizeof *y), *line = y + n;
	double out[MAX_UNKNOWNS], centre = log(v[best]), low = 0, high = 0;
	int count = 0, values = 0;
	*value = v[best];
	for (int i = 0; i < n; i++)
		if (other[i] == other[best])
			line[values++] = v[i];
	const int rank = rank_of(line, values, v[best]);
	for (int i = 0; i < n; i++) {
		if (other[i] != other[best] || abs(rank_of(line, values, v[i]) - rank) > NEAR)
			continue;
		const double x = log(v[i]) - centre;
		rows[count][0] = 1, rows[count][1] = x, rows[count][2] = x * x;
		y[count++] = loss[i];
		low = fmin(low, x), high = fmax(high, x);
	}
	enum optimum_method method = rank_of(v, n, INFINITY) < 2 ? OPTIMUM_NONE : low == 0 || high == 0 ? OPTIMUM_EDGE
			: OPTIMUM_BEST;
	if (method == OPTIMUM_BEST && least_squares(out, rows, y, count, 3) && out[2] > 0 &&
			-out[1] / (2 * out[2]) > low && -out[1] / (2 * out[2]) < high) {
		*value = exp(centre - out[1] / (2 * out[2]));
		method = OPTIMUM_QUADRATIC;
	}
	free(rows), free(y);
	return method;
}

/* The lowest point of a quadratic in both. Returns whether there is one, within the runs that it is fitted to. */
static bool optimum_in_two(double value[2], const double *const v[2], const double *loss, int n, int best)
{
	double (*rows)[MAX_UNKNOWNS] = allocate(n * sizeof *rows), *y = allocate(n * sizeof *y), out[MAX_UNKNOWNS];
	double low[2] = {0}, high[2] = {0};
	int count = 0;
	for (int i = 0; i < n; i++) {
		double x[2];
		bool near = true;
		for (int d = 0; d < 2; d++) {
			near &= abs(rank_of(v[d], n, v[d][i]) - rank_of(v[d], n, v[d][best])) <= NEAR;
			x[d] = log(v[d][i] / v[d][best]);
		}
		for (int d = 0; near && d < 2; d++)
			low[d] = fmin(low[d], x[d]), high[d] = fmax(high[d], x[d]);
		if (near) {
			const double row[MAX_UNKNOWNS] = {1, x[0], x[1], x[0] * x[0], x[0] * x[1], x[1] * x[1]};
			memcpy(rows[count], row, sizeof row);
			y[count++] = loss[i];
		}
	}
	bool found = count > MAX_UNKNOWNS && least_squares(out, rows, y, count, MAX_UNKNOWNS);
	const double determinant = found ? 4 * out[3] * out[5] - out[4] * out[4] : 0;
	found = found && out[3] > 0 && determinant > 0;
	if (found) {
		const double x[2] = {(out[4] * out[2] - 2 * out[5] * out[1]) / determinant,
				(out[4] * out[1] - 2 * out[3] * out[2]) / determinant};
		for (int d = 0; d < 2; d++) {
			found &= x[d] > low[d] && x[d] < high[d];
			value[d] = v[d][best] * exp(x[d]);
		}
	}
	free(rows), free(y);
	return found;
}

struct optimum scaling_optimum(const double *learning_rate, const double *batch, const double *loss, int n)
{
	struct optimum o = {0};
	const double *const v[2] = {learning_rate, batch};
	for (int i = 1; i < n; i++)
		o.best = loss[i] < loss[o.best] ? i : o.best;
	if (optimum_in_two(o.value, v, loss, n, o.best))
		o.method[0] = o.method[1] = OPTIMUM_QUADRATIC_2D;
	else
		for (int d = 0; d < 2; d++)
			o.method[d] = optimum_in_one(&o.value[d], v[d], v[!d], loss, n, o.best);
	return o;
}

/* ------------------------------------------------------------------------------------------------------------ JSON */

static json_t *interval_to_json(double value, struct scaling_interval interval)
{
	return json_pack("{s:o, s:o, s:o}", "value", result_number(value), "low", result_number(interval.low), "high",
			result_number(interval.high));
}

static json_t *draw_to_json(const struct scaling_draw *draw, int num)
{
	json_t *row = json_array();
	for (int k = 0; k < num; k++)
		json_array_append_new(row, json_real(draw->at[k]));
	json_array_append_new(row, json_real(draw->sigma));
	return row;
}

json_t *scaling_law_to_json(const struct scaling_law *law, double confidence, bool draws)
{
	const struct scaling_law_form *form = &scaling_forms[law->form];
	json_t *parameters = json_object(), *list = json_array();
	for (int k = 0; k < form->num; k++)
		json_object_set_new(parameters, form->parameter[k], interval_to_json(law->value[k],
				scaling_parameter_interval(law, k, confidence)));
	for (int i = 0; draws && i < law->num_draws; i++)
		json_array_append_new(list, draw_to_json(&law->draw[i], form->num));
	json_t *json = json_pack("{s:s, s:i, s:o, s:f, s:f, s:f, s:[f, f], s:o, s:o}", "formula", form->formula, "points",
			law->count, "parameters", parameters, "sigma", law->fit.sigma, "most_x", law->most_x, "most_y",
			law->most_y, "centre", law->centre[0], law->centre[1], "fit", draw_to_json(&law->fit, form->num), "draws",
			list);
	if (law->form == LAW_SIZE) {
		double exponent;
		const struct scaling_interval interval = scaling_allocation_interval(law, confidence, &exponent);
		json_object_set_new(json, "allocation", interval_to_json(exponent, interval));
	}
	return json;
}

json_t *power_law_to_json(const struct power_law *law, double confidence)
{
	return json_pack("{s:s, s:i, s:f, s:o, s:f, s:f, s:o}", "formula", "K C^p", "points", law->count, "coefficient",
			law->coefficient, "exponent", interval_to_json(law->exponent, power_law_exponent_interval(law, confidence)),
			"centre", law->centre, "deviation", law->deviation, "sigma", result_number(law->sigma));
}

/* Reads a finite number at a path. */
static int read_at(const json_t *json, const char *where, const char *what, const char *path, double *out)
{
	const json_t *number = json_at(json, path);
	if (!json_is_number(number))
		return fail("%s: `%s.%s` is %s; expected a number, as `ling fit --json` prints it", where, what, path,
				json_kind(number));
	*out = json_number_value(number);
	return 0;
}

/* Reads the coordinates and sigma of a draw. */
static int read_draw(const json_t *row, const char *where, const char *what, struct scaling_draw *draw, int num)
{
	bool good = json_array_size(row) == (size_t)num + 1;
	for (int k = 0; good && k <= num; k++) {
		const json_t *number = json_array_get(row, k);
		const double x = json_is_number(number) ? json_number_value(number) : NAN;
		good = fabs(x) < 60 && (k < num || x >= 0);
		*(k < num ? &draw->at[k] : &draw->sigma) = x;
	}
	return good ? 0 : fail("%s: `%s` has a draw that is no list of %d numbers; expected them as `ling fit --json` "
			"prints them", where, what, num + 1);
}

static int read_law(struct scaling_law *law, enum scaling_form form, const json_t *json, const char *where)
{
	const struct scaling_law_form *f = &scaling_forms[form];
	const json_t *draws = json_object_get(json, "draws");
	int64_t points;
	law->form = form;
	if (field_int(json, where, "points", f->num + 1, INT32_MAX, &points) < 0 ||
			read_at(json, where, f->name, "centre.0", &law->centre[0]) < 0 ||
			read_at(json, where, f->name, "centre.1", &law->centre[1]) < 0 ||
			read_at(json, where, f->name, "most_x", &law->most_x) < 0 ||
			read_at(json, where, f->name, "most_y", &law->most_y) < 0 ||
			read_draw(json_object_get(json, "fit"), where, f->name, &law->fit, f->num) < 0)
		return -1;
	for (int k = 0; k < f->num; k++)
		law->value[k] = parameter_at(law->fit.at, law->centre, k);
	law->num_draws = (int)json_array_size(draws);
	law->draw = allocate(law->num_draws * sizeof *law->draw);
	for (int i = 0; i < law->num_draws; i++)
		if (read_draw(json_array_get(draws, i), where, f->name, &law->draw[i], f->num) < 0)
			return -1;
	law->count = (int)points;
	return 0;
}

static int read_power_law(struct power_law *law, const json_t *json, const char *where, const char *what)
{
	int64_t points;
	law->sigma = NAN;
	if (field_int(json, where, "points", 2, INT32_MAX, &points) < 0 ||
			read_at(json, where, what, "coefficient", &law->coefficient) < 0 ||
			read_at(json, where, what, "exponent.value", &law->exponent) < 0 ||
			read_at(json, where, what, "centre", &law->centre) < 0 ||
			read_at(json, where, what, "deviation", &law->deviation) < 0 ||
			(points > 2 && read_at(json, where, what, "sigma", &law->sigma) < 0))
		return -1;
	law->count = (int)points;
	return 0;
}

int scaling_fits_read(struct scaling_fits *fits, const json_t *report, const char *where)
{
	static const char *const optima[] = {"learning_rate", "batch_tokens"};
	int rc = 0, found = 0;
	*fits = (struct scaling_fits){0};
	for (int form = 0; form < NUM_LAWS && rc == 0; form++) {
		const json_t *json = json_object_get(report, scaling_forms[form].name);
		if (json_is_object(json))
			found++, rc = read_law(&fits->law[form], form, json, where);
	}
	for (int d = 0; d < 2 && rc == 0; d++) {
		const json_t *json = json_object_get(report, optima[d]);
		if (json_is_object(json))
			found++, rc = read_power_law(&fits->optimum[d], json, where, optima[d]);
	}
	if (rc == 0 && fits->law[LAW_SIZE].count) {
		const char *column = field_text(json_object_get(report, "size"), where, "column");
		rc = column ? 0 : -1;
		snprintf(fits->size_column, sizeof fits->size_column, "%s", column ? column : "");
	}
	if (rc == 0 && !found)
		rc = fail("%s: has no scaling law; expected what `ling fit --json` prints", where);
	if (rc < 0)
		scaling_fits_free(fits);
	return rc;
}

void scaling_fits_free(struct scaling_fits *fits)
{
	for (int form = 0; form < NUM_LAWS; form++)
		scaling_law_free(&fits->law[form]);
	*fits = (struct scaling_fits){0};
}
