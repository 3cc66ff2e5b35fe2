/*
 * commands/plan.c - `ling plan`: the model that reaches the lowest loss on a text, in a time, on this machine.
 *
 * For models of rising size: some training steps are timed; the tokens that the time allows follow; the loss of that
 * size and these tokens is the law's, L = E + A N^-a + B D^-b. Small models have many tokens and end high for their
 * size, large ones have few: the lowest loss lies between.
 */
#define _GNU_SOURCE
#include "commands/plan.h"

#include "data.h"
#include "files/base.h"
#include "files/config.h"
#include "ling.h"
#include "training/start.h"
#include "commands/grid.h"
#include "commands/random_steps.h"
#include "commands/result.h"
#include "commands/scaling.h"
#include "commands/scaling_runs.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CONFIDENCE 0.95
#define NEXT_WIDTH 1.15          /* how much wider the next model is, at least */
enum { WIDTH_MULTIPLE = 8, LEAST_WIDTH = 32, STEPS = 4, MORE = 3, BEYOND = 8, MAX_CANDIDATES = 64 };

struct plan_options {
	const char *config, *fit, *out;
	double hours, text, tokens, epochs, goodput, aspect;
	bool json;
};
static const struct command_option options[] = {
	NUMBER_OPTION(plan_options, hours, "hours", "H", 0, 1e6, "How long it may train", .above = true, .required = true),
	NUMBER_OPTION(plan_options, text, "text", "BYTES", 1, 1e18, "Size of the text, in bytes (default: that of the "
			"config's data.train)"),
	NUMBER_OPTION(plan_options, tokens, "tokens", "N", 1, 1e15, "The same in tokens"),
	NUMBER_OPTION(plan_options, epochs, "epochs", "N", 0, 1e6, "How often the text may be read, at the most",
			.above = true, .initial = "4"),
	NUMBER_OPTION(plan_options, goodput, "goodput", "G", 0, 1, "Share of the time that goes into steps: the rest are "
			"the start, validations, saves", .above = true, .initial = "0.9"),
	NUMBER_OPTION(plan_options, aspect, "aspect", "A", 1, 65536, "The ratio hidden_size / num_hidden_layers, as in "
			"the runs that the fit is from", .initial = "32"),
	TEXT_OPTION(plan_options, config, "config", "BASE.yaml", "The config that is made larger or smaller",
			.initial = "configs/quickstart.yaml"),
	TEXT_OPTION(plan_options, fit, "fit", "FIT.json", "What `ling fit --json` printed", .initial = "configs/fit.json"),
	TEXT_OPTION(plan_options, out, "out", "FILE.yaml", "Write the config there (default: print it)"),
	FLAG_OPTION(plan_options, json, "json", "Print the result as JSON, with the config's YAML as `yaml`"),
};

struct candidate {
	int width, layers;
	double size, parameters;     /* N of the law; all parameters */
	double rate;                 /* tokens a second */
	double tokens, epochs, loss;
	struct config config;
};

struct plan {
	const struct plan_options *options;
	struct scaling_fits fits;
	int size_column;             /* of the law's N, of enum scaling_column */
	struct config base;
	char **overrides;            /* [num_overrides] of the base config, on the command line */
	int num_overrides;
	double text_tokens;
	double batch;                /* sequences of a step */
	struct candidate list[MAX_CANDIDATES];
	int count, best;
};

/* The tokens of the text: given, or those of the token files that the config trains on. */
static int count_text(struct plan *p)
{
	const struct plan_options *o = p->options;
	double tokens = 0, bytes = 0;
	if (o->tokens && o->text)
		return fail("--tokens and --text say the same; expected one of them");
	for (int i = 0; i < p->base.data.num_train && !o->tokens; i++) {
		char path[PATH_LEN];
		if (path_suffix(path, p->base.data.train[i].path, ".json") < 0)
			return -1;
		json_t *manifest = manifest_read_json(path);
		if (!manifest)
			return -1;
		tokens += json_number_value(json_object_get(manifest, "tokens"));
		bytes += json_number_value(json_object_get(manifest, "bytes"));
		json_decref(manifest);
	}
	if (o->text && !(bytes > 0))
		return fail("%s: its token files do not tell how many bytes of text they are of; expected --tokens", o->config);
	p->text_tokens = o->tokens ? o->tokens : o->text ? o->text * tokens / bytes : tokens;
	return p->text_tokens > 0 ? 0 : fail("%s: there is no text; expected --tokens or --text", o->config);
}

static int read_fit(struct plan *p)
{
	const char *path = p->options->fit;
	json_t *report = json_read(path);
	const int rc = report ? scaling_fits_read(&p->fits, report, path) : -1;
	json_decref(report);
	if (rc < 0)
		return -1;
	for (int i = 0; i < NUM_SCALING_COLUMNS; i++)
		if (!strcmp(p->fits.size_column, scaling_columns[i]))
			p->size_column = i;
	return p->fits.law[LAW_SIZE].count ? 0 : fail("%s: it has no law of size and tokens; expected one from runs of "
			"several sizes and lengths", path);
}

/* The batch by the law of the best batches, or that of the base config; a whole number of micro-batches. The compute is
 * about what the time allows. */
static double plan_batch(const struct plan *p, double compute)
{
	const struct power_law *law = &p->fits.optimum[OPTIMUM_BATCH];
	const int L = p->base.data.seq_len, micro = p->base.train.micro_batch;
	if (!law->count)
		return p->base.train.batch;
	const double sequences = power_law_at(law, compute) / L;
	return sequences <= micro ? fmax(round(sequences), 1) : round(sequences / micro) * micro;
}

/* Times training steps of a config, on random tokens. */
static int time_steps(double *tokens_per_second, const struct config *of)
{
	struct config c = *of;
	struct trainer t;
	c.train.steps = STEPS + 1;
	c.train.tokens = 0;
	c.spikes.action = SPIKES_OFF;
	c.train.batch_warmup.tokens = 0;
	int rc = trainer_allocate(&t, &c);
	double best = INFINITY;
	if (rc == 0) {
		model_randomize(&t.model, 1);
		for (int i = -1; i < STEPS && rc == 0; i++) {
			struct metrics m;
			random_batch(&t, i + 1);
			rc = trainer_step(&t, c.train.batch, &m) < 0 ? -1 : 0;
			best = i >= 0 ? fmin(best, m.seconds) : best;
		}
		trainer_free(&t);
	}
	*tokens_per_second = (double)c.train.batch * c.data.seq_len / best;
	return rc;
}

/* The base config in another size, with a directory of its own. */
static int resize(const struct plan *p, struct candidate *x, const struct grid_size *size)
{
	if (grid_resize(&x->config, p->options->config, p->num_overrides, p->overrides, &p->base, size) < 0)
		return -1;
	char suffix[64];
	snprintf(suffix, sizeof suffix, "-h%d-l%d", x->width, x->layers);
	return path_suffix(x->config.train.output_dir, p->base.train.output_dir, suffix);
}

/* Makes the candidate of a width, complete but for its learning rate and length; then these. */
static int make_candidate(struct plan *p, struct candidate *x)
{
	const struct plan_options *o = p->options;
	struct scaling_run row = {.name = ""};
	struct grid_size size = {.width = x->width, .layers = x->layers, .batch = (int)p->batch};
	if (resize(p, x, &size) < 0 || time_steps(&x->rate, &x->config) < 0)
		return -1;
	const double seconds = o->hours * 3600 * o->goodput;
	x->tokens = fmin(x->rate * seconds, o->epochs * p->text_tokens);
	x->epochs = x->tokens / p->text_tokens;
	if (p->count == 0 && x->tokens < p->batch * x->config.data.seq_len)
		return fail("in %g hours and %g readings of a text of %.0f tokens a model of width %d trains on "
				"%.0f tokens, less than one step of %.0f; expected more time, more text or a smaller train.batch",
				o->hours, o->epochs, p->text_tokens, x->width, x->tokens, p->batch * x->config.data.seq_len);
	row.value[SCALING_TOKENS] = x->tokens;
	if (scaling_run_describe(&row, &x->config.model, x->config.data.seq_len, 1, 1, 1) < 0)
		return -1;
	x->size = row.value[p->size_column];
	x->parameters = row.value[SCALING_PARAMETERS];
	x->loss = scaling_loss(&p->fits.law[LAW_SIZE], x->size, x->tokens);
	size.tokens = x->tokens;
	size.learning_rate = p->fits.optimum[OPTIMUM_LEARNING_RATE].count
			? power_law_at(&p->fits.optimum[OPTIMUM_LEARNING_RATE], row.value[SCALING_FLOPS]) : 0;
	return resize(p, x, &size);
}

/* Tries wider and wider models until MORE in a row are worse than the best, or until one is BEYOND times as large as
 * any that the law was fitted to. */
static int try_sizes(struct plan *p)
{
	const double aspect = p->options->aspect;
	for (int width = LEAST_WIDTH; p->count < MAX_CANDIDATES; p->count++) {
		struct candidate *x = &p->list[p->count];
		*x = (struct candidate){.width = width, .layers = (int)fmax(round(width / aspect), 1)};
		if (make_candidate(p, x) < 0)
			return -1;
		p->best = x->loss < p->list[p->best].loss ? p->count : p->best;
		if (p->count - p->best == MORE || x->size > BEYOND * p->fits.law[LAW_SIZE].most_x) {
			p->count++;
			return 0;
		}
		width = (int)fmax(width + WIDTH_MULTIPLE, round(width * NEXT_WIDTH / WIDTH_MULTIPLE) * WIDTH_MULTIPLE);
	}
	return 0;
}

static json_t *candidate_to_json(const struct candidate *x)
{
	return json_pack("{s:i, s:i, s:o, s:o, s:o, s:o, s:o}", "hidden_size", x->width, "num_hidden_layers", x->layers,
			"parameters", result_whole(x->parameters), "tokens_per_second", result_number(x->rate), "tokens",
			result_whole(x->tokens), "epochs", result_number(x->epochs), "loss", result_number(x->loss));
}

static void print_candidate(const json_t *x, const char *mark)
{
	printf("%8lld %6lld %12lld %12.0f %12lld %7.2f %9.4f%s\n", (long long)result_integer(x, "hidden_size"),
			(long long)result_integer(x, "num_hidden_layers"), (long long)result_integer(x, "parameters"),
			result_double(x, "tokens_per_second"), (long long)result_integer(x, "tokens"), result_double(x, "epochs"),
			result_double(x, "loss"), mark);
}

static void print_plan(const json_t *report)
{
	const json_t *x, *best = json_object_get(report, "best");
	const char *out = json_string_value(json_object_get(report, "out"));
	size_t i;
	printf("%8s %6s %12s %12s %12s %7s %9s\n", "width", "layers", "parameters", "tokens/s", "tokens", "epochs", "loss");
	json_array_foreach(json_object_get(report, "candidates"), i, x)
		print_candidate(x, json_equal(x, best) ? "  <" : "");
	printf("expected loss %.4f, a run's between %.4f and %.4f (%.0f %%)\n", result_double(report, "best.loss"),
			result_double(report, "interval.low"), result_double(report, "interval.high"), 100 * CONFIDENCE);
	if (result_double(report, "beyond") > 1)
		printf("N or D is %.2g times the largest that the law was fitted to: the interval knows nothing of what "
				"changes beyond\n", result_double(report, "beyond"));
	if (out)
		printf("%s: a config that is ready to train\n", out);
	else
		printf("\n%s", result_text(report, "yaml"));
}

/* The config of the best candidate, as YAML with a comment that tells what is expected of it. The caller frees it. */
static char *plan_yaml(const struct plan *p, struct scaling_interval interval)
{
	const struct candidate *x = &p->list[p->best];
	char *yaml = NULL;
	size_t size = 0;
	FILE *f = open_memstream(&yaml, &size);
	if (!f)
		out_of_memory(0);
	fprintf(f, "# Made by `ling plan` for %g hours of a machine that trains this model at %.0f tokens/s: %.0f tokens,\n"
			"# %.2f times the text. Expected validation loss: %.4f; a run's lies between %.4f and %.4f with a\n"
			"# probability of %.0f %%, if the law of %s holds for this text.\n", p->options->hours, x->rate, x->tokens,
			x->epochs, x->loss, interval.low, interval.high, 100 * CONFIDENCE, p->options->fit);
	config_print_yaml(f, &x->config);
	if (fclose(f))
		out_of_memory(size);
	return yaml;
}

static int report_plan(const struct plan *p)
{
	const struct plan_options *o = p->options;
	const struct candidate *x = &p->list[p->best];
	const struct scaling_law *law = &p->fits.law[LAW_SIZE];
	const struct scaling_interval interval = scaling_run_interval(law, x->size, x->tokens, CONFIDENCE);
	char *yaml = plan_yaml(p, interval);
	FILE *f = o->out ? fopen(o->out, "wxe") : NULL;
	int rc = !o->out || f ? 0 : fail_write(o->out, errno);
	if (f && (fputs(yaml, f) < 0 || fflush(f) || ferror(f)))
		rc = fail_write(o->out, errno);
	if (f && fclose(f) && rc == 0)
		rc = fail_write(o->out, errno);
	if (rc == 0) {
		json_t *list = json_array();
		for (int i = 0; i < p->count; i++)
			json_array_append_new(list, candidate_to_json(&p->list[i]));
		result_print(json_pack("{s:f, s:o, s:o, s:o, s:{s:o, s:o, s:f}, s:o, s:o, s:o}", "hours", o->hours,
				"text_tokens", result_whole(p->text_tokens), "candidates", list, "best", candidate_to_json(x),
				"interval", "low", result_number(interval.low), "high", result_number(interval.high), "confidence",
				CONFIDENCE, "beyond", result_number(fmax(x->size / law->most_x, x->tokens / law->most_y)), "out",
				o->out ? json_cstring(o->out) : json_null(), "yaml", json_cstring(yaml)), o->json, print_plan);
	}
	free(yaml);
	return rc;
}

static int make_plan(struct plan *p, const struct command_line *line)
{
	const struct plan_options *o = p->options = line->options;
	if (parallel_size() > 1)
		return fail("ling plan measures one process; expected no mpirun before it");
	p->overrides = line->words;
	p->num_overrides = line->num_words;
	if (config_load(&p->base, o->config, line->num_words, line->words, false) < 0 || count_text(p) < 0 ||
			read_fit(p) < 0)
		return -1;
	/* about the FLOPs of the time: the batch alone depends on them, and little */
	p->batch = plan_batch(p, kernels_threads() * 5e10 * 3600 * o->hours);
	return try_sizes(p) < 0 ? -1 : report_plan(p);
}

static int run_plan(const struct command_line *line)
{
	struct plan *p = allocate(sizeof *p); /* it holds the configs of all candidates */
	const int rc = make_plan(p, line);
	scaling_fits_free(&p->fits);
	free(p);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

const struct command plan_command = {
	.name = "plan", .usage = "--hours H [key.path=value ...]", .max_words = ANY_NUMBER,
	.help = "Find the model, tokens, batch and learning rate that reach the lowest loss in a time on this machine.",
	.run = run_plan, COMMAND_OPTIONS(plan_options, options), .computes = true,
};
