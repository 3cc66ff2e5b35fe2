/*
 * commands/child.h - processes that a command starts and watches, as `ling supervise` and `ling sweep` do; and the lock
 * that a `ling train` has on the directory of its run.
 */
#ifndef LING_COMMANDS_CHILD_H
#define LING_COMMANDS_CHILD_H

#include <signal.h>
#include <stdbool.h>
#include <sys/types.h>

/* The signals that a command with children waits for, all of which are blocked: wishes for a stop (SIGTERM, SIGINT,
 * SIGHUP, SIGUSR1), and SIGCHLD; and what was blocked before, which the children get. */
struct child_signals { sigset_t waited, before; };
void child_signals_init(struct child_signals *s);
/* Waits for one of them, at the most so many seconds. Returns a wish for a stop, or 0. */
int child_signal_wait(const struct child_signals *s, double seconds);

/* Forks. Returns 0 in the child, its process id in the parent, and -1 on error. The child is in a process group of its
 * own, has an empty standard input, since there it may not read from a terminal, and gets SIGUSR1 when the parent
 * dies: a `ling train` then saves and ends. */
pid_t child_fork(const struct child_signals *s);

/* Whether a `ling train` is writing in the directory of a run. */
bool child_holds_run(const char *dir);

#endif
