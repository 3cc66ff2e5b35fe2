/*
 * commands/evaluate.c - `ling eval`: the loss on a token file, or scored tasks.
 */
#define _GNU_SOURCE
#include "commands/evaluate.h"

#include "files/base.h"
#include "files/tokenizer.h"
#include "parallel.h"
#include "data.h"
#include "ling.h"
#include "commands/tasks.h"
#include "commands/scoring.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What made the ids of a token file, if that is the byte tokenizer or the model's own; else NULL. */
static struct tokenizer *tokenizer_of_data(const struct tokens *data, const char *model_dir)
{
	struct tokenizer *t = !*data->tokenizer ? NULL : !strcmp(data->tokenizer, "byte") ? tokenizer_open("byte") : tokenizer_of_model(model_dir, NULL);
	if (!t || tokenizer_hash(t) == data->tokenizer_hash)
		return t;
	tokenizer_close(t);
	return NULL;
}

static int eval_data(const struct arguments *a, const struct model_config *c)
{
	struct tokens data;
	struct model m;
	struct evaluation e;
	struct data_source source = {0};
	if (snprintf(source.path, sizeof source.path, "%s", a->data) >= (int)sizeof source.path ||
			snprintf(source.dtype, sizeof source.dtype, "%s", a->dtype) >= (int)sizeof source.dtype)
		return fail("--data %s --dtype %s: too long", a->data, a->dtype);
	if (open_data(&data, &source, &(struct reading){"none", 0, c->vocab_size, a->seq_len, a->document_mask, a->document_token}, a->max_windows) < 0)
		return -1;
	struct layout layout = layout_of_rank(parallel_rank(), parallel_size(), 1, 1); /* ranks share the windows */
	layout_connect(&layout);
	int rc = model_init(&m, c, &layout, 1, a->seq_len, EVALUATE);
	if (rc == 0) {
		struct tokenizer *tokenizer = tokenizer_of_data(&data, a->words[0]);
		rc = model_load(&m, a->words[0]) < 0 || evaluate(&m, &data, tokenizer, a->document_mask, a->max_windows, &e) < 0 ? -1 : 0;
		tokenizer_close(tokenizer);
		model_free(&m);
	}
	if (rc == 0 && !isfinite(e.loss))
		rc = fail("%s: the loss on %s is %g", a->words[0], a->data, e.loss);
	if (rc == 0 && layout.world.rank == 0) {
		const double bits = e.bytes ? e.loss * e.tokens / M_LN2 / e.bytes : 0;
		if (a->json) {
			printf("{\"loss\": %.12g, \"perplexity\": %.12g, \"tokens\": %lld", e.loss, exp(e.loss), (long long)e.tokens);
			if (e.bytes)
				printf(", \"bytes\": %lld, \"bits_per_byte\": %.12g", (long long)e.bytes, bits);
			printf("}\n");
		} else {
			printf("loss %.12g  perplexity %.9g  tokens %lld", e.loss, exp(e.loss), (long long)e.tokens);
			if (e.bytes)
				printf("  bits per byte %.6f", bits);
			printf("\n");
		}
	}
	tokens_close(&data);
	return rc;
}

/* Encodes all tasks for windows of L tokens, so that what is wrong in them is found before anything is computed, then makes a model. */
static int prepare_tasks(const struct arguments *a, const struct model_config *c, const struct tasks *tasks, const struct tokenizer *tokenizer, int L,
		struct task_work *work, struct model *m)
{
	enum { TOKENS_AT_A_TIME = 4096 };
	int64_t together = 1; /* tokens of a forward pass */
	if (tokenizer_size(tokenizer) > c->vocab_size)
		return fail("%s: the tokenizer has %d ids, the model's vocab_size is %d; expected a tokenizer that the model was trained with", a->words[0],
				tokenizer_size(tokenizer), c->vocab_size);
	for (int64_t i = 0; i < tasks->count; i++) {
		if (task_encode(&work[i], &tasks->task[i], tokenizer, L) < 0)
			return -1;
		const int64_t batch = work[i].num_items < a->generation.batch ? work[i].num_items : a->generation.batch;
		together = batch * work[i].longest > together ? batch * work[i].longest : together;
	}
	struct layout layout = layout_of_rank(parallel_rank(), parallel_size(), 1, 1); /* ranks share the samples */
	layout_connect(&layout);
	return model_init(m, c, &layout, 1, together < TOKENS_AT_A_TIME ? (int)together : TOKENS_AT_A_TIME, EVALUATE);
}

static int eval_tasks(const struct arguments *a, const struct model_config *c)
{
	const bool first = parallel_rank() == 0;
	struct tasks tasks;
	struct model m = {0};
	struct results *results = NULL;
	struct task_work *work = NULL;
	struct task_result *result = NULL;
	const int L = a->seq_len ? a->seq_len : c->max_position_embeddings;
	int rc = tasks_load(&tasks, a->tasks);
	struct tokenizer *tokenizer = rc == 0 ? tokenizer_of_model(a->words[0], a->tokenizer) : NULL;
	if (tokenizer) {
		work = calloc(tasks.count, sizeof *work);
		result = calloc(tasks.count, sizeof *result);
		rc = work && result ? prepare_tasks(a, c, &tasks, tokenizer, L, work, &m) : fail("out of memory for %lld tasks", (long long)tasks.count);
	} else
		rc = -1;
	if (parallel_agree(rc) == 0)
		rc = model_load(&m, a->words[0]);
	if (rc == 0 && a->out && first && !(results = results_open(a->out)))
		rc = -1;
	rc = parallel_agree(rc);
	for (int64_t i = 0; i < tasks.count && rc == 0; i++)
		if ((rc = task_run(&work[i], &m, a->generation.batch)) == 0 && first)
			task_score(&work[i], &result[i], results);
	const struct evaluation_facts facts = {a->words[0], a->tasks, tokenizer ? tokenizer_hash(tokenizer) : 0, L};
	if (results && results_finish(results, &facts, result, tasks.count, rc < 0) < 0)
		rc = -1;
	if (rc == 0 && first && a->json) {
		char *text = results_text(&facts, result, tasks.count);
		printf("%s\n", text);
		free(text);
	} else if (rc == 0 && first)
		print_results(result, tasks.count);
	for (int64_t i = 0; work && i < tasks.count; i++)
		task_work_free(&work[i]);
	free(work);
	free(result);
	model_free(&m);
	tokenizer_close(tokenizer);
	tasks_free(&tasks);
	return rc;
}

int command_eval(const struct arguments *a)
{
	const uint64_t for_data = OPTION_BIT(OPTION_MAX_WINDOWS) | OPTION_BIT(OPTION_DTYPE) | OPTION_BIT(OPTION_DOCUMENT_MASK) |
			OPTION_BIT(OPTION_DOCUMENT_TOKEN);
	const uint64_t for_tasks = OPTION_BIT(OPTION_BATCH) | OPTION_BIT(OPTION_OUT) | OPTION_BIT(OPTION_TOKENIZER);
	struct model_config c;
	int rc = 0;
	if (!a->data == !a->tasks)
		rc = a->data ? fail("--data and --tasks exclude each other") : fail("--data is required, or --tasks");
	else if (a->data && !a->seq_len)
		rc = fail("--seq-len is required with --data");
	else if (a->given & (a->data ? for_tasks : for_data))
		rc = a->data ? fail("--batch, --out and --tokenizer go with --tasks") : fail("--max-windows, --dtype, --document-mask and --document-token go with --data");
	if (rc < 0)
		return EXIT_WRONG_USE;
	if (model_of_directory(&c, a->words[0]) < 0)
		return EXIT_WORK_FAILED;
	if (a->seq_len > c.max_position_embeddings) {
		fail("%s: --seq-len %d is more than the model's max_position_embeddings, %d", a->words[0], a->seq_len, c.max_position_embeddings);
		return EXIT_WORK_FAILED;
	}
	return (a->data ? eval_data : eval_tasks)(a, &c) < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}
