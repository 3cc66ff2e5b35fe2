/*
 * commands/plot.h - `ling plot`: the metrics of a run as a picture.
 */
#ifndef LING_COMMANDS_PLOT_H
#define LING_COMMANDS_PLOT_H

#include "commands/command.h"
#include "data.h"

#include <png.h>
#include <stdbool.h>
#include <stdint.h>

/* Draws RUN_DIR's metrics as a PNG: training and validation loss, learning rate and batch size, expert load by layer. A
 * device, a pipe or a link as png_path stays one. */
int plot_run(const char *run_dir, const char *png_path);

enum { PLOT_WIDTH = 1400, PLOT_HEIGHT = 1500, PLOT_LEFT = 120, PLOT_RIGHT = 1280 }; /* panels: left to right */

#define BLACK 0x202020

#define RED 0xd81e2c

struct canvas {
	uint8_t *rgb;                 /* [PLOT_HEIGHT, PLOT_WIDTH, 3] */
	uint8_t *ink;                 /* [PLOT_HEIGHT, PLOT_WIDTH] laid by stroke(), 255 = covered; 0 once painted */
	int left, top, right, bottom; /* box of the ink; right and bottom exclusive */
};

double text_width(const char *s, double scale);

/* Writes s with the middle of its capitals at height y; align is the part of its width left of x. Upwards: turned a
 * quarter to the left, then x is its middle and align the part below y. */
void draw_text(struct canvas *c, double x, double y, const char *s, double scale, double align, bool upwards,
		uint32_t colour);

/* Writes a number as people read it: 0.25, 12, 1.5k, 3e-4. step is the distance between neighbours on its axis, largest
 * the axis's largest number; they choose digits and form, so that one axis keeps to one form. */
void format_number(char out[32], double v, double step, double largest);

struct axis {
	double lo, hi, start, end;    /* values at its ends, and their pixels; a vertical axis runs up: end < start */
	bool is_log;
	int num_ticks;
	double ticks[32], step;       /* step 0: they are not evenly spaced */
};

/* The pixel of a value; values outside lie on the ends. */
double axis_at(const struct axis *a, double v);

/* Makes an axis with ticks at 1, 2 or 5 times a power of ten, at least min_step apart; a log axis needs lo > 1e-100. */
struct axis make_axis(double lo, double hi, double start, double end, double min_step, bool is_log);

/* From dark blue over green to yellow, even in brightness; t from 0 to 1. */
uint32_t heat_colour(double t);

/* Draws n > 0 steps as one picture with a title. */
int plot_metrics(const struct metrics *m, int n, const char *title, const char *png_path);

extern const struct command plot_command;

#endif
