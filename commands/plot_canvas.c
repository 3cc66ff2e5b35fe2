/*
 * commands/plot_canvas.c - drawing: boxes, lines, figures, text and axes, as a PNG or an SVG file. The only file of the
 * program that uses libpng.
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
#define DASH 3.5 /* a dash and the gap behind it, in widths of the line */
#define DASH_GAP 2.5
enum { TEXT_ROWS = 9 }; /* points of a letter's height */

/* Lines and letters are drawn as pixels in two steps: add_ink() covers pixels with ink, which has no colour yet, and
 * paint() gives all ink one colour. Where strokes cross, the ink does not add up, so a path of many strokes has no dark
 * joints. */
struct canvas {
	int width, height;
	bool is_svg;
	struct text svg;             /* the elements so far */
	uint8_t *rgb;                /* [height, width, 3]; NULL for SVG, and so is the next */
	uint8_t *ink;                /* [height, width] 0 = none, 255 = the pixel is covered */
	int left, top, right, bottom; /* a box that holds all ink; right and bottom exclusive */
};

struct canvas *canvas_create(int width, int height, bool svg)
{
	struct canvas *c = allocate(sizeof *c);
	const size_t pixels = (size_t)width * height;
	*c = (struct canvas){.width = width, .height = height, .is_svg = svg, .left = width, .top = height};
	if (!svg) {
		c->rgb = allocate(pixels * 3), c->ink = allocate(pixels);
		memset(c->rgb, 255, pixels * 3);
	}
	return c;
}

void canvas_free(struct canvas *c)
{
	free(c->svg.data), free(c->rgb), free(c->ink);
	free(c);
}

/* The smallest number of tenths of a pixel in which a place is written in an SVG file. */
static double tenths(double v)
{
	return round(v * 10) / 10 + 0.0; /* no -0 */
}

/* A PNG file in memory, of `size` bytes; NULL on error. rgb [height, width, 3]. The caller frees it. */
static void *make_png(const uint8_t *rgb, int width, int height, size_t *size)
{
	png_image image = {.version = PNG_IMAGE_VERSION, .format = PNG_FORMAT_RGB};
	image.width = width, image.height = height;
	*size = PNG_IMAGE_PNG_SIZE_MAX(image);
	void *out = malloc(*size);
	if (!out)
		out_of_memory(*size);
	if (!png_image_write_to_memory(&image, out, size, 0, rgb, 0, NULL)) {
		set_error("cannot make the picture: %s", image.message);
		free(out);
		return NULL;
	}
	return out;
}

int canvas_write(struct canvas *c, const char *path)
{
	struct new_file file;
	size_t size = 0;
	void *png = c->is_svg ? NULL : make_png(c->rgb, c->width, c->height, &size);
	if ((!c->is_svg && !png) || new_file_begin(&file, path) < 0) {
		free(png);
		return -1;
	}
	if (c->is_svg) {
		const int w = c->width, h = c->height;
		fprintf(file.stream, "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%d\" height=\"%d\" "
				"viewBox=\"0 0 %d %d\" font-family=\"DejaVu Sans, Verdana, Arial, sans-serif\" "
				"stroke-linecap=\"round\" stroke-linejoin=\"round\">\n"
				"<rect width=\"%d\" height=\"%d\" fill=\"#ffffff\"/>\n", w, h, w, h, w, h);
		fwrite(c->svg.data, 1, c->svg.size, file.stream);
		fputs("</svg>\n", file.stream);
	} else
		fwrite(png, 1, size, file.stream);
	free(png);
	return new_file_publish(&file, 0);
}

/* ============================================================================================================
 * Boxes, lines, figures
 * ========================================================================================================== */

/* v as an int from low to high; low for NaN. */
static int clamp_int(double v, int low, int high)
{
	return v > low ? v < high ? (int)v : high : low;
}

void fill_box(struct canvas *c, struct box b, uint32_t colour)
{
	if (c->is_svg) {
		text_printf(&c->svg, "<rect x=\"%g\" y=\"%g\" width=\"%g\" height=\"%g\" fill=\"#%06x\"/>\n", tenths(b.left),
				tenths(b.top), tenths(b.right - b.left), tenths(b.bottom - b.top), (unsigned)colour);
		return;
	}
	for (int y = clamp_int(b.top, 0, c->height); y < clamp_int(b.bottom, 0, c->height); y++)
		for (int x = clamp_int(b.left, 0, c->width); x < clamp_int(b.right, 0, c->width); x++)
			for (int i = 0; i < 3; i++)
				c->rgb[((size_t)y * c->width + x) * 3 + i] = colour >> (16 - 8 * i);
}

void draw_frame(struct canvas *c, struct box b)
{
	fill_box(c, (struct box){b.left, b.top, b.right, b.top + 1}, GREY);
	fill_box(c, (struct box){b.left, b.bottom, b.right, b.bottom + 1}, GREY);
	fill_box(c, (struct box){b.left, b.top, b.left + 1, b.bottom}, GREY);
	fill_box(c, (struct box){b.right, b.top, b.right + 1, b.bottom + 1}, GREY);
}

/* Puts ink on a line of this width, with round ends and smooth edges. A line of length 0 is a dot. */
static void add_ink(struct canvas *c, double x0, double y0, double x1, double y1, double width)
{
	double dx = x1 - x0, dy = y1 - y0, length2 = dx * dx + dy * dy, reach = width / 2 + 1;
	int left = clamp_int(fmin(x0, x1) - reach, 0, c->width), right = clamp_int(fmax(x0, x1) + reach + 1, 0, c->width);
	int top = clamp_int(fmin(y0, y1) - reach, 0, c->height);
	int bottom = clamp_int(fmax(y0, y1) + reach + 1, 0, c->height);
	for (int y = top; y < bottom; y++)
		for (int x = left; x < right; x++) {
			double px = x + 0.5 - x0, py = y + 0.5 - y0;
			/* the nearest point of the line, from 0 to 1 */
			double t = length2 > 0 ? fmin(1, fmax(0, (px * dx + py * dy) / length2)) : 0;
			int ink = clamp_int(255 * (width / 2 + 0.5 - hypot(px - t * dx, py - t * dy)), 0, 255);
			uint8_t *at = &c->ink[(size_t)y * c->width + x];
			*at = ink > *at ? ink : *at;
		}
	c->left = left < c->left ? left : c->left, c->right = right > c->right ? right : c->right;
	c->top = top < c->top ? top : c->top, c->bottom = bottom > c->bottom ? bottom : c->bottom;
}

/* Mixes the colour into each pixel as far as ink covers it, and takes the ink away. */
static void paint(struct canvas *c, uint32_t colour)
{
	for (int y = c->top; y < c->bottom; y++)
		for (int x = c->left; x < c->right; x++) {
			const size_t place = (size_t)y * c->width + x;
			const int ink = c->ink[place];
			for (int i = 0; ink && i < 3; i++) {
				uint8_t *at = &c->rgb[place * 3 + i];
				*at = (*at * (255 - ink) + (colour >> (16 - 8 * i) & 255) * ink + 127) / 255;
			}
			c->ink[place] = 0;
		}
	c->left = c->width, c->top = c->height, c->right = c->bottom = 0;
}

/* Puts ink on the dashes of a line; *along: how much of the path is behind, in pixels. */
static void add_dashes(struct canvas *c, double x0, double y0, double x1, double y1, double width, double *along)
{
	const double length = hypot(x1 - x0, y1 - y0), dash = DASH * width, period = dash + DASH_GAP * width;
	for (double at = 0; at < length;) {
		const double phase = fmod(*along + at, period), end = fmin(length, at + fmax(0.01, (phase < dash ? dash :
				period) - phase));
		if (phase < dash) {
			const double dx = (x1 - x0) / length, dy = (y1 - y0) / length;
			add_ink(c, x0 + at * dx, y0 + at * dy, x0 + end * dx, y0 + end * dy, width);
		}
		at = end;
	}
	*along += length;
}

void draw_line(struct canvas *c, const double *x, const double *y, int n, struct pen pen)
{
	double along = 0;
	if (c->is_svg)
		text_printf(&c->svg, "<path d=\"");
	for (int i = 0; i < n; i++) {
		if (isnan(y[i]))
			continue;
		const bool first = i == 0 || isnan(y[i - 1]), alone = first && (i == n - 1 || isnan(y[i + 1]));
		if (c->is_svg)
			text_printf(&c->svg, "%c%g %g%s", first ? 'M' : 'L', tenths(x[i]), tenths(y[i]), alone ? "h0" : "");
		else if (alone)
			add_ink(c, x[i], y[i], x[i], y[i], pen.width);
		else if (!first && pen.dashed)
			add_dashes(c, x[i - 1], y[i - 1], x[i], y[i], pen.width, &along);
		else if (!first)
			add_ink(c, x[i - 1], y[i - 1], x[i], y[i], pen.width);
	}
	if (!c->is_svg)
		paint(c, pen.colour);
	else if (pen.dashed)
		text_printf(&c->svg, "\" fill=\"none\" stroke=\"#%06x\" stroke-width=\"%g\" stroke-dasharray=\"%g %g\"/>\n",
				(unsigned)pen.colour, pen.width, DASH * pen.width, DASH_GAP * pen.width);
	else
		text_printf(&c->svg, "\" fill=\"none\" stroke=\"#%06x\" stroke-width=\"%g\"/>\n", (unsigned)pen.colour,
				pen.width);
}

void draw_shape(struct canvas *c, enum shape shape, double x, double y, double size, uint32_t colour, uint32_t outline)
{
	/* Lines between these points, from -1 to 1, so wide that they cover the inside, too. NaN begins another line. */
	static const struct { int n; double x[6], y[6]; } lines[NUM_SHAPES] = {
		[DISC] = {1, {0}, {0}}, [CROSS] = {5, {-1, 1, 0, -1, 1}, {-1, 1, NAN, 1, -1}},
		[TRIANGLE] = {4, {-1, 0, 1, -1}, {0.8, -1, 0.8, 0.8}}, [SQUARE] = {5, {-0.8, 0.8, 0.8, -0.8, -0.8},
			{-0.8, -0.8, 0.8, 0.8, -0.8}}, [DIAMOND] = {5, {0, 1, 0, -1, 0}, {-1, 0, 1, 0, -1}},
		[WEDGE] = {4, {-1, 0, 1, -1}, {-0.8, 1, -0.8, -0.8}},
	};
	const double width = size * (shape == DISC ? 1 : shape == CROSS ? 0.33 : 0.45), reach = (size - width) / 2;
	double px[6], py[6];
	for (int i = 0; i < lines[shape].n; i++)
		px[i] = x + reach * lines[shape].x[i], py[i] = y + reach * lines[shape].y[i];
	draw_line(c, px, py, lines[shape].n, (struct pen){outline, width + 2, false});
	draw_line(c, px, py, lines[shape].n, (struct pen){colour, width, false});
}

/* Appends bytes in base64. */
static void add_base64(struct text *out, const uint8_t *bytes, size_t n)
{
	static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	for (size_t i = 0; i < n; i += 3) {
		uint32_t three = 0;
		char four[4];
		for (size_t k = 0; k < 3; k++)
			three = three << 8 | (i + k < n ? bytes[i + k] : 0);
		for (size_t k = 0; k < 4; k++)
			four[k] = i + k > n ? '=' : digits[three >> (18 - 6 * k) & 63];
		text_append(out, four, 4);
	}
}

void draw_cells(struct canvas *c, struct box b, const uint32_t *colours, int width, int height)
{
	if (!c->is_svg) {
		for (int i = 0; i < width * height; i++)
			fill_box(c, (struct box){round(b.left + i % width * (b.right - b.left) / width),
					round(b.top + i / width * (b.bottom - b.top) / height),
					round(b.left + (i % width + 1) * (b.right - b.left) / width),
					round(b.top + (i / width + 1) * (b.bottom - b.top) / height)}, colours[i]);
		return;
	}
	/* As many pixels as the box has: some programs would blur a smaller image. */
	const int columns = (int)(b.right - b.left), rows = (int)(b.bottom - b.top);
	uint8_t *rgb = allocate((size_t)columns * rows * 3);
	for (int i = 0; i < columns * rows * 3; i++)
		rgb[i] = colours[i / 3 / columns * height / rows * width + i / 3 % columns * width / columns] >>
				(16 - 8 * (i % 3));
	size_t size;
	uint8_t *png = make_png(rgb, columns, rows, &size);
	text_printf(&c->svg, "<image x=\"%g\" y=\"%g\" width=\"%d\" height=\"%d\" style=\"image-rendering: pixelated\" "
			"href=\"data:image/png;base64,", tenths(b.left), tenths(b.top), columns, rows);
	if (png)
		add_base64(&c->svg, png, size);
	text_printf(&c->svg, "\"/>\n");
	free(rgb), free(png);
}

/* ============================================================================================================
 * Text. A character is a set of points; a stroke joins each point with its neighbours, so that characters are smooth
 * at any size.
 * ========================================================================================================== */

/* Printable ASCII: six bands of 16 characters. A character is 5 points wide and 9 high, with a column between
 * characters; capitals take rows 0 to 6. */
static const char font[6 * TEXT_ROWS][16 * 6 + 1] = {
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
	ch -= ' ';
	return column >= 0 && row < TEXT_ROWS && font[ch / 16 * TEXT_ROWS + row][ch % 16 * 6 + column] == '#';
}

/* The width of a character in columns, from *first, the first column that has a point, to the last; 2 for a character
 * without points. */
static int font_columns(int ch, int *first)
{
	int last = -1;
	*first = 0;
	for (int column = 4; column >= 0; column--)
		for (int row = 0; row < TEXT_ROWS; row++)
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

double text_width(const char *s, double size)
{
	int columns = 0, first;
	for (int ch; (ch = next_char(&s));)
		columns += font_columns(ch, &first) + 1;
	return columns > 0 ? (columns - 1) * size / TEXT_ROWS : 0;
}

/* Appends a text as an SVG element, whose letters are those of the program that shows it. */
static void add_svg_text(struct canvas *c, double x, double y, const char *s, double size, double align, bool upwards,
		uint32_t colour)
{
	struct text clean = {0};
	text_append_utf8(&clean, s, strlen(s));
	text_printf(&c->svg, "<text transform=\"translate(%g %g)%s\" y=\"0.35em\" font-size=\"%g\" text-anchor=\"%s\" "
			"fill=\"#%06x\">", tenths(x), tenths(y), upwards ? " rotate(-90)" : "", tenths(size * 0.9),
			align < 0.25 ? "start" : align < 0.75 ? "middle" : "end", (unsigned)colour);
	for (size_t i = 0; i < clean.size; i++) {
		const char ch = clean.data[i];
		const char *name = ch == '&' ? "&amp;" : ch == '<' ? "&lt;" : ch == '>' ? "&gt;" : NULL;
		if (name)
			text_append_string(&c->svg, name);
		else
			text_append(&c->svg, (ch >= 0 && ch < ' ') || ch == 127 ? "?" : &ch, 1);
	}
	text_append_string(&c->svg, "</text>\n");
	free(clean.data);
}

void draw_text(struct canvas *c, double x, double y, const char *s, double size, double align, bool upwards,
		uint32_t colour)
{
	static const int neighbours[4][2] = {{1, 0}, {0, 1}, {1, 1}, {-1, 1}};
	const double scale = size / TEXT_ROWS;
	double pen = 0.5 * scale - align * text_width(s, size);
	if (c->is_svg) {
		add_svg_text(c, x, y, s, size, align, upwards, colour);
		return;
	}
	for (int ch, first; (ch = next_char(&s));) {
		int columns = font_columns(ch, &first);
		for (int p = 0; p < 5 * TEXT_ROWS; p++) {
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
					add_ink(c, x + down, y - along, x + down2, y - along2, width);
				else
					add_ink(c, x + along, y + down, x + along2, y + down2, width);
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
		widest = fmax(widest, text_width(number, TEXT_SIZE));
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
