/*
 * data.c - what a run reads and leaves behind: token files, windows of them, loss masks; metrics.
 */
#define _GNU_SOURCE
#include "data.h"

#include "files/base.h"
#include "files/config.h"
#include "files/tokenizer.h"

#include <argp.h>
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#define HEADER_MAX 100000000 /* bytes; the format's own limit */

const struct dtype_row dtypes[NUM_DTYPES] = {
	[F64] = {"F64", 8}, [F32] = {"F32", 4}, [F16] = {"F16", 2}, [BF16] = {"BF16", 2},
	[I64] = {"I64", 8}, [I32] = {"I32", 4},
	{"U64", 8}, {"U32", 4}, {"I16", 2}, {"U16", 2}, {"I8", 1}, {"U8", 1}, {"BOOL", 1}, {"F8_E4M3", 1}, {"F8_E5M2", 1},
};

static int by_name(const void *a, const void *b)
{
	return strcmp(((const struct stored *)a)->name, ((const struct stored *)b)->name);
}

static int by_offset(const void *a, const void *b)
{
	const struct stored *x = a, *y = b;
	if (x->begin != y->begin)
		return x->begin < y->begin ? -1 : 1;
	return (x->end > y->end) - (x->end < y->end);
}

/* Checks one header entry by itself and fills *t from it. data_size: bytes of tensors in the shard. */
static int tensor_parse(struct stored *t, const struct shard *s, const char *name, const json_t *entry,
		uint64_t data_size)
{
	*t = (struct stored){.name = name, .shard = s, .dtype = UNKNOWN_DTYPE};
	const json_t *offsets = json_object_get(entry, "data_offsets");
	const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
	char where[PATH_LEN + 300];
	snprintf(where, sizeof where, "%s: tensor %.256s", s->path, name);
	if (!json_is_object(entry))
		return fail("%s: is %s; expected an object with dtype, shape and data_offsets", where, json_kind(entry));
	if (!(t->dtype_name = field_text(entry, where, "dtype")))
		return -1;
	for (int i = 0; i < NUM_DTYPES; i++)
		if (!strcmp(t->dtype_name, dtypes[i].name))
			t->dtype = i;

	t->shape = json_object_get(entry, "shape");
	if (!json_is_array(t->shape))
		return fail("%s: `shape` is %s; expected an array", where, json_kind(t->shape));
	uint64_t bytes = t->dtype == UNKNOWN_DTYPE ? 0 : dtypes[t->dtype].size;
	for (size_t i = 0; i < json_array_size(t->shape); i++) {
		const json_t *size = json_array_get(t->shape, i);
		if (!json_is_integer(size) || json_integer_value(size) < 0)
			return fail("%s: `shape` entry %zu is %s; expected an integer of at least 0", where, i,
					json_is_integer(size) ? "negative" : json_kind(size));
		if (__builtin_mul_overflow(bytes, (uint64_t)json_integer_value(size), &bytes))
			return fail("%s: `shape` is too large for any file", where);
	}

	if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end))
		return fail("%s: expected `data_offsets` as an array of two integers", where);
	long long b = json_integer_value(begin), e = json_integer_value(end);
	if (b < 0 || b > e || (uint64_t)e > data_size)
		return fail("%s: data_offsets are [%lld, %lld]; expected a range within the file's %llu bytes of data", where, b, e,
				(unsigned long long)data_size);
	t->begin = b, t->end = e;
	if (t->dtype != UNKNOWN_DTYPE && bytes != t->end - t->begin)
		return fail("%s: data_offsets hold %lld bytes; expected %llu for its shape and dtype %s", where, e - b,
				(unsigned long long)bytes, t->dtype_name);
	return 0;
}

/* Checks that n tensors of a shard fill its data without overlap or hole. Sorts them by offset. */
static int tensors_fill(struct stored *t, int n, const struct shard *s, uint64_t data_size)
{
	uint64_t end = 0;
	if (n)
		qsort(t, n, sizeof *t, by_offset);
	for (int i = 0; i < n; end = t[i++].end) {
		if (t[i].begin < end)
			return fail("%s: tensors %.256s and %.256s overlap at data byte %llu", s->path, t[i - 1].name, t[i].name,
					(unsigned long long)t[i].begin);
		if (t[i].begin > end)
			return fail("%s: data bytes %llu to %llu, before tensor %.256s, belong to no tensor; expected no holes", s->path,
					(unsigned long long)end, (unsigned long long)t[i].begin, t[i].name);
	}
	if (end != data_size)
		return fail("%s: the tensors end at data byte %llu but the file holds %llu; expected no bytes after them", s->path,
				(unsigned long long)end, (unsigned long long)data_size);
	return 0;
}

/* Reads the header's __metadata__ (strings only) and gives each of n tensors its checksum, where one is there. */
static int tensors_checksums(struct stored *t, int n, const struct shard *s)
{
	json_t *metadata = json_object_get(s->header, "__metadata__"), *value;
	const char *key;
	if (!metadata)
		return 0;
	if (!json_is_object(metadata))
		return fail("%s: `__metadata__` is %s; expected an object", s->path, json_kind(metadata));
	json_object_foreach(metadata, key, value)
		if (!json_is_string(value))
			return fail("%s: `__metadata__` entry `%.256s` is %s; expected a string", s->path, key, json_kind(value));
	for (int i = 0; i < n; i++) {
		char *name;
		if (asprintf(&name, "crc32.%s", t[i].name) < 0)
			return fail("%s: out of memory", s->path);
		t[i].has_crc = json_object_get(metadata, name);
		int rc = t[i].has_crc ? field_crc(metadata, s->path, name, &t[i].crc) : 0;
		free(name);
		if (rc < 0)
			return -1;
	}
	return 0;
}

/* Adds a mapped file to w, for weights_close to unmap. NULL on error. */
static struct shard *shard_map(struct weights *w, const char *path)
{
	struct shard *s = allocate(sizeof *s);
	s->next = w->shards, w->shards = s;
	if (snprintf(s->path, PATH_LEN, "%s", path) < PATH_LEN)
		return map_file(path, &s->map, &s->size) < 0 ? NULL : s;
	fail("%s: path longer than %d bytes", path, PATH_LEN - 1);
	return NULL;
}

/* Maps a file, checks its header and adds its tensors to w. What was taken is in w, for weights_close. */
static int shard_open(struct weights *w, const char *path)
{
	struct shard *s = shard_map(w, path);
	if (!s)
		return -1;
	if (s->size < 8)
		return fail("%s: %zu bytes; expected a safetensors file, which begins with 8 bytes of header length", path,
				s->size);
	uint64_t length = load_i64(s->map);
	if (length > HEADER_MAX)
		return fail("%s: header length %llu is above the limit of %d; not a safetensors file?", path,
				(unsigned long long)length, HEADER_MAX);
	if (length > s->size - 8)
		return fail("%s: header of %llu bytes in a file of %zu; the file is truncated", path, (unsigned long long)length,
				s->size);
	const char *text = (const char *)s->map + 8;
	if (!length || *text != '{')
		return fail("%s: the header does not begin with '{'; not a safetensors file?", path);
	json_error_t error;
	if (!(s->header = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error)))
		return fail("%s: bad JSON in the header at byte %d: %s", path, error.position, error.text);

	s->data_at = 8 + length;
	uint64_t data_size = s->size - s->data_at;
	w->tensors = grow(w->tensors, w->count, &w->room, json_object_size(s->header) + 1, sizeof *w->tensors); /* never none */
	struct stored *mine = w->tensors + w->count;
	int n = 0;
	const char *name;
	json_t *entry;
	json_object_foreach(s->header, name, entry)
		if (strcmp(name, "__metadata__") && tensor_parse(&mine[n++], s, name, entry, data_size) < 0)
			return -1;
	if (tensors_fill(mine, n, s, data_size) < 0 || tensors_checksums(mine, n, s) < 0)
		return -1;
	w->count += n;
	if (w->count)
		qsort(w->tensors, w->count, sizeof *w->tensors, by_name);
	return 0;
}

const struct stored *tensor_find(const struct weights *w, const char *name)
{
	struct stored key = {.name = name};
	return w->count ? bsearch(&key, w->tensors, w->count, sizeof key, by_name) : NULL;
}

/* Opens every shard that the index names, and checks that index and shards tell the same. */
static int shards_open(struct weights *w, const char *dir, const char *index_path, const json_t *index)
{
	json_t *map = json_object_get(index, "weight_map"), *value;
	const char *name;
	char path[PATH_LEN];
	if (!json_is_object(map))
		return fail("%s: `weight_map` is %s; expected an object from tensor to file", index_path, json_kind(map));
	json_object_foreach(map, name, value) {
		const char *file = json_string_value(value);
		if (!file)
			return fail("%s: tensor %.256s: is %s; expected a file name", index_path, name, json_kind(value));
		if (!*file || strchr(file, '/') || !strcmp(file, ".") || !strcmp(file, ".."))
			return fail("%s: tensor %.256s: \"%.256s\" is no plain file name", index_path, name, file);
		if (path_join(path, dir, file) < 0)
			return -1;
		struct shard *s = w->shards;
		while (s && strcmp(s->path, path))
			s = s->next;
		if (s)
			continue;
		int there = path_exists(path);
		if (!there)
			fail("%s: is not there, but %s names it for tensor %.256s", path, index_path, name);
		if (there <= 0 || shard_open(w, path) < 0)
			return -1;
		for (int i = 0; i < w->count; i++) {
			if (w->tensors[i].shard != w->shards) /* the new one is first in the list */
				continue;
			const char *owner = json_string_value(json_object_get(map, w->tensors[i].name));
			if (!owner || strcmp(owner, file))
				return fail("%s: holds tensor %.256s, but %s says it is in %.256s", path, w->tensors[i].name, index_path,
						owner ? owner : "no file");
		}
	}
	json_object_foreach(map, name, value)
		if (!tensor_find(w, name))
			return fail("%s/%.256s: tensor %.256s is missing, but %s says it is there", dir, json_string_value(value), name,
					index_path);
	return 0;
}

static int directory_open(struct weights *w, const char *dir, const char *kind)
{
	char base[PATH_LEN], single_path[PATH_LEN], index_path[PATH_LEN];
	if (path_join(base, dir, kind) < 0 || path_suffix(single_path, base, ".safetensors") < 0 ||
			path_suffix(index_path, base, ".safetensors.index.json") < 0)
		return -1;
	int there = path_exists(index_path);
	if (there > 0) {
		json_t *index = json_read(index_path);
		int rc = index ? shards_open(w, dir, index_path, index) : -1;
		json_decref(index);
		return rc;
	}
	if (there == 0 && (there = path_exists(single_path)) > 0)
		return shard_open(w, single_path);
	if (there < 0)
		return -1;
	return fail("%s: no weights here; looked for %s.safetensors.index.json and %s.safetensors", dir, kind, kind);
}

/* Leaves out the buffers of old files, tables that follow from the config and that Hugging Face ignores as well. */
static void drop_buffers(struct weights *w)
{
	static const char buffer[] = ".rotary_emb.inv_freq";
	int kept = 0;
	for (int i = 0; i < w->count; i++) {
		const char *name = w->tensors[i].name;
		const size_t n = strlen(name), tail = sizeof buffer - 1;
		if (strncmp(name, "model.", 6) || n < tail || strcmp(name + n - tail, buffer))
			w->tensors[kept++] = w->tensors[i];
	}
	w->dropped = w->count - kept;
	w->count = kept;
}

struct weights *weights_open(const char *path, const char *kind)
{
	struct weights *w = allocate(sizeof *w);
	struct stat st;
	int rc;
	if (snprintf(w->path, PATH_LEN, "%s", path) >= PATH_LEN)
		rc = fail("%s: path longer than %d bytes", path, PATH_LEN - 1);
	else if (stat(path, &st) < 0)
		rc = fail("%s: cannot open: %s", path, strerror(errno));
	else
		rc = S_ISDIR(st.st_mode) ? directory_open(w, path, kind) : shard_open(w, path);
	if (rc == 0) {
		drop_buffers(w);
		return w;
	}
	weights_close(w);
	return NULL;
}

int weights_count(const struct weights *w)
{
	return w->count;
}

const char *weights_name(const struct weights *w, int i)
{
	return w->tensors[i].name;
}

bool weights_has(const struct weights *w, const char *name)
{
	return tensor_find(w, name);
}

void weights_close(struct weights *w)
{
	if (!w)
		return;
	for (struct shard *s = w->shards, *next; s; s = next) {
		next = s->next;
		unmap_file(s->map, s->size);
		json_decref(s->header);
		free(s);
	}
	free(w->tensors);
	free(w);
}

/* tensor_find that fails, with the name that was perhaps meant: checkpoints differ in the "model." before a name. */
static const struct stored *tensor_need(const struct weights *w, const char *name)
{
	const struct stored *t = tensor_find(w, name);
	if (t)
		return t;
	char longer[MAX_NAME + 8];
	snprintf(longer, sizeof longer, "model.%s", name);
	const struct stored *near = tensor_find(w, strncmp(name, "model.", 6) ? longer : name + 6);
	fail("%s: tensor %s is missing%s%s", w->path, name, near ? "; there is one named " : "", near ? near->name : "");
	return NULL;
}

const uint8_t *tensor_bytes(const struct stored *t)
{
	return t->shard->map + t->shard->data_at + t->begin;
}

/* Checks the tensor's checksum, where it has one. */
static int tensor_verify(const struct stored *t)
{
	uint32_t crc = t->has_crc ? crc_of(0, tensor_bytes(t), t->end - t->begin) : t->crc;
	if (crc != t->crc)
		return fail("%s: tensor %s is damaged: checksum %08x, expected %08x", t->shard->path, t->name, (unsigned)crc,
				(unsigned)t->crc);
	return 0;
}

int weights_verify(const struct weights *w, int i)
{
	return tensor_verify(&w->tensors[i]);
}

/* Converts n elements at any alignment. */
static void to_real(real *out, const uint8_t *in, int64_t n, enum dtype dtype)
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

/* The tensor of that name, which must be of a type that to_real converts and have the shape [rows, cols] (cols 0: a vector), or, for a
 * `stack` of matrices above 0, [stack, rows / stack, cols]. NULL on error. */
static const struct stored *tensor_stacked(const struct weights *w, const char *name, int64_t rows, int64_t cols, int64_t stack)
{
	const struct stored *t = tensor_need(w, name);
	if (!t)
		return NULL;
	if (t->dtype < 0 || t->dtype > BF16) {
		fail("%s: tensor %s: dtype %.40s; expected F32, F64, F16 or BF16", t->shard->path, t->name, t->dtype_name);
		return NULL;
	}
	char expected[96];
	if (stack)
		snprintf(expected, sizeof expected, "[%lld, %lld, %lld]", (long long)stack, (long long)(rows / stack), (long long)cols);
	else if (cols)
		snprintf(expected, sizeof expected, "[%lld, %lld]", (long long)rows, (long long)cols);
	else
		snprintf(expected, sizeof expected, "[%lld]", (long long)rows);
	char *found = json_text(t->shape, 0);
	if (strcmp(found, expected)) {
		fail("%s: tensor %s: shape %.256s; expected %s", t->shard->path, t->name, found, expected);
		t = NULL;
	}
	free(found);
	return t;
}

static const struct stored *tensor_shaped(const struct weights *w, const char *name, int64_t rows, int64_t cols)
{
	return tensor_stacked(w, name, rows, cols, 0);
}

int weights_read(const struct weights *w, const struct array *a)
{
	const struct stored *t = tensor_shaped(w, a->name, a->rows, a->cols);
	if (!t || tensor_verify(t) < 0)
		return -1;
	to_real(a->data, tensor_bytes(t), (t->end - t->begin) / dtypes[t->dtype].size, t->dtype);
	return 0;
}

/* tensor_shaped that also checks a range of elements, and says where the first one is. */
static const struct stored *tensor_range(const struct weights *w, const char *name, int64_t rows, int64_t cols, int64_t first, int64_t n,
		const uint8_t **at)
{
	const struct stored *t = tensor_shaped(w, name, rows, cols);
	if (!t)
		return NULL;
	const int size = dtypes[t->dtype].size;
	const int64_t count = (t->end - t->begin) / size;
	if (first >= 0 && n >= 0 && first <= count && n <= count - first) {
		*at = tensor_bytes(t) + first * size;
		return t;
	}
	fail("%s: tensor %s: %lld elements from element %lld are asked for; it holds %lld", t->shard->path, name, (long long)n, (long long)first,
			(long long)count);
	return NULL;
}

int weights_read_range(const struct weights *w, const char *name, int64_t rows, int64_t cols, int64_t first, int64_t n, real *out)
{
	const uint8_t *at;
	const struct stored *t = tensor_range(w, name, rows, cols, first, n, &at);
	if (!t)
		return -1;
	to_real(out, at, n, t->dtype);
	return 0;
}

int weights_map(const struct weights *w, const char *name, int64_t rows, int64_t cols, int64_t first, int64_t n, const void **at, bool *bf16)
{
	const uint8_t *bytes;
	const struct stored *t = tensor_range(w, name, rows, cols, first, n, &bytes);
	if (!t)
		return -1;
	const bool usable = t->dtype == BF16 || t->dtype == REAL_DTYPE;
	*bf16 = t->dtype == BF16;
	*at = usable && (uintptr_t)bytes % dtypes[t->dtype].size == 0 ? bytes : NULL;
	return 0;
}

int64_t weights_bytes(const struct weights *w)
{
	int64_t bytes = 0;
	for (const struct shard *s = w->shards; s; s = s->next)
		bytes += s->size;
	return bytes;
}

int weights_read_int(const struct weights *w, const char *name, int64_t n, int32_t *out)
{
	const struct stored *t = tensor_need(w, name);
	if (!t)
		return -1;
	if (t->dtype != I32 && t->dtype != I64)
		return fail("%s: tensor %s: dtype %.40s; expected I32 or I64", t->shard->path, name, t->dtype_name);
	int64_t count = (t->end - t->begin) / dtypes[t->dtype].size;
	if (count != n)
		return fail("%s: tensor %s: %lld elements; expected %lld", t->shard->path, name, (long long)count, (long long)n);
	if (tensor_verify(t) < 0)
		return -1;
	const uint8_t *bytes = tensor_bytes(t);
	for (int64_t i = 0; i < n; i++) {
		int64_t v = t->dtype == I32 ? load_i32(bytes + 4 * i) : load_i64(bytes + 8 * i);
		if (v < INT32_MIN || v > INT32_MAX)
			return fail("%s: tensor %s: element %lld is %lld; expected 32 bits", t->shard->path, name, (long long)i,
					(long long)v);
		out[i] = v;
	}
	return 0;
}

/* -- writing: the header stands before the data but holds their checksums, so room is left for it and it comes last -- */

int64_t array_size(const struct array *a)
{
	return a->rows * (a->cols ? a->cols : 1);
}

/* The key of a tensor's checksum in the metadata. Returns whether it fits. */
static bool crc_key(char key[MAX_NAME + 32], const char *name) /* room for exp_avg_sq. and crc32. */
{
	return snprintf(key, MAX_NAME + 32, "crc32.%s", name) < MAX_NAME + 32;
}

/* The JSON header of a file of n arrays of these types, data in array order; the checksums are 0, which is that of nothing. NULL on error. */
static json_t *header_make(const char *path, const struct array *arrays, const enum dtype *types, int n)
{
	json_t *header = json_object(), *metadata = json_object();
	json_object_set_new(metadata, "format", json_string("pt"));
	json_object_set_new(header, "__metadata__", metadata);
	json_int_t at = 0;
	for (int i = 0; i < n; i++) {
		const struct array *a = &arrays[i];
		char key[MAX_NAME + 32];
		json_int_t end = at + array_size(a) * dtypes[types[i]].size;
		json_t *shape = json_pack("[I]", (json_int_t)a->rows);
		if (a->cols)
			json_array_append_new(shape, json_integer(a->cols));
		json_t *entry = json_pack("{s:s, s:o, s:[I,I]}", "dtype", dtypes[types[i]].name, "shape", shape, "data_offsets", at, end);
		const char *wrong = json_object_get(header, a->name) ? "is there twice"
			: !crc_key(key, a->name) ? "has too long a name"
			: json_object_set(header, a->name, entry) < 0 ? "has a name that is not UTF-8" : NULL;
		json_decref(entry);
		if (wrong) {
			fail("%s: tensor %.256s %s", path, a->name, wrong);
			json_decref(header);
			return NULL;
		}
		json_object_set_new(metadata, key, crc_to_json(0));
		at = end;
	}
	return header;
}

/* Writes the header at the front; what is written next comes behind it. */
static int header_write(struct weights_writer *w)
{
	if (fseek(w->f, 0, SEEK_SET) < 0) /* not rewind(), which forgets errors */
		return fail_write(w->path, errno);
	char *text = json_text(w->header, JSON_COMPACT);
	uint64_t length = strlen(text), padded = (length + 7) & ~UINT64_C(7); /* so that the data are aligned */
	fwrite(&padded, 8, 1, w->f);
	fprintf(w->f, "%s%*s", text, (int)(padded - length), "");
	free(text);
	return 0;
}

/* Closes the file, which goes when rc is an error, and frees all. */
static int writer_close(struct weights_writer *w, int rc)
{
	rc = file_close(w->f, w->path, rc);
	json_decref(w->header);
	free(w);
	return rc;
}

struct weights_writer *writer_open(const char *path, const struct array *arrays, const enum dtype *types, int n)
{
	if (strlen(path) >= PATH_LEN) {
		fail("%s: path longer than %d bytes", path, PATH_LEN - 1);
		return NULL;
	}
	json_t *header = header_make(path, arrays, types, n);
	FILE *f = header ? file_create(path) : NULL;
	if (!f) {
		json_decref(header);
		return NULL;
	}
	struct weights_writer *w = allocate(sizeof *w + n * sizeof *w->tensors);
	*w = (struct weights_writer){.f = f, .header = header, .n = n};
	snprintf(w->path, PATH_LEN, "%s", path);
	for (int i = 0; i < n; i++) {
		w->tensors[i].size = dtypes[types[i]].size;
		w->tensors[i].end = (i ? w->tensors[i - 1].end : 0) + array_size(&arrays[i]) * w->tensors[i].size;
	}
	if (header_write(w) == 0)
		return w;
	weights_abandon(w);
	return NULL;
}

struct weights_writer *weights_create(const char *path, const struct array *arrays, int n)
{
	enum dtype *types = allocate(n * sizeof *types);
	for (int i = 0; i < n; i++)
		types[i] = REAL_DTYPE;
	struct weights_writer *w = writer_open(path, arrays, types, n);
	free(types);
	return w;
}

int writer_append(struct weights_writer *w, const uint8_t *data, int64_t bytes, int size)
{
	while (bytes > 0) {
		while (w->current < w->n && w->tensors[w->current].end == w->written)
			w->current++;
		if (w->current == w->n)
			return fail("%s: %lld elements more than its %d tensors hold", w->path, (long long)bytes / size, w->n);
		const int64_t left = w->tensors[w->current].end - w->written, piece = bytes < left ? bytes : left;
		uint32_t *crc = &w->tensors[w->current].crc;
		*crc = crc_of(*crc, data, piece);
		if (fwrite(data, 1, piece, w->f) != (size_t)piece)
			return fail_write(w->path, errno);
		data += piece, bytes -= piece, w->written += piece;
	}
	return 0;
}

int weights_append(struct weights_writer *w, const real *data, int64_t count)
{
	return writer_append(w, (const uint8_t *)data, count * (int64_t)sizeof *data, sizeof *data);
}

int weights_finish(struct weights_writer *w)
{
	json_t *metadata = json_object_get(w->header, "__metadata__"), *entry;
	const char *name;
	char key[MAX_NAME + 32];
	int i = -1, rc = 0;
	json_object_foreach(w->header, name, entry) {
		if (i >= 0 && !rc && w->tensors[i].end > w->written)
			rc = fail("%s: tensor %s: the last %lld of its elements were not given", w->path, name,
					(long long)(w->tensors[i].end - w->written) / w->tensors[i].size);
		if (i >= 0 && crc_key(key, name))
			json_object_set_new(metadata, key, crc_to_json(w->tensors[i].crc));
		i++; /* the metadata come first */
	}
	return writer_close(w, rc < 0 ? rc : header_write(w));
}

void weights_abandon(struct weights_writer *w)
{
	if (w)
		writer_close(w, -1);
}

int safetensors_write(const char *path, const struct array *arrays, int n)
{
	struct weights_writer *w = weights_create(path, arrays, n);
	int rc = w ? 0 : -1;
	for (int i = 0; i < n && !rc; i++)
		rc = weights_append(w, arrays[i].data, array_size(&arrays[i]));
	if (!rc)
		return weights_finish(w);
	weights_abandon(w);
	return -1;
}

/* ============================================================================================================
 * Checkpoints. Directories of an OUTPUT_DIR:
 *   step-0000200        a checkpoint, always whole
 *   .tmp-step-0000200   one being written or removed: rubbish after a crash
 * Every byte is covered: tensors by the checksums in their files, headers, indexes and config.json by those in
 * trainer.json, trainer.json by its own.
 * ========================================================================================================== */

#define TRAINER_FORMAT "ling-trainer"
#define TRAINER_VERSION 2

#define MAX_PARTS 99999 /* what the five digits in their names can tell */

static const char *const kinds[] = {"model", "optimizer"};

static void part_name(char name[64], const char *kind, int part, int parts)
{
	if (parts == 1)
		snprintf(name, 64, "%s.safetensors", kind);
	else
		snprintf(name, 64, "%s-%05d-of-%05d.safetensors", kind, part + 1, parts);
}

bool checkpoint_name(char name[64], int i, int parts)
{
	if (i == 0)
		strcpy(name, "config.json");
	else if (i <= 2 * parts)
		part_name(name, kinds[(i - 1) / parts], (i - 1) % parts, parts);
	else if (parts > 1 && i <= 2 * parts + 2)
		snprintf(name, 64, "%s.safetensors.index.json", kinds[i - 2 * parts - 1]);
	else
		return false;
	return true;
}

/* What a checkpoint holds besides where data.tokenizer is a tokenizer.json, so that any tool can use it: copies of these. */
static const char *const tokenizer_files[] = {"tokenizer.json", "tokenizer_config.json"}; /* the second where there is one */
#define NUM_TOKENIZER_FILES 2

void checkpoint_file(char path[PATH_LEN], const char *dir, const char *kind, int part, int parts)
{
	char name[64];
	part_name(name, kind, part, parts);
	path_join(path, dir, name); /* fits: the config's check of train.output_dir, or the conversion's of its path, sees to it */
}

/* The step in a name that is exactly prefix and step as checkpoint_path writes them, or -1. */
static int64_t step_of(const char *name, const char *prefix)
{
	char again[64];
	size_t skip = strlen(prefix);
	if (strncmp(name, prefix, skip) || strspn(name + skip, "0123456789") > 18)
		return -1;
	long long step = strtoll(name + skip, NULL, 10);
	snprintf(again, sizeof again, "%s%07lld", prefix, step);
	return strcmp(name, again) ? -1 : step;
}

int checkpoint_path(char out[PATH_LEN], const char *output_dir, const char *prefix, int64_t step)
{
	char name[64];
	snprintf(name, sizeof name, "%s%07lld", prefix, (long long)step);
	return path_join(out, output_dir, name);
}

void directory_remove(const char *path)
{
	if (unlink(path) == 0)
		return;
	DIR *dir = opendir(path);
	for (struct dirent *e; dir && (e = readdir(dir));)
		if (strcmp(e->d_name, ".") && strcmp(e->d_name, ".."))
			unlinkat(dirfd(dir), e->d_name, 0);
	if (dir)
		closedir(dir);
	if (rmdir(path) < 0 && errno != ENOENT)
		fprintf(stderr, "ling: warning: %s: cannot remove this old directory: %s\n", path, strerror(errno));
}

static int by_step(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
	return (x > y) - (x < y);
}

/* Lists the steps in output_dir's names of checkpoints, whole or not, ascending. The caller frees *steps. Returns their
 * number, or -1. */
static int checkpoint_list(const char *output_dir, int64_t **steps)
{
	*steps = NULL;
	DIR *dir = opendir(output_dir);
	if (!dir)
		return errno == ENOENT ? 0 : fail("%s: cannot list: %s", output_dir, strerror(errno));
	int n = 0;
	size_t room = 0;
	errno = 0;
	for (struct dirent *e; (e = readdir(dir)); errno = 0) {
		int64_t step = step_of(e->d_name, "step-");
		if (step < 0)
			continue;
		*steps = grow(*steps, n, &room, 1, sizeof **steps);
		(*steps)[n++] = step;
	}
	if (errno)
		n = fail("%s: cannot list: %s", output_dir, strerror(errno));
	closedir(dir);
	if (n > 0)
		qsort(*steps, n, sizeof **steps, by_step);
	return n;
}

/* Whether the checkpoint of a step has a trainer.json that can be read: it is written last. errno tells why not. */
static bool checkpoint_is_whole(const char *output_dir, int64_t step)
{
	char path[PATH_LEN], trainer[PATH_LEN];
	return checkpoint_path(path, output_dir, "step-", step) == 0 && path_join(trainer, path, "trainer.json") == 0 &&
			access(trainer, R_OK) == 0;
}

int file_seal(const char *dir, const char *name, int64_t *size, uint32_t *crc)
{
	char path[PATH_LEN];
	const uint8_t *data;
	size_t bytes;
	if (path_join(path, dir, name) < 0 || map_file(path, &data, &bytes) < 0)
		return -1;
	*size = bytes;
	uint64_t covered = bytes;
	const char *dot = strrchr(name, '.');
	if (dot && !strcmp(dot, ".safetensors") && bytes >= 8 && (uint64_t)load_i64(data) <= bytes - 8)
		covered = 8 + load_i64(data);
	*crc = crc32_z(0, data, covered);
	unmap_file(data, bytes);
	return 0;
}

/* Adds a file to the member `files` of trainer.json. */
static int seal_to_json(const char *dir, const char *name, json_t *files)
{
	int64_t size;
	uint32_t crc;
	if (file_seal(dir, name, &size, &crc) < 0)
		return -1;
	return json_object_set_new(files, name, json_pack("{s:I, s:o}", "size", (json_int_t)size, "crc32", crc_to_json(crc)));
}

uint32_t trainer_crc(json_t *root)
{
	json_object_del(root, "crc32");
	char *text = json_text(root, JSON_COMPACT);
	uint32_t crc = crc32_z(0, (const uint8_t *)text, strlen(text));
	free(text);
	return crc;
}

/* An array of n numbers; one that is not finite fails. NULL on error. */
static json_t *reals_to_json(const char *path, const char *key, const double *x, int n)
{
	json_t *array = json_array();
	for (int i = 0; i < n; i++)
		if (json_array_append_new(array, json_real(x[i])) < 0) {
			fail("%s: %s of layer %d is %g; expected a finite number", path, key, i, x[i]);
			json_decref(array);
			return NULL;
		}
	return array;
}

static json_t *sources_to_json(const struct trainer_state *s)
{
	json_t *array = json_array();
	for (int i = 0; i < s->num_sources; i++) {
		const struct source_state *x = &s->sources[i];
		json_array_append_new(array, json_pack("{s:I, s:o, s:I, s:I, s:I, s:i}", "tokens", (json_int_t)x->tokens, "crc32", crc_to_json(x->crc32),
				"share", (json_int_t)x->share, "credit", (json_int_t)x->credit, "taken", (json_int_t)x->taken, "order", x->order));
	}
	return array;
}

static int trainer_write(const char *dir, const struct config *c, const struct trainer_state *s, int parts)
{
	char path[PATH_LEN], name[64];
	if (path_join(path, dir, "trainer.json") < 0)
		return -1;
	json_t *root = json_pack("{s:s, s:i, s:I, s:I, s:I, s:o, s:i}", "format", TRAINER_FORMAT, "version", TRAINER_VERSION,
			"step", (json_int_t)s->step, "samples", (json_int_t)s->samples, "tokens", (json_int_t)s->tokens,
			"sources", sources_to_json(s), "parts", parts);
	json_t *files = json_object(), *mean = reals_to_json(path, "router_mean", s->router_mean, s->num_layers);
	json_t *std = mean ? reals_to_json(path, "router_std", s->router_std, s->num_layers) : NULL;
	int rc = std ? 0 : -1;
	for (int i = 0; !rc && checkpoint_name(name, i, parts); i++)
		rc = seal_to_json(dir, name, files);
	for (int i = 0; !rc && i < NUM_TOKENIZER_FILES; i++)
		if (path_join(path, dir, tokenizer_files[i]) == 0 && path_exists(path) > 0)
			rc = seal_to_json(dir, tokenizer_files[i], files);
	rc = rc < 0 || path_join(path, dir, "trainer.json") < 0 ? -1 : 0;
	json_object_set_new(root, "router_mean", mean);
	json_object_set_new(root, "router_std", std);
	json_object_set_new(root, "files", files);
	if (!rc && json_object_set_new(root, "config", run_to_json(c)) < 0)
		rc = fail("%s: the config cannot be written as JSON", path);
	if (!rc) {
		json_object_set_new(root, "crc32", crc_to_json(trainer_crc(root)));
		rc = json_write(path, root);
	}
	json_decref(root);
	return rc;
}

/* Checks the headers of a kind's files, brings them to disk and, where there are several, writes their index. */
static int parts_finish(const char *dir, const char *kind, int parts)
{
	char path[PATH_LEN], name[64];
	struct weights *w = allocate(sizeof *w);
	json_t *map = json_object();
	json_int_t total = 0;
	int rc = 0;
	for (int part = 0; part < parts && !rc; part++) {
		checkpoint_file(path, dir, kind, part, parts);
		rc = shard_open(w, path) < 0 ? -1 : sync_path(path);
	}
	for (int i = 0; i < w->count && !rc; i++) { /* sorted by name */
		const struct stored *t = &w->tensors[i];
		if (i && !strcmp(t[-1].name, t->name))
			rc = fail("%s: tensor %s is in %s as well; expected it once", t->shard->path, t->name, t[-1].shard->path);
		json_object_set_new(map, t->name, json_string(strrchr(t->shard->path, '/') + 1));
		total += t->end - t->begin;
	}
	weights_close(w);
	snprintf(name, sizeof name, "%s.safetensors.index.json", kind);
	json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", total, "weight_map", map);
	if (!rc && parts > 1)
		rc = path_join(path, dir, name) < 0 ? -1 : json_write(path, index);
	json_decref(index);
	return rc;
}

/* Copies the files of data.tokenizer, if it has any. */
static int copy_tokenizer(const char *dir, const struct config *c)
{
	char file[PATH_LEN], from[PATH_LEN], to[PATH_LEN];
	if (!strcmp(c->data.tokenizer, "none") || !strcmp(c->data.tokenizer, BYTE_TOKENIZER))
		return 0;
	if (tokenizer_path(file, c->data.tokenizer) < 0 || path_join(to, dir, tokenizer_files[0]) < 0 || copy_file(file, to) < 0)
		return -1;
	parent_of(from, file);
	if (path_join(file, from, tokenizer_files[1]) < 0 || path_join(to, dir, tokenizer_files[1]) < 0)
		return -1;
	const int there = path_exists(file);
	return there > 0 ? copy_file(file, to) : there;
}

/* Completes the directory, and brings all of it to disk. */
static int checkpoint_fill(const char *dir, const struct config *c, const struct trainer_state *s, int parts)
{
	char path[PATH_LEN];
	if (path_join(path, dir, "config.json") < 0 || config_to_huggingface(&c->model, path) < 0)
		return -1;
	for (int i = 0; i < 2; i++)
		if (parts_finish(dir, kinds[i], parts) < 0)
			return -1;
	return copy_tokenizer(dir, c) < 0 || trainer_write(dir, c, s, parts) < 0 ? -1 : sync_path(dir);
}

/* Removes all but the `keep` newest checkpoints, never that of step `saved`. What is not whole is left alone. Failures
 * are warnings: the new checkpoint is safe. */
static void checkpoint_prune(const char *output_dir, int keep, int64_t saved)
{
	char path[PATH_LEN], temporary[PATH_LEN];
	int64_t *steps;
	int n = checkpoint_list(output_dir, &steps);
	if (n < 0)
		fprintf(stderr, "ling: warning: old checkpoints stay: %s\n", error_text);
	for (int i = n - 1; i >= 0; i--) {
		if (!checkpoint_is_whole(output_dir, steps[i]) || keep-- > 0 || steps[i] == saved)
			continue;
		/* Under the temporary name first: a crash while removing must not leave half a checkpoint under a whole one's. */
		if (checkpoint_path(path, output_dir, "step-", steps[i]) < 0 ||
				checkpoint_path(temporary, output_dir, ".tmp-step-", steps[i]) < 0)
			continue; /* too long a path to have been made by us */
		if (rename(path, temporary) < 0)
			fprintf(stderr, "ling: warning: %s: cannot remove this old checkpoint: %s\n", path, strerror(errno));
		else
			directory_remove(temporary);
	}
	free(steps);
}

int checkpoint_begin(const struct config *c, const struct trainer_state *s, char dir[PATH_LEN])
{
	if (checkpoint_is_whole(c->train.output_dir, s->step))
		return 1;
	if (checkpoint_path(dir, c->train.output_dir, ".tmp-step-", s->step) < 0 || make_directories(c->train.output_dir) < 0)
		return -1;
	directory_remove(dir);
	return mkdir(dir, 0777) < 0 ? fail("%s: cannot create directory: %s", dir, strerror(errno)) : 0;
}

int checkpoint_commit(const struct config *c, const struct trainer_state *s, const char *dir, int parts)
{
	char target[PATH_LEN];
	int rc = parts < 1 || parts > MAX_PARTS ? fail("%s: %d parts; expected 1 to %d", dir, parts, MAX_PARTS)
		: checkpoint_path(target, c->train.output_dir, "step-", s->step) < 0 ? -1 : checkpoint_fill(dir, c, s, parts);
	if (rc == 0 && rename(dir, target) < 0)
		rc = fail("%s: cannot rename to %s: %s; if that is an old checkpoint, remove it", dir, target, strerror(errno));
	if (rc < 0) {
		checkpoint_abandon(dir);
		return -1;
	}
	if (sync_path(c->train.output_dir) < 0)
		return -1;
	if (c->checkpoint.keep > 0)
		checkpoint_prune(c->train.output_dir, c->checkpoint.keep, s->step);
	return 0;
}

void checkpoint_abandon(const char *dir)
{
	directory_remove(dir);
}

int checkpoint_find(const char *output_dir, char path[PATH_LEN])
{
	char left[PATH_LEN];
	DIR *dir = opendir(output_dir);
	if (!dir)
		return errno == ENOENT ? 0 : fail("%s: cannot list: %s", output_dir, strerror(errno));
	for (struct dirent *e; (e = readdir(dir));)
		if (step_of(e->d_name, ".tmp-step-") >= 0 && path_join(left, output_dir, e->d_name) == 0)
			directory_remove(left);
	closedir(dir);
	int64_t *steps;
	int n = checkpoint_list(output_dir, &steps), last = n - 1;
	int rc = n <= 0 ? n : checkpoint_path(path, output_dir, "step-", steps[last]) < 0 ? -1 : 1;
	if (rc > 0 && !checkpoint_is_whole(output_dir, steps[last])) {
		/* Continuing from an older one would undo work that perhaps can be saved: that is not ours to decide. */
		const char *reason = strerror(errno);
		while (last >= 0 && !checkpoint_is_whole(output_dir, steps[last]))
			last--;
		char older[64] = "start from the beginning";
		if (last >= 0)
			snprintf(older, sizeof older, "continue from step %lld", (long long)steps[last]);
		rc = fail("%s/trainer.json: cannot be read (%s), so that this newest checkpoint is not whole; repair it, or remove "
				"that directory to %s", path, reason, older);
	}
	free(steps);
	return rc;
}

/* Reads an array of n finite numbers of at least `low`. */
static int field_reals(const json_t *object, const char *where, const char *key, int n, double low, double *out)
{
	const json_t *array = json_object_get(object, key);
	if (!json_is_array(array))
		return fail("%s: `%s` is %s; expected an array", where, key, json_kind(array));
	if (json_array_size(array) != (size_t)n)
		return fail("%s: `%s` has %zu entries; expected one for each of %d layers", where, key, json_array_size(array), n);
	for (int i = 0; i < n; i++) {
		const json_t *v = json_array_get(array, i);
		if (!json_is_number(v))
			return fail("%s: `%s` entry %d is %s; expected a number", where, key, i, json_kind(v));
		out[i] = json_number_value(v);
		if (out[i] < low)
			return fail("%s: `%s` entry %d is %g; expected at least %g", where, key, i, out[i], low);
	}
	return 0;
}

/* Reads `sources`. Their number and the sizes keep all that is computed from them within int64_t. */
static int field_sources(const json_t *root, const char *path, struct trainer_state *s)
{
	const json_t *array = json_object_get(root, "sources");
	const int64_t whole = INT64_C(1) << 32;
	if (!json_is_array(array) || json_array_size(array) > MAX_SOURCES)
		return fail("%s: `sources` is %s; expected an array of at most %d", path, json_is_array(array) ? "longer" : json_kind(array), MAX_SOURCES);
	s->num_sources = json_array_size(array);
	for (int i = 0; i < s->num_sources; i++) {
		struct source_state *x = &s->sources[i];
		const json_t *v = json_array_get(array, i);
		char where[PATH_LEN + 32];
		int64_t order;
		snprintf(where, sizeof where, "%s: source %d", path, i + 1);
		if (field_int(v, where, "tokens", 0, INT64_MAX, &x->tokens) < 0 || field_crc(v, where, "crc32", &x->crc32) < 0 ||
				field_int(v, where, "share", 0, whole, &x->share) < 0 ||
				field_int(v, where, "credit", -MAX_SOURCES * whole, MAX_SOURCES * whole, &x->credit) < 0 ||
				field_int(v, where, "taken", 0, INT64_MAX / 2, &x->taken) < 0 || field_int(v, where, "order", 0, UINT16_MAX, &order) < 0)
			return -1;
		x->order = order;
	}
	return 0;
}

/* Compares a file of a checkpoint with its size and checksum in trainer.json, which is `where`. */
static int file_check(const char *dir, const char *where, const json_t *files, const char *name)
{
	const json_t *entry = json_object_get(files, name);
	int64_t size, found_size;
	uint32_t crc, found_crc;
	if (!json_is_object(entry))
		return fail("%s: `files` entry `%s` is %s; expected an object with size and crc32", where, name, json_kind(entry));
	if (field_int(entry, where, "size", 0, INT64_MAX, &size) < 0 || field_crc(entry, where, "crc32", &crc) < 0 ||
			file_seal(dir, name, &found_size, &found_crc) < 0)
		return -1;
	if (found_size != size)
		return fail("%s/%s: %lld bytes; expected the %lld that were saved; the file is damaged", dir, name, (long long)found_size,
				(long long)size);
	if (found_crc != crc)
		return fail("%s/%s: checksum %08x; expected %08x; the file was changed after it was saved", dir, name, (unsigned)found_crc,
				(unsigned)crc);
	return 0;
}

/* Compares the checkpoint's other files with what trainer.json says of them. */
static int files_check(const char *dir, const char *where, const json_t *root)
{
	const json_t *files = json_object_get(root, "files");
	char name[64];
	int64_t parts = 1; /* as in checkpoints from before there could be more */
	if (json_object_get(root, "parts") && field_int(root, where, "parts", 1, MAX_PARTS, &parts) < 0)
		return -1;
	for (int i = 0; checkpoint_name(name, i, parts); i++)
		if (file_check(dir, where, files, name) < 0)
			return -1;
	for (int i = 0; i < NUM_TOKENIZER_FILES; i++)
		if (json_object_get(files, tokenizer_files[i]) && file_check(dir, where, files, tokenizer_files[i]) < 0)
			return -1;
	return 0;
}

/* Checks trainer.json's format and its own checksum. */
static int trainer_check(json_t *root, const char *path)
{
	const char *format = field_text(root, path, "format");
	int64_t version;
	uint32_t crc, found;
	if (!format)
		return -1;
	if (strcmp(format, TRAINER_FORMAT))
		return fail("%s: `format` is \"%.40s\"; expected \"%s\"", path, format, TRAINER_FORMAT);
	if (field_int(root, path, "version", 1, INT32_MAX, &version) < 0)
		return -1;
	if (version != TRAINER_VERSION)
		return fail("%s: version %lld; this program reads version %d", path, (long long)version, TRAINER_VERSION);
	if (field_crc(root, path, "crc32", &crc) < 0)
		return -1;
	if ((found = trainer_crc(root)) != crc)
		return fail("%s: checksum %08x; expected %08x; the file was changed after it was saved", path, (unsigned)found,
				(unsigned)crc);
	return 0;
}

int checkpoint_read_state(const char *dir, const struct config *asked, struct trainer_state *s, FILE *notes)
{
	char path[PATH_LEN];
	if (path_join(path, dir, "trainer.json") < 0)
		return -1;
	json_t *root = json_read(path);
	if (!root)
		return -1;
	const char *slash = strrchr(dir, '/');
	const int64_t named = step_of(slash ? slash + 1 : dir, "step-");
	const json_t *config = json_object_get(root, "config");
	int rc = trainer_check(root, path);
	/* The config first: where it differs, what differs in consequence is not the news. */
	if (rc == 0)
		rc = json_is_object(config) ? config_compare(config, asked, path, notes)
			: fail("%s: `config` is %s; expected an object", path, json_kind(config));
	if (rc == 0 && (
			field_int(root, path, "step", 0, INT64_MAX, &s->step) < 0 ||
			field_int(root, path, "samples", 0, INT64_MAX, &s->samples) < 0 ||
			field_int(root, path, "tokens", 0, INT64_MAX, &s->tokens) < 0 ||
			field_sources(root, path, s) < 0 ||
			field_reals(root, path, "router_mean", s->num_layers, -INFINITY, s->router_mean) < 0 ||
			field_reals(root, path, "router_std", s->num_layers, 0, s->router_std) < 0 ||
			files_check(dir, path, root) < 0))
		rc = -1;
	if (rc == 0 && named >= 0 && named != s->step)
		rc = fail("%s: `step` is %lld, but the directory's name says %lld; give the directory its own name back, or "
				"remove it", path, (long long)s->step, (long long)named);
	json_decref(root);
	return rc;
}

/* ============================================================================================================
 * Token files
 *   Megatron's indexed dataset, the native form:
 *     PREFIX.bin   the ids, one after the other
 *     PREFIX.idx   magic, version u64, dtype u8, sequences u64, document entries u64; then arrays: each sequence's
 *                  length (i32), its byte position in .bin (i64), the sequence that each document begins with, with their
 *                  number as a last entry (i64), and perhaps a mode of each sequence (i8)
 *   llm.c's:       256 i32 (magic, version, number of ids, zeros), then the ids
 *   bare ids, as nanoGPT has them, whose type the config must tell
 * Beside each of them, PREFIX being the path without .bin:
 *   PREFIX.mask.bin   may be missing: a byte an id, 1 where the loss counts, else 0
 *   PREFIX.json       ours: the manifest, what is known of these files
 *
 * Opening must not take longer for a larger file. So what needs a pass over all of it (checksums, the largest id, whether the index is sound)
 * stands in the manifest, and counts for as long as sizes and times of modification are those that it names. Where there is no such manifest
 * the pass is made, and the manifest written, if the folder allows. One that `ling tokenize` wrote also claims things: the ids' checksum, for
 * one; a file that is changed, and is not what its manifest claims, is refused.
 * ========================================================================================================== */

#define LLM_C_HEADER 1024
#define MANIFEST_FORMAT "ling-tokens"

const struct token_types_row token_types[] = {
#define ROW(code, name, type) [code] = {name, sizeof(type)},
	TOKEN_TYPES(ROW)
#undef ROW
	[6] = {"float64", 0}, [7] = {"float32", 0},
};
#define NUM_TOKEN_TYPES ((int)(sizeof token_types / sizeof *token_types))
#define MEGATRON_TYPES 9

/* llm.c's headers: those of GPT-2's vocabulary and of Llama 3's. */
static const struct { int32_t magic, version; int dtype; } llm_c_headers[] = {{20240520, 1, UINT16}, {20240801, 7, UINT32}};

static int64_t token_width(const struct tokens *t)
{
	return token_types[t->dtype].size;
}

static const char *const stamp_names[NUM_STAMPS] = {"bin", "idx", "mask"};
const char *const stamp_suffixes[NUM_STAMPS] = {".bin", ".idx", ".mask.bin"};

/* -- the manifest -- */

static json_t *stamp_to_json(const struct stamp *s)
{
	return s->size < 0 ? json_null() : json_pack("{s:I, s:o}", "size", (json_int_t)s->size, "modified",
			json_sprintf("%lld.%09ld", (long long)s->modified.tv_sec, s->modified.tv_nsec));
}

int manifest_write(const struct manifest *m, const char *path)
{
	json_t *root = json_pack("{s:s}", "format", MANIFEST_FORMAT), *files = json_object();
	if (*m->tokenizer)
		json_object_update_new(root, json_pack("{s:s, s:o, s:I, s:I}", "tokenizer", m->tokenizer, "tokenizer_hash",
				crc_to_json(m->tokenizer_hash), "vocab_size", (json_int_t)m->vocab_size, "bytes", (json_int_t)m->bytes));
	json_object_update_new(root, json_pack("{s:s, s:I, s:I, s:I, s:I, s:o, s:o}", "dtype", token_types[m->dtype].name,
			"documents", (json_int_t)m->documents, "tokens", (json_int_t)m->tokens, "largest_id", (json_int_t)m->largest_id,
			"learned", (json_int_t)m->learned, "crc32", crc_to_json(m->crc32), "mask_crc32", crc_to_json(m->mask_crc32)));
	for (int i = 0; i < NUM_STAMPS; i++)
		json_object_set_new(files, stamp_names[i], stamp_to_json(&m->stamps[i]));
	json_object_set_new(root, "files", files);
	int rc = json_write(path, root);
	json_decref(root);
	return rc;
}

/* A stamp that cannot be read, as that of an older manifest, is one that no file has. */
static struct stamp stamp_from_json(const json_t *v)
{
	struct stamp s = {-2, {0, 0}};
	const char *text = json_string_value(json_object_get(v, "modified"));
	long long seconds;
	long nanoseconds;
	if (json_is_null(v))
		s.size = -1;
	else if (text && sscanf(text, "%lld.%9ld", &seconds, &nanoseconds) == 2 && json_is_integer(json_object_get(v, "size")))
		s = (struct stamp){json_integer_value(json_object_get(v, "size")), {seconds, nanoseconds}};
	return s;
}

static bool same_stamps(const struct stamp *a, const struct stamp *b)
{
	for (int i = 0; i < NUM_STAMPS; i++)
		if (a[i].size != b[i].size || (a[i].size >= 0 &&
				(a[i].modified.tv_sec != b[i].modified.tv_sec || a[i].modified.tv_nsec != b[i].modified.tv_nsec)))
			return false;
	return true;
}

/* The code of an integer type's name, or 0. */
static int token_type(const char *name)
{
	for (int i = 0; i < NUM_TOKEN_TYPES; i++)
		if (token_types[i].size && !strcmp(name, token_types[i].name))
			return i;
	return 0;
}

int manifest_check_format(const char *path, const json_t *root)
{
	const char *format = field_text(root, path, "format");
	if (!format || strcmp(format, MANIFEST_FORMAT))
		return fail("%s: `format` is \"%.40s\"; expected \"%s\"; if it is not a token file's manifest, move it away", path,
				format ? format : "", MANIFEST_FORMAT);
	return 0;
}

/* Reads the manifest. What it lacks because it is of an older version is -1 or a stamp that no file has. */
static int manifest_parse(struct manifest *m, const char *path, const json_t *root)
{
	if (manifest_check_format(path, root) < 0)
		return -1;
	*m = (struct manifest){.largest_id = -1, .learned = -1};
	const json_t *files = json_object_get(root, "files");
	if (json_object_get(root, "tokenizer")) {
		const char *tokenizer = field_text(root, path, "tokenizer");
		if (!tokenizer || field_int(root, path, "vocab_size", 1, INT32_MAX, &m->vocab_size) < 0 ||
				field_int(root, path, "bytes", 0, INT64_MAX, &m->bytes) < 0 ||
				field_crc(root, path, "tokenizer_hash", &m->tokenizer_hash) < 0)
			return -1;
		if (!*tokenizer || snprintf(m->tokenizer, sizeof m->tokenizer, "%s", tokenizer) >= (int)sizeof m->tokenizer)
			return fail("%s: `tokenizer` is %s", path, *tokenizer ? "too long" : "empty");
	} else if (!files)
		return fail("%s: `tokenizer` is missing; expected a string", path);
	const char *dtype = field_text(root, path, "dtype");
	if (!dtype || field_int(root, path, "tokens", 0, INT64_MAX, &m->tokens) < 0 ||
			field_int(root, path, "documents", -1, INT64_MAX, &m->documents) < 0 || field_crc(root, path, "crc32", &m->crc32) < 0)
		return -1;
	if (!(m->dtype = token_type(dtype)))
		return fail("%s: `dtype` is \"%.40s\"; expected an integer type", path, dtype);
	if (files && (field_int(root, path, "largest_id", 0, INT64_MAX, &m->largest_id) < 0 ||
			field_int(root, path, "learned", 0, m->tokens, &m->learned) < 0 || field_crc(root, path, "mask_crc32", &m->mask_crc32) < 0))
		return -1;
	for (int i = 0; i < NUM_STAMPS; i++)
		m->stamps[i] = stamp_from_json(json_object_get(files, stamp_names[i]));
	return 0;
}

/* 1 when there is a manifest, else 0. */
static int manifest_read(struct manifest *m, const char *path)
{
	int there = path_exists(path);
	if (there <= 0)
		return there;
	json_t *root = json_read(path);
	int rc = root ? manifest_parse(m, path, root) : -1;
	json_decref(root);
	return rc < 0 ? -1 : 1;
}

/* Compares what a tokenizer's manifest claims with what the files were found to be. */
static int manifest_check(const struct manifest *claimed, const struct manifest *is, const char *path, const char *bin)
{
	if (claimed->dtype != is->dtype)
		return fail("%s: `dtype` is \"%s\"; the file's is %s", path, token_types[claimed->dtype].name, token_types[is->dtype].name);
	if (claimed->tokens != is->tokens)
		return fail("%s: `tokens` is %lld; the files hold %lld", path, (long long)claimed->tokens, (long long)is->tokens);
	if (claimed->documents != is->documents)
		return fail("%s: `documents` is %lld; the files hold %lld", path, (long long)claimed->documents, (long long)is->documents);
	if (claimed->crc32 != is->crc32)
		return fail("%s: `crc32` is %08x; that of %s is %08x: it is damaged, or the manifest is of another file", path,
				(unsigned)claimed->crc32, bin, (unsigned)is->crc32);
	if (claimed->learned >= 0 && claimed->mask_crc32 != is->mask_crc32)
		return fail("%s: `mask_crc32` is %08x; the loss mask beside %s has %08x: it is damaged, missing, or of another file", path,
				(unsigned)claimed->mask_crc32, bin, (unsigned)is->mask_crc32);
	return 0;
}

/* What must hold of a manifest by the byte tokenizer, whoever vouches for the rest. */
static int manifest_check_bytes(const struct manifest *m, const char *path)
{
	if (strcmp(m->tokenizer, BYTE_TOKENIZER))
		return 0;
	if (m->bytes != m->tokens - m->documents) /* a token a byte, and one to end each document */
		return fail("%s: `bytes` is %lld; the files hold %lld", path, (long long)m->bytes, (long long)(m->tokens - m->documents));
	if (m->vocab_size != BYTE_VOCAB)
		return fail("%s: `vocab_size` is %lld; the byte tokenizer has %d", path, (long long)m->vocab_size, BYTE_VOCAB);
	if (m->tokenizer_hash != byte_tokenizer_hash())
		return fail("%s: `tokenizer_hash` is %08x; this program's byte tokenizer is %08x: make the token file again",
				path, (unsigned)m->tokenizer_hash, (unsigned)byte_tokenizer_hash());
	return 0;
}

/* -- opening -- */

/* Where the arrays of a checked index begin. */
struct index { uint64_t sequences, entries; const uint8_t *lengths, *pointers, *documents; };

static struct index index_of(const struct tokens *t)
{
	struct index x = {.sequences = load_i64(t->idx.data + 18), .entries = load_i64(t->idx.data + 26), .lengths = t->idx.data + IDX_HEADER};
	x.pointers = x.lengths + 4 * x.sequences;
	x.documents = x.pointers + 8 * x.sequences;
	return x;
}

/* Checks the header of an index: then its arrays lie within the file. Sets dtype, count and documents. */
static int index_header(struct tokens *t, const char *path)
{
	const uint8_t *idx = t->idx.data;
	const size_t size = t->idx.size;
	if (size < IDX_HEADER || memcmp(idx, IDX_MAGIC, 9))
		return fail("%s: not a Megatron index: expected it to begin with MMIDIDX and a header of %d bytes", path,
				IDX_HEADER);
	if (load_i64(idx + 9) != 1)
		return fail("%s: version %lld; expected 1", path, (long long)load_i64(idx + 9));
	t->dtype = idx[17];
	if (t->dtype >= MEGATRON_TYPES || !token_types[t->dtype].name)
		return fail("%s: unknown dtype code %d; expected 1 to 5 or 8", path, t->dtype);
	if (!token_types[t->dtype].size)
		return fail("%s: dtype %s; expected an integer type", path, token_types[t->dtype].name);
	uint64_t n = load_i64(idx + 18), entries = load_i64(idx + 26), room = size - IDX_HEADER;
	if (n > room / 12 || entries > (room - 12 * n) / 8)
		return fail("%s: %llu sequences and %llu document entries do not fit in its %zu bytes; the file is truncated", path,
				(unsigned long long)n, (unsigned long long)entries, size);
	uint64_t rest = room - 12 * n - 8 * entries;
	if (rest && rest != n) /* n bytes: the modes */
		return fail("%s: %llu bytes after the document index; expected none", path, (unsigned long long)rest);
	if (!entries)
		return fail("%s: no document index; expected it to begin with 0", path);
	t->documents = entries - 1;
	t->count = t->bin.size / token_width(t);
	return 0;
}

/* Checks every entry of an index against the size of its .bin. */
static int index_check(const struct tokens *t, const char *path)
{
	const struct index x = index_of(t);
	const int64_t width = token_width(t), bin_bytes = t->bin.size;
	int64_t at = 0;
	for (uint64_t i = 0; i < x.sequences; i++) {
		int64_t length = load_i32(x.lengths + 4 * i), pointer = load_i64(x.pointers + 8 * i);
		if (length < 0)
			return fail("%s: sequence %llu: length %lld; expected at least 0", path, (unsigned long long)i,
					(long long)length);
		if (pointer != at)
			return fail("%s: sequence %llu: begins at byte %lld; expected %lld, where the one before ends", path,
					(unsigned long long)i, (long long)pointer, (long long)at);
		if (length > (bin_bytes - at) / width)
			return fail("%s: sequence %llu: %lld tokens at byte %lld reach beyond the .bin file's %lld bytes", path,
					(unsigned long long)i, (long long)length, (long long)at, (long long)bin_bytes);
		at += length * width;
	}
	if (at != bin_bytes)
		return fail("%s: the sequences have %lld bytes but the .bin file has %lld", path, (long long)at,
				(long long)bin_bytes);
	for (uint64_t i = 0, before = 0; i < x.entries; i++) {
		uint64_t d = load_i64(x.documents + 8 * i);
		if (d < before || d > x.sequences || (i == 0 && d) || (i == x.entries - 1 && d != x.sequences))
			return fail("%s: document entry %llu is %lld; expected entries to rise from 0 to %llu, the number of sequences",
					path, (unsigned long long)i, (long long)d, (unsigned long long)x.sequences);
		before = d;
	}
	return 0;
}

/* Checks llm.c's header; sets dtype and count. */
static int llm_c_header(struct tokens *t)
{
	const size_t size = t->bin.size;
	const int32_t magic = size < LLM_C_HEADER ? 0 : load_i32(t->bin.data);
	for (size_t i = 0; i < sizeof llm_c_headers / sizeof *llm_c_headers; i++) {
		if (magic != llm_c_headers[i].magic)
			continue;
		const int32_t version = load_i32(t->bin.data + 4), count = load_i32(t->bin.data + 8);
		if (version != llm_c_headers[i].version)
			return fail("%s: an llm.c file of version %d; expected %d with the magic number %d", t->path, version, llm_c_headers[i].version, magic);
		t->dtype = llm_c_headers[i].dtype;
		if (count < 0 || (uint64_t)count * token_width(t) != size - LLM_C_HEADER)
			return fail("%s: the header tells of %d ids of %d bytes; %zu bytes follow it: the file is damaged", t->path, count,
					(int)token_width(t), size - LLM_C_HEADER);
		t->ids = t->bin.data + LLM_C_HEADER;
		t->count = count;
		return 0;
	}
	return fail("%s: found neither an index (.idx) beside it nor the header of an llm.c file; a file of bare ids must be given with its type: "
			"{path: ..., dtype: uint16}", t->path);
}

int stamp_file(struct stamp *s, const char *path)
{
	struct stat st;
	if (stat(path, &st) < 0) {
		*s = (struct stamp){-1, {0, 0}};
		return errno == ENOENT ? 0 : fail("%s: cannot stat: %s", path, strerror(errno));
	}
	*s = (struct stamp){st.st_size, st.st_mtim};
	return 0;
}

int stamps_take(struct stamp stamps[NUM_STAMPS], const char *path, const char *prefix, int format)
{
	char name[PATH_LEN];
	for (int i = 0; i < NUM_STAMPS; i++) {
		if (i == STAMP_IDX && format != MEGATRON)
			stamps[i] = (struct stamp){-1, {0, 0}};
		else if (path_suffix(name, prefix, stamp_suffixes[i]) < 0 || stamp_file(&stamps[i], i == STAMP_BIN ? path : name) < 0)
			return -1;
	}
	return 0;
}

/* Finds out what `path` names, maps its files, and checks their headers. Sets prefix, and stamps as they were before the files were mapped. */
static int tokens_map(struct tokens *t, const char *path, const char *dtype, char prefix[PATH_LEN], struct stamp stamps[NUM_STAMPS])
{
	char name[PATH_LEN];
	const size_t n = strlen(path);
	struct stat st;
	if (path_suffix(t->path, path, "") < 0 || path_suffix(prefix, path, "") < 0)
		return -1;
	if (n > 4 && !strcmp(path + n - 4, ".bin"))
		prefix[n - 4] = 0;
	if (path_suffix(name, prefix, ".idx") < 0)
		return -1;
	const bool bare = strcmp(dtype, "none"), there = stat(path, &st) == 0 && !S_ISDIR(st.st_mode);
	t->format = bare ? BARE_IDS : there && access(name, F_OK) < 0 ? LLM_C : MEGATRON;
	if ((t->format == MEGATRON && path_suffix(t->path, prefix, ".bin") < 0) || stamps_take(stamps, t->path, prefix, t->format) < 0 ||
			map_file(t->path, &t->bin.data, &t->bin.size) < 0)
		return -1;
	t->ids = t->bin.data;
	t->documents = t->document_token = -1;
	if (t->format == MEGATRON && (map_file(name, &t->idx.data, &t->idx.size) < 0 || index_header(t, name) < 0))
		return -1;
	if (t->format == LLM_C && llm_c_header(t) < 0)
		return -1;
	if (t->format == BARE_IDS) {
		if (!(t->dtype = token_type(dtype)))
			return fail("%s: dtype `%s` is not known; expected an integer type such as uint16", path, dtype);
		if (t->bin.size % token_width(t))
			return fail("%s: its %zu bytes are no whole number of %s ids", path, t->bin.size, dtype);
		t->count = t->bin.size / token_width(t);
	}
	if (path_suffix(name, prefix, stamp_suffixes[STAMP_MASK]) < 0)
		return -1;
	if (stamps[STAMP_MASK].size >= 0) {
		if (map_file(name, &t->mask.data, &t->mask.size) < 0)
			return -1;
		if ((int64_t)t->mask.size != t->count)
			return fail("%s: %zu bytes; expected one for each of the %lld ids of %s", name, t->mask.size, (long long)t->count, t->path);
		t->learned = t->mask.data;
	}
	return 0;
}

/* The largest of ids [i, end), which are at most 2^63 - 1; a negative one is huge here. */
static uint64_t largest_id(const struct tokens *t, int64_t i, int64_t end)
{
	uint64_t largest = 0;
	switch (t->dtype) {
#define LARGEST_ID(code, name, type) case code: \
		for (const type *id = (const type *)t->ids; i < end; i++) \
			largest = (uint64_t)(int64_t)id[i] > largest ? (uint64_t)(int64_t)id[i] : largest; \
		break;
	TOKEN_TYPES(LARGEST_ID)
#undef LARGEST_ID
	}
	return largest;
}

int64_t id_at(const struct tokens *t, int64_t i)
{
	switch (t->dtype) {
#define ID_AT(code, name, type) case code: return (int64_t)((const type *)t->ids)[i];
	TOKEN_TYPES(ID_AT)
#undef ID_AT
	}
	return -1;
}

/* Reports the first of ids [i, t->count) that is outside the vocabulary. */
static int fail_id(const struct tokens *t, int64_t i, int64_t limit, const char *whose)
{
	while (i < t->count - 1 && (uint64_t)id_at(t, i) < (uint64_t)limit)
		i++;
	return fail("%s: token %lld: id %lld is outside the vocabulary of %lld that %s has; expected 0 to %lld", t->path, (long long)i,
			(long long)id_at(t, i), (long long)limit, whose, (long long)limit - 1);
}

/* What is known of a block of ids. */
struct scanned { uint32_t crc32, mask_crc32; uint64_t largest; int64_t learned; };

static struct scanned scan_block(const struct tokens *t, int64_t begin, int64_t end)
{
	const int64_t cached = 1 << 14, width = token_width(t);
	struct scanned s = {0};
	for (int64_t i = begin, next; i < end; i = next) { /* in pieces that stay in the cache: two passes, or four, over each */
		next = end - i < cached ? end : i + cached;
		const uint64_t largest = largest_id(t, i, next);
		s.largest = largest > s.largest ? largest : s.largest;
		s.crc32 = crc32_z(s.crc32, t->ids + i * width, (next - i) * width);
		if (t->learned)
			s.mask_crc32 = crc32_z(s.mask_crc32, t->learned + i, next - i);
		for (int64_t k = i; k < next; k++)
			s.learned += t->learned ? t->learned[k] : 1;
	}
	return s;
}

/* Goes once through the ids and the mask, with all cores. */
static struct scanned tokens_scan(const struct tokens *t)
{
	enum { ROUND = 64 };           /* blocks between two looks at the clock */
	struct scanned all = {0}, block[ROUND];
	struct progress p = progress_start("checking the tokens", t->count * token_width(t));
	for (int64_t first = 0; first < t->count; first += (int64_t)ROUND * SCAN_BLOCK) {
		const int64_t left = (t->count - first + SCAN_BLOCK - 1) / SCAN_BLOCK, n = left < ROUND ? left : ROUND;
		#pragma omp parallel for schedule(dynamic)
		for (int64_t i = 0; i < n; i++) {
			const int64_t begin = first + i * SCAN_BLOCK;
			block[i] = scan_block(t, begin, t->count - begin < SCAN_BLOCK ? t->count : begin + SCAN_BLOCK);
		}
		for (int64_t i = 0; i < n; i++) {
			const int64_t begin = first + i * SCAN_BLOCK, ids = t->count - begin < SCAN_BLOCK ? t->count - begin : SCAN_BLOCK;
			all.crc32 = crc32_combine(all.crc32, block[i].crc32, ids * token_width(t));
			all.mask_crc32 = crc32_combine(all.mask_crc32, block[i].mask_crc32, ids);
			all.largest = block[i].largest > all.largest ? block[i].largest : all.largest;
			all.learned += block[i].learned;
			progress(&p, ids * token_width(t));
		}
	}
	progress_end(&p);
	return all;
}

/* Makes the pass over the files that a manifest spares: *found is what they are. */
static int tokens_examine(const struct tokens *t, const char *prefix, struct manifest *found)
{
	char name[PATH_LEN];
	if (t->format == MEGATRON && (path_suffix(name, prefix, ".idx") < 0 || index_check(t, name) < 0))
		return -1;
	const struct scanned s = tokens_scan(t);
	found->dtype = t->dtype, found->tokens = t->count, found->documents = t->documents;
	found->crc32 = s.crc32, found->mask_crc32 = s.mask_crc32, found->learned = s.learned;
	found->largest_id = s.largest < INT64_MAX ? s.largest : INT64_MAX;
	for (int64_t i = 0; t->learned && i < t->count; i++)
		if (t->learned[i] > 1)
			return fail("%s.mask.bin: byte %lld is %d; expected 0 or 1", prefix, (long long)i, t->learned[i]);
	return 0;
}

/* Leaves what was found for the next time. A folder that cannot be written to is no error. */
static void manifest_leave(const struct manifest *m, const char *path)
{
	char temporary[PATH_LEN], suffix[32], kept[sizeof error_text];
	memcpy(kept, error_text, sizeof kept);
	snprintf(suffix, sizeof suffix, ".tmp-%ld", (long)getpid()); /* several processes may open the file at once */
	if (path_suffix(temporary, path, suffix) == 0 && manifest_write(m, temporary) == 0 && rename(temporary, path) < 0)
		unlink(temporary);
	memcpy(error_text, kept, sizeof kept);
}

/* tokens_open, without the clean-up on error. */
static int tokens_load(struct tokens *t, const char *path, const char *dtype, int vocab_size)
{
	char prefix[PATH_LEN], manifest_path[PATH_LEN];
	struct manifest m, found = {0};
	if (tokens_map(t, path, dtype, prefix, found.stamps) < 0 || path_suffix(manifest_path, prefix, ".json") < 0)
		return -1;
	const int there = manifest_read(&m, manifest_path);
	if (there < 0)
		return -1;
	const bool vouched = there && same_stamps(m.stamps, found.stamps) && m.tokens == t->count && m.documents == t->documents && m.dtype == t->dtype;
	if (!vouched) {
		if (tokens_examine(t, prefix, &found) < 0)
			return -1;
		if (there && *m.tokenizer) {
			if (manifest_check(&m, &found, manifest_path, t->path) < 0)
				return -1;
			memcpy(found.tokenizer, m.tokenizer, sizeof found.tokenizer);
			found.tokenizer_hash = m.tokenizer_hash, found.vocab_size = m.vocab_size, found.bytes = m.bytes;
		}
		m = found;
	}
	if (manifest_check_bytes(&m, manifest_path) < 0)
		return -1;
	const bool narrower = *m.tokenizer && m.vocab_size < vocab_size;
	const int64_t limit = narrower ? m.vocab_size : vocab_size;
	if (m.largest_id >= limit)
		return fail_id(t, 0, limit, narrower ? "its manifest" : "the model");
	if (!vouched)
		manifest_leave(&m, manifest_path);
	memcpy(t->tokenizer, m.tokenizer, sizeof t->tokenizer);
	t->tokenizer_hash = m.tokenizer_hash;
	t->vocab_size = vocab_size;
	t->crc32 = crc32_combine(m.crc32, m.mask_crc32, t->mask.size);
	return 0;
}

int tokens_open(struct tokens *t, const char *path, const char *dtype, int vocab_size)
{
	memset(t, 0, sizeof *t);
	if (tokens_load(t, path, dtype, vocab_size) == 0)
		return 0;
	tokens_close(t);
	return -1;
}

void tokens_close(struct tokens *t)
{
	unmap_file(t->bin.data, t->bin.size);
	unmap_file(t->idx.data, t->idx.size);
	unmap_file(t->mask.data, t->mask.size);
	memset(t, 0, sizeof *t);
}

/* -- reading -- */

int tokens_read(const struct tokens *t, int64_t start, int64_t n, int32_t *out)
{
	switch (t->dtype) {
#define READ(code, name, type) case code: \
		for (int64_t i = 0; i < n; i++) \
			out[i] = (int32_t)((const type *)t->ids)[start + i]; \
		break;
	TOKEN_TYPES(READ)
#undef READ
	}
	return largest_id(t, start, start + n) < (uint64_t)t->vocab_size ? 0 : fail_id(t, start, t->vocab_size, "the model");
}

void tokens_mask(const struct tokens *t, int64_t start, int64_t n, int32_t *target)
{
	for (int64_t i = 0; t->learned && i < n; i++)
		if (!t->learned[start + 1 + i])
			target[i] = -1;
}

/* The token that document i begins with, 0 <= i <= t->documents. The index was checked, but files can change. */
static int document_begin(const struct tokens *t, int64_t i, int64_t *begin)
{
	const struct index x = index_of(t);
	const uint64_t sequence = load_i64(x.documents + 8 * i);
	*begin = sequence < x.sequences ? load_i64(x.pointers + 8 * sequence) / token_width(t) : t->count;
	if (x.entries != (uint64_t)t->documents + 1 || sequence > x.sequences || *begin < 0 || *begin > t->count)
		return fail("%s: its index was changed while it was in use: document %lld begins with sequence %llu", t->path, (long long)i,
				(unsigned long long)sequence);
	return 0;
}

/* The same from an index: a search for the document of the first token, then the next ones. */
static int indexed_documents(const struct tokens *t, int64_t start, int64_t n, int32_t *document, int32_t *target)
{
	int64_t low = 0, high = t->documents, begin = 0, next;
	while (high - low > 1) { /* the document of token `start` is among low .. high - 1 */
		const int64_t middle = low + (high - low) / 2;
		if (document_begin(t, middle, &begin) < 0)
			return -1;
		if (begin <= start)
			low = middle;
		else
			high = middle;
	}
	if (document_begin(t, low + 1, &next) < 0)
		return -1;
	begin = 0;
	for (int64_t i = 0; i <= n; i++) {
		while (next <= start + i && low + 1 < t->documents) {
			begin = next - start;
			if (document_begin(t, ++low + 1, &next) < 0)
				return -1;
		}
		if (i > 0 && begin == i)
			target[i - 1] = -1;
		if (i < n)
			document[i] = begin > 0 ? begin : 0;
	}
	return 0;
}

int tokens_documents(const struct tokens *t, int64_t start, int64_t n, int32_t *document, int32_t *target)
{
	if (t->format == MEGATRON)
		return indexed_documents(t, start, n, document, target);
	int32_t begin = 0;
	for (int64_t i = 0; i < n; i++) {
		const bool separator = id_at(t, start + i) == t->document_token;
		if (t->format == LLM_C && separator)
			begin = i;
		document[i] = begin;
		if (t->format == BARE_IDS && separator) {
			begin = i + 1;
			target[i] = -1;
		}
	}
	return 0;
}

/* -- making them -- */

/* ============================================================================================================
 * Tasks: a YAML file that says what is asked, JSON lines that hold the samples
 * ========================================================================================================== */

#define TASK_KEY(...) KEY_OF(struct task, __VA_ARGS__)

static const char *const task_types[] = {"multiple_choice", "perplexity", "exact_match", NULL};
static const char *const answer_forms[] = {"index", "number", "letter", "text", NULL};
static const char *const match_names[] = {"first", "last", NULL};

/* REQUIRED: by each task whose type the key is of. */
static const struct key task_keys[] = {
	TASK_KEY(name, T_TEXT, 0, 0, NEEDED, NULL, "what the results call it"),
	TASK_KEY(type, T_ENUM, 0, 0, NEEDED, NULL, "how it is scored", .names = task_types),
	TASK_KEY(data, T_TEXT, 0, 0, NEEDED, NULL, "JSON lines, one sample each; the path begins at the task file"),
	TASK_KEY(limit, T_INT64, 0, 1e12, NONE, "off", "score only this many first samples"),
	TASK_KEY(text, T_STRING, 0, 0, OF_PERPLEXITY, "{text}", "template of the document"),
	TASK_KEY(stride, T_INT64, 0, 1e9, NONE | OF_PERPLEXITY, "off", "tokens that each window after the first scores; off: all of the window"),
	TASK_KEY(prompt, T_STRING, 0, 0, REQUIRED | OF_CHOICE | OF_MATCH, NULL, "template of what the model is given"),
	TASK_KEY(options, T_STRINGS, 0, 0, REQUIRED | OF_CHOICE, NULL, "the field that holds the list of options; or a list of templates, one for each"),
	TASK_KEY(option, T_STRING, 0, 0, OF_CHOICE, "{option}", "template of an option, {option} being the field's item"),
	TASK_KEY(answer, T_STRING, 0, 0, REQUIRED | OF_CHOICE | OF_MATCH, NULL,
		"the field that holds the right option; or the right answer, or a list of right ones"),
	TASK_KEY(answer_form, T_ENUM, 0, 0, OF_CHOICE, "index", "how it says which: index from 0, number from 1, letter from A, or the option's text",
		.names = answer_forms),
	TASK_KEY(target, T_STRING, 0, 0, NONE | OF_MATCH, "off", "template of the reply in an example; off: the first right answer"),
	TASK_KEY(max_tokens, T_INT, 1, 1e6, OF_MATCH, "256", "longest reply"),
	TASK_KEY(stop, T_STRINGS, 0, 0, NONE | OF_MATCH, "off", "texts at which the reply ends"),
	TASK_KEY(extract, T_STRING, 0, 0, NONE | OF_MATCH, "off", "PCRE2 pattern whose group 1 is the reply's answer; off: all of the reply"),
	TASK_KEY(extract_answer, T_STRING, 0, 0, NONE | OF_MATCH, "off", "the same for what the answer's field holds"),
	TASK_KEY(match, T_ENUM, 0, 0, OF_MATCH, "first", "the match of extract that counts", .names = match_names),
	SECTION("normalize", OF_MATCH, "how reply and answers are made plain before they are compared"),
	TASK_KEY(normalize.strip, T_BOOL, 0, 1, 0, "true", "without white space at both ends"),
	TASK_KEY(normalize.lowercase, T_BOOL, 0, 1, 0, "false", "ASCII letters small"),
	TASK_KEY(normalize.punctuation, T_BOOL, 0, 1, 0, "true", "with punctuation; false: ASCII punctuation is left out"),
	SECTION("examples", NONE | OF_CHOICE | OF_MATCH, "solved samples in front of the prompt"),
	TASK_KEY(examples.count, T_INT, 1, 1000, NEEDED, NULL, "how many"),
	TASK_KEY(examples.data, T_TEXT, 0, 0, NONE, "off", "JSON lines to choose them from; off: the task's data"),
	TASK_KEY(examples.seed, T_UINT64, 0, 18446744073709551615.0, 0, "1", "of the choice"),
	TASK_KEY(separator, T_STRING, 0, 0, OF_CHOICE | OF_MATCH, "\n\n", "text between examples and before the prompt"),
	TASK_KEY(chat, T_BOOL, 0, 1, OF_CHOICE | OF_MATCH, "false", "prompts are a user's messages, targets and replies the assistant's"),
};

static int load_tasks(struct loader *l);
static const struct table task_table = {task_keys, sizeof task_keys / sizeof *task_keys, load_tasks};
_Static_assert(sizeof task_keys / sizeof *task_keys <= MAX_KEYS, "the places of all keys must fit");

static const struct key tasks_key = {.name = "tasks", .type = T_TASKS};

/* ------------------------------------------------------------------------------------------------ templates */

/* The next piece of a template: text as it stands, up to a field, {{ or }}; and the field's name, or NULL. False at the end, and at what is no
 * template, which is told in *wrong. */
struct piece_of_template { const char *text, *field; size_t text_size, field_size; };
static bool next_piece(const char **at, struct piece_of_template *p, const char **wrong)
{
	*p = (struct piece_of_template){.text = *at, .text_size = strcspn(*at, "{}")};
	*at += p->text_size;
	const char brace = **at;
	if (!brace)
		return p->text_size > 0;
	if ((*at)[1] == brace) { /* doubled, it stands for itself */
		p->text_size++;
		*at += 2;
		return true;
	}
	const size_t n = brace == '{' ? strcspn(*at + 1, "{}\n") : 0;
	if (!n || (*at)[1 + n] != '}') {
		*wrong = brace == '}' ? "a } without a {; write }} for a } that is text"
				: "a { that begins no {field}; write {{ for a { that is text";
		return false;
	}
	p->field = *at + 1, p->field_size = n;
	*at += n + 2;
	return true;
}

/* Appends a value that is a text, number, true or false. Where it is none, or missing (NULL), that is an error, which begins with `where` and
 * names the field. */
static int value_append(const json_t *value, const char *field, size_t n, const char *where, struct text *out)
{
	char number[40];
	if (json_is_string(value)) {
		text_append(out, json_string_value(value), json_string_length(value));
		return 0;
	}
	if (json_is_integer(value))
		snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
	else if (json_is_real(value)) {
		/* the shortest that gives the same number */
		for (int digits = 15; digits <= 17; digits++)
			if (snprintf(number, sizeof number, "%.*g", digits, json_real_value(value)), strtod(number, NULL) == json_real_value(value))
				break;
	} else if (json_is_boolean(value))
		strcpy(number, json_is_true(value) ? "true" : "false");
	else
		return fail("%s: the field `%.*s` is %s; expected a string, a number, true or false", where, n < 100 ? (int)n : 100, field, json_kind(value));
	append_string(out, number);
	return 0;
}

/* Appends a template, which check_template has passed, in the words of a sample. The field {option} is the item, if there is one. */
static int template_append(const char *template, const json_t *sample, const json_t *item, const char *where, struct text *out)
{
	static const char option[] = "option";
	const size_t length = sizeof option - 1;
	const char *wrong;
	for (struct piece_of_template p; next_piece(&template, &p, &wrong);) {
		text_append(out, p.text, p.text_size);
		if (!p.field)
			continue;
		const json_t *value;
		if (item && p.field_size >= length && !memcmp(p.field, option, length) && (p.field_size == length || p.field[length] == '.'))
			value = p.field_size == length ? item : json_at_part(item, p.field + length + 1, p.field_size - length - 1);
		else
			value = json_at_part(sample, p.field, p.field_size);
		if (value_append(value, p.field, p.field_size, where, out) < 0)
			return -1;
	}
	return 0;
}

/* ------------------------------------------------------------------------------------------------- patterns */

/* Compiles a pattern. NULL with what is wrong with it. */
static pcre2_code *pattern_compile(const char *pattern, char wrong[160])
{
	int error;
	uint32_t groups = 0;
	PCRE2_SIZE offset;
	pcre2_code *code = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_MATCH_INVALID_UTF, &error, &offset, NULL);
	if (!code) {
		PCRE2_UCHAR message[120];
		pcre2_get_error_message(error, message, sizeof message);
		snprintf(wrong, 160, "%s at byte %zu", (const char *)message, (size_t)offset);
		return NULL;
	}
	pcre2_pattern_info(code, PCRE2_INFO_CAPTURECOUNT, &groups);
	if (groups)
		return code;
	pcre2_code_free(code);
	strcpy(wrong, "without a group: put ( ) around what is to be extracted");
	return NULL;
}

/* Appends group 1 of the pattern's first or last match in a text. False where it does not match, or takes too long to. */
static bool pattern_extract(const char *pattern, enum which_match which, const struct text *in, struct text *out)
{
	char wrong[160];
	pcre2_code *code = pattern_compile(pattern, wrong); /* check_pattern has passed it */
	pcre2_match_data *match = code ? pcre2_match_data_create_from_pattern(code, NULL) : NULL;
	size_t begin = 0, size = 0;
	bool is_found = false;
	for (size_t at = 0; match && at <= in->size && !(is_found && which == MATCH_FIRST);) {
		if (pcre2_match(code, (PCRE2_SPTR)(in->data ? in->data : ""), in->size, at, 0, match, NULL) < 0)
			break;
		const PCRE2_SIZE *v = pcre2_get_ovector_pointer(match);
		if (v[2] != PCRE2_UNSET && v[3] >= v[2])
			is_found = true, begin = v[2], size = v[3] - v[2];
		at = v[1] > at ? v[1] : at + 1; /* an empty match, or one that \K moved: on by a character */
		while (at < in->size && ((uint8_t)in->data[at] & 0xc0) == 0x80)
			at++;
	}
	if (is_found)
		text_append(out, in->data ? in->data + begin : "", size);
	pcre2_match_data_free(match);
	pcre2_code_free(code);
	return is_found;
}

static bool is_ascii_space(char c)
{
	return c == ' ' || (c >= '\t' && c <= '\r');
}

/* The bounds of a text without white space at both ends. */
static void strip(const struct text *t, size_t *begin, size_t *end)
{
	*begin = 0, *end = t->size;
	while (*begin < *end && is_ascii_space(t->data[*begin]))
		++*begin;
	while (*end > *begin && is_ascii_space(t->data[*end - 1]))
		--*end;
}

/* Makes a text plain, in place: punctuation, letters, then the ends. */
static void normalize(const struct task *t, struct text *text)
{
	size_t n = 0, begin = 0;
	for (size_t i = 0; i < text->size; i++) {
		const char c = text->data[i];
		if (t->normalize.punctuation || !ispunct((uint8_t)c))
			text->data[n++] = t->normalize.lowercase ? (char)tolower((uint8_t)c) : c;
	}
	text->size = n;
	if (t->normalize.strip)
		strip(text, &begin, &n);
	if (text->data) {
		memmove(text->data, text->data + begin, n - begin);
		text->data[n - begin] = 0;
	}
	text->size = n - begin;
}

bool task_reply_is_right(const struct task *t, const struct sample *s, const struct text *reply, struct text *extracted, bool *found)
{
	*found = true;
	if (t->extract)
		*found = pattern_extract(t->extract, t->match, reply, extracted);
	else
		text_append(extracted, reply->data ? reply->data : "", reply->size);
	normalize(t, extracted);
	for (int i = 0; *found && i < s->num_choices; i++)
		if (s->choice[i].size == extracted->size && !memcmp(s->choice[i].data, extracted->data, extracted->size))
			return true;
	return false;
}

/* ------------------------------------------------------------------------------------------- the task file */

/* Fails when a template or pattern that a key holds is none. */
static int check_template(const struct loader *l, const char *key, const char *template)
{
	const char *wrong = NULL;
	struct piece_of_template p;
	if (!template)
		return 0;
	while (next_piece(&template, &p, &wrong))
		continue;
	return wrong ? fail_key(l, key, "found %s", wrong) : 0;
}

static int check_pattern(const struct loader *l, const char *key, const char *pattern)
{
	char wrong[160];
	pcre2_code *code = pattern ? pattern_compile(pattern, wrong) : NULL;
	if (pattern && !code)
		return fail_key(l, key, "found a pattern %s", wrong);
	pcre2_code_free(code);
	return 0;
}

/* The path of a file that the task file names. */
static int task_path(const struct loader *l, char path[PATH_LEN])
{
	char dir[PATH_LEN], name[PATH_LEN];
	if (!*path || *path == '/')
		return 0;
	parent_of(dir, l->path);
	memcpy(name, path, PATH_LEN);
	return !strcmp(dir, ".") ? 0 : path_join(path, dir, name);
}

/* Checks what one key alone cannot tell of a task that begins at `start`. */
static int check_task(const struct loader *l, struct task *t, struct place start)
{
	const int kinds = OF_CHOICE | OF_PERPLEXITY | OF_MATCH;
	const int kind = t->type == TASK_MULTIPLE_CHOICE ? OF_CHOICE : t->type == TASK_PERPLEXITY ? OF_PERPLEXITY : OF_MATCH;
	for (int i = 0; i < task_table.num_keys; i++) {
		const struct key *k = &task_keys[i];
		if (l->places[i].source && k->flags & kinds && !(k->flags & kind))
			return fail_key(l, k->name, "found in a task of type %s, which has no use for it: take it away", task_types[t->type]);
		if (!l->places[i].source && k->flags & REQUIRED && k->flags & kind)
			return fail_at(start, "the key %s is missing here: %s", k->name, k->help);
	}
	if (!t->options.list && l->places[find_in(l->table, "options") - task_keys].source && !t->options.count)
		return fail_key(l, "options", "found nothing; expected a field's name or a list of templates");
	if (t->options.list && l->places[find_in(l->table, "option") - task_keys].source)
		return fail_key(l, "option", "found beside a list of templates; expected it where options is the name of a field");
	if (t->chat && l->places[find_in(l->table, "separator") - task_keys].source)
		return fail_key(l, "separator", "found beside chat: true, where messages are kept apart by their roles: take it away");
	if (t->answer && !*t->answer)
		return fail_key(l, "answer", "found nothing; expected the name of a field");
	if (t->match == MATCH_LAST && !t->extract)
		return fail_key(l, "match", "found last; expected it beside extract");
	for (int64_t i = 0; t->options.list && i < t->options.count; i++)
		if (check_template(l, "options", t->options.text[i]) < 0)
			return -1;
	if (check_template(l, "prompt", t->prompt) < 0 || check_template(l, "text", t->text) < 0 || check_template(l, "option", t->option) < 0 ||
			check_template(l, "target", t->target) < 0 || check_pattern(l, "extract", t->extract) < 0 ||
			check_pattern(l, "extract_answer", t->extract_answer) < 0)
		return -1;
	return task_path(l, t->data) < 0 || task_path(l, t->examples.data) < 0 ? -1 : 0;
}

/* Reads the items of the list of tasks up to its end; it has begun. */
static int load_tasks(struct loader *l)
{
	struct tasks *tasks = l->structure;
	while (advance(l) == 0) {
		if (l->event.type == YAML_SEQUENCE_END_EVENT)
			return tasks->count ? 0 : fail_at(here(l), "found an empty list; expected at least one task");
		if (l->event.type != YAML_MAPPING_START_EVENT)
			return fail_value(l, &tasks_key, "as an item");
		tasks->task = grow(tasks->task, tasks->count, &tasks->capacity, 1, sizeof *tasks->task);
		struct task *t = &tasks->task[tasks->count++];
		*t = (struct task){0};
		memset(l->places, 0, sizeof l->places);
		l->structure = t;
		for (int i = 0; i < task_table.num_keys; i++)
			set_default(t, &task_keys[i], false);
		const struct place start = here(l);
		if (load_mapping(l, &root_key) < 0 || check_task(l, t, start) < 0)
			return -1;
		for (const struct task *other = tasks->task; other < t; other++)
			if (!strcmp(other->name, t->name))
				return fail_key(l, "name", "found %s twice; expected each task to have its own", t->name);
	}
	return -1;
}

void tasks_print_keys(FILE *out)
{
	static const int kinds[] = {OF_CHOICE, OF_PERPLEXITY, OF_MATCH};
	char type[256];
	for (const struct key *k = task_keys; k < task_keys + task_table.num_keys; k++) {
		const char *standard = k->flags & (REQUIRED | NEEDED) ? "required" : k->fallback && *k->fallback == '\n' ? "\\n\\n" : k->fallback;
		const char *separator = "; of ";
		fprintf(out, "  %-21s %-10s %s (%s", k->name, standard ? standard : "", k->help, describe(type, k));
		for (int i = 0; i < 3; i++)
			if (k->flags & kinds[i])
				fprintf(out, "%s%s", separator, task_types[i]), separator = ", ";
		fprintf(out, ")\n");
	}
}

/* --------------------------------------------------------------------------------------------------- samples */

/* The right option, as the answer's field says it. */
static int find_answer(const struct task *t, const json_t *value, const char *where, struct sample *s)
{
	struct text text = {0};
	size_t begin, end;
	if (value_append(value, t->answer, strlen(t->answer), where, &text) < 0)
		return -1;
	strip(&text, &begin, &end);
	const char *word = text.data ? text.data + begin : "";
	const size_t n = end - begin;
	int64_t answer = -1;
	for (int i = 0; i < s->num_choices && answer < 0 && t->answer_form == ANSWER_TEXT; i++) {
		size_t first, last;
		strip(&s->choice[i], &first, &last);
		if (last - first == n && !memcmp(s->choice[i].data + first, word, n))
			answer = i;
	}
	if (t->answer_form == ANSWER_LETTER && n == 1 && isalpha((uint8_t)*word))
		answer = toupper((uint8_t)*word) - 'A';
	if (t->answer_form <= ANSWER_NUMBER && n && n < 10 && strspn(word, "0123456789") == n)
		answer = atoi(word) - (t->answer_form == ANSWER_NUMBER);
	s->answer = (int)answer;
	int rc = 0;
	if (answer < 0 || answer >= s->num_choices) {
		char expected[64], shown[64];
		if (t->answer_form == ANSWER_TEXT)
			snprintf(expected, sizeof expected, "the text of one of the %d options", s->num_choices);
		else if (t->answer_form == ANSWER_LETTER)
			snprintf(expected, sizeof expected, "a letter from A to %c", 'A' - 1 + (s->num_choices < 26 ? s->num_choices : 26));
		else
			snprintf(expected, sizeof expected, "%d to %d", t->answer_form == ANSWER_NUMBER, s->num_choices - (t->answer_form == ANSWER_INDEX));
		rc = fail("%s: `%s` is \"%s\"; expected %s, as answer_form is %s", where, t->answer, printable(shown, word), expected,
				answer_forms[t->answer_form]);
	}
	free(text.data);
	return rc;
}

/* The options of a sample, and which is right. */
static int make_options(const struct task *t, const json_t *object, const char *where, struct sample *s)
{
	const json_t *list = t->options.list ? NULL : json_at(object, *t->options.text);
	if (!t->options.list && !json_is_array(list))
		return fail("%s: the field `%s` is %s; expected the list of options", where, *t->options.text, json_kind(list));
	const size_t n = list ? json_array_size(list) : (size_t)t->options.count;
	if (n < 2 || n > 1000)
		return fail("%s: found %zu option%s; expected 2 to 1000", where, n, n == 1 ? "" : "s");
	s->choice = allocate(n * sizeof *s->choice);
	s->num_choices = (int)n;
	for (size_t i = 0; i < n; i++) {
		if (template_append(list ? t->option : t->options.text[i], object, json_array_get(list, i), where, &s->choice[i]) < 0)
			return -1;
		if (!s->choice[i].size)
			return fail("%s: option %zu is empty; expected text to score", where, i + 1);
	}
	if (find_answer(t, json_at(object, t->answer), where, s) < 0)
		return -1;
	text_append(&s->target, s->choice[s->answer].data, s->choice[s->answer].size);
	return 0;
}

/* The answers of a sample that are right, made plain, and its reply as an example. */
static int make_answers(const struct task *t, const json_t *object, const char *where, struct sample *s)
{
	const json_t *value = json_at(object, t->answer);
	const int n = json_is_array(value) ? (int)json_array_size(value) : 1;
	if (!n)
		return fail("%s: the field `%s` is an empty list; expected at least one right answer", where, t->answer);
	s->choice = allocate(n * sizeof *s->choice);
	s->num_choices = n;
	for (int i = 0; i < n; i++) {
		struct text *answer = &s->choice[i], whole = {0};
		if (value_append(json_is_array(value) ? json_array_get(value, i) : value, t->answer, strlen(t->answer), where, &whole) < 0)
			return -1;
		if (i == 0 && !t->target)
			text_append(&s->target, whole.data, whole.size);
		if (!t->extract_answer) {
			*answer = whole;
		} else {
			const bool is_found = pattern_extract(t->extract_answer, MATCH_FIRST, &whole, answer);
			free(whole.data);
			if (!is_found)
				return fail("%s: extract_answer does not match what `%s` holds", where, t->answer);
		}
		normalize(t, answer);
	}
	return t->target ? template_append(t->target, object, NULL, where, &s->target) : 0;
}

/* Adds the sample that a line holds. */
static int add_sample(const struct task *t, struct samples *samples, const char *path, int64_t line, const char *json, size_t n)
{
	char where[PATH_LEN + 24];
	json_error_t error;
	snprintf(where, sizeof where, "%s:%" PRId64, path, line);
	json_t *object = json_loadb(json, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
	int rc;
	if (!object)
		rc = fail("%s: bad JSON: %s", where, error.text);
	else if (!json_is_object(object))
		rc = fail("%s: is %s; expected an object, one sample", where, json_kind(object));
	else {
		samples->sample = grow(samples->sample, samples->count, &samples->capacity, 1, sizeof *samples->sample);
		struct sample *s = &samples->sample[samples->count++];
		*s = (struct sample){.line = line};
		rc = template_append(t->type == TASK_PERPLEXITY ? t->text : t->prompt, object, NULL, where, &s->prompt);
		if (rc == 0 && t->type == TASK_PERPLEXITY && !s->prompt.size)
			rc = fail("%s: the document is empty; expected text", where);
		if (rc == 0 && t->type != TASK_PERPLEXITY)
			rc = t->type == TASK_MULTIPLE_CHOICE ? make_options(t, object, where, s) : make_answers(t, object, where, s);
	}
	json_decref(object);
	return rc;
}

/* Reads up to `limit` samples (0: all) of a JSONL file; blank lines are skipped. */
static int load_samples(const struct task *t, struct samples *samples, const char *path, int64_t limit)
{
	FILE *f = fopen(path, "re");
	if (!f)
		return fail("%s: cannot open: %s; task %s names it", path, strerror(errno), t->name);
	char *json = NULL;
	size_t capacity = 0;
	ssize_t n = 0;
	int rc = 0;
	errno = 0;
	for (int64_t line = 1; !rc && (!limit || samples->count < limit) && (n = getline(&json, &capacity, f)) >= 0; line++) {
		if (strspn(json, " \t\r\n") < (size_t)n)
			rc = add_sample(t, samples, path, line, json, n);
		errno = 0;
	}
	if (!rc && n < 0 && !feof(f))
		rc = fail("%s: cannot read: %s", path, strerror(errno));
	if (!rc && !samples->count)
		rc = fail("%s: no sample in it; expected JSON lines, one object each, for task %s", path, t->name);
	free(json);
	fclose(f);
	return rc;
}

int tasks_load(struct tasks *tasks, const char *path)
{
	struct loader l = {.table = &task_table, .structure = tasks, .path = path, .source = path};
	*tasks = (struct tasks){0};
	int rc = strlen(path) < PATH_LEN ? load_file(&l, &tasks_key) : fail("%s: path longer than %d bytes", path, PATH_LEN - 1);
	for (int64_t i = 0; rc == 0 && i < tasks->count; i++) {
		struct task *t = &tasks->task[i];
		const bool own_pool = *t->examples.data;
		rc = load_samples(t, &t->samples, t->data, t->examples.count && !own_pool ? 0 : t->limit);
		t->num_samples = t->limit && t->limit < t->samples.count ? t->limit : t->samples.count;
		if (rc == 0 && own_pool)
			rc = load_samples(t, &t->pool, t->examples.data, 0);
	}
	return rc;
}

static void samples_free(struct samples *samples)
{
	for (int64_t n = 0; n < samples->count; n++) {
		struct sample *s = &samples->sample[n];
		for (int i = 0; i < s->num_choices; i++)
			free(s->choice[i].data);
		free(s->choice);
		free(s->prompt.data);
		free(s->target.data);
	}
	free(samples->sample);
}

void tasks_free(struct tasks *tasks)
{
	for (int64_t n = 0; n < tasks->count; n++) {
		struct task *t = &tasks->task[n];
		for (const struct key *k = task_keys; k < task_keys + task_table.num_keys; k++) {
			char *field = (char *)t + k->offset;
			struct strings *s = (struct strings *)field;
			if (k->type == T_STRING)
				free(*(char **)field);
			for (int64_t i = 0; k->type == T_STRINGS && i < s->count; i++)
				free(s->text[i]);
			if (k->type == T_STRINGS)
				free(s->text);
		}
		samples_free(&t->samples);
		samples_free(&t->pool);
	}
	free(tasks->task);
	*tasks = (struct tasks){0};
}

/* --------------------------------------------------------------------------------------------------- results */

static const char *const accuracy_names[NUM_ACCURACIES] = {"log_likelihood", "bytes", "tokens"};

struct results *results_open(const char *dir)
{
	struct results *r = allocate(sizeof *r);
	if (make_directories(dir) == 0 && snprintf(r->dir, PATH_LEN, "%s", dir) < PATH_LEN && path_join(r->samples, dir, "samples.jsonl") == 0 &&
			path_suffix(r->temporary, r->samples, ".tmp") == 0 && (r->f = file_create(r->temporary)))
		return r;
	free(r);
	return NULL;
}

/* A text as a JSON string; bytes that are not UTF-8, as a model's reply may hold, become U+FFFD. */
static json_t *text_to_json(const struct text *t)
{
	struct text clean = {0};
	int32_t code;
	for (size_t i = 0, size; i < t->size; i += size) {
		const int whole = utf8_decode(t->data + i, t->size - i, &code);
		text_append(&clean, whole ? t->data + i : "\xef\xbf\xbd", whole ? whole : 3);
		size = whole ? whole : 1;
	}
	json_t *json = json_stringn(clean.data ? clean.data : "", clean.size);
	free(clean.data);
	return json;
}

static json_t *tokens_to_json(const int32_t *token, int64_t n)
{
	json_t *list = json_array();
	for (int64_t i = 0; i < n; i++)
		json_array_append_new(list, json_integer(token[i]));
	return list;
}

void results_add(struct results *r, const struct task *t, const struct sample_result *s)
{
	json_t *line = json_pack("{s:s, s:I, s:o, s:b}", "task", t->name, "line", (json_int_t)s->sample->line,
			t->type == TASK_PERPLEXITY ? "text" : "prompt", text_to_json(&s->sample->prompt),
			t->type == TASK_PERPLEXITY ? "several_windows" : "context_cut", s->cut);
	if (t->type == TASK_MULTIPLE_CHOICE) {
		json_t *options = json_array(), *prediction = json_object(), *correct = json_object();
		for (int i = 0; i < s->sample->num_choices; i++)
			json_array_append_new(options, json_pack("{s:o, s:f, s:I, s:o}", "text", text_to_json(&s->sample->choice[i]),
					"log_likelihood", s->text[i].log_likelihood, "bytes", (json_int_t)s->sample->choice[i].size,
					"tokens", tokens_to_json(s->text[i].token, s->text[i].num_tokens)));
		for (int i = 0; i < NUM_ACCURACIES; i++) {
			json_object_set_new(prediction, accuracy_names[i], json_integer(s->prediction[i]));
			json_object_set_new(correct, accuracy_names[i], json_boolean(s->prediction[i] == s->sample->answer));
		}
		json_object_set_new(line, "options", options);
		json_object_set_new(line, "answer", json_integer(s->sample->answer));
		json_object_set_new(line, "prediction", prediction);
		json_object_set_new(line, "correct", correct);
	} else if (t->type == TASK_PERPLEXITY) {
		json_object_set_new(line, "log_likelihood", json_real(s->text->log_likelihood));
		json_object_set_new(line, "tokens", json_integer(s->text->num_tokens));
		json_object_set_new(line, "words", json_integer(s->words));
		json_object_set_new(line, "bytes", json_integer((json_int_t)s->sample->prompt.size));
	} else {
		json_t *answers = json_array();
		for (int i = 0; i < s->sample->num_choices; i++)
			json_array_append_new(answers, text_to_json(&s->sample->choice[i]));
		json_object_set_new(line, "answers", answers);
		json_object_set_new(line, "reply", text_to_json(&s->reply));
		json_object_set_new(line, "tokens", tokens_to_json(s->text->token, s->text->num_tokens));
		json_object_set_new(line, "prediction", s->found ? text_to_json(&s->extracted) : json_null());
		json_object_set_new(line, "correct", json_boolean(s->correct));
	}
	char *text = json_text(line, JSON_COMPACT);
	fprintf(r->f, "%s\n", text);
	free(text);
	json_decref(line);
}

static json_t *result_to_json(const struct task_result *result)
{
	const struct task *t = result->task;
	json_t *scores = json_object();
	for (int i = 0; i < result->num_scores; i++) {
		const struct score *s = &result->score[i];
		json_object_set_new(scores, s->name, json_pack("{s:o, s:o}", "value", isfinite(s->value) ? json_real(s->value) : json_null(),
				"standard_error", isfinite(s->standard_error) ? json_real(s->standard_error) : json_null()));
	}
	json_t *json = json_pack("{s:s, s:s, s:s, s:I, s:o}", "name", t->name, "type", task_types[t->type], "data", t->data,
			"samples", (json_int_t)t->num_samples, "scores", scores);
	if (t->type == TASK_PERPLEXITY) {
		json_object_set_new(json, "tokens", json_integer(result->tokens));
		json_object_set_new(json, "words", json_integer(result->words));
		json_object_set_new(json, "bytes", json_integer(result->bytes));
		json_object_set_new(json, "documents_in_several_windows", json_integer(result->cut));
		return json;
	}
	json_object_set_new(json, "examples", json_integer(t->examples.count));
	json_object_set_new(json, "contexts_cut", json_integer(result->cut));
	if (t->type == TASK_EXACT_MATCH) {
		json_object_set_new(json, "unmatched", json_integer(result->unmatched));
		return json;
	}
	json_t *ties = json_object();
	for (int i = 0; i < NUM_ACCURACIES; i++)
		json_object_set_new(ties, accuracy_names[i], json_integer(result->ties[i]));
	json_object_set_new(json, "ties", ties);
	return json;
}

static json_t *results_to_json(const struct evaluation_facts *facts, const struct task_result *result, int64_t count)
{
	json_t *tasks = json_array();
	for (int64_t i = 0; i < count; i++)
		json_array_append_new(tasks, result_to_json(&result[i]));
	return json_pack("{s:s, s:s, s:o, s:I, s:o}", "model", facts->model, "tasks_file", facts->tasks, "tokenizer_hash",
			crc_to_json(facts->tokenizer_hash), "seq_len", (json_int_t)facts->seq_len, "tasks", tasks);
}

char *results_text(const struct evaluation_facts *facts, const struct task_result *result, int64_t count)
{
	json_t *json = results_to_json(facts, result, count);
	char *text = json_text(json, 0);
	json_decref(json);
	return text;
}

int results_finish(struct results *r, const struct evaluation_facts *facts, const struct task_result *result, int64_t count, bool failed)
{
	char path[PATH_LEN], temporary[PATH_LEN];
	int rc = file_close(r->f, r->temporary, failed ? -1 : 0);
	if (rc == 0 && (rc = path_join(path, r->dir, "results.json") < 0 || path_suffix(temporary, path, ".tmp") < 0 ? -1 : 0) == 0) {
		json_t *json = results_to_json(facts, result, count);
		rc = json_write(temporary, json);
		json_decref(json);
		if (rc == 0 && (rename(r->temporary, r->samples) < 0 || rename(temporary, path) < 0))
			rc = fail("%s: cannot rename to %s: %s", temporary, path, strerror(errno));
	}
	if (rc == 0)
		rc = sync_path(r->dir);
	else if (!failed)
		unlink(r->temporary);
	free(r);
	return rc;
}

/* ============================================================================================================
 * GGUF, llama.cpp's format, architecture bailingmoe: magic, version u32, tensors u64, entries of metadata u64; the metadata: key, type,
 * value; of each tensor name, dimensions (the innermost first), type, offset; then, aligned, the tensors' bytes. A text is its length
 * (u64) and its bytes.
 * ========================================================================================================== */

#define GGUF_VERSION 3
#define GGUF_ARCHITECTURE "bailingmoe"
#define GGUF_ALIGNMENT 32
#define GGUF_MAX_ITEMS (1 << 24) /* of an array in the metadata: far beyond any vocabulary */

static const int gguf_sizes[NUM_GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8}; /* bytes, or the least that there can be */

/* Types of tensors by their number. */
#define NO UNKNOWN_DTYPE
static const struct { const char *name; enum dtype dtype; } ggml_types[] = {
	[0] = {"F32", F32}, [1] = {"F16", F16}, [2] = {"Q4_0", NO}, [3] = {"Q4_1", NO}, [6] = {"Q5_0", NO}, [7] = {"Q5_1", NO}, [8] = {"Q8_0", NO},
	[9] = {"Q8_1", NO}, [10] = {"Q2_K", NO}, [11] = {"Q3_K", NO}, [12] = {"Q4_K", NO}, [13] = {"Q5_K", NO}, [14] = {"Q6_K", NO},
	[15] = {"Q8_K", NO}, [16] = {"IQ2_XXS", NO}, [17] = {"IQ2_XS", NO}, [18] = {"IQ3_XXS", NO}, [19] = {"IQ1_S", NO}, [20] = {"IQ4_NL", NO},
	[21] = {"IQ3_S", NO}, [22] = {"IQ2_S", NO}, [23] = {"IQ4_XS", NO}, [24] = {"I8", NO}, [25] = {"I16", NO}, [26] = {"I32", I32},
	[27] = {"I64", I64}, [28] = {"F64", F64}, [29] = {"IQ1_M", NO}, [30] = {"BF16", BF16}, [34] = {"TQ1_0", NO}, [35] = {"TQ2_0", NO},
	[39] = {"MXFP4", NO}, [40] = {"NVFP4", NO},
};
#undef NO
enum { NUM_GGML_TYPES = sizeof ggml_types / sizeof *ggml_types };

/* The config's keys there, behind "bailingmoe.". */
static const struct { const char *name; enum gguf_type type; const char *key; } gguf_keys[] = {
	{"block_count", GGUF_U32, "model.num_hidden_layers"},
	{"context_length", GGUF_U32, "model.max_position_embeddings"},
	{"embedding_length", GGUF_U32, "model.hidden_size"},
	{"feed_forward_length", GGUF_U32, "model.intermediate_size"},
	{"attention.head_count", GGUF_U32, "model.num_attention_heads"},
	{"attention.head_count_kv", GGUF_U32, "model.num_key_value_heads"},
	{"attention.key_length", GGUF_U32, "model.head_dim"},
	{"attention.value_length", GGUF_U32, "model.head_dim"},
	{"attention.layer_norm_rms_epsilon", GGUF_F32, "model.rms_norm_eps"},
	{"rope.dimension_count", GGUF_U32, "model.head_dim"},
	{"rope.freq_base", GGUF_F32, "model.rope_theta"},
	{"vocab_size", GGUF_U32, "model.vocab_size"},
	{"leading_dense_block_count", GGUF_U32, "model.first_k_dense_replace"},
	{"expert_count", GGUF_U32, "model.num_experts"},
	{"expert_used_count", GGUF_U32, "model.num_experts_per_tok"},
	{"expert_feed_forward_length", GGUF_U32, "model.moe_intermediate_size"},
	{"expert_shared_count", GGUF_U32, "model.num_shared_experts"},
	{"expert_weights_norm", GGUF_BOOL, "model.norm_topk_prob"},
};
enum { NUM_GGUF_KEYS = sizeof gguf_keys / sizeof *gguf_keys };

/* Those that may be there with the value 0 or 1, which both mean what bailingmoe is without them: a softmax over one group of experts. */
static const char *const gguf_switches[] = {"expert_weights_scale", "expert_gating_func", "expert_group_count", "expert_group_used_count"};

const struct pre_tokenizers_row pre_tokenizers[] = {
	{"bailingmoe", "'(?i:[sdmt]|ll|ve|re)|[^\\r\\n\\p{L}\\p{N}]?+\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]++[\\r\\n]*|\\s*[\\r\\n]|\\s+(?!\\S)|\\s+"},
	{"bailingmoe", LING_PATTERN},
	{"gpt-2", NULL},
};
enum { NUM_PRE_TOKENIZERS = sizeof pre_tokenizers / sizeof *pre_tokenizers };

/* What Hugging Face and GGUF call the tokens with a part to play. */
static const struct { const char *role, *gguf; } token_roles[] = {
	{"bos", "tokenizer.ggml.bos_token_id"}, {"eos", "tokenizer.ggml.eos_token_id"}, {"unk", "tokenizer.ggml.unknown_token_id"},
	{"sep", "tokenizer.ggml.seperator_token_id"}, {"pad", "tokenizer.ggml.padding_token_id"},
};
enum { ROLE_BOS, ROLE_EOS, NUM_TOKEN_ROLES = sizeof token_roles / sizeof *token_roles };

/* -- reading -- */

struct cursor { const char *path; const uint8_t *at, *end; };

/* The next n bytes, NULL when there are fewer. */
static const uint8_t *take(struct cursor *c, uint64_t n)
{
	const uint8_t *bytes = c->at;
	if (n > (uint64_t)(c->end - c->at)) {
		fail("%s: ends within its header: %llu bytes expected, %lld left; the file is truncated", c->path, (unsigned long long)n,
				(long long)(c->end - c->at));
		return NULL;
	}
	c->at += n;
	return bytes;
}

static int take_u32(struct cursor *c, uint32_t *out)
{
	const uint8_t *bytes = take(c, 4);
	if (bytes)
		memcpy(out, bytes, 4);
	return bytes ? 0 : -1;
}

static int take_u64(struct cursor *c, uint64_t *out)
{
	const uint8_t *bytes = take(c, 8);
	if (bytes)
		memcpy(out, bytes, 8);
	return bytes ? 0 : -1;
}

/* A text; `what` names it. NULL on error. */
static json_t *take_text(struct cursor *c, const char *what)
{
	uint64_t n;
	const uint8_t *bytes;
	if (take_u64(c, &n) < 0 || !(bytes = take(c, n)))
		return NULL;
	json_t *text = json_stringn((const char *)bytes, n);
	if (!text)
		fail("%s: %s is not UTF-8", c->path, what);
	return text;
}

/* A text that is a name: without a 0 in it. NULL on error. */
static json_t *take_name(struct cursor *c, const char *what)
{
	json_t *name = take_text(c, what);
	if (name && strlen(json_string_value(name)) == json_string_length(name))
		return name;
	if (name)
		fail("%s: %s has a 0 byte in it", c->path, what);
	json_decref(name);
	return NULL;
}

/* The double that the shortest decimal text of a float means, so that 1e-6 comes back as 1e-6. */
static double shortest_decimal(float value)
{
	char text[32];
	for (int digits = 6; digits <= 9; digits++) {
		snprintf(text, sizeof text, "%.*g", digits, value);
		if (strtof(text, NULL) == value)
			break;
	}
	return strtod(text, NULL);
}

/* A value of the metadata. NULL on error. */
static json_t *take_value(struct cursor *c, const char *key, uint32_t type)
{
	if (type == GGUF_TEXT)
		return take_text(c, key);
	const uint8_t *bytes = type < NUM_GGUF_TYPES ? take(c, gguf_sizes[type]) : NULL;
	if (type >= NUM_GGUF_TYPES)
		fail("%s: `%s` is of type %u; expected one of 0 to %d", c->path, key, type, NUM_GGUF_TYPES - 1);
	if (!bytes)
		return NULL;
	uint64_t n = 0;
	memcpy(&n, bytes + (type == GGUF_ARRAY ? 4 : 0), type == GGUF_ARRAY ? 8 : gguf_sizes[type]);
	json_t *value = NULL;
	double d;
	switch (type) {
	case GGUF_U8: case GGUF_U16: case GGUF_U32: return json_integer(n);
	case GGUF_I8: return json_integer((int8_t)n);
	case GGUF_I16: return json_integer((int16_t)n);
	case GGUF_I32: return json_integer((int32_t)n);
	case GGUF_BOOL: return json_boolean(n);
	case GGUF_U64: case GGUF_I64:
		if (type == GGUF_I64 || n <= INT64_MAX)
			return json_integer((int64_t)n);
		fail("%s: `%s` is %llu; expected less than 2^63", c->path, key, (unsigned long long)n);
		return NULL;
	case GGUF_F32: case GGUF_F64:
		memcpy(&d, &n, sizeof d);
		if (type == GGUF_F32)
			d = shortest_decimal(bits_to_float((uint32_t)n));
		if (!(value = json_real(d)))
			fail("%s: `%s` is %g; expected a finite number", c->path, key, d);
		return value;
	default: /* an array: the type and the number of its items */
		type = load_i32(bytes);
		if (type == GGUF_ARRAY || type >= NUM_GGUF_TYPES || n > GGUF_MAX_ITEMS || n > (uint64_t)(c->end - c->at) / gguf_sizes[type]) {
			fail("%s: `%s` is an array of %llu items of type %u; expected one of known types, no longer than the file", c->path, key,
					(unsigned long long)n, type);
			return NULL;
		}
		value = json_array();
		for (uint64_t i = 0; i < n; i++) {
			json_t *item = take_value(c, key, type);
			if (!item) {
				json_decref(value);
				return NULL;
			}
			json_array_append_new(value, item);
		}
		return value;
	}
}

/* One entry of the metadata. */
static int take_entry(struct cursor *c, json_t *metadata)
{
	uint32_t type;
	json_t *name = take_name(c, "a key"), *value = NULL;
	const char *key = json_string_value(name);
	if (name && json_object_get(metadata, key))
		fail("%s: `%s` is there twice; expected it once", c->path, key);
	else if (name && take_u32(c, &type) == 0 && (value = take_value(c, key, type)))
		json_object_set(metadata, key, value);
	json_decref(name);
	json_decref(value);
	return value ? 0 : -1;
}

/* The place of one tensor. Its name and shape go into `shapes`. */
static int take_tensor(struct cursor *c, struct stored *t, json_t *shapes, const struct shard *s)
{
	json_t *name = take_name(c, "a tensor's name"), *shape = json_array();
	const char *text = json_string_value(name);
	uint32_t dimensions, type;
	uint64_t size, bytes = 1;
	int rc = !name ? -1 : json_object_get(shapes, text) ? fail("%s: tensor %.256s is there twice; expected it once", c->path, text)
		: take_u32(c, &dimensions);
	if (rc == 0 && (dimensions < 1 || dimensions > 4))
		rc = fail("%s: tensor %.256s has %u dimensions; expected 1 to 4", c->path, text, dimensions);
	for (uint32_t i = 0; rc == 0 && i < dimensions; i++) {
		rc = take_u64(c, &size);
		if (rc == 0 && (size > INT64_MAX || __builtin_mul_overflow(bytes, size, &bytes) || bytes > INT64_MAX / 8))
			rc = fail("%s: tensor %.256s is too large for any file", c->path, text);
		if (rc == 0)
			json_array_insert_new(shape, 0, json_integer(size));
	}
	if (rc == 0)
		rc = take_u32(c, &type) < 0 || take_u64(c, &t->begin) < 0 ? -1 : 0;
	if (rc == 0) {
		const bool known = type < NUM_GGML_TYPES && ggml_types[type].name;
		t->shard = s;
		t->dtype = known ? ggml_types[type].dtype : UNKNOWN_DTYPE;
		t->dtype_name = known ? ggml_types[type].name : "unknown";
		if (t->begin > INT64_MAX)
			rc = fail("%s: tensor %.256s: offset %llu; expected one within the file", c->path, text, (unsigned long long)t->begin);
		t->end = t->begin + (t->dtype == UNKNOWN_DTYPE ? 0 : bytes * dtypes[t->dtype].size);
		json_object_set(shapes, text, shape);
		t->shape = shape;
		t->name = json_object_iter_key(json_object_iter_at(shapes, text)); /* it lives as long as the object */
	}
	json_decref(shape);
	json_decref(name);
	return rc;
}

/* Checks that n tensors lie within a file's data, aligned, one behind the other. Sorts them by offset. */
static int tensors_placed(struct stored *t, int n, const struct shard *s, uint64_t data_size, uint64_t alignment)
{
	if (n)
		qsort(t, n, sizeof *t, by_offset);
	for (int i = 0; i < n; i++) {
		if (t[i].begin % alignment)
			return fail("%s: tensor %.256s: offset %llu; expected a multiple of %llu", s->path, t[i].name, (unsigned long long)t[i].begin,
					(unsigned long long)alignment);
		if (t[i].end > data_size)
			return fail("%s: tensor %.256s ends at data byte %llu, the file at %llu; the file is truncated", s->path, t[i].name,
					(unsigned long long)t[i].end, (unsigned long long)data_size);
		if (i && t[i].begin < t[i - 1].end)
			return fail("%s: tensors %.256s and %.256s overlap at data byte %llu", s->path, t[i - 1].name, t[i].name,
					(unsigned long long)t[i].begin);
	}
	return 0;
}

int gguf_open(struct weights *w, const char *path)
{
	struct shard *s = shard_map(w, path);
	if (!s)
		return -1;
	struct cursor c = {path, s->map, s->map + s->size};
	uint32_t version = 0;
	uint64_t tensors = 0, entries = 0;
	int64_t alignment = GGUF_ALIGNMENT;
	if (s->size < 4 || memcmp(s->map, GGUF_MAGIC, 4))
		return fail("%s: no GGUF file: it does not begin with " GGUF_MAGIC "; expected one, or the directory of a Hugging Face model or a "
				"checkpoint", path);
	c.at += 4;
	if (take_u32(&c, &version) < 0)
		return -1;
	if (version < 2 || version > GGUF_VERSION)
		return fail("%s: GGUF version %u%s; expected 2 or 3", path, version, version > 0xffff ? " (a big-endian file)" : "");
	if (take_u64(&c, &tensors) < 0 || take_u64(&c, &entries) < 0)
		return -1;
	if (tensors > s->size / 32 || entries > s->size / 13) /* the least that each takes */
		return fail("%s: %llu tensors and %llu entries of metadata do not fit into its %zu bytes; the file is truncated or damaged", path,
				(unsigned long long)tensors, (unsigned long long)entries, s->size);
	json_t *metadata = json_object(), *shapes = json_object();
	s->header = json_pack("{s:o, s:o}", "metadata", metadata, "shapes", shapes);
	for (uint64_t i = 0; i < entries; i++)
		if (take_entry(&c, metadata) < 0)
			return -1;
	if (json_object_get(metadata, "general.alignment") && field_int(metadata, path, "general.alignment", 8, 1 << 20, &alignment) < 0)
		return -1;
	if (alignment & (alignment - 1))
		return fail("%s: `general.alignment` is %lld; expected a power of 2", path, (long long)alignment);
	w->tensors = grow(w->tensors, w->count, &w->room, tensors + 1, sizeof *w->tensors); /* never none */
	for (uint64_t i = 0; i < tensors; i++)
		if (take_tensor(&c, &w->tensors[i], shapes, s) < 0)
			return -1;
	s->data_at = (c.at - s->map + alignment - 1) / alignment * alignment;
	if (tensors_placed(w->tensors, tensors, s, s->data_at > s->size ? 0 : s->size - s->data_at, alignment) < 0)
		return -1;
	w->count = tensors;
	if (w->count)
		qsort(w->tensors, w->count, sizeof *w->tensors, by_name);
	return 0;
}

/* The model that the metadata of an open file describe. */
static int gguf_config(struct model_config *m, const struct weights *w, const json_t *metadata)
{
	const char *architecture = field_text(metadata, w->path, "general.architecture"), *key;
	json_t *value, *splits = json_object_get(metadata, "split.count");
	if (!architecture)
		return -1;
	if (strcmp(architecture, GGUF_ARCHITECTURE))
		return fail("%s: architecture `%.60s`; expected " GGUF_ARCHITECTURE ", which Ling-Lite and Ling-Plus are", w->path, architecture);
	if (splits && json_integer_value(splits) > 1)
		return fail("%s: one of %lld files of a split model; join them first (llama-gguf-split --merge)", w->path,
				(long long)json_integer_value(splits));
	json_t *config = json_pack("{s:b, s:b, s:b, s:b}", "norm_head", 0, "use_bias", 0, "use_qkv_bias", 0, "tie_word_embeddings",
			!tensor_find(w, "output.weight"));
	const size_t prefix = strlen(GGUF_ARCHITECTURE ".");
	int rc = 0;
	json_object_foreach((json_t *)metadata, key, value) {
		if (rc < 0 || strncmp(key, GGUF_ARCHITECTURE ".", prefix))
			continue;
		bool known = false;
		for (int i = 0; i < 4; i++)
			if (!strcmp(key + prefix, gguf_switches[i])) {
				known = true;
				if (!json_is_number(value) || (json_number_value(value) != 0 && json_number_value(value) != 1))
					rc = fail("%s: `%s` is not 1; this program's models know no other value", w->path, key);
			}
		for (int i = 0; i < NUM_GGUF_KEYS && !rc; i++)
			if (!strcmp(key + prefix, gguf_keys[i].name)) {
				const char *name = leaf_of(gguf_keys[i].key);
				const json_t *before = json_object_get(config, name);
				if (before && !json_equal(before, value))
					rc = fail("%s: `%s` gives another %s than a key before it; expected the same", w->path, key, name);
				json_object_set(config, name, value);
				known = true;
			}
		if (!known && !rc)
			rc = fail("%s: the key `%s` is not known: it may change what the model computes", w->path, key);
	}
	const json_t *tokens = json_object_get(metadata, "tokenizer.ggml.tokens");
	if (!json_object_get(config, "vocab_size") && tokens)
		json_object_set_new(config, "vocab_size", json_integer(json_array_size(tokens)));
	if (!json_object_get(config, "norm_topk_prob"))
		json_object_set_new(config, "norm_topk_prob", json_false());
	if (!rc)
		rc = config_from_json(m, config, w->path);
	json_decref(config);
	return rc;
}

json_t *pre_tokenizer_json(const char *pattern)
{
	json_t *bytes = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", !pattern);
	return !pattern ? bytes : json_pack("{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, o]}", "type", "Sequence", "pretokenizers", "type", "Split",
			"pattern", "Regex", pattern, "behavior", "Isolated", "invert", 0, bytes);
}

/* Fills vocab and added, parts of a tokenizer.json, from the tokens of a GGUF file and their types. */
static int vocabulary_to_json(const char *path, const json_t *tokens, const json_t *types, json_t *vocab, json_t *added)
{
	const json_t *token;
	size_t id;
	json_array_foreach(tokens, id, token) {
		const char *text = json_string_value(token);
		const json_int_t type = json_integer_value(json_array_get(types, id));
		if (!text || strlen(text) != json_string_length(token))
			return fail("%s: `tokenizer.ggml.tokens` entry %zu is no plain text", path, id);
		if (type == TOKEN_CONTROL || type == TOKEN_USER_DEFINED)
			json_array_append_new(added, json_pack("{s:I, s:s, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)id, "content", text, "single_word", 0,
					"lstrip", 0, "rstrip", 0, "normalized", 0, "special", type == TOKEN_CONTROL));
		else if (type == TOKEN_NORMAL && json_object_get(vocab, text))
			return fail("%s: token `%.60s` is there twice, the second time with id %zu", path, text, id);
		else if (type == TOKEN_NORMAL)
			json_object_set_new(vocab, text, json_integer(id));
		else if (type != TOKEN_UNUSED)
			return fail("%s: token %zu is of type %lld; expected 1, 3, 4 or 5 (normal, control, user-defined, unused)", path, id, (long long)type);
	}
	return 0;
}

/* Writes tokenizer.json and tokenizer_config.json into dir from the metadata of a GGUF file. */
static int gguf_to_tokenizer(const json_t *metadata, const char *path, const char *dir)
{
	const char *model = field_text(metadata, path, "tokenizer.ggml.model"), *pre = NULL;
	if (!model)
		return -1;
	if (!strcmp(model, "no_vocab") || !strcmp(model, "none"))
		return 0;
	if (!strcmp(model, "gpt2") && !(pre = field_text(metadata, path, "tokenizer.ggml.pre")))
		return -1;
	int kind = 0;
	while (pre && kind < NUM_PRE_TOKENIZERS && strcmp(pre, pre_tokenizers[kind].name))
		kind++;
	if (!pre || kind == NUM_PRE_TOKENIZERS)
		return fail("%s: a tokenizer of the kind %.40s %.40s; expected gpt2 with bailingmoe or gpt-2; --no-tokenizer leaves it out", path, model,
				pre ? pre : "");
	const json_t *tokens = json_object_get(metadata, "tokenizer.ggml.tokens"), *types = json_object_get(metadata, "tokenizer.ggml.token_type");
	json_t *merges = json_object_get(metadata, "tokenizer.ggml.merges");
	if (!json_is_array(tokens) || !json_is_array(types) || !json_is_array(merges) || json_array_size(tokens) != json_array_size(types))
		return fail("%s: tokenizer.ggml.tokens, .token_type and .merges do not make a vocabulary: expected arrays, the first two equally long", path);

	json_t *vocab = json_object(), *added = json_array();
	json_t *byte_level = pre_tokenizer_json(NULL);
	json_t *tokenizer = json_pack("{s:s, s:n, s:n, s:O, s:n, s:o, s:O, s:O, s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:O, s:O}}", "version", "1.0",
			"truncation", "padding", "added_tokens", added, "normalizer", "pre_tokenizer", pre_tokenizer_json(pre_tokenizers[kind].pattern),
			"post_processor", byte_level, "decoder", byte_level, "model", "type", "BPE", "dropout", "unk_token", "continuing_subword_prefix",
			"end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "ignore_merges", 0, "vocab", vocab, "merges", merges);
	json_t *config = json_pack("{s:s, s:b}", "tokenizer_class", "PreTrainedTokenizerFast", "clean_up_tokenization_spaces", 0);
	char file[PATH_LEN], name[32];
	int rc = vocabulary_to_json(path, tokens, types, vocab, added);
	for (int i = 0; i < NUM_TOKEN_ROLES; i++) {
		const json_t *id = json_object_get(metadata, token_roles[i].gguf);
		json_t *token = json_is_integer(id) ? json_array_get(tokens, json_integer_value(id)) : NULL;
		snprintf(name, sizeof name, "%s_token", token_roles[i].role);
		if (token)
			json_object_set(config, name, token);
	}
	json_t *template = json_object_get(metadata, "tokenizer.chat_template");
	if (template)
		json_object_set(config, "chat_template", template);
	if (!rc)
		rc = path_join(file, dir, "tokenizer.json") < 0 ? -1 : json_write(file, tokenizer);
	if (!rc)
		rc = path_join(file, dir, "tokenizer_config.json") < 0 ? -1 : json_write(file, config);
	json_decref(byte_level);
	json_decref(vocab);
	json_decref(added);
	json_decref(tokenizer);
	json_decref(config);
	return rc;
}

/* -- writing -- */

void append_u32(struct text *out, uint32_t value)
{
	text_append(out, (const char *)&value, sizeof value);
}

void append_u64(struct text *out, uint64_t value)
{
	text_append(out, (const char *)&value, sizeof value);
}

void append_text(struct text *out, const char *text)
{
	append_u64(out, strlen(text));
	text_append(out, text, strlen(text));
}

static void begin_entry(struct metadata *m, const char *key, enum gguf_type type)
{
	append_text(&m->bytes, key);
	append_u32(&m->bytes, type);
	m->count++;
}

static void entry_u32(struct metadata *m, const char *key, uint32_t value)
{
	begin_entry(m, key, GGUF_U32);
	append_u32(&m->bytes, value);
}

static void entry_f32(struct metadata *m, const char *key, float value)
{
	begin_entry(m, key, GGUF_F32);
	append_u32(&m->bytes, float_to_bits(value));
}

static void entry_bool(struct metadata *m, const char *key, bool value)
{
	begin_entry(m, key, GGUF_BOOL);
	text_append(&m->bytes, (const char *)&(uint8_t){value}, 1);
}

static void entry_text(struct metadata *m, const char *key, const char *value)
{
	begin_entry(m, key, GGUF_TEXT);
	append_text(&m->bytes, value);
}

static void entry_array(struct metadata *m, const char *key, enum gguf_type type, uint64_t n)
{
	begin_entry(m, key, GGUF_ARRAY);
	append_u32(&m->bytes, type);
	append_u64(&m->bytes, n);
}

int config_to_gguf(struct metadata *m, const struct model_config *model, const char *path)
{
	static const char *const refused[] = {"model.use_bias", "model.use_qkv_bias", "model.first_k_dense_replace"};
	struct config c = {.model = *model};
	for (int i = 0; i < 3; i++) {
		json_t *value = key_to_json(&c, find_key(refused[i]), 0);
		const bool set = json_is_true(value) || json_integer_value(value) > 0;
		json_decref(value);
		if (set)
			return fail("%s: %s is set, which llama.cpp's " GGUF_ARCHITECTURE " does not compute; expected it off", path, leaf_of(refused[i]));
	}
	if (!model->num_shared_experts)
		return fail("%s: num_shared_experts is 0, but llama.cpp's " GGUF_ARCHITECTURE " needs a shared expert", path);
	c.model.norm_topk_prob = model->norm_topk_prob && model->num_experts_per_tok > 1; /* a lone expert keeps its own weight */
	for (int i = 0; i < NUM_GGUF_KEYS; i++) {
		char key[MAX_NAME];
		snprintf(key, sizeof key, GGUF_ARCHITECTURE ".%s", gguf_keys[i].name);
		json_t *value = key_to_json(&c, find_key(gguf_keys[i].key), 0);
		switch (gguf_keys[i].type) {
		case GGUF_BOOL: entry_bool(m, key, json_is_true(value)); break;
		case GGUF_F32: entry_f32(m, key, json_real_value(value)); break;
		default: entry_u32(m, key, json_integer_value(value));
		}
		json_decref(value);
	}
	entry_f32(m, GGUF_ARCHITECTURE ".expert_weights_scale", 1);
	return 0;
}

/* llama.cpp's name for a pre_tokenizer; NULL when it has none. */
static const char *pre_tokenizer_name(const json_t *found)
{
	const char *name = NULL;
	for (int i = 0; i < NUM_PRE_TOKENIZERS && !name; i++) {
		/* What has no say here is made alike: offsets are not ids, and what a key's absence means. */
		json_t *ours = pre_tokenizer_json(pre_tokenizers[i].pattern), *theirs = json_deep_copy(found);
		json_t *parts = json_object_get(theirs, "pretokenizers"), *last = parts ? json_array_get(parts, json_array_size(parts) - 1) : theirs;
		json_object_set_new(last, "trim_offsets", json_true());
		if (!json_object_get(last, "use_regex"))
			json_object_set_new(last, "use_regex", json_true());
		if (json_equal(ours, theirs))
			name = pre_tokenizers[i].name;
		json_decref(ours);
		json_decref(theirs);
	}
	return name;
}

/* Places a token of tokenizer.json among the vocabulary's, of which each id has one text. */
static int place_token(const char *path, const char **texts, uint8_t *types, int vocab_size, const char *text, const json_t *id, int type)
{
	const json_int_t i = json_integer_value(id);
	if (!text || !json_is_integer(id) || i < 0 || i >= vocab_size)
		return fail("%s: token `%.60s` has the id %lld; expected one beneath the model's vocab_size, which is %d", path, text ? text : "",
				(long long)i, vocab_size);
	if (texts[i] && strcmp(texts[i], text))
		return fail("%s: `%.60s` and `%.60s` both have the id %lld; expected one token for each", path, texts[i], text, (long long)i);
	texts[i] = text;
	types[i] = type;
	return 0;
}

/* Appends the merges, written as "a b" or as ["a", "b"]. */
static int merges_to_gguf(struct metadata *m, const json_t *merges, const char *path)
{
	const json_t *merge;
	size_t i;
	entry_array(m, "tokenizer.ggml.merges", GGUF_TEXT, json_array_size(merges));
	json_array_foreach(merges, i, merge) {
		const char *text = json_string_value(merge);
		const char *left = json_string_value(json_array_get(merge, 0)), *right = json_string_value(json_array_get(merge, 1));
		if (text)
			append_text(&m->bytes, text);
		else if (left && right && json_array_size(merge) == 2 && !strchr(left, ' ') && !strchr(right, ' ')) {
			append_u64(&m->bytes, strlen(left) + 1 + strlen(right));
			text_append(&m->bytes, left, strlen(left));
			text_append(&m->bytes, " ", 1);
			text_append(&m->bytes, right, strlen(right));
		} else
			return fail("%s: merge %zu is %s; expected \"a b\" or [\"a\", \"b\"]", path, i, json_kind(merge));
	}
	return 0;
}

/* The id of the token that tokenizer_config.json or else config.json names for a role; -1 when none does. */
static int64_t role_id(int role, const json_t *tokenizer_config, const json_t *config, const char **texts, int vocab_size)
{
	char name[32];
	snprintf(name, sizeof name, "%s_token", token_roles[role].role);
	const json_t *named = json_object_get(tokenizer_config, name);
	const char *text = json_string_value(json_is_object(named) ? json_object_get(named, "content") : named);
	snprintf(name, sizeof name, "%s_token_id", token_roles[role].role);
	const json_t *id = json_object_get(config, name);
	if (json_is_array(id))
		id = json_array_get(id, 0);
	if (!text && json_is_integer(id))
		return json_integer_value(id) < vocab_size ? json_integer_value(id) : -1;
	if (!text && role == ROLE_EOS)
		text = "<|endoftext|>";
	for (int i = 0; text && i < vocab_size; i++)
		if (texts[i] && !strcmp(texts[i], text))
			return i;
	return -1;
}

/* The roles of tokens and the chat template, from tokenizer_config.json where it is there and from config.json. */
static int roles_to_gguf(struct metadata *m, const char *dir, const json_t *config, const char **texts, int vocab_size)
{
	char path[PATH_LEN];
	int there = path_join(path, dir, "tokenizer_config.json") < 0 ? -1 : path_exists(path);
	json_t *tokenizer_config = there > 0 ? json_read(path) : NULL, *item;
	if (there < 0 || (there && !tokenizer_config))
		return -1;
	for (int i = 0; i < NUM_TOKEN_ROLES; i++) {
		const int64_t id = role_id(i, tokenizer_config, config, texts, vocab_size);
		if (id >= 0)
			entry_u32(m, token_roles[i].gguf, id);
		else if (i == ROLE_EOS) {
			json_decref(tokenizer_config);
			return fail("%s: no token ends a text: no eos_token of tokenizer_config.json, eos_token_id of config.json or <|endoftext|> is in the "
					"vocabulary; name one, or llama.cpp would take token 11", dir);
		}
	}
	entry_bool(m, "tokenizer.ggml.add_bos_token", json_is_true(json_object_get(tokenizer_config, "add_bos_token")));
	const json_t *template = json_object_get(tokenizer_config, "chat_template");
	size_t i;
	if (json_is_array(template)) { /* several by name */
		const json_t *list = template;
		json_array_foreach((json_t *)list, i, item)
			if (json_is_string(json_object_get(item, "name")) && !strcmp(json_string_value(json_object_get(item, "name")), "default"))
				template = json_object_get(item, "template");
	}
	if (json_is_string(template))
		entry_text(m, "tokenizer.chat_template", json_string_value(template));
	else if (!template && path_join(path, dir, "chat_template.jinja") == 0 && path_exists(path) > 0) {
		const uint8_t *text;
		size_t n;
		if (map_file(path, &text, &n) < 0) {
			json_decref(tokenizer_config);
			return -1;
		}
		begin_entry(m, "tokenizer.chat_template", GGUF_TEXT);
		append_u64(&m->bytes, n);
		text_append(&m->bytes, (const char *)text, n);
		unmap_file(text, n);
	}
	json_decref(tokenizer_config);
	return 0;
}

/* The vocabulary and merges of a tokenizer.json. */
static int vocabulary_to_gguf(struct metadata *m, const json_t *root, const char *path, const char **texts, uint8_t *types, int vocab_size)
{
	const json_t *model = json_object_get(root, "model"), *kind = json_object_get(model, "type"), *added, *vocab = json_object_get(model, "vocab");
	json_t *id, *list = json_object_get(root, "added_tokens");
	const char *text, *pre = pre_tokenizer_name(json_object_get(root, "pre_tokenizer"));
	size_t i;
	if (kind && (!json_is_string(kind) || strcmp(json_string_value(kind), "BPE")))
		return fail("%s: the model is no BPE; llama.cpp takes it for %s only with --no-tokenizer", path, GGUF_ARCHITECTURE);
	if (!pre)
		return fail("%s: llama.cpp knows the pre_tokenizers of Ling and of GPT-2, found another; --no-tokenizer leaves the tokenizer out", path);
	if (json_is_true(json_object_get(model, "ignore_merges")) || json_is_true(json_object_get(model, "byte_fallback")))
		return fail("%s: ignore_merges or byte_fallback is set, which llama.cpp has not for this pre_tokenizer; --no-tokenizer leaves the tokenizer "
				"out", path);
	if (!json_is_object(vocab) || !json_is_array(json_object_get(model, "merges")))
		return fail("%s: the model has no vocab and merges", path);
	if (json_is_object(json_object_get(root, "normalizer")))
		fprintf(stderr, "note: %s: llama.cpp does not normalise text: ids differ for text that the normalizer changes\n", path);
	json_object_foreach((json_t *)vocab, text, id)
		if (place_token(path, texts, types, vocab_size, text, id, TOKEN_NORMAL) < 0)
			return -1;
	json_array_foreach(list, i, added)
		if (place_token(path, texts, types, vocab_size, json_string_value(json_object_get(added, "content")), json_object_get(added, "id"),
				json_is_true(json_object_get(added, "special")) ? TOKEN_CONTROL : TOKEN_USER_DEFINED) < 0)
			return -1;
	entry_text(m, "tokenizer.ggml.model", "gpt2");
	entry_text(m, "tokenizer.ggml.pre", pre);
	entry_array(m, "tokenizer.ggml.tokens", GGUF_TEXT, vocab_size);
	for (int j = 0; j < vocab_size; j++) {
		char filler[32];
		snprintf(filler, sizeof filler, "[PAD%d]", j); /* each id of the model needs a token */
		append_text(&m->bytes, texts[j] ? texts[j] : filler);
	}
	entry_array(m, "tokenizer.ggml.token_type", GGUF_I32, vocab_size);
	for (int j = 0; j < vocab_size; j++)
		append_u32(&m->bytes, texts[j] ? types[j] : TOKEN_UNUSED);
	return merges_to_gguf(m, json_object_get(model, "merges"), path);
}

int tokenizer_to_gguf(struct metadata *m, const char *dir, const json_t *config, int vocab_size)
{
	char path[PATH_LEN];
	int there = path_join(path, dir, "tokenizer.json") < 0 ? -1 : path_exists(path);
	if (there == 0)
		return fail("%s: is not there, and llama.cpp needs it; put the model's tokenizer.json there, or leave the tokenizer out with --no-tokenizer",
				path);
	json_t *root = there < 0 ? NULL : json_read(path);
	if (!root)
		return -1;
	const char **texts = allocate(vocab_size * sizeof *texts);
	uint8_t *types = allocate(vocab_size);
	int rc = vocabulary_to_gguf(m, root, path, texts, types, vocab_size);
	if (!rc)
		rc = roles_to_gguf(m, dir, config, texts, vocab_size);
	free(texts);
	free(types);
	json_decref(root);
	return rc;
}

/* ============================================================================================================
 * Conversion. A model is a list of parameters by their Hugging Face names; it comes from a directory or a GGUF file and goes to either.
 * GGUF has the three parts of query_key_value apart, the rows of a query or key head's two halves in turn, and one tensor for a layer's
 * experts. So parameters are cut into strips, runs of rows with a home in both worlds, and a conversion takes each strip's rows from
 * where they are in the one to where they belong in the other.
 * ========================================================================================================== */

struct home { char name[MAX_NAME]; int64_t row, rows, stack; }; /* first row in a tensor of so many, which are those of a stack of matrices */

struct strip {
	int64_t rows, cols;          /* a vector is one row */
	int head_dim;                /* of the heads whose rows have another order in GGUF, else 0 */
	bool vector, lm_head;
	struct home huggingface, gguf; /* the latter without a name where GGUF has no place for it */
	const struct stored *from;
	int product;
};

struct product {               /* a tensor of the result: strips first .. first + count - 1 */
	const char *name;
	int64_t rows, cols, stack;   /* a vector has cols 0 */
	enum dtype dtype;
	int first, count;
};

struct plan {
	const struct source *source;
	bool to_gguf;
	struct model_config config;  /* of the result */
	struct strip *strips;        /* in the order of the result */
	struct product *products;
	int num_strips, num_products;
	double *fold;                /* [H] what lm_head's columns are divided by, or NULL */
	struct weights_writer *shard; /* what is being written, or NULL and */
	FILE *gguf;
	bool *verified;              /* tensors of the source */
	uint8_t *block;
	const uint8_t **rows;        /* [BLOCK_ROWS] */
	struct progress progress;
};

static const char *const huggingface_dtypes[] = {[F64] = "float64", [F32] = "float32", [F16] = "float16", [BF16] = "bfloat16"};

struct source *source_open(const char *path, struct model_config *config)
{
	struct source *s = allocate(sizeof *s);
	struct stat st;
	char trainer[PATH_LEN];
	int rc = snprintf(s->path, PATH_LEN, "%s", path) >= PATH_LEN ? fail("%s: path longer than %d bytes", path, PATH_LEN - 1)
		: stat(path, &st) < 0 ? fail("%s: cannot open: %s", path, strerror(errno)) : 0;
	if (rc == 0 && S_ISDIR(st.st_mode)) {
		char file[PATH_LEN];
		rc = config_from_huggingface(&s->config, path) < 0 || path_join(file, path, "config.json") < 0 || path_join(trainer, path, "trainer.json") < 0
			|| !(s->config_json = json_read(file)) ? -1 : path_exists(trainer);
		if (rc > 0) { /* a checkpoint, whose files have checksums */
			json_t *root = json_read(trainer);
			rc = root && trainer_check(root, trainer) == 0 ? files_check(path, trainer, root) : -1;
			json_decref(root);
		}
		if (rc == 0)
			rc = (s->weights = weights_open(path, "model")) ? 0 : -1;
	} else if (rc == 0) {
		s->weights = allocate(sizeof *s->weights);
		strcpy(s->weights->path, s->path);
		rc = gguf_open(s->weights, path);
		if (rc == 0) {
			s->metadata = json_object_get(s->weights->shards->header, "metadata");
			rc = gguf_config(&s->config, s->weights, s->metadata);
		}
	}
	*config = s->config;
	if (rc == 0)
		return s;
	source_close(s);
	return NULL;
}

void source_close(struct source *s)
{
	if (!s)
		return;
	weights_close(s->weights);
	json_decref(s->config_json);
	free(s);
}

/* -- the plan -- */

/* Finds the tensor of a GGUF file that holds a parameter, and, of an expert's, the expert's number, else -1. Leaves `name` empty when there is
 * none. query_key_value has three, and is not asked for. */
static void gguf_name(char name[MAX_NAME], const char *huggingface, int *expert)
{
	static const struct { const char *huggingface, *gguf; } names[] = {
		{"input_layernorm.weight", "attn_norm"}, {"post_attention_layernorm.weight", "ffn_norm"}, {"attention.dense.weight", "attn_output"},
		{"mlp.gate.weight", "ffn_gate_inp"}, {"mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp"},
		{"mlp.shared_experts.up_proj.weight", "ffn_up_shexp"}, {"mlp.shared_experts.down_proj.weight", "ffn_down_shexp"},
	};
	int layer, length = 0;
	char matrix[8];
	*expert = -1;
	*name = 0;
	if (!strcmp(huggingface, "model.word_embeddings.weight"))
		strcpy(name, "token_embd.weight");
	else if (!strcmp(huggingface, "model.norm.weight"))
		strcpy(name, "output_norm.weight");
	else if (!strcmp(huggingface, "lm_head.weight"))
		strcpy(name, "output.weight");
	else if (sscanf(huggingface, "model.layers.%d.%n", &layer, &length) == 1 && length) {
		const char *rest = huggingface + length;
		if (sscanf(rest, "mlp.experts.%d.%4[a-z]_proj.weight", expert, matrix) == 2)
			snprintf(name, MAX_NAME, "blk.%d.ffn_%s_exps.weight", layer, matrix);
		for (size_t i = 0; i < sizeof names / sizeof *names; i++)
			if (!strcmp(rest, names[i].huggingface))
				snprintf(name, MAX_NAME, "blk.%d.%s.weight", layer, names[i].gguf);
	}
}

/* Cuts the parameters into strips; at most three for each. Returns their number. */
static int cut_strips(struct strip *strips, const struct array *params, int n, const struct model_config *c)
{
	int count = 0;
	for (int i = 0; i < n; i++) {
		const struct array *p = &params[i];
		struct strip s = {.rows = p->cols ? p->rows : 1, .cols = p->cols ? p->cols : p->rows, .vector = !p->cols};
		int expert, layer, length = 0;
		s.lm_head = !strcmp(p->name, "lm_head.weight");
		s.huggingface.rows = s.rows;
		snprintf(s.huggingface.name, MAX_NAME, "%s", p->name);
		if (sscanf(p->name, "model.layers.%d.attention.query_key_value.weight%n", &layer, &length) == 1 && length) {
			const int heads[3] = {c->num_attention_heads, c->num_key_value_heads, c->num_key_value_heads};
			for (int part = 0; part < 3; part++) {
				s.rows = s.gguf.rows = (int64_t)heads[part] * c->head_dim;
				s.head_dim = part < 2 ? c->head_dim : 0;
				snprintf(s.gguf.name, MAX_NAME, "blk.%d.attn_%c.weight", layer, "qkv"[part]);
				strips[count++] = s;
				s.huggingface.row += s.rows;
			}
			continue;
		}
		gguf_name(s.gguf.name, p->name, &expert);
		s.gguf.rows = s.rows;
		if (expert >= 0)
			s.gguf.stack = c->num_experts, s.gguf.rows = s.rows * c->num_experts, s.gguf.row = s.rows * expert;
		strips[count++] = s;
	}
	return count;
}

/* Finds each strip's tensor in the source, and checks that all of the source's tensors are needed. */
static int find_strips(struct plan *p)
{
	const struct source *s = p->source;
	const struct weights *w = s->weights;
	bool *needed = allocate(w->count);
	int rc = 0;
	for (int i = 0; i < p->num_strips && !rc; i++) {
		struct strip *strip = &p->strips[i];
		const struct home *from = s->metadata ? &strip->gguf : &strip->huggingface;
		const char *name = strip->lm_head && s->config.tie_word_embeddings ? s->metadata ? "token_embd.weight" : "model.word_embeddings.weight"
			: from->name;
		if (s->metadata && !*name)
			rc = fail("%s: " GGUF_ARCHITECTURE " has no place for %s", s->path, strip->huggingface.name);
		else if (!(strip->from = tensor_stacked(w, name, strip->vector ? strip->cols : from->rows, strip->vector ? 0 : strip->cols, from->stack)))
			rc = -1;
		else
			needed[strip->from - w->tensors] = true;
	}
	for (int i = 0; i < w->count && !rc; i++)
		if (!needed[i] && !(s->config.tie_word_embeddings && !strcmp(w->tensors[i].name, "lm_head.weight")))
			rc = fail("%s: tensor %s is not a part of the model that %s describes", s->path, w->tensors[i].name,
					s->metadata ? "its metadata" : "config.json");
	free(needed);
	return rc;
}

/* Gives pages of a mapped file back that are not needed any more: a model may be larger than memory. */
static void forget_pages(const uint8_t *from, const uint8_t *end)
{
	const uintptr_t page = sysconf(_SC_PAGESIZE), first = ((uintptr_t)from + page - 1) / page * page, last = (uintptr_t)end / page * page;
	if (first < last)
		madvise((void *)first, last - first, MADV_DONTNEED);
}

/* A model whose config ties the head to the embedding may still bring a head, if it is the same. */
static int check_tie(const struct source *s)
{
	const struct stored *head = s->config.tie_word_embeddings ? tensor_find(s->weights, "lm_head.weight") : NULL;
	if (!head || s->metadata)
		return 0;
	const struct stored *embedding = tensor_find(s->weights, "model.word_embeddings.weight");
	const uint64_t bytes = head->end - head->begin;
	bool same = head->dtype == embedding->dtype && json_equal(head->shape, embedding->shape);
	for (uint64_t at = 0; same && at < bytes; at += BLOCK_BYTES) {
		const uint64_t n = bytes - at < BLOCK_BYTES ? bytes - at : BLOCK_BYTES;
		const uint8_t *a = tensor_bytes(head) + at, *b = tensor_bytes(embedding) + at;
		same = !memcmp(a, b, n);
		forget_pages(a, a + n);
		forget_pages(b, b + n);
	}
	if (!same)
		return fail("%s/config.json: tie_word_embeddings is true, but lm_head.weight is there and differs from model.word_embeddings.weight; set "
				"tie_word_embeddings to false if the head was trained by itself, or remove lm_head.weight", s->path);
	fprintf(stderr, "note: %s: lm_head.weight is left out: it equals the embedding, to which config.json ties it\n", s->path);
	return 0;
}

static int by_product(const void *a, const void *b)
{
	const struct strip *x = a, *y = b;
	if (x->product != y->product)
		return x->product < y->product ? -1 : 1;
	/* In both worlds the strips of a tensor are in the same order. */
	if (x->gguf.row != y->gguf.row)
		return x->gguf.row < y->gguf.row ? -1 : 1;
	return (x->huggingface.row > y->huggingface.row) - (x->huggingface.row < y->huggingface.row);
}

/* Gathers the strips into the tensors of the result. asked: their type, or UNKNOWN_DTYPE for the source's own. */
static int make_products(struct plan *p, enum dtype asked)
{
	int kept = 0;
	enum dtype common = asked;
	for (int i = 0; i < p->num_strips; i++) {
		struct strip *s = &p->strips[i];
		const struct home *to = p->to_gguf ? &s->gguf : &s->huggingface;
		if (s->lm_head && !p->to_gguf && p->config.tie_word_embeddings)
			continue;
		if (!*to->name)
			return fail("%s: " GGUF_ARCHITECTURE " has no place for %s", p->source->path, s->huggingface.name);
		int k = p->num_products - 1;
		while (k >= 0 && strcmp(p->products[k].name, to->name))
			k = p->to_gguf ? k - 1 : -1; /* a parameter's strips are side by side */
		const enum dtype own = s->from->dtype == F64 ? F32 : s->from->dtype;
		if (common == UNKNOWN_DTYPE)
			common = own; /* the embedding's, which is first */
		if (k < 0) {
			k = p->num_products++;
			p->products[k] = (struct product){.rows = s->vector ? s->cols : to->rows, .cols = s->vector ? 0 : s->cols, .stack = to->stack,
					.dtype = asked != UNKNOWN_DTYPE ? asked : own};
			if (p->to_gguf)
				p->products[k].dtype = s->vector || strstr(to->name, ".ffn_gate_inp.") ? F32 : common; /* as llama.cpp wants them */
		} else if (asked == UNKNOWN_DTYPE && !p->to_gguf && p->products[k].dtype != own)
			p->products[k].dtype = F32;
		s->product = k;
		p->strips[kept] = *s;
		p->products[k].name = p->to_gguf ? p->strips[kept].gguf.name : p->strips[kept].huggingface.name;
		p->products[k].count++;
		kept++;
	}
	p->num_strips = kept;
	qsort(p->strips, kept, sizeof *p->strips, by_product);
	for (int i = 0, k = 0; k < p->num_products; i += p->products[k++].count) {
		p->products[k].first = i;
		p->products[k].name = p->to_gguf ? p->strips[i].gguf.name : p->strips[i].huggingface.name;
	}
	return 0;
}

static int64_t product_bytes(const struct product *k)
{
	return k->rows * (k->cols ? k->cols : 1) * dtypes[k->dtype].size;
}

/* -- the work -- */

/* What doubles lose on the way to floats, put right: the last bit is set where something was cut off, so that rounding once more, to
 * fewer bits, rounds the double itself. */
static void round_to_odd(real *out, const uint8_t *in, int64_t n)
{
	for (int64_t i = 0; i < n; i++) {
		double d;
		memcpy(&d, in + 8 * i, 8);
		float f = (float)d;
		if (isfinite(f) && f != d && !(float_to_bits(f) & 1))
			f = nextafterf(f, d > f ? INFINITY : -INFINITY);
		out[i] = f;
	}
}

/* Converts n numbers to `dtype`. Returns whether one that was finite has become infinite. */
static bool from_real(uint8_t *out, const real *in, int64_t n, enum dtype dtype)
{
	uint32_t overflow = 0;
	if (dtype == REAL_DTYPE)
		memcpy(out, in, n * sizeof *in);
	else if (dtype == F32) /* of doubles */
		for (int64_t i = 0; i < n; i++) {
			const float f = (float)in[i];
			memcpy(out + 4 * i, &f, 4);
			overflow |= (fabsf(f) == INFINITY) & (fabs((double)in[i]) < INFINITY);
		}
	else if (dtype == F16)
		for (int64_t i = 0; i < n; i++) {
			const float f = (float)in[i];
			const uint16_t h = float_to_half(f);
			memcpy(out + 2 * i, &h, 2);
			overflow |= ((h & 0x7fff) == 0x7c00) & (fabsf(f) < INFINITY);
		}
	else
		for (int64_t i = 0; i < n; i++) {
			const float f = (float)in[i];
			const uint16_t h = float_to_bf16(f);
			memcpy(out + 2 * i, &h, 2);
			overflow |= ((h & 0x7fff) == 0x7f80) & (fabsf(f) < INFINITY);
		}
	return overflow;
}

bool convert_row(uint8_t *out, enum dtype to, const uint8_t *in, enum dtype from, int64_t n, const double *fold)
{
	if (from == to && !fold) {
		memcpy(out, in, n * dtypes[to].size);
		return false;
	}
	bool overflow = false;
	for (int64_t at = 0; at < n; at += RUN) {
		const int64_t run = n - at < RUN ? n - at : RUN;
		const uint8_t *source = in + at * dtypes[from].size;
		real values[RUN];
		to_real(values, source, run, from);
		if (from == F64) {
			double d;
			for (int64_t i = 0; i < run; i++)
				overflow |= !isfinite(values[i]) && (memcpy(&d, source + 8 * i, 8), isfinite(d));
			if (to != F32 && !fold)
				round_to_odd(values, source, run);
		}
		for (int64_t i = 0; fold && i < run; i++)
			values[i] = (real)(values[i] / fold[at + i]);
		overflow |= from_real(out + at * dtypes[to].size, values, run, to);
	}
	return overflow;
}

/* Row r of a strip, counted within it in the order of the result. */
static const uint8_t *strip_row(const struct plan *p, const struct strip *s, int64_t r)
{
	const bool from_gguf = p->source->metadata;
	const int64_t d = s->head_dim;
	if (d && from_gguf != p->to_gguf) {
		const int64_t head = r / d * d, i = r % d;
		r = head + (p->to_gguf ? i % 2 * (d / 2) + i / 2 : i % (d / 2) * 2 + i / (d / 2));
	}
	return tensor_bytes(s->from) + ((from_gguf ? s->gguf.row : s->huggingface.row) + r) * s->cols * dtypes[s->from->dtype].size;
}

/* Checks the checksum of a strip's tensor, once. */
static int verify_strip(struct plan *p, const struct strip *s)
{
	bool *done = &p->verified[s->from - p->source->weights->tensors];
	int rc = *done ? 0 : tensor_verify(s->from);
	if (!*done && s->from->has_crc)
		forget_pages(tensor_bytes(s->from), tensor_bytes(s->from) + (s->from->end - s->from->begin));
	*done = true;
	return rc;
}

/* Names the number that is too large for its new type. */
static int fail_overflow(const struct plan *p, const struct product *k, const struct strip *s, const uint8_t *row)
{
	uint8_t out[8];
	real value = 0;
	int64_t i = 0;
	for (; i < s->cols; i++) {
		const uint8_t *in = row + i * dtypes[s->from->dtype].size;
		const double *fold = p->fold && s->lm_head ? p->fold + i : NULL;
		to_real(&value, in, 1, s->from->dtype);
		if (convert_row(out, k->dtype, in, s->from->dtype, 1, fold))
			break;
	}
	return fail("%s: tensor %s: %g in column %lld is beyond the numbers of %s; choose another --dtype", s->from->shard->path, s->from->name,
			(double)value, (long long)i, huggingface_dtypes[k->dtype]);
}

/* Computes what the columns of lm_head are divided by: their norms over the whole vocabulary, with what NormHead adds. */
static int compute_fold(struct plan *p)
{
	const struct strip *s = p->strips;
	while (!s->lm_head)
		s++;
	if (verify_strip(p, s) < 0)
		return -1;
	p->fold = allocate(s->cols * sizeof *p->fold);
	real *values = allocate(s->cols * sizeof *values);
	const int size = dtypes[s->from->dtype].size;
	for (int64_t r = 0; r < s->rows; r++) {
		const uint8_t *row = strip_row(p, s, r);
		to_real(values, row, s->cols, s->from->dtype);
		for (int64_t j = 0; j < s->cols; j++)
			p->fold[j] += (double)values[j] * values[j];
		if (r % 1024 == 0)
			forget_pages(tensor_bytes(s->from), row);
	}
	forget_pages(tensor_bytes(s->from), tensor_bytes(s->from) + s->rows * s->cols * size);
	for (int64_t j = 0; j < s->cols; j++)
		p->fold[j] = sqrt(p->fold[j]) + 1e-7;
	free(values);
	return 0;
}

static int append_block(struct plan *p, int64_t bytes, int size)
{
	if (p->shard)
		return writer_append(p->shard, p->block, bytes, size);
	return fwrite(p->block, 1, bytes, p->gguf) == (size_t)bytes ? 0 : -1; /* file_close tells why */
}

/* Writes one tensor of the result. */
static int write_product(struct plan *p, const struct product *k)
{
	const int size = dtypes[k->dtype].size;
	for (const struct strip *s = p->strips + k->first; s < p->strips + k->first + k->count; s++) {
		if (verify_strip(p, s) < 0)
			return -1;
		const double *fold = s->lm_head ? p->fold : NULL;
		const int64_t row_bytes = s->cols * size, fit = BLOCK_BYTES / row_bytes;
		const int64_t block_rows = fit < 1 ? 1 : fit < BLOCK_ROWS ? fit : BLOCK_ROWS;
		for (int64_t r = 0; r < s->rows; r += block_rows) {
			const int64_t n = s->rows - r < block_rows ? s->rows - r : block_rows;
			const uint8_t *first = NULL, *last = NULL;
			int64_t wrong = -1;
			for (int64_t i = 0; i < n; i++) {
				p->rows[i] = strip_row(p, s, r + i);
				first = !first || p->rows[i] < first ? p->rows[i] : first;
				last = !last || p->rows[i] > last ? p->rows[i] : last;
			}
#pragma omp parallel for
			for (int64_t i = 0; i < n; i++)
				if (convert_row(p->block + i * row_bytes, k->dtype, p->rows[i], s->from->dtype, s->cols, fold))
#pragma omp atomic write
					wrong = i;
			if (wrong >= 0)
				return fail_overflow(p, k, s, p->rows[wrong]);
			forget_pages(first, last + s->cols * dtypes[s->from->dtype].size);
			if (append_block(p, n * row_bytes, size) < 0)
				return -1;
			progress(&p->progress, n * row_bytes);
		}
	}
	return 0;
}

/* Writes products first .. first+n-1 as a safetensors file. */
static int write_shard(struct plan *p, int first, int n, const char *path)
{
	struct array *arrays = allocate(n * sizeof *arrays);
	enum dtype *types = allocate(n * sizeof *types);
	for (int i = 0; i < n; i++) {
		const struct product *k = &p->products[first + i];
		arrays[i] = (struct array){.name = k->name, .rows = k->rows, .cols = k->cols};
		types[i] = k->dtype;
	}
	p->shard = writer_open(path, arrays, types, n);
	int rc = p->shard ? 0 : -1;
	for (int i = 0; i < n && !rc; i++)
		rc = write_product(p, &p->products[first + i]);
	if (rc == 0)
		rc = weights_finish(p->shard);
	else
		weights_abandon(p->shard);
	p->shard = NULL;
	free(arrays);
	free(types);
	return rc;
}

/* Whether a file of a Hugging Face directory goes along as it is: what tells of the tokenizer, of generation, of the model's classes. */
static bool is_carried(const char *name)
{
	static const char *const endings[] = {".json", ".txt", ".jinja", ".model", ".py", ".md"};
	static const char *const others[] = {"config.json", "trainer.json"};
	const size_t n = strlen(name);
	if (*name == '.' || (n > 11 && !strcmp(name + n - 11, ".index.json")))
		return false;
	for (int i = 0; i < 2; i++)
		if (!strcmp(name, others[i]))
			return false;
	for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
		if (n > strlen(endings[i]) && !strcmp(name + n - strlen(endings[i]), endings[i]))
			return true;
	return !strcmp(name, "LICENSE");
}

/* Brings the other files of the source's directory, or, if asked for, the tokenizer of a GGUF file. */
static int carry_files(const struct source *s, const char *target, bool tokenizer)
{
	if (s->metadata)
		return tokenizer ? gguf_to_tokenizer(s->metadata, s->path, target) : 0;
	char from[PATH_LEN], to[PATH_LEN];
	struct stat st;
	DIR *dir = opendir(s->path);
	if (!dir)
		return fail("%s: cannot list: %s", s->path, strerror(errno));
	int rc = 0;
	for (struct dirent *e; !rc && (e = readdir(dir));)
		if (is_carried(e->d_name)) {
			rc = path_join(from, s->path, e->d_name) < 0 || path_join(to, target, e->d_name) < 0 ? -1 : 0;
			if (rc == 0 && stat(from, &st) == 0 && S_ISREG(st.st_mode))
				rc = copy_file(from, to);
		}
	closedir(dir);
	return rc;
}

/* A directory of shards of at most max_shard_size bytes of data each, but for a larger tensor alone. */
static int write_huggingface(struct plan *p, const struct conversion *to, const char *dir)
{
	char path[PATH_LEN];
	int *first = allocate((p->num_products + 1) * sizeof *first), parts = 0;
	int64_t bytes = 0;
	for (int i = 0; i < p->num_products; i++) {
		if (i && bytes + product_bytes(&p->products[i]) > to->max_shard_size)
			first[++parts] = i, bytes = 0;
		bytes += product_bytes(&p->products[i]);
	}
	first[++parts] = p->num_products;
	int rc = parts > MAX_PARTS ? fail("%s: %d shards; expected at most %d: choose a larger --max-shard-size", to->path, parts, MAX_PARTS) : 0;
	for (int part = 0; part < parts && !rc; part++) {
		checkpoint_file(path, dir, "model", part, parts);
		rc = write_shard(p, first[part], first[part + 1] - first[part], path);
	}
	free(first);
	if (rc == 0)
		rc = parts_finish(dir, "model", parts);
	if (rc == 0)
		rc = path_join(path, dir, "config.json") < 0 ? -1
			: config_write(path, &p->config, huggingface_dtypes[p->products[0].dtype], p->source->config_json);
	return rc < 0 || carry_files(p->source, dir, !to->no_tokenizer) < 0 ? -1 : sync_path(dir);
}

/* The moments of a checkpoint that no step has been made from. */
static int write_zero_moments(const struct plan *p, const char *path)
{
	static const char *const prefixes[2] = {"exp_avg.", "exp_avg_sq."};
	const int n = p->num_products;
	struct array *arrays = allocate(2 * n * sizeof *arrays);
	char (*names)[MAX_NAME + 16] = allocate(2 * n * sizeof *names);
	real *zeros = allocate(BLOCK_BYTES);
	for (int i = 0; i < 2 * n; i++) {
		const struct product *k = &p->products[i % n];
		snprintf(names[i], sizeof *names, "%s%s", prefixes[i / n], k->name);
		arrays[i] = (struct array){.name = names[i], .rows = k->rows, .cols = k->cols};
	}
	struct weights_writer *w = weights_create(path, arrays, 2 * n);
	int rc = w ? 0 : -1;
	for (int i = 0; i < 2 * n && !rc; i++)
		for (int64_t left = array_size(&arrays[i]), piece; left && !rc; left -= piece) {
			piece = left < BLOCK_BYTES / (int64_t)sizeof *zeros ? left : BLOCK_BYTES / (int64_t)sizeof *zeros;
			rc = weights_append(w, zeros, piece);
		}
	if (rc == 0)
		rc = weights_finish(w);
	else
		weights_abandon(w);
	free(zeros);
	free(names);
	free(arrays);
	return rc;
}

/* A checkpoint of step 0: no moments, no data seen, routers' statistics as at the start of a run. */
static int write_checkpoint(struct plan *p, const struct conversion *to)
{
	struct config c = {.model = p->config, .data.tokenizer = "none"}; /* its files are carried over */
	const int layers = c.model.num_hidden_layers;
	struct trainer_state s = {.num_layers = layers, .router_mean = allocate(layers * sizeof(double)), .router_std = allocate(layers * sizeof(double))};
	char dir[PATH_LEN], path[PATH_LEN];
	for (int l = 0; l < layers; l++)
		s.router_std[l] = 1;
	parent_of(c.train.output_dir, to->path);
	int rc = checkpoint_begin(&c, &s, dir);
	if (rc > 0)
		rc = fail("%s: is there already; remove it, or choose another name", to->path);
	else if (rc == 0) {
		checkpoint_file(path, dir, "model", 0, 1);
		rc = write_shard(p, 0, p->num_products, path);
		checkpoint_file(path, dir, "optimizer", 0, 1);
		if (rc == 0)
			rc = write_zero_moments(p, path);
		if (rc == 0)
			rc = carry_files(p->source, dir, !to->no_tokenizer);
		if (rc < 0)
			checkpoint_abandon(dir);
		else
			rc = checkpoint_commit(&c, &s, dir, 1);
	}
	free(s.router_mean);
	free(s.router_std);
	return rc;
}

/* All that stands before the tensors' bytes. */
static int write_gguf_header(const struct plan *p, const struct conversion *to)
{
	const struct source *s = p->source;
	struct metadata m = {0};
	struct text header = {0};
	const char *slash = strrchr(s->path, '/');
	const enum dtype dtype = p->products[0].dtype;
	entry_text(&m, "general.architecture", GGUF_ARCHITECTURE);
	entry_text(&m, "general.type", "model");
	entry_text(&m, "general.name", slash && slash[1] ? slash + 1 : s->path);
	entry_u32(&m, "general.file_type", dtype == F32 ? 0 : dtype == F16 ? 1 : 32);
	entry_u32(&m, "general.quantization_version", 2);
	entry_u32(&m, "general.alignment", GGUF_ALIGNMENT);
	int rc = config_to_gguf(&m, &p->config, s->path);
	if (rc == 0 && to->no_tokenizer)
		entry_text(&m, "tokenizer.ggml.model", "no_vocab");
	else if (rc == 0)
		rc = s->metadata ? fail("%s: a GGUF file's tokenizer is not carried to another; add --no-tokenizer, or convert to a Hugging Face directory "
				"first", s->path) : tokenizer_to_gguf(&m, s->path, s->config_json, p->config.vocab_size);
	text_append(&header, GGUF_MAGIC, 4);
	append_u32(&header, GGUF_VERSION);
	append_u64(&header, p->num_products);
	append_u64(&header, m.count);
	if (rc == 0)
		text_append(&header, m.bytes.data, m.bytes.size);
	int64_t offset = 0;
	for (int i = 0; i < p->num_products; i++) {
		const struct product *k = &p->products[i];
		append_text(&header, k->name);
		append_u32(&header, k->stack ? 3 : k->cols ? 2 : 1);
		if (k->cols)
			append_u64(&header, k->cols);
		append_u64(&header, k->stack ? k->rows / k->stack : k->rows);
		if (k->stack)
			append_u64(&header, k->stack);
		append_u32(&header, k->dtype == F32 ? 0 : k->dtype == F16 ? 1 : 30);
		append_u64(&header, offset);
		offset += (product_bytes(k) + GGUF_ALIGNMENT - 1) / GGUF_ALIGNMENT * GGUF_ALIGNMENT;
	}
	if (rc == 0)
		fwrite(header.data, 1, header.size, p->gguf);
	free(header.data);
	free(m.bytes.data);
	return rc;
}

/* Zeros up to the next multiple of the alignment. */
static void align_file(FILE *f)
{
	static const char zeros[GGUF_ALIGNMENT];
	fwrite(zeros, 1, (GGUF_ALIGNMENT - ftello(f) % GGUF_ALIGNMENT) % GGUF_ALIGNMENT, f);
}

static int write_gguf(struct plan *p, const struct conversion *to, const char *path)
{
	FILE *f = p->gguf = file_create(path);
	int rc = f ? write_gguf_header(p, to) : -1;
	for (int i = 0; i < p->num_products && !rc; i++) {
		align_file(f);
		rc = write_product(p, &p->products[i]);
	}
	if (rc == 0)
		align_file(f);
	return !f ? -1 : file_close(f, path, ferror(f) ? 0 : rc);
}

/* Makes what was planned, under a temporary name in the same directory, and gives it its own when it is whole and on disk. */
static int write_plan(struct plan *p, const struct conversion *to)
{
	char parent[PATH_LEN], name[PATH_LEN], temporary[PATH_LEN];
	const char *slash = strrchr(to->path, '/');
	parent_of(parent, to->path);
	if (make_directories(parent) < 0)
		return -1;
	if (to->format == FORMAT_CHECKPOINT)
		return write_checkpoint(p, to);
	snprintf(name, sizeof name, ".tmp-%s", slash ? slash + 1 : to->path);
	if (path_join(temporary, parent, name) < 0)
		return -1;
	directory_remove(temporary); /* what an interrupted conversion left */
	int rc = 0;
	if (to->format == FORMAT_GGUF)
		rc = write_gguf(p, to, temporary);
	else if (mkdir(temporary, 0777) < 0)
		return fail("%s: cannot create directory: %s", temporary, strerror(errno));
	else
		rc = write_huggingface(p, to, temporary);
	if (rc == 0 && rename(temporary, to->path) < 0)
		rc = fail("%s: cannot rename to %s: %s", temporary, to->path, strerror(errno));
	if (rc < 0)
		directory_remove(temporary);
	return rc < 0 ? -1 : sync_path(parent);
}

/* What can be told of a conversion before the source's tensors are looked at. */
static int check_conversion(const struct source *s, const struct conversion *to)
{
	const char *slash = strrchr(to->path, '/'), *name = slash ? slash + 1 : to->path;
	if (!*name || !strcmp(name, ".") || !strcmp(name, ".."))
		return fail("%s: has no name for what is to be made", to->path);
	if (strlen(to->path) + 128 > PATH_LEN) /* for the files in it and its temporary name */
		return fail("%s: path longer than %d bytes", to->path, PATH_LEN - 128);
	int there = path_exists(to->path);
	if (there)
		return there < 0 ? -1 : fail("%s: is there already; remove it, or choose another name", to->path);
	if (to->format == FORMAT_CHECKPOINT && strcmp(name, "step-0000000"))
		return fail("%s: a checkpoint of a run that begins is named step-0000000; expected RUN/step-0000000, from which ling train continues with "
				"train.output_dir=RUN", to->path);
	if (to->fold_norm_head && !s->config.norm_head)
		return fail("%s: norm_head is off, so there is no NormHead to fold; perhaps it was folded before", s->path);
	if (s->weights->dropped)
		fprintf(stderr, "note: %s: %d rotary_emb.inv_freq tensors are left out: they follow from rope_theta\n", s->path, s->weights->dropped);
	return 0;
}

int convert_model(const struct source *s, const struct array *params, int n, const struct conversion *to, struct converted *result)
{
	struct plan p = {.source = s, .to_gguf = to->format == FORMAT_GGUF, .config = s->config};
	enum dtype dtype = to->format == FORMAT_CHECKPOINT ? REAL_DTYPE : UNKNOWN_DTYPE;
	const bool fold = s->config.norm_head && (to->fold_norm_head || p.to_gguf);
	if (to->dtype)
		dtype = !strcmp(to->dtype, "f32") ? F32 : !strcmp(to->dtype, "f16") ? F16 : BF16;
	if (check_conversion(s, to) < 0)
		return -1;
	if (fold || p.to_gguf)
		p.config.norm_head = p.config.tie_word_embeddings = false;
	p.strips = allocate(3 * (size_t)n * sizeof *p.strips);
	p.products = allocate(3 * (size_t)n * sizeof *p.products);
	p.verified = allocate(s->weights->count);
	p.rows = allocate(BLOCK_ROWS * sizeof *p.rows);
	p.num_strips = cut_strips(p.strips, params, n, &s->config);
	int64_t widest = BLOCK_BYTES;
	for (int i = 0; i < p.num_strips; i++)
		widest = p.strips[i].cols * 8 > widest ? p.strips[i].cols * 8 : widest;
	p.block = allocate(widest);
	int rc = find_strips(&p) < 0 || check_tie(s) < 0 || make_products(&p, dtype) < 0 ? -1 : 0;
	*result = (struct converted){.tensors = p.num_products};
	for (int i = 0; i < p.num_products && !rc; i++)
		result->bytes += product_bytes(&p.products[i]);
	p.progress = progress_start("convert", result->bytes);
	if (rc == 0 && fold)
		rc = compute_fold(&p);
	if (rc == 0)
		rc = write_plan(&p, to);
	progress_end(&p.progress);
	free(p.strips);
	free(p.products);
	free(p.verified);
	free(p.rows);
	free(p.block);
	free(p.fold);
	return rc;
}

/* ============================================================================================================
 * Metrics: OUTPUT_DIR/metrics.jsonl, one strict JSON object a step, steps rising
 * ========================================================================================================== */

/* The real-valued members, in the order of the line. */
static const struct { const char *key; size_t offset; } metric_reals[] = {
	{"loss", offsetof(struct metrics, loss)},
	{"balance_loss", offsetof(struct metrics, balance_loss)},
	{"z_loss", offsetof(struct metrics, z_loss)},
	{"lr", offsetof(struct metrics, lr)},
	{"grad_norm", offsetof(struct metrics, grad_norm)},
	{"seconds", offsetof(struct metrics, seconds)},
	{"tokens_per_second", offsetof(struct metrics, tokens_per_second)},
};
#define NUM_METRIC_REALS (sizeof metric_reals / sizeof *metric_reals)

/* A number, or null with the key added to the list when it is not finite. */
static json_t *metric_number(double x, const char *key, json_t *nonfinite)
{
	if (isfinite(x))
		return json_real(x);
	const char *last = json_string_value(json_array_get(nonfinite, json_array_size(nonfinite) - 1));
	if (!last || strcmp(last, key)) /* an array's key once */
		json_array_append_new(nonfinite, json_string(key));
	return json_null();
}

int metrics_write(FILE *f, const struct metrics *m)
{
	json_t *nonfinite = json_array(), *load = json_array();
	json_t *root = json_pack("{s:I, s:I, s:I, s:i}", "step", (json_int_t)m->step, "samples", (json_int_t)m->samples,
			"tokens", (json_int_t)m->tokens, "batch", m->batch);
	for (size_t i = 0; i < NUM_METRIC_REALS; i++) {
		double x = *(const double *)((const char *)m + metric_reals[i].offset);
		json_object_set_new(root, metric_reals[i].key, metric_number(x, metric_reals[i].key, nonfinite));
	}
	for (int i = 0; i < m->num_layers; i++)
		json_array_append_new(load, metric_number(m->expert_load[i], "expert_load", nonfinite));
	json_object_set_new(root, "expert_load", load);
	if (m->has_valid_loss)
		json_object_set_new(root, "valid_loss", metric_number(m->valid_loss, "valid_loss", nonfinite));
	json_t *samples = json_array();
	for (int i = 0; i < m->num_sources; i++)
		json_array_append_new(samples, json_integer(m->source_samples[i]));
	if (m->num_sources)
		json_object_set(root, "source_samples", samples);
	json_decref(samples);
	json_t *sent = json_object();
	for (int i = 0; i < m->num_kinds; i++)
		json_object_set_new(sent, m->kinds[i], json_integer(m->bytes_sent[i]));
	if (m->num_kinds)
		json_object_set(root, "bytes_sent", sent);
	json_decref(sent);
	if (json_array_size(nonfinite))
		json_object_set(root, "nonfinite", nonfinite);
	char *text = json_text(root, JSON_REAL_PRECISION(17));
	fprintf(f, "%s\n", text);
	free(text);
	json_decref(nonfinite);
	json_decref(root);
	if (fflush(f) != 0 || ferror(f))
		return fail("metrics.jsonl: cannot write step %lld: %s", (long long)m->step, strerror(errno));
	return 0;
}

int metrics_sync(FILE *f)
{
	if (fflush(f) != 0 || fsync(fileno(f)) < 0)
		return fail("metrics.jsonl: cannot bring to disk: %s", strerror(errno));
	return 0;
}

/* A number, or null for NaN. */
static int metric_value(const json_t *v, const char *where, const char *key, double *out)
{
	if (!json_is_number(v) && !json_is_null(v))
		return fail("%s: `%s` is %s; expected a number or null", where, key, json_kind(v));
	*out = json_is_null(v) ? NAN : json_number_value(v);
	return 0;
}

/* Goes through a mapped metrics file line by line. */
struct metrics_reader {
	const char *path;
	const uint8_t *data;
	size_t size, at;             /* at: the end of the last whole line */
	int64_t line;                /* of that line */
	struct metrics row;          /* that line, but for expert_load */
	double *loads;               /* expert_load of all lines, one after the other; the caller frees it */
	size_t num_loads, load_room;
};

/* One line into r->row and r->loads. */
static int metrics_parse(struct metrics_reader *r, const json_t *line, const char *where)
{
	struct metrics *m = &r->row;
	int64_t batch, before = m->step;
	if (field_int(line, where, "step", 0, INT64_MAX, &m->step) < 0)
		return -1;
	if (m->step <= before)
		return fail("%s: step %lld after step %lld; expected rising steps", where, (long long)m->step, (long long)before);
	if (field_int(line, where, "samples", 0, INT64_MAX, &m->samples) < 0 ||
			field_int(line, where, "tokens", 0, INT64_MAX, &m->tokens) < 0 ||
			field_int(line, where, "batch", 0, INT32_MAX, &batch) < 0)
		return -1;
	m->batch = batch;
	for (size_t i = 0; i < NUM_METRIC_REALS; i++) {
		const char *key = metric_reals[i].key;
		if (metric_value(json_object_get(line, key), where, key, (double *)((char *)m + metric_reals[i].offset)) < 0)
			return -1;
	}
	const json_t *load = json_object_get(line, "expert_load"), *valid = json_object_get(line, "valid_loss");
	if (!json_is_array(load))
		return fail("%s: `expert_load` is %s; expected an array", where, json_kind(load));
	m->num_layers = json_array_size(load);
	r->loads = grow(r->loads, r->num_loads, &r->load_room, m->num_layers, sizeof *r->loads);
	for (int i = 0; i < m->num_layers; i++)
		if (metric_value(json_array_get(load, i), where, "expert_load", &r->loads[r->num_loads++]) < 0)
			return -1;
	m->has_valid_loss = valid;
	m->valid_loss = 0;
	return valid ? metric_value(valid, where, "valid_loss", &m->valid_loss) : 0;
}

/* The next line into r->row: 1; 0 at the end, or at a last line that was torn off; -1 on error. */
static int metrics_next(struct metrics_reader *r)
{
	if (r->at == r->size)
		return 0;
	const char *text = (const char *)r->data + r->at, *newline = memchr(text, '\n', r->size - r->at);
	size_t n = newline ? (size_t)(newline + 1 - text) : r->size - r->at;
	char where[PATH_LEN + 32];
	snprintf(where, sizeof where, "%s:%lld", r->path, (long long)++r->line);
	json_error_t error;
	json_t *line = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
	if (!line && !newline)
		return 0;
	int rc;
	if (!line)
		rc = fail("%s: bad JSON: %s", where, error.text);
	else if (!json_is_object(line))
		rc = fail("%s: is %s; expected an object", where, json_kind(line));
	else
		rc = metrics_parse(r, line, where);
	json_decref(line);
	r->at += n;
	return rc < 0 ? -1 : 1;
}

FILE *metrics_open(const char *output_dir, int64_t step)
{
	char path[PATH_LEN];
	if (make_directories(output_dir) < 0 || path_join(path, output_dir, "metrics.jsonl") < 0)
		return NULL;
	struct metrics_reader r = {.path = path, .row.step = -1};
	int there = path_exists(path), rc = there;
	size_t keep = 0;
	int64_t last = 0;            /* step that is kept */
	bool newline = true;
	if (there > 0 && map_file(path, &r.data, &r.size) < 0)
		return NULL;
	while (rc > 0 && (rc = metrics_next(&r)) > 0)
		if (r.row.step <= step)
			keep = r.at, last = r.row.step, newline = r.data[keep - 1] == '\n';
	unmap_file(r.data, r.size);
	free(r.loads);
	if (rc == 0 && r.size && last < step)
		rc = fail("%s: ends at step %lld, but the run goes on after step %lld; bring the missing lines back, or move the "
				"file away to begin a new one", path, (long long)last, (long long)step);
	/* Steps rise, so that what goes is always a tail. */
	if (rc == 0 && keep < r.size && truncate(path, keep) < 0)
		rc = fail("%s: cannot remove the lines after step %lld: %s", path, (long long)step, strerror(errno));
	if (rc < 0)
		return NULL;
	FILE *f = fopen(path, "ae");
	if (!f)
		fail("%s: cannot open: %s", path, strerror(errno));
	else if (!newline)
		putc('\n', f);
	return f;
}

int metrics_read(const char *run_dir, struct metrics **out, int *count)
{
	char path[PATH_LEN];
	struct metrics_reader r = {.path = path, .row.step = -1};
	if (path_join(path, run_dir, "metrics.jsonl") < 0 || map_file(path, &r.data, &r.size) < 0)
		return -1;
	struct metrics *lines = NULL;
	size_t n = 0, room = 0;
	int rc;
	while ((rc = metrics_next(&r)) > 0) {
		lines = grow(lines, n, &room, 1, sizeof *lines);
		lines[n++] = r.row;
	}
	unmap_file(r.data, r.size);
	if (rc == 0) {
		*out = allocate(n * sizeof **out + r.num_loads * sizeof *r.loads);
		*count = n;
		double *load = (double *)(*out + n);
		if (n)
			memcpy(*out, lines, n * sizeof **out);
		if (r.num_loads)
			memcpy(load, r.loads, r.num_loads * sizeof *load);
		for (size_t i = 0; i < n; load += lines[i++].num_layers)
			(*out)[i].expert_load = load;
	}
	free(lines);
	free(r.loads);
	return rc;
}

int64_t count_windows(const struct tokens *t, int64_t L)
{
	return t->count > L ? (t->count - 1) / L : 0;
}

int reading_of(struct reading *r, const struct config *c)
{
	*r = (struct reading){c->data.tokenizer, 0, c->model.vocab_size, c->data.seq_len, c->data.document_mask, c->data.document_token};
	if (!strcmp(c->data.tokenizer, "none"))
		return 0;
	struct tokenizer *t = tokenizer_open(c->data.tokenizer);
	if (!t)
		return -1;
	const int size = tokenizer_size(t);
	r->tokenizer_hash = tokenizer_hash(t);
	tokenizer_close(t);
	return size <= c->model.vocab_size ? 0 : fail("data.tokenizer: %s has %d tokens; expected at most model.vocab_size, which is %d",
			c->data.tokenizer, size, c->model.vocab_size);
}

int read_window(const struct tokens *data, int64_t i, int64_t L, int32_t *input, int32_t *target, int32_t *document)
{
	if (tokens_read(data, i * L, L, input) < 0 || tokens_read(data, i * L + 1, L, target) < 0)
		return -1;
	tokens_mask(data, i * L, L, target);
	return document ? tokens_documents(data, i * L, L, document, target) : 0;
}

/* Fails when the loss counts for no target of the first `windows` windows. The search ends at the first that does. */
static int check_targets(const struct tokens *data, int64_t windows, int64_t L, bool document_mask)
{
	int32_t *input = calloc(3 * L, sizeof *input), *target = input + L, *document = document_mask ? target + L : NULL;
	if (!input)
		return fail("out of memory for a window of %lld tokens", (long long)L);
	int rc = 0;
	bool counts = false;
	for (int64_t i = 0; i < windows && !counts && (rc = read_window(data, i, L, input, target, document)) == 0; i++)
		for (int64_t t = 0; t < L; t++)
			counts |= target[t] >= 0;
	free(input);
	return rc < 0 || counts ? rc : fail("%s: the loss counts for none of the tokens in its %lld windows of %lld; expected a mask%s that leaves some",
			data->path, (long long)windows, (long long)L, document_mask ? " or documents of more than one token" : "");
}

int open_data(struct tokens *t, const struct data_source *source, const struct reading *r, int64_t max_windows)
{
	const char *path = source->path;
	const int64_t L = r->seq_len;
	if (tokens_open(t, path, source->dtype, r->vocab_size) < 0)
		return -1;
	int rc = 0;
	if (count_windows(t, L) == 0)
		rc = fail("%s: %lld tokens are too few for one window: seq_len %lld needs %lld", path, (long long)t->count, (long long)L,
				(long long)L + 1);
	else if (*t->tokenizer && strcmp(r->tokenizer, "none") && r->tokenizer_hash != t->tokenizer_hash)
		rc = fail("%s: made by tokenizer %s with hash %08x; the config says data.tokenizer: %s, which has %08x", path, t->tokenizer,
				(unsigned)t->tokenizer_hash, r->tokenizer, (unsigned)r->tokenizer_hash);
	else if (r->document_mask && t->documents < 0 && r->document_token < 0)
		rc = fail("%s: has no index that tells where documents begin; to mask them, give the id that separates them as document_token", path);
	else if (r->document_token >= r->vocab_size)
		rc = fail("document_token %d is outside the vocabulary of %d that the model has; expected an id that separates documents, 0 to %d",
				r->document_token, r->vocab_size, r->vocab_size - 1);
	t->document_token = r->document_token;
	if (rc == 0)
		rc = check_targets(t, max_windows && max_windows < count_windows(t, L) ? max_windows : count_windows(t, L), L, r->document_mask);
	if (rc < 0)
		tokens_close(t);
	return rc;
}
