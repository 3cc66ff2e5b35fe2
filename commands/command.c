/*
 * commands/command.c - what several commands share.
 */
#define _GNU_SOURCE
#include "commands/command.h"

#include "files/base.h"
#include "files/config.h"

#include <stdio.h>
#include <unistd.h>

const char *const format_names[] = {"hf", "checkpoint", "gguf", NULL}; /* in the order of enum model_format */

void explain_run(const char *dir)
{
	char path[PATH_LEN + 32];
	snprintf(path, sizeof path, "%s/metrics.jsonl", dir);
	if (access(path, F_OK) == 0)
		fail("%s is the directory of a run; give one of its checkpoints, %s/step-NNNNNNN", dir, dir);
}

int model_of_directory(struct model_config *c, const char *dir)
{
	if (config_from_huggingface(c, dir) == 0)
		return 0;
	explain_run(dir);
	return -1;
}
