/*
 * compare_checkpoints.c - what test_parallel.sh asks of checkpoints. Exit status 1 when they differ.
 *
 *   compare_checkpoints model|optimizer PREFIX A B TOLERANCE
 *       every tensor whose name begins with PREFIX, by norm: prints the worst, and fails beyond the tolerance
 *   compare_checkpoints dump PREFIX A B TOLERANCE
 *       the same of two dumps, whose tensors must also be in the same order; integers must be equal
 *   compare_checkpoints constant SRC DST     SRC's model with every weight of expert e set to e
 *   compare_checkpoints first SRC DST        SRC's model with a router that sends all tokens to the first experts
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "files/tensors.h"
#include "files/safetensors.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <math.h>

static int64_t elements(const struct tensor *t, int64_t *rows, int64_t *cols)
{
	*rows = t->shape[0];
	*cols = t->num_dims > 1 ? t->shape[1] : 0;
	return *rows * (*cols ? *cols : 1);
}

static real *read_tensor(const struct tensors *w, const struct tensor *t, int64_t n, int64_t rows, int64_t cols)
{
	real *x = malloc(n * sizeof *x);
	if (!x || tensors_read(w, &(struct named_tensor){t->name, rows, cols, x}) < 0) {
		fprintf(stderr, "%s\n", error_text);
		exit(1);
	}
	return x;
}

/* Any number of dimensions, integers too. */
static double *numbers(const struct tensor *t, int64_t *n)
{
	*n = 1;
	for (int i = 0; i < t->num_dims; i++)
		*n *= t->shape[i];
	double *x = malloc((*n + 1) * sizeof *x);
	real *r = malloc((*n + 1) * sizeof *r);
	if (t->dtype != I32)
		to_real(r, tensor_bytes(t), *n, t->dtype);
	for (int64_t i = 0; i < *n; i++)
		x[i] = t->dtype == I32 ? load_i32(tensor_bytes(t) + 4 * i) : (double)r[i];
	free(r);
	return x;
}

/* The largest difference of two tensors, relative to the norm; what is not finite must be so in both. */
static double dump_difference(const struct tensor *s, const struct tensor *t)
{
	int64_t n, other;
	double difference = 0, norm = 0, *x = numbers(s, &n), *y = numbers(t, &other);
	if (strcmp(s->name, t->name) || s->dtype != t->dtype || s->begin != t->begin || s->end != t->end ||
			!has_shape(s, t->shape, t->num_dims)) {
		printf("%s at %llu and %s at %llu\n", s->name, (unsigned long long)s->begin, t->name,
				(unsigned long long)t->begin);
		exit(1);
	}
	for (int64_t j = 0; j < n; j++) {
		if (isfinite(x[j]) && isfinite(y[j])) {
			difference += (x[j] - y[j]) * (x[j] - y[j]);
			norm += x[j] * x[j];
		} else if (memcmp(&x[j], &y[j], sizeof *x) && !(isnan(x[j]) && isnan(y[j])))
			difference = INFINITY;
	}
	free(x), free(y);
	return s->dtype == I32 ? (difference ? INFINITY : 0) : sqrt(difference) < 1e-20 ? 0 : sqrt(difference / norm);
}

static int compare_dumps(const struct tensors *a, const struct tensors *b, const char *prefix, double tolerance)
{
	double worst = 0;
	const char *where = "nothing";
	int compared = 0;
	if (a->count != b->count)
		return printf("%d and %d tensors\n", a->count, b->count), 1;
	for (int i = 0; i < a->count; i++) {
		const double difference = dump_difference(&a->tensors[i], &b->tensors[i]);
		if (strncmp(a->tensors[i].name, prefix, strlen(prefix)))
			continue;
		if (!(difference <= worst))
			worst = difference, where = a->tensors[i].name;
		if (!(difference <= tolerance))
			printf("%s: %g\n", a->tensors[i].name, difference);
		compared++;
	}
	printf("%d tensors, worst %g at %s\n", compared, worst, where);
	return compared == 0 || !(worst <= tolerance);
}

static int compare(const struct tensors *a, const struct tensors *b, const char *prefix, double tolerance)
{
	double worst = 0;
	const char *where = "nothing";
	int compared = 0;
	if (a->count != b->count)
		return printf("%d and %d tensors\n", a->count, b->count), 1;
	for (int i = 0; i < a->count; i++) {
		const struct tensor *t = &a->tensors[i];
		int64_t rows, cols, n = elements(t, &rows, &cols);
		if (strncmp(t->name, prefix, strlen(prefix)))
			continue;
		real *x = read_tensor(a, t, n, rows, cols), *y = read_tensor(b, t, n, rows, cols);
		double difference = 0, norm = 0;
		for (int64_t j = 0; j < n; j++) {
			difference += ((double)x[j] - y[j]) * ((double)x[j] - y[j]);
			norm += (double)x[j] * x[j];
		}
		/* Beneath float's reach nothing is asked: an update of 1e-30 is there in a weight that is 0. */
		const double relative = sqrt(difference) < 1e-20 ? 0 : sqrt(difference / norm);
		if (!(relative <= worst))
			worst = relative, where = t->name;
		compared++;
		free(x), free(y);
	}
	printf("%d tensors, worst %g at %s\n", compared, worst, where);
	return compared == 0 || !(worst <= tolerance);
}

/* Changes tensor t in place. */
static void change(const char *what, const char *name, real *x, int64_t n, int64_t cols)
{
	const char *expert = strstr(name, "mlp.experts.");
	const bool constant = !strcmp(what, "constant");
	for (int64_t i = 0; i < n && constant && expert; i++)
		x[i] = (real)atoi(expert + strlen("mlp.experts."));
	/* The first feature is large and positive in every token; the first expert's router row likes it, the others' do
	 * not, and are equal, so that the lowest of them follow. */
	if (!constant && strstr(name, "word_embeddings"))
		for (int64_t i = 0; i < n; i += cols)
			x[i] = 20;
	if (!constant && strstr(name, "mlp.gate.weight"))
		for (int64_t i = 0; i < n; i++)
			x[i] = i == 0 ? 1 : i % cols == 0 ? -1 : 0;
}

int main(int argc, char **argv)
{
	struct tensors *a = NULL, *b = NULL;
	if (argc == 6) {
		a = tensors_open(argv[3], argv[1]);
		b = a ? tensors_open(argv[4], argv[1]) : NULL;
		if (b)
			return (strcmp(argv[1], "dump") ? compare : compare_dumps)(a, b, argv[2], atof(argv[5]));
	} else if (argc == 4 && (a = tensors_open(argv[2], "model"))) {
		struct named_tensor *arrays = calloc(a->count, sizeof *arrays);
		char path[PATH_LEN];
		for (int i = 0; i < a->count; i++) {
			int64_t rows, cols, n = elements(&a->tensors[i], &rows, &cols);
			arrays[i] = (struct named_tensor){a->tensors[i].name, rows, cols, read_tensor(a, &a->tensors[i], n, rows,
					cols)};
			change(argv[1], arrays[i].name, arrays[i].data, n, cols);
		}
		snprintf(path, sizeof path, "%s/model.safetensors", argv[3]);
		if (safetensors_write(path, arrays, a->count) == 0)
			return 0;
	}
	fprintf(stderr, "compare_checkpoints: %s\n", *error_text ? error_text : "wrong use");
	return 1;
}
