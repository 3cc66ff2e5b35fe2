/*
 * ling.h - the guide, and the types of the model and of a trainer.
 *
 * The files, from the bottom up. A file may use those above it in this list, and no others.
 *
 *   files/base                 errors, memory, paths, files, checked JSON, checksums, progress, the clock
 *   files/heartbeat            what each rank is doing, for others to see
 *   files/trace                where the time goes: operations and collectives, counted and recorded
 *   kernels                    operations on arrays as forward and backward pairs, optimizer, random numbers
 *   parallel                   ranks: process groups, collectives, layouts
 *   files/config_keys          tables of keys: structures whose fields a user sets in YAML or on the command line
 *   files/config               the config of a run: the table of its keys, its checks, config.json
 *   files/rope                 the rotary embedding of a config: frequencies and their scaling
 *   files/tensors              named tensors in mapped files, whatever the format
 *   files/safetensors          safetensors files
 *   files/collections          hash tables; a heap
 *   files/unicode              UTF-8, classes of characters, NFC
 *   files/tokenizer_pattern    the regular expressions of a tokenizer.json
 *   files/tokenizer_json       reading a tokenizer.json
 *   files/tokenizer            opening a tokenizer; decoding
 *   files/encoder              from text to token ids; the chat form
 *   files/gguf                 llama.cpp's files
 *   files/checkpoint           directories that appear whole or not at all
 *   files/conversation         what a JSON record means: texts and conversations
 *   files/text                 text and JSON lines as input
 *   files/tokenizer_training   making a vocabulary
 *   files/convert              from one format of a model to another
 *   data                       what a run reads and leaves behind: token files, windows, blends, loss masks, metrics
 *   model/parameters           the table of parameters; which part of each a rank holds; gradient buckets
 *   model/weight_files         weights and moments in files, read and written by all ranks together
 *   model/memory               the arrays of a model with their shapes: weights, activations; planned and allocated
 *   model/weights              the weights of a model: random, or from files; what follows from them
 *   model/dump                 what a step computed, whole over all ranks, in a file
 *   training/events            events.jsonl: what happened in a run besides its steps
 *   training/saving            saves: room, the thread that writes, how often
 *   training/spikes            loss and gradient spikes: the detector, and the samples to be tried again
 *   training/decision          what is done with a batch: a step, no step, going back
 *   training/faults            faults to order: --inject
 *   training/health            sick hardware: replicas that differ, slow ranks
 *   training/local_sgd         replicas that train alone for a period, and the outer step that brings them together
 *   ling                       the model (forward, loss, backward) and one training step
 *   training/evaluation        the loss over a token file
 *   training/period            a period of local SGD in a run
 *   training/start             making a trainer: new, or continued from a checkpoint
 *   training/loop              one training run: steps, evaluations, metrics, checkpoints, until its end
 *   commands/                  what follows; main.c has the list of the commands
 *     command                  what a command is: a table of options and a function; what several commands share
 *     options                  reads a command line by such a table
 *     startup                  what a process arranges before a command runs
 *     result                   the result of a command, built once as JSON, printed as JSON or as text
 *     manual                   the manual page and the completion for bash, made from those tables
 *     kv_pool, prefix_tree     memory for keys and values; which beginnings of sequences are computed
 *     engine                   generation: key-value caches, batches, sampling
 *     replicas                 inference on several ranks: its layout, who computes what
 *     samples                  prompts that each evaluation of a training run continues
 *     generator                a model that is open for generation, with its tokenizer
 *     line_reader              lines of standard input, edited on a terminal
 *     result_lines             a file of results, appended as they are ready, and found again
 *     match                    what a pattern finds in a reply; numbers and punctuation in it
 *     tasks, scoring           the task files of `ling eval`, and how they are scored
 *     self_check               each kernel beside a reference; peak FLOP/s, bandwidth
 *     plot_canvas              drawing, PNG, SVG
 *     runs                     reading the directory of a run: metrics by name, events, config
 *     scaling_runs, scaling    what each run was and the loss it reached, from its directory, from and to a table;
 *                              scaling laws: forms, fits, intervals
 *     fit_picture              panels with logarithmic axes
 *     child                    processes that a command starts; the lock of a run's directory
 *     grid                     which runs a grid has
 *     random_steps             training steps on random tokens, to time them
 *     hang                     hung or slow, by the heartbeat of a run; who is in the way, in words
 *     follow                   reading what is new in a file of JSON lines
 *     align_dumps, align_runs  two dumps of training steps, and two curves, beside each other
 *     watched                  a run while it trains, by the files that it writes
 *     train, supervise, sweep, evaluate, generate, chat, tokenize, convert, merge, info, doctor, bench, plot, export,
 *                              trace, report, watch, align, fit, cost, plan    a command each; tokenize has
 *                              train-tokenizer too
 *
 * Read ling.c first, from its top: the forward pass, the loss, the backward pass, the update, the step; then
 * training/loop.c. kernels.h says what each operation computes, docs/training.md has the formulas.
 *
 * Letters for sizes, in every file:
 *   B sequences, L tokens of a sequence, T = B L tokens, H hidden_size, V vocab_size,
 *   nh / nkv query / key-value heads, d head_dim, E experts, k experts of a token,
 *   I moe_intermediate_size, S shared experts, R = T k expert rows: one for each token and chosen expert.
 *   With several ranks: N of the T tokens, and A expert rows that arrive at this rank; see struct layer_activations.
 * Arrays are row-major: in [A, B], B is contiguous. A weight is [out, in] and y = x W^T. dX is the gradient of the
 * loss with respect to X.
 *
 * The program's mutable globals, all of them: error_text (files/base.h), of which each thread has one; resources in
 * files/base.c, the list of mapped and temporary files, which a signal handler must find, and beside it undivided and
 * late_signal, by which it knows when it must wait; stop_requested, which a signal handler sets; in kernels.c
 * use_openblas, set once at the start, and measured, by which a benchmark watches the threads; in parallel.c what this
 * process knows of MPI; in files/heartbeat.c the page of this rank, and in files/trace.c its trace, to which whatever
 * computes or waits writes; and in commands/options.c the two variables of argp, which are argp's own.
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
#include "model/parameters.h"
#include "model/memory.h"
#include "model/weights.h"
#include "model/dump.h"
#include "training/events.h"
#include "training/saving.h"
#include "training/spikes.h"
#include "training/decision.h"
#include "training/faults.h"
#include "training/health.h"
#include "training/local_sgd.h"

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define LING_VERSION "0.1.0"

/* ============================================================================================================
 * The model: what it holds in memory, and all arrays with their shapes, are in model/memory.h
 * ========================================================================================================== */

/* One optimizer step as the model sees it. */
struct step {
	uint64_t seed;
	int64_t index;               /* updates done before this one */
	int64_t num_tokens;          /* of the global batch, without padding */
	int64_t num_targets[1 + MAX_MTP_LAYERS]; /* of the global batch: targets that count at each depth of prediction */
	int64_t first_sequence;      /* of this micro-batch, in the global batch */
	bool accumulate;             /* add to the gradients: every micro-batch of a rank but its first */
	const double *router_mean, *router_std; /* [num_layers()] */
};

/* Sums over the micro-batches of a step so far, in one block of doubles, so that one all_reduce adds them up over the
 * ranks. */
enum {
	SUM_LOSS,                    /* cross-entropy in nats, over the targets that count */
	SUM_STOP,                    /* how many ranks were asked to stop */
	SUM_SAVE_BUSY, SUM_SAVE_FAILED, /* see saver_flags */
	SUM_SAVE_DUE,                /* rank 0 asks for a checkpoint after this step */
	NUM_SUMS
};
struct step_sums {
	/* [size] NUM_SUMS; then one struct layer_sums, of `stride` doubles, for each layer; then the loss, as SUM_LOSS, of
	 * each MTP layer */
	double *values;
	int64_t size, stride;
};
struct layer_sums {              /* of one layer */
	double balance, z;           /* the step's means of balance loss and z-loss */
	double s, s_squared;         /* sums of the router's logits and of their squares */
	double count[];              /* [E] assignments */
};

/* The forward pass for B windows, input [B, L]. acts.depth[0].normed then holds the final norm's output. In training,
 * step gives what the router needs, and the router's statistics are added to sums; in evaluation both are NULL. With
 * sums the MTP layers are computed too, if they are trained (trained_mtp_layers). */
void model_forward(struct model *m, const int32_t *input, int B, const struct step *step, struct step_sums *sums);
/* The forward pass for the next tokens of some sequences: at least one token of each, max_sequences * seq_len
 * together. They enter the caches. Returns their results, rows [H] of the final norm, one segment after the other,
 * which the caller may move. The results are those of model_forward, to the bit: they depend neither on the other
 * segments nor on how a sequence was cut into segments. */
real *model_extend(struct model *m, const struct segment *segments, int n);
/* Logits [n, V] of rows first .. first + n - 1 of the results of the last model_extend or, in a model without tensor
 * parallel, model_forward; n <= head_chunk(V, 1). V is the whole vocabulary, which a tensor group joins. */
void model_logits(struct model *m, real *logits, int64_t first, int64_t n);
/* Cross-entropy in nats, summed over the targets [B, L] of the last forward pass that count (>= 0). With step, also
 * the gradients of the head and of the final norms' outputs, and the loss of each MTP layer that is trained is left in
 * acts.depth. window_loss [B], or NULL: the sum of each window, which is the same whatever the other windows are. */
double model_loss(struct model *m, const int32_t *target, int B, const struct step *step, double *window_loss);
/* The backward pass, from what model_loss left; to be called after it with the same input, B and step. `reduction` is
 * told when the gradients of a block are complete on this rank: NULL for every micro-batch but a rank's last, and in
 * one process. */
void model_backward(struct model *m, const int32_t *input, int B, const struct step *step,
		struct gradient_reduction *reduction);
/* Sum of squares of the whole gradient, after the reduction, every distinct parameter once. The same number on all
 * ranks. */
double gradient_square(const struct model *m);

struct step_sums step_sums_shape(const struct model_config *c); /* size and stride alone */
int step_sums_init(struct step_sums *s, const struct model_config *c); /* allocates values, with zeros */

/* ============================================================================================================
 * Schedules and one training step
 * ========================================================================================================== */

/* Learning rate of update `step` (from 1) of `steps`; progress: tokens before it / tokens of the run. */
double learning_rate(const struct config *c, int64_t step, int64_t steps, double progress);

struct sampler;
struct trainer {
	struct config config;
	struct model model;
	struct gradient_reduction reduction;
	struct blend train;          /* the files of data.train */
	struct tokens valid[MAX_SOURCES];
	struct trainer_state state;
	struct model_files files;    /* of init_from, or of the checkpoint that the run continues from; on rank 0 */
	char tokenizer[PATH_LEN];    /* of the run: data.tokenizer, or the directory of init_from's; "none" */
	struct event_log events;     /* of rank 0, while it trains */
	struct spike_detector spikes;
	struct retry_queue retry;    /* samples of skipped batches that wait */
	int rollbacks;               /* times that the run went back to a checkpoint */
	struct faults faults;        /* --inject */
	struct slow_ranks slow_ranks;
	struct local_sgd local;
	struct synchronisation synchronisation; /* of local SGD, the last one */
	struct batch_sample *samples; /* [train.batch] of the whole current batch */
	struct saver saver;
	struct save_schedule schedule; /* of checkpoint.every auto; rank 0 decides */
	bool save_due;               /* by it, after this step; the same on all ranks */
	int64_t saved_step;          /* of the newest checkpoint that this process knows of; -1: none */
	double save_seconds;         /* that training waited for the last save, */
	double unreported_save_seconds; /* which the next line of the metrics tells */
	struct text unwritten;       /* lines of metrics for which the disk had no room */
	struct dump *dump;           /* NULL: no step is dumped */
	struct step_sums sums;
	int64_t steps, tokens;       /* of the whole run */
	double flops_per_token;      /* of training, see count_parameters */
	double peak_flops;           /* FLOP/s of all ranks together, measured before; 0: not known */
	/* The sequences of the batch that this rank computes, micro-batch after micro-batch; see micro_batch_place */
	int32_t *input, *target;     /* [sequences, L] */
	int32_t *document;           /* [sequences, L], see rope_forward; NULL where no file's documents are masked */
	int32_t *length;             /* [sequences] tokens of each that are no padding */
	int64_t source_samples[MAX_SOURCES]; /* for the metrics */
	double *expert_load;         /* [layers with experts] for the metrics */
	int64_t *expert_counts;      /* [layers with experts, E] for the metrics */
	double *expert_bias;         /* [layers with experts] for the metrics */
	struct valid_loss *valid_losses; /* [data.num_valid] of the named sets, which may be fewer, for the metrics */
	/* of the last step */
	double first_loss;           /* cross-entropy of this rank's first micro-batch, in nats, summed over its targets */
	double work;                 /* multiply-adds of this rank's forward passes */
	/* a rank was asked to stop; the same on all ranks, in a period of local SGD on those of the replica */
	bool stop;
	double communication;        /* seconds of it on this rank */
	int64_t bytes_sent[NUM_TRAFFIC]; /* by this rank */
	int slowest;                 /* the rank that computed longest */
	/* Continues the prompts of eval.samples and eval.sample_file with the current weights, into samples.jsonl:
	 * commands/samples.h. NULL: there are none. Collective. Returns 1 where a stop ended it: nothing is written. */
	int (*write_samples)(struct trainer *t);
	struct sampler *sampler;     /* what it needs */
	double evaluation_seconds;   /* of all evaluations of this process, */
	int num_evaluations;         /* and how many they are */
};
/* Draws the next batch: samples that are to be tried again, and new ones. Reads this rank's sequences of it into input
 * and target. Returns the sequences of the global batch. -1 on error, which may be on this rank alone. */
int64_t trainer_next_batch(struct trainer *t);
/* One optimizer step on the global batch of `batch` sequences whose part of this rank is in input and target. Fills
 * *m, whose arrays are the trainer's. If the step is not taken, weights, moments and state are unchanged,
 * but for detector and queue. */
enum step_result trainer_step(struct trainer *t, int64_t batch, struct metrics *m);
/* Whether this is rank 0, which alone prints, writes the metrics, and begins and commits checkpoints. */
bool is_rank0(const struct trainer *t);

/* What else a run needs of the step. */
/* Draws the samples [batch] of a global batch into t->samples: those to be tried again, then those that a period of
 * local SGD left out, then new ones. Every rank draws all of them. */
void trainer_draw(struct trainer *t, int64_t batch);
/* The sequences of a global batch that are of one replica. Replica r has those from r times as many on. */
int64_t replica_batch(const struct trainer *t, int64_t batch);
/* The micro-batches of the replica's part of the global batch that this rank computes. */
struct micro_batches own_micro_batches(const struct trainer *t, int64_t batch);
/* Tells of a save that has ended: see saver_report. */
void report_save(struct trainer *t, int ended);

/* Set by the signals that ask for a stop (commands/train.c): the current step is finished and saved, and a validation
 * ends within a micro-batch. Global because a signal handler gets no pointer of ours. */
extern volatile sig_atomic_t stop_requested;

#endif
