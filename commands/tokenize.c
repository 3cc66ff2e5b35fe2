/*
 * commands/tokenize.c - `ling tokenize`: token files from text, and text from token files.
 */
#define _GNU_SOURCE
#include "commands/tokenize.h"

#include "files/base.h"
#include "files/text.h"
#include "files/encoder.h"
#include "files/tokenizer.h"
#include "files/tokenizer_training.h"
#include "data.h"
#include "commands/result.h"

#include <jansson.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>

int tokens_print(const char *prefix, const char *tokenizer, FILE *out)
{
	struct tokens tokens;
	if (tokens_open(&tokens, prefix, "none", INT32_MAX) < 0)
		return -1;
	const char *name = tokenizer ? tokenizer : tokens.tokenizer;
	struct tokenizer *t = NULL;
	int rc = *name ? 0 : fail("%s: does not say what made its ids; give it as --tokenizer", prefix);
	if (!rc && !(t = tokenizer_open(name)))
		rc = -1;
	if (!rc && *tokens.tokenizer && !tokenizer_has_hash(t, tokens.tokenizer_hash))
		rc = fail("%s: was made by tokenizer %s with hash %08x; %s has %08x", prefix, tokens.tokenizer,
				(unsigned)tokens.tokenizer_hash, name, (unsigned)tokenizer_hash(t));
	struct text text = {0};
	int32_t ids[4096];
	for (int64_t i = 0, n; !rc && i < tokens.count; i += n) {
		n = tokens.count - i < 4096 ? tokens.count - i : 4096;
		rc = tokens_read(&tokens, i, n, ids);
		text.size = 0;
		for (int64_t k = 0; !rc && k < n; k++)
			if (ids[k] < tokenizer_size(t))
				tokenizer_decode(t, ids[k], true, &text);
			else
				rc = fail("%s: token %lld: id %d is none of the %d that %s has; expected --tokenizer to name what made "
						"the ids", tokens.path, (long long)(i + k), ids[k], tokenizer_size(t), name);
		if (!rc && fwrite(text.data, 1, text.size, out) != text.size)
			break; /* the caller sees that it failed */
	}
	free(text.data);
	tokenizer_close(t);
	tokens_close(&tokens);
	return rc;
}

/* A token file that is being written. See data.c for the format. */
struct token_writer {
	FILE *bin, *idx, *mask;
	const struct tokenizer *tokenizer;
	int dtype;                   /* of .bin: UINT16 where the vocabulary fits, else INT32 */
	int64_t bytes;               /* of text, see manifest.bytes */
	int64_t tokens, documents, sequences;
	int64_t length;              /* tokens of the sequence being written */
	int64_t *continued;          /* [num_continued] sequences after which the document goes on (SEQUENCE_MAX) */
	size_t num_continued, continued_capacity;
	int32_t largest_id, last_id;
	int64_t mask_bytes;          /* written to .mask.bin: 0, or one for each token */
	int64_t loss_tokens;         /* tokens that the loss counts */
	uint32_t crc, mask_crc;
};

/* Appends n bytes to the loss mask, after a 1 for each token before them that has no byte yet: while the loss counts
 * every token, nothing is written. */
static void write_mask(struct token_writer *w, const char *loss_mask, size_t n)
{
	char ones[4096];
	memset(ones, 1, sizeof ones);
	while (w->mask_bytes < w->tokens) {
		const int64_t missing = w->tokens - w->mask_bytes;
		const int64_t count = missing < (int64_t)sizeof ones ? missing : (int64_t)sizeof ones;
		w->mask_crc = crc32_z(w->mask_crc, (const uint8_t *)ones, count);
		fwrite(ones, 1, count, w->mask);
		w->mask_bytes += count;
	}
	w->mask_crc = crc32_z(w->mask_crc, (const uint8_t *)loss_mask, n);
	fwrite(loss_mask, 1, n, w->mask);
	w->mask_bytes += n;
}

static void end_sequence(struct token_writer *w)
{
	int32_t length = w->length;
	fwrite(&length, sizeof length, 1, w->idx);
	w->sequences++, w->length = 0;
}

/* Appends ids of the current document. loss_mask [n], or NULL: the loss counts all of them. */
static void write_ids(struct token_writer *w, const int32_t *id, const char *loss_mask, size_t n)
{
	uint16_t narrow[8192];
	const int width = token_types[w->dtype].size;
	for (size_t at = 0, count; at < n; at += count) {
		if (w->length == SEQUENCE_MAX) {
			w->continued = grow(w->continued, w->num_continued, &w->continued_capacity, 1, sizeof *w->continued);
			w->continued[w->num_continued++] = w->sequences;
			end_sequence(w);
		}
		const size_t room = SEQUENCE_MAX - w->length;
		count = n - at < 8192 ? n - at : 8192;
		count = count < room ? count : room;
		for (size_t i = 0; i < count; i++) {
			narrow[i] = id[at + i];
			w->largest_id = id[at + i] > w->largest_id ? id[at + i] : w->largest_id;
			w->last_id = id[at + i];
			w->loss_tokens += !loss_mask || loss_mask[at + i] != LOSS_NONE;
		}
		const void *out = w->dtype == UINT16 ? (const void *)narrow : id + at;
		w->crc = crc32_z(w->crc, out, count * width);
		fwrite(out, width, count, w->bin);
		if (loss_mask)
			write_mask(w, loss_mask + at, count);
		w->tokens += count, w->length += count;
	}
}

/* Ends the current document; one without tokens is not written. */
static void end_document(struct token_writer *w)
{
	if (!w->length)
		return;
	end_sequence(w);
	w->documents++;
}

/* Whether writing has failed, so that reading on is useless. file_close() reports it. */
static bool writer_failed(const struct token_writer *w)
{
	return ferror(w->bin) || ferror(w->idx) || ferror(w->mask);
}

/* Appends the documents of a block. With whole_documents each one ends here. */
static int write_block(struct token_writer *w, const struct encoded_block *r, bool whole_documents)
{
	if (r->error)
		return fail("%s", r->error);
	for (size_t i = 0; i < r->count; i++) {
		const struct document *d = &r->documents[i];
		write_ids(w, d->ids.id, d->loss_mask.size ? d->loss_mask.data : NULL, d->ids.count);
		w->bytes += d->bytes;
		if (whole_documents)
			end_document(w);
	}
	return 0;
}

/* How far encoding a block of text looks at first: LOOK_AHEAD bytes after its end, so that a cut is likely to be
 * found at its end. */
static size_t look_ahead_end(const struct block *b)
{
	return b->file_end - b->end < LOOK_AHEAD ? b->file_end : b->end + LOOK_AHEAD;
}

/* Appends an encoded block of text. *done: the end of what has been written of its file. The block was encoded as if
 * the text could be cut where it begins; that is so if the block before it ended exactly there. If it did not, or
 * this one could not be encoded to its end, the block is encoded again from *done on; in a second attempt with all
 * that has been read of the file. So the ids are those of the whole text. */
static int write_text(struct token_writer *w, struct encoder *e, const struct input *in, const struct block *b,
		bool special, struct encoded_block *r, size_t *done)
{
	if (b->first)
		*done = b->begin;
	for (int attempt = *done == b->begin ? 0 : 1; attempt < 3 && *done < b->end; attempt++) {
		if (attempt > 0) {
			encoded_block_free(r);
			const size_t stop = attempt == 1 ? b->end : SIZE_MAX;
			const size_t known = attempt == 1 ? look_ahead_end(b) : b->file_end;
			encode_text(e, in, b, *done, stop, known, special, r);
		}
		if (write_block(w, r, false) < 0)
			return -1;
		*done = r->done;
	}
	if (b->file_complete && *done == b->file_end) {
		const int32_t end = tokenizer_end(w->tokenizer);
		if (w->length && w->last_id != end)
			write_ids(w, &end, NULL, 1);
		end_document(w);
	}
	return 0;
}

/* Threads encode the blocks of in; then they are written in order. Returns how many bytes of in->data have been
 * written, or -1. */
static int64_t write_blocks(struct token_writer *w, struct encoder_pool *pool, struct input *in, bool special)
{
	const int64_t n = in->count;
	struct encoded_block *results = allocate(n * sizeof *results);
	#pragma omp parallel for schedule(dynamic)
	for (int64_t i = 0; i < n; i++) {
		const struct block *b = &in->blocks[i];
		struct encoder *e = encoder_take(pool);
		if (b->line)
			encode_lines(e, in, b, special, &results[i]);
		else
			encode_text(e, in, b, b->begin, b->end, look_ahead_end(b), special, &results[i]);
		encoder_give(pool, e);
	}
	struct encoder *e = encoder_take(pool);
	size_t done = 0;
	int rc = 0;
	bool stuck = false; /* more of the last file must be read before its text can be cut */
	for (int64_t i = 0; i < n; i++) {
		const struct block *b = &in->blocks[i];
		if (!rc)
			input_count_skipped(in, &results[i]);
		if (!rc && !stuck)
			rc = b->line ? write_block(w, &results[i], true) : write_text(w, e, in, b, special, &results[i], &done);
		stuck = !b->line && done < b->end;
		encoded_block_free(&results[i]);
	}
	encoder_give(pool, e);
	free(results);
	const struct block *last = &in->blocks[n - 1];
	return rc < 0 ? -1 : last->line || last->file_complete ? (int64_t)in->begin : (int64_t)done;
}

/* Completes the index, in which only the lengths have been written: adds positions and documents, then the
 * header. */
static int index_finish(struct token_writer *w, const char *path)
{
	const uint8_t *file;
	size_t size;
	if (writer_failed(w) || fflush(w->idx))
		return 0; /* reported when closed */
	if (map_file(path, &file, &size) < 0)
		return -1;
	int64_t at = 0;
	for (int64_t i = 0; i < w->sequences; i++) {
		fwrite(&at, sizeof at, 1, w->idx);
		at += load_i32(file + IDX_HEADER + 4 * i) * (int64_t)token_types[w->dtype].size;
	}
	unmap_file(file, size);
	size_t continued = 0;
	for (int64_t i = 0; i <= w->sequences; i++) { /* entry i: a document begins, or the last one ends, at sequence i */
		if (continued < w->num_continued && w->continued[continued] == i - 1)
			continued++;
		else
			fwrite(&i, sizeof i, 1, w->idx);
	}
	uint8_t header[IDX_HEADER] = IDX_MAGIC;
	header[9] = 1, header[17] = w->dtype;
	memcpy(header + 18, &w->sequences, 8);
	memcpy(header + 26, &(int64_t){w->documents + 1}, 8);
	if (!writer_failed(w) && fseeko(w->idx, 0, SEEK_SET) == 0)
		fwrite(header, IDX_HEADER, 1, w->idx);
	return 0;
}

/* Reads every input and completes .bin and .idx, the latter at idx_path. */
static int tokenize_all(struct token_writer *w, const char *prefix, const char *idx_path, bool special,
		struct input *in)
{
	uint8_t header[IDX_HEADER] = {0}; /* index_finish() writes the header */
	fwrite(header, IDX_HEADER, 1, w->idx);
	struct encoder_pool pool = {.tokenizer = w->tokenizer};
	int64_t done = 0, blocks = 0;
	while (done >= 0 && !writer_failed(w) && (blocks = input_read(in, done)) > 0)
		done = write_blocks(w, &pool, in, special);
	encoder_pool_close(&pool);
	progress_end(&in->progress);
	input_say_skipped(in);
	int rc = done < 0 || blocks < 0 ? -1 : 0;
	if (!rc && !writer_failed(w) && !w->documents)
		rc = fail("%s: nothing to write: no text in %d input file%s", prefix, in->num_files,
				in->num_files == 1 ? "" : "s");
	if (!rc && w->loss_tokens < w->tokens)
		write_mask(w, "", 0);
	return rc < 0 ? -1 : index_finish(w, idx_path);
}

/* A token file's files, in the order in which they are published: the index comes last, without which nothing
 * opens. */
enum { OUTPUT_BIN, OUTPUT_MASK, OUTPUT_MANIFEST, OUTPUT_IDX, NUM_OUTPUTS };
static const char *const output_suffixes[NUM_OUTPUTS] = {".bin", ".mask.bin", ".json", ".idx"};

/* Fails when the manifest would replace a file that is not a manifest, such as a tokenizer.json. */
static int output_check(const char *path)
{
	const int there = path_exists(path);
	if (there <= 0)
		return there;
	json_t *root = manifest_read_json(path);
	const int rc = root ? 0 : -1;
	json_decref(root);
	return rc;
}

/* Writes the files. name: what the manifest calls the tokenizer. There is no mask when the loss counts every token. */
static int tokenize_to(struct token_writer *w, const char *prefix, const char *name,
		struct new_file file[NUM_OUTPUTS], bool special, struct input *in)
{
	struct new_file *of[NUM_TOKEN_FILES] = {[TOKEN_FILE_BIN] = &file[OUTPUT_BIN], [TOKEN_FILE_IDX] = &file[OUTPUT_IDX],
		[TOKEN_FILE_MASK] = &file[OUTPUT_MASK]};
	struct manifest made = {0}, *m = &made;
	w->bin = file[OUTPUT_BIN].stream, w->idx = file[OUTPUT_IDX].stream, w->mask = file[OUTPUT_MASK].stream;
	int rc = tokenize_all(w, prefix, file[OUTPUT_IDX].temporary, special, in);
	for (int i = 0; i < NUM_TOKEN_FILES; i++)
		rc = new_file_close(of[i], rc);
	if (!w->mask_bytes)
		new_file_abandon(&file[OUTPUT_MASK]);
	for (int i = 0; i < NUM_TOKEN_FILES && rc == 0; i++)
		rc = file_state_read(&m->files[i], of[i]->temporary);
	snprintf(m->tokenizer, sizeof m->tokenizer, "%s", name);
	m->tokenizer_hash = tokenizer_hash(w->tokenizer), m->vocab_size = tokenizer_size(w->tokenizer);
	m->end_token = tokenizer_end(w->tokenizer);
	m->dtype = w->dtype, m->tokens = w->tokens, m->documents = w->documents, m->bytes = w->bytes;
	m->largest_id = w->largest_id, m->loss_tokens = w->loss_tokens;
	m->crc32 = w->crc, m->mask_crc32 = w->mask_crc;
	for (int i = 0; i < in->num_files; i++)
		if (text_format(in->files[i], in->options.format) != FORMAT_TEXT)
			snprintf(m->text_field, sizeof m->text_field, "%s", text_field_of(&in->options));
	m->lines_skipped = in->lines_skipped;
	json_t *json = rc == 0 ? manifest_to_json(m) : NULL;
	if (json)
		json_print(file[OUTPUT_MANIFEST].stream, json);
	json_decref(json);
	return rc;
}

int tokenize_files(const char *prefix, const char *tokenizer, const char *chat_form, bool special,
		const struct text_options *o, int num_files, char **files, struct tokenized *result)
{
	const struct text_options options = o ? *o : (struct text_options){0};
	char outputs[NUM_OUTPUTS][PATH_LEN], dir[PATH_LEN];
	const char *name = file_name(prefix);
	if (!*name || !strcmp(name, ".") || !strcmp(name, ".."))
		return fail("the output `%s` has no name in it; expected a prefix such as data/train, from which "
				"data/train.bin, .idx and .json are made", prefix);
	for (int k = 0; k < NUM_OUTPUTS; k++)
		if (path_suffix(outputs[k], prefix, output_suffixes[k]) < 0)
			return -1;
	if (strlen(text_field_of(&options)) >= MAX_NAME)
		return fail("--text-field: a name of %zu bytes; expected at most %d", strlen(options.text_field), MAX_NAME - 1);
	int64_t total = 0;
	parent_of(dir, prefix);
	struct tokenizer *t = tokenizer_open(tokenizer);
	if (!t)
		return -1;
	int rc = chat_form_choose(t, chat_form);
	if (rc == 0 && tokenizer_end(t) < 0)
		rc = fail("%s: has no token that ends a document; expected <|endoftext|>, or the `eos_token` of a "
				"tokenizer_config.json beside it", tokenizer);
	if (rc < 0 || inputs_check(num_files, files, &options, outputs, NUM_OUTPUTS, &total) < 0 ||
			output_check(outputs[OUTPUT_MANIFEST]) < 0 || make_directories(dir) < 0) {
		tokenizer_close(t);
		return -1;
	}

	struct token_writer w = {.tokenizer = t, .dtype = tokenizer_size(t) <= UINT16_MAX + 1 ? UINT16 : INT32};
	struct input in = {.files = files, .num_files = num_files, .options = options,
			.progress = progress_start("tokenize", total, 1e-6, "MB")};
	struct new_file file[NUM_OUTPUTS] = {0};
	for (int k = 0; k < NUM_OUTPUTS && rc == 0; k++)
		rc = new_member_begin(&file[k], outputs[k]);
	if (rc == 0)
		rc = tokenize_to(&w, prefix, tokenizer, file, special, &in);
	rc = new_files_publish(file, NUM_OUTPUTS, rc);
	*result = (struct tokenized){w.documents, w.tokens, w.bytes, w.loss_tokens, in.lines_skipped};
	input_close(&in);
	tokenizer_close(t);
	free(w.continued);
	return rc;
}

static const char *const format_names[] = FORMAT_NAMES;
/* The options that say how files become texts, of a struct with these fields. */
#define TEXT_INPUT_OPTIONS(s) \
	CHOICE_OPTION(s, format, "format", "FORMAT", format_names, \
			"What the files hold: text, jsonl, json (an array of records), or auto (the default): by name"), \
	TEXT_OPTION(s, text_field, "text-field", "NAME", \
			"The member of a JSON line that holds its text (default: text)"), \
	FLAG_OPTION(s, skip_bad_lines, "skip-bad-lines", \
			"Leave out JSON lines that cannot be used: the first few are named, all are counted"), \
	FLAG_OPTION(s, json, "json", "Print one JSON object")

struct tokenize_options {
	const char *tokenizer, *chat_form, *out, *decode, *text_field;
	int format;
	bool special_as_text, skip_bad_lines, json;
};

/* Ends the line of a result that is printed as text. */
static void print_skipped(const json_t *report)
{
	const int64_t n = result_integer(report, "skipped_lines");
	if (n)
		printf(", %lld bad line%s skipped", (long long)n, n == 1 ? "" : "s");
	printf("\n");
}

static void print_tokenized(const json_t *report)
{
	const int64_t tokens = result_integer(report, "tokens"), loss_tokens = result_integer(report, "loss_tokens");
	printf("%s: %lld documents, %lld tokens, %lld bytes", result_text(report, "path"),
			(long long)result_integer(report, "documents"), (long long)tokens,
			(long long)result_integer(report, "bytes"));
	if (loss_tokens < tokens)
		printf(", loss on %lld tokens", (long long)loss_tokens);
	print_skipped(report);
}

static int run_tokenize(const struct command_line *line)
{
	const struct tokenize_options *o = line->options;
	struct tokenized t;
	int rc = 0;
	if (o->decode)
		rc = o->out || o->chat_form || line->num_words || o->special_as_text || o->format || o->text_field ||
				o->skip_bad_lines || o->json ?
				fail("--decode goes with --tokenizer alone") : 0;
	else if (!o->out)
		rc = fail("--out is required");
	else if (!line->num_words)
		rc = fail("too few arguments");
	if (rc < 0)
		return EXIT_WRONG_USE;
	if (o->decode)
		return tokens_print(o->decode, o->tokenizer, stdout) < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
	const struct text_options how = {o->format, o->text_field, o->skip_bad_lines};
	if (tokenize_files(o->out, o->tokenizer ? o->tokenizer : "byte", o->chat_form, !o->special_as_text, &how,
			line->num_words, line->words, &t) < 0)
		return EXIT_WORK_FAILED;
	json_t *report = json_pack("{s:o, s:I, s:I, s:I, s:I, s:I}", "path", json_cstring(o->out),
			"documents", (json_int_t)t.documents, "tokens", (json_int_t)t.tokens, "bytes", (json_int_t)t.bytes,
			"loss_tokens", (json_int_t)t.loss_tokens, "skipped_lines", (json_int_t)t.lines_skipped);
	result_print(report, o->json, print_tokenized);
	return EXIT_DONE;
}

static const struct command_option tokenize_table[] = {
	TEXT_OPTION(tokenize_options, chat_form, "chat-form", "NAME", CHAT_FORM_HELP),
	TEXT_OPTION(tokenize_options, tokenizer, "tokenizer", "NAME",
			"byte (the default): a byte is a token, 256 ends a document; or a tokenizer.json of byte-level BPE, or a "
			"directory with one"),
	TEXT_OPTION(tokenize_options, out, "out", "PREFIX", "Write PREFIX.bin, PREFIX.idx and PREFIX.json (required)"),
	FLAG_OPTION(tokenize_options, special_as_text, "special-as-text",
			"What looks like a special token in a text is text, and not that token"),
	TEXT_INPUT_OPTIONS(tokenize_options),
	TEXT_OPTION(tokenize_options, decode, "decode", "PREFIX",
			"Print the text of a token file instead, special tokens included"),
};

const struct command tokenize_command = {
	.name = "tokenize", .usage = "--out PREFIX FILE...\n--decode PREFIX", .max_words = ANY_NUMBER,
	.help = "Make a token file from text files and JSON lines (.jsonl, .ndjson, or .json with an array of records), "
		"also packed (.gz, .zst); - is the standard input. A record has a `text`, or is a conversation, as `messages`, "
		"`conversations`, or a `prompt` and its `completion`, of which the loss counts only the assistant's replies; "
		"docs/training.md has the forms.",
	.run = run_tokenize, COMMAND_OPTIONS(tokenize_options, tokenize_table),
};

struct train_tokenizer_options {
	int vocab_size, format;
	const char *out, *pattern, *text_field;
	struct strings special;
	bool skip_bad_lines, json;
};

static void print_trained(const json_t *report)
{
	printf("%s: %lld tokens, %lld merges, from %lld bytes with %lld distinct words", result_text(report, "path"),
			(long long)result_integer(report, "vocab_size"), (long long)result_integer(report, "merges"),
			(long long)result_integer(report, "bytes"), (long long)result_integer(report, "words"));
	print_skipped(report);
}

static int run_train_tokenizer(const struct command_line *line)
{
	const struct train_tokenizer_options *o = line->options;
	const struct tokenizer_training how = {o->vocab_size, o->pattern, (const char **)o->special.text,
			(int)o->special.count, line->num_words, line->words, {o->format, o->text_field, o->skip_bad_lines}};
	struct tokenizer_trained t;
	if (tokenizer_train(o->out, &how, &t) < 0)
		return EXIT_WORK_FAILED;
	json_t *report = json_pack("{s:o, s:i, s:I, s:I, s:I, s:I}", "path", json_cstring(o->out),
			"vocab_size", t.vocab_size, "merges", (json_int_t)t.merges, "bytes", (json_int_t)t.bytes,
			"words", (json_int_t)t.words, "skipped_lines", (json_int_t)t.lines_skipped);
	result_print(report, o->json, print_trained);
	if (t.vocab_size < o->vocab_size && !o->json)
		printf("the text has no more pairs to merge\n");
	return EXIT_DONE;
}

static const struct command_option train_tokenizer_table[] = {
	WHOLE_OPTION(train_tokenizer_options, vocab_size, "vocab-size", "N", 1, 10000000,
			"Tokens, the 256 bytes and the special ones included", .required = true),
	TEXT_OPTION(train_tokenizer_options, out, "out", "FILE", "The tokenizer.json", .required = true),
	TEXT_OPTION(train_tokenizer_options, pattern, "pattern", "REGEX",
			"What cuts text into words, beyond which nothing is merged (default: Ling's)"),
	TEXT_INPUT_OPTIONS(train_tokenizer_options),
	TEXTS_OPTION(train_tokenizer_options, special, "special", "TOKEN",
			"A special token beside <|endoftext|>, <role> and </role>; may be given several times"),
};

const struct command train_tokenizer_command = {
	.name = "train-tokenizer", .usage = "--vocab-size N --out FILE.json FILE...",
	.min_words = 1, .max_words = ANY_NUMBER,
	.help = "Train a byte-level BPE on text files and JSON lines, and write it as a tokenizer.json, for ling and for "
		"Hugging Face's tools.",
	.run = run_train_tokenizer, COMMAND_OPTIONS(train_tokenizer_options, train_tokenizer_table),
};
