/*
 * commands/generate.c - `ling generate`: continues prompts.
 */
#define _GNU_SOURCE
#include "commands/generate.h"

#include "files/base.h"
#include "files/tokenizer.h"
#include "files/text.h"
#include "parallel.h"
#include "ling.h"
#include "commands/engine.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What of the requests has been printed. They are printed in the order of the prompts, a single one as it comes. */
struct printing {
	const struct request *list;
	int n, next;
	size_t shown;                /* of a single one's text */
	int64_t tokens;
	double start, told;          /* when the last line of progress was */
	const struct arguments *arguments;
};

static void print_request(const struct printing *p, const struct request *c)
{
	static const char *const finish[] = {[ENDED_BY_TOKEN] = "end", [ENDED_BY_STOP] = "stop", [ENDED_BY_LENGTH] = "length"};
	if (p->arguments->json) {
		printf("{\"prompt\": %u, \"text\": ", c->number);
		json_write_text(stdout, c->text.data, c->text.size);
		printf(", \"prompt_tokens\": %lld, \"tokens\": %lld, \"finish\": \"%s\"}\n", (long long)c->num_prompt,
				(long long)(c->ids.count - c->num_prompt), finish[c->ended]);
		return;
	}
	if (p->n > 1)
		printf("%s==> prompt %u <==\n", c->number ? "\n" : "", c->number);
	fwrite(c->text.data, 1, c->text.size, stdout);
	printf("\n");
}

static int show_request(void *context, const struct request *c)
{
	struct printing *p = context;
	const bool streams = p->n == 1 && !p->arguments->json;
	p->tokens++;
	if (streams) {
		/* What may yet turn out to be the stop text waits, and so does a character that is not whole. */
		const size_t stop = longest_stop(&p->arguments->generation.stop), wait = stop ? stop - 1 : 0;
		const size_t size = c->ended ? c->text.size : c->text.size > wait ? utf8_whole(c->text.data, c->text.size - wait) : 0;
		if (size > p->shown) {
			fwrite(c->text.data + p->shown, 1, size - p->shown, stdout);
			p->shown = size;
		}
		if (c->ended)
			printf("\n");
	} else
		for (; p->next < p->n && p->list[p->next].ended; p->next++)
			print_request(p, &p->list[p->next]);
	if (fflush(stdout) || ferror(stdout))
		return fail("cannot write to standard output: %s", strerror(errno));
	if (!(streams && is_terminal(stdout)) && clock_seconds() - p->told > (is_terminal(stderr) ? 1 : 30)) {
		char line[128];
		p->told = clock_seconds();
		snprintf(line, sizeof line, "generating: %d of %d prompts done, %.1f tokens/s", streams ? 0 : p->next, p->n, p->tokens / (p->told - p->start));
		print_status(stderr, line, false);
	}
	return 0;
}

/* The prompts of the command line as ids, (*out)[n]. */
static int read_prompts(const struct arguments *a, const struct tokenizer *t, struct ids **out, int *n)
{
	if (a->prompts)
		return prompts_read(a->prompts, t, a->chat, out, n);
	*n = 1;
	*out = calloc(1, sizeof **out);
	struct encoder *e = encoder_open(t);
	const int rc = *out && e ? prompt_encode(e, a->prompt, strlen(a->prompt), a->chat, *out) : fail("out of memory for the prompt");
	encoder_close(e);
	return rc;
}

/* Checks that the prompts suit the model and leave room for what is asked for, whose default shrinks to fit. */
static int check_prompts(struct generation_config *g, const struct model_config *c, const struct ids *ids, int n, const char *dir)
{
	const int64_t asked = g->max_tokens, most = c->max_position_embeddings;
	g->max_tokens = asked ? asked : 256;
	for (int i = 0; i < n; i++) {
		if (ids[i].count + (asked ? asked : 1) > most)
			return fail("%s: prompt %d has %lld tokens and %lld more are asked for; the model's max_position_embeddings is %lld", dir, i,
					(long long)ids[i].count, (long long)(asked ? asked : 1), (long long)most);
		if (ids[i].count + g->max_tokens > most)
			g->max_tokens = most - ids[i].count;
	}
	return 0;
}

static int run_generation(const struct arguments *a, struct generation_config *g, const struct model_config *c, const struct tokenizer *t,
		struct ids *ids, int n)
{
	enum { TOKENS_AT_A_TIME = 512 };
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	struct model m = {0};
	struct request *list = calloc(n, sizeof *list);
	int64_t together = g->batch; /* tokens of a forward pass */
	int rc = list ? 0 : fail("out of memory for %d prompts", n);
	for (int i = 0; i < n && rc == 0; i++) {
		list[i] = (struct request){.ids = ids[i], .num_prompt = ids[i].count, .number = i};
		ids[i] = (struct ids){0};
		together = list[i].num_prompt > together ? list[i].num_prompt : together;
	}
	if (rc == 0)
		rc = model_init(&m, c, &alone, 1, together < TOKENS_AT_A_TIME ? (int)together : TOKENS_AT_A_TIME, EVALUATE);
	if (rc == 0)
		rc = model_load(&m, a->words[0]);
	if (rc == 0) {
		struct printing printing = {.list = list, .n = n, .start = clock_seconds(), .told = clock_seconds(), .arguments = a};
		g->show = show_request;
		g->context = &printing;
		rc = generate(&m, t, list, n, g);
		if (is_terminal(stderr))
			fprintf(stderr, "\r\033[K%lld tokens, %.1f tokens/s\n", (long long)printing.tokens, printing.tokens / (clock_seconds() - printing.start));
	}
	for (int i = 0; list && i < n; i++) {
		free(list[i].ids.id);
		free(list[i].text.data);
	}
	free(list);
	model_free(&m);
	return rc;
}

int command_generate(const struct arguments *a)
{
	struct generation_config g = a->generation;
	struct model_config c;
	struct ids *ids = NULL;
	int n = 0;
	if (!a->prompt == !a->prompts) {
		fail("give either --prompt TEXT or --prompts FILE");
		return EXIT_WRONG_USE;
	}
	if (g.sampling.temperature == 0 && a->given & (OPTION_BIT(OPTION_TOP_K) | OPTION_BIT(OPTION_TOP_P) | OPTION_BIT(OPTION_SEED))) {
		fail("--top-k, --top-p and --seed go with a --temperature above 0; without it the most likely token is taken");
		return EXIT_WRONG_USE;
	}
	if (parallel_size() > 1) {
		fail("ling generate is one process; it uses all cores of a machine (OMP_NUM_THREADS)");
		return EXIT_WRONG_USE;
	}
	if (model_of_directory(&c, a->words[0]) < 0)
		return EXIT_WORK_FAILED;
	struct tokenizer *t = tokenizer_of_model(a->words[0], a->tokenizer);
	int rc = t ? 0 : -1;
	if (rc == 0 && tokenizer_size(t) > c.vocab_size)
		rc = fail("%s: the tokenizer has %d ids, the model's vocabulary %d: it is not this model's", a->words[0], tokenizer_size(t), c.vocab_size);
	if (rc == 0)
		rc = read_prompts(a, t, &ids, &n);
	if (rc == 0)
		rc = check_prompts(&g, &c, ids, n, a->words[0]);
	if (rc == 0)
		rc = run_generation(a, &g, &c, t, ids, n);
	for (int i = 0; ids && i < n; i++)
		free(ids[i].id);
	free(ids);
	tokenizer_close(t);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}
