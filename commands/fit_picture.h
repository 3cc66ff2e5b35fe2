/*
 * commands/fit_picture.h - panels with logarithmic axes: points, curves, and bands around curves.
 */
#ifndef LING_COMMANDS_FIT_PICTURE_H
#define LING_COMMANDS_FIT_PICTURE_H

#include "commands/plot_canvas.h"

#include <stdbool.h>
#include <stdint.h>

enum { MAX_PICTURE_SETS = 32 };

struct picture_set {           /* points, or a curve through them */
	char legend[64];             /* "": none */
	uint32_t colour;
	bool marks;                  /* points */
	enum shape shape;            /* of points */
	int count;
	double *x, *y, *low, *high;  /* [count] above 0; low, high: the band of a curve, NaN where it has none */
};
struct picture_panel {
	const char *heading, *x_name, *y_name; /* not copied */
	double wide;                 /* the y axis covers bands up to this factor beyond the points; 0: 1.3 */
	struct picture_set set[MAX_PICTURE_SETS];
	int num_sets;
};

/* Adds a set with the look of another, empty, with room for so many points. A panel that is full keeps its last one. */
struct picture_set *picture_add(struct picture_panel *p, struct picture_set look, int room);
/* Adds a point, unless x or y is not above 0 and finite. */
void picture_point(struct picture_set *set, double x, double y, double low, double high);
void picture_free(struct picture_panel *p);

/* Fails where `out` is one of the n inputs, or belongs to the training of one that is a run's directory. */
int fit_picture_check(const char *out, char *const *inputs, int n);
/* Draws n >= 1 panels, as an SVG file when the name ends with .svg, else as PNG. */
int fit_picture_write(const struct picture_panel *panels, int n, const char *path);

#endif
