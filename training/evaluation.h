/*
 * training/evaluation.h - the loss over a token file.
 */
#ifndef LING_TRAINING_EVALUATION_H
#define LING_TRAINING_EVALUATION_H

#include "data.h"
#include "files/tokenizer.h"
#include "model/memory.h"

#include <stdbool.h>
#include <stdint.h>

struct evaluation {
	double loss;                 /* mean cross-entropy, nats */
	int64_t tokens;              /* targets that count */
	int64_t bytes;               /* of their text; 0 without a tokenizer */
	bool stopped;                /* by stop_requested on a rank: the rest means nothing */
};
/* Evaluates the model on the windows of a token file, at most max_windows of them (0: all), max_sequences of the model
 * at a time on each rank. The loss of a window depends on nothing but the window, and all are added in the order of the
 * windows: so the result does not depend on max_sequences, on threads, or on the number of data ranks and replicas, to
 * the bit. tokenizer may be NULL. Collective: the data ranks share the windows, and all get the same result. Rank 0
 * shows the progress on standard error. A stop ends it within a batch. Fails when an id is outside the vocabulary. */
int evaluate(struct model *m, const struct tokens *data, const struct tokenizer *tokenizer, int64_t max_windows,
		struct evaluation *e);

#endif
