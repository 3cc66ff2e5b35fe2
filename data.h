/*
 * data.h - what a run reads and leaves behind: token files, windows of them, loss masks; metrics.
 */
#ifndef LING_DATA_H
#define LING_DATA_H

#include "files/base.h"
#include "files/config.h"
#include "files/tokenizer.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

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

/* -- token files -- */

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

#define REAL_DTYPE (sizeof(real) == 8 ? F64 : F32)

/* The types whose size is known. The first six can be read, the others may lie in the file beside them. */
enum dtype { F64, F32, F16, BF16, I64, I32, NUM_DTYPES = 15, UNKNOWN_DTYPE = -1 };

extern const struct dtype_row { const char *name; int size; } dtypes[NUM_DTYPES];

struct shard {                 /* one mapped file */
	struct shard *next;
	char path[PATH_LEN];
	const uint8_t *map;
	size_t size;
	size_t data_at;              /* where the tensors' bytes begin */
	json_t *header;              /* owns the names and shapes that tensors point to */
};

struct stored {
	const char *name;
	const struct shard *shard;
	const json_t *shape;         /* checked: an array of integers >= 0 */
	const char *dtype_name;
	enum dtype dtype;
	uint64_t begin, end;         /* bytes, from the shard's data_at */
	bool has_crc;
	uint32_t crc;
};

struct weights {
	char path[PATH_LEN];
	struct shard *shards;
	struct stored *tensors;      /* sorted by name */
	int count, dropped;          /* buffers that were left out */
	size_t room;
};

/* The tensor of that name, or NULL. */
const struct stored *tensor_find(const struct weights *w, const char *name);

const uint8_t *tensor_bytes(const struct stored *t);

static inline float bits_to_float(uint32_t bits)
{
	float value;
	memcpy(&value, &bits, sizeof value);
	return value;
}

static inline uint32_t float_to_bits(float value)
{
	uint32_t bits;
	memcpy(&bits, &value, sizeof bits);
	return bits;
}

/* Without branches, so that loops over it become vectors; likewise below. The product puts exponents right, those of subnormals too. */
static inline float half_to_float(uint16_t half)
{
	const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
	const uint32_t finite = float_to_bits(bits_to_float(rest) * 0x1p112f);
	return bits_to_float(sign | (rest >= 0x0f800000 ? rest | 0x7f800000 : finite));
}

static inline float bf16_to_float(uint16_t half)
{
	return bits_to_float((uint32_t)half << 16);
}

/* To nearest, ties to even; a NaN stays one; what is too large becomes infinite. */
static inline uint16_t float_to_bf16(float value)
{
	const uint32_t bits = float_to_bits(value), rounded = bits + 0x7fff + (bits >> 16 & 1);
	return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded >> 16;
}

static inline uint16_t float_to_half(float value)
{
	const uint32_t bits = float_to_bits(value), size = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
	const uint32_t normal = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
	const uint32_t small = float_to_bits(bits_to_float(size) + 0.5f) - float_to_bits(0.5f); /* the sum rounds where a subnormal ends */
	const uint32_t nan = 0x7e00 | (size >> 13 & 0x1ff);
	const uint32_t finite = size < 0x38800000 ? small : normal;
	return sign | (size > 0x7f800000 ? nan : size >= 0x477ff000 ? 0x7c00 : finite);
}

struct weights_writer {
	char path[PATH_LEN];
	FILE *f;
	json_t *header;              /* tensors in the order of their data, as jansson keeps it */
	int64_t written;             /* bytes */
	int n, current;              /* tensors; the one that the next byte belongs to, or an empty one before it */
	struct { int64_t end; uint32_t crc; int size; } tensors[]; /* [n] bytes up to its last; checksum of what there is of it; of an element */
};

int64_t array_size(const struct array *a);

/* Creates a file for n arrays of these types. NULL on error. */
struct weights_writer *writer_open(const char *path, const struct array *arrays, const enum dtype *types, int n);

/* Writes the next bytes, whole elements of one size. */
int writer_append(struct weights_writer *w, const uint8_t *data, int64_t bytes, int size);

/* The name of file i of a checkpoint, trainer.json left out. Returns whether there is one. */
bool checkpoint_name(char name[64], int i, int parts);

int checkpoint_path(char out[PATH_LEN], const char *output_dir, const char *prefix, int64_t step);

/* Removes a directory of plain files, or a symbolic link and not what it points to. What cannot be removed stays, with
 * a warning: old files must not stop a run. Nothing happens when there is none. */
void directory_remove(const char *path);

/* Size of DIR/name and the checksum of what no other checksum covers: all of a file, but of safetensors the header. */
int file_seal(const char *dir, const char *name, int64_t *size, uint32_t *crc);

/* The checksum of trainer.json's content: of its compact text without the member crc32. */
uint32_t trainer_crc(json_t *root);

enum { MEGATRON, LLM_C, BARE_IDS };

#define IDX_MAGIC "MMIDIDX\0\0"
#define IDX_HEADER 34 /* bytes before the lengths */

/* What is done alike for each integer type: X(Megatron's code, name, type). The last one is not Megatron's. */
#define TOKEN_TYPES(X) X(1, "uint8", uint8_t) X(2, "int8", int8_t) X(3, "int16", int16_t) X(4, "int32", int32_t) \
	X(5, "int64", int64_t) X(8, "uint16", uint16_t) X(9, "uint32", uint32_t)

extern const struct token_types_row { const char *name; int size; } token_types[];

#define INT32 4
#define UINT16 8
#define UINT32 9

/* What the files are: how large, and when they were changed last. */
struct stamp { int64_t size; struct timespec modified; }; /* size -1: no such file */
enum { STAMP_BIN, STAMP_IDX, STAMP_MASK, NUM_STAMPS };

extern const char *const stamp_suffixes[NUM_STAMPS];

struct manifest {
	char tokenizer[PATH_LEN];        /* "": not known, and so are the next three */
	uint32_t tokenizer_hash;
	int64_t vocab_size, bytes;
	int dtype;
	int64_t tokens, documents;   /* documents -1: not told by the file */
	int64_t largest_id, learned;
	uint32_t crc32, mask_crc32;  /* mask_crc32 0 without a mask */
	struct stamp stamps[NUM_STAMPS];
};

int manifest_write(const struct manifest *m, const char *path);

int manifest_check_format(const char *path, const json_t *root);

/* Fails when the file has no regular size. */
int stamp_file(struct stamp *s, const char *path);

/* Takes the stamps of a token file's companions and of the ids at `path`. */
int stamps_take(struct stamp stamps[NUM_STAMPS], const char *path, const char *prefix, int format);

int64_t id_at(const struct tokens *t, int64_t i);

#ifndef SCAN_BLOCK
#define SCAN_BLOCK (1 << 22) /* tokens that a thread looks through at a time */
#endif

#ifndef SEQUENCE_MAX
#define SEQUENCE_MAX (1 << 30) /* a longer document becomes several sequences: Megatron's lengths have 31 bits */
#endif

struct results {
	char dir[PATH_LEN], samples[PATH_LEN], temporary[PATH_LEN];
	FILE *f;
};

#define GGUF_MAGIC "GGUF"

enum gguf_type { GGUF_U8, GGUF_I8, GGUF_U16, GGUF_I16, GGUF_U32, GGUF_I32, GGUF_F32, GGUF_BOOL, GGUF_TEXT, GGUF_ARRAY, GGUF_U64, GGUF_I64,
	GGUF_F64, NUM_GGUF_TYPES };

/* The pre-tokenizers that llama.cpp has too, by its names for them; Ling's comes in two spellings of the same. NULL: ByteLevel's own. */
extern const struct pre_tokenizers_row { const char *name, *pattern; } pre_tokenizers[];

enum { TOKEN_NORMAL = 1, TOKEN_CONTROL = 3, TOKEN_USER_DEFINED = 4, TOKEN_UNUSED = 5 };

/* Maps a file, checks its header and adds its tensors to w. What was taken is in w, for weights_close. */
int gguf_open(struct weights *w, const char *path);

/* A pre_tokenizer of tokenizer.json, as Hugging Face writes it: the pattern if there is one, then ByteLevel. */
json_t *pre_tokenizer_json(const char *pattern);

struct metadata { struct text bytes; uint64_t count; };

void append_u32(struct text *out, uint32_t value);

void append_u64(struct text *out, uint64_t value);

void append_text(struct text *out, const char *text);

/* The keys of the architecture. A model that llama.cpp's bailingmoe does not compute is refused. */
int config_to_gguf(struct metadata *m, const struct model_config *model, const char *path);

/* The tokenizer of a Hugging Face directory, whose config.json is `config`. */
int tokenizer_to_gguf(struct metadata *m, const char *dir, const json_t *config, int vocab_size);

struct source {
	char path[PATH_LEN];
	struct model_config config;
	struct weights *weights;
	json_t *config_json;         /* of a directory */
	const json_t *metadata;      /* of a GGUF file, else NULL */
};

enum { BLOCK_BYTES = 16 << 20, BLOCK_ROWS = 8192, RUN = 4096 };

/* Converts a row of n elements, divided by the columns' `fold` if it is not NULL. Returns whether a finite one has become infinite. */
bool convert_row(uint8_t *out, enum dtype to, const uint8_t *in, enum dtype from, int64_t n, const double *fold);

/* Windows of L inputs and L shifted targets in a token file. */
int64_t count_windows(const struct tokens *t, int64_t L);

/* How token files are read. tokenizer "none", document_token -1: not known. */
struct reading { const char *tokenizer; uint32_t tokenizer_hash; int vocab_size; int64_t seq_len; bool document_mask; int document_token; };

/* What the config says of it. The tokenizer's ids must be the model's. */
int reading_of(struct reading *r, const struct config *c);

/* Copies window i of a token file: inputs [L], targets [L], the tokens one further on, and, unless document is NULL, where each input's
 * document begins in the window [L]. */
int read_window(const struct tokens *data, int64_t i, int64_t L, int32_t *input, int32_t *target, int32_t *document);

/* Opens a token file that must hold at least one window, be made by r->tokenizer if both that and its own are known, tell where its
 * documents begin if they are masked, and have a target that counts in its first max_windows windows (0: in any). */
int open_data(struct tokens *t, const struct data_source *source, const struct reading *r, int64_t max_windows);

#endif
