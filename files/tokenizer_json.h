/*
 * files/tokenizer_json.h - reading a tokenizer.json of byte-level BPE, and what it becomes in memory. The members of
 * struct tokenizer are for files/tokenizer.c and files/encoder.c; to others files/tokenizer.h says what they need.
 */
#ifndef LING_FILES_TOKENIZER_JSON_H
#define LING_FILES_TOKENIZER_JSON_H

#include "files/base.h"
#include "files/collections.h"
#include "files/tokenizer_pattern.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_VOCAB 10000000 /* the same limit as that of model.vocab_size */

struct token {
	size_t at;                   /* of its bytes in tokenizer.bytes */
	uint32_t size;
	bool exists;                 /* false: no token has this id */
	bool added, special;         /* added_tokens has it; special: decoding may leave it out */
};

#define NO_RANK UINT32_MAX
/* A slot: ids left and right become `id`. rank: the index in the list of merges; NO_RANK: the slot is empty. */
struct merge { int32_t left, right; uint32_t rank; int32_t id; };

/* Hugging Face's AddedToken. text: as it is sought, in NFC where the tokenizer has it. */
struct added_token { char *text; size_t size; int32_t id; bool special, single_word, lstrip, rstrip; };

/* A pre-tokenizer that cuts text into what a regular expression matches and what is between. */
struct split {
	pcre2_code *code;
	char *pattern;               /* as PCRE2 got it */
	bool drop_matches, drop_rest; /* leaves out the one or the other */
};

struct tokenizer {
	bool bytes_only;             /* the byte tokenizer: of the rest only size, hash, end and context_free are set */
	int size;
	uint32_t hash, old_hash; /* see tokenizer.h */
	int32_t end;
	struct token *tokens;        /* [size] by id */
	struct text bytes;           /* of all tokens */
	struct string_table texts;   /* the bytes of the tokens of model.vocab that the alphabet spells */
	int32_t *text_id;            /* [texts.count] their ids */
	int32_t byte_id[256];
	struct merge *merges;        /* a hash table with open addressing of 2^(64 - merges_shift) slots */
	int merges_shift;
	int32_t *merged;             /* [num_merges] by rank: the id that the merge makes */
	uint32_t num_merges;
	bool ignore_merges;          /* a word that is a token of model.vocab becomes it, whatever the merges say */
	bool nfc;                    /* text is brought into NFC */
	struct added_token *added[2]; /* [num_added] by text: those sought in the text as it is; those sought in its NFC */
	int num_added[2];
	bool added_begin[2][256];    /* bytes that one of them begins with */
	bool context_free;           /* none of them depends on the text around it (single_word, lstrip, rstrip) */
	struct split *splits;        /* [num_splits] applied one after the other */
	int num_splits;
	char *chat_template;         /* of the model; NULL: none */
	const char *chat_form;       /* the form that the user named instead; NULL: none */
};

/* The slot of a pair in t->merges: its own, or the empty one where it would be. Not a string_table, for this is the
 * inner loop of encoding: a look-up here is one line of cache. */
static inline struct merge *find_merge(const struct tokenizer *t, int32_t left, int32_t right)
{
	const size_t mask = ((size_t)1 << (64 - t->merges_shift)) - 1;
	for (size_t i = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15 >> t->merges_shift;; i++) {
		struct merge *m = &t->merges[i & mask];
		if (m->rank == NO_RANK || (m->left == left && m->right == right))
			return m;
	}
}

/* The id of the token in t->texts with these bytes, or -1. */
static inline int32_t find_text(const struct tokenizer *t, const char *bytes, size_t n)
{
	const int64_t number = string_table_find(&t->texts, bytes, n);
	return number < 0 ? -1 : t->text_id[number];
}

/* The id of a token by its text, of an added token first; -1 when there is none. */
int32_t token_of_text(const struct tokenizer *t, const char *text, size_t n);

/* Makes a tokenizer from the document of a tokenizer.json, which was or will be at `path`. What it asks for and ling
 * does not support, or would encode to other ids than Hugging Face's library, is an error that names it. NULL on
 * error. */
struct tokenizer *tokenizer_from_json(const char *path, const json_t *root);
/* Reads the chat template of a model's directory: chat_template.jinja, else the `chat_template` of its
 * tokenizer_config.json; of several by name the one named default. *out, which the caller frees, is NULL when there is
 * none. */
int chat_template_read(const char *dir, char **out);
void tokenizer_free(struct tokenizer *t);

/* Appends bytes in the byte-level alphabet, in which such files are written: a printable character stands for each
 * byte (GPT-2's bytes_to_unicode). */
void byte_alphabet_append(struct text *out, const char *bytes, size_t n);

/* The regular expression by which Ling's tokenizer cuts text into words. */
#define LING_PATTERN "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" \
	"|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"
/* The same in llama.cpp's spelling: no character of the run before [\r\n]* is one of these, so giving back is in
 * vain. */
#define LING_PATTERN_POSSESSIVE "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}|" \
	" ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"

#endif
