/*
 * commands/train.c - `ling train`: the command around a training run (training/loop.c): the lock of its directory, and
 * signals.
 */
#define _GNU_SOURCE
#include "commands/train.h"

#include "files/base.h"
#include "files/heartbeat.h"
#include "files/trace.h"
#include "files/config.h"
#include "kernels.h"
#include "parallel.h"
#include "ling.h"
#include "training/start.h"
#include "training/loop.h"
#include "commands/samples.h"
#include "commands/self_check.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <unistd.h>

int lock_directory(const char *dir)
{
	if (make_directories(dir) < 0)
		return -1;
	int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	if (fd < 0)
		return fail("%s: cannot open: %s", dir, strerror(errno));
	if (flock(fd, LOCK_EX | LOCK_NB) == 0)
		return fd;
	const int error = errno;
	close(fd);
	if (error == EWOULDBLOCK)
		return fail("%s: another ling train is writing there; wait for it, or choose another train.output_dir", dir);
	return fail("%s: cannot lock: %s; choose a train.output_dir on a file system that has locks", dir, strerror(error));
}

static void request_stop(int signal)
{
	(void)signal;
	stop_requested = 1;
}

/* A first signal stops the run after the current step, which is saved; a second one ends the program at once. mpirun
 * passes USR1 on to its ranks; after TERM and INT it kills them within a second. SIGPIPE is ignored: a run goes on
 * when nobody reads its progress. */
static void catch_signals(void)
{
	const struct sigaction stop = {.sa_handler = request_stop, .sa_flags = SA_RESTART | SA_RESETHAND};
	sigaction(SIGTERM, &stop, NULL);
	sigaction(SIGINT, &stop, NULL);
	sigaction(SIGHUP, &stop, NULL);
	sigaction(SIGUSR1, &stop, NULL);
	signal(SIGPIPE, SIG_IGN);
}

/* Warns when a machine has more threads than cores, which makes a run several times slower. If several have, the
 * first one is named. */
static void warn_of_oversubscription(void)
{
	const struct oversubscription c = parallel_oversubscription(kernels_threads());
	const int threads = c.cores / c.ranks;
	const bool bound = c.cores < sysconf(_SC_NPROCESSORS_ONLN);
	if (c.first)
		fprintf(stderr, "warning: on %s %d rank%s with %d threads in all may use %d core%s: set "
				"OMP_NUM_THREADS=%d%s\n", parallel_host(), c.ranks, c.ranks > 1 ? "s" : "", c.threads, c.cores,
				c.cores > 1 ? "s" : "", threads ? threads : 1,
				c.ranks > 1 && bound ? ", or do not bind the ranks (mpirun --bind-to none)"
				: threads ? "" : " and start fewer ranks on a machine");
}

/* Says where the learning rate never reaches its peak: a run that was made shorter, and its schedule was not. */
static void note_long_schedule(const struct config *c, int64_t steps)
{
	const int64_t warmup = c->schedule.warmup_steps, decay = c->schedule.decay.steps;
	if (warmup + decay > steps)
		fprintf(stderr, "note: the run has %lld steps, fewer than schedule.warmup_steps (%lld) "
				"and schedule.decay.steps (%lld) together: the learning rate does not reach schedule.peak_lr\n",
				(long long)steps, (long long)warmup, (long long)decay);
}

/* Removes the directory of a run that could not begin, unless there is more in it than the heartbeat. */
static void remove_unused(const char *dir)
{
	char path[PATH_LEN];
	if (path_join(path, dir, "heartbeat") == 0)
		unlink(path);
	rmdir(dir);
}

struct train_options { struct strings inject; };

/* The command, but for the faults that were ordered, which the trainer gets: then *faults is empty. */
static int train(const struct command_line *line, struct faults *faults)
{
	struct config c;
	if (parallel_agree(config_load(&c, line->words[0], line->num_words - 1, line->words + 1, false)) < 0)
		return EXIT_WRONG_USE;
	warn_of_oversubscription();
	catch_signals();
	const bool made = parallel_rank() == 0 && path_exists(c.train.output_dir) == 0;
	int lock = parallel_rank() == 0 ? lock_directory(c.train.output_dir) : 0;
	if (lock >= 0 && parallel_rank() == 0) {
		heartbeat_create(c.train.output_dir, parallel_size());
		trace_create(c.train.output_dir, c.trace.events > 0);
	}
	if (parallel_agree(lock < 0 ? -1 : 0) < 0)
		return EXIT_WORK_FAILED;
	char host[64] = "";
	gethostname(host, sizeof host - 1);
	heartbeat_join(c.train.output_dir, parallel_rank(), host);
	trace_join(c.train.output_dir, parallel_rank(), parallel_size(), host, c.trace.events);
	trace_begin(OP_START, PASS_FORWARD, -1, 0);
	const struct machine_rates rates = quick_rates(); /* before the model takes its memory */
	trace_peak(rates.flops, rates.bandwidth);
	struct trainer t;
	int rc = trainer_init(&t, &c);
	if (rc == 0 && (rc = sampler_open(&t)) < 0)
		trainer_free(&t);
	const bool started = rc == 0;
	int64_t steps = 0; /* that this process does */
	if (started) {
		double sums[2] = {rates.flops, rates.flops > 0}; /* the second: ranks that know theirs */
		all_reduce_sum(&t.model.layout.all, TRAFFIC_STATISTICS, sums, 2);
		t.peak_flops = sums[1] == parallel_size() ? sums[0] : 0;
		t.faults = *faults;
		*faults = (struct faults){.log.fd = -1};
		const struct layout *l = &t.model.layout;
		const struct layout alone = layout_of_rank(0, 1, 1, 1);
		struct memory_plan whole = {0};
		plan_memory(&whole, &c.model, &alone, 1, 1, EVALUATE);
		if (is_rank0(&t)) {
			printf("%lld parameters, %lld steps, %lld tokens, ", (long long)whole.num_elements, (long long)t.steps,
					(long long)t.tokens);
			if (l->replicas.size > 1)
				printf("%d replicas of ", l->replicas.size);
			if (l->all.size > 1)
				printf("%d ranks (data %d x tensor %d, expert %d) of ", l->world.size, l->data.size, l->tensor.size,
						l->expert.size);
			printf("%d threads\n", kernels_threads());
			fflush(stdout);
			note_long_schedule(&c, t.steps);
			char warning[256];
			if (*socket_warning(warning, ""))
				fprintf(stderr, "warning: %s\n", warning);
		}
		rc = parallel_agree(faults_begin(&t.faults, c.train.output_dir, parallel_rank(), c.train.seed,
				l->replicas.size > 1));
		steps = t.state.step;
		rc = rc < 0 ? rc : (int)trainer_run(&t);
		steps = t.state.step - steps;
		trace_phase(HEARTBEAT_END, t.state.step);
		sampler_close(&t);
		trainer_free(&t);
	} else if (parallel_rank() == 0) {
		heartbeat_remove(c.train.output_dir); /* a run that was refused leaves nothing */
	}
	trace_leave();
	heartbeat_leave();
	if (parallel_rank() == 0)
		trace_end_start(c.train.output_dir, steps != 0);
	if (made && !started)
		remove_unused(c.train.output_dir);
	if (parallel_rank() == 0)
		close(lock);
	return rc < 0 ? EXIT_WORK_FAILED : rc == RUN_STOPPED ? EXIT_STOPPED : rc == RUN_GO_BACK ? EXIT_GO_BACK : EXIT_DONE;
}

static int run_train(const struct command_line *line)
{
	const struct train_options *o = line->options;
	struct faults faults;
	int status = EXIT_WRONG_USE;
	if (parallel_agree(faults_read(&faults, (int)o->inject.count, o->inject.text, parallel_size())) == 0)
		status = train(line, &faults);
	faults_free(&faults);
	return status;
}

static const struct command_option options[] = {
	TEXTS_OPTION(train_options, inject, "inject", "FAULT",
			"A fault to order, for trying recovery: KIND@step=N[,rank=R][,during=step|update|save|norms|"
			"synchronisation][,ms=M]"
			"[,probability=P]; KIND: kill, stop, nan, inf, flip, slow, diskfull or poison; may be given several times"),
	PRINT_OPTION("keys", config_print_keys, "Print every key of a config with its default and meaning"),
};

const struct command train_command = {
	.name = "train", .usage = "CONFIG.yaml [key.path=value ...]", .min_words = 1, .max_words = ANY_NUMBER,
	.help = "Train a model. The same command again continues from the newest checkpoint of train.output_dir. SIGTERM, "
		"SIGINT, SIGHUP and SIGUSR1 save and stop, with exit status 3. Exit status 4: training cannot go on from here, "
		"but from an earlier checkpoint.",
	.run = run_train, COMMAND_OPTIONS(train_options, options), .computes = true, .measures_peak = true,
	.handles_signals = true, .prints_progress = true,
};
