/*
 * files/config_keys.c - tables of keys: structures whose fields a user sets in YAML or on the command line.
 */
#define _GNU_SOURCE
#include "files/config_keys.h"

#include "files/base.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <yaml.h>

/* ------------------------------------------------------------------------------------------------- the table */

static const struct key whole_key = {.name = "", .type = T_SECTION};

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

bool is_inside(const char *section, const char *path)
{
	size_t n = strlen(section);
	return !n || (!strncmp(path, section, n) && path[n] == '.');
}

const struct key *find_key(const struct key_table *t, const char *path)
{
	if (!*path)
		return &whole_key;
	for (const struct key *k = t->keys; k < t->keys + t->num_keys; k++)
		if (!strcmp(path, k->name) || (k->alias && !strcmp(path, k->alias)))
			return k;
	return NULL;
}

/* The section or list that a key lies in. */
static const struct key *section_of(const struct key_table *t, const struct key *k)
{
	char path[64];
	snprintf(path, sizeof path, "%.*s", (int)(leaf_of(k->name) - k->name), k->name);
	if (*path)
		path[strlen(path) - 1] = 0;
	return find_key(t, path);
}

/* The key that a wrong path most likely means, preferring its own section; NULL when none is near. */
static const struct key *nearest_key(const struct key_table *t, const char *path)
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

/* The key of a list's items whose value may stand for the item; NULL when there is none. */
static const struct key *item_itself(const struct key_table *t, const struct key *list)
{
	for (const struct key *k = t->keys; k < t->keys + t->num_keys; k++)
		if (k->flags & ITSELF && is_child(list->name, k->name))
			return k;
	return NULL;
}

/* An item of a list, in YAML. */
static const char *describe_item(char out[128], const struct key_table *t, const struct key *list)
{
	int n = snprintf(out, 128, "{");
	for (const struct key *k = t->keys; k < t->keys + t->num_keys; k++)
		if (is_child(list->name, k->name))
			n += snprintf(out + n, 128 - n, "%s%s: ...", n > 1 ? ", " : "", leaf_of(k->name));
	snprintf(out + n, 128 - n, "}");
	return out;
}

const char *describe_key(char out[256], const struct key_table *t, const struct key *k)
{
	char item[128];
	const struct key *itself;
	const char *off = k->flags & AUTO ? k->flags & NONE ? ", or off, or auto" : ", or auto"
			: k->flags & NONE ? ", or off" : "";
	if (k->names) {
		int n = 0;
		for (int i = 0; k->names[i]; i++)
			n += snprintf(out + n, 256 - n, "%s%s", i ? " | " : "", k->names[i]);
		if (k->flags & OR_PATH)
			snprintf(out + n, 256 - n, " | a path of at most %zu bytes", k->size - 1);
		return out;
	}
	switch (k->type) {
	case T_SECTION:
		snprintf(out, 256, "a mapping (key: value)%s%s%s", k->or_name ? ", or " : "",
				k->or_name ? k->or_name : "", off);
		break;
	case T_LIST:
		itself = item_itself(t, k);
		snprintf(out, 256, "%s%s%sa list of %s%s%s", itself ? "a " : "", itself ? leaf_of(itself->name) : "",
				itself ? ", or " : "", describe_item(item, t, k), k->group ? ", or a mapping of names to such" : "",
				off);
		break;
	case T_BOOL:
		snprintf(out, 256, "true or false");
		break;
	case T_STRING:
		snprintf(out, 256, "text%s", off);
		break;
	case T_STRINGS:
		snprintf(out, 256, "text, or a list of texts%s", off);
		break;
	case T_TEXT:
		snprintf(out, 256, "a %s of at most %zu bytes%s", k->flags & ANY_TEXT ? "text"
				: k->size == PATH_LEN ? "path" : "name", k->size - 1, off);
		break;
	default:
		snprintf(out, 256, "a %s, %s %.15g, %s %.15g%s", k->type == T_DOUBLE ? "number" : "whole number",
				k->flags & ABOVE ? "above" : "at least", k->min, k->flags & BELOW ? "below" : "at most", k->max, off);
	}
	return out;
}

/* ---------------------------------------------------------------------------------------------------- values
 * Every value comes as text, from YAML, JSON or the table's defaults, and is converted in one place.
 */

/* Reads decimal text such as 12, -0.5, 1e-4, 2_000. NULL when it is a number, else what is wrong with it ("" when it
 * is simply none). *whole is its magnitude when it is integral, *is_whole says whether. The program never calls
 * setlocale, so strtod always takes a point. */
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
		if (!*text && (plain || !(k->flags & (NONE | ANY_TEXT))))
			return "";
		if (strlen(text) >= k->size)
			return "too long";
		if (!off && k->size == PATH_LEN && is_home_path(text))
			return HOME_PATH_HINT;
		for (const char *p = text; *p && !(k->flags & ANY_TEXT); p++)
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

	if (k->flags & AUTO && !strcmp(text, "auto")) {
		*(int64_t *)field = AUTO_VALUE;
		return NULL;
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

void set_default(void *structure, const struct key *k)
{
	if (k->type == T_SECTION || k->flags & ITEM)
		return;
	memset((char *)structure + k->offset, 0, k->size);
	if (k->type == T_LIST)
		*list_count(structure, k) = 0;
	else if (k->fallback)
		store_text(structure, k, 0, k->fallback, true);
}

/* The group of item i of a list that may have groups. */
static char *group_of(const void *structure, const struct key *k, int i)
{
	return (char *)structure + k->group_offset + i * k->item;
}

/* key_to_json, of the item of a list that is `shift` bytes behind the first. */
static json_t *item_to_json(const struct key_table *t, const void *structure, const struct key *k, size_t shift)
{
	const void *field = (const char *)structure + k->offset + shift;
	char digits[24];
	json_t *out;
	switch (k->type) {
	case T_SECTION:
		out = json_object();
		for (int i = 0; i < t->num_keys; i++)
			if (is_child(k->name, t->keys[i].name))
				json_object_set_new(out, leaf_of(t->keys[i].name), item_to_json(t, structure, &t->keys[i], shift));
		return out;
	case T_LIST: {
		const struct key item = {.name = k->name, .type = T_SECTION};
		json_t *groups = json_object();
		out = json_array();
		for (int i = 0; i < *(const int *)((const char *)structure + k->count); i++) {
			const char *name = k->group ? group_of(structure, k, i) : "";
			if (*name && !json_object_get(groups, name))
				json_object_set_new(groups, name, json_array());
			json_array_append_new(*name ? json_object_get(groups, name) : out,
					item_to_json(t, structure, &item, i * k->item));
		}
		if (json_object_size(groups) == 0) {
			json_decref(groups);
			return out;
		}
		json_decref(out);
		return groups;
	}
	case T_INT: return json_integer(*(const int *)field);
	case T_INT64:
		return k->flags & AUTO && *(const int64_t *)field == AUTO_VALUE ? json_string("auto")
				: json_integer(*(const int64_t *)field);
	case T_UINT64:
		if (*(const uint64_t *)field <= INT64_MAX)
			return json_integer(*(const uint64_t *)field);
		snprintf(digits, sizeof digits, "%" PRIu64, *(const uint64_t *)field); /* JSON's integers end at 2^63 */
		return json_string(digits);
	case T_DOUBLE: return json_real(*(const double *)field);
	case T_BOOL: return json_boolean(*(const bool *)field);
	case T_TEXT: return json_cstring(field);
	case T_ENUM: return json_string(k->names[*(const int *)field]);
	case T_STRING: case T_STRINGS: break; /* no table with these has needed it */
	}
	return NULL;
}

json_t *key_to_json(const struct key_table *t, const void *structure, const struct key *k)
{
	return item_to_json(t, structure, k, 0);
}

/* ---------------------------------------------------------------------------------------------------- places */

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

/* Where a key was given. */
static const struct place *place_of(const struct loader *l, const struct key *k)
{
	return &l->places[k - l->table->keys];
}

int fail_key(const struct loader *l, const char *name, const char *format, ...)
{
	struct place at = *place_of(l, find_key(l->table, name));
	if (!at.source)
		at = (struct place){l->path, WHOLE_FILE};
	va_list args;
	va_start(args, format);
	int rc = fail_with(at, l->leaf_names ? leaf_of(name) : name, format, args);
	va_end(args);
	return rc;
}

bool key_given(const struct loader *l, const char *name)
{
	return place_of(l, find_key(l->table, name))->source;
}

int fail_unknown(const struct key_table *t, struct place at, const char *path)
{
	char shown[64], list[1024] = "";
	const struct key *k = nearest_key(t, path);
	if (k)
		return fail_at(at, "unknown key %s; did you mean %s?", printable(shown, path), k->name);
	char section[128];
	snprintf(section, sizeof section, "%.*s", (int)(leaf_of(path) - path), path);
	if (*section)
		section[strlen(section) - 1] = 0;
	if (*section && !find_key(t, section))
		*section = 0;
	size_t n = 0;
	for (int i = 0; i < t->num_keys; i++)
		if (is_child(section, t->keys[i].name) && n < sizeof list)
			n += snprintf(list + n, sizeof list - n, "%s%s", n ? ", " : "", leaf_of(t->keys[i].name));
	return fail_at(at, "unknown key %s; expected one of %s", printable(shown, path), list);
}

int claim_key(struct loader *l, const struct key *k, struct place at)
{
	struct place *before = &l->places[k - l->table->keys];
	if (before->source == at.source)
		return at.line == WHOLE_FILE || at.line == COMMAND_LINE ?
				fail_at(at, "duplicate key %s (or another spelling of it); keep one", k->name) :
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
			return fail_at(at, "%s%sthe key %s is missing here: %s", section->name, *section->name ? ": " : "",
					leaf_of(k[i].name), k[i].help);
	return 0;
}

int check_required(const struct loader *l, const char *section)
{
	for (int i = 0; i < l->table->num_keys; i++) {
		char type[256];
		const struct key *k = &l->table->keys[i];
		if (k->flags & REQUIRED && !l->places[i].source && (!section || is_inside(section, k->name)))
			return fail_key(l, k->name, "the key is missing: %s; expected %s", k->help,
					describe_key(type, l->table, k));
		const struct key *inside = section_of(l->table, k);
		if (inside->type == T_SECTION && inside->flags & NONE && l->places[i].source &&
				check_needed(l, inside, l->places[i]) < 0)
			return -1;
	}
	return 0;
}

/* Sets all fields to their defaults; no key is given. */
static void begin_structure(struct loader *l, void *structure)
{
	l->structure = structure;
	memset(l->places, 0, sizeof l->places);
	for (int i = 0; i < l->table->num_keys; i++)
		set_default(structure, &l->table->keys[i]);
}

void loader_init(struct loader *l, const struct key_table *t, void *structure, const char *path)
{
	*l = (struct loader){.table = t, .path = path};
	begin_structure(l, structure);
}

static struct place here(const struct loader *l);

/* Adds an item to the list, and makes it the one that is read: none of its keys is given yet. group: the name of its
 * group, or "". */
static int begin_item(struct loader *l, const struct key *list, const char *group)
{
	if (*list_count(l->structure, list) == list->max)
		return fail_at(here(l), "%s: found more than %g items; expected at most that", list->name, list->max);
	l->shift = (*list_count(l->structure, list))++ * list->item;
	for (int i = 0; i < l->table->num_keys; i++) {
		const struct key *k = &l->table->keys[i];
		if (!is_child(list->name, k->name))
			continue;
		l->places[i] = (struct place){NULL, 0};
		if (k->fallback)
			store_text(l->structure, k, l->shift, k->fallback, true);
	}
	if (list->line)
		*(int *)((char *)l->structure + list->line + l->shift) = here(l).line;
	if (list->group)
		strcpy(group_of(l->structure, list, *list_count(l->structure, list) - 1), group);
	return 0;
}

/* ------------------------------------------------------------------------------------------------------ YAML
 * YAML comes as libyaml's events and is stored as it passes: no tree is built, and since only keys of the table are
 * entered, nesting is as deep as the table and no deeper.
 */

struct yaml_text {
	const char *source;        /* file name, or the command line's text */
	bool command_line;
	const uint8_t *text;
	size_t size;
	yaml_parser_t parser;
	yaml_event_t event;        /* the current one */
};

/* The place of the current event. */
static struct place here(const struct loader *l)
{
	const struct yaml_text *y = l->text;
	return (struct place){y->source, y->command_line ? COMMAND_LINE : (int)y->event.start_mark.line + 1};
}

/* Reports libyaml's error. */
static int fail_yaml(const struct loader *l)
{
	const struct yaml_text *y = l->text;
	const yaml_parser_t *p = &y->parser;
	if (p->error == YAML_MEMORY_ERROR)
		return fail_at((struct place){y->source, WHOLE_FILE}, "out of memory while reading YAML");
	size_t line = p->problem_mark.line, at = 0;
	if (p->error == YAML_READER_ERROR) {
		/* bad bytes: libyaml tells the offset only */
		line = 0;
		for (size_t i = 0; i < p->problem_offset && i < y->size; i++)
			line += y->text[i] == '\n';
	}
	for (size_t n = line; n && at < y->size; at++)
		n -= y->text[at] == '\n';
	while (at < y->size && y->text[at] == ' ')
		at++;
	bool tab = at < y->size && y->text[at] == '\t';
	struct place place = {y->source, y->command_line ? COMMAND_LINE : (int)line + 1};
	return fail_at(place, "bad YAML: %s%s%s%s", p->problem ? p->problem : "unknown problem", p->context ? " " : "",
			p->context ? p->context : "", tab ? "; the line is indented with a tab: use spaces" : "");
}

/* Goes to the next event. What YAML can do and a table of keys does not need is refused here. */
static int advance(struct loader *l)
{
	yaml_event_t *e = &l->text->event;
	yaml_event_delete(e);
	if (!yaml_parser_parse(&l->text->parser, e))
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
		return fail_at(here(l), "found the tag %s; tags are not supported: remove it",
				printable(shown, (const char *)tag));
	if (e->type == YAML_SCALAR_EVENT && memchr(e->data.scalar.value, 0, e->data.scalar.length))
		return fail_at(here(l), "found a NUL character in a value or key; expected text");
	return 0;
}

/* Text of the current event, which must be a scalar. */
static const char *scalar_text(const struct loader *l)
{
	return (const char *)l->text->event.data.scalar.value;
}

static bool scalar_is_plain(const struct loader *l)
{
	return l->text->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE;
}

/* What the current event is, for a message. */
static const char *found(char out[80], const struct loader *l)
{
	char shown[64];
	if (l->text->event.type == YAML_MAPPING_START_EVENT)
		return "a mapping";
	if (l->text->event.type == YAML_SEQUENCE_START_EVENT)
		return "a list";
	if (l->text->event.type != YAML_SCALAR_EVENT || (scalar_is_plain(l) && !*scalar_text(l)))
		return "nothing";
	const char *quote = scalar_is_plain(l) ? "" : "\"";
	snprintf(out, 80, "%s%s%s", quote, printable(shown, scalar_text(l)), quote);
	return out;
}

/* Reports a value of the wrong kind at the current event: wrong says what is wrong with it, or is "". */
static int fail_value(const struct loader *l, const struct key *k, const char *wrong)
{
	char value[80], type[256];
	return fail_at(here(l), "%s: found %s%s%s%s; expected %s", *k->name ? k->name : l->table->whole, found(value, l),
			*wrong ? " (" : "", wrong, *wrong ? ")" : "", describe_key(type, l->table, k));
}

static int load_value(struct loader *l, const struct key *k);

/* Reads the keys of a section up to the end of its mapping, which has begun. */
static int load_mapping(struct loader *l, const struct key *section)
{
	struct place start = here(l);
	char path[128], value[80];
	while (advance(l) == 0) {
		if (l->text->event.type == YAML_MAPPING_END_EVENT)
			return check_needed(l, section, start);
		struct place at = here(l);
		if (l->text->event.type != YAML_SCALAR_EVENT || !*scalar_text(l))
			return fail_at(at, "found %s in place of a key; expected a name", found(value, l));
		if (strchr(scalar_text(l), '.'))
			return fail_at(at, "found the key %s; expected nested sections: a dotted key is for the command line only",
					found(value, l));
		snprintf(path, sizeof path, "%s%s%s", section->name, *section->name ? "." : "", scalar_text(l));
		const struct key *k = find_key(l->table, path);
		if (!k)
			return fail_unknown(l->table, at, path);
		if (claim_key(l, k, at) < 0 || advance(l) < 0 || load_value(l, k) < 0)
			return -1;
	}
	return -1;
}

/* Reads the items of a list up to the end of its sequence, which has begun. group: the name of theirs; "" in a plain
 * list. */
static int load_list(struct loader *l, const struct key *k, const char *group)
{
	const struct key *itself = item_itself(l->table, k);
	const int before = *list_count(l->structure, k);
	while (advance(l) == 0) {
		if (l->text->event.type == YAML_SEQUENCE_END_EVENT) {
			l->shift = 0;
			return !(k->flags & REQUIRED || *group) || *list_count(l->structure, k) > before ? 0
				: fail_at(here(l), "%s: found an empty list; expected an item", k->name);
		}
		const bool alone = l->text->event.type == YAML_SCALAR_EVENT && itself;
		if (l->text->event.type != YAML_MAPPING_START_EVENT && !alone)
			return fail_value(l, k, "as an item");
		if (begin_item(l, k, group) < 0 || (alone ? load_value(l, itself) : load_mapping(l, k)) < 0)
			return -1;
	}
	return -1;
}

/* Whether the current event may stand for a list of one item. */
static bool is_only_item(const struct loader *l, const struct key *k)
{
	return l->text->event.type == YAML_SCALAR_EVENT ? item_itself(l->table, k) != NULL
		: l->text->event.type == YAML_MAPPING_START_EVENT && k->flags & ONE_ITEM;
}

/* Reads the only item of a list, which begins at the current event. */
static int load_only_item(struct loader *l, const struct key *k, const char *group)
{
	const bool scalar = l->text->event.type == YAML_SCALAR_EVENT;
	const int rc = begin_item(l, k, group) < 0 ? -1 : scalar ? load_value(l, item_itself(l->table, k))
		: load_mapping(l, k);
	l->shift = 0;
	return rc;
}

/* Reads the groups of a list up to the end of the mapping of their names to lists or items, which has begun. */
static int load_groups(struct loader *l, const struct key *k)
{
	char name[MAX_GROUP], value[80], path[128];
	while (advance(l) == 0) {
		const int count = *list_count(l->structure, k);
		if (l->text->event.type == YAML_MAPPING_END_EVENT)
			return count ? 0 : fail_at(here(l), "%s: found an empty mapping; expected a %s", k->name, k->group);
		const char *text = l->text->event.type == YAML_SCALAR_EVENT ? scalar_text(l) : "";
		const size_t n = strspn(text, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-");
		if (!n || text[n] || n >= k->group_size)
			return fail_at(here(l), "%s: found %s in place of the name of a %s; expected at most %zu letters, digits "
					"and any of _ . -", k->name, found(value, l), k->group, k->group_size - 1);
		memcpy(name, text, n + 1);
		snprintf(path, sizeof path, "%s.%s", k->name, name);
		if (find_key(l->table, path))
			return fail_at(here(l), "%s: found the key %s in place of the name of a %s; expected a list around what "
					"has it: [{%s: ...}]", k->name, name, k->group, name);
		for (int i = 0; i < count; i++)
			if (!strcmp(group_of(l->structure, k, i), name))
				return fail_at(here(l), "%s: found the %s %s twice; keep one", k->name, k->group, name);
		if (advance(l) < 0)
			return -1;
		const bool alone = is_only_item(l, k);
		if (!alone && l->text->event.type != YAML_SEQUENCE_START_EVENT)
			return fail_value(l, k, "as a value of the mapping");
		if ((alone ? load_only_item(l, k, name) : load_list(l, k, name)) < 0)
			return -1;
	}
	return -1;
}

/* Reads the texts of a T_STRINGS up to the end of its sequence, which has begun; or one text, which is not a list. */
static int load_strings(struct loader *l, const struct key *k)
{
	struct strings *s = (struct strings *)((char *)l->structure + k->offset);
	size_t capacity = 0;
	s->list = l->text->event.type == YAML_SEQUENCE_START_EVENT;
	while (!s->list || advance(l) == 0) {
		if (l->text->event.type == YAML_SEQUENCE_END_EVENT)
			return s->count ? 0 : fail_at(here(l), "%s: found an empty list; expected at least one text", k->name);
		if (l->text->event.type != YAML_SCALAR_EVENT || !*scalar_text(l))
			return fail_value(l, k, "");
		s->text = grow(s->text, s->count, &capacity, 1, sizeof *s->text);
		s->text[s->count++] = copy_string(scalar_text(l));
		if (!s->list)
			return 0;
	}
	return -1;
}

/* Reads the value of key k, which begins at the current event. */
static int load_value(struct loader *l, const struct key *k)
{
	bool scalar = l->text->event.type == YAML_SCALAR_EVENT;
	bool off = scalar && k->flags & NONE && scalar_is_plain(l) && is_off(scalar_text(l));
	const char *wrong = "";
	if (k->type == T_SECTION) {
		if (l->text->event.type == YAML_MAPPING_START_EVENT)
			return load_mapping(l, k);
		if (off)
			return 0;
		if (scalar && *scalar_text(l) && k->or_name)
			return l->table->load_named(l, k, scalar_text(l), here(l));
	} else if (k->type == T_LIST) {
		set_default(l->structure, k);
		if (l->text->event.type == YAML_SEQUENCE_START_EVENT)
			return load_list(l, k, "");
		if (l->text->event.type == YAML_MAPPING_START_EVENT && k->group)
			return load_groups(l, k);
		if (off)
			return 0;
		if (is_only_item(l, k))
			return load_only_item(l, k, "");
	} else if (k->type == T_STRINGS) {
		if (off || scalar || l->text->event.type == YAML_SEQUENCE_START_EVENT)
			return off ? 0 : load_strings(l, k);
	} else if (scalar && !(wrong = store_text(l->structure, k, l->shift, scalar_text(l), scalar_is_plain(l))))
		return 0;
	return fail_value(l, k, wrong);
}

/* Reports a wrong value in place of a list of items, or of an item. */
static int fail_list(const struct loader *l, const struct list_reader *r, const char *wrong)
{
	char value[80];
	return fail_at(here(l), "%s: found %s%s; expected a list of %s, each a mapping (key: value)", r->items,
			found(value, l), wrong, r->items);
}

/* Reads a list whose items are structures, which begins at the current event. */
static int load_items(struct loader *l, const struct list_reader *r)
{
	if (l->text->event.type != YAML_SEQUENCE_START_EVENT)
		return fail_list(l, r, "");
	bool any = false;
	while (advance(l) == 0) {
		if (l->text->event.type == YAML_SEQUENCE_END_EVENT)
			return any ? 0 : fail_at(here(l), "found an empty list; expected at least one %s", r->item);
		if (l->text->event.type != YAML_MAPPING_START_EVENT)
			return fail_list(l, r, " (as an item)");
		const struct place at = here(l);
		void *added = r->add(r->list);
		begin_structure(l, added);
		if (load_mapping(l, &whole_key) < 0 || r->check(l, r->list, added, at) < 0)
			return -1;
		any = true;
	}
	return -1;
}

/* Reads one YAML document that holds the value of key k, or the list of items that r reads, and nothing else. */
static int load_document(struct loader *l, const struct key *k, const struct list_reader *r)
{
	if (advance(l) < 0 || advance(l) < 0)
		return -1;
	if (l->text->event.type == YAML_STREAM_END_EVENT)
		return r ? fail_list(l, r, "") : fail_value(l, k, "");
	if (advance(l) < 0 || (r ? load_items(l, r) : load_value(l, k)) < 0 || advance(l) < 0 || advance(l) < 0)
		return -1;
	if (l->text->event.type != YAML_STREAM_END_EVENT)
		return fail_at(here(l), "found a second YAML document; expected one: remove it");
	return 0;
}

/* load_document from y->text. */
static int load_text(struct loader *l, struct yaml_text *y, const struct key *k, const struct list_reader *r)
{
	if (!yaml_parser_initialize(&y->parser))
		return fail("%s: out of memory while reading YAML", y->source);
	yaml_parser_set_input_string(&y->parser, y->text, y->size);
	l->text = y;
	const int rc = load_document(l, k, r);
	l->text = NULL;
	yaml_event_delete(&y->event);
	yaml_parser_delete(&y->parser);
	return rc;
}

/* load_document from the file l->path. */
static int load_from_file(struct loader *l, const struct list_reader *r)
{
	struct yaml_text y = {.source = l->path};
	if (map_file(l->path, &y.text, &y.size) < 0)
		return -1;
	int rc;
	if (!y.size)
		rc = fail("%s: the file is empty; expected YAML", l->path);
	else if (y.size > 1 << 20)
		rc = fail("%s: found %zu bytes; expected YAML of at most 1 MiB", l->path, y.size);
	else
		rc = load_text(l, &y, &whole_key, r);
	unmap_file(y.text, y.size);
	return rc;
}

int load_file(struct loader *l)
{
	return load_from_file(l, NULL);
}

int load_list_file(const struct key_table *t, const char *path, const struct list_reader *r)
{
	struct loader l = {.table = t, .path = path};
	return load_from_file(&l, r);
}

int load_override(struct loader *l, const char *argument)
{
	const struct key_table *t = l->table;
	struct place at = {argument, COMMAND_LINE};
	const char *equal = strchr(argument, '=');
	if (!equal || equal == argument)
		return fail_at(at, "expected key.path=value");
	char path[128], item[128];
	snprintf(path, sizeof path, "%.*s", (int)(equal - argument < 127 ? equal - argument : 127), argument);
	const struct key *k = find_key(t, path);
	if (!k)
		return fail_unknown(t, at, path);
	if (k->flags & ITEM)
		return fail_at(at, "an item of a list cannot be set alone; expected %s=[%s]", section_of(t, k)->name,
				describe_item(item, t, section_of(t, k)));
	if (k->type == T_SECTION)
		for (int i = 0; i < t->num_keys; i++)
			if (is_inside(k->name, t->keys[i].name)) {
				set_default(l->structure, &t->keys[i]);
				l->places[i] = (struct place){NULL, 0};
			}
	if (claim_key(l, k, at) < 0)
		return -1;
	struct yaml_text y = {.source = argument, .command_line = true, .text = (const uint8_t *)equal + 1,
			.size = strlen(equal + 1)};
	return load_text(l, &y, k, NULL);
}
