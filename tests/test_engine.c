/*
 * The engine of evaluation and generation: the choice of tokens, and the bits of what requests get, whatever runs
 * beside them, however small the pool.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/tokenizer.h"
#include "ling.h"
#include "commands/engine.h"
#include "commands/kv_pool.h"
#include "commands/sampling.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include "test.h"

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#define assert_done(call) do { if ((call) < 0) fail_msg("%s", error_text); } while (0)

/* A random number from 0 to `most`. */
static int random_number(uint64_t *state, int most)
{
	*state = *state * 6364136223846793005u + 1442695040888963407u;
	return (int)((*state >> 33) % (most + 1));
}

static void test_choose_token(void **state)
{
	(void)state;
	int32_t ids[8];
	struct sampling s = {.top_p = 1};
	const real ties[] = {1, 3, 2, 3, 3}, wrong[] = {1, NAN, 2};
	const real none[] = {-INFINITY, -INFINITY}, one[] = {-INFINITY, 2, -INFINITY};
	assert_int_equal(choose_token(&s, ties, 5, &(struct draw){0, 0, 0}, ids), 1);
	for (int t = 0; t < 2; t++) {
		s.temperature = t;
		assert_int_equal(choose_token(&s, wrong, 3, &(struct draw){0, 0, 0}, ids), -1);
		assert_int_equal(choose_token(&s, none, 2, &(struct draw){0, 0, 0}, ids), -1);
		assert_int_equal(choose_token(&s, one, 3, &(struct draw){0, 0, 0}, ids), 1);
	}
	/* Draws have the probabilities that the settings say, and are the same again. */
	enum { V = 6, DRAWS = 20000 };
	static const struct { double temperature, top_p; int top_k; double expected[V]; } draws[] = {
		{1, 1, 0, {.1, .3, .2, .3, .05, .05}},
		{1, 1, V, {.1, .3, .2, .3, .05, .05}},
		{0.5, 1, 0, {.01 / .235, .09 / .235, .04 / .235, .09 / .235, .0025 / .235, .0025 / .235}},
		{1, 1, 3, {0, .375, .25, .375}},
		{1, 1, 1, {0, 1}}, /* of equals the lower id */
		{1, 1, 5, {.1 / .95, .3 / .95, .2 / .95, .3 / .95, .05 / .95}},
		{1, 0.59, 0, {0, .5, 0, .5}},
		{1, 0.61, 0, {0, .375, .25, .375}},
		{1, 1e-9, 0, {0, 1}},
		{1, 0.7, 3, {0, .5, 0, .5}}, /* .7 of the three's .8 */
	};
	const double p[V] = {.1, .3, .2, .3, .05, .05};
	real logits[V];
	for (int v = 0; v < V; v++)
		logits[v] = (real)log(p[v]);
	logits[3] = logits[1], logits[5] = logits[4];
	for (size_t i = 0; i < sizeof draws / sizeof *draws; i++) {
		int count[V] = {0};
		s = (struct sampling){draws[i].temperature, draws[i].top_p, draws[i].top_k, 7};
		for (int j = 0; j < DRAWS; j++) {
			const int32_t v = choose_token(&s, logits, V, &(struct draw){j / 10, j % 10, 0}, ids);
			assert_in_range(v, 0, V - 1);
			assert_int_equal(choose_token(&s, logits, V, &(struct draw){j / 10, j % 10, 0}, ids), v);
			count[v]++;
		}
		for (int v = 0; v < V; v++) {
			const double e = draws[i].expected[v];
			if (fabs(count[v] - DRAWS * e) > 5 * sqrt(DRAWS * e * (1 - e)))
				fail_msg("case %zu: token %d came %d times of %d, expected %g", i, v, count[v], DRAWS, DRAWS * e);
		}
	}
	/* The fewest tokens that have top_p of the probability: of four equal ones one has a quarter, two have a half. */
	const real even[4] = {0};
	for (int n = 1; n <= 4; n++) {
		int seen = 0;
		s = (struct sampling){1, 0.25 * n, 0, 7};
		for (int j = 0; j < 200; j++)
			seen |= 1 << choose_token(&s, even, 4, &(struct draw){j, 0, 0}, ids);
		assert_int_equal(seen, (1 << n) - 1);
	}
	/* Any sizes: the ranking by a heap is that of sorting. */
	enum { MANY = 300 };
	real many[MANY];
	int32_t order[MANY];
	uint64_t seed = 1;
	for (int v = 0; v < MANY; v++)
		many[v] = (real)(random_number(&seed, 40) * 1e-3);
	for (int k = 1; k < MANY; k += 7) {
		int kept = 0, rank;
		bool seen[MANY] = {false};
		s = (struct sampling){1, 1, k, 3};
		for (int j = 0; j < 30 * k; j++)
			seen[choose_token(&s, many, MANY, &(struct draw){j, 0, 0}, order)] = true;
		for (int v = 0; v < MANY; v++) {
			rank = 0;
			for (int u = 0; u < MANY; u++)
				rank += many[u] > many[v] || (many[u] == many[v] && u < v);
			assert_true(rank < k || !seen[v]);
			kept += seen[v];
		}
		assert_int_equal(kept, k);
	}
}

/* ---- requests ---- */

enum { VOCABULARY = 300, BYTE_IDS = 257, MOST_NEW = 150, LONGEST = 800 };

static void make_model(struct model *m, int64_t forward_tokens)
{
	static const struct model_config c = {.hidden_size = 24, MODEL_DEFAULTS,
			.num_hidden_layers = 2, .num_attention_heads = 4,
		.num_key_value_heads = 2, .head_dim = 6, .vocab_size = VOCABULARY, .num_experts = 6, .num_experts_per_tok = 2,
		.num_shared_experts = 1, .moe_intermediate_size = 16, .norm_head = true, .norm_topk_prob = true,
		.rope_theta = 1e4, .rms_norm_eps = 1e-5, .initializer_range = 0.5, .max_position_embeddings = LONGEST};
	const struct layout alone = layout_of_rank(0, 1, 1, 1);
	assert_done(model_init(m, &c, &alone, 1, forward_tokens, EVALUATE));
	model_randomize(m, 3);
}

/* The requests of the tests: three prompts of several hundred tokens with which others begin, up to each of their
 * tokens; short ones; equal ones; draws of one prompt. Some want scores, some new tokens, some both. */
enum { REQUESTS = 26 };
static char stop_text[4];
static const struct strings stop = {(char *[]){stop_text}, 1, false};

static void make_requests(struct request *list)
{
	uint64_t seed = 5;
	int32_t begin[3][LONGEST];
	for (int i = 0; i < 3 * LONGEST; i++)
		begin[i / LONGEST][i % LONGEST] = random_number(&seed, 256);
	for (int i = 0; i < REQUESTS; i++) {
		struct request *r = &list[i];
		*r = (struct request){.number = i, .priority = i % 11 == 10, .sampling = {.top_p = 1, .seed = 9}};
		const int64_t shared = i % 3 == 0 ? random_number(&seed, 3) : 250 + random_number(&seed, 300);
		append_ids(&r->ids, begin[i % 3], shared);
		for (int n = random_number(&seed, 20) + (shared == 0); n > 0; n--)
			append_id(&r->ids, random_number(&seed, 256));
		if (i % 7 == 6) { /* an equal one, or another draw */
			r->ids.count = 0;
			append_ids(&r->ids, list[i - 1].ids.id, list[i - 1].num_prompt);
			r->draw = i % 2;
			r->number = i - 1;
		}
		r->num_prompt = r->ids.count;
		r->max_tokens = i % 4 == 1 ? 0 : i % 3 ? 1 + random_number(&seed, 30) : MOST_NEW;
		r->sampling.temperature = i % 5 == 2 ? 30 : 0;
		r->stop = *stop_text && i % 2 ? &stop : NULL;
		if (i % 4 < 3)
			r->score_from = i % 4 == 2 ? 1 : 1 + random_number(&seed, (int)r->num_prompt - 1);
	}
}

static void free_requests(struct request *list)
{
	for (int i = 0; i < REQUESTS; i++)
		request_free(&list[i]);
}

static void assert_same_results(const struct request *found, const struct request *expected, const char *way)
{
	for (int i = 0; i < REQUESTS; i++) {
		const struct request *f = &found[i], *e = &expected[i];
		if (f->ended != e->ended || f->ids.count != e->ids.count || f->num_log_probs != e->num_log_probs ||
				memcmp(f->ids.id, e->ids.id, f->ids.count * sizeof *f->ids.id) || f->text.size != e->text.size ||
				(f->text.size && memcmp(f->text.data, e->text.data, f->text.size)) || (f->num_log_probs &&
				memcmp(f->log_prob, e->log_prob, f->num_log_probs * sizeof *f->log_prob)))
			fail_msg("%s: request %d has other results", way, i);
	}
}

/* What a request got, against one forward pass over its whole sequence: log-probabilities bit for bit, and at
 * temperature 0 the most likely tokens. */
static void check_request(struct model *m, const struct request *r)
{
	int32_t input[LONGEST] = {0}, any = 0;
	real logits[VOCABULARY], max;
	double loss, sum;
	memcpy(input, r->ids.id, r->ids.count * sizeof *input);
	model_forward(m, input, 1, NULL, NULL);
	const int64_t known = r->score_from ? r->ids.count - r->score_from : 0;
	assert_int_equal(r->num_log_probs, known > 0 ? known : 0);
	for (int64_t p = 1; p < r->ids.count; p++) {
		int best = 0;
		if (p < r->num_prompt && (!r->score_from || p < r->score_from))
			continue;
		model_logits(m, logits, p - 1, 1);
		for (int v = 1; v < BYTE_IDS; v++)
			best = logits[v] > logits[best] ? v : best;
		if (p >= r->num_prompt && r->sampling.temperature == 0)
			assert_int_equal(input[p], best);
		assert_in_range(input[p], 0, BYTE_IDS - 1);
		if (!r->score_from || p < r->score_from)
			continue;
		logits_max(&max, logits, 1, VOCABULARY);
		const double logit = (double)logits[input[p]] - max;
		cross_entropy_forward(&loss, &sum, logits, &max, &any, 0, 1, VOCABULARY);
		assert_same(r->log_prob[p - r->score_from], logit - log(sum));
	}
}

/* Runs the requests in an engine; *s is what it counted. */
static void run_requests(struct request *list, const struct tokenizer *t, int64_t forward_tokens,
		const struct engine_options *o, struct engine_statistics *s)
{
	struct model m;
	make_model(&m, forward_tokens);
	make_requests(list);
	struct engine *e = engine_open(&m, t, o);
	if (!e)
		fail_msg("%s", error_text);
	for (int i = 0; i < REQUESTS; i++)
		assert_done(engine_add(e, &list[i]));
	assert_done(engine_run(e, NULL, NULL));
	*s = *engine_statistics(e);
	int64_t prompts = 0, new = 0;
	for (int i = 0; i < REQUESTS; i++) {
		assert_true(list[i].ended != RUNNING && !list[i].sequence);
		prompts += list[i].num_prompt - (list[i].max_tokens == 0);
		new += list[i].ids.count - list[i].num_prompt;
	}
	assert_int_equal(s->requests, REQUESTS);
	assert_int_equal(s->running + s->waiting, 0);
	assert_int_equal(s->tokens_in, prompts);
	assert_int_equal(s->tokens_out, new);
	assert_true(s->most_running <= o->max_requests && s->most_kv_used <= s->kv_tokens);
	if (o->no_sharing)
		assert_int_equal(s->kv_used + s->shared + s->waits, 0);
	json_t *report = engine_report(e);
	assert_int_equal(json_integer_value(json_object_get(report, "tokens_recomputed")), s->recomputed);
	json_decref(report);
	engine_close(e);
	model_free(&m);
}

/* No bit of a result depends on the requests beside it, the tokens of a forward pass, the pool, sharing, threads. */
static void test_bits(void **state)
{
	(void)state;
	static const struct way {
		const char *name;
		int64_t forward_tokens, kv_tokens;
		int max_requests, threads;
		bool no_sharing;
		int preempts, shares;        /* 1: it must happen, 0: it must not, -1: it may */
	} ways[] = {
		{"alone, nothing shared", 4096, 0, 1, 1, true, 0, 0},
		{"alone", 4096, 0, 1, 1, false, 0, 1},
		{"all together, nothing shared", 4096, 0, REQUESTS, 1, true, 0, 0},
		{"all together", 4096, 0, REQUESTS, 1, false, 0, 1},
		{"all together, three threads", 999, 0, REQUESTS, 3, false, 0, 1},
		{"few tokens at a time", 37, 0, REQUESTS, 1, false, 0, 1},
		{"four tokens at a time", 4, 0, 3, 1, false, -1, 1},
		{"a small pool", 4096, 768, REQUESTS, 1, false, 1, 1},
		{"a small pool, nothing shared", 4096, 768, REQUESTS, 1, true, 1, 0},
		{"a small pool, few tokens at a time", 100, 768, 8, 1, false, -1, 1},
		{"the smallest pool", 4096, 1, REQUESTS, 1, false, -1, 1},
		{"the smallest pool, nothing shared", 300, 1, REQUESTS, 1, true, -1, 0},
	};
	struct tokenizer *t = tokenizer_open("byte");
	struct engine_statistics s;
	const int threads = omp_get_max_threads();
	int64_t most = 0; /* of one request */
	for (int stops = 0; stops < 2; stops++) {
		struct request expected[REQUESTS], found[REQUESTS];
		for (int i = 0; i < COUNT(ways); i++) {
			const struct way *w = &ways[i];
			if (stops && i % 5 != 0)
				continue;
			omp_set_num_threads(w->threads);
			run_requests(i ? found : expected, t, w->forward_tokens, &(struct engine_options){
					.kv_tokens = w->kv_tokens == 1 ? most : w->kv_tokens, .useful_tokens = REQUESTS * LONGEST,
					.max_requests = w->max_requests, .no_sharing = w->no_sharing}, &s);
			if ((w->preempts >= 0 && w->preempts != (s.preemptions > 0)) || (w->preempts && w->no_sharing &&
					!s.recomputed != !s.preemptions) || (w->shares != (s.shared > 500)))
				fail_msg("%s: %lld preemptions, %lld tokens shared, %lld recomputed", w->name,
						(long long)s.preemptions, (long long)s.shared, (long long)s.recomputed);
			if (i) {
				assert_same_results(found, expected, w->name);
				free_requests(found);
				continue;
			}
			struct model m;
			make_model(&m, LONGEST);
			for (int j = 0; j < REQUESTS; j++) {
				const struct request *r = &expected[j];
				check_request(&m, r);
				most = r->num_prompt + r->max_tokens > most ? r->num_prompt + r->max_tokens : most;
			}
			model_free(&m);
		}
		for (int i = 0; i < REQUESTS && !*stop_text; i++)
			if (expected[i].text.size > 9 && i % 2)
				memcpy(stop_text, expected[i].text.data + 5, 3);
		free_requests(expected);
	}
	omp_set_num_threads(threads);
	tokenizer_close(t);
}

/* What the callbacks of the tests do. */
struct caller {
	struct engine *engine;
	struct request list[6];
	int added;                   /* by add_next */
	int tokens;                  /* calls of on_token */
	int steps;
	int stop_token, stop_step;   /* in which call they end it, from 1; 0: in none */
	int answer;                  /* what they return then */
};

static int on_token(void *data, struct request *r)
{
	struct caller *c = data;
	assert_true(r->ended ? !r->sequence : r->sequence != NULL);
	if (++c->tokens != c->stop_token)
		return 0;
	set_error("the caller's error");
	return c->answer;
}

static int on_step(void *data, const struct engine_statistics *s)
{
	struct caller *c = data;
	assert_int_equal(s->forward_passes, ++c->steps);
	return c->steps == c->stop_step ? c->answer : 0;
}

/* A request of n random tokens and `new` ones. */
static void make_request(struct request *r, uint64_t seed, int64_t n, int64_t new)
{
	*r = (struct request){.max_tokens = new, .num_prompt = n};
	while (n--)
		append_id(&r->ids, random_number(&seed, 256));
}

static int add_next(void *data, struct engine *e)
{
	struct caller *c = data;
	assert_int_equal(engine_statistics(e)->waiting, 0);
	if (c->added == COUNT(c->list))
		return 0;
	make_request(&c->list[c->added], c->added + 1, 20, 5);
	return engine_add(e, &c->list[c->added++]);
}

static void free_list(struct caller *c)
{
	for (int i = 0; i < COUNT(c->list); i++)
		request_free(&c->list[i]);
	c->added = c->tokens = c->stop_token = c->stop_step = 0;
}

/* How the caller and the engine work together: requests that come as there is room, runs one after the other, the
 * caller's end of one request or of all, errors. */
static void test_caller(void **state)
{
	(void)state;
	struct model m;
	struct caller c = {0};
	struct tokenizer *t = tokenizer_open("byte");
	make_model(&m, 100);
	struct engine *e = engine_open(&m, t, &(struct engine_options){.kv_tokens = 1000, .max_requests = 2,
			.on_token = on_token, .on_step = on_step, .data = &c});
	const struct engine_statistics *s = engine_statistics(e);
	assert_int_equal(s->kv_tokens, 1024);

	assert_done(engine_run(e, add_next, &c)); /* one after the other, two at a time */
	for (int i = 0; i < COUNT(c.list); i++)
		assert_int_equal(c.list[i].ended, ENDED_BY_LENGTH);
	assert_int_equal(c.tokens, 5 * COUNT(c.list));
	assert_int_equal(s->most_running, 2);
	assert_int_equal(s->requests, COUNT(c.list));
	free_list(&c);

	/* A conversation: the second prompt is the first, its reply, and more. Of the reply's last token nothing was
	 * computed. */
	make_request(&c.list[0], 7, 300, 10);
	assert_done(engine_add(e, &c.list[0]));
	assert_done(engine_run(e, NULL, NULL));
	make_request(&c.list[1], 8, 0, 10);
	append_ids(&c.list[1].ids, c.list[0].ids.id, 310);
	append_id(&c.list[1].ids, 'x');
	c.list[1].num_prompt = 311;
	assert_done(engine_add(e, &c.list[1]));
	const int64_t computed = s->computed;
	assert_done(engine_run(e, NULL, NULL));
	assert_int_equal(c.list[1].shared, 309);
	assert_int_equal(s->computed - computed, 2 + 9);
	free_list(&c);

	for (int way = 0; way < 4; way++) { /* 1 and -1 from on_token, 1 and -1 from on_step */
		const int before = c.steps = (int)s->forward_passes; /* an error from on_token keeps on_step from its call */
		c.answer = way % 2 ? -1 : 1;
		*(way < 2 ? &c.stop_token : &c.stop_step) = way < 2 ? 5 : before + 3;
		for (int i = 0; i < 3; i++) {
			make_request(&c.list[i], 20 + i, 10, 8);
			assert_done(engine_add(e, &c.list[i]));
		}
		assert_int_equal(engine_run(e, NULL, NULL), way % 2 ? -1 : 0);
		const struct request *ended = &c.list[0];
		if (way == 0) { /* the third token of the first one */
			assert_int_equal(ended->ids.count, 10 + 3);
			assert_int_equal(ended++->ended, ENDED_BY_CALLER);
		}
		for (; ended < c.list + 3; ended++) {
			assert_null(ended->sequence);
			assert_int_equal(ended->ended, way == 0 ? ENDED_BY_LENGTH : way == 2 ? ENDED_BY_CALLER : RUNNING);
		}
		assert_int_equal(c.list[2].ids.count, way == 0 ? 18 : 10); /* it had to wait */
		assert_true(way != 1 || strstr(error_text, "the caller's error"));
		free_list(&c);
	}

	/* what can never fit is refused, and what just fits is computed */
	make_request(&c.list[0], 1, 500, 525);
	assert_done(engine_add(e, &c.list[0]));
	make_request(&c.list[1], 1, 500, 526);
	assert_int_equal(engine_add(e, &c.list[1]), -1);
	assert_non_null(strstr(error_text, "need room for 1025 tokens, and there is memory for 1024"));
	make_request(&c.list[2], 1, 1026, 0);
	assert_int_equal(engine_add(e, &c.list[2]), -1);
	assert_non_null(strstr(error_text, "sequence 1 has 1026 tokens: their keys and values need room for 1025 tokens"));
	assert_done(engine_run(e, NULL, NULL));
	assert_true(c.list[0].ids.count == 1025 || c.list[0].ended == ENDED_BY_TOKEN);
	free_list(&c);
	engine_close(e);
	model_free(&m);
	tokenizer_close(t);
}

/* Draws of one prompt differ, and it is computed once. */
static void test_draws(void **state)
{
	(void)state;
	struct model m;
	struct request list[8];
	struct tokenizer *t = tokenizer_open("byte");
	int equal = 0;
	make_model(&m, 100);
	struct engine *e = engine_open(&m, t, &(struct engine_options){.kv_tokens = 4096, .max_requests = 8});
	for (int i = 0; i < COUNT(list); i++) {
		make_request(&list[i], 3, 40, 20);
		list[i].number = 5;
		list[i].draw = i;
		list[i].sampling = (struct sampling){.temperature = 30, .top_p = 1, .seed = 1};
		assert_done(engine_add(e, &list[i]));
	}
	assert_done(engine_run(e, NULL, NULL));
	assert_int_equal(engine_statistics(e)->shared, 7 * 39); /* the prompt was computed once */
	for (int i = 0; i < COUNT(list); i++)
		for (int j = 0; j < i; j++)
			equal += list[i].ids.count == list[j].ids.count &&
					!memcmp(list[i].ids.id, list[j].ids.id, list[i].ids.count * sizeof *list[i].ids.id);
	assert_int_equal(equal, 0);
	for (int i = 0; i < COUNT(list); i++)
		request_free(&list[i]);
	engine_close(e);
	model_free(&m);
	tokenizer_close(t);
}

int main(void)
{
	kernels_init(false);
	const struct CMUnitTest tests[] = {cmocka_unit_test(test_choose_token), cmocka_unit_test(test_bits),
			cmocka_unit_test(test_caller), cmocka_unit_test(test_draws)};
	return cmocka_run_group_tests_name("engine", tests, NULL, NULL);
}
