/*
 * commands/main.c - main: the list of commands, and what happens around the one that runs.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "ling.h"
#include "commands/options.h"
#include "commands/train.h"
#include "commands/supervise.h"
#include "commands/sweep.h"
#include "commands/evaluate.h"
#include "commands/generate.h"
#include "commands/chat.h"
#include "commands/tokenize.h"
#include "commands/convert.h"
#include "commands/merge.h"
#include "commands/info.h"
#include "commands/bench.h"
#include "commands/doctor.h"
#include "commands/plot.h"
#include "commands/export.h"
#include "commands/watch.h"
#include "commands/report.h"
#include "commands/trace.h"
#include "commands/align.h"
#include "commands/fit.h"
#include "commands/cost.h"
#include "commands/plan.h"
#include "commands/manual.h"
#include "commands/startup.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct command *const commands[] = {
	&train_command, &supervise_command, &sweep_command, &eval_command, &generate_command, &chat_command,
	&tokenize_command, &train_tokenizer_command, &convert_command, &merge_command, &info_command, &bench_command,
	&doctor_command, &plot_command, &trace_command, &report_command, &export_command, &watch_command, &align_command,
	&fit_command, &cost_command, &plan_command,
};

enum { NUM_COMMANDS = sizeof commands / sizeof *commands };

static void print_usage(FILE *out)
{
	fprintf(out, "usage: ling COMMAND ...\n\nTrains and evaluates Ling-style mixture-of-experts language models on "
			"CPUs.\n\n");
	for (int i = 0; i < NUM_COMMANDS; i++) {
		for (const char *way = commands[i]->usage; way; way = strchr(way, '\n') ? strchr(way, '\n') + 1 : NULL)
			fprintf(out, "  ling %s %.*s\n", commands[i]->name, (int)strcspn(way, "\n"), way);
		fprintf(out, "      %s\n", commands[i]->help);
	}
	fprintf(out, "\n`ling COMMAND --help` lists the options of a command. `ling --man` prints the manual page, `ling\n"
			"--completion` a completion for bash; `make install` installs both.\n");
}

/* The command of that name, or NULL. */
static const struct command *find_command(const char *name)
{
	for (int i = 0; name && i < NUM_COMMANDS; i++)
		if (!strcmp(name, commands[i]->name))
			return commands[i];
	return NULL;
}

/* The command that a wrong name most likely means; NULL when none is near. */
static const struct command *nearest_command(const char *name)
{
	const struct command *best = NULL;
	int best_distance = (int)strlen(name) / 2 + 1;
	for (int i = 0; i < NUM_COMMANDS; i++) {
		const int distance = edit_distance(name, commands[i]->name);
		if (distance < best_distance)
			best = commands[i], best_distance = distance;
	}
	return best;
}

/* Runs before the libraries are initialised. */
static void before_libraries(int argc, char **argv, char **environment)
{
	const struct command *command = find_command(argc > 1 ? argv[1] : NULL);
	limit_openblas(argv, environment, command && command->measures_openblas);
}
__attribute__((section(".preinit_array"), used)) static void (*const first)(int, char **, char **) = before_libraries;

/* Handles a command line whose first word names no command. Returns the exit status. */
static int run_without_command(const char *word)
{
	if (word && (!strcmp(word, "--version") || !strcmp(word, "-V"))) {
		printf("ling %s\n", LING_VERSION);
		return EXIT_DONE;
	}
	if (word && !strcmp(word, "--man")) {
		manual_print(stdout, commands, NUM_COMMANDS);
		return EXIT_DONE;
	}
	if (word && !strcmp(word, "--completion")) {
		completion_print(stdout, commands, NUM_COMMANDS);
		return EXIT_DONE;
	}
	const bool help = word && (!strcmp(word, "--help") || !strcmp(word, "-?") || !strcmp(word, "help"));
	if (!word || help) {
		print_usage(help ? stdout : stderr);
		return help ? EXIT_DONE : EXIT_WRONG_USE;
	}
	const struct command *meant = nearest_command(word);
	char shown[64];
	fprintf(stderr, "ling: unknown command %s", printable(shown, word));
	if (meant)
		fprintf(stderr, "; did you mean %s?", meant->name);
	fprintf(stderr, "\nTry `ling --help' for the list of commands.\n");
	return EXIT_WRONG_USE;
}

/* Prints error_text, once if all ranks have failed, else on each rank that has, with its name. Returns whether all
 * have. */
static bool print_error(void)
{
	if (!parallel_all_failed()) {
		fprintf(stderr, "ling: rank %d on %s: %s\n", parallel_rank(), parallel_host(), error_text);
		return false;
	}
	if (parallel_rank() == 0)
		fprintf(stderr, "ling: %s\n", error_text);
	return true;
}

/* At the end of every command. What was printed must have been written, and what ends before main() does, as --help
 * and a wrong option do, must do so on all ranks: where others go on, they would wait for this one. */
static void end_early(int status, void *argument)
{
	(void)argument;
	const int given = status;
	if (status == EXIT_DONE && (fflush(stdout) || ferror(stdout))) {
		fprintf(stderr, "ling: cannot write to standard output: %s\n", strerror(errno));
		status = EXIT_WORK_FAILED;
	}
	if (parallel_size() > 1 && !parallel_all_failed()) {
		fprintf(stderr, "ling: rank %d on %s ends with its command line, and others go on: give all ranks the same\n",
				parallel_rank(), parallel_host());
		parallel_stop(status ? status : EXIT_WORK_FAILED);
	}
	parallel_stop(EXIT_DONE);
	if (status != given)
		_exit(status);
}

int main(int argc, char **argv)
{
	open_standard_files();
	limits_start();
	on_exit(end_early, NULL);
	const struct command *command = find_command(argc > 1 ? argv[1] : NULL);
	if (!command)
		return run_without_command(argc > 1 ? argv[1] : NULL);
	if (command->computes && widen_stack() < 0) {
		fprintf(stderr, "ling: %s\n", error_text);
		return EXIT_WORK_FAILED;
	}
	if (!command->handles_signals)
		remove_temporaries_at_signals();
	const char *products = getenv("LING_PRODUCTS");
	if (products && strcmp(products, "openblas") && strcmp(products, "ling")) {
		fprintf(stderr, "ling: LING_PRODUCTS is '%s': expected ling (its own kernel, as when it is unset) or "
				"openblas\n", products);
		return EXIT_WRONG_USE;
	}
	const bool openblas = products && !strcmp(products, "openblas");
	char name[64], *words[argc]; /* the command line less "ling": the program's name in messages about it comes first */
	snprintf(name, sizeof name, "ling %s", command->name);
	words[0] = name;
	memcpy(words + 1, argv + 2, (argc - 1) * sizeof *words); /* with the NULL at the end */
	/* --help or a wrong option ends the program here; of many ranks, not before MPI has started: see end_early() */
	struct command_line line = {0};
	const bool many = command->computes && launcher_rank() >= 0;
	if (!many)
		command_line_read(&line, command, argc - 1, words);
	if (command->computes || command->has_threads)
		use_best_environment(argv, openblas || command->measures_openblas || command->measures_peak,
				openblas || command->measures_openblas);
	kernels_init(openblas);

	int status = EXIT_DONE;
	if (command->computes) {
		if (check_limits(command, launcher_rank() >= 0) < 0) {
			if (launcher_rank() < 0)
				fprintf(stderr, "ling: %s\n", error_text);
			else
				fprintf(stderr, "ling: rank %d: %s\n", launcher_rank(), error_text);
			command_line_free(&line);
			return EXIT_WORK_FAILED;
		}
		parallel_start();
		if (parallel_same(crc_of(0, (const uint8_t *)name, strlen(name)), "the command") < 0 ||
				parallel_agree(check_limits(command, false)) < 0)
			status = EXIT_WORK_FAILED;
		else
			take_buffers(command);
	}
	if (many && status == EXIT_DONE)
		command_line_read(&line, command, argc - 1, words);
	if (status == EXIT_DONE) {
		if (command->computes && !command->checks_products && parallel_agree(check_before_work(openblas)) < 0)
			status = EXIT_WORK_FAILED;
		else
			status = command->run(&line);
	}
	command_line_free(&line);
	if (status == EXIT_DONE && !command->prints_progress && (fflush(stdout) || ferror(stdout))) {
		fail("cannot write to standard output: %s", strerror(errno));
		status = EXIT_WORK_FAILED;
	}
	if (command->prints_progress && !freopen("/dev/null", "w", stdout)) /* end_early() need not look at it */
		fclose(stdout);
	/* all ranks end here, and none needs to be stopped */
	const bool together = status == EXIT_DONE || status == EXIT_STOPPED || print_error();
	fflush(NULL);
	parallel_stop(together ? 0 : status);
	return status;
}
