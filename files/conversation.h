/*
 * files/conversation.h - what a JSON record means: a text, or a conversation in one of the forms in use.
 *
 *   {"messages": [{"role": ..., "content": ...}, ...]}                 Hugging Face, OpenAI
 *   {"conversations": [{"from": ..., "value": ...}, ...]}              ShareGPT
 *   {"prompt": "...", "completion": "..."}                             a question and its answer
 *   {"prompt": [messages], "completion": [messages]}                   TRL; the loss counts the completion's replies
 *
 * Messages of both spellings may be in both lists. A `content` or `value` is a string, or a list of parts {"type":
 * "text", "text": ...}, which follow each other with nothing between them. `weight` 0 of a message masks it; `loss`
 * and `train` are the same of other programs. `system` or `system_prompt` beside a conversation is its first message. A
 * member that is null is as good as missing, because tables write what a record does not have as null.
 *
 * Where the chat form has a place for them (`tools` below is true), an assistant's message may have
 * `reasoning_content`, a string, and `tool_calls`, a list of {"name": ..., "arguments": ...}, each perhaps within
 * {"function": ...}; its content may then be null. `tools` beside the messages are a list of objects, or a string
 * that holds that list. What has content and no place (see no_place in conversation.c) is an error unless it is empty.
 * The `name` of a speaker who is no tool has no place. Members with other names, such as `id`, `tool_call_id`,
 * `timestamp` and `model`, are not read.
 */
#ifndef LING_FILES_CONVERSATION_H
#define LING_FILES_CONVERSATION_H

#include "files/base.h"
#include "files/encoder.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

struct conversation {          /* {0} is empty; its strings live as long as the record that it was read from */
	struct message *messages;    /* [count] */
	int count;
	size_t capacity;
	bool continued;              /* it is a prompt: nothing is learned of it, so weights mean nothing */
	bool tools;                  /* the chat form has a place for tools and reasoning */
	struct text *joined;         /* [num_joined] contents that were lists of parts, and the tools */
	size_t num_joined, joined_capacity;
};

/* In all of these, `where`, a file and line, begins the message of an error. */

enum record_form { RECORD_TEXT, RECORD_CONVERSATION };
/* What a record that is to be learned is: a text in its member `text_field`, or a conversation. When it is neither, or
 * both, that is an error that names its members: -1. */
int record_form(const json_t *record, const char *where, const char *text_field);
/* Reads the conversation of a record that is to be learned. The loss must count one of its messages. Call
 * conversation_free on error too. */
int conversation_read(struct conversation *c, const json_t *record, const char *where, bool tools);
/* Reads a record that is to be continued: its `messages`, `conversations` or list `prompt`. A `prompt` that is a
 * string is with `chat` a user's message; without, c->messages[0] is that text, and its role is NULL. Members that ask
 * for what is an option here, such as `max_tokens`, are an error. */
int conversation_read_prompt(struct conversation *c, const json_t *record, const char *where, bool chat, bool tools);
void conversation_free(struct conversation *c);

/* The string member `key` of what stands at `where`, which may hold any bytes. */
int field_content(const json_t *object, const char *where, const char *key, struct message *m);

#endif
