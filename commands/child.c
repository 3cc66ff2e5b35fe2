/*
 * commands/child.c - processes that a command starts and watches.
 */
#define _GNU_SOURCE
#include "commands/child.h"

#include "commands/command.h"
#include "files/base.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

void child_signals_init(struct child_signals *s)
{
	static const int waited[] = {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGCHLD};
	sigemptyset(&s->waited);
	for (size_t i = 0; i < sizeof waited / sizeof *waited; i++)
		sigaddset(&s->waited, waited[i]);
	signal(SIGCHLD, SIG_DFL);
	signal(SIGPIPE, SIG_IGN);
	sigprocmask(SIG_BLOCK, &s->waited, &s->before);
}

int child_signal_wait(const struct child_signals *s, double seconds)
{
	const struct timespec most = {(time_t)seconds, (long)(fmod(seconds, 1) * 1e9)};
	const int number = sigtimedwait(&s->waited, NULL, &most);
	return number > 0 && number != SIGCHLD ? number : 0;
}

pid_t child_fork(const struct child_signals *s)
{
	const pid_t parent = getpid();
	fflush(NULL);
	const pid_t pid = fork();
	if (pid < 0)
		return fail("cannot start a process: %s", strerror(errno));
	if (pid) {
		setpgid(pid, pid); /* both do: whoever comes first */
		return pid;
	}
	const int null = open("/dev/null", O_RDONLY);
	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, SIGUSR1);
	if (getppid() != parent)
		_exit(EXIT_STOPPED);
	dup2(null, STDIN_FILENO);
	signal(SIGPIPE, SIG_DFL);
	sigprocmask(SIG_SETMASK, &s->before, NULL);
	return 0;
}

bool child_holds_run(const char *dir)
{
	const int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	const bool held = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK;
	if (fd >= 0)
		close(fd);
	return held;
}
