/*
 * files/convert.c - conversion of a model between Hugging Face directories, checkpoints and GGUF files.
 *
 * GGUF has the three parts of query_key_value apart, the rows of a query or key head's two halves in turn, and one tensor for a layer's
 * experts. So parameters are cut into strips, runs of rows with a home in both worlds, and a conversion takes each strip's rows from
 * where they are in the one to where they belong in the other.
 */
#define _GNU_SOURCE
#include "files/convert.h"

#include "files/base.h"
#include "files/config.h"
#include "files/tensors.h"
#include "files/safetensors.h"
#include "files/gguf.h"
#include "files/checkpoint.h"

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

struct home { char name[MAX_NAME]; int64_t row, rows, stack; }; /* first row in a tensor of so many, which are those of a stack of matrices */

struct strip {
	int64_t rows, cols;          /* a vector is one row */
	int head_dim;                /* of the heads whose rows have another order in GGUF, else 0 */
	bool vector, lm_head;
	struct home huggingface, gguf; /* the latter without a name where GGUF has no place for it */
	const struct tensor *from;
	int product;
};

struct product {               /* a tensor of the result: strips first .. first + count - 1 */
	const char *name;
	int64_t rows, cols, stack;   /* a vector has cols 0 */
	enum dtype dtype;
	int first, count;
};

struct plan {
	const struct source *source;
	bool to_gguf;
	struct model_config config;  /* of the result */
	struct strip *strips;        /* in the order of the result */
	struct product *products;
	int num_strips, num_products;
	double *fold;                /* [H] what lm_head's columns are divided by, or NULL */
	struct safetensors_writer *file; /* what is being written, or NULL and */
	FILE *gguf;
	bool *verified;              /* tensors of the source */
	uint8_t *block;
	const uint8_t **rows;        /* [BLOCK_ROWS] */
	struct progress progress;
};

static const char *const huggingface_dtypes[] = {[F64] = "float64", [F32] = "float32", [F16] = "float16", [BF16] = "bfloat16"};

struct source *source_open(const char *path, struct model_config *config)
{
	struct source *s = allocate(sizeof *s);
	struct stat st;
	char trainer[PATH_LEN];
	int rc = path_copy(s->path, path);
	if (rc == 0 && stat(path, &st) < 0)
		rc = fail("%s: cannot open: %s", path, strerror(errno));
	if (rc == 0 && S_ISDIR(st.st_mode)) {
		char file[PATH_LEN];
		rc = config_from_huggingface(&s->config, path) < 0 || path_join(file, path, "config.json") < 0 || path_join(trainer, path, "trainer.json") < 0
			|| !(s->config_json = json_read(file)) ? -1 : path_exists(trainer);
		if (rc > 0) { /* a checkpoint, whose files have checksums */
			json_t *root = json_read(trainer);
			rc = root && trainer_check(root, trainer) == 0 ? checkpoint_check_files(path, trainer, root) : -1;
			json_decref(root);
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
	source_close(s);
	return NULL;
}

void source_close(struct source *s)
{
	if (!s)
		return;
	tensors_close(s->weights);
	json_decref(s->config_json);
	free(s);
}

/* -- the plan -- */

/* Finds the tensor of a GGUF file that holds a parameter, and, of an expert's, the expert's number, else -1. Leaves `name` empty when there is
 * none. query_key_value has three, and is not asked for. */
static void gguf_name(char name[MAX_NAME], const char *huggingface, int *expert)
{
	static const struct { const char *huggingface, *gguf; } names[] = {
		{"input_layernorm.weight", "attn_norm"}, {"post_attention_layernorm.weight", "ffn_norm"}, {"attention.dense.weight", "attn_output"},
		{"mlp.gate.weight", "ffn_gate_inp"}, {"mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp"},
		{"mlp.shared_experts.up_proj.weight", "ffn_up_shexp"}, {"mlp.shared_experts.down_proj.weight", "ffn_down_shexp"},
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
			if (!strcmp(rest, names[i].huggingface))
				snprintf(name, MAX_NAME, "blk.%d.%s.weight", layer, names[i].gguf);
	}
}

/* Cuts the parameters into strips; at most three for each. Returns their number. */
static int cut_strips(struct strip *strips, const struct named_tensor *params, int n, const struct model_config *c)
{
	int count = 0;
	for (int i = 0; i < n; i++) {
		const struct named_tensor *p = &params[i];
		struct strip s = {.rows = p->cols ? p->rows : 1, .cols = p->cols ? p->cols : p->rows, .vector = !p->cols};
		int expert, layer, length = 0;
		s.lm_head = !strcmp(p->name, "lm_head.weight");
		s.huggingface.rows = s.rows;
		snprintf(s.huggingface.name, MAX_NAME, "%s", p->name);
		if (sscanf(p->name, "model.layers.%d.attention.query_key_value.weight%n", &layer, &length) == 1 && length) {
			const int heads[3] = {c->num_attention_heads, c->num_key_value_heads, c->num_key_value_heads};
			for (int part = 0; part < 3; part++) {
				s.rows = s.gguf.rows = (int64_t)heads[part] * c->head_dim;
				s.head_dim = part < 2 ? c->head_dim : 0;
				snprintf(s.gguf.name, MAX_NAME, "blk.%d.attn_%c.weight", layer, "qkv"[part]);
				strips[count++] = s;
				s.huggingface.row += s.rows;
			}
			continue;
		}
		gguf_name(s.gguf.name, p->name, &expert);
		s.gguf.rows = s.rows;
		if (expert >= 0)
			s.gguf.stack = c->num_experts, s.gguf.rows = s.rows * c->num_experts, s.gguf.row = s.rows * expert;
		strips[count++] = s;
	}
	return count;
}

/* The tensor of that name, whose shape must be [rows, cols], [rows] for cols 0, or, for a stack of matrices, [stack, rows / stack, cols]. */
static const struct tensor *find_tensor(const struct tensors *w, const char *name, int64_t rows, int64_t cols, int64_t stack)
{
	if (stack)
		return tensor_of_shape(w, name, (int64_t[]){stack, rows / stack, cols}, 3);
	return tensor_of_shape(w, name, (int64_t[]){rows, cols}, cols ? 2 : 1);
}

/* Finds each strip's tensor in the source, and checks that all of the source's tensors are needed. */
static int find_strips(struct plan *p)
{
	const struct source *s = p->source;
	const struct tensors *w = s->weights;
	bool *needed = allocate(w->count);
	int rc = 0;
	for (int i = 0; i < p->num_strips && !rc; i++) {
		struct strip *strip = &p->strips[i];
		const struct home *from = s->metadata ? &strip->gguf : &strip->huggingface;
		const char *name = strip->lm_head && s->config.tie_word_embeddings ? s->metadata ? "token_embd.weight" : "model.word_embeddings.weight"
			: from->name;
		if (s->metadata && !*name)
			rc = fail("%s: " GGUF_ARCHITECTURE " has no place for %s", s->path, strip->huggingface.name);
		else if (!(strip->from = find_tensor(w, name, strip->vector ? strip->cols : from->rows, strip->vector ? 0 : strip->cols, from->stack)))
			rc = -1;
		else
			needed[strip->from - w->tensors] = true;
	}
	for (int i = 0; i < w->count && !rc; i++)
		if (!needed[i] && !(s->config.tie_word_embeddings && !strcmp(w->tensors[i].name, "lm_head.weight")))
			rc = fail("%s: tensor %s is not a part of the model that %s describes", s->path, w->tensors[i].name,
					s->metadata ? "its metadata" : "config.json");
	free(needed);
	return rc;
}

/* Gives pages of a mapped file back that are not needed any more: a model may be larger than memory. */
static void forget_pages(const uint8_t *from, const uint8_t *end)
{
	const uintptr_t page = sysconf(_SC_PAGESIZE), first = ((uintptr_t)from + page - 1) / page * page, last = (uintptr_t)end / page * page;
	if (first < last)
		madvise((void *)first, last - first, MADV_DONTNEED);
}

/* A model whose config ties the head to the embedding may still bring a head, if it is the same. */
static int check_tie(const struct source *s)
{
	const struct tensor *head = s->config.tie_word_embeddings ? tensor_find(s->weights, "lm_head.weight") : NULL;
	if (!head || s->metadata)
		return 0;
	const struct tensor *embedding = tensor_find(s->weights, "model.word_embeddings.weight");
	const uint64_t bytes = head->end - head->begin;
	bool same = head->dtype == embedding->dtype && has_shape(head, embedding->shape, embedding->num_dims);
	for (uint64_t at = 0; same && at < bytes; at += BLOCK_BYTES) {
		const uint64_t n = bytes - at < BLOCK_BYTES ? bytes - at : BLOCK_BYTES;
		const uint8_t *a = tensor_bytes(head) + at, *b = tensor_bytes(embedding) + at;
		same = !memcmp(a, b, n);
		forget_pages(a, a + n);
		forget_pages(b, b + n);
	}
	if (!same)
		return fail("%s/config.json: tie_word_embeddings is true, but lm_head.weight is there and differs from model.word_embeddings.weight; set "
				"tie_word_embeddings to false if the head was trained by itself, or remove lm_head.weight", s->path);
	fprintf(stderr, "note: %s: lm_head.weight is left out: it equals the embedding, to which config.json ties it\n", s->path);
	return 0;
}

static int by_product(const void *a, const void *b)
{
	const struct strip *x = a, *y = b;
	if (x->product != y->product)
		return x->product < y->product ? -1 : 1;
	/* In both worlds the strips of a tensor are in the same order. */
	if (x->gguf.row != y->gguf.row)
		return x->gguf.row < y->gguf.row ? -1 : 1;
	return (x->huggingface.row > y->huggingface.row) - (x->huggingface.row < y->huggingface.row);
}

/* Gathers the strips into the tensors of the result. asked: their type, or UNKNOWN_DTYPE for the source's own. */
static int make_products(struct plan *p, enum dtype asked)
{
	int kept = 0;
	enum dtype common = asked;
	for (int i = 0; i < p->num_strips; i++) {
		struct strip *s = &p->strips[i];
		const struct home *to = p->to_gguf ? &s->gguf : &s->huggingface;
		if (s->lm_head && !p->to_gguf && p->config.tie_word_embeddings)
			continue;
		if (!*to->name)
			return fail("%s: " GGUF_ARCHITECTURE " has no place for %s", p->source->path, s->huggingface.name);
		int k = p->num_products - 1;
		while (k >= 0 && strcmp(p->products[k].name, to->name))
			k = p->to_gguf ? k - 1 : -1; /* a parameter's strips are side by side */
		const enum dtype own = s->from->dtype == F64 ? F32 : s->from->dtype;
		if (common == UNKNOWN_DTYPE)
			common = own; /* the embedding's, which is first */
		if (k < 0) {
			k = p->num_products++;
			p->products[k] = (struct product){.rows = s->vector ? s->cols : to->rows, .cols = s->vector ? 0 : s->cols, .stack = to->stack,
					.dtype = asked != UNKNOWN_DTYPE ? asked : own};
			if (p->to_gguf)
				p->products[k].dtype = s->vector || strstr(to->name, ".ffn_gate_inp.") ? F32 : common; /* as llama.cpp wants them */
		} else if (asked == UNKNOWN_DTYPE && !p->to_gguf && p->products[k].dtype != own)
			p->products[k].dtype = F32;
		s->product = k;
		p->strips[kept] = *s;
		p->products[k].name = p->to_gguf ? p->strips[kept].gguf.name : p->strips[kept].huggingface.name;
		p->products[k].count++;
		kept++;
	}
	p->num_strips = kept;
	qsort(p->strips, kept, sizeof *p->strips, by_product);
	for (int i = 0, k = 0; k < p->num_products; i += p->products[k++].count) {
		p->products[k].first = i;
		p->products[k].name = p->to_gguf ? p->strips[i].gguf.name : p->strips[i].huggingface.name;
	}
	return 0;
}

static int64_t product_bytes(const struct product *k)
{
	return k->rows * (k->cols ? k->cols : 1) * dtypes[k->dtype].size;
}

/* -- the work -- */

/* What doubles lose on the way to floats, put right: the last bit is set where something was cut off, so that rounding once more, to
 * fewer bits, rounds the double itself. */
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

bool convert_row(uint8_t *out, enum dtype to, const uint8_t *in, enum dtype from, int64_t n, const double *fold)
{
	if (from == to && !fold) {
		memcpy(out, in, n * dtypes[to].size);
		return false;
	}
	bool overflow = false;
	for (int64_t at = 0; at < n; at += RUN) {
		const int64_t run = n - at < RUN ? n - at : RUN;
		const uint8_t *source = in + at * dtypes[from].size;
		real values[RUN];
		to_real(values, source, run, from);
		if (from == F64) {
			double d;
			for (int64_t i = 0; i < run; i++)
				overflow |= !isfinite(values[i]) && (memcpy(&d, source + 8 * i, 8), isfinite(d));
			if (to != F32 && !fold)
				round_to_odd(values, source, run);
		}
		for (int64_t i = 0; fold && i < run; i++)
			values[i] = (real)(values[i] / fold[at + i]);
		overflow |= from_real(out + at * dtypes[to].size, values, run, to);
	}
	return overflow;
}

/* Row r of a strip, counted within it in the order of the result. */
static const uint8_t *strip_row(const struct plan *p, const struct strip *s, int64_t r)
{
	const bool from_gguf = p->source->metadata;
	const int64_t d = s->head_dim;
	if (d && from_gguf != p->to_gguf) {
		const int64_t head = r / d * d, i = r % d;
		r = head + (p->to_gguf ? i % 2 * (d / 2) + i / 2 : i % (d / 2) * 2 + i / (d / 2));
	}
	return tensor_bytes(s->from) + ((from_gguf ? s->gguf.row : s->huggingface.row) + r) * s->cols * dtypes[s->from->dtype].size;
}

/* Checks the checksum of a strip's tensor, once. */
static int verify_strip(struct plan *p, const struct strip *s)
{
	bool *done = &p->verified[s->from - p->source->weights->tensors];
	int rc = *done ? 0 : tensor_verify(s->from);
	if (!*done && s->from->has_crc)
		forget_pages(tensor_bytes(s->from), tensor_bytes(s->from) + (s->from->end - s->from->begin));
	*done = true;
	return rc;
}

/* Names the number that is too large for its new type. */
static int fail_overflow(const struct plan *p, const struct product *k, const struct strip *s, const uint8_t *row)
{
	uint8_t out[8];
	real value = 0;
	int64_t i = 0;
	for (; i < s->cols; i++) {
		const uint8_t *in = row + i * dtypes[s->from->dtype].size;
		const double *fold = p->fold && s->lm_head ? p->fold + i : NULL;
		to_real(&value, in, 1, s->from->dtype);
		if (convert_row(out, k->dtype, in, s->from->dtype, 1, fold))
			break;
	}
	return fail("%s: tensor %s: %g in column %lld is beyond the numbers of %s; choose another --dtype", s->from->file->path, s->from->name,
			(double)value, (long long)i, huggingface_dtypes[k->dtype]);
}

/* Computes what the columns of lm_head are divided by: their norms over the whole vocabulary, with what NormHead adds. */
static int compute_fold(struct plan *p)
{
	const struct strip *s = p->strips;
	while (!s->lm_head)
		s++;
	if (verify_strip(p, s) < 0)
		return -1;
	p->fold = allocate(s->cols * sizeof *p->fold);
	real *values = allocate(s->cols * sizeof *values);
	const int size = dtypes[s->from->dtype].size;
	for (int64_t r = 0; r < s->rows; r++) {
		const uint8_t *row = strip_row(p, s, r);
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

static int append_block(struct plan *p, int64_t bytes, int size)
{
	if (p->file)
		return safetensors_append_bytes(p->file, p->block, bytes, size);
	return fwrite(p->block, 1, bytes, p->gguf) == (size_t)bytes ? 0 : -1; /* file_close tells why */
}

/* Writes one tensor of the result. */
static int write_product(struct plan *p, const struct product *k)
{
	const int size = dtypes[k->dtype].size;
	for (const struct strip *s = p->strips + k->first; s < p->strips + k->first + k->count; s++) {
		if (verify_strip(p, s) < 0)
			return -1;
		const double *fold = s->lm_head ? p->fold : NULL;
		const int64_t row_bytes = s->cols * size, fit = BLOCK_BYTES / row_bytes;
		const int64_t block_rows = fit < 1 ? 1 : fit < BLOCK_ROWS ? fit : BLOCK_ROWS;
		for (int64_t r = 0; r < s->rows; r += block_rows) {
			const int64_t n = s->rows - r < block_rows ? s->rows - r : block_rows;
			const uint8_t *first = NULL, *last = NULL;
			int64_t wrong = -1;
			for (int64_t i = 0; i < n; i++) {
				p->rows[i] = strip_row(p, s, r + i);
				first = !first || p->rows[i] < first ? p->rows[i] : first;
				last = !last || p->rows[i] > last ? p->rows[i] : last;
			}
#pragma omp parallel for
			for (int64_t i = 0; i < n; i++)
				if (convert_row(p->block + i * row_bytes, k->dtype, p->rows[i], s->from->dtype, s->cols, fold))
#pragma omp atomic write
					wrong = i;
			if (wrong >= 0)
				return fail_overflow(p, k, s, p->rows[wrong]);
			forget_pages(first, last + s->cols * dtypes[s->from->dtype].size);
			if (append_block(p, n * row_bytes, size) < 0)
				return -1;
			progress(&p->progress, n * row_bytes);
		}
	}
	return 0;
}

/* Writes products first .. first+n-1 as a safetensors file. */
static int write_shard(struct plan *p, int first, int n, const char *path)
{
	struct named_tensor *tensors = allocate(n * sizeof *tensors);
	enum dtype *types = allocate(n * sizeof *types);
	for (int i = 0; i < n; i++) {
		const struct product *k = &p->products[first + i];
		tensors[i] = (struct named_tensor){.name = k->name, .rows = k->rows, .cols = k->cols};
		types[i] = k->dtype;
	}
	p->file = safetensors_create_typed(path, tensors, types, n);
	int rc = p->file ? 0 : -1;
	for (int i = 0; i < n && !rc; i++)
		rc = write_product(p, &p->products[first + i]);
	if (rc == 0)
		rc = safetensors_finish(p->file);
	else
		safetensors_abandon(p->file);
	p->file = NULL;
	free(tensors);
	free(types);
	return rc;
}

/* Whether a file of a Hugging Face directory goes along as it is: what tells of the tokenizer, of generation, of the model's classes. */
static bool is_carried(const char *name)
{
	static const char *const endings[] = {".json", ".txt", ".jinja", ".model", ".py", ".md"};
	static const char *const others[] = {"config.json", "trainer.json"};
	if (*name == '.' || has_suffix(name, ".index.json"))
		return false;
	for (int i = 0; i < 2; i++)
		if (!strcmp(name, others[i]))
			return false;
	for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
		if (has_suffix(name, endings[i]))
			return true;
	return !strcmp(name, "LICENSE");
}

/* Brings the other files of the source's directory, or, if asked for, the tokenizer of a GGUF file. */
static int carry_files(const struct source *s, const char *target, bool tokenizer)
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
		if (is_carried(e->d_name)) {
			rc = path_join(from, s->path, e->d_name) < 0 || path_join(to, target, e->d_name) < 0 ? -1 : 0;
			if (rc == 0 && stat(from, &st) == 0 && S_ISREG(st.st_mode))
				rc = copy_file(from, to);
		}
	closedir(dir);
	return rc;
}

/* A directory of shards of at most max_shard_size bytes of data each, but for a larger tensor alone. */
static int write_huggingface(struct plan *p, const struct conversion *to, const char *dir)
{
	char path[PATH_LEN];
	int *first = allocate((p->num_products + 1) * sizeof *first), parts = 0;
	int64_t bytes = 0;
	for (int i = 0; i < p->num_products; i++) {
		if (i && bytes + product_bytes(&p->products[i]) > to->max_shard_size)
			first[++parts] = i, bytes = 0;
		bytes += product_bytes(&p->products[i]);
	}
	first[++parts] = p->num_products;
	int rc = parts > MAX_SHARDS ? fail("%s: %d shards; expected at most %d: choose a larger --max-shard-size", to->path, parts, MAX_SHARDS) : 0;
	for (int part = 0; part < parts && !rc; part++) {
		shard_path(path, dir, "model", part, parts);
		rc = write_shard(p, first[part], first[part + 1] - first[part], path);
	}
	free(first);
	if (rc == 0)
		rc = shards_finish(dir, "model", parts);
	if (rc == 0)
		rc = path_join(path, dir, "config.json") < 0 ? -1
			: config_write(path, &p->config, huggingface_dtypes[p->products[0].dtype], p->source->config_json);
	return rc < 0 || carry_files(p->source, dir, !to->no_tokenizer) < 0 ? -1 : sync_path(dir);
}

/* The moments of a checkpoint that no step has been made from. */
static int write_zero_moments(const struct plan *p, const char *path)
{
	static const char *const prefixes[2] = {"exp_avg.", "exp_avg_sq."};
	const int n = p->num_products;
	struct named_tensor *tensors = allocate(2 * n * sizeof *tensors);
	char (*names)[MAX_NAME + 16] = allocate(2 * n * sizeof *names);
	real *zeros = allocate(BLOCK_BYTES);
	for (int i = 0; i < 2 * n; i++) {
		const struct product *k = &p->products[i % n];
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

/* A checkpoint of step 0: no moments, no data seen, routers' statistics as at the start of a run. */
static int write_checkpoint(struct plan *p, const struct conversion *to)
{
	struct config c = {.model = p->config, .data.tokenizer = "none"}; /* its files are carried over */
	const int layers = c.model.num_hidden_layers;
	struct trainer_state s = {.num_layers = layers, .router_mean = allocate(layers * sizeof(double)), .router_std = allocate(layers * sizeof(double))};
	char dir[PATH_LEN], path[PATH_LEN];
	for (int l = 0; l < layers; l++)
		s.router_std[l] = 1;
	parent_of(c.train.output_dir, to->path);
	int rc = checkpoint_begin(&c, &s, dir);
	if (rc > 0)
		rc = fail("%s: is there already; remove it, or choose another name", to->path);
	else if (rc == 0) {
		shard_path(path, dir, "model", 0, 1);
		rc = write_shard(p, 0, p->num_products, path);
		shard_path(path, dir, "optimizer", 0, 1);
		if (rc == 0)
			rc = write_zero_moments(p, path);
		if (rc == 0)
			rc = carry_files(p->source, dir, !to->no_tokenizer);
		if (rc < 0)
			checkpoint_abandon(dir);
		else
			rc = checkpoint_commit(&c, &s, dir, 1);
	}
	free(s.router_mean);
	free(s.router_std);
	return rc;
}

/* All that stands before the tensors' bytes. */
static int write_gguf_header(const struct plan *p, const struct conversion *to)
{
	const struct source *s = p->source;
	struct metadata m = {0};
	struct text header = {0};
	const char *name = file_name(s->path);
	const enum dtype dtype = p->products[0].dtype;
	entry_text(&m, "general.architecture", GGUF_ARCHITECTURE);
	entry_text(&m, "general.type", "model");
	entry_text(&m, "general.name", *name ? name : s->path);
	entry_u32(&m, "general.file_type", dtype == F32 ? 0 : dtype == F16 ? 1 : 32);
	entry_u32(&m, "general.quantization_version", 2);
	entry_u32(&m, "general.alignment", GGUF_ALIGNMENT);
	int rc = config_to_gguf(&m, &p->config, s->path);
	if (rc == 0 && to->no_tokenizer)
		entry_text(&m, "tokenizer.ggml.model", "no_vocab");
	else if (rc == 0)
		rc = s->metadata ? fail("%s: a GGUF file's tokenizer is not carried to another; add --no-tokenizer, or convert to a Hugging Face directory "
				"first", s->path) : tokenizer_to_gguf(&m, s->path, s->config_json, p->config.vocab_size);
	text_append(&header, GGUF_MAGIC, 4);
	append_u32(&header, GGUF_VERSION);
	append_u64(&header, p->num_products);
	append_u64(&header, m.count);
	if (rc == 0)
		text_append(&header, m.bytes.data, m.bytes.size);
	int64_t offset = 0;
	for (int i = 0; i < p->num_products; i++) {
		const struct product *k = &p->products[i];
		append_text(&header, k->name);
		append_u32(&header, k->stack ? 3 : k->cols ? 2 : 1);
		if (k->cols)
			append_u64(&header, k->cols);
		append_u64(&header, k->stack ? k->rows / k->stack : k->rows);
		if (k->stack)
			append_u64(&header, k->stack);
		append_u32(&header, k->dtype == F32 ? 0 : k->dtype == F16 ? 1 : 30);
		append_u64(&header, offset);
		offset += (product_bytes(k) + GGUF_ALIGNMENT - 1) / GGUF_ALIGNMENT * GGUF_ALIGNMENT;
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

static int write_gguf(struct plan *p, const struct conversion *to, const char *path)
{
	FILE *f = p->gguf = file_create(path);
	int rc = f ? write_gguf_header(p, to) : -1;
	for (int i = 0; i < p->num_products && !rc; i++) {
		align_file(f);
		rc = write_product(p, &p->products[i]);
	}
	if (rc == 0)
		align_file(f);
	return !f ? -1 : file_close(f, path, ferror(f) ? 0 : rc);
}

/* Makes what was planned, under a temporary name in the same directory, and gives it its own when it is whole and on disk. */
static int write_plan(struct plan *p, const struct conversion *to)
{
	char parent[PATH_LEN], name[PATH_LEN], temporary[PATH_LEN];
	parent_of(parent, to->path);
	if (make_directories(parent) < 0)
		return -1;
	if (to->format == FORMAT_CHECKPOINT)
		return write_checkpoint(p, to);
	snprintf(name, sizeof name, ".tmp-%s", file_name(to->path));
	if (path_join(temporary, parent, name) < 0)
		return -1;
	directory_remove(temporary); /* what an interrupted conversion left */
	int rc = 0;
	if (to->format == FORMAT_GGUF)
		rc = write_gguf(p, to, temporary);
	else if (mkdir(temporary, 0777) < 0)
		return fail("%s: cannot create directory: %s", temporary, strerror(errno));
	else
		rc = write_huggingface(p, to, temporary);
	if (rc == 0 && rename(temporary, to->path) < 0)
		rc = fail("%s: cannot rename to %s: %s", temporary, to->path, strerror(errno));
	if (rc < 0)
		directory_remove(temporary);
	return rc < 0 ? -1 : sync_path(parent);
}

/* What can be told of a conversion before the source's tensors are looked at. */
static int check_conversion(const struct source *s, const struct conversion *to)
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
		return fail("%s: a checkpoint of a run that begins is named step-0000000; expected RUN/step-0000000, from which ling train continues with "
				"train.output_dir=RUN", to->path);
	if (to->fold_norm_head && !s->config.norm_head)
		return fail("%s: norm_head is off, so there is no NormHead to fold; perhaps it was folded before", s->path);
	if (s->weights->dropped)
		fprintf(stderr, "note: %s: %d rotary_emb.inv_freq tensors are left out: they follow from rope_theta\n", s->path, s->weights->dropped);
	return 0;
}

int convert_model(const struct source *s, const struct named_tensor *params, int n, const struct conversion *to, struct converted *result)
{
	struct plan p = {.source = s, .to_gguf = to->format == FORMAT_GGUF, .config = s->config};
	enum dtype dtype = to->format == FORMAT_CHECKPOINT ? REAL_DTYPE : UNKNOWN_DTYPE;
	const bool fold = s->config.norm_head && (to->fold_norm_head || p.to_gguf);
	if (to->dtype)
		dtype = !strcmp(to->dtype, "f32") ? F32 : !strcmp(to->dtype, "f16") ? F16 : BF16;
	if (check_conversion(s, to) < 0)
		return -1;
	if (fold || p.to_gguf)
		p.config.norm_head = p.config.tie_word_embeddings = false;
	p.strips = allocate(3 * (size_t)n * sizeof *p.strips);
	p.products = allocate(3 * (size_t)n * sizeof *p.products);
	p.verified = allocate(s->weights->count);
	p.rows = allocate(BLOCK_ROWS * sizeof *p.rows);
	p.num_strips = cut_strips(p.strips, params, n, &s->config);
	int64_t widest = BLOCK_BYTES;
	for (int i = 0; i < p.num_strips; i++)
		widest = p.strips[i].cols * 8 > widest ? p.strips[i].cols * 8 : widest;
	p.block = allocate(widest);
	int rc = find_strips(&p) < 0 || check_tie(s) < 0 || make_products(&p, dtype) < 0 ? -1 : 0;
	*result = (struct converted){.tensors = p.num_products};
	for (int i = 0; i < p.num_products && !rc; i++)
		result->bytes += product_bytes(&p.products[i]);
	p.progress = progress_start("convert", result->bytes, 1e-6, "MB");
	if (rc == 0 && fold)
		rc = compute_fold(&p);
	if (rc == 0)
		rc = write_plan(&p, to);
	progress_end(&p.progress);
	free(p.strips);
	free(p.products);
	free(p.verified);
	free(p.rows);
	free(p.block);
	free(p.fold);
	return rc;
}
