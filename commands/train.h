/*
 * commands/train.h - `ling train`.
 */
#ifndef LING_COMMANDS_TRAIN_H
#define LING_COMMANDS_TRAIN_H

#include "commands/command.h"

int command_train(const struct arguments *a);

#endif
