/*
 * commands/train.h - `ling train`: trains a model.
 */
#ifndef LING_COMMANDS_TRAIN_H
#define LING_COMMANDS_TRAIN_H

#include "commands/command.h"

extern const struct command train_command;

#endif
