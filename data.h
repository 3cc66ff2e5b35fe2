/*
 * data.h - what a run reads and leaves behind: token files, windows of them, loss masks; metrics, samples.
 */
#ifndef LING_DATA_H
#define LING_DATA_H

#include "files/base.h"
#include "files/config.h"
#include "files/checkpoint.h"
#include "kernels.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <time.h>

/* ============================================================================================================
 * Token files: their formats, which data.c describes
 * ========================================================================================================== */

enum token_format { MEGATRON, LLM_C, BARE_IDS };

#define IDX_MAGIC "MMIDIDX\0\0"
#define IDX_HEADER 34            /* bytes of an .idx file before the lengths */

/* The integer types of ids, X(code, name, type): the code is Megatron's, but for the last one, which Megatron does not
 * have. */
#define TOKEN_TYPES(X) X(1, "uint8", uint8_t) X(2, "int8", int8_t) X(3, "int16", int16_t) X(4, "int32", int32_t) \
	X(5, "int64", int64_t) X(8, "uint16", uint16_t) X(9, "uint32", uint32_t)
enum { INT32 = 4, UINT16 = 8, UINT32 = 9 }; /* codes of these types */

/* By code. size: bytes of an id; 0 for a type of Megatron's that is no integer type. */
extern const struct token_type { const char *name; int size; } token_types[];

struct tokens {                /* a token file, mapped; see data.c for the formats */
	char path[PATH_LEN];         /* of the ids */
	enum token_format format;
	int dtype;                   /* of the ids: a code of TOKEN_TYPES, an index of token_types */
	int64_t count;               /* tokens */
	int64_t documents;           /* of an indexed dataset; else -1 */
	int64_t sequences;           /* of an indexed dataset */
	const uint8_t *ids;          /* [count] of that type */
	const uint8_t *loss_mask;    /* [count] LOSS_NONE, LOSS_TOKEN or LOSS_END; NULL: the loss counts every token */
	int32_t end_token;           /* the target that LOSS_END stands for; -1: not known, and there is none */
	char tokenizer[PATH_LEN];    /* of the tokenizer that made it: its name, from the manifest; "": not known */
	uint32_t tokenizer_hash;     /* its hash, if the name is known */
	uint32_t crc32;              /* of the bytes of the ids, followed by those of the loss mask */
	int vocab_size;              /* ids are 0 .. vocab_size - 1 */
	int32_t document_token;      /* see tokens_documents(); -1: not set */
	bool document_mask;          /* windows tell where documents begin; always so where documents are packed */
	struct packed *packing;      /* how documents are placed into windows; NULL: windows follow one another */
	struct file_map bin, idx, mask;
};
/* Opens an indexed dataset by its PREFIX (PREFIX.bin, PREFIX.idx), an llm.c .bin file, or, with a dtype that is not
 * "none", a file of bare ids. Everything is checked, every id against vocab_size included, unless a manifest says
 * that these files have been checked. If none does, one is written where the folder can be written to. On error *t is
 * empty. */
int tokens_open(struct tokens *t, const char *path, const char *dtype, int vocab_size);
/* Copies tokens [start, start+n), which must lie within the file. An id outside the vocabulary is an error here too:
 * the file may have changed. */
int tokens_read(const struct tokens *t, int64_t start, int64_t n, int32_t *out);
/* target [n]: tokens [start+1, start+1+n), the targets of tokens [start, start+n). Makes those -1 that the loss mask
 * leaves out, and those the end token that it says are. */
void tokens_mask(const struct tokens *t, int64_t start, int64_t n, int32_t *target);
/* document [n]: where the document of each of tokens [start, start+n) begins, counted from start; 0 if before. target
 * [n] as in tokens_mask(): where the next token is of another document it becomes -1, except that a separator stays a
 * target. With an index, documents are those of the index. Without one, document_token separates them and must be
 * set: in an llm.c file it begins a document, in a file of bare ids it ends one, because that is how the programs
 * that write them do it. */
int tokens_documents(const struct tokens *t, int64_t start, int64_t n, int32_t *document, int32_t *target);
/* Token i, 0 <= i < t->count, as it is in the file: it may be outside the vocabulary. */
int64_t id_at(const struct tokens *t, int64_t i);
void tokens_close(struct tokens *t); /* a struct of zeros is fine */

/* ============================================================================================================
 * The manifest of a token file, PREFIX.json
 * ========================================================================================================== */

struct file_state { int64_t size; struct timespec modified; }; /* bytes, time of change; size -1: no file */
/* The files beside the manifest: PREFIX.bin, or what else has the ids; PREFIX.idx; PREFIX.mask.bin. */
enum { TOKEN_FILE_BIN, TOKEN_FILE_IDX, TOKEN_FILE_MASK, NUM_TOKEN_FILES };

struct manifest {
	char tokenizer[PATH_LEN];    /* its name; "": not known, and so are the next three */
	uint32_t tokenizer_hash;
	int64_t vocab_size;          /* of the tokenizer */
	int64_t end_token;           /* its end token; -1: none, or not known */
	int64_t bytes;               /* of the text that was tokenized */
	char text_field[MAX_NAME];   /* the member of JSON lines that held it; "": there were none, or not known */
	int64_t lines_skipped;       /* JSON lines that could not be used */
	int dtype;                   /* a code of TOKEN_TYPES */
	int64_t tokens, documents;   /* documents -1: the format does not tell */
	int64_t largest_id;
	int64_t loss_tokens;         /* tokens that the loss counts: all without a mask */
	uint32_t crc32, mask_crc32;  /* of the ids, of the mask; mask_crc32 0 without a mask */
	struct file_state files[NUM_TOKEN_FILES];
};

/* The manifest as JSON, which the caller owns. */
json_t *manifest_to_json(const struct manifest *m);
/* The JSON of the manifest at `path`, which the caller owns. NULL on error, also where it is something else. */
json_t *manifest_read_json(const char *path);
/* The state of a file. That there is none is not an error. */
int file_state_read(struct file_state *s, const char *path);
/* The states of the files that belong to a token file: of the ids at `path`, and of PREFIX.idx and PREFIX.mask.bin.
 * Only the format MEGATRON has an .idx. */
int token_file_states(struct file_state states[NUM_TOKEN_FILES], const char *path, const char *prefix,
		enum token_format format);

/* ============================================================================================================
 * Windows: what a model trains on and is evaluated on
 * ========================================================================================================== */

/* A window is L = seq_len inputs and L targets. There are two ways to make windows of a token file.
 *
 * One after the other: window i is tokens [i L, i L + L], and the targets are the inputs shifted by one. Tokens that
 * do not fill a window at the end are left out.
 *
 * Packed documents (t->packing): a document of n tokens takes n - 1 places, for its last token is a target only; one
 * of fewer than two tokens has no target and is left out. A document that needs more than L places is cut into pieces
 * of L and a rest; no other is cut. The pieces are placed by best fit, the longest first: each into the window with
 * the least room that holds it, or into a new one. Which lengths share a window, and so the number of windows, depends
 * on the lengths alone. Windows, and the pieces in a window, are in the order of the file, a window where its first
 * piece is. In an epoch's order, pieces of the same length change places. What is left of a window is filled: its own
 * tokens once more, as a document of its own that has no targets. */

/* The number of windows. */
int64_t count_windows(const struct tokens *t, int64_t L);

/* Copies window i: inputs [L]; targets [L], -1 where the loss does not count; and, unless document is NULL, where in
 * the window each input's document begins [L]: see tokens_documents, or all 0 where t->document_mask is not set. order:
 * the epoch's random numbers, which choose among pieces of the same length; NULL: the order of the file. Returns how
 * many of the inputs, from the first, are no padding, or -1. */
int read_window(const struct tokens *data, int64_t i, int64_t L, const struct random_stream *order, int32_t *input,
		int32_t *target, int32_t *document);

/* Writes how a file became windows: their number, the share of tokens that are left out or padding and, of
 * conversations and packed documents, how many are cut, for which it reads the whole index. */
int describe_windows(char *line, size_t size, const struct tokens *t, int64_t L);
/* Prints such a line for each of n files, behind the key of the config that names them. */
int print_windows(const char *key, const struct tokens *files, int n, int64_t L);

/* What a token file must agree with, and how it is read. */
struct data_options {
	const char *tokenizer;       /* its name; "none": not known */
	uint32_t tokenizer_hash, tokenizer_old_hash; /* see files/tokenizer.h */
	int vocab_size;              /* of the model: ids are 0 .. vocab_size - 1 */
	int64_t seq_len;
	bool document_mask;          /* attention and targets stay within a document */
	int document_token;          /* separates documents in a file without an index; -1: not known */
	enum packing packing;
};

/* Takes the options from a config, with a tokenizer by its name or "none". Fails when the tokenizer has more tokens
 * than the model. */
int data_options_init(struct data_options *o, const struct config *c, const char *tokenizer);

/* Opens a token file for training or evaluation. It must hold at least one window; be made by o->tokenizer, if both
 * that and its own are known; tell where its documents begin, if they are masked; have an index, if its documents are
 * packed; and have a target that counts in its first max_windows windows (0: in any). */
int open_data(struct tokens *t, const struct data_source *source, const struct data_options *o, int64_t max_windows);

/* ============================================================================================================
 * The blend: from which file, and from where in it, each sample of a run comes. This is a function of the shares, the
 * seed and the number of samples before it alone. What must be remembered between samples is in struct source_state
 * (files/checkpoint.h), one for each file.
 * ========================================================================================================== */

struct blend {
	struct tokens files[MAX_SOURCES];
	int num_files;
	int64_t seq_len;
	uint64_t seed;
	bool shuffle;                /* each epoch of a file has its windows in an order of its own */
};

/* Opens the files of data.train. On error what is open stays so until blend_close. */
int blend_open(struct blend *b, const struct config *c, const struct data_options *o);
void blend_close(struct blend *b);
/* The state before the first sample. */
void blend_begin(const struct blend *b, const struct config *c, struct trainer_state *s);
/* Compares the files and shares of the config with those of the state, which was read from checkpoint `dir`. Returns 0
 * when they are the same. Where they differ, that is an error; but if data.blend_from_step is the state's step, the
 * new blend begins there: 1. Then each file that was in it before goes on from where it stands. index [MAX_SOURCES],
 * or NULL: the index in the new blend of each file of the state, -1 when it is not in it. */
int blend_resume(const struct blend *b, const struct config *c, struct trainer_state *s, const char *dir, int *index);
/* Sample `number` of file `file` is window `window` of that file, in the order of its epoch. */
struct blend_sample { int file; int64_t number, window; struct random_stream order; };
/* The same sample whenever it is asked for. sources [num_files]: the states of the sources at any time of the run. */
struct blend_sample blend_sample_at(const struct blend *b, const struct source_state *sources, int file,
		int64_t number);
/* Draws the next sample. Advances the states of the sources. */
struct blend_sample blend_next(const struct blend *b, struct source_state *sources);
/* Reads a sample: read_window in the order of its epoch. */
int blend_read(const struct blend *b, const struct blend_sample *sample, int32_t *input, int32_t *target,
		int32_t *document);
/* Whether samples need `document`, because a file's documents are masked or packed. */
bool blend_has_documents(const struct blend *b);
/* Says that the checkpoints of a run without data.tokenizer have none, and which one made the data. */
void blend_note_tokenizer(const struct blend *b);
/* A run without data.tokenizer, which continues from checkpoint `dir`, gets the tokenizer `name`. Fails where a file
 * does not say what made it; open_data() has compared the others. */
int blend_check_tokenizer(const struct blend *b, const char *name, const char *dir);

/* ============================================================================================================
 * Metrics
 * ========================================================================================================== */

struct valid_loss { char set[SET_NAME_LEN]; double loss; };
struct metrics {               /* one step; a non-finite number is written as null and named in "nonfinite" */
	int64_t step, samples, tokens;
	int batch;
	double loss, balance_loss, z_loss, lr, grad_norm, seconds, tokens_per_second;
	double update_norm;          /* of what the weights changed by; NaN where an earlier version wrote the line */
	int attempts;                /* the most that a sample of the batch had been tried before; 0: all are new */
	int num_layers;              /* layers with experts */
	double *expert_load;         /* [num_layers] largest expert's share over the mean share */
	bool has_valid_loss;
	double valid_loss;           /* the mean over the targets of all validation files */
	bool validation_stopped;     /* a stop ended the validation: the run that goes on makes up for it */
	/* these are written only; metrics_read leaves them 0, and metrics_each gives the whole line */
	int num_mtp_layers;          /* that are trained; 0: none, and no mtp_loss */
	double mtp_loss;             /* the mean of their cross-entropies */
	const double *expert_bias;   /* [num_layers] largest |bias| of an expert after the step; NULL: there is none */
	int num_experts;             /* of a layer, for: */
	const int64_t *expert_counts; /* [num_layers, num_experts] tokens of the batch that each got; NULL: not counted */
	int num_valid_sets;          /* 0: data.valid names no sets */
	const struct valid_loss *valid_losses; /* [num_valid_sets] of each set alone */
	double save_seconds;         /* that training waited for the save after the step before; 0: there was none */
	int num_kinds;               /* kinds of traffic (parallel.h); 0 in one process */
	const char *const *kinds;    /* [num_kinds] their names */
	const int64_t *bytes_sent;   /* [num_kinds] by rank 0 in the step */
	int num_sources;             /* token files of a blend; 0 without one */
	const int64_t *source_samples; /* [num_sources] samples so far from each */
};
/* Opens OUTPUT_DIR/metrics.jsonl for appending after `step`: lines of later steps and a torn last line are
 * removed. A file that ends before `step`, unless it is empty, or that metrics_read would not read, is an error.
 * *last, which may be NULL, becomes the last line that stays, without expert_load; its step is 0 without one. */
FILE *metrics_open(const char *output_dir, int64_t step, struct metrics *last);
/* The losses of the named sets, as an object: null where one is not finite, and then "valid" is added to the list
 * `nonfinite`, which may be NULL. */
json_t *valid_losses_to_json(const struct metrics *m, json_t *nonfinite);
/* The line of a step, which the caller frees. */
char *metrics_line(const struct metrics *m);
/* Appends lines. On failure nothing of them is in the file. */
int metrics_append(FILE *f, const char *lines);
/* Both. */
int metrics_write(FILE *f, const struct metrics *m);
/* Whether OUTPUT_DIR/metrics.jsonl still is the file that f writes to; if not, error_text says what to do. */
enum metrics_place {
	METRICS_IN_PLACE,
	METRICS_MOVED,               /* *now is the directory where it is */
	METRICS_DELETED,             /* a checkpoint can still be saved in output_dir, which is no other run's */
	METRICS_LOST,                /* deleted, and something else is in output_dir's place */
};
enum metrics_place metrics_place(FILE *f, const char *output_dir, char now[PATH_LEN]);
/* Whether the last line of OUTPUT_DIR/metrics.jsonl is that of `step`, and says that its validation was stopped. */
bool metrics_lack_validation(const char *output_dir, int64_t step);
/* Gives that line what the validation would have left in it, from *m. The file is replaced by a new one: it must not
 * be open. */
int metrics_set_validation(const char *output_dir, const struct metrics *m);
/* Reads all of RUN_DIR/metrics.jsonl; nulls become NaN. *out is one block, expert_load included: free(*out). */
int metrics_read(const char *run_dir, struct metrics **out, int *count);
/* Calls `each` for every line that metrics_read would read, with the whole object. Ends with -1 where it returns -1. */
int metrics_each(const char *run_dir, int (*each)(void *context, const json_t *line), void *context);

/* ============================================================================================================
 * Samples: OUTPUT_DIR/samples.jsonl, one strict JSON object for each prompt that an evaluation has continued. Steps
 * rise. Each has `step`, the updates done; the writer knows the other members.
 * ========================================================================================================== */

/* Removes the lines of later steps than `step`, and a torn last line. No file is no error. */
int samples_cut(const char *output_dir, int64_t step);
/* Appends the lines of a step, and brings them to disk. What is there of that step or of later ones is removed. On
 * failure nothing of the lines is in the file. */
int samples_append(const char *output_dir, int64_t step, const char *lines);

/* ============================================================================================================
 * Batch sizes, and the length of a run
 * ========================================================================================================== */

/* Sequences of the update that starts after `tokens` tokens. */
int64_t batch_size(const struct config *c, int64_t tokens);
/* Updates and tokens of the whole run, `step` updates and `token` tokens of which are done. */
void run_length(const struct config *c, int64_t step, int64_t token, int64_t *steps, int64_t *tokens);

#endif
