/*
 * commands/generate.c - `ling generate`: continues prompts, and prints the continuations.
 */
#define _GNU_SOURCE
#include "commands/generate.h"

#include "files/base.h"
#include "files/checkpoint.h"
#include "files/encoder.h"
#include "files/tokenizer.h"
#include "files/unicode.h"
#include "files/text.h"
#include "parallel.h"
#include "ling.h"
#include "commands/engine.h"
#include "commands/result.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct generate_options {
	const char *prompt, *prompts, *stop, *tokenizer, *chat_form;
	bool chat, json, no_cache, no_sharing;
	struct sampling sampling;
	int64_t max_tokens, kv_tokens;
	int batch, seq_len;
};

/* How far the results have been printed. Several requests are printed in the order of the prompts, each when it and
 * all before it have ended. The text of a single one is printed as it is generated. */
struct printing {
	const struct generate_options *options;
	const struct request *list;  /* [n] */
	int n, next;                 /* next: the first one that is not printed yet */
	size_t printed;              /* bytes of a single one's text */
	size_t held;                 /* bytes at the end of it that may become the stop text */
	int64_t tokens;              /* generated so far */
	double start, last_status;   /* seconds of the clock: of the start, of the last line of progress */
};

static void print_request(const struct printing *p, const struct request *c)
{
	static const char *const finish[] = {[ENDED_BY_TOKEN] = "end", [ENDED_BY_STOP] = "stop",
			[ENDED_BY_LENGTH] = "length", [ENDED_BY_CALLER] = "caller"};
	if (p->options->json) {
		result_print(json_pack("{s:I, s:o, s:I, s:I, s:s}", "prompt", (json_int_t)c->number,
				"text", json_bytes(c->text.data, c->text.size), "prompt_tokens", (json_int_t)c->num_prompt,
				"tokens", (json_int_t)(c->ids.count - c->num_prompt), "finish", finish[c->ended]), true, NULL);
		return;
	}
	if (p->n > 1)
		printf("%s==> prompt %lld <==\n", c->number ? "\n" : "", (long long)c->number + 1);
	fwrite(c->text.data, 1, c->text.size, stdout);
	printf("\n");
}

/* Called after each token of each request, see struct engine_options. */
static int show_request(void *data, struct request *c)
{
	struct printing *p = data;
	const bool streams = p->n == 1 && !p->options->json;
	p->tokens++;
	if (streams) {
		/* The end of a text that goes on is held back: it may be a part of the stop text or of a character. */
		const size_t size = c->ended ? c->text.size
				: c->text.size > p->held ? utf8_whole(c->text.data, c->text.size - p->held) : 0;
		if (size > p->printed) {
			fwrite(c->text.data + p->printed, 1, size - p->printed, stdout);
			p->printed = size;
		}
		if (c->ended)
			printf("\n");
	} else
		for (; p->next < p->n && p->list[p->next].ended; p->next++)
			print_request(p, &p->list[p->next]);
	if (fflush(stdout) || ferror(stdout))
		return fail("cannot write to standard output: %s", strerror(errno));
	if (!(streams && is_terminal(stdout)) && clock_seconds() - p->last_status > (is_terminal(stderr) ? 1 : 30)) {
		char line[128];
		p->last_status = clock_seconds();
		snprintf(line, sizeof line, "generating: %d of %d prompts done, %.1f tokens/s", streams ? 0 : p->next, p->n,
				p->tokens / (p->last_status - p->start));
		print_status(stderr, line, false);
	}
	return 0;
}

/* Encodes the prompts that the command line names: (*out)[n], which the caller frees, each id and *out, also after an
 * error. */
static int read_prompts(const struct generate_options *o, const struct tokenizer *t, struct ids **out, int *n)
{
	if (o->prompts)
		return prompts_read(o->prompts, t, o->chat, out, n);
	*n = 1;
	*out = calloc(1, sizeof **out);
	struct encoder *e = encoder_open(t);
	const int rc = *out && e ? prompt_encode(e, o->prompt, strlen(o->prompt), o->chat, *out)
			: fail("out of memory for the prompt");
	encoder_close(e);
	return rc;
}

/* The longest sequence, a prompt and what is generated. */
static int positions(const struct generate_options *o, const struct model_config *c)
{
	return o->seq_len ? o->seq_len : default_sequence(c);
}

/* Fails when a prompt and the tokens asked for are more than the model has positions for. Gives the tokens for
 * each: where no number was asked for, what all prompts leave room for, at most 256. */
static int check_prompts(int64_t *max_tokens, const struct generate_options *o, const struct model_config *c,
		const struct ids *ids, int n, const char *dir)
{
	const int64_t asked = *max_tokens, most = positions(o, c);
	*max_tokens = asked ? asked : 256;
	for (int i = 0; i < n; i++) {
		if (ids[i].count + (asked ? asked : 1) > most)
			return fail("%s: prompt %d has %lld tokens and %lld more are asked for; %s is %lld", dir, i + 1,
					(long long)ids[i].count, (long long)(asked ? asked : 1), o->seq_len ? "--seq-len"
					: "the model's max_position_embeddings", (long long)most);
		if (ids[i].count + *max_tokens > most)
			*max_tokens = most - ids[i].count;
	}
	return 0;
}

/* Loads the model, generates for n prompts as `wanted` says, and prints the results. Takes the ids of the prompts. */
static int run_requests(const struct generate_options *o, const char *dir, const struct request *wanted,
		const struct model_config *c, const struct tokenizer *t, struct ids *ids, int n)
{
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	const size_t stop = longest_stop(wanted->stop);
	struct model m = {0};
	struct request *list = calloc(n, sizeof *list);
	struct printing printing = {.list = list, .n = n, .start = clock_seconds(), .last_status = clock_seconds(),
			.options = o, .held = stop ? stop - 1 : 0};
	struct engine_options options = {.kv_tokens = o->kv_tokens, .max_requests = o->batch, .no_sharing = o->no_sharing,
			.no_cache = o->no_cache, .on_token = show_request, .data = &printing};
	struct engine *e = NULL;
	int64_t prompts = 0;
	int rc = list ? 0 : fail("out of memory for %d prompts", n);
	for (int i = 0; i < n && rc == 0; i++) {
		list[i] = *wanted;
		list[i].ids = ids[i];
		list[i].num_prompt = ids[i].count;
		list[i].number = i;
		ids[i] = (struct ids){0};
		prompts += list[i].num_prompt;
	}
	options.useful_tokens = prompts + n * wanted->max_tokens;
	prompts = prompts > o->batch ? prompts : o->batch; /* the next token of each is computed together */
	if (rc == 0)
		rc = model_init(&m, c, &alone, 1, (int)(prompts < ENGINE_TOKENS ? prompts : ENGINE_TOKENS), EVALUATE);
	if (rc == 0) {
		set_rope_length(&m, positions(o, c));
		rc = model_load(&m, dir);
	}
	if (rc == 0 && !(e = engine_open(&m, t, &options)))
		rc = -1;
	for (int i = 0; i < n && rc == 0; i++)
		rc = engine_add(e, &list[i]);
	if (rc == 0) {
		printing.start = clock_seconds();
		rc = engine_run(e, NULL, NULL);
		if (is_terminal(stderr))
			fprintf(stderr, "\r\033[K%lld tokens, %.1f tokens/s\n", (long long)printing.tokens,
					printing.tokens / (clock_seconds() - printing.start));
	}
	engine_close(e);
	for (int i = 0; list && i < n; i++)
		request_free(&list[i]);
	free(list);
	model_free(&m);
	return rc;
}

static int run_generate(const struct command_line *line)
{
	const struct generate_options *o = line->options;
	char dir[PATH_LEN];
	const struct strings stop = {(char *[]){(char *)o->stop}, o->stop && *o->stop, false};
	struct ids *ids = NULL, ends = {0};
	struct request wanted = {.sampling = o->sampling, .max_tokens = o->max_tokens, .stop = &stop, .ends = &ends};
	struct model_config c;
	/* prompts that may be conversations */
	const bool chat = o->chat || (o->prompts && text_format(o->prompts, FORMAT_BY_NAME) != FORMAT_TEXT);
	int n = 0, rc = 0;
	if (!o->prompt == !o->prompts)
		rc = fail("give either --prompt TEXT or --prompts FILE");
	else if (o->sampling.temperature == 0 && (option_given(line, "top-k") || option_given(line, "top-p") ||
			option_given(line, "seed")))
		rc = fail("--top-k, --top-p and --seed go with a --temperature above 0; without it the most likely token is "
				"taken");
	else if (o->chat_form && !chat)
		rc = fail("--chat-form goes with --chat, or with --prompts of JSON lines");
	else if (parallel_size() > 1)
		rc = fail("ling generate is one process; it uses all cores of a machine (OMP_NUM_THREADS)");
	if (rc < 0)
		return EXIT_WRONG_USE;
	if (find_model(dir, line->words[0]) < 0 || config_from_huggingface(&c, dir) < 0)
		return EXIT_WORK_FAILED;
	if (o->seq_len > longest_sequence(&c)) {
		fail("%s: --seq-len %d is more than the model's longest sequence, %d", dir, o->seq_len, longest_sequence(&c));
		return EXIT_WORK_FAILED;
	}
	struct tokenizer *t = tokenizer_of_model(dir, o->tokenizer);
	if (!t)
		rc = -1;
	else if (tokenizer_size(t) > c.vocab_size)
		rc = fail("%s: the tokenizer has %d ids, the model's vocabulary %d: it is not this model's", dir,
				tokenizer_size(t), c.vocab_size);
	if (rc == 0)
		rc = end_ids_read(&ends, dir) < 0 ? -1 : chat_form_choose(t, o->chat_form);
	if (rc == 0 && chat)
		chat_end_append(t, &ends);
	if (rc == 0)
		rc = read_prompts(o, t, &ids, &n);
	if (rc == 0)
		rc = check_prompts(&wanted.max_tokens, o, &c, ids, n, dir);
	if (rc == 0)
		rc = run_requests(o, dir, &wanted, &c, t, ids, n);
	for (int i = 0; ids && i < n; i++)
		free(ids[i].id);
	free(ids);
	free(ends.id);
	tokenizer_close(t);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static const struct command_option options[] = {
	TEXT_OPTION(generate_options, prompt, "prompt", "TEXT",
			"Continue this text; an empty one is the beginning of a document"),
	TEXT_OPTION(generate_options, prompts, "prompts", "FILE",
			"Continue each line of a text file; of JSON lines (.jsonl, .ndjson, or .json with an array of them) each "
			"one's `prompt`, or reply to its `messages` or `conversations`; where the assistant spoke last, continue "
			"that"),
	FLAG_OPTION(generate_options, chat, "chat", "A prompt is a user's message, and the reply follows"),
	TEXT_OPTION(generate_options, chat_form, "chat-form", "NAME", CHAT_FORM_HELP),
	WHOLE_OPTION(generate_options, seq_len, "seq-len", "L", 1, INT32_MAX,
			"Longest sequence, prompt and reply together (default: the model's longest; with rope_scaling of type "
			"dynamic its max_position_embeddings, beyond which L changes the results)"),
	WHOLE_OPTION(generate_options, max_tokens, "max-tokens", "N", 1, INT32_MAX,
			"At most this many tokens for each prompt (default: 256, or as many as the model has positions for)"),
	NUMBER_OPTION(generate_options, sampling.temperature, "temperature", "T", 0, 100,
			"Draw from softmax(logits / T); 0: take the most likely token", .initial = "0"),
	WHOLE_OPTION(generate_options, sampling.top_k, "top-k", "K", 1, INT32_MAX, "Draw from the K most likely tokens"),
	NUMBER_OPTION(generate_options, sampling.top_p, "top-p", "P", 0, 1,
			"Draw from the fewest tokens that have P of the probability", .above = true, .initial = "1"),
	WHOLE_OPTION(generate_options, sampling.seed, "seed", "S", 0, INT64_MAX,
			"Seed of the draws, which depend on it, the prompt's number and the position alone", .initial = "0"),
	WHOLE_OPTION(generate_options, batch, "batch", "B", 1, MAX_BATCH,
			"Prompts that are computed together; changes no result", .initial = "8"),
	TEXT_OPTION(generate_options, stop, "stop", "TEXT", "End before this text"),
	WHOLE_OPTION(generate_options, kv_tokens, "kv-tokens", "N", 1, INT64_MAX,
			"Memory for the keys and values of N tokens (default: as many as are of use and the memory has room for)"),
	FLAG_OPTION(generate_options, no_sharing, "no-prefix-sharing", "Compute equal beginnings for each prompt"),
	FLAG_OPTION(generate_options, no_cache, "no-cache",
			"Compute the whole sequence again for each token: slow, to check"),
	TEXT_OPTION(generate_options, tokenizer, "tokenizer", "NAME",
			"byte, a tokenizer.json, or its directory (default: the model's own)"),
	FLAG_OPTION(generate_options, json, "json",
			"Print a JSON object on a line for each prompt; its field `prompt` counts the prompts from 0"),
};

const struct command generate_command = {
	.name = "generate", .usage = "MODEL_DIR (--prompt TEXT | --prompts FILE)", .min_words = 1, .max_words = 1,
	.help = "Continue text. MODEL_DIR is a checkpoint, a run (its newest checkpoint is taken) or a Hugging Face "
		"directory. At temperature 0, the default, "
		"the most likely token is taken each time. The output depends neither on the batch nor on the cache.",
	.run = run_generate, COMMAND_OPTIONS(generate_options, options), .computes = true,
};
