/*
 * commands/bench.h - `ling bench`: how fast this machine trains, and how its cores share the work.
 */
#ifndef LING_COMMANDS_BENCH_H
#define LING_COMMANDS_BENCH_H

#include "commands/command.h"

extern const struct command bench_command;

#endif
