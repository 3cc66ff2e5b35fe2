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
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

/* The command of that name, or NULL. */
static const struct command *find_command(const char *name)
{
	for (int i = 0; name && i < NUM_COMMANDS; i++)
		if (!strcmp(name, commands[i]->name))
			return commands[i];
	return NULL;
}

/* Whether the limits of this process allow for so much more memory. */
static bool can_map(size_t bytes)
{
	void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	return p != MAP_FAILED && munmap(p, bytes) == 0;
}

/* Fails where the limits of this process are too low for what libraries and the stacks of the threads need. */
static int need_memory(size_t bytes, const char *libraries, int threads)
{
	if (can_map(bytes))
		return 0;
	return fail("this process needs %zu MB of memory for %s and %d thread%s, and has %.0f MB: raise the limit "
			"(ulimit -v, ulimit -d), or set OMP_NUM_THREADS lower", bytes >> 20, libraries, threads,
			threads == 1 ? "" : "s", process_memory() / (1 << 20));
}

enum { STACK_BYTES = 8 << 20, STACK_NEEDED = 3 << 20 };

/* Of OpenBLAS: what it maps for each of its threads. When that cannot be had, it tries for ever. */
#define BLAS_BUFFER ((size_t)128 << 20)
/* What Open MPI maps when it starts, about: libraries, threads, memory that ranks share. */
#define MPI_BYTES ((size_t)192 << 20)

/* While OpenBLAS is loaded, it starts its threads; they take their buffers, and where they cannot, the process does not
 * end. So this runs before the libraries are initialised (the linker's .preinit_array): where a limit is too low,
 * the program starts again with one thread of OpenBLAS, which is enough for all commands but those that measure it. */
static void limit_openblas(int argc, char **argv, char **environment)
{
	struct rlimit space, data;
	if (getrlimit(RLIMIT_AS, &space) == 0 && space.rlim_cur == RLIM_INFINITY &&
			getrlimit(RLIMIT_DATA, &data) == 0 && data.rlim_cur == RLIM_INFINITY)
		return;
	static const char *const names[] = {"OPENBLAS_NUM_THREADS=", "GOTO_NUM_THREADS=", "OMP_NUM_THREADS="};
	long threads = 0;
	int n = 0;
	for (int i = 0; i < 3 && threads < 1; i++) /* the first that is a number above 0 counts */
		for (n = 0; environment[n]; n++)
			if (!strncmp(environment[n], names[i], strlen(names[i])))
				threads = strtol(environment[n] + strlen(names[i]), NULL, 10);
	if (threads < 1)
		threads = sysconf(_SC_NPROCESSORS_ONLN);
	if (threads == 1 || need_memory(threads * (BLAS_BUFFER + STACK_BYTES), "OpenBLAS", (int)threads) == 0)
		return;
	const struct command *command = find_command(argc > 1 ? argv[1] : NULL);
	if (command && command->measures_openblas) {
		dprintf(STDERR_FILENO, "ling: %s\n", error_text);
		_exit(EXIT_WORK_FAILED);
	}
	char *one[n + 2];
	int kept = 0;
	for (int i = 0; i < n; i++)
		if (strncmp(environment[i], names[0], strlen(names[0])))
			one[kept++] = environment[i];
	one[kept++] = "OPENBLAS_NUM_THREADS=1";
	one[kept] = NULL;
	execve("/proc/self/exe", argv, one);
}

__attribute__((section(".preinit_array"), used)) static void (*const before_libraries)(int, char **, char **) =
	limit_openblas;

/* Fails where the limits of this process leave too little for MPI, if it is still to be started, for OpenBLAS's buffers
 * and for the stacks of the threads. Each of these libraries would end the program in its own way, or hang. */
static int check_limits(const struct command *command, bool starts_mpi)
{
	const int threads = kernels_threads();
	const size_t needed = (command->measures_openblas ? threads : 1) * BLAS_BUFFER + (size_t)threads * STACK_BYTES;
	return starts_mpi ? need_memory(needed + MPI_BYTES, "MPI, OpenBLAS", threads)
		: need_memory(needed, "OpenBLAS", threads);
}

/* Makes OpenBLAS take its buffers by a product of n x n matrices, before the model takes the memory that a limit
 * leaves. */
static void take_buffers(const struct command *command)
{
	const int64_t n = 512;
	if (isinf(process_memory()))
		return;
	real *a = allocate(3 * n * n * sizeof *a);
	single_gemm(a, a + n * n, false, a + 2 * n * n, false, n, n, n,
			command->measures_openblas ? kernels_threads() : 1);
	free(a);
}

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
 * opened would get one of their descriptors, and messages would be written into it. It is opened for reading: what is
 * printed to a closed output is not written. */
static void open_standard_files(void)
{
	int fd;
	do
		fd = open("/dev/null", O_RDONLY);
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
	int status = EXIT_DONE;
	if (command->computes) { /* before the command line is read, since that may end the program: see end_early() */
		if (check_limits(command, launcher_rank() >= 0) < 0) {
			if (launcher_rank() < 0)
				fprintf(stderr, "ling: %s\n", error_text);
			else
				fprintf(stderr, "ling: rank %d: %s\n", launcher_rank(), error_text);
			return EXIT_WORK_FAILED;
		}
		parallel_start();
		if (parallel_same(crc_of(0, (const uint8_t *)name, strlen(name)), "the command") < 0 ||
				parallel_agree(check_limits(command, false)) < 0)
			status = EXIT_WORK_FAILED;
		else
			take_buffers(command);
	}
	if (status == EXIT_DONE) {
		struct command_line line;
		command_line_read(&line, command, argc - 1, argv + 1);
		if (command->computes && !command->checks_products && parallel_agree(check_before_work(openblas)) < 0)
			status = EXIT_WORK_FAILED;
		else
			status = command->run(&line);
		command_line_free(&line);
	}
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
