/*
 * model/dump.h - what a training step computed, whole over all ranks, in a file: train.dump.
 *
 * In the steps that `train.dump.steps` names, the output of every operation and its gradient, the gradient of every
 * weight, losses, gradient norm, moments and updated weights go to DIR/step-NNNNNNN.safetensors, in the order of
 * execution, under the names of files/trace.h. docs/align.md has the names and shapes. Tensors are what one process
 * would have for the whole global batch: token t of sequence b is row b L + t, whichever rank computed it. Nothing is
 * left out: padding, and targets that do not count, are there as the model computed them.
 *
 * A batch that is skipped, or not finite, has a dump too, without the update: of a skipped batch it is
 * DIR/step-NNNNNNN-skipped-BBBBBBB.safetensors with the batch's number, since the step's own name is for the batch that
 * will be trained.
 *
 * Without train.dump, model.dump is NULL, and each call below costs one test. A dump changes nothing that is trained.
 * What it takes is counted as PART_CHECK in the trace, and is no part of the step's seconds and bytes.
 *
 * Memory: from a dumped step's beginning to its end, each rank keeps its part of every tensor of the forward and
 * backward pass, for all of its micro-batches. Of each token of the batch that is, in numbers of 4 bytes,
 *   8 H + 4 (nh + 2 nkv) d + 2 nh d + 3 E + 3 k + k (4 I + H) + 4 W in each layer, W = shared_width(),
 *   4 H + 2 V + 1 beside the layers, and
 *   10 H + 2 V + 1 beside that of each MTP layer that is trained,
 * shared by all ranks. The file is then written in pieces of DUMP_BLOCK bytes and, for weights, one tensor at a time.
 */
#ifndef LING_MODEL_DUMP_H
#define LING_MODEL_DUMP_H

#include "files/config.h"
#include "model/memory.h"

#include <stdbool.h>
#include <stdint.h>

/* What the forward pass computes, in the order of execution. */
enum dumped {
	DUMP_EMBEDDING,
	DUMP_MTP_EMBEDDING_NORM, DUMP_MTP_HIDDEN_NORM,
	DUMP_MTP_PROJECTION,         /* the residual stream before an MTP layer */
	DUMP_ATTENTION_NORM, DUMP_QKV, DUMP_QK_NORM, DUMP_ROPE, DUMP_ATTENTION_CORE,
	DUMP_ATTENTION_OUTPUT,       /* the residual stream after attention */
	DUMP_FFN_NORM,
	DUMP_ROUTER_LOGITS, DUMP_ROUTER_SOFTMAX, DUMP_ROUTER_TOPK, DUMP_ROUTER_WEIGHTS,
	DUMP_EXPERTS_GATE_UP, DUMP_EXPERTS_DOWN, /* in memory the expert rows of this rank, sorted by expert */
	DUMP_SHARED_GATE_UP,         /* the dense SwiGLU's in a dense layer */
	DUMP_LAYER_OUTPUT,           /* the residual stream after the layer */
	DUMP_NORM, DUMP_HEAD_LOGITS, DUMP_HEAD_LOSS,
	NUM_DUMPED
};

struct dump;

/* Makes what the dumps of a run need, or NULL in *d where the config has none for the steps after `step`. Creates the
 * directory. Fails when it has a file of such a step that this run has not written (a run that continues replaces its
 * own), or when memory does not suffice, with what is needed. Collective, after model_init. */
int dump_open(struct dump **d, const struct config *c, const struct model *m, int64_t step);
void dump_close(struct dump *d);

/* Begins the dump of a step, if it is to be dumped: sets m->dump, which the caller sets back to NULL when the last
 * micro-batch is done. d may be NULL. Without memory it warns, and there is no dump. Collective. */
void dump_begin(struct dump *d, struct model *m, int64_t step, int64_t batch);

/* The following calls are about micro-batch i of this rank, of B sequences. */
void dump_micro_batch(struct model *m, int64_t i, int B);

/* What they stand for; use those below. */
void dump_array(struct model *m, enum dumped what, int layer, bool gradient, const void *x);
void dump_head(struct model *m, enum dumped what, int layer, bool gradient, const real *x, int64_t first, int64_t n);
void dump_head_losses(struct model *m, int layer, const double *loss, const double *sum, const int32_t *target,
		int64_t first, int64_t n);

/* The output of an operation, as this rank has it in memory. layer: -1 where it is of none; embedding, final norm and
 * head of an MTP layer are of that layer. A second call in the same micro-batch, when it is computed again for the
 * backward pass, is ignored. Collective for DUMP_EXPERTS_GATE_UP. */
static inline void dump_output(struct model *m, enum dumped what, int layer, const void *x)
{
	if (m->dump)
		dump_array(m, what, layer, false, x);
}

/* The gradient of that output, in the same form. */
static inline void dump_gradient(struct model *m, enum dumped what, int layer, const real *x)
{
	if (m->dump)
		dump_array(m, what, layer, true, x);
}

/* Logits of tokens first .. first + n - 1 of the micro-batch, and their gradient; [n, V] of this rank. */
static inline void dump_logits(struct model *m, int layer, const real *logits, int64_t first, int64_t n)
{
	if (m->dump)
		dump_head(m, DUMP_HEAD_LOGITS, layer, false, logits, first, n);
}

static inline void dump_logits_gradient(struct model *m, int layer, const real *dlogits, int64_t first, int64_t n)
{
	if (m->dump)
		dump_head(m, DUMP_HEAD_LOGITS, layer, true, dlogits, first, n);
}

/* The losses of these tokens, from what cross_entropy_forward left, summed over the ranks. */
static inline void dump_losses(struct model *m, int layer, const double *loss, const double *sum,
		const int32_t *target, int64_t first, int64_t n)
{
	if (m->dump)
		dump_head_losses(m, layer, loss, sum, target, first, n);
}

/* What is known of the step at its end. */
struct dump_result {
	double loss, mtp_loss, balance_loss, z_loss, grad_norm;
	bool taken;                  /* weights and moments are those after the update */
	bool skipped;                /* another batch will be tried for this step */
	int64_t batch;               /* the number of the batch, for the name of a skipped one's file */
};
/* Writes the file, if dump_begin began a dump, and releases its memory. d may be NULL. A failure is a warning: training
 * goes on. Collective. */
void dump_write(struct dump *d, const struct model *m, const struct dump_result *result);

#endif
