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
/* Evaluates the model on the windows of a token file, at most max_windows of them (0: all), one at a time, so that no
 * batching can change the loss. tokenizer may be NULL. Collective: the data ranks share the windows, and all get the
 * same result. Rank 0 shows the progress on standard error. Fails when an id is outside the vocabulary. */
int evaluate(struct model *m, const struct tokens *data, const struct tokenizer *tokenizer, int64_t max_windows,
		struct evaluation *e);

#endif
