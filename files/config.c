/*
 * files/config.c - the table of all keys of a config, reading it from YAML and from a Hugging Face config.json, and writing it back.
 *
 * One table describes every key. Parsing, defaults, ranges, the key listing, JSON in both directions, the check at
 * resume and the hint for a misspelt key all read it; a new key is a field in ling.h and a line here. Task files have a table of their own.
 */
#define _GNU_SOURCE
#include "files/config.h"

#include "files/base.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#define KEY(...) KEY_OF(struct config, __VA_ARGS__)

#define LIST(path, number, most, marks, standard, meaning) \
	{.name = #path, .type = T_LIST, .offset = offsetof(struct config, path), .size = sizeof ((struct config *)0)->path, .max = most, \
	 .flags = marks, .fallback = standard, .help = meaning, .item = sizeof ((struct config *)0)->path[0], .count = offsetof(struct config, number)}
#define ITEM_KEY(path, member, kind, low, high, marks, standard, meaning, ...) \
	{.name = #path "." #member, .type = kind, .offset = offsetof(struct config, path[0].member), \
	 .size = sizeof ((struct config *)0)->path[0].member, .min = low, .max = high, .flags = marks | ITEM, .fallback = standard, .help = meaning, \
	 __VA_ARGS__}

const char *const dtype_names[] = {"none", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", NULL};
static const char *const tokenizer_names[] = {"byte", "none", NULL};
static const char *const scope_names[] = {"micro_batch", "sequence", NULL};
static const char *const recompute_names[] = {"none", "attention", "layer", NULL};
static const char *const shape_names[] = {"linear", "cosine", "1-sqrt", "inverse_sqrt", NULL};

#define MAX_TOKENS 1e15 /* of a run; keeps every product of sizes within int64_t */

static const struct key keys[] = {
	SECTION("model", 0, "the model's shape, in Hugging Face's words; or the name of a YAML file with a model section, or of a "
		"Hugging Face directory"),
	KEY(model.hidden_size, T_INT, 1, 65536, REQUIRED | FIXED, NULL, "width of the model"),
	KEY(model.num_hidden_layers, T_INT, 1, 1024, REQUIRED | FIXED, NULL, "layers"),
	KEY(model.num_attention_heads, T_INT, 1, 4096, REQUIRED | FIXED, NULL, "query heads"),
	KEY(model.num_key_value_heads, T_INT, 0, 4096, NONE | FIXED, "off", "key-value heads; off: as many as query heads"),
	KEY(model.head_dim, T_INT, 0, 4096, NONE | FIXED, "off", "width of a head; off: hidden_size / num_attention_heads"),
	KEY(model.vocab_size, T_INT, 1, 10000000, REQUIRED | FIXED, NULL, "token ids are beneath it"),
	KEY(model.num_experts, T_INT, 0, 4096, NONE | FIXED | ROUTED, "off",
		"experts of a layer; needed unless all layers are dense", .alias = "model.n_routed_experts"),
	KEY(model.num_experts_per_tok, T_INT, 0, 4096, NONE | FIXED | ROUTED, "off", "experts that a token is sent to"),
	KEY(model.num_shared_experts, T_INT, 0, 1024, NONE | FIXED | ROUTED, "0", "experts that see every token",
		.alias = "model.n_shared_experts"),
	KEY(model.moe_intermediate_size, T_INT, 0, 1048576, NONE | FIXED | ROUTED, "off", "width of an expert"),
	KEY(model.first_k_dense_replace, T_INT, 0, 1024, NONE | FIXED, "0", "this many first layers are dense"),
	KEY(model.intermediate_size, T_INT, 0, 1048576, NONE | FIXED | DENSE, "off", "width of a dense layer"),
	KEY(model.max_position_embeddings, T_INT, 1, 1e9, FIXED | FREE, "16384", "longest sequence of the model"),
	KEY(model.norm_topk_prob, T_BOOL, 0, 1, FIXED | ROUTED, "true", "expert weights of a token sum to 1"),
	KEY(model.norm_head, T_BOOL, 0, 1, FIXED, "true", "normalise the output head's columns", .class_fallback = "false"),
	KEY(model.tie_word_embeddings, T_BOOL, 0, 1, FIXED, "false", "one matrix is embedding and output head"),
	KEY(model.use_bias, T_BOOL, 0, 1, FIXED, "false", "bias in the attention's output", .class_fallback = "true"),
	KEY(model.use_qkv_bias, T_BOOL, 0, 1, FIXED, "false", "bias in query, key and value"),
	KEY(model.rope_theta, T_DOUBLE, 0, 1e12, ABOVE | FIXED, "600000", "base of the rotary embedding",
		.class_fallback = "10000"),
	KEY(model.rms_norm_eps, T_DOUBLE, 0, 1, ABOVE | FIXED, "1e-5", "added to the mean square in RMSNorm"),
	KEY(model.initializer_range, T_DOUBLE, 0, 10, FIXED | FREE, "0.006", "standard deviation of initial weights",
		.class_fallback = "0.02"),
	SECTION("model.router", 0, "how tokens are spread over experts; training only"),
	KEY(model.router.balance_loss_coef, T_DOUBLE, 0, 1000, NONE, "0.015", "weight of the balance loss"),
	KEY(model.router.balance_loss_scope, T_ENUM, 0, 0, 0, "micro_batch", "tokens that are balanced together",
		.names = scope_names),
	KEY(model.router.z_loss_coef, T_DOUBLE, 0, 1000, NONE, "1e-4", "weight of the router's z-loss"),
	KEY(model.router.warmup_steps, T_INT, 0, 1e9, NONE, "off", "steps of stochastic routing warmup"),

	SECTION("data", 0, "what is read"),
	LIST(data.train, data.num_train, MAX_SOURCES, REQUIRED, NULL, "token files to train on: one's path, or a blend"),
	ITEM_KEY(data.train, path, T_TEXT, 0, 0, NEEDED, NULL, "prefix of .bin and .idx, or an llm.c .bin file, or bare ids"),
	ITEM_KEY(data.train, weight, T_DOUBLE, 0, 1e9, 0, "1", "the file's part of the samples, over the sum of all weights"),
	ITEM_KEY(data.train, dtype, T_TEXT, 0, 0, 0, "none", "type of the ids of a file that has nothing but ids", .names = dtype_names),
	LIST(data.valid, data.num_valid, MAX_SOURCES, NONE, "off", "token files to evaluate on"),
	ITEM_KEY(data.valid, path, T_TEXT, 0, 0, NEEDED, NULL, "as in data.train"),
	ITEM_KEY(data.valid, dtype, T_TEXT, 0, 0, 0, "none", "as in data.train", .names = dtype_names),
	KEY(data.blend_from_step, T_INT64, 0, 1e12, NONE, "off", "a run that continues at this step may change data.train"),
	KEY(data.tokenizer, T_TEXT, 0, 0, FIXED | OR_PATH, "none", "what made the token ids: byte, or a tokenizer.json or its directory; none: not "
		"known, taken as they are", .names = tokenizer_names),
	KEY(data.seq_len, T_INT, 1, 1e6, REQUIRED | FIXED, NULL, "tokens of a sequence"),
	KEY(data.shuffle, T_BOOL, 0, 1, FIXED, "true", "mix the order of the sequences"),
	KEY(data.document_mask, T_BOOL, 0, 1, FIXED, "false", "attention and positions begin anew at each document"),
	KEY(data.document_token, T_INT, -1, INT32_MAX, FIXED, "-1", "the id that separates documents where there is no index; -1: none"),

	SECTION("train", 0, "the run"),
	KEY(train.output_dir, T_TEXT, 0, 0, REQUIRED, NULL, "directory of checkpoints and metrics"),
	KEY(train.init_from, T_TEXT, 0, 0, NONE, "off", "Hugging Face directory whose weights the run starts from"),
	KEY(train.seed, T_UINT64, 0, 18446744073709551615.0, FIXED, "1", "of all random numbers"),
	KEY(train.steps, T_INT64, 0, 1e12, NONE, "off", "length of the run in steps; this or train.tokens"),
	KEY(train.tokens, T_INT64, 0, MAX_TOKENS, NONE, "off", "length of the run in tokens; this or train.steps"),
	KEY(train.stop_at_step, T_INT64, 0, 1e12, NONE, "off", "save and stop at this step; run again to continue"),
	KEY(train.micro_batch, T_INT, 1, 1e6, REQUIRED, NULL, "sequences of a forward pass"),
	KEY(train.batch, T_INT, 1, 1e7, REQUIRED, NULL, "sequences of an optimizer step"),
	KEY(train.recompute, T_ENUM, 0, 0, 0, "none", "activations computed again in the backward pass, to save memory",
		.names = recompute_names),
	KEY(train.grad_clip, T_DOUBLE, 0, 1e9, NONE, "1.0", "largest norm of the gradient"),
	SECTION("train.batch_warmup", NONE, "the batch grows from start, by increments, over a number of tokens"),
	KEY(train.batch_warmup.start, T_INT, 1, 1e7, NEEDED, NULL, "first batch"),
	KEY(train.batch_warmup.increment, T_INT, 1, 1e7, NEEDED, NULL, "how much the batch grows at once"),
	KEY(train.batch_warmup.tokens, T_INT64, 1, MAX_TOKENS, NEEDED, NULL, "tokens until the batch is full"),

	SECTION("optimizer", 0, "AdamW"),
	KEY(optimizer.beta1, T_DOUBLE, 0, 1, BELOW, "0.9", "decay of the gradient's mean"),
	KEY(optimizer.beta2, T_DOUBLE, 0, 1, BELOW, "0.95", "decay of the gradient's mean square"),
	KEY(optimizer.eps, T_DOUBLE, 0, 1, ABOVE, "1e-8", "added to the root of the mean square"),
	KEY(optimizer.weight_decay, T_DOUBLE, 0, 100, NONE, "0.1", "decoupled, on matrices and embeddings"),

	SECTION("schedule", 0, "the learning rate: warm-up, peak, drops, decay"),
	KEY(schedule.peak_lr, T_DOUBLE, 0, 100, REQUIRED | ABOVE, NULL, "learning rate between warm-up and decay"),
	KEY(schedule.warmup_steps, T_INT64, 0, 1e12, NONE, "off", "steps from 0 up to peak_lr"),
	LIST(schedule.drops, schedule.num_drops, MAX_LR_DROPS, NONE, "off", "drops of the learning rate"),
	ITEM_KEY(schedule.drops, at, T_DOUBLE, 0, 1, NEEDED, NULL, "share of the run's tokens"),
	ITEM_KEY(schedule.drops, factor, T_DOUBLE, 0, 1000, NEEDED | ABOVE, NULL, "the rate times it"),
	SECTION("schedule.decay", NONE, "the learning rate's way down at the end"),
	KEY(schedule.decay.steps, T_INT64, 0, 1e12, NEEDED | NONE, NULL, "last steps of the run, over which it decays"),
	KEY(schedule.decay.shape, T_ENUM, 0, 0, 0, "1-sqrt", "form of the curve", .names = shape_names),
	KEY(schedule.decay.final_lr, T_DOUBLE, 0, 100, 0, "0", "learning rate at the end"),

	SECTION("checkpoint", 0, "saving"),
	KEY(checkpoint.every, T_INT64, 0, 1e12, NONE, "off", "steps between checkpoints; off: only at the end"),
	KEY(checkpoint.keep, T_INT, 0, 1e9, 0, "2", "newest checkpoints that are kept; 0: all"),

	SECTION("eval", 0, "validation"),
	KEY(eval.every, T_INT64, 0, 1e12, NONE, "off", "steps between evaluations; off: only at the end"),
	KEY(eval.max_windows, T_INT64, 0, 1e12, NONE, "off", "sequences of an evaluation; off: all"),

	SECTION("log", 0, "progress"),
	KEY(log.every, T_INT64, 1, 1e12, 0, "1", "steps between lines"),

	SECTION("parallel", 0, "how the model is divided among ranks"),
	KEY(parallel.tensor, T_INT, 1, 65536, 0, "1", "ranks that split heads and vocabulary"),
	KEY(parallel.expert, T_INT, 1, 65536, 0, "1", "ranks that split the experts"),
};

#define NUM_KEYS ((int)(sizeof keys / sizeof keys[0]))

const struct key root_key = {.name = "", .type = T_SECTION};

const char *leaf_of(const char *path)
{
	const char *dot = strrchr(path, '.');
	return dot ? dot + 1 : path;
}

/* Whether `path` lies directly in `section`. */
static bool is_child(const char *section, const char *path)
{
	size_t n = strlen(section);
	return (size_t)(leaf_of(path) - path) == n + (n > 0) && !strncmp(path, section, n);
}

/* Whether `path` lies in `section` or beneath. */
static bool is_inside(const char *section, const char *path)
{
	size_t n = strlen(section);
	return !n || (!strncmp(path, section, n) && path[n] == '.');
}

const struct table config_table = {keys, NUM_KEYS, NULL};

const struct key *find_in(const struct table *t, const char *path)
{
	for (const struct key *k = t->keys; k < t->keys + t->num_keys; k++)
		if (!strcmp(path, k->name) || (k->alias && !strcmp(path, k->alias)))
			return k;
	return NULL;
}

const struct key *find_key(const char *path)
{
	return find_in(&config_table, path);
}

/* The section or list that a key lies in. */
static const struct key *section_of(const struct key *k)
{
	char path[64];
	snprintf(path, sizeof path, "%.*s", (int)(leaf_of(k->name) - k->name), k->name);
	if (!*path)
		return &root_key;
	path[strlen(path) - 1] = 0;
	return find_key(path);
}

/* Levenshtein distance; words of more than 63 bytes are far from everything. */
static int edit_distance(const char *a, const char *b)
{
	int row[64], n = strlen(b);
	if (n > 63 || strlen(a) > 63)
		return 99;
	for (int j = 0; j <= n; j++)
		row[j] = j;
	for (int i = 0; a[i]; i++) {
		int diagonal = row[0];
		row[0] = i + 1;
		for (int j = 0; j < n; j++) {
			int best = diagonal + (a[i] != b[j]);
			if (row[j] + 1 < best)
				best = row[j] + 1;
			if (row[j + 1] + 1 < best)
				best = row[j + 1] + 1;
			diagonal = row[j + 1];
			row[j + 1] = best;
		}
	}
	return row[n];
}

/* The key that a wrong path most likely means, preferring its own section; NULL when none is near. */
static const struct key *nearest_key(const struct table *t, const char *path)
{
	const char *leaf = leaf_of(path);
	const struct key *best = NULL;
	int best_distance = 2 * ((int)strlen(leaf) / 2 + 1);
	for (const struct key *k = t->keys; k < t->keys + t->num_keys; k++) {
		bool same_section = leaf - path == leaf_of(k->name) - k->name && !strncmp(path, k->name, leaf - path);
		int distance = 2 * edit_distance(leaf, leaf_of(k->name)) + !same_section;
		if (distance < best_distance)
			best = k, best_distance = distance;
	}
	return best;
}

/* The `path` of a list of files, which may stand for an item or, when it is the only one, for the list; NULL for other lists. */
static const struct key *list_path(const struct key *k)
{
	char path[64];
	snprintf(path, sizeof path, "%s.path", k->name);
	return find_key(path);
}

/* An item of a list, in YAML. */
static const char *describe_item(char out[128], const struct key *list)
{
	int n = snprintf(out, 128, "{");
	for (int i = 0; i < NUM_KEYS; i++)
		if (is_child(list->name, keys[i].name))
			n += snprintf(out + n, 128 - n, "%s%s: ...", n > 1 ? ", " : "", leaf_of(keys[i].name));
	snprintf(out + n, 128 - n, "}");
	return out;
}

const char *describe(char out[256], const struct key *k)
{
	char item[128];
	const char *off = k->flags & NONE ? ", or off" : "";
	if (k->names) {
		int n = 0;
		for (int i = 0; k->names[i]; i++)
			n += snprintf(out + n, 256 - n, "%s%s", i ? " | " : "", k->names[i]);
		if (k->flags & OR_PATH)
			snprintf(out + n, 256 - n, " | a path of at most %zu bytes", k->size - 1);
	} else if (k->type == T_SECTION)
		snprintf(out, 256, "a mapping (key: value)%s%s", strcmp(k->name, "model") ? "" : ", or the name of a YAML file or a Hugging Face directory", off);
	else if (k->type == T_LIST)
		snprintf(out, 256, "%sa list of %s%s", list_path(k) ? "a path, or " : "", describe_item(item, k), off);
	else if (k->type == T_BOOL)
		snprintf(out, 256, "true or false");
	else if (k->type == T_TASKS)
		snprintf(out, 256, "a list of tasks, each a mapping (key: value)");
	else if (k->type == T_STRING || k->type == T_STRINGS)
		snprintf(out, 256, "text%s%s", k->type == T_STRINGS ? ", or a list of texts" : "", off);
	else if (k->type == T_TEXT)
		snprintf(out, 256, "a %s of at most %zu bytes%s", k->size == PATH_LEN ? "path" : "name", k->size - 1, off);
	else
		snprintf(out, 256, "a %s, %s %.15g, %s %.15g%s", k->type == T_DOUBLE ? "number" : "whole number",
				k->flags & ABOVE ? "above" : "at least", k->min, k->flags & BELOW ? "below" : "at most", k->max, off);
	return out;
}

void config_print_keys(FILE *out)
{
	char type[256];
	for (const struct key *k = keys; k < keys + NUM_KEYS; k++) {
		if (k->type == T_SECTION) {
			fprintf(out, "\n%s: %s%s\n", k->name, k->help, k->flags & NONE ? "; or off" : "");
			continue;
		}
		const char *standard = k->flags & (REQUIRED | NEEDED) ? "required" : k->fallback;
		fprintf(out, "  %-33s %-12s %s (%s)\n", k->name, standard, k->help, describe(type, k));
	}
}

/* ============================================================================================================
 * Config: values
 * Every value comes as text, from YAML, JSON or the table's defaults, and is converted in one place.
 * ========================================================================================================== */

/* Reads decimal text such as 12, -0.5, 1e-4, 2_000. NULL when it is a number, else what is wrong with it ("" when it is
 * simply none). *whole is its magnitude when it is integral, *is_whole says whether. The program never calls setlocale,
 * so strtod always takes a point. */
static const char *read_number(const char *text, double *number, uint64_t *whole, bool *is_whole)
{
	static const char digit[] = "0123456789";
	char clean[64];
	size_t n = 0;
	for (const char *p = text; *p; p++) {
		if (*p == '_' && p > text && isdigit((unsigned char)p[-1]) && isdigit((unsigned char)p[1]))
			continue;
		if (n == sizeof clean - 1)
			return "";
		clean[n++] = *p;
	}
	clean[n] = 0;

	const char *start = clean + (*clean == '+' || *clean == '-'), *p = start;
	size_t digits = strspn(p, digit);
	if (digits > 1 && *p == '0')
		return "a leading 0 means octal to some readers: drop it";
	p += digits;
	bool plain_digits = !*p;
	if (*p == '.') {
		size_t fraction = strspn(p + 1, digit);
		digits += fraction;
		p += 1 + fraction;
	}
	if (!digits)
		return "";
	if (*p == 'e' || *p == 'E') {
		p++;
		p += *p == '+' || *p == '-';
		size_t exponent = strspn(p, digit);
		if (!exponent)
			return "";
		p += exponent;
	}
	if (*p)
		return "";

	errno = 0;
	*number = strtod(clean, NULL);
	if (errno == ERANGE)
		return "a double cannot hold it";
	if (plain_digits) {
		*whole = strtoull(start, NULL, 10);
		*is_whole = errno != ERANGE;
	} else {
		/* 1e5, 2.5e3: exact as a double up to 2^53 */
		*is_whole = fabs(*number) <= 9007199254740992.0 && floor(*number) == *number;
		*whole = *is_whole ? (uint64_t)fabs(*number) : 0;
	}
	return NULL;
}

/* Whether a plain scalar says that something is switched off. */
static bool is_off(const char *text)
{
	return !strcasecmp(text, "off") || !strcasecmp(text, "null") || !strcmp(text, "~") || !strcasecmp(text, "none");
}

const char *store_text(void *structure, const struct key *k, size_t shift, const char *text, bool plain)
{
	void *field = (char *)structure + k->offset + shift;
	bool off = plain && is_off(text);
	for (int i = 0; k->names; i++) {
		if (!k->names[i] && k->flags & OR_PATH)
			break;
		if (!k->names[i])
			return "";
		if (strcmp(text, k->names[i]))
			continue;
		if (k->type == T_ENUM)
			*(int *)field = i;
		else
			strncpy(field, text, k->size);
		return NULL;
	}

	if (k->type == T_TEXT) {
		if (off && !(k->flags & NONE))
			return "put it in quotes if it is a name";
		if (!*text && (plain || !(k->flags & NONE)))
			return "";
		if (strlen(text) >= k->size)
			return "too long";
		for (const char *p = text; *p; p++)
			if (iscntrl((unsigned char)*p))
				return "a control character";
		strncpy(field, off ? "" : text, k->size); /* fills the rest with zeros */
		return NULL;
	}

	if (k->type == T_STRING) { /* any text, owned */
		free(*(char **)field);
		*(char **)field = off && k->flags & NONE ? NULL : copy_string(text);
		return NULL;
	}

	if (!plain)
		return "take the quotes away";
	if (k->type == T_BOOL) {
		static const char *const words[] = {"false", "true", "off", "on", "no", "yes"};
		for (int i = 0; i < 6; i++)
			if (!strcasecmp(text, words[i])) {
				*(bool *)field = i % 2;
				return NULL;
			}
		return "";
	}

	double number = 0;
	uint64_t whole = 0;
	bool is_whole = true;
	if (off && !(k->flags & NONE))
		return "";
	const char *wrong = off ? NULL : read_number(text, &number, &whole, &is_whole);
	if (wrong)
		return wrong;
	if (number < k->min || number > k->max || (k->flags & ABOVE && number <= k->min) ||
			(k->flags & BELOW && number >= k->max))
		return "out of range";
	if (k->type != T_DOUBLE && !is_whole)
		return "";
	if (k->type == T_INT)
		*(int *)field = number < 0 ? -(int)whole : (int)whole;
	else if (k->type == T_INT64)
		*(int64_t *)field = whole;
	else if (k->type == T_UINT64)
		*(uint64_t *)field = whole;
	else
		*(double *)field = number;
	return NULL;
}

/* The number of items of a list. */
static int *list_count(void *structure, const struct key *k)
{
	return (int *)((char *)structure + k->count);
}

void set_default(void *structure, const struct key *k, bool huggingface)
{
	const char *text = huggingface && k->class_fallback ? k->class_fallback : k->fallback;
	if (k->type == T_SECTION || k->flags & ITEM)
		return;
	memset((char *)structure + k->offset, 0, k->size);
	if (k->type == T_LIST)
		*list_count(structure, k) = 0;
	else if (text)
		store_text(structure, k, 0, text, true);
}

/* ============================================================================================================
 * Config: loading
 * YAML comes as libyaml's events and is stored as it passes: no tree is built, and since only keys of the table are
 * entered, nesting is as deep as the table and no deeper.
 * ========================================================================================================== */

enum { WHOLE_FILE = 0, COMMAND_LINE = -1 };

_Static_assert(NUM_KEYS <= MAX_KEYS, "the places of all keys must fit");

/* fail(), with a place and perhaps a key in front. */
__attribute__((format(printf, 3, 0)))
static int fail_with(struct place at, const char *key, const char *format, va_list args)
{
	char text[3000], shown[64];
	const char *colon = *key ? ": " : "";
	vsnprintf(text, sizeof text, format, args);
	if (at.line > 0)
		return fail("%s:%d: %s%s%s", at.source, at.line, key, colon, text);
	if (at.line == COMMAND_LINE)
		return fail("command line: %s: %s%s%s", printable(shown, at.source), key, colon, text);
	return fail("%s: %s%s%s", at.source, key, colon, text);
}

int fail_at(struct place at, const char *format, ...)
{
	va_list args;
	va_start(args, format);
	int rc = fail_with(at, "", format, args);
	va_end(args);
	return rc;
}

int fail_key(const struct loader *l, const char *name, const char *format, ...)
{
	struct place at = l->places[find_in(l->table, name) - l->table->keys];
	if (!at.source)
		at = (struct place){l->path, WHOLE_FILE};
	va_list args;
	va_start(args, format);
	int rc = fail_with(at, l->huggingface ? leaf_of(name) : name, format, args);
	va_end(args);
	return rc;
}

/* Starts with every key at its default. */
static void loader_init(struct loader *l, struct config *c, const char *path, bool huggingface)
{
	memset(l, 0, sizeof *l);
	memset(c, 0, sizeof *c);
	l->table = &config_table;
	l->structure = l->c = c;
	l->path = l->source = path;
	l->huggingface = huggingface;
	for (int i = 0; i < NUM_KEYS; i++)
		set_default(c, &keys[i], huggingface);
}

struct place here(const struct loader *l)
{
	return (struct place){l->source, l->command_line ? COMMAND_LINE : (int)l->event.start_mark.line + 1};
}

/* Reports an unknown path, with the key that was meant or all keys of its section. */
static int fail_unknown(const struct table *t, struct place at, const char *path)
{
	char shown[64], list[1024] = "";
	const struct key *k = nearest_key(t, path);
	if (k)
		return fail_at(at, "unknown key %s; did you mean %s?", printable(shown, path), k->name);
	char section[128];
	snprintf(section, sizeof section, "%.*s", (int)(leaf_of(path) - path), path);
	if (*section)
		section[strlen(section) - 1] = 0;
	if (*section && !find_in(t, section))
		*section = 0;
	size_t n = 0;
	for (int i = 0; i < t->num_keys; i++)
		if (is_child(section, t->keys[i].name) && n < sizeof list)
			n += snprintf(list + n, sizeof list - n, "%s%s", n ? ", " : "", leaf_of(t->keys[i].name));
	return fail_at(at, "unknown key %s; expected one of %s", printable(shown, path), list);
}

/* Notes where key k is given. Twice is an error, except that the command line may repeat a key of the file. */
static int claim(struct loader *l, const struct key *k, struct place at)
{
	struct place *before = &l->places[k - l->table->keys];
	char shown[64];
	if (before->source && before->line == COMMAND_LINE)
		return fail_at(at, "%s is given twice, first as %s; keep one", k->name, printable(shown, before->source));
	if (before->source == at.source)
		return at.line == WHOLE_FILE ? fail_at(at, "duplicate key %s (or another spelling of it); keep one", k->name) :
				fail_at(at, "duplicate key %s, first given at line %d; keep one", k->name, before->line);
	*before = at;
	return 0;
}

/* Fails when a key that a section needs is missing from it; `at` is the section's place. */
static int check_needed(const struct loader *l, const struct key *section, struct place at)
{
	const struct key *k = l->table->keys;
	for (int i = 0; i < l->table->num_keys; i++)
		if (k[i].flags & NEEDED && is_child(section->name, k[i].name) && !l->places[i].source)
			return fail_at(at, "%s%sthe key %s is missing here: %s", section->name, *section->name ? ": " : "", leaf_of(k[i].name),
					k[i].help);
	return 0;
}

/* Adds an item to the list, and makes it the one that is read: none of its keys is given yet. */
static void begin_item(struct loader *l, const struct key *list)
{
	l->shift = (*list_count(l->c, list))++ * list->item;
	for (int j = 0; j < NUM_KEYS; j++)
		if (is_child(list->name, keys[j].name)) {
			l->places[j] = (struct place){NULL, 0};
			if (keys[j].fallback)
				store_text(l->c, &keys[j], l->shift, keys[j].fallback, true);
		}
}

/* ---------------------------------------------------------------------------------------------------- YAML */

/* Reports libyaml's error. */
static int fail_yaml(struct loader *l)
{
	const yaml_parser_t *p = &l->parser;
	if (p->error == YAML_MEMORY_ERROR)
		return fail_at((struct place){l->source, WHOLE_FILE}, "out of memory while reading YAML");
	size_t line = p->problem_mark.line, at = 0;
	if (p->error == YAML_READER_ERROR) {
		/* bad bytes: libyaml tells the offset only */
		line = 0;
		for (size_t i = 0; i < p->problem_offset && i < l->size; i++)
			line += l->text[i] == '\n';
	}
	for (size_t n = line; n && at < l->size; at++)
		n -= l->text[at] == '\n';
	while (at < l->size && l->text[at] == ' ')
		at++;
	bool tab = at < l->size && l->text[at] == '\t';
	struct place place = {l->source, l->command_line ? COMMAND_LINE : (int)line + 1};
	return fail_at(place, "bad YAML: %s%s%s%s", p->problem ? p->problem : "unknown problem", p->context ? " " : "",
			p->context ? p->context : "", tab ? "; the line is indented with a tab: use spaces" : "");
}

int advance(struct loader *l)
{
	yaml_event_t *e = &l->event;
	yaml_event_delete(e);
	if (!yaml_parser_parse(&l->parser, e))
		return fail_yaml(l);
	char shown[64];
	const yaml_char_t *anchor = NULL, *tag = NULL;
	if (e->type == YAML_ALIAS_EVENT)
		return fail_at(here(l), "found the alias *%s; aliases are not supported: write the value out",
				printable(shown, (const char *)e->data.alias.anchor));
	if (e->type == YAML_SCALAR_EVENT)
		anchor = e->data.scalar.anchor, tag = e->data.scalar.tag;
	else if (e->type == YAML_SEQUENCE_START_EVENT)
		anchor = e->data.sequence_start.anchor, tag = e->data.sequence_start.tag;
	else if (e->type == YAML_MAPPING_START_EVENT)
		anchor = e->data.mapping_start.anchor, tag = e->data.mapping_start.tag;
	if (anchor)
		return fail_at(here(l), "found the anchor &%s; anchors are not supported: remove it",
				printable(shown, (const char *)anchor));
	if (tag)
		return fail_at(here(l), "found the tag %s; tags are not supported: remove it", printable(shown, (const char *)tag));
	if (e->type == YAML_SCALAR_EVENT && memchr(e->data.scalar.value, 0, e->data.scalar.length))
		return fail_at(here(l), "found a NUL character in a value or key; expected text");
	return 0;
}

/* Text of the current event, which must be a scalar. */
static const char *scalar_text(const struct loader *l)
{
	return (const char *)l->event.data.scalar.value;
}

static bool scalar_is_plain(const struct loader *l)
{
	return l->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
}

/* What the current event is, for a message. */
static const char *found(char out[80], const struct loader *l)
{
	char shown[64];
	if (l->event.type == YAML_MAPPING_START_EVENT)
		return "a mapping";
	if (l->event.type == YAML_SEQUENCE_START_EVENT)
		return "a list";
	if (l->event.type != YAML_SCALAR_EVENT || (scalar_is_plain(l) && !*scalar_text(l)))
		return "nothing";
	const char *quote = scalar_is_plain(l) ? "" : "\"";
	snprintf(out, 80, "%s%s%s", quote, printable(shown, scalar_text(l)), quote);
	return out;
}

int fail_value(const struct loader *l, const struct key *k, const char *wrong)
{
	char value[80], type[256];
	return fail_at(here(l), "%s: found %s%s%s%s; expected %s", *k->name ? k->name : "config", found(value, l),
			*wrong ? " (" : "", wrong, *wrong ? ")" : "", describe(type, k));
}

static int load_value(struct loader *l, const struct key *k);

int load_mapping(struct loader *l, const struct key *section)
{
	struct place start = here(l);
	char path[128], value[80];
	while (advance(l) == 0) {
		if (l->event.type == YAML_MAPPING_END_EVENT)
			return check_needed(l, section, start);
		struct place at = here(l);
		if (l->event.type != YAML_SCALAR_EVENT || !*scalar_text(l))
			return fail_at(at, "found %s in place of a key; expected a name", found(value, l));
		if (strchr(scalar_text(l), '.'))
			return fail_at(at, "found the key %s; expected nested sections: a dotted key is for the command line only",
					found(value, l));
		snprintf(path, sizeof path, "%s%s%s", section->name, *section->name ? "." : "", scalar_text(l));
		const struct key *k = find_in(l->table, path);
		if (!k)
			return fail_unknown(l->table, at, path);
		if (claim(l, k, at) < 0 || advance(l) < 0 || load_value(l, k) < 0)
			return -1;
	}
	return -1;
}

/* Reads the items of a list up to the end of its sequence, which has begun. */
static int load_list(struct loader *l, const struct key *k)
{
	while (advance(l) == 0) {
		if (l->event.type == YAML_SEQUENCE_END_EVENT) {
			l->shift = 0;
			return k->flags & REQUIRED && !*list_count(l->c, k) ? fail_at(here(l), "%s: found an empty list; expected an item", k->name) : 0;
		}
		const bool path = l->event.type == YAML_SCALAR_EVENT && list_path(k);
		if (l->event.type != YAML_MAPPING_START_EVENT && !path)
			return fail_value(l, k, "as an item");
		if (*list_count(l->c, k) == k->max)
			return fail_at(here(l), "%s: found more than %g items; expected at most that", k->name, k->max);
		begin_item(l, k);
		if (path ? load_value(l, list_path(k)) < 0 : load_mapping(l, k) < 0)
			return -1;
	}
	return -1;
}

/* Reads the texts of a T_STRINGS up to the end of its sequence, which has begun; or one text, which is not a list. */
static int load_strings(struct loader *l, const struct key *k)
{
	struct strings *s = (struct strings *)((char *)l->structure + k->offset);
	size_t capacity = 0;
	s->list = l->event.type == YAML_SEQUENCE_START_EVENT;
	while (!s->list || advance(l) == 0) {
		if (l->event.type == YAML_SEQUENCE_END_EVENT)
			return s->count ? 0 : fail_at(here(l), "%s: found an empty list; expected at least one text", k->name);
		if (l->event.type != YAML_SCALAR_EVENT || !*scalar_text(l))
			return fail_value(l, k, "");
		s->text = grow(s->text, s->count, &capacity, 1, sizeof *s->text);
		s->text[s->count++] = copy_string(scalar_text(l));
		if (!s->list)
			return 0;
	}
	return -1;
}

static int load_model_file(struct loader *l, const char *name);
static int load_config_json(struct loader *l);

/* Reads the value of key k, which begins at the current event. */
static int load_value(struct loader *l, const struct key *k)
{
	bool scalar = l->event.type == YAML_SCALAR_EVENT;
	bool off = scalar && k->flags & NONE && scalar_is_plain(l) && is_off(scalar_text(l));
	const char *wrong = "";
	if (k->type == T_SECTION) {
		if (l->event.type == YAML_MAPPING_START_EVENT)
			return load_mapping(l, k);
		if (off)
			return 0;
		if (scalar && *scalar_text(l) && !strcmp(k->name, "model"))
			return load_model_file(l, scalar_text(l));
	} else if (k->type == T_LIST) {
		set_default(l->c, k, false);
		if (l->event.type == YAML_SEQUENCE_START_EVENT)
			return load_list(l, k);
		if (off)
			return 0;
		if (scalar && list_path(k)) {
			begin_item(l, k);
			int rc = load_value(l, list_path(k));
			l->shift = 0;
			return rc;
		}
	} else if (k->type == T_TASKS) {
		if (l->event.type == YAML_SEQUENCE_START_EVENT)
			return l->table->load_items(l);
	} else if (k->type == T_STRINGS) {
		if (off || scalar || l->event.type == YAML_SEQUENCE_START_EVENT)
			return off ? 0 : load_strings(l, k);
	} else if (scalar && !(wrong = store_text(l->structure, k, l->shift, scalar_text(l), scalar_is_plain(l))))
		return 0;
	return fail_value(l, k, wrong);
}

/* Reads one YAML document that holds the value of key k and nothing else. */
static int load_document(struct loader *l, const struct key *k)
{
	if (advance(l) < 0 || advance(l) < 0)
		return -1;
	if (l->event.type == YAML_STREAM_END_EVENT)
		return fail_value(l, k, "");
	if (advance(l) < 0 || load_value(l, k) < 0 || advance(l) < 0 || advance(l) < 0)
		return -1;
	if (l->event.type != YAML_STREAM_END_EVENT)
		return fail_at(here(l), "found a second YAML document; expected one: remove it");
	return 0;
}

/* Reads the value of key k from YAML text. */
static int load_text(struct loader *l, const struct key *k, const uint8_t *text, size_t size)
{
	if (!yaml_parser_initialize(&l->parser))
		return fail("%s: out of memory while reading YAML", l->source);
	l->text = text, l->size = size;
	yaml_parser_set_input_string(&l->parser, text, size);
	int rc = load_document(l, k);
	yaml_event_delete(&l->event);
	yaml_parser_delete(&l->parser);
	return rc;
}

int load_file(struct loader *l, const struct key *k)
{
	const uint8_t *data;
	size_t size;
	if (map_file(l->path, &data, &size) < 0)
		return -1;
	int rc;
	if (!size)
		rc = fail("%s: the file is empty; expected YAML", l->path);
	else if (size > 1 << 20)
		rc = fail("%s: found %zu bytes; expected YAML of at most 1 MiB", l->path, size);
	else
		rc = load_text(l, k, data, size);
	unmap_file(data, size);
	return rc;
}

/* Takes the model section of the YAML file that `model:` names: beside the config, in configs/, or as the path is. */
static int load_model_file(struct loader *l, const char *name)
{
	struct place at = here(l);
	char shown[64], beside[PATH_LEN];
	if (l->is_model_file)
		return fail_at(at, "model: found the file name %s; expected a mapping, since this file is itself named by a config",
				printable(shown, name));
	const char *slash = strrchr(l->path, '/');
	if (snprintf(beside, PATH_LEN, "%.*s", slash ? (int)(slash - l->path) : 1, slash ? l->path : ".") >= PATH_LEN)
		return fail("%s: path longer than %d bytes", l->path, PATH_LEN - 1);
	const char *const directories[] = {beside, "configs", "."};
	bool is_found = false;
	for (int i = 0; i < 3 && !is_found; i++) {
		if (path_join(l->model_path, *name == '/' ? "" : directories[i], name) < 0)
			return -1;
		is_found = access(l->model_path, F_OK) == 0;
	}
	if (!is_found)
		return fail_at(at, "model: there is no file %s in %s or configs; expected a mapping, or the name of a YAML file or of a Hugging Face directory",
				printable(shown, name), beside);

	struct stat st;
	const bool huggingface = stat(l->model_path, &st) == 0 && S_ISDIR(st.st_mode);
	if (huggingface) {
		char path[PATH_LEN];
		if (path_join(path, l->model_path, "config.json") < 0)
			return -1;
		strcpy(l->model_path, path);
	}
	struct config other;
	struct loader inner;
	loader_init(&inner, &other, l->model_path, huggingface);
	inner.is_model_file = true;
	if ((huggingface ? load_config_json(&inner) : load_file(&inner, &root_key)) < 0)
		return -1;
	if (!huggingface && !inner.places[find_key("model") - keys].source)
		return fail_at(at, "model: the file %s has no model section; expected one", l->model_path);
	l->c->model = other.model;
	for (int i = 0; i < NUM_KEYS; i++)
		if (is_inside("model", keys[i].name))
			l->places[i] = inner.places[i];
	return 0;
}

/* Applies one key.path=value of the command line. A section given so replaces the file's. */
static int load_override(struct loader *l, const char *argument)
{
	struct place at = {argument, COMMAND_LINE};
	const char *equal = strchr(argument, '=');
	if (!equal || equal == argument)
		return fail_at(at, "expected key.path=value");
	char path[128];
	snprintf(path, sizeof path, "%.*s", (int)(equal - argument < 127 ? equal - argument : 127), argument);
	const struct key *k = find_key(path);
	if (!k)
		return fail_unknown(&config_table, at, path);
	char item[128];
	if (k->flags & ITEM)
		return fail_at(at, "an item of a list cannot be set alone; expected %s=[%s]", section_of(k)->name, describe_item(item, section_of(k)));
	if (k->type == T_SECTION)
		for (int i = 0; i < NUM_KEYS; i++)
			if (is_inside(k->name, keys[i].name)) {
				if (l->places[i].source && l->places[i].line == COMMAND_LINE)
					return claim(l, &keys[i], at);
				set_default(l->c, &keys[i], false);
				l->places[i] = (struct place){NULL, 0};
			}
	if (claim(l, k, at) < 0)
		return -1;
	l->source = argument;
	l->command_line = true;
	return load_text(l, k, (const uint8_t *)equal + 1, strlen(equal + 1));
}

/* ------------------------------------------------------------------------------------------------ checks */

/* Fills in what follows from other keys, then checks what one key alone cannot tell. */
static int check_model(const struct loader *l)
{
	struct model_config *m = &l->c->model;
	if (!m->num_key_value_heads)
		m->num_key_value_heads = m->num_attention_heads;
	if (m->num_attention_heads % m->num_key_value_heads)
		return fail_key(l, "model.num_key_value_heads", "found %d; expected a divisor of num_attention_heads, which is %d",
				m->num_key_value_heads, m->num_attention_heads);
	if (!m->head_dim) {
		if (m->hidden_size % m->num_attention_heads)
			return fail_key(l, "model.num_attention_heads", "found %d, which does not divide hidden_size %d; "
					"expected a divisor, or head_dim given", m->num_attention_heads, m->hidden_size);
		m->head_dim = m->hidden_size / m->num_attention_heads;
		if (m->head_dim > 4096)
			return fail_key(l, "model.hidden_size", "found %d for %d heads, %d a head; expected at most 4096 a head",
					m->hidden_size, m->num_attention_heads, m->head_dim);
	}
	if (m->head_dim % 2)
		return fail_key(l, "model.head_dim", "found %d (hidden_size / num_attention_heads if not given); expected an even "
				"number, for rotary embeddings turn pairs", m->head_dim);
	if (m->first_k_dense_replace > m->num_hidden_layers)
		return fail_key(l, "model.first_k_dense_replace", "found %d; expected at most num_hidden_layers, which is %d",
				m->first_k_dense_replace, m->num_hidden_layers);
	if (m->first_k_dense_replace && !m->intermediate_size)
		return fail_key(l, "model.intermediate_size", "missing or 0; expected the width of the dense layers, since "
				"first_k_dense_replace is %d", m->first_k_dense_replace);

	int expert_layers = m->num_hidden_layers - m->first_k_dense_replace;
	const struct { const char *name; int value; } needed[] = {
		{"model.num_experts", m->num_experts},
		{"model.num_experts_per_tok", m->num_experts_per_tok},
		{"model.moe_intermediate_size", m->moe_intermediate_size},
	};
	for (int i = 0; i < 3 && expert_layers; i++)
		if (!needed[i].value)
			return fail_key(l, needed[i].name, "missing or 0; expected at least 1, since %d layers have experts "
					"(set first_k_dense_replace to num_hidden_layers for a dense model)", expert_layers);
	if (m->num_experts_per_tok > m->num_experts)
		return fail_key(l, "model.num_experts_per_tok", "found %d; expected at most num_experts, which is %d",
				m->num_experts_per_tok, m->num_experts);

	const int widest = INT_MAX / 8; /* two such rows side by side, and BLAS counts in int */
	double shared = (double)m->num_shared_experts * m->moe_intermediate_size;
	if (shared > widest)
		return fail_key(l, "model.num_shared_experts", "found %d with moe_intermediate_size %d, together %.0f; expected "
				"num_shared_experts * moe_intermediate_size to be at most %d", m->num_shared_experts, m->moe_intermediate_size,
				shared, widest);

	double attention = 2.0 * m->hidden_size * m->head_dim * (m->num_attention_heads + m->num_key_value_heads);
	double dense = 3.0 * m->hidden_size * m->intermediate_size;
	double experts = 3.0 * m->hidden_size * m->moe_intermediate_size * (m->num_experts + m->num_shared_experts);
	double total = 2.0 * m->vocab_size * m->hidden_size + attention * m->num_hidden_layers +
			dense * m->first_k_dense_replace + experts * expert_layers;
	if (total > 1e15)
		return fail_key(l, "model.hidden_size", "the sizes make a model of %.3g parameters; expected at most 1e15", total);
	return 0;
}

/* Checks the other sections against the model and each other. What model_only let be missing is 0 and passes. */
static int check_run(const struct loader *l, bool model_only)
{
	const struct config *c = l->c;
	const struct model_config *m = &c->model;
	if (c->data.seq_len > m->max_position_embeddings)
		return fail_key(l, "data.seq_len", "found %d; expected at most model.max_position_embeddings, which is %d",
				c->data.seq_len, m->max_position_embeddings);
	if (!strcmp(c->data.tokenizer, "byte") && m->vocab_size < 257)
		return fail_key(l, "model.vocab_size", "found %d; expected at least 257 for data.tokenizer byte (256 bytes and an "
				"end of document)", m->vocab_size);
	if (c->train.steps && c->train.tokens)
		return fail_key(l, "train.tokens", "found %" PRId64 " beside train.steps %" PRId64 "; expected one of them: set "
				"the other to off", c->train.tokens, c->train.steps);
	if (!c->train.steps && !c->train.tokens && !model_only)
		return fail_key(l, "train.steps", "missing or 0; expected the length of the run in train.steps or train.tokens");
	const int room = PATH_LEN - (int)sizeof "/.tmp-step-0000000000000000000/optimizer-00001-of-00001.safetensors";
	if (strlen(c->train.output_dir) > (size_t)room)
		return fail_key(l, "train.output_dir", "found a path of %zu bytes; expected at most %d, for the paths of "
				"checkpoints inside it must fit too", strlen(c->train.output_dir), room);
	double weights = 0;
	for (int i = 0; i < c->data.num_train; i++)
		weights += c->data.train[i].weight;
	if (c->data.num_train && !(weights > 0))
		return fail_key(l, "data.train", "all weights are 0; expected one above 0");
	double tokens = (double)c->train.steps * c->train.batch * c->data.seq_len;
	if (tokens > MAX_TOKENS)
		return fail_key(l, "train.steps", "steps * batch * seq_len make %.3g tokens; expected at most %g", tokens,
				MAX_TOKENS);
	int k = m->num_experts_per_tok ? m->num_experts_per_tok : 1;
	double rows = (double)c->train.micro_batch * c->data.seq_len * k;
	if (rows > INT_MAX)
		return fail_key(l, "train.micro_batch", "micro_batch * seq_len * num_experts_per_tok make %.0f rows in a forward "
				"pass; expected at most %d", rows, INT_MAX);

	if (c->train.batch_warmup.start > c->train.batch && c->train.batch)
		return fail_key(l, "train.batch_warmup.start", "found %d; expected at most train.batch, which is %d",
				c->train.batch_warmup.start, c->train.batch);

	for (int i = 1; i < c->schedule.num_drops; i++)
		if (c->schedule.drops[i].at <= c->schedule.drops[i - 1].at)
			return fail_key(l, "schedule.drops", "found at: %g after at: %g; expected them to increase",
					c->schedule.drops[i].at, c->schedule.drops[i - 1].at);
	if (c->schedule.decay.shape == DECAY_INVERSE_SQRT && c->schedule.decay.final_lr <= 0)
		return fail_key(l, "schedule.decay.final_lr", "missing or 0; expected above 0 for shape inverse_sqrt");
	return 0;
}

/* Fails when a required key is missing, or one that an optional section needs of which another key is given. */
static int check_required(const struct loader *l, bool model_only)
{
	for (int i = 0; i < NUM_KEYS; i++) {
		char type[256];
		const struct key *k = &keys[i];
		if (k->flags & REQUIRED && !l->places[i].source && !(model_only && !is_inside("model", k->name)))
			return fail_key(l, k->name, "the key is missing: %s; expected %s", k->help, describe(type, k));
		const struct key *section = section_of(k);
		if (section->type == T_SECTION && section->flags & NONE && l->places[i].source &&
				check_needed(l, section, l->places[i]) < 0)
			return -1;
	}
	return 0;
}

int config_load(struct config *c, const char *path, int num_overrides, char **overrides, bool model_only)
{
	struct loader l;
	loader_init(&l, c, path, false);
	if (load_file(&l, &root_key) < 0)
		return -1;
	for (int i = 0; i < num_overrides; i++)
		if (load_override(&l, overrides[i]) < 0)
			return -1;
	if (check_required(&l, model_only) < 0 || check_model(&l) < 0)
		return -1;
	return check_run(&l, model_only);
}

/* ============================================================================================================
 * Config: JSON, for checkpoints and Hugging Face
 * ========================================================================================================== */

json_t *key_to_json(const struct config *c, const struct key *k, size_t shift)
{
	const void *field = (const char *)c + k->offset + shift;
	char digits[24];
	json_t *out;
	switch (k->type) {
	case T_SECTION:
		out = json_object();
		for (int i = 0; i < NUM_KEYS; i++)
			if (is_child(k->name, keys[i].name))
				json_object_set_new(out, leaf_of(keys[i].name), key_to_json(c, &keys[i], shift));
		return out;
	case T_LIST: {
		struct key item = {.name = k->name, .type = T_SECTION};
		out = json_array();
		for (int i = 0; i < *list_count((struct config *)c, k); i++)
			json_array_append_new(out, key_to_json(c, &item, i * k->item));
		return out;
	}
	case T_INT: return json_integer(*(const int *)field);
	case T_INT64: return json_integer(*(const int64_t *)field);
	case T_UINT64:
		if (*(const uint64_t *)field <= INT64_MAX)
			return json_integer(*(const uint64_t *)field);
		snprintf(digits, sizeof digits, "%" PRIu64, *(const uint64_t *)field); /* JSON's integers end at 2^63 */
		return json_string(digits);
	case T_DOUBLE: return json_real(*(const double *)field);
	case T_BOOL: return json_boolean(*(const bool *)field);
	case T_TEXT: return json_string(field);
	case T_ENUM: return json_string(k->names[*(const int *)field]);
	default: break; /* of task files */
	}
	return NULL;
}

json_t *config_to_json(const struct config *c)
{
	return key_to_json(c, &root_key, 0);
}

uint32_t config_crc32(const struct config *c)
{
	json_t *json = config_to_json(c);
	char *text = json_dumps(json, JSON_SORT_KEYS);
	const uint32_t crc = text ? crc32(0, (const uint8_t *)text, strlen(text)) : 0;
	free(text);
	json_decref(json);
	return crc;
}

/* Reports a JSON value that key `name` cannot take. */
static int fail_json(const struct loader *l, const char *name, const json_t *value, const char *wrong,
		const char *expected)
{
	char shown[64];
	char *text = json_text(value, JSON_ENCODE_ANY | JSON_COMPACT);
	fail("%s: %s: found %s%s%s%s; expected %s", l->path, name, printable(shown, text), *wrong ? " (" : "", wrong,
			*wrong ? ")" : "", expected);
	free(text);
	return -1;
}

/* Stores the JSON value of key k of the model: a whole number, a number, or true and false; null stands for off. */
static int load_json(struct loader *l, const struct key *k, const json_t *value)
{
	char number[64], type[256];
	const char *text = number, *wrong = "";
	bool fits = json_is_null(value) ? k->flags & NONE : k->type == T_BOOL ? json_is_boolean(value)
		: k->type == T_INT ? json_is_integer(value) : json_is_number(value);
	if (json_is_integer(value))
		snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
	else if (json_is_real(value))
		snprintf(number, sizeof number, "%.17g", json_real_value(value));
	else
		text = json_is_true(value) ? "true" : json_is_false(value) ? "false" : "off";
	if (fits && !(wrong = store_text(l->c, k, 0, text, true)))
		return 0;
	return fail_json(l, leaf_of(k->name), value, wrong, describe(type, k));
}

/* Stores the members of a Hugging Face config.json that are keys of the model. */
static int load_huggingface(struct loader *l, const json_t *object)
{
	const char *name;
	json_t *value;
	json_object_foreach((json_t *)object, name, value) {
		char path[128];
		snprintf(path, sizeof path, "model.%s", name);
		const struct key *k = strchr(name, '.') ? NULL : find_key(path);
		if (k && k->type != T_SECTION &&
				(claim(l, k, (struct place){l->path, WHOLE_FILE}) < 0 || load_json(l, k, value) < 0))
			return -1;
	}
	return 0;
}

/* Keys of a Hugging Face config.json that change the mathematics in a way this program does not know, and the values,
 * as JSON, under which they do not. null always passes. */
static const struct { const char *name, *values[3]; } foreign_keys[] = {
	{"model_type", {"\"bailing_moe\""}},
	{"architectures", {"[\"BailingMoeForCausalLM\"]"}},
	{"hidden_act", {"\"silu\""}},
	{"rope_scaling", {"null"}},
	{"rope_parameters", {"null"}},
	{"partial_rotary_factor", {"1.0", "1"}},
	{"use_sliding_window", {"false"}},
	{"use_qk_norm", {"false"}},
	{"use_qkv_norm", {"false"}},
	{"norm_softmax", {"false"}},
	{"score_function", {"\"softmax\""}},
	{"n_group", {"1", "0"}},
	{"topk_group", {"1", "0"}},
	{"routed_scaling_factor", {"1.0", "1"}},
	{"moe_router_enable_expert_bias", {"false"}},
};

/* Fails when one of the keys above has another value. */
static int check_foreign_keys(const struct loader *l, const json_t *root)
{
	for (size_t i = 0; i < sizeof foreign_keys / sizeof foreign_keys[0]; i++) {
		const json_t *value = json_object_get(root, foreign_keys[i].name);
		if (!value || json_is_null(value))
			continue;
		char *text = json_text(value, JSON_ENCODE_ANY | JSON_COMPACT);
		bool ok = false;
		for (int j = 0; j < 3 && foreign_keys[i].values[j]; j++)
			ok = ok || !strcmp(text, foreign_keys[i].values[j]);
		free(text);
		if (!ok)
			return fail_json(l, foreign_keys[i].name, value, "not supported: it changes the model's mathematics",
					foreign_keys[i].values[0]);
	}
	return 0;
}

/* Reads the Hugging Face config.json that is the loader's file. */
static int load_config_json(struct loader *l)
{
	json_t *root = json_read(l->path);
	int rc = !root || check_foreign_keys(l, root) < 0 ? -1 : load_huggingface(l, root);
	json_decref(root);
	return rc;
}

/* Checks the model section that a loader has read, and gives it. */
static int finish_model(const struct loader *l, struct model_config *m)
{
	if (check_required(l, true) < 0 || check_model(l) < 0)
		return -1;
	*m = l->c->model;
	return 0;
}

int config_from_json(struct model_config *m, const json_t *root, const char *path)
{
	struct config c;
	struct loader l;
	loader_init(&l, &c, path, true);
	return load_huggingface(&l, root) < 0 ? -1 : finish_model(&l, m);
}

int config_from_huggingface(struct model_config *m, const char *dir)
{
	char path[PATH_LEN];
	struct config c;
	struct loader l;
	if (path_join(path, dir, "config.json") < 0)
		return -1;
	loader_init(&l, &c, path, true);
	return load_config_json(&l) < 0 ? -1 : finish_model(&l, m);
}

/* The model's keys, less what only training knows. The caller owns them. */
static json_t *model_to_json(const struct model_config *m)
{
	struct config c = {.model = *m};
	json_t *model = key_to_json(&c, find_key("model"), 0);
	json_object_del(model, "router");
	return model;
}

int config_write(const char *path, const struct model_config *m, const char *dtype, const json_t *base)
{
	json_t *root = json_pack("{s:[s], s:s, s:s}", "architectures", "BailingMoeForCausalLM", "model_type", "bailing_moe", "hidden_act", "silu");
	if (base)
		json_object_update(root, (json_t *)base);
	else
		json_object_update_new(root, json_pack("{s:n, s:b, s:b, s:f, s:f, s:f}", "rope_scaling", "use_sliding_window", 0, "use_cache", 1,
				"attention_dropout", 0.0, "embedding_dropout", 0.0, "output_dropout", 0.0));
	for (const struct key *k = keys; k < keys + NUM_KEYS; k++) /* other spellings of what follows */
		if (k->alias)
			json_object_del(root, leaf_of(k->alias));
	json_object_set_new(root, json_object_get(root, "dtype") ? "dtype" : "torch_dtype", json_string(dtype));
	json_object_update_new(root, model_to_json(m));
	int rc = json_write(path, root);
	json_decref(root);
	return rc;
}

int config_to_huggingface(const struct model_config *m, const char *path)
{
	return config_write(path, m, "float32", NULL);
}

/* A value of a key, for a message; the caller frees it. */
static char *value_text(const json_t *value)
{
	return json_text(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15));
}

json_t *run_to_json(const struct config *c)
{
	return c->data.seq_len ? config_to_json(c) : json_pack("{s:o}", "model", model_to_json(&c->model));
}

int config_compare(const json_t *saved, const struct config *asked, const char *where, FILE *notes)
{
	int rc = 0;
	char shown[64], path[128];
	const bool model_alone = json_object_size(saved) == 1 && json_object_get(saved, "model");
	for (int i = -1; i < NUM_KEYS && !rc; i++) {
		const struct key *k = i < 0 ? &root_key : &keys[i];
		const json_t *before = json_at(saved, k->name);
		if (k->flags & ITEM || (model_alone && (!is_inside("model", k->name) || is_inside("model.router", k->name))))
			continue;
		if (k->type == T_SECTION) {
			const char *name;
			json_t *value;
			json_object_foreach((json_t *)before, name, value) {
				snprintf(path, sizeof path, "%s%s%s", k->name, *k->name ? "." : "", name);
				if (!find_key(path))
					fprintf(notes, "%s: in the checkpoint only, and not known\n", printable(shown, path));
			}
			continue;
		}
		json_t *now = key_to_json(asked, k, 0);
		char *old = before ? value_text(before) : NULL, *new = value_text(now);
		if (!before)
			fprintf(notes, "%s: not in the checkpoint -> %s\n", k->name, new);
		else if (!json_equal(before, now) && k->flags & FIXED)
			rc = fail("%s: %s was %s in the checkpoint, found %s; expected the same, for it would be another run: set it "
					"back, or choose a new train.output_dir", where, k->name, old, new);
		else if (!json_equal(before, now))
			fprintf(notes, "%s: %s -> %s\n", k->name, old, new);
		free(old);
		free(new);
		json_decref(now);
	}
	return rc;
}

int config_check_init(const struct model_config *theirs, const struct model_config *asked, const char *dir)
{
	struct config a = {.model = *theirs}, b = {.model = *asked};
	int rc = 0;
	for (const struct key *k = keys; k < keys + NUM_KEYS && !rc; k++) {
		/* The numbers of layers come before what only some kinds of layers have. */
		if (!is_inside("model", k->name) || !(k->flags & FIXED) || k->flags & FREE ||
				(k->flags & DENSE && !asked->first_k_dense_replace) ||
				(k->flags & ROUTED && asked->first_k_dense_replace == asked->num_hidden_layers))
			continue;
		json_t *x = key_to_json(&a, k, 0), *y = key_to_json(&b, k, 0);
		if (!json_equal(x, y)) {
			char *is = value_text(x), *wanted = value_text(y);
			rc = fail("%s/config.json: %s is %s, the config asks for %s; expected the same, for these weights would make "
					"another model: set it to %s, or choose another train.init_from", dir, k->name, is, wanted, is);
			free(is);
			free(wanted);
		}
		json_decref(x);
		json_decref(y);
	}
	return rc;
}
