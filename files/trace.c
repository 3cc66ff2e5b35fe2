/*
 * files/trace.c - the trace: counters, histograms and a ring of records in a mapped file for each rank.
 */
#define _GNU_SOURCE
#include "files/trace.h"

#include "files/base.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

const struct operation_name operations[NUM_OPERATIONS] = {
	[OP_NONE] = {"", "", WORK_NONE},
	[OP_START] = {"start", "start", WORK_NONE},
	[OP_BATCH] = {"batch", "batch", WORK_NONE},
	[OP_COUNT_TOKENS] = {"statistics", "count tokens", WORK_NONE},
	[OP_EMBEDDING] = {"embedding", "embedding", WORK_BYTES},
	[OP_MTP_EMBEDDING_NORM] = {"mtp", "mtp / enorm", WORK_BYTES},
	[OP_MTP_HIDDEN_NORM] = {"mtp", "mtp / hnorm", WORK_BYTES},
	[OP_MTP_PROJECTION] = {"mtp", "mtp / eh_proj", WORK_FLOPS},
	[OP_ATTENTION_NORM] = {"attention", "attention / norm", WORK_BYTES},
	[OP_QKV] = {"attention", "attention / qkv", WORK_FLOPS},
	[OP_QK_NORM] = {"attention", "attention / qk norm", WORK_BYTES},
	[OP_ROPE] = {"attention", "attention / rope", WORK_BYTES},
	[OP_ATTENTION_CORE] = {"attention", "attention / core", WORK_FLOPS},
	[OP_ATTENTION_OUTPUT] = {"attention", "attention / output", WORK_FLOPS},
	[OP_FFN_NORM] = {"ffn norm", "ffn / norm", WORK_BYTES},
	[OP_ROUTER_LOGITS] = {"router", "router / logits", WORK_FLOPS},
	[OP_ROUTER_SOFTMAX] = {"router", "router / softmax", WORK_BYTES},
	[OP_ROUTER_TOPK] = {"router", "router / top-k", WORK_BYTES},
	[OP_ROUTER_LOSSES] = {"router", "router / losses", WORK_BYTES},
	[OP_DISPATCH] = {"dispatch", "experts / dispatch", WORK_BYTES},
	[OP_EXPERTS_GATE_UP] = {"experts", "experts / gate_up", WORK_FLOPS},
	[OP_EXPERTS_DOWN] = {"experts", "experts / down", WORK_FLOPS},
	[OP_COMBINE] = {"combine", "experts / combine", WORK_BYTES},
	[OP_SHARED_GATE_UP] = {"shared experts", "shared / gate_up", WORK_FLOPS},
	[OP_SHARED_DOWN] = {"shared experts", "shared / down", WORK_FLOPS},
	[OP_DENSE_GATE_UP] = {"dense", "dense / gate_up", WORK_FLOPS},
	[OP_DENSE_DOWN] = {"dense", "dense / down", WORK_FLOPS},
	[OP_NORM] = {"norm", "norm", WORK_BYTES},
	[OP_HEAD_LOGITS] = {"head", "head / logits", WORK_FLOPS},
	[OP_HEAD_LOSS] = {"head", "head / loss", WORK_BYTES},
	[OP_HEAD_NORM] = {"head", "head / norm", WORK_BYTES},
	[OP_REDUCTION] = {"reduction", "reduction", WORK_BYTES},
	[OP_GRADIENT_NORM] = {"gradient norm", "gradient norm", WORK_BYTES},
	[OP_DECISION] = {"decision", "decision", WORK_NONE},
	[OP_OPTIMIZER] = {"optimizer", "optimizer", WORK_BYTES},
	[OP_WEIGHTS] = {"weights", "weights", WORK_BYTES},
	[OP_STATISTICS] = {"statistics", "statistics", WORK_NONE},
	[OP_COLLECT] = {"save", "save / collect", WORK_NONE},
	[OP_WRITE] = {"save", "save / write", WORK_NONE},
	[OP_CHECK] = {"check", "check", WORK_NONE},
};

const char *const pass_names[NUM_PASSES] = {"", "backward", "weight gradient"};
const char *const part_names[NUM_PARTS] = {"other", "step", "evaluation", "save", "check"};
const char *const traffic_names[NUM_COLLECTIVES] = {"tensor gather", "tensor sum", "expert plan", "expert dispatch",
	"expert return", "gradients", "weights", "head", "statistics", "checkpoint", "agreement"};

/* The file: a page with the header, the counters, the ring. Words are in the byte order of the machine. */
enum { PAGE = 4096, MAX_EVENTS = 1 << 26, MAX_RANKS = 1 << 20 };
#define MAGIC "lingtrac"
#define VERSION 1
struct header {
	char magic[8];
	uint32_t version, header_bytes, counter_bytes, record_bytes; /* a file of other sizes is of another program */
	uint64_t id;
	int32_t rank, ranks;
	uint64_t pid_started;
	int32_t pid, replica;
	uint64_t events;             /* records that the ring holds, a power of two */
	uint64_t written;            /* records so far */
	uint64_t started;
	double started_unix, peak_flops, peak_bandwidth;
	int64_t phase, step;         /* enum heartbeat_phase */
	uint64_t phase_begun, last_sign;
	char host[64];
	int32_t alone;
};
_Static_assert(sizeof(struct header) <= PAGE, "one page");
struct counters {
	struct trace_counter operation[NUM_PARTS][NUM_OPERATIONS][NUM_PASSES];
	struct trace_counter collective[NUM_PARTS][NUM_COLLECTIVES];
	struct trace_counter steps;
};
enum { COUNTER_BYTES = (sizeof(struct counters) + PAGE - 1) / PAGE * PAGE };

static size_t file_bytes(uint64_t events)
{
	return PAGE + COUNTER_BYTES + events * sizeof(struct trace_record);
}

/* The state of this process: see the globals in ling.h. Without a file the counters are `own_counters`, and the ring
 * has one record, which nobody reads. */
static struct counters own_counters;
static struct header own_header = {.events = 1};
static struct trace_record own_record;
static struct {
	struct header *header;       /* NULL: the trace has no file, see above */
	struct counters *counters;
	struct trace_record *ring;
	enum trace_part part, part_before; /* part_before: that which trace_check interrupted */
	int64_t step;
	/* what is open: the operation, a wait in it, the phase */
	struct trace_record *operation, *collective;
	struct trace_record now, waiting; /* copies of these records, since the ring may turn */
	uint64_t waited_in_operation;
	void (*ended)(void *observer, enum operation op, enum pass pass); /* see trace_observe */
	void *observer;
	enum heartbeat_phase phase;
	uint64_t phase_begun, phase_checks, phase_waited; /* the last two: nanoseconds before the phase began */
	/* accounts */
	uint64_t first, check_begun, checks, waited; /* trace_now() of the first call; nanoseconds */
	int64_t bytes[NUM_TRAFFIC];
} trace;

static struct header *header(void)
{
	return trace.header ? trace.header : &own_header;
}

static struct counters *counters(void)
{
	return trace.counters ? trace.counters : &own_counters;
}

uint64_t trace_now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* ============================================================================================================
 * Counters
 * ========================================================================================================== */

static int bucket_of(uint64_t nanoseconds)
{
	if (nanoseconds < 16)
		return (int)nanoseconds;
	const int power = 63 - __builtin_clzll(nanoseconds);
	const int bucket = (power - 3) * 16 + (int)(nanoseconds >> (power - 4) & 15);
	return bucket < TRACE_BUCKETS ? bucket : TRACE_BUCKETS - 1;
}

double trace_bucket_seconds(int bucket)
{
	return bucket < 16 ? bucket * 1e-9 : (double)((uint64_t)(16 + bucket % 16) << (bucket / 16 - 1)) * 1e-9;
}

double trace_quantile(const struct trace_counter *c, double q)
{
	uint64_t all = 0, below = 0;
	for (int i = 0; i < TRACE_BUCKETS; i++)
		all += c->histogram[i];
	for (int i = 0; i < TRACE_BUCKETS && all; i++)
		if ((below += c->histogram[i]) >= q * all && below)
			return (trace_bucket_seconds(i) + trace_bucket_seconds(i + 1)) / 2;
	return 0;
}

/* in_histogram: the duration that the histogram counts. */
static void count(struct trace_counter *c, uint64_t nanoseconds, uint64_t waited, double work, uint64_t in_histogram)
{
	c->count++;
	c->nanoseconds += nanoseconds;
	c->waited += waited;
	c->work += work;
	c->histogram[bucket_of(in_histogram)]++;
}

/* ============================================================================================================
 * Records
 * ========================================================================================================== */

/* Writes a record into the ring, with its place; returns where. Its place is 0 while the rest is written, so that a
 * reader never takes a half-written one. */
static struct trace_record *record(struct trace_record *r)
{
	struct header *h = header();
	struct trace_record *to = (trace.ring ? trace.ring : &own_record) + (h->written & (h->events - 1));
	r->place = 0;
	__atomic_store_n(&to->place, 0, __ATOMIC_RELAXED);
	__atomic_thread_fence(__ATOMIC_RELEASE);
	*to = *r;
	r->place = h->written + 1;
	__atomic_store_n(&to->place, r->place, __ATOMIC_RELEASE);
	__atomic_store_n(&h->written, r->place, __ATOMIC_RELEASE);
	return to;
}

/* Puts the end into a record that was written before, unless the ring has turned over it. */
static void record_end(struct trace_record *at, const struct trace_record *r)
{
	if (at->place == r->place)
		__atomic_store_n(&at->end, r->end, __ATOMIC_RELAXED);
}

static void end_operation(uint64_t now)
{
	struct trace_record *r = &trace.now;
	if (!trace.operation)
		return;
	r->end = now;
	record_end(trace.operation, r);
	count(&counters()->operation[r->part][r->what][r->pass], now - r->begin, trace.waited_in_operation, r->work,
			now - r->begin - trace.waited_in_operation);
	trace.operation = NULL;
	if (trace.ended && r->part == PART_STEP)
		trace.ended(trace.observer, r->what, r->pass);
}

void trace_observe(void (*ended)(void *observer, enum operation op, enum pass pass), void *observer)
{
	trace.ended = ended;
	trace.observer = observer;
}

void trace_begin(enum operation op, enum pass pass, int layer, double work)
{
	const uint64_t now = trace_now();
	const struct trace_record *before = &trace.now;
	end_operation(now);
	if (!before->place || before->layer != layer || strcmp(operations[before->what].group, operations[op].group))
		heartbeat_operation(operations[op].group, layer);
	trace.now = (struct trace_record){.kind = RECORD_OPERATION, .what = (uint8_t)op, .pass = (uint8_t)pass,
			.layer = (int16_t)layer, .part = (uint8_t)trace.part, .step = trace.step, .begin = now, .arrived = now,
			.work = work};
	trace.operation = record(&trace.now);
	trace.waited_in_operation = 0;
	trace.first = trace.first ? trace.first : now;
}

void trace_end(void)
{
	end_operation(trace_now());
	trace.now.place = 0;
	heartbeat_operation("", -1);
}

void trace_phase(enum heartbeat_phase phase, int64_t step)
{
	static const enum trace_part parts[NUM_HEARTBEAT_PHASES] = {
		[HEARTBEAT_FIRST_STEP] = PART_STEP, [HEARTBEAT_STEP] = PART_STEP, [HEARTBEAT_EVALUATION] = PART_EVALUATION,
		[HEARTBEAT_SAVE] = PART_SAVE, [HEARTBEAT_WRITE] = PART_SAVE,
	};
	const uint64_t now = trace_now();
	end_operation(now);
	trace.now.place = 0;
	if (trace.phase_begun) {
		struct trace_record whole = {.kind = RECORD_PHASE, .what = (uint8_t)trace.phase, .layer = -1,
				.part = (uint8_t)trace.part, .step = trace.step, .begin = trace.phase_begun,
				.arrived = trace.phase_begun, .end = now};
		record(&whole);
		const uint64_t length = now - trace.phase_begun - (trace.checks - trace.phase_checks);
		if (trace.part == PART_STEP)
			count(&counters()->steps, length, trace.waited - trace.phase_waited, 0, length);
	}
	trace.phase = phase;
	trace.phase_begun = now;
	trace.phase_checks = trace.checks;
	trace.phase_waited = trace.waited;
	trace.part = parts[phase];
	trace.step = step;
	trace.first = trace.first ? trace.first : now;
	header()->phase = phase;
	header()->step = step;
	header()->phase_begun = now;
	heartbeat_phase(phase, step);
}

void trace_check(bool begins)
{
	const uint64_t now = trace_now();
	end_operation(now);
	trace.now.place = 0;
	if (begins) {
		trace.part_before = trace.part;
		trace.part = PART_CHECK;
		trace.check_begun = now;
		trace_begin(OP_CHECK, PASS_FORWARD, -1, 0); /* so that the ring has all of the check */
	} else {
		trace.part = trace.part_before;
		trace.checks += now - trace.check_begun;
	}
}

/* Counts nanoseconds that this rank waited for others. */
static void count_waited(uint64_t nanoseconds)
{
	trace.waited_in_operation += nanoseconds;
	trace.waited += trace.part == PART_CHECK ? 0 : nanoseconds;
}

void trace_wait(enum traffic what, bool numbered, uint64_t begun, int64_t bytes)
{
	const uint64_t now = trace_now();
	const uint32_t number = heartbeat_wait(traffic_names[what], numbered);
	trace.waiting = (struct trace_record){.kind = RECORD_COLLECTIVE, .what = (uint8_t)what, .layer = trace.operation ?
			trace.now.layer : -1, .pass = trace.operation ? trace.now.pass : PASS_FORWARD, .part = (uint8_t)trace.part,
			.step = trace.step, .number = number, .numbered = numbered, .begin = begun ? begun : now,
			.arrived = now, .work = (double)bytes};
	trace.collective = record(&trace.waiting);
}

void trace_still_waiting(double seconds)
{
	header()->last_sign = trace_now();
	heartbeat_still_waiting(seconds);
}

void trace_wait_end(void)
{
	struct trace_record *r = &trace.waiting;
	r->end = trace_now();
	record_end(trace.collective, r);
	count(&counters()->collective[r->part][r->what], r->end - r->begin, r->end - r->arrived, r->work,
			r->end - r->arrived);
	count_waited(r->end - r->arrived);
	heartbeat_wait_end();
}

void trace_posted(uint64_t begun)
{
	count_waited(trace_now() - begun);
}

void trace_sent(enum traffic what, int64_t bytes)
{
	if (what < NUM_TRAFFIC && trace.part != PART_CHECK)
		trace.bytes[what] += bytes;
}

/* ============================================================================================================
 * Accounts
 * ========================================================================================================== */

double trace_clock(void)
{
	const uint64_t now = trace.part == PART_CHECK ? trace.check_begun : trace_now();
	trace.first = trace.first ? trace.first : now;
	return (now - trace.first - trace.checks) * 1e-9;
}

double trace_waited(void)
{
	return trace.waited * 1e-9;
}

void trace_bytes(int64_t bytes[NUM_TRAFFIC])
{
	memcpy(bytes, trace.bytes, sizeof trace.bytes);
}

void trace_seconds(enum trace_part part, double seconds[NUM_OPERATIONS])
{
	for (int i = 0; i < NUM_OPERATIONS; i++) {
		seconds[i] = 0;
		for (int p = 0; p < NUM_PASSES; p++)
			seconds[i] += counters()->operation[part][i][p].nanoseconds * 1e-9;
	}
}

/* ============================================================================================================
 * The file
 * ========================================================================================================== */

/* RUN/trace or RUN/trace-before. */
static int trace_dir(char out[PATH_LEN], const char *run_dir, bool before)
{
	return path_join(out, run_dir, before ? "trace-before" : "trace");
}

/* RUN/trace-oldest: the trace-before of an earlier start, until this start has done a step. */
static int oldest_dir(char out[PATH_LEN], const char *run_dir)
{
	return path_join(out, run_dir, "trace-oldest");
}

static int trace_path(char out[PATH_LEN], const char *dir, int rank)
{
	char name[32];
	snprintf(name, sizeof name, "rank-%d.trace", rank);
	return path_join(out, dir, name);
}

/* One more than the largest rank that has a file in a directory of traces; 0 without files, -1 on error. */
static int ranks_in(const char *dir)
{
	DIR *d = opendir(dir);
	int ranks = 0;
	if (!d)
		return fail("%s: cannot open: %s. ling train makes it in the directory of a run, unless trace.events is 0", dir,
				strerror(errno));
	for (struct dirent *e; (e = readdir(d));) {
		char *end;
		const long rank = strncmp(e->d_name, "rank-", 5) ? -1 : strtol(e->d_name + 5, &end, 10);
		if (rank >= ranks && rank < MAX_RANKS && !strcmp(end, ".trace"))
			ranks = (int)rank + 1;
	}
	closedir(d);
	return ranks;
}

void trace_create(const char *run_dir, bool make)
{
	char dir[PATH_LEN], before[PATH_LEN], oldest[PATH_LEN];
	if (trace_dir(dir, run_dir, false) < 0 || trace_dir(before, run_dir, true) < 0 || oldest_dir(oldest, run_dir) < 0)
		return; /* the run will say so */
	if (path_exists(dir) > 0 && ranks_in(dir) > 0) {
		directory_remove(oldest);
		rename(before, oldest);
		directory_remove(before); /* where it could not be renamed */
		if (rename(dir, before) < 0)
			fprintf(stderr, "warning: %s: cannot become %s (%s): it will be written over\n", dir, before,
					strerror(errno));
	}
	if (make && mkdir(dir, 0777) < 0 && errno != EEXIST)
		fprintf(stderr, "warning: %s: cannot be made (%s): the run will have no trace\n", dir, strerror(errno));
}

void trace_end_start(const char *run_dir, bool stepped)
{
	char dir[PATH_LEN], before[PATH_LEN], oldest[PATH_LEN];
	if (trace_dir(dir, run_dir, false) < 0 || trace_dir(before, run_dir, true) < 0 || oldest_dir(oldest, run_dir) < 0)
		return;
	if (!stepped) {
		directory_remove(dir);
		if (rename(before, dir) == 0)
			rename(oldest, before);
	}
	directory_remove(oldest);
}

void trace_join(const char *run_dir, int rank, int ranks, const char *host, int64_t events)
{
	char dir[PATH_LEN], path[PATH_LEN];
	struct timespec t;
	struct process self = {0};
	uint64_t size = 1024;
	while (size < (uint64_t)events && size < MAX_EVENTS)
		size *= 2;
	if (!events || trace_dir(dir, run_dir, false) < 0 || trace_path(path, dir, rank) < 0)
		return;
	unlink(path);
	const int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	/* All blocks are taken now: a store into a page that finds the disk full would end the program. */
	int error = fd < 0 ? errno : posix_fallocate(fd, 0, (off_t)file_bytes(size));
	uint8_t *map = MAP_FAILED;
	if (!error && (map = mmap(NULL, file_bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
		error = errno;
	if (fd >= 0)
		close(fd);
	if (error) {
		if (fd >= 0)
			unlink(path);
		if (rank == 0)
			fprintf(stderr, "warning: %s: cannot be made (%s): the run has no trace\n", path, strerror(error));
		return;
	}
	clock_gettime(CLOCK_REALTIME, &t);
	process_look(&self, getpid());
	struct header *h = (struct header *)map;
	*h = (struct header){.version = VERSION, .header_bytes = PAGE, .counter_bytes = COUNTER_BYTES,
			.record_bytes = sizeof(struct trace_record), .id = heartbeat_id(), .rank = rank, .ranks = ranks,
			.pid = getpid(), .pid_started = self.started, .events = size, .started = trace_now(),
			.started_unix = t.tv_sec + t.tv_nsec * 1e-9,
			.peak_flops = own_header.peak_flops, .peak_bandwidth = own_header.peak_bandwidth};
	snprintf(h->host, sizeof h->host, "%s", host);
	memcpy(h->magic, MAGIC, sizeof h->magic);
	trace.operation = trace.collective = NULL; /* what is open is in the memory that was used so far */
	trace.counters = (struct counters *)(map + PAGE);
	trace.ring = (struct trace_record *)(map + PAGE + COUNTER_BYTES);
	trace.header = h;
}

void trace_peak(double flops, double bandwidth)
{
	header()->peak_flops = flops;
	header()->peak_bandwidth = bandwidth;
}

void trace_replica(int replica)
{
	header()->replica = replica;
	heartbeat_replica(replica);
}

void trace_alone(bool alone)
{
	header()->alone = alone;
	heartbeat_alone(alone);
}

void trace_leave(void)
{
	if (!trace.header)
		return;
	trace_end();
	munmap(trace.header, file_bytes(trace.header->events));
	trace.header = NULL;
	trace.counters = NULL;
	trace.ring = NULL;
}

/* ============================================================================================================
 * Reading
 * ========================================================================================================== */

/* For qsort: in the order in which they began; of those that began together what contains the others comes first. */
static int compare_records(const void *a, const void *b)
{
	const struct trace_record *x = a, *y = b;
	static const int order[] = {[RECORD_PHASE] = 0, [RECORD_OPERATION] = 1, [RECORD_COLLECTIVE] = 2};
	return x->begin != y->begin ? (x->begin > y->begin) - (x->begin < y->begin)
			: x->kind != y->kind ? order[x->kind] - order[y->kind] : (x->place > y->place) - (x->place < y->place);
}

#define TIME_LIMIT ((uint64_t)1 << 62) /* no trace_now() comes near: 146 years */

/* Whether a record says nothing that its reader could not look up in a table, and no impossible time. */
static bool is_sound(const struct trace_record *r)
{
	const int kinds[] = {[RECORD_OPERATION] = NUM_OPERATIONS, [RECORD_COLLECTIVE] = NUM_COLLECTIVES,
			[RECORD_PHASE] = NUM_HEARTBEAT_PHASES};
	return r->kind >= RECORD_OPERATION && r->kind <= RECORD_PHASE && r->what < kinds[r->kind] &&
			(r->kind != RECORD_OPERATION || r->what != OP_NONE) &&
			r->pass < NUM_PASSES && r->part < NUM_PARTS && r->layer >= -1 && r->arrived >= r->begin &&
			(!r->end || r->end >= r->arrived) && r->arrived < TIME_LIMIT && r->end < TIME_LIMIT;
}

/* Copies the records of the ring that are whole, in order. */
static void read_ring(struct trace *t, const struct trace_record *ring, uint64_t events, uint64_t written)
{
	for (uint64_t i = written > events ? written - events : 0; i < written; i++) {
		const struct trace_record *from = &ring[i & (events - 1)];
		struct trace_record *r = &t->records[t->num_records];
		const uint64_t place = __atomic_load_n(&from->place, __ATOMIC_ACQUIRE);
		*r = *from;
		__atomic_thread_fence(__ATOMIC_ACQUIRE);
		t->num_records += place == i + 1 && r->place == place &&
				__atomic_load_n(&from->place, __ATOMIC_RELAXED) == place && is_sound(r);
	}
	qsort(t->records, t->num_records, sizeof *t->records, compare_records);
	t->lost = (int64_t)written - t->num_records;
}

/* trace_read, of a file that is open and mapped. */
static int read_mapped(struct trace *t, const uint8_t *map, size_t size, const char *path)
{
	const struct header *h = (const struct header *)map;
	if (size < PAGE || memcmp(h->magic, MAGIC, sizeof h->magic))
		return fail("%s: no trace file: it does not begin as those do that ling train writes", path);
	if (h->version != VERSION || h->header_bytes != PAGE || h->counter_bytes != COUNTER_BYTES ||
			h->record_bytes != sizeof(struct trace_record))
		return fail("%s: version %u of a trace, written by another version of ling; this one reads version %d with "
				"%d bytes of counters: read it with the ling that trained", path, h->version, VERSION, COUNTER_BYTES);
	if (h->events < 1 || h->events > MAX_EVENTS || h->events & (h->events - 1) || size != file_bytes(h->events) ||
			h->ranks < 1 || h->ranks > MAX_RANKS || h->rank < 0 || h->rank >= h->ranks || h->phase < HEARTBEAT_NONE ||
			h->phase >= NUM_HEARTBEAT_PHASES || h->started >= TIME_LIMIT || h->phase_begun >= TIME_LIMIT ||
			h->last_sign >= TIME_LIMIT || h->replica < 0 || h->replica >= h->ranks)
		return fail("%s: a damaged trace file: %zu bytes, %llu events, rank %d of %d. If it is a copy, copy it again",
				path, size, (unsigned long long)h->events, h->rank, h->ranks);
	*t = (struct trace){.id = h->id, .rank = h->rank, .ranks = h->ranks, .pid = h->pid, .pid_started = h->pid_started,
			.started = h->started, .started_unix = h->started_unix, .peak_flops = h->peak_flops,
			.peak_bandwidth = h->peak_bandwidth, .phase = h->phase, .step = h->step, .phase_begun = h->phase_begun,
			.last_sign = h->last_sign, .replica = h->replica, .alone = h->alone};
	memcpy(t->host, h->host, sizeof t->host);
	t->host[sizeof t->host - 1] = 0;
	const uint64_t written = __atomic_load_n(&h->written, __ATOMIC_ACQUIRE);
	const size_t records = written < h->events ? written : h->events;
	t->memory = allocate(sizeof(struct counters) + (records + 1) * sizeof *t->records);
	struct counters *c = t->memory;
	memcpy(c, map + PAGE, sizeof *c);
	t->operation = c->operation;
	t->collective = c->collective;
	t->steps = c->steps;
	t->records = (struct trace_record *)(c + 1);
	read_ring(t, (const struct trace_record *)(map + PAGE + COUNTER_BYTES), h->events, written);
	return 0;
}

int trace_read(struct trace *t, const char *path)
{
	const uint8_t *map;
	size_t size;
	*t = (struct trace){0};
	if (map_file(path, &map, &size) < 0)
		return -1;
	const int rc = read_mapped(t, map, size, path);
	unmap_file(map, size);
	return rc;
}

void trace_free(struct trace *t)
{
	free(t->memory);
	*t = (struct trace){0};
}

int traces_read(struct trace **list, int *count, const char *run_dir, bool before)
{
	enum { MOST_NAMED = 8 };     /* ranks that are left out */
	char dir[PATH_LEN], path[PATH_LEN], reason[1024] = "";
	*list = NULL;
	*count = 0;
	const int found = trace_dir(dir, run_dir, before) < 0 ? -1 : ranks_in(dir);
	if (found < 0 && !before && trace_dir(path, run_dir, true) == 0 && path_exists(path) > 0)
		return fail("%s: not there: the newest start of the run has no trace (trace.events is 0, or it was refused). "
				"--before shows the start before", dir);
	if (found < 0)
		return -1;
	if (found == 0)
		return fail("%s: no traces in it: the run has not begun, or its files were removed", dir);
	*list = allocate(found * sizeof **list);
	for (int rank = 0, named = 0; rank < found; rank++) {
		struct trace t = {0};
		const struct trace *first = *count ? &(*list)[0] : &t;
		int rc = trace_path(path, dir, rank) < 0 ? -1 : trace_read(&t, path);
		if (rc == 0 && t.rank != rank)
			rc = fail("%s: the trace of rank %d, under another name", path, t.rank);
		else if (rc == 0 && (t.id != first->id || t.ranks != first->ranks))
			rc = fail("%s: of another start of the run than that of rank %d", path, first->rank);
		if (rc == 0) {
			(*list)[(*count)++] = t;
			continue;
		}
		trace_free(&t);
		snprintf(reason, sizeof reason, "%.1000s", error_text);
		if (named++ < MOST_NAMED)
			fprintf(stderr, "warning: %s; rank %d is left out\n", reason, rank);
	}
	if (*count)
		return 0;
	free(*list);
	*list = NULL;
	return fail("%s: no trace that can be read: %s", dir, reason);
}

void traces_free(struct trace *list, int count)
{
	for (int i = 0; i < count; i++)
		trace_free(&list[i]);
	free(list);
}
