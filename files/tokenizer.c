/*
 * files/tokenizer.c - tokenizers: opening them, and what their ids stand for.
 */
#define _GNU_SOURCE
#include "files/tokenizer.h"

#include "files/base.h"
#include "files/tokenizer_json.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <zlib.h>

#define BYTE_DEFINITION "a byte is its token, 256 ends a document" /* the byte tokenizer's hash is made from this */

void append_id(struct ids *out, int32_t id)
{
	out->id = grow(out->id, out->count, &out->capacity, 1, sizeof *out->id);
	out->id[out->count++] = id;
}

void append_ids(struct ids *out, const int32_t *id, int64_t n)
{
	out->id = grow(out->id, out->count, &out->capacity, n, sizeof *id);
	if (n)
		memcpy(out->id + out->count, id, n * sizeof *id);
	out->count += n;
}

/* -- opening -- */

int tokenizer_path(char out[PATH_LEN], const char *name)
{
	struct stat st;
	if (stat(name, &st) < 0)
		return fail("tokenizer `%s`: %s; expected byte, a tokenizer.json, or a directory that holds one", name,
				strerror(errno));
	if (S_ISDIR(st.st_mode))
		return path_join(out, name, "tokenizer.json");
	return path_copy(out, name);
}

struct tokenizer *tokenizer_open(const char *name)
{
	if (!strcmp(name, BYTE_TOKENIZER)) {
		struct tokenizer *t = allocate(sizeof *t);
		*t = (struct tokenizer){.bytes_only = true, .size = BYTE_VOCAB, .end = BYTE_END, .context_free = true,
			.hash = byte_tokenizer_hash(), .old_hash = byte_tokenizer_hash()};
		return t;
	}
	char path[PATH_LEN];
	json_t *root = tokenizer_path(path, name) < 0 ? NULL : json_read(path);
	struct tokenizer *t = root ? tokenizer_from_json(path, root) : NULL;
	json_decref(root);
	return t;
}

uint32_t byte_tokenizer_hash(void)
{
	return crc32(0, (const uint8_t *)BYTE_DEFINITION, strlen(BYTE_DEFINITION));
}

void tokenizer_close(struct tokenizer *t)
{
	if (t)
		tokenizer_free(t);
}

/* Where the tokenizer has no chat template beside it, the model's holds. */
static int add_chat_template(struct tokenizer **t, const char *dir)
{
	if (!*t)
		return -1;
	if ((*t)->chat_template || chat_template_read(dir, &(*t)->chat_template) == 0)
		return 1;
	tokenizer_close(*t);
	*t = NULL;
	return -1;
}

int tokenizer_find(struct tokenizer **out, const char *dir, const char *name)
{
	char path[PATH_LEN];
	*out = NULL;
	if (name) {
		*out = tokenizer_open(name);
		return add_chat_template(out, dir);
	}
	int there = path_join(path, dir, "tokenizer.json") < 0 ? -1 : path_exists(path);
	if (there > 0)
		return (*out = tokenizer_open(path)) ? 1 : -1;
	if (there == 0)
		there = path_join(path, dir, "trainer.json") < 0 ? -1 : path_exists(path);
	json_t *root = there > 0 ? json_read(path) : NULL;
	if (there < 0 || (there && !root))
		return -1;
	const char *named = json_string_value(json_at(root, "config.data.tokenizer"));
	int rc = 0;
	if (named && strcmp(named, "none")) {
		*out = tokenizer_open(named);
		rc = add_chat_template(out, dir);
	}
	json_decref(root);
	return rc;
}

struct tokenizer *tokenizer_of_model(const char *dir, const char *name)
{
	struct tokenizer *t;
	if (tokenizer_find(&t, dir, name) == 0)
		set_error("%s: no tokenizer here: looked for tokenizer.json, and for data.tokenizer in trainer.json; name one "
				"with --tokenizer", dir);
	return t;
}

/* -- what a tokenizer says of itself -- */

int tokenizer_size(const struct tokenizer *t)
{
	return t->size;
}

uint32_t tokenizer_hash(const struct tokenizer *t)
{
	return t->hash;
}

uint32_t tokenizer_old_hash(const struct tokenizer *t)
{
	return t->old_hash;
}

bool tokenizer_has_hash(const struct tokenizer *t, uint32_t hash)
{
	return hash == t->hash || hash == t->old_hash;
}

int32_t tokenizer_end(const struct tokenizer *t)
{
	return t->end;
}

int32_t tokenizer_id(const struct tokenizer *t, const char *token)
{
	if (t->bytes_only)
		return strlen(token) == 1 ? (uint8_t)*token : -1;
	return token_of_text(t, token, strlen(token));
}

int tokenizer_bytes(const struct tokenizer *t, int32_t id)
{
	if (t->bytes_only)
		return id >= 0 && id < BYTE_END;
	return id >= 0 && id < t->size && !t->tokens[id].special ? (int)t->tokens[id].size : 0;
}

void tokenizer_decode(const struct tokenizer *t, int32_t id, bool special, struct text *out)
{
	if (t->bytes_only)
		text_append(out, &(char){id}, id >= 0 && id < BYTE_END);
	else if (id >= 0 && id < t->size && (special || !t->tokens[id].special))
		text_append(out, t->bytes.data + t->tokens[id].at, t->tokens[id].size);
	else
		text_append(out, "", 0);
}
