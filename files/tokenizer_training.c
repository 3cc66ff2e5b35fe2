/*
 * files/tokenizer_training.c - training a byte-level BPE tokenizer.
 *
 * Threads count the distinct words of the texts. Then, on one thread, each word is a list of symbols, at first its
 * bytes; of all pairs of neighbouring symbols the one with the highest count becomes a new symbol in every word, again
 * and again. A heap holds the pairs by count; each pair knows the words that it may be in: a merge visits only those.
 */
#define _GNU_SOURCE
#include "files/tokenizer_training.h"

#include "files/base.h"
#include "files/collections.h"
#include "files/encoder.h"
#include "files/text.h"
#include "files/tokenizer.h"
#include "files/tokenizer_json.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct pair {
	int32_t left, right;         /* symbols, which are token ids */
	uint64_t count;              /* in all texts */
	uint32_t *word;              /* [num_words] numbers of the words that it is, or was, in; some more than once */
	size_t num_words, capacity;
	bool risen;                  /* its count has grown since the last merge */
};

/* A pair in the heap. count: that of the pair when it was put there. */
struct candidate { uint64_t count; int32_t left, right; size_t pair; };

struct pairs {
	struct hash_table numbers;   /* of the pairs */
	struct pair *pair;           /* [count] */
	size_t count, capacity;
	struct candidate *heap;      /* [num_candidates] the best first; an outdated count is seen when it comes up */
	size_t num_candidates, heap_capacity;
	size_t *risen;               /* [num_risen] numbers of the pairs that are `risen` */
	size_t num_risen, risen_capacity;
};

/* A word: its symbols, from `begin` on in an array of all words' symbols, and how often it is in the texts. */
struct training_word { size_t begin; int32_t length; uint64_t count; };

/* Whether candidate a is merged before candidate b. */
static bool better(const void *a, const void *b, const void *context)
{
	const struct candidate *x = a, *y = b;
	(void)context;
	return x->count != y->count ? x->count > y->count : x->left != y->left ? x->left < y->left : x->right < y->right;
}

static void push_candidate(struct pairs *p, size_t number)
{
	const struct pair *pair = &p->pair[number];
	const struct candidate c = {pair->count, pair->left, pair->right, number};
	p->heap = grow(p->heap, p->num_candidates, &p->heap_capacity, 1, sizeof *p->heap);
	heap_raise(p->heap, p->num_candidates++, sizeof c, &c, better, NULL);
}

static struct candidate pop_candidate(struct pairs *p)
{
	const struct candidate best = p->heap[0], last = p->heap[--p->num_candidates];
	heap_sink(p->heap, 0, p->num_candidates, sizeof last, &last, better, NULL);
	return best;
}

static uint64_t hash_of_pair(const void *pairs, size_t number)
{
	const struct pair *pair = (const struct pair *)pairs + number;
	return hash_bytes((int32_t[]){pair->left, pair->right}, 8);
}

static bool same_pair(const void *pairs, size_t number, const void *symbols)
{
	const struct pair *pair = (const struct pair *)pairs + number;
	const int32_t *s = symbols;
	return pair->left == s[0] && pair->right == s[1];
}

/* The number of a pair, which is added if it is new. */
static size_t pair_number(struct pairs *p, int32_t left, int32_t right)
{
	const int32_t symbols[2] = {left, right};
	const size_t number = hash_table_add(&p->numbers, hash_bytes(symbols, sizeof symbols), symbols, p->pair,
			same_pair, hash_of_pair);
	if (number == p->count) {
		p->pair = grow(p->pair, p->count, &p->capacity, 1, sizeof *p->pair);
		p->pair[p->count++] = (struct pair){.left = left, .right = right};
	}
	return number;
}

/* Counts a pair once more in a word that is `count` times in the texts. */
static void add_pair(struct pairs *p, int32_t left, int32_t right, uint32_t word, uint64_t count)
{
	const size_t number = pair_number(p, left, right);
	struct pair *pair = &p->pair[number];
	pair->count += count;
	if (!pair->num_words || pair->word[pair->num_words - 1] != word) {
		pair->word = grow(pair->word, pair->num_words, &pair->capacity, 1, sizeof *pair->word);
		pair->word[pair->num_words++] = word;
	}
	if (!pair->risen) {
		pair->risen = true;
		p->risen = grow(p->risen, p->num_risen, &p->risen_capacity, 1, sizeof *p->risen);
		p->risen[p->num_risen++] = number;
	}
}

/* Puts the pairs whose counts have grown into the heap. */
static void push_risen(struct pairs *p)
{
	for (size_t i = 0; i < p->num_risen; i++) {
		p->pair[p->risen[i]].risen = false;
		push_candidate(p, p->risen[i]);
	}
	p->num_risen = 0;
}

/* Replaces a pair by the symbol `merged` in all words. */
static void merge_pair(struct pairs *p, size_t number, int32_t merged, struct training_word *words, int32_t *symbols)
{
	const struct pair pair = p->pair[number]; /* a copy: p->pair may move */
	p->pair[number].word = NULL;
	p->pair[number].num_words = p->pair[number].capacity = 0;
	for (size_t k = 0; k < pair.num_words; k++) {
		struct training_word *w = &words[pair.word[k]];
		int32_t *s = symbols + w->begin;
		int32_t n = 0;
		for (int32_t i = 0; i < w->length; i++) {
			if (i + 1 < w->length && s[i] == pair.left && s[i + 1] == pair.right) {
				if (n) {
					p->pair[pair_number(p, s[n - 1], pair.left)].count -= w->count;
					add_pair(p, s[n - 1], merged, pair.word[k], w->count);
				}
				if (i + 2 < w->length) {
					p->pair[pair_number(p, pair.right, s[i + 2])].count -= w->count;
					add_pair(p, merged, s[i + 2], pair.word[k], w->count);
				}
				s[n++] = merged, i++;
			} else
				s[n++] = s[i];
		}
		w->length = n;
	}
	free(pair.word);
	p->pair[number].count = 0;
	push_risen(p);
}

/* Adds the tokens of single bytes in the order of the alphabet's characters. id_of: of each byte. */
static void add_byte_tokens(struct string_table *tokens, int32_t id_of[256])
{
	for (int other = 0; other < 2; other++) /* bytes whose characters are below U+0100, then the others */
		for (int b = 0; b < 256; b++) {
			struct text character = {0};
			byte_alphabet_append(&character, &(char){b}, 1);
			if ((character.size == 2 && (uint8_t)character.data[0] >= 0xC4) == other)
				id_of[b] = string_table_add(tokens, &(char){b}, 1, 0);
			free(character.data);
		}
}

/* Adds the tokens of bytes, then merges until there are `size` tokens or no pairs. `merges` gets the two ids of each
 * merge. */
static void learn_merges(struct string_table *tokens, const struct string_table *counted, size_t size,
		struct ids *merges)
{
	int32_t id_of[256];
	add_byte_tokens(tokens, id_of);
	struct training_word *words = allocate(counted->count * sizeof *words);
	int32_t *symbols = allocate(counted->bytes.size * sizeof *symbols);
	struct pairs p = {0};
	for (size_t i = 0; i < counted->count; i++) {
		const struct string_entry *c = &counted->entry[i];
		words[i] = (struct training_word){c->at, c->size, c->count};
		for (size_t k = c->at; k < c->at + c->size; k++) {
			symbols[k] = id_of[(uint8_t)counted->bytes.data[k]];
			if (k > c->at)
				add_pair(&p, symbols[k - 1], symbols[k], i, c->count);
		}
	}
	push_risen(&p);
	const int64_t most = size > tokens->count ? size - tokens->count : 0;
	struct progress shown = progress_start("train-tokenizer: merging", most, 1, "tokens");
	struct text merged = {0};
	while (tokens->count < size && p.num_candidates) {
		const struct candidate best = pop_candidate(&p);
		const uint64_t count = p.pair[best.pair].count;
		if (count != best.count) {
			if (count)
				push_candidate(&p, best.pair);
			continue;
		}
		if (!count)
			continue;
		merged.size = 0;
		for (int side = 0; side < 2; side++) {
			const struct string_entry *part = &tokens->entry[side ? best.right : best.left];
			text_append(&merged, tokens->bytes.data + part->at, part->size);
		}
		append_id(merges, best.left), append_id(merges, best.right);
		merge_pair(&p, best.pair, string_table_add(tokens, merged.data, merged.size, 0), words, symbols);
		progress(&shown, 1);
	}
	progress_end(&shown);
	for (size_t i = 0; i < p.count; i++)
		free(p.pair[i].word);
	free(p.numbers.slot), free(p.pair), free(p.heap), free(p.risen), free(words), free(symbols), free(merged.data);
}

/* A tokenizer.json as Hugging Face's library writes it. NULL when a special token or the pattern is not UTF-8. */
static json_t *tokenizer_to_json(const struct tokenizer_training *how, const struct string_table *tokens,
		const struct ids *merges)
{
	static const char *const chat_tokens[] = {"<|endoftext|>", "<role>", "</role>"};
	json_t *vocab = json_object(), *list = json_array(), *added = json_array();
	struct text text = {0};
	for (size_t i = 0; i < tokens->count; i++) {
		text.size = 0;
		byte_alphabet_append(&text, tokens->bytes.data + tokens->entry[i].at, tokens->entry[i].size);
		json_object_setn_new(vocab, text.data, text.size, json_integer(i));
	}
	for (int64_t i = 0; i < merges->count; i += 2) {
		text.size = 0;
		for (int side = 0; side < 2; side++) {
			const struct string_entry *part = &tokens->entry[merges->id[i + side]];
			text_append_string(&text, side ? " " : "");
			byte_alphabet_append(&text, tokens->bytes.data + part->at, part->size);
		}
		json_array_append_new(list, json_stringn(text.data, text.size));
	}
	free(text.data);
	bool valid = true;
	for (int i = 0; i < 3 + how->num_special; i++)
		valid &= 0 == json_array_append_new(added, json_pack("{s:I, s:s, s:b, s:b, s:b, s:b, s:b}",
				"id", (json_int_t)(tokens->count + i), "content", i < 3 ? chat_tokens[i] : how->special[i - 3],
				"single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special", 1));
	json_t *split = json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split",
			"pattern", "Regex", how->pattern ? how->pattern : LING_PATTERN, "behavior", "Isolated", "invert", 0);
	json_t *model = json_pack("{s:s, s:n, s:n, s:n, s:n, s:b, s:b, s:b, s:o, s:o}", "type", "BPE", "dropout",
			"unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0,
			"ignore_merges", 0,
			"vocab", vocab, "merges", list);
	json_t *root = json_pack("{s:s, s:n, s:n, s:o, s:n, s:{s:s, s:[o, {s:s, s:b, s:b, s:b}]}, s:n, "
			"s:{s:s, s:b, s:b, s:b}, s:o}",
			"version", "1.0", "truncation", "padding", "added_tokens", added, "normalizer",
			"pre_tokenizer", "type", "Sequence", "pretokenizers", split,
			"type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0,
			"post_processor", "decoder", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1, "use_regex", 0,
			"model", model);
	if (!valid) {
		json_decref(root);
		root = NULL;
	}
	return root;
}

/* Adds the words of all inputs, as the tokenizer cuts them, to *all. */
static int count_words(const struct tokenizer *t, struct input *in, struct string_table *all)
{
	struct encoder_pool pool = {.tokenizer = t};
	int64_t n;
	int rc = 0;
	for (size_t done = 0; !rc && (n = input_read(in, done)) != 0; done = in->begin) {
		struct encoded_block *results = allocate((n < 0 ? 0 : n) * sizeof *results);
		rc = n < 0 ? -1 : 0;
		#pragma omp parallel for schedule(dynamic)
		for (int64_t i = 0; i < n; i++) {
			const struct block *b = &in->blocks[i];
			struct encoder *e = encoder_take(&pool);
			encoder_count_words(e);
			if (b->line)
				encode_lines(e, in, b, false, &results[i]);
			else { /* as if the block were a file */
				const struct block alone = {.path = b->path, .file_end = b->end, .file_complete = true};
				encode_text(e, in, &alone, b->begin, SIZE_MAX, b->end, false, &results[i]);
			}
			encoder_give(&pool, e);
		}
		for (int64_t i = 0; i < n; i++) {
			if (!rc)
				input_count_skipped(in, &results[i]);
			if (!rc && results[i].error)
				rc = fail("%s", results[i].error);
			encoded_block_free(&results[i]);
		}
		free(results);
	}
	progress_end(&in->progress);
	input_say_skipped(in);
	for (size_t k = 0; k < pool.count; k++) {
		const struct string_table *words = encoder_count_words(pool.idle[k]);
		for (size_t i = 0; !rc && i < words->count; i++) {
			const struct string_entry *word = &words->entry[i];
			rc = string_table_add(all, words->bytes.data + word->at, word->size, word->count) < 0 ? -1 : 0;
		}
	}
	encoder_pool_close(&pool);
	return rc;
}

int tokenizer_train(const char *path, const struct tokenizer_training *how, struct tokenizer_trained *result)
{
	char output[1][PATH_LEN], dir[PATH_LEN];
	struct string_table tokens = {0}, all = {0};
	struct ids merges = {0};
	int64_t total = 0;
	const int smallest = 256 + 3 + how->num_special;
	if (how->vocab_size < smallest || how->vocab_size > MAX_VOCAB)
		return fail("a vocabulary of %d tokens: expected %d, of which 256 are bytes and %d are special, to %d",
				how->vocab_size, smallest, 3 + how->num_special, MAX_VOCAB);
	if (path_copy(output[0], path) < 0)
		return -1;
	parent_of(dir, path);
	if (inputs_check(how->num_files, how->files, &how->options, output, 1, &total) < 0 || make_directories(dir) < 0)
		return -1;
	/* the tokenizer without merges: it cuts the text, and reading it finds what is wrong with a pattern or a special
	 * token */
	learn_merges(&tokens, &all, 0, &merges);
	json_t *root = tokenizer_to_json(how, &tokens, &merges);
	struct tokenizer *t = root ? tokenizer_from_json(path, root) : NULL;
	int rc = t ? 0 : root ? -1 : fail("a special token or the pattern is not UTF-8");
	struct new_file file = {0};
	if (!rc)
		rc = new_file_begin(&file, path); /* not only at the end: two would work for one file for hours */
	struct input in = {.files = how->files, .num_files = how->num_files, .options = how->options,
			.progress = progress_start("train-tokenizer", total, 1e-6, "MB")};
	if (!rc)
		rc = count_words(t, &in, &all);
	if (!rc && !all.count)
		rc = fail("%s: nothing to learn from: no text in %d input file%s", path, how->num_files,
				how->num_files == 1 ? "" : "s");
	if (!rc) {
		string_table_free(&tokens);
		learn_merges(&tokens, &all, how->vocab_size - 3 - how->num_special, &merges);
		json_decref(root);
		root = tokenizer_to_json(how, &tokens, &merges);
		tokenizer_close(t);
		t = tokenizer_from_json(path, root); /* fails when merges made a token that is also a special one */
		rc = t ? 0 : -1;
	}
	if (!rc)
		json_print(file.stream, root);
	rc = new_file_publish(&file, rc);
	*result = (struct tokenizer_trained){.vocab_size = tokens.count + 3 + how->num_special, .bytes = in.progress.done,
		.words = all.count, .merges = merges.count / 2, .lines_skipped = in.lines_skipped};
	json_decref(root);
	input_close(&in);
	tokenizer_close(t);
	string_table_free(&tokens), string_table_free(&all), free(merges.id);
	return rc;
}
