/*
 * files/conversation.c - what a JSON record means: a text, or a conversation in one of the forms in use.
 */
#define _GNU_SOURCE
#include "files/conversation.h"

#include "files/base.h"
#include "files/encoder.h"

#include <jansson.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* Members that have content and no place in a chat form: of a message, and of the record beside messages, where `tools`
 * may have one. */
static const char *const no_place[] = {"tools", "functions", "documents", "image", "images", "audio", "audios",
	"video", "videos", "history", "attachments"};
/* The same of a reply; the first two may have a place. */
static const char *const no_place_in_reply[] = {"reasoning_content", "tool_calls", "reasoning", "thinking",
	"function_call", "refusal", "reasoning_details", "thinking_blocks", "thoughts", "tool_plan"};
/* The same of a message that is no tool's: who speaks. The name of a tool is that of the call before it. */
static const char *const no_place_unless_tool[] = {"name"};
/* Members of a message that say whether the loss counts it: of OpenAI and Axolotl; ms-swift and XTuner; Axolotl; and
 * names that their users give them. */
static const char *const weights[] = {"weight", "loss", "train", "training", "loss_scale", "loss_weight"};

/* Members beside a prompt that ask other programs for what an option of `ling generate` does for all prompts. */
static const struct { const char *key, *option; } asked_for[] = {{"max_tokens", "max-tokens"},
	{"max_new_tokens", "max-tokens"}, {"max_completion_tokens", "max-tokens"}, {"n_predict", "max-tokens"},
	{"temperature", "temperature"}, {"top_k", "top-k"}, {"top_p", "top-p"}, {"seed", "seed"}, {"stop", "stop"},
	{"stop_sequences", "stop"}};

/* A member that is not null, or NULL. */
static const json_t *member(const json_t *object, const char *key)
{
	const json_t *v = json_object_get(object, key);
	return json_is_null(v) ? NULL : v;
}

/* Whether a value is there and says something. A list may be written as a string that holds JSON. */
static bool has_content(const json_t *v)
{
	if (json_is_string(v))
		return json_string_length(v) && strcmp(json_string_value(v), "[]") && strcmp(json_string_value(v), "{}");
	return json_is_array(v) || json_is_object(v) ? json_array_size(v) + json_object_size(v) > 0
			: v && !json_is_null(v) && !json_is_false(v);
}

/* Fails when a member of keys [begin .. end) has content. */
static int check_place(const json_t *object, const char *where, const char *const *keys, size_t begin, size_t end)
{
	for (size_t i = begin; i < end; i++)
		if (has_content(json_object_get(object, keys[i])))
			return fail("%s: `%s` has no place here in the model's chat form; expected none: write it into a content, "
					"or take it away", where, keys[i]);
	return 0;
}

/* Appends a string as append_json does. */
static void append_json_string(struct text *out, const char *text, size_t n)
{
	static const char special[] = "\"\\\b\f\n\r\t", names[] = "\"\\bfnrt";
	char code[8];
	text_append(out, "\"", 1);
	for (size_t i = 0; i < n; i++) {
		const char *found = text[i] ? strchr(special, text[i]) : NULL;
		if (found)
			snprintf(code, sizeof code, "\\%c", names[found - special]);
		else if ((unsigned char)text[i] < 0x20)
			snprintf(code, sizeof code, "\\u%04x", (unsigned char)text[i]);
		else
			snprintf(code, sizeof code, "%c", text[i]);
		text_append_string(out, code);
	}
	text_append(out, "\"", 1);
}

/* Appends a value as Python's json.dumps(value, ensure_ascii=False) writes it, for that is tojson in Hugging Face's
 * templates: a space behind each comma and colon, members in their order, the fewest digits that give the number. */
static void append_json(struct text *out, const json_t *v)
{
	char number[48], *exponent;
	const char *key;
	json_t *inner;
	size_t i;
	if (json_is_object(v)) {
		const char *before = "{";
		json_object_foreach((json_t *)v, key, inner) {
			text_append_string(out, before), append_json_string(out, key, strlen(key));
			text_append_string(out, ": "), append_json(out, inner);
			before = ", ";
		}
		text_append_string(out, *before == '{' ? "{}" : "}");
	} else if (json_is_array(v)) {
		json_array_foreach(v, i, inner)
			text_append_string(out, i ? ", " : "["), append_json(out, inner);
		text_append_string(out, json_array_size(v) ? "]" : "[]");
	} else if (json_is_string(v))
		append_json_string(out, json_string_value(v), json_string_length(v));
	else if (json_is_real(v)) {
		const double x = json_real_value(v);
		int digits = 1;
		while (snprintf(number, sizeof number, "%.*e", digits - 1, x), digits < 17 && strtod(number, NULL) != x)
			digits++;
		exponent = strchr(number, 'e');
		const int e = exponent ? atoi(exponent + 1) : 0;
		if (e >= -4 && e < 16)
			snprintf(number, sizeof number, "%.*f", digits - 1 - e > 1 ? digits - 1 - e : 1, x);
		text_append_string(out, number);
	} else {
		snprintf(number, sizeof number, "%lld", (long long)json_integer_value(v));
		text_append_string(out, json_is_integer(v) ? number : json_is_true(v) ? "true" : json_is_false(v) ? "false"
				: "null");
	}
}

/* Another text that the conversation owns: empty, and at this place until the next one is added. */
static struct text *add_text(struct conversation *c)
{
	c->joined = grow(c->joined, c->num_joined, &c->joined_capacity, 1, sizeof *c->joined);
	struct text *text = &c->joined[c->num_joined++];
	*text = (struct text){0};
	text_append(text, "", 0);
	return text;
}

int field_content(const json_t *object, const char *where, const char *key, struct message *m)
{
	const json_t *v = json_object_get(object, key);
	if (!json_is_string(v))
		return fail("%s: `%s` is %s; expected a string", where, key, json_kind(v));
	m->content = json_string_value(v), m->content_size = json_string_length(v);
	return 0;
}

/* The same of a string or a list of text parts. */
static int read_content(struct conversation *c, const json_t *object, const char *where, const char *key,
		struct message *m)
{
	const json_t *list = json_object_get(object, key), *part;
	size_t i;
	if (!json_is_array(list))
		return field_content(object, where, key, m);
	struct text *joined = add_text(c);
	json_array_foreach(list, i, part) {
		const json_t *type = member(part, "type"), *text = json_object_get(part, "text");
		char shown[64];
		if (!json_is_object(part))
			return fail("%s: `%s`, part %zu: is %s; expected {\"type\": \"text\", \"text\": ...}", where, key, i + 1,
					json_kind(part));
		if (type && (!json_is_string(type) || strcmp(json_string_value(type), "text")))
			return fail("%s: `%s`, part %zu: `type` is %s; expected \"text\", for Ling reads text only", where, key,
					i + 1, json_is_string(type) ? printable(shown, json_string_value(type)) : json_kind(type));
		if (!json_is_string(text))
			return fail("%s: `%s`, part %zu: `text` is %s; expected a string", where, key, i + 1, json_kind(text));
		text_append(joined, json_string_value(text), json_string_length(text));
	}
	m->content = joined->data, m->content_size = joined->size;
	return 0;
}

static struct message *add_message(struct conversation *c, const char *role)
{
	c->messages = grow(c->messages, c->count, &c->capacity, 1, sizeof *c->messages);
	c->messages[c->count] = (struct message){.role = role};
	return &c->messages[c->count++];
}

static bool is_reply(const struct message *m)
{
	return !strcmp(chat_role(m->role), "ASSISTANT");
}

/* Reads whether the loss counts a message. */
static int read_weight(const json_t *v, const char *where, struct message *m)
{
	for (size_t i = 0; i < COUNT(weights); i++) {
		const json_t *weight = member(v, weights[i]);
		const double value = json_is_boolean(weight) ? json_is_true(weight) : json_number_value(weight);
		if (!weight)
			continue;
		if (!(json_is_number(weight) || json_is_boolean(weight)) || (value != 0 && value != 1)) {
			char shown[32];
			snprintf(shown, sizeof shown, "%g", value);
			return fail("%s: `%s` is %s; expected 0 or 1: the loss counts a message or does not", where, weights[i],
					json_is_number(weight) ? shown : json_kind(weight));
		}
		if (value == 1 && !is_reply(m))
			return fail("%s: `%s` is 1, and the role is \"%s\"; expected 0 or none: the loss counts the assistant's "
					"messages only", where, weights[i], m->role);
		m->masked |= value == 0;
	}
	return 0;
}

/* Reads the calls of tools of a reply. */
static int read_calls(const json_t *list, const char *where, struct message *m)
{
	const json_t *call;
	size_t i;
	if (!json_is_array(list))
		return fail("%s: `tool_calls` is %s; expected a list of {\"name\": ..., \"arguments\": ...}", where,
				json_kind(list));
	m->calls = allocate(json_array_size(list) * sizeof *m->calls);
	json_array_foreach(list, i, call) {
		char place[PATH_LEN + 160];
		snprintf(place, sizeof place, "%s: `tool_calls`, call %zu", where, i + 1);
		if (has_content(member(call, "function")))
			call = json_object_get(call, "function");
		if (!json_is_object(call))
			return fail("%s: is %s; expected {\"name\": ..., \"arguments\": ...}", place, json_kind(call));
		const char *name = field_text(call, place, "name");
		const json_t *arguments = json_object_get(call, "arguments");
		if (!name)
			return -1;
		if (!arguments)
			return fail("%s: `arguments` is missing; expected an object, or a string that holds it", place);
		if (json_flaw(arguments))
			return fail("%s: `arguments` has a value that is %s; expected JSON", place, json_flaw(arguments));
		struct text *text = &m->calls[m->num_calls++];
		text_append_string(text, "{\"name\": \""), text_append_string(text, name);
		text_append_string(text, "\", \"arguments\": ");
		if (json_is_string(arguments))
			text_append(text, json_string_value(arguments), json_string_length(arguments));
		else
			append_json(text, arguments);
		text_append_string(text, "}");
	}
	return 0;
}

/* Reads the tools beside the messages, for the first message. */
static int read_tools(struct conversation *c, const json_t *record, const char *where)
{
	const json_t *v = json_object_get(record, "tools"), *tool;
	size_t i;
	if (!has_content(v))
		return 0;
	json_t *parsed = json_is_string(v) ? json_loads(json_string_value(v), JSON_REJECT_DUPLICATES, NULL) : NULL;
	const json_t *list = parsed ? parsed : v;
	int rc = json_is_array(list) ? 0 : fail("%s: `tools` is %s; expected a list of objects, or a string that holds it",
			where, json_kind(list));
	struct text *text = add_text(c);
	json_array_foreach(list, i, tool) {
		if (rc == 0 && !json_is_object(tool))
			rc = fail("%s: `tools`, tool %zu: is %s; expected an object", where, i + 1, json_kind(tool));
		if (rc == 0 && json_flaw(tool))
			rc = fail("%s: `tools`, tool %zu: has a value that is %s; expected JSON", where, i + 1, json_flaw(tool));
		text_append_string(text, "\n"), append_json(text, tool);
	}
	c->messages[0].tools = text->data;
	json_decref(parsed);
	return rc;
}

static int read_message(struct conversation *c, const json_t *v, const char *where)
{
	if (!json_is_object(v))
		return fail("%s: is %s; expected an object", where, json_kind(v));
	const bool share_gpt = !member(v, "role") && member(v, "from");
	const char *role_key = share_gpt ? "from" : "role", *content_key = share_gpt ? "value" : "content";
	const char *other = share_gpt ? "content" : member(v, "from") ? "from" : "value";
	if (member(v, other))
		return fail("%s: found `%s` beside `%s`; expected `role` and `content`, or `from` and `value`", where, other,
				role_key);
	const char *role = field_text(v, where, role_key);
	char shown[64];
	if (!role)
		return -1;
	if (!chat_role(role))
		return fail("%s: `%s` is \"%s\"; expected " CHAT_ROLES, where, role_key, printable(shown, role));
	struct message *m = add_message(c, role);
	const bool parts = c->tools && is_reply(m);
	const json_t *calls = member(v, "tool_calls"), *reasoning = member(v, "reasoning_content");
	if (check_place(v, where, no_place, 0, COUNT(no_place)) < 0 ||
			check_place(v, where, no_place_in_reply, parts ? 2 : 0, COUNT(no_place_in_reply)) < 0 ||
			(strcmp(chat_role(role), "TOOL") &&
			check_place(v, where, no_place_unless_tool, 0, COUNT(no_place_unless_tool)) < 0) ||
			(parts && has_content(calls) && read_calls(calls, where, m) < 0))
		return -1;
	if (parts && reasoning) {
		if (!json_is_string(reasoning))
			return fail("%s: `reasoning_content` is %s; expected a string", where, json_kind(reasoning));
		m->reasoning = json_string_value(reasoning), m->reasoning_size = json_string_length(reasoning);
	}
	if (m->num_calls && !member(v, content_key))
		m->content = "";
	else if (read_content(c, v, where, content_key, m) < 0)
		return -1;
	return c->continued ? 0 : read_weight(v, where, m);
}

/* Reads the array of messages `key` of a record. */
static int read_messages(struct conversation *c, const json_t *record, const char *where, const char *key)
{
	const json_t *array = json_object_get(record, key), *v;
	char place[PATH_LEN + 96];
	size_t i;
	if (!json_array_size(array) || json_array_size(array) > INT_MAX / 4)
		return fail("%s: `%s` is %s; expected an array of {\"role\": ..., \"content\": ...}", where, key,
				json_is_array(array) ? "empty" : json_kind(array));
	json_array_foreach(array, i, v) {
		if (!strcmp(key, "prompt") || !strcmp(key, "completion"))
			snprintf(place, sizeof place, "%s: `%s`, message %zu", where, key, i + 1);
		else
			snprintf(place, sizeof place, "%s: message %zu", where, i + 1);
		if (read_message(c, v, place) < 0)
			return -1;
	}
	return 0;
}

/* Reads what beside the messages belongs to a conversation: `system`, which becomes its first message. Call it before
 * the messages are read. */
static int read_system(struct conversation *c, const json_t *record, const char *where)
{
	static const char *const keys[] = {"system", "system_prompt"};
	for (size_t i = 0; i < COUNT(keys); i++) {
		if (!has_content(json_object_get(record, keys[i])))
			continue;
		if (c->count)
			return fail("%s: found both `system` and `system_prompt`; expected one of them", where);
		if (read_content(c, record, where, keys[i], add_message(c, "system")) < 0)
			return -1;
	}
	return 0;
}

/* Fails when a record has a `system` and its messages begin with another one. */
static int check_system(struct conversation *c, const char *where, int beside)
{
	if (beside && c->count > 1 && !strcmp(chat_role(c->messages[1].role), "SYSTEM"))
		return fail("%s: found a system text beside the messages and a system message; expected one of them", where);
	return 0;
}

/* Fails when a record says beside its messages that they are not to be learned as they are: a `label` that is false
 * marks a reply as a bad one (TRL's KTO), and a `weight` is of the whole conversation. */
static int check_learned(const json_t *record, const char *where)
{
	const json_t *weight = member(record, "weight");
	if (json_is_false(json_object_get(record, "label")))
		return fail("%s: `label` is false, which marks a reply that is not to be learned; expected true or none: take "
				"this line away", where);
	if (weight && !json_is_true(weight) && json_number_value(weight) != 1)
		return fail("%s: `weight` beside the messages is not 1; expected 1 or none, for all conversations count alike: "
				"take the member or this line away", where);
	return 0;
}

/* Appends the names of a record's members, or of its strings alone, for a message: "`a`, `b`". */
static void name_members(const json_t *record, bool strings, struct text *out)
{
	enum { MOST = 12 };            /* names */
	const char *key;
	char shown[64];
	json_t *v;
	size_t i = 0;
	json_object_foreach((json_t *)record, key, v) {
		if (strings && !json_is_string(v))
			continue;
		if (i < MOST) {
			text_append_string(out, i ? ", `" : "`");
			text_append_string(out, printable(shown, key));
			text_append_string(out, json_is_null(v) ? "` (null)" : "`");
		}
		i++;
	}
	if (i == 0)
		text_append_string(out, strings ? "none" : "no members");
	if (i > MOST)
		text_append_string(out, " and others");
}

/* The one of keys [n] that a record has; if it has none that is not null, the one that is null. NULL when there is
 * none, or several. */
static const char *only_member(const json_t *record, const char *const *keys, size_t n)
{
	const char *found = NULL, *null = NULL;
	size_t num_found = 0, num_null = 0;
	for (size_t i = 0; i < n; i++)
		if (member(record, keys[i]))
			found = keys[i], num_found++;
		else if (json_object_get(record, keys[i]))
			null = keys[i], num_null++;
	return num_found == 1 ? found : !num_found && num_null == 1 ? null : NULL;
}

int record_form(const json_t *record, const char *where, const char *text_field)
{
	static const char *const conversations[] = {"messages", "conversations", "completion"};
	const char *keys[1 + COUNT(conversations)] = {text_field};
	size_t n = 1;
	for (size_t i = 0; i < COUNT(conversations); i++)
		if (strcmp(conversations[i], text_field) != 0)
			keys[n++] = conversations[i];
	const char *key = only_member(record, keys, n);
	if (key)
		return key == text_field ? RECORD_TEXT : RECORD_CONVERSATION;
	struct text names = {0}, strings = {0};
	name_members(record, false, &names), name_members(record, true, &strings);
	fail("%s: found %s; expected one of a string `%s`, an array `messages` of {\"role\": ..., \"content\": ...}, an "
			"array `conversations` of {\"from\": ..., \"value\": ...}, and a `prompt` with its `completion`, both "
			"strings or both arrays of messages; --text-field NAME takes the text from another string: %s", where,
			names.data, text_field, strings.data);
	free(names.data), free(strings.data);
	return -1;
}

int conversation_read(struct conversation *c, const json_t *record, const char *where, bool tools)
{
	static const char *const keys[] = {"messages", "conversations", "completion"};
	const char *key = only_member(record, keys, COUNT(keys));
	c->tools = tools;
	if (check_place(record, where, no_place, tools ? 1 : 0, COUNT(no_place)) < 0 ||
			check_place(record, where, no_place_in_reply, 0, COUNT(no_place_in_reply)) < 0 ||
			check_learned(record, where) < 0 || read_system(c, record, where) < 0)
		return -1;
	const int system = c->count;
	if (strcmp(key, "completion")) {
		if (read_messages(c, record, where, key) < 0)
			return -1;
	} else if (json_is_array(json_object_get(record, "prompt")) || json_is_array(json_object_get(record, key))) {
		if (read_messages(c, record, where, "prompt") < 0)
			return -1;
		for (int i = 0; i < c->count; i++) /* what is there before the completion is not learned */
			c->messages[i].masked = true;
		if (read_messages(c, record, where, key) < 0)
			return -1;
	} else if (field_content(record, where, "prompt", add_message(c, "user")) < 0 ||
			field_content(record, where, key, add_message(c, "assistant")) < 0)
		return -1;
	bool replies = false, learned = false;
	for (int i = 0; i < c->count; i++)
		if (is_reply(&c->messages[i]))
			replies = true, learned |= !c->messages[i].masked;
	if (!replies)
		return fail("%s: no message is the assistant's; expected one, for the loss counts only its replies", where);
	if (!learned)
		return fail("%s: none of the assistant's messages is learned: each has weight 0, or is in `prompt`; expected "
				"one that the loss counts, or take this line away", where);
	return check_system(c, where, system) < 0 ? -1 : read_tools(c, record, where);
}

int conversation_read_prompt(struct conversation *c, const json_t *record, const char *where, bool chat, bool tools)
{
	static const char *const keys[] = {"prompt", "messages", "conversations"};
	const char *key = only_member(record, keys, COUNT(keys));
	if (!key) {
		struct text names = {0};
		name_members(record, false, &names);
		fail("%s: found %s; expected an object with one of `prompt`, `messages` and `conversations`", where,
				names.data);
		free(names.data);
		return -1;
	}
	const bool list = strcmp(key, "prompt") || json_is_array(json_object_get(record, key));
	c->continued = true;
	c->tools = tools && (list || chat);
	for (size_t i = 0; i < COUNT(asked_for); i++)
		if (member(record, asked_for[i].key))
			return fail("%s: found `%s`; expected none: the option --%s is for all prompts", where, asked_for[i].key,
					asked_for[i].option);
	if (check_place(record, where, no_place, c->tools ? 1 : 0, COUNT(no_place)) < 0 ||
			read_system(c, record, where) < 0)
		return -1;
	const int system = c->count;
	if (list)
		return read_messages(c, record, where, key) < 0 || check_system(c, where, system) < 0 ? -1
			: read_tools(c, record, where);
	if (system && !chat)
		return fail("%s: found a system text beside a `prompt` that is not in the chat form, which has no place for "
				"it; expected --chat", where);
	return field_content(record, where, key, add_message(c, chat ? "user" : NULL)) < 0 ? -1
		: read_tools(c, record, where);
}

void conversation_free(struct conversation *c)
{
	for (size_t i = 0; i < c->num_joined; i++)
		free(c->joined[i].data);
	for (int i = 0; i < c->count; i++) {
		for (int k = 0; k < c->messages[i].num_calls; k++)
			free(c->messages[i].calls[k].data);
		free(c->messages[i].calls);
	}
	free(c->joined), free(c->messages);
	*c = (struct conversation){0};
}
