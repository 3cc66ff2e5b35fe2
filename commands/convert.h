/*
 * commands/convert.h - `ling convert-checkpoint`: a model from one format to another.
 */
#ifndef LING_COMMANDS_CONVERT_H
#define LING_COMMANDS_CONVERT_H

#include "commands/command.h"

extern const struct command convert_command;

#endif
