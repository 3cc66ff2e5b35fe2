/*
 * commands/follow.c - following a file of JSON lines that another program writes.
 *
 * Of each line that was read its end and its checksum are kept. The file has been cut if the last of them is not at its
 * place any more, and then it is looked for backwards, line by line.
 */
#define _GNU_SOURCE
#include "commands/follow.h"

#include "files/base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { READ_BYTES = 1 << 20, LONGEST_LINE = 1 << 26 };

/* Reads up to n bytes at `at`; fewer at the end of the file. Returns their number, -1 on error. */
static ssize_t read_at(int fd, char *out, size_t n, int64_t at)
{
	size_t done = 0;
	while (done < n) {
		const ssize_t got = pread(fd, out + done, n - done, at + (int64_t)done);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0)
			return -1;
		if (got == 0)
			break;
		done += got;
	}
	return done;
}

/* Whether line i is in the file as it was read. */
static bool line_stands(const struct follow *f, int fd, size_t i)
{
	const int64_t begin = i ? f->lines[i - 1].end : 0;
	const size_t n = f->lines[i].end - begin;
	char *line = allocate(n);
	const bool same = read_at(fd, line, n, begin) == (ssize_t)n &&
			crc_of(0, (const uint8_t *)line, n) == f->lines[i].crc;
	free(line);
	return same;
}

/* Forgets the lines that are not in the file any more. fd < 0: there is no file. Returns whether there were any. */
static bool forget_cut(struct follow *f, int fd)
{
	size_t n = f->count;
	while (n && (fd < 0 || !line_stands(f, fd, n - 1)))
		n--;
	if (n == f->count)
		return false;
	const size_t before = f->count;
	f->count = n;
	f->cut(f->context, n, before);
	return true;
}

/* Takes a line of n bytes, its end included. */
static int take_line(struct follow *f, const char *line, size_t n)
{
	char where[PATH_LEN + 32];
	snprintf(where, sizeof where, "%s:%zu", f->path, f->count + 1);
	json_t *object = json_line(where, line, n);
	const int rc = object ? f->add(f->context, object) : -1;
	json_decref(object);
	if (rc < 0)
		return -1;
	const int64_t begin = f->count ? f->lines[f->count - 1].end : 0;
	f->lines = grow(f->lines, f->count, &f->room, 1, sizeof *f->lines);
	f->lines[f->count++] = (struct line_end){begin + (int64_t)n, crc_of(0, (const uint8_t *)line, n)};
	return 0;
}

/* Reads the lines behind those that were read. */
static int read_new(struct follow *f, int fd)
{
	int64_t at = f->count ? f->lines[f->count - 1].end : 0;
	size_t room = READ_BYTES, held = 0; /* held: the begin of a line whose end is still to come */
	char *buffer = allocate(room);
	int rc = 0;
	while (rc == 0) {
		if (held == room && room >= LONGEST_LINE) {
			rc = fail("%s:%zu: is longer than %d MB; expected lines of JSON", f->path, f->count + 1,
					LONGEST_LINE >> 20);
			break;
		}
		if (held == room)
			buffer = grow(buffer, held, &room, room, 1);
		const ssize_t got = read_at(fd, buffer + held, room - held, at);
		if (got < 0)
			rc = fail("%s: cannot read: %s", f->path, strerror(errno));
		if (got <= 0)
			break;
		at += got;
		held += got;
		size_t begin = 0;
		for (char *end; rc == 0 && (end = memchr(buffer + begin, '\n', held - begin)); begin = end + 1 - buffer)
			rc = take_line(f, buffer + begin, end + 1 - (buffer + begin));
		held -= begin;
		memmove(buffer, buffer + begin, held);
	}
	free(buffer);
	return rc;
}

int follow_look(struct follow *f)
{
	/* Opened anew each time: over NFS, that is what asks the server for the newest content. */
	const int fd = open(f->path, O_RDONLY | O_CLOEXEC);
	f->there = fd >= 0;
	if (fd < 0 && errno != ENOENT && errno != ENOTDIR)
		return fail("%s: cannot open: %s", f->path, strerror(errno));
	const bool cut = forget_cut(f, fd);
	const size_t before = f->count;
	const int rc = fd < 0 ? 0 : read_new(f, fd);
	if (fd >= 0)
		close(fd);
	return rc < 0 ? -1 : cut || f->count > before;
}

void follow_free(struct follow *f)
{
	free(f->lines);
	f->lines = NULL;
	f->count = f->room = 0;
}
