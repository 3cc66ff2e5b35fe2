/*
 * commands/evaluate.c - `ling eval`: the loss on a token file, or scored tasks.
 */
#define _GNU_SOURCE
#include "commands/evaluate.h"

#include "files/base.h"
#include "files/checkpoint.h"
#include "files/encoder.h"
#include "files/tokenizer.h"
#include "parallel.h"
#include "data.h"
#include "ling.h"
#include "training/evaluation.h"
#include "commands/engine.h"
#include "commands/replicas.h"
#include "commands/result.h"
#include "commands/tasks.h"
#include "commands/scoring.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct eval_options {
	const char *data, *dtype, *tasks, *out, *tokenizer, *chat_form;
	bool document_mask, json, no_sharing;
	int packing, document_token, seq_len, batch;
	int64_t max_windows, kv_tokens;
	struct replica_options replicas;
};

/* Fails when the ids of a token file are not those of the model's tokenizer, or of the one named instead. Gives the
 * tokenizer with which the bytes of the text are counted; NULL, with a note, when it is not known. */
static int tokenizer_of_data(struct tokenizer **t, const struct tokens *data, const char *dir, const char *name)
{
	const char *note = NULL;
	*t = NULL;
	if (!*data->tokenizer && name) /* the user knows it */
		return (*t = tokenizer_open(name)) ? 0 : -1;
	const int found = *data->tokenizer ? tokenizer_find(t, dir, name) : 0;
	if (found < 0)
		return -1;
	if (found && !tokenizer_has_hash(*t, data->tokenizer_hash)) {
		const uint32_t hash = tokenizer_hash(*t);
		tokenizer_close(*t);
		*t = NULL;
		return fail("%s: made by tokenizer %s with hash %08x; expected ids of %s tokenizer, %s, which has %08x: make "
				"the token file with ling tokenize --tokenizer %s", data->path, data->tokenizer,
				(unsigned)data->tokenizer_hash, name ? "the named" : "the model's", name ? name : dir, (unsigned)hash,
				name ? name : dir);
	}
	if (!*data->tokenizer)
		note = "does not say what made its ids: no bits per byte without --tokenizer NAME";
	else if (!found && !strcmp(data->tokenizer, BYTE_TOKENIZER))
		*t = tokenizer_open(BYTE_TOKENIZER),
				note = "the model has no tokenizer to compare with that of these ids, byte";
	else if (!found)
		note = "the model has no tokenizer to compare with that of these ids, and no bits per byte without "
				"--tokenizer NAME";
	if (note && parallel_rank() == 0)
		fprintf(stderr, "note: %s: %s\n", data->path, note);
	return 0;
}

static json_t *loss_report(const struct evaluation *e)
{
	json_t *report = json_pack("{s:o, s:o, s:I}", "loss", result_number(e->loss),
			"perplexity", result_number(exp(e->loss)), "tokens", (json_int_t)e->tokens);
	if (e->bytes) {
		json_object_set_new(report, "bytes", json_integer(e->bytes));
		json_object_set_new(report, "bits_per_byte", result_number(e->loss * e->tokens / M_LN2 / e->bytes));
	}
	return report;
}

static void print_loss(const json_t *report)
{
	printf("loss %.12g  perplexity %.9g  tokens %lld", result_double(report, "loss"),
			exp(result_double(report, "loss")), (long long)result_integer(report, "tokens"));
	if (json_object_get(report, "bytes"))
		printf("  bits per byte %.6f", result_double(report, "bits_per_byte"));
	printf("\n");
}

/* How many windows of L tokens a rank computes together, of the `windows` of all ranks: FORWARD_TOKENS tokens or a
 * window more, so that each expert has enough rows for its products to be fast. Fewer where their activations would
 * take more than a quarter of the memory that a rank may use. Collective. */
static int choose_batch(const struct model_config *c, const struct layout *layout, int64_t windows, int L)
{
	enum { FORWARD_TOKENS = 8192 };
	const double memory = fmin(usable_memory("") / parallel_local_ranks(), process_memory());
	const int sharing = layout->data.size * layout->replicas.size;
	const int64_t share = (windows + sharing - 1) / sharing, wanted = (FORWARD_TOKENS + L - 1) / L;
	int64_t batch = wanted < share ? wanted : share;
	struct memory_plan plan;
	while (batch > 1 && (plan_memory(&plan, c, layout, batch, L, EVALUATE) < 0 ||
			(double)plan.activations + plan.balanced_arrivals > memory / 4))
		batch /= 2;
	real least = -(real)(batch > 1 ? batch : 1); /* of all ranks: they compute as many windows */
	all_reduce_max(&layout->all, TRAFFIC_STATISTICS, &least, 1);
	return (int)-least;
}

/* Fails where ranks were started with different options: they would compute different things, or wait for
 * ever. --kv-tokens may differ, as memory does. */
static int check_same_options(const struct eval_options *o)
{
	const int64_t values[] = {o->seq_len, o->batch, o->max_windows, o->packing, o->document_mask, o->document_token,
			o->no_sharing};
	return parallel_same(crc_of(0, (const uint8_t *)values, sizeof values), "the command line");
}

static int eval_data(const struct command_line *line, const char *dir, const struct model_config *c)
{
	const struct eval_options *o = line->options;
	const char *dtype = o->dtype ? o->dtype : "none";
	const int document_token = option_given(line, "document-token") ? o->document_token : -1;
	struct tokens data;
	struct model m = {0};
	struct evaluation e;
	struct data_source source = {0};
	if (snprintf(source.path, sizeof source.path, "%s", o->data) >= (int)sizeof source.path ||
			snprintf(source.dtype, sizeof source.dtype, "%s", dtype) >= (int)sizeof source.dtype)
		return fail("--data %s --dtype %s: too long", o->data, dtype);
	const struct data_options options = {.tokenizer = "none", .vocab_size = c->vocab_size, .seq_len = o->seq_len,
			.document_mask = o->document_mask, .document_token = document_token,
			.packing = o->packing};
	struct tokenizer *tokenizer;
	if (open_data(&data, &source, &options, o->max_windows) < 0)
		return -1;
	if (tokenizer_of_data(&tokenizer, &data, dir, o->tokenizer) < 0) {
		tokens_close(&data);
		return -1;
	}
	const int64_t all = count_windows(&data, o->seq_len);
	const int64_t windows = o->max_windows && o->max_windows < all ? o->max_windows : all;
	struct layout layout;
	int rc = check_same_options(o) < 0 || parallel_same(data.crc32, "the token file of --data") < 0 ? -1
			: replicas_connect(&layout, c, &o->replicas);
	if (rc == 0) {
		const int batch = option_given(line, "batch") ? o->batch : choose_batch(c, &layout, windows, o->seq_len);
		rc = parallel_agree(model_init(&m, c, &layout, batch, o->seq_len, EVALUATE));
	}
	if (rc == 0)
		rc = model_load(&m, dir);
	if (rc == 0)
		rc = evaluate(&m, &data, tokenizer, o->max_windows, &e);
	if (rc == 0)
		replicas_report(&layout);
	model_free(&m);
	tokenizer_close(tokenizer);
	if (rc == 0 && !isfinite(e.loss))
		rc = fail("%s: the loss on %s is %g", dir, o->data, e.loss);
	if (rc == 0 && layout.all.rank == 0)
		result_print(loss_report(&e), o->json, print_loss);
	tokens_close(&data);
	return rc;
}

/* Encodes all tasks for windows of L tokens, work[tasks->count]: all errors in tasks are found here, before anything is
 * computed. Returns the most tokens that a forward pass should take, or -1. */
static int encode_tasks(const struct eval_options *o, const char *dir, const struct model_config *c,
		const struct tasks *tasks, const struct tokenizer *tokenizer, int L, struct task_work *work)
{
	int64_t forward_tokens = 1;
	if (tokenizer_size(tokenizer) > c->vocab_size)
		return fail("%s: the tokenizer has %d ids, the model's vocab_size is %d; expected a tokenizer that the model "
				"was trained with", dir, tokenizer_size(tokenizer), c->vocab_size);
	for (int64_t i = 0; i < tasks->count; i++) {
		if (task_encode(&work[i], &tasks->task[i], tokenizer, L) < 0)
			return -1;
		const int64_t batch = work[i].num_contexts < o->batch ? work[i].num_contexts : o->batch;
		forward_tokens = batch * work[i].longest > forward_tokens ? batch * work[i].longest : forward_tokens;
	}
	return forward_tokens < ENGINE_TOKENS ? (int)forward_tokens : ENGINE_TOKENS;
}

/* Loads the model, for windows of L tokens, on all ranks, which share the samples. */
static int load_model(struct model *m, const struct model_config *c, const char *dir, int forward_tokens, int L,
		const struct replica_options *replicas)
{
	struct layout layout;
	if (replicas_connect(&layout, c, replicas) < 0 ||
			parallel_agree(model_init(m, c, &layout, 1, forward_tokens, EVALUATE)) < 0)
		return -1;
	set_rope_length(m, L);
	return model_load(m, dir);
}

static int eval_tasks(const struct command_line *line, const char *dir, const struct model_config *c)
{
	const struct eval_options *o = line->options;
	const bool first = parallel_rank() == 0;
	struct tasks tasks;
	struct model m = {0};
	struct results *results = NULL;
	struct task_work *work = NULL;
	struct ids ends = {0}, chat_ends = {0}; /* of replies, and of those in chat form */
	struct task_result *result = NULL;
	const struct engine_options engine = {.max_requests = o->batch, .kv_tokens = o->kv_tokens,
			.no_sharing = o->no_sharing};
	const int L = o->seq_len ? o->seq_len : default_sequence(c);
	int rc = tasks_load(&tasks, o->tasks), forward_tokens = 0;
	for (const struct task *t = tasks.task; rc == 0 && first && t < tasks.task + tasks.count; t++)
		if (t->examples.count && !*t->examples.data)
			fprintf(stderr, "note: task %s takes its examples from %s, the samples that it scores; name others with "
					"examples.data, or that file itself\n", t->name, t->data);
	struct tokenizer *tokenizer = rc == 0 ? tokenizer_of_model(dir, o->tokenizer) : NULL;
	if (tokenizer && (end_ids_read(&ends, dir) < 0 || end_ids_read(&chat_ends, dir) < 0 ||
			chat_form_choose(tokenizer, o->chat_form) < 0))
		forward_tokens = -1;
	else if (tokenizer) {
		chat_end_append(tokenizer, &chat_ends);
		work = calloc(tasks.count, sizeof *work);
		result = calloc(tasks.count, sizeof *result);
		forward_tokens = !work || !result ? fail("out of memory for %lld tasks", (long long)tasks.count)
				: encode_tasks(o, dir, c, &tasks, tokenizer, L, work);
	}
	rc = parallel_agree(forward_tokens > 0 ? 0 : -1); /* before anything that the ranks do together */
	if (rc == 0)
		rc = check_same_options(o) < 0 ? -1 : load_model(&m, c, dir, forward_tokens, L, &o->replicas);
	if (rc == 0 && o->out && first && !(results = results_open(o->out)))
		rc = -1;
	rc = parallel_agree(rc);
	for (int64_t i = 0; i < tasks.count && rc == 0; i++) {
		work[i].ends = tasks.task[i].chat ? &chat_ends : &ends;
		if ((rc = task_run(&work[i], &m, &engine)) == 0 && first)
			task_score(&work[i], &result[i], results);
	}
	const struct evaluation_facts facts = {dir, o->tasks, tokenizer ? tokenizer_hash(tokenizer) : 0, L};
	json_t *report = rc == 0 && first ? results_report(&facts, result, tasks.count) : NULL;
	if (results && results_finish(results, report) < 0)
		rc = -1;
	if (rc == 0)
		replicas_report(&m.layout);
	if (rc == 0 && first)
		result_print(report, o->json, print_results);
	else
		json_decref(report);
	for (int64_t i = 0; work && i < tasks.count; i++)
		task_work_free(&work[i]);
	free(work);
	free(ends.id);
	free(chat_ends.id);
	free(result);
	model_free(&m);
	tokenizer_close(tokenizer);
	tasks_free(&tasks);
	return rc;
}

static int run_eval(const struct command_line *line)
{
	const struct eval_options *o = line->options;
	char dir[PATH_LEN];
	struct model_config c;
	int rc = 0;
	if (!o->data == !o->tasks)
		rc = o->data ? fail("--data and --tasks exclude each other") : fail("--data is required, or --tasks");
	else if (o->data && !o->seq_len)
		rc = fail("--seq-len is required with --data");
	else if (o->data && (option_given(line, "out") || option_given(line, "chat-form") ||
			option_given(line, "kv-tokens") || o->no_sharing))
		rc = fail("--kv-tokens, --no-prefix-sharing, --out and --chat-form go with --tasks");
	else if (o->tasks && (option_given(line, "max-windows") || option_given(line, "dtype") ||
			option_given(line, "packing") || option_given(line, "document-mask") ||
			option_given(line, "document-token")))
		rc = fail("--max-windows, --dtype, --packing, --document-mask and --document-token go with --data");
	if (rc < 0)
		return EXIT_WRONG_USE;
	if (find_model(dir, line->words[0]) < 0 || config_from_huggingface(&c, dir) < 0)
		return EXIT_WORK_FAILED;
	if (o->seq_len > longest_sequence(&c)) {
		fail("%s: --seq-len %d is more than the model's max_position_embeddings, %d%s", dir, o->seq_len,
				longest_sequence(&c), c.rope_scaling.type ? ", with rope_scaling" : "");
		return EXIT_WORK_FAILED;
	}
	return (o->data ? eval_data : eval_tasks)(line, dir, &c) < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static const struct command_option options[] = {
	TEXT_OPTION(eval_options, data, "data", "PREFIX",
			"Token file PREFIX.bin and PREFIX.idx, an llm.c .bin file, or a file of bare ids"),
	TEXT_OPTION(eval_options, dtype, "dtype", "TYPE", "Type of bare ids, such as uint16"),
	FLAG_OPTION(eval_options, document_mask, "document-mask", "Attention and positions begin anew at each document"),
	CHOICE_OPTION(eval_options, packing, "packing", "HOW", packing_names,
			"As data.packing of a run: windows; documents; auto, which packs documents where there is a loss mask",
			.initial = "auto"),
	WHOLE_OPTION(eval_options, document_token, "document-token", "ID", 0, INT32_MAX,
			"The id that separates documents where there is no index"),
	WHOLE_OPTION(eval_options, seq_len, "seq-len", "L", 1, 1000000,
			"Tokens of a window (required with --data; for tasks, by default the model's longest)"),
	WHOLE_OPTION(eval_options, max_windows, "max-windows", "N", 1, INT64_MAX, "Only the first N windows"),
	TEXT_OPTION(eval_options, tasks, "tasks", "FILE.yaml", "Tasks: multiple choice, perplexity, exact match"),
	TEXT_OPTION(eval_options, out, "out", "DIR", "Write DIR/results.json and DIR/samples.jsonl"),
	WHOLE_OPTION(eval_options, batch, "batch", "N", 1, MAX_BATCH,
			"Options, windows and replies of a task that are computed together; with --data windows, by default some "
			"8192 tokens of them; changes no result", .initial = "32"),
	KV_TOKENS_OPTION(eval_options),
	FLAG_OPTION(eval_options, no_sharing, "no-prefix-sharing",
			"Compute equal beginnings of samples for each one, to compare"),
	TEXT_OPTION(eval_options, tokenizer, "tokenizer", "NAME", "byte, or a tokenizer.json (default: the model's own)"),
	TEXT_OPTION(eval_options, chat_form, "chat-form", "NAME", CHAT_FORM_HELP),
	PRINT_OPTION("keys", tasks_print_keys, "Print every key of a task file with its default and meaning"),
	REPLICA_OPTIONS(eval_options),
	FLAG_OPTION(eval_options, json, "json", "Print one JSON object"),
};

const struct command eval_command = {
	.name = "eval", .usage = "MODEL_DIR --data PREFIX --seq-len L | MODEL_DIR --tasks FILE.yaml",
	.min_words = 1, .max_words = 1,
	.help = "Cross-entropy and perplexity of a token file, over all its full windows; or scored tasks. MODEL_DIR is "
		"a checkpoint, a run (its newest checkpoint is taken) or a Hugging Face directory.",
	.run = run_eval, COMMAND_OPTIONS(eval_options, options), .computes = true,
};
