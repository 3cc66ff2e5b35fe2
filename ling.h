/*
 * ling.h - the guide, and the model's and the trainer's types.
 *
 * What to read first, and where things are. A file may use those above it in this list, and no others.
 *
 *   files/base                 errors, memory, paths, files, checked JSON, checksums, progress, the clock
 *   kernels                    arithmetic on arrays: each operation as a forward and backward pair; optimizer; random numbers
 *   parallel                   ranks: process groups, collectives, layouts
 *   files/config               the table of all keys of a config; YAML and config.json
 *   files/tensors              named tensors in mapped files, whatever the format
 *   files/safetensors          safetensors files
 *   files/tokenizer            encoding, decoding, the chat form
 *   files/gguf                 llama.cpp's files
 *   files/checkpoint           directories that appear whole or not at all
 *   files/text                 text and JSON lines as input
 *   files/tokenizer_training   making a vocabulary
 *   files/convert              from one format of a model to another
 *   data                       what a run reads and leaves behind: token files, windows, loss masks, metrics
 *   ling                       the model (parameters, forward, loss, backward) and one training run
 *   commands/                  main, and a file for each command or family of commands
 *
 * Letters used for sizes, in every file:
 *   B sequences, L tokens of a sequence, T = B*L tokens, H hidden_size, V vocab_size,
 *   nh / nkv query / key-value heads, d head_dim, E experts, k experts of a token,
 *   I moe_intermediate_size, S shared experts, R = T*k expert rows (one for each token and chosen expert);
 *   where ranks share the work, N of the T tokens and A arriving expert rows, see struct layer_activations.
 * Arrays are row-major; [A, B] has B contiguous. A weight is [out, in] and y = x W^T.
 *
 * The program's mutable globals, all of them: error_text (files/base.h), of which each thread has one; stop_requested, which a signal
 * handler sets; use_openblas in kernels.c, set once at the start; and in parallel.c what this process knows of MPI, of which there is one.
 */
#ifndef LING_H
#define LING_H

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "files/tensors.h"
#include "files/tokenizer.h"
#include "files/checkpoint.h"
#include "data.h"

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LING_VERSION "0.1.0"

/* Refuses a layout that does not fit the model, naming the values that would. */
int layout_check(const struct model_config *c, int ranks, int tensor, int expert);

/* Parameters: one block of memory, named piece by piece in a table, and pointers into it. Gradients have the same form. */
enum init { INIT_ONES, INIT_ZEROS, INIT_NORMAL, INIT_ROUTER };

/* Which ranks hold the same elements, and add up their gradients: all, those of a data group, or those with the same experts. */
enum sharing { SHARED_BY_WORLD, SHARED_BY_DATA, SHARED_BY_EXPERT_DATA };

struct parameter {                /* a parameter as Hugging Face names it, and the part of it that this rank holds */
	char name[MAX_NAME];
	int64_t rows, cols;          /* of the whole; a vector has cols 0; vectors (norms, biases) have no weight decay */
	struct shard { int64_t row[3], num_rows[3], col, num_cols; } shard; /* up to three ranges of rows, one behind the other, and one of columns */
	int64_t offset;              /* its first element in the block */
	int block;                  /* 0 the embedding, 1 + l layer l, then the rest */
	int expert;                  /* of an expert's tensor */
	enum init init;
	enum sharing sharing;
	const void *mapped;          /* NULL, or where that part is in a mapped file, which then stands for its place in the block: reals, or */
	bool bf16;                   /* bfloat16 */
};

/* A run of elements of one bucket that the same ranks share. Rank i of them keeps slice i of the optimizer's state, and updates that
 * slice of the weights (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054). */
struct bucket { int64_t offset, size, state; int block; enum sharing sharing; }; /* state: where this rank's slice begins in its moments */
enum { BUCKET_SIZE = 4 << 20, PENDING = 8 }; /* elements; gradient chunks under way at once */

struct layer_params {
	real *attention_norm;        /* [H] */
	real *ffn_norm;              /* [H] */
	real *qkv_bias, *dense_bias; /* [(nh + 2 nkv) d], [H]; or NULL */
	real *qkv;                   /* [(nh + 2 nkv) d, H] */
	real *dense;                 /* [H, nh d] */
	real *router;                /* [E, H]; NULL in a dense layer */
	real *gate_up;               /* [E, 2I, H]: each expert's gate rows, then its up rows */
	real *down;                  /* [E, H, I] */
	real *shared_gate_up;        /* [2W, H], W = shared_width(): the shared experts, or all of a dense layer; NULL if W is 0 */
	real *shared_down;           /* [H, W] */
};

/* The matrices as the forward pass reads them: in that block, or, of a model that is only evaluated, where they stand in its files. */
struct layer_weights {
	struct weight qkv, dense, router, shared_gate_up, shared_down;
	struct weight *gate_up, *down; /* [num_experts] */
};

struct params {
	real *memory;                /* [num_elements] */
	real *embedding;             /* [V, H] */
	real *norm;                  /* [H] */
	real *lm_head;               /* [V, H]; the embedding itself when tied */
	struct layer_params *layer;  /* [num_hidden_layers] */
};

/* What the forward pass leaves for the backward pass. Where a layer need not keep it (see enum model_mode), all share the same arrays.
 * Between attention and head a rank holds its slice of the micro-batch's T tokens (sequence parallel, Korthikanti et al. 2022,
 * arXiv:2205.05198): N of them, R = N k, and A >= R expert rows may arrive from the expert group. Without tensor parallel N = T, alone A = R. */
struct layer_activations {
	real *input;                 /* [N, H] the residual stream before the layer */
	real *attention_rstd;        /* [N] */
	real *qkv;                   /* [T, (nh + 2 nkv) d] after RoPE */
	real *attention;             /* [T, nh d] */
	real *lse;                   /* [T, nh] */
	real *residual;                /* [N, H] the residual stream between attention and experts */
	real *ffn_rstd;              /* [N] */
	real *p, *router_lse;        /* [N, E], [N] of the router's logits */
	real *p_hat;                 /* [N, E] with routing noise; p itself where there is no routing warmup */
	real *balance_factor;        /* [B, E] E f_e of the tokens that count together */
	int32_t *index;              /* [N, k] chosen experts */
	real *weight;                /* [N, k] */
	real *row_weight;            /* [R] the same in row order */
	int32_t *position, *token;   /* [R] see dispatch_plan */
	int64_t *offset;             /* [E + 1] */
	/* the expert rows that arrived, in the order of this rank's experts; without expert parallel the rank's own rows */
	int64_t num_rows, *expert_offset; /* [experts + 1] */
	int32_t *row;                /* [A] where each row of that order stands in arrivals, or the token it is */
	real *arrivals;              /* [A, H] in the order of arrival; NULL without expert parallel */
	real *expert_weight;         /* [A] */
	int64_t *arrived, *sent, *received; /* [ranks, experts] rows that arrived; [ranks] rows to and from each rank */
	real *gate_up;               /* [A, 2I] */
	real *shared_gate_up;        /* [N, 2W] */
};

struct activations {
	struct layer_activations *layer; /* [num_hidden_layers] */
	real *output;                /* [N, H] the residual stream after the last layer */
	real *rstd;                  /* [N] of the final norm */
	real *normed;                /* [N, H] what the last RMSNorm gave */
	real *gathered, *partial;    /* [T, H] every rank's slice; this rank's share of a sum over the tensor group; NULL without such a group */
	/* work space, one for all layers */
	real *logits;                /* [N, E] the router's */
	real *rows;                  /* [R, H] tokens in expert order, and what the experts made of them */
	real *expert_rows, *returns; /* [A, H] in the order of the experts, of arrival; expert_rows is rows without expert parallel */
	real *arrived_weight;        /* [A] */
	real *act;                   /* [A, I] */
	real *shared_act;            /* [N, W] */
	real *reduce_scatter_scratch;
	real *attention_scratch, *sum_scratch;
	int64_t *expert_count;       /* [E] */
	double *sequence_count, *sequence_p; /* [B, E] */
	struct router_sums *router_sums; /* [B] */
	real *head_logits, *head_input, *head_max; /* [C, V], [C, H], [C]: a chunk of C = head_chunk() tokens */
	double *head_loss;           /* [2, C] loss, and sum of exponentials */
	double *head_norm;           /* [H] column sums of squares */
	/* backward only; dX has the shape of X */
	real *dstream;               /* [N, H] gradient of the residual stream */
	real *dnormed, *dqkv, *dattention, *dlogits, *dgate_up, *dexpert_weight, *dweight, *dshared_gate_up;
};

/* Where the time of a step goes; model_timer() adds the time since the last call to a part. */
enum phase { PHASE_ATTENTION, PHASE_ROUTER, PHASE_PERMUTE, PHASE_EXPERTS, PHASE_HEAD, PHASE_OPTIMIZER, PHASE_OTHER, NUM_PHASES };

struct model {
	struct model_config global, config; /* of the whole model; and with this rank's part of heads and vocab_size */
	int64_t first_vocab;         /* the first vocabulary entry of that part */
	int num_experts;             /* of this rank */
	int max_sequences, seq_len;  /* activations have room for this many windows of seq_len tokens */
	enum model_mode mode;
	struct parameter *parameters;      /* [num_parameters] in the order of memory */
	int num_parameters;
	int64_t num_elements;          /* of this rank */
	struct params params, grads;
	struct weight embedding, lm_head;
	struct layer_weights *weights; /* [num_hidden_layers] */
	struct weight *expert_weights; /* theirs */
	struct tensors *files;       /* open as long as weights stand in them, or NULL */
	size_t reserved_bytes;       /* of params.memory in evaluation: pages come as they are written */
	struct bucket *buckets;        /* [num_buckets] in the order of memory */
	int num_buckets;
	int64_t num_state;           /* elements that this rank keeps the optimizer's moments of */
	real *exp_avg, *exp_avg_sq;  /* [num_state] */
	struct all_to_all dispatch;    /* expert rows under way */
	/* gradient chunks under way: number i of this backward pass in place i % PENDING */
	struct { struct reduce_scatter scatter; int bucket; } pending[PENDING];
	int buckets_started, buckets_finished;
	real *pending_scratch;       /* [PENDING, pending_size] */
	int64_t pending_size;
	real *head_scale;            /* [H] NormHead's 1 / (n_j + 1e-7): the head norm cache; NULL without norm_head */
	real *rope;                  /* [num_positions, d], at least seq_len */
	int64_t num_positions;
	const int32_t *document;     /* [T] of the micro-batch, see rope_forward; set before model_forward, kept until model_backward; may be NULL */
	struct activations acts;
	void *acts_memory, *arrivals_memory;
	size_t acts_bytes, arrivals_bytes;
	struct layout layout;
	double phase_seconds[NUM_PHASES], phase_start; /* of the step in hand */
};

/* One optimizer step as the model sees it. */
struct step {
	uint64_t seed;
	int64_t index;               /* updates done before this one */
	int64_t num_tokens;          /* real tokens of the global batch */
	int64_t num_targets;         /* valid targets of the global batch */
	int64_t first_sequence;      /* of this micro-batch, in the global batch */
	bool accumulate, last;       /* add to the gradients: all but the first micro-batch; the last one sends them on */
	const double *router_mean, *router_std; /* [num_hidden_layers] */
};

/* Sums over the micro-batches of a step, so far: one block of doubles, for one sum over the ranks. values[0] is the cross-entropy in nats
 * over valid targets, values[1] the ranks that were asked to stop; layer_sums() finds a layer's part. */
struct step_sums { double *values; int64_t size, stride; };
struct layer_sums {
	double balance, z;           /* their weighted sums are the step's means */
	double s, s_squared;         /* of the router's logits */
	double count[];              /* [E] assignments */
};

/* Makes this rank's part of a model, with room for max_sequences windows of seq_len tokens, weights not set. The layout must be connected.
 * Fails when memory does not suffice, saying how much is needed. model_free may follow a failure. */
int model_init(struct model *m, const struct model_config *config, const struct layout *layout, int max_sequences, int seq_len,
		enum model_mode mode);
void model_free(struct model *m);
void model_randomize(struct model *m, uint64_t seed);
/* Reads all parameters from a Hugging Face directory; a tensor that is missing, or not the model's, is an error. For evaluation, matrices
 * in float32 and bfloat16 are not copied but used where they stand in the files, from which the system reads them as they are needed. The
 * checksums of all tensors are checked first, but in evaluation only where the files are no larger than memory. */
int model_load(struct model *m, const char *dir);
/* Renews the head norm cache; call whenever weights have changed. */
void model_update_head_scale(struct model *m);
/* The forward pass for B windows of input [B, L]; acts.normed holds the result. In training, step gives what the router needs and sums
 * takes its statistics; in evaluation both are NULL. */
void model_forward(struct model *m, const int32_t *input, int B, const struct step *step, struct step_sums *sums);
/* Logits [n, V] of tokens first .. first+n-1 of the last forward pass (or of model_extend), n <= head_chunk(V, 1), of a model without
 * tensor parallel. */
void model_logits(struct model *m, real *logits, int64_t first, int64_t n);

/* The forward pass for the next tokens of some sequences, at least one of each, together at most max_sequences * seq_len; they enter the caches,
 * and acts.normed holds their results, one segment behind the other. The bits of a result depend neither on the other segments nor on how
 * a sequence was cut into segments: they are model_forward's. */
void model_extend(struct model *m, const struct segment *segments, int n);
/* Cross-entropy in nats, summed over the valid targets of the last forward pass; with step, also its gradients. */
double model_loss(struct model *m, const int32_t *target, int B, const struct step *step);
/* The backward pass from what model_loss left; call after it with the same step. */
void model_backward(struct model *m, const int32_t *input, int B, const struct step *step);
/* Sum of squares of the gradient, of which each rank holds the sum over the ranks in its slices: every distinct parameter counts once. */
double gradient_square(const struct model *m);
void model_timer(struct model *m, enum phase part);
int step_sums_init(struct step_sums *s, const struct model_config *c); /* to be freed with free(s->values) */
struct layer_sums *layer_sums(const struct step_sums *s, int layer);
/* Width of the dense SwiGLU of a layer: S I, or intermediate_size in the first first_k_dense_replace layers. */
int shared_width(const struct model_config *c, int layer);
bool has_experts(const struct model_config *c, int layer);
/* Tokens of which the head makes logits at a time, with the whole vocabulary V split over `tensor` ranks. */
int64_t head_chunk(int64_t V, int tensor);

/* Learning rate of update `step` (from 1) of `steps`, with progress = tokens before it / tokens of the run. */
double learning_rate(const struct config *c, int64_t step, int64_t steps, double progress);
/* Sequences of the update that starts after `tokens` tokens. */
int64_t batch_size(const struct config *c, int64_t tokens);
/* Length of the whole run, from where it stands: after `step` updates and `token` tokens. */
void run_length(const struct config *c, int64_t step, int64_t token, int64_t *steps, int64_t *tokens);

struct trainer {
	struct config config;
	struct model model;
	struct tokens train[MAX_SOURCES], valid[MAX_SOURCES];
	struct trainer_state state;
	struct source_state next_sources[MAX_SOURCES]; /* what state.sources will be once the batch in hand is done */
	struct step_sums sums;
	int64_t steps, tokens;       /* of the whole run */
	int32_t *input, *target;     /* [batch, L] this step's sequences */
	int32_t *document;           /* [batch, L], see rope_forward; NULL without data.document_mask */
	int64_t source_samples[MAX_SOURCES]; /* for the metrics */
	double *expert_load;         /* [layers with experts] */
	/* of the last step */
	bool stop;                   /* a rank was asked to stop */
	double communication;        /* seconds of it on this rank */
	int64_t bytes_sent[NUM_TRAFFIC]; /* by this rank */
	int slowest;                 /* the rank that computed longest */
};
/* Makes a trainer without data and with weights not set; trainer_free may follow a failure. */
int trainer_allocate(struct trainer *t, const struct config *c);
/* Makes a trainer: data opened and checked, weights random, from init_from, or from the newest checkpoint of output_dir. */
int trainer_init(struct trainer *t, const struct config *c);
void trainer_free(struct trainer *t);
/* Fills input and target with the next batch; returns its sequences, or -1. */
int64_t trainer_next_batch(struct trainer *t);
/* One optimizer step on the batch that stands in input and target. m->expert_load points into the trainer. Fails, with
 * the weights unchanged and *m filled, when loss or gradient is not finite. */
int trainer_step(struct trainer *t, int64_t batch, struct metrics *m);
int trainer_save(struct trainer *t);
int trainer_run(struct trainer *t);

/* Mean cross-entropy over the windows of a token file, one window at a time, so that no batching can change it. */
struct evaluation { double loss; int64_t tokens, bytes; }; /* tokens: those whose loss counts; bytes: of their text, 0 where `tokenizer` is NULL */
int evaluate(struct model *m, const struct tokens *data, const struct tokenizer *tokenizer, bool document_mask, int64_t max_windows,
		struct evaluation *e);

/* Set by SIGTERM and SIGINT: the step in hand is finished and saved. Global because a signal handler has no arguments. */
extern volatile sig_atomic_t stop_requested;

/* Those of the whole model, whoever holds them. */
struct parameter *global_parameters(const struct model_config *c, int *n);

/* Bytes that a rank takes; the same code that later cuts the memory counts it. `arrivals` is the most that expert rows can take, `saving`
 * what is taken while a checkpoint is written. */
struct memory_plan {
	int64_t num_elements, num_parameters, num_buckets, num_state;
	size_t weights, gradients, optimizer, activations, arrivals, reduction, saving;
};

/* c is the whole model's config. */
int plan_memory(struct memory_plan *plan, const struct model_config *c, const struct layout *layout, int64_t B, int64_t L,
		enum model_mode mode);

/* Makes the rotary embedding's table at least n positions long; -1 when memory is short. */
int place_rope(struct model *m, int64_t n);

struct step_sums step_sums_shape(const struct model_config *c);

/* Whether this rank speaks for all: it prints, writes the metrics, and makes and names checkpoints. */
bool is_rank0(const struct trainer *t);

/* A first signal stops and saves, a second one ends the program at once. USR1 is what mpirun passes on to its ranks; at TERM and INT it kills
 * them within a second. Nobody listening to the progress is no reason to stop. */
void catch_signals(void);

/* The parts that parameters are counted in; a tensor belongs to the first one whose pattern is in its name. */
enum { NUM_PARAMETER_PARTS = 7 };
extern const struct parameter_parts_row { const char *name, *pattern; } parameter_parts[NUM_PARAMETER_PARTS];

struct parameter_count { int64_t total, active; }; /* active ones are those that one token uses */

/* Counts the parameters of each part, and all of them in the last element. Also gives the FLOPs of training on a token at seq_len: 6 for
 * each active parameter of a matrix product (2 forward, 4 backward), and causal attention over seq_len / 2 tokens on average. */
int count_parameters(struct parameter_count count[NUM_PARAMETER_PARTS + 1], double *flops, const struct model_config *c,
		int64_t seq_len);

#endif
