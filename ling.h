/*
 * ling.h - the map of the house: every shared type and prototype, in reading order.
 *
 *   ling.c      the model, the trainer, the commands
 *   kernels.c   arithmetic on arrays, each operation as a forward/backward pair
 *   parallel.c  ranks and process groups
 *   data.c      everything on disk: YAML, JSON, tokenizers, tokens, checkpoints, conversion, tasks, metrics, pictures
 *
 * ling.c calls the other three; parallel.c may call kernels.c; kernels.c and data.c call no other file.
 *
 * Letters used for sizes, here and in every comment:
 *   B sequences, L tokens a sequence, T = B*L tokens, H hidden_size, V vocab_size,
 *   nh / nkv query / key-value heads, d head_dim, E experts, k experts a token,
 *   I moe_intermediate_size, S shared experts, R = T*k expert rows (one for each token and chosen expert);
 *   where ranks share the work, N of the T tokens and A arriving expert rows, see struct layer_activations.
 * Arrays are row-major; [A, B] has B contiguous. A weight is [out, in] and y = x W^T.
 */
#ifndef LING_H
#define LING_H

#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define LING_VERSION "0.1.0"

/* The type of weights and activations. The program is float32; the tests compile the same source once more in
 * double, where finite differences are exact enough to check every backward pass. */
#ifdef LING_DOUBLE
typedef double real;
#else
typedef float real;
#endif

#define PATH_LEN 1024      /* bytes of a path in a config, terminator included */
#define MAX_LR_DROPS 16
#define MAX_SOURCES 64     /* token files of a blend */
#define MAX_NAME 128       /* bytes of a tensor's name, terminator included */

/* ============================================================================================================
 * Errors (data.c)
 * A function that can fail returns 0, or -1 after it called fail(). What went wrong is kept in error_text: main prints it, once, and tests
 * read it. It names the file, the line or key, what was found and what was expected.
 *
 * The program's mutable globals, all of them: error_text, of which each thread has one; stop_requested, which a signal handler sets; use_openblas in kernels.c, set once at
 * the start; and in parallel.c what this process knows of MPI, of which there is one.
 * ========================================================================================================== */

extern _Thread_local char error_text[4096];
void set_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
static inline int failure(void) { return -1; }
#define fail(...) (set_error(__VA_ARGS__), failure()) /* a macro, so that compilers see the -1 */

/* Makes room for `more` entries behind the `used` ones of an array of the caller, doubling it when full; ends the program when there is no
 * memory. Returns the array, to be freed with free(). */
void *grow(void *array, size_t used, size_t *capacity, size_t more, size_t size);

/* ============================================================================================================
 * Config (data.c). Plain values: a struct config is copied with =, and owns nothing.
 * ========================================================================================================== */

/* What a model's memory is for: evaluation, or training, which keeps all activations for the backward pass, or computes those of the
 * attention or of whole layers a second time there. */
enum purpose { TRAIN_KEEP_ALL, TRAIN_RECOMPUTE_ATTENTION, TRAIN_RECOMPUTE_LAYER, EVALUATE };
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
		enum purpose recompute;
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

/* ============================================================================================================
 * Files (data.c)
 * ========================================================================================================== */

/* -- safetensors -- */

struct array {                 /* one named array of a file; the data belong to the caller */
	const char *name;
	int64_t rows, cols;          /* a vector has cols 0 */
	real *data;
};

struct weights;                /* an open Hugging Face directory or safetensors file: headers checked, data mapped */
/* Opens DIR (KIND.safetensors, or KIND.safetensors.index.json and its shards; kind is "model" or "optimizer") or one .safetensors
 * file. Every header is checked: sizes, dtypes, offsets, overlaps, and, with an index, that every tensor is where it says. The rotary tables that
 * old files hold beside the weights are left out. NULL on error. */
struct weights *weights_open(const char *path, const char *kind);
/* Number of tensors, and the name of tensor i (0 <= i < count). */
int weights_count(const struct weights *w);
const char *weights_name(const struct weights *w, int i);
bool weights_has(const struct weights *w, const char *name);
/* Copies tensor a->name into a->data, converted from F64, F32, BF16, F16; its shape must be a's. Checks its checksum where
 * the file holds one. */
int weights_read(const struct weights *w, const struct array *a);
/* Copies elements first .. first+n-1 (row-major) of a tensor whose whole shape must be [rows, cols] (cols 0: a vector), converted
 * likewise. No checksum: see weights_verify. */
int weights_read_range(const struct weights *w, const char *name, int64_t rows, int64_t cols, int64_t first, int64_t n, real *out);
/* Where elements first .. first+n-1 of such a tensor stand in the file, mapped as long as w is open: *at is NULL if they cannot be used there and must
 * be read: they can if they are bfloat16, or real, and aligned. No checksum either. */
int weights_map(const struct weights *w, const char *name, int64_t rows, int64_t cols, int64_t first, int64_t n, const void **at, bool *bf16);
int64_t weights_bytes(const struct weights *w); /* of all files */
/* Checks tensor i's checksum where the file holds one. */
int weights_verify(const struct weights *w, int i);
/* Copies an integer tensor (I32 or I64) of n elements; for test fixtures. */
int weights_read_int(const struct weights *w, const char *name, int64_t n, int32_t *out);
void weights_close(struct weights *w); /* NULL is fine */

struct weights_writer;         /* a safetensors file (F32; F64 in the double build), written front to back in bounded memory */
/* Creates a file for these arrays, which may be none; arrays[i].data is not used, and nothing of arrays after the call. NULL on error. */
struct weights_writer *weights_create(const char *path, const struct array *arrays, int n);
/* Writes the next elements, in the order of the arrays, in pieces of any size. After an error: weights_abandon. */
int weights_append(struct weights_writer *w, const real *data, int64_t count);
/* All elements must be there. A CRC-32 of each tensor goes into the header's metadata, and the file to disk; on error it is removed. w is
 * gone whatever the result. */
int weights_finish(struct weights_writer *w);
void weights_abandon(struct weights_writer *w); /* removes the file; NULL is fine */
/* Writes arrays as one file by these three. */
int safetensors_write(const char *path, const struct array *arrays, int n);

/* -- checkpoints -- */

struct trainer_state {         /* what a run must remember besides weights and optimizer */
	int64_t step, samples, tokens; /* updates done, sequences and tokens consumed */
	int num_layers;              /* entries of the two arrays below */
	double *router_mean, *router_std; /* per layer, stochastic routing warmup; owned by the caller */
	int num_sources;             /* the token files of the blend, in the order of the config */
	struct source_state {
		int64_t tokens;            /* of the file, and its checksum: what it is known by */
		uint32_t crc32;
		int64_t share;             /* of the samples, out of 2^32 */
		int64_t credit;            /* its share of all samples so far less what it gave, in 2^-32 samples */
		int64_t taken;             /* samples that it gave */
		int order;                 /* of the shuffles: no two files have the same one */
	} sources[MAX_SOURCES];
};

/* OUTPUT_DIR/step-NNNNNNN/ appears whole or not at all, in three steps: one process begins, any number of them write its files, and, once
 * all have finished, one commits or, when any has failed, abandons it.
 * begin: makes the temporary directory and gives its path. Returns 1 when that checkpoint is there already: it is not replaced, and
 * there is nothing to do; 0, or -1. */
int checkpoint_begin(const struct config *c, const struct trainer_state *s, char dir[PATH_LEN]);
/* The path of part `part` (from 0) of `parts`: DIR/model.safetensors when parts is 1, else such as DIR/model-00001-of-00004.safetensors. Kind
 * "model" holds Hugging Face names, "optimizer" exp_avg.NAME and exp_avg_sq.NAME. Every tensor is in one part; a part may have none. */
void checkpoint_file(char path[PATH_LEN], const char *dir, const char *kind, int part, int parts);
/* commit: checks that all parts are there with sound headers and no tensor twice, adds config.json, trainer.json and, for several parts, the
 * two indexes, brings all to disk, renames the directory, and removes all but the `keep` newest checkpoints (0 = keep all). On error dir
 * is removed. */
int checkpoint_commit(const struct config *c, const struct trainer_state *s, const char *dir, int parts);
void checkpoint_abandon(const char *dir);
/* Finds the newest checkpoint of output_dir: 1 and its path, 0 when there is none, -1 on error; a newest one that is not
 * whole is an error. Removes temporaries. */
int checkpoint_find(const char *output_dir, char path[PATH_LEN]);
/* Reads trainer.json's state; num_layers must be set and must match. First compares the config that the run had with the one
 * asked for: a difference that would make the continued run another run (model shape, seed, data order) fails, naming the key
 * and both values; any other, and a key that only one of them has, is written as a line to `notes`. */
int checkpoint_read_state(const char *dir, const struct config *asked, struct trainer_state *s, FILE *notes);

/* -- tokenizers -- */

struct ids {                   /* a growing list of token ids; free(id) */
	int32_t *id;
	int64_t count;
	size_t capacity;
};
void put_id(struct ids *out, int32_t id); /* appends one */

struct tokenizer;              /* read-only once open: shared by all threads */
/* Opens `name`: "byte", a Hugging Face tokenizer.json of byte-level BPE, or a directory that holds one. What of it is not supported, or would give
 * other ids than Hugging Face's, is an error that names it. NULL on error. */
struct tokenizer *tokenizer_open(const char *name);
void tokenizer_close(struct tokenizer *t); /* NULL is fine */
/* Ids are beneath it. */
int tokenizer_size(const struct tokenizer *t);
/* Of everything that ids depend on; stands in the manifests of token files. */
uint32_t tokenizer_hash(const struct tokenizer *t);
/* The id that ends a document or a reply (the byte tokenizer's 256, else <|endoftext|> or what else the file names so), or -1. */
int32_t tokenizer_end(const struct tokenizer *t);
/* The id of a token by its text, such as <role>; -1 when there is none. */
int32_t tokenizer_id(const struct tokenizer *t, const char *token);
/* Appends the text of an id, byte for byte, to a growing text; a special token's too if `special`. An id outside the vocabulary gives nothing. */
struct text { char *data; size_t size, capacity; }; /* free(data); always ends with a 0 beyond size */
void tokenizer_decode(const struct tokenizer *t, int32_t id, bool special, struct text *out);
/* Bytes of the text that an id stands for, 0 for a special token. */
int tokenizer_bytes(const struct tokenizer *t, int32_t id);
void text_append(struct text *out, const char *bytes, size_t n);

struct strings { char **text; int64_t count; bool list; }; /* list: written as one */

struct encoder;                /* the work space of one thread; the tokenizer must outlive it */
struct encoder *encoder_open(const struct tokenizer *t);
void encoder_close(struct encoder *e); /* NULL is fine */
/* Appends the ids of n bytes of text, which may hold anything. With `special`, the text of a special token in it becomes that token; else it is
 * ordinary text. (Added tokens that are not special are always found.) Ids are those of Hugging Face's encode(text, add_special_tokens=False): the
 * file's post_processor, truncation and padding play no part. Of bytes that are not UTF-8 a longest run is a word of its own, and what is between is
 * encoded as if it were alone. Decoding gives back every byte, unless the tokenizer drops some (NFC, Split with Removed, lstrip, rstrip). */
int encode(struct encoder *e, const char *text, size_t n, bool special, struct ids *out);

struct message { const char *role, *content; size_t content_size; }; /* role: system, user, human, assistant or tool, in any case */
/* Appends the ids of a conversation in Ling's chat form; with `reply`, also the opening of the assistant's reply. With `learned` (or NULL) one
 * byte an id: 1 where the loss counts, which is in the assistant's replies and the end token behind the last one. */
int chat_encode(struct encoder *e, const struct message *messages, int n, bool reply, struct ids *out, struct text *learned);

/* The tokenizer of a model's directory: by name, if one is given; else DIR/tokenizer.json; else what DIR/trainer.json says of data.tokenizer. */
struct tokenizer *tokenizer_of_model(const char *dir, const char *name);
/* Appends the ids of a prompt; with `chat` it is a user's message, and the opening of the reply follows. Never none: an empty text is a
 * document's beginning, the end token of the one before. */
int prompt_encode(struct encoder *e, const char *text, size_t n, bool chat, struct ids *out);
/* Reads prompts: a text file has one on each line that is not empty; a .jsonl file's lines have a `prompt`, or the `messages` of a conversation.
 * (*out)[n]: free each id, and *out. */
int prompts_read(const char *path, const struct tokenizer *t, bool chat, struct ids **out, int *n);
/* Writes text as a JSON string; each byte that is no UTF-8 becomes U+FFFD. */
void json_write_text(FILE *f, const char *text, size_t n);
/* How much of a text that goes on is whole: n less the bytes at the end that may be the beginning of a character. */
size_t utf8_whole(const char *text, size_t n);

/* -- token files -- */

struct file_map { const uint8_t *data; size_t size; };
struct tokens {                /* a token file, mapped */
	char path[PATH_LEN];         /* of the ids */
	int format;                  /* Megatron's indexed dataset, llm.c's .bin, or bare ids */
	int dtype;                   /* Megatron's code of the ids' type, or 9: uint32 */
	int64_t count;               /* tokens */
	int64_t documents;           /* of an indexed dataset, else -1 */
	const uint8_t *ids, *learned; /* learned [count]: 0 where the loss does not count; NULL: it counts everywhere */
	char tokenizer[PATH_LEN];    /* from the manifest; "" when it does not tell */
	uint32_t tokenizer_hash;     /* where it tells */
	uint32_t crc32;              /* of the ids, with the loss mask behind them */
	int vocab_size;              /* ids are beneath it */
	int32_t document_token;      /* see tokens_documents; -1 once opened */
	struct file_map bin, idx, mask;
};
/* Opens PREFIX of an indexed dataset (PREFIX.bin, PREFIX.idx), an llm.c .bin file or, with another dtype than "none", a file of bare ids. Everything
 * is checked, every id against vocab_size included, unless a manifest vouches for the files as they are; where none does and the folder
 * can be written to, one is left. On error *t is empty. */
int tokens_open(struct tokens *t, const char *path, const char *dtype, int vocab_size);
/* Copies tokens [start, start+n); the range must lie within the file. An id outside the vocabulary is an error here too: files can change. */
int tokens_read(const struct tokens *t, int64_t start, int64_t n, int32_t *out);
/* Of the targets of tokens [start, start+n), which are tokens [start+1, start+1+n): makes those -1 that the loss mask leaves out. */
void tokens_mask(const struct tokens *t, int64_t start, int64_t n, int32_t *target);
/* Where the document of each of tokens [start, start+n) begins, counted from start; 0 if before. Where the next token is of another document, the
 * target becomes -1, unless it is a separator. Documents are those of the index. Without one they are told by document_token, which must be
 * set: it begins a document of an llm.c file, and ends one of a file of bare ids, for so they are made. */
int tokens_documents(const struct tokens *t, int64_t start, int64_t n, int32_t *document, int32_t *target);
void tokens_close(struct tokens *t);
struct tokenized { int64_t documents, tokens, bytes, learned; }; /* learned: tokens that the loss counts */
/* Turns text and JSONL files into PREFIX.bin, .idx and .json, with all processors and in bounded memory: a text file may be of any size. With `special`,
 * as Hugging Face does, the text of a special token becomes that token, but not in messages: a user's words cannot pass for a role.
 * A text file is one document; so is a .jsonl line, which has a `text`, the `messages` of a conversation ([{"role": ..., "content": ...}]), or a
 * `prompt` and its `completion`. Of the latter two only the assistant's replies are learned: PREFIX.mask.bin tells. A PREFIX.json that is no
 * manifest is not replaced. Shows progress on stderr. */
int tokenize_files(const char *prefix, const char *tokenizer, bool special, int num_files, char **files, struct tokenized *result);
/* Writes the text of a token file, special tokens included; tokenizer NULL: the one that made it, by its name. */
int tokens_print(const char *prefix, const char *tokenizer, FILE *out);

/* -- training a tokenizer -- */

struct tokenizer_training {
	int vocab_size;              /* with the special tokens */
	const char *pattern;         /* cuts text into words, in the dialect of a tokenizer.json; NULL: Ling's */
	const char **special;        /* tokens beside <|endoftext|>, <role> and </role> */
	int num_special;
	int num_files;
	char **files;                /* text, and JSON lines as tokenize_files reads them */
};
struct tokenizer_trained { int vocab_size; int64_t bytes, words, merges; }; /* words: distinct ones; vocab_size is less than asked for when no pairs are left */
/* Trains a byte-level BPE as Hugging Face's BpeTrainer does: again and again the pair with the highest count is merged, of equals the one of smaller
 * ids. Writes it as a tokenizer.json. The result is the same for any number of processors. Text is taken in pieces of about 256 KiB that end with a
 * line. Memory is that of the distinct words. */
int tokenizer_train(const char *path, const struct tokenizer_training *how, struct tokenizer_trained *result);

/* -- tasks: what `ling eval --tasks` asks a model, and what came of it -- */

enum task_type { TASK_MULTIPLE_CHOICE, TASK_PERPLEXITY, TASK_EXACT_MATCH };
enum answer_form { ANSWER_INDEX, ANSWER_NUMBER, ANSWER_LETTER, ANSWER_TEXT };
enum which_match { MATCH_FIRST, MATCH_LAST };

struct sample {                /* one line of a JSONL file, in the words of its task's templates */
	int64_t line;
	struct text prompt;          /* perplexity: the document */
	struct text target;          /* what follows the prompt where the sample is an example; perplexity: none */
	struct text *choice;         /* [num_choices] the options; exact match: the answers that are right */
	int num_choices, answer;     /* the right option */
};
struct samples { struct sample *sample; int64_t count; size_t capacity; };

struct task {                  /* the keys of a task file (see task_keys in data.c), what is off is NULL or 0; and the samples */
	char name[MAX_NAME];
	enum task_type type;
	char data[PATH_LEN];
	int64_t limit;
	char *prompt, *text, *option, *target, *separator;
	struct strings options, stop;
	char *answer, *extract, *extract_answer;
	enum answer_form answer_form;
	enum which_match match;
	struct { bool strip, lowercase, punctuation; } normalize;
	struct { int count; char data[PATH_LEN]; uint64_t seed; } examples;
	bool chat;
	int max_tokens;
	int64_t stride;
	struct samples samples;      /* of `data`; the first num_samples are scored */
	int64_t num_samples;
	struct samples pool;         /* of examples.data; empty when the examples are from samples */
};
struct tasks { struct task *task; int64_t count; size_t capacity; };

/* Reads a task file and the samples of all its tasks. Errors name the file, the line and the key or field. tasks_free in any case. */
int tasks_load(struct tasks *t, const char *path);
void tasks_free(struct tasks *t);
/* Prints every key of a task file with default and meaning. */
void tasks_print_keys(FILE *out);
/* Whether a reply is right: what is extracted from it and made plain is equal to one of the answers made plain. `extracted` gets that text, and
 * is left empty, with *found false, where the pattern does not match. */
bool task_reply_is_right(const struct task *t, const struct sample *s, const struct text *reply, struct text *extracted, bool *found);

enum { ACCURACY_RAW, ACCURACY_BYTES, ACCURACY_TOKENS, NUM_ACCURACIES };

struct scored_text { double log_likelihood; const int32_t *token; int64_t num_tokens; }; /* the tokens that it is the sum over */

struct sample_result {
	const struct sample *sample;
	bool cut;                    /* the context did not fit into the window */
	const struct scored_text *text; /* [num_choices] the options; perplexity: the document; exact match: the reply, which has no likelihood */
	int prediction[NUM_ACCURACIES]; /* by log-likelihood, over bytes, over tokens */
	int64_t words;               /* of the document */
	struct text reply, extracted;
	bool found, correct;         /* exact match */
};

struct score { const char *name; double value, standard_error; }; /* NaN: cannot be told from one sample */
enum { MAX_SCORES = 4 };

struct task_result {
	const struct task *task;
	int num_scores;
	struct score score[MAX_SCORES];
	int64_t cut;                 /* samples whose context was cut; perplexity: documents in several windows */
	int64_t ties[NUM_ACCURACIES], unmatched;
	int64_t tokens, words, bytes; /* perplexity: of all documents */
};

/* DIR/samples.jsonl and DIR/results.json appear when both are whole. NULL on error. */
struct results *results_open(const char *dir);
void results_add(struct results *r, const struct task *t, const struct sample_result *s);
struct evaluation_facts { const char *model, *tasks; uint32_t tokenizer_hash; int64_t seq_len; };
/* r is gone whatever the result; with failed, so are the files. */
int results_finish(struct results *r, const struct evaluation_facts *facts, const struct task_result *result, int64_t count, bool failed);
/* The text of results.json; the caller frees it. */
char *results_text(const struct evaluation_facts *facts, const struct task_result *result, int64_t count);

/* -- conversion -- */

struct source;                 /* a model on disk: a Hugging Face directory, a checkpoint, or a GGUF file in float32, bfloat16 or float16 */
/* Opens it, checks every header and, of a checkpoint, the files' checksums, and gives its config. NULL on error. */
struct source *source_open(const char *path, struct model_config *config);
void source_close(struct source *s); /* NULL is fine */

enum model_format { FORMAT_HUGGINGFACE, FORMAT_CHECKPOINT, FORMAT_GGUF };
struct conversion {
	const char *path;            /* of what is made; nothing may be there. A checkpoint is RUN/step-0000000 */
	enum model_format format;
	const char *dtype;           /* "f32", "bf16" or "f16"; NULL: as each tensor is, of a checkpoint f32 */
	int64_t max_shard_size;      /* bytes; of a Hugging Face directory */
	bool fold_norm_head;         /* divide lm_head by its columns' norms, and set norm_head to false; GGUF is always folded */
	bool no_tokenizer;
};
struct converted { int64_t tensors, bytes; };
/* Converts a model in bounded memory. params: the names and shapes of its parameters as Hugging Face has them, the embedding first, lm_head.weight
 * among them even if it is tied. Every tensor of the source is carried over, or refused by name before anything is written; what is
 * made appears when it is whole and on disk. Numbers are rounded to nearest, ties to even; one that becomes infinite is an error. Shows
 * progress on stderr. */
int convert_model(const struct source *s, const struct array *params, int n, const struct conversion *to, struct converted *result);

/* -- metrics -- */

struct metrics {               /* one step; a non-finite number is written as null and named in "nonfinite" */
	int64_t step, samples, tokens;
	int batch;
	double loss, balance_loss, z_loss, lr, grad_norm, seconds, tokens_per_second;
	int num_layers;              /* layers with experts */
	double *expert_load;         /* [num_layers] largest expert's share over the mean share */
	bool has_valid_loss;
	double valid_loss;
	int num_kinds;               /* of what rank 0 sent in the step, 0 when it is alone; not read back */
	const char *const *kinds;
	const int64_t *bytes_sent;
	int num_sources;             /* of a blend, else 0; not read back */
	const int64_t *source_samples; /* samples so far from each */
};
/* Opens OUTPUT_DIR/metrics.jsonl for appending after `step`: lines of later steps and a torn last line are removed. A file
 * that ends before `step`, unless it is empty, or that metrics_read would not read, is an error. */
FILE *metrics_open(const char *output_dir, int64_t step);
int metrics_write(FILE *f, const struct metrics *m);
/* Brings the lines to disk: call it before a checkpoint, so that no checkpoint is ahead of its metrics. */
int metrics_sync(FILE *f);
/* Reads all of RUN_DIR/metrics.jsonl; nulls become NaN. *out is one block, expert_load included: free(*out). */
int metrics_read(const char *run_dir, struct metrics **out, int *count);

/* Draws RUN_DIR's metrics as a PNG: training and validation loss, learning rate and batch size, expert load by layer. A
 * device, a pipe or a link as png_path stays one. */
int plot_run(const char *run_dir, const char *png_path);

/* CRC-32 of a whole file. */
int file_crc32(const char *path, uint32_t *crc);
/* Creates DIR and its parents, on disk when it returns. */
int make_directories(const char *dir);

/* ============================================================================================================
 * Kernels (kernels.c)
 * No array may overlap another unless the comment says "in place". `accumulate`: add to the output instead of writing it.
 * ========================================================================================================== */

/* Call once, before any other kernel. `openblas`: the library computes the matrix products instead of ling's own kernel, as a second
 * opinion on a doubtful number, or where it is the faster; but for those whose rows come by a list, or from a bfloat16 file. */
void kernels_init(bool openblas);
int kernels_threads(void); /* threads that a kernel uses */

/* -- plain arrays -- */
double sum_of_squares(const real *x, int64_t n);
void copy_array(real *out, const real *in, int64_t n);
/* out[t, j] = x[t, j] * scale[j]; out may be x. */
void scale_columns(real *out, const real *x, const real *scale, int64_t T, int64_t N);
/* Elements of the `scratch` that bias_backward and rmsnorm_backward need for rows of N. */
int64_t row_sum_scratch(int64_t N);

/* A weight [N, K] where it lies: reals; or bfloat16, as a mapped file may have it. If `second` is not NULL, the second half of its rows
 * stands there: gate and up are two tensors of a file and one product. */
struct weight { const void *data, *second; bool bf16; };
/* out[g] is matrix g of G in memory, each of `size` elements, one behind the other from w on. */
void stack_weights(struct weight *out, const real *w, int G, int64_t size);

/* -- matrix products: y [T, N] = x [T, K] w^T, w [N, K]; bias [N] or NULL -- */
void matmul_forward(real *y, const real *x, const struct weight *w, const real *bias, int64_t T, int64_t K, int64_t N, bool accumulate);
void matmul_backward_input(real *dx, const real *dy, const real *w, int64_t T, int64_t K, int64_t N, bool accumulate);
void matmul_backward_weight(real *dw, const real *dy, const real *x, int64_t T, int64_t K, int64_t N, bool accumulate);
void bias_backward(real *dbias, const real *dy, int64_t T, int64_t N, bool accumulate, real *scratch);
/* The same for G weights w[G], in memory w [G, N, K]: rows offset[g] .. offset[g+1]-1 belong to group g, which may be empty. With a list `row` [R] row r of
 * that operand is its row[r]: a gather without a copy. */
void grouped_matmul_forward(real *y, const real *x, const int32_t *row, const struct weight *w, const int64_t *offset, int G, int64_t K,
		int64_t N, bool accumulate);
void grouped_matmul_backward_input(real *dx, const real *dy, const int32_t *row, const real *w, const int64_t *offset, int G, int64_t K,
		int64_t N, bool accumulate);
void grouped_matmul_backward_weight(real *dw, const real *dy, const int32_t *dy_row, const real *x, const int32_t *x_row,
		const int64_t *offset, int G, int64_t K, int64_t N, bool accumulate);

/* -- embedding: out [T, H] = w[token[t] - first], w [V, H] the part of the vocabulary from `first` on; 0 for a token of another part -- */
void embedding_forward(real *out, const int32_t *token, const struct weight *w, int64_t first, int64_t T, int64_t H, int64_t V);
void embedding_backward(real *dw, const int32_t *token, const real *dout, int64_t first, int64_t T, int64_t H, int64_t V, bool accumulate);

/* -- RMSNorm: out, x [T, H], w [H], rstd [T] = 1/sqrt(mean(x^2) + eps). The backward pass ADDS to dx: the residual stream's
 *    own gradient is there already. -- */
void rmsnorm_forward(real *out, real *rstd, const real *x, const real *w, int64_t T, int64_t H, double eps);
void rmsnorm_backward(real *dx, real *dw, const real *dout, const real *x, const real *w, const real *rstd, int64_t T, int64_t H,
		bool accumulate, real *scratch);

/* -- rotary embedding, in place on qkv [T, (nh + 2 nkv) d]; table [L, d]: d/2 cosines, then d/2 sines, of each position. `document` [T], here and
 *    for attention: where in its sequence the document of each token begins, from which positions count and beyond which attention does not
 *    reach; NULL: all of a sequence is one -- */
void rope_table(real *table, int64_t L, int64_t d, double theta);
void rope_forward(real *qkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv, int64_t d);
void rope_backward(real *dqkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv, int64_t d);

/* -- causal attention: qkv [B*L, (nh + 2 nkv) d] = query heads, key heads, value heads; out [B*L, nh d]; lse [B*L, nh] -- */
int64_t attention_scratch(int64_t d); /* elements of `scratch` */
void attention_forward(real *out, real *lse, const real *qkv, const int32_t *document, int64_t B, int64_t L, int nh, int nkv, int64_t d,
		real *scratch);
void attention_backward(real *dqkv, const real *dout, const real *out, const real *lse, const real *qkv, const int32_t *document, int64_t B,
		int64_t L, int nh, int nkv, int64_t d, real *scratch);

/* Generation: a sequence that remembers its keys and values, kv [layers, capacity, 2 nkv d] after RoPE, of `length` tokens so far; and its next
 * tokens. To take tokens back, lower length. */
struct cache { real *kv; int64_t length, capacity; };
struct segment { struct cache *cache; const int32_t *token; int64_t num_tokens; };
/* The same for the next tokens of n sequences, whose rows stand one segment behind the other in qkv and out; their keys and values are in
 * the caches already, from position `length` on. The bits are those of the forward pass over the whole sequence. */
void attention_extend(real *out, const real *qkv, const struct segment *segments, int n, int layer, int nh, int nkv, int64_t d, real *scratch);

/* -- SwiGLU and the product before it, in groups of rows as above: gate_up [R, 2I] = gate, up = x w^T, w[G] of [2I, H];
 *    act [R, I] = weight[r] silu(gate) up; weight [R], or NULL for 1. The backward pass begins with the product behind it: dout are the gradients
 *    of that product's outputs without the weight, w_down [G, H, I]. It also gives act again (it is not kept from the forward pass) and
 *    dweight [R] (or NULL). A list `row` is that of x, or of dout. -- */
void swiglu_forward(real *act, real *gate_up, const real *x, const int32_t *row, const struct weight *w, const real *weight,
		const int64_t *offset, int G, int64_t H, int64_t I);
void swiglu_backward(real *dgate_up, real *act, real *dweight, const real *dout, const int32_t *row, const real *w_down, const real *gate_up,
		const real *weight, const int64_t *offset, int G, int64_t H, int64_t I);

/* -- random numbers: a value depends on (seed, purpose, step, position) alone -- */
enum { RANDOM_INIT = 1 << 16, RANDOM_SHUFFLE = 2 << 16, RANDOM_ROUTING = 3 << 16, RANDOM_SAMPLING = 4 << 16,
	RANDOM_EXAMPLES = 5 << 16 }; /* the low 16 bits: a layer, say */
struct random_stream {
	uint64_t seed;
	uint32_t purpose, step;
	uint64_t first;              /* added to every position */
};
void philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2]);
/* out[i] is the value at position + i: standard normal, or uniform in (0, 1). */
void random_normal(real *out, int64_t n, const struct random_stream *s, uint64_t position);
void random_uniform(real *out, int64_t n, const struct random_stream *s, uint64_t position);
/* The image of i under a random permutation of [0, n), without a table. */
uint64_t random_permute(uint64_t i, uint64_t n, const struct random_stream *s);

/* -- router: logits s [T, E] -> probabilities p [T, E] -> index, weight [T, k] -- */
/* p = softmax(s) by row; lse [T] its log-sum-exp, or NULL. p may be s. */
void softmax_forward(real *p, real *lse, const real *s, int64_t T, int64_t E);
/* Stochastic routing warmup: s_hat = alpha s + (1 - alpha) (mean + std eps), eps standard normal at position t*E + e. */
void routing_noise_forward(real *s_hat, const real *s, double alpha, double mean, double std, const struct random_stream *noise,
		int64_t T, int64_t E);
/* The k largest of each row, in falling order, the lower index first among equals; weight is p, over the winners' sum if
 * renormalise. The backward pass gives the gradient with respect to the logits behind p. */
void topk_forward(int32_t *index, real *weight, const real *p, int64_t T, int64_t E, int k, bool renormalise);
void topk_backward(real *ds, const real *dweight, const int32_t *index, const real *weight, const real *p, int64_t T, int64_t E,
		int k, bool renormalise);
/* Sums over T tokens from token `first` of a micro-batch [B, L] on, for each of its sequences: count [B, E] assignments, p_sum [B, E]
 * probabilities, and sums[B]. */
struct router_sums { double s, s_squared, z; }; /* of the logits, their squares, and lse^2 */
void router_statistics(struct router_sums *sums, double *count, double *p_sum, const real *s, const real *p, const real *lse,
		const int32_t *index, int64_t first, int64_t T, int64_t B, int64_t L, int64_t E, int k);
/* Adds to ds the gradient of  balance_scale * sum_e factor[b, e] p_e + z_scale * lse^2  of each of these tokens, b its sequence; factor
 * [B, E]. */
void router_loss_backward(real *ds, const real *p, const real *lse, const real *factor, int64_t first, int64_t T, int64_t L, int64_t E,
		double balance_scale, double z_scale);

/* -- token dispatch: R = T*k rows, sorted by expert; index [T, k] -- */
/* offset [E + 1]: where each expert's rows start; position [R]: the row of assignment i = t*k + j; token [R]: the token of each row. */
void dispatch_plan(int64_t *offset, int32_t *position, int32_t *token, const int32_t *index, int64_t R, int k, int E);
/* rows [R, H] = x[token[r]]; and its transpose y [T, H] = the sum of a token's k rows. Each is the other's backward. */
void gather_rows(real *rows, const real *x, const int32_t *token, int64_t R, int64_t H);
void combine_rows(real *y, const real *rows, const int32_t *position, int64_t T, int k, int64_t H, bool accumulate);
/* Rows arrive rank by rank, each rank's sorted by expert, count [ranks, experts]: offset [experts + 1] and row [R] sort them by expert. */
void arrival_plan(int64_t *offset, int32_t *row, const int64_t *count, int ranks, int experts);
/* out[row[r]] = rows[r]: back to the order of arrival, or any list that names each row once. */
void scatter_rows(real *out, const real *rows, const int32_t *row, int64_t R, int64_t H);
/* out[position[i]] = in[i]: the routing weights in row order, and back. */
void permute_forward(real *out, const real *in, const int32_t *position, int64_t R);
void permute_backward(real *din, const real *dout, const int32_t *position, int64_t R);

/* -- head -- */
/* sum [H] = the sum over v of w[v, j]^2, w [V, H]. */
void column_sum_of_squares(double *sum, const struct weight *w, int64_t V, int64_t H);
/* Cross-entropy over a vocabulary of which V entries from `first` on are here, logits [T, V]. With max [T] the largest of all logits, loss =
 * sum over the parts of loss[t], plus log of the sum over the parts of sum[t], in nats; a target < 0 is ignored: 0 and 0.
 * In place, logits become e^(logit - max). */
void logits_max(real *max, const real *logits, int64_t T, int64_t V);
void cross_entropy_forward(double *loss, double *sum, real *logits, const real *max, const int32_t *target, int64_t first, int64_t T,
		int64_t V);
/* In place, from what the forward pass left, with the whole vocabulary's sum: scale * (softmax - onehot(target)); ignored rows become 0. */
void cross_entropy_backward(real *dlogits, const double *sum, const int32_t *target, int64_t first, double scale, int64_t T, int64_t V);

/* -- optimizer -- */
struct adamw {
	double lr, beta1, beta2, eps, weight_decay;
	double grad_scale;           /* the gradient is multiplied by this first: the clip */
	int64_t step;                /* updates done, this one included */
};
void adamw_update(real *w, real *exp_avg, real *exp_avg_sq, const real *grad, int64_t n, const struct adamw *o);

/* -- the machine -- */
const char *blas_core(void);   /* the kernel that the library chose, such as "Haswell" */
/* The best kernel this processor can run if the library chose a lesser one (an old release does not know a new processor), else
 * NULL. It takes effect through OPENBLAS_CORETYPE, which the library reads only while it is loaded. */
const char *blas_better_core(void);
/* Seconds of the fastest of `repeats` products of n x n matrices with the library's own threads; with all of them, the roof that
 * training is measured against. a, b, c [n, n]. */
double blas_roof(real *a, real *b, real *c, int64_t n, int repeats, int threads);
/* Error of the products, OpenBLAS's or ling's own, against plain loops, relative, by norm, the worst of the three forms that training uses.
 * Some builds of the library compute wrong products on newer processors. */
double product_error(bool openblas);
/* Bytes a second of the fastest of some copies by all threads, reads and writes counted. */
double memory_bandwidth(real *out, const real *in, int64_t n);
const char *cpu_features(char out[256]); /* those that decide which kernels can run */

/* -- self-check: each operation beside its plain form, loops in double straight from the formula -- */
struct check {
	const char *operation;
	bool has_backward;
	double forward, backward;    /* relative errors, by norm: the worst of several sizes and gradients */
};
/* Rounding gives errors of up to about 1e-6 in float, and in double of 1e-9, the central differences' own: what is beyond ten times that is wrong. */
#define CHECK_BOUND (sizeof(real) == 4 ? 1e-5 : 1e-8)
enum { MAX_CHECKS = 16 };
int self_check(struct check checks[MAX_CHECKS], double *scratch); /* returns their number */
int64_t self_check_scratch(void); /* doubles of `scratch` */

/* ============================================================================================================
 * Ranks (parallel.c)
 * World = data x tensor: rank = data index * tensor + tensor index. Experts are split over `expert` neighbouring ranks, whatever their
 * data and tensor indices, and the groups of neighbours hold copies of all experts. Without a launcher the world is one rank.
 * ========================================================================================================== */

struct group { int rank, size, comm; }; /* comm: MPI's handle */
struct layout {
	struct group world;
	struct group data;           /* ranks with the same part of heads and vocabulary, which split the batch */
	struct group tensor;         /* ranks that split heads, vocabulary and, between them, the tokens of a micro-batch */
	struct group expert;         /* ranks that split the experts */
	struct group copies;         /* ranks with the same experts */
};

/* What the ranks of a group exchange something for: a collective's name, and the account on which the bytes go that this rank sends. */
enum traffic {
	TRAFFIC_GATHER, TRAFFIC_SUM, /* of tokens, over the tensor group: slices, and shares of a sum */
	TRAFFIC_PLAN, TRAFFIC_DISPATCH, TRAFFIC_RETURN, /* expert rows: how many there will be, on their way, and back; forward and backward */
	TRAFFIC_GRADIENTS, TRAFFIC_WEIGHTS,
	TRAFFIC_HEAD,                /* the sums of a split vocabulary */
	TRAFFIC_STATISTICS,          /* counts of the router, losses, norms */
	NUM_TRAFFIC
};
extern const char *const traffic_names[NUM_TRAFFIC];

/* Starts MPI if a launcher started this process; parallel_stop(0) ends it, any other status ends all ranks at once. */
void parallel_start(void);
void parallel_stop(int status);
int parallel_rank(void); /* before the start, what the launcher says */
int parallel_size(void);
int parallel_local_ranks(void); /* on this machine */
const char *parallel_host(void); /* the name of this rank's machine */
double parallel_seconds(void); /* spent in communication so far */
/* Bytes that this rank has sent so far. A block that several ranks get counts once for each, whatever way MPI takes. */
void parallel_bytes(int64_t bytes[NUM_TRAFFIC]);
/* The ranks on this machine, their threads, and the cores they may run on. On all ranks together. `first` says whether this rank is the
 * first of all that have more threads than cores. */
struct crowd { int ranks, threads, cores; bool first; };
struct crowd parallel_crowd(int threads);
/* On all ranks together: -1 on every one if one of them brings -1, and error_text then names the first such rank. */
int parallel_agree(int rc);
/* On all ranks together: fails on those whose value is not rank 0's, and then on all. `what` names it. */
int parallel_same(uint64_t value, const char *what);
/* Whether every rank comes here within a second: then one message will do for all. */
bool parallel_all_failed(void);

/* Refuses a layout that does not fit the model, naming the values that would. */
int layout_check(const struct model_config *c, int ranks, int tensor, int expert);
/* The groups of a rank, not yet connected: enough to plan with. */
struct layout layout_of_rank(int rank, int ranks, int tensor, int expert);
void layout_connect(struct layout *l);
/* n elements in `parts` contiguous slices: where slice i begins. */
int64_t slice_begin(int64_t n, int i, int parts);
/* A rank's part of a global batch: the batch is cut into micro-batches in order, the last one short, and these are dealt out in turn, so
 * that every layout has the same ones. Micro-batch i of a rank begins with sequence first + i * step; beyond the batch it is empty. */
struct share { int64_t num_micro_batches, first, step; };
struct share deal_batch(const struct group *data, int64_t batch, int micro_batch);

/* All ranks of the group call these together. Rows are `width` reals; rank r's slice of `rows` rows begins at slice_begin(rows, r, size). */
/* The sum, or the largest, of x over the ranks, in place on every one. */
void group_sum(const struct group *g, enum traffic kind, double *x, int64_t n);
void group_max(const struct group *g, enum traffic kind, real *x, int64_t n);
/* out [rows, width] from every rank's slice, which may stand in its place in out already. A group of one leaves out as it is. */
void group_gather(const struct group *g, enum traffic kind, real *out, const real *in, int64_t rows, int64_t width);
/* out = this rank's slice of the sum over the ranks of in [rows, width]: out may be the slice of `in`. scratch [scatter_scratch()].
 * Between start and finish, `in` must not change; scatter_progress may be called. */
struct scatter { struct group group; enum traffic kind; const real *in; int64_t rows, width; real *scratch; void *requests; int num_requests; };
int64_t scatter_scratch(const struct group *g, int64_t rows, int64_t width);
void group_scatter_sum(const struct group *g, enum traffic kind, real *out, bool accumulate, const real *in, int64_t rows, int64_t width,
		real *scratch);
void group_scatter_start(struct scatter *s, const struct group *g, enum traffic kind, const real *in, int64_t rows, int64_t width,
		real *scratch);
void scatter_progress(struct scatter *s);
void group_scatter_finish(struct scatter *s, real *out, bool accumulate);
/* out [size, n]: what each rank has for this one in its own `in` [size, n]. */
void group_transpose(const struct group *g, enum traffic kind, int64_t *out, const int64_t *in, int n);
/* Sends send[r] rows of `in` to each rank r and takes receive[r] rows from it into out, both in rank order. Until it is finished, `in` must not
 * change nor out be read. */
struct exchange { void *request; int *counts, type; enum traffic kind; };
void group_exchange_start(struct exchange *e, const struct group *g, enum traffic kind, real *out, const int64_t *receive, const real *in,
		const int64_t *send, int64_t width);
void exchange_progress(struct exchange *e);
void group_exchange_finish(struct exchange *e);
/* One message; a received one may come from any rank, and takes up to `bytes`. */
void group_send(const struct group *g, int to, int tag, const void *x, int64_t bytes);
void group_receive(const struct group *g, int tag, void *x, int64_t bytes);
/* The rank with the largest value. */
int group_slowest(const struct group *g, double seconds);
/* Rank 0's bytes to all. */
void group_broadcast(const struct group *g, void *x, int64_t bytes);

/* ============================================================================================================
 * The model (ling.c)
 * V, nh and nkv in the shapes below are this rank's part (model.config), and gate_up and down hold its num_experts. All ranks call these
 * together, in the same order: model_load, model_randomize, model_update_head_scale, model_forward, model_loss, model_backward, evaluate and
 * the trainer's functions but for trainer_next_batch and trainer_free.
 * ========================================================================================================== */

/* Parameters: one block of memory, named piece by piece in a table, and pointers into it. Gradients have the same form. */
enum init { INIT_ONES, INIT_ZEROS, INIT_NORMAL, INIT_ROUTER };

/* Which ranks hold the same elements, and add up their gradients: all, those of a data group, or those with the same experts. */
enum sharing { SHARED_BY_WORLD, SHARED_BY_DATA, SHARED_BY_COPIES };

struct tensor {                /* a parameter as Hugging Face names it, and the part of it that this rank holds */
	char name[MAX_NAME];
	int64_t rows, cols;          /* of the whole; a vector has cols 0; vectors (norms, biases) have no weight decay */
	struct extent { int64_t row[3], num_rows[3], col, num_cols; } extent; /* up to three ranges of rows, one behind the other, and one of columns */
	int64_t offset;              /* its first element in the block */
	int bucket;                  /* 0 the embedding, 1 + l layer l, then the rest */
	int expert;                  /* of an expert's tensor */
	enum init init;
	enum sharing sharing;
	const void *mapped;          /* NULL, or where that part is in a mapped file, which then stands for its place in the block: reals, or */
	bool bf16;                   /* bfloat16 */
};

/* A run of elements of one bucket that the same ranks share. Rank i of them keeps slice i of the optimizer's state, and updates that
 * slice of the weights (ZeRO-1: Rajbhandari et al. 2020, arXiv:1910.02054). */
struct chunk { int64_t offset, size, state; int bucket; enum sharing sharing; }; /* state: where this rank's slice begins in its moments */
enum { CHUNK_SIZE = 4 << 20, PENDING = 8 }; /* elements; gradient chunks under way at once */

struct layer_params {
	real *attention_norm;        /* [H] */
	real *ffn_norm;              /* [H] */
	real *qkv_bias, *dense_bias; /* [(nh + 2 nkv) d], [H]; or NULL */
	real *qkv;                   /* [(nh + 2 nkv) d, H] */
	real *dense;                 /* [H, nh d] */
	real *router;                /* [E, H]; NULL in a dense layer */
	real *gate_up;               /* [E, 2I, H]: each expert's gate rows, then its up rows */
	real *down;                  /* [E, H, I] */
	real *shared_gate_up;        /* [2W, H], W = shared_width(): the shared experts, or all of a dense layer; NULL if W is 0 */
	real *shared_down;           /* [H, W] */
};

/* The matrices as the forward pass reads them: in that block, or, of a model that is only evaluated, where they stand in its files. */
struct layer_weights {
	struct weight qkv, dense, router, shared_gate_up, shared_down;
	struct weight *gate_up, *down; /* [num_experts] */
};

struct params {
	real *memory;                /* [num_params] */
	real *embedding;             /* [V, H] */
	real *norm;                  /* [H] */
	real *lm_head;               /* [V, H]; the embedding itself when tied */
	struct layer_params *layer;  /* [num_hidden_layers] */
};

/* What the forward pass leaves for the backward pass. Where a layer need not keep it (see enum purpose), all share the same arrays.
 * Between attention and head a rank holds its slice of the micro-batch's T tokens (sequence parallel, Korthikanti et al. 2022,
 * arXiv:2205.05198): N of them, R = N k, and A >= R expert rows may arrive from the expert group. Without tensor parallel N = T, alone A = R. */
struct layer_activations {
	real *input;                 /* [N, H] the residual stream before the layer */
	real *attention_rstd;        /* [N] */
	real *qkv;                   /* [T, (nh + 2 nkv) d] after RoPE */
	real *attention;             /* [T, nh d] */
	real *lse;                   /* [T, nh] */
	real *middle;                /* [N, H] the residual stream between attention and experts */
	real *ffn_rstd;              /* [N] */
	real *p, *router_lse;        /* [N, E], [N] of the router's logits */
	real *p_hat;                 /* [N, E] with routing noise; p itself where there is no routing warmup */
	real *balance_factor;        /* [B, E] E f_e of the tokens that count together */
	int32_t *index;              /* [N, k] chosen experts */
	real *weight;                /* [N, k] */
	real *row_weight;            /* [R] the same in row order */
	int32_t *position, *token;   /* [R] see dispatch_plan */
	int64_t *offset;             /* [E + 1] */
	/* the expert rows that arrived, in the order of this rank's experts; without expert parallel the rank's own rows */
	int64_t num_rows, *expert_offset; /* [experts + 1] */
	int32_t *row;                /* [A] where each row of that order stands in arrivals, or the token it is */
	real *arrivals;              /* [A, H] in the order of arrival; NULL without expert parallel */
	real *expert_weight;         /* [A] */
	int64_t *arrived, *sent, *received; /* [ranks, experts] rows that arrived; [ranks] rows to and from each rank */
	real *gate_up;               /* [A, 2I] */
	real *shared_gate_up;        /* [N, 2W] */
};

struct activations {
	struct layer_activations *layer; /* [num_hidden_layers] */
	real *output;                /* [N, H] the residual stream after the last layer */
	real *rstd;                  /* [N] of the final norm */
	real *normed;                /* [N, H] what the last RMSNorm gave */
	real *gathered, *partial;    /* [T, H] every rank's slice; this rank's share of a sum over the tensor group; NULL without such a group */
	/* work space, one for all layers */
	real *logits;                /* [N, E] the router's */
	real *rows;                  /* [R, H] tokens in expert order, and what the experts made of them */
	real *expert_rows, *returns; /* [A, H] in the order of the experts, of arrival; expert_rows is rows without expert parallel */
	real *arrived_weight;        /* [A] */
	real *act;                   /* [A, I] */
	real *shared_act;            /* [N, W] */
	real *scatter_scratch;
	real *attention_scratch, *sum_scratch;
	int64_t *expert_count;       /* [E] */
	double *sequence_count, *sequence_p; /* [B, E] */
	struct router_sums *router_sums; /* [B] */
	real *head_logits, *head_input, *head_max; /* [C, V], [C, H], [C]: a chunk of C = head_chunk() tokens */
	double *head_loss;           /* [2, C] loss, and sum of exponentials */
	double *head_norm;           /* [H] column sums of squares */
	/* backward only; dX has the shape of X */
	real *dstream;               /* [N, H] gradient of the residual stream */
	real *dnormed, *dqkv, *dattention, *dlogits, *dgate_up, *dexpert_weight, *dweight, *dshared_gate_up;
};

/* Where the time of a step goes; model_lap() adds the time since the last call to a part. */
enum part { PART_ATTENTION, PART_ROUTER, PART_PERMUTE, PART_EXPERTS, PART_HEAD, PART_OPTIMIZER, PART_OTHER, NUM_PARTS };

struct model {
	struct model_config whole, config; /* of the whole model; and with this rank's part of heads and vocab_size */
	int64_t first_vocab;         /* the first vocabulary entry of that part */
	int num_experts;             /* of this rank */
	int max_sequences, seq_len;  /* activations have room for this many windows of seq_len tokens */
	enum purpose purpose;
	struct tensor *tensors;      /* [num_tensors] in the order of memory */
	int num_tensors;
	int64_t num_params;          /* of this rank */
	struct params params, grads;
	struct weight embedding, lm_head;
	struct layer_weights *weights; /* [num_hidden_layers] */
	struct weight *expert_weights; /* theirs */
	struct weights *files;       /* open as long as weights stand in them, or NULL */
	size_t reserved_bytes;       /* of params.memory in evaluation: pages come as they are written */
	struct chunk *chunks;        /* [num_chunks] in the order of memory */
	int num_chunks;
	int64_t num_state;           /* elements that this rank keeps the optimizer's moments of */
	real *exp_avg, *exp_avg_sq;  /* [num_state] */
	struct exchange dispatch;    /* expert rows under way */
	/* gradient chunks under way: number i of this backward pass in place i % PENDING */
	struct { struct scatter scatter; int chunk; } pending[PENDING];
	int chunks_started, chunks_finished;
	real *pending_scratch;       /* [PENDING, pending_size] */
	int64_t pending_size;
	real *head_scale;            /* [H] NormHead's 1 / (n_j + 1e-7): the head norm cache; NULL without norm_head */
	real *rope;                  /* [num_positions, d], at least seq_len */
	int64_t num_positions;
	const int32_t *document;     /* [T] of the micro-batch, see rope_forward; set before model_forward, kept until model_backward; may be NULL */
	struct activations acts;
	void *acts_memory, *arrivals_memory;
	size_t acts_bytes, arrivals_bytes;
	struct layout layout;
	double part_seconds[NUM_PARTS], lap_start; /* of the step in hand */
};

/* One optimizer step as the model sees it. */
struct step {
	uint64_t seed;
	int64_t index;               /* updates done before this one */
	int64_t num_tokens;          /* real tokens of the global batch */
	int64_t num_targets;         /* valid targets of the global batch */
	int64_t first_sequence;      /* of this micro-batch, in the global batch */
	bool accumulate, last;       /* add to the gradients: all but the first micro-batch; the last one sends them on */
	const double *router_mean, *router_std; /* [num_hidden_layers] */
};

/* Sums over the micro-batches of a step, so far: one block of doubles, for one sum over the ranks. values[0] is the cross-entropy in nats
 * over valid targets, values[1] the ranks that were asked to stop; layer_sums() finds a layer's part. */
struct step_sums { double *values; int64_t size, stride; };
struct layer_sums {
	double balance, z;           /* their weighted sums are the step's means */
	double s, s_squared;         /* of the router's logits */
	double count[];              /* [E] assignments */
};

/* Makes this rank's part of a model, with room for max_sequences windows of seq_len tokens, weights not set. The layout must be connected.
 * Fails when memory does not suffice, saying how much is needed. model_free may follow a failure. */
int model_init(struct model *m, const struct model_config *config, const struct layout *layout, int max_sequences, int seq_len,
		enum purpose purpose);
void model_free(struct model *m);
void model_randomize(struct model *m, uint64_t seed);
/* Reads all parameters from a Hugging Face directory; a tensor that is missing, or not the model's, is an error. For evaluation, matrices
 * in float32 and bfloat16 are not copied but used where they stand in the files, from which the system reads them as they are needed. The
 * checksums of all tensors are checked first, but in evaluation only where the files are no larger than memory. */
int model_load(struct model *m, const char *dir);
/* Renews the head norm cache; call whenever weights have changed. */
void model_update_head_scale(struct model *m);
/* The forward pass for B windows of input [B, L]; acts.normed holds the result. In training, step gives what the router needs and sums
 * takes its statistics; in evaluation both are NULL. */
void model_forward(struct model *m, const int32_t *input, int B, const struct step *step, struct step_sums *sums);
/* Logits [n, V] of tokens first .. first+n-1 of the last forward pass (or of model_extend), n <= head_chunk(V, 1), of a model without
 * tensor parallel. */
void model_logits(struct model *m, real *logits, int64_t first, int64_t n);
/* A sequence that remembers its keys and values, see struct cache: an empty one, with room for `capacity` tokens, which may be more than
 * m->seq_len. */
int cache_init(struct cache *c, struct model *m, int64_t capacity);
void cache_free(struct cache *c);
/* Makes `to` the first n tokens of `from`. */
void cache_copy(const struct model *m, struct cache *to, const struct cache *from, int64_t n);
/* The forward pass for the next tokens of some sequences, at least one of each, together at most max_sequences * seq_len; they enter the caches,
 * and acts.normed holds their results, one segment behind the other. The bits of a result depend neither on the other segments nor on how
 * a sequence was cut into segments: they are model_forward's. */
void model_extend(struct model *m, const struct segment *segments, int n);
/* Cross-entropy in nats, summed over the valid targets of the last forward pass; with step, also its gradients. */
double model_loss(struct model *m, const int32_t *target, int B, const struct step *step);
/* The backward pass from what model_loss left; call after it with the same step. */
void model_backward(struct model *m, const int32_t *input, int B, const struct step *step);
/* Sum of squares of the gradient, of which each rank holds the sum over the ranks in its slices: every distinct parameter counts once. */
double gradient_square(const struct model *m);
void model_lap(struct model *m, enum part part);
int step_sums_init(struct step_sums *s, const struct model_config *c); /* to be freed with free(s->values) */
struct layer_sums *layer_sums(const struct step_sums *s, int layer);
/* Width of the dense SwiGLU of a layer: S I, or intermediate_size in the first first_k_dense_replace layers. */
int shared_width(const struct model_config *c, int layer);
bool has_experts(const struct model_config *c, int layer);
/* Tokens of which the head makes logits at a time, with the whole vocabulary V split over `tensor` ranks. */
int64_t head_chunk(int64_t V, int tensor);

/* ============================================================================================================
 * The trainer (ling.c)
 * ========================================================================================================== */

/* Learning rate of update `step` (from 1) of `steps`, with progress = tokens before it / tokens of the run. */
double learning_rate(const struct config *c, int64_t step, int64_t steps, double progress);
/* Sequences of the update that starts after `tokens` tokens. */
int64_t batch_size(const struct config *c, int64_t tokens);
/* Length of the whole run, from where it stands: after `step` updates and `token` tokens. */
void run_length(const struct config *c, int64_t step, int64_t token, int64_t *steps, int64_t *tokens);

struct trainer {
	struct config config;
	struct model model;
	struct tokens train[MAX_SOURCES], valid[MAX_SOURCES];
	struct trainer_state state;
	struct source_state next_sources[MAX_SOURCES]; /* what state.sources will be once the batch in hand is done */
	struct step_sums sums;
	int64_t steps, tokens;       /* of the whole run */
	int32_t *input, *target;     /* [batch, L] this step's sequences */
	int32_t *document;           /* [batch, L], see rope_forward; NULL without data.document_mask */
	int64_t source_samples[MAX_SOURCES]; /* for the metrics */
	double *expert_load;         /* [layers with experts] */
	/* of the last step */
	bool stop;                   /* a rank was asked to stop */
	double communication;        /* seconds of it on this rank */
	int64_t bytes_sent[NUM_TRAFFIC]; /* by this rank */
	int slowest;                 /* the rank that computed longest */
};
/* Makes a trainer without data and with weights not set; trainer_free may follow a failure. */
int trainer_allocate(struct trainer *t, const struct config *c);
/* Makes a trainer: data opened and checked, weights random, from init_from, or from the newest checkpoint of output_dir. */
int trainer_init(struct trainer *t, const struct config *c);
void trainer_free(struct trainer *t);
/* Fills input and target with the next batch; returns its sequences, or -1. */
int64_t trainer_next_batch(struct trainer *t);
/* One optimizer step on the batch that stands in input and target. m->expert_load points into the trainer. Fails, with
 * the weights unchanged and *m filled, when loss or gradient is not finite. */
int trainer_step(struct trainer *t, int64_t batch, struct metrics *m);
int trainer_save(struct trainer *t);
int trainer_run(struct trainer *t);

/* Mean cross-entropy over the windows of a token file, one window at a time, so that no batching can change it. */
struct evaluation { double loss; int64_t tokens, bytes; }; /* tokens: those whose loss counts; bytes: of their text, 0 where `tokenizer` is NULL */
int evaluate(struct model *m, const struct tokens *data, const struct tokenizer *tokenizer, bool document_mask, int64_t max_windows,
		struct evaluation *e);

/* ============================================================================================================
 * Generation (ling.c), of a model without tensor parallel
 * ========================================================================================================== */

/* How a token is chosen. At temperature 0: the most likely one, the lower id among equals. Else it is drawn with the probabilities
 * softmax(logits / temperature) among the top_k most likely (0: all), and of these among the fewest that have top_p of their probability (1: all). */
struct sampling { double temperature, top_p; int top_k; uint64_t seed; };
/* The token at `position` of sequence `number` from its logits [V]: of nothing else than these does it depend. -1 when they are not finite.
 * scratch [V]. */
int32_t choose_token(const struct sampling *s, const real *logits, int64_t V, uint32_t number, int64_t position, int32_t *scratch);

struct continuation {          /* of one prompt */
	struct ids ids;              /* the prompt's num_prompt, at least one, and then its own, less the end token */
	int64_t num_prompt;
	uint32_t number;             /* its draws are its own */
	struct text text;            /* of its own tokens, less the stop text and what came behind it */
	enum ended { RUNNING, ENDED_BY_TOKEN, ENDED_BY_STOP, ENDED_BY_LENGTH } ended; /* by the end token, the stop text, max_tokens */
};
struct generation {
	struct sampling sampling;
	int64_t max_tokens;          /* of a continuation, at least 1 */
	struct strings stop;         /* a continuation ends before the first of these */
	int batch;                   /* sequences at a time */
	bool no_cache;               /* compute every sequence anew for each of its tokens: a check, and slow */
	int (*show)(void *context, const struct continuation *c); /* NULL, or called after each token; -1 ends all */
	void *context;
};
/* Continues n prompts, those that are finished already left out. The result is the same for any batch, with the cache and without. */
int generate(struct model *m, const struct tokenizer *t, struct continuation *continuations, int n, const struct generation *g);

/* ============================================================================================================
 * Scored evaluation (ling.c). A task becomes items: token sequences, an item's branches, which begin alike. What is scored are the last tokens of
 * each.
 * ========================================================================================================== */

struct task_branch {
	int64_t rest, num_rest;      /* the sequence's tokens behind what the branches share, in task_work.ids; the last one is only a target */
	int64_t scored;              /* where in the sequence the scored tokens begin: never at 0 */
};
struct task_item {
	int64_t sample;
	int64_t shared, num_shared;  /* in task_work.ids; at least one token */
	int64_t first_branch;
	int num_branches;            /* exact match: 0, the shared tokens are the prompt */
	bool cut;
};
struct task_work {             /* a task in tokens */
	const struct task *task;
	const struct tokenizer *tokenizer;
	struct ids ids;
	struct task_item *item;
	struct task_branch *branch;
	int64_t num_items, num_branches;
	size_t item_room, branch_room;
	int64_t longest;             /* tokens of the longest sequence that must fit into the model's window */
	/* what the model makes of it: each branch's log-likelihood; exact match: each item's reply, as its length and max_tokens ids */
	double *value;
	int64_t num_values;
};
/* Encodes a task for windows of up to L tokens. task_work_free in any case. */
int task_encode(struct task_work *w, const struct task *task, const struct tokenizer *tokenizer, int64_t L);
void task_work_free(struct task_work *w);
/* Runs the items of the samples that are this rank's, up to `batch` at a time; on all ranks together, which then have all values. The bits of a value
 * depend neither on batch or ranks nor on how many tokens the model takes at a time. */
int task_run(struct task_work *w, struct model *m, int batch);
/* The scores; with `results`, a line of each sample. */
void task_score(const struct task_work *w, struct task_result *result, struct results *results);

/* Set by SIGTERM and SIGINT: the step in hand is finished and saved. Global because a signal handler has no arguments. */
extern volatile sig_atomic_t stop_requested;
#endif
