/*
 * commands/supervise.h - `ling supervise`: runs a training command, and starts it again after a crash or a hang.
 */
#ifndef LING_COMMANDS_SUPERVISE_H
#define LING_COMMANDS_SUPERVISE_H

#include "commands/command.h"

extern const struct command supervise_command;

#endif
