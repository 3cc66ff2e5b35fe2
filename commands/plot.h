/*
 * commands/plot.h - `ling plot`: the metrics of runs as a picture.
 */
#ifndef LING_COMMANDS_PLOT_H
#define LING_COMMANDS_PLOT_H

#include "commands/command.h"
#include "commands/plot_canvas.h"
#include "commands/runs.h"

enum { MAX_PLOT_RUNS = 8, PLOT_WIDTH = 1400 }; /* pixels */

enum plot_panel {
	PANEL_LOSS,                  /* training and validation; marks of what was done with bad batches */
	PANEL_SCHEDULE,              /* learning rate; global batch */
	PANEL_GRADIENT,              /* norm before the clip, and where the clip is */
	PANEL_LOSSES,                /* balance loss; z-loss. Of a model with experts */
	PANEL_SPEED,                 /* tokens/s; share of the peak */
	PANEL_LOAD,                  /* of one run: a map of layers; of several: the largest of all layers */
	NUM_PANELS
};

/* Where the panels are; one that is not there has no width. Returns the height of the picture. */
int plot_layout(struct box panels[NUM_PANELS], int num_runs, bool has_experts);

/* Draws n runs as one picture, which is an SVG file when its name ends with .svg, else a PNG file. Each must have a
 * step. */
int plot_runs(const struct run *runs, int n, bool by_tokens, const char *path);

extern const struct command plot_command;

#endif
