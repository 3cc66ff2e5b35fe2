/*
 * commands/startup.h - what a process arranges before a command runs, so that the libraries neither end it in their own
 * way nor hang.
 */
#ifndef LING_COMMANDS_STARTUP_H
#define LING_COMMANDS_STARTUP_H

#include "commands/command.h"

#include <stdbool.h>

/* To be called before the libraries are initialised (from the linker's .preinit_array). While OpenBLAS is loaded, it
 * starts its threads; they take their buffers, and where a limit of memory forbids that, they try for ever. Then the
 * program starts again with one thread of OpenBLAS, or, if the command needs all its threads, ends with an error. */
void limit_openblas(char **argv, char **environment, bool all_threads);

/* Opens /dev/null in place of standard input, output and error where they are closed. Else the next file that is
 * opened would get one of their descriptors, and messages would be written into it. It is opened for reading: what is
 * printed to a closed output is not written. */
void open_standard_files(void);

/* Makes the first thread's stack large enough for the blocks of a matrix product, which are on it. Fails when its limit
 * is too low. */
int widen_stack(void);

/* Sets environment variables that OpenBLAS and OpenMP read while they are loaded, and starts the program again, once,
 * so that they do. A variable that the user has set keeps its value.
 * - OPENBLAS_CORETYPE, with `openblas`: an old OpenBLAS does not know a new processor, and takes a kernel that is
 *   several times too slow. `say`: a line on standard error tells that.
 * - GOMP_SPINCOUNT: OpenMP's idle threads spin for milliseconds, which on a machine with other work takes cores from
 *   the threads that compute.
 * - OMP_STACKSIZE: the other threads need the same stack as the first one, see widen_stack(). */
void use_best_environment(char **argv, bool openblas, bool say);

/* Fails where the limits of this process leave too little for MPI, if it is still to be started, for OpenBLAS's buffers
 * and for the stacks of the threads. */
int check_limits(const struct command *command, bool starts_mpi);

/* Makes OpenBLAS take its buffers, by a product, before the model takes the memory that a limit leaves. */
void take_buffers(const struct command *command);

#endif
