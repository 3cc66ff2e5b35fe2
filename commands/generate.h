/*
 * commands/generate.h - `ling generate`: continues prompts.
 */
#ifndef LING_COMMANDS_GENERATE_H
#define LING_COMMANDS_GENERATE_H

#include "commands/command.h"

int command_generate(const struct arguments *a);

#endif
