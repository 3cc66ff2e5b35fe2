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

/* A model on disk: a Hugging Face directory, a checkpoint, or a GGUF file in float32, bfloat16 or float16. */
struct source_model;

/* Opens a model, checks every header and, of a checkpoint, the checksums of its files, and gives its config. NULL on
 * error. */
struct source_model *source_model_open(const char *path, struct model_config *config);
void source_model_close(struct source_model *s); /* NULL is fine */
/* The content of a checkpoint's trainer.json, less its checksum; it lives as long as s. NULL for any other model. */
const json_t *source_model_trainer(const struct source_model *s);

enum model_format { FORMAT_HUGGINGFACE, FORMAT_CHECKPOINT, FORMAT_GGUF };

/* The result's numbers are sums over models of the same tensors: weights[i] times the number of models[i], added up in
 * double in this order, and rounded once. */
struct weighted_sum {
	struct source_model *const *models; /* [count]; one of them is the model that is converted */
	const double *weights;     /* [count] */
	int count;
	json_t *description;       /* the member MERGE_KEY of the result's config.json */
};

extern const char *const output_dtypes[]; /* the values of struct conversion's dtype, then NULL */
#define MAX_SHARD_SIZE 5000000000 /* that of Hugging Face */

struct conversion {
	const char *path;          /* of the result; nothing may be there. A checkpoint is RUN/step-0000000 */
	enum model_format format;
	const char *dtype;         /* "f32", "bf16" or "f16"; NULL: each tensor keeps its own, but a checkpoint is f32 */
	int64_t max_shard_size;    /* bytes; of a Hugging Face directory */
	/* divide lm_head by the norms of its columns, and set norm_head to false; always done for GGUF */
	bool fold_norm_head;
	bool no_tokenizer;
	const struct weighted_sum *sum; /* or NULL; else format is FORMAT_HUGGINGFACE, and dtype is given */
};

struct converted { int64_t tensors, bytes; };

/* Converts a model in bounded memory. params: the names and shapes of its parameters as Hugging Face has them, the
 * embedding first, lm_head.weight among them even if it is tied to the embedding. Every tensor of the source has a
 * place in the result, or is refused by name before anything is written. The result appears when it is complete and on
 * disk. Numbers are rounded to nearest, ties to even; a finite one that becomes infinite is an error. Shows progress
 * on stderr. */
int convert_model(const struct source_model *s, const struct named_tensor *params, int n, const struct conversion *to,
		struct converted *result);

/* Converts a row of n elements, and divides element i by divisor[i] unless divisor is NULL. Returns whether a finite
 * one has become infinite. */
bool convert_row(uint8_t *out, enum dtype to, const uint8_t *in, enum dtype from, int64_t n, const double *divisor);
enum { CONVERT_RUN = 4096 };  /* elements of a row that are converted at once */

#endif
