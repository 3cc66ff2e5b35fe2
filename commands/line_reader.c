/*
 * commands/line_reader.c - lines of standard input: typed on a terminal, with editing and a history, or from a file or
 * a pipe. libedit, of NetBSD, edits them.
 */
#define _GNU_SOURCE
#include "commands/line_reader.h"

#include "files/base.h"

#include <errno.h>
#include <histedit.h>
#include <locale.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HISTORY_LINES = 1000 };

struct line_reader {
	const char *prompt;
	bool shows_prompt;           /* standard input is a terminal */
	EditLine *editor;            /* NULL where lines are not edited */
	History *history;
	bool begun;                  /* a line has been read */
	char *line;                  /* what getline has read */
	size_t capacity;
};

/* An el_pfunc_t of libedit. */
static char *prompt_of(EditLine *editor)
{
	struct line_reader *r;
	el_get(editor, EL_CLIENTDATA, (void **)&r);
	return (char *)r->prompt;
}

struct line_reader *line_reader_open(const char *prompt)
{
	struct line_reader *r = allocate(sizeof *r);
	HistEvent event;
	r->prompt = prompt;
	r->shows_prompt = isatty(STDIN_FILENO);
	if (!r->shows_prompt || !isatty(STDOUT_FILENO))
		return r;
	if (!setlocale(LC_CTYPE, "C.UTF-8")) /* libedit takes the bytes that are typed for characters of the locale */
		setlocale(LC_CTYPE, "");
	r->editor = el_init("ling", stdin, stdout, stderr);
	r->history = history_init();
	if (!r->editor || !r->history) {
		line_reader_close(r);
		fail("the terminal cannot be used to edit lines");
		return NULL;
	}
	history(r->history, &event, H_SETSIZE, HISTORY_LINES);
	history(r->history, &event, H_SETUNIQUE, 1);
	el_set(r->editor, EL_CLIENTDATA, r);
	el_set(r->editor, EL_PROMPT, prompt_of);
	el_set(r->editor, EL_HIST, history, r->history);
	el_set(r->editor, EL_EDITOR, "emacs");
	el_set(r->editor, EL_BIND, "^R", "em-inc-search-prev", NULL);
	el_set(r->editor, EL_SIGNAL, 1); /* a signal finds the terminal as it was */
	el_source(r->editor, NULL);
	return r;
}

void line_reader_close(struct line_reader *r)
{
	if (!r)
		return;
	if (r->history)
		history_end(r->history);
	if (r->editor)
		el_end(r->editor);
	free(r->line);
	free(r);
}

enum line_kind line_read(struct line_reader *r, const char **line, size_t *n)
{
	ssize_t size;
	errno = 0;
	if (r->editor) {
		int count = 0;
		HistEvent event;
		*line = el_gets(r->editor, &count);
		size = *line ? count : -1;
		if (size > 0 && !is_blank_line(*line, size))
			history(r->history, &event, H_ENTER, *line);
	} else {
		if (r->shows_prompt) {
			fputs(r->prompt, stderr);
			fflush(stderr);
		}
		size = getline(&r->line, &r->capacity, stdin);
		*line = r->line;
	}
	if (size < 0) {
		const int error = errno;
		const bool failed = r->editor ? error != 0 : ferror(stdin) != 0;
		clearerr(stdin);
		if (failed && error == EINTR)
			return LINE_SIGNAL;
		if (!failed)
			return LINE_END;
		fail("cannot read standard input: %s", strerror(error));
		return LINE_ERROR;
	}
	if (size && (*line)[size - 1] == '\n')
		size--;
	if (size && (*line)[size - 1] == '\r')
		size--;
	if (!r->begun && size >= 3 && !memcmp(*line, "\xef\xbb\xbf", 3)) /* a byte order mark is no part of the text */
		*line += 3, size -= 3;
	r->begun = true;
	*n = size;
	return LINE_READ;
}
