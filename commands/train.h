/*
 * commands/train.h - `ling train`: trains a model.
 */
#ifndef LING_COMMANDS_TRAIN_H
#define LING_COMMANDS_TRAIN_H

#include "commands/command.h"

extern const struct command train_command;

/* Creates a run's output directory and locks it. Returns a descriptor, which holds the lock as long as it is open, or
 * -1. */
int lock_directory(const char *dir);

#endif
