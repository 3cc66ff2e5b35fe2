/*
 * files/config.h - the config of a run: the table of its keys, its checks, and JSON, for checkpoints and Hugging Face.
 */
#ifndef LING_FILES_CONFIG_H
#define LING_FILES_CONFIG_H

#include "files/base.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#define MAX_LR_DROPS 16
#define MAX_DUMPS 64       /* steps that are dumped */
#define MAX_MTP_LAYERS 16  /* num_nextn_predict_layers */
#define MAX_SOURCES 64     /* token files of a blend, and of all validation sets */
#define MAX_SAMPLE_PROMPTS 32 /* of eval.samples, beside those of eval.sample_file */
#define SET_NAME_LEN 32    /* bytes of a validation set's name, the final 0 included */

/* What a model's memory is for: evaluation, or training, which keeps all activations for the backward pass, or
 * computes those of the attention or of whole layers a second time there. */
enum model_mode { TRAIN_KEEP_ALL, TRAIN_RECOMPUTE_ATTENTION, TRAIN_RECOMPUTE_LAYER, EVALUATE };
/* How a token file becomes windows of seq_len tokens: one after the other, or whole documents placed into them. auto:
 * documents for a file with an index and a loss mask, as conversations have; else windows. */
enum packing { PACKING_AUTO, PACKING_WINDOWS, PACKING_DOCUMENTS };
enum balance_scope { SCOPE_MICRO_BATCH, SCOPE_SEQUENCE };
enum decay_shape { DECAY_LINEAR, DECAY_COSINE, DECAY_1_SQRT, DECAY_INVERSE_SQRT };

enum rope_type { ROPE_DEFAULT, ROPE_LINEAR, ROPE_DYNAMIC, ROPE_YARN };
struct rope_scaling {          /* Hugging Face's rope_scaling; see files/rope.h */
	enum rope_type type;         /* ROPE_DEFAULT: no scaling, and the rest is of no meaning */
	double factor;               /* how much longer sequences become; never 0 once loaded */
	int original_max_position_embeddings; /* the length before; of dynamic and yarn never 0 once loaded */
	/* of yarn alone: */
	double attention_factor;     /* 0 = by the other keys */
	double beta_fast, beta_slow; /* rotations over the original length */
	double mscale, mscale_all_dim; /* 0 = none */
	bool truncate;
};

/* The classes of Hugging Face, which differ in what keys that are missing mean, and in what their keys can be: the
 * second one is that of Ling 2.0. */
enum architecture { BAILING_MOE, BAILING_MOE_V2 };
#define EXPERT_BIAS "mlp.gate.expert_bias" /* how the tensor's name ends; always float32 in files */
enum score_function { SCORE_SOFTMAX, SCORE_SIGMOID }; /* what makes scores of a router's logits */

struct model_config {          /* Hugging Face's keys of BailingMoeConfig and BailingMoeV2Config */
	enum architecture architecture;
	int hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads;
	int head_dim;                /* never 0 once loaded: missing means hidden_size / num_attention_heads */
	int vocab_size;
	int num_experts, num_experts_per_tok, num_shared_experts, moe_intermediate_size;
	int first_k_dense_replace;   /* this many first layers have one dense SwiGLU of width intermediate_size */
	int intermediate_size;
	int max_position_embeddings;
	enum score_function score_function;
	/* Experts are n_group groups of consecutive ones, of which a token chooses topk_group first; 1, 1: no groups */
	int n_group, topk_group;
	double routed_scaling_factor; /* the sum of the routed experts times it */
	bool moe_router_enable_expert_bias; /* is added to the scores where experts are chosen, and balances them */
	bool norm_topk_prob, norm_head, tie_word_embeddings;
	bool use_bias, use_qkv_bias; /* attention.dense and attention.query_key_value */
	bool use_qk_norm;            /* RMSNorm of each query and key head before the rotation */
	double partial_rotary_factor; /* the part of each head that turns, its first one */
	/* multi-token prediction layers, which stand behind the num_hidden_layers; and the weight of their loss: with 0
	 * they are neither computed nor changed */
	int num_nextn_predict_layers;
	double mtp_loss_scaling_factor;
	double rope_theta, rms_norm_eps, initializer_range;
	struct rope_scaling rope_scaling;
	struct {                     /* ours: training only */
		double balance_loss_coef, z_loss_coef;
		enum balance_scope balance_loss_scope;
		int warmup_steps;        /* stochastic routing warmup; 0 = none */
		double bias_update_rate; /* of the expert bias, a step; 0 = it stays */
	} router;
};

struct data_source {           /* a token file of the config */
	char path[PATH_LEN];
	char dtype[8];               /* of a file of bare ids; else "none" */
	double weight;               /* in the blend; of no meaning for validation */
	char set[SET_NAME_LEN];      /* of validation: the set that it belongs to; "": none */
};

enum { MAX_SPIKE_WINDOW = 4096 };
enum spike_action { SPIKES_OFF, SPIKES_WATCH, SPIKES_SKIP, SPIKES_LADDER };
struct spike_options {         /* see training/spikes.h and docs/stability.md */
	enum spike_action action;
	int window, warmup;          /* accepted steps that a batch is compared with; those before it judges */
	double loss_threshold, grad_threshold; /* in robust standard deviations */
	double retry_lr;             /* samples that spike again are trained at the learning rate times this */
	int max_skips;               /* of the last `window` batches; more end the run or roll it back */
	int rollback;                /* how many times a run may go back */
};

enum local_sync { SYNC_STEP, SYNC_LOCAL }; /* of parallel.sync: replicas come together in each step, or after periods */
struct local_options {         /* see training/local_sgd.h and docs/local-sgd.md */
	int64_t ranks;               /* of a replica; EVERY_AUTO = the fewest that parallel.tensor and expert allow */
	int64_t warmup_steps;        /* ordinary steps before the first period; 0 = none */
	int64_t steps;               /* of a period, */
	double seconds;              /* or its time; 0 = by steps */
	double outer_lr, outer_momentum;
	bool penalty;                /* anomalous replicas are set aside, the others weighted, the mean clipped */
	double clip;                 /* largest norm of the mean pseudo-gradient of a block; 0 = any */
	double anomaly_deviations;   /* see replica_weights; 0 = none is set aside */
	double anomaly_decay;
	int64_t anomaly_warmup;
};

enum checkpoint_async { ASYNC_FALSE, ASYNC_TRUE, ASYNC_AUTO };
enum reduce_dtype { REDUCE_F32, REDUCE_BF16 };
enum { EVERY_AUTO = -1 };        /* of checkpoint.every, log.experts and local.ranks */

struct config {
	struct model_config model;
	struct {
		struct data_source train[MAX_SOURCES], valid[MAX_SOURCES];
		int num_train, num_valid;  /* num_valid may be 0 */
		int64_t blend_from_step;   /* the step at which a continued run may change its blend; 0 = none */
		char tokenizer[PATH_LEN];  /* "byte", "none", or what tokenizer_open takes */
		int seq_len;
		enum packing packing;
		bool shuffle, document_mask;
		int document_token;        /* separates the documents of files that have no index; -1 = not known */
	} data;
	struct {
		char output_dir[PATH_LEN], init_from[PATH_LEN]; /* init_from may be "" */
		uint64_t seed;
		int64_t steps, tokens;   /* length of the run: exactly one of them is set, the other is 0 */
		int64_t stop_at_step;    /* save and stop here, as SIGTERM would; 0 = run to the end */
		int micro_batch, batch;  /* sequences a forward pass; sequences an optimizer step */
		enum model_mode recompute;
		double grad_clip;        /* 0 = no clipping */
		struct { int start, increment; int64_t tokens; } batch_warmup; /* tokens 0 = none */
		struct {                 /* see model/dump.h */
			struct { int64_t number; } steps[MAX_DUMPS];
			int num_steps;         /* 0 = no dump */
			char dir[PATH_LEN];
		} dump;
		int perturb;             /* the first weights move by one unit in the last place, by this key; 0 = not */
	} train;
	struct { double beta1, beta2, eps, weight_decay; } optimizer;
	struct {
		double peak_lr;
		int64_t warmup_steps;
		struct { double at, factor; } drops[MAX_LR_DROPS]; /* lr times factor once `at` of the run's tokens are done */
		int num_drops;
		struct { int64_t steps; enum decay_shape shape; double final_lr; } decay;
	} schedule;
	struct spike_options spikes;
	struct {
		int64_t every;           /* steps; 0 = only at the end, EVERY_AUTO = by the cost of a save and mtbf */
		double mtbf;             /* hours between two failures */
		int keep;                /* newest ones; 0 = all */
		int64_t keep_every;      /* every so many steps one stays for ever; 0 = none */
		enum checkpoint_async async;
		bool strict;             /* refuse a damaged newest one */
		int hosts;               /* that bytes are balanced among; 0 = the real ones */
	} checkpoint;
	struct { int64_t every; } health; /* see training/health.h; 0 = never */
	struct {
		int64_t every;           /* steps; 0 = only at the end */
		int64_t max_windows;     /* 0 = all */
		bool at_start;           /* before the first step, too */
		struct { char text[1024]; } samples[MAX_SAMPLE_PROMPTS]; /* prompts that are continued */
		int num_samples;
		char sample_file[PATH_LEN]; /* more of them; "": none */
		int64_t sample_tokens;   /* most tokens of a continuation */
		double sample_temperature;
	} eval;
	struct { int64_t every, experts; } log; /* steps; experts: of expert_counts, 0 = never, EVERY_AUTO */
	struct { int64_t events; } trace; /* records that a rank's trace holds; 0 = none is written */
	struct {
		int tensor, expert;      /* ranks that split heads and vocabulary; ranks that split the experts */
		enum reduce_dtype reduce; /* of gradients and of changes of weights, as they are sent */
		enum local_sync sync;    /* when replicas come together */
	} parallel;
	struct local_options local;  /* of parallel.sync local */
};

/* --------------------------------------------------------------------------------------------------- reading */

/* Loads a YAML file, then `key.path=value` overrides, then checks everything. With model_only, sections other than
 * `model` may be missing their required keys. Errors name file:line and the key. */
int config_load(struct config *c, const char *path, int num_overrides, char **overrides, bool model_only);

/* The names of enum architecture, then NULL. */
extern const char *const architecture_names[];

/* Elements of a head that the rotary embedding turns. */
int rotary_dim(const struct model_config *m);

/* The table of all keys: see files/config_keys.h. */
extern const struct key_table config_table;

/* The longest sequence that a model may have: max_position_embeddings, or where rope_scaling makes more of it, that. */
int longest_sequence(const struct model_config *m);

/* The longest sequence where its user names no length: longest_sequence(), but of type dynamic, whose embedding of all
 * positions changes with the length, max_position_embeddings, up to which nothing is scaled. */
int default_sequence(const struct model_config *m);

/* Prints every key with type, default and meaning. */
void config_print_keys(FILE *out);

/* The names of enum packing, then NULL. */
extern const char *const packing_names[];

/* ------------------------------------------------------------------- config.json of a Hugging Face model */

/* Reads the model section from DIR/config.json; keys that are missing take the defaults of the class that it names. */
int config_from_huggingface(struct model_config *m, const char *dir);

/* The same from a JSON object that was made from the file `path`, which messages name. Members that are no keys of the
 * model are ignored: the caller has refused those that change the mathematics. */
int config_from_json(struct model_config *m, const json_t *root, const char *path);

/* Writes a config.json: the keys of the model, and `dtype`, the type of the weights. `base`, perhaps the config.json
 * that the model came with, gives the other members; with NULL they are what the class needs. gguf_name: the name of
 * the model in a GGUF file, kept as general.name for the way back; or NULL. */
int config_write(const char *path, const struct model_config *m, const char *dtype, const json_t *base,
		const json_t *gguf_name);

/* The member of a config.json that says which checkpoints its weights were merged from: see commands/merge.c. A run
 * that starts from them does not pass it on. */
#define MERGE_KEY "checkpoint_merge"

/* config_write for weights in float32 and without a base. */
int config_to_huggingface(const struct model_config *m, const char *path);

/* Compares the model that DIR/config.json describes, `theirs`, with the one that is to start from DIR's weights. A
 * difference in anything that changes what the model computes fails, naming the key and both values. */
int config_check_init(const struct model_config *theirs, const struct model_config *asked, const char *dir);

/* ---------------------------------------------------------------- JSON of checkpoints; the caller owns it */

/* Every key, in nested objects. */
json_t *config_to_json(const struct config *c);

/* The value at the path of a key; of a section, an object. */
json_t *config_value(const struct config *c, const char *path);

/* The config as trainer.json holds it: every key of a run, or the model alone where no run has been yet. */
json_t *run_to_json(const struct config *c);

/* Compares the config that a checkpoint at `where` had with the one asked for. A difference in a key that a run must
 * not change fails; all else that differs, and keys that are not known, are lines in notes. A key that the checkpoint
 * does not have, since it is older, had its default; one that must be given is a line in notes. Where the checkpoint
 * has a model but no run, only the model counts. Returns 1, with a line too, where data.tokenizer was none
 * and is a tokenizer now: the caller must check that it has made the data. */
int config_compare(const json_t *saved, const struct config *asked, const char *where, FILE *notes);

/* A checksum of all values: different configs have different ones, but for chance. */
uint32_t config_crc32(const struct config *c);

/* Prints a config as YAML: the keys that do not have their default, and those that must be given. */
void config_print_yaml(FILE *out, const struct config *c);

#endif
