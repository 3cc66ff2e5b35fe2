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
#include <strings.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utf8proc.h>
#include <zlib.h>
#include <zstd.h>

#define BLOCKS_AT_ONCE 16      /* blocks in memory for each processor */

/* -- bytes of a file -- */

struct byte_source {
	const char *path;
	int fd;
	int64_t size;                /* of a plain file when it was opened, or -1 */
	int64_t consumed;            /* bytes read of it */
	bool ended, between;         /* the file is at its end; between: so is what is packed in it */
	enum { PLAIN, GZIP, ZSTD } packing;
	z_stream gzip;
	ZSTD_DStream *zstd;
	uint8_t *packed;             /* [PACKED_BLOCK] what has been read of the file */
	size_t at, count;            /* of `packed`: what is used already, what is there */
	char *head;                  /* [HEAD_BYTES] the first bytes, unpacked */
	size_t head_at, head_count;
};
/* MOST_AT_ONCE: bytes that one call unpacks at the most, for zlib counts in 32 bits */
enum { PACKED_BLOCK = 1 << 16, HEAD_BYTES = 4096, MOST_AT_ONCE = 1 << 30 };

/* Whether a text ends with a suffix, in any case. */
static bool has_ending(const char *text, size_t n, const char *suffix)
{
	const size_t m = strlen(suffix);
	return n > m && !strncasecmp(text + n - m, suffix, m);
}

enum text_format text_format(const char *path, enum text_format wanted)
{
	static const char *const packings[] = {".gz", ".zst", ".zstd"};
	size_t n = strlen(path);
	for (int i = 0; i < 3; i++)
		if (has_ending(path, n, packings[i])) {
			n -= strlen(packings[i]);
			break;
		}
	if (wanted != FORMAT_BY_NAME)
		return wanted;
	return has_ending(path, n, ".jsonl") || has_ending(path, n, ".ndjson") ? FORMAT_JSONL
		: has_ending(path, n, ".json") ? FORMAT_JSON : FORMAT_TEXT;
}

/* Reads more of the file until `least` bytes of `packed` are not used yet, or the file ends. A pipe may give fewer
 * bytes at a time. Bytes that are not used yet must be at the front. */
static int fill_packed(struct byte_source *s, size_t least)
{
	if (s->at == s->count)
		s->at = s->count = 0;
	while (s->count - s->at < least && !s->ended) {
		const ssize_t n = read(s->fd, s->packed + s->count, PACKED_BLOCK - s->count);
		if (n < 0 && errno != EINTR)
			return fail("%s: cannot read: %s", s->path, strerror(errno));
		s->consumed += n > 0 ? n : 0;
		s->count += n > 0 ? n : 0, s->ended = n == 0;
	}
	if (s->ended && s->consumed < s->size)
		return fail("%s: was cut short while it was read: it had %lld bytes, %lld could be read", s->path,
				(long long)s->size, (long long)s->consumed);
	return 0;
}

/* Unpacks up to n bytes. */
static int64_t unpack(struct byte_source *s, char *out, size_t n)
{
	n = n < MOST_AT_ONCE ? n : MOST_AT_ONCE;
	for (;;) {
		if (fill_packed(s, 1) < 0)
			return -1;
		const size_t left = s->count - s->at;
		if (s->packing == PLAIN) {
			const size_t size = left < n ? left : n;
			memcpy(out, s->packed + s->at, size);
			s->at += size;
			return size;
		}
		if (s->packing == GZIP && s->between && left && !s->packed[s->at]) { /* zeros that fill a block, as of a tape */
			s->at++;
			continue;
		}
		if (!left && s->between)
			return 0;
		size_t made;
		const char *wrong = NULL;
		if (s->packing == GZIP) {
			if (s->between && inflateReset(&s->gzip) != Z_OK) /* a file may be several, one behind the other */
				return fail("%s: cannot unpack", s->path);
			s->gzip.next_in = s->packed + s->at, s->gzip.avail_in = left;
			s->gzip.next_out = (uint8_t *)out, s->gzip.avail_out = n;
			const int rc = inflate(&s->gzip, Z_NO_FLUSH);
			s->at = s->count - s->gzip.avail_in, made = n - s->gzip.avail_out;
			s->between = rc == Z_STREAM_END;
			if (rc != Z_OK && rc != Z_STREAM_END && rc != Z_BUF_ERROR)
				wrong = s->gzip.msg ? s->gzip.msg : "damaged";
		} else {
			ZSTD_inBuffer in = {s->packed + s->at, left, 0};
			ZSTD_outBuffer to = {out, n, 0};
			const size_t rc = ZSTD_decompressStream(s->zstd, &to, &in);
			s->at += in.pos, made = to.pos;
			s->between = rc == 0;
			if (ZSTD_isError(rc))
				wrong = ZSTD_getErrorName(rc);
		}
		if (wrong)
			return fail("%s: cannot unpack: %s", s->path, wrong);
		if (made)
			return made;
		if (s->ended && !s->between)
			return fail("%s: ends in the middle of what is packed; the file was cut short", s->path);
	}
}

/* What foreign format bytes begin with, or NULL. */
static const char *foreign_format(const char *head, size_t n)
{
	static const struct { const char *bytes; size_t size; const char *name; } known[] = {
		{"PAR1", 4, "a Parquet file"}, {"PK\3\4", 4, "a zip archive"}, {"!<arch>\n", 8, "a .deb or ar archive"},
		{"\xff\xfe", 2, "text in UTF-16"}, {"\xfe\xff", 2, "text in UTF-16"}, {"%PDF-", 5, "a PDF file"},
		{"\x7f" "ELF", 4, "a program"}, {"\xfd" "7zXZ", 5, "an xz file"}, {"BZh", 3, "a bzip2 file"},
		{"7z\xbc\xaf", 4, "a 7z archive"}, {"ARROW1", 6, "an Arrow file"}, {"\x89PNG", 4, "a picture"},
		{"GGUF", 4, "a GGUF model"}, {"SQLite format 3", 15, "an SQLite database"},
		{"\x04\x22\x4d\x18", 4, "an lz4 file"},
		{LFS_BEGIN, sizeof LFS_BEGIN - 1, LFS_NAME},
	};
	for (size_t i = 0; i < sizeof known / sizeof *known; i++)
		if (n >= known[i].size && !memcmp(head, known[i].bytes, known[i].size))
			return known[i].name;
	if (n >= 262 && !memcmp(head + 257, "ustar", 5))
		return "a tar archive";
	if (memchr(head, 0, n))
		return "binary: it has bytes that are 0";
	size_t bad = 0;
	utf8proc_int32_t code;
	for (size_t i = 0; i < n;) {
		const utf8proc_ssize_t size = utf8proc_iterate((const uint8_t *)head + i, n - i, &code);
		if (size <= 0 && n - i >= 4)
			bad++;
		i += size > 0 ? size : 1;
	}
	return bad > n / 4 ? "mostly not UTF-8" : NULL;
}

/* Replaces what is still to be read, a JSON array of records, by a line for each record. */
static int array_to_lines(struct byte_source *s)
{
	struct text all = {0}, lines = {0};
	int64_t n = s->head_count - s->head_at;
	text_append(&all, s->head + s->head_at, n);
	while (n > 0 && (n = unpack(s, s->head, HEAD_BYTES)) > 0)
		text_append(&all, s->head, n);
	json_t *root = n < 0 ? NULL : json_value(s->path, all.data, all.size);
	int rc = root ? 0 : -1;
	if (n == 0 && !root) {
		char what[sizeof error_text];
		snprintf(what, sizeof what, "%s", error_text);
		fail("%.3000s; a file with one record on a line is named .jsonl, or add --format jsonl", what);
	} else if (root && !json_is_array(root))
		rc = fail("%s: found %s; expected an array of records, or JSON lines in a file named .jsonl", s->path,
				json_kind(root));
	for (size_t i = 0; rc == 0 && i < json_array_size(root); i++) {
		char *line = json_text(json_array_get(root, i), JSON_COMPACT | JSON_ENCODE_ANY);
		text_append_string(&lines, line);
		text_append(&lines, "\n", 1);
		free(line);
	}
	json_decref(root);
	free(all.data);
	free(s->head);
	s->head = lines.data ? lines.data : allocate(1);
	s->head_at = 0, s->head_count = lines.size;
	return rc;
}

/* Looks at the first bytes of what was opened. */
static int source_begin(struct byte_source *s, const char *name, enum text_format wanted)
{
	if (fill_packed(s, 4) < 0)
		return -1;
	if (s->count >= 3 && !memcmp(s->packed, "\x1f\x8b\x08", 3))
		s->packing = GZIP;
	else if (s->count >= 4 && (!memcmp(s->packed, "\x28\xb5\x2f\xfd", 4) ||
			((s->packed[0] & 0xF0) == 0x50 && !memcmp(s->packed + 1, "\x2a\x4d\x18", 3)))) /* a frame to skip */
		s->packing = ZSTD;
	if (s->packing == GZIP && inflateInit2(&s->gzip, 15 + 16) != Z_OK)
		return s->packing = PLAIN, fail("%s: no memory to unpack", s->path);
	if (s->packing == ZSTD && !(s->zstd = ZSTD_createDStream()))
		return fail("%s: no memory to unpack", s->path);
	if (s->zstd) /* what `zstd --long=31` writes, too */
		ZSTD_DCtx_setParameter(s->zstd, ZSTD_d_windowLogMax, 31);
	int64_t n = 1;
	while (n > 0 && s->head_count < HEAD_BYTES) {
		n = unpack(s, s->head + s->head_count, HEAD_BYTES - s->head_count);
		s->head_count += n > 0 ? n : 0;
	}
	if (n < 0)
		return -1;
	if (s->head_count >= 3 && !memcmp(s->head, "\xef\xbb\xbf", 3))
		s->head_at = 3;
	const char *format = wanted == FORMAT_TEXT ? NULL : foreign_format(s->head, s->head_count);
	if (format)
		return fail("%s: is %s; expected text in UTF-8 or JSON lines, which may be packed by gzip or zstd: convert it, "
				"or add --format text to read its bytes as text", s->path, format);
	return text_format(name, wanted) == FORMAT_JSON ? array_to_lines(s) : 0;
}

struct byte_source *byte_source_open(const char *path, enum text_format wanted)
{
	struct stat st;
	const bool standard = !strcmp(path, "-");
	const int fd = standard ? dup(0) : open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return fail("%s: cannot open: %s", path, strerror(errno)), NULL;
	struct byte_source *s = allocate(sizeof *s);
	*s = (struct byte_source){.path = standard ? "the standard input" : path, .fd = fd, .size = -1,
			.packed = allocate(PACKED_BLOCK), .head = allocate(HEAD_BYTES)};
	if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode))
		s->size = st.st_size - lseek(fd, 0, SEEK_CUR); /* some of the standard input may have been read before */
	if (source_begin(s, path, wanted) == 0)
		return s;
	byte_source_close(s);
	return NULL;
}

int64_t byte_source_read(struct byte_source *s, char *out, size_t n)
{
	const size_t left = s->head_count - s->head_at, size = left < n ? left : n;
	if (!left)
		return unpack(s, out, n);
	memcpy(out, s->head + s->head_at, size);
	s->head_at += size;
	return size;
}

void byte_source_close(struct byte_source *s)
{
	if (!s)
		return;
	if (s->packing == GZIP)
		inflateEnd(&s->gzip);
	ZSTD_freeDStream(s->zstd);
	close(s->fd);
	free(s->packed), free(s->head), free(s);
}

int read_whole(const char *path, enum text_format wanted, struct text *out)
{
	struct byte_source *s = byte_source_open(path, wanted);
	char bytes[4096];
	int64_t n = s ? 1 : -1;
	while (n > 0 && (n = byte_source_read(s, bytes, sizeof bytes)) > 0)
		text_append(out, bytes, n);
	byte_source_close(s);
	return n < 0 ? -1 : 0;
}

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

/* Cuts what has been read of a file into blocks; its last `fresh` bytes are new, 0 at the end of the file. */
static void input_cut(struct input *in, size_t fresh)
{
	const char *path = in->files[in->next - 1];
	const size_t count = in->count;
	const bool ended = fresh == 0;
	size_t searched = in->size - in->begin - fresh; /* bytes of the next block in which there is no end for it */
	for (;;) {
		const char *text = in->data + in->begin;
		const size_t left = in->size - in->begin;
		size_t n = ended ? left : 0;
		if (in->lines && left >= TEXT_BLOCK) {
			const size_t from = searched > TEXT_BLOCK - 1 ? searched : TEXT_BLOCK - 1;
			const char *newline = memchr(text + from, '\n', left - from);
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
		searched = 0;
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
		if (!in->source && in->next == in->num_files)
			break;
		if (!in->source) {
			const char *path = in->files[in->next++];
			if (!(in->source = byte_source_open(path, in->options.format)))
				return -1;
			in->lines = text_format(path, in->options.format) != FORMAT_TEXT;
			in->line = 1;
		}
		if (in->size == in->capacity) {
			if (in->count)
				break;
			in->data = grow(in->data, in->size, &in->capacity, 1, 1);
		}
		const int64_t n = byte_source_read(in->source, in->data + in->size, in->capacity - in->size);
		if (n < 0)
			return -1;
		in->size += n;
		input_cut(in, n);
		if (n == 0) {
			byte_source_close(in->source);
			in->source = NULL;
		}
	}
	return in->count;
}

void input_close(struct input *in)
{
	byte_source_close(in->source);
	free(in->data), free(in->blocks);
}

const char *text_field_of(const struct text_options *o)
{
	return o->text_field ? o->text_field : "text";
}

int inputs_check(int num_files, char **files, const struct text_options *o, char outputs[][PATH_LEN], int num_outputs,
		int64_t *total)
{
	bool lines = false;
	for (int i = 0; i < num_files; i++) {
		struct stat in, out;
		lines |= text_format(files[i], o->format) != FORMAT_TEXT;
		const bool standard = !strcmp(files[i], "-");
		if ((standard || !strncmp(files[i], "/dev/", 5)) && o->format == FORMAT_BY_NAME)
			return fail("%s: %s has no name that tells what it is; add --format text or --format jsonl", files[i],
					standard ? "the standard input" : "a device or a pipe");
		if (standard)
			continue;
		if (stat(files[i], &in) < 0)
			return fail("%s: cannot open: %s", files[i], strerror(errno));
		if (S_ISDIR(in.st_mode))
			return fail("%s: expected a text or .jsonl file, found a directory", files[i]);
		for (int k = 0; k < num_outputs; k++)
			if (stat(outputs[k], &out) == 0 && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
				return fail("%s: is an input, but would be replaced by the output; choose another --out", files[i]);
		*total += in.st_size;
	}
	if (!lines && (o->text_field || o->skip_bad_lines))
		return fail("%s: is text; expected a file of JSON lines, to which %s belongs: name it .jsonl, or add --format "
				"jsonl", files[0], o->text_field ? "--text-field" : "--skip-bad-lines");
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

/* Writes where a record is, for a message: its line, or its number in an array; both count from 1. */
static void name_place(char where[PATH_LEN + 32], const char *path, enum text_format format, int64_t number)
{
	snprintf(where, PATH_LEN + 32, format == FORMAT_JSON ? "%s: record %lld" : "%s:%lld", path, (long long)number);
}

/* -- prompts -- */

int prompt_encode(struct encoder *e, const char *text, size_t n, bool chat, struct ids *out)
{
	const struct message message = {.role = "user", .content = text, .content_size = n};
	if (chat)
		return chat_encode(e, &message, 1, true, out, NULL);
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
	int rc = root ? conversation_read_prompt(&c, root, where, chat, chat_has_tools(e)) : -1;
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

int prompts_read(const char *path, enum text_format wanted, const struct tokenizer *t, bool chat, struct ids **out,
		int *n)
{
	const enum text_format format = text_format(path, wanted);
	const bool jsonl = format != FORMAT_TEXT;
	struct text all = {0};
	*out = NULL, *n = 0;
	if (read_whole(path, wanted, &all) < 0) {
		free(all.data);
		return -1;
	}
	struct encoder *e = encoder_open(t);
	char where[PATH_LEN + 32];
	size_t capacity = 0, next;
	int rc = 0;
	long number = 1;
	for (size_t at = 0; rc == 0 && at < all.size; at = next, number++) {
		const char *line = all.data + at, *newline = memchr(line, '\n', all.size - at);
		next = newline ? (size_t)(newline + 1 - all.data) : all.size;
		size_t size = next - at;
		while (size && (line[size - 1] == '\n' || line[size - 1] == '\r'))
			size--;
		if (size == 0 || (jsonl && is_blank_line(line, size)))
			continue;
		*out = grow(*out, *n, &capacity, 1, sizeof **out);
		struct ids *ids = &(*out)[(*n)++];
		*ids = (struct ids){0};
		name_place(where, path, format, number);
		rc = jsonl ? prompt_from_json(e, where, line, size, chat, ids) : prompt_encode(e, line, size, chat, ids);
	}
	if (rc == 0 && *n == 0)
		rc = fail("%s: no prompts here; expected one on a line", path);
	for (int i = 0; rc < 0 && i < *n; i++)
		free((*out)[i].id);
	if (rc < 0) {
		free(*out);
		*out = NULL, *n = 0;
	}
	encoder_close(e);
	free(all.data);
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

/* Encodes the object of a line, which is a document; it has no ids when its text, the member `text_field`, is empty.
 * `special`: see encode(); it applies to that text. Members with other names may hold anything. */
static int line_document(struct encoder *e, const json_t *root, const char *where, const char *text_field,
		bool special, struct document *d)
{
	struct conversation c = {0};
	struct message text;
	d->ids.count = d->loss_mask.size = 0;
	const int form = record_form(root, where, text_field);
	int rc = form < 0 ? -1 : form == RECORD_TEXT ? field_content(root, where, text_field, &text)
			: conversation_read(&c, root, where, chat_has_tools(e));
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
static int parse_line(struct encoder *e, const struct input *in, const char *path, int64_t line, const char *json,
		size_t n, bool special, struct document *d)
{
	char where[PATH_LEN + 32];
	name_place(where, path, text_format(path, in->options.format), line);
	json_t *root = json_line(where, json, n);
	int rc = root ? line_document(e, root, where, text_field_of(&in->options), special, d) : -1;
	json_decref(root);
	return rc;
}

void encoded_block_free(struct encoded_block *out)
{
	for (size_t i = 0; i < out->count; i++)
		free(out->documents[i].ids.id), free(out->documents[i].loss_mask.data);
	for (int i = 0; i < SKIPPED_SHOWN; i++)
		free(out->skipped[i]);
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
		if (parse_line(e, in, b->path, line, text, n, special, new_document(out)) == 0)
			continue;
		if (!in->options.skip_bad_lines) {
			struct text message = {0};
			text_append_string(&message, error_text);
			text_append_string(&message, "; --skip-bad-lines leaves such lines out");
			out->error = message.data;
			break;
		}
		if (out->lines_skipped < SKIPPED_SHOWN)
			out->skipped[out->lines_skipped] = copy_string(error_text);
		out->lines_skipped++;
		const struct document *d = &out->documents[--out->count];
		free(d->ids.id), free(d->loss_mask.data);
	}
}

void input_count_skipped(struct input *in, const struct encoded_block *r)
{
	for (int i = 0; i < SKIPPED_SHOWN && r->skipped[i] && in->lines_skipped + i < SKIPPED_SHOWN; i++) {
		progress_end(&in->progress);
		fprintf(stderr, "skipped: %s\n", r->skipped[i]);
	}
	in->lines_skipped += r->lines_skipped;
}

void input_say_skipped(const struct input *in)
{
	if (in->lines_skipped)
		fprintf(stderr, "%s%lld line%s could not be used, and %s skipped\n",
				in->lines_skipped > SKIPPED_SHOWN ? "skipped: ...\n" : "", (long long)in->lines_skipped,
				in->lines_skipped == 1 ? "" : "s", in->lines_skipped == 1 ? "was" : "were");
}
