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
struct tensors *tensors_open(const char *path, const char *kind);

struct safetensors_writer;         /* a safetensors file (F32; F64 in the double build), written front to back in bounded memory */
/* Creates a file for these tensors, which may be none; tensors[i].data is not used, and nothing of tensors after the call. NULL on error. */
struct safetensors_writer *safetensors_create(const char *path, const struct named_tensor *tensors, int n);
/* Writes the next elements, in the order of the tensors, in pieces of any size. After an error: safetensors_abandon. */
int safetensors_append(struct safetensors_writer *w, const real *data, int64_t count);
/* All elements must be there. A CRC-32 of each tensor goes into the header's metadata, and the file to disk; on error it is removed. w is
 * gone whatever the result. */
int safetensors_finish(struct safetensors_writer *w);
void safetensors_abandon(struct safetensors_writer *w); /* removes the file; NULL is fine */
/* Writes tensors as one file by these three. */
int safetensors_write(const char *path, const struct named_tensor *tensors, int n);

/* Maps a file, checks its header and adds its tensors to w. What was taken is in w, for tensors_close. */
int safetensors_open_file(struct tensors *w, const char *path);

struct safetensors_writer {
	char path[PATH_LEN];
	FILE *f;
	json_t *header;              /* tensors in the order of their data, as jansson keeps it */
	int64_t written;             /* bytes */
	int n, current;              /* tensors; the one that the next byte belongs to, or an empty one before it */
	struct { int64_t end; uint32_t crc; int size; } tensors[]; /* [n] bytes up to its last; checksum of what there is of it; of an element */
};

/* Creates a file for n tensors of these types. NULL on error. */
struct safetensors_writer *safetensors_create_typed(const char *path, const struct named_tensor *tensors, const enum dtype *types, int n);

/* Writes the next bytes, whole elements of one size. */
int safetensors_append_bytes(struct safetensors_writer *w, const uint8_t *data, int64_t bytes, int size);

#endif
