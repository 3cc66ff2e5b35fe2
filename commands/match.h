/*
 * commands/match.h - what a PCRE2 pattern finds in a reply; numbers and punctuation in it.
 */
#ifndef LING_COMMANDS_MATCH_H
#define LING_COMMANDS_MATCH_H

#include "files/base.h"

#include <stdbool.h>

/* Whether a pattern compiles and, with `group`, has one. If not, *wrong says why, in words that fit after
 * "a pattern ". */
bool pattern_check(const char *pattern, bool group, char wrong[160]);

/* Appends the group of the first match in a text, or of the last one, of a pattern that pattern_check accepts: of
 * several groups the first that is not empty, as in lm-evaluation-harness. The text may hold any bytes. False where
 * the pattern does not match, or where matching takes more than PCRE2's limit of steps. */
bool pattern_extract(const char *pattern, bool last, const struct text *in, struct text *out);

/* Removes from a text, in place, each match of a pattern that pattern_check accepts: what \K leaves of it. Where
 * matching takes more than PCRE2's limit of steps, the rest stays. */
void pattern_remove(const char *pattern, struct text *text);

/* If a text is a number, makes it that number's plain form, in place: a - if it is below zero, digits, and a point and
 * digits if it is not whole; no zeros in front or behind, so that two numbers are equal where their texts are. Nothing
 * is rounded. A number is digits, perhaps with a decimal point and an exponent (e or E; the result has at most 1000
 * digits), perhaps with commas before each three digits of its whole part. Around it may be white space; a sign and a
 * currency sign (dollar, euro, pound, yen, rupee), in any order, in front; a percent sign or one of these behind, and
 * a point at the very end. They are ignored: 50% is 50. False, and the text as it was, if it is no number. */
bool plain_number(struct text *text);

/* Removes the ASCII punctuation of a text, in place, but not what numbers need: a - in front of one (not behind a
 * letter or digit), a point in one or in front of one that begins with it, and any mark between two digits. A comma
 * between thousands is removed. */
void remove_punctuation(struct text *text);

#endif
