/*
 * commands/plot.h - `ling plot`: the metrics of a run as a picture.
 */
#ifndef LING_COMMANDS_PLOT_H
#define LING_COMMANDS_PLOT_H

#include "commands/command.h"
#include "data.h"

/* Draws the metrics of RUN_DIR as a PNG file: training and validation loss, with the decisions about bad batches that
 * events.jsonl names, learning rate and batch size, and the expert load of each layer. A device, a pipe or a link as
 * png_path stays one. */
int plot_run(const char *run_dir, const char *png_path);

/* The left and the right edge of each panel, in pixels; the picture is CANVAS_WIDTH x CANVAS_HEIGHT. */
enum { PLOT_LEFT = 120, PLOT_RIGHT = 1280 };

/* A decision about a batch, or going back to a checkpoint. */
enum { PLOT_SKIP, PLOT_RETRY, PLOT_DROP, PLOT_LEVEL_SHIFT, PLOT_ROLLBACK, NUM_PLOT_MARKS };
struct plot_mark {
	int kind;
	int64_t step, batch;         /* the step that it was, or would have been; the number of the batch */
	double loss;                 /* NaN: none, or not finite */
};

/* Draws n > 0 steps as one picture with a title. */
int plot_metrics(const struct metrics *m, int n, const struct plot_mark *marks, int num_marks, const char *title,
		const char *png_path);

extern const struct command plot_command;

#endif
