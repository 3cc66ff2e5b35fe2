/*
 * training/spikes.c - loss and gradient spikes: a detector over the steps of a run, and the queue of samples that wait
 * to be tried again.
 */
#include "training/spikes.h"

#include "files/base.h"
#include "files/config.h"
#include "kernels.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The least standard deviation, as a share of the median: the loss of one batch differs from that of the next by a few
 * per cent even when training stands still, its gradient norm by more. */
static const double floors[NUM_SPIKE_SIGNALS] = {0.02, 0.1, 0.1};

static const char *const signal_names[NUM_SPIKE_SIGNALS] = {"loss", "grad_norm", "update_norm"};
static const char *const run_names[NUM_DECIDING_SIGNALS] = {"run_loss", "run_grad_norm"};

int spike_detector_init(struct spike_detector *d, const struct spike_options *o)
{
	*d = (struct spike_detector){.options = *o, .skips = calloc(o->max_skips + 1, sizeof *d->skips)};
	bool fits = d->skips;
	for (int i = 0; i < NUM_SPIKE_SIGNALS; i++)
		fits &= (d->values[i] = calloc(o->window, sizeof *d->values[i])) != NULL;
	return fits ? 0 : fail("out of memory for spikes.window %d and spikes.max_skips %d", o->window, o->max_skips);
}

void spike_detector_free(struct spike_detector *d)
{
	for (int i = 0; i < NUM_SPIKE_SIGNALS; i++)
		free(d->values[i]);
	free(d->skips);
	*d = (struct spike_detector){0};
}

void spike_detector_clear(struct spike_detector *d)
{
	d->count = d->run = d->num_skips = 0;
}

void spike_detector_forget_skips(struct spike_detector *d)
{
	d->run = d->num_skips = 0;
}

/* The median of n numbers, n > 0, which it sorts. */
static double median(double *x, int n)
{
	qsort(x, n, sizeof *x, compare_doubles);
	return n % 2 ? x[n / 2] : x[n / 2 - 1] / 2 + x[n / 2] / 2;
}

/* The median of n numbers, n > 0. */
static double median_of(const double *x, int n)
{
	double sorted[n];
	memcpy(sorted, x, n * sizeof *x);
	return median(sorted, n);
}

/* The median of n numbers, n > 0, and their standard deviation, estimated from MAD. */
static double center_of(const double *x, int n, double *deviation)
{
	double distance[n];
	const double middle = median_of(x, n);
	for (int i = 0; i < n; i++)
		distance[i] = fabs(x[i] - middle);
	*deviation = 1.4826 * median(distance, n);
	return middle;
}

/* The median of the accepted values of a signal, and their standard deviation, as spikes.h says. */
static double center(const struct spike_detector *d, enum spike_signal signal, double *deviation)
{
	const double *values = d->values[signal];
	const int n = d->count, half = n / 2;
	double middle = center_of(values, n, deviation), moved[n], moved_deviation;
	const double fall = half ? median_of(values, half) - median_of(values + n - half, half) : 0;
	if (fall > *deviation) {
		for (int i = 0; i < n; i++)
			moved[i] = values[i] - fall / (n - half) * (n - i);
		const double moved_middle = center_of(moved, n, &moved_deviation);
		if (moved_deviation < *deviation)
			middle = moved_middle, *deviation = moved_deviation;
	}
	*deviation = fmax(*deviation, floors[signal] * fabs(middle));
	return middle;
}

double spike_deviation(const struct spike_detector *d, enum spike_signal signal, double x)
{
	double deviation;
	if (!isfinite(x))
		return INFINITY;
	if (d->count < d->options.warmup || d->count == 0)
		return 0;
	const double distance = x - center(d, signal, &deviation);
	return deviation > 0 ? distance / deviation : distance > 0 ? INFINITY : 0;
}

/* Adds the values of a step to the windows. */
static void append(struct spike_detector *d, const double x[NUM_SPIKE_SIGNALS])
{
	const int full = d->count == d->options.window;
	d->count -= full;
	for (int i = 0; i < NUM_SPIKE_SIGNALS; i++) {
		if (full)
			memmove(d->values[i], d->values[i] + 1, d->count * sizeof *d->values[i]);
		d->values[i][d->count] = x[i];
	}
	d->count++;
}

/* Whether the run of spikes is a new level of a signal. */
static bool is_new_level(const struct spike_detector *d, enum spike_signal signal)
{
	double x[LEVEL_SHIFT_RUN], deviation;
	memcpy(x, d->run_values[signal], sizeof x);
	const double middle = median(x, LEVEL_SHIFT_RUN); /* sorts x */
	return x[LEVEL_SHIFT_RUN - 1] - x[0] < (middle - center(d, signal, &deviation)) / 2;
}

enum spike_verdict spike_judge(struct spike_detector *d, const double x[NUM_DECIDING_SIGNALS],
		double deviation[NUM_DECIDING_SIGNALS])
{
	const double thresholds[NUM_DECIDING_SIGNALS] = {d->options.loss_threshold, d->options.grad_threshold};
	bool spike = false, finite = true, spikes[NUM_DECIDING_SIGNALS];
	for (int i = 0; i < NUM_DECIDING_SIGNALS; i++) {
		deviation[i] = spike_deviation(d, i, x[i]);
		spikes[i] = deviation[i] > thresholds[i];
		spike |= spikes[i];
		finite &= isfinite(x[i]) != 0;
	}
	if (!spike || !finite) {
		d->run = 0;
		return spike ? SPIKE_FOUND : SPIKE_NONE;
	}
	if (d->run == LEVEL_SHIFT_RUN) { /* they did not agree: the oldest makes room */
		d->run--;
		for (int i = 0; i < NUM_DECIDING_SIGNALS; i++)
			memmove(d->run_values[i], d->run_values[i] + 1, d->run * sizeof **d->run_values);
	}
	for (int i = 0; i < NUM_DECIDING_SIGNALS; i++)
		d->run_values[i][d->run] = x[i];
	if (++d->run < LEVEL_SHIFT_RUN)
		return SPIKE_FOUND;
	for (int i = 0; i < NUM_DECIDING_SIGNALS; i++)
		if (spikes[i] && !is_new_level(d, i))
			return SPIKE_FOUND;
	/* The update's norm of these batches is not known: its level is the last one. */
	const double update = d->values[SPIKE_UPDATE_NORM][d->count - 1];
	spike_detector_clear(d);
	for (int j = 0; j < LEVEL_SHIFT_RUN - 1; j++)
		append(d, (double[]){d->run_values[SPIKE_LOSS][j], d->run_values[SPIKE_GRAD_NORM][j], update});
	return SPIKE_LEVEL_SHIFT;
}

void spike_accept(struct spike_detector *d, const double x[NUM_SPIKE_SIGNALS])
{
	append(d, (double[]){x[SPIKE_LOSS], x[SPIKE_GRAD_NORM],
			isfinite(x[SPIKE_UPDATE_NORM]) ? x[SPIKE_UPDATE_NORM] : DBL_MAX});
}

bool spike_skipped(struct spike_detector *d, int64_t batch)
{
	int old = 0;
	while (old < d->num_skips && (d->skips[old] <= batch - d->options.window ||
			d->num_skips - old > d->options.max_skips))
		old++;
	d->num_skips -= old;
	memmove(d->skips, d->skips + old, d->num_skips * sizeof *d->skips);
	d->skips[d->num_skips++] = batch;
	return d->num_skips > d->options.max_skips;
}

/* n numbers as a JSON array. */
static json_t *reals_to_json(const double *x, int n)
{
	json_t *array = json_array();
	for (int i = 0; i < n; i++)
		json_array_append_new(array, json_real(x[i]));
	return array;
}

/* Reads the last `most` of the finite numbers of an array; returns how many they are, or -1. */
static int reals_from_json(double *x, int most, const json_t *state, const char *key, const char *where)
{
	const json_t *array = json_object_get(state, key);
	if (!json_is_array(array))
		return fail("%s: `%s` is %s; expected an array", where, key, json_kind(array));
	const size_t size = json_array_size(array), n = size < (size_t)most ? size : (size_t)most;
	for (size_t i = 0; i < n; i++) {
		const json_t *v = json_array_get(array, size - n + i);
		if (!json_is_number(v))
			return fail("%s: `%s` has %s; expected numbers", where, key, json_kind(v));
		x[i] = json_number_value(v);
	}
	return (int)n;
}

json_t *spike_detector_to_json(const struct spike_detector *d)
{
	json_t *state = json_object(), *skips = json_array();
	for (int i = 0; i < NUM_SPIKE_SIGNALS; i++)
		json_object_set_new(state, signal_names[i], reals_to_json(d->values[i], d->count));
	for (int i = 0; i < NUM_DECIDING_SIGNALS; i++)
		json_object_set_new(state, run_names[i], reals_to_json(d->run_values[i], d->run));
	for (int i = 0; i < d->num_skips; i++)
		json_array_append_new(skips, json_integer(d->skips[i]));
	json_object_set_new(state, "skips", skips);
	return state;
}

int spike_detector_from_json(struct spike_detector *d, const json_t *state, const char *where)
{
	int n[NUM_SPIKE_SIGNALS], run[NUM_DECIDING_SIGNALS];
	spike_detector_clear(d);
	for (int i = 0; i < NUM_SPIKE_SIGNALS; i++)
		if ((n[i] = reals_from_json(d->values[i], d->options.window, state, signal_names[i], where)) < 0)
			return -1;
	for (int i = 0; i < NUM_DECIDING_SIGNALS; i++)
		if ((run[i] = reals_from_json(d->run_values[i], LEVEL_SHIFT_RUN, state, run_names[i], where)) < 0)
			return -1;
	if (n[0] != n[1] || n[0] != n[2] || run[0] != run[1])
		return fail("%s: windows of %d, %d and %d values, runs of %d and %d; expected equal numbers", where, n[0], n[1],
				n[2], run[0], run[1]);
	const json_t *skips = json_object_get(state, "skips");
	if (!json_is_array(skips))
		return fail("%s: `skips` is %s; expected an array", where, json_kind(skips));
	const size_t size = json_array_size(skips), most = d->options.max_skips;
	for (size_t i = size > most ? size - most : 0; i < size; i++) {
		const json_t *v = json_array_get(skips, i);
		if (!json_is_integer(v))
			return fail("%s: `skips` has %s; expected integers", where, json_kind(v));
		d->skips[d->num_skips++] = json_integer_value(v);
	}
	d->count = n[0];
	d->run = run[0];
	return 0;
}

/* ------------------------------------------------------------------------------------------------- the queue */

void retry_queue_free(struct retry_queue *q)
{
	free(q->list);
	*q = (struct retry_queue){0};
}

int64_t retry_queue_add(struct retry_queue *q, struct batch_sample *samples, int64_t n, uint64_t seed, int64_t batch,
		int within)
{
	int64_t dropped = 0;
	q->list = grow(q->list, q->count, &q->capacity, n, sizeof *q->list);
	for (int64_t i = 0; i < n; i++) {
		struct batch_sample s = samples[i];
		/* A permutation of the batches rather than independent numbers: so the samples of a bad batch come back one by
		 * one as far as possible, and those that are good do not share a batch with the bad one again. */
		const struct random_stream order = {.seed = seed, .step = (uint32_t)batch,
				.purpose = RANDOM_RETRY + 1 + (uint32_t)(i / within % 65535)};
		s.attempts++;
		s.due = batch + 2 + (int64_t)random_permute(i % within, within, &order);
		if (s.attempts < MAX_ATTEMPTS)
			q->list[q->count++] = s;
		else
			samples[dropped++] = s;
	}
	return dropped;
}

void retry_queue_draw(struct retry_queue *q, struct batch_sample *samples, int64_t n, uint64_t seed, int64_t batch)
{
	const int64_t most = n > 1 ? n / 2 : 1;
	const struct random_stream places = {.seed = seed, .purpose = RANDOM_RETRY, .step = (uint32_t)batch};
	int64_t drawn = 0, left = 0;
	for (int64_t i = 0; i < n; i++)
		samples[i] = (struct batch_sample){.file = -1};
	for (int64_t i = 0; i < q->count; i++)
		if (drawn < most && q->list[i].due <= batch)
			samples[random_permute(drawn++, n, &places)] = q->list[i];
		else
			q->list[left++] = q->list[i];
	q->count = left;
}

int64_t retry_queue_remap(struct retry_queue *q, const int *index, struct batch_sample *lost)
{
	int64_t left = 0, num_lost = 0;
	for (int64_t i = 0; i < q->count; i++) {
		struct batch_sample s = q->list[i];
		if (index[s.file] < 0) {
			lost[num_lost++] = s;
		} else {
			s.file = index[s.file];
			q->list[left++] = s;
		}
	}
	q->count = left;
	return num_lost;
}

static int compare_samples(const void *a, const void *b)
{
	const struct batch_sample *x = a, *y = b;
	return x->file != y->file ? (x->file > y->file) - (x->file < y->file)
			: (x->number > y->number) - (x->number < y->number);
}

json_t *samples_to_json(struct batch_sample *samples, int64_t n)
{
	json_t *array = json_array();
	if (n)
		qsort(samples, n, sizeof *samples, compare_samples);
	for (int64_t i = 0, next; i < n; i = next) {
		for (next = i + 1; next < n && samples[next].file == samples[i].file &&
				samples[next].number == samples[next - 1].number + 1;)
			next++;
		json_array_append_new(array, json_pack("[i, I, I]", samples[i].file, (json_int_t)samples[i].number,
				(json_int_t)samples[next - 1].number));
	}
	return array;
}

json_t *retry_queue_to_json(const struct retry_queue *q)
{
	json_t *array = json_array();
	for (int64_t i = 0; i < q->count; i++)
		json_array_append_new(array, json_pack("[i, I, i, I]", q->list[i].file, (json_int_t)q->list[i].number,
				q->list[i].attempts, (json_int_t)q->list[i].due));
	return array;
}

int retry_queue_from_json(struct retry_queue *q, const json_t *state, const char *where, int num_files,
		const int64_t *taken, int64_t batch)
{
	if (!json_is_array(state))
		return fail("%s: `queue` is %s; expected an array", where, json_kind(state));
	const size_t n = json_array_size(state);
	q->count = 0;
	q->list = grow(q->list, 0, &q->capacity, n, sizeof *q->list);
	for (size_t i = 0; i < n; i++) {
		const json_t *entry = json_array_get(state, i);
		int64_t x[4];
		bool good = json_is_array(entry) && json_array_size(entry) == 4;
		for (int j = 0; j < 4 && good; j++) {
			good = json_is_integer(json_array_get(entry, j));
			x[j] = json_integer_value(json_array_get(entry, j));
		}
		if (!good || x[0] < 0 || x[0] >= num_files || x[1] < 0 || x[1] >= taken[x[0]] || x[2] < 1 ||
				x[2] >= MAX_ATTEMPTS || x[3] < 1 || x[3] > batch + MAX_SPIKE_WINDOW)
			return fail("%s: `queue` entry %zu is not [file, number, attempts, batch] of a sample that was drawn and "
					"is to be tried again", where, i);
		q->list[q->count++] = (struct batch_sample){(int)x[0], x[1], (int)x[2], x[3]};
	}
	return 0;
}
