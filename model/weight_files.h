/*
 * model/weight_files.h - weights and moments in safetensors files: all ranks read and write them together. c is the
 * config of the whole model in each function.
 */
#ifndef LING_MODEL_WEIGHT_FILES_H
#define LING_MODEL_WEIGHT_FILES_H

#include "kernels.h"
#include "files/config.h"
#include "files/tensors.h"
#include "model/parameters.h"

#include <stdbool.h>

/* Opens the model's files of a directory, which must have all of its tensors and no others. The ranks share the work of
 * verifying the checksums. `mapped`: the tensors will be used in place; files larger than memory are then not verified,
 * and a note says so. NULL on error, which may be on this rank alone. */
struct tensors *open_weights(const struct parameter_table *table, const struct model_config *c, const char *dir,
		bool mapped);
/* Reads what this rank holds of a parameter into out [parameter_size(t)]. */
int read_weights(struct tensors *w, const struct parameter *t, real *out);
/* Reads the moments that this rank keeps, [table->num_state] each, from a checkpoint. Collective. */
int load_moments(const struct parameter_table *table, const struct model_config *c, const char *dir, real *exp_avg,
		real *exp_avg_sq);
/* Writes the files model*.safetensors and optimizer*.safetensors of a checkpoint's directory, one of each a rank, from
 * weights [table->num_elements] and moments [table->num_state]. Takes memory for one tensor and one shard more.
 * Collective. */
int write_weight_files(const struct parameter_table *table, const struct model_config *c, const char *dir,
		real *weights, real *exp_avg, real *exp_avg_sq);

#endif
