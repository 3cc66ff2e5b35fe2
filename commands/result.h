/*
 * commands/result.h - the result of a command is built once, as JSON, and printed in one of two forms: as JSON for
 * scripts, or as text for people, which is made from the same JSON.
 */
#ifndef LING_COMMANDS_RESULT_H
#define LING_COMMANDS_RESULT_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* Prints a result on standard output, with `json` as one line of JSON, else by print_text(). Frees it. */
void result_print(json_t *report, bool json, void (*print_text)(const json_t *report));

/* To build one. Strings are made with json_bytes() and json_cstring() of files/base. Neither of these
 * returns NULL. */
json_t *result_number(double x); /* null when it is not finite: JSON has no NaN */
json_t *result_whole(double x);  /* rounded to a whole number; null when that does not fit an int64_t */

/* To print one. `path` is dotted, as json_at() has it; a value that must be there. */
double result_double(const json_t *report, const char *path); /* NaN for null */
int64_t result_integer(const json_t *report, const char *path);
const char *result_text(const json_t *report, const char *path);

#endif
