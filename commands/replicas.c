/*
 * commands/replicas.c - inference on several ranks.
 */
#define _GNU_SOURCE
#include "commands/replicas.h"

#include "files/base.h"
#include "files/trace.h"
#include "parallel.h"
#include "files/config.h"

#include <stdio.h>

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
