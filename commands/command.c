/*
 * commands/command.c - what several commands share.
 */
#define _GNU_SOURCE
#include "commands/command.h"

#include "files/checkpoint.h"
#include "files/config.h"
#include "parallel.h"

#include <assert.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

bool option_given(const struct command_line *line, const char *name)
{
	const struct command *c = line->command;
	int i = 0;
	while (i < c->num_options && strcmp(c->options[i].name, name))
		i++;
	assert(i < c->num_options);
	return line->given[i];
}

int find_model(char path[PATH_LEN], const char *word)
{
	char file[PATH_LEN];
	struct stat st;
	int found = 0, rc = path_join(file, word, "config.json");
	if (rc == 0 && stat(word, &st) == 0 && S_ISDIR(st.st_mode) && stat(file, &st) < 0) {
		found = checkpoint_newest(word, path);
		rc = found < 0 ? -1 : path_join(file, word, "metrics.jsonl");
		if (rc == 0 && !found && stat(file, &st) == 0)
			rc = fail("%s is the directory of a run that has no checkpoint yet", word);
	}
	if (rc == 0 && !found && snprintf(path, PATH_LEN, "%s", word) >= PATH_LEN)
		rc = fail("%.200s...: the path is too long", word);
	if (parallel_agree(rc) < 0)
		return -1;
	/* A run that goes on may save another checkpoint between the looks of two ranks. */
	if (parallel_same(crc32_z(0, (const void *)path, strlen(path)), "the newest checkpoint") < 0)
		return -1;
	if (found && parallel_rank() == 0)
		fprintf(stderr, "note: %s is a run: taking its newest checkpoint, %s\n", word, path);
	return 0;
}
