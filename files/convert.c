/*
 * files/convert.c - conversion of a model between Hugging Face directories, checkpoints and GGUF files.
 *
 * Hugging Face has one tensor for queries, keys and values, and one for each matrix of each expert. GGUF has three,
 * with the rows of each query and key head in another order (row 0 of the head's first half, row 0 of its second
 * half, row 1 of its first half, and so on), and one for each matrix of all experts of a layer. (For Ling 2.0 it has
 * one for queries, keys and values, too, in Hugging Face's order.) So each parameter is
 * split into ranges of rows that are one behind the other in both formats, and a conversion copies each range from
 * its location in the source to its location in the result.
 */
#define _GNU_SOURCE
#include "files/convert.h"

#include "files/base.h"
#include "files/checkpoint.h"
#include "files/config.h"
#include "files/gguf.h"
#include "files/safetensors.h"
#include "files/tensors.h"

#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct source_model {
	char path[PATH_LEN];
	struct model_config config;
	struct tensors *weights;
	json_t *config_json;       /* of a directory */
	json_t *trainer;           /* of a checkpoint */
	const json_t *metadata;    /* of a GGUF file, else NULL */
};

/* At most so many bytes, or one row, are converted and written at once, and at most so many rows. */
enum { BLOCK_BYTES = 16 << 20, BLOCK_ROWS = 8192 };

struct location {             /* of a range of rows, in one format */
	char name[MAX_NAME];       /* of the tensor */
	int64_t row, rows;         /* the first row of the range in it, and all its rows */
	int64_t stack;             /* 0; or the tensor is a stack of so many matrices, and `rows` are those of all */
};

struct row_range {            /* rows of a parameter */
	int64_t rows, cols;        /* a vector is one row */
	int head_dim;              /* of query and key heads, whose rows have another order in GGUF; else 0 */
	bool vector, lm_head;
	struct location huggingface, gguf; /* gguf without a name: the format has no place for it */
	struct location other;     /* where some Hugging Face directories have it instead; without a name: nowhere */
	const struct tensor *from;
	int64_t from_row;          /* the first row of the range in it */
	int target;                /* index of the tensor of the result */
};

struct target {               /* a tensor of the result: ranges first .. first + count - 1, one behind the other */
	const char *name;
	int64_t rows, cols, stack; /* a vector has cols 0; stack as in struct location */
	enum dtype dtype;
	int first, count;
};

struct converter {            /* a conversion under way */
	const struct source_model *source;
	const struct weighted_sum *sum; /* or NULL */
	bool to_gguf;
	struct model_config config; /* of the result */
	struct row_range *ranges;  /* [num_ranges], in the order of the result */
	struct target *targets;    /* [num_targets] */
	int num_ranges, num_targets;
	double *fold;              /* [H] what lm_head's columns are divided by, or NULL */
	struct safetensors_writer *file; /* that is being written; or NULL, and it is */
	FILE *gguf;
	bool *verified;            /* by tensor of the source: its checksum was checked, and those of all models of a sum */
	uint8_t *block;            /* converted rows */
	const uint8_t **rows;      /* [BLOCK_ROWS] where they are in the source */
	struct progress progress;
};

const char *const output_dtypes[] = {"f32", "bf16", "f16", NULL};
static const char *const huggingface_dtypes[] = {[F64] = "float64", [F32] = "float32", [F16] = "float16",
		[BF16] = "bfloat16"};

struct source_model *source_model_open(const char *path, struct model_config *config)
{
	struct source_model *s = allocate(sizeof *s);
	struct stat st;
	char trainer[PATH_LEN];
	int rc = path_copy(s->path, path);
	if (rc == 0 && stat(path, &st) < 0)
		rc = fail("%s: cannot open: %s", path, strerror(errno));
	if (rc == 0 && S_ISDIR(st.st_mode)) {
		char file[PATH_LEN];
		if (config_from_huggingface(&s->config, path) < 0 || path_join(file, path, "config.json") < 0 ||
				path_join(trainer, path, "trainer.json") < 0 || !(s->config_json = json_read(file)))
			rc = -1;
		else
			rc = path_exists(trainer);
		if (rc > 0) { /* a checkpoint, whose files have checksums */
			s->trainer = json_read(trainer);
			rc = s->trainer && trainer_check(s->trainer, trainer) == 0
				? checkpoint_check_files(path, trainer, s->trainer) : -1;
		}
		if (rc == 0)
			rc = (s->weights = tensors_open(path, "model")) ? 0 : -1;
	} else if (rc == 0) {
		s->weights = allocate(sizeof *s->weights);
		strcpy(s->weights->path, s->path);
		rc = gguf_open(s->weights, path);
		if (rc == 0) {
			s->metadata = json_object_get(s->weights->files->header, "metadata");
			rc = gguf_config(&s->config, s->weights, s->metadata);
		}
	}
	*config = s->config;
	if (rc == 0)
		return s;
	source_model_close(s);
	return NULL;
}

void source_model_close(struct source_model *s)
{
	if (!s)
		return;
	tensors_close(s->weights);
	json_decref(s->config_json);
	json_decref(s->trainer);
	free(s);
}

const json_t *source_model_trainer(const struct source_model *s)
{
	return s->trainer;
}

/* ------------------------------------------------------------------------------- what is to be copied, and where */

/* Finds the tensor of a GGUF file that holds a parameter, and, of an expert's, the expert's number, else -1. Leaves
 * `name` empty when there is none. query_key_value may have three, and is not asked for. */
static void gguf_name(char name[MAX_NAME], const char *huggingface, enum architecture architecture, int *expert)
{
	static const struct { const char *huggingface, *gguf; enum architecture since; } names[] = {
		{"input_layernorm.weight", "attn_norm.weight", BAILING_MOE},
		{"post_attention_layernorm.weight", "ffn_norm.weight", BAILING_MOE},
		{"attention.dense.weight", "attn_output.weight", BAILING_MOE},
		{"mlp.gate.weight", "ffn_gate_inp.weight", BAILING_MOE},
		{"mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight", BAILING_MOE},
		{"mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight", BAILING_MOE},
		{"mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight", BAILING_MOE},
		{"attention.query_layernorm.weight", "attn_q_norm.weight", BAILING_MOE_V2},
		{"attention.key_layernorm.weight", "attn_k_norm.weight", BAILING_MOE_V2},
		{EXPERT_BIAS, "exp_probs_b.bias", BAILING_MOE_V2},
		{"mlp.gate_proj.weight", "ffn_gate.weight", BAILING_MOE_V2},
		{"mlp.up_proj.weight", "ffn_up.weight", BAILING_MOE_V2},
		{"mlp.down_proj.weight", "ffn_down.weight", BAILING_MOE_V2},
		{"eh_proj.weight", "nextn.eh_proj.weight", BAILING_MOE_V2},
		{"enorm.weight", "nextn.enorm.weight", BAILING_MOE_V2},
		{"hnorm.weight", "nextn.hnorm.weight", BAILING_MOE_V2},
		{"final_layernorm.weight", "layer_output_norm.weight", BAILING_MOE_V2},
	};
	int layer, length = 0;
	char matrix[8];
	*expert = -1;
	*name = 0;
	if (!strcmp(huggingface, "model.word_embeddings.weight"))
		strcpy(name, "token_embd.weight");
	else if (!strcmp(huggingface, "model.norm.weight"))
		strcpy(name, "output_norm.weight");
	else if (!strcmp(huggingface, "lm_head.weight"))
		strcpy(name, "output.weight");
	else if (sscanf(huggingface, "model.layers.%d.%n", &layer, &length) == 1 && length) {
		const char *rest = huggingface + length;
		if (sscanf(rest, "mlp.experts.%d.%4[a-z]_proj.weight", expert, matrix) == 2)
			snprintf(name, MAX_NAME, "blk.%d.ffn_%s_exps.weight", layer, matrix);
		for (size_t i = 0; i < sizeof names / sizeof *names; i++)
			if (!strcmp(rest, names[i].huggingface) && architecture >= names[i].since)
				snprintf(name, MAX_NAME, "blk.%d.%s", layer, names[i].gguf);
	}
}

/* Finds where mlx-lm has a parameter, if it is elsewhere: it stacks a layer's experts, as GGUF does, and has another
 * name for the router. */
static void other_name(struct row_range *s, const char *huggingface)
{
	int layer, expert, length = 0;
	char matrix[8];
	if (sscanf(huggingface, "model.layers.%d.mlp.experts.%d.%4[a-z]_proj.weight", &layer, &expert, matrix) == 3) {
		s->other = s->gguf;
		snprintf(s->other.name, MAX_NAME, "model.layers.%d.mlp.switch_mlp.%s_proj.weight", layer, matrix);
	} else if (sscanf(huggingface, "model.layers.%d.mlp.gate.weight%n", &layer, &length) == 1 && length) {
		s->other = s->huggingface;
		snprintf(s->other.name, MAX_NAME, "model.layers.%d.mlp.gate.gate_proj.weight", layer);
	}
}

/* Splits the n parameters into ranges of rows, at most three for each. Returns the number of ranges. */
static int split_parameters(struct row_range *ranges, const struct named_tensor *params, int n,
		const struct model_config *c)
{
	int count = 0;
	for (int i = 0; i < n; i++) {
		const struct named_tensor *p = &params[i];
		struct row_range s = {.rows = p->cols ? p->rows : 1, .cols = p->cols ? p->cols : p->rows, .vector = !p->cols};
		int expert, layer, length = 0;
		s.lm_head = !strcmp(p->name, "lm_head.weight");
		s.huggingface.rows = s.rows;
		snprintf(s.huggingface.name, MAX_NAME, "%s", p->name);
		if (sscanf(p->name, "model.layers.%d.attention.query_key_value.weight%n", &layer, &length) == 1 && length) {
			const int heads[3] = {c->num_attention_heads, c->num_key_value_heads, c->num_key_value_heads};
			const bool fused = c->architecture == BAILING_MOE_V2;
			for (int part = 0; part < 3; part++) {
				s.rows = (int64_t)heads[part] * c->head_dim;
				s.gguf.rows = fused ? p->rows : s.rows;
				s.gguf.row = fused ? s.huggingface.row : 0;
				s.head_dim = part < 2 && !fused ? c->head_dim : 0;
				snprintf(s.gguf.name, MAX_NAME, "blk.%d.attn_%s.weight", layer,
						fused ? "qkv" : (const char *[]){"q", "k", "v"}[part]);
				snprintf(s.other.name, MAX_NAME, "model.layers.%d.attention.%c_proj.weight", layer, "qkv"[part]);
				s.other.rows = s.rows;
				ranges[count++] = s;
				s.huggingface.row += s.rows;
			}
			continue;
		}
		gguf_name(s.gguf.name, p->name, c->architecture, &expert);
		s.gguf.rows = s.rows;
		if (expert >= 0)
			s.gguf.stack = c->num_experts, s.gguf.rows = s.rows * c->num_experts, s.gguf.row = s.rows * expert;
		other_name(&s, p->name);
		ranges[count++] = s;
	}
	return count;
}

/* The tensor of that name. Its shape must be [rows, cols], or, of a stack of matrices, [stack, rows / stack, cols]. */
static const struct tensor *find_matrix(const struct tensors *w, const char *name, int64_t rows, int64_t cols,
		int64_t stack)
{
	if (stack)
		return tensor_of_shape(w, name, (int64_t[]){stack, rows / stack, cols}, 3);
	return tensor_of_shape(w, name, (int64_t[]){rows, cols}, 2);
}

/* The tensor of which a tensor of the source should be a copy, so that it can be left out: the head of a model that
 * ties it to the embedding, and the embedding and the head that some files have in MTP layers too. Else NULL. */
static const char *original_of(const struct source_model *s, const char *name)
{
	const char *embedding = s->metadata ? "token_embd.weight" : "model.word_embeddings.weight", *rest;
	const char *head = s->config.tie_word_embeddings ? embedding : s->metadata ? "output.weight" : "lm_head.weight";
	int layer, length = 0;
	if (s->config.tie_word_embeddings && !strcmp(name, "lm_head.weight"))
		return embedding;
	if (sscanf(name, s->metadata ? "blk.%d.nextn.%n" : "model.layers.%d.%n", &layer, &length) != 1 || !length ||
			layer < s->config.num_hidden_layers)
		return NULL;
	rest = name + length;
	return !strcmp(rest, "embed_tokens.weight") ? embedding
		: !strcmp(rest, s->metadata ? "shared_head_head.weight" : "shared_head.head.weight") ? head : NULL;
}

/* Finds the tensor of the source for each range, and checks that all tensors of the source are needed. */
static int find_sources(struct converter *p)
{
	const struct source_model *s = p->source;
	struct tensors *w = s->weights;
	int rc = 0;
	if (tensors_has(w, "model.layers.0.eh_proj.weight"))
		return fail("%s: tensor model.layers.0.eh_proj.weight: layer 0 is one for multi-token prediction; expected a "
				"whole model, with these layers behind the others, and not these layers alone", s->path);
	for (int i = 0; i < p->num_ranges && !rc && !s->config.moe_router_enable_expert_bias; i++) {
		const struct row_range *range = &p->ranges[i];
		const char *name = s->metadata ? range->gguf.name : range->huggingface.name;
		if (has_suffix(range->huggingface.name, EXPERT_BIAS) && !tensors_has(w, name)) /* it is none, and so 0 */
			rc = tensors_add_zeros(w, name, range->cols);
	}
	bool *needed = allocate(w->count);
	for (int i = 0; i < p->num_ranges && !rc; i++) {
		struct row_range *range = &p->ranges[i];
		const struct location *from = s->metadata ? &range->gguf
				: *range->other.name && tensors_has(w, range->other.name) ? &range->other : &range->huggingface;
		const char *name = from->name;
		if (range->lm_head && s->config.tie_word_embeddings)
			name = s->metadata ? "token_embd.weight" : "model.word_embeddings.weight";
		if (s->metadata && !*name)
			rc = fail("%s: %s has no place for %s", s->path, gguf_architecture(&s->config), range->huggingface.name);
		else if (range->vector)
			range->from = tensor_of_shape(w, name, &range->cols, 1);
		else
			range->from = find_matrix(w, name, from->rows, range->cols, from->stack);
		range->from_row = from->row;
		if (!rc && range->from)
			needed[range->from - w->tensors] = true;
		else
			rc = -1;
	}
	for (int i = 0; i < w->count && !rc; i++)
		if (!needed[i] && !original_of(s, w->tensors[i].name))
			rc = fail("%s: tensor %s is not a part of the model that %s describes", s->path, w->tensors[i].name,
					s->metadata ? "its metadata" : "config.json");
	free(needed);
	return rc;
}

/* Fails unless all models of a sum have the same tensors as the source: so tensor i is the same one in all of them. */
static int check_sum(const struct converter *p)
{
	const struct tensors *w = p->source->weights;
	for (int m = 0; p->sum && m < p->sum->count; m++) {
		const struct source_model *other = p->sum->models[m];
		for (int i = 0; i < w->count || i < other->weights->count; i++) {
			const struct tensor *a = i < w->count ? &w->tensors[i] : NULL,
					*b = i < other->weights->count ? &other->weights->tensors[i] : NULL;
			const int order = !a ? 1 : !b ? -1 : strcmp(a->name, b->name); /* both are sorted by name */
			if (order)
				return fail("%s: tensor %s is not in %s; expected the same tensors in both",
						order < 0 ? p->source->path : other->path, order < 0 ? a->name : b->name,
						order < 0 ? other->path : p->source->path);
			if (!has_shape(b, a->shape, a->num_dims) || b->dtype != a->dtype)
				return fail("%s: tensor %s has another shape or type than in %s; expected the same", other->path,
						b->name, p->source->path);
		}
	}
	return 0;
}

/* Gives pages of a mapped file back that are not needed any more: a model may be larger than the memory. */
static void forget_pages(const uint8_t *from, const uint8_t *end)
{
	const uintptr_t page = sysconf(_SC_PAGESIZE), first = ((uintptr_t)from + page - 1) / page * page,
			last = (uintptr_t)end / page * page;
	if (first < last)
		madvise((void *)first, last - first, MADV_DONTNEED);
}

/* Whether two tensors have the same shape, type and bytes. */
static bool same_tensor(const struct tensor *x, const struct tensor *y)
{
	const uint64_t bytes = x->end - x->begin;
	bool same = x->dtype == y->dtype && has_shape(x, y->shape, y->num_dims);
	for (uint64_t at = 0; same && at < bytes; at += BLOCK_BYTES) {
		const uint64_t n = bytes - at < BLOCK_BYTES ? bytes - at : BLOCK_BYTES;
		const uint8_t *a = tensor_bytes(x) + at, *b = tensor_bytes(y) + at;
		same = !memcmp(a, b, n);
		forget_pages(a, a + n);
		forget_pages(b, b + n);
	}
	return same;
}

/* What should be a copy of another tensor must be one. */
static int check_copies(const struct source_model *s)
{
	for (int i = 0; i < s->weights->count; i++) {
		const struct tensor *t = &s->weights->tensors[i];
		const char *original = original_of(s, t->name);
		const bool tied = !strcmp(t->name, "lm_head.weight");
		if (!original)
			continue;
		if (!same_tensor(t, tensor_find(s->weights, original)))
			return tied ? fail("%s/config.json: tie_word_embeddings is true, but lm_head.weight is there and differs "
					"from model.word_embeddings.weight; set tie_word_embeddings to false if the head was trained by "
					"itself, or remove lm_head.weight", s->path)
				: fail("%s: tensor %s differs from %s; expected a copy of it, or none, for layers for multi-token "
					"prediction share the model's embedding and head", s->path, t->name, original);
		if (tied)
			fprintf(stderr, "note: %s: lm_head.weight is left out: it equals the embedding, to which config.json ties "
					"it\n", s->path);
		else
			fprintf(stderr, "note: %s: %s is left out: it equals %s, which all layers share\n", s->path, t->name,
					original);
	}
	return 0;
}

static int by_target(const void *a, const void *b)
{
	const struct row_range *x = a, *y = b;
	if (x->target != y->target)
		return x->target < y->target ? -1 : 1;
	/* The ranges of a tensor are in the same order in both formats. */
	if (x->gguf.row != y->gguf.row)
		return x->gguf.row < y->gguf.row ? -1 : 1;
	return (x->huggingface.row > y->huggingface.row) - (x->huggingface.row < y->huggingface.row);
}

/* Gathers the ranges into the tensors of the result. asked: their type, or UNKNOWN_DTYPE for that of the source. */
static int make_targets(struct converter *p, enum dtype asked)
{
	int kept = 0;
	enum dtype common = asked;
	for (int i = 0; i < p->num_ranges; i++) {
		struct row_range *s = &p->ranges[i];
		const struct location *to = p->to_gguf ? &s->gguf : &s->huggingface;
		if (s->lm_head && !p->to_gguf && p->config.tie_word_embeddings)
			continue;
		if (!*to->name)
			return fail("%s: %s has no place for %s", p->source->path, gguf_architecture(&p->config),
					s->huggingface.name);
		int k = p->num_targets - 1;
		while (k >= 0 && strcmp(p->targets[k].name, to->name))
			k = p->to_gguf ? k - 1 : -1; /* the ranges of a parameter are side by side */
		const enum dtype own = s->from->dtype == F64 ? F32 : s->from->dtype, type = asked == UNKNOWN_DTYPE ? own
				: has_suffix(s->huggingface.name, EXPERT_BIAS) && asked != F64 ? F32 : asked;
		if (common == UNKNOWN_DTYPE)
			common = own; /* the embedding's, which is first */
		if (k < 0) {
			k = p->num_targets++;
			p->targets[k] = (struct target){.rows = s->vector ? s->cols : to->rows, .cols = s->vector ? 0 : s->cols,
					.stack = to->stack, .dtype = type};
			if (p->to_gguf)
				/* as llama.cpp wants them */
				p->targets[k].dtype = s->vector || strstr(to->name, ".ffn_gate_inp.") ? F32 : common;
		} else if (asked == UNKNOWN_DTYPE && !p->to_gguf && p->targets[k].dtype != own)
			p->targets[k].dtype = F32;
		s->target = k;
		p->ranges[kept] = *s;
		p->targets[k].name = p->to_gguf ? p->ranges[kept].gguf.name : p->ranges[kept].huggingface.name;
		p->targets[k].count++;
		kept++;
	}
	p->num_ranges = kept;
	qsort(p->ranges, kept, sizeof *p->ranges, by_target);
	for (int i = 0, k = 0; k < p->num_targets; i += p->targets[k++].count) {
		p->targets[k].first = i;
		p->targets[k].name = p->to_gguf ? p->ranges[i].gguf.name : p->ranges[i].huggingface.name;
	}
	return 0;
}

static int64_t target_bytes(const struct target *k)
{
	return k->rows * (k->cols ? k->cols : 1) * dtypes[k->dtype].size;
}

/* ------------------------------------------------------------------------------------------------ converting */

/* Converts doubles to floats that can be rounded once more, to fewer bits, with the same result as rounding the double
 * at once: where a float is not exact, it is the neighbour whose last bit is set (round to odd). */
static void round_to_odd(real *out, const uint8_t *in, int64_t n)
{
	for (int64_t i = 0; i < n; i++) {
		double d;
		memcpy(&d, in + 8 * i, 8);
		float f = (float)d;
		if (isfinite(f) && f != d && !(float_to_bits(f) & 1))
			f = nextafterf(f, d > f ? INFINITY : -INFINITY);
		out[i] = f;
	}
}

/* Converts n numbers to `dtype`. Returns whether one that was finite has become infinite. */
static bool from_real(uint8_t *out, const real *in, int64_t n, enum dtype dtype)
{
	uint32_t overflow = 0;
	if (dtype == REAL_DTYPE)
		memcpy(out, in, n * sizeof *in);
	else if (dtype == F32) /* of doubles */
		for (int64_t i = 0; i < n; i++) {
			const float f = (float)in[i];
			memcpy(out + 4 * i, &f, 4);
			overflow |= (fabsf(f) == INFINITY) & (fabs((double)in[i]) < INFINITY);
		}
	else if (dtype == F16)
		for (int64_t i = 0; i < n; i++) {
			const float f = (float)in[i];
			const uint16_t h = float_to_half(f);
			memcpy(out + 2 * i, &h, 2);
			overflow |= ((h & 0x7fff) == 0x7c00) & (fabsf(f) < INFINITY);
		}
	else
		for (int64_t i = 0; i < n; i++) {
			const float f = (float)in[i];
			const uint16_t h = float_to_bf16(f);
			memcpy(out + 2 * i, &h, 2);
			overflow |= ((h & 0x7fff) == 0x7f80) & (fabsf(f) < INFINITY);
		}
	return overflow;
}

bool convert_row(uint8_t *out, enum dtype to, const uint8_t *in, enum dtype from, int64_t n, const double *divisor)
{
	if (from == to && !divisor) {
		memcpy(out, in, n * dtypes[to].size);
		return false;
	}
	bool overflow = false;
	for (int64_t at = 0; at < n; at += CONVERT_RUN) {
		const int64_t run = n - at < CONVERT_RUN ? n - at : CONVERT_RUN;
		const uint8_t *source = in + at * dtypes[from].size;
		real values[CONVERT_RUN];
		to_real(values, source, run, from);
		if (from == F64) {
			double d;
			for (int64_t i = 0; i < run; i++)
				overflow |= !isfinite(values[i]) && (memcpy(&d, source + 8 * i, 8), isfinite(d));
			if (to != F32 && !divisor)
				round_to_odd(values, source, run);
		}
		for (int64_t i = 0; divisor && i < run; i++)
			values[i] = (real)(values[i] / divisor[at + i]);
		overflow |= from_real(out + at * dtypes[to].size, values, run, to);
	}
	return overflow;
}

/* The same tensor as `from`, a tensor of the source, in model m of a sum. */
static const struct tensor *summand(const struct converter *p, const struct tensor *from, int m)
{
	return &p->sum->models[m]->weights->tensors[from - p->source->weights->tensors];
}

/* The weighted sum of n <= CONVERT_RUN numbers, which in the source are at `in`, in tensor `from`. */
static void sum_numbers(double *sum, const struct converter *p, const struct tensor *from, const uint8_t *in,
		int64_t n)
{
	const int64_t offset = in - tensor_bytes(from);
	real values[CONVERT_RUN];
	double exact[CONVERT_RUN];
	memset(sum, 0, n * sizeof *sum);
	for (int m = 0; m < p->sum->count; m++) {
		const uint8_t *at = tensor_bytes(summand(p, from, m)) + offset;
		const double weight = p->sum->weights[m];
		if (from->dtype == F64) {
			memcpy(exact, at, n * sizeof *exact);
			for (int64_t i = 0; i < n; i++)
				sum[i] += weight * exact[i];
		} else {
			to_real(values, at, n, from->dtype);
			for (int64_t i = 0; i < n; i++)
				sum[i] += weight * (double)values[i];
		}
	}
}

/* convert_row for n numbers that in the source are at `in`, in tensor `from`; where a sum is asked for, of that. */
static bool convert_numbers(const struct converter *p, uint8_t *out, enum dtype to, const struct tensor *from,
		const uint8_t *in, int64_t n, const double *divisor)
{
	if (!p->sum)
		return convert_row(out, to, in, from->dtype, n, divisor);
	bool overflow = false;
	double sum[CONVERT_RUN];
	for (int64_t at = 0; at < n; at += CONVERT_RUN) {
		const int64_t run = n - at < CONVERT_RUN ? n - at : CONVERT_RUN;
		sum_numbers(sum, p, from, in + at * dtypes[from->dtype].size, run);
		overflow |= convert_row(out + at * dtypes[to].size, to, (const uint8_t *)sum, F64, run, NULL);
	}
	return overflow;
}

/* forget_pages for bytes from .. end of a tensor of the source, in all models of a sum. */
static void forget_numbers(const struct converter *p, const struct tensor *from, const uint8_t *begin,
		const uint8_t *end)
{
	forget_pages(begin, end);
	for (int m = 0; p->sum && m < p->sum->count; m++) {
		const uint8_t *at = tensor_bytes(summand(p, from, m));
		forget_pages(at + (begin - tensor_bytes(from)), at + (end - tensor_bytes(from)));
	}
}

/* Where in the source row r of a range is; r counts within the range, in the order of the result. */
static const uint8_t *source_row(const struct converter *p, const struct row_range *s, int64_t r)
{
	const bool from_gguf = p->source->metadata;
	const int64_t d = s->head_dim;
	if (d && from_gguf != p->to_gguf) {
		const int64_t head = r / d * d, i = r % d;
		r = head + (p->to_gguf ? i % 2 * (d / 2) + i / 2 : i % (d / 2) * 2 + i / (d / 2));
	}
	return tensor_bytes(s->from) + (s->from_row + r) * s->cols * dtypes[s->from->dtype].size;
}

/* Checks the checksum of the tensor that a range is from, once; of a sum, in all models. */
static int verify_source(struct converter *p, const struct row_range *s)
{
	bool *done = &p->verified[s->from - p->source->weights->tensors];
	const int count = *done ? 0 : p->sum ? p->sum->count : 1;
	int rc = 0;
	for (int m = 0; m < count && rc == 0; m++) {
		const struct tensor *t = p->sum ? summand(p, s->from, m) : s->from;
		rc = tensor_verify(t);
		if (t->has_crc)
			forget_pages(tensor_bytes(t), tensor_bytes(t) + (t->end - t->begin));
	}
	*done = true;
	return rc;
}

/* Reports the number of a row that is too large for its new type. */
static int fail_overflow(const struct converter *p, const struct target *k, const struct row_range *s,
		const uint8_t *row)
{
	uint8_t out[8];
	real value = 0;
	int64_t i = 0;
	for (; i < s->cols; i++) {
		const uint8_t *in = row + i * dtypes[s->from->dtype].size;
		const double *fold = p->fold && s->lm_head ? p->fold + i : NULL;
		double sum;
		if (p->sum)
			sum_numbers(&sum, p, s->from, in, 1), value = (real)sum;
		else
			to_real(&value, in, 1, s->from->dtype);
		if (convert_numbers(p, out, k->dtype, s->from, in, 1, fold))
			break;
	}
	return fail("%s: tensor %s: %g in column %lld is beyond the numbers of %s; choose another --dtype",
			s->from->file->path, s->from->name, (double)value, (long long)i, huggingface_dtypes[k->dtype]);
}

/* Computes what the columns of lm_head are divided by: their L2 norms over the whole vocabulary, plus 1e-7, as
 * NormHead does. */
static int compute_fold(struct converter *p)
{
	const struct row_range *s = p->ranges;
	while (!s->lm_head)
		s++;
	if (verify_source(p, s) < 0)
		return -1;
	p->fold = allocate(s->cols * sizeof *p->fold);
	real *values = allocate(s->cols * sizeof *values);
	const int size = dtypes[s->from->dtype].size;
	for (int64_t r = 0; r < s->rows; r++) {
		const uint8_t *row = source_row(p, s, r);
		to_real(values, row, s->cols, s->from->dtype);
		for (int64_t j = 0; j < s->cols; j++)
			p->fold[j] += (double)values[j] * values[j];
		if (r % 1024 == 0)
			forget_pages(tensor_bytes(s->from), row);
	}
	forget_pages(tensor_bytes(s->from), tensor_bytes(s->from) + s->rows * s->cols * size);
	for (int64_t j = 0; j < s->cols; j++)
		p->fold[j] = sqrt(p->fold[j]) + 1e-7;
	free(values);
	return 0;
}

/* Appends the first `bytes` bytes of the block to the result; an element has `size` bytes. */
static int append_block(struct converter *p, int64_t bytes, int size)
{
	if (p->file)
		return safetensors_append_bytes(p->file, p->block, bytes, size);
	return fwrite(p->block, 1, bytes, p->gguf) == (size_t)bytes ? 0 : -1; /* new_file_close tells why */
}

/* Writes one tensor of the result. */
static int write_target(struct converter *p, const struct target *k)
{
	const int size = dtypes[k->dtype].size;
	for (const struct row_range *s = p->ranges + k->first; s < p->ranges + k->first + k->count; s++) {
		if (verify_source(p, s) < 0)
			return -1;
		const double *fold = s->lm_head ? p->fold : NULL;
		const int64_t row_bytes = s->cols * size, fit = BLOCK_BYTES / row_bytes;
		const int64_t block_rows = fit < 1 ? 1 : fit < BLOCK_ROWS ? fit : BLOCK_ROWS;
		for (int64_t r = 0; r < s->rows; r += block_rows) {
			const int64_t n = s->rows - r < block_rows ? s->rows - r : block_rows;
			const uint8_t *first = NULL, *last = NULL;
			int64_t wrong = n; /* the first row that does not fit into the new type; n: none */
			for (int64_t i = 0; i < n; i++) {
				p->rows[i] = source_row(p, s, r + i);
				first = !first || p->rows[i] < first ? p->rows[i] : first;
				last = !last || p->rows[i] > last ? p->rows[i] : last;
			}
#pragma omp parallel for reduction(min : wrong)
			for (int64_t i = 0; i < n; i++)
				if (convert_numbers(p, p->block + i * row_bytes, k->dtype, s->from, p->rows[i], s->cols, fold))
					wrong = i < wrong ? i : wrong;
			if (wrong < n)
				return fail_overflow(p, k, s, p->rows[wrong]);
			forget_numbers(p, s->from, first, last + s->cols * dtypes[s->from->dtype].size);
			if (append_block(p, n * row_bytes, size) < 0)
				return -1;
			progress(&p->progress, n * row_bytes);
		}
	}
	return 0;
}

/* Writes targets first .. first+n-1 as a safetensors file. */
static int write_shard(struct converter *p, int first, int n, const char *path)
{
	struct named_tensor *tensors = allocate(n * sizeof *tensors);
	enum dtype *types = allocate(n * sizeof *types);
	for (int i = 0; i < n; i++) {
		const struct target *k = &p->targets[first + i];
		tensors[i] = (struct named_tensor){.name = k->name, .rows = k->rows, .cols = k->cols};
		types[i] = k->dtype;
	}
	p->file = safetensors_create_typed(path, tensors, types, n);
	int rc = p->file ? 0 : -1;
	for (int i = 0; i < n && !rc; i++)
		rc = write_target(p, &p->targets[first + i]);
	if (rc == 0)
		rc = safetensors_finish(p->file);
	else
		safetensors_abandon(p->file);
	p->file = NULL;
	free(tensors);
	free(types);
	return rc;
}

/* Copies the other files of the source's directory, or, if asked for, writes the tokenizer of a GGUF file. */
static int copy_files(const struct source_model *s, const char *target, bool tokenizer)
{
	if (s->metadata)
		return tokenizer ? gguf_to_tokenizer(s->metadata, s->path, target) : 0;
	char from[PATH_LEN], to[PATH_LEN];
	struct stat st;
	DIR *dir = opendir(s->path);
	if (!dir)
		return fail("%s: cannot list: %s", s->path, strerror(errno));
	int rc = 0;
	for (struct dirent *e; !rc && (e = readdir(dir));)
		if (is_model_file(e->d_name) || (has_suffix(e->d_name, ".md") && *e->d_name != '.')) {
			rc = path_join(from, s->path, e->d_name) < 0 || path_join(to, target, e->d_name) < 0 ? -1 : 0;
			if (rc == 0 && stat(from, &st) == 0 && S_ISREG(st.st_mode))
				rc = copy_file(from, to);
		}
	closedir(dir);
	return rc;
}

/* Writes a directory of shards of at most max_shard_size bytes of data each; a larger tensor has a shard of its
 * own. */
static int write_huggingface(struct converter *p, const struct conversion *to, const char *dir)
{
	char path[PATH_LEN];
	int *first = allocate((p->num_targets + 1) * sizeof *first), shards = 0;
	int64_t bytes = 0;
	for (int i = 0; i < p->num_targets; i++) {
		if (i && bytes + target_bytes(&p->targets[i]) > to->max_shard_size)
			first[++shards] = i, bytes = 0;
		bytes += target_bytes(&p->targets[i]);
	}
	first[++shards] = p->num_targets;
	int rc = shards > MAX_SHARDS ? fail("%s: %d shards; expected at most %d: choose a larger --max-shard-size",
			to->path, shards, MAX_SHARDS) : 0;
	for (int i = 0; i < shards && !rc; i++) {
		shard_path(path, dir, "model", i, shards);
		rc = write_shard(p, first[i], first[i + 1] - first[i], path);
	}
	free(first);
	if (rc == 0)
		rc = shards_finish(dir, "model", shards);
	json_t *base = json_copy(p->source->config_json);
	if (p->sum)
		json_object_set(base, MERGE_KEY, p->sum->description);
	if (rc == 0)
		rc = path_join(path, dir, "config.json") < 0 ? -1
			: config_write(path, &p->config, huggingface_dtypes[p->targets[0].dtype], base,
					json_object_get(p->source->metadata, "general.name"));
	json_decref(base);
	return rc < 0 || copy_files(p->source, dir, !to->no_tokenizer) < 0 ? -1 : sync_path(dir);
}

/* Writes the moments of the optimizer before the first step: zeros. */
static int write_zero_moments(const struct converter *p, const char *path)
{
	static const char *const prefixes[2] = {"exp_avg.", "exp_avg_sq."};
	const int n = p->num_targets;
	struct named_tensor *tensors = allocate(2 * n * sizeof *tensors);
	char (*names)[MAX_NAME + 16] = allocate(2 * n * sizeof *names);
	real *zeros = allocate(BLOCK_BYTES);
	for (int i = 0; i < 2 * n; i++) {
		const struct target *k = &p->targets[i % n];
		snprintf(names[i], sizeof *names, "%s%s", prefixes[i / n], k->name);
		tensors[i] = (struct named_tensor){.name = names[i], .rows = k->rows, .cols = k->cols};
	}
	struct safetensors_writer *w = safetensors_create(path, tensors, 2 * n);
	int rc = w ? 0 : -1;
	for (int i = 0; i < 2 * n && !rc; i++)
		for (int64_t left = named_tensor_size(&tensors[i]), piece; left && !rc; left -= piece) {
			piece = left < BLOCK_BYTES / (int64_t)sizeof *zeros ? left : BLOCK_BYTES / (int64_t)sizeof *zeros;
			rc = safetensors_append(w, zeros, piece);
		}
	if (rc == 0)
		rc = safetensors_finish(w);
	else
		safetensors_abandon(w);
	free(zeros);
	free(names);
	free(tensors);
	return rc;
}

/* Writes a checkpoint of step 0: moments 0, no data consumed, the routers' statistics as at the start of a run. */
static int write_checkpoint(struct converter *p, const struct conversion *to)
{
	struct config c = {.model = p->config, .data.tokenizer = "none"}; /* copy_files brings its files */
	const int layers = c.model.num_hidden_layers + c.model.num_nextn_predict_layers;
	const struct model_files others = {.config = p->source->config_json,
			.gguf_name = json_object_get(p->source->metadata, "general.name")};
	struct trainer_state s = {.files = &others, .num_layers = layers, .router_mean = allocate(layers * sizeof(double)),
			.router_std = allocate(layers * sizeof(double))};
	char dir[PATH_LEN], path[PATH_LEN];
	for (int l = 0; l < layers; l++)
		s.router_std[l] = 1;
	parent_of(c.train.output_dir, to->path);
	int rc = checkpoint_begin(&c, &s, dir);
	if (rc > 0)
		rc = fail("%s: is there already; remove it, or choose another name", to->path);
	else if (rc == 0) {
		shard_path(path, dir, "model", 0, 1);
		rc = write_shard(p, 0, p->num_targets, path);
		shard_path(path, dir, "optimizer", 0, 1);
		if (rc == 0)
			rc = write_zero_moments(p, path);
		if (rc == 0)
			rc = copy_files(p->source, dir, !to->no_tokenizer);
		if (rc < 0)
			checkpoint_abandon(dir);
		else
			rc = checkpoint_commit(&c, &s, dir, 1);
	}
	free(s.router_mean);
	free(s.router_std);
	return rc;
}

/* Writes all that is before the tensors' bytes. */
static int write_gguf_header(const struct converter *p, const struct conversion *to)
{
	const struct source_model *s = p->source;
	struct metadata m = {0};
	struct text header = {0};
	/* The name that a GGUF file brought, also by way of a config.json; else the directory's. */
	const char *name = json_string_value(json_object_get(s->metadata ? s->metadata : s->config_json, "general.name"));
	const enum dtype dtype = p->targets[0].dtype;
	if (!name || !*name)
		name = file_name(s->path);
	entry_text(&m, "general.architecture", gguf_architecture(&p->config));
	entry_text(&m, "general.type", "model");
	entry_text(&m, "general.name", *name ? name : s->path);
	entry_u32(&m, "general.file_type", dtype == F32 ? 0 : dtype == F16 ? 1 : 32);
	entry_u32(&m, "general.quantization_version", 2);
	entry_u32(&m, "general.alignment", GGUF_ALIGNMENT);
	int rc = config_to_gguf(&m, &p->config, s->path);
	if (rc == 0 && to->no_tokenizer)
		entry_text(&m, "tokenizer.ggml.model", "no_vocab");
	else if (rc == 0)
		rc = !s->metadata ? tokenizer_to_gguf(&m, s->path, s->config_json, &p->config)
			: fail("%s: a GGUF file's tokenizer is not carried to another; add --no-tokenizer, or convert to a "
				"Hugging Face directory first", s->path);
	text_append(&header, GGUF_MAGIC, 4);
	append_u32(&header, GGUF_VERSION);
	append_u64(&header, p->num_targets);
	append_u64(&header, m.count);
	if (rc == 0)
		text_append(&header, m.bytes.data, m.bytes.size);
	int64_t offset = 0;
	for (int i = 0; i < p->num_targets; i++) {
		const struct target *k = &p->targets[i];
		append_text(&header, k->name);
		append_u32(&header, k->stack ? 3 : k->cols ? 2 : 1);
		if (k->cols)
			append_u64(&header, k->cols);
		append_u64(&header, k->stack ? k->rows / k->stack : k->rows);
		if (k->stack)
			append_u64(&header, k->stack);
		append_u32(&header, k->dtype == F32 ? 0 : k->dtype == F16 ? 1 : 30);
		append_u64(&header, offset);
		offset += (target_bytes(k) + GGUF_ALIGNMENT - 1) / GGUF_ALIGNMENT * GGUF_ALIGNMENT;
	}
	if (rc == 0)
		fwrite(header.data, 1, header.size, p->gguf);
	free(header.data);
	free(m.bytes.data);
	return rc;
}

/* Zeros up to the next multiple of the alignment. */
static void align_file(FILE *f)
{
	static const char zeros[GGUF_ALIGNMENT];
	fwrite(zeros, 1, (GGUF_ALIGNMENT - ftello(f) % GGUF_ALIGNMENT) % GGUF_ALIGNMENT, f);
}

/* Writes the result as a GGUF file. */
static int write_gguf(struct converter *p, const struct conversion *to, FILE *f)
{
	p->gguf = f;
	int rc = write_gguf_header(p, to);
	for (int i = 0; i < p->num_targets && !rc; i++) {
		align_file(f);
		rc = write_target(p, &p->targets[i]);
	}
	if (rc == 0)
		align_file(f);
	return ferror(f) ? 0 : rc; /* an error of writing has no message yet: it is found again when the file is closed */
}

/* Writes the result under a temporary name in the same directory, and renames it when it is complete and on disk. */
static int write_result(struct converter *p, const struct conversion *to)
{
	char parent[PATH_LEN];
	struct new_file result;
	parent_of(parent, to->path);
	if (make_directories(parent) < 0)
		return -1;
	int rc = to->format == FORMAT_CHECKPOINT ? new_file_lock(&result, to->path)
		: to->format == FORMAT_GGUF ? new_member_begin(&result, to->path) : new_directory_begin(&result, to->path);
	if (rc < 0)
		return -1;
	const int there = path_exists(to->path); /* another process may have made it since it was looked for */
	if (there)
		rc = there < 0 ? -1 : fail("%s: is there already; remove it, or choose another name", to->path);
	else if (to->format == FORMAT_CHECKPOINT)
		rc = write_checkpoint(p, to);
	else if (to->format == FORMAT_GGUF)
		rc = write_gguf(p, to, result.stream);
	else
		rc = write_huggingface(p, to, result.temporary);
	if (to->format != FORMAT_CHECKPOINT)
		return new_file_publish(&result, rc);
	new_file_abandon(&result);
	return rc;
}

/* Checks what does not depend on the source's tensors. */
static int check_conversion(const struct source_model *s, const struct conversion *to)
{
	const char *name = file_name(to->path);
	if (!*name || !strcmp(name, ".") || !strcmp(name, ".."))
		return fail("%s: has no name for what is to be made", to->path);
	if (strlen(to->path) + 128 > PATH_LEN) /* for the files in it and its temporary name */
		return fail("%s: path longer than %d bytes", to->path, PATH_LEN - 128);
	int there = path_exists(to->path);
	if (there)
		return there < 0 ? -1 : fail("%s: is there already; remove it, or choose another name", to->path);
	if (to->format == FORMAT_CHECKPOINT && strcmp(name, "step-0000000"))
		return fail("%s: a checkpoint of a run that begins is named step-0000000; expected RUN/step-0000000, from "
				"which ling train continues with train.output_dir=RUN", to->path);
	if (to->fold_norm_head && !s->config.norm_head)
		return fail("%s: norm_head is off, so there is no NormHead to fold; perhaps it was folded before", s->path);
	if (s->weights->dropped)
		fprintf(stderr, "note: %s: %d rotary_emb.inv_freq tensors are left out: they follow from rope_theta\n",
				s->path, s->weights->dropped);
	return 0;
}

int convert_model(const struct source_model *s, const struct named_tensor *params, int n, const struct conversion *to,
		struct converted *result)
{
	struct converter p = {.source = s, .sum = to->sum, .to_gguf = to->format == FORMAT_GGUF, .config = s->config};
	enum dtype dtype = to->format == FORMAT_CHECKPOINT ? REAL_DTYPE : UNKNOWN_DTYPE;
	const bool fold = s->config.norm_head && (to->fold_norm_head || p.to_gguf);
	if (to->dtype)
		dtype = !strcmp(to->dtype, "f32") ? F32 : !strcmp(to->dtype, "f16") ? F16 : BF16;
	if (check_conversion(s, to) < 0)
		return -1;
	if (fold || p.to_gguf)
		p.config.norm_head = p.config.tie_word_embeddings = false;
	p.ranges = allocate(3 * (size_t)n * sizeof *p.ranges);
	p.targets = allocate(3 * (size_t)n * sizeof *p.targets);
	p.rows = allocate(BLOCK_ROWS * sizeof *p.rows);
	p.num_ranges = split_parameters(p.ranges, params, n, &s->config);
	int64_t widest = BLOCK_BYTES;
	for (int i = 0; i < p.num_ranges; i++)
		widest = p.ranges[i].cols * 8 > widest ? p.ranges[i].cols * 8 : widest;
	p.block = allocate(widest);
	int rc = find_sources(&p) < 0 || check_sum(&p) < 0 || check_copies(s) < 0 || make_targets(&p, dtype) < 0 ? -1 : 0;
	p.verified = allocate(s->weights->count);
	*result = (struct converted){.tensors = p.num_targets};
	for (int i = 0; i < p.num_targets && !rc; i++)
		result->bytes += target_bytes(&p.targets[i]);
	p.progress = progress_start(to->sum ? "merge" : "convert", result->bytes, 1e-6, "MB");
	if (rc == 0 && fold)
		rc = compute_fold(&p);
	if (rc == 0)
		rc = write_result(&p, to);
	progress_end(&p.progress);
	free(p.ranges);
	free(p.targets);
	free(p.verified);
	free(p.rows);
	free(p.block);
	free(p.fold);
	return rc;
}
