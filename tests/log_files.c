/*
 * log_files.c - a library to preload: writes to the file $LOG_FILES, one line for each call that decides what is on
 * disk after a power cut and under which name: "sync PATH", "rename FROM TO", "unlink PATH". Paths are absolute.
 * Calls that failed are not written.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Writes a line; keeps errno, which the caller may still read. */
static void log_line(const char *format, ...)
{
	char line[3 * PATH_MAX];
	const int error = errno;
	const char *path = getenv("LOG_FILES");
	va_list args;
	va_start(args, format);
	const int n = vsnprintf(line, sizeof line, format, args);
	va_end(args);
	const int fd = path ? open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666) : -1;
	if (fd < 0 || write(fd, line, n) != n)
		abort();
	close(fd);
	errno = error;
}

/* The path of an open file, or "?". */
static const char *path_of(char out[PATH_MAX], int fd)
{
	char link[64];
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	const ssize_t n = readlink(link, out, PATH_MAX - 1);
	strcpy(n < 0 ? out : out + n, n < 0 ? "?" : "");
	return out;
}

/* A path that begins at the directory `fd`, or where the process is, made absolute. */
static const char *absolute(char out[2 * PATH_MAX], int fd, const char *path)
{
	char start[PATH_MAX];
	if (*path == '/')
		snprintf(out, 2 * PATH_MAX, "%s", path);
	else
		snprintf(out, 2 * PATH_MAX, "%s/%s", fd == AT_FDCWD ? getcwd(start, sizeof start) : path_of(start, fd), path);
	return out;
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int log_sync(int rc, int fd)
{
	char path[PATH_MAX];
	if (rc == 0)
		log_line("sync %s\n", path_of(path, fd));
	return rc;
}

static int log_rename(int rc, int from_fd, const char *from, int to_fd, const char *to)
{
	char a[2 * PATH_MAX], b[2 * PATH_MAX];
	if (rc == 0)
		log_line("rename %s %s\n", absolute(a, from_fd, from), absolute(b, to_fd, to));
	return rc;
}

static int log_unlink(int rc, int fd, const char *path)
{
	char a[2 * PATH_MAX];
	if (rc == 0)
		log_line("unlink %s\n", absolute(a, fd, path));
	return rc;
}

int fsync(int fd)
{
	return log_sync(NEXT(fsync)(fd), fd);
}

int fdatasync(int fd)
{
	return log_sync(NEXT(fdatasync)(fd), fd);
}

int rename(const char *from, const char *to)
{
	return log_rename(NEXT(rename)(from, to), AT_FDCWD, from, AT_FDCWD, to);
}

int renameat(int from_fd, const char *from, int to_fd, const char *to)
{
	return log_rename(NEXT(renameat)(from_fd, from, to_fd, to), from_fd, from, to_fd, to);
}

int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags)
{
	return log_rename(NEXT(renameat2)(from_fd, from, to_fd, to, flags), from_fd, from, to_fd, to);
}

int unlink(const char *path)
{
	return log_unlink(NEXT(unlink)(path), AT_FDCWD, path);
}

int unlinkat(int fd, const char *path, int flags)
{
	return log_unlink(NEXT(unlinkat)(fd, path, flags), fd, path);
}

int remove(const char *path)
{
	return log_unlink(NEXT(remove)(path), AT_FDCWD, path);
}
