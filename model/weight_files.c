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

/* Each parameter has several tensors in a checkpoint, the blocks, of which all files of all ranks have one after the
 * other: the weights; exp_avg and exp_avg_sq of replica 0; and, where there are several replicas, the outer momentum,
 * then exp_avg and exp_avg_sq of each other one. */
enum { BLOCK_WEIGHTS, BLOCK_MOMENTS, BLOCK_OUTER = 3, BLOCK_OTHERS, PREFIX_LEN = 32 };

static int count_blocks(int replicas)
{
	return replicas == 1 ? BLOCK_OUTER : BLOCK_OTHERS + 2 * (replicas - 1);
}

/* The replica whose array a block is; of arrays that all have alike, the first. */
static int replica_of(int block)
{
	return block < BLOCK_OTHERS ? 0 : 1 + (block - BLOCK_OTHERS) / 2;
}

/* The first block of a replica's moments. */
static int moments_of(int replica)
{
	return replica == 0 ? BLOCK_MOMENTS : BLOCK_OTHERS + 2 * (replica - 1);
}

/* What stands before a parameter's name in the name of its tensor. */
static const char *prefix_of(char prefix[PREFIX_LEN], int block)
{
	static const char *const moments[2] = {"exp_avg.", "exp_avg_sq."};
	const int replica = replica_of(block);
	if (block == BLOCK_WEIGHTS || block == BLOCK_OUTER)
		return block == BLOCK_OUTER ? "outer_momentum." : "";
	snprintf(prefix, PREFIX_LEN, "replica%d.%s", replica, moments[block - moments_of(replica)]);
	return replica ? prefix : strchr(prefix, '.') + 1;
}

/* Whether there are tensors of a form that only files/convert.c reads: queries apart from keys, or stacked experts. */
static bool has_other_form(const struct tensors *w)
{
	bool found = false;
	for (int i = 0; i < tensors_count(w); i++)
		found |= has_suffix(tensors_name(w, i), ".attention.q_proj.weight") ||
				strstr(tensors_name(w, i), ".switch_mlp.");
	return found;
}

/* Opens the files of one kind, of the weights (kind 0) or of the moments (kind 1). They must hold a tensor for each
 * parameter of the whole model and each of their blocks, and no others. *replicas: those that the moments are of. */
static struct tensors *open_files(const struct parameter_table *table, const struct model_config *c, const char *dir,
		int kind, enum verify verify, int *replicas)
{
	const struct group *all = &table->layout.all;
	int n, rc = 0;
	struct parameter *global = global_parameters(c, &n);
	struct tensors *w = global ? tensors_open(dir, kind ? "optimizer" : "model") : NULL;
	char name[MAX_NAME + PREFIX_LEN], prefix[PREFIX_LEN];
	if (!w) {
		free(global);
		return NULL;
	}
	for (int i = 0; i < n && rc == 0 && kind == 0 && !c->moe_router_enable_expert_bias; i++)
		if (has_suffix(global[i].name, EXPERT_BIAS) && !tensors_has(w, global[i].name)) /* it is none, and so 0 */
			rc = tensors_add_zeros(w, global[i].name, global[i].rows);
	*replicas = 1;
	do
		snprintf(name, sizeof name, "%s%s", prefix_of(prefix, moments_of(*replicas)), global[0].name);
	while (kind && tensors_has(w, name) && ++*replicas);
	const int first = kind, end = kind ? count_blocks(*replicas) : 1, num_prefixes = end - first;
	for (int p = first; p < end; p++)
		for (int i = 0; i < n && rc == 0; i++) {
			snprintf(name, sizeof name, "%s%s", prefix_of(prefix, p), global[i].name);
			if (!tensors_has(w, name))
				rc = fail("%s: tensor %s is missing%s", dir, name, has_other_form(w) ? "; other programs' forms of it, "
						"which are there, become this one by ling convert-checkpoint" : "");
		}
	if (rc == 0 && tensors_count(w) != num_prefixes * n) {
		/* All expected tensors are there, so there are more: names one. The search is slow, but only made to report
		 * an error. */
		for (int i = 0; i < tensors_count(w) && rc == 0; i++) {
			bool known = false;
			for (int j = 0; j < num_prefixes * n && !known; j++) {
				snprintf(name, sizeof name, "%s%s", prefix_of(prefix, first + j / n), global[j % n].name);
				known = !strcmp(name, tensors_name(w, i));
			}
			if (!known)
				rc = fail("%s: tensor %s is not a part of the model that config.json describes", dir,
						tensors_name(w, i));
		}
	}
	const bool fits = tensors_bytes(w) <= usable_memory("");
	if (!fits && verify == VERIFY_IF_IN_MEMORY && all->rank == 0)
		fprintf(stderr, "note: %s is larger than the memory that may be used here: what is read in place is not "
				"checked against its checksums first\n", dir);
	const int num_verified = verify == VERIFY || (verify == VERIFY_IF_IN_MEMORY && fits) ? tensors_count(w) : 0;
	for (int i = all->rank; i < num_verified && rc == 0; i += all->size) {
		rc = tensor_verify(&w->tensors[i]);
		if (all->size > 1) /* most of them are other ranks' */
			tensor_release(&w->tensors[i]);
	}
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
	int replicas;
	return open_files(table, c, dir, 0, verify, &replicas);
}

/* Reads elements from .. end of what this rank holds of a parameter, from its tensor of a block. */
static int read_shard(struct tensors *w, int block, const struct parameter *t, int64_t from, int64_t end, real *out)
{
	char name[MAX_NAME + PREFIX_LEN], prefix[PREFIX_LEN];
	int rc = 0;
	snprintf(name, sizeof name, "%s%s", prefix_of(prefix, block), t->name);
	for (int64_t at = from, n, first; at < end && rc == 0; at += n) {
		n = global_run(t, at, end, &first);
		rc = tensors_read_range(w, name, t->rows, t->cols, first, n, out + at - from);
	}
	return rc;
}

int read_weights(struct tensors *w, const struct parameter *t, real *out)
{
	return read_shard(w, BLOCK_WEIGHTS, t, 0, parameter_size(t), out);
}

int verify_weight_files(const struct parameter_table *table, const struct model_config *c, const char *dir)
{
	int replicas;
	struct tensors *weights = open_weights(table, c, dir, VERIFY), *moments = weights ? open_files(table, c, dir, 1,
			VERIFY, &replicas) : NULL;
	const int rc = moments ? 0 : -1;
	tensors_close(moments);
	tensors_close(weights);
	return parallel_agree(rc);
}

int load_moments(const struct parameter_table *table, const struct model_config *c, const char *dir, real *exp_avg,
		real *exp_avg_sq, real *outer_momentum)
{
	int replicas = 1;
	struct tensors *w = open_files(table, c, dir, 1, DO_NOT_VERIFY, &replicas);
	int rc = w ? 0 : -1;
	struct optimizer_shard p;
	const int block = moments_of(table->layout.replicas.rank % replicas);
	for (struct optimizer_shard_iterator walk = {0}; rc == 0 && next_optimizer_shard(table, &walk, &p);) {
		rc = read_shard(w, block, p.parameter, p.from, p.end, exp_avg + p.state);
		if (rc == 0)
			rc = read_shard(w, block + 1, p.parameter, p.from, p.end, exp_avg_sq + p.state);
		if (rc == 0 && outer_momentum && replicas > 1)
			rc = read_shard(w, BLOCK_OUTER, p.parameter, p.from, p.end, outer_momentum + p.state);
		else if (outer_momentum)
			memset(outer_momentum + p.state, 0, (p.end - p.from) * sizeof *outer_momentum);
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
	const struct group *world = &table->layout.all;
	*w = (struct weight_writer){.table = table, .fault = {.after = INT64_MAX},
			.num_blocks = count_blocks(table->layout.replicas.size)};
	const int64_t tensor_bytes = w->num_blocks * (int64_t)sizeof(real);
	w->global = global_parameters(c, &w->n);
	w->writer = calloc(w->n, sizeof *w->writer);
	int64_t *bytes = calloc(world->size, sizeof *bytes);
	int rc = w->global && w->writer && bytes ? 0 : fail("out of memory for the list of the tensors");
	if (rc == 0)
		rc = assign_writers(w->writer, bytes, w->global, w->n, c->num_experts, table->layout.expert.size, world->size,
				host);
	for (int i = 0; i < w->n && rc == 0; i++) {
		const int64_t size = parameter_size(&w->global[i]);
		w->bytes += size * tensor_bytes;
		w->file_bytes += size * tensor_bytes + w->num_blocks * TENSOR_HEADER;
		if (w->writer[i] != world->rank)
			continue;
		w->elements += size;
		w->largest = size > w->largest ? size : w->largest;
		w->num_own++;
	}
	for (int r = 0; r < world->size && rc == 0; r++) {
		/* assign_writers counts the blocks of one replica */
		const int64_t its = bytes[r] / BLOCK_OUTER * w->num_blocks;
		w->least = r == 0 || its < w->least ? its : w->least;
		w->most = its > w->most ? its : w->most;
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
		const struct parameter *t, const real *data, bool moments, bool sends, int to, int tag,
		struct shard_message *message, real *tensor)
{
	const struct group *world = &table->layout.all;
	struct optimizer_shard_iterator next = *walk;
	struct optimizer_shard p;
	int64_t left = parameter_size(t);
	if (tag == 0) /* all messages that had a tag before have been received: it can be used again */
		parallel_agree(0);
	for (; sends && next_optimizer_shard(table, &next, &p) && !strcmp(p.parameter->name, t->name); *walk = next) {
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

/* The array of this rank that is in a block, if its replica's is. */
static const real *array_of(const struct saved_arrays *a, int block)
{
	if (block == BLOCK_WEIGHTS || block == BLOCK_OUTER)
		return block == BLOCK_OUTER ? a->outer_momentum : a->weights;
	return block == moments_of(replica_of(block)) ? a->exp_avg : a->exp_avg_sq;
}

/* Tensor by tensor of the blocks first .. end - 1, in the same order on all ranks, the ranks send the shards that they
 * keep to the tensor's writer. There a tensor goes to its place in w->copy; where there is no copy, to `tensor`
 * [w->largest], and from there to the file. After a failure a rank still receives the others' shards: they would wait
 * for ever otherwise. No rank needs more memory than that and one message. */
static int collect(const struct weight_writer *w, const struct saved_arrays *arrays, int first, int end,
		struct shard_message *message, real *tensor, struct safetensors_writer *file)
{
	int rc = file || w->copy ? 0 : -1;
	for (int b = first; b < end; b++) {
		struct optimizer_shard_iterator walk = {0};
		real *place = w->copy ? w->copy + b * w->elements : tensor;
		for (int i = 0; i < w->n; i++) {
			const struct parameter *t = &w->global[i];
			const bool own = w->writer[i] == w->table->layout.all.rank;
			collect_parameter(w->table, &walk, t, array_of(arrays, b), b > 0,
					w->table->layout.replicas.rank == replica_of(b), w->writer[i],
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
	const struct group *world = &w->table->layout.all;
	const int first = kind, end = kind ? w->num_blocks : 1;
	char path[PATH_LEN], prefix[PREFIX_LEN];
	struct named_tensor *tensors = calloc((size_t)w->num_own * (end - first) + 1, sizeof *tensors);
	char (*names)[MAX_NAME + PREFIX_LEN] = calloc((size_t)w->num_own * (end - first) + 1, sizeof *names);
	struct safetensors_writer *file = NULL;
	int count = 0;
	shard_path(path, dir, kind ? "optimizer" : "model", world->rank, world->size);
	if (!tensors || !names)
		fail("%s: out of memory for the names of %d tensors", path, w->num_own);
	else {
		for (int b = first; b < end; b++)
			for (int i = 0; i < w->n; i++)
				if (w->writer[i] == world->rank) {
					snprintf(names[count], sizeof *names, "%s%s", prefix_of(prefix, b), w->global[i].name);
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
	w->copy = allocate_large((w->num_blocks * w->elements + 1) * sizeof *w->copy);
	return w->copy ? 0 : fail("out of memory for the copy of a checkpoint, %.1f GB", (double)w->num_blocks * w->elements
			* sizeof *w->copy / 1e9);
}

int copy_weights(struct weight_writer *w, const struct saved_arrays *arrays)
{
	struct shard_message *message;
	real *tensor;
	int rc;
	if (make_buffers(&message, &tensor, 0) < 0)
		return -1;
	rc = collect(w, arrays, 0, w->num_blocks, message, NULL, NULL);
	free(message);
	return rc;
}

int write_copy(const struct weight_writer *w, const char *dir)
{
	int rc = 0;
	for (int kind = 0; kind < 2 && rc == 0; kind++) {
		struct safetensors_writer *file = create_file(w, dir, kind);
		rc = file ? safetensors_append(file, w->copy + kind * w->elements, (kind ? w->num_blocks - 1 : 1) * w->elements)
				: -1;
		if (file)
			rc = end_file(file, rc);
	}
	return rc;
}

int write_weight_files(const struct weight_writer *writer, const char *dir, const struct saved_arrays *arrays)
{
	struct weight_writer w = *writer;
	struct shard_message *message;
	real *tensor;
	int rc = 0;
	w.copy = NULL; /* straight to the files */
	if (make_buffers(&message, &tensor, w.largest + 1) < 0)
		return -1;
	for (int kind = 0; kind < 2 && rc == 0; kind++) {
		struct safetensors_writer *file = create_file(&w, dir, kind);
		rc = collect(&w, arrays, kind, kind ? w.num_blocks : 1, message, tensor, file);
		rc = parallel_agree(file ? end_file(file, rc) : -1);
	}
	free(tensor);
	free(message);
	return rc;
}

int plan_saving(size_t *saving, size_t *copy, const struct model_config *c, const struct layout *layout)
{
	int n, rc;
	const int ranks = layout->all.size;
	struct parameter *global = global_parameters(c, &n);
	int *writer = calloc(n + 1, sizeof *writer), *host = calloc(ranks, sizeof *host);
	int64_t *bytes = calloc(ranks, sizeof *bytes), largest = 0, most = 0;
	rc = global && writer && host && bytes ? assign_writers(writer, bytes, global, n, c->num_experts,
			layout->expert.size, ranks, host) : fail("out of memory for the list of the tensors");
	for (int i = 0; i < n && rc == 0; i++)
		largest = parameter_size(&global[i]) > largest ? parameter_size(&global[i]) : largest;
	for (int r = 0; r < ranks && rc == 0; r++)
		most = bytes[r] > most ? bytes[r] : most;
	most = most / BLOCK_OUTER * count_blocks(layout->replicas.size);
	*saving = (largest + BUCKET_SIZE) * sizeof(real);
	*copy = most;
	free(global);
	free(writer);
	free(host);
	free(bytes);
	return rc;
}
