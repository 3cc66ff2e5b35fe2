/*
 * commands/command.h - what a command is: its name, its options as a table, and the function that runs it; and what
 * several commands share.
 *
 * Each command defines one struct command. main.c has the list of them, and options.c reads a command line into the
 * command's own struct of options. All of it is constant data, from which help texts and the manual page are made.
 */
#ifndef LING_COMMANDS_COMMAND_H
#define LING_COMMANDS_COMMAND_H

#include "files/base.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* The exit statuses of the program, and what a command's run() returns. After any but EXIT_DONE and EXIT_STOPPED
 * error_text says why. EXIT_STOPPED: a signal asked a run to stop; it is saved, and the same command continues.
 * EXIT_GO_BACK: a run must continue from an earlier checkpoint: too many spikes, or weights that are not finite. */
enum { EXIT_DONE = 0, EXIT_WORK_FAILED = 1, EXIT_WRONG_USE = 2, EXIT_STOPPED = 3, EXIT_GO_BACK = 4 };

enum option_type {
	OPTION_FLAG,                 /* no argument; sets a bool */
	OPTION_WHOLE,                /* a whole number in min..max; an int, int64_t or uint64_t */
	OPTION_NUMBER,               /* a number in low..high; a double */
	OPTION_SIZE,                 /* a size such as 256GB; a double, in bytes */
	OPTION_CHOICE,               /* one of `choices`; an int, the index of it */
	OPTION_TEXT,                 /* a const char * */
	OPTION_TEXTS,                /* may be given several times; a struct strings */
	OPTION_PRINT,                /* no argument; calls print(stdout) and ends the program */
};

struct command_option {
	const char *name;            /* without the dashes */
	const char *argument;        /* what the help calls its argument; NULL where it takes none */
	enum option_type type;
	size_t offset, size;         /* of the value in the command's struct of options; bytes */
	const char *help;
	const char *initial;         /* the default, written as on a command line; NULL: all bytes of the value are 0 */
	bool required;
	int64_t min, max;            /* of OPTION_WHOLE */
	double low, high;            /* of OPTION_NUMBER */
	bool above;                  /* low itself is not allowed */
	const char *const *choices;  /* of OPTION_CHOICE; NULL ends them */
	void (*print)(FILE *out);    /* of OPTION_PRINT */
};

/* One row of a table of options for each type: s is the tag of the command's struct of options, field the value's
 * place in it. More members may follow, such as .initial = "8". A field of a wrong C type does not compile. */
#define OPTION_ROW(s, field, value_size, option_name, option_argument, option_type, option_help, ...) \
	{.name = option_name, .argument = option_argument, .type = option_type, .offset = offsetof(struct s, field), \
	.size = value_size, .help = option_help, __VA_ARGS__}
#define OPTION_SIZE_OF(s, field, type) _Generic(((struct s *)0)->field, type: sizeof(type))
#define FLAG_OPTION(s, field, name, help, ...) \
	OPTION_ROW(s, field, OPTION_SIZE_OF(s, field, bool), name, NULL, OPTION_FLAG, help, __VA_ARGS__)
#define WHOLE_OPTION(s, field, name, argument, from, to, help, ...) \
	OPTION_ROW(s, field, \
	_Generic(((struct s *)0)->field, int: sizeof(int), int64_t: sizeof(int64_t), uint64_t: sizeof(uint64_t)), \
	name, argument, OPTION_WHOLE, help, .min = from, .max = to, __VA_ARGS__)
#define NUMBER_OPTION(s, field, name, argument, from, to, help, ...) \
	OPTION_ROW(s, field, OPTION_SIZE_OF(s, field, double), name, argument, OPTION_NUMBER, help, \
	.low = from, .high = to, __VA_ARGS__)
#define SIZE_OPTION(s, field, name, help, ...) \
	OPTION_ROW(s, field, OPTION_SIZE_OF(s, field, double), name, "SIZE", OPTION_SIZE, help, __VA_ARGS__)
#define CHOICE_OPTION(s, field, name, argument, names, help, ...) \
	OPTION_ROW(s, field, OPTION_SIZE_OF(s, field, int), name, argument, OPTION_CHOICE, help, .choices = names, \
	__VA_ARGS__)
#define TEXT_OPTION(s, field, name, argument, help, ...) \
	OPTION_ROW(s, field, OPTION_SIZE_OF(s, field, const char *), name, argument, OPTION_TEXT, help, __VA_ARGS__)
#define TEXTS_OPTION(s, field, name, argument, help, ...) \
	OPTION_ROW(s, field, OPTION_SIZE_OF(s, field, struct strings), name, argument, OPTION_TEXTS, help, __VA_ARGS__)
#define PRINT_OPTION(option_name, function, option_help) \
	{.name = option_name, .type = OPTION_PRINT, .help = option_help, .print = function}

enum { ANY_NUMBER = INT32_MAX }; /* as max_words */

struct command_line;
struct model_config;

struct command {
	const char *name;
	const char *usage;           /* what follows `ling NAME`; a line for each way to call it */
	const char *help;
	int (*run)(const struct command_line *line); /* returns an exit status */
	int min_words, max_words;    /* words on the command line that are not options */
	size_t options_size;         /* bytes of its struct of options */
	const struct command_option *options; /* [num_options] */
	int num_options;
	/* what happens around run(), see main.c */
	bool computes;               /* runs the model's kernels, on all ranks; the matrix products are checked first */
	bool has_threads;            /* it computes nothing, but its threads wait for the disk, and should sleep then */
	bool measures_openblas;
	bool measures_peak;          /* the same for a moment, and only where no limit of memory is in the way */
	bool checks_products;        /* run() itself does */
	bool handles_signals;        /* run() itself does; else they end the program, once temporary files are removed */
	bool prints_progress;        /* its standard output is only progress: it need not be written */
};
#define COMMAND_OPTIONS(s, table) \
	.options_size = sizeof(struct s), .options = table, .num_options = sizeof table / sizeof *(table)

/* A command line that has been read. */
struct command_line {
	const struct command *command;
	void *options;               /* the command's struct of options */
	bool *given;                 /* [command->num_options] */
	char **words;                /* [num_words] those that are not options */
	int num_words;
};

/* Whether this option, which the command must have, was on the command line. */
bool option_given(const struct command_line *line, const char *name);

struct source_model;
struct conversion;
struct converted;
/* convert_model of files/convert.h, with the parameters that a model of this config has. */
int convert_parameters(const struct source_model *s, const struct model_config *c, const struct conversion *to,
		struct converted *result);

/* Writes a line to standard error: "ling COMMAND: " and the text, of which at most 4095 bytes. */
void command_say(const char *command, const char *format, ...) __attribute__((format(printf, 2, 3)));

enum { MAX_BATCH = 256 };      /* sequences that eval and generate compute together */

#endif
