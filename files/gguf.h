/*
 * files/gguf.h - GGUF, llama.cpp's format: reading and writing, with its tokenizer and its config.
 */
#ifndef LING_FILES_GGUF_H
#define LING_FILES_GGUF_H

#include "files/base.h"
#include "files/config.h"
#include "files/tensors.h"

#include <jansson.h>
#include <stdint.h>

#define GGUF_MAGIC "GGUF"
#define GGUF_VERSION 3
#define GGUF_ARCHITECTURE "bailingmoe"
#define GGUF_ALIGNMENT 32

enum gguf_type { GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_TEXT, GGUF_ARRAY,
		GGUF_U64, GGUF_I64,
	GGUF_F64, NUM_GGUF_TYPES };

/* The pre-tokenizers that llama.cpp has too, by its names for them; Ling's comes in two spellings of the same. NULL:
 * ByteLevel's own. */
extern const struct pre_tokenizers_row { const char *name, *pattern; } pre_tokenizers[];

enum { TOKEN_NORMAL = 1, TOKEN_CONTROL = 3, TOKEN_USER_DEFINED = 4, TOKEN_UNUSED = 5 };

/* Maps a file, checks its header and adds its tensors to w. What was taken is in w, for tensors_close. */
int gguf_open(struct tensors *w, const char *path);

/* The model that the metadata of an open file describe. */
int gguf_config(struct model_config *m, const struct tensors *w, const json_t *metadata);

/* A pre_tokenizer of tokenizer.json, as Hugging Face writes it: the pattern if there is one, then ByteLevel. */
json_t *pre_tokenizer_json(const char *pattern);

/* Writes tokenizer.json and tokenizer_config.json into dir from the metadata of a GGUF file. */
int gguf_to_tokenizer(const json_t *metadata, const char *path, const char *dir);

struct metadata { struct text bytes; uint64_t count; };

void append_u32(struct text *out, uint32_t value);

void append_u64(struct text *out, uint64_t value);

void append_text(struct text *out, const char *text);

void entry_u32(struct metadata *m, const char *key, uint32_t value);

void entry_text(struct metadata *m, const char *key, const char *value);

/* The keys of the architecture. A model that llama.cpp's bailingmoe does not compute is refused. */
int config_to_gguf(struct metadata *m, const struct model_config *model, const char *path);

/* The tokenizer of a Hugging Face directory, whose config.json is `config`. */
int tokenizer_to_gguf(struct metadata *m, const char *dir, const json_t *config, int vocab_size);

#endif
