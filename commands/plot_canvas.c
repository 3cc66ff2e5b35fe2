/*
 * commands/plot_canvas.c - drawing: boxes, lines, text and axes on a picture in memory, and the picture as a PNG file.
 * The only file of the program that uses libpng.
 */
#define _GNU_SOURCE
#include "commands/plot_canvas.h"

#include "files/base.h"

#include <math.h>
#include <png.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GREY 0x909090 /* frames and ticks */
#define GRID 0xe8e8e8

/* ============================================================================================================
 * Boxes and lines
 * ========================================================================================================== */

int clamp_int(double v, int low, int high)
{
	return v > low ? v < high ? (int)v : high : low;
}

struct canvas canvas_create(void)
{
	struct canvas c = {.rgb = allocate(CANVAS_WIDTH * CANVAS_HEIGHT * 3), .ink =
			allocate(CANVAS_WIDTH * CANVAS_HEIGHT), .left = CANVAS_WIDTH, .top = CANVAS_HEIGHT};
	memset(c.rgb, 255, CANVAS_WIDTH * CANVAS_HEIGHT * 3);
	return c;
}

void canvas_free(struct canvas *c)
{
	free(c->rgb);
	free(c->ink);
}

void fill_box(struct canvas *c, int left, int top, int right, int bottom, uint32_t colour)
{
	for (int y = clamp_int(top, 0, CANVAS_HEIGHT); y < clamp_int(bottom, 0, CANVAS_HEIGHT); y++)
		for (int x = clamp_int(left, 0, CANVAS_WIDTH); x < clamp_int(right, 0, CANVAS_WIDTH); x++)
			for (int i = 0; i < 3; i++)
				c->rgb[(y * CANVAS_WIDTH + x) * 3 + i] = colour >> (16 - 8 * i);
}

void stroke(struct canvas *c, double x0, double y0, double x1, double y1, double width)
{
	double dx = x1 - x0, dy = y1 - y0, length2 = dx * dx + dy * dy, reach = width / 2 + 1;
	int left = clamp_int(fmin(x0, x1) - reach, 0, CANVAS_WIDTH), right = clamp_int(fmax(x0, x1) + reach + 1, 0,
			CANVAS_WIDTH);
	int top = clamp_int(fmin(y0, y1) - reach, 0, CANVAS_HEIGHT);
	int bottom = clamp_int(fmax(y0, y1) + reach + 1, 0, CANVAS_HEIGHT);
	for (int y = top; y < bottom; y++)
		for (int x = left; x < right; x++) {
			double px = x + 0.5 - x0, py = y + 0.5 - y0;
			/* the nearest point of the line, from 0 to 1 */
			double t = length2 > 0 ? fmin(1, fmax(0, (px * dx + py * dy) / length2)) : 0;
			int ink = clamp_int(255 * (width / 2 + 0.5 - hypot(px - t * dx, py - t * dy)), 0, 255);
			uint8_t *at = &c->ink[y * CANVAS_WIDTH + x];
			*at = ink > *at ? ink : *at;
		}
	c->left = left < c->left ? left : c->left, c->right = right > c->right ? right : c->right;
	c->top = top < c->top ? top : c->top, c->bottom = bottom > c->bottom ? bottom : c->bottom;
}

void paint(struct canvas *c, uint32_t colour)
{
	for (int y = c->top; y < c->bottom; y++)
		for (int x = c->left; x < c->right; x++) {
			int ink = c->ink[y * CANVAS_WIDTH + x];
			for (int i = 0; ink && i < 3; i++) {
				uint8_t *at = &c->rgb[(y * CANVAS_WIDTH + x) * 3 + i];
				*at = (*at * (255 - ink) + (colour >> (16 - 8 * i) & 255) * ink + 127) / 255;
			}
			c->ink[y * CANVAS_WIDTH + x] = 0;
		}
	c->left = CANVAS_WIDTH, c->top = CANVAS_HEIGHT, c->right = c->bottom = 0;
}

/* ============================================================================================================
 * Text. A character is a set of points; a stroke joins each point with its neighbours, so that characters are smooth
 * at any size.
 * ========================================================================================================== */

/* Printable ASCII: six bands of 16 characters. A character is 5 points wide and 9 high, with a column between
 * characters; capitals take rows 0 to 6. */
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

/* Whether a character has a point there. */
static bool font_point(int ch, int column, int row)
{
	return column >= 0 && row < 9 && font[(ch - ' ') / 16 * 9 + row][(ch - ' ') % 16 * 6 + column] == '#';
}

/* The width of a character in columns, from *first, the first column that has a point, to the last; 2 for a character
 * without points. */
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

/* The next character of a UTF-8 string, which it moves on; '?' for one that the font does not have, 0 at the end. */
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
			for (int i = -1; i < 4; i++) { /* -1: a dot at the point itself */
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

/* ============================================================================================================
 * Axes and colours
 * ========================================================================================================== */

bool can_show(double v)
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

void draw_axis(struct canvas *c, const struct axis *a, enum side side, int at, int grid, const char *name,
		uint32_t colour)
{
	for (int i = 0; i < a->num_ticks; i++) {
		char number[32];
		int p = floor(fmin(axis_at(a, a->ticks[i]), fmax(a->start, a->end) - 1));
		format_number(number, a->ticks[i], a->step > 0 ? a->step : a->ticks[i], fmax(fabs(a->lo), fabs(a->hi)));
		if (side == BELOW) {
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
	if (side == BELOW)
		draw_text(c, middle, at + 49, name, TEXT_SCALE, 0.5, false, colour);
	else
		draw_text(c, at + (side == LEFT_OF ? -94 : 96), middle, name, TEXT_SCALE, 0.5, true, colour);
}

void draw_frame(struct canvas *c, int left, int top, int right, int bottom)
{
	fill_box(c, left, top, right, top + 1, GREY);
	fill_box(c, left, bottom, right, bottom + 1, GREY);
	fill_box(c, left, top, left + 1, bottom, GREY);
	fill_box(c, right, top, right + 1, bottom + 1, GREY);
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

/* ============================================================================================================
 * The file
 * ========================================================================================================== */

int canvas_write_png(const struct canvas *c, const char *path)
{
	struct new_file file;
	if (new_file_begin(&file, path) < 0)
		return -1;
	png_image image = {.version = PNG_IMAGE_VERSION, .format = PNG_FORMAT_RGB};
	image.width = CANVAS_WIDTH, image.height = CANVAS_HEIGHT;
	int rc = 0;
	if (!png_image_write_to_stdio(&image, file.stream, 0, c->rgb, 0, NULL) && !ferror(file.stream))
		rc = fail("%s: cannot write the picture: %s", path, image.message);
	return new_file_publish(&file, rc);
}
