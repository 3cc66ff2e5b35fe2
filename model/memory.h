/*
 * model/memory.h - what a model holds in memory: weights, activations, scratch. All of it is planned first, and then
 * allocated once. Letters for sizes as in ling.h.
 */
#ifndef LING_MODEL_MEMORY_H
#define LING_MODEL_MEMORY_H

#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "files/tensors.h"
#include "model/parameters.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The same matrices as the forward pass reads them: in the block, or, in a model that is only evaluated, in its mapped
 * files. */
struct layer_weights {
	struct weight qkv, dense, router, shared_gate_up, shared_down;
	struct weight *gate_up, *down; /* [num_experts] */
};

/* ============================================================================================================
 * Activations
 * ========================================================================================================== */

/* What a layer's forward pass leaves for its backward pass. Where a layer need not keep it (see enum model_mode), all
 * layers share the same arrays.
 *
 * One process alone: N = T, A = R, and experts = E. Tensor parallel: each rank of the tensor group has its heads of
 * all T tokens in attention, and its N of the T tokens everywhere else (sequence parallel: Korthikanti et al. 2022,
 * arXiv:2205.05198). Then R = N k. Expert parallel: each rank has E / ranks experts, which compute A expert rows, 0 <=
 * A <= ranks R. A token's row goes once to each rank that has some of its experts: S rows are sent, S <= N min(k,
 * ranks), and P rows arrive, P <= ranks N. */
struct layer_activations {
	real *input;                 /* [N, H] the residual stream before the layer */
	real *attention_rstd;        /* [N] */
	real *qkv;                   /* [T, (nh + 2 nkv) d] after RoPE */
	real *qk, *qk_rstd;          /* [T, (nh + nkv) d], [T, nh + nkv] of QK-norm, in training; without it NULL */
	real *attention;             /* [T, nh d] */
	real *lse;                   /* [T, nh] */
	real *residual;              /* [N, H] the residual stream between attention and experts */
	real *ffn_rstd;              /* [N] */
	real *logits;                /* [N, E] the router's; kept for the backward pass of sigmoids alone */
	real *p, *router_lse;        /* [N, E], [N] the scores, softmax or sigmoid of the logits, and their log-sum-exp */
	/* [N, E] the scores of the logits with routing noise; p itself where there is no routing warmup */
	real *p_hat;
	real *balance_factor;        /* [B, E] E f_e of the tokens that count together */
	int32_t *index;              /* [N, k] chosen experts */
	real *weight;                /* [N, k] their weights */
	int32_t *position;           /* [R] the place of each assignment t k + j among the expert rows; with an expert group
	                              * among the assignments that are sent */
	/* The expert rows that this rank computes, sorted by expert: those of expert e are expert_offset[e] ..
	 * expert_offset[e + 1] - 1. Alone num_rows = R, see dispatch_plan. */
	int64_t num_rows;            /* A */
	int64_t *expert_offset;      /* [experts + 1] */
	int32_t *row;                /* [A] for each row: which of the arrivals is its input; alone, which token */
	real *expert_weight;         /* [A] */
	/* With an expert group, else NULL; see send_plan and arrival_plan */
	int32_t *sent_token;         /* [S] the token of each row that is sent */
	int32_t *sent_row;           /* [R] the row of each assignment that is the first of its row, else -1; alone it is
	                              * `position` */
	int32_t *place, *begin;      /* [A], [P + 1] of the arrived assignments, of the arrived rows */
	real *arrivals;              /* [P, H] in the order of arrival; alone the rows are read from the tokens */
	int64_t *sent_rows, *received_rows; /* [ranks] to and from each rank */
	int64_t *sent_assignments, *received_assignments; /* [ranks] */
	real *gate_up;               /* [A, 2I] */
	real *shared_gate_up;        /* [N, 2W] */
};

/* One depth of prediction: depth 0 is the model itself, which predicts the next token; depth i is MTP layer i - 1,
 * which predicts one token further than depth i - 1. */
struct depth_activations {
	real *output;                /* [N, H] the residual stream after the last layer */
	real *rstd;                  /* [N] of the final norm */
	/* [N, H] the final norm's output, which is the hidden state that the head and the next depth read; and its
	 * gradient. Where there is no further depth, these are `normed` and `dnormed` of struct activations. */
	real *normed, *dnormed;
	double loss;                 /* of the last model_loss: cross-entropy in nats, summed over the targets that count */
	/* of MTP layers */
	real *embedding;             /* [N, H] of the tokens that are depth places further */
	real *embedding_rstd, *hidden_rstd; /* [N] of the norms of embedding and hidden state */
};

struct activations {
	struct layer_activations *layer; /* [num_layers()] */
	struct depth_activations depth[1 + MAX_MTP_LAYERS];
	real *normed;                /* [N, H] the output of the last RMSNorm that was computed */
	real *gathered;              /* [T, H] all tokens, gathered from the tensor group; alone NULL */
	real *partial;               /* [T, H] this rank's summand of a sum over the tensor group; alone NULL */
	/* work space, one for all layers */
	int32_t *shifted;            /* [T] tokens, or targets, of an MTP layer; NULL without MTP */
	real *mtp_input;             /* [N, 2 H] what its eh_proj multiplies, and the gradient; NULL without MTP */
	real *rows;                  /* [S, H] tokens that are sent to experts, and what comes back; alone expert_rows */
	real *expert_rows;           /* [A, H] the experts' results, sorted by expert */
	real *returns;               /* [P, H] their sums, in the order of arrival; alone NULL */
	/* [R, 2] and [A, 2] assignments as they are sent and as they arrive, and their gradients; alone NULL */
	real *sent_assignments, *arrived_assignments;
	real *act;                   /* [A, I] */
	real *shared_act;            /* [N, W] */
	real *reduce_scatter_scratch, *attention_scratch, *sum_scratch;
	int64_t *rank_counts;        /* [2, ranks, 2] numbers of rows and of assignments; alone NULL */
	double *sequence_count, *sequence_q; /* [B, E] of each sequence: assignments to each expert, and sums of q */
	struct router_sums *router_sums; /* [B] */
	real *head_logits, *head_input, *head_max; /* [C, V], [C, H], [C]: a chunk of C = head_chunk() tokens */
	double *head_loss;           /* [2, C] loss, and sum of exponentials */
	double *head_norm;           /* [H] column sums of squares */
	/* for the backward pass */
	real *dstream;               /* [N, H] of the residual stream */
	real *dnormed;               /* [N, H] */
	real *dqkv, *dattention;     /* [T, (nh + 2 nkv) d], [T, nh d] */
	real *dlogits, *dweight;     /* [N, E], [N, k] */
	real *dgate_up, *dexpert_weight; /* [A, 2I], [A] */
	real *dshared_gate_up;       /* [N, 2W] */
	/* shared_scratch of attention_backward, which runs when nobody needs head_logits and dgate_up: the memory of one of
	 * them */
	real *attention_shared;
	int64_t attention_shared_size;
};

/* ============================================================================================================
 * The model
 * ========================================================================================================== */

struct model {
	struct model_config global;  /* of the whole model */
	struct model_config config;  /* the same, but with this rank's numbers of heads and of vocabulary entries */
	int64_t first_vocab;         /* the first vocabulary entry of this rank */
	int num_experts;             /* of this rank */
	int max_sequences, seq_len;  /* activations have room for this many windows of seq_len tokens */
	enum model_mode mode;
	struct layout layout;
	struct parameter_table table; /* the parameters that this rank holds */
	struct params params, grads;
	struct weight embedding, lm_head;
	struct layer_weights *weights; /* [num_layers()] */
	struct weight *expert_weights; /* what gate_up and down of `weights` point into */
	struct tensors *files;       /* open as long as weights are mapped in them, or NULL */
	size_t reserved_bytes;       /* of params.memory in evaluation: pages come as they are written */
	real *exp_avg, *exp_avg_sq;  /* [table.num_state] the moments that this rank keeps */
	real *head_scale;            /* [H] 1 / (n_j + 1e-7) of NormHead: the head norm cache; NULL without norm_head */
	real *rope;                  /* [num_positions, rotary_dim()], num_positions >= seq_len */
	int64_t num_positions;
	int64_t rope_length;         /* of the sequences, for rope_scaling of type dynamic: seq_len at first */
	/* [T] see rope_forward; set before model_forward, kept until model_backward; may be NULL */
	const int32_t *document;
	/* [B] how many tokens of each window are no padding, which the router's losses and statistics leave out; set
	 * before model_forward in training, kept until model_backward; NULL: all are */
	const int32_t *length;
	struct activations acts;
	void *acts_memory, *arrivals_memory;
	size_t acts_bytes, arrivals_bytes;
	struct collective dispatch;  /* expert rows under way */
	struct dump *dump;           /* of the current step, see model/dump.h; NULL: none */
	/* Called by the forward pass before it reads the weights of a block (struct parameter), in the order of the blocks;
	 * NULL: they are all there. */
	void (*before_block)(void *context, int block);
	void *before_block_context;
};

/* Makes this rank's part of a model, weights not set, with room for max_sequences windows of seq_len tokens. The
 * layout must be connected. Fails when memory does not suffice, and says how much is needed. model_free may follow a
 * failure. */
int model_init(struct model *m, const struct model_config *config, const struct layout *layout, int max_sequences,
		int seq_len, enum model_mode mode);
void model_free(struct model *m);
/* Lets the forward pass find its weights where they are: in the block, or in mapped files. For whoever has changed
 * parameter.mapped. */
void place_weights(struct model *m);
/* The reduction of the gradients over the ranks, while the backward pass goes on: as soon as the gradients of a block
 * are complete on this rank, its buckets are on their way. When the backward pass ends, each rank has the sum over the
 * ranks in its shards. */
enum { MAX_REDUCTIONS = 8 };     /* buckets under way at once */
struct gradient_reduction {
	/* reduction i has place i % MAX_REDUCTIONS */
	struct { struct reduce_scatter scatter; int bucket; } under_way[MAX_REDUCTIONS];
	int started, finished;       /* reductions of this backward pass */
	/* With parallel.reduce bf16, else NULL: [num_state] what an update changes of the weights of this rank's shards, in
	 * bfloat16. Gradients are then sent in bfloat16 too. */
	uint16_t *changes;
	real *scratch;               /* [MAX_REDUCTIONS, scratch_size]; NULL in one process */
	int64_t scratch_size;
};
/* Allocates the scratch and, with bf16 and several ranks, `changes`. gradient_reduction_free may follow a failure. */
int gradient_reduction_init(struct gradient_reduction *r, const struct parameter_table *table, bool bf16);
void gradient_reduction_free(struct gradient_reduction *r);

/* How many tokens the head computes logits for at a time. V: entries of the whole vocabulary, which `tensor` ranks
 * split. */
int64_t head_chunk(int64_t V, int tensor);
/* Makes the rotary embedding's table at least n positions long. Returns -1, without setting error_text, when memory is
 * short. */
int extend_rope(struct model *m, int64_t n);
/* Computes the rotary embedding's table for sequences of `length` tokens, which only rope_scaling of type dynamic
 * depends on. For a model whose seq_len is not the length of its sequences; before anything is computed. */
void set_rope_length(struct model *m, int64_t length);
/* What a rank holds, and the bytes that it takes. */
struct memory_plan {
	int64_t num_elements, num_state; /* as in struct parameter_table */
	int64_t num_foreign;         /* elements that are trained here, and whose moments another rank keeps */
	size_t weights, gradients, optimizer, activations;
	size_t arrivals;             /* the most that expert rows can take, when all of a group go to one rank, */
	size_t balanced_arrivals;    /* and what they take when the experts are balanced */
	size_t reduction;            /* scratch of the reduction of gradients, */
	size_t changes;              /* and what parallel.reduce bf16 takes beside it */
	size_t outer;                /* of several replicas: last synchronised weights, outer momentum, scratch */
	size_t saving;               /* taken while a checkpoint is written or copied, beside the copy */
	size_t copy;                 /* of what the rank writes: saves that go on while training does (checkpoint.async) */
};
/* Elements of scratch for the sums of a block over the replicas (training/local_sgd.h), of the largest block. */
int64_t outer_scratch(const struct parameter_table *table);
/* Plans a rank of the layout, for micro-batches of B windows of L tokens; c is the whole model's config. Allocates none
 * of it. Fails when a micro-batch has too many expert rows to be counted. */
int plan_memory(struct memory_plan *plan, const struct model_config *c, const struct layout *layout, int64_t B,
		int64_t L, enum model_mode mode);
/* The share of a rank's tokens that have at least one of their experts on a given rank of an expert group of `ranks`,
 * when each choice of k of the E experts is as likely as any other: 1 - C(E - E / ranks, k) / C(E, k). */
double dispatch_share(const struct model_config *c, int ranks);
/* Bytes that are certain to be needed: all but arrivals, changes and copy. */
double planned_bytes(const struct memory_plan *p);

#endif
