/*
 * files/tokenizer_training.h - training a byte-level BPE tokenizer.
 */
#ifndef LING_FILES_TOKENIZER_TRAINING_H
#define LING_FILES_TOKENIZER_TRAINING_H

#include "files/text.h"

#include <stdint.h>

struct tokenizer_training {
	int vocab_size;              /* with the 256 bytes and the special tokens */
	const char *pattern;         /* that cuts text into words, as in a tokenizer.json; NULL: Ling's */
	const char **special;        /* [num_special] special tokens beside <|endoftext|>, <role> and </role> */
	int num_special;
	int num_files;
	char **files;                /* [num_files] text and .jsonl files, as for `ling tokenize` */
	struct text_options options; /* how the files become texts */
};
/* vocab_size is less than asked for when no pairs are left to merge. bytes: of the files; words: distinct ones;
 * lines_skipped: of JSON lines that cannot be used. */
struct tokenizer_trained { int vocab_size; int64_t bytes, words, merges, lines_skipped; };
/* Trains a byte-level BPE as Hugging Face's BpeTrainer does: again and again the pair with the highest count is
 * merged; of equal counts the pair with the smaller ids, the left one first. Writes a tokenizer.json at `path`. The
 * result does not depend on the number of threads. A text file is taken in blocks of about 256 KiB that end with a
 * line, each as if it were a file. Memory grows with the number of distinct words. */
int tokenizer_train(const char *path, const struct tokenizer_training *how, struct tokenizer_trained *result);

#endif
