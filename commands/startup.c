/*
 * commands/startup.c - what a process arranges before a command runs: limits of memory, stack, environment, open files.
 */
#define _GNU_SOURCE
#include "commands/startup.h"

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "commands/command.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

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

void limit_openblas(char **argv, char **environment, bool all_threads)
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
	if (all_threads) {
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

int check_limits(const struct command *command, bool starts_mpi)
{
	const int threads = kernels_threads();
	const size_t needed = (command->measures_openblas ? threads : 1) * BLAS_BUFFER + (size_t)threads * STACK_BYTES;
	return starts_mpi ? need_memory(needed + MPI_BYTES, "MPI, OpenBLAS", threads)
		: need_memory(needed, "OpenBLAS", threads);
}

void take_buffers(const struct command *command)
{
	const int64_t n = 512;
	if (isinf(process_memory()))
		return;
	real *a = allocate(3 * n * n * sizeof *a);
	single_gemm(a, a + n * n, false, a + 2 * n * n, false, n, n, n,
			command->measures_openblas ? kernels_threads() : 1);
	free(a);
}

int widen_stack(void)
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

void use_best_environment(char **argv, bool openblas, bool say)
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
		if (say && parallel_rank() == 0)
			fprintf(stderr, "note: OpenBLAS chose its %s kernel, this processor can run %s: starting again with "
					"OPENBLAS_CORETYPE=%s\n", blas_core(), core, core);
		setenv("OPENBLAS_CORETYPE", core, 1);
	}
	execv("/proc/self/exe", argv);
	fprintf(stderr, "note: could not start again (%s): slower than it could be\n", strerror(errno));
}

void open_standard_files(void)
{
	int fd;
	do
		fd = open("/dev/null", O_RDONLY);
	while (fd >= 0 && fd <= STDERR_FILENO);
	if (fd >= 0)
		close(fd);
}
