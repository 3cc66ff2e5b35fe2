/*
 * commands/info.h - `ling info`: parameters, memory and FLOPs of a model; with --ranks, memory and traffic of
 * each layout of ranks.
 */
#ifndef LING_COMMANDS_INFO_H
#define LING_COMMANDS_INFO_H

#include "commands/command.h"

extern const struct command info_command;

#endif
