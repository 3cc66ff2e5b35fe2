/*
 * model/weights.c - the weights of a model: random, or from files, where evaluation uses them in place; and what
 * follows from them.
 */
#define _GNU_SOURCE
#include "model/weights.h"

#include "files/base.h"
#include "files/trace.h"
#include "kernels.h"
#include "parallel.h"
#include "files/tensors.h"
#include "model/memory.h"
#include "model/parameters.h"
#include "model/weight_files.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

void model_update_head_scale(struct model *m)
{
	if (!m->head_scale)
		return;
	const int64_t H = m->config.hidden_size;
	double *norm = m->acts.head_norm;
	trace_begin(OP_HEAD_NORM, PASS_FORWARD, -1, (double)H * m->config.vocab_size * sizeof(real));
	parallel_progress();
	/* n_j = sqrt of the sum over v of W[v, j]^2. The tensor group splits the vocabulary, and the sum is over all of
	 * it. */
	column_sum_of_squares(norm, &m->lm_head, m->config.vocab_size, H);
	all_reduce_sum(&m->layout.tensor, TRAFFIC_HEAD, norm, H);
	for (int64_t j = 0; j < H; j++)
		m->head_scale[j] = (real)(1 / (sqrt(norm[j]) + 1e-7));
}

/* The stream of random numbers of a tensor: keyed by its name (FNV-1a), so that no layout of ranks changes it. */
static struct random_stream parameter_stream(const struct parameter *t, uint64_t seed)
{
	uint64_t hash = 0xcbf29ce484222325u;
	for (const char *c = t->name; *c; c++)
		hash = (hash ^ (uint8_t)*c) * 0x100000001b3u;
	return (struct random_stream){.seed = seed, .purpose = RANDOM_INIT + (hash >> 32 & 0xffff),
			.step = (uint32_t)hash};
}

void model_randomize(struct model *m, uint64_t seed)
{
	const double bound = 1 / sqrt(m->config.hidden_size);
	for (int i = 0; i < m->table.num_parameters; i++) {
		const struct parameter *t = &m->table.parameters[i];
		const struct random_stream stream = parameter_stream(t, seed);
		const int64_t n = t->shard.num_cols;
		real *w = m->params.memory + t->offset;
		#pragma omp parallel for
		for (int64_t r = 0; r < parameter_size(t) / n; r++) {
			const int64_t at = global_row(&t->shard, r) * (t->cols ? t->cols : 1) + t->shard.col;
			real *row = w + r * n;
			if (t->init == INIT_NORMAL)
				random_normal(row, n, &stream, at);
			else if (t->init == INIT_ROUTER)
				random_uniform(row, n, &stream, at);
			for (int64_t j = 0; j < n; j++)
				row[j] = t->init == INIT_NORMAL ? (real)(row[j] * m->config.initializer_range)
						: t->init == INIT_ROUTER ? (real)((2 * row[j] - 1) * bound) : t->init == INIT_ONES;
		}
	}
	model_update_head_scale(m);
}

static real next_real(real x, double towards)
{
	return sizeof x == sizeof(double) ? (real)nextafter(x, towards) : (real)nextafterf((float)x, (float)towards);
}

void model_perturb(struct model *m, uint64_t key)
{
	for (int i = 0; i < m->table.num_parameters; i++) {
		const struct parameter *t = &m->table.parameters[i];
		if (has_suffix(t->name, EXPERT_BIAS))
			continue;
		struct random_stream stream = parameter_stream(t, key);
		const int64_t n = t->shard.num_cols;
		stream.purpose += RANDOM_PERTURB - RANDOM_INIT;
		#pragma omp parallel for
		for (int64_t r = 0; r < parameter_size(t) / n; r++) {
			const int64_t at = global_row(&t->shard, r) * (t->cols ? t->cols : 1) + t->shard.col;
			real *row = m->params.memory + t->offset + r * n, x;
			for (int64_t j = 0; j < n; j++) {
				random_uniform(&x, 1, &stream, at + j);
				row[j] = next_real(row[j], x < (real)0.5 ? -INFINITY : INFINITY);
			}
		}
	}
	model_update_head_scale(m);
}

int find_mapped(struct parameter_table *table, const struct tensors *w, enum dtype dtype, struct weight_bytes *bytes)
{
	*bytes = (struct weight_bytes){0};
	for (int i = 0; i < table->num_parameters; i++) {
		struct parameter *t = &table->parameters[i];
		int64_t first;
		t->mapped = NULL;
		if (!t->cols || global_run(t, 0, parameter_size(t), &first) < parameter_size(t))
			continue;
		if (!w && (dtype == BF16 || dtype == REAL_DTYPE))
			t->mapped = t, t->bf16 = dtype == BF16; /* until the bytes are counted */
		else if (w && tensors_map_range(w, t->name, t->rows, t->cols, first, parameter_size(t), &t->mapped,
				&t->bf16) < 0)
			return -1;
	}
	for (int i = 0; i < table->num_parameters; i++) {
		struct parameter *t = &table->parameters[i];
		if (strstr(t->name, ".gate_proj.") && (!t[0].mapped || !t[1].mapped || t[0].bf16 != t[1].bf16))
			t[0].mapped = t[1].mapped = NULL;
		if (t->mapped)
			bytes->mapped += parameter_size(t) * (t->bf16 ? sizeof(uint16_t) : sizeof(real));
		else
			bytes->copied += parameter_size(t) * sizeof(real);
		t->mapped = w ? t->mapped : NULL;
	}
	return 0;
}

/* Finds the matrices that can be used in the mapped files. Memory must suffice for the others. */
static int map_parameters(struct model *m, const struct tensors *w, const char *dir)
{
	struct weight_bytes bytes;
	if (find_mapped(&m->table, w, REAL_DTYPE, &bytes) < 0)
		return -1;
	const double copied = bytes.copied;
	const double machine = usable_memory("") / parallel_local_ranks(), total = copied + m->acts_bytes;
	if (total > machine)
		return fail("%s: weights that cannot be used as they stand in the file need %.1f GB, activations %.1f GB; "
				"%.1f GB may be used here: bring them to bfloat16 with ling convert-checkpoint, or make the windows "
				"shorter", dir, copied / 1e9, m->acts_bytes / 1e9, machine / 1e9);
	/* Scattered norms would take a whole huge page each. */
	madvise(m->params.memory, m->reserved_bytes, copied > m->reserved_bytes / 2 ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
	return 0;
}

/* Fails when what this rank holds of a parameter has a NaN or infinity, and names it. */
static int check_finite(const struct model *m, const struct parameter *t, const char *dir)
{
	const real *x = m->params.memory + t->offset;
	const int64_t n = parameter_size(t);
	if (isfinite(sum_of_squares(x, n))) /* in double: no sum of squares of float numbers overflows */
		return 0;
	for (int64_t i = 0, first; i < n; i++)
		if (!isfinite(x[i])) {
			global_run(t, i, i + 1, &first);
			return fail("%s: tensor %s has %g at row %lld, column %lld; expected finite numbers: take the weights of "
					"an earlier checkpoint, or the original files again", dir,
					t->name, plain_nan(x[i]), (long long)(t->cols ? first / t->cols : first),
					(long long)(t->cols ? first % t->cols : 0));
		}
	return 0;
}

/* Fails when a parameter is an expert bias that the model must not use, and has other numbers than 0. */
static int check_unused_bias(const struct model *m, const struct parameter *t, const char *dir)
{
	const real *bias = m->params.memory + t->offset;
	const bool unused = has_suffix(t->name, EXPERT_BIAS) && !m->global.moe_router_enable_expert_bias;
	for (int64_t e = 0; e < parameter_size(t) && unused; e++)
		if (bias[e] != 0)
			return fail("%s: tensor %s has %g for expert %lld, but moe_router_enable_expert_bias is false; expected "
					"zeros, or true: the model was trained with this bias", dir, t->name, plain_nan(bias[e]),
					(long long)e);
	return 0;
}

/* Reads what this rank holds of a parameter that is not used in its file. */
static int read_copied(struct tensors *w, const struct parameter *t, real *out)
{
	const int rc = read_weights(w, t, out);
	if (rc == 0)
		tensor_release(tensor_find(w, t->name));
	return rc;
}

int load_weights(struct model *m, const char *dir, enum verify verify)
{
	const bool map = m->mode == EVALUATE;
	struct tensors *w = open_weights(&m->table, &m->global, dir, verify);
	int rc = w ? 0 : -1;
	if (rc == 0 && map)
		rc = map_parameters(m, w, dir);
	for (int i = 0; i < m->table.num_parameters && rc == 0; i++)
		if (!m->table.parameters[i].mapped)
			rc = read_copied(w, &m->table.parameters[i], m->params.memory + m->table.parameters[i].offset);
	for (int i = 0; i < m->table.num_parameters && rc == 0; i++)
		if (!map || has_suffix(m->table.parameters[i].name, EXPERT_BIAS)) /* losses would not show that it is NaN */
			rc = check_finite(m, &m->table.parameters[i], dir);
	for (int i = 0; i < m->table.num_parameters && rc == 0; i++)
		rc = check_unused_bias(m, &m->table.parameters[i], dir);
	tensors_close(map ? m->files : w); /* those of an earlier load, or these */
	m->files = map ? w : NULL;
	rc = parallel_agree(rc);
	if (rc == 0) {
		place_weights(m);
		model_update_head_scale(m);
	}
	return rc;
}

int model_load(struct model *m, const char *dir)
{
	return load_weights(m, dir, m->mode == EVALUATE ? VERIFY_IF_IN_MEMORY : VERIFY);
}
