/*
 * commands/options.c - reads a command line by the command's table of options. argp, a part of the C library, takes
 * the options apart and prints the help; its tables are made here.
 */
#define _GNU_SOURCE
#include "commands/options.h"

#include "ling.h"

#include <argp.h>
#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

const char *argp_program_version = "ling " LING_VERSION; /* argp's own variable: what --version prints */

enum { FIRST_KEY = 256 };      /* argp's key of option i is FIRST_KEY + i; a smaller key would be a short option, -x */

/* The functions set_... read one value. They return false when the value does not suit the option, and error_text then
 * says what would. */

static bool set_whole(const struct command_option *o, void *place, const char *value)
{
	char *end;
	errno = 0;
	const long long number = strtoll(value, &end, 10);
	if (end == value || *end || errno || number < o->min || number > o->max) {
		if (o->max == INT64_MAX)
			set_error("a whole number, at least %lld", (long long)o->min);
		else
			set_error("a whole number from %lld to %lld", (long long)o->min, (long long)o->max);
		return false;
	}
	if (o->size == sizeof(int))
		*(int *)place = (int)number;
	else
		*(int64_t *)place = number; /* or a uint64_t: the bits are the same */
	return true;
}

static bool set_number(const struct command_option *o, double *place, const char *value)
{
	char *end;
	const double number = strtod(value, &end);
	*place = number;
	const bool in_range = (o->above ? number > o->low : number >= o->low) && number <= o->high; /* a NaN is not */
	if (end > value && !*end && in_range)
		return true;
	set_error(o->above ? "a number above %g and up to %g" : "a number from %g to %g", o->low, o->high);
	return false;
}

/* Whether an option's argument names a file: what the help calls it tells. */
static bool takes_path(const struct command_option *o)
{
	static const char *const paths[] = {"PREFIX", "DIR", "FILE", "FILE.yaml", "NAME", "PATH"};
	for (size_t i = 0; i < sizeof paths / sizeof *paths; i++)
		if (!strcmp(o->argument, paths[i]))
			return true;
	return false;
}

static bool set_text(const struct command_option *o, const char **place, const char *value)
{
	*place = value;
	const bool empty = !*value;
	if (!takes_path(o) || !(empty || is_home_path(value)))
		return true;
	set_error(empty ? "a path, found nothing: a shell variable may be unset" : "a path: " HOME_PATH_HINT);
	return false;
}

static bool set_size(double *place, const char *value)
{
	/* in upper or lower case: people write KB and kb for kB */
	static const struct { const char *name; double bytes; } units[] = {{"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9},
			{"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}};
	char *end;
	const double number = strtod(value, &end);
	for (size_t i = 0; i < sizeof units / sizeof *units; i++) {
		*place = number * units[i].bytes;
		if (end > value && !strcasecmp(end, units[i].name) && *place >= 1 && *place <= 1e18)
			return true;
	}
	set_error("a size in kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 256GB, and at most 1000000TB");
	return false;
}

static bool set_choice(const struct command_option *o, int *place, const char *value)
{
	char list[256] = "";
	for (int i = 0; o->choices[i]; i++) {
		if (!strcmp(value, o->choices[i])) {
			*place = i;
			return true;
		}
		snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "", o->choices[i]);
	}
	set_error("one of %s", list);
	return false;
}

/* Gives option o the value in the struct of options. False when the value does not suit it; error_text then says what
 * would. */
static bool set_option(const struct command_option *o, void *options, const char *value)
{
	void *place = (char *)options + o->offset;
	struct strings *list = place;
	size_t room;
	switch (o->type) {
	case OPTION_FLAG: *(bool *)place = true; return true;
	case OPTION_WHOLE: return set_whole(o, place, value);
	case OPTION_NUMBER: return set_number(o, place, value);
	case OPTION_SIZE: return set_size(place, value);
	case OPTION_CHOICE: return set_choice(o, place, value);
	case OPTION_TEXT: return set_text(o, place, value);
	case OPTION_TEXTS:
		room = list->count;
		list->text = grow(list->text, list->count, &room, 1, sizeof *list->text);
		list->text[list->count++] = (char *)value;
		return true;
	case OPTION_PRINT: o->print(stdout); exit(EXIT_DONE);
	}
	return false;
}

/* Checks that the command line has what its command needs. */
static void check_use(const struct command_line *line, struct argp_state *state)
{
	const struct command *c = line->command;
	for (int i = 0; i < c->num_options; i++)
		if (c->options[i].required && !line->given[i])
			argp_error(state, "--%s is required", c->options[i].name);
	if (line->num_words < c->min_words)
		argp_error(state, "too few arguments");
	if (line->num_words > c->max_words)
		argp_error(state, "unexpected '%s'", line->words[c->max_words]);
	for (int i = 0; i < line->num_words; i++)
		if (!*line->words[i])
			argp_error(state, "argument %d is empty: a shell variable may be unset", i + 1);
		else if (is_home_path(line->words[i]))
			argp_error(state, "%s: " HOME_PATH_HINT, line->words[i]);
}

/* argp calls this for each option, with its key and argument, then for the words that are left, and at the end. */
static error_t read_key(int key, char *value, struct argp_state *state)
{
	struct command_line *line = state->input;
	const int i = key - FIRST_KEY;
	if (i >= 0 && i < line->command->num_options) {
		const struct command_option *o = &line->command->options[i];
		line->given[i] = true;
		if (!set_option(o, line->options, value))
			argp_error(state, "--%s %s: expected %s", o->name, value, error_text);
		return 0;
	}
	switch (key) {
	case ARGP_KEY_ARGS:
		line->words = state->argv + state->next;
		line->num_words = state->argc - state->next;
		return 0;
	case ARGP_KEY_END: check_use(line, state); return 0;
	default: return ARGP_ERR_UNKNOWN;
	}
}

char *option_help(const struct command_option *o)
{
	struct text text = {0};
	text_append(&text, o->help, strlen(o->help));
	if (o->initial) {
		text_append(&text, " (default: ", 11);
		text_append(&text, o->initial, strlen(o->initial));
		text_append(&text, ")", 1);
	}
	if (o->required)
		text_append(&text, " (required)", 11);
	return text.data;
}

void command_line_read(struct command_line *line, const struct command *command, int argc, char **argv)
{
	const int n = command->num_options;
	struct argp_option *table = allocate((n + 1) * sizeof *table);
	*line = (struct command_line){.command = command, .options = allocate(command->options_size)};
	line->given = allocate(n * sizeof *line->given);
	for (int i = 0; i < n; i++) {
		const struct command_option *o = &command->options[i];
		table[i] = (struct argp_option){.name = o->name, .key = FIRST_KEY + i, .arg = o->argument,
				.doc = option_help(o)};
		const bool suits = !o->initial || set_option(o, line->options, o->initial);
		assert(suits);
		(void)suits;
	}
	const struct argp argp = {.options = n ? table : NULL, .parser = read_key, .args_doc = command->usage,
			.doc = command->help};
	argp_err_exit_status = EXIT_WRONG_USE;
	argp_parse(&argp, argc, argv, 0, NULL, line);
	for (int i = 0; i < n; i++)
		free((char *)table[i].doc);
	free(table);
}

void command_line_free(struct command_line *line)
{
	const struct command *c = line->command;
	for (int i = 0; c && i < c->num_options; i++)
		if (c->options[i].type == OPTION_TEXTS)
			free(((struct strings *)((char *)line->options + c->options[i].offset))->text);
	free(line->options);
	free(line->given);
}
