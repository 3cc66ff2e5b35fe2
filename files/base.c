/*
 * files/base.c - what every other file stands on: errors, memory, paths, files, JSON, checksums, progress, the clock.
 */
#define _GNU_SOURCE
#include "files/base.h"

#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <utf8proc.h>
#include <zlib.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the files are little-endian, and so must the machine be");

/* ---------------------------------------------------------------------------------------------------- errors */

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

int edit_distance(const char *a, const char *b)
{
	int row[64], n = strlen(b);
	if (n > 63 || strlen(a) > 63)
		return 99;
	for (int j = 0; j <= n; j++)
		row[j] = j;
	for (int i = 0; a[i]; i++) {
		int diagonal = row[0];
		row[0] = i + 1;
		for (int j = 0; j < n; j++) {
			int best = diagonal + (a[i] != b[j]);
			if (row[j] + 1 < best)
				best = row[j] + 1;
			if (row[j + 1] + 1 < best)
				best = row[j + 1] + 1;
			diagonal = row[j + 1];
			row[j + 1] = best;
		}
	}
	return row[n];
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

/* ------------------------------------------------------------------------------- what an early end must know */

/* A mapped file, or a temporary file or directory. */
struct resource {
	struct resource *next;
	const uint8_t *data;         /* the mapping's memory, size bytes; NULL for what is temporary */
	size_t size;
	_Atomic bool used;           /* else it is free for the next one */
	char path[PATH_LEN];
};

/* The list of all: see the globals in ling.h. Entries are never released, so that a signal handler can read it at any
 * time. */
static struct resource *_Atomic resources;

static void remember(const char *path, const uint8_t *data, size_t size)
{
	#pragma omp critical (resources)
	{
		struct resource *r = resources;
		while (r && r->used)
			r = r->next;
		const bool is_new = !r;
		if (is_new)
			r = allocate(sizeof *r);
		r->data = data, r->size = size;
		snprintf(r->path, sizeof r->path, "%s", path);
		r->used = true;
		if (is_new) {
			r->next = resources;
			resources = r;
		}
	}
}

void remember_temporary(const char *path)
{
	remember(path, NULL, 0);
}

void forget_temporary(const char *path)
{
	for (struct resource *r = resources; r; r = r->next)
		if (r->used && !r->data && !strcmp(r->path, path))
			r->used = false;
}

/* Removes what is temporary. It allocates nothing. */
static void remove_temporaries(void)
{
	for (struct resource *r = resources; r; r = r->next)
		if (r->used && !r->data)
			directory_remove(r->path);
}

/* How many functions are at work whose steps belong together, in all threads; ENDS: a signal ends the program, and none
 * may begin. And the signal that came meanwhile, or 0. */
static _Atomic int undivided, late_signal;
enum { ENDS = -1 };

static void begin_undivided(void)
{
	for (int n = undivided; n == ENDS || !atomic_compare_exchange_weak(&undivided, &n, n + 1);)
		if (n == ENDS)
			pause(), n = undivided;
}

static void end_undivided(void)
{
	if (atomic_fetch_sub(&undivided, 1) == 1 && late_signal)
		raise(late_signal);
}

/* Handles a signal that asks the program to end: removes what is temporary, then lets the signal end it. */
static void handle_end(int number)
{
	int none = 0;
	sigset_t this;
	if (!atomic_compare_exchange_strong(&undivided, &none, ENDS)) {
		late_signal = number;
		return;
	}
	remove_temporaries();
	signal(number, SIG_DFL);
	sigemptyset(&this);
	sigaddset(&this, number);
	pthread_sigmask(SIG_UNBLOCK, &this, NULL);
	raise(number);
}

void remove_temporaries_at_signals(void)
{
	static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
	const struct sigaction ours = {.sa_handler = handle_end, .sa_flags = SA_RESTART};
	struct sigaction old;
	for (int i = 0; i < 3; i++)
		if (sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler != SIG_IGN) /* nohup ignores SIGHUP */
			sigaction(numbers[i], &ours, NULL);
}

/* Prints error_text, removes what is temporary, and ends the program. Also called by a signal handler, so it allocates
 * nothing. Of several threads the first one does it. */
__attribute__((noreturn)) static void end_at_once(void)
{
	static atomic_flag ends = ATOMIC_FLAG_INIT;
	while (atomic_flag_test_and_set(&ends))
		pause();
	char line[sizeof error_text + 64];
	const int n = launcher_rank() < 0 ? snprintf(line, sizeof line, "ling: %s\n", error_text)
		: snprintf(line, sizeof line, "ling: rank %d: %s\n", launcher_rank(), error_text);
	ssize_t done = write(STDERR_FILENO, line, n);
	(void)done; /* there is no one else to tell */
	remove_temporaries();
	_exit(1);
}

static void set_cut_short(const struct resource *r)
{
	set_error("%s: became shorter while it was read, or its disk failed: leave a file as it is while a command uses it",
			r->path);
}

/* Handles SIGBUS, which a read of a mapped file raises where the file has no bytes any more. It comes from that read,
 * inside of no function that holds a lock which end_at_once() needs. Any other SIGBUS ends the program as usual. */
static void handle_bus_error(int number, siginfo_t *info, void *context)
{
	(void)context;
	const uintptr_t at = (uintptr_t)info->si_addr, page = sysconf(_SC_PAGESIZE);
	for (struct resource *r = resources; r && info->si_code > 0; r = r->next) {
		const uintptr_t begin = (uintptr_t)r->data;
		if (r->used && r->data && at >= begin && at - begin < (r->size + page - 1) / page * page) {
			set_cut_short(r);
			end_at_once();
		}
	}
	signal(number, SIG_DFL);
	raise(number);
}

void limits_start(void)
{
	struct sigaction action = {.sa_sigaction = handle_bus_error, .sa_flags = SA_SIGINFO};
	sigemptyset(&action.sa_mask);
	sigaction(SIGBUS, &action, NULL);
	signal(SIGXFSZ, SIG_IGN); /* write() then fails with EFBIG */
	json_set_alloc_funcs(allocate, free);
	atexit(remove_temporaries); /* libraries may end the program too: OpenMP does, without memory */
}

double process_memory(void)
{
	static const struct { int limit, field; } kinds[] = {{RLIMIT_AS, 0}, {RLIMIT_DATA, 5}}; /* fields of statm */
	double pages[6] = {0}, least = INFINITY;
	FILE *f = fopen("/proc/self/statm", "re");
	for (int i = 0; f && i < 6; i++)
		if (fscanf(f, "%lf", &pages[i]) != 1)
			pages[i] = 0;
	if (f)
		fclose(f);
	for (int i = 0; i < 2; i++) {
		struct rlimit limit;
		if (getrlimit(kinds[i].limit, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
			least = fmin(least, fmax(0, (double)limit.rlim_cur - pages[kinds[i].field] * sysconf(_SC_PAGESIZE)));
	}
	return least;
}

/* ---------------------------------------------------------------------------------------------------- memory */

void out_of_memory(size_t n)
{
	if (n)
		set_error("out of memory: %zu bytes were needed", n);
	else
		set_error("out of memory");
	fflush(stdout);
	end_at_once();
}

void *allocate(size_t n)
{
	void *p = calloc(1, n ? n : 1);
	if (!p)
		out_of_memory(n);
	return p;
}

char *copy_string(const char *text)
{
	return strcpy(allocate(strlen(text) + 1), text);
}

void *grow(void *array, size_t used, size_t *capacity, size_t more, size_t size)
{
	if (used + more <= *capacity)
		return array;
	*capacity = 2 * (used + more);
	array = realloc(array, *capacity * size);
	if (!array)
		out_of_memory(*capacity * size);
	return array;
}

void text_append(struct text *out, const char *bytes, size_t n)
{
	out->data = grow(out->data, out->size, &out->capacity, n + 1, 1);
	if (n)
		memcpy(out->data + out->size, bytes, n);
	out->size += n;
	out->data[out->size] = 0;
}

void text_append_string(struct text *out, const char *string)
{
	text_append(out, string, strlen(string));
}

void text_printf(struct text *out, const char *format, ...)
{
	char *line;
	va_list args;
	va_start(args, format);
	const int n = vasprintf(&line, format, args);
	va_end(args);
	if (n < 0)
		out_of_memory(0);
	text_append(out, line, n);
	free(line);
}

void text_append_utf8(struct text *out, const char *bytes, size_t n)
{
	utf8proc_int32_t code;
	for (size_t i = 0; i < n;) {
		const utf8proc_ssize_t size = utf8proc_iterate((const uint8_t *)bytes + i, n - i, &code);
		if (size > 0)
			text_append(out, bytes + i, size);
		else
			text_append(out, "\xef\xbf\xbd", 3);
		i += size > 0 ? size : 1;
	}
}

/* ----------------------------------------------------------------------------------------------------- paths */

/* Writes the three parts one behind the other. */
static int path_of(char out[PATH_LEN], const char *a, const char *b, const char *c)
{
	if (snprintf(out, PATH_LEN, "%s%s%s", a, b, c) >= PATH_LEN)
		return fail("%s%s%s: path longer than %d bytes", a, b, c, PATH_LEN - 1);
	return 0;
}

int path_copy(char out[PATH_LEN], const char *path)
{
	return path_of(out, path, "", "");
}

int path_join(char out[PATH_LEN], const char *dir, const char *name)
{
	return path_of(out, dir, "/", name);
}

int path_suffix(char out[PATH_LEN], const char *path, const char *suffix)
{
	return path_of(out, path, suffix, "");
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

const char *file_name(const char *path)
{
	const char *slash = strrchr(path, '/');
	return slash ? slash + 1 : path;
}

bool has_suffix(const char *text, const char *suffix)
{
	const size_t n = strlen(text), m = strlen(suffix);
	return n > m && !strcmp(text + n - m, suffix);
}

bool is_home_path(const char *path)
{
	return *path == '~';
}

int path_exists(const char *path)
{
	struct stat st;
	if (stat(path, &st) == 0)
		return 1;
	return errno == ENOENT ? 0 : fail("%s: cannot stat: %s", path, strerror(errno));
}

/* ----------------------------------------------------------------------------------------------------- files */

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
		else {
			*data = p, *size = st.st_size;
			remember(path, p, st.st_size);
		}
	}
	close(fd);
	return rc;
}

void unmap_file(const uint8_t *data, size_t size)
{
	if (!data)
		return;
	for (struct resource *r = resources; r; r = r->next)
		if (r->used && r->data == data)
			r->used = false;
	munmap((void *)data, size);
}

int refuse_lfs(const char *path, const uint8_t *data, size_t size)
{
	const size_t n = sizeof LFS_BEGIN - 1;
	return size < n || memcmp(data, LFS_BEGIN, n) ? 0 : fail("%s: is " LFS_NAME, path);
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
	struct stat st;
	struct rlimit limit;
	/* the system reads a mapped file for a write */
	for (struct resource *r = resources; r && error == EFAULT; r = r->next)
		if (r->used && r->data && stat(r->path, &st) == 0 && st.st_size < (off_t)r->size) {
			set_cut_short(r);
			return -1;
		}
	if (error == EFBIG && getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
		return fail("%s: cannot write: %s: files are limited to %llu bytes here: raise that with ulimit -f", path,
				strerror(error), (unsigned long long)limit.rlim_cur);
	return fail("%s: cannot write: %s; free some space or choose another place", path, strerror(error));
}

/* Why writing to a stream has failed: errno may be that of a later call, so it is tried again. 0: it has not. */
static int stream_error(FILE *f)
{
	if (!ferror(f))
		return 0;
	clearerr(f);
	errno = 0;
	return (fputc(0, f) == EOF || fflush(f)) && errno ? errno : EIO;
}

/* Brings a file to disk and closes it. Returns errno, 0 when all went well; *regular: it is no device and no pipe,
 * which have no fsync. */
static int finish_stream(FILE *f, bool *regular)
{
	int error = stream_error(f);
	struct stat st;
	*regular = fstat(fileno(f), &st) == 0 && S_ISREG(st.st_mode);
	if (!error && (fflush(f) || (*regular && fsync(fileno(f)) < 0)))
		error = errno;
	if (fclose(f) && !error)
		error = errno;
	return error;
}

int file_close(FILE *f, const char *path, int rc)
{
	bool regular;
	const int error = finish_stream(f, &regular);
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

int make_directories(const char *dir)
{
	char path[PATH_LEN], parent[PATH_LEN];
	if (path_copy(path, dir) < 0)
		return -1;
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

void directory_remove(const char *path)
{
	if (unlink(path) == 0)
		return;
	_Alignas(struct dirent64) char entries[4096]; /* opendir() would allocate memory, and there may be none */
	const int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	for (ssize_t n; fd >= 0 && (n = getdents64(fd, entries, sizeof entries)) > 0;)
		for (const char *p = entries; p < entries + n; p += ((const struct dirent64 *)p)->d_reclen) {
			const char *name = ((const struct dirent64 *)p)->d_name;
			if (strcmp(name, ".") && strcmp(name, ".."))
				unlinkat(fd, name, 0);
		}
	if (fd >= 0)
		close(fd);
	if (rmdir(path) < 0 && errno != ENOENT)
		fprintf(stderr, "ling: warning: %s: cannot remove this old directory: %s\n", path, strerror(errno));
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

/* ----------------------------------------------------------- new files, which appear whole or not at all */

/* Sets error_text: why a file's lock, open as `fd`, cannot be had. Its holder has written who it is. */
static int fail_locked(const struct new_file *file, int fd)
{
	char holder[128] = "another process", shown[64];
	const ssize_t n = pread(fd, holder, sizeof holder - 1, 0);
	holder[n > 0 ? n : (ssize_t)strlen("another process")] = 0;
	return fail("%s: %s is writing it; wait until that ends, or choose another name", file->path,
			printable(shown, holder));
}

/* Whether two stats are of the same file. */
static bool same_file(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino;
}

/* Takes the lock `path`. Where a file system has no locks, file->locked stays false: the temporary names keep the
 * writers apart, and the last one wins. A holder removes the file before it lets go, so what was locked may be gone. */
static int take_lock(struct new_file *file, const char *path)
{
	char host[64] = "", holder[128];
	struct stat held, there;
	for (int attempt = 0; attempt < 1000; attempt++) {
		const int fd = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0666);
		if (fd < 0)
			return errno == ELOOP || errno == EISDIR ? fail("%s: is a %s; expected a lock file: remove it", path,
					errno == ELOOP ? "link" : "directory")
				: fail("%s: cannot create: %s", file->path, strerror(errno));
		const int error = flock(fd, LOCK_EX | LOCK_NB) < 0 ? errno : 0;
		if (error == EWOULDBLOCK) {
			const int rc = fail_locked(file, fd);
			close(fd);
			return rc;
		}
		if (error) {
			close(fd);
			unlink(path);
			return 0;
		}
		if (fstat(fd, &held) < 0 || lstat(path, &there) < 0 || !same_file(&held, &there)) {
			close(fd);
			continue;
		}
		gethostname(host, sizeof host - 1);
		const int n = snprintf(holder, sizeof holder, "process %ld on %s", (long)getpid(), host);
		if (ftruncate(fd, 0) < 0 || pwrite(fd, holder, n, 0) < 0)
			errno = 0; /* the lock holds without a name in it */
		file->locked = true, file->lock = fd;
		return 0;
	}
	return fail("%s: is taken and given up again all the time", path);
}

static void release_lock(struct new_file *file)
{
	char path[PATH_LEN];
	if (!file->locked)
		return;
	if (path_suffix(path, file->path, ".lock") == 0) {
		forget_temporary(path); /* first: as soon as it is gone, the name may be another process's */
		unlink(path);
	}
	close(file->lock);
	file->locked = false;
}

#define TEMPORARY_DIGITS 8

/* Whether `name` is a temporary name of the file `of`. */
static bool is_temporary_name(const char *name, const char *of)
{
	const size_t n = strlen(of);
	return !strncmp(name, of, n) && !strncmp(name + n, ".tmp-", 5) &&
		strspn(name + n + 5, "0123456789abcdef") == TEMPORARY_DIGITS && !name[n + 5 + TEMPORARY_DIGITS];
}

/* Removes what processes that were killed have left under temporary names. The lock says that nobody uses it. */
static void remove_leftovers(const struct new_file *file)
{
	char dir[PATH_LEN], path[PATH_LEN];
	parent_of(dir, file->path);
	DIR *d = opendir(dir);
	for (struct dirent *e; d && (e = readdir(d));)
		if (is_temporary_name(e->d_name, file_name(file->path)) && path_join(path, dir, e->d_name) == 0)
			directory_remove(path);
	if (d)
		closedir(d);
}

/* Makes a name up that no other process uses: several machines may share the directory. */
static int temporary_name(char out[PATH_LEN], const char *path)
{
	char suffix[24];
	uint32_t number = 0;
	if (getrandom(&number, sizeof number, 0) != sizeof number)
		return fail("%s: no random number: %s", path, strerror(errno));
	snprintf(suffix, sizeof suffix, ".tmp-%0*x", TEMPORARY_DIGITS, (unsigned)number);
	return path_suffix(out, path, suffix);
}

/* Creates the temporary file, or a directory, which was not there. */
static int create_temporary(struct new_file *file, bool directory)
{
	for (int attempt = 0; attempt < 100; attempt++) {
		if (temporary_name(file->temporary, file->path) < 0)
			return -1;
		remember_temporary(file->temporary); /* before it is there: this may end the program */
		if (directory && mkdir(file->temporary, 0777) == 0)
			return 0;
		const int fd = directory ? -1
			: open(file->temporary, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
		if (fd >= 0 && (file->stream = fdopen(fd, "w")))
			return 0;
		const int error = errno;
		forget_temporary(file->temporary);
		if (fd >= 0) {
			close(fd);
			unlink(file->temporary);
		} else if (error == EEXIST)
			continue;
		return fail("%s: cannot create: %s", file->path, strerror(error));
	}
	return fail("%s: cannot create: the temporary names are taken", file->path);
}

int new_file_lock(struct new_file *file, const char *path)
{
	char lock[PATH_LEN];
	memset(file, 0, sizeof *file);
	if (path_copy(file->path, path) < 0 || path_suffix(lock, path, ".lock") < 0)
		return -1;
	begin_undivided(); /* until the lock is ours, it must not be removed */
	remember_temporary(lock);
	const int rc = take_lock(file, lock);
	if (file->locked)
		remove_leftovers(file);
	else
		forget_temporary(lock);
	end_undivided();
	return rc;
}

int new_file_begin(struct new_file *file, const char *path)
{
	struct stat st;
	memset(file, 0, sizeof *file);
	const bool link = lstat(path, &st) == 0 && S_ISLNK(st.st_mode);
	/* NULL for a link to nowhere, which is written through and so makes what it points to. */
	char *target = link ? realpath(path, NULL) : NULL;
	const char *name = target ? target : path;
	int rc = 0;
	if (stat(name, &st) == 0 ? !S_ISREG(st.st_mode) : link) {
		file->in_place = true;
		rc = path_copy(file->path, name) < 0 || !(file->stream = file_create(name)) ? -1 : 0;
	} else
		rc = new_member_begin(file, name);
	free(target);
	return rc;
}

/* new_member_begin and new_directory_begin. */
static int begin_new(struct new_file *file, const char *path, bool directory)
{
	struct stat st;
	memset(file, 0, sizeof *file);
	if (!directory && lstat(path, &st) == 0 && S_ISDIR(st.st_mode))
		return fail("%s: cannot create: %s", path, strerror(EISDIR));
	if (new_file_lock(file, path) == 0 && create_temporary(file, directory) == 0)
		return 0;
	*file->temporary = 0;
	release_lock(file);
	return -1;
}

int new_member_begin(struct new_file *file, const char *path)
{
	return begin_new(file, path, false);
}

int new_directory_begin(struct new_file *file, const char *path)
{
	return begin_new(file, path, true);
}

int new_file_close(struct new_file *file, int rc)
{
	bool regular;
	const int error = file->stream ? finish_stream(file->stream, &regular) : 0;
	file->stream = NULL;
	if (error && !rc)
		rc = fail_write(file->path, error);
	if (rc < 0)
		new_file_abandon(file);
	return rc;
}

void new_file_abandon(struct new_file *file)
{
	if (file->stream)
		fclose(file->stream);
	if (*file->temporary) {
		directory_remove(file->temporary);
		forget_temporary(file->temporary);
	}
	file->stream = NULL;
	*file->temporary = 0;
	release_lock(file);
}

/* Brings the names in the directory of a path to disk. */
static int sync_parent(const char *path)
{
	char dir[PATH_LEN];
	parent_of(dir, path);
	return sync_path(dir);
}

/* Gives a closed file its name. */
static int take_name(struct new_file *file)
{
	if (rename(file->temporary, file->path) < 0)
		return fail("%s: cannot rename to %s: %s", file->temporary, file->path, strerror(errno));
	forget_temporary(file->temporary);
	*file->temporary = 0;
	return 0;
}

int new_file_publish(struct new_file *file, int rc)
{
	rc = new_file_close(file, rc);
	if (rc == 0 && !file->in_place)
		rc = take_name(file) < 0 ? -1 : sync_parent(file->path);
	new_file_abandon(file);
	return rc;
}

/* What a member of a set was before. */
struct old_file { char kept[PATH_LEN]; bool aside, replaced; };

/* Moves the file that has the name to a temporary one, if there is a file. */
static int set_aside(const struct new_file *file, struct old_file *old)
{
	struct stat st;
	if (lstat(file->path, &st) < 0)
		return errno == ENOENT ? 0 : fail("%s: cannot stat: %s", file->path, strerror(errno));
	if (S_ISDIR(st.st_mode))
		return fail("%s: cannot replace: %s", file->path, strerror(EISDIR));
	if (temporary_name(old->kept, file->path) < 0)
		return -1;
	if (rename(file->path, old->kept) < 0)
		return fail("%s: cannot replace: %s", file->path, strerror(errno));
	old->aside = true;
	return 0;
}

/* Undoes what new_files_publish has done to a member. */
static void put_back(const struct new_file *file, const struct old_file *old)
{
	if (old->aside ? rename(old->kept, file->path) < 0 : old->replaced && unlink(file->path) < 0)
		fprintf(stderr, "ling: warning: %s: cannot restore this file: %s\n", file->path, strerror(errno));
}

int new_files_publish(struct new_file *files, int n, int rc)
{
	struct new_file *last = &files[n - 1];
	struct old_file *old = allocate(n * sizeof *old);
	bool published = false;
	for (int i = 0; i < n; i++)
		rc = new_file_close(&files[i], rc);
	const bool begun = rc == 0;
	begin_undivided();
	if (begun && (rc = set_aside(last, &old[n - 1])) == 0)
		rc = sync_parent(last->path);
	for (int i = 0; i < n - 1 && rc == 0; i++) {
		rc = set_aside(&files[i], &old[i]);
		if (rc == 0 && *files[i].temporary)
			rc = take_name(&files[i]), old[i].replaced = rc == 0;
	}
	if (rc == 0 && (rc = sync_parent(last->path)) == 0 && (rc = take_name(last)) == 0) {
		published = true;
		rc = sync_parent(last->path);
	}
	for (int i = 0; i < n && begun; i++) /* the last one comes back last */
		if (!published)
			put_back(&files[i], &old[i]);
		else if (old[i].aside)
			unlink(old[i].kept);
	for (int i = 0; i < n; i++)
		new_file_abandon(&files[i]);
	end_undivided();
	free(old);
	return rc;
}

/* ------------------------------------------------------------------------------------------------------ JSON */

/* The length of the number that a JSON text of n bytes begins with; *large: it is an integer beyond 64 bits. */
static size_t scan_number(const char *text, size_t n, bool *large)
{
	const size_t sign = *text == '-';
	size_t size = 1, digits = 0;
	while (size < n && text[size] && strchr("0123456789+-.eE", text[size]))
		size++;
	while (sign + digits < size && isdigit((unsigned char)text[sign + digits]))
		digits++;
	*large = sign + digits == size && digits > 18 && text[sign] != '0'; /* a leading 0 is an error, and stays one */
	if (*large && digits == 19) {
		char number[24];
		snprintf(number, sizeof number, "%.*s", (int)size, text);
		errno = 0;
		strtoll(number, NULL, 10);
		*large = errno == ERANGE;
	}
	return size;
}

/* What stands for a value that is no JSON: an object with this one member, whose text says what was found. So every
 * reader of such a value sees that it is of the wrong type, and json_kind tells why. */
#define NOT_JSON "(not JSON)"

static void append_not_json(struct text *out, const char *what, const char *found, size_t n)
{
	enum { MOST = 40 };            /* bytes of `found` */
	text_append_string(out, "{\"" NOT_JSON "\":\"");
	text_append_string(out, what);
	text_append(out, found, n < MOST ? n : MOST);
	text_append_string(out, n > MOST ? "...\"}" : "\"}");
}

/* The length of NaN, Infinity or -Infinity at the beginning of a JSON text of n bytes; 0 if it is none. */
static size_t scan_no_number(const char *text, size_t n)
{
	static const char *const names[] = {"NaN", "Infinity", "-Infinity"};
	for (int i = 0; i < 3; i++) {
		const size_t size = strlen(names[i]);
		if (n >= size && !memcmp(text, names[i], size) && (n == size || !isalnum((unsigned char)text[size])))
			return size;
	}
	return 0;
}

/* Whether a number is a real one beyond what a double holds. */
static bool is_too_large(const char *text, size_t n)
{
	struct text number = {0};
	char *end;
	if (n < 5 || (text[0] == '0' && isdigit((unsigned char)text[1]))) /* a leading 0 is an error, and stays one */
		return false;
	text_append(&number, text, n);
	const bool large = isinf(strtod(number.data, &end)) && !*end;
	free(number.data);
	return large;
}

/* Whether \uXXXX, in hexadecimal digits, begins a text of n bytes; *code: what it stands for. */
static bool scan_escape(const char *text, size_t n, unsigned *code)
{
	char digits[5] = "";
	if (n < 6 || text[0] != '\\' || text[1] != 'u')
		return false;
	memcpy(digits, text + 2, 4);
	*code = strtoul(digits, NULL, 16);
	return strspn(digits, "0123456789abcdefABCDEF") == 4;
}

/* Reads a JSON string that begins with the quote at text[0]. Returns its length with both quotes. *bad: the first
 * place in it that is half of a surrogate pair or not UTF-8, or NULL. copy, unless it is NULL, gets the string with
 * U+FFFD in such places: the digits of a half follow it, so that different keys stay different. */
static size_t scan_string(const char *text, size_t n, const char **bad, struct text *copy)
{
	size_t i = 1, size;
	*bad = NULL;
	for (; i < n && text[i] != '"'; i += size) {
		unsigned code, low;
		utf8proc_int32_t character;
		const char *at = text + i;
		bool half = false;
		if (scan_escape(at, n - i, &code)) {
			const bool pair = code >> 10 == 0xd800 >> 10 && scan_escape(at + 6, n - i < 6 ? 0 : n - i - 6, &low) &&
				low >> 10 == 0xdc00 >> 10;
			size = pair ? 12 : 6;
			half = !pair && code >> 11 == 0xd800 >> 11;
		} else if (*at == '\\')
			size = n - i < 2 ? 1 : 2;
		else if ((*at & 0x80) == 0)
			size = 1;
		else {
			const utf8proc_ssize_t found = utf8proc_iterate((const uint8_t *)at, n - i, &character);
			size = found > 0 ? found : 1;
			half = found <= 0;
		}
		if (half && !*bad)
			*bad = at;
		if (copy && half)
			text_append_string(copy, "\xef\xbf\xbd"), text_append(copy, size == 6 ? at + 2 : "", size == 6 ? 4 : 0);
		else if (copy)
			text_append(copy, at, size);
	}
	return i < n ? i + 1 : n;
}

/* Appends the JSON string that begins a text of n bytes; with `lenient` as one that can be read: a value that cannot
 * is exchanged for an object that says so. Returns its length. */
static size_t rewrite_string(struct text *out, const char *text, size_t n, bool lenient)
{
	const char *bad;
	char byte[8];
	const size_t size = scan_string(text, n, &bad, NULL);
	size_t next = size;
	while (next < n && is_blank_line(text + next, 1))
		next++;
	if (!bad || !lenient)
		text_append(out, text, size);
	else if (next < n && text[next] == ':') { /* a key */
		text_append(out, "\"", 1);
		scan_string(text, n, &bad, out);
		text_append(out, "\"", 1);
	} else if (*bad == '\\')
		append_not_json(out, "broken text, with half of a surrogate pair, \\\\", bad + 1, 5);
	else {
		snprintf(byte, sizeof byte, "0x%02x", (unsigned char)*bad);
		append_not_json(out, "broken text, not UTF-8 at its byte ", byte, strlen(byte));
	}
	return size;
}

/* A copy of a JSON text in which integers beyond 64 bits are real numbers. With `lenient` they are strings of their
 * digits, and other values that are no JSON are exchanged for objects that say so: NaN and infinities, real numbers
 * that are too large, strings with half of a surrogate pair or with bytes that are not UTF-8. */
static struct text rewrite_json(const char *text, size_t n, bool lenient)
{
	struct text out = {0};
	for (size_t i = 0, size; i < n; i += size) {
		const char *at = text + i;
		const size_t no_number = lenient ? scan_no_number(at, n - i) : 0;
		bool large = false;
		if (*at == '"') {
			size = rewrite_string(&out, at, n - i, lenient);
			continue;
		}
		size = no_number ? no_number : isdigit((unsigned char)*at) || *at == '-' ? scan_number(at, n - i, &large) : 1;
		if (no_number)
			append_not_json(&out, "", at, size);
		else if (lenient && !large && is_too_large(at, size))
			append_not_json(&out, "too large a number, ", at, size);
		else {
			if (large && lenient)
				text_append(&out, "\"", 1);
			text_append(&out, at, size);
			if (large)
				text_append(&out, lenient ? "\"" : ".0", lenient ? 1 : 2);
		}
	}
	return out;
}

/* Parses JSON; see json_read and json_line. */
static json_t *parse_json(const char *text, size_t n, size_t flags, bool lenient, json_error_t *error)
{
	json_t *root = json_loadb(n ? text : "", n, JSON_REJECT_DUPLICATES | flags, error);
	const enum json_error_code code = root ? json_error_unknown : json_error_code(error);
	if (code == json_error_numeric_overflow ||
			(lenient && (code == json_error_invalid_syntax || code == json_error_invalid_utf8))) {
		struct text again = rewrite_json(text, n, lenient);
		if (again.size != n || memcmp(again.data, text, n) != 0)
			root = json_loadb(again.data, again.size, JSON_REJECT_DUPLICATES | flags, error);
		free(again.data);
	}
	return root;
}

json_t *json_read(const char *path)
{
	const uint8_t *data;
	size_t size;
	if (map_file(path, &data, &size) < 0)
		return NULL;
	json_error_t error;
	const int rc = refuse_lfs(path, data, size);
	json_t *root = rc < 0 ? NULL : parse_json((const char *)data, size, 0, false, &error);
	unmap_file(data, size);
	if (rc < 0)
		return NULL;
	if (!root)
		fail("%s:%d: bad JSON: %s", path, error.line, error.text);
	else if (!json_is_object(root)) {
		json_decref(root), root = NULL;
		fail("%s: expected a JSON object at top level", path);
	}
	return root;
}

json_t *json_line(const char *where, const char *line, size_t n)
{
	json_error_t error;
	json_t *root = parse_json(line, n, JSON_ALLOW_NUL, true, &error);
	if (!root)
		fail("%s: bad JSON: %s", where, error.text);
	else if (!json_is_object(root)) {
		fail("%s: is %s; expected an object", where, json_kind(root));
		json_decref(root), root = NULL;
	}
	return root;
}

json_t *json_value(const char *path, const char *text, size_t n)
{
	json_error_t error;
	json_t *value = parse_json(text, n, JSON_ALLOW_NUL, true, &error);
	if (!value)
		fail("%s:%d: bad JSON: %s", path, error.line, error.text);
	return value;
}

bool is_blank_line(const char *line, size_t n)
{
	size_t i = 0;
	while (i < n && (line[i] == ' ' || line[i] == '\t' || line[i] == '\r' || line[i] == '\n'))
		i++;
	return i == n;
}

char *json_text(const json_t *value, size_t flags)
{
	char *text = json_dumps(value, flags);
	if (!text) {
		set_error("out of memory while writing JSON");
		end_at_once();
	}
	return text;
}

void json_print(FILE *f, const json_t *root)
{
	char *text = json_text(root, JSON_INDENT(2));
	fprintf(f, "%s\n", text);
	free(text);
}

int json_write(const char *path, const json_t *root)
{
	struct new_file file;
	if (new_file_begin(&file, path) < 0)
		return -1;
	json_print(file.stream, root);
	return new_file_publish(&file, 0);
}

json_t *json_bytes(const char *bytes, size_t n)
{
	struct text valid = {0};
	text_append_utf8(&valid, bytes, n);
	json_t *string = json_stringn(valid.data ? valid.data : "", valid.size);
	if (!string)
		out_of_memory(valid.size);
	free(valid.data);
	return string;
}

json_t *json_cstring(const char *text)
{
	return json_bytes(text, strlen(text));
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

const char *json_kind(const json_t *v)
{
	static const char *const kinds[] = {
		[JSON_OBJECT] = "an object", [JSON_ARRAY] = "an array", [JSON_STRING] = "a string",
		[JSON_INTEGER] = "an integer", [JSON_REAL] = "a real number", [JSON_TRUE] = "true", [JSON_FALSE] = "false",
		[JSON_NULL] = "null",
	};
	const char *found = json_is_object(v) ? json_string_value(json_object_get(v, NOT_JSON)) : NULL;
	return found ? found : v ? kinds[json_typeof(v)] : "missing";
}

const char *json_flaw(const json_t *v)
{
	const char *found = json_is_object(v) ? json_string_value(json_object_get(v, NOT_JSON)) : NULL, *key;
	json_t *inner;
	size_t i;
	if (json_is_object(v))
		json_object_foreach((json_t *)v, key, inner)
			found = found ? found : json_flaw(inner);
	json_array_foreach(v, i, inner)
		found = found ? found : json_flaw(inner);
	return found;
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
	const char *text = json_string_value(v);
	if (!text)
		fail("%s: `%s` is %s; expected a string", where, key, json_kind(v));
	else if (strlen(text) != json_string_length(v)) {
		fail("%s: `%s` has a character \\u0000; expected none", where, key);
		text = NULL;
	}
	return text;
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

/* ------------------------------------------------------------------------------------- checksums, bytes, numbers */

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
	return n ? crc32_z(crc, data, n) : crc; /* zlib forgets crc where data is NULL */
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

int compare_doubles(const void *a, const void *b)
{
	const double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

double plain_nan(double x)
{
	return isnan(x) ? NAN : x;
}

/* ----------------------------------------------------------------------------------- clock, terminal, progress */

double clock_seconds(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec + 1e-9 * now.tv_nsec;
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

/* The number in the first of these environment variables that is set, or `otherwise`. */
static int environment_int(const char *const *names, int n, int otherwise)
{
	for (int i = 0; i < n; i++)
		if (getenv(names[i]))
			return atoi(getenv(names[i]));
	return otherwise;
}

/* Open MPI's mpirun sets OMPI_COMM_WORLD_...; MPICH, Intel MPI and srun --mpi=pmi2 set PMI_...; srun --mpi=pmix sets
 * PMIX_RANK, and Slurm's number of tasks is then that of the ranks. SLURM_PROCID is no sign of MPI: a batch script has
 * it too. */
int launcher_rank(void)
{
	static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"};
	return environment_int(names, 3, -1);
}

int launcher_size(void)
{
	static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
	return launcher_rank() < 0 ? 1 : environment_int(names, 3, 0);
}

/* The smallest number in the files `name` of a control group and of the groups that it is in, from root + mount +
 * group up to root + mount; `least` where there is none. A group without a limit has the word "max" there, or a huge
 * number. */
static double group_limit(double least, const char *root, const char *mount, const char *group, const char *name)
{
	char path[PATH_LEN], up[PATH_LEN];
	if (snprintf(up, sizeof up, "%s", group) >= PATH_LEN)
		return least;
	for (char *end = up + strlen(up);; *end = 0) {
		double bytes;
		const int n = snprintf(path, sizeof path, "%s%s%s/%s", root, mount, up, name);
		FILE *f = n < PATH_LEN ? fopen(path, "re") : NULL;
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

bool is_terminal(FILE *f)
{
	return launcher_size() == 1 && isatty(fileno(f));
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

struct progress progress_start(const char *what, int64_t total, double scale, const char *unit)
{
	const double now = clock_seconds();
	return (struct progress){.what = what, .total = total, .scale = scale, .unit = unit, .started = now, .shown = now};
}

/* A number with three digits, or more where they stand before the point. */
static const char *format_amount(char out[32], double x)
{
	snprintf(out, 32, x < 100 ? "%.3g" : "%.0f", x);
	return out;
}

void progress(struct progress *p, int64_t n)
{
	if (!p)
		return;
	p->done += n;
	const double now = clock_seconds(), seconds = now - p->started;
	if (now - p->shown < (is_terminal(stderr) ? 0.2 : 30))
		return;
	p->shown = now;
	char line[256], amount[32], rate[32], left[32] = "?";
	format_amount(amount, p->done * p->scale);
	format_amount(rate, p->done * p->scale / seconds);
	if (p->done)
		format_duration(left, (p->total - p->done) * seconds / p->done);
	if (p->total && p->total >= p->done)
		snprintf(line, sizeof line, "%.100s: %.0f%%  %s %s/s  %s left", p->what, 100.0 * p->done / p->total, rate,
				p->unit, left);
	else
		snprintf(line, sizeof line, "%.100s: %s %s  %s %s/s", p->what, amount, p->unit, rate, p->unit);
	print_status(stderr, line, false);
}

void progress_end(const struct progress *p)
{
	if (p && is_terminal(stderr) && p->shown > p->started)
		fprintf(stderr, "\r\033[K");
}
