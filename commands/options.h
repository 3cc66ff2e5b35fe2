/*
 * commands/options.h - reads a command line by the command's table of options.
 */
#ifndef LING_COMMANDS_OPTIONS_H
#define LING_COMMANDS_OPTIONS_H

#include "commands/command.h"

/* Reads the words and options of a command, argv[0] being its name in messages. Ends the program after a wrong option
 * or number of words, with a message and EXIT_WRONG_USE, and after --help and the like. */
void command_line_read(struct command_line *line, const struct command *command, int argc, char **argv);
/* Also of a struct that is all zero. */
void command_line_free(struct command_line *line);

/* The help of an option, with its default. The caller frees it. */
char *option_help(const struct command_option *o);

#endif
