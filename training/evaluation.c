/*
 * training/evaluation.c - the loss over a token file.
 */
#define _GNU_SOURCE
#include "training/evaluation.h"

#include "files/base.h"
#include "files/trace.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "data.h"
#include "model/parameters.h"
#include "model/memory.h"
#include "ling.h"

#include <stdlib.h>
#include <string.h>

int evaluate(struct model *m, const struct tokens *data, const struct tokenizer *tokenizer, int64_t max_windows,
		struct evaluation *e)
{
	const int64_t L = m->seq_len, all = count_windows(data, L);
	const int64_t windows = max_windows && max_windows < all ? max_windows : all;
	int32_t *input = calloc(3 * L, sizeof *input), *target = input + L;
	int32_t *document = data->document_mask ? target + L : NULL;
	if (parallel_agree(input ? 0 : fail("out of memory for a window of %lld tokens", (long long)L)) < 0) {
		free(input);
		return -1;
	}
	*e = (struct evaluation){0};
	double sums[3] = {0}; /* loss, its tokens, bytes */
	int rc = 0;
	struct progress p = progress_start("evaluating", windows * L, 1, "tokens");
	struct progress *shown = m->layout.all.rank == 0 ? &p : NULL;
	const struct group *data_group = &m->layout.data, *replicas = &m->layout.replicas;
	const int64_t sharing = replicas->size * data_group->size; /* so many share the windows; a tensor group is one */
	const int64_t stop_every = 1 + 1024 / L; /* windows of a rank, after which the ranks ask one another */
	for (int64_t first = 0; first < windows; first += sharing) {
		const int64_t i = first + replicas->rank * data_group->size + data_group->rank;
		const int B = i < windows; /* a rank without a window still takes part in the collectives */
		double stop = stop_requested;
		if (first / sharing % stop_every == 0)
			all_reduce_sum(&m->layout.all, TRAFFIC_STATISTICS, &stop, 1), e->stopped = stop > 0;
		if (e->stopped)
			break;
		if (B && rc == 0 && read_window(data, i, L, NULL, input, target, document) < 0) {
			rc = -1;
			memset(input, 0, 3 * L * sizeof *input); /* so that it can take part, without the bad ids, up to the end */
		}
		m->document = document;
		model_forward(m, input, B, NULL, NULL);
		const double loss = model_loss(m, target, B, NULL);
		sums[0] += m->layout.tensor.rank == 0 ? loss : 0; /* the ranks of a tensor group have the same tokens */
		for (int64_t t = 0; B && m->layout.tensor.rank == 0 && t < L; t++) {
			sums[1] += target[t] >= 0;
			sums[2] += tokenizer && target[t] >= 0 ? tokenizer_bytes(tokenizer, target[t]) : 0;
		}
		const int64_t left = windows - first;
		progress(shown, (left < sharing ? left : sharing) * L);
	}
	progress_end(shown);
	m->document = NULL;
	all_reduce_sum(&m->layout.all, TRAFFIC_STATISTICS, sums, 3);
	free(input);
	e->tokens = (int64_t)sums[1], e->bytes = (int64_t)sums[2];
	e->loss = sums[0] / e->tokens;
	return parallel_agree(rc);
}
