/*
 * files/tokenizer_training.h - training a byte-level BPE tokenizer.
 */
#ifndef LING_FILES_TOKENIZER_TRAINING_H
#define LING_FILES_TOKENIZER_TRAINING_H

#include <stdint.h>

/* -- training a tokenizer -- */

struct tokenizer_training {
	int vocab_size;              /* with the special tokens */
	const char *pattern;         /* cuts text into words, in the dialect of a tokenizer.json; NULL: Ling's */
	const char **special;        /* tokens beside <|endoftext|>, <role> and </role> */
	int num_special;
	int num_files;
	char **files;                /* text, and JSON lines as tokenize_files reads them */
};
struct tokenizer_trained { int vocab_size; int64_t bytes, words, merges; }; /* words: distinct ones; vocab_size is less than asked for when no pairs are left */
/* Trains a byte-level BPE as Hugging Face's BpeTrainer does: again and again the pair with the highest count is merged, of equals the one of smaller
 * ids. Writes it as a tokenizer.json. The result is the same for any number of processors. Text is taken in pieces of about 256 KiB that end with a
 * line. Memory is that of the distinct words. */
int tokenizer_train(const char *path, const struct tokenizer_training *how, struct tokenizer_trained *result);

#endif
