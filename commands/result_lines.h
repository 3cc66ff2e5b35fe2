/*
 * commands/result_lines.h - the results of `ling generate --out`: a file of JSON lines to which each is appended when
 * it is ready, and in which the same command finds later what is done.
 *
 * A line is the result of one draw of one prompt, in any order. Its members `prompt` and `draw` are their numbers, from
 * 0; `made_with` has checksums of the model and the prompt, and the options on which the result depends.
 */
#ifndef LING_COMMANDS_RESULT_LINES_H
#define LING_COMMANDS_RESULT_LINES_H

#include "files/base.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

struct result_lines {
	/* what the results depend on and how many there are, set by the caller, who keeps it until result_lines_close */
	uint32_t model;              /* a checksum */
	const uint32_t *prompts;     /* [num_prompts] a checksum of each prompt */
	const char *options;         /* as text */
	int num_prompts, num_draws;
	/* the rest is 0 before result_lines_open */
	struct new_file lock;        /* against another process that writes the same file */
	int file;                    /* open for appending */
	bool *done;                  /* [num_prompts, num_draws] what the file had when it was opened */
};
/* Opens the file, or makes it, and reads what is done. An incomplete line at its end, which an interruption has left,
 * is removed, and a note says so. A file that holds anything else than results of these prompts, made so, is an error,
 * and stays as it is. Call result_lines_close after an error too. */
int result_lines_open(struct result_lines *f, const char *path);
/* Appends a result of a prompt, which is freed, with its made_with. */
int result_lines_add(struct result_lines *f, int prompt, json_t *result);
/* Brings the file to disk. With rc, the caller's result so far, an error, it returns that. */
int result_lines_close(struct result_lines *f, int rc);

#endif
