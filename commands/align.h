/*
 * commands/align.h - `ling align`: where two programs that should compute the same part.
 */
#ifndef LING_COMMANDS_ALIGN_H
#define LING_COMMANDS_ALIGN_H

#include "commands/command.h"

extern const struct command align_command;

#endif
