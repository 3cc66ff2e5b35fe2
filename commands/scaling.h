/*
 * commands/scaling.h - scaling laws: their forms, how they are fitted to runs, and what they predict. No input and
 * output; docs/scaling.md explains what is computed and why.
 *
 * The laws of the loss, in nats a token, with E the loss that no compute removes:
 *
 *   LAW_COMPUTE    L = E + A C^-a               C: FLOPs
 *   LAW_SIZE       L = E + A N^-a + B D^-b      N: parameters, D: tokens
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
	double objective;            /* see scaling_objective() */
	int count;                   /* points */
	int num_draws;               /* of the bootstrap */
	struct scaling_draw *draw;   /* [num_draws] */
	double most_x, most_y;       /* largest of the points */
};

struct scaling_interval { double low, high; };

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
/* Intervals of this confidence, such as 0.95, from the draws: of a parameter, an index of `value`; of the loss by the
 * law; and of the loss of one run, whose noise is added. NaN without draws. */
struct scaling_interval scaling_parameter_interval(const struct scaling_law *law, int parameter, double confidence);
struct scaling_interval scaling_loss_interval(const struct scaling_law *law, double x, double y, double confidence);
struct scaling_interval scaling_run_interval(const struct scaling_law *law, double x, double y, double confidence);

#endif
