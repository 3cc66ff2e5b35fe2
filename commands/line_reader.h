/*
 * commands/line_reader.h - lines of standard input: typed on a terminal, with editing and a history, or from a file or
 * a pipe.
 */
#ifndef LING_COMMANDS_LINE_READER_H
#define LING_COMMANDS_LINE_READER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct line_reader;
/* Where standard input and output are terminals, lines are edited (libedit, which reads ~/.editrc), in UTF-8. NULL,
 * with the error set, when the terminal cannot be used. `prompt` is what is printed in front of each line on a
 * terminal; it must live as long as the reader. */
struct line_reader *line_reader_open(const char *prompt);
void line_reader_close(struct line_reader *r); /* NULL is fine */

/* What line_read found: a line, the end of the input, a signal that did not end the program, an error, which is set. */
enum line_kind { LINE_READ, LINE_END, LINE_SIGNAL, LINE_ERROR };
/* Reads a line, whatever its bytes: line[n], without its end (a new line, perhaps behind a carriage return). It lives
 * until the next call. After LINE_SIGNAL what had been typed is gone. */
enum line_kind line_read(struct line_reader *r, const char **line, size_t *n);

#endif
