/*
 * files/tensors.h - named tensors in mapped files of any format: finding, checking, converting and reading them.
 */
#ifndef LING_FILES_TENSORS_H
#define LING_FILES_TENSORS_H

#include "files/base.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* ------------------------------------------------------------------------------------------- tensors in files */

/* The types whose size is known. The first six can be read; the others may lie in a file beside them. */
enum dtype { F64, F32, F16, BF16, I64, I32, NUM_DTYPES = 15, UNKNOWN_DTYPE = -1 };
#define REAL_DTYPE (sizeof(real) == 8 ? F64 : F32)
/* by enum dtype; bytes of an element */
extern const struct dtype_row { const char *name; int size; } dtypes[NUM_DTYPES];

struct tensor_file {          /* one mapped file */
	struct tensor_file *next;
	char path[PATH_LEN];
	const uint8_t *map;
	size_t size;
	size_t data_at;            /* where the tensors' bytes begin */
	json_t *header;            /* owns the names that tensors point to */
};

enum { MAX_DIMS = 8 };        /* dimensions of a tensor */

struct tensor {
	const char *name;
	const struct tensor_file *file;
	int64_t shape[MAX_DIMS];   /* [num_dims], the outermost dimension first; each at least 0 */
	int num_dims;
	const char *dtype_name;
	enum dtype dtype;
	uint64_t begin, end;       /* bytes, from the file's data_at */
	bool has_crc;
	uint32_t crc;              /* of the bytes */
};

struct tensors {              /* the tensors of one file, or of all files of a directory */
	char path[PATH_LEN];
	struct tensor_file *files;
	struct tensor *tensors;    /* [count], sorted by name */
	int count, dropped;        /* dropped: tensors that were left out, see tensors_open */
	size_t capacity;           /* entries that `tensors` has memory for */
};

/* The readers of safetensors and of GGUF build a struct tensors with these three. */

/* Maps a file and adds it to w. NULL on error; tensors_close releases what was added. */
struct tensor_file *tensor_file_map(struct tensors *w, const char *path);

/* Orders of struct tensor for qsort: by name, and by offset in the file. */
int by_name(const void *a, const void *b);
int by_offset(const void *a, const void *b);

/* Adds a float32 vector of n >= 1 zeros, of a name that is not there, which is copied. Tensors that were found before
 * move. Fails when memory is short. */
int tensors_add_zeros(struct tensors *w, const char *name, int64_t n);

/* Unmaps the files and frees all; NULL is fine. */
void tensors_close(struct tensors *w);

/* ----------------------------------------------------------------------------------------------------- finding */

/* The number of tensors, and the name of tensor i (0 <= i < count). */
int tensors_count(const struct tensors *w);
const char *tensors_name(const struct tensors *w, int i);

/* Bytes of all files. */
int64_t tensors_bytes(const struct tensors *w);

/* Whether there is a tensor of that name. */
bool tensors_has(const struct tensors *w, const char *name);

/* The tensor of that name, or NULL. */
const struct tensor *tensor_find(const struct tensors *w, const char *name);

/* The tensor of that name, which must have this shape and a type that to_real converts. NULL on error. */
const struct tensor *tensor_of_shape(const struct tensors *w, const char *name, const int64_t *shape, int num_dims);

/* Whether a tensor has exactly these dimensions. */
bool has_shape(const struct tensor *t, const int64_t *shape, int num_dims);

/* ----------------------------------------------------------------------------------------------------- reading */

struct named_tensor {         /* a tensor in memory */
	const char *name;
	int64_t rows, cols;        /* a vector has cols 0 */
	real *data;                /* the caller's */
};

/* The number of elements. */
int64_t named_tensor_size(const struct named_tensor *a);

/* Copies tensor a->name into a->data, converted from F64, F32, BF16 or F16. Its shape must be a's. Checks its checksum
 * where the file holds one. */
int tensors_read(const struct tensors *w, const struct named_tensor *a);

/* Copies elements first .. first+n-1 (row-major) of a tensor whose whole shape must be [rows, cols] (cols 0: a
 * vector), converted likewise. No checksum: see tensor_verify. */
int tensors_read_range(const struct tensors *w, const char *name, int64_t rows, int64_t cols, int64_t first, int64_t n,
		real *out);

/* Where elements first .. first+n-1 of such a tensor are in the file, which stays mapped until w is closed. *at is
 * NULL if they cannot be used there and must be read: they can if they are bfloat16 (*bf16) or real, and aligned. No
 * checksum either. */
int tensors_map_range(const struct tensors *w, const char *name, int64_t rows, int64_t cols, int64_t first, int64_t n,
		const void **at, bool *bf16);

/* Copies an integer tensor (I32 or I64) of n elements; for test fixtures. */
int tensors_read_int(const struct tensors *w, const char *name, int64_t n, int32_t *out);

/* The bytes of a tensor, mapped. */
const uint8_t *tensor_bytes(const struct tensor *t);

/* Checks a tensor's checksum where the file holds one. */
int tensor_verify(const struct tensor *t);

/* Takes the tensor's pages out of this process's memory, when it need not read them any more; if it does, they come
 * again. */
void tensor_release(const struct tensor *t);

/* -------------------------------------------------------------------------------------------- types of numbers */

/* Converts n elements of F64, F32, F16 or BF16, which may have any alignment. */
void to_real(real *out, const uint8_t *in, int64_t n, enum dtype dtype);

/* These functions have no branches, so that the compiler can vectorise loops over them. The product
 * changes the bias of the exponent from 15 to 127; it is exact for subnormal numbers too. */
static inline float half_to_float(uint16_t half)
{
	const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
	const uint32_t finite = float_to_bits(bits_to_float(rest) * 0x1p112f);
	return bits_to_float(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : finite));
}

static inline uint16_t float_to_half(float value)
{
	const uint32_t bits = float_to_bits(value), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
	const uint32_t normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
	/* The unit of a subnormal half is 2^-24, which is also that of floats from 0.5 to 1: the sum rounds to it. */
	const uint32_t small = float_to_bits(bits_to_float(magnitude) + 0.5f) - float_to_bits(0.5f);
	const uint32_t nan = 0x7e00 | (magnitude >> 13 & 0x1ff);
	const uint32_t finite = magnitude < 0x38800000 ? small : normal;
	return sign | (magnitude > 0x7f800000 ? nan : magnitude >= 0x477ff000 ? 0x7c00 : finite);
}

#endif
