/* Scaling laws: gradients, laws found again, intervals that hold the truth, the best of a grid, JSON; tables of
 * runs. */
#define _GNU_SOURCE
#include "tests/test.h"

#include "commands/scaling.h"
#include "commands/scaling_runs.h"
#include "kernels.h"

/* Losses near those of small runs: E 1.7, 2.5 above it at 10^15 FLOPs; 1 and 1.5 at 3 million parameters and 30
 * million tokens. A and B follow. */
static const double compute_law[] = {1.7, 444.57, 0.15}, size_law[] = {1.7, 159.04, 0.34, 185.93, 0.28};
enum { MOST_POINTS = 32 };

struct example { double x[MOST_POINTS], y[MOST_POINTS], loss[MOST_POINTS]; struct scaling_points points; };

static const double *truth_of(enum scaling_form form)
{
	return form == LAW_SIZE ? size_law : compute_law;
}

static double true_loss(enum scaling_form form, double x, double y)
{
	const double *p = truth_of(form);
	return p[0] + p[1] * pow(x, -p[2]) + (form == LAW_SIZE ? p[3] * pow(y, -p[4]) : 0);
}

/* side points of LAW_COMPUTE over two decades; or of LAW_SIZE side * side, over 1.5 decades of each. Their losses have
 * noise of this relative size. */
static void make_example(struct example *e, enum scaling_form form, int side, double noise, uint64_t seed)
{
	const int n = form == LAW_SIZE ? side * side : side;
	const struct random_stream stream = {.seed = seed, .purpose = RANDOM_SCALING + 1};
	real normal[MOST_POINTS];
	random_normal(normal, n, &stream, 0);
	for (int i = 0; i < n; i++) {
		e->x[i] = form == LAW_SIZE ? 1e6 * pow(10, 1.5 * (i / side) / (side - 1))
				: 1e14 * pow(10, 2.0 * i / (side - 1));
		e->y[i] = 1e7 * pow(10, 1.5 * (i % side) / (side - 1));
		e->loss[i] = true_loss(form, e->x[i], e->y[i]) * exp(noise * normal[i]);
	}
	e->points = (struct scaling_points){n, e->x, e->y, e->loss};
}

static void test_gradient(void **state)
{
	(void)state;
	static const double at[][MAX_LAW_PARAMETERS] = {{0.5, 0.4, -1.5, 0.1, -1.2}, {0.9, -1, -0.5, -2, -3},
		{-3, 1, -2, 0.5, 0.3}, {0.5306, 1.147, -1.897, 0.184, -1.273}}; /* the last near the laws of the examples */
	for (int form = 0; form < NUM_LAWS; form++)
		for (int k = 0; k < COUNT(at); k++) {
			struct example e;
			double centre[2] = {33, 18}, gradient[MAX_LAW_PARAMETERS], moved[MAX_LAW_PARAMETERS];
			make_example(&e, form, 4, 0.001, 1);
			centre[0] = form == LAW_SIZE ? 15.5 : 33;
			scaling_objective(form, &e.points, centre, at[k], gradient);
			for (int i = 0; i < scaling_forms[form].num; i++) {
				const double h = 1e-6;
				memcpy(moved, at[k], sizeof moved);
				moved[i] = at[k][i] + h;
				const double above = scaling_objective(form, &e.points, centre, moved, NULL);
				moved[i] = at[k][i] - h;
				const double slope = (above - scaling_objective(form, &e.points, centre, moved, NULL)) / (2 * h);
				if (!(fabs(slope - gradient[i]) <= 1e-5 * fabs(slope) + 1e-3))
					fail_msg("law %d, point %d, coordinate %d: %g, by differences %g", form, k, i, gradient[i], slope);
			}
		}
}

/* Where a residual is below HUBER_DELTA the loss is r^2 / 2, above delta |r| - delta^2 / 2; here over delta^2. */
static void test_huber(void **state)
{
	(void)state;
	const double x = 1, y = 1, centre[2] = {0}, at[] = {0, 0, 0}; /* the law says 2 */
	for (int k = 0; k < 3; k++) {
		const double r = (double[]){0.25e-3, 1e-3, 0.02}[k], loss = 2 * exp(-r);
		const struct scaling_points points = {1, &x, &y, &loss};
		const double want = r <= HUBER_DELTA ? r * r / 2 : HUBER_DELTA * (r - HUBER_DELTA / 2);
		assert_true(fabs(scaling_objective(LAW_COMPUTE, &points, centre, at, NULL) * HUBER_DELTA * HUBER_DELTA / want -
				1) < 1e-9);
	}
}

/* Without noise the law is found; its amplitudes, of x^-a far from the points, to some more digits than a. */
static void test_exact(void **state)
{
	(void)state;
	for (int form = 0; form < NUM_LAWS; form++)
		for (int side = 4; side <= 5; side++) {
			struct example e;
			struct scaling_law law;
			make_example(&e, form, side, 0, 1);
			assert_int_equal(scaling_fit(&law, form, &e.points, 0, 1), 0);
			for (int k = 0; k < scaling_forms[form].num; k++)
				if (!(fabs(law.value[k] / truth_of(form)[k] - 1) < (k % 2 ? 1e-4 : 1e-5)))
					fail_msg("law %d of side %d: %s is %.10g, not %.10g", form, side, scaling_forms[form].parameter[k],
							law.value[k], truth_of(form)[k]);
			assert_true(law.fit.sigma < 1e-7);
			assert_true(fabs(scaling_loss(&law, 1e17, 1e9) / true_loss(form, 1e17, 1e9) - 1) < 1e-6);
			assert_true(isnan(scaling_parameter_interval(&law, 0, 0.95).low)); /* no draws */
			double exponent;
			if (form == LAW_SIZE) {
				assert_true(isnan(scaling_allocation_interval(&law, 0.95, &exponent).low));
				assert_true(fabs(exponent - 0.28 / (0.28 + 0.34)) < 1e-5);
			}
			scaling_law_free(&law);
		}
}

/* Of 100 tables with noise, the 95 % intervals hold each parameter, the loss at ten times the scale and the loss of a
 * run there in at least 90. (Of 95 in 100, 90 or more are to be expected in 99 of 100 such tests.) */
static void test_intervals(void **state)
{
	(void)state;
	static const struct { enum scaling_form form; int side; double noise; } cases[] = {
		{LAW_COMPUTE, 7, 0.001}, {LAW_COMPUTE, 12, 0.004}, {LAW_SIZE, 3, 0.001}, {LAW_SIZE, 4, 0.003},
	};
	enum { TABLES = 100, DRAWS = 159 };
	for (int c = 0; c < COUNT(cases); c++) {
		const enum scaling_form form = cases[c].form;
		const int num = scaling_forms[form].num;
		int held[MAX_LAW_PARAMETERS + 2] = {0};
		for (int t = 0; t < TABLES; t++) {
			struct example e;
			struct scaling_law law;
			real normal;
			make_example(&e, form, cases[c].side, cases[c].noise, 1000 + t);
			assert_int_equal(scaling_fit(&law, form, &e.points, DRAWS, t), 0);
			const double x = 10 * law.most_x, y = 10 * law.most_y, loss = true_loss(form, x, y);
			random_normal(&normal, 1, &(struct random_stream){.seed = t, .purpose = RANDOM_SCALING + 2}, 0);
			for (int k = 0; k < num + 2; k++) {
				const struct scaling_interval i = k < num ? scaling_parameter_interval(&law, k, 0.95) : k == num
						? scaling_loss_interval(&law, x, y, 0.95) : scaling_run_interval(&law, x, y, 0.95);
				const double truth = k < num ? truth_of(form)[k] : k == num ? loss
						: loss * exp(cases[c].noise * normal);
				held[k] += i.low <= truth && truth <= i.high;
			}
			scaling_law_free(&law);
		}
		for (int k = 0; k < num + 2; k++)
			if (held[k] < 90)
				fail_msg("case %d: %s is in its interval in %d of %d tables", c, k < num
						? scaling_forms[form].parameter[k] : k == num ? "the loss" : "a run's loss", held[k], TABLES);
	}
}

/* The same call gives the same bits, whatever the threads; another seed other draws. */
static void test_deterministic(void **state)
{
	(void)state;
	struct example e;
	struct scaling_law a, b, c;
	make_example(&e, LAW_SIZE, 4, 0.002, 5);
	assert_int_equal(scaling_fit(&a, LAW_SIZE, &e.points, 99, 3), 0);
	assert_int_equal(scaling_fit(&b, LAW_SIZE, &e.points, 99, 3), 0);
	assert_int_equal(scaling_fit(&c, LAW_SIZE, &e.points, 99, 4), 0);
	for (int k = 0; k < 5; k++) {
		assert_same(a.value[k], b.value[k]);
		assert_same(a.value[k], c.value[k]);
		assert_same(scaling_parameter_interval(&a, k, 0.95).low, scaling_parameter_interval(&b, k, 0.95).low);
		assert_true(scaling_parameter_interval(&a, k, 0.95).low != scaling_parameter_interval(&c, k, 0.95).low);
	}
	scaling_law_free(&a), scaling_law_free(&b), scaling_law_free(&c);
}

/* One loss that is far off moves the law less than a least-squares fit would be moved. */
static void test_outlier(void **state)
{
	(void)state;
	struct example e;
	struct scaling_law law;
	make_example(&e, LAW_COMPUTE, 20, 0.0002, 7);
	e.loss[10] *= 1.1;
	assert_int_equal(scaling_fit(&law, LAW_COMPUTE, &e.points, 0, 1), 0);
	for (int i = 0; i < 20; i++)
		if (i != 10)
			assert_true(fabs(scaling_loss(&law, e.x[i], 0) / e.loss[i] - 1) < 0.0015);
	scaling_law_free(&law);
}

static void test_fit_errors(void **state)
{
	(void)state;
	struct example e;
	struct scaling_law law;
	make_example(&e, LAW_COMPUTE, 3, 0.001, 1);
	assert_int_equal(scaling_fit(&law, LAW_COMPUTE, &e.points, 99, 1), -1);
	assert_non_null(strstr(error_text, "at least 4 different computes, found 3 of 3 points"));
	make_example(&e, LAW_COMPUTE, 8, 0.001, 1);
	for (int i = 0; i < 8; i++)
		e.x[i] = 1e15 * (1 + 1e-4 * i);
	assert_int_equal(scaling_fit(&law, LAW_COMPUTE, &e.points, 99, 1), -1);
	assert_non_null(strstr(error_text, "found 1 of 8 points"));
	make_example(&e, LAW_SIZE, 4, 0.001, 1);
	for (int i = 0; i < 16; i++)
		e.y[i] = 20 * e.x[i] * (1 + 0.001 * (i % 4));
	assert_int_equal(scaling_fit(&law, LAW_SIZE, &e.points, 99, 1), -1);
	assert_non_null(strstr(error_text, "grow together"));
	make_example(&e, LAW_SIZE, 2, 0.001, 1);
	assert_int_equal(scaling_fit(&law, LAW_SIZE, &e.points, 99, 1), -1);
	assert_non_null(strstr(error_text, "found 4 points of 2 N and 2 D"));
	assert_null(law.draw);
}

/* What was printed is read back to the bit. */
static void test_json(void **state)
{
	(void)state;
	struct scaling_fits fits;
	struct example e;
	struct scaling_law law;
	struct power_law power;
	make_example(&e, LAW_SIZE, 4, 0.002, 5);
	assert_int_equal(scaling_fit(&law, LAW_SIZE, &e.points, 99, 3), 0);
	assert_int_equal(power_law_fit(&power, (double[]){1e14, 1e15, 1e16}, (double[]){0.01, 0.0062, 0.0041}, 3), 0);
	json_t *size = scaling_law_to_json(&law, 0.95, true);
	json_object_set_new(size, "column", json_string("active_parameters"));
	json_t *report = json_pack("{s:o, s:o}", "size", size, "learning_rate", power_law_to_json(&power, 0.95));
	char *text = json_dumps(report, 0);
	json_t *read = json_loads(text, 0, NULL);
	assert_int_equal(scaling_fits_read(&fits, read, "fit.json"), 0);
	assert_int_equal(fits.law[LAW_COMPUTE].count, 0);
	assert_int_equal(fits.optimum[1].count, 0);
	assert_string_equal(fits.size_column, "active_parameters");
	const struct scaling_law *l = &fits.law[LAW_SIZE];
	assert_same(scaling_loss(l, 3e7, 1e9), scaling_loss(&law, 3e7, 1e9));
	assert_same(scaling_run_interval(l, 3e7, 1e9, 0.9).high, scaling_run_interval(&law, 3e7, 1e9, 0.9).high);
	assert_same(scaling_parameter_interval(l, 3, 0.95).low, scaling_parameter_interval(&law, 3, 0.95).low);
	assert_same(power_law_at(&fits.optimum[0], 1e17), power_law_at(&power, 1e17));
	assert_same(power_law_interval(&fits.optimum[0], 1e17, 0.95).low, power_law_interval(&power, 1e17, 0.95).low);
	scaling_fits_free(&fits);
	/* what is not what it prints */
	json_array_append_new(json_object_get(json_object_get(read, "size"), "draws"), json_pack("[f, f]", 1.0, 2.0));
	assert_int_equal(scaling_fits_read(&fits, read, "fit.json"), -1);
	assert_non_null(strstr(error_text, "fit.json: `size` has a draw that is no list of 6 numbers"));
	json_object_del(json_object_get(read, "size"), "centre");
	assert_int_equal(scaling_fits_read(&fits, read, "fit.json"), -1);
	assert_non_null(strstr(error_text, "`size.centre.0` is missing"));
	json_object_clear(read);
	assert_int_equal(scaling_fits_read(&fits, read, "fit.json"), -1);
	assert_non_null(strstr(error_text, "fit.json: has no scaling law"));
	json_decref(read), json_decref(report), free(text);
	scaling_law_free(&law);
}

/* Least squares of four points by hand: log y = 1, 3, 2, 4 at log x = 0, 1, 2, 3 has slope 0.8, intercept 1.3 and a sum
 * of squares of 1.8; t of 95 % and 2 degrees of freedom is 4.3027. */
static void test_power_law(void **state)
{
	(void)state;
	double x[4], y[4];
	struct power_law law;
	for (int i = 0; i < 4; i++)
		x[i] = exp(i), y[i] = exp((double[]){1, 3, 2, 4}[i]);
	assert_int_equal(power_law_fit(&law, x, y, 4), 0);
	assert_true(fabs(law.exponent - 0.8) < 1e-12 && fabs(law.coefficient - exp(1.3)) < 1e-12);
	assert_true(fabs(law.sigma - sqrt(0.9)) < 1e-12);
	assert_true(fabs(power_law_exponent_interval(&law, 0.95).high - 0.8 - 4.3027 * sqrt(0.9 / 5)) < 1e-3);
	assert_true(fabs(log(power_law_interval(&law, exp(1.5), 0.95).low) - 2.5 + 4.3027 * sqrt(0.9 / 4)) < 1e-3);
	assert_int_equal(power_law_fit(&law, x, y, 2), 0);
	assert_true(isnan(power_law_exponent_interval(&law, 0.95).low) && fabs(law.exponent - 2) < 1e-12);
	x[1] = x[0];
	assert_int_equal(power_law_fit(&law, x, y, 2), -1);
}

/* Quadratics, of which the lowest point is known. */
static void test_optimum(void **state)
{
	(void)state;
	double rate[25], batch[25], loss[25];
	for (int i = 0; i < 25; i++) {
		rate[i] = 1e-3 * pow(2, i % 5), batch[i] = 4096 * pow(2, i / 5);
		const double p = log(rate[i] / 3e-3), q = log(batch[i] / 2e4);
		loss[i] = 3 + 0.05 * p * p + 0.02 * q * q - 0.01 * p * q;
	}
	struct optimum o = scaling_optimum(rate, batch, loss, 25);
	assert_int_equal(o.method[0], OPTIMUM_QUADRATIC_2D);
	assert_true(fabs(o.value[0] / 3e-3 - 1) < 1e-6 && fabs(o.value[1] / 2e4 - 1) < 1e-6);
	for (int i = 0; i < 5; i++) /* one batch, no two-dimensional quadratic */
		loss[i] = 3 + 0.05 * pow(log(rate[i] / 3e-3), 2);
	o = scaling_optimum(rate, batch, loss, 5);
	assert_int_equal(o.method[0], OPTIMUM_QUADRATIC);
	assert_int_equal(o.method[1], OPTIMUM_NONE);
	assert_true(fabs(o.value[0] / 3e-3 - 1) < 1e-6);
	assert_same(o.value[1], 4096);
	for (int i = 0; i < 5; i++)
		loss[i] = 3 - i * 0.01;
	o = scaling_optimum(rate, batch, loss, 5);
	assert_int_equal(o.method[0], OPTIMUM_EDGE);
	assert_same(o.value[0], rate[4]);
	const double cross_rate[] = {1e-3, 2e-3, 4e-3, 2e-3, 2e-3}, cross_batch[] = {8, 8, 8, 4, 16},
			cross_loss[] = {3.1, 3, 3.2, 3.05, 3.04}; /* a cross: each on its own line */
	o = scaling_optimum(cross_rate, cross_batch, cross_loss, 5);
	assert_int_equal(o.method[0], OPTIMUM_QUADRATIC);
	assert_int_equal(o.method[1], OPTIMUM_QUADRATIC);
	assert_true(o.value[0] > 1e-3 && o.value[0] < 2e-3 && o.value[1] > 8 && o.value[1] < 16);
	o = scaling_optimum(cross_rate, cross_batch, cross_loss, 1);
	assert_int_equal(o.method[0], OPTIMUM_NONE);
}

/* Two laws with the same exponent: the leverage is (A_dense / A_moe)^(1/a) at any compute. */
static void test_leverage(void **state)
{
	(void)state;
	struct example e;
	struct scaling_law dense, moe;
	make_example(&e, LAW_COMPUTE, 8, 0, 1);
	assert_int_equal(scaling_fit(&dense, LAW_COMPUTE, &e.points, 0, 1), 0);
	for (int i = 0; i < 8; i++)
		e.loss[i] = 1.7 + (e.loss[i] - 1.7) * 0.8;
	assert_int_equal(scaling_fit(&moe, LAW_COMPUTE, &e.points, 0, 1), 0);
	assert_true(fabs(scaling_leverage(&dense, &moe, 1e15) / pow(1 / 0.8, 1 / 0.15) - 1) < 1e-3);
	assert_true(fabs(scaling_leverage(&dense, &moe, 1e17) / pow(1 / 0.8, 1 / 0.15) - 1) < 1e-3);
	assert_true(fabs(scaling_leverage(&moe, &dense, 1e15) * pow(1 / 0.8, 1 / 0.15) - 1) < 1e-3);
	assert_true(isinf(scaling_compute(&dense, 1.69)));
	scaling_law_free(&dense), scaling_law_free(&moe);
}

/* Of 100 pairs of laws with noise, the interval holds the true leverage in at least 90. */
static void test_leverage_interval(void **state)
{
	(void)state;
	const double truth = pow(1 / 0.8, 1 / 0.15);
	int held = 0;
	for (int t = 0; t < 100; t++) {
		struct example e;
		struct scaling_law dense, moe;
		make_example(&e, LAW_COMPUTE, 8, 0.002, 3000 + t);
		assert_int_equal(scaling_fit(&dense, LAW_COMPUTE, &e.points, 159, t), 0);
		make_example(&e, LAW_COMPUTE, 8, 0.002, 4000 + t);
		for (int i = 0; i < 8; i++)
			e.loss[i] *= (1.7 + 0.8 * (true_loss(LAW_COMPUTE, e.x[i], 0) - 1.7)) / true_loss(LAW_COMPUTE, e.x[i], 0);
		assert_int_equal(scaling_fit(&moe, LAW_COMPUTE, &e.points, 159, 1000 + t), 0);
		const struct scaling_interval i = scaling_leverage_interval(&dense, &moe, 1e15, 0.95);
		held += i.low <= truth && truth <= i.high;
		scaling_law_free(&dense), scaling_law_free(&moe);
	}
	if (held < 90)
		fail_msg("the leverage is in its interval in %d of 100 pairs", held);
}

/* What is written is read again; and each fault of a table is named. */
static void test_table(void **state)
{
	(void)state;
	const struct model_config shape = {.hidden_size = 8, .num_hidden_layers = 2, .num_attention_heads = 2,
			.num_key_value_heads = 2, .head_dim = 4, .vocab_size = 16, .num_experts = 6, .num_experts_per_tok = 2,
			.num_shared_experts = 1, .moe_intermediate_size = 4};
	struct scaling_runs runs = {0};
	struct scaling_run r = {.name = "one"};
	for (int c = 0; c < NUM_SCALING_COLUMNS; c++)
		r.value[c] = NAN;
	r.value[SCALING_TOKENS] = 1000, r.value[SCALING_LOSS] = 2.3456789012345;
	assert_int_equal(scaling_run_describe(&r, &shape, 16, 0.003, 4, 7), 0);
	assert_same(r.value[SCALING_ACTIVATION_RATIO], 3.0 / 7);
	assert_same(r.value[SCALING_GRANULARITY], 4);
	assert_same(r.value[SCALING_BATCH], 64);
	assert_same(r.value[SCALING_PARAMETERS] - r.value[SCALING_NON_EMBEDDING], 2 * 16 * 8);
	assert_same(r.value[SCALING_ACTIVE] - r.value[SCALING_ACTIVE_NON_EMBEDDING], 2 * 16 * 8);
	/* of 6 experts in each of 2 layers, a token uses 2; each has 3 matrices of 8 x 4 */
	assert_same(r.value[SCALING_PARAMETERS] - r.value[SCALING_ACTIVE], 2 * 4 * 3 * 8 * 4);
	FILE *f = fopen(at("table.tsv"), "w");
	char *keys[] = {"schedule.warmup_steps"};
	scaling_table_header(f, &(struct strings){keys, 1, true});
	scaling_table_row(f, &r, (const char *const[]){"5"}, 1);
	r.name = "two", r.value[SCALING_SEED] = 8, r.value[SCALING_LOSS] = NAN;
	scaling_table_row(f, &r, (const char *const[]){"5"}, 1);
	fclose(f);
	assert_int_equal(scaling_runs_add(&runs, at("table.tsv")), 0);
	assert_int_equal(scaling_runs_check(&runs), 0);
	assert_int_equal(runs.count, 2);
	r.value[SCALING_SEED] = 7, r.value[SCALING_LOSS] = 2.3456789012345;
	for (int c = 0; c < NUM_SCALING_COLUMNS; c++)
		assert_same(runs.run[0].value[c], r.value[c]);
	assert_string_equal(runs.run[0].rest, "schedule.warmup_steps=5\t");
	assert_null(runs.run[0].left_out);
	assert_string_equal(runs.run[1].left_out, "it has no loss");
	assert_true(scaling_runs_differ_in_seed(&runs.run[0], &runs.run[1]));
	scaling_runs_free(&runs);
	static const struct { const char *table, *error; } faults[] = {
		{"", "is empty"}, {"\n# nothing\n", "is empty"},
		{"run\tflops\n", ":1: has no column `loss`"}, {"run\tloss\n", ":1: has no column `flops`"},
		{"flops\tloss\n", ":1: has no column `run`"},
		{"run\tflops\tloss\tloss\n", ":1: column `loss` is there twice"},
		{"run\tflops\tlos\n", ":1: `los` is no column of a table of runs; the nearest is `loss`"},
		{"run\tflops\tloss\na\t1e9\n", ":2: has 2 columns; expected 3"},
		{"run\tflops\tloss\na\t1e9\t2\t3\n", ":2: has 4 columns; expected 3"},
		{"run\tflops\tloss\n\t1e9\t2\n", ":2: the run has no name"},
		{"run\tflops\tloss\na\t1e9\t-2\n", ":2: loss `-2` of run a; expected a number above 0"},
		{"run\tflops\tloss\na\t1e9\t0\n", ":2: loss `0` of run a"},
		{"run\tflops\tloss\na\t1e9\tinf\n", ":2: loss `inf` of run a"},
		{"run\tflops\tloss\na\tmany\t2\n", ":2: flops `many` of run a"},
		{"run\tflops\tloss\na\t1e9x\t2\n", ":2: flops `1e9x` of run a"},
		{"run\tflops\tloss\na\t\t2\n", ":2: flops `` of run a"},
		{"run\tflops\tloss\na\t 1e9\t2\n", ":2: flops ` 1e9` of run a"},
		{"run\tflops\tloss\na\t1e400\t2\n", ":2: flops `1e400` of run a"},
		{"run\tflops\tloss\tseed\na\t1e9\t2\t1.5\n", ":2: seed `1.5` of run a; expected a whole number"},
		{"run\tflops\tloss\tactivation_ratio\na\t1e9\t2\t2\n", ":2: activation_ratio `2` of run a"},
	};
	for (int i = 0; i < COUNT(faults); i++) {
		f = fopen(at("fault.tsv"), "w");
		fputs(faults[i].table, f);
		fclose(f);
		if (scaling_runs_add(&runs, at("fault.tsv")) != -1 || !strstr(error_text, faults[i].error))
			fail_msg("table %d: expected '%s', found '%s'", i, faults[i].error, error_text);
		scaling_runs_free(&runs);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_gradient), TEST(test_huber), TEST(test_exact), TEST(test_intervals), TEST(test_deterministic),
		TEST(test_outlier), TEST(test_fit_errors), TEST(test_json), TEST(test_power_law), TEST(test_optimum),
		TEST(test_leverage), TEST(test_leverage_interval), TEST(test_table),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
