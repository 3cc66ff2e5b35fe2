/*
 * commands/evaluate.h - `ling eval`: the loss on a token file, or scored tasks.
 */
#ifndef LING_COMMANDS_EVALUATE_H
#define LING_COMMANDS_EVALUATE_H

#include "commands/command.h"

extern const struct command eval_command;

#endif
