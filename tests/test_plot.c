/*
 * test_plot.c - pictures of runs: the font, the numbers and ticks of axes, and whole PNG files, which are read back
 * and of which pixels are looked at.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "data.h"
#include "commands/plot_canvas.h"
#include "commands/plot.h"

#include <math.h>
#include <png.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test.h"

enum { LOSS_TOP = 105, LOSS_BOTTOM = 610, LOAD_TOP = 1080, LOAD_BOTTOM = 1430, MIDDLE = (PLOT_LEFT + PLOT_RIGHT) / 2 };
static const uint32_t TRAIN = 0x93bce4, SMOOTH = 0x1f5fa8, VALID = 0xe07a10, LR = 0x14806a, BATCH = 0x8a4fa8;

static uint8_t picture[CANVAS_WIDTH * CANVAS_HEIGHT * 3];

static int drop_empty_scratch(void **state)
{
	(void)state;
	return rmdir(scratch); /* fails if a test left a file there, a temporary file for example */
}

/* The metrics of n steps from step `first` on: a falling loss with noise, validated every `valid_every` steps (0 =
 * never). The caller frees them. */
static struct metrics *make_run(int n, int layers, int64_t first, int valid_every)
{
	struct metrics *m = allocate(n * (sizeof *m + layers * sizeof(double)));
	double *loads = (double *)(m + n);
	uint32_t noise = 1;
	for (int i = 0; i < n; i++, loads += layers) {
		double done = (double)i / n;
		noise = noise * 1664525 + 1013904223;
		m[i] = (struct metrics){.step = first + i, .samples = 32 * (i + 1), .tokens = 8192 * (int64_t)(i + 1),
			.batch = done < 0.2 ? 8 : done < 0.4 ? 16 : 32,
			.loss = 1.2 + 4.5 * exp(-done * 12) + noise / 4294967296.0 * 0.2,
			.lr = done < 0.1 ? done * 1e-2 : done < 0.8 ? 1e-3 : (1 - done) * 5e-3,
			.num_layers = layers, .expert_load = loads,
			.has_valid_loss = valid_every && (i + 1) % valid_every == 0, .valid_loss = 1.5 + 4.5 * exp(-done * 12)};
		for (int layer = 0; layer < layers; layer++)
			loads[layer] = 1 + 5 * exp(-done * (5 + layer % 7));
	}
	return m;
}

/* Draws the run, reads the PNG file back into `picture` and checks what is so in every picture: its size, and a white
 * margin. */
static void draw(const struct metrics *m, int n, const char *title)
{
	const char *path = at("a.png");
	assert_int_equal(plot_metrics(m, n, NULL, 0, title, path), 0);
	png_image image = {.version = PNG_IMAGE_VERSION};
	assert_true(png_image_begin_read_from_file(&image, path));
	assert_int_equal(image.format & (PNG_FORMAT_FLAG_COLOR | PNG_FORMAT_FLAG_ALPHA), PNG_FORMAT_FLAG_COLOR);
	assert_int_equal(image.width, CANVAS_WIDTH);
	assert_int_equal(image.height, CANVAS_HEIGHT);
	image.format = PNG_FORMAT_RGB;
	assert_true(png_image_finish_read(&image, NULL, picture, 0, NULL));
	assert_int_equal(unlink(path), 0);
	for (int y = 0; y < CANVAS_HEIGHT; y++)
		for (int x = 0; x < CANVAS_WIDTH; x++)
			if (x < 8 || y < 8 || x >= CANVAS_WIDTH - 8 || y >= CANVAS_HEIGHT - 8)
				for (int i = 0; i < 3; i++)
					assert_int_equal(picture[(y * CANVAS_WIDTH + x) * 3 + i], 255);
}

static uint32_t pixel(int x, int y)
{
	const uint8_t *p = &picture[(y * CANVAS_WIDTH + x) * 3];
	return (uint32_t)p[0] << 16 | p[1] << 8 | p[2];
}

/* The number of pixels of exactly this colour in a box of the picture. */
static int count_colour(uint32_t colour, int left, int top, int right, int bottom)
{
	int n = 0;
	for (int y = top; y < bottom; y++)
		for (int x = left; x < right; x++)
			n += pixel(x, y) == colour;
	return n;
}

static int in_panels(uint32_t colour)
{
	return count_colour(colour, PLOT_LEFT, LOSS_TOP, PLOT_RIGHT, LOAD_TOP);
}

/* -- the canvas -- */

static void every_character_is_drawn_and_is_unlike_the_others(void **state)
{
	(void)state;
	enum { SIDE = 32, FIRST = '!', LAST = '~' };
	static uint8_t seen[LAST - FIRST + 1][SIDE][SIDE];
	struct canvas c = canvas_create();
	for (int ch = FIRST; ch <= LAST; ch++) {
		memset(c.rgb, 255, sizeof picture);
		draw_text(&c, SIDE / 2, SIDE / 2, (char[]){ch, 0}, 2, 0.5, false, 0);
		int dark = 0;
		for (int y = 0; y < SIDE; y++)
			for (int x = 0; x < SIDE; x++) {
				seen[ch - FIRST][y][x] = c.rgb[(y * CANVAS_WIDTH + x) * 3];
				dark += seen[ch - FIRST][y][x] < 128;
			}
		if (dark == 0)
			fail_msg("character '%c' is empty", ch);
		for (int other = FIRST; other < ch; other++)
			if (memcmp(seen[ch - FIRST], seen[other - FIRST], sizeof seen[0]) == 0)
				fail_msg("characters '%c' and '%c' look the same", ch, other);
		for (int i = 0; i < CANVAS_WIDTH * CANVAS_HEIGHT; i++)
			if (c.ink[i])
				fail_msg("character '%c' left ink behind", ch);
	}
	assert_true(text_width("W", 1) > text_width("i", 1) && text_width(" ", 1) > 0 && text_width("", 1) == 0);
	assert_true(text_width("\xe7\x81\xb5", 1) == text_width("?", 1)); /* one character of three bytes */
	assert_true(text_width("\xff\x80", 1) == text_width("?", 1));     /* bad UTF-8 does no harm */
	canvas_free(&c);
}

static void numbers_are_written_as_people_read_them(void **state)
{
	(void)state;
	static const struct { double v, step, largest; const char *text; } cases[] = {
		{0, 1, 5, "0"}, {2, 0.5, 5, "2.0"}, {2.5, 0.5, 5, "2.5"}, {400, 50, 400, "400"}, {2000, 500, 4000, "2000"},
		{2000, 2000, 2e4, "2k"}, {12500, 500, 2e4, "12.5k"}, {1e6, 2e5, 1e6, "1M"}, {8e5, 2e5, 1e6, "800k"},
		{100002, 2, 100012, "100002"},
		{1e-3, 2e-4, 1.1e-3, "1e-3"}, {1.2e-4, 2e-5, 1.3e-4, "1.2e-4"}, {0.02, 0.01, 0.05, "0.02"},
		{3e9, 1e9, 4e9, "3G"}, {3e20, 1e20, 4e20, "3e20"}, {-1.5, 0.5, 2, "-1.5"},
		{13107200, 131072, 13107200, "13.1M"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		char text[32];
		format_number(text, cases[i].v, cases[i].step, cases[i].largest);
		assert_string_equal(text, cases[i].text);
	}
}

static void ticks_are_round_and_inside(void **state)
{
	(void)state;
	static const double ranges[][2] = {
		{0.5, 400.5}, {0, 1.1e-3}, {1.998, 2.002}, {-0.5, 87.5}, {-0.5, 0.5}, {1e6, 1e6 + 10}, {0, 0}, {-3, 7},
		{1e-90, 1e90}, {0, 1e-300}, {9e18, 9e18},
	};
	for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++) {
		struct axis a = make_axis(ranges[i][0], ranges[i][1], 600, 100, 0, false);
		assert_true(a.hi > a.lo && a.num_ticks <= 14);
		double digit = a.step / pow(10, floor(log10(a.step) + 1e-9));
		for (int t = 0; t < a.num_ticks; t++) {
			assert_true(fabs(digit - 1) < 1e-6 || fabs(digit - 2) < 1e-6 || fabs(digit - 5) < 1e-6);
			assert_true(a.ticks[t] >= a.lo - 1e-6 * a.step && a.ticks[t] <= a.hi + 1e-6 * a.step);
			assert_true(axis_at(&a, a.ticks[t]) <= 600 && axis_at(&a, a.ticks[t]) >= 100);
		}
	}
	struct axis integers = make_axis(-0.5, 0.5, 600, 100, 1, false), log_axis = make_axis(1, 1e5, 600, 100, 0, true);
	assert_true(integers.num_ticks == 1 && integers.ticks[0] == 0);
	assert_true(log_axis.num_ticks == 16 && log_axis.ticks[1] == 2 && fabs(axis_at(&log_axis, 1e5) - 100) < 1e-9);
	assert_true(axis_at(&log_axis, NAN) == 600 && axis_at(&log_axis, INFINITY) == 100);
	assert_true(make_axis(1e-90, 1e90, 600, 100, 0, true).num_ticks <= 9);
}

/* -- whole pictures -- */

static void ordinary_run_shows_all_its_lines(void **state)
{
	(void)state;
	struct metrics *m = make_run(400, 4, 1, 50);
	draw(m, 400, "quickstart");
	const uint32_t lines[] = {TRAIN, SMOOTH, VALID, LR, BATCH};
	for (int i = 0; i < 5; i++)
		assert_true(in_panels(lines[i]) > 100);
	assert_int_equal(in_panels(RED), 0);
	assert_int_equal(count_colour(0xffffff, PLOT_LEFT + 1, LOAD_TOP + 1, PLOT_RIGHT, LOAD_BOTTOM), 0);
	assert_true(count_colour(BLACK, 0, 0, CANVAS_WIDTH, 60) > 20); /* the title */
	free(m);
}

static void odd_sizes_are_drawn(void **state)
{
	(void)state;
	static const struct { int n, layers; int64_t first; int valid_every; } cases[] = {
		{1, 1, 1, 1}, {1, 0, 17, 0}, {2, 88, 1, 0}, {12, 6, 100001, 4}, {39, 1, INT64_C(1) << 40, 3}, {41, 2, 0, 3},
		{5000, 88, 1, 1}, {3, 2, INT64_C(1) << 50, 1},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct metrics *m = make_run(cases[i].n, cases[i].layers, cases[i].first, cases[i].valid_every);
		draw(m, cases[i].n, "odd");
		assert_true(in_panels(SMOOTH) > 10 && in_panels(BATCH) > 10);
		assert_int_equal(in_panels(VALID) > 0, cases[i].valid_every > 0);
		if (cases[i].layers > 0 && cases[i].n < 1000) /* few steps cover the whole width */
			assert_int_equal(count_colour(0xffffff, PLOT_LEFT + 1, LOAD_TOP + 1, PLOT_RIGHT, LOAD_BOTTOM), 0);
		free(m);
	}
	struct metrics *m = make_run(3, 2, INT64_MAX - 5, 1); /* numbers of steps that are equal as doubles */
	draw(m, 3, "far");
	free(m);
}

static void without_experts_the_other_panels_grow(void **state)
{
	(void)state;
	struct metrics *m = make_run(400, 0, 1, 50);
	draw(m, 400, "dense");
	assert_true(count_colour(SMOOTH, PLOT_LEFT, LOSS_BOTTOM + 60, PLOT_RIGHT, 850) > 50);
	assert_true(count_colour(LR, PLOT_LEFT, LOAD_BOTTOM - 150, PLOT_RIGHT, LOAD_BOTTOM) > 50);
	free(m);
}

static void equal_values_make_separate_flat_lines(void **state)
{
	(void)state;
	struct metrics *m = make_run(100, 1, 1, 0);
	for (int i = 0; i < 100; i++)
		m[i].loss = 2, m[i].lr = 1e-4, m[i].batch = 32, m[i].expert_load[0] = 1;
	draw(m, 100, "equal");
	assert_int_equal(pixel(MIDDLE, (LOSS_TOP + LOSS_BOTTOM) / 2), SMOOTH);
	assert_true(in_panels(LR) > 1000 && in_panels(BATCH) > 1000);
	assert_int_equal(pixel(MIDDLE, (LOAD_TOP + LOAD_BOTTOM) / 2), heat_colour(0));
	free(m);
}

static void nonfinite_values_leave_a_gap_and_a_red_mark(void **state)
{
	(void)state;
	struct metrics *m = make_run(400, 2, 1, 50);
	for (int i = 190; i < 210; i++)
		m[i].loss = i % 2 ? NAN : INFINITY;
	m[299].valid_loss = NAN, m[99].lr = NAN, m[200].expert_load[1] = NAN;
	draw(m, 400, "gap");
	int gap = MIDDLE - 15, end = MIDDLE + 15; /* inside of the 20 steps, of 2.9 pixels each */
	assert_int_equal(count_colour(TRAIN, gap, LOSS_TOP, end, LOSS_BOTTOM), 0);
	assert_int_equal(count_colour(SMOOTH, gap, LOSS_TOP, end, LOSS_BOTTOM), 0);
	assert_true(count_colour(RED, gap, LOSS_BOTTOM - 12, end, LOSS_BOTTOM) > 100);
	int valid_gap = PLOT_LEFT + (PLOT_RIGHT - PLOT_LEFT) * 3 / 4, lr_gap = PLOT_LEFT + (PLOT_RIGHT - PLOT_LEFT) / 4;
	assert_true(count_colour(RED, valid_gap - 10, LOSS_BOTTOM - 12, valid_gap + 10, LOSS_BOTTOM) > 20);
	assert_true(count_colour(RED, lr_gap - 10, 958, lr_gap + 10, 970) > 20);
	assert_true(count_colour(RED, MIDDLE, LOSS_TOP - 40, PLOT_RIGHT, LOSS_TOP) > 20); /* in the legend */
	assert_true(count_colour(RED, gap, LOAD_TOP, end, LOAD_BOTTOM) > 100);
	for (int i = 0; i < 400; i++)
		m[i].loss = m[i].valid_loss = m[i].lr = m[i].expert_load[0] = m[i].expert_load[1] = NAN;
	draw(m, 400, "nothing but NaN");
	assert_int_equal(in_panels(SMOOTH) + in_panels(TRAIN) + in_panels(LR), 0);
	free(m);
}

static void extreme_losses_are_all_shown(void **state)
{
	(void)state;
	const double spikes[] = {20, 1e5, 1e30, 1e99, 1e-99, 1e-310, 0, -3, 1e300};
	for (size_t i = 0; i < sizeof spikes / sizeof *spikes; i++) {
		struct metrics *m = make_run(400, 0, 1, 50);
		m[200].loss = spikes[i];
		draw(m, 400, "spike");
		assert_true(in_panels(SMOOTH) > 100);
		assert_int_equal(in_panels(RED) > 0, spikes[i] > 1e100); /* beyond what can be shown */
		free(m);
	}
}

static void heat_map_puts_layers_and_steps_where_they_belong(void **state)
{
	(void)state;
	struct metrics *m = make_run(10, 2, 1, 0);
	for (int i = 0; i < 10; i++)
		m[i].expert_load[0] = i < 5 ? 1 : 2, m[i].expert_load[1] = 3;
	draw(m, 10, "heat");
	int upper = LOAD_TOP + 20, lower = LOAD_BOTTOM - 20;
	assert_int_equal(pixel(PLOT_LEFT + 5, lower), heat_colour(0));
	assert_int_equal(pixel(MIDDLE - 1, lower), heat_colour(0));
	assert_int_equal(pixel(MIDDLE, lower), heat_colour(0.5));
	assert_int_equal(pixel(PLOT_RIGHT - 5, lower), heat_colour(0.5));
	assert_int_equal(pixel(MIDDLE, upper), heat_colour(1));
	free(m);
}

static void a_million_steps_keep_their_one_spike(void **state)
{
	(void)state;
	struct metrics *m = make_run(1000000, 1, 1, 1000);
	m[650000].loss = 7;
	draw(m, 1000000, "million");
	int x = PLOT_LEFT + (PLOT_RIGHT - PLOT_LEFT) * 65 / 100, seen = 0;
	for (int dx = -3; dx <= 3; dx++)
		seen += pixel(x + dx, LOSS_TOP + 50) != 0xffffff;
	assert_true(seen > 0);
	free(m);
}

static void a_long_name_is_not_clipped(void **state)
{
	(void)state;
	char title[256];
	memset(title, 'W', sizeof title - 1), title[255] = 0;
	struct metrics *m = make_run(50, 1, 1, 0);
	draw(m, 50, title);
	free(m);
}

static void what_cannot_be_written_is_said(void **state)
{
	(void)state;
	struct metrics *m = make_run(5, 1, 1, 0);
	char *path = at("nowhere/a.png"), too_long[PATH_LEN];
	assert_int_equal(plot_metrics(m, 5, NULL, 0, "t", path), -1);
	assert_non_null(strstr(error_text, path));
	assert_int_equal(plot_metrics(m, 5, NULL, 0, "t", scratch), -1); /* a directory */
	assert_non_null(strstr(error_text, scratch));
	memset(too_long, 'x', sizeof too_long - 1), too_long[sizeof too_long - 1] = 0;
	assert_int_equal(plot_metrics(m, 5, NULL, 0, "t", too_long), -1);
	path = at("full.png");
	limit_files(10000);
	int rc = plot_metrics(m, 5, NULL, 0, "t", path);
	limit_files(RLIM_INFINITY);
	assert_int_equal(rc, -1);
	assert_non_null(strstr(error_text, "full.png"));
	assert_false(holds_temporary(scratch) || access(path, F_OK) == 0);
	free(m);
}

/* Pipes, links and devices stay what they are, and the picture is written to them, or to the file that a link points
 * to. */
static void what_is_no_plain_file_stays_that(void **state)
{
	(void)state;
	struct metrics *m = make_run(5, 1, 1, 0);
	struct stat st;
	const char *plain = at("plain.png"), *link = at("link.png"), *fifo = at("fifo"), *copy = at("copy.png");
	char command[2 * PATH_LEN + 16];
	assert_int_equal(symlink("plain.png", link), 0);
	for (int i = 0; i < 2; i++) { /* to nowhere, to a file */
		assert_int_equal(plot_metrics(m, 5, NULL, 0, "t", link), 0);
		assert_true(lstat(link, &st) == 0 && S_ISLNK(st.st_mode));
		assert_true(lstat(plain, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 1000);
		const off_t size = st.st_size;
		assert_int_equal(truncate(plain, 1), 0);
		assert_int_equal(plot_metrics(m, 5, NULL, 0, "t", plain), 0);
		assert_true(lstat(plain, &st) == 0 && st.st_size == size);
	}
	assert_int_equal(unlink(link), 0);
	assert_int_equal(mkfifo(fifo, 0600), 0);
	assert_int_equal(symlink("fifo", link), 0);
	snprintf(command, sizeof command, "cat %s > %s", fifo, copy);
	FILE *reader = popen(command, "r");
	assert_non_null(reader);
	assert_int_equal(plot_metrics(m, 5, NULL, 0, "t", link), 0);
	assert_int_equal(pclose(reader), 0);
	assert_true(lstat(link, &st) == 0 && S_ISLNK(st.st_mode));
	assert_true(lstat(fifo, &st) == 0 && S_ISFIFO(st.st_mode));
	const off_t size = lstat(plain, &st) == 0 ? st.st_size : 0;
	assert_true(lstat(copy, &st) == 0 && st.st_size == size);
	unlink(plain), unlink(link), unlink(fifo), unlink(copy);
	assert_int_equal(plot_metrics(m, 5, NULL, 0, "t", "/dev/null"), 0);
	assert_true(lstat("/dev/null", &st) == 0 && S_ISCHR(st.st_mode));
	free(m);
}

static void a_run_directory_is_plotted(void **state)
{
	(void)state;
	const char *metrics = at("metrics.jsonl"), *png = at("run.png");
	assert_int_equal(plot_run(scratch, png), -1); /* no metrics.jsonl yet */
	assert_non_null(strstr(error_text, "metrics.jsonl"));
	put_string(metrics, "");
	assert_int_equal(plot_run(scratch, png), -1); /* empty */
	assert_non_null(strstr(error_text, metrics));
	FILE *f = fopen(metrics, "w");
	assert_non_null(f);
	for (int step = 1; step <= 3; step++)
		fprintf(f, "{\"step\": %d, \"samples\": %d, \"tokens\": %d, \"batch\": 8, \"loss\": %s, "
				"\"balance_loss\": 1.0, \"z_loss\": 0.5, \"lr\": 0.001, \"grad_norm\": 1.5, \"seconds\": 0.25, "
				"\"tokens_per_second\": 1000.0, \"expert_load\": [1.5, 2.5]%s}\n",
				step, step * 8, step * 1024, step == 2 ? "null" : "2.5",
				step == 2 ? ", \"nonfinite\": [\"loss\"]" : "");
	assert_int_equal(fclose(f), 0);
	if (plot_run(scratch, png) < 0)
		fail_msg("%s", error_text);
	assert_int_equal(unlink(png), 0);
	assert_int_equal(unlink(metrics), 0);
}

/* Equal ratios are equal distances on a log axis, equal differences on another; from end to end. */
static void values_stand_where_they_belong(void **state)
{
	(void)state;
	const struct axis log_axis = make_axis(1, 1e4, 600, 100, 0, true);
	const struct axis straight = make_axis(-2, 8, 100, 600, 0, false);
	for (int i = 0; i <= 20; i++) {
		assert_true(fabs(axis_at(&log_axis, pow(10, i * 0.2)) - (600 - 25 * i)) < 1e-6);
		assert_true(fabs(axis_at(&straight, -2 + i * 0.5) - (100 + 25 * i)) < 1e-6);
	}
	assert_true(axis_at(&log_axis, 0.5) == 600 && axis_at(&log_axis, 2e4) == 100);
	static const double ticks[] = {1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000};
	assert_int_equal(log_axis.num_ticks, COUNT(ticks));
	for (int i = 0; i < COUNT(ticks); i++)
		assert_true(fabs(log_axis.ticks[i] - ticks[i]) < 1e-9 * ticks[i]);
}

/* A run whose losses fall from 1000 to 1 by equal ratios is a straight line on its log axis. */
static void a_log_axis_is_one_in_the_picture(void **state)
{
	(void)state;
	enum { N = 301 };
	struct metrics *m = make_run(N, 0, 1, 0);
	for (int i = 0; i < N; i++)
		m[i].loss = pow(10, 3 - 3.0 * i / (N - 1));
	draw(m, N, "log");
	double mean[3];
	for (int part = 0; part < 3; part++) { /* the smoothed line at a quarter, the middle, three quarters */
		const int x = PLOT_LEFT + (PLOT_RIGHT - PLOT_LEFT) * (part + 1) / 4;
		double sum = 0, n = 0;
		for (int y = LOSS_TOP + 2; y < 848; y++) {
			const uint8_t *p = picture + ((size_t)y * CANVAS_WIDTH + x) * 3;
			if ((uint32_t)(p[0] << 16 | p[1] << 8 | p[2]) == SMOOTH)
				sum += y, n++;
		}
		assert_true(n > 0);
		mean[part] = sum / n;
	}
	assert_true(fabs(mean[0] + mean[2] - 2 * mean[1]) < 3 && mean[2] - mean[0] > 250);
	free(m);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_character_is_drawn_and_is_unlike_the_others),
		cmocka_unit_test(numbers_are_written_as_people_read_them),
		cmocka_unit_test(ticks_are_round_and_inside),
		cmocka_unit_test(ordinary_run_shows_all_its_lines),
		cmocka_unit_test(odd_sizes_are_drawn),
		cmocka_unit_test(without_experts_the_other_panels_grow),
		cmocka_unit_test(equal_values_make_separate_flat_lines),
		cmocka_unit_test(nonfinite_values_leave_a_gap_and_a_red_mark),
		cmocka_unit_test(extreme_losses_are_all_shown),
		cmocka_unit_test(heat_map_puts_layers_and_steps_where_they_belong),
		cmocka_unit_test(a_million_steps_keep_their_one_spike),
		cmocka_unit_test(a_long_name_is_not_clipped),
		cmocka_unit_test(what_cannot_be_written_is_said),
		cmocka_unit_test(what_is_no_plain_file_stays_that),
		cmocka_unit_test(a_run_directory_is_plotted),
		cmocka_unit_test(values_stand_where_they_belong), cmocka_unit_test(a_log_axis_is_one_in_the_picture),
	};
	return cmocka_run_group_tests(tests, make_scratch, drop_empty_scratch);
}
