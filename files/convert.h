/*
 * files/convert.h - conversion of a model between Hugging Face directories, checkpoints and GGUF files.
 */
#ifndef LING_FILES_CONVERT_H
#define LING_FILES_CONVERT_H

#include "files/base.h"
#include "files/config.h"
#include "files/tensors.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

/* -- conversion -- */

struct source;                 /* a model on disk: a Hugging Face directory, a checkpoint, or a GGUF file in float32, bfloat16 or float16 */
/* Opens it, checks every header and, of a checkpoint, the files' checksums, and gives its config. NULL on error. */
struct source *source_open(const char *path, struct model_config *config);
void source_close(struct source *s); /* NULL is fine */

enum model_format { FORMAT_HUGGINGFACE, FORMAT_CHECKPOINT, FORMAT_GGUF };
struct conversion {
	const char *path;            /* of what is made; nothing may be there. A checkpoint is RUN/step-0000000 */
	enum model_format format;
	const char *dtype;           /* "f32", "bf16" or "f16"; NULL: as each tensor is, of a checkpoint f32 */
	int64_t max_shard_size;      /* bytes; of a Hugging Face directory */
	bool fold_norm_head;         /* divide lm_head by its columns' norms, and set norm_head to false; GGUF is always folded */
	bool no_tokenizer;
};
struct converted { int64_t tensors, bytes; };
/* Converts a model in bounded memory. params: the names and shapes of its parameters as Hugging Face has them, the embedding first, lm_head.weight
 * among them even if it is tied. Every tensor of the source is carried over, or refused by name before anything is written; what is
 * made appears when it is whole and on disk. Numbers are rounded to nearest, ties to even; one that becomes infinite is an error. Shows
 * progress on stderr. */
int convert_model(const struct source *s, const struct named_tensor *params, int n, const struct conversion *to, struct converted *result);

struct source {
	char path[PATH_LEN];
	struct model_config config;
	struct tensors *weights;
	json_t *config_json;         /* of a directory */
	const json_t *metadata;      /* of a GGUF file, else NULL */
};

enum { BLOCK_BYTES = 16 << 20, BLOCK_ROWS = 8192, RUN = 4096 };

/* Converts a row of n elements, divided by the columns' `fold` if it is not NULL. Returns whether a finite one has become infinite. */
bool convert_row(uint8_t *out, enum dtype to, const uint8_t *in, enum dtype from, int64_t n, const double *fold);

#endif
