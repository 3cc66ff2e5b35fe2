/*
 * tests/faults.c - a library for LD_PRELOAD that makes one call fail which touches files, or kills the process there.
 *
 * FAULT_AT=N: the call number N, from 1. FAULT_KILL set: SIGKILL in place of an error. The call is named on stderr as
 * "fault: ...". An open, mkdir, fsync, rename, unlink or rmdir fails with EIO; for a write, the file behind the stream
 * is exchanged for /dev/full. Of the writes of a stream one after the other only the first three count.
 *
 * FAULT_SHRINK=ENDING: after the first read() of a file whose path ends so, the rest of the file is gone.
 * FAULT_STOP=NAME: the process stops, until SIGCONT, at its first call of that name, which then works.
 * FAULT_CUT=END: as soon as a file whose name ends in END is mapped, it is cut to nothing.
 * FAULT_MEMORY=N: the N-th allocation of memory, from 1, and all after it get none.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* Counts a call. Whether it is the one that fails. */
static bool fault(const char *call, const char *what)
{
	static int calls;
	static bool stopped;
	static const char *at;
	if (!stopped && getenv("FAULT_STOP") && !strcmp(getenv("FAULT_STOP"), call)) {
		stopped = true;
		raise(SIGSTOP);
	}
	if (!at && !(at = getenv("FAULT_AT")))
		at = "0";
	if (__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) != atoi(at))
		return false;
	dprintf(2, "fault: %s %s\n", call, what);
	if (getenv("FAULT_KILL"))
		raise(SIGKILL);
	errno = EIO;
	return true;
}

static bool counts(const char *path)
{
	return strncmp(path, "/proc", 5) && strncmp(path, "/sys", 4) && strncmp(path, "/dev", 4);
}

int open(const char *path, int flags, ...)
{
	REAL(open);
	va_list args;
	va_start(args, flags);
	const mode_t mode = flags & O_CREAT ? va_arg(args, mode_t) : 0;
	va_end(args);
	return counts(path) && fault("open", path) ? -1 : real(path, flags, mode);
}

FILE *fopen(const char *path, const char *mode)
{
	REAL(fopen);
	return counts(path) && fault("fopen", path) ? NULL : real(path, mode);
}

ssize_t read(int fd, void *bytes, size_t n)
{
	REAL(read);
	static bool done;
	const char *ending = getenv("FAULT_SHRINK");
	char name[64], path[4096];
	const ssize_t found = real(fd, bytes, n);
	snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
	const ssize_t size = ending && !done ? readlink(name, path, sizeof path) : -1;
	const ssize_t length = size < 0 ? 0 : strlen(ending);
	if (size >= length && size > 0 && !memcmp(path + size - length, ending, length)) {
		done = true;
		dprintf(2, "fault: shrink %s\n", truncate(name, lseek(fd, 0, SEEK_CUR)) < 0 ? strerror(errno) : ending);
	}
	return found;
}

int mkdir(const char *path, mode_t mode)
{
	REAL(mkdir);
	return fault("mkdir", path) ? -1 : real(path, mode);
}

int fsync(int fd)
{
	(void)fd; /* nothing is brought to disk: no power fails here, and the tests are many times faster */
	return fault("fsync", "") ? -1 : 0;
}

int rename(const char *from, const char *to)
{
	REAL(rename);
	return fault("rename", to) ? -1 : real(from, to);
}

int unlink(const char *path)
{
	REAL(unlink);
	return fault("unlink", path) ? -1 : real(path);
}

int rmdir(const char *path)
{
	REAL(rmdir);
	return fault("rmdir", path) ? -1 : real(path);
}

size_t fwrite(const void *data, size_t size, size_t n, FILE *f)
{
	REAL(fwrite);
	static FILE *last;
	static int again;
	struct stat st;
	again = f == last ? again + 1 : 0, last = f;
	if (again < 3 && fstat(fileno(f), &st) == 0 && S_ISREG(st.st_mode) && fileno(f) > 2 && fault("fwrite", "")) {
		const int full = open("/dev/full", O_WRONLY);
		dup2(full, fileno(f));
		close(full);
	}
	return real(data, size, n, f);
}

void *mmap(void *address, size_t size, int protection, int flags, int fd, off_t offset)
{
	REAL(mmap);
	void *p = real(address, size, protection, flags, fd, offset);
	const char *end = getenv("FAULT_CUT");
	char link[64], path[1024];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	const ssize_t n = end && fd >= 0 ? readlink(link, path, sizeof path - 1) : -1;
	if (n >= 0) {
		path[n] = 0;
		if (n >= (ssize_t)strlen(end) && !strcmp(path + n - strlen(end), end) && truncate(path, 0) < 0)
			perror(path);
	}
	return p;
}

/* The C library's own functions: dlsym() allocates memory. */
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t size);
void *__libc_memalign(size_t alignment, size_t size);

/* Whether there is memory for one more allocation. */
static bool is_memory(void)
{
	static long allocations, most = -1;
	if (most < 0)
		most = getenv("FAULT_MEMORY") ? atol(getenv("FAULT_MEMORY")) : 0;
	if (!most || __atomic_add_fetch(&allocations, 1, __ATOMIC_SEQ_CST) < most)
		return true;
	errno = ENOMEM;
	return false;
}

void *malloc(size_t size)
{
	return is_memory() ? __libc_malloc(size) : NULL;
}

void *calloc(size_t n, size_t size)
{
	return is_memory() ? __libc_calloc(n, size) : NULL;
}

void *realloc(void *p, size_t size)
{
	return is_memory() ? __libc_realloc(p, size) : NULL;
}

void *aligned_alloc(size_t alignment, size_t size)
{
	return is_memory() ? __libc_memalign(alignment, size) : NULL;
}
