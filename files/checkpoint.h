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

/* What a Hugging Face directory has beside the weights: files of the tokenizer, of generation, of the model's classes.
 * They go along into each checkpoint of a run that starts from its weights. */
struct model_files {
	json_t *config;              /* config.json, whose keys that are not the model's go along; NULL: none */
	const json_t *gguf_name;     /* the name of a model from a GGUF file, which has no config.json; or NULL */
	struct model_file { char *name; char *data; size_t size; } *list;
	int count;
	size_t capacity;
};
/* Reads them all. *f is new; model_files_free may follow in any case. */
int model_files_read(struct model_files *f, const char *dir);
/* Where `name`, data.tokenizer, and the tokenizer in the directory `dir` of init_from are two, it warns, for the user
 * may have added tokens, and forgets the files of the latter. */
void model_files_compare_tokenizer(struct model_files *f, const char *name, const char *dir);
void model_files_free(struct model_files *f);
/* Whether a file is one of them, by its name. */
bool is_model_file(const char *name);

/* What a run must remember besides weights and optimizer. */
struct trainer_state {
	const struct model_files *files; /* go along into each checkpoint; NULL: none */
	int64_t step, samples, tokens; /* updates done, sequences and tokens that they were of */
	int64_t batches;           /* drawn, with those that were skipped */
	json_t *spikes;            /* the detector of spikes and the samples that wait, see training/spikes.h; or NULL */
	json_t *local;             /* what local SGD must remember, see training/local_sgd.h; or NULL */
	int num_layers;            /* entries of the two arrays below */
	double *router_mean, *router_std; /* per layer, of stochastic routing warmup; owned by the caller */
	int num_sources;           /* the token files of the blend, in the order of the config */
	struct source_state {
		int64_t tokens;          /* of the file, and its checksum: the file is known by the two */
		uint32_t crc32;
		int64_t share;           /* of the samples, out of 2^32 */
		int64_t credit;          /* its share of all samples so far less what it gave, in 2^-32 samples */
		int64_t taken;           /* samples that it gave, with those of skipped batches */
		int64_t packed_windows;  /* the windows of an epoch where its documents are packed; else 0 */
		int order;               /* number of its shuffle: no two files have the same one */
	} sources[MAX_SOURCES];
};

/* ---------------------------------------------------------------------------------------------------- writing
 * OUTPUT_DIR/step-NNNNNNN/ appears whole or not at all, in three steps: one process begins, any number of them write
 * its files, and, once all have finished, one commits or, when any has failed, abandons it.
 */

/* Creates the temporary directory and gives its path. Returns 1 when that checkpoint is there already: it is not
 * replaced, and there is nothing to do; 0, or -1. */
int checkpoint_begin(const struct config *c, const struct trainer_state *s, char dir[PATH_LEN]);

/* The path of shard `shard` (from 0) of `num_shards`: DIR/model.safetensors when there is one, else such as
 * DIR/model-00001-of-00004.safetensors. The stem is "model", with Hugging Face's names, or "optimizer", with
 * exp_avg.NAME and exp_avg_sq.NAME. Every tensor is in one shard; a shard may be empty. */
void shard_path(char path[PATH_LEN], const char *dir, const char *stem, int shard, int num_shards);
#define MAX_SHARDS 99999 /* five digits */

/* Checks that all shards are there with sound headers and no tensor twice, adds config.json, trainer.json and, for
 * several shards, the two indexes, brings all to disk, renames the directory, and removes all but the
 * c->checkpoint.keep newest checkpoints (0: none) and those of every c->checkpoint.keep_every-th step. On error dir is
 * removed. */
int checkpoint_commit(const struct config *c, const struct trainer_state *s, const char *dir, int num_shards);

/* The same in two parts, so that training can go on before the second one: what trainer.json says of the state, which
 * the caller owns, or NULL; and all else, which takes the JSON over. `files` may be NULL. */
json_t *trainer_to_json(const struct config *c, const struct trainer_state *s, int num_shards);
int checkpoint_publish(const struct config *c, const struct model_files *files, json_t *trainer, const char *dir);

/* Fails when output_dir's disk has no room for a checkpoint whose files of tensors take so many bytes; the message has
 * what is needed and what is free. Creates output_dir. `files` may be NULL. */
int checkpoint_room(const char *output_dir, const struct model_files *files, double bytes);

/* Removes the temporary directory. */
void checkpoint_abandon(const char *dir);

/* Checks the headers of all shards with that stem, brings them to disk and, where there are several, writes their
 * index. */
int shards_finish(const char *dir, const char *stem, int num_shards);

/* ---------------------------------------------------------------------------------------------------- reading */

/* Finds the newest checkpoint of a run, and changes nothing there: 1 and its path, 0 when there is none, -1 on error; a
 * newest one that is not whole is an error. */
int checkpoint_newest(const char *output_dir, char path[PATH_LEN]);

/* The directory of the model that `name` means, on a command line or as train.init_from: `name` itself or, where that
 * is the directory of a run, its newest checkpoint, which a note on stderr names. Collective. */
int find_model(char path[PATH_LEN], const char *name);

/* Lists the steps of the checkpoints in output_dir, whole or not, whose names are the prefix and a step ("step-", or
 * "damaged-step-" for those that were set aside), ascending. The caller frees *steps. Returns their number, or -1. */
int checkpoint_list(const char *output_dir, const char *prefix, int64_t **steps);

/* Removes what a run that was killed has left of a checkpoint that it was writing or removing. */
int checkpoint_clean(const char *output_dir);

/* Whether a checkpoint is as it was saved, but for the content of its tensors: 1, or 0 when a file is damaged or
 * missing, which error_text names. -1 on an error that is no damage, also when its config is that of another run than
 * the one asked for (see checkpoint_read_state). */
int checkpoint_check(const char *dir, const struct config *asked);

/* Renames the damaged checkpoint of a step to damaged-step-NNNNNNN, where nothing takes it for a checkpoint. */
int checkpoint_set_aside(const char *output_dir, int64_t step);

/* Removes the checkpoints of later steps than `step`. Failures are warnings. */
void checkpoint_remove_after(const char *output_dir, int64_t step);

/* Reads trainer.json's state, in place of what *s held; num_layers must be set and must match. First compares the
 * config that the run had with the one asked for: a difference that would make the continued run another run (model
 * shape, seed, data order) fails, naming the key and both values; any other, and a key that only one of them has, is
 * written as a line to `notes`. 1 where data.tokenizer is new: see config_compare(). */
int checkpoint_read_state(const char *dir, const struct config *asked, struct trainer_state *s, FILE *notes);

/* Checks the format, version and checksum of trainer.json, read from `path`. Removes the member crc32 from root. */
int trainer_check(json_t *root, const char *path);

/* Compares the other files of a checkpoint with the sizes and checksums in trainer.json, which is `root` and in
 * messages `where`. */
int checkpoint_check_files(const char *dir, const char *where, const json_t *root);

/* ------------------------------------------------------------------------------------------------------- files */

/* OUTPUT_DIR/PREFIX and the step in seven digits or more. */
int checkpoint_path(char out[PATH_LEN], const char *output_dir, const char *prefix, int64_t step);

/* The name of file i (from 0) of a checkpoint, not counting trainer.json and the model's other files. Returns whether
 * there is one. */
bool checkpoint_file_name(char name[64], int i, int num_shards);

/* The size of DIR/NAME, and the checksum of what no other checksum covers: of a safetensors file its header, else the
 * whole file. */
int checkpoint_file_crc(const char *dir, const char *name, int64_t *size, uint32_t *crc);

/* The checksum of the content of trainer.json: of its compact text without the member crc32, which is removed. */
uint32_t trainer_crc(json_t *root);

#endif
