/*
 * test_resume.c - what a run saves and what it continues from, at its borders: each tensor by itself damaged, numbers
 * that are not finite, checkpoints that are not whole between others.
 */
#define _GNU_SOURCE
#include "tests/test.h"

#include "kernels.h"
#include "files/checkpoint.h"
#include "files/config.h"
#include "ling.h"
#include "training/start.h"
#include "training/loop.h"

#include <unistd.h>

#define assert_done(call) do { if ((call) < 0) fail_msg("%s", error_text); } while (0)

/* A run of a small model, of 9 windows of 8 ids, whose directory is scratch/run. */
static void make_config(struct config *c)
{
	char yaml[2048];
	uint16_t ids[9 * 8 + 1];
	for (int i = 0; i < COUNT(ids); i++)
		ids[i] = i * 7 % 33;
	put_file(at("ids.bin"), ids, sizeof ids);
	snprintf(yaml, sizeof yaml,
		"model: { hidden_size: 8, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 1,\n"
		"  head_dim: 4, vocab_size: 33, num_experts: 4, num_experts_per_tok: 2, num_shared_experts: 1,\n"
		"  moe_intermediate_size: 4, use_bias: on, use_qkv_bias: on, initializer_range: 0.1 }\n"
		"data: { train: [{ path: %s, dtype: uint16 }], seq_len: 8 }\n"
		"train: { output_dir: %s, steps: 5, micro_batch: 2, batch: 3 }\nschedule: { peak_lr: 1.0e-3 }\n",
		at("ids.bin"), at("run"));
	assert_done(config_load(c, put_string(at("run.yaml"), yaml), 0, NULL, false));
}

/* Does one step, with *t ready to be saved. */
static void make_step(struct trainer *t, const struct config *c)
{
	struct metrics m = {0};
	assert_done(trainer_init(t, c));
	const int64_t batch = trainer_next_batch(t);
	assert_int_equal(batch, 3);
	assert_done(trainer_step(t, batch, &m));
}

/* Changes one bit of byte `place` of a file. */
static void flip(const char *path, int64_t place)
{
	FILE *f = fopen(path, "r+");
	assert_non_null(f);
	assert_int_equal(fseek(f, place, SEEK_SET), 0);
	const int byte = getc(f);
	assert_int_equal(fseek(f, place, SEEK_SET), 0);
	putc(byte ^ 4, f);
	assert_int_equal(fclose(f), 0);
}

/* Each tensor has a checksum that is looked at: whichever is damaged, nothing continues from it, and of the weights
 * nothing is evaluated. */
static void every_tensor_is_checked(void **state)
{
	(void)state;
	static const char *const stems[] = {"model", "optimizer"};
	struct config c;
	struct trainer t;
	make_config(&c);
	make_step(&t, &c);
	assert_done(trainer_save(&t));
	trainer_free(&t);
	for (int k = 0; k < 2; k++) {
		char dir[PATH_LEN], path[PATH_LEN], expected[256];
		strcpy(dir, at("run/step-0000001"));
		assert_done(path_join(path, dir, k ? "optimizer.safetensors" : "model.safetensors"));
		struct tensors *w = tensors_open(dir, stems[k]);
		assert_non_null(w);
		const int n = tensors_count(w);
		int64_t *places = allocate(2 * n * sizeof *places), *ends = places + n;
		char (*names)[256] = allocate(n * sizeof *names);
		for (int i = 0; i < n; i++) {
			const struct tensor *x = tensor_find(w, tensors_name(w, i));
			places[i] = x->file->data_at + x->begin, ends[i] = x->file->data_at + x->end;
			snprintf(names[i], sizeof names[i], "%s", x->name);
		}
		tensors_close(w);
		assert_true(n >= 30);
		for (int i = 0; i < n; i++) {
			/* the first, a middle or the last byte */
			const int64_t place = i % 3 == 0 ? places[i] : i % 3 == 1 ? (places[i] + ends[i]) / 2 : ends[i] - 1;
			snprintf(expected, sizeof expected, "tensor %s is damaged", names[i]);
			flip(path, place);
			if (trainer_init(&t, &c) == 0)
				fail_msg("continued although %s is damaged", names[i]);
			expect_error(expected);
			if (k == 0) {
				struct model m = {0};
				const struct layout alone = layout_of_rank(0, 1, 1, 1);
				assert_done(model_init(&m, &c.model, &alone, 1, 8, EVALUATE));
				if (model_load(&m, dir) == 0)
					fail_msg("loaded although %s is damaged", names[i]);
				expect_error(expected);
				model_free(&m);
			}
			flip(path, place);
		}
		free(places), free(names);
	}
	assert_done(trainer_init(&t, &c));
	assert_int_equal(t.state.step, 1);
	trainer_free(&t);
}

/* A number that is not finite, wherever it is in weights or moments, is not saved. */
static void nothing_infinite_is_saved(void **state)
{
	(void)state;
	struct config c;
	struct trainer t;
	make_config(&c);
	make_step(&t, &c);
	const struct { real *x; int64_t n; } blocks[] = {
		{t.model.params.memory, t.model.table.num_elements}, {t.model.exp_avg, t.model.table.num_state},
		{t.model.exp_avg_sq, t.model.table.num_state},
	};
	const real bad[] = {INFINITY, -INFINITY, NAN};
	for (int b = 0; b < COUNT(blocks); b++)
		for (int i = 0; i < COUNT(bad); i++) {
			real *x = blocks[b].x + (i == 0 ? blocks[b].n - 1 : i == 1 ? 0 : blocks[b].n / 2), before = *x;
			*x = bad[i];
			if (trainer_save(&t) == 0)
				fail_msg("%g in block %d was saved", (double)bad[i], b);
			expect_error("after step 1 |not finite|not saved");
			assert_false(exists(at("run/step-0000001")) || exists(at("run/.tmp-step-0000001")));
			*x = before;
		}
	assert_done(trainer_save(&t));
	assert_true(exists(at("run/step-0000001/trainer.json")));
	trainer_free(&t);
}

/* checkpoint.keep counts checkpoints that are whole: one that is not, between two good ones, takes nobody's place. */
static void only_whole_ones_are_kept(void **state)
{
	(void)state;
	struct config c;
	struct trainer t;
	make_config(&c);
	make_step(&t, &c);
	for (int step = 1; step <= 5; step++) {
		t.state.step = step;
		t.config.checkpoint.keep = step < 4 ? 0 : 2;
		if (step == 4)
			assert_int_equal(unlink(at("run/step-0000003/trainer.json")), 0);
		assert_done(trainer_save(&t));
		/* after 4: 4 and 2 are whole, 3 is not and is left alone; after 5: 5 and 4 */
		static const bool there[6][6] = {{0}, {0, 1}, {0, 1, 1}, {0, 1, 1, 1}, {0, 0, 1, 1, 1}, {0, 0, 0, 1, 1, 1}};
		for (int i = 1; i <= 5; i++)
			if (exists(at("run/step-%07d", i)) != there[step][i])
				fail_msg("after step %d the checkpoint of step %d is %s", step, i, there[step][i] ? "gone" : "there");
	}
	trainer_free(&t);
}

int main(void)
{
	kernels_init(false);
	const struct CMUnitTest tests[] = {
		TEST(every_tensor_is_checked), TEST(nothing_infinite_is_saved), TEST(only_whole_ones_are_kept),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
