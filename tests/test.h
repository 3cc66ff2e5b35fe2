/* What the test programs share: cmocka, comparison of numbers, and files in a folder that each test has for itself. */
#ifndef LING_TEST_H
#define LING_TEST_H

#include "files/base.h"
#include "files/checkpoint.h"
#include "files/safetensors.h"

#include <dirent.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>

#undef fail /* cmocka has its own */
#include <cmocka.h>
#include <jansson.h>
#include <math.h>

#define COUNT(array) ((int)(sizeof(array) / sizeof *(array)))

/* The fields of a struct model_config in which 0 is not what most models have: the whole head turns, the routed
 * experts' sum is taken as it is, and experts are in no groups. */
#define MODEL_DEFAULTS .partial_rotary_factor = 1, .routed_scaling_factor = 1, .n_group = 1, .topk_group = 1

/* A test with a folder of its own. */
#define TEST(name) cmocka_unit_test_setup_teardown(name, make_scratch, drop_scratch)

/* Fails unless both have the same bits, or are NaN. */
static inline void assert_same(double a, double b)
{
	if (memcmp(&a, &b, sizeof a) && !(isnan(a) && isnan(b)))
		fail_msg("%.17g is not %.17g", a, b);
}

/* Fails unless |found - expected| <= tolerance |expected|, by the L2 norms of the whole arrays; NaN never passes. */
static inline void assert_close(const real *found, const double *expected, int64_t n, double tolerance,
		const char *what)
{
	double difference = 0, norm = 0;
	for (int64_t i = 0; i < n; i++) {
		difference += (found[i] - expected[i]) * (found[i] - expected[i]);
		norm += expected[i] * expected[i];
	}
	if (!(sqrt(difference) <= tolerance * sqrt(norm)))
		fail_msg("%s: off by %g of its norm %g", what, sqrt(difference / norm), sqrt(norm));
}

static char scratch[32]; /* the folder of the test that runs; see TEST */

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

/* The bytes of a file, and a 0 behind them; *n is their number. The caller frees them. */
static inline uint8_t *get_file(const char *path, size_t *n)
{
	FILE *f = fopen(path, "r");
	struct stat st;
	assert_non_null(f);
	assert_int_equal(fstat(fileno(f), &st), 0);
	uint8_t *data = allocate(st.st_size + 1);
	*n = fread(data, 1, st.st_size, f);
	assert_int_equal(*n, st.st_size);
	assert_int_equal(fclose(f), 0);
	return data;
}

/* Whether there is something of that name, be it a link to nowhere. */
static inline bool exists(const char *path)
{
	struct stat st;
	return lstat(path, &st) == 0;
}

/* A copy of a JSON object in which `key` has the first element of `value`, an array as text; "[]" removes the key. */
static inline json_t *json_changed(const json_t *object, const char *key, const char *value)
{
	json_t *copy = json_deep_copy(object), *array = json_loads(value, 0, NULL);
	assert_true(json_is_array(array));
	if (json_array_size(array))
		json_object_set(copy, key, json_array_get(array, 0));
	else
		json_object_del(copy, key);
	json_decref(array);
	return copy;
}

/* Opens a file or directory of tensors and reads each, of at most 64 elements: 0, or -1 with error_text set. */
static inline int read_everything(const char *path, const char *stem)
{
	struct tensors *w = tensors_open(path, stem);
	int rc = w ? 0 : -1;
	for (int i = 0; !rc && i < tensors_count(w); i++) {
		real out[64];
		const struct tensor *t = tensor_find(w, tensors_name(w, i));
		struct named_tensor a = {t->name, t->shape[0], 0, out};
		if (t->num_dims == 2)
			a.cols = t->shape[1];
		rc = t->end - t->begin > sizeof out ? -1 : tensors_read(w, &a);
	}
	tensors_close(w);
	return rc;
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

/* What a run that starts does to find its newest checkpoint: see checkpoint_newest. */
static inline int find_newest(const char *output_dir, char path[PATH_LEN])
{
	return checkpoint_clean(output_dir) < 0 ? -1 : checkpoint_newest(output_dir, path);
}

#endif
