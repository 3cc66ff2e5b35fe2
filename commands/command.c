/*
 * commands/command.c - what several commands share.
 */
#define _GNU_SOURCE
#include "commands/command.h"

#include "files/base.h"
#include "files/config.h"
#include "files/convert.h"
#include "model/parameters.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool option_given(const struct command_line *line, const char *name)
{
	const struct command *c = line->command;
	int i = 0;
	while (i < c->num_options && strcmp(c->options[i].name, name))
		i++;
	assert(i < c->num_options);
	return line->given[i];
}

void command_say(const char *command, const char *format, ...)
{
	char text[4096];
	va_list arguments;
	va_start(arguments, format);
	vsnprintf(text, sizeof text, format, arguments);
	va_end(arguments);
	fprintf(stderr, "ling %s: %s\n", command, text);
}

int convert_parameters(const struct source_model *s, const struct model_config *c, const struct conversion *to,
		struct converted *result)
{
	struct model_config untied = *c;
	untied.tie_word_embeddings = false; /* so that lm_head.weight is listed */
	int n;
	struct parameter *parameters = global_parameters(&untied, &n);
	struct named_tensor *params = parameters ? calloc(n, sizeof *params) : NULL;
	int rc = params ? 0 : fail("out of memory for the names of the model's tensors");
	for (int i = 0; i < n && rc == 0; i++)
		params[i] = (struct named_tensor){.name = parameters[i].name, .rows = parameters[i].rows,
				.cols = parameters[i].cols};
	if (rc == 0)
		rc = convert_model(s, params, n, to, result);
	free(params);
	free(parameters);
	return rc;
}
