/*
 * commands/align_dumps.c - two dumps of training steps beside each other: the first operation whose results differ.
 */
#define _GNU_SOURCE
#include "commands/align_dumps.h"

#include "files/base.h"
#include "files/tensors.h"
#include "files/safetensors.h"
#include "commands/result.h"

#include <dirent.h>
#include <errno.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ------------------------------------------------------------------------------------ what a tensor's name says */

enum dump_pass { FORWARD, BACKWARD, WEIGHT_GRADIENT, OPTIMIZER };
static const char *const dump_pass_names[] = {"forward", "backward", "weight gradient", "optimizer"};

/* What a row (an index of the first dimension) of a tensor belongs to. */
enum rows { ROWS_OTHER, ROWS_TOKENS, ROWS_CHOICES }; /* choices: [T, k, ...], the chosen experts of a token */

struct place {                /* where in the model a tensor belongs */
	enum dump_pass pass;
	enum rows rows;
	int layer, expert;         /* -1: none */
	char operation[MAX_NAME];  /* as in the names of the trace, without the layer: "router / logits" */
};

/* Of which operation a parameter is the weight: the first row whose two texts are in its name. */
static const struct { const char *part, *of, *operation; } weights[] = {
	{"word_embeddings.", "", "embedding"}, {"lm_head.", "", "head / logits"},
	{"input_layernorm.", "", "attention / norm"}, {"post_attention_layernorm.", "", "ffn / norm"},
	{"attention.query_key_value.", "", "attention / qkv"}, {"attention.dense.", "", "attention / output"},
	{"mlp.gate.", "", "router / logits"},
	{"mlp.experts.", ".down_proj.", "experts / down"}, {"mlp.experts.", "", "experts / gate_up"},
	{"mlp.shared_experts.", ".down_proj.", "shared / down"}, {"mlp.shared_experts.", "", "shared / gate_up"},
	{"mlp.down_proj.", "", "dense / down"}, {"mlp.", "_proj.", "dense / gate_up"},
	{"model.norm.", "", "norm"}, {"final_layernorm.", "", "norm"},
	{"enorm.", "", "mtp / enorm"}, {"hnorm.", "", "mtp / hnorm"}, {"eh_proj.", "", "mtp / eh_proj"},
};

/* Removes an ending from a name of n bytes. Returns whether it was there. */
static bool cut_ending(const char *name, int *n, const char *ending)
{
	const int size = (int)strlen(ending);
	const bool there = *n > size && !memcmp(name + *n - size, ending, size);
	*n -= there ? size : 0;
	return there;
}

static struct place place_of(const char *name)
{
	struct place p = {.layer = -1, .expert = -1};
	int n = (int)strlen(name), begin = 0;
	const bool parameter = !strncmp(name, "model.", 6) || !strncmp(name, "lm_head.", 8);
	if (cut_ending(name, &n, " / gradient"))
		p.pass = parameter ? WEIGHT_GRADIENT : BACKWARD;
	else if (cut_ending(name, &n, " / moment 1") || cut_ending(name, &n, " / moment 2") ||
			cut_ending(name, &n, " / updated") || !strcmp(name, "gradient norm"))
		p.pass = OPTIMIZER;
	if (parameter) {
		const char *expert = strstr(name, ".experts.");
		sscanf(name, "model.layers.%d.", &p.layer);
		if (expert)
			sscanf(expert, ".experts.%d.", &p.expert);
		for (size_t i = 0; i < sizeof weights / sizeof *weights && !*p.operation; i++)
			if (strstr(name, weights[i].part) && strstr(name, weights[i].of))
				strcpy(p.operation, weights[i].operation);
	} else if (sscanf(name, "layer %d / %n", &p.layer, &begin) < 1)
		p.layer = -1;
	if (!*p.operation) {
		if (begin > n)
			begin = 0;
		snprintf(p.operation, sizeof p.operation, "%.*s", n - begin, name + begin);
	}
	if (!parameter)
		p.rows = p.layer >= 0 && (!strcmp(p.operation, "router / weights") || !strcmp(p.operation, "experts / gate_up")
				|| !strcmp(p.operation, "experts / down")) ? ROWS_CHOICES : ROWS_TOKENS;
	return p;
}

/* ------------------------------------------------------------------------------------------ comparing elements */

struct sums {                 /* over the elements that are finite in both, a difference being b - a */
	int64_t n;
	double abs, max, square, a_square, b_square, ab; /* of |b - a|, its largest, (b - a)^2, a^2, b^2, a b */
	int64_t at;                /* in a: the element with the largest */
	double a_at, b_at;
	int64_t nonfinite_a, nonfinite_b;
	int64_t nonfinite_unlike;  /* elements of which one is not finite, and the other is not the same */
};

static int64_t size_of(const struct tensor *t)
{
	int64_t n = 1;
	for (int i = 0; i < t->num_dims; i++)
		n *= t->shape[i];
	return n;
}

enum { BLOCK = 512 }; /* elements that are converted together */

/* Elements first .. first+n-1 of a tensor, at most BLOCK. */
static void read_elements(double *out, const struct tensor *t, int64_t first, int n)
{
	const uint8_t *at = tensor_bytes(t) + first * dtypes[t->dtype].size;
	real narrow[BLOCK];
	switch (t->dtype) {
	case F64:
		memcpy(out, at, n * sizeof *out);
		break;
	case I64:
		for (int i = 0; i < n; i++)
			out[i] = (double)load_i64(at + 8 * i);
		break;
	case I32:
		for (int i = 0; i < n; i++)
			out[i] = load_i32(at + 4 * i);
		break;
	default:
		to_real(narrow, at, n, t->dtype);
		for (int i = 0; i < n; i++)
			out[i] = narrow[i];
	}
}

/* Adds n pairs of elements; the first one of x is element `at` of a. */
static void add_pairs(struct sums *s, const double *x, const double *y, int n, int64_t at)
{
	for (int i = 0; i < n; i++) {
		const bool finite_x = isfinite(x[i]), finite_y = isfinite(y[i]);
		if (!finite_x || !finite_y) {
			s->nonfinite_a += !finite_x, s->nonfinite_b += !finite_y;
			s->nonfinite_unlike += x[i] != y[i] && !(isnan(x[i]) && isnan(y[i]));
			continue;
		}
		const double d = fabs(y[i] - x[i]);
		if (d > s->max)
			s->max = d, s->at = at + i, s->a_at = x[i], s->b_at = y[i];
		s->n++;
		s->abs += d, s->square += d * d;
		s->a_square += x[i] * x[i], s->b_square += y[i] * y[i], s->ab += x[i] * y[i];
	}
}

/* Adds n elements of a, from first_a on, and as many of b, from first_b on. */
static void add_elements(struct sums *s, const struct tensor *a, int64_t first_a, const struct tensor *b,
		int64_t first_b, int64_t n)
{
	double x[BLOCK], y[BLOCK];
	for (int64_t done = 0; done < n; done += BLOCK) {
		const int count = n - done < BLOCK ? (int)(n - done) : BLOCK;
		read_elements(x, a, first_a + done, count);
		read_elements(y, b, first_b + done, count);
		add_pairs(s, x, y, count, first_a + done);
	}
}

/* Adds the elements of an updated weight, tensors of the same size, but those whose first moments differ by more than
 * `most` of themselves. AdamW divides a moment by its own size: where that is nothing but rounding, so is the step,
 * which still has the size of the learning rate. Returns how many elements are left out. */
static int64_t add_updated(struct sums *s, const struct tensor *a, const struct tensor *b,
		const struct tensor *moment_a, const struct tensor *moment_b, double most)
{
	double x[BLOCK], y[BLOCK], m[BLOCK], n[BLOCK];
	const int64_t size = size_of(a);
	int64_t left_out = 0;
	for (int64_t first = 0; first < size; first += BLOCK) {
		const int count = size - first < BLOCK ? (int)(size - first) : BLOCK;
		read_elements(x, a, first, count);
		read_elements(y, b, first, count);
		read_elements(m, moment_a, first, count);
		read_elements(n, moment_b, first, count);
		for (int i = 0; i < count; i++) {
			if (fabs(n[i] - m[i]) > most * fabs(m[i]))
				left_out++;
			else
				add_pairs(s, &x[i], &y[i], 1, first + i);
		}
	}
	return left_out;
}

/* What JSON has no number for, since it overflowed, becomes the largest number. */
static double within_double(double x)
{
	return fmin(x, DBL_MAX);
}

/* The L2 norm of the difference over the larger one of the two norms: 0 when both are zero, 1 when one is; DBL_MAX
 * when both are beyond what a double holds. */
static double relative_difference(const struct sums *s)
{
	const double larger = fmax(s->a_square, s->b_square);
	return larger > 0 ? within_double(sqrt(s->square / larger)) : 0;
}

static double tolerance_of_type(enum dtype dtype)
{
	return dtype == F64 ? 1e-10 : dtype == F32 ? 1e-5 : dtype == F16 ? 2e-3 : dtype == BF16 ? 1e-2 : 0;
}

/* ------------------------------------------------------------------------------------------------------ routing */

enum { MOST_FLIPS = 100 };    /* flips of a layer that the result lists */

struct routing {              /* the chosen experts of a layer in both dumps */
	int layer;
	int64_t T;
	int k;
	bool *flipped;             /* [T] whether the set of the token's experts differs */
	int8_t *partner;           /* [T, k] where b has the expert that a has here; of a flipped token: nothing */
	bool reordered;            /* there are tokens with the same set in another order */
	json_t *result;            /* owned by the report */
};

struct comparison {           /* of one step */
	const struct tensors *a, *b;
	double tolerance;          /* 0: by type, times `factor` */
	double factor;
	struct routing *routing;   /* [num_routing] of the layers whose router / top-k both have */
	int num_routing;
	int64_t T;                 /* tokens of the step; 0: not known, without routing */
	bool *left_out;            /* [T] tokens that a router has sent elsewhere so far */
	int64_t num_left_out;
	json_t *report;
};

/* What passes for two tensors. */
static double tolerance_of(const struct comparison *c, const struct tensor *a, const struct tensor *b)
{
	if (a->dtype == I32 || a->dtype == I64)
		return 0;
	return c->tolerance ? c->tolerance : c->factor * fmax(tolerance_of_type(a->dtype), tolerance_of_type(b->dtype));
}

static const struct routing *find_routing(const struct comparison *c, int layer)
{
	for (int i = 0; i < c->num_routing; i++)
		if (c->routing[i].layer == layer)
			return &c->routing[i];
	return NULL;
}

/* "[2, 3]" */
static const char *shape_text(char out[160], const struct tensor *t)
{
	int n = snprintf(out, 160, "[");
	for (int i = 0; i < t->num_dims; i++)
		n += snprintf(out + n, 160 - n, "%s%lld", i ? ", " : "", (long long)t->shape[i]);
	snprintf(out + n, 160 - n, "]");
	return out;
}

/* Fails unless two tensors of a name can be compared: types that can be read, undamaged bytes, and one shape; or the
 * same elements in more dimensions, as [B, L, H] for [T, H]. */
static int check_pair(const struct tensor *a, const struct tensor *b)
{
	char shape_a[160], shape_b[160];
	const struct tensor *const both[] = {a, b};
	for (int i = 0; i < 2; i++) {
		if (both[i]->dtype < 0 || both[i]->dtype > I32)
			return fail("%s: tensor %s: dtype %.40s; expected F64, F32, F16, BF16, I64 or I32", both[i]->file->path,
					both[i]->name, both[i]->dtype_name);
		if (tensor_verify(both[i]) < 0)
			return -1;
	}
	if (a->num_dims == b->num_dims ? has_shape(a, b->shape, b->num_dims) : size_of(a) == size_of(b))
		return 0;
	return fail("tensor %s has shape %s in %s, and %s in %s; expected the same model, the same sequences of a batch, "
			"and dumps that are whole over the ranks", a->name, shape_text(shape_a, a), a->file->path,
			shape_text(shape_b, b), b->file->path);
}

/* The experts [T, k] of a top-k tensor, freed by the caller. NULL on error: one that is none of E, or there twice. */
static int32_t *read_choices(const struct tensor *t, int64_t T, int k, int64_t E)
{
	int32_t *out = allocate(T * k * sizeof *out);
	double block[BLOCK];
	for (int64_t first = 0; first < T * k; first += BLOCK) {
		const int n = T * k - first < BLOCK ? (int)(T * k - first) : BLOCK;
		read_elements(block, t, first, n);
		for (int i = 0; i < n; i++)
			out[first + i] = block[i] >= 0 && block[i] < (E ? (double)E : 0x1p31) ? (int32_t)block[i] : -1;
	}
	for (int64_t i = 0; i < T * k; i++) {
		bool twice = false;
		for (int64_t j = i / k * k; j < i; j++)
			twice = twice || out[j] == out[i];
		if (out[i] >= 0 && !twice)
			continue;
		if (twice && out[i] >= 0)
			fail("%s: tensor %s: token %lld has expert %d twice", t->file->path, t->name, (long long)(i / k), out[i]);
		else
			fail("%s: tensor %s: token %lld has no expert number at choice %d; expected whole numbers below %lld",
					t->file->path, t->name, (long long)(i / k), (int)(i % k), (long long)(E ? E : INT32_MAX));
		free(out);
		return NULL;
	}
	return out;
}

/* Whether the k chosen experts of a token have the largest of its probabilities p [E]. */
static bool are_largest(const double *p, int64_t E, const int32_t *chosen, int k)
{
	double least = INFINITY;
	for (int i = 0; i < k; i++)
		least = fmin(least, p[chosen[i]]);
	int64_t larger = 0;
	for (int64_t e = 0; e < E; e++)
		larger += p[e] > least;
	return larger < k;
}

static int place_in(const int32_t *chosen, int k, int32_t expert)
{
	for (int i = 0; i < k; i++)
		if (chosen[i] == expert)
			return i;
	return -1;
}

struct choice_counts { int64_t flipped, choices, reordered, wrong_a, wrong_b; };

/* Adds what a flipped token exchanged to the list of flips: each expert that only a has with one that only b has. p_a
 * and p_b, its probabilities [E], or NULL. The gap is how much larger, in a, the probability of a's expert is. If both
 * programs choose the largest, it is at most the sum of the differences of the two probabilities. */
static void list_flips(json_t *flips, int64_t t, const int32_t *a, const int32_t *b, int k, const double *p_a,
		const double *p_b)
{
	int next = 0;
	for (int i = 0; i < k && json_array_size(flips) < MOST_FLIPS; i++) {
		if (place_in(b, k, a[i]) >= 0)
			continue;
		while (place_in(a, k, b[next]) >= 0)
			next++;
		const int32_t from = a[i], to = b[next++];
		json_array_append_new(flips, json_pack("{s:I, s:i, s:i, s:o, s:o}", "token", (json_int_t)t, "from", (int)from,
				"to", (int)to, "gap", p_a ? result_number(p_a[from] - p_a[to]) : json_null(),
				"difference", p_a ? result_number(fabs(p_b[from] - p_a[from]) + fabs(p_b[to] - p_a[to])) :
				json_null()));
	}
}

/* Compares the choices of a layer. softmax: the probabilities that they were made from, in both; or NULL. */
static void compare_choices(struct routing *r, const int32_t *a, const int32_t *b, const struct tensor *softmax_a,
		const struct tensor *softmax_b, int64_t E, struct choice_counts *n, json_t *flips)
{
	const int k = r->k;
	double *p = allocate(2 * E * sizeof *p), *p_a = softmax_a ? p : NULL, *p_b = softmax_a ? p + E : NULL;
	for (int64_t t = 0; t < r->T; t++, a += k, b += k) {
		for (int64_t first = 0; softmax_a && first < E; first += BLOCK) {
			const int count = E - first < BLOCK ? (int)(E - first) : BLOCK;
			read_elements(p_a + first, softmax_a, t * E + first, count);
			read_elements(p_b + first, softmax_b, t * E + first, count);
		}
		int64_t exchanged = 0, moved = 0;
		for (int i = 0; i < k; i++) {
			const int at = place_in(b, k, a[i]);
			r->partner[t * k + i] = (int8_t)at;
			exchanged += at < 0;
			moved += at != i;
		}
		if (softmax_a) {
			n->wrong_a += !are_largest(p_a, E, a, k);
			n->wrong_b += !are_largest(p_b, E, b, k);
		}
		r->flipped[t] = exchanged;
		n->flipped += exchanged > 0;
		n->choices += exchanged;
		n->reordered += !exchanged && moved;
		if (exchanged)
			list_flips(flips, t, a, b, k, p_a, p_b);
	}
	r->reordered = n->reordered;
	free(p);
}

/* Reads and compares the choices of a layer, top_a and top_b being its "router / top-k". */
static int routing_init(struct routing *r, const struct comparison *c, const struct tensor *top_a,
		const struct tensor *top_b)
{
	char name[MAX_NAME];
	snprintf(name, sizeof name, "layer %d / router / softmax", r->layer);
	const struct tensor *softmax_a = tensor_find(c->a, name), *softmax_b = tensor_find(c->b, name);
	if (!softmax_a || !softmax_b)
		softmax_a = softmax_b = NULL;
	const int64_t size = size_of(top_a);
	if (top_a->num_dims < 2 || top_a->shape[top_a->num_dims - 1] < 1 || top_a->shape[top_a->num_dims - 1] > 127)
		return fail("%s: tensor %s: expected shape [T, k], with at most 127 chosen experts of a token",
				top_a->file->path, top_a->name);
	r->k = (int)top_a->shape[top_a->num_dims - 1];
	r->T = size / r->k;
	if (check_pair(top_a, top_b) < 0 || (softmax_a && check_pair(softmax_a, softmax_b) < 0))
		return -1;
	const int64_t E = softmax_a && r->T ? size_of(softmax_a) / r->T : 0;
	if (softmax_a && (softmax_a->num_dims < 2 || E < r->k || E * r->T != size_of(softmax_a)))
		return fail("%s: tensor %s: expected shape [T, E] for the %lld tokens of %s, and at least %d experts",
				softmax_a->file->path, softmax_a->name, (long long)r->T, top_a->name, r->k);
	r->flipped = allocate(r->T * sizeof *r->flipped);
	r->partner = allocate(size);
	struct choice_counts n = {0};
	struct sums softmax = {0};
	int32_t *a = read_choices(top_a, r->T, r->k, E), *b = a ? read_choices(top_b, r->T, r->k, E) : NULL;
	json_t *flips = json_array();
	if (b) {
		compare_choices(r, a, b, softmax_a, softmax_b, E, &n, flips);
		if (softmax_a)
			add_elements(&softmax, softmax_a, 0, softmax_b, 0, size_of(softmax_a));
		const bool rounding = softmax_a && !n.wrong_a && !n.wrong_b && !softmax.nonfinite_unlike &&
				relative_difference(&softmax) <= tolerance_of(c, softmax_a, softmax_b);
		r->result = json_pack("{s:i, s:I, s:i, s:I, s:I, s:I, s:I, s:I, s:b, s:b, s:O}", "layer", r->layer,
				"tokens", (json_int_t)r->T, "k", r->k, "flipped_tokens", (json_int_t)n.flipped,
				"flipped_choices", (json_int_t)n.choices, "reordered_tokens", (json_int_t)n.reordered,
				"not_largest_a", (json_int_t)n.wrong_a, "not_largest_b", (json_int_t)n.wrong_b,
				"has_softmax", softmax_a != NULL, "rounding", rounding && n.flipped, "flips", flips);
	}
	json_decref(flips);
	free(a), free(b);
	return b ? 0 : -1;
}

/* ------------------------------------------------------------------------------------------------- one tensor */

/* The tensor "NAME / moment 1" beside an updated weight "NAME / updated", of the same size; or NULL. */
static const struct tensor *moment_of(const struct tensors *w, const struct tensor *updated)
{
	char name[MAX_NAME + 32];
	int n = (int)strlen(updated->name);
	if (!cut_ending(updated->name, &n, " / updated") || n > MAX_NAME)
		return NULL;
	snprintf(name, sizeof name, "%.*s / moment 1", n, updated->name);
	const struct tensor *moment = tensor_find(w, name);
	return moment && moment->dtype >= 0 && moment->dtype <= I32 && size_of(moment) == size_of(updated) ? moment : NULL;
}

/* Compares a tensor, token by token where its rows are tokens: without those that a router has sent elsewhere, and with
 * b's experts in a's order. Returns how many tokens, or elements of an updated weight, are left out. */
static int64_t compare_tensor(const struct comparison *c, const struct place *p, const struct tensor *a,
		const struct tensor *b, double tolerance, struct sums *s)
{
	const int64_t n = size_of(a);
	const struct routing *r = p->rows == ROWS_CHOICES ? find_routing(c, p->layer) : NULL;
	const struct tensor *moment_a = moment_of(c->a, a), *moment_b = moment_a ? moment_of(c->b, b) : NULL;
	if (moment_b)
		return add_updated(s, a, b, moment_a, moment_b, 10 * tolerance);
	if (p->rows == ROWS_OTHER || !c->T || n % c->T || (!c->num_left_out && !(r && r->reordered))) {
		add_elements(s, a, 0, b, 0, n);
		return 0;
	}
	const int64_t row = n / c->T;
	for (int64_t t = 0; t < c->T; t++) {
		if (c->left_out[t])
			continue;
		if (!r || row % r->k)
			add_elements(s, a, t * row, b, t * row, row);
		else
			for (int i = 0; i < r->k; i++)
				add_elements(s, a, t * row + row / r->k * i, b, t * row + row / r->k * r->partner[t * r->k + i],
						row / r->k);
	}
	return c->num_left_out;
}

/* Where a tensor differs: how many of its rows (indices of the first dimension) or columns (of the last) do, and the
 * first and the last of them. A row differs when its difference is above the tolerance of what a row's norm is in the
 * mean. null for a tensor of one dimension. */
static json_t *differing(const struct tensor *a, const struct tensor *b, double tolerance, bool columns)
{
	if (a->num_dims < 2 || !size_of(a))
		return json_null();
	const int64_t n = size_of(a), width = a->shape[a->num_dims - 1], count = columns ? width : a->shape[0];
	double *square = allocate(count * sizeof *square), total = 0, x[BLOCK], y[BLOCK];
	for (int64_t first = 0; first < n; first += BLOCK) {
		const int size = n - first < BLOCK ? (int)(n - first) : BLOCK;
		read_elements(x, a, first, size);
		read_elements(y, b, first, size);
		for (int i = 0; i < size; i++) {
			const double d = y[i] - x[i];
			square[columns ? (first + i) % width : (first + i) / (n / count)] += isfinite(d) ? d * d
					: x[i] == y[i] ? 0 : INFINITY;
			total += isfinite(d) ? fmax(x[i] * x[i], y[i] * y[i]) : 0;
		}
	}
	int64_t differ = 0, low = -1, high = -1;
	for (int64_t i = 0; i < count; i++)
		if (square[i] > tolerance * tolerance * total / count) {
			differ++;
			low = low < 0 ? i : low;
			high = i;
		}
	free(square);
	return json_pack("{s:I, s:I, s:I, s:I}", "differ", (json_int_t)differ, "of", (json_int_t)count,
			"first", (json_int_t)low, "last", (json_int_t)high);
}

/* The result for one tensor that both have. */
static json_t *tensor_result(const struct comparison *c, const struct place *p, const struct tensor *a,
		const struct tensor *b)
{
	struct sums s = {0};
	const double tolerance = tolerance_of(c, a, b);
	const int64_t left_out = compare_tensor(c, p, a, b, tolerance, &s);
	const double relative = relative_difference(&s), norms = sqrt(s.a_square * s.b_square);
	/* The difference from a multiple of a: |b - r a|^2 = |b|^2 - r a.b for the best r */
	const double factor = s.a_square > 0 ? s.ab / s.a_square : NAN;
	const bool beyond = relative > tolerance || s.nonfinite_unlike;
	json_t *at = json_array();
	int64_t rest = s.at;
	for (int i = a->num_dims - 1; i >= 0 && a->shape[i]; rest /= a->shape[i--])
		json_array_insert_new(at, 0, json_integer(rest % a->shape[i]));
	json_t *out = json_pack("{s:o, s:s, s:o, s:o, s:o, s:I, s:f, s:f, s:o, s:f, s:f, s:o, s:f, s:f, s:o, s:I, s:I, "
			"s:I, s:I, s:b}", "name", json_cstring(a->name), "pass", dump_pass_names[p->pass],
			"operation", json_cstring(p->operation), "layer", p->layer < 0 ? json_null() : json_integer(p->layer),
			"expert", p->expert < 0 ? json_null() : json_integer(p->expert), "elements", (json_int_t)size_of(a),
			"tolerance", tolerance, "relative", relative, "cosine", result_number(norms > 0 ? s.ab / norms : NAN),
			"largest", within_double(s.max), "mean", s.n ? within_double(s.abs / s.n) : 0, "at", at, "a", s.a_at,
			"b", s.b_at,
			"factor", result_number(factor), "nonfinite_a", (json_int_t)s.nonfinite_a,
			"nonfinite_b", (json_int_t)s.nonfinite_b, "nonfinite_unlike", (json_int_t)s.nonfinite_unlike,
			"left_out", (json_int_t)left_out, "beyond", beyond);
	json_object_set_new(out, "zero_a", json_boolean(s.n && s.a_square == 0));
	json_object_set_new(out, "zero_b", json_boolean(s.n && s.b_square == 0));
	return out;
}

/* ---------------------------------------------------------------------------------------------------- one step */

/* After the choices of a layer: the tokens that it sent elsewhere are compared no more. */
static void leave_out(struct comparison *c, const struct routing *r)
{
	for (int64_t t = 0; t < r->T; t++)
		if (r->flipped[t] && !c->left_out[t])
			c->left_out[t] = true, c->num_left_out++;
}

/* Compares all tensors that both have, in a's order. */
static int compare_tensors(struct comparison *c, const struct tensor *order, int n)
{
	json_t *tensors = json_object_get(c->report, "tensors"), *first = NULL, *worst = NULL, *before = NULL;
	int64_t beyond = 0;
	bool flipped = false;      /* by rounding, so far */
	for (int i = 0; i < n; i++) {
		const struct tensor *a = &order[i], *b = tensor_find(c->b, a->name);
		const struct place p = place_of(a->name);
		if (!b)
			continue;
		if (check_pair(a, b) < 0)
			return -1;
		const struct routing *r = !strcmp(p.operation, "router / top-k") ? find_routing(c, p.layer) : NULL;
		json_t *result = tensor_result(c, &p, a, b);
		if (r) { /* numbers of experts have no norm */
			const bool differs = result_integer(r->result, "flipped_tokens") > 0,
					rounding = json_is_true(json_object_get(r->result, "rounding"));
			json_object_set(result, "routing", r->result);
			json_object_set_new(result, "relative", json_real(0));
			json_object_set_new(result, "beyond", json_boolean(differs && !rounding));
			leave_out(c, r);
			flipped = flipped || (differs && rounding);
		}
		const bool is_beyond = json_is_true(json_object_get(result, "beyond"));
		json_object_set_new(result, "after_flip", json_boolean(flipped && !r));
		if (is_beyond && !first) {
			first = result;
			if (!r) {
				const double tolerance = result_double(result, "tolerance");
				json_object_set_new(result, "rows", differing(a, b, tolerance, false));
				json_object_set_new(result, "columns", differing(a, b, tolerance, true));
			}
			json_object_set(c->report, "before_first", before ? json_object_get(before, "name") : json_null());
		}
		beyond += is_beyond;
		if (!worst || result_double(result, "relative") > result_double(worst, "relative"))
			worst = result;
		before = result;
		json_array_append_new(tensors, result);
	}
	json_object_set_new(c->report, "compared", json_integer((json_int_t)json_array_size(tensors)));
	json_object_set_new(c->report, "beyond", json_integer(beyond));
	json_object_set_new(c->report, "first", first ? json_deep_copy(first) : json_null());
	json_object_set(c->report, "worst", worst ? json_object_get(worst, "name") : json_null());
	return 0;
}

/* The tensors of w in the order of their data, which the caller frees. */
static struct tensor *in_order(const struct tensors *w)
{
	struct tensor *order = allocate(w->count * sizeof *order);
	if (w->count) {
		memcpy(order, w->tensors, w->count * sizeof *order);
		qsort(order, w->count, sizeof *order, by_offset);
	}
	return order;
}

/* The names of what only the first of the two has, in its order. */
static json_t *only_in(const struct tensor *order, int n, const struct tensors *other)
{
	json_t *names = json_array();
	for (int i = 0; i < n; i++)
		if (!tensor_find(other, order[i].name))
			json_array_append_new(names, json_cstring(order[i].name));
	return names;
}

/* Fills c->routing of all layers whose choices both have. */
static int compare_routing(struct comparison *c)
{
	json_t *list = json_object_get(c->report, "routing");
	c->routing = allocate(c->a->count * sizeof *c->routing);
	for (int i = 0; i < c->a->count; i++) {
		const struct tensor *top_a = &c->a->tensors[i], *top_b = tensor_find(c->b, top_a->name);
		const struct place p = place_of(top_a->name);
		if (!top_b || p.layer < 0 || p.pass != FORWARD || strcmp(p.operation, "router / top-k"))
			continue;
		struct routing *r = &c->routing[c->num_routing++];
		r->layer = p.layer;
		if (routing_init(r, c, top_a, top_b) < 0)
			return -1;
		if (c->T && r->T != c->T)
			return fail("%s: tensor %s is of %lld tokens, and another layer's of %lld", top_a->file->path, top_a->name,
					(long long)r->T, (long long)c->T);
		c->T = r->T;
		json_array_append_new(list, r->result);
	}
	c->left_out = allocate(c->T * sizeof *c->left_out);
	return 0;
}

/* The step of a dump, as its file says; -1 when it does not. */
static int64_t step_of(const struct tensors *w)
{
	const char *step = json_string_value(json_object_get(json_object_get(w->files->header, "__metadata__"), "step"));
	char *end;
	const long long value = step ? strtoll(step, &end, 10) : -1;
	return step && *step && !*end ? value : -1;
}

/* Compares two dumps of a step, and appends the result to `steps`. Without a tolerance, that of a type is ten times as
 * large after the first step: the weights there differ by what the steps before made of rounding. */
static int compare_step(json_t *steps, const char *path_a, const char *path_b, double tolerance)
{
	struct tensors *a = tensors_open(path_a, ""), *b = a ? tensors_open(path_b, "") : NULL;
	if (!b) {
		tensors_close(a);
		return -1;
	}
	const int64_t step = step_of(a);
	struct tensor *order_a = in_order(a), *order_b = in_order(b);
	struct comparison c = {.a = a, .b = b, .tolerance = tolerance,
			.factor = json_array_size(steps) ? 10 : 1,
			.report = json_pack("{s:o, s:[], s:[]}", "step", step < 0 ? json_null() : json_integer(step), "tensors",
			"routing")};
	json_object_set_new(c.report, "only_a", only_in(order_a, a->count, b));
	json_object_set_new(c.report, "only_b", only_in(order_b, b->count, a));
	int rc = compare_routing(&c);
	if (rc == 0)
		rc = compare_tensors(&c, order_a, a->count);
	if (rc == 0 && !json_array_size(json_object_get(c.report, "tensors")))
		rc = fail("%s and %s have no tensor of the same name; docs/align.md has the names", path_a, path_b);
	if (rc == 0)
		json_array_append(steps, c.report);
	json_decref(c.report);
	for (int i = 0; i < c.num_routing; i++)
		free(c.routing[i].flipped), free(c.routing[i].partner);
	free(c.routing), free(c.left_out);
	free(order_a), free(order_b);
	tensors_close(a), tensors_close(b);
	return rc;
}

/* --------------------------------------------------------------------------------------------------- all steps */

struct step_list { int64_t *step; size_t count, capacity; };

static int compare_steps(const void *a, const void *b)
{
	const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
	return (x > y) - (x < y);
}

/* The steps that a directory holds, in their order; the caller frees list->step. */
static int list_steps(struct step_list *list, const char *dir)
{
	DIR *d = opendir(dir);
	if (!d)
		return fail("%s: cannot open: %s", dir, strerror(errno));
	for (struct dirent *e; (e = readdir(d));) {
		long long step;
		int n = 0;
		if (sscanf(e->d_name, "step-%lld.safetensors%n", &step, &n) < 1 || !n || e->d_name[n] || step < 0)
			continue;
		list->step = grow(list->step, list->count, &list->capacity, 1, sizeof *list->step);
		list->step[list->count++] = step;
	}
	closedir(d);
	if (list->count)
		qsort(list->step, list->count, sizeof *list->step, compare_steps);
	return 0;
}

static bool is_directory(const char *path)
{
	struct stat st;
	return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

bool is_dump(const char *path)
{
	struct step_list list = {0};
	if (!is_directory(path))
		return has_suffix(path, ".safetensors");
	const bool found = list_steps(&list, path) == 0 && list.count;
	free(list.step);
	return found;
}

static bool has_step(const struct step_list *list, int64_t step)
{
	return list->count && bsearch(&step, list->step, list->count, sizeof step, compare_steps);
}

/* The steps of a list that the other one lacks. */
static json_t *steps_only_in(const struct step_list *list, const struct step_list *other)
{
	json_t *only = json_array();
	for (size_t i = 0; i < list->count; i++)
		if (!has_step(other, list->step[i]))
			json_array_append_new(only, json_integer(list->step[i]));
	return only;
}

/* DIR/step-NNNNNNN.safetensors */
static int step_path(char out[PATH_LEN], const char *dir, int64_t step)
{
	char name[64];
	snprintf(name, sizeof name, "step-%07lld.safetensors", (long long)step);
	return path_join(out, dir, name);
}

static int compare_directories(json_t *report, const char *a, const char *b, double tolerance)
{
	struct step_list of_a = {0}, of_b = {0};
	int rc = list_steps(&of_a, a) < 0 || list_steps(&of_b, b) < 0 ? -1 : 0;
	json_object_set_new(report, "steps_only_a", steps_only_in(&of_a, &of_b));
	json_object_set_new(report, "steps_only_b", steps_only_in(&of_b, &of_a));
	json_t *steps = json_object_get(report, "steps");
	for (size_t i = 0; i < of_a.count && rc == 0; i++) {
		char path_a[PATH_LEN], path_b[PATH_LEN];
		if (has_step(&of_b, of_a.step[i]))
			rc = step_path(path_a, a, of_a.step[i]) < 0 || step_path(path_b, b, of_a.step[i]) < 0 ? -1
					: compare_step(steps, path_a, path_b, tolerance);
	}
	if (rc == 0 && !json_array_size(steps))
		rc = fail("%s and %s have no step in common: the first has %zu, from %lld on, the second %zu, from %lld on", a,
				b, of_a.count, of_a.count ? (long long)of_a.step[0] : 0, of_b.count,
				of_b.count ? (long long)of_b.step[0] : 0);
	free(of_a.step), free(of_b.step);
	return rc;
}

json_t *align_dumps(const char *a, const char *b, double tolerance)
{
	json_t *report = json_pack("{s:s, s:o, s:o, s:[], s:[], s:[]}", "kind", "dumps", "a", json_cstring(a), "b",
			json_cstring(b), "steps", "steps_only_a", "steps_only_b");
	const bool dir_a = is_directory(a), dir_b = is_directory(b);
	int rc;
	if (dir_a != dir_b)
		rc = fail("%s is a directory, and %s is not: give two directories of dumps, or two files of a step each",
				dir_a ? a : b, dir_a ? b : a);
	else
		rc = dir_a ? compare_directories(report, a, b, tolerance)
				: compare_step(json_object_get(report, "steps"), a, b, tolerance);
	if (rc < 0) {
		json_decref(report);
		return NULL;
	}
	bool agree = true;
	const json_t *step;
	size_t i;
	json_array_foreach(json_object_get(report, "steps"), i, step)
		agree = agree && result_integer(step, "beyond") == 0;
	json_object_set_new(report, "agree", json_boolean(agree));
	return report;
}
