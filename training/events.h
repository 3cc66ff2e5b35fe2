/*
 * training/events.h - events.jsonl: what happened in a run besides its steps, for someone who reads it afterwards.
 *
 * One JSON object a line. Each has `time` (seconds since 1970, UTC), `step` (updates done when it happened) and `kind`;
 * the other members belong to the kind, see docs/stability.md. The file is only ever appended to: after an event
 * `resume` of step S, what earlier lines say about later steps than S was undone.
 */
#ifndef LING_TRAINING_EVENTS_H
#define LING_TRAINING_EVENTS_H

#include "files/base.h"

#include <jansson.h>
#include <stdint.h>

struct event_log { int fd; char path[PATH_LEN]; };

/* Opens RUN_DIR/events.jsonl, which it creates, for appending; a last line that is not complete is removed. */
int events_open(struct event_log *log, const char *run_dir);
/* Appends an event with one write(): it is there whole when the program is killed right after, and not at all when the
 * disk is full. members: an object with the members of that kind, which is released; NULL: none. A NaN or infinity
 * among them is written as null. Does nothing on a log that was not opened (fd -1). A failure is a warning on standard
 * error: what happened is more important than its record. */
void event_write(const struct event_log *log, int64_t step, const char *kind, json_t *members);
void events_close(struct event_log *log);
/* A number for the members of an event: null where it is not finite, which JSON cannot say. */
json_t *json_number(double x);

/* Calls `each` for every event of RUN_DIR/events.jsonl in its order, until it returns nonzero, and returns that, or 0
 * at the end; -1 when a line is no event. No file is no event. */
int events_read(const char *run_dir, int (*each)(void *context, const json_t *event), void *context);

#endif
