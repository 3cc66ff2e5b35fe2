/*
 * files/tokenizer_pattern.h - the regular expressions of a tokenizer.json, which are Oniguruma's, in PCRE2's dialect.
 */
#ifndef LING_FILES_TOKENIZER_PATTERN_H
#define LING_FILES_TOKENIZER_PATTERN_H

#include "files/base.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdbool.h>
#include <stddef.h>

/* The members of a class that is Unicode's White_Space, which \s means in Hugging Face's regular expressions; and of
 * its complement. (PCRE2's own \s has U+180E too.) */
#define SPACE_CLASS "\\x{9}-\\x{D}\\x{20}\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}" \
	"\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
#define NOT_SPACE_CLASS "\\x{0}-\\x{8}\\x{E}-\\x{1F}\\x{21}-\\x{84}\\x{86}-\\x{9F}\\x{A1}-\\x{167F}" \
	"\\x{1681}-\\x{1FFF}" \
	"\\x{200B}-\\x{2027}\\x{202A}-\\x{202E}\\x{2030}-\\x{205E}\\x{2060}-\\x{2FFF}\\x{3001}-\\x{10FFFF}"

/* Appends a pattern of n bytes, which ends with a 0, in PCRE2's dialect. What means the same in both dialects is
 * copied, what does not is written out. An error, which begins with `where`, is what has no use in a tokenizer or no
 * equal in PCRE2; so are anchors and looking back: whether a pattern matches at a place must not depend on the text
 * before it, so that text can be cut between two matches. */
int tokenizer_pattern_translate(struct text *out, const char *where, const char *pattern, size_t n);

/* Compiles a pattern of n bytes, which ends with a 0; `literal`: it is text to be found as it is. *translated, which
 * the caller frees, is what PCRE2 got. NULL on error, which begins with `where`. */
pcre2_code *tokenizer_pattern_compile(const char *where, const char *pattern, size_t n, bool literal,
		char **translated);

#endif
