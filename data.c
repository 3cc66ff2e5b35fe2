/*
 * data.c - what a run reads and leaves behind: token files, windows of them, loss masks; metrics, samples.
 *
 * The formats of token files:
 *   Megatron's indexed dataset, which `ling tokenize` writes:
 *     PREFIX.bin   the ids, one after the other
 *     PREFIX.idx   magic, version u64, dtype u8, sequences u64, document entries u64; then arrays: each sequence's
 *                  length in tokens (i32), its byte position in .bin (i64), the sequence that each document begins
 *                  with, and the number of sequences as a last entry (i64), and perhaps a mode of each sequence (i8)
 *   llm.c's .bin:  256 i32 (magic, version, number of ids, zeros), then the ids
 *   bare ids, as nanoGPT has them; the config must name their type
 * Beside each of them may be, PREFIX being the path without .bin:
 *   PREFIX.mask.bin   a byte for each id, what the target is where this id comes next: 0 nothing, the loss does not
 *                     count; 1 this id; 2 the end token, which the manifest names, and not this id
 *   PREFIX.json       the manifest: what is known of these files
 *
 * Opening a file must not take longer the larger it is. So what needs a pass over all of it (checksums, the largest
 * id, whether the index is sound) is kept in the manifest, and is valid as long as the files have the sizes and times
 * of modification that the manifest names. Without a valid manifest the pass is made, and a manifest is written if the
 * folder can be written to. One that `ling tokenize` wrote also says what the file must be (the checksum of the ids,
 * for example): if the file has changed since, it must still be that, or it is refused. Only packing documents into
 * windows reads the whole index each time.
 */
#define _GNU_SOURCE
#include "data.h"

#include "files/base.h"
#include "files/config.h"
#include "files/tokenizer.h"
#include "kernels.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#define LLM_C_HEADER 1024
#define MANIFEST_FORMAT "ling-tokens"

#ifndef SCAN_BLOCK
#define SCAN_BLOCK (1 << 22)     /* tokens that a thread looks through at a time */
#endif

const struct token_type token_types[] = {
#define ROW(code, name, type) [code] = {name, sizeof(type)},
	TOKEN_TYPES(ROW)
#undef ROW
	[6] = {"float64", 0}, [7] = {"float32", 0},
};
#define NUM_TOKEN_TYPES ((int)(sizeof token_types / sizeof *token_types))
#define MEGATRON_TYPES 9         /* codes less than this are Megatron's */

/* llm.c's headers: those of GPT-2's vocabulary and of Llama 3's. */
static const struct { int32_t magic, version; int dtype; } llm_c_headers[] = {
	{20240520, 1, UINT16}, {20240801, 7, UINT32}};

static int64_t token_width(const struct tokens *t)
{
	return token_types[t->dtype].size;
}

static const char *const token_file_names[NUM_TOKEN_FILES] = {"bin", "idx", "mask"};
static const char *const token_file_suffixes[NUM_TOKEN_FILES] = {".bin", ".idx", ".mask.bin"};

/* ============================================================================================================
 * The manifest
 * ========================================================================================================== */

static json_t *file_state_to_json(const struct file_state *s)
{
	return s->size < 0 ? json_null() : json_pack("{s:I, s:o}", "size", (json_int_t)s->size, "modified",
			json_sprintf("%lld.%09ld", (long long)s->modified.tv_sec, s->modified.tv_nsec));
}

json_t *manifest_to_json(const struct manifest *m)
{
	json_t *root = json_pack("{s:s}", "format", MANIFEST_FORMAT), *files = json_object();
	if (*m->tokenizer)
		json_object_update_new(root, json_pack("{s:o, s:o, s:I, s:I}", "tokenizer", json_cstring(m->tokenizer),
				"tokenizer_hash", crc_to_json(m->tokenizer_hash), "vocab_size", (json_int_t)m->vocab_size,
				"bytes", (json_int_t)m->bytes));
	if (*m->text_field)
		json_object_update_new(root, json_pack("{s:o, s:I}", "text_field", json_cstring(m->text_field),
				"skipped_lines", (json_int_t)m->lines_skipped));
	if (m->end_token >= 0)
		json_object_set_new(root, "end_token", json_integer(m->end_token));
	json_object_update_new(root, json_pack("{s:s, s:I, s:I, s:I, s:I, s:o, s:o}", "dtype", token_types[m->dtype].name,
			"documents", (json_int_t)m->documents, "tokens", (json_int_t)m->tokens,
			"largest_id", (json_int_t)m->largest_id, "learned", (json_int_t)m->loss_tokens,
			"crc32", crc_to_json(m->crc32), "mask_crc32", crc_to_json(m->mask_crc32)));
	for (int i = 0; i < NUM_TOKEN_FILES; i++)
		json_object_set_new(files, token_file_names[i], file_state_to_json(&m->files[i]));
	json_object_set_new(root, "files", files);
	return root;
}

/* What cannot be read, such as an older manifest's, becomes size -2, which no file has. */
static struct file_state file_state_from_json(const json_t *v)
{
	struct file_state s = {-2, {0, 0}};
	const char *text = json_string_value(json_object_get(v, "modified"));
	long long seconds;
	long nanoseconds;
	if (json_is_null(v))
		s.size = -1;
	else if (text && sscanf(text, "%lld.%9ld", &seconds, &nanoseconds) == 2 &&
			json_is_integer(json_object_get(v, "size")))
		s = (struct file_state){json_integer_value(json_object_get(v, "size")), {seconds, nanoseconds}};
	return s;
}

static bool same_file_states(const struct file_state *a, const struct file_state *b)
{
	for (int i = 0; i < NUM_TOKEN_FILES; i++)
		if (a[i].size != b[i].size || (a[i].size >= 0 &&
				(a[i].modified.tv_sec != b[i].modified.tv_sec || a[i].modified.tv_nsec != b[i].modified.tv_nsec)))
			return false;
	return true;
}

/* The code of an integer type by its name, or 0. */
static int token_type_code(const char *name)
{
	for (int i = 0; i < NUM_TOKEN_TYPES; i++)
		if (token_types[i].size && !strcmp(name, token_types[i].name))
			return i;
	return 0;
}

json_t *manifest_read_json(const char *path)
{
	json_t *root = json_read(path);
	const char *format = root ? field_text(root, path, "format") : NULL;
	if (format && !strcmp(format, MANIFEST_FORMAT))
		return root;
	if (format)
		fail("%s: `format` is \"%.40s\"; expected \"%s\"", path, format, MANIFEST_FORMAT);
	json_decref(root);
	char what[sizeof error_text];
	snprintf(what, sizeof what, "%s", error_text);
	fail("%.3000s; if it is not a token file's manifest, move it away", what);
	return NULL;
}

/* What an older version of the manifest does not have becomes -1, or the state of no file. */
static int manifest_parse(struct manifest *m, const char *path, const json_t *root)
{
	*m = (struct manifest){.largest_id = -1, .loss_tokens = -1, .end_token = -1};
	const json_t *files = json_object_get(root, "files");
	if (json_object_get(root, "tokenizer")) {
		const char *tokenizer = field_text(root, path, "tokenizer");
		if (!tokenizer || field_int(root, path, "vocab_size", 1, INT32_MAX, &m->vocab_size) < 0 ||
				field_int(root, path, "bytes", 0, INT64_MAX, &m->bytes) < 0 ||
				field_crc(root, path, "tokenizer_hash", &m->tokenizer_hash) < 0)
			return -1;
		if (!*tokenizer || snprintf(m->tokenizer, sizeof m->tokenizer, "%s", tokenizer) >= (int)sizeof m->tokenizer)
			return fail("%s: `tokenizer` is %s", path, *tokenizer ? "too long" : "empty");
	} else if (!files)
		return fail("%s: `tokenizer` is missing; expected a string", path);
	if (json_object_get(root, "text_field")) {
		const char *field = field_text(root, path, "text_field");
		if (!field || field_int(root, path, "skipped_lines", 0, INT64_MAX, &m->lines_skipped) < 0)
			return -1;
		snprintf(m->text_field, sizeof m->text_field, "%s", field);
	}
	if (json_object_get(root, "end_token") && field_int(root, path, "end_token", 0, INT32_MAX, &m->end_token) < 0)
		return -1;
	const char *dtype = field_text(root, path, "dtype");
	if (!dtype || field_int(root, path, "tokens", 0, INT64_MAX, &m->tokens) < 0 ||
			field_int(root, path, "documents", -1, INT64_MAX, &m->documents) < 0 ||
			field_crc(root, path, "crc32", &m->crc32) < 0)
		return -1;
	if (!(m->dtype = token_type_code(dtype)))
		return fail("%s: `dtype` is \"%.40s\"; expected an integer type", path, dtype);
	if (files && (field_int(root, path, "largest_id", 0, INT64_MAX, &m->largest_id) < 0 ||
			field_int(root, path, "learned", 0, m->tokens, &m->loss_tokens) < 0 ||
			field_crc(root, path, "mask_crc32", &m->mask_crc32) < 0))
		return -1;
	for (int i = 0; i < NUM_TOKEN_FILES; i++)
		m->files[i] = file_state_from_json(json_object_get(files, token_file_names[i]));
	return 0;
}

/* Reads a manifest. Returns 1 when there is one, 0 when not, -1 on error. */
static int manifest_read(struct manifest *m, const char *path)
{
	int there = path_exists(path);
	if (there <= 0)
		return there;
	json_t *root = manifest_read_json(path);
	int rc = root ? manifest_parse(m, path, root) : -1;
	json_decref(root);
	return rc < 0 ? -1 : 1;
}

/* Compares what a manifest of `ling tokenize` says with what the files are. bin: the path of the ids. */
static int manifest_check(const struct manifest *claimed, const struct manifest *actual, const char *path,
		const char *bin)
{
	if (claimed->dtype != actual->dtype)
		return fail("%s: `dtype` is \"%s\"; the file's is %s", path, token_types[claimed->dtype].name,
				token_types[actual->dtype].name);
	if (claimed->tokens != actual->tokens)
		return fail("%s: `tokens` is %lld; the files hold %lld", path, (long long)claimed->tokens,
				(long long)actual->tokens);
	if (claimed->documents != actual->documents)
		return fail("%s: `documents` is %lld; the files hold %lld", path, (long long)claimed->documents,
				(long long)actual->documents);
	if (claimed->crc32 != actual->crc32)
		return fail("%s: `crc32` is %08x; that of %s is %08x: it is damaged, or the manifest is of another file", path,
				(unsigned)claimed->crc32, bin, (unsigned)actual->crc32);
	if (claimed->loss_tokens >= 0 && claimed->mask_crc32 != actual->mask_crc32)
		return fail("%s: `mask_crc32` is %08x; the loss mask beside %s has %08x: it is damaged, missing, or of "
				"another file", path, (unsigned)claimed->mask_crc32, bin, (unsigned)actual->mask_crc32);
	return 0;
}

/* Checks what is always true of a file made by the byte tokenizer, even if the manifest is valid. */
static int manifest_check_bytes(const struct manifest *m, const char *path)
{
	if (strcmp(m->tokenizer, BYTE_TOKENIZER))
		return 0;
	if (m->bytes != m->tokens - m->documents) /* a token for each byte, and one that ends each document */
		return fail("%s: `bytes` is %lld; the files hold %lld", path, (long long)m->bytes,
				(long long)(m->tokens - m->documents));
	if (m->vocab_size != BYTE_VOCAB)
		return fail("%s: `vocab_size` is %lld; the byte tokenizer has %d", path, (long long)m->vocab_size, BYTE_VOCAB);
	if (m->tokenizer_hash != byte_tokenizer_hash())
		return fail("%s: `tokenizer_hash` is %08x; this program's byte tokenizer is %08x: make the token file again",
				path, (unsigned)m->tokenizer_hash, (unsigned)byte_tokenizer_hash());
	return 0;
}

/* ============================================================================================================
 * Packed documents: the table of a file
 * ========================================================================================================== */

/* A document, or a part of one that is longer than a window: `length` inputs from token `begin` on. The targets are
 * the same shifted by one. */
struct piece { int64_t begin; int32_t length; };

struct packed {
	int64_t num_pieces, num_windows;
	struct piece *piece;         /* [num_pieces] the longest first, those of the same length in the file's order */
	int64_t *longer;             /* [L + 1] how many are longer than l: piece[longer[l]] is the first of length l */
	int64_t *first;              /* [num_windows + 1] window w has the places first[w] .. first[w + 1] - 1 */
	int64_t *place;              /* [num_pieces] which piece is in each place */
};

static void packing_free(struct packed *p)
{
	if (!p)
		return;
	free(p->piece);
	free(p->longer);
	free(p->first);
	free(p->place);
	free(p);
}

/* ============================================================================================================
 * Opening
 * ========================================================================================================== */

/* Where the arrays of a checked index begin. The header is not read again: the file may have changed since. */
struct index { uint64_t sequences, entries; const uint8_t *lengths, *pointers, *documents; };

static struct index index_of(const struct tokens *t)
{
	struct index x = {.sequences = t->sequences, .entries = t->documents + 1, .lengths = t->idx.data + IDX_HEADER};
	x.pointers = x.lengths + 4 * x.sequences;
	x.documents = x.pointers + 8 * x.sequences;
	return x;
}

/* Checks the header of an index, after which its arrays are known to lie within the file. Sets dtype, count and
 * documents. */
static int index_header(struct tokens *t, const char *path)
{
	const uint8_t *idx = t->idx.data;
	const size_t size = t->idx.size;
	if (size < IDX_HEADER || memcmp(idx, IDX_MAGIC, 9))
		return fail("%s: not a Megatron index: expected it to begin with MMIDIDX and a header of %d bytes", path,
				IDX_HEADER);
	if (load_i64(idx + 9) != 1)
		return fail("%s: version %lld; expected 1", path, (long long)load_i64(idx + 9));
	t->dtype = idx[17];
	if (t->dtype >= MEGATRON_TYPES || !token_types[t->dtype].name)
		return fail("%s: unknown dtype code %d; expected 1 to 5 or 8", path, t->dtype);
	if (!token_types[t->dtype].size)
		return fail("%s: dtype %s; expected an integer type", path, token_types[t->dtype].name);
	uint64_t n = load_i64(idx + 18), entries = load_i64(idx + 26), room = size - IDX_HEADER;
	if (n > room / 12 || entries > (room - 12 * n) / 8)
		return fail("%s: %llu sequences and %llu document entries do not fit in its %zu bytes; the file is truncated",
				path, (unsigned long long)n, (unsigned long long)entries, size);
	uint64_t rest = room - 12 * n - 8 * entries;
	if (rest && rest != n) /* n bytes: the modes */
		return fail("%s: %llu bytes after the document index; expected none", path, (unsigned long long)rest);
	if (!entries)
		return fail("%s: no document index; expected it to begin with 0", path);
	t->sequences = n, t->documents = entries - 1;
	t->count = t->bin.size / token_width(t);
	return 0;
}

/* Checks every entry of an index against the size of its .bin. */
static int index_check(const struct tokens *t, const char *path)
{
	const struct index x = index_of(t);
	const int64_t width = token_width(t), bin_bytes = t->bin.size;
	int64_t at = 0;
	for (uint64_t i = 0; i < x.sequences; i++) {
		int64_t length = load_i32(x.lengths + 4 * i), pointer = load_i64(x.pointers + 8 * i);
		if (length < 0)
			return fail("%s: sequence %llu: length %lld; expected at least 0", path, (unsigned long long)i,
					(long long)length);
		if (pointer != at)
			return fail("%s: sequence %llu: begins at byte %lld; expected %lld, where the one before ends", path,
					(unsigned long long)i, (long long)pointer, (long long)at);
		if (length > (bin_bytes - at) / width)
			return fail("%s: sequence %llu: %lld tokens at byte %lld reach beyond the .bin file's %lld bytes", path,
					(unsigned long long)i, (long long)length, (long long)at, (long long)bin_bytes);
		at += length * width;
	}
	if (at != bin_bytes)
		return fail("%s: the sequences have %lld bytes but the .bin file has %lld", path, (long long)at,
				(long long)bin_bytes);
	for (uint64_t i = 0, before = 0; i < x.entries; i++) {
		uint64_t d = load_i64(x.documents + 8 * i);
		if (d < before || d > x.sequences || (i == 0 && d) || (i == x.entries - 1 && d != x.sequences))
			return fail("%s: document entry %llu is %lld; expected entries to rise from 0 to %llu, the number of "
					"sequences", path, (unsigned long long)i, (long long)d, (unsigned long long)x.sequences);
		before = d;
	}
	return 0;
}

/* Checks llm.c's header; sets dtype and count. */
static int llm_c_header(struct tokens *t)
{
	const size_t size = t->bin.size;
	const int32_t magic = size < LLM_C_HEADER ? 0 : load_i32(t->bin.data);
	for (size_t i = 0; i < sizeof llm_c_headers / sizeof *llm_c_headers; i++) {
		if (magic != llm_c_headers[i].magic)
			continue;
		const int32_t version = load_i32(t->bin.data + 4), count = load_i32(t->bin.data + 8);
		if (version != llm_c_headers[i].version)
			return fail("%s: an llm.c file of version %d; expected %d with the magic number %d", t->path, version,
					llm_c_headers[i].version, magic);
		t->dtype = llm_c_headers[i].dtype;
		if (count < 0 || (uint64_t)count * token_width(t) != size - LLM_C_HEADER)
			return fail("%s: the header tells of %d ids of %d bytes; %zu bytes follow it: the file is damaged",
					t->path, count, (int)token_width(t), size - LLM_C_HEADER);
		t->ids = t->bin.data + LLM_C_HEADER;
		t->count = count;
		return 0;
	}
	return fail("%s: found neither an index (.idx) beside it nor the header of an llm.c file; a file of bare ids must "
			"be given with its type: {path: ..., dtype: uint16}", t->path);
}

int file_state_read(struct file_state *s, const char *path)
{
	struct stat st;
	if (stat(path, &st) < 0) {
		*s = (struct file_state){-1, {0, 0}};
		return errno == ENOENT ? 0 : fail("%s: cannot stat: %s", path, strerror(errno));
	}
	*s = (struct file_state){st.st_size, st.st_mtim};
	return 0;
}

int token_file_states(struct file_state states[NUM_TOKEN_FILES], const char *path, const char *prefix,
		enum token_format format)
{
	char name[PATH_LEN];
	for (int i = 0; i < NUM_TOKEN_FILES; i++) {
		if (i == TOKEN_FILE_IDX && format != MEGATRON)
			states[i] = (struct file_state){-1, {0, 0}};
		else if (path_suffix(name, prefix, token_file_suffixes[i]) < 0 ||
				file_state_read(&states[i], i == TOKEN_FILE_BIN ? path : name) < 0)
			return -1;
	}
	return 0;
}

/* Finds out which format `path` is of, maps its files and checks their headers. Sets prefix, and the states of the
 * files before they were mapped. */
static int tokens_map(struct tokens *t, const char *path, const char *dtype, char prefix[PATH_LEN],
		struct file_state states[NUM_TOKEN_FILES])
{
	char name[PATH_LEN];
	const size_t n = strlen(path);
	struct stat st;
	if (path_copy(t->path, path) < 0 || path_copy(prefix, path) < 0)
		return -1;
	if (has_suffix(path, ".bin"))
		prefix[n - 4] = 0;
	if (path_suffix(name, prefix, ".idx") < 0)
		return -1;
	const bool bare = strcmp(dtype, "none"), there = stat(path, &st) == 0 && !S_ISDIR(st.st_mode);
	t->format = bare ? BARE_IDS : there && access(name, F_OK) < 0 ? LLM_C : MEGATRON;
	if ((t->format == MEGATRON && path_suffix(t->path, prefix, ".bin") < 0) ||
			token_file_states(states, t->path, prefix, t->format) < 0 ||
			map_file(t->path, &t->bin.data, &t->bin.size) < 0)
		return -1;
	t->ids = t->bin.data;
	t->documents = t->document_token = -1;
	if (t->format == MEGATRON && (map_file(name, &t->idx.data, &t->idx.size) < 0 || index_header(t, name) < 0))
		return -1;
	if (t->format == LLM_C && llm_c_header(t) < 0)
		return -1;
	if (t->format == BARE_IDS) {
		if (!(t->dtype = token_type_code(dtype)))
			return fail("%s: dtype `%s` is not known; expected an integer type such as uint16", path, dtype);
		if (t->bin.size % token_width(t))
			return fail("%s: its %zu bytes are no whole number of %s ids", path, t->bin.size, dtype);
		t->count = t->bin.size / token_width(t);
	}
	if (path_suffix(name, prefix, token_file_suffixes[TOKEN_FILE_MASK]) < 0)
		return -1;
	if (states[TOKEN_FILE_MASK].size >= 0) {
		if (map_file(name, &t->mask.data, &t->mask.size) < 0)
			return -1;
		if ((int64_t)t->mask.size != t->count)
			return fail("%s: %zu bytes; expected one for each of the %lld ids of %s", name, t->mask.size,
					(long long)t->count, t->path);
		t->loss_mask = t->mask.data;
	}
	return 0;
}

/* The largest of ids [i, end). A negative id counts as one above 2^63. */
static uint64_t largest_id(const struct tokens *t, int64_t i, int64_t end)
{
	uint64_t largest = 0;
	switch (t->dtype) {
#define LARGEST_ID(code, name, type) case code: \
		for (const type *id = (const type *)t->ids; i < end; i++) \
			largest = (uint64_t)(int64_t)id[i] > largest ? (uint64_t)(int64_t)id[i] : largest; \
		break;
	TOKEN_TYPES(LARGEST_ID)
#undef LARGEST_ID
	}
	return largest;
}

int64_t id_at(const struct tokens *t, int64_t i)
{
	switch (t->dtype) {
#define ID_AT(code, name, type) case code: return (int64_t)((const type *)t->ids)[i];
	TOKEN_TYPES(ID_AT)
#undef ID_AT
	}
	return -1;
}

/* Reports the first of ids [i, t->count) that is outside the vocabulary. */
static int fail_id(const struct tokens *t, int64_t i, int64_t limit, const char *whose)
{
	while (i < t->count - 1 && (uint64_t)id_at(t, i) < (uint64_t)limit)
		i++;
	return fail("%s: token %lld: id %lld is outside the vocabulary of %lld that %s has; expected 0 to %lld", t->path,
			(long long)i, (long long)id_at(t, i), (long long)limit, whose, (long long)limit - 1);
}

/* What a pass over a block of ids, or over all, finds. */
struct scanned { uint32_t crc32, mask_crc32; uint64_t largest; int64_t loss_tokens; };

static struct scanned scan_block(const struct tokens *t, int64_t begin, int64_t end)
{
	const int64_t cached = 1 << 14, width = token_width(t);
	struct scanned s = {0};
	/* in parts that stay in the processor's cache, for there are two to four passes over each */
	for (int64_t i = begin, next; i < end; i = next) {
		next = end - i < cached ? end : i + cached;
		const uint64_t largest = largest_id(t, i, next);
		s.largest = largest > s.largest ? largest : s.largest;
		s.crc32 = crc32_z(s.crc32, t->ids + i * width, (next - i) * width);
		if (t->loss_mask)
			s.mask_crc32 = crc32_z(s.mask_crc32, t->loss_mask + i, next - i);
		for (int64_t k = i; k < next; k++)
			s.loss_tokens += !t->loss_mask || t->loss_mask[k] != LOSS_NONE;
	}
	return s;
}

/* Goes once through the ids and the mask, with all cores. */
static struct scanned tokens_scan(const struct tokens *t)
{
	enum { ROUND = 64 };           /* blocks between two looks at the clock */
	struct scanned all = {0}, block[ROUND];
	struct progress p = progress_start("checking the tokens", t->count * token_width(t), 1e-6, "MB");
	for (int64_t first = 0; first < t->count; first += (int64_t)ROUND * SCAN_BLOCK) {
		const int64_t left = (t->count - first + SCAN_BLOCK - 1) / SCAN_BLOCK, n = left < ROUND ? left : ROUND;
		#pragma omp parallel for schedule(dynamic)
		for (int64_t i = 0; i < n; i++) {
			const int64_t begin = first + i * SCAN_BLOCK;
			block[i] = scan_block(t, begin, t->count - begin < SCAN_BLOCK ? t->count : begin + SCAN_BLOCK);
		}
		for (int64_t i = 0; i < n; i++) {
			const int64_t begin = first + i * SCAN_BLOCK;
			const int64_t ids = t->count - begin < SCAN_BLOCK ? t->count - begin : SCAN_BLOCK;
			all.crc32 = crc32_combine(all.crc32, block[i].crc32, ids * token_width(t));
			all.mask_crc32 = crc32_combine(all.mask_crc32, block[i].mask_crc32, ids);
			all.largest = block[i].largest > all.largest ? block[i].largest : all.largest;
			all.loss_tokens += block[i].loss_tokens;
			progress(&p, ids * token_width(t));
		}
	}
	progress_end(&p);
	return all;
}

/* Makes the pass over the files that a valid manifest saves: *found is what they are, less `files` and what only a
 * tokenizer knows. */
static int tokens_examine(const struct tokens *t, const char *prefix, struct manifest *found)
{
	char name[PATH_LEN];
	if (t->format == MEGATRON && (path_suffix(name, prefix, ".idx") < 0 || index_check(t, name) < 0))
		return -1;
	const struct scanned s = tokens_scan(t);
	found->dtype = t->dtype, found->tokens = t->count, found->documents = t->documents;
	found->crc32 = s.crc32, found->mask_crc32 = s.mask_crc32, found->loss_tokens = s.loss_tokens;
	found->largest_id = s.largest < INT64_MAX ? s.largest : INT64_MAX;
	for (int64_t i = 0; t->loss_mask && i < t->count; i++)
		if (t->loss_mask[i] > LOSS_END)
			return fail("%s.mask.bin: byte %lld is %d; expected 0, 1 or 2", prefix, (long long)i, t->loss_mask[i]);
		else if (t->loss_mask[i] == LOSS_END && found->end_token < 0)
			return fail("%s.mask.bin: byte %lld is 2, which makes the end token a target; expected its id as "
					"`end_token` in %s.json", prefix, (long long)i, prefix);
	return 0;
}

/* Writes a manifest for the next time. It is not an error if that fails, as in a folder that cannot be written to. */
static void manifest_save(const struct manifest *m, const char *path)
{
	char kept[sizeof error_text];
	json_t *json = manifest_to_json(m);
	memcpy(kept, error_text, sizeof kept);
	json_write(path, json);
	memcpy(error_text, kept, sizeof kept);
	json_decref(json);
}

/* tokens_open, without the clean-up on error. */
static int tokens_load(struct tokens *t, const char *path, const char *dtype, int vocab_size)
{
	char prefix[PATH_LEN], manifest_path[PATH_LEN];
	struct manifest m, found = {.end_token = -1};
	if (tokens_map(t, path, dtype, prefix, found.files) < 0 || path_suffix(manifest_path, prefix, ".json") < 0)
		return -1;
	const int there = manifest_read(&m, manifest_path);
	if (there < 0)
		return -1;
	const bool valid = there && same_file_states(m.files, found.files) && m.tokens == t->count &&
			m.documents == t->documents && m.dtype == t->dtype;
	if (!valid) {
		found.end_token = there ? m.end_token : -1;
		if (tokens_examine(t, prefix, &found) < 0)
			return -1;
		if (there && *m.tokenizer) {
			if (manifest_check(&m, &found, manifest_path, t->path) < 0)
				return -1;
			memcpy(found.tokenizer, m.tokenizer, sizeof found.tokenizer);
			found.tokenizer_hash = m.tokenizer_hash, found.vocab_size = m.vocab_size, found.bytes = m.bytes;
			memcpy(found.text_field, m.text_field, sizeof found.text_field);
			found.lines_skipped = m.lines_skipped;
		}
		m = found;
	}
	if (manifest_check_bytes(&m, manifest_path) < 0)
		return -1;
	const bool narrower = *m.tokenizer && m.vocab_size < vocab_size;
	const int64_t limit = narrower ? m.vocab_size : vocab_size;
	if (m.largest_id >= limit)
		return fail_id(t, 0, limit, narrower ? "its manifest" : "the model");
	if (t->loss_mask && m.end_token >= limit)
		return fail("%s: `end_token` is %lld, outside the vocabulary of %lld; expected the id that ends a reply",
				manifest_path, (long long)m.end_token, (long long)limit);
	if (!valid)
		manifest_save(&m, manifest_path);
	t->end_token = m.end_token;
	memcpy(t->tokenizer, m.tokenizer, sizeof t->tokenizer);
	t->tokenizer_hash = m.tokenizer_hash;
	t->vocab_size = vocab_size;
	t->crc32 = crc32_combine(m.crc32, m.mask_crc32, t->mask.size);
	return 0;
}

int tokens_open(struct tokens *t, const char *path, const char *dtype, int vocab_size)
{
	memset(t, 0, sizeof *t);
	if (tokens_load(t, path, dtype, vocab_size) == 0)
		return 0;
	tokens_close(t);
	return -1;
}

void tokens_close(struct tokens *t)
{
	unmap_file(t->bin.data, t->bin.size);
	unmap_file(t->idx.data, t->idx.size);
	unmap_file(t->mask.data, t->mask.size);
	packing_free(t->packing);
	memset(t, 0, sizeof *t);
}

/* ============================================================================================================
 * Reading
 * ========================================================================================================== */

int tokens_read(const struct tokens *t, int64_t start, int64_t n, int32_t *out)
{
	switch (t->dtype) {
#define READ(code, name, type) case code: \
		for (int64_t i = 0; i < n; i++) \
			out[i] = (int32_t)((const type *)t->ids)[start + i]; \
		break;
	TOKEN_TYPES(READ)
#undef READ
	}
	const bool inside = largest_id(t, start, start + n) < (uint64_t)t->vocab_size;
	return inside ? 0 : fail_id(t, start, t->vocab_size, "the model");
}

void tokens_mask(const struct tokens *t, int64_t start, int64_t n, int32_t *target)
{
	for (int64_t i = 0; t->loss_mask && i < n; i++)
		if (t->loss_mask[start + 1 + i] != LOSS_TOKEN)
			target[i] = t->loss_mask[start + 1 + i] == LOSS_END ? t->end_token : -1;
}

/* The number of the token that document i begins with, 0 <= i <= t->documents. Checks it again: the file may have
 * changed since it was opened. */
static int document_begin(const struct tokens *t, int64_t i, int64_t *begin)
{
	const struct index x = index_of(t);
	const uint64_t sequence = load_i64(x.documents + 8 * i);
	*begin = sequence < x.sequences ? load_i64(x.pointers + 8 * sequence) / token_width(t) : t->count;
	if (sequence > x.sequences || *begin < 0 || *begin > t->count)
		return fail("%s: its index was changed while it was in use: document %lld begins with sequence %llu", t->path,
				(long long)i, (unsigned long long)sequence);
	return 0;
}

/* tokens_documents with an index: a binary search for the document of the first token, then the documents that
 * follow. */
static int indexed_documents(const struct tokens *t, int64_t start, int64_t n, int32_t *document, int32_t *target)
{
	int64_t low = 0, high = t->documents, begin = 0, next;
	while (high - low > 1) { /* the document of token `start` is among low .. high - 1 */
		const int64_t middle = low + (high - low) / 2;
		if (document_begin(t, middle, &begin) < 0)
			return -1;
		if (begin <= start)
			low = middle;
		else
			high = middle;
	}
	if (document_begin(t, low + 1, &next) < 0)
		return -1;
	begin = 0;
	for (int64_t i = 0; i <= n; i++) {
		while (next <= start + i && low + 1 < t->documents) {
			begin = next - start;
			if (document_begin(t, ++low + 1, &next) < 0)
				return -1;
		}
		if (i > 0 && begin == i)
			target[i - 1] = -1;
		if (i < n)
			document[i] = begin > 0 ? begin : 0;
	}
	return 0;
}

int tokens_documents(const struct tokens *t, int64_t start, int64_t n, int32_t *document, int32_t *target)
{
	if (t->format == MEGATRON)
		return indexed_documents(t, start, n, document, target);
	int32_t begin = 0;
	for (int64_t i = 0; i < n; i++) {
		const bool separator = id_at(t, start + i) == t->document_token;
		if (t->format == LLM_C && separator)
			begin = i;
		document[i] = begin;
		if (t->format == BARE_IDS && separator) {
			begin = i + 1;
			target[i] = -1;
		}
	}
	return 0;
}

/* ============================================================================================================
 * Metrics: OUTPUT_DIR/metrics.jsonl, one strict JSON object a step, steps rising
 * ========================================================================================================== */

/* The real-valued members, in the order of the line. */
static const struct { const char *key; size_t offset; } metric_reals[] = {
	{"loss", offsetof(struct metrics, loss)},
	{"balance_loss", offsetof(struct metrics, balance_loss)},
	{"z_loss", offsetof(struct metrics, z_loss)},
	{"lr", offsetof(struct metrics, lr)},
	{"grad_norm", offsetof(struct metrics, grad_norm)},
	{"update_norm", offsetof(struct metrics, update_norm)},
	{"seconds", offsetof(struct metrics, seconds)},
	{"tokens_per_second", offsetof(struct metrics, tokens_per_second)},
};
#define NUM_METRIC_REALS (sizeof metric_reals / sizeof *metric_reals)

/* A number, or null with the key added to the list when it is not finite. */
static json_t *metric_number(double x, const char *key, json_t *nonfinite)
{
	if (isfinite(x))
		return json_real(x);
	const char *last = json_string_value(json_array_get(nonfinite, json_array_size(nonfinite) - 1));
	if (!last || strcmp(last, key)) /* an array's key once */
		json_array_append_new(nonfinite, json_string(key));
	return json_null();
}

static json_t *expert_counts_to_json(const struct metrics *m)
{
	json_t *layers = json_array();
	const int64_t *count = m->expert_counts;
	for (int l = 0; l < m->num_layers; l++) {
		json_t *layer = json_array();
		for (int e = 0; e < m->num_experts; e++)
			json_array_append_new(layer, json_integer(*count++));
		json_array_append_new(layers, layer);
	}
	return layers;
}

json_t *valid_losses_to_json(const struct metrics *m, json_t *nonfinite)
{
	json_t *sets = json_object();
	for (int i = 0; i < m->num_valid_sets; i++)
		json_object_set_new(sets, m->valid_losses[i].set, metric_number(m->valid_losses[i].loss, "valid", nonfinite));
	return sets;
}

/* Puts what a validation has found, if there was one, into the line of a step. */
static void set_validation(json_t *root, const struct metrics *m, json_t *nonfinite)
{
	if (m->has_valid_loss)
		json_object_set_new(root, "valid_loss", metric_number(m->valid_loss, "valid_loss", nonfinite));
	if (m->has_valid_loss && m->num_valid_sets)
		json_object_set_new(root, "valid", valid_losses_to_json(m, nonfinite));
}

char *metrics_line(const struct metrics *m)
{
	json_t *nonfinite = json_array(), *load = json_array();
	json_t *root = json_pack("{s:I, s:I, s:I, s:i}", "step", (json_int_t)m->step, "samples", (json_int_t)m->samples,
			"tokens", (json_int_t)m->tokens, "batch", m->batch);
	for (size_t i = 0; i < NUM_METRIC_REALS; i++) {
		double x = *(const double *)((const char *)m + metric_reals[i].offset);
		json_object_set_new(root, metric_reals[i].key, metric_number(x, metric_reals[i].key, nonfinite));
		if (i == 0 && m->num_mtp_layers)
			json_object_set_new(root, "mtp_loss", metric_number(m->mtp_loss, "mtp_loss", nonfinite));
	}
	if (m->save_seconds)
		json_object_set_new(root, "save_seconds", json_real(m->save_seconds));
	for (int i = 0; i < m->num_layers; i++)
		json_array_append_new(load, metric_number(m->expert_load[i], "expert_load", nonfinite));
	json_object_set_new(root, "expert_load", load);
	json_t *bias = json_array();
	for (int i = 0; i < m->num_layers && m->expert_bias; i++)
		json_array_append_new(bias, metric_number(m->expert_bias[i], "expert_bias", nonfinite));
	if (json_array_size(bias))
		json_object_set(root, "expert_bias", bias);
	json_decref(bias);
	if (m->expert_counts)
		json_object_set_new(root, "expert_counts", expert_counts_to_json(m));
	if (m->attempts)
		json_object_set_new(root, "attempts", json_integer(m->attempts));
	set_validation(root, m, nonfinite);
	if (m->validation_stopped)
		json_object_set_new(root, "validation_stopped", json_true());
	json_t *samples = json_array();
	for (int i = 0; i < m->num_sources; i++)
		json_array_append_new(samples, json_integer(m->source_samples[i]));
	if (m->num_sources)
		json_object_set(root, "source_samples", samples);
	json_decref(samples);
	json_t *sent = json_object();
	for (int i = 0; i < m->num_kinds; i++)
		json_object_set_new(sent, m->kinds[i], json_integer(m->bytes_sent[i]));
	if (m->num_kinds)
		json_object_set(root, "bytes_sent", sent);
	json_decref(sent);
	if (json_array_size(nonfinite))
		json_object_set(root, "nonfinite", nonfinite);
	char *text = json_text(root, JSON_REAL_PRECISION(17));
	struct text line = {0};
	text_append_string(&line, text);
	text_append_string(&line, "\n");
	free(text);
	json_decref(nonfinite);
	json_decref(root);
	return line.data;
}

/* Appends lines to the file `name`. On failure nothing of them is in it. */
static int append_lines(int fd, const char *name, const char *lines)
{
	struct stat before;
	const bool known = fstat(fd, &before) == 0;
	for (size_t n = strlen(lines), at = 0; at < n;) {
		const ssize_t written = write(fd, lines + at, n - at);
		if (written < 0 && errno == EINTR)
			continue;
		if (written <= 0) {
			const int error = errno;
			if (known && S_ISREG(before.st_mode) && at && ftruncate(fd, before.st_size) < 0)
				return fail("%s: cannot remove half a line: %s", name, strerror(errno));
			return fail("%s: cannot write: %s", name, strerror(error));
		}
		at += written;
	}
	return 0;
}

int metrics_append(FILE *f, const char *lines)
{
	return fflush(f) ? fail("metrics.jsonl: cannot write: %s", strerror(errno))
			: append_lines(fileno(f), "metrics.jsonl", lines);
}

int metrics_write(FILE *f, const struct metrics *m)
{
	char *line = metrics_line(m);
	const int rc = metrics_append(f, line);
	free(line);
	return rc;
}

enum metrics_place metrics_place(FILE *f, const char *output_dir, char now[PATH_LEN])
{
	char path[PATH_LEN], link[48], target[PATH_LEN];
	struct stat ours, named;
	if (path_join(path, output_dir, "metrics.jsonl") < 0 || fstat(fileno(f), &ours) < 0)
		return METRICS_IN_PLACE; /* neither fails for an open file */
	if (stat(path, &named) == 0 && named.st_dev == ours.st_dev && named.st_ino == ours.st_ino)
		return METRICS_IN_PLACE;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fileno(f));
	const ssize_t n = readlink(link, target, sizeof target - 1);
	target[n < 0 ? 0 : n] = 0;
	if (ours.st_nlink && stat(target, &named) == 0 && named.st_dev == ours.st_dev && named.st_ino == ours.st_ino) {
		parent_of(now, target);
		fail("%s was moved to %s while the run wrote to it; this step is saved there: move it back, or set "
				"train.output_dir=%s, to continue", output_dir, now, now);
		return METRICS_MOVED;
	}
	path_copy(now, output_dir);
	if (stat(output_dir, &named) == 0 && path_exists(path)) {
		fail("%s was deleted while the run wrote to it, and another run's files are in its place: this step could not "
				"be saved; start again with another train.output_dir", output_dir);
		return METRICS_LOST;
	}
	fail("%s was deleted while the run wrote to it; this step is saved in %s again, but the metrics before it, and "
			"checkpoints that were deleted too, are lost: find out what deletes them, then the same command "
			"continues", path, output_dir);
	return METRICS_DELETED;
}

/* A number, or null for NaN. */
static int metric_value(const json_t *v, const char *where, const char *key, double *out)
{
	if (!json_is_number(v) && !json_is_null(v))
		return fail("%s: `%s` is %s; expected a number or null", where, key, json_kind(v));
	*out = json_is_null(v) ? NAN : json_number_value(v);
	return 0;
}

/* Goes through a mapped metrics file line by line. */
struct metrics_reader {
	const char *path;
	const uint8_t *data;
	size_t size, at;             /* at: the end of the last whole line */
	int64_t line;                /* of that line */
	struct metrics row;          /* that line, but for expert_load */
	double *loads;               /* expert_load of all lines, one after the other; the caller frees it */
	size_t num_loads, load_room;
	int (*each)(void *context, const json_t *line); /* see metrics_each; or NULL */
	void *context;
};

/* One line into r->row and r->loads. */
static int metrics_parse(struct metrics_reader *r, const json_t *line, const char *where)
{
	struct metrics *m = &r->row;
	int64_t batch, before = m->step;
	if (field_int(line, where, "step", 0, INT64_MAX, &m->step) < 0)
		return -1;
	if (m->step <= before)
		return fail("%s: step %lld after step %lld; expected rising steps", where, (long long)m->step,
				(long long)before);
	if (field_int(line, where, "samples", 0, INT64_MAX, &m->samples) < 0 ||
			field_int(line, where, "tokens", 0, INT64_MAX, &m->tokens) < 0 ||
			field_int(line, where, "batch", 0, INT32_MAX, &batch) < 0)
		return -1;
	m->batch = batch;
	for (size_t i = 0; i < NUM_METRIC_REALS; i++) {
		const char *key = metric_reals[i].key;
		double *value = (double *)((char *)m + metric_reals[i].offset);
		*value = NAN;
		if (!json_object_get(line, key) && value == &m->update_norm)
			continue; /* written by an earlier version */
		if (metric_value(json_object_get(line, key), where, key, value) < 0)
			return -1;
	}
	const json_t *load = json_object_get(line, "expert_load"), *valid = json_object_get(line, "valid_loss");
	if (!json_is_array(load))
		return fail("%s: `expert_load` is %s; expected an array", where, json_kind(load));
	m->num_layers = json_array_size(load);
	r->loads = grow(r->loads, r->num_loads, &r->load_room, m->num_layers, sizeof *r->loads);
	for (int i = 0; i < m->num_layers; i++)
		if (metric_value(json_array_get(load, i), where, "expert_load", &r->loads[r->num_loads++]) < 0)
			return -1;
	int64_t attempts = 0;
	if (json_object_get(line, "attempts") && field_int(line, where, "attempts", 0, INT32_MAX, &attempts) < 0)
		return -1;
	m->attempts = attempts;
	m->has_valid_loss = valid;
	m->valid_loss = 0;
	m->validation_stopped = json_is_true(json_object_get(line, "validation_stopped"));
	return valid ? metric_value(valid, where, "valid_loss", &m->valid_loss) : 0;
}

/* The next line into r->row: 1; 0 at the end, or at a last line that was torn off; -1 on error. */
static int metrics_next(struct metrics_reader *r)
{
	if (r->at == r->size)
		return 0;
	const char *text = (const char *)r->data + r->at, *newline = memchr(text, '\n', r->size - r->at);
	size_t n = newline ? (size_t)(newline + 1 - text) : r->size - r->at;
	char where[PATH_LEN + 32];
	snprintf(where, sizeof where, "%s:%lld", r->path, (long long)++r->line);
	json_t *line = json_line(where, text, n);
	if (!line && !newline)
		return 0;
	int rc = line ? metrics_parse(r, line, where) : -1;
	if (rc == 0 && r->each)
		rc = r->each(r->context, line);
	json_decref(line);
	r->at += n;
	return rc < 0 ? -1 : 1;
}

FILE *metrics_open(const char *output_dir, int64_t step, struct metrics *last_line)
{
	char path[PATH_LEN];
	if (make_directories(output_dir) < 0 || path_join(path, output_dir, "metrics.jsonl") < 0)
		return NULL;
	struct metrics_reader r = {.path = path, .row.step = -1};
	int there = path_exists(path), rc = there;
	size_t keep = 0;
	struct metrics last = {0};   /* that is kept */
	bool newline = true;
	if (there > 0 && map_file(path, &r.data, &r.size) < 0)
		return NULL;
	while (rc > 0 && (rc = metrics_next(&r)) > 0)
		if (r.row.step <= step)
			keep = r.at, last = r.row, newline = r.data[keep - 1] == '\n';
	unmap_file(r.data, r.size);
	free(r.loads);
	if (rc == 0 && r.size && last.step < step)
		rc = fail("%s: ends at step %lld, but the run goes on after step %lld; bring the missing lines back, or move "
				"the file away to begin a new one", path, (long long)last.step, (long long)step);
	/* Steps rise, so that what goes is always a tail. */
	if (rc == 0 && keep < r.size && truncate(path, keep) < 0)
		rc = fail("%s: cannot remove the lines after step %lld: %s", path, (long long)step, strerror(errno));
	if (rc < 0)
		return NULL;
	last.expert_load = NULL;
	if (last_line)
		*last_line = last;
	FILE *f = fopen(path, "ae");
	if (!f)
		fail("%s: cannot open: %s", path, strerror(errno));
	else if (!newline)
		putc('\n', f);
	return f;
}

bool metrics_lack_validation(const char *output_dir, int64_t step)
{
	char path[PATH_LEN];
	struct metrics_reader r = {.path = path, .row.step = -1};
	int rc;
	if (path_join(path, output_dir, "metrics.jsonl") < 0 || path_exists(path) <= 0 ||
			map_file(path, &r.data, &r.size) < 0)
		return false; /* if that is an error, metrics_open finds it too */
	while ((rc = metrics_next(&r)) > 0)
		;
	unmap_file(r.data, r.size);
	free(r.loads);
	return rc == 0 && r.row.step == step && r.row.validation_stopped;
}

int metrics_set_validation(const char *output_dir, const struct metrics *m)
{
	char path[PATH_LEN];
	const uint8_t *data;
	size_t size;
	struct new_file file;
	if (path_join(path, output_dir, "metrics.jsonl") < 0 || map_file(path, &data, &size) < 0)
		return -1;
	size_t begin = size ? size - 1 : 0; /* of the last line; a new line may end it */
	while (begin && data[begin - 1] != '\n')
		begin--;
	json_t *line = json_line(path, (const char *)data + begin, size - begin), *value;
	json_t *root = json_object(), *nonfinite = json_array();
	const char *key;
	json_object_foreach(line, key, value) /* its members stay as they are, in their order */
		if (!strcmp(key, "validation_stopped"))
			set_validation(root, m, nonfinite);
		else
			json_object_set(root, key, value);
	json_array_extend(nonfinite, json_object_get(line, "nonfinite"));
	if (json_array_size(nonfinite))
		json_object_set(root, "nonfinite", nonfinite);
	char *text = json_text(root, JSON_REAL_PRECISION(17));
	int rc = line ? new_file_begin(&file, path) : -1;
	if (rc == 0) {
		fwrite(data, 1, begin, file.stream);
		fprintf(file.stream, "%s\n", text);
		rc = new_file_publish(&file, 0);
	}
	free(text);
	json_decref(line), json_decref(root), json_decref(nonfinite);
	unmap_file(data, size);
	return rc;
}

int metrics_each(const char *run_dir, int (*each)(void *context, const json_t *line), void *context)
{
	char path[PATH_LEN];
	struct metrics_reader r = {.path = path, .row.step = -1, .each = each, .context = context};
	if (path_join(path, run_dir, "metrics.jsonl") < 0 || map_file(path, &r.data, &r.size) < 0)
		return -1;
	int rc;
	while ((rc = metrics_next(&r)) > 0)
		r.num_loads = 0;
	unmap_file(r.data, r.size);
	free(r.loads);
	return rc;
}

int metrics_read(const char *run_dir, struct metrics **out, int *count)
{
	char path[PATH_LEN];
	struct metrics_reader r = {.path = path, .row.step = -1};
	if (path_join(path, run_dir, "metrics.jsonl") < 0 || map_file(path, &r.data, &r.size) < 0)
		return -1;
	struct metrics *lines = NULL;
	size_t n = 0, room = 0;
	int rc;
	while ((rc = metrics_next(&r)) > 0) {
		lines = grow(lines, n, &room, 1, sizeof *lines);
		lines[n++] = r.row;
	}
	unmap_file(r.data, r.size);
	if (rc == 0) {
		*out = allocate(n * sizeof **out + r.num_loads * sizeof *r.loads);
		*count = n;
		double *load = (double *)(*out + n);
		if (n)
			memcpy(*out, lines, n * sizeof **out);
		if (r.num_loads)
			memcpy(load, r.loads, r.num_loads * sizeof *load);
		for (size_t i = 0; i < n; load += lines[i++].num_layers)
			(*out)[i].expert_load = load;
	}
	free(lines);
	free(r.loads);
	return rc;
}

/* ============================================================================================================
 * Samples: OUTPUT_DIR/samples.jsonl
 * ========================================================================================================== */

int samples_cut(const char *output_dir, int64_t step)
{
	char path[PATH_LEN], where[PATH_LEN + 64];
	const uint8_t *data;
	size_t size;
	const int there = path_join(path, output_dir, "samples.jsonl") < 0 ? -1 : path_exists(path);
	if (there <= 0 || map_file(path, &data, &size) < 0)
		return there <= 0 ? there : -1;
	snprintf(where, sizeof where, "%s: last line (mend or remove it)", path);
	int rc = 0;
	size_t end = size; /* of what stays; what goes is a tail, since steps rise */
	while (end) {
		size_t begin = end - 1; /* of the last line */
		while (begin && data[begin - 1] != '\n')
			begin--;
		int64_t of = INT64_MAX;
		if (data[end - 1] == '\n') {
			json_t *line = json_line(where, (const char *)data + begin, end - begin);
			rc = line ? field_int(line, where, "step", 0, INT64_MAX, &of) : -1;
			json_decref(line);
		}
		if (rc < 0 || of <= step)
			break;
		end = begin;
	}
	unmap_file(data, size);
	if (rc == 0 && end < size && truncate(path, end) < 0)
		rc = fail("%s: cannot remove the lines after step %lld: %s", path, (long long)step, strerror(errno));
	return rc;
}

int samples_append(const char *output_dir, int64_t step, const char *lines)
{
	char path[PATH_LEN];
	if (samples_cut(output_dir, step - 1) < 0 || path_join(path, output_dir, "samples.jsonl") < 0)
		return -1;
	const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
	if (fd < 0)
		return fail("%s: cannot open: %s", path, strerror(errno));
	int rc = append_lines(fd, path, lines);
	if (rc == 0 && fsync(fd) < 0)
		rc = fail("%s: cannot write: %s", path, strerror(errno));
	close(fd);
	return rc;
}

/* ============================================================================================================
 * Windows
 * ========================================================================================================== */

int64_t count_windows(const struct tokens *t, int64_t L)
{
	return t->packing ? t->packing->num_windows : t->count > L ? (t->count - 1) / L : 0;
}

/* The pieces of all documents in the order of the file, piece [documents + count / L]. Returns their number, or -1. */
static int64_t collect_pieces(const struct tokens *t, int64_t L, struct piece *piece)
{
	int64_t n = 0, begin, next;
	if (document_begin(t, 0, &next) < 0)
		return -1;
	for (int64_t i = 0; i < t->documents; i++) {
		begin = next;
		if (document_begin(t, i + 1, &next) < 0)
			return -1;
		if (next < begin)
			return fail("%s: its index was changed while it was in use: document %lld ends before it begins", t->path,
					(long long)i);
		for (int64_t at = begin; at + 1 < next; at += L)
			piece[n++] = (struct piece){at, next - 1 - at < L ? next - 1 - at : L};
	}
	return n;
}

/* Best fit: window [n] gets the window of each piece, the longest first. Windows are numbered as they are begun.
 * Returns their number, or -1. Among windows with the same room the one that was used last is taken. */
static int64_t best_fit(const struct piece *piece, int64_t n, int64_t L, int64_t *window)
{
	const int64_t words = L / 64 + 1;
	int64_t *head = malloc((L + 1) * sizeof *head); /* [L + 1] a window with that room, or -1 */
	int64_t *next = malloc((n + 1) * sizeof *next); /* for each window another one with the same room, or -1 */
	uint64_t *is_there = calloc(words, sizeof *is_there); /* a bit for each room that a window has */
	int64_t count = head && next && is_there ? 0 : -1;
	for (int64_t room = 0; room <= L && count == 0; room++)
		head[room] = -1;
	for (int64_t i = 0; i < n && count >= 0; i++) {
		int64_t room = piece[i].length, word = room / 64;
		uint64_t bits = is_there[word] & ~UINT64_C(0) << room % 64;
		while (!bits && ++word < words)
			bits = is_there[word];
		if (bits) {
			room = 64 * word + __builtin_ctzll(bits);
			window[i] = head[room];
			head[room] = next[head[room]];
			if (head[room] < 0)
				is_there[word] &= ~(UINT64_C(1) << room % 64);
		} else {
			room = L;
			window[i] = count++;
		}
		room -= piece[i].length;
		if (room > 0) {
			next[window[i]] = head[room];
			head[room] = window[i];
			is_there[room / 64] |= UINT64_C(1) << room % 64;
		}
	}
	free(head);
	free(next);
	free(is_there);
	return count;
}

/* Sorts the n pieces of `unsorted` by length; sorted [n] gets for each where it is now. */
static void sort_pieces(struct packed *p, const struct piece *unsorted, int64_t n, int64_t L, int64_t *sorted)
{
	for (int64_t i = 0; i < n; i++)
		p->longer[unsorted[i].length - 1]++;
	for (int64_t l = L - 1; l > 0; l--)
		p->longer[l - 1] += p->longer[l];
	for (int64_t i = 0; i < n; i++) /* longer[length] counts on while the pieces of that length are put in */
		p->piece[sorted[i] = p->longer[unsorted[i].length]++] = unsorted[i];
	for (int64_t i = 0; i < n; i++)
		p->longer[unsorted[i].length]--;
}

/* Numbers the windows in the order in which the file comes to them, and fills in first and place. window [n] as from
 * best_fit, number [num_windows] is work space. */
static void order_windows(struct packed *p, const int64_t *sorted, const int64_t *window, int64_t *number)
{
	int64_t windows = 0;
	for (int64_t w = 0; w < p->num_windows; w++)
		number[w] = -1;
	for (int64_t i = 0; i < p->num_pieces; i++) {
		int64_t *w = &number[window[sorted[i]]];
		if (*w < 0)
			*w = windows++;
		p->first[*w + 1]++;
	}
	for (int64_t w = 0; w < windows; w++)
		p->first[w + 1] += p->first[w];
	for (int64_t i = 0; i < p->num_pieces; i++) /* first[w] counts on while window w is filled */
		p->place[p->first[number[window[sorted[i]]]]++] = sorted[i];
	for (int64_t w = windows; w > 0; w--)
		p->first[w] = p->first[w - 1];
	p->first[0] = 0;
}

/* Places the documents of an indexed file into windows of L. Sets t->packing. */
static int packing_make(struct tokens *t, int64_t L)
{
	const int64_t most = t->documents + t->count / L + 1;
	struct packed *p = calloc(1, sizeof *p);
	struct piece *unsorted = malloc(most * sizeof *unsorted);
	int64_t *sorted = malloc(most * sizeof *sorted), *window = malloc(most * sizeof *window);
	int64_t *number = malloc(most * sizeof *number);
	t->packing = p;
	const bool begun = p && unsorted && sorted && window && number;
	const int64_t n = begun ? collect_pieces(t, L, unsorted) : 0;
	bool fits = begun;
	if (fits && n > 0) {
		p->piece = malloc(n * sizeof *p->piece);
		p->place = malloc(n * sizeof *p->place);
		p->longer = calloc(L + 1, sizeof *p->longer);
		fits = p->piece && p->place && p->longer;
	}
	if (fits && n > 0) {
		p->num_pieces = n;
		sort_pieces(p, unsorted, n, L, sorted);
		p->num_windows = best_fit(p->piece, n, L, window);
		p->first = p->num_windows < 0 ? NULL : calloc(p->num_windows + 1, sizeof *p->first);
		fits = p->first;
	}
	if (fits && n > 0)
		order_windows(p, sorted, window, number);
	free(unsorted);
	free(sorted);
	free(window);
	free(number);
	return n < 0 ? -1 : fits ? 0 : fail("%s: out of memory for placing its %lld documents into windows", t->path,
			(long long)t->documents);
}

/* The piece in a place. */
static const struct piece *piece_at(const struct packed *p, int64_t place, const struct random_stream *order)
{
	const int64_t i = p->place[place], length = p->piece[i].length;
	if (!order)
		return &p->piece[i];
	const int64_t first = p->longer[length], n = p->longer[length - 1] - first;
	struct random_stream of_length = *order;
	of_length.seed += length * UINT64_C(0x9E3779B97F4A7C15); /* 2^64 over the golden ratio: far apart */
	return &p->piece[first + (int64_t)random_permute(i - first, n, &of_length)];
}

static int read_packed_window(const struct tokens *t, int64_t i, int64_t L, const struct random_stream *order,
		int32_t *input, int32_t *target, int32_t *document)
{
	const struct packed *p = t->packing;
	int64_t at = 0;
	for (int64_t place = p->first[i]; place < p->first[i + 1]; place++) {
		const struct piece *x = piece_at(p, place, order);
		if (tokens_read(t, x->begin, x->length, input + at) < 0 ||
				tokens_read(t, x->begin + 1, x->length, target + at) < 0)
			return -1;
		tokens_mask(t, x->begin, x->length, target + at);
		for (int64_t j = 0; document && j < x->length; j++)
			document[at + j] = at;
		at += x->length;
	}
	for (int64_t j = at; j < L; j++) {
		input[j] = input[j - at];
		target[j] = -1;
		if (document)
			document[j] = at;
	}
	return (int)at;
}

int describe_windows(char *line, size_t size, const struct tokens *t, int64_t L)
{
	const int64_t windows = count_windows(t, L);
	const struct packed *p = t->packing;
	int64_t documents = 0, cut = 0, used = 0, begin, next = 0;
	char counts[128] = "";
	const bool counted = t->format == MEGATRON && (p || t->loss_mask); /* a plain text may be cut anywhere */
	if (counted && document_begin(t, 0, &next) < 0)
		return -1;
	for (int64_t i = 0; counted && i < t->documents; i++) {
		begin = next;
		if (document_begin(t, i + 1, &next) < 0)
			return -1;
		const int64_t last = next - 2; /* the last input that has a target */
		documents += last >= begin;
		cut += last >= begin && (p ? last - begin >= L : begin / L != last / L || last / L >= windows);
	}
	for (int64_t i = 0; p && i < p->num_pieces; i++)
		used += p->piece[i].length;
	if (documents)
		snprintf(counts, sizeof counts, "%lld of %lld documents cut (%.1f%%), ", (long long)cut, (long long)documents,
				100.0 * cut / documents);
	const double wasted = p ? 1 - (double)used / (windows * L) : 1 - (double)(windows * L) / (t->count - 1);
	snprintf(line, size, "%s: %lld windows of %lld tokens, %s: %s%.1f%% of the tokens are %s%s", t->path,
			(long long)windows, (long long)L, p ? "documents packed" : "one after the other", counts, 100 * wasted,
			p ? "padding" : "left out", p && cut ? "; only those longer than a window are cut"
			: !p && t->loss_mask && cut ? "; data.packing documents would keep conversations whole" : "");
	return 0;
}

int print_windows(const char *key, const struct tokens *files, int n, int64_t L)
{
	char line[PATH_LEN + 320];
	for (int i = 0; i < n; i++) {
		if (describe_windows(line, sizeof line, &files[i], L) < 0)
			return -1;
		printf("%s: %s\n", key, line);
	}
	return 0;
}

int data_options_init(struct data_options *o, const struct config *c, const char *tokenizer)
{
	*o = (struct data_options){.tokenizer = tokenizer, .vocab_size = c->model.vocab_size, .seq_len = c->data.seq_len,
			.document_mask = c->data.document_mask, .document_token = c->data.document_token,
			.packing = c->data.packing};
	if (!strcmp(tokenizer, "none"))
		return 0;
	struct tokenizer *t = tokenizer_open(tokenizer);
	if (!t)
		return -1;
	const int size = tokenizer_size(t);
	o->tokenizer_hash = tokenizer_hash(t), o->tokenizer_old_hash = tokenizer_old_hash(t);
	tokenizer_close(t);
	return size <= c->model.vocab_size ? 0 : fail("data.tokenizer: %s has %d tokens; expected at most "
			"model.vocab_size, which is %d", tokenizer, size, c->model.vocab_size);
}

int read_window(const struct tokens *data, int64_t i, int64_t L, const struct random_stream *order, int32_t *input,
		int32_t *target, int32_t *document)
{
	if (data->packing)
		return read_packed_window(data, i, L, order, input, target, document);
	if (tokens_read(data, i * L, L, input) < 0 || tokens_read(data, i * L + 1, L, target) < 0)
		return -1;
	tokens_mask(data, i * L, L, target);
	if (document && !data->document_mask)
		memset(document, 0, L * sizeof *document);
	const int rc = document && data->document_mask ? tokens_documents(data, i * L, L, document, target) : 0;
	return rc < 0 ? -1 : (int)L;
}

/* Fails when the loss counts for no target of the first `windows` windows. Reads no further than the first window that
 * has one. */
static int check_targets(const struct tokens *data, int64_t windows, int64_t L)
{
	int32_t *input = calloc(3 * L, sizeof *input), *target = input + L, *document = target + L;
	if (!input)
		return fail("out of memory for a window of %lld tokens", (long long)L);
	int rc = 0;
	bool counts = false;
	for (int64_t i = 0; i < windows && !counts && (rc = read_window(data, i, L, NULL, input, target, document)) > 0;
			i++)
		for (int64_t t = 0; t < L; t++)
			counts |= target[t] >= 0;
	free(input);
	return rc < 0 ? -1 : counts ? 0 : fail("%s: the loss counts for none of the tokens in its %lld windows of %lld; "
			"expected a mask%s that leaves some", data->path, (long long)windows, (long long)L,
			data->document_mask ? " or documents of more than one token" : "");
}

int open_data(struct tokens *t, const struct data_source *source, const struct data_options *o, int64_t max_windows)
{
	const char *path = source->path;
	const int64_t L = o->seq_len;
	if (tokens_open(t, path, source->dtype, o->vocab_size) < 0)
		return -1;
	t->document_token = o->document_token;
	const bool packed = o->packing == PACKING_DOCUMENTS ||
			(o->packing == PACKING_AUTO && t->format == MEGATRON && t->loss_mask);
	t->document_mask = o->document_mask || packed;
	int rc = 0;
	if (packed && t->format != MEGATRON)
		rc = fail("%s: has no index that tells where documents begin, so they cannot be packed; expected PREFIX.bin "
				"and PREFIX.idx, as `ling tokenize` writes them; or set packing to windows", path);
	else if (packed && packing_make(t, L) < 0)
		rc = -1;
	else if (packed && count_windows(t, L) == 0)
		rc = fail("%s: has no document of at least two tokens, so there is nothing to pack into windows", path);
	else if (count_windows(t, L) == 0)
		rc = fail("%s: %lld tokens are too few for one window: seq_len %lld needs %lld", path, (long long)t->count,
				(long long)L, (long long)L + 1);
	else if (*t->tokenizer && strcmp(o->tokenizer, "none") && o->tokenizer_hash != t->tokenizer_hash &&
			o->tokenizer_old_hash != t->tokenizer_hash)
		rc = fail("%s: made by tokenizer %s with hash %08x; expected ids of the run's tokenizer, %s (data.tokenizer, "
				"or else that of train.init_from), which has %08x: make the token file with it", path,
				t->tokenizer, (unsigned)t->tokenizer_hash, o->tokenizer, (unsigned)o->tokenizer_hash);
	else if (t->document_mask && t->documents < 0 && o->document_token < 0)
		rc = fail("%s: has no index that tells where documents begin; to mask them, give the id that separates them "
				"as document_token", path);
	else if (o->document_token >= o->vocab_size)
		rc = fail("document_token %d is outside the vocabulary of %d that the model has; expected an id that "
				"separates documents, 0 to %d", o->document_token, o->vocab_size, o->vocab_size - 1);
	if (rc == 0) {
		const int64_t all = count_windows(t, L);
		rc = check_targets(t, max_windows && max_windows < all ? max_windows : all, L);
	}
	if (rc < 0)
		tokens_close(t);
	return rc;
}

/* ============================================================================================================
 * Batch sizes, and the length of a run
 * ========================================================================================================== */

int64_t batch_size(const struct config *c, int64_t tokens)
{
	const int64_t start = c->train.batch_warmup.start, increment = c->train.batch_warmup.increment,
			ramp = c->train.batch_warmup.tokens;
	if (tokens >= ramp)
		return c->train.batch;
	int64_t increments = (c->train.batch - start + increment - 1) / increment;
	int64_t batch = start + (int64_t)((__int128)tokens * increments / ramp) * increment;
	return batch < c->train.batch ? batch : c->train.batch;
}

void run_length(const struct config *c, int64_t step, int64_t token, int64_t *steps, int64_t *tokens)
{
	const int64_t L = c->data.seq_len, ramp = c->train.batch_warmup.tokens;
	const bool by_steps = c->train.steps > 0;
	while (by_steps ? step < c->train.steps : token < c->train.tokens) {
		/* The batch stays the same up to `end`: the next level of the ramp, or the end of the run. */
		const int64_t batch = batch_size(c, token);
		int64_t end = INT64_MAX;
		if (token < ramp) {
			const int64_t start = c->train.batch_warmup.start, increment = c->train.batch_warmup.increment;
			const int64_t levels = (c->train.batch - start + increment - 1) / increment;
			const int64_t level = levels ? (int64_t)((__int128)token * levels / ramp) + 1 : 1;
			end = levels ? (int64_t)(((__int128)level * ramp + levels - 1) / levels) : ramp;
		}
		if (!by_steps && c->train.tokens < end)
			end = c->train.tokens;
		int64_t n = (end - token - 1) / (batch * L) + 1;
		if (by_steps && c->train.steps - step < n)
			n = c->train.steps - step;
		step += n;
		token += n * batch * L;
	}
	*steps = step;
	*tokens = token;
}

/* ============================================================================================================
 * The blend
 * ========================================================================================================== */

int blend_open(struct blend *b, const struct config *c, const struct data_options *o)
{
	*b = (struct blend){.seq_len = o->seq_len, .seed = c->train.seed, .shuffle = c->data.shuffle};
	for (; b->num_files < c->data.num_train; b->num_files++)
		if (open_data(&b->files[b->num_files], &c->data.train[b->num_files], o, 0) < 0)
			return -1;
	return 0;
}

void blend_close(struct blend *b)
{
	for (int i = 0; i < b->num_files; i++)
		tokens_close(&b->files[i]);
	*b = (struct blend){0};
}

#define SHARES_TOTAL 4294967296.0 /* 2^32: what the shares of all sources add up to, see struct source_state */

void blend_begin(const struct blend *b, const struct config *c, struct trainer_state *s)
{
	double weights = 0;
	for (int i = 0; i < b->num_files; i++)
		weights += c->data.train[i].weight;
	s->num_sources = b->num_files;
	for (int i = 0; i < b->num_files; i++) {
		const double weight = c->data.train[i].weight;
		const int64_t share = llround(weight / weights * SHARES_TOTAL);
		s->sources[i] = (struct source_state){.tokens = b->files[i].count, .crc32 = b->files[i].crc32, .order = i,
				.packed_windows = b->files[i].packing ? b->files[i].packing->num_windows : 0,
				.share = weight > 0 && share == 0 ? 1 : share}; /* a weight that is not 0 gives some samples */
	}
}

static bool same_file(const struct source_state *a, const struct source_state *b)
{
	return a->tokens == b->tokens && a->crc32 == b->crc32 && a->packed_windows == b->packed_windows;
}

/* Fails where the blend `now` is not that of the state, and says what differs first. */
static int check_blend(const struct blend *b, const struct trainer_state *now, const struct trainer_state *s,
		const char *dir)
{
	char what[2 * PATH_LEN];
	const int n = now->num_sources;
	int i = 0;
	while (i < n && i < s->num_sources && same_file(&now->sources[i], &s->sources[i]) &&
			now->sources[i].share == s->sources[i].share)
		i++;
	if (i == n && n == s->num_sources)
		return 0;
	const struct source_state *found = &now->sources[i], *expected = &s->sources[i];
	if (n != s->num_sources)
		snprintf(what, sizeof what, "data.train: found %d token files; the run of %s has %d", n, dir, s->num_sources);
	else if (found->share != expected->share)
		snprintf(what, sizeof what, "data.train: %s gives %.4g%% of the samples; in the run of %s it is %.4g%%",
				b->files[i].path, 100 * found->share / SHARES_TOTAL, dir, 100 * expected->share / SHARES_TOTAL);
	else if (found->tokens == expected->tokens && found->crc32 == expected->crc32 &&
			(!found->packed_windows || !expected->packed_windows))
		snprintf(what, sizeof what, "data.train: the documents of %s are %s windows; the run of %s is with "
				"data.packing %s", b->files[i].path, found->packed_windows ? "packed into" : "read in consecutive", dir,
				expected->packed_windows ? "documents" : "windows");
	else if (found->tokens == expected->tokens && found->crc32 == expected->crc32)
		snprintf(what, sizeof what, "data.train: %s has other documents (%lld windows) than the run of %s was started "
				"with (%lld)", b->files[i].path, (long long)found->packed_windows, dir,
				(long long)expected->packed_windows);
	else
		snprintf(what, sizeof what, "data.train: %s holds other tokens (%lld, CRC-32 %08x) than the run of %s was "
				"started with (%lld, %08x)", b->files[i].path, (long long)found->tokens, found->crc32, dir,
				(long long)expected->tokens, expected->crc32);
	return fail("%s; set it back, or choose another train.output_dir, or, to change the blend here on purpose, set "
			"data.blend_from_step=%lld", what, (long long)s->step);
}

int blend_resume(const struct blend *b, const struct config *c, struct trainer_state *s, const char *dir, int *index)
{
	struct trainer_state now = {0};
	for (int j = 0; index && j < MAX_SOURCES; j++)
		index[j] = j;
	blend_begin(b, c, &now);
	if (check_blend(b, &now, s, dir) == 0)
		return 0;
	if (s->step != c->data.blend_from_step)
		return -1;
	for (int j = 0; index && j < MAX_SOURCES; j++)
		index[j] = -1;
	int next_order = 0;
	for (int j = 0; j < s->num_sources; j++)
		next_order = s->sources[j].order >= next_order ? s->sources[j].order + 1 : next_order;
	for (int i = 0; i < now.num_sources; i++) {
		int j = 0;
		while (j < s->num_sources && !same_file(&s->sources[j], &now.sources[i]))
			j++;
		const bool known = j < s->num_sources;
		now.sources[i].order = known ? s->sources[j].order : next_order++;
		now.sources[i].taken = known ? s->sources[j].taken : 0;
		if (known && index)
			index[j] = i;
		if (known)
			s->sources[j].tokens = -1; /* the same file may be in the blend twice */
	}
	memcpy(s->sources, now.sources, sizeof s->sources);
	s->num_sources = now.num_sources;
	return 1;
}

/* The source of the next sample. Every source is credited with its share; the one with the most credit, the first
 * among equals, gives the sample and pays one whole sample for it. So no source is ever ahead of its share by a whole
 * sample. */
static int next_source(struct source_state *sources, int n)
{
	int64_t shares = 0;
	int best = -1;
	for (int i = 0; i < n; i++) {
		sources[i].credit += sources[i].share;
		shares += sources[i].share;
		if (sources[i].share && (best < 0 || sources[i].credit > sources[best].credit))
			best = i;
	}
	sources[best].credit -= shares;
	return best;
}

struct blend_sample blend_sample_at(const struct blend *b, const struct source_state *sources, int file,
		int64_t number)
{
	/* Sample number n of a file is window n mod N of epoch n / N, N being its windows; or, shuffled, the image of that
	 * window under the epoch's permutation. */
	const int64_t windows = count_windows(&b->files[file], b->seq_len), epoch = number / windows;
	const struct random_stream order = {.seed = b->seed, .purpose = RANDOM_SHUFFLE + sources[file].order,
			.step = (uint32_t)epoch};
	return (struct blend_sample){file, number, b->shuffle ?
			(int64_t)random_permute(number % windows, windows, &order) : number % windows, order};
}

struct blend_sample blend_next(const struct blend *b, struct source_state *sources)
{
	const int file = next_source(sources, b->num_files);
	return blend_sample_at(b, sources, file, sources[file].taken++);
}

int blend_read(const struct blend *b, const struct blend_sample *sample, int32_t *input, int32_t *target,
		int32_t *document)
{
	return read_window(&b->files[sample->file], sample->window, b->seq_len, b->shuffle ? &sample->order : NULL, input,
			target, document);
}

bool blend_has_documents(const struct blend *b)
{
	bool has = false;
	for (int i = 0; i < b->num_files; i++)
		has |= b->files[i].document_mask;
	return has;
}

void blend_note_tokenizer(const struct blend *b)
{
	const char *name = b->files[0].tokenizer;
	for (int i = 1; i < b->num_files; i++)
		if (!*b->files[i].tokenizer || b->files[i].tokenizer_hash != b->files[0].tokenizer_hash)
			name = "";
	fprintf(stderr, "note: without data.tokenizer the checkpoints have no tokenizer, which `ling generate` and GGUF "
			"files need: add data.tokenizer: %s\n", *name ? name : "with the tokenizer that made the data");
}

int blend_check_tokenizer(const struct blend *b, const char *name, const char *dir)
{
	for (int i = 0; i < b->num_files; i++)
		if (!*b->files[i].tokenizer)
			return fail("%s: data.tokenizer was none in the checkpoint, found %s; expected the same, for %s has no "
					"manifest that says which tokenizer made it: set it back, or choose a new train.output_dir", dir,
					name, b->files[i].path);
	return 0;
}
