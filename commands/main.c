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
#include "commands/evaluate.h"
#include "commands/generate.h"
#include "commands/tokenize.h"
#include "commands/convert.h"
#include "commands/info.h"
#include "commands/doctor.h"
#include "commands/plot.h"
#include "commands/manual.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

static const struct command *const commands[] = {
	&train_command, &supervise_command, &eval_command, &generate_command, &tokenize_command, &train_tokenizer_command,
	&convert_command, &info_command, &bench_command, &doctor_command, &plot_command,
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

enum { STACK_BYTES = 8 << 20, STACK_NEEDED = 3 << 20 };

/* Makes the first thread's stack large enough for the blocks of a matrix product, which are on it. */
static int widen_stack(void)
{
	struct rlimit stack;
	if (getrlimit(RLIMIT_STACK, &stack) < 0 || stack.rlim_cur == RLIM_INFINITY || stack.rlim_cur >= STACK_BYTES)
		return 0;
	stack.rlim_cur = stack.rlim_max == RLIM_INFINITY || stack.rlim_max > STACK_BYTES ? STACK_BYTES : stack.rlim_max;
	if (stack.rlim_cur >= STACK_NEEDED && setrlimit(RLIMIT_STACK, &stack) == 0)
		return 0;
	return fail("the stack is limited to %lld kB, and matrix products need %d: raise it with ulimit -s %d",
			(long long)stack.rlim_cur >> 10, STACK_NEEDED >> 10, STACK_BYTES >> 10);
}

/* Sets environment variables that OpenBLAS and OpenMP read while they are loaded, and starts the program again, once,
 * so that they do. A variable that the user has set keeps its value.
 * - OPENBLAS_CORETYPE, with `openblas`: an old OpenBLAS does not know a new processor, and takes a kernel that is
 *   several times too slow.
 * - GOMP_SPINCOUNT: OpenMP's idle threads spin for milliseconds, which on a machine with other work takes cores from
 *   the threads that compute.
 * - OMP_STACKSIZE: the other threads need the same stack as the first one, see widen_stack(). */
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
			fprintf(stderr, "note: OpenBLAS chose its %s kernel, this processor can run %s: starting again with "
					"OPENBLAS_CORETYPE=%s\n", blas_core(), core, core);
		setenv("OPENBLAS_CORETYPE", core, 1);
	}
	execv("/proc/self/exe", argv);
	fprintf(stderr, "note: could not start again (%s): slower than it could be\n", strerror(errno));
}

/* Opens /dev/null in place of standard input, output and error where they are closed. Else the next file that is
 * opened would get one of their descriptors, and messages would be written into it. */
static void open_standard_files(void)
{
	int fd;
	do
		fd = open("/dev/null", O_RDWR);
	while (fd >= 0 && fd <= STDERR_FILENO);
	if (fd >= 0)
		close(fd);
}

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
	if (word && !help)
		fprintf(stderr, "ling: unknown command '%s'\n\n", word);
	print_usage(help ? stdout : stderr);
	return help ? EXIT_DONE : EXIT_WRONG_USE;
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

int main(int argc, char **argv)
{
	open_standard_files();
	const struct command *command = NULL;
	for (int i = 0; argc > 1 && i < NUM_COMMANDS; i++)
		if (!strcmp(argv[1], commands[i]->name))
			command = commands[i];
	if (!command)
		return run_without_command(argc > 1 ? argv[1] : NULL);
	if (command->computes && widen_stack() < 0) {
		fprintf(stderr, "ling: %s\n", error_text);
		return EXIT_WORK_FAILED;
	}
	const char *products = getenv("LING_PRODUCTS");
	if (products && strcmp(products, "openblas") && strcmp(products, "ling")) {
		fprintf(stderr, "ling: LING_PRODUCTS is '%s': expected ling (its own kernel, as when it is unset) or "
				"openblas\n", products);
		return EXIT_WRONG_USE;
	}
	const bool openblas = products && !strcmp(products, "openblas");
	if (command->computes || command->has_threads)
		use_best_environment(argv, openblas || command->measures_openblas);
	kernels_init(openblas);

	char name[64];
	snprintf(name, sizeof name, "ling %s", command->name);
	argv[1] = name; /* the program's name in messages about options */
	struct command_line line;
	command_line_read(&line, command, argc - 1, argv + 1);
	if (command->computes)
		parallel_start();
	int status = EXIT_DONE;
	if (command->computes && !command->checks_products && parallel_agree(check_before_work(openblas)) < 0)
		status = EXIT_WORK_FAILED;
	if (status == EXIT_DONE)
		status = command->run(&line);
	command_line_free(&line);
	if (status == EXIT_DONE && !command->prints_progress && (fflush(stdout) || ferror(stdout))) {
		fail("cannot write to standard output: %s", strerror(errno));
		status = EXIT_WORK_FAILED;
	}
	/* all ranks end here, and none needs to be stopped */
	const bool together = status == EXIT_DONE || status == EXIT_STOPPED || print_error();
	fflush(NULL);
	parallel_stop(together ? 0 : status);
	return status;
}
