/*
 * files/tokenizer_json.c - reading a tokenizer.json of byte-level BPE.
 */
#define _GNU_SOURCE
#include "files/tokenizer_json.h"

#include "files/base.h"
#include "files/collections.h"
#include "files/tokenizer_pattern.h"
#include "files/unicode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

/* -- the byte-level alphabet: a byte that is a printable Latin-1 character stands for itself, the others are U+0100
 *    and on, in order -- */

/* Appends the bytes that text in the alphabet stands for. False when a character is not of the alphabet. */
static bool byte_alphabet_decode(struct text *out, const char *text, size_t n)
{
	int32_t c;
	for (int size; n; text += size, n -= size) {
		if (!(size = utf8_decode(text, n, &c)))
			return false;
		if (c >= 0x100) { /* bytes 0 to 32, 127 to 160, 173 */
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

void byte_alphabet_append(struct text *out, const char *bytes, size_t n)
{
	for (size_t i = 0; i < n; i++) {
		const int b = (uint8_t)bytes[i];
		const int c = b <= 32 ? 256 + b : b >= 127 && b <= 160 ? 256 + 33 + b - 127 : b == 173 ? 256 + 67 : b;
		if (c >= 0x80)
			text_append_string(out, (char[]){0xC0 | c >> 6, 0x80 | (c & 0x3F), 0});
		else
			text_append_string(out, (char[]){c, 0});
	}
}

/* -- reading a tokenizer.json -- */

/* Fails when an object has a member whose name is not in `names`, in which a space is between two. */
static int check_members(const json_t *object, const char *where, const char *names)
{
	const char *key;
	json_t *value;
	json_object_foreach((json_t *)object, key, value) {
		const char *name = strstr(names, key);
		const size_t n = strlen(key);
		while (name && ((name > names && name[-1] != ' ') || (name[n] && name[n] != ' ')))
			name = strstr(name + 1, key);
		if (!name || !n)
			return fail("%s: `%.40s` is not supported; expected %s", where, key, names);
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

/* model.vocab: from the text of a token to its id. `size`: of the vocabulary, added tokens included. */
static int read_vocab(struct tokenizer *t, const char *path, const json_t *vocab, int size)
{
	const char *key;
	json_t *value;
	text_append(&t->bytes, "", 0); /* never NULL */
	t->size = size;
	t->tokens = allocate(size * sizeof *t->tokens);
	t->text_id = allocate(json_object_size(vocab) * sizeof *t->text_id);
	memset(t->byte_id, 0xFF, sizeof t->byte_id);
	json_object_foreach((json_t *)vocab, key, value) {
		const int32_t id = json_integer_value(value);
		struct token *token = &t->tokens[id];
		if (token->exists)
			return fail("%s: model: vocab: `%.40s` has id %d, which another token has too", path, key, id);
		*token = (struct token){.at = t->bytes.size, .exists = true};
		if (!byte_alphabet_decode(&t->bytes, key, strlen(key))) { /* no merge makes it; it stands for its own text */
			t->bytes.size = token->at;
			text_append_string(&t->bytes, key);
			token->size = t->bytes.size - token->at;
			continue;
		}
		const char *bytes = t->bytes.data + token->at;
		token->size = t->bytes.size - token->at;
		const int64_t number = string_table_add(&t->texts, bytes, token->size, 1);
		if (number < 0)
			return -1;
		t->text_id[number] = id;
		if (token->size == 1)
			t->byte_id[(uint8_t)*bytes] = id;
	}
	for (int i = 0; i < 256; i++)
		if (t->byte_id[i] < 0)
			return fail("%s: model: vocab: the token of byte %d is missing; only byte-level BPE, which has all 256, "
					"is supported", path, i);
	return 0;
}

/* The id of the token of model.vocab with a text in the byte-level alphabet; -1 when there is none. The end of
 * t->bytes serves as work space. */
static int32_t spelled_id(struct tokenizer *t, const char *text, size_t n)
{
	const size_t at = t->bytes.size;
	const bool spelled = byte_alphabet_decode(&t->bytes, text, n);
	const int32_t id = spelled ? find_text(t, t->bytes.data + at, t->bytes.size - at) : -1;
	t->bytes.size = at;
	return id;
}

/* The id of the token of model.vocab whose bytes are those of tokens a and b; -1 when there is none. */
static int32_t concatenated_id(struct tokenizer *t, int32_t a, int32_t b)
{
	const struct token *left = &t->tokens[a], *right = &t->tokens[b];
	const size_t at = t->bytes.size, size = (size_t)left->size + right->size;
	t->bytes.data = grow(t->bytes.data, at, &t->bytes.capacity, size + 1, 1);
	memcpy(t->bytes.data + at, t->bytes.data + left->at, left->size);
	memcpy(t->bytes.data + at + left->size, t->bytes.data + right->at, right->size);
	return find_text(t, t->bytes.data + at, size);
}

/* model.merges: "left right", or ["left", "right"]; an entry's index is its rank. */
static int read_merges(struct tokenizer *t, const char *path, const json_t *merges)
{
	const size_t n = json_array_size(merges);
	int bits = 4;
	while ((size_t)1 << bits < 2 * n)
		bits++;
	t->merges_shift = 64 - bits;
	t->merges = allocate(sizeof *t->merges << bits);
	t->merged = allocate(n * sizeof *t->merged);
	t->num_merges = n;
	for (size_t i = 0; i < (size_t)1 << bits; i++)
		t->merges[i].rank = NO_RANK;
	for (size_t i = 0; i < n; i++) {
		const json_t *entry = json_array_get(merges, i);
		const json_t *left = json_array_get(entry, 0), *right = json_array_get(entry, 1);
		const char *text = json_string_value(entry), *space = text ? strchr(text, ' ') : NULL;
		const bool pair = json_array_size(entry) == 2 && json_is_string(left) && json_is_string(right);
		if (!pair && (!space || strchr(space + 1, ' ')))
			return fail("%s: model: merges: entry %zu is %s; expected \"left right\" or [\"left\", \"right\"]",
					path, i, text ? "a text without exactly one space" : json_kind(entry));
		const int32_t a = pair ? spelled_id(t, json_string_value(left), json_string_length(left))
			: spelled_id(t, text, space - text);
		const int32_t b = pair ? spelled_id(t, json_string_value(right), json_string_length(right))
			: spelled_id(t, space + 1, json_string_length(entry) - (space + 1 - text));
		const int32_t merged = a >= 0 && b >= 0 ? concatenated_id(t, a, b) : -1;
		if (merged < 0)
			return fail("%s: model: merges: entry %zu: %s is not in the vocabulary", path, i, a < 0 ? "the left token"
					: b < 0 ? "the right token" : "what it makes");
		*find_merge(t, a, b) = (struct merge){a, b, i, merged}; /* of two entries for a pair the later one counts */
		t->merged[i] = merged;
	}
	return 0;
}

/* model. Its options for characters that are not in the vocabulary (unk_token, fuse_unk, byte_fallback) have no
 * effect: each byte has a token. */
static int read_model(struct tokenizer *t, const char *path, const json_t *root, const json_t *added)
{
	char where[PATH_LEN + 16];
	snprintf(where, sizeof where, "%s: model", path);
	const json_t *model = json_object_get(root, "model"), *type = json_object_get(model, "type");
	const json_t *vocab = json_object_get(model, "vocab"), *merges = json_object_get(model, "merges");
	const json_t *dropout = json_object_get(model, "dropout");
	if (!json_is_object(model))
		return fail("%s: `model` is %s; expected an object", path, json_kind(model));
	if (type && (!json_is_string(type) || strcmp(json_string_value(type), "BPE")))
		return fail("%s: `type` is %.40s; expected BPE", where,
				json_is_string(type) ? json_string_value(type) : json_kind(type));
	if (check_members(model, where, "type dropout unk_token continuing_subword_prefix end_of_word_suffix fuse_unk "
			"byte_fallback ignore_merges vocab merges") < 0)
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

/* Orders added tokens by the bytes of their text, for qsort; a beginning comes before what begins with it. */
static int compare_added(const void *a, const void *b)
{
	const struct added_token *x = a, *y = b;
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

int32_t token_of_text(const struct tokenizer *t, const char *text, size_t n)
{
	const int32_t id = added_id(t, text, n);
	return id >= 0 ? id : find_text(t, text, n);
}

/* added_tokens. Hugging Face's loader gives each the id of its text in model.vocab, or the next free one, whatever id
 * the file says; a file in which those differ is an error. vocab_count: entries of model.vocab. */
static int read_added(struct tokenizer *t, const char *path, const json_t *list, size_t vocab_count)
{
	char where[PATH_LEN + 64];
	const size_t n = json_array_size(list);
	int64_t id, highest = -1;
	for (int k = 0; k < 2; k++)
		t->added[k] = allocate(n * sizeof **t->added);
	t->context_free = true;
	for (size_t i = 0; i < n; i++) {
		const json_t *entry = json_array_get(list, i), *content = json_object_get(entry, "content");
		snprintf(where, sizeof where, "%s: added_tokens: entry %zu", path, i);
		if (check_members(entry, where, "id content single_word lstrip rstrip normalized special") < 0 ||
				field_int(entry, where, "id", 0, MAX_VOCAB - 1, &id) < 0)
			return -1;
		if (!json_is_string(content) || !json_string_length(content))
			return fail("%s: `content` is %s; expected a text", where,
					json_is_string(content) ? "empty" : json_kind(content));
		const char *text = json_string_value(content);
		const size_t size = json_string_length(content);
		const int special = member_bool(entry, where, "special", false);
		const int single_word = member_bool(entry, where, "single_word", false);
		const int lstrip = member_bool(entry, where, "lstrip", false);
		const int rstrip = member_bool(entry, where, "rstrip", false);
		const int normalized = member_bool(entry, where, "normalized", !special);
		if (special < 0 || single_word < 0 || lstrip < 0 || rstrip < 0 || normalized < 0)
			return -1;
		if (added_id(t, text, size) >= 0)
			return fail("%s: `%.40s` is there twice", where, text);
		int32_t expected = spelled_id(t, text, size);
		struct token *token = &t->tokens[expected < 0 ? id : expected];
		const bool in_vocab = token->exists && token->size == size && !memcmp(t->bytes.data + token->at, text, size);
		if (expected >= 0 && !in_vocab)
			return fail("%s: `%.40s` is in the vocabulary too, where it stands for other bytes", where, text);
		if (expected < 0) /* not spelled in the alphabet: perhaps in the vocabulary all the same */
			expected = in_vocab ? id : highest >= (int64_t)vocab_count ? highest + 1 : (int64_t)vocab_count;
		if (expected != id)
			return fail("%s: `%.40s` has id %lld; Hugging Face's loader would give it %d", where, text, (long long)id,
					(int)expected);
		if (token->added || (token->exists && !in_vocab))
			return fail("%s: `%.40s` has id %lld, which another token has too", where, text, (long long)id);
		highest = id > highest ? id : highest;
		if (!in_vocab) {
			*token = (struct token){.at = t->bytes.size, .size = size, .exists = true};
			text_append(&t->bytes, text, size);
		}
		token->added = true, token->special = special;

		struct text sought = {0};
		if (normalized && t->nfc)
			nfc_append(&sought, text, size);
		else
			text_append(&sought, text, size);
		t->added[normalized][t->num_added[normalized]++] = (struct added_token){sought.data, sought.size, id,
			special, single_word, lstrip, rstrip};
		t->added_begin[normalized][(uint8_t)*sought.data] = true;
		t->context_free &= !single_word && !lstrip && !rstrip;
	}
	for (int k = 0; k < 2; k++)
		qsort(t->added[k], t->num_added[k], sizeof **t->added, compare_added);
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

/* Adds a split. `where` begins messages. */
static int add_split(struct tokenizer *t, const char *where, const char *pattern, size_t n, bool literal,
		bool drop_matches, bool drop_rest)
{
	struct split *splits = allocate((t->num_splits + 1) * sizeof *splits), *last = &splits[t->num_splits];
	if (t->num_splits)
		memcpy(splits, t->splits, t->num_splits * sizeof *splits);
	free(t->splits);
	t->splits = splits;
	*last = (struct split){.drop_matches = drop_matches, .drop_rest = drop_rest};
	if (!(last->code = tokenizer_pattern_compile(where, pattern, n, literal, &last->pattern)))
		return -1;
	t->num_splits++;
	return 0;
}

/* Split: a pattern, as a regular expression or as it stands, and what becomes of it and of what is between. */
static int read_split(struct tokenizer *t, const char *where, const json_t *split)
{
	const json_t *pattern = json_object_get(split, "pattern"), *regex = json_object_get(pattern, "Regex");
	const json_t *text = regex ? regex : json_object_get(pattern, "String");
	const char *behavior = field_text(split, where, "behavior");
	const int invert = member_bool(split, where, "invert", false);
	if (!behavior || invert < 0 || check_members(split, where, "type pattern behavior invert") < 0)
		return -1;
	if (json_object_size(pattern) != 1 || !json_is_string(text))
		return fail("%s: `pattern` is not supported; expected {\"Regex\": \"...\"} or {\"String\": \"...\"}", where);
	const bool removed = !strcmp(behavior, "Removed");
	if (!removed && strcmp(behavior, "Isolated"))
		return fail("%s: `behavior` %.40s is not supported; expected Isolated or Removed", where, behavior);
	if (!regex && !json_string_length(text))
		return fail("%s: `pattern` is empty", where);
	return add_split(t, where, json_string_value(text), json_string_length(text), !regex, removed && !invert,
			removed && invert);
}

#define GPT2_PATTERN "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

/* pre_tokenizer: ByteLevel, perhaps behind others, in a Sequence. *byte_level becomes true when ByteLevel has been
 * read. */
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
			: add_split(t, inner, individual ? "\\p{N}" : "\\p{N}+", individual ? 5 : 6, false, false, false);
	}
	if (!strcmp(type, "ByteLevel")) {
		const int space = member_bool(pre, inner, "add_prefix_space", true);
		const int regex = member_bool(pre, inner, "use_regex", true);
		if (space < 0 || regex < 0 || check_members(pre, inner, "type add_prefix_space trim_offsets use_regex") < 0)
			return -1;
		if (space)
			return fail("%s: `add_prefix_space` is not supported: decoding would not give the text back; "
					"expected false", inner);
		*byte_level = true;
		return regex ? add_split(t, inner, GPT2_PATTERN, strlen(GPT2_PATTERN), false, false, false) : 0;
	}
	return fail("%s: is not supported; expected Split, Digits, ByteLevel, or a Sequence of them", inner);
}

/* decoder: ByteLevel, alone or in a Sequence, or null. Decoding itself does not need it. */
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

/* Adds n bytes and their number to a hash. */
static void hash_add(uint32_t *hash, const void *data, size_t n)
{
	*hash = crc32_z(crc32_z(*hash, (const uint8_t *)&(uint64_t){n}, 8), data, n);
}

/* Adds a pattern to a hash; Ling's, whichever of its spellings it has, in the given one. */
static void hash_pattern(uint32_t *hash, const char *pattern, const char *ling)
{
	static const char *const spellings[] = {LING_PATTERN, LING_PATTERN_POSSESSIVE};
	struct text own = {0}, asked = {0};
	bool same = false;
	for (int i = 0; i < 2 && !same; i++) {
		own.size = 0;
		tokenizer_pattern_translate(&own, "", spellings[i], strlen(spellings[i]));
		same = !strcmp(own.data, pattern);
	}
	tokenizer_pattern_translate(&asked, "", ling, strlen(ling));
	pattern = same ? asked.data : pattern;
	hash_add(hash, pattern, strlen(pattern));
	free(own.data), free(asked.data);
}

/* The hash of all that ids depend on, with Ling's pattern in the given spelling. The order of members and the spelling
 * of merges in the file do not matter. */
static uint32_t hash_tokenizer(const struct tokenizer *t, const char *ling)
{
	uint32_t hash = 0;
	for (int i = 0; i < t->size; i++) {
		const struct token *token = &t->tokens[i];
		hash_add(&hash, t->bytes.data + token->at, token->size);
		hash_add(&hash, (uint8_t[]){token->exists, token->added, token->special}, 3);
	}
	const size_t slots = (size_t)1 << (64 - t->merges_shift);
	struct merge *list = allocate(t->num_merges * sizeof *list); /* by rank */
	for (size_t i = 0; i < slots; i++)
		if (t->merges[i].rank != NO_RANK)
			list[t->merges[i].rank] = t->merges[i];
	hash_add(&hash, list, t->num_merges * sizeof *list);
	free(list);
	for (int k = 0; k < 2; k++)
		for (int i = 0; i < t->num_added[k]; i++) {
			const struct added_token *a = &t->added[k][i];
			hash_add(&hash, a->text, a->size);
			hash_add(&hash, (uint8_t[]){k, a->special, a->single_word, a->lstrip, a->rstrip}, 5);
		}
	for (int i = 0; i < t->num_splits; i++) {
		hash_pattern(&hash, t->splits[i].pattern, ling);
		hash_add(&hash, (uint8_t[]){t->splits[i].drop_matches, t->splits[i].drop_rest}, 2);
	}
	hash_add(&hash, (uint8_t[]){t->nfc, t->ignore_merges}, 2);
	hash_add(&hash, &t->end, sizeof t->end);
	return hash;
}

/* The token that ends a document: eos_token of the tokenizer_config.json beside PATH, where there is one, else
 * <|endoftext|>, else none. */
static int read_end(struct tokenizer *t, const char *path)
{
	char dir[PATH_LEN], config[PATH_LEN];
	parent_of(dir, path);
	const int there = path_join(config, dir, "tokenizer_config.json") < 0 ? -1 : path_exists(config);
	t->end = token_of_text(t, "<|endoftext|>", strlen("<|endoftext|>"));
	json_t *root = there > 0 ? json_read(config) : NULL;
	const json_t *eos = json_object_get(root, "eos_token");
	const json_t *content = json_is_object(eos) ? json_object_get(eos, "content") : eos;
	int rc = there < 0 || (there && !root) ? -1 : 0;
	if (content && !json_is_null(content)) {
		t->end = json_is_string(content)
			? token_of_text(t, json_string_value(content), json_string_length(content)) : -1;
		if (t->end < 0)
			rc = fail("%s: `eos_token` is %.40s; expected a token of %s", config,
					json_is_string(content) ? json_string_value(content) : json_kind(content), path);
	}
	json_decref(root);
	return rc;
}

int chat_template_read(const char *dir, char **out)
{
	char path[PATH_LEN];
	*out = NULL;
	int there = path_join(path, dir, "chat_template.jinja") < 0 ? -1 : path_exists(path);
	if (there > 0) {
		const uint8_t *data;
		size_t n;
		if (map_file(path, &data, &n) < 0)
			return -1;
		*out = allocate(n + 1);
		if (n)
			memcpy(*out, data, n);
		unmap_file(data, n);
		return 0;
	}
	if (there == 0)
		there = path_join(path, dir, "tokenizer_config.json") < 0 ? -1 : path_exists(path);
	json_t *root = there > 0 ? json_read(path) : NULL, *item;
	const json_t *template = json_object_get(root, "chat_template"), *list = template;
	const char *name;
	size_t i;
	if (json_is_array(list)) {
		template = NULL;
		json_array_foreach((json_t *)list, i, item)
			if ((name = json_string_value(json_object_get(item, "name"))) && !strcmp(name, "default"))
				template = json_object_get(item, "template");
	}
	int rc = there < 0 || (there && !root) ? -1 : 0;
	if (json_is_string(template))
		*out = strdup(json_string_value(template));
	else if (list && !json_is_null(list))
		rc = fail("%s: `chat_template` is %s; expected a string, or a list of {\"name\": ..., \"template\": ...} with "
				"one named \"default\"", path, json_kind(list));
	json_decref(root);
	return rc;
}

/* Reads a whole tokenizer.json. After an error, what has been read is freed by tokenizer_free. */
static int read_tokenizer(struct tokenizer *t, const char *path, const json_t *root)
{
	char where[PATH_LEN + 32];
	const json_t *added = json_object_get(root, "added_tokens"), *pre = json_object_get(root, "pre_tokenizer");
	const size_t vocab_count = json_object_size(json_at(root, "model.vocab"));
	bool byte_level = false;
	/* truncation, padding and post_processor have no part in encode(add_special_tokens=False) */
	if (check_members(root, path, "version truncation padding added_tokens normalizer pre_tokenizer post_processor "
			"decoder model") < 0)
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
			read_added(t, path, added, vocab_count) < 0 || read_end(t, path) < 0)
		return -1;
	char dir[PATH_LEN];
	parent_of(dir, path);
	if (chat_template_read(dir, &t->chat_template) < 0)
		return -1;
	t->hash = hash_tokenizer(t, LING_PATTERN);
	t->old_hash = hash_tokenizer(t, LING_PATTERN_POSSESSIVE);
	return 0;
}

struct tokenizer *tokenizer_from_json(const char *path, const json_t *root)
{
	struct tokenizer *t = allocate(sizeof *t);
	if (read_tokenizer(t, path, root) == 0)
		return t;
	tokenizer_free(t);
	return NULL;
}

void tokenizer_free(struct tokenizer *t)
{
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
	free(t->chat_template);
	free(t->tokens), free(t->bytes.data), free(t->text_id), free(t->merges), free(t->merged);
	string_table_free(&t->texts);
	free(t);
}
