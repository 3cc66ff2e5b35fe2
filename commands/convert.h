/*
 * commands/convert.h - `ling convert-checkpoint`: a model from one format to another.
 */
#ifndef LING_COMMANDS_CONVERT_H
#define LING_COMMANDS_CONVERT_H

#include "commands/command.h"

int command_convert(const struct arguments *a);

#endif
