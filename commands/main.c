/*
 * commands/main.c - main, the table of commands, and their options.
 */
#define _GNU_SOURCE
#include "commands/command.h"

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "ling.h"
#include "commands/tasks.h"
#include "commands/train.h"
#include "commands/evaluate.h"
#include "commands/generate.h"
#include "commands/tokenize.h"
#include "commands/convert.h"
#include "commands/info.h"
#include "commands/doctor.h"
#include "commands/plot.h"

#include <argp.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

const char *argp_program_version = "ling " LING_VERSION;

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
