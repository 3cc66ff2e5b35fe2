/*
 * files/unicode.c - UTF-8, the classes of characters that tokenizers ask for, and the normal form NFC.
 */
#define _GNU_SOURCE
#include "files/unicode.h"

#include "files/base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

size_t utf8_valid(const char *text, size_t n)
{
	size_t i = 0;
	int32_t code;
	for (int size; i < n; i += size) {
		uint64_t eight;
		while (n - i >= sizeof eight && (memcpy(&eight, text + i, sizeof eight), !(eight & 0x8080808080808080)))
			i += sizeof eight;
		if (!(size = utf8_decode(text + i, n - i, &code)))
			break;
	}
	return i;
}

size_t utf8_whole(const char *text, size_t n)
{
	for (size_t back = 1; back <= 3 && back <= n; back++) {
		const uint8_t c = text[n - back];
		if (c >= 0xC0)
			return (c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2) > back ? n - back : n;
		if (c < 0x80)
			break;
	}
	return n;
}

size_t utf8_last(const char *text, size_t n)
{
	while (n && ((uint8_t)text[--n] & 0xC0) == 0x80)
		;
	return n;
}

bool is_space(int32_t c)
{
	return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
		c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

bool is_word(int32_t c)
{
	static const int32_t more[][2] = { /* circled and squared letters (Other_Alphabetic that are no marks); joiners */
		{0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}, {0x200C, 0x200D}};
	for (size_t i = 0; i < sizeof more / sizeof *more; i++)
		if (c >= more[i][0] && c <= more[i][1])
			return true;
	switch (utf8proc_category(c)) {
	case UTF8PROC_CATEGORY_LU: case UTF8PROC_CATEGORY_LL: case UTF8PROC_CATEGORY_LT: case UTF8PROC_CATEGORY_LM:
	case UTF8PROC_CATEGORY_LO: case UTF8PROC_CATEGORY_NL: case UTF8PROC_CATEGORY_ND: case UTF8PROC_CATEGORY_MN:
	case UTF8PROC_CATEGORY_MC: case UTF8PROC_CATEGORY_ME: case UTF8PROC_CATEGORY_PC:
		return true;
	default:
		return false;
	}
}

/* The common blocks that hold only such characters. */
bool nfc_begins(int32_t c)
{
	return c < 0x300 || (c >= 0x400 && c < 0x483) || (c >= 0x2010 && c < 0x2028) || (c >= 0x2030 && c < 0x205F) ||
		(c >= 0x3001 && c < 0x302A) || (c >= 0x3041 && c < 0x3097) || (c >= 0x30A1 && c < 0x30FB) ||
		(c >= 0x3400 && c < 0x4DC0) || (c >= 0x4E00 && c < 0xA000) || (c >= 0xAC00 && c < 0xD7A4) ||
		(c >= 0xFF01 && c < 0xFFF0) || (c >= 0x1F300 && c < 0x1FB00);
}

size_t nfc_plain(const char *text, size_t n)
{
	size_t i = 0;
	int32_t c = 0;
	for (int size; i < n; i += size) {
		size = 1;
		if ((uint8_t)text[i] >= 0xCC) { /* U+0300 and beyond */
			size = utf8_decode(text + i, n - i, &c);
			if (!nfc_begins(c))
				break;
		}
	}
	return i;
}

size_t nfc_last_cut(const char *text, size_t n)
{
	int32_t c = 0;
	for (size_t end = n; end; end = n) {
		n = utf8_last(text, end);
		if (utf8_decode(text + n, end - n, &c) && nfc_begins(c))
			break;
	}
	return n;
}

/* Characters that utf8proc would move or join and Hugging Face's NFC leaves where they are: those that are newer than
 * its Unicode 9, and U+11A7, which utf8proc 2.8 takes for the last part of a Hangul syllable. */
static bool nfc_ignores(int32_t c)
{
	static const int32_t ranges[][2] = { /* rising */
		{0x7FD, 0x7FD}, {0x898, 0x89F}, {0x8CA, 0x8D3}, {0x9FE, 0x9FE}, {0xC3C, 0xC3C},
		{0xD3B, 0xD3C}, {0xEBA, 0xEBA}, {0x11A7, 0x11A7}, {0x1715, 0x1715}, {0x1ABF, 0x1ACE},
		{0x1DF6, 0x1DFA}, {0xA82C, 0xA82C}, {0x10D24, 0x10D27}, {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF},
		{0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E},
		{0x11839, 0x1183A}, {0x11930, 0x11943}, {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47},
		{0x11A99, 0x11A99}, {0x11D42, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1},
		{0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}};
	for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
		if (c <= ranges[i][1])
			return c >= ranges[i][0];
	return false;
}

bool nfc_append(struct text *out, const char *text, size_t n)
{
	bool changed = false;
	while (n) {
		size_t plain = nfc_plain(text, n);
		if (plain < n) /* the last plain character may be joined with what follows */
			plain = utf8_last(text, plain);
		text_append(out, text, plain);
		text += plain, n -= plain;
		size_t end = 0; /* of the characters that are composed together */
		int32_t c = 0;
		for (int size; end < n; end += size) {
			size = utf8_decode(text + end, n - end, &c);
			if (end && (nfc_begins(c) || nfc_ignores(c)))
				break;
			if (!end && nfc_ignores(c)) {
				text_append(out, text, size);
				text += size, n -= size;
				break;
			}
		}
		if (!end)
			continue;
		uint8_t *composed;
		const ssize_t size = utf8proc_map((const uint8_t *)text, end, &composed, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
		if (size < 0) /* the text is valid */
			out_of_memory(end);
		changed |= (size_t)size != end || memcmp(composed, text, size);
		text_append(out, (const char *)composed, size);
		free(composed);
		text += end, n -= end;
	}
	return changed;
}
