/*
 * commands/grid.c - the file of `ling sweep`: which runs a grid has.
 *
 *   The file          its keys
 *   Axes              the values of each, ranges as single values
 *   Sizes             the model of a size
 *   Runs              combinations, and what their configs say
 */
#define _GNU_SOURCE
#include "commands/grid.h"

#include "data.h"
#include "files/base.h"
#include "files/config.h"
#include "files/config_keys.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_VALUES = 512, MAX_AXES = 64, MAX_SIZES = 64, MAX_SEEDS = 256, MAX_RUNS = 10000, MOST_NAME = 120 };
enum { MULTIPLE = 8 };           /* sizes that a rule makes are multiples of it */

/* ============================================================================================================
 * The file
 * ========================================================================================================== */

enum scale { SCALE_LINEAR, SCALE_LOG };
static const char *const scale_names[] = {"linear", "log", NULL};

struct value {                   /* one, or a range of them */
	char key[MAX_GROUP];         /* under `grid` */
	char *text;                  /* NULL: a range */
	double from, to;
	int steps;                   /* values of a range, both ends included */
	int scale;
	int line;                    /* of the file */
};
struct grid_file {
	char config[PATH_LEN], output_dir[PATH_LEN];
	struct value grid[MAX_VALUES];
	struct { char list[MAX_GROUP], key[MAX_GROUP]; int line; } zip[MAX_AXES];
	int num_grid, num_zip;
	struct {
		struct value hidden_size[MAX_SIZES], num_hidden_layers[MAX_SIZES], tokens_per_parameter[MAX_SIZES];
		int num_widths, num_depths, num_lengths;
		double aspect;
	} sizes;
	struct { uint64_t number; int line; } seeds[MAX_SEEDS];
	int num_seeds;
	bool scale_schedule;
	struct hopeless_rule stop_hopeless;
};

#define KEY(...) KEY_OF(struct grid_file, __VA_ARGS__)
#define LIST(...) LIST_OF(struct grid_file, __VA_ARGS__)
#define LINE(...) LINE_OF(struct grid_file, __VA_ARGS__)
#define GROUPS(...) GROUPS_OF(struct grid_file, __VA_ARGS__)
#define ITEM_KEY(...) ITEM_KEY_OF(struct grid_file, __VA_ARGS__)
/* The keys of a struct value. */
#define VALUES(path) \
	ITEM_KEY(path, text, T_STRING, 0, 0, ITSELF, NULL, "a value, as on the command line of `ling train`"), \
	ITEM_KEY(path, from, T_DOUBLE, -1e18, 1e18, NEEDED, NULL, "first value of a range"), \
	ITEM_KEY(path, to, T_DOUBLE, -1e18, 1e18, NEEDED, NULL, "last value"), \
	ITEM_KEY(path, steps, T_INT, 2, MAX_VALUES, NEEDED, NULL, "how many values, both ends included"), \
	ITEM_KEY(path, scale, T_ENUM, 0, 0, 0, "linear", "linear: with equal differences; log: with equal ratios", \
		.names = scale_names)

static const struct key keys[] = {
	KEY(config, T_TEXT, 0, 0, REQUIRED, NULL, "the base config: beside this file, or as the path is"),
	KEY(output_dir, T_TEXT, 0, 0, REQUIRED, NULL, "directory of the runs, each in a directory of its own, and of "
		"table.tsv"),
	LIST(grid, num_grid, MAX_VALUES, NONE | ONE_ITEM, "off", "keys of a config, such as schedule.peak_lr, each with "
		"its values", GROUPS(grid, key), LINE(grid, line)),
	VALUES(grid),
	LIST(zip, num_zip, MAX_AXES, NONE, "off", "keys of `grid`, and perhaps `sizes` or `tokens_per_parameter`, whose "
		"values go together: the first with the first, and so on; several such lists under names",
		GROUPS(zip, list), LINE(zip, line)),
	ITEM_KEY(zip, key, T_TEXT, 0, 0, NEEDED | ITSELF, NULL, "a key"),
	SECTION("sizes", NONE, "models of several sizes"),
	LIST(sizes.hidden_size, sizes.num_widths, MAX_SIZES, NONE | ONE_ITEM, "off", "widths; a range is rounded to "
		"multiples of 8", LINE(sizes.hidden_size, line)),
	VALUES(sizes.hidden_size),
	LIST(sizes.num_hidden_layers, sizes.num_depths, MAX_SIZES, NONE | ONE_ITEM, "off", "layers; beside hidden_size as "
		"many values as there, which go together", LINE(sizes.num_hidden_layers, line)),
	VALUES(sizes.num_hidden_layers),
	KEY(sizes.aspect, T_DOUBLE, 0, 65536, NONE, "off", "hidden_size / num_hidden_layers, where only one of them is "
		"given; off: that of the base config"),
	LIST(sizes.tokens_per_parameter, sizes.num_lengths, MAX_SIZES, NONE | ONE_ITEM, "off", "length of a run: tokens "
		"for each active parameter without embedding and head", LINE(sizes.tokens_per_parameter, line)),
	VALUES(sizes.tokens_per_parameter),
	LIST(seeds, num_seeds, MAX_SEEDS, NONE, "off", "values of train.seed", LINE(seeds, line)),
	ITEM_KEY(seeds, number, T_UINT64, 0, 18446744073709551615.0, NEEDED | ITSELF, NULL, "a seed"),
	KEY(scale_schedule, T_BOOL, 0, 1, 0, "true", "a run of another length than the base config's has warm-up, decay, "
		"batch_warmup and router.warmup_steps of the same share of it; false: as they are there"),
	SECTION("stop_hopeless", NONE, "runs that are stopped early, see docs/scaling.md"),
	KEY(stop_hopeless.margin, T_DOUBLE, 0, 1000, NEEDED | ABOVE, NULL, "nats by which the validation loss is above the "
		"median of the others"),
	KEY(stop_hopeless.after, T_DOUBLE, 0, 1, 0, "0.25", "share of the run's tokens before which it goes on"),
	KEY(stop_hopeless.runs, T_INT, 1, 1e6, 0, "3", "others of the same size and length that have come as far"),
};

enum { NUM_KEYS = sizeof keys / sizeof *keys };
static const struct key_table table = {.keys = keys, .num_keys = NUM_KEYS, .whole = "grid"};
_Static_assert((int)NUM_KEYS <= (int)MAX_KEYS, "the places of all keys must fit");

void grid_print_keys(FILE *out)
{
	char type[256];
	for (const struct key *k = keys; k < keys + NUM_KEYS; k++) {
		const char *standard = k->flags & (REQUIRED | NEEDED) ? "required" : k->fallback ? k->fallback : "";
		if (k->type == T_SECTION)
			fprintf(out, "%s: %s%s\n", k->name, k->help, k->flags & NONE ? "; or off" : "");
		else
			fprintf(out, "  %-33s %-8s %s (%s)\n", k->name, standard, k->help, describe_key(type, &table, k));
	}
}

static void file_free(struct grid_file *f)
{
	const struct { struct value *list; int count; } lists[] = {{f->grid, f->num_grid},
		{f->sizes.hidden_size, f->sizes.num_widths}, {f->sizes.num_hidden_layers, f->sizes.num_depths},
		{f->sizes.tokens_per_parameter, f->sizes.num_lengths}};
	for (int l = 0; l < 4; l++)
		for (int i = 0; i < lists[l].count; i++)
			free(lists[l].list[i].text);
	free(f);
}

/* ============================================================================================================
 * Axes
 * ========================================================================================================== */

enum axis_kind { AXIS_SIZES, AXIS_LENGTHS, AXIS_KEY, AXIS_SEEDS };
struct axis {
	enum axis_kind kind;
	char name[MAX_GROUP];        /* as under `zip` */
	const struct key *key;       /* of the config, of AXIS_KEY */
	char **text;                 /* [count] the values */
	int count;
	size_t room;
	int line;                    /* of the first value */
	int group;                   /* axes of a group go together */
	bool repeats;                /* it goes together with another axis, which may tell equal values apart */
};

struct builder {
	struct grid *grid;
	struct grid_file *file;
	struct loader loader;
	struct config base, config;  /* of the base config; of the run that is made */
	struct axis axes[MAX_AXES];
	int num_axes, num_groups;
	int group_count[MAX_AXES];   /* [num_groups] values */
};

static struct place at_line(const struct builder *b, int line)
{
	return (struct place){b->grid->path, line};
}

/* Whether two texts are the same value of a key. */
static bool same_text(struct builder *b, const struct key *key, const char *x, const char *y)
{
	json_t *values[2];
	if (!strcmp(x, y) || key->type == T_SECTION || key->type == T_LIST)
		return !strcmp(x, y);
	for (int i = 0; i < 2; i++) {
		store_text(&b->config, key, 0, i ? y : x, true);
		values[i] = key_to_json(&config_table, &b->config, key);
	}
	const bool same = json_equal(values[0], values[1]);
	json_decref(values[0]), json_decref(values[1]);
	return same;
}

/* Adds a value, a text that the axis then owns. Fails when it is no value of the key. */
static int add_value(struct builder *b, struct axis *a, const struct key *key, char *text, int line)
{
	char type[256], shown[64];
	const char *wrong = NULL;
	a->text = grow(a->text, a->count, &a->room, 1, sizeof *a->text);
	a->text[a->count++] = text;
	for (const char *p = text; *p && !wrong; p++)
		wrong = iscntrl((unsigned char)*p) ? "a control character" : NULL;
	if (!wrong && key->type != T_SECTION && key->type != T_LIST)
		wrong = store_text(&b->config, key, 0, text, true);
	if (wrong)
		return fail_at(at_line(b, line), "%s: found %s%s%s%s; expected %s", key->name, printable(shown, text),
				*wrong ? " (" : "", wrong, *wrong ? ")" : "", describe_key(type, &config_table, key));
	for (int i = 0; i < a->count - 1 && !a->repeats; i++)
		if (same_text(b, key, a->text[i], text))
			return fail_at(at_line(b, line), "%s: found %s twice; expected each value once", key->name,
					printable(shown, text));
	return 0;
}

/* Adds a value or the values of a range. multiple: numbers of a range are rounded to multiples of it; 0: those of a key
 * of whole numbers to such, others to 6 digits. */
static int add_values(struct builder *b, struct axis *a, const struct key *key, const struct value *v, int multiple)
{
	const bool whole = key->type == T_INT || key->type == T_INT64 || key->type == T_UINT64;
	a->line = a->line ? a->line : v->line;
	if (v->text && v->steps)
		return fail_at(at_line(b, v->line), "%s: found a value and a range in one; expected one of them", key->name);
	if (v->text)
		return add_value(b, a, key, copy_string(v->text), v->line);
	if (!whole && key->type != T_DOUBLE)
		return fail_at(at_line(b, v->line), "%s: found a range; expected single values, for it is no number",
				key->name);
	if (v->scale == SCALE_LOG && !(v->from > 0 && v->to > 0))
		return fail_at(at_line(b, v->line), "%s: found a range from %g to %g on a log scale; expected both above 0",
				key->name, v->from, v->to);
	for (int i = 0; i < v->steps; i++) {
		const double t = (double)i / (v->steps - 1);
		const double x = i == v->steps - 1 ? v->to : v->scale == SCALE_LOG ? v->from * pow(v->to / v->from, t)
				: v->from + (v->to - v->from) * t;
		char text[64];
		if (multiple)
			snprintf(text, sizeof text, "%.0f", fmax(round(x / multiple), 1) * multiple);
		else
			snprintf(text, sizeof text, whole ? "%.0f" : "%.6g", x);
		if (add_value(b, a, key, copy_string(text), v->line) < 0)
			return -1;
	}
	return 0;
}

/* A new axis; NULL when there are too many. */
static struct axis *add_axis(struct builder *b, enum axis_kind kind, const char *name)
{
	if (b->num_axes == MAX_AXES) {
		fail("%s: found more than %d keys to vary; expected at most that", b->grid->path, MAX_AXES);
		return NULL;
	}
	struct axis *a = &b->axes[b->num_axes++];
	a->kind = kind;
	strcpy(a->name, name);
	for (int i = 0; i < b->file->num_zip; i++) {
		const struct key *key = find_key(&config_table, b->file->zip[i].key);
		a->repeats = a->repeats || !strcmp(key ? key->name : b->file->zip[i].key, name);
	}
	return a;
}

static struct axis *find_axis(struct builder *b, const char *name)
{
	for (int i = 0; i < b->num_axes; i++)
		if (!strcmp(b->axes[i].name, name))
			return &b->axes[i];
	return NULL;
}

/* Whether a key of the config is one of a list, which NULL ends. */
static bool is_one_of(const char *name, const char *const *list)
{
	while (*list && strcmp(*list, name))
		list++;
	return *list;
}

static const char *const keys_of_sizes[] = {"model", "model.hidden_size", "model.num_hidden_layers",
	"model.num_attention_heads", "model.num_key_value_heads", "model.head_dim", "model.moe_intermediate_size",
	"model.intermediate_size", "model.first_k_dense_replace", NULL};
static const char *const keys_of_lengths[] = {"train.steps", "train.tokens", NULL};

/* Fails for a key that cannot vary. */
static int check_key(const struct builder *b, const struct key *key, int line)
{
	const struct place at = at_line(b, line);
	if (key->flags & ITEM)
		return fail_at(at, "grid: found %s, a key of a list's items; expected the list itself", key->name);
	if (!strcmp(key->name, "train.output_dir") || !strcmp(key->name, "train.stop_at_step"))
		return fail_at(at, "grid: found %s, which the sweep sets; expected another key", key->name);
	if (!strcmp(key->name, "train.seed"))
		return fail_at(at, "grid: found train.seed; expected the list `seeds` at the top of the file");
	if (b->file->sizes.num_widths + b->file->sizes.num_depths && is_one_of(key->name, keys_of_sizes))
		return fail_at(at, "grid: found %s, which `sizes` sets; expected one of the two", key->name);
	if (b->file->sizes.num_lengths && is_one_of(key->name, keys_of_lengths))
		return fail_at(at, "grid: found %s, which sizes.tokens_per_parameter sets; expected one of the two", key->name);
	return 0;
}

/* The axes of `grid`: one for each key, with all of its values. */
static int add_keys(struct builder *b)
{
	for (int i = 0; i < b->file->num_grid; i++) {
		const struct value *v = &b->file->grid[i];
		const struct key *key = *v->key ? find_key(&config_table, v->key) : NULL;
		if (!*v->key)
			return fail_at(at_line(b, v->line), "grid: found values without a key; expected a mapping of keys to "
					"values, such as {schedule.peak_lr: [1e-3, 2e-3]}");
		if (!key)
			return fail_unknown(&config_table, at_line(b, v->line), v->key);
		if (check_key(b, key, v->line) < 0)
			return -1;
		struct axis *a = find_axis(b, key->name);
		if (a && strcmp(b->file->grid[i - 1].key, v->key))
			return fail_at(at_line(b, v->line), "grid: found %s in two spellings; expected one", key->name);
		if (!a && !(a = add_axis(b, AXIS_KEY, key->name)))
			return -1;
		a->key = key;
		if (add_values(b, a, key, v, 0) < 0)
			return -1;
	}
	return 0;
}

/* Adds all values of a list of struct value. */
static int add_list(struct builder *b, struct axis *a, const struct key *key, const struct value *list, int n,
		int multiple)
{
	for (int i = 0; i < n; i++)
		if (add_values(b, a, key, &list[i], multiple) < 0)
			return -1;
	return 0;
}

static double aspect(const struct builder *b)
{
	return b->file->sizes.aspect ? b->file->sizes.aspect
		: (double)b->base.model.hidden_size / b->base.model.num_hidden_layers;
}

/* The axis of sizes; its values are "HxL": hidden_size and num_hidden_layers. */
static int add_sizes(struct builder *b)
{
	const struct grid_file *f = b->file;
	const struct key *width = find_key(&config_table, "model.hidden_size");
	const struct key *depth = find_key(&config_table, "model.num_hidden_layers");
	struct axis widths = {0}, depths = {0}, *a = add_axis(b, AXIS_SIZES, "sizes");
	int rc = a ? 0 : -1;
	widths.repeats = depths.repeats = rc < 0 || a->repeats || (f->sizes.num_widths && f->sizes.num_depths);
	if (rc == 0)
		rc = add_list(b, &widths, width, f->sizes.hidden_size, f->sizes.num_widths, MULTIPLE);
	if (rc == 0)
		rc = add_list(b, &depths, depth, f->sizes.num_hidden_layers, f->sizes.num_depths, 0);
	if (rc == 0 && widths.count && depths.count && widths.count != depths.count)
		rc = fail_at(at_line(b, depths.line), "sizes: found %d values of hidden_size and %d of num_hidden_layers; "
				"expected as many of each, which go together", widths.count, depths.count);
	if (rc == 0 && widths.count && depths.count && f->sizes.aspect)
		rc = fail_key(&b->loader, "sizes.aspect", "found beside hidden_size and num_hidden_layers; expected only one "
				"of these two");
	for (int i = 0; rc == 0 && i < (widths.count ? widths.count : depths.count); i++) {
		const double H = widths.count ? atof(widths.text[i])
				: fmax(round(atof(depths.text[i]) * aspect(b) / MULTIPLE), 1) * MULTIPLE;
		const double L = depths.count ? atof(depths.text[i]) : fmax(round(H / aspect(b)), 1);
		char text[64];
		snprintf(text, sizeof text, "%.0fx%.0f", H, L);
		for (int j = 0; j < a->count && rc == 0 && !a->repeats; j++)
			if (!strcmp(a->text[j], text))
				rc = fail_at(at_line(b, widths.count ? widths.line : depths.line), "sizes: found hidden_size %.0f with "
						"%.0f layers twice; expected each size once", H, L);
		a->text = grow(a->text, a->count, &a->room, 1, sizeof *a->text);
		a->text[a->count++] = copy_string(text);
		a->line = widths.count ? widths.line : depths.line;
	}
	for (int i = 0; i < widths.count; i++)
		free(widths.text[i]);
	for (int i = 0; i < depths.count; i++)
		free(depths.text[i]);
	free(widths.text), free(depths.text);
	return rc;
}

/* The axis of tokens a parameter. */
static int add_lengths(struct builder *b)
{
	static const struct key number = {.name = "sizes.tokens_per_parameter", .type = T_DOUBLE, .offset = 0, .max = 1e6,
		.flags = ABOVE};
	struct axis *a = add_axis(b, AXIS_LENGTHS, "tokens_per_parameter");
	_Static_assert(sizeof b->config >= sizeof(double), "add_value() stores the number at the beginning of the config");
	return a ? add_list(b, a, &number, b->file->sizes.tokens_per_parameter, b->file->sizes.num_lengths, 0) : -1;
}

static int add_seeds(struct builder *b)
{
	struct axis *a = add_axis(b, AXIS_SEEDS, "seeds");
	for (int i = 0; a && i < b->file->num_seeds; i++) {
		char text[32];
		snprintf(text, sizeof text, "%" PRIu64, b->file->seeds[i].number);
		if (add_value(b, a, find_key(&config_table, "train.seed"), copy_string(text), b->file->seeds[i].line) < 0)
			return -1;
	}
	return a ? 0 : -1;
}

/* Whether two values of an axis are the same. */
static bool equal_values(struct builder *b, const struct axis *a, int i, int j)
{
	return a->kind == AXIS_KEY ? same_text(b, a->key, a->text[i], a->text[j])
		: a->kind == AXIS_LENGTHS ? atof(a->text[i]) == atof(a->text[j]) : !strcmp(a->text[i], a->text[j]);
}

/* Fails where two places of a group have the same value in each of its axes: they would be one run. */
static int check_places(struct builder *b, int group)
{
	for (int i = 0; i < b->group_count[group]; i++)
		for (int j = 0; j < i; j++) {
			const struct axis *first = NULL;
			bool same = true;
			for (const struct axis *a = b->axes; a < b->axes + b->num_axes && same; a++)
				if (a->group == group) {
					first = first ? first : a;
					same = equal_values(b, a, i, j);
				}
			if (same)
				return fail_at(at_line(b, first->line), "%s: its values number %d and %d are the same, and so are "
						"those of what goes together with it; expected each run once", first->name, j + 1, i + 1);
		}
	return 0;
}

/* Gives each axis its group: its own, or that of the list under `zip` that it is in. */
static int group_axes(struct builder *b)
{
	const struct grid_file *f = b->file;
	struct axis *of_zip[MAX_AXES];
	for (int i = 0; i < f->num_zip; i++) {
		const struct place at = at_line(b, f->zip[i].line);
		const struct key *key = find_key(&config_table, f->zip[i].key);
		of_zip[i] = find_axis(b, key ? key->name : f->zip[i].key);
		if (!of_zip[i] || of_zip[i]->kind == AXIS_SEEDS)
			return fail_at(at, "zip: found %s; expected a key that has values under `grid`, or sizes or "
					"tokens_per_parameter where these are given", f->zip[i].key);
		for (int j = 0; j < i; j++)
			if (of_zip[j] == of_zip[i])
				return fail_at(at, "zip: found %s twice; expected it once", f->zip[i].key);
			else if (!strcmp(f->zip[j].list, f->zip[i].list) && of_zip[j]->count != of_zip[i]->count)
				return fail_at(at, "zip: found %d values of %s and %d of %s; expected as many of each",
						of_zip[j]->count, of_zip[j]->name, of_zip[i]->count, of_zip[i]->name);
	}
	for (int i = 0; i < b->num_axes; i++) {
		struct axis *a = &b->axes[i];
		a->group = -1;
		for (int z = 0; z < f->num_zip; z++)
			for (int other = 0; of_zip[z] == a && other < f->num_zip; other++)
				if (!strcmp(f->zip[other].list, f->zip[z].list) && of_zip[other] < a && a->group < 0)
					a->group = of_zip[other]->group;
		if (a->group < 0) {
			a->group = b->num_groups++;
			b->group_count[a->group] = a->count;
		}
	}
	for (int i = 0; i < b->num_groups; i++)
		if (check_places(b, i) < 0)
			return -1;
	return 0;
}

/* ============================================================================================================
 * Runs
 * ========================================================================================================== */

static void add_override(struct strings *overrides, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void add_override(struct strings *overrides, const char *format, ...)
{
	va_list arguments;
	char *text = NULL;
	size_t capacity = overrides->count; /* the array is exactly full */
	va_start(arguments, format);
	if (vasprintf(&text, format, arguments) < 0)
		out_of_memory(0);
	va_end(arguments);
	overrides->text = grow(overrides->text, overrides->count, &capacity, 1, sizeof *overrides->text);
	overrides->text[overrides->count++] = text;
}

/* A size of the base config for a model `ratio` times as wide, rounded to a multiple. */
static int scaled(int size, double ratio, int multiple)
{
	return (int)fmax(round(size * ratio / multiple), 1) * multiple;
}

/* The model of a size: widths in the ratio of hidden_size, heads of the same width. */
static void add_size(struct strings *overrides, const struct model_config *base, int H, int L)
{
	const double ratio = (double)H / base->hidden_size;
	const int heads = scaled(base->num_attention_heads, ratio, 1);
	const double wanted = base->num_key_value_heads * (double)heads / base->num_attention_heads;
	int kv_heads = 1;            /* the divisor of `heads` that is nearest */
	for (int i = 2; i <= heads; i++)
		if (heads % i == 0 && fabs(i - wanted) < fabs(kv_heads - wanted))
			kv_heads = i;
	add_override(overrides, "model.hidden_size=%d", H);
	add_override(overrides, "model.num_hidden_layers=%d", L);
	add_override(overrides, "model.num_attention_heads=%d", heads);
	add_override(overrides, "model.num_key_value_heads=%d", kv_heads);
	add_override(overrides, "model.head_dim=%d", base->head_dim);
	if (base->moe_intermediate_size)
		add_override(overrides, "model.moe_intermediate_size=%d", scaled(base->moe_intermediate_size, ratio, MULTIPLE));
	if (base->intermediate_size)
		add_override(overrides, "model.intermediate_size=%d", scaled(base->intermediate_size, ratio, MULTIPLE));
	if (base->first_k_dense_replace == base->num_hidden_layers)
		add_override(overrides, "model.first_k_dense_replace=%d", L);
	else if (base->first_k_dense_replace >= L)
		add_override(overrides, "model.first_k_dense_replace=%d", L - 1);
}

/* Appends to a name, unless the axis has one value; what is no letter, digit or one of . _ + = becomes _. */
static void add_label(struct text *name, const struct axis *a, const char *format, ...)
		__attribute__((format(printf, 3, 4)));
static void add_label(struct text *name, const struct axis *a, const char *format, ...)
{
	va_list arguments;
	char *label = NULL;
	if (a->count == 1)
		return;
	va_start(arguments, format);
	if (vasprintf(&label, format, arguments) < 0)
		out_of_memory(0);
	va_end(arguments);
	if (name->size)
		text_append_string(name, "-");
	for (char *p = label; *p; p++)
		if (!isalnum((unsigned char)*p) && !strchr("._+-=", *p))
			*p = '_';
	text_append_string(name, label);
	free(label);
}

/* The name of a key in that of a run: its last part, or all of it where another key has the same. */
static const char *label_of(const struct builder *b, const struct axis *a)
{
	for (int i = 0; i < b->num_axes; i++)
		if (&b->axes[i] != a && !strcmp(leaf_of(b->axes[i].name), leaf_of(a->name)))
			return a->name;
	return leaf_of(a->name);
}

int grid_run_config(const struct grid *g, const struct grid_run *r, struct config *c)
{
	return config_load(c, g->config, (int)r->overrides.count, r->overrides.text, false);
}

/* fail(), with the run before what error_text says. */
static int fail_run(const struct builder *b, const struct grid_run *r)
{
	char reason[sizeof error_text];
	memcpy(reason, error_text, sizeof reason);
	return fail("%s: run %s: %s", b->grid->path, r->name, reason);
}

static bool varies(struct builder *b, const char *name)
{
	return find_axis(b, name);
}

/* Keys that count steps or tokens of a run keep the share of it that they have in the base config. c: the config that
 * `path` and the overrides make, which then have more. b: the keys that it varies are left as they are; or NULL. */
static int scale_schedule(struct strings *overrides, struct config *c, const char *path, const struct config *base,
		struct builder *b)
{
	int64_t steps, tokens, base_steps, base_tokens;
	run_length(base, 0, 0, &base_steps, &base_tokens);
	run_length(c, 0, 0, &steps, &tokens);
	if (tokens == base_tokens)
		return 0;
	if (base->train.batch_warmup.tokens && !(b && (varies(b, "train.batch_warmup.tokens") ||
			varies(b, "train.batch_warmup")))) {
		add_override(overrides, "train.batch_warmup.tokens=%.0f", fmax(round((double)base->train.batch_warmup.tokens *
				tokens / base_tokens), 1));
		if (config_load(c, path, (int)overrides->count, overrides->text, false) < 0)
			return -1;
		run_length(c, 0, 0, &steps, &tokens);
	}
	const struct { const char *name, *section; int64_t value; } lengths[] = {
		{"schedule.warmup_steps", "schedule", base->schedule.warmup_steps},
		{"schedule.decay.steps", "schedule.decay", base->schedule.decay.steps},
		{"model.router.warmup_steps", "model", base->model.router.warmup_steps},
	};
	for (int i = 0; i < 3; i++)
		if (lengths[i].value && !(b && (varies(b, lengths[i].name) || varies(b, lengths[i].section))))
			add_override(overrides, "%s=%.0f", lengths[i].name,
					fmax(round((double)lengths[i].value * steps / base_steps), 1));
	return config_load(c, path, (int)overrides->count, overrides->text, false);
}

int grid_resize(struct config *c, const char *path, int num_overrides, char *const *overrides,
		const struct config *base, const struct grid_size *size)
{
	struct strings all = {0};
	for (int i = 0; i < num_overrides; i++)
		add_override(&all, "%s", overrides[i]);
	add_size(&all, &base->model, size->width, size->layers);
	if (size->batch)
		add_override(&all, "train.batch=%d", size->batch);
	if (size->batch && size->batch < base->train.micro_batch)
		add_override(&all, "train.micro_batch=%d", size->batch);
	if (size->batch && size->batch < base->train.batch_warmup.start)
		add_override(&all, "train.batch_warmup=off");
	if (size->learning_rate)
		add_override(&all, "schedule.peak_lr=%.3g", size->learning_rate);
	if (size->tokens) {
		add_override(&all, "train.steps=off");
		add_override(&all, "train.tokens=%.0f", size->tokens);
	}
	int rc = config_load(c, path, (int)all.count, all.text, false);
	if (rc == 0)
		rc = scale_schedule(&all, c, path, base, NULL);
	for (int64_t i = 0; i < all.count; i++)
		free(all.text[i]);
	free(all.text);
	return rc;
}

/* Makes b->config from the overrides so far. */
static int make_config(struct builder *b, const struct grid_run *r)
{
	return grid_run_config(b->grid, r, &b->config) == 0 ? 0 : fail_run(b, r);
}

/* Fills the row of the run whose config is b->config. */
static int describe(struct builder *b, struct grid_run *r)
{
	const struct config *c = &b->config;
	int64_t tokens;
	run_length(c, 0, 0, &r->steps, &tokens);
	r->row = (struct scaling_run){.name = r->name};
	for (int i = 0; i < NUM_SCALING_COLUMNS; i++)
		r->row.value[i] = NAN;
	r->row.value[SCALING_TOKENS] = tokens;
	return scaling_run_describe(&r->row, &c->model, c->data.seq_len, c->schedule.peak_lr, c->train.batch,
			c->train.seed);
}

/* What the config of a run, b->config, says. */
static int finish_run(struct builder *b, struct grid_run *r, struct text *group)
{
	const struct config *c = &b->config;
	if (c->train.stop_at_step)
		return fail("%s: train.stop_at_step is %" PRId64 "; expected off, for the runs of a sweep go to their end",
				b->grid->config, c->train.stop_at_step);
	if (!c->data.num_valid)
		return fail("%s: there is no data.valid; expected one, for runs are compared by their validation loss",
				b->grid->config);
	if (describe(b, r) < 0)
		return -1;
	r->config = config_to_json(c);
	if (!varies(b, "tokens_per_parameter"))
		text_printf(group, " %.0f", r->row.value[SCALING_TOKENS]);
	r->group = group->data ? group->data : copy_string("");
	*group = (struct text){0};
	return 0;
}

/* The run with value index[group] of the axes of each group. */
static int make_run(struct builder *b, struct grid_run *r, const int *index)
{
	struct text name = {0}, group = {0};
	const char *length = NULL;
	int key = 0;
	*r = (struct grid_run){.values = allocate(b->grid->num_keys * sizeof *r->values)};
	for (int i = 0; i < b->num_axes; i++) {
		const struct axis *a = &b->axes[i];
		const char *text = a->text[index[a->group]];
		int H, L;
		switch (a->kind) {
		case AXIS_SIZES:
			sscanf(text, "%dx%d", &H, &L);
			add_size(&r->overrides, &b->base.model, H, L);
			add_label(&name, a, "h%d-l%d", H, L);
			text_printf(&group, "%s", text);
			break;
		case AXIS_LENGTHS:
			length = text;
			add_label(&name, a, "t%s", text);
			text_printf(&group, " t%s", text);
			break;
		case AXIS_KEY:
			if (!strcmp(a->name, "train.steps"))
				add_override(&r->overrides, "train.tokens=off");
			else if (!strcmp(a->name, "train.tokens"))
				add_override(&r->overrides, "train.steps=off");
			add_override(&r->overrides, "%s=%s", a->name, text);
			add_label(&name, a, "%s=%s", label_of(b, a), text);
			r->values[key++] = copy_string(text);
			break;
		case AXIS_SEEDS:
			add_override(&r->overrides, "train.seed=%s", text);
			add_label(&name, a, "s%s", text);
		}
	}
	if (!name.size)
		text_append_string(&name, "run");
	if (name.size > MOST_NAME) { /* the rest becomes a checksum */
		const uint32_t crc = crc_of(0, (const uint8_t *)name.data, name.size);
		name.size = MOST_NAME - 9;
		text_printf(&name, "-%08x", (unsigned)crc);
	}
	r->name = name.data;
	int rc = make_config(b, r);
	if (rc == 0 && length && (rc = describe(b, r)) == 0) {
		add_override(&r->overrides, "train.steps=off");
		add_override(&r->overrides, "train.tokens=%.0f",
				ceil(atof(length) * r->row.value[SCALING_ACTIVE_NON_EMBEDDING]));
		rc = make_config(b, r);
	}
	if (rc == 0 && b->file->scale_schedule &&
			scale_schedule(&r->overrides, &b->config, b->grid->config, &b->base, b) < 0)
		rc = fail_run(b, r);
	rc = rc < 0 || finish_run(b, r, &group) < 0 ? -1 : 0;
	free(group.data);
	return rc;
}

/* For qsort: of least FLOPs first, and else in the order in which they were made, which `order` keeps. */
struct ordered_run { struct grid_run run; int order; };
static int compare_runs(const void *a, const void *b)
{
	const struct ordered_run *x = a, *y = b;
	const int flops = compare_doubles(&x->run.row.value[SCALING_FLOPS], &y->run.row.value[SCALING_FLOPS]);
	return flops ? flops : x->order - y->order;
}

static void sort_runs(struct grid *g)
{
	struct ordered_run *list = allocate(g->num_runs * sizeof *list);
	for (int i = 0; i < g->num_runs; i++)
		list[i] = (struct ordered_run){g->runs[i], i};
	qsort(list, g->num_runs, sizeof *list, compare_runs);
	for (int i = 0; i < g->num_runs; i++)
		g->runs[i] = list[i].run;
	free(list);
}

/* Fails when two runs have the same name. */
static int check_names(const struct grid *g)
{
	for (int i = 0; i < g->num_runs; i++)
		for (int j = 0; j < i; j++)
			if (!strcmp(g->runs[i].name, g->runs[j].name))
				return fail("%s: two runs have the name %s; expected values that differ in letters or digits", g->path,
						g->runs[i].name);
	return 0;
}

/* All combinations, the last group's values fastest. */
static int make_runs(struct builder *b)
{
	struct grid *g = b->grid;
	int index[MAX_AXES] = {0}, group;
	double number = 1;
	for (int i = 0; i < b->num_groups; i++)
		number *= b->group_count[i];
	if (number > MAX_RUNS)
		return fail("%s: the grid has %.0f runs; expected at most %d", g->path, number, MAX_RUNS);
	do {
		g->runs = grow(g->runs, g->num_runs, &g->room, 1, sizeof *g->runs);
		if (make_run(b, &g->runs[g->num_runs++], index) < 0)
			return -1;
		for (group = b->num_groups - 1; group >= 0 && ++index[group] == b->group_count[group]; group--)
			index[group] = 0;
	} while (group >= 0);
	sort_runs(g);
	return check_names(g);
}

/* Finds the base config: beside the file, or as its path is. */
static int find_config(struct builder *b)
{
	char dir[PATH_LEN], shown[64];
	const char *name = b->file->config;
	parent_of(dir, b->grid->path);
	if (*name != '/' && path_join(b->grid->config, dir, name) < 0)
		return -1;
	if (*name != '/' && path_exists(b->grid->config) > 0)
		return 0;
	if (path_exists(name) <= 0)
		return fail_key(&b->loader, "config", "there is no file %s in %s or here; expected the config of a run",
				printable(shown, name), dir);
	return path_copy(b->grid->config, name);
}

/* Everything, into b->grid. */
static int build(struct builder *b)
{
	struct grid *g = b->grid;
	struct grid_file *f = b->file;
	loader_init(&b->loader, &table, f, g->path);
	if (load_file(&b->loader) < 0 || check_required(&b->loader, NULL) < 0 || find_config(b) < 0 ||
			path_copy(g->output_dir, f->output_dir) < 0 || config_load(&b->base, g->config, 0, NULL, false) < 0)
		return -1;
	g->hopeless = f->stop_hopeless;
	if (!f->sizes.num_widths && !f->sizes.num_depths && f->sizes.aspect)
		return fail_key(&b->loader, "sizes.aspect", "found without hidden_size or num_hidden_layers; expected one of "
				"them beside it");
	if ((f->sizes.num_widths + f->sizes.num_depths && add_sizes(b) < 0) ||
			(f->sizes.num_lengths && add_lengths(b) < 0) || add_keys(b) < 0 ||
			(f->num_seeds && add_seeds(b) < 0) || group_axes(b) < 0)
		return -1;
	g->keys = allocate(b->num_axes * sizeof *g->keys);
	for (int i = 0; i < b->num_axes; i++)
		if (b->axes[i].kind == AXIS_KEY)
			g->keys[g->num_keys++] = copy_string(b->axes[i].name);
	return make_runs(b);
}

int grid_read(struct grid *g, const char *path)
{
	*g = (struct grid){0};
	struct builder *b = allocate(sizeof *b);
	b->grid = g;
	b->file = allocate(sizeof *b->file);
	const int rc = path_copy(g->path, path) < 0 ? -1 : build(b);
	for (int i = 0; i < b->num_axes; i++) {
		for (int j = 0; j < b->axes[i].count; j++)
			free(b->axes[i].text[j]);
		free(b->axes[i].text);
	}
	file_free(b->file);
	free(b);
	if (rc < 0)
		grid_free(g);
	return rc;
}

void grid_free(struct grid *g)
{
	for (int i = 0; i < g->num_runs; i++) {
		struct grid_run *r = &g->runs[i];
		for (int64_t j = 0; j < r->overrides.count; j++)
			free(r->overrides.text[j]);
		for (int j = 0; j < g->num_keys; j++)
			free(r->values[j]);
		free(r->overrides.text), free(r->values), free(r->name), free(r->group);
		json_decref(r->config);
	}
	for (int i = 0; i < g->num_keys; i++)
		free(g->keys[i]);
	free(g->keys), free(g->runs);
	*g = (struct grid){0};
}

/* ============================================================================================================
 * Two configs
 * ========================================================================================================== */

/* Whether two values are the same; real numbers to the 12th digit, for events.jsonl has them shorter. */
static bool same_value(const json_t *a, const json_t *b)
{
	if (json_is_number(a) && json_is_number(b) && (json_is_real(a) || json_is_real(b))) {
		const double x = json_number_value(a), y = json_number_value(b);
		return fabs(x - y) <= 1e-12 * fmax(fabs(x), fabs(y));
	}
	if (json_typeof(a) != json_typeof(b))
		return false;
	if (json_is_array(a)) {
		size_t n = json_array_size(a);
		for (size_t i = 0; i < n && n == json_array_size(b); i++)
			if (!same_value(json_array_get(a, i), json_array_get(b, i)))
				return false;
		return n == json_array_size(b);
	}
	if (json_is_object(a)) {
		const char *name;
		json_t *value;
		json_object_foreach((json_t *)a, name, value) {
			const json_t *other = json_object_get(b, name);
			if (!other || !same_value(value, other))
				return false;
		}
		return json_object_size(a) == json_object_size(b);
	}
	return json_equal((json_t *)a, (json_t *)b);
}

const char *grid_difference(const json_t *a, const json_t *b)
{
	static const char *const without_effect[] = {"train.output_dir", "train.stop_at_step", "eval.samples",
		"eval.sample_file", "eval.sample_tokens", "eval.sample_temperature", NULL};
	static const char *const sections[] = {"checkpoint", "health", "log", "trace"};
	for (int i = 0; i < config_table.num_keys; i++) {
		const struct key *k = &config_table.keys[i];
		bool counts = k->type != T_SECTION && !(k->flags & ITEM) && !is_one_of(k->name, without_effect);
		for (int s = 0; s < 4; s++)
			counts = counts && !is_inside(sections[s], k->name);
		const json_t *x = counts ? json_at(a, k->name) : NULL, *y = x ? json_at(b, k->name) : NULL;
		if (y && !same_value(x, y))
			return k->name;
	}
	return NULL;
}
