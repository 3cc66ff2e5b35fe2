/*
 * files/encoder.h - from text to token ids: encoding whole texts, texts in parts, and conversations.
 */
#ifndef LING_FILES_ENCODER_H
#define LING_FILES_ENCODER_H

#include "files/base.h"
#include "files/collections.h"
#include "files/tokenizer.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct encoder;                /* one thread's work space; its tokenizer must outlive it */
struct encoder *encoder_open(const struct tokenizer *t);
void encoder_close(struct encoder *e); /* NULL is fine */
const struct tokenizer *encoder_tokenizer(const struct encoder *e);

/* Appends the ids of n bytes, whatever they are. They are those of Hugging Face's encode(text,
 * add_special_tokens=False); the file's post_processor, truncation and padding are not applied. With `special`, the
 * text of a special token becomes that token; else it is ordinary text, and so is the text of the end token and of the
 * chat form's tags, special or not. (Other added tokens that are not special are always recognised.) A longest run of
 * bytes that are not UTF-8 is a word of its own, and the text between two such runs is encoded as if it were alone.
 * Decoding the ids gives every byte back, unless the tokenizer drops some (NFC, Split with Removed, lstrip, rstrip). */
int encode(struct encoder *e, const char *text, size_t n, bool special, struct ids *out);

/* The same for a text that is encoded in parts: appends the ids of text[0 .. result), where the result is the first
 * place at or behind `stop` at which the text can be cut without changing ids, or n. With `partial`, unknown text may
 * follow text[0 .. n), and the result is at most the last place at which whatever follows cannot change ids; it may
 * be 0. The caller goes on with the text from the result on. -1 on error. */
int64_t encode_part(struct encoder *e, const char *text, size_t n, size_t stop, bool partial, bool special,
		struct ids *out);

/* From now on encode() and encode_part() append no ids of words: they add 1 to the count of each word in a table of
 * the encoder. A word is what merges are applied to. Returns the table. */
const struct string_table *encoder_count_words(struct encoder *e);

/* -- chat forms --
 * A chat form is what a model's chat_template makes of a conversation. Ling knows three, by their names:
 *   ling     of Ling-Lite and Ling-Plus; below
 *   ling2    of Ling 2.0: <role>SYSTEM</role>content, a new line, detailed thinking off<|role_end|>, without a system
 *            message from `detailed` on; then <role>HUMAN</role>question<|role_end|> and
 *            <role>ASSISTANT</role>answer<|role_end|>. It has a place for tools, their calls and results, and for
 *            reasoning behind the last question; see docs/generation.md
 *   chatml   <|im_start|>user, a new line, question<|im_end|>, a new line; and so on
 * The form is that of the chat_template beside the tokenizer or in the model's directory; ling without one. A template
 * that makes something else is an error, unless the user names a form.
 */
#define CHAT_FORM_HELP "Form of conversations: ling, ling2 or chatml (default: by the model's chat_template; " \
	"without one, ling)"
/* Takes the named form instead of the template's, for encoders opened later; NULL: nothing. An unknown name is an
 * error. */
int chat_form_choose(struct tokenizer *t, const char *name);
/* Appends the id that ends each message in the tokenizer's form, if it has one. */
void chat_end_append(const struct tokenizer *t, struct ids *out);
/* Whether each message has an end of its own, so that no end token need follow a conversation. */
bool chat_closes(const struct encoder *e);
/* Whether the form has a place for tools, their calls and results, and reasoning. */
bool chat_has_tools(const struct encoder *e);

/* Ling's form:
 * <role>HUMAN</role>question<role>ASSISTANT</role>answer and so on, with nothing between the messages, and the end
 * token behind a conversation that ends with an answer. The tags are tokens where the tokenizer has them. What looks
 * like a tag in a message is ordinary text: each content is encoded apart from the tags around it. */

struct message {
	const char *role, *content;  /* role: see chat_role */
	size_t content_size;
	bool masked;                 /* the loss does not count it, although it is the assistant's */
	const char *reasoning;       /* of the assistant: what it thought before; or NULL */
	size_t reasoning_size;
	struct text *calls;          /* [num_calls] of the assistant: such as {"name": "f", "arguments": {"x": 1}} */
	int num_calls;
	const char *tools;           /* of the first message: the tools there are, a new line and JSON for each; or NULL */
};
/* A role as the form spells it: SYSTEM for "system" or "developer", HUMAN for "user" or "human", ASSISTANT for
 * "assistant" or "gpt", TOOL for "tool", in any case; NULL for anything else. */
const char *chat_role(const char *role);
#define CHAT_ROLES "system, developer, user, human, assistant, gpt or tool"
/* Appends the ids of a conversation. With `reply` the assistant is to speak next: the tags that open its reply follow,
 * unless the last message is the assistant's, which is then the beginning of the reply. Unless loss_mask is NULL it is
 * filled up to one byte for each id of *out: LOSS_TOKEN for the assistant's replies that are not masked and for the end
 * token behind the last one; LOSS_END for the first id behind each other such reply, which the form does not end with
 * a token of its own. */
int chat_encode(struct encoder *e, const struct message *messages, int n, bool reply, struct ids *out,
		struct text *loss_mask);
/* Appends `value` to the mask until it has one byte for each id; loss_mask may be NULL. */
void append_loss_mask(struct text *loss_mask, const struct ids *ids, char value);

#endif
