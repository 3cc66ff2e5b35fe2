/*
 * commands/sweep.h - `ling sweep`: trains the runs of a grid.
 */
#ifndef LING_COMMANDS_SWEEP_H
#define LING_COMMANDS_SWEEP_H

#include "commands/command.h"

extern const struct command sweep_command;

#endif
