/*
 * files/config.h - the table of all keys of a config, reading it from YAML and from a Hugging Face config.json, and writing it back.
 */
#ifndef LING_FILES_CONFIG_H
#define LING_FILES_CONFIG_H

#include "files/base.h"

#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <yaml.h>

#define MAX_LR_DROPS 16
#define MAX_SOURCES 64     /* token files of a blend */

/* What a model's memory is for: evaluation, or training, which keeps all activations for the backward pass, or computes those of the
 * attention or of whole layers a second time there. */
enum model_mode { TRAIN_KEEP_ALL, TRAIN_RECOMPUTE_ATTENTION, TRAIN_RECOMPUTE_LAYER, EVALUATE };
enum balance_scope { SCOPE_MICRO_BATCH, SCOPE_SEQUENCE };
enum decay_shape { DECAY_LINEAR, DECAY_COSINE, DECAY_1_SQRT, DECAY_INVERSE_SQRT };

struct model_config {          /* Hugging Face's keys of BailingMoeConfig */
	int hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads;
	int head_dim;                /* never 0 once loaded: missing means hidden_size / num_attention_heads */
	int vocab_size;
	int num_experts, num_experts_per_tok, num_shared_experts, moe_intermediate_size;
	int first_k_dense_replace;   /* this many first layers have one dense SwiGLU of width intermediate_size */
	int intermediate_size;
	int max_position_embeddings;
	bool norm_topk_prob, norm_head, tie_word_embeddings;
	bool use_bias, use_qkv_bias; /* attention.dense and attention.query_key_value */
	double rope_theta, rms_norm_eps, initializer_range;
	struct {                     /* ours: training only */
		double balance_loss_coef, z_loss_coef;
		enum balance_scope balance_loss_scope;
		int warmup_steps;        /* stochastic routing warmup; 0 = none */
	} router;
};

struct data_source {           /* a token file of the config */
	char path[PATH_LEN];
	char dtype[8];               /* of a file of bare ids; else "none" */
	double weight;               /* in the blend; of no meaning for validation */
};

struct config {
	struct model_config model;
	struct {
		struct data_source train[MAX_SOURCES], valid[MAX_SOURCES];
		int num_train, num_valid;  /* num_valid may be 0 */
		int64_t blend_from_step;   /* the step at which a continued run may change its blend; 0 = none */
		char tokenizer[PATH_LEN];  /* "byte", "none", or what tokenizer_open takes */
		int seq_len;
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
	} train;
	struct { double beta1, beta2, eps, weight_decay; } optimizer;
	struct {
		double peak_lr;
		int64_t warmup_steps;
		struct { double at, factor; } drops[MAX_LR_DROPS]; /* lr times factor once `at` of the run's tokens are done */
		int num_drops;
		struct { int64_t steps; enum decay_shape shape; double final_lr; } decay;
	} schedule;
	struct { int64_t every; int keep; } checkpoint; /* every 0 = only at the end */
	struct { int64_t every; int64_t max_windows; } eval; /* every 0 = only at the end; max_windows 0 = all */
	struct { int64_t every; } log;
	struct { int tensor, expert; } parallel; /* ranks that split heads and vocabulary; ranks that split the experts */
};

/* Loads a YAML file, then `key.path=value` overrides, then checks everything. With model_only, sections other than
 * `model` may be missing their required keys. Errors name file:line and the key. */
int config_load(struct config *c, const char *path, int num_overrides, char **overrides, bool model_only);
/* Reads the model section from DIR/config.json of a Hugging Face directory; missing keys take that class's defaults. */
int config_from_huggingface(struct model_config *m, const char *dir);
/* Writes the model as a Hugging Face config.json (BailingMoeForCausalLM). */
int config_to_huggingface(const struct model_config *m, const char *path);
/* Compares the model that DIR/config.json describes, `theirs`, with the one that is to start from DIR's weights. A difference
 * in anything that changes what the model computes fails, naming the key and both values. */
int config_check_init(const struct model_config *theirs, const struct model_config *asked, const char *dir);
/* The same for the same values. */
uint32_t config_crc32(const struct config *c);
/* Prints every key with type, default and meaning. */
void config_print_keys(FILE *out);

enum key_type { T_SECTION, T_LIST, T_INT, T_INT64, T_UINT64, T_DOUBLE, T_BOOL, T_TEXT, T_ENUM,
	T_STRING, T_STRINGS, T_TASKS }; /* of task files */

enum key_flags {
	REQUIRED = 1, /* must be given */
	NEEDED = 2,   /* must be given where its optional section, or its list item, is */
	NONE = 4,     /* `off` is allowed: 0, "", no section, no items */
	FIXED = 8,    /* a continued run must not change it */
	ABOVE = 16,   /* min itself is not allowed */
	BELOW = 32,   /* max itself is not allowed */
	ITEM = 64,    /* belongs to an item of a list */
	FREE = 128,   /* of the model, but changes nothing that it computes */
	DENSE = 256,  /* of the model's dense layers only */
	ROUTED = 512, /* of the model's layers with experts only */
	OR_PATH = 1024, /* a path, or one of the names */
	OF_CHOICE = 2048, OF_PERPLEXITY = 4096, OF_MATCH = 8192, /* of a task of these types only */
};

struct key {
	const char *name;            /* dotted path */
	enum key_type type;
	size_t offset, size;         /* of the field in struct config, or struct task */
	double min, max;
	int flags;
	const char *fallback;        /* default, as a user would write it; NULL is zero */
	const char *help;
	const char *const *names;    /* the values of a T_ENUM, or of a T_TEXT the only values, unless OR_PATH */
	const char *alias;           /* another spelling of the path */
	const char *class_fallback;  /* default of the Hugging Face class where it differs */
	size_t item, count;          /* of a list of at most `max` items: the bytes of one, and where in struct config their number is */
};

#define KEY_OF(structure, path, kind, low, high, marks, standard, meaning, ...) \
	{.name = #path, .type = kind, .offset = offsetof(structure, path), .size = sizeof ((structure *)0)->path, \
	 .min = low, .max = high, .flags = marks, .fallback = standard, .help = meaning, __VA_ARGS__}

#define SECTION(path, marks, meaning) {.name = path, .type = T_SECTION, .flags = marks, .help = meaning}

extern const char *const dtype_names[];

extern const struct key root_key;

/* The last part of a dotted path. */
const char *leaf_of(const char *path);

struct loader;
struct table {
	const struct key *keys;
	int num_keys;
	int (*load_items)(struct loader *l); /* of a T_TASKS: reads its items up to the end of the sequence, which has begun */
};

extern const struct table config_table;

/* NULL when there is no such key. */
const struct key *find_in(const struct table *t, const char *path);

const struct key *find_key(const char *path);

/* What a key's value may be, in words. */
const char *describe(char out[256], const struct key *k);

/* Converts text and stores it in the field of a scalar key, `shift` bytes further for an item of a list. `plain` means
 * without quotes. NULL when done; else what is wrong ("" when the expected type says it all), and nothing is stored. */
const char *store_text(void *structure, const struct key *k, size_t shift, const char *text, bool plain);

/* Sets key k to its default. */
void set_default(void *structure, const struct key *k, bool huggingface);

struct place {               /* where a key was given */
	const char *source;        /* file name or the override's text; NULL: nowhere */
	int line;                  /* or WHOLE_FILE, COMMAND_LINE */
};

enum { MAX_KEYS = 128 };     /* of a table */

struct loader {
	const struct table *table;
	void *structure;           /* that the table describes: c, or a struct task */
	struct config *c;
	const char *path;          /* the file that messages about the whole name */
	bool huggingface;          /* reading a config.json: keys without "model.", unknown ones ignored */
	bool is_model_file;        /* reading the file that a config's `model:` names */
	struct place places[MAX_KEYS];
	char model_path[PATH_LEN]; /* found for `model: FILE`; places point here */
	/* the text that is being read */
	const char *source;
	bool command_line;
	const uint8_t *text;
	size_t size;
	size_t shift;              /* of the list item that is being read */
	yaml_parser_t parser;
	yaml_event_t event;        /* the current one */
};

int fail_at(struct place at, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The place is where the key was given, or else the file. */
int fail_key(const struct loader *l, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Place of the current event. */
struct place here(const struct loader *l);

/* Goes to the next event. What YAML can do and a config does not need is refused here. */
int advance(struct loader *l);

/* Reports a value of the wrong kind at the current event. */
int fail_value(const struct loader *l, const struct key *k, const char *wrong);

/* Reads the keys of a section up to the end of its mapping, which has begun. */
int load_mapping(struct loader *l, const struct key *section);

/* Reads the value of key k from the file l->path. */
int load_file(struct loader *l, const struct key *k);

/* The value of key k as JSON: an object for a section, an array for the list. The caller owns it. */
json_t *key_to_json(const struct config *c, const struct key *k, size_t shift);

/* Every key of a config, in nested objects. The caller owns the result. */
json_t *config_to_json(const struct config *c);

/* Takes the model section of a Hugging Face config that was made from `path`. */
int config_from_json(struct model_config *m, const json_t *root, const char *path);

/* Writes a Hugging Face config.json: the model's keys and the weights' type over what `base`, perhaps the config.json that the model came
 * with, has beside them, which NULL leaves to what the class needs. */
int config_write(const char *path, const struct model_config *m, const char *dtype, const json_t *base);

/* The config as trainer.json holds it: all of a run's, or the model alone where no run has been yet. The caller owns it. */
json_t *run_to_json(const struct config *c);

/* Compares the config that a checkpoint at `where` had with the one asked for. A FIXED key that differs fails; all else
 * that differs, and keys that only one of them knows, are lines in notes; but of a model without a run only the model counts. */
int config_compare(const json_t *saved, const struct config *asked, const char *where, FILE *notes);

#endif
