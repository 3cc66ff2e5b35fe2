/*
 * model/weight_files.h - weights and moments in safetensors files: all ranks read and write them together. c is the
 * config of the whole model in each function.
 */
#ifndef LING_MODEL_WEIGHT_FILES_H
#define LING_MODEL_WEIGHT_FILES_H

#include "kernels.h"
#include "files/config.h"
#include "files/safetensors.h"
#include "files/tensors.h"
#include "model/parameters.h"

#include <stdbool.h>

/* Whether the checksums of all tensors are verified, work that the ranks share. VERIFY_IF_IN_MEMORY: the tensors will
 * be used in place in the mapped files; where these are larger than memory they are not verified, and a note says so.
 */
enum verify { DO_NOT_VERIFY, VERIFY, VERIFY_IF_IN_MEMORY };

/* -- reading -- */

/* Opens the model's files of a directory, which must have all of its tensors and no others. NULL on error, which may be
 * on this rank alone. */
struct tensors *open_weights(const struct parameter_table *table, const struct model_config *c, const char *dir,
		enum verify verify);
/* Reads what this rank holds of a parameter into out [parameter_size(t)]. */
int read_weights(struct tensors *w, const struct parameter *t, real *out);
/* Whether the files of a checkpoint have all tensors of weights and moments, with the right checksums. Collective. */
int verify_weight_files(const struct parameter_table *table, const struct model_config *c, const char *dir);
/* Reads the moments that this rank keeps, [table->num_state] each, from a checkpoint, whose checksums it does not
 * verify: those of its replica, or, where the checkpoint has R replicas and fewer than this, of replica r modulo R. And
 * the outer momentum, unless that is NULL: zeros where the checkpoint has none. Collective. */
int load_moments(const struct parameter_table *table, const struct model_config *c, const char *dir, real *exp_avg,
		real *exp_avg_sq, real *outer_momentum);

/* -- writing -- Each rank writes one file of weights and one of moments, with whole tensors. Their bytes are balanced
 * over the hosts, and over the ranks of a host. Several replicas (struct layout) must have the same weights; the
 * moments are those of each: exp_avg.NAME of the first, replica1.exp_avg.NAME of the next; and beside them there is
 * outer_momentum.NAME, which all replicas have alike. */

/* What a rank has of what is saved. */
struct saved_arrays {
	const real *weights;         /* [table->num_elements] */
	const real *exp_avg, *exp_avg_sq; /* [table->num_state] */
	const real *outer_momentum;  /* [table->num_state]; with one replica not read */
};

/* writer [n]: the rank, of `ranks`, that writes each of the n parameters of the whole model with its moments; bytes
 * [ranks]: what each will write. host [ranks]: the number of each rank's host, from 0. The same numbers give the same
 * result on every rank. */
int assign_writers(int *writer, int64_t *bytes, const struct parameter *global, int n, int num_experts,
		int expert_ranks, int ranks, const int *host);

/* A shard on its way to the rank that collects its tensor: elements from .. end of what the sender holds of the
 * parameter. `data` has room for BUCKET_SIZE of them. */
struct shard_message { struct shard shard; int64_t from, end; real data[]; };
/* A new one, to be freed; NULL when memory is short. */
struct shard_message *new_shard_message(void);

/* A message's tag tells its tensor: the tensor's number modulo SHARD_TAGS, since MPI promises tags up to 32767 only.
 * OTHER_TAG is free for other messages. The double build has fewer tags, so that small models use each tag several
 * times. */
#ifndef SHARD_TAGS
#define SHARD_TAGS 32767
#endif
enum { OTHER_TAG = 32767 };

/* Brings parameter `t` of the whole model to rank `to`, where `tensor` [parameter_size(t)] receives it: each rank sends
 * the shards that it keeps. data: weights or gradients [table->num_elements] or, with `moments`, one of the moments
 * [table->num_state]. *walk stands before this rank's first shard of the parameter, if it keeps any, and goes beyond
 * its last one. tag: 0 .. SHARD_TAGS - 1, one more for each parameter, then 0 again. `sends`: false on the ranks of all
 * replicas but one. Collective. */
void collect_parameter(const struct parameter_table *table, struct optimizer_shard_iterator *walk,
		const struct parameter *t, const real *data, bool moments, bool sends, int to, int tag,
		struct shard_message *message, real *tensor);

/* What a rank writes of each checkpoint. */
struct weight_writer {
	const struct parameter_table *table;
	struct parameter *global;    /* [n] the whole model's parameters */
	int n;
	int *writer;                 /* [n] the rank that writes each */
	int num_own;                 /* parameters that this rank writes, */
	int64_t elements, largest;   /* their elements, and those of the largest */
	int num_blocks;              /* tensors of each parameter: 3 with one replica */
	int64_t bytes;               /* of all tensors, on all ranks */
	int64_t file_bytes;          /* of all files of all ranks, at most */
	int64_t least, most;         /* bytes of tensors of the ranks that write least and most */
	real *copy;                  /* [num_blocks, elements] what write_copy writes: weights, then moments; or NULL */
	struct write_fault fault;    /* of this rank's file of weights */
};
enum { TENSOR_HEADER = 512 };    /* bytes that a tensor takes in the headers and the index, at most */
/* host [ranks]: see assign_writers. weight_writer_free may follow a failure. */
int weight_writer_init(struct weight_writer *w, const struct parameter_table *table, const struct model_config *c,
		const int *host);
void weight_writer_free(struct weight_writer *w);
/* Writes the files of a checkpoint's directory. Takes memory for the largest tensor and one bucket. Collective. */
int write_weight_files(const struct weight_writer *w, const char *dir, const struct saved_arrays *arrays);
/* The same in two parts, for which each rank has first taken the memory of what it writes, once for all checkpoints. */
int reserve_copy(struct weight_writer *w);
/* All ranks make the copy, with one bucket of memory more. Collective. */
int copy_weights(struct weight_writer *w, const struct saved_arrays *arrays);
/* Then each writes its files, also in a thread while training goes on: without messages, and the copy stays. */
int write_copy(const struct weight_writer *w, const char *dir);
/* Bytes of memory that a rank takes at most for a checkpoint: while it is written straight to the files; and for a copy
 * of what it writes, ranks counted as if all were on one host. */
int plan_saving(size_t *saving, size_t *copy, const struct model_config *c, const struct layout *layout);

#endif
