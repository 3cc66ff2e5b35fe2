/*
 * files/text.h - text and JSON lines as input: prompts, and files in blocks that threads encode side by side.
 */
#ifndef LING_FILES_TEXT_H
#define LING_FILES_TEXT_H

#include "files/base.h"
#include "files/encoder.h"
#include "files/tokenizer.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* -- files in blocks -- */

#ifndef TEXT_BLOCK
#define TEXT_BLOCK (1 << 18)     /* bytes of a block; more where a line is longer */
#endif
#define LOOK_AHEAD 1024          /* at least so many bytes of its file are in memory behind a block of text */

/* A part of a file. A block of JSON lines is some whole lines. A block of text ends where the next one begins, in
 * front of a line if there is one: a place where a tokenizer is likely to cut. Whether it does is found when the
 * block is encoded. */
struct block {
	const char *path;
	int64_t line;                /* JSON lines: the number of the first one, from 1; text: 0 */
	size_t begin, end;           /* its bytes in input.data */
	/* of text: */
	bool first;                  /* the first block of its file, or of what of it is not encoded yet */
	size_t file_end;             /* in input.data: the end of what has been read of its file */
	bool file_complete;          /* that is the end of the file */
};

/* What a file holds. By its name: JSON lines are .jsonl and .ndjson, an array of records .json, in any case, and with
 * .gz, .zst or .zstd behind it; all else is text. An array is read as a line for each record. */
enum text_format { FORMAT_BY_NAME, FORMAT_TEXT, FORMAT_JSONL, FORMAT_JSON };
#define FORMAT_NAMES {"auto", "text", "jsonl", "json", NULL} /* on command lines */
/* How files become texts; all zero is usual. */
struct text_options {
	enum text_format format;     /* what all of them hold */
	const char *text_field;      /* the member of a JSON line that holds its text; NULL: "text" */
	bool skip_bad_lines;         /* a JSON line that cannot be used is left out, and no error */
};
/* The same, never NULL. */
const char *text_field_of(const struct text_options *o);
/* What a file holds: what is wanted, unless that is FORMAT_BY_NAME. */
enum text_format text_format(const char *path, enum text_format wanted);

/* A file whose bytes are read in order: as they are, or unpacked where it is gzip or zstd, which is seen by its first
 * bytes. "-" is the standard input. */
struct byte_source;
/* NULL on error. With FORMAT_BY_NAME, formats that are neither text nor JSON lines are refused by name. A byte order
 * mark is skipped. */
struct byte_source *byte_source_open(const char *path, enum text_format wanted);
/* Reads up to n bytes. Returns their number, 0 at the end, or -1: a file cut short while it is read, or packed bytes
 * that are damaged or end too soon, are errors. */
int64_t byte_source_read(struct byte_source *s, char *out, size_t n);
void byte_source_close(struct byte_source *s); /* NULL is fine */
/* Appends all bytes of such a file. After an error *out holds those that could be read. */
int read_whole(const char *path, enum text_format wanted, struct text *out);

struct input {                 /* set files, num_files, options and progress; the rest is 0 at first */
	char **files;
	int num_files, next;         /* next: index of the file that will be opened next */
	struct text_options options;
	struct byte_source *source;  /* the file being read, or NULL */
	bool lines;                  /* that file has JSON lines */
	int64_t line;                /* its line at `begin`, from 1 */
	char *data;                  /* what has been read of the files and not been encoded yet */
	size_t size, capacity;
	size_t begin;                /* of the bytes that are in no block yet */
	struct block *blocks;        /* [count] in the order of the files */
	size_t count, blocks_capacity;
	int64_t lines_skipped;       /* see input_count_skipped */
	struct progress progress;
};
/* Forgets the blocks and the first `done` bytes, and reads on. Returns how many blocks there are now, 0 at the end of
 * the last file, or -1. */
int64_t input_read(struct input *in, size_t done);
void input_close(struct input *in);
/* Fails when a file cannot be read, or is one of the outputs, which would replace it. "-" and what is in /dev need a
 * format, and what is said of JSON lines a file that has them. Adds the sizes of the files to *total. */
int inputs_check(int num_files, char **files, const struct text_options *o, char outputs[][PATH_LEN], int num_outputs,
		int64_t *total);

/* Encoders that no thread uses at the moment. */
struct encoder_pool { const struct tokenizer *tokenizer; struct encoder **idle; size_t count, capacity; };
struct encoder *encoder_take(struct encoder_pool *pool);
void encoder_give(struct encoder_pool *pool, struct encoder *e);
void encoder_pool_close(struct encoder_pool *pool);

struct document {
	struct ids ids;              /* with the end token, except that of a text file, of which more may follow */
	struct text loss_mask;       /* a byte for each id, 1 where the loss counts; size 0: it counts everywhere */
	int64_t bytes;               /* of text that the ids stand for */
};

enum { SKIPPED_SHOWN = 5 };    /* so many of the lines that were skipped are named */
struct encoded_block {
	struct document *documents;  /* [count] JSON lines: one for each line whose text is not empty; text: one */
	size_t count, capacity;
	size_t done;                 /* text: the end of what the document is made from, in input.data */
	char *error;                 /* a message, or NULL */
	int64_t lines_skipped;       /* JSON lines that cannot be used */
	char *skipped[SKIPPED_SHOWN]; /* messages about the first of them */
};
/* Encodes a block of JSON lines. `special`: see encode(); it applies to the text of a line that is no conversation. */
void encode_lines(struct encoder *e, const struct input *in, const struct block *b, bool special,
		struct encoded_block *out);
/* Encodes text of a block's file from byte `begin` of input.data on, up to the first place at or behind `stop` where
 * it can be cut, looking at no more than the bytes before `known`. See encode_part(). */
void encode_text(struct encoder *e, const struct input *in, const struct block *b, size_t begin, size_t stop,
		size_t known, bool special, struct encoded_block *out);
void encoded_block_free(struct encoded_block *out);
/* Counts the lines that were skipped in a block, and names the first few of all blocks on stderr. Call it in the order
 * of the blocks. */
void input_count_skipped(struct input *in, const struct encoded_block *r);
/* Says on stderr how many lines were skipped, if any were. */
void input_say_skipped(const struct input *in);

/* -- prompts -- */

/* Appends the ids of a prompt. With `chat` it is a user's message, and the tags that open the reply follow. There is
 * always an id: an empty text becomes the end token, behind which a document begins. */
int prompt_encode(struct encoder *e, const char *text, size_t n, bool chat, struct ids *out);
/* Reads prompts: each line of a text file that is not empty; of JSON lines what conversation_read_prompt reads.
 * (*out)[n]: free each id, and *out. */
int prompts_read(const char *path, enum text_format wanted, const struct tokenizer *t, bool chat, struct ids **out,
		int *n);

#endif
