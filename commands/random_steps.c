/*
 * commands/random_steps.c - training steps on random tokens, to time them.
 */
#include "commands/random_steps.h"

#include "kernels.h"
#include "parallel.h"

void random_batch(struct trainer *t, int i)
{
	const int64_t batch = replica_batch(t, t->config.train.batch), L = t->config.data.seq_len;
	const int64_t V = t->config.model.vocab_size;
	const struct micro_batches mine = micro_batches_of_rank(&t->model.layout.data, batch, t->config.train.micro_batch);
	const struct random_stream stream = {.seed = 1, .step = (uint32_t)i};
	for (int64_t j = 0; j < batch * L; j++) {
		const int64_t place = micro_batch_place(&mine, j / L) * L + j % L;
		if (place < 0) /* another rank's */
			continue;
		t->input[place] = (int32_t)random_permute(j % V, V, &stream);
		t->target[place] = (int32_t)random_permute((j + 1) % V, V, &stream);
	}
}
