/*
 * commands/generate.h - `ling generate`: continues prompts.
 */
#ifndef LING_COMMANDS_GENERATE_H
#define LING_COMMANDS_GENERATE_H

#include "commands/command.h"

extern const struct command generate_command;

#endif
