/*
 * commands/plan.h - `ling plan`: the model that reaches the lowest loss on a text, in a time, on this machine.
 */
#ifndef LING_COMMANDS_PLAN_H
#define LING_COMMANDS_PLAN_H

#include "commands/command.h"

extern const struct command plan_command;

#endif
