/*
 * commands/trace.h - `ling trace`: where the time of a training run went, and where its ranks are.
 */
#ifndef LING_COMMANDS_TRACE_H
#define LING_COMMANDS_TRACE_H

#include "commands/command.h"
#include "files/trace.h"

#include <jansson.h>
#include <stdint.h>

/* These three take the traces of one start of a run, list [count], count >= 1. docs/tracing.md has the members of the
 * results. */

/* Adds up a part of the run, and the newest `steps` steps that all the rings still hold one by one. */
json_t *trace_totals(const struct trace *list, int count, enum trace_part part, int64_t steps);

/* Where each rank is, and who is in the way, at `now` (seconds since 1970). */
json_t *trace_places(const struct trace *list, int count, double now);

/* Writes the records as a file of Chrome's trace events, which ui.perfetto.dev shows. "-": to standard output. */
int trace_write_events(const struct trace *list, int count, const char *path);

extern const struct command trace_command;

#endif
