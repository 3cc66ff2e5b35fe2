/*
 * model/weights.h - the weights of a model: random, or from files, where evaluation uses them in place; and what
 * follows from them.
 */
#ifndef LING_MODEL_WEIGHTS_H
#define LING_MODEL_WEIGHTS_H

#include "model/memory.h"
#include "model/weight_files.h"

#include <stdint.h>

/* Sets all weights as each parameter's `init` says. A random weight depends on the seed, the tensor's name and its
 * place in the whole tensor alone, so every layout starts from the same model. */
void model_randomize(struct model *m, uint64_t seed);
/* Moves each weight by one unit in the last place, up or down as a random number says that depends on the key, the
 * tensor's name and the weight's place alone, so that every layout moves alike: train.perturb. An expert bias stays. */
void model_perturb(struct model *m, uint64_t key);
/* Reads all parameters from a Hugging Face directory. A tensor that is missing, or that the model does not have, is an
 * error. For evaluation, matrices in float32 and bfloat16 are not copied: they are used in the mapped files, which the
 * system reads as needed. The checksums of all tensors are checked first; in evaluation only where the files are no
 * larger than memory. For training, a tensor with a NaN or infinity is an error too. */
int model_load(struct model *m, const char *dir);
/* The same with or without a check of the checksums. */
int load_weights(struct model *m, const char *dir, enum verify verify);
/* Finds what evaluation uses in place: sets `mapped` and `bf16` of the parameters that are a run of elements in their
 * file, of a type and at an address that products can read; gate and up are used alike. w NULL: the files are not
 * there yet, and have tensors of type `dtype`, aligned; nothing is set, but the bytes are counted. */
struct weight_bytes { int64_t mapped, copied; }; /* bytes of what is used in place, and of the others in memory */
int find_mapped(struct parameter_table *table, const struct tensors *w, enum dtype dtype, struct weight_bytes *bytes);
/* Computes the head norm cache. Call it whenever weights have changed. Collective. */
void model_update_head_scale(struct model *m);

#endif
