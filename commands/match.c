/*
 * commands/match.c - what a PCRE2 pattern finds in a reply.
 */
#define _GNU_SOURCE
#include "commands/match.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* Compiles a pattern. NULL on error, with what is wrong. */
static pcre2_code *pattern_compile(const char *pattern, char wrong[160])
{
	int error;
	uint32_t groups = 0;
	PCRE2_SIZE offset;
	pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_MATCH_INVALID_UTF,
			&error, &offset, NULL);
	if (!code) {
		PCRE2_UCHAR message[120];
		pcre2_get_error_message(error, message, sizeof message);
		snprintf(wrong, 160, "%s at byte %zu", (const char *)message, (size_t)offset);
		return NULL;
	}
	pcre2_pattern_info(code, PCRE2_INFO_CAPTURECOUNT, &groups);
	if (groups)
		return code;
	pcre2_code_free(code);
	strcpy(wrong, "without a group: put ( ) around what is to be extracted");
	return NULL;
}

bool pattern_check(const char *pattern, char wrong[160])
{
	pcre2_code *code = pattern_compile(pattern, wrong);
	pcre2_code_free(code);
	return code;
}

bool pattern_extract(const char *pattern, bool last, const struct text *in, struct text *out)
{
	char wrong[160];
	pcre2_code *code = pattern_compile(pattern, wrong); /* pattern_check has accepted it */
	pcre2_match_data *match = code ? pcre2_match_data_create_from_pattern(code, NULL) : NULL;
	size_t begin = 0, size = 0;
	bool matched = false;
	for (size_t at = 0; match && at <= in->size && (last || !matched);) {
		if (pcre2_match(code, (PCRE2_SPTR)(in->data ? in->data : ""), in->size, at, 0, match, NULL) < 0)
			break;
		const PCRE2_SIZE *v = pcre2_get_ovector_pointer(match);
		if (v[2] != PCRE2_UNSET && v[3] >= v[2])
			matched = true, begin = v[2], size = v[3] - v[2];
		at = v[1] > at ? v[1] : at + 1; /* after an empty match, or one that \K moved: the next character */
		while (at < in->size && ((uint8_t)in->data[at] & 0xc0) == 0x80)
			at++;
	}
	if (matched)
		text_append(out, in->data ? in->data + begin : "", size);
	pcre2_match_data_free(match);
	pcre2_code_free(code);
	return matched;
}
