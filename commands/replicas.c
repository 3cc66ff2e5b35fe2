/*
 * commands/replicas.c - inference on several ranks.
 */
#define _GNU_SOURCE
#include "commands/replicas.h"

#include "files/base.h"
#include "files/trace.h"
#include "parallel.h"
#include "files/config.h"
#include "model/memory.h"
#include "commands/engine.h"

#include <stdio.h>
#include <stdlib.h>

enum { RESULT_TAG = 1 }; /* of messages with results; an empty one is a rank's last */

int replicas_connect(struct layout *l, const struct model_config *c, const struct replica_options *o)
{
	const int ranks = parallel_size();
	if (ranks == 1 && (o->tensor > 1 || o->expert > 1))
		return fail("--tensor and --expert divide the model among ranks, and this is a single process: start it with "
				"mpirun -n N");
	if (parallel_same((uint64_t)o->tensor << 32 | (uint32_t)o->expert, "--tensor or --expert") < 0 ||
			parallel_agree(layout_check(c->num_attention_heads, c->num_key_value_heads, c->vocab_size, c->num_experts,
			ranks, o->tensor, o->expert, "--")) < 0)
		return -1;
	trace_clock(); /* which begins with its first call */
	*l = layout_of_inference(parallel_rank(), ranks, o->tensor, o->expert);
	layout_connect(l);
	return 0;
}

void replicas_report(const struct layout *l)
{
	int64_t bytes[NUM_TRAFFIC], total = 0;
	if (l->all.rank > 0 || l->world.size == 1)
		return;
	trace_bytes(bytes);
	for (int i = 0; i < NUM_TRAFFIC; i++)
		total += bytes[i];
	fprintf(stderr, "note: %d ranks (%d replica%s of data %d x tensor %d, expert %d): rank 0 sent %lld bytes",
			l->all.size, l->replicas.size, l->replicas.size > 1 ? "s" : "", l->data.size, l->tensor.size,
			l->expert.size, (long long)total);
	for (int i = 0, n = 0; i < NUM_TRAFFIC; i++)
		if (bytes[i])
			fprintf(stderr, "%s %s %lld", n++ ? "," : ":", traffic_names[i], (long long)bytes[i]);
	fprintf(stderr, "; it waited for others %.0f %% of the time\n", 100 * trace_waited() / trace_clock());
}

/* The `more` of engine_run. */
static int take_units(void *data, struct engine *e)
{
	struct shared_work *w = data;
	const struct engine_statistics *n;
	do { /* units may have no requests: then others follow, lest the engine ends */
		int64_t units[2] = {0, 0}; /* the first one, and how many */
		n = engine_statistics(e);
		if (w->none_left)
			break;
		/* The first rank of the group asks. While others are computed, the answer need not be awaited. */
		if (w->m->layout.tensor.rank == 0) {
			const int64_t places = w->max_requests - n->running, most = places > 1 ? places : 1;
			units[1] = n->running ? counter_poll(&w->counter, most, &units[0])
					: counter_take(&w->counter, most, &units[0]);
		}
		broadcast(&w->m->layout.tensor, units, sizeof units);
		w->none_left = units[1] == 0;
		for (int64_t i = 0; i < units[1]; i++)
			if (w->add(w->data, e, units[0] + i) < 0)
				return -1;
		n = engine_statistics(e);
	} while (n->running + n->waiting == 0);
	return 0;
}

/* Takes a message, if one has come or with `wait`. Returns 1 for a message, 0 for none. */
static int take_result(struct shared_work *w, bool wait, int *rc)
{
	int64_t bytes;
	void *message = take_message(&w->m->layout.all, RESULT_TAG, wait, &bytes);
	if (!message)
		return 0;
	if (bytes == 0)
		w->ended++;
	else if (*rc == 0)
		*rc = w->receive(w->data, message, bytes);
	free(message);
	return 1;
}

int shared_work_receive(struct shared_work *w)
{
	int rc = 0;
	while (w->m->layout.all.size > 1 && take_result(w, false, &rc))
		;
	return rc;
}

void shared_work_send(struct shared_work *w, const void *message, int64_t bytes)
{
	post_message(&w->outbox, &w->m->layout.all, 0, RESULT_TAG, message, bytes);
}

int shared_work_run(struct shared_work *w, struct engine *e, const struct model *m, int max_requests)
{
	const struct layout *l = &m->layout;
	const int groups = l->replicas.size * l->data.size;
	w->m = m;
	w->max_requests = max_requests;
	counter_open(&w->counter, w->count, groups);
	int rc = engine_run(e, take_units, w);
	if (rc)
		counter_stop(&w->counter);
	if (l->all.rank == 0)
		while (w->ended < groups - 1) {
			int received = rc;
			take_result(w, true, &received);
			rc = received < 0 ? -1 : rc;
		}
	else if (l->tensor.rank == 0) {
		shared_work_send(w, NULL, 0);
		outbox_wait(&w->outbox);
	}
	counter_close(&w->counter);
	return rc;
}
