/*
 * commands/result_lines.c - the results of `ling generate --out`: a file of JSON lines to which each is appended when
 * it is ready, and in which the same command finds later what is done.
 */
#define _GNU_SOURCE
#include "commands/result_lines.h"

#include "files/base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* What each line begins with, so that a part of one can be told from a part of something else. */
#define LINE_BEGIN "{\"prompt\": "

/* What a result of this prompt depends on; the caller owns it. */
static json_t *made_with(const struct result_lines *f, int prompt)
{
	return json_pack("{s:o, s:o, s:o}", "model", crc_to_json(f->model), "prompt", crc_to_json(f->prompts[prompt]),
			"options", json_cstring(f->options));
}

/* Fails unless a line was made as this command makes it, naming the first member that differs. */
static int check_made_with(const json_t *found, const json_t *wanted, const char *where)
{
	const char *key;
	json_t *value;
	json_object_foreach((json_t *)wanted, key, value) {
		const char *other = field_text(found, where, key);
		if (!other)
			return -1;
		if (strcmp(other, json_string_value(value)))
			return fail("%s: was made otherwise: its `%s` is \"%.500s\", and that of this command \"%.500s\"; give "
					"--out another name, or give what made this file", where, key, other, json_string_value(value));
	}
	return 0;
}

/* Takes a line of the file as done. */
static int read_line(struct result_lines *f, const char *where, const char *line, size_t n)
{
	json_t *root = json_line(where, line, n);
	int64_t prompt, draw;
	if (!root)
		return -1;
	const json_t *made = json_object_get(root, "made_with");
	int rc = json_is_object(made) ? 0 : fail("%s: `made_with` is %s; expected a result of `ling generate --out`: give "
			"--out another name", where, json_kind(made));
	if (rc == 0 && (field_int(root, where, "prompt", 0, INT32_MAX, &prompt) < 0 ||
			field_int(root, where, "draw", 0, INT32_MAX, &draw) < 0))
		rc = -1;
	else if (rc == 0 && prompt >= f->num_prompts)
		rc = fail("%s: the result of prompt %lld, counted from 0, and there are %d prompts: give --out another name, "
				"or the prompts that made this file", where, (long long)prompt, f->num_prompts);
	if (rc == 0) {
		json_t *wanted = made_with(f, (int)prompt);
		rc = check_made_with(made, wanted, where);
		json_decref(wanted);
	}
	if (rc == 0 && draw < f->num_draws) { /* there may be more draws than are asked for now */
		bool *done = &f->done[prompt * f->num_draws + draw];
		if (*done)
			rc = fail("%s: prompt %lld, draw %lld is in the file twice: take one of the lines away", where,
					(long long)prompt, (long long)draw);
		*done = true;
	}
	json_decref(root);
	return rc;
}

/* Reads all lines. *whole: bytes up to the end of the last complete one. */
static int read_lines(struct result_lines *f, const char *path, size_t *whole)
{
	const uint8_t *data;
	size_t size;
	if (map_file(path, &data, &size) < 0)
		return -1;
	const char *text = (const char *)data;
	char where[PATH_LEN + 32];
	int rc = 0;
	*whole = 0;
	for (int64_t number = 1; rc == 0 && *whole < size; number++) {
		const char *line = text + *whole, *end = memchr(line, '\n', size - *whole);
		const size_t n = end ? (size_t)(end - line) : size - *whole;
		snprintf(where, sizeof where, "%s:%lld", path, (long long)number);
		if (!end) {
			const size_t begin = n < strlen(LINE_BEGIN) ? n : strlen(LINE_BEGIN);
			if (memcmp(line, LINE_BEGIN, begin))
				rc = fail("%s: is no part of a result of `ling generate --out`: give --out another name", where);
			break;
		}
		rc = read_line(f, where, line, n);
		*whole += n + 1;
	}
	if (rc == 0 && *whole < size)
		fprintf(stderr, "note: %s is incomplete, as an interruption leaves it: that result is computed again\n", where);
	unmap_file(data, size);
	return rc;
}

int result_lines_open(struct result_lines *f, const char *path)
{
	struct stat status;
	size_t whole;
	const int num_prompts = f->num_prompts, num_draws = f->num_draws;
	f->file = -1;
	f->done = calloc((size_t)num_prompts * num_draws, sizeof *f->done);
	if (!f->done)
		return fail("out of memory for %d x %d results", num_prompts, num_draws);
	if (stat(path, &status) == 0 && !S_ISREG(status.st_mode))
		return fail("%s: is no regular file; expected one that can be read again, or none: leave --out away to print",
				path);
	if (new_file_lock(&f->lock, path) < 0)
		return -1;
	f->file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
	if (f->file < 0 || fstat(f->file, &status) < 0)
		return fail("%s: cannot open: %s", path, strerror(errno));
	if (read_lines(f, path, &whole) < 0)
		return -1;
	if ((off_t)whole < status.st_size && ftruncate(f->file, whole) < 0)
		return fail("%s: cannot remove its last line, which is incomplete: %s", path, strerror(errno));
	return 0;
}

int result_lines_add(struct result_lines *f, int prompt, json_t *result)
{
	json_object_set_new(result, "made_with", made_with(f, prompt));
	char *text = json_text(result, 0);
	struct text line = {0};
	text_append_string(&line, text);
	text_append_string(&line, "\n");
	free(text);
	json_decref(result);
	int rc = 0;
	for (size_t written = 0; rc == 0 && written < line.size;) {
		const ssize_t n = write(f->file, line.data + written, line.size - written);
		if (n < 0 && errno != EINTR)
			rc = fail_write(f->lock.path, errno);
		written += n > 0 ? n : 0;
	}
	free(line.data);
	return rc;
}

int result_lines_close(struct result_lines *f, int rc)
{
	if (rc == 0 && f->file >= 0 && fsync(f->file) < 0)
		rc = fail_write(f->lock.path, errno);
	if (f->file >= 0)
		close(f->file);
	new_file_abandon(&f->lock);
	free(f->done);
	return rc;
}
