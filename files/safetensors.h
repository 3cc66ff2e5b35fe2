/*
 * files/safetensors.h - safetensors files and Hugging Face directories of them: reading and writing.
 */
#ifndef LING_FILES_SAFETENSORS_H
#define LING_FILES_SAFETENSORS_H

#include "files/base.h"
#include "files/tensors.h"

#include <jansson.h>
#include <stdint.h>
#include <stdio.h>

/* ---------------------------------------------------------------------------------------------------- reading */

/* Opens one .safetensors file, or of a directory STEM.safetensors, or STEM.safetensors.index.json and the shards that
 * it names; stem is "model" or "optimizer". Every header is checked: sizes, dtypes, offsets, overlaps, and, with an
 * index, that every tensor is where it says. Tables of rotary embeddings (rotary_emb.inv_freq), which old files hold
 * beside the weights, are left out. NULL on error. */
struct tensors *tensors_open(const char *path, const char *stem);

/* Maps one file, checks its header and adds its tensors to w. Also after an error, what was mapped is in w, for
 * tensors_close. */
int safetensors_open_file(struct tensors *w, const char *path);

/* ---------------------------------------------------------------------------------------------------- writing
 * A file is written from front to back in bounded memory. The header is before the data but holds their checksums, so
 * room is left for it and it comes last. After an error of append, abandon.
 */
struct safetensors_writer;

/* Creates a file for n tensors, which may be 0, of type F32 (F64 in the double build). tensors[i].data is not used,
 * and nothing of `tensors` after the call. NULL on error. */
struct safetensors_writer *safetensors_create(const char *path, const struct named_tensor *tensors, int n);

/* The same for tensors of these types. */
struct safetensors_writer *safetensors_create_typed(const char *path, const struct named_tensor *tensors,
		const enum dtype *types, int n);

/* The same for tensors of any number of dimensions: name, shape, num_dims and dtype are used. */
struct safetensors_writer *safetensors_create_any(const char *path, const struct tensor *tensors, int n);

/* Sets an entry of the file's metadata, whose `format` is "pt" before. To be called before the first append. */
int safetensors_set_metadata(struct safetensors_writer *w, const char *key, const char *value);

/* Writes the next elements, in the order of the tensors; a call may end within a tensor or reach over several. */
int safetensors_append(struct safetensors_writer *w, const real *data, int64_t count);

/* The same for bytes: whole elements of `size` bytes. */
int safetensors_append_bytes(struct safetensors_writer *w, const uint8_t *data, int64_t bytes, int size);

/* For trying what then happens: once `after` bytes of data are in the file, the process gets a signal; or, with
 * signal 0, writing fails as on a full disk. after INT64_MAX: never. */
struct write_fault { int64_t after; int signal; };
void safetensors_set_fault(struct safetensors_writer *w, struct write_fault fault);

/* Checks that all elements are there, writes a CRC-32 of each tensor into the header's metadata, and brings the file
 * to disk. On error it is removed. Frees w in any case. */
int safetensors_finish(struct safetensors_writer *w);

/* Removes the file and frees w; NULL is fine. */
void safetensors_abandon(struct safetensors_writer *w);

/* Writes tensors as one file: the three steps in one. */
int safetensors_write(const char *path, const struct named_tensor *tensors, int n);

#endif
