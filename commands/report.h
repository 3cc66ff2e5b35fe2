/*
 * commands/report.h - `ling report`: runs as one page for a browser, which needs no network.
 */
#ifndef LING_COMMANDS_REPORT_H
#define LING_COMMANDS_REPORT_H

#include "commands/command.h"

/* Writes the page about n runs as a new file. Of more than `points` steps of a run, equal numbers of neighbouring steps
 * become one point, with their mean, lowest and highest value. A run without a step is no error. */
int report_write(char *const *run_dirs, int n, int points, const char *path);

extern const struct command report_command;

#endif
