/*
 * commands/cost.c - `ling cost`: time, money and energy of training, on machines of one's own or of others.
 *
 *     hours of a machine = tokens / (tokens a second of one machine * goodput * 3600)
 *     cost               = hours of a machine * its price an hour
 *
 * The number of machines divides the time and multiplies the price of an hour, so it is in neither of the two. It is in
 * the time that passes: hours of a machine / machines.
 */
#define _GNU_SOURCE
#include "commands/cost.h"

#include "files/base.h"
#include "files/config.h"
#include "files/config_keys.h"
#include "model/parameters.h"
#include "commands/result.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---------------------------------------------------------------------------------------------- how fast a run was */

/* Steps at the beginning of a run are slow: pages are touched for the first time, caches are cold. */
enum { FIRST_STEPS = 3, FEWEST_STEPS = 3 };

/* The newest start or resume of a run, or NULL. *end: the time of the newest event after it; NaN where there is
 * none. */
static const json_t *newest_start(const struct run *r, double *end)
{
	const json_t *event, *start = NULL;
	size_t i;
	*end = NAN;
	json_array_foreach(r->events, i, event) {
		const char *kind = json_string_value(json_object_get(event, "kind"));
		const double time = json_number_value(json_object_get(event, "time"));
		if (kind && (!strcmp(kind, "start") || !strcmp(kind, "resume"))) {
			start = event;
			*end = NAN;
		} else
			*end = time;
	}
	return start;
}

/* The step of the newest event. */
static int64_t newest_event_step(const struct run *r)
{
	const size_t n = json_array_size(r->events);
	return n ? json_integer_value(json_object_get(json_array_get(r->events, n - 1), "step")) : 0;
}

int measure_run(struct run_rate *rate, const struct run *r)
{
	const struct column *seconds = run_column(r, "seconds");
	double end, sum = 0, while_running = 0;
	const json_t *event = newest_start(r, &end);
	const double start = json_number_value(json_object_get(event, "time"));
	const int64_t begin = json_integer_value(json_object_get(event, "step"));
	int64_t tokens = 0;
	*rate = (struct run_rate){.peak_flops = r->peak_flops, .flops_per_token = r->flops_per_token, .goodput = NAN};
	const int64_t until = newest_event_step(r);
	rate->config = json_object_get(event, "config");
	for (int i = 0; seconds && i < seconds->count; i++) {
		const int row = seconds->row[i];
		if (r->step[row] <= begin)
			continue;
		while_running += r->step[row] <= until ? seconds->value[i] : 0;
		if (r->step[row] <= begin + FIRST_STEPS || row == 0 || !(seconds->value[i] > 0))
			continue;
		rate->first_step = rate->first_step ? rate->first_step : r->step[row];
		rate->last_step = r->step[row];
		sum += seconds->value[i];
		tokens += r->tokens[row] - r->tokens[row - 1];
	}
	if (!sum || rate->last_step - rate->first_step + 1 < FEWEST_STEPS)
		return fail("%s: since its newest start, at step %lld, it has fewer than %d steps; expected that many, of "
				"which the first %d do not count: train longer, or give the machine's rate", r->dir, (long long)begin,
				FIRST_STEPS + FEWEST_STEPS, FIRST_STEPS);
	rate->tokens_per_second = tokens / sum;
	if (end > start && while_running > 0)
		rate->goodput = fmin(while_running / (end - start), 1);
	return 0;
}

/* ------------------------------------------------------------------------------------------------------- machines */

struct machine {               /* a kind of machine; 0: not known */
	char name[64];
	int64_t count;               /* how many there are */
	double price;                /* of one of them, an hour */
	double rate;                 /* tokens a second of one of them */
	double peak, mfu;            /* FLOP/s of one of them, and the share of it that training gets */
	double watts;                /* of one of them */
	double goodput;
};

#define KEY(...) KEY_OF(struct machine, __VA_ARGS__)
static const struct key machine_keys[] = {
	KEY(name, T_TEXT, 0, 0, NEEDED, NULL, "what it is called"),
	KEY(count, T_INT64, 1, 1e9, 0, "1", "how many there are"),
	KEY(price, T_DOUBLE, 0, 1e12, 0, "0", "of one of them, an hour"),
	KEY(rate, T_DOUBLE, 0, 1e15, NONE, "off", "tokens a second of one of them, with this model; off: peak and mfu give "
		"it, or the run"),
	KEY(peak, T_DOUBLE, 0, 1e21, NONE, "off", "FLOP/s of one of them"),
	KEY(mfu, T_DOUBLE, 0, 1, NONE, "off", "share of the peak that training gets: model FLOPs utilization"),
	KEY(watts, T_DOUBLE, 0, 1e9, NONE, "off", "power of one of them"),
	KEY(goodput, T_DOUBLE, 0, 1, NONE, "off", "share of the time that goes into steps which stay; off: --goodput"),
};
static const struct key_table machine_table = {machine_keys, sizeof machine_keys / sizeof *machine_keys, "machine",
		NULL};

struct machines { struct machine *list; int count; size_t room; };

static void *add_machine(void *list)
{
	struct machines *m = list;
	m->list = grow(m->list, m->count, &m->room, 1, sizeof *m->list);
	m->list[m->count] = (struct machine){0};
	return &m->list[m->count++];
}

static int check_machine(const struct loader *l, void *list, void *added, struct place at)
{
	const struct machines *m = list;
	const struct machine *x = added;
	(void)l;
	if (x->rate && x->mfu)
		return fail_at(at, "%s: found both rate and mfu; expected one of them, for each gives the other", x->name);
	if (x->mfu && !x->peak)
		return fail_at(at, "%s: found mfu without peak; expected the FLOP/s that it is a share of", x->name);
	for (const struct machine *y = m->list; y < x; y++)
		if (!strcmp(x->name, y->name))
			return fail_at(at, "%s: found twice; expected each machine's name once", x->name);
	return 0;
}

/* ------------------------------------------------------------------------------------------------------ the command */

struct cost_options {
	const char *machines;
	double tokens, price, watts, goodput, kwh;
	bool json;
};
static const struct command_option options[] = {
	NUMBER_OPTION(cost_options, tokens, "tokens", "T", 1, 1e18, "Tokens to train on, such as 1e12 (default: the length "
			"of the run in the config)"),
	TEXT_OPTION(cost_options, machines, "machines", "FILE.yaml", "Kinds of machines: a list of mappings with name and "
			"count, price, rate, peak, mfu, watts, goodput"),
	NUMBER_OPTION(cost_options, price, "price", "P", 0, 1e12, "Price of an hour of all machines that the run ran on, "
			"without --machines"),
	NUMBER_OPTION(cost_options, watts, "watts", "W", 0, 1e12, "Power of all machines that the run ran on, without "
			"--machines"),
	NUMBER_OPTION(cost_options, goodput, "goodput", "G", 0, 1, "Share of the time that goes into steps which stay "
			"(default: the run's, where it is known, else 1)", .above = true),
	NUMBER_OPTION(cost_options, kwh, "kwh", "P", 0, 1e9, "Price of a kilowatt-hour"),
	FLAG_OPTION(cost_options, json, "json", "Print the result as JSON"),
};

/* What is to be trained, and how fast a run did it. */
struct cost {
	const struct cost_options *options;
	double tokens, flops_per_token;
	bool has_run;
	struct run_rate run;
};

/* A number as JSON, null where it is not known. */
static json_t *known(double x)
{
	return x > 0 ? result_number(x) : json_null();
}

/* Completes what is known of a machine, and adds what training costs on it. */
static int cost_on(const struct cost *c, struct machine *m, json_t *list)
{
	const char *source = m->rate ? "given" : m->mfu ? "peak and mfu" : "the run";
	if (!m->rate && m->mfu)
		m->rate = m->peak * m->mfu / c->flops_per_token;
	if (!m->rate && !c->has_run)
		return fail("%s: how fast it is is not known; expected rate, or peak and mfu, or the directory of a run in "
				"place of the config", m->name);
	const bool measured = !m->rate;
	if (measured) {
		m->rate = c->run.tokens_per_second / m->count;
		m->peak = m->peak ? m->peak : c->run.peak_flops / m->count;
	}
	if (!m->goodput)
		m->goodput = c->options->goodput ? c->options->goodput : measured && c->run.goodput > 0 ? c->run.goodput : 1;
	m->mfu = m->peak ? m->rate * c->flops_per_token / m->peak : 0;
	const double machine_hours = c->tokens / (m->rate * m->goodput) / 3600, kwh = machine_hours * m->watts / 1000;
	const double cost = machine_hours * m->price + kwh * c->options->kwh;
	json_array_append_new(list, json_pack("{s:o, s:I, s:s, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:o}",
			"name", json_cstring(m->name), "count", (json_int_t)m->count, "rate_from", source, "rate",
			result_number(m->rate), "mfu", known(m->mfu), "goodput", result_number(m->goodput), "price",
			result_number(m->price), "hours", result_number(machine_hours / m->count), "machine_hours",
			result_number(machine_hours), "cost", result_number(cost), "cost_per_billion_tokens", result_number(cost /
			c->tokens * 1e9), "kwh", known(kwh), "kwh_per_billion_tokens", known(kwh / c->tokens * 1e9)));
	return 0;
}

/* For each two machines with prices: from which rate on the second one costs no more than the first one. */
static json_t *break_even(const struct machines *m)
{
	json_t *list = json_array();
	for (const struct machine *a = m->list; a < m->list + m->count; a++)
		for (const struct machine *b = m->list; b < m->list + m->count; b++)
			if (a != b && a->price > 0 && b->price > 0) {
				const double rate = a->rate * a->goodput / b->goodput * b->price / a->price;
				json_array_append_new(list, json_pack("{s:o, s:o, s:o, s:o}", "name", json_cstring(b->name), "against",
						json_cstring(a->name), "rate", result_number(rate), "has", result_number(b->rate / rate)));
			}
	return list;
}

static void print_time(double hours)
{
	if (hours >= 48)
		printf("%12.1f days", hours / 24);
	else if (hours >= 1)
		printf("%12.2f hours", hours);
	else
		printf("%12.1f s", hours * 3600);
}

static void print_cost(const json_t *report)
{
	const json_t *m;
	size_t i;
	printf("%.4g tokens, %.4g FLOPs each, %.4g FLOPs\n", result_double(report, "tokens"), result_double(report,
			"flops_per_token"), result_double(report, "flops"));
	if (!json_is_null(json_object_get(report, "run")))
		printf("measured: %.1f tokens/s in steps %lld to %lld\n", result_double(report, "run.tokens_per_second"),
				(long long)result_integer(report, "run.first_step"), (long long)result_integer(report,
				"run.last_step"));
	json_array_foreach(json_object_get(report, "machines"), i, m) {
		printf("\n%s", result_text(m, "name"));
		if (result_integer(m, "count") > 1)
			printf(", %lld machines", (long long)result_integer(m, "count"));
		printf("\n");
		printf("  %-24s %12.1f tokens/s of one (%s)", "rate", result_double(m, "rate"), result_text(m, "rate_from"));
		if (!json_is_null(json_object_get(m, "mfu")))
			printf(", %.1f %% of the peak", 100 * result_double(m, "mfu"));
		printf("\n  %-24s %12.1f %%\n", "goodput", 100 * result_double(m, "goodput"));
		printf("  %-24s ", "time");
		print_time(result_double(m, "hours"));
		printf("\n  %-24s %12.4g\n", "hours of a machine", result_double(m, "machine_hours"));
		if (!json_is_null(json_object_get(m, "kwh")))
			printf("  %-24s %12.4g kWh, %.4g a billion tokens\n", "energy", result_double(m, "kwh"), result_double(m,
					"kwh_per_billion_tokens"));
		if (result_double(m, "cost") > 0)
			printf("  %-24s %12.4g, %.4g a billion tokens\n", "cost", result_double(m, "cost"), result_double(m,
					"cost_per_billion_tokens"));
	}
	if (json_array_size(json_object_get(report, "break_even")))
		printf("\n");
	json_array_foreach(json_object_get(report, "break_even"), i, m)
		printf("%s costs no more than %s from %.1f tokens/s of a machine on: it has %.2f times that\n",
				result_text(m, "name"), result_text(m, "against"), result_double(m, "rate"), result_double(m, "has"));
}

/* What the word of the command line tells: a run, or a config with overrides. */
static int read_subject(struct cost *c, const struct command_line *line)
{
	struct stat st;
	double length;
	if (stat(line->words[0], &st) == 0 && S_ISDIR(st.st_mode)) {
		struct run r;
		if (line->num_words > 1)
			return fail("%s is the directory of a run, which has its config: expected no %s", line->words[0],
					line->words[1]);
		if (run_open(&r, line->words[0]) < 0)
			return -1;
		int rc = run_needs_steps(&r, "measure");
		c->has_run = true;
		rc = rc == 0 ? measure_run(&c->run, &r) : rc;
		c->flops_per_token = c->run.flops_per_token;
		const json_t *config = c->run.config;
		length = json_number_value(json_at(config, "train.tokens"));
		if (!length && r.count) /* the steps that are left have the full batch */
			length = r.tokens[r.count - 1] + (json_number_value(json_at(config, "train.steps")) - r.step[r.count - 1]) *
					json_number_value(json_at(config, "train.batch")) *
					json_number_value(json_at(config, "data.seq_len"));
		c->run.config = NULL;
		run_free(&r);
		if (rc == 0 && !(c->flops_per_token > 0))
			rc = fail("%s: no event tells the FLOPs of a token", line->words[0]);
		if (rc < 0)
			return -1;
	} else {
		struct config config;
		struct parameter_count count[NUM_PARAMETER_PARTS + 1];
		if (config_load(&config, line->words[0], line->num_words - 1, line->words + 1, true) < 0)
			return -1;
		const int longest = default_sequence(&config.model);
		const int L = config.data.seq_len ? config.data.seq_len : longest < 4096 ? longest : 4096;
		if (count_parameters(count, &c->flops_per_token, &config.model, L) < 0)
			return -1;
		length = config.train.tokens ? (double)config.train.tokens
				: (double)config.train.steps * config.train.batch * L;
	}
	c->tokens = c->options->tokens ? c->options->tokens : length;
	return c->tokens > 0 ? 0 : fail("%s: the length of the run is not known; expected --tokens", line->words[0]);
}

static int cost(const struct command_line *line, struct machines *m)
{
	const struct cost_options *o = line->options;
	struct cost c = {.options = o};
	if (o->machines && (option_given(line, "price") || option_given(line, "watts")))
		return fail("--price and --watts are of the machines that the run ran on; expected them in %s", o->machines);
	if (read_subject(&c, line) < 0)
		return -1;
	if (o->machines) {
		if (load_list_file(&machine_table, o->machines, &(struct list_reader){.items = "machines", .item = "machine",
				.add = add_machine, .check = check_machine, .list = m}) < 0)
			return -1;
	} else {
		struct machine *here = add_machine(m);
		*here = (struct machine){.name = "the machines of the run", .count = 1, .price = o->price, .watts = o->watts};
		if (!c.has_run)
			return fail("%s is a config, and how fast it trains is not known; expected --machines FILE.yaml, or the "
					"directory of a run", line->words[0]);
	}
	json_t *list = json_array();
	for (int i = 0; i < m->count; i++)
		if (cost_on(&c, &m->list[i], list) < 0) {
			json_decref(list);
			return -1;
		}
	json_t *run = c.has_run ? json_pack("{s:o, s:I, s:I, s:o}", "tokens_per_second", result_number(
			c.run.tokens_per_second), "first_step", (json_int_t)c.run.first_step, "last_step",
			(json_int_t)c.run.last_step, "goodput", result_number(c.run.goodput)) : json_null();
	result_print(json_pack("{s:o, s:o, s:o, s:o, s:o, s:o}", "tokens", result_number(c.tokens), "flops_per_token",
			result_number(c.flops_per_token), "flops", result_number(c.tokens * c.flops_per_token), "run", run,
			"machines", list, "break_even", break_even(m)), o->json, print_cost);
	return 0;
}

static int run_cost(const struct command_line *line)
{
	struct machines m = {0};
	const int rc = cost(line, &m);
	free(m.list);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

const struct command cost_command = {
	.name = "cost", .usage = "CONFIG.yaml [KEY.PATH=VALUE ...]\nRUN_DIR", .min_words = 1, .max_words = ANY_NUMBER,
	.help = "Time, money and energy of training.",
	.run = run_cost, COMMAND_OPTIONS(cost_options, options),
};
