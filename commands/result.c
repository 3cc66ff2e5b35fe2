/*
 * commands/result.c - the result of a command, built once as JSON and printed as JSON or as text.
 */
#define _GNU_SOURCE
#include "commands/result.h"

#include "files/base.h"

#include <assert.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

void result_print(json_t *report, bool json, void (*print_text)(const json_t *report))
{
	if (json) {
		char *text = json_text(report, 0);
		printf("%s\n", text);
		free(text);
	} else
		print_text(report);
	json_decref(report);
}

json_t *result_number(double x)
{
	return isfinite(x) ? json_real(x) : json_null();
}

json_t *result_whole(double x)
{
	return fabs(x) < 0x1p63 ? json_integer(llround(x)) : json_null();
}

double result_double(const json_t *report, const char *path)
{
	const json_t *value = json_at(report, path);
	assert(json_is_number(value) || json_is_null(value));
	return json_is_number(value) ? json_number_value(value) : NAN;
}

int64_t result_integer(const json_t *report, const char *path)
{
	const json_t *value = json_at(report, path);
	assert(json_is_integer(value));
	return json_integer_value(value);
}

const char *result_text(const json_t *report, const char *path)
{
	const json_t *value = json_at(report, path);
	assert(json_is_string(value));
	return json_string_value(value);
}
