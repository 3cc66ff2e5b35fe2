/*
 * commands/match.c - what a PCRE2 pattern finds in a reply; numbers and punctuation in it.
 */
#define _GNU_SOURCE
#include "commands/match.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <ctype.h>
#include <stdint.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Compiles a pattern, which must have a group if `group`. NULL on error, with what is wrong. */
static pcre2_code *pattern_compile(const char *pattern, bool group, char wrong[160])
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
	if (groups || !group)
		return code;
	pcre2_code_free(code);
	strcpy(wrong, "without a group: put ( ) around what is to be extracted");
	return NULL;
}

bool pattern_check(const char *pattern, bool group, char wrong[160])
{
	pcre2_code *code = pattern_compile(pattern, group, wrong);
	pcre2_code_free(code);
	return code;
}

bool pattern_extract(const char *pattern, bool last, const struct text *in, struct text *out)
{
	char wrong[160];
	pcre2_code *code = pattern_compile(pattern, true, wrong); /* pattern_check has accepted it */
	pcre2_match_data *match = code ? pcre2_match_data_create_from_pattern(code, NULL) : NULL;
	size_t begin = 0, size = 0;
	bool matched = false;
	for (size_t at = 0; match && at <= in->size && (last || !matched);) {
		if (pcre2_match(code, (PCRE2_SPTR)(in->data ? in->data : ""), in->size, at, 0, match, NULL) < 0)
			break;
		const PCRE2_SIZE *v = pcre2_get_ovector_pointer(match);
		const uint32_t groups = pcre2_get_ovector_count(match);
		uint32_t g = 1;
		while (g < groups && (v[2 * g] == PCRE2_UNSET || v[2 * g + 1] <= v[2 * g]))
			g++;
		g = g < groups ? g : 1; /* all are empty */
		if (v[2 * g] != PCRE2_UNSET && v[2 * g + 1] >= v[2 * g])
			matched = true, begin = v[2 * g], size = v[2 * g + 1] - v[2 * g];
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

void pattern_remove(const char *pattern, struct text *text)
{
	char wrong[160];
	pcre2_code *code = pattern_compile(pattern, false, wrong); /* pattern_check has accepted it */
	pcre2_match_data *match = code ? pcre2_match_data_create_from_pattern(code, NULL) : NULL;
	struct text out = {0};
	size_t copied = 0; /* bytes of the text that are in `out` or left out */
	for (size_t at = 0; match && at <= text->size;) {
		if (pcre2_match(code, (PCRE2_SPTR)(text->data ? text->data : ""), text->size, at, 0, match, NULL) < 0)
			break;
		const PCRE2_SIZE *v = pcre2_get_ovector_pointer(match);
		if (v[1] > v[0] && v[0] >= copied) {
			text_append(&out, text->data + copied, v[0] - copied);
			copied = v[1];
		}
		at = v[1] > at ? v[1] : at + 1;
		while (at < text->size && ((uint8_t)text->data[at] & 0xc0) == 0x80)
			at++;
	}
	pcre2_match_data_free(match);
	pcre2_code_free(code);
	if (copied) {
		text_append(&out, text->data + copied, text->size - copied);
		free(text->data);
		*text = out;
	}
}

/* The bytes of the currency sign that n bytes begin with, or 0. */
static size_t currency(const char *s, size_t n)
{
	static const char *const signs[] = {"$", "\xe2\x82\xac", "\xc2\xa3", "\xc2\xa5", "\xef\xbf\xa5", "\xe2\x82\xb9"};
	for (size_t i = 0; i < sizeof signs / sizeof *signs; i++)
		if (n >= strlen(signs[i]) && !memcmp(s, signs[i], strlen(signs[i])))
			return strlen(signs[i]);
	return 0;
}

static bool is_digit(const char *s, size_t i, size_t n)
{
	return i < n && s[i] >= '0' && s[i] <= '9';
}

/* Whether s[i], of n bytes, is a comma between thousands: exactly three digits follow it. */
static bool is_thousands_comma(const char *s, size_t i, size_t n)
{
	return s[i] == ',' && is_digit(s, i + 1, n) && is_digit(s, i + 2, n) && is_digit(s, i + 3, n) &&
			!is_digit(s, i + 4, n);
}

/* Reads digits and at most one point from s[*i] on, of n bytes, into `digits` without the point, and moves *i past
 * them. Commas may stand between thousands. Returns how many of the digits stand behind the point. */
static int64_t read_digits(const char *s, size_t n, size_t *i, struct text *digits)
{
	const size_t begin = *i;
	bool commas = true; /* still allowed: in front of them are one to three digits, or another comma's three */
	int run = 0;        /* digits since the beginning or the last comma */
	for (;; ++*i) {
		if (is_digit(s, *i, n)) {
			text_append(digits, s + *i, 1);
			commas &= ++run <= 3 && s[begin] != '0';
		} else if (run && commas && *i < n && is_thousands_comma(s, *i, n)) {
			run = 0;
		} else
			break;
	}
	int64_t behind = 0;
	if (*i < n && s[*i] == '.' && (run || is_digit(s, *i + 1, n)))
		for (++*i; is_digit(s, *i, n); ++*i, behind++)
			text_append(digits, s + *i, 1);
	return behind;
}

/* Appends the plain form of a number: of its digits `behind` stand behind the point (below 0: so many zeros follow). */
static void append_number(struct text *out, bool below, const struct text *digits, int64_t behind)
{
	const char *d = digits->data, *end = d + digits->size;
	while (d < end && *d == '0')
		d++;
	for (; d < end && end[-1] == '0'; end--)
		behind--;
	const int64_t n = end - d, whole = n - behind; /* digits in front of the point; 0 or less: zeros behind it */
	if (!n) {
		text_append(out, "0", 1);
		return;
	}
	if (below)
		text_append(out, "-", 1);
	if (whole <= 0)
		text_append(out, "0.", 2);
	for (int64_t i = whole < 0 ? whole : 0; i < n || i < whole; i++) {
		if (i > 0 && i == whole)
			text_append(out, ".", 1);
		text_append(out, i < 0 || i >= n ? "0" : d + i, 1);
	}
}

bool plain_number(struct text *text)
{
	enum { MAX_DIGITS = 1000 };
	static const char minus[] = "\xe2\x88\x92"; /* U+2212 */
	const char *s = text->data;
	size_t n = text->size, i = 0, length = 0;
	bool below = false, sign = false, money = false;
	while (n && isspace((uint8_t)s[n - 1]))
		n--;
	while (i < n && isspace((uint8_t)s[i]))
		i++;
	for (; i < n; i += length) { /* in front */
		if (!sign && n - i >= 3 && !memcmp(s + i, minus, 3))
			sign = below = true, length = 3;
		else if (!sign && (s[i] == '-' || s[i] == '+'))
			sign = true, below = s[i] == '-', length = 1;
		else if (!money && (length = currency(s + i, n - i)))
			money = true;
		else if (!((sign || money) && s[i] == ' ' && (length = 1)))
			break;
	}
	struct text digits = {0}, plain = {0};
	int64_t behind = i < n ? read_digits(s, n, &i, &digits) : 0, exponent = 0;
	if (digits.size && i < n && (s[i] == 'e' || s[i] == 'E')) {
		const size_t at = i + 1 + (i + 1 < n && (s[i + 1] == '-' || s[i + 1] == '+'));
		if (is_digit(s, at, n)) {
			for (i = at; is_digit(s, i, n); i++)
				exponent = exponent < 10000 ? exponent * 10 + s[i] - '0' : exponent;
			behind += s[at - 1] == '-' ? exponent : -exponent;
		}
	}
	/* behind */
	while (i < n && s[i] == ' ')
		i++;
	i += i < n && s[i] == '%' ? 1 : money ? 0 : currency(s + i, n - i);
	i += i + 1 == n && s[i] == '.';
	const bool number = digits.size && i == n && digits.size <= MAX_DIGITS && exponent <= MAX_DIGITS;
	if (number) {
		append_number(&plain, below, &digits, behind);
		free(text->data);
		*text = plain;
	}
	free(digits.data);
	return number;
}

void remove_punctuation(struct text *text)
{
	const char *s = text->data;
	const size_t size = text->size;
	size_t n = 0;
	char before = 0; /* s[i - 1], which may be overwritten */
	for (size_t i = 0; i < size; i++) {
		const char c = s[i];
		const bool open = !isalnum((uint8_t)before); /* no word or number ends here */
		size_t number = i + 1; /* where the number begins whose sign c may be */
		number += currency(s + number, number < size ? size - number : 0);
		number += number < size && s[number] == '.';
		bool keep = !ispunct((uint8_t)c);
		keep |= c == '-' && open && is_digit(s, number, size);
		keep |= c == '.' && open && before != '.' && is_digit(s, i + 1, size);
		keep |= before >= '0' && before <= '9' && is_digit(s, i + 1, size) && !is_thousands_comma(s, i, size);
		if (keep)
			text->data[n++] = c;
		before = c;
	}
	if (text->data)
		text->data[n] = 0;
	text->size = n;
}
