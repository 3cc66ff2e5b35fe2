/*
 * files/checkpoint.c - checkpoints: directories that appear whole or not at all, and the state of a run in them.
 *
 *   step-0000200        a checkpoint, always whole
 *   .tmp-step-0000200   one that is being written or removed; after a crash it is of no use, and is removed
 *   damaged-step-0000200   one that was found to be damaged when a run was to continue from it
 * Every byte has a checksum: tensors in the headers of their files; these headers, the indexes and config.json in
 * trainer.json; trainer.json in itself.
 */
#define _GNU_SOURCE
#include "files/checkpoint.h"

#include "files/base.h"
#include "parallel.h"
#include "files/config.h"
#include "files/safetensors.h"
#include "files/tensors.h"
#include "files/tokenizer.h"
#include "files/unicode.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <zlib.h>

#define TRAINER_FORMAT "ling-trainer"
#define TRAINER_VERSION 2

static const char *const stems[] = {"model", "optimizer"}; /* what the names of the files of tensors begin with */

/* The name of a shard: see shard_path. */
static void shard_name(char name[64], const char *stem, int shard, int num_shards)
{
	if (num_shards == 1)
		snprintf(name, 64, "%s.safetensors", stem);
	else
		snprintf(name, 64, "%s-%05d-of-%05d.safetensors", stem, shard + 1, num_shards);
}

bool checkpoint_file_name(char name[64], int i, int num_shards)
{
	if (i == 0)
		strcpy(name, "config.json");
	else if (i <= 2 * num_shards)
		shard_name(name, stems[(i - 1) / num_shards], (i - 1) % num_shards, num_shards);
	else if (num_shards > 1 && i <= 2 * num_shards + 2)
		snprintf(name, 64, "%s.safetensors.index.json", stems[i - 2 * num_shards - 1]);
	else
		return false;
	return true;
}

/* Where data.tokenizer is a tokenizer.json, a checkpoint also has copies of these, so that any tool can use it. The
 * second need not be there. */
static const char *const tokenizer_files[] = {"tokenizer.json", "tokenizer_config.json"};

bool is_model_file(const char *name)
{
	static const char *const endings[] = {".json", ".txt", ".jinja", ".model", ".py"};
	if (*name == '.' || has_suffix(name, ".index.json") || !strcmp(name, "config.json") ||
			!strcmp(name, "trainer.json"))
		return false;
	for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
		if (has_suffix(name, endings[i]))
			return true;
	return !strcmp(name, "LICENSE");
}

/* Fails when trainer.json cannot name a file. */
static int check_name(const char *path)
{
	const char *name = file_name(path);
	return utf8_valid(name, strlen(name)) == strlen(name) ? 0 : fail("%s: its name is not UTF-8, so that a "
			"checkpoint cannot hold it; rename it or take it away", path);
}

/* For scandir: these files, in the order of their names. */
static int is_model_entry(const struct dirent *e)
{
	return is_model_file(e->d_name);
}

static int by_entry_name(const struct dirent **a, const struct dirent **b)
{
	return strcmp((*a)->d_name, (*b)->d_name);
}

int model_files_read(struct model_files *f, const char *dir)
{
	char path[PATH_LEN];
	struct dirent **entries = NULL;
	struct stat st;
	const int n = scandir(dir, &entries, is_model_entry, by_entry_name);
	int rc = n < 0 ? fail("%s: cannot list: %s", dir, strerror(errno)) : 0;
	*f = (struct model_files){0};
	for (int i = 0; i < n; i++) {
		const uint8_t *data;
		size_t size;
		const char *name = entries[i]->d_name;
		if (!rc)
			rc = path_join(path, dir, name) < 0 ? -1 : check_name(path);
		if (!rc && stat(path, &st) == 0 && S_ISREG(st.st_mode) && (rc = map_file(path, &data, &size)) == 0) {
			f->list = grow(f->list, f->count, &f->capacity, 1, sizeof *f->list);
			struct model_file *file = &f->list[f->count++];
			*file = (struct model_file){copy_string(name), allocate(size + 1), size};
			if (size)
				memcpy(file->data, data, size);
			unmap_file(data, size);
		}
		free(entries[i]);
	}
	free(entries);
	if (!rc)
		rc = path_join(path, dir, "config.json") < 0 || !(f->config = json_read(path)) ? -1 : 0;
	json_object_del(f->config, MERGE_KEY); /* it is not true of weights that are trained further */
	return rc;
}

/* Forgets the files of the tokenizer. */
static void drop_tokenizer(struct model_files *f)
{
	static const char *const beginnings[] = {"tokenizer", "tokenization", "special_tokens_map", "added_tokens", "vocab",
			"merges", "chat_template"};
	int kept = 0;
	for (int i = 0; i < f->count; i++) {
		bool drop = false;
		for (size_t k = 0; k < sizeof beginnings / sizeof *beginnings; k++)
			drop |= !strncmp(f->list[i].name, beginnings[k], strlen(beginnings[k]));
		if (drop)
			free(f->list[i].name), free(f->list[i].data);
		else
			f->list[kept++] = f->list[i];
	}
	f->count = kept;
}

void model_files_compare_tokenizer(struct model_files *f, const char *name, const char *dir)
{
	struct tokenizer *theirs, *ours = tokenizer_open(name);
	if (ours && tokenizer_find(&theirs, dir, NULL) > 0) {
		if (!tokenizer_has_hash(ours, tokenizer_hash(theirs))) {
			fprintf(stderr, "warning: data.tokenizer %s has the hash %08x, the tokenizer of train.init_from %s %08x: "
					"unless the one extends the other, ids mean something else to these weights. The checkpoints get "
					"data.tokenizer\n", name, (unsigned)tokenizer_hash(ours), dir, (unsigned)tokenizer_hash(theirs));
			drop_tokenizer(f);
		}
		tokenizer_close(theirs);
	}
	tokenizer_close(ours);
}

void model_files_free(struct model_files *f)
{
	for (int i = 0; i < f->count; i++)
		free(f->list[i].name), free(f->list[i].data);
	free(f->list);
	json_decref(f->config);
	*f = (struct model_files){0};
}

/* Writes the files into a checkpoint. */
static int model_files_write(const struct model_files *f, const char *dir)
{
	char path[PATH_LEN];
	int rc = 0;
	for (int i = 0; f && i < f->count && !rc; i++) {
		FILE *out = path_join(path, dir, f->list[i].name) < 0 ? NULL : file_create(path);
		if (out)
			fwrite(f->list[i].data, 1, f->list[i].size, out);
		rc = out ? file_close(out, path, 0) : -1;
	}
	return rc;
}

void shard_path(char path[PATH_LEN], const char *dir, const char *stem, int shard, int num_shards)
{
	char name[64];
	shard_name(name, stem, shard, num_shards);
	path_join(path, dir, name); /* it fits: the checks of train.output_dir and of a conversion's path leave room */
}

/* The step in a name, which must be exactly what checkpoint_path writes for the prefix and that step; else -1. */
static int64_t step_of(const char *name, const char *prefix)
{
	char again[64];
	size_t skip = strlen(prefix);
	if (strncmp(name, prefix, skip) || strspn(name + skip, "0123456789") > 18)
		return -1;
	long long step = strtoll(name + skip, NULL, 10);
	snprintf(again, sizeof again, "%s%07lld", prefix, step);
	return strcmp(name, again) ? -1 : step;
}

int checkpoint_path(char out[PATH_LEN], const char *output_dir, const char *prefix, int64_t step)
{
	char name[64];
	snprintf(name, sizeof name, "%s%07lld", prefix, (long long)step);
	return path_join(out, output_dir, name);
}

static int by_step(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
	return (x > y) - (x < y);
}

int checkpoint_list(const char *output_dir, const char *prefix, int64_t **steps)
{
	*steps = NULL;
	DIR *dir = opendir(output_dir);
	if (!dir)
		return errno == ENOENT ? 0 : fail("%s: cannot list: %s", output_dir, strerror(errno));
	int n = 0;
	size_t capacity = 0;
	errno = 0;
	for (struct dirent *e; (e = readdir(dir)); errno = 0) {
		int64_t step = step_of(e->d_name, prefix);
		if (step < 0)
			continue;
		*steps = grow(*steps, n, &capacity, 1, sizeof **steps);
		(*steps)[n++] = step;
	}
	if (errno)
		n = fail("%s: cannot list: %s", output_dir, strerror(errno));
	closedir(dir);
	if (n > 0)
		qsort(*steps, n, sizeof **steps, by_step);
	return n;
}

/* Whether the checkpoint of a step has a trainer.json that can be read: it is written last. errno tells why not. */
static bool checkpoint_is_whole(const char *output_dir, int64_t step)
{
	char path[PATH_LEN], trainer[PATH_LEN];
	return checkpoint_path(path, output_dir, "step-", step) == 0 && path_join(trainer, path, "trainer.json") == 0 &&
			access(trainer, R_OK) == 0;
}

int checkpoint_file_crc(const char *dir, const char *name, int64_t *size, uint32_t *crc)
{
	char path[PATH_LEN];
	const uint8_t *data;
	size_t bytes;
	if (path_join(path, dir, name) < 0 || map_file(path, &data, &bytes) < 0)
		return -1;
	*size = bytes;
	uint64_t covered = bytes;
	if (has_suffix(name, ".safetensors") && bytes >= 8 && (uint64_t)load_i64(data) <= bytes - 8)
		covered = 8 + load_i64(data);
	*crc = crc32_z(0, data, covered);
	unmap_file(data, bytes);
	return 0;
}

/* Adds a file to the member `files` of trainer.json. */
static int file_to_json(const char *dir, const char *name, json_t *files)
{
	int64_t size;
	uint32_t crc;
	if (check_name(name) < 0 || checkpoint_file_crc(dir, name, &size, &crc) < 0)
		return -1;
	json_t *entry = json_pack("{s:I, s:o}", "size", (json_int_t)size, "crc32", crc_to_json(crc));
	return json_object_set_new(files, name, entry);
}

uint32_t trainer_crc(json_t *root)
{
	json_object_del(root, "crc32");
	char *text = json_text(root, JSON_COMPACT);
	uint32_t crc = crc32_z(0, (const uint8_t *)text, strlen(text));
	free(text);
	return crc;
}

/* An array of n numbers; one that is not finite fails. NULL on error. */
static json_t *reals_to_json(const char *path, const char *key, const double *x, int n)
{
	json_t *array = json_array();
	for (int i = 0; i < n; i++)
		if (json_array_append_new(array, json_real(x[i])) < 0) {
			fail("%s: %s of layer %d is %g; expected a finite number", path, key, i, x[i]);
			json_decref(array);
			return NULL;
		}
	return array;
}

/* The member `sources` of trainer.json. */
static json_t *sources_to_json(const struct trainer_state *s)
{
	json_t *array = json_array();
	for (int i = 0; i < s->num_sources; i++) {
		const struct source_state *x = &s->sources[i];
		json_t *source = json_pack("{s:I, s:o, s:I, s:I, s:I, s:i}", "tokens", (json_int_t)x->tokens,
				"crc32", crc_to_json(x->crc32), "share", (json_int_t)x->share, "credit", (json_int_t)x->credit,
				"taken", (json_int_t)x->taken, "order", x->order);
		if (x->packed_windows)
			json_object_set_new(source, "packed_windows", json_integer(x->packed_windows));
		json_array_append_new(array, source);
	}
	return array;
}

json_t *trainer_to_json(const struct config *c, const struct trainer_state *s, int num_shards)
{
	char path[PATH_LEN];
	if (num_shards < 1 || num_shards > MAX_SHARDS) {
		fail("%s: %d shards; expected 1 to %d", c->train.output_dir, num_shards, MAX_SHARDS);
		return NULL;
	}
	if (checkpoint_path(path, c->train.output_dir, "step-", s->step) < 0)
		return NULL;
	json_t *root = json_pack("{s:s, s:i, s:I, s:I, s:I, s:o, s:i}", "format", TRAINER_FORMAT,
			"version", TRAINER_VERSION, "step", (json_int_t)s->step, "samples", (json_int_t)s->samples,
			"tokens", (json_int_t)s->tokens, "sources", sources_to_json(s), "parts", num_shards);
	json_object_set_new(root, "batches", json_integer(s->batches));
	if (s->spikes)
		json_object_set(root, "spikes", s->spikes);
	if (s->local)
		json_object_set(root, "local", s->local);
	json_t *mean = reals_to_json(path, "router_mean", s->router_mean, s->num_layers);
	json_t *std = mean ? reals_to_json(path, "router_std", s->router_std, s->num_layers) : NULL;
	int rc = std ? 0 : -1;
	json_object_set_new(root, "router_mean", mean);
	json_object_set_new(root, "router_std", std);
	json_object_set_new(root, "files", json_object()); /* trainer_write fills it in */
	if (!rc && json_object_set_new(root, "config", run_to_json(c)) < 0)
		rc = fail("%s: the config cannot be written as JSON", path);
	if (!rc)
		return root;
	json_decref(root);
	return NULL;
}

/* Writes trainer.json, when all other files are complete: with their sizes and checksums, and its own. */
static int trainer_write(const char *dir, json_t *root, int num_shards)
{
	char path[PATH_LEN], name[64];
	json_t *files = json_object_get(root, "files");
	int rc = path_join(path, dir, "trainer.json");
	for (int i = 0; !rc && checkpoint_file_name(name, i, num_shards); i++)
		rc = file_to_json(dir, name, files);
	struct dirent **others = NULL;
	const int n = rc ? 0 : scandir(dir, &others, is_model_entry, by_entry_name);
	if (n < 0)
		rc = fail("%s: cannot list: %s", dir, strerror(errno));
	for (int i = 0; i < n; i++) {
		if (!rc)
			rc = file_to_json(dir, others[i]->d_name, files);
		free(others[i]);
	}
	free(others);
	if (!rc) {
		json_object_set_new(root, "crc32", crc_to_json(trainer_crc(root)));
		rc = json_write(path, root);
	}
	return rc;
}

int shards_finish(const char *dir, const char *stem, int num_shards)
{
	char path[PATH_LEN], name[64];
	struct tensors *w = allocate(sizeof *w);
	json_t *map = json_object();
	json_int_t total = 0;
	int rc = 0;
	for (int shard = 0; shard < num_shards && !rc; shard++) {
		shard_path(path, dir, stem, shard, num_shards);
		rc = safetensors_open_file(w, path) < 0 ? -1 : sync_path(path);
	}
	for (int i = 0; i < w->count && !rc; i++) { /* sorted by name */
		const struct tensor *t = &w->tensors[i];
		if (i && !strcmp(t[-1].name, t->name))
			rc = fail("%s: tensor %s is in %s as well; expected it once", t->file->path, t->name, t[-1].file->path);
		json_object_set_new(map, t->name, json_cstring(file_name(t->file->path)));
		total += t->end - t->begin;
	}
	tensors_close(w);
	snprintf(name, sizeof name, "%s.safetensors.index.json", stem);
	json_t *index = json_pack("{s:{s:I}, s:o}", "metadata", "total_size", total, "weight_map", map);
	if (!rc && num_shards > 1)
		rc = path_join(path, dir, name) < 0 ? -1 : json_write(path, index);
	json_decref(index);
	return rc;
}

/* Copies the files of data.tokenizer, if it has any. */
static int copy_tokenizer(const char *dir, const struct config *c)
{
	char file[PATH_LEN], from[PATH_LEN], to[PATH_LEN];
	if (!strcmp(c->data.tokenizer, "none") || !strcmp(c->data.tokenizer, BYTE_TOKENIZER))
		return 0;
	if (tokenizer_path(file, c->data.tokenizer) < 0 || path_join(to, dir, tokenizer_files[0]) < 0 ||
			copy_file(file, to) < 0)
		return -1;
	parent_of(from, file);
	if (path_join(file, from, tokenizer_files[1]) < 0 || path_join(to, dir, tokenizer_files[1]) < 0)
		return -1;
	const int there = path_exists(file);
	return there > 0 ? copy_file(file, to) : there;
}

/* Completes the directory, and brings all of it to disk. */
static int checkpoint_fill(const char *dir, const struct config *c, const struct model_files *files, json_t *trainer,
		int num_shards)
{
	char path[PATH_LEN];
	if (model_files_write(files, dir) < 0 || path_join(path, dir, "config.json") < 0 ||
			config_write(path, &c->model, "float32", files ? files->config : NULL,
					files ? files->gguf_name : NULL) < 0)
		return -1;
	for (int i = 0; i < 2; i++)
		if (shards_finish(dir, stems[i], num_shards) < 0)
			return -1;
	return copy_tokenizer(dir, c) < 0 || trainer_write(dir, trainer, num_shards) < 0 ? -1 : sync_path(dir);
}

/* Removes a checkpoint. A failure is a warning. */
static void checkpoint_remove(const char *output_dir, int64_t step)
{
	char path[PATH_LEN], temporary[PATH_LEN];
	/* Under the temporary name first: a crash while removing must not leave half a checkpoint under a whole one's. */
	if (checkpoint_path(path, output_dir, "step-", step) < 0 ||
			checkpoint_path(temporary, output_dir, ".tmp-step-", step) < 0)
		return; /* too long a path to have been made by us */
	if (rename(path, temporary) < 0)
		fprintf(stderr, "ling: warning: %s: cannot remove this old checkpoint: %s\n", path, strerror(errno));
	else if (sync_path(output_dir) < 0) /* a power cut must not undo the renaming, but keep the removals */
		fprintf(stderr, "ling: warning: %s: this old checkpoint stays: %s\n", temporary, error_text);
	else
		directory_remove(temporary);
}

/* Removes all but the `keep` newest checkpoints and those of every keep_every-th step (0: none), never that of step
 * `saved`. What is not whole is left alone. Failures are warnings: the new checkpoint is safe. */
static void checkpoint_prune(const char *output_dir, int keep, int64_t keep_every, int64_t saved)
{
	int64_t *steps;
	int n = checkpoint_list(output_dir, "step-", &steps);
	if (n < 0)
		fprintf(stderr, "ling: warning: old checkpoints stay: %s\n", error_text);
	for (int i = n - 1; i >= 0; i--)
		if (checkpoint_is_whole(output_dir, steps[i]) && keep-- <= 0 && steps[i] != saved &&
				!(keep_every && steps[i] % keep_every == 0))
			checkpoint_remove(output_dir, steps[i]);
	free(steps);
}

void checkpoint_remove_after(const char *output_dir, int64_t step)
{
	int64_t *steps;
	int n = checkpoint_list(output_dir, "step-", &steps);
	if (n < 0)
		fprintf(stderr, "ling: warning: later checkpoints stay: %s\n", error_text);
	for (int i = n - 1; i >= 0 && steps[i] > step; i--)
		checkpoint_remove(output_dir, steps[i]);
	free(steps);
}

int checkpoint_begin(const struct config *c, const struct trainer_state *s, char dir[PATH_LEN])
{
	if (checkpoint_is_whole(c->train.output_dir, s->step))
		return 1;
	if (checkpoint_path(dir, c->train.output_dir, ".tmp-step-", s->step) < 0 ||
			make_directories(c->train.output_dir) < 0)
		return -1;
	directory_remove(dir);
	remember_temporary(dir);
	return mkdir(dir, 0777) < 0 ? fail("%s: cannot create directory: %s", dir, strerror(errno)) : 0;
}

int checkpoint_publish(const struct config *c, const struct model_files *files, json_t *trainer, const char *dir)
{
	char target[PATH_LEN];
	const int64_t step = json_integer_value(json_object_get(trainer, "step"));
	const int num_shards = json_integer_value(json_object_get(trainer, "parts"));
	int rc = checkpoint_path(target, c->train.output_dir, "step-", step);
	if (rc == 0)
		rc = checkpoint_fill(dir, c, files, trainer, num_shards);
	json_decref(trainer);
	if (rc == 0 && rename(dir, target) < 0)
		rc = fail("%s: cannot rename to %s: %s; if that is an old checkpoint, remove it", dir, target,
				strerror(errno));
	if (rc < 0) {
		checkpoint_abandon(dir);
		return -1;
	}
	forget_temporary(dir);
	if (sync_path(c->train.output_dir) < 0)
		return -1;
	if (c->checkpoint.keep > 0)
		checkpoint_prune(c->train.output_dir, c->checkpoint.keep, c->checkpoint.keep_every, step);
	return 0;
}

int checkpoint_commit(const struct config *c, const struct trainer_state *s, const char *dir, int num_shards)
{
	json_t *trainer = trainer_to_json(c, s, num_shards);
	if (trainer)
		return checkpoint_publish(c, s->files, trainer, dir);
	checkpoint_abandon(dir);
	return -1;
}

int checkpoint_room(const char *output_dir, const struct model_files *files, double bytes)
{
	enum { OTHER_FILES = 1 << 20 }; /* bytes of config.json and trainer.json, and what directories take, at most */
	struct statvfs disk;
	bytes += OTHER_FILES;
	for (int i = 0; files && i < files->count; i++)
		bytes += files->list[i].size;
	if (make_directories(output_dir) < 0)
		return -1;
	if (statvfs(output_dir, &disk) < 0)
		return 0; /* what it does not tell will show when it is written */
	const double free_bytes = (double)disk.f_bavail * disk.f_frsize;
	return bytes <= free_bytes ? 0 : fail("%s: a checkpoint needs %.3f GB, and %.3f GB are free on this disk, where "
			"older checkpoints go only when the new one is there: free some space, or choose another place", output_dir,
			bytes / 1e9, free_bytes / 1e9);
}

void checkpoint_abandon(const char *dir)
{
	directory_remove(dir);
	forget_temporary(dir);
}

int checkpoint_newest(const char *output_dir, char path[PATH_LEN])
{
	int64_t *steps;
	int n = checkpoint_list(output_dir, "step-", &steps), last = n - 1;
	int rc = n <= 0 ? n : checkpoint_path(path, output_dir, "step-", steps[last]) < 0 ? -1 : 1;
	if (rc > 0 && !checkpoint_is_whole(output_dir, steps[last])) {
		/* To continue from an older one would throw work away that can perhaps be saved: the user decides. */
		const char *reason = strerror(errno);
		while (last >= 0 && !checkpoint_is_whole(output_dir, steps[last]))
			last--;
		char older[64] = "start from the beginning";
		if (last >= 0)
			snprintf(older, sizeof older, "continue from step %lld", (long long)steps[last]);
		rc = fail("%s/trainer.json: cannot be read (%s), so that this newest checkpoint is not whole; repair it, or "
				"remove that directory to %s", path, reason, older);
	}
	free(steps);
	return rc;
}

int find_model(char path[PATH_LEN], const char *name)
{
	char file[PATH_LEN];
	struct stat st;
	int found = 0, rc = path_join(file, name, "config.json");
	if (rc == 0 && stat(name, &st) == 0 && S_ISDIR(st.st_mode) && stat(file, &st) < 0) {
		found = checkpoint_newest(name, path);
		rc = found < 0 ? -1 : path_join(file, name, "metrics.jsonl");
		if (rc == 0 && !found && stat(file, &st) == 0)
			rc = fail("%s is the directory of a run that has no checkpoint yet", name);
	}
	if (rc == 0 && !found && snprintf(path, PATH_LEN, "%s", name) >= PATH_LEN)
		rc = fail("%.200s...: the path is too long", name);
	if (parallel_agree(rc) < 0)
		return -1;
	/* A run that goes on may save another checkpoint between the looks of two ranks. */
	if (parallel_same(crc32_z(0, (const void *)path, strlen(path)), "the newest checkpoint") < 0)
		return -1;
	if (found && parallel_rank() == 0)
		fprintf(stderr, "note: %s is a run: taking its newest checkpoint, %s\n", name, path);
	return 0;
}

int checkpoint_clean(const char *output_dir)
{
	char left[PATH_LEN];
	DIR *dir = opendir(output_dir);
	if (!dir)
		return errno == ENOENT ? 0 : fail("%s: cannot list: %s", output_dir, strerror(errno));
	for (struct dirent *e; (e = readdir(dir));)
		if (step_of(e->d_name, ".tmp-step-") >= 0 && path_join(left, output_dir, e->d_name) == 0)
			directory_remove(left);
	closedir(dir);
	return 0;
}

int checkpoint_set_aside(const char *output_dir, int64_t step)
{
	char path[PATH_LEN], aside[PATH_LEN];
	if (checkpoint_path(path, output_dir, "step-", step) < 0 ||
			checkpoint_path(aside, output_dir, "damaged-step-", step) < 0)
		return -1;
	if (rename(path, aside) < 0) {
		directory_remove(aside); /* that of an earlier time */
		if (rename(path, aside) < 0)
			return fail("%s: cannot rename to %s: %s", path, aside, strerror(errno));
	}
	return sync_path(output_dir);
}

/* Reads an array of n finite numbers of at least `low`. */
static int field_reals(const json_t *object, const char *where, const char *key, int n, double low, double *out)
{
	const json_t *array = json_object_get(object, key);
	if (!json_is_array(array))
		return fail("%s: `%s` is %s; expected an array", where, key, json_kind(array));
	if (json_array_size(array) != (size_t)n)
		return fail("%s: `%s` has %zu entries; expected one for each of %d layers", where, key, json_array_size(array),
				n);
	for (int i = 0; i < n; i++) {
		const json_t *v = json_array_get(array, i);
		if (!json_is_number(v))
			return fail("%s: `%s` entry %d is %s; expected a number", where, key, i, json_kind(v));
		out[i] = json_number_value(v);
		if (out[i] < low)
			return fail("%s: `%s` entry %d is %g; expected at least %g", where, key, i, out[i], low);
	}
	return 0;
}

/* Reads `sources`. Their number and the sizes keep all that is computed from them within int64_t. */
static int field_sources(const json_t *root, const char *path, struct trainer_state *s)
{
	const json_t *array = json_object_get(root, "sources");
	const int64_t whole = INT64_C(1) << 32;
	if (!json_is_array(array) || json_array_size(array) > MAX_SOURCES)
		return fail("%s: `sources` is %s; expected an array of at most %d", path,
				json_is_array(array) ? "longer" : json_kind(array), MAX_SOURCES);
	s->num_sources = json_array_size(array);
	for (int i = 0; i < s->num_sources; i++) {
		struct source_state *x = &s->sources[i];
		const json_t *v = json_array_get(array, i);
		char where[PATH_LEN + 32];
		int64_t order;
		snprintf(where, sizeof where, "%s: source %d", path, i + 1);
		if (field_int(v, where, "tokens", 0, INT64_MAX, &x->tokens) < 0 ||
				field_crc(v, where, "crc32", &x->crc32) < 0 || field_int(v, where, "share", 0, whole, &x->share) < 0 ||
				field_int(v, where, "credit", -MAX_SOURCES * whole, MAX_SOURCES * whole, &x->credit) < 0 ||
				field_int(v, where, "taken", 0, INT64_MAX / 2, &x->taken) < 0 ||
				field_int(v, where, "order", 0, UINT16_MAX, &order) < 0)
			return -1;
		x->packed_windows = 0;
		if (json_object_get(v, "packed_windows") &&
				field_int(v, where, "packed_windows", 1, INT64_MAX / 2, &x->packed_windows) < 0)
			return -1;
		x->order = order;
	}
	return 0;
}

/* Compares a file of a checkpoint with its size and checksum in trainer.json, which is `where`. */
static int check_file(const char *dir, const char *where, const json_t *files, const char *name)
{
	const json_t *entry = json_object_get(files, name);
	int64_t size, found_size;
	uint32_t crc, found_crc;
	if (!json_is_object(entry))
		return fail("%s: `files` entry `%s` is %s; expected an object with size and crc32", where, name,
				json_kind(entry));
	if (field_int(entry, where, "size", 0, INT64_MAX, &size) < 0 || field_crc(entry, where, "crc32", &crc) < 0 ||
			checkpoint_file_crc(dir, name, &found_size, &found_crc) < 0)
		return -1;
	if (found_size != size)
		return fail("%s/%s: %lld bytes; expected the %lld that were saved; the file is damaged", dir, name,
				(long long)found_size, (long long)size);
	if (found_crc != crc)
		return fail("%s/%s: checksum %08x; expected %08x; the file was changed after it was saved", dir, name,
				(unsigned)found_crc, (unsigned)crc);
	return 0;
}

int checkpoint_check_files(const char *dir, const char *where, const json_t *root)
{
	const json_t *files = json_object_get(root, "files");
	char name[64];
	int64_t num_shards = 1; /* as in checkpoints from before there could be more */
	if (json_object_get(root, "parts") && field_int(root, where, "parts", 1, MAX_SHARDS, &num_shards) < 0)
		return -1;
	for (int i = 0; checkpoint_file_name(name, i, num_shards); i++)
		if (check_file(dir, where, files, name) < 0)
			return -1;
	const char *other;
	json_t *entry;
	json_object_foreach((json_t *)files, other, entry)
		if (is_model_file(other) && !strchr(other, '/') && check_file(dir, where, files, other) < 0)
			return -1;
	return 0;
}

int trainer_check(json_t *root, const char *path)
{
	const char *format = field_text(root, path, "format");
	int64_t version;
	uint32_t crc, found;
	if (!format)
		return -1;
	if (strcmp(format, TRAINER_FORMAT))
		return fail("%s: `format` is \"%.40s\"; expected \"%s\"", path, format, TRAINER_FORMAT);
	if (field_int(root, path, "version", 1, INT32_MAX, &version) < 0)
		return -1;
	if (version != TRAINER_VERSION)
		return fail("%s: version %lld; this program reads version %d", path, (long long)version, TRAINER_VERSION);
	if (field_crc(root, path, "crc32", &crc) < 0)
		return -1;
	if ((found = trainer_crc(root)) != crc)
		return fail("%s: checksum %08x; expected %08x; the file was changed after it was saved", path, (unsigned)found,
				(unsigned)crc);
	return 0;
}

/* Whether a file of a checkpoint is there but may not be read, which is no damage. */
static bool is_forbidden(const char *dir, const char *name)
{
	char path[PATH_LEN];
	return path_join(path, dir, name) == 0 && access(path, R_OK) < 0 && errno == EACCES;
}

/* Whether a file of JSON is whole: the only byte whose loss its checksum does not tell is the newline at its end. */
static bool ends_with_newline(const char *path)
{
	const uint8_t *data;
	size_t size;
	if (map_file(path, &data, &size) < 0)
		return false;
	const bool whole = size && data[size - 1] == '\n';
	unmap_file(data, size);
	return whole;
}

int checkpoint_check(const char *dir, const struct config *asked)
{
	char path[PATH_LEN], name[64];
	if (path_join(path, dir, "trainer.json") < 0)
		return -1;
	if (access(path, R_OK) < 0) {
		const int error = errno;
		fail("%s: cannot be read: %s", path, strerror(error));
		return error == EACCES ? -1 : 0;
	}
	json_t *root = json_read(path);
	if (!root)
		return 0;
	if (!ends_with_newline(path)) {
		json_decref(root);
		fail("%s: its last byte is missing; the file is damaged", path);
		return 0;
	}
	uint32_t crc;
	json_t *copy = json_deep_copy(root); /* less its checksum, once that is computed */
	const json_t *config = json_object_get(root, "config"), *version = json_object_get(root, "version");
	const bool other_version = json_is_integer(version) && json_integer_value(version) != TRAINER_VERSION;
	const bool unchanged = field_crc(root, path, "crc32", &crc) == 0 && trainer_crc(copy) == crc;
	FILE *notes = fopen("/dev/null", "we");
	json_decref(copy);
	int rc = notes ? 0 : fail("/dev/null: %s", strerror(errno));
	if (rc == 0 && trainer_check(root, path) < 0) /* what the program that saved it wrote is no damage */
		rc = unchanged || (other_version && !json_object_get(root, "crc32")) ? -1 : 1;
	if (rc == 0 && json_is_object(config))
		rc = config_compare(config, asked, path, notes) < 0 ? -1 : 0;
	if (notes)
		fclose(notes);
	int64_t num_shards = 1;
	if (rc == 0 && json_object_get(root, "parts"))
		rc = field_int(root, path, "parts", 1, MAX_SHARDS, &num_shards);
	for (int i = 0; rc == 0 && checkpoint_file_name(name, i, num_shards); i++)
		if (is_forbidden(dir, name))
			rc = fail("%s/%s: may not be read by this user", dir, name);
	if (rc == 0 && checkpoint_check_files(dir, path, root) < 0)
		rc = 1;
	json_decref(root);
	return rc < 0 ? -1 : rc == 0;
}

int checkpoint_read_state(const char *dir, const struct config *asked, struct trainer_state *s, FILE *notes)
{
	char path[PATH_LEN];
	if (path_join(path, dir, "trainer.json") < 0)
		return -1;
	json_t *root = json_read(path);
	if (!root)
		return -1;
	const int64_t named = step_of(file_name(dir), "step-");
	const json_t *config = json_object_get(root, "config");
	int rc = trainer_check(root, path);
	/* The config comes first: what differs because the config does should not be reported instead of it. */
	if (rc == 0 && !json_is_object(config))
		rc = fail("%s: `config` is %s; expected an object", path, json_kind(config));
	const int added = rc == 0 ? config_compare(config, asked, path, notes) : -1;
	if (added < 0)
		rc = -1;
	if (rc == 0 && (
			field_int(root, path, "step", 0, INT64_MAX / 2, &s->step) < 0 || /* room for more */
			field_int(root, path, "samples", 0, INT64_MAX / 2, &s->samples) < 0 ||
			field_int(root, path, "tokens", 0, INT64_MAX / 2, &s->tokens) < 0 ||
			field_sources(root, path, s) < 0 ||
			field_reals(root, path, "router_mean", s->num_layers, -INFINITY, s->router_mean) < 0 ||
			field_reals(root, path, "router_std", s->num_layers, 0, s->router_std) < 0))
		rc = -1;
	if (rc == 0) {
		json_decref(s->spikes);
		s->spikes = json_incref(json_object_get(root, "spikes"));
		json_decref(s->local);
		s->local = json_incref(json_object_get(root, "local"));
		s->batches = s->step; /* as in checkpoints from before batches were skipped */
		if (json_object_get(root, "batches"))
			rc = field_int(root, path, "batches", 0, INT64_MAX / 2, &s->batches);
	}
	if (rc == 0 && named >= 0 && named != s->step)
		rc = fail("%s: `step` is %lld, but the directory's name says %lld; give the directory its own name back, or "
				"remove it", path, (long long)s->step, (long long)named);
	json_decref(root);
	return rc < 0 ? -1 : added;
}
