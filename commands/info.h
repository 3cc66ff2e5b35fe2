/*
 * commands/info.h - `ling info`: parameters, memory, FLOPs, and the plan of a layout.
 */
#ifndef LING_COMMANDS_INFO_H
#define LING_COMMANDS_INFO_H

#include "files/config.h"
#include "commands/command.h"

#include <stdbool.h>

/* Usual sizes where a config has none, as those of configs/ that are only a model. */
void usual_sizes(struct config *c, int ranks);

/* Prints what a model needs for the config's seq_len and micro_batch. */
int print_info(const struct config *config, bool json);

/* Prints the config's layout for this many ranks, and all others that fit `room` bytes a rank while experts are balanced. */
int print_plan(const struct config *c, int ranks, double room, bool json);

extern const struct command info_command;

#endif
