/*
 * files/config.c - the config of a run: the table of its keys, its checks, and JSON, for checkpoints and Hugging Face.
 */
#define _GNU_SOURCE
#include "files/config.h"

#include "files/base.h"
#include "files/config_keys.h"

#include <inttypes.h>
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#define KEY(...) KEY_OF(struct config, __VA_ARGS__)
#define LIST(...) LIST_OF(struct config, __VA_ARGS__)
#define GROUPS(...) GROUPS_OF(struct config, __VA_ARGS__)
#define ITEM_KEY(...) ITEM_KEY_OF(struct config, __VA_ARGS__)

enum {                        /* flags of these keys */
	FIXED = OWN_FLAG,          /* a continued run must not change it */
	FREE = OWN_FLAG << 1,      /* of the model, but changes nothing that it computes */
	DENSE = OWN_FLAG << 2,     /* of the model's dense layers only */
	ROUTED = OWN_FLAG << 3,    /* of the model's layers with experts only */
	BEGIN = OWN_FLAG << 4,     /* read when a run begins, and not when it continues */
	ADDED = OWN_FLAG << 5,     /* fixed, but where it was none it may be given later: see config_compare() */
	SHAPE = OWN_FLAG << 6,     /* its v2_fallback is for a config.json alone: in YAML shapes are given */
	UNSAID = OWN_FLAG << 7,    /* null in a config.json is as if it was not there */
	V2 = OWN_FLAG << 8,        /* a key of BailingMoeV2ForCausalLM alone: the first class computes with its default */
};

const char *const architecture_names[] = {"BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", NULL};
static const char *const score_names[] = {"softmax", "sigmoid", NULL};
static const char *const dtype_names[] = {
	"none", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", NULL
};
static const char *const tokenizer_names[] = {"byte", "none", NULL};
const char *const packing_names[] = {"auto", "windows", "documents", NULL};
static const char *const reduce_names[] = {"f32", "bf16", NULL};
static const char *const rope_names[] = {"default", "linear", "dynamic", "yarn", NULL};
static const char *const scope_names[] = {"micro_batch", "sequence", NULL};
static const char *const spike_action_names[] = {"off", "watch", "skip", "ladder", NULL};
static const char *const async_names[] = {"false", "true", "auto", NULL};
static const char *const sync_names[] = {"step", "local", NULL};
static const char *const recompute_names[] = {"none", "attention", "layer", NULL};
static const char *const shape_names[] = {"linear", "cosine", "1-sqrt", "inverse_sqrt", NULL};

#define MAX_TOKENS 1e15 /* of a run; keeps every product of sizes within int64_t */

static const struct key keys[] = {
	SECTION("model", 0, "the model's shape, in Hugging Face's words; or the name of a YAML file with a model section, "
		"or of a Hugging Face directory", .or_name = "the name of a YAML file or a Hugging Face directory"),
	KEY(model.architecture, T_ENUM, 0, 0, FIXED, "BailingMoeForCausalLM", "the family: Ling, or with V2 Ling 2.0",
		.names = architecture_names),
	KEY(model.hidden_size, T_INT, 1, 65536, REQUIRED | FIXED | SHAPE, NULL, "width of the model",
		.v2_fallback = "2048"),
	KEY(model.num_hidden_layers, T_INT, 1, 1024, REQUIRED | FIXED | SHAPE, NULL, "layers", .v2_fallback = "20"),
	KEY(model.num_attention_heads, T_INT, 1, 4096, REQUIRED | FIXED | SHAPE, NULL, "query heads",
		.v2_fallback = "16"),
	KEY(model.num_key_value_heads, T_INT, 0, 4096, NONE | FIXED | SHAPE, "off",
		"key-value heads; off: as many as query heads", .v2_fallback = "4"),
	KEY(model.head_dim, T_INT, 0, 4096, NONE | FIXED | SHAPE, "off",
		"width of a head; off: hidden_size / num_attention_heads", .v2_fallback = "128"),
	KEY(model.vocab_size, T_INT, 1, 10000000, REQUIRED | FIXED | SHAPE, NULL, "token ids are 0 .. vocab_size - 1",
		.v2_fallback = "157184"),
	KEY(model.num_experts, T_INT, 0, 4096, NONE | FIXED | ROUTED | SHAPE, "off",
		"experts of a layer; needed unless all layers are dense", .alias = "model.n_routed_experts",
		.v2_fallback = "256"),
	KEY(model.num_experts_per_tok, T_INT, 0, 4096, NONE | FIXED | ROUTED | SHAPE, "off",
		"experts that a token is sent to", .v2_fallback = "8"),
	KEY(model.num_shared_experts, T_INT, 0, 1024, NONE | FIXED | ROUTED | SHAPE, "0", "experts that see every token",
		.alias = "model.n_shared_experts", .v2_fallback = "1"),
	KEY(model.moe_intermediate_size, T_INT, 0, 1048576, NONE | FIXED | ROUTED | SHAPE, "off", "width of an expert",
		.v2_fallback = "512"),
	KEY(model.first_k_dense_replace, T_INT, 0, 1024, NONE | FIXED | SHAPE, "0", "this many first layers are dense",
		.v2_fallback = "1"),
	KEY(model.intermediate_size, T_INT, 0, 1048576, NONE | FIXED | DENSE | SHAPE, "off", "width of a dense layer",
		.v2_fallback = "5120"),
	KEY(model.max_position_embeddings, T_INT, 1, 1e9, FIXED | FREE, "16384", "longest sequence of the model",
		.v2_fallback = "32768"),
	KEY(model.score_function, T_ENUM, 0, 0, UNSAID | FIXED | ROUTED | V2, "softmax",
		"what makes scores of the router's logits", .names = score_names, .v2_fallback = "sigmoid"),
	KEY(model.n_group, T_INT, 0, 4096, NONE | FIXED | ROUTED | SHAPE | V2, "1", "groups of experts",
		.v2_fallback = "8"),
	KEY(model.topk_group, T_INT, 0, 4096, NONE | FIXED | ROUTED | SHAPE | V2, "1", "groups that a token's experts are "
		"chosen from: those whose two best experts have the largest sum", .v2_fallback = "4"),
	KEY(model.routed_scaling_factor, T_DOUBLE, 0, 1e6, ABOVE | UNSAID | FIXED | ROUTED | V2, "1",
		"the routed experts' sum times it"),
	KEY(model.moe_router_enable_expert_bias, T_BOOL, 0, 1, UNSAID | FIXED | ROUTED | V2, "false",
		"a bias for each expert, in the choice alone, which balances them", .v2_fallback = "true"),
	KEY(model.norm_topk_prob, T_BOOL, 0, 1, FIXED | ROUTED, "true", "expert weights of a token sum to 1"),
	KEY(model.norm_head, T_BOOL, 0, 1, FIXED, "true", "normalise the output head's columns",
		.class_fallback = "false", .v2_fallback = "false"),
	KEY(model.tie_word_embeddings, T_BOOL, 0, 1, FIXED, "false", "one matrix is embedding and output head"),
	KEY(model.use_bias, T_BOOL, 0, 1, FIXED, "false", "bias in the attention's output",
		.class_fallback = "true", .v2_fallback = "false"),
	KEY(model.use_qkv_bias, T_BOOL, 0, 1, FIXED, "false", "bias in query, key and value"),
	KEY(model.use_qk_norm, T_BOOL, 0, 1, UNSAID | FIXED | V2, "false", "RMSNorm of each query and key head",
		.v2_fallback = "true"),
	KEY(model.num_nextn_predict_layers, T_INT, 0, MAX_MTP_LAYERS, NONE | FIXED | V2, "off",
		"layers for multi-token prediction"),
	KEY(model.mtp_loss_scaling_factor, T_DOUBLE, 0, 1000, NONE | V2, "off", "weight of the loss of each of them; off: "
		"they stay as they are; not given: 0.1 where there are such layers", .v2_fallback = "off"),
	KEY(model.partial_rotary_factor, T_DOUBLE, 0, 1, ABOVE | UNSAID | FIXED | V2, "1", "part of a head that turns"),
	KEY(model.rope_theta, T_DOUBLE, 0, 1e12, ABOVE | FIXED, "600000", "base of the rotary embedding",
		.class_fallback = "10000", .v2_fallback = "600000"),
	SECTION("model.rope_scaling", NONE, "the rotary embedding for longer sequences than it was trained with, as "
		"transformers computes it"),
	KEY(model.rope_scaling.type, T_ENUM, 0, 0, NEEDED | FIXED, NULL, "kind; default: no scaling", .names = rope_names),
	KEY(model.rope_scaling.factor, T_DOUBLE, 0, 1e6, NONE | FIXED, "off", "how much longer; at least 1. off, of yarn: "
		"max_position_embeddings / original_max_position_embeddings"),
	KEY(model.rope_scaling.original_max_position_embeddings, T_INT, 0, 1e9, NONE | FIXED, "off",
		"the length before; off: max_position_embeddings"),
	KEY(model.rope_scaling.attention_factor, T_DOUBLE, 0, 1000, NONE | FIXED, "off", "sines and cosines times it; off: "
		"0.1 ln(factor) + 1, or by mscale and mscale_all_dim"),
	KEY(model.rope_scaling.beta_fast, T_DOUBLE, 0, 1e6, ABOVE | FIXED, "32", "rotations over the original length from "
		"which on a frequency is left as it is"),
	KEY(model.rope_scaling.beta_slow, T_DOUBLE, 0, 1e6, ABOVE | FIXED, "1", "rotations up to which it is divided by "
		"the factor"),
	KEY(model.rope_scaling.mscale, T_DOUBLE, 0, 1000, FIXED, "0", "with mscale_all_dim: the attention factor is "
		"(0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1)"),
	KEY(model.rope_scaling.mscale_all_dim, T_DOUBLE, 0, 1000, FIXED, "0", "see mscale"),
	KEY(model.rope_scaling.truncate, T_BOOL, 0, 1, FIXED, "true", "indices of frequencies between which the division "
		"sets in are rounded to whole numbers"),
	KEY(model.rms_norm_eps, T_DOUBLE, 0, 1, ABOVE | FIXED, "1e-5", "added to the mean square in RMSNorm",
		.v2_fallback = "1e-6"),
	KEY(model.initializer_range, T_DOUBLE, 0, 10, FIXED | FREE, "0.006", "standard deviation of initial weights",
		.class_fallback = "0.02", .v2_fallback = "0.02"),
	SECTION("model.router", 0, "how tokens are spread over experts; training only"),
	KEY(model.router.balance_loss_coef, T_DOUBLE, 0, 1000, NONE, "0.015", "weight of the balance loss",
		.v2_fallback = "0"),
	KEY(model.router.balance_loss_scope, T_ENUM, 0, 0, 0, "micro_batch", "tokens that are balanced together",
		.names = scope_names),
	KEY(model.router.z_loss_coef, T_DOUBLE, 0, 1000, NONE, "1e-4", "weight of the router's z-loss",
		.v2_fallback = "3.5e-6"),
	KEY(model.router.warmup_steps, T_INT, 0, 1e9, NONE, "off", "steps of stochastic routing warmup"),
	KEY(model.router.bias_update_rate, T_DOUBLE, 0, 1, NONE, "1e-3", "how far the expert bias moves in a step"),

	SECTION("data", 0, "what is read"),
	LIST(data.train, data.num_train, MAX_SOURCES, REQUIRED, NULL, "token files to train on: one's path, or a blend"),
	ITEM_KEY(data.train, path, T_TEXT, 0, 0, NEEDED | ITSELF, NULL, "prefix of .bin and .idx, or an llm.c .bin file, "
		"or bare ids"),
	ITEM_KEY(data.train, weight, T_DOUBLE, 0, 1e9, 0, "1", "the file's part of the samples, over the sum of all "
		"weights"),
	ITEM_KEY(data.train, dtype, T_TEXT, 0, 0, 0, "none", "type of the ids of a file that has nothing but ids",
		.names = dtype_names),
	LIST(data.valid, data.num_valid, MAX_SOURCES, NONE, "off", "token files to evaluate on; under names, sets whose "
		"losses are told one by one too", GROUPS(data.valid, set)),
	ITEM_KEY(data.valid, path, T_TEXT, 0, 0, NEEDED | ITSELF, NULL, "as in data.train"),
	ITEM_KEY(data.valid, dtype, T_TEXT, 0, 0, 0, "none", "as in data.train", .names = dtype_names),
	KEY(data.blend_from_step, T_INT64, 0, 1e12, NONE, "off",
		"a run that continues at this step may change data.train"),
	KEY(data.tokenizer, T_TEXT, 0, 0, FIXED | ADDED | OR_PATH, "none", "what made the token ids: byte, or a "
		"tokenizer.json or its directory; none: not known, taken as they are", .names = tokenizer_names),
	KEY(data.seq_len, T_INT, 1, 1e6, REQUIRED | FIXED, NULL, "tokens of a sequence"),
	KEY(data.shuffle, T_BOOL, 0, 1, FIXED, "true", "mix the order of the sequences"),
	KEY(data.packing, T_ENUM, 0, 0, FIXED, "auto", "windows: tokens one after the other; documents: whole documents "
		"are placed into windows, and do not see each other; auto: documents for files with a loss mask, else windows",
		.names = packing_names),
	KEY(data.document_mask, T_BOOL, 0, 1, FIXED, "false", "attention and positions begin anew at each document; "
		"always so where documents are packed"),
	KEY(data.document_token, T_INT, -1, INT32_MAX, FIXED, "-1", "the id that separates documents where there is no "
		"index; -1: none"),

	SECTION("train", 0, "the run"),
	KEY(train.output_dir, T_TEXT, 0, 0, REQUIRED, NULL, "directory of checkpoints and metrics"),
	KEY(train.init_from, T_TEXT, 0, 0, NONE | BEGIN, "off", "Hugging Face directory whose weights the run "
		"starts from; of a run's directory, its newest checkpoint"),
	KEY(train.seed, T_UINT64, 0, 18446744073709551615.0, FIXED, "1", "of all random numbers"),
	KEY(train.steps, T_INT64, 0, 1e12, NONE, "off", "length of the run in steps; this or train.tokens"),
	KEY(train.tokens, T_INT64, 0, MAX_TOKENS, NONE, "off", "length of the run in tokens; this or train.steps"),
	KEY(train.stop_at_step, T_INT64, 0, 1e12, NONE, "off", "save and stop at this step; run again to continue. A "
		"run that is beyond it stops at once"),
	KEY(train.micro_batch, T_INT, 1, 1e6, REQUIRED, NULL, "sequences of a forward pass"),
	KEY(train.batch, T_INT, 1, 1e7, REQUIRED, NULL, "sequences of an optimizer step"),
	KEY(train.recompute, T_ENUM, 0, 0, 0, "none", "activations computed again in the backward pass, to save memory",
		.names = recompute_names),
	KEY(train.grad_clip, T_DOUBLE, 0, 1e9, NONE, "1.0", "largest norm of the gradient"),
	SECTION("train.batch_warmup", NONE, "the batch grows from start, by increments, over a number of tokens"),
	KEY(train.batch_warmup.start, T_INT, 1, 1e7, NEEDED, NULL, "first batch"),
	KEY(train.batch_warmup.increment, T_INT, 1, 1e7, NEEDED, NULL, "how much the batch grows at once"),
	KEY(train.batch_warmup.tokens, T_INT64, 1, MAX_TOKENS, NEEDED, NULL, "tokens until the batch is full"),
	SECTION("train.dump", NONE, "all outputs, gradients and updates of some steps as files, to compare runs"),
	LIST(train.dump.steps, train.dump.num_steps, MAX_DUMPS, NEEDED, NULL, "the steps, from 1"),
	ITEM_KEY(train.dump.steps, number, T_INT64, 1, 1e12, NEEDED | ITSELF, NULL, "of a step"),
	KEY(train.dump.dir, T_TEXT, 0, 0, NEEDED, NULL, "directory of the files step-NNNNNNN.safetensors"),
	KEY(train.perturb, T_INT, 0, INT32_MAX, NONE | BEGIN, "off", "each of the first weights moves by one unit in the "
		"last place, up or down at random; the key of these random numbers"),

	SECTION("optimizer", 0, "AdamW"),
	KEY(optimizer.beta1, T_DOUBLE, 0, 1, BELOW, "0.9", "decay of the gradient's mean"),
	KEY(optimizer.beta2, T_DOUBLE, 0, 1, BELOW, "0.95", "decay of the gradient's mean square"),
	KEY(optimizer.eps, T_DOUBLE, 0, 1, ABOVE, "1e-8", "added to the root of the mean square"),
	KEY(optimizer.weight_decay, T_DOUBLE, 0, 100, NONE, "0.1", "decoupled, on matrices and embeddings"),

	SECTION("schedule", 0, "the learning rate: warm-up, peak, drops, decay"),
	KEY(schedule.peak_lr, T_DOUBLE, 0, 100, REQUIRED | ABOVE, NULL, "learning rate between warm-up and decay"),
	KEY(schedule.warmup_steps, T_INT64, 0, 1e12, NONE, "off", "steps from 0 up to peak_lr"),
	LIST(schedule.drops, schedule.num_drops, MAX_LR_DROPS, NONE, "off", "drops of the learning rate"),
	ITEM_KEY(schedule.drops, at, T_DOUBLE, 0, 1, NEEDED, NULL, "share of the run's tokens; the drop comes with the "
		"first step that begins when so many are consumed"),
	ITEM_KEY(schedule.drops, factor, T_DOUBLE, 0, 1000, NEEDED | ABOVE, NULL, "the rate times it"),
	SECTION("schedule.decay", NONE, "the learning rate's way down at the end"),
	KEY(schedule.decay.steps, T_INT64, 0, 1e12, NEEDED | NONE, NULL, "last steps of the run, over which it decays"),
	KEY(schedule.decay.shape, T_ENUM, 0, 0, 0, "1-sqrt", "form of the curve", .names = shape_names),
	KEY(schedule.decay.final_lr, T_DOUBLE, 0, 100, 0, "0", "learning rate at the end"),

	SECTION("spikes", 0, "batches whose loss or gradient norm is far above those before"),
	KEY(spikes.action, T_ENUM, 0, 0, 0, "ladder", "what is done with them: nothing, report, skip, or skip and retry",
		.names = spike_action_names),
	KEY(spikes.window, T_INT, 16, MAX_SPIKE_WINDOW, 0, "128", "steps that a batch is compared with"),
	KEY(spikes.warmup, T_INT, 8, MAX_SPIKE_WINDOW, 0, "32", "steps before finite spikes are looked for"),
	KEY(spikes.loss_threshold, T_DOUBLE, 1, 1e6, 0, "8", "robust standard deviations of the loss above its median"),
	KEY(spikes.grad_threshold, T_DOUBLE, 1, 1e6, 0, "200", "the same of the gradient norm"),
	KEY(spikes.retry_lr, T_DOUBLE, 0, 1, ABOVE, "0.1", "learning rate of a step on samples that spike again, times it"),
	KEY(spikes.max_skips, T_INT, 0, 4096, 0, "10", "batches of the last window that may be skipped"),
	KEY(spikes.rollback, T_INT, 0, 1000, NONE, "off", "times that a run with more skips goes back to a checkpoint; "
		"off: it ends"),

	SECTION("checkpoint", 0, "saving"),
	KEY(checkpoint.every, T_INT64, 0, 1e12, NONE | AUTO, "off", "steps between checkpoints; off: only at the end; "
		"auto: what loses least time, by the measured cost of a checkpoint and mtbf"),
	KEY(checkpoint.mtbf, T_DOUBLE, 0, 1e6, ABOVE, "24", "hours between two failures of the run, for every: auto"),
	KEY(checkpoint.keep, T_INT, 0, 1e9, 0, "2", "newest checkpoints that are kept; 0: all"),
	KEY(checkpoint.keep_every, T_INT64, 0, 1e12, NONE, "off", "checkpoints of every so many steps are kept for ever"),
	KEY(checkpoint.async, T_ENUM, 0, 0, 0, "auto", "training goes on while a copy of the state is written; auto: "
		"where the memory has room for the copy", .names = async_names),
	KEY(checkpoint.strict, T_BOOL, 0, 1, 0, "false", "a damaged newest checkpoint ends the run at its start, instead "
		"of being set aside for the one before"),
	KEY(checkpoint.hosts, T_INT, 0, 65536, NONE, "off", "machines among which the bytes of a checkpoint are balanced; "
		"off: those on which the ranks are; a number pretends so many, for tests"),

	SECTION("health", 0, "looking for sick machines"),
	KEY(health.every, T_INT64, 0, 1e12, NONE, "1000", "steps between comparisons of what ranks must have alike; off: "
		"none"),

	SECTION("eval", 0, "validation"),
	KEY(eval.every, T_INT64, 0, 1e12, NONE, "off", "steps between evaluations; off: only at the end"),
	KEY(eval.max_windows, T_INT64, 0, 1e12, NONE, "off", "sequences of an evaluation; off: all"),
	KEY(eval.at_start, T_BOOL, 0, 1, 0, "false", "an evaluation before the first step, too"),

	LIST(eval.samples, eval.num_samples, MAX_SAMPLE_PROMPTS, NONE, "off", "prompts that each evaluation continues, "
		"into samples.jsonl"),
	ITEM_KEY(eval.samples, text, T_TEXT, 0, 0, NEEDED | ITSELF | ANY_TEXT, NULL, "the prompt; \"\": the beginning of "
		"a document"),
	KEY(eval.sample_file, T_TEXT, 0, 0, NONE, "off", "a file of more prompts, as `ling generate --prompts` reads it"),
	KEY(eval.sample_tokens, T_INT64, 1, 1e9, 0, "64", "tokens that a prompt is continued by, at most"),
	KEY(eval.sample_temperature, T_DOUBLE, 0, 100, 0, "0", "tokens are drawn from softmax(logits / temperature); 0: "
		"the most likely one is taken"),

	SECTION("log", 0, "progress"),
	KEY(log.every, T_INT64, 1, 1e12, 0, "1", "steps between lines"),
	KEY(log.experts, T_INT64, 0, 1e12, NONE | AUTO, "auto", "steps between lines of the metrics that count the tokens "
		"of each expert; off: none; auto: so that a run has at most 200 of them"),

	SECTION("trace", 0, "the trace of a run, RUN/trace (docs/tracing.md)"),
	KEY(trace.events, T_INT64, 0, 1 << 26, 0, "32768", "newest records in each rank's file, of 64 bytes; 0: no file"),

	SECTION("parallel", 0, "how the model is divided among ranks"),
	KEY(parallel.tensor, T_INT, 1, 65536, 0, "1", "ranks that split heads and vocabulary"),
	KEY(parallel.expert, T_INT, 1, 65536, 0, "1", "ranks that split the experts"),
	KEY(parallel.reduce, T_ENUM, 0, 0, 0, "f32", "how gradients, and the changes of weights, are sent between ranks",
		.names = reduce_names),
	KEY(parallel.sync, T_ENUM, 0, 0, 0, "step", "step: all ranks train together; local: replicas train alone for "
		"periods, and then bring their weights together (docs/local-sgd.md)", .names = sync_names),

	SECTION("local", 0, "local SGD, parallel.sync: local"),
	KEY(local.ranks, T_INT64, 1, 65536, AUTO, "auto", "ranks of a replica; auto: the fewest that parallel.tensor and "
		"parallel.expert divide"),
	KEY(local.warmup_steps, T_INT64, 0, 1e12, NONE, "off", "first steps that all ranks take together"),
	KEY(local.steps, T_INT64, 1, 1e9, 0, "128", "steps of a period"),
	KEY(local.seconds, T_DOUBLE, 0, 1e6, NONE, "off", "time of a period, in which each replica takes the steps that it "
		"can; off: local.steps"),
	KEY(local.outer_lr, T_DOUBLE, 0, 10, ABOVE, "0.8", "learning rate of the outer SGD"),
	KEY(local.outer_momentum, T_DOUBLE, 0, 1, BELOW, "0.85", "its Nesterov momentum"),
	KEY(local.penalty, T_BOOL, 0, 1, 0, "true", "set anomalous replicas aside, weight the others by their norms, clip "
		"the mean; false: the plain mean"),
	KEY(local.clip, T_DOUBLE, 0, 1e9, NONE, "10", "largest norm of the mean change of a layer in a period"),
	KEY(local.anomaly_deviations, T_DOUBLE, 0, 1e6, NONE, "3", "standard deviations by which the norm of a replica's "
		"change of a layer may exceed its mean; off: any"),
	KEY(local.anomaly_decay, T_DOUBLE, 0, 1, BELOW, "0.98", "decay of the mean and variance of these norms"),
	KEY(local.anomaly_warmup, T_INT64, 1, 1e6, 0, "10", "periods before a replica can be set aside"),
};

#define NUM_KEYS ((int)(sizeof keys / sizeof *keys))
_Static_assert((int)EVERY_AUTO == (int)AUTO_VALUE, "checkpoint.every: auto");
_Static_assert(NUM_KEYS <= MAX_KEYS, "the places of all keys must fit");

static int load_model(struct loader *l, const struct key *section, const char *name, struct place at);
const struct key_table config_table = {keys, NUM_KEYS, "config", load_model};

void config_print_keys(FILE *out)
{
	char type[256];
	for (const struct key *k = keys; k < keys + NUM_KEYS; k++) {
		if (k->type == T_SECTION) {
			fprintf(out, "\n%s: %s%s\n", k->name, k->help, k->flags & NONE ? "; or off" : "");
			continue;
		}
		const char *standard = k->flags & (REQUIRED | NEEDED) ? "required" : k->fallback;
		fprintf(out, "  %-33s %-12s %s (%s", k->name, standard, k->help, describe_key(type, &config_table, k));
		if (k->v2_fallback && !(k->flags & SHAPE))
			fprintf(out, "; with BailingMoeV2ForCausalLM the default is %s", k->v2_fallback);
		fprintf(out, ")\n");
	}
}

/* --------------------------------------------------------------------------------------------------- reading */

struct config_loader {
	struct loader keys;
	struct config *config;
	bool huggingface;          /* reads a config.json: keys without "model.", unknown ones ignored */
	bool is_model_file;        /* reads the file that a config's `model:` names */
	char model_path[PATH_LEN]; /* of that file; places of keys point here */
};

/* Starts with every key at its default. */
static void config_loader_init(struct config_loader *l, struct config *c, const char *path, bool huggingface)
{
	memset(l, 0, sizeof *l);
	memset(c, 0, sizeof *c);
	loader_init(&l->keys, &config_table, c, path);
	l->keys.context = l;
	l->keys.leaf_names = huggingface;
	l->config = c;
	l->huggingface = huggingface;
	for (int i = 0; i < NUM_KEYS && huggingface; i++)
		if (keys[i].class_fallback)
			store_text(c, &keys[i], 0, keys[i].class_fallback, true);
}

/* Gives the keys that were not given the defaults of the architecture. */
static void set_architecture_defaults(struct config_loader *l)
{
	for (const struct key *k = keys; k < keys + NUM_KEYS && l->config->model.architecture == BAILING_MOE_V2; k++)
		if (k->v2_fallback && !l->keys.places[k - keys].source && (l->huggingface || !(k->flags & SHAPE))) {
			store_text(l->config, k, 0, k->v2_fallback, true);
			if (l->huggingface) /* a config that names this file misses nothing */
				l->keys.places[k - keys] = (struct place){l->keys.path, WHOLE_FILE};
		}
}

/* Gives keys that were not given the defaults that other keys' values have for them. */
static void set_dependent_defaults(struct config_loader *l)
{
	struct config *c = l->config;
	if (c->model.num_nextn_predict_layers && !key_given(&l->keys, "model.mtp_loss_scaling_factor"))
		c->model.mtp_loss_scaling_factor = 0.1;
	if (c->parallel.sync == SYNC_LOCAL && !key_given(&l->keys, "spikes.action"))
		c->spikes.action = SPIKES_WATCH;
}

static int load_config_json(struct config_loader *l);

/* Fails for a GGUF file, which is known by its first bytes. */
static int refuse_gguf(const char *path)
{
	char magic[4] = "";
	FILE *f = fopen(path, "re");
	const bool is_gguf = f && fread(magic, 1, 4, f) == 4 && !memcmp(magic, "GGUF", 4);
	if (f)
		fclose(f);
	return is_gguf ? fail("%s: a GGUF file; expected a Hugging Face directory: make one with ling convert-checkpoint "
			"%s DIR", path, path) : 0;
}

/* Takes the model section of the file or directory that `model:` names: beside the config, in configs/, or as the path
 * is. */
static int load_model(struct loader *loader, const struct key *section, const char *name, struct place at)
{
	struct config_loader *l = loader->context;
	char shown[64], beside[PATH_LEN], path[PATH_LEN];
	if (l->is_model_file)
		return fail_at(at, "model: found the file name %s; expected a mapping, since this file is itself named by a "
				"config", printable(shown, name));
	if (is_home_path(name))
		return fail_at(at, "model: found %s (" HOME_PATH_HINT ")", printable(shown, name));
	if (path_copy(path, loader->path) < 0)
		return -1;
	parent_of(beside, path);
	const char *const directories[] = {beside, "configs", "."};
	bool is_found = false;
	for (int i = 0; i < 3 && !is_found; i++) {
		if (path_join(l->model_path, *name == '/' ? "" : directories[i], name) < 0)
			return -1;
		is_found = access(l->model_path, F_OK) == 0;
	}
	if (!is_found)
		return fail_at(at, "model: there is no file %s in %s or configs; expected a mapping, or %s",
				printable(shown, name), beside, section->or_name);

	struct stat st;
	const bool huggingface = stat(l->model_path, &st) == 0 && S_ISDIR(st.st_mode);
	if (refuse_gguf(l->model_path) < 0)
		return -1;
	if (huggingface) {
		if (path_join(beside, l->model_path, "metrics.jsonl") < 0 || path_join(path, l->model_path, "config.json") < 0)
			return -1;
		if (path_exists(path) == 0 && path_exists(beside) > 0)
			return fail_at(at, "model: %s is the directory of a run; expected one of its checkpoints, such as "
					"%s/step-0000100", l->model_path, l->model_path);
		strcpy(l->model_path, path);
	}
	struct config other;
	struct config_loader inner;
	config_loader_init(&inner, &other, l->model_path, huggingface);
	inner.is_model_file = true;
	if ((huggingface ? load_config_json(&inner) : load_file(&inner.keys)) < 0)
		return -1;
	if (!huggingface && !key_given(&inner.keys, "model"))
		return fail_at(at, "model: the file %s has no model section; expected one", l->model_path);
	l->config->model = other.model;
	for (int i = 0; i < NUM_KEYS; i++)
		if (is_inside("model", keys[i].name))
			loader->places[i] = inner.keys.places[i];
	return 0;
}

/* ---------------------------------------------------------------------------------------------------- checks */

int longest_sequence(const struct model_config *m)
{
	const struct rope_scaling *s = &m->rope_scaling;
	const double scaled = s->type == ROPE_DEFAULT ? 0 : s->factor * (s->type == ROPE_LINEAR ? m->max_position_embeddings
			: s->original_max_position_embeddings);
	return (int)fmin(fmax(floor(scaled), m->max_position_embeddings), 1e9);
}

int rotary_dim(const struct model_config *m)
{
	return (int)(m->head_dim * m->partial_rotary_factor);
}

int default_sequence(const struct model_config *m)
{
	return m->rope_scaling.type == ROPE_DYNAMIC ? m->max_position_embeddings : longest_sequence(m);
}

/* Fills in what follows from other keys of model.rope_scaling, then checks them. */
static int check_rope_scaling(const struct loader *l, struct model_config *m)
{
	struct rope_scaling *s = &m->rope_scaling;
	const char *type = rope_names[s->type];
	const struct { const char *name; bool used, set; } keys_of_types[] = {
		{"factor", s->type != ROPE_DEFAULT, s->factor != 0},
		{"original_max_position_embeddings", s->type >= ROPE_DYNAMIC, s->original_max_position_embeddings != 0},
		{"attention_factor", s->type == ROPE_YARN, s->attention_factor != 0},
		{"beta_fast", s->type == ROPE_YARN, s->beta_fast != 32}, {"beta_slow", s->type == ROPE_YARN, s->beta_slow != 1},
		{"mscale", s->type == ROPE_YARN, s->mscale != 0},
		{"mscale_all_dim", s->type == ROPE_YARN, s->mscale_all_dim != 0},
		{"truncate", s->type == ROPE_YARN, !s->truncate},
	};
	for (size_t i = 0; i < sizeof keys_of_types / sizeof *keys_of_types; i++) {
		char name[64];
		snprintf(name, sizeof name, "model.rope_scaling.%s", keys_of_types[i].name);
		if (keys_of_types[i].set && !keys_of_types[i].used)
			return fail_key(l, name, "found beside rope_scaling of type %s, which has no such key; expected another "
					"type, or the key left out", type);
	}
	if (s->type == ROPE_DEFAULT)
		return 0;
	if (s->type == ROPE_YARN && !s->factor && s->original_max_position_embeddings)
		s->factor = (double)m->max_position_embeddings / s->original_max_position_embeddings;
	if (s->factor < 1)
		return fail_key(l, "model.rope_scaling.factor", "found %g; expected at least 1, for rope_scaling of type %s",
				s->factor, type);
	if (s->type == ROPE_DYNAMIC && s->original_max_position_embeddings &&
			s->original_max_position_embeddings != m->max_position_embeddings)
		return fail_key(l, "model.rope_scaling.original_max_position_embeddings", "found %d; expected it left out, or "
				"max_position_embeddings, %d, which rope_scaling of type dynamic counts from",
				s->original_max_position_embeddings, m->max_position_embeddings);
	if (s->type >= ROPE_DYNAMIC && !s->original_max_position_embeddings)
		s->original_max_position_embeddings = m->max_position_embeddings;
	if (s->type == ROPE_DYNAMIC && rotary_dim(m) < 4)
		return fail_key(l, "model.head_dim", "found %d, of which %d turn; expected at least 4 of them for "
				"rope_scaling of type dynamic", m->head_dim, rotary_dim(m));
	if (s->type == ROPE_YARN && m->rope_theta <= 1)
		return fail_key(l, "model.rope_theta", "found %g; expected above 1 for rope_scaling of type yarn",
				m->rope_theta);
	if (s->type == ROPE_YARN && s->beta_fast < s->beta_slow)
		return fail_key(l, "model.rope_scaling.beta_fast", "found %g; expected at least beta_slow, which is %g",
				s->beta_fast, s->beta_slow);
	return 0;
}

/* A value of a key, for a message; the caller frees it. */
static char *value_text(const json_t *value)
{
	return json_text(value, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(15));
}

/* Layers that have experts, the MTP layers among them. */
static int expert_layers(const struct model_config *m)
{
	return m->num_hidden_layers - m->first_k_dense_replace + m->num_nextn_predict_layers;
}

/* Checks the groups of experts, and stores 1, 1 where there are none. */
static int check_groups(const struct loader *l, struct model_config *m)
{
	if (m->n_group <= 1 && m->topk_group > 1 && expert_layers(m))
		return fail_key(l, "model.topk_group", "found %d, but there are no groups: n_group is %d or missing; expected "
				"n_group, or topk_group 1", m->topk_group, m->n_group);
	if (m->n_group <= 1 || !expert_layers(m)) {
		m->n_group = m->topk_group = 1;
		return 0;
	}
	const int size = m->num_experts / m->n_group;
	if (m->num_experts % m->n_group || size < 2)
		return fail_key(l, "model.n_group", "found %d for %d experts; expected a divisor that leaves at least 2 "
				"experts in a group, whose two best ones judge it", m->n_group, m->num_experts);
	if (m->topk_group > m->n_group || m->topk_group * size < m->num_experts_per_tok || !m->topk_group)
		return fail_key(l, "model.topk_group", "found %d of %d groups of %d experts; expected at most all groups, and "
				"as many as have the %d experts of a token", m->topk_group, m->n_group, size, m->num_experts_per_tok);
	return 0;
}

/* Each class computes one kind of model: fails for what the class of the config could not. */
static int check_architecture(const struct loader *l, const struct model_config *m)
{
	const bool v2 = m->architecture == BAILING_MOE_V2;
	struct config is = {.model = *m}, expected = is;
	for (const struct key *k = keys; k < keys + NUM_KEYS && !v2; k++)
		if (k->flags & V2 && k->flags & FIXED)
			set_default(&expected, k);
	if (v2) {
		expected.model.score_function = SCORE_SIGMOID;
		expected.model.norm_head = false;
	}
	int rc = 0;
	for (const struct key *k = keys; k < keys + NUM_KEYS && !rc; k++) {
		if (!is_inside("model", k->name) || k->type == T_SECTION)
			continue;
		json_t *x = key_to_json(&config_table, &is, k), *y = key_to_json(&config_table, &expected, k);
		char *found = value_text(x), *wanted = value_text(y);
		if (!json_equal(x, y))
			rc = fail_key(l, k->name, "found %s; expected %s, for models of the class %s have nothing else: the class "
					"is model.architecture, in a config.json architectures", found, wanted,
					architecture_names[m->architecture]);
		free(found);
		free(wanted);
		json_decref(x);
		json_decref(y);
	}
	return rc;
}

/* Fills in what follows from other keys, then checks what one key alone cannot tell. */
static int check_model(const struct loader *l, struct config *c)
{
	struct model_config *m = &c->model;
	if (!m->num_key_value_heads)
		m->num_key_value_heads = m->num_attention_heads;
	if (m->num_attention_heads % m->num_key_value_heads)
		return fail_key(l, "model.num_key_value_heads", "found %d; expected a divisor of num_attention_heads, which "
				"is %d", m->num_key_value_heads, m->num_attention_heads);
	if (!m->head_dim) {
		if (m->hidden_size % m->num_attention_heads)
			return fail_key(l, "model.num_attention_heads", "found %d, which does not divide hidden_size %d; "
					"expected a divisor, or head_dim given", m->num_attention_heads, m->hidden_size);
		m->head_dim = m->hidden_size / m->num_attention_heads;
		if (m->head_dim > 4096)
			return fail_key(l, "model.hidden_size", "found %d for %d heads, %d a head; expected at most 4096 a head",
					m->hidden_size, m->num_attention_heads, m->head_dim);
	}
	if (rotary_dim(m) % 2 || rotary_dim(m) < 2)
		return fail_key(l, m->partial_rotary_factor < 1 ? "model.partial_rotary_factor" : "model.head_dim", "found "
				"%d elements of a head that turn, of %d (head_dim, or else hidden_size / num_attention_heads); "
				"expected an even number, at least 2, for rotary embeddings turn pairs", rotary_dim(m), m->head_dim);
	if (check_rope_scaling(l, m) < 0)
		return -1;
	if (m->first_k_dense_replace > m->num_hidden_layers)
		return fail_key(l, "model.first_k_dense_replace", "found %d; expected at most num_hidden_layers, which is %d",
				m->first_k_dense_replace, m->num_hidden_layers);
	if (m->first_k_dense_replace && !m->intermediate_size)
		return fail_key(l, "model.intermediate_size", "missing or 0; expected the width of the dense layers, since "
				"first_k_dense_replace is %d", m->first_k_dense_replace);

	const struct { const char *name; int value; } needed[] = {
		{"model.num_experts", m->num_experts},
		{"model.num_experts_per_tok", m->num_experts_per_tok},
		{"model.moe_intermediate_size", m->moe_intermediate_size},
	};
	for (int i = 0; i < 3 && expert_layers(m); i++)
		if (!needed[i].value)
			return fail_key(l, needed[i].name, "missing or 0; expected at least 1, since %d layers have experts "
					"(set first_k_dense_replace to num_hidden_layers for a dense model)", expert_layers(m));
	if (m->n_group <= 1) {
		m->n_group = 1;
		m->topk_group = m->topk_group ? m->topk_group : 1;
	}
	if (check_architecture(l, m) < 0 || check_groups(l, m) < 0)
		return -1;
	if (m->num_experts_per_tok > m->num_experts)
		return fail_key(l, "model.num_experts_per_tok", "found %d; expected at most num_experts, which is %d",
				m->num_experts_per_tok, m->num_experts);

	const int widest = INT_MAX / 8; /* two such rows side by side, and BLAS counts in int */
	double shared = (double)m->num_shared_experts * m->moe_intermediate_size;
	if (shared > widest)
		return fail_key(l, "model.num_shared_experts", "found %d with moe_intermediate_size %d, together %.0f; "
				"expected num_shared_experts * moe_intermediate_size to be at most %d", m->num_shared_experts,
				m->moe_intermediate_size, shared, widest);

	double attention = 2.0 * m->hidden_size * m->head_dim * (m->num_attention_heads + m->num_key_value_heads);
	double dense = 3.0 * m->hidden_size * m->intermediate_size;
	double experts = 3.0 * m->hidden_size * m->moe_intermediate_size * (m->num_experts + m->num_shared_experts);
	double total = 2.0 * m->vocab_size * m->hidden_size +
			attention * (m->num_hidden_layers + m->num_nextn_predict_layers) + dense * m->first_k_dense_replace +
			experts * expert_layers(m);
	if (total > 1e15)
		return fail_key(l, "model.hidden_size", "the sizes make a model of %.3g parameters; expected at most 1e15",
				total);
	return 0;
}

/* Checks the other sections against the model and each other. What model_only let be missing is 0 and passes. */
static int check_run(const struct loader *l, const struct config *c, bool model_only)
{
	const struct model_config *m = &c->model;
	if (c->data.seq_len > longest_sequence(m))
		return fail_key(l, "data.seq_len", "found %d; expected at most model.max_position_embeddings, which is %d",
				c->data.seq_len, longest_sequence(m));
	if (!strcmp(c->data.tokenizer, "byte") && m->vocab_size < 257)
		return fail_key(l, "model.vocab_size", "found %d; expected at least 257 for data.tokenizer byte (256 bytes "
				"and an end of document)", m->vocab_size);
	if (c->train.steps && c->train.tokens)
		return fail_key(l, "train.tokens", "found %" PRId64 " beside train.steps %" PRId64 "; expected one of them: "
				"set the other to off", c->train.tokens, c->train.steps);
	if (!c->train.steps && !c->train.tokens && !model_only)
		return fail_key(l, "train.steps",
				"missing or 0; expected the length of the run in train.steps or train.tokens");
	const int room = PATH_LEN - (int)sizeof "/.tmp-step-0000000000000000000/optimizer-00001-of-00001.safetensors";
	if (strlen(c->train.output_dir) > (size_t)room)
		return fail_key(l, "train.output_dir", "found a path of %zu bytes; expected at most %d, for the paths of "
				"checkpoints inside it must fit too", strlen(c->train.output_dir), room);
	double weights = 0;
	for (int i = 0; i < c->data.num_train; i++)
		weights += c->data.train[i].weight;
	if (c->data.num_train && !(weights > 0))
		return fail_key(l, "data.train", "all weights are 0; expected one above 0");
	double tokens = (double)c->train.steps * c->train.batch * c->data.seq_len;
	if (tokens > MAX_TOKENS)
		return fail_key(l, "train.steps", "steps * batch * seq_len make %.3g tokens; expected at most %g", tokens,
				MAX_TOKENS);
	int k = m->num_experts_per_tok ? m->num_experts_per_tok : 1;
	double rows = (double)c->train.micro_batch * c->data.seq_len * k;
	if (rows > INT_MAX)
		return fail_key(l, "train.micro_batch", "micro_batch * seq_len * num_experts_per_tok make %.0f rows in a "
				"forward pass; expected at most %d", rows, INT_MAX);

	if (c->train.batch_warmup.start > c->train.batch && c->train.batch)
		return fail_key(l, "train.batch_warmup.start", "found %d; expected at most train.batch, which is %d",
				c->train.batch_warmup.start, c->train.batch);

	if (*c->train.dump.dir && !c->train.dump.num_steps)
		return fail_key(l, "train.dump.steps", "found no step; expected one at least, or train.dump=off");
	for (int i = 0; i < c->train.dump.num_steps; i++)
		if (c->train.steps && c->train.dump.steps[i].number > c->train.steps)
			return fail_key(l, "train.dump.steps", "found step %" PRId64 " of a run of %" PRId64 " steps; expected one "
					"of them", c->train.dump.steps[i].number, c->train.steps);

	if (c->parallel.sync == SYNC_LOCAL && c->spikes.action > SPIKES_WATCH)
		return fail_key(l, "spikes.action", "found %s beside parallel.sync local; expected watch or off, for a replica "
				"cannot skip a batch of all", spike_action_names[c->spikes.action]);
	if (c->parallel.sync == SYNC_LOCAL && c->train.dump.num_steps)
		return fail_key(l, "train.dump", "found steps beside parallel.sync local; expected off, for a dump is of a "
				"step of all ranks");

	if (c->spikes.warmup > c->spikes.window)
		return fail_key(l, "spikes.warmup", "found %d; expected at most spikes.window, which is %d", c->spikes.warmup,
				c->spikes.window);

	if (c->eval.at_start && !c->data.num_valid && !c->eval.num_samples && !*c->eval.sample_file)
		return fail_key(l, "eval.at_start", "found true without data.valid, eval.samples or eval.sample_file; expected "
				"something to evaluate");

	for (int i = 1; i < c->schedule.num_drops; i++)
		if (c->schedule.drops[i].at <= c->schedule.drops[i - 1].at)
			return fail_key(l, "schedule.drops", "found at: %g after at: %g; expected them to increase",
					c->schedule.drops[i].at, c->schedule.drops[i - 1].at);
	if (c->schedule.decay.shape == DECAY_INVERSE_SQRT && c->schedule.decay.final_lr <= 0)
		return fail_key(l, "schedule.decay.final_lr", "missing or 0; expected above 0 for shape inverse_sqrt");
	return 0;
}

int config_load(struct config *c, const char *path, int num_overrides, char **overrides, bool model_only)
{
	struct config_loader l;
	config_loader_init(&l, c, path, false);
	if (refuse_gguf(path) < 0 || load_file(&l.keys) < 0)
		return -1;
	for (int i = 0; i < num_overrides; i++)
		if (load_override(&l.keys, overrides[i]) < 0)
			return -1;
	set_architecture_defaults(&l);
	if (check_required(&l.keys, model_only ? "model" : NULL) < 0 || check_model(&l.keys, c) < 0)
		return -1;
	if (key_given(&l.keys, "data.document_mask") && !c->data.document_mask) {
		/* documents that are packed together must not see each other */
		if (c->data.packing == PACKING_DOCUMENTS)
			return fail_key(&l.keys, "data.document_mask", "found false beside data.packing documents; expected true "
					"or nothing, for documents that are packed together do not see each other; or set "
					"data.packing=windows");
		c->data.packing = PACKING_WINDOWS;
	}
	/* what would have no effect; a config.json may say both */
	if (!*l.model_path && !c->model.num_nextn_predict_layers && c->model.mtp_loss_scaling_factor > 0)
		return fail_key(&l.keys, "model.mtp_loss_scaling_factor", "found %g, but there are no layers for multi-token "
				"prediction; expected num_nextn_predict_layers, or the key left out", c->model.mtp_loss_scaling_factor);
	if (key_given(&l.keys, "model.router.bias_update_rate") && c->model.router.bias_update_rate > 0 &&
			c->model.architecture != BAILING_MOE_V2)
		return fail_key(&l.keys, "model.router.bias_update_rate", "found %g, but only models of the class "
				"BailingMoeV2ForCausalLM have an expert bias; expected that model.architecture, or the key left out",
				c->model.router.bias_update_rate);
	set_dependent_defaults(&l);
	return check_run(&l.keys, c, model_only);
}

/* ------------------------------------------------------------------------- JSON, for checkpoints and Hugging Face */

json_t *config_value(const struct config *c, const char *path)
{
	return key_to_json(&config_table, c, find_key(&config_table, path));
}

json_t *config_to_json(const struct config *c)
{
	return config_value(c, "");
}

uint32_t config_crc32(const struct config *c)
{
	json_t *json = config_to_json(c);
	char *text = json_text(json, JSON_SORT_KEYS);
	const uint32_t crc = crc32(0, (const uint8_t *)text, strlen(text));
	free(text);
	json_decref(json);
	return crc;
}

/* Whether a key of a section, or of a section inside it, has another value in a than in b. */
static bool section_differs(const struct config *a, const struct config *b, const char *section)
{
	json_t *x = config_value(a, section), *y = config_value(b, section);
	const bool differs = !json_equal(x, y);
	json_decref(x);
	json_decref(y);
	return differs;
}

void config_print_yaml(FILE *out, const struct config *c)
{
	struct config standard, dependent; /* the defaults, and those beside this architecture and these other keys */
	struct config_loader l;
	config_loader_init(&l, &dependent, "", false);
	dependent.model.architecture = c->model.architecture;
	dependent.model.num_nextn_predict_layers = c->model.num_nextn_predict_layers;
	dependent.parallel.sync = c->parallel.sync;
	set_architecture_defaults(&l);
	set_dependent_defaults(&l);
	config_loader_init(&l, &standard, "", false);
	for (const struct key *k = keys; k < keys + NUM_KEYS; k++) {
		char section[64];
		snprintf(section, sizeof section, "%.*s", (int)(leaf_of(k->name) - k->name - (leaf_of(k->name) > k->name)),
				k->name);
		const int depth = *section ? strchr(section, '.') ? 2 : 1 : 0;
		json_t *value = key_to_json(&config_table, c, k), *usual = key_to_json(&config_table, &standard, k);
		json_t *here = key_to_json(&config_table, &dependent, k);
		/* where one key of a section that may be missing is given, all that it needs are */
		const bool given = !(k->flags & ITEM) && (k->flags & REQUIRED || !json_equal(value, usual) ||
				!json_equal(value, here) || (k->flags & NEEDED && section_differs(c, &standard, section)));
		if (given && k->type == T_SECTION)
			fprintf(out, "%*s%s:\n", 2 * depth, "", leaf_of(k->name));
		else if (given) {
			const bool plain = json_is_string(value) && k->type != T_TEXT;
			char *text = json_text(value, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
			fprintf(out, "%*s%s: %s\n", 2 * depth, "", leaf_of(k->name), plain ? json_string_value(value) : text);
			free(text);
		}
		json_decref(value);
		json_decref(usual);
		json_decref(here);
	}
}

/* Reports a JSON value that key `name` cannot take. */
static int fail_json(const struct config_loader *l, const char *name, const json_t *value, const char *wrong,
		const char *expected)
{
	char shown[64];
	char *text = json_text(value, JSON_ENCODE_ANY | JSON_COMPACT);
	fail("%s: %s: found %s%s%s%s; expected %s", l->keys.path, name, printable(shown, text), *wrong ? " (" : "", wrong,
			*wrong ? ")" : "", expected);
	free(text);
	return -1;
}

/* Stores the JSON value of key k of the model: a whole number, a number, true and false, or a name; null stands for
 * off. */
static int load_json(struct config_loader *l, const struct key *k, const json_t *value)
{
	char number[64], type[256];
	const char *text = number, *wrong = "";
	bool fits = json_is_null(value) ? k->flags & NONE : k->type == T_BOOL ? json_is_boolean(value)
		: k->type == T_INT ? json_is_integer(value) : k->type == T_ENUM ? json_is_string(value) : json_is_number(value);
	if (json_is_integer(value))
		snprintf(number, sizeof number, "%" JSON_INTEGER_FORMAT, json_integer_value(value));
	else if (json_is_real(value))
		snprintf(number, sizeof number, "%.17g", json_real_value(value));
	else if (json_is_string(value))
		text = json_string_value(value);
	else
		text = json_is_true(value) ? "true" : json_is_false(value) ? "false" : "off";
	if (fits && !(wrong = store_text(l->config, k, 0, text, true)))
		return 0;
	return fail_json(l, leaf_of(k->name), value, wrong, describe_key(type, &config_table, k));
}

/* Takes the class of a config.json: from architectures, or else from model_type. */
static int load_architecture(struct config_loader *l, const json_t *root)
{
	const struct key *k = find_key(&config_table, "model.architecture");
	const json_t *list = json_object_get(root, "architectures"), *type = json_object_get(root, "model_type");
	const char *name = json_string_value(json_array_get(list, 0));
	if (list && !json_is_null(list) && (json_array_size(list) != 1 || !name ||
			store_text(l->config, k, 0, name, true)))
		return fail_json(l, "architectures", list, "not supported: it changes the model's mathematics",
				"[\"BailingMoeForCausalLM\"] or [\"BailingMoeV2ForCausalLM\"]");
	if (!name && json_is_string(type) && !strcmp(json_string_value(type), "bailing_moe_v2"))
		l->config->model.architecture = BAILING_MOE_V2;
	return 0;
}

/* Stores the members of a Hugging Face config.json that are keys of the model. */
static int load_huggingface(struct config_loader *l, const json_t *object)
{
	const char *name;
	json_t *value;
	json_object_foreach((json_t *)object, name, value) {
		char path[128];
		snprintf(path, sizeof path, "model.%s", name);
		const struct key *k = strchr(name, '.') ? NULL : find_key(&config_table, path);
		if (k && k->type != T_SECTION && !(k->flags & UNSAID && json_is_null(value)) &&
				(claim_key(&l->keys, k, (struct place){l->keys.path, WHOLE_FILE}) < 0 || load_json(l, k, value) < 0))
			return -1;
	}
	return 0;
}

/* Keys of a Hugging Face config.json that change the mathematics in a way this program does not know, and the values,
 * as JSON, under which they do not. null always passes. */
static const struct { const char *name, *values[3]; } foreign_keys[] = {
	{"model_type", {"\"bailing_moe\"", "\"bailing_moe_v2\""}},
	{"hidden_act", {"\"silu\""}},
	{"use_sliding_window", {"false"}},
	{"use_qkv_norm", {"false"}},
	{"use_rmsnorm", {"true"}},
	{"norm_softmax", {"false"}},
};

/* Stores rope_scaling, or rope_parameters as transformers 5 writes them (then rope_theta is in there), whose value may
 * be null. name: which of them it is. */
static int load_rope(struct config_loader *l, const char *name, const json_t *value)
{
	const struct key *const type_key = find_key(&config_table, "model.rope_scaling.type");
	const struct rope_scaling *s = &l->config->model.rope_scaling;
	const json_t *type = json_object_get(value, "rope_type"), *old_type = json_object_get(value, "type");
	const char *key;
	json_t *member;
	if (!value || json_is_null(value))
		return 0;
	if (!json_is_object(value))
		return fail_json(l, name, value, "", "null or an object");
	type = !type || json_is_null(type) ? old_type : type;
	if (old_type && !json_is_null(old_type) && !json_equal(type, old_type))
		return fail_json(l, name, value, "rope_type and type differ", "one of them");
	if (type && !json_is_null(type) && (!json_is_string(type) || store_text(l->config, type_key, 0,
			json_string_value(type), true)))
		return fail_json(l, name, value, "a type that is not supported: it changes the model's mathematics",
				"null, or rope_type default, linear, dynamic or yarn");
	json_object_foreach((json_t *)value, key, member) {
		char path[128];
		snprintf(path, sizeof path, "model.rope_scaling.%s", key);
		const struct key *k = strlen(key) < 64 ? find_key(&config_table, path) : NULL;
		const bool is_one = json_is_number(member) && json_number_value(member) == 1;
		if (json_is_null(member) || !strcmp(key, "rope_type") || !strcmp(key, "type") ||
				!strcmp(key, "rope_theta") || !strcmp(key, "partial_rotary_factor") || /* load_rotary reads them */
				(is_one && !strcmp(key, "factor") && !s->type))
			continue;
		if (!k || (k->flags & NONE && json_is_number(member) && json_number_value(member) == 0))
			return fail_json(l, name, value, "not supported: it changes the model's mathematics",
					"null, or {\"rope_type\": \"default\", \"rope_theta\": ...}, or a type linear, dynamic or yarn "
					"with its own keys");
		if (load_json(l, k, member) < 0)
			return -1;
		l->keys.places[k - keys] = (struct place){l->keys.path, WHOLE_FILE};
	}
	l->keys.places[type_key - keys] = (struct place){l->keys.path, WHOLE_FILE};
	return 0;
}

/* Stores a value of a key of the rotary embedding that may stand in several places of a config.json, where it must be
 * the same. name: what has it here. */
static int load_again(struct config_loader *l, const struct key *k, const char *name, const json_t *value)
{
	const double before = *(double *)((char *)l->config + k->offset);
	const bool given = key_given(&l->keys, k->name);
	if (load_json(l, k, value) < 0)
		return -1;
	const double now = *(double *)((char *)l->config + k->offset);
	if (given && before != now)
		return fail("%s: %s: found %s %.15g, but %.15g outside it; expected the same, or one of them", l->keys.path,
				name, leaf_of(k->name), now, before);
	l->keys.places[k - keys] = (struct place){l->keys.path, WHOLE_FILE};
	return 0;
}

/* Stores what rope_scaling, rope_parameters and rotary_dim say of the rotary embedding. */
static int load_rotary(struct config_loader *l, const json_t *root)
{
	static const char *const names[] = {"rope_scaling", "rope_parameters"};
	const struct key *const numbers[] = {find_key(&config_table, "model.rope_theta"),
			find_key(&config_table, "model.partial_rotary_factor")};
	for (int i = 0; i < 2; i++) {
		json_t *first = config_value(l->config, "model.rope_scaling");
		const bool scaled = l->config->model.rope_scaling.type;
		int rc = load_rope(l, names[i], json_object_get(root, names[i]));
		json_t *second = config_value(l->config, "model.rope_scaling");
		if (rc == 0 && scaled && !json_equal(first, second))
			rc = fail("%s: rope_scaling and %s differ; expected the same, or one of them", l->keys.path, names[i]);
		json_decref(first);
		json_decref(second);
		for (int j = 0; j < 2 && rc == 0; j++) {
			const json_t *value = json_object_get(json_object_get(root, names[i]), leaf_of(numbers[j]->name));
			if (value && !json_is_null(value))
				rc = load_again(l, numbers[j], names[i], value);
		}
		if (rc < 0)
			return -1;
	}
	/* in elements of a head, as some files of Ling 2.0 have it */
	const json_t *dim = json_object_get(root, "rotary_dim");
	if (!dim || json_is_null(dim))
		return 0;
	const struct model_config *m = &l->config->model;
	const int heads = m->num_attention_heads, head_dim = m->head_dim ? m->head_dim : heads ? m->hidden_size / heads : 0;
	if (!json_is_integer(dim) || json_integer_value(dim) < 2 || json_integer_value(dim) > head_dim)
		return fail_json(l, "rotary_dim", dim, "", "a whole number from 2 up to the width of a head");
	if (key_given(&l->keys, numbers[1]->name) && (int)(head_dim * m->partial_rotary_factor) == json_integer_value(dim))
		return 0; /* the same, perhaps rounded */
	double part = (double)json_integer_value(dim) / head_dim;
	if ((int)(head_dim * part) < json_integer_value(dim)) /* such as 2 of 98 */
		part = nextafter(part, 1);
	json_t *factor = json_real(part);
	const int rc = load_again(l, numbers[1], "rotary_dim", factor);
	json_decref(factor);
	return rc;
}

/* Fails when one of the keys above has another value. */
static int check_foreign_keys(const struct config_loader *l, const json_t *root)
{
	for (size_t i = 0; i < sizeof foreign_keys / sizeof foreign_keys[0]; i++) {
		const json_t *value = json_object_get(root, foreign_keys[i].name);
		if (!value || json_is_null(value))
			continue;
		char *text = json_text(value, JSON_ENCODE_ANY | JSON_COMPACT);
		bool ok = false;
		for (int j = 0; j < 3 && foreign_keys[i].values[j]; j++)
			ok = ok || !strcmp(text, foreign_keys[i].values[j]);
		free(text);
		if (!ok)
			return fail_json(l, foreign_keys[i].name, value, "not supported: it changes the model's mathematics",
					foreign_keys[i].values[0]);
	}
	return 0;
}

/* Stores what a config.json says of the model; what it does not say has the defaults of its class. */
static int load_members(struct config_loader *l, const json_t *root)
{
	if (load_architecture(l, root) < 0 || load_huggingface(l, root) < 0)
		return -1;
	const bool topk_group_given = key_given(&l->keys, "model.topk_group");
	set_architecture_defaults(l); /* rotary_dim counts in elements of a head */
	if (l->config->model.n_group <= 1 && !topk_group_given) /* its default is for that of n_group */
		l->config->model.topk_group = 1;
	return load_rotary(l, root);
}

/* Reads the Hugging Face config.json that is the loader's file. */
static int load_config_json(struct config_loader *l)
{
	json_t *root = json_read(l->keys.path);
	const int rc = !root || check_foreign_keys(l, root) < 0 ? -1 : load_members(l, root);
	json_decref(root);
	return rc;
}

/* Checks the model section that a loader has read, and gives it. */
static int finish_model(const struct config_loader *l, struct model_config *m)
{
	if (check_required(&l->keys, "model") < 0 || check_model(&l->keys, l->config) < 0)
		return -1;
	*m = l->config->model;
	return 0;
}

int config_from_json(struct model_config *m, const json_t *root, const char *path)
{
	struct config c;
	struct config_loader l;
	config_loader_init(&l, &c, path, true);
	return load_members(&l, root) < 0 ? -1 : finish_model(&l, m);
}

int config_from_huggingface(struct model_config *m, const char *dir)
{
	char path[PATH_LEN];
	struct config c;
	struct config_loader l;
	if (refuse_gguf(dir) < 0 || path_join(path, dir, "config.json") < 0)
		return -1;
	config_loader_init(&l, &c, path, true);
	return load_config_json(&l) < 0 ? -1 : finish_model(&l, m);
}

/* The model's keys, less what only training knows. The caller owns them. */
static json_t *model_to_json(const struct model_config *m)
{
	struct config c = {.model = *m};
	json_t *model = config_value(&c, "model");
	json_object_del(model, "router");
	return model;
}

/* Whether a config.json has the rope_scaling of m. */
static bool has_rope_scaling(const json_t *root, const struct model_config *m)
{
	struct config c, ours = {.model = *m};
	struct config_loader l;
	config_loader_init(&l, &c, "", true);
	if (load_members(&l, root) < 0 || check_model(&l.keys, &c) < 0)
		return false;
	json_t *x = config_value(&c, "model.rope_scaling"), *y = config_value(&ours, "model.rope_scaling");
	const bool same = json_equal(x, y);
	json_decref(x);
	json_decref(y);
	return same;
}

/* rope_scaling as a config.json has it: null, or what is not as without the key. The caller owns it. */
static json_t *rope_to_huggingface(const struct model_config *m)
{
	struct config c = {.model = *m};
	const struct rope_scaling *s = &m->rope_scaling;
	json_t *all = config_value(&c, "model.rope_scaling"), *value;
	if (s->type == ROPE_DEFAULT) {
		json_decref(all);
		return json_null();
	}
	/* transformers reads rope_type, and the class that comes with the models reads type */
	json_t *scaling = json_pack("{s:s, s:s}", "rope_type", rope_names[s->type], "type", rope_names[s->type]);
	for (const struct key *k = keys; k < keys + NUM_KEYS; k++) {
		const char *name = leaf_of(k->name);
		const bool shown = is_inside("model.rope_scaling", k->name) && k->type != T_ENUM &&
				(s->type == ROPE_YARN || !strcmp(name, "factor"));
		if (!shown || !(value = json_object_get(all, name)))
			continue;
		const double number = json_is_boolean(value) ? json_is_true(value) : json_number_value(value);
		const double standard = k->type == T_BOOL ? 1 : k->flags & NONE ? 0 : atof(k->fallback);
		if (number != standard)
			json_object_set(scaling, name, value);
	}
	json_decref(all);
	return scaling;
}

int config_write(const char *path, const struct model_config *m, const char *dtype, const json_t *base,
		const json_t *gguf_name)
{
	const bool v2 = m->architecture == BAILING_MOE_V2;
	json_t *root = json_pack("{s:[s], s:s, s:s}", "architectures", architecture_names[m->architecture], "model_type",
			"bailing_moe", "hidden_act", "silu"); /* of both classes: so have the models that were published */
	if (base)
		json_object_update(root, (json_t *)base);
	else
		json_object_update_new(root, json_pack("{s:n, s:b, s:b, s:f, s:f, s:f}", "rope_scaling", "use_sliding_window",
				0, "use_cache", 1, "attention_dropout", 0.0, "embedding_dropout", 0.0, "output_dropout", 0.0));
	if (!base && v2) /* which inference engines read */
		json_object_update_new(root, json_pack("{s:s, s:b}", "router_dtype", "fp32", "use_rmsnorm", 1));
	for (const struct key *k = keys; k < keys + NUM_KEYS; k++) /* other spellings of what follows */
		if (k->alias)
			json_object_del(root, leaf_of(k->alias));
	json_object_set_new(root, json_object_get(root, "dtype") ? "dtype" : "torch_dtype", json_string(dtype));
	json_t *model = model_to_json(m);
	json_object_del(model, "rope_scaling");
	json_object_del(model, "architecture"); /* architectures says it */
	if (v2)
		json_object_del(model, "norm_head"); /* no key of that class */
	for (const struct key *k = keys; k < keys + NUM_KEYS; k++)
		if (k->flags & V2 && !v2)
			json_object_del(model, leaf_of(k->name));
	json_object_update_new(root, model);
	if (!has_rope_scaling(root, m)) {
		json_object_del(root, "rope_parameters");
		json_object_set_new(root, "rope_scaling", rope_to_huggingface(m));
	}
	if (gguf_name)
		json_object_set(root, "general.name", (json_t *)gguf_name);
	int rc = json_write(path, root);
	json_decref(root);
	return rc;
}

int config_to_huggingface(const struct model_config *m, const char *path)
{
	return config_write(path, m, "float32", NULL, NULL);
}

json_t *run_to_json(const struct config *c)
{
	return c->data.seq_len ? config_to_json(c) : json_pack("{s:o}", "model", model_to_json(&c->model));
}

/* The config of a checkpoint as far as it does not say it: of each key that it does not have the default, and what
 * follows from that. The rest, and what has no default, is as asked. */
static void unsaved_config(struct config *c, const json_t *saved, const struct config *asked)
{
	struct config_loader l;
	config_loader_init(&l, c, "", false);
	*c = *asked;
	for (const struct key *k = keys; k < keys + NUM_KEYS; k++)
		if (!(k->flags & REQUIRED) && !json_at(saved, k->name))
			set_default(c, k);
	check_model(&l.keys, c); /* fills in; what does not fit is refused as another value */
	if (!json_at(saved, "data.packing") && asked->data.packing == PACKING_WINDOWS)
		c->data.packing = PACKING_WINDOWS; /* before the key was there all was packed so */
}

int config_compare(const json_t *saved, const struct config *asked, const char *where, FILE *notes)
{
	int rc = 0;
	bool added = false;
	char shown[64], path[128];
	const bool model_alone = json_object_size(saved) == 1 && json_object_get(saved, "model");
	struct config unsaved;
	unsaved_config(&unsaved, saved, asked);
	for (int i = -1; i < NUM_KEYS && !rc; i++) {
		const struct key *k = i < 0 ? find_key(&config_table, "") : &keys[i];
		const json_t *before = json_at(saved, k->name);
		if (k->flags & ITEM || (model_alone && (!is_inside("model", k->name) || is_inside("model.router", k->name))))
			continue;
		if (k->type == T_SECTION) {
			const char *name;
			json_t *value;
			json_object_foreach((json_t *)before, name, value) {
				snprintf(path, sizeof path, "%s%s%s", k->name, *k->name ? "." : "", name);
				if (!find_key(&config_table, path))
					fprintf(notes, "%s: in the checkpoint only, and not known\n", printable(shown, path));
			}
			continue;
		}
		const bool has = before;
		json_t *then = has ? json_incref((json_t *)before) : key_to_json(&config_table, &unsaved, k);
		json_t *now = key_to_json(&config_table, asked, k);
		char *old = value_text(then), *new = value_text(now);
		if (!has && k->flags & REQUIRED)
			fprintf(notes, "%s: not in the checkpoint -> %s\n", k->name, new);
		else if (!json_equal(then, now) && k->flags & ADDED && !strcmp(old, "\"none\""))
			added = true, fprintf(notes, "%s: %s%s -> %s\n", k->name, old, has ? "" : " by default", new);
		else if (!json_equal(then, now) && k->flags & FIXED)
			rc = has ? fail("%s: %s was %s in the checkpoint, found %s; expected the same, for it would be another "
					"run: set it back, or choose a new train.output_dir", where, k->name, old, new)
				: fail("%s: the checkpoint has no %s, as it is from before there was that key, and computes what is "
					"its default, %s; found %s; expected the key left out, for it would be another run: take it out, "
					"or choose a new train.output_dir", where, k->name, old, new);
		else if (!json_equal(then, now))
			fprintf(notes, "%s: %s%s -> %s%s\n", k->name, old, has ? "" : " by default", new, k->flags & BEGIN ? "; it "
					"is not read: the run goes on with the weights of its checkpoint. For another start choose a new "
					"train.output_dir" : "");
		json_decref(then);
		free(old);
		free(new);
		json_decref(now);
	}
	return rc < 0 ? -1 : added;
}

int config_check_init(const struct model_config *theirs, const struct model_config *asked, const char *dir)
{
	struct config a = {.model = *theirs}, b = {.model = *asked};
	int rc = 0;
	for (const struct key *k = keys; k < keys + NUM_KEYS && !rc; k++) {
		/* The numbers of layers come before what only some kinds of layers have. */
		if (!is_inside("model", k->name) || !(k->flags & FIXED) || k->flags & FREE ||
				/* a run may extend a model that has no scaling */
				(is_inside("model.rope_scaling", k->name) && !theirs->rope_scaling.type) ||
				(k->flags & DENSE && !asked->first_k_dense_replace) ||
				(k->flags & ROUTED && !expert_layers(asked)))
			continue;
		json_t *x = key_to_json(&config_table, &a, k), *y = key_to_json(&config_table, &b, k);
		if (!json_equal(x, y)) {
			char *is = value_text(x), *wanted = value_text(y);
			rc = fail("%s/config.json: %s is %s, the config asks for %s; expected the same, for these weights would "
					"make another model: set it to %s, or choose another train.init_from", dir, k->name, is, wanted,
					is);
			free(is);
			free(wanted);
		}
		json_decref(x);
		json_decref(y);
	}
	return rc;
}
