/* What the test programs share: cmocka, comparison of arrays by norm, and files in a scratch folder. */
#ifndef LING_TEST_H
#define LING_TEST_H

#include "files/base.h"

#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#undef fail /* cmocka has its own */
#include <cmocka.h>
#include <math.h>

/* Fails unless |found - expected| <= tolerance |expected|, by the L2 norms of the whole arrays; NaN never passes. */
static inline void assert_close(const real *found, const double *expected, int64_t n, double tolerance, const char *what)
{
	double difference = 0, norm = 0;
	for (int64_t i = 0; i < n; i++) {
		difference += (found[i] - expected[i]) * (found[i] - expected[i]);
		norm += expected[i] * expected[i];
	}
	if (!(sqrt(difference) <= tolerance * sqrt(norm)))
		fail_msg("%s: off by %g of its norm %g", what, sqrt(difference / norm), sqrt(norm));
}

static char scratch[32];       /* the test's own folder: make_scratch and drop_scratch are a setup and a teardown */

static inline int make_scratch(void **state)
{
	(void)state;
	strcpy(scratch, "/tmp/ling-test-XXXXXX");
	return mkdtemp(scratch) ? 0 : -1;
}

static inline int remove_tree(const char *path)
{
	char command[PATH_LEN + 8];
	snprintf(command, sizeof command, "rm -r %s", path);
	return system(command);
}

static inline int drop_scratch(void **state)
{
	(void)state;
	return remove_tree(scratch);
}

/* The path scratch/name; good until eight more were asked for. */
static inline char *at(const char *format, ...)
{
	static char paths[8][PATH_LEN];
	static int next;
	char *path = paths[next++ % 8];
	int n = snprintf(path, PATH_LEN, "%s/", scratch);
	va_list args;
	va_start(args, format);
	vsnprintf(path + n, PATH_LEN - n, format, args);
	va_end(args);
	return path;
}

/* Writes a file; both return its path. */
static inline const char *put_file(const char *path, const void *data, size_t n)
{
	FILE *f = fopen(path, "w");
	assert_non_null(f);
	assert_int_equal(fwrite(data, 1, n, f), n);
	assert_int_equal(fclose(f), 0);
	return path;
}

static inline const char *put_string(const char *path, const char *text)
{
	return put_file(path, text, strlen(text));
}

/* Whether a directory holds the temporary file of a struct new_file. */
static inline bool holds_temporary(const char *dir)
{
	bool found = false;
	DIR *d = opendir(dir);
	assert_non_null(d);
	for (struct dirent *e; (e = readdir(d));)
		found = found || strstr(e->d_name, ".tmp-");
	closedir(d);
	return found;
}

/* The error must be there and hold every part, parts separated by '|'. */
static inline void expect_error(const char *parts)
{
	char copy[512], *rest = copy;
	snprintf(copy, sizeof copy, "%s", parts);
	for (char *part; (part = strsep(&rest, "|"));)
		if (!strstr(error_text, part))
			fail_msg("the error is `%s`; expected `%s` in it", error_text, part);
	error_text[0] = 0;
}

/* Lets no file grow beyond so many bytes: a full disk. */
static inline void limit_files(rlim_t bytes)
{
	struct rlimit limit;
	signal(SIGXFSZ, SIG_IGN);
	assert_int_equal(getrlimit(RLIMIT_FSIZE, &limit), 0);
	limit.rlim_cur = bytes;
	assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

#endif
