/*
 * commands/watch.c - `ling watch`: follows training runs in a terminal.
 *
 *   The picture        the report of a run as lines of text
 *   The screen         the lines of all runs, drawn again and again
 */
#define _GNU_SOURCE
#include "commands/watch.h"

#include "commands/result.h"
#include "commands/watched.h"
#include "files/base.h"
#include "files/trace.h"

#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

/* ============================================================================================================
 * The picture
 * ========================================================================================================== */

/* Whether the terminal shows UTF-8, as far as the environment says. */
static bool shows_utf8(void)
{
	static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
	for (int i = 0; i < 3; i++) {
		const char *value = getenv(names[i]);
		if (value && *value)
			return strcasestr(value, "utf-8") || strcasestr(value, "utf8");
	}
	return false;
}

/* A curve as one line of at most `columns` signs, between its lowest and its highest value. What is not finite is a
 * question mark. */
static void append_curve(struct text *out, const json_t *curve, int columns)
{
	static const char *const bars[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"},
		*const plain[] = {"_", ".", "-", "~", "=", "+", "*", "#"};
	const char *const *signs = shows_utf8() ? bars : plain;
	const int n = (int)json_array_size(curve), parts = n < columns ? n : columns;
	double low = INFINITY, high = -INFINITY, *values = allocate(parts * sizeof *values);
	for (int i = 0; i < parts; i++) {
		double sum = 0, finite = 0;
		for (int j = n * i / parts; j < n * (i + 1) / parts; j++)
			if (json_is_number(json_array_get(curve, j)))
				sum += json_number_value(json_array_get(curve, j)), finite++;
		values[i] = sum / finite;
		low = isfinite(values[i]) ? fmin(low, values[i]) : low;
		high = isfinite(values[i]) ? fmax(high, values[i]) : high;
	}
	const double half = high / 2 - low / 2; /* the difference may be larger than any number */
	for (int i = 0; i < parts; i++)
		text_printf(out, "%s", !isfinite(values[i]) ? "?" : signs[half > 0 ?
				(int)(7.99 * ((values[i] / 2 - low / 2) / half)) : 0]);
	free(values);
}

/* A number of a report; 0 for null. */
static int64_t integer_or_0(const json_t *r, const char *key)
{
	return json_integer_value(json_object_get(r, key));
}

/* Appends a number of a report, unless it is null. */
#define APPEND_NUMBER(out, r, key, format, factor) \
	do { \
		const double appended = (factor) * result_double(r, key); \
		if (isfinite(appended)) \
			text_printf(out, format, appended); \
	} while (0)

/* An incident in a few words: "step 120: skip, loss 9.1234". */
static void append_incident(struct text *out, const json_t *event)
{
	static const char *const texts[][2] = {{"text", ""}, {"reason", ""}, {"why", ""}, {"fault", ""}, {"host", "on "}},
		*const numbers[][2] = {{"rank", "rank "}, {"from_step", "from step "}, {"from", "from step "},
			{"loss", "loss "}, {"grad_norm", "grad "}, {"ratio", "ratio "}};
	text_printf(out, "step %lld: ", (long long)result_integer(event, "step"));
	for (const char *c = result_text(event, "kind"); *c; c++)
		text_append(out, *c == '_' ? " " : c, 1);
	for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
		if (json_is_number(json_object_get(event, numbers[i][0])))
			text_printf(out, ", %s%.5g", numbers[i][1], result_double(event, numbers[i][0]));
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
		if (json_is_string(json_object_get(event, texts[i][0])))
			text_printf(out, ", %s%s", texts[i][1], result_text(event, texts[i][0]));
}

/* "training  step 312/450 69%  0:12 left", and the like. */
static void append_progress(struct text *out, const json_t *r)
{
	const int64_t step = result_integer(r, "step"), steps = integer_or_0(r, "total_steps");
	char left[32];
	text_append_string(out, result_text(r, "state"));
	if (step || steps)
		text_printf(out, "  step %lld", (long long)step);
	if (steps)
		text_printf(out, "/%lld", (long long)steps);
	if (integer_or_0(r, "total_tokens"))
		text_printf(out, " %.0f%%", 100 * result_double(r, "tokens") / result_double(r, "total_tokens"));
	if (isfinite(result_double(r, "seconds_left")))
		text_printf(out, "  %s left", format_duration(left, result_double(r, "seconds_left")));
}

/* What else the last step says: learning rate, gradient norm, batch, speed. */
static void append_rates(struct text *out, const json_t *r)
{
	APPEND_NUMBER(out, r, "lr", "  lr %.2e", 1);
	APPEND_NUMBER(out, r, "grad_norm", "  grad %.3f", 1);
	if (result_integer(r, "batch"))
		text_printf(out, "  batch %lld", (long long)result_integer(r, "batch"));
	APPEND_NUMBER(out, r, "tokens_per_second", "  %.0f tokens/s", 1);
	APPEND_NUMBER(out, r, "peak_share", "  %.0f%% of peak", 100);
}

static void append_validation(struct text *out, const json_t *r)
{
	const char *name;
	json_t *value;
	bool first = true;
	if (!isfinite(result_double(r, "valid_loss")))
		return;
	text_printf(out, "  valid %.4f at step %lld", result_double(r, "valid_loss"), (long long)result_integer(r,
			"valid_step"));
	json_object_foreach(json_object_get(r, "valid"), name, value) {
		text_printf(out, "%s%.40s %.4f", first ? " (" : ", ", name, json_number_value(value));
		first = false;
	}
	text_printf(out, first ? "" : ")");
}

/* Shares of the time of all ranks, the largest first, as many as there is room for. */
static void append_time(struct text *out, const json_t *time, int columns)
{
	struct share { const char *name; double value; } shares[NUM_OPERATIONS + 1];
	int n = 0;
	const char *name;
	json_t *value;
	json_object_foreach(json_object_get(time, "groups"), name, value)
		if (n < NUM_OPERATIONS)
			shares[n++] = (struct share){name, json_number_value(value)};
	shares[n++] = (struct share){"waiting", result_double(time, "waiting")};
	text_printf(out, "  time");
	columns -= (int)strlen("  time");
	for (int i = 0; i < n; i++) {
		char part[64];
		int largest = i;
		for (int j = i + 1; j < n; j++)
			largest = shares[j].value > shares[largest].value ? j : largest;
		const struct share next = shares[largest];
		shares[largest] = shares[i];
		shares[i] = next;
		columns -= snprintf(part, sizeof part, "  %s %.0f%%", next.name, 100 * next.value);
		if (next.value < 0.005 || columns < 0)
			break;
		text_printf(out, "%s", part);
	}
	text_printf(out, "\n");
}

/* The bytes of the first `columns` characters of n bytes. */
static size_t columns_of(const char *line, size_t n, int columns)
{
	size_t i = 0;
	for (; i < n; i++)
		if ((line[i] & 0xc0) != 0x80 && columns-- == 0)
			break;
	return i;
}

/* Appends a text as lines of at most `columns` characters, broken at spaces. */
static void append_folded(struct text *out, const char *words, int columns)
{
	const int room = columns > 24 ? columns - 4 : 20;
	for (const char *begin = "  ! "; *words; begin = "    ") {
		size_t n = columns_of(words, strlen(words), room), space = n;
		while (words[n] && space && words[space] != ' ')
			space--;
		n = space ? space : n;
		text_printf(out, "%s", begin);
		text_append(out, words, n);
		text_printf(out, "\n");
		words += n;
		words += strspn(words, " ");
	}
}

/* The lines of a run, each ended by a newline, the most important first. columns: of the screen. */
static void append_run(struct text *out, const json_t *r, int columns)
{
	const json_t *time = json_object_get(r, "time"), *incidents = json_object_get(r, "incidents");
	const int64_t ranks = integer_or_0(r, "ranks");
	text_printf(out, "%s  ", result_text(r, "run"));
	append_progress(out, r);
	if (!json_is_true(json_object_get(r, "ended")))
		APPEND_NUMBER(out, r, "seconds_since_sign", "  last sign %.0f s ago", 1);
	text_printf(out, "\n");
	for (int i = 0; i < 2; i++)
		if (json_is_string(json_object_get(r, i ? "waiting" : "problem")))
			append_folded(out, result_text(r, i ? "waiting" : "problem"), columns);
	if (result_integer(r, "step")) {
		struct text after = {0};
		append_validation(&after, r);
		text_printf(out, "  loss");
		APPEND_NUMBER(out, r, "loss", " %.4f  ", 1);
		const int room = columns - 18 - (int)after.size;
		append_curve(out, json_object_get(r, "loss_curve"), room > 8 ? room : 8);
		text_printf(out, "%s\n", after.data ? after.data : "");
		free(after.data);
		append_rates(out, r);
		text_printf(out, "\n");
	}
	if (json_is_object(time))
		append_time(out, time, columns);
	if (ranks > 1) {
		const double over = json_is_object(time) ? result_double(time, "slowest_over_mean") - 1 : 0;
		text_printf(out, "  %lld ranks", (long long)ranks);
		if (over >= 0.01)
			text_printf(out, ", rank %lld is the slowest: it works %.0f%% longer than the mean",
					(long long)result_integer(time, "slowest_rank"), 100 * over);
		text_printf(out, "\n");
	}
	if (result_integer(r, "step")) {
		APPEND_NUMBER(out, r, "balance_loss", "  balance %.3f", 1);
		APPEND_NUMBER(out, r, "expert_load", "  largest expert load %.2f", 1);
		APPEND_NUMBER(out, r, "saved_step", "  saved step %.0f", 1);
		text_printf(out, "\n");
	}
	for (size_t i = json_array_size(incidents); i-- > 0;) { /* the latest first */
		text_printf(out, "  ");
		append_incident(out, json_array_get(incidents, i));
		text_printf(out, "\n");
	}
}

/* Appends the first `most` lines of a picture, cut to the width. Control characters, which a foreign name may hold,
 * become question marks. `end` ends each line. Returns the number of lines. */
static int append_lines(struct text *out, const char *picture, int columns, int most, const char *end)
{
	int count = 0;
	for (size_t n; *picture && count < most; picture += n + 1, count++) {
		n = strcspn(picture, "\n");
		const size_t shown = columns_of(picture, n, columns);
		for (size_t i = 0; i < shown; i++) {
			const unsigned char c = picture[i], next = i + 1 < shown ? picture[i + 1] : 0;
			const bool wide = c == 0xc2 && next >= 0x80 && next < 0xa0; /* U+0080 .. U+009F, some steer terminals */
			text_append(out, c < ' ' || c == 127 || wide ? "?" : picture + i, 1);
			i += wide;
		}
		text_append_string(out, end);
	}
	return count;
}

/* ============================================================================================================
 * The screen
 * ========================================================================================================== */

struct watch_options { bool once, json, keep; double every; };

/* The alternate screen, where the shell's lines stay untouched; no cursor, no wrapped lines. And back. */
static const char enter_screen[] = "\033[?1049h\033[?25l\033[?7l\033[2J", leave_screen[] =
		"\033[?7h\033[?25h\033[?1049l";

static struct winsize screen_size(void)
{
	struct winsize size = {.ws_col = 80, .ws_row = 24};
	struct winsize found;
	if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &found) == 0 && found.ws_col && found.ws_row)
		size = found;
	return size;
}

/* Draws all runs over what is on the screen. Where there is no room for all lines, each run gets as many as the others;
 * and where there are more runs than lines, the last ones are left out. */
static void draw(const struct watched *runs, int n, double every)
{
	const struct winsize size = screen_size();
	const int columns = size.ws_col - 1; /* in the last column some terminals wrap, and clearing would reach back */
	int rows = size.ws_row, left = n;
	const time_t now = time(NULL);
	char clock[32];
	struct text out = {0}, head = {0};
	strftime(clock, sizeof clock, "%H:%M:%S", localtime(&now));
	text_append_string(&out, "\033[H");
	text_printf(&head, "ling watch  %s  every %g s, Ctrl-C ends\n", clock, every);
	if (rows > 1)
		rows -= append_lines(&out, head.data, columns, 1, "\033[K\r\n");
	free(head.data);
	for (int i = 0; i < n && rows > 0; i++, left--) {
		struct text picture = {0};
		json_t *r = watched_report(&runs[i]);
		append_run(&picture, r, columns);
		json_decref(r);
		rows -= append_lines(&out, picture.data, columns, rows / left > 1 ? rows / left : 1, "\033[K\r\n");
		free(picture.data);
	}
	if (rows == 0) /* the last line does not end: that would move all lines up */
		out.size -= strlen("\r\n"), out.data[out.size] = 0;
	text_append_string(&out, rows > 0 ? "\033[J\033[H" : "\033[H"); /* where what is typed does the least harm */
	fwrite(out.data, 1, out.size, stdout);
	fflush(stdout);
	free(out.data);
}

/* What was printed of a run last, where lines are printed one after the other. */
struct said {
	bool anything, waiting;
	int64_t step, incidents;
	enum run_state state;
	char problem[sizeof error_text];
};

/* Prints a line for each thing that has changed since then. */
static void say_changes(const struct watched *w, struct said *said)
{
	struct text out = {0};
	json_t *r = watched_report(w);
	const json_t *incidents = json_object_get(r, "incidents");
	const int64_t fresh = w->num_incidents - said->incidents, kept = (int64_t)json_array_size(incidents);
	for (int64_t i = fresh > 0 ? kept - (fresh < kept ? fresh : kept) : kept; i < kept; i++) {
		text_printf(&out, "%s: ", w->dir);
		append_incident(&out, json_array_get(incidents, i));
		text_printf(&out, "\n");
	}
	const json_t *waiting = json_object_get(r, "waiting");
	if (!said->anything || result_integer(r, "step") != said->step || w->state != said->state) {
		text_printf(&out, "%s: ", w->dir);
		append_progress(&out, r);
		APPEND_NUMBER(&out, r, "loss", "  loss %.4f", 1);
		append_validation(&out, r);
		append_rates(&out, r);
		text_printf(&out, "\n");
	}
	if (json_is_string(waiting) && !said->waiting)
		text_printf(&out, "%s: %s\n", w->dir, json_string_value(waiting));
	if (*w->problem && strcmp(w->problem, said->problem))
		text_printf(&out, "%s: %s\n", w->dir, w->problem);
	said->anything = true;
	said->step = result_integer(r, "step");
	said->state = w->state;
	said->incidents = w->num_incidents;
	said->waiting = json_is_string(waiting);
	memcpy(said->problem, w->problem, sizeof w->problem);
	json_decref(r);
	struct text lines = {0};
	append_lines(&lines, out.data ? out.data : "", INT32_MAX, INT32_MAX, "\n");
	if (lines.data)
		fputs(lines.data, stdout);
	fflush(stdout);
	free(out.data);
	free(lines.data);
}

static void print_runs(const json_t *report)
{
	const int columns = isatty(STDOUT_FILENO) ? screen_size().ws_col : 100;
	size_t i;
	json_t *r;
	json_array_foreach(json_object_get(report, "runs"), i, r) {
		struct text picture = {0}, lines = {0};
		append_run(&picture, r, columns);
		append_lines(&lines, picture.data, INT32_MAX, INT32_MAX, "\n");
		printf("%s%s", i ? "\n" : "", lines.data);
		free(picture.data);
		free(lines.data);
	}
}

static void print_once(const struct watched *runs, int n, bool json)
{
	json_t *list = json_array();
	for (int i = 0; i < n; i++)
		json_array_append_new(list, watched_report(&runs[i]));
	result_print(json_pack("{s:o}", "runs", list), json, print_runs);
}

/* Waits for a signal, at most until `time` of clock_seconds(). Returns it; 0: none came. */
static int wait_for_signal(const sigset_t *signals, double time)
{
	const double seconds = fmax(0, time - clock_seconds());
	const struct timespec most = {(time_t)seconds, (long)(fmod(seconds, 1) * 1e9)};
	const int signal = sigtimedwait(signals, NULL, &most);
	return signal > 0 ? signal : 0;
}

/* Follows the runs until all have ended, or a signal ends the program. Returns that signal, or 0. */
static int follow_runs(struct watched *runs, int n, const struct watch_options *o)
{
	const char *terminal = getenv("TERM");
	const bool screen = is_terminal(stdout) && terminal && strcmp(terminal, "dumb");
	struct said *said = allocate(n * sizeof *said);
	sigset_t signals;
	sigemptyset(&signals);
	static const int ends[] = {SIGINT, SIGTERM, SIGHUP};
	for (int i = 0; i < 3; i++)
		sigaddset(&signals, ends[i]);
	if (screen)
		sigaddset(&signals, SIGWINCH), sigaddset(&signals, SIGTSTP);
	sigprocmask(SIG_BLOCK, &signals, NULL); /* for good: a second one must not interrupt the end */
	if (screen)
		fputs(enter_screen, stdout);
	int signal = 0;
	for (double next = clock_seconds();;) {
		bool over = !o->keep;
		if (signal == 0)
			for (int i = 0; i < n; i++)
				watched_look(&runs[i]);
		for (int i = 0; i < n; i++) {
			over &= watched_is_over(&runs[i]);
			if (!screen)
				say_changes(&runs[i], &said[i]);
		}
		if (screen)
			draw(runs, n, o->every);
		signal = 0;
		if (over || ferror(stdout))
			break;
		if (clock_seconds() >= next)
			next = clock_seconds() + o->every;
		signal = wait_for_signal(&signals, next);
		if (signal == SIGTSTP) {
			fputs(leave_screen, stdout);
			fflush(stdout);
			kill(getpid(), SIGSTOP);
			fputs(enter_screen, stdout);
		} else if (signal == SIGWINCH) {
			fputs("\033[2J", stdout);
		} else if (signal) {
			break;
		}
	}
	if (screen) {
		fputs(leave_screen, stdout);
		fflush(stdout);
		print_once(runs, n, false); /* so that it stays to be read */
	}
	free(said);
	return signal;
}

static int run_watch(const struct command_line *line)
{
	const struct watch_options *o = line->options;
	const int n = line->num_words;
	if (o->json && !o->once) {
		fail("--json prints the state once; give it with --once");
		return EXIT_WRONG_USE;
	}
	struct watched *runs = allocate(n * sizeof *runs);
	int rc = 0, made = 0;
	for (; made < n && rc == 0; made++)
		rc = watched_init(&runs[made], line->words[made]);
	int status = rc < 0 ? EXIT_WRONG_USE : EXIT_DONE;
	if (rc == 0 && o->once) {
		for (int i = 0; i < n; i++)
			watched_look(&runs[i]);
		print_once(runs, n, o->json);
		for (int i = 0; i < n && status == EXIT_DONE; i++)
			if (*runs[i].problem || runs[i].state <= RUN_EMPTY) {
				if (*runs[i].problem)
					fail("%s", runs[i].problem);
				else
					fail("%s: %s", runs[i].dir, runs[i].state == RUN_MISSING ? "there is no such directory"
							: "there is no run in it: neither metrics.jsonl, events.jsonl nor a heartbeat");
				status = EXIT_WORK_FAILED;
			}
	} else if (rc == 0 && follow_runs(runs, n, o) == 0) {
		for (int i = 0; i < n && status == EXIT_DONE; i++)
			if (runs[i].state != RUN_IS_DONE) {
				fail("%s: %s", runs[i].dir, runs[i].state == RUN_NONE ? "there is no run in it, but other files"
						: run_state_names[runs[i].state]);
				status = runs[i].state == RUN_WAS_STOPPED ? EXIT_STOPPED : EXIT_WORK_FAILED;
			}
	}
	for (int i = 0; i < made; i++)
		watched_free(&runs[i]);
	free(runs);
	return status;
}

static const struct command_option options[] = {
	FLAG_OPTION(watch_options, once, "once", "Print the state and end"),
	FLAG_OPTION(watch_options, json, "json", "With --once: print one JSON object"),
	FLAG_OPTION(watch_options, keep, "keep", "Go on when all runs have ended, as one may be started again"),
	NUMBER_OPTION(watch_options, every, "every", "SECONDS", 0.1, 3600, "Seconds between two looks", .initial = "1"),
};

const struct command watch_command = {
	.name = "watch", .usage = "RUN [RUN ...]", .min_words = 1, .max_words = ANY_NUMBER,
	.help = "Follow training runs in a terminal, also those of other people on a shared disk: losses, speed, what each "
		"rank waits for, incidents. It only reads.",
	.run = run_watch, COMMAND_OPTIONS(watch_options, options), .handles_signals = true,
};
