/*
 * commands/plot_canvas.h - drawing: boxes, lines, figures, text and axes, as a PNG or an SVG file.
 *
 * Coordinates are in pixels, x from the left and y from the top; pixel x covers [x, x + 1). What lies outside of the
 * picture is not drawn. Colours are 0xRRGGBB. The same calls make the same file.
 */
#ifndef LING_COMMANDS_PLOT_CANVAS_H
#define LING_COMMANDS_PLOT_CANVAS_H

#include <stdbool.h>
#include <stdint.h>

#define BLACK 0x202020
#define RED 0xd81e2c
#define TEXT_SIZE 15.75          /* of most texts */

struct canvas;                   /* a picture */

/* A white picture. svg: it will be an SVG file, in which texts are texts; else a PNG file. */
struct canvas *canvas_create(int width, int height, bool svg);
/* Writes the picture as a new file; a device, a pipe or a link as path stays one. */
int canvas_write(struct canvas *c, const char *path);
void canvas_free(struct canvas *c);

struct box { double left, top, right, bottom; };
void fill_box(struct canvas *c, struct box box, uint32_t colour);
/* The outline of a box. */
void draw_frame(struct canvas *c, struct box box);
/* Fills the box with width x height cells; colours [height, width], row 0 at the top. */
void draw_cells(struct canvas *c, struct box box, const uint32_t *colours, int width, int height);

struct pen { uint32_t colour; double width; bool dashed; };
/* A line through n points. Where y is NaN there is a gap; a point between two gaps is a dot. */
void draw_line(struct canvas *c, const double *x, const double *y, int n, struct pen pen);
/* A small figure around a point, with an outline of one pixel. */
enum shape { DISC, CROSS, TRIANGLE, SQUARE, DIAMOND, WEDGE, NUM_SHAPES }; /* the wedge points down */
void draw_shape(struct canvas *c, enum shape shape, double x, double y, double size, uint32_t colour, uint32_t outline);

/* The width of a text in pixels. s is UTF-8. size: the height of a letter with all that reaches above and below. */
double text_width(const char *s, double size);
/* Draws s with the middle of its capitals at height y, and the part `align` of its width left of x: 0 begins at x, 0.5
 * is centred, 1 ends at x. upwards: turned by a quarter to the left; then x is the middle of its capitals, and `align`
 * the part below y. In a PNG file, what is not printable ASCII is a question mark. */
void draw_text(struct canvas *c, double x, double y, const char *s, double size, double align, bool upwards,
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
void draw_axis(struct canvas *c, const struct axis *a, enum side side, double at, double grid, const char *name,
		uint32_t colour);

/* A scale of colours from dark blue over green to yellow, even in brightness; t from 0 to 1. */
uint32_t heat_colour(double t);

#endif
