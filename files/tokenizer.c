/*
 * files/tokenizer.c - tokenizers: bytes, and byte-level BPE as Hugging Face's tokenizer.json describes it; encoding, decoding, the chat form.
 */
#define _GNU_SOURCE
#include "files/tokenizer.h"

#include "files/base.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <utf8proc.h>
#include <zlib.h>

int tokenizer_path(char out[PATH_LEN], const char *name)
{
	struct stat st;
	if (stat(name, &st) < 0)
		return fail("tokenizer `%s`: %s; expected byte, a tokenizer.json, or a directory that holds one", name, strerror(errno));
	if (S_ISDIR(st.st_mode))
		return path_join(out, name, "tokenizer.json");
	return path_copy(out, name);
}

/* ============================================================================================================
 * Tokenizers: bytes, and byte-level BPE as Hugging Face's tokenizer.json describes it
 * Text goes through levels, each of which cuts what the one before leaves: the added tokens that stand in the text as it is, the
 * NFC form and the added tokens in that, the regular expressions one after another. What the last one leaves is a word, and
 * its bytes are merged. Ids are those of Hugging Face's encode(text, add_special_tokens=False).
 * ========================================================================================================== */

#define BYTE_END 256
#define BYTE_DEFINITION "a byte is its token, 256 ends a document" /* what the byte tokenizer's hash is made from */

#define MAX_WORD INT32_MAX

uint32_t byte_tokenizer_hash(void)
{
	return crc32(0, (const uint8_t *)BYTE_DEFINITION, strlen(BYTE_DEFINITION));
}

/* -- text -- */

void append_string(struct text *out, const char *text)
{
	text_append(out, text, strlen(text));
}

void put_id(struct ids *out, int32_t id)
{
	out->id = grow(out->id, out->count, &out->capacity, 1, sizeof *out->id);
	out->id[out->count++] = id;
}

int utf8_decode(const char *text, size_t n, int32_t *code)
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

static bool is_space(int32_t c)
{
	return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) || c == 0x2028 ||
		c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/* \w of Rust's regular expressions: Alphabetic, marks, decimal digits, connectors, joiners. */
static bool is_word(int32_t c)
{
	static const int32_t letter_numbers_and_symbols[][2] = { /* Other_Alphabetic that is no mark */
		{0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}, {0x200C, 0x200D}};
	for (size_t i = 0; i < sizeof letter_numbers_and_symbols / sizeof *letter_numbers_and_symbols; i++)
		if (c >= letter_numbers_and_symbols[i][0] && c <= letter_numbers_and_symbols[i][1])
			return true;
	switch (utf8proc_category(c)) {
	case UTF8PROC_CATEGORY_LU: case UTF8PROC_CATEGORY_LL: case UTF8PROC_CATEGORY_LT: case UTF8PROC_CATEGORY_LM: case UTF8PROC_CATEGORY_LO:
	case UTF8PROC_CATEGORY_NL: case UTF8PROC_CATEGORY_ND: case UTF8PROC_CATEGORY_MN: case UTF8PROC_CATEGORY_MC: case UTF8PROC_CATEGORY_ME:
	case UTF8PROC_CATEGORY_PC:
		return true;
	default:
		return false;
	}
}

/* Whether NFC leaves a character as it is and joins it to nothing before it: text may be cut in front of it. False for many that are so too:
 * these are those that texts are made of. */
static bool nfc_begins(int32_t c)
{
	return c < 0x300 || (c >= 0x400 && c < 0x483) || (c >= 0x2010 && c < 0x2028) || (c >= 0x2030 && c < 0x205F) || (c >= 0x3001 && c < 0x302A) ||
		(c >= 0x3041 && c < 0x3097) || (c >= 0x30A1 && c < 0x30FB) || (c >= 0x3400 && c < 0x4DC0) || (c >= 0x4E00 && c < 0xA000) ||
		(c >= 0xAC00 && c < 0xD7A4) || (c >= 0xFF01 && c < 0xFFF0) || (c >= 0x1F300 && c < 0x1FB00);
}

/* Length of the longest beginning of valid text whose characters all begin something for NFC. */
static size_t nfc_plain(const char *text, size_t n)
{
	size_t i = 0;
	int32_t c;
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

/* Where the last character begins that NFC cuts in front of; 0 when there is none. */
static size_t nfc_last_cut(const char *text, size_t n)
{
	int32_t c;
	while (n && (((uint8_t)text[--n] & 0xC0) == 0x80 || !utf8_decode(text + n, 4, &c) || !nfc_begins(c)))
		;
	return n;
}

/* Characters that Hugging Face's NFC leaves where they are, because it is that of Unicode 9, and utf8proc's would move or join; and U+11A7, which
 * utf8proc 2.8 takes for the last part of a Hangul syllable. */
static bool nfc_ignores(int32_t c)
{
	static const int32_t young[][2] = {{0x7FD, 0x7FD}, {0x898, 0x89F}, {0x8CA, 0x8D3}, {0x9FE, 0x9FE}, {0xC3C, 0xC3C}, {0xD3B, 0xD3C}, {0xEBA, 0xEBA},
		{0x11A7, 0x11A7}, {0x1715, 0x1715}, {0x1ABF, 0x1ACE}, {0x1DF6, 0x1DFA}, {0xA82C, 0xA82C}, {0x10D24, 0x10D27}, {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF},
		{0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A}, {0x11930, 0x11943},
		{0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42},
		{0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF}};
	for (size_t i = 0; i < sizeof young / sizeof *young; i++)
		if (c <= young[i][1])
			return c >= young[i][0];
	return false;
}

/* Appends valid text in its NFC form. Returns whether anything of it differs. */
static bool nfc_append(struct text *out, const char *text, size_t n)
{
	bool changed = false;
	while (n) {
		size_t plain = nfc_plain(text, n);
		if (plain < n) /* the last plain character may be joined with what follows */
			while (plain && ((uint8_t)text[--plain] & 0xC0) == 0x80)
				;
		text_append(out, text, plain);
		text += plain, n -= plain;
		size_t end = 0;
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
		if (size < 0) {
			fprintf(stderr, "ling: NFC of %zu bytes: %s\n", end, utf8proc_errmsg(size));
			exit(1); /* out of memory: the text is valid */
		}
		changed |= (size_t)size != end || memcmp(composed, text, size);
		text_append(out, (const char *)composed, size);
		free(composed);
		text += end, n -= end;
	}
	return changed;
}

/* The byte-level alphabet: a printable character for each byte. Appends the bytes that a token's text stands for; false when one of its characters
 * is not of the alphabet. */
static bool alphabet_decode(struct text *out, const char *text, size_t n)
{
	int32_t c;
	for (int size; n; text += size, n -= size) {
		if (!(size = utf8_decode(text, n, &c)))
			return false;
		if (c >= 0x100) { /* the others, in order: 0 to 32, 127 to 160, 173 */
			c -= 0x100;
			c = c <= 32 ? c : c <= 66 ? c - 33 + 127 : c == 67 ? 173 : -1;
		} else if (c <= 32 || (c >= 127 && c <= 160) || c == 173)
			c = -1;
		if (c < 0)
			return false;
		text_append(out, &(char){c}, 1);
	}
	return true;
}

void alphabet_encode(struct text *out, const char *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		const int b = (uint8_t)bytes[i], c = b <= 32 ? 256 + b : b >= 127 && b <= 160 ? 256 + 33 + b - 127 : b == 173 ? 256 + 67 : b;
		if (c >= 0x80)
			append_string(out, (char[]){0xC0 | c >> 6, 0x80 | (c & 0x3F), 0});
		else
			append_string(out, (char[]){c, 0});
	}
}

/* -- hash tables -- */

uint64_t hash_text(const char *text, size_t n)
{
	uint64_t hash = n, eight;
	for (; n; n -= n < 8 ? n : 8, text += 8) {
		eight = 0;
		memcpy(&eight, text, n < 8 ? n : 8);
		hash = (hash ^ eight) * 0x9E3779B97F4A7C15;
		hash ^= hash >> 32;
	}
	return hash;
}

void words_free(struct words *w)
{
	free(w->bytes.data), free(w->word), free(w->slot);
}

/* Makes the table larger when it is half full. */
static void words_grow(struct words *w)
{
	if (w->slot && 2 * w->count < w->mask)
		return;
	free(w->slot);
	w->mask = w->mask ? 2 * w->mask + 1 : (1 << 12) - 1;
	w->slot = allocate((w->mask + 1) * sizeof *w->slot);
	for (size_t k = 0; k < w->count; k++) {
		size_t i = hash_text(w->bytes.data + w->word[k].at, w->word[k].size);
		while (w->slot[i & w->mask])
			i++;
		w->slot[i & w->mask] = k + 1;
	}
}

int64_t words_add(struct words *w, const char *text, size_t n, uint64_t times)
{
	if (n > MAX_WORD || w->count == INT32_MAX)
		return fail("%s", n > MAX_WORD ? "a word of more than 2^31 bytes" : "more than 2^31 distinct words");
	words_grow(w);
	for (size_t i = hash_text(text, n);; i++) {
		uint32_t *slot = &w->slot[i & w->mask];
		struct counted *c = &w->word[*slot - (*slot > 0)];
		if (*slot && (c->size != n || memcmp(w->bytes.data + c->at, text, n)))
			continue;
		if (!*slot) {
			w->word = grow(w->word, w->count, &w->capacity, 1, sizeof *w->word);
			w->word[w->count] = (struct counted){w->bytes.size, n, 0};
			text_append(&w->bytes, text, n);
			*slot = ++w->count;
			c = &w->word[w->count - 1];
		}
		c->count += times;
		return c - w->word;
	}
}

/* The slot of a text in the table by text: its own, or the empty one where it belongs. */
static int32_t *find_text(const struct tokenizer *t, const char *text, size_t n)
{
	for (size_t i = hash_text(text, n);; i++) {
		int32_t *slot = &t->by_text[i & t->by_text_mask];
		const struct token *token = &t->tokens[*slot < 0 ? 0 : *slot];
		if (*slot < 0 || (token->size == n && !memcmp(t->bytes.data + token->at, text, n)))
			return slot;
	}
}

/* A size of two to some power for a table of n entries, half full at most; its exponent. */
static int table_bits(size_t n)
{
	int bits = 4;
	while ((size_t)1 << bits < 2 * n)
		bits++;
	return bits;
}

/* -- regular expressions: Hugging Face's are Oniguruma's; said here in PCRE2's dialect. What means the same in both is copied, what does not is
 *    written out, and what has no use or no equal here is refused. Nothing may look back: text can then be cut at any border. -- */

static int refuse_pattern(const struct translation *r, size_t at, const char *what)
{
	return fail("%s: pattern: at byte %zu, `%.20s`: %s is not supported", r->where, at, r->pattern + at, what);
}

/* Translates an escape at i, within a class or not; *set: it stands for several characters. Returns its length, or -1. */
static int translate_escape(struct translation *r, size_t i, bool in_class, bool caseless, bool *set)
{
	static const char categories[] = " L Lu Ll Lt Lm Lo M Mn Mc Me N Nd Nl No P Pc Pd Ps Pe Pi Pf Po S Sm Sc Sk So Z Zs Zl Zp C Cc Cf Cn Co Cs ";
	const char *p = r->pattern + i;
	const size_t left = r->n - i;
	const char c = left > 1 ? p[1] : 0;
	char name[40], spaced[sizeof name + 2];
	int end = 0;
	*set = false;
	if ((c && strchr("rntf", c)) || ispunct((unsigned char)c)) {
		text_append(&r->out, p, 2);
		return 2;
	}
	if (c == 'u' && left >= 6 && sscanf(p + 2, "%4[0-9A-Fa-f]%n", name, &end) == 1 && end == 4 && strtol(name, NULL, 16)) {
		append_string(&r->out, "\\x{"), append_string(&r->out, name), append_string(&r->out, "}");
		return caseless && strtol(name, NULL, 16) > 127 ? refuse_pattern(r, i, "ignoring the case of this character") : 6;
	}
	*set = true;
	if (c == 'd' || c == 'D') {
		text_append(&r->out, p, 2);
		return 2;
	}
	if (c == 's' || c == 'S') {
		append_string(&r->out, in_class ? "" : "[");
		append_string(&r->out, c == 's' ? SPACE_CLASS : NOT_SPACE_CLASS);
		append_string(&r->out, in_class ? "" : "]");
		return 2;
	}
	if ((c == 'p' || c == 'P') && !caseless && sscanf(p + 2, "{%38[A-Za-z_^]}%n", name, &end) == 1 && end) {
		const bool negative = *name == '^';
		const char *property = name + negative;
		snprintf(spaced, sizeof spaced, " %s ", property);
		text_append(&r->out, (c == 'P') != negative ? "\\P{" : "\\p{", 3);
		append_string(&r->out, strstr(categories, spaced) ? "" : "sc:"); /* else a script: PCRE2 knows whether there is one */
		append_string(&r->out, property), append_string(&r->out, "}");
		return 2 + end;
	}
	return refuse_pattern(r, i, "this escape");
}

/* Length of {n}, {n,} or {n,m} at the beginning of text; 0 when there is none, or a ? or + follows that has another meaning there. */
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

int translate(struct translation *r)
{
	enum { MAX_DEPTH = 64 };
	static const char *const openings[] = {"(?:", "(?=", "(?!", "(?>", "(?i:"};
	static const char ligatures[] = " ff fi fl ss st "; /* ignoring case, these are also one character */
	bool caseless[MAX_DEPTH] = {false}, in_class = false, set = false, was_set, dash = false;
	char last = 0; /* the letter before, where case is ignored */
	size_t class_begin = 0;
	int depth = 0;
	for (size_t i = 0, n = r->n, size; i < n; i += size) {
		const char *p = r->pattern + i, c = *p;
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
			text_append(&r->out, p, 1);
			continue;
		}
		switch (c) {
		case '[':
			in_class = true;
			size = p[1] == '^' ? 2 : 1;
			class_begin = i + size;
			text_append(&r->out, p, size);
			break;
		case '(':
			for (size_t k = 0; p[1] == '?' && k < sizeof openings / sizeof *openings; k++)
				if (!strncmp(p, openings[k], strlen(openings[k])))
					size = strlen(openings[k]);
			if ((p[1] == '?' && size == 1) || depth == MAX_DEPTH - 1)
				return refuse_pattern(r, i, depth == MAX_DEPTH - 1 ? "so many groups in groups" : "this group");
			caseless[++depth] = ignores_case || size == strlen("(?i:");
			if (size == 1)
				append_string(&r->out, "(?:"); /* nobody asks for its text */
			text_append(&r->out, p, size == 1 ? 0 : size);
			break;
		case ')':
			depth -= depth > 0; /* PCRE2 complains */
			text_append(&r->out, p, 1);
			break;
		case '.': append_string(&r->out, "[^\\n]"); break;
		case ']': case '}': append_string(&r->out, c == ']' ? "\\]" : "\\}"); break;
		case '^': case '$': return refuse_pattern(r, i, "an anchor");
		case '{':
			if (!(size = repetition(p)))
				return refuse_pattern(r, i, "this repetition");
			text_append(&r->out, p, size);
			break;
		default:
			if (ignores_case && isalpha((unsigned char)c)) {
				last = tolower((unsigned char)c);
				if (before && strstr(ligatures, (char[]){' ', before, last, ' ', 0}))
					return refuse_pattern(r, i - 1, "ignoring the case of these two");
			}
			text_append(&r->out, p, 1);
		}
	}
	return 0;
}

/* Adds a level that cuts by a regular expression or, with PCRE2_LITERAL, by a plain text. `where` begins messages. */
static int add_split(struct tokenizer *t, const char *where, const char *pattern, size_t n, uint32_t options, bool drop_matches, bool drop_rest)
{
	struct translation r = {.where = where, .pattern = pattern, .n = n};
	append_string(&r.out, ""); /* an empty pattern has a text too */
	if (options & PCRE2_LITERAL)
		text_append(&r.out, pattern, n);
	else if (translate(&r) < 0) {
		free(r.out.data);
		return -1;
	}
	int error;
	size_t at;
	pcre2_code *code = pcre2_compile((const uint8_t *)r.out.data, r.out.size, PCRE2_UTF | (options ? options : PCRE2_UCP), &error, &at, NULL);
	if (!code) {
		char message[128] = "";
		pcre2_get_error_message(error, (uint8_t *)message, sizeof message);
		fail("%s: pattern: %s, at `%.20s` (as written for PCRE2)", where, message, r.out.data + at);
		free(r.out.data);
		return -1;
	}
	pcre2_jit_compile(code, PCRE2_JIT_COMPLETE | PCRE2_JIT_PARTIAL_HARD); /* where it cannot, matching is slower */
	struct split *more = allocate((t->num_splits + 1) * sizeof *more);
	if (t->num_splits)
		memcpy(more, t->splits, t->num_splits * sizeof *more);
	free(t->splits);
	t->splits = more;
	t->splits[t->num_splits++] = (struct split){code, drop_matches, drop_rest, r.out.data};
	return 0;
}

/* -- reading a tokenizer.json -- */

/* Fails when an object has a member whose name is not among `known`, which are separated by spaces. */
static int check_members(const json_t *object, const char *where, const char *known)
{
	const char *key;
	json_t *value;
	json_object_foreach((json_t *)object, key, value) {
		const char *found = strstr(known, key);
		const size_t n = strlen(key);
		while (found && ((found > known && found[-1] != ' ') || (found[n] && found[n] != ' ')))
			found = strstr(found + 1, key);
		if (!found || !n)
			return fail("%s: `%.40s` is not supported; expected %s", where, key, known);
	}
	return 0;
}

/* Reads a member that is true or false, `fallback` where it is missing: 1, 0 or -1. */
static int member_bool(const json_t *object, const char *where, const char *key, bool fallback)
{
	const json_t *v = json_object_get(object, key);
	if (v && !json_is_boolean(v))
		return fail("%s: `%s` is %s; expected true or false", where, key, json_kind(v));
	return v ? json_is_true(v) : fallback;
}

/* Whether a member is missing, null, or an empty text. */
static bool member_empty(const json_t *object, const char *key)
{
	const json_t *v = json_object_get(object, key);
	return !v || json_is_null(v) || (json_is_string(v) && !json_string_length(v));
}

/* model.vocab: the text of each id. */
static int read_vocab(struct tokenizer *t, const char *path, const json_t *vocab, int size)
{
	const char *key;
	json_t *value;
	const int bits = table_bits(size);
	t->size = size;
	t->tokens = allocate(size * sizeof *t->tokens);
	t->by_text = allocate(sizeof *t->by_text << bits);
	t->by_text_mask = ((size_t)1 << bits) - 1;
	memset(t->by_text, 0xFF, sizeof *t->by_text << bits);
	memset(t->byte_id, 0xFF, sizeof t->byte_id);
	json_object_foreach((json_t *)vocab, key, value) {
		const int32_t id = json_integer_value(value);
		if (t->tokens[id].known)
			return fail("%s: model: vocab: `%.40s` has id %d, which another token has too", path, key, id);
		struct token *token = &t->tokens[id];
		*token = (struct token){.at = t->bytes.size, .known = true};
		const bool spelled = alphabet_decode(&t->bytes, key, strlen(key));
		if (!spelled) { /* no merge makes it; it stands for itself */
			t->bytes.size = token->at;
			append_string(&t->bytes, key);
		}
		token->size = t->bytes.size - token->at;
		if (spelled)
			*find_text(t, t->bytes.data + token->at, token->size) = id;
		if (spelled && token->size == 1)
			t->byte_id[(uint8_t)t->bytes.data[token->at]] = id;
	}
	for (int i = 0; i < 256; i++)
		if (t->byte_id[i] < 0)
			return fail("%s: model: vocab: the token of byte %d is missing; only byte-level BPE, which has all 256, is supported", path, i);
	return 0;
}

/* The id of a token that a merge names, its text in the byte-level alphabet, or -1. */
static int32_t merge_part(struct tokenizer *t, const char *text, size_t n)
{
	const size_t at = t->bytes.size;
	const int32_t id = alphabet_decode(&t->bytes, text, n) ? *find_text(t, t->bytes.data + at, t->bytes.size - at) : -1;
	t->bytes.size = at;
	return id;
}

/* model.merges: "left right", or ["left", "right"], first come first merged. */
static int read_merges(struct tokenizer *t, const char *path, const json_t *merges)
{
	const size_t n = json_array_size(merges);
	const int bits = table_bits(n);
	t->merges_shift = 64 - bits;
	t->merges = allocate(sizeof *t->merges << bits);
	t->merged = allocate(n * sizeof *t->merged);
	t->num_merges = n;
	for (size_t i = 0; i < (size_t)1 << bits; i++)
		t->merges[i].rank = NO_RANK;
	for (size_t i = 0; i < n; i++) {
		const json_t *entry = json_array_get(merges, i), *left = json_array_get(entry, 0), *right = json_array_get(entry, 1);
		const char *text = json_string_value(entry), *space = text ? strchr(text, ' ') : NULL;
		const bool pair = json_array_size(entry) == 2 && json_is_string(left) && json_is_string(right);
		if (!pair && (!space || strchr(space + 1, ' ')))
			return fail("%s: model: merges: entry %zu is %s; expected \"left right\" or [\"left\", \"right\"]", path, i,
					text ? "a text without exactly one space" : json_kind(entry));
		const int32_t a = pair ? merge_part(t, json_string_value(left), json_string_length(left)) : merge_part(t, text, space - text);
		const int32_t b = pair ? merge_part(t, json_string_value(right), json_string_length(right))
			: merge_part(t, space + 1, json_string_length(entry) - (space + 1 - text));
		int32_t product = -1;
		if (a >= 0 && b >= 0) {
			const size_t at = t->bytes.size, size = (size_t)t->tokens[a].size + t->tokens[b].size;
			t->bytes.data = grow(t->bytes.data, at, &t->bytes.capacity, size + 1, 1);
			memcpy(t->bytes.data + at, t->bytes.data + t->tokens[a].at, t->tokens[a].size);
			memcpy(t->bytes.data + at + t->tokens[a].size, t->bytes.data + t->tokens[b].at, t->tokens[b].size);
			product = *find_text(t, t->bytes.data + at, size);
		}
		if (product < 0)
			return fail("%s: model: merges: entry %zu: %s is not in the vocabulary", path, i, a < 0 ? "the left token"
					: b < 0 ? "the right token" : "what it makes");
		*find_merge(t, a, b) = (struct merge){a, b, i, product}; /* of two entries for a pair the later counts */
		t->merged[i] = product;
	}
	return 0;
}

/* model. Options that matter only to characters that are not in the vocabulary (unk_token, fuse_unk, byte_fallback) have nothing to act on. */
static int read_model(struct tokenizer *t, const char *path, const json_t *root, const json_t *added)
{
	char where[PATH_LEN + 16];
	snprintf(where, sizeof where, "%s: model", path);
	const json_t *model = json_object_get(root, "model"), *type = json_object_get(model, "type"), *vocab = json_object_get(model, "vocab"),
		*merges = json_object_get(model, "merges"), *dropout = json_object_get(model, "dropout");
	if (!json_is_object(model))
		return fail("%s: `model` is %s; expected an object", path, json_kind(model));
	if (type && (!json_is_string(type) || strcmp(json_string_value(type), "BPE")))
		return fail("%s: `type` is %.40s; expected BPE", where, json_is_string(type) ? json_string_value(type) : json_kind(type));
	if (check_members(model, where, "type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk byte_fallback "
			"ignore_merges vocab merges") < 0)
		return -1;
	if (dropout && !json_is_null(dropout) && !(json_is_number(dropout) && json_number_value(dropout) == 0))
		return fail("%s: `dropout` is not supported; expected null", where);
	if (!member_empty(model, "continuing_subword_prefix") || !member_empty(model, "end_of_word_suffix"))
		return fail("%s: `%s` is not supported; expected null", where,
				member_empty(model, "continuing_subword_prefix") ? "end_of_word_suffix" : "continuing_subword_prefix");
	const int ignore_merges = member_bool(model, where, "ignore_merges", false);
	if (ignore_merges < 0)
		return -1;
	t->ignore_merges = ignore_merges;
	if (!json_is_object(vocab) || !json_is_array(merges))
		return fail("%s: `%s` is %s; expected %s", where, json_is_object(vocab) ? "merges" : "vocab",
				json_kind(json_is_object(vocab) ? merges : vocab), json_is_object(vocab) ? "an array" : "an object");

	int64_t size = 0, id;
	const char *key;
	json_t *value;
	json_object_foreach((json_t *)vocab, key, value) {
		if (field_int(vocab, where, key, 0, MAX_VOCAB - 1, &id) < 0)
			return -1;
		size = id < size ? size : id + 1;
	}
	for (size_t i = 0; i < json_array_size(added); i++) {
		snprintf(where, sizeof where, "%s: added_tokens", path);
		if (!json_is_object(value = json_array_get(added, i)))
			return fail("%s: entry %zu is %s; expected an object", where, i, json_kind(value));
		if (field_int(value, where, "id", 0, MAX_VOCAB - 1, &id) < 0)
			return -1;
		size = id < size ? size : id + 1;
	}
	if (json_array_size(merges) > MAX_VOCAB)
		return fail("%s: model: %zu merges; expected at most %d", path, json_array_size(merges), MAX_VOCAB);
	return read_vocab(t, path, vocab, size) < 0 ? -1 : read_merges(t, path, merges);
}

static int by_added_text(const void *a, const void *b)
{
	const struct added *x = a, *y = b;
	const int order = memcmp(x->text, y->text, x->size < y->size ? x->size : y->size);
	return order ? order : (x->size > y->size) - (x->size < y->size);
}

/* The id of the added token with a text, or -1. */
static int32_t added_id(const struct tokenizer *t, const char *text, size_t n)
{
	for (int k = 0; k < 2; k++)
		for (int i = 0; i < t->num_added[k]; i++) {
			const struct token *token = &t->tokens[t->added[k][i].id];
			if (token->size == n && !memcmp(t->bytes.data + token->at, text, n))
				return t->added[k][i].id;
		}
	return -1;
}

/* added_tokens. Hugging Face gives an added token the id of its text in the vocabulary, or the next free one, whatever the file says. */
static int read_added(struct tokenizer *t, const char *path, const json_t *list, size_t vocab_count)
{
	char where[PATH_LEN + 64];
	const size_t n = json_array_size(list);
	int64_t id, highest = -1;
	for (int k = 0; k < 2; k++)
		t->added[k] = allocate(n * sizeof **t->added);
	t->cuttable = true;
	for (size_t i = 0; i < n; i++) {
		const json_t *entry = json_array_get(list, i), *content = json_object_get(entry, "content");
		snprintf(where, sizeof where, "%s: added_tokens: entry %zu", path, i);
		if (check_members(entry, where, "id content single_word lstrip rstrip normalized special") < 0 ||
				field_int(entry, where, "id", 0, MAX_VOCAB - 1, &id) < 0)
			return -1;
		if (!json_is_string(content) || !json_string_length(content))
			return fail("%s: `content` is %s; expected a text", where, json_is_string(content) ? "empty" : json_kind(content));
		const char *text = json_string_value(content);
		const size_t size = json_string_length(content);
		const int special = member_bool(entry, where, "special", false), single_word = member_bool(entry, where, "single_word", false),
			lstrip = member_bool(entry, where, "lstrip", false), rstrip = member_bool(entry, where, "rstrip", false),
			normalized = member_bool(entry, where, "normalized", !special);
		if (special < 0 || single_word < 0 || lstrip < 0 || rstrip < 0 || normalized < 0)
			return -1;
		if (added_id(t, text, size) >= 0)
			return fail("%s: `%.40s` is there twice", where, text);
		int32_t given = merge_part(t, text, size);
		struct token *token = &t->tokens[given < 0 ? id : given];
		const bool known = token->known && token->size == size && !memcmp(t->bytes.data + token->at, text, size);
		if (given >= 0 && !known)
			return fail("%s: `%.40s` is in the vocabulary too, where it stands for other bytes", where, text);
		if (given < 0) /* not spelled in the alphabet: perhaps in the vocabulary all the same */
			given = known ? (int32_t)id : highest >= (int64_t)vocab_count ? (int32_t)highest + 1 : (int32_t)vocab_count;
		if (given != id)
			return fail("%s: `%.40s` has id %lld; Hugging Face's loader would give it %d", where, text, (long long)id, (int)given);
		if (token->added || (token->known && !known))
			return fail("%s: `%.40s` has id %lld, which another token has too", where, text, (long long)id);
		highest = id > highest ? id : highest;
		if (!known) {
			*token = (struct token){.at = t->bytes.size, .size = size, .known = true};
			text_append(&t->bytes, text, size);
		}
		token->added = true, token->special = special;

		struct text own = {0};
		if (normalized && t->nfc)
			nfc_append(&own, text, size);
		else
			text_append(&own, text, size);
		t->added[normalized][t->num_added[normalized]++] = (struct added){own.data, own.size, id, special, single_word, lstrip, rstrip};
		t->added_begin[normalized][(uint8_t)*own.data] = true;
		t->cuttable &= !single_word && !lstrip && !rstrip;
	}
	for (int k = 0; k < 2; k++)
		qsort(t->added[k], t->num_added[k], sizeof **t->added, by_added_text);
	return 0;
}

/* normalizer: null, NFC, or a Sequence of them. */
static int read_normalizer(struct tokenizer *t, const char *where, const json_t *normalizer)
{
	if (!normalizer || json_is_null(normalizer))
		return 0;
	const char *type = field_text(normalizer, where, "type");
	if (!type)
		return -1;
	if (!strcmp(type, "NFC")) {
		t->nfc = true;
		return check_members(normalizer, where, "type");
	}
	const json_t *list = json_object_get(normalizer, "normalizers");
	if (strcmp(type, "Sequence") || !json_is_array(list))
		return fail("%s: `%.40s` is not supported; expected null, NFC, or a Sequence of it", where, type);
	for (size_t i = 0; i < json_array_size(list); i++)
		if (read_normalizer(t, where, json_array_get(list, i)) < 0)
			return -1;
	return check_members(normalizer, where, "type normalizers");
}

/* Split: a pattern, as a regular expression or as it stands, and what becomes of it and of what is between. */
static int read_split(struct tokenizer *t, const char *where, const json_t *split)
{
	const json_t *pattern = json_object_get(split, "pattern"), *regex = json_object_get(pattern, "Regex"), *text = json_object_get(pattern, "String");
	const char *behavior = field_text(split, where, "behavior");
	const int invert = member_bool(split, where, "invert", false);
	if (!behavior || invert < 0 || check_members(split, where, "type pattern behavior invert") < 0)
		return -1;
	if (json_object_size(pattern) != 1 || !json_is_string(regex ? regex : text))
		return fail("%s: `pattern` is not supported; expected {\"Regex\": \"...\"} or {\"String\": \"...\"}", where);
	const bool removed = !strcmp(behavior, "Removed");
	if (!removed && strcmp(behavior, "Isolated"))
		return fail("%s: `behavior` %.40s is not supported; expected Isolated or Removed", where, behavior);
	if (!regex && !json_string_length(text))
		return fail("%s: `pattern` is empty", where);
	return add_split(t, where, json_string_value(regex ? regex : text), json_string_length(regex ? regex : text), regex ? 0 : PCRE2_LITERAL,
			removed && !invert, removed && invert);
}

#define GPT2_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* pre_tokenizer: ByteLevel, perhaps behind others, in a Sequence. *byte_level: it has come. */
static int read_pre_tokenizer(struct tokenizer *t, const char *where, const json_t *pre, bool *byte_level)
{
	const char *type = field_text(pre, where, "type");
	char inner[PATH_LEN + 64];
	if (!type)
		return -1;
	snprintf(inner, sizeof inner, "%s: %.20s", where, type);
	if (*byte_level)
		return fail("%s: is not supported behind ByteLevel", inner);
	if (!strcmp(type, "Sequence")) {
		const json_t *list = json_object_get(pre, "pretokenizers");
		if (!json_is_array(list))
			return fail("%s: `pretokenizers` is %s; expected an array", inner, json_kind(list));
		for (size_t i = 0; i < json_array_size(list); i++)
			if (read_pre_tokenizer(t, where, json_array_get(list, i), byte_level) < 0)
				return -1;
		return check_members(pre, inner, "type pretokenizers");
	}
	if (!strcmp(type, "Split"))
		return read_split(t, inner, pre);
	if (!strcmp(type, "Digits")) {
		const int individual = member_bool(pre, inner, "individual_digits", false);
		return individual < 0 || check_members(pre, inner, "type individual_digits") < 0 ? -1
			: add_split(t, inner, individual ? "\\p{N}" : "\\p{N}+", individual ? 5 : 6, 0, false, false);
	}
	if (!strcmp(type, "ByteLevel")) {
		const int space = member_bool(pre, inner, "add_prefix_space", true), regex = member_bool(pre, inner, "use_regex", true);
		if (space < 0 || regex < 0 || check_members(pre, inner, "type add_prefix_space trim_offsets use_regex") < 0)
			return -1;
		if (space)
			return fail("%s: `add_prefix_space` is not supported: decoding would not give the text back; expected false", inner);
		*byte_level = true;
		return regex ? add_split(t, inner, GPT2_PATTERN, strlen(GPT2_PATTERN), 0, false, false) : 0;
	}
	return fail("%s: is not supported; expected Split, Digits, ByteLevel, or a Sequence of them", inner);
}

/* decoder: ByteLevel, alone or in a Sequence; null is let pass: what ids stand for is known. */
static int check_decoder(const char *where, const json_t *decoder)
{
	if (!decoder || json_is_null(decoder))
		return 0;
	const char *type = field_text(decoder, where, "type");
	const json_t *list = json_object_get(decoder, "decoders");
	if (!type)
		return -1;
	if (!strcmp(type, "Sequence") && json_is_array(list)) {
		for (size_t i = 0; i < json_array_size(list); i++)
			if (check_decoder(where, json_array_get(list, i)) < 0)
				return -1;
		return 0;
	}
	return strcmp(type, "ByteLevel") ? fail("%s: `%.40s` is not supported; expected ByteLevel", where, type) : 0;
}

static void hash_add(struct tokenizer *t, const void *data, size_t n)
{
	t->hash = crc32_z(crc32_z(t->hash, (const uint8_t *)&(uint64_t){n}, 8), data, n);
}

/* Of what ids depend on, however the file says it. */
static void hash_tokenizer(struct tokenizer *t)
{
	for (int i = 0; i < t->size; i++) {
		const struct token *token = &t->tokens[i];
		hash_add(t, t->bytes.data + token->at, token->size);
		hash_add(t, (uint8_t[]){token->known, token->added, token->special}, 3);
	}
	const size_t slots = (size_t)1 << (64 - t->merges_shift);
	struct merge *list = allocate(t->num_merges * sizeof *list); /* by rank */
	for (size_t i = 0; i < slots; i++)
		if (t->merges[i].rank != NO_RANK)
			list[t->merges[i].rank] = t->merges[i];
	hash_add(t, list, t->num_merges * sizeof *list);
	free(list);
	for (int k = 0; k < 2; k++)
		for (int i = 0; i < t->num_added[k]; i++) {
			const struct added *a = &t->added[k][i];
			hash_add(t, a->text, a->size);
			hash_add(t, (uint8_t[]){k, a->special, a->single_word, a->lstrip, a->rstrip}, 5);
		}
	for (int i = 0; i < t->num_splits; i++) {
		hash_add(t, t->splits[i].pattern, strlen(t->splits[i].pattern));
		hash_add(t, (uint8_t[]){t->splits[i].drop_matches, t->splits[i].drop_rest}, 2);
	}
	hash_add(t, (uint8_t[]){t->nfc, t->ignore_merges}, 2);
	hash_add(t, &t->end, sizeof t->end);
}

/* The token that ends a document: eos_token of the tokenizer_config.json beside PATH, where there is one, else <|endoftext|>, else none. */
static int read_end(struct tokenizer *t, const char *path)
{
	char dir[PATH_LEN], config[PATH_LEN];
	parent_of(dir, path);
	const int there = path_join(config, dir, "tokenizer_config.json") < 0 ? -1 : path_exists(config);
	t->end = tokenizer_id(t, "<|endoftext|>");
	json_t *root = there > 0 ? json_read(config) : NULL;
	const json_t *eos = json_object_get(root, "eos_token"), *content = json_is_object(eos) ? json_object_get(eos, "content") : eos;
	int rc = there < 0 || (there && !root) ? -1 : 0;
	if (content && !json_is_null(content)) {
		t->end = json_is_string(content) ? tokenizer_id(t, json_string_value(content)) : -1;
		if (t->end < 0)
			rc = fail("%s: `eos_token` is %.40s; expected a token of %s", config,
					json_is_string(content) ? json_string_value(content) : json_kind(content), path);
	}
	json_decref(root);
	return rc;
}

int read_tokenizer(struct tokenizer *t, const char *path, const json_t *root)
{
	char where[PATH_LEN + 32];
	const json_t *added = json_object_get(root, "added_tokens"), *pre = json_object_get(root, "pre_tokenizer");
	bool byte_level = false;
	/* truncation, padding and post_processor change nothing that encode(add_special_tokens=False) gives, but for lengths that callers set. */
	if (check_members(root, path, "version truncation padding added_tokens normalizer pre_tokenizer post_processor decoder model") < 0)
		return -1;
	if (added && !json_is_array(added))
		return fail("%s: `added_tokens` is %s; expected an array", path, json_kind(added));
	snprintf(where, sizeof where, "%s: normalizer", path);
	if (read_normalizer(t, where, json_object_get(root, "normalizer")) < 0)
		return -1;
	snprintf(where, sizeof where, "%s: pre_tokenizer", path);
	if (!json_is_object(pre))
		return fail("%s: is %s; expected ByteLevel, perhaps behind others in a Sequence", where, json_kind(pre));
	if (read_pre_tokenizer(t, where, pre, &byte_level) < 0)
		return -1;
	if (!byte_level)
		return fail("%s: has no ByteLevel; only byte-level BPE is supported", where);
	snprintf(where, sizeof where, "%s: decoder", path);
	if (check_decoder(where, json_object_get(root, "decoder")) < 0 || read_model(t, path, root, added) < 0 ||
			read_added(t, path, added, json_object_size(json_object_get(json_object_get(root, "model"), "vocab"))) < 0 ||
			read_end(t, path) < 0)
		return -1;
	hash_tokenizer(t);
	return 0;
}

struct tokenizer *tokenizer_open(const char *name)
{
	struct tokenizer *t = allocate(sizeof *t);
	char path[PATH_LEN];
	if (!strcmp(name, BYTE_TOKENIZER)) {
		*t = (struct tokenizer){.bytes_only = true, .size = BYTE_VOCAB, .end = BYTE_END, .cuttable = true,
			.hash = byte_tokenizer_hash()};
		return t;
	}
	json_t *root = NULL;
	if (tokenizer_path(path, name) < 0 || !(root = json_read(path)) || read_tokenizer(t, path, root) < 0) {
		tokenizer_close(t);
		t = NULL;
	}
	json_decref(root);
	return t;
}

void tokenizer_close(struct tokenizer *t)
{
	if (!t)
		return;
	for (int k = 0; k < 2; k++) {
		for (int i = 0; i < t->num_added[k]; i++)
			free(t->added[k][i].text);
		free(t->added[k]);
	}
	for (int i = 0; i < t->num_splits; i++) {
		pcre2_code_free(t->splits[i].code);
		free(t->splits[i].pattern);
	}
	free(t->splits);
	free(t->tokens), free(t->bytes.data), free(t->by_text), free(t->merges), free(t->merged);
	free(t);
}

int tokenizer_size(const struct tokenizer *t)
{
	return t->size;
}

uint32_t tokenizer_hash(const struct tokenizer *t)
{
	return t->hash;
}

int32_t tokenizer_end(const struct tokenizer *t)
{
	return t->end;
}

int32_t tokenizer_id(const struct tokenizer *t, const char *token)
{
	const size_t n = strlen(token);
	if (t->bytes_only)
		return n == 1 ? (uint8_t)*token : -1;
	const int32_t id = added_id(t, token, n);
	return id >= 0 ? id : *find_text(t, token, n);
}

int tokenizer_bytes(const struct tokenizer *t, int32_t id)
{
	if (t->bytes_only)
		return id >= 0 && id < BYTE_END;
	return id >= 0 && id < t->size && !t->tokens[id].special ? (int)t->tokens[id].size : 0;
}

void tokenizer_decode(const struct tokenizer *t, int32_t id, bool special, struct text *out)
{
	if (t->bytes_only)
		text_append(out, &(char){id}, id >= 0 && id < BYTE_END);
	else if (id >= 0 && id < t->size && (special || !t->tokens[id].special))
		text_append(out, t->bytes.data + t->tokens[id].at, t->tokens[id].size);
	else
		text_append(out, "", 0);
}

/* -- encoding -- */

#define CACHE_BITS 15

#define SHORT_BITS 7

struct encoder *encoder_open(const struct tokenizer *t)
{
	struct encoder *e = allocate(sizeof *e);
	e->t = t;
	if (t->bytes_only)
		return e;
	e->cache = aligned_alloc(sizeof *e->cache, sizeof *e->cache << CACHE_BITS);
	e->match = pcre2_match_data_create(1, NULL);
	e->context = pcre2_match_context_create(NULL);
	e->stack = pcre2_jit_stack_create(1 << 15, 1 << 24, NULL);
	if (!e->cache || !e->match || !e->context || !e->stack) {
		fprintf(stderr, "ling: out of memory for an encoder\n");
		exit(1);
	}
	memset(e->cache, 0, sizeof *e->cache << CACHE_BITS);
	pcre2_jit_stack_assign(e->context, NULL, e->stack);
	return e;
}

void encoder_close(struct encoder *e)
{
	if (!e)
		return;
	free(e->cache), free(e->normal.data);
	if (e->words)
		words_free(e->words);
	free(e->words);
	pcre2_match_data_free(e->match);
	pcre2_match_context_free(e->context);
	pcre2_jit_stack_free(e->stack);
	free(e);
}

int merge_short(const struct tokenizer *t, int32_t *id, int n)
{
	uint32_t key[SHORT_WORD]; /* rank and place of the pair that begins at each id; NO_RANK: none, or merged into the one before */
	uint8_t next[SHORT_WORD], previous[SHORT_WORD];
	const int count = n;
#define PAIR(at, left, right) do { \
		const uint32_t rank = find_merge(t, left, right)->rank; \
		key[at] = rank == NO_RANK ? NO_RANK : rank << SHORT_BITS | (at); \
	} while (0)
	for (int i = 0; i < n; i++) {
		next[i] = i + 1, previous[i] = i - 1;
		if (i + 1 < n)
			PAIR(i, id[i], id[i + 1]);
	}
	key[n - 1] = NO_RANK;
	for (;;) {
		uint32_t best = NO_RANK;
		for (int i = 0; i < count; i++)
			best = key[i] < best ? key[i] : best;
		if (best == NO_RANK)
			break;
		const int i = best & (SHORT_WORD - 1), gone = next[i];
		id[i] = t->merged[best >> SHORT_BITS];
		id[gone] = -1, key[gone] = NO_RANK;
		next[i] = next[gone];
		if (next[i] < count) {
			previous[next[i]] = i;
			PAIR(i, id[i], id[next[i]]);
		} else
			key[i] = NO_RANK;
		if (i)
			PAIR(previous[i], id[previous[i]], id[i]);
	}
#undef PAIR
	n = 0;
	for (int i = 0; i < count; i++)
		if (id[i] >= 0)
			id[n++] = id[i];
	return n;
}

static void heap_push(uint64_t *heap, size_t *count, uint64_t key)
{
	size_t i = (*count)++;
	for (; i && heap[(i - 1) / 2] > key; i = (i - 1) / 2)
		heap[i] = heap[(i - 1) / 2];
	heap[i] = key;
}

static uint64_t heap_pop(uint64_t *heap, size_t *count)
{
	const uint64_t top = heap[0], last = heap[--*count];
	size_t i = 0;
	for (size_t child; (child = 2 * i + 1) < *count; i = child) {
		child += child + 1 < *count && heap[child + 1] < heap[child];
		if (heap[child] >= last)
			break;
		heap[i] = heap[child];
	}
	heap[i] = last;
	return top;
}

int64_t merge_long(const struct tokenizer *t, int32_t *id, int32_t n)
{
	struct link { uint32_t rank; int32_t next, previous; } *link = allocate(n * sizeof *link);
	uint64_t *heap = allocate(3 * (size_t)n * sizeof *heap); /* rank and place; what a merge has overtaken stays until it comes up */
	size_t count = 0;
	for (int32_t i = 0; i < n; i++) {
		link[i] = (struct link){i + 1 < n ? find_merge(t, id[i], id[i + 1])->rank : NO_RANK, i + 1, i - 1};
		if (link[i].rank != NO_RANK)
			heap_push(heap, &count, (uint64_t)link[i].rank << 32 | i);
	}
	while (count) {
		const uint64_t top = heap_pop(heap, &count);
		const int32_t i = (int32_t)top, gone = link[i].next;
		if (link[i].rank != top >> 32)
			continue;
		id[i] = t->merged[link[i].rank];
		id[gone] = -1, link[gone].rank = NO_RANK;
		link[i].next = link[gone].next;
		if (link[i].next < n)
			link[link[i].next].previous = i;
		for (int side = 0; side < 2; side++) { /* the pair that begins here, and the one that ends here */
			const int32_t left = side ? link[i].previous : i, right = left < 0 ? n : link[left].next;
			if (left < 0)
				continue;
			link[left].rank = right < n ? find_merge(t, id[left], id[right])->rank : NO_RANK;
			if (link[left].rank != NO_RANK)
				heap_push(heap, &count, (uint64_t)link[left].rank << 32 | left);
		}
	}
	free(heap), free(link);
	int32_t kept = 0;
	for (int32_t i = 0; i < n; i++)
		if (id[i] >= 0)
			id[kept++] = id[i];
	return kept;
}

/* Appends the ids of a word that the cache does not hold. */
static int encode_new_word(const struct tokenizer *t, const char *word, size_t n, struct ids *out)
{
	if (n > MAX_WORD)
		return fail("a word of %zu bytes: expected at most %d bytes without a place where the tokenizer may cut", n, MAX_WORD);
	out->id = grow(out->id, out->count, &out->capacity, n, sizeof *out->id);
	int32_t *id = out->id + out->count;
	if (t->ignore_merges && (id[0] = *find_text(t, word, n)) >= 0) {
		out->count++;
		return 0;
	}
	for (size_t i = 0; i < n; i++)
		id[i] = t->byte_id[(uint8_t)word[i]];
	out->count += n <= SHORT_WORD ? merge_short(t, id, n) : merge_long(t, id, n);
	return 0;
}

int encode_word(struct encoder *e, const char *word, size_t n, struct ids *out)
{
	if (e->words)
		return words_add(e->words, word, n, 1) < 0 ? -1 : 0;
	if (n > CACHED_BYTES)
		return encode_new_word(e->t, word, n, out);
	uint64_t text[CACHED_BYTES / 8] = {0}, hash = n;
	memcpy(text, word, n);
	for (int i = 0; i < CACHED_BYTES / 8; i++)
		hash = (hash ^ text[i]) * 0x9E3779B97F4A7C15;
	struct cached *c = &e->cache[hash >> (64 - CACHE_BITS)];
	out->id = grow(out->id, out->count, &out->capacity, CACHED_IDS, sizeof *out->id);
	if (c->size != n || memcmp(c->text, text, sizeof text)) {
		const int64_t before = out->count;
		if (encode_new_word(e->t, word, n, out) < 0)
			return -1;
		if (out->count - before > CACHED_IDS)
			return 0;
		memcpy(c->text, text, sizeof text);
		c->size = n, c->count = out->count - before;
		memcpy(c->id, out->id + before, c->count * sizeof *c->id);
		return 0;
	}
	memcpy(out->id + out->count, c->id, sizeof c->id);
	out->count += c->count;
	return 0;
}

/* The longest of list k of added tokens that stands at the beginning of text, or NULL. *more: some token is longer than this text, which it begins
 * with. */
static const struct added *added_at(const struct encoder *e, int k, const char *text, size_t n, bool *more)
{
	const struct added *list = e->t->added[k], *longest = NULL;
	int low = 0, high = e->t->num_added[k]; /* those that begin with text[0..depth) */
	size_t depth = 0;
	for (; low < high && depth < n; depth++) {
		const uint8_t c = text[depth];
		for (int side = 0; side < 2; side++) { /* the first that is not less than c there, and the first that is more */
			int first = low, last = high;
			while (first < last) {
				const int middle = first + (last - first) / 2;
				if (list[middle].size > depth && (uint8_t)list[middle].text[depth] >= c + side)
					last = middle;
				else
					first = middle + 1;
			}
			*(side ? &high : &low) = first;
		}
		if (low < high && list[low].size == depth + 1 && (e->special || !list[low].special))
			longest = &list[low];
	}
	*more = depth == n && low < high && list[high - 1].size > n;
	return longest;
}

/* Finds an added token of list k: the leftmost, of those that begin there the longest. One that stands within a word where it must not still hides
 * what begins inside it, as in Hugging Face's. 1 found, 0 not. */
static int find_added(const struct encoder *e, int k, const char *text, size_t n, size_t from, size_t done, bool open, struct found *f)
{
	int32_t c;
	for (size_t i = from; i < n; i++) {
		if (!e->t->added_begin[k][(uint8_t)text[i]])
			continue;
		bool more;
		const struct added *a = added_at(e, k, text + i, n - i, &more);
		if (more && open) {
			*f = (struct found){i, i, i, -1};
			return 0;
		}
		if (!a)
			continue;
		size_t begin = i, end = i + a->size;
		i = end - 1;
		if (a->single_word) {
			size_t back = begin;
			while (back && ((uint8_t)text[--back] & 0xC0) == 0x80)
				;
			if ((begin && utf8_decode(text + back, begin - back, &c) && is_word(c)) || (utf8_decode(text + end, n - end, &c) && is_word(c)))
				continue;
		}
		*f = (struct found){begin, end, end, a->id};
		while (a->lstrip && f->begin > done) {
			size_t back = f->begin;
			while (back && ((uint8_t)text[--back] & 0xC0) == 0x80)
				;
			if (!utf8_decode(text + back, f->begin - back, &c) || !is_space(c))
				break;
			f->begin = back;
		}
		for (int size; a->rstrip && (size = utf8_decode(text + f->end, n - f->end, &c)) && is_space(c); f->end += size)
			;
		return 1;
	}
	*f = (struct found){n, n, n, -1};
	return 0;
}

int find_match(const struct encoder *e, const struct split *s, const char *text, size_t n, size_t from, bool open, struct found *f)
{
	/* PCRE2's own limit, which ends hopeless searches, and beside it some steps for each byte: a run of spaces takes as many as it is long. */
	const size_t steps = 10000000 + 16 * (n - from);
	pcre2_set_match_limit(e->context, steps < UINT32_MAX ? steps : UINT32_MAX);
	const int rc = pcre2_match(s->code, (const uint8_t *)text, n, from, PCRE2_NO_UTF_CHECK | (open ? PCRE2_PARTIAL_HARD : 0), e->match, e->context);
	const size_t *at = pcre2_get_ovector_pointer(e->match);
	if (rc == PCRE2_ERROR_NOMATCH)
		*f = (struct found){n, n, n, -1};
	else if (rc == PCRE2_ERROR_PARTIAL)
		*f = (struct found){at[0], at[0], at[0], -1};
	else if (rc < 0) {
		char message[128] = "";
		pcre2_get_error_message(rc, (uint8_t *)message, sizeof message);
		return fail("the tokenizer's pattern %.100s: %s, in %zu bytes of text; expected text that it cuts into words: divide long runs of one character",
				s->pattern, message, n);
	} else {
		*f = (struct found){at[0], at[1], at[1], -1};
		int32_t c;
		if (at[0] == at[1]) /* nothing, between two characters: they are cut apart */
			f->next += from < n ? utf8_decode(text + at[1], n - at[1], &c) : 1;
	}
	return rc >= 0;
}

static int64_t encode_level(struct encoder *e, int level, const char *text, size_t n, size_t stop, bool open, struct ids *out);

/* The level that brings text into its NFC form. Borders in that are borders in the text where it is the same, or at its end, or at `stop`. */
static int64_t encode_normal(struct encoder *e, int level, const char *text, size_t n, size_t stop, bool open, struct ids *out)
{
	if (open)
		n = nfc_last_cut(text, n);
	int32_t c;
	const bool stops = stop < n && utf8_decode(text + stop, n - stop, &c) && nfc_begins(c);
	const size_t first = stops ? stop : n;
	if (nfc_plain(text, n) == n)
		return encode_level(e, level + 1, text, n, stop, open, out);
	e->normal.size = 0;
	bool changed = nfc_append(&e->normal, text, first);
	const size_t middle = e->normal.size;
	changed |= nfc_append(&e->normal, text + first, n - first);
	if (!changed)
		return encode_level(e, level + 1, text, n, stop, open, out);
	const int64_t before = out->count;
	const int64_t done = encode_level(e, level + 1, e->normal.data, e->normal.size, stops ? middle : SIZE_MAX, open, out);
	if (done < 0 || (size_t)done == e->normal.size)
		return done < 0 ? -1 : (int64_t)n;
	if (stops && (size_t)done == middle)
		return first;
	out->count = before;
	return 0;
}

/* Levels: 0 added tokens, 1 NFC where the tokenizer has it, 2 added tokens in that, then the regular expressions; behind the last one, a word.
 * Appends the ids of a text, as far as the first border at or behind `stop` and, where the text is open, which is to say goes on in an unknown way
 * behind n, as far as nothing that may come changes them. Returns where that is: text may be cut there, and encoded from there on. -1 on error. */
static int64_t encode_level(struct encoder *e, int level, const char *text, size_t n, size_t stop, bool open, struct ids *out)
{
	const struct tokenizer *t = e->t;
	if (level == 1)
		return t->nfc ? encode_normal(e, level, text, n, stop, open, out) : encode_level(e, level + 1, text, n, stop, open, out);
	if (level == 3 + t->num_splits)
		return open ? 0 : encode_word(e, text, n, out) < 0 ? -1 : (int64_t)n;
	const struct split *s = level >= 3 ? &t->splits[level - 3] : NULL;
	struct found f = {0};
	for (size_t done = 0;;) {
		const int found = s ? find_match(e, s, text, n, f.next, open, &f) : find_added(e, level / 2, text, n, f.next, done, open, &f);
		if (found < 0)
			return -1;
		if (f.begin > done) {
			const int64_t piece = s && s->drop_rest ? (int64_t)(f.begin - done)
				: encode_level(e, level + 1, text + done, f.begin - done, stop - done, open && !found, out);
			if (piece < 0)
				return -1;
			done += piece;
			if (done < f.begin || done >= stop)
				return done;
		}
		if (!found)
			return done;
		if (f.id >= 0)
			put_id(out, f.id);
		else if (f.end > f.begin && !(s->drop_matches) && encode_level(e, level + 1, text + f.begin, f.end - f.begin, SIZE_MAX, false, out) < 0)
			return -1;
		done = f.end;
		if (done >= stop || f.next > n)
			return done;
	}
}

int64_t encode_part(struct encoder *e, const char *text, size_t n, size_t stop, bool open, bool special, struct ids *out)
{
	size_t done = 0;
	int32_t c;
	e->special = special;
	if (e->t->bytes_only) {
		n = n < stop ? n : stop;
		out->id = grow(out->id, out->count, &out->capacity, n, sizeof *out->id);
		for (size_t i = 0; i < n; i++)
			out->id[out->count++] = (uint8_t)text[i];
		return n;
	}
	if (!e->t->cuttable)
		stop = open ? 0 : SIZE_MAX;
	if (open)
		n = utf8_whole(text, n);
	while (done < n && done < stop) {
		const size_t valid = utf8_valid(text + done, n - done);
		if (valid) {
			const int64_t piece = encode_level(e, 0, text + done, valid, stop - done, open && done + valid == n, out);
			if (piece < (int64_t)valid)
				return piece < 0 ? -1 : (int64_t)done + piece;
		}
		done += valid;
		size_t bad = 0;
		while (done + bad < n && !utf8_decode(text + done + bad, n - done - bad, &c))
			bad++;
		if (open && done + bad == n)
			break;
		if (bad && done < stop && encode_word(e, text + done, bad, out) < 0)
			return -1;
		done += done < stop ? bad : 0;
	}
	return done;
}

int encode(struct encoder *e, const char *text, size_t n, bool special, struct ids *out)
{
	return encode_part(e, text, n, SIZE_MAX, false, special, out) < 0 ? -1 : 0;
}

/* -- Ling's chat form: <role>HUMAN</role>question<role>ASSISTANT</role>answer, and so on, nothing between the messages; the end token stands
 *    behind a conversation that ends with an answer. The tags are tokens where the tokenizer has them. No content can pass for a tag: it is
 *    encoded as ordinary text, apart from what stands before and behind it. -- */

const char *chat_role(const char *role)
{
	static const char *const roles[][2] = {{"system", "SYSTEM"}, {"user", "HUMAN"}, {"human", "HUMAN"}, {"assistant", "ASSISTANT"},
		{"tool", "TOOL"}};
	for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
		if (!strcasecmp(role, roles[i][0]))
			return roles[i][1];
	return NULL;
}

/* Appends one of the form's own tokens: by its id, or as text where the tokenizer does not have it. */
static int chat_tag(struct encoder *e, const char *tag, struct ids *out)
{
	const int32_t id = tokenizer_id(e->t, tag);
	if (id < 0)
		return encode(e, tag, strlen(tag), false, out);
	put_id(out, id);
	return 0;
}

static int chat_opening(struct encoder *e, const char *role, struct ids *out)
{
	return chat_tag(e, "<role>", out) < 0 || encode(e, role, strlen(role), false, out) < 0 || chat_tag(e, "</role>", out) < 0 ? -1 : 0;
}

void append_loss_mask(struct text *loss_mask, const struct ids *out, bool value)
{
	for (const char byte = value; loss_mask && loss_mask->size < (size_t)out->count;)
		text_append(loss_mask, &byte, 1);
}

int chat_encode(struct encoder *e, const struct message *messages, int n, bool reply, struct ids *out, struct text *loss_mask)
{
	const char *role = "";
	append_loss_mask(loss_mask, out, false);
	for (int i = 0; i < n; i++) {
		char shown[64];
		if (!(role = chat_role(messages[i].role)))
			return fail("message %d: the role is `%s`; expected system, user, human, assistant or tool", i + 1,
					printable(shown, messages[i].role));
		if (chat_opening(e, role, out) < 0)
			return -1;
		append_loss_mask(loss_mask, out, false);
		if (encode(e, messages[i].content, messages[i].content_size, false, out) < 0)
			return -1;
		append_loss_mask(loss_mask, out, !strcmp(role, "ASSISTANT"));
	}
	if (reply) {
		if (chat_opening(e, "ASSISTANT", out) < 0)
			return -1;
		append_loss_mask(loss_mask, out, false);
	} else if (!strcmp(role, "ASSISTANT")) {
		if (tokenizer_end(e->t) < 0)
			return fail("the tokenizer has no end token; expected one, for it ends the assistant's reply");
		put_id(out, tokenizer_end(e->t));
		append_loss_mask(loss_mask, out, true);
	}
	return 0;
}

struct tokenizer *tokenizer_of_model(const char *dir, const char *name)
{
	char path[PATH_LEN];
	if (name)
		return tokenizer_open(name);
	int there = path_join(path, dir, "tokenizer.json") < 0 ? -1 : path_exists(path);
	if (there > 0)
		return tokenizer_open(path);
	if (there == 0)
		there = path_join(path, dir, "trainer.json") < 0 ? -1 : path_exists(path);
	json_t *root = there > 0 ? json_read(path) : NULL;
	if (there < 0 || (there && !root))
		return NULL;
	const char *named = json_string_value(json_at(root, "config.data.tokenizer"));
	struct tokenizer *t = NULL;
	if (named && strcmp(named, "none"))
		t = tokenizer_open(named);
	else
		set_error("%s: no tokenizer here: looked for tokenizer.json, and for data.tokenizer in trainer.json; name one with --tokenizer", dir);
	json_decref(root);
	return t;
}

void json_write_text(FILE *f, const char *text, size_t n)
{
	int32_t code;
	fputc('"', f);
	for (size_t i = 0; i < n;) {
		const int size = utf8_decode(text + i, n - i, &code);
		if (size == 0)
			fputs("\\ufffd", f);
		else if (code < ' ')
			fprintf(f, "\\u%04x", (unsigned)code);
		else {
			if (code == '"' || code == '\\')
				fputc('\\', f);
			fwrite(text + i, 1, size, f);
		}
		i += size ? size : 1;
	}
	fputc('"', f);
}

void append_ids(struct ids *out, const int32_t *id, int64_t n)
{
	out->id = grow(out->id, out->count, &out->capacity, n, sizeof *id);
	if (n)
		memcpy(out->id + out->count, id, n * sizeof *id);
	out->count += n;
}
