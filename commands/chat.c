/*
 * commands/chat.c - `ling chat`: a conversation with a model, on a terminal or by a file of messages.
 *
 * The conversation is kept as the JSON that /save writes, and is encoded anew for each reply: a reply is the one that
 * `ling generate --prompts` would give to the saved file. The engine finds the tokens that it has computed before.
 */
#define _GNU_SOURCE
#include "commands/chat.h"

#include "files/base.h"
#include "files/conversation.h"
#include "files/encoder.h"
#include "files/text.h"
#include "files/tokenizer.h"
#include "files/unicode.h"
#include "parallel.h"
#include "ling.h"
#include "commands/engine.h"
#include "commands/generator.h"
#include "commands/line_reader.h"

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Tokens of a forward pass, after which Ctrl-C is heard. */
enum { CHAT_TOKENS = 512 };

struct chat_options {
	const char *system, *tokenizer, *chat_form;
	struct sampling sampling;
	int64_t max_tokens, kv_tokens;
	int seq_len;
};

struct chat {
	const struct chat_options *options;
	struct generator generator;
	struct engine *engine;
	struct encoder *encoder;
	bool terminal;               /* standard input is one: a mistake does not end the program */
	json_t *messages;            /* {"role": ..., "content": ...}, the system message first */
	int64_t line;                /* of standard input, from 1 */
	size_t shown;                /* bytes of the reply that have been printed */
	bool over;                   /* /quit */
};

/* Says something to the user that is no part of a reply: on standard error, in brackets on a terminal. */
static void say(const struct chat *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(const struct chat *c, const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	fputs(c->terminal ? "[" : "", stderr);
	vfprintf(stderr, format, arguments);
	fputs(c->terminal ? "]\n" : "\n", stderr);
	va_end(arguments);
}

/* A SIGINT's handler: ends a reply, or the line that is being typed. */
static void request_stop(int signal)
{
	(void)signal;
	stop_requested = 1;
}

/* ------------------------------------------------------------------------------------------- the conversation */

/* Whether the first message is the system's. */
static bool has_system(const struct chat *c)
{
	const char *role = json_string_value(json_object_get(json_array_get(c->messages, 0), "role"));
	return role && !strcmp(role, "system");
}

/* Takes over the content. */
static json_t *message_of(const char *role, json_t *content)
{
	return json_pack("{s:s, s:o}", "role", role, "content", content);
}

/* The content of a message that the user has written, which the caller owns; NULL, with the error set, when it is not
 * UTF-8. */
static json_t *typed(const char *text, size_t n)
{
	json_t *content = json_stringn(text, n);
	if (!content)
		fail("the text is not UTF-8 from byte %zu on; nothing was sent", utf8_valid(text, n) + 1);
	return content;
}

/* Sets the system message, which n bytes of text are; with none, there is none. */
static int set_system(struct chat *c, const char *text, size_t n)
{
	json_t *content = n ? typed(text, n) : NULL;
	if (n && !content)
		return -1;
	if (has_system(c))
		json_array_remove(c->messages, 0);
	if (n)
		json_array_insert_new(c->messages, 0, message_of("system", content));
	return 0;
}

/* Removes the last message. */
static void take_back(struct chat *c)
{
	json_array_remove(c->messages, json_array_size(c->messages) - 1);
}

/* The record of the conversation that files hold; the caller owns it. */
static json_t *record_of(const struct chat *c)
{
	return json_pack("{s:O}", "messages", c->messages);
}

static int encode_conversation(const struct chat *c, struct ids *out)
{
	struct conversation conversation = {0};
	json_t *record = record_of(c);
	int rc = conversation_read_prompt(&conversation, record, "the conversation", false, chat_has_tools(c->encoder));
	if (rc == 0)
		rc = chat_encode(c->encoder, conversation.messages, conversation.count, true, out, NULL);
	conversation_free(&conversation);
	json_decref(record);
	return rc;
}

/* ---------------------------------------------------------------------------------------------------- a reply */

/* Prints bytes as UTF-8. On a terminal control characters, which could steer it, become question marks. */
static void show_text(const struct chat *c, const char *bytes, size_t n)
{
	struct text text = {0};
	text_append_utf8(&text, bytes, n);
	for (size_t i = 0, size; c->terminal && i < text.size; i += size) {
		int32_t code = 0;
		size = utf8_decode(text.data + i, text.size - i, &code);
		if ((code < ' ' && code != '\n' && code != '\t') || (code >= 127 && code < 160))
			memset(text.data + i, '?', size);
	}
	fwrite(text.data, 1, text.size, stdout);
	free(text.data);
}

/* An engine's on_token: prints what is new. */
static int show_reply(void *data, struct request *r)
{
	struct chat *c = data;
	const size_t size = text_to_show(r, 0);
	if (size > c->shown) {
		show_text(c, r->text.data + c->shown, size - c->shown);
		c->shown = size;
	}
	if (fflush(stdout) || ferror(stdout))
		return fail("cannot write to standard output: %s", strerror(errno));
	return 0;
}

/* An engine's on_step. */
static int ask_for_stop(void *data, const struct engine_statistics *s)
{
	(void)data, (void)s;
	return stop_requested;
}

/* Fails when the conversation leaves no room for a reply. *room: tokens of it. */
static int check_room(const struct chat *c, int64_t tokens, int64_t *room)
{
	const int64_t positions = c->generator.positions;
	const int64_t memory = engine_statistics(c->engine)->kv_tokens;
	const int64_t most = positions < memory ? positions : memory;
	*room = most - tokens;
	if (*room < 1)
		return fail("the conversation has %lld tokens with this message, and there is room for %lld (%s): nothing was "
				"sent; /save keeps the conversation, /reset begins another, a shorter message may still fit",
				(long long)tokens, (long long)most, memory < positions ? "--kv-tokens"
				: c->options->seq_len ? "--seq-len" : "the model's positions");
	if (c->options->max_tokens && *room > c->options->max_tokens)
		*room = c->options->max_tokens;
	return 0;
}

/* Says how a reply ended, where it did not end by itself; and adds it to the conversation. */
static void keep_reply(struct chat *c, const struct request *r)
{
	const size_t size = text_to_show(r, 0);
	if (r->ended == ENDED_BY_CALLER && size == 0) {
		take_back(c);
		say(c, "stopped before the reply began; your message is taken back");
		return;
	}
	json_array_append_new(c->messages, message_of("assistant", json_bytes(r->text.data, size)));
	if (size == 0)
		say(c, "the reply is empty");
	if (r->ended == ENDED_BY_CALLER)
		say(c, "stopped; what is there stays in the conversation");
	else if (r->ended == ENDED_BY_LENGTH && r->ids.count - r->num_prompt == c->options->max_tokens)
		say(c, "cut after %lld tokens (--max-tokens)", (long long)c->options->max_tokens);
	else if (r->ended == ENDED_BY_LENGTH)
		say(c, "cut: the conversation has as many tokens as there is room for, %lld; /save keeps it, /reset begins "
				"another", (long long)r->ids.count);
}

/* Sends a message of the user, and prints the reply. After an error the message is not in the conversation. */
static int ask(struct chat *c, const char *text, size_t n)
{
	json_t *content = typed(text, n);
	if (!content)
		return -1;
	json_array_append_new(c->messages, message_of("user", content));
	struct request r = {.sampling = c->options->sampling, .ends = &c->generator.ends};
	int rc = encode_conversation(c, &r.ids);
	if (rc == 0)
		rc = check_room(c, r.ids.count, &r.max_tokens);
	r.num_prompt = r.ids.count;
	c->shown = 0;
	stop_requested = 0;
	if (rc == 0)
		rc = engine_add(c->engine, &r);
	if (rc == 0)
		rc = engine_run(c->engine, NULL, NULL);
	if (c->shown || (rc == 0 && !c->terminal))
		printf("\n");
	if (rc == 0)
		keep_reply(c, &r);
	else
		take_back(c);
	request_free(&r);
	return rc;
}

/* --------------------------------------------------------------------------------------------------- commands */

static int run_reset(struct chat *c, const char *argument)
{
	if (*argument)
		return fail("/reset has no argument");
	for (size_t keep = has_system(c); json_array_size(c->messages) > keep;)
		take_back(c);
	say(c, has_system(c) ? "a new conversation, with the same system message" : "a new conversation");
	return 0;
}

static int run_system(struct chat *c, const char *argument)
{
	if (set_system(c, argument, strlen(argument)) < 0)
		return -1;
	say(c, *argument ? "the conversation begins with this system message" : "there is no system message");
	return 0;
}

static int run_save(struct chat *c, const char *argument)
{
	if (json_array_size(c->messages) == has_system(c))
		return fail("there is nothing to save yet");
	if (!*argument || !has_suffix(argument, ".jsonl"))
		return fail("/save%s%.200s: expected the name of a .jsonl file, to which a line is added", *argument ? " " : "",
				argument);
	if (is_home_path(argument))
		return fail("%.200s: " HOME_PATH_HINT, argument);
	json_t *record = record_of(c);
	char *json = json_text(record, 0), last = '\n';
	const int file = open(argument, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
	const off_t size = file < 0 ? -1 : lseek(file, 0, SEEK_END);
	struct text line = {0};
	if (size > 0 && pread(file, &last, 1, size - 1) == 1 && last != '\n')
		text_append_string(&line, "\n"); /* the last line has no end */
	text_append_string(&line, json);
	text_append_string(&line, "\n");
	const ssize_t n = size < 0 ? -1 : write(file, line.data, line.size);
	int error = n < 0 ? errno : (size_t)n < line.size ? ENOSPC : fsync(file) < 0 ? errno : 0;
	if (error && n > 0 && ftruncate(file, size) < 0) /* no part of a line stays */
		error = errno;
	if (file >= 0)
		close(file);
	free(line.data);
	free(json);
	json_decref(record);
	if (error)
		return fail_write(argument, error);
	say(c, "%s has one more line", argument);
	return 0;
}

static int run_quit(struct chat *c, const char *argument)
{
	if (*argument)
		return fail("/quit has no argument");
	c->over = true;
	return 0;
}

static int run_help(struct chat *c, const char *argument);

static const struct slash_command {
	const char *name, *argument, *help;
	int (*run)(struct chat *c, const char *argument);
} slash_commands[] = {
	{"reset", "", "begin a new conversation; the system message stays", run_reset},
	{"system", " TEXT", "set the system message, which begins the conversation; without TEXT, none", run_system},
	{"save", " FILE.jsonl", "add the conversation to a file that ling tokenize and ling generate read", run_save},
	{"help", "", "show this", run_help},
	{"quit", "", "end; Ctrl-D does too", run_quit},
};
enum { NUM_SLASH_COMMANDS = sizeof slash_commands / sizeof *slash_commands };

static int run_help(struct chat *c, const char *argument)
{
	(void)c, (void)argument;
	for (const struct slash_command *x = slash_commands; x < slash_commands + NUM_SLASH_COMMANDS; x++)
		fprintf(stderr, "  /%s%s%*s%s\n", x->name, x->argument, (int)(20 - strlen(x->name) - strlen(x->argument)), "",
				x->help);
	fprintf(stderr, "A message that begins with / is written with another / before it. Ctrl-C ends a reply.\n");
	return 0;
}

/* Runs the command in text[n], which begins with /. */
static int run_command(struct chat *c, const char *text, size_t n)
{
	const size_t end = strcspn(text, " \t");
	const char *argument = text + end + strspn(text + end, " \t");
	char shown[64];
	if (strlen(text) < n)
		return fail("a command has no byte 0");
	for (const struct slash_command *x = slash_commands; x < slash_commands + NUM_SLASH_COMMANDS; x++)
		if (end == strlen(x->name) + 1 && !memcmp(text + 1, x->name, end - 1))
			return x->run(c, argument);
	return fail("%s: no such command; /help lists them, and a message that begins with / is written with another / "
			"before it", printable(shown, text));
}

/* ------------------------------------------------------------------------------------------------ the program */

/* Does what a line says; nothing where it is blank. */
static int take_line(struct chat *c, const char *text, size_t n)
{
	if (is_blank_line(text, n))
		return 0;
	if (text[0] != '/')
		return ask(c, text, n);
	if (n > 1 && text[1] == '/')
		return ask(c, text + 1, n - 1);
	while (isspace((unsigned char)text[n - 1]))
		n--;
	struct text command = {0};
	text_append(&command, text, n);
	const int rc = run_command(c, command.data, n);
	free(command.data);
	return rc;
}

/* Reads and answers lines until the input ends. */
static int converse(struct chat *c, struct line_reader *reader)
{
	while (!c->over) {
		const char *text;
		size_t n;
		const enum line_kind kind = line_read(reader, &text, &n);
		if (kind == LINE_ERROR)
			return -1;
		if (kind == LINE_END) {
			if (c->terminal)
				fputs("\n", stderr);
			return 0;
		}
		if (kind == LINE_SIGNAL) {
			if (stop_requested) {
				fputs("\n", stderr);
				say(c, "/quit or Ctrl-D ends the program");
			}
			stop_requested = 0;
			continue;
		}
		c->line++;
		if (take_line(c, text, n) == 0)
			continue;
		if (!c->terminal || ferror(stdout)) {
			char what[sizeof error_text];
			snprintf(what, sizeof what, "%s", error_text);
			return fail("standard input, line %lld: %.3500s", (long long)c->line, what);
		}
		say(c, "%s", error_text);
	}
	return 0;
}

/* All of the command but the checks of its options. */
static int chat(struct chat *c, const char *model)
{
	const struct chat_options *o = c->options;
	struct generator *g = &c->generator;
	if (generator_open(g, model, o->tokenizer, o->chat_form, true, o->seq_len) < 0)
		return -1;
	c->encoder = encoder_open(g->tokenizer);
	if (!c->encoder)
		return fail("out of memory for the tokenizer");
	if (o->system && set_system(c, o->system, strlen(o->system)) < 0)
		return -1;
	const int64_t positions = g->positions;
	if (generator_load(g, positions < CHAT_TOKENS ? positions : CHAT_TOKENS) < 0)
		return -1;
	/* Room for a conversation and for what is left of the one before. */
	c->engine = engine_open(&g->model, g->tokenizer, &(struct engine_options){.kv_tokens = o->kv_tokens,
			.useful_tokens = 2 * positions, .max_requests = 1, .on_token = show_reply, .on_step = ask_for_stop,
			.data = c});
	if (!c->engine)
		return -1;
	c->terminal = isatty(STDIN_FILENO);
	if (c->terminal) {
		sigaction(SIGINT, &(struct sigaction){.sa_handler = request_stop}, NULL);
		say(c, "%s, %lld positions; /help lists the commands", g->dir, (long long)positions);
	}
	struct line_reader *reader = line_reader_open("> ");
	const int rc = reader ? converse(c, reader) : -1;
	line_reader_close(reader);
	const struct engine_statistics *s = engine_statistics(c->engine);
	if (c->terminal && s->tokens_out)
		say(c, "%lld tokens in, %lld of them computed before; %lld out", (long long)s->tokens_in,
				(long long)s->shared, (long long)s->tokens_out);
	return rc;
}

static int run_chat(const struct command_line *line)
{
	struct chat c = {.options = line->options};
	int rc = check_sampling(line, &c.options->sampling);
	if (rc == 0 && parallel_size() > 1)
		rc = fail("ling chat is one process; it uses all cores of a machine (OMP_NUM_THREADS)");
	if (rc < 0)
		return EXIT_WRONG_USE;
	c.messages = json_array();
	rc = chat(&c, line->words[0]);
	json_decref(c.messages);
	engine_close(c.engine);
	encoder_close(c.encoder);
	generator_close(&c.generator);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static const struct command_option options[] = {
	TEXT_OPTION(chat_options, system, "system", "TEXT", "The system message, which begins the conversation"),
	WHOLE_OPTION(chat_options, max_tokens, "max-tokens", "N", 1, INT32_MAX,
			"At most this many tokens for a reply (default: as many as there is room for)"),
	SAMPLING_OPTIONS(chat_options),
	TEXT_OPTION(chat_options, chat_form, "chat-form", "NAME", CHAT_FORM_HELP),
	TOKENIZER_OPTION(chat_options),
	SEQ_LEN_OPTION(chat_options),
	KV_TOKENS_OPTION(chat_options),
};

const struct command chat_command = {
	.name = "chat", .usage = "MODEL_DIR", .min_words = 1, .max_words = 1,
	.help = "Talk with a model. MODEL_DIR is a checkpoint, a run (its newest checkpoint is taken) or a Hugging Face "
		"directory. Each line is a message; /help lists the commands that a line may be instead. From a file or a pipe "
		"each line is a message too, and the replies go to standard output.",
	.run = run_chat, COMMAND_OPTIONS(chat_options, options), .computes = true,
};
