/*
 * files/tensors.c - named tensors in mapped files of any format: finding, checking, converting and reading them.
 */
#define _GNU_SOURCE
#include "files/tensors.h"

#include "files/base.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

const struct dtype_row dtypes[NUM_DTYPES] = {
	[F64] = {"F64", 8}, [F32] = {"F32", 4}, [F16] = {"F16", 2}, [BF16] = {"BF16", 2},
	[I64] = {"I64", 8}, [I32] = {"I32", 4},
	{"U64", 8}, {"U32", 4}, {"I16", 2}, {"U16", 2}, {"I8", 1}, {"U8", 1}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
};

int by_name(const void *a, const void *b)
{
	return strcmp(((const struct tensor *)a)->name, ((const struct tensor *)b)->name);
}

int by_offset(const void *a, const void *b)
{
	const struct tensor *x = a, *y = b;
	if (x->begin != y->begin)
		return x->begin < y->begin ? -1 : 1;
	return (x->end > y->end) - (x->end < y->end);
}

struct tensor_file *tensor_file_map(struct tensors *w, const char *path)
{
	struct tensor_file *s = allocate(sizeof *s);
	s->next = w->files, w->files = s;
	return path_copy(s->path, path) < 0 || map_file(path, &s->map, &s->size) < 0 ||
			refuse_lfs(path, s->map, s->size) < 0 ? NULL : s;
}

int tensors_add_zeros(struct tensors *w, const char *name, int64_t n)
{
	struct tensor_file *s = allocate(sizeof *s), **last = &w->files;
	while (*last)
		last = &(*last)->next;
	*last = s; /* the header of the first file stays the first */
	snprintf(s->path, sizeof s->path, "%s", w->path);
	void *zeros = mmap(NULL, n * sizeof(float), PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (zeros == MAP_FAILED)
		return fail("%s: out of memory for tensor %s", w->path, name);
	s->map = zeros;
	s->size = n * sizeof(float);
	s->header = json_object();
	json_object_set_new(s->header, name, json_null());
	w->tensors = grow(w->tensors, w->count, &w->capacity, 1, sizeof *w->tensors);
	w->tensors[w->count++] = (struct tensor){.name = json_object_iter_key(json_object_iter(s->header)), .file = s,
			.shape = {n}, .num_dims = 1, .dtype_name = dtypes[F32].name, .dtype = F32, .end = s->size};
	qsort(w->tensors, w->count, sizeof *w->tensors, by_name);
	return 0;
}

void tensors_close(struct tensors *w)
{
	if (!w)
		return;
	for (struct tensor_file *s = w->files, *next; s; s = next) {
		next = s->next;
		unmap_file(s->map, s->size);
		json_decref(s->header);
		free(s);
	}
	free(w->tensors);
	free(w);
}

/* ----------------------------------------------------------------------------------------------------- finding */

int tensors_count(const struct tensors *w)
{
	return w->count;
}

const char *tensors_name(const struct tensors *w, int i)
{
	return w->tensors[i].name;
}

int64_t tensors_bytes(const struct tensors *w)
{
	int64_t bytes = 0;
	for (const struct tensor_file *s = w->files; s; s = s->next)
		bytes += s->size;
	return bytes;
}

bool tensors_has(const struct tensors *w, const char *name)
{
	return tensor_find(w, name);
}

const struct tensor *tensor_find(const struct tensors *w, const char *name)
{
	struct tensor key = {.name = name};
	return w->count ? bsearch(&key, w->tensors, w->count, sizeof key, by_name) : NULL;
}

/* tensor_find that fails, with the name that was perhaps meant: checkpoints differ in the "model." before a name. */
static const struct tensor *tensor_need(const struct tensors *w, const char *name)
{
	const struct tensor *t = tensor_find(w, name);
	if (t)
		return t;
	char longer[MAX_NAME + 8];
	snprintf(longer, sizeof longer, "model.%s", name);
	const struct tensor *near = tensor_find(w, strncmp(name, "model.", 6) ? longer : name + 6);
	fail("%s: tensor %s is missing%s%s", w->path, name, near ? "; there is one named " : "", near ? near->name : "");
	return NULL;
}

bool has_shape(const struct tensor *t, const int64_t *shape, int num_dims)
{
	return t->num_dims == num_dims && !memcmp(t->shape, shape, num_dims * sizeof *shape);
}

/* Writes a shape as "[2, 3]". */
static const char *format_shape(char out[256], const int64_t *shape, int num_dims)
{
	int n = snprintf(out, 256, "[");
	for (int i = 0; i < num_dims; i++)
		n += snprintf(out + n, 256 - n, "%s%lld", i ? ", " : "", (long long)shape[i]);
	snprintf(out + n, 256 - n, "]");
	return out;
}

const struct tensor *tensor_of_shape(const struct tensors *w, const char *name, const int64_t *shape, int num_dims)
{
	char found[256], expected[256];
	const struct tensor *t = tensor_need(w, name);
	if (!t)
		return NULL;
	if (t->dtype < 0 || t->dtype > BF16) {
		fail("%s: tensor %s: dtype %.40s; expected F32, F64, F16 or BF16", t->file->path, t->name, t->dtype_name);
		return NULL;
	}
	if (has_shape(t, shape, num_dims))
		return t;
	fail("%s: tensor %s: shape %s; expected %s", t->file->path, t->name, format_shape(found, t->shape, t->num_dims),
			format_shape(expected, shape, num_dims));
	return NULL;
}

/* ----------------------------------------------------------------------------------------------------- reading */

int64_t named_tensor_size(const struct named_tensor *a)
{
	return a->rows * (a->cols ? a->cols : 1);
}

const uint8_t *tensor_bytes(const struct tensor *t)
{
	return t->file->map + t->file->data_at + t->begin;
}

int tensor_verify(const struct tensor *t)
{
	uint32_t crc = t->has_crc ? crc_of(0, tensor_bytes(t), t->end - t->begin) : t->crc;
	if (crc != t->crc)
		return fail("%s: tensor %s is damaged: checksum %08x, expected %08x", t->file->path, t->name, (unsigned)crc,
				(unsigned)t->crc);
	return 0;
}

void tensor_release(const struct tensor *t)
{
	const uintptr_t page = sysconf(_SC_PAGESIZE), begin = (uintptr_t)tensor_bytes(t) / page * page;
	madvise((void *)begin, (uintptr_t)tensor_bytes(t) + (t->end - t->begin) - begin, MADV_DONTNEED);
}

/* tensor_of_shape for a matrix, or, where cols is 0, a vector. */
static const struct tensor *tensor_matrix(const struct tensors *w, const char *name, int64_t rows, int64_t cols)
{
	return tensor_of_shape(w, name, (int64_t[]){rows, cols}, cols ? 2 : 1);
}

int tensors_read(const struct tensors *w, const struct named_tensor *a)
{
	const struct tensor *t = tensor_matrix(w, a->name, a->rows, a->cols);
	if (!t || tensor_verify(t) < 0)
		return -1;
	to_real(a->data, tensor_bytes(t), (t->end - t->begin) / dtypes[t->dtype].size, t->dtype);
	return 0;
}

/* tensor_matrix that also checks a range of elements, and says where the first one is. */
static const struct tensor *tensor_range(const struct tensors *w, const char *name, int64_t rows, int64_t cols,
		int64_t first, int64_t n, const uint8_t **at)
{
	const struct tensor *t = tensor_matrix(w, name, rows, cols);
	if (!t)
		return NULL;
	const int size = dtypes[t->dtype].size;
	const int64_t count = (t->end - t->begin) / size;
	if (first >= 0 && n >= 0 && first <= count && n <= count - first) {
		*at = tensor_bytes(t) + first * size;
		return t;
	}
	fail("%s: tensor %s: %lld elements from element %lld are asked for; it holds %lld", t->file->path, name,
			(long long)n, (long long)first, (long long)count);
	return NULL;
}

int tensors_read_range(const struct tensors *w, const char *name, int64_t rows, int64_t cols, int64_t first, int64_t n,
		real *out)
{
	const uint8_t *at;
	const struct tensor *t = tensor_range(w, name, rows, cols, first, n, &at);
	if (!t)
		return -1;
	to_real(out, at, n, t->dtype);
	return 0;
}

int tensors_map_range(const struct tensors *w, const char *name, int64_t rows, int64_t cols, int64_t first, int64_t n,
		const void **at, bool *bf16)
{
	const uint8_t *bytes;
	const struct tensor *t = tensor_range(w, name, rows, cols, first, n, &bytes);
	if (!t)
		return -1;
	const bool usable = t->dtype == BF16 || t->dtype == REAL_DTYPE;
	*bf16 = t->dtype == BF16;
	*at = usable && (uintptr_t)bytes % dtypes[t->dtype].size == 0 ? bytes : NULL;
	return 0;
}

int tensors_read_int(const struct tensors *w, const char *name, int64_t n, int32_t *out)
{
	const struct tensor *t = tensor_need(w, name);
	if (!t)
		return -1;
	if (t->dtype != I32 && t->dtype != I64)
		return fail("%s: tensor %s: dtype %.40s; expected I32 or I64", t->file->path, name, t->dtype_name);
	int64_t count = (t->end - t->begin) / dtypes[t->dtype].size;
	if (count != n)
		return fail("%s: tensor %s: %lld elements; expected %lld", t->file->path, name, (long long)count,
				(long long)n);
	if (tensor_verify(t) < 0)
		return -1;
	const uint8_t *bytes = tensor_bytes(t);
	for (int64_t i = 0; i < n; i++) {
		int64_t v = t->dtype == I32 ? load_i32(bytes + 4 * i) : load_i64(bytes + 8 * i);
		if (v < INT32_MIN || v > INT32_MAX)
			return fail("%s: tensor %s: element %lld is %lld; expected 32 bits", t->file->path, name, (long long)i,
					(long long)v);
		out[i] = v;
	}
	return 0;
}

/* -------------------------------------------------------------------------------------------- types of numbers */

void to_real(real *out, const uint8_t *in, int64_t n, enum dtype dtype)
{
	float f;
	double d;
	uint16_t h;
	switch (dtype) {
	case F32:
		for (int64_t i = 0; i < n; i++)
			memcpy(&f, in + 4 * i, 4), out[i] = f;
		break;
	case F64:
		for (int64_t i = 0; i < n; i++)
			memcpy(&d, in + 8 * i, 8), out[i] = (real)d;
		break;
	case F16:
		for (int64_t i = 0; i < n; i++)
			memcpy(&h, in + 2 * i, 2), out[i] = half_to_float(h);
		break;
	default: /* BF16 */
		for (int64_t i = 0; i < n; i++)
			memcpy(&h, in + 2 * i, 2), out[i] = bf16_to_float(h);
	}
}
