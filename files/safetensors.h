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

/* Opens DIR (KIND.safetensors, or KIND.safetensors.index.json and its shards; kind is "model" or "optimizer") or one .safetensors
 * file. Every header is checked: sizes, dtypes, offsets, overlaps, and, with an index, that every tensor is where it says. The rotary tables that
 * old files hold beside the weights are left out. NULL on error. */
struct weights *weights_open(const char *path, const char *kind);

struct weights_writer;         /* a safetensors file (F32; F64 in the double build), written front to back in bounded memory */
/* Creates a file for these arrays, which may be none; arrays[i].data is not used, and nothing of arrays after the call. NULL on error. */
struct weights_writer *weights_create(const char *path, const struct array *arrays, int n);
/* Writes the next elements, in the order of the arrays, in pieces of any size. After an error: weights_abandon. */
int weights_append(struct weights_writer *w, const real *data, int64_t count);
/* All elements must be there. A CRC-32 of each tensor goes into the header's metadata, and the file to disk; on error it is removed. w is
 * gone whatever the result. */
int weights_finish(struct weights_writer *w);
void weights_abandon(struct weights_writer *w); /* removes the file; NULL is fine */
/* Writes arrays as one file by these three. */
int safetensors_write(const char *path, const struct array *arrays, int n);

/* Maps a file, checks its header and adds its tensors to w. What was taken is in w, for weights_close. */
int shard_open(struct weights *w, const char *path);

struct weights_writer {
	char path[PATH_LEN];
	FILE *f;
	json_t *header;              /* tensors in the order of their data, as jansson keeps it */
	int64_t written;             /* bytes */
	int n, current;              /* tensors; the one that the next byte belongs to, or an empty one before it */
	struct { int64_t end; uint32_t crc; int size; } tensors[]; /* [n] bytes up to its last; checksum of what there is of it; of an element */
};

/* Creates a file for n arrays of these types. NULL on error. */
struct weights_writer *writer_open(const char *path, const struct array *arrays, const enum dtype *types, int n);

/* Writes the next bytes, whole elements of one size. */
int writer_append(struct weights_writer *w, const uint8_t *data, int64_t bytes, int size);

#endif
