/*
 * commands/plot.c - `ling plot`: what the picture of a run shows, or of several: losses, with marks of what was decided
 * about bad batches, learning rate and batch, gradient norm, auxiliary losses, speed, expert load.
 */
#define _GNU_SOURCE
#include "commands/plot.h"

#include "files/base.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TITLE_SIZE 24.0
enum { HEADER_TOP = 30, HEADER_ROW = 26 }; /* the names of the runs, a row each: pixels */

/* Colours that stay apart for the colour-blind (Okabe and Ito). Of one run the first two are those of a panel's left
 * and right axis; of several runs each has one. */
static const uint32_t colours[MAX_PLOT_RUNS] = {0x0072b2, 0xd55e00, 0x009e73, 0xcc79a7, 0xe69f00, 0x56b4e9, 0x000000,
		0x8c6d31};

/* A colour nearer to white: of values that are not smoothed. */
static uint32_t pale(uint32_t colour)
{
	uint32_t out = 0;
	for (int shift = 16; shift >= 0; shift -= 8)
		out |= (uint32_t)lround(255 - 0.42 * (255 - (colour >> shift & 255))) << shift;
	return out;
}

/* -- panels -- */

enum look {
	LOOK_PLAIN,                  /* a line; with a dot at each value when there are few */
	LOOK_RAW,                    /* a pale, thin line, if LOOK_SMOOTH goes with it */
	LOOK_SMOOTH,                 /* see series_smooth */
	LOOK_STAIRS,                 /* a value holds until the next one */
};

struct curve {
	const struct run *run;
	const char *name;            /* of the series */
	const char *legend;          /* NULL: none */
	uint32_t colour;
	enum look look;
	bool right;                  /* its axis */
	bool dashed;
};

struct panel {
	struct box box;
	const char *heading;
	struct panel_axis {
		const char *name;
		bool from_zero;
		double headroom;         /* the axis ends at so many times the largest value: two constant lines with
		                          * different headroom are not at the same height */
		double min_step;         /* between its ticks */
		double include;          /* a value that the axis has, unless it is far from all others; NaN: none */
		double factor;           /* of values */
		struct axis axis;
		bool used;
	} left, right;
	const double *clips;         /* [runs] a dashed line for each run; NaN: none. NULL: none at all */
	bool has_marks;
	struct curve curves[4 * MAX_PLOT_RUNS];
	int num_curves;
};

/* What all panels of a picture share. */
struct picture {
	struct canvas *canvas;
	const struct run *runs;
	int num_runs;
	bool by_tokens;
	double lo, hi;               /* of the horizontal axis */
	int half;                    /* see series_smooth; 0: so few steps that nothing is smoothed */
};

/* Adds a curve, if there is room. */
static void add_curve(struct panel *p, struct curve curve)
{
	if (p->num_curves < (int)(sizeof p->curves / sizeof *p->curves))
		p->curves[p->num_curves++] = curve;
}

static const double *horizontal(const struct picture *picture, const struct series *s)
{
	return picture->by_tokens ? s->tokens : s->step;
}

static struct axis horizontal_axis(const struct picture *picture, const struct box *box)
{
	return make_axis(picture->lo, picture->hi, box->left, box->right, 1, false);
}

/* Sorts the values that can be shown to the front of v and returns their number. */
static int sort_shown(double *v, int n)
{
	int shown = 0;
	for (int i = 0; i < n; i++)
		if (can_show(v[i]))
			v[shown++] = v[i];
	if (shown)
		qsort(v, shown, sizeof *v, compare_doubles);
	return shown;
}

/* Finds the range of an axis. It is linear; where the largest value is more than ten times the median, logarithmic,
 * unless it is from_zero. */
static void choose_axis(const struct panel *p, struct panel_axis *a, bool right)
{
	double *all = NULL;
	size_t n = 0, room = 0;
	for (int i = 0; i < p->num_curves; i++) {
		const struct curve *c = &p->curves[i];
		if (c->right != right || c->look == LOOK_SMOOTH)
			continue;
		struct series s = run_series(c->run, c->name);
		all = grow(all, n, &room, s.count, sizeof *all);
		for (int k = 0; k < s.count; k++)
			all[n++] = s.value[k] * a->factor;
		series_free(&s);
	}
	a->used = n > 0;
	n = sort_shown(all, n);
	double lo = n ? all[0] : 0, hi = n ? all[n - 1] : 1;
	const bool is_log = !a->from_zero && lo > 1e-100 && hi > 10 * all[n / 2];
	free(all);
	if (a->include > lo / 2 && a->include < 2 * hi)
		lo = fmin(lo, a->include), hi = fmax(hi, a->include);
	const double pad = is_log ? pow(hi / lo, 0.04) : 0.04 * (hi - lo) + 1e-3 * fabs(hi) + 1e-12;
	if (a->from_zero)
		a->axis = make_axis(0, hi * a->headroom, p->box.bottom, p->box.top, a->min_step, false);
	else
		a->axis = make_axis(is_log ? lo / pad : lo - pad, is_log ? hi * pad : hi + pad, p->box.bottom, p->box.top,
				a->min_step, is_log);
}

/* Marks with red dots, at the bottom of a panel, where a value of a series cannot be shown. Returns whether there was
 * one. */
static bool mark_nonfinite(const struct picture *picture, const struct series *s, const struct panel *p)
{
	const struct axis x = horizontal_axis(picture, &p->box);
	double last = -1;
	for (int i = 0; i < s->count; i++) {
		const double px = floor(axis_at(&x, horizontal(picture, s)[i])) + 0.5;
		if (!can_show(s->value[i]) && px != last)
			draw_shape(picture->canvas, DISC, last = px, p->box.bottom - 6, 9, RED, RED);
	}
	return last >= 0;
}

static bool is_smoothed(const struct picture *picture, const struct curve *c)
{
	return picture->half && (c->look == LOOK_RAW || c->look == LOOK_SMOOTH);
}

static struct pen curve_pen(const struct picture *picture, const struct curve *c)
{
	const bool faint = c->look == LOOK_RAW && is_smoothed(picture, c);
	return (struct pen){faint ? pale(c->colour) : c->colour, faint ? 1.2 : 2.2, c->dashed && !faint};
}

/* Draws a curve: as many points as show every extreme in each column of pixels. Returns whether it has a value that
 * cannot be shown, and marks those. */
static bool draw_curve(const struct picture *picture, const struct panel *p, const struct curve *c)
{
	const struct panel_axis *a = c->right ? &p->right : &p->left;
	if (c->look == LOOK_SMOOTH && !is_smoothed(picture, c))
		return false;
	const int columns = (int)(p->box.right - p->box.left);
	struct series all = run_series(c->run, c->name);
	if (c->look == LOOK_SMOOTH) {
		struct series smooth = series_smooth(&all, picture->half, a->axis.is_log);
		series_free(&all), all = smooth;
	}
	struct series s = series_thin(&all, picture->by_tokens, columns);
	const struct axis x = horizontal_axis(picture, &p->box);
	double *px = allocate(4 * (size_t)s.count * sizeof *px), *py = px + 2 * s.count;
	int n = 0;
	for (int i = 0; i < s.count; i++) {
		const double value = s.value[i] * a->factor;
		if (n && c->look == LOOK_STAIRS)
			px[n] = axis_at(&x, horizontal(picture, &s)[i]), py[n] = py[n - 1], n++;
		px[n] = axis_at(&x, horizontal(picture, &s)[i]);
		py[n++] = can_show(value) ? axis_at(&a->axis, value) : NAN;
	}
	const struct pen pen = curve_pen(picture, c);
	draw_line(picture->canvas, px, py, n, pen);
	for (int i = 0; i < n && c->look != LOOK_SMOOTH; i++) {
		const bool alone = (i == 0 || isnan(py[i - 1])) && (i == n - 1 || isnan(py[i + 1]));
		if (!isnan(py[i]) && (all.count <= 40 || alone))
			draw_shape(picture->canvas, DISC, px[i], py[i], all.count <= 40 ? 7 : 4, pen.colour, pen.colour);
	}
	const bool marked = c->look != LOOK_SMOOTH && mark_nonfinite(picture, &s, p);
	free(px);
	series_free(&s), series_free(&all);
	return marked;
}

/* -- marks of what was decided about bad batches -- */

static const struct { const char *kind, *name; uint32_t colour; enum shape shape; bool next, at_loss; } marks[] = {
	{"skip", "skipped", 0xd55e00, CROSS, true, true}, {"retry", "at a lower rate", 0x8a4fa8, TRIANGLE, false, true},
	{"drop", "dropped", 0x202020, SQUARE, true, false}, {"level_shift", "new level", 0x009e73, DIAMOND, false, true},
	{"rollback", "went back", 0xcc2277, WEDGE, false, false},
};
enum { NUM_MARKS = sizeof marks / sizeof *marks };

/* The horizontal place of the end of a step, which may be one that the run does not have. */
static double place_of_step(const struct picture *picture, const struct run *r, int64_t step)
{
	int low = 0, high = r->count; /* the first row of that step or a later one */
	while (low < high) {
		const int middle = (low + high) / 2;
		if (r->step[middle] < step)
			low = middle + 1;
		else
			high = middle;
	}
	return !picture->by_tokens ? step : r->tokens[low < r->count ? low : r->count - 1];
}

/* Draws the marks of a kind at the loss of the batch, or at the top of the panel where that is higher or not finite;
 * those that have no loss at the bottom. Returns whether there is one. */
static bool draw_marks(const struct picture *picture, const struct panel *p, int kind)
{
	const struct box *b = &p->box;
	const struct axis x = horizontal_axis(picture, b);
	bool any = false;
	for (int r = 0; r < picture->num_runs; r++) {
		const json_t *event;
		size_t i;
		json_array_foreach(picture->runs[r].events, i, event) {
			if (strcmp(json_string_value(json_object_get(event, "kind")), marks[kind].kind))
				continue;
			const json_t *number = json_object_get(event, "loss");
			const double loss = json_is_number(number) ? json_number_value(number) : NAN;
			const int64_t step = json_integer_value(json_object_get(event, "step")) + marks[kind].next;
			const double px = axis_at(&x, place_of_step(picture, &picture->runs[r], step));
			double py = !marks[kind].at_loss ? b->bottom : can_show(loss) ? axis_at(&p->left.axis, loss) : b->top;
			py = fmin(fmax(py, b->top + 7), b->bottom - 7);
			if (marks[kind].shape == WEDGE)
				draw_line(picture->canvas, (double[]){px, px}, (double[]){b->top, b->bottom}, 2,
						(struct pen){marks[kind].colour, 1.4, true});
			draw_shape(picture->canvas, marks[kind].shape, fmin(fmax(px, b->left + 5), b->right - 5), py, 12,
					marks[kind].colour, picture->num_runs > 1 ? colours[r] : 0xffffff);
			any = true;
		}
	}
	return any;
}

/* -- a panel -- */

/* One entry of a legend, which ends at pixel x; returns where it begins. shape: NUM_SHAPES for a line. */
static double draw_legend(struct canvas *c, double x, double y, const char *name, struct pen pen, enum shape shape)
{
	draw_text(c, x, y, name, TEXT_SIZE, 1, false, BLACK);
	x -= text_width(name, TEXT_SIZE) + 8;
	if (shape == NUM_SHAPES)
		draw_line(c, (double[]){x - 30, x}, (double[]){y, y}, 2, pen);
	else
		draw_shape(c, shape, x - 10, y, 11, pen.colour, pen.colour);
	return x - (shape == NUM_SHAPES ? 48 : 34);
}

/* Draws the frame, the axes and the heading of a panel. */
static void draw_panel_axes(const struct picture *picture, struct panel *p)
{
	const struct box *b = &p->box;
	const struct axis x = horizontal_axis(picture, b);
	const bool one = picture->num_runs == 1 && p->right.used;
	draw_axis(picture->canvas, &x, BELOW, b->bottom, b->top, picture->by_tokens ? "tokens" : "step", BLACK);
	draw_axis(picture->canvas, &p->left.axis, LEFT_OF, b->left, b->right, p->left.name, one ? colours[0] : BLACK);
	if (p->right.used)
		draw_axis(picture->canvas, &p->right.axis, RIGHT_OF, b->right, b->right, p->right.name,
				one ? colours[1] : BLACK);
}

/* Draws a panel with everything in it. */
static void draw_panel(const struct picture *picture, struct panel *p)
{
	const struct box *b = &p->box;
	struct canvas *c = picture->canvas;
	choose_axis(p, &p->left, false);
	choose_axis(p, &p->right, true);
	draw_panel_axes(picture, p);
	bool nonfinite = false;
	for (int pass = 0; pass < 2; pass++) /* the pale ones beneath */
		for (int i = 0; i < p->num_curves; i++)
			if ((p->curves[i].look == LOOK_RAW) == (pass == 0))
				nonfinite |= draw_curve(picture, p, &p->curves[i]);
	for (int r = 0; p->clips && r < picture->num_runs; r++)
		if (p->clips[r] > p->left.axis.lo && p->clips[r] < p->left.axis.hi) {
			const double y = floor(axis_at(&p->left.axis, p->clips[r])) + 0.5;
			draw_line(c, (double[]){b->left, b->right}, (double[]){y, y}, 2,
					(struct pen){picture->num_runs > 1 ? colours[r] : BLACK, 1, true});
		}
	double x = b->right;
	const double y = b->top - 18;
	draw_frame(c, *b);
	draw_text(c, b->left, y, p->heading, TEXT_SIZE, 0, false, BLACK);
	for (int i = NUM_MARKS - 1; p->has_marks && i >= 0; i--)
		if (draw_marks(picture, p, i))
			x = draw_legend(c, x, y, marks[i].name, (struct pen){.colour = marks[i].colour}, marks[i].shape);
	if (nonfinite)
		x = draw_legend(c, x, y, "not finite", (struct pen){.colour = RED}, DISC);
	for (int i = p->num_curves - 1; i >= 0; i--) {
		const struct curve *curve = &p->curves[i];
		if (curve->legend && (curve->look != LOOK_SMOOTH || is_smoothed(picture, curve)))
			x = draw_legend(c, x, y, curve->legend, curve_pen(picture, curve), NUM_SHAPES);
	}
}

/* Draws a panel in which each run has a series on the left axis and, unless it is NULL, one on the right. They are
 * smoothed where the look is LOOK_RAW. */
static void pair_panel(const struct picture *picture, struct panel *p, const char *left, const char *right,
		enum look left_look, enum look right_look)
{
	char dashed[64];
	snprintf(dashed, sizeof dashed, "%s (dashed)", p->right.name);
	if (picture->num_runs > 1)
		p->right.name = dashed;
	for (int side = 0; side < 2; side++)
		for (int r = 0; r < picture->num_runs; r++) {
			const enum look look = side ? right_look : left_look;
			struct curve c = {&picture->runs[r], side ? right : left, NULL,
					colours[picture->num_runs > 1 ? r : side], look, side, side};
			if (!c.name)
				continue;
			add_curve(p, c);
			c.look = LOOK_SMOOTH;
			if (look == LOOK_RAW)
				add_curve(p, c);
		}
	draw_panel(picture, p);
}

/* Training and validation loss. */
static void loss_panel(const struct picture *picture, struct box box)
{
	struct panel p = {.box = box, .has_marks = true,
			.left = {.name = "cross-entropy (nats per token)", .include = NAN, .factor = 1}};
	char smoothed[64], heading[128];
	const bool one = picture->num_runs == 1;
	snprintf(smoothed, sizeof smoothed, "mean of %d steps", 2 * picture->half + 1);
	snprintf(heading, sizeof heading, "Loss (thick: %s; dashed: validation)", smoothed);
	p.heading = one ? "Loss" : heading;
	for (int i = 0; i < picture->num_runs; i++) {
		const struct run *r = &picture->runs[i];
		struct curve c = {r, "loss", one ? "training" : NULL, colours[i], LOOK_RAW, false, false};
		add_curve(&p, c);
		c.legend = one ? smoothed : NULL, c.look = LOOK_SMOOTH;
		add_curve(&p, c);
		if (run_column(r, "valid_loss"))
			add_curve(&p, (struct curve){r, "valid_loss", one ? "validation" : NULL, colours[one ? 1 : i], LOOK_PLAIN,
					false, !one});
	}
	for (int i = 0, next = 2; one && i < picture->runs->num_columns; i++) { /* validation by named set */
		const char *name = picture->runs->columns[i].name;
		if (!strncmp(name, "valid.", 6) && next < MAX_PLOT_RUNS)
			add_curve(&p, (struct curve){picture->runs, name, name + 6, colours[next++], LOOK_PLAIN, false, false});
	}
	draw_panel(picture, &p);
}

static void schedule_panel(const struct picture *picture, struct box box)
{
	struct panel p = {.box = box, .heading = "Learning rate and global batch",
			.left = {.name = "learning rate", .from_zero = true, .headroom = 1.1, .include = NAN, .factor = 1},
			.right = {.name = "sequences", .from_zero = true, .headroom = 1.3, .min_step = 1, .include = NAN,
				.factor = 1}};
	pair_panel(picture, &p, "lr", "batch", LOOK_PLAIN, LOOK_STAIRS);
}

static void gradient_panel(const struct picture *picture, struct box box)
{
	struct panel p = {.box = box, .left = {.name = "L2 norm", .include = NAN, .factor = 1}};
	double clips[MAX_PLOT_RUNS] = {0};
	char heading[64] = "Gradient norm", clip[32];
	bool same = true;
	for (int r = 0; r < picture->num_runs; r++) {
		const json_t *config = json_at(picture->runs[r].config, "train.grad_clip");
		clips[r] = json_is_number(config) && json_number_value(config) > 0 ? json_number_value(config) : NAN;
		same &= clips[r] == clips[0];
	}
	p.clips = clips, p.left.include = clips[0];
	if (same) {
		snprintf(clip, sizeof clip, "%.4g", clips[0]);
		snprintf(heading, sizeof heading, "Gradient norm, clipped to %s", clip);
	}
	p.heading = heading;
	pair_panel(picture, &p, "grad_norm", NULL, LOOK_RAW, LOOK_RAW);
}

static void losses_panel(const struct picture *picture, struct box box)
{
	struct panel p = {.box = box, .heading = "Balance loss and z-loss, without their coefficients",
			.left = {.name = "balance loss", .include = NAN, .factor = 1},
			.right = {.name = "z-loss", .include = NAN, .factor = 1}};
	pair_panel(picture, &p, "balance_loss", "z_loss", LOOK_RAW, LOOK_RAW);
}

static void speed_panel(const struct picture *picture, struct box box)
{
	struct panel p = {.box = box, .heading = "Speed",
			.left = {.name = "tokens per second", .from_zero = true, .headroom = 1.1, .include = NAN, .factor = 1},
			.right = {.name = "% of peak", .from_zero = true, .headroom = 1.4, .include = NAN, .factor = 100}};
	pair_panel(picture, &p, "tokens_per_second", "peak_share", LOOK_RAW, LOOK_RAW);
}

/* A heat map of expert load, [layers, pixel columns]. A step fills all columns that it covers, and a column shows the
 * mean of all steps that fall into it. Red: not finite. White: no step. */
static void load_map(const struct picture *picture, struct box b)
{
	const struct run *r = picture->runs;
	const int layers = run_elements(r, "expert_load"), columns = (int)(b.right - b.left);
	const struct axis x = make_axis(picture->lo, picture->hi, 0, columns, 1, false);
	const size_t cells = (size_t)layers * columns;
	double *load = allocate(cells * sizeof *load), *count = allocate(cells * sizeof *count);
	for (int layer = 0; layer < layers; layer++) {
		char name[MAX_NAME];
		snprintf(name, sizeof name, "expert_load.%d", layer);
		double *mean = load + (size_t)(layers - 1 - layer) * columns, *number = count + (mean - load);
		const struct column *c = run_column(r, name);
		for (int i = 0; i < c->count; i++) {
			const int row = c->row[i];
			const double from = picture->by_tokens ? row ? r->tokens[row - 1] : 0 : r->step[row] - 0.5;
			const double to = picture->by_tokens ? r->tokens[row] : r->step[row] + 0.5;
			const int first = (int)fmin(axis_at(&x, from) + 0.5, columns - 1);
			const int end = (int)fmin(fmax(axis_at(&x, to) + 0.5, first + 1), columns);
			for (int k = first; k < end; k++)
				mean[k] += c->value[i], number[k]++;
		}
	}
	for (size_t i = 0; i < cells; i++)
		load[i] /= count[i]; /* without a step 0/0 = NaN; count tells it from other values that are not finite */

	/* With a few extreme cells all others would have nearly one colour: so the colours end at the 99th percentile. */
	double *sorted = allocate(cells * sizeof *sorted);
	memcpy(sorted, load, cells * sizeof *sorted);
	const int shown = sort_shown(sorted, (int)cells);
	const double hi = shown ? sorted[(int)(0.99 * (shown - 1))] : 2;
	const bool beyond = shown && sorted[shown - 1] > hi * 1.05;
	free(sorted);

	struct panel p = {.box = b, .left = {.name = "layer with experts"}};
	p.left.axis = make_axis(-0.5, layers - 0.5, b.bottom, b.top, 1, false);
	const struct axis scale = make_axis(1, fmax(hi, 1.1), b.bottom, b.top, 0, false);
	uint32_t *picture_cells = allocate(cells * sizeof *picture_cells);
	for (size_t i = 0; i < cells; i++)
		picture_cells[i] = count[i] == 0 ? 0xffffff : !can_show(load[i]) ? RED :
				heat_colour((load[i] - scale.lo) / (scale.hi - scale.lo));
	draw_panel_axes(picture, &p);
	draw_cells(picture->canvas, b, picture_cells, columns, layers);
	free(load), free(count), free(picture_cells);
	draw_frame(picture->canvas, b);

	enum { SHADES = 256 };
	const struct box bar = {b.right + 22, b.top, b.right + 42, b.bottom};
	uint32_t shades[SHADES];
	for (int i = 0; i < SHADES; i++)
		shades[i] = heat_colour(1 - i / (SHADES - 1.0));
	draw_cells(picture->canvas, bar, shades, 1, SHADES);
	draw_axis(picture->canvas, &scale, RIGHT_OF, bar.right, bar.right, "", BLACK);
	draw_frame(picture->canvas, bar);
	char heading[128];
	snprintf(heading, sizeof heading, "Expert load: largest expert's share over the mean share (1 = balanced%s)",
			beyond ? "; yellow: this much or more" : "");
	draw_text(picture->canvas, b.left, b.top - 18, heading, TEXT_SIZE, 0, false, BLACK);
}

static void load_panel(const struct picture *picture, struct box box)
{
	struct panel p = {.box = box, .heading = "Expert load: largest expert's share over the mean share (1 = balanced), "
			"largest of all layers", .left = {.name = "load", .include = NAN, .factor = 1}};
	if (picture->num_runs == 1)
		load_map(picture, box);
	else
		pair_panel(picture, &p, "expert_load", NULL, LOOK_RAW, LOOK_RAW);
}

/* -- the picture -- */

int plot_layout(struct box panels[NUM_PANELS], int num_runs, bool has_experts)
{
	/* a row: heading above, numbers and name of the axis below */
	enum { LEFT = 110, RIGHT = 1290, FIRST_RIGHT = 600, SECOND_LEFT = 800, ABOVE = 36, BELOW_ROW = 64 };
	static const int heights[] = {430, 210, 210, 270}; /* of the rows */
	double top = HEADER_TOP + HEADER_ROW * num_runs + ABOVE;
	memset(panels, 0, NUM_PANELS * sizeof *panels);
	for (int row = 0; row < (has_experts ? 4 : 3); row++) {
		const double bottom = top + heights[row];
		const struct box whole = {LEFT, top, RIGHT, bottom}, first = {LEFT, top, FIRST_RIGHT, bottom},
				second = {SECOND_LEFT, top, RIGHT, bottom};
		if (row == 0)
			panels[PANEL_LOSS] = whole;
		else if (row == 1)
			panels[PANEL_SCHEDULE] = first, panels[PANEL_GRADIENT] = second;
		else if (row == 2)
			panels[PANEL_LOSSES] = first, panels[PANEL_SPEED] = second;
		else
			panels[PANEL_LOAD] = whole;
		if (row == 2 && !has_experts)
			panels[PANEL_LOSSES] = (struct box){0}, panels[PANEL_SPEED] = whole;
		top = bottom + BELOW_ROW + ABOVE;
	}
	return (int)(top - ABOVE);
}

/* The end of a text that is no wider than `most`, with "..." in front where something is missing. The caller frees
 * it. */
static char *fitting_text(const char *s, double size, double most)
{
	char *out = allocate(strlen(s) + 4);
	strcpy(out, s);
	while (*s && text_width(out, size) > most) {
		do
			s++;
		while ((*s & 0xc0) == 0x80); /* within a character */
		sprintf(out, "...%s", s);
	}
	return out;
}

/* The name of the run, as a title, and how long it is; or those of the runs, with their colours. */
static void draw_header(const struct picture *picture, const struct box *panel)
{
	struct canvas *c = picture->canvas;
	const bool one = picture->num_runs == 1;
	for (int r = 0; r < picture->num_runs; r++) {
		const double y = HEADER_TOP + HEADER_ROW * r, size = one ? TITLE_SIZE : TEXT_SIZE;
		char title[PATH_LEN + 64], tokens[32];
		const struct run *run = &picture->runs[r];
		const double all = run->tokens[run->count - 1];
		format_number(tokens, all, all / 100, all);
		snprintf(title, sizeof title, "%s: %lld step%s, %s tokens", run->name, (long long)run->step[run->count - 1],
				run->step[run->count - 1] == 1 ? "" : "s", tokens);
		char *name = fitting_text(title, size, panel->right - panel->left - 60);
		if (!one)
			draw_line(c, (double[]){panel->left, panel->left + 40}, (double[]){y, y}, 2,
					(struct pen){colours[r], 3, false});
		draw_text(c, one ? PLOT_WIDTH / 2 : panel->left + 52, y, name, size, one ? 0.5 : 0, false, BLACK);
		free(name);
	}
}

int plot_runs(const struct run *runs, int n, bool by_tokens, const char *path)
{
	struct picture picture = {.runs = runs, .num_runs = n, .by_tokens = by_tokens, .lo = INFINITY, .hi = -INFINITY};
	bool has_experts = false;
	int rows = 0;
	for (int r = 0; r < n; r++) {
		const int last = runs[r].count - 1;
		picture.lo = fmin(picture.lo, by_tokens ? 0 : runs[r].step[0] - 0.5); /* step i covers i - 0.5 to i + 0.5 */
		picture.hi = fmax(picture.hi, by_tokens ? runs[r].tokens[last] : runs[r].step[last] + 0.5);
		has_experts |= run_elements(&runs[r], "expert_load") > 0;
		rows = runs[r].count > rows ? runs[r].count : rows;
	}
	picture.half = rows / 40;
	struct box panels[NUM_PANELS];
	const int height = plot_layout(panels, n, has_experts);
	picture.canvas = canvas_create(PLOT_WIDTH, height, has_suffix(path, ".svg"));
	draw_header(&picture, &panels[PANEL_LOSS]);
	static void (*const draw[NUM_PANELS])(const struct picture *picture, struct box box) = {
		loss_panel, schedule_panel, gradient_panel, losses_panel, speed_panel, load_panel,
	};
	for (int i = 0; i < NUM_PANELS; i++)
		if (panels[i].right > 0)
			draw[i](&picture, panels[i]);
	const int rc = canvas_write(picture.canvas, path);
	canvas_free(picture.canvas);
	return rc;
}

static const char *const x_names[] = {"steps", "tokens", NULL};
struct plot_options { const char *out; int x; };

static int run_plot(const struct command_line *line)
{
	const struct plot_options *o = line->options;
	const int n = line->num_words;
	char path[PATH_LEN];
	struct run runs[MAX_PLOT_RUNS];
	if (n > MAX_PLOT_RUNS) {
		set_error("%d runs: expected at most %d for one picture", n, MAX_PLOT_RUNS);
		return EXIT_WRONG_USE;
	}
	if (!o->out && n > 1) {
		set_error("several runs: expected --out FILE, a name for their picture");
		return EXIT_WRONG_USE;
	}
	if (!o->out && path_join(path, line->words[0], "metrics.png") < 0)
		return EXIT_WORK_FAILED;
	const char *out = o->out ? o->out : path;
	if (runs_check_output(line->words, n, out) < 0 || runs_open(runs, line->words, n) < 0)
		return EXIT_WORK_FAILED;
	int rc = 0;
	for (int r = 0; rc == 0 && r < n; r++)
		rc = run_needs_steps(&runs[r], "draw");
	if (rc == 0)
		rc = plot_runs(runs, n, o->x == 1, out);
	for (int r = 0; r < n; r++)
		run_free(&runs[r]);
	if (rc < 0)
		return EXIT_WORK_FAILED;
	printf("%s\n", out);
	return EXIT_DONE;
}

static const struct command_option options[] = {
	TEXT_OPTION(plot_options, out, "out", "FILE", "The picture: an SVG file if its name ends with .svg, else a PNG "
			"file (default: RUN_DIR/metrics.png; several runs need it)"),
	CHOICE_OPTION(plot_options, x, "x", "WHAT", x_names, "The horizontal axis: steps or tokens", .initial = "steps"),
};

const struct command plot_command = {
	.name = "plot", .usage = "RUN_DIR...", .min_words = 1, .max_words = ANY_NUMBER,
	.help = "Draw a run, or up to 8 in one picture: losses, with marks of what was done with spikes, learning rate, "
		"batch, gradient norm, auxiliary losses, speed, expert load.",
	.run = run_plot, COMMAND_OPTIONS(plot_options, options),
};
