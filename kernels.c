/*
 * kernels.c - arithmetic on arrays. Pointers, sizes and scalars in, arrays out: no files, no ranks, no state.
 *
 * Each operation is a pair x_forward / x_backward. In a backward function dX stands for d(loss)/dX; gradients of
 * activations are written, gradients of weights are written or added to as `accumulate` says, so that the first
 * micro-batch of a step needs no pass that clears them.
 *
 * Threads: OpenMP. Each piece of work is computed by one thread, and partial sums are added in a fixed order: no result depends on
 * scheduling, nor on the number of threads.
 */
#define _GNU_SOURCE
#include "kernels.h"

#include <assert.h>
#include <cblas.h>
#undef I /* complex.h's, which cblas.h brings along */
#include <math.h>
#include <omp.h>
#include <string.h>
#include <strings.h>

/* ============================================================================================================
 * Small things that every kernel uses
 * ========================================================================================================== */

static inline int64_t min64(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

static inline int64_t max64(int64_t a, int64_t b)
{
	return a > b ? a : b;
}

/* e^x to about 1 ulp in a form that compilers vectorise: x = n ln2 + r, e^r by a polynomial, 2^n by its bits. Infinities
 * and subnormals come out right and NaN stays NaN. */
static inline real exponential(real x)
{
#ifdef LING_DOUBLE
	return exp(x);
#else
	const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer that stands in the low bits */
	x = x > 89.0f ? 89.0f : x;
	x = x < -104.0f ? -104.0f : x;
	float shifted = x * 1.44269504f + magic;
	float n = shifted - magic;
	float r = x - n * 0.693359375f + n * 2.12194440e-4f;
	float p = 1.0f / 5040;
	p = p * r + 1.0f / 720;
	p = p * r + 1.0f / 120;
	p = p * r + 1.0f / 24;
	p = p * r + 1.0f / 6;
	p = p * r + 0.5f;
	p = p * r + 1.0f;
	p = p * r + 1.0f;
	uint32_t bits, half, rest;
	memcpy(&bits, &shifted, 4);
	int32_t exponent = (int32_t)(bits - 0x4b400000u);
	half = (uint32_t)((exponent >> 1) + 127) << 23; /* 2^n in two factors, since n may be -150 or 128 */
	rest = (uint32_t)(exponent - (exponent >> 1) + 127) << 23;
	float a, b;
	memcpy(&a, &half, 4);
	memcpy(&b, &rest, 4);
	return p * a * b;
#endif
}

/* Elements of work from which on it pays to wake the other threads: generation computes one row at a time. */
enum { WORTH_THREADS = 1 << 14 };

static real largest(const real *x, int64_t n)
{
	real max = x[0];
	#pragma omp simd reduction(max : max)
	for (int64_t i = 0; i < n; i++)
		max = x[i] > max ? x[i] : max;
	return max;
}

/* out[i] = e^(x[i] - max), and their sum; out may be x. */
static real exponentials(real *out, const real *x, real max, int64_t n)
{
	real sum = 0;
	#pragma omp simd reduction(+ : sum)
	for (int64_t i = 0; i < n; i++) {
		out[i] = exponential(x[i] - max);
		sum += out[i];
	}
	return sum;
}

/* ============================================================================================================
 * The matrix product under every operation: C [m, n] (+)= alpha A B, on one core
 *
 * Three loops around a register tile (Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication"; names as in
 * Van Zee & van de Geijn 2015, "BLIS"): a block of B, KC terms by NC columns, and one of A, MC rows by KC terms, are packed into
 * panels that a tile reads from end to end; a tile of MR x NR results stays in registers for KC terms.
 * An element of C is a sum over k in ascending order, one chain of multiply-adds in each KC terms, wherever it stands in a matrix: it does not
 * depend on the other rows and columns, nor on how a product is cut into pieces, nor on the number of threads.
 * ========================================================================================================== */

/* The register tile: MR rows of two vectors, with what the processor has registers for. */
#if defined __AVX512F__
enum { VECTOR_BYTES = 64, MR = 14 };
#elif defined __AVX__
enum { VECTOR_BYTES = 32, MR = 6 };
#elif defined __aarch64__
enum { VECTOR_BYTES = 16, MR = 12 };
#else
enum { VECTOR_BYTES = 16, MR = 6 };
#endif
enum { LANES = VECTOR_BYTES / sizeof(real), NR = 2 * LANES };
/* Blocks: NR columns of B fill the first-level cache, a block of A fits the second, and both together a thread's stack (1.4 MB; 1.8 MB with the
 * lines of a product of a few rows). */
enum { KC = 384 * sizeof(float) / sizeof(real), MC = 8 * MR, NC = 768 };

typedef real vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));

/* clang has to be told that vectors wider than its liking are meant (it splits those of AVX-512, and runs out of registers), and that a loop is
 * to be unrolled before it decides what stays in registers. */
#ifdef __clang__
#define ALWAYS_INLINE static inline __attribute__((always_inline, min_vector_width(8 * VECTOR_BYTES)))
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* A whose rows are this far apart is read where it stands, without packing: a constant, so that it becomes part of an instruction's address.
 * Attention's scores are laid out so. */
enum { DIRECT = 256 };

/* c [rows, NR] (+)= alpha a b: row i's term p of A is a[i * a_row + p * a_term], b a panel of B [terms, NR]. The first three are constants
 * where this is called. */
ALWAYS_INLINE void tile_product(const int rows, const int a_row, const int a_term, int64_t terms, const real *restrict a,
		const real *restrict b, real alpha, bool accumulate, real *restrict c, int64_t ldc)
{
	vector sum[MR][2] = {0};
	for (int64_t p = 0, row = 0; p < terms; row++) {
		if (row < rows) { /* the results' lines are fetched meanwhile, a row every few terms: more at once would hold up a's and b's */
			__builtin_prefetch(c + row * ldc, 1);
			__builtin_prefetch(c + row * ldc + LANES, 1);
		}
		for (const int64_t end = min64(p + 8, terms); p < end; p++) {
			const vector b0 = *(const vector *)(b + p * NR), b1 = *(const vector *)(b + p * NR + LANES);
			UNROLL
			for (int i = 0; i < rows; i++) {
				const vector x = a[i * a_row + p * a_term] - (vector){0};
				sum[i][0] += x * b0;
				sum[i][1] += x * b1;
			}
		}
	}
	UNROLL
	for (int i = 0; i < rows; i++)
		UNROLL
		for (int j = 0; j < 2; j++) {
			vector *out = (vector *)(c + i * ldc + j * LANES);
			if (accumulate)
				*out += alpha * sum[i][j];
			else
				*out = alpha * sum[i][j];
		}
}

/* The same for any number of rows up to MR, so that the last rows of a matrix cost no more than they are, and for A in a panel
 * [terms, MR] or where it stands, DIRECT apart, as it is or transposed. */
#if defined __AVX512F__ || defined __aarch64__
#define EACH_ROW_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#else
#define EACH_ROW_COUNT(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif
#define CASE(n) case n: tile_product(n < MR ? n : MR, A_ROW, A_TERM, terms, a, b, alpha, accumulate, c, ldc); break;
typedef void tile_function(int rows, int64_t terms, const real *a, const real *b, real alpha, bool accumulate, real *c, int64_t ldc);
#define DEFINE_TILE(name) \
	static __attribute__((noinline)) void name(int rows, int64_t terms, const real *a, const real *b, real alpha, bool accumulate, \
			real *c, int64_t ldc) \
	{ \
		switch (rows) { \
			EACH_ROW_COUNT(CASE) \
		} \
	}
#define A_ROW 1
#define A_TERM MR
DEFINE_TILE(tile_of_panel)
#undef A_TERM
#define A_TERM DIRECT
DEFINE_TILE(tile_of_columns)
#undef A_ROW
#undef A_TERM
#define A_ROW DIRECT
#define A_TERM 1
DEFINE_TILE(tile_of_rows)

/* A square of LANES x LANES elements, transposed in registers: interleaving the first half of the rows with the second, once for
 * each bit of a row's number. */
ALWAYS_INLINE void transpose_square(vector row[LANES])
{
#if defined __AVX512F__ && !defined LING_DOUBLE
#define LOW_HALVES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_HALVES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined __AVX512F__ || (defined __AVX__ && !defined LING_DOUBLE)
#define LOW_HALVES 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_HALVES 4, 12, 5, 13, 6, 14, 7, 15
#elif defined __AVX__ || !defined LING_DOUBLE
#define LOW_HALVES 0, 4, 1, 5
#define HIGH_HALVES 2, 6, 3, 7
#else
#define LOW_HALVES 0, 2
#define HIGH_HALVES 1, 3
#endif
	vector next[LANES];
	for (int bit = 1; bit < LANES; bit *= 2) {
		UNROLL
		for (int i = 0; i < LANES / 2; i++) {
			next[2 * i] = __builtin_shufflevector(row[i], row[i + LANES / 2], LOW_HALVES);
			next[2 * i + 1] = __builtin_shufflevector(row[i], row[i + LANES / 2], HIGH_HALVES);
		}
		UNROLL
		for (int i = 0; i < LANES; i++)
			row[i] = next[i];
	}
}

/* An operand as it is stored: row r at data + r * stride, or, with a list of rows, at data + row[r] * stride; multiplied as it is or transposed.
 * Of a weight in bfloat16, data is not real; and if `second` is not NULL, rows from `split` on stand there. Both are transposed. */
struct matrix {
	const void *data;
	int64_t stride;
	bool transpose;
	const int32_t *row;
	bool bf16;
	const void *second;
	int64_t split;
};

static struct matrix as_is(const real *data, int64_t stride)
{
	return (struct matrix){.data = data, .stride = stride};
}

static struct matrix transposed(const real *data, int64_t stride)
{
	return (struct matrix){.data = data, .stride = stride, .transpose = true};
}

/* Where element `col` of stored row r is. */
static inline const void *stored_at(const struct matrix *x, int64_t r, int64_t col)
{
	const bool second = x->second && r >= x->split;
	r = second ? r - x->split : x->row ? x->row[r] : r;
	return (const char *)(second ? x->second : x->data) + (r * x->stride + col) * (x->bf16 ? sizeof(uint16_t) : sizeof(real));
}

/* LANES bfloat16: the upper halves of floats. */
typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t words __attribute__((vector_size(LANES * 4)));
typedef float floats __attribute__((vector_size(LANES * 4)));

static inline float widen(uint16_t half)
{
	const uint32_t bits = (uint32_t)half << 16;
	float x;
	memcpy(&x, &bits, sizeof x);
	return x;
}

/* out = n elements that stand at `from`. */
static inline void read_elements(real *out, const void *from, bool bf16, int64_t n)
{
	if (!bf16) {
		memcpy(out, from, n * sizeof *out);
		return;
	}
	const uint16_t *half = from;
	int64_t i = 0;
	for (; i + LANES <= n; i += LANES)
		*(vector *)(out + i) = __builtin_convertvector((floats)(__builtin_convertvector(*(const halves *)(half + i), words) << 16), vector);
	for (; i < n; i++)
		out[i] = widen(half[i]);
}

/* Packs `lines` rows of A or columns of B, `terms` long, into panels of `width` (MR or NR, a constant where this is called):
 * out[panel][term][line], the last panel filled up with zeros. Lines are stored rows from (line, term) on; `lines_across`: terms are.
 * `out` has room for LANES more elements. */
ALWAYS_INLINE void pack(real *out, const int width, const struct matrix *x, bool lines_across, int64_t line, int64_t term, int64_t lines,
		int64_t terms)
{
	if (lines_across) {
		const int64_t whole = lines / width * width;
		for (int64_t p = 0; p < terms; p++) {
			const real *from = stored_at(x, term + p, line), *ahead = stored_at(x, term + min64(p + 8, terms - 1), line);
			real *to = out + p * width;
			for (int64_t i = 0; i < whole; i += width, to += width * terms) {
				__builtin_prefetch(ahead + i); /* the processor does not foresee the stride */
				memcpy(to, from + i, width * sizeof *out);
			}
			for (int i = 0; whole < lines && i < width; i++)
				to[i] = whole + i < lines ? from[whole + i] : 0;
		}
		return;
	}
	for (int64_t first = 0; first < lines; first += width, out += width * terms) {
		const real *from[MR + NR], *ahead[MR + NR]; /* of each line of this panel and of the next */
		const int n = (int)min64(width, lines - first);
		UNROLL
		for (int i = 0; i < width; i++) {
			from[i] = stored_at(x, line + min64(first + i, lines - 1), term);
			ahead[i] = stored_at(x, line + min64(first + width + i, lines - 1), term);
		}
		int64_t p = 0;
		for (; p + LANES <= terms; p += LANES)
			/* From the last lines to the first: what a square writes beyond `width` is written again. */
			for (int s = (width - 1) / LANES * LANES; s >= 0; s -= LANES) {
				vector square[LANES];
				UNROLL
				for (int i = 0; i < LANES; i++) {
					square[i] = s + i < n ? *(const vector *)(from[s + i] + p) : (vector){0};
					if (s + i < width)
						__builtin_prefetch(ahead[s + i] + p);
				}
				transpose_square(square);
				UNROLL
				for (int i = 0; i < LANES; i++)
					*(vector *)(out + (p + i) * width + s) = square[i];
			}
		for (; p < terms; p++)
			for (int i = 0; i < width; i++)
				out[p * width + i] = i < n ? from[i][p] : 0;
	}
}

static void pack_a(real *out, const struct matrix *a, int64_t row, int64_t term, int64_t rows, int64_t terms)
{
	pack(out, MR, a, a->transpose, row, term, rows, terms);
}

/* Stored rows first .. first + rows - 1 as real, from column `col` on, apart by LINES_STRIDE (no multiple of a cache's sets): they are read from end to
 * end, as the processor foresees it. */
enum { LINES = 4 * KC, LINES_STRIDE = LINES + LANES };
static void read_lines(real *out, const struct matrix *x, int64_t first, int64_t col, int64_t rows, int64_t cols)
{
	for (int64_t i = 0; i < rows; i++)
		read_elements(out + i * LINES_STRIDE, stored_at(x, first + i, col), x->bf16, cols);
}

static void pack_b(real *out, const struct matrix *b, int64_t col, int64_t term, int64_t cols, int64_t terms)
{
	if (!b->bf16) {
		pack(out, NR, b, !b->transpose, col, term, cols, terms);
		return;
	}
	real lines[NR * LINES_STRIDE];
	const struct matrix panel = transposed(lines, LINES_STRIDE);
	for (int64_t j = 0; j < cols; j += NR) {
		read_lines(lines, b, col + j, term, min64(NR, cols - j), terms);
		pack(out + j * terms, NR, &panel, false, 0, 0, min64(NR, cols - j), terms);
	}
}

/* What is to be done with rows first .. first + rows - 1 of a product as soon as they are whole, while they are in the core's cache. */
struct finish {
	void (*rows)(const struct finish *f, int64_t first, int64_t rows);
	int64_t first; /* of the product in the arrays below */
	real *out[3];
	const real *in[2];
	int64_t width;
};

static bool use_openblas; /* set once by kernels_init */

static void openblas_gemm(int64_t m, int64_t n, int64_t k, real alpha, struct matrix a, struct matrix b, bool accumulate,
		real *c, int64_t ldc, const struct finish *finish)
{
#ifdef LING_DOUBLE
	cblas_dgemm
#else
	cblas_sgemm
#endif
		(CblasRowMajor, a.transpose ? CblasTrans : CblasNoTrans, b.transpose ? CblasTrans : CblasNoTrans, m, n, k, alpha, a.data,
		a.stride, b.data, b.stride, accumulate, c, ldc);
	if (finish)
		finish->rows(finish, finish->first, m);
}

/* One tile's results; the last columns by way of a whole tile. */
static void tile_results(tile_function *tile, int rows, int64_t cols, int64_t terms, const real *a, const real *b, real alpha, bool add, real *c,
		int64_t ldc)
{
	real edge[MR * NR];
	if (cols >= NR) {
		tile(rows, terms, a, b, alpha, add, c, ldc);
		return;
	}
	tile(rows, terms, a, b, 1, false, edge, NR);
	for (int y = 0; y < rows; y++)
		for (int x = 0; x < cols; x++)
			c[y * ldc + x] = add ? c[y * ldc + x] + alpha * edge[y * NR + x] : alpha * edge[y * NR + x];
}

/* A product of up to MR rows. It is bound by memory: B is read once, and each of its panels used as soon as it is packed, in the first-level cache. */
static void few_rows_gemm(int64_t m, int64_t n, int64_t k, real alpha, const struct matrix *a, const struct matrix *b, bool accumulate, real *c,
		int64_t ldc)
{
	real a_panels[MR * LINES + LANES] __attribute__((aligned(64))), b_panel[NR * KC + LANES] __attribute__((aligned(64)));
	real lines[NR * LINES_STRIDE] __attribute__((aligned(64)));
	const struct matrix panel = transposed(lines, LINES_STRIDE);
	for (int64_t from = 0; from == 0 || from < k; from += LINES) {
		const int64_t end = min64(k, from + LINES);
		for (int64_t p = from; p < end; p += KC)
			pack_a(a_panels + (p - from) * MR, a, 0, p, m, min64(KC, end - p));
		for (int64_t col = 0; col < n; col += NR) {
			const int64_t cols = min64(NR, n - col);
			if (b->transpose)
				read_lines(lines, b, col, from, cols, end - from);
			for (int64_t p = from; p == 0 || p < end; p += KC) {
				const int64_t terms = min64(KC, end - p);
				if (b->transpose)
					pack_b(b_panel, &panel, 0, p - from, cols, terms);
				else
					pack_b(b_panel, b, col, p, cols, terms);
				tile_results(tile_of_panel, (int)m, cols, terms, a_panels + (p - from) * MR, b_panel, alpha, accumulate || p > 0, c + col, ldc);
			}
		}
	}
}

static void ling_gemm(int64_t m, int64_t n, int64_t k, real alpha, struct matrix a, struct matrix b, bool accumulate, real *c,
		int64_t ldc, const struct finish *finish)
{
	if (m <= MR) {
		few_rows_gemm(m, n, k, alpha, &a, &b, accumulate, c, ldc);
		if (finish)
			finish->rows(finish, finish->first, m);
		return;
	}
	const bool direct = a.stride == DIRECT && !a.row;
	tile_function *const tile = !direct ? tile_of_panel : a.transpose ? tile_of_columns : tile_of_rows;
	real a_panels[MC * KC + LANES] __attribute__((aligned(64))), b_panels[NC * KC + LANES] __attribute__((aligned(64)));
	for (int64_t col = 0; col < n; col += NC) {
		const int64_t cols = min64(NC, n - col);
		for (int64_t p = 0; p == 0 || p < k; p += KC) {
			const int64_t terms = min64(KC, k - p);
			pack_b(b_panels, &b, col, p, cols, terms);
			for (int64_t row = 0; row < m; row += MC) {
				const int64_t rows = min64(MC, m - row);
				const real *a_tile = a_panels;
				int64_t a_step = terms; /* from a row of A to the next */
				if (direct) {
					a_tile = (const real *)a.data + (a.transpose ? row + p * DIRECT : row * DIRECT + p);
					a_step = a.transpose ? 1 : DIRECT;
				} else
					pack_a(a_panels, &a, row, p, rows, terms);
				for (int64_t j = 0; j < cols; j += NR)
					for (int64_t i = 0; i < rows; i += MR)
						tile_results(tile, (int)min64(MR, rows - i), cols - j, terms, a_tile + i * a_step, b_panels + j * terms, alpha,
								accumulate || p > 0, c + (row + i) * ldc + col + j, ldc);
				if (finish && col + cols == n && p + terms == k)
					finish->rows(finish, finish->first + row, rows);
			}
		}
	}
}

/* C [m, n] (+)= alpha A B with A [m, k] and B [k, n], row-major, rows of C apart by ldc; `finish` may be NULL. */
static void gemm_finish(int64_t m, int64_t n, int64_t k, real alpha, struct matrix a, struct matrix b, bool accumulate, real *c, int64_t ldc,
		const struct finish *finish)
{
	if (m > 0 && n > 0)
		(use_openblas && !a.row && !b.row && !b.bf16 && !b.second ? openblas_gemm : ling_gemm)(m, n, k, alpha, a, b, accumulate, c, ldc, finish);
}

static void gemm(int64_t m, int64_t n, int64_t k, real alpha, struct matrix a, struct matrix b, bool accumulate, real *c, int64_t ldc)
{
	gemm_finish(m, n, k, alpha, a, b, accumulate, c, ldc, NULL);
}

/* ============================================================================================================
 * The machine: OpenBLAS as the yardstick and the second opinion, memory, threads
 * ========================================================================================================== */

const char *blas_core(void)
{
	return openblas_get_corename();
}

/* How far a kernel of that name uses the processor: 0 SSE, 1 AVX, 2 AVX2 with FMA, 3 AVX-512 or a name that is not known here, which a newer
 * library may have chosen for good reason. */
static int core_level(const char *name)
{
	static const char *const levels[3][16] = {
		{"Prescott", "Core2", "Penryn", "Dunnington", "Nehalem", "Atom", "Nano", "Katmai", "Coppermine", "Northwood", "Banias", "Athlon",
			"Opteron", "Opteron_SSE3", "Barcelona", "Bobcat"},
		{"Sandybridge", "Bulldozer", "Piledriver", "Steamroller"},
		{"Haswell", "Zen", "Excavator"},
	};
	for (int level = 0; level < 3; level++)
		for (int i = 0; i < 16 && levels[level][i]; i++)
			if (!strcasecmp(levels[level][i], name))
				return level;
	return 3;
}

const char *blas_better_core(void)
{
	const char *best = NULL;
#ifdef __x86_64__
	if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
			__builtin_cpu_supports("avx512vl"))
		best = "SkylakeX";
	else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
		best = "Haswell";
#endif
	return best && core_level(blas_core()) < core_level(best) ? best : NULL; /* SkylakeX counts as 3 */
}

const char *cpu_features(char out[256])
{
	*out = 0;
#ifdef __x86_64__
	static const char *const names[] = {"sse4.2", "avx", "fma", "avx2", "avx512f", "avx512bw", "avx512dq", "avx512vl"};
	const bool has[] = {__builtin_cpu_supports("sse4.2"), __builtin_cpu_supports("avx"), __builtin_cpu_supports("fma"),
			__builtin_cpu_supports("avx2"), __builtin_cpu_supports("avx512f"), __builtin_cpu_supports("avx512bw"),
			__builtin_cpu_supports("avx512dq"), __builtin_cpu_supports("avx512vl")};
	for (size_t i = 0, n = 0; i < sizeof has / sizeof *has; i++)
		if (has[i])
			n += snprintf(out + n, 256 - n, "%s%s", n ? " " : "", names[i]);
#endif
	return out;
}

double worse(double a, double b)
{
	return a > b || isnan(a) ? a : b;
}

double product_error(bool openblas)
{
	/* The three forms that training uses, at sizes that meet the kernels' main loops and their edges. */
	enum { M = 67, N = 101, K = 389 };
	static const bool forms[3][2] = {{false, true}, {false, false}, {true, false}};
	real a[M * K], b[N * K], c[M * N];
	double worst = 0;
	random_normal(a, M * K, &(struct random_stream){.seed = 1}, 0);
	random_normal(b, N * K, &(struct random_stream){.seed = 2}, 0);
	for (int f = 0; f < 3; f++) {
		const bool ta = forms[f][0], tb = forms[f][1];
		double difference = 0, norm = 0;
		(openblas ? openblas_gemm : ling_gemm)(M, N, K, 1, ta ? transposed(a, M) : as_is(a, K), tb ? transposed(b, K) : as_is(b, N), false, c, N,
				NULL);
		for (int i = 0; i < M; i++)
			for (int j = 0; j < N; j++) {
				double sum = 0;
				for (int k = 0; k < K; k++)
					sum += (double)a[ta ? k * M + i : i * K + k] * b[tb ? j * K + k : k * N + j];
				difference += (c[i * N + j] - sum) * (c[i * N + j] - sum);
				norm += sum * sum;
			}
		worst = worse(worst, sqrt(difference / norm));
	}
	return worst;
}

double memory_bandwidth(real *out, const real *in, int64_t n)
{
	double best = INFINITY;
	for (int i = 0; i < 5; i++) {
		double start = omp_get_wtime();
		copy_array(out, in, n);
		best = fmin(best, omp_get_wtime() - start);
	}
	return 2.0 * n * sizeof *out / best;
}

/* A library that was built with OpenMP changes the number of ling's own threads too. */
static void set_blas_threads(int n)
{
	const int threads = omp_get_max_threads();
	openblas_set_num_threads(n);
	omp_set_num_threads(threads);
}

double blas_roof(real *a, real *b, real *c, int64_t n, int repeats, int threads)
{
	double best = INFINITY;
	const int own = omp_get_max_threads();
	set_blas_threads(threads);
	omp_set_num_threads(threads);
	for (int i = 0; i < repeats; i++) {
		double start = omp_get_wtime();
		openblas_gemm(n, n, n, 1, as_is(a, n), transposed(b, n), false, c, n, NULL);
		best = fmin(best, omp_get_wtime() - start);
	}
	set_blas_threads(1);
	omp_set_num_threads(own);
	return best;
}

void kernels_init(bool openblas)
{
	use_openblas = openblas;
	set_blas_threads(1);
}

int kernels_threads(void)
{
	return omp_get_max_threads();
}

/* ============================================================================================================
 * Plain arrays
 * ========================================================================================================== */

/* Sums over rows are split into this many blocks, whatever the number of threads, and added in block order. */
enum { SUM_BLOCKS = 64 };

int64_t row_sum_scratch(int64_t N)
{
	return SUM_BLOCKS * N;
}

/* out[j] (+)= sum over b of partial[b, j]. */
static void add_partial_rows(real *out, const real *partial, int64_t N, bool accumulate)
{
	#pragma omp parallel for
	for (int64_t j = 0; j < N; j++) {
		double sum = accumulate ? out[j] : 0;
		for (int b = 0; b < SUM_BLOCKS; b++)
			sum += partial[b * N + j];
		out[j] = (real)sum;
	}
}

double sum_of_squares(const real *x, int64_t n)
{
	double partial[SUM_BLOCKS];
	#pragma omp parallel for schedule(dynamic)
	for (int b = 0; b < SUM_BLOCKS; b++) {
		double sum = 0;
		#pragma omp simd reduction(+ : sum)
		for (int64_t i = n * b / SUM_BLOCKS; i < n * (b + 1) / SUM_BLOCKS; i++)
			sum += (double)x[i] * x[i];
		partial[b] = sum;
	}
	double sum = 0;
	for (int b = 0; b < SUM_BLOCKS; b++)
		sum += partial[b];
	return sum;
}

void copy_array(real *out, const real *in, int64_t n)
{
	#pragma omp parallel for if (n > WORTH_THREADS)
	for (int b = 0; b < SUM_BLOCKS; b++) {
		int64_t begin = n * b / SUM_BLOCKS, end = n * (b + 1) / SUM_BLOCKS;
		memcpy(out + begin, in + begin, (end - begin) * sizeof *out);
	}
}

void scale_columns(real *out, const real *x, const real *scale, int64_t T, int64_t N)
{
	#pragma omp parallel for if (T * N > WORTH_THREADS)
	for (int64_t t = 0; t < T; t++)
		for (int64_t j = 0; j < N; j++)
			out[t * N + j] = x[t * N + j] * scale[j];
}

/* ============================================================================================================
 * Matrix products: plain and grouped
 *
 * A grouped product is one product for each expert over that expert's contiguous rows; a plain one has a single group.
 * Every group is cut into tiles, and the tiles of all groups share the cores: many experts with few rows each, or one with
 * all of them, keep every core busy alike. Within a tile one product runs over the whole inner dimension.
 * ========================================================================================================== */

/* How a product with `groups` outputs of about [rows, cols] is cut: tiles as large as possible, since each packs its own copy of its
 * inputs, but enough of them for all threads. */
struct tiles { int64_t rows, cols; };

static int64_t count_pieces(int64_t n, int64_t size)
{
	return (n + size - 1) / size;
}

/* Where piece i of n elements in pieces of about `size` begins: equal pieces, rounded to whole register tiles. */
static int64_t piece(int64_t i, int64_t n, int64_t size)
{
	const int64_t pieces = count_pieces(n, size);
	return i >= pieces ? n : min64(n, (n * i / pieces + NR - 1) / NR * NR);
}

static struct tiles choose_tiles(int64_t groups, int64_t rows, int64_t cols)
{
	enum { LARGEST = 1024, SMALLEST = 64, PER_THREAD = 2, MANY_PER_THREAD = 8 };
	const int threads = omp_get_max_threads();
	if (groups > 1)
		rows += rows / 4; /* so that a group a little larger than the mean is not cut */
	int64_t row_pieces = max64(count_pieces(rows, LARGEST), 1), col_pieces = count_pieces(cols, NC);
	for (;;) {
		const struct tiles tile = {max64(rows / row_pieces + 1, SMALLEST), cols / col_pieces + 1};
		const int64_t tiles = groups * row_pieces * col_pieces;
		/* Equal tiles, a few for each thread, should come out even; of many, the dynamic order takes care. */
		if ((tiles >= PER_THREAD * threads && tiles % threads == 0) || tiles >= MANY_PER_THREAD * threads ||
				(tile.rows <= SMALLEST && tile.cols <= SMALLEST))
			return tile;
		if (tile.rows > tile.cols)
			row_pieces++;
		else
			col_pieces++;
	}
}

/* Rows first.. of x [., stride] from column `col` on, or of those that `row` lists. */
static struct matrix rows_from(const real *x, int64_t stride, const int32_t *row, int64_t first, int64_t col, bool transpose)
{
	return (struct matrix){.data = x + (row ? 0 : first * stride) + col, .stride = stride, .transpose = transpose, .row = row ? row + first : NULL};
}

void stack_weights(struct weight *out, const real *w, int G, int64_t size)
{
	for (int g = 0; g < G; g++)
		out[g] = (struct weight){.data = w + g * size};
}

/* Columns col .. of a product with a weight of [N, inner], transposed, or of [inner, N], as it is. */
static struct matrix weight_columns(const struct weight *w, int64_t col, int64_t inner, int64_t N, bool transpose)
{
	struct matrix x = {.data = w->data, .stride = transpose ? inner : N, .transpose = transpose, .bf16 = w->bf16};
	assert(transpose || (!w->bf16 && !w->second));
	if (w->second && col < N / 2) {
		x.second = w->second;
		x.split = N / 2 - col;
	} else if (w->second) {
		x.data = w->second;
		col -= N / 2;
	}
	x.data = (const char *)x.data + col * (transpose ? inner : 1) * (w->bf16 ? sizeof(uint16_t) : sizeof(real));
	return x;
}

/* out [R, cols] (+)= in [R, inner] times its group's matrix: the transpose of w[g] [cols, inner], or w[g] [inner, cols] as it is.
 * `finish` is NULL or done for all rows: by each tile for its own where tiles hold whole rows, else by all threads at the end. */
static void grouped_rows(real *out, const real *in, const int32_t *row, const struct weight *w, bool transpose, const int64_t *offset, int G,
		int64_t inner, int64_t cols, bool accumulate, const struct finish *finish)
{
	int groups = 0; /* that have rows */
	for (int g = 0; g < G; g++)
		groups += offset[g + 1] > offset[g];
	if (groups == 0)
		return;
	const struct tiles tile = choose_tiles(groups, offset[G] / groups, cols);
	const bool finish_tiles = finish && count_pieces(cols, tile.cols) == 1;
	#pragma omp parallel if (offset[G] * inner * cols / LANES > WORTH_THREADS)
	#pragma omp single
	for (int g = 0; g < G; g++) {
		const int64_t rows = offset[g + 1] - offset[g];
		for (int64_t i = 0; i < count_pieces(rows, tile.rows); i++)
			for (int64_t j = 0; j < count_pieces(cols, tile.cols); j++) {
				const int64_t t = offset[g] + piece(i, rows, tile.rows), t_end = offset[g] + piece(i + 1, rows, tile.rows);
				const int64_t n = piece(j, cols, tile.cols), n_end = piece(j + 1, cols, tile.cols);
				#pragma omp task
				{
					struct finish tile_finish = {0};
					if (finish_tiles) {
						tile_finish = *finish;
						tile_finish.first = t;
					}
					gemm_finish(t_end - t, n_end - n, inner, 1, rows_from(in, inner, row, t, 0, false),
							weight_columns(&w[g], n, inner, cols, transpose), accumulate, out + t * cols + n, cols,
							finish_tiles ? &tile_finish : NULL);
				}
			}
	}
	if (finish && !finish_tiles) {
		enum { ROWS = 16 };
		#pragma omp parallel for if (offset[G] * cols > WORTH_THREADS)
		for (int64_t r = 0; r < offset[G]; r += ROWS)
			finish->rows(finish, r, min64(ROWS, offset[G] - r));
	}
}

void grouped_matmul_forward(real *y, const real *x, const int32_t *row, const struct weight *w, const int64_t *offset, int G, int64_t K, int64_t N,
		bool accumulate)
{
	grouped_rows(y, x, row, w, true, offset, G, K, N, accumulate, NULL);
}

void grouped_matmul_backward_input(real *dx, const real *dy, const int32_t *row, const real *w, const int64_t *offset, int G, int64_t K,
		int64_t N, bool accumulate)
{
	struct weight weights[G];
	stack_weights(weights, w, G, N * K);
	grouped_rows(dx, dy, row, weights, false, offset, G, N, K, accumulate, NULL);
}

void grouped_matmul_backward_weight(real *dw, const real *dy, const int32_t *dy_row, const real *x, const int32_t *x_row,
		const int64_t *offset, int G, int64_t K, int64_t N, bool accumulate)
{
	const struct tiles tile = choose_tiles(G, N, K);
	#pragma omp parallel
	#pragma omp single
	for (int g = 0; g < G; g++) {
		const int64_t first = offset[g], rows = offset[g + 1] - first;
		if (rows == 0 && accumulate)
			continue;
		for (int64_t i = 0; i < count_pieces(N, tile.rows); i++)
			for (int64_t j = 0; j < count_pieces(K, tile.cols); j++) {
				const int64_t n = piece(i, N, tile.rows), n_end = piece(i + 1, N, tile.rows);
				const int64_t k = piece(j, K, tile.cols), k_end = piece(j + 1, K, tile.cols);
				#pragma omp task /* of an expert that no token chose the gradient is exactly zero */
				gemm(n_end - n, k_end - k, rows, 1, rows_from(dy, N, dy_row, first, n, true), rows_from(x, K, x_row, first, k, false),
						accumulate, dw + (g * N + n) * K + k, K);
			}
	}
}

void matmul_forward(real *y, const real *x, const struct weight *w, const real *bias, int64_t T, int64_t K, int64_t N, bool accumulate)
{
	grouped_matmul_forward(y, x, NULL, w, (int64_t[]){0, T}, 1, K, N, accumulate);
	if (bias) {
		#pragma omp parallel for if (T * N > WORTH_THREADS)
		for (int64_t t = 0; t < T; t++)
			for (int64_t j = 0; j < N; j++)
				y[t * N + j] += bias[j];
	}
}

void matmul_backward_input(real *dx, const real *dy, const real *w, int64_t T, int64_t K, int64_t N, bool accumulate)
{
	grouped_matmul_backward_input(dx, dy, NULL, w, (int64_t[]){0, T}, 1, K, N, accumulate);
}

void matmul_backward_weight(real *dw, const real *dy, const real *x, int64_t T, int64_t K, int64_t N, bool accumulate)
{
	grouped_matmul_backward_weight(dw, dy, NULL, x, NULL, (int64_t[]){0, T}, 1, K, N, accumulate);
}

void bias_backward(real *dbias, const real *dy, int64_t T, int64_t N, bool accumulate, real *scratch)
{
	#pragma omp parallel for schedule(dynamic)
	for (int b = 0; b < SUM_BLOCKS; b++) {
		real *partial = scratch + b * N;
		memset(partial, 0, N * sizeof *partial);
		for (int64_t t = T * b / SUM_BLOCKS; t < T * (b + 1) / SUM_BLOCKS; t++)
			for (int64_t j = 0; j < N; j++)
				partial[j] += dy[t * N + j];
	}
	add_partial_rows(dbias, scratch, N, accumulate);
}

/* ============================================================================================================
 * Embedding
 * ========================================================================================================== */

static const void *weight_at(const struct weight *w, int64_t element)
{
	return (const char *)w->data + element * (w->bf16 ? sizeof(uint16_t) : sizeof(real));
}

void embedding_forward(real *out, const int32_t *token, const struct weight *w, int64_t first, int64_t T, int64_t H, int64_t V)
{
	#pragma omp parallel for if (T * H > WORTH_THREADS)
	for (int64_t t = 0; t < T; t++) {
		const int64_t v = token[t] - first;
		if (v >= 0 && v < V)
			read_elements(out + t * H, weight_at(w, v * H), w->bf16, H);
		else
			memset(out + t * H, 0, H * sizeof *out);
	}
}

void embedding_backward(real *dw, const int32_t *token, const real *dout, int64_t first, int64_t T, int64_t H, int64_t V, bool accumulate)
{
	if (!accumulate) {
		#pragma omp parallel for
		for (int64_t v = 0; v < V; v++)
			memset(dw + v * H, 0, H * sizeof *dw);
	}
	/* Tokens repeat, so the cores share the columns, not the tokens: each sum keeps the order of the tokens. */
	const int64_t slice = 32;
	#pragma omp parallel for
	for (int64_t col = 0; col < H; col += slice)
		for (int64_t t = 0; t < T; t++) {
			const int64_t v = token[t] - first;
			if (v < 0 || v >= V)
				continue;
			for (int64_t j = col; j < min64(col + slice, H); j++)
				dw[v * H + j] += dout[t * H + j];
		}
}

/* ============================================================================================================
 * RMSNorm: y = w x / sqrt(mean(x^2) + eps)   (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)
 * ========================================================================================================== */

void rmsnorm_forward(real *out, real *rstd, const real *x, const real *w, int64_t T, int64_t H, double eps)
{
	#pragma omp parallel for if (T * H > WORTH_THREADS)
	for (int64_t t = 0; t < T; t++) {
		const real *row = x + t * H;
		double sum = 0; /* in float, values beyond 1e19 would vanish instead of showing */
		#pragma omp simd reduction(+ : sum)
		for (int64_t j = 0; j < H; j++)
			sum += (double)row[j] * row[j];
		rstd[t] = (real)(1 / sqrt(sum / H + eps));
		for (int64_t j = 0; j < H; j++)
			out[t * H + j] = w[j] * row[j] * rstd[t];
	}
}

void rmsnorm_backward(real *dx, real *dw, const real *dout, const real *x, const real *w, const real *rstd, int64_t T, int64_t H,
		bool accumulate, real *scratch)
{
	/* With n = x rstd and g = dout w:  dx = rstd (g - n mean(g n)),  dw = sum over tokens of dout n. */
	#pragma omp parallel for schedule(dynamic)
	for (int b = 0; b < SUM_BLOCKS; b++) {
		real *partial = scratch + b * H;
		memset(partial, 0, H * sizeof *partial);
		for (int64_t t = T * b / SUM_BLOCKS; t < T * (b + 1) / SUM_BLOCKS; t++) {
			const real *x_row = x + t * H, *dout_row = dout + t * H;
			real *dx_row = dx + t * H, r = rstd[t], dot = 0;
			#pragma omp simd reduction(+ : dot)
			for (int64_t j = 0; j < H; j++)
				dot += dout_row[j] * w[j] * x_row[j];
			real mean = dot * r * r / H;
			for (int64_t j = 0; j < H; j++) {
				dx_row[j] += r * (dout_row[j] * w[j] - x_row[j] * mean);
				partial[j] += dout_row[j] * x_row[j] * r;
			}
		}
	}
	add_partial_rows(dw, scratch, H, accumulate);
}

/* ============================================================================================================
 * Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotate-half form: elements i and i + d/2 of a head turn by
 * the angle  position * theta^(-2i/d)
 * ========================================================================================================== */

void rope_table(real *table, int64_t L, int64_t d, double theta)
{
	for (int64_t t = 0; t < L; t++)
		for (int64_t i = 0; i < d / 2; i++) {
			double angle = t * pow(theta, -2.0 * i / d);
			table[t * d + i] = (real)cos(angle);
			table[t * d + d / 2 + i] = (real)sin(angle);
		}
}

/* Turns the query and key heads of qkv in place, forwards (sign 1) or backwards (sign -1). */
static void rope_rotate(real *qkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv, int64_t d, real sign)
{
	#pragma omp parallel for if (T * (nh + nkv) * d > WORTH_THREADS)
	for (int64_t t = 0; t < T; t++) {
		const real *cosine = table + (t % L - (document ? document[t] : 0)) * d, *sine = cosine + d / 2;
		for (int head = 0; head < nh + nkv; head++) {
			real *lo = qkv + (t * (nh + 2 * nkv) + head) * d, *hi = lo + d / 2;
			#pragma omp simd
			for (int64_t i = 0; i < d / 2; i++) {
				real a = lo[i], b = hi[i], s = sign * sine[i];
				lo[i] = a * cosine[i] - b * s;
				hi[i] = b * cosine[i] + a * s;
			}
		}
	}
}

void rope_forward(real *qkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv, int64_t d)
{
	rope_rotate(qkv, table, document, T, L, nh, nkv, d, 1);
}

void rope_backward(real *dqkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv, int64_t d)
{
	rope_rotate(dqkv, table, document, T, L, nh, nkv, d, -1); /* the transpose of a rotation is its inverse */
}

/* ============================================================================================================
 * Causal grouped-query attention in tiles (Dao et al. 2022, arXiv:2205.14135)
 *
 * A block of queries meets the keys in blocks of KEY_BLOCK, up to its last query: the scores of a pair of blocks stay in a core's
 * cache, and no [L, L] matrix ever exists. The heads that share their keys and values do so in one block. The backward pass computes the
 * probabilities again from each row's log-sum-exp. With documents, a block begins with the key block in which the first of its documents does.
 * ========================================================================================================== */

enum { QUERY_BLOCK = 256, KEY_BLOCK = DIRECT };

/* A thread's part of the scratch: a block's scores, their gradients, and its outputs or their gradients. */
static int64_t block_scratch(int64_t d)
{
	return QUERY_BLOCK * (2 * KEY_BLOCK + d);
}

int64_t attention_scratch(int64_t d)
{
	return block_scratch(d) * kernels_threads();
}

/* A block: the queries of `heads` heads from `head` on, which share key-value head `kv`, at `positions` places of a sequence from `first` on.
 * They are its rows, head after head. */
struct query_block {
	int kv, head;
	int64_t heads, first, positions, rows;
	int32_t in_qkv[QUERY_BLOCK], in_out[QUERY_BLOCK]; /* each row's head in the queries' qkv [L, nh + 2 nkv] and out [L, nh] */
	const int32_t *document;     /* [positions] where in the sequence the document of each begins; NULL: at 0 */
};

/* How a sequence is cut into blocks, and into how many. Many rows make efficient products, few positions waste less on the diagonal, where
 * half of a block is masked. */
struct query_cut { int64_t heads, head_parts, positions, blocks; };

static struct query_cut cut_queries(int64_t L, int nh, int nkv)
{
	struct query_cut cut = {.positions = min64(max64(L / 8, 64), QUERY_BLOCK / min64(nh / nkv, 4))};
	cut.heads = min64(nh / nkv, QUERY_BLOCK / cut.positions);
	cut.head_parts = (nh / nkv + cut.heads - 1) / cut.heads;
	cut.blocks = (L + cut.positions - 1) / cut.positions;
	return cut;
}

/* Of L queries, before which the sequence has `past` positions. `document` [L] is that of the queries, or NULL. */
static struct query_block query_block(const struct query_cut *cut, int kv, int64_t part, int64_t block, int64_t past, const int32_t *document,
		int64_t L, int nh, int nkv)
{
	const int64_t first = block * cut->positions;
	struct query_block q = {.kv = kv, .head = kv * (nh / nkv) + part * cut->heads, .first = past + first};
	q.document = document ? document + first : NULL;
	q.heads = min64(cut->heads, (kv + 1) * (nh / nkv) - q.head);
	q.positions = min64(cut->positions, L - first);
	for (int64_t h = 0; h < q.heads; h++)
		for (int64_t i = first; i < first + q.positions; i++, q.rows++) {
			q.in_qkv[q.rows] = i * (nh + 2 * nkv) + q.head + h;
			q.in_out[q.rows] = i * nh + q.head + h;
		}
	return q;
}

/* The block's rows of qkv or out, of which x is one sequence. */
static struct matrix block_rows(const real *x, const int32_t *row, int64_t d)
{
	return (struct matrix){.data = x, .stride = d, .row = row};
}

/* scores[r, j] = q_r . k_j / sqrt(d), rows apart by KEY_BLOCK. */
static void attention_scores(real *scores, const struct query_block *q, const real *qkv, const real *k, int64_t keys, int64_t stride, int64_t d)
{
	gemm(q->rows, keys, d, (real)(1 / sqrt((double)d)), block_rows(qkv, q->in_qkv, d), transposed(k, stride), false, scores, KEY_BLOCK);
}

/* The first key that row r sees. */
static int64_t first_seen(const struct query_block *q, int64_t r)
{
	return q->document ? q->document[r % q->positions] : 0;
}

/* The first key block that any row sees part of: documents rise with the positions. */
static int64_t first_key(const struct query_block *q)
{
	return first_seen(q, 0) / KEY_BLOCK * KEY_BLOCK;
}

/* Which of the keys key .. key + keys - 1 row r sees: those from its document's first to its own. */
struct span { int64_t from, to; };
static struct span seen_keys(const struct query_block *q, int64_t r, int64_t key, int64_t keys)
{
	const int64_t to = min64(max64(q->first + r % q->positions + 1 - key, 0), keys);
	return (struct span){min64(max64(first_seen(q, r) - key, 0), to), to};
}

/* One block's rows of out and lse (or NULL). qkv, out and lse are those of the queries; k and v the key-value head's, of the sequence's
 * positions from 0 on, apart by `stride`. Key blocks begin at multiples of KEY_BLOCK, so that a row's bits do not depend on the block it is in. */
static void attention_block_forward(real *out, real *lse, const struct query_block *q, const real *qkv, const real *k, const real *v,
		int64_t stride, int64_t d, real *scratch)
{
	real *scores = scratch, *o = scores + 2 * QUERY_BLOCK * KEY_BLOCK;
	real max[QUERY_BLOCK], sum[QUERY_BLOCK]; /* of each row so far */
	for (int64_t key = first_key(q); key < q->first + q->positions; key += KEY_BLOCK) {
		const int64_t keys = min64(KEY_BLOCK, q->first + q->positions - key);
		attention_scores(scores, q, qkv, k + key * stride, keys, stride, d);
		for (int64_t r = 0; r < q->rows; r++) {
			const struct span seen = seen_keys(q, r, key, keys);
			const int64_t n = seen.to - seen.from;
			const bool begun = key > first_seen(q, r); /* whether the row saw keys of blocks before */
			real *all = scores + r * KEY_BLOCK, *row = all + seen.from, before = begun ? max[r] : 0;
			memset(all, 0, seen.from * sizeof *all);
			memset(row + n, 0, (keys - seen.to) * sizeof *all);
			if (n == 0)
				continue;
			real here = largest(row, n);
			max[r] = begun && !(here > before) ? before : here;
			real more = exponentials(row, row, max[r], n);
			real shrink = begun ? exponential(before - max[r]) : 0; /* what was summed under the old maximum */
			sum[r] = begun ? sum[r] * shrink + more : more;
			for (int64_t j = 0; begun && j < d; j++)
				o[r * d + j] *= shrink;
		}
		gemm(q->rows, d, keys, 1, as_is(scores, KEY_BLOCK), as_is(v + key * stride, stride), key > first_key(q), o, d);
	}
	for (int64_t r = 0; r < q->rows; r++) {
		if (lse)
			lse[q->in_out[r]] = max[r] + (real)log(sum[r]);
		for (int64_t j = 0; j < d; j++)
			out[q->in_out[r] * d + j] = o[r * d + j] / sum[r];
	}
}

void attention_forward(real *out, real *lse, const real *qkv, const int32_t *document, int64_t B, int64_t L, int nh, int nkv, int64_t d,
		real *scratch)
{
	const int64_t stride = (nh + 2 * nkv) * d;
	const struct query_cut cut = cut_queries(L, nh, nkv);
	#pragma omp parallel for collapse(4) schedule(dynamic)
	for (int64_t b = 0; b < B; b++)
		for (int kv = 0; kv < nkv; kv++)
			for (int64_t part = 0; part < cut.head_parts; part++)
				for (int64_t block = cut.blocks - 1; block >= 0; block--) { /* the longest first */
					const struct query_block q = query_block(&cut, kv, part, block, 0, document ? document + b * L : NULL, L, nh, nkv);
					const real *sequence = qkv + b * L * stride, *k = sequence + (nh + kv) * d;
					attention_block_forward(out + b * L * nh * d, lse + b * L * nh, &q, sequence, k, k + nkv * d, stride, d,
							scratch + omp_get_thread_num() * block_scratch(d));
				}
}

void attention_extend(real *out, const real *qkv, const struct segment *segments, int n, int layer, int nh, int nkv, int64_t d, real *scratch)
{
	const int64_t stride = 2 * nkv * d;
	int64_t work = 0;
	for (int i = 0; i < n; i++)
		work += segments[i].num_tokens * (segments[i].cache->length + segments[i].num_tokens) * nh * d;
	#pragma omp parallel if (work > WORTH_THREADS)
	#pragma omp single
	for (int64_t i = 0, row = 0; i < n; row += segments[i++].num_tokens) {
		const struct kv_cache *c = segments[i].cache;
		const int64_t L = segments[i].num_tokens;
		const struct query_cut cut = cut_queries(L, nh, nkv);
		for (int kv = 0; kv < nkv; kv++)
			for (int64_t part = 0; part < cut.head_parts; part++)
				for (int64_t block = cut.blocks - 1; block >= 0; block--) {
					#pragma omp task
					{
						const struct query_block q = query_block(&cut, kv, part, block, c->length, NULL, L, nh, nkv);
						const real *k = c->kv + layer * c->capacity * stride + kv * d;
						attention_block_forward(out + row * nh * d, NULL, &q, qkv + row * (nh + 2 * nkv) * d, k, k + nkv * d, stride, d,
								scratch + omp_get_thread_num() * block_scratch(d));
					}
				}
	}
}

/* One block's part of the backward pass: writes its rows of dsequence, adds to its key-value head's dk and dv (where key and value stand in
 * dsequence). `dout`, `out` and `lse` are the sequence's. */
static void attention_block_backward(real *dsequence, const struct query_block *q, const real *dout, const real *out, const real *lse,
		const real *sequence, int64_t nh, int64_t nkv, int64_t d, real *scratch)
{
	/* P = softmax of the scores S, O = P V.  dV = P^T dO;  dP = dO V^T;  dS = P (dP - sum_j dP P) and that sum is dO . O. */
	const int64_t stride = (nh + 2 * nkv) * d;
	const real *k = sequence + (nh + q->kv) * d, *v = k + nkv * d, scale = (real)(1 / sqrt((double)d));
	real *dk = dsequence + (nh + q->kv) * d, *dv = dk + nkv * d;
	real *p = scratch, *dp = p + QUERY_BLOCK * KEY_BLOCK, *dq = dp + QUERY_BLOCK * KEY_BLOCK, dot[QUERY_BLOCK];
	for (int64_t r = 0; r < q->rows; r++) {
		const real *o = out + q->in_out[r] * d, *d_o = dout + q->in_out[r] * d;
		real sum = 0;
		#pragma omp simd reduction(+ : sum)
		for (int64_t j = 0; j < d; j++)
			sum += d_o[j] * o[j];
		dot[r] = sum;
	}
	for (int64_t key = first_key(q); key < q->first + q->positions; key += KEY_BLOCK) {
		const int64_t keys = min64(KEY_BLOCK, q->first + q->positions - key), offset = key * stride;
		attention_scores(p, q, sequence, k + offset, keys, stride, d);
		gemm(q->rows, keys, d, 1, block_rows(dout, q->in_out, d), transposed(v + offset, stride), false, dp, KEY_BLOCK);
		for (int64_t r = 0; r < q->rows; r++) {
			real *p_row = p + r * KEY_BLOCK, *dp_row = dp + r * KEY_BLOCK;
			const real row_lse = lse[q->in_out[r]], row_dot = dot[r];
			const struct span seen = seen_keys(q, r, key, keys);
			#pragma omp simd
			for (int64_t j = seen.from; j < seen.to; j++) {
				p_row[j] = exponential(p_row[j] - row_lse);
				dp_row[j] = scale * p_row[j] * (dp_row[j] - row_dot);
			}
			memset(p_row, 0, seen.from * sizeof *p_row);
			memset(dp_row, 0, seen.from * sizeof *dp_row);
			memset(p_row + seen.to, 0, (keys - seen.to) * sizeof *p_row);
			memset(dp_row + seen.to, 0, (keys - seen.to) * sizeof *dp_row);
		}
		gemm(keys, d, q->rows, 1, transposed(p, KEY_BLOCK), block_rows(dout, q->in_out, d), true, dv + offset, stride);
		gemm(q->rows, d, keys, 1, as_is(dp, KEY_BLOCK), as_is(k + offset, stride), key > first_key(q), dq, d);
		gemm(keys, d, q->rows, 1, transposed(dp, KEY_BLOCK), block_rows(sequence, q->in_qkv, d), true, dk + offset, stride);
	}
	for (int64_t r = 0; r < q->rows; r++)
		memcpy(dsequence + q->in_qkv[r] * d, dq + r * d, d * sizeof *dq);
}

void attention_backward(real *dqkv, const real *dout, const real *out, const real *lse, const real *qkv, const int32_t *document, int64_t B,
		int64_t L, int nh, int nkv, int64_t d, real *scratch)
{
	const int64_t stride = (nh + 2 * nkv) * d;
	const struct query_cut cut = cut_queries(L, nh, nkv);
	#pragma omp parallel for collapse(2) schedule(dynamic)
	for (int64_t b = 0; b < B; b++)
		for (int kv = 0; kv < nkv; kv++) { /* one thread for a key-value head: all its query heads add to dK and dV */
			real *dsequence = dqkv + b * L * stride, *dk = dsequence + (nh + kv) * d, *dv = dk + nkv * d;
			for (int64_t t = 0; t < L; t++) {
				memset(dk + t * stride, 0, d * sizeof *dk);
				memset(dv + t * stride, 0, d * sizeof *dv);
			}
			for (int64_t part = 0; part < cut.head_parts; part++)
				for (int64_t block = 0; block < cut.blocks; block++) {
					const struct query_block q = query_block(&cut, kv, part, block, 0, document ? document + b * L : NULL, L, nh, nkv);
					attention_block_backward(dsequence, &q, dout + b * L * nh * d, out + b * L * nh * d, lse + b * L * nh,
							qkv + b * L * stride, nh, nkv, d, scratch + omp_get_thread_num() * block_scratch(d));
				}
		}
}

/* ============================================================================================================
 * SwiGLU: act = silu(gate) * up, times the row's routing weight   (Shazeer 2020, arXiv:2002.05202, eq. 6)
 *
 * Memory is its limit, not arithmetic, so it is done on each piece of the product before it.
 * ========================================================================================================== */

static void swiglu_rows(const struct finish *f, int64_t first, int64_t rows)
{
	const int64_t I = f->width;
	for (int64_t r = first; r < first + rows; r++) {
		const real *gate = f->in[0] + r * 2 * I, *up = gate + I, scale = f->in[1] ? f->in[1][r] : 1;
		real *act = f->out[0] + r * I;
		#pragma omp simd
		for (int64_t i = 0; i < I; i++)
			act[i] = scale * up[i] * gate[i] / (1 + exponential(-gate[i]));
	}
}

void swiglu_forward(real *act, real *gate_up, const real *x, const int32_t *row, const struct weight *w, const real *weight,
		const int64_t *offset, int G, int64_t H, int64_t I)
{
	const struct finish swiglu = {.rows = swiglu_rows, .out = {act}, .in = {gate_up, weight}, .width = I};
	grouped_rows(gate_up, x, row, w, true, offset, G, H, 2 * I, false, &swiglu);
}

static void swiglu_backward_rows(const struct finish *f, int64_t first, int64_t rows)
{
	const int64_t I = f->width;
	for (int64_t r = first; r < first + rows; r++) {
		const real *gate = f->in[0] + r * 2 * I, *up = gate + I, scale = f->in[1] ? f->in[1][r] : 1;
		real *dgate = f->out[0] + r * 2 * I, *dup = dgate + I, *act = f->out[1] + r * I, dot = 0;
		for (int64_t i = 0; r + 1 < first + rows && i < 2 * I; i += LANES) /* the next row of gate_up, which was left by the forward pass */
			__builtin_prefetch(gate + 2 * I + i);
		#pragma omp simd reduction(+ : dot)
		for (int64_t i = 0; i < I; i++) {
			const real d = act[i], sigmoid = 1 / (1 + exponential(-gate[i])), silu = gate[i] * sigmoid;
			dot += d * silu * up[i];
			act[i] = scale * silu * up[i];
			dgate[i] = scale * d * up[i] * (sigmoid + silu * (1 - sigmoid));
			dup[i] = scale * d * silu;
		}
		if (f->out[2])
			f->out[2][r] = dot;
	}
}

void swiglu_backward(real *dgate_up, real *act, real *dweight, const real *dout, const int32_t *row, const real *w_down, const real *gate_up,
		const real *weight, const int64_t *offset, int G, int64_t H, int64_t I)
{
	struct weight weights[G];
	stack_weights(weights, w_down, G, H * I);
	/* The gradient of act is written to where act itself comes to stand. */
	const struct finish swiglu = {.rows = swiglu_backward_rows, .out = {dgate_up, act, dweight}, .in = {gate_up, weight}, .width = I};
	grouped_rows(act, dout, row, weights, false, offset, G, H, I, false, &swiglu);
}

/* ============================================================================================================
 * Router
 * ========================================================================================================== */

void softmax_forward(real *p, real *lse, const real *s, int64_t T, int64_t E)
{
	#pragma omp parallel for if (T * E > WORTH_THREADS)
	for (int64_t t = 0; t < T; t++) {
		real *out = p + t * E, max = largest(s + t * E, E), sum = exponentials(out, s + t * E, max, E);
		for (int64_t e = 0; e < E; e++)
			out[e] /= sum;
		if (lse)
			lse[t] = max + (real)log(sum);
	}
}

void routing_noise_forward(real *s_hat, const real *s, double alpha, double mean, double std, const struct random_stream *noise,
		int64_t T, int64_t E)
{
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++) {
		random_normal(s_hat + t * E, E, noise, (uint64_t)(t * E));
		for (int64_t e = 0; e < E; e++)
			s_hat[t * E + e] = (real)(alpha * s[t * E + e] + (1 - alpha) * (mean + std * s_hat[t * E + e]));
	}
}

void topk_forward(int32_t *index, real *weight, const real *p, int64_t T, int64_t E, int k, bool renormalise)
{
	#pragma omp parallel for if (T * E * k > WORTH_THREADS)
	for (int64_t t = 0; t < T; t++) {
		const real *row = p + t * E;
		int32_t *chosen = index + t * k;
		real sum = 0;
		for (int j = 0; j < k; j++) {
			int32_t best = -1;
			for (int32_t e = 0; e < E; e++) {
				bool taken = false;
				for (int i = 0; i < j; i++)
					taken |= chosen[i] == e;
				/* > and not >=: of equals the lowest index wins. A NaN never beats anything, yet k experts are always found. */
				if (!taken && (best < 0 || row[e] > row[best]))
					best = e;
			}
			chosen[j] = best;
			sum += row[best];
		}
		for (int j = 0; j < k; j++)
			weight[t * k + j] = renormalise ? row[chosen[j]] / sum : row[chosen[j]];
	}
}

void topk_backward(real *ds, const real *dweight, const int32_t *index, const real *weight, const real *p, int64_t T, int64_t E,
		int k, bool renormalise)
{
	/* Renormalised, the weights are the softmax over the winners alone: ds_j = w_j (dw_j - sum_i w_i dw_i), losers get 0.
	 * Otherwise w_j = p_j and the softmax over all experts gives ds_e = p_e (dp_e - sum_i p_i dp_i). */
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++) {
		real *row = ds + t * E, dot = 0;
		for (int j = 0; j < k; j++)
			dot += weight[t * k + j] * dweight[t * k + j];
		for (int64_t e = 0; e < E; e++)
			row[e] = renormalise ? 0 : -p[t * E + e] * dot;
		for (int j = 0; j < k; j++) {
			real w = weight[t * k + j], d = dweight[t * k + j];
			row[index[t * k + j]] += renormalise ? w * (d - dot) : w * d;
		}
	}
}

void router_statistics(struct router_sums *sums, double *count, double *p_sum, const real *s, const real *p, const real *lse,
		const int32_t *index, int64_t first, int64_t T, int64_t B, int64_t L, int64_t E, int k)
{
	#pragma omp parallel for schedule(dynamic)
	for (int64_t b = 0; b < B; b++) {
		double *c = count + b * E, *ps = p_sum + b * E;
		struct router_sums sum = {0};
		memset(c, 0, E * sizeof *c);
		memset(ps, 0, E * sizeof *ps);
		for (int64_t t = max64(b * L - first, 0); t < min64((b + 1) * L - first, T); t++) {
			for (int j = 0; j < k; j++)
				c[index[t * k + j]]++;
			for (int64_t e = 0; e < E; e++) {
				double value = s[t * E + e];
				ps[e] += p[t * E + e];
				sum.s += value;
				sum.s_squared += value * value;
			}
			sum.z += (double)lse[t] * lse[t];
		}
		sums[b] = sum;
	}
}

void router_loss_backward(real *ds, const real *p, const real *lse, const real *factor, int64_t first, int64_t T, int64_t L, int64_t E,
		double balance_scale, double z_scale)
{
	/* Balance: dp_e = balance_scale f_e, through the softmax ds_e = p_e (dp_e - sum p dp).  z: d(lse^2)/ds_e = 2 lse p_e. */
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++) {
		const real *f = factor + (first + t) / L * E, *row = p + t * E;
		real dot = 0, z = (real)(2 * z_scale) * lse[t], balance = (real)balance_scale;
		#pragma omp simd reduction(+ : dot)
		for (int64_t e = 0; e < E; e++)
			dot += row[e] * f[e];
		for (int64_t e = 0; e < E; e++)
			ds[t * E + e] += row[e] * (balance * (f[e] - dot) + z);
	}
}

/* ============================================================================================================
 * Token dispatch: rows sorted by expert, and back
 * ========================================================================================================== */

void dispatch_plan(int64_t *offset, int32_t *position, int32_t *token, const int32_t *index, int64_t R, int k, int E)
{
	memset(offset, 0, (E + 1) * sizeof *offset);
	for (int64_t i = 0; i < R; i++)
		offset[index[i] + 1]++;
	for (int e = 0; e < E; e++)
		offset[e + 1] += offset[e];
	for (int64_t i = 0; i < R; i++) { /* offset[e] runs from the start of e's rows to their end ... */
		position[i] = (int32_t)offset[index[i]]++;
		token[position[i]] = (int32_t)(i / k);
	}
	memmove(offset + 1, offset, E * sizeof *offset); /* ... which is the start of the next expert's */
	offset[0] = 0;
}

void arrival_plan(int64_t *offset, int32_t *row, const int64_t *count, int ranks, int experts)
{
	int64_t at = 0;
	for (int e = 0; e < experts; e++) {
		offset[e] = at;
		int64_t before = 0; /* rows that arrive before this expert's of rank r */
		for (int r = 0; r < ranks; r++) {
			for (int i = 0; i < e; i++)
				before += count[r * experts + i];
			for (int64_t i = 0; i < count[r * experts + e]; i++)
				row[at++] = (int32_t)(before + i);
			for (int i = e; i < experts; i++)
				before += count[r * experts + i];
		}
	}
	offset[experts] = at;
}

void scatter_rows(real *out, const real *rows, const int32_t *row, int64_t R, int64_t H)
{
	#pragma omp parallel for
	for (int64_t r = 0; r < R; r++)
		memcpy(out + row[r] * H, rows + r * H, H * sizeof *out);
}

void gather_rows(real *rows, const real *x, const int32_t *token, int64_t R, int64_t H)
{
	#pragma omp parallel for if (R * H > WORTH_THREADS)
	for (int64_t r = 0; r < R; r++)
		memcpy(rows + r * H, x + token[r] * H, H * sizeof *rows);
}

void combine_rows(real *y, const real *rows, const int32_t *position, int64_t T, int k, int64_t H, bool accumulate)
{
	#pragma omp parallel for if (T * k * H > WORTH_THREADS)
	for (int64_t t = 0; t < T; t++) {
		real *out = y + t * H;
		for (int j = 0; j < k; j++) {
			const real *row = rows + position[t * k + j] * H;
			if (j == 0 && !accumulate)
				memcpy(out, row, H * sizeof *out);
			else
				for (int64_t i = 0; i < H; i++)
					out[i] += row[i];
		}
	}
}

void permute_forward(real *out, const real *in, const int32_t *position, int64_t R)
{
	for (int64_t i = 0; i < R; i++)
		out[position[i]] = in[i];
}

void permute_backward(real *din, const real *dout, const int32_t *position, int64_t R)
{
	for (int64_t i = 0; i < R; i++)
		din[i] = dout[position[i]];
}

/* ============================================================================================================
 * NormHead and cross-entropy
 * ========================================================================================================== */

void column_sum_of_squares(double *sum, const struct weight *w, int64_t V, int64_t H)
{
	enum { slice = 32 };
	#pragma omp parallel for
	for (int64_t first = 0; first < H; first += slice) {
		int64_t end = min64(first + slice, H);
		for (int64_t j = first; j < end; j++)
			sum[j] = 0;
		for (int64_t v = 0; v < V; v++) {
			real row[slice];
			read_elements(row, weight_at(w, v * H + first), w->bf16, end - first);
			for (int64_t j = first; j < end; j++)
				sum[j] += (double)row[j - first] * row[j - first];
		}
	}
}

void logits_max(real *max, const real *logits, int64_t T, int64_t V)
{
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++)
		max[t] = largest(logits + t * V, V);
}

void cross_entropy_forward(double *loss, double *sum, real *logits, const real *max, const int32_t *target, int64_t first, int64_t T,
		int64_t V)
{
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++) {
		real *row = logits + t * V;
		const int64_t hit = target[t] - first;
		loss[t] = sum[t] = 0;
		if (target[t] < 0)
			continue;
		if (hit >= 0 && hit < V)
			loss[t] = max[t] - row[hit];
		for (int64_t v = 0; v < V; v += 1024) /* in pieces, so that a long sum loses nothing in float */
			sum[t] += exponentials(row + v, row + v, max[t], min64(1024, V - v));
	}
}

void cross_entropy_backward(real *dlogits, const double *sum, const int32_t *target, int64_t first, double scale, int64_t T, int64_t V)
{
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++) {
		real *row = dlogits + t * V;
		const int64_t hit = target[t] - first;
		if (target[t] < 0) {
			memset(row, 0, V * sizeof *row);
			continue;
		}
		real factor = (real)(scale / sum[t]);
		for (int64_t v = 0; v < V; v++)
			row[v] *= factor;
		if (hit >= 0 && hit < V)
			row[hit] -= (real)scale;
	}
}

/* ============================================================================================================
 * AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2)
 * ========================================================================================================== */

void adamw_update(real *w, real *exp_avg, real *exp_avg_sq, const real *grad, int64_t n, const struct adamw *o)
{
	const real beta1 = (real)o->beta1, beta2 = (real)o->beta2, rest1 = (real)(1 - o->beta1), rest2 = (real)(1 - o->beta2);
	const real eps = (real)o->eps, grad_scale = (real)o->grad_scale;
	const real keep = (real)(1 - o->lr * o->weight_decay);
	const real rate = (real)(o->lr / (1 - pow(o->beta1, (double)o->step)));
	const real correction = (real)(1 / sqrt(1 - pow(o->beta2, (double)o->step)));
	#pragma omp parallel for simd
	for (int64_t i = 0; i < n; i++) {
		real g = grad[i] * grad_scale;
		real m = exp_avg[i] = beta1 * exp_avg[i] + rest1 * g;
		real v = exp_avg_sq[i] = beta2 * exp_avg_sq[i] + rest2 * g * g;
		w[i] = w[i] * keep - rate * m / ((real)sqrt(v) * correction + eps);
	}
}

/* ============================================================================================================
 * Random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
 * A value depends on (seed, purpose, step, position) alone.
 * ========================================================================================================== */

void philox(uint32_t out[4], const uint32_t counter[4], const uint32_t key[2])
{
	uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
	for (int round = 0; round < 10; round++) {
		uint64_t a = (uint64_t)0xD2511F53u * c0, b = (uint64_t)0xCD9E8D57u * c2;
		c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
		c1 = (uint32_t)b;
		c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
		c3 = (uint32_t)a;
		k0 += 0x9E3779B9u;
		k1 += 0xBB67AE85u;
	}
	out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

/* The four words of block `block` of a stream. */
static void random_block(uint32_t out[4], const struct random_stream *s, uint64_t block)
{
	philox(out, (uint32_t[]){(uint32_t)block, (uint32_t)(block >> 32), s->step, s->purpose},
			(uint32_t[]){(uint32_t)s->seed, (uint32_t)(s->seed >> 32)});
}

void random_normal(real *out, int64_t n, const struct random_stream *s, uint64_t position)
{
	position += s->first;
	for (int64_t i = 0; i < n;) {
		uint32_t word[4];
		double normal[4];
		random_block(word, s, (position + i) / 4);
		for (int pair = 0; pair < 4; pair += 2) { /* Box-Muller; +1 keeps the logarithm finite */
			double radius = sqrt(-2 * log((word[pair] + 1.0) / 4294967296.0)), angle = 2 * M_PI * word[pair + 1] / 4294967296.0;
			normal[pair] = radius * cos(angle);
			normal[pair + 1] = radius * sin(angle);
		}
		for (int lane = (position + i) % 4; lane < 4 && i < n; lane++)
			out[i++] = (real)normal[lane];
	}
}

void random_uniform(real *out, int64_t n, const struct random_stream *s, uint64_t position)
{
	position += s->first;
	for (int64_t i = 0; i < n;) {
		uint32_t word[4];
		random_block(word, s, (position + i) / 4);
		for (int lane = (position + i) % 4; lane < 4 && i < n; lane++)
			out[i++] = (real)((word[lane] + 0.5) / 4294967296.0);
	}
}

uint64_t random_permute(uint64_t i, uint64_t n, const struct random_stream *s)
{
	/* A Feistel network is a bijection of [0, 4^h); walking on until a value falls into [0, n) makes it one of [0, n). */
	int half = 1;
	while (half < 32 && (uint64_t)1 << 2 * half < n)
		half++;
	const uint64_t mask = ((uint64_t)1 << half) - 1;
	assert(i < n);
	do {
		uint64_t left = i >> half, right = i & mask;
		for (uint64_t round = 0; round < 6; round++) {
			uint32_t word[4];
			random_block(word, s, round << 32 | right);
			uint64_t next = left ^ (word[0] & mask);
			left = right;
			right = next;
		}
		i = left << half | right;
	} while (i >= n);
	return i;
}
