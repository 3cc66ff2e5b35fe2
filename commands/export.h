/*
 * commands/export.h - `ling export`: the metrics of a run for other programs: CSV files, TensorBoard's event files.
 */
#ifndef LING_COMMANDS_EXPORT_H
#define LING_COMMANDS_EXPORT_H

#include "commands/command.h"
#include "commands/runs.h"

#include <stdio.h>

/* Each of these three writes a run to f, whose errors show when f is closed. */

/* A CSV file (RFC 4180, with "\n" between lines): a line with the names of the columns, which are those of
 * commands/runs.h, and a line for each step, with a field for each of them. A field is empty where the step does not
 * have it, and NaN where its number was not finite. expert_counts are not in it: see the next. */
void export_csv(FILE *f, const struct run *r);
/* A CSV file with the columns step, layer, expert, tokens: a line for each expert of each step that has expert_counts.
 * Layers are those with experts, from 0. */
void export_expert_counts(FILE *f, const struct run *r);
/* An event file of TensorBoard: records, as TensorFlow's TFRecord files have them, of which each is a message `Event`
 * (tensorboard/compat/proto/event.proto): the version of the format, and then for each step its number, when it ended,
 * and the values of all columns but `step` and expert_counts. Their names have "/" for ".", so that TensorBoard shows
 * those of a kind together, and "_" for a space. */
void export_tensorboard(FILE *f, const struct run *r);

extern const struct command export_command;

#endif
