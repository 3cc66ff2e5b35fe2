/*
 * training/loop.c - a training run: batch, step, evaluation, metrics, checkpoint, until its end.
 */
#define _GNU_SOURCE
#include "training/loop.h"

#include "files/base.h"
#include "files/trace.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "data.h"
#include "model/parameters.h"
#include "model/memory.h"
#include "training/events.h"
#include "training/saving.h"
#include "training/spikes.h"
#include "training/faults.h"
#include "training/local_sgd.h"
#include "ling.h"
#include "training/evaluation.h"
#include "training/period.h"
#include "training/start.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Puts the mean loss over all targets of the validation files into *m, and that of each named set. A stop ends it:
 * then *m says so, and the run that continues makes up for it, so that its metrics are those of a run that was not
 * stopped. */
static int validate(struct trainer *t, struct metrics *m)
{
	const struct config *c = &t->config;
	double sum = 0, set_sum = 0;
	int64_t tokens = 0, set_tokens = 0;
	int set = -1; /* of this file: the files of a set stand together */
	for (int i = 0; i < c->data.num_valid; i++) {
		const char *name = c->data.valid[i].set;
		struct evaluation e;
		if (evaluate(&t->model, &t->valid[i], NULL, c->eval.max_windows, &e) < 0)
			return -1;
		if (e.stopped) {
			m->validation_stopped = t->stop = true;
			return 0;
		}
		sum += e.loss * e.tokens;
		tokens += e.tokens;
		if (!*name)
			continue;
		if (i == 0 || strcmp(name, c->data.valid[i - 1].set)) {
			set++;
			set_sum = 0, set_tokens = 0;
		}
		set_sum += e.loss * e.tokens;
		set_tokens += e.tokens;
		memcpy(t->valid_losses[set].set, name, sizeof t->valid_losses[set].set);
		t->valid_losses[set].loss = set_sum / set_tokens;
	}
	m->has_valid_loss = c->data.num_valid > 0;
	m->valid_loss = m->has_valid_loss ? sum / tokens : 0;
	m->num_valid_sets = set + 1;
	m->valid_losses = t->valid_losses;
	return 0;
}

/* Whether one of the steps after `before`, up to `step`, is a multiple of `every`; 0: never. */
static bool is_due(int64_t every, int64_t before, int64_t step)
{
	return every && step / every > before / every;
}

/* Whether the weights after `step` are evaluated. before: the last step before it at which they could be. */
static bool has_evaluation(const struct trainer *t, int64_t before, int64_t step)
{
	const struct config *c = &t->config;
	return (c->data.num_valid || t->write_samples) && (step == t->steps || is_due(c->eval.every, before, step));
}

/* An evaluation of the current weights: the validation, whose result is put into *m, and the samples. A stop in either
 * ends it as a whole. */
static int evaluate_step(struct trainer *t, struct metrics *m)
{
	const double start = clock_seconds();
	complete_weights(t);
	trace_phase(HEARTBEAT_EVALUATION, t->state.step);
	if (validate(t, m) < 0)
		return -1;
	const bool samples = t->write_samples && !m->validation_stopped && (!m->has_valid_loss || isfinite(m->valid_loss));
	const int stopped = samples ? t->write_samples(t) : 0;
	if (stopped < 0)
		return -1;
	if (stopped) {
		m->has_valid_loss = false;
		m->validation_stopped = t->stop = true;
	}
	if (m->validation_stopped)
		return 0;
	t->evaluation_seconds += clock_seconds() - start;
	t->num_evaluations++;
	return 0;
}

/* The seconds that the run will still take after step m->step: its tokens at the rate of this process so far, and its
 * evaluations at the mean of those so far. */
static double seconds_left(const struct trainer *t, const struct metrics *m, double seconds_per_token)
{
	const struct config *c = &t->config;
	int64_t evaluations = 0;
	if (m->step < t->steps) {
		if (c->eval.every)
			evaluations = t->steps / c->eval.every - m->step / c->eval.every;
		evaluations += !c->eval.every || t->steps % c->eval.every != 0; /* at the end */
	}
	const double one = t->num_evaluations ? t->evaluation_seconds / t->num_evaluations : 0;
	return (t->tokens - m->tokens) * seconds_per_token + evaluations * one;
}

/* Appends the validation loss, if there is one, and those of the named sets. */
static void describe_validation(struct text *line, const struct metrics *m)
{
	char loss[SET_NAME_LEN + 32];
	if (!m->has_valid_loss)
		return;
	snprintf(loss, sizeof loss, "  valid %.4f", m->valid_loss);
	text_append_string(line, loss);
	for (int i = 0; i < m->num_valid_sets; i++) {
		snprintf(loss, sizeof loss, "%s%s %.4f%s", i ? ", " : " (", m->valid_losses[i].set, m->valid_losses[i].loss,
				i + 1 == m->num_valid_sets ? ")" : "");
		text_append_string(line, loss);
	}
}

static void print_progress(const struct trainer *t, const struct metrics *m, double seconds_per_token)
{
	char part[240], left[32], ranks[64] = "", share[32] = "";
	struct text line = {0};
	snprintf(part, sizeof part, "step %lld/%lld %.0f%%  loss %.4f", (long long)m->step, (long long)t->steps,
			100.0 * m->tokens / t->tokens, m->loss);
	text_append_string(&line, part);
	describe_validation(&line, m);
	if (t->model.layout.all.size > 1)
		snprintf(ranks, sizeof ranks, "  communication %.0f%%, slowest rank %d", 100 * t->communication / m->seconds,
				t->slowest);
	if (t->peak_flops)
		snprintf(share, sizeof share, "  %.0f%% of peak", 100 * m->tokens_per_second * t->flops_per_token /
				t->peak_flops);
	snprintf(part, sizeof part, "  lr %.2e  grad %.3f  batch %d  %.0f tokens/s%s%s  %s left", m->lr, m->grad_norm,
			m->batch, m->tokens_per_second, share, ranks,
			format_duration(left, seconds_left(t, m, seconds_per_token)));
	text_append_string(&line, part);
	print_status(stdout, line.data, m->has_valid_loss || m->step == t->steps);
	free(line.data);
}

/* What the run must remember of spikes. */
static json_t *spikes_to_json(const struct trainer *t)
{
	json_t *state = spike_detector_to_json(&t->spikes);
	json_object_set_new(state, "queue", retry_queue_to_json(&t->retry));
	json_object_set_new(state, "rollbacks", json_integer(t->rollbacks));
	return state;
}

/* Appends the line of a step to the metrics, behind those that could not be written before. Where the disk is full, it
 * waits in memory for the next one: the run must not end for it. */
static void write_metrics(struct trainer *t, FILE *metrics_file, const struct metrics *m)
{
	const bool waiting = t->unwritten.size > 0;
	char *line = metrics_line(m);
	text_append_string(&t->unwritten, line);
	free(line);
	if (metrics_append(metrics_file, t->unwritten.data) == 0)
		t->unwritten.size = 0;
	else if (!waiting)
		fprintf(stderr, "ling: warning: step %lld: %s; lines of metrics wait in memory until they can be written\n",
				(long long)m->step, error_text);
}

/* Fails, alike on all ranks, when weights or moments are not finite: a checkpoint of them would be of no use. */
static int check_state(const struct trainer *t)
{
	const struct model *m = &t->model;
	const bool finite = isfinite(sum_of_squares(m->params.memory, m->table.num_elements)) &&
			isfinite(sum_of_squares(m->exp_avg, m->table.num_state)) &&
			isfinite(sum_of_squares(m->exp_avg_sq, m->table.num_state));
	return parallel_agree(finite ? 0 : fail("after step %lld weights or optimizer state are not finite, and are not "
			"saved; the earlier checkpoints stay. Lower schedule.peak_lr or lengthen its warm-up",
			(long long)t->state.step));
}

/* Begins to save the current step; none is under way. See saver_begin for the result. */
static int begin_save(struct trainer *t, FILE *metrics_file, bool async)
{
	struct model *m = &t->model;
	json_decref(t->state.spikes);
	t->state.spikes = spikes_to_json(t);
	json_decref(t->state.local);
	t->state.local = local_sgd_to_json(&t->local);
	t->saver.weights.fault = faults_in_save(&t->faults, t->state.step, t->saver.weights.elements * sizeof(real));
	return saver_begin(&t->saver, &(struct save_request){.config = &t->config, .state = &t->state,
			.arrays = {m->params.memory, m->exp_avg, m->exp_avg_sq, t->local.momentum},
			.sync = {metrics_file ? fileno(metrics_file) : -1, t->events.fd}, .async = async});
}

int trainer_save(struct trainer *t)
{
	complete_weights(t);
	report_save(t, saver_finish(&t->saver));
	if (check_state(t) < 0)
		return -1;
	return begin_save(t, NULL, false) < 0 ? -1 : 0;
}

/* Saves a checkpoint, with the metrics on disk before it: no checkpoint is ahead of its metrics. `last`: the run ends
 * here, so that it must succeed now; else a failure is reported, and training goes on. When output_dir was moved or
 * deleted meanwhile, the checkpoint is saved where its directory is now, or in a new one, and then the run fails, with
 * what to do. */
static enum run_result save_progress(struct trainer *t, FILE *metrics_file, bool last)
{
	const double start = clock_seconds();
	char now[PATH_LEN] = "", reason[sizeof error_text] = "", named[PATH_LEN];
	struct { int place, metrics; } found = {0};
	const bool waits = last || t->saver.stage != SAVE_NONE; /* for all files, of this save or the one before */
	complete_weights(t);
	trace_phase(waits ? HEARTBEAT_WRITE : HEARTBEAT_SAVE, t->state.step);
	report_save(t, saver_finish(&t->saver));
	if (check_state(t) < 0)
		return RUN_GO_BACK;
	memcpy(named, t->config.train.output_dir, sizeof named);
	if (is_rank0(t)) {
		found.metrics = t->unwritten.size ? metrics_append(metrics_file, t->unwritten.data) : 0;
		if (found.metrics == 0)
			t->unwritten.size = 0;
		found.place = metrics_place(metrics_file, named, now);
		if (found.place != METRICS_IN_PLACE)
			memcpy(reason, error_text, sizeof reason);
	}
	const int metrics = parallel_agree(found.metrics);
	broadcast(&t->model.layout.all, &found, sizeof found);
	if (found.place == METRICS_LOST) {
		parallel_agree(is_rank0(t) ? fail("%s", reason) : 0);
		return RUN_FAILED;
	}
	const bool stays = found.place == METRICS_IN_PLACE;
	if (found.place == METRICS_MOVED)
		memcpy(t->config.train.output_dir, now, sizeof now);
	t->saver.step = t->state.step;
	int rc = metrics < 0 ? -1 : begin_save(t, metrics_file, stays && !last);
	memcpy(t->config.train.output_dir, named, sizeof named);
	t->save_seconds = t->unreported_save_seconds = clock_seconds() - start;
	if (rc < 0 && (last || !stays)) {
		saver_fail_last(&t->saver, t->saved_step);
		return RUN_FAILED;
	}
	report_save(t, rc < 0 ? -1 : rc == 0 && t->saver.stage == SAVE_NONE);
	if (is_rank0(t) && t->config.checkpoint.every == EVERY_AUTO && rc <= 0)
		save_schedule_saved(&t->schedule, t->state.step, rc < 0 ? -1 : t->save_seconds);
	fflush(stdout);
	return parallel_agree(is_rank0(t) && !stays ? fail("%s", reason) : 0) < 0 ? RUN_FAILED : RUN_DONE;
}

/* Says so before the first step of a continued run whose schedule makes the learning rate rise again that drops or
 * decay had lowered. before: the last step of the run so far. */
static void print_raised_rate(const struct trainer *t, const struct metrics *before)
{
	const struct config *c = &t->config;
	const int64_t step = t->state.step, tokens = step ? before->batch * (int64_t)c->data.seq_len : 0;
	/* the rate that the last step would have had under the schedule as it is now */
	const double same = learning_rate(c, step, t->steps, (double)(t->state.tokens - tokens) / t->tokens),
			next = learning_rate(c, step + 1, t->steps, (double)t->state.tokens / t->tokens);
	if (step && before->step == step && !before->attempts && next > before->lr && before->lr < same * (1 - 1e-6))
		printf("the learning rate was %.2e at step %lld and is %.2e at step %lld: the schedule of %lld steps undoes a "
				"drop, decay or lower peak of the run so far; if that is not wanted, stop, and lower schedule.peak_lr "
				"or go back to a checkpoint from before the decay\n", before->lr, (long long)step, next,
				(long long)step + 1, (long long)t->steps);
	fflush(stdout);
}

/* Goes back to the newest checkpoint from before the first of the skipped batches that the detector remembers. The
 * position in the data stays: the samples since that checkpoint, and those that waited at it, are passed over, and
 * named. Later checkpoints and metrics are removed. */
static enum run_result roll_back(struct trainer *t, FILE **metrics_file)
{
	const struct config *c = &t->config;
	const int64_t from = t->state.step, batches = t->state.batches;
	/* The batches since the first skip were skips or steps. */
	const int64_t before = from - (batches - t->spikes.skips[0] + 1 - t->spikes.num_skips);
	char dir[PATH_LEN] = "", reason[sizeof error_text];
	memcpy(reason, error_text, sizeof reason);
	trace_phase(HEARTBEAT_START, from); /* it takes as long as a start */
	report_save(t, saver_finish(&t->saver));
	if (checkpoint_choose(&t->config, &t->model.table, &t->events, before, dir) < 0)
		return RUN_FAILED;
	if (!*dir) {
		fail("%s. There is no checkpoint from step %lld or before to go back to", reason, (long long)before);
		return RUN_GO_BACK;
	}
	struct source_state now[MAX_SOURCES];
	const int rollbacks = t->rollbacks + 1;
	memcpy(now, t->state.sources, sizeof now);
	const struct pending_samples pending = t->local.pending; /* left by a run of local SGD before */
	t->local.pending = (struct pending_samples){0};
	if (trainer_load(t, dir, NULL) < 0) {
		free(pending.list);
		return RUN_FAILED;
	}
	json_t *passed_over = samples_to_json(t->retry.list, t->retry.count);
	/* an older checkpoint may be from a time when fewer waited */
	const int64_t left = pending.count - pending.taken, waited = t->local.pending.count;
	json_t *taken = samples_to_json(t->local.pending.list, waited > left ? waited - left : 0);
	json_array_extend(passed_over, taken);
	json_decref(taken);
	free(t->local.pending.list);
	t->local.pending = pending;
	for (int i = 0; i < t->state.num_sources; i++)
		if (now[i].taken > t->state.sources[i].taken)
			json_array_append_new(passed_over, json_pack("[i, I, I]", i, (json_int_t)t->state.sources[i].taken,
					(json_int_t)now[i].taken - 1));
	memcpy(t->state.sources, now, sizeof now);
	t->state.batches = batches;
	t->schedule.last = t->state.step;
	t->unwritten.size = 0; /* lines of steps that are undone */
	t->retry.count = 0;
	spike_detector_forget_skips(&t->spikes); /* the windows are those of the checkpoint, as the weights are */
	t->rollbacks = rollbacks;
	int rc = 0;
	if (is_rank0(t)) {
		char line[PATH_LEN + 160];
		snprintf(line, sizeof line, "too many batches were skipped: back from step %lld to %s, rollback %d of %d; the "
				"samples since are passed over", (long long)from, dir, rollbacks, c->spikes.rollback);
		print_status(stdout, line, true);
		checkpoint_remove_after(c->train.output_dir, t->state.step);
		event_write(&t->events, t->state.step, "rollback", json_pack("{s:I, s:I, s:i, s:O}", "batch",
				(json_int_t)batches, "from_step", (json_int_t)from, "rollbacks", rollbacks, "samples", passed_over));
		fclose(*metrics_file);
		*metrics_file = metrics_open(c->train.output_dir, t->state.step, NULL);
		rc = *metrics_file && samples_cut(c->train.output_dir, t->state.step) == 0 ? 0 : -1;
	}
	json_decref(passed_over);
	return parallel_agree(rc) < 0 ? RUN_FAILED : RUN_DONE;
}

/* eval.at_start: the evaluation before the first step of a run, whose result is an event, for no step has a line in
 * the metrics yet. A stop ends it: then t->stop is set, and the same command begins the run again. */
static int evaluate_start(struct trainer *t)
{
	struct metrics m = {0};
	if (t->state.batches || !t->config.eval.at_start)
		return 0;
	if (evaluate_step(t, &m) < 0)
		return -1;
	if (m.validation_stopped) {
		if (is_rank0(t))
			print_status(stdout, "stopped in the evaluation before the first step; the same command begins again",
					true);
		return 0;
	}
	if (is_rank0(t) && m.has_valid_loss) {
		char begin[64];
		struct text line = {0};
		snprintf(begin, sizeof begin, "step 0/%lld", (long long)t->steps);
		text_append_string(&line, begin);
		describe_validation(&line, &m);
		print_status(stdout, line.data, true);
		free(line.data);
		json_t *members = json_pack("{s:o}", "valid_loss", json_number(m.valid_loss));
		if (m.num_valid_sets)
			json_object_set_new(members, "valid", valid_losses_to_json(&m, NULL));
		event_write(&t->events, 0, "validation", members);
	}
	return !m.has_valid_loss || isfinite(m.valid_loss) ? 0 : fail("the validation loss before the first step is %g; "
			"expected a finite one: look at the weights of train.init_from", plain_nan(m.valid_loss));
}

/* Trains from where the trainer stands to the end, or to a stop. */
static enum run_result training_loop(struct trainer *t, FILE **metrics_file)
{
	const struct config *c = &t->config;
	int64_t first_token = t->state.tokens;
	double start = clock_seconds();
	t->evaluation_seconds = t->num_evaluations = 0;
	if (evaluate_start(t) < 0)
		return RUN_FAILED;
	if (t->stop)
		return RUN_STOPPED;
	int64_t before = t->state.step; /* where the ranks were together last: what is due since then comes now */
	int64_t shown = before;         /* the step of the last line of progress */
	for (bool first = true; t->state.step < t->steps; first = false) {
		struct metrics m;
		if (t->local.replicas > 1 && !t->local.in_period && t->state.step >= c->local.warmup_steps)
			period_begin(t);
		trace_phase(first ? HEARTBEAT_FIRST_STEP : HEARTBEAT_STEP, t->state.step + 1);
		trace_begin(OP_BATCH, PASS_FORWARD, -1, 0);
		const int64_t batch = trainer_next_batch(t);
		if (parallel_agree(batch < 0 ? -1 : 0) < 0)
			return RUN_FAILED;
		const enum step_result result = trainer_step(t, batch, &m);
		const bool taken = result == STEP_TAKEN;
		if (t->local.in_period && taken) {
			if (!period_end_step(t, &m)) {
				if (is_rank0(t) && !c->local.seconds)
					write_metrics(t, *metrics_file, &m);
				if (is_rank0(t) && m.step % c->log.every == 0) {
					print_progress(t, &m, (clock_seconds() - start - t->evaluation_seconds) / (m.tokens - first_token));
					shown = m.step;
				}
				continue;
			}
			period_end(t, &m);
			if (is_due(c->health.every, before, t->state.step) && compare_replicas(t) < 0)
				return RUN_GO_BACK;
		}
		if (result == STEP_GO_BACK) {
			char reason[sizeof error_text];
			memcpy(reason, error_text, sizeof reason);
			if (is_rank0(t))
				write_metrics(t, *metrics_file, &m); /* shows the step that failed */
			fail("%s", reason);
			return RUN_GO_BACK;
		}
		if (result == STEP_SKIPPED_TOO_MANY) {
			const enum run_result back = t->rollbacks < c->spikes.rollback ? roll_back(t, metrics_file) : RUN_GO_BACK;
			if (back != RUN_DONE)
				return back;
			first_token = t->state.tokens;
			start = clock_seconds();
			t->evaluation_seconds = t->num_evaluations = 0;
			before = shown = t->state.step;
		}
		const int64_t step = t->state.step;
		const bool last = step == t->steps;
		if (taken && has_evaluation(t, before, step) && evaluate_step(t, &m) < 0)
			return RUN_FAILED;
		if (taken && is_rank0(t)) {
			save_schedule_step(&t->schedule, m.seconds);
			m.save_seconds = t->unreported_save_seconds;
			t->unreported_save_seconds = 0;
			write_metrics(t, *metrics_file, &m);
		}
		if (taken && m.has_valid_loss && !isfinite(m.valid_loss)) {
			fail("step %lld: the validation loss is %g, and the weights are not saved; the earlier checkpoints stay",
					(long long)step, plain_nan(m.valid_loss));
			return RUN_GO_BACK;
		}
		const bool stop = t->stop || (taken && c->train.stop_at_step > before && step >= c->train.stop_at_step);
		if (taken && is_rank0(t) && (last || stop || is_due(c->log.every, shown, step) || m.has_valid_loss)) {
			print_progress(t, &m, (clock_seconds() - start - t->evaluation_seconds) / (m.tokens - first_token));
			shown = step;
		}
		const bool due = c->checkpoint.every == EVERY_AUTO ? t->save_due
				: is_due(c->checkpoint.every, before, step);
		t->save_due = false;
		before = taken ? step : before;
		if (last || stop || (taken && due)) {
			const enum run_result saved = save_progress(t, *metrics_file, last || stop);
			if (saved != RUN_DONE)
				return saved;
		}
		if (stop && (!last || m.validation_stopped)) {
			char line[160];
			const bool beyond = c->train.stop_at_step && c->train.stop_at_step < step;
			snprintf(line, sizeof line, "stopped after step %lld of %lld and saved; the same command%s continues",
					(long long)step, (long long)t->steps, beyond ? " without train.stop_at_step" : "");
			if (is_rank0(t))
				print_status(stdout, line, true);
			return t->stop ? RUN_STOPPED : RUN_DONE;
		}
	}
	if (is_rank0(t))
		printf("done: %lld steps, %lld tokens, checkpoint %s/step-%07lld\n", (long long)t->state.step,
				(long long)t->state.tokens, c->train.output_dir, (long long)t->state.step);
	return RUN_DONE;
}

/* Makes up for the validation of the current step if a stop ended it. */
static int finish_validation(struct trainer *t)
{
	const char *dir = t->config.train.output_dir;
	struct metrics m = {.step = t->state.step};
	bool lacks = is_rank0(t) && metrics_lack_validation(dir, m.step);
	broadcast(&t->model.layout.all, &lacks, sizeof lacks);
	const int64_t before = t->local.replicas > 1 ? 0 : m.step - 1; /* the evaluation may have come late */
	if (!lacks || !has_evaluation(t, before, m.step))
		return 0;
	if (is_rank0(t))
		printf("validating step %lld, where the run was stopped\n", (long long)m.step), fflush(stdout);
	if (evaluate_step(t, &m) < 0 || m.validation_stopped)
		return m.validation_stopped ? 0 : -1;
	if (parallel_agree(is_rank0(t) ? metrics_set_validation(dir, &m) : 0) < 0)
		return -1;
	return isfinite(m.valid_loss) ? 0 : fail("step %lld: the validation loss is %g; remove its checkpoint to continue "
			"from an earlier one", (long long)m.step, plain_nan(m.valid_loss));
}

enum run_result trainer_run(struct trainer *t)
{
	t->stop = false;
	if (finish_validation(t) < 0)
		return RUN_FAILED;
	if (t->stop) {
		if (is_rank0(t))
			printf("stopped before the validation of step %lld was complete; the same command continues\n",
					(long long)t->state.step);
		return RUN_STOPPED;
	}
	if (t->state.step >= t->steps) {
		if (is_rank0(t))
			printf("nothing is left to do: %lld of %lld steps are done\n", (long long)t->state.step,
					(long long)t->steps);
		return RUN_DONE;
	}
	if (t->config.train.stop_at_step && t->config.train.stop_at_step < t->state.step) {
		if (is_rank0(t))
			printf("stopped at once: train.stop_at_step is %lld, and %lld of %lld steps are done; make it larger, or "
					"off, to continue\n", (long long)t->config.train.stop_at_step, (long long)t->state.step,
					(long long)t->steps);
		return RUN_DONE;
	}
	struct metrics before = {0};
	FILE *f = NULL;
	int rc = 0;
	if (is_rank0(t)) {
		const int64_t samples_until = t->state.batches ? t->state.step : -1; /* a run that begins has none of step 0 */
		f = metrics_open(t->config.train.output_dir, t->state.step, &before);
		rc = f && samples_cut(t->config.train.output_dir, samples_until) == 0 && trainer_open_events(t) == 0 ? 0 : -1;
	}
	if (parallel_agree(rc) < 0) {
		if (f)
			fclose(f);
		return RUN_FAILED;
	}
	dump_close(t->dump);
	if (dump_open(&t->dump, &t->config, &t->model, t->state.step) < 0) {
		if (f)
			fclose(f);
		return RUN_FAILED;
	}
	if (is_rank0(t)) {
		print_raised_rate(t, &before);
		event_write(&t->events, t->state.step, t->state.batches ? "resume" : "start", json_pack(
				"{s:I, s:I, s:I, s:i, s:i, s:f, s:o, s:o}", "batch", (json_int_t)t->state.batches, "total_steps",
				(json_int_t)t->steps, "total_tokens", (json_int_t)t->tokens, "ranks", t->model.layout.all.size,
				"threads", kernels_threads(), "flops_per_token", t->flops_per_token, "peak_flops",
				t->peak_flops ? json_real(t->peak_flops) : json_null(), "config", run_to_json(&t->config)));
	}
	t->schedule = save_schedule_start(&t->config, t->state.step);
	enum run_result result = training_loop(t, &f);
	char reason[sizeof error_text];
	memcpy(reason, error_text, sizeof reason);
	if (t->saver.stage != SAVE_NONE)
		trace_phase(HEARTBEAT_WRITE, t->state.step);
	if (!t->local.in_period) /* else a replica has failed alone, and the end of its ranks ends all */
		report_save(t, saver_finish(&t->saver));
	set_error("%s", reason);
	if (is_rank0(t) && t->unwritten.size && metrics_append(f, t->unwritten.data) == 0)
		t->unwritten.size = 0;
	if (is_rank0(t)) {
		static const char *const why[] = {"failed", "done", "signal", "go back"}; /* by enum run_result */
		if (result != RUN_DONE && result != RUN_STOPPED && is_terminal(stdout))
			printf("\n"); /* the error goes on a line of its own */
		event_write(&t->events, t->state.step, "stop", json_pack("{s:I, s:s, s:o}", "batch",
				(json_int_t)t->state.batches, "why", why[result - RUN_FAILED], "waiting",
				list_samples(t->retry.list, t->retry.count)));
		events_close(&t->events);
	}
	if (f && fclose(f) && result >= RUN_DONE) {
		fail("%s/metrics.jsonl: %s", t->config.train.output_dir, strerror(errno));
		return RUN_FAILED;
	}
	return result;
}
