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

/* The windows that a rank computes together, and what they add to the result. */
struct window_batch {
	int32_t *input, *target;     /* [sequences, L] */
	int32_t *document;           /* [sequences, L], see rope_forward; NULL without data->document_mask */
	int64_t tokens, bytes;       /* of the targets of all batches so far that count */
};

/* Reads B windows from number `first` on, and counts their targets that count and the bytes of their text. */
static int read_batch(struct window_batch *b, const struct tokens *data, const struct tokenizer *tokenizer,
		int64_t first, int B, int64_t L)
{
	for (int64_t i = 0; i < B; i++)
		if (read_window(data, first + i, L, NULL, b->input + i * L, b->target + i * L,
				b->document ? b->document + i * L : NULL) < 0)
			return -1;
	for (int64_t t = 0; t < B * L; t++) {
		b->tokens += b->target[t] >= 0;
		b->bytes += tokenizer && b->target[t] >= 0 ? tokenizer_bytes(tokenizer, b->target[t]) : 0;
	}
	return 0;
}

int evaluate(struct model *m, const struct tokens *data, const struct tokenizer *tokenizer, int64_t max_windows,
		struct evaluation *e)
{
	const int64_t L = m->seq_len, all = count_windows(data, L);
	const int64_t windows = max_windows && max_windows < all ? max_windows : all;
	const struct group *data_group = &m->layout.data, *replicas = &m->layout.replicas;
	const int64_t sharing = replicas->size * data_group->size; /* so many share the windows; a tensor group is one */
	const int64_t place = replicas->rank * data_group->size + data_group->rank;
	const int64_t together = sharing * m->max_sequences; /* windows at once, over all ranks */
	const bool counts = m->layout.tensor.rank == 0; /* the ranks of a tensor group have the same windows */
	const int64_t size = m->max_sequences * L;
	int32_t *input = calloc(3 * size, sizeof *input);
	double *loss = calloc(together, sizeof *loss); /* of each of them */
	struct window_batch b = {.input = input, .target = input + size,
			.document = data->document_mask ? input + 2 * size : NULL};
	int rc = parallel_agree(input && loss ? 0 : fail("out of memory for %d windows of %lld tokens", m->max_sequences,
			(long long)L));
	*e = (struct evaluation){0};
	double total = 0;
	struct progress p = progress_start("evaluating", windows * L, 1, "tokens");
	struct progress *shown = m->layout.all.rank == 0 ? &p : NULL;
	for (int64_t first = 0; rc == 0 && first < windows; first += together) {
		const int64_t n = windows - first < together ? windows - first : together;
		const int64_t own = shard_begin(n, (int)place, (int)sharing);
		const int B = (int)(shard_begin(n, (int)place + 1, (int)sharing) - own); /* with 0 it still takes part */
		rc = read_batch(&b, data, tokenizer, first + own, B, L);
		double ends[] = {stop_requested, rc < 0}; /* how many ranks were asked to stop, and failed */
		all_reduce_sum(&m->layout.all, TRAFFIC_STATISTICS, ends, 2);
		e->stopped = ends[0] > 0;
		if (e->stopped || ends[1] > 0)
			break;
		m->document = b.document;
		model_forward(m, b.input, B, NULL, NULL);
		memset(loss, 0, n * sizeof *loss);
		model_loss(m, b.target, B, NULL, loss + own);
		if (!counts)
			memset(loss + own, 0, B * sizeof *loss);
		all_reduce_sum(&m->layout.all, TRAFFIC_STATISTICS, loss, n); /* each is one rank's, so this rounds nothing */
		for (int64_t i = 0; i < n; i++)
			total += loss[i];
		progress(shown, n * L);
	}
	progress_end(shown);
	m->document = NULL;
	double sums[] = {counts ? b.tokens : 0, counts ? b.bytes : 0};
	all_reduce_sum(&m->layout.all, TRAFFIC_STATISTICS, sums, 2);
	free(input);
	free(loss);
	e->tokens = (int64_t)sums[0], e->bytes = (int64_t)sums[1];
	e->loss = total / e->tokens;
	return parallel_agree(rc);
}
