/*
 * measure_inference.c - what scripts/measure-inference.sh measures the engine of evaluation and generation with.
 *
 *   measure_inference MODEL_DIR [key=value ...] <REQUESTS
 *       REQUESTS: a line for each request, "PROMPT NEW SHARED": the prompt's tokens, the new ones, and how many of the
 *       prompt's first tokens are those of all requests. The tokens are random ids; all requests are there from the
 *       beginning. Keys: at_once, most requests that run together (32); pool, tokens for whose keys and values there
 *       is room (0: as the engine chooses); forward, most tokens of a forward pass (4096); sharing (1); products, 0:
 *       the machine's rate is not measured.
 *   measure_inference MODEL_DIR windows=FILE length=L batch=B
 *       the loss over a file of bare ids (uint16), in windows of L tokens, B together
 *
 * Prints a JSON object. `roof_percent` compares the FLOPs of the prompts, or of the windows, with the rate of large
 * products by OpenBLAS, just before and after: the rate that `ling bench` takes for the peak. Counted are the FLOPs
 * that are computed: of a prompt the logits of the last token alone.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "files/checkpoint.h"
#include "files/tokenizer.h"
#include "kernels.h"
#include "parallel.h"
#include "data.h"
#include "ling.h"
#include "model/parameters.h"
#include "training/evaluation.h"
#include "commands/engine.h"
#include "commands/startup.h"

#include <jansson.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

struct settings { int64_t at_once, pool, forward, sharing, products, length, batch; const char *windows; };

/* What on_step sees. */
struct measurement {
	struct engine *engine;
	int64_t prompt_tokens;       /* of all requests */
	double prompt_seconds;       /* until the last prompt was computed */
	int64_t early;               /* new tokens until then */
	/* sums over the forward passes: requests that run; of the pool: the share in use, free ranges, the longest free
	 * range's share of what is free */
	double running, used, ranges, longest;
	int64_t passes;
};

/* The rate of large products, FLOP/s: see ling bench. */
static double product_rate(void)
{
	enum { N = 2048, PRODUCTS = 3 };
	static real *a;
	if (!a) {
		a = allocate(3 * (size_t)N * N * sizeof *a);
		for (int64_t i = 0; i < 3 * (int64_t)N * N; i++)
			a[i] = (real)(i % 17 - 8);
		single_gemm(a + 2 * N * N, a, false, a + N * N, true, N, N, N, kernels_threads());
	}
	const double begin = clock_seconds();
	for (int i = 0; i < PRODUCTS; i++)
		single_gemm(a + 2 * N * N, a, false, a + N * N, true, N, N, N, kernels_threads());
	return PRODUCTS * 2.0 * N * N * N / (clock_seconds() - begin);
}

/* The FLOPs of a forward pass over n tokens of a sequence, with the logits of all or of one. */
static double forward_flops(const struct model_config *c, int64_t n, bool all_logits)
{
	struct parameter_count count[NUM_PARAMETER_PARTS + 1];
	double flops = 0;
	if (count_parameters(count, &flops, c, n) < 0)
		return 0;
	return flops / 3 * n - (all_logits ? 0 : 2.0 * c->hidden_size * c->vocab_size * (n - 1));
}

static void add_roof(json_t *report, double flops, double seconds, double before, double after)
{
	const double rate = (before + after) / 2;
	json_object_set_new(report, "roof_gflops", json_real(rate / 1e9));
	json_object_set_new(report, "gflops", json_real(flops / seconds / 1e9));
	json_object_set_new(report, "roof_percent", json_real(100 * flops / seconds / rate));
}

static int observe(void *data, const struct engine_statistics *s)
{
	struct measurement *m = data;
	if (m->prompt_seconds == 0 && s->tokens_in >= m->prompt_tokens) {
		m->prompt_seconds = s->seconds;
		m->early = s->tokens_out;
	}
	json_t *report = engine_report(m->engine), *pool = json_object_get(report, "pool");
	const double all = (double)s->kv_tokens, used = (double)s->kv_used;
	m->running += (double)s->running;
	m->used += used / all;
	m->ranges += json_number_value(json_object_get(pool, "free_ranges"));
	m->longest += used < all ? json_number_value(json_object_get(pool, "longest_free_range")) / (all - used) : 1;
	m->passes++;
	json_decref(report);
	return 0;
}

/* Random ids; the same for the same seed. */
static void append_random(struct ids *ids, int64_t n, uint32_t seed, int64_t V)
{
	uint32_t state = seed * 2654435761u + 1;
	for (int64_t i = 0; i < n; i++) {
		state = state * 1664525 + 1013904223;
		append_id(ids, (int32_t)((state >> 8) % V));
	}
}

static json_t *measure_requests(struct model *m, const struct tokenizer *t, const struct settings *s)
{
	const struct model_config *c = &m->config;
	struct request *requests = NULL;
	size_t n = 0, capacity = 0;
	long long prompt, new, shared;
	struct measurement seen = {0};
	double flops = 0;
	int64_t tokens = 0, in_common = 0;
	while (scanf("%lld %lld %lld", &prompt, &new, &shared) == 3) {
		requests = grow(requests, n, &capacity, 1, sizeof *requests);
		requests[n] = (struct request){.number = (uint32_t)n, .num_prompt = prompt, .max_tokens = new};
		append_random(&requests[n].ids, shared, 0, tokenizer_size(t));
		append_random(&requests[n].ids, prompt - shared, (uint32_t)n + 1, tokenizer_size(t));
		seen.prompt_tokens += prompt;
		in_common += shared;
		tokens += prompt + new;
		flops += forward_flops(c, prompt, false);
		n++;
	}
	struct engine *e = engine_open(m, t, &(struct engine_options){.kv_tokens = s->pool, .useful_tokens = tokens,
			.max_requests = (int)s->at_once, .no_sharing = !s->sharing, .on_step = observe, .data = &seen});
	int rc = e && n ? 0 : -1;
	seen.engine = e;
	for (size_t i = 0; i < n && rc == 0; i++)
		rc = engine_add(e, &requests[i]);
	const double before = s->products ? product_rate() : 0;
	if (rc == 0)
		rc = engine_run(e, NULL, NULL);
	json_t *report = NULL;
	if (rc == 0) {
		const double after = s->products ? product_rate() : 0;
		const struct engine_statistics *d = engine_statistics(e);
		report = engine_report(e);
		json_object_set_new(report, "prompt_seconds", json_real(seen.prompt_seconds));
		json_object_set_new(report, "prompt_tokens_per_second", json_real(seen.prompt_tokens / seen.prompt_seconds));
		if (d->tokens_out > seen.early)
			json_object_set_new(report, "new_tokens_per_second",
					json_real((d->tokens_out - seen.early) / (d->seconds - seen.prompt_seconds)));
		json_object_set_new(report, "mean_running", json_real(seen.running / seen.passes));
		json_object_set_new(report, "mean_used_percent", json_real(100 * seen.used / seen.passes));
		json_object_set_new(report, "mean_free_ranges", json_real(seen.ranges / seen.passes));
		json_object_set_new(report, "mean_longest_percent", json_real(100 * seen.longest / seen.passes));
		if (s->products && !in_common)
			add_roof(report, flops, seen.prompt_seconds, before, after);
	}
	engine_close(e);
	for (size_t i = 0; i < n; i++)
		request_free(&requests[i]);
	free(requests);
	return report;
}

static json_t *measure_windows(struct model *m, const struct settings *s)
{
	struct tokens data;
	struct evaluation e = {0};
	if (tokens_open(&data, s->windows, "uint16", m->config.vocab_size) < 0)
		return NULL;
	const double before = product_rate(), begin = clock_seconds();
	json_t *report = NULL;
	if (evaluate(m, &data, NULL, 0, &e) == 0) {
		const double seconds = clock_seconds() - begin, after = product_rate();
		report = json_pack("{s:f, s:I, s:f}", "loss", e.loss, "tokens", (json_int_t)e.tokens, "tokens_per_second",
				e.tokens / seconds);
		add_roof(report, forward_flops(&m->config, s->length, true) / s->length * e.tokens, seconds, before, after);
	}
	tokens_close(&data);
	return report;
}

/* Loads the model, measures, and prints. */
static int measure(const char *name, const struct settings *s)
{
	char dir[PATH_LEN];
	struct model_config c;
	struct model m = {0};
	struct layout layout = layout_of_rank(0, 1, 1, 1);
	if (find_model(dir, name) < 0 || config_from_huggingface(&c, dir) < 0)
		return -1;
	struct tokenizer *t = tokenizer_of_model(dir, NULL);
	layout_connect(&layout);
	const int sequences = s->windows ? (int)s->batch : 1, length = (int)(s->windows ? s->length : s->forward);
	int rc = t ? model_init(&m, &c, &layout, sequences, length, EVALUATE) : -1;
	if (rc == 0)
		rc = model_load(&m, dir);
	json_t *report = rc < 0 ? NULL : s->windows ? measure_windows(&m, s) : measure_requests(&m, t, s);
	if (report) {
		struct rusage usage;
		getrusage(RUSAGE_SELF, &usage);
		json_object_set_new(report, "threads", json_integer(kernels_threads()));
		json_object_set_new(report, "most_memory_mb", json_real(usage.ru_maxrss / 1e3)); /* from kB */
		json_dumpf(report, stdout, JSON_REAL_PRECISION(6));
		printf("\n");
		json_decref(report);
	}
	model_free(&m);
	tokenizer_close(t);
	return report ? 0 : -1;
}

int main(int argc, char **argv)
{
	struct settings s = {.at_once = 32, .forward = ENGINE_TOKENS, .sharing = 1, .products = 1, .length = 512,
			.batch = 16};
	const struct { const char *name; int64_t *value; } keys[] = {{"at_once", &s.at_once}, {"pool", &s.pool},
			{"forward", &s.forward}, {"sharing", &s.sharing}, {"products", &s.products}, {"length", &s.length},
			{"batch", &s.batch}};
	int rc = argc > 1 ? widen_stack() : fail("usage: measure_inference MODEL_DIR [key=value ...]");
	for (int i = 2; i < argc; i++) {
		const char *is = strchr(argv[i], '=');
		bool known = !strncmp(argv[i], "windows=", 8);
		if (known)
			s.windows = is + 1;
		for (size_t k = 0; is && k < sizeof keys / sizeof *keys; k++)
			if (strlen(keys[k].name) == (size_t)(is - argv[i]) && !strncmp(argv[i], keys[k].name, is - argv[i])) {
				*keys[k].value = strtoll(is + 1, NULL, 10);
				known = true;
			}
		if (!known)
			rc = fail("%s: no such key", argv[i]);
	}
	use_best_environment(argv, true, false);
	kernels_init(false);
	parallel_start();
	if (rc == 0)
		rc = measure(argv[1], &s);
	if (rc < 0)
		fprintf(stderr, "measure_inference: %s\n", error_text);
	parallel_stop(rc < 0);
	return rc < 0;
}
