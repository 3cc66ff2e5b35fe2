/*
 * commands/manual.h - the manual page and the completion for bash, made from the tables of the commands.
 */
#ifndef LING_COMMANDS_MANUAL_H
#define LING_COMMANDS_MANUAL_H

#include "commands/command.h"

#include <stdio.h>

/* Prints the manual page ling(1), in the macros of man(7). */
void manual_print(FILE *out, const struct command *const *commands, int num_commands);

/* Prints a script for bash that completes commands, options, and the values of options with a list of choices; what
 * else follows a command is completed as a file name. */
void completion_print(FILE *out, const struct command *const *commands, int num_commands);

#endif
