/*
 * training/decision.c - what is done with a batch, and telling of it.
 */
#include "training/decision.h"

#include "files/base.h"
#include "data.h"
#include "kernels.h"
#include "training/events.h"
#include "training/spikes.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Whether a gradient can be used: nothing is NaN or infinite, nor does the square of an element, scaled for the
 * update, overflow: the second moment would stay infinite for ever. */
static bool is_usable(const struct metrics *m, double grad_scale)
{
	return isfinite(m->loss) && isfinite(m->balance_loss) && isfinite(m->z_loss) && isfinite(m->lr) &&
			isfinite(m->grad_norm) && isfinite((real)(m->grad_norm * grad_scale * m->grad_norm * grad_scale));
}

struct decision decide(struct spike_detector *detector, double grad_clip, const struct batch_sample *samples,
		const struct metrics *m)
{
	const enum spike_action action = detector->options.action;
	const double norm = m->grad_norm;
	struct decision d = {.lr_scale = 1, .grad_scale = grad_clip > 0 && norm > grad_clip ? grad_clip / norm : 1};
	const bool usable = is_usable(m, d.grad_scale);
	for (int i = 0; i < m->batch; i++)
		d.attempts = samples[i].attempts > d.attempts ? samples[i].attempts : d.attempts;
	if (!usable && action < SPIKES_SKIP)
		d.result = STEP_GO_BACK;
	if (action == SPIKES_OFF)
		return d;
	const double x[NUM_DECIDING_SIGNALS] = {usable ? m->loss : INFINITY, norm};
	const enum spike_verdict verdict = spike_judge(detector, x, d.deviation);
	d.accept = verdict != SPIKE_FOUND;
	if (verdict == SPIKE_LEVEL_SHIFT) {
		d.kind = "level_shift", d.message = "taken, this is the level now";
	} else if (verdict == SPIKE_FOUND && action == SPIKES_WATCH) {
		d.kind = "spike", d.message = usable ? "taken, spikes.action is watch" : "not finite, the run ends";
	} else if (verdict == SPIKE_FOUND && action == SPIKES_LADDER && usable && d.attempts) {
		d.kind = "retry", d.message = "taken with a lower learning rate, samples of it were tried before";
		d.lr_scale = detector->options.retry_lr;
	} else if (verdict == SPIKE_FOUND) {
		d.kind = "skip", d.message = "skipped";
		d.result = STEP_SKIPPED;
	}
	return d;
}

json_t *list_samples(const struct batch_sample *samples, int64_t n)
{
	struct batch_sample *sorted = allocate(n * sizeof *sorted);
	if (n)
		memcpy(sorted, samples, n * sizeof *sorted);
	json_t *list = samples_to_json(sorted, n);
	free(sorted);
	return list;
}

void report_decision(const struct decision *d, const struct metrics *m, const struct event_log *events, int64_t step,
		int64_t batch, const struct batch_sample *samples)
{
	char line[320];
	if (!d->kind)
		return;
	snprintf(line, sizeof line, "spike at step %lld, batch %lld: loss %.4f (%.1f deviations), gradient norm %.4g "
			"(%.1f): %s", (long long)m->step, (long long)batch, plain_nan(m->loss),
			d->deviation[SPIKE_LOSS], plain_nan(m->grad_norm), d->deviation[SPIKE_GRAD_NORM], d->message);
	print_status(stdout, line, true);
	event_write(events, step, d->kind, json_pack("{s:I, s:o, s:o, s:o, s:o, s:o, s:o, s:o, s:i, s:o}",
			"batch", (json_int_t)batch, "loss", json_number(m->loss), "grad_norm", json_number(m->grad_norm),
			"balance_loss", json_number(m->balance_loss), "z_loss", json_number(m->z_loss),
			"loss_deviation", json_number(d->deviation[SPIKE_LOSS]),
			"grad_norm_deviation", json_number(d->deviation[SPIKE_GRAD_NORM]), "lr", json_number(m->lr),
			"attempts", d->attempts, "samples", list_samples(samples, m->batch)));
}
