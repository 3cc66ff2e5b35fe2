/*
 * The model and the optimizer step against numbers from PyTorch (tests/fixtures, made by scripts/reference.py), and the
 * corners of losses and schedules by hand-made values. Built in float and in double.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "files/tensors.h"
#include "files/safetensors.h"
#include "files/tokenizer.h"
#include "files/checkpoint.h"
#include "data.h"
#include "ling.h"
#include "training/start.h"
#include "commands/engine.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "test.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define FIXTURES "tests/fixtures/"
#ifdef LING_DOUBLE
#define TOLERANCE 2e-7 /* of arrays that are stored in float32 */
#define TOLERANCE_F64 1e-11
#else
#define TOLERANCE 1e-5
#define TOLERANCE_F64 1e-5
#endif

static const char *const cases[] = {"base", "no_norm_head", "tied_norm_head", "tied_plain", "shared0", "head_dim",
		"dense_first",
	"scope_sequence", "biases", "routing_warmup", "k1_no_renorm", "no_topk_norm", "odd_sizes",
	"v2_base", "v2_plain", "v2_groups", "v2_mtp2", "v2_mtp_of_dense", "v2_no_topk_norm", "v2_k1",
	"v2_routing_warmup"};
enum { NUM_CASES = sizeof cases / sizeof *cases };

#define assert_done(call) do { if ((call) < 0) fail_msg("%s", error_text); } while (0)

/* A step that a spike's detector or a gradient that is not finite does not stop. */
#define assert_taken(step) do { if ((step) != STEP_TAKEN) fail_msg("no step: %s", error_text); } while (0)

/* A trainer without data files: the tests fill input and target themselves. */
static void make_trainer(struct trainer *t, const struct config *c)
{
	assert_done(trainer_allocate(t, c));
	/* Nothing may depend on what gradients were before. */
	for (int64_t i = 0; i < t->model.table.num_elements; i++)
		t->model.grads.memory[i] = NAN;
}

static void load_fixture(struct trainer *t, const char *name)
{
	char path[256];
	snprintf(path, sizeof path, FIXTURES "%s/weights.safetensors", name);
	assert_done(model_load(&t->model, path));
}

static void load_case(struct config *c, struct trainer *t, struct tensors **expected, const char *name)
{
	char path[256];
	snprintf(path, sizeof path, FIXTURES "%s/case.yaml", name);
	assert_done(config_load(c, path, 0, NULL, false));
	make_trainer(t, c);
	load_fixture(t, name);
	snprintf(path, sizeof path, FIXTURES "%s/expected.safetensors", name);
	*expected = tensors_open(path, "model");
	if (!*expected)
		fail_msg("%s", error_text);
}

/* The loss whose gradient trainer_step computes. */
static double total_loss(const struct trainer *t, const struct metrics *m)
{
	const struct model_config *c = &t->config.model;
	int routers = 0;
	for (int l = 0; l < num_layers(c); l++)
		routers += has_experts(c, l);
	return m->loss + c->mtp_loss_scaling_factor * c->num_nextn_predict_layers * m->mtp_loss +
			routers * (c->router.balance_loss_coef * m->balance_loss + c->router.z_loss_coef * m->z_loss);
}

static void load_step(struct trainer *t, const struct tensors *expected, int step)
{
	char name[32];
	const int64_t n = (int64_t)t->config.train.batch * t->config.data.seq_len;
	snprintf(name, sizeof name, "input.%d", step);
	assert_done(tensors_read_int(expected, name, n, t->input));
	snprintf(name, sizeof name, "target.%d", step);
	assert_done(tensors_read_int(expected, name, n, t->target));
}

/* Compares found [rows, cols], or [rows] with cols 0, with the array `name` of the file, as exactly as its type
 * allows. */
static void compare(const struct tensors *w, const char *name, const real *found, int64_t rows, int64_t cols,
		const char *where)
{
	const int64_t n = rows * (cols ? cols : 1);
	real *array = calloc(n, sizeof *array);
	double *expected = calloc(n, sizeof *expected);
	char what[256];
	assert_done(tensors_read(w, &(struct named_tensor){name, rows, cols, array}));
	for (int64_t i = 0; i < n; i++)
		expected[i] = array[i];
	snprintf(what, sizeof what, "%s: %s", where, name);
	assert_close(found, expected, n, tensor_find(w, name)->dtype == F64 ? TOLERANCE_F64 : TOLERANCE, what);
	free(array), free(expected);
}

/* The logits of the training forward pass, micro-batch by micro-batch; those of each router and the weights of the
 * chosen experts, where the file has them. */
static void check_logits(struct trainer *t, const struct tensors *expected, const char *name)
{
	const struct config *c = &t->config;
	const int64_t L = c->data.seq_len, V = c->model.vocab_size, E = c->model.num_experts, T = c->train.batch * L;
	const int k = c->model.num_experts_per_tok, layers = num_layers(&c->model);
	real *logits = calloc(T * V, sizeof *logits), *router_logits = calloc(layers * T * E, sizeof *router_logits),
			*router_weights = calloc(layers * T * E, sizeof *router_weights);
	struct step step = {.seed = c->train.seed, .num_tokens = T, .num_targets = {1},
			.router_mean = t->state.router_mean, .router_std = t->state.router_std};
	for (int b = 0; b < c->train.batch; b += c->train.micro_batch) {
		int B = c->train.batch - b < c->train.micro_batch ? c->train.batch - b : c->train.micro_batch;
		step.first_sequence = b;
		model_forward(&t->model, t->input + b * L, B, &step, &t->sums);
		model_logits(&t->model, logits + b * L * V, 0, B * L);
		for (int l = 0; l < layers; l++) {
			const struct layer_activations *x = &t->model.acts.layer[l];
			if (!has_experts(&c->model, l) || c->model.score_function != SCORE_SIGMOID)
				continue; /* of a softmax, the logits are not kept */
			copy_array(router_logits + (l * T + b * L) * E, x->logits, B * L * E);
			for (int64_t i = 0; i < B * L * k; i++)
				router_weights[(l * T + b * L + i / k) * E + x->index[i]] = x->weight[i];
		}
	}
	compare(expected, "logits", logits, T, V, name);
	for (int l = 0; l < layers; l++) {
		char what[32];
		snprintf(what, sizeof what, "router_logits.%d", l);
		if (!tensors_has(expected, what))
			continue;
		compare(expected, what, router_logits + l * T * E, T, E, name);
		snprintf(what, sizeof what, "router_weights.%d", l);
		compare(expected, what, router_weights + l * T * E, T, E, name);
	}
	free(logits), free(router_logits), free(router_weights);
}

/* Five optimizer steps: logits, every gradient of step 1, every loss part, norm, rate, and the weights after step 5. */
static void test_golden(void **state)
{
	const char *name = *state;
	struct config c;
	struct trainer t;
	struct tensors *expected;
	load_case(&c, &t, &expected, name);
	real parts[6][5];
	for (int step = 1; step <= 5; step++) {
		struct metrics m;
		load_step(&t, expected, step);
		if (step == 1)
			check_logits(&t, expected, name);
		assert_taken(trainer_step(&t, c.train.batch, &m));
		for (int i = 0; step == 1 && i < t.model.table.num_parameters; i++) {
			const struct parameter *x = &t.model.table.parameters[i];
			char grad[MAX_NAME + 8];
			snprintf(grad, sizeof grad, "grad.%s", x->name);
			compare(expected, grad, t.model.grads.memory + x->offset, x->rows, x->cols, name);
		}
		assert_int_equal(m.step, step);
		const double values[] = {m.loss, m.mtp_loss, m.balance_loss, m.z_loss, m.grad_norm, m.lr};
		for (int i = 0; i < 6; i++)
			parts[i][step - 1] = (real)values[i];
	}
	static const char *const names[] = {"loss", "mtp_loss", "balance_loss", "z_loss", "grad_norm", "lr"};
	for (int i = 0; i < 6; i++)
		if (i != 1 || c.model.num_nextn_predict_layers)
			compare(expected, names[i], parts[i], 5, 0, name);
	for (int i = 0; i < t.model.table.num_parameters; i++) {
		const struct parameter *x = &t.model.table.parameters[i];
		char after[MAX_NAME + 8];
		snprintf(after, sizeof after, "after.%s", x->name);
		if (tensors_has(expected, after))
			compare(expected, after, t.model.params.memory + x->offset, x->rows, x->cols, name);
	}
	if (tensors_has(expected, "router_mean")) {
		real statistics[64];
		for (int l = 0; l < t.state.num_layers; l++)
			statistics[l] = (real)t.state.router_mean[l];
		compare(expected, "router_mean", statistics, t.state.num_layers, 0, name);
		for (int l = 0; l < t.state.num_layers; l++)
			statistics[l] = (real)t.state.router_std[l];
		compare(expected, "router_std", statistics, t.state.num_layers, 0, name);
	}
	tensors_close(expected);
	trainer_free(&t);
}

/* Hugging Face directories in bfloat16 (two shards and an index; Ling 2.0) and float16. */
static void test_huggingface(void **state)
{
	const char *name = *state;
	char path[256];
	struct model_config c;
	struct model m;
	enum { L = 8 };
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	snprintf(path, sizeof path, FIXTURES "%s", name);
	assert_done(config_from_huggingface(&c, path));
	snprintf(path, sizeof path, FIXTURES "%s/expected.safetensors", name);
	struct tensors *expected = tensors_open(path, "model");
	assert_non_null(expected);
	const int B = (int)(tensor_find(expected, "input")->shape[0] / L);
	int32_t input[4 * L], target[4 * L];
	assert_in_range(B, 1, 4);
	assert_done(tensors_read_int(expected, "input", B * L, input));
	assert_done(tensors_read_int(expected, "target", B * L, target));
	assert_done(model_init(&m, &c, &alone, B, L, EVALUATE));
	snprintf(path, sizeof path, FIXTURES "%s", name);
	assert_done(model_load(&m, path));
	model_forward(&m, input, B, NULL, NULL);
	int valid = 0;
	for (int i = 0; i < B * L; i++)
		valid += target[i] >= 0;
	real loss = (real)(model_loss(&m, target, B, NULL, NULL) / valid);
	compare(expected, "loss", &loss, 1, 0, name);
	tensors_close(expected);
	model_free(&m);
}

/* The same global batch in micro-batches of 1, 2, 3 and 4: same loss and gradients to rounding (sequence scope). */
static void test_micro_batches(void **state)
{
	(void)state;
	static const char *const names[] = {"scope_sequence", "v2_mtp2"};
	for (int i = 0; i < COUNT(names); i++) {
		double *gradient = NULL, loss = 0;
		for (int micro = 1; micro <= 4; micro++) {
			struct config c;
			struct trainer t;
			struct tensors *expected;
			struct metrics m;
			load_case(&c, &t, &expected, names[i]);
			trainer_free(&t);
			c.train.micro_batch = micro;
			make_trainer(&t, &c);
			load_fixture(&t, names[i]);
			load_step(&t, expected, 1);
			assert_taken(trainer_step(&t, c.train.batch, &m));
			if (micro == 1) {
				gradient = calloc(t.model.table.num_elements, sizeof *gradient);
				for (int64_t j = 0; j < t.model.table.num_elements; j++)
					gradient[j] = t.model.grads.memory[j];
				loss = total_loss(&t, &m);
			}
			assert_true(fabs(total_loss(&t, &m) - loss) <= 1e-6 * loss);
			assert_close(t.model.grads.memory, gradient, t.model.table.num_elements, sizeof(real) == 8 ? 1e-13 : 2e-6,
					"gradients of a micro-batch");
			tensors_close(expected);
			trainer_free(&t);
		}
		free(gradient);
	}
}

/* Recomputation changes where activations are kept and not one bit of a training step, and takes less memory. */
static void test_recompute(void **state)
{
	(void)state;
	static const char *const names[] = {"dense_first", "routing_warmup", "biases", "v2_base", "v2_mtp2", "v2_groups",
		"v2_routing_warmup"};
	for (int i = 0; i < COUNT(names); i++) {
		real *gradient = NULL, *weights_after = NULL;
		for (int recompute = TRAIN_KEEP_ALL; recompute <= TRAIN_RECOMPUTE_LAYER; recompute++) {
			struct config c;
			struct trainer t;
			struct tensors *expected;
			struct metrics m;
			load_case(&c, &t, &expected, names[i]);
			trainer_free(&t);
			c.train.recompute = recompute;
			make_trainer(&t, &c);
			load_fixture(&t, names[i]);
			const size_t bytes = t.model.table.num_elements * sizeof(real);
			for (int step = 1; step <= 3; step++) {
				load_step(&t, expected, step);
				assert_taken(trainer_step(&t, c.train.batch, &m));
			}
			if (recompute == TRAIN_KEEP_ALL) {
				gradient = malloc(bytes), weights_after = malloc(bytes);
				memcpy(gradient, t.model.grads.memory, bytes), memcpy(weights_after, t.model.params.memory, bytes);
			}
			assert_memory_equal(gradient, t.model.grads.memory, bytes);
			assert_memory_equal(weights_after, t.model.params.memory, bytes);
			tensors_close(expected);
			trainer_free(&t);
		}
		free(gradient), free(weights_after);
	}
}

/* A model of one layer whose attention and experts give zero, so that a token's logits are known: token 0 has loss
 * `first` and token 1 has loss `second` for target 0. */
static void make_table_model(struct trainer *t, double first, double second, int micro_batch, int batch, int L)
{
	struct config c = {
		.model = {.hidden_size = 4, MODEL_DEFAULTS,
				.num_hidden_layers = 1, .num_attention_heads = 2, .num_key_value_heads = 1,
				.head_dim = 2,
			.vocab_size = 5, .num_experts = 6, .num_experts_per_tok = 2, .moe_intermediate_size = 3,
					.rope_theta = 10000,
			.rms_norm_eps = 1e-12, .norm_topk_prob = true, .router = {.balance_loss_coef = 0.5, .z_loss_coef = 0.25}},
		.data = {.seq_len = L},
		.train = {.steps = 3, .micro_batch = micro_batch, .batch = batch},
		.optimizer = {0.9, 0.95, 1e-8, 0.1}, .schedule = {.peak_lr = 1e-3}, .log.every = 1,
		.parallel.tensor = 1, .parallel.expert = 1,
	};
	make_trainer(t, &c);
	struct params *p = &t->model.params;
	for (int i = 0; i < 4; i++)
		p->layer[0].attention_norm[i] = p->layer[0].ffn_norm[i] = p->norm[i] = 1;
	p->embedding[0 * 4 + 0] = p->embedding[1 * 4 + 1] = 1; /* RMSNorm makes it sqrt(H) = 2 */
	/* loss = ln(e^z + V - 1) - z, so z = ln((V - 1) / (e^loss - 1)) */
	p->lm_head[0] = (real)(log(4 / (exp(first) - 1)) / 2);
	p->lm_head[1] = (real)(log(4 / (exp(second) - 1)) / 2);
	for (int i = 0; i < batch * L; i++)
		t->target[i] = 0;
}

/* One token at loss 2 in one micro-batch and seven at loss 4 in another: 3.75, not 3. */
static void test_mean_over_all_tokens(void **state)
{
	(void)state;
	struct trainer t;
	struct metrics m;
	make_table_model(&t, 2, 4, 1, 2, 8);
	for (int i = 0; i < 8; i++)
		t.input[i] = 0, t.input[8 + i] = 1;
	for (int i = 1; i < 8; i++)
		t.target[i] = -1;
	t.target[8 + 3] = -1;
	assert_taken(trainer_step(&t, 2, &m));
	assert_true(fabs(m.loss - 3.75) < 1e-5);
	trainer_free(&t);
}

/* A batch without any valid target: loss 0, and only the router's losses have gradients. */
static void test_no_targets(void **state)
{
	(void)state;
	struct trainer t;
	struct metrics m;
	make_table_model(&t, 2, 4, 1, 2, 8);
	for (int i = 0; i < 16; i++)
		t.target[i] = -1;
	assert_taken(trainer_step(&t, 2, &m));
	assert_true(m.loss == 0);
	const real *router = t.model.grads.layer[0].router;
	double norm = sqrt(sum_of_squares(router, 6 * 4));
	assert_true(norm > 0 && fabs(norm / m.grad_norm - 1) < 1e-6);
	trainer_free(&t);
}

/* A micro-batch without any sequence, as a rank may have it: every gradient is written, as zero, or left as it is. That
 * of an expert bias is always zero. */
static void test_empty_micro_batch(void **state)
{
	(void)state;
	static const char *const names[] = {"biases", "v2_mtp2"};
	for (int n = 0; n < COUNT(names); n++) {
		struct config c;
		struct trainer t;
		struct tensors *expected;
		load_case(&c, &t, &expected, names[n]); /* gradients are NaN */
		struct step step = {.num_tokens = 1, .num_targets = {1}, .router_mean = t.state.router_mean,
				.router_std = t.state.router_std};
		for (int i = 0; i < 2; i++) {
			model_forward(&t.model, t.input, 0, &step, &t.sums);
			assert_true(model_loss(&t.model, t.target, 0, &step, NULL) == 0);
			model_backward(&t.model, t.input, 0, &step, NULL);
			for (int j = 0; j < t.model.table.num_parameters; j++) {
				const struct parameter *x = &t.model.table.parameters[j];
				real *gradient = t.model.grads.memory + x->offset;
				for (int64_t e = 0; e < x->rows * (x->cols ? x->cols : 1); e++) {
					assert_true(gradient[e] == (strstr(x->name, EXPERT_BIAS) ? 0 : i));
					gradient[e] = strstr(x->name, EXPERT_BIAS) ? 0 : 1;
				}
			}
			step.accumulate = true;
		}
		for (int64_t j = 0; j < t.sums.size; j++)
			assert_true(t.sums.values[j] == 0);
		tensors_close(expected);
		trainer_free(&t);
	}
}

/* All router weights zero: experts 0 .. k-1 win everywhere; an expert without tokens has a gradient of exactly zero. */
static void test_router_zero(void **state)
{
	(void)state;
	struct trainer t;
	struct metrics m;
	make_table_model(&t, 2, 4, 2, 2, 8);
	struct layer_params *p = &t.model.params.layer[0];
	for (int i = 0; i < 6 * 2 * 3 * 4; i++)
		p->gate_up[i] = (real)(0.1 * (i % 7 - 3));
	for (int i = 0; i < 6 * 4 * 3; i++)
		p->down[i] = (real)(0.1 * (i % 5 - 2));
	assert_taken(trainer_step(&t, 2, &m));
	const struct layer_activations *x = &t.model.acts.layer[0];
	for (int i = 0; i < 16; i++) {
		assert_int_equal(x->index[2 * i], 0);
		assert_int_equal(x->index[2 * i + 1], 1);
		assert_true(x->weight[2 * i] == 0.5 && x->weight[2 * i + 1] == 0.5);
	}
	/* E sum f P = 6 (1/2 + 1/2) / 6 = 1; z = ln(6)^2; the largest share is 1/2, the mean share 1/6. */
	assert_true(fabs(m.balance_loss - 1) < 1e-6);
	assert_true(fabs(m.z_loss - log(6) * log(6)) < 1e-6);
	assert_true(fabs(m.expert_load[0] - 3) < 1e-12);
	const struct layer_params *g = &t.model.grads.layer[0];
	double chosen = 0;
	for (int i = 0; i < 6 * 2 * 3 * 4; i++) {
		if (i < 2 * 2 * 3 * 4)
			chosen += fabs(g->gate_up[i]);
		else
			assert_true(g->gate_up[i] == 0);
	}
	for (int i = 2 * 4 * 3; i < 6 * 4 * 3; i++)
		assert_true(g->down[i] == 0);
	assert_true(chosen > 0);
	trainer_free(&t);
}

/* A loss that is not finite: shown, reported as a failure, the weights and the state untouched. */
static void test_not_finite(void **state)
{
	(void)state;
	struct trainer t;
	struct metrics m;
	make_table_model(&t, 2, 4, 1, 2, 8);
	t.model.params.lm_head[7] = NAN;
	real before = t.model.params.embedding[0];
	static const enum spike_action actions[] = {SPIKES_OFF, SPIKES_WATCH, SPIKES_LADDER};
	t.config.spikes = (struct spike_options){.window = 16, .warmup = 8, .max_skips = 3};
	spike_detector_free(&t.spikes);
	assert_done(spike_detector_init(&t.spikes, &t.config.spikes));
	for (int i = 0; i < COUNT(actions); i++) {
		const enum spike_action action = actions[i];
		t.config.spikes.action = t.spikes.options.action = action;
		assert_int_equal(trainer_step(&t, 2, &m), action < SPIKES_SKIP ? STEP_GO_BACK : STEP_SKIPPED);
		assert_true(isnan(m.loss) && m.step == 1);
		if (action < SPIKES_SKIP)
			expect_error("step 1|not finite");
		assert_true(t.model.params.embedding[0] == before && t.state.step == 0 && t.state.tokens == 0);
		assert_int_equal(t.retry.count, action == SPIKES_LADDER ? 2 : 0);
	}
	trainer_free(&t);
}

/* A step that is not taken changes no weight, no moment and no expert bias. */
static void test_step_not_taken(void **state)
{
	(void)state;
	struct config c;
	struct trainer t;
	struct tensors *expected;
	struct metrics m;
	load_case(&c, &t, &expected, "v2_base");
	load_step(&t, expected, 1);
	t.model.params.lm_head[7] = NAN;
	const size_t bytes = t.model.table.num_elements * sizeof(real);
	real *before = malloc(bytes);
	memcpy(before, t.model.params.memory, bytes);
	assert_int_not_equal(trainer_step(&t, c.train.batch, &m), STEP_TAKEN);
	assert_memory_equal(before, t.model.params.memory, bytes);
	assert_true(sum_of_squares(t.model.exp_avg, t.model.table.num_state) == 0);
	free(before);
	tensors_close(expected);
	trainer_free(&t);
}

/* MTP layers whose loss has weight 0 stay as they are, their routers' biases too, and the rest of the model is trained
 * as if they were not there. */
static void test_mtp_without_weight(void **state)
{
	(void)state;
	enum { WITHOUT, WITH };
	struct trainer t[2];
	struct config c;
	struct tensors *expected;
	load_case(&c, &t[WITH], &expected, "v2_base");
	trainer_free(&t[WITH]);
	c.model.mtp_loss_scaling_factor = 0;
	make_trainer(&t[WITH], &c);
	load_fixture(&t[WITH], "v2_base");
	c.model.num_nextn_predict_layers = 0;
	make_trainer(&t[WITHOUT], &c);
	const struct parameter_table *all = &t[WITH].model.table, *some = &t[WITHOUT].model.table;
	const real *found = t[WITH].model.params.memory, *alone = t[WITHOUT].model.params.memory;
	const int64_t n = some->num_elements, num_mtp = all->num_elements - n;
	assert_true(num_mtp > 0 && !strcmp(all->parameters[some->num_parameters - 1].name,
			some->parameters[some->num_parameters - 1].name)); /* those of MTP layers are the last ones */
	memcpy(t[WITHOUT].model.params.memory, found, n * sizeof *found);
	real *before = malloc(num_mtp * sizeof *before);
	memcpy(before, found + n, num_mtp * sizeof *before);
	for (int i = WITHOUT; i <= WITH; i++)
		for (int step = 1; step <= 2; step++) {
			struct metrics m;
			load_step(&t[i], expected, step);
			assert_int_equal(trainer_step(&t[i], c.train.batch, &m), STEP_TAKEN);
		}
	assert_memory_equal(found, alone, n * sizeof *found);
	assert_memory_equal(found + n, before, num_mtp * sizeof *found);
	free(before);
	tensors_close(expected);
	trainer_free(&t[WITH]), trainer_free(&t[WITHOUT]);
}

/* The clip: the first moment after one step is (1 - beta1) times a gradient whose norm is grad_clip exactly. */
static void test_clip(void **state)
{
	(void)state;
	for (int i = 0; i < 2; i++) {
		struct config c;
		struct trainer t;
		struct tensors *expected;
		struct metrics m;
		load_case(&c, &t, &expected, "base");
		t.config.train.grad_clip = i ? 1e9 : 0.125; /* far below and far above the norm */
		load_step(&t, expected, 1);
		assert_taken(trainer_step(&t, c.train.batch, &m));
		double norm = sqrt(sum_of_squares(t.model.exp_avg, t.model.table.num_elements)) / (1 - c.optimizer.beta1);
		assert_true(m.grad_norm > 0.5 && fabs(norm / (i ? m.grad_norm : 0.125) - 1) < 1e-6);
		tensors_close(expected);
		trainer_free(&t);
	}
}

/* Central differences of the whole model, in double, of every `stride`th weight, where no fixture goes: each has
 * weights that are not renormalised, or a micro-batch that is cut short, or routing noise. The sequence scope keeps the
 * balance loss smooth. */
static const struct variant {
	const char *fixture;
	bool norm_topk_prob;
	int micro_batch, stride;
	double balance_loss_coef;
} variants[] = {
	{"routing_warmup", false, 3, 37, 0.1}, {"v2_base", false, 1, 19, 0.2}, {"v2_groups", false, 2, 19, 0.2},
	{"v2_mtp2", true, 2, 19, 0.1}, {"v2_routing_warmup", false, 2, 19, 0.1},
};

static void check_finite_differences(const struct variant *v)
{
	struct config c;
	struct trainer t;
	struct tensors *expected;
	struct metrics m;
	load_case(&c, &t, &expected, v->fixture);
	trainer_free(&t);
	c.model.norm_topk_prob = v->norm_topk_prob;
	c.model.router.balance_loss_scope = SCOPE_SEQUENCE;
	c.model.router.balance_loss_coef = v->balance_loss_coef;
	c.train.micro_batch = v->micro_batch;
	c.schedule.peak_lr = 1e-300; /* updates must not move the weights, */
	c.model.router.bias_update_rate = 0; /* nor the biases */
	make_trainer(&t, &c);
	load_fixture(&t, v->fixture);
	load_step(&t, expected, 1);
	t.state.step = 1; /* alpha = 1/3 */
	assert_taken(trainer_step(&t, c.train.batch, &m));
	const int64_t n = t.model.table.num_elements;
	real *gradient = malloc(n * sizeof *gradient), *w = t.model.params.memory;
	memcpy(gradient, t.model.grads.memory, n * sizeof *gradient);
	double difference = 0, norm = 0;
	for (int64_t i = 0; i < n; i += v->stride) {
		double loss[2];
		const real keep = w[i], h = (real)1e-6;
		for (int side = 0; side < 2; side++) {
			for (int l = 0; l < t.state.num_layers; l++) /* a step changes them */
				t.state.router_mean[l] = 0, t.state.router_std[l] = 1;
			t.state.step = 1;
			/* NormHead's norm is a constant in the gradient: keep that of the unchanged weights. */
			w[i] = keep;
			model_update_head_scale(&t.model);
			w[i] = keep + (side ? h : -h);
			assert_taken(trainer_step(&t, c.train.batch, &m));
			loss[side] = total_loss(&t, &m);
		}
		w[i] = keep;
		double numeric = (loss[1] - loss[0]) / (2 * h);
		difference += (numeric - gradient[i]) * (numeric - gradient[i]);
		norm += numeric * numeric;
	}
	if (!(sqrt(difference) < 1e-6 * sqrt(norm)))
		fail_msg("%s: gradient is off by %g of its norm", v->fixture, sqrt(difference / norm));
	free(gradient);
	tensors_close(expected);
	trainer_free(&t);
}

static void test_finite_differences(void **state)
{
	(void)state;
	if (sizeof(real) < 8)
		skip();
	for (int i = 0; i < COUNT(variants); i++)
		check_finite_differences(&variants[i]);
}

/* Documents packed into windows have the losses, the router's included, and the gradients that they have alone, each at
 * the beginning of a window of its own. The rest of a window is padding, and counts nowhere. */
static void test_packed_documents(void **state)
{
	(void)state;
	enum { L = 12, V = 30, DOCUMENTS = 5 };
	static const int length[DOCUMENTS] = {12, 3, 5, 1, 2}; /* two windows, the second with one token of padding */
	for (int run = 0; run < 2 * (TRAIN_RECOMPUTE_LAYER - TRAIN_KEEP_ALL + 1); run++) {
		const enum model_mode recompute = TRAIN_KEEP_ALL + run / 2;
		const bool v2 = run % 2; /* Ling 2.0 with MTP layers, which do not see another document either */
		struct trainer packed, alone;
		struct metrics m[2];
		struct config c = {
			.model = {.hidden_size = 8, MODEL_DEFAULTS,
					.num_hidden_layers = 2, .num_attention_heads = 4, .num_key_value_heads = 2,
					.head_dim = 6,
				.vocab_size = V, .num_experts = 4, .num_experts_per_tok = 2, .moe_intermediate_size = 5,
						.rope_theta = 100,
				.rms_norm_eps = 1e-6, .initializer_range = 0.5, .norm_topk_prob = true, .norm_head = true,
				.router = {.balance_loss_coef = 0.5, .z_loss_coef = 0.1,
						.balance_loss_scope = SCOPE_MICRO_BATCH}},
			.data = {.seq_len = L, .document_mask = true},
			.train = {.steps = 1, .micro_batch = DOCUMENTS, .batch = DOCUMENTS, .recompute = recompute},
			.optimizer = {0.9, 0.95, 1e-8, 0.1}, .schedule = {.peak_lr = 1e-300}, .log.every = 1,
			.parallel.tensor = 1, .parallel.expert = 1,
		};
		if (v2) {
			struct model_config *m2 = &c.model;
			m2->architecture = BAILING_MOE_V2, m2->norm_head = false, m2->use_qk_norm = true;
			m2->head_dim = 8, m2->partial_rotary_factor = 0.5;
			m2->score_function = SCORE_SIGMOID, m2->n_group = 2, m2->topk_group = 1, m2->routed_scaling_factor = 2.5;
			m2->moe_router_enable_expert_bias = true, m2->router.bias_update_rate = 0.01;
			m2->num_nextn_predict_layers = 2, m2->mtp_loss_scaling_factor = 0.3;
		}
		make_trainer(&alone, &c);
		c.train.micro_batch = 2;
		make_trainer(&packed, &c);
		model_randomize(&packed.model, 1);
		model_randomize(&alone.model, 1);
		for (int i = 0; i < DOCUMENTS * L; i++) {
			packed.target[i] = alone.target[i] = -1;
			alone.input[i] = packed.input[i] = 7 * i % V; /* what stands behind a document does not matter */
		}
		packed.length[1] = packed.document[2 * L - 1] = 11;
		for (int d = 0; d < DOCUMENTS; d++) {
			alone.length[d] = length[d];
			for (int i = length[d]; i < L; i++)
				alone.document[d * L + i] = length[d];
		}
		for (int d = 0, at = 0; d < DOCUMENTS; at += length[d++])
			for (int i = 0; i < length[d]; i++) {
				packed.document[at + i] = at % L;
				packed.input[at + i] = alone.input[d * L + i] = 11 * (at + i) % V;
				if (i > 0)
					packed.target[at + i - 1] = alone.target[d * L + i - 1] = 11 * (at + i) % V;
			}
		assert_taken(trainer_step(&packed, 2, &m[0]));
		assert_taken(trainer_step(&alone, DOCUMENTS, &m[1]));
		assert_true(fabs(m[0].loss / m[1].loss - 1) < TOLERANCE && m[0].loss > 1);
		assert_true(fabs(m[0].balance_loss / m[1].balance_loss - 1) < TOLERANCE && m[0].balance_loss > 1);
		assert_true(fabs(m[0].z_loss / m[1].z_loss - 1) < TOLERANCE && m[0].z_loss > 0.1);
		if (v2)
			assert_true(fabs(m[0].mtp_loss / m[1].mtp_loss - 1) < TOLERANCE && m[0].mtp_loss > 1);
		for (int l = 0; l < num_layers(&c.model); l++)
			assert_true(fabs(m[0].expert_load[l] / m[1].expert_load[l] - 1) < TOLERANCE &&
					fabs(packed.state.router_mean[l] - alone.state.router_mean[l]) < TOLERANCE &&
					fabs(packed.state.router_std[l] / alone.state.router_std[l] - 1) < TOLERANCE);
		const int64_t n = packed.model.table.num_elements;
		double *expected = malloc(n * sizeof *expected);
		for (int64_t i = 0; i < n; i++)
			expected[i] = alone.model.grads.memory[i];
		assert_close(packed.model.grads.memory, expected, n, TOLERANCE, "gradient of packed documents");
		for (int l = 0; l < num_layers(&c.model) && v2; l++) { /* padding has no part in them */
			const real *bias[] = {packed.model.params.layer[l].expert_bias, alone.model.params.layer[l].expert_bias};
			assert_memory_equal(bias[0], bias[1], c.model.num_experts * sizeof *bias[0]);
			assert_true(sum_of_squares(bias[0], c.model.num_experts) > 0);
		}
		/* with attention across documents it is another loss */
		memset(packed.document, 0, 2 * L * sizeof *packed.document);
		assert_taken(trainer_step(&packed, 2, &m[0]));
		assert_true(fabs(m[0].loss / m[1].loss - 1) > 1e-3);
		free(expected);
		trainer_free(&packed);
		trainer_free(&alone);
	}
}

/* Takes the next n samples of a blend, `batch` at a time, as if each step were done: first[i] is the first id of
 * sample i. */
static void take_samples(struct trainer *t, int32_t *first, int n, int batch)
{
	const int64_t L = t->config.data.seq_len;
	t->config.train.batch = batch;
	for (int i = 0; i < n; i += batch) {
		assert_int_equal(trainer_next_batch(t), batch);
		for (int k = 0; k < batch && i + k < n; k++)
			first[i + k] = t->input[k * L];
	}
}

/* A blend: no file is ever ahead of its share, each epoch of a file shows each of its windows once, and the order
 * does not depend on the batch. */
static void test_blend(void **state)
{
	(void)state;
	enum { FILES = 4, L = 4, N = 5600, FEW = 70 };
	static const int windows[FILES] = {7, 40, 1, 3};
	static const double weight[FILES] = {1, 10, 0, 0.3};
	static int32_t first[2][N];
	struct config c = {
		.model = {.hidden_size = 4, MODEL_DEFAULTS,
				.num_hidden_layers = 1, .num_attention_heads = 2, .num_key_value_heads = 1,
				.head_dim = 2,
			.vocab_size = 4000, .num_experts = 2, .num_experts_per_tok = 1, .moe_intermediate_size = 3,
					.rope_theta = 100, .rms_norm_eps = 1e-6},
		.data = {.seq_len = L, .num_train = FILES, .shuffle = true, .tokenizer = "none", .document_token = -1},
		.train = {.steps = 1, .micro_batch = 1, .batch = FEW, .seed = 5},
		.schedule = {.peak_lr = 1}, .log.every = 1, .parallel.tensor = 1, .parallel.expert = 1,
	};
	assert_int_equal(make_scratch(NULL), 0);
	strcpy(c.train.output_dir, at("run"));
	for (int f = 0; f < FILES; f++) {
		uint16_t ids[40 * L + 1];
		for (int i = 0; i < windows[f] * L + 1; i++)
			ids[i] = 1000 * f + i / L;
		strcpy(c.data.train[f].path, put_file(at("%d.bin", f), ids, (windows[f] * L + 1) * sizeof *ids));
		strcpy(c.data.train[f].dtype, "uint16");
		c.data.train[f].weight = weight[f];
	}
	for (int run = 0; run < 2; run++) {
		struct trainer t;
		assert_done(trainer_init(&t, &c));
		take_samples(&t, first[run], N, run ? 7 : FEW);
		trainer_free(&t);
	}
	assert_memory_equal(first[0], first[1], sizeof first[0]);
	int taken[FILES] = {0}, seen[FILES][40] = {{0}}, moved = 0;
	for (int n = 0; n < N; n++) {
		const int file = first[0][n] / 1000, window = first[0][n] % 1000;
		taken[file]++;
		seen[file][window]++;
		moved += n > 0 && first[0][n] != first[0][n - 1] + 1;
		for (int f = 0; f < FILES; f++) {
			const double ahead = taken[f] - weight[f] / 11.3 * (n + 1);
			if (!(ahead < 1 && ahead > -2))
				fail_msg("after %d samples file %d gave %d", n + 1, f, taken[f]);
		}
		for (int w = 0; w < windows[file]; w++) {
			const int epoch = (taken[file] - 1) / windows[file];
			assert_true(seen[file][w] == epoch || seen[file][w] == epoch + 1);
		}
	}
	assert_true(taken[2] == 0 && taken[3] > 100 && moved > N / 2);
	assert_int_equal(drop_scratch(NULL), 0);
}

/* A head that needs several chunks of tokens: the same loss and gradient as a plain sum over all of them. */
static void test_head_chunks(void **state)
{
	(void)state;
	enum { V = 33000, L = 600, H = 4 };
	struct trainer t;
	struct metrics m;
	struct config c = {
		.model = {.hidden_size = H, MODEL_DEFAULTS,
				.num_hidden_layers = 1, .num_attention_heads = 2, .num_key_value_heads = 1,
				.head_dim = 2,
			.vocab_size = V, .num_experts = 2, .num_experts_per_tok = 1, .moe_intermediate_size = 3,
					.rope_theta = 10000,
			.rms_norm_eps = 1e-6, .initializer_range = 0.5},
		.data = {.seq_len = L}, .train = {.steps = 1, .micro_batch = 1, .batch = 1, .grad_clip = 1},
		.optimizer = {0.9, 0.95, 1e-8, 0.1}, .schedule = {.peak_lr = 1e-300}, .log.every = 1,
		.parallel.tensor = 1, .parallel.expert = 1,
	};
	assert_true(L > 2 * head_chunk(V, 1));
	make_trainer(&t, &c);
	model_randomize(&t.model, 1);
	for (int i = 0; i < L; i++)
		t.input[i] = i * 101 % V, t.target[i] = i * 7919 % V;
	assert_taken(trainer_step(&t, 1, &m));
	model_forward(&t.model, t.input, 1, NULL, NULL);
	double *gradient = calloc(V * H, sizeof *gradient), loss = 0, *logits = malloc(V * sizeof *logits);
	for (int i = 0; i < L; i++) {
		double sum = 0;
		const real *x = t.model.acts.normed + i * H;
		for (int v = 0; v < V; v++) {
			logits[v] = 0;
			for (int j = 0; j < H; j++)
				logits[v] += (double)x[j] * t.model.params.lm_head[v * H + j];
			sum += exp(logits[v]);
		}
		loss += (log(sum) - logits[t.target[i]]) / L;
		for (int v = 0; v < V; v++)
			for (int j = 0; j < H; j++)
				gradient[v * H + j] += (exp(logits[v]) / sum - (v == t.target[i])) * x[j] / L;
	}
	assert_true(fabs(m.loss / loss - 1) < 1e-6);
	assert_close(t.model.grads.lm_head, gradient, V * H, TOLERANCE, "head gradient over several chunks");
	free(gradient), free(logits);
	trainer_free(&t);
}

/* NormHead: evaluation leaves the weights as they are, and the cache follows an update. */
static void test_norm_head(void **state)
{
	(void)state;
	struct config c;
	struct trainer t;
	struct tensors *expected;
	struct metrics m;
	load_case(&c, &t, &expected, "base");
	const int64_t n = t.model.table.num_elements, H = c.model.hidden_size, V = c.model.vocab_size;
	real *before = malloc(n * sizeof *before);
	memcpy(before, t.model.params.memory, n * sizeof *before);
	load_step(&t, expected, 1);
	model_forward(&t.model, t.input, 2, NULL, NULL);
	model_loss(&t.model, t.target, 2, NULL, NULL);
	assert_memory_equal(before, t.model.params.memory, n * sizeof *before);
	assert_taken(trainer_step(&t, c.train.batch, &m));
	for (int64_t j = 0; j < H; j++) {
		double sum = 0;
		for (int64_t v = 0; v < V; v++)
			sum += (double)t.model.params.lm_head[v * H + j] * t.model.params.lm_head[v * H + j];
		assert_true(fabs(t.model.head_scale[j] * (sqrt(sum) + 1e-7) - 1) < 1e-6);
	}
	free(before);
	tensors_close(expected);
	trainer_free(&t);
}

static struct config schedule(int64_t warmup, int64_t decay, enum decay_shape shape, double final)
{
	struct config c = {.schedule = {.peak_lr = 1, .warmup_steps = warmup, .decay = {decay, shape, final}},
		.data = {.seq_len = 10}, .train = {.steps = 100, .batch = 8, .micro_batch = 2}};
	return c;
}

static void test_learning_rate(void **state)
{
	(void)state;
	struct config c = schedule(10, 20, DECAY_LINEAR, 0.1);
	const double near = 1e-12;
	assert_true(fabs(learning_rate(&c, 1, 100, 0) - 0.1) < near);
	assert_true(fabs(learning_rate(&c, 9, 100, 0) - 0.9) < near);
	assert_true(learning_rate(&c, 10, 100, 0) == 1);
	assert_true(learning_rate(&c, 80, 100, 0) == 1);
	assert_true(fabs(learning_rate(&c, 81, 100, 0) - (0.1 + 0.9 * 0.95)) < near);
	assert_true(fabs(learning_rate(&c, 90, 100, 0) - 0.55) < near);
	assert_true(fabs(learning_rate(&c, 100, 100, 0) - 0.1) < near);
	c.schedule.decay.shape = DECAY_COSINE;
	assert_true(fabs(learning_rate(&c, 85, 100, 0) - (0.1 + 0.45 * (1 + sqrt(0.5)))) < near);
	c.schedule.decay.shape = DECAY_1_SQRT;
	assert_true(fabs(learning_rate(&c, 85, 100, 0) - 0.55) < near);
	c.schedule.decay.shape = DECAY_INVERSE_SQRT;
	assert_true(fabs(learning_rate(&c, 90, 100, 0) - 1 / sqrt(50.5)) < near);
	assert_true(fabs(learning_rate(&c, 100, 100, 0) - 0.1) < near);
	c = schedule(0, 0, DECAY_LINEAR, 0); /* neither warm-up nor decay */
	assert_true(learning_rate(&c, 1, 100, 0) == 1 && learning_rate(&c, 100, 100, 0) == 1);
	c = schedule(0, 100, DECAY_LINEAR, 0); /* decay from step 0 */
	assert_true(fabs(learning_rate(&c, 1, 100, 0) - 0.99) < near && learning_rate(&c, 100, 100, 0) == 0);
	c = schedule(0, 200, DECAY_LINEAR, 0); /* longer than the run: it began before the first step */
	assert_true(fabs(learning_rate(&c, 1, 100, 0) - 0.495) < near && learning_rate(&c, 100, 100, 0) == 0);
	c = schedule(200, 0, DECAY_LINEAR, 0); /* warm-up longer than the run */
	assert_true(fabs(learning_rate(&c, 100, 100, 0) - 0.5) < near);
	c = schedule(0, 20, DECAY_LINEAR, 0.1);
	c.schedule.num_drops = 2;
	c.schedule.drops[0].at = 0.55, c.schedule.drops[0].factor = 0.5;
	c.schedule.drops[1].at = 0.7, c.schedule.drops[1].factor = 0.1;
	assert_true(learning_rate(&c, 55, 100, 54.0 / 100) == 1);
	assert_true(learning_rate(&c, 56, 100, 55.0 / 100) == 0.5);
	assert_true(fabs(learning_rate(&c, 71, 100, 70.0 / 100) - 0.05) < near);
	assert_true(fabs(learning_rate(&c, 100, 100, 0.99) - 0.1) < near);
}

static void test_batch_warmup(void **state)
{
	(void)state;
	struct config c = schedule(0, 0, DECAY_LINEAR, 0);
	int64_t steps, tokens;
	assert_int_equal(batch_size(&c, 0), 8); /* none */
	run_length(&c, 0, 0, &steps, &tokens);
	assert_true(steps == 100 && tokens == 8000);
	/* 2, 5, then 8 */
	c.train.batch_warmup.start = 2, c.train.batch_warmup.increment = 3, c.train.batch_warmup.tokens = 100;
	assert_int_equal(batch_size(&c, 0), 2);
	assert_int_equal(batch_size(&c, 49), 2);
	assert_int_equal(batch_size(&c, 50), 5);
	assert_int_equal(batch_size(&c, 99), 5);
	assert_int_equal(batch_size(&c, 100), 8);
	run_length(&c, 0, 0, &steps, &tokens); /* 0, 20, 40 at 2; 60 at 5; 110 at 8 */
	assert_true(steps == 100 && tokens == 110 + 96 * 80);
	c.train.steps = 0, c.train.tokens = 500; /* 110, 190, ..., 510 */
	run_length(&c, 0, 0, &steps, &tokens);
	assert_true(steps == 9 && tokens == 510);
	c.train.tokens = 30;
	run_length(&c, 0, 0, &steps, &tokens);
	assert_true(steps == 2 && tokens == 40);
	/* A run continued with another batch still ends with its tokens: 300 are done in 9 updates. */
	c.train.batch_warmup.tokens = 0, c.train.tokens = 500;
	run_length(&c, 9, 300, &steps, &tokens);
	assert_true(steps == 9 + 3 && tokens == 300 + 3 * 80);
	c.train.tokens = 200;
	run_length(&c, 9, 300, &steps, &tokens);
	assert_true(steps == 9 && tokens == 300);
	/* The count by levels equals the count by updates, and needs no time for long runs. */
	c.train.batch_warmup.increment = 1, c.train.batch_warmup.tokens = 1234, c.train.tokens = 0, c.train.steps = 57;
	int64_t expected = 0;
	for (int i = 0; i < 57; i++)
		expected += batch_size(&c, expected) * 10;
	run_length(&c, 0, 0, &steps, &tokens);
	assert_true(steps == 57 && tokens == expected);
	c.train.batch_warmup.tokens = c.train.tokens = 1000000000000000, c.train.steps = 0;
	run_length(&c, 0, 0, &steps, &tokens);
	assert_true(tokens >= c.train.tokens && tokens < c.train.tokens + 80);
	c.train.batch_warmup.tokens = 100, c.train.tokens = 500;
	c.train.batch_warmup.increment = 4; /* 2, 6, then at most 8 */
	assert_int_equal(batch_size(&c, 99), 6);
	assert_int_equal(batch_size(&c, 100), 8);
}

/* Micro-batches are dealt out in turn: every sequence belongs to one rank, all ranks have as many rounds, and any
 * number of ranks has the same micro-batches. */
static void test_deal_batch(void **state)
{
	(void)state;
	for (int size = 1; size <= 5; size++)
		for (int64_t batch = 1; batch <= 23; batch++)
			for (int micro = 1; micro <= 4; micro++) {
				int taken[23] = {0};
				for (int rank = 0; rank < size; rank++) {
					const struct micro_batches s = micro_batches_of_rank(&(struct group){rank, size, 0}, batch, micro);
					assert_int_equal(s.num, (batch + micro * size - 1) / (micro * size));
					for (int64_t i = 0; i < s.num; i++) {
						const int64_t first = s.first + i * s.step;
						assert_int_equal(first, (i * size + rank) * micro);
						for (int64_t b = first; b < first + micro && b < batch; b++)
							taken[b]++;
					}
				}
				for (int64_t b = 0; b < batch; b++)
					assert_int_equal(taken[b], 1);
			}
}

/* Initial weights: the distributions of the design, the same for any thread count. */
static void check_initial_weights(const struct model_config *c)
{
	struct model m;
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	assert_done(model_init(&m, c, &alone, 1, 8, EVALUATE));
	model_randomize(&m, 1);
	real *first = malloc(m.table.num_elements * sizeof *first);
	memcpy(first, m.params.memory, m.table.num_elements * sizeof *first);
	const int threads = omp_get_max_threads();
	omp_set_num_threads(threads + 2);
	model_randomize(&m, 1);
	omp_set_num_threads(threads);
	assert_memory_equal(first, m.params.memory, m.table.num_elements * sizeof *first);
	model_randomize(&m, 2);
	assert_memory_not_equal(first, m.params.memory, m.table.num_elements * sizeof *first);
	free(first);
	for (int i = 0; i < m.table.num_parameters; i++) {
		const struct parameter *t = &m.table.parameters[i];
		const int64_t n = t->rows * (t->cols ? t->cols : 1);
		double mean = 0, square = 0, largest = 0;
		for (int64_t j = 0; j < n; j++) {
			double w = m.params.memory[t->offset + j];
			mean += w / n, square += w * w / n, largest = fmax(largest, fabs(w));
		}
		const bool router = strstr(t->name, "mlp.gate.weight"), bias = strstr(t->name, "bias"),
				norm = strstr(t->name, "norm");
		if (bias)
			assert_true(largest == 0);
		else if (norm)
			assert_true(mean == 1 && square == 1);
		else if (router)
			assert_true(largest <= 0.125 && largest > 0.12 && fabs(square - 0.125 * 0.125 / 3) < 0.0007);
		else
			assert_true(fabs(mean) < 0.0006 && fabs(sqrt(square) / 0.006 - 1) < 0.1);
	}
	model_free(&m);
}

static void test_initial_weights(void **state)
{
	(void)state;
	struct model_config c = {.hidden_size = 64, MODEL_DEFAULTS, .num_hidden_layers = 2, .num_attention_heads = 4,
			.num_key_value_heads = 2,
		.head_dim = 16, .vocab_size = 300, .num_experts = 16, .num_experts_per_tok = 2, .moe_intermediate_size = 32,
		.use_bias = true, .use_qkv_bias = true, .norm_head = true, .rope_theta = 1e4, .rms_norm_eps = 1e-5,
				.initializer_range = 0.006};
	check_initial_weights(&c);
	c.architecture = BAILING_MOE_V2, c.norm_head = false, c.use_qk_norm = true, c.partial_rotary_factor = 0.5;
	c.score_function = SCORE_SIGMOID, c.n_group = 4, c.topk_group = 2, c.routed_scaling_factor = 2.5;
	c.moe_router_enable_expert_bias = true, c.num_nextn_predict_layers = 1;
	check_initial_weights(&c);
}

/* Sizes no machine has room for: an error that says so, not a crash. */
static void test_too_large(void **state)
{
	(void)state;
	struct model_config c = {.hidden_size = 65536, MODEL_DEFAULTS, .num_hidden_layers = 100, .num_attention_heads = 64,
			.num_key_value_heads = 8,
		.head_dim = 1024, .vocab_size = 1000000, .num_experts = 64, .num_experts_per_tok = 2,
				.moe_intermediate_size = 65536,
		.rope_theta = 1e4, .rms_norm_eps = 1e-5};
	struct model m;
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	assert_int_equal(model_init(&m, &c, &alone, 1, 8, TRAIN_KEEP_ALL), -1);
	assert_non_null(strstr(error_text, "GB"));
}

/* A random number from 0 to `most`. */
static int draw(uint64_t *state, int most)
{
	*state = *state * 6364136223846793005u + 1442695040888963407u;
	return (int)((*state >> 33) % (most + 1));
}

/* Caches of B sequences of up to L tokens in one pool, whose blocks are in a random order. kv holds NaN, which no
 * result may show. The caller frees caches[0].kv and *block. */
static void scattered_caches(struct kv_cache *caches, int64_t **block, const struct model *m, int B, int64_t L,
		uint64_t *seed)
{
	const int64_t each = (L + KV_BLOCK - 1) / KV_BLOCK, n = B * each, rows = n * KV_BLOCK + 7;
	real *kv = malloc(kv_cache_bytes(m, rows));
	for (size_t i = 0; i < kv_cache_bytes(m, rows) / sizeof *kv; i++)
		kv[i] = NAN;
	*block = malloc(n * sizeof **block);
	for (int64_t i = 0; i < n; i++) {
		const int64_t j = draw(seed, (int)i);
		(*block)[i] = (*block)[j];
		(*block)[j] = i * KV_BLOCK + i % 7;
	}
	for (int b = 0; b < B; b++)
		caches[b] = (struct kv_cache){.kv = kv, .rows = rows, .block = *block + b * each};
}

/* Logits by model_extend: B sequences of L tokens, cut anew and in each call other ones together, against
 * `expected` [B, L, V] bit for bit. A sequence now and then goes on in a copy of its cache, and some of its tokens
 * are taken back. */
static void check_extend(struct model *m, const int32_t *input, int B, const real *expected, uint64_t seed, int longest)
{
	const int64_t L = m->seq_len, V = m->config.vocab_size;
	struct kv_cache caches[B];
	real *logits = malloc(m->max_sequences * L * V * sizeof *logits);
	int64_t *block;
	scattered_caches(caches, &block, m, B, L, &seed);
	for (int64_t done = 0; done < B * L;) {
		struct segment segments[B];
		int64_t first[B], T = 0, row = 0;
		int n = 0, of[B];
		for (int b = 0; b < B; b++) {
			int64_t num = draw(&seed, longest), left = L - caches[b].length;
			num = num > left ? left : num;
			num = num > m->max_sequences * L - T ? m->max_sequences * L - T : num;
			if (num == 0)
				continue;
			first[n] = caches[b].length, of[n] = b;
			segments[n++] = (struct segment){&caches[b], input + b * L + caches[b].length, num};
			T += num;
		}
		model_extend(m, segments, n);
		model_logits(m, logits, 0, T);
		for (int i = 0; i < n; row += segments[i++].num_tokens)
			if (memcmp(logits + row * V, expected + (of[i] * L + first[i]) * V,
					segments[i].num_tokens * V * sizeof *logits))
				fail_msg("sequence %d, tokens %lld to %lld of %lld: not the forward pass's bits", of[i],
						(long long)first[i],
						(long long)(first[i] + segments[i].num_tokens - 1), (long long)L);
		done = 0;
		for (int b = 0; b < B; b++) {
			if (draw(&seed, 31) == 0)
				caches[b].length = draw(&seed, caches[b].length);
			done += caches[b].length;
		}
	}
	free(caches[0].kv);
	free(block);
	free(logits);
}

/* A sequence that remembers its keys and values has the logits of the whole forward pass, bit for bit: models of
 * each kind, ... */
static void test_extend(void **state)
{
	(void)state;
	static const char *const names[] = {"base", "odd_sizes", "head_dim", "biases", "dense_first", "shared0",
			"tied_norm_head", "k1_no_renorm", "v2_base", "v2_groups", "v2_mtp2", "v2_plain"};
	for (int i = 0; i < COUNT(names); i++) {
		struct config c;
		struct trainer t;
		struct tensors *expected;
		struct model m;
		char path[256];
		load_case(&c, &t, &expected, names[i]);
		load_step(&t, expected, 1);
		const int64_t L = c.data.seq_len, V = c.model.vocab_size;
		const int B = c.train.batch;
		assert_done(model_init(&m, &c.model, &t.model.layout, B, L, EVALUATE));
		snprintf(path, sizeof path, FIXTURES "%s/weights.safetensors", names[i]);
		assert_done(model_load(&m, path));
		real *logits = malloc(B * L * V * sizeof *logits);
		model_forward(&m, t.input, B, NULL, NULL);
		model_logits(&m, logits, 0, B * L);
		check_extend(&m, t.input, B, logits, 1, 1);
		for (uint64_t seed = 2; seed < 6; seed++)
			check_extend(&m, t.input, B, logits, seed, L);
		free(logits);
		tensors_close(expected);
		trainer_free(&t);
		model_free(&m);
	}
}

static void extend_long(const struct model_config *c)
{
	enum { B = 2, L = 600 };
	struct model m;
	int32_t input[B * L];
	uint64_t seed = 1;
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	assert_done(model_init(&m, c, &alone, B, L, EVALUATE));
	model_randomize(&m, 1);
	for (int i = 0; i < B * L; i++)
		input[i] = draw(&seed, c->vocab_size - 1);
	real *logits = malloc(B * L * c->vocab_size * sizeof *logits);
	model_forward(&m, input, B, NULL, NULL);
	model_logits(&m, logits, 0, B * L);
	check_extend(&m, input, B, logits, 2, L);
	check_extend(&m, input, B, logits, 3, 70);
	free(logits);
	model_free(&m);
}

/* ... and sequences longer than attention's blocks of keys, heads in several parts. */
static void test_extend_long(void **state)
{
	(void)state;
	struct model_config c = {.hidden_size = 40, MODEL_DEFAULTS, .num_hidden_layers = 2, .num_attention_heads = 12,
			.num_key_value_heads = 2,
		.head_dim = 10, .vocab_size = 150, .num_experts = 8, .num_experts_per_tok = 3, .num_shared_experts = 1,
				.moe_intermediate_size = 24,
		.norm_head = true, .norm_topk_prob = true, .rope_theta = 1e4, .rms_norm_eps = 1e-5, .initializer_range = 0.3};
	extend_long(&c);
	c.architecture = BAILING_MOE_V2, c.norm_head = false, c.use_qk_norm = true, c.partial_rotary_factor = 0.4;
	c.score_function = SCORE_SIGMOID, c.n_group = 4, c.topk_group = 2, c.routed_scaling_factor = 2.5;
	c.num_nextn_predict_layers = 1; /* which no result shows */
	extend_long(&c);
}

/* ---- weights used where they stand in a file ---- */

/* kinds of files: types in turn; the same at odd addresses; all bfloat16, the last tensor first */
enum { MIXED, ODD_ADDRESS, BACKWARDS };

/* A file of a model's tensors, whose values are exact in each type. */
static const char *put_weights(const struct model *m, int kind)
{
	static const char *const names[] = {"BF16", "F32", "F16"};
	static const int sizes[] = {2, 4, 2};
	char *header = NULL;
	size_t header_size, at_data = 0;
	FILE *h = open_memstream(&header, &header_size);
	fprintf(h, "{");
	for (int place = 0; place < m->table.num_parameters; place++) {
		const int i = kind == BACKWARDS ? m->table.num_parameters - 1 - place : place,
				type = kind == BACKWARDS ? 0 : i % 3;
		const struct parameter *t = &m->table.parameters[i];
		const size_t bytes = t->rows * (t->cols ? t->cols : 1) * sizes[type];
		fprintf(h, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[%lld", place ? "," : "", t->name, names[type],
				(long long)t->rows);
		fprintf(h, t->cols ? ",%lld]" : "]", (long long)t->cols);
		fprintf(h, ",\"data_offsets\":[%zu,%zu]}", at_data, at_data + bytes);
		at_data += bytes;
	}
	fprintf(h, "}");
	fflush(h);
	while (header_size % 4 != (kind == ODD_ADDRESS ? 1 : 0)) {
		fputc(' ', h);
		fflush(h);
	}
	const char *path = at("weights%d.safetensors", kind);
	FILE *f = fopen(path, "w");
	const uint64_t length = header_size;
	fwrite(&length, 8, 1, f);
	fwrite(header, 1, header_size, f);
	for (int place = 0; place < m->table.num_parameters; place++) {
		const int i = kind == BACKWARDS ? m->table.num_parameters - 1 - place : place,
				type = kind == BACKWARDS ? 0 : i % 3;
		const struct parameter *t = &m->table.parameters[i];
		for (int64_t j = 0; j < t->rows * (t->cols ? t->cols : 1); j++) {
			const float value = (float)((j * 37 + i * 11) % 61 - 30) / 32;
			uint32_t bits, half = 0;
			memcpy(&bits, &value, 4);
			if (type == 2 && value != 0)
				half = (bits >> 16 & 0x8000) | ((bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 1023);
			else if (type == 0)
				half = bits >> 16;
			fwrite(type == 1 ? &bits : &half, sizes[type], 1, f);
		}
	}
	assert_int_equal(fclose(f), 0);
	fclose(h);
	free(header);
	return path;
}

/* The logits of a model that is only evaluated, and whose weights therefore stay in their files, are those of the
 * same weights in memory. */
static void check_mapped(const struct model_config *c, const char *path, int num_mapped)
{
	enum { L = 7 };
	struct model mapped, copied;
	int32_t input[2 * L];
	const int64_t V = c->vocab_size;
	real *logits[2] = {malloc(2 * L * V * sizeof(real)), malloc(2 * L * V * sizeof(real))};
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	for (int i = 0; i < 2 * L; i++)
		input[i] = i * 5 % V;
	assert_done(model_init(&mapped, c, &alone, 2, L, EVALUATE));
	assert_done(model_init(&copied, c, &alone, 2, L, TRAIN_KEEP_ALL));
	for (int again = 0; again < 2; again++)
		assert_done(model_load(&mapped, path));
	assert_done(model_load(&copied, path));
	int n = 0;
	for (int i = 0; i < mapped.table.num_parameters; i++) {
		assert_null(copied.table.parameters[i].mapped);
		n += mapped.table.parameters[i].mapped != NULL;
	}
	if (n != num_mapped)
		fail_msg("%s: %d of %d tensors are mapped, expected %d", path, n, mapped.table.num_parameters, num_mapped);
	struct model *models[2] = {&mapped, &copied};
	for (int i = 0; i < 2; i++) {
		model_forward(models[i], input, 2, NULL, NULL);
		model_logits(models[i], logits[i], 0, 2 * L);
	}
	assert_true(logits[0][0] != 0 && !isnan(logits[0][0]));
	assert_memory_equal(logits[0], logits[1], 2 * L * V * sizeof(real));
	model_free(&mapped), model_free(&copied);
	free(logits[0]), free(logits[1]);
}

static void compare_weight(const struct weight *found, const real *expected, int64_t n, const char *what)
{
	for (int64_t i = 0; i < n; i++) {
		const bool behind = found->second && i >= n / 2;
		const void *half = behind ? found->second : found->data;
		const int64_t at = behind ? i - n / 2 : i;
		const uint32_t bits = found->bf16 ? (uint32_t)((const uint16_t *)half)[at] << 16 : 0;
		float value;
		memcpy(&value, &bits, sizeof value);
		if ((found->bf16 ? (real)value : ((const real *)half)[at]) != expected[i])
			fail_msg("%s: element %lld differs", what, (long long)i);
	}
}

/* Every rank of a layout has its own part of the weights, whether it can be used in the file or has to be copied. */
static void check_mapped_parts(const struct model_config *c, const char *path)
{
	enum { RANKS = 4 };
	for (int rank = 0; rank < RANKS; rank++) {
		struct model mapped, copied;
		const struct layout layout = layout_of_rank(rank, RANKS, 2, 2);
		assert_done(model_init(&mapped, c, &layout, 2, 8, EVALUATE));
		assert_done(model_init(&copied, c, &layout, 2, 8, TRAIN_KEEP_ALL));
		assert_done(model_load(&mapped, path));
		assert_done(model_load(&copied, path));
		const int64_t H = c->hidden_size, I = c->moe_intermediate_size, V = mapped.config.vocab_size, d = c->head_dim;
		const int nh = mapped.config.num_attention_heads, nkv = mapped.config.num_key_value_heads;
		int num_mapped = 0;
		for (int i = 0; i < mapped.table.num_parameters; i++)
			num_mapped += mapped.table.parameters[i].mapped != NULL;
		assert_true(num_mapped > 0);
		compare_weight(&mapped.embedding, copied.params.embedding, V * H, "embedding");
		compare_weight(&mapped.lm_head, copied.params.lm_head, V * H, "lm_head");
		for (int l = 0; l < c->num_hidden_layers; l++) {
			const struct layer_weights *w = &mapped.weights[l];
			const struct layer_params *p = &copied.params.layer[l];
			const int64_t W = shared_width(c, l);
			compare_weight(&w->qkv, p->qkv, (nh + 2 * nkv) * d * H, "qkv");
			compare_weight(&w->dense, p->dense, H * nh * d, "dense");
			compare_weight(&w->router, p->router, c->num_experts * H, "router");
			compare_weight(&w->shared_gate_up, p->shared_gate_up, 2 * W * H, "shared gate and up");
			compare_weight(&w->shared_down, p->shared_down, H * W, "shared down");
			for (int e = 0; e < mapped.num_experts; e++) {
				compare_weight(&w->gate_up[e], p->gate_up + e * 2 * I * H, 2 * I * H, "gate and up");
				compare_weight(&w->down[e], p->down + e * H * I, H * I, "down");
			}
		}
		model_free(&mapped), model_free(&copied);
	}
}

static void test_mapped(void **state)
{
	(void)state;
	struct model_config c;
	struct model m;
	const bool is_float = sizeof(real) == 4;
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	assert_done(config_from_huggingface(&c, FIXTURES "huggingface_shards"));
	assert_done(model_init(&m, &c, &alone, 1, 8, EVALUATE));
	int matrices = 0, mixed = 0;
	for (int i = 0; i < m.table.num_parameters; i++) {
		matrices += m.table.parameters[i].cols > 0;
		const char *name = m.table.parameters[i].name;
		const bool gate = strstr(name, "gate_proj"), up = strstr(name, "up_proj");
		/* gate and up never have the same type */
		mixed += m.table.parameters[i].cols && !gate && !up && (i % 3 == 0 || (i % 3 == 1 && is_float));
	}
	assert_true(mixed > 0 && mixed < matrices);
	check_mapped(&c, FIXTURES "huggingface_shards", matrices);
	check_mapped(&c, put_weights(&m, MIXED), mixed);
	check_mapped(&c, put_weights(&m, BACKWARDS), matrices);
	check_mapped(&c, put_weights(&m, ODD_ADDRESS), 0);
	model_free(&m);
	c.norm_head = false; /* whose sum over the ranks would need them all */
	check_mapped_parts(&c, FIXTURES "huggingface_shards");
	check_mapped_parts(&c, at("weights%d.safetensors", MIXED));
	check_mapped_parts(&c, at("weights%d.safetensors", BACKWARDS));
	assert_done(config_from_huggingface(&c, FIXTURES "huggingface_f16"));
	check_mapped(&c, FIXTURES "huggingface_f16", 0);
}

/* No two weights of a model start alike, be they of one tensor, two layers, two experts or two seeds; and a seed counts
 * with all of its 64 bits. */
static void test_initial_weights_differ(void **state)
{
	(void)state;
	enum { SEEDS = 3, FEW = 8 };
	struct model_config c = {.hidden_size = 16, MODEL_DEFAULTS, .num_hidden_layers = 3, .num_attention_heads = 2,
		.num_key_value_heads = 1, .head_dim = 8, .vocab_size = 40, .num_experts = 4, .num_experts_per_tok = 2,
		.num_shared_experts = 1, .moe_intermediate_size = 8, .rope_theta = 1e4, .rms_norm_eps = 1e-5,
		.initializer_range = 0.02};
	const uint64_t seeds[SEEDS] = {1, 2, 1 + (UINT64_C(1) << 32)};
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	real (*begins)[FEW] = calloc(1000, sizeof *begins); /* of each random tensor of each seed */
	int n = 0;
	for (int seed = 0; seed < SEEDS; seed++) {
		struct model m;
		assert_done(model_init(&m, &c, &alone, 1, 8, EVALUATE));
		model_randomize(&m, seeds[seed]);
		for (int i = 0; i < m.table.num_parameters; i++) {
			const struct parameter *t = &m.table.parameters[i];
			if (!strstr(t->name, "norm") && n < 1000)
				memcpy(begins[n++], m.params.memory + t->offset, sizeof *begins);
		}
		model_free(&m);
	}
	assert_true(n > SEEDS * 3 * 4 * 3 && n < 1000);
	for (int i = 0; i < n; i++)
		for (int j = 0; j < i; j++)
			for (int a = 0; a < FEW; a++)
				assert_true(begins[i][a] != begins[j][a] && (a == 0 || begins[i][a] != begins[i][a - 1]));
	free(begins);
}

int main(void)
{
	kernels_init(false);
	struct CMUnitTest tests[NUM_CASES + 32];
	int n = 0;
	for (int i = 0; i < NUM_CASES; i++)
		tests[n++] = (struct CMUnitTest){cases[i], test_golden, NULL, NULL, (void *)cases[i]};
	tests[n++] = (struct CMUnitTest){"huggingface_shards", test_huggingface, NULL, NULL, "huggingface_shards"};
	tests[n++] = (struct CMUnitTest){"huggingface_f16", test_huggingface, NULL, NULL, "huggingface_f16"};
	tests[n++] = (struct CMUnitTest){"huggingface_v2", test_huggingface, NULL, NULL, "huggingface_v2"};
	const struct CMUnitTest others[] = {
		cmocka_unit_test(test_micro_batches), cmocka_unit_test(test_recompute),
				cmocka_unit_test(test_mean_over_all_tokens), cmocka_unit_test(test_no_targets),
				cmocka_unit_test(test_empty_micro_batch),
		cmocka_unit_test(test_router_zero), cmocka_unit_test(test_not_finite),
				cmocka_unit_test(test_step_not_taken), cmocka_unit_test(test_mtp_without_weight),
				cmocka_unit_test(test_clip),
				cmocka_unit_test(test_finite_differences),
		cmocka_unit_test(test_packed_documents), cmocka_unit_test(test_blend), cmocka_unit_test(test_head_chunks),
				cmocka_unit_test(test_norm_head),
		cmocka_unit_test(test_learning_rate), cmocka_unit_test(test_batch_warmup), cmocka_unit_test(test_deal_batch),
		cmocka_unit_test(test_initial_weights), cmocka_unit_test(test_initial_weights_differ),
		cmocka_unit_test(test_too_large), cmocka_unit_test(test_extend),
				cmocka_unit_test(test_extend_long),
		cmocka_unit_test_setup_teardown(test_mapped, make_scratch, drop_scratch),
	};
	for (size_t i = 0; i < sizeof others / sizeof *others; i++)
		tests[n++] = others[i];
	return _cmocka_run_group_tests("model", tests, n, NULL, NULL);
}
