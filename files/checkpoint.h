/*
 * files/checkpoint.h - checkpoints: directories that appear whole or not at all, and the state of a run in them.
 */
#ifndef LING_FILES_CHECKPOINT_H
#define LING_FILES_CHECKPOINT_H

#include "files/base.h"
#include "files/config.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

/* -- checkpoints -- */

struct trainer_state {         /* what a run must remember besides weights and optimizer */
	int64_t step, samples, tokens; /* updates done, sequences and tokens consumed */
	int num_layers;              /* entries of the two arrays below */
	double *router_mean, *router_std; /* per layer, stochastic routing warmup; owned by the caller */
	int num_sources;             /* the token files of the blend, in the order of the config */
	struct source_state {
		int64_t tokens;            /* of the file, and its checksum: what it is known by */
		uint32_t crc32;
		int64_t share;             /* of the samples, out of 2^32 */
		int64_t credit;            /* its share of all samples so far less what it gave, in 2^-32 samples */
		int64_t taken;             /* samples that it gave */
		int order;                 /* of the shuffles: no two files have the same one */
	} sources[MAX_SOURCES];
};

/* OUTPUT_DIR/step-NNNNNNN/ appears whole or not at all, in three steps: one process begins, any number of them write its files, and, once
 * all have finished, one commits or, when any has failed, abandons it.
 * begin: makes the temporary directory and gives its path. Returns 1 when that checkpoint is there already: it is not replaced, and
 * there is nothing to do; 0, or -1. */
int checkpoint_begin(const struct config *c, const struct trainer_state *s, char dir[PATH_LEN]);
/* The path of part `part` (from 0) of `parts`: DIR/model.safetensors when parts is 1, else such as DIR/model-00001-of-00004.safetensors. Kind
 * "model" holds Hugging Face names, "optimizer" exp_avg.NAME and exp_avg_sq.NAME. Every tensor is in one part; a part may have none. */
void checkpoint_file(char path[PATH_LEN], const char *dir, const char *kind, int part, int parts);
/* commit: checks that all parts are there with sound headers and no tensor twice, adds config.json, trainer.json and, for several parts, the
 * two indexes, brings all to disk, renames the directory, and removes all but the `keep` newest checkpoints (0 = keep all). On error dir
 * is removed. */
int checkpoint_commit(const struct config *c, const struct trainer_state *s, const char *dir, int parts);
void checkpoint_abandon(const char *dir);
/* Finds the newest checkpoint of output_dir: 1 and its path, 0 when there is none, -1 on error; a newest one that is not
 * whole is an error. Removes temporaries. */
int checkpoint_find(const char *output_dir, char path[PATH_LEN]);
/* Reads trainer.json's state; num_layers must be set and must match. First compares the config that the run had with the one
 * asked for: a difference that would make the continued run another run (model shape, seed, data order) fails, naming the key
 * and both values; any other, and a key that only one of them has, is written as a line to `notes`. */
int checkpoint_read_state(const char *dir, const struct config *asked, struct trainer_state *s, FILE *notes);

#define MAX_PARTS 99999 /* what the five digits in their names can tell */

extern const char *const tensor_kinds[];

/* The name of file i of a checkpoint, trainer.json left out. Returns whether there is one. */
bool checkpoint_name(char name[64], int i, int parts);

int checkpoint_path(char out[PATH_LEN], const char *output_dir, const char *prefix, int64_t step);

/* Removes a directory of plain files, or a symbolic link and not what it points to. What cannot be removed stays, with
 * a warning: old files must not stop a run. Nothing happens when there is none. */
void directory_remove(const char *path);

/* Size of DIR/name and the checksum of what no other checksum covers: all of a file, but of safetensors the header. */
int file_seal(const char *dir, const char *name, int64_t *size, uint32_t *crc);

/* The checksum of trainer.json's content: of its compact text without the member crc32. */
uint32_t trainer_crc(json_t *root);

/* Checks the headers of a kind's files, brings them to disk and, where there are several, writes their index. */
int parts_finish(const char *dir, const char *kind, int parts);

/* Compares the checkpoint's other files with what trainer.json says of them. */
int files_check(const char *dir, const char *where, const json_t *root);

/* Checks trainer.json's format and its own checksum. */
int trainer_check(json_t *root, const char *path);

#endif
