/*
 * commands/grid.h - the file of `ling sweep`: which runs a grid has. docs/scaling.md describes the file.
 *
 * A grid has axes: the sizes, the tokens a parameter, each key under `grid`, the seeds. The runs are all combinations
 * of their values; axes of one list under `zip` go through their values together.
 */
#ifndef LING_COMMANDS_GRID_H
#define LING_COMMANDS_GRID_H

#include "commands/scaling_runs.h"
#include "files/base.h"
#include "files/config.h"

#include <jansson.h>
#include <stdint.h>
#include <stdio.h>

/* When a run is hopeless; margin 0: none ever is. */
struct hopeless_rule {
	double margin;               /* nats by which its validation loss is above the median of others, */
	double after;                /* once this share of its tokens is done, */
	int runs;                    /* and at least so many others have come as far */
};

struct grid_run {
	char *name;                  /* of its directory, by what varies */
	struct strings overrides;    /* key=value: what `ling train` gets behind the base config, but train.output_dir */
	json_t *config;              /* what comes of it: every key; train.output_dir is that of the base config */
	char *group;                 /* runs of the same sizes, tokens a parameter and length have the same text */
	char **values;               /* [grid->num_keys] its value of each key under `grid` */
	int64_t steps;               /* of the whole run */
	struct scaling_run row;      /* what a table of runs says of it before it has a loss; its texts are not used */
};

struct grid {
	char path[PATH_LEN];         /* the file */
	char config[PATH_LEN];       /* the base config */
	char output_dir[PATH_LEN];
	struct hopeless_rule hopeless;
	char **keys;                 /* [num_keys] those under `grid` */
	int num_keys;
	struct grid_run *runs;       /* [num_runs] those of least FLOPs first */
	int num_runs;
	size_t room;
};

/* Reads the file and makes its runs. Errors name the line of the file, or the run that cannot be. On error *g is
 * empty. */
int grid_read(struct grid *g, const char *path);
void grid_free(struct grid *g);
/* Prints every key of the file with its default and meaning. */
void grid_print_keys(FILE *out);

/* Another size of a run: the base config with another model, length, batch and learning rate, by the rules of `sizes`
 * and `scale_schedule`. */
struct grid_size {
	int width, layers;           /* hidden_size, num_hidden_layers */
	double tokens;               /* of the run; 0: as in the base config */
	int batch;                   /* train.batch; 0: as there */
	double learning_rate;        /* schedule.peak_lr; 0: as there */
};
/* Makes the config. base: the config that the YAML file `path` and these overrides make. */
int grid_resize(struct config *c, const char *path, int num_overrides, char *const *overrides,
		const struct config *base, const struct grid_size *size);

/* Makes the config of a run, as `ling train` would read it now. */
int grid_run_config(const struct grid *g, const struct grid_run *r, struct config *c);
/* The first key in which two configs differ, as every key in nested objects: the name of the key, or NULL when they are
 * those of one run. A key that one of them lacks, and keys that change nothing of what is learned (train.output_dir,
 * train.stop_at_step, eval.samples and others of samples, and the sections checkpoint, health, log and trace), do not
 * count. */
const char *grid_difference(const json_t *a, const json_t *b);

#endif
