/*
 * tests/test_follow.c - following a file that grows, is cut, and is written by another program meanwhile.
 */
#define _GNU_SOURCE
#include "commands/follow.h"
#include "files/base.h"
#include "tests/test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* What the follower was told: the "n" of each line that is there. */
static int64_t seen[4096];
static size_t num_seen, added, cuts;

static int add(void *context, const json_t *line)
{
	int64_t n;
	const struct follow *f = context;
	if (field_int(line, "line", "n", 0, 1 << 20, &n) < 0)
		return -1;
	assert_int_equal(f->count, num_seen);
	seen[num_seen++] = n;
	added++;
	return 0;
}

static void cut(void *context, size_t count, size_t before)
{
	(void)context;
	assert_int_equal(before, num_seen);
	assert_true(count < before);
	num_seen = count;
	cuts++;
}

static struct follow f;

static void begin(void)
{
	f = (struct follow){.add = add, .cut = cut, .context = &f};
	snprintf(f.path, sizeof f.path, "%s/lines.jsonl", scratch);
	num_seen = added = cuts = 0;
}

/* Appends a text to the file. */
static void write_text(const char *text)
{
	FILE *file = fopen(f.path, "a");
	assert_non_null(file);
	fputs(text, file);
	fclose(file);
}

/* Appends lines with the numbers first .. last; `more` makes them longer. */
static void write_lines(int first, int last, const char *more)
{
	char line[256];
	for (int n = first; n <= last; n++) {
		snprintf(line, sizeof line, "{\"n\": %d, \"more\": \"%s\"}\n", n, more);
		write_text(line);
	}
}

static void expect_seen(int result, size_t count, int64_t last)
{
	assert_int_equal(follow_look(&f), result);
	assert_int_equal(num_seen, count);
	if (count)
		assert_int_equal(seen[count - 1], last);
}

static void grows(void **state)
{
	(void)state;
	begin();
	expect_seen(0, 0, 0);
	assert_false(f.there);
	write_lines(1, 3, "");
	expect_seen(1, 3, 3);
	assert_true(f.there);
	expect_seen(0, 3, 3);
	write_text("{\"n\": 4, "); /* half a line */
	expect_seen(0, 3, 3);
	write_text("\"more\": 1}");
	expect_seen(0, 3, 3); /* its end is still to come */
	write_text("\n{\"n\": 5}\n{");
	expect_seen(1, 5, 5);
	assert_int_equal(added, 5); /* each once */
	assert_int_equal(cuts, 0);
	follow_free(&f);
}

/* Lines that are longer than what is read at once, and many of them. */
static void long_lines(void **state)
{
	(void)state;
	begin();
	char *text = malloc(3 << 20);
	memset(text, 'x', 3 << 20);
	memcpy(text, "{\"n\": 1, \"more\": \"", 18);
	strcpy(text + (3 << 20) - 4, "\"}\n");
	write_text(text);
	expect_seen(1, 1, 1);
	write_lines(2, 3000, "some bytes more, so that the lines do not end where a read does");
	expect_seen(1, 3000, 3000);
	write_text(text);
	write_lines(2, 2, "");
	expect_seen(1, 3002, 2);
	assert_int_equal(added, 3002);
	free(text);
	follow_free(&f);
}

/* A run that continues from a checkpoint cuts the file, and writes the same steps again: other lines, which may be as
 * long as the old ones, so that the file is as long as it was, or longer. */
static void is_cut(void **state)
{
	(void)state;
	begin();
	write_lines(1, 100, "old");
	expect_seen(1, 100, 100);
	assert_int_equal(truncate(f.path, f.lines[59].end), 0);
	expect_seen(1, 60, 60);
	assert_int_equal(added, 100);
	write_lines(61, 100, "old"); /* the same again */
	expect_seen(1, 100, 100);
	assert_int_equal(added, 140);
	assert_int_equal(truncate(f.path, f.lines[59].end), 0);
	write_lines(61, 130, "new"); /* between two looks */
	expect_seen(1, 130, 130);
	assert_int_equal(added, 140 + 70);
	assert_int_equal(cuts, 2);
	assert_int_equal(truncate(f.path, f.lines[59].end + 3), 0); /* within a line */
	expect_seen(1, 60, 60);
	write_text("");
	assert_int_equal(truncate(f.path, 0), 0);
	expect_seen(1, 0, 0);
	write_lines(1, 2, "");
	expect_seen(1, 2, 2);
	unlink(f.path);
	expect_seen(1, 0, 0);
	assert_int_equal(cuts, 5);
	follow_free(&f);
}

/* Another file with the same name, of which the begin is the same: as when the last line gets its validation loss. */
static void is_replaced(void **state)
{
	char other[64];
	(void)state;
	begin();
	write_lines(1, 50, "");
	expect_seen(1, 50, 50);
	snprintf(other, sizeof other, "%s/other", scratch);
	assert_int_equal(rename(f.path, other), 0);
	write_lines(1, 49, "");
	write_lines(70, 70, "");
	expect_seen(1, 50, 70);
	assert_int_equal(added, 51);
	follow_free(&f);
}

/* A line that is no JSON, or that is refused: the lines before it are there, and it is tried again. */
static void bad_lines(void **state)
{
	(void)state;
	begin();
	write_lines(1, 2, "");
	write_text("{\"n\": 3\n");
	write_lines(4, 4, "");
	expect_seen(-1, 2, 2);
	assert_non_null(strstr(error_text, "lines.jsonl:3: bad JSON"));
	expect_seen(-1, 2, 2);
	assert_int_equal(truncate(f.path, f.lines[1].end), 0);
	write_text("{\"n\": true}\n");
	expect_seen(-1, 2, 2);
	assert_non_null(strstr(error_text, "`n` is"));
	assert_int_equal(truncate(f.path, f.lines[1].end), 0);
	write_lines(3, 3, "");
	expect_seen(1, 3, 3);
	follow_free(&f);
}

/* A line without an end is not read for ever. */
static void endless_line(void **state)
{
	(void)state;
	begin();
	write_text("{\"n\": 1}\n");
	assert_int_equal(truncate(f.path, 100 << 20), 0); /* zeros */
	expect_seen(-1, 1, 1);
	assert_non_null(strstr(error_text, "lines.jsonl:2: is longer than 64 MB"));
	follow_free(&f);
}

int main(void)
{
	const struct CMUnitTest tests[] = {TEST(grows), TEST(long_lines), TEST(is_cut), TEST(is_replaced),
		TEST(bad_lines), TEST(endless_line)};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
