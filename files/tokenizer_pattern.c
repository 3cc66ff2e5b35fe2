/*
 * files/tokenizer_pattern.c - the regular expressions of a tokenizer.json, which are Oniguruma's, in PCRE2's dialect.
 */
#define _GNU_SOURCE
#include "files/tokenizer_pattern.h"

#include "files/base.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct translation {
	struct text *out;
	const char *where;           /* begins messages */
	const char *pattern;
	size_t n;
};

/* fail(), naming what is not supported at byte `at` of the pattern. */
static int refuse_pattern(const struct translation *r, size_t at, const char *what)
{
	return fail("%s: pattern: at byte %zu, `%.20s`: %s is not supported", r->where, at, r->pattern + at, what);
}

/* Translates the escape at byte i. in_class: within [...]; caseless: within (?i:...). *set: it stands for several
 * characters. Returns its bytes, or -1. */
static int translate_escape(const struct translation *r, size_t i, bool in_class, bool caseless, bool *set)
{
	static const char categories[] = " L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So "
		"Z Zs Zl Zp C Cc Cf Cn Co Cs ";
	const char *p = r->pattern + i;
	const size_t left = r->n - i;
	const char c = left > 1 ? p[1] : 0;
	char name[40], spaced[sizeof name + 2];
	int end = 0;
	*set = false;
	if ((c && strchr("rntf", c)) || ispunct((unsigned char)c)) {
		text_append(r->out, p, 2);
		return 2;
	}
	if (c == 'u' && left >= 6 && sscanf(p + 2, "%4[0-9A-Fa-f]%n", name, &end) == 1 && end == 4 &&
			strtol(name, NULL, 16)) {
		text_append_string(r->out, "\\x{"), text_append_string(r->out, name), text_append_string(r->out, "}");
		if (caseless && strtol(name, NULL, 16) > 127)
			return refuse_pattern(r, i, "ignoring the case of this character");
		return 6;
	}
	*set = true;
	if (c == 'd' || c == 'D') {
		text_append(r->out, p, 2);
		return 2;
	}
	if (c == 's' || c == 'S') {
		text_append_string(r->out, in_class ? "" : "[");
		text_append_string(r->out, c == 's' ? SPACE_CLASS : NOT_SPACE_CLASS);
		text_append_string(r->out, in_class ? "" : "]");
		return 2;
	}
	if ((c == 'p' || c == 'P') && !caseless && sscanf(p + 2, "{%38[A-Za-z_^]}%n", name, &end) == 1 && end) {
		const bool negative = *name == '^';
		const char *property = name + negative;
		snprintf(spaced, sizeof spaced, " %s ", property);
		text_append(r->out, (c == 'P') != negative ? "\\P{" : "\\p{", 3);
		/* what is no category names a script; PCRE2 complains if there is none of that name */
		text_append_string(r->out, strstr(categories, spaced) ? "" : "sc:");
		text_append_string(r->out, property), text_append_string(r->out, "}");
		return 2 + end;
	}
	return refuse_pattern(r, i, "this escape");
}

/* Bytes of {n}, {n,} or {n,m} at the beginning of text. 0 when there is none, or when the two dialects read the ? or
 * + behind it differently. */
static int repetition(const char *text)
{
	const char *p = text + 1;
	const int low = strspn(p, "0123456789");
	p += low;
	const bool range = *p == ',';
	if (range)
		p += 1 + strspn(p + 1, "0123456789");
	if (!low || *p != '}' || p[1] == '+' || (!range && p[1] == '?'))
		return 0;
	return p + 1 - text;
}

int tokenizer_pattern_translate(struct text *out, const char *where, const char *pattern, size_t n)
{
	enum { MAX_DEPTH = 64 };
	const struct translation translation = {out, where, pattern, n}, *r = &translation;
	static const char *const openings[] = {"(?:", "(?=", "(?!", "(?>", "(?i:"};
	static const char ligatures[] = " ff fi fl ss st "; /* without case these equal single characters too */
	bool caseless[MAX_DEPTH] = {false}; /* of the groups around this place */
	int depth = 0;
	bool in_class = false, set = false, was_set, dash = false; /* dash: the - of a range */
	size_t class_begin = 0;
	char last = 0; /* the letter before this place, where case is ignored */
	for (size_t i = 0, size; i < n; i += size) {
		const char *p = pattern + i, c = *p;
		const bool was_dash = dash, ignores_case = caseless[depth];
		const char before = last;
		was_set = set, set = dash = false, last = 0, size = 1;
		if (c == '\\') {
			const int length = translate_escape(r, i, in_class, ignores_case, &set);
			if (length < 0)
				return -1;
			if (was_dash && set)
				return refuse_pattern(r, i, "a range that ends with a set");
			size = length;
			continue;
		}
		if (!c)
			return refuse_pattern(r, i, "a zero");
		if (ignores_case && (uint8_t)c >= 0x80)
			return refuse_pattern(r, i, "ignoring the case of this character");
		if (in_class) {
			if (c == '[' || (c == '&' && p[1] == '&'))
				return refuse_pattern(r, i, "a class in a class");
			if (c == ']' && i == class_begin)
				return refuse_pattern(r, i, "an empty class");
			if (c == '-' && was_set && p[1] != ']')
				return refuse_pattern(r, i, "a range that begins with a set");
			in_class = c != ']';
			dash = c == '-' && i > class_begin && p[1] != ']';
			text_append(r->out, p, 1);
			continue;
		}
		switch (c) {
		case '[':
			in_class = true;
			size = p[1] == '^' ? 2 : 1;
			class_begin = i + size;
			text_append(r->out, p, size);
			break;
		case '(':
			for (size_t k = 0; p[1] == '?' && k < sizeof openings / sizeof *openings; k++)
				if (!strncmp(p, openings[k], strlen(openings[k])))
					size = strlen(openings[k]);
			if ((p[1] == '?' && size == 1) || depth == MAX_DEPTH - 1)
				return refuse_pattern(r, i, depth == MAX_DEPTH - 1 ? "so many groups in groups" : "this group");
			caseless[++depth] = ignores_case || size == strlen("(?i:");
			if (size == 1)
				text_append_string(r->out, "(?:"); /* what it matches is not asked for */
			text_append(r->out, p, size == 1 ? 0 : size);
			break;
		case ')':
			depth -= depth > 0; /* PCRE2 complains */
			text_append(r->out, p, 1);
			break;
		case '.': text_append_string(r->out, "[^\\n]"); break;
		case ']': case '}': text_append_string(r->out, c == ']' ? "\\]" : "\\}"); break;
		case '^': case '$': return refuse_pattern(r, i, "an anchor");
		case '{':
			if (!(size = repetition(p)))
				return refuse_pattern(r, i, "this repetition");
			text_append(r->out, p, size);
			break;
		default:
			if (ignores_case && isalpha((unsigned char)c)) {
				last = tolower((unsigned char)c);
				if (before && strstr(ligatures, (char[]){' ', before, last, ' ', 0}))
					return refuse_pattern(r, i - 1, "ignoring the case of these two");
			}
			text_append(r->out, p, 1);
		}
	}
	return 0;
}

pcre2_code *tokenizer_pattern_compile(const char *where, const char *pattern, size_t n, bool literal,
		char **translated)
{
	struct text text = {0};
	text_append(&text, pattern, literal ? n : 0); /* an empty pattern has a text too */
	*translated = NULL;
	if (!literal && tokenizer_pattern_translate(&text, where, pattern, n) < 0) {
		free(text.data);
		return NULL;
	}
	int error;
	size_t at;
	const uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP);
	pcre2_code *code = pcre2_compile((const uint8_t *)text.data, text.size, options, &error, &at, NULL);
	if (!code) {
		char message[128] = "";
		pcre2_get_error_message(error, (uint8_t *)message, sizeof message);
		set_error("%s: pattern: %s, at `%.20s` (as written for PCRE2)", where, message, text.data + at);
		free(text.data);
		return NULL;
	}
	pcre2_jit_compile(code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD); /* without a JIT it is slower */
	*translated = text.data;
	return code;
}
