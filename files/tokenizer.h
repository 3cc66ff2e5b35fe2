/*
 * files/tokenizer.h - tokenizers: bytes, and byte-level BPE as Hugging Face's tokenizer.json describes it; encoding, decoding, the chat form.
 */
#ifndef LING_FILES_TOKENIZER_H
#define LING_FILES_TOKENIZER_H

#include "files/base.h"

#include <jansson.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* -- tokenizers -- */

struct ids {                   /* a growing list of token ids; free(id) */
	int32_t *id;
	int64_t count;
	size_t capacity;
};
void put_id(struct ids *out, int32_t id); /* appends one */

struct tokenizer;              /* read-only once open: shared by all threads */
/* Opens `name`: "byte", a Hugging Face tokenizer.json of byte-level BPE, or a directory that holds one. What of it is not supported, or would give
 * other ids than Hugging Face's, is an error that names it. NULL on error. */
struct tokenizer *tokenizer_open(const char *name);
void tokenizer_close(struct tokenizer *t); /* NULL is fine */
/* Ids are beneath it. */
int tokenizer_size(const struct tokenizer *t);
/* Of everything that ids depend on; stands in the manifests of token files. */
uint32_t tokenizer_hash(const struct tokenizer *t);
/* The id that ends a document or a reply (the byte tokenizer's 256, else <|endoftext|> or what else the file names so), or -1. */
int32_t tokenizer_end(const struct tokenizer *t);
/* The id of a token by its text, such as <role>; -1 when there is none. */
int32_t tokenizer_id(const struct tokenizer *t, const char *token);

/* Appends the text of an id, byte for byte, to a growing text; a special token's too if `special`. An id outside the vocabulary gives nothing. */
void tokenizer_decode(const struct tokenizer *t, int32_t id, bool special, struct text *out);

/* Bytes of the text that an id stands for, 0 for a special token. */
int tokenizer_bytes(const struct tokenizer *t, int32_t id);

struct encoder;                /* the work space of one thread; the tokenizer must outlive it */
struct encoder *encoder_open(const struct tokenizer *t);
void encoder_close(struct encoder *e); /* NULL is fine */
/* Appends the ids of n bytes of text, which may hold anything. With `special`, the text of a special token in it becomes that token; else it is
 * ordinary text. (Added tokens that are not special are always found.) Ids are those of Hugging Face's encode(text, add_special_tokens=False): the
 * file's post_processor, truncation and padding play no part. Of bytes that are not UTF-8 a longest run is a word of its own, and what is between is
 * encoded as if it were alone. Decoding gives back every byte, unless the tokenizer drops some (NFC, Split with Removed, lstrip, rstrip). */
int encode(struct encoder *e, const char *text, size_t n, bool special, struct ids *out);

struct message { const char *role, *content; size_t content_size; }; /* role: system, user, human, assistant or tool, in any case */
/* Appends the ids of a conversation in Ling's chat form; with `reply`, also the opening of the assistant's reply. With `loss_mask` (or NULL) one
 * byte an id: 1 where the loss counts, which is in the assistant's replies and the end token behind the last one. */
int chat_encode(struct encoder *e, const struct message *messages, int n, bool reply, struct ids *out, struct text *loss_mask);

/* The tokenizer of a model's directory: by name, if one is given; else DIR/tokenizer.json; else what DIR/trainer.json says of data.tokenizer. */
struct tokenizer *tokenizer_of_model(const char *dir, const char *name);

/* Writes text as a JSON string; each byte that is no UTF-8 becomes U+FFFD. */
void json_write_text(FILE *f, const char *text, size_t n);
/* How much of a text that goes on is whole: n less the bytes at the end that may be the beginning of a character. */
size_t utf8_whole(const char *text, size_t n);

#define BYTE_TOKENIZER "byte"

/* The path of the tokenizer.json that `name`, which is not "byte", stands for: itself, or one in that directory. */
int tokenizer_path(char out[PATH_LEN], const char *name);

#define BYTE_VOCAB 257

#define MAX_VOCAB 10000000 /* as that of model.vocab_size */

#define NO_RANK UINT32_MAX

uint32_t byte_tokenizer_hash(void);

struct token {
	size_t at;                   /* of its bytes in tokenizer.bytes */
	uint32_t size;
	bool known;                  /* ids may have gaps */
	bool added, special;         /* added tokens are no merges' product; decoding may leave special ones out */
};

struct merge { int32_t left, right; uint32_t rank; int32_t id; }; /* rank: place in the list of merges, NO_RANK none */

struct added {                 /* an added token: its text, and how it is found */
	char *text;
	size_t size;
	int32_t id;
	bool special, single_word, lstrip, rstrip;
};

struct split {                 /* a regular expression that cuts text in what it matches and what is between */
	pcre2_code *code;
	bool drop_matches, drop_rest;
	char *pattern;
};

struct tokenizer {
	bool bytes_only;             /* the byte tokenizer: nothing else is set but size, hash and end */
	int size;
	uint32_t hash;
	int32_t end;
	struct token *tokens;        /* [size] */
	struct text bytes;
	int32_t *by_text;            /* hash table of ids of the vocabulary, -1 empty; its size is a power of two */
	size_t by_text_mask;
	struct merge *merges;        /* hash table of pairs; its size is a power of two */
	int merges_shift;
	int32_t *merged;             /* [merges] the product of each, by rank */
	uint32_t num_merges;
	int32_t byte_id[256];
	bool ignore_merges;          /* a word that is in the vocabulary is its token, whatever the merges say */
	bool nfc;
	struct added *added[2];      /* those sought in the text as it is, and in its NFC form; sorted by text */
	int num_added[2];
	bool added_begin[2][256];    /* first bytes */
	bool cuttable;               /* no added token takes what is around it */
	struct split *splits;
	int num_splits;
};

void append_string(struct text *out, const char *text);

/* Decodes the character that text begins with: its bytes, 1 to 4, and its code point; 0 when it is not well-formed UTF-8. */
int utf8_decode(const char *text, size_t n, int32_t *code);

/* Bytes of the longest beginning of text that is well-formed UTF-8. */
size_t utf8_valid(const char *text, size_t n);

/* White_Space of Unicode, which is what \s is in Hugging Face's regular expressions, and everything else: as members of a class. PCRE2's own \s
 * has U+180E too. */
#define SPACE_CLASS "\\x{9}-\\x{D}\\x{20}\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
#define NOT_SPACE_CLASS "\\x{0}-\\x{8}\\x{E}-\\x{1F}\\x{21}-\\x{84}\\x{86}-\\x{9F}\\x{A1}-\\x{167F}\\x{1681}-\\x{1FFF}\\x{200B}-\\x{2027}" \
	"\\x{202A}-\\x{202E}\\x{2030}-\\x{205E}\\x{2060}-\\x{2FFF}\\x{3001}-\\x{10FFFF}"

void alphabet_encode(struct text *out, const char *bytes, size_t n);

uint64_t hash_text(const char *text, size_t n);

struct counted { size_t at; uint32_t size; uint64_t count; }; /* a word's bytes in words.bytes, and how often it stands in the texts */

struct words {                 /* a hash table of words */
	struct text bytes;
	struct counted *word;        /* [count], in the order in which they came */
	size_t count, capacity;
	uint32_t *slot;              /* number of a word and 1; 0 empty; a power of two of them */
	size_t mask;
};

void words_free(struct words *w);

/* Counts a word once more; returns its number, from 0, or -1. */
int64_t words_add(struct words *w, const char *text, size_t n, uint64_t times);

/* The slot of a pair in the table of merges: its own, or the empty one where it belongs. */
static inline struct merge *find_merge(const struct tokenizer *t, int32_t left, int32_t right)
{
	const size_t mask = ((size_t)1 << (64 - t->merges_shift)) - 1;
	for (size_t i = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15 >> t->merges_shift;; i++) {
		struct merge *m = &t->merges[i & mask];
		if (m->rank == NO_RANK || (m->left == left && m->right == right))
			return m;
	}
}

struct translation {
	const char *where, *pattern;
	size_t n;
	struct text out;
};

/* Translates the pattern of r, which ends with a 0, into r->out. */
int translate(struct translation *r);

int read_tokenizer(struct tokenizer *t, const char *path, const json_t *root);

#define CACHED_BYTES 32
#define CACHED_IDS 7
#define SHORT_WORD 128 /* bytes that are merged by looking through all pairs; more, with a heap */

struct cached {                /* a word and its ids: a line of the processor's cache */
	uint64_t text[CACHED_BYTES / 8];
	int32_t id[CACHED_IDS];
	uint8_t size, count;
};

struct encoder {
	const struct tokenizer *t;
	struct encoder *next;        /* see struct encoders */
	struct words *words;         /* where words are counted, instead of being encoded; else NULL */
	bool special;                /* special tokens are recognised */
	struct cached *cache;        /* [2^CACHE_BITS] */
	struct text normal;          /* the NFC form of a piece */
	pcre2_match_data *match;
	pcre2_match_context *context;
	pcre2_jit_stack *stack;
};

/* Merges the n ids of a short word in place, the pair of the lowest rank first and the leftmost of equals; returns how many are left. */
int merge_short(const struct tokenizer *t, int32_t *id, int n);

/* merge_short for a word of any length. */
int64_t merge_long(const struct tokenizer *t, int32_t *id, int32_t n);

int encode_word(struct encoder *e, const char *word, size_t n, struct ids *out);

/* What a level finds in a text, from a place on. */
struct found {
	size_t begin, end;           /* what it takes of the text: nothing and n when it finds nothing, the place where it would need to know more */
	size_t next;                 /* where it looks on */
	int32_t id;                  /* of an added token; -1: a piece for the next level */
};

/* Finds what a regular expression matches. 1 found, 0 not, -1 on error. */
int find_match(const struct encoder *e, const struct split *s, const char *text, size_t n, size_t from, bool open, struct found *f);

/* encode_level for a text of any bytes. A longest run of bytes that are not part of a well-formed character is a word of its own, and what is between
 * two such runs is encoded as if it were alone. */
int64_t encode_part(struct encoder *e, const char *text, size_t n, size_t stop, bool open, bool special, struct ids *out);

/* A role as the form spells it; NULL when there is no such role. */
const char *chat_role(const char *role);

/* Brings `loss_mask` to one byte an id: `value` for those that are new. */
void append_loss_mask(struct text *loss_mask, const struct ids *out, bool value);

#define LING_PATTERN "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"

void append_ids(struct ids *out, const int32_t *id, int64_t n);

#endif
