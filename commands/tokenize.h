/*
 * commands/tokenize.h - `ling tokenize`: token files from text, and text from token files.
 */
#ifndef LING_COMMANDS_TOKENIZE_H
#define LING_COMMANDS_TOKENIZE_H

#include "commands/command.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct tokenized { int64_t documents, tokens, bytes, loss_tokens; }; /* loss_tokens: those that the loss counts */
/* Turns text and JSONL files into PREFIX.bin, .idx and .json, with all processors and in bounded memory: a text file may be of any size. With `special`,
 * as Hugging Face does, the text of a special token becomes that token, but not in messages: a user's words cannot pass for a role.
 * A text file is one document; so is a .jsonl line, which has a `text`, the `messages` of a conversation ([{"role": ..., "content": ...}]), or a
 * `prompt` and its `completion`. Of the latter two only the assistant's replies are learned: PREFIX.mask.bin tells. A PREFIX.json that is no
 * manifest is not replaced. Shows progress on stderr. */
int tokenize_files(const char *prefix, const char *tokenizer, bool special, int num_files, char **files, struct tokenized *result);
/* Writes the text of a token file, special tokens included; tokenizer NULL: the one that made it, by its name. */
int tokens_print(const char *prefix, const char *tokenizer, FILE *out);

extern const struct command tokenize_command;
extern const struct command train_tokenizer_command;

#endif
