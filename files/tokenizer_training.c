/*
 * files/tokenizer_training.c - training a byte-level BPE tokenizer.
 */
#define _GNU_SOURCE
#include "files/tokenizer_training.h"

#include "files/base.h"
#include "files/tokenizer.h"
#include "files/text.h"

#include <errno.h>
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct pair {
	int32_t left, right;
	uint64_t count;
	uint32_t *word;              /* numbers of the words that it is, or was, in */
	size_t words, room;
	bool risen;                  /* its count has, since the last merge */
};

struct candidate { uint64_t count; int32_t left, right; size_t pair; };

struct pairs {
	struct pair *pair;
	size_t count, capacity;
	uint32_t *slot;              /* number of a pair and 1; 0 empty; a power of two of them */
	size_t mask;
	struct candidate *heap;      /* the best first; a count that is out of date is seen when it comes up */
	size_t candidates, heap_room;
	size_t *risen;               /* pairs whose count has */
	size_t num_risen, risen_room;
};

struct training_word { size_t begin; int32_t length; uint64_t count; }; /* its symbols, from `begin` on in an array of all */

static bool better(const struct candidate *a, const struct candidate *b)
{
	return a->count != b->count ? a->count > b->count : a->left != b->left ? a->left < b->left : a->right < b->right;
}

static void push_candidate(struct pairs *p, size_t number)
{
	const struct pair *pair = &p->pair[number];
	const struct candidate c = {pair->count, pair->left, pair->right, number};
	p->heap = grow(p->heap, p->candidates, &p->heap_room, 1, sizeof *p->heap);
	size_t i = p->candidates++;
	for (; i && better(&c, &p->heap[(i - 1) / 2]); i = (i - 1) / 2)
		p->heap[i] = p->heap[(i - 1) / 2];
	p->heap[i] = c;
}

static struct candidate pop_candidate(struct pairs *p)
{
	const struct candidate top = p->heap[0], last = p->heap[--p->candidates];
	size_t i = 0;
	for (size_t child; (child = 2 * i + 1) < p->candidates; i = child) {
		child += child + 1 < p->candidates && better(&p->heap[child + 1], &p->heap[child]);
		if (!better(&p->heap[child], &last))
			break;
		p->heap[i] = p->heap[child];
	}
	p->heap[i] = last;
	return top;
}

/* The number of a pair, which is new if need be. */
static size_t pair_number(struct pairs *p, int32_t left, int32_t right)
{
	if (!p->slot || 2 * p->count >= p->mask) {
		free(p->slot);
		p->mask = p->mask ? 2 * p->mask + 1 : (1 << 16) - 1;
		p->slot = allocate((p->mask + 1) * sizeof *p->slot);
		for (size_t k = 0; k < p->count; k++) {
			size_t i = hash_text((char *)(int32_t[]){p->pair[k].left, p->pair[k].right}, 8);
			while (p->slot[i & p->mask])
				i++;
			p->slot[i & p->mask] = k + 1;
		}
	}
	for (size_t i = hash_text((char *)(int32_t[]){left, right}, 8);; i++) {
		uint32_t *slot = &p->slot[i & p->mask];
		if (*slot && (p->pair[*slot - 1].left != left || p->pair[*slot - 1].right != right))
			continue;
		if (!*slot) {
			p->pair = grow(p->pair, p->count, &p->capacity, 1, sizeof *p->pair);
			p->pair[p->count] = (struct pair){.left = left, .right = right};
			*slot = ++p->count;
		}
		return *slot - 1;
	}
}

/* A pair stands once more in a word that stands `count` times in the texts. */
static void add_pair(struct pairs *p, int32_t left, int32_t right, uint32_t word, uint64_t count)
{
	const size_t number = pair_number(p, left, right);
	struct pair *pair = &p->pair[number];
	pair->count += count;
	if (!pair->words || pair->word[pair->words - 1] != word) {
		pair->word = grow(pair->word, pair->words, &pair->room, 1, sizeof *pair->word);
		pair->word[pair->words++] = word;
	}
	if (!pair->risen) {
		pair->risen = true;
		p->risen = grow(p->risen, p->num_risen, &p->risen_room, 1, sizeof *p->risen);
		p->risen[p->num_risen++] = number;
	}
}

static void push_risen(struct pairs *p)
{
	for (size_t i = 0; i < p->num_risen; i++) {
		p->pair[p->risen[i]].risen = false;
		push_candidate(p, p->risen[i]);
	}
	p->num_risen = 0;
}

/* Replaces a pair by `product` in all words. */
static void merge_pair(struct pairs *p, size_t number, int32_t product, struct training_word *words, int32_t *symbols)
{
	const struct pair merged = p->pair[number];
	p->pair[number].word = NULL;
	p->pair[number].words = p->pair[number].room = 0;
	for (size_t k = 0; k < merged.words; k++) {
		struct training_word *w = &words[merged.word[k]];
		int32_t *s = symbols + w->begin;
		int32_t n = 0;
		for (int32_t i = 0; i < w->length; i++) {
			if (i + 1 < w->length && s[i] == merged.left && s[i + 1] == merged.right) {
				if (n) {
					p->pair[pair_number(p, s[n - 1], merged.left)].count -= w->count;
					add_pair(p, s[n - 1], product, merged.word[k], w->count);
				}
				if (i + 2 < w->length) {
					p->pair[pair_number(p, merged.right, s[i + 2])].count -= w->count;
					add_pair(p, product, s[i + 2], merged.word[k], w->count);
				}
				s[n++] = product, i++;
			} else
				s[n++] = s[i];
		}
		w->length = n;
	}
	free(merged.word);
	p->pair[number].count = 0;
	push_risen(p);
}

/* The tokens of the alphabet, in the order of its characters; alphabet[i]: the byte of token i. */
static void make_alphabet(struct words *tokens, int32_t id_of[256])
{
	int32_t id = 0;
	for (int high = 0; high < 2; high++) /* bytes that are their own character, then the others */
		for (int b = 0; b < 256; b++) {
			struct text character = {0};
			alphabet_encode(&character, &(char){b}, 1);
			if ((character.size == 2 && (uint8_t)character.data[0] >= 0xC4) == high) {
				words_add(tokens, &(char){b}, 1, 0);
				id_of[b] = id++;
			}
			free(character.data);
		}
}

/* Merges until there are `size` tokens or no pairs; `merges` gets the two ids of each. */
static void learn_merges(struct words *tokens, const struct words *counted, size_t size, struct ids *merges)
{
	int32_t id_of[256];
	make_alphabet(tokens, id_of);
	struct training_word *words = allocate(counted->count * sizeof *words);
	int32_t *symbols = allocate(counted->bytes.size * sizeof *symbols);
	struct pairs p = {0};
	for (size_t i = 0; i < counted->count; i++) {
		const struct counted *c = &counted->word[i];
		words[i] = (struct training_word){c->at, c->size, c->count};
		for (size_t k = c->at; k < c->at + c->size; k++) {
			symbols[k] = id_of[(uint8_t)counted->bytes.data[k]];
			if (k > c->at)
				add_pair(&p, symbols[k - 1], symbols[k], i, c->count);
		}
	}
	push_risen(&p);
	struct progress shown = progress_start("train-tokenizer: merging", size > tokens->count ? size - tokens->count : 0, 1, "tokens");
	struct text product = {0};
	while (tokens->count < size && p.candidates) {
		const struct candidate best = pop_candidate(&p);
		const uint64_t count = p.pair[best.pair].count;
		if (count != best.count) {
			if (count)
				push_candidate(&p, best.pair);
			continue;
		}
		if (!count)
			continue;
		product.size = 0;
		for (int side = 0; side < 2; side++) {
			const struct counted *part = &tokens->word[side ? best.right : best.left];
			text_append(&product, tokens->bytes.data + part->at, part->size);
		}
		put_id(merges, best.left), put_id(merges, best.right);
		merge_pair(&p, best.pair, words_add(tokens, product.data, product.size, 0), words, symbols);
		progress(&shown, 1);
	}
	progress_end(&shown);
	for (size_t i = 0; i < p.count; i++)
		free(p.pair[i].word);
	free(p.pair), free(p.slot), free(p.heap), free(p.risen), free(words), free(symbols), free(product.data);
}

/* A tokenizer.json as Hugging Face's library writes it. NULL when a special token or the pattern is not UTF-8. */
static json_t *tokenizer_to_json(const struct tokenizer_training *how, const struct words *tokens, const struct ids *merges)
{
	static const char *const form[] = {"<|endoftext|>", "<role>", "</role>"};
	json_t *vocab = json_object(), *list = json_array(), *added = json_array();
	struct text text = {0};
	for (size_t i = 0; i < tokens->count; i++) {
		text.size = 0;
		alphabet_encode(&text, tokens->bytes.data + tokens->word[i].at, tokens->word[i].size);
		json_object_setn_new(vocab, text.data, text.size, json_integer(i));
	}
	for (int64_t i = 0; i < merges->count; i += 2) {
		text.size = 0;
		for (int side = 0; side < 2; side++) {
			const struct counted *part = &tokens->word[merges->id[i + side]];
			append_string(&text, side ? " " : "");
			alphabet_encode(&text, tokens->bytes.data + part->at, part->size);
		}
		json_array_append_new(list, json_stringn(text.data, text.size));
	}
	free(text.data);
	bool valid = true;
	for (int i = 0; i < 3 + how->num_special; i++)
		valid &= 0 == json_array_append_new(added, json_pack("{s:I, s:s, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)(tokens->count + i),
				"content", i < 3 ? form[i] : how->special[i - 3], "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1));
	json_t *root = json_pack("{s:s, s:n, s:n, s:o, s:n, s:{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, {s:s, s:b, s:b, s:b}]}, s:n, s:{s:s, s:b, s:b, s:b}, "
			"s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:o}}",
			"version", "1.0", "truncation", "padding", "added_tokens", added, "normalizer",
			"pre_tokenizer", "type", "Sequence", "pretokenizers", "type", "Split", "pattern", "Regex", how->pattern ? how->pattern : LING_PATTERN,
			"behavior", "Isolated", "invert", 0, "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0,
			"post_processor", "decoder", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0,
			"model", "type", "BPE", "dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0,
			"ignore_merges", 0, "vocab", vocab, "merges", list);
	if (!valid) {
		json_decref(root);
		root = NULL;
	}
	return root;
}

/* Counts the words of all inputs, as the tokenizer cuts them, in *all. */
static int count_words(const struct tokenizer *t, struct input *in, struct words *all)
{
	struct encoders encoders = {.tokenizer = t};
	int64_t n;
	int rc = 0;
	for (size_t done = 0; !rc && (n = input_read(in, done)) != 0; done = in->begin) {
		char **errors = allocate((n < 0 ? 0 : n) * sizeof *errors);
		rc = n < 0 ? -1 : 0;
		#pragma omp parallel for schedule(dynamic)
		for (int64_t i = 0; i < n; i++) {
			const struct block *b = &in->blocks[i];
			struct encoder *e = encoder_take(&encoders);
			struct encoded r = {0};
			if (!e->words)
				e->words = allocate(sizeof *e->words);
			if (b->line)
				encode_lines(e, in, b, false, &r);
			else
				encode_text(e, in, &(struct block){.path = b->path, .known = b->end, .whole = true}, b->begin, SIZE_MAX, b->end, false, &r);
			encoder_give(&encoders, e);
			errors[i] = r.error;
			r.error = NULL;
			encoded_free(&r);
		}
		for (int64_t i = 0; i < n; i++) {
			if (!rc && errors[i])
				rc = fail("%s", errors[i]);
			free(errors[i]);
		}
		free(errors);
	}
	progress_end(&in->progress);
	for (const struct encoder *e = encoders.first; e; e = e->next)
		for (size_t i = 0; !rc && e->words && i < e->words->count; i++) {
			const struct counted *c = &e->words->word[i];
			rc = words_add(all, e->words->bytes.data + c->at, c->size, c->count) < 0 ? -1 : 0;
		}
	encoders_close(&encoders);
	return rc;
}

int tokenizer_train(const char *path, const struct tokenizer_training *how, struct tokenizer_trained *result)
{
	char output[1][PATH_LEN], dir[PATH_LEN];
	struct words tokens = {0}, all = {0};
	struct ids merges = {0};
	int64_t total = 0;
	const int smallest = 256 + 3 + how->num_special;
	if (how->vocab_size < smallest || how->vocab_size > MAX_VOCAB)
		return fail("a vocabulary of %d tokens: expected %d, of which 256 are bytes and %d are special, to %d", how->vocab_size, smallest,
				3 + how->num_special, MAX_VOCAB);
	if (path_copy(output[0], path) < 0)
		return -1;
	parent_of(dir, path);
	if (inputs_check(how->num_files, how->files, output, 1, &total) < 0 || make_directories(dir) < 0)
		return -1;
	/* What the tokenizer will be, less the merges: it cuts the text, and its reader finds what is wrong with a pattern or a special token. */
	struct tokenizer *t = allocate(sizeof *t);
	learn_merges(&tokens, &all, 0, &merges);
	json_t *root = tokenizer_to_json(how, &tokens, &merges);
	int rc = root ? read_tokenizer(t, path, root) : fail("a special token or the pattern is not UTF-8");
	struct input in = {.files = how->files, .num_files = how->num_files, .fd = -1, .progress = progress_start("train-tokenizer", total, 1e-6, "MB")};
	if (!rc)
		rc = count_words(t, &in, &all);
	if (!rc && !all.count)
		rc = fail("%s: nothing to learn from: no text in %d input file%s", path, how->num_files, how->num_files == 1 ? "" : "s");
	if (!rc) {
		words_free(&tokens);
		tokens = (struct words){0};
		learn_merges(&tokens, &all, how->vocab_size - 3 - how->num_special, &merges);
		json_decref(root);
		root = tokenizer_to_json(how, &tokens, &merges);
		tokenizer_close(t);
		t = allocate(sizeof *t);
		rc = read_tokenizer(t, path, root) < 0 ? -1 : json_write(path, root); /* a special token may have been learned too */
	}
	*result = (struct tokenizer_trained){(int)tokens.count + 3 + how->num_special, in.progress.done, (int64_t)all.count, merges.count / 2};
	json_decref(root);
	input_close(&in);
	tokenizer_close(t);
	words_free(&tokens), words_free(&all), free(merges.id);
	return rc;
}
