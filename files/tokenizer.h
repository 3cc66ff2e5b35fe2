/*
 * files/tokenizer.h - tokenizers: their vocabulary, and the text that an id stands for. The way from text to ids is
 * files/encoder.h.
 *
 * There are two: the byte tokenizer, in which a byte is its own id and 256 ends a document, and byte-level BPE as
 * Hugging Face's tokenizer.json describes it. Valid ids are 0 .. tokenizer_size() - 1.
 */
#ifndef LING_FILES_TOKENIZER_H
#define LING_FILES_TOKENIZER_H

#include "files/base.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct ids { int32_t *id; int64_t count; size_t capacity; }; /* a growing list of token ids: [count]; free(id) */
void append_id(struct ids *out, int32_t id);
void append_ids(struct ids *out, const int32_t *id, int64_t n);

/* A byte of a loss mask says what the target is where its token comes next: nothing, for the loss does not count there;
 * this token; or the end token in its place, for a reply that is learned ends in front of this token. */
enum { LOSS_NONE, LOSS_TOKEN, LOSS_END };

#define BYTE_TOKENIZER "byte"    /* its name */
#define BYTE_VOCAB 257
#define BYTE_END 256             /* its end token */

struct tokenizer;              /* read-only once open: all threads may share it */
/* Opens `name`: "byte", a tokenizer.json of byte-level BPE, or a directory that holds one. What the file asks for and
 * ling does not support, or would encode to other ids than Hugging Face's library, is an error that names it. NULL on
 * error. */
struct tokenizer *tokenizer_open(const char *name);
/* Opens the tokenizer of a model's directory: `name` if it is not NULL; else DIR/tokenizer.json; else what
 * DIR/trainer.json names as data.tokenizer. 1 and *out; 0 when the directory has none; -1 on error. Without 1, *out is
 * NULL. */
int tokenizer_find(struct tokenizer **out, const char *dir, const char *name);
/* The same, but that there is none is an error too: NULL. */
struct tokenizer *tokenizer_of_model(const char *dir, const char *name);
void tokenizer_close(struct tokenizer *t); /* NULL is fine */

/* The size of the vocabulary: the highest id + 1. */
int tokenizer_size(const struct tokenizer *t);
/* A checksum of everything that ids depend on; the manifest of a token file names it. */
uint32_t tokenizer_hash(const struct tokenizer *t);
/* Ling's pattern has two spellings, that of Hugging Face and that of llama.cpp, which cut alike and have the same hash.
 * This is the hash that earlier versions gave the second one; manifests may name it. Else it is the same hash. */
uint32_t tokenizer_old_hash(const struct tokenizer *t);
/* Whether a hash, of a manifest, is one of these two. */
bool tokenizer_has_hash(const struct tokenizer *t, uint32_t hash);
/* The same of the byte tokenizer. */
uint32_t byte_tokenizer_hash(void);
/* The id that ends a document or a reply: 256 of the byte tokenizer; else the eos_token that a tokenizer_config.json
 * beside the file names; else <|endoftext|>; -1 when there is none. */
int32_t tokenizer_end(const struct tokenizer *t);
/* The id of a token by its text, such as <role>; -1 when there is none. */
int32_t tokenizer_id(const struct tokenizer *t, const char *token);

/* Appends the bytes that an id stands for; those of a special token only if `special`. An id outside the vocabulary
 * stands for nothing. */
void tokenizer_decode(const struct tokenizer *t, int32_t id, bool special, struct text *out);
/* Their number; 0 for a special token. */
int tokenizer_bytes(const struct tokenizer *t, int32_t id);

/* The path of the tokenizer.json that `name`, which is not "byte", stands for: itself, or one in that directory. */
int tokenizer_path(char out[PATH_LEN], const char *name);

#endif
