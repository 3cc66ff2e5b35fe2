/*
 * commands/plot.c - `ling plot`: the metrics of a run as a picture.
 */
#define _GNU_SOURCE
#include "commands/plot.h"

#include "files/base.h"
#include "data.h"

#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define GREY 0x909090
#define GRID 0xe8e8e8

#define TEXT_SCALE 1.75    /* pixels between two neighbouring points of a character; TITLE_SCALE the same */
#define TITLE_SCALE 2.6

static int clamp_int(double v, int lo, int hi)
{
	return v > lo ? v < hi ? (int)v : hi : lo; /* NaN gives lo */
}

/* Fills a box of whole pixels; right and bottom are exclusive. */
static void fill_box(struct canvas *c, int left, int top, int right, int bottom, uint32_t colour)
{
	for (int y = clamp_int(top, 0, PLOT_HEIGHT); y < clamp_int(bottom, 0, PLOT_HEIGHT); y++)
		for (int x = clamp_int(left, 0, PLOT_WIDTH); x < clamp_int(right, 0, PLOT_WIDTH); x++)
			for (int i = 0; i < 3; i++)
				c->rgb[(y * PLOT_WIDTH + x) * 3 + i] = colour >> (16 - 8 * i);
}

/* Lays the ink of a line with round ends, smooth at its edges; a line of no length is a dot. Where strokes cross, the
 * ink does not add up, so a path of many strokes has no dark joints. Pixel x covers the coordinates [x, x+1). */
static void stroke(struct canvas *c, double x0, double y0, double x1, double y1, double width)
{
	double dx = x1 - x0, dy = y1 - y0, length2 = dx * dx + dy * dy, reach = width / 2 + 1;
	int left = clamp_int(fmin(x0, x1) - reach, 0, PLOT_WIDTH), right = clamp_int(fmax(x0, x1) + reach + 1, 0, PLOT_WIDTH);
	int top = clamp_int(fmin(y0, y1) - reach, 0, PLOT_HEIGHT);
	int bottom = clamp_int(fmax(y0, y1) + reach + 1, 0, PLOT_HEIGHT);
	for (int y = top; y < bottom; y++)
		for (int x = left; x < right; x++) {
			double px = x + 0.5 - x0, py = y + 0.5 - y0;
			double t = length2 > 0 ? fmin(1, fmax(0, (px * dx + py * dy) / length2)) : 0; /* nearest point of the line */
			int ink = clamp_int(255 * (width / 2 + 0.5 - hypot(px - t * dx, py - t * dy)), 0, 255);
			uint8_t *at = &c->ink[y * PLOT_WIDTH + x];
			*at = ink > *at ? ink : *at;
		}
	c->left = left < c->left ? left : c->left, c->right = right > c->right ? right : c->right;
	c->top = top < c->top ? top : c->top, c->bottom = bottom > c->bottom ? bottom : c->bottom;
}

/* Colours the picture where there is ink, and takes the ink away. */
static void paint(struct canvas *c, uint32_t colour)
{
	for (int y = c->top; y < c->bottom; y++)
		for (int x = c->left; x < c->right; x++) {
			int ink = c->ink[y * PLOT_WIDTH + x];
			for (int i = 0; ink && i < 3; i++) {
				uint8_t *at = &c->rgb[(y * PLOT_WIDTH + x) * 3 + i];
				*at = (*at * (255 - ink) + (colour >> (16 - 8 * i) & 255) * ink + 127) / 255;
			}
			c->ink[y * PLOT_WIDTH + x] = 0;
		}
	c->left = PLOT_WIDTH, c->top = PLOT_HEIGHT, c->right = c->bottom = 0;
}

/* -- text: the font's points are read as a drawing, neighbours are joined by strokes, so it is smooth at any size -- */

/* Printable ASCII in six bands of 16 characters, each 5 points wide, one apart, 9 high; capitals stand on the 7th. */
static const char font[6 * 9][16 * 6 + 1] = {
	"      #     # #    # #    #   ##     ##   #      #    #                                      #  ",
	"      #     # #    # #   #### ##  # #  #  #     #      #            #                        #  ",
	"      #           ##### # #      #  #  #        #      #    # # #   #                       #   ",
	"      #            # #   ###    #    ##         #      #     ###  #####       ###           #   ",
	"      #           #####   # #  #    # # #       #      #    # # #   #                      #    ",
	"                   # #  ####  #  ## #  #        #      #            #                      #    ",
	"      #            # #    #      ##  ## #        #    #                  #          #     #     ",
	"                                                                         #                      ",
	"                                                                        #                       ",
	" ##    #     ##    ##      #  ####   ##   ####   ##    ##                                  ##   ",
	"#  #  ##    #  #  #  #    #   #     #  #     #  #  #  #  #                #         #     #  #  ",
	"#  #   #       #     #   #    ###   #       #   #  #  #  #               #    ####   #       #  ",
	"#  #   #      #    ##   #  #     #  ###     #    ##    ###  #      #    #             #     #   ",
	"#  #   #     #       #  #####    #  #  #   #    #  #     #               #    ####   #      #   ",
	"#  #   #    #     #  #     #  #  #  #  #   #    #  #  #  #                #         #           ",
	" ##   ###   ####   ##      #   ##    ##    #     ##    ##   #      #                        #   ",
	"                                                                   #                            ",
	"                                                                  #                             ",
	" ###    #   ####   ###  ####  ####  ####   ###  #   # ###      #  #   # #     #   # #   #  ###  ",
	"#   #  # #  #   # #   # #   # #     #     #   # #   #  #       #  #  #  #     ## ## ##  # #   # ",
	"# ### #   # #   # #     #   # #     #     #     #   #  #       #  # #   #     # # # # # # #   # ",
	"# # # #   # ####  #     #   # ###   ###   #  ## #####  #       #  ##    #     # # # # # # #   # ",
	"# ### ##### #   # #     #   # #     #     #   # #   #  #       #  # #   #     #   # #  ## #   # ",
	"#     #   # #   # #   # #   # #     #     #   # #   #  #    #  #  #  #  #     #   # #   # #   # ",
	" #### #   # ####   ###  ####  ####  #      ###  #   # ###    ##   #   # ####  #   # #   #  ###  ",
	"                                                                                                ",
	"                                                                                                ",
	"####   ###  ####   ###  ##### #   # #   # #   # #   # #   # ##### ##    #     ##      #         ",
	"#   # #   # #   # #   #   #   #   # #   # #   # #   # #   #     # #     #      #     # #        ",
	"#   # #   # #   # #       #   #   # #   # #   #  # #   # #     #  #      #     #    #   #       ",
	"####  #   # ####   ###    #   #   #  # #  # # #   #     #     #   #      #     #                ",
	"#     # # # # #       #   #   #   #  # #  # # #  # #    #    #    #       #    #                ",
	"#     #  #  #  #  #   #   #   #   #   #   # # # #   #   #   #     #       #    #                ",
	"#      ## # #   #  ###    #    ###    #    # #  #   #   #   ##### ##       #  ##                ",
	"                                                                                                ",
	"                                                                                          ##### ",
	"#           #              #          #         #     #      #    #     #                       ",
	" #          #              #         #          #                 #     #                       ",
	"       ##   ###    ##    ###   ##   ###    ###  ###   #      #    #  #  #     ## #  ###    ##   ",
	"         #  #  #  #  #  #  #  #  #   #    #  #  #  #  #      #    # #   #     # # # #  #  #  #  ",
	"       ###  #  #  #     #  #  ####   #    #  #  #  #  #      #    ##    #     # # # #  #  #  #  ",
	"      #  #  #  #  #  #  #  #  #      #    #  #  #  #  #      #    # #   #     # # # #  #  #  #  ",
	"       ###  ###    ##    ###   ###   #     ###  #  #  #      #    #  #   #    # # # #  #   ##   ",
	"                                             #               #                                  ",
	"                                           ##               #                                   ",
	"                         #                                          #   #     #                 ",
	"                         #                                         #    #      #                ",
	"###    ###  # #    ###  ###   #  #  #   # #   # #  #  #  #  ####   #    #      #                ",
	"#  #  #  #  ##    #      #    #  #  #   # #   # #  #  #  #     #  #     #       #    #  #       ",
	"#  #  #  #  #      ##    #    #  #   # #  # # #  ##   #  #   ##    #    #      #    # ##        ",
	"#  #  #  #  #        #   #    #  #   # #  # # # #  #  #  #  #      #    #      #                ",
	"###    ###  #     ###     #    ###    #    # #  #  #   ###  ####    #   #     #                 ",
	"#        #                                               #              #                       ",
	"#        #                                             ##               #                       ",
};

static bool font_point(int ch, int column, int row)
{
	return column >= 0 && row < 9 && font[(ch - ' ') / 16 * 9 + row][(ch - ' ') % 16 * 6 + column] == '#';
}

/* How many columns a character takes from its first inked one, *first, to its last; an empty one takes two. */
static int font_columns(int ch, int *first)
{
	int last = -1;
	*first = 0;
	for (int column = 4; column >= 0; column--)
		for (int row = 0; row < 9; row++)
			if (font_point(ch, column, row))
				*first = column, last = last < 0 ? column : last;
	return last < 0 ? 2 : last - *first + 1;
}

/* Takes the next character off a UTF-8 string; '?' stands for what the font lacks, 0 for the end. */
static int next_char(const char **s)
{
	unsigned char ch = **s;
	if (!ch)
		return 0;
	do
		(*s)++;
	while ((**s & 0xc0) == 0x80);
	return ch >= ' ' && ch <= '~' ? ch : '?';
}

double text_width(const char *s, double scale)
{
	int columns = 0, first;
	for (int ch; (ch = next_char(&s));)
		columns += font_columns(ch, &first) + 1;
	return columns > 0 ? (columns - 1) * scale : 0;
}

void draw_text(struct canvas *c, double x, double y, const char *s, double scale, double align, bool upwards,
		uint32_t colour)
{
	static const int neighbours[4][2] = {{1, 0}, {0, 1}, {1, 1}, {-1, 1}};
	double pen = 0.5 * scale - align * text_width(s, scale);
	for (int ch, first; (ch = next_char(&s));) {
		int columns = font_columns(ch, &first);
		for (int p = 0; p < 5 * 9; p++) {
			int col = p % 5, row = p / 5;
			if (!font_point(ch, col, row))
				continue;
			double along = pen + (col - first) * scale, down = (row - 3) * scale;
			for (int i = -1; i < 4; i++) { /* -1: the point itself */
				int dx = i < 0 ? 0 : neighbours[i][0], dy = i < 0 ? 0 : neighbours[i][1];
				bool corner = dx && dy && (font_point(ch, col + dx, row) || font_point(ch, col, row + dy));
				if (corner || !font_point(ch, col + dx, row + dy))
					continue;
				double along2 = along + dx * scale, down2 = down + dy * scale, width = 0.75 * scale + 0.3;
				if (upwards)
					stroke(c, x + down, y - along, x + down2, y - along2, width);
				else
					stroke(c, x + along, y + down, x + along2, y + down2, width);
			}
		}
		pen += (columns + 1) * scale;
	}
	paint(c, colour);
}

void format_number(char out[32], double v, double step, double largest)
{
	static const struct { double unit; const char *suffix; } units[] = {
		{1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}, {1, ""},
	};
	if (v == 0)
		strcpy(out, "0");
	else if (largest < 0.01 || largest >= 1e15) {
		int exponent = floor(log10(fabs(v)) + 1e-9);
		snprintf(out, 32, "%.3ge%d", v / pow(10, exponent), exponent);
	} else {
		int u = 4;
		while (largest >= 1e4 && u > 0 && fabs(v) >= units[u - 1].unit && step >= units[u - 1].unit / 101)
			u--;
		int digits = clamp_int(ceil(-log10(step / units[u].unit) - 1e-9), 0, 9);
		snprintf(out, 32, "%.*f", digits, v / units[u].unit);
		if (u < 4 && digits > 0) { /* 2.0k is 2k */
			char *end = out + strlen(out);
			while (end[-1] == '0')
				end--;
			*(end[-1] == '.' ? end - 1 : end) = 0;
		}
		strcat(out, units[u].suffix);
	}
}

/* -- axes -- */

/* Is v to be drawn? Not when it is not finite, or beyond what axes can be computed for. */
static bool can_show(double v)
{
	return fabs(v) < 1e100;
}

double axis_at(const struct axis *a, double v)
{
	double t = a->is_log ? log(v / a->lo) / log(a->hi / a->lo) : (v - a->lo) / (a->hi - a->lo);
	return a->start + fmin(1, fmax(0, t)) * (a->end - a->start);
}

struct axis make_axis(double lo, double hi, double start, double end, double min_step, bool is_log)
{
	if (!(hi > lo))
		hi = lo + fmax(1, fabs(lo) * 1e-9);
	struct axis a = {lo, hi, start, end, is_log, 0, {0}, 0};
	if (is_log) {
		int stride = ceil(log10(hi / lo) / 8);
		for (int e = floor(log10(lo)); e <= log10(hi); e += stride)
			for (int m = 0; m < (stride > 1 ? 1 : 3); m++) {
				double tick = pow(10, e) * (double[]){1, 2, 5}[m];
				if (tick >= lo && tick <= hi && a.num_ticks < 32)
					a.ticks[a.num_ticks++] = tick;
			}
		return a;
	}
	double step = (hi - lo) / fabs(end - start) * (end < start ? 42 : 110), power = pow(10, floor(log10(step)));
	double times = step / power;
	a.step = fmax(min_step, power * (times <= 1 ? 1 : times <= 2 ? 2 : times <= 5 ? 5 : 10));
	for (double i = ceil(lo / a.step - 1e-9); i * a.step <= hi + 1e-9 * a.step && a.num_ticks < 32; i++)
		a.ticks[a.num_ticks++] = i * a.step;
	return a;
}

enum side { BENEATH, LEFT_OF, RIGHT_OF };

/* Draws ticks, numbers and name of an axis at pixel `at` of the other direction, and its grid from there to `grid`. */
static void draw_axis(struct canvas *c, const struct axis *a, enum side side, int at, int grid, const char *name,
		uint32_t colour)
{
	for (int i = 0; i < a->num_ticks; i++) {
		char number[32];
		int p = floor(fmin(axis_at(a, a->ticks[i]), fmax(a->start, a->end) - 1));
		format_number(number, a->ticks[i], a->step > 0 ? a->step : a->ticks[i], fmax(fabs(a->lo), fabs(a->hi)));
		if (side == BENEATH) {
			fill_box(c, p, grid, p + 1, at, GRID);
			fill_box(c, p, at, p + 1, at + 7, GREY);
			draw_text(c, p + 0.5, at + 21, number, TEXT_SCALE, 0.5, false, BLACK);
		} else {
			int out = side == LEFT_OF ? -1 : 1;
			fill_box(c, at < grid ? at : grid, p, at < grid ? grid : at, p + 1, GRID);
			fill_box(c, side == LEFT_OF ? at - 6 : at, p, side == LEFT_OF ? at : at + 7, p + 1, GREY);
			draw_text(c, at + out * 13, p + 0.5, number, TEXT_SCALE, side == LEFT_OF ? 1 : 0, false, colour);
		}
	}
	double middle = (a->start + a->end) / 2;
	if (side == BENEATH)
		draw_text(c, middle, at + 49, name, TEXT_SCALE, 0.5, false, colour);
	else
		draw_text(c, at + (side == LEFT_OF ? -94 : 96), middle, name, TEXT_SCALE, 0.5, true, colour);
}

static void draw_frame(struct canvas *c, int left, int top, int right, int bottom)
{
	fill_box(c, left, top, right, top + 1, GREY);
	fill_box(c, left, bottom, right, bottom + 1, GREY);
	fill_box(c, left, top, left + 1, bottom, GREY);
	fill_box(c, right, top, right + 1, bottom + 1, GREY);
}

/* -- series -- */

struct series {
	const char *name;
	uint32_t colour;
	double width, dot;            /* of the line and, when not 0, of a dot at each value, in pixels */
	bool stairs;                  /* a value holds until the next */
	int count;
	const double *x, *y;
};

/* Draws a series; a value that cannot be shown leaves a gap. A stroke within what is inked of its pixel column already
 * is left out, so a million values cost little more than their extremes in each column. */
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

/* Marks, at the bottom of a panel, where a series cannot be shown. Says whether there was such a place. */
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

/* Writes a panel's heading above it and, at the right, a legend of the series that have a name. */
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

static int compare_double(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* Sorts the values that can be shown to the front of v and returns their number. */
static int sort_shown(double *v, int n)
{
	int shown = 0;
	for (int i = 0; i < n; i++)
		if (can_show(v[i]))
			v[shown++] = v[i];
	qsort(v, shown, sizeof *v, compare_double);
	return shown;
}

/* Smooths a series: first into at most 4000 blocks, then each the mean of a window centred on it, narrower towards the
 * ends so that it does not lag. A geometric mean needs positive values. x and y take 4000 values. Returns their number;
 * *window is the width in values, 1 = none. */
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

/* Training and validation loss. The axis is linear, unless a few losses dwarf the rest: then it is logarithmic. */
static void loss_panel(struct canvas *c, const struct series *train, const struct series *valid, const struct axis *x,
		const char *x_name, int top, int bottom)
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
	struct series s[] = {
		{"training", raw_only ? 0x1f5fa8 : 0x93bce4, raw_only ? 2.2 : 1.4, raw_only ? 6 : 0, false,
			train->count, train->x, train->y},
		{raw_only ? NULL : label, 0x1f5fa8, 2.4, 0, false, raw_only ? 0 : blocks, smooth_x, smooth_y},
		{valid->count ? "validation" : NULL, 0xe07a10, 2.2, valid->count < 200 ? 9 : 0, false,
			valid->count, valid->x, valid->y},
		{NULL, RED, 0, 10, false, 0, NULL, NULL},
	};
	draw_axis(c, &y, LEFT_OF, PLOT_LEFT, PLOT_RIGHT, is_log ? "cross-entropy (nats per token, log scale)"
			: "cross-entropy (nats per token)", BLACK);
	draw_axis(c, x, BENEATH, bottom, top, x_name, BLACK);
	for (int i = 0; i < 3; i++)
		draw_series(c, &s[i], x, &y);
	bool train_marked = mark_nonfinite(c, train, x, bottom), valid_marked = mark_nonfinite(c, valid, x, bottom);
	s[3].name = train_marked || valid_marked ? "non-finite" : NULL;
	draw_frame(c, PLOT_LEFT, top, PLOT_RIGHT, bottom);
	draw_heading(c, top, "Loss", s, 4);
}

/* An axis from 0 to a little over the largest value of a series. */
static struct axis axis_from_zero(const struct series *s, int top, int bottom, double room, double min_step)
{
	double hi = 0;
	for (int i = 0; i < s->count; i++)
		hi = can_show(s->y[i]) ? fmax(hi, s->y[i]) : hi;
	return make_axis(0, hi * room, bottom, top, min_step, false);
}

/* Learning rate and batch size, each with an axis in its colour; one ends higher, so that constants do not coincide. */
static void schedule_panel(struct canvas *c, const struct series *lr, const struct series *batch, const struct axis *x,
		int top, int bottom)
{
	struct axis left = axis_from_zero(lr, top, bottom, 1.1, 0), right = axis_from_zero(batch, top, bottom, 1.3, 1);
	struct series nonfinite = {"non-finite", RED, 0, 10, false, 0, NULL, NULL};
	draw_axis(c, &left, LEFT_OF, PLOT_LEFT, PLOT_RIGHT, "learning rate", lr->colour);
	draw_axis(c, &right, RIGHT_OF, PLOT_RIGHT, PLOT_RIGHT, "batch (sequences)", batch->colour);
	draw_axis(c, x, BENEATH, bottom, top, "step", BLACK);
	draw_series(c, batch, x, &right);
	draw_series(c, lr, x, &left);
	bool marked = mark_nonfinite(c, lr, x, bottom);
	draw_frame(c, PLOT_LEFT, top, PLOT_RIGHT, bottom);
	draw_heading(c, top, "Learning rate and global batch size", &nonfinite, marked);
}

uint32_t heat_colour(double t)
{
	static const uint8_t anchors[6][3] = {
		{68, 1, 84}, {65, 68, 135}, {42, 120, 142}, {34, 168, 132}, {122, 209, 81}, {253, 231, 37},
	};
	double at = 5 * fmin(1, fmax(0, t));
	int i = at < 4 ? at : 4;
	uint32_t colour = 0;
	for (int j = 0; j < 3; j++)
		colour = colour << 8 | (uint32_t)lround(anchors[i][j] + (at - i) * (anchors[i + 1][j] - anchors[i][j]));
	return colour;
}

/* Heat map of expert load, [layers, pixel columns]: a step fills all columns it covers, a column holds the mean of all
 * steps that fall into it. Red: not finite; white: no step. */
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
		load[i] /= count[i]; /* no step: 0/0, like a value that is not finite */

	/* A few extreme cells would leave one colour for all others: the colours end at the 99th percentile. */
	double *sorted = allocate(cells * sizeof *sorted);
	memcpy(sorted, load, cells * sizeof *sorted);
	int shown = sort_shown(sorted, cells);
	double hi = shown ? sorted[(int)(0.99 * (shown - 1))] : 2;
	bool beyond = shown && sorted[shown - 1] > hi * 1.05;
	free(sorted);

	struct axis y = make_axis(-0.5, layers - 0.5, bottom, top, 1, false);
	struct axis colours = make_axis(1, fmax(hi, 1.1), bottom, top, 0, false);
	draw_axis(c, &y, LEFT_OF, PLOT_LEFT, PLOT_LEFT, "MoE layer", BLACK);
	draw_axis(c, x, BENEATH, bottom, bottom, "step", BLACK);
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

static int write_png(const char *path, const uint8_t *rgb)
{
	struct new_file file;
	if (new_file_begin(&file, path) < 0)
		return -1;
	png_image image = {.version = PNG_IMAGE_VERSION, .format = PNG_FORMAT_RGB};
	image.width = PLOT_WIDTH, image.height = PLOT_HEIGHT;
	int rc = 0;
	if (!png_image_write_to_stdio(&image, file.stream, 0, rgb, 0, NULL))
		rc = fail("%s: cannot write the picture: %s", path, image.message);
	return new_file_publish(&file, rc);
}

int plot_metrics(const struct metrics *m, int n, const char *title, const char *png_path)
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
	struct axis x = make_axis(lo - 0.5, hi + 0.5, PLOT_LEFT, PLOT_RIGHT, 1, false); /* a step is one wide */
	double dot = n < 40 ? 6 : 0;
	struct series loss_series = {.count = n, .x = step, .y = loss};
	struct series valid_series = {.count = num_valid, .x = valid_step, .y = valid};
	struct series lr_series = {NULL, 0x14806a, 2.2, dot, false, n, step, lr};
	struct series batch_series = {NULL, 0x8a4fa8, 2.2, dot, true, n, step, batch};

	struct canvas c = {allocate(PLOT_WIDTH * PLOT_HEIGHT * 3), allocate(PLOT_WIDTH * PLOT_HEIGHT), 0, 0, 0, 0};
	memset(c.rgb, 255, PLOT_WIDTH * PLOT_HEIGHT * 3);
	paint(&c, BLACK); /* no ink yet: empties the ink's box */
	double scale = fmin(TITLE_SCALE, 1300 / text_width(title, 1));
	draw_text(&c, (PLOT_LEFT + PLOT_RIGHT) / 2, 34, title, scale, 0.5, false, BLACK);
	char total[32], x_name[64];
	format_number(total, tokens, tokens / 100, tokens);
	snprintf(x_name, sizeof x_name, "step (%s tokens in all)", total);
	int loss_bottom = layers ? 610 : 850, schedule_bottom = layers ? 970 : 1430;
	loss_panel(&c, &loss_series, &valid_series, &x, x_name, 105, loss_bottom);
	schedule_panel(&c, &lr_series, &batch_series, &x, loss_bottom + 110, schedule_bottom);
	if (layers)
		load_panel(&c, m, n, layers, &x, schedule_bottom + 110, 1430);
	int rc = write_png(png_path, c.rgb);
	free(block), free(c.rgb), free(c.ink);
	return rc;
}

int plot_run(const char *run_dir, const char *png_path)
{
	struct metrics *m;
	int n;
	if (metrics_read(run_dir, &m, &n) < 0)
		return -1;
	int rc;
	char *full = realpath(run_dir, NULL); /* "." has a name too */
	if (n == 0)
		rc = fail("%s/metrics.jsonl: no steps to draw; expected a line for each step; let `ling train` do its first step",
				run_dir);
	else {
		const char *name = file_name(full ? full : run_dir);
		rc = plot_metrics(m, n, *name ? name : run_dir, png_path);
	}
	free(full), free(m);
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
	.help = "Draw losses, learning rate, batch size and expert load of a run as a PNG.",
	.run = run_plot, COMMAND_OPTIONS(plot_options, options),
};
