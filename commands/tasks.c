/*
 * commands/tasks.c - the tasks of `ling eval --tasks`: the task file and its samples, the comparison of replies with
 * answers, and the reports.
 */
#define _GNU_SOURCE
#include "commands/tasks.h"

#include "commands/match.h"
#include "files/base.h"
#include "files/config_keys.h"
#include "files/text.h"

#include <ctype.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define TASK_KEY(...) KEY_OF(struct task, __VA_ARGS__)

static const char *const task_types[] = {"multiple_choice", "perplexity", "exact_match", NULL};
static const char *const answer_forms[] = {"index", "number", "letter", "text", "label", NULL};
static const char *const on_null_names[] = {"error", "empty", "skip", NULL};
static const char *const choose_names[] = {"random", "first", NULL};
static const char *const match_names[] = {"first", "last", NULL};

/* Flags of keys that only tasks of these types have. */
enum { OF_CHOICE = OWN_FLAG, OF_PERPLEXITY = OWN_FLAG << 1, OF_MATCH = OWN_FLAG << 2 };

/* A key of a type that is REQUIRED must be given in each task of the type. */
static const struct key task_keys[] = {
	TASK_KEY(name, T_TEXT, 0, 0, NEEDED, NULL, "what the results call it"),
	TASK_KEY(type, T_ENUM, 0, 0, NEEDED, NULL, "how it is scored", .names = task_types),
	TASK_KEY(group, T_TEXT, 0, 0, NONE | OF_CHOICE | OF_MATCH, "off",
		"a name that several tasks share: the results have their means"),
	TASK_KEY(data, T_TEXT, 0, 0, NEEDED, NULL,
		"JSON lines, one sample each, or one JSON array of samples; the path begins at the task file"),
	TASK_KEY(field, T_STRING, 0, 0, NONE, "off", "where data are one JSON object: its field that holds the array"),
	TASK_KEY(limit, T_INT64, 0, 1e12, NONE, "off", "score only this many first samples"),
	TASK_KEY(on_null, T_ENUM, 0, 0, 0, "error",
		"a null in a template: an error, or empty text; or skip: leave the sample out, also for a null answer",
		.names = on_null_names),
	TASK_KEY(text, T_STRING, 0, 0, OF_PERPLEXITY, "{text}", "template of the document"),
	TASK_KEY(stride, T_INT64, 0, 1e9, NONE | OF_PERPLEXITY, "off",
		"tokens that each window after the first scores; off: all of the window"),
	TASK_KEY(prompt, T_STRING, 0, 0, REQUIRED | OF_CHOICE | OF_MATCH, NULL, "template of what the model is given"),
	TASK_KEY(options, T_STRINGS, 0, 0, REQUIRED | OF_CHOICE, NULL,
		"the field that holds the list of options; or a list of templates, one for each"),
	TASK_KEY(option, T_STRING, 0, 0, OF_CHOICE, "{option}", "template of an option, {option} being the field's item"),
	TASK_KEY(answer, T_STRING, 0, 0, REQUIRED | OF_CHOICE | OF_MATCH, NULL,
		"the field that holds the right option; or the right answer, or a list of right ones"),
	TASK_KEY(answer_form, T_ENUM, 0, 0, OF_CHOICE, "index",
		"how it says which: index from 0, number from 1, letter from A, the option's text, or its label",
		.names = answer_forms),
	TASK_KEY(labels, T_STRING, 0, 0, NONE | OF_CHOICE, "off",
		"the field that holds the list of labels; or a template of an option's label, such as {option.label}"),
	TASK_KEY(target, T_STRING, 0, 0, NONE | OF_MATCH, "off",
		"template of the reply in an example; off: the first right answer"),
	TASK_KEY(max_tokens, T_INT, 1, 1e6, OF_MATCH, "256", "longest reply"),
	TASK_KEY(stop, T_STRINGS, 0, 0, NONE | OF_MATCH, "off", "texts at which the reply ends"),
	TASK_KEY(extract, T_STRING, 0, 0, NONE | OF_MATCH, "off",
		"PCRE2 pattern whose group is the reply's answer (of several, the first that is not empty); off: all of it"),
	TASK_KEY(extract_answer, T_STRING, 0, 0, NONE | OF_MATCH, "off", "the same for what the answer's field holds"),
	TASK_KEY(match, T_ENUM, 0, 0, OF_MATCH, "first", "the match of extract that counts", .names = match_names),
	SECTION("normalize", OF_MATCH, "how reply and answers are made plain before they are compared"),
	TASK_KEY(normalize.strip, T_BOOL, 0, 1, 0, "true", "without white space at both ends"),
	TASK_KEY(normalize.lowercase, T_BOOL, 0, 1, 0, "false", "ASCII letters small"),
	TASK_KEY(normalize.punctuation, T_BOOL, 0, 1, 0, "true",
		"with punctuation; false: without ASCII punctuation that is no part of a number"),
	TASK_KEY(normalize.number, T_BOOL, 0, 1, 0, "false", "a number in its plain form: $1,003.50 is 1003.5"),
	TASK_KEY(normalize.ignore, T_STRINGS, 0, 0, NONE, "off", "PCRE2 patterns of text that is left out, first of all"),
	SECTION("examples", NONE | OF_CHOICE | OF_MATCH, "solved samples, or a fixed text, in front of the prompt"),
	TASK_KEY(examples.count, T_INT, 1, 1000, NONE, "off", "how many"),
	TASK_KEY(examples.text, T_STRING, 0, 0, NONE, "off",
		"a text in front of them, or instead, as it is; with chat: the system's message"),
	TASK_KEY(examples.choose, T_ENUM, 0, 0, 0, "random",
		"random: others for each sample; first: the first ones", .names = choose_names),
	TASK_KEY(examples.data, T_TEXT, 0, 0, NONE, "off",
		"data to choose them from, in the form of the task's own; off: these, which is told"),
	TASK_KEY(examples.seed, T_UINT64, 0, 18446744073709551615.0, 0, "1", "of the choice"),
	TASK_KEY(separator, T_STRING, 0, 0, OF_CHOICE | OF_MATCH, "\n\n", "text between examples and before the prompt"),
	TASK_KEY(chat, T_BOOL, 0, 1, OF_CHOICE | OF_MATCH, "false",
		"prompts are a user's messages, targets and replies the assistant's"),
};

enum { NUM_TASK_KEYS = sizeof task_keys / sizeof *task_keys };
static const struct key_table task_table = {.keys = task_keys, .num_keys = NUM_TASK_KEYS, .whole = "task"};
_Static_assert((int)NUM_TASK_KEYS <= (int)MAX_KEYS, "the places of all keys must fit");

/* ------------------------------------------------------------------------------------------------ templates */

/* A part of a template: text as it is, and the name of the field that follows it, or NULL. */
struct template_part { const char *text, *field; size_t text_size, field_size; };

/* Reads the next part of a template: text up to and with a field, or up to a doubled brace, of which one is text.
 * Moves *at past it. False at the end; and where a brace is wrong, which *wrong then says. */
static bool next_part(const char **at, struct template_part *p, const char **wrong)
{
	*p = (struct template_part){.text = *at, .text_size = strcspn(*at, "{}")};
	*at += p->text_size;
	const char brace = **at;
	if (!brace)
		return p->text_size > 0;
	if ((*at)[1] == brace) {
		p->text_size++;
		*at += 2;
		return true;
	}
	const size_t n = brace == '{' ? strcspn(*at + 1, "{}\n") : 0;
	if (!n || (*at)[1 + n] != '}') {
		*wrong = brace == '}' ? "a } without a {; write }} for a } that is text"
				: "a { that begins no {field}; write {{ for a { that is text";
		return false;
	}
	p->field = *at + 1, p->field_size = n;
	*at += n + 2;
	return true;
}

static bool is_ascii_space(char c)
{
	return c == ' ' || (c >= '\t' && c <= '\r');
}

/* The bytes of the white space that n bytes begin with, or 0: what Python's str.strip() takes away. */
static size_t white_space(const char *s, size_t n)
{
	static const char *const spaces[] = {"\xc2\x85", "\xc2\xa0", "\xe1\x9a\x80", "\xe2\x80\xa8", "\xe2\x80\xa9",
		"\xe2\x80\xaf", "\xe2\x81\x9f", "\xe3\x80\x80"};
	if (n && (is_ascii_space(*s) || (*s >= '\x1c' && *s <= '\x1f')))
		return 1;
	if (n >= 3 && !memcmp(s, "\xe2\x80", 2) && (uint8_t)s[2] >= 0x80 && (uint8_t)s[2] <= 0x8a)
		return 3;
	for (size_t i = 0; i < sizeof spaces / sizeof *spaces; i++)
		if (n >= strlen(spaces[i]) && !memcmp(s, spaces[i], strlen(spaces[i])))
			return strlen(spaces[i]);
	return 0;
}

/* Takes the white space at both ends away from what a text has from byte `begin` on. */
static void strip_from(struct text *t, size_t begin)
{
	size_t first = begin, end = begin, length;
	while ((length = white_space(t->data + first, t->size - first)))
		first += length;
	for (size_t i = end = first; i < t->size; i += length ? length : 1)
		if (!(length = white_space(t->data + i, t->size - i)))
			end = i + 1;
	memmove(t->data + begin, t->data + first, end - first);
	t->size = begin + end - first;
	t->data[t->size] = 0;
}

/* What value_append and those that call it return for a null where on_null is skip. */
enum { SKIPPED = 1 };

/* Appends the value of a field, a string, a number, true or false; null as on_null says. Anything else, and a field
 * that is missing (NULL), is an error, which begins with `where` and names the field. Returns 0, SKIPPED or -1. */
static int value_append(const json_t *value, const char *field, size_t n, enum on_null on_null, const char *where,
		struct text *out)
{
	char number[40];
	if (json_is_null(value) && on_null != NULL_ERROR)
		return on_null == NULL_SKIP ? SKIPPED : 0;
	if (json_is_string(value)) {
		text_append(out, json_string_value(value), json_string_length(value));
		return 0;
	}
	if (json_is_integer(value))
		snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
	else if (json_is_real(value)) {
		/* the fewest digits that give the same number */
		for (int digits = 15; digits <= 17; digits++)
			if (snprintf(number, sizeof number, "%.*g", digits, json_real_value(value)),
					strtod(number, NULL) == json_real_value(value))
				break;
	} else if (json_is_boolean(value))
		strcpy(number, json_is_true(value) ? "true" : "false");
	else
		return fail("%s: the field `%.*s` is %s; expected a string, a number, true or false%s", where,
				n < 100 ? (int)n : 100, field, json_kind(value),
				json_is_null(value) ? " (on_null: empty or skip allows null)" : "");
	text_append(out, number, strlen(number));
	return 0;
}

/* Appends a template, which check_template has accepted, with the fields of a sample. With `item`, an entry of the
 * list of options, {option} is the item and {option.x} a field of it. A field with .strip() behind its name is without
 * white space at both ends. Returns 0, SKIPPED or -1. */
static int template_append(const char *template, const json_t *sample, const json_t *item, enum on_null on_null,
		const char *where, struct text *out)
{
	static const char option[] = "option", stripped[] = ".strip()";
	const size_t length = sizeof option - 1, suffix = sizeof stripped - 1;
	const char *wrong;
	for (struct template_part p; next_part(&template, &p, &wrong);) {
		text_append(out, p.text, p.text_size);
		if (!p.field)
			continue;
		const bool strips = p.field_size > suffix && !memcmp(p.field + p.field_size - suffix, stripped, suffix);
		const size_t begin = out->size;
		p.field_size -= strips ? suffix : 0;
		const json_t *value;
		const bool of_item = item && p.field_size >= length && !memcmp(p.field, option, length) &&
				(p.field_size == length || p.field[length] == '.');
		if (!of_item)
			value = json_at_part(sample, p.field, p.field_size);
		else if (p.field_size == length)
			value = item;
		else
			value = json_at_part(item, p.field + length + 1, p.field_size - length - 1);
		const int rc = value_append(value, p.field, p.field_size, on_null, where, out);
		if (rc != 0)
			return rc;
		if (strips && out->data)
			strip_from(out, begin);
	}
	return 0;
}

/* -------------------------------------------------------------------------------------------------- replies */

/* Where a text without the white space at both ends begins and ends. */
static void strip(const struct text *t, size_t *begin, size_t *end)
{
	*begin = 0, *end = t->size;
	while (*begin < *end && is_ascii_space(t->data[*begin]))
		++*begin;
	while (*end > *begin && is_ascii_space(t->data[*end - 1]))
		--*end;
}

/* Normalizes a text in place, as the keys under normalize say: what is to be ignored, punctuation, letters, white space
 * at the ends. What is a number before or after that is only put into its plain form. */
static void normalize(const struct task *t, struct text *text)
{
	for (int64_t i = 0; i < t->normalize.ignore.count; i++)
		pattern_remove(t->normalize.ignore.text[i], text);
	if (t->normalize.number && plain_number(text))
		return;
	if (!t->normalize.punctuation)
		remove_punctuation(text);
	for (size_t i = 0; i < text->size && t->normalize.lowercase; i++)
		text->data[i] = (char)tolower((uint8_t)text->data[i]);
	size_t begin = 0, n = text->size;
	if (t->normalize.strip)
		strip(text, &begin, &n);
	if (text->data) {
		memmove(text->data, text->data + begin, n - begin);
		text->data[n - begin] = 0;
	}
	text->size = n - begin;
	if (t->normalize.number)
		plain_number(text);
}

bool task_reply_is_right(const struct task *t, const struct sample *s, const struct text *reply,
		struct text *extracted, bool *matched)
{
	*matched = true;
	if (t->extract)
		*matched = pattern_extract(t->extract, t->match == MATCH_LAST, reply, extracted);
	else
		text_append(extracted, reply->data, reply->size);
	normalize(t, extracted);
	for (int i = 0; *matched && i < s->num_choices; i++)
		if (s->choice[i].size == extracted->size && !memcmp(s->choice[i].data, extracted->data, extracted->size))
			return true;
	return false;
}

/* ------------------------------------------------------------------------------------------- the task file */

/* Fails when the value of a key is not a template. NULL is fine. */
static int check_template(const struct loader *l, const char *key, const char *template)
{
	const char *wrong = NULL;
	struct template_part p;
	if (!template)
		return 0;
	while (next_part(&template, &p, &wrong))
		continue;
	return wrong ? fail_key(l, key, "found %s", wrong) : 0;
}

/* Fails when the value of a key is not a pattern, with a group if `group`. NULL is fine. */
static int check_pattern(const struct loader *l, const char *key, const char *pattern, bool group)
{
	char wrong[160];
	if (pattern && !pattern_check(pattern, group, wrong))
		return fail_key(l, key, "found a pattern %s", wrong);
	return 0;
}

/* Makes a path of the task file, which begins at the folder of that file, begin where ling was started. */
static int task_path(const struct loader *l, char path[PATH_LEN])
{
	char dir[PATH_LEN], name[PATH_LEN];
	if (!*path || *path == '/')
		return 0;
	parent_of(dir, l->path);
	memcpy(name, path, PATH_LEN);
	return !strcmp(dir, ".") ? 0 : path_join(path, dir, name);
}

/* Checks what one key alone cannot tell of a task that begins at `start`. */
static int check_task(const struct loader *l, struct task *t, struct place start)
{
	static const int flags[] = {
		[TASK_MULTIPLE_CHOICE] = OF_CHOICE, [TASK_PERPLEXITY] = OF_PERPLEXITY, [TASK_EXACT_MATCH] = OF_MATCH,
	};
	const int types = OF_CHOICE | OF_PERPLEXITY | OF_MATCH, type = flags[t->type];
	for (const struct key *k = task_keys; k < task_keys + NUM_TASK_KEYS; k++) {
		if (key_given(l, k->name) && k->flags & types && !(k->flags & type))
			return fail_key(l, k->name, "found in a task of type %s, which has no use for it: take it away",
					task_types[t->type]);
		if (!key_given(l, k->name) && k->flags & REQUIRED && k->flags & type)
			return fail_at(start, "the key %s is missing here: %s", k->name, k->help);
	}
	if (!t->options.list && key_given(l, "options") && !t->options.count)
		return fail_key(l, "options", "found nothing; expected a field's name or a list of templates");
	if (t->options.list && key_given(l, "option"))
		return fail_key(l, "option",
				"found beside a list of templates; expected it where options is the name of a field");
	if (t->chat && key_given(l, "separator"))
		return fail_key(l, "separator",
				"found beside chat: true, where messages are kept apart by their roles: take it away");
	if (t->answer && !*t->answer)
		return fail_key(l, "answer", "found nothing; expected the name of a field");
	if (t->match == MATCH_LAST && !t->extract)
		return fail_key(l, "match", "found last; expected it beside extract");
	for (int64_t i = 0; t->options.list && i < t->options.count; i++)
		if (check_template(l, "options", t->options.text[i]) < 0)
			return -1;
	if (check_template(l, "prompt", t->prompt) < 0 || check_template(l, "text", t->text) < 0 ||
			check_template(l, "option", t->option) < 0 || check_template(l, "target", t->target) < 0 ||
			check_pattern(l, "extract", t->extract, true) < 0 ||
			check_pattern(l, "extract_answer", t->extract_answer, true) < 0)
		return -1;
	for (int64_t i = 0; i < t->normalize.ignore.count; i++)
		if (check_pattern(l, "normalize.ignore", t->normalize.ignore.text[i], false) < 0)
			return -1;
	if ((t->answer_form == ANSWER_LABEL) != (t->labels != NULL))
		return fail_key(l, t->labels ? "labels" : "answer_form", t->labels ? "found without answer_form: label"
				: "found label; expected the key labels beside it, which says where the labels are");
	if (t->labels && strchr(t->labels, '{') && check_template(l, "labels", t->labels) < 0)
		return -1;
	static const char *const of_count[] = {"examples.data", "examples.choose", "examples.seed"};
	for (int i = 0; i < 3; i++)
		if (!t->examples.count && key_given(l, of_count[i]))
			return fail_key(l, of_count[i], "examples.count is missing here, how many to choose");
	if (t->examples.choose == CHOOSE_FIRST && key_given(l, "examples.seed"))
		return fail_key(l, "examples.seed", "found beside choose: first, where nothing is random: take it away");
	return task_path(l, t->data) < 0 || task_path(l, t->examples.data) < 0 ? -1 : 0;
}

/* Adds an empty task to struct tasks, for load_list_file. */
static void *add_task(void *list)
{
	struct tasks *tasks = list;
	tasks->task = grow(tasks->task, tasks->count, &tasks->capacity, 1, sizeof *tasks->task);
	struct task *t = &tasks->task[tasks->count++];
	*t = (struct task){0};
	return t;
}

/* check_task for the last one of the list, which must have a name of its own. */
static int check_added_task(const struct loader *l, void *list, void *added, struct place start)
{
	const struct tasks *tasks = list;
	struct task *t = added;
	if (check_task(l, t, start) < 0)
		return -1;
	for (const struct task *other = tasks->task; other < t; other++)
		if (!strcmp(other->name, t->name))
			return fail_key(l, "name", "found %s twice; expected each task to have its own", t->name);
		else if (*t->group && !strcmp(other->group, t->group) && other->type != t->type)
			return fail_key(l, "group", "found %s, whose task %s is of type %s; expected tasks of one type in a group",
					t->group, other->name, task_types[other->type]);
	return 0;
}

void tasks_print_keys(FILE *out)
{
	static const int types[] = {OF_CHOICE, OF_PERPLEXITY, OF_MATCH};
	char type[256];
	for (const struct key *k = task_keys; k < task_keys + NUM_TASK_KEYS; k++) {
		const char *standard = k->fallback && *k->fallback == '\n' ? "\\n\\n" : k->fallback;
		if (k->flags & (REQUIRED | NEEDED))
			standard = "required";
		const char *separator = "; of ";
		fprintf(out, "  %-21s %-10s %s (%s", k->name, standard ? standard : "", k->help,
				describe_key(type, &task_table, k));
		for (int i = 0; i < 3; i++)
			if (k->flags & types[i])
				fprintf(out, "%s%s", separator, task_types[i]), separator = ", ";
		fprintf(out, ")\n");
	}
}

/* --------------------------------------------------------------------------------------------------- samples */

/* What a null answer is: only a template can be empty. */
static enum on_null on_null_answer(const struct task *t)
{
	return t->on_null == NULL_SKIP ? NULL_SKIP : NULL_ERROR;
}

/* Sets s->answer from the value of the answer's field; label [num_choices] are those of the options, where answers are
 * labels. Returns 0, SKIPPED or -1. */
static int find_answer(const struct task *t, const json_t *value, const struct text *label, const char *where,
		struct sample *s)
{
	struct text text = {0};
	size_t begin, end;
	int rc = value_append(value, t->answer, strlen(t->answer), on_null_answer(t), where, &text);
	if (rc != 0)
		return rc;
	strip(&text, &begin, &end);
	const char *word = text.data ? text.data + begin : "";
	const size_t n = end - begin;
	int64_t answer = -1;
	const struct text *names = t->answer_form == ANSWER_TEXT ? s->choice
			: t->answer_form == ANSWER_LABEL ? label : NULL;
	for (int i = 0; i < s->num_choices && answer < 0 && names; i++) {
		size_t first, last;
		strip(&names[i], &first, &last);
		if (last - first == n && (!n || !memcmp(names[i].data + first, word, n)))
			answer = i;
	}
	if (t->answer_form == ANSWER_LETTER && n == 1 && isalpha((uint8_t)*word))
		answer = toupper((uint8_t)*word) - 'A';
	if (t->answer_form <= ANSWER_NUMBER && n && n < 10 && strspn(word, "0123456789") == n)
		answer = atoi(word) - (t->answer_form == ANSWER_NUMBER);
	s->answer = (int)answer;
	if (answer < 0 || answer >= s->num_choices) {
		char expected[64], shown[64];
		if (t->answer_form == ANSWER_TEXT)
			snprintf(expected, sizeof expected, "the text of one of the %d options", s->num_choices);
		else if (t->answer_form == ANSWER_LABEL)
			snprintf(expected, sizeof expected, "the label of one of the %d options", s->num_choices);
		else if (t->answer_form == ANSWER_LETTER)
			snprintf(expected, sizeof expected, "a letter from A to %c",
					'A' - 1 + (s->num_choices < 26 ? s->num_choices : 26));
		else
			snprintf(expected, sizeof expected, "%d to %d", t->answer_form == ANSWER_NUMBER,
					s->num_choices - (t->answer_form == ANSWER_INDEX));
		rc = fail("%s: `%s` is \"%s\"; expected %s, as answer_form is %s%s", where, t->answer, printable(shown, word),
				expected, answer_forms[t->answer_form], t->answer_form == ANSWER_LETTER
				? " (options with labels of their own: answer_form: label)" : "");
	}
	free(text.data);
	return rc;
}

/* label[s->num_choices] = the labels of a sample's options; items: the list that the options come from, or NULL. */
static int make_labels(const struct task *t, const json_t *object, const json_t *items, const char *where,
		const struct sample *s, struct text *label)
{
	const bool template = strchr(t->labels, '{');
	const json_t *list = template ? NULL : json_at(object, t->labels);
	const int n = (int)json_array_size(list);
	if (!template && (!json_is_array(list) || n != s->num_choices))
		return fail("%s: the field `%s` is %s of %d; expected the list of the labels of the %d options", where,
				t->labels, json_kind(list), n, s->num_choices);
	for (int i = 0; i < s->num_choices; i++) {
		struct text *own = &label[i];
		const int rc = template ? template_append(t->labels, object, json_array_get(items, i), NULL_ERROR, where, own)
				: value_append(json_array_get(list, i), t->labels, strlen(t->labels), NULL_ERROR, where, own);
		if (rc < 0)
			return -1;
		for (const struct text *other = label; other < own; other++)
			if (own->size == other->size && (!own->size || !memcmp(own->data, other->data, own->size)))
				return fail("%s: options %d and %d have the same label; expected each to have its own", where,
						(int)(other - label) + 1, i + 1);
	}
	return 0;
}

/* Sets the options of a sample, which of them is right, and the target. Returns 0, SKIPPED or -1. */
static int make_options(const struct task *t, const json_t *object, const char *where, struct sample *s)
{
	const json_t *list = t->options.list ? NULL : json_at(object, *t->options.text);
	if (json_is_null(list) && t->on_null == NULL_SKIP)
		return SKIPPED;
	if (!t->options.list && !json_is_array(list))
		return fail("%s: the field `%s` is %s; expected the list of options", where, *t->options.text,
				json_kind(list));
	const size_t n = list ? json_array_size(list) : (size_t)t->options.count;
	if (n < 2 || n > 1000)
		return fail("%s: found %zu option%s; expected 2 to 1000", where, n, n == 1 ? "" : "s");
	s->choice = allocate(n * sizeof *s->choice);
	s->num_choices = (int)n;
	for (size_t i = 0; i < n; i++) {
		const int rc = template_append(list ? t->option : t->options.text[i], object, json_array_get(list, i),
				t->on_null, where, &s->choice[i]);
		if (rc != 0)
			return rc;
		if (!s->choice[i].size)
			return fail("%s: option %zu is empty; expected text to score", where, i + 1);
	}
	struct text *label = allocate(n * sizeof *label);
	int rc = t->labels ? make_labels(t, object, list, where, s, label) : 0;
	if (rc == 0)
		rc = find_answer(t, json_at(object, t->answer), label, where, s);
	for (size_t i = 0; i < n; i++)
		free(label[i].data);
	free(label);
	if (rc == 0)
		text_append(&s->target, s->choice[s->answer].data, s->choice[s->answer].size);
	return rc;
}

/* Sets the right answers of a sample, normalized, and the target. Returns 0, SKIPPED or -1. */
static int make_answers(const struct task *t, const json_t *object, const char *where, struct sample *s)
{
	const json_t *value = json_at(object, t->answer);
	const int n = json_is_array(value) ? (int)json_array_size(value) : 1;
	if (!n)
		return fail("%s: the field `%s` is an empty list; expected at least one right answer", where, t->answer);
	s->choice = allocate(n * sizeof *s->choice);
	s->num_choices = n;
	for (int i = 0; i < n; i++) {
		struct text *answer = &s->choice[i], whole = {0};
		const json_t *item = json_is_array(value) ? json_array_get(value, i) : value;
		const int rc = value_append(item, t->answer, strlen(t->answer), on_null_answer(t), where, &whole);
		if (rc != 0)
			return rc;
		if (i == 0 && !t->target)
			text_append(&s->target, whole.data, whole.size);
		if (!t->extract_answer) {
			*answer = whole;
		} else {
			const bool matched = pattern_extract(t->extract_answer, false, &whole, answer);
			free(whole.data);
			if (!matched)
				return fail("%s: extract_answer does not match what `%s` holds", where, t->answer);
		}
		normalize(t, answer);
	}
	return t->target ? template_append(t->target, object, NULL, t->on_null, where, &s->target) : 0;
}

static void sample_free(struct sample *s)
{
	for (int i = 0; i < s->num_choices; i++)
		free(s->choice[i].data);
	free(s->choice);
	free(s->prompt.data);
	free(s->target.data);
}

/* Adds the sample of a record, number `line` of its file, unless it is to be skipped. */
static int add_sample(const struct task *t, struct samples *samples, const json_t *object, const char *where,
		int64_t line)
{
	if (!json_is_object(object))
		return fail("%s: is %s; expected an object", where, json_kind(object));
	samples->sample = grow(samples->sample, samples->count, &samples->capacity, 1, sizeof *samples->sample);
	struct sample *s = &samples->sample[samples->count++];
	*s = (struct sample){.line = line};
	int rc = template_append(t->type == TASK_PERPLEXITY ? t->text : t->prompt, object, NULL, t->on_null, where,
			&s->prompt);
	if (rc == 0 && t->type == TASK_PERPLEXITY && !s->prompt.size)
		rc = fail("%s: the document is empty; expected text", where);
	if (rc == 0 && t->type != TASK_PERPLEXITY)
		rc = t->type == TASK_MULTIPLE_CHOICE ? make_options(t, object, where, s) : make_answers(t, object, where, s);
	if (rc == SKIPPED) {
		sample_free(s);
		samples->count--, samples->skipped++;
		return 0;
	}
	return rc;
}

/* Adds the sample of the only record of a file. Its error says where samples may be instead. */
static int add_only_sample(const struct task *t, struct samples *samples, const json_t *object, const char *where)
{
	char text[sizeof error_text];
	const char *key;
	json_t *member;
	if (add_sample(t, samples, object, where, 1) == 0)
		return 0;
	snprintf(text, sizeof text, "%s", error_text);
	json_object_foreach((json_t *)object, key, member)
		if (json_is_object(json_array_get(member, 0)) && (!t->options.text || strcmp(*t->options.text, key) != 0))
			return fail("%s; if the samples are the array `%s` of this object, write field: %s", text, key, key);
	return -1;
}

/* Adds the samples of a file that is one JSON value, up to `limit` (0: all): an array, the array in `field`, or an
 * object that is the only record. */
static int add_value(const struct task *t, struct samples *samples, const char *path, const json_t *value,
		int64_t limit)
{
	char where[PATH_LEN + 32];
	const json_t *list = t->field ? json_at(value, t->field) : value;
	samples->one_value = true;
	if (t->field && !json_is_array(list))
		return fail("%s: the field `%s` is %s; expected the array of samples (task %s: field)", path, t->field,
				json_kind(list), t->name);
	if (json_is_object(list))
		return add_only_sample(t, samples, list, path);
	const size_t n = json_array_size(list);
	for (size_t i = 0; i < n && (!limit || samples->count < limit); i++) {
		snprintf(where, sizeof where, "%s: record %zu", path, i + 1);
		if (add_sample(t, samples, json_array_get(list, i), where, (int64_t)i + 1) < 0)
			return -1;
	}
	return 0;
}

/* Adds the samples of n bytes of JSON lines, up to `limit` (0: all); blank lines are skipped. */
static int add_lines(const struct task *t, struct samples *samples, const char *path, const char *text, size_t n,
		int64_t limit)
{
	char where[PATH_LEN + 32];
	const char *end = text + n;
	int rc = 0;
	for (int64_t line = 1; text < end && rc == 0 && (!limit || samples->count < limit); line++) {
		const char *stop = memchr(text, '\n', end - text);
		const size_t length = (stop ? stop : end) - text;
		if (!is_blank_line(text, length)) {
			snprintf(where, sizeof where, "%s:%" PRId64, path, line);
			json_t *object = json_line(where, text, length);
			const bool only = line == 1 && (!stop || is_blank_line(stop, end - stop));
			rc = !object ? -1 : only ? add_only_sample(t, samples, object, where)
					: add_sample(t, samples, object, where, line);
			json_decref(object);
		}
		text += length + 1;
	}
	return rc;
}

/* Whether n bytes are no JSON lines: they begin with an array, or their first line holds no whole value. */
static bool is_one_value(const char *text, size_t n)
{
	const char *stop = memchr(text, '\n', n);
	json_t *first = json_value("", text, stop ? (size_t)(stop - text) : n);
	json_decref(first);
	return *text == '[' || !first;
}

/* Reads all of a file, as it is or unpacked. */
static int read_all(const struct task *t, const char *path, struct text *out)
{
	struct byte_source *source = byte_source_open(path, FORMAT_JSONL);
	char buffer[1 << 16], what[sizeof error_text];
	int64_t n = source ? 1 : -1;
	while (n > 0 && (n = byte_source_read(source, buffer, sizeof buffer)) > 0)
		text_append(out, buffer, n);
	byte_source_close(source);
	if (n == 0)
		return 0;
	snprintf(what, sizeof what, "%s", error_text);
	return fail("%.3000s; task %s names it", what, t->name);
}

/* Reads up to `limit` samples (0: all) of a file of JSON lines, or of one JSON value. */
static int load_samples(const struct task *t, struct samples *samples, const char *path, int64_t limit)
{
	struct text data = {0};
	int rc = read_all(t, path, &data);
	size_t first = 0;
	while (first < data.size && is_blank_line(data.data + first, 1))
		first++;
	if (rc == 0 && first < data.size) {
		const char *text = data.data + first;
		const size_t n = data.size - first;
		const bool one = t->field || is_one_value(text, n);
		json_t *value = one ? json_value(path, text, n) : NULL;
		if (value)
			rc = add_value(t, samples, path, value, limit);
		else if (t->field)
			rc = fail("%s: is no JSON object; expected one, as task %s has the key field", path, t->name);
		else if (*text == '[' || text_format(path, FORMAT_BY_NAME) == FORMAT_JSON)
			rc = -1;
		else
			rc = add_lines(t, samples, path, data.data, data.size, limit);
		json_decref(value);
	}
	if (!rc && !samples->count)
		rc = fail(samples->skipped ? "%s: all its samples have a null, and on_null is skip; expected at least one "
				"sample without, for task %s" : "%s: no sample in it; expected JSON lines, one object each, or a JSON "
				"array, for task %s", path, t->name);
	free(data.data);
	return rc;
}

int tasks_load(struct tasks *tasks, const char *path)
{
	const struct list_reader reader = {
		.items = "tasks", .item = "task", .add = add_task, .check = check_added_task, .list = tasks,
	};
	char copy[PATH_LEN];
	*tasks = (struct tasks){0};
	int rc = path_copy(copy, path) < 0 ? -1 : load_list_file(&task_table, path, &reader);
	for (int64_t i = 0; rc == 0 && i < tasks->count; i++) {
		struct task *t = &tasks->task[i];
		const bool own_pool = *t->examples.data;
		rc = load_samples(t, &t->samples, t->data, t->examples.count && !own_pool ? 0 : t->limit);
		t->num_samples = t->limit && t->limit < t->samples.count ? t->limit : t->samples.count;
		if (rc == 0 && own_pool)
			rc = load_samples(t, &t->pool, t->examples.data, 0);
	}
	return rc;
}

static void samples_free(struct samples *samples)
{
	for (int64_t n = 0; n < samples->count; n++)
		sample_free(&samples->sample[n]);
	free(samples->sample);
}

void tasks_free(struct tasks *tasks)
{
	for (int64_t n = 0; n < tasks->count; n++) {
		struct task *t = &tasks->task[n];
		for (const struct key *k = task_keys; k < task_keys + NUM_TASK_KEYS; k++) {
			char *field = (char *)t + k->offset;
			struct strings *s = (struct strings *)field;
			if (k->type == T_STRING)
				free(*(char **)field);
			for (int64_t i = 0; k->type == T_STRINGS && i < s->count; i++)
				free(s->text[i]);
			if (k->type == T_STRINGS)
				free(s->text);
		}
		samples_free(&t->samples);
		samples_free(&t->pool);
	}
	free(tasks->task);
	*tasks = (struct tasks){0};
}

/* --------------------------------------------------------------------------------------------------- results */

static const char *const accuracy_names[NUM_ACCURACIES] = {"log_likelihood", "bytes", "tokens", "acc_norm"};

enum { RESULT_SAMPLES, RESULT_SUMMARY, NUM_RESULT_FILES };
struct results { struct new_file file[NUM_RESULT_FILES]; };

struct results *results_open(const char *dir)
{
	static const char *const names[NUM_RESULT_FILES] = {"samples.jsonl", "results.json"};
	struct results *r = allocate(sizeof *r);
	char path[PATH_LEN];
	int rc = make_directories(dir);
	for (int i = 0; i < NUM_RESULT_FILES && rc == 0; i++)
		rc = path_join(path, dir, names[i]) < 0 ? -1 : new_member_begin(&r->file[i], path);
	if (rc == 0)
		return r;
	for (int i = 0; i < NUM_RESULT_FILES; i++)
		new_file_abandon(&r->file[i]);
	free(r);
	return NULL;
}

static json_t *text_to_json(const struct text *t)
{
	return json_bytes(t->data, t->size);
}

static json_t *tokens_to_json(const int32_t *id, int64_t n)
{
	json_t *list = json_array();
	for (int64_t i = 0; i < n; i++)
		json_array_append_new(list, json_integer(id[i]));
	return list;
}

void results_add(struct results *r, const struct task *t, const struct sample_result *s)
{
	json_t *line = json_pack("{s:o, s:I, s:o, s:b}", "task", json_cstring(t->name),
			"line", (json_int_t)s->sample->line,
			t->type == TASK_PERPLEXITY ? "text" : "prompt", text_to_json(&s->sample->prompt),
			t->type == TASK_PERPLEXITY ? "several_windows" : "context_cut", s->cut);
	if (t->type == TASK_MULTIPLE_CHOICE) {
		json_t *options = json_array(), *prediction = json_object(), *correct = json_object();
		for (int i = 0; i < s->sample->num_choices; i++)
			json_array_append_new(options, json_pack("{s:o, s:f, s:I, s:o}",
					"text", text_to_json(&s->sample->choice[i]),
					"log_likelihood", s->scored[i].log_likelihood, "bytes", (json_int_t)s->sample->choice[i].size,
					"tokens", tokens_to_json(s->scored[i].id, s->scored[i].num_tokens)));
		for (int i = 0; i < NUM_ACCURACIES; i++) {
			json_object_set_new(prediction, accuracy_names[i], json_integer(s->prediction[i]));
			json_object_set_new(correct, accuracy_names[i], json_boolean(s->prediction[i] == s->sample->answer));
		}
		json_object_set_new(line, "options", options);
		json_object_set_new(line, "answer", json_integer(s->sample->answer));
		json_object_set_new(line, "prediction", prediction);
		json_object_set_new(line, "correct", correct);
	} else if (t->type == TASK_PERPLEXITY) {
		json_object_set_new(line, "log_likelihood", json_real(s->scored->log_likelihood));
		json_object_set_new(line, "tokens", json_integer(s->scored->num_tokens));
		json_object_set_new(line, "words", json_integer(s->words));
		json_object_set_new(line, "bytes", json_integer((json_int_t)s->sample->prompt.size));
	} else {
		json_t *answers = json_array();
		for (int i = 0; i < s->sample->num_choices; i++)
			json_array_append_new(answers, text_to_json(&s->sample->choice[i]));
		json_object_set_new(line, "answers", answers);
		json_object_set_new(line, "reply", text_to_json(&s->reply));
		json_object_set_new(line, "tokens", tokens_to_json(s->scored->id, s->scored->num_tokens));
		json_object_set_new(line, "prediction", s->matched ? text_to_json(&s->extracted) : json_null());
		json_object_set_new(line, "correct", json_boolean(s->correct));
	}
	if (t->type != TASK_PERPLEXITY)
		json_object_set_new(line, "context", text_to_json(&s->context));
	char *text = json_text(line, JSON_COMPACT);
	fprintf(r->file[RESULT_SAMPLES].stream, "%s\n", text);
	free(text);
	json_decref(line);
}

static json_t *result_to_json(const struct task_result *result)
{
	const struct task *t = result->task;
	json_t *scores = json_object();
	for (int i = 0; i < result->num_scores; i++) {
		const struct score *s = &result->score[i];
		json_object_set_new(scores, s->name, json_pack("{s:o, s:o}",
				"value", isfinite(s->value) ? json_real(s->value) : json_null(),
				"standard_error", isfinite(s->standard_error) ? json_real(s->standard_error) : json_null()));
	}
	json_t *json = json_pack("{s:o, s:s, s:o, s:I, s:o}",
			"name", json_cstring(t->name), "type", task_types[t->type], "data", json_cstring(t->data),
			"samples", (json_int_t)t->num_samples, "scores", scores);
	json_object_set_new(json, "skipped", json_integer(t->samples.skipped));
	if (*t->group)
		json_object_set_new(json, "group", json_cstring(t->group));
	if (t->type == TASK_PERPLEXITY) {
		json_object_set_new(json, "tokens", json_integer(result->tokens));
		json_object_set_new(json, "words", json_integer(result->words));
		json_object_set_new(json, "bytes", json_integer(result->bytes));
		json_object_set_new(json, "documents_in_several_windows", json_integer(result->cut));
		return json;
	}
	json_object_set_new(json, "examples", json_integer(t->examples.count));
	if (t->examples.count)
		json_object_set_new(json, "examples_data", json_cstring(*t->examples.data ? t->examples.data : t->data));
	json_object_set_new(json, "contexts_cut", json_integer(result->cut));
	if (t->type == TASK_EXACT_MATCH) {
		json_object_set_new(json, "unmatched", json_integer(result->unmatched));
		return json;
	}
	json_t *ties = json_object();
	for (int i = 0; i < NUM_ACCURACIES; i++)
		json_object_set_new(ties, accuracy_names[i], json_integer(result->ties[i]));
	json_object_set_new(json, "ties", ties);
	return json;
}

/* The sum of weight * value over the tasks of a group, of their score number i: a mean, as the weights add up to 1.
 * Samples of different tasks are independent: the variances of the values add up. */
static json_t *group_mean(const struct task_result *result, int64_t count, const char *group, int i, bool by_sample,
		int64_t samples, int64_t tasks)
{
	double value = 0, variance = 0;
	for (const struct task_result *r = result; r < result + count; r++) {
		if (strcmp(r->task->group, group) != 0)
			continue;
		const double weight = by_sample ? (double)r->task->num_samples / samples : 1.0 / tasks;
		value += weight * r->score[i].value;
		variance += weight * weight * r->score[i].standard_error * r->score[i].standard_error;
	}
	return json_pack("{s:f, s:o}", "value", value,
			"standard_error", isfinite(variance) ? json_real(sqrt(variance)) : json_null());
}

/* The means of the groups, in the order of their first tasks. */
static json_t *groups_to_json(const struct task_result *result, int64_t count)
{
	json_t *groups = json_array();
	for (int64_t first = 0; first < count; first++) {
		const char *group = result[first].task->group;
		int64_t samples = 0, before = 0;
		json_t *names = json_array(), *scores = json_object();
		for (int64_t j = 0; j < count && *group; j++)
			if (!strcmp(result[j].task->group, group)) {
				before += j < first;
				samples += result[j].task->num_samples;
				json_array_append_new(names, json_cstring(result[j].task->name));
			}
		const int64_t tasks = (int64_t)json_array_size(names);
		for (int i = 0; i < result[first].num_scores && *group; i++)
			json_object_set_new(scores, result[first].score[i].name, json_pack("{s:o, s:o}",
					"mean_of_tasks", group_mean(result, count, group, i, false, samples, tasks),
					"mean_of_samples", group_mean(result, count, group, i, true, samples, tasks)));
		if (*group && !before)
			json_array_append_new(groups, json_pack("{s:o, s:O, s:I, s:O}", "name", json_cstring(group), "tasks", names,
					"samples", (json_int_t)samples, "scores", scores));
		json_decref(names);
		json_decref(scores);
	}
	return groups;
}

json_t *results_report(const struct evaluation_facts *facts, const struct task_result *result, int64_t count)
{
	json_t *tasks = json_array();
	for (int64_t i = 0; i < count; i++)
		json_array_append_new(tasks, result_to_json(&result[i]));
	return json_pack("{s:o, s:o, s:o, s:I, s:o, s:o}",
			"model", json_cstring(facts->model), "tasks_file", json_cstring(facts->tasks),
			"tokenizer_hash", crc_to_json(facts->tokenizer_hash), "seq_len", (json_int_t)facts->seq_len,
			"tasks", tasks, "groups", groups_to_json(result, count));
}

int results_finish(struct results *r, const json_t *report)
{
	if (report)
		json_print(r->file[RESULT_SUMMARY].stream, report);
	const int rc = new_files_publish(r->file, NUM_RESULT_FILES, report ? 0 : -1);
	free(r);
	return rc;
}

/* Prints a score right-aligned, with so many digits; null as a dash. */
static void print_number(const json_t *value, int digits)
{
	if (json_is_null(value))
		printf(" %12s", "-");
	else
		printf(" %12.*g", digits, json_number_value(value));
}

/* Prints how many samples of a task something was the case with, if any. */
static void print_count(const json_t *task, const char *key, const char *what)
{
	const json_int_t n = json_integer_value(json_object_get(task, key));
	if (n)
		printf("  %s: %" JSON_INTEGER_FORMAT "\n", what, n);
}

/* Prints the means of a group. */
static void print_group(const json_t *group)
{
	static const char *const means[] = {"mean_of_tasks", "mean_of_samples"};
	static const char *const words[] = {"mean of tasks", "mean of samples"};
	char name[MAX_NAME * 3], samples[32];
	for (int i = 0; i < 2; i++) {
		const char *key;
		json_t *score;
		snprintf(name, sizeof name, "%s", json_string_value(json_object_get(group, "name")));
		snprintf(samples, sizeof samples, "%" JSON_INTEGER_FORMAT,
				json_integer_value(json_object_get(group, "samples")));
		const char *type = words[i];
		json_object_foreach(json_object_get(group, "scores"), key, score) {
			const json_t *mean = json_object_get(score, means[i]);
			printf("%-28s %-16s %8s  %-17s", name, type, samples, key);
			print_number(json_object_get(mean, "value"), 6);
			print_number(json_object_get(mean, "standard_error"), 3);
			printf("\n");
			*name = *samples = 0, type = "";
		}
	}
}

void print_results(const json_t *report)
{
	size_t i;
	const json_t *task;
	printf("%-28s %-16s %8s  %-17s %12s %12s\n", "task", "type", "samples", "score", "value", "std. error");
	json_array_foreach(json_object_get(report, "tasks"), i, task) {
		char name[MAX_NAME * 3], type[32], samples[32]; /* of the first line only; * 3: see json_cstring */
		snprintf(name, sizeof name, "%s", json_string_value(json_object_get(task, "name")));
		snprintf(type, sizeof type, "%s", json_string_value(json_object_get(task, "type")));
		for (char *c = type; (c = strchr(c, '_'));)
			*c = ' ';
		snprintf(samples, sizeof samples, "%" JSON_INTEGER_FORMAT,
				json_integer_value(json_object_get(task, "samples")));
		const char *key;
		json_t *score;
		json_object_foreach(json_object_get(task, "scores"), key, score) {
			printf("%-28s %-16s %8s  %-17s", name, type, samples, key);
			print_number(json_object_get(score, "value"), 6);
			print_number(json_object_get(score, "standard_error"), 3);
			printf("\n");
			*name = *type = *samples = 0;
		}
		print_count(task, "skipped", "samples skipped, as a field is null");
		print_count(task, "documents_in_several_windows", "documents in several windows");
		print_count(task, "contexts_cut", "contexts cut from the left to fit into the window");
		print_count(task, "unmatched", "replies that the pattern of extract does not match");
	}
	const json_t *group;
	json_array_foreach(json_object_get(report, "groups"), i, group)
		print_group(group);
}
