/*
 * files/base.h - what every other file stands on: errors, memory, paths, files, JSON, checksums, progress, the clock.
 *
 * Functions that can fail return -1 or NULL and leave the reason in error_text.
 */
#ifndef LING_FILES_BASE_H
#define LING_FILES_BASE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

/* The type of weights and activations. The program is float32; the tests compile the same source once more in
 * double, where finite differences are exact enough to check every backward pass. */
#ifdef LING_DOUBLE
typedef double real;
#else
typedef float real;
#endif

#define PATH_LEN 1024 /* bytes of a path, the final 0 included */
#define MAX_NAME 128  /* bytes of a tensor's name, the final 0 included */

/* ---------------------------------------------------------------------------------------------------- errors */

extern _Thread_local char error_text[4096]; /* one line: what was found, what was expected */

/* Sets error_text. Control characters, which a foreign name may hold, become question marks. */
void set_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline int failure(void) { return -1; }
/* set_error() with the value -1. It is a macro, so that compilers see the -1. */
#define fail(...) (set_error(__VA_ARGS__), failure())

/* Copies foreign text for a message: at most 60 bytes, control characters as question marks, never half a UTF-8
 * character. */
const char *printable(char out[64], const char *text);

/* How far a name is from the one that may be meant: the Levenshtein distance, in bytes. Names of more than 63 bytes are
 * far from everything. */
int edit_distance(const char *a, const char *b);

/* ---------------------------------------------------------------------------------------------------- memory */

/* Call first of all. A mapped file that another program cuts short then ends this one with a message that names the
 * file, instead of a signal; a write beyond the largest size that files may have (ulimit -f) fails instead of raising a
 * signal; and jansson's functions end the program when there is no memory, instead of leaving members out. */
void limits_start(void);

/* Bytes that the limits of this process (ulimit -v, ulimit -d) leave it; INFINITY without such limits. */
double process_memory(void);

/* Whenever the program ends for lack of memory, because a mapped file was cut short, or by exit(), it first removes
 * what these two have on their list: temporary files, and temporary directories of plain files. Add one before it is
 * there. */
void remember_temporary(const char *path);
void forget_temporary(const char *path);

/* From now on the program does the same before SIGINT, SIGTERM or SIGHUP ends it. A set of files that it is about to
 * publish (new_files_publish) is published first. A signal that is ignored stays so. */
void remove_temporaries_at_signals(void);

/* calloc that cannot return NULL: without memory it ends the program. It is for small things, bounded by the sizes of
 * checked files; what a user's sizes decide is allocated with calloc and checked. n may be 0. */
void *allocate(size_t n);

/* Ends the program as allocate() does: for libraries that have got no memory. n: the bytes needed; 0: not known. */
void out_of_memory(size_t n) __attribute__((noreturn));

/* A copy of a text, never NULL; release it with free(). */
char *copy_string(const char *text);

/* Makes room for `more` entries of `size` bytes behind the first `used` entries of an array, which has room for
 * *capacity; when it is full, the capacity is doubled. New entries are not set to zero. Without memory it ends the
 * program. Returns the array; release it with free(). */
void *grow(void *array, size_t used, size_t *capacity, size_t more, size_t size);

/* text: [count], an array to be released with free(); whoever fills it says who owns the texts. list: it was written
 * as a list, not as one text. */
struct strings { char **text; int64_t count; bool list; };

/* A growing array of bytes. data[size] is always 0, unless data is NULL. {0} is empty; release it with free(data). */
struct text { char *data; size_t size, capacity; };

/* Both append a copy: of n bytes, and of a C string. */
void text_append(struct text *out, const char *bytes, size_t n);
void text_append_string(struct text *out, const char *string);
void text_printf(struct text *out, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Appends n bytes of unknown origin as valid UTF-8: each byte that belongs to no UTF-8 character becomes U+FFFD. */
void text_append_utf8(struct text *out, const char *bytes, size_t n);

/* ----------------------------------------------------------------------------------------------------- paths */

/* Each of these three fails when the result would be longer than PATH_LEN - 1 bytes. */
int path_copy(char out[PATH_LEN], const char *path);
int path_join(char out[PATH_LEN], const char *dir, const char *name);      /* dir/name */
int path_suffix(char out[PATH_LEN], const char *path, const char *suffix); /* path and suffix, without a slash */

/* The directory that holds `path`, which is at most PATH_LEN - 1 bytes long. */
void parent_of(char out[PATH_LEN], const char *path);

/* The last part of a path, behind the last slash: a pointer into `path`. */
const char *file_name(const char *path);

/* Whether text ends with the suffix and has something in front of it. */
bool has_suffix(const char *text, const char *suffix);

/* Whether a path begins with ~, which a shell takes for a home directory, and this program for a name: a directory
 * called ~ is never meant. HOME_PATH_HINT says so. */
bool is_home_path(const char *path);
#define HOME_PATH_HINT "only a shell expands ~, and only at the beginning of a word without quotes; write the path " \
	"out, as /home/NAME/..., or ./~... where a name begins with ~"

/* 1: there; 0: not there; -1: that cannot be told. */
int path_exists(const char *path);

/* ----------------------------------------------------------------------------------------------------- files */

struct file_map { const uint8_t *data; size_t size; };

/* Maps a whole regular file, read-only. An empty file gives *data NULL and *size 0. Release with unmap_file. */
int map_file(const char *path, const uint8_t **data, size_t *size);
void unmap_file(const uint8_t *data, size_t size);

/* What a file begins with that stands in place of another one, where a repository was fetched without Git LFS; and its
 * name, for a message. */
#define LFS_BEGIN "version https://git-lfs.github.com/spec/v1\n"
#define LFS_NAME "a pointer of Git LFS to a file, which git lfs pull gets"
/* Fails when a whole file is one. */
int refuse_lfs(const char *path, const uint8_t *data, size_t size);

/* Opens a file for writing; what is in it is lost. NULL on error. For a file that must never be seen half written, use
 * struct new_file. */
FILE *file_create(const char *path);

/* Brings a file to disk and closes it. Removes it when that fails or when rc, the caller's result so far, is an error.
 * Returns the new result. Errors of fwrite and the like show here; only a long loop should look for them before. */
int file_close(FILE *f, const char *path, int rc);

/* The error of a write: `error` is errno. */
int fail_write(const char *path, int error);

/* Writes a copy of a file, on disk when this returns. */
int copy_file(const char *from, const char *to);

/* Creates a directory and its parents, on disk when this returns. One that is there is fine. */
int make_directories(const char *dir);

/* fsync of a file or a directory. That a file system cannot do it for directories is no error. */
int sync_path(const char *path);

/* Removes a directory of plain files, a file, or a symbolic link but not what it points to. What cannot be removed
 * stays, with a warning: old files must not stop a run. Nothing happens when there is none. */
void directory_remove(const char *path);

/* ----------------------------------------------------------- new files, which appear whole or not at all */

/* A file in the making. It is written under a temporary name in the same directory, NAME.tmp- and eight digits, and
 * gets its own name when it is complete and on disk. Until then, and after an error, a file that had the name before
 * is still there. Meanwhile the lock NAME.lock keeps other writers of this name out: they fail at once, and say who
 * holds it. What a process that was killed has left under temporary names, the next one that has the lock removes. */
struct new_file {
	FILE *stream;              /* to write to; NULL before new_file_begin and after new_file_close */
	char path[PATH_LEN];       /* its own name */
	char temporary[PATH_LEN];  /* the name that it has now; "" when there is nothing to publish or to remove */
	bool in_place;             /* a device or a pipe, which is written to directly: there is no temporary name */
	bool locked;
	int lock;                  /* the open lock file, when `locked` */
};

/* Creates the temporary file. Where the name is a link, the file that it points to will be replaced; a device or a
 * pipe is written to directly. Fails, with nothing to abandon, where the directory cannot be written to. */
int new_file_begin(struct new_file *file, const char *path);

/* The same for a member of a set, whose name the program made up: whatever has that name, a link or a pipe too, is
 * itself replaced and never followed. A directory is an error. */
int new_member_begin(struct new_file *file, const char *path);

/* The same with a directory in place of a file: stream is NULL, and the caller fills `temporary`. */
int new_directory_begin(struct new_file *file, const char *path);

/* Takes the lock alone, for who publishes in another way. new_file_abandon gives it up. */
int new_file_lock(struct new_file *file, const char *path);

/* Brings the file to disk and closes the stream, but does not publish it yet: for those who need its size or time
 * first. With rc, the caller's result so far, an error, or on an error of its own, it abandons the file. Returns the
 * new result. */
int new_file_close(struct new_file *file, int rc);

/* new_file_close; then the file gets its name, and that is brought to disk too. */
int new_file_publish(struct new_file *file, int rc);

/* The same for n members, which lie in one directory and of which none is of use without the last. The old files are
 * set aside, the last one first, and the new last one comes last, so that old and new ones are never taken for one
 * set. After an error the old set is back; after a crash between the two, the last one is missing. Where a member was
 * abandoned before, it is not part of the new set, and no file has its name. */
int new_files_publish(struct new_file *files, int n, int rc);

/* Closes the stream, removes the temporary file or directory, and gives up the lock. It may be called
 * at any time, also on a struct that is all zero. */
void new_file_abandon(struct new_file *file);

/* ------------------------------------------------------------------------------------------------------ JSON */

/* The first two parse a JSON object; all refuse duplicate keys. An integer beyond 64 bits is no error: nobody may
 * read that member: tokenizers have a model_max_length of 10^30. NULL on error; the caller owns the result. */

/* A file. There, such an integer becomes a real number. */
json_t *json_read(const char *path);

/* A line of n bytes of a file of JSON lines; `where`, a file and line, begins the message. Such an integer becomes the
 * string of its digits, which a template can write as they stand. Strings may hold \u0000. Values that other programs
 * write although they are no JSON become objects that no reader takes, and that json_kind names: NaN, Infinity, real
 * numbers like 1e400, strings with half of a surrogate pair or with bytes that are not UTF-8. So they are errors where
 * they are read, and only there. */
json_t *json_line(const char *where, const char *line, size_t n);

/* An object or an array of n bytes of text, read in the same way; `path` and a line begin the message. */
json_t *json_value(const char *path, const char *text, size_t n);

/* Whether a line of n bytes holds only white space, and so no JSON. */
bool is_blank_line(const char *line, size_t n);

/* json_dumps that cannot return NULL, for values made or read here; the caller frees the text. */
char *json_text(const json_t *value, size_t flags);

/* Prints JSON with line breaks. */
void json_print(FILE *f, const json_t *root);

/* Writes JSON with line breaks as a new file. */
int json_write(const char *path, const json_t *root);

/* A JSON string of n bytes of unknown origin, such as a path or a model's reply: see text_append_utf8. json_string()
 * would return NULL for bytes that are not UTF-8. Never NULL; the caller owns it. */
json_t *json_bytes(const char *bytes, size_t n);

/* The same for a C string. */
json_t *json_cstring(const char *text);

/* The value at a dotted path in nested objects and, by an index from 0, arrays: "a.b.0". NULL when there is none. */
const json_t *json_at(const json_t *value, const char *path);
const json_t *json_at_part(const json_t *value, const char *path, size_t n); /* the path is n bytes long */

/* The type of a value in words, "missing" for NULL; for a value that is no JSON (see json_line), what was found. It
 * lives as long as the value. */
const char *json_kind(const json_t *v);

/* What json_kind says of a value that is no JSON, anywhere within v; NULL when there is none. For who writes all of v,
 * whatever it holds. */
const char *json_flaw(const json_t *v);

/* Each of these three reads a member of `object`: an integer in low..high; a string, which lives as long as the object
 * (NULL on error, also where it holds a \u0000); a CRC-32 in eight hexadecimal digits. `where`, a file or a file and
 * line, begins the message. */
int field_int(const json_t *object, const char *where, const char *key, int64_t low, int64_t high, int64_t *out);
const char *field_text(const json_t *object, const char *where, const char *key);
int field_crc(const json_t *object, const char *where, const char *key, uint32_t *out);

/* A CRC-32 as a string that field_crc reads. */
json_t *crc_to_json(uint32_t crc);

/* ------------------------------------------------------------------------------------- checksums, bytes, numbers */

/* The CRC-32 of bytes whose CRC-32 is `crc` (of none: 0) followed by these n. Threads compute slices of large
 * inputs. */
uint32_t crc_of(uint32_t crc, const uint8_t *data, size_t n);

/* CRC-32 of a whole file. */
int file_crc32(const char *path, uint32_t *crc);

/* Little-endian integers at any alignment. */
int32_t load_i32(const uint8_t *p);
int64_t load_i64(const uint8_t *p);

/* For qsort. */
int compare_doubles(const void *a, const void *b);

/* For messages: a NaN is printed without its sign. */
double plain_nan(double x);

static inline float bits_to_float(uint32_t bits)
{
	float value;
	memcpy(&value, &bits, sizeof value);
	return value;
}

static inline uint32_t float_to_bits(float value)
{
	uint32_t bits;
	memcpy(&bits, &value, sizeof bits);
	return bits;
}

/* bfloat16 is the upper half of a float's bits. This function and the next have no branches, so that the compiler can
 * vectorise loops over them. */
static inline float bf16_to_float(uint16_t half)
{
	return bits_to_float((uint32_t)half << 16);
}

/* Rounds to nearest, ties to even. A NaN stays a NaN; what is too large becomes infinite. */
static inline uint16_t float_to_bf16(float value)
{
	const uint32_t bits = float_to_bits(value), rounded = bits + 0x7fff + (bits >> 16 & 1);
	return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded >> 16;
}

/* ----------------------------------------------------------------------------------- clock, terminal, progress */

/* Seconds of a clock that never goes back, from some point in the past. */
double clock_seconds(void);

/* Seconds as 1:02:03 or 2:03. */
const char *format_duration(char out[32], double seconds);

/* What the environment says of the launcher (mpirun, srun) that started this process as one of several ranks. The rank
 * of this process, from 0; -1 without a launcher. */
int launcher_rank(void);
/* The number of ranks; 1 without a launcher, 0 if the launcher does not tell. */
int launcher_size(void);

/* Bytes of memory that this process may use: the machine's, or less where the control group that it runs in (a
 * container's, say), or one above it, has a lower limit. root: "", or a directory that stands for / in a test. */
double usable_memory(const char *root);

/* Whether a stream is a terminal, and no launcher started this process: a launcher may give a rank a terminal of its
 * own even when its output goes to a file. */
bool is_terminal(FILE *f);

/* One line of a long piece of work. On a terminal it replaces the line before and is cut to the terminal's width,
 * unless `keep` leaves it there; elsewhere it is a plain line. */
void print_status(FILE *out, const char *line, bool keep);

/* How far a long piece of work is. It is shown on stderr: on a terminal five times a second in one line, elsewhere by
 * a line every half minute. */
struct progress {
	const char *what;            /* the work, in the words that begin the line; it may change between calls */
	int64_t done, total;         /* total 0, or less than done: not known, and there is no time left to show */
	double scale;                /* units for each of what `done` counts */
	const char *unit;            /* of the amount and the rate, such as "MB" */
	double started, shown;       /* seconds: when the work, and the last line, began */
};

/* Begins the work: nothing is done yet, and nothing shown. `what` and `unit` must live as long as it does. */
struct progress progress_start(const char *what, int64_t total, double scale, const char *unit);

/* Counts n more as done, and shows a line when it is time. NULL is fine and shows nothing: for the ranks that stay
 * silent. */
void progress(struct progress *p, int64_t n);

/* Removes the line from a terminal. */
void progress_end(const struct progress *p);

#endif
