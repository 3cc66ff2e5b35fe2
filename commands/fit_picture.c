/*
 * commands/fit_picture.c - panels with logarithmic axes: points, curves, and bands around curves.
 */
#define _GNU_SOURCE
#include "commands/fit_picture.h"

#include "commands/runs.h"
#include "files/base.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* pixels */
enum { WIDTH = 760, HEIGHT = 560, LEFT = 100, RIGHT = 30, TOP = 50, BOTTOM = 70, MARK = 10, LEGEND_ROW = 24 };

struct picture_set *picture_add(struct picture_panel *p, struct picture_set look, int room)
{
	if (p->num_sets == MAX_PICTURE_SETS)
		free(p->set[--p->num_sets].x);
	struct picture_set *set = &p->set[p->num_sets++];
	*set = look;
	set->count = 0;
	set->x = allocate(4 * (size_t)room * sizeof *set->x);
	set->y = set->x + room, set->low = set->y + room, set->high = set->low + room;
	return set;
}

void picture_point(struct picture_set *set, double x, double y, double low, double high)
{
	if (!(x > 0 && y > 0 && can_show(x) && can_show(y)))
		return;
	const int i = set->count++;
	set->x[i] = x, set->y[i] = y;
	set->low[i] = low > 0 && can_show(low) ? low : NAN;
	set->high[i] = high > 0 && can_show(high) ? high : NAN;
}

void picture_free(struct picture_panel *p)
{
	for (int i = 0; i < p->num_sets; i++)
		free(p->set[i].x);
	*p = (struct picture_panel){0};
}

int fit_picture_check(const char *out, char *const *inputs, int n)
{
	char *file = realpath(out, NULL); /* NULL: it is not there */
	int rc = runs_check_output(inputs, n, out);
	for (int i = 0; file && rc == 0 && i < n; i++) {
		char *input = realpath(inputs[i], NULL);
		if (input && !strcmp(input, file))
			rc = fail("%s: is what the runs are read from; expected another name for the picture", out);
		free(input);
	}
	free(file);
	return rc;
}

/* A logarithmic axis. Where it covers less than a factor of 20, its ticks are evenly spaced numbers. */
static struct axis log_axis(double lo, double hi, double start, double end)
{
	struct axis a = make_axis(lo, hi, start, end, 0, hi > 20 * lo);
	a.is_log = true;
	return a;
}

/* The range of all points; of the bands only as far as they are within a factor of the points, since they may be very
 * wide. */
static void ranges(const struct picture_panel *p, double x[2], double y[2])
{
	x[0] = y[0] = INFINITY, x[1] = y[1] = 0;
	for (int i = 0; i < p->num_sets; i++)
		for (int k = 0; k < p->set[i].count; k++) {
			x[0] = fmin(x[0], p->set[i].x[k]), x[1] = fmax(x[1], p->set[i].x[k]);
			y[0] = fmin(y[0], p->set[i].y[k]), y[1] = fmax(y[1], p->set[i].y[k]);
		}
	if (!(x[0] < INFINITY))
		x[0] = y[0] = 1, x[1] = y[1] = 10;
	const double wide = fmax(pow(y[1] / y[0], 0.3), p->wide ? p->wide : 1.3), least = y[0] / wide, most = y[1] * wide;
	for (int i = 0; i < p->num_sets; i++)
		for (int k = 0; k < p->set[i].count; k++) {
			y[0] = p->set[i].low[k] < y[0] ? fmax(p->set[i].low[k], least) : y[0];
			y[1] = p->set[i].high[k] > y[1] ? fmin(p->set[i].high[k], most) : y[1];
		}
	const double pad[2] = {pow(x[1] / x[0], 0.03) * 1.001, pow(y[1] / y[0], 0.06) * 1.001};
	x[0] /= pad[0], x[1] *= pad[0], y[0] /= pad[1], y[1] *= pad[1];
}

/* A colour nearer to white. */
static uint32_t pale(uint32_t colour)
{
	uint32_t out = 0;
	for (int shift = 16; shift >= 0; shift -= 8)
		out |= (uint32_t)lround(255 - 0.16 * (255 - (colour >> shift & 255))) << shift;
	return out;
}

/* Fills the band of a curve, a column of pixels after the other; its edges are straight between points. */
static void draw_band(struct canvas *c, const struct picture_set *s, const struct axis *x, const struct axis *y)
{
	for (int i = 0; i + 1 < s->count; i++) {
		const double from = axis_at(x, s->x[i]), to = axis_at(x, s->x[i + 1]);
		if (isnan(s->low[i] + s->low[i + 1]) || isnan(s->high[i] + s->high[i + 1]))
			continue;
		const double low[2] = {axis_at(y, s->low[i]), axis_at(y, s->low[i + 1])},
				high[2] = {axis_at(y, s->high[i]), axis_at(y, s->high[i + 1])};
		for (double at = floor(from); at < floor(to); at++) {
			const double part = fmin(fmax((at + 0.5 - from) / (to - from), 0), 1);
			fill_box(c, (struct box){at, high[0] + part * (high[1] - high[0]), at + 1,
					low[0] + part * (low[1] - low[0])}, pale(s->colour));
		}
	}
}

static void draw_curve(struct canvas *c, const struct picture_set *s, const struct axis *x, const struct axis *y)
{
	double *px = allocate(2 * (size_t)s->count * sizeof *px), *py = px + s->count;
	for (int i = 0; i < s->count; i++)
		px[i] = axis_at(x, s->x[i]), py[i] = axis_at(y, s->y[i]);
	draw_line(c, px, py, s->count, (struct pen){s->colour, 2.2, false});
	free(px);
}

static void draw_marks(struct canvas *c, const struct picture_set *s, const struct axis *x, const struct axis *y)
{
	for (int i = 0; i < s->count; i++)
		draw_shape(c, s->shape, axis_at(x, s->x[i]), axis_at(y, s->y[i]), s->shape == DIAMOND ? MARK + 4 : MARK,
				s->colour, 0xffffff);
}

/* The legend, in the corner at the top right, where a loss that falls has room. */
static void draw_legend(struct canvas *c, const struct picture_panel *p, const struct box *b)
{
	double y = b->top + 20;
	for (int i = 0; i < p->num_sets; i++) {
		const struct picture_set *s = &p->set[i];
		if (!*s->legend || !s->count)
			continue;
		const double x = b->right - 14 - text_width(s->legend, TEXT_SIZE);
		draw_text(c, x, y, s->legend, TEXT_SIZE, 0, false, BLACK);
		if (s->marks)
			draw_shape(c, s->shape, x - 18, y, MARK, s->colour, s->colour);
		else
			draw_line(c, (double[]){x - 34, x - 6}, (double[]){y, y}, 2, (struct pen){s->colour, 2.2, false});
		y += LEGEND_ROW;
	}
}

static void draw_panel(struct canvas *c, const struct picture_panel *p, struct box b)
{
	double range_x[2], range_y[2];
	ranges(p, range_x, range_y);
	const struct axis x = log_axis(range_x[0], range_x[1], b.left, b.right),
			y = log_axis(range_y[0], range_y[1], b.bottom, b.top);
	for (int i = 0; i < p->num_sets; i++)
		if (!p->set[i].marks)
			draw_band(c, &p->set[i], &x, &y);
	draw_axis(c, &x, BELOW, b.bottom, b.top, p->x_name, BLACK);
	draw_axis(c, &y, LEFT_OF, b.left, b.right, p->y_name, BLACK);
	for (int marks = 0; marks < 2; marks++)
		for (int i = 0; i < p->num_sets; i++)
			if (p->set[i].marks == marks)
				(marks ? draw_marks : draw_curve)(c, &p->set[i], &x, &y);
	draw_frame(c, b);
	draw_text(c, b.left, b.top - 20, p->heading, TEXT_SIZE, 0, false, BLACK);
	draw_legend(c, p, &b);
}

int fit_picture_write(const struct picture_panel *panels, int n, const char *path)
{
	const int columns = n > 1 ? 2 : 1, rows = (n + columns - 1) / columns;
	struct canvas *c = canvas_create(columns * WIDTH, rows * HEIGHT, has_suffix(path, ".svg"));
	for (int i = 0; i < n; i++) {
		const double left = i % columns * WIDTH, top = i / columns * HEIGHT;
		draw_panel(c, &panels[i], (struct box){left + LEFT, top + TOP, left + WIDTH - RIGHT, top + HEIGHT - BOTTOM});
	}
	const int rc = canvas_write(c, path);
	canvas_free(c);
	return rc;
}
