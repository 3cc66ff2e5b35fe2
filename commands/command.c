/*
 * commands/command.c - what several commands share.
 */
#define _GNU_SOURCE
#include "commands/command.h"

#include <assert.h>
#include <string.h>

bool option_given(const struct command_line *line, const char *name)
{
	const struct command *c = line->command;
	int i = 0;
	while (i < c->num_options && strcmp(c->options[i].name, name))
		i++;
	assert(i < c->num_options);
	return line->given[i];
}
