/*
 * commands/report.h - the result of a command is built once, as JSON, and printed in one of two forms: as JSON for
 * scripts, or as text for people, which is made from the same JSON.
 */
#ifndef LING_COMMANDS_REPORT_H
#define LING_COMMANDS_REPORT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* Prints a report on standard output, with `json` as one line of JSON, else by print_text(). Frees the report. */
void report_print(json_t *report, bool json, void (*print_text)(const json_t *report));

/* To build a report. Strings are made with json_bytes() and json_cstring() of files/base. Neither of these
 * returns NULL. */
json_t *report_number(double x); /* null when it is not finite: JSON has no NaN */
json_t *report_whole(double x);  /* rounded to a whole number; null when that does not fit an int64_t */

/* To print a report. `path` is dotted, as json_at() has it; a value that must be there. */
double report_double(const json_t *report, const char *path); /* NaN for null */
int64_t report_integer(const json_t *report, const char *path);
const char *report_text(const json_t *report, const char *path);

#endif
