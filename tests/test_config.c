/*
 * test_config.c - the config: what is accepted and with which values, what is refused and with which words.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "files/config.h"
#include "files/config_keys.h"
#include "files/checkpoint.h"

#include <jansson.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test.h"

static char *get(const char *path)
{
	static char text[65536];
	FILE *f = fopen(path, "r");
	assert_non_null(f);
	text[fread(text, 1, sizeof text - 1, f)] = 0;
	fclose(f);
	return text;
}

/* The parts of a valid config. */
#define MODEL_KEYS "hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, " \
	"head_dim: 32, vocab_size: 300, num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16"
#define MODEL "model: {" MODEL_KEYS "}\n"
#define DATA "data: {train: a, seq_len: 128}\n"
#define TRAIN_KEYS "output_dir: out, micro_batch: 4, batch: 16"
#define TRAIN "train: {" TRAIN_KEYS ", steps: 10}\n"
#define SCHEDULE "schedule: {peak_lr: 1e-3}\n"
#define REST DATA TRAIN SCHEDULE
#define VALID MODEL REST

static int load(struct config *c, const char *text)
{
	return config_load(c, put_string(at("run.yaml"), text), 0, NULL, false);
}

static void load_ok(struct config *c, const char *text)
{
	error_text[0] = 0;
	if (load(c, text) < 0)
		print_error("%s\n", error_text);
	assert_string_equal(error_text, "");
}

/* Checks that the message holds every one of up to three words. */
static void expect_words(const char *name, int rc, const char *const words[3])
{
	if (rc != -1)
		print_error("%s: accepted\n", name);
	assert_int_equal(rc, -1);
	for (int i = 0; i < 3 && words[i]; i++)
		if (!strstr(error_text, words[i])) {
			print_error("%s: \"%s\" is not in: %s\n", name, words[i], error_text);
			assert_true(false);
		}
	assert_null(strchr(error_text, '\n'));
	if (getenv("SHOW"))
		printf("%-28s %s\n", name, error_text);
}

static void test_defaults(void **state)
{
	(void)state;
	struct config c;
	load_ok(&c, "model: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 300,\n"
			"  num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16}\n" REST);
	assert_int_equal(c.model.num_key_value_heads, 4);
	assert_int_equal(c.model.head_dim, 16);
	assert_int_equal(c.model.num_shared_experts, 0);
	assert_int_equal(c.model.first_k_dense_replace, 0);
	assert_int_equal(c.model.max_position_embeddings, 16384);
	assert_true(c.model.norm_topk_prob && c.model.norm_head);
	assert_false(c.model.tie_word_embeddings || c.model.use_bias || c.model.use_qkv_bias);
	assert_true(c.model.rope_theta == 600000 && c.model.rms_norm_eps == 1e-5 && c.model.initializer_range == 0.006);
	assert_true(c.model.router.balance_loss_coef == 0.015 && c.model.router.z_loss_coef == 1e-4);
	assert_int_equal(c.model.router.balance_loss_scope, SCOPE_MICRO_BATCH);
	assert_int_equal(c.model.router.warmup_steps, 0);
	assert_string_equal(c.data.train[0].path, "a");
	assert_int_equal(c.data.num_valid, 0);
	assert_string_equal(c.data.tokenizer, "none");
	assert_true(c.data.shuffle);
	assert_true(c.train.seed == 1 && c.train.steps == 10 && c.train.tokens == 0 && c.train.stop_at_step == 0);
	assert_true(c.train.grad_clip == 1 && c.train.batch_warmup.tokens == 0);
	assert_true(c.optimizer.beta1 == 0.9 && c.optimizer.beta2 == 0.95 && c.optimizer.eps == 1e-8);
	assert_true(c.optimizer.weight_decay == 0.1 && c.schedule.peak_lr == 1e-3);
	assert_true(c.schedule.warmup_steps == 0 && c.schedule.num_drops == 0 && c.schedule.decay.steps == 0);
	assert_int_equal(c.schedule.decay.shape, DECAY_1_SQRT);
	assert_true(c.schedule.decay.final_lr == 0);
	assert_true(c.checkpoint.every == 0 && c.checkpoint.keep == 2 && c.eval.every == 0 && c.eval.max_windows == 0);
	assert_true(c.log.every == 1 && c.parallel.tensor == 1 && c.parallel.expert == 1);
}

/* The example of the documentation, whole. */
static const char *const full =
	"# a comment\n---\n"
	"model: { hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 8, num_key_value_heads: 2, head_dim: 32,\n"
	"         vocab_size: 257, num_experts: 16, num_experts_per_tok: 4, num_shared_experts: 1,\n"
	"         moe_intermediate_size: 128, norm_head: true, rope_theta: 10000, rms_norm_eps: 1.0e-5,\n"
	"         router: { balance_loss_coef: 0.015, balance_loss_scope: sequence, z_loss_coef: 1.0e-4,\n"
	"                   warmup_steps: 50 } }\n"
	"data:  { train: build/data/train, valid: build/data/valid, tokenizer: byte, seq_len: 256, shuffle: true }\n"
	"train: { output_dir: runs/quickstart, seed: 18446744073709551615, steps: 400, micro_batch: 8, batch: 32,\n"
	"         grad_clip: 1.0, init_from: start, batch_warmup: { start: 8, increment: 8, tokens: 500000 } }\n"
	"optimizer: { beta1: 0.9, beta2: 0.95, eps: 1.0e-8, weight_decay: 0.1 }\n"
	"schedule:\n"
	"  peak_lr: 1.0e-3\n"
	"  warmup_steps: 40\n"
	"  drops:\n"
	"    - { at: 0.6, factor: 0.5 }\n"
	"    - { factor: 0.1, at: 0.9 }\n"
	"  decay: { steps: 80, shape: cosine, final_lr: 1.0e-5 }\n"
	"checkpoint: { every: 100, keep: 3 }\n"
	"eval: { every: 50, max_windows: 7 }\n"
	"log: { every: 10 }\n"
	"parallel: { tensor: 2, expert: 4 }\n";

static void test_full(void **state)
{
	(void)state;
	struct config c;
	load_ok(&c, full);
	assert_true(c.train.seed == UINT64_MAX && c.train.steps == 400);
	assert_string_equal(c.train.init_from, "start");
	assert_string_equal(c.data.tokenizer, "byte");
	assert_int_equal(c.train.batch_warmup.start, 8);
	assert_int_equal(c.train.batch_warmup.tokens, 500000);
	assert_int_equal(c.model.router.balance_loss_scope, SCOPE_SEQUENCE);
	assert_int_equal(c.schedule.num_drops, 2);
	assert_true(c.schedule.drops[0].at == 0.6 && c.schedule.drops[0].factor == 0.5);
	assert_true(c.schedule.drops[1].at == 0.9 && c.schedule.drops[1].factor == 0.1);
	assert_int_equal(c.schedule.decay.shape, DECAY_COSINE);
	assert_true(c.schedule.decay.final_lr == 1e-5 && c.eval.max_windows == 7 && c.log.every == 10);
	assert_true(c.parallel.tensor == 2 && c.parallel.expert == 4);
}

/* One file by its path, and lists of paths and mappings. */
static void test_sources(void **state)
{
	(void)state;
	struct config c;
	load_ok(&c,
			MODEL "data:\n  seq_len: 5\n  document_mask: on\n  document_token: 0\n  train:\n    - one\n    - {path: "
			"two, weight: 2.5}\n"
			"    - {dtype: uint16, weight: 0, path: three}\n  valid: [v, {path: w, dtype: int32}]\n" TRAIN SCHEDULE);
	assert_true(c.data.num_train == 3 && c.data.num_valid == 2 && c.data.document_mask && c.data.document_token == 0);
	assert_string_equal(c.data.train[0].path, "one");
	assert_true(c.data.train[0].weight == 1 && c.data.train[1].weight == 2.5 && c.data.train[2].weight == 0);
	assert_string_equal(c.data.train[0].dtype, "none");
	assert_string_equal(c.data.train[2].dtype, "uint16");
	assert_string_equal(c.data.train[2].path, "three");
	assert_string_equal(c.data.valid[0].path, "v");
	assert_string_equal(c.data.valid[1].dtype, "int32");
	load_ok(&c, VALID);
	assert_true(c.data.num_train == 1 && c.data.train[0].weight == 1 && !c.data.document_mask &&
			c.data.document_token == -1);
	assert_string_equal(c.data.train[0].dtype, "none");

	char many[64 * 8 + 512] = MODEL "data: {seq_len: 5, train: [a0", *end = many + strlen(many);
	for (int i = 1; i < MAX_SOURCES; i++)
		end += sprintf(end, ", a%d", i);
	strcpy(end, "]}\n" TRAIN SCHEDULE);
	load_ok(&c, many);
	assert_int_equal(c.data.num_train, MAX_SOURCES);
	strcpy(end, ", b]}\n" TRAIN SCHEDULE);
	expect_words("65 files", load(&c, many), (const char *const[3]){"data.train: found more than 64 items"});
}

/* Spellings that YAML readers are known to take for text or for another value. */
static void test_spellings(void **state)
{
	(void)state;
	struct config c;
	load_ok(&c, "\xef\xbb\xbf" "model: {" MODEL_KEYS ", n_shared_experts: 1, rope_theta: 1E5, rms_norm_eps: 1e-6,\n"
			"  norm_head: OFF, norm_topk_prob: yes, use_bias: On, use_qkv_bias: no, tie_word_embeddings: False,\n"
			"  router: {warmup_steps: off, balance_loss_coef: .5, z_loss_coef: none}}\n"
			"data: {train: 010, valid: off, seq_len: 1e2, shuffle: off, tokenizer: none}\n"
			"train: {output_dir: 'off', init_from: ~, seed: 1_000_000, tokens: 2.5e9, steps: off, micro_batch: +2,\n"
			"  batch: 2_000, grad_clip: off, batch_warmup: off, stop_at_step: null}\n"
			"optimizer: {eps: 1E-8, beta1: 0, weight_decay: off}\n"
			"schedule: {peak_lr: 1e-4, warmup_steps: none, drops: [], decay: off}\n"
			"checkpoint: {every: off, keep: 0}\neval: {every: ~, max_windows: OFF}\n");
	assert_int_equal(c.model.num_shared_experts, 1);
	assert_true(c.model.rope_theta == 1e5 && c.model.rms_norm_eps == 1e-6);
	assert_true(c.model.norm_topk_prob && c.model.use_bias);
	assert_false(c.model.norm_head || c.model.use_qkv_bias || c.model.tie_word_embeddings || c.data.shuffle);
	assert_true(c.model.router.warmup_steps == 0 && c.model.router.balance_loss_coef == 0.5);
	assert_true(c.model.router.z_loss_coef == 0);
	assert_string_equal(c.data.train[0].path, "010");
	assert_int_equal(c.data.num_valid, 0);
	assert_string_equal(c.train.output_dir, "off");
	assert_string_equal(c.train.init_from, "");
	assert_true(c.data.seq_len == 100 && c.train.seed == 1000000 && c.train.tokens == 2500000000 &&
			c.train.steps == 0);
	assert_true(c.train.micro_batch == 2 && c.train.batch == 2000 && c.train.grad_clip == 0);
	assert_true(c.optimizer.eps == 1e-8 && c.optimizer.beta1 == 0 && c.optimizer.weight_decay == 0);
	assert_true(c.schedule.peak_lr == 1e-4 && c.checkpoint.keep == 0 && c.eval.every == 0);

	load_ok(&c, MODEL DATA TRAIN "schedule: {peak_lr: 0.1, drops: off}\n");
	load_ok(&c, "model: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, head_dim: null,\n"
			"  vocab_size: 300, first_k_dense_replace: 2, intermediate_size: 128}\n" REST);
	assert_true(c.model.num_experts == 0 && c.model.head_dim == 16);
}

#define BAD_MODEL(extra) "model: {" MODEL_KEYS ", " extra "}\n" REST
#define BAD_DATA(keys) MODEL "data: {train: a, " keys "}\n" TRAIN SCHEDULE
#define BAD_TRAIN(keys) MODEL DATA "train: {" TRAIN_KEYS ", " keys "}\n" SCHEDULE
#define BAD_SCHEDULE(keys) MODEL DATA TRAIN "schedule: {" keys "}\n"
#define SIZES(hidden, heads, rest) "model: {hidden_size: " #hidden ", num_attention_heads: " #heads \
	", num_hidden_layers: 2, vocab_size: 300, " rest "}\n" REST
#define EXPERTS "num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16"

static const struct { const char *name, *text, *words[3]; } broken[] = {
	/* the file */
	{"empty", "", {"run.yaml: the file is empty"}},
	{"only a comment", "# nothing\n", {"run.yaml:", "found nothing", "a mapping"}},
	{"only a marker", "---\n", {"found nothing", "a mapping"}},
	{"a scalar", "hello\n", {"run.yaml:1:", "found hello", "a mapping"}},
	{"a list", "- model\n- data\n", {"run.yaml:1:", "found a list"}},
	{"syntax", "model: {hidden_size: 64}\ndata: ]\n", {"run.yaml:2:", "bad YAML"}},
	{"brace left open", "model: {hidden_size: 64\ndata: 5\n", {"run.yaml:", "hidden_size: found 64 data"}},
	{"tab", "model:\n\thidden_size: 64\n", {"run.yaml:2:", "bad YAML", "use spaces"}},
	{"bad UTF-8", "model:\n  # \xff\xfe\n", {"run.yaml:2:", "UTF-8"}},
	{"control character", "model:\n\n  a: \x01\n", {"run.yaml:3:", "control characters"}},
	{"NUL by escape", VALID "log: {every: \"1\\0\"}\n", {"run.yaml:5:", "NUL"}},
	{"second document", VALID "---\nmodel: {}\n", {"run.yaml:5:", "second YAML document"}},
	{"anchor", "model: &m {hidden_size: 64}\n", {"run.yaml:1:", "anchor &m"}},
	{"alias", VALID "log: *m\n", {"run.yaml:5:", "alias *m"}},
	{"tag", VALID "log: {every: !!int 3}\n", {"run.yaml:5:", "tag", "int"}},
	{"merge key", VALID "log:\n  <<: {every: 3}\n", {"run.yaml:6:", "unknown key log.<<"}},
	/* keys */
	{"unknown section", VALID "optimiser: {}\n", {"run.yaml:5:", "unknown key optimiser", "did you mean optimizer?"}},
	{"misspelt key", VALID "optimizer:\n  beta1: 0.9\n  beta_2: 0.95\n",
		{"run.yaml:7:", "unknown key optimizer.beta_2", "did you mean optimizer.beta2?"}},
	{"misspelt in model", "model:\n  hiden_size: 64\n", {"run.yaml:2:", "did you mean model.hidden_size?"}},
	{"misspelt in router", BAD_MODEL("router: {z_los_coef: 1}"), {"did you mean model.router.z_loss_coef?"}},
	{"wrong section", MODEL DATA "train: {seq_len: 5}\n", {"unknown key train.seq_len", "did you mean data.seq_len?"}},
	{"far from everything", VALID "optimizer: {quantum: 1}\n",
		{"unknown key optimizer.quantum", "one of beta1, beta2, eps"}},
	{"unlike any section", VALID "zzz: {tensor: 2}\n", {"unknown key zzz", "expected one of model, data, train"}},
	{"dotted key", VALID "log.every: 3\n", {"run.yaml:5:", "log.every", "nested"}},
	{"long key",
		VALID "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
		"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa: 1\n", {"run.yaml:5:", "unknown key aaaa", "..."}},
	{"empty key", VALID "'': 3\n", {"run.yaml:5:", "in place of a key"}},
	{"list as key", VALID "? [a]\n: 3\n", {"run.yaml:5:", "a list in place of a key"}},
	{"duplicate key", VALID "log:\n  every: 1\n  every: 2\n", {"run.yaml:7:", "duplicate key log.every", "line 6"}},
	{"duplicate section", VALID "log: {every: 1}\ndata: {train: b}\n", {"run.yaml:6:", "duplicate key data",
		"line 2"}},
	{"two spellings", BAD_MODEL("n_routed_experts: 8"), {"run.yaml:1:", "duplicate key model.num_experts"}},
	/* missing */
	{"no model", REST, {"run.yaml: model.hidden_size", "missing", "whole number, at least 1, at most 65536"}},
	{"no vocab_size", "model: {hidden_size: 64, num_hidden_layers: 1, num_attention_heads: 4}\n" REST,
		{"run.yaml: model.vocab_size", "missing"}},
	{"no experts", SIZES(64, 4, "norm_head: on"), {"model.num_experts:", "missing or 0", "2 layers"}},
	{"no experts per token", SIZES(64, 4, "num_experts: 8"), {"model.num_experts_per_tok:", "missing or 0"}},
	{"no expert width", SIZES(64, 4, "num_experts: 8, num_experts_per_tok: 1"),
		{"model.moe_intermediate_size:", "missing"}},
	{"no data.train", MODEL "data: {seq_len: 5}\n" TRAIN SCHEDULE, {"run.yaml: data.train", "missing"}},
	{"no seq_len", MODEL "data: {train: a}\n" TRAIN SCHEDULE, {"run.yaml: data.seq_len", "missing"}},
	{"no output_dir", MODEL DATA "train: {micro_batch: 1, batch: 1, steps: 1}\n" SCHEDULE,
		{"train.output_dir", "missing"}},
	{"no batch", MODEL DATA "train: {output_dir: x, micro_batch: 1, steps: 1}\n" SCHEDULE, {"train.batch:",
		"missing"}},
	{"no length", MODEL DATA "train: {" TRAIN_KEYS "}\n" SCHEDULE, {"train.steps:", "missing or 0", "train.tokens"}},
	{"two lengths", BAD_TRAIN("steps: 5,\n tokens: 1e6"), {"run.yaml:4:", "train.tokens: found 1000000", "off"}},
	{"no peak_lr", BAD_SCHEDULE("warmup_steps: 3"), {"schedule.peak_lr", "missing"}},
	{"section without keys", VALID "log:\n", {"run.yaml:5:", "log: found nothing", "a mapping"}},
	{"value missing", VALID "log:\n  every:\n", {"run.yaml:6:", "log.every: found nothing", "whole number"}},
	/* kinds of values */
	{"no rank", VALID "parallel: {tensor: 0}\n", {"run.yaml:5:", "parallel.tensor: found 0", "at least 1"}},
	{"rank off", VALID "parallel: {expert: off}\n", {"parallel.expert: found off", "at least 1"}},
	{"number in quotes", BAD_SCHEDULE("peak_lr: \"1e-4\""),
		{"run.yaml:4:", "found \"1e-4\" (take the quotes away)", "number"}},
	{"bool in quotes", BAD_DATA("seq_len: 5, shuffle: 'true'"),
		{"data.shuffle", "take the quotes away", "true or false"}},
	{"text for number", BAD_SCHEDULE("peak_lr: fast"), {"peak_lr: found fast", "a number, above 0"}},
	{"bool for number", BAD_DATA("seq_len: true"), {"data.seq_len: found true", "whole number"}},
	{"number for bool", BAD_DATA("seq_len: 5, shuffle: 1"), {"data.shuffle: found 1", "true or false"}},
	{"off for a size", BAD_DATA("seq_len: off"), {"data.seq_len: found off", "whole number"}},
	{"off for a path", MODEL DATA "train: {output_dir: off}\n", {"output_dir: found off", "put it in quotes"}},
	{"off for a section", VALID "optimizer: off\n", {"optimizer: found off", "a mapping"}},
	{"map for number", BAD_DATA("seq_len: {a: 1}"), {"data.seq_len: found a mapping", "whole number"}},
	{"list for text", BAD_DATA("seq_len: 5, tokenizer: [x]"), {"data.tokenizer: found a list", "byte | none"}},
	/* blends */
	{"map for files", MODEL "data: {seq_len: 5, train: {path: x}}\n" TRAIN SCHEDULE, {"data.train: found a mapping",
		"a path, or a list of {path: ..., weight: ..., dtype: ...}"}},
	{"file for sets", BAD_DATA("seq_len: 5, valid: {path: x}"), {"data.valid: found the key path in place of the name "
		"of a set", "[{path: ...}]"}},
	{"map for a set", BAD_DATA("seq_len: 5, valid: {web: {path: x}}"), {"data.valid: found a mapping",
		"a path, or a list of {path: ..., dtype: ...}, or a mapping of names to such, or off"}},
	{"no sets", BAD_DATA("seq_len: 5, valid: {}"), {"data.valid: found an empty mapping; expected a set"}},
	{"empty set", BAD_DATA("seq_len: 5, valid: {web: a, chat: []}"), {"data.valid: found an empty list"}},
	{"nothing for a set", BAD_DATA("seq_len: 5, valid: {web: }"), {"data.valid.path: found nothing"}},
	{"set twice", BAD_DATA("seq_len: 5, valid: {web: a, chat: b, web: c}"), {"data.valid: found the set web twice"}},
	{"set with a space", BAD_DATA("seq_len: 5, valid: {my web: a}"), {"data.valid: found my web in place of"}},
	{"set without a name", BAD_DATA("seq_len: 5, valid: {\"\": a}"), {"data.valid: found \"\" in place of the name"}},
	{"long set", BAD_DATA("seq_len: 5, valid: {a123456789b123456789c123456789d1: a}"), {"at most 31 letters"}},
	{"sample off", VALID "eval: {samples: [off]}\n", {"eval.samples.text: found off", "put it in quotes"}},
	{"sample without text", VALID "eval: {samples: [{}]}\n", {"eval.samples: the key text is missing"}},
	{"sample in a list", VALID "eval: {samples: [[a]]}\n", {"eval.samples: found a list (as an item)",
		"a text, or a list of {text: ...}, or off"}},
	{"samples by name", VALID "eval: {samples: {a: b}}\n", {"eval.samples: found a mapping"}},
	{"start without data", VALID "eval: {at_start: true}\n", {"run.yaml:5: eval.at_start: found true without"}},
	{"list in a list", BAD_DATA("seq_len: 5, valid: [[x]]"), {"data.valid: found a list (as an item)"}},
	{"weight without path", BAD_DATA("seq_len: 5, valid: [{dtype: uint16}]"), {"data.valid: the key path is missing"}},
	{"empty path", BAD_DATA("seq_len: 5, valid: [\"\"]"), {"data.valid.path: found \"\"", "a path"}},
	{"weight of validation", BAD_DATA("seq_len: 5, valid: [{path: x, weight: 2}]"), {"unknown key data.valid.weight",
		"data.train.weight"}},
	{"float ids", BAD_DATA("seq_len: 5, valid: [{path: x, dtype: float32}]"), {"data.valid.dtype: found float32",
		"uint16 | int16"}},
	{"negative weight", MODEL "data: {seq_len: 5, train: [{path: a, weight: -1}]}\n" TRAIN SCHEDULE,
			{"weight: found -1 (out of range)"}},
	{"no weight", MODEL "data: {seq_len: 5, train: [{path: a, weight: 0}, {path: b, weight: 0}]}\n" TRAIN SCHEDULE,
		{"run.yaml:2: data.train", "all weights are 0"}},
	{"no files", MODEL "data: {seq_len: 5, train: []}\n" TRAIN SCHEDULE, {"data.train: found an empty list"}},
	{"separator -2", BAD_DATA("seq_len: 5, document_token: -2"), {"document_token: found -2 (out of range)"}},
	{"number for section", VALID "log: 5\n", {"log: found 5", "a mapping"}},
	{"fraction", BAD_DATA("seq_len: 12.5"), {"data.seq_len: found 12.5", "whole number"}},
	{"fraction by exponent", BAD_DATA("seq_len: 15e-1"), {"found 15e-1", "whole number"}},
	{"nan", BAD_SCHEDULE("peak_lr: nan"), {"found nan", "a number, above 0"}},
	{".inf", BAD_SCHEDULE("peak_lr: .inf"), {"found .inf", "a number"}},
	{"dump of nothing", BAD_TRAIN("steps: 5, dump: {steps: [], dir: d}"), {"train.dump.steps: found no step", "off"}},
	{"dump to nowhere", BAD_TRAIN("steps: 5, dump: {steps: 2}"), {"train.dump: the key dir is missing"}},
	{"dump of step 0", BAD_TRAIN("steps: 5, dump: {steps: [1, 0], dir: d}"), {"train.dump.steps.number: found 0"}},
	{"dump of no step", BAD_TRAIN("steps: 5, dump: {steps: [5, 6], dir: d}"), {"train.dump.steps: found step 6",
		"5 steps"}},
	{"infinity", BAD_TRAIN("steps: 1, grad_clip: inf"), {"train.grad_clip: found inf", "or off"}},
	{"hex", BAD_DATA("seq_len: 0x10"), {"found 0x10", "whole number"}},
	{"octal", BAD_DATA("seq_len: 010"), {"found 010", "octal"}},
	{"octal in a fraction", BAD_SCHEDULE("peak_lr: 00.1"), {"found 00.1", "octal"}},
	{"sexagesimal", BAD_DATA("seq_len: 1:30"), {"found 1:30", "whole number"}},
	{"decimal comma", BAD_SCHEDULE("peak_lr: '0,1'"), {"take the quotes away"}},
	{"unit", BAD_TRAIN("tokens: 5M"), {"found 5M", "whole number"}},
	{"stray underscore", BAD_TRAIN("tokens: 5__000"), {"found 5__000"}},
	{"two signs", BAD_TRAIN("tokens: +-5"), {"found +-5"}},
	{"empty exponent", BAD_SCHEDULE("peak_lr: 1e"), {"found 1e;"}},
	{"huge exponent", BAD_SCHEDULE("peak_lr: 1e999"), {"found 1e999", "double"}},
	{"tiny exponent", BAD_SCHEDULE("peak_lr: 1e-999"), {"found 1e-999", "double"}},
	{"int64 overflow", BAD_TRAIN("tokens: 99999999999999999999"), {"found 99999999999999999999", "out of range"}},
	{"uint64 overflow", BAD_TRAIN("steps: 1, seed: 18446744073709551616"), {"train.seed: found 18446744073709551616"}},
	{"negative seed", BAD_TRAIN("steps: 1, seed: -1"), {"found -1 (out of range)"}},
	{"negative rate", BAD_SCHEDULE("peak_lr: -1e-3"), {"found -1e-3 (out of range)", "above 0"}},
	{"rate 0", BAD_SCHEDULE("peak_lr: 0"), {"found 0 (out of range)", "above 0"}},
	{"rate 1e5 for 1e-5", BAD_SCHEDULE("peak_lr: 1e5"), {"out of range", "at most 100"}},
	{"beta 1", VALID "optimizer: {beta2: 1.0}\n", {"optimizer.beta2", "below 1"}},
	{"eps 0", VALID "optimizer: {eps: 0}\n", {"optimizer.eps", "above 0"}},
	{"unknown name", BAD_SCHEDULE("peak_lr: 1, decay: {shape: 1_sqrt}"),
		{"decay.shape: found 1_sqrt", "linear | cosine | 1-sqrt | inverse_sqrt"}},
	{"unknown scope", BAD_MODEL("router: {balance_loss_scope: batch}"), {"found batch", "micro_batch | sequence"}},
	{"no tokenizer", BAD_DATA("seq_len: 5, tokenizer: off"), {"data.tokenizer: found off", "byte | none | a path"}},
	{"empty quotes for a number", VALID "eval: {every: ''}\n", {"eval.every: found \"\" (take the quotes away)"}},
	{"empty path", MODEL DATA "train: {output_dir: ''}\n", {"output_dir: found \"\"", "a path"}},
	{"newline in a path", MODEL DATA "train: {output_dir: \"a\\nb\"}\n", {"found \"a?b\" (a control character)"}},
	/* sizes */
	{"hidden 0", SIZES(0, 4, EXPERTS), {"run.yaml:1:", "hidden_size: found 0", "at least 1"}},
	{"hidden negative", SIZES(-64, 4, EXPERTS), {"hidden_size: found -64", "at least 1"}},
	{"hidden absurd", SIZES(1e9, 4, EXPERTS), {"hidden_size: found 1e9", "at most 65536"}},
	{"layers absurd", "model: {num_hidden_layers: 5000}\n", {"num_hidden_layers: found 5000", "at most 1024"}},
	{"vocab absurd", "model: {vocab_size: 1e10}\n", {"vocab_size: found 1e10", "at most 10000000"}},
	{"seq_len absurd", BAD_DATA("seq_len: 1e7"), {"seq_len: found 1e7", "at most 1000000"}},
	{"model absurd", "model: {hidden_size: 65536, num_hidden_layers: 1024, num_attention_heads: 64, vocab_size: 300,\n"
		"num_experts: 4096, num_experts_per_tok: 1, moe_intermediate_size: 1e6}\n" REST, {"parameters",
				"at most 1e15"}},
	{"run absurd", BAD_TRAIN("steps: 1e12"), {"train.steps", "tokens", "at most 1e+15"}},
	{"rows absurd", MODEL "data: {train: a, seq_len: 16384}\n"
		"train: {output_dir: x, batch: 10, steps: 1, micro_batch: 1e6}\n" SCHEDULE,
		{"run.yaml:3: train.micro_batch", "rows in a forward pass"}},
	{"heads do not divide", SIZES(64, 5, EXPERTS), {"run.yaml:1: model.num_attention_heads", "64"}},
	{"kv heads do not divide", SIZES(64, 4, EXPERTS ", num_key_value_heads: 3"),
		{"num_key_value_heads: found 3", "divisor"}},
	{"more kv heads", SIZES(64, 4, EXPERTS ", num_key_value_heads: 8"), {"num_key_value_heads: found 8", "divisor"}},
	{"odd head_dim", SIZES(64, 4, EXPERTS ", head_dim: 7"), {"head_dim: found 7", "even"}},
	{"odd derived head_dim", SIZES(60, 4, EXPERTS), {"head_dim: found 15", "even"}},
	{"wide derived head_dim", SIZES(65536, 4, EXPERTS), {"hidden_size: found 65536", "at most 4096"}},
	{"k above E", SIZES(64, 4, "num_experts: 2, num_experts_per_tok: 3, moe_intermediate_size: 8"),
		{"num_experts_per_tok: found 3", "at most num_experts, which is 2"}},
	{"dense without width", BAD_MODEL("first_k_dense_replace: 1"), {"model.intermediate_size", "missing or 0"}},
	{"shared experts absurd", SIZES(64, 4, "num_experts: 8, num_experts_per_tok: 1,\n num_shared_experts: 1024, "
		"moe_intermediate_size: 1048576"),
			{"run.yaml:2: model.num_shared_experts: found 1024 with moe_intermediate_size 1048576",
				"at most 268435455"}},
	{"too many dense", BAD_MODEL("first_k_dense_replace: 3, intermediate_size: 8"),
		{"first_k_dense_replace: found 3", "is 2"}},
	{"rope_scaling without type", BAD_MODEL("rope_scaling: {factor: 2}"), {"model.rope_scaling", "type is missing"}},
	{"rope_scaling misspelt", BAD_MODEL("rope_scaling: {type: yarn, facter: 2}"), {"did you mean", "factor"}},
	{"rope_scaling of no kind", BAD_MODEL("rope_scaling: {type: su, factor: 2}"),
		{"rope_scaling.type: found su", "yarn"}},
	{"rope_scaling factor", BAD_MODEL("rope_scaling: {type: linear}"),
		{"model.rope_scaling.factor: found 0", "at least 1"}},
	{"rope_scaling and default", BAD_MODEL("rope_scaling: {type: default, factor: 2}"),
		{"rope_scaling.factor: found beside rope_scaling of type default"}},
	{"seq_len above the model", BAD_DATA("seq_len: 20000"),
		{"data.seq_len: found 20000", "max_position_embeddings", "16384"}},
	{"vocabulary below byte", "model: {hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, " EXPERTS ",\n"
		"vocab_size: 256}\ndata: {train: a, seq_len: 5, tokenizer: byte}\n" TRAIN SCHEDULE,
		{"run.yaml:2: model.vocab_size: found 256", "at least 257"}},
	/* schedule and warmup */
	{"drop out of range", BAD_SCHEDULE("peak_lr: 1, drops: [{at: 1.5, factor: 0.5}]"),
		{"drops.at: found 1.5", "at most 1"}},
	{"drop without factor", BAD_SCHEDULE("peak_lr: 1, drops: [{at: 0.5}]"),
		{"schedule.drops: the key factor is missing"}},
	{"drop twice", BAD_SCHEDULE("peak_lr: 1, drops: [{at: 0.5, at: 0.6}]"), {"duplicate key schedule.drops.at"}},
	{"drop misspelt", BAD_SCHEDULE("peak_lr: 1, drops: [{at: 0.5, fator: 2}]"),
			{"did you mean schedule.drops.factor?"}},
	{"drops not a list", BAD_SCHEDULE("peak_lr: 1, drops: {at: 0.5, factor: 2}"), {"drops: found a mapping",
		"a list"}},
	{"drop not a map", BAD_SCHEDULE("peak_lr: 1, drops: [0.5]"),
		{"drops: found 0.5 (as an item)", "{at: ..., factor: ...}"}},
	{"drop factor 0", BAD_SCHEDULE("peak_lr: 1, drops: [{at: 0.5, factor: 0}]"), {"drops.factor: found 0", "above 0"}},
	{"drops not increasing", BAD_SCHEDULE("peak_lr: 1,\n drops: [{at: 0.5, factor: 2}, {at: 0.5, factor: 2}]"),
		{"run.yaml:5: schedule.drops", "increase"}},
	{"17 drops", BAD_SCHEDULE("peak_lr: 1, drops: [{at: 0, factor: 1}, {at: 0, factor: 1}, {at: 0, factor: 1},"
		"{at: 0, factor: 1}, {at: 0, factor: 1}, {at: 0, factor: 1}, {at: 0, factor: 1}, {at: 0, factor: 1},"
		"{at: 0, factor: 1}, {at: 0, factor: 1}, {at: 0, factor: 1}, {at: 0, factor: 1}, {at: 0, factor: 1},"
		"{at: 0, factor: 1}, {at: 0, factor: 1}, {at: 0, factor: 1}, {at: 0, factor: 1}]"), {"more than 16"}},
	{"inverse_sqrt to 0", BAD_SCHEDULE("peak_lr: 1, decay: {steps: 0, shape: inverse_sqrt}"), {"final_lr", "above 0"}},
	{"decay without steps", BAD_SCHEDULE("peak_lr: 1, decay: {final_lr: 1e-5}"),
		{"run.yaml:4: schedule.decay: the key steps is missing"}},
	{"ramp without tokens", BAD_TRAIN("steps: 9, batch_warmup: {start: 4, increment: 4}"),
			{"the key tokens is missing"}},
	{"ramp empty", BAD_TRAIN("steps: 9, batch_warmup: {}"), {"train.batch_warmup: the key start is missing"}},
	{"ramp by 0", BAD_TRAIN("steps: 9, batch_warmup: {start: 4, increment: 0, tokens: 9}"),
		{"increment: found 0", "at least 1"}},
	{"ramp all 0", BAD_TRAIN("steps: 9, batch_warmup: {start: 0, increment: 0, tokens: 0}"),
		{"start: found 0", "at least 1"}},
	{"ramp from above", BAD_TRAIN("steps: 9, batch_warmup: {start: 32, increment: 4, tokens: 9}"),
		{"start: found 32", "train.batch, which is 16"}},
	/* model files */
	{"no model file", "model: nowhere.yaml\n" REST, {"run.yaml:1:", "no file nowhere.yaml", "configs"}},
	{"model is a folder", "model: .\n" REST, {"/config.json: cannot open"}},
	{"model file without model", "model: other.yaml\n" REST, {"run.yaml:1:", "other.yaml has no model section"}},
	{"model file in model file", "model: chain.yaml\n" REST, {"chain.yaml:2:", "expected a mapping"}},
	{"error in model file", "model: bad-model.yaml\n" REST, {"bad-model.yaml:3:", "did you mean model.vocab_size?"}},
	{"check in model file", "model: odd-model.yaml\n" REST, {"odd-model.yaml:2: model.head_dim: found 7"}},
};

static void test_broken(void **state)
{
	(void)state;
	put_string(at("other.yaml"), "data: {train: a}\n");
	put_string(at("chain.yaml"), "# again\nmodel: other.yaml\n");
	put_string(at("bad-model.yaml"), "model:\n  hidden_size: 64\n  vocabsize: 5\n");
	put_string(at("odd-model.yaml"),
			"model: { hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 300,\n"
			" head_dim: 7, " EXPERTS "}\n");
	for (size_t i = 0; i < sizeof broken / sizeof broken[0]; i++) {
		struct config c;
		expect_words(broken[i].name, load(&c, broken[i].text), broken[i].words);
	}
}

/* Files that are none, and files that are too much. */
static void test_files(void **state)
{
	(void)state;
	struct config c;
	expect_words("missing", config_load(&c, "/nowhere/run.yaml", 0, NULL, false),
			(const char *const[3]){"/nowhere/run.yaml", "No such file"});
	expect_words("folder", config_load(&c, scratch, 0, NULL, false), (const char *const[3]){scratch, "a directory"});
	expect_words("NUL", config_load(&c, put_file(at("nul.yaml"), "model:\n\0\n", 9), 0, NULL, false),
			(const char *const[3]){"nul.yaml:2:", "control characters"});

	char long_text[2048] = VALID "log: {every: ", *long_override[] = {long_text};
	for (int i = 0; i < 70; i++)
		strcat(long_text, "9");
	expect_words("70 digits", load(&c, strcat(long_text, "}\n")), (const char *const[3]){"found 9999",
			"...; expected"});
	strcpy(long_text, "data.train=x");
	for (int i = 0; i < 600; i++)
		strcat(long_text, "\u00e9");
	expect_words("long path", config_load(&c, put_string(at("run.yaml"), VALID), 1, long_override, false),
			(const char *const[3]){"found x\u00e9", "\u00e9... (too long)", "at most 1023 bytes"});

	/* the longest output_dir whose checkpoints have paths that fit, and one byte more */
	char longest[PATH_LEN + 64] = "train.output_dir=", inner[PATH_LEN], *output_dir[] = {longest};
	const int room = 1023 - (int)strlen("/.tmp-step-1234567890123456789/optimizer-00001-of-00001.safetensors");
	memset(longest + strlen(longest), 'x', room);
	assert_int_equal(config_load(&c, put_string(at("run.yaml"), VALID), 1, output_dir, false), 0);
	assert_int_equal(checkpoint_path(inner, c.train.output_dir, ".tmp-step-", INT64_MAX), 0);
	assert_int_equal(path_join((char[PATH_LEN]){0}, inner, "optimizer-00001-of-00001.safetensors"), 0);
	strcat(longest, "x");
	expect_words("long output_dir", config_load(&c, put_string(at("run.yaml"), VALID), 1, output_dir, false),
			(const char *const[3]){"train.output_dir: found a path of", "expected at most"});

	size_t size = 3 << 20;
	char *text = malloc(size + 1);
	memset(text, '#', size);
	expect_words("large", config_load(&c, put_file(at("large.yaml"), text, size), 0, NULL, false),
			(const char *const[3]){"large.yaml", "at most 1 MiB"});
	/* deep nesting where a value is expected, at once and after a key */
	size = 1 << 20;
	memset(text, '[', size);
	expect_words("deep list", config_load(&c, put_file(at("deep.yaml"), text, size), 0, NULL, false),
			(const char *const[3]){"deep.yaml:1:", "found a list"});
	memset(text, '{', size);
	expect_words("deep map", config_load(&c, put_file(at("deep.yaml"), text, size), 0, NULL, false),
			(const char *const[3]){"deep.yaml:1:"});
	memcpy(text, "train: ", 7);
	expect_words("deep map in a section", config_load(&c, put_file(at("deep.yaml"), text, size), 0, NULL, false),
			(const char *const[3]){"deep.yaml:1:"});
	for (size_t i = 0; i < size; i++)
		text[i] = i % 2 ? ' ' : '-';
	expect_words("deep dashes", config_load(&c, put_file(at("deep.yaml"), text, size), 0, NULL, false),
			(const char *const[3]){"deep.yaml:1:"});
	/* the same as JSON */
	char directory[PATH_LEN];
	assert_int_equal(path_join(directory, scratch, "deep"), 0);
	assert_int_equal(make_directories(directory), 0);
	memset(text, '[', size);
	put_file(at("deep/config.json"), text, size);
	struct model_config m;
	expect_words("deep JSON", config_from_huggingface(&m, directory), (const char *const[3]){"deep/config.json:1"});
	free(text);
}

static void test_model_file(void **state)
{
	(void)state;
	struct config c;
	put_string(at("tiny.yaml"), MODEL "log: {every: 5}\n");
	put_string(at("small.yaml"), "model: {" MODEL_KEYS ", norm_head: off, num_shared_experts: 2}\n");
	load_ok(&c, "model: tiny.yaml\n" REST);
	assert_true(c.model.hidden_size == 64 && c.model.head_dim == 32 && c.log.every == 1);
	assert_int_equal(config_load(&c, put_string(at("just.yaml"), MODEL), 0, NULL, true), 0);
	assert_int_equal(c.model.vocab_size, 300);

	char absolute[PATH_LEN + 32], *overrides[] = {absolute, "model.num_shared_experts=1"};
	snprintf(absolute, sizeof absolute, "model=%s/small.yaml", scratch);
	assert_int_equal(config_load(&c, put_string(at("run.yaml"), "model: tiny.yaml\n" REST), 2, overrides, false), 0);
	assert_true(!c.model.norm_head && c.model.num_shared_experts == 1);
	char *relative[] = {"model=small.yaml"};
	assert_int_equal(config_load(&c, put_string(at("run.yaml"), VALID), 1, relative, false), 0);
	assert_int_equal(c.model.num_shared_experts, 2);

	/* a Hugging Face directory: what its config.json leaves out is as its class has it, not as a config has it */
	char *other[] = {"model=theirs", "model.router.warmup_steps=7"};
	assert_int_equal(make_directories(at("theirs")), 0);
	put_string(at("theirs/config.json"),
			"{\"hidden_size\": 64, \"num_hidden_layers\": 2, \"num_attention_heads\": 2, \"vocab_size\": 300, "
			"\"n_routed_experts\": 4, \"num_experts_per_tok\": 2, \"moe_intermediate_size\": 16, \"auto_map\": {}}");
	load_ok(&c, "model: theirs\n" REST);
	assert_true(c.model.num_experts == 4 && c.model.use_bias && !c.model.norm_head && c.model.rope_theta == 10000 &&
			c.model.router.z_loss_coef == 1e-4);
	assert_int_equal(config_load(&c, put_string(at("run.yaml"), "model: tiny.yaml\n" REST), 2, other, false), 0);
	assert_true(c.model.num_experts == 4 && c.model.router.warmup_steps == 7);
	put_string(at("theirs/config.json"), "{\"hidden_size\": 64, \"vocab_size\": 1.5}");
	expect_words("config.json", load(&c, "model: theirs\n" REST),
			(const char *const[3]){"theirs/config.json: vocab_size: found 1.5"});
	put_string(at("theirs/config.json"), "{\"hidden_size\": 64, \"model_type\": \"llama\"}");
	expect_words("other model", load(&c, "model: theirs\n" REST),
			(const char *const[3]){"theirs/config.json: model_type: found \"llama\""});
}

static void test_overrides(void **state)
{
	(void)state;
	struct config c;
	const char *path = put_string(at("run.yaml"), full);
	char *good[] = {"train.steps=off", "train.tokens=1e6", "schedule.drops=[{at: 0.5, factor: 0.1}]", "data.valid=off",
		"train.batch_warmup={start: 4, increment: 4, tokens: 1000}", "model.n_shared_experts=2", "schedule.decay=off",
		"data.train=a=b.bin", "train.seed=2_000", "model.router.warmup_steps=off"};
	assert_int_equal(config_load(&c, path, sizeof good / sizeof good[0], good, false), 0);
	assert_true(c.train.steps == 0 && c.train.tokens == 1000000 && c.schedule.num_drops == 1);
	assert_true(c.schedule.drops[0].at == 0.5 && c.schedule.drops[0].factor == 0.1);
	assert_true(c.train.batch_warmup.start == 4 && c.train.batch_warmup.tokens == 1000);
	assert_true(c.model.num_shared_experts == 2 && c.schedule.decay.steps == 0 && c.schedule.decay.final_lr == 0);
	assert_string_equal(c.data.train[0].path, "a=b.bin");
	assert_int_equal(c.data.num_valid, 0);
	assert_true(c.train.seed == 2000 && c.model.router.warmup_steps == 0 && c.model.hidden_size == 256);

	/* Of a key given twice the last one wins: by its name or alias, in a section or alone. */
	static const struct { char *arguments[2]; int steps, seed, experts, decay; } twice[] = {
		{{"train.steps=5", "train.steps=6"}, 6, 1, 8, 0}, {{"train.steps=6", "train.steps=5"}, 5, 1, 8, 0},
		{{"model.num_experts=5", "model.n_routed_experts=6"}, 10, 1, 6, 0},
		{{"train.seed=3", "train={output_dir: r, steps: 4, micro_batch: 1, batch: 2}"}, 4, 1, 8, 0},
		{{"train={output_dir: r, steps: 4, micro_batch: 1, batch: 2}", "train.seed=3"}, 4, 3, 8, 0},
		{{"schedule.decay={steps: 4}", "schedule.decay.steps=3"}, 10, 1, 8, 3},
		{{"schedule.decay={steps: 4}", "schedule.decay=off"}, 10, 1, 8, 0},
	};
	for (size_t i = 0; i < sizeof twice / sizeof *twice; i++) {
		put_string(at("twice.yaml"), VALID);
		if (config_load(&c, at("twice.yaml"), 2, (char **)twice[i].arguments, false) < 0)
			fail_msg("%s %s: %s", twice[i].arguments[0], twice[i].arguments[1], error_text);
		assert_int_equal(c.train.steps, twice[i].steps);
		assert_int_equal(c.train.seed, twice[i].seed);
		assert_int_equal(c.model.num_experts, twice[i].experts);
		assert_int_equal(c.schedule.decay.steps, twice[i].decay);
	}

	static const struct { const char *name; char *arguments[2]; const char *words[3]; } bad[] = {
		{"no =", {"train.steps"}, {"command line: train.steps: expected key.path=value"}},
		{"no key", {"=5"}, {"expected key.path=value"}},
		{"unknown", {"train.step=5"},
			{"command line: train.step=5: unknown key train.step; did you mean train.steps?"}},
		{"misspelt section", {"modle.hidden_size=5"}, {"did you mean model.hidden_size?"}},
		{"unknown section", {"nowhere.quantum=5"}, {"unknown key nowhere.quantum; expected one of model, data"}},
		{"space", {"train.steps =5"}, {"did you mean train.steps?"}},
		{"long", {"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
			"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa=1"}, {"unknown key aaaa"}},
		{"twice in one", {"schedule.decay={steps: 4, steps: 5}"},
			{"command line: schedule.decay={steps: 4, steps: 5}: duplicate key schedule.decay.steps"}},
		{"file after its key", {"model.head_dim=4", "model=x.yaml"}, {"there is no file x.yaml"}},
		{"~", {"train.output_dir=~/runs"}, {"train.output_dir: found ~/runs (only a shell expands ~"}},
		{"~ of data", {"data.train=~me/text"}, {"data.train.path: found ~me/text (only a shell expands ~"}},
		{"~ of a model", {"model=~/ling"}, {"model: found ~/ling (only a shell expands ~"}},
		{"empty", {"train.steps="}, {"command line: train.steps=: train.steps: found nothing"}},
		{"type", {"train.steps=abc"},
			{"command line: train.steps=abc: train.steps: found abc; expected a whole number"}},
		{"bad YAML", {"schedule.drops=[{at: 0.5"}, {"command line: schedule.drops=[{at: 0.5: bad YAML"}},
		{"two documents", {"train.steps=5\n---\n6"}, {"second YAML document"}},
		{"list item", {"schedule.drops.at=0.5"}, {"schedule.drops=[{at: ..."}},
		{"check", {"model.num_key_value_heads=3"}, {"command line: model.num_key_value_heads=3:", "divisor"}},
		{"replaced section", {"train={steps: 4}"}, {"train.output_dir", "missing"}},
		{"half a section", {"schedule.decay=off", "schedule.decay.final_lr=1e-7"},
			{"command line: schedule.decay.final_lr=1e-7: schedule.decay: the key steps is missing"}},
		{"no model file", {"model=nope.yaml"}, {"command line: model=nope.yaml: model: there is no file nope.yaml"}},
	};
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
		expect_words(bad[i].name, config_load(&c, path, bad[i].arguments[1] ? 2 : 1, (char **)bad[i].arguments, false),
				bad[i].words);
}

static int read_huggingface(struct model_config *m, const char *text)
{
	put_string(at("config.json"), text);
	return config_from_huggingface(m, scratch);
}

#define HF "\"hidden_size\": 64, \"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"vocab_size\": 300, " \
	"\"num_experts_per_tok\": 2, \"moe_intermediate_size\": 16"

static void test_huggingface(void **state)
{
	(void)state;
	struct model_config m;
	assert_int_equal(read_huggingface(&m, "{" HF ", \"num_experts\": 8}"), 0);
	assert_true(m.use_bias && !m.use_qkv_bias && !m.norm_head && m.norm_topk_prob && !m.tie_word_embeddings);
	assert_true(m.rope_theta == 10000 && m.rms_norm_eps == 1e-5 && m.initializer_range == 0.02);
	assert_true(m.num_shared_experts == 0 && m.first_k_dense_replace == 0 && m.head_dim == 16);
	assert_int_equal(m.num_key_value_heads, 4);
	assert_true(m.router.balance_loss_coef == 0.015 && m.router.z_loss_coef == 1e-4 && m.router.warmup_steps == 0);

	assert_int_equal(read_huggingface(&m, "{" HF ", \"architectures\": [\"BailingMoeForCausalLM\"],"
			"\"hidden_act\": \"silu\", \"model_type\": \"bailing_moe\", \"n_routed_experts\": 8, "
					"\"n_shared_experts\": 2,"
			"\"head_dim\": null,"
			"\"rms_norm_eps\": 1e-06, \"rope_theta\": 600000, \"use_bias\": false, \"norm_head\": true,"
			"\"rope_scaling\": null, \"sliding_window\": 4096, \"use_sliding_window\": false, \"n_group\": 1,"
			"\"partial_rotary_factor\": 1.0,"
			"\"auto_map\": {\"a.b\": [1]}, \"router\": 5, \"intermediate_size\": null, \"eos_token_id\": 126081}"), 0);
	assert_true(m.num_experts == 8 && m.num_shared_experts == 2 && m.head_dim == 16 && m.rms_norm_eps == 1e-6);
	assert_true(m.rope_theta == 600000 && !m.use_bias && m.norm_head);
	assert_int_equal(read_huggingface(&m, "{" HF ", \"num_experts\": 8, \"head_dim\": 0}"), 0);
	assert_int_equal(m.head_dim, 16);
	assert_int_equal(read_huggingface(&m, "{" HF ", \"num_experts\": 8, \"head_dim\": 20}"), 0);
	assert_int_equal(m.head_dim, 20);
	/* As transformers 5 writes it, and in the older places: a type that changes nothing. */
	static const char *const thetas[] = {
		"\"rope_parameters\": {\"rope_theta\": 5e5, \"rope_type\": \"default\"}",
		"\"rope_theta\": 5e5, \"rope_scaling\": {\"type\": \"default\", \"factor\": 1.0}",
		"\"rope_theta\": 500000, \"rope_parameters\": {\"rope_theta\": 500000.0, \"partial_rotary_factor\": 1}",
		"\"rope_scaling\": {\"rope_type\": \"default\", \"rope_theta\": 500000, \"factor\": null}",
	};
	for (int i = 0; i < 4; i++) {
		char text[1024];
		snprintf(text, sizeof text, "{" HF ", \"num_experts\": 8, %s}", thetas[i]);
		if (read_huggingface(&m, text) < 0)
			fail_msg("%s: %s", thetas[i], error_text);
		assert_true(m.rope_theta == 500000);
	}

#define BAD_HF(extra) "{" HF ", \"num_experts\": 8, " extra "}"
	static const struct { const char *text, *words[3]; } bad[] = {
		{"", {"config.json:", "bad JSON"}},
		{"[]", {"expected a JSON object"}},
		{"{\n\"a\": 1,\n\"a\": 2}", {"config.json:3:", "duplicate"}},
		{"{\n\"a\": }", {"config.json:2:", "bad JSON"}},
		{"{}", {"config.json: hidden_size: the key is missing"}},
		{"{" HF "}", {"config.json: num_experts: missing or 0"}},
		{BAD_HF("\"n_routed_experts\": 8"), {"config.json: duplicate key model.num_experts (or another spelling"}},
		{BAD_HF("\"rope_theta\": \"1e4\""), {"rope_theta: found \"1e4\"", "a number"}},
		{BAD_HF("\"norm_head\": 1"), {"config.json: norm_head: found 1", "true or false"}},
		{BAD_HF("\"max_position_embeddings\": 1e4"), {"max_position_embeddings: found 10000.0", "whole number"}},
		{BAD_HF("\"first_k_dense_replace\": -1"), {"first_k_dense_replace: found -1"}},
		{BAD_HF("\"num_key_value_heads\": 3"), {"num_key_value_heads: found 3", "divisor"}},
		{BAD_HF("\"model_type\": \"llama\""), {"model_type: found \"llama\"", "bailing_moe"}},
		{BAD_HF("\"architectures\": [\"BailingMoeV3ForCausalLM\"]"),
			{"architectures", "V3", "[\"BailingMoeForCausalLM\"] or [\"BailingMoeV2ForCausalLM\"]"}},
		{BAD_HF("\"hidden_act\": \"gelu\""), {"hidden_act: found \"gelu\"", "not supported", "silu"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 4}"), {"rope_scaling: found {", "expected null"}},
		{BAD_HF("\"rope_scaling\": {\"type\": 4}"), {"rope_scaling: found {", "expected null"}},
		{BAD_HF("\"rope_parameters\": {\"rope_type\": \"yarn\"}"), {"factor: found 0", "at least 1", "type yarn"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"yarn\", \"rope_type\": \"linear\", \"factor\": 2}"), {"differ"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 0.5}"), {"factor: found 0.5", "at least 1"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2, \"attention_factor\": 0}"),
			{"rope_scaling: found {", "not supported"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2, \"beta_slow\": 33}"),
			{"beta_fast: found 32", "at least beta_slow, which is 33"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2, \"alpha\": 33}"),
			{"rope_scaling: found {", "not supported"}},
		{BAD_HF("\"rope_theta\": 1, \"rope_scaling\": {\"type\": \"yarn\", \"factor\": 2}"),
			{"rope_theta: found 1", "above 1"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2, \"beta_fast\": 16}"),
			{"beta_fast: found beside rope_scaling of type linear"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"linear\", \"factor\": \"2\"}"), {"factor: found \"2\"", "a number"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2, \"original_max_position_embeddings\": 9}"),
			{"original_max_position_embeddings: found 9", "which rope_scaling of type dynamic counts from"}},
		{BAD_HF("\"head_dim\": 2, \"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}"),
			{"head_dim: found 2", "at least 4"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}, \"rope_parameters\": {\"type\": \"linear\", "
			"\"factor\": 3}"), {"rope_scaling and rope_parameters differ"}},
		{BAD_HF("\"rope_scaling\": {\"type\": \"default\", \"factor\": 2}"),
			{"factor: found beside rope_scaling of type default"}},
		{BAD_HF("\"rope_parameters\": {\"rope_type\": \"default\", \"new\": 1}"), {"rope_parameters: found {"}},
		{BAD_HF("\"rope_parameters\": 5"), {"rope_parameters: found 5", "null or an object"}},
		{BAD_HF("\"rope_theta\": 1e4, \"rope_parameters\": {\"rope_theta\": 1e5}"),
			{"rope_parameters: found rope_theta 100000, but 10000 outside it"}},
		{BAD_HF("\"rope_parameters\": {\"rope_theta\": \"x\"}"), {"rope_theta: found \"x\"", "a number"}},
		{BAD_HF("\"use_qk_norm\": true"), {"use_qk_norm: found true", "expected false"}},
		{BAD_HF("\"use_sliding_window\": true"), {"use_sliding_window"}},
		{BAD_HF("\"norm_softmax\": true"), {"norm_softmax"}},
		{BAD_HF("\"score_function\": \"sigmoid\""), {"score_function: found \"sigmoid\""}},
		{BAD_HF("\"n_group\": 8"), {"n_group: found 8", "expected 1"}},
		{BAD_HF("\"topk_group\": 4"), {"topk_group: found 4"}},
		{BAD_HF("\"routed_scaling_factor\": 2.5"), {"routed_scaling_factor: found 2.5"}},
		{BAD_HF("\"moe_router_enable_expert_bias\": true"), {"moe_router_enable_expert_bias"}},
		{BAD_HF("\"partial_rotary_factor\": 0.5"), {"partial_rotary_factor: found 0.5"}},
	};
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
		expect_words(bad[i].text, read_huggingface(&m, bad[i].text), bad[i].words);
	expect_words("no folder", config_from_huggingface(&m, "/nowhere"),
			(const char *const[3]){"/nowhere/config.json", "No such file"});
}

/* Ling 2.0: what is missing is as its class has it. The defaults are those of BailingMoeV2Config of
 * github.com/inclusionAI/Ling-V2, models/configuration_bailing_moe_v2.py, commit af8837e. */
static void test_v2_defaults(void **state)
{
	(void)state;
	struct model_config m;
	static const char *const names[] = {"\"architectures\": [\"BailingMoeV2ForCausalLM\"]",
		"\"architectures\": [\"BailingMoeV2ForCausalLM\"], \"model_type\": \"bailing_moe\"",
		"\"model_type\": \"bailing_moe_v2\""};
	for (int i = 0; i < COUNT(names); i++) {
		char text[256];
		snprintf(text, sizeof text, "{%s}", names[i]);
		if (read_huggingface(&m, text) < 0)
			fail_msg("%s: %s", text, error_text);
		assert_int_equal(m.architecture, BAILING_MOE_V2);
		assert_true(m.vocab_size == 157184 && m.hidden_size == 2048 && m.intermediate_size == 5120);
		assert_true(m.num_hidden_layers == 20 && m.num_attention_heads == 16 && m.num_key_value_heads == 4);
		assert_true(m.head_dim == 128 && !m.use_qkv_bias && !m.use_bias && m.rms_norm_eps == 1e-6);
		assert_true(!m.tie_word_embeddings && m.initializer_range == 0.02 && m.max_position_embeddings == 32768);
		assert_true(m.rope_theta == 600000 && m.rope_scaling.type == ROPE_DEFAULT && m.partial_rotary_factor == 1);
		assert_true(m.num_experts == 256 && m.num_shared_experts == 1 && m.num_experts_per_tok == 8);
		assert_true(m.n_group == 8 && m.topk_group == 4 && m.moe_intermediate_size == 512);
		assert_true(m.first_k_dense_replace == 1 && m.use_qk_norm && m.num_nextn_predict_layers == 0);
		assert_true(m.mtp_loss_scaling_factor == 0 && m.moe_router_enable_expert_bias && m.norm_topk_prob);
		assert_true(m.routed_scaling_factor == 1 && m.score_function == SCORE_SIGMOID && !m.norm_head);
		assert_true(m.router.balance_loss_coef == 0 && m.router.z_loss_coef == 3.5e-6 &&
				m.router.bias_update_rate == 1e-3);
	}

	/* in YAML the shape must be given, and what is no shape is as in the class */
	struct config c;
	load_ok(&c, "model: {architecture: BailingMoeV2ForCausalLM, " MODEL_KEYS "}\n" REST);
	m = c.model;
	assert_true(m.n_group == 1 && m.topk_group == 1 && m.first_k_dense_replace == 0 && m.num_shared_experts == 0);
	assert_true(m.score_function == SCORE_SIGMOID && m.use_qk_norm && m.moe_router_enable_expert_bias && !m.norm_head);
	assert_true(m.rms_norm_eps == 1e-6 && m.initializer_range == 0.02 && m.max_position_embeddings == 32768);
	assert_true(m.router.balance_loss_coef == 0 && m.router.z_loss_coef == 3.5e-6 && m.mtp_loss_scaling_factor == 0);
	char *mtp[] = {"model.num_nextn_predict_layers=2", "model.mtp_loss_scaling_factor=off", "model=x"};
	for (int i = 1; i <= 2; i++) {
		assert_int_equal(config_load(&c, at("run.yaml"), i, mtp, false), 0);
		assert_true(c.model.num_nextn_predict_layers == 2 && c.model.mtp_loss_scaling_factor == (i == 1 ? 0.1 : 0));
	}
	static const struct { char *key; const char *words[3]; } idle[] = {
		{"model.mtp_loss_scaling_factor=0.1", {"model.mtp_loss_scaling_factor: found 0.1, but there are no layers"}},
		{"model.topk_group=2", {"model.topk_group: found 2, but there are no groups"}},
	};
	for (int i = 0; i < COUNT(idle); i++) /* what would have no effect */
		expect_words(idle[i].key, config_load(&c, at("run.yaml"), 1, (char *[]){idle[i].key}, false), idle[i].words);
	char *rate[] = {"model.router.bias_update_rate=1e-2", "model.architecture=BailingMoeForCausalLM"};
	assert_int_equal(config_load(&c, at("run.yaml"), 1, rate, false), 0);
	expect_words(rate[0], config_load(&c, at("run.yaml"), 2, rate, false), (const char *const[3]){
			"model.router.bias_update_rate: found 0.01, but only models of the class BailingMoeV2"});
	/* a directory of such a model misses nothing */
	assert_int_equal(make_directories(at("x")), 0);
	put_string(at("x/config.json"), "{\"architectures\": [\"BailingMoeV2ForCausalLM\"]}");
	assert_int_equal(config_load(&c, at("run.yaml"), 1, mtp + 2, false), 0);
	assert_true(c.model.num_experts == 256 && c.model.n_group == 8);
}

/* The config.json of Ling-flash-2.0 and the smaller ones as they are published, and other spellings. */
static void test_v2(void **state)
{
	(void)state;
	struct model_config m, spelt;
#define V2 "\"architectures\": [\"BailingMoeV2ForCausalLM\"], \"model_type\": \"bailing_moe\""
	assert_int_equal(read_huggingface(&m, "{" V2 ", \"attention_dropout\": 0.0, \"num_hidden_layers\": 32, "
			"\"hidden_size\": 4096, \"intermediate_size\": 9216, \"eos_token_id\": 156895, \"pad_token_id\": 156892, "
			"\"first_k_dense_replace\": 1, \"hidden_act\": \"silu\", \"max_position_embeddings\": 32768, "
			"\"moe_intermediate_size\": 1024, \"norm_topk_prob\": true, \"num_experts_per_tok\": 8, "
			"\"num_attention_heads\": 32, \"num_experts\": 256, \"num_key_value_heads\": 4, \"rope_theta\": 600000, "
			"\"rope_scaling\": null, \"use_bias\": false, \"use_rmsnorm\": true, \"rms_norm_eps\": 1e-06, "
			"\"head_dim\": 128, \"num_shared_experts\": 1, \"use_cache\": true, \"use_qkv_bias\": false, "
			"\"embedding_dropout\": 0.0, \"output_dropout\": 0.0, \"vocab_size\": 157184, "
			"\"partial_rotary_factor\": 0.5, \"router_dtype\": \"fp32\", \"moe_router_enable_expert_bias\": true, "
			"\"routed_scaling_factor\": 2.5, \"n_group\": 8, \"topk_group\": 4, \"use_qk_norm\": true, "
			"\"score_function\": \"sigmoid\", \"moe_shared_expert_intermediate_size\": 1024}"), 0);
	assert_true(m.hidden_size == 4096 && m.num_hidden_layers == 32 && m.moe_intermediate_size == 1024);
	assert_true(m.routed_scaling_factor == 2.5 && m.partial_rotary_factor == 0.5 && rotary_dim(&m) == 64);

	/* half of the head, by each of its names; null is nothing said, or none where a number of something is meant */
	static const char *const halves[] = {"\"partial_rotary_factor\": 0.5", "\"rotary_dim\": 64",
		"\"rotary_dim\": 64, \"partial_rotary_factor\": 0.5", "\"rope_parameters\": {\"rope_type\": \"default\", "
		"\"partial_rotary_factor\": 0.5, \"rope_theta\": 6e5}", "\"partial_rotary_factor\": 0.5, \"rotary_dim\": null",
		"\"head_dim\": null, \"rotary_dim\": 64, \"score_function\": null, \"routed_scaling_factor\": null, "
		"\"use_qk_norm\": null, \"moe_router_enable_expert_bias\": null, \"num_nextn_predict_layers\": null"};
	for (int i = 0; i < COUNT(halves); i++) {
		char text[512];
		snprintf(text, sizeof text, "{" V2 ", %s}", halves[i]);
		if (read_huggingface(i ? &spelt : &m, text) < 0)
			fail_msg("%s: %s", text, error_text);
		if (i)
			assert_memory_equal(&m, &spelt, sizeof m);
	}
	assert_int_equal(rotary_dim(&m), 64);
	for (int d = 2; d <= 200; d += 12) /* whatever the quotient is in binary: 2 / 98 * 98 is less than 2 */
		for (int rot = 2; rot <= d; rot += 2) {
			char text[256];
			snprintf(text, sizeof text, "{" V2 ", \"head_dim\": %d, \"rotary_dim\": %d}", d, rot);
			assert_int_equal(read_huggingface(&m, text), 0);
			assert_int_equal(rotary_dim(&m), rot);
		}
	/* what rounds to the same elements is the same */
	assert_int_equal(read_huggingface(&m, "{" V2 ", \"head_dim\": 96, \"rotary_dim\": 32, "
			"\"partial_rotary_factor\": 0.334}"), 0);
	assert_true(rotary_dim(&m) == 32 && m.partial_rotary_factor == 0.334);
	static const char *const none[] = {"\"n_group\": 0, \"topk_group\": 0", "\"n_group\": null, \"topk_group\": null",
		"\"n_group\": 1, \"topk_group\": 1", "\"n_group\": 1", "\"n_group\": 0, \"num_shared_experts\": null"};
	for (int i = 0; i < COUNT(none); i++) {
		char text[256];
		snprintf(text, sizeof text, "{" V2 ", %s}", none[i]);
		if (read_huggingface(&m, text) < 0)
			fail_msg("%s: %s", text, error_text);
		assert_true(m.n_group == 1 && m.topk_group == 1 && m.num_shared_experts == (i < 4));
	}
	/* all layers dense: groups are of no meaning, but for MTP layers */
	assert_int_equal(read_huggingface(&m, "{" V2 ", \"first_k_dense_replace\": 20, \"n_group\": 3}"), 0);
	assert_true(m.n_group == 1 && m.topk_group == 1);

	static const struct { const char *extra, *words[3]; } bad[] = {
		{"\"partial_rotary_factor\": 0.5, \"rotary_dim\": 32",
			{"config.json: rotary_dim: found partial_rotary_factor 0.25, but 0.5 outside it"}},
		{"\"rotary_dim\": 129", {"rotary_dim: found 129", "up to the width of a head"}},
		{"\"rotary_dim\": 63", {"partial_rotary_factor: found 63 elements of a head that turn, of 128", "even"}},
		{"\"rotary_dim\": \"64\"", {"rotary_dim: found \"64\""}},
		{"\"partial_rotary_factor\": 0", {"partial_rotary_factor: found 0"}},
		{"\"partial_rotary_factor\": 1.5", {"partial_rotary_factor: found 1.5"}},
		{"\"score_function\": \"softmax\"", {"score_function: found \"softmax\"; expected \"sigmoid\"",
			"BailingMoeV2ForCausalLM"}},
		{"\"score_function\": \"sqrtsoftplus\"", {"score_function: found \"sqrtsoftplus\"", "softmax | sigmoid"}},
		{"\"norm_head\": true", {"norm_head: found true; expected false"}},
		{"\"use_rmsnorm\": false", {"use_rmsnorm: found false"}},
		{"\"n_group\": 3", {"n_group: found 3 for 256 experts", "divisor"}},
		{"\"n_group\": 256", {"n_group: found 256 for 256 experts", "at least 2"}},
		{"\"topk_group\": 9", {"topk_group: found 9 of 8 groups of 32"}},
		{"\"n_group\": 1, \"topk_group\": 4", {"config.json: topk_group: found 4, but there are no groups"}},
		{"\"n_group\": null, \"topk_group\": 2", {"config.json: topk_group: found 2, but there are no groups"}},
		{"\"topk_group\": 0", {"topk_group: found 0 of 8 groups of 32"}},
		{"\"num_experts\": 32, \"topk_group\": 1", {"topk_group: found 1 of 8 groups of 4 experts", "8 experts of"}},
		{"\"first_k_dense_replace\": 20, \"num_nextn_predict_layers\": 1, \"num_experts\": 0",
			{"num_experts: missing or 0", "1 layers have experts"}},
		{"\"first_k_dense_replace\": 20, \"num_nextn_predict_layers\": 1, \"n_group\": 3",
			{"n_group: found 3 for 256"}},
		{"\"num_nextn_predict_layers\": 17", {"num_nextn_predict_layers: found 17"}},
		{"\"routed_scaling_factor\": 0", {"routed_scaling_factor: found 0"}},
		{"\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"partial_rotary_factor\": 0.5}, "
			"\"partial_rotary_factor\": 1", {"rope_scaling: found partial_rotary_factor 0.5, but 1 outside it"}},
	};
	for (int i = 0; i < COUNT(bad); i++) {
		char text[512];
		snprintf(text, sizeof text, "{" V2 ", %s}", bad[i].extra);
		expect_words(text, read_huggingface(&m, text), bad[i].words);
	}
}

/* A config that is printed as YAML and read again is the same, also where a default depends on another key. */
static void test_printed(void **state)
{
	(void)state;
	static const char *const models[] = {"", "norm_topk_prob: false, rms_norm_eps: 1e-6, initializer_range: 0.02",
		"architecture: BailingMoeV2ForCausalLM", "architecture: BailingMoeV2ForCausalLM, rms_norm_eps: 1e-5, "
			"initializer_range: 0.006, max_position_embeddings: 16384, use_qk_norm: false, "
			"moe_router_enable_expert_bias: false, router: {balance_loss_coef: 0.015, z_loss_coef: 1e-4}",
		"architecture: BailingMoeV2ForCausalLM, num_nextn_predict_layers: 2",
		"architecture: BailingMoeV2ForCausalLM, num_nextn_predict_layers: 2, mtp_loss_scaling_factor: off"};
	static const char *const others[] = {"", "spikes: {action: ladder}\n", "parallel: {sync: local}\n",
		"parallel: {sync: local}\nspikes: {action: off}\n", "spikes: {action: watch}\n"};
	for (int i = 0; i < COUNT(models) * COUNT(others); i++) {
		const char *model = models[i % COUNT(models)];
		char text[1024], *printed = NULL;
		size_t size;
		struct config c, again;
		snprintf(text, sizeof text, "model: {" MODEL_KEYS "%s%s}\n" REST "%s", *model ? ", " : "", model,
				others[i / COUNT(models)]);
		load_ok(&c, text);
		FILE *f = open_memstream(&printed, &size);
		config_print_yaml(f, &c);
		assert_int_equal(fclose(f), 0);
		load_ok(&again, printed);
		json_t *x = config_to_json(&c), *y = config_to_json(&again);
		if (!json_equal(x, y))
			fail_msg("%s\nprinted as\n%s", text, printed);
		json_decref(x);
		json_decref(y);
		free(printed);
	}
}

/* What is written says all, and keeps what it came with: also rotary_dim, and the groups that are none. */
static void test_v2_round_trip(void **state)
{
	(void)state;
	struct config c;
	char path[PATH_LEN];
	assert_int_equal(path_join(path, scratch, "config.json"), 0);
	load_ok(&c, "model: {architecture: BailingMoeV2ForCausalLM, " MODEL_KEYS ", first_k_dense_replace: 1,\n"
			" intermediate_size: 48, num_shared_experts: 2, partial_rotary_factor: 0.5, n_group: 4, topk_group: 2,\n"
			" routed_scaling_factor: 2.5, num_nextn_predict_layers: 1}\n" REST);
	assert_int_equal(config_to_huggingface(&c.model, path), 0);
	struct model_config m, back;
	assert_int_equal(config_from_huggingface(&back, scratch), 0);
	assert_memory_equal(&back, &c.model, sizeof back);
	json_t *root = json_read(path);
	static const struct { const char *key, *value; } said[] = {{"architectures", "[\"BailingMoeV2ForCausalLM\"]"},
		{"model_type", "\"bailing_moe\""}, {"score_function", "\"sigmoid\""}, {"router_dtype", "\"fp32\""},
		{"norm_topk_prob", "true"}, {"routed_scaling_factor", "2.5"}, {"first_k_dense_replace", "1"},
		{"num_shared_experts", "2"}, {"use_rmsnorm", "true"}, {"use_qk_norm", "true"}, {"n_group", "4"},
		{"moe_router_enable_expert_bias", "true"}, {"num_nextn_predict_layers", "1"}};
	for (int i = 0; i < COUNT(said); i++) { /* llama.cpp's converter, vLLM and SGLang read them all */
		char *text = json_text(json_object_get(root, said[i].key), JSON_ENCODE_ANY | JSON_COMPACT);
		assert_string_equal(text, said[i].value);
		free(text);
	}
	assert_null(json_object_get(root, "norm_head"));
	json_decref(root);

	/* Ling-1T spells it so */
	json_t *base = json_loads("{" V2 ", \"rotary_dim\": 64, \"n_group\": 0, \"topk_group\": 0, \"auto_map\": {}}", 0,
			NULL);
	assert_int_equal(config_from_json(&m, base, "base"), 0);
	assert_int_equal(config_write(path, &m, "bfloat16", base, NULL), 0);
	assert_int_equal(config_from_huggingface(&back, scratch), 0);
	assert_memory_equal(&back, &m, sizeof back);
	root = json_read(path);
	assert_int_equal(json_integer_value(json_object_get(root, "rotary_dim")), 64);
	assert_int_equal(json_integer_value(json_object_get(root, "n_group")), 1); /* its class fails on 0 */
	assert_non_null(json_object_get(root, "auto_map"));
	json_decref(root);
	json_decref(base);
}

static void test_huggingface_round_trip(void **state)
{
	(void)state;
	struct config c;
	load_ok(&c, "model: {" MODEL_KEYS ", first_k_dense_replace: 1, intermediate_size: 48, use_bias: on,\n"
			" rms_norm_eps: 1e-6, num_shared_experts: 2, tie_word_embeddings: on, rope_theta: 1.1e5,\n"
			" initializer_range: 0.1}\n" REST);
	char path[PATH_LEN];
	assert_int_equal(path_join(path, scratch, "config.json"), 0);
	assert_int_equal(config_to_huggingface(&c.model, path), 0);
	struct model_config back;
	assert_int_equal(config_from_huggingface(&back, scratch), 0);
	assert_memory_equal(&back, &c.model, sizeof back);
	json_t *root = json_read(path);
	assert_string_equal(json_string_value(json_object_get(root, "model_type")), "bailing_moe");
	assert_string_equal(json_string_value(json_object_get(root, "torch_dtype")), "float32");
	const json_t *architecture = json_array_get(json_object_get(root, "architectures"), 0);
	assert_string_equal(json_string_value(architecture), "BailingMoeForCausalLM");
	assert_null(json_object_get(root, "router"));
	json_decref(root);
	expect_words("no folder", config_to_huggingface(&c.model, "/nowhere/config.json"),
			(const char *const[3]){"/nowhere/config.json", "cannot create"});
	c.model.hidden_size = 128;
	limit_files(100);
	int rc = config_to_huggingface(&c.model, path);
	limit_files(RLIM_INFINITY);
	expect_words("full disk", rc, (const char *const[3]){path, "File too large"});
	struct model_config still;
	assert_int_equal(config_from_huggingface(&still, scratch), 0); /* what was there still is */
	assert_memory_equal(&still, &back, sizeof back);
	assert_false(holds_temporary(scratch));
}

/* Compares the config of a checkpoint, after its way through JSON text, with the one of `full` and overrides. */
static int compare(const json_t *saved, int num_overrides, char **overrides, const char *notes_path)
{
	struct config asked;
	assert_int_equal(config_load(&asked, put_string(at("run.yaml"), full), num_overrides, overrides, false), 0);
	char *text = json_dumps(saved, 0);
	json_t *read = json_loads(text, JSON_REJECT_DUPLICATES, NULL);
	FILE *notes = fopen(notes_path, "w");
	int rc = config_compare(read, &asked, "trainer.json", notes);
	fclose(notes);
	json_decref(read);
	free(text);
	return rc;
}

static void test_resume(void **state)
{
	(void)state;
	struct config c;
	char path[PATH_LEN];
	assert_int_equal(path_join(path, scratch, "notes"), 0);
	load_ok(&c, full);
	json_t *saved = config_to_json(&c);

	assert_int_equal(compare(saved, 0, NULL, path), 0);
	assert_string_equal(get(path), "");
	char *harmless[] = {"train.batch=64", "schedule.drops=[]", "optimizer.weight_decay=0.2",
			"model.router.z_loss_coef=0",
		"train.output_dir=elsewhere", "data.train=other", "parallel.tensor=1", "parallel.expert=8"};
	assert_int_equal(compare(saved, 8, harmless, path), 0);
	assert_string_equal(get(path), "model.router.z_loss_coef: 0.0001 -> 0.0\n"
			"data.train: [{\"path\":\"build/data/train\",\"weight\":1.0,\"dtype\":\"none\"}] -> "
			"[{\"path\":\"other\",\"weight\":1.0,\"dtype\":\"none\"}]\n"
			"train.output_dir: \"runs/quickstart\" -> \"elsewhere\"\ntrain.batch: 32 -> 64\n"
			"optimizer.weight_decay: 0.1 -> 0.2\n"
			"schedule.drops: [{\"at\":0.6,\"factor\":0.5},{\"at\":0.9,\"factor\":0.1}] -> []\n"
			"parallel.tensor: 2 -> 1\nparallel.expert: 4 -> 8\n");

	/* What only the beginning of a run reads is not read again, and the note says so. */
	char *start = "train.init_from=other";
	assert_int_equal(compare(saved, 1, &start, path), 0);
	assert_string_equal(get(path), "train.init_from: \"start\" -> \"other\"; it is not read: the run goes on with the "
			"weights of its checkpoint. For another start choose a new train.output_dir\n");

	static const struct { char *argument; const char *words[3]; } bad[] = {
		{"model.hidden_size=512", {"trainer.json: model.hidden_size was 256 in the checkpoint, found 512",
			"new train.output_dir"}},
		{"model.num_hidden_layers=5", {"model.num_hidden_layers was 4", "found 5"}},
		{"model.norm_head=off", {"model.norm_head was true", "found false"}},
		{"model.rms_norm_eps=1e-6", {"model.rms_norm_eps was 1e-5", "found 1e-6"}},
		{"data.seq_len=128", {"data.seq_len was 256"}},
		{"data.shuffle=off", {"data.shuffle"}},
		{"data.tokenizer=none", {"data.tokenizer"}},
		{"train.seed=7", {"train.seed was \"18446744073709551615\"", "found 7"}},
	};
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
		expect_words(bad[i].argument, compare(saved, 1, (char **)&bad[i].argument, path), bad[i].words);
		assert_string_equal(get(path), "");
	}

	/* Keys that only one of them knows, and values of another kind. */
	json_object_del(json_object_get(saved, "log"), "every");
	json_object_del(saved, "eval");
	json_object_set_new(saved, "sur\tprise", json_integer(1));
	json_object_set_new(json_object_get(saved, "model"), "gates", json_array());
	json_object_set_new(json_object_get(saved, "train"), "batch", json_null());
	assert_int_equal(compare(saved, 0, NULL, path), 0);
	assert_string_equal(get(path), "sur?prise: in the checkpoint only, and not known\n"
			"model.gates: in the checkpoint only, and not known\ntrain.batch: null -> 32\n"
			"eval.every: 0 by default -> 50\neval.max_windows: 0 by default -> 7\nlog.every: 1 by default -> 10\n");
	char *begins = "train.init_from=off";
	json_object_del(json_object_get(saved, "train"), "init_from");
	assert_int_equal(compare(saved, 1, &begins, path), 0);
	assert_null(strstr(get(path), "init_from"));
	json_object_del(json_object_get(saved, "schedule"), "peak_lr"); /* has no default */
	assert_int_equal(compare(saved, 0, NULL, path), 0);
	assert_non_null(strstr(get(path), "train.init_from: \"\" by default -> \"start\"; it is not read"));
	assert_non_null(strstr(get(path), "schedule.peak_lr: not in the checkpoint -> 0.001\n"));
	/* A run from before there was a key had its default. */
	char *since[] = {"model.rope_scaling={type: yarn, factor: 4}", "data.document_mask=true"};
	json_object_del(json_object_get(saved, "model"), "rope_scaling");
	json_object_del(json_object_get(saved, "data"), "document_mask");
	assert_int_equal(compare(saved, 0, NULL, path), 0);
	assert_null(strstr(get(path), "model.rope_scaling"));
	expect_words("yarn", compare(saved, 1, since, path), (const char *const[3]){"the checkpoint has no "
			"model.rope_scaling.type", "found \"yarn\"", "new train.output_dir"});
	expect_words("mask", compare(saved, 1, since + 1, path), (const char *const[3]){"the checkpoint has no "
			"data.document_mask", "found true"});
	json_object_set_new(saved, "model", json_array());
	expect_words("no model", compare(saved, 0, NULL, path), (const char *const[3]){"the checkpoint has no model."});
	assert_non_null(strstr(get(path), "model.hidden_size: not in the checkpoint -> 256\n"));
	json_decref(saved);
}

/* A checkpoint that is older than a key had its default, also where that follows from other keys. */
static void test_older_checkpoint(void **state)
{
	(void)state;
	struct config c;
	char path[PATH_LEN];
	assert_int_equal(path_join(path, scratch, "notes"), 0);
	assert_int_equal(config_load(&c, put_string(at("run.yaml"), full), 0, NULL, false), 0);
	json_t *saved = config_to_json(&c), *model = json_object_get(saved, "model");
	json_t *data = json_object_get(saved, "data");
	for (int i = 0; i < 2; i++) { /* of a run; of a model alone, as converting one makes it */
		json_object_del(model, "rope_scaling");
		json_object_del(model, "head_dim");
		json_object_del(model, "use_qkv_bias");
		json_object_del(data, "packing");
		json_object_del(data, "document_mask");
		json_object_del(saved, "local");
		json_object_del(saved, "trace");
		assert_int_equal(compare(saved, 0, NULL, path), 0);
		assert_string_equal(get(path), "");
		static const struct { char *arguments[2]; const char *words[3]; } bad[] = {
			{{"model.rope_scaling.type=yarn", "model.rope_scaling.factor=4"}, {"trainer.json: "
				"the checkpoint has no model.rope_scaling.type", "default, \"default\"; found \"yarn\"",
				"new train.output_dir"}},
			{{"model.head_dim=64", "train.seed=18446744073709551615"}, {"has no model.head_dim",
				"default, 32; found 64"}},
			{{"model.use_qkv_bias=true", "model.head_dim=32"}, {"has no model.use_qkv_bias",
				"default, false; found true"}},
			{{"data.document_mask=true", "data.packing=windows"}, {"has no data.document_mask"}},
			{{"data.packing=documents", "train.steps=400"}, {"has no data.packing"}},
		};
		for (size_t k = 0; k < (i ? 3 : sizeof bad / sizeof *bad); k++) {
			expect_words(bad[k].arguments[0], compare(saved, 2, (char **)bad[k].arguments, path), bad[k].words);
			assert_string_equal(get(path), "");
		}
		char *same[] = {"data.packing=windows", "model.head_dim=32"};
		assert_int_equal(compare(saved, 2, same, path), 0);
		assert_string_equal(get(path), "");
		if (i == 0) {
			char *local[] = {"parallel.sync=local", "local.steps=4"};
			assert_int_equal(compare(saved, 2, local, path), 0);
			assert_string_equal(get(path), "spikes.action: \"ladder\" -> \"watch\"\n"
					"parallel.sync: \"step\" -> \"local\"\nlocal.steps: 128 by default -> 4\n");
			json_object_del(data, "tokenizer"); /* may be given later: whether it made the data is checked then */
			assert_int_equal(compare(saved, 0, NULL, path), 1);
			assert_string_equal(get(path), "data.tokenizer: \"none\" by default -> \"byte\"\n");
			json_t *alone = json_pack("{s:O}", "model", model);
			json_decref(saved);
			saved = alone, data = NULL;
			json_object_del(model, "router");
		}
	}
	json_decref(saved);
}

/* Weights to start from must be of the same model; what they do not know may differ. */
static void test_init(void **state)
{
	(void)state;
	struct config c;
	load_ok(&c, full);
	struct model_config theirs = c.model;
	theirs.router.z_loss_coef = 5, theirs.router.warmup_steps = 0, theirs.intermediate_size = 7;
	theirs.initializer_range = 1, theirs.max_position_embeddings = 5;
	assert_int_equal(config_check_init(&theirs, &c.model, "hf"), 0);
	theirs.rope_theta = 500000;
	expect_words("rope_theta", config_check_init(&theirs, &c.model, "hf"), (const char *const[3]){
			"hf/config.json: model.rope_theta is 500000.0, the config asks for 10000.0", "set it to 500000.0"});
	theirs = c.model, theirs.norm_topk_prob = false;
	expect_words("norm_topk_prob", config_check_init(&theirs, &c.model, "hf"), (const char *const[3]){
			"model.norm_topk_prob is false, the config asks for true"});
	theirs = c.model, theirs.num_hidden_layers = 5, theirs.num_experts = 3;
	expect_words("layers", config_check_init(&theirs, &c.model, "hf"), (const char *const[3]){
			"model.num_hidden_layers is 5"});
	/* All layers dense: the experts' keys have no effect, intermediate_size has. */
	struct model_config dense = c.model;
	dense.first_k_dense_replace = dense.num_hidden_layers, dense.intermediate_size = 64;
	theirs = dense, theirs.num_experts = 3, theirs.num_experts_per_tok = 2, theirs.norm_topk_prob = false;
	theirs.num_shared_experts = 9, theirs.moe_intermediate_size = 5;
	assert_int_equal(config_check_init(&theirs, &dense, "hf"), 0);
	theirs.intermediate_size = 65;
	expect_words("width", config_check_init(&theirs, &dense, "hf"), (const char *const[3]){
			"model.intermediate_size is 65"});
}

/* Every key is printed, and every default is one that its own key accepts. */
static void test_keys(void **state)
{
	(void)state;
	char path[PATH_LEN];
	assert_int_equal(path_join(path, scratch, "keys"), 0);
	FILE *f = fopen(path, "w");
	config_print_keys(f);
	fclose(f);
	const char *text = get(path);
	struct config c;
	memset(&c, 0, sizeof c);
	for (int i = 0; i < config_table.num_keys; i++) {
		const struct key *k = &config_table.keys[i];
		assert_non_null(strstr(text, k->name));
		if (k->type == T_SECTION || k->type == T_LIST)
			continue;
		assert_true(k->fallback || k->flags & (REQUIRED | NEEDED));
		if (k->fallback)
			assert_null(store_text(&c, k, 0, k->fallback, true));
		if (k->class_fallback)
			assert_null(store_text(&c, k, 0, k->class_fallback, true));
		if (k->v2_fallback)
			assert_null(store_text(&c, k, 0, k->v2_fallback, true));
	}
	if (getenv("SHOW"))
		printf("%s", text);
}

/* A value of the same kind that differs; the caller owns it. */
static json_t *other_value(const json_t *v)
{
	if (json_is_boolean(v))
		return json_boolean(!json_is_true(v));
	if (json_is_integer(v))
		return json_integer(json_integer_value(v) + 1);
	if (json_is_real(v))
		return json_real(json_real_value(v) + 1);
	if (json_is_string(v))
		return json_string("another");
	json_t *copy = json_deep_copy(v);
	json_array_append_new(copy, json_object());
	return copy;
}

/* Named sets of validation files, in the order of the file, and as JSON as they were written; prompts. */
static void test_valid_sets(void **state)
{
	(void)state;
	struct config c;
	load_ok(&c, MODEL "data: {train: a, seq_len: 128, valid: {web: w, chat: [x, {path: y, dtype: int32}], "
			"a_b.c-1: [z]}}\n" TRAIN SCHEDULE);
	assert_int_equal(c.data.num_valid, 4);
	static const char *const expected[4][3] = {{"web", "w", "none"}, {"chat", "x", "none"}, {"chat", "y", "int32"},
			{"a_b.c-1", "z", "none"}};
	for (int i = 0; i < 4; i++) {
		assert_string_equal(c.data.valid[i].set, expected[i][0]);
		assert_string_equal(c.data.valid[i].path, expected[i][1]);
		assert_string_equal(c.data.valid[i].dtype, expected[i][2]);
	}
	json_t *valid = config_value(&c, "data.valid");
	char *text = json_dumps(valid, JSON_COMPACT);
	assert_string_equal(text, "{\"web\":[{\"path\":\"w\",\"dtype\":\"none\"}],\"chat\":[{\"path\":\"x\","
			"\"dtype\":\"none\"},{\"path\":\"y\",\"dtype\":\"int32\"}],"
			"\"a_b.c-1\":[{\"path\":\"z\",\"dtype\":\"none\"}]}");
	free(text);
	json_decref(valid);
	load_ok(&c, MODEL "data: {train: a, seq_len: 128, valid: [v]}\n" TRAIN SCHEDULE);
	assert_string_equal(c.data.valid[0].set, "");
	valid = config_value(&c, "data.valid");
	text = json_dumps(valid, JSON_COMPACT);
	assert_string_equal(text, "[{\"path\":\"v\",\"dtype\":\"none\"}]");
	free(text);
	json_decref(valid);
	load_ok(&c, VALID "eval: {samples: [plain, 'off', \"two\\nlines\", \"\", {text: x}], sample_temperature: 0.5}\n");
	assert_true(c.eval.num_samples == 5 && c.eval.sample_tokens == 64 && c.eval.sample_temperature == 0.5);
	static const char *const samples[] = {"plain", "off", "two\nlines", "", "x"};
	for (int i = 0; i < 5; i++)
		assert_string_equal(c.eval.samples[i].text, samples[i]);
	load_ok(&c, VALID "eval: {samples: Once upon a time}\n");
	assert_true(c.eval.num_samples == 1 && !strcmp(c.eval.samples[0].text, "Once upon a time"));
	load_ok(&c, VALID "eval: {samples: off}\n");
	assert_int_equal(c.eval.num_samples, 0);
	/* 65 files in two sets are one too many */
	char yaml[4096] = MODEL "data: {train: a, seq_len: 128, valid: {a: x, b: [";
	for (int i = 0; i < 64; i++)
		strcat(yaml, i ? ", f" : "f");
	strcat(yaml, "]}}\n" TRAIN SCHEDULE);
	assert_int_equal(load(&c, yaml), -1);
	expect_error("data.valid: found more than 64 items");
}

/* What a continued run must not change: what its weights, its data and their order are. All else it may. Each key of
 * the table is in one of the two lists: a new key must be put into one of them. */
static const char *const never_changes[] = {
	"model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads", "model.num_key_value_heads",
	"model.head_dim", "model.vocab_size", "model.num_experts", "model.num_experts_per_tok",
	"model.num_shared_experts", "model.moe_intermediate_size", "model.first_k_dense_replace",
	"model.intermediate_size", "model.max_position_embeddings", "model.norm_topk_prob", "model.norm_head",
	"model.tie_word_embeddings", "model.use_bias", "model.use_qkv_bias", "model.rope_theta", "model.rms_norm_eps",
	"model.rope_scaling.type", "model.rope_scaling.factor", "model.rope_scaling.original_max_position_embeddings",
	"model.rope_scaling.attention_factor", "model.rope_scaling.beta_fast", "model.rope_scaling.beta_slow",
	"model.rope_scaling.mscale", "model.rope_scaling.mscale_all_dim", "model.rope_scaling.truncate",
	"model.initializer_range", "model.architecture", "model.score_function", "model.n_group", "model.topk_group",
	"model.routed_scaling_factor", "model.moe_router_enable_expert_bias", "model.use_qk_norm",
	"model.num_nextn_predict_layers", "model.partial_rotary_factor", "data.tokenizer", "data.packing", "data.seq_len",
	"data.shuffle", "data.document_mask", "data.document_token", "train.seed",
};
static const char *const may_change[] = {
	"model.router.balance_loss_coef", "model.router.balance_loss_scope", "model.router.z_loss_coef",
	"model.router.warmup_steps", "model.router.bias_update_rate", "model.mtp_loss_scaling_factor", "data.train",
	"data.valid", "data.blend_from_step", "train.output_dir",
	"train.init_from", "train.steps", "train.tokens", "train.stop_at_step", "train.micro_batch", "train.batch",
	"train.recompute", "train.grad_clip", "train.batch_warmup.start", "train.batch_warmup.increment",
	"train.batch_warmup.tokens", "train.dump.steps", "train.dump.dir", "train.perturb", "optimizer.beta1",
	"optimizer.beta2", "optimizer.eps", "optimizer.weight_decay",
	"schedule.peak_lr", "schedule.warmup_steps", "schedule.drops", "schedule.decay.steps", "schedule.decay.shape",
	"schedule.decay.final_lr", "spikes.action", "spikes.window", "spikes.warmup", "spikes.loss_threshold",
	"spikes.grad_threshold", "spikes.retry_lr", "spikes.max_skips", "spikes.rollback", "checkpoint.every",
	"checkpoint.mtbf", "checkpoint.keep", "checkpoint.keep_every", "checkpoint.async", "checkpoint.strict",
	"checkpoint.hosts", "health.every", "eval.every", "eval.max_windows", "eval.at_start",
	"eval.samples", "eval.sample_file", "eval.sample_tokens", "eval.sample_temperature", "log.every", "log.experts",
	"parallel.sync", "local.ranks",
	"local.warmup_steps", "local.steps", "local.seconds", "local.outer_lr", "local.outer_momentum", "local.penalty",
	"local.clip", "local.anomaly_deviations", "local.anomaly_decay", "local.anomaly_warmup",
	"trace.events",
	"parallel.tensor", "parallel.expert", "parallel.reduce",
};

static bool is_listed(const char *const *list, int n, const char *name)
{
	for (int i = 0; i < n; i++)
		if (!strcmp(list[i], name))
			return true;
	return false;
}

static void test_resume_every_key(void **state)
{
	(void)state;
	struct config c;
	char path[PATH_LEN], name[128], expected[160];
	assert_int_equal(path_join(path, scratch, "notes"), 0);
	load_ok(&c, full);
	int fixed = 0, free_keys = 0;
	for (int i = 0; i < config_table.num_keys; i++) {
		const struct key *k = &config_table.keys[i];
		if (k->type == T_SECTION || k->flags & ITEM)
			continue;
		const bool never = is_listed(never_changes, COUNT(never_changes), k->name);
		const bool may = is_listed(may_change, COUNT(may_change), k->name);
		if (never == may)
			fail_msg("%s: say in this test whether a continued run may change it", k->name);
		json_t *saved = config_to_json(&c), *object = saved;
		snprintf(name, sizeof name, "%s", k->name);
		char *leaf = strrchr(name, '.');
		*leaf++ = 0;
		for (char *rest = name, *part; (part = strsep(&rest, "."));)
			object = json_object_get(object, part);
		json_t *value = json_object_get(object, leaf);
		assert_non_null(value);
		json_object_set_new(object, leaf, other_value(value));
		const int rc = compare(saved, 0, NULL, path);
		if (rc != (never ? -1 : 0))
			fail_msg("%s: a continued run %s", k->name, never ? "may change it" : error_text);
		if (never) {
			snprintf(expected, sizeof expected, "trainer.json: %s was ", k->name);
			expect_error(expected);
			assert_string_equal(get(path), "");
			fixed++;
		} else {
			snprintf(expected, sizeof expected, "%s: ", k->name);
			if (!strstr(get(path), expected))
				fail_msg("%s changed, and no note tells it", k->name);
			free_keys++;
		}
		json_decref(saved);
	}
	assert_int_equal(fixed, COUNT(never_changes));
	assert_int_equal(free_keys, COUNT(may_change));
}

/* The keys of a model that weights to start from must share. All others of the model change no weight and nothing that
 * is computed from one: training alone, or limits. */
static const char *const free_of_weights[] = {
	"model.initializer_range", "model.max_position_embeddings", "model.router.balance_loss_coef",
	"model.router.balance_loss_scope", "model.router.z_loss_coef", "model.router.warmup_steps",
	"model.router.bias_update_rate", "model.mtp_loss_scaling_factor",
};

static void test_init_every_key(void **state)
{
	(void)state;
	struct config c;
	load_ok(&c, full);
	c.model.first_k_dense_replace = 1, c.model.intermediate_size = 64; /* layers of both kinds */
	/* A run may extend weights without rope_scaling, but not leave out the scaling that weights have. */
	struct config scaled = c;
	scaled.model.rope_scaling = (struct rope_scaling){.type = ROPE_LINEAR, .factor = 2};
	assert_int_equal(config_check_init(&c.model, &scaled.model, "hf"), 0);
	assert_int_equal(config_check_init(&scaled.model, &c.model, "hf"), -1);
	expect_error("hf/config.json: model.rope_scaling.type is \"linear\", the config asks for \"default\"");
	c.model.rope_scaling.type = ROPE_LINEAR;
	int fixed = 0, free_keys = 0;
	for (int i = 0; i < config_table.num_keys; i++) {
		const struct key *k = &config_table.keys[i];
		if (k->type == T_SECTION || !is_inside("model", k->name))
			continue;
		struct config theirs = c;
		char *field = (char *)&theirs + k->offset;
		if (k->type == T_BOOL)
			*(bool *)field = !*(bool *)field;
		else if (k->type == T_DOUBLE)
			*(double *)field += 0.5;
		else
			*(int *)field += 1;
		const bool may = is_listed(free_of_weights, COUNT(free_of_weights), k->name);
		const int rc = config_check_init(&theirs.model, &c.model, "hf");
		if (rc != (may ? 0 : -1))
			fail_msg("%s of weights to start from %s", k->name, may ? error_text : "may differ");
		if (!may) {
			char expected[160];
			snprintf(expected, sizeof expected, "hf/config.json: %s is ", k->name);
			expect_error(expected);
		}
		fixed += !may, free_keys += may;
	}
	assert_true(fixed >= 19 && free_keys == COUNT(free_of_weights));
}

/* A number at a border of its key is taken, and one beyond it refused: for every key. */
static void test_borders(void **state)
{
	(void)state;
	static struct config c;
	char text[64];
	int borders = 0;
	for (int i = 0; i < config_table.num_keys; i++) {
		const struct key *k = &config_table.keys[i];
		const bool whole = k->type == T_INT || k->type == T_INT64 || k->type == T_UINT64;
		if (!whole && k->type != T_DOUBLE)
			continue;
		for (int high = 0; high < 2; high++) {
			const double border = high ? k->max : k->min, step = whole ? 1 : fmax(fabs(border) * 1e-15, 1e-300);
			if (border > 1e18)
				continue; /* a double has no neighbour of it that is a whole number */
			snprintf(text, sizeof text, whole ? "%.0f" : "%.17g", border);
			const bool taken = !store_text(&c, k, 0, text, true);
			if (taken != !(k->flags & (high ? BELOW : ABOVE)))
				fail_msg("%s: %s is %s", k->name, text, taken ? "taken" : "refused");
			snprintf(text, sizeof text, whole ? "%.0f" : "%.17g", high ? border + step : border - step);
			if (!store_text(&c, k, 0, text, true))
				fail_msg("%s: %s is beyond the border and taken", k->name, text);
			snprintf(text, sizeof text, whole ? "%.0f" : "%.17g", high ? border - step : border + step);
			if (store_text(&c, k, 0, text, true) && k->max > k->min)
				fail_msg("%s: %s is within the borders and refused", k->name, text);
			borders++;
		}
	}
	assert_true(borders > 80);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_defaults), cmocka_unit_test(test_full), cmocka_unit_test(test_sources),
				cmocka_unit_test(test_spellings),
		cmocka_unit_test(test_broken), cmocka_unit_test(test_files), cmocka_unit_test(test_model_file),
		cmocka_unit_test(test_overrides), cmocka_unit_test(test_huggingface),
		cmocka_unit_test(test_huggingface_round_trip), cmocka_unit_test(test_v2_defaults),
		cmocka_unit_test(test_v2), cmocka_unit_test(test_v2_round_trip), cmocka_unit_test(test_printed),
		cmocka_unit_test(test_resume),
		cmocka_unit_test(test_older_checkpoint), cmocka_unit_test(test_init),
		cmocka_unit_test(test_keys),
		cmocka_unit_test(test_resume_every_key), cmocka_unit_test(test_valid_sets),
		cmocka_unit_test(test_init_every_key), cmocka_unit_test(test_borders),
	};
	return cmocka_run_group_tests(tests, make_scratch, drop_scratch);
}
