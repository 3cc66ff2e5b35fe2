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
 * each of the prefixes, and no others. The ranks share the work of verifying the checksums. `mapped`: the tensors will
 * be used in place, and files larger than memory are not verified. */
static struct tensors *open_files(const struct parameter_table *table, const struct model_config *c, const char *dir,
		const char *kind, int num_prefixes, const char *const *prefixes, bool mapped)
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
	if (!fits && mapped && world->rank == 0)
		fprintf(stderr, "note: %s is larger than the memory that may be used here: what is read in place is not "
				"checked against its checksums first\n", dir);
	const int num_verified = fits || !mapped ? tensors_count(w) : 0;
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
		bool mapped)
{
	return open_files(table, c, dir, "model", 1, (const char *[]){""}, mapped);
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

int load_moments(const struct parameter_table *table, const struct model_config *c, const char *dir, real *exp_avg,
		real *exp_avg_sq)
{
	struct tensors *w = open_files(table, c, dir, "optimizer", 2, moment_prefixes, false);
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

/* The rank that writes parameter number `number` of the whole model: one that holds it, where it is an expert's; the
 * others in turn. */
static int writer_of(const struct layout *l, const struct parameter *t, int number, int num_experts)
{
	if (t->sharing != SHARED_BY_EXPERT_DATA)
		return number % l->world.size;
	return t->block % l->expert_data.size * l->expert.size + t->expert / (num_experts / l->expert.size);
}

/* A shard on its way to the rank that writes its tensor: elements from .. end of what the sender holds of the
 * parameter. */
struct shard_message { struct shard shard; int64_t from, end; real data[]; };

/* A message's tag tells its tensor: the tensor's number modulo CHECKPOINT_TAGS, since MPI promises tags up to 32767
 * only. The double build has fewer tags, so that small models use each tag several times. */
#ifndef CHECKPOINT_TAGS
#define CHECKPOINT_TAGS 32768
#endif

/* Copies a shard to its place in the whole tensor. */
static void place_shard(real *tensor, const struct parameter *t, const struct shard_message *p)
{
	const struct parameter sender = {.rows = t->rows, .cols = t->cols, .shard = p->shard};
	for (int64_t at = p->from, n, first; at < p->end; at += n) {
		n = global_run(&sender, at, p->end, &first);
		memcpy(tensor + first, p->data + at - p->from, n * sizeof *tensor);
	}
}

/* Writes this rank's tensors of the given blocks to a file. Tensor by tensor, in the same order on all ranks, the
 * ranks send the shards that they keep to the tensor's writer: no rank needs more memory than one tensor and one
 * shard. blocks[b] are the weights or, with `moments`, exp_avg and exp_avg_sq. After a failure a rank still receives
 * the others' shards: they would wait for ever otherwise. */
static int write_parameters(const struct parameter_table *table, int num_experts, const struct parameter *global,
		int n, const char *path, bool moments, int num_blocks, real *const *blocks, const char *const *prefixes)
{
	const struct layout *layout = &table->layout;
	const struct group *world = &layout->world;
	struct named_tensor *tensors = calloc((size_t)n * num_blocks, sizeof *tensors); /* those that this rank writes */
	char (*names)[MAX_NAME + 16] = calloc((size_t)n * num_blocks, sizeof *names);
	struct shard_message *message = malloc(sizeof *message + (BUCKET_SIZE + 1) * sizeof(real));
	struct safetensors_writer *w = NULL;
	int64_t largest = 1;
	int count = 0, rc = 0;
	if (!tensors || !names || !message)
		rc = fail("%s: out of memory for the names of %d tensors", path, n);
	for (int b = 0; b < num_blocks && rc == 0; b++)
		for (int i = 0; i < n; i++)
			if (writer_of(layout, &global[i], i, num_experts) == world->rank) {
				snprintf(names[count], sizeof *names, "%s%s", prefixes[b], global[i].name);
				tensors[count] = (struct named_tensor){.name = names[count], .rows = global[i].rows,
						.cols = global[i].cols};
				largest = parameter_size(&global[i]) > largest ? parameter_size(&global[i]) : largest;
				count++;
			}
	real *tensor = rc == 0 ? malloc(largest * sizeof *tensor) : NULL;
	if (rc == 0 && !tensor)
		rc = fail("%s: out of memory for a tensor of %lld elements", path, (long long)largest);
	rc = parallel_agree(rc); /* nobody sends what another could not take */
	if (rc < 0) {
		free(tensor);
		tensor = NULL;
	}
	if (rc == 0 && !(w = safetensors_create(path, tensors, count)))
		rc = -1;
	for (int b = 0; b < num_blocks && tensor; b++) {
		struct optimizer_shard_iterator walk = {0};
		struct optimizer_shard p;
		bool more = next_optimizer_shard(table, &walk, &p);
		for (int i = 0; i < n; i++) {
			const int writer = writer_of(layout, &global[i], i, num_experts),
					tag = (b * n + i) % CHECKPOINT_TAGS;
			if (tag == 0) /* all messages that had a tag before have been received: it can be used again */
				parallel_agree(0);
			int64_t left = parameter_size(&global[i]);
			for (; more && !strcmp(p.parameter->name, global[i].name); more = next_optimizer_shard(table, &walk, &p)) {
				const int64_t size = p.end - p.from;
				message->shard = p.parameter->shard;
				message->from = p.from;
				message->end = p.end;
				memcpy(message->data, blocks[b] + (moments ? p.state : p.parameter->offset + p.from),
						size * sizeof(real));
				if (writer != world->rank) {
					send_message(world, writer, tag, message, sizeof *message + size * sizeof(real));
					continue;
				}
				place_shard(tensor, &global[i], message);
				left -= size;
			}
			while (writer == world->rank && left > 0) {
				receive_message(world, tag, message, sizeof *message + BUCKET_SIZE * sizeof(real));
				place_shard(tensor, &global[i], message);
				left -= message->end - message->from;
			}
			if (writer == world->rank && rc == 0)
				rc = safetensors_append(w, tensor, parameter_size(&global[i]));
		}
	}
	if (rc == 0)
		rc = safetensors_finish(w);
	else
		safetensors_abandon(w);
	free(tensor);
	free(message);
	free(names);
	free(tensors);
	return parallel_agree(rc);
}

int write_weight_files(const struct parameter_table *table, const struct model_config *c, const char *dir,
		real *weights, real *exp_avg, real *exp_avg_sq)
{
	const struct group *world = &table->layout.world;
	char path[PATH_LEN];
	int n, rc = -1;
	struct parameter *global = global_parameters(c, &n);
	if (parallel_agree(global ? 0 : -1) == 0) {
		shard_path(path, dir, "model", world->rank, world->size);
		rc = write_parameters(table, c->num_experts, global, n, path, false, 1, &weights, (const char *[]){""});
	}
	if (rc == 0) {
		shard_path(path, dir, "optimizer", world->rank, world->size);
		rc = write_parameters(table, c->num_experts, global, n, path, true, 2, (real *[]){exp_avg, exp_avg_sq},
				moment_prefixes);
	}
	free(global);
	return rc;
}
