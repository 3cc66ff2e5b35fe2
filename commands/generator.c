/*
 * commands/generator.c - a model that is open for generation, with its tokenizer: what `ling generate` and `ling chat`
 * share.
 */
#define _GNU_SOURCE
#include "commands/generator.h"

#include "files/base.h"
#include "files/checkpoint.h"
#include "files/encoder.h"
#include "files/safetensors.h"
#include "files/tensors.h"
#include "files/tokenizer.h"
#include "files/unicode.h"
#include "parallel.h"
#include "ling.h"
#include "commands/engine.h"

#include <stdlib.h>
#include <string.h>

int check_sampling(const struct command_line *line, const struct sampling *s)
{
	if (s->temperature == 0 && (option_given(line, "top-k") || option_given(line, "top-p") ||
			option_given(line, "seed")))
		return fail("--top-k, --top-p and --seed go with a --temperature above 0; without it the most likely token is "
				"taken");
	return 0;
}

int generator_open(struct generator *g, const char *name, const char *tokenizer, const char *chat_form, bool chat,
		int seq_len)
{
	*g = (struct generator){.layout = layout_of_rank(0, 1, 1, 1)};
	if (find_model(g->dir, name) < 0 || config_from_huggingface(&g->config, g->dir) < 0)
		return -1;
	g->positions = seq_len ? seq_len : default_sequence(&g->config);
	if (seq_len > longest_sequence(&g->config))
		return fail("%s: --seq-len %d is more than the model's longest sequence, %d", g->dir, seq_len,
				longest_sequence(&g->config));
	g->tokenizer = tokenizer_of_model(g->dir, tokenizer);
	if (!g->tokenizer)
		return -1;
	if (tokenizer_size(g->tokenizer) > g->config.vocab_size)
		return fail("%s: the tokenizer has %d ids, the model's vocabulary %d: it is not this model's", g->dir,
				tokenizer_size(g->tokenizer), g->config.vocab_size);
	if (end_ids_read(&g->ends, g->dir) < 0 || chat_form_choose(g->tokenizer, chat_form) < 0)
		return -1;
	if (chat)
		chat_end_append(g->tokenizer, &g->ends);
	return 0;
}

int generator_load(struct generator *g, int64_t forward_tokens)
{
	const int64_t room = forward_tokens < ENGINE_TOKENS ? forward_tokens : ENGINE_TOKENS;
	if (parallel_agree(model_init(&g->model, &g->config, &g->layout, 1, (int)room, EVALUATE)) < 0)
		return -1;
	set_rope_length(&g->model, g->positions);
	return model_load(&g->model, g->dir);
}

void generator_close(struct generator *g)
{
	model_free(&g->model);
	free(g->ends.id);
	tokenizer_close(g->tokenizer);
	*g = (struct generator){0};
}

int generator_checksum(const struct generator *g, uint32_t *crc)
{
	enum { SAMPLE = 512 };         /* bytes from the middle of each tensor */
	char path[PATH_LEN];
	struct tensors *w = tensors_open(g->dir, "model");
	if (!w || path_join(path, g->dir, "config.json") < 0 || file_crc32(path, crc) < 0) {
		tensors_close(w);
		return -1;
	}
	for (int i = 0; i < tensors_count(w); i++) {
		const struct tensor *t = tensor_find(w, tensors_name(w, i));
		const uint64_t size = t->end - t->begin, n = size < SAMPLE ? size : SAMPLE;
		*crc = crc_of(*crc, (const uint8_t *)t->name, strlen(t->name));
		*crc = crc_of(*crc, (const uint8_t *)t->dtype_name, strlen(t->dtype_name));
		*crc = crc_of(*crc, (const uint8_t *)t->shape, t->num_dims * sizeof *t->shape);
		*crc = crc_of(*crc, tensor_bytes(t) + (size - n) / 2, n);
	}
	tensors_close(w);
	const uint32_t tokenizer = tokenizer_hash(g->tokenizer);
	*crc = crc_of(*crc, (const uint8_t *)&tokenizer, sizeof tokenizer);
	*crc = crc_of(*crc, (const uint8_t *)g->ends.id, g->ends.count * sizeof *g->ends.id);
	return 0;
}

size_t text_to_show(const struct request *r, size_t stop_size)
{
	const size_t held = stop_size ? stop_size - 1 : 0;
	if (r->ended == ENDED_BY_CALLER)
		return utf8_whole(r->text.data, r->text.size);
	if (r->ended)
		return r->text.size;
	return r->text.size > held ? utf8_whole(r->text.data, r->text.size - held) : 0;
}
