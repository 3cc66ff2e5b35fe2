/*
 * files/safetensors.c - safetensors files and Hugging Face directories of them: reading and writing.
 */
#define _GNU_SOURCE
#include "files/safetensors.h"

#include "files/base.h"
#include "files/tensors.h"

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define HEADER_MAX 100000000 /* bytes; the format's own limit */

/* Checks one entry of the header and fills *t from it. data_size: bytes of all tensors in the file. */
static int tensor_parse(struct tensor *t, const struct tensor_file *s, const char *name, const json_t *entry,
		uint64_t data_size)
{
	*t = (struct tensor){.name = name, .file = s, .dtype = UNKNOWN_DTYPE};
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

	const json_t *shape = json_object_get(entry, "shape");
	if (!json_is_array(shape) || json_array_size(shape) > MAX_DIMS)
		return fail("%s: `shape` is %s; expected an array of at most %d integers", where, json_is_array(shape)
				? "longer" : json_kind(shape), MAX_DIMS);
	t->num_dims = json_array_size(shape);
	uint64_t bytes = t->dtype == UNKNOWN_DTYPE ? 0 : dtypes[t->dtype].size;
	for (int i = 0; i < t->num_dims; i++) {
		const json_t *size = json_array_get(shape, i);
		if (!json_is_integer(size) || json_integer_value(size) < 0)
			return fail("%s: `shape` entry %d is %s; expected an integer of at least 0", where, i,
					json_is_integer(size) ? "negative" : json_kind(size));
		t->shape[i] = json_integer_value(size);
		if (__builtin_mul_overflow(bytes, (uint64_t)t->shape[i], &bytes))
			return fail("%s: `shape` is too large for any file", where);
	}

	if (json_array_size(offsets) != 2 || !json_is_integer(begin) || !json_is_integer(end))
		return fail("%s: expected `data_offsets` as an array of two integers", where);
	long long b = json_integer_value(begin), e = json_integer_value(end);
	if (b < 0 || b > e || (uint64_t)e > data_size)
		return fail("%s: data_offsets are [%lld, %lld]; expected a range within the file's %llu bytes of data", where,
				b, e, (unsigned long long)data_size);
	t->begin = b, t->end = e;
	if (t->dtype != UNKNOWN_DTYPE && bytes != t->end - t->begin)
		return fail("%s: data_offsets hold %lld bytes; expected %llu for its shape and dtype %s", where, e - b,
				(unsigned long long)bytes, t->dtype_name);
	return 0;
}

/* Checks that the n tensors of a file fill its data without overlap or hole. Sorts them by offset. */
static int tensors_fill(struct tensor *t, int n, const struct tensor_file *s, uint64_t data_size)
{
	uint64_t end = 0;
	if (n)
		qsort(t, n, sizeof *t, by_offset);
	for (int i = 0; i < n; end = t[i++].end) {
		if (t[i].begin < end)
			return fail("%s: tensors %.256s and %.256s overlap at data byte %llu", s->path, t[i - 1].name, t[i].name,
					(unsigned long long)t[i].begin);
		if (t[i].begin > end)
			return fail("%s: data bytes %llu to %llu, before tensor %.256s, belong to no tensor; expected no holes",
					s->path, (unsigned long long)end, (unsigned long long)t[i].begin, t[i].name);
	}
	if (end != data_size)
		return fail("%s: the tensors end at data byte %llu but the file holds %llu; expected no bytes after them",
				s->path, (unsigned long long)end, (unsigned long long)data_size);
	return 0;
}

/* Reads the header's __metadata__ (strings only) and gives each of n tensors its checksum, where one is there. */
static int tensors_checksums(struct tensor *t, int n, const struct tensor_file *s)
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

int safetensors_open_file(struct tensors *w, const char *path)
{
	struct tensor_file *s = tensor_file_map(w, path);
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
		return fail("%s: header of %llu bytes in a file of %zu; the file is truncated", path,
				(unsigned long long)length, s->size);
	const char *text = (const char *)s->map + 8;
	if (!length || *text != '{')
		return fail("%s: the header does not begin with '{'; not a safetensors file?", path);
	json_error_t error;
	if (!(s->header = json_loadb(text, length, JSON_REJECT_DUPLICATES, &error)))
		return fail("%s: bad JSON in the header at byte %d: %s", path, error.position, error.text);

	s->data_at = 8 + length;
	uint64_t data_size = s->size - s->data_at;
	/* one more than the header may need: the array is never NULL */
	w->tensors = grow(w->tensors, w->count, &w->capacity, json_object_size(s->header) + 1, sizeof *w->tensors);
	struct tensor *mine = w->tensors + w->count;
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

/* Opens every shard that the index names, and checks that index and shards tell the same. */
static int safetensors_open_index(struct tensors *w, const char *dir, const char *index_path, const json_t *index)
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
		struct tensor_file *s = w->files;
		while (s && strcmp(s->path, path))
			s = s->next;
		if (s)
			continue;
		int there = path_exists(path);
		if (!there)
			fail("%s: is not there, but %s names it for tensor %.256s", path, index_path, name);
		if (there <= 0 || safetensors_open_file(w, path) < 0)
			return -1;
		for (int i = 0; i < w->count; i++) {
			if (w->tensors[i].file != w->files) /* the new one is first in the list */
				continue;
			const char *owner = json_string_value(json_object_get(map, w->tensors[i].name));
			if (!owner || strcmp(owner, file))
				return fail("%s: holds tensor %.256s, but %s says it is in %.256s", path, w->tensors[i].name,
						index_path, owner ? owner : "no file");
		}
	}
	json_object_foreach(map, name, value)
		if (!tensor_find(w, name))
			return fail("%s/%.256s: tensor %.256s is missing, but %s says it is there", dir, json_string_value(value),
					name, index_path);
	return 0;
}

/* Opens the index and its shards where there is an index, else the one file. */
static int safetensors_open_directory(struct tensors *w, const char *dir, const char *stem)
{
	char base[PATH_LEN], single_path[PATH_LEN], index_path[PATH_LEN];
	if (path_join(base, dir, stem) < 0 || path_suffix(single_path, base, ".safetensors") < 0 ||
			path_suffix(index_path, base, ".safetensors.index.json") < 0)
		return -1;
	int there = path_exists(index_path);
	if (there > 0) {
		json_t *index = json_read(index_path);
		int rc = index ? safetensors_open_index(w, dir, index_path, index) : -1;
		json_decref(index);
		return rc;
	}
	if (there == 0 && (there = path_exists(single_path)) > 0)
		return safetensors_open_file(w, single_path);
	if (there < 0)
		return -1;
	return fail("%s: no weights here; looked for %s.safetensors.index.json and %s.safetensors", dir, stem, stem);
}

/* Leaves out the buffers of old files, tables that follow from the config and that Hugging Face ignores as well. */
static void drop_buffers(struct tensors *w)
{
	int kept = 0;
	for (int i = 0; i < w->count; i++)
		if (strncmp(w->tensors[i].name, "model.", 6) || !has_suffix(w->tensors[i].name, ".rotary_emb.inv_freq"))
			w->tensors[kept++] = w->tensors[i];
	w->dropped = w->count - kept;
	w->count = kept;
}

struct tensors *tensors_open(const char *path, const char *stem)
{
	struct tensors *w = allocate(sizeof *w);
	struct stat st;
	int rc;
	if (path_copy(w->path, path) < 0)
		rc = -1;
	else if (stat(path, &st) < 0)
		rc = fail("%s: cannot open: %s", path, strerror(errno));
	else
		rc = S_ISDIR(st.st_mode) ? safetensors_open_directory(w, path, stem) : safetensors_open_file(w, path);
	if (rc == 0) {
		drop_buffers(w);
		return w;
	}
	tensors_close(w);
	return NULL;
}

/* ---------------------------------------------------------------------------------------------------- writing */

struct safetensors_writer {
	char path[PATH_LEN];
	FILE *f;
	json_t *header;            /* tensors in the order of their data: jansson keeps it */
	int64_t written;           /* bytes of data */
	struct write_fault fault;
	int n, current;            /* tensors; the one that the next byte belongs to, or an empty one before it */
	/* [n] bytes up to its end; checksum so far; bytes of an element */
	struct { int64_t end; uint32_t crc; int size; } tensors[];
};

/* The key of a tensor's checksum in the metadata. Returns whether it fits. */
static bool crc_key(char key[MAX_NAME + 32], const char *name) /* room for exp_avg_sq. and crc32. */
{
	return snprintf(key, MAX_NAME + 32, "crc32.%s", name) < MAX_NAME + 32;
}

/* The elements of a tensor. */
static int64_t tensor_size(const struct tensor *t)
{
	int64_t n = 1;
	for (int i = 0; i < t->num_dims; i++)
		n *= t->shape[i];
	return n;
}

/* The JSON header of a file of n tensors, data in array order; the checksums are 0, which is that of nothing. NULL on
 * error. */
static json_t *header_make(const char *path, const struct tensor *tensors, int n)
{
	json_t *header = json_object(), *metadata = json_object();
	json_object_set_new(metadata, "format", json_string("pt"));
	json_object_set_new(header, "__metadata__", metadata);
	json_int_t at = 0;
	for (int i = 0; i < n; i++) {
		const struct tensor *t = &tensors[i];
		char key[MAX_NAME + 32];
		json_int_t end = at + tensor_size(t) * dtypes[t->dtype].size;
		json_t *shape = json_array();
		for (int j = 0; j < t->num_dims; j++)
			json_array_append_new(shape, json_integer(t->shape[j]));
		json_t *entry = json_pack("{s:s, s:o, s:[I,I]}", "dtype", dtypes[t->dtype].name, "shape", shape,
				"data_offsets", at, end);
		const char *wrong = json_object_get(header, t->name) ? "is there twice"
			: !crc_key(key, t->name) ? "has too long a name"
			: json_object_set(header, t->name, entry) < 0 ? "has a name that is not UTF-8" : NULL;
		json_decref(entry);
		if (wrong) {
			fail("%s: tensor %.256s %s", path, t->name, wrong);
			json_decref(header);
			return NULL;
		}
		json_object_set_new(metadata, key, crc_to_json(0));
		at = end;
	}
	return header;
}

/* Writes the header at the front; what is written next comes behind it. */
static int header_write(struct safetensors_writer *w)
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
static int safetensors_writer_close(struct safetensors_writer *w, int rc)
{
	rc = file_close(w->f, w->path, rc);
	json_decref(w->header);
	free(w);
	return rc;
}

struct safetensors_writer *safetensors_create_any(const char *path, const struct tensor *tensors, int n)
{
	char copy[PATH_LEN];
	json_t *header = path_copy(copy, path) < 0 ? NULL : header_make(path, tensors, n);
	FILE *f = header ? file_create(path) : NULL;
	if (!f) {
		json_decref(header);
		return NULL;
	}
	struct safetensors_writer *w = allocate(sizeof *w + n * sizeof *w->tensors);
	*w = (struct safetensors_writer){.f = f, .header = header, .n = n, .fault = {.after = INT64_MAX}};
	memcpy(w->path, copy, PATH_LEN);
	for (int i = 0; i < n; i++) {
		w->tensors[i].size = dtypes[tensors[i].dtype].size;
		w->tensors[i].end = (i ? w->tensors[i - 1].end : 0) + tensor_size(&tensors[i]) * w->tensors[i].size;
	}
	if (header_write(w) == 0)
		return w;
	safetensors_abandon(w);
	return NULL;
}

struct safetensors_writer *safetensors_create_typed(const char *path, const struct named_tensor *tensors,
		const enum dtype *types, int n)
{
	struct tensor *any = allocate(n * sizeof *any);
	for (int i = 0; i < n; i++)
		any[i] = (struct tensor){.name = tensors[i].name, .shape = {tensors[i].rows, tensors[i].cols},
				.num_dims = tensors[i].cols ? 2 : 1, .dtype = types[i]};
	struct safetensors_writer *w = safetensors_create_any(path, any, n);
	free(any);
	return w;
}

struct safetensors_writer *safetensors_create(const char *path, const struct named_tensor *tensors, int n)
{
	enum dtype *types = allocate(n * sizeof *types);
	for (int i = 0; i < n; i++)
		types[i] = REAL_DTYPE;
	struct safetensors_writer *w = safetensors_create_typed(path, tensors, types, n);
	free(types);
	return w;
}

int safetensors_set_metadata(struct safetensors_writer *w, const char *key, const char *value)
{
	json_object_set_new(json_object_get(w->header, "__metadata__"), key, json_cstring(value));
	return header_write(w);
}

void safetensors_set_fault(struct safetensors_writer *w, struct write_fault fault)
{
	w->fault = fault;
}

/* So many bytes are written that the fault comes. */
static int meet_fault(struct safetensors_writer *w)
{
	fflush(w->f);
	if (!w->fault.signal)
		return fail_write(w->path, ENOSPC);
	w->fault.after = INT64_MAX;
	raise(w->fault.signal);
	return 0;
}

int safetensors_append_bytes(struct safetensors_writer *w, const uint8_t *data, int64_t bytes, int size)
{
	while (bytes > 0) {
		while (w->current < w->n && w->tensors[w->current].end == w->written)
			w->current++;
		if (w->current == w->n)
			return fail("%s: %lld elements more than its %d tensors hold", w->path, (long long)bytes / size, w->n);
		if (w->written == w->fault.after && meet_fault(w) < 0)
			return -1;
		const int64_t end = w->tensors[w->current].end, next = w->written < w->fault.after && end > w->fault.after
				? w->fault.after : end, left = next - w->written, piece = bytes < left ? bytes : left;
		uint32_t *crc = &w->tensors[w->current].crc;
		*crc = crc_of(*crc, data, piece);
		if (fwrite(data, 1, piece, w->f) != (size_t)piece)
			return fail_write(w->path, errno);
		data += piece, bytes -= piece, w->written += piece;
	}
	return 0;
}

int safetensors_append(struct safetensors_writer *w, const real *data, int64_t count)
{
	return safetensors_append_bytes(w, (const uint8_t *)data, count * (int64_t)sizeof *data, sizeof *data);
}

int safetensors_finish(struct safetensors_writer *w)
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
	return safetensors_writer_close(w, rc < 0 ? rc : header_write(w));
}

void safetensors_abandon(struct safetensors_writer *w)
{
	if (w)
		safetensors_writer_close(w, -1);
}

int safetensors_write(const char *path, const struct named_tensor *tensors, int n)
{
	struct safetensors_writer *w = safetensors_create(path, tensors, n);
	int rc = w ? 0 : -1;
	for (int i = 0; i < n && !rc; i++)
		rc = safetensors_append(w, tensors[i].data, named_tensor_size(&tensors[i]));
	if (!rc)
		return safetensors_finish(w);
	safetensors_abandon(w);
	return -1;
}
