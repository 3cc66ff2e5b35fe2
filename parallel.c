/*
 * parallel.c - ranks: process groups, sums over them, and who computes which part of a batch.
 *
 * The trainer calls these wherever ranks will have to agree. Every group has one member today, so a sum over it is what is
 * there already.
 */
#include "ling.h"

#include <assert.h>

void parallel_init(struct layout *l)
{
	l->data = l->tensor = l->expert = (struct group){0, 1};
}

void group_sum(const struct group *g, double *x, int64_t n)
{
	assert(g->size == 1);
	(void)g, (void)x, (void)n;
}

void group_sum_real(const struct group *g, real *x, int64_t n)
{
	assert(g->size == 1);
	(void)g, (void)x, (void)n;
}

struct share deal_batch(const struct group *data, int64_t batch, int micro_batch)
{
	int64_t base = batch / data->size, extra = batch % data->size, rank = data->rank;
	int64_t most = base + (extra > 0);
	return (struct share){
		.first = rank * base + (rank < extra ? rank : extra),
		.count = base + (rank < extra),
		.num_micro_batches = (most + micro_batch - 1) / micro_batch,
	};
}
