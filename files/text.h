/*
 * files/text.h - text and JSON lines as input: files in blocks that threads work on side by side, documents, prompts.
 */
#ifndef LING_FILES_TEXT_H
#define LING_FILES_TEXT_H

#include "files/base.h"
#include "files/tokenizer.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Appends the ids of a prompt; with `chat` it is a user's message, and the opening of the reply follows. Never none: an empty text is a
 * document's beginning, the end token of the one before. */
int prompt_encode(struct encoder *e, const char *text, size_t n, bool chat, struct ids *out);
/* Reads prompts: a text file has one on each line that is not empty; a .jsonl file's lines have a `prompt`, or the `messages` of a conversation.
 * (*out)[n]: free each id, and *out. */
int prompts_read(const char *path, const struct tokenizer *t, bool chat, struct ids **out, int *n);

#ifndef TEXT_BLOCK
#define TEXT_BLOCK (1 << 18)        /* bytes, of a block; more where a line is longer */
#endif
#define LOOK_AHEAD 1024        /* bytes behind a block of text that are there when it is read */

struct block {
	const char *path;
	int64_t line;                /* of JSON lines: the number of the first one; 0: text */
	size_t begin, end;           /* its bytes in input.data */
	bool first;                  /* text: nothing of its file that is not done with stands before it */
	size_t known;                /* text: how far its file stands in input.data */
	bool whole;                  /* text: that is the end of the file */
};

struct input {
	char **files;
	int num_files, next;         /* next: of files, the one to be opened */
	int fd;                      /* of the one being read, or -1 */
	bool lines;                  /* it has JSON lines */
	int64_t line;                /* of them, that at `begin` */
	char *data;
	size_t size, capacity;
	size_t begin;                /* of what is in no block yet */
	struct block *blocks;
	size_t count, room;
	struct progress progress;
};

void input_close(struct input *in);

/* Forgets the blocks and the first `done` bytes, and reads on. Returns how many blocks there are now, 0 at the end of the last file, or -1. */
int64_t input_read(struct input *in, size_t done);

/* Encoders that are at rest. */
struct encoders { const struct tokenizer *tokenizer; struct encoder *first; };

struct encoder *encoder_take(struct encoders *all);

void encoder_give(struct encoders *all, struct encoder *e);

void encoders_close(struct encoders *all);

/* A document: its ids, the end token included, and a byte for each, 1 where the loss counts; loss_mask.size 0: everywhere. */
struct document {
	struct ids ids;
	struct text loss_mask;
	int64_t bytes;               /* of text, see manifest.bytes */
};

/* What a thread makes of a block. */
struct encoded {
	struct document *documents;  /* JSON lines: one for each that is not empty; text: one, without an end token */
	size_t count, room;
	size_t done;                 /* text: how far the document goes, in input.data */
	char *error;                 /* or NULL */
};

void encoded_free(struct encoded *r);

/* Encodes a block of text from `begin` on, to the first border at or behind `stop`, with the file known as far as `known`. */
void encode_text(struct encoder *e, const struct input *in, const struct block *b, size_t begin, size_t stop, size_t known, bool special,
		struct encoded *r);

void encode_lines(struct encoder *e, const struct input *in, const struct block *b, bool special, struct encoded *r);

size_t known_behind(const struct block *b);

/* Fails when an input is one of the outputs, which would replace it; sums up the inputs' sizes. */
int inputs_check(int num_files, char **files, char outputs[][PATH_LEN], int num_outputs, int64_t *total);

#endif
