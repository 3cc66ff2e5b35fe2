/*
 * commands/fit.h - `ling fit`: scaling laws from runs.
 */
#ifndef LING_COMMANDS_FIT_H
#define LING_COMMANDS_FIT_H

#include "commands/command.h"

extern const struct command fit_command;

#endif
