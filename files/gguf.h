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
#define GGUF_ALIGNMENT 32              /* bytes; of the tensors, unless the file says otherwise */

enum gguf_type {              /* of a value in the metadata */
	GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_TEXT, GGUF_ARRAY,
	GGUF_U64, GGUF_I64, GGUF_F64, NUM_GGUF_TYPES
};

/* llama.cpp's types of tokens. */
enum { TOKEN_NORMAL = 1, TOKEN_CONTROL = 3, TOKEN_USER_DEFINED = 4, TOKEN_UNUSED = 5 };

/* llama.cpp's name for the models of a class: bailingmoe for Ling-Lite and Ling-Plus, bailingmoe2 for Ling 2.0. */
const char *gguf_architecture(const struct model_config *m);

/* ---------------------------------------------------------------------------------------------------- reading */

/* Maps a file, checks its header and adds its tensors to w, which is new. The file's header holds the metadata as JSON.
 * Also after an error, what was mapped is in w, for tensors_close. */
int gguf_open(struct tensors *w, const char *path);

/* The config of the model that the metadata of an open file describe. */
int gguf_config(struct model_config *m, const struct tensors *w, const json_t *metadata);

/* Writes tokenizer.json and tokenizer_config.json into dir from the metadata of a GGUF file. */
int gguf_to_tokenizer(const json_t *metadata, const char *path, const char *dir);

/* ---------------------------------------------------------------------------------------------------- writing */

/* Little-endian integers; a text with its length in front. */
void append_u32(struct text *out, uint32_t value);
void append_u64(struct text *out, uint64_t value);
void append_text(struct text *out, const char *text);

struct metadata { struct text bytes; uint64_t count; }; /* encoded entries, and how many */

/* Each appends an entry. A text that is not UTF-8 is made so. */
void entry_u32(struct metadata *m, const char *key, uint32_t value);
void entry_text(struct metadata *m, const char *key, const char *value);

/* Appends the keys of the architecture. A model that llama.cpp does not compute is refused. */
int config_to_gguf(struct metadata *m, const struct model_config *model, const char *path);

/* Appends the tokenizer of a Hugging Face directory, whose config.json is `config`. */
int tokenizer_to_gguf(struct metadata *m, const char *dir, const json_t *config, const struct model_config *model);

/* ---------------------------------------------------------------------------------------------- pre-tokenizers */

/* Those that llama.cpp knows, by its names: Ling's pattern in two spellings, and NULL, the pattern of ByteLevel. */
extern const struct pre_tokenizers_row { const char *name, *pattern; } pre_tokenizers[];

/* A pre_tokenizer of tokenizer.json, as Hugging Face writes it: the pattern if there is one, then ByteLevel. */
json_t *pre_tokenizer_json(const char *pattern);

#endif
