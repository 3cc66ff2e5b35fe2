/*
 * files/text.c - text and JSON lines as input: prompts, and files in blocks that threads encode side by side.
 */
#define _GNU_SOURCE
#include "files/text.h"

#include "files/base.h"
#include "files/conversation.h"
#include "files/encoder.h"
#include "files/tokenizer.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define BLOCKS_AT_ONCE 16      /* blocks in memory for each processor */

/* -- files in blocks -- */

/* Where to cut a text after 1 to n bytes; byte n is there too. In front of the last line that does not begin with
 * white space, else of the last word, else of the last character. */
static size_t text_cut(const char *text, size_t n)
{
	size_t word = 0, character = 0;
	for (size_t i = n; i > 0; i--) {
		if (((uint8_t)text[i] & 0xC0) == 0x80)
			continue;
		character = character ? character : i;
		if (text[i - 1] == '\n' && !isspace((unsigned char)text[i]))
			return i;
		if (!word && text[i] == ' ' && !isspace((unsigned char)text[i - 1]) && !isspace((unsigned char)text[i + 1]))
			word = i;
	}
	return word ? word : character ? character : n;
}

/* Cuts what has been read of a file into blocks. `ended`: that is all of it. */
static void input_cut(struct input *in, bool ended)
{
	const char *path = in->files[in->next - 1];
	const size_t count = in->count;
	for (;;) {
		const char *text = in->data + in->begin;
		const size_t left = in->size - in->begin;
		size_t n = ended ? left : 0;
		if (in->lines && left >= TEXT_BLOCK) {
			const char *newline = memchr(text + TEXT_BLOCK - 1, '\n', left - TEXT_BLOCK + 1);
			n = newline ? (size_t)(newline + 1 - text) : n;
		} else if (!in->lines && left >= TEXT_BLOCK + LOOK_AHEAD)
			n = text_cut(text, TEXT_BLOCK);
		if (!n)
			break;
		in->blocks = grow(in->blocks, in->count, &in->blocks_capacity, 1, sizeof *in->blocks);
		in->blocks[in->count++] = (struct block){.path = path, .line = in->lines ? in->line : 0,
			.begin = in->begin, .end = in->begin + n};
		for (size_t i = 0; in->lines && i < n; i++)
			in->line += text[i] == '\n';
		in->begin += n;
	}
	for (size_t i = count; i < in->count; i++)
		in->blocks[i].first = i == 0 || in->blocks[i - 1].path != path || in->blocks[i - 1].file_complete;
	for (size_t i = in->count; i > 0 && !in->lines; i--) { /* the blocks of this file */
		struct block *b = &in->blocks[i - 1];
		if (b->path != path || b->line || b->file_complete)
			break;
		b->file_end = in->size, b->file_complete = ended;
	}
}

int64_t input_read(struct input *in, size_t done)
{
	progress(&in->progress, done);
	if (!in->data) {
		long processors = sysconf(_SC_NPROCESSORS_ONLN);
		in->capacity = TEXT_BLOCK * BLOCKS_AT_ONCE * (size_t)(processors < 1 ? 1 : processors);
		in->data = allocate(in->capacity);
	} else if (!done && in->count) /* the caller could encode nothing of these blocks without the text after them */
		in->data = grow(in->data, in->size, &in->capacity, in->capacity - in->size + 1, 1);
	memmove(in->data, in->data + done, in->size - done);
	in->size -= done;
	in->begin = in->count = 0;
	for (;;) {
		if (in->fd < 0 && in->next == in->num_files)
			break;
		const char *path = in->files[in->fd < 0 ? in->next : in->next - 1];
		if (in->fd < 0) {
			if ((in->fd = open(path, O_RDONLY | O_CLOEXEC)) < 0)
				return fail("%s: cannot open: %s", path, strerror(errno));
			in->next++;
			in->lines = has_suffix(path, ".jsonl");
			in->line = 1;
		}
		if (in->size == in->capacity) {
			if (in->count)
				break;
			in->data = grow(in->data, in->size, &in->capacity, 1, 1);
		}
		const ssize_t n = read(in->fd, in->data + in->size, in->capacity - in->size);
		if (n < 0 && errno != EINTR)
			return fail("%s: cannot read: %s", path, strerror(errno));
		in->size += n > 0 ? n : 0;
		if (n >= 0)
			input_cut(in, n == 0);
		if (n == 0) {
			close(in->fd);
			in->fd = -1;
		}
	}
	return in->count;
}

void input_close(struct input *in)
{
	if (in->fd >= 0)
		close(in->fd);
	free(in->data), free(in->blocks);
}

int inputs_check(int num_files, char **files, char outputs[][PATH_LEN], int num_outputs, int64_t *total)
{
	for (int i = 0; i < num_files; i++) {
		struct stat in, out;
		if (stat(files[i], &in) < 0)
			return fail("%s: cannot open: %s", files[i], strerror(errno));
		if (S_ISDIR(in.st_mode))
			return fail("%s: expected a text or .jsonl file, found a directory", files[i]);
		for (int k = 0; k < num_outputs; k++)
			if (stat(outputs[k], &out) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
				return fail("%s: is an input, but would be replaced by the output; choose another prefix", files[i]);
		*total += in.st_size;
	}
	return 0;
}

struct encoder *encoder_take(struct encoder_pool *pool)
{
	struct encoder *e = NULL;
	#pragma omp critical (encoder_pool)
	if (pool->count)
		e = pool->idle[--pool->count];
	return e ? e : encoder_open(pool->tokenizer);
}

void encoder_give(struct encoder_pool *pool, struct encoder *e)
{
	#pragma omp critical (encoder_pool)
	{
		pool->idle = grow(pool->idle, pool->count, &pool->capacity, 1, sizeof *pool->idle);
		pool->idle[pool->count++] = e;
	}
}

void encoder_pool_close(struct encoder_pool *pool)
{
	for (size_t i = 0; i < pool->count; i++)
		encoder_close(pool->idle[i]);
	free(pool->idle);
}

/* -- prompts -- */

int prompt_encode(struct encoder *e, const char *text, size_t n, bool chat, struct ids *out)
{
	if (chat)
		return chat_encode(e, &(struct message){"user", text, n, false}, 1, true, out, NULL);
	if (encode(e, text, n, true, out) < 0)
		return -1;
	if (out->count == 0 && tokenizer_end(encoder_tokenizer(e)) < 0)
		return fail("the prompt is empty, and the tokenizer has no end token to begin with; "
				"give at least one character");
	if (out->count == 0)
		append_id(out, tokenizer_end(encoder_tokenizer(e)));
	return 0;
}

/* One line of a .jsonl file. */
static int prompt_from_json(struct encoder *e, const char *where, const char *line, size_t n, bool chat,
		struct ids *out)
{
	json_t *root = json_line(where, line, n);
	struct conversation c = {0};
	int rc = root ? conversation_read_prompt(&c, root, where, chat) : -1;
	if (rc == 0 && (rc = c.messages[0].role ? chat_encode(e, c.messages, c.count, true, out, NULL)
			: prompt_encode(e, c.messages[0].content, c.messages[0].content_size, false, out)) < 0) {
		char what[sizeof error_text];
		snprintf(what, sizeof what, "%s", error_text);
		fail("%s: %.3000s", where, what);
	}
	conversation_free(&c);
	json_decref(root);
	return rc;
}

int prompts_read(const char *path, const struct tokenizer *t, bool chat, struct ids **out, int *n)
{
	const bool jsonl = has_suffix(path, ".jsonl");
	FILE *f = fopen(path, "re");
	*out = NULL, *n = 0;
	if (!f)
		return fail("%s: cannot open: %s", path, strerror(errno));
	struct encoder *e = encoder_open(t);
	char *line = NULL, where[PATH_LEN + 32];
	size_t room = 0, capacity = 0;
	int rc = 0;
	ssize_t size;
	for (long number = 1; rc == 0 && (size = getline(&line, &room, f)) >= 0; number++) {
		while (size && (line[size - 1] == '\n' || line[size - 1] == '\r'))
			size--;
		if (size == 0 || (jsonl && is_blank_line(line, size)))
			continue;
		*out = grow(*out, *n, &capacity, 1, sizeof **out);
		struct ids *ids = &(*out)[(*n)++];
		*ids = (struct ids){0};
		snprintf(where, sizeof where, "%s:%ld", path, number);
		rc = jsonl ? prompt_from_json(e, where, line, size, chat, ids) : prompt_encode(e, line, size, chat, ids);
	}
	if (rc == 0 && ferror(f))
		rc = fail("%s: cannot read: %s", path, strerror(errno));
	if (rc == 0 && *n == 0)
		rc = fail("%s: no prompts here; expected one on a line", path);
	for (int i = 0; rc < 0 && i < *n; i++)
		free((*out)[i].id);
	if (rc < 0) {
		free(*out);
		*out = NULL, *n = 0;
	}
	encoder_close(e);
	free(line);
	fclose(f);
	return rc;
}

/* -- documents -- */

/* Bytes of the text that ids stand for, special tokens left out. */
static int64_t text_bytes(const struct tokenizer *t, const struct ids *ids)
{
	int64_t bytes = 0;
	for (int64_t i = 0; i < ids->count; i++)
		bytes += tokenizer_bytes(t, ids->id[i]);
	return bytes;
}

/* Encodes the object of a line, which is a document; it has no ids when its text is empty. `special`: see encode();
 * it applies to a `text`. Members with other names may hold anything, integers of more than 64 bits too. */
static int line_document(struct encoder *e, const json_t *root, const char *where, bool special, struct document *d)
{
	struct conversation c = {0};
	struct message text;
	d->ids.count = d->loss_mask.size = 0;
	const int form = record_form(root, where, "text");
	int rc = form < 0 ? -1 : form == RECORD_TEXT ? field_content(root, where, "text", &text)
			: conversation_read(&c, root, where);
	if (rc == 0)
		rc = form == RECORD_TEXT ? encode(e, text.content, text.content_size, special, &d->ids)
				: chat_encode(e, c.messages, c.count, false, &d->ids, &d->loss_mask);
	conversation_free(&c);
	const int32_t end = tokenizer_end(encoder_tokenizer(e));
	/* a text, or a conversation that does not end with a reply */
	if (rc == 0 && d->ids.count && d->ids.id[d->ids.count - 1] != end && (form == RECORD_TEXT || !chat_closes(e))) {
		append_id(&d->ids, end);
		if (d->loss_mask.size)
			append_loss_mask(&d->loss_mask, &d->ids, LOSS_NONE);
	}
	d->bytes = text_bytes(encoder_tokenizer(e), &d->ids);
	return rc;
}

/* Encodes one line of a JSONL file, which is not blank, into *d. */
static int parse_line(struct encoder *e, const char *path, long line, const char *json, size_t n, bool special,
		struct document *d)
{
	char where[PATH_LEN + 32];
	snprintf(where, sizeof where, "%s:%ld", path, line);
	json_t *root = json_line(where, json, n);
	int rc = root ? line_document(e, root, where, special, d) : -1;
	json_decref(root);
	return rc;
}

void encoded_block_free(struct encoded_block *out)
{
	for (size_t i = 0; i < out->count; i++)
		free(out->documents[i].ids.id), free(out->documents[i].loss_mask.data);
	free(out->documents), free(out->error);
	*out = (struct encoded_block){0};
}

static struct document *new_document(struct encoded_block *out)
{
	out->documents = grow(out->documents, out->count, &out->capacity, 1, sizeof *out->documents);
	out->documents[out->count] = (struct document){0};
	return &out->documents[out->count++];
}

void encode_text(struct encoder *e, const struct input *in, const struct block *b, size_t begin, size_t stop,
		size_t known, bool special, struct encoded_block *out)
{
	struct document *d = new_document(out);
	const bool partial = known < b->file_end || !b->file_complete;
	const int64_t done = encode_part(e, in->data + begin, known - begin, stop - begin, partial, special, &d->ids);
	if (done < 0) {
		struct text message = {0};
		text_append_string(&message, b->path), text_append_string(&message, ": ");
		text_append_string(&message, error_text);
		out->error = message.data;
	}
	out->done = begin + (done < 0 ? 0 : done);
	d->bytes = text_bytes(encoder_tokenizer(e), &d->ids);
}

void encode_lines(struct encoder *e, const struct input *in, const struct block *b, bool special,
		struct encoded_block *out)
{
	int64_t line = b->line;
	for (size_t i = b->begin, n; i < b->end && !out->error; i += n, line++) {
		const char *text = in->data + i, *newline = memchr(text, '\n', b->end - i);
		n = newline ? (size_t)(newline + 1 - text) : b->end - i;
		if (is_blank_line(text, n))
			continue;
		if (parse_line(e, b->path, line, text, n, special, new_document(out)) < 0)
			out->error = copy_string(error_text);
	}
}
