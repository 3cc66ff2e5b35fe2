/*
 * parallel.c - ranks: process groups, collectives over them, and which rank computes which part of a batch. Only this
 * file calls MPI. Contracts are in parallel.h.
 *
 * Every sum is taken in the order of the ranks, so that a layout gives the same bits each time. MPI's own reductions
 * do not promise that. So all_reduce_sum gathers all ranks' numbers and adds them on each rank; reduce_scatter sends
 * each rank its shard from all others, which moves no more bytes than any reduce-scatter, and adds them there.
 */
#define _GNU_SOURCE
#include "parallel.h"

#include "files/base.h"
#include "files/trace.h"
#include "kernels.h"

#include <mpi.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { HOST_LEN = 64 };

#ifdef LING_DOUBLE
#define MPI_REAL_TYPE MPI_DOUBLE
#else
#define MPI_REAL_TYPE MPI_FLOAT
#endif

/* The state of this process in MPI, of which there is one: see the globals in ling.h. */
static struct {
	bool running;
	MPI_Comm control;            /* for notices of waiting ranks and for the end, apart from the collectives */
	MPI_Comm agreeing;           /* the ranks that agree among themselves, see parallel_agree_within, */
	int num_agreeing, first_agreeing; /* their number, and the first of them */
	char (*hosts)[HOST_LEN];     /* [ranks] names of machines */
	int local_ranks;             /* on this machine */
	int under_way;               /* collectives that were started and are not finished */
	struct shared_counter *counter; /* that this rank answers for: on rank 0, while one is open */
	double *last_notice;         /* [ranks] clock_seconds() when each rank's last notice to this one came */
	double notices_read;         /* when this rank last read its notices */
} mpi;

/* ============================================================================================================
 * Starting and ending
 * ========================================================================================================== */

/* Memory of zeros for what MPI needs, a few numbers for each rank. Ends all ranks when there is none. */
static void *mpi_allocate(size_t bytes)
{
	void *p = calloc(1, bytes);
	if (!p) {
		fprintf(stderr, "ling: rank %d: out of memory\n", parallel_rank());
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	return p;
}

void parallel_start(void)
{
	if (launcher_rank() < 0) /* without a launcher, MPI would start a daemon of its own */
		return;
	int provided;
	char host[HOST_LEN] = "";
	MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
	mpi.running = true;
	MPI_Comm_dup(MPI_COMM_WORLD, &mpi.control);
	mpi.agreeing = MPI_COMM_WORLD;
	mpi.num_agreeing = parallel_size();
	mpi.hosts = mpi_allocate(parallel_size() * sizeof *mpi.hosts);
	mpi.last_notice = mpi_allocate(parallel_size() * sizeof *mpi.last_notice);
	gethostname(host, sizeof host - 1);
	MPI_Allgather(host, HOST_LEN, MPI_CHAR, mpi.hosts, HOST_LEN, MPI_CHAR, MPI_COMM_WORLD);
	MPI_Comm machine;
	MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
	MPI_Comm_size(machine, &mpi.local_ranks);
	MPI_Comm_free(&machine);
}

void parallel_stop(int status)
{
	if (!mpi.running)
		return;
	if (status)
		MPI_Abort(MPI_COMM_WORLD, status);
	MPI_Finalize();
	free(mpi.hosts);
	free(mpi.last_notice);
	mpi.running = false;
}

int parallel_rank(void)
{
	int rank = launcher_rank() < 0 ? 0 : launcher_rank();
	if (mpi.running)
		MPI_Comm_rank(MPI_COMM_WORLD, &rank);
	return rank;
}

int parallel_size(void)
{
	int size = 1;
	if (mpi.running)
		MPI_Comm_size(MPI_COMM_WORLD, &size);
	return size;
}

int parallel_local_ranks(void)
{
	return mpi.running ? mpi.local_ranks : 1;
}

const char *parallel_host(void)
{
	return parallel_rank_host(parallel_rank());
}

const char *parallel_rank_host(int rank)
{
	return mpi.running ? mpi.hosts[rank] : "this machine";
}

int parallel_hosts(int *host)
{
	const int ranks = parallel_size();
	int num_hosts = 0;
	for (int r = 0; r < ranks; r++) {
		int same = 0;
		while (mpi.running && strcmp(mpi.hosts[same], mpi.hosts[r]))
			same++;
		host[r] = same == r ? num_hosts++ : host[same];
	}
	return num_hosts;
}

struct oversubscription parallel_oversubscription(int threads)
{
	cpu_set_t cores; /* fails on a machine with more than CPU_SETSIZE cores, which then counts as having enough */
	if (sched_getaffinity(0, sizeof cores, &cores) < 0)
		memset(&cores, 0xff, sizeof cores);
	if (!mpi.running)
		return (struct oversubscription){1, threads, CPU_COUNT(&cores), threads > CPU_COUNT(&cores)};
	struct oversubscription c = {.threads = 0};
	MPI_Comm machine;
	MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
	MPI_Comm_size(machine, &c.ranks);
	MPI_Allreduce(&threads, &c.threads, 1, MPI_INT, MPI_SUM, machine);
	MPI_Allreduce(MPI_IN_PLACE, &cores, sizeof cores, MPI_BYTE, MPI_BOR, machine);
	MPI_Comm_free(&machine);
	c.cores = CPU_COUNT(&cores);
	int first = c.threads > c.cores ? parallel_rank() : INT32_MAX;
	MPI_Allreduce(MPI_IN_PLACE, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
	c.first = first == parallel_rank();
	return c;
}

/* ============================================================================================================
 * Waiting. If a rank is stopped or its machine cannot be reached, MPI waits for ever and does not tell which one it
 * is. So a rank that waits sends a notice, an empty message, to ranks 0 and 1 every NOTICE_SECONDS. When rank 0 has
 * itself waited for REPORT_SECONDS, it names the ranks from which no notice came; rank 1 does so if rank 0 is one of
 * them. In a period of local SGD the first two ranks of each replica do it for that replica.
 * ========================================================================================================== */

#ifndef NOTICE_SECONDS          /* a build for tests has less */
#define NOTICE_SECONDS 5
#define REPORT_SECONDS 30
#endif

/* Messages of mpi.control have a tag each: notices, none (see parallel_progress), questions to a shared counter and the
 * answers. */
enum { TAG_NOTICE, TAG_NONE, TAG_QUESTION, TAG_ANSWER };

/* Whether a rank is told who waits, and says who does not: the first two of those that agree. */
static bool is_told(int rank)
{
	return rank >= mpi.first_agreeing && rank < mpi.first_agreeing + 2 && rank < mpi.first_agreeing + mpi.num_agreeing;
}

/* Tells them that this rank waits. */
static void send_notices(void)
{
	for (int to = mpi.first_agreeing; is_told(to); to++) {
		MPI_Request request;
		if (to == parallel_rank())
			continue;
		MPI_Isend(NULL, 0, MPI_CHAR, to, TAG_NOTICE, mpi.control, &request);
		MPI_Request_free(&request);
	}
}

/* Reads the notices that have come. */
static void read_notices(void)
{
	MPI_Status status;
	for (int more = 1; more;) {
		MPI_Iprobe(MPI_ANY_SOURCE, TAG_NOTICE, mpi.control, &more, &status);
		if (more) {
			MPI_Recv(NULL, 0, MPI_CHAR, status.MPI_SOURCE, TAG_NOTICE, mpi.control, MPI_STATUS_IGNORE);
			mpi.last_notice[status.MPI_SOURCE] = clock_seconds();
		}
	}
}

/* Names the ranks from which no notice came lately. */
static void report_silent_ranks(const char *what, double waited)
{
	const int rank = parallel_rank(), first = mpi.first_agreeing;
	const double since = clock_seconds() - 3 * NOTICE_SECONDS;
	char names[1024] = "";
	int silent = 0;
	mpi.last_notice[rank] = clock_seconds();
	for (int r = first, n = 0; r < first + mpi.num_agreeing; r++)
		if (mpi.last_notice[r] < since) {
			if (n < (int)sizeof names - 100)
				n += snprintf(names + n, sizeof names - n, "%s%d on %.*s", silent ? ", " : "", r, HOST_LEN,
						mpi.hosts[r]);
			silent++;
		}
	if (silent && (rank == first || mpi.last_notice[first] < since))
		fprintf(stderr, "\nling: waiting for %.0f s (%s): no sign of rank %s. It is still computing, or it is "
				"stopped, or its machine cannot be reached. `ling trace RUN --hang` says where each rank is. If it "
				"does not come back, end the run (Ctrl-C) and start it again: it continues from its last checkpoint\n",
				waited, what, names);
}

/* Takes up to `most` numbers of a counter, on rank 0. `most` < 0: no number is given any more. */
static int64_t take_numbers(struct shared_counter *c, int64_t most, int64_t *first)
{
	if (most < 0)
		c->count = c->next;
	/* Half of what would be the taker's share of the rest, as in guided self-scheduling (Polychronopoulos and Kuck,
	 * 1987). */
	const int64_t left = c->count - c->next, share = left / (2 * c->takers);
	int64_t n = share > 1 ? share : left > 0;
	n = n < most ? n : most < 0 ? 0 : most;
	*first = c->next;
	c->next += n;
	return n;
}

/* Answers the ranks that ask the shared counter, on rank 0. */
static void answer_questions(void)
{
	struct shared_counter *c = mpi.counter;
	MPI_Status status;
	for (int more = c != NULL; more;) {
		MPI_Iprobe(MPI_ANY_SOURCE, TAG_QUESTION, mpi.control, &more, &status);
		if (!more)
			break;
		const int from = status.MPI_SOURCE;
		MPI_Request *sending = (MPI_Request *)c->sending + from;
		int64_t most;
		MPI_Recv(&most, 1, MPI_INT64_T, from, TAG_QUESTION, mpi.control, MPI_STATUS_IGNORE);
		MPI_Wait(sending, MPI_STATUS_IGNORE); /* the last answer, which has arrived */
		c->answers[from][1] = take_numbers(c, most, &c->answers[from][0]);
		MPI_Isend(c->answers[from], 2, MPI_INT64_T, from, TAG_ANSWER, mpi.control, sending);
	}
}

/* A wait as the trace counts it. numbered: all ranks of the group wait, as in a collective. */
struct wait { enum traffic what; bool numbered; uint64_t begun; int64_t bytes; };

/* Waits until all n requests are done. */
static void wait_in(MPI_Request *requests, int n, const struct wait *w)
{
	const double start = clock_seconds();
	double noticed = start, reported = start, told = start;
	int done = 0;
	trace_wait(w->what, w->numbered, w->begun, w->bytes);
	/* a rank that never waits long must read its notices too, or they would pile up */
	if (start - mpi.notices_read > NOTICE_SECONDS) {
		mpi.notices_read = start;
		read_notices();
	}
	for (double t = start;; t = clock_seconds()) {
		answer_questions();
		MPI_Testall(n, requests, &done, MPI_STATUSES_IGNORE);
		if (done)
			break;
		if (t - told > 0.1) {
			told = t;
			trace_still_waiting(t - start);
		}
		if (t - noticed < NOTICE_SECONDS)
			continue;
		noticed = t;
		send_notices();
		read_notices();
		if (t - reported >= REPORT_SECONDS && is_told(parallel_rank())) {
			reported = t;
			report_silent_ranks(traffic_names[w->what], t - start);
		}
	}
	trace_wait_end();
}

/* Waits for a collective that was started just now, in which this rank sends so many bytes. */
static void wait_for(MPI_Request *requests, int n, enum traffic what, int64_t bytes)
{
	wait_in(requests, n, &(struct wait){what, true, 0, bytes});
}

/* ============================================================================================================
 * Errors: what one rank finds, all must know
 * ========================================================================================================== */

int parallel_agree(int rc)
{
	if (!mpi.running)
		return rc;
	int failed = rc < 0, num_failed, rank = failed ? parallel_rank() : INT32_MAX, first;
	MPI_Request request;
	MPI_Iallreduce(&failed, &num_failed, 1, MPI_INT, MPI_SUM, mpi.agreeing, &request);
	wait_for(&request, 1, TRAFFIC_AGREEMENT, sizeof failed);
	if (num_failed == 0)
		return rc;
	char error[sizeof error_text];
	memcpy(error, error_text, sizeof error);
	MPI_Iallreduce(&rank, &first, 1, MPI_INT, MPI_MIN, mpi.agreeing, &request);
	wait_for(&request, 1, TRAFFIC_AGREEMENT, sizeof rank);
	MPI_Ibcast(error, sizeof error, MPI_BYTE, first - mpi.first_agreeing, mpi.agreeing, &request);
	wait_for(&request, 1, TRAFFIC_AGREEMENT, rank == first ? sizeof error : 0);
	if (num_failed == mpi.num_agreeing)
		return fail("%s", error);
	return fail("rank %d on %s%s: %.3500s", first, mpi.hosts[first], num_failed > 1 ? " and others" : "", error);
}

void parallel_agree_within(const struct group *g)
{
	if (!mpi.running)
		return;
	mpi.agreeing = MPI_Comm_f2c(g->comm);
	mpi.num_agreeing = g->size;
	mpi.first_agreeing = parallel_rank() - g->rank;
}

int parallel_same(uint64_t value, const char *what)
{
	uint64_t first = value;
	MPI_Request request;
	if (mpi.running) {
		MPI_Ibcast(&first, 1, MPI_UINT64_T, 0, mpi.agreeing, &request);
		wait_for(&request, 1, TRAFFIC_AGREEMENT, parallel_rank() == mpi.first_agreeing ? sizeof first : 0);
	}
	return parallel_agree(value == first ? 0 : fail("%s differs from rank 0's: give every rank the same", what));
}

bool parallel_all_failed(void)
{
	/* Ranks that all met the same error come here almost at once. If only some did, the barrier is not complete in
	 * time. */
	MPI_Request request;
	int done = 0;
	if (!mpi.running)
		return true;
	MPI_Ibarrier(mpi.control, &request);
	for (double start = clock_seconds(); !done && clock_seconds() - start < 1;)
		MPI_Test(&request, &done, MPI_STATUS_IGNORE);
	return done;
}

/* ============================================================================================================
 * Layout
 * ========================================================================================================== */

/* "1, 2, 4": the divisors of both numbers. */
static const char *common_divisors(char out[128], int a, int b)
{
	int n = 0;
	for (int d = 1; d <= a && d <= b && n < 100; d++)
		if (a % d == 0 && b % d == 0)
			n += snprintf(out + n, 128 - n, "%s%d", n ? ", " : "", d);
	return out;
}

int layout_check(int heads, int kv_heads, int vocab_size, int num_experts, int ranks, int tensor, int expert,
		const char *prefix)
{
	char values[128];
	if (ranks % tensor || kv_heads % tensor || heads % tensor) {
		int both = 1;
		for (int d = 1; d <= kv_heads; d++)
			if (kv_heads % d == 0 && heads % d == 0)
				both = d;
		return fail("%stensor is %d: it must divide the %d ranks, %d query heads and %d key-value heads; %s would work",
				prefix, tensor, ranks, heads, kv_heads, common_divisors(values, ranks, both));
	}
	if (vocab_size < tensor)
		return fail("%stensor is %d: it must not be more than the %d entries of the vocabulary", prefix, tensor,
				vocab_size);
	if (ranks % expert || num_experts % expert)
		return fail("%sexpert is %d: it must divide the %d ranks and %d experts; %s would work", prefix, expert, ranks,
				num_experts, common_divisors(values, ranks, num_experts));
	return 0;
}

struct layout layout_of_rank(int rank, int ranks, int tensor, int expert)
{
	return (struct layout){
		.all = {rank, ranks, 0},
		.replicas = {0, 1, 0},
		.world = {rank, ranks, 0},
		.data = {rank / tensor, ranks / tensor, 0},
		.tensor = {rank % tensor, tensor, 0},
		.expert = {rank % expert, expert, 0},
		.expert_data = {rank / expert, ranks / expert, 0},
	};
}

struct layout layout_of_replica(int rank, int ranks, int replicas, int tensor, int expert)
{
	const int size = ranks / replicas;
	struct layout l = layout_of_rank(rank % size, size, tensor, expert);
	l.all = (struct group){rank, ranks, 0};
	l.replicas = (struct group){rank / size, replicas, 0};
	return l;
}

struct layout layout_of_inference(int rank, int ranks, int tensor, int expert)
{
	int size = tensor; /* of a replica: the least common multiple */
	while (size % expert)
		size += tensor;
	return layout_of_replica(rank, ranks, ranks / size, tensor, expert);
}

void layout_connect(struct layout *l)
{
	if (!mpi.running)
		return;
	const int first = l->all.rank - l->world.rank; /* of the replica: no two replicas have the same color */
	const struct { struct group *group; int color; } groups[] = {
		{&l->all, 0}, {&l->replicas, l->world.rank}, {&l->world, first}, {&l->data, first + l->tensor.rank},
		{&l->tensor, first + l->data.rank}, {&l->expert, first + l->expert_data.rank},
		{&l->expert_data, first + l->expert.rank},
	};
	for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
		MPI_Comm comm;
		MPI_Comm_split(MPI_COMM_WORLD, groups[i].color, l->all.rank, &comm);
		groups[i].group->comm = MPI_Comm_c2f(comm);
	}
}

int64_t shard_begin(int64_t n, int i, int shards)
{
	return (int64_t)((__int128)n * i / shards);
}

struct micro_batches micro_batches_of_rank(const struct group *data, int64_t batch, int micro_batch)
{
	const int64_t all = (batch + micro_batch - 1) / micro_batch; /* micro-batches of the global batch */
	return (struct micro_batches){.num = (all + data->size - 1) / data->size,
			.first = (int64_t)data->rank * micro_batch, .step = (int64_t)data->size * micro_batch,
			.size = micro_batch, .batch = batch};
}

int64_t idle_data_ranks(int data, int64_t batch, int micro_batch)
{
	const int64_t all = (batch + micro_batch - 1) / micro_batch;
	return all < data ? data - all : 0;
}

void warn_of_idle_ranks(int data, int batch, int micro_batch, int first_batch)
{
	const int64_t idle = idle_data_ranks(data, batch, micro_batch);
	const int64_t idle_first = idle_data_ranks(data, first_batch, micro_batch);
	if (idle && batch >= data)
		fprintf(stderr, "warning: %lld of %d data ranks have nothing to do, since train.batch=%d has %d sequences in "
				"each micro-batch: set train.micro_batch=%d\n", (long long)idle, data, batch, micro_batch,
				batch / data);
	else if (idle)
		fprintf(stderr, "warning: %lld of %d data ranks have nothing to do, since train.batch=%d has fewer sequences "
				"than there are data ranks: make it at least %d, or start %d ranks\n", (long long)idle, data,
				batch, data, parallel_size() / data * batch);
	else if (idle_first)
		fprintf(stderr, "warning: %lld of %d data ranks have nothing to do while the batch warmup's batch is %d: set "
				"train.micro_batch=%d or train.batch_warmup.start=%lld\n", (long long)idle_first, data, first_batch,
				first_batch < data ? 1 : first_batch / data,
				(long long)(data - 1) * (first_batch < data ? 1 : micro_batch) + 1);
}

int64_t micro_batch_sequences(const struct micro_batches *m, int64_t i)
{
	const int64_t left = m->batch - m->first - i * m->step;
	return left < 0 ? 0 : left < m->size ? left : m->size;
}

int64_t micro_batch_place(const struct micro_batches *m, int64_t i)
{
	const int64_t after = i - m->first; /* sequences after the rank's first one */
	return after < 0 || after % m->step >= m->size ? -1 : after / m->step * m->size + after % m->step;
}

/* ============================================================================================================
 * Collectives
 * ========================================================================================================== */

/* A count as MPI takes it, an int. Ends all ranks when n is too large for that. plan_memory (ling.c) refuses sizes with
 * which the rows of a micro-batch, or of an expert group, could be so many; gradient buckets and checkpoint messages
 * are far smaller. */
static int mpi_count(int64_t n)
{
	if (n > INT32_MAX) {
		fprintf(stderr, "ling: rank %d has %lld rows or bytes to send at once, and MPI can count %d: make "
				"train.micro_batch smaller\n", parallel_rank(), (long long)n, INT32_MAX);
		MPI_Abort(MPI_COMM_WORLD, 1);
	}
	return (int)n;
}

static MPI_Comm comm_of(const struct group *g)
{
	return MPI_Comm_f2c(g->comm);
}

/* Counts `elements` elements of `size` bytes as sent by this rank. Returns the bytes. */
static int64_t count_sent(enum traffic traffic, int64_t elements, int64_t size)
{
	trace_sent(traffic, elements * size);
	return elements * size;
}

void all_reduce_sum(const struct group *g, enum traffic traffic, double *x, int64_t n)
{
	enum { CHUNK = 4096 }; /* elements at a time, of each rank */
	if (g->size == 1)
		return;
	double *all = mpi_allocate((size_t)(n < CHUNK ? n : CHUNK) * g->size * sizeof *all);
	for (int64_t first = 0; first < n; first += CHUNK) {
		const int count = (int)(n - first < CHUNK ? n - first : CHUNK);
		MPI_Request request;
		MPI_Iallgather(x + first, count, MPI_DOUBLE, all, count, MPI_DOUBLE, comm_of(g), &request);
		wait_for(&request, 1, traffic, count_sent(traffic, (int64_t)count * (g->size - 1), sizeof *x));
		for (int i = 0; i < count; i++) {
			double sum = 0;
			for (int r = 0; r < g->size; r++)
				sum += all[(int64_t)r * count + i];
			x[first + i] = sum;
		}
	}
	free(all);
}

void all_reduce_max(const struct group *g, enum traffic traffic, real *x, int64_t n)
{
	if (g->size == 1)
		return;
	MPI_Request request;
	MPI_Iallreduce(MPI_IN_PLACE, x, mpi_count(n), MPI_REAL_TYPE, MPI_MAX, comm_of(g), &request);
	wait_for(&request, 1, traffic, count_sent(traffic, n * (g->size - 1), sizeof *x));
}

/* MPI's type of a row, `width` numbers of type `number`. MPI counts in int: of rows it can count more than of
 * numbers. */
static MPI_Datatype row_type(int64_t width, MPI_Datatype number)
{
	MPI_Datatype type;
	MPI_Type_contiguous(mpi_count(width), number, &type);
	MPI_Type_commit(&type);
	return type;
}

/* How many of the rows each rank has, counts [size], and where they begin, begins [size]. */
static void shard_counts(int *counts, int *begins, const struct group *g, int64_t rows)
{
	for (int r = 0; r < g->size; r++) {
		begins[r] = mpi_count(shard_begin(rows, r, g->size));
		counts[r] = mpi_count(shard_begin(rows, r + 1, g->size)) - begins[r];
	}
}

/* out from the shards of all ranks; a row has `bytes` bytes, and is one of MPI's `type`. in: NULL, or this rank's shard
 * where it is not in its place in out. */
static void gather_shards(const struct group *g, enum traffic traffic, void *out, const void *in, int64_t rows,
		int64_t bytes, MPI_Datatype type)
{
	int counts[g->size], begins[g->size];
	shard_counts(counts, begins, g, rows);
	MPI_Request request;
	MPI_Iallgatherv(in ? in : MPI_IN_PLACE, counts[g->rank], type, out, counts, begins, type, comm_of(g), &request);
	wait_for(&request, 1, traffic, count_sent(traffic, (int64_t)counts[g->rank] * (g->size - 1), bytes));
}

void all_gather(const struct group *g, enum traffic traffic, real *out, const real *in, int64_t rows, int64_t width)
{
	if (g->size == 1)
		return;
	MPI_Datatype type = row_type(width, MPI_REAL_TYPE);
	gather_shards(g, traffic, out, in == out + shard_begin(rows, g->rank, g->size) * width ? NULL : in, rows,
			width * sizeof *in, type);
	MPI_Type_free(&type);
}

void all_gather_bf16(const struct group *g, enum traffic traffic, uint16_t *out, const uint16_t *in, int64_t n)
{
	if (g->size == 1)
		memcpy(out, in, n * sizeof *out);
	else
		gather_shards(g, traffic, out, in, n, sizeof *in, MPI_UINT16_T);
}

/* The request of a collective that is to be started, with room for `counts` numbers that MPI reads meanwhile. */
static MPI_Request *collective_begin(struct collective *c, enum traffic traffic, int counts, MPI_Datatype type)
{
	*c = (struct collective){.traffic = traffic, .begun = trace_now(), .type = MPI_Type_c2f(type),
			.counts = mpi_allocate(counts * sizeof *c->counts), .request = mpi_allocate(sizeof(MPI_Request))};
	mpi.under_way++;
	return c->request;
}

void collective_finish(struct collective *c)
{
	if (c->request) {
		MPI_Datatype type = MPI_Type_f2c(c->type);
		mpi.under_way--;
		wait_in(c->request, 1, &(struct wait){c->traffic, true, c->begun, c->bytes});
		MPI_Type_free(&type);
	}
	free(c->request);
	free(c->counts);
	*c = (struct collective){0};
}

void all_gather_start(struct collective *c, const struct group *g, enum traffic traffic, real *out, int64_t rows,
		int64_t width)
{
	const int n = g->size;
	*c = (struct collective){0};
	if (n == 1)
		return;
	MPI_Datatype type = row_type(width, MPI_REAL_TYPE);
	MPI_Request *request = collective_begin(c, traffic, 2 * n, type);
	int *counts = c->counts, *begins = counts + n;
	shard_counts(counts, begins, g, rows);
	c->bytes = count_sent(traffic, width * counts[g->rank] * (n - 1), sizeof *out);
	MPI_Iallgatherv(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, out, counts, begins, type, comm_of(g), request);
	trace_posted(c->begun);
}

int64_t reduce_scatter_scratch(const struct group *g, int64_t rows, int64_t width)
{
	return g->size == 1 ? 0 : g->size * (rows / g->size + 1) * width;
}

void reduce_scatter_start(struct reduce_scatter *s, const struct group *g, enum traffic traffic, const real *in,
		int64_t rows, int64_t width, bool bf16, real *scratch)
{
	const int n = g->size;
	*s = (struct reduce_scatter){.group = *g, .traffic = traffic, .in = in, .rows = rows, .width = width,
			.scratch = scratch, .begun = trace_now()};
	if (n == 1)
		return;
	const int64_t mine = shard_begin(rows, g->rank + 1, n) - shard_begin(rows, g->rank, n);
	MPI_Request *requests = s->requests = mpi_allocate(2 * n * sizeof *requests);
	const int64_t size = bf16 ? sizeof(uint16_t) : sizeof(real); /* of a number */
	s->bytes = count_sent(traffic, (rows - mine) * width, size);
	MPI_Datatype type = row_type(width, bf16 ? MPI_UINT16_T : MPI_REAL_TYPE);
	const char *sent = (const char *)in;
	if (bf16) {
		s->halves = (uint16_t *)scratch;
		uint16_t *halves = s->halves + n * mine * width;
		#pragma omp parallel for simd
		for (int64_t i = 0; i < rows * width; i++)
			halves[i] = float_to_bf16((float)in[i]);
		sent = (const char *)halves;
	}
	/* Each rank begins with the rank after it, so that not all send to the same one first. */
	for (int i = 1; i < n; i++) {
		const int from = (g->rank + n - i) % n, to = (g->rank + i) % n;
		const int64_t begin = shard_begin(rows, to, n), end = shard_begin(rows, to + 1, n);
		MPI_Irecv((char *)scratch + from * mine * width * size, mpi_count(mine), type, from, 1, comm_of(g),
				&requests[s->num_requests++]);
		MPI_Isend(sent + begin * width * size, mpi_count(end - begin), type, to, 1, comm_of(g),
				&requests[s->num_requests++]);
	}
	MPI_Type_free(&type);
	mpi.under_way++;
	trace_posted(s->begun);
}

void reduce_scatter_finish(struct reduce_scatter *s, real *out, bool accumulate)
{
	const struct group *g = &s->group;
	const int64_t begin = shard_begin(s->rows, g->rank, g->size);
	const int64_t mine = shard_begin(s->rows, g->rank + 1, g->size) - begin; /* rows */
	const int64_t n = mine * s->width;
	const real *own = s->in + begin * s->width;
	if (s->num_requests) {
		mpi.under_way--;
		wait_in(s->requests, s->num_requests, &(struct wait){s->traffic, true, s->begun, s->bytes});
	}
	free(s->requests);
	s->requests = NULL;
	s->num_requests = 0;
	if (g->size == 1 && out == own && !accumulate)
		return;
	#pragma omp parallel for
	for (int64_t first = 0; first < n; first += 4096) {
		const int64_t end = first + 4096 < n ? first + 4096 : n;
		for (int64_t i = first; i < end; i++) {
			real sum = 0;
			for (int r = 0; r < g->size; r++)
				sum += r == g->rank ? own[i] : s->halves ? bf16_to_float(s->halves[r * n + i]) : s->scratch[r * n + i];
			out[i] = accumulate ? out[i] + sum : sum;
		}
	}
}

void reduce_scatter(const struct group *g, enum traffic traffic, real *out, bool accumulate, const real *in,
		int64_t rows, int64_t width, real *scratch)
{
	struct reduce_scatter s;
	reduce_scatter_start(&s, g, traffic, in, rows, width, false, scratch);
	reduce_scatter_finish(&s, out, accumulate);
}

void all_to_all_counts(const struct group *g, enum traffic traffic, int64_t *out, const int64_t *in, int n)
{
	if (g->size == 1) {
		memcpy(out, in, n * sizeof *out);
		return;
	}
	MPI_Request request;
	MPI_Ialltoall(in, n, MPI_INT64_T, out, n, MPI_INT64_T, comm_of(g), &request);
	wait_for(&request, 1, traffic, count_sent(traffic, (g->size - 1) * n, sizeof *in));
}

void all_to_all_start(struct collective *c, const struct group *g, enum traffic traffic, real *out,
		const int64_t *receive_rows, const real *in, const int64_t *send_rows, int64_t width)
{
	const int n = g->size;
	*c = (struct collective){0};
	if (n == 1) {
		copy_array(out, in, send_rows[0] * width);
		return;
	}
	MPI_Datatype type = row_type(width, MPI_REAL_TYPE);
	MPI_Request *request = collective_begin(c, traffic, 4 * n, type);
	int *send_counts = c->counts, *send_begins = send_counts + n;
	int *receive_counts = send_begins + n, *receive_begins = receive_counts + n;
	int64_t sent = 0, received = 0; /* rows to and from the ranks before r */
	for (int r = 0; r < n; r++) {
		send_counts[r] = mpi_count(send_rows[r]);
		receive_counts[r] = mpi_count(receive_rows[r]);
		send_begins[r] = mpi_count(sent);
		receive_begins[r] = mpi_count(received);
		sent += send_rows[r];
		received += receive_rows[r];
		c->bytes += count_sent(traffic, r == g->rank ? 0 : send_rows[r] * width, sizeof *in);
	}
	MPI_Ialltoallv(in, send_counts, send_begins, type, out, receive_counts, receive_begins, type, comm_of(g), request);
	trace_posted(c->begun);
}

void parallel_progress(void)
{
	/* Any call of MPI moves on all that is under way. No message with this tag is ever sent. */
	for (int i = 0, found; i < mpi.under_way; i++)
		MPI_Iprobe(MPI_ANY_SOURCE, TAG_NONE, mpi.control, &found, MPI_STATUS_IGNORE);
	answer_questions();
}

void broadcast(const struct group *g, void *x, int64_t bytes)
{
	if (g->size == 1)
		return;
	MPI_Request request;
	MPI_Ibcast(x, mpi_count(bytes), MPI_BYTE, 0, comm_of(g), &request);
	wait_for(&request, 1, TRAFFIC_AGREEMENT, g->rank == 0 ? bytes : 0);
}

int slowest_rank(const struct group *g, double seconds)
{
	struct { double seconds; int rank; } mine = {seconds, g->rank}, slowest = mine;
	if (g->size == 1)
		return 0;
	MPI_Request request;
	MPI_Iallreduce(&mine, &slowest, 1, MPI_DOUBLE_INT, MPI_MAXLOC, comm_of(g), &request);
	wait_for(&request, 1, TRAFFIC_STATISTICS, count_sent(TRAFFIC_STATISTICS, g->size - 1, sizeof mine));
	return slowest.rank;
}

void send_message(const struct group *g, int to, int tag, const void *x, int64_t bytes)
{
	MPI_Request request;
	MPI_Isend(x, mpi_count(bytes), MPI_BYTE, to, tag, comm_of(g), &request);
	wait_in(&request, 1, &(struct wait){TRAFFIC_CHECKPOINT, false, 0, bytes});
}

void receive_message(const struct group *g, int from, int tag, void *x, int64_t bytes)
{
	MPI_Request request;
	MPI_Irecv(x, mpi_count(bytes), MPI_BYTE, from == ANY_RANK ? MPI_ANY_SOURCE : from, tag, comm_of(g), &request);
	wait_in(&request, 1, &(struct wait){TRAFFIC_CHECKPOINT, false, 0, 0});
}

/* Two messages, of which the first is the size of the second, and its sender. */
struct message_head { int64_t bytes, from; };
struct posted_message { struct message_head *head; MPI_Request requests[2]; }; /* head: and behind it the message */

void post_message(struct outbox *o, const struct group *g, int to, int tag, const void *x, int64_t bytes)
{
	size_t kept = 0; /* those that are still on their way */
	for (size_t i = 0; i < o->count; i++) {
		int done;
		MPI_Testall(2, o->list[i].requests, &done, MPI_STATUSES_IGNORE);
		if (done)
			free(o->list[i].head);
		else
			o->list[kept++] = o->list[i];
	}
	o->count = kept;
	o->list = grow(o->list, o->count, &o->capacity, 1, sizeof *o->list);
	struct posted_message *m = &o->list[o->count++];
	m->head = mpi_allocate(sizeof *m->head + bytes);
	*m->head = (struct message_head){bytes, g->rank};
	if (bytes)
		memcpy(m->head + 1, x, bytes);
	MPI_Isend(m->head, sizeof *m->head, MPI_BYTE, to, tag, comm_of(g), &m->requests[0]);
	MPI_Isend(m->head + 1, mpi_count(bytes), MPI_BYTE, to, tag, comm_of(g), &m->requests[1]);
}

void outbox_wait(struct outbox *o)
{
	for (size_t i = 0; i < o->count; i++) {
		wait_in(o->list[i].requests, 2, &(struct wait){TRAFFIC_AGREEMENT, false, 0, 0});
		free(o->list[i].head);
	}
	free(o->list);
	*o = (struct outbox){0};
}

void *take_message(const struct group *g, int tag, bool wait, int64_t *bytes)
{
	const struct wait waited = {TRAFFIC_AGREEMENT, false, 0, 0};
	MPI_Status status;
	MPI_Request request;
	int found = wait;
	if (!wait)
		MPI_Iprobe(MPI_ANY_SOURCE, tag, comm_of(g), &found, &status);
	if (!found)
		return NULL;
	struct message_head first;
	MPI_Irecv(&first, sizeof first, MPI_BYTE, MPI_ANY_SOURCE, tag, comm_of(g), &request);
	wait_in(&request, 1, &waited);
	void *x = mpi_allocate(first.bytes + 1);
	MPI_Irecv(x, mpi_count(first.bytes), MPI_BYTE, (int)first.from, tag, comm_of(g), &request);
	wait_in(&request, 1, &waited);
	*bytes = first.bytes;
	return x;
}

/* ============================================================================================================
 * The shared counter
 * ========================================================================================================== */

void counter_open(struct shared_counter *c, int64_t count, int takers)
{
	*c = (struct shared_counter){.count = count, .takers = takers};
	if (!mpi.running)
		return;
	MPI_Request *requests = c->requests = mpi_allocate(2 * sizeof *requests);
	requests[0] = requests[1] = MPI_REQUEST_NULL;
	if (parallel_rank() > 0)
		return;
	MPI_Request *sending = c->sending = mpi_allocate(parallel_size() * sizeof *sending);
	for (int r = 0; r < parallel_size(); r++)
		sending[r] = MPI_REQUEST_NULL;
	c->answers = mpi_allocate(parallel_size() * sizeof *c->answers);
	mpi.counter = c;
}

/* Asks rank 0 for up to `most` numbers. */
static void ask(struct shared_counter *c, int64_t most)
{
	MPI_Request *requests = c->requests;
	c->asked = true;
	c->question = most;
	MPI_Irecv(c->answer, 2, MPI_INT64_T, 0, TAG_ANSWER, mpi.control, &requests[0]);
	MPI_Isend(&c->question, 1, MPI_INT64_T, 0, TAG_QUESTION, mpi.control, &requests[1]);
}

int64_t counter_poll(struct shared_counter *c, int64_t most, int64_t *first)
{
	int done;
	if (parallel_rank() == 0)
		return take_numbers(c, most, first);
	if (!c->asked)
		ask(c, most);
	MPI_Testall(2, c->requests, &done, MPI_STATUSES_IGNORE);
	if (!done)
		return COUNTER_ASKED;
	c->asked = false;
	*first = c->answer[0];
	c->next = c->answer[0] + c->answer[1];
	return c->answer[1];
}

int64_t counter_take(struct shared_counter *c, int64_t most, int64_t *first)
{
	const int64_t n = counter_poll(c, most, first);
	if (n != COUNTER_ASKED)
		return n;
	wait_in(c->requests, 2, &(struct wait){TRAFFIC_AGREEMENT, false, 0, sizeof c->question});
	return counter_poll(c, most, first);
}

void counter_stop(struct shared_counter *c)
{
	int64_t first;
	if (c->asked)
		counter_take(c, 0, &first);
	counter_take(c, -1, &first);
}

void counter_close(struct shared_counter *c)
{
	MPI_Request request;
	int64_t first;
	if (c->asked)
		counter_take(c, 0, &first);
	if (mpi.running) {
		MPI_Ibarrier(MPI_COMM_WORLD, &request);
		wait_for(&request, 1, TRAFFIC_AGREEMENT, 0);
	}
	mpi.counter = NULL;
	if (c->sending) /* every rank has its answer */
		MPI_Waitall(parallel_size(), c->sending, MPI_STATUSES_IGNORE);
	free(c->requests);
	free(c->sending);
	free(c->answers);
	*c = (struct shared_counter){0};
}
