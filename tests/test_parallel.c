/*
 * test_parallel.c - groups, collectives, layouts, and what is summed over ranks, with values small enough to work out
 * by hand. Run it under mpirun with 1, 2 and 3 ranks; with up to 8, only the tests of the shared counter run. Every
 * rank runs all tests, and rank 0 reports them. A rank on which a check fails goes on, so that the others do not wait
 * for it.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "data.h"
#include "ling.h"
#include "training/start.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static struct group world;
static int failed; /* failed checks of the current test, on this rank */

#define check(condition) do { \
		if (!(condition)) { \
			failed++; \
			set_error("%s:%d: %s", __func__, __LINE__, #condition); \
		} \
	} while (0)

static bool near(double x, double y)
{
	return fabs(x - y) <= 1e-6 * fabs(y);
}

/* ------------------------------------------------------------------------------------------------------------
 * The launcher, groups, collectives
 * ------------------------------------------------------------------------------------------------------------ */

/* The variables of each launcher that is known; the real ones are put back. */
static void test_launcher(void)
{
	static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK",
			"PMI_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"};
	static const struct { const char *value[7]; int rank, size; } environments[] = {
		{{NULL}, -1, 1},
		{{"2", "8", "2"}, 2, 8},                          /* mpirun */
		{{"2", "8", "2", NULL, NULL, "0", "1"}, 2, 8},    /* mpirun in a Slurm job with one task */
		{{NULL, NULL, "3", NULL, NULL, "3", "4"}, 3, 4},  /* srun --mpi=pmix */
		{{NULL, NULL, NULL, "1", "2", "1", "2"}, 1, 2},   /* srun --mpi=pmi2 */
		{{NULL, NULL, "1"}, 1, 0},                        /* a rank, and not how many */
		{{NULL, NULL, NULL, NULL, NULL, "0", "4"}, -1, 1}, /* a batch script, srun --mpi=none */
	};
	check(launcher_rank() < 0 ? world.size == 1 : launcher_rank() == world.rank);
	check(launcher_size() == world.size || launcher_size() == 0);
	char *kept[7];
	for (int i = 0; i < 7; i++)
		kept[i] = getenv(names[i]) ? copy_string(getenv(names[i])) : NULL;
	for (size_t e = 0; e < sizeof environments / sizeof *environments; e++) {
		for (int i = 0; i < 7; i++)
			if (environments[e].value[i])
				setenv(names[i], environments[e].value[i], 1);
			else
				unsetenv(names[i]);
		check(launcher_rank() == environments[e].rank);
		check(launcher_size() == environments[e].size);
	}
	for (int i = 0; i < 7; i++) {
		if (kept[i])
			setenv(names[i], kept[i], 1);
		else
			unsetenv(names[i]);
		free(kept[i]);
	}
}

static void test_shard_begin(void)
{
	for (int shards = 1; shards <= 7; shards++)
		for (int64_t n = 0; n < 40; n++) {
			check(shard_begin(n, 0, shards) == 0 && shard_begin(n, shards, shards) == n);
			for (int i = 0; i < shards; i++) {
				const int64_t size = shard_begin(n, i + 1, shards) - shard_begin(n, i, shards);
				check(size == n / shards || size == n / shards + 1); /* sizes differ by at most 1 */
			}
		}
	check(shard_begin(INT64_MAX, 3, 4) == INT64_MAX / 4 * 3 + 2); /* n * i is beyond an int64 */
}

/* Rank 5 of 8. Tensor groups are 0-1, 2-3, ..., and expert groups 0-3, 4-7. */
static void test_layout(void)
{
	const struct layout l = layout_of_rank(5, 8, 2, 4);
	check(l.world.rank == 5 && l.world.size == 8);
	check(l.data.rank == 2 && l.data.size == 4);
	check(l.tensor.rank == 1 && l.tensor.size == 2);
	check(l.expert.rank == 1 && l.expert.size == 4);
	check(l.expert_data.rank == 1 && l.expert_data.size == 2);
}

static void test_all_reduce_sum(void)
{
	enum { N = 10000 }; /* more than one chunk of all_reduce_sum */
	static double x[N];
	for (int64_t n = 0; n <= N; n = n ? n * 10 : 1) {
		for (int i = 0; i < n; i++)
			x[i] = i * (world.rank + 1);
		all_reduce_sum(&world, TRAFFIC_SUM, x, n);
		for (int i = 0; i < n; i++)
			check(x[i] == i * (world.size * (world.size + 1) / 2));
	}
	x[0] = world.rank == world.size - 1 ? NAN : 1;
	x[1] = world.rank == 0 ? INFINITY : 1;
	all_reduce_sum(&world, TRAFFIC_SUM, x, 2);
	check(isnan(x[0]) && isinf(x[1]));
	/* in the order of the ranks 1e16 + 1 - 1e16 is 0; in another order it would be 1 */
	x[0] = world.rank == 0 ? 1e16 : world.rank == 1 ? 1 : -1e16;
	all_reduce_sum(&world, TRAFFIC_SUM, x, 1);
	check(world.size < 3 || x[0] == 0);
}

static void test_all_reduce_max(void)
{
	real x[2] = {(real)world.rank, (real)-world.rank};
	all_reduce_max(&world, TRAFFIC_SUM, x, 2);
	check(x[0] == world.size - 1 && x[1] == 0);
	all_reduce_max(&world, TRAFFIC_SUM, x, 0);
}

/* Fewer rows than ranks, none at all, uneven shards; the shard elsewhere and in its place. */
static void test_all_gather_and_reduce_scatter(void)
{
	for (int64_t rows = 0; rows < 12; rows++)
		for (int64_t width = 1; width <= 3; width++) {
			const int64_t begin = shard_begin(rows, world.rank, world.size);
			const int64_t end = shard_begin(rows, world.rank + 1, world.size);
			real all[36], shard[36], scratch[64];
			check(reduce_scatter_scratch(&world, rows, width) <= 64);
			/* in a group of size 1 the shard must be in its place */
			for (int in_place = world.size == 1; in_place < 2; in_place++) {
				memset(all, 0, sizeof all);
				for (int64_t i = begin * width; i < end * width; i++)
					shard[i - begin * width] = all[i] = (real)(100 + i);
				if (!in_place)
					memset(all, 0, sizeof all);
				all_gather(&world, TRAFFIC_GATHER, all, in_place ? all + begin * width : shard, rows, width);
				for (int64_t i = 0; i < rows * width; i++)
					check(all[i] == 100 + i);
			}
			for (int accumulate = 0; accumulate < 2; accumulate++) {
				for (int64_t i = 0; i < rows * width; i++)
					all[i] = (real)(i * (world.rank + 1));
				for (int64_t i = 0; i < 36; i++)
					shard[i] = accumulate ? 1000 : NAN;
				reduce_scatter(&world, TRAFFIC_SUM, shard, accumulate, all, rows, width, scratch);
				const int factor = world.size * (world.size + 1) / 2;
				for (int64_t i = begin * width; i < end * width; i++)
					check(shard[i - begin * width] == (accumulate ? 1000 : 0) + i * factor);
			}
			reduce_scatter(&world, TRAFFIC_SUM, all + begin * width, false, all, rows, width, scratch);
			for (int64_t i = begin * width; i < end * width; i++)
				check(all[i] == i * (world.size * (world.size + 1) / 2));
		}
}

/* Four at once, finished in the order in which they were started, with calls of progress in between. */
static void test_reduce_scatter_overlap(void)
{
	enum { ROWS = 1001 };
	static real in[4][ROWS], out[4][ROWS], scratch[4][2 * ROWS];
	struct reduce_scatter s[4];
	for (int k = 0; k < 4; k++) {
		for (int i = 0; i < ROWS; i++)
			in[k][i] = (real)(k + i);
		reduce_scatter_start(&s[k], &world, TRAFFIC_GRADIENTS, in[k], ROWS, 1, false, scratch[k]);
		parallel_progress();
	}
	for (int k = 0; k < 4; k++) {
		reduce_scatter_finish(&s[k], out[k], false);
		const int64_t begin = shard_begin(ROWS, world.rank, world.size);
		const int64_t end = shard_begin(ROWS, world.rank + 1, world.size);
		for (int64_t i = begin; i < end; i++)
			check(out[k][i - begin] == world.size * (k + i));
	}
}

/* Each rank adds 1 + 2^-8, half a unit in the last place of a bfloat16 above 1: sent, it becomes 1 (a tie, to even);
 * what the owner of the shard adds is not rounded. 2^-40 and infinity travel too. */
static void test_bf16(void)
{
	enum { ROWS = 5, WIDTH = 3, N = ROWS * WIDTH };
	const int64_t begin = shard_begin(ROWS, world.rank, world.size) * WIDTH;
	const int64_t end = shard_begin(ROWS, world.rank + 1, world.size) * WIDTH;
	const real one = (real)(1 + ldexp(1, -8)), small = (real)ldexp(1, -40);
	real in[N], out[N], scratch[64];
	struct reduce_scatter s;
	for (int i = 0; i < N; i++)
		in[i] = i % 3 == 0 ? one : i % 3 == 1 ? small : (real)INFINITY;
	reduce_scatter_start(&s, &world, TRAFFIC_GRADIENTS, in, ROWS, WIDTH, true, scratch);
	reduce_scatter_finish(&s, out, false);
	for (int64_t i = begin; i < end; i++)
		check(out[i - begin] == (i % 3 == 0 ? (world.size - 1) + one : i % 3 == 1 ? world.size * small
				: (real)INFINITY));
	uint16_t halves[N], all[N];
	for (int i = 0; i < N; i++)
		halves[i] = (uint16_t)(1000 * i);
	const int64_t first = shard_begin(N, world.rank, world.size);
	all_gather_bf16(&world, TRAFFIC_WEIGHTS, all, halves + first, N);
	for (int i = 0; i < N; i++)
		check(all[i] == 1000 * i);
	/* What an update changes: as the owner takes it, so every rank adds it. */
	real before[2] = {1, -3}, w[2] = {(real)(1 + ldexp(1.5, -12)), (real)(-3 + ldexp(one, -4))};
	uint16_t change[2];
	take_change(change, w, before, 2);
	check(w[0] == 1 && w[1] == -3);
	add_change(w, change, 2);
	check(w[0] == (real)(1 + ldexp(1.5, -12)) && w[1] == (real)(-3 + ldexp(1, -4)));
}

static void test_all_to_all_counts(void)
{
	int64_t in[3 * 2], out[3 * 2];
	for (int r = 0; r < world.size; r++)
		for (int j = 0; j < 2; j++)
			in[2 * r + j] = 100 * world.rank + 10 * r + j;
	all_to_all_counts(&world, TRAFFIC_PLAN, out, in, 2);
	for (int r = 0; r < world.size; r++)
		for (int j = 0; j < 2; j++)
			check(out[2 * r + j] == 100 * r + 10 * world.rank + j);
}

/* First rank a sends (a + 2 b) % 3 rows to rank b, which is 0 for some; then all send 4 rows to rank 0 alone; then
 * none sends any. */
static void test_all_to_all(void)
{
	for (int round = 0; round < 3; round++) {
		int64_t send_rows[3], receive_rows[3], total = 0, at = 0;
		real in[16 * 2], out[16 * 2];
		for (int r = 0; r < world.size; r++) {
			send_rows[r] = round == 0 ? (world.rank + 2 * r) % 3 : round == 1 && r == 0 ? 4 : 0;
			receive_rows[r] = round == 0 ? (r + 2 * world.rank) % 3 : round == 1 && world.rank == 0 ? 4 : 0;
			for (int64_t i = 0; i < send_rows[r]; i++, total++)
				for (int j = 0; j < 2; j++)
					in[total * 2 + j] = (real)(1000 * world.rank + 100 * r + 10 * i + j);
		}
		struct collective e;
		all_to_all_start(&e, &world, TRAFFIC_DISPATCH, out, receive_rows, in, send_rows, 2);
		collective_finish(&e);
		for (int r = 0; r < world.size; r++)
			for (int64_t i = 0; i < receive_rows[r]; i++, at++)
				for (int j = 0; j < 2; j++)
					check(out[at * 2 + j] == 1000 * r + 100 * world.rank + 10 * i + j);
	}
}

static void test_agree(void)
{
	check(parallel_agree(0) == 0 && parallel_agree(5) == 5);
	char kept[sizeof error_text], name[32];
	memcpy(kept, error_text, sizeof kept);
	const int last = world.size - 1;
	if (world.rank == last)
		fail("the disk is full");
	const int rc = parallel_agree(world.rank == last ? -1 : 0);
	const bool told = strstr(error_text, "the disk is full"), named = strstr(error_text, "rank ");
	snprintf(name, sizeof name, "rank %d on ", last);
	const bool right = strstr(error_text, name);
	const int same = parallel_same(17, "it"), other = parallel_same(world.rank == last, "the seed");
	const bool differs = strstr(error_text, "the seed differs");
	memcpy(error_text, kept, sizeof kept);
	check(rc == -1 && told && named == (world.size > 1) && right == named);
	check(same == 0 && other == (world.size > 1 ? -1 : 0) && differs == (world.size > 1));
}

/* A replica is the fewest ranks that are whole groups, and its ranks are neighbours. */
static void test_layout_of_inference(void)
{
	static const struct { int ranks, tensor, expert, replicas, data; } expected[] = {
		{1, 1, 1, 1, 1}, {4, 1, 1, 4, 1}, {4, 2, 1, 2, 1}, {4, 1, 2, 2, 2}, {8, 2, 4, 2, 2}, {8, 4, 2, 2, 1},
		{6, 2, 3, 1, 3}, {12, 2, 3, 2, 3},
	};
	for (size_t i = 0; i < sizeof expected / sizeof *expected; i++)
		for (int rank = 0; rank < expected[i].ranks; rank++) {
			const int ranks = expected[i].ranks, size = ranks / expected[i].replicas;
			const struct layout l = layout_of_inference(rank, ranks, expected[i].tensor, expected[i].expert);
			check(l.all.rank == rank && l.all.size == ranks && l.replicas.size == expected[i].replicas);
			check(l.replicas.rank == rank / size && l.world.size == size && l.world.rank == rank % size);
			check(l.data.size == expected[i].data && l.tensor.size == expected[i].tensor);
			check(l.expert.size == expected[i].expert && l.expert.rank == rank % expected[i].expert);
		}
}

/* ------------------------------------------------------------------------------------------------------------
 * The shared counter
 * ------------------------------------------------------------------------------------------------------------ */

/* `milliseconds` of computing, in operations of half a millisecond. */
static void compute(double milliseconds)
{
	for (double end = clock_seconds() + milliseconds / 1e3; clock_seconds() < end;) {
		usleep(500);
		parallel_progress();
	}
}

/* Each number is given once, to whichever rank is free: one that takes twenty times as long gets fewer. Three rounds,
 * in which ranks wait for the answer, or go on computing meanwhile, and rank 0 takes part or only waits for the
 * others. */
static void test_shared_counter(void)
{
	enum { COUNT = 150 };
	for (int round = 0; round < 3; round++) {
		double taken[COUNT] = {0}, of_rank[8] = {0};
		struct shared_counter c;
		counter_open(&c, COUNT, world.size);
		for (int64_t n = 1, first; n > 0 && !(round == 2 && world.size > 1 && world.rank == 0);) {
			n = round == 0 ? counter_take(&c, 4, &first) : COUNTER_ASKED;
			while (n == COUNTER_ASKED && (n = counter_poll(&c, 4, &first)) == COUNTER_ASKED)
				compute(0.5);
			check(n >= 0 && n <= 4 && (n == 0 || (first >= 0 && first + n <= COUNT)));
			for (int64_t i = first; i < first + n && i < COUNT; i++) {
				taken[i]++;
				of_rank[world.rank]++;
				compute(world.rank == world.size - 1 ? 20 : 1);
			}
		}
		counter_close(&c);
		all_reduce_sum(&world, TRAFFIC_STATISTICS, taken, COUNT);
		all_reduce_sum(&world, TRAFFIC_STATISTICS, of_rank, 8);
		for (int i = 0; i < COUNT; i++)
			check(taken[i] == 1);
		const int takers = world.size - (round == 2);
		check(takers < 2 || of_rank[world.size - 1] * takers < COUNT); /* less than an equal share */
		check(world.size == 1 || of_rank[0] < COUNT); /* it answers while it computes */
	}
}

/* After a stop no rank gets a number; the next counter begins anew. Small numbers at the end. */
static void test_counter_stop(void)
{
	struct shared_counter c;
	int64_t first = -1, n = 0, most = 0;
	counter_open(&c, 1000, world.size);
	if (world.rank == world.size - 1) {
		check(counter_take(&c, 3, &first) == 3);
		counter_stop(&c);
		check(counter_take(&c, 3, &first) == 0);
	}
	parallel_agree(0);
	check(counter_take(&c, 3, &first) == 0);
	counter_close(&c);
	counter_open(&c, 10, 2);
	for (int64_t sum = 0; world.rank == 0 && (n = counter_take(&c, 100, &first)) > 0; sum += n) {
		check(first == sum && n == (10 - sum) / 4 + ((10 - sum) / 4 == 0));
		most = first + n;
	}
	counter_close(&c);
	check(most == (world.rank == 0 ? 10 : 0));
	counter_open(&c, 0, 1);
	check(counter_take(&c, 1, &first) == 0);
	counter_close(&c);
}

/* ------------------------------------------------------------------------------------------------------------
 * Micro-batches, and what is summed over ranks
 * ------------------------------------------------------------------------------------------------------------ */

/* Seven sequences in micro-batches of two: 0-1, 2-3, 4-5, 6. The ranks take them in turn. */
static void test_micro_batches(void)
{
	const struct micro_batches s = micro_batches_of_rank(&world, 7, 2);
	static const int rounds[] = {4, 2, 2};
	check(s.num == rounds[world.size - 1] && s.first == 2 * world.rank && s.step == 2 * world.size);
	int64_t place = 0;
	for (int64_t i = 0; i < s.num; i++)
		for (int64_t j = s.first + i * s.step; j < 7 && j < s.first + i * s.step + 2; j++)
			check(micro_batch_place(&s, j) == place++ && micro_batch_sequences(&s, i) == (j < 6 ? 2 : 1));
	int64_t all[3] = {0};
	for (int j = 0; j < 7; j++)
		all[micro_batch_place(&s, j) < 0 ? 0 : 1]++;
	check(all[1] == place && all[0] == 7 - place);
	check(micro_batch_sequences(&s, s.num) == 0);
}

/* The norm of a gradient in these n buckets, of which every element of bucket i is values[i]. */
static double norm_of(struct layout layout, int n, struct bucket *buckets, const double *values)
{
	real gradient[64];
	struct model m = {.layout = layout, .table = {.layout = layout, .buckets = buckets, .num_buckets = n},
			.grads.memory = gradient};
	int64_t at = 0;
	for (int i = 0; i < n; i++) {
		buckets[i].offset = at;
		for (int64_t j = 0; j < buckets[i].size; j++)
			gradient[at++] = (real)values[i];
	}
	return sqrt(gradient_square(&m));
}

/* Every distinct parameter counts once, however many ranks hold it. */
static void test_gradient_norm(void)
{
	struct layout split = layout_of_rank(world.rank, world.size, 1, world.size); /* experts over all ranks */
	struct layout copied = layout_of_rank(world.rank, world.size, 1, 1);         /* all experts on every rank */
	struct layout tensor = layout_of_rank(world.rank, world.size, world.size, 1);
	layout_connect(&split);
	layout_connect(&copied);
	layout_connect(&tensor);
	/* Each rank's own experts: norms sqrt(20) and sqrt(100) on two ranks give sqrt(120). */
	struct bucket own[] = {{.size = 5, .sharing = SHARED_BY_EXPERT_DATA}};
	const double rank_values[] = {sqrt(20.0 / 5), sqrt(100.0 / 5), sqrt(1.0 / 5)};
	const double expected[] = {sqrt(20), sqrt(120), sqrt(121)};
	check(near(norm_of(split, 1, own, &rank_values[world.rank]), expected[world.size - 1]));
	check(world.size != 2 || fabs(norm_of(split, 1, own, &rank_values[world.rank]) - 10.954) < 1e-3);
	/* Four shared parameters of 3 and four of experts of 4: sqrt(4 * 9 + 4 * 16) = 10, wherever the experts are. */
	const double values[] = {3, 4};
	struct bucket both[] = {{.size = 4, .sharing = SHARED_BY_WORLD}, {.size = 4, .sharing = SHARED_BY_EXPERT_DATA}};
	check(near(norm_of(copied, 2, both, values), 10));
	both[1].size = shard_begin(4, world.rank + 1, world.size) - shard_begin(4, world.rank, world.size);
	check(near(norm_of(split, 2, both, values), 10));
	both[1].size = world.rank == world.size - 1 ? 4 : 0;
	check(near(norm_of(split, 2, both, values), 10));
	/* Parameters of heads and vocabulary: each tensor rank has its own, and data ranks the same. */
	struct bucket heads[] = {{.size = 4, .sharing = SHARED_BY_WORLD}, {.size = 1, .sharing = SHARED_BY_DATA}};
	const double by_rank[] = {3, 8};
	check(near(norm_of(tensor, 2, heads, by_rank), sqrt(36 + 64 * world.size)));
	check(near(norm_of(copied, 2, heads, by_rank), 10));
}

/* A model of one layer whose attention and experts give 0, so that the logits are known: for target 0, token 0 has
 * loss 2 and token 1 loss 4. The matrices are divided as the layout says. */
static void make_table_model(struct trainer *t, int tensor, int batch, int micro_batch, int L)
{
	const struct config c = {
		.model = {.hidden_size = 4, .partial_rotary_factor = 1, .routed_scaling_factor = 1, .n_group = 1,
				.topk_group = 1, .num_hidden_layers = 1, .num_attention_heads = 6, .num_key_value_heads = 6,
			.head_dim = 2, .vocab_size = 5, .num_experts = 6, .num_experts_per_tok = 2, .moe_intermediate_size = 3,
			.rope_theta = 10000, .rms_norm_eps = 1e-12, .norm_topk_prob = true},
		.data = {.seq_len = L}, .train = {.steps = 1, .micro_batch = micro_batch, .batch = batch},
		.optimizer = {0.9, 0.95, 1e-8, 0.1}, .schedule = {.peak_lr = 1e-3}, .log.every = 1,
		.parallel.tensor = tensor, .parallel.expert = 1,
	};
	static const double loss[] = {2, 4};
	if (trainer_allocate(t, &c) < 0) {
		check(!"trainer_allocate");
		parallel_stop(1);
	}
	struct model *m = &t->model;
	for (int64_t i = 0; i < m->table.num_elements; i++)
		m->grads.memory[i] = NAN; /* no result may depend on what they were */
	for (int i = 0; i < 4; i++)
		m->params.layer[0].attention_norm[i] = m->params.layer[0].ffn_norm[i] = m->params.norm[i] = 1;
	for (int token = 0; token < 2; token++) {
		const int64_t v = token - m->first_vocab;
		if (v >= 0 && v < m->config.vocab_size)
			m->params.embedding[v * 4 + token] = 1; /* RMSNorm makes it sqrt(H) = 2 */
		if (m->first_vocab == 0) /* loss = ln(e^z + V - 1) - z, so z = ln((V - 1) / (e^loss - 1)) */
			m->params.lm_head[token] = (real)(log(4 / (exp(loss[token]) - 1)) / 2);
	}
}

/* One micro-batch has 24 targets of loss 2, another 8 of loss 4, the others none: the loss is (24 * 2 + 8 * 4) / 32 =
 * 2.5, and the gradient of the head is divided by 32 too, on any number of ranks. */
static void test_valid_tokens(void)
{
	enum { L = 24, BATCH = 4 };
	for (int tensor = 1; tensor <= world.size; tensor += world.size - 1 ? world.size - 1 : 1) {
		struct trainer t;
		struct metrics m;
		make_table_model(&t, tensor, BATCH, 1, L);
		const struct micro_batches mine = micro_batches_of_rank(&t.model.layout.data, BATCH, 1);
		for (int i = 0; i < BATCH * L; i++) {
			const int64_t place = micro_batch_place(&mine, i / L);
			if (place < 0)
				continue;
			t.input[place * L + i % L] = i >= L;
			t.target[place * L + i % L] = i < L || (i >= 2 * L - 8 && i < 2 * L) ? 0 : -1;
		}
		check(trainer_step(&t, BATCH, &m) == 0);
		check(near(m.loss, 2.5));
		/* After one step exp_avg is (1 - beta1) times the gradient. Its column 0 comes from token 0, its column 1 from
		 * token 1. */
		double gradient[5 * 4] = {0};
		const struct model *model = &t.model;
		for (int i = 0; i < model->table.num_buckets; i++) {
			const struct bucket *c = &model->table.buckets[i];
			const struct group *g = c->sharing == SHARED_BY_WORLD ? &model->layout.world : &model->layout.data;
			const int64_t head = model->params.lm_head - model->params.memory;
			const int64_t begin = shard_begin(c->size, g->rank, g->size), end = shard_begin(c->size, g->rank + 1,
					g->size);
			for (int64_t j = begin; c->sharing != SHARED_BY_EXPERT_DATA && j < end; j++) {
				const int64_t at = c->offset + j - head; /* in this rank's shard of the head */
				if (at >= 0 && at < model->config.vocab_size * 4)
					gradient[model->first_vocab * 4 + at] = model->exp_avg[c->state + j - begin] / (1 - 0.9);
			}
		}
		all_reduce_sum(&world, TRAFFIC_SUM, gradient, 20);
		for (int v = 0; v < 5; v++)
			for (int j = 0; j < 4; j++) {
				const double tokens = j == 0 ? 24 : j == 1 ? 8 : 0, p0 = exp(j == 0 ? -2 : -4);
				const double p = v == 0 ? p0 : (1 - p0) / 4;
				check(fabs(gradient[v * 4 + j] - 2 * tokens * (p - (v == 0)) / 32) < 1e-6);
			}
		trainer_free(&t);
		if (world.size == 1)
			break;
	}
}

int main(void)
{
	static const struct { const char *name; void (*run)(void); } tests[] = {
		{"launcher", test_launcher}, {"shard_begin", test_shard_begin}, {"layout", test_layout},
		{"all_reduce_sum", test_all_reduce_sum}, {"all_reduce_max", test_all_reduce_max},
		{"all_gather_and_reduce_scatter", test_all_gather_and_reduce_scatter},
		{"reduce_scatter_overlap", test_reduce_scatter_overlap}, {"bf16", test_bf16},
		{"all_to_all_counts", test_all_to_all_counts}, {"all_to_all", test_all_to_all}, {"agree", test_agree},
		{"micro_batches", test_micro_batches}, {"gradient_norm", test_gradient_norm},
		{"valid_tokens", test_valid_tokens}, {"layout_of_inference", test_layout_of_inference},
		{"shared_counter", test_shared_counter}, {"counter_stop", test_counter_stop},
	};
	enum { NUM_TESTS = sizeof tests / sizeof *tests, FOR_MANY = 3 }; /* FOR_MANY: the last ones, for any ranks */
	kernels_init(false);
	parallel_start();
	struct layout all = layout_of_rank(parallel_rank(), parallel_size(), 1, 1);
	layout_connect(&all);
	world = all.world;
	bool any = false;
	for (int i = world.size > 3 ? NUM_TESTS - FOR_MANY : 0; i < NUM_TESTS; i++) {
		failed = 0;
		tests[i].run();
		const bool bad = parallel_agree(failed ? -1 : 0) < 0;
		if (world.rank == 0)
			printf("%s%s[%s] %s on %d ranks\n", bad ? error_text : "", bad ? "\n" : "",
					bad ? "  FAILED  " : "       OK ", tests[i].name, world.size);
		fflush(stdout);
		any = any || bad;
	}
	parallel_stop(0);
	return any;
}
