/*
 * files/unicode.h - UTF-8, the classes of characters that tokenizers ask for, and the normal form NFC.
 */
#ifndef LING_FILES_UNICODE_H
#define LING_FILES_UNICODE_H

#include "files/base.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Decodes the first character of n bytes: *code becomes its code point. Returns its bytes, 1 to 4; 0 when n is 0 or
 * no well-formed UTF-8 begins there (overlong forms, surrogates and code points above U+10FFFF are not). Not
 * utf8proc_iterate, which does the same: a call into a shared library for each character makes encoding text that is
 * not ASCII 5 % slower. */
static inline int utf8_decode(const char *text, size_t n, int32_t *code)
{
	const uint8_t *s = (const uint8_t *)text;
	if (n && s[0] < 0x80) {
		*code = s[0];
		return 1;
	}
	const int size = !n || s[0] < 0xC2 ? 0 : s[0] < 0xE0 ? 2 : s[0] < 0xF0 ? 3 : s[0] < 0xF5 ? 4 : 0;
	if (!size || n < (size_t)size)
		return 0;
	int32_t c = s[0] & (0x7F >> size);
	for (int i = 1; i < size; i++) {
		if ((s[i] & 0xC0) != 0x80)
			return 0;
		c = c << 6 | (s[i] & 0x3F);
	}
	if ((size == 3 && (c < 0x800 || (c >= 0xD800 && c < 0xE000))) || (size == 4 && (c < 0x10000 || c > 0x10FFFF)))
		return 0;
	*code = c;
	return size;
}

/* Bytes of the longest beginning of text that is well-formed UTF-8. */
size_t utf8_valid(const char *text, size_t n);
/* For a text of which more will come: n less the bytes of a character at the end that is not complete. */
size_t utf8_whole(const char *text, size_t n);
/* The last character of text[0 .. n): where it begins; 0 when n is 0. */
size_t utf8_last(const char *text, size_t n);

/* Unicode's White_Space, which \s means in Hugging Face's regular expressions. */
bool is_space(int32_t code);
/* \w in Rust's regular expressions: Alphabetic, marks, decimal digits, connectors, joiners. */
bool is_word(int32_t code);

/* -- NFC, as Hugging Face's tokenizers compute it. Text is well-formed UTF-8 -- */

/* Whether NFC leaves a character as it is and joins it to nothing before it, so that text may be cut in front of it.
 * Also false for some rare characters for which it would be true. */
bool nfc_begins(int32_t code);
/* Bytes of the longest beginning of text in which nfc_begins holds for all characters: NFC does not change them,
 * except that the last one may be joined with what follows. */
size_t nfc_plain(const char *text, size_t n);
/* Where the last character for which nfc_begins holds begins; 0 when there is none. */
size_t nfc_last_cut(const char *text, size_t n);
/* Appends text in NFC. Returns whether it differs from the text. */
bool nfc_append(struct text *out, const char *text, size_t n);

#endif
