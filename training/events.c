/*
 * training/events.c - events.jsonl: what happened in a run besides its steps.
 */
#define _GNU_SOURCE
#include "training/events.h"

#include "files/base.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* The bytes of the file up to the end of its last complete line; -1 on error. */
static off_t complete_size(int fd, const char *path)
{
	struct stat s;
	if (fstat(fd, &s) < 0)
		return fail("%s: %s", path, strerror(errno));
	for (off_t end = s.st_size; end > 0; end--) {
		char last;
		if (pread(fd, &last, 1, end - 1) != 1)
			return fail("%s: cannot read: %s", path, strerror(errno));
		if (last == '\n')
			return end;
	}
	return 0;
}

int events_open(struct event_log *log, const char *run_dir)
{
	log->fd = -1;
	if (make_directories(run_dir) < 0 || path_join(log->path, run_dir, "events.jsonl") < 0)
		return -1;
	log->fd = open(log->path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
	if (log->fd < 0)
		return fail("%s: cannot open: %s", log->path, strerror(errno));
	const off_t size = complete_size(log->fd, log->path);
	if (size < 0 || ftruncate(log->fd, size) < 0) {
		if (size >= 0)
			fail("%s: cannot remove its incomplete last line: %s", log->path, strerror(errno));
		events_close(log);
		return -1;
	}
	return 0;
}

json_t *json_number(double x)
{
	return isfinite(x) ? json_real(x) : json_null();
}

/* Appends n bytes of text. Where the disk has room for a part of them only, takes that part back, so that the next
 * event begins a line, unless another process has written behind it. Returns 0, or -1 with errno. */
static int append_line(int fd, const char *text, size_t n)
{
	struct stat s;
	const ssize_t done = write(fd, text, n);
	if (done < 0 || (size_t)done == n)
		return done < 0 ? -1 : 0;
	const off_t end = lseek(fd, 0, SEEK_CUR);
	if (fstat(fd, &s) < 0 || s.st_size != end || ftruncate(fd, end - done) < 0)
		return -1;
	errno = ENOSPC;
	return -1;
}

void event_write(const struct event_log *log, int64_t step, const char *kind, json_t *members)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	json_t *event = json_pack("{s:f, s:I, s:s}", "time", now.tv_sec + now.tv_nsec / 1000000 / 1e3, "step",
			(json_int_t)step, "kind", kind);
	if (members)
		json_object_update(event, members);
	json_decref(members);
	char *text = log->fd < 0 ? NULL : json_text(event, JSON_COMPACT | JSON_REAL_PRECISION(15));
	if (text) {
		const size_t n = strlen(text);
		text[n] = '\n'; /* in the place of the final 0 */
		if (append_line(log->fd, text, n + 1) < 0)
			fprintf(stderr, "warning: %s: the event `%s` of step %lld cannot be written: %s\n", log->path, kind,
					(long long)step, strerror(errno));
	}
	free(text);
	json_decref(event);
}

void events_close(struct event_log *log)
{
	if (log->fd >= 0)
		close(log->fd);
	log->fd = -1;
}

int events_read(const char *run_dir, int (*each)(void *context, const json_t *event), void *context)
{
	char path[PATH_LEN], *line = NULL;
	size_t capacity = 0;
	if (path_join(path, run_dir, "events.jsonl") < 0)
		return -1;
	FILE *f = fopen(path, "re");
	if (!f)
		return errno == ENOENT ? 0 : fail("%s: cannot open: %s", path, strerror(errno));
	int rc = 0;
	int64_t number = 0, step;
	for (ssize_t n; rc == 0 && (n = getline(&line, &capacity, f)) > 0;) {
		char where[PATH_LEN + 32];
		json_error_t error;
		snprintf(where, sizeof where, "%s:%lld", path, (long long)++number);
		if (line[n - 1] != '\n')
			break; /* the run is writing it, or died while it did */
		json_t *event = json_loadb(line, n, JSON_REJECT_DUPLICATES, &error);
		if (!event)
			rc = fail("%s: %s", where, error.text);
		else if (field_int(event, where, "step", 0, INT64_MAX, &step) < 0 || !field_text(event, where, "kind"))
			rc = -1;
		else
			rc = each(context, event);
		json_decref(event);
	}
	if (rc == 0 && ferror(f))
		rc = fail("%s: cannot read: %s", path, strerror(errno));
	free(line);
	fclose(f);
	return rc;
}
