/*
 * commands/main.c - main, the table of commands, and their options.
 */
#define _GNU_SOURCE
#include "commands/main.h"

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "files/tensors.h"
#include "files/tokenizer.h"
#include "files/text.h"
#include "files/tokenizer_training.h"
#include "files/convert.h"
#include "data.h"
#include "ling.h"
#include "commands/engine.h"
#include "commands/tasks.h"
#include "commands/scoring.h"
#include "commands/info.h"
#include "commands/doctor.h"
#include "commands/tokenize.h"
#include "commands/plot.h"

#include <argp.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

enum { EXIT_DONE = 0, EXIT_WORK_FAILED = 1, EXIT_WRONG_USE = 2 };

const char *argp_program_version = "ling " LING_VERSION;

enum { MAX_SPECIAL = 64 };      /* tokens that train-tokenizer is given */

/* What the command line of any command may hold. */
struct arguments {
	const struct command *command;
	uint64_t given;              /* a bit for each option that was given, see OPTION_BIT */
	char **words;                /* the words that are no options */
	int num_words;
	const char *special_tokens[MAX_SPECIAL];
	int num_special, vocab_size;
	const char *tokenizer, *out, *decode, *pattern, *data, *dtype, *tasks, *prompt, *prompts;
	bool chat, document_mask;
	struct generation_config generation;
	char *stop;
	int document_token, seq_len, ranks, ranks_per_node;
	int64_t max_windows;
	double memory_per_node;      /* bytes */
	bool json, special_as_text;
	const char *to, *weight_type;
	double max_shard_size;       /* bytes */
	bool fold_norm_head, no_tokenizer;
};

enum { OPTION_TOKENIZER = 256, OPTION_OUT, OPTION_DECODE, OPTION_SPECIAL_AS_TEXT, OPTION_VOCAB_SIZE, OPTION_PATTERN, OPTION_SPECIAL_TOKEN, OPTION_DATA,
	OPTION_DTYPE, OPTION_DOCUMENT_MASK, OPTION_DOCUMENT_TOKEN, OPTION_SEQ_LEN, OPTION_MAX_WINDOWS, OPTION_RANKS, OPTION_RANKS_PER_NODE,
	OPTION_MEMORY_PER_NODE, OPTION_PROMPT, OPTION_PROMPTS, OPTION_CHAT, OPTION_MAX_TOKENS, OPTION_TEMPERATURE, OPTION_TOP_K, OPTION_TOP_P,
	OPTION_SEED, OPTION_BATCH, OPTION_STOP, OPTION_NO_CACHE, OPTION_TASKS, OPTION_JSON, OPTION_TO, OPTION_WEIGHT_TYPE,
	OPTION_MAX_SHARD_SIZE, OPTION_FOLD_NORM_HEAD, OPTION_NO_TOKENIZER, OPTION_KEYS };

#define OPTION_BIT(option) (UINT64_C(1) << ((option) - OPTION_TOKENIZER))

enum { ANY_NUMBER = INT32_MAX, MAX_BATCH = 256 };

struct command {
	const char *name;
	int (*run)(const struct arguments *);
	bool computes;               /* worth the best environment, see use_best_environment */
	int min_words, max_words;
	uint64_t required;           /* options that must be given */
	const char *usage, *help;
	struct argp_option options[16];
};

/* A whole number from `min` to `max`, or a usage error. */
static int64_t parse_whole(const char *text, const char *option, int64_t min, int64_t max, struct argp_state *state)
{
	char *end;
	errno = 0;
	long long n = strtoll(text, &end, 10);
	if (end == text || *end || errno || n < min || n > max)
		argp_error(state, "%s %s: expected a whole number from %lld to %lld", option, text, (long long)min, (long long)max);
	return n;
}

static int64_t parse_count(const char *text, const char *option, int64_t max, struct argp_state *state)
{
	return parse_whole(text, option, 1, max, state);
}

/* A number above `low` and up to `high`, or a usage error. */
static double parse_number(const char *text, const char *option, double low, double high, struct argp_state *state)
{
	char *end;
	const double number = strtod(text, &end);
	if (end == text || *end || !(number > low && number <= high))
		argp_error(state, "%s %s: expected a number above %g and up to %g", option, text, low, high);
	return number;
}

/* Bytes of a size such as 256GB or 1.5TB, or a usage error. */
static double parse_size(const char *text, const char *option, struct argp_state *state)
{
	static const struct { const char *name; double bytes; } units[] = {{"kB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}, {"KiB", 0x1p10}, {"MiB", 0x1p20},
			{"GiB", 0x1p30}, {"TiB", 0x1p40}};
	char *end;
	const double number = strtod(text, &end);
	for (size_t i = 0; i < sizeof units / sizeof *units; i++)
		if (end > text && number > 0 && isfinite(number) && !strcmp(end, units[i].name))
			return number * units[i].bytes;
	argp_error(state, "%s %s: expected a size in kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 256GB", option, text);
	return 0;
}

/* One of the names that an option may have, or a usage error. */
static const char *parse_choice(const char *text, const char *option, const char *const *names, struct argp_state *state)
{
	char list[128] = "";
	for (int i = 0; names[i]; i++) {
		if (!strcmp(text, names[i]))
			return text;
		snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "", names[i]);
	}
	argp_error(state, "%s %s: expected one of %s", option, text, list);
	return NULL;
}

static const char *const format_names[] = {"hf", "checkpoint", "gguf", NULL}; /* in the order of enum model_format */
static const char *const weight_types[] = {"f32", "bf16", "f16", NULL};

/* Checks that a command line holds what its command needs. */
static void check_usage(const struct arguments *a, struct argp_state *state)
{
	const struct command *c = a->command;
	for (const struct argp_option *o = c->options; o->name; o++)
		if (!a->decode && c->required & ~a->given & OPTION_BIT(o->key))
			argp_error(state, "--%s is required", o->name);
	if (a->decode && (a->out || a->num_words || a->special_as_text))
		argp_error(state, "--decode goes with --tokenizer alone");
	if (a->num_words < c->min_words && !a->decode)
		argp_error(state, "too few arguments");
	if (a->num_words > c->max_words)
		argp_error(state, "unexpected '%s'", a->words[c->max_words]);
}

static error_t parse_option(int key, char *value, struct argp_state *state)
{
	struct arguments *a = state->input;
	if (key >= OPTION_TOKENIZER && key <= OPTION_KEYS)
		a->given |= OPTION_BIT(key);
	switch (key) {
	case OPTION_TOKENIZER: a->tokenizer = value; break;
	case OPTION_OUT: a->out = value; break;
	case OPTION_DECODE: a->decode = value; break;
	case OPTION_SPECIAL_AS_TEXT: a->special_as_text = true; break;
	case OPTION_VOCAB_SIZE: a->vocab_size = parse_count(value, "--vocab-size", 10000000, state); break;
	case OPTION_PATTERN: a->pattern = value; break;
	case OPTION_SPECIAL_TOKEN:
		if (a->num_special == MAX_SPECIAL)
			argp_error(state, "--special: more than %d tokens", MAX_SPECIAL);
		a->special_tokens[a->num_special++] = value;
		break;
	case OPTION_DATA: a->data = value; break;
	case OPTION_DTYPE: a->dtype = value; break;
	case OPTION_DOCUMENT_MASK: a->document_mask = true; break;
	case OPTION_DOCUMENT_TOKEN: a->document_token = parse_whole(value, "--document-token", 0, INT32_MAX, state); break;
	case OPTION_SEQ_LEN: a->seq_len = parse_count(value, "--seq-len", 1000000, state); break;
	case OPTION_MAX_WINDOWS: a->max_windows = parse_count(value, "--max-windows", INT64_MAX, state); break;
	case OPTION_RANKS: a->ranks = parse_count(value, "--ranks", 1000000, state); break;
	case OPTION_RANKS_PER_NODE: a->ranks_per_node = parse_count(value, "--ranks-per-node", 1000000, state); break;
	case OPTION_MEMORY_PER_NODE: a->memory_per_node = parse_size(value, "--memory-per-node", state); break;
	case OPTION_PROMPT: a->prompt = value; break;
	case OPTION_PROMPTS: a->prompts = value; break;
	case OPTION_CHAT: a->chat = true; break;
	case OPTION_MAX_TOKENS: a->generation.max_tokens = parse_count(value, "--max-tokens", INT32_MAX, state); break;
	case OPTION_TEMPERATURE:
		a->generation.sampling.temperature = strcmp(value, "0") ? parse_number(value, "--temperature", 0, 100, state) : 0;
		break;
	case OPTION_TOP_K: a->generation.sampling.top_k = parse_count(value, "--top-k", INT32_MAX, state); break;
	case OPTION_TOP_P: a->generation.sampling.top_p = parse_number(value, "--top-p", 0, 1, state); break;
	case OPTION_SEED: a->generation.sampling.seed = strcmp(value, "0") ? parse_count(value, "--seed", INT64_MAX, state) : 0; break;
	case OPTION_BATCH: a->generation.batch = parse_count(value, "--batch", MAX_BATCH, state); break;
	case OPTION_STOP:
		a->stop = value;
		a->generation.stop = (struct strings){&a->stop, *value != 0, false};
		break;
	case OPTION_NO_CACHE: a->generation.no_cache = true; break;
	case OPTION_JSON: a->json = true; break;
	case OPTION_TASKS: a->tasks = value; break;
	case OPTION_TO: a->to = parse_choice(value, "--to", format_names, state); break;
	case OPTION_WEIGHT_TYPE: a->weight_type = parse_choice(value, "--dtype", weight_types, state); break;
	case OPTION_MAX_SHARD_SIZE: a->max_shard_size = parse_size(value, "--max-shard-size", state); break;
	case OPTION_FOLD_NORM_HEAD: a->fold_norm_head = true; break;
	case OPTION_NO_TOKENIZER: a->no_tokenizer = true; break;
	case OPTION_KEYS:
		(strcmp(a->command->name, "eval") ? config_print_keys : tasks_print_keys)(stdout);
		exit(EXIT_DONE);
	case ARGP_KEY_ARGS:
		a->words = state->argv + state->next;
		a->num_words = state->argc - state->next;
		break;
	case ARGP_KEY_END: check_usage(a, state); break;
	default: return ARGP_ERR_UNKNOWN;
	}
	return 0;
}

/* Says once, for the first machine that has them, that there are more threads than cores: a run several times slower than it could be. */
static void warn_of_oversubscription(void)
{
	const struct oversubscription c = parallel_oversubscription(kernels_threads());
	const int threads = c.cores / c.ranks;
	const bool bound = c.cores < sysconf(_SC_NPROCESSORS_ONLN);
	if (c.first)
		fprintf(stderr, "warning: on %s %d rank%s with %d threads in all may use %d core%s: set OMP_NUM_THREADS=%d%s\n", parallel_host(), c.ranks,
				c.ranks > 1 ? "s" : "", c.threads, c.cores, c.cores > 1 ? "s" : "", threads ? threads : 1,
				c.ranks > 1 && bound ? ", or do not bind the ranks (mpirun --bind-to none)" : threads ? "" : " and start fewer ranks on a machine");
}

static int command_train(const struct arguments *a)
{
	struct config c;
	if (parallel_agree(config_load(&c, a->words[0], a->num_words - 1, a->words + 1, false)) < 0)
		return EXIT_WRONG_USE;
	warn_of_oversubscription();
	catch_signals();
	int lock = parallel_rank() == 0 ? lock_directory(c.train.output_dir) : 0;
	if (parallel_agree(lock < 0 ? -1 : 0) < 0)
		return EXIT_WORK_FAILED;
	struct trainer t;
	int rc = trainer_init(&t, &c);
	if (rc == 0) {
		const struct layout *l = &t.model.layout;
		const struct layout alone = layout_of_rank(0, 1, 1, 1);
		struct memory_plan whole = {0};
		plan_memory(&whole, &c.model, &alone, 1, 1, EVALUATE);
		if (is_rank0(&t)) {
			printf("%lld parameters, %lld steps, %lld tokens, ", (long long)whole.num_elements, (long long)t.steps, (long long)t.tokens);
			if (l->world.size > 1)
				printf("%d ranks (data %d x tensor %d, expert %d) of ", l->world.size, l->data.size, l->tensor.size, l->expert.size);
			printf("%d threads\n", kernels_threads());
			fflush(stdout);
		}
		rc = trainer_run(&t);
		trainer_free(&t);
	}
	if (parallel_rank() == 0)
		close(lock);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

/* Says so if a directory that is no model is that of a run. */
static void explain_run(const char *dir)
{
	char path[PATH_LEN + 32];
	snprintf(path, sizeof path, "%s/metrics.jsonl", dir);
	if (access(path, F_OK) == 0)
		fail("%s is the directory of a run; give one of its checkpoints, %s/step-NNNNNNN", dir, dir);
}

/* The config of a model's directory. */
static int model_of_directory(struct model_config *c, const char *dir)
{
	if (config_from_huggingface(c, dir) == 0)
		return 0;
	explain_run(dir);
	return -1;
}

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
	if (open_data(&data, &source, &(struct data_options){"none", 0, c->vocab_size, a->seq_len, a->document_mask, a->document_token}, a->max_windows) < 0)
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

static int command_eval(const struct arguments *a)
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

static int command_generate(const struct arguments *a)
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

static int command_tokenize(const struct arguments *a)
{
	struct tokenized t;
	if (a->decode)
		return tokens_print(a->decode, a->tokenizer, stdout) < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
	if (tokenize_files(a->out, a->tokenizer ? a->tokenizer : "byte", !a->special_as_text, a->num_words, a->words, &t) < 0)
		return EXIT_WORK_FAILED;
	printf("%s: %lld documents, %lld tokens, %lld bytes", a->out, (long long)t.documents, (long long)t.tokens, (long long)t.bytes);
	if (t.loss_tokens < t.tokens)
		printf(", %lld tokens learned", (long long)t.loss_tokens);
	printf("\n");
	return EXIT_DONE;
}

static int command_train_tokenizer(const struct arguments *a)
{
	const struct tokenizer_training how = {a->vocab_size, a->pattern, (const char **)a->special_tokens, a->num_special, a->num_words, a->words};
	struct tokenizer_trained t;
	if (tokenizer_train(a->out, &how, &t) < 0)
		return EXIT_WORK_FAILED;
	printf("%s: %d tokens, %lld merges, from %lld bytes with %lld distinct words\n", a->out, t.vocab_size, (long long)t.merges, (long long)t.bytes,
			(long long)t.words);
	if (t.vocab_size < a->vocab_size)
		printf("the text has no more pairs to merge\n");
	return EXIT_DONE;
}

/* What the conversion's options cannot mean together. */
static int check_conversion_usage(const struct arguments *a, enum model_format format)
{
	if (format == FORMAT_CHECKPOINT && a->weight_type && strcmp(a->weight_type, "f32"))
		return fail("--dtype %s: a checkpoint holds f32, for training computes in it", a->weight_type);
	if (format == FORMAT_CHECKPOINT && a->fold_norm_head)
		return fail("--fold-norm-head is for inference: expected --to hf");
	if (format != FORMAT_HUGGINGFACE && a->max_shard_size)
		return fail("--max-shard-size goes with --to hf; other formats are one file");
	if (a->max_shard_size > 1e18)
		return fail("--max-shard-size: expected at most 1000000 TB");
	return 0;
}

static int command_convert(const struct arguments *a)
{
	const char *source_path = a->words[0], *path = a->words[1];
	const size_t length = strlen(path);
	int format = length > 5 && !strcmp(path + length - 5, ".gguf") ? FORMAT_GGUF : FORMAT_HUGGINGFACE;
	for (int i = 0; a->to && format_names[i]; i++)
		if (!strcmp(a->to, format_names[i]))
			format = i;
	if (check_conversion_usage(a, format) < 0)
		return EXIT_WRONG_USE;
	const struct conversion to = {.path = path, .format = format, .dtype = a->weight_type, .fold_norm_head = a->fold_norm_head,
			.max_shard_size = a->max_shard_size ? (int64_t)a->max_shard_size : 5000000000, .no_tokenizer = a->no_tokenizer};

	struct model_config c;
	struct source *source = source_open(source_path, &c);
	if (!source) {
		explain_run(source_path);
		return EXIT_WORK_FAILED;
	}
	c.tie_word_embeddings = false; /* so that lm_head.weight is listed */
	int n;
	struct parameter *parameters = global_parameters(&c, &n);
	struct named_tensor *params = parameters ? calloc(n, sizeof *params) : NULL;
	struct converted result;
	int rc = params ? 0 : fail("out of memory for the names of the model's tensors");
	for (int i = 0; i < n && rc == 0; i++)
		params[i] = (struct named_tensor){.name = parameters[i].name, .rows = parameters[i].rows, .cols = parameters[i].cols};
	if (rc == 0)
		rc = convert_model(source, params, n, &to, &result);
	if (rc == 0 && a->json)
		printf("{\"format\": \"%s\", \"tensors\": %lld, \"bytes\": %lld}\n", format_names[format], (long long)result.tensors,
				(long long)result.bytes);
	else if (rc == 0)
		printf("%s: %lld tensors, %.3g GB\n", path, (long long)result.tensors, result.bytes / 1e9);
	free(params);
	free(parameters);
	source_close(source);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static int command_info(const struct arguments *a)
{
	struct config c = {.parallel = {1, 1}};
	struct stat st;
	if ((a->memory_per_node || a->ranks_per_node) && !a->ranks) {
		fail("--memory-per-node and --ranks-per-node go with --ranks");
		return EXIT_WRONG_USE;
	}
	if (stat(a->words[0], &st) == 0 && S_ISDIR(st.st_mode)) {
		if (a->num_words > 1) {
			fail("%s: key=value goes with a config file, not with a model directory", a->words[1]);
			return EXIT_WRONG_USE;
		}
		if (config_from_huggingface(&c.model, a->words[0]) < 0)
			return EXIT_WORK_FAILED;
	} else if (config_load(&c, a->words[0], a->num_words - 1, a->words + 1, true) < 0)
		return EXIT_WRONG_USE;
	usual_sizes(&c, a->ranks ? a->ranks : 1);
	const double node = a->memory_per_node ? a->memory_per_node : usable_memory("");
	int rc = a->ranks ? print_plan(&c, a->ranks, node / (a->ranks_per_node ? a->ranks_per_node : 1), a->json) : print_info(&c, a->json);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static int command_bench(const struct arguments *a)
{
	const bool named = a->num_words && !strchr(a->words[0], '=');
	const char *path = named ? a->words[0] : "configs/bench.yaml";
	struct config c;
	struct trainer t;
	struct bench b = {0};
	if (config_load(&c, path, a->num_words - named, a->words + named, true) < 0)
		return EXIT_WRONG_USE;
	if (!c.data.seq_len || !c.train.batch || !c.train.micro_batch) {
		fail("%s: a benchmark needs data.seq_len, train.batch and train.micro_batch", path);
		return EXIT_WRONG_USE;
	}
	c.train.steps = BENCH_STEPS + 1;
	c.train.batch_warmup.tokens = 0;
	int rc = trainer_allocate(&t, &c);
	if (rc == 0) {
		rc = measure_steps(&b, &t);
		trainer_free(&t);
	}
	if (rc == 0 && parallel_rank() == 0)
		print_bench(&b, path, a->json);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static int command_doctor(const struct arguments *a)
{
	struct examination x = {0};
	if (examine_machine(&x) < 0)
		return EXIT_WORK_FAILED;
	(a->json ? print_examination_json : print_examination)(&x);
	return judge_machine(&x) < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static int command_plot(const struct arguments *a)
{
	char path[PATH_LEN + 16];
	snprintf(path, sizeof path, "%s/metrics.png", a->words[0]);
	if (plot_run(a->words[0], a->out ? a->out : path) < 0)
		return EXIT_WORK_FAILED;
	printf("%s\n", a->out ? a->out : path);
	return EXIT_DONE;
}

#define JSON_OPTION {"json", OPTION_JSON, NULL, 0, "Print one JSON object", 0}

static const struct command commands[] = {
	{"train", command_train, true, 1, ANY_NUMBER, 0, "CONFIG.yaml [key.path=value ...]",
		"Train a model. The same command again continues from the newest checkpoint of train.output_dir. SIGTERM and SIGINT save and stop.",
		{{"keys", OPTION_KEYS, NULL, 0, "Print every key of a config with its default and meaning", 0}}},
	{"eval", command_eval, true, 1, 1, 0, "MODEL_DIR --data PREFIX --seq-len L | MODEL_DIR --tasks FILE.yaml",
		"Cross-entropy and perplexity of a token file, over all its full windows; or scored tasks. MODEL_DIR is a checkpoint or a Hugging Face "
		"directory.",
		{{"data", OPTION_DATA, "PREFIX", 0, "Token file PREFIX.bin and PREFIX.idx, an llm.c .bin file, or a file of bare ids", 0},
		{"dtype", OPTION_DTYPE, "TYPE", 0, "Type of bare ids, such as uint16", 0},
		{"document-mask", OPTION_DOCUMENT_MASK, NULL, 0, "Attention and positions begin anew at each document", 0},
		{"document-token", OPTION_DOCUMENT_TOKEN, "ID", 0, "The id that separates documents where there is no index", 0},
		{"seq-len", OPTION_SEQ_LEN, "L", 0, "Tokens of a window (needed with --data; for tasks the model's max_position_embeddings)", 0},
		{"max-windows", OPTION_MAX_WINDOWS, "N", 0, "Only the first N windows", 0},
		{"tasks", OPTION_TASKS, "FILE.yaml", 0, "Tasks: multiple choice, perplexity, exact match", 0},
		{"out", OPTION_OUT, "DIR", 0, "Write DIR/results.json and DIR/samples.jsonl", 0},
		{"batch", OPTION_BATCH, "N", 0, "Samples of a task that are computed together (8); changes no score", 0},
		{"tokenizer", OPTION_TOKENIZER, "NAME", 0, "byte, or a tokenizer.json (the model's own)", 0},
		{"keys", OPTION_KEYS, NULL, 0, "Print every key of a task file with its default and meaning", 0}, JSON_OPTION}},
	{"generate", command_generate, true, 1, 1, 0, "MODEL_DIR (--prompt TEXT | --prompts FILE)",
		"Continue text. MODEL_DIR is a checkpoint or a Hugging Face directory. At temperature 0, the default, the most likely token is taken each "
		"time. The output depends neither on the batch nor on the cache.",
		{{"prompt", OPTION_PROMPT, "TEXT", 0, "Continue this text; an empty one is the beginning of a document", 0},
		{"prompts", OPTION_PROMPTS, "FILE", 0, "Continue each line of a text file; of FILE.jsonl, each line's `prompt`, or reply to its `messages`", 0},
		{"chat", OPTION_CHAT, NULL, 0, "A prompt is a user's message, and the reply follows", 0},
		{"max-tokens", OPTION_MAX_TOKENS, "N", 0, "At most so many tokens for each prompt (256, or as many as the model has positions for)", 0},
		{"temperature", OPTION_TEMPERATURE, "T", 0, "Draw from softmax(logits / T); 0: take the most likely", 0},
		{"top-k", OPTION_TOP_K, "K", 0, "Draw from the K most likely tokens", 0},
		{"top-p", OPTION_TOP_P, "P", 0, "Draw from the fewest tokens that have P of the probability", 0},
		{"seed", OPTION_SEED, "S", 0, "Of the draws (0), which depend on it, the prompt's number and the position alone", 0},
		{"batch", OPTION_BATCH, "B", 0, "Prompts at a time (8)", 0},
		{"stop", OPTION_STOP, "TEXT", 0, "End before this text", 0},
		{"no-cache", OPTION_NO_CACHE, NULL, 0, "Compute the whole sequence again for each token: slow, to check", 0},
		{"tokenizer", OPTION_TOKENIZER, "NAME", 0, "byte, a tokenizer.json, or its directory (the model's own)", 0},
		{"json", OPTION_JSON, NULL, 0, "Print a JSON object on a line for each prompt", 0}}},
	{"tokenize", command_tokenize, false, 1, ANY_NUMBER, OPTION_BIT(OPTION_OUT), "--out PREFIX FILE...\n--decode PREFIX",
		"Make a token file from text files and JSON lines (.jsonl: each line has a `text`, the `messages` of a conversation, or a `prompt` and its "
		"`completion`; of the latter two only the assistant's replies are learned).",
		{{"tokenizer", OPTION_TOKENIZER, "NAME", 0, "byte (the default): a byte is a token, 256 ends a document; or a tokenizer.json of byte-level "
			"BPE, or a directory with one", 0},
		{"out", OPTION_OUT, "PREFIX", 0, "Write PREFIX.bin, PREFIX.idx and PREFIX.json (required)", 0},
		{"special-as-text", OPTION_SPECIAL_AS_TEXT, NULL, 0, "What looks like a special token in a text is text, and not that token", 0},
		{"decode", OPTION_DECODE, "PREFIX", 0, "Print the text of a token file instead, special tokens included", 0}}},
	{"train-tokenizer", command_train_tokenizer, false, 1, ANY_NUMBER, OPTION_BIT(OPTION_OUT) | OPTION_BIT(OPTION_VOCAB_SIZE),
		"--vocab-size N --out FILE.json FILE...",
		"Train a byte-level BPE on text files and JSON lines, and write it as a tokenizer.json, for ling and for Hugging Face's tools.",
		{{"vocab-size", OPTION_VOCAB_SIZE, "N", 0, "Tokens, the 256 bytes and the special ones included (required)", 0},
		{"out", OPTION_OUT, "FILE", 0, "The tokenizer.json (required)", 0},
		{"pattern", OPTION_PATTERN, "REGEX", 0, "What cuts text into words, beyond which nothing is merged (Ling's)", 0},
		{"special", OPTION_SPECIAL_TOKEN, "TOKEN", 0, "A special token beside <|endoftext|>, <role> and </role>; may be given several times", 0}}},
	{"convert-checkpoint", command_convert, false, 2, 2, 0, "SRC DST [--to hf|checkpoint|gguf]",
		"Convert a model: SRC is a Hugging Face directory, a checkpoint, or a GGUF file (f32, bf16, f16); DST must not exist.",
		{{"to", OPTION_TO, "FORMAT", 0, "hf, a Hugging Face directory (the default); gguf, a file that llama.cpp loads (that of a DST.gguf); checkpoint: "
			"DST is RUN/step-0000000, from which ling train continues with train.output_dir=RUN", 0},
		{"dtype", OPTION_WEIGHT_TYPE, "TYPE", 0, "f32, bf16 or f16 (as each tensor is in SRC)", 0},
		{"max-shard-size", OPTION_MAX_SHARD_SIZE, "SIZE", 0, "Of a file of weights, such as 500MB (5GB)", 0},
		{"fold-norm-head", OPTION_FOLD_NORM_HEAD, NULL, 0, "Divide lm_head by its columns' norms, and set norm_head to false", 0},
		{"no-tokenizer", OPTION_NO_TOKENIZER, NULL, 0, "Leave the tokenizer out of a GGUF file, or of what is made from one", 0}, JSON_OPTION}},
	{"info", command_info, false, 1, ANY_NUMBER, 0, "CONFIG.yaml|MODEL_DIR [--ranks N] [key.path=value ...]",
		"Parameters, memory of a training step and FLOPs a token, of a config (with key=value) or of a model's directory. With --ranks: memory of "
		"a rank and what it sends in a step, for parallel.tensor and parallel.expert, and the layouts that fit.",
		{{"ranks", OPTION_RANKS, "N", 0, "Plan for N ranks", 0},
		{"ranks-per-node", OPTION_RANKS_PER_NODE, "R", 0, "Ranks that share the memory of a node (1)", 0},
		{"memory-per-node", OPTION_MEMORY_PER_NODE, "SIZE", 0, "Such as 256GB (this machine's)", 0}, JSON_OPTION}},
	{"bench", command_bench, true, 0, ANY_NUMBER, 0, "[CONFIG.yaml] [key.path=value ...]",
		"Time training steps on random tokens and compare them with the machine's own rate of large products (configs/bench.yaml).",
		{JSON_OPTION}},
	{"doctor", command_doctor, true, 0, 0, 0, "",
		"Examine the machine: processor, OpenBLAS kernel, rates, bandwidth, threads, and whether every operation computes what its plain form does.",
		{JSON_OPTION}},
	{"plot", command_plot, false, 1, 1, 0, "RUN_DIR",
		"Draw losses, learning rate, batch size and expert load of a run as a PNG.",
		{{"out", OPTION_OUT, "FILE", 0, "The picture (RUN_DIR/metrics.png)", 0}}},
};

enum { NUM_COMMANDS = sizeof commands / sizeof *commands };

static void print_usage(FILE *out)
{
	fprintf(out, "usage: ling COMMAND ...\n\nTrains and evaluates Ling-style mixture-of-experts language models on CPUs.\n\n");
	for (int i = 0; i < NUM_COMMANDS; i++)
		fprintf(out, "  ling %s %s\n      %s\n", commands[i].name, commands[i].usage, commands[i].help);
	fprintf(out, "\n`ling COMMAND --help` lists the options of a command.\n");
}

enum { STACK_BYTES = 8 << 20, STACK_NEEDED = 3 << 20 };

/* The blocks of a matrix product stand on the stack: makes the first thread's large enough. */
static int widen_stack(void)
{
	struct rlimit stack;
	if (getrlimit(RLIMIT_STACK, &stack) < 0 || stack.rlim_cur == RLIM_INFINITY || stack.rlim_cur >= STACK_BYTES)
		return 0;
	stack.rlim_cur = stack.rlim_max == RLIM_INFINITY || stack.rlim_max > STACK_BYTES ? STACK_BYTES : stack.rlim_max;
	if (stack.rlim_cur >= STACK_NEEDED && setrlimit(RLIMIT_STACK, &stack) == 0)
		return 0;
	return fail("the stack is limited to %lld kB, and matrix products need %d: raise it with ulimit -s %d", (long long)stack.rlim_cur >> 10,
			STACK_NEEDED >> 10, STACK_BYTES >> 10);
}

/* Libraries read the environment only while they are loaded, so what suits them is set and the program started again, once. A value
 * that the user has set is respected.
 * An old OpenBLAS does not know a new processor and takes a kernel several times too slow; this matters where it computes.
 * OpenMP's idle threads spin for milliseconds, which on a machine that has other work to do takes the cores from those that compute; and
 * their stacks need the room that widen_stack gives the first one. */
static void use_best_environment(char **argv, bool openblas)
{
	const char *core = !openblas || getenv("OPENBLAS_CORETYPE") ? NULL : blas_better_core();
	const bool spins = !getenv("OMP_WAIT_POLICY") && !getenv("GOMP_SPINCOUNT"), stacks = !getenv("OMP_STACKSIZE");
	if (!core && !spins && !stacks)
		return;
	if (spins)
		setenv("GOMP_SPINCOUNT", "1000", 1);
	if (stacks)
		setenv("OMP_STACKSIZE", "8M", 1);
	if (core) {
		if (parallel_rank() == 0)
			fprintf(stderr, "note: OpenBLAS chose its %s kernel, this processor can run %s: starting again with OPENBLAS_CORETYPE=%s\n",
					blas_core(), core, core);
		setenv("OPENBLAS_CORETYPE", core, 1);
	}
	execv("/proc/self/exe", argv);
	fprintf(stderr, "note: could not start again (%s): slower than it could be\n", strerror(errno));
}

/* Opens standard input, output and error where they are closed: files opened later must not take their place. */
static void open_standard_files(void)
{
	int fd;
	do
		fd = open("/dev/null", O_RDWR);
	while (fd >= 0 && fd <= STDERR_FILENO);
	if (fd >= 0)
		close(fd);
}

int main(int argc, char **argv)
{
	open_standard_files();
	const struct command *command = NULL;
	for (int i = 0; argc > 1 && i < NUM_COMMANDS; i++)
		if (!strcmp(argv[1], commands[i].name))
			command = &commands[i];
	if (!command) {
		const bool help = argc > 1 && (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-?") || !strcmp(argv[1], "help"));
		if (argc > 1 && (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V"))) {
			printf("%s\n", argp_program_version);
			return EXIT_DONE;
		}
		if (argc > 1 && !help)
			fprintf(stderr, "ling: unknown command '%s'\n\n", argv[1]);
		print_usage(help ? stdout : stderr);
		return help ? EXIT_DONE : EXIT_WRONG_USE;
	}
	if (command->computes && widen_stack() < 0) {
		fprintf(stderr, "ling: %s\n", error_text);
		return EXIT_WORK_FAILED;
	}
	const char *products = getenv("LING_PRODUCTS");
	if (products && strcmp(products, "openblas") && strcmp(products, "ling")) {
		fprintf(stderr, "ling: LING_PRODUCTS is '%s': expected ling (its own kernel, as when it is unset) or openblas\n", products);
		return EXIT_WRONG_USE;
	}
	const bool openblas = products && !strcmp(products, "openblas");
	if (command->computes || command->run == command_convert) /* which has threads that wait for the disk */
		use_best_environment(argv, openblas || command->run == command_bench || command->run == command_doctor);
	kernels_init(openblas);

	char name[64];
	snprintf(name, sizeof name, "ling %s", command->name);
	argv[1] = name; /* argp takes the program's name in messages from here */
	argp_err_exit_status = EXIT_WRONG_USE;
	struct arguments a = {.command = command, .dtype = "none", .document_token = -1, .generation = {.sampling = {.top_p = 1}, .batch = 8}};
	const struct argp argp = {command->options[0].name ? command->options : NULL, parse_option, command->usage, command->help, NULL, NULL, NULL};
	argp_parse(&argp, argc - 1, argv + 1, 0, NULL, &a);
	if (command->computes)
		parallel_start();
	/* The doctor says more before it fails. */
	const bool checks = command->computes && command->run != command_doctor;
	int status = checks && parallel_agree(check_before_work(openblas)) < 0 ? EXIT_WORK_FAILED : command->run(&a);
	/* What a command prints is its work; but for training it is only progress, which nobody may be reading. */
	if (status == EXIT_DONE && command->run != command_train && (fflush(stdout) || ferror(stdout))) {
		fail("cannot write to standard output: %s", strerror(errno));
		status = EXIT_WORK_FAILED;
	}
	bool together = status == EXIT_DONE;
	if (status != EXIT_DONE) {
		/* Trouble that all ranks found is told by the first; trouble of one rank, by that rank, with its name. */
		together = parallel_all_failed();
		if (!together)
			fprintf(stderr, "ling: rank %d on %s: %s\n", parallel_rank(), parallel_host(), error_text);
		else if (parallel_rank() == 0)
			fprintf(stderr, "ling: %s\n", error_text);
	}
	fflush(NULL);
	parallel_stop(together ? 0 : status);
	return status;
}
