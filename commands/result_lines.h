/*
 * commands/result_lines.h - the results of `ling generate --out`: a file of JSON lines to which each is appended when
 * it is ready, and in which the same command finds later what is done.
 *
 * A line is the result of one draw of one prompt, in any order. Its members `prompt` and `draw` are their numbers, from
 * 0, and `made_with` is an object of all that the result depends on.
 */
#ifndef LING_COMMANDS_RESULT_LINES_H
#define LING_COMMANDS_RESULT_LINES_H

#include "files/base.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct result_lines {
	struct new_file lock;        /* against another process that writes the same file */
	int file;                    /* open for appending */
	int num_prompts, num_draws;
	json_t *made_with;           /* what all results depend on */
	const uint32_t *prompts;     /* [num_prompts] a checksum of each prompt */
	bool *done;                  /* [num_prompts, num_draws] */
	int64_t num_done;
};
/* Opens the file, or makes it, and reads what is done. An incomplete line at its end, which an interruption has left,
 * is removed, and a note says so. A file that holds anything else than results of these prompts, made so, is an error,
 * and stays as it is. Takes over made_with; prompts must live as long. Call result_lines_close after an error too. */
int result_lines_open(struct result_lines *f, const char *path, json_t *made_with, const uint32_t *prompts,
		int num_prompts, int num_draws);
/* Appends a result, which is freed, with its made_with. */
int result_lines_add(struct result_lines *f, int prompt, int draw, json_t *result);
/* Brings the file to disk. With rc, the caller's result so far, an error, it returns that. */
int result_lines_close(struct result_lines *f, int rc);

#endif
