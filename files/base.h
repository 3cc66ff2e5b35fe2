/*
 * files/base.h - errors, memory, paths, files, checked JSON, checksums, progress and the clock: what every other file stands on.
 */
#ifndef LING_FILES_BASE_H
#define LING_FILES_BASE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

/* The type of weights and activations. The program is float32; the tests compile the same source once more in
 * double, where finite differences are exact enough to check every backward pass. */
#ifdef LING_DOUBLE
typedef double real;
#else
typedef float real;
#endif

#define PATH_LEN 1024      /* bytes of a path in a config, terminator included */

#define MAX_NAME 128       /* bytes of a tensor's name, terminator included */

extern _Thread_local char error_text[4096];
void set_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline int failure(void) { return -1; }
#define fail(...) (set_error(__VA_ARGS__), failure()) /* a macro, so that compilers see the -1 */

/* Makes room for `more` entries behind the `used` ones of an array of the caller, doubling it when full; ends the program when there is no
 * memory. Returns the array, to be freed with free(). */
void *grow(void *array, size_t used, size_t *capacity, size_t more, size_t size);

struct text { char *data; size_t size, capacity; }; /* free(data); always ends with a 0 beyond size */

void text_append(struct text *out, const char *bytes, size_t n);

struct strings { char **text; int64_t count; bool list; }; /* list: written as one */

struct file_map { const uint8_t *data; size_t size; };

/* CRC-32 of a whole file. */
int file_crc32(const char *path, uint32_t *crc);
/* Creates DIR and its parents, on disk when it returns. */
int make_directories(const char *dir);

/* malloc that cannot return NULL: what data.c allocates is small, bounded by checked file sizes. n 0 is fine. */
void *allocate(size_t n);

char *copy_string(const char *text);

/* Joins two path components; fails when the result is longer than a path may be. */
int path_join(char out[PATH_LEN], const char *dir, const char *name);

/* Maps a whole regular file read-only. *size 0 gives *data NULL. The caller unmaps. */
int map_file(const char *path, const uint8_t **data, size_t *size);

void unmap_file(const uint8_t *data, size_t size);

/* Parses a JSON object from a file, with jansson's flags beside that which refuses duplicate keys. NULL on error (syntax, not an object), naming
 * file and line. */
json_t *json_parse(const char *path, size_t flags);

json_t *json_read(const char *path);

/* json_dumps that cannot return NULL, for values made or read here; the caller frees it. */
char *json_text(const json_t *value, size_t flags);

/* Creates a file for writing, or empties it. NULL on error. */
FILE *file_create(const char *path);

int fail_write(const char *path, int error);

/* Brings a file to disk and closes it. When that fails, or rc says that something has failed before, it is removed:
 * half a file is none. Between create and close nobody needs to check for errors, but a long loop should. */
int file_close(FILE *f, const char *path, int rc);

int copy_file(const char *from, const char *to);

/* fsync of a file or directory by name; a file system that cannot do that for directories is let pass. */
int sync_path(const char *path);

/* The directory that a path, which is not longer than a path may be, lies in. */
void parent_of(char out[PATH_LEN], const char *path);

/* Copies foreign text for a message: at most 60 bytes, control characters as ?, never half a UTF-8 character. */
const char *printable(char out[64], const char *text);

/* Writes JSON with line breaks to a file, fsynced. */
int json_write(const char *path, const json_t *root);

/* What a dotted path of n bytes names in nested objects and, by a number from 0, arrays; NULL when there is none. */
const json_t *json_at_part(const json_t *value, const char *path, size_t n);

const json_t *json_at(const json_t *value, const char *path);

/* PREFIX + suffix as a path. */
int path_suffix(char out[PATH_LEN], const char *prefix, const char *suffix);

/* 1 there, 0 not there, -1 when that cannot be told. */
int path_exists(const char *path);

/* What a JSON value is, in words. */
const char *json_kind(const json_t *v);

/* Reads an integer member of `object` in low..high; `where` (a file, or file:line) begins the message. */
int field_int(const json_t *object, const char *where, const char *key, int64_t low, int64_t high, int64_t *out);

/* Reads a string member; it lives as long as the object. NULL on error. */
const char *field_text(const json_t *object, const char *where, const char *key);

/* Reads a CRC-32 member, written as eight hexadecimal digits. */
int field_crc(const json_t *object, const char *where, const char *key, uint32_t *out);

json_t *crc_to_json(uint32_t crc);

/* A long pass over so many bytes, for which it shows a line: five times a second in one line of a terminal, elsewhere every ten seconds. */
struct progress {
	const char *what;
	int64_t done, total;         /* bytes; total less than done: not known */
	bool terminal;
	double started, shown;       /* seconds: when the work, and the last line, began */
};

double clock_seconds(void);

struct progress progress_start(const char *what, int64_t total);

/* Counts n more bytes as done. */
void progress(struct progress *p, int64_t n);

/* Wipes the line from the terminal. */
void progress_end(const struct progress *p);

/* CRC-32 of what `crc` is that of and n bytes behind it: of slices, by all threads where there are many, which are then joined. */
uint32_t crc_of(uint32_t crc, const uint8_t *data, size_t n);

int32_t load_i32(const uint8_t *p);

int64_t load_i64(const uint8_t *p);

bool has_suffix(const char *text, const char *suffix);

/* For messages: a NaN prints without its sign. */
double plain_nan(double x);

/* The ranks that a launcher (mpirun, srun) started together, as its environment says; 1 without one. */
int launched_ranks(void);

/* Whether a person watches. A launcher may hand a rank a terminal of its own, whatever stands behind it. */
bool is_terminal(FILE *f);

/* One line of a long piece of work: on a terminal it is overwritten and cut to the terminal's width, elsewhere it is a plain line. With `keep` it
 * stays on a terminal too. */
void print_status(FILE *out, const char *line, bool keep);

/* Seconds as 1:02:03 or 2:03. */
const char *format_duration(char out[32], double seconds);

/* Takes the output directory for this process alone. Returns a descriptor to close, or -1. */
int lock_directory(const char *dir);

/* Bytes of memory that this process may use: the machine's, or less where the control group that it runs in (a container's, say), or
 * one above it, has a lower limit. root: "", or a directory that stands for / in a test. */
double usable_memory(const char *root);

int compare_doubles(const void *a, const void *b);

#endif
