/*
 * commands/align.c - `ling align`: where two programs that should compute the same part.
 */
#define _GNU_SOURCE
#include "commands/align.h"

#include "files/base.h"
#include "commands/align_dumps.h"
#include "commands/align_runs.h"
#include "commands/result.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------------------- dumps */

static bool is_true(const json_t *object, const char *key)
{
	return json_is_true(json_object_get(object, key));
}

static const char *plural(int64_t n)
{
	return n == 1 ? "" : "s";
}

/* Where a tensor belongs, in words. */
static void print_place(const json_t *tensor)
{
	const char *pass = result_text(tensor, "pass"), *name = result_text(tensor, "name");
	if (strcmp(pass, "weight gradient")) {
		printf("%s", name);
		return;
	}
	if (!json_is_null(json_object_get(tensor, "layer")))
		printf("layer %lld / ", (long long)result_integer(tensor, "layer"));
	printf("%s / gradient of %.*s", result_text(tensor, "operation"), (int)(strlen(name) - strlen(" / gradient")),
			name);
}

/* "in 12 of 64 rows (3 to 50)" */
static void print_differing(const json_t *tensor, const char *key)
{
	const json_t *part = json_object_get(tensor, key);
	if (!json_is_object(part))
		return;
	const long long differ = result_integer(part, "differ"), of = result_integer(part, "of"),
			first = result_integer(part, "first"), last = result_integer(part, "last");
	if (differ == of)
		printf(", in all %lld %s", of, key);
	else if (differ == 1)
		printf(", in 1 of %lld %s (number %lld)", of, key, first);
	else if (differ)
		printf(", in %lld of %lld %s (between number %lld and %lld)", differ, of, key, first, last);
}

/* examples: show some of the tokens; all: all of them, and layers in which only the order differs */
static void print_routing(const json_t *routing, bool examples, bool all)
{
	const int64_t tokens = result_integer(routing, "tokens"), flipped = result_integer(routing, "flipped_tokens"),
			reordered = result_integer(routing, "reordered_tokens");
	if (!flipped && (!reordered || !all))
		return;
	printf("routing: layer %lld / router / top-k: %lld of %lld tokens choose other experts (%lld of %lld choices)",
			(long long)result_integer(routing, "layer"), (long long)flipped, (long long)tokens,
			(long long)result_integer(routing, "flipped_choices"), (long long)(tokens * result_integer(routing, "k")));
	if (reordered)
		printf(", and %lld the same in another order", (long long)reordered);
	printf("\n");
	const json_t *flip, *flips = json_object_get(routing, "flips");
	size_t i;
	json_array_foreach(flips, i, flip) {
		if ((i == 3 || !examples) && !all)
			break;
		printf("    token %lld: expert %lld in A, %lld in B", (long long)result_integer(flip, "token"),
				(long long)result_integer(flip, "from"), (long long)result_integer(flip, "to"));
		if (json_is_number(json_object_get(flip, "gap")))
			printf("; their probabilities in A are %.3g apart, and differ between A and B by %.3g",
					result_double(flip, "gap"), result_double(flip, "difference"));
		printf("\n");
	}
	for (int b = 0; b < 2; b++) {
		const int64_t wrong = result_integer(routing, b ? "not_largest_b" : "not_largest_a");
		if (wrong)
			printf("    of %lld token%s %s's choice is not the largest of its own probabilities\n", (long long)wrong,
					plural(wrong), b ? "B" : "A");
	}
	if (!flipped)
		return;
	if (is_true(routing, "rounding"))
		printf("    The probabilities agree within the tolerance: rounding decided. What follows leaves these tokens "
				"out.\n");
	else if (!is_true(routing, "has_softmax"))
		printf("    Without \"router / softmax\" in both dumps it cannot be told whether rounding decided.\n");
}

/* What is seen of a tensor that differs. */
static void print_difference(const json_t *tensor)
{
	const double cosine = result_double(tensor, "cosine"), factor = result_double(tensor, "factor");
	const int64_t unlike = result_integer(tensor, "nonfinite_unlike"), elements = result_integer(tensor, "elements");
	if (unlike)
		printf("    not finite: %lld values in A, %lld in B, of %lld; of the others\n",
				(long long)result_integer(tensor, "nonfinite_a"), (long long)result_integer(tensor, "nonfinite_b"),
				(long long)elements);
	printf("    relative L2 %.2g (tolerance %g)", result_double(tensor, "relative"),
			result_double(tensor, "tolerance"));
	if (is_true(tensor, "zero_b") || is_true(tensor, "zero_a"))
		printf("; %s is zero everywhere", is_true(tensor, "zero_b") ? "B" : "A");
	else if (1 - fabs(cosine) < 1e-9)
		printf("; B is %.6g times A", factor);
	else if (!isnan(cosine))
		printf(", cosine %.6f", cosine);
	print_differing(tensor, "rows");
	print_differing(tensor, "columns");
	printf("\n    largest difference %.3g", result_double(tensor, "largest"));
	const json_t *at = json_object_get(tensor, "at");
	if (elements > 1) {
		printf(" at [%lld", (long long)json_integer_value(json_array_get(at, 0)));
		for (size_t i = 1; i < json_array_size(at); i++)
			printf(", %lld", (long long)json_integer_value(json_array_get(at, i)));
		printf("]");
	}
	printf(": %.7g in A, %.7g in B; mean %.3g\n", result_double(tensor, "a"), result_double(tensor, "b"),
			result_double(tensor, "mean"));
}

static void print_first(const json_t *step, const json_t *first)
{
	printf("first difference: ");
	print_place(first);
	if (json_is_integer(json_object_get(step, "step")))
		printf(", step %lld", (long long)result_integer(step, "step"));
	printf(" (%s%s)\n", result_text(first, "pass"), strcmp(result_text(first, "pass"), "optimizer") &&
			strcmp(result_text(first, "pass"), "weight gradient") ? " pass" : "");
	if (json_object_get(first, "routing"))
		printf("    tokens go to other experts, see below\n");
	else
		print_difference(first);
	if (json_is_string(json_object_get(step, "before_first")))
		printf("    the last one that agrees: %s\n", result_text(step, "before_first"));
	if (is_true(first, "after_flip"))
		printf("    Before it tokens changed experts by rounding, which explains differences in other tokens of their\n"
				"    sequences and in all gradients. What follows cannot be judged: compare another step, or other "
				"data.\n");
}

static void print_table_head(void)
{
	printf("  %11s %11s %9s %9s %10s\n", "relative L2", "cosine", "largest", "mean", "not finite");
}

/* n: the experts whose tensors a line stands for; of these, the worst */
static void print_line(const json_t *tensor, int n)
{
	char counts[48];
	snprintf(counts, sizeof counts, "%lld %lld", (long long)result_integer(tensor, "nonfinite_a"),
			(long long)result_integer(tensor, "nonfinite_b"));
	printf("%c %11.2e %11.8f %9.2e %9.2e %10s  %s", is_true(tensor, "beyond") ? '*' : ' ',
			result_double(tensor, "relative"), plain_nan(result_double(tensor, "cosine")),
			result_double(tensor, "largest"), result_double(tensor, "mean"), counts, result_text(tensor, "name"));
	if (n > 1)
		printf(" (worst of %d experts)", n);
	const json_t *routing = json_object_get(tensor, "routing");
	if (routing)
		printf(" (%lld tokens choose others)", (long long)result_integer(routing, "flipped_tokens"));
	printf("\n");
}

/* Whether two tensors are the same kind of tensor of two experts of a layer. */
static bool same_kind(const json_t *a, const json_t *b)
{
	static const char *const keys[] = {"pass", "operation", "layer"};
	for (int i = 0; i < 3; i++)
		if (!json_equal(json_object_get(a, keys[i]), json_object_get(b, keys[i])))
			return false;
	const char *x = strrchr(result_text(a, "name"), '/'), *y = strrchr(result_text(b, "name"), '/');
	return json_is_integer(json_object_get(a, "expert")) && json_is_integer(json_object_get(b, "expert")) && x && y &&
			!strcmp(x, y);
}

/* Lines begin..end-1 of the table of a step; without `all`, one for the tensors of all experts of a layer. */
static void print_lines(const json_t *tensors, size_t begin, size_t end, bool all)
{
	for (size_t i = begin, next; i < end; i = next) {
		const json_t *worst = json_array_get(tensors, i), *first = worst;
		for (next = i + 1; !all && next < json_array_size(tensors); next++) {
			const json_t *other = json_array_get(tensors, next);
			if (!same_kind(first, other))
				break;
			if (result_double(other, "relative") > result_double(worst, "relative"))
				worst = other;
		}
		print_line(worst, (int)(next - i));
	}
}

/* The worst tensor of each pass. */
static void print_worst(const json_t *tensors)
{
	static const char *const passes[] = {"forward", "backward", "weight gradient", "optimizer"};
	printf("worst of each pass:\n");
	print_table_head();
	for (int pass = 0; pass < 4; pass++) {
		const json_t *tensor, *worst = NULL;
		size_t i;
		json_array_foreach(tensors, i, tensor)
			if (!strcmp(result_text(tensor, "pass"), passes[pass]) && (!worst ||
					result_double(tensor, "relative") > result_double(worst, "relative")))
				worst = tensor;
		if (worst)
			print_line(worst, 1);
	}
}

static void print_only(const json_t *step, const char *key, const char *name, bool all)
{
	const json_t *names = json_object_get(step, key);
	const size_t n = json_array_size(names);
	if (!n)
		return;
	printf("  only in %s: %zu tensor%s: ", name, n, plural((int64_t)n));
	for (size_t i = 0; i < n && (all || i < 3); i++)
		printf("%s%s", i ? ", " : "", json_string_value(json_array_get(names, i)));
	printf("%s\n", n > 3 && !all ? ", ..." : "");
}

static void print_step(const json_t *step, bool all)
{
	const json_t *tensors = json_object_get(step, "tensors"), *first = json_object_get(step, "first"), *routing;
	const int64_t compared = result_integer(step, "compared"), beyond = result_integer(step, "beyond");
	size_t i;
	printf("\n");
	if (json_is_integer(json_object_get(step, "step")))
		printf("step %lld: ", (long long)result_integer(step, "step"));
	printf("%lld tensor%s in both, ", (long long)compared, plural(compared));
	if (beyond)
		printf("%lld beyond the tolerance\n", (long long)beyond);
	else
		printf("all within the tolerance\n");
	print_only(step, "only_a", "A", all);
	print_only(step, "only_b", "B", all);
	if (json_is_object(first))
		print_first(step, first);
	json_array_foreach(json_object_get(step, "routing"), i, routing)
		print_routing(routing, !json_is_object(first) || is_true(first, "after_flip") ||
				json_object_get(first, "routing"), all);
	if (all) {
		print_table_head();
		print_lines(tensors, 0, json_array_size(tensors), true);
	} else if (json_is_object(first)) {
		size_t at = 0;
		while (strcmp(result_text(json_array_get(tensors, at), "name"), result_text(first, "name")))
			at++;
		const size_t count = json_array_size(tensors);
		size_t begin = at > 3 ? at - 3 : 0;
		while (begin > 0 && same_kind(json_array_get(tensors, begin - 1), json_array_get(tensors, begin)))
			begin--;
		printf("around it, in the order of execution (* beyond the tolerance):\n");
		print_table_head();
		print_lines(tensors, begin, at + 6 < count ? at + 6 : count, false);
	}
	print_worst(tensors);
}

static void print_steps_only(const json_t *report, const char *key, const char *name)
{
	const json_t *steps = json_object_get(report, key), *step;
	size_t i;
	if (!json_array_size(steps))
		return;
	printf("only %s has step%s", name, plural((int64_t)json_array_size(steps)));
	json_array_foreach(steps, i, step)
		printf(" %lld", (long long)json_integer_value(step));
	printf("\n");
}

static void print_dumps(const json_t *report, bool all)
{
	const json_t *step;
	size_t i;
	printf("A: %s\nB: %s\n", result_text(report, "a"), result_text(report, "b"));
	print_steps_only(report, "steps_only_a", "A");
	print_steps_only(report, "steps_only_b", "B");
	json_array_foreach(json_object_get(report, "steps"), i, step)
		print_step(step, all);
	printf("\n%s\n", is_true(report, "agree") ? "A and B agree." : "A and B differ.");
}

static void print_dumps_short(const json_t *report)
{
	print_dumps(report, false);
}

static void print_dumps_all(const json_t *report)
{
	print_dumps(report, true);
}

/* -------------------------------------------------------------------------------------------------------- runs */

static void print_config(const json_t *config)
{
	if (!json_is_array(config)) {
		printf("the configs are not compared: a run without a checkpoint does not have its config\n");
		return;
	}
	const json_t *difference;
	size_t i;
	json_array_foreach(config, i, difference) {
		const json_t *a = json_object_get(difference, "a"), *b = json_object_get(difference, "b");
		char *text_a = json_is_null(a) ? copy_string("none") : json_text(a, JSON_ENCODE_ANY),
				*text_b = json_is_null(b) ? copy_string("none") : json_text(b, JSON_ENCODE_ANY);
		printf("config: %s is %s in A, %s in B\n", result_text(difference, "key"), text_a, text_b);
		free(text_a), free(text_b);
	}
}

static void print_curves(const json_t *report)
{
	const json_t *curve;
	size_t i;
	printf("B against A, %% of A:\n  %-12s %7s %10s %14s %10s %8s  %s\n", "", "steps", "mean", "mean absolute",
			"largest", "at step", "first apart, more than the tolerance");
	json_array_foreach(json_object_get(report, "series"), i, curve) {
		printf("  %-12s %7lld %+10.3g %14.3g %10.3g %8lld", result_text(curve, "name"),
				(long long)result_integer(curve, "steps"), 100 * result_double(curve, "mean"),
				100 * result_double(curve, "mean_absolute"), 100 * result_double(curve, "largest"),
				(long long)result_integer(curve, "largest_step"));
		if (json_is_integer(json_object_get(curve, "first_different")))
			printf("  step %lld", (long long)result_integer(curve, "first_different"));
		if (json_is_integer(json_object_get(curve, "first_beyond")))
			printf(", step %lld", (long long)result_integer(curve, "first_beyond"));
		printf("\n");
		const int64_t unlike = result_integer(curve, "nonfinite_unlike");
		if (unlike)
			printf("    in %lld step%s one of the two is not finite: %lld values in A, %lld in B\n", (long long)unlike,
					plural(unlike), (long long)result_integer(curve, "nonfinite_a"),
					(long long)result_integer(curve, "nonfinite_b"));
	}
}

/* "55, 59, never" */
static void print_partings(const json_t *steps)
{
	const json_t *step;
	size_t i;
	json_array_foreach(steps, i, step)
		if (json_is_integer(step))
			printf("%s%lld", i ? ", " : "", (long long)json_integer_value(step));
		else
			printf("%snever", i ? ", " : "");
}

static void print_floor(const json_t *floor)
{
	const size_t n = json_array_size(json_object_get(floor, "runs"));
	const json_t *test, *of_b = json_object_get(floor, "parting_b"), *tests = json_object_get(floor, "tests");
	const char *before = "";
	size_t i;
	printf("\nThe floor is A and %zu run%s that differ from it by rounding alone; %lld steps.\n", n,
			plural((int64_t)n), (long long)result_integer(floor, "steps"));
	printf("They part (a curve differs by more than 0.01%% from those of all others) in steps ");
	print_partings(json_object_get(floor, "partings"));
	if (json_is_integer(of_b))
		printf("; B in step %lld.\n", (long long)json_integer_value(of_b));
	else
		printf("; B never.\n");
	double mean_limit = NAN; /* of the loss */
	json_array_foreach(tests, i, test) {
		const char *what = result_text(test, "what");
		const bool early = !strcmp(what, "early");
		if (strcmp(before, "early") && early)
			printf("To step %lld, long before they part: the largest difference of B from the nearest of them\n"
					"  %-22s %12s %12s\n", (long long)result_integer(floor, "early"), "", "B", "limit");
		else if (!early && (!*before || !strcmp(before, "early")))
			printf("After step %lld, when all of them have parted by 0.1%%\n  %-22s %12s %12s\n",
					(long long)result_integer(floor, "settled"), "", "B", "limit");
		printf("%c %-12s %-9s %11.3g%% %11.3g%%\n", is_true(test, "passes") ? ' ' : '*', result_text(test, "series"),
				early ? "" : what, 100 * result_double(test, "found"), 100 * result_double(test, "limit"));
		if (!strcmp(what, "mean") && !strcmp(result_text(test, "series"), "loss"))
			mean_limit = result_double(test, "limit");
		before = what;
	}
	if (!is_true(floor, "judged"))
		printf("The runs end before all of the floor have parted: later steps are not judged.\n");
	if (n < 3 && !isnan(mean_limit))
		printf("%s is a weak floor: any mean loss within %.3g%% passes. Take 3 runs or more.\n", n == 1 ? "One run"
				: "Two runs", 100 * mean_limit);
	else if (n < 3)
		printf("%s is a weak floor: take 3 runs or more.\n", n == 1 ? "One run" : "Two runs");
}

static void print_runs(const json_t *report)
{
	const bool agree = is_true(report, "agree"), has_floor = json_is_object(json_object_get(report, "floor"));
	printf("A: %s\nB: %s\n", result_text(report, "a"), result_text(report, "b"));
	print_config(json_object_get(report, "config"));
	for (int b = 0; b < 2; b++) {
		const int64_t n = result_integer(report, b ? "steps_only_b" : "steps_only_a");
		if (n)
			printf("%lld step%s only in %s\n", (long long)n, plural(n), b ? "B" : "A");
	}
	print_curves(report);
	const json_t *floor = json_object_get(report, "floor"), *test;
	bool passes = true;
	size_t i;
	json_array_foreach(json_object_get(floor, "tests"), i, test)
		passes = passes && is_true(test, "passes");
	if (has_floor) {
		print_floor(floor);
		if (passes && is_true(floor, "too_short"))
			printf("\nB parts by 0.1%% before any run of the floor parts, and the runs are too short to judge that: "
					"let all of them train longer.\n");
		else
			printf("\n%s\n", agree ? "B differs from A no more than runs do whose first weights differ by rounding."
					: "B differs from A by more than rounding explains: see the lines with *.");
	} else
		printf("\n%s the mean absolute difference of the losses is %s %g%%.\n", agree ? "A and B agree:"
				: "A and B differ:", agree ? "at most" : "above", 100 * result_double(report, "tolerance"));
}

/* ------------------------------------------------------------------------------------------------- the command */

struct align_options {
	double tolerance;
	int64_t skip;
	struct strings floor;
	bool all, json;
};

/* Compares the curves of A and B, the first two words. The floor: what --floor names, and the words behind B. */
static json_t *compare_runs(const struct command_line *line, double tolerance)
{
	const struct align_options *o = line->options;
	const int more = line->num_words - 2, num = 2 + (int)o->floor.count + more;
	char **dirs = allocate(num * sizeof *dirs);
	dirs[0] = line->words[0], dirs[num - 1] = line->words[1];
	for (int i = 0; i < (int)o->floor.count; i++)
		dirs[1 + i] = o->floor.text[i];
	for (int i = 0; i < more; i++)
		dirs[1 + (int)o->floor.count + i] = line->words[2 + i];
	json_t *report = align_runs(dirs, num, o->skip, tolerance);
	free(dirs);
	return report;
}

static int run_align(const struct command_line *line)
{
	const struct align_options *o = line->options;
	const char *a = line->words[0], *b = line->words[1];
	const bool dumps = is_dump(a), has_floor = o->floor.count > 0;
	if (is_dump(b) != dumps) {
		fail("%s is a dump, and %s is none: expected two dumps, or two runs", dumps ? a : b, dumps ? b : a);
		return EXIT_WORK_FAILED;
	}
	if (line->num_words > 2 && !has_floor) {
		fail("%s: more than two words: expected A B, or RUN RUN --floor RUN...", line->words[2]);
		return EXIT_WRONG_USE;
	}
	if (dumps && (has_floor || option_given(line, "skip"))) {
		fail("--%s is for runs, and %s and %s are dumps", has_floor ? "floor" : "skip", a, b);
		return EXIT_WRONG_USE;
	}
	if (has_floor && option_given(line, "tolerance")) {
		fail("--tolerance and --floor: the floor says what passes: give one of the two");
		return EXIT_WRONG_USE;
	}
	const double tolerance = option_given(line, "tolerance") ? o->tolerance : dumps ? 0 : 1e-3;
	json_t *report = dumps ? align_dumps(a, b, tolerance) : compare_runs(line, tolerance);
	if (!report)
		return EXIT_WORK_FAILED;
	const bool agree = is_true(report, "agree");
	result_print(report, o->json, !dumps ? print_runs : o->all ? print_dumps_all : print_dumps_short);
	fail("%s and %s differ", a, b);
	return agree ? EXIT_DONE : EXIT_WORK_FAILED;
}

static const struct command_option options[] = {
	NUMBER_OPTION(align_options, tolerance, "tolerance", "X", 0, 1e9,
			"What passes. Dumps: the relative L2 difference of a tensor (default: " DEFAULT_TOLERANCES "); runs: the "
			"mean of the absolute relative differences of the losses (default: 0.001)", .above = true),
	TEXTS_OPTION(align_options, floor, "floor", "RUN...",
			"Runs that differ from A by the rounding of their first weights alone (train.perturb): B passes when it "
			"differs no more than they do. Behind A and B; 3 or more"),
	WHOLE_OPTION(align_options, skip, "skip", "N", 0, INT64_MAX, "Leave out the first N steps of runs"),
	FLAG_OPTION(align_options, all, "all", "Show all tensors of dumps, not only the first that differs and the worst"),
	FLAG_OPTION(align_options, json, "json", "Print one JSON object"),
};

const struct command align_command = {
	.name = "align", .usage = "DUMP DUMP [--tolerance X] [--all]\nRUN RUN [--tolerance X | --floor RUN...] [--skip N]",
	.min_words = 2, .max_words = ANY_NUMBER,
	.help = "Compare two dumps of training steps (train.dump), or of another program's, and name the first operation "
		"that differs; or the losses of two runs. Exit status 1 when they differ.",
	.run = run_align, COMMAND_OPTIONS(align_options, options),
};
