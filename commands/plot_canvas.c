/*
 * commands/plot_canvas.c - drawing: boxes, lines, text and axes, as a PNG or an SVG file. The only file of the program
 * that uses cairo and libpng.
 */
#define _GNU_SOURCE
#include "commands/plot_canvas.h"

#include "files/base.h"

#include <cairo-svg.h>
#include <math.h>
#include <png.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GREY 0x909090 /* frames and ticks */
#define GRID 0xe8e8e8

struct canvas {
	int width, height;
	cairo_surface_t *surface;
	cairo_t *cairo;              /* draws on it; NULL once the SVG is complete */
	bool svg;
	struct text file;            /* an SVG file so far */
};

/* cairo has a piece of an SVG file. */
static cairo_status_t append_svg(void *file, const unsigned char *bytes, unsigned n)
{
	text_append(file, (const char *)bytes, n);
	return CAIRO_STATUS_SUCCESS;
}

static void set_colour(struct canvas *c, uint32_t colour)
{
	cairo_set_source_rgb(c->cairo, (colour >> 16) / 255.0, (colour >> 8 & 255) / 255.0, (colour & 255) / 255.0);
}

struct canvas *canvas_create(int width, int height, bool svg)
{
	struct canvas *c = allocate(sizeof *c);
	*c = (struct canvas){.width = width, .height = height, .svg = svg};
	if (svg) {
		c->surface = cairo_svg_surface_create_for_stream(append_svg, &c->file, width, height);
		cairo_svg_surface_set_document_unit(c->surface, CAIRO_SVG_UNIT_PX);
	} else
		c->surface = cairo_image_surface_create(CAIRO_FORMAT_RGB24, width, height);
	c->cairo = cairo_create(c->surface);
	cairo_font_options_t *options = cairo_font_options_create();
	cairo_font_options_set_hint_style(options, CAIRO_HINT_STYLE_NONE); /* no letter moves to whole pixels */
	cairo_font_options_set_hint_metrics(options, CAIRO_HINT_METRICS_OFF);
	cairo_set_font_options(c->cairo, options);
	cairo_font_options_destroy(options);
	/* A font within cairo: no other is needed, and fontconfig, which finds others, does not survive lack of memory. */
	cairo_select_font_face(c->cairo, "@cairo:medium", CAIRO_FONT_SLANT_NORMAL, CAIRO_FONT_WEIGHT_NORMAL);
	cairo_set_line_join(c->cairo, CAIRO_LINE_JOIN_ROUND);
	set_colour(c, 0xffffff);
	cairo_paint(c->cairo);
	return c;
}

void canvas_free(struct canvas *c)
{
	cairo_destroy(c->cairo);
	cairo_surface_destroy(c->surface);
	cairo_debug_reset_static_data(); /* its fonts */
	free(c->file.data);
	free(c);
}

/* Writes the pixels as a PNG file. */
static int write_png(struct canvas *c, FILE *f, const char *path)
{
	const size_t row = (size_t)c->width * 3;
	uint8_t *rgb = allocate(row * c->height);
	cairo_surface_flush(c->surface);
	for (int y = 0; y < c->height; y++) {
		const uint8_t *line = cairo_image_surface_get_data(c->surface) +
				(size_t)y * cairo_image_surface_get_stride(c->surface);
		for (size_t i = 0; i < row; i++) {
			uint32_t pixel;
			memcpy(&pixel, line + i / 3 * 4, sizeof pixel);
			rgb[y * row + i] = pixel >> (16 - 8 * (i % 3));
		}
	}
	png_image image = {.version = PNG_IMAGE_VERSION, .format = PNG_FORMAT_RGB};
	image.width = c->width, image.height = c->height;
	int rc = 0;
	if (!png_image_write_to_stdio(&image, f, 0, rgb, 0, NULL) && !ferror(f))
		rc = fail("%s: cannot write the picture: %s", path, image.message);
	free(rgb);
	return rc;
}

int canvas_write(struct canvas *c, const char *path)
{
	struct new_file file;
	cairo_status_t status = cairo_status(c->cairo);
	if (c->svg) {
		cairo_surface_finish(c->surface);
		status = status ? status : cairo_surface_status(c->surface);
	}
	if (status == CAIRO_STATUS_NO_MEMORY)
		out_of_memory(0);
	if (status)
		return fail("%s: cannot draw the picture: %s", path, cairo_status_to_string(status));
	if (new_file_begin(&file, path) < 0)
		return -1;
	int rc = 0;
	if (c->svg)
		fwrite(c->file.data, 1, c->file.size, file.stream);
	else
		rc = write_png(c, file.stream, path);
	return new_file_publish(&file, rc);
}

/* ============================================================================================================
 * Boxes, lines, figures, text
 * ========================================================================================================== */

static void box_path(struct canvas *c, struct box b)
{
	cairo_rectangle(c->cairo, b.left, b.top, b.right - b.left, b.bottom - b.top);
}

void fill_box(struct canvas *c, struct box box, uint32_t colour)
{
	box_path(c, box);
	set_colour(c, colour);
	cairo_fill(c->cairo);
}

/* Draws what the path is now. */
static void stroke_path(struct canvas *c, struct pen pen)
{
	cairo_set_dash(c->cairo, (const double[]){3.5 * pen.width, 2.5 * pen.width}, pen.dashed ? 2 : 0, 0);
	cairo_set_line_cap(c->cairo, pen.dashed ? CAIRO_LINE_CAP_BUTT : CAIRO_LINE_CAP_ROUND);
	cairo_set_line_width(c->cairo, pen.width);
	set_colour(c, pen.colour);
	cairo_stroke(c->cairo);
}

void draw_frame(struct canvas *c, struct box box)
{
	box_path(c, (struct box){box.left + 0.5, box.top + 0.5, box.right + 0.5, box.bottom + 0.5});
	stroke_path(c, (struct pen){GREY, 1, false});
}

void draw_cells(struct canvas *c, struct box box, const uint32_t *colours, int width, int height)
{
	/* An image of as many pixels as the box has: a viewer of SVG files would blur a smaller one. */
	const int columns = (int)(box.right - box.left), rows = (int)(box.bottom - box.top);
	cairo_surface_t *image = cairo_image_surface_create(CAIRO_FORMAT_RGB24, columns, rows);
	for (int y = 0; y < rows && !cairo_surface_status(image); y++) {
		uint8_t *line = cairo_image_surface_get_data(image) + (size_t)y * cairo_image_surface_get_stride(image);
		for (int x = 0; x < columns; x++)
			memcpy(line + 4 * x, colours + (size_t)(y * height / rows) * width + x * width / columns, 4);
	}
	cairo_surface_mark_dirty(image);
	cairo_set_source_surface(c->cairo, image, box.left, box.top);
	cairo_paint(c->cairo);
	cairo_surface_destroy(image);
}

void draw_line(struct canvas *c, const double *x, const double *y, int n, struct pen pen)
{
	for (int i = 0; i < n; i++) {
		if (isnan(y[i]))
			continue;
		const bool first = i == 0 || isnan(y[i - 1]), last = i == n - 1 || isnan(y[i + 1]);
		if (first)
			cairo_move_to(c->cairo, x[i], y[i]);
		if (!first || last)
			cairo_line_to(c->cairo, x[i], y[i]);
	}
	stroke_path(c, pen);
}

void draw_shape(struct canvas *c, enum shape shape, double x, double y, double size, uint32_t colour, uint32_t outline)
{
	/* in halves of the size */
	static const double cross[][2] = {{-1, -0.5}, {-0.5, -1}, {0, -0.5}, {0.5, -1}, {1, -0.5}, {0.5, 0}, {1, 0.5},
			{0.5, 1}, {0, 0.5}, {-0.5, 1}, {-1, 0.5}, {-0.5, 0}};
	static const double triangle[][2] = {{-1, 0.8}, {0, -1}, {1, 0.8}}, square[][2] = {{-0.85, -0.85}, {0.85, -0.85},
			{0.85, 0.85}, {-0.85, 0.85}};
	static const double diamond[][2] = {{0, -1.1}, {1.1, 0}, {0, 1.1}, {-1.1, 0}}, wedge[][2] = {{-1, -0.8}, {1, -0.8},
			{0, 1}};
	static const struct { const double (*at)[2]; int n; } corners[NUM_SHAPES] = {[CROSS] = {cross, 12},
			[TRIANGLE] = {triangle, 3}, [SQUARE] = {square, 4}, [DIAMOND] = {diamond, 4}, [WEDGE] = {wedge, 3}};
	if (shape == DISC)
		cairo_arc(c->cairo, x, y, size / 2, 0, 2 * acos(-1));
	for (int i = 0; i < corners[shape].n; i++)
		cairo_line_to(c->cairo, x + corners[shape].at[i][0] * size / 2, y + corners[shape].at[i][1] * size / 2);
	cairo_close_path(c->cairo);
	set_colour(c, colour);
	cairo_fill_preserve(c->cairo);
	stroke_path(c, (struct pen){outline, 1, false});
}

/* A copy that is UTF-8 without control characters. */
static char *clean_text(const char *s)
{
	struct text t = {0};
	text_append_utf8(&t, s, strlen(s));
	for (size_t i = 0; i < t.size; i++)
		if ((unsigned char)t.data[i] < ' ' || t.data[i] == 127)
			t.data[i] = '?';
	return t.data;
}

double text_width(struct canvas *c, const char *s, double size)
{
	cairo_text_extents_t e = {0};
	char *clean = clean_text(s);
	cairo_set_font_size(c->cairo, size);
	if (clean)
		cairo_text_extents(c->cairo, clean, &e);
	free(clean);
	return e.x_advance;
}

void draw_text(struct canvas *c, double x, double y, const char *s, double size, double align, bool upwards,
		uint32_t colour)
{
	const double width = text_width(c, s, size), below = 0.36 * size; /* half of the height of most letters */
	char *clean = clean_text(s);
	if (!clean)
		return;
	cairo_save(c->cairo);
	cairo_translate(c->cairo, x, y);
	cairo_rotate(c->cairo, upwards ? -acos(0) : 0);
	cairo_move_to(c->cairo, -align * width, below);
	set_colour(c, colour);
	cairo_show_text(c->cairo, clean);
	cairo_restore(c->cairo);
	cairo_new_path(c->cairo);
	free(clean);
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
		int digits = fmin(9, fmax(0, ceil(-log10(step / units[u].unit) - 1e-9)));
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

void draw_axis(struct canvas *c, const struct axis *a, enum side side, double at, double grid, const char *name,
		uint32_t colour)
{
	double widest = 0;
	for (int i = 0; i < a->num_ticks; i++) {
		char number[32];
		const double p = floor(fmin(axis_at(a, a->ticks[i]), fmax(a->start, a->end) - 1));
		format_number(number, a->ticks[i], a->step > 0 ? a->step : a->ticks[i], fmax(fabs(a->lo), fabs(a->hi)));
		widest = fmax(widest, text_width(c, number, TEXT_SIZE));
		if (side == BELOW) {
			fill_box(c, (struct box){p, grid, p + 1, at}, GRID);
			fill_box(c, (struct box){p, at, p + 1, at + 7}, GREY);
			draw_text(c, p + 0.5, at + 20, number, TEXT_SIZE, 0.5, false, BLACK);
		} else {
			const double out = side == LEFT_OF ? -6 : 7;
			fill_box(c, (struct box){fmin(at, grid), p, fmax(at, grid), p + 1}, GRID);
			fill_box(c, (struct box){fmin(at, at + out), p, fmax(at, at + out), p + 1}, GREY);
			draw_text(c, at + 2 * out, p + 0.5, number, TEXT_SIZE, side == LEFT_OF ? 1 : 0, false, colour);
		}
	}
	const double middle = (a->start + a->end) / 2, away = 30 + widest;
	if (side == BELOW)
		draw_text(c, middle, at + 44, name, TEXT_SIZE, 0.5, false, colour);
	else
		draw_text(c, side == LEFT_OF ? at - away : at + away, middle, name, TEXT_SIZE, 0.5, true, colour);
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
