/*
 * kernels.c - arithmetic on arrays. Pointers, sizes and scalars in, arrays out: no files, no ranks, no state but
 * the choice of the matrix product. Every contract, with the shape of each array, stands in kernels.h.
 *
 * Each operation is a pair x_forward / x_backward. In a backward function dX is d(loss)/dX. Gradients of activations
 * are written. Gradients of weights are written, or added to if `accumulate` is true; so the first micro-batch of a
 * step needs no pass that clears them.
 *
 * Threads: OpenMP. One thread computes each element of a result, and partial sums are added in a fixed order: no
 * result depends on the scheduling or on the number of threads. (Sums inside OpenBLAS may.)
 *
 * Sizes: rows, tokens and elements are counted in int64_t, and every product of sizes is one of int64_t. Lists of
 * rows or tokens are int32_t: a micro-batch has fewer than 2^31 expert rows, which plan_memory checks.
 */
#define _GNU_SOURCE
#include "kernels.h"

#include <assert.h>
#include <cblas.h>
#undef I /* complex.h's, which cblas.h includes */
#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>

/* ============================================================================================================
 * Small functions that several kernels use
 * ========================================================================================================== */

static inline int64_t min64(int64_t a, int64_t b)
{
	return a < b ? a : b;
}

static inline int64_t max64(int64_t a, int64_t b)
{
	return a > b ? a : b;
}

/* e^x to about 1 ulp, in a form that compilers vectorise: x = n ln2 + r; e^r by a polynomial of degree 7, 2^n by
 * setting the exponent's bits. Infinities and subnormal results are right, and NaN stays NaN. */
static inline real exponential(real x)
{
#ifdef LING_DOUBLE
	return exp(x);
#else
	const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, which is then in the low bits */
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
	half = (uint32_t)((exponent >> 1) + 127) << 23; /* 2^n as two factors, since n is from -150 to 128 */
	rest = (uint32_t)(exponent - (exponent >> 1) + 127) << 23;
	float a, b;
	memcpy(&a, &half, 4);
	memcpy(&b, &rest, 4);
	return p * a * b;
#endif
}

/* A loop over fewer elements than this runs on one thread: starting the others would take longer. Generation, which
 * computes one token at a time, has many such loops. */
enum { MIN_PARALLEL_ELEMENTS = 1 << 14 };

/* The largest of n >= 1 elements. */
static real max_element(const real *x, int64_t n)
{
	real max = x[0];
	#pragma omp simd reduction(max : max)
	for (int64_t i = 0; i < n; i++)
		max = x[i] > max ? x[i] : max;
	return max;
}

/* out[i] = e^(x[i] - max) for n elements; returns their sum. out may be x. */
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
 * GEMM on one core: C [m, n] (+)= alpha A B, with A [m, k] and B [k, n]. All matrix products are made of it.
 *
 * The method is that of Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication" (ACM TOMS 34:3);
 * the names are those of Van Zee & van de Geijn 2015, "BLIS: a framework for rapidly instantiating BLAS functionality"
 * (ACM TOMS 41:3). Five loops stand around the micro-kernel; from the outermost:
 *
 *   for NC columns of C                     packed block of B [KC, NC]: stays in the second or third level of cache
 *     for KC terms of the sum over k
 *       for MC rows of C                    packed block of A [MC, KC]: stays in the second level
 *         for NR columns of C               panel of B [KC, NR]: stays in the first level
 *           for MR rows of C                panel of A [MR, KC]
 *             the micro-kernel: C [MR, NR] (+)= panel of A times panel of B, the sums in vector registers
 *
 * A panel of A is stored as [KC, MR] and one of B as [KC, NR], so that the micro-kernel reads both from beginning to
 * end. Below, p counts the terms of the sum over k.
 *
 * Bits: an element of C is a sum over k in ascending order: one chain of multiply-adds for each KC terms, and the
 * chains are added in order. So it depends on its row of A and its column of B alone: not on the other rows and
 * columns, on how a product is cut into tiles, or on the number of threads.
 * ========================================================================================================== */

/* The micro-kernel's tile of C: MR rows of two vectors, as many as the processor has registers for. */
#if defined __AVX512F__
enum { VECTOR_BYTES = 64, MR = 14 };
#elif defined __AVX__
enum { VECTOR_BYTES = 32, MR = 6 };
#elif defined __aarch64__
enum { VECTOR_BYTES = 16, MR = 12 };
#else
enum { VECTOR_BYTES = 16, MR = 6 };
#endif
enum { LANES = VECTOR_BYTES / sizeof(real), NR = 2 * LANES }; /* LANES: reals of a vector */
/* The packed blocks are on the thread's stack: 1.4 MB. */
enum { KC = 384 * sizeof(float) / sizeof(real), MC = 8 * MR, NC = 768 };

typedef real vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(real)), may_alias));

/* clang must be told two things. Vectors of this width are wanted: it splits those of AVX-512 otherwise, and then has
 * too few registers. And a loop has to be unrolled before it decides what stays in registers. */
#ifdef __clang__
#define ALWAYS_INLINE static inline __attribute__((always_inline, min_vector_width(8 * VECTOR_BYTES)))
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* An A with this leading dimension is not packed: the micro-kernel reads it in place. It is a constant, so that it can
 * be part of an instruction's address. Attention's scores and their gradients have this leading dimension. */
enum { UNPACKED_LD = 256 };

/* c [mr, NR] (+)= alpha a b, the rows of c ldc apart. Element p of row i of A is a[i * row_stride + p * k_stride], and
 * b is a panel of B, [kc, NR]. mr, row_stride and k_stride are constants wherever this is called. */
ALWAYS_INLINE void micro_kernel(const int mr, const int row_stride, const int k_stride, int64_t kc,
		const real *restrict a, const real *restrict b, real alpha, bool accumulate, real *restrict c, int64_t ldc)
{
	vector sum[MR][2] = {0};
	for (int64_t p = 0, row = 0; p < kc; row++) {
		if (row < mr) { /* prefetch C meanwhile, a row every 8 terms: all at once would delay the loads of a and b */
			__builtin_prefetch(c + row * ldc, 1);
			__builtin_prefetch(c + row * ldc + LANES, 1);
		}
		for (const int64_t end = min64(p + 8, kc); p < end; p++) {
			const vector b0 = *(const vector *)(b + p * NR), b1 = *(const vector *)(b + p * NR + LANES);
			UNROLL
			for (int i = 0; i < mr; i++) {
				const vector x = a[i * row_stride + p * k_stride] - (vector){0};
				sum[i][0] += x * b0;
				sum[i][1] += x * b1;
			}
		}
	}
	UNROLL
	for (int i = 0; i < mr; i++)
		UNROLL
		for (int j = 0; j < 2; j++) {
			vector *out = (vector *)(c + i * ldc + j * LANES);
			if (accumulate)
				*out += alpha * sum[i][j];
			else
				*out = alpha * sum[i][j];
		}
}

/* The micro-kernel for each number of rows from 1 to MR, so that the last rows of a matrix take no more work than they
 * need, in three forms: A in a packed panel; A in place; A in place and transposed. */
#if defined __AVX512F__ || defined __aarch64__
#define FOR_EACH_MR(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
#else
#define FOR_EACH_MR(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif
#define CASE(n) case n: \
	micro_kernel(n < MR ? n : MR, ROW_STRIDE, K_STRIDE, kc, a, b, alpha, accumulate, c, ldc); break;
typedef void micro_kernel_function(int mr, int64_t kc, const real *a, const real *b, real alpha, bool accumulate,
		real *c, int64_t ldc);
#define DEFINE_MICRO_KERNEL(name) \
	static __attribute__((noinline)) void name(int mr, int64_t kc, const real *a, const real *b, real alpha, \
			bool accumulate, real *c, int64_t ldc) \
	{ \
		switch (mr) { \
			FOR_EACH_MR(CASE) \
		} \
	}
#define ROW_STRIDE 1
#define K_STRIDE MR
DEFINE_MICRO_KERNEL(micro_kernel_packed)
#undef K_STRIDE
#define K_STRIDE UNPACKED_LD
DEFINE_MICRO_KERNEL(micro_kernel_transposed)
#undef ROW_STRIDE
#undef K_STRIDE
#define ROW_STRIDE UNPACKED_LD
#define K_STRIDE 1
DEFINE_MICRO_KERNEL(micro_kernel_in_place)

/* Transposes a block of LANES x LANES elements in registers: interleaves the first half of its rows with the second
 * half, log2(LANES) times. */
ALWAYS_INLINE void transpose_block(vector row[LANES])
{
#if defined __AVX512F__ && !defined LING_DOUBLE
#define INTERLEAVE_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define INTERLEAVE_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined __AVX512F__ || (defined __AVX__ && !defined LING_DOUBLE)
#define INTERLEAVE_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define INTERLEAVE_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#elif defined __AVX__ || !defined LING_DOUBLE
#define INTERLEAVE_LOW 0, 4, 1, 5
#define INTERLEAVE_HIGH 2, 6, 3, 7
#else
#define INTERLEAVE_LOW 0, 2
#define INTERLEAVE_HIGH 1, 3
#endif
	vector next[LANES];
	for (int bit = 1; bit < LANES; bit *= 2) {
		UNROLL
		for (int i = 0; i < LANES / 2; i++) {
			next[2 * i] = __builtin_shufflevector(row[i], row[i + LANES / 2], INTERLEAVE_LOW);
			next[2 * i + 1] = __builtin_shufflevector(row[i], row[i + LANES / 2], INTERLEAVE_HIGH);
		}
		UNROLL
		for (int i = 0; i < LANES; i++)
			row[i] = next[i];
	}
}

/* An operand of a product as it is stored, row-major: row r begins at data + r * ld, or with a list of rows at
 * data + row_index[r] * ld (a gather without a copy). The product takes it as it is, or transposed.
 * A weight may be bfloat16 (bf16), and its rows from `split` on may be at another place (second, if not NULL); such a
 * weight is always taken transposed. */
struct matrix {
	const void *data;            /* reals, or uint16_t if bf16 */
	int64_t ld;                  /* the leading dimension: elements from one row to the next */
	bool transpose;
	const int32_t *row_index;    /* or NULL */
	bool bf16;
	const void *second;          /* row `split`, or NULL */
	int64_t split;
};

static struct matrix as_stored(const real *data, int64_t ld)
{
	return (struct matrix){.data = data, .ld = ld};
}

static struct matrix transposed(const real *data, int64_t ld)
{
	return (struct matrix){.data = data, .ld = ld, .transpose = true};
}

/* The address of element `col` of stored row r. */
static inline const void *element_address(const struct matrix *x, int64_t r, int64_t col)
{
	const bool second = x->second && r >= x->split;
	r = second ? r - x->split : x->row_index ? x->row_index[r] : r;
	const void *data = second ? x->second : x->data;
	return (const char *)data + (r * x->ld + col) * (x->bf16 ? sizeof(uint16_t) : sizeof(real));
}

/* LANES numbers in bfloat16, which is the upper half of a float's bits. */
typedef uint16_t bf16_vector __attribute__((vector_size(LANES * 2), aligned(2), may_alias));
typedef uint32_t bits_vector __attribute__((vector_size(LANES * 4)));
typedef float float_vector __attribute__((vector_size(LANES * 4)));

/* LANES reals, from an array of reals or of bfloat16. */
ALWAYS_INLINE vector load_vector(const void *from, bool bf16)
{
	if (!bf16)
		return *(const vector *)from;
	return __builtin_convertvector(
			(float_vector)(__builtin_convertvector(*(const bf16_vector *)from, bits_vector) << 16), vector);
}

/* out[i] = element i of n, from an array of reals or of bfloat16. */
static inline void load_reals(real *out, const void *from, bool bf16, int64_t n)
{
	if (!bf16) {
		memcpy(out, from, n * sizeof *out);
		return;
	}
	const uint16_t *half = from;
	int64_t i = 0;
	for (; i + LANES <= n; i += LANES)
		*(vector *)(out + i) = load_vector(half + i, true);
	for (; i < n; i++)
		out[i] = bf16_to_float(half[i]);
}

/* Packs rows first .. first + count - 1 of A, or such columns of B, with the terms p .. p + kc - 1 of each, into
 * panels of `width` of them (MR or NR, a constant wherever this is called): out [panels, kc, width], the last panel
 * filled up with zeros. Let a line be a row of A or a column of B. If `k_down`, k runs down the stored rows and a line
 * is a stored column; otherwise a line is a stored row, and blocks of it are transposed. bf16 is x->bf16. `out` must
 * have room for LANES more elements. */
ALWAYS_INLINE void pack(real *out, const int width, const struct matrix *x, bool k_down, const bool bf16,
		int64_t first, int64_t p, int64_t count, int64_t kc)
{
	if (k_down) {
		const int64_t whole = count / width * width; /* lines of full panels */
		for (int64_t q = 0; q < kc; q++) {
			const real *from = element_address(x, p + q, first);
			const real *ahead = element_address(x, p + min64(q + 8, kc - 1), first);
			real *to = out + q * width;
			for (int64_t i = 0; i < whole; i += width, to += width * kc) {
				__builtin_prefetch(ahead + i); /* the processor's own prefetcher does not follow this stride */
				memcpy(to, from + i, width * sizeof *out);
			}
			for (int i = 0; whole < count && i < width; i++)
				to[i] = whole + i < count ? from[whole + i] : 0;
		}
		return;
	}
	const int size = bf16 ? sizeof(uint16_t) : sizeof(real);
	for (int64_t line = 0; line < count; line += width, out += width * kc) {
		const char *from[MR + NR], *ahead[MR + NR]; /* [width] each line of this panel, and of the next one */
		const int n = (int)min64(width, count - line);
		UNROLL
		for (int i = 0; i < width; i++) {
			from[i] = element_address(x, first + min64(line + i, count - 1), p);
			ahead[i] = element_address(x, first + min64(line + width + i, count - 1), p);
		}
		int64_t q = 0;
		for (; q + LANES <= kc; q += LANES)
			/* From the last lines to the first: where width is no multiple of LANES, a block's surplus elements fall
			 * on the next term's, which are written after it. */
			for (int s = (width - 1) / LANES * LANES; s >= 0; s -= LANES) {
				vector block[LANES];
				UNROLL
				for (int i = 0; i < LANES; i++) {
					block[i] = s + i < n ? load_vector(from[s + i] + q * size, bf16) : (vector){0};
					if (s + i < width)
						__builtin_prefetch(ahead[s + i] + q * size);
				}
				transpose_block(block);
				UNROLL
				for (int i = 0; i < LANES; i++)
					*(vector *)(out + (q + i) * width + s) = block[i];
			}
		for (; q < kc; q++)
			for (int i = 0; i < width; i++) {
				out[q * width + i] = 0;
				if (i < n)
					load_reals(out + q * width + i, from[i] + q * size, bf16, 1);
			}
	}
}

static void pack_a(real *out, const struct matrix *a, int64_t row, int64_t p, int64_t rows, int64_t kc)
{
	pack(out, MR, a, a->transpose, false, row, p, rows, kc);
}

static void pack_b(real *out, const struct matrix *b, int64_t col, int64_t p, int64_t cols, int64_t kc)
{
	if (b->bf16)
		pack(out, NR, b, false, true, col, p, cols, kc);
	else
		pack(out, NR, b, !b->transpose, false, col, p, cols, kc);
}

/* An epilogue: what is done with whole rows of a product as soon as they are computed, while they are in the core's
 * cache (the word is CUTLASS's). `apply` works on rows first .. first + rows - 1 of the arrays below. */
struct epilogue {
	void (*apply)(const struct epilogue *e, int64_t first, int64_t rows);
	int64_t first; /* the product's first row in those arrays */
	real *out[3];
	const real *in[2];
	int64_t width;
};

static bool use_openblas; /* set once by kernels_init */

/* As ling_gemm, by OpenBLAS. Its sizes are int: rows and columns are those of a tile or a head's, and leading
 * dimensions widths of the model, all far below 2^31; k may be a micro-batch's rows, fewer than 2^31 too. */
static void openblas_gemm(int64_t m, int64_t n, int64_t k, real alpha, struct matrix a, struct matrix b,
		bool accumulate, real *c, int64_t ldc, const struct epilogue *epilogue)
{
#ifdef LING_DOUBLE
	cblas_dgemm
#else
	cblas_sgemm
#endif
		(CblasRowMajor, a.transpose ? CblasTrans : CblasNoTrans, b.transpose ? CblasTrans : CblasNoTrans, m, n, k,
		alpha, a.data, a.ld, b.data, b.ld, accumulate, c, ldc);
	if (epilogue)
		epilogue->apply(epilogue, epilogue->first, m);
}

/* One tile of C of up to MR rows and NR columns, from panels. The micro-kernel always writes NR columns: where C has
 * fewer left, it writes to a buffer, from which they are copied. */
static void compute_tile(micro_kernel_function *kernel, int mr, int64_t cols, int64_t kc, const real *a, const real *b,
		real alpha, bool add, real *c, int64_t ldc)
{
	real buffer[MR * NR];
	if (cols >= NR) {
		kernel(mr, kc, a, b, alpha, add, c, ldc);
		return;
	}
	kernel(mr, kc, a, b, 1, false, buffer, NR);
	for (int i = 0; i < mr; i++)
		for (int j = 0; j < cols; j++)
			c[i * ldc + j] = add ? c[i * ldc + j] + alpha * buffer[i * NR + j] : alpha * buffer[i * NR + j];
}

/* A product of few rows with a weight takes as long as reading the weight from memory. So it is read once, in blocks of
 * LANES columns of B and LANES terms, which are transposed and used in registers, while the next columns are on their
 * way to the cache. The terms are added in the same order as by the micro-kernel. */
enum { FEW_ROWS = 4 * LANES };   /* with more, packed panels are as fast: measured with vectors of 16, 8 and 4 floats */
enum { FEW_TERMS = 4 * KC };     /* terms of A that are copied at a time */
enum { ROWS_AT_ONCE = 4 };       /* whose sums are in registers */

/* sum [m, LANES] += a [m, LANES] block [LANES, LANES], the first `terms` terms of it. */
ALWAYS_INLINE void add_block(vector *sum, const real *a, const vector block[LANES], int64_t m, const int terms)
{
	int64_t i = 0;
	for (; i + ROWS_AT_ONCE <= m; i += ROWS_AT_ONCE) {
		vector s[ROWS_AT_ONCE];
		UNROLL
		for (int r = 0; r < ROWS_AT_ONCE; r++)
			s[r] = sum[i + r];
		UNROLL
		for (int t = 0; t < terms; t++)
			UNROLL
			for (int r = 0; r < ROWS_AT_ONCE; r++)
				s[r] += (a[(i + r) * LANES + t] - (vector){0}) * block[t];
		UNROLL
		for (int r = 0; r < ROWS_AT_ONCE; r++)
			sum[i + r] = s[r];
	}
	for (; i < m; i++) {
		vector s = sum[i];
		UNROLL
		for (int t = 0; t < terms; t++)
			s += (a[i * LANES + t] - (vector){0}) * block[t];
		sum[i] = s;
	}
}

/* sum [m, LANES] = the terms p .. p + kc - 1 of A times LANES columns of B from `col` on, or as many as there are up to
 * n. a [kc / LANES, m, LANES]. B is stored transposed; bf16 is b->bf16. */
ALWAYS_INLINE void sum_columns(vector *sum, const real *a, const struct matrix *b, const bool bf16, int64_t m,
		int64_t n, int64_t col, int64_t p, int64_t kc)
{
	const int size = bf16 ? sizeof(uint16_t) : sizeof(real);
	const char *from[LANES], *ahead[LANES]; /* these columns, and the next ones */
	vector block[LANES];
	for (int i = 0; i < LANES; i++) {
		from[i] = element_address(b, min64(col + i, n - 1), p);
		ahead[i] = element_address(b, min64(col + LANES + i, n - 1), p);
	}
	memset(sum, 0, m * sizeof *sum);
	int64_t q = 0;
	for (; q + LANES <= kc; q += LANES, a += m * LANES) {
		UNROLL
		for (int i = 0; i < LANES; i++) {
			block[i] = load_vector(from[i] + q * size, bf16);
			__builtin_prefetch(ahead[i] + q * size, 0, 2); /* to the second level of cache */
		}
		transpose_block(block);
		add_block(sum, a, block, m, LANES);
	}
	if (q < kc) {
		for (int i = 0; i < LANES; i++) {
			real rest[LANES] = {0};
			load_reals(rest, from[i] + q * size, bf16, kc - q);
			memcpy(&block[i], rest, sizeof rest);
		}
		transpose_block(block);
		add_block(sum, a, block, m, (int)(kc - q));
	}
}

/* As ling_gemm, with m <= FEW_ROWS; A is as stored, B is stored transposed. */
static void few_rows_gemm(int64_t m, int64_t n, int64_t k, real alpha, const struct matrix *a, const struct matrix *b,
		bool accumulate, real *c, int64_t ldc)
{
	real a_blocks[FEW_ROWS * FEW_TERMS] __attribute__((aligned(64))); /* [FEW_TERMS / LANES, m, LANES] */
	vector sum[FEW_ROWS] __attribute__((aligned(64)));
	for (int64_t from = 0; from == 0 || from < k; from += FEW_TERMS) {
		const int64_t end = min64(k, from + FEW_TERMS);
		for (int64_t p = from; p < end; p += LANES)
			for (int64_t i = 0; i < m; i++)
				memcpy(a_blocks + (p - from) * m + i * LANES, element_address(a, i, p),
						min64(LANES, end - p) * sizeof *a_blocks);
		for (int64_t col = 0; col < n; col += LANES)
			for (int64_t p = from; p == 0 || p < end; p += KC) {
				const int64_t kc = min64(KC, end - p), cols = min64(LANES, n - col);
				const bool add = accumulate || p > 0;
				if (b->bf16)
					sum_columns(sum, a_blocks + (p - from) * m, b, true, m, n, col, p, kc);
				else
					sum_columns(sum, a_blocks + (p - from) * m, b, false, m, n, col, p, kc);
				for (int64_t i = 0; i < m; i++) {
					real *out = c + i * ldc + col;
					for (int j = 0; j < cols; j++)
						out[j] = add ? out[j] + alpha * sum[i][j] : alpha * sum[i][j];
				}
			}
	}
}

/* C [m, n] (+)= alpha A B by ling's own kernel: A [m, k], B [k, n], rows of C ldc apart. With k = 0, C becomes 0 or
 * stays as it is. `epilogue` may be NULL; otherwise it is applied to all m rows. */
static void ling_gemm(int64_t m, int64_t n, int64_t k, real alpha, struct matrix a, struct matrix b, bool accumulate,
		real *c, int64_t ldc, const struct epilogue *epilogue)
{
	if (m <= FEW_ROWS && b.transpose && !a.transpose) {
		few_rows_gemm(m, n, k, alpha, &a, &b, accumulate, c, ldc);
		if (epilogue)
			epilogue->apply(epilogue, epilogue->first, m);
		return;
	}
	const bool in_place = a.ld == UNPACKED_LD && !a.row_index;
	micro_kernel_function *const kernel =
			!in_place ? micro_kernel_packed : a.transpose ? micro_kernel_transposed : micro_kernel_in_place;
	real a_panels[MC * KC + LANES] __attribute__((aligned(64)));
	real b_panels[NC * KC + LANES] __attribute__((aligned(64)));
	for (int64_t col = 0; col < n; col += NC) {
		const int64_t cols = min64(NC, n - col);
		for (int64_t p = 0; p == 0 || p < k; p += KC) {
			const int64_t kc = min64(KC, k - p);
			pack_b(b_panels, &b, col, p, cols, kc);
			for (int64_t row = 0; row < m; row += MC) {
				const int64_t rows = min64(MC, m - row);
				const real *a_block = a_panels;
				int64_t row_step = kc; /* row i of A, a multiple of MR, begins at a_block + i * row_step */
				if (in_place) {
					a_block = (const real *)a.data + (a.transpose ? row + p * UNPACKED_LD : row * UNPACKED_LD + p);
					row_step = a.transpose ? 1 : UNPACKED_LD;
				} else
					pack_a(a_panels, &a, row, p, rows, kc);
				for (int64_t j = 0; j < cols; j += NR)
					for (int64_t i = 0; i < rows; i += MR)
						compute_tile(kernel, (int)min64(MR, rows - i), cols - j, kc, a_block + i * row_step,
								b_panels + j * kc, alpha, accumulate || p > 0, c + (row + i) * ldc + col + j, ldc);
				if (epilogue && col + cols == n && p + kc == k)
					epilogue->apply(epilogue, epilogue->first + row, rows);
			}
		}
	}
}

/* As ling_gemm, by OpenBLAS if it was chosen and can compute this product. Nothing happens if m or n is 0. */
static void gemm_with_epilogue(int64_t m, int64_t n, int64_t k, real alpha, struct matrix a, struct matrix b,
		bool accumulate, real *c, int64_t ldc, const struct epilogue *epilogue)
{
	if (m > 0 && n > 0)
		(use_openblas && !a.row_index && !b.row_index && !b.bf16 && !b.second ? openblas_gemm : ling_gemm)
				(m, n, k, alpha, a, b, accumulate, c, ldc, epilogue);
}

static void gemm(int64_t m, int64_t n, int64_t k, real alpha, struct matrix a, struct matrix b, bool accumulate,
		real *c, int64_t ldc)
{
	gemm_with_epilogue(m, n, k, alpha, a, b, accumulate, c, ldc, NULL);
}

/* ============================================================================================================
 * OpenBLAS, and the number of threads
 * ========================================================================================================== */

/* Sets the number of OpenBLAS's own threads. A library that was built with OpenMP would change ling's too. */
static void set_openblas_threads(int n)
{
	const int threads = omp_get_max_threads();
	openblas_set_num_threads(n);
	omp_set_num_threads(threads);
}

void kernels_init(bool openblas)
{
	use_openblas = openblas;
	set_openblas_threads(1);
}

void kernels_set_threads(int threads)
{
	omp_set_num_threads(threads);
}

static struct { void (*task)(void *observer, bool begins); void *observer; } measured; /* see kernels_observe */

void kernels_observe(void (*task)(void *observer, bool begins), void *observer)
{
	measured.task = task;
	measured.observer = observer;
}

/* To be called at the begin and at the end of each task that goes to whichever thread is free. */
static void begin_task(void)
{
	if (measured.task)
		measured.task(measured.observer, true);
}

static void end_task(void)
{
	if (measured.task)
		measured.task(measured.observer, false);
}

int kernels_threads(void)
{
	return omp_get_max_threads();
}

void single_gemm(real *c, const real *a, bool transpose_a, const real *b, bool transpose_b, int64_t m, int64_t n,
		int64_t k, int openblas_threads)
{
	const int own = omp_get_max_threads();
	if (openblas_threads > 0) {
		set_openblas_threads(openblas_threads);
		omp_set_num_threads(openblas_threads); /* a library that was built with OpenMP takes no more than these */
	}
	(openblas_threads > 0 ? openblas_gemm : ling_gemm)(m, n, k, 1, transpose_a ? transposed(a, m) : as_stored(a, k),
			transpose_b ? transposed(b, k) : as_stored(b, n), false, c, n, NULL);
	set_openblas_threads(1);
	omp_set_num_threads(own);
}

const char *blas_core(void)
{
	return openblas_get_corename();
}

/* Which instructions the OpenBLAS kernel of that name uses: 0 SSE, 1 AVX, 2 AVX2 with FMA, 3 AVX-512. A name that is
 * not known here counts as 3: a newer library may have chosen it for a good reason. */
static int core_level(const char *name)
{
	static const char *const levels[3][16] = {
		{"Prescott", "Core2", "Penryn", "Dunnington", "Nehalem", "Atom", "Nano", "Katmai", "Coppermine", "Northwood",
				"Banias", "Athlon",
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
	if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
			__builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
		best = "SkylakeX";
	else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
		best = "Haswell";
#endif
	return best && core_level(blas_core()) < core_level(best) ? best : NULL; /* SkylakeX's is 3 */
}

/* ============================================================================================================
 * Plain arrays
 * ========================================================================================================== */

/* A sum over many rows or elements is cut into this many blocks, whatever the number of threads; the blocks' sums are
 * added in order. */
enum { SUM_BLOCKS = 64 };

int64_t row_sum_scratch(int64_t N)
{
	return SUM_BLOCKS * N;
}

/* out [N]: out[j] (+)= the sum over b of partial[b, j]; partial [SUM_BLOCKS, N]. */
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
		begin_task();
		double sum = 0;
		#pragma omp simd reduction(+ : sum)
		for (int64_t i = n * b / SUM_BLOCKS; i < n * (b + 1) / SUM_BLOCKS; i++)
			sum += (double)x[i] * x[i];
		partial[b] = sum;
		end_task();
	}
	double sum = 0;
	for (int b = 0; b < SUM_BLOCKS; b++)
		sum += partial[b];
	return sum;
}

void *allocate_large(size_t bytes)
{
	const size_t page = 2 << 20, size = (bytes / page + 1) * page;
	char *p = aligned_alloc(page, size);
	if (!p)
		return NULL;
	madvise(p, size, MADV_HUGEPAGE);
	#pragma omp parallel for
	for (size_t i = 0; i < size; i += page)
		memset(p + i, 0, page);
	return p;
}

void copy_array(real *out, const real *in, int64_t n)
{
	#pragma omp parallel for if (n > MIN_PARALLEL_ELEMENTS)
	for (int b = 0; b < SUM_BLOCKS; b++) {
		int64_t begin = n * b / SUM_BLOCKS, end = n * (b + 1) / SUM_BLOCKS;
		memcpy(out + begin, in + begin, (end - begin) * sizeof *out);
	}
}

void copy_columns(real *out, int64_t out_width, const real *x, int64_t x_width, int64_t T, int64_t cols)
{
	#pragma omp parallel for if (T * cols > MIN_PARALLEL_ELEMENTS)
	for (int64_t t = 0; t < T; t++)
		memcpy(out + t * out_width, x + t * x_width, cols * sizeof *out);
}

void scale_columns(real *out, const real *x, const real *scale, int64_t T, int64_t N)
{
	#pragma omp parallel for if (T * N > MIN_PARALLEL_ELEMENTS)
	for (int64_t t = 0; t < T; t++)
		for (int64_t j = 0; j < N; j++)
			out[t * N + j] = x[t * N + j] * scale[j];
}

/* ============================================================================================================
 * Matrix products: plain and grouped
 *
 * A grouped product (grouped GEMM) is a product for each expert, over that expert's contiguous rows. A plain product
 * is one with a single group. The result of every group is cut into tiles, and each tile is a task for one thread: so
 * all cores are busy whether many experts have few rows each or one expert has them all. A tile's sum over k is never
 * cut.
 * ========================================================================================================== */

/* About how large tiles are: rows and columns of the result. */
struct tile_size { int64_t rows, cols; };

/* The number of tiles of about `size` that n elements are cut into. */
static int64_t count_tiles(int64_t n, int64_t size)
{
	return (n + size - 1) / size;
}

/* Where tile i of n elements begins: the tiles are of equal size, rounded up to a multiple of `unit`. */
static int64_t tile_begin(int64_t i, int64_t n, int64_t size, int64_t unit)
{
	const int64_t tiles = count_tiles(n, size);
	return i >= tiles ? n : min64(n, count_tiles(n * i / tiles, unit) * unit);
}
enum { ROW_UNIT = LANES, COL_UNIT = NR };

enum { LARGEST_TILE = 1024 }; /* rows; a tile has at most NC columns */

/* The tiles of one result for many threads: those whose largest thread is done first. It takes a tile for each round,
 * and a tile takes the time of its elements and that of packing its operands. */
static struct tile_size choose_equal_tiles(int64_t rows, int64_t cols, bool whole_rows, int threads)
{
	enum { SMALLEST_ROWS = 2 * ROW_UNIT, MOST_PER_THREAD = 32 };
	const double pack = 10;      /* packing an element of an operand takes as long as so many multiply-adds */
	const double uneven = 0.3;   /* by how much of a tile threads differ in speed */
	struct tile_size best = {0};
	double least = INFINITY;
	for (int64_t i = count_tiles(rows, LARGEST_TILE); i <= count_tiles(rows, SMALLEST_ROWS); i++)
		for (int64_t j = count_tiles(cols, NC); j <= count_tiles(cols, COL_UNIT); j++) {
			if (best.rows && i * j > MOST_PER_THREAD * threads)
				break; /* `uneven` is 1 % then: a wide result has too many smaller ones to try them all */
			const struct tile_size tile = {count_tiles(rows, i), count_tiles(cols, j)};
			const double largest_rows = count_tiles(tile.rows, ROW_UNIT) * ROW_UNIT;
			const double largest_cols = count_tiles(tile.cols, COL_UNIT) * COL_UNIT;
			const int64_t tiles = count_tiles(rows, tile.rows) * count_tiles(cols, tile.cols);
			const double rounds = count_tiles(tiles, threads);
			double time = (rounds + uneven) * (largest_rows * largest_cols + pack * (largest_rows + largest_cols));
			if (whole_rows && tile.cols < cols)
				time *= 1.1; /* the epilogue is a loop of its own */
			if (time < least) {
				least = time;
				best = tile;
			}
		}
	return best;
}

/* The tiles for `groups` results of about [rows, cols] each: as large as possible, since each tile packs its operands
 * anew, but enough of them for all threads. whole_rows: rather as wide as the result. */
static struct tile_size choose_tile_size(int64_t groups, int64_t rows, int64_t cols, bool whole_rows)
{
	enum { SMALLEST = 64, FEW_THREADS = 8, PER_THREAD = 2, MANY_PER_THREAD = 8 };
	const int threads = omp_get_max_threads();
	if (groups == 1 && threads > FEW_THREADS)
		return choose_equal_tiles(rows, cols, whole_rows, threads);
	if (groups > 1)
		rows += rows / 4; /* so that a group of a few more rows than the mean is not cut for them */
	int64_t row_tiles = max64(count_tiles(rows, LARGEST_TILE), 1), col_tiles = count_tiles(cols, NC);
	for (;;) {
		const struct tile_size tile = {max64(rows / row_tiles + 1, SMALLEST), cols / col_tiles + 1};
		const int64_t tiles = groups * row_tiles * col_tiles;
		/* Few tiles should be a multiple of the threads, if all are alike; with many, threads that are done early take
		 * more of them. */
		if ((groups == 1 && tiles >= PER_THREAD * threads && tiles % threads == 0) ||
				tiles >= MANY_PER_THREAD * threads ||
				(tile.rows <= SMALLEST && tile.cols <= SMALLEST))
			return tile;
		if (tile.rows > (whole_rows && col_tiles == 1 ? SMALLEST : tile.cols))
			row_tiles++;
		else
			col_tiles++;
	}
}

/* The part of x [., ld] from row `first` and column `col` on; with row_index, from row row_index[first] on, and so
 * forth. */
static struct matrix submatrix(const real *x, int64_t ld, const int32_t *row_index, int64_t first, int64_t col,
		bool transpose)
{
	return (struct matrix){.data = x + (row_index ? 0 : first * ld) + col, .ld = ld, .transpose = transpose,
			.row_index = row_index ? row_index + first : NULL};
}

void stack_weights(struct weight *out, const real *w, int G, int64_t size)
{
	for (int g = 0; g < G; g++)
		out[g] = (struct weight){.data = w + g * size};
}

/* The operand B that gives the columns from `col` on of a product with a weight: of w [N, k] transposed, or of w [k,
 * N] as it is stored. */
static struct matrix weight_columns(const struct weight *w, int64_t col, int64_t k, int64_t N, bool transpose)
{
	struct matrix x = {.data = w->data, .ld = transpose ? k : N, .transpose = transpose, .bf16 = w->bf16};
	assert(transpose || (!w->bf16 && !w->second));
	if (w->second && col < N / 2) {
		x.second = w->second;
		x.split = N / 2 - col;
	} else if (w->second) {
		x.data = w->second;
		col -= N / 2;
	}
	x.data = (const char *)x.data + col * (transpose ? k : 1) * (w->bf16 ? sizeof(uint16_t) : sizeof(real));
	return x;
}

/* The group of a tile: first_tile [G + 1] are the numbers of the groups' first tiles, and of all. */
static int group_of_tile(const int64_t *first_tile, int G, int64_t number)
{
	int low = 0, high = G - 1;
	while (low < high) {
		const int middle = (low + high + 1) / 2;
		if (first_tile[middle] <= number)
			low = middle;
		else
			high = middle - 1;
	}
	return low;
}

/* out [R, cols] (+)= in [R, k] B, where B of the rows of group g is the transpose of w[g] [cols, k], or w[g] [k, cols]
 * as it is stored; R = offset[G]. With row_index [R], row r of `in` is its row row_index[r]. `epilogue` is NULL, or is
 * applied to all rows: by each tile to its own rows if tiles are as wide as the result, else by all threads at the
 * end. */
static void grouped_gemm(real *out, const real *in, const int32_t *row_index, const struct weight *w, bool transpose,
		const int64_t *offset, int G, int64_t k, int64_t cols, bool accumulate, const struct epilogue *epilogue)
{
	int groups = 0; /* that have rows */
	for (int g = 0; g < G; g++)
		groups += offset[g + 1] > offset[g];
	if (groups == 0)
		return;
	const struct tile_size tile = choose_tile_size(groups, offset[G] / groups, cols, epilogue != NULL);
	const int64_t col_tiles = count_tiles(cols, tile.cols);
	const bool by_tile = epilogue && col_tiles == 1;
	int64_t first_tile[G + 1];
	first_tile[0] = 0;
	for (int g = 0; g < G; g++)
		first_tile[g + 1] = first_tile[g] + count_tiles(offset[g + 1] - offset[g], tile.rows) * col_tiles;
	#pragma omp parallel for schedule(dynamic) if (offset[G] * k * cols / LANES > MIN_PARALLEL_ELEMENTS)
	for (int64_t number = 0; number < first_tile[G]; number++) {
		begin_task();
		const int g = group_of_tile(first_tile, G, number);
		const int64_t i = (number - first_tile[g]) / col_tiles, j = (number - first_tile[g]) % col_tiles;
		const int64_t rows = offset[g + 1] - offset[g];
		const int64_t t = offset[g] + tile_begin(i, rows, tile.rows, ROW_UNIT);
		const int64_t t_end = offset[g] + tile_begin(i + 1, rows, tile.rows, ROW_UNIT);
		const int64_t n = tile_begin(j, cols, tile.cols, COL_UNIT);
		const int64_t n_end = tile_begin(j + 1, cols, tile.cols, COL_UNIT);
		struct epilogue tile_epilogue = {0};
		if (by_tile) {
			tile_epilogue = *epilogue;
			tile_epilogue.first = t;
		}
		gemm_with_epilogue(t_end - t, n_end - n, k, 1, submatrix(in, k, row_index, t, 0, false),
				weight_columns(&w[g], n, k, cols, transpose), accumulate, out + t * cols + n, cols,
				by_tile ? &tile_epilogue : NULL);
		end_task();
	}
	if (epilogue && !by_tile) {
		enum { ROWS = 16 };
		#pragma omp parallel for if (offset[G] * cols > MIN_PARALLEL_ELEMENTS)
		for (int64_t r = 0; r < offset[G]; r += ROWS)
			epilogue->apply(epilogue, r, min64(ROWS, offset[G] - r));
	}
}

void grouped_matmul_forward(real *y, const real *x, const int32_t *row_index, const struct weight *w,
		const int64_t *offset, int G, int64_t K, int64_t N, bool accumulate)
{
	grouped_gemm(y, x, row_index, w, true, offset, G, K, N, accumulate, NULL);
}

void grouped_matmul_backward_input(real *dx, const real *dy, const int32_t *row_index, const real *w,
		const int64_t *offset, int G, int64_t K, int64_t N, bool accumulate)
{
	struct weight weights[G];
	stack_weights(weights, w, G, N * K);
	grouped_gemm(dx, dy, row_index, weights, false, offset, G, N, K, accumulate, NULL);
}

void grouped_matmul_backward_weight(real *dw, const real *dy, const int32_t *dy_row_index, const real *x,
		const int32_t *x_row_index, const int64_t *offset, int G, int64_t K, int64_t N, bool accumulate)
{
	const struct tile_size tile = choose_tile_size(G, N, K, false);
	int order[G]; /* the groups, those with the most rows first: they take longest */
	for (int g = 0, i; g < G; g++) {
		for (i = g; i > 0 && offset[order[i - 1] + 1] - offset[order[i - 1]] < offset[g + 1] - offset[g]; i--)
			order[i] = order[i - 1];
		order[i] = g;
	}
	const int64_t row_tiles = count_tiles(N, tile.rows), col_tiles = count_tiles(K, tile.cols);
	#pragma omp parallel for schedule(dynamic)
	for (int64_t number = 0; number < G * row_tiles * col_tiles; number++) {
		const int g = order[number / (row_tiles * col_tiles)];
		const int64_t first = offset[g], rows = offset[g + 1] - first;
		if (rows == 0 && accumulate)
			continue; /* but written, the gradient of an expert that no token chose is 0 */
		begin_task();
		const int64_t i = number / col_tiles % row_tiles, j = number % col_tiles;
		const int64_t n = tile_begin(i, N, tile.rows, ROW_UNIT), n_end = tile_begin(i + 1, N, tile.rows, ROW_UNIT);
		const int64_t k = tile_begin(j, K, tile.cols, COL_UNIT), k_end = tile_begin(j + 1, K, tile.cols, COL_UNIT);
		gemm(n_end - n, k_end - k, rows, 1, submatrix(dy, N, dy_row_index, first, n, true),
				submatrix(x, K, x_row_index, first, k, false), accumulate, dw + (g * N + n) * K + k, K);
		end_task();
	}
}

void matmul_forward(real *y, const real *x, const struct weight *w, const real *bias, int64_t T, int64_t K, int64_t N,
		bool accumulate)
{
	grouped_matmul_forward(y, x, NULL, w, (int64_t[]){0, T}, 1, K, N, accumulate);
	if (bias) {
		#pragma omp parallel for if (T * N > MIN_PARALLEL_ELEMENTS)
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
		begin_task();
		real *partial = scratch + b * N;
		memset(partial, 0, N * sizeof *partial);
		for (int64_t t = T * b / SUM_BLOCKS; t < T * (b + 1) / SUM_BLOCKS; t++)
			for (int64_t j = 0; j < N; j++)
				partial[j] += dy[t * N + j];
		end_task();
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

void embedding_forward(real *out, const int32_t *token, const struct weight *w, int64_t first, int64_t T, int64_t H,
		int64_t V)
{
	#pragma omp parallel for if (T * H > MIN_PARALLEL_ELEMENTS)
	for (int64_t t = 0; t < T; t++) {
		const int64_t v = token[t] - first;
		if (v >= 0 && v < V)
			load_reals(out + t * H, weight_at(w, v * H), w->bf16, H);
		else
			memset(out + t * H, 0, H * sizeof *out);
	}
}

void embedding_backward(real *dw, const int32_t *token, const real *dout, int64_t first, int64_t T, int64_t H,
		int64_t V, bool accumulate)
{
	if (!accumulate) {
		#pragma omp parallel for
		for (int64_t v = 0; v < V; v++)
			memset(dw + v * H, 0, H * sizeof *dw);
	}
	/* A token may occur many times, so threads divide the columns and not the tokens: each sum is in the order of the
	 * tokens. */
	const int64_t block = 32;
	#pragma omp parallel for
	for (int64_t col = 0; col < H; col += block)
		for (int64_t t = 0; t < T; t++) {
			const int64_t v = token[t] - first;
			if (v < 0 || v >= V)
				continue;
			for (int64_t j = col; j < min64(col + block, H); j++)
				dw[v * H + j] += dout[t * H + j];
		}
}

/* ============================================================================================================
 * RMSNorm: y = w x / sqrt(mean(x^2) + eps)   (Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4)
 * ========================================================================================================== */

/* One row [H]. Returns 1 / sqrt(mean(x^2) + eps). out may be x. */
static inline real norm_row(real *out, const real *x, const real *w, int64_t H, double eps)
{
	/* in float, the square of a value beyond 1e19 would be infinite, and the row would become 0 unnoticed */
	double sum = 0;
	#pragma omp simd reduction(+ : sum)
	for (int64_t j = 0; j < H; j++)
		sum += (double)x[j] * x[j];
	const real rstd = (real)(1 / sqrt(sum / H + eps));
	for (int64_t j = 0; j < H; j++)
		out[j] = w[j] * x[j] * rstd;
	return rstd;
}

/* The backward pass of a row: dx (add: +=, and dout may not be dx) and dw +=. With n = x rstd and g = dout w:
 * dx = rstd (g - n mean(g n)), and dw is the sum over the rows of dout n. */
static inline void norm_row_backward(real *dx, real *dw, const real *dout, const real *x, const real *w, real rstd,
		int64_t H, bool add)
{
	real dot = 0;
	#pragma omp simd reduction(+ : dot)
	for (int64_t j = 0; j < H; j++)
		dot += dout[j] * w[j] * x[j];
	const real mean = dot * rstd * rstd / H;
	for (int64_t j = 0; j < H; j++) {
		const real g = dout[j];
		dx[j] = (add ? dx[j] : 0) + rstd * (g * w[j] - x[j] * mean);
		dw[j] += g * x[j] * rstd;
	}
}

void rmsnorm_forward(real *out, real *rstd, const real *x, const real *w, int64_t T, int64_t H, double eps)
{
	#pragma omp parallel for if (T * H > MIN_PARALLEL_ELEMENTS)
	for (int64_t t = 0; t < T; t++)
		rstd[t] = norm_row(out + t * H, x + t * H, w, H, eps);
}

void rmsnorm_backward(real *dx, real *dw, const real *dout, const real *x, const real *w, const real *rstd, int64_t T,
		int64_t H, bool accumulate, real *scratch)
{
	#pragma omp parallel for schedule(dynamic)
	for (int b = 0; b < SUM_BLOCKS; b++) {
		begin_task();
		real *partial = scratch + b * H;
		memset(partial, 0, H * sizeof *partial);
		for (int64_t t = T * b / SUM_BLOCKS; t < T * (b + 1) / SUM_BLOCKS; t++)
			norm_row_backward(dx + t * H, partial, dout + t * H, x + t * H, w, rstd[t], H, true);
		end_task();
	}
	add_partial_rows(dw, scratch, H, accumulate);
}

void qk_norm_forward(real *qkv, real *heads, real *rstd, const real *w, int64_t T, int nh, int nkv, int64_t d,
		double eps)
{
	const int n = nh + nkv;
	#pragma omp parallel for if (T * n * d > MIN_PARALLEL_ELEMENTS)
	for (int64_t t = 0; t < T; t++) {
		real *row = qkv + t * (n + nkv) * d;
		if (heads)
			memcpy(heads + t * n * d, row, n * d * sizeof *row);
		for (int head = 0; head < n; head++) {
			const real r = norm_row(row + head * d, row + head * d, head < nh ? w : w + d, d, eps);
			if (rstd)
				rstd[t * n + head] = r;
		}
	}
}

void qk_norm_backward(real *dqkv, real *dw, const real *heads, const real *rstd, const real *w, int64_t T, int nh,
		int nkv, int64_t d, bool accumulate, real *scratch)
{
	const int n = nh + nkv;
	#pragma omp parallel for schedule(dynamic)
	for (int b = 0; b < SUM_BLOCKS; b++) {
		begin_task();
		real *partial = scratch + b * 2 * d;
		memset(partial, 0, 2 * d * sizeof *partial);
		for (int64_t t = T * b / SUM_BLOCKS; t < T * (b + 1) / SUM_BLOCKS; t++)
			for (int head = 0; head < n; head++) {
				const int64_t kind = head < nh ? 0 : d;
				real *row = dqkv + (t * (n + nkv) + head) * d;
				norm_row_backward(row, partial + kind, row, heads + (t * n + head) * d, w + kind, rstd[t * n + head],
						d, false);
			}
		end_task();
	}
	add_partial_rows(dw, scratch, 2 * d, accumulate);
}

/* ============================================================================================================
 * Rotary position embedding (Su et al. 2021, arXiv:2104.09864), rotate-half form: of the first `rot` elements of a
 * head, the pair i and i + rot/2 is rotated by the angle  position * theta^(-2i/rot)
 * ========================================================================================================== */

void rope_table(real *table, int64_t L, int64_t rot, const double *frequency, double scale)
{
	for (int64_t t = 0; t < L; t++)
		for (int64_t i = 0; i < rot / 2; i++) {
			double angle = t * frequency[i];
			table[t * rot + i] = (real)(scale * cos(angle));
			table[t * rot + rot / 2 + i] = (real)(scale * sin(angle));
		}
}

/* Turns the query and key heads of qkv in place, by the angle (sign 1) or by its negative (sign -1). */
static void rope_rotate(real *qkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv,
		int64_t d, int64_t rot, real sign)
{
	#pragma omp parallel for if (T * (nh + nkv) * d > MIN_PARALLEL_ELEMENTS)
	for (int64_t t = 0; t < T; t++) {
		const real *cosine = table + (t % L - (document ? document[t] : 0)) * rot, *sine = cosine + rot / 2;
		for (int head = 0; head < nh + nkv; head++) {
			real *lo = qkv + (t * (nh + 2 * nkv) + head) * d, *hi = lo + rot / 2;
			#pragma omp simd
			for (int64_t i = 0; i < rot / 2; i++) {
				real a = lo[i], b = hi[i], s = sign * sine[i];
				lo[i] = a * cosine[i] - b * s;
				hi[i] = b * cosine[i] + a * s;
			}
		}
	}
}

void rope_forward(real *qkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv,
		int64_t d, int64_t rot)
{
	rope_rotate(qkv, table, document, T, L, nh, nkv, d, rot, 1);
}

void rope_backward(real *dqkv, const real *table, const int32_t *document, int64_t T, int64_t L, int nh, int nkv,
		int64_t d, int64_t rot)
{
	rope_rotate(dqkv, table, document, T, L, nh, nkv, d, rot, -1); /* the transpose of a rotation is its inverse */
}

/* ============================================================================================================
 * Causal grouped-query attention by blocks (FlashAttention: Dao et al. 2022, arXiv:2205.14135)
 *
 * Each block of queries meets the keys in blocks of KEY_BLOCK, up to the block's last query. The scores of one pair of
 * blocks stay in a core's cache, and no [L, L] matrix ever exists. The maximum and the sum of the softmax are
 * corrected from block to block. The query heads that share a key-value head are in one block as far as they fit. The
 * backward pass computes the probabilities again from the log-sum-exp of each row. With documents, a query block
 * begins with the key block that holds the first key of its first document.
 *
 * A row is a query: a position and a head. Its row of qkv [L, nh + 2 nkv, d] or out [L, nh, d] is a vector of d
 * elements.
 * ========================================================================================================== */

enum { QUERY_BLOCK = 256, KEY_BLOCK = KV_BLOCK }; /* rows and keys of a block, at most */
_Static_assert((int)KEY_BLOCK == (int)UNPACKED_LD, "gemm reads scores where they stand");

/* A pair of a query block and a key block: its scores, or probabilities, and their gradients, both [QUERY_BLOCK,
 * KEY_BLOCK]. */
enum { PAIR = 2 * QUERY_BLOCK * KEY_BLOCK };

/* Elements of a thread's part of the scratch: a pair, and outputs or the gradients of queries [QUERY_BLOCK, d]. */
static int64_t block_scratch(int64_t d)
{
	return PAIR + QUERY_BLOCK * d;
}

int64_t attention_scratch(int64_t d)
{
	return block_scratch(d) * kernels_threads();
}

/* A block of queries: `heads` heads from `head` on, which share a key-value head, at `positions` positions of the
 * sequence from `first` on. Its rows are ordered by head, then by position. */
struct query_block {
	int head;
	int64_t heads, first, positions, rows;
	/* [rows] where each row is in qkv and in out, counted from position `first`: so an int is enough, however long the
	 * sequence */
	int32_t qkv_row[QUERY_BLOCK], out_row[QUERY_BLOCK];
	const int32_t *document;     /* [positions] the position where the document of each begins; NULL: 0 for all */
};

/* How a sequence is cut: blocks of `heads` heads and `positions` positions. The nh / nkv query heads of a key-value
 * head are in `head_groups` groups, and the L positions in `num_blocks` blocks. Many rows make products efficient; few
 * positions waste less on the diagonal, where half of the scores are masked. */
struct query_blocking { int64_t heads, head_groups, positions, num_blocks; };

static struct query_blocking choose_query_blocking(int64_t L, int nh, int nkv)
{
	struct query_blocking cut = {.positions = min64(max64(L / 8, 64), QUERY_BLOCK / min64(nh / nkv, 4))};
	cut.heads = min64(nh / nkv, QUERY_BLOCK / cut.positions);
	cut.head_groups = (nh / nkv + cut.heads - 1) / cut.heads;
	cut.num_blocks = (L + cut.positions - 1) / cut.positions;
	return cut;
}

/* Block number `block` of L queries that follow `past` positions of the sequence, for head group `group` of key-value
 * head kv. `document` [L] is that of the queries, or NULL. */
static struct query_block make_query_block(const struct query_blocking *cut, int kv, int64_t group, int64_t block,
		int64_t past, const int32_t *document, int64_t L, int nh, int nkv)
{
	const int64_t first = block * cut->positions;
	struct query_block q = {.head = kv * (nh / nkv) + group * cut->heads, .first = past + first};
	q.document = document ? document + first : NULL;
	q.heads = min64(cut->heads, (kv + 1) * (nh / nkv) - q.head);
	q.positions = min64(cut->positions, L - first);
	for (int64_t h = 0; h < q.heads; h++)
		for (int64_t i = 0; i < q.positions; i++, q.rows++) {
			q.qkv_row[q.rows] = i * (nh + 2 * nkv) + q.head + h;
			q.out_row[q.rows] = i * nh + q.head + h;
		}
	return q;
}

/* The block's rows of qkv or out as a matrix [rows, d]. */
static struct matrix block_rows(const real *x, const int32_t *row_index, int64_t d)
{
	return (struct matrix){.data = x, .ld = d, .row_index = row_index};
}

/* scores [rows, keys] = Q K^T / sqrt(d), rows KEY_BLOCK apart; key j is at k + j * ld. */
static void attention_scores(real *scores, const struct query_block *q, const real *qkv, const real *k, int64_t keys,
		int64_t ld, int64_t d)
{
	gemm(q->rows, keys, d, (real)(1 / sqrt((double)d)), block_rows(qkv, q->qkv_row, d), transposed(k, ld), false,
			scores, KEY_BLOCK);
}

/* The first key that row r attends to: where its document begins. */
static int64_t first_key_of_row(const struct query_block *q, int64_t r)
{
	return q->document ? q->document[r % q->positions] : 0;
}

/* Where the first key block that any row attends to begins: that of row 0, since documents are in order. */
static int64_t first_key_of_block(const struct query_block *q)
{
	return first_key_of_row(q, 0) / KEY_BLOCK * KEY_BLOCK;
}

/* Of the keys key .. key + keys - 1, those that row r attends to, from its document's first to its own position:
 * numbers from .. to - 1, counted from `key`. Causal and document mask in one. */
struct key_range { int64_t from, to; };
static struct key_range unmasked_keys(const struct query_block *q, int64_t r, int64_t key, int64_t keys)
{
	const int64_t to = min64(max64(q->first + r % q->positions + 1 - key, 0), keys);
	return (struct key_range){min64(max64(first_key_of_row(q, r) - key, 0), to), to};
}

/* One block's rows of out, and of lse if it is not NULL. qkv, out and lse begin at the block's first position. k and v
 * are those of the key-value head, rows ld apart. Key block i has its rows from first_row[i] on; NULL: from
 * i KEY_BLOCK on. Key blocks begin at multiples of KEY_BLOCK, so that the bits of a row do not depend on the query
 * block that it is in. */
static void attention_block_forward(real *out, real *lse, const struct query_block *q, const real *qkv, const real *k,
		const real *v, const int64_t *first_row, int64_t ld, int64_t d, real *scratch)
{
	/* After each key block, for each row: max = the largest score so far; sum = the sum of e^(score - max);
	 * o = the sum of e^(score - max) v. At the end O = o / sum and lse = max + ln(sum). */
	real *scores = scratch, *o = scores + 2 * QUERY_BLOCK * KEY_BLOCK;
	real max[QUERY_BLOCK], sum[QUERY_BLOCK];
	for (int64_t key = first_key_of_block(q); key < q->first + q->positions; key += KEY_BLOCK) {
		const int64_t keys = min64(KEY_BLOCK, q->first + q->positions - key);
		const int64_t offset = (first_row ? first_row[key / KEY_BLOCK] : key) * ld;
		attention_scores(scores, q, qkv, k + offset, keys, ld, d);
		for (int64_t r = 0; r < q->rows; r++) {
			const struct key_range seen = unmasked_keys(q, r, key, keys);
			const int64_t n = seen.to - seen.from;
			const bool started = key > first_key_of_row(q, r); /* the row had keys in earlier blocks */
			real *row = scores + r * KEY_BLOCK, *s = row + seen.from, old_max = started ? max[r] : 0;
			memset(row, 0, seen.from * sizeof *row);
			memset(s + n, 0, (keys - seen.to) * sizeof *row);
			if (n == 0)
				continue;
			real block_max = max_element(s, n);
			max[r] = started && !(block_max > old_max) ? old_max : block_max;
			real block_sum = exponentials(s, s, max[r], n);
			real rescale = started ? exponential(old_max - max[r]) : 0; /* for what was summed with the old maximum */
			sum[r] = started ? sum[r] * rescale + block_sum : block_sum;
			for (int64_t j = 0; started && j < d; j++)
				o[r * d + j] *= rescale;
		}
		gemm(q->rows, d, keys, 1, as_stored(scores, KEY_BLOCK), as_stored(v + offset, ld),
				key > first_key_of_block(q), o, d);
	}
	for (int64_t r = 0; r < q->rows; r++) {
		if (lse)
			lse[q->out_row[r]] = max[r] + (real)log(sum[r]);
		for (int64_t j = 0; j < d; j++)
			out[q->out_row[r] * d + j] = o[r * d + j] / sum[r];
	}
}

void attention_forward(real *out, real *lse, const real *qkv, const int32_t *document, int64_t B, int64_t L, int nh,
		int nkv, int64_t d, real *scratch)
{
	enum { PER_THREAD = 4 };
	const int64_t stride = (nh + 2 * nkv) * d;
	struct query_blocking cut = choose_query_blocking(L, nh, nkv);
	int64_t heads = B * nkv * cut.head_groups; /* head groups in all sequences */
	const bool few = heads * cut.num_blocks < PER_THREAD * omp_get_max_threads();
	if (few) { /* a head at a time: no bit depends on the block that a row is in */
		cut.heads = 1;
		cut.head_groups = nh / nkv;
		heads = B * nh;
	}
	/* The last blocks of a sequence take longest and come first: of each head group, whose keys are then in the cache;
	 * of all, where there are few. */
	#pragma omp parallel for schedule(dynamic)
	for (int64_t i = 0; i < heads * cut.num_blocks; i++) {
		begin_task();
		const int64_t head = few ? i % heads : i / cut.num_blocks;
		const int64_t block = cut.num_blocks - 1 - (few ? i / heads : i % cut.num_blocks);
		const int64_t group = head % cut.head_groups, b = head / cut.head_groups / nkv;
		const int kv = (int)(head / cut.head_groups % nkv);
		const int32_t *own = document ? document + b * L : NULL; /* of this sequence */
		const struct query_block q = make_query_block(&cut, kv, group, block, 0, own, L, nh, nkv);
		const real *sequence = qkv + b * L * stride, *k = sequence + (nh + kv) * d;
		attention_block_forward(out + (b * L + q.first) * nh * d, lse + (b * L + q.first) * nh, &q,
				sequence + q.first * stride, k, k + nkv * d, NULL, stride, d,
				scratch + omp_get_thread_num() * block_scratch(d));
		end_task();
	}
}

void attention_extend(real *out, const real *qkv, const struct segment *segments, int n, int layer, int nh, int nkv,
		int64_t d, real *scratch)
{
	const int64_t stride = 2 * nkv * d;
	int64_t work = 0;
	for (int i = 0; i < n; i++)
		work += segments[i].num_tokens * (segments[i].cache->length + segments[i].num_tokens) * nh * d;
	#pragma omp parallel if (work > MIN_PARALLEL_ELEMENTS)
	#pragma omp single
	for (int64_t i = 0, row = 0; i < n; row += segments[i++].num_tokens) {
		const struct kv_cache *c = segments[i].cache;
		const int64_t L = segments[i].num_tokens;
		const struct query_blocking cut = choose_query_blocking(L, nh, nkv);
		for (int kv = 0; kv < nkv; kv++)
			for (int64_t group = 0; group < cut.head_groups; group++)
				for (int64_t block = cut.num_blocks - 1; block >= 0; block--) {
					#pragma omp task
					{
						const struct query_block q = make_query_block(&cut, kv, group, block, c->length, NULL, L, nh,
								nkv);
						const real *k = c->kv + layer * c->rows * stride + kv * d;
						const int64_t first = row + q.first - c->length; /* of the block, in all segments */
						attention_block_forward(out + first * nh * d, NULL, &q, qkv + first * (nh + 2 * nkv) * d, k,
								k + nkv * d, c->block, stride, d,
								scratch + omp_get_thread_num() * block_scratch(d));
					}
				}
	}
}

/* The arrays of the backward pass, of all sequences. */
struct attention_gradient {
	real *dqkv;
	const real *dout, *out, *lse, *qkv;
	const int32_t *document;     /* or NULL */
	int64_t L, d, stride;        /* stride: of a row of qkv */
	int nh, nkv;
	struct query_blocking cut;
};

/* A block of the queries of sequence b, and where its first position's rows are. */
struct placed_block { struct query_block q; const real *dout, *out, *lse, *qkv; real *dqkv; };

static struct placed_block place_block(const struct attention_gradient *g, const struct query_blocking *cut, int64_t b,
		int kv, int64_t group, int64_t block)
{
	struct placed_block x = {.q = make_query_block(cut, kv, group, block, 0,
			g->document ? g->document + b * g->L : NULL, g->L, g->nh, g->nkv)};
	const int64_t first = b * g->L + x.q.first;
	x.dout = g->dout + first * g->nh * g->d;
	x.out = g->out + first * g->nh * g->d;
	x.lse = g->lse + first * g->nh;
	x.qkv = g->qkv + first * g->stride;
	x.dqkv = g->dqkv + first * g->stride;
	return x;
}

/* dot [rows] = dout . out of each row of the block */
static void block_dots(real *dot, const struct placed_block *x, int64_t d)
{
	for (int64_t r = 0; r < x->q.rows; r++) {
		const real *o = x->out + x->q.out_row[r] * d, *d_o = x->dout + x->q.out_row[r] * d;
		real sum = 0;
		#pragma omp simd reduction(+ : sum)
		for (int64_t j = 0; j < d; j++)
			sum += d_o[j] * o[j];
		dot[r] = sum;
	}
}

/* A block of queries and the keys from `key` on, KEY_BLOCK of them or as many as there are up to the block's last
 * query, which it returns: p and dp [rows, KEY_BLOCK], and dq, rows dq_ld apart, to which it adds unless these are the
 * first keys. k and v are those of the key-value head at position 0, rows ld apart. A row's bits do not depend on the
 * others. */
static int64_t attention_pair_backward(real *p, real *dp, real *dq, int64_t dq_ld, const struct placed_block *x,
		const real *dot, const real *k, const real *v, int64_t ld, int64_t d, int64_t key)
{
	/* With scores S = Q K^T / sqrt(d), P = softmax(S) = e^(S - lse) and O = P V, by rows:
	 *   dV = P^T dO;  dP = dO V^T;  dS = P (dP - sum_j dP_j P_j), where that sum is dO . O;
	 *   dQ = dS K / sqrt(d);  dK = dS^T Q / sqrt(d).
	 * `dp` becomes dS / sqrt(d). */
	const struct query_block *q = &x->q;
	const real scale = (real)(1 / sqrt((double)d));
	const int64_t keys = min64(KEY_BLOCK, q->first + q->positions - key);
	attention_scores(p, q, x->qkv, k + key * ld, keys, ld, d);
	gemm(q->rows, keys, d, 1, block_rows(x->dout, q->out_row, d), transposed(v + key * ld, ld), false, dp, KEY_BLOCK);
	for (int64_t r = 0; r < q->rows; r++) {
		real *p_row = p + r * KEY_BLOCK, *dp_row = dp + r * KEY_BLOCK;
		const real row_lse = x->lse[q->out_row[r]], row_dot = dot[r];
		const struct key_range seen = unmasked_keys(q, r, key, keys);
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
	gemm(q->rows, d, keys, 1, as_stored(dp, KEY_BLOCK), as_stored(k + key * ld, ld), key > first_key_of_block(q), dq,
			dq_ld);
	return keys;
}

/* All blocks of key-value head kv of sequence b, by one thread: writes their rows of dqkv, and adds to those of their
 * keys and values. */
static void attention_head_backward(const struct attention_gradient *g, int64_t b, int kv, real *scratch)
{
	const int64_t d = g->d, ld = g->stride, keys_at = b * g->L * ld + (g->nh + kv) * d;
	const real *k = g->qkv + keys_at, *v = k + g->nkv * d;
	real *dk = g->dqkv + keys_at, *dv = dk + g->nkv * d;
	real *p = scratch, *dp = p + QUERY_BLOCK * KEY_BLOCK, *dq = p + PAIR, dot[QUERY_BLOCK];
	for (int64_t group = 0; group < g->cut.head_groups; group++)
		for (int64_t block = 0; block < g->cut.num_blocks; block++) {
			const struct placed_block x = place_block(g, &g->cut, b, kv, group, block);
			const struct query_block *q = &x.q;
			block_dots(dot, &x, d);
			for (int64_t key = first_key_of_block(q); key < q->first + q->positions; key += KEY_BLOCK) {
				const int64_t keys = attention_pair_backward(p, dp, dq, d, &x, dot, k, v, ld, d, key);
				gemm(keys, d, q->rows, 1, transposed(p, KEY_BLOCK), block_rows(x.dout, q->out_row, d), true,
						dv + key * ld, ld);
				gemm(keys, d, q->rows, 1, transposed(dp, KEY_BLOCK), block_rows(x.qkv, q->qkv_row, d), true,
						dk + key * ld, ld);
			}
			for (int64_t r = 0; r < q->rows; r++)
				memcpy(x.dqkv + q->qkv_row[r] * d, dq + r * d, d * sizeof *dq);
		}
}

/* A window of query blocks and key blocks, of one head group, for `heads` key-value heads from number `head` on, all
 * sequences' counted on. pairs [heads, query_blocks, key_blocks, PAIR]. */
struct pair_window { int64_t head, heads, group, first_query, query_blocks, first_key, key_blocks; };

static real *pair_in_window(real *pairs, const struct pair_window *w, int64_t head, int64_t block, int64_t key_block)
{
	const int64_t place = (head * w->query_blocks + block - w->first_query) * w->key_blocks + key_block - w->first_key;
	return pairs + place * PAIR;
}

/* Fills the pairs of a window, and writes or adds to the queries' rows of dqkv. A task is one query head's rows of a
 * block. */
static void fill_window(const struct attention_gradient *g, const struct pair_window *w, real *pairs)
{
	const int64_t d = g->d, ld = g->stride, per_head = g->nh / g->nkv, first = w->group * g->cut.heads;
	const int64_t heads = min64(g->cut.heads, per_head - first); /* query heads of the group */
	const struct query_blocking one = {.heads = 1, .head_groups = per_head, .positions = g->cut.positions,
			.num_blocks = g->cut.num_blocks};
	#pragma omp parallel for schedule(dynamic)
	for (int64_t i = 0; i < w->query_blocks * w->heads * heads; i++) { /* the last block first: it takes longest */
		begin_task();
		const int64_t block = w->first_query + w->query_blocks - 1 - i / (w->heads * heads);
		const int64_t head = i / heads % w->heads, b = (w->head + head) / g->nkv, h = i % heads;
		const int kv = (int)((w->head + head) % g->nkv);
		const real *k = g->qkv + b * g->L * ld + (g->nh + kv) * d;
		const struct placed_block x = place_block(g, &one, b, kv, first + h, block);
		const int64_t begin = max64(w->first_key * KEY_BLOCK, first_key_of_block(&x.q));
		const int64_t end = min64((w->first_key + w->key_blocks) * KEY_BLOCK, x.q.first + x.q.positions);
		real dot[QUERY_BLOCK];
		block_dots(dot, &x, d);
		for (int64_t key = begin; key < end; key += KEY_BLOCK) {
			real *p = pair_in_window(pairs, w, head, block, key / KEY_BLOCK) + h * x.q.positions * KEY_BLOCK;
			attention_pair_backward(p, p + QUERY_BLOCK * KEY_BLOCK, x.dqkv + x.q.head * d, ld, &x, dot, k,
					k + g->nkv * d, ld, d, key);
		}
		end_task();
	}
}

/* Adds a window's pairs to the rows of its keys and values in dqkv. A task is a tile of dk or dv of a key block: a
 * sum over queries is never cut, and is in the order of attention_head_backward. */
static void add_window(const struct attention_gradient *g, const struct pair_window *w, real *pairs)
{
	/* Tiles of fewer keys stay in the second level of cache, since all columns read them; then fewer columns. */
	enum { PER_THREAD = 4, TILES = 4, TILE = (KEY_BLOCK / TILES + MR - 1) / MR * MR };
	const int64_t d = g->d, ld = g->stride, blocks = w->heads * w->key_blocks;
	const bool split = blocks * 2 * TILES < PER_THREAD * omp_get_max_threads();
	const int64_t width = split ? NR : d, columns = 2 * count_tiles(d, width); /* of dk and of dv */
	#pragma omp parallel for schedule(dynamic)
	for (int64_t i = 0; i < blocks * columns * TILES; i++) { /* the first keys first: most queries see them */
		begin_task();
		const int64_t key_block = w->first_key + i / (w->heads * columns * TILES);
		const int64_t head = i / (columns * TILES) % w->heads, b = (w->head + head) / g->nkv;
		const int64_t column = i / TILES % columns / 2 * width, key = i % TILES * TILE;
		const int kv = (int)((w->head + head) % g->nkv);
		const bool values = i / TILES % 2;
		real *to = g->dqkv + (b * g->L + key_block * KEY_BLOCK + key) * ld + (g->nh + kv + values * g->nkv) * d +
				column;
		for (int64_t block = w->first_query; block < w->first_query + w->query_blocks; block++) {
			const struct placed_block x = place_block(g, &g->cut, b, kv, w->group, block);
			const int64_t keys = min64(KEY_BLOCK, x.q.first + x.q.positions - key_block * KEY_BLOCK);
			if (keys <= key || first_key_of_block(&x.q) > key_block * KEY_BLOCK)
				continue;
			const real *pair = pair_in_window(pairs, w, head, block, key_block) + key +
					(values ? 0 : QUERY_BLOCK * KEY_BLOCK);
			gemm(min64(TILE, keys - key), min64(width, d - column), x.q.rows, 1, transposed(pair, KEY_BLOCK),
					values ? block_rows(x.dout + column, x.q.out_row, d) : block_rows(x.qkv + column, x.q.qkv_row, d),
					true, to, ld);
		}
		end_task();
	}
}

/* What attention_head_backward computes, to the bit, for `heads` key-value heads from number `head` on, fewer than the
 * threads, which share each of them: first the pairs of a window, by rows, then the sums over them, by keys. There is
 * room for num_pairs >= heads of them; no bit depends on it. */
static void attention_backward_shared(const struct attention_gradient *g, int64_t head, int64_t heads, real *pairs,
		int64_t num_pairs)
{
	enum { KEY_BLOCKS = 4 }; /* of a window, at most */
	const int64_t key_blocks = count_tiles(g->L, KEY_BLOCK);
	const int64_t width = min64(min64(key_blocks, KEY_BLOCKS), num_pairs / heads), height = num_pairs / (heads * width);
	for (int64_t group = 0; group < g->cut.head_groups; group++)
		for (int64_t key = 0; key < key_blocks; key += width)
			/* the first block with a position that sees these keys */
			for (int64_t block = key * KEY_BLOCK / g->cut.positions; block < g->cut.num_blocks; block += height) {
				const struct pair_window w = {.head = head, .heads = heads, .group = group, .first_query = block,
						.query_blocks = min64(height, g->cut.num_blocks - block), .first_key = key,
						.key_blocks = min64(width, key_blocks - key)};
				fill_window(g, &w, pairs);
				add_window(g, &w, pairs);
			}
}

void attention_backward(real *dqkv, const real *dout, const real *out, const real *lse, const real *qkv,
		const int32_t *document, int64_t B, int64_t L, int nh, int nkv, int64_t d, real *scratch, real *shared_scratch,
		int64_t shared_size)
{
	enum { MANY_PER_THREAD = 8, PAIRS_PER_THREAD = 4 };
	const struct attention_gradient g = {.dqkv = dqkv, .dout = dout, .out = out, .lse = lse, .qkv = qkv,
			.document = document, .L = L, .d = d, .stride = (nh + 2 * nkv) * d, .nh = nh, .nkv = nkv,
			.cut = choose_query_blocking(L, nh, nkv)};
	/* A thread takes a whole key-value head of a sequence, whose query heads add to the same dK and dV. What would not
	 * be enough for all threads once more is shared, unless it is little beside the rest. */
	const int64_t threads = omp_get_max_threads(), heads = B * nkv;
	const int64_t num_pairs = min64(shared_size / PAIR, PAIRS_PER_THREAD * threads);
	const int64_t shared = num_pairs == 0 || heads >= MANY_PER_THREAD * threads ? 0 : heads % threads;
	#pragma omp parallel for
	for (int64_t t = 0; t < B * L; t++)
		memset(dqkv + t * g.stride + nh * d, 0, 2 * nkv * d * sizeof *dqkv);
	#pragma omp parallel for schedule(dynamic)
	for (int64_t i = 0; i < heads - shared; i++) {
		begin_task();
		attention_head_backward(&g, i / nkv, (int)(i % nkv), scratch + omp_get_thread_num() * block_scratch(d));
		end_task();
	}
	for (int64_t i = heads - shared; i < heads; i += num_pairs)
		attention_backward_shared(&g, i, min64(num_pairs, heads - i), shared_scratch, num_pairs);
}

/* ============================================================================================================
 * SwiGLU: act = silu(gate) * up, times the row's routing weight   (Shazeer 2020, arXiv:2002.05202, eq. 6)
 *
 * Memory limits it and not arithmetic, so it is the epilogue of the product before it.
 * ========================================================================================================== */

/* An epilogue: out = {act}, in = {gate_up, weight or NULL}, width I. */
static void swiglu_rows(const struct epilogue *e, int64_t first, int64_t rows)
{
	const int64_t I = e->width;
	for (int64_t r = first; r < first + rows; r++) {
		const real *gate = e->in[0] + r * 2 * I, *up = gate + I, scale = e->in[1] ? e->in[1][r] : 1;
		real *act = e->out[0] + r * I;
		#pragma omp simd
		for (int64_t i = 0; i < I; i++)
			act[i] = scale * up[i] * gate[i] / (1 + exponential(-gate[i]));
	}
}

void swiglu_forward(real *act, real *gate_up, const real *x, const int32_t *row_index, const struct weight *w,
		const real *weight, const int64_t *offset, int G, int64_t H, int64_t I)
{
	const struct epilogue swiglu = {.apply = swiglu_rows, .out = {act}, .in = {gate_up, weight}, .width = I};
	grouped_gemm(gate_up, x, row_index, w, true, offset, G, H, 2 * I, false, &swiglu);
}

/* An epilogue: out = {dgate_up, act, dweight or NULL}, in = {gate_up, weight or NULL}, width I. At first act holds the
 * gradient d with respect to silu(gate) up w, w the weight, divided by w; it becomes act itself. By elements i, with
 * sigmoid and silu taken of gate:
 *   dweight = sum_i d silu up;  dup = w d silu;  dgate = w d up (sigmoid + silu (1 - sigmoid)). */
static void swiglu_backward_rows(const struct epilogue *e, int64_t first, int64_t rows)
{
	const int64_t I = e->width;
	for (int64_t r = first; r < first + rows; r++) {
		const real *gate = e->in[0] + r * 2 * I, *up = gate + I, scale = e->in[1] ? e->in[1][r] : 1;
		real *dgate = e->out[0] + r * 2 * I, *dup = dgate + I, *act = e->out[1] + r * I, dot = 0;
		/* Prefetch the next row of gate_up: the forward pass wrote it long ago. */
		for (int64_t i = 0; r + 1 < first + rows && i < 2 * I; i += LANES)
			__builtin_prefetch(gate + 2 * I + i);
		#pragma omp simd reduction(+ : dot)
		for (int64_t i = 0; i < I; i++) {
			const real d = act[i], sigmoid = 1 / (1 + exponential(-gate[i])), silu = gate[i] * sigmoid;
			dot += d * silu * up[i];
			act[i] = scale * silu * up[i];
			dgate[i] = scale * d * up[i] * (sigmoid + silu * (1 - sigmoid));
			dup[i] = scale * d * silu;
		}
		if (e->out[2])
			e->out[2][r] = dot;
	}
}

void swiglu_backward(real *dgate_up, real *act, real *dweight, const real *dout, const int32_t *row_index,
		const real *w_down, const real *gate_up, const real *weight, const int64_t *offset, int G, int64_t H,
		int64_t I)
{
	struct weight weights[G];
	stack_weights(weights, w_down, G, H * I);
	/* The product writes its result, d, to act; the epilogue replaces it with act itself. */
	const struct epilogue swiglu = {.apply = swiglu_backward_rows, .out = {dgate_up, act, dweight},
			.in = {gate_up, weight}, .width = I};
	grouped_gemm(act, dout, row_index, weights, false, offset, G, H, I, false, &swiglu);
}

/* ============================================================================================================
 * Random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3")
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

/* Words 4 block .. 4 block + 3 of a stream. */
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
		for (int pair = 0; pair < 4; pair += 2) { /* Box & Muller 1958; the +1 keeps the logarithm finite */
			double radius = sqrt(-2 * log((word[pair] + 1.0) / 4294967296.0));
			double angle = 2 * M_PI * word[pair + 1] / 4294967296.0;
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
	/* A Feistel network of 6 rounds is a bijection of [0, 4^half), the smallest of these that holds [0, n). Applied
	 * again until the result is less than n ("cycle walking"), it is a bijection of [0, n). */
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

/* ============================================================================================================
 * Router
 * ========================================================================================================== */

/* What keeps a sum of scores, by which is divided, from 0. */
static const real score_epsilon = (real)1e-20;

/* 1 / (1 + e^-x), to about 2 ulp at both ends. */
static inline real sigmoid_of(real x)
{
	const real z = exponential(x >= 0 ? -x : x);
	return (x >= 0 ? 1 : z) / (1 + z);
}

void scores_forward(real *p, real *lse, const real *s, int64_t T, int64_t E, bool sigmoid)
{
	#pragma omp parallel for if (T * E > MIN_PARALLEL_ELEMENTS)
	for (int64_t t = 0; t < T; t++) {
		const real *in = s + t * E;
		real *out = p + t * E, max = 0, sum = 0;
		if (!sigmoid || lse) {
			max = max_element(in, E);
			sum = exponentials(out, in, max, E);
		}
		if (lse)
			lse[t] = max + (real)log(sum);
		if (!sigmoid)
			for (int64_t e = 0; e < E; e++)
				out[e] /= sum;
		else
			#pragma omp simd
			for (int64_t e = 0; e < E; e++)
				out[e] = sigmoid_of(in[e]);
	}
}

void routing_noise_forward(real *s_hat, const real *s, double alpha, double mean, double std,
		const struct random_stream *noise, int64_t T, int64_t E)
{
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++) {
		random_normal(s_hat + t * E, E, noise, (uint64_t)(t * E));
		for (int64_t e = 0; e < E; e++)
			s_hat[t * E + e] = (real)(alpha * s[t * E + e] + (1 - alpha) * (mean + std * s_hat[t * E + e]));
	}
}

/* Whether a is above b; NaN is above all numbers. */
static inline bool is_above(real a, real b)
{
	return !(a <= b) && b == b;
}

/* The n <= room largest values so far, largest first, with their numbers; among equals who came first is first. */
struct largest { int room, n; int32_t *number; real *value; };

static inline void keep_largest(struct largest *list, int32_t number, real value)
{
	if (list->n == list->room && !is_above(value, list->value[list->n - 1]))
		return;
	int i = list->n < list->room ? list->n++ : list->n - 1;
	for (; i > 0 && is_above(value, list->value[i - 1]); i--) {
		list->value[i] = list->value[i - 1];
		list->number[i] = list->number[i - 1];
	}
	list->value[i] = value;
	list->number[i] = number;
}

/* in_choice [groups]: whether a token chooses among the experts of each group, `size` each. p, bias: see
 * topk_forward. */
static void choose_groups(bool *in_choice, const real *p, const real *bias, int64_t size, const struct routing *r)
{
	int32_t number[r->top_groups];
	real value[r->top_groups];
	struct largest best = {.room = r->top_groups, .number = number, .value = value};
	for (int g = 0; g < r->groups; g++) {
		real first = -INFINITY, second = -INFINITY;
		for (int64_t e = g * size; e < (g + 1) * size; e++) {
			const real x = bias ? p[e] + bias[e] : p[e];
			if (is_above(x, first))
				second = first, first = x;
			else if (is_above(x, second))
				second = x;
		}
		in_choice[g] = false;
		keep_largest(&best, g, first + second);
	}
	for (int i = 0; i < r->top_groups; i++)
		in_choice[number[i]] = true;
}

void topk_forward(int32_t *index, real *weight, const real *p, const real *bias, int64_t T, int64_t E,
		const struct routing *r)
{
	const int k = r->k;
	const int64_t size = E / r->groups;
	#pragma omp parallel for if (T * E > MIN_PARALLEL_ELEMENTS)
	for (int64_t t = 0; t < T; t++) {
		const real *row = p + t * E;
		real value[k], sum = 0;
		bool in_choice[r->groups];
		struct largest best = {.room = k, .number = index + t * k, .value = value};
		if (r->top_groups < r->groups)
			choose_groups(in_choice, row, bias, size, r);
		for (int g = 0; g < r->groups; g++)
			if (r->top_groups == r->groups || in_choice[g])
				for (int64_t e = g * size; e < (g + 1) * size; e++)
					keep_largest(&best, (int32_t)e, bias ? row[e] + bias[e] : row[e]);
		for (int j = 0; j < k; j++)
			sum += row[best.number[j]];
		for (int j = 0; j < k; j++) {
			const real x = row[best.number[j]];
			weight[t * k + j] = (real)r->scale * (r->normalise ? x / (sum + score_epsilon) : x);
		}
	}
}

void topk_backward(real *ds, const real *dweight, const int32_t *index, const real *weight, const real *p, int64_t T,
		int64_t E, const struct routing *r)
{
	/* Softmax: normalised, the weights are a softmax over the k chosen experts alone:
	 *   ds_j = w_j (dw_j - sum_i w_i dw_i), and 0 for the others.
	 * Otherwise w_j = p_j, and the softmax is over all experts, with dp_e = 0 for the others:
	 *   ds_e = p_e (dp_e - sum_i p_i dp_i).
	 * Sigmoid: dp_j/ds_j = p_j (1 - p_j). With w_j = c p_j / (sum_i p_i + epsilon)
	 *   ds_j = w_j (1 - p_j) (dw_j - sum_i w_i dw_i / c),
	 * and with w_j = c p_j the same without the sum. */
	const int k = r->k;
	const real scale = (real)r->scale;
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++) {
		const real *scores = p + t * E;
		real *row = ds + t * E, dot = 0;
		for (int j = 0; j < k; j++)
			dot += weight[t * k + j] * dweight[t * k + j];
		for (int64_t e = 0; e < E; e++)
			row[e] = r->normalise || r->sigmoid ? 0 : -scores[e] * dot;
		for (int j = 0; j < k; j++) {
			const int32_t e = index[t * k + j];
			real w = weight[t * k + j], d = dweight[t * k + j];
			if (r->sigmoid)
				w *= 1 - scores[e];
			row[e] += r->normalise ? w * (d - dot / scale) : w * d;
		}
	}
}

/* A token's scores times this are its q, see router_statistics. */
static double score_share(const real *p, int64_t E, bool sigmoid)
{
	double sum = 0;
	for (int64_t e = 0; e < E && sigmoid; e++)
		sum += p[e];
	return sigmoid ? 1 / (sum + score_epsilon) : 1;
}

void router_statistics(struct router_sums *sums, double *count, double *q_sum, const real *s, const real *p,
		const real *lse, const int32_t *index, const int32_t *length, int64_t first, int64_t T, int64_t B, int64_t L,
		int64_t E, const struct routing *r)
{
	#pragma omp parallel for schedule(dynamic)
	for (int64_t b = 0; b < B; b++) {
		begin_task();
		double *c = count + b * E, *qs = q_sum + b * E;
		struct router_sums sum = {0};
		memset(c, 0, E * sizeof *c);
		memset(qs, 0, E * sizeof *qs);
		const int64_t end = b * L + (length ? length[b] : L);
		for (int64_t t = max64(b * L - first, 0); t < min64(end - first, T); t++) {
			const double share = score_share(p + t * E, E, r->sigmoid);
			for (int j = 0; j < r->k; j++)
				c[index[t * r->k + j]]++;
			for (int64_t e = 0; e < E; e++) {
				double value = s[t * E + e];
				qs[e] += share * p[t * E + e];
				sum.s += value;
				sum.s_squared += value * value;
			}
			sum.z += (double)lse[t] * lse[t];
		}
		sums[b] = sum;
		end_task();
	}
}

void router_loss_backward(real *ds, const real *s, const real *p, const real *lse, const real *factor,
		const int32_t *length, int64_t first, int64_t T, int64_t L, int64_t E, double balance_scale, double z_scale,
		const struct routing *r)
{
	/* Balance: dq_e = balance_scale factor_e. The softmax gives ds_e = p_e (dq_e - sum_i p_i dq_i), and sigmoids, which
	 * q_e = p_e / (sum_i p_i + epsilon), ds_e = q_e (1 - p_e) (dq_e - sum_i q_i dq_i).
	 * z: d(z_scale lse^2)/ds_e = 2 z_scale lse softmax(s)_e. */
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++) {
		const int64_t b = (first + t) / L;
		if (length && (first + t) % L >= length[b])
			continue;
		const real *f = factor + b * E, *row = p + t * E, *logit = r->sigmoid ? s + t * E : NULL;
		real dot = 0, z = (real)(2 * z_scale) * lse[t], balance = (real)balance_scale;
		#pragma omp simd reduction(+ : dot)
		for (int64_t e = 0; e < E; e++)
			dot += row[e] * f[e];
		if (!r->sigmoid) {
			for (int64_t e = 0; e < E; e++)
				ds[t * E + e] += row[e] * (balance * (f[e] - dot) + z);
			continue;
		}
		const real share = (real)score_share(row, E, true), mean = share * dot;
		for (int64_t e = 0; e < E; e++)
			ds[t * E + e] += balance * share * row[e] * (1 - row[e]) * (f[e] - mean) +
					z * exponential(logit[e] - lse[t]);
	}
}

/* ============================================================================================================
 * Token dispatch (permute): rows sorted by expert, and back
 * ========================================================================================================== */

void dispatch_plan(int64_t *offset, int32_t *position, int32_t *token, const int32_t *index, int64_t R, int k, int E)
{
	memset(offset, 0, (E + 1) * sizeof *offset);
	for (int64_t i = 0; i < R; i++)
		offset[index[i] + 1]++;
	for (int e = 0; e < E; e++)
		offset[e + 1] += offset[e];
	for (int64_t i = 0; i < R; i++) { /* offset[e] goes from the start of e's rows to their end ... */
		position[i] = (int32_t)offset[index[i]]++;
		token[position[i]] = (int32_t)(i / k);
	}
	memmove(offset + 1, offset, E * sizeof *offset); /* ... which is the start of the next expert's */
	offset[0] = 0;
}

/* Whether choice j is the first of its token's, index [k], at the rank of its expert. */
static bool first_at_rank(const int32_t *index, int j, int experts)
{
	for (int i = 0; i < j; i++)
		if (index[i] / experts == index[j] / experts)
			return false;
	return true;
}

void send_plan(int64_t *rows, int64_t *assignments, int32_t *token, int32_t *position, int32_t *row,
		const int32_t *index, int64_t T, int k, int ranks, int experts)
{
	memset(rows, 0, ranks * sizeof *rows);
	memset(assignments, 0, ranks * sizeof *assignments);
	for (int64_t t = 0; t < T; t++)
		for (int j = 0; j < k; j++) {
			const int32_t *chosen = index + t * k;
			rows[chosen[j] / experts] += first_at_rank(chosen, j, experts);
			assignments[chosen[j] / experts]++;
		}
	for (int r = 1; r < ranks; r++) { /* where those of the ranks up to r end */
		rows[r] += rows[r - 1];
		assignments[r] += assignments[r - 1];
	}
	const int64_t num_rows = rows[ranks - 1];
	for (int64_t t = T - 1; t >= 0; t--) /* from the ends of each rank's down to the beginnings */
		for (int j = k - 1; j >= 0; j--) {
			const int32_t *chosen = index + t * k;
			const int r = chosen[j] / experts;
			position[t * k + j] = (int32_t)--assignments[r];
			row[t * k + j] = -1;
			if (first_at_rank(chosen, j, experts)) {
				row[t * k + j] = (int32_t)--rows[r];
				token[rows[r]] = (int32_t)t;
			}
		}
	for (int r = 0; r < ranks; r++) { /* the beginnings become numbers again */
		rows[r] = (r + 1 < ranks ? rows[r + 1] : num_rows) - rows[r];
		assignments[r] = (r + 1 < ranks ? assignments[r + 1] : T * k) - assignments[r];
	}
}

void pack_assignments(real *out, const real *weight, const int32_t *index, const int32_t *position, const int32_t *row,
		int64_t R, int experts)
{
	for (int64_t i = 0; i < R; i++) {
		out[2 * position[i]] = weight[i];
		out[2 * position[i] + 1] = (real)(2 * (index[i] % experts) + (row[i] >= 0)); /* exact: at most 4096 experts */
	}
}

void arrival_plan(int64_t *offset, int32_t *row, real *weight, int32_t *place, int32_t *begin, const real *assignments,
		int64_t A, int experts)
{
	memset(offset, 0, (experts + 1) * sizeof *offset);
	for (int64_t i = 0; i < A; i++)
		offset[(int)assignments[2 * i + 1] / 2 + 1]++;
	for (int e = 0; e < experts; e++)
		offset[e + 1] += offset[e];
	int64_t rows = 0; /* that have begun */
	for (int64_t i = 0; i < A; i++) { /* offset[e] goes from the start of e's rows to their end, as in dispatch_plan */
		const int code = (int)assignments[2 * i + 1];
		const int64_t at = offset[code / 2]++;
		if (code % 2)
			begin[rows++] = (int32_t)i;
		row[at] = (int32_t)rows - 1;
		weight[at] = assignments[2 * i];
		place[i] = (int32_t)at;
	}
	begin[rows] = (int32_t)A;
	memmove(offset + 1, offset, experts * sizeof *offset);
	offset[0] = 0;
}

void combine_arrivals(real *out, const real *rows, const int32_t *place, const int32_t *begin, int64_t P, int64_t H)
{
	#pragma omp parallel for if (begin[P] * H > MIN_PARALLEL_ELEMENTS)
	for (int64_t p = 0; p < P; p++) {
		real *sum = out + p * H;
		memcpy(sum, rows + place[begin[p]] * H, H * sizeof *sum);
		for (int64_t i = begin[p] + 1; i < begin[p + 1]; i++) {
			const real *row = rows + place[i] * H;
			for (int64_t j = 0; j < H; j++)
				sum[j] += row[j];
		}
	}
}

void gather_rows(real *rows, const real *x, const int32_t *token, int64_t R, int64_t H)
{
	#pragma omp parallel for if (R * H > MIN_PARALLEL_ELEMENTS)
	for (int64_t r = 0; r < R; r++)
		memcpy(rows + r * H, x + token[r] * H, H * sizeof *rows);
}

void combine_rows(real *y, const real *rows, const int32_t *position, int64_t T, int k, int64_t H, bool accumulate)
{
	#pragma omp parallel for if (T * k * H > MIN_PARALLEL_ELEMENTS)
	for (int64_t t = 0; t < T; t++) {
		real *out = y + t * H;
		for (int j = 0; j < k; j++) {
			const real *row = rows + position[t * k + j] * H;
			if (position[t * k + j] < 0)
				continue;
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
	enum { BLOCK = 32 }; /* columns */
	#pragma omp parallel for
	for (int64_t first = 0; first < H; first += BLOCK) {
		int64_t end = min64(first + BLOCK, H);
		for (int64_t j = first; j < end; j++)
			sum[j] = 0;
		for (int64_t v = 0; v < V; v++) {
			real row[BLOCK];
			load_reals(row, weight_at(w, v * H + first), w->bf16, end - first);
			for (int64_t j = first; j < end; j++)
				sum[j] += (double)row[j - first] * row[j - first];
		}
	}
}

void logits_max(real *max, const real *logits, int64_t T, int64_t V)
{
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++)
		max[t] = max_element(logits + t * V, V);
}

void cross_entropy_forward(double *loss, double *sum, real *logits, const real *max, const int32_t *target,
		int64_t first, int64_t T, int64_t V)
{
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++) {
		real *row = logits + t * V;
		const int64_t v_target = target[t] - first;
		loss[t] = sum[t] = 0;
		if (target[t] < 0)
			continue;
		if (v_target >= 0 && v_target < V)
			loss[t] = max[t] - row[v_target];
		/* Sums of 1024 in float, then in double: a long sum in float would lose digits. */
		for (int64_t v = 0; v < V; v += 1024)
			sum[t] += exponentials(row + v, row + v, max[t], min64(1024, V - v));
	}
}

void cross_entropy_backward(real *dlogits, const double *sum, const int32_t *target, int64_t first, double scale,
		int64_t T, int64_t V)
{
	#pragma omp parallel for
	for (int64_t t = 0; t < T; t++) {
		real *row = dlogits + t * V;
		const int64_t v_target = target[t] - first;
		if (target[t] < 0) {
			memset(row, 0, V * sizeof *row);
			continue;
		}
		real factor = (real)(scale / sum[t]);
		for (int64_t v = 0; v < V; v++)
			row[v] *= factor;
		if (v_target >= 0 && v_target < V)
			row[v_target] -= (real)scale;
	}
}

/* ============================================================================================================
 * Changes of weights in bfloat16
 * ========================================================================================================== */

void take_change(uint16_t *change, real *w, const real *before, int64_t n)
{
	#pragma omp parallel for simd
	for (int64_t i = 0; i < n; i++) {
		change[i] = float_to_bf16((float)(w[i] - before[i]));
		w[i] = before[i];
	}
}

void add_change(real *w, const uint16_t *change, int64_t n)
{
	#pragma omp parallel for simd
	for (int64_t i = 0; i < n; i++)
		w[i] += bf16_to_float(change[i]);
}

/* ============================================================================================================
 * AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2)
 * ========================================================================================================== */

double adamw_update(real *w, real *exp_avg, real *exp_avg_sq, const real *grad, int64_t n, const struct adamw *o)
{
	double partial[SUM_BLOCKS];
	const real beta1 = (real)o->beta1, beta2 = (real)o->beta2;
	const real one_minus_beta1 = (real)(1 - o->beta1), one_minus_beta2 = (real)(1 - o->beta2);
	const real eps = (real)o->eps, grad_scale = (real)o->grad_scale;
	const real decay = (real)(1 - o->lr * o->weight_decay);
	const real step_size = (real)(o->lr / (1 - pow(o->beta1, (double)o->step)));
	const real v_correction = (real)(1 / sqrt(1 - pow(o->beta2, (double)o->step)));
	/* w = (1 - lr weight_decay) w - lr m_hat / (sqrt(v_hat) + eps),
	 * with m_hat = m / (1 - beta1^step) and v_hat = v / (1 - beta2^step). */
	#pragma omp parallel for schedule(dynamic)
	for (int b = 0; b < SUM_BLOCKS; b++) {
		begin_task();
		double sum = 0;
		#pragma omp simd reduction(+ : sum)
		for (int64_t i = n * b / SUM_BLOCKS; i < n * (b + 1) / SUM_BLOCKS; i++) {
			real g = grad[i] * grad_scale;
			real m = exp_avg[i] = beta1 * exp_avg[i] + one_minus_beta1 * g;
			real v = exp_avg_sq[i] = beta2 * exp_avg_sq[i] + one_minus_beta2 * g * g;
			real next = w[i] * decay - step_size * m / ((real)sqrt(v) * v_correction + eps);
			double change = next - w[i];
			sum += change * change;
			w[i] = next;
		}
		partial[b] = sum;
		end_task();
	}
	double sum = 0;
	for (int b = 0; b < SUM_BLOCKS; b++)
		sum += partial[b];
	return sum;
}
