/*
 * files/heartbeat.c - the heartbeat of a training run.
 */
#define _GNU_SOURCE
#include "files/heartbeat.h"

#include "files/base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <time.h>
#include <unistd.h>

const char *const heartbeat_phase_names[NUM_HEARTBEAT_PHASES] = {"none", "start", "first step", "step", "evaluation",
	"save", "write", "end"};

enum { PAGE = 4096, NAME = 16, MAX_RANKS = 1 << 20 };
#define MAGIC "lingbeat"
#define VERSION 1

struct header {
	char magic[8];
	uint32_t version, ranks;
	uint64_t id;
};

/* The page of a rank. Words are in the byte order of the machine. */
struct rank_page {
	/* one cache line: what changes within a step */
	_Atomic uint64_t step, changed; /* changed: milliseconds since 1970 */
	_Atomic uint64_t operation[2], collective[2]; /* names in bytes, filled up with zeros */
	_Atomic uint32_t state;      /* bits 0-2 phase, 3 waits, 4-15 layer + 1, 16-31 phases begun */
	_Atomic uint32_t number, waited; /* waited: milliseconds */
	_Atomic float own_seconds;
	/* what changes once a step, or never */
	_Atomic float step_seconds;
	uint32_t pid;
	uint64_t pid_started;
	char host[64];
	_Atomic uint32_t replica, alone;
};
_Static_assert(offsetof(struct rank_page, step_seconds) == 64, "one cache line");
enum { WAITS = 8, LAYER_SHIFT = 4, LAYERS = 0xfff, PHASES_SHIFT = 16 };

/* The page of this process's rank: see the globals in ling.h. Without a file, `nowhere` takes the stores. */
static _Alignas(64) struct rank_page nowhere;
static struct {
	struct rank_page *page;      /* NULL: nowhere */
	bool shared;                 /* the file may be read from another machine: the page is brought to the server */
	uint64_t id;                 /* of the file */
	uint64_t brought;            /* when it was, in milliseconds */
	double phase_begun;          /* clock_seconds() */
} beat;

static struct rank_page *page(void)
{
	return beat.page ? beat.page : &nowhere;
}

/* Milliseconds since 1970, from the system's last tick: exact to some milliseconds, and read without a system call. */
static uint64_t now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME_COARSE, &t);
	return (uint64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

#define STORE(field, value) atomic_store_explicit(&page()->field, value, memory_order_relaxed)
#define LOAD(field) atomic_load_explicit(&page()->field, memory_order_relaxed)

static void store_name(_Atomic uint64_t to[2], const char *name)
{
	uint64_t words[2] = {0};
	memcpy(words, name, strnlen(name, NAME - 1));
	atomic_store_explicit(&to[0], words[0], memory_order_relaxed);
	atomic_store_explicit(&to[1], words[1], memory_order_relaxed);
}

/* Brings the page to where other machines can read it, at most once a second. */
static void bring(void)
{
	if (!beat.shared)
		return;
	const uint64_t t = now();
	if (t - beat.brought < 1000)
		return;
	beat.brought = t;
	msync(beat.page, PAGE, MS_SYNC);
}

void heartbeat_create(const char *run_dir, int ranks)
{
	char path[PATH_LEN];
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	const struct header header = {.magic = MAGIC, .version = VERSION, .ranks = ranks,
			.id = (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec};
	if (path_join(path, run_dir, "heartbeat") < 0)
		return; /* the run will say so */
	unlink(path);
	const int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	/* All blocks are taken now: a store into a page that finds the disk full would end the program. */
	int error = fd < 0 ? errno : posix_fallocate(fd, 0, (off_t)(1 + ranks) * PAGE);
	if (!error && pwrite(fd, &header, sizeof header, 0) != sizeof header)
		error = errno;
	if (fd >= 0)
		close(fd);
	if (!error)
		return;
	fprintf(stderr, "warning: %s: cannot be made (%s): nobody will see from it whether this run hangs\n", path,
			strerror(error));
	unlink(path);
}

/* Whether other machines may have the file system of this file. */
static bool is_shared(int fd)
{
	/* ext2 to ext4, XFS, Btrfs, tmpfs, overlayfs, ZFS, F2FS; all others are taken for shared */
	static const uint32_t local[] = {0xef53, 0x58465342, 0x9123683e, 0x01021994, 0x794c7630, 0x2fc12fc1, 0xf2f52010};
	struct statfs s;
	if (fstatfs(fd, &s) < 0)
		return true;
	for (size_t i = 0; i < sizeof local / sizeof *local; i++)
		if ((uint32_t)s.f_type == local[i])
			return false;
	return true;
}

void heartbeat_join(const char *run_dir, int rank, const char *host)
{
	char path[PATH_LEN];
	struct header header;
	struct process self = {0};
	const int fd = path_join(path, run_dir, "heartbeat") < 0 ? -1 : open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0)
		return;
	void *map = MAP_FAILED;
	if (pread(fd, &header, sizeof header, 0) == sizeof header && !memcmp(header.magic, MAGIC, sizeof header.magic) &&
			rank < (int)header.ranks)
		map = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, (off_t)(1 + rank) * PAGE);
	if (map != MAP_FAILED) {
		beat.page = map;
		beat.id = header.id;
		beat.shared = is_shared(fd);
		process_look(&self, getpid());
		beat.page->pid = getpid();
		beat.page->pid_started = self.started;
		snprintf(beat.page->host, sizeof beat.page->host, "%s", host);
		heartbeat_phase(HEARTBEAT_START, 0);
	}
	close(fd);
}

uint64_t heartbeat_id(void)
{
	return beat.id;
}

void heartbeat_leave(void)
{
	if (!beat.page)
		return;
	beat.brought = 0;
	bring();
	munmap(beat.page, PAGE);
	beat.page = NULL;
	beat.id = 0;
}

void heartbeat_remove(const char *run_dir)
{
	char path[PATH_LEN];
	if (path_join(path, run_dir, "heartbeat") == 0)
		unlink(path);
}

void heartbeat_phase(enum heartbeat_phase phase, int64_t step)
{
	const double t = clock_seconds();
	const uint32_t state = LOAD(state);
	if ((state & 7) == HEARTBEAT_STEP)
		STORE(step_seconds, (float)(t - beat.phase_begun));
	beat.phase_begun = t;
	STORE(step, (uint64_t)step);
	store_name(page()->operation, "");
	STORE(state, phase | ((state >> PHASES_SHIFT) + 1) << PHASES_SHIFT);
	STORE(changed, now());
	bring();
}

void heartbeat_operation(const char *name, int layer)
{
	store_name(page()->operation, name);
	STORE(state, (LOAD(state) & ~((uint32_t)LAYERS << LAYER_SHIFT)) |
			(uint32_t)(layer < LAYERS ? layer + 1 : 0) << LAYER_SHIFT);
	STORE(changed, now());
}

uint32_t heartbeat_wait(const char *collective, bool numbered)
{
	const uint32_t number = LOAD(number) + numbered;
	store_name(page()->collective, collective);
	STORE(number, number);
	STORE(waited, 0);
	STORE(state, LOAD(state) | WAITS);
	STORE(changed, now());
	return number;
}

void heartbeat_still_waiting(double seconds)
{
	STORE(waited, (uint32_t)(seconds * 1e3));
	bring();
}

void heartbeat_wait_end(void)
{
	STORE(state, LOAD(state) & ~(uint32_t)WAITS);
	STORE(changed, now());
}

void heartbeat_replica(int replica)
{
	STORE(replica, (uint32_t)replica);
}

void heartbeat_alone(bool alone)
{
	STORE(alone, alone);
}

void heartbeat_own_seconds(double seconds)
{
	STORE(own_seconds, (float)seconds);
}

/* What a page says; it may change meanwhile, so that the fields need not belong together. */
static struct heartbeat_rank read_page(const struct rank_page *p)
{
	const uint32_t state = p->state;
	struct heartbeat_rank r = {.step = p->step, .phase = state & 7, .phases = state >> PHASES_SHIFT,
			.waits = state & WAITS, .waited = p->waited / 1e3, .layer = (int)(state >> LAYER_SHIFT & LAYERS) - 1,
			.replica = (int)p->replica, .alone = p->alone, .number = p->number,
			.changed = p->changed / 1e3, .own_seconds = p->own_seconds,
			.step_seconds = p->step_seconds, .pid = (int)p->pid, .pid_started = p->pid_started};
	memcpy(r.operation, (const void *)p->operation, NAME);
	memcpy(r.collective, (const void *)p->collective, NAME);
	memcpy(r.host, p->host, sizeof r.host);
	r.operation[NAME - 1] = r.collective[NAME - 1] = r.host[sizeof r.host - 1] = 0;
	return r;
}

int heartbeat_read(struct heartbeat *h, const char *run_dir)
{
	char path[PATH_LEN];
	struct header header;
	*h = (struct heartbeat){0};
	/* Opened anew each time: over NFS, that is what asks the server for the newest content. */
	const int fd = path_join(path, run_dir, "heartbeat") < 0 ? -1 : open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return errno == ENOENT ? 0 : fail("%s: cannot open: %s", path, strerror(errno));
	int rc = 0;
	if (pread(fd, &header, sizeof header, 0) == sizeof header && !memcmp(header.magic, MAGIC, sizeof header.magic)) {
		rc = 1;
		if (header.version != VERSION || header.ranks < 1 || header.ranks > MAX_RANKS)
			rc = fail("%s: version %u, %u ranks; this program reads version %d", path, header.version, header.ranks,
					VERSION);
	}
	if (rc == 1) {
		h->id = header.id;
		h->ranks = header.ranks;
		h->rank = allocate(h->ranks * sizeof *h->rank);
	}
	for (int i = 0; i < h->ranks && rc == 1; i++) {
		struct rank_page p;
		if (pread(fd, &p, sizeof p, (off_t)(1 + i) * PAGE) == sizeof p)
			h->rank[i] = read_page(&p);
		else
			rc = 0; /* it is being made */
	}
	close(fd);
	if (rc < 1)
		heartbeat_free(h);
	return rc;
}

void heartbeat_free(struct heartbeat *h)
{
	free(h->rank);
	*h = (struct heartbeat){0};
}

bool process_look(struct process *p, int pid)
{
	char path[64], line[1024];
	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	FILE *f = fopen(path, "re");
	const size_t n = f ? fread(line, 1, sizeof line - 1, f) : 0;
	if (f)
		fclose(f);
	line[n] = 0;
	/* "PID (NAME) STATE PARENT ...": the name may hold anything; the start is the 22nd field */
	char *at = strrchr(line, ')');
	unsigned long long started;
	*p = (struct process){0};
	if (!at || sscanf(at + 1, " %c %d", &p->state, &p->parent) != 2)
		return false;
	for (int field = 2; field < 22 && at; field++)
		at = strchr(at + 1, ' ');
	if (!at || sscanf(at, "%llu", &started) != 1)
		return false;
	p->started = started;
	return true;
}
