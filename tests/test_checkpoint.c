/* Checkpoints: saved and read back, in one part or several; found again after any interruption; refused when any byte
 * of them is wrong. */
#define _GNU_SOURCE
#include "tests/test.h"

#include "files/checkpoint.h"
#include "files/config.h"
#include "model/parameters.h"
#include "model/weight_files.h"
#include "parallel.h"
#include "training/saving.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static void load_config(struct config *c)
{
	char *path = at("run.yaml"), text[4096];
	snprintf(text, sizeof text,
		"model: { hidden_size: 16, num_hidden_layers: 3, num_attention_heads: 2, num_key_value_heads: 1, "
		"head_dim: 8,\n"
		"  vocab_size: 257, num_experts: 4, num_experts_per_tok: 2, num_shared_experts: 1, "
		"moe_intermediate_size: 8 }\n"
		"data: { train: t, tokenizer: byte, seq_len: 16 }\n"
		"train: { output_dir: %s, seed: 7, steps: 20, micro_batch: 2, batch: 4 }\n"
		"schedule: { peak_lr: 1.0e-3 }\n", at("run"));
	put_string(path, text);
	if (config_load(c, path, 0, NULL, false) < 0)
		fail_msg("%s", error_text);
}

struct example {               /* what a checkpoint test saves */
	struct config config;
	struct trainer_state state;
	double mean[3], std[3];
	real w[6], m[6], v[6];
	struct named_tensor model[2], optimizer[4];
};

static void example_init(struct example *x)
{
	memset(x, 0, sizeof *x);
	load_config(&x->config);
	for (int i = 0; i < 6; i++)
		x->w[i] = i + (real)0.1, x->m[i] = -i, x->v[i] = i * i;
	for (int i = 0; i < 3; i++)
		x->mean[i] = -1.0 / (3 + i), x->std[i] = 1 / sqrt(2 + i);
	x->state = (struct trainer_state){.step = 5, .samples = 20, .tokens = 320, .num_layers = 3, .router_mean = x->mean,
		.router_std = x->std, .num_sources = 2, .sources = {{1234567890123, 0xfedcba98, INT64_C(3) << 30,
				-(INT64_C(5) << 30), 17, 0, 0},
		{300, 1, 1 << 30, INT64_C(5) << 30, INT64_MAX / 2, 12, 4}}};
	x->model[0] = (struct named_tensor){"model.w", 2, 3, x->w};
	x->model[1] = (struct named_tensor){"model.b", 2, 0, x->w + 3};
	x->optimizer[0] = (struct named_tensor){"exp_avg.model.w", 2, 3, x->m};
	x->optimizer[1] = (struct named_tensor){"exp_avg.model.b", 2, 0, x->m + 1};
	x->optimizer[2] = (struct named_tensor){"exp_avg_sq.model.w", 2, 3, x->v};
	x->optimizer[3] = (struct named_tensor){"exp_avg_sq.model.b", 2, 0, x->v + 2};
}

/* Writes part `part` of a kind: of its n arrays those that are dealt to it in turn, element by element. */
static int write_part(const char *dir, const char *kind, const struct named_tensor *arrays, int n, int part, int parts)
{
	char path[PATH_LEN];
	struct named_tensor mine[4];
	int count = 0, rc = 0;
	for (int i = part; i < n; i += parts)
		mine[count++] = arrays[i];
	shard_path(path, dir, kind, part, parts);
	struct safetensors_writer *w = safetensors_create(path, mine, count);
	if (!w)
		return -1;
	for (int i = 0; i < count; i++)
		for (int64_t j = 0; j < named_tensor_size(&mine[i]) && !rc; j++)
			rc = safetensors_append(w, mine[i].data + j, 1);
	if (!rc)
		return safetensors_finish(w);
	safetensors_abandon(w);
	return -1;
}

static int write_parts(const struct example *x, const char *dir, int parts)
{
	int rc = 0;
	for (int part = 0; part < parts && !rc; part++)
		rc = write_part(dir, "model", x->model, COUNT(x->model), part, parts) < 0 ? -1 :
				write_part(dir, "optimizer", x->optimizer, COUNT(x->optimizer), part, parts);
	return rc;
}

static int save_parts(struct example *x, int64_t step, int parts)
{
	char dir[PATH_LEN];
	x->state.step = step;
	int rc = checkpoint_begin(&x->config, &x->state, dir);
	if (rc)
		return rc;
	if (write_parts(x, dir, parts) == 0)
		return checkpoint_commit(&x->config, &x->state, dir, parts);
	checkpoint_abandon(dir);
	return -1;
}

static int example_save(struct example *x, int64_t step)
{
	return save_parts(x, step, 1);
}

/* All of trainer.json that a run that continues checks and reads. */
static int read_state(const char *dir, const struct config *c, struct trainer_state *s, FILE *notes)
{
	return checkpoint_check(dir, c) == 1 ? checkpoint_read_state(dir, c, s, notes) : -1;
}

/* All that a resumed run reads: 0, or -1 when any of it is refused. */
static int example_read(const char *dir, const struct config *c, struct trainer_state *s)
{
	return read_state(dir, c, s, stderr) < 0 || read_everything(dir, "model") < 0 ? -1 :
			read_everything(dir, "optimizer");
}

/* A wrong bit in any byte of any file is found, unless it makes no difference: the last of 17 digits may not. So is a
 * missing byte, and a missing file. */
static void break_files(const struct example *x, struct example *y, const char *dir, int parts)
{
	char name[64], file_path[PATH_LEN];
	for (int k = -1; k < 0 || checkpoint_file_name(name, k, parts); k++) {
		if (k < 0)
			strcpy(name, "trainer.json");
		assert_int_equal(path_join(file_path, dir, name), 0);
		size_t n;
		uint8_t *file = get_file(file_path, &n);
		for (size_t i = 0; i < n; i++) {
			file[i] ^= 1;
			put_file(file_path, file, n);
			file[i] ^= 1;
			if (example_read(dir, &x->config, &y->state) < 0)
				expect_error(name);
			else {
				assert_int_equal(k, -1);
				assert_memory_equal(x->mean, y->mean, sizeof x->mean);
				assert_memory_equal(x->std, y->std, sizeof x->std);
				assert_true(y->state.step == 5 && y->state.samples == 20 && y->state.tokens == 320);
			}
		}
		put_file(file_path, file, n - 1);
		if (k >= 0) {
			assert_int_equal(example_read(dir, &x->config, &y->state), -1);
			expect_error(name);
		}
		unlink(file_path);
		assert_int_equal(example_read(dir, &x->config, &y->state), -1);
		expect_error(name);
		put_file(file_path, file, n);
		free(file);
	}
	assert_int_equal(example_read(dir, &x->config, &y->state), 0);
}

static void checkpoint_round_trip(void **state)
{
	(void)state;
	static struct example x, y;
	char path[PATH_LEN];
	example_init(&x);
	y.state = (struct trainer_state){.num_layers = 3, .router_mean = y.mean, .router_std = y.std};
	assert_int_equal(find_newest(at("run"), path), 0);
	assert_int_equal(example_save(&x, 5), 0);
	assert_int_equal(find_newest(at("run"), path), 1);
	assert_string_equal(path, at("run/step-0000005"));
	if (example_read(path, &x.config, &y.state) < 0)
		fail_msg("%s", error_text);
	assert_true(y.state.step == 5 && y.state.samples == 20 && y.state.tokens == 320);
	assert_memory_equal(x.mean, y.mean, sizeof x.mean);
	assert_memory_equal(x.std, y.std, sizeof x.std);
	assert_int_equal(y.state.num_sources, 2);
	for (int i = 0; i < 2; i++) {
		const struct source_state *a = &x.state.sources[i], *b = &y.state.sources[i];
		assert_true(a->tokens == b->tokens && a->crc32 == b->crc32 && a->share == b->share && a->credit == b->credit &&
				a->taken == b->taken &&
				a->order == b->order);
	}

	break_files(&x, &y, path, 1);

	y.state.num_layers = 2;
	assert_int_equal(checkpoint_read_state(path, &x.config, &y.state, stderr), -1);
	expect_error("`router_mean` has 3 entries; expected one for each of 2 layers");
	/* Another model is reported as that, not as what follows from it. */
	struct config asked = x.config;
	asked.model.num_hidden_layers = 2;
	assert_int_equal(checkpoint_read_state(path, &asked, &y.state, stderr), -1);
	expect_error("trainer.json: model.num_hidden_layers was 3 in the checkpoint, found 2");
	/* A renamed directory. */
	y.state.num_layers = 3;
	assert_int_equal(rename(path, at("run/step-0000004")), 0);
	assert_int_equal(checkpoint_read_state(at("run/step-0000004"), &x.config, &y.state, stderr), -1);
	expect_error("run/step-0000004/trainer.json: `step` is 5, but the directory's name says 4");
	assert_int_equal(rename(at("run/step-0000004"), at("run/step-0000050")), 0);
	assert_int_equal(checkpoint_read_state(at("run/step-0000050"), &x.config, &y.state, stderr), -1);
	expect_error("run/step-0000050/trainer.json: `step` is 5, but the directory's name says 50");
	assert_int_equal(rename(at("run/step-0000050"), path), 0);
	x.std[1] = NAN;
	assert_int_equal(example_save(&x, 6), -1);
	expect_error("router_std of layer 1 is ");
	assert_false(exists(at("run/.tmp-step-0000006")));
	assert_false(exists(at("run/step-0000006")));
	assert_int_equal(find_newest(at("run"), path), 1);
	assert_string_equal(path, at("run/step-0000005"));
}

/* Whether DIR/name is there. */
static bool holds(const char *dir, const char *name)
{
	return exists(at("%s/%s", dir, name));
}

/* One part is what Hugging Face expects of a small model, several are what it expects of a large one. */
static void checkpoint_parts(void **state)
{
	(void)state;
	static struct example x, y;
	char path[PATH_LEN];
	example_init(&x);
	y.state = (struct trainer_state){.num_layers = 3, .router_mean = y.mean, .router_std = y.std};
	assert_int_equal(example_save(&x, 4), 0);
	static const char *const single[] = {"config.json", "model.safetensors", "optimizer.safetensors", "trainer.json"};
	for (int i = 0; i < COUNT(single); i++)
		assert_int_equal(unlink(at("run/step-0000004/%s", single[i])), 0);
	assert_int_equal(rmdir(at("run/step-0000004")), 0); /* there was nothing else */

	assert_int_equal(save_parts(&x, 5, 3), 0);
	assert_int_equal(save_parts(&x, 5, 2), 1);
	assert_int_equal(find_newest(at("run"), path), 1);
	assert_true(holds("run/step-0000005", "model-00003-of-00003.safetensors"));
	assert_false(holds("run/step-0000005", "model.safetensors") || exists(at("run/.tmp-step-0000005")));
	size_t n;
	uint8_t *index = get_file(at("run/step-0000005/model.safetensors.index.json"), &n);
	assert_string_equal(index, "{\n  \"metadata\": {\n    \"total_size\": 32\n  },\n  \"weight_map\": {\n"
			"    \"model.b\": \"model-00002-of-00003.safetensors\",\n"
			"    \"model.w\": \"model-00001-of-00003.safetensors\"\n  }\n}\n");
	free(index);
	if (example_read(path, &x.config, &y.state) < 0)
		fail_msg("%s", error_text);
	real out[6];
	struct tensors *w = tensors_open(path, "optimizer");
	assert_int_equal(tensors_count(w), 4);
	for (int i = 0; i < COUNT(x.optimizer); i++) {
		const struct named_tensor *a = &x.optimizer[i];
		assert_int_equal(tensors_read(w, &(struct named_tensor){a->name, a->rows, a->cols, out}), 0);
		assert_memory_equal(out, a->data, named_tensor_size(a) * sizeof *out);
	}
	assert_int_equal(tensors_read_range(w, "exp_avg_sq.model.w", 2, 3, 1, 4, out), 0);
	assert_memory_equal(out, x.v + 1, 4 * sizeof *out);
	tensors_close(w);
	break_files(&x, &y, path, 3);

	/* What no seal guards when weights are read by themselves. */
	char *shard = at("run/step-0000005/optimizer-00002-of-00003.safetensors");
	assert_int_equal(truncate(shard, 20), 0);
	assert_null(tensors_open(path, "optimizer"));
	expect_error("optimizer-00002-of-00003.safetensors: header of |the file is truncated");
	assert_int_equal(write_part(path, "optimizer", x.optimizer, 2, 0, 1), 0);
	assert_int_equal(rename(at("run/step-0000005/optimizer.safetensors"), shard), 0);
	assert_null(tensors_open(path, "optimizer"));
	expect_error("optimizer-00002-of-00003.safetensors: holds tensor exp_avg.model.w, but |it is in "
			"optimizer-00001-of-00003");
	assert_int_equal(unlink(shard), 0);
	assert_null(tensors_open(path, "optimizer"));
	expect_error("optimizer-00002-of-00003.safetensors: is not there, but |names it for tensor exp_avg.model.b");
}

/* A checkpoint whose parts are not all there, or not sound, does not come to be. */
static void checkpoint_refused(void **state)
{
	(void)state;
	static struct example x;
	char dir[PATH_LEN], second[PATH_LEN], third[PATH_LEN];
	example_init(&x);
	for (int i = 0; i < 7; i++) {
		int parts = i == 3 ? 4 : i == 4 ? 0 : i == 5 ? 1 : 3;
		assert_int_equal(checkpoint_begin(&x.config, &x.state, dir), 0);
		assert_string_equal(dir, at("run/.tmp-step-0000005"));
		assert_int_equal(write_parts(&x, dir, 3), 0);
		shard_path(second, dir, i == 6 ? "optimizer" : "model", 1, 3);
		shard_path(third, dir, "model", 2, 3);
		size_t n;
		free(get_file(second, &n));
		if (i == 0)
			assert_int_equal(unlink(second), 0);
		else if (i == 1)
			assert_int_equal(truncate(second, n - 1), 0);
		else if (i == 2)
			assert_int_equal(safetensors_write(third, &x.model[1], 1), 0);
		else if (i == 6)
			assert_int_equal(truncate(second, 100), 0);
		static const char *const errors[] = {
			"model-00002-of-00003.safetensors: cannot open: No such file",
			"model-00002-of-00003.safetensors: tensor model.b: |[0, 8]; expected a range within the file's 7",
			"of-00003.safetensors: tensor model.b is in |of-00003.safetensors as well; expected it once",
			"model-00001-of-00004.safetensors: cannot open", "run: 0 shards; expected 1 to 99999",
			"model.safetensors: cannot open", "optimizer-00002-of-00003.safetensors: header of |truncated",
		};
		assert_int_equal(checkpoint_commit(&x.config, &x.state, dir, parts), -1);
		expect_error(errors[i]);
		assert_false(exists(dir) || exists(at("run/step-0000005")));
	}
	assert_int_equal(checkpoint_begin(&x.config, &x.state, dir), 0);
	assert_int_equal(write_parts(&x, dir, 3), 0);
	checkpoint_abandon(dir);
	assert_false(exists(dir));
}

/* Members of trainer.json that are wrong although its checksum is right. */
#define SOURCE_JSON(share, credit) \
	"{\"tokens\":5,\"crc32\":\"00000000\",\"share\":" share ",\"credit\":" credit ",\"taken\":1,\"order\":0}"

static void checkpoint_wrong_fields(void **state)
{
	(void)state;
	static struct example x;
	example_init(&x);
	assert_int_equal(example_save(&x, 5), 0);
	char path[PATH_LEN];
	strcpy(path, at("run/step-0000005/trainer.json"));
	FILE *notes = fopen(at("notes"), "w");
	static const struct { const char *key, *json, *error; } cases[] = {
		{"format", "[1]", "`format` is an integer"}, {"format", "[\"other\"]", "`format` is \"other\""},
		{"version", "[1]", "version 1; this program reads version 2"}, {"version", "[null]", "`version` is null"},
		{"step", "[-1]", "`step` is -1"}, {"step", "[1.5]", "`step` is a real number"},
		{"step", "[]", "`step` is missing"},
		{"samples", "[\"1\"]", "`samples` is a string"}, {"tokens", "[-5]", "`tokens` is -5"},
		{"router_mean", "[[0,1]]", "`router_mean` has 2 entries"},
		{"router_mean", "[{}]", "`router_mean` is an object"},
		{"router_mean", "[[0,null,1]]", "`router_mean` entry 1 is null"},
		{"router_std", "[[1,1,-1]]", "`router_std` entry 2 is -1"},
		{"router_std", "[]", "`router_std` is missing"}, {"files", "[]", "`files` entry `config.json` is missing"},
		{"files", "[{\"config.json\":{\"size\":3,\"crc32\":\"00000000\"}}]",
			"config.json: |expected the 3 that were saved"},
		{"files", "[{\"config.json\":{\"crc32\":\"00000000\"}}]", "`size` is missing"},
		{"parts", "[0]", "`parts` is 0; expected 1 to 99999"}, {"parts", "[\"3\"]", "`parts` is a string"},
		{"parts", "[2]", "`files` entry `model-00001-of-00002.safetensors` is missing"},
		{"config", "[]", "`config` is missing"}, {"config", "[3]", "`config` is an integer"},
		{"sources", "[]", "`sources` is missing"},
		{"sources", "[{}]", "`sources` is an object; expected an array of at most 64"},
		{"sources", "[[{}]]", "source 1: `tokens` is missing"}, {"sources", "[[5]]", "source 1: `tokens` is missing"},
		{"sources", "[[" SOURCE_JSON("\"-1\"", "0") "]]", "source 1: `share` is a string"},
		{"sources", "[[" SOURCE_JSON("5", "0") "," SOURCE_JSON("4294967297", "0") "]]",
			"source 2: `share` is 4294967297"},
		{"sources", "[[" SOURCE_JSON("5", "-9223372036854775807") "]]", "source 1: `credit` is -9223372036854775807"},
		{"tokens", "[9223372036854775807]", "`tokens` is 9223372036854775807; expected 0 to 4611686018427387903"},
		{"step", "[6]", "`step` is 6, but the directory's name says 5"},
		{"config", "[{\"model\":{\"num_key_value_heads\":1,\"head_dim\":4}}]",
			"model.head_dim was 4 in the checkpoint, found 8"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		json_t *good = json_read(path), *bad = json_changed(good, cases[i].key, cases[i].json);
		json_object_set_new(bad, "crc32", crc_to_json(trainer_crc(bad)));
		assert_int_equal(json_write(path, bad), 0);
		if (read_state(at("run/step-0000005"), &x.config, &x.state, notes) == 0)
			fail_msg("%s %s was accepted", cases[i].key, cases[i].json);
		expect_error(cases[i].error);
		assert_int_equal(json_write(path, good), 0);
		json_decref(good), json_decref(bad);
	}
	json_t *older = json_read(path); /* from when there was but one part */
	json_object_del(older, "parts");
	json_object_set_new(older, "crc32", crc_to_json(trainer_crc(older)));
	assert_int_equal(json_write(path, older), 0);
	json_decref(older);
	assert_int_equal(read_state(at("run/step-0000005"), &x.config, &x.state, notes), 0);
	put_string(path, "");
	assert_int_equal(read_state(at("run/step-0000005"), &x.config, &x.state, notes), -1);
	fclose(notes);
	expect_error("trainer.json:");
}

/* The order of some system calls, while they are recorded: r rename, s fsync, u unlinkat. */
static char calls[4096];
static int num_calls = -1;

static void record_call(char call)
{
	if (num_calls >= 0 && num_calls < (int)sizeof calls - 1)
		calls[num_calls++] = call;
}

int fsync(int fd)
{
	record_call('s');
	return syscall(SYS_fsync, fd);
}

int rename(const char *from, const char *to)
{
	record_call('r');
	return syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}

int unlinkat(int dir, const char *name, int flags)
{
	record_call('u');
	return syscall(SYS_unlinkat, dir, name, flags);
}

static void checkpoint_prunes(void **state)
{
	(void)state;
	static struct example x;
	char path[PATH_LEN];
	example_init(&x);
	x.config.checkpoint.keep = 0;
	for (int64_t step = 1; step <= 3; step++)
		assert_int_equal(example_save(&x, step), 0);
	assert_true(exists(at("run/step-0000001")));
	/* What is not ours: other names, and our name without our content. */
	static const char *const others[] = {"step-1", "step-00000001", "step-0000000x", "xstep-0000001",
		"step-0000000", "step-",
		"step-99999999999999999999", ".tmp-step-x"};
	for (int i = 0; i < COUNT(others); i++)
		assert_int_equal(mkdir(at("run/%s", others[i]), 0777), 0);
	x.config.checkpoint.keep = 2;
	num_calls = 0;
	assert_int_equal(example_save(&x, 12345678), 0);
	/* saved; renamed; old one renamed, and that is on disk before it is removed */
	assert_non_null(strstr(calls, "srsrsu"));
	num_calls = -1;
	assert_false(exists(at("run/step-0000001")) || exists(at("run/step-0000002")));
	assert_true(exists(at("run/step-0000003")) && exists(at("run/step-12345678")));
	for (int i = 0; i < COUNT(others); i++)
		assert_true(exists(at("run/%s", others[i])));
	assert_int_equal(find_newest(at("run"), path), 1);
	assert_string_equal(path, at("run/step-12345678"));
	for (int i = 0; i < COUNT(others); i++)
		assert_true(exists(at("run/%s", others[i])));
	/* The one just saved stays, even when it is not the newest. */
	assert_int_equal(example_save(&x, 2), 0);
	assert_true(exists(at("run/step-0000002")));
	/* A symbolic link goes, what it points to stays. */
	assert_int_equal(rename(at("run/step-0000003"), at("elsewhere")), 0);
	assert_int_equal(symlink(at("elsewhere"), at("run/step-0000003")), 0);
	x.config.checkpoint.keep = 1;
	assert_int_equal(example_save(&x, 12345679), 0);
	assert_false(exists(at("run/step-0000003")));
	assert_true(exists(at("elsewhere/trainer.json")));
	/* What cannot be removed is no failure: the new checkpoint is there. */
	assert_int_equal(make_directories(at("run/.tmp-step-12345679/in/the/way")), 0);
	assert_int_equal(example_save(&x, 12345680), 0);
	assert_true(exists(at("run/step-12345679")) && exists(at("run/step-12345680")));
}

/* A newest checkpoint that is not whole is not passed over. */
static void checkpoint_not_whole(void **state)
{
	(void)state;
	static struct example x;
	char path[PATH_LEN], trainer[PATH_LEN];
	example_init(&x);
	x.config.checkpoint.keep = 0;
	assert_int_equal(mkdir(at("run"), 0777), 0);
	assert_int_equal(mkdir(at("run/step-0000003"), 0777), 0);
	assert_int_equal(find_newest(at("run"), path), -1);
	expect_error("run/step-0000003/trainer.json: cannot be read (No such file or directory)|"
			"remove that directory to start from the beginning");
	assert_int_equal(example_save(&x, 5), 0);
	assert_int_equal(find_newest(at("run"), path), 1); /* an older one is nobody's concern */
	assert_int_equal(example_save(&x, 6), 0);
	strcpy(trainer, at("run/step-0000006/trainer.json"));
	assert_int_equal(unlink(trainer), 0);
	assert_int_equal(mkdir(at("run/step-0000007"), 0777), 0);
	assert_int_equal(find_newest(at("run"), path), -1);
	expect_error("run/step-0000007/trainer.json: cannot be read|"
			"repair it, or remove that directory to continue from step 5");
	/* What hides it is told too: here a link in a circle. */
	assert_int_equal(rmdir(at("run/step-0000007")), 0);
	assert_int_equal(symlink(trainer, trainer), 0);
	assert_int_equal(find_newest(at("run"), path), -1);
	expect_error("run/step-0000006/trainer.json: cannot be read (Too many levels of symbolic links)|"
			"continue from step 5");
	remove_tree(at("run/step-0000006"));
	assert_int_equal(find_newest(at("run"), path), 1);
	assert_string_equal(path, at("run/step-0000005"));
	put_string(at("run/step-0000008"), "a file");
	assert_int_equal(find_newest(at("run"), path), -1);
	expect_error("step-0000008/trainer.json: cannot be read (Not a directory)");
}

static void checkpoint_interrupted(void **state)
{
	(void)state;
	static struct example x;
	char path[PATH_LEN];
	example_init(&x);
	assert_int_equal(example_save(&x, 5), 0);
	/* While writing step 6. */
	assert_int_equal(mkdir(at("run/.tmp-step-0000006"), 0777), 0);
	put_string(at("run/.tmp-step-0000006/model.safetensors"), "half");
	assert_int_equal(find_newest(at("run"), path), 1);
	assert_string_equal(path, at("run/step-0000005"));
	assert_false(exists(at("run/.tmp-step-0000006")));
	/* A temporary does not hinder the next try. */
	assert_int_equal(mkdir(at("run/.tmp-step-0000006"), 0777), 0);
	put_string(at("run/.tmp-step-0000006/rubbish"), "half");
	assert_int_equal(example_save(&x, 6), 0);
	assert_false(exists(at("run/step-0000006/rubbish")));
	/* The same step again: what is there stays. */
	x.state.samples = 99;
	assert_int_equal(example_save(&x, 6), 1);
	assert_false(exists(at("run/.tmp-step-0000006")));
	assert_int_equal(example_read(at("run/step-0000006"), &x.config, &x.state), 0);
	assert_int_equal(x.state.samples, 20);
	/* What is in its place and no checkpoint stays too. */
	assert_int_equal(make_directories(at("run/step-0000007/mine")), 0);
	assert_int_equal(example_save(&x, 7), -1);
	expect_error("step-0000007: cannot rename to |step-0000007: Directory not empty; "
			"if that is an old checkpoint, remove it");
	assert_false(exists(at("run/.tmp-step-0000007")));
	assert_true(exists(at("run/step-0000007/mine")));

	assert_int_equal(find_newest(at("run.yaml"), path), -1);
	expect_error("run.yaml: cannot list");
	snprintf(x.config.train.output_dir, PATH_LEN, "%s", at("run.yaml"));
	assert_int_equal(example_save(&x, 7), -1);
	expect_error("run.yaml");
}

/* A damaged checkpoint is told from one of another run, of another version, and from one that may not be read. */
static void checkpoint_damage(void **state)
{
	(void)state;
	static struct example x;
	char dir[PATH_LEN];
	size_t n;
	example_init(&x);
	assert_int_equal(example_save(&x, 5), 0);
	strcpy(dir, at("run/step-0000005"));
	assert_int_equal(checkpoint_check(dir, &x.config), 1);
	/* another run: no damage, also when a file is damaged */
	struct config other = x.config;
	other.train.seed = 8;
	assert_int_equal(checkpoint_check(dir, &other), -1);
	expect_error("trainer.json: train.seed was 7 in the checkpoint, found 8");
	char file[PATH_LEN];
	strcpy(file, at("run/step-0000005/model.safetensors"));
	uint8_t *data = get_file(file, &n);
	put_file(file, data, n - 1);
	assert_int_equal(checkpoint_check(dir, &other), -1);
	expect_error("train.seed was 7");
	assert_int_equal(checkpoint_check(dir, &x.config), 0);
	expect_error("model.safetensors: |the file is damaged");
	put_file(file, data, n);
	free(data);
	/* another version: an error, unless a bit of it was flipped */
	strcpy(file, at("run/step-0000005/trainer.json"));
	char *text = (char *)get_file(file, &n);
	char *version = strstr(text, "\"version\": 2");
	assert_non_null(version);
	version[11] = '3';
	put_file(file, (uint8_t *)text, n);
	assert_int_equal(checkpoint_check(dir, &x.config), 0);
	expect_error("version 3; this program reads");
	json_t *root = json_read(file);
	json_object_set_new(root, "crc32", crc_to_json(trainer_crc(root)));
	assert_int_equal(json_write(file, root), 0);
	json_decref(root);
	assert_int_equal(checkpoint_check(dir, &x.config), -1);
	expect_error("version 3; this program reads");
	version[11] = '2';
	put_file(file, (uint8_t *)text, n);
	assert_int_equal(checkpoint_check(dir, &x.config), 1);
	unlink(file);
	assert_int_equal(checkpoint_check(dir, &x.config), 0);
	expect_error("trainer.json: cannot be read: No such file");
	put_file(file, (uint8_t *)text, n);
	free(text);

	/* set aside, in the place of one that was set aside before */
	assert_int_equal(checkpoint_set_aside(at("run"), 5), 0);
	assert_false(exists(dir));
	assert_true(exists(at("run/damaged-step-0000005/trainer.json")));
	assert_int_equal(example_save(&x, 5), 0);
	unlink(file);
	assert_int_equal(checkpoint_set_aside(at("run"), 5), 0);
	assert_false(exists(dir) || exists(at("run/damaged-step-0000005/trainer.json")));
	assert_int_equal(checkpoint_set_aside(at("run"), 5), -1);
	expect_error("run/step-0000005: cannot rename to ");
}

static void checkpoint_keep_every(void **state)
{
	(void)state;
	static struct example x;
	int64_t *steps;
	example_init(&x);
	x.config.checkpoint.keep = 2;
	x.config.checkpoint.keep_every = 10;
	for (int step = 5; step <= 35; step += 5)
		assert_int_equal(example_save(&x, step), 0);
	assert_int_equal(checkpoint_list(at("run"), "step-", &steps), 4);
	assert_true(steps[0] == 10 && steps[1] == 20 && steps[2] == 30 && steps[3] == 35);
	free(steps);
}

static void checkpoint_no_room(void **state)
{
	(void)state;
	assert_int_equal(checkpoint_room(at("run"), NULL, 1000), 0);
	assert_int_equal(checkpoint_room(at("run"), NULL, 1e18), -1);
	expect_error("run: a checkpoint needs 1000000000.001 GB, and | GB are free");
}

/* The bytes that ranks and hosts write. Longest processing time first is at most 4/3 of the best possible. */
static void writers_balanced(void **state)
{
	(void)state;
	const struct model_config c = {.hidden_size = 64, MODEL_DEFAULTS, .num_hidden_layers = 4, .num_attention_heads = 4,
			.num_key_value_heads = 2, .head_dim = 16, .vocab_size = 1000, .num_experts = 8, .num_experts_per_tok = 2,
			.num_shared_experts = 1, .moe_intermediate_size = 48, .norm_head = true};
	static const struct { int ranks, expert_ranks, host[6]; } cases[] = {
		{1, 1, {0}}, {4, 1, {0, 0, 1, 1}}, {4, 4, {0, 0, 1, 1}}, {4, 2, {0, 1, 0, 1}}, {6, 2, {0, 0, 0, 0, 1, 1}},
		{3, 1, {0, 0, 1}},
	};
	int n, writer[256], again[256];
	int64_t bytes[6], bytes_again[6];
	struct parameter *global = global_parameters(&c, &n);
	assert_non_null(global);
	assert_true(n < COUNT(writer));
	int64_t total = 0;
	for (int i = 0; i < n; i++)
		total += 3 * parameter_size(&global[i]) * (int64_t)sizeof(real);
	for (int k = 0; k < COUNT(cases); k++) {
		const int ranks = cases[k].ranks, *host = cases[k].host;
		int64_t sum[6] = {0}, of_host[6] = {0}, ranks_of[6] = {0}, all = 0;
		int hosts = 0;
		assert_int_equal(assign_writers(writer, bytes, global, n, c.num_experts, cases[k].expert_ranks, ranks,
				host), 0);
		assert_int_equal(assign_writers(again, bytes_again, global, n, c.num_experts, cases[k].expert_ranks, ranks,
				host), 0);
		assert_memory_equal(writer, again, n * sizeof *writer);
		for (int i = 0; i < n; i++) {
			assert_in_range(writer[i], 0, ranks - 1);
			sum[writer[i]] += 3 * parameter_size(&global[i]) * (int64_t)sizeof(real);
		}
		for (int r = 0; r < ranks; r++) {
			assert_int_equal(sum[r], bytes[r]);
			of_host[host[r]] += bytes[r], ranks_of[host[r]]++, all += bytes[r];
			hosts = host[r] >= hosts ? host[r] + 1 : hosts;
		}
		assert_int_equal(all, total);
		for (int h = 0; h < hosts; h++)
			assert_true(of_host[h] <= total / hosts * 1.05 && of_host[h] >= total / hosts * 0.95);
		for (int r = 0; r < ranks; r++) /* a rank can have no less than the largest tensor */
			assert_true(bytes[r] <= of_host[host[r]] / ranks_of[host[r]] * 1.34);
	}
	free(global);
}

/* checkpoint.every auto: sqrt(2 C M). */
static void save_interval(void **state)
{
	(void)state;
	static struct config c;
	c.checkpoint.mtbf = 10;
	struct save_schedule s = save_schedule_start(&c, 100);
	save_schedule_step(&s, 100); /* the first step counts only as long as it is alone */
	for (int i = 0; i < 9; i++) {
		assert_false(save_schedule_due(&s, 101 + i));
		save_schedule_step(&s, 2);
	}
	assert_true(save_schedule_due(&s, 110));
	assert_false(save_schedule_saved(&s, 110, -1)); /* it failed: the same later again */
	assert_false(save_schedule_due(&s, 111));
	assert_true(save_schedule_due(&s, 120));
	assert_true(save_schedule_saved(&s, 120, 0.5));
	assert_int_equal(s.interval, 94); /* sqrt(2 0.5 36000) = 189.7 s of 2 s each */
	assert_false(save_schedule_due(&s, 213));
	assert_true(save_schedule_due(&s, 214));
	assert_false(save_schedule_saved(&s, 214, 0.55)); /* no great change */
	assert_int_equal(s.interval, 94);
	assert_true(save_schedule_saved(&s, 308, 1.5));
	assert_in_range(s.interval, 134, 137); /* C is the mean of 1.5 and of what it was */
	assert_true(save_schedule_saved(&s, 444, 1e12));
	assert_true(s.interval > 1e6);
	/* or after a minute */
	s = save_schedule_start(&c, 0);
	assert_false(save_schedule_due(&s, 1));
	s.began -= 61;
	assert_true(save_schedule_due(&s, 1));
	assert_false(save_schedule_saved(&s, 1, -1)); /* when that failed, again a minute later, not in each step */
	assert_false(save_schedule_due(&s, 2));
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(checkpoint_round_trip), TEST(checkpoint_parts), TEST(checkpoint_refused), TEST(checkpoint_wrong_fields),
		TEST(checkpoint_prunes), TEST(checkpoint_not_whole), TEST(checkpoint_interrupted),
		TEST(checkpoint_damage), TEST(checkpoint_keep_every), TEST(checkpoint_no_room), TEST(writers_balanced),
		TEST(save_interval),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
