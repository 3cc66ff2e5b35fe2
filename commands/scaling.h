/*
 * commands/scaling.h - scaling laws: their forms, how they are fitted to runs, and what they predict. No input and
 * output; docs/scaling.md explains what is computed and why.
 *
 * The laws of the loss, in nats a token, with E the loss that no compute removes:
 *
 *   LAW_COMPUTE    L = E + A C^-a               C: FLOPs
 *   LAW_SIZE       L = E + A N^-a + B D^-b      N: parameters, D: tokens
 *
 * Beside them: power laws y = K x^p, for the best learning rate and batch by compute.
 */
#ifndef LING_COMMANDS_SCALING_H
#define LING_COMMANDS_SCALING_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

enum scaling_form { LAW_COMPUTE, LAW_SIZE, NUM_LAWS };
enum { MAX_LAW_PARAMETERS = 5 };
extern const struct scaling_law_form {
	const char *name, *formula;
	int num;                     /* parameters: E, then amplitude and exponent of each term */
	const char *parameter[MAX_LAW_PARAMETERS];
} scaling_forms[NUM_LAWS];

/* What a law is fitted to. x: C, or N; y: D, not used by LAW_COMPUTE. All above 0 and finite. */
struct scaling_points { int count; const double *x, *y, *loss; };

/* The Huber loss with this delta, of log residuals, is what a fit minimises: as Hoffmann et al. (arXiv 2203.15556,
 * appendix D.3) have it. */
#define HUBER_DELTA 1e-3

/* The coordinates in which a law is fitted: log E; then for each term its logarithm at the centre of the points, and
 * the logarithm of its exponent. So E, A, B and the exponents are above 0. */
struct scaling_draw { double at[MAX_LAW_PARAMETERS], sigma; };

struct scaling_law {
	enum scaling_form form;
	double value[MAX_LAW_PARAMETERS]; /* E, A, a, B, b */
	double centre[2];            /* means of log x and log y of the points */
	struct scaling_draw fit;     /* sigma: standard deviation of the log residuals, of count - num degrees of freedom */
	int count;                   /* points */
	int num_draws;               /* of the bootstrap */
	struct scaling_draw *draw;   /* [num_draws] */
	double most_x, most_y;       /* largest of the points */
};

/* The sum of Huber losses of the log residuals over HUBER_DELTA^2, at the coordinates `at`; gradient [num], or NULL. */
double scaling_objective(enum scaling_form form, const struct scaling_points *points, const double centre[2],
		const double *at, double *gradient);

/* Fits a law, with `draws` draws of the bootstrap, whose random numbers are those of the seed: the same call gives the
 * same bits for any number of threads. Fails where the points do not determine the law: fewer than its parameters + 1,
 * or too few different values of x or y. The law is to be freed. */
int scaling_fit(struct scaling_law *law, enum scaling_form form, const struct scaling_points *points, int draws,
		uint64_t seed);
void scaling_law_free(struct scaling_law *law); /* a struct of zeros is fine */

/* The loss by the law. */
double scaling_loss(const struct scaling_law *law, double x, double y);
/* Of LAW_COMPUTE, the compute for a loss; INFINITY for one that it never reaches. */
double scaling_compute(const struct scaling_law *law, double loss);

/* The draws make intervals of a confidence, such as 0.95. NaN without draws. */
struct scaling_interval { double low, high; };
/* Of a parameter, an index of `value`. */
struct scaling_interval scaling_parameter_interval(const struct scaling_law *law, int parameter, double confidence);
/* Of the loss by the law. */
struct scaling_interval scaling_loss_interval(const struct scaling_law *law, double x, double y, double confidence);
/* Of the loss of one more run, whose noise is added. */
struct scaling_interval scaling_run_interval(const struct scaling_law *law, double x, double y, double confidence);
/* Of LAW_SIZE, how the N of the lowest loss grows with compute, N = K C^p where C goes with N D: p = b / (a + b), and
 * D grows with the power 1 - p. *value: by the fit. */
struct scaling_interval scaling_allocation_interval(const struct scaling_law *law, double confidence, double *value);
/* Of the efficiency leverage of b over a, both LAW_COMPUTE: the compute at which a reaches the loss that b reaches with
 * `compute`, over `compute`. INFINITY where a may never reach it. */
double scaling_leverage(const struct scaling_law *a, const struct scaling_law *b, double compute);
struct scaling_interval scaling_leverage_interval(const struct scaling_law *a, const struct scaling_law *b,
		double compute, double confidence);

/* ---- power laws */

struct power_law {
	int count;                   /* points; 0: there is no law */
	double coefficient, exponent;
	double centre, deviation;    /* of log x: mean, square root of the sum of squares about it */
	double sigma;                /* standard deviation of the residuals of log y; NaN of two points */
};
/* Least squares in logarithms. x and y above 0, n >= 2. Fails where all x are the same. */
int power_law_fit(struct power_law *law, const double *x, const double *y, int n);
double power_law_at(const struct power_law *law, double x);
/* By Student's t; NaN of two points. Of the exponent, and of the law at x. */
struct scaling_interval power_law_exponent_interval(const struct power_law *law, double confidence);
struct scaling_interval power_law_interval(const struct power_law *law, double x, double confidence);

/* ---- the best of a grid */

enum optimum_method {
	OPTIMUM_QUADRATIC_2D,        /* the lowest point of a quadratic in log learning rate and log batch */
	OPTIMUM_QUADRATIC,           /* of one in the logarithm of this one alone, the other being that of the best run */
	OPTIMUM_BEST,                /* the best run of the grid, as no quadratic has its lowest point within it */
	OPTIMUM_EDGE,                /* the best run has the smallest or the largest value: the optimum may lie beyond */
	OPTIMUM_NONE,                /* the grid has one value of it */
	NUM_OPTIMUM_METHODS
};
extern const char *const optimum_methods[NUM_OPTIMUM_METHODS]; /* in words */
enum { OPTIMUM_LEARNING_RATE, OPTIMUM_BATCH };
struct optimum { double value[2]; enum optimum_method method[2]; int best; };
/* The best learning rate and batch of a grid of n runs, which need not be complete. best: the run of the lowest
 * loss. */
struct optimum scaling_optimum(const double *learning_rate, const double *batch, const double *loss, int n);

/* ---- as JSON, for `ling fit --json` and whoever reads what it printed */

/* A law with its intervals and draws; without `draws`, no prediction from it has an interval. */
json_t *scaling_law_to_json(const struct scaling_law *law, double confidence, bool draws);
json_t *power_law_to_json(const struct power_law *law, double confidence);

/* What `ling fit --json` found. */
struct scaling_fits {
	struct scaling_law law[NUM_LAWS]; /* count 0: it was not fitted */
	char size_column[32];        /* the column of a table of runs that N is, such as "active_parameters" */
	struct power_law optimum[2]; /* of learning rate and tokens of a batch, by compute; count 0: not fitted */
};
/* Reads it; `where`, a file, begins the messages. On error nothing is to be freed. */
int scaling_fits_read(struct scaling_fits *fits, const json_t *report, const char *where);
void scaling_fits_free(struct scaling_fits *fits);

#endif
