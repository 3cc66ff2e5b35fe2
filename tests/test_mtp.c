/*
 * Multi-token prediction in training: losses and inputs against plain loops, gradients against differences of the loss.
 * Built in float and in double.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "data.h"
#include "model/parameters.h"
#include "model/memory.h"
#include "model/weights.h"
#include "ling.h"
#include "training/start.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "test.h"

enum { L = 7, V = 23, H = 8, BATCH = 5 };

#define assert_done(call) do { if ((call) < 0) fail_msg("%s", error_text); } while (0)

/* Two layers, the first one dense, and `mtp` MTP layers. */
static struct config make_config(int mtp)
{
	return (struct config){
		.model = {.hidden_size = H, MODEL_DEFAULTS, .num_hidden_layers = 2, .first_k_dense_replace = 1,
				.intermediate_size = 9, .num_attention_heads = 4, .num_key_value_heads = 2, .head_dim = 6,
				.vocab_size = V, .num_experts = 4, .num_experts_per_tok = 2, .num_shared_experts = 1,
				.moe_intermediate_size = 5, .rope_theta = 100, .rms_norm_eps = 1e-6, .initializer_range = 0.3,
				.norm_topk_prob = true, .num_nextn_predict_layers = mtp, .mtp_loss_scaling_factor = 0.3,
				.router = {.balance_loss_coef = 0.5, .z_loss_coef = 0.1, .balance_loss_scope = SCOPE_SEQUENCE}},
		.data = {.seq_len = L, .document_mask = true},
		.train = {.steps = 3, .micro_batch = 2, .batch = BATCH, .grad_clip = 1},
		.optimizer = {0.9, 0.95, 1e-8, 0.1}, .schedule = {.peak_lr = 1e-2}, .log.every = 1,
		.parallel.tensor = 1, .parallel.expert = 1,
	};
}

/* A trainer whose gradients are not 0 before the first step, with random weights and norms that are not 1, and a batch
 * in which some targets do not count. With `documents`, a window has two of them. */
static void make_trainer(struct trainer *t, const struct config *c, bool documents)
{
	assert_done(trainer_allocate(t, c));
	model_randomize(&t->model, 1);
	for (int i = 0; i < t->model.table.num_parameters; i++) {
		const struct parameter *p = &t->model.table.parameters[i];
		for (int64_t j = 0; p->init == INIT_ONES && j < p->rows; j++)
			t->model.params.memory[p->offset + j] = (real)(1 + 0.3 * sin(j + i));
	}
	for (int64_t i = 0; i < t->model.table.num_elements; i++)
		t->model.grads.memory[i] = NAN;
	const int64_t length = c->data.seq_len;
	for (int64_t i = 0; i < c->train.batch * length; i++) {
		t->input[i] = (int32_t)((i * i + 3 * i) % V);
		t->target[i] = i % length + 1 < length ? (int32_t)(((i + 1) * (i + 1) + 3 * (i + 1)) % V) : (int32_t)(i % V);
		t->document[i] = documents ? (int32_t)(i % length / 4 * 4) : 0;
		if (i % 11 == 4 || (documents && i % length % 4 == 3))
			t->target[i] = -1;
	}
	for (int64_t b = 0; b < c->train.batch; b++)
		t->length[b] = (int32_t)length;
}

/* The loss whose gradient trainer_step computes. */
static double total_loss(const struct trainer *t, const struct metrics *m)
{
	const struct model_config *c = &t->config.model;
	return m->loss + c->mtp_loss_scaling_factor * c->num_nextn_predict_layers * m->mtp_loss +
			(num_layers(c) - c->first_k_dense_replace) *
			(c->router.balance_loss_coef * m->balance_loss + c->router.z_loss_coef * m->z_loss);
}

/* A step that moves no weight. */
static struct metrics step_in_place(struct trainer *t)
{
	struct metrics m;
	t->state.step = 0;
	assert_int_equal(trainer_step(t, t->config.train.batch, &m), STEP_TAKEN);
	return m;
}

/* Central differences through the whole model: one and two MTP layers, head and embedding tied and not, documents. */
static void test_finite_differences(void **state)
{
	(void)state;
	if (sizeof(real) < 8)
		skip();
	for (int i = 0; i < 4; i++) {
		struct config c = make_config(1 + i % 2);
		struct trainer t;
		c.model.tie_word_embeddings = i / 2;
		c.schedule.peak_lr = 1e-300;
		make_trainer(&t, &c, i == 3);
		step_in_place(&t);
		const int64_t n = t.model.table.num_elements;
		real *gradient = malloc(n * sizeof *gradient), *w = t.model.params.memory;
		memcpy(gradient, t.model.grads.memory, n * sizeof *gradient);
		double worst = 0;
		const char *where = "";
		for (int p = 0; p < t.model.table.num_parameters; p++) {
			const struct parameter *x = &t.model.table.parameters[p];
			double difference = 0, norm = 1e-8; /* an expert without tokens has no gradient */
			for (int64_t j = x->offset; j < x->offset + parameter_size(x); j += x->cols ? 9 : 1) {
				double loss[2];
				const real keep = w[j], h = (real)1e-5;
				for (int side = 0; side < 2; side++) {
					w[j] = keep + (side ? h : -h);
					const struct metrics m = step_in_place(&t);
					loss[side] = total_loss(&t, &m);
				}
				w[j] = keep;
				const double numeric = (loss[1] - loss[0]) / (2 * h);
				difference += (numeric - gradient[j]) * (numeric - gradient[j]);
				norm += numeric * numeric;
			}
			if (sqrt(difference / norm) > worst)
				worst = sqrt(difference / norm), where = x->name;
		}
		if (!(worst < 1e-6))
			fail_msg("case %d: the gradient of %s is off by %g of its norm", i, where, worst);
		free(gradient);
		trainer_free(&t);
	}
}

/* -log softmax(head(normed)) at `target`, by plain loops. */
static double plain_loss(const struct trainer *t, const real *normed, int32_t target)
{
	double logit[V], largest = -INFINITY, sum = 0;
	for (int v = 0; v < V; v++) {
		logit[v] = 0;
		for (int j = 0; j < H; j++)
			logit[v] += (double)normed[j] * t->model.params.lm_head[v * H + j];
		largest = fmax(largest, logit[v]);
	}
	for (int v = 0; v < V; v++)
		sum += exp(logit[v] - largest);
	return largest + log(sum) - logit[target];
}

static void plain_norm(double *out, const real *x, const real *w)
{
	double square = 0;
	for (int j = 0; j < H; j++)
		square += (double)x[j] * x[j] / H;
	for (int j = 0; j < H; j++)
		out[j] = w[j] * x[j] / sqrt(square + 1e-6);
}

/* The input of a depth at place t is made of the right token and the right hidden state. */
static void check_input(const struct trainer *t, int depth, int64_t place, int32_t token)
{
	const struct activations *a = &t->model.acts;
	const int l = 1 + depth;
	const struct layer_params *p = &t->model.params.layer[l];
	double joined[2 * H];
	plain_norm(joined, t->model.params.embedding + token * H, p->embedding_norm);
	plain_norm(joined + H, a->depth[depth - 1].normed + place * H, p->hidden_norm);
	for (int j = 0; j < H; j++) {
		double sum = 0;
		for (int k = 0; k < 2 * H; k++)
			sum += joined[k] * p->eh_proj[j * 2 * H + k];
		if (!(fabs(sum - a->layer[l].input[place * H + j]) < 1e-5))
			fail_msg("depth %d, place %lld: the input is %g, expected %g", depth, (long long)place,
					a->layer[l].input[place * H + j], sum);
	}
}

/* Which token each place sees and predicts, and which places count: by the sequences themselves. */
static void test_shifts(void **state)
{
	(void)state;
	for (int documents = 0; documents < 2; documents++) {
		struct config c = make_config(2);
		struct trainer t;
		struct metrics m;
		c.train.micro_batch = BATCH;
		c.schedule.peak_lr = 1e-300;
		make_trainer(&t, &c, documents);
		assert_int_equal(trainer_step(&t, BATCH, &m), STEP_TAKEN);
		double mean = 0;
		int counted[3] = {0};
		for (int depth = 0; depth <= 2; depth++) {
			double sum = 0;
			for (int b = 0; b < BATCH; b++) {
				int32_t sequence[L + 1], document[L + 1]; /* all of its tokens; -1: no target */
				for (int i = 0; i < L; i++) {
					sequence[i] = t.input[b * L + i];
					document[i] = documents ? i / 4 : 0;
				}
				for (int i = 0; i < L; i++) {
					const bool there = i + depth < L && document[i + depth] == document[i];
					const int32_t target = there ? t.target[b * L + i + depth] : -1;
					if (depth)
						check_input(&t, depth, b * L + i, there ? sequence[i + depth] : 0);
					if (target < 0)
						continue;
					sum += plain_loss(&t, t.model.acts.depth[depth].normed + (b * L + i) * H, target);
					counted[depth]++;
				}
			}
			if (depth == 0)
				assert_true(fabs(m.loss - sum / counted[0]) < 1e-5);
			else
				mean += sum / counted[depth] / 2;
		}
		assert_true(fabs(m.mtp_loss - mean) < 1e-5 && mean > 1);
		assert_int_equal(counted[0], documents ? 27 : 32);
		assert_int_equal(counted[1], documents ? 18 : 27);
		assert_int_equal(counted[2], documents ? 10 : 23);
		assert_int_equal(m.num_mtp_layers, 2);
		trainer_free(&t);
	}
}

/* The same global batch in micro-batches of 1, 2, 3 and 5, with the last ones short: same losses and gradients to
 * rounding. */
static void test_micro_batches(void **state)
{
	(void)state;
	static const int sizes[] = {5, 1, 2, 3};
	double *gradient = NULL, loss = 0;
	for (int i = 0; i < COUNT(sizes); i++) {
		struct config c = make_config(2);
		struct trainer t;
		struct metrics m;
		c.train.micro_batch = sizes[i];
		make_trainer(&t, &c, i % 2);
		memset(t.document, 0, BATCH * L * sizeof *t.document);
		for (int j = 0; j < BATCH * L; j++) /* the second sequence has few targets, the third none */
			t.target[j] = j / L == 2 || (j / L == 1 && j % L < 5) ? -1 : j % V;
		assert_int_equal(trainer_step(&t, BATCH, &m), STEP_TAKEN);
		const int64_t n = t.model.table.num_elements;
		if (i == 0) {
			gradient = calloc(n, sizeof *gradient);
			for (int64_t j = 0; j < n; j++)
				gradient[j] = t.model.grads.memory[j];
			loss = m.mtp_loss;
		}
		assert_true(fabs(m.mtp_loss / loss - 1) < 1e-6);
		assert_close(t.model.grads.memory, gradient, n, sizeof(real) == 8 ? 1e-13 : 2e-6, "gradients");
		trainer_free(&t);
	}
	free(gradient);
}

/* Recomputation does not change one bit of three steps, and takes less memory. */
static void test_recompute(void **state)
{
	(void)state;
	for (int mtp = 1; mtp <= 2; mtp++) {
		real *weights = NULL;
		size_t all = 0;
		for (int recompute = TRAIN_KEEP_ALL; recompute <= TRAIN_RECOMPUTE_LAYER; recompute++) {
			struct config c = make_config(mtp);
			struct trainer t;
			struct metrics m;
			c.train.recompute = recompute;
			c.model.router.warmup_steps = 2;
			make_trainer(&t, &c, true);
			const size_t bytes = t.model.table.num_elements * sizeof(real);
			for (int step = 1; step <= 3; step++)
				assert_int_equal(trainer_step(&t, BATCH, &m), STEP_TAKEN);
			if (recompute == TRAIN_KEEP_ALL) {
				weights = malloc(bytes);
				memcpy(weights, t.model.params.memory, bytes);
				all = t.model.acts_bytes;
			}
			assert_memory_equal(weights, t.model.params.memory, bytes);
			assert_true(recompute == TRAIN_KEEP_ALL || t.model.acts_bytes < all);
			trainer_free(&t);
		}
		free(weights);
	}
}

/* With a factor of 0 the MTP layers are as if they were not there: not computed, not changed, not even by weight decay
 * or by moments from before, and the other weights have the bits of a model without any. */
static void test_off(void **state)
{
	(void)state;
	for (int tied = 0; tied < 2; tied++) {
		struct trainer t[2];
		struct metrics m[2];
		real *before = NULL;
		for (int i = 0; i < 2; i++) {
			struct config c = make_config(i ? 2 : 0);
			c.model.mtp_loss_scaling_factor = 0;
			c.model.tie_word_embeddings = tied;
			make_trainer(&t[i], &c, true);
		}
		const int64_t n = t[0].model.table.num_elements, all = t[1].model.table.num_elements;
		assert_true(all > n);
		copy_array(t[1].model.params.memory, t[0].model.params.memory, n);
		for (int64_t j = n; j < all; j++)
			t[1].model.exp_avg[j] = t[1].model.exp_avg_sq[j] = 1;
		before = malloc(all * sizeof *before);
		copy_array(before, t[1].model.params.memory, all);
		for (int step = 0; step < 3; step++)
			for (int i = 0; i < 2; i++)
				assert_int_equal(trainer_step(&t[i], BATCH, &m[i]), STEP_TAKEN);
		assert_memory_equal(t[0].model.params.memory, t[1].model.params.memory, n * sizeof *before);
		assert_memory_equal(before + n, t[1].model.params.memory + n, (all - n) * sizeof *before);
		assert_true(memcmp(before, t[1].model.params.memory, n * sizeof *before));
		for (int64_t j = n; j < all; j++)
			assert_true(t[1].model.grads.memory[j] == 0);
		assert_true(m[0].loss == m[1].loss && m[0].grad_norm == m[1].grad_norm && m[1].mtp_loss == 0);
		assert_int_equal(m[1].num_mtp_layers, 0);
		assert_int_equal(m[1].num_layers, 1);
		assert_int_equal(t[0].model.acts_bytes, t[1].model.acts_bytes);
		free(before);
		trainer_free(&t[0]);
		trainer_free(&t[1]);
	}
}

/* Evaluation, and the loss of training, do not depend on the weights of MTP layers; and the MTP layers do not change
 * the first step's main loss. */
static void test_evaluation(void **state)
{
	(void)state;
	struct config c = make_config(2);
	struct trainer t;
	struct metrics m;
	struct model model;
	double window[2][BATCH];
	make_trainer(&t, &c, false);
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	assert_done(model_init(&model, &c.model, &alone, BATCH, L, EVALUATE));
	const int64_t n = model.table.num_elements;
	copy_array(model.params.memory, t.model.params.memory, n);
	for (int i = 0; i < 2; i++) {
		model_forward(&model, t.input, BATCH, NULL, NULL);
		model_loss(&model, t.target, BATCH, NULL, window[i]);
		for (int64_t j = model.params.layer[2].attention_norm - model.params.memory; j < n; j++)
			model.params.memory[j] = NAN;
	}
	assert_memory_equal(window[0], window[1], sizeof window[0]);
	assert_int_equal(trainer_step(&t, BATCH, &m), STEP_TAKEN);
	double sum = 0;
	for (int b = 0; b < BATCH; b++)
		sum += window[0][b];
	assert_true(sum > 1 && fabs(m.loss * 32 / sum - 1) < 1e-6);
	model_free(&model);
	trainer_free(&t);
}

/* A micro-batch without any sequence writes every gradient, as zero, or leaves it as it is; and windows of one token,
 * which have no target for an MTP layer, have a loss of 0 there. */
static void test_nothing(void **state)
{
	(void)state;
	struct config c = make_config(2);
	struct trainer t;
	struct metrics m;
	make_trainer(&t, &c, false);
	struct step step = {.num_tokens = 1, .num_targets = {1, 1, 1}, .router_mean = t.state.router_mean,
			.router_std = t.state.router_std};
	for (int i = 0; i < 2; i++) {
		model_forward(&t.model, t.input, 0, &step, &t.sums);
		assert_true(model_loss(&t.model, t.target, 0, &step, NULL) == 0);
		model_backward(&t.model, t.input, 0, &step, NULL);
		for (int64_t j = 0; j < t.model.table.num_elements; j++)
			assert_true(t.model.grads.memory[j] == i);
		for (int64_t j = 0; j < t.model.table.num_elements; j++)
			t.model.grads.memory[j] = 1;
		step.accumulate = true;
	}
	trainer_free(&t);
	c.data.seq_len = 1;
	make_trainer(&t, &c, false);
	assert_int_equal(trainer_step(&t, BATCH, &m), STEP_TAKEN);
	assert_true(m.loss > 1 && m.mtp_loss == 0 && isfinite(m.grad_norm));
	trainer_free(&t);
}

/* Documents packed into windows have the losses, the routers' included, and the gradients that they have alone. */
static void test_packed_documents(void **state)
{
	(void)state;
	enum { DOCUMENTS = 4 };
	static const int length[DOCUMENTS] = {7, 3, 4, 2}; /* three windows, the last with five tokens of padding */
	struct config c = make_config(2);
	struct trainer packed, alone;
	struct metrics m[2];
	c.model.router.balance_loss_scope = SCOPE_MICRO_BATCH;
	c.schedule.peak_lr = 1e-300;
	c.train.micro_batch = c.train.batch = DOCUMENTS;
	make_trainer(&packed, &c, false);
	make_trainer(&alone, &c, false);
	for (int i = 0; i < DOCUMENTS * L; i++) {
		packed.target[i] = alone.target[i] = -1;
		packed.document[i] = alone.document[i] = 2; /* padding */
	}
	packed.length[2] = 2;
	for (int d = 0, at = 0; d < DOCUMENTS; at += length[d++]) {
		alone.length[d] = length[d];
		for (int i = 0; i < L; i++)
			alone.document[d * L + i] = i < length[d] ? 0 : length[d];
		for (int i = 0; i < length[d]; i++) {
			packed.document[at + i] = at % L;
			packed.input[at + i] = alone.input[d * L + i] = 11 * (at + i) % V;
			if (i > 0)
				packed.target[at + i - 1] = alone.target[d * L + i - 1] = 11 * (at + i) % V;
		}
	}
	assert_int_equal(trainer_step(&packed, 3, &m[0]), STEP_TAKEN);
	assert_int_equal(trainer_step(&alone, DOCUMENTS, &m[1]), STEP_TAKEN);
	const double tolerance = sizeof(real) == 8 ? 1e-12 : 1e-5;
	assert_true(fabs(m[0].loss / m[1].loss - 1) < tolerance && m[0].loss > 1);
	assert_true(fabs(m[0].mtp_loss / m[1].mtp_loss - 1) < tolerance && m[0].mtp_loss > 1);
	assert_true(fabs(m[0].balance_loss / m[1].balance_loss - 1) < tolerance);
	assert_true(fabs(m[0].z_loss / m[1].z_loss - 1) < tolerance);
	const int64_t n = packed.model.table.num_elements;
	double *expected = malloc(n * sizeof *expected);
	for (int64_t i = 0; i < n; i++)
		expected[i] = alone.model.grads.memory[i];
	assert_close(packed.model.grads.memory, expected, n, tolerance, "gradient of packed documents");
	free(expected);
	trainer_free(&packed);
	trainer_free(&alone);
}

int main(void)
{
	kernels_init(false);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_finite_differences), cmocka_unit_test(test_shifts), cmocka_unit_test(test_micro_batches),
		cmocka_unit_test(test_recompute), cmocka_unit_test(test_off), cmocka_unit_test(test_evaluation),
		cmocka_unit_test(test_nothing), cmocka_unit_test(test_packed_documents),
	};
	return cmocka_run_group_tests_name("mtp", tests, NULL, NULL);
}
