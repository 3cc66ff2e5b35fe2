/*
 * test_plot.c - pictures of runs: text, the numbers and ticks of axes, and whole PNG files, which are read back and of
 * which pixels are looked at; SVG files.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "commands/plot_canvas.h"
#include "commands/plot.h"
#include "commands/runs.h"

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

static const uint32_t FIRST = 0x0072b2, SECOND = 0xd55e00, THIRD = 0x009e73, PALE = 0x94c4df;

enum { HEIGHT = 2000 };
static uint8_t picture[PLOT_WIDTH * HEIGHT * 3]; /* as it was read, and how high it is */
static int height;
static struct box panels[NUM_PANELS];

static int drop_empty_scratch(void **state)
{
	(void)state;
	return rmdir(scratch); /* fails if a test left a file there, a temporary file for example */
}

/* Adds a column for the rows from `first` on, every `every`-th. Returns its values, all 0. */
static double *add_column(struct run *r, const char *name, int first, int every)
{
	r->columns = grow(r->columns, r->num_columns, &r->columns_room, 1, sizeof *r->columns);
	struct column *c = &r->columns[string_table_add(&r->names, name, strlen(name), 1)];
	*c = (struct column){.name = copy_string(name), .count = (r->count - first + every - 1) / every};
	r->num_columns++;
	c->row = allocate((c->count + 1) * sizeof *c->row), c->value = allocate((c->count + 1) * sizeof *c->value);
	for (int i = 0; i < c->count; i++)
		c->row[i] = first + i * every;
	return c->value;
}

/* The values of a column. */
static double *values(struct run *r, const char *name)
{
	return run_column(r, name)->value;
}

/* A run of n steps from step `first` on: a falling loss with noise, validated every `valid_every` steps (0 = never). */
static struct run make_run(int n, int layers, int64_t first, int valid_every)
{
	struct run r = {.name = "run", .count = n, .events = json_array()};
	r.step = allocate(n * sizeof *r.step), r.tokens = allocate(n * sizeof *r.tokens);
	static const char *const names[] = {"loss", "lr", "batch", "grad_norm", "tokens_per_second", "balance_loss",
			"z_loss"};
	double *v[COUNT(names)];
	uint32_t noise = 1;
	for (int i = 0; i < COUNT(names); i++)
		v[i] = layers || i < 5 ? add_column(&r, names[i], 0, 1) : NULL;
	for (int i = 0; i < n; i++) {
		const double done = (double)i / n;
		noise = noise * 1664525 + 1013904223;
		r.step[i] = first + i, r.tokens[i] = 8192 * (int64_t)(i + 1);
		v[0][i] = 1.2 + 4.5 * exp(-done * 12) + noise / 4294967296.0 * 0.2;
		v[1][i] = done < 0.1 ? done * 1e-2 : done < 0.8 ? 1e-3 : (1 - done) * 5e-3;
		v[2][i] = done < 0.2 ? 8 : done < 0.4 ? 16 : 32;
		v[3][i] = 1 + noise / 4294967296.0, v[4][i] = 1000 + noise / 4294967296.0 * 100;
		for (int k = 5; k < COUNT(names) && v[k]; k++)
			v[k][i] = k + noise / 4294967296.0;
	}
	for (int layer = 0; layer < layers; layer++) {
		char name[32];
		snprintf(name, sizeof name, "expert_load.%d", layer);
		double *load = add_column(&r, name, 0, 1);
		for (int i = 0; i < n; i++)
			load[i] = 1 + 5 * exp(-(double)i / n * (5 + layer % 7));
	}
	if (valid_every) {
		double *valid = add_column(&r, "valid_loss", valid_every - 1, valid_every);
		for (int i = 0; i < run_column(&r, "valid_loss")->count; i++)
			valid[i] = 1.5 + 4.5 * exp(-(double)i * valid_every / n * 12);
	}
	return r;
}

/* Draws n runs, reads the PNG file back into `picture` and checks what is so in every picture: its size, and a white
 * margin. */
static void draw_runs(const struct run *runs, int n, bool by_tokens)
{
	const char *path = at("a.png");
	if (plot_runs(runs, n, by_tokens, path) < 0)
		fail_msg("%s", error_text);
	bool experts = false;
	for (int i = 0; i < n; i++)
		experts |= run_elements(&runs[i], "expert_load") > 0;
	height = plot_layout(panels, n, experts);
	png_image image = {.version = PNG_IMAGE_VERSION};
	assert_true(png_image_begin_read_from_file(&image, path));
	assert_int_equal(image.format & (PNG_FORMAT_FLAG_COLOR | PNG_FORMAT_FLAG_ALPHA), PNG_FORMAT_FLAG_COLOR);
	assert_int_equal(image.width, PLOT_WIDTH);
	assert_int_equal(image.height, height);
	assert_true(height <= HEIGHT);
	image.format = PNG_FORMAT_RGB;
	assert_true(png_image_finish_read(&image, NULL, picture, 0, NULL));
	assert_int_equal(unlink(path), 0);
	for (int y = 0; y < height; y++)
		for (int x = 0; x < PLOT_WIDTH; x++)
			if (x < 8 || y < 8 || x >= PLOT_WIDTH - 8 || y >= height - 8)
				for (int i = 0; i < 3; i++)
					assert_int_equal(picture[(y * PLOT_WIDTH + x) * 3 + i], 255);
}

static void draw(const struct run *r)
{
	draw_runs(r, 1, false);
}

static uint32_t pixel(int x, int y)
{
	const uint8_t *p = &picture[(y * PLOT_WIDTH + x) * 3];
	return (uint32_t)p[0] << 16 | p[1] << 8 | p[2];
}

/* Whether two colours are the same but for `off` in each part. */
static bool like(uint32_t a, uint32_t b, int off)
{
	for (int shift = 16; shift >= 0; shift -= 8)
		if (abs((int)(a >> shift & 255) - (int)(b >> shift & 255)) > off)
			return false;
	return true;
}

/* The number of pixels of nearly this colour in a box of the picture. */
static int count_colour(uint32_t colour, double left, double top, double right, double bottom)
{
	int n = 0;
	for (int y = (int)top; y < (int)bottom; y++)
		for (int x = (int)left; x < (int)right; x++)
			n += like(pixel(x, y), colour, 8);
	return n;
}

static int in_panel(enum plot_panel panel, uint32_t colour)
{
	const struct box *b = &panels[panel];
	return count_colour(colour, b->left, b->top, b->right, b->bottom);
}

/* The pixel column of a share of a panel's width. */
static double across(enum plot_panel panel, double share)
{
	return panels[panel].left + share * (panels[panel].right - panels[panel].left);
}

/* The legend of a panel. */
static int in_legend(enum plot_panel panel, uint32_t colour)
{
	const struct box *b = &panels[panel];
	return count_colour(colour, b->left, b->top - 26, b->right, b->top - 8);
}

/* -- the canvas -- */

/* Writes a canvas of this size as a PNG file and reads it back: [height, width, 3]. The caller frees both. */
static uint8_t *pixels_of(struct canvas *c, int width, int high)
{
	const char *path = at("canvas.png");
	assert_int_equal(canvas_write(c, path), 0);
	png_image image = {.version = PNG_IMAGE_VERSION};
	assert_true(png_image_begin_read_from_file(&image, path));
	image.format = PNG_FORMAT_RGB;
	uint8_t *rgb = allocate((size_t)width * high * 3);
	assert_true(png_image_finish_read(&image, NULL, rgb, 0, NULL));
	assert_int_equal(unlink(path), 0);
	return rgb;
}

static void every_character_is_drawn_and_is_unlike_the_others(void **state)
{
	(void)state;
	enum { SIDE = 32, LOWEST = '!', LAST = '~', WIDTH = SIDE * (LAST - LOWEST + 1) };
	static uint8_t seen[LAST - LOWEST + 1][SIDE][SIDE];
	struct canvas *c = canvas_create(WIDTH, SIDE, false);
	for (int ch = LOWEST; ch <= LAST; ch++)
		draw_text(c, SIDE * (ch - LOWEST) + SIDE / 2, SIDE / 2, (char[]){ch, 0}, 18, 0.5, false, 0);
	uint8_t *rgb = pixels_of(c, WIDTH, SIDE);
	for (int ch = LOWEST; ch <= LAST; ch++) {
		int dark = 0;
		for (int y = 0; y < SIDE; y++)
			for (int x = 0; x < SIDE; x++) {
				seen[ch - LOWEST][y][x] = rgb[(y * WIDTH + SIDE * (ch - LOWEST) + x) * 3];
				dark += seen[ch - LOWEST][y][x] < 128;
			}
		if (dark == 0)
			fail_msg("character '%c' is empty", ch);
		for (int other = LOWEST; other < ch; other++)
			if (memcmp(seen[ch - LOWEST], seen[other - LOWEST], sizeof seen[0]) == 0)
				fail_msg("characters '%c' and '%c' look the same", ch, other);
	}
	assert_true(text_width(" ", 9) > 0 && text_width("\xe7\x81\xb5", 9) == text_width("?", 9)); /* one of three bytes */
	assert_true(text_width("\xff\x80", 9) == text_width("?", 9));
	canvas_free(c), free(rgb);
}

/* A word has as much ink as its letters, is as wide as text_width says, and stands where it was put. */
static void text_stands_where_it_was_put(void **state)
{
	(void)state;
	struct canvas *c = canvas_create(400, 100, false);
	const double width = text_width("Loss 0.25", 20);
	assert_true(width > 60 && width < 120);
	assert_true(fabs(text_width("Loss 0.25", 40) - 2 * width) < 0.5);
	assert_true(text_width("", 20) == 0 && text_width("W", 20) > text_width("i", 20));
	assert_true(text_width("\xff\x80", 20) > 0 && text_width("a\nb", 20) > 0); /* bad UTF-8 does no harm */
	draw_text(c, 200, 50, "Loss 0.25", 20, 1, false, BLACK);
	draw_text(c, 300, 50, "Loss 0.25", 20, 0.5, true, RED);
	draw_text(c, 300, 50, "", 20, 0.5, true, RED);
	uint8_t *rgb = pixels_of(c, 400, 100);
	int left = 400, right = 0, top = 100, bottom = 0, upper = 100, lower = 0;
	for (int y = 0; y < 100; y++)
		for (int x = 0; x < 400; x++) {
			const uint8_t *p = rgb + (y * 400 + x) * 3;
			if (p[0] < 128) {
				left = x < left ? x : left, right = x > right ? x : right;
				top = y < top ? y : top, bottom = y > bottom ? y : bottom;
			} else if (p[1] < 128) {
				assert_true(x > 285 && x < 315);
				upper = y < upper ? y : upper, lower = y > lower ? y : lower;
			}
		}
	assert_true(fabs(left - (200 - width)) < 4 && right >= 195 && right <= 200);
	assert_true(top >= 40 && top <= 44 && bottom >= 55 && bottom <= 59);
	assert_true(fabs(lower - upper - width) < 6 && fabs((lower + upper) / 2.0 - 50) < 4);
	canvas_free(c), free(rgb);
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

/* -- whole pictures -- */

static void ordinary_run_shows_all_its_lines(void **state)
{
	(void)state;
	struct run r = make_run(400, 4, 1, 50);
	draw(&r);
	assert_true(in_panel(PANEL_LOSS, PALE) > 100 && in_panel(PANEL_LOSS, FIRST) > 100);
	assert_true(in_panel(PANEL_LOSS, SECOND) > 100); /* validation */
	for (int i = PANEL_SCHEDULE; i <= PANEL_LOSSES; i++) {
		assert_true(in_panel(i, FIRST) > 100);
		assert_true(i == PANEL_GRADIENT || in_panel(i, SECOND) > 100);
	}
	assert_true(in_panel(PANEL_SPEED, FIRST) > 100 && in_panel(PANEL_SPEED, SECOND) == 0); /* the peak is not known */
	for (int i = 0; i < NUM_PANELS; i++)
		assert_int_equal(in_panel(i, RED) + in_legend(i, RED), 0);
	const struct box *load = &panels[PANEL_LOAD];
	assert_int_equal(count_colour(0xffffff, load->left + 1, load->top + 1, load->right, load->bottom), 0);
	assert_true(count_colour(BLACK, 0, 0, PLOT_WIDTH, 60) > 20); /* the title */
	run_free(&r);
}

static void the_share_of_the_peak_and_the_clip_are_shown(void **state)
{
	(void)state;
	struct run r = make_run(400, 4, 1, 50);
	r.config = json_pack("{s: {s: f}}", "train", "grad_clip", 1.9);
	json_array_append_new(r.events, json_pack("{s:i, s:s, s:f, s:f}", "step", 0, "kind", "start",
			"flops_per_token", 10.0, "peak_flops", 50000.0));
	draw(&r);
	assert_true(in_panel(PANEL_SPEED, SECOND) > 100);
	assert_true(in_panel(PANEL_GRADIENT, BLACK) > 100);
	run_free(&r);
}

static void odd_sizes_are_drawn(void **state)
{
	(void)state;
	static const struct { int n, layers; int64_t first; int valid_every; } cases[] = {
		{1, 1, 1, 1}, {1, 0, 17, 0}, {2, 88, 1, 0}, {12, 6, 100001, 4}, {39, 1, INT64_C(1) << 40, 3}, {41, 2, 0, 3},
		{5000, 88, 1, 1}, {3, 2, INT64_C(1) << 50, 1},
	};
	for (int i = 0; i < COUNT(cases); i++)
		for (int by_tokens = 0; by_tokens < 2; by_tokens++) {
			struct run r = make_run(cases[i].n, cases[i].layers, cases[i].first, cases[i].valid_every);
			draw_runs(&r, 1, by_tokens);
			assert_true(in_panel(PANEL_LOSS, FIRST) > 10 && in_panel(PANEL_SCHEDULE, SECOND) > 10);
			assert_int_equal(in_panel(PANEL_LOSS, SECOND) > 0, cases[i].valid_every > 0);
			const struct box *load = &panels[PANEL_LOAD];
			if (cases[i].layers > 0) /* steps cover the whole width */
				assert_int_equal(count_colour(0xffffff, load->left + 1, load->top + 1, load->right, load->bottom), 0);
			run_free(&r);
		}
	struct run r = make_run(3, 2, INT64_MAX - 5, 1); /* numbers of steps that are equal as doubles */
	draw(&r);
	run_free(&r);
}

static void without_experts_their_panels_are_left_out(void **state)
{
	(void)state;
	struct run r = make_run(400, 0, 1, 50);
	draw(&r);
	assert_true(panels[PANEL_LOAD].right == 0 && panels[PANEL_LOSSES].right == 0);
	assert_true(panels[PANEL_SPEED].right - panels[PANEL_SPEED].left > 1000 && in_panel(PANEL_SPEED, FIRST) > 100);
	run_free(&r);
}

static void several_runs_have_a_colour_each(void **state)
{
	(void)state;
	struct run runs[3] = {make_run(400, 2, 1, 50), make_run(300, 2, 1, 50), make_run(200, 0, 1, 0)};
	for (int i = 0; i < 3; i++)
		for (int k = 0; k < runs[i].count; k++)
			values(&runs[i], "loss")[k] += i;
	draw_runs(runs, 3, false);
	static const uint32_t *const colours[] = {&FIRST, &SECOND, &THIRD};
	for (int i = 0; i < 3; i++) {
		assert_true(count_colour(*colours[i], 0, 0, PLOT_WIDTH, panels[PANEL_LOSS].top - 30) > 50); /* its name */
		const int end = (int)across(PANEL_LOSS, runs[i].count / 400.0), top = (int)panels[PANEL_LOSS].top,
				bottom = (int)panels[PANEL_LOSS].bottom;
		assert_true(count_colour(*colours[i], end - 40, top, end - 3, bottom) > 20);
		assert_int_equal(count_colour(*colours[i], end + 3, top, panels[PANEL_LOSS].right, bottom), 0);
		assert_int_equal(in_panel(PANEL_LOAD, *colours[i]) > 50, i < 2);
	}
	for (int i = 0; i < 3; i++)
		run_free(&runs[i]);
}

static void over_tokens_steps_are_as_wide_as_their_tokens(void **state)
{
	(void)state;
	struct run r = make_run(400, 1, 1, 0);
	for (int i = 0; i < 400; i++) { /* the first half of the steps has a tenth of the tokens */
		r.tokens[i] = i < 200 ? (i + 1) * 10 : 2000 + (i - 199) * 90;
		values(&r, "loss")[i] = i < 200 ? 2 : 3, values(&r, "expert_load.0")[i] = i < 200 ? 1 : 2;
	}
	for (int by_tokens = 0; by_tokens < 2; by_tokens++) {
		draw_runs(&r, 1, by_tokens);
		const struct box *b = &panels[PANEL_LOSS];
		const double border = across(PANEL_LOSS, by_tokens ? 0.1 : 0.5), middle = (b->top + b->bottom) / 2;
		assert_int_equal(count_colour(FIRST, border - 60, b->top, border - 40, middle), 0);
		assert_int_equal(count_colour(FIRST, border + 40, middle, border + 60, b->bottom), 0);
		assert_true(count_colour(FIRST, border + 40, b->top, border + 60, middle) > 10);
		const int y = (int)panels[PANEL_LOAD].top + 20;
		assert_int_equal(pixel((int)border - 2, y), heat_colour(0));
		assert_int_equal(pixel((int)border + 2, y), heat_colour(1));
	}
	run_free(&r);
}

static void equal_values_make_separate_flat_lines(void **state)
{
	(void)state;
	struct run r = make_run(100, 1, 1, 0);
	for (int i = 0; i < 100; i++)
		values(&r, "loss")[i] = 2, values(&r, "lr")[i] = 1e-4, values(&r, "batch")[i] = 32,
				values(&r, "expert_load.0")[i] = 1;
	draw(&r);
	const struct box *loss = &panels[PANEL_LOSS], *load = &panels[PANEL_LOAD];
	assert_true(like(pixel((int)across(PANEL_LOSS, 0.5), (int)(loss->top + loss->bottom) / 2), FIRST, 8));
	assert_true(in_panel(PANEL_SCHEDULE, FIRST) > 400 && in_panel(PANEL_SCHEDULE, SECOND) > 200);
	assert_int_equal(pixel((int)across(PANEL_LOAD, 0.5), (int)(load->top + load->bottom) / 2), heat_colour(0));
	run_free(&r);
}

static void nonfinite_values_leave_a_gap_and_a_red_mark(void **state)
{
	(void)state;
	struct run r = make_run(400, 2, 1, 50);
	for (int i = 190; i < 210; i++)
		values(&r, "loss")[i] = NAN;
	values(&r, "valid_loss")[5] = NAN, values(&r, "lr")[99] = NAN, values(&r, "expert_load.1")[200] = NAN;
	draw(&r);
	const struct box *b = &panels[PANEL_LOSS], *schedule = &panels[PANEL_SCHEDULE], *load = &panels[PANEL_LOAD];
	const double gap = across(PANEL_LOSS, 0.5) - 15, end = gap + 30; /* inside of the 20 steps, of 2.9 pixels each */
	assert_int_equal(count_colour(PALE, gap, b->top, end, b->bottom), 0);
	assert_int_equal(count_colour(FIRST, gap, b->top, end, b->bottom), 0);
	assert_true(count_colour(RED, gap, b->bottom - 12, end, b->bottom) > 100);
	const double valid_gap = across(PANEL_LOSS, 0.75), lr_gap = across(PANEL_SCHEDULE, 0.25);
	assert_true(count_colour(RED, valid_gap - 10, b->bottom - 12, valid_gap + 10, b->bottom) > 20);
	assert_true(count_colour(RED, lr_gap - 10, schedule->bottom - 12, lr_gap + 10, schedule->bottom) > 20);
	assert_true(in_legend(PANEL_LOSS, RED) > 20 && in_legend(PANEL_SCHEDULE, RED) > 20 &&
			in_legend(PANEL_GRADIENT, RED) == 0);
	assert_true(count_colour(RED, across(PANEL_LOAD, 0.49), load->top, across(PANEL_LOAD, 0.51), load->bottom) > 100);
	static const char *const names[] = {"loss", "valid_loss", "lr", "expert_load.0", "expert_load.1"};
	for (int k = 0; k < COUNT(names); k++)
		for (int i = 0; i < run_column(&r, names[k])->count; i++)
			values(&r, names[k])[i] = NAN;
	draw(&r);
	assert_int_equal(in_panel(PANEL_LOSS, FIRST) + in_panel(PANEL_LOSS, PALE) + in_panel(PANEL_SCHEDULE, FIRST), 0);
	run_free(&r);
}

static void extreme_losses_are_all_shown(void **state)
{
	(void)state;
	const double spikes[] = {20, 1e5, 1e30, 1e99, 1e-99, 1e-310, 0, -3, 1e300};
	for (int i = 0; i < COUNT(spikes); i++) {
		struct run r = make_run(400, 0, 1, 50);
		values(&r, "loss")[200] = spikes[i];
		draw(&r);
		assert_true(in_panel(PANEL_LOSS, FIRST) > 100);
		assert_int_equal(in_panel(PANEL_LOSS, RED) > 0, spikes[i] > 1e100); /* beyond what can be shown */
		run_free(&r);
	}
}

static void heat_map_puts_layers_and_steps_where_they_belong(void **state)
{
	(void)state;
	struct run r = make_run(10, 2, 1, 0);
	for (int i = 0; i < 10; i++)
		values(&r, "expert_load.0")[i] = i < 5 ? 1 : 2, values(&r, "expert_load.1")[i] = 3;
	draw(&r);
	const struct box *b = &panels[PANEL_LOAD];
	const int upper = (int)b->top + 20, lower = (int)b->bottom - 20, middle = (int)across(PANEL_LOAD, 0.5);
	assert_int_equal(pixel((int)b->left + 5, lower), heat_colour(0));
	assert_int_equal(pixel(middle - 1, lower), heat_colour(0));
	assert_int_equal(pixel(middle + 1, lower), heat_colour(0.5));
	assert_int_equal(pixel((int)b->right - 5, lower), heat_colour(0.5));
	assert_int_equal(pixel(middle, upper), heat_colour(1));
	run_free(&r);
}

static void a_million_steps_keep_their_one_spike(void **state)
{
	(void)state;
	struct run r = make_run(1000000, 1, 1, 1000);
	values(&r, "loss")[650000] = 7, values(&r, "grad_norm")[650000] = 9, values(&r, "batch")[650000] = 40;
	const double start = clock_seconds();
	draw(&r);
	print_message("%.1f s\n", clock_seconds() - start);
	static const enum plot_panel spiked[] = {PANEL_LOSS, PANEL_GRADIENT, PANEL_SCHEDULE};
	for (int i = 0; i < COUNT(spiked); i++) {
		const struct box *b = &panels[spiked[i]];
		const double x = across(spiked[i], 0.65), y = b->top + (b->bottom - b->top) * (i == 2 ? 0.3 : 0.12);
		int seen = 0; /* at a height that nothing else has */
		for (int dx = -3; dx <= 3; dx++)
			seen += !like(pixel((int)x + dx, (int)y), 0xffffff, 40);
		if (!seen)
			fail_msg("panel %d lost its spike", spiked[i]);
	}
	run_free(&r);
}

static void a_long_name_fits(void **state)
{
	(void)state;
	struct run runs[2] = {make_run(50, 1, 1, 0), make_run(50, 1, 1, 0)};
	memset(runs[0].name, 'W', 1000), strcpy(runs[1].name, "\xe7\x81\xb5 \xff\n");
	draw(&runs[0]);
	draw_runs(runs, 2, false);
	run_free(&runs[0]), run_free(&runs[1]);
}

/* What was decided about bad batches is marked in the panel of the loss, at its step. */
static void decisions_are_marked(void **state)
{
	(void)state;
	static const struct { const char *kind; uint32_t colour; double shift; bool bottom; } cases[] = {
		{"skip", 0xd55e00, 1, false}, {"retry", 0x8a4fa8, 0, false}, {"drop", 0x202020, 1, true},
		{"level_shift", 0x009e73, 0, false}, {"rollback", 0xcc2277, 0, true},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		struct run r = make_run(100, 0, 1, 0);
		values(&r, "loss")[10] = 9;
		json_array_append_new(r.events, json_pack("{s:i, s:s, s:f}", "step", 80, "kind", cases[i].kind, "loss", 8.5));
		draw(&r);
		const struct box *b = &panels[PANEL_LOSS];
		const double x = across(PANEL_LOSS, (79.5 + cases[i].shift) / 100), y = cases[i].bottom ? b->bottom - 7 :
				b->top + 50;
		if (count_colour(cases[i].colour, x - 8, y - 30, x + 8, y + 30) < 20)
			fail_msg("%s is not marked", cases[i].kind);
		assert_true(in_legend(PANEL_LOSS, cases[i].colour) > 20);
		run_free(&r);
	}
}

static void what_cannot_be_written_is_said(void **state)
{
	(void)state;
	struct run r = make_run(5, 1, 1, 0);
	char *path = at("nowhere/a.png"), too_long[PATH_LEN];
	assert_int_equal(plot_runs(&r, 1, false, path), -1);
	expect_error(path);
	assert_int_equal(plot_runs(&r, 1, false, scratch), -1); /* a directory */
	expect_error(scratch);
	memset(too_long, 'x', sizeof too_long - 1), too_long[sizeof too_long - 1] = 0;
	assert_int_equal(plot_runs(&r, 1, false, too_long), -1);
	static const char *const names[] = {"full.png", "full.svg"};
	for (int i = 0; i < 2; i++) {
		limit_files(10000);
		const int rc = plot_runs(&r, 1, false, at(names[i]));
		limit_files(RLIM_INFINITY);
		assert_int_equal(rc, -1);
		expect_error(names[i]);
		assert_false(holds_temporary(scratch) || exists(at(names[i])));
	}
	run_free(&r);
}

/* Pipes, links and devices stay what they are, and the picture is written to them, or to the file that a link points
 * to. */
static void what_is_no_plain_file_stays_that(void **state)
{
	(void)state;
	struct run r = make_run(5, 1, 1, 0);
	struct stat st;
	const char *plain = at("plain.png"), *link = at("link.png"), *fifo = at("fifo"), *copy = at("copy.png");
	char command[2 * PATH_LEN + 16];
	assert_int_equal(symlink("plain.png", link), 0);
	for (int i = 0; i < 2; i++) { /* to nowhere, to a file */
		assert_int_equal(plot_runs(&r, 1, false, link), 0);
		assert_true(lstat(link, &st) == 0 && S_ISLNK(st.st_mode));
		assert_true(lstat(plain, &st) == 0 && S_ISREG(st.st_mode) && st.st_size > 1000);
		const off_t size = st.st_size;
		assert_int_equal(truncate(plain, 1), 0);
		assert_int_equal(plot_runs(&r, 1, false, plain), 0);
		assert_true(lstat(plain, &st) == 0 && st.st_size == size);
	}
	assert_int_equal(unlink(link), 0);
	assert_int_equal(mkfifo(fifo, 0600), 0);
	assert_int_equal(symlink("fifo", link), 0);
	snprintf(command, sizeof command, "cat %s > %s", fifo, copy);
	FILE *reader = popen(command, "r");
	assert_non_null(reader);
	assert_int_equal(plot_runs(&r, 1, false, link), 0);
	assert_int_equal(pclose(reader), 0);
	assert_true(lstat(link, &st) == 0 && S_ISLNK(st.st_mode));
	assert_true(lstat(fifo, &st) == 0 && S_ISFIFO(st.st_mode));
	const off_t size = lstat(plain, &st) == 0 ? st.st_size : 0;
	assert_true(lstat(copy, &st) == 0 && st.st_size == size);
	unlink(plain), unlink(link), unlink(fifo), unlink(copy);
	assert_int_equal(plot_runs(&r, 1, false, "/dev/null"), 0);
	assert_true(lstat("/dev/null", &st) == 0 && S_ISCHR(st.st_mode));
	run_free(&r);
}

/* The bytes of n characters of base64; returns how many. */
static size_t from_base64(uint8_t *out, const char *text, size_t n)
{
	static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
	size_t size = 0;
	assert_true(n % 4 == 0);
	for (size_t i = 0; i < n; i += 4) {
		uint32_t three = 0;
		for (int k = 0; k < 4; k++) {
			const char *digit = strchr(digits, text[i + k]);
			assert_true(digit || (text[i + k] == '=' && i + 4 == n && k > 1));
			three = three << 6 | (digit ? (uint32_t)(digit - digits) : 0);
		}
		for (int k = 0; k < 3; k++)
			if (k == 0 || text[i + k + 1] != '=')
				out[size++] = three >> (16 - 8 * k);
	}
	return size;
}

/* The heat map of an SVG file is an image within it, of one pixel for each pixel of the panel. */
static void an_svg_file_holds_the_heat_map(void **state)
{
	(void)state;
	static uint8_t png[100000], rgb[2000 * 1000 * 3];
	bool padded[3] = {0};
	for (int run = 0; run < 12; run++) { /* of several sizes modulo 3 */
		struct run r = make_run(100 + 7 * run, 3, 1, 0);
		for (int i = 0; i < r.count; i++)
			values(&r, "expert_load.0")[i] = i < r.count / 2 ? 1 : 2, values(&r, "expert_load.2")[i] = 6;
		const char *path = at("a.svg");
		size_t n;
		assert_int_equal(plot_runs(&r, 1, false, path), 0);
		char *svg = (char *)get_file(path, &n), *begin = strstr(svg, "base64,");
		assert_non_null(begin);
		begin += 7;
		const size_t length = strcspn(begin, "\""), size = from_base64(png, begin, length);
		padded[3 * length / 4 - size] = true;
		png_image image = {.version = PNG_IMAGE_VERSION};
		assert_true(png_image_begin_read_from_memory(&image, png, size));
		plot_layout(panels, 1, true);
		const struct box *b = &panels[PANEL_LOAD];
		assert_true(image.width == b->right - b->left && image.height == b->bottom - b->top);
		image.format = PNG_FORMAT_RGB;
		assert_true(png_image_finish_read(&image, NULL, rgb, 0, NULL));
		const struct { unsigned x, y; uint32_t colour; } cells[] = {
			{5, image.height - 5, heat_colour(0)}, {image.width - 5, image.height - 5, heat_colour(0.2)},
			{5, 5, heat_colour(1)},
		};
		for (int i = 0; i < COUNT(cells); i++)
			for (int k = 0; k < 3; k++)
				assert_int_equal(rgb[(cells[i].y * image.width + cells[i].x) * 3 + k],
						cells[i].colour >> (16 - 8 * k) & 255);
		assert_int_equal(unlink(path), 0);
		free(svg);
		run_free(&r);
	}
	assert_true(padded[0] && padded[1] && padded[2]);
}

/* A batch holds until the next step that has another: between two steps the line is at the height of the first. */
static void the_batch_is_drawn_as_stairs(void **state)
{
	(void)state;
	struct run r = make_run(3, 0, 1, 0);
	const double batches[] = {10, 10, 20};
	memcpy(values(&r, "batch"), batches, sizeof batches);
	draw(&r);
	const struct box *b = &panels[PANEL_SCHEDULE];
	const double low = b->bottom - (b->bottom - b->top) * 10 / 26; /* the axis ends at 1.3 times the largest */
	const double from = across(PANEL_SCHEDULE, 1.6 / 3), to = across(PANEL_SCHEDULE, 2.4 / 3); /* steps 2.1 to 2.9 */
	assert_true(count_colour(SECOND, from, low - 3, to, low + 3) > 50);
	assert_int_equal(count_colour(SECOND, from, b->top, to, low - 6), 0);
	run_free(&r);
}

/* By its name a picture is an SVG file: it is well-formed as far as its tags go, holds the lines' colours, and stays
 * small however many steps there are. */
static void a_name_makes_an_svg_file(void **state)
{
	(void)state;
	struct run r = make_run(100000, 2, 1, 5000);
	const char *path = at("a.svg");
	size_t n;
	strcpy(r.name, "a <&> \xe7\x81\xb5 \xff\n");
	assert_int_equal(plot_runs(&r, 1, false, path), 0);
	char *svg = (char *)get_file(path, &n);
	assert_true(n > 10000 && n < 3000000);
	assert_non_null(strstr(svg, "<svg "));
	assert_non_null(strstr(svg, "width=\"1400\""));
	assert_true(strcmp(svg + n - 7, "</svg>\n") == 0);
	assert_non_null(strstr(svg, "stroke=\"#0072b2\""));
	assert_non_null(strstr(svg, ">a &lt;&amp;&gt; \xe7\x81\xb5 \xef\xbf\xbd?: 100000 steps"));
	int depth = 0;
	for (char *tag = svg; (tag = strchr(tag, '<'));) {
		const char *end = strchr(tag, '>');
		assert_non_null(end);
		depth += tag[1] == '?' ? 0 : tag[1] == '/' ? -1 : end[-1] != '/';
		assert_true(depth >= 0);
		tag++;
	}
	assert_int_equal(depth, 0);
	free(svg);
	assert_int_equal(unlink(path), 0);
	run_free(&r);
}

/* A run whose losses fall from 1000 to 1 by equal ratios is a straight line on its log axis. */
static void a_log_axis_is_one_in_the_picture(void **state)
{
	(void)state;
	enum { N = 301 };
	struct run r = make_run(N, 0, 1, 0);
	for (int i = 0; i < N; i++)
		values(&r, "loss")[i] = pow(10, 3 - 3.0 * i / (N - 1));
	draw(&r);
	double mean[3];
	for (int part = 0; part < 3; part++) { /* the smoothed line at a quarter, the middle, three quarters */
		const int x = (int)across(PANEL_LOSS, (part + 1) / 4.0);
		double sum = 0, n = 0;
		for (int y = (int)panels[PANEL_LOSS].top + 2; y < panels[PANEL_LOSS].bottom - 2; y++)
			if (like(pixel(x, y), FIRST, 60))
				sum += y, n++;
		assert_true(n > 0);
		mean[part] = sum / n;
	}
	assert_true(fabs(mean[0] + mean[2] - 2 * mean[1]) < 3 && mean[2] - mean[0] > 150);
	run_free(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(every_character_is_drawn_and_is_unlike_the_others),
		cmocka_unit_test(text_stands_where_it_was_put),
		cmocka_unit_test(numbers_are_written_as_people_read_them),
		cmocka_unit_test(ticks_are_round_and_inside),
		cmocka_unit_test(values_stand_where_they_belong),
		cmocka_unit_test(ordinary_run_shows_all_its_lines),
		cmocka_unit_test(the_share_of_the_peak_and_the_clip_are_shown),
		cmocka_unit_test(odd_sizes_are_drawn),
		cmocka_unit_test(without_experts_their_panels_are_left_out),
		cmocka_unit_test(several_runs_have_a_colour_each),
		cmocka_unit_test(over_tokens_steps_are_as_wide_as_their_tokens),
		cmocka_unit_test(equal_values_make_separate_flat_lines),
		cmocka_unit_test(nonfinite_values_leave_a_gap_and_a_red_mark),
		cmocka_unit_test(extreme_losses_are_all_shown),
		cmocka_unit_test(heat_map_puts_layers_and_steps_where_they_belong),
		cmocka_unit_test(a_million_steps_keep_their_one_spike),
		cmocka_unit_test(a_long_name_fits),
		cmocka_unit_test(decisions_are_marked),
		cmocka_unit_test(what_cannot_be_written_is_said),
		cmocka_unit_test(what_is_no_plain_file_stays_that),
		cmocka_unit_test(a_name_makes_an_svg_file), cmocka_unit_test(an_svg_file_holds_the_heat_map),
		cmocka_unit_test(the_batch_is_drawn_as_stairs),
		cmocka_unit_test(a_log_axis_is_one_in_the_picture),
	};
	return cmocka_run_group_tests(tests, make_scratch, drop_empty_scratch);
}
