/*
 * files/base.c - errors, memory, paths, files, checked JSON, checksums, progress and the clock: what every other file stands on.
 */
#define _GNU_SOURCE
#include "files/base.h"

#include <argp.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <zlib.h>

_Thread_local char error_text[4096];

void set_error(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vsnprintf(error_text, sizeof error_text, format, args);
	va_end(args);
	for (char *p = error_text; *p; p++) /* foreign names are in it: they must not steer the terminal */
		if (iscntrl((unsigned char)*p))
			*p = '?';
}

void *allocate(size_t n)
{
	void *p = calloc(1, n ? n : 1);
	if (!p) {
		fprintf(stderr, "ling: out of memory: %zu bytes were needed\n", n);
		exit(1);
	}
	return p;
}

void *grow(void *array, size_t used, size_t *capacity, size_t more, size_t size)
{
	if (used + more <= *capacity)
		return array;
	*capacity = 2 * (used + more);
	void *larger = allocate(*capacity * size);
	if (used)
		memcpy(larger, array, used * size);
	free(array);
	return larger;
}

char *copy_string(const char *text)
{
	return strcpy(allocate(strlen(text) + 1), text);
}

int path_join(char out[PATH_LEN], const char *dir, const char *name)
{
	if (snprintf(out, PATH_LEN, "%s/%s", dir, name) >= PATH_LEN)
		return fail("%s/%s: path longer than %d bytes", dir, name, PATH_LEN - 1);
	return 0;
}

int map_file(const char *path, const uint8_t **data, size_t *size)
{
	int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC); /* a FIFO must not block */
	if (fd < 0)
		return fail("%s: cannot open: %s", path, strerror(errno));
	struct stat st;
	*data = NULL, *size = 0;
	int rc = 0;
	if (fstat(fd, &st) < 0)
		rc = fail("%s: cannot stat: %s", path, strerror(errno));
	else if (!S_ISREG(st.st_mode))
		rc = fail("%s: expected a file, found %s", path, S_ISDIR(st.st_mode) ? "a directory" : "something else");
	else if (st.st_size > 0) {
		void *p = mmap(NULL, st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
		if (p == MAP_FAILED)
			rc = fail("%s: cannot map %lld bytes: %s", path, (long long)st.st_size, strerror(errno));
		else
			*data = p, *size = st.st_size;
	}
	close(fd);
	return rc;
}

void unmap_file(const uint8_t *data, size_t size)
{
	if (data)
		munmap((void *)data, size);
}

int file_crc32(const char *path, uint32_t *crc)
{
	const uint8_t *data;
	size_t size;
	if (map_file(path, &data, &size) < 0)
		return -1;
	*crc = crc32_z(0, data, size);
	unmap_file(data, size);
	return 0;
}

json_t *json_parse(const char *path, size_t flags)
{
	const uint8_t *data;
	size_t size;
	if (map_file(path, &data, &size) < 0)
		return NULL;
	json_error_t error;
	json_t *root = json_loadb(size ? (const char *)data : "", size, JSON_REJECT_DUPLICATES | flags, &error);
	unmap_file(data, size);
	if (!root)
		fail("%s:%d: bad JSON: %s", path, error.line, error.text);
	else if (!json_is_object(root)) {
		json_decref(root), root = NULL;
		fail("%s: expected a JSON object at top level", path);
	}
	return root;
}

json_t *json_read(const char *path)
{
	return json_parse(path, 0);
}

char *json_text(const json_t *value, size_t flags)
{
	char *text = json_dumps(value, flags);
	if (!text) {
		fprintf(stderr, "ling: out of memory while writing JSON\n");
		exit(1);
	}
	return text;
}

FILE *file_create(const char *path)
{
	FILE *f = fopen(path, "we");
	if (!f)
		fail("%s: cannot create: %s", path, strerror(errno));
	return f;
}

int fail_write(const char *path, int error)
{
	return fail("%s: cannot write: %s; free some space or choose another place", path, strerror(error));
}

int file_close(FILE *f, const char *path, int rc)
{
	int error = ferror(f) ? (errno ? errno : EIO) : 0;
	struct stat st;
	bool regular = fstat(fileno(f), &st) == 0 && S_ISREG(st.st_mode); /* devices and pipes: no fsync, and never removed */
	if (!error && (fflush(f) || (regular && fsync(fileno(f)) < 0)))
		error = errno;
	if (fclose(f) && !error)
		error = errno;
	if (error && !rc)
		rc = fail_write(path, error);
	if (rc < 0 && regular)
		unlink(path);
	return rc;
}

int copy_file(const char *from, const char *to)
{
	const uint8_t *data;
	size_t size;
	if (map_file(from, &data, &size) < 0)
		return -1;
	FILE *f = file_create(to);
	if (f && size)
		fwrite(data, 1, size, f);
	unmap_file(data, size);
	return f ? file_close(f, to, 0) : -1;
}

int sync_path(const char *path)
{
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	int rc = fd < 0 || (fsync(fd) < 0 && errno != EINVAL) ?
			fail("%s: cannot bring to disk: %s", path, strerror(errno)) : 0;
	if (fd >= 0)
		close(fd);
	return rc;
}

void parent_of(char out[PATH_LEN], const char *path)
{
	snprintf(out, PATH_LEN, "%s", path);
	char *slash = strrchr(out, '/');
	if (slash)
		slash[slash == out] = 0; /* keeps the / of the root */
	else
		strcpy(out, ".");
}

/* What is new is on disk when this returns: what will be in it must survive a power cut. */
int make_directories(const char *dir)
{
	char path[PATH_LEN], parent[PATH_LEN];
	if (snprintf(path, sizeof path, "%s", dir) >= PATH_LEN)
		return fail("%s: path longer than %d bytes", dir, PATH_LEN - 1);
	for (char *p = path + 1;; p++) {
		if (*p != '/' && *p)
			continue;
		char end = *p;
		*p = 0;
		bool made = mkdir(path, 0777) == 0;
		if (!made && errno != EEXIST)
			return fail("%s: cannot create directory: %s", path, strerror(errno));
		parent_of(parent, path);
		if (made && sync_path(parent) < 0)
			return -1;
		*p = end;
		if (!end)
			break;
	}
	struct stat st;
	if (stat(path, &st) < 0 || !S_ISDIR(st.st_mode))
		return fail("%s: expected a directory", path);
	return 0;
}

const char *printable(char out[64], const char *text)
{
	int n = 0;
	for (; text[n] && n < 60; n++)
		out[n] = iscntrl((unsigned char)text[n]) ? '?' : text[n];
	if (text[n]) {
		while (n > 0 && ((unsigned char)text[n] & 0xc0) == 0x80)
			n--;
		memcpy(out + n, "...", 3);
		n += 3;
	}
	out[n] = 0;
	return out;
}

int json_write(const char *path, const json_t *root)
{
	char *text = json_text(root, JSON_INDENT(2));
	FILE *f = file_create(path);
	int rc = -1;
	if (f) {
		fprintf(f, "%s\n", text);
		rc = file_close(f, path, 0);
	}
	free(text);
	return rc;
}

const json_t *json_at_part(const json_t *value, const char *path, size_t n)
{
	for (size_t length; n && value; path += length, n -= length) {
		length = memchr(path, '.', n) ? (size_t)((const char *)memchr(path, '.', n) - path) : n;
		if (!json_is_array(value))
			value = json_object_getn(value, path, length);
		else if (length && length < 10 && strspn(path, "0123456789") >= length)
			value = json_array_get(value, strtoul(path, NULL, 10));
		else
			value = NULL;
		length += length < n; /* the dot */
	}
	return value;
}

const json_t *json_at(const json_t *value, const char *path)
{
	return json_at_part(value, path, strlen(path));
}

/* ============================================================================================================
 * Files, what they share: checked JSON fields, little-endian loads
 * ========================================================================================================== */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the files are little-endian, and so must the machine be");

int path_suffix(char out[PATH_LEN], const char *prefix, const char *suffix)
{
	if (snprintf(out, PATH_LEN, "%s%s", prefix, suffix) >= PATH_LEN)
		return fail("%s%s: path longer than %d bytes", prefix, suffix, PATH_LEN - 1);
	return 0;
}

int path_exists(const char *path)
{
	struct stat st;
	if (stat(path, &st) == 0)
		return 1;
	return errno == ENOENT ? 0 : fail("%s: cannot stat: %s", path, strerror(errno));
}

const char *json_kind(const json_t *v)
{
	static const char *const kinds[] = {
		[JSON_OBJECT] = "an object", [JSON_ARRAY] = "an array", [JSON_STRING] = "a string", [JSON_INTEGER] = "an integer",
		[JSON_REAL] = "a real number", [JSON_TRUE] = "true", [JSON_FALSE] = "false", [JSON_NULL] = "null",
	};
	return v ? kinds[json_typeof(v)] : "missing";
}

int field_int(const json_t *object, const char *where, const char *key, int64_t low, int64_t high, int64_t *out)
{
	const json_t *v = json_object_get(object, key);
	if (!json_is_integer(v))
		return fail("%s: `%s` is %s; expected an integer", where, key, json_kind(v));
	*out = json_integer_value(v);
	if (*out < low || *out > high)
		return fail("%s: `%s` is %lld; expected %lld to %lld", where, key, (long long)*out, (long long)low,
				(long long)high);
	return 0;
}

const char *field_text(const json_t *object, const char *where, const char *key)
{
	const json_t *v = json_object_get(object, key);
	if (!json_is_string(v))
		fail("%s: `%s` is %s; expected a string", where, key, json_kind(v));
	return json_string_value(v);
}

int field_crc(const json_t *object, const char *where, const char *key, uint32_t *out)
{
	const char *text = field_text(object, where, key);
	if (!text)
		return -1;
	if (strlen(text) != 8 || strspn(text, "0123456789abcdef") != 8)
		return fail("%s: `%s` is \"%.40s\"; expected eight hexadecimal digits", where, key, text);
	*out = strtoul(text, NULL, 16);
	return 0;
}

json_t *crc_to_json(uint32_t crc)
{
	return json_sprintf("%08x", (unsigned)crc);
}

double clock_seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + 1e-9 * now.tv_nsec;
}

struct progress progress_start(const char *what, int64_t total)
{
	const double now = clock_seconds();
	return (struct progress){.what = what, .total = total, .terminal = isatty(2), .started = now, .shown = now};
}

void progress(struct progress *p, int64_t n)
{
	p->done += n;
	double now = clock_seconds();
	if (now - p->shown < (p->terminal ? 0.2 : 10))
		return;
	p->shown = now;
	double rate = p->done / (now - p->started);
	const char *begin = p->terminal ? "\r" : "", *end = p->terminal ? "  " : "\n";
	if (p->total >= p->done)
		fprintf(stderr, "%s%s: %3.0f %%  %.0f MB/s  %.0f s left%s", begin, p->what, 100.0 * p->done / p->total, rate / 1e6,
				(p->total - p->done) / rate, end);
	else
		fprintf(stderr, "%s%s: %.0f MB  %.0f MB/s%s", begin, p->what, p->done / 1e6, rate / 1e6, end);
}

void progress_end(const struct progress *p)
{
	if (p->terminal && p->shown > p->started)
		fprintf(stderr, "\r%70s\r", "");
}

uint32_t crc_of(uint32_t crc, const uint8_t *data, size_t n)
{
	enum { SLICE = 1 << 20, SLICES = 64 };
	while (n >= 2 * SLICE) {
		const size_t left = n / SLICE;
		const int slices = left < SLICES ? (int)left : SLICES;
		uint32_t part[SLICES];
#pragma omp parallel for
		for (int i = 0; i < slices; i++)
			part[i] = crc32_z(0, data + (size_t)i * SLICE, SLICE);
		for (int i = 0; i < slices; i++)
			crc = crc32_combine(crc, part[i], SLICE);
		data += (size_t)slices * SLICE, n -= (size_t)slices * SLICE;
	}
	return crc32_z(crc, data, n);
}

int32_t load_i32(const uint8_t *p)
{
	int32_t v;
	memcpy(&v, p, sizeof v);
	return v;
}

int64_t load_i64(const uint8_t *p)
{
	int64_t v;
	memcpy(&v, p, sizeof v);
	return v;
}

void text_append(struct text *out, const char *bytes, size_t n)
{
	out->data = grow(out->data, out->size, &out->capacity, n + 1, 1);
	if (n)
		memcpy(out->data + out->size, bytes, n);
	out->size += n;
	out->data[out->size] = 0;
}

bool has_suffix(const char *text, const char *suffix)
{
	const size_t n = strlen(text), m = strlen(suffix);
	return n >= m && !strcmp(text + n - m, suffix);
}

double plain_nan(double x)
{
	return isnan(x) ? NAN : x;
}

int launched_ranks(void)
{
	static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (getenv(names[i]))
			return atoi(getenv(names[i]));
	return 1;
}

bool is_terminal(FILE *f)
{
	return launched_ranks() == 1 && isatty(fileno(f));
}

void print_status(FILE *out, const char *line, bool keep)
{
	struct winsize size = {.ws_col = 80};
	if (!is_terminal(out)) {
		fprintf(out, "%s\n", line);
	} else {
		ioctl(fileno(out), TIOCGWINSZ, &size);
		fprintf(out, "\r\033[K%.*s%s", keep || size.ws_col == 0 ? INT32_MAX : size.ws_col - 1, line, keep ? "\n" : "");
	}
	fflush(out);
}

const char *format_duration(char out[32], double seconds)
{
	const int64_t s = (int64_t)fmin(fmax(seconds, 0), 1e12);
	if (s >= 3600)
		snprintf(out, 32, "%lld:%02lld:%02lld", (long long)(s / 3600), (long long)(s / 60 % 60), (long long)(s % 60));
	else
		snprintf(out, 32, "%lld:%02lld", (long long)(s / 60), (long long)(s % 60));
	return out;
}

int lock_directory(const char *dir)
{
	if (make_directories(dir) < 0)
		return -1;
	int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return fail("%s: cannot open: %s", dir, strerror(errno));
	if (flock(fd, LOCK_EX | LOCK_NB) < 0) {
		const int error = errno;
		close(fd);
		return error == EWOULDBLOCK ?
				fail("%s: another ling train is writing there; wait for it, or choose another train.output_dir", dir) :
				fail("%s: cannot lock the directory: %s", dir, strerror(error));
	}
	return fd;
}

/* The smallest number in the files `name` of a control group and of the groups that it is in, from ROOT + mount + group up
 * to ROOT + mount; `least` where there is none. A group without a limit has the word "max" there, or a huge number. */
static double group_limit(double least, const char *root, const char *mount, const char *group, const char *name)
{
	char path[PATH_LEN], up[PATH_LEN];
	if (snprintf(up, sizeof up, "%s", group) >= PATH_LEN)
		return least;
	for (char *end = up + strlen(up);; *end = 0) {
		double bytes;
		FILE *f = snprintf(path, sizeof path, "%s%s%s/%s", root, mount, up, name) < PATH_LEN ? fopen(path, "re") : NULL;
		if (f && fscanf(f, "%lf", &bytes) == 1 && bytes < least)
			least = bytes;
		if (f)
			fclose(f);
		if (!(end = strrchr(up, '/')))
			return least;
	}
}

double usable_memory(const char *root)
{
	double least = (double)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE);
	char path[PATH_LEN], line[2 * PATH_LEN];
	FILE *f = snprintf(path, sizeof path, "%s/proc/self/cgroup", root) < PATH_LEN ? fopen(path, "re") : NULL;
	while (f && fgets(line, sizeof line, f)) { /* NUMBER:CONTROLLERS:GROUP; version 2 has one line, 0::GROUP */
		line[strcspn(line, "\n")] = 0;
		char *controllers = strchr(line, ':'), *group = controllers ? strchr(controllers + 1, ':') : NULL;
		if (!group)
			continue;
		*controllers++ = ',', *group++ = 0;
		if (!*controllers)
			least = group_limit(least, root, "/sys/fs/cgroup", group, "memory.max");
		else if (strstr(line, ",memory"))
			least = group_limit(least, root, "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes");
	}
	if (f)
		fclose(f);
	return least;
}

int compare_doubles(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}
