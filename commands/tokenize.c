/*
 * commands/tokenize.c - `ling tokenize`: token files from text, and text from token files.
 */
#define _GNU_SOURCE
#include "commands/tokenize.h"

#include "files/base.h"
#include "files/tokenizer.h"
#include "files/text.h"
#include "files/tokenizer_training.h"
#include "data.h"

#include <errno.h>
#include <jansson.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
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
	if (!rc && *tokens.tokenizer && tokens.tokenizer_hash != t->hash)
		rc = fail("%s: was made by tokenizer %s with hash %08x; %s has %08x", prefix, tokens.tokenizer, (unsigned)tokens.tokenizer_hash, name,
				(unsigned)t->hash);
	struct text text = {0};
	int32_t ids[4096];
	for (int64_t i = 0, n; !rc && i < tokens.count; i += n) {
		n = tokens.count - i < 4096 ? tokens.count - i : 4096;
		rc = tokens_read(&tokens, i, n, ids);
		text.size = 0;
		for (int64_t k = 0; !rc && k < n; k++)
			tokenizer_decode(t, ids[k], true, &text);
		if (!rc && fwrite(text.data, 1, text.size, out) != text.size)
			break; /* the caller sees that it failed */
	}
	free(text.data);
	tokenizer_close(t);
	tokens_close(&tokens);
	return rc;
}

struct token_writer {
	FILE *bin, *idx, *mask;
	const struct tokenizer *tokenizer;
	int dtype;                   /* of .bin: uint16 where the vocabulary fits, else int32 */
	int64_t bytes;               /* of text, see manifest.bytes */
	int64_t tokens, documents, sequences;
	int64_t length;              /* tokens of the sequence being written */
	int64_t *split;              /* sequences that the next one continues; few: one in SEQUENCE_MAX tokens */
	size_t num_split, split_room;
	int32_t largest_id, last_id;
	int64_t masked, loss_tokens;   /* bytes of .mask.bin; tokens that are learned */
	uint32_t crc, mask_crc;
};

/* Appends to the loss mask. As long as all is learned it stays empty: what is left out of it is filled in when the first token comes that
 * is not. */
static void put_mask(struct token_writer *w, const char *loss_mask, size_t n)
{
	char ones[4096];
	memset(ones, 1, sizeof ones);
	while (w->masked < w->tokens) {
		const int64_t missing = w->tokens - w->masked, piece = missing < (int64_t)sizeof ones ? missing : (int64_t)sizeof ones;
		w->mask_crc = crc32_z(w->mask_crc, (const uint8_t *)ones, piece);
		fwrite(ones, 1, piece, w->mask);
		w->masked += piece;
	}
	w->mask_crc = crc32_z(w->mask_crc, (const uint8_t *)loss_mask, n);
	fwrite(loss_mask, 1, n, w->mask);
	w->masked += n;
}

static void end_sequence(struct token_writer *w)
{
	int32_t length = w->length;
	fwrite(&length, sizeof length, 1, w->idx);
	w->sequences++, w->length = 0;
}

/* Adds some ids of the current document. loss_mask [n], or NULL: all. */
static void put_ids(struct token_writer *w, const int32_t *id, const char *loss_mask, size_t n)
{
	uint16_t narrow[8192];
	const int width = token_types[w->dtype].size;
	for (size_t at = 0, piece; at < n; at += piece) {
		if (w->length == SEQUENCE_MAX) {
			w->split = grow(w->split, w->num_split, &w->split_room, 1, sizeof *w->split);
			w->split[w->num_split++] = w->sequences;
			end_sequence(w);
		}
		const size_t room = SEQUENCE_MAX - w->length;
		piece = n - at < 8192 ? n - at : 8192;
		piece = piece < room ? piece : room;
		for (size_t i = 0; i < piece; i++) {
			narrow[i] = id[at + i];
			w->largest_id = id[at + i] > w->largest_id ? id[at + i] : w->largest_id;
			w->last_id = id[at + i];
			w->loss_tokens += loss_mask ? loss_mask[at + i] : 1;
		}
		const void *out = w->dtype == UINT16 ? (const void *)narrow : id + at;
		w->crc = crc32_z(w->crc, out, piece * width);
		fwrite(out, width, piece, w->bin);
		if (loss_mask)
			put_mask(w, loss_mask + at, piece);
		w->tokens += piece, w->length += piece;
	}
}

/* Ends the current document; an empty one leaves no trace. */
static void end_document(struct token_writer *w)
{
	if (!w->length)
		return;
	end_sequence(w);
	w->documents++;
}

/* Whether writing failed, so that reading on is pointless; file_close has the words. */
static bool writer_failed(const struct token_writer *w)
{
	return ferror(w->bin) || ferror(w->idx) || ferror(w->mask);
}

static int put_encoded(struct token_writer *w, const struct encoded *r, bool whole_documents)
{
	if (r->error)
		return fail("%s", r->error);
	for (size_t i = 0; i < r->count; i++) {
		const struct document *d = &r->documents[i];
		put_ids(w, d->ids.id, d->loss_mask.size ? d->loss_mask.data : NULL, d->ids.count);
		w->bytes += d->bytes;
		if (whole_documents)
			end_document(w);
	}
	return 0;
}

/* Writes what became of a block of text; *done: how far its file is dealt with. A block began where a border was likely, and counts only when the one
 * before, which knew what follows it, came to a border there. Where it did not, or could not be encoded to its end, the block is encoded again
 * from where that one ended, if need be with all that is known of the file. So the ids are those of the text as one piece. */
static int put_text(struct token_writer *w, struct encoder *e, const struct input *in, const struct block *b, bool special, struct encoded *r,
		size_t *done)
{
	if (b->first)
		*done = b->begin;
	for (int attempt = *done == b->begin ? 0 : 1; attempt < 3 && *done < b->end; attempt++) {
		if (attempt > 0) {
			encoded_free(r);
			encode_text(e, in, b, *done, attempt == 1 ? b->end : SIZE_MAX, attempt == 1 ? known_behind(b) : b->known, special, r);
		}
		if (put_encoded(w, r, false) < 0)
			return -1;
		*done = r->done;
	}
	if (b->whole && *done == b->known) {
		if (w->length && w->last_id != w->tokenizer->end)
			put_ids(w, &w->tokenizer->end, NULL, 1);
		end_document(w);
	}
	return 0;
}

/* Threads encode the blocks of a round, then they are written in order. Returns how much of in->data is dealt with, or -1. */
static int64_t put_round(struct token_writer *w, struct encoders *encoders, const struct input *in, bool special)
{
	const int64_t n = in->count;
	struct encoded *results = allocate(n * sizeof *results);
	#pragma omp parallel for schedule(dynamic)
	for (int64_t i = 0; i < n; i++) {
		const struct block *b = &in->blocks[i];
		struct encoder *e = encoder_take(encoders);
		if (b->line)
			encode_lines(e, in, b, special, &results[i]);
		else if (b->first || w->tokenizer->cuttable)
			encode_text(e, in, b, b->begin, b->end, known_behind(b), special, &results[i]);
		encoder_give(encoders, e);
	}
	struct encoder *e = encoder_take(encoders);
	size_t done = 0;
	int rc = 0;
	bool stuck = false; /* more of the last file must be known before its text can be cut */
	for (int64_t i = 0; i < n; i++) {
		const struct block *b = &in->blocks[i];
		if (!rc && !stuck)
			rc = b->line ? put_encoded(w, &results[i], true) : put_text(w, e, in, b, special, &results[i], &done);
		stuck = !b->line && done < b->end;
		encoded_free(&results[i]);
	}
	encoder_give(encoders, e);
	free(results);
	const struct block *last = &in->blocks[n - 1];
	return rc < 0 ? -1 : last->line || last->whole ? (int64_t)in->begin : (int64_t)done;
}

/* Completes the index: behind the lengths, which are in the file already, positions and documents; then the header. */
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
	size_t split = 0;
	for (int64_t i = 0; i <= w->sequences; i++) { /* entry i: a document begins, or the last one ends, at sequence i */
		if (split < w->num_split && w->split[split] == i - 1)
			split++;
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
static int tokenize_all(struct token_writer *w, const char *prefix, const char *idx_path, bool special, struct input *in)
{
	uint8_t header[IDX_HEADER] = {0}; /* the true one comes last */
	fwrite(header, IDX_HEADER, 1, w->idx);
	struct encoders encoders = {.tokenizer = w->tokenizer};
	int64_t done = 0, blocks = 0;
	while (done >= 0 && !writer_failed(w) && (blocks = input_read(in, done)) > 0)
		done = put_round(w, &encoders, in, special);
	encoders_close(&encoders);
	progress_end(&in->progress);
	int rc = done < 0 || blocks < 0 ? -1 : 0;
	if (!rc && !writer_failed(w) && !w->documents)
		rc = fail("%s: nothing to write: no text in %d input file%s", prefix, in->num_files, in->num_files == 1 ? "" : "s");
	if (!rc && w->loss_tokens < w->tokens)
		put_mask(w, "", 0);
	return rc < 0 ? -1 : index_finish(w, idx_path);
}

/* A token file's files, in the order in which they are published: the index comes last, without which nothing opens. */
enum { OUTPUT_BIN, OUTPUT_MASK, OUTPUT_MANIFEST, OUTPUT_IDX, NUM_OUTPUTS };
static const char *const output_suffixes[NUM_OUTPUTS] = {".bin", ".mask.bin", ".json", ".idx"};

/* Fails when the manifest would replace what is none, such as a tokenizer of the same name. */
static int output_check(const char *path)
{
	const int there = path_exists(path);
	if (there <= 0)
		return there;
	json_t *root = json_read(path);
	const int rc = root ? manifest_check_format(path, root) : -1;
	json_decref(root);
	return rc;
}

/* Writes the files; `name` is what the manifest calls the tokenizer. A mask that masks nothing is left out. */
static int tokenize_to(struct token_writer *w, const char *prefix, const char *name, struct new_file file[NUM_OUTPUTS], bool special, struct input *in)
{
	static const int stamped[NUM_STAMPS] = {[STAMP_BIN] = OUTPUT_BIN, [STAMP_IDX] = OUTPUT_IDX, [STAMP_MASK] = OUTPUT_MASK};
	struct manifest made = {0}, *m = &made;
	w->bin = file[OUTPUT_BIN].stream, w->idx = file[OUTPUT_IDX].stream, w->mask = file[OUTPUT_MASK].stream;
	int rc = tokenize_all(w, prefix, file[OUTPUT_IDX].temporary, special, in);
	for (int i = 0; i < NUM_STAMPS; i++)
		rc = new_file_close(&file[stamped[i]], rc);
	if (!w->masked)
		new_file_abandon(&file[OUTPUT_MASK]);
	for (int i = 0; i < NUM_STAMPS && rc == 0; i++)
		rc = stamp_file(&m->stamps[i], file[stamped[i]].temporary);
	snprintf(m->tokenizer, sizeof m->tokenizer, "%s", name);
	m->tokenizer_hash = tokenizer_hash(w->tokenizer), m->vocab_size = tokenizer_size(w->tokenizer), m->bytes = w->bytes;
	m->dtype = w->dtype, m->tokens = w->tokens, m->documents = w->documents, m->largest_id = w->largest_id, m->loss_tokens = w->loss_tokens;
	m->crc32 = w->crc, m->mask_crc32 = w->mask_crc;
	json_t *json = rc == 0 ? manifest_to_json(m) : NULL;
	if (json)
		json_print(file[OUTPUT_MANIFEST].stream, json);
	json_decref(json);
	return rc;
}

int tokenize_files(const char *prefix, const char *tokenizer, bool special, int num_files, char **files, struct tokenized *result)
{
	char outputs[NUM_OUTPUTS][PATH_LEN], dir[PATH_LEN];
	const char *name = file_name(prefix);
	if (!*name || !strcmp(name, ".") || !strcmp(name, ".."))
		return fail("the output `%s` has no name in it; expected a prefix such as data/train, from which data/train.bin, "
				".idx and .json are made", prefix);
	for (int k = 0; k < NUM_OUTPUTS; k++)
		if (path_suffix(outputs[k], prefix, output_suffixes[k]) < 0)
			return -1;
	int64_t total = 0;
	parent_of(dir, prefix);
	struct tokenizer *t = tokenizer_open(tokenizer);
	if (!t)
		return -1;
	if (tokenizer_end(t) < 0 || inputs_check(num_files, files, outputs, NUM_OUTPUTS, &total) < 0 || output_check(outputs[OUTPUT_MANIFEST]) < 0 ||
			make_directories(dir) < 0) {
		if (tokenizer_end(t) < 0)
			set_error("%s: has no token that ends a document; expected <|endoftext|>, or the `eos_token` of a tokenizer_config.json beside it",
					tokenizer);
		tokenizer_close(t);
		return -1;
	}

	struct token_writer w = {.tokenizer = t, .dtype = tokenizer_size(t) <= UINT16_MAX + 1 ? UINT16 : INT32};
	struct input in = {.files = files, .num_files = num_files, .fd = -1, .progress = progress_start("tokenize", total, 1e-6, "MB")};
	struct new_file file[NUM_OUTPUTS] = {0};
	int rc = 0;
	for (int k = 0; k < NUM_OUTPUTS && rc == 0; k++)
		rc = new_file_begin(&file[k], outputs[k]);
	if (rc == 0)
		rc = tokenize_to(&w, prefix, tokenizer, file, special, &in);
	rc = new_files_publish(file, NUM_OUTPUTS, rc);
	*result = (struct tokenized){w.documents, w.tokens, w.bytes, w.loss_tokens};
	input_close(&in);
	tokenizer_close(t);
	free(w.split);
	return rc;
}

struct tokenize_options {
	const char *tokenizer, *out, *decode;
	bool special_as_text;
};

static int run_tokenize(const struct command_line *line)
{
	const struct tokenize_options *o = line->options;
	struct tokenized t;
	int rc = 0;
	if (o->decode)
		rc = o->out || line->num_words || o->special_as_text ? fail("--decode goes with --tokenizer alone") : 0;
	else if (!o->out)
		rc = fail("--out is required");
	else if (!line->num_words)
		rc = fail("too few arguments");
	if (rc < 0)
		return EXIT_WRONG_USE;
	if (o->decode)
		return tokens_print(o->decode, o->tokenizer, stdout) < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
	if (tokenize_files(o->out, o->tokenizer ? o->tokenizer : "byte", !o->special_as_text, line->num_words,
			line->words, &t) < 0)
		return EXIT_WORK_FAILED;
	printf("%s: %lld documents, %lld tokens, %lld bytes", o->out, (long long)t.documents, (long long)t.tokens,
			(long long)t.bytes);
	if (t.loss_tokens < t.tokens)
		printf(", %lld tokens learned", (long long)t.loss_tokens);
	printf("\n");
	return EXIT_DONE;
}

static const struct command_option tokenize_table[] = {
	TEXT_OPTION(tokenize_options, tokenizer, "tokenizer", "NAME",
			"byte (the default): a byte is a token, 256 ends a document; or a tokenizer.json of byte-level BPE, or a "
			"directory with one"),
	TEXT_OPTION(tokenize_options, out, "out", "PREFIX", "Write PREFIX.bin, PREFIX.idx and PREFIX.json (required)"),
	FLAG_OPTION(tokenize_options, special_as_text, "special-as-text",
			"What looks like a special token in a text is text, and not that token"),
	TEXT_OPTION(tokenize_options, decode, "decode", "PREFIX",
			"Print the text of a token file instead, special tokens included"),
};

const struct command tokenize_command = {
	.name = "tokenize", .usage = "--out PREFIX FILE...\n--decode PREFIX", .max_words = ANY_NUMBER,
	.help = "Make a token file from text files and JSON lines (.jsonl: each line has a `text`, the `messages` of a "
		"conversation, or a `prompt` and its `completion`; of the latter two only the assistant's replies are learned).",
	.run = run_tokenize, COMMAND_OPTIONS(tokenize_options, tokenize_table),
};

struct train_tokenizer_options {
	int vocab_size;
	const char *out, *pattern;
	struct strings special;
};

static int run_train_tokenizer(const struct command_line *line)
{
	const struct train_tokenizer_options *o = line->options;
	const struct tokenizer_training how = {o->vocab_size, o->pattern, (const char **)o->special.text,
			(int)o->special.count, line->num_words, line->words};
	struct tokenizer_trained t;
	if (tokenizer_train(o->out, &how, &t) < 0)
		return EXIT_WORK_FAILED;
	printf("%s: %d tokens, %lld merges, from %lld bytes with %lld distinct words\n", o->out, t.vocab_size,
			(long long)t.merges, (long long)t.bytes, (long long)t.words);
	if (t.vocab_size < o->vocab_size)
		printf("the text has no more pairs to merge\n");
	return EXIT_DONE;
}

static const struct command_option train_tokenizer_table[] = {
	WHOLE_OPTION(train_tokenizer_options, vocab_size, "vocab-size", "N", 1, 10000000,
			"Tokens, the 256 bytes and the special ones included", .required = true),
	TEXT_OPTION(train_tokenizer_options, out, "out", "FILE", "The tokenizer.json", .required = true),
	TEXT_OPTION(train_tokenizer_options, pattern, "pattern", "REGEX",
			"What cuts text into words, beyond which nothing is merged (default: Ling's)"),
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
