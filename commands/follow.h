/*
 * commands/follow.h - following a file of JSON lines that another program writes: metrics.jsonl, events.jsonl. Only
 * what is new is read. A last line without its end is waited for. A run that goes back cuts the file and writes other
 * lines in place of the old ones: what is not there any more is told before what is new.
 */
#ifndef LING_COMMANDS_FOLLOW_H
#define LING_COMMANDS_FOLLOW_H

#include "files/base.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct follow {
	char path[PATH_LEN];
	bool there;                  /* the file, at the last look */
	struct line_end { int64_t end; uint32_t crc; } *lines; /* [count] the lines that were read: where each ends */
	size_t count, room;
	/* Called with each new line, which has the number `count`; -1 on error. `context` goes to both. */
	int (*add)(void *context, const json_t *line);
	/* Called when of the `before` lines that were read only the first `count` are there still. It may set the member
	 * `count` to 0: then the others are read again. */
	void (*cut)(void *context, size_t count, size_t before);
	void *context;
};

/* Looks for what has changed. Returns 1 when something has, 0 when nothing has. -1 on error, such as a line that is no
 * JSON or that add() refuses: the lines before it are read, and the next call tries it again. A file that is not there
 * has no lines. */
int follow_look(struct follow *f);
void follow_free(struct follow *f);

#endif
