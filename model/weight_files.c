/*
 * model/weight_files.c - weights and moments in safetensors files. A file has whole tensors, a rank shards of them.
 */
#include "model/weight_files.h"

#include "files/base.h"
#include "parallel.h"
#include "files/tensors.h"
#include "files/safetensors.h"
#include "files/checkpoint.h"
#include "model/parameters.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const moment_prefixes[2] = {"exp_avg.", "exp_avg_sq."};

/* Opens the files of one kind. They must hold a tensor named prefix + NAME for each parameter of the whole model and
 * each of the prefixes, and no others. */
static struct tensors *open_files(const struct parameter_table *table, const struct model_config *c, const char *dir,
		const char *kind, int num_prefixes, const char *const *prefixes, enum verify verify)
{
	const struct group *world = &table->layout.world;
	int n, rc = 0;
	struct parameter *global = global_parameters(c, &n);
	struct tensors *w = global ? tensors_open(dir, kind) : NULL;
	char name[MAX_NAME + 16];
	if (!w) {
		free(global);
		return NULL;
	}
	for (int p = 0; p < num_prefixes; p++)
		for (int i = 0; i < n && rc == 0; i++) {
			snprintf(name, sizeof name, "%s%s", prefixes[p], global[i].name);
			if (!tensors_has(w, name))
				rc = fail("%s: tensor %s is missing", dir, name);
		}
	if (rc == 0 && tensors_count(w) != num_prefixes * n) {
		/* All expected tensors are there, so there are more: names one. The search is slow, but only made to report
		 * an error. */
		for (int i = 0; i < tensors_count(w) && rc == 0; i++) {
			bool known = false;
			for (int j = 0; j < num_prefixes * n && !known; j++) {
				snprintf(name, sizeof name, "%s%s", prefixes[j / n], global[j % n].name);
				known = !strcmp(name, tensors_name(w, i));
			}
			if (!known)
				rc = fail("%s: tensor %s is not a part of the model that config.json describes", dir,
						tensors_name(w, i));
		}
	}
	const bool fits = tensors_bytes(w) <= usable_memory("");
	if (!fits && verify == VERIFY_IF_IN_MEMORY && world->rank == 0)
		fprintf(stderr, "note: %s is larger than the memory that may be used here: what is read in place is not "
				"checked against its checksums first\n", dir);
	const int num_verified = verify == VERIFY || (verify == VERIFY_IF_IN_MEMORY && fits) ? tensors_count(w) : 0;
	for (int i = world->rank; i < num_verified && rc == 0; i += world->size)
		rc = tensor_verify(&w->tensors[i]);
	free(global);
	if (rc < 0) {
		tensors_close(w);
		w = NULL;
	}
	return w;
}

struct tensors *open_weights(const struct parameter_table *table, const struct model_config *c, const char *dir,
		enum verify verify)
{
	return open_files(table, c, dir, "model", 1, (const char *[]){""}, verify);
}

/* Reads elements from .. end of what this rank holds of a parameter, whose tensor has the given prefix. */
static int read_shard(struct tensors *w, const char *prefix, const struct parameter *t, int64_t from, int64_t end,
		real *out)
{
	char name[MAX_NAME + 16];
	int rc = 0;
	snprintf(name, sizeof name, "%s%s", prefix, t->name);
	for (int64_t at = from, n, first; at < end && rc == 0; at += n) {
		n = global_run(t, at, end, &first);
		rc = tensors_read_range(w, name, t->rows, t->cols, first, n, out + at - from);
	}
	return rc;
}

int read_weights(struct tensors *w, const struct parameter *t, real *out)
{
	return read_shard(w, "", t, 0, parameter_size(t), out);
}

int verify_weight_files(const struct parameter_table *table, const struct model_config *c, const char *dir)
{
	struct tensors *weights = open_weights(table, c, dir, VERIFY), *moments = weights ? open_files(table, c, dir,
			"optimizer", 2, moment_prefixes, VERIFY) : NULL;
	const int rc = moments ? 0 : -1;
	tensors_close(moments);
	tensors_close(weights);
	return parallel_agree(rc);
}

int load_moments(const struct parameter_table *table, const struct model_config *c, const char *dir, real *exp_avg,
		real *exp_avg_sq)
{
	struct tensors *w = open_files(table, c, dir, "optimizer", 2, moment_prefixes, DO_NOT_VERIFY);
	int rc = w ? 0 : -1;
	struct optimizer_shard p;
	for (struct optimizer_shard_iterator walk = {0}; rc == 0 && next_optimizer_shard(table, &walk, &p);) {
		rc = read_shard(w, moment_prefixes[0], p.parameter, p.from, p.end, exp_avg + p.state);
		if (rc == 0)
			rc = read_shard(w, moment_prefixes[1], p.parameter, p.from, p.end, exp_avg_sq + p.state);
	}
	tensors_close(w);
	return parallel_agree(rc);
}

/* ============================================================================================================
 * Which rank writes which tensor: largest first, each to the host that has least to write so far, and there to the rank
 * that has least. That is longest processing time first (Graham 1969), at two levels; PCache (arXiv:2503.05139, section
 * 3.4) asks for the balance.
 * ========================================================================================================== */

/* A comparison for qsort: the larger parameter first; of equal ones, all ranks' first experts before their second ones,
 * so that the holders come in turn, and then in the order of the model. */
struct turn { int64_t size; int expert, number; };
static int compare_turns(const void *a, const void *b)
{
	const struct turn *x = a, *y = b;
	if (x->size != y->size)
		return x->size > y->size ? -1 : 1;
	if (x->expert != y->expert)
		return x->expert < y->expert ? -1 : 1;
	return x->number < y->number ? -1 : x->number > y->number;
}

/* The bytes of a parameter in a checkpoint, its moments included. */
static int64_t saved_bytes(const struct parameter *t)
{
	return 3 * parameter_size(t) * (int64_t)sizeof(real);
}

int assign_writers(int *writer, int64_t *bytes, const struct parameter *global, int n, int num_experts,
		int expert_ranks, int ranks, const int *host)
{
	struct turn *turns = calloc(n, sizeof *turns);
	int64_t *host_bytes = calloc(ranks, sizeof *host_bytes);
	if (!turns || !host_bytes) {
		free(turns);
		free(host_bytes);
		return fail("out of memory for the order of %d tensors", n);
	}
	const int own_experts = num_experts ? num_experts / expert_ranks : 1;
	memset(bytes, 0, ranks * sizeof *bytes);
	for (int i = 0; i < n; i++)
		turns[i] = (struct turn){parameter_size(&global[i]), global[i].sharing == SHARED_BY_EXPERT_DATA
				? global[i].expert % own_experts : 0, i};
	qsort(turns, n, sizeof *turns, compare_turns);
	for (int i = 0; i < n; i++) {
		const struct parameter *t = &global[turns[i].number];
		const bool is_expert = t->sharing == SHARED_BY_EXPERT_DATA;
		int best = 0;
		for (int r = 1; r < ranks; r++) {
			/* Among equals a rank that holds the expert: it sends less. */
			const bool holds = is_expert && r % expert_ranks == t->expert / own_experts,
					best_holds = is_expert && best % expert_ranks == t->expert / own_experts;
			const int64_t more = host_bytes[host[r]] != host_bytes[host[best]] ?
					host_bytes[host[r]] - host_bytes[host[best]] : bytes[r] - bytes[best];
			if (more < 0 || (more == 0 && holds && !best_holds))
				best = r;
		}
		writer[turns[i].number] = best;
		bytes[best] += saved_bytes(t);
		host_bytes[host[best]] += saved_bytes(t);
	}
	free(turns);
	free(host_bytes);
	return 0;
}

int weight_writer_init(struct weight_writer *w, const struct parameter_table *table, const struct model_config *c,
		const int *host)
{
	const struct group *world = &table->layout.world;
	*w = (struct weight_writer){.table = table, .fault = {.after = INT64_MAX}};
	w->global = global_parameters(c, &w->n);
	w->writer = calloc(w->n, sizeof *w->writer);
	int64_t *bytes = calloc(world->size, sizeof *bytes);
	int rc = w->global && w->writer && bytes ? 0 : fail("out of memory for the list of the tensors");
	if (rc == 0)
		rc = assign_writers(w->writer, bytes, w->global, w->n, c->num_experts, table->layout.expert.size, world->size,
				host);
	for (int i = 0; i < w->n && rc == 0; i++) {
		w->bytes += saved_bytes(&w->global[i]);
		w->file_bytes += saved_bytes(&w->global[i]) + 3 * TENSOR_HEADER;
		if (w->writer[i] != world->rank)
			continue;
		const int64_t size = parameter_size(&w->global[i]);
		w->elements += size;
		w->largest = size > w->largest ? size : w->largest;
		w->num_own++;
	}
	for (int r = 0; r < world->size && rc == 0; r++) {
		w->least = r == 0 || bytes[r] < w->least ? bytes[r] : w->least;
		w->most = bytes[r] > w->most ? bytes[r] : w->most;
	}
	free(bytes);
	if (rc < 0)
		weight_writer_free(w);
	return rc;
}

void weight_writer_free(struct weight_writer *w)
{
	free(w->global);
	free(w->writer);
	free(w->copy);
	*w = (struct weight_writer){0};
}

/* ============================================================================================================
 * Bringing each whole tensor to its writer
 * ========================================================================================================== */

struct shard_message *new_shard_message(void)
{
	return malloc(sizeof(struct shard_message) + BUCKET_SIZE * sizeof(real));
}

/* Copies a shard to its place in the whole tensor. data: its elements from .. end. */
static void place_shard(real *tensor, const struct parameter *t, const struct shard *shard, int64_t from, int64_t end,
		const real *data)
{
	const struct parameter sender = {.rows = t->rows, .cols = t->cols, .shard = *shard};
	for (int64_t at = from, n, first; at < end; at += n) {
		n = global_run(&sender, at, end, &first);
		copy_array(tensor + first, data + at - from, n);
	}
}

void collect_parameter(const struct parameter_table *table, struct optimizer_shard_iterator *walk,
		const struct parameter *t, const real *data, bool moments, int to, int tag, struct shard_message *message,
		real *tensor)
{
	const struct group *world = &table->layout.world;
	struct optimizer_shard_iterator next = *walk;
	struct optimizer_shard p;
	int64_t left = parameter_size(t);
	if (tag == 0) /* all messages that had a tag before have been received: it can be used again */
		parallel_agree(0);
	for (; next_optimizer_shard(table, &next, &p) && !strcmp(p.parameter->name, t->name); *walk = next) {
		const int64_t size = p.end - p.from;
		const real *shard = data + (moments ? p.state : p.parameter->offset + p.from);
		if (world->rank == to) {
			place_shard(tensor, t, &p.parameter->shard, p.from, p.end, shard);
			left -= size;
			continue;
		}
		message->shard = p.parameter->shard;
		message->from = p.from;
		message->end = p.end;
		copy_array(message->data, shard, size);
		send_message(world, to, tag, message, sizeof *message + size * sizeof(real));
	}
	while (world->rank == to && left > 0) {
		receive_message(world, ANY_RANK, tag, message, sizeof *message + BUCKET_SIZE * sizeof(real));
		place_shard(tensor, t, &message->shard, message->from, message->end, message->data);
		left -= message->end - message->from;
	}
}

/* The three arrays of a checkpoint, weights [num_elements] and the two moments [num_state], and what stands before a
 * tensor's name in their files. */
struct blocks { const real *data[3]; };
static const char *const block_prefixes[3] = {"", "exp_avg.", "exp_avg_sq."};

/* Tensor by tensor of the blocks first .. end - 1, in the same order on all ranks, the ranks send the shards that they
 * keep to the tensor's writer. There a tensor goes to its place in w->copy; where there is no copy, to `tensor`
 * [w->largest], and from there to the file. After a failure a rank still receives the others' shards: they would wait
 * for ever otherwise. No rank needs more memory than that and one message. */
static int collect(const struct weight_writer *w, const struct blocks *blocks, int first, int end,
		struct shard_message *message, real *tensor, struct safetensors_writer *file)
{
	int rc = file || w->copy ? 0 : -1;
	for (int b = first; b < end; b++) {
		struct optimizer_shard_iterator walk = {0};
		real *place = w->copy ? w->copy + b * w->elements : tensor;
		for (int i = 0; i < w->n; i++) {
			const struct parameter *t = &w->global[i];
			const bool own = w->writer[i] == w->table->layout.world.rank;
			collect_parameter(w->table, &walk, t, blocks->data[b], b > 0, w->writer[i],
					(int)(((int64_t)b * w->n + i) % SHARD_TAGS), message, place);
			if (own && w->copy)
				place += parameter_size(t);
			else if (own && rc == 0)
				rc = safetensors_append(file, tensor, parameter_size(t));
		}
	}
	return rc;
}

/* Creates this rank's file of the weights (kind 0) or of the moments (kind 1). */
static struct safetensors_writer *create_file(const struct weight_writer *w, const char *dir, int kind)
{
	const struct group *world = &w->table->layout.world;
	const int first = kind, end = kind ? 3 : 1;
	char path[PATH_LEN];
	struct named_tensor *tensors = calloc((size_t)w->num_own * (end - first) + 1, sizeof *tensors);
	char (*names)[MAX_NAME + 16] = calloc((size_t)w->num_own * (end - first) + 1, sizeof *names);
	struct safetensors_writer *file = NULL;
	int count = 0;
	shard_path(path, dir, kind ? "optimizer" : "model", world->rank, world->size);
	if (!tensors || !names)
		fail("%s: out of memory for the names of %d tensors", path, w->num_own);
	else {
		for (int b = first; b < end; b++)
			for (int i = 0; i < w->n; i++)
				if (w->writer[i] == world->rank) {
					snprintf(names[count], sizeof *names, "%s%s", block_prefixes[b], w->global[i].name);
					tensors[count] = (struct named_tensor){.name = names[count], .rows = w->global[i].rows,
							.cols = w->global[i].cols};
					count++;
				}
		file = safetensors_create(path, tensors, count);
		if (file && kind == 0)
			safetensors_set_fault(file, w->fault);
	}
	free(names);
	free(tensors);
	return file;
}

/* Completes a file, or removes it where rc is an error. */
static int end_file(struct safetensors_writer *file, int rc)
{
	if (rc == 0)
		return safetensors_finish(file);
	safetensors_abandon(file);
	return -1;
}

/* A buffer for a message, and with `elements` of a tensor too. Agreed, since nobody may send what another could not
 * take. */
static int make_buffers(struct shard_message **message, real **tensor, int64_t elements)
{
	*message = new_shard_message();
	*tensor = elements ? malloc(elements * sizeof **tensor) : NULL;
	int rc = *message && (*tensor || !elements) ? 0 : fail("out of memory for a tensor of %lld elements, which a "
			"checkpoint needs to write it", (long long)elements);
	if ((rc = parallel_agree(rc)) < 0) {
		free(*message);
		free(*tensor);
	}
	return rc;
}

int reserve_copy(struct weight_writer *w)
{
	w->copy = allocate_large((3 * w->elements + 1) * sizeof *w->copy);
	return w->copy ? 0 : fail("out of memory for the copy of a checkpoint, %.1f GB", 3.0 * w->elements *
			sizeof *w->copy / 1e9);
}

int copy_weights(struct weight_writer *w, const real *weights, const real *exp_avg, const real *exp_avg_sq)
{
	const struct blocks blocks = {{weights, exp_avg, exp_avg_sq}};
	struct shard_message *message;
	real *tensor;
	int rc;
	if (make_buffers(&message, &tensor, 0) < 0)
		return -1;
	rc = collect(w, &blocks, 0, 3, message, NULL, NULL);
	free(message);
	return rc;
}

int write_copy(const struct weight_writer *w, const char *dir)
{
	int rc = 0;
	for (int kind = 0; kind < 2 && rc == 0; kind++) {
		struct safetensors_writer *file = create_file(w, dir, kind);
		rc = file ? safetensors_append(file, w->copy + kind * w->elements, (kind + 1) * w->elements) : -1;
		if (file)
			rc = end_file(file, rc);
	}
	return rc;
}

int write_weight_files(const struct weight_writer *writer, const char *dir, const real *weights, const real *exp_avg,
		const real *exp_avg_sq)
{
	const struct blocks blocks = {{weights, exp_avg, exp_avg_sq}};
	struct weight_writer w = *writer;
	struct shard_message *message;
	real *tensor;
	int rc = 0;
	w.copy = NULL; /* straight to the files */
	if (make_buffers(&message, &tensor, w.largest + 1) < 0)
		return -1;
	for (int kind = 0; kind < 2 && rc == 0; kind++) {
		struct safetensors_writer *file = create_file(&w, dir, kind);
		rc = collect(&w, &blocks, kind, kind ? 3 : 1, message, tensor, file);
		rc = parallel_agree(file ? end_file(file, rc) : -1);
	}
	free(tensor);
	free(message);
	return rc;
}

int plan_saving(size_t *saving, size_t *copy, const struct model_config *c, const struct layout *layout)
{
	int n, rc;
	const int ranks = layout->world.size;
	struct parameter *global = global_parameters(c, &n);
	int *writer = calloc(n + 1, sizeof *writer), *host = calloc(ranks, sizeof *host);
	int64_t *bytes = calloc(ranks, sizeof *bytes), largest = 0, most = 0;
	rc = global && writer && host && bytes ? assign_writers(writer, bytes, global, n, c->num_experts,
			layout->expert.size, ranks, host) : fail("out of memory for the list of the tensors");
	for (int i = 0; i < n && rc == 0; i++)
		largest = parameter_size(&global[i]) > largest ? parameter_size(&global[i]) : largest;
	for (int r = 0; r < ranks && rc == 0; r++)
		most = bytes[r] > most ? bytes[r] : most;
	*saving = (largest + BUCKET_SIZE) * sizeof(real);
	*copy = most;
	free(global);
	free(writer);
	free(host);
	free(bytes);
	return rc;
}
