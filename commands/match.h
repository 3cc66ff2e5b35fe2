/*
 * commands/match.h - what a PCRE2 pattern finds in a reply.
 */
#ifndef LING_COMMANDS_MATCH_H
#define LING_COMMANDS_MATCH_H

#include "files/base.h"

#include <stdbool.h>

/* Whether a pattern compiles and has a group. If not, *wrong says why, in words that fit after "a pattern ". */
bool pattern_check(const char *pattern, char wrong[160]);

/* Appends group 1 of the first match in a text, or of the last one, of a pattern that pattern_check accepts. The text
 * may hold any bytes. False where the pattern does not match, or where matching takes more than PCRE2's limit of
 * steps. */
bool pattern_extract(const char *pattern, bool last, const struct text *in, struct text *out);

#endif
