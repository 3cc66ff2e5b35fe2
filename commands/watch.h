/*
 * commands/watch.h - `ling watch`: follows training runs in a terminal, by the files that they write. It only reads.
 */
#ifndef LING_COMMANDS_WATCH_H
#define LING_COMMANDS_WATCH_H

#include "commands/command.h"

extern const struct command watch_command;

#endif
