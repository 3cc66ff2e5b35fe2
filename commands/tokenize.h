/*
 * commands/tokenize.h - `ling tokenize`: token files from text, and text from token files.
 */
#ifndef LING_COMMANDS_TOKENIZE_H
#define LING_COMMANDS_TOKENIZE_H

#include "commands/command.h"

#include "files/text.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#ifndef SEQUENCE_MAX
#define SEQUENCE_MAX (1 << 30)   /* a longer document becomes several sequences: Megatron's lengths have 31 bits */
#endif

/* loss_tokens: tokens that the loss counts; lines_skipped: JSON lines that cannot be used */
struct tokenized { int64_t documents, tokens, bytes, loss_tokens, lines_skipped; };
/* Makes PREFIX.bin, .idx and .json from text and JSON lines, with all processors and in bounded memory: a text file
 * may be of any size. A text file is one document. So is a line of a .jsonl file, which has a `text` or is a
 * conversation (files/conversation.h), of which the loss counts only the assistant's replies; then there is also
 * PREFIX.mask.bin. With `special`, the text of a special token becomes that token, as in Hugging Face's library, but
 * never in messages: a user cannot write a role's tag. Conversations are written in the named chat form, or, with NULL,
 * in the tokenizer's. A PREFIX.json that is not a manifest is not replaced. `o` says how files
 * become texts; NULL: as usual. Shows progress, and names lines that are skipped, on stderr. */
int tokenize_files(const char *prefix, const char *tokenizer, const char *chat_form, bool special,
		const struct text_options *o, int num_files, char **files, struct tokenized *result);
/* Writes the text of a token file, special tokens included. tokenizer NULL: the one that the manifest names. */
int tokens_print(const char *prefix, const char *tokenizer, FILE *out);

extern const struct command tokenize_command;
extern const struct command train_tokenizer_command;

#endif
