/*
 * commands/generate.c - `ling generate`: continues prompts, and prints the continuations or appends them to a file.
 */
#define _GNU_SOURCE
#include "commands/generate.h"

#include "files/base.h"
#include "files/encoder.h"
#include "files/tokenizer.h"
#include "files/text.h"
#include "parallel.h"
#include "ling.h"
#include "commands/engine.h"
#include "commands/generator.h"
#include "commands/replicas.h"
#include "commands/result.h"
#include "commands/result_lines.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct generate_options {
	const char *prompt, *prompts, *out, *stop, *tokenizer, *chat_form;
	bool chat, json, logprobs, no_cache, no_sharing;
	struct sampling sampling;
	int64_t max_tokens, kv_tokens;
	int batch, draws, format, seq_len;
	struct replica_options replicas;
};

/* What `ling generate` works on, and how far it is. */
struct generation {
	const struct generate_options *options;
	struct generator generator;
	int64_t max_tokens;          /* for each request, where the model has positions for so many */
	struct strings stop;
	struct ids *prompts;         /* [num_prompts] */
	int num_prompts;
	struct request *requests;    /* [num_requests] by prompt; those of a prompt by draw */
	int num_requests;
	struct shared_work work;     /* the requests, each a unit; rank 0 gets all results */
	struct result_lines file;    /* where --out is given, on rank 0 */
	bool *done;                  /* [num_requests] on all ranks, those that are in that file; or NULL */
	/* Without it several requests are printed in their order, each when it and all before it have ended. The text of a
	 * single one is printed as it is generated. */
	int next;                    /* the first one that is not printed yet */
	size_t printed;              /* bytes of a single one's text */
	int ended;
	/* of the last line of progress: seconds of the clock, and the engine's counts then */
	double shown;
	int64_t tokens_in, tokens_out;
};

/* Whether the text is printed while it is generated. */
static bool is_streamed(const struct generation *g)
{
	return g->num_requests == 1 && !g->options->json && !g->options->out;
}

/* The numbers of a list as JSON. */
static json_t *numbers_of(const int32_t *ids, const double *log_prob, int64_t n)
{
	json_t *list = json_array();
	for (int64_t i = 0; i < n; i++)
		json_array_append_new(list, ids ? json_integer(ids[i]) : result_number(log_prob[i]));
	return list;
}

/* The result of a request that has ended; the caller owns it. */
static json_t *result_of(const struct generation *g, const struct request *r)
{
	static const char *const finish[] = {[ENDED_BY_TOKEN] = "end", [ENDED_BY_STOP] = "stop",
			[ENDED_BY_LENGTH] = "length"};
	const int64_t tokens = r->ids.count - r->num_prompt;
	json_t *result = json_pack("{s:I}", "prompt", (json_int_t)r->number);
	if (g->options->draws > 1 || g->options->out)
		json_object_set_new(result, "draw", json_integer(r->draw));
	json_t *rest = json_pack("{s:o, s:I, s:I, s:s}", "text", json_bytes(r->text.data, r->text.size), "prompt_tokens",
			(json_int_t)r->num_prompt, "tokens", (json_int_t)tokens, "finish", finish[r->ended]);
	json_object_update(result, rest);
	json_decref(rest);
	if (g->options->logprobs) {
		json_object_set_new(result, "ids", numbers_of(r->ids.id + r->num_prompt, NULL, tokens));
		json_object_set_new(result, "logprobs", numbers_of(NULL, r->log_prob, tokens));
	}
	return result;
}

static void print_request(const struct generation *g, const struct request *r)
{
	if (g->options->json) {
		result_print(result_of(g, r), true, NULL);
		return;
	}
	if (g->num_requests > 1)
		printf("%s==> prompt %lld", r == g->requests ? "" : "\n", (long long)r->number + 1);
	if (g->options->draws > 1)
		printf(", draw %lld", (long long)r->draw + 1);
	if (g->num_requests > 1)
		printf(" <==\n");
	fwrite(r->text.data, 1, r->text.size, stdout);
	printf("\n");
}

/* On rank 0: prints or appends what is ready of a request that has a new token or has ended. */
static int show_request(struct generation *g, struct request *r)
{
	g->ended += r->ended != RUNNING;
	if (g->options->out) {
		if (!r->ended)
			return 0;
		const int rc = result_lines_add(&g->file, (int)r->number, result_of(g, r));
		request_free(r); /* there may be many */
		return rc;
	}
	if (is_streamed(g)) {
		const size_t size = text_to_show(r, longest_stop(&g->stop));
		if (size > g->printed) {
			fwrite(r->text.data + g->printed, 1, size - g->printed, stdout);
			g->printed = size;
		}
		if (r->ended)
			printf("\n");
	} else
		for (; g->next < g->num_requests && g->requests[g->next].ended; g->next++)
			print_request(g, &g->requests[g->next]);
	if (fflush(stdout) || ferror(stdout))
		return fail("cannot write to standard output: %s", strerror(errno));
	return 0;
}

/* The result of a request as it is sent to rank 0; behind it are the ids, the log-probabilities and the text. */
struct result_message { int64_t number, num_ids, num_log_probs, text_size; enum ended ended; };

static void send_result(struct generation *g, const struct request *r)
{
	struct text message = {0};
	const struct result_message head = {.number = r - g->requests, .num_ids = r->ids.count - r->num_prompt,
			.num_log_probs = r->num_log_probs, .text_size = (int64_t)r->text.size, .ended = r->ended};
	text_append(&message, (const char *)&head, sizeof head);
	text_append(&message, (const char *)(r->ids.id + r->num_prompt), head.num_ids * sizeof *r->ids.id);
	text_append(&message, (const char *)r->log_prob, head.num_log_probs * sizeof *r->log_prob);
	text_append(&message, r->text.data, r->text.size);
	shared_work_send(&g->work, message.data, (int64_t)message.size);
	free(message.data);
}

/* Tokens that a prompt is continued by, at most: whatever the other prompts are. */
static int64_t tokens_behind(const struct generation *g, const struct ids *prompt)
{
	const int64_t left = g->generator.positions - prompt->count;
	return left < g->max_tokens ? left : g->max_tokens;
}

/* Begins the request of that number: a draw of a prompt. */
static struct request *begin_request(struct generation *g, int64_t number)
{
	const struct generate_options *o = g->options;
	const struct ids *prompt = &g->prompts[number / o->draws];
	struct request *r = &g->requests[number];
	*r = (struct request){.num_prompt = prompt->count, .number = (uint32_t)(number / o->draws),
			.draw = (uint32_t)(number % o->draws), .max_tokens = tokens_behind(g, prompt), .sampling = o->sampling,
			.stop = &g->stop, .ends = &g->generator.ends, .score_from = o->logprobs ? prompt->count : 0};
	append_ids(&r->ids, prompt->id, prompt->count);
	return r;
}

/* Takes a result that another rank has sent, see struct shared_work. */
static int receive_result(void *data, const void *message, int64_t bytes)
{
	struct generation *g = data;
	struct result_message head;
	const char *at = (const char *)message + sizeof head;
	(void)bytes;
	memcpy(&head, message, sizeof head);
	struct request *r = begin_request(g, head.number);
	int32_t *ids = allocate(head.num_ids * sizeof *ids);
	memcpy(ids, at, head.num_ids * sizeof *ids);
	append_ids(&r->ids, ids, head.num_ids);
	free(ids);
	at += head.num_ids * sizeof *ids;
	r->log_prob = allocate(head.num_log_probs * sizeof *r->log_prob);
	r->num_log_probs = head.num_log_probs;
	memcpy(r->log_prob, at, head.num_log_probs * sizeof *r->log_prob);
	text_append(&r->text, at + head.num_log_probs * sizeof *r->log_prob, head.text_size);
	r->ended = head.ended;
	return show_request(g, r);
}

/* An engine's on_token. */
static int take_token(void *data, struct request *r)
{
	struct generation *g = data;
	const struct layout *l = &g->generator.model.layout;
	if (l->all.rank == 0)
		return show_request(g, r);
	if (r->ended && l->tensor.rank == 0)
		send_result(g, r);
	if (r->ended)
		request_free(r);
	return 0;
}

/* An engine's on_step: takes what other ranks have sent, and shows how far all are. */
static int show_progress(void *data, const struct engine_statistics *s)
{
	struct generation *g = data;
	if (g->generator.model.layout.all.rank > 0)
		return 0;
	if (shared_work_receive(&g->work) < 0)
		return -1;
	const double now = clock_seconds(), seconds = now - g->shown;
	char line[160];
	if ((is_streamed(g) && is_terminal(stdout)) || seconds < (is_terminal(stderr) ? 1 : 30))
		return 0;
	snprintf(line, sizeof line, "generating: %d of %d done, %.1f tokens/s in, %.1f out, %.0f%% of the memory for keys "
			"and values", g->ended, g->num_requests, (s->tokens_in - g->tokens_in) / seconds,
			(s->tokens_out - g->tokens_out) / seconds, 100.0 * s->kv_used / s->kv_tokens);
	print_status(stderr, line, false);
	g->shown = now, g->tokens_in = s->tokens_in, g->tokens_out = s->tokens_out;
	return 0;
}

/* The prompt of --prompt; "-" is the standard input, whose last line end is no part of it. */
static int read_prompt(const struct generate_options *o, struct encoder *e, struct ids *out)
{
	struct text text = {0};
	int rc = 0;
	if (!strcmp(o->prompt, "-")) {
		rc = read_whole("-", FORMAT_TEXT, &text);
		text.size -= text.size && text.data[text.size - 1] == '\n';
		text.size -= text.size && text.data[text.size - 1] == '\r';
	} else
		text_append_string(&text, o->prompt);
	if (rc == 0)
		rc = prompt_encode(e, text.data ? text.data : "", text.size, o->chat, out);
	free(text.data);
	return rc;
}

/* Encodes the prompts that the command line names. */
static int read_prompts(struct generation *g)
{
	const struct generate_options *o = g->options;
	const struct tokenizer *t = g->generator.tokenizer;
	if (o->prompts)
		return prompts_read(o->prompts, o->format, t, o->chat, &g->prompts, &g->num_prompts);
	g->num_prompts = 1;
	g->prompts = allocate(sizeof *g->prompts);
	struct encoder *e = encoder_open(t);
	const int rc = e ? read_prompt(o, e, g->prompts) : fail("out of memory for the prompt");
	encoder_close(e);
	return rc;
}

/* Fails when a prompt and the tokens asked for are more than the model has positions for. Where no number was asked
 * for, one must fit. */
static int check_prompts(struct generation *g)
{
	const int64_t asked = g->options->max_tokens, most = g->generator.positions;
	g->max_tokens = asked ? asked : 256;
	for (int i = 0; i < g->num_prompts; i++) {
		const int64_t n = g->prompts[i].count;
		if (n + (asked ? asked : 1) > most)
			return fail("%s: prompt %d has %lld tokens and %lld more are asked for; %s is %lld", g->generator.dir,
					i + 1, (long long)n, (long long)(asked ? asked : 1), g->options->seq_len ? "--seq-len"
					: "the model's max_position_embeddings", (long long)most);
	}
	return 0;
}

/* Gives a request to the engine, unless it is done, see struct shared_work. */
static int add_request(void *data, struct engine *e, int64_t number)
{
	struct generation *g = data;
	return g->done && g->done[number] ? 0 : engine_add(e, begin_request(g, number));
}

/* Fails when the memory for keys and values has no room for one of the prompts. */
static int check_room(const struct generation *g, const struct engine *e)
{
	for (int i = 0; i < g->num_prompts; i++)
		if (engine_check(e, &(struct request){.ids = g->prompts[i], .num_prompt = g->prompts[i].count, .number = i,
				.max_tokens = tokens_behind(g, &g->prompts[i])}) < 0)
			return -1;
	return 0;
}

/* Loads the model, and generates what is not done yet. */
static int run_requests(struct generation *g)
{
	const struct generate_options *o = g->options;
	int64_t prompt_tokens = 0;
	for (int i = 0; i < g->num_prompts; i++)
		prompt_tokens += g->prompts[i].count;
	const int64_t tokens = prompt_tokens * o->draws + g->num_requests * g->max_tokens; /* at the most */
	g->requests = calloc(g->num_requests, sizeof *g->requests);
	if (parallel_agree(g->requests ? 0 : fail("out of memory for %d prompts", g->num_requests)) < 0 ||
			generator_load(&g->generator, prompt_tokens > o->batch ? prompt_tokens : o->batch) < 0)
		return -1;
	struct engine *e = engine_open(&g->generator.model, g->generator.tokenizer, &(struct engine_options){
			.kv_tokens = o->kv_tokens, .useful_tokens = tokens, .max_requests = o->batch, .no_cache = o->no_cache,
			.no_sharing = o->no_sharing, .on_token = take_token, .on_step = show_progress, .data = g});
	const double start = g->shown = clock_seconds();
	g->work = (struct shared_work){.count = g->num_requests, .add = add_request, .receive = receive_result, .data = g};
	int rc = parallel_agree(e ? check_room(g, e) : -1);
	if (rc == 0)
		rc = parallel_agree(shared_work_run(&g->work, e, &g->generator.model, o->batch));
	if (rc == 0)
		replicas_report(&g->generator.layout);
	if (rc == 0 && is_terminal(stderr)) {
		const struct engine_statistics *s = engine_statistics(e);
		const double seconds = clock_seconds() - start;
		fprintf(stderr, "\r\033[K%lld tokens in, %lld out, %.1f and %.1f tokens/s\n", (long long)s->tokens_in,
				(long long)s->tokens_out, s->tokens_in / seconds, s->tokens_out / seconds);
	}
	engine_close(e);
	return rc;
}

/* The options on which a result depends, as they would be given; the caller frees the text. */
static struct text options_of(const struct generation *g)
{
	const struct generate_options *o = g->options;
	const struct sampling *s = &o->sampling;
	struct text text = {0};
	text_printf(&text, "--max-tokens %lld --temperature %.15g", (long long)g->max_tokens, s->temperature);
	if (o->seq_len)
		text_printf(&text, " --seq-len %d", o->seq_len);
	if (s->temperature > 0)
		text_printf(&text, " --seed %llu", (unsigned long long)s->seed);
	if (s->top_k)
		text_printf(&text, " --top-k %d", s->top_k);
	if (s->top_p < 1)
		text_printf(&text, " --top-p %.15g", s->top_p);
	if (o->logprobs)
		text_printf(&text, " --logprobs");
	if (g->stop.count)
		text_printf(&text, " --stop %s", o->stop);
	if (o->replicas.tensor > 1)
		text_printf(&text, " --tensor %d", o->replicas.tensor);
	if (o->replicas.expert > 1)
		text_printf(&text, " --expert %d", o->replicas.expert);
	return text;
}

/* Opens the file of --out, on rank 0, and tells all ranks which results it has. */
static int open_file(struct generation *g)
{
	const struct group *all = &g->generator.layout.all;
	int rc = 0;
	if (all->rank == 0 && (generator_checksum(&g->generator, &g->file.model) < 0 ||
			result_lines_open(&g->file, g->options->out) < 0))
		rc = -1;
	if (parallel_agree(rc) < 0)
		return -1;
	g->done = allocate(g->num_requests * sizeof *g->done);
	if (all->rank == 0)
		memcpy(g->done, g->file.done, g->num_requests * sizeof *g->done);
	broadcast(all, g->done, g->num_requests * sizeof *g->done);
	for (int i = 0; i < g->num_requests; i++)
		g->ended += g->done[i];
	if (all->rank == 0 && g->ended)
		fprintf(stderr, "%s: %d of %d results are there\n", g->options->out, g->ended, g->num_requests);
	return 0;
}

/* Generates what is not in the file of --out yet. */
static int extend_file(struct generation *g)
{
	struct text text = options_of(g);
	uint32_t *checksums = allocate(g->num_prompts * sizeof *checksums);
	for (int i = 0; i < g->num_prompts; i++)
		checksums[i] = crc_of(0, (const uint8_t *)g->prompts[i].id, g->prompts[i].count * sizeof *g->prompts[i].id);
	g->file = (struct result_lines){.file = -1, .prompts = checksums, .options = text.data,
			.num_prompts = g->num_prompts, .num_draws = g->options->draws};
	int rc = open_file(g);
	if (rc == 0 && g->ended < g->num_requests)
		rc = run_requests(g);
	if (g->generator.layout.all.rank == 0)
		rc = result_lines_close(&g->file, rc);
	free(g->done);
	free(checksums);
	free(text.data);
	return rc;
}

/* A checksum of all prompts, which all ranks must have alike. */
static uint32_t prompts_crc(const struct generation *g)
{
	uint32_t crc = 0;
	for (int i = 0; i < g->num_prompts; i++) {
		crc = crc_of(crc, (const uint8_t *)&g->prompts[i].count, sizeof g->prompts[i].count);
		crc = crc_of(crc, (const uint8_t *)g->prompts[i].id, g->prompts[i].count * sizeof *g->prompts[i].id);
	}
	return crc;
}

/* The same of the options on which a result, or what the ranks do together, depends. */
static uint32_t options_crc(const struct generation *g)
{
	const struct generate_options *o = g->options;
	struct text text = options_of(g);
	text_printf(&text, " --n %d --batch %d %d %d", o->draws, o->batch, o->no_cache, o->no_sharing);
	const uint32_t crc = crc_of(0, (const uint8_t *)text.data, text.size);
	free(text.data);
	return crc;
}

/* All of the command but the checks of its options. chat: the prompts may be conversations. */
static int generate_all(struct generation *g, const char *model, bool chat)
{
	const struct generate_options *o = g->options;
	int rc = generator_open(&g->generator, model, o->tokenizer, o->chat_form, chat, o->seq_len) < 0 ||
			read_prompts(g) < 0 || check_prompts(g) < 0 ? -1 : 0;
	if (rc == 0 && (int64_t)g->num_prompts * o->draws > INT32_MAX)
		rc = fail("%d prompts x %d draws are more than %d results", g->num_prompts, o->draws, INT32_MAX);
	if (parallel_agree(rc) < 0 || parallel_same(prompts_crc(g), "the prompts") < 0 ||
			parallel_same(options_crc(g), "the command line") < 0 ||
			replicas_connect(&g->generator.layout, &g->generator.config, &o->replicas) < 0)
		return -1;
	g->num_requests = g->num_prompts * o->draws;
	return o->out ? extend_file(g) : run_requests(g);
}

static int run_generate(const struct command_line *line)
{
	const struct generate_options *o = line->options;
	struct generation g = {.options = o, .stop = {(char *[]){(char *)o->stop}, o->stop && *o->stop, false}};
	const bool chat = o->chat || (o->prompts && text_format(o->prompts, o->format) != FORMAT_TEXT);
	int rc = check_sampling(line, &o->sampling);
	if (rc == 0 && !o->prompt == !o->prompts)
		rc = fail("give either --prompt TEXT or --prompts FILE");
	else if (rc == 0 && o->format && !o->prompts)
		rc = fail("--format goes with --prompts");
	else if (rc == 0 && o->prompts && !strcmp(o->prompts, "-") && !o->format)
		rc = fail("--prompts -: the standard input has no name that tells what it is; add --format text or --format "
				"jsonl");
	else if (rc == 0 && o->chat_form && !chat)
		rc = fail("--chat-form goes with --chat, or with --prompts of JSON lines");
	else if (rc == 0 && o->draws > 1 && o->sampling.temperature == 0)
		rc = fail("--n goes with a --temperature above 0; without it all draws are the same");
	else if (rc == 0 && o->logprobs && !o->json && !o->out)
		rc = fail("--logprobs goes with --json or --out");
	else if (rc == 0 && parallel_size() > 1 && !strcmp(o->prompts ? o->prompts : o->prompt, "-"))
		rc = fail("with several ranks the prompts cannot come from the standard input, which only rank 0 has: name a "
				"file");
	if (rc < 0)
		return EXIT_WRONG_USE;
	rc = generate_all(&g, line->words[0], chat);
	for (int i = 0; g.requests && i < g.num_requests; i++)
		request_free(&g.requests[i]);
	free(g.requests);
	for (int i = 0; g.prompts && i < g.num_prompts; i++)
		free(g.prompts[i].id);
	free(g.prompts);
	generator_close(&g.generator);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static const char *const format_names[] = FORMAT_NAMES;

static const struct command_option options[] = {
	TEXT_OPTION(generate_options, prompt, "prompt", "TEXT",
			"Continue this text; an empty one is the beginning of a document; - is the text of the standard input"),
	TEXT_OPTION(generate_options, prompts, "prompts", "FILE",
			"Continue each line of a text file; of JSON lines (.jsonl, .ndjson, or .json with an array of them) each "
			"one's `prompt`, or reply to its `messages` or `conversations`; where the assistant spoke last, continue "
			"that. - is the standard input, and needs --format"),
	CHOICE_OPTION(generate_options, format, "format", "FORMAT", format_names,
			"What --prompts holds: text, jsonl, json (an array of records), or auto (the default): by its name"),
	TEXT_OPTION(generate_options, out, "out", "FILE",
			"Append each result to this file of JSON lines as soon as it is ready. The same command, given again, "
			"adds what is missing"),
	WHOLE_OPTION(generate_options, draws, "n", "N", 1, 1000000, "Results for each prompt, each drawn for itself",
			.initial = "1"),
	FLAG_OPTION(generate_options, chat, "chat", "A prompt is a user's message, and the reply follows"),
	TEXT_OPTION(generate_options, chat_form, "chat-form", "NAME", CHAT_FORM_HELP),
	SEQ_LEN_OPTION(generate_options),
	WHOLE_OPTION(generate_options, max_tokens, "max-tokens", "N", 1, INT32_MAX,
			"At most this many tokens for each prompt (default: 256, or as many as the model has positions for)"),
	SAMPLING_OPTIONS(generate_options),
	WHOLE_OPTION(generate_options, batch, "batch", "B", 1, MAX_BATCH,
			"Prompts that are computed together; changes no result", .initial = "32"),
	KV_TOKENS_OPTION(generate_options),
	REPLICA_OPTIONS(generate_options),
	FLAG_OPTION(generate_options, no_sharing, "no-prefix-sharing",
			"Compute equal beginnings of prompts for each one, to compare"),
	TEXT_OPTION(generate_options, stop, "stop", "TEXT", "End before this text"),
	FLAG_OPTION(generate_options, no_cache, "no-cache",
			"Compute the whole sequence again for each token: slow, to check"),
	TOKENIZER_OPTION(generate_options),
	FLAG_OPTION(generate_options, json, "json",
			"Print a JSON object on a line for each prompt; its field `prompt` counts the prompts from 0"),
	FLAG_OPTION(generate_options, logprobs, "logprobs",
			"With --json or --out: the ids of the generated tokens, and log softmax(logits) of each, whatever the "
			"temperature"),
};

const struct command generate_command = {
	.name = "generate", .usage = "MODEL_DIR (--prompt TEXT | --prompts FILE)", .min_words = 1, .max_words = 1,
	.help = "Continue text. MODEL_DIR is a checkpoint, a run (its newest checkpoint is taken) or a Hugging Face "
		"directory. At temperature 0, the default, "
		"the most likely token is taken each time. The output depends neither on the batch nor on the cache.",
	.run = run_generate, COMMAND_OPTIONS(generate_options, options), .computes = true,
};
