/*
 * training/period.c - a period of local SGD in a run, from its begin to the weights that come of it.
 */
#define _GNU_SOURCE
#include "training/period.h"

#include "files/base.h"
#include "files/trace.h"
#include "parallel.h"
#include "files/config.h"
#include "data.h"
#include "model/weights.h"
#include "training/saving.h"
#include "training/faults.h"
#include "training/local_sgd.h"
#include "ling.h"

#include <string.h>

/* From here on this rank waits for those of its replica alone, or for all. */
static void wait_for_replica(const struct trainer *t, bool alone)
{
	parallel_agree_within(alone ? &t->model.layout.world : &t->model.layout.all);
	trace_alone(alone);
}

void period_begin(struct trainer *t)
{
	struct local_sgd *s = &t->local;
	local_sgd_begin(s, &t->model.table, t->model.params.memory, t->state.step);
	s->begun_samples = t->state.samples;
	s->begun_tokens = t->state.tokens;
	s->loss = s->mtp_loss = s->balance_loss = s->z_loss = 0;
	wait_for_replica(t, true);
}

bool period_end_step(struct trainer *t, const struct metrics *m)
{
	const struct group *g = &t->model.layout.world;
	double late = t->stop || (g->rank == 0 && clock_seconds() - t->local.clock >= t->local.options.seconds);
	if (t->local.options.seconds)
		all_reduce_sum(g, TRAFFIC_STATISTICS, &late, 1);
	t->local.loss += m->loss;
	t->local.mtp_loss += m->mtp_loss;
	t->local.balance_loss += m->balance_loss;
	t->local.z_loss += m->z_loss;
	return local_sgd_is_over(&t->local, t->state.step, t->steps, late > 0);
}

/* Sets the data right after a period in which replica r took steps[r] steps, not all equally many: each replica has
 * drawn the batches up to its last one. Now all draw up to the last one of any; the samples that replicas would have
 * taken in the steps that they did not take are those that come first from here on. Sets samples and tokens. */
static void settle_data(struct trainer *t, const double *steps)
{
	struct local_sgd *s = &t->local;
	const int64_t L = t->config.data.seq_len;
	int64_t most = 0, tokens = t->state.tokens;
	for (int r = 0; r < s->replicas; r++)
		most = steps[r] > most ? (int64_t)steps[r] : most;
	for (int64_t i = t->state.step - s->begun; i < most; i++) {
		const int64_t batch = batch_size(&t->config, tokens);
		trainer_draw(t, batch);
		tokens += batch * L;
	}
	t->state.samples = s->begun_samples;
	t->state.tokens = tokens = s->begun_tokens;
	local_sgd_drop_taken(s);
	int64_t left = 0, first = 0; /* samples left out; the first sample of the batch */
	for (int64_t i = 0; i < most; i++) {
		const int64_t batch = batch_size(&t->config, tokens), part = replica_batch(t, batch);
		for (int r = 0; r < s->replicas; r++) {
			if (i < steps[r]) {
				t->state.samples += part;
				t->state.tokens += part * L;
				continue;
			}
			memmove(s->drawn + left, s->drawn + first + r * part, part * sizeof *s->drawn);
			left += part;
		}
		first += batch;
		tokens += batch * L;
	}
	local_sgd_put_back(s, left);
}

/* For model.before_block, after a synchronisation: gives the blocks up to this one their new weights. */
static void complete_block(void *trainer, int block)
{
	struct trainer *t = trainer;
	struct model *m = &t->model;
	wait_for_replica(t, false); /* the next period may have begun */
	while (t->local.completed <= block) {
		trace_begin(OP_WEIGHTS, PASS_FORWARD, -1, 0);
		if (t->local.completed == t->local.num_blocks / 2)
			faults_act(&t->faults, t->state.step, MOMENT_SYNCHRONISATION, NULL);
		local_sgd_advance(&t->local, &m->table, m->params.memory);
	}
	wait_for_replica(t, t->local.in_period);
	if (t->local.completed == t->local.num_blocks) {
		m->before_block = NULL;
		model_update_head_scale(m);
	}
}

void complete_weights(struct trainer *t)
{
	if (t->model.before_block)
		complete_block(t, t->local.num_blocks - 1);
}

int compare_replicas(struct trainer *t)
{
	const struct model *m = &t->model;
	complete_weights(t);
	trace_check(true);
	const uint32_t own = crc_of(0, (const uint8_t *)m->params.memory, m->table.num_elements * sizeof(real));
	uint32_t first = own;
	broadcast(&m->layout.replicas, &first, sizeof first);
	const int rc = parallel_agree(own == first ? 0 : fail("step %lld: replica %d has other weights than replica 0 "
			"after they were brought together; nothing is saved, and the run must go back to a checkpoint: start it "
			"again, without that machine if it is named again", (long long)t->state.step, m->layout.replicas.rank));
	trace_check(false);
	return rc;
}

void period_end(struct trainer *t, struct metrics *m)
{
	struct local_sgd *s = &t->local;
	struct model *model = &t->model;
	const struct layout *l = &model->layout;
	enum { STOP, SAVE_DUE, SAVE_BUSY, SAVE_FAILED, STEPS };
	double sums[STEPS + s->replicas];
	wait_for_replica(t, false);
	trace_begin(OP_STATISTICS, PASS_FORWARD, -1, 0);
	memset(sums, 0, sizeof sums);
	sums[STOP] = stop_requested;
	sums[SAVE_DUE] = is_rank0(t) && t->save_due;
	sums[STEPS + l->replicas.rank] = l->world.rank == 0 ? (double)(t->state.step - s->begun) : 0;
	saver_flags(&t->saver, &sums[SAVE_BUSY]);
	all_reduce_sum(&l->all, TRAFFIC_STATISTICS, sums, STEPS + s->replicas);
	const double *steps = sums + STEPS;
	t->stop = sums[STOP] > 0;
	t->save_due = sums[SAVE_DUE] > 0;
	report_save(t, saver_advance(&t->saver, &sums[SAVE_BUSY]));

	const int64_t own = t->state.step - s->begun;
	if (s->options.seconds)
		settle_data(t, steps);
	for (int r = 0; r < s->replicas; r++) {
		s->carry += (int64_t)steps[r];
		s->counts[r] += (int64_t)steps[r];
	}
	t->state.step = s->begun + s->carry / s->replicas;
	s->carry %= s->replicas;
	for (int i = 0; i < t->state.num_layers; i++) {
		double both[2] = {t->state.router_mean[i], t->state.router_std[i]};
		all_reduce_sum(&l->replicas, TRAFFIC_STATISTICS, both, 2);
		t->state.router_mean[i] = both[0] / s->replicas;
		t->state.router_std[i] = both[1] / s->replicas;
	}
	local_sgd_average_bias(s, &model->table, model->params.memory);
	trace_begin(OP_WEIGHTS, PASS_FORWARD, -1, 0);
	faults_act(&t->faults, t->state.step, MOMENT_NORMS, NULL);
	local_sgd_synchronise(s, &model->table, model->params.memory, &t->synchronisation);
	model->before_block = complete_block; /* the weights come with the next forward pass, or when they are needed */
	model->before_block_context = t;
	trace_end();
	local_sgd_report(s, &t->synchronisation, steps, &t->events, t->state.step);

	m->step = t->state.step;
	m->samples = t->state.samples;
	m->tokens = t->state.tokens;
	if (s->options.seconds) { /* one line for the period */
		m->loss = s->loss / own;
		m->mtp_loss = s->mtp_loss / own;
		m->balance_loss = s->balance_loss / own;
		m->z_loss = s->z_loss / own;
		m->seconds = clock_seconds() - s->clock;
		m->tokens_per_second = (t->state.tokens - s->begun_tokens) / m->seconds;
	}
}
