/*
 * model/parameters.h - the table of a model's parameters: their names and sizes, which part of each a rank holds, and
 * which part of the optimizer's state it keeps.
 */
#ifndef LING_MODEL_PARAMETERS_H
#define LING_MODEL_PARAMETERS_H

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"

#include <stdbool.h>
#include <stdint.h>

/* -- sizes -- c is the config of the whole model, or of what one rank computes of it (see local_config) */

/* All layers: the num_hidden_layers, then the MTP layers. */
int num_layers(const struct model_config *c);
/* Whether a layer is one for multi-token prediction (MTP), which has experts and predicts one token further than the
 * layer before. */
bool is_mtp(const struct model_config *c, int layer);
/* The layers that training computes and changes: all of them, but without mtp_loss_scaling_factor no MTP layer. */
int trained_layers(const struct model_config *c);
/* The MTP layers among them. */
int trained_mtp_layers(const struct model_config *c);
/* The block of a layer's parameters, and of the final norm and the head; that of the embedding is 0. */
int block_of_layer(const struct model_config *c, int layer);
int head_block(const struct model_config *c);
/* The layer of a block; -1: it is of none. */
int layer_of_block(const struct model_config *c, int block);
int last_block(const struct model_config *c);
/* Whether training changes the parameters of a block. Those that it does not change are the last ones. */
bool is_trained(const struct model_config *c, int block);
/* Whether a layer has routed experts; else its feed-forward part is one dense SwiGLU. */
bool has_experts(const struct model_config *c, int layer);
/* Width of the dense SwiGLU of a layer: S I, or intermediate_size in the first first_k_dense_replace layers. */
int shared_width(const struct model_config *c, int layer);
/* Rows of the query_key_value matrix. */
int qkv_width(const struct model_config *c);
/* Columns of the attention's output matrix. */
int attention_width(const struct model_config *c);
/* The config of the model as one rank of a layout computes it: its heads, and its part of the vocabulary. */
struct model_config local_config(const struct model_config *c, const struct layout *l);

/* -- parameters -- A rank holds its parameters in one block of memory. A table names them, and struct params points
 * into the block. The gradients are a second block of the same form. */

enum init { INIT_ONES, INIT_ZEROS, INIT_NORMAL, INIT_ROUTER };

/* Which ranks hold the same elements, so that their gradients are added up: all; those of a data group; those with the
 * same experts. */
enum sharing { SHARED_BY_WORLD, SHARED_BY_DATA, SHARED_BY_EXPERT_DATA };

/* The part of a tensor that a rank holds: up to three ranges of rows, stored one after the other, and one range of
 * columns. */
struct shard { int64_t row[3], num_rows[3], col, num_cols; };

struct parameter {               /* an entry of the table */
	char name[MAX_NAME];         /* Hugging Face's */
	/* of the whole tensor; a vector has cols 0. Vectors (norms, biases) have no weight decay */
	int64_t rows, cols;
	struct shard shard;          /* what this rank holds of it */
	int64_t offset;              /* of its first element in the block of memory */
	int block;                   /* in the order of the forward pass: see block_of_layer */
	int expert;                  /* which expert's, where sharing is SHARED_BY_EXPERT_DATA */
	enum init init;
	enum sharing sharing;
	/* where the shard is in a mapped file, which is then read instead of the block; or NULL */
	const void *mapped;
	bool bf16;                   /* it is bfloat16 there, else real */
};

struct layer_params {
	real *attention_norm;        /* [H] */
	real *ffn_norm;              /* [H] */
	real *qkv_bias, *dense_bias; /* [(nh + 2 nkv) d], [H]; or NULL */
	real *qkv;                   /* [(nh + 2 nkv) d, H] */
	real *dense;                 /* [H, nh d] */
	real *qk_norm;               /* [2, d]: of all query heads, of all key heads; NULL without use_qk_norm */
	real *router;                /* [E, H]; NULL in a dense layer */
	real *expert_bias;           /* [E]; NULL where there is none. No parameter of the loss: its gradient is always 0 */
	real *gate_up;               /* [E, 2I, H]: each expert's gate rows, then its up rows */
	real *down;                  /* [E, H, I] */
	/* [2W, H], W = shared_width(): the shared experts, or all of a dense layer; NULL if W is 0 */
	real *shared_gate_up;
	real *shared_down;           /* [H, W] */
	/* Of an MTP layer, else NULL. Its input is eh_proj [RMSNorm(embedding), RMSNorm(hidden state)]. */
	real *embedding_norm, *hidden_norm, *final_norm; /* [H] */
	real *eh_proj;               /* [H, 2H] */
};

struct params {
	real *memory;                /* [num_elements] the block */
	real *embedding;             /* [V, H] */
	real *norm;                  /* [H] the final norm */
	real *lm_head;               /* [V, H]; the embedding itself when tied */
	struct layer_params *layer;  /* [num_layers()] */
};

/* Points the struct into a block of memory of the rank's num_elements. p->layer must have room for all layers. */
void place_params(struct params *p, real *memory, const struct model_config *c, const struct layout *layout);

/* A gradient bucket: a run of elements of one block that the same ranks share. Each of these ranks, rank i of n, keeps
 * the optimizer's state of shard i of n of the bucket, and updates that shard of the weights (ZeRO-1: Rajbhandari et
 * al. 2020, arXiv:1910.02054). */
struct bucket {
	int64_t offset, size;        /* elements in the block of memory */
	int64_t state;               /* where this rank's shard begins in exp_avg and exp_avg_sq */
	int block;
	bool trained;                /* is_trained(block) */
	enum sharing sharing;
};
enum { BUCKET_SIZE = 4 << 20 };  /* most elements of a bucket */

/* What a rank holds of a model. */
struct parameter_table {
	struct layout layout;
	struct parameter *parameters; /* [num_parameters] in the order of memory */
	int num_parameters;
	int64_t num_elements;        /* of all of them, on this rank */
	struct bucket *buckets;      /* [num_buckets] in the order of memory */
	int num_buckets;
	int64_t num_state;           /* elements whose moments this rank keeps */
};
/* Makes the table of the layout's rank; c is the whole model's config. Parameters that all ranks hold come in the same
 * order everywhere. Fails, and leaves *t empty, when memory is short. */
int parameter_table_init(struct parameter_table *t, const struct model_config *c, const struct layout *layout);
void parameter_table_free(struct parameter_table *t);
/* The parameters of the whole model, whichever ranks hold them. To be freed; NULL when memory is short. */
struct parameter *global_parameters(const struct model_config *c, int *n);
/* Elements of a parameter that this rank holds. */
int64_t parameter_size(const struct parameter *t);

/* The ranks that hold the same elements. */
const struct group *sharing_group(const struct layout *l, enum sharing sharing);
/* The shard of a bucket that this rank keeps the moments of: its size, and where in the bucket it begins. */
int64_t own_shard(const struct layout *l, const struct bucket *b, int64_t *size);
/* Elements from .. end of what the rank holds of a parameter, whose moments it keeps: they begin at `state` in exp_avg
 * and exp_avg_sq. */
struct optimizer_shard { const struct parameter *parameter; int64_t from, end, state; };
struct optimizer_shard_iterator { int bucket, parameter; }; /* begins as {0} */
/* The next shard in the order of memory; false after the last one. */
bool next_optimizer_shard(const struct parameter_table *table, struct optimizer_shard_iterator *w,
		struct optimizer_shard *p);

/* The row of the whole tensor that row r of a shard is. */
int64_t global_row(const struct shard *s, int64_t r);
/* The longest run of elements from `from` on, and up to `end`, of what a rank holds of a parameter that is a run in
 * the whole tensor too. Returns its length, and in *first where it begins in the whole tensor. */
int64_t global_run(const struct parameter *t, int64_t from, int64_t end, int64_t *first);

/* -- counting -- */

/* The parts of a model that parameters are counted in. A tensor belongs to the first one whose pattern is in its name;
 * those of MTP layers, which only training computes, to the last one. */
enum { NUM_PARAMETER_PARTS = 8 };
extern const struct parameter_part { const char *name, *pattern; } parameter_parts[NUM_PARAMETER_PARTS];
struct parameter_count { int64_t total, active; }; /* active: those that one token uses */
/* Counts the parameters of each part, and all of them in the last element. *flops: the FLOPs of training on a token at
 * seq_len: 6 for each active parameter of a matrix product (2 forward, 4 backward), and causal attention over seq_len
 * / 2 tokens on average. Fails when memory is short. */
int count_parameters(struct parameter_count count[NUM_PARAMETER_PARTS + 1], double *flops,
		const struct model_config *c, int64_t seq_len);

#endif
