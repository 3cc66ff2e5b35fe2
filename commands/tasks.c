/*
 * commands/tasks.c - tasks of `ling eval --tasks`: the task file, its samples, and the files of results.
 */
#define _GNU_SOURCE
#include "commands/tasks.h"

#include "files/base.h"
#include "files/config.h"
#include "files/unicode.h"
#include "files/checkpoint.h"

#include <argp.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <jansson.h>
#include <math.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define TASK_KEY(...) KEY_OF(struct task, __VA_ARGS__)

static const char *const task_types[] = {"multiple_choice", "perplexity", "exact_match", NULL};
static const char *const answer_forms[] = {"index", "number", "letter", "text", NULL};
static const char *const match_names[] = {"first", "last", NULL};

/* REQUIRED: by each task whose type the key is of. */
static const struct key task_keys[] = {
	TASK_KEY(name, T_TEXT, 0, 0, NEEDED, NULL, "what the results call it"),
	TASK_KEY(type, T_ENUM, 0, 0, NEEDED, NULL, "how it is scored", .names = task_types),
	TASK_KEY(data, T_TEXT, 0, 0, NEEDED, NULL, "JSON lines, one sample each; the path begins at the task file"),
	TASK_KEY(limit, T_INT64, 0, 1e12, NONE, "off", "score only this many first samples"),
	TASK_KEY(text, T_STRING, 0, 0, OF_PERPLEXITY, "{text}", "template of the document"),
	TASK_KEY(stride, T_INT64, 0, 1e9, NONE | OF_PERPLEXITY, "off", "tokens that each window after the first scores; off: all of the window"),
	TASK_KEY(prompt, T_STRING, 0, 0, REQUIRED | OF_CHOICE | OF_MATCH, NULL, "template of what the model is given"),
	TASK_KEY(options, T_STRINGS, 0, 0, REQUIRED | OF_CHOICE, NULL, "the field that holds the list of options; or a list of templates, one for each"),
	TASK_KEY(option, T_STRING, 0, 0, OF_CHOICE, "{option}", "template of an option, {option} being the field's item"),
	TASK_KEY(answer, T_STRING, 0, 0, REQUIRED | OF_CHOICE | OF_MATCH, NULL,
		"the field that holds the right option; or the right answer, or a list of right ones"),
	TASK_KEY(answer_form, T_ENUM, 0, 0, OF_CHOICE, "index", "how it says which: index from 0, number from 1, letter from A, or the option's text",
		.names = answer_forms),
	TASK_KEY(target, T_STRING, 0, 0, NONE | OF_MATCH, "off", "template of the reply in an example; off: the first right answer"),
	TASK_KEY(max_tokens, T_INT, 1, 1e6, OF_MATCH, "256", "longest reply"),
	TASK_KEY(stop, T_STRINGS, 0, 0, NONE | OF_MATCH, "off", "texts at which the reply ends"),
	TASK_KEY(extract, T_STRING, 0, 0, NONE | OF_MATCH, "off", "PCRE2 pattern whose group 1 is the reply's answer; off: all of the reply"),
	TASK_KEY(extract_answer, T_STRING, 0, 0, NONE | OF_MATCH, "off", "the same for what the answer's field holds"),
	TASK_KEY(match, T_ENUM, 0, 0, OF_MATCH, "first", "the match of extract that counts", .names = match_names),
	SECTION("normalize", OF_MATCH, "how reply and answers are made plain before they are compared"),
	TASK_KEY(normalize.strip, T_BOOL, 0, 1, 0, "true", "without white space at both ends"),
	TASK_KEY(normalize.lowercase, T_BOOL, 0, 1, 0, "false", "ASCII letters small"),
	TASK_KEY(normalize.punctuation, T_BOOL, 0, 1, 0, "true", "with punctuation; false: ASCII punctuation is left out"),
	SECTION("examples", NONE | OF_CHOICE | OF_MATCH, "solved samples in front of the prompt"),
	TASK_KEY(examples.count, T_INT, 1, 1000, NEEDED, NULL, "how many"),
	TASK_KEY(examples.data, T_TEXT, 0, 0, NONE, "off", "JSON lines to choose them from; off: the task's data"),
	TASK_KEY(examples.seed, T_UINT64, 0, 18446744073709551615.0, 0, "1", "of the choice"),
	TASK_KEY(separator, T_STRING, 0, 0, OF_CHOICE | OF_MATCH, "\n\n", "text between examples and before the prompt"),
	TASK_KEY(chat, T_BOOL, 0, 1, OF_CHOICE | OF_MATCH, "false", "prompts are a user's messages, targets and replies the assistant's"),
};

static int load_tasks(struct loader *l);
static const struct table task_table = {task_keys, sizeof task_keys / sizeof *task_keys, load_tasks};
_Static_assert(sizeof task_keys / sizeof *task_keys <= MAX_KEYS, "the places of all keys must fit");

static const struct key tasks_key = {.name = "tasks", .type = T_TASKS};

/* ------------------------------------------------------------------------------------------------ templates */

/* The next piece of a template: text as it stands, up to a field, {{ or }}; and the field's name, or NULL. False at the end, and at what is no
 * template, which is told in *wrong. */
struct piece_of_template { const char *text, *field; size_t text_size, field_size; };
static bool next_piece(const char **at, struct piece_of_template *p, const char **wrong)
{
	*p = (struct piece_of_template){.text = *at, .text_size = strcspn(*at, "{}")};
	*at += p->text_size;
	const char brace = **at;
	if (!brace)
		return p->text_size > 0;
	if ((*at)[1] == brace) { /* doubled, it stands for itself */
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

/* Appends a value that is a text, number, true or false. Where it is none, or missing (NULL), that is an error, which begins with `where` and
 * names the field. */
static int value_append(const json_t *value, const char *field, size_t n, const char *where, struct text *out)
{
	char number[40];
	if (json_is_string(value)) {
		text_append(out, json_string_value(value), json_string_length(value));
		return 0;
	}
	if (json_is_integer(value))
		snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
	else if (json_is_real(value)) {
		/* the shortest that gives the same number */
		for (int digits = 15; digits <= 17; digits++)
			if (snprintf(number, sizeof number, "%.*g", digits, json_real_value(value)), strtod(number, NULL) == json_real_value(value))
				break;
	} else if (json_is_boolean(value))
		strcpy(number, json_is_true(value) ? "true" : "false");
	else
		return fail("%s: the field `%.*s` is %s; expected a string, a number, true or false", where, n < 100 ? (int)n : 100, field, json_kind(value));
	text_append_string(out, number);
	return 0;
}

/* Appends a template, which check_template has passed, in the words of a sample. The field {option} is the item, if there is one. */
static int template_append(const char *template, const json_t *sample, const json_t *item, const char *where, struct text *out)
{
	static const char option[] = "option";
	const size_t length = sizeof option - 1;
	const char *wrong;
	for (struct piece_of_template p; next_piece(&template, &p, &wrong);) {
		text_append(out, p.text, p.text_size);
		if (!p.field)
			continue;
		const json_t *value;
		if (item && p.field_size >= length && !memcmp(p.field, option, length) && (p.field_size == length || p.field[length] == '.'))
			value = p.field_size == length ? item : json_at_part(item, p.field + length + 1, p.field_size - length - 1);
		else
			value = json_at_part(sample, p.field, p.field_size);
		if (value_append(value, p.field, p.field_size, where, out) < 0)
			return -1;
	}
	return 0;
}

/* ------------------------------------------------------------------------------------------------- patterns */

/* Compiles a pattern. NULL with what is wrong with it. */
static pcre2_code *pattern_compile(const char *pattern, char wrong[160])
{
	int error;
	uint32_t groups = 0;
	PCRE2_SIZE offset;
	pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_MATCH_INVALID_UTF, &error, &offset, NULL);
	if (!code) {
		PCRE2_UCHAR message[120];
		pcre2_get_error_message(error, message, sizeof message);
		snprintf(wrong, 160, "%s at byte %zu", (const char *)message, (size_t)offset);
		return NULL;
	}
	pcre2_pattern_info(code, PCRE2_INFO_CAPTURECOUNT, &groups);
	if (groups)
		return code;
	pcre2_code_free(code);
	strcpy(wrong, "without a group: put ( ) around what is to be extracted");
	return NULL;
}

/* Appends group 1 of the pattern's first or last match in a text. False where it does not match, or takes too long to. */
static bool pattern_extract(const char *pattern, enum which_match which, const struct text *in, struct text *out)
{
	char wrong[160];
	pcre2_code *code = pattern_compile(pattern, wrong); /* check_pattern has passed it */
	pcre2_match_data *match = code ? pcre2_match_data_create_from_pattern(code, NULL) : NULL;
	size_t begin = 0, size = 0;
	bool is_found = false;
	for (size_t at = 0; match && at <= in->size && !(is_found && which == MATCH_FIRST);) {
		if (pcre2_match(code, (PCRE2_SPTR)(in->data ? in->data : ""), in->size, at, 0, match, NULL) < 0)
			break;
		const PCRE2_SIZE *v = pcre2_get_ovector_pointer(match);
		if (v[2] != PCRE2_UNSET && v[3] >= v[2])
			is_found = true, begin = v[2], size = v[3] - v[2];
		at = v[1] > at ? v[1] : at + 1; /* an empty match, or one that \K moved: on by a character */
		while (at < in->size && ((uint8_t)in->data[at] & 0xc0) == 0x80)
			at++;
	}
	if (is_found)
		text_append(out, in->data ? in->data + begin : "", size);
	pcre2_match_data_free(match);
	pcre2_code_free(code);
	return is_found;
}

static bool is_ascii_space(char c)
{
	return c == ' ' || (c >= '\t' && c <= '\r');
}

/* The bounds of a text without white space at both ends. */
static void strip(const struct text *t, size_t *begin, size_t *end)
{
	*begin = 0, *end = t->size;
	while (*begin < *end && is_ascii_space(t->data[*begin]))
		++*begin;
	while (*end > *begin && is_ascii_space(t->data[*end - 1]))
		--*end;
}

/* Makes a text plain, in place: punctuation, letters, then the ends. */
static void normalize(const struct task *t, struct text *text)
{
	size_t n = 0, begin = 0;
	for (size_t i = 0; i < text->size; i++) {
		const char c = text->data[i];
		if (t->normalize.punctuation || !ispunct((uint8_t)c))
			text->data[n++] = t->normalize.lowercase ? (char)tolower((uint8_t)c) : c;
	}
	text->size = n;
	if (t->normalize.strip)
		strip(text, &begin, &n);
	if (text->data) {
		memmove(text->data, text->data + begin, n - begin);
		text->data[n - begin] = 0;
	}
	text->size = n - begin;
}

bool task_reply_is_right(const struct task *t, const struct sample *s, const struct text *reply, struct text *extracted, bool *found)
{
	*found = true;
	if (t->extract)
		*found = pattern_extract(t->extract, t->match, reply, extracted);
	else
		text_append(extracted, reply->data ? reply->data : "", reply->size);
	normalize(t, extracted);
	for (int i = 0; *found && i < s->num_choices; i++)
		if (s->choice[i].size == extracted->size && !memcmp(s->choice[i].data, extracted->data, extracted->size))
			return true;
	return false;
}

/* ------------------------------------------------------------------------------------------- the task file */

/* Fails when a template or pattern that a key holds is none. */
static int check_template(const struct loader *l, const char *key, const char *template)
{
	const char *wrong = NULL;
	struct piece_of_template p;
	if (!template)
		return 0;
	while (next_piece(&template, &p, &wrong))
		continue;
	return wrong ? fail_key(l, key, "found %s", wrong) : 0;
}

static int check_pattern(const struct loader *l, const char *key, const char *pattern)
{
	char wrong[160];
	pcre2_code *code = pattern ? pattern_compile(pattern, wrong) : NULL;
	if (pattern && !code)
		return fail_key(l, key, "found a pattern %s", wrong);
	pcre2_code_free(code);
	return 0;
}

/* The path of a file that the task file names. */
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
	const int types = OF_CHOICE | OF_PERPLEXITY | OF_MATCH;
	const int kind = t->type == TASK_MULTIPLE_CHOICE ? OF_CHOICE : t->type == TASK_PERPLEXITY ? OF_PERPLEXITY : OF_MATCH;
	for (int i = 0; i < task_table.num_keys; i++) {
		const struct key *k = &task_keys[i];
		if (l->places[i].source && k->flags & types && !(k->flags & kind))
			return fail_key(l, k->name, "found in a task of type %s, which has no use for it: take it away", task_types[t->type]);
		if (!l->places[i].source && k->flags & REQUIRED && k->flags & kind)
			return fail_at(start, "the key %s is missing here: %s", k->name, k->help);
	}
	if (!t->options.list && l->places[find_in(l->table, "options") - task_keys].source && !t->options.count)
		return fail_key(l, "options", "found nothing; expected a field's name or a list of templates");
	if (t->options.list && l->places[find_in(l->table, "option") - task_keys].source)
		return fail_key(l, "option", "found beside a list of templates; expected it where options is the name of a field");
	if (t->chat && l->places[find_in(l->table, "separator") - task_keys].source)
		return fail_key(l, "separator", "found beside chat: true, where messages are kept apart by their roles: take it away");
	if (t->answer && !*t->answer)
		return fail_key(l, "answer", "found nothing; expected the name of a field");
	if (t->match == MATCH_LAST && !t->extract)
		return fail_key(l, "match", "found last; expected it beside extract");
	for (int64_t i = 0; t->options.list && i < t->options.count; i++)
		if (check_template(l, "options", t->options.text[i]) < 0)
			return -1;
	if (check_template(l, "prompt", t->prompt) < 0 || check_template(l, "text", t->text) < 0 || check_template(l, "option", t->option) < 0 ||
			check_template(l, "target", t->target) < 0 || check_pattern(l, "extract", t->extract) < 0 ||
			check_pattern(l, "extract_answer", t->extract_answer) < 0)
		return -1;
	return task_path(l, t->data) < 0 || task_path(l, t->examples.data) < 0 ? -1 : 0;
}

/* Reads the items of the list of tasks up to its end; it has begun. */
static int load_tasks(struct loader *l)
{
	struct tasks *tasks = l->structure;
	while (advance(l) == 0) {
		if (l->event.type == YAML_SEQUENCE_END_EVENT)
			return tasks->count ? 0 : fail_at(here(l), "found an empty list; expected at least one task");
		if (l->event.type != YAML_MAPPING_START_EVENT)
			return fail_value(l, &tasks_key, "as an item");
		tasks->task = grow(tasks->task, tasks->count, &tasks->capacity, 1, sizeof *tasks->task);
		struct task *t = &tasks->task[tasks->count++];
		*t = (struct task){0};
		memset(l->places, 0, sizeof l->places);
		l->structure = t;
		for (int i = 0; i < task_table.num_keys; i++)
			set_default(t, &task_keys[i], false);
		const struct place start = here(l);
		if (load_mapping(l, &root_key) < 0 || check_task(l, t, start) < 0)
			return -1;
		for (const struct task *other = tasks->task; other < t; other++)
			if (!strcmp(other->name, t->name))
				return fail_key(l, "name", "found %s twice; expected each task to have its own", t->name);
	}
	return -1;
}

void tasks_print_keys(FILE *out)
{
	static const int types[] = {OF_CHOICE, OF_PERPLEXITY, OF_MATCH};
	char type[256];
	for (const struct key *k = task_keys; k < task_keys + task_table.num_keys; k++) {
		const char *standard = k->flags & (REQUIRED | NEEDED) ? "required" : k->fallback && *k->fallback == '\n' ? "\\n\\n" : k->fallback;
		const char *separator = "; of ";
		fprintf(out, "  %-21s %-10s %s (%s", k->name, standard ? standard : "", k->help, describe(type, k));
		for (int i = 0; i < 3; i++)
			if (k->flags & types[i])
				fprintf(out, "%s%s", separator, task_types[i]), separator = ", ";
		fprintf(out, ")\n");
	}
}

/* --------------------------------------------------------------------------------------------------- samples */

/* The right option, as the answer's field says it. */
static int find_answer(const struct task *t, const json_t *value, const char *where, struct sample *s)
{
	struct text text = {0};
	size_t begin, end;
	if (value_append(value, t->answer, strlen(t->answer), where, &text) < 0)
		return -1;
	strip(&text, &begin, &end);
	const char *word = text.data ? text.data + begin : "";
	const size_t n = end - begin;
	int64_t answer = -1;
	for (int i = 0; i < s->num_choices && answer < 0 && t->answer_form == ANSWER_TEXT; i++) {
		size_t first, last;
		strip(&s->choice[i], &first, &last);
		if (last - first == n && !memcmp(s->choice[i].data + first, word, n))
			answer = i;
	}
	if (t->answer_form == ANSWER_LETTER && n == 1 && isalpha((uint8_t)*word))
		answer = toupper((uint8_t)*word) - 'A';
	if (t->answer_form <= ANSWER_NUMBER && n && n < 10 && strspn(word, "0123456789") == n)
		answer = atoi(word) - (t->answer_form == ANSWER_NUMBER);
	s->answer = (int)answer;
	int rc = 0;
	if (answer < 0 || answer >= s->num_choices) {
		char expected[64], shown[64];
		if (t->answer_form == ANSWER_TEXT)
			snprintf(expected, sizeof expected, "the text of one of the %d options", s->num_choices);
		else if (t->answer_form == ANSWER_LETTER)
			snprintf(expected, sizeof expected, "a letter from A to %c", 'A' - 1 + (s->num_choices < 26 ? s->num_choices : 26));
		else
			snprintf(expected, sizeof expected, "%d to %d", t->answer_form == ANSWER_NUMBER, s->num_choices - (t->answer_form == ANSWER_INDEX));
		rc = fail("%s: `%s` is \"%s\"; expected %s, as answer_form is %s", where, t->answer, printable(shown, word), expected,
				answer_forms[t->answer_form]);
	}
	free(text.data);
	return rc;
}

/* The options of a sample, and which is right. */
static int make_options(const struct task *t, const json_t *object, const char *where, struct sample *s)
{
	const json_t *list = t->options.list ? NULL : json_at(object, *t->options.text);
	if (!t->options.list && !json_is_array(list))
		return fail("%s: the field `%s` is %s; expected the list of options", where, *t->options.text, json_kind(list));
	const size_t n = list ? json_array_size(list) : (size_t)t->options.count;
	if (n < 2 || n > 1000)
		return fail("%s: found %zu option%s; expected 2 to 1000", where, n, n == 1 ? "" : "s");
	s->choice = allocate(n * sizeof *s->choice);
	s->num_choices = (int)n;
	for (size_t i = 0; i < n; i++) {
		if (template_append(list ? t->option : t->options.text[i], object, json_array_get(list, i), where, &s->choice[i]) < 0)
			return -1;
		if (!s->choice[i].size)
			return fail("%s: option %zu is empty; expected text to score", where, i + 1);
	}
	if (find_answer(t, json_at(object, t->answer), where, s) < 0)
		return -1;
	text_append(&s->target, s->choice[s->answer].data, s->choice[s->answer].size);
	return 0;
}

/* The answers of a sample that are right, made plain, and its reply as an example. */
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
		if (value_append(json_is_array(value) ? json_array_get(value, i) : value, t->answer, strlen(t->answer), where, &whole) < 0)
			return -1;
		if (i == 0 && !t->target)
			text_append(&s->target, whole.data, whole.size);
		if (!t->extract_answer) {
			*answer = whole;
		} else {
			const bool is_found = pattern_extract(t->extract_answer, MATCH_FIRST, &whole, answer);
			free(whole.data);
			if (!is_found)
				return fail("%s: extract_answer does not match what `%s` holds", where, t->answer);
		}
		normalize(t, answer);
	}
	return t->target ? template_append(t->target, object, NULL, where, &s->target) : 0;
}

/* Adds the sample that a line holds. */
static int add_sample(const struct task *t, struct samples *samples, const char *path, int64_t line, const char *json, size_t n)
{
	char where[PATH_LEN + 24];
	json_error_t error;
	snprintf(where, sizeof where, "%s:%" PRId64, path, line);
	json_t *object = json_loadb(json, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
	int rc;
	if (!object)
		rc = fail("%s: bad JSON: %s", where, error.text);
	else if (!json_is_object(object))
		rc = fail("%s: is %s; expected an object, one sample", where, json_kind(object));
	else {
		samples->sample = grow(samples->sample, samples->count, &samples->capacity, 1, sizeof *samples->sample);
		struct sample *s = &samples->sample[samples->count++];
		*s = (struct sample){.line = line};
		rc = template_append(t->type == TASK_PERPLEXITY ? t->text : t->prompt, object, NULL, where, &s->prompt);
		if (rc == 0 && t->type == TASK_PERPLEXITY && !s->prompt.size)
			rc = fail("%s: the document is empty; expected text", where);
		if (rc == 0 && t->type != TASK_PERPLEXITY)
			rc = t->type == TASK_MULTIPLE_CHOICE ? make_options(t, object, where, s) : make_answers(t, object, where, s);
	}
	json_decref(object);
	return rc;
}

/* Reads up to `limit` samples (0: all) of a JSONL file; blank lines are skipped. */
static int load_samples(const struct task *t, struct samples *samples, const char *path, int64_t limit)
{
	FILE *f = fopen(path, "re");
	if (!f)
		return fail("%s: cannot open: %s; task %s names it", path, strerror(errno), t->name);
	char *json = NULL;
	size_t capacity = 0;
	ssize_t n = 0;
	int rc = 0;
	errno = 0;
	for (int64_t line = 1; !rc && (!limit || samples->count < limit) && (n = getline(&json, &capacity, f)) >= 0; line++) {
		if (strspn(json, " \t\r\n") < (size_t)n)
			rc = add_sample(t, samples, path, line, json, n);
		errno = 0;
	}
	if (!rc && n < 0 && !feof(f))
		rc = fail("%s: cannot read: %s", path, strerror(errno));
	if (!rc && !samples->count)
		rc = fail("%s: no sample in it; expected JSON lines, one object each, for task %s", path, t->name);
	free(json);
	fclose(f);
	return rc;
}

int tasks_load(struct tasks *tasks, const char *path)
{
	struct loader l = {.table = &task_table, .structure = tasks, .path = path, .source = path};
	*tasks = (struct tasks){0};
	int rc = strlen(path) < PATH_LEN ? load_file(&l, &tasks_key) : fail("%s: path longer than %d bytes", path, PATH_LEN - 1);
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
	for (int64_t n = 0; n < samples->count; n++) {
		struct sample *s = &samples->sample[n];
		for (int i = 0; i < s->num_choices; i++)
			free(s->choice[i].data);
		free(s->choice);
		free(s->prompt.data);
		free(s->target.data);
	}
	free(samples->sample);
}

void tasks_free(struct tasks *tasks)
{
	for (int64_t n = 0; n < tasks->count; n++) {
		struct task *t = &tasks->task[n];
		for (const struct key *k = task_keys; k < task_keys + task_table.num_keys; k++) {
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

static const char *const accuracy_names[NUM_ACCURACIES] = {"log_likelihood", "bytes", "tokens"};

struct results *results_open(const char *dir)
{
	struct results *r = allocate(sizeof *r);
	if (make_directories(dir) == 0 && snprintf(r->dir, PATH_LEN, "%s", dir) < PATH_LEN && path_join(r->samples, dir, "samples.jsonl") == 0 &&
			path_suffix(r->temporary, r->samples, ".tmp") == 0 && (r->f = file_create(r->temporary)))
		return r;
	free(r);
	return NULL;
}

/* A text as a JSON string; bytes that are not UTF-8, as a model's reply may hold, become U+FFFD. */
static json_t *text_to_json(const struct text *t)
{
	struct text clean = {0};
	int32_t code;
	for (size_t i = 0, size; i < t->size; i += size) {
		const int whole = utf8_decode(t->data + i, t->size - i, &code);
		text_append(&clean, whole ? t->data + i : "\xef\xbf\xbd", whole ? whole : 3);
		size = whole ? whole : 1;
	}
	json_t *json = json_stringn(clean.data ? clean.data : "", clean.size);
	free(clean.data);
	return json;
}

static json_t *tokens_to_json(const int32_t *token, int64_t n)
{
	json_t *list = json_array();
	for (int64_t i = 0; i < n; i++)
		json_array_append_new(list, json_integer(token[i]));
	return list;
}

void results_add(struct results *r, const struct task *t, const struct sample_result *s)
{
	json_t *line = json_pack("{s:s, s:I, s:o, s:b}", "task", t->name, "line", (json_int_t)s->sample->line,
			t->type == TASK_PERPLEXITY ? "text" : "prompt", text_to_json(&s->sample->prompt),
			t->type == TASK_PERPLEXITY ? "several_windows" : "context_cut", s->cut);
	if (t->type == TASK_MULTIPLE_CHOICE) {
		json_t *options = json_array(), *prediction = json_object(), *correct = json_object();
		for (int i = 0; i < s->sample->num_choices; i++)
			json_array_append_new(options, json_pack("{s:o, s:f, s:I, s:o}", "text", text_to_json(&s->sample->choice[i]),
					"log_likelihood", s->text[i].log_likelihood, "bytes", (json_int_t)s->sample->choice[i].size,
					"tokens", tokens_to_json(s->text[i].token, s->text[i].num_tokens)));
		for (int i = 0; i < NUM_ACCURACIES; i++) {
			json_object_set_new(prediction, accuracy_names[i], json_integer(s->prediction[i]));
			json_object_set_new(correct, accuracy_names[i], json_boolean(s->prediction[i] == s->sample->answer));
		}
		json_object_set_new(line, "options", options);
		json_object_set_new(line, "answer", json_integer(s->sample->answer));
		json_object_set_new(line, "prediction", prediction);
		json_object_set_new(line, "correct", correct);
	} else if (t->type == TASK_PERPLEXITY) {
		json_object_set_new(line, "log_likelihood", json_real(s->text->log_likelihood));
		json_object_set_new(line, "tokens", json_integer(s->text->num_tokens));
		json_object_set_new(line, "words", json_integer(s->words));
		json_object_set_new(line, "bytes", json_integer((json_int_t)s->sample->prompt.size));
	} else {
		json_t *answers = json_array();
		for (int i = 0; i < s->sample->num_choices; i++)
			json_array_append_new(answers, text_to_json(&s->sample->choice[i]));
		json_object_set_new(line, "answers", answers);
		json_object_set_new(line, "reply", text_to_json(&s->reply));
		json_object_set_new(line, "tokens", tokens_to_json(s->text->token, s->text->num_tokens));
		json_object_set_new(line, "prediction", s->found ? text_to_json(&s->extracted) : json_null());
		json_object_set_new(line, "correct", json_boolean(s->correct));
	}
	char *text = json_text(line, JSON_COMPACT);
	fprintf(r->f, "%s\n", text);
	free(text);
	json_decref(line);
}

static json_t *result_to_json(const struct task_result *result)
{
	const struct task *t = result->task;
	json_t *scores = json_object();
	for (int i = 0; i < result->num_scores; i++) {
		const struct score *s = &result->score[i];
		json_object_set_new(scores, s->name, json_pack("{s:o, s:o}", "value", isfinite(s->value) ? json_real(s->value) : json_null(),
				"standard_error", isfinite(s->standard_error) ? json_real(s->standard_error) : json_null()));
	}
	json_t *json = json_pack("{s:s, s:s, s:s, s:I, s:o}", "name", t->name, "type", task_types[t->type], "data", t->data,
			"samples", (json_int_t)t->num_samples, "scores", scores);
	if (t->type == TASK_PERPLEXITY) {
		json_object_set_new(json, "tokens", json_integer(result->tokens));
		json_object_set_new(json, "words", json_integer(result->words));
		json_object_set_new(json, "bytes", json_integer(result->bytes));
		json_object_set_new(json, "documents_in_several_windows", json_integer(result->cut));
		return json;
	}
	json_object_set_new(json, "examples", json_integer(t->examples.count));
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

static json_t *results_to_json(const struct evaluation_facts *facts, const struct task_result *result, int64_t count)
{
	json_t *tasks = json_array();
	for (int64_t i = 0; i < count; i++)
		json_array_append_new(tasks, result_to_json(&result[i]));
	return json_pack("{s:s, s:s, s:o, s:I, s:o}", "model", facts->model, "tasks_file", facts->tasks, "tokenizer_hash",
			crc_to_json(facts->tokenizer_hash), "seq_len", (json_int_t)facts->seq_len, "tasks", tasks);
}

char *results_text(const struct evaluation_facts *facts, const struct task_result *result, int64_t count)
{
	json_t *json = results_to_json(facts, result, count);
	char *text = json_text(json, 0);
	json_decref(json);
	return text;
}

int results_finish(struct results *r, const struct evaluation_facts *facts, const struct task_result *result, int64_t count, bool failed)
{
	char path[PATH_LEN], temporary[PATH_LEN];
	int rc = file_close(r->f, r->temporary, failed ? -1 : 0);
	if (rc == 0 && (rc = path_join(path, r->dir, "results.json") < 0 || path_suffix(temporary, path, ".tmp") < 0 ? -1 : 0) == 0) {
		json_t *json = results_to_json(facts, result, count);
		rc = json_write(temporary, json);
		json_decref(json);
		if (rc == 0 && (rename(r->temporary, r->samples) < 0 || rename(temporary, path) < 0))
			rc = fail("%s: cannot rename to %s: %s", temporary, path, strerror(errno));
	}
	if (rc == 0)
		rc = sync_path(r->dir);
	else if (!failed)
		unlink(r->temporary);
	free(r);
	return rc;
}
