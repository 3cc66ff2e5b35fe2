/*
 * commands/command.c - what several commands share.
 */
#define _GNU_SOURCE
#include "commands/command.h"

#include "files/config.h"

#include <assert.h>
#include <string.h>
#include <unistd.h>

bool option_given(const struct command_line *line, const char *name)
{
	const struct command *c = line->command;
	int i = 0;
	while (i < c->num_options && strcmp(c->options[i].name, name))
		i++;
	assert(i < c->num_options);
	return line->given[i];
}

void explain_run_directory(const char *dir)
{
	char path[PATH_LEN + 32];
	snprintf(path, sizeof path, "%s/metrics.jsonl", dir);
	if (access(path, F_OK) == 0)
		set_error("%s is the directory of a run; give one of its checkpoints, %s/step-NNNNNNN", dir, dir);
}

int read_model_config(struct model_config *c, const char *dir)
{
	if (config_from_huggingface(c, dir) == 0)
		return 0;
	explain_run_directory(dir);
	return -1;
}
