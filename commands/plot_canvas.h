/*
 * commands/plot_canvas.h - drawing: boxes, lines, text and axes on a picture in memory, and the picture as a PNG file.
 *
 * Coordinates are in pixels, x from the left and y from the top; pixel x covers [x, x + 1). What lies outside of the
 * picture is not drawn. Colours are 0xRRGGBB.
 */
#ifndef LING_COMMANDS_PLOT_CANVAS_H
#define LING_COMMANDS_PLOT_CANVAS_H


#include <stdbool.h>
#include <stdint.h>

enum { CANVAS_WIDTH = 1400, CANVAS_HEIGHT = 1500 };

#define BLACK 0x202020
#define RED 0xd81e2c

/* Pixels between two neighbouring points of a character, which is 5 x 9 points. */
#define TEXT_SCALE 1.75

/* A picture. Lines and text are drawn in two steps: stroke() covers pixels with ink, which has no colour yet, and
 * paint() gives all ink one colour. Where strokes cross, the ink does not add up, so a path of many strokes has no
 * dark joints. */
struct canvas {
	uint8_t *rgb;                 /* [CANVAS_HEIGHT, CANVAS_WIDTH, 3] */
	uint8_t *ink;                 /* [CANVAS_HEIGHT, CANVAS_WIDTH] 0 = none, 255 = the pixel is covered */
	int left, top, right, bottom; /* a box that holds all ink; right and bottom exclusive */
};

/* A white picture without ink. */
struct canvas canvas_create(void);
void canvas_free(struct canvas *c);
/* Writes the picture as a new file; a device, a pipe or a link as path stays one. */
int canvas_write_png(const struct canvas *c, const char *path);

/* v as an int from low to high; low for NaN. */
int clamp_int(double v, int low, int high);

/* Fills a box of whole pixels; right and bottom exclusive. */
void fill_box(struct canvas *c, int left, int top, int right, int bottom, uint32_t colour);
/* Puts ink on a line of this width, with round ends and smooth edges. A line of length 0 is a dot. */
void stroke(struct canvas *c, double x0, double y0, double x1, double y1, double width);
/* Mixes the colour into each pixel as far as ink covers it, and takes the ink away. */
void paint(struct canvas *c, uint32_t colour);
/* The outline of a box. */
void draw_frame(struct canvas *c, int left, int top, int right, int bottom);

/* The width of a text in pixels. s is UTF-8; what is not printable ASCII is drawn as a question mark. */
double text_width(const char *s, double scale);
/* Draws s with the middle of its capitals at height y, and the part `align` of its width left of x: 0 begins at x, 0.5
 * is centred, 1 ends at x. Upwards: turned by a quarter to the left; then x is the middle of its capitals, and `align`
 * the part below y. */
void draw_text(struct canvas *c, double x, double y, const char *s, double scale, double align, bool upwards,
		uint32_t colour);

/* Writes a number as people read it: 0.25, 12, 1.5k, 3e-4. step is the distance between neighbours on its axis, and
 * largest the axis's largest number: they decide digits and form, so that all numbers of an axis have one form. */
void format_number(char out[32], double v, double step, double largest);

struct axis {
	double lo, hi;                /* the values at its ends */
	double start, end;            /* the pixels of its ends; a vertical axis runs up: end < start */
	bool is_log;
	int num_ticks;
	double ticks[32];             /* values */
	double step;                  /* from one tick to the next; 0 if they are not evenly spaced */
};
enum side { BELOW, LEFT_OF, RIGHT_OF };

/* Whether v can be shown: not if it is not finite, or beyond what axes can be computed for. */
bool can_show(double v);
/* The pixel of a value. Values beyond an end are at that end. */
double axis_at(const struct axis *a, double v);
/* An axis with ticks at 1, 2 or 5 times a power of ten, at least min_step apart. A log axis needs lo > 1e-100. */
struct axis make_axis(double lo, double hi, double start, double end, double min_step, bool is_log);
/* Draws ticks, numbers and name of an axis which is at pixel `at` of the other direction, and its grid lines from
 * there to pixel `grid`. `side`: where the numbers are. */
void draw_axis(struct canvas *c, const struct axis *a, enum side side, int at, int grid, const char *name,
		uint32_t colour);

/* A scale of colours from dark blue over green to yellow, even in brightness; t from 0 to 1. */
uint32_t heat_colour(double t);

#endif
