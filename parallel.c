/*
 * parallel.c - ranks: process groups, sums and exchanges over them, and who computes which part of a batch. The one door to MPI.
 *
 * Every sum is taken in the order of the ranks, so that a layout gives the same bits each time. Large ones travel as pieces: each rank
 * receives its slice from all the others and adds them up itself, which moves no more bytes than a reduce-scatter.
 * Without a launcher there is one rank, and no call reaches MPI.
 */
#define _GNU_SOURCE
#include "parallel.h"

#include "files/base.h"
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

/* What this process knows of MPI: see the globals in ling.h. */
static struct {
	bool running;
	double seconds;              /* spent in calls since the start */
	int64_t bytes[NUM_TRAFFIC];  /* sent since the start */
	MPI_Comm control;            /* apart from the model's traffic: notices of ranks that wait, and the end */
	char (*hosts)[HOST_LEN];     /* of each rank */
	int local_ranks;             /* on this machine */
	int under_way;               /* collectives that were started and are not finished */
	double *heard, taken;        /* when each rank's last notice came, on the first two ranks; when these last looked */
} mpi;

const char *const traffic_names[NUM_TRAFFIC] = {"tensor gather", "tensor sum", "expert plan", "expert dispatch", "expert return", "gradients",
	"weights", "head", "statistics"};

/* ============================================================================================================
 * Starting and ending
 * ========================================================================================================== */

/* The rank that a launcher gave this process, or -1: without one MPI would start a daemon of its own. */
static int launched_rank(void)
{
	static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"};
	for (size_t i = 0; i < sizeof names / sizeof *names; i++)
		if (getenv(names[i]))
			return atoi(getenv(names[i]));
	return -1;
}

void parallel_start(void)
{
	if (launched_rank() < 0)
		return;
	int provided;
	char host[HOST_LEN] = "";
	MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
	mpi.running = true;
	MPI_Comm_dup(MPI_COMM_WORLD, &mpi.control);
	mpi.hosts = calloc(parallel_size(), sizeof *mpi.hosts);
	mpi.heard = calloc(parallel_size(), sizeof *mpi.heard);
	if (!mpi.hosts || !mpi.heard)
		MPI_Abort(MPI_COMM_WORLD, 1);
	gethostname(host, sizeof host - 1);
	MPI_Allgather(host, HOST_LEN, MPI_CHAR, mpi.hosts, HOST_LEN, MPI_CHAR, MPI_COMM_WORLD);
	MPI_Comm machine;
	MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &machine);
	MPI_Comm_size(machine, &mpi.local_ranks);
	MPI_Comm_free(&machine);
}

/* ============================================================================================================
 * Waiting. MPI waits for ever for a rank that is stopped or cut off, and does not say for which one. So a rank that has waited for a
 * while sends a notice to the first two ranks every few seconds, and these, when they wait long too, tell whom they did not hear.
 * ========================================================================================================== */

enum { NOTICE_SECONDS = 5, REPORT_SECONDS = 30 };

/* Tells the first two ranks that this one waits. */
static void send_notices(void)
{
	for (int to = 0; to < 2 && to < parallel_size(); to++) {
		MPI_Request request;
		if (to == parallel_rank())
			continue;
		MPI_Isend(NULL, 0, MPI_CHAR, to, 0, mpi.control, &request);
		MPI_Request_free(&request);
	}
}

static void take_notices(void)
{
	MPI_Status status;
	for (int more = 1; more;) {
		MPI_Iprobe(MPI_ANY_SOURCE, 0, mpi.control, &more, &status);
		if (more) {
			MPI_Recv(NULL, 0, MPI_CHAR, status.MPI_SOURCE, 0, mpi.control, MPI_STATUS_IGNORE);
			mpi.heard[status.MPI_SOURCE] = clock_seconds();
		}
	}
}

/* Names the ranks of which no notice has come; rank 1 speaks only when rank 0 is one of them. */
static void report_silence(const char *what, double waited)
{
	const int rank = parallel_rank(), size = parallel_size();
	const double since = clock_seconds() - 3 * NOTICE_SECONDS;
	char names[1024] = "";
	int silent = 0;
	mpi.heard[rank] = clock_seconds();
	for (int r = 0, n = 0; r < size; r++)
		if (mpi.heard[r] < since) {
			if (n < (int)sizeof names - 100)
				n += snprintf(names + n, sizeof names - n, "%s%d on %.*s", silent ? ", " : "", r, HOST_LEN, mpi.hosts[r]);
			silent++;
		}
	if (silent && (rank == 0 || mpi.heard[0] < since))
		fprintf(stderr, "\nling: waiting for %.0f s (%s): nothing is heard of rank %s. It computes for long, is stopped, or its machine is cut off; "
				"if so, end the run (Ctrl-C) and start it again: it continues from its last checkpoint\n", waited, what, names);
}

/* Waits for requests, with the time on the account of communication. */
static void finish(MPI_Request *requests, int n, const char *what)
{
	const double start = clock_seconds();
	double noticed = start, reported = start, t = start;
	int done = 0;
	if (start - mpi.taken > NOTICE_SECONDS) { /* so that they do not pile up on ranks that others wait for */
		mpi.taken = start;
		take_notices();
	}
	for (;; t = clock_seconds()) {
		MPI_Testall(n, requests, &done, MPI_STATUSES_IGNORE);
		if (done)
			break;
		if (t - noticed < NOTICE_SECONDS)
			continue;
		noticed = t;
		send_notices();
		take_notices();
		if (t - reported >= REPORT_SECONDS && parallel_rank() < 2) {
			reported = t;
			report_silence(what, t - start);
		}
	}
	mpi.seconds += t - start;
}

int parallel_rank(void)
{
	int rank = launched_rank() < 0 ? 0 : launched_rank();
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
	return mpi.running ? mpi.hosts[parallel_rank()] : "this machine";
}

void parallel_progress(void)
{
	/* Whatever MPI is asked, it moves all that is under way, a little at a time; no message with this tag ever comes. */
	for (int i = 0, found; i < mpi.under_way; i++)
		MPI_Iprobe(MPI_ANY_SOURCE, 1, mpi.control, &found, MPI_STATUS_IGNORE);
}

double parallel_seconds(void)
{
	return mpi.seconds;
}

void parallel_bytes(int64_t bytes[NUM_TRAFFIC])
{
	memcpy(bytes, mpi.bytes, sizeof mpi.bytes);
}

struct oversubscription parallel_oversubscription(int threads)
{
	cpu_set_t cores; /* a machine with more than CPU_SETSIZE of them gives none, and counts as roomy enough */
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

int parallel_agree(int rc)
{
	if (!mpi.running)
		return rc;
	int failed = rc < 0, any, first = failed ? parallel_rank() : INT32_MAX, least;
	MPI_Request request;
	MPI_Iallreduce(&failed, &any, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &request);
	finish(&request, 1, "agreement");
	if (!any)
		return rc;
	char error[sizeof error_text];
	memcpy(error, error_text, sizeof error);
	MPI_Allreduce(&first, &least, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
	MPI_Bcast(error, sizeof error, MPI_BYTE, least, MPI_COMM_WORLD);
	if (any == parallel_size())
		return fail("%s", error);
	return fail("rank %d on %s%s: %.3500s", least, mpi.hosts[least], any > 1 ? " and others" : "", error);
}

int parallel_same(uint64_t value, const char *what)
{
	uint64_t first = value;
	if (mpi.running)
		MPI_Bcast(&first, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
	return parallel_agree(value == first ? 0 : fail("%s differs from rank 0's: give every rank the same files", what));
}

void parallel_stop(int status)
{
	if (!mpi.running)
		return;
	if (status)
		MPI_Abort(MPI_COMM_WORLD, status);
	MPI_Finalize();
	free(mpi.hosts);
	free(mpi.heard);
	mpi.running = false;
}

bool parallel_all_failed(void)
{
	/* All ranks that find the same trouble come here within moments; a single one waits in vain. */
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

struct layout layout_of_rank(int rank, int ranks, int tensor, int expert)
{
	return (struct layout){
		.world = {rank, ranks, 0},
		.data = {rank / tensor, ranks / tensor, 0},
		.tensor = {rank % tensor, tensor, 0},
		.expert = {rank % expert, expert, 0},
		.expert_data = {rank / expert, ranks / expert, 0},
	};
}

void layout_connect(struct layout *l)
{
	if (!mpi.running)
		return;
	const struct { struct group *group; int color; } groups[] = {
		{&l->world, 0}, {&l->data, l->tensor.rank}, {&l->tensor, l->data.rank}, {&l->expert, l->expert_data.rank}, {&l->expert_data, l->expert.rank},
	};
	for (size_t i = 0; i < sizeof groups / sizeof *groups; i++) {
		MPI_Comm comm;
		MPI_Comm_split(MPI_COMM_WORLD, groups[i].color, l->world.rank, &comm);
		groups[i].group->comm = MPI_Comm_c2f(comm);
	}
}

int64_t shard_begin(int64_t n, int i, int parts)
{
	return (int64_t)((__int128)n * i / parts);
}

struct micro_batches micro_batches_of_rank(const struct group *data, int64_t batch, int micro_batch)
{
	const int64_t pieces = (batch + micro_batch - 1) / micro_batch;
	return (struct micro_batches){.num = (pieces + data->size - 1) / data->size, .first = (int64_t)data->rank * micro_batch,
			.step = (int64_t)data->size * micro_batch, .size = micro_batch, .batch = batch};
}

int64_t micro_batch_sequences(const struct micro_batches *m, int64_t i)
{
	const int64_t left = m->batch - m->first - i * m->step;
	return left < 0 ? 0 : left < m->size ? left : m->size;
}

int64_t micro_batch_place(const struct micro_batches *m, int64_t i)
{
	const int64_t from_first = i - m->first;
	return from_first < 0 || from_first % m->step >= m->size ? -1 : from_first / m->step * m->size + from_first % m->step;
}

/* ============================================================================================================
 * Sums, gathers, exchanges. A group of one has nothing to do.
 * ========================================================================================================== */

static MPI_Comm comm_of(const struct group *g)
{
	return MPI_Comm_f2c(g->comm);
}

/* Notes that this rank sends `elements` of `size` bytes. */
static void count_sent(enum traffic traffic, int64_t elements, int64_t size)
{
	mpi.bytes[traffic] += elements * size;
}

void all_reduce_sum(const struct group *g, enum traffic traffic, double *x, int64_t n)
{
	enum { PIECE = 4096 };
	if (g->size == 1)
		return;
	double *all = malloc((size_t)PIECE * g->size * sizeof *all);
	if (!all)
		MPI_Abort(MPI_COMM_WORLD, 1);
	count_sent(traffic, n * (g->size - 1), sizeof *x);
	for (int64_t first = 0; first < n; first += PIECE) {
		const int count = (int)(n - first < PIECE ? n - first : PIECE);
		MPI_Request request;
		MPI_Iallgather(x + first, count, MPI_DOUBLE, all, count, MPI_DOUBLE, comm_of(g), &request);
		finish(&request, 1, traffic_names[traffic]);
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
	count_sent(traffic, n * (g->size - 1), sizeof *x);
	MPI_Request request;
	MPI_Iallreduce(MPI_IN_PLACE, x, (int)n, MPI_REAL_TYPE, MPI_MAX, comm_of(g), &request);
	finish(&request, 1, traffic_names[traffic]);
}

/* `width` reals as one element: counts of rows fit an int where counts of reals may not. */
static MPI_Datatype row_type(int64_t width)
{
	MPI_Datatype type;
	MPI_Type_contiguous((int)width, MPI_REAL_TYPE, &type);
	MPI_Type_commit(&type);
	return type;
}

void all_gather(const struct group *g, enum traffic traffic, real *out, const real *in, int64_t rows, int64_t width)
{
	if (g->size == 1)
		return;
	int counts[g->size], begins[g->size];
	for (int r = 0; r < g->size; r++) {
		begins[r] = (int)shard_begin(rows, r, g->size);
		counts[r] = (int)shard_begin(rows, r + 1, g->size) - begins[r];
	}
	count_sent(traffic, width * counts[g->rank] * (g->size - 1), sizeof *in);
	MPI_Datatype type = row_type(width);
	MPI_Request request;
	MPI_Iallgatherv(in == out + begins[g->rank] * width ? MPI_IN_PLACE : in, counts[g->rank], type, out, counts, begins, type, comm_of(g),
			&request);
	finish(&request, 1, traffic_names[traffic]);
	MPI_Type_free(&type);
}

int64_t reduce_scatter_scratch(const struct group *g, int64_t rows, int64_t width)
{
	return g->size == 1 ? 0 : g->size * (rows / g->size + 1) * width;
}

void reduce_scatter_start(struct reduce_scatter *s, const struct group *g, enum traffic traffic, const real *in, int64_t rows, int64_t width,
		real *scratch)
{
	const int n = g->size;
	*s = (struct reduce_scatter){.group = *g, .traffic = traffic, .in = in, .rows = rows, .width = width, .scratch = scratch};
	if (n == 1)
		return;
	const int64_t mine = shard_begin(rows, g->rank + 1, n) - shard_begin(rows, g->rank, n);
	MPI_Request *requests = s->requests = malloc(2 * n * sizeof *requests);
	if (!requests)
		MPI_Abort(MPI_COMM_WORLD, 1);
	count_sent(traffic, (rows - mine) * width, sizeof *in);
	const double start = clock_seconds();
	MPI_Datatype type = row_type(width);
	/* Point to point, each rank beginning with its neighbour, so that no rank is waited for by all at once. */
	for (int i = 1; i < n; i++) {
		const int from = (g->rank + n - i) % n, to = (g->rank + i) % n;
		const int64_t begin = shard_begin(rows, to, n), end = shard_begin(rows, to + 1, n);
		MPI_Irecv(scratch + from * mine * width, (int)mine, type, from, 1, comm_of(g), &requests[s->num_requests++]);
		MPI_Isend(in + begin * width, (int)(end - begin), type, to, 1, comm_of(g), &requests[s->num_requests++]);
	}
	MPI_Type_free(&type);
	mpi.under_way++;
	mpi.seconds += clock_seconds() - start;
}

void reduce_scatter_finish(struct reduce_scatter *s, real *out, bool accumulate)
{
	const struct group *g = &s->group;
	const int64_t begin = shard_begin(s->rows, g->rank, g->size), mine = shard_begin(s->rows, g->rank + 1, g->size) - begin;
	const int64_t n = mine * s->width;
	const real *own = s->in + begin * s->width;
	if (s->num_requests) {
		mpi.under_way--;
		finish(s->requests, s->num_requests, traffic_names[s->traffic]);
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
				sum += r == g->rank ? own[i] : s->scratch[r * n + i];
			out[i] = accumulate ? out[i] + sum : sum;
		}
	}
}

void reduce_scatter(const struct group *g, enum traffic traffic, real *out, bool accumulate, const real *in, int64_t rows, int64_t width,
		real *scratch)
{
	struct reduce_scatter s;
	reduce_scatter_start(&s, g, traffic, in, rows, width, scratch);
	reduce_scatter_finish(&s, out, accumulate);
}

void all_to_all_counts(const struct group *g, enum traffic traffic, int64_t *out, const int64_t *in, int n)
{
	if (g->size == 1) {
		memcpy(out, in, n * sizeof *out);
		return;
	}
	count_sent(traffic, (g->size - 1) * n, sizeof *in);
	MPI_Request request;
	MPI_Ialltoall(in, n, MPI_INT64_T, out, n, MPI_INT64_T, comm_of(g), &request);
	finish(&request, 1, traffic_names[traffic]);
}

void all_to_all_start(struct all_to_all *e, const struct group *g, enum traffic traffic, real *out, const int64_t *receive, const real *in,
		const int64_t *send, int64_t width)
{
	const int n = g->size;
	*e = (struct all_to_all){.traffic = traffic};
	if (n == 1) {
		copy_array(out, in, send[0] * width);
		return;
	}
	e->counts = malloc(4 * n * sizeof(int));
	MPI_Request *request = e->request = malloc(sizeof *request);
	if (!e->counts || !request)
		MPI_Abort(MPI_COMM_WORLD, 1);
	int *sends = e->counts, *send_at = sends + n, *receives = send_at + n, *receive_at = receives + n;
	for (int r = 0, s = 0, t = 0; r < n; r++) {
		sends[r] = (int)send[r];
		receives[r] = (int)receive[r];
		send_at[r] = s;
		receive_at[r] = t;
		s += sends[r];
		count_sent(traffic, r == g->rank ? 0 : send[r] * width, sizeof *in);
		t += receives[r];
	}
	const double start = clock_seconds();
	MPI_Datatype type = row_type(width);
	MPI_Ialltoallv(in, sends, send_at, type, out, receives, receive_at, type, comm_of(g), request);
	e->type = MPI_Type_c2f(type);
	mpi.under_way++;
	mpi.seconds += clock_seconds() - start;
}

void all_to_all_finish(struct all_to_all *e)
{
	if (e->request) {
		MPI_Datatype type = MPI_Type_f2c(e->type);
		mpi.under_way--;
		finish(e->request, 1, traffic_names[e->traffic]);
		MPI_Type_free(&type);
	}
	free(e->request);
	free(e->counts);
	*e = (struct all_to_all){0};
}

void send_message(const struct group *g, int to, int tag, const void *x, int64_t bytes)
{
	MPI_Request request;
	MPI_Isend(x, (int)bytes, MPI_BYTE, to, tag, comm_of(g), &request);
	finish(&request, 1, "checkpoint");
}

void receive_message(const struct group *g, int tag, void *x, int64_t bytes)
{
	MPI_Request request;
	MPI_Irecv(x, (int)bytes, MPI_BYTE, MPI_ANY_SOURCE, tag, comm_of(g), &request);
	finish(&request, 1, "checkpoint");
}

int slowest_rank(const struct group *g, double seconds)
{
	struct { double seconds; int rank; } mine = {seconds, g->rank}, slowest = mine;
	if (g->size == 1)
		return 0;
	MPI_Request request;
	count_sent(TRAFFIC_STATISTICS, g->size - 1, sizeof mine);
	MPI_Iallreduce(&mine, &slowest, 1, MPI_DOUBLE_INT, MPI_MAXLOC, comm_of(g), &request);
	finish(&request, 1, traffic_names[TRAFFIC_STATISTICS]);
	return slowest.rank;
}

void broadcast(const struct group *g, void *x, int64_t bytes)
{
	if (g->size == 1)
		return;
	MPI_Request request;
	MPI_Ibcast(x, (int)bytes, MPI_BYTE, 0, comm_of(g), &request);
	finish(&request, 1, "start");
}
