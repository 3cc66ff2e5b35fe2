/*
 * commands/merge.c - `ling merge`: checkpoints of a run at a constant learning rate become one model, with the weights
 * that stand for a decay of that rate.
 *
 * This is WSM, warmup-stable and merge (Tian et al. 2025, arXiv:2507.17634, theorem 3.1), by which Ling 2.0 was trained
 * (arXiv:2510.22115, section 3.2.3). Let theta_0 .. theta_n be the checkpoints, and g_i = theta_(i-1) - theta_i what
 * the updates between two of them took away. Had each of these updates been multiplied by a factor, f_i on average
 * over interval i, the run would have ended at
 *
 *   theta_0 - sum_i f_i g_i  =  theta_0 + sum_i f_i (theta_i - theta_(i-1))  =  sum_j c_j theta_j
 *   with c_0 = 1 - f_1,  c_j = f_j - f_(j+1) for 0 < j < n,  c_n = f_n
 *
 * where the second step collects what stands before each theta_j. The c_j sum to 1, and none is negative when the f_i
 * fall. So the merged model is the end of a decayed run whose updates were those of the constant run, but for their
 * length. In a real decayed run later gradients would be those of other weights: there it is an approximation.
 *
 * All tensors are merged alike, also a buffer that no gradient moves, as the routers' expert_bias of Ling 2.0: it moves
 * by steps of a constant rate too, so the same sums are its decayed run, and experts are then chosen by the bias that
 * belongs to the merged weights. Neither paper says more; Megatron-LM's tool (its pull request 5114) also merges all
 * tensors of numbers.
 */
#define _GNU_SOURCE
#include "commands/merge.h"

#include "files/base.h"
#include "files/checkpoint.h"
#include "files/config.h"
#include "files/convert.h"
#include "files/tokenizer.h"
#include "ling.h"
#include "commands/result.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

struct merge_options {
	int decay, dtype;            /* of decay_names, of output_dtypes */
	double final;
	int64_t last;                /* 0: not given */
	const char *weights, *out;
	bool json;
};

/* The shapes, and the plain mean. */
enum { MEAN = DECAY_INVERSE_SQRT + 1 };
static const char *const decay_names[] = {[DECAY_LINEAR] = "linear", [DECAY_COSINE] = "cosine",
		[DECAY_1_SQRT] = "1-sqrt", [DECAY_INVERSE_SQRT] = "inverse_sqrt", [MEAN] = "mean", NULL};

enum { MAX_STEP = 1000000000 }; /* of a checkpoint: decay_weights goes over all steps */

struct checkpoint {
	char path[PATH_LEN];
	struct source_model *model;
	struct model_config config;
	const json_t *trainer;       /* its trainer.json; the model's */
	int64_t step, tokens;
	uint32_t crc32;              /* of the content of trainer.json, in which are those of all other files */
	double weight;
};

struct checkpoints { struct checkpoint *list; int count; };

/* ---------------------------------------------------------------------------------------------------- weights */

void decay_weights(double *weights, const int64_t *steps, int n, enum decay_shape shape, double final)
{
	struct config *c = allocate(sizeof *c); /* of a run that is nothing but the decay, from the rate 1 */
	const int64_t length = steps[n - 1] - steps[0];
	c->schedule.peak_lr = 1;
	c->schedule.decay.steps = length;
	c->schedule.decay.shape = shape;
	c->schedule.decay.final_lr = final;
	double before = 1; /* the mean factor of the interval that ends at checkpoint i */
	for (int i = 0; i < n; i++) {
		double after = 0;
		if (i + 1 < n) {
			for (int64_t s = steps[i] + 1; s <= steps[i + 1]; s++)
				after += learning_rate(c, s - steps[0], length, 0);
			after /= (double)(steps[i + 1] - steps[i]);
		}
		weights[i] = before - after;
		before = after;
	}
	free(c);
}

/* Sets the weights that --weights gives, one for each checkpoint in their present order, divided by their sum. */
static int given_weights(struct checkpoints *all, const char *text)
{
	const char *at = text;
	double sum = 0;
	for (int i = 0; i < all->count; i++) {
		char *end;
		const double weight = strtod(at, &end);
		const bool last = i + 1 == all->count;
		if (end == at || !isfinite(weight) || *end != (last ? 0 : ','))
			return fail("--weights %s: expected %d numbers with commas between them, one for each checkpoint", text,
					all->count);
		all->list[i].weight = weight;
		sum += weight;
		at = end + 1;
	}
	if (!(sum > 0 && isfinite(sum)))
		return fail("--weights %s: their sum is %g; expected above 0, for they are divided by it", text, sum);
	for (int i = 0; i < all->count; i++)
		all->list[i].weight /= sum;
	return 0;
}

/* Sets the weights of checkpoints in the order of their steps. decay: of decay_names. */
static void set_weights(struct checkpoints *all, int decay, double final)
{
	const int n = all->count;
	int64_t *steps = allocate(n * sizeof *steps);
	double *weights = allocate(n * sizeof *weights);
	for (int i = 0; i < n; i++)
		steps[i] = all->list[i].step, weights[i] = 1.0 / n;
	if (decay != MEAN)
		decay_weights(weights, steps, n, decay, final);
	for (int i = 0; i < n; i++)
		all->list[i].weight = weights[i];
	free(steps);
	free(weights);
}

/* ----------------------------------------------------------------------------------------------- the checkpoints */

/* Fails where a path is no checkpoint, or none yet, and says what it is. */
static int refuse_others(const char *path)
{
	char other[PATH_LEN];
	struct stat st;
	if (stat(path, &st) < 0)
		return fail("%s: cannot open: %s", path, strerror(errno));
	if (!strncmp(file_name(path), ".tmp-step-", 10))
		return fail("%s: a checkpoint that is still being written, or was left by a run that was killed; expected a "
				"whole one, step-NNNNNNN", path);
	if (S_ISDIR(st.st_mode)) {
		const int whole = path_join(other, path, "trainer.json") < 0 ? -1 : path_exists(other);
		if (whole)
			return whole < 0 ? -1 : 0;
		const int run = checkpoint_newest(path, other);
		if (run)
			return run < 0 ? -1 : fail("%s: a run; expected checkpoints of it, such as %s, or --last N for its N "
					"newest ones", path, other);
	}
	return fail("%s: has no trainer.json, so that it is no checkpoint of a run, or not a whole one; expected the "
			"directories step-NNNNNNN of a run", path);
}

/* Opens a checkpoint, whose path is set, and checks its files. */
static int open_checkpoint(struct checkpoint *c)
{
	if (refuse_others(c->path) < 0 || !(c->model = source_model_open(c->path, &c->config)))
		return -1;
	char where[PATH_LEN];
	c->trainer = source_model_trainer(c->model);
	json_t *copy = json_copy((json_t *)c->trainer);
	c->crc32 = trainer_crc(copy);
	json_decref(copy);
	return path_join(where, c->path, "trainer.json") < 0 ||
			field_int(c->trainer, where, "step", 0, MAX_STEP, &c->step) < 0 ||
			field_int(c->trainer, where, "tokens", 0, INT64_MAX, &c->tokens) < 0 ? -1 : 0;
}

/* Lists the `last` newest checkpoints of a run, by rising steps. */
static int list_newest(struct checkpoints *all, const char *run, int64_t last)
{
	char newest[PATH_LEN];
	int64_t *steps;
	int rc = checkpoint_newest(run, newest); /* an error where that is not whole */
	const int n = rc < 0 ? -1 : checkpoint_list(run, "step-", &steps);
	if (n < 0)
		return -1;
	if (n == 0)
		rc = fail("%s: there is no checkpoint in it; expected the directory of a run (its train.output_dir)", run);
	else if (n < last)
		rc = fail("%s: --last %lld, but it has %d checkpoints; checkpoint.keep says how many a run keeps", run,
				(long long)last, n);
	for (int64_t i = 0; i < last && rc >= 0; i++)
		rc = checkpoint_path(all->list[all->count++].path, run, "step-", steps[n - last + i]);
	free(steps);
	return rc < 0 ? -1 : 0;
}

/* By step; then by content, so that no order of arguments shows in the result. */
static int by_step(const void *a, const void *b)
{
	const struct checkpoint *x = a, *y = b;
	if (x->step != y->step)
		return x->step < y->step ? -1 : 1;
	return (x->crc32 > y->crc32) - (x->crc32 < y->crc32);
}

/* Fails when two JSON values at `path` differ, naming the first key that does: a is of x, b of y. */
static int check_same(const json_t *a, const json_t *b, const char *path, const struct checkpoint *x,
		const struct checkpoint *y)
{
	const char *key;
	json_t *member;
	if (!json_is_object(a) || !json_is_object(b)) {
		if (json_equal((json_t *)a, (json_t *)b))
			return 0;
		char *old = json_text(a, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15));
		char *new = json_text(b, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15));
		const int rc = fail("%s: %s is %s, in %s it is %s; only checkpoints of one and the same model can be merged",
				y->path, path, new, x->path, old);
		free(old);
		free(new);
		return rc;
	}
	json_object_foreach((json_t *)a, key, member) {
		char inner[256];
		snprintf(inner, sizeof inner, "%s.%s", path, key);
		if (check_same(member, json_object_get(b, key), inner, x, y) < 0)
			return -1;
	}
	return 0;
}

/* Fails unless two checkpoints are of one model. */
static int check_models(const struct checkpoint *x, const struct checkpoint *y)
{
	struct config *c = allocate(sizeof *c);
	c->model = x->config;
	json_t *a = config_value(c, "model");
	c->model = y->config;
	json_t *b = config_value(c, "model");
	json_object_del(a, "mtp_loss_scaling_factor"); /* of the training: a run may change it */
	json_object_del(b, "mtp_loss_scaling_factor");
	const int rc = check_same(a, b, "model", x, y);
	json_decref(a);
	json_decref(b);
	free(c);
	return rc;
}

/* Fails when two checkpoints have tokenizers, and other ones. */
static int check_tokenizers(const struct checkpoint *x, const struct checkpoint *y)
{
	struct tokenizer *a = NULL, *b = NULL;
	int rc = tokenizer_find(&a, x->path, NULL) < 0 || tokenizer_find(&b, y->path, NULL) < 0 ? -1 : 0;
	if (a && b && !tokenizer_has_hash(a, tokenizer_hash(b)))
		rc = fail("%s: its tokenizer has the hash %08x, that of %s %08x; ids would mean two things", y->path,
				(unsigned)tokenizer_hash(b), x->path, (unsigned)tokenizer_hash(a));
	tokenizer_close(a);
	tokenizer_close(b);
	return rc;
}

/* Whether y, of a later step than x or of the same one, must be of another run: it has another seed, or did not see
 * more tokens. */
static bool other_run(const struct checkpoint *x, const struct checkpoint *y)
{
	const json_t *a = json_at(x->trainer, "config.train.seed"), *b = json_at(y->trainer, "config.train.seed");
	return (a && b && !json_equal((json_t *)a, (json_t *)b)) || y->step == x->step || y->tokens <= x->tokens;
}

/* Whether a decay along the steps has a meaning: an error where checkpoints are of several runs, a note where they may
 * be. With weights that do not follow from the steps, a note. */
static int check_runs(const struct checkpoints *all, bool decay)
{
	for (int i = 1; i < all->count; i++) {
		const struct checkpoint *x = &all->list[i - 1], *y = x + 1;
		char a[PATH_LEN], b[PATH_LEN];
		parent_of(a, x->path);
		parent_of(b, y->path);
		struct stat s, t;
		const bool elsewhere = stat(a, &s) == 0 && stat(b, &t) == 0 &&
				(s.st_dev != t.st_dev || s.st_ino != t.st_ino);
		if (other_run(x, y) && decay)
			return fail("%s: of another run than %s (by seed, steps and tokens); a decay goes along the steps of one "
					"run: expected --decay mean or --weights", y->path, x->path);
		if (other_run(x, y))
			fprintf(stderr, "note: %s is of another run than %s\n", y->path, x->path);
		else if (elsewhere && decay)
			fprintf(stderr, "note: %s and %s are in two directories: the weights stand for a decay only if both are "
					"of one run\n", x->path, y->path);
	}
	return 0;
}

/* Says where the rate was not constant between the first checkpoint and the last one, as far as the config tells. */
static void note_schedule(const struct checkpoints *all)
{
	const struct checkpoint *first = &all->list[0], *last = &all->list[all->count - 1];
	const int64_t warmup = json_integer_value(json_at(last->trainer, "config.schedule.warmup_steps")),
			decay = json_integer_value(json_at(last->trainer, "config.schedule.decay.steps")),
			steps = json_integer_value(json_at(last->trainer, "config.train.steps"));
	if (first->step < warmup)
		fprintf(stderr, "note: %s: the learning rate still rose, until step %lld; the weights are those for a "
				"constant one\n", first->path, (long long)warmup);
	if (decay && steps && last->step > steps - decay)
		fprintf(stderr, "note: %s: the learning rate falls already, from step %lld on; the weights are those for a "
				"constant one, and the merge decays a second time\n", last->path, (long long)(steps - decay));
}

/* Opens all, and checks that they can be merged. */
static int open_checkpoints(struct checkpoints *all)
{
	for (int i = 0; i < all->count; i++)
		if (open_checkpoint(&all->list[i]) < 0)
			return -1;
	for (int i = 0; i < all->count; i++)
		for (int k = 0; k < i; k++)
			if (by_step(&all->list[k], &all->list[i]) == 0)
				return fail("%s: the same checkpoint as %s; expected each one once", all->list[i].path,
						all->list[k].path);
	for (int i = 1; i < all->count; i++)
		if (check_models(&all->list[0], &all->list[i]) < 0 || check_tokenizers(&all->list[0], &all->list[i]) < 0)
			return -1;
	return 0;
}

static void close_checkpoints(struct checkpoints *all)
{
	for (int i = 0; i < all->count; i++)
		source_model_close(all->list[i].model);
	free(all->list);
}

/* ------------------------------------------------------------------------------------------------- the command */

/* Fails where options do not go together. */
static int check_options(const struct command_line *line)
{
	const struct merge_options *o = line->options;
	const bool decays = !o->weights && o->decay != MEAN;
	if (o->weights && option_given(line, "decay"))
		return fail("--weights and --decay: expected one of them, for a decay gives the weights");
	if (!decays && option_given(line, "final"))
		return fail("--final is of a decay: it goes with --decay linear, cosine, 1-sqrt or inverse_sqrt");
	if (decays && o->decay == DECAY_INVERSE_SQRT && o->final <= 0)
		return fail("--decay inverse_sqrt: --final is missing or 0; expected above 0, for it never comes to 0");
	if (o->last && line->num_words != 1)
		return fail("--last: expected one word beside it, the directory of a run, found %d", line->num_words);
	if (!o->last && line->num_words < 2)
		return fail("%s: one checkpoint; expected at least two, or a run with --last N", line->words[0]);
	return 0;
}

static void print_merge(const json_t *report)
{
	size_t i;
	json_t *checkpoint;
	json_array_foreach(json_object_get(report, "checkpoints"), i, checkpoint)
		printf("%10.6f  %s\n", result_double(checkpoint, "weight"), result_text(checkpoint, "path"));
	printf("%s: %lld tensors, %.3g GB\n", result_text(report, "path"), (long long)result_integer(report, "tensors"),
			result_double(report, "bytes") / 1e9);
}

/* What was merged; for config.json without the paths, which mean nothing elsewhere. */
static json_t *describe(const struct checkpoints *all, const struct merge_options *o, bool paths)
{
	const bool decays = !o->weights && o->decay != MEAN;
	json_t *list = json_array();
	for (int i = 0; i < all->count; i++) {
		const struct checkpoint *c = &all->list[i];
		json_t *entry = json_pack("{s:I, s:I, s:f, s:o}", "step", (json_int_t)c->step, "tokens",
				(json_int_t)c->tokens, "weight", c->weight, "trainer_crc32", crc_to_json(c->crc32));
		if (paths)
			json_object_set_new(entry, "path", json_cstring(c->path));
		json_array_append_new(list, entry);
	}
	return json_pack("{s:o, s:o, s:o}", "decay", o->weights ? json_null() : json_string(decay_names[o->decay]),
			"final", decays ? json_real(o->final) : json_null(), "checkpoints", list);
}

/* Writes the sum of checkpoints in the order of their steps. */
static int write_merged(const struct checkpoints *all, const struct merge_options *o, struct converted *result)
{
	const int n = all->count;
	const struct checkpoint *newest = &all->list[n - 1];
	struct source_model **models = allocate(n * sizeof *models);
	double *weights = allocate(n * sizeof *weights);
	for (int i = 0; i < n; i++)
		models[i] = all->list[i].model, weights[i] = all->list[i].weight;
	const struct weighted_sum sum = {models, weights, n, describe(all, o, false)};
	const struct conversion to = {.path = o->out, .format = FORMAT_HUGGINGFACE, .dtype = output_dtypes[o->dtype],
			.max_shard_size = MAX_SHARD_SIZE, .sum = &sum};
	const int rc = convert_parameters(newest->model, &newest->config, &to, result);
	json_decref(sum.description);
	free(models);
	free(weights);
	return rc;
}

static int run_merge(const struct command_line *line)
{
	const struct merge_options *o = line->options;
	struct checkpoints all = {0};
	struct converted result;
	if (check_options(line) < 0)
		return EXIT_WRONG_USE;
	all.list = allocate((o->last ? o->last : line->num_words) * sizeof *all.list);
	int rc = o->last ? list_newest(&all, line->words[0], o->last) : 0;
	for (int i = 0; i < line->num_words && !o->last && rc == 0; i++)
		rc = path_copy(all.list[all.count++].path, line->words[i]);
	if (rc == 0 && o->weights && given_weights(&all, o->weights) < 0) {
		close_checkpoints(&all);
		return EXIT_WRONG_USE;
	}
	if (rc == 0 && (rc = open_checkpoints(&all)) == 0) {
		const bool decays = !o->weights && o->decay != MEAN;
		qsort(all.list, all.count, sizeof *all.list, by_step);
		rc = check_runs(&all, decays);
		if (rc == 0 && decays)
			note_schedule(&all);
		if (rc == 0 && !o->weights)
			set_weights(&all, o->decay, o->final);
	}
	if (rc == 0)
		rc = write_merged(&all, o, &result);
	if (rc == 0) {
		json_t *report = describe(&all, o, true);
		json_object_update_new(report, json_pack("{s:I, s:I, s:o}", "tensors", (json_int_t)result.tensors,
				"bytes", (json_int_t)result.bytes, "path", json_cstring(o->out)));
		result_print(report, o->json, print_merge);
	}
	close_checkpoints(&all);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static const struct command_option options[] = {
	TEXT_OPTION(merge_options, out, "out", "DIR", "The Hugging Face directory that is made; it must not be there",
			.required = true),
	CHOICE_OPTION(merge_options, decay, "decay", "SHAPE", decay_names,
			"The decay of the learning rate, from the first checkpoint to the last one, that the weights stand for, "
			"shaped as schedule.decay.shape; mean: all checkpoints weigh the same", .initial = "linear"),
	NUMBER_OPTION(merge_options, final, "final", "X", 0, 1,
			"The rate at the decay's end over that at its beginning", .initial = "0"),
	TEXT_OPTION(merge_options, weights, "weights", "A,B,...",
			"The weights of the checkpoints, in their order on the command line, with --last in the order of their "
			"steps; they are divided by their sum"),
	WHOLE_OPTION(merge_options, last, "last", "N", 2, 10000, "Merge the N newest checkpoints of a run"),
	CHOICE_OPTION(merge_options, dtype, "dtype", "TYPE", output_dtypes, "f32, bf16 or f16", .initial = "f32"),
	FLAG_OPTION(merge_options, json, "json", "Print one JSON object"),
};

const struct command merge_command = {
	.name = "merge", .usage = "STEP-DIR... --out DIR\nRUN --last N --out DIR", .min_words = 1,
	.max_words = ANY_NUMBER,
	.help = "Merge checkpoints of a run at a constant learning rate into one model, in place of a decay of the rate: "
		"their weighted sum.",
	.run = run_merge, COMMAND_OPTIONS(merge_options, options), .has_threads = true,
};
