/*
 * commands/plot.c - `ling plot`: what the picture of a run shows: losses, with marks of what was decided about bad
 * batches, learning rate and batch size, expert load.
 */
#define _GNU_SOURCE
#include "commands/plot.h"

#include "files/base.h"
#include "data.h"
#include "training/events.h"
#include "commands/plot_canvas.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TITLE_SCALE 2.6 /* as TEXT_SCALE */

/* -- series -- */

struct series {
	const char *name;
	uint32_t colour;
	double width, dot;            /* pixels: of the line; and of a dot at each value, 0 = none */
	bool stairs;                  /* a value holds until the next one: horizontal and vertical lines */
	int count;
	const double *x, *y;
};

/* Draws a series. A value that cannot be shown leaves a gap. A stroke that stays in one pixel column, between the
 * lowest and the highest value drawn there, is left out: so a million values take little more time than the extremes
 * of each column. */
static void draw_series(struct canvas *c, const struct series *s, const struct axis *x, const struct axis *y)
{
	double px = 0, py = 0, lo = 0, hi = 0;
	bool pen_down = false;
	for (int i = 0; i < s->count; i++) {
		double nx = axis_at(x, s->x[i]), ny = axis_at(y, s->y[i]);
		if (!can_show(s->y[i])) {
			pen_down = false;
			continue;
		}
		if (pen_down && s->stairs) {
			stroke(c, px, py, nx, py, s->width);
			lo = hi = py, px = nx;
		}
		bool same_column = pen_down && floor(px) == floor(nx);
		if (!pen_down)
			stroke(c, nx, ny, nx, ny, s->width);
		else if (!same_column || ny < lo || ny > hi)
			stroke(c, px, py, nx, ny, s->width);
		lo = same_column ? fmin(lo, ny) : ny, hi = same_column ? fmax(hi, ny) : ny;
		if (s->dot > 0)
			stroke(c, nx, ny, nx, ny, s->dot);
		px = nx, py = ny, pen_down = true;
	}
	paint(c, s->colour);
}

/* Marks with red dots, at the bottom of a panel, where a value of a series cannot be shown. Returns whether there was
 * one. */
static bool mark_nonfinite(struct canvas *c, const struct series *s, const struct axis *x, int bottom)
{
	double last = -1;
	for (int i = 0; i < s->count; i++) {
		double px = floor(axis_at(x, s->x[i])) + 0.5;
		if (!can_show(s->y[i]) && px != last) {
			stroke(c, px, bottom - 6, px, bottom - 6, 10);
			last = px;
		}
	}
	paint(c, RED);
	return last >= 0;
}

/* -- marks of what was decided about bad batches -- */

static const struct { const char *kind, *name; uint32_t colour; } mark_kinds[NUM_PLOT_MARKS] = {
	{"skip", "skipped", 0xd95f02}, {"retry", "at a lower rate", 0x7b3fa0}, {"drop", "dropped", 0x202020},
	{"level_shift", "new level", 0x1b9e50}, {"rollback", "went back", 0xd6267f},
};

/* The marks of a run, in the order of its events. */
struct mark_list { struct plot_mark *list; size_t count, capacity; };

/* Adds the mark of an event, if it is such an event. Where the run went back, what it undid is marked no more. */
static int add_mark(void *context, const json_t *event)
{
	struct mark_list *marks = context;
	const char *kind = json_string_value(json_object_get(event, "kind"));
	const json_t *loss = json_object_get(event, "loss");
	const int64_t step = json_integer_value(json_object_get(event, "step")),
			batch = json_integer_value(json_object_get(event, "batch"));
	const bool restart = !strcmp(kind, "start") || !strcmp(kind, "resume"), back = !strcmp(kind, "rollback");
	struct plot_mark mark = {.step = step, .batch = batch,
			.loss = json_is_number(loss) ? json_number_value(loss) : NAN};
	size_t left = 0;
	for (size_t i = 0; i < marks->count; i++)
		if (!(restart && marks->list[i].batch > batch) && !(back && marks->list[i].step > step))
			marks->list[left++] = marks->list[i];
	marks->count = left;
	for (int i = 0; i < NUM_PLOT_MARKS; i++)
		if (!strcmp(kind, mark_kinds[i].kind)) {
			mark.kind = i;
			mark.step += i == PLOT_SKIP || i == PLOT_DROP; /* the step that the batch was for */
			marks->list = grow(marks->list, marks->count, &marks->capacity, 1, sizeof *marks->list);
			marks->list[marks->count++] = mark;
		}
	return 0;
}

/* Draws the marks of a kind at the loss of the batch, or at the top of the panel where that is higher or not finite; a
 * mark without a loss at the bottom. Returns whether there is one. */
static bool draw_marks(struct canvas *c, const struct plot_mark *marks, int n, int kind, const struct axis *x,
		const struct axis *y, int top, int bottom)
{
	bool any = false;
	for (int i = 0; i < n; i++) {
		if (marks[i].kind != kind)
			continue;
		const bool named = kind == PLOT_DROP || kind == PLOT_ROLLBACK; /* these have no loss */
		const double px = fmin(fmax(axis_at(x, marks[i].step), PLOT_LEFT + 5), PLOT_RIGHT - 5);
		const double py = named ? bottom - 7 : can_show(marks[i].loss) ? axis_at(y, marks[i].loss) : top;
		stroke(c, px, fmin(fmax(py, top + 6), bottom - 6), px, fmin(fmax(py, top + 6), bottom - 6), 11);
		if (kind == PLOT_ROLLBACK)
			stroke(c, px, top, px, bottom, 1.6);
		any = true;
	}
	paint(c, mark_kinds[kind].colour);
	return any;
}

/* Draws a panel's heading above it and, at the right, the legend: the series that have a name. */
static void draw_heading(struct canvas *c, int top, const char *heading, const struct series *s, int num_series)
{
	double x = PLOT_RIGHT, y = top - 20;
	draw_text(c, PLOT_LEFT, y, heading, TEXT_SCALE, 0, false, BLACK);
	for (int i = num_series - 1; i >= 0; i--) {
		if (!s[i].name)
			continue;
		draw_text(c, x, y, s[i].name, TEXT_SCALE, 1, false, BLACK);
		x -= text_width(s[i].name, TEXT_SCALE) + 10;
		if (s[i].width > 0)
			stroke(c, x - 32, y, x, y, s[i].width);
		if (s[i].dot > 0)
			stroke(c, x - 16, y, x - 16, y, s[i].dot);
		paint(c, s[i].colour);
		x -= 56;
	}
}

/* -- the panels -- */

/* Sorts the values that can be shown to the front of v and returns their number. */
static int sort_shown(double *v, int n)
{
	int shown = 0;
	for (int i = 0; i < n; i++)
		if (can_show(v[i]))
			v[shown++] = v[i];
	qsort(v, shown, sizeof *v, compare_doubles);
	return shown;
}

/* Smooths a series: at most 4000 blocks of values, and for each block the mean of a window of blocks centred on it,
 * which is narrower towards the ends. A geometric mean needs positive values. Writes the points to x and y [4000] and
 * returns their number; *window is the window's width in values, 1 = not smoothed. */
static int smooth(const struct series *s, bool geometric, double *x, double *y, int *window)
{
	int per_block = (s->count + 3999) / 4000, blocks = (s->count + per_block - 1) / per_block, half = blocks / 40;
	double *sum = allocate(blocks * sizeof *sum), *shown = allocate(blocks * sizeof *shown);
	for (int i = 0; i < s->count; i++)
		if (can_show(s->y[i]))
			sum[i / per_block] += geometric ? log(s->y[i]) : s->y[i], shown[i / per_block]++;
	for (int b = 0; b < blocks; b++) {
		int last = b * per_block + per_block - 1, near = b < blocks - 1 - b ? b : blocks - 1 - b;
		int h = clamp_int(near, half / 4, half);
		double total = 0, n = 0;
		for (int i = b < h ? 0 : b - h; i <= b + h && i < blocks; i++)
			total += sum[i], n += shown[i];
		x[b] = (s->x[b * per_block] + s->x[last < s->count ? last : s->count - 1]) / 2;
		y[b] = shown[b] == 0 ? NAN : geometric ? exp(total / n) : total / n; /* a gap stays a gap */
	}
	free(sum), free(shown);
	*window = (2 * half + 1) * per_block;
	return blocks;
}

/* Training and validation loss. The axis is linear; where the largest loss is more than ten times the median,
 * logarithmic. */
static void loss_panel(struct canvas *c, const struct series *train, const struct series *valid,
		const struct plot_mark *marks, int num_marks, const struct axis *x, const char *x_name, int top, int bottom)
{
	double *all = allocate((size_t)(train->count + valid->count) * sizeof *all);
	for (int i = 0; i < train->count + valid->count; i++)
		all[i] = i < train->count ? train->y[i] : valid->y[i - train->count];
	int n = sort_shown(all, train->count + valid->count);
	double lo = n ? all[0] : 0, hi = n ? all[n - 1] : 1, middle = n ? all[n / 2] : 0;
	free(all);
	bool is_log = lo > 1e-100 && hi > 10 * middle;
	double pad = is_log ? pow(hi / lo, 0.04) : 0.04 * (hi - lo) + 1e-3 * fabs(hi) + 1e-12;
	struct axis y = make_axis(is_log ? lo / pad : lo - pad, is_log ? hi * pad : hi + pad, bottom, top, 0, is_log);

	double smooth_x[4000], smooth_y[4000];
	int window, blocks = smooth(train, is_log, smooth_x, smooth_y, &window);
	bool raw_only = window == 1;
	char label[64];
	snprintf(label, sizeof label, "training, %smean of %d steps", is_log ? "geometric " : "", window);
	struct series s[4 + NUM_PLOT_MARKS] = {
		{"training", raw_only ? 0x1f5fa8 : 0x93bce4, raw_only ? 2.2 : 1.4, raw_only ? 6 : 0, false,
			train->count, train->x, train->y},
		{raw_only ? NULL : label, 0x1f5fa8, 2.4, 0, false, raw_only ? 0 : blocks, smooth_x, smooth_y},
		{valid->count ? "validation" : NULL, 0xe07a10, 2.2, valid->count < 200 ? 9 : 0, false,
			valid->count, valid->x, valid->y},
		{NULL, RED, 0, 10, false, 0, NULL, NULL},
	};
	draw_axis(c, &y, LEFT_OF, PLOT_LEFT, PLOT_RIGHT, is_log ? "cross-entropy (nats per token, log scale)"
			: "cross-entropy (nats per token)", BLACK);
	draw_axis(c, x, BELOW, bottom, top, x_name, BLACK);
	for (int i = 0; i < 3; i++)
		draw_series(c, &s[i], x, &y);
	bool train_marked = mark_nonfinite(c, train, x, bottom), valid_marked = mark_nonfinite(c, valid, x, bottom);
	s[3].name = train_marked || valid_marked ? "non-finite" : NULL;
	for (int i = 0; i < NUM_PLOT_MARKS; i++)
		if (draw_marks(c, marks, num_marks, i, x, &y, top, bottom))
			s[4 + i] = (struct series){mark_kinds[i].name, mark_kinds[i].colour, 0, 11, false, 0, NULL, NULL};
	draw_frame(c, PLOT_LEFT, top, PLOT_RIGHT, bottom);
	draw_heading(c, top, "Loss", s, 4 + NUM_PLOT_MARKS);
}

/* A vertical axis from 0 to `room` times the largest value of a series. */
static struct axis axis_from_zero(const struct series *s, int top, int bottom, double room, double min_step)
{
	double hi = 0;
	for (int i = 0; i < s->count; i++)
		hi = can_show(s->y[i]) ? fmax(hi, s->y[i]) : hi;
	return make_axis(0, hi * room, bottom, top, min_step, false);
}

/* Learning rate and batch size, each with an axis in its colour. The axes have different room, so that two constant
 * lines are not at the same height. */
static void schedule_panel(struct canvas *c, const struct series *lr, const struct series *batch, const struct axis *x,
		int top, int bottom)
{
	struct axis left = axis_from_zero(lr, top, bottom, 1.1, 0), right = axis_from_zero(batch, top, bottom, 1.3, 1);
	struct series nonfinite = {"non-finite", RED, 0, 10, false, 0, NULL, NULL};
	draw_axis(c, &left, LEFT_OF, PLOT_LEFT, PLOT_RIGHT, "learning rate", lr->colour);
	draw_axis(c, &right, RIGHT_OF, PLOT_RIGHT, PLOT_RIGHT, "batch (sequences)", batch->colour);
	draw_axis(c, x, BELOW, bottom, top, "step", BLACK);
	draw_series(c, batch, x, &right);
	draw_series(c, lr, x, &left);
	bool marked = mark_nonfinite(c, lr, x, bottom);
	draw_frame(c, PLOT_LEFT, top, PLOT_RIGHT, bottom);
	draw_heading(c, top, "Learning rate and global batch size", &nonfinite, marked);
}

/* A heat map of expert load, [layers, pixel columns]. A step fills all columns that it covers, and a column shows the
 * mean of all steps that fall into it. Red: not finite. White: no step. */
static void load_panel(struct canvas *c, const struct metrics *m, int n, int layers, const struct axis *x, int top,
		int bottom)
{
	enum { COLUMNS = PLOT_RIGHT - PLOT_LEFT };
	size_t cells = (size_t)layers * COLUMNS;
	double *load = allocate(cells * sizeof *load), *count = allocate(cells * sizeof *count);
	for (int i = 0; i < n; i++) {
		int first = clamp_int(axis_at(x, m[i].step - 0.5) - PLOT_LEFT + 0.5, 0, COLUMNS - 1);
		int end = clamp_int(axis_at(x, m[i].step + 0.5) - PLOT_LEFT + 0.5, first + 1, COLUMNS);
		for (int layer = 0; layer < m[i].num_layers; layer++)
			for (int column = first; column < end; column++) {
				load[layer * COLUMNS + column] += m[i].expert_load[layer];
				count[layer * COLUMNS + column]++;
			}
	}
	for (size_t i = 0; i < cells; i++)
		load[i] /= count[i]; /* without a step 0/0 = NaN; count tells it from other values that are not finite */

	/* With a few extreme cells all others would have nearly one colour: so the colours end at the 99th percentile. */
	double *sorted = allocate(cells * sizeof *sorted);
	memcpy(sorted, load, cells * sizeof *sorted);
	int shown = sort_shown(sorted, cells);
	double hi = shown ? sorted[(int)(0.99 * (shown - 1))] : 2;
	bool beyond = shown && sorted[shown - 1] > hi * 1.05;
	free(sorted);

	struct axis y = make_axis(-0.5, layers - 0.5, bottom, top, 1, false);
	struct axis colours = make_axis(1, fmax(hi, 1.1), bottom, top, 0, false);
	draw_axis(c, &y, LEFT_OF, PLOT_LEFT, PLOT_LEFT, "MoE layer", BLACK);
	draw_axis(c, x, BELOW, bottom, bottom, "step", BLACK);
	for (size_t i = 0; i < cells; i++) {
		int layer = i / COLUMNS, column = PLOT_LEFT + i % COLUMNS;
		double t = (load[i] - colours.lo) / (colours.hi - colours.lo);
		if (count[i] > 0)
			fill_box(c, column, lround(axis_at(&y, layer + 0.5)), column + 1, lround(axis_at(&y, layer - 0.5)),
					can_show(load[i]) ? heat_colour(t) : RED);
	}
	free(load), free(count);
	draw_frame(c, PLOT_LEFT, top, PLOT_RIGHT, bottom);

	int bar = PLOT_RIGHT + 22, bar_end = bar + 20;
	for (int row = top; row < bottom; row++)
		fill_box(c, bar, row, bar_end, row + 1, heat_colour((double)(bottom - 1 - row) / (bottom - 1 - top)));
	draw_axis(c, &colours, RIGHT_OF, bar_end, bar_end, "", BLACK);
	draw_frame(c, bar, top, bar_end, bottom);
	char heading[128];
	snprintf(heading, sizeof heading, "Expert load: largest expert's share over the mean share (1 = balanced%s)",
			beyond ? "; yellow: this much or more" : "");
	draw_heading(c, top, heading, NULL, 0);
}

int plot_metrics(const struct metrics *m, int n, const struct plot_mark *marks, int num_marks, const char *title,
		const char *png_path)
{
	double *block = allocate((size_t)n * 6 * sizeof *block), lo = INFINITY, hi = -INFINITY, tokens = 0;
	double *step = block, *loss = step + n, *lr = loss + n, *batch = lr + n;
	double *valid_step = batch + n, *valid = valid_step + n;
	int layers = 0, num_valid = 0;
	for (int i = 0; i < n; i++) {
		step[i] = m[i].step, loss[i] = m[i].loss, lr[i] = m[i].lr, batch[i] = m[i].batch;
		lo = fmin(lo, step[i]), hi = fmax(hi, step[i]), tokens = fmax(tokens, m[i].tokens);
		layers = m[i].num_layers > layers ? m[i].num_layers : layers;
		if (m[i].has_valid_loss)
			valid_step[num_valid] = step[i], valid[num_valid++] = m[i].valid_loss;
	}
	/* step i covers i - 0.5 to i + 0.5 */
	struct axis x = make_axis(lo - 0.5, hi + 0.5, PLOT_LEFT, PLOT_RIGHT, 1, false);
	double dot = n < 40 ? 6 : 0;
	struct series loss_series = {.count = n, .x = step, .y = loss};
	struct series valid_series = {.count = num_valid, .x = valid_step, .y = valid};
	struct series lr_series = {NULL, 0x14806a, 2.2, dot, false, n, step, lr};
	struct series batch_series = {NULL, 0x8a4fa8, 2.2, dot, true, n, step, batch};

	struct canvas c = canvas_create();
	double scale = fmin(TITLE_SCALE, 1300 / text_width(title, 1));
	draw_text(&c, (PLOT_LEFT + PLOT_RIGHT) / 2, 34, title, scale, 0.5, false, BLACK);
	char total[32], x_name[64];
	format_number(total, tokens, tokens / 100, tokens);
	snprintf(x_name, sizeof x_name, "step (%s tokens in all)", total);
	int loss_bottom = layers ? 610 : 850, schedule_bottom = layers ? 970 : 1430;
	loss_panel(&c, &loss_series, &valid_series, marks, num_marks, &x, x_name, 105, loss_bottom);
	schedule_panel(&c, &lr_series, &batch_series, &x, loss_bottom + 110, schedule_bottom);
	if (layers)
		load_panel(&c, m, n, layers, &x, schedule_bottom + 110, 1430);
	int rc = canvas_write_png(&c, png_path);
	canvas_free(&c);
	free(block);
	return rc;
}

int plot_run(const char *run_dir, const char *png_path)
{
	struct metrics *m;
	int n;
	if (metrics_read(run_dir, &m, &n) < 0)
		return -1;
	struct mark_list marks = {0};
	int rc;
	char *full = realpath(run_dir, NULL); /* so that "." has a name */
	if (n == 0)
		rc = fail("%s/metrics.jsonl: no steps to draw; expected a line for each step; let `ling train` do its first "
				"step", run_dir);
	else if ((rc = events_read(run_dir, add_mark, &marks)) == 0) {
		const char *name = file_name(full ? full : run_dir);
		rc = plot_metrics(m, n, marks.list, (int)marks.count, *name ? name : run_dir, png_path);
	}
	free(full), free(m), free(marks.list);
	return rc;
}

struct plot_options { const char *out; };

static int run_plot(const struct command_line *line)
{
	const struct plot_options *o = line->options;
	char path[PATH_LEN];
	if (!o->out && path_join(path, line->words[0], "metrics.png") < 0)
		return EXIT_WORK_FAILED;
	const char *out = o->out ? o->out : path;
	if (plot_run(line->words[0], out) < 0)
		return EXIT_WORK_FAILED;
	printf("%s\n", out);
	return EXIT_DONE;
}

static const struct command_option options[] = {
	TEXT_OPTION(plot_options, out, "out", "FILE", "The picture (default: RUN_DIR/metrics.png)"),
};

const struct command plot_command = {
	.name = "plot", .usage = "RUN_DIR", .min_words = 1, .max_words = 1,
	.help = "Draw losses, learning rate, batch size and expert load of a run as a PNG, and mark what was done with "
		"spikes.",
	.run = run_plot, COMMAND_OPTIONS(plot_options, options),
};
