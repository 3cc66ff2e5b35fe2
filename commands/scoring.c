/*
 * commands/scoring.c - scored evaluation: a task is encoded, run through the model, and counted.
 */
#define _GNU_SOURCE
#include "commands/scoring.h"

#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/encoder.h"
#include "files/tokenizer.h"
#include "ling.h"
#include "commands/engine.h"
#include "commands/tasks.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* An empty text may have no memory. */
static const char *text_data(const struct text *t)
{
	return t->data ? t->data : "";
}

static void text_append_text(struct text *out, const struct text *more)
{
	text_append(out, text_data(more), more->size);
}

static bool same_text(const struct text *a, const struct text *b)
{
	return a->size == b->size && (!a->size || !memcmp(a->data, b->data, a->size));
}

/* Length of what two lists have in common at their beginning. */
static int64_t common_prefix(const struct ids *a, const struct ids *b)
{
	int64_t n = 0;
	while (n < a->count && n < b->count && a->id[n] == b->id[n])
		n++;
	return n;
}

/* fail(), with the sample in front. */
__attribute__((format(printf, 3, 4)))
static int fail_sample(const struct task *t, const struct sample *s, const char *format, ...)
{
	char text[1024];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	return fail("%s:%lld: task %s: %s", t->data, (long long)s->line, t->name, text);
}

/* The examples of a sample: a random choice that depends on (seed, the sample's place) alone, never one with the sample's own words. */
static int choose_examples(const struct task *t, int64_t i, const struct sample **chosen)
{
	const struct samples *pool = t->pool.count ? &t->pool : &t->samples;
	const struct sample *own = &t->samples.sample[i];
	const struct random_stream order = {.seed = t->examples.seed, .purpose = RANDOM_EXAMPLES, .step = (uint32_t)i};
	int n = 0;
	for (int64_t j = 0; j < pool->count && n < t->examples.count; j++) {
		const struct sample *s = &pool->sample[random_permute(j, pool->count, &order)];
		if (!same_text(&s->prompt, &own->prompt) || !same_text(&s->target, &own->target))
			chosen[n++] = s;
	}
	return n == t->examples.count ? 0 : fail_sample(t, own, "there are only %d other samples; expected at least examples.count, %d", n, t->examples.count);
}

/* The tokens of a sample's context: its examples and its prompt; without chat form, also their text. */
static int encode_context(const struct task *t, int64_t i, struct encoder *e, struct text *text, struct ids *out)
{
	const int n = t->examples.count;
	const struct sample **example = calloc(n + 1, sizeof *example);
	struct message *message = calloc(2 * n + 1, sizeof *message);
	int rc = example && message ? choose_examples(t, i, example) : fail("out of memory for %d examples", n);
	if (rc == 0) {
		example[n] = &t->samples.sample[i];
		for (int j = 0; j <= n; j++) {
			const struct sample *s = example[j];
			message[2 * j] = (struct message){"user", text_data(&s->prompt), s->prompt.size};
			text_append_text(text, &s->prompt);
			if (j == n)
				break;
			message[2 * j + 1] = (struct message){"assistant", text_data(&s->target), s->target.size};
			text_append_text(text, &s->target);
			text_append(text, t->separator, strlen(t->separator));
		}
		rc = t->chat ? chat_encode(e, message, 2 * n + 1, true, out, NULL) : encode(e, text_data(text), text->size, true, out);
	}
	free(example);
	free(message);
	return rc;
}

/* The tokens of the context and option c together. In chat form the option is a message of its own, as it is in training. */
static int encode_option(const struct task *t, const struct text *option, struct encoder *e, struct text *text, const struct ids *context,
		struct ids *out)
{
	if (t->chat) {
		append_ids(out, context->id, context->count);
		return encode(e, option->data, option->size, false, out);
	}
	const size_t n = text->size;
	text_append_text(text, option);
	const int rc = encode(e, text->data, text->size, true, out);
	text->size = n;
	return rc;
}

static struct task_item *add_item(struct task_work *w, int64_t sample)
{
	w->item = grow(w->item, w->num_items, &w->item_room, 1, sizeof *w->item);
	w->item[w->num_items] = (struct task_item){.sample = sample, .shared = w->ids.count, .first_branch = w->num_branches};
	return &w->item[w->num_items++];
}

static void add_branch(struct task_work *w, struct task_item *x, struct task_branch b)
{
	w->branch = grow(w->branch, w->num_branches, &w->branch_room, 1, sizeof *w->branch);
	w->branch[w->num_branches++] = b;
	x->num_branches++;
	if (x->num_shared + b.num_rest - 1 > w->longest)
		w->longest = x->num_shared + b.num_rest - 1;
}

/* The token that stands before a text without a context. */
static int begin_token(const struct task_work *w, const struct sample *s, int32_t *id)
{
	*id = tokenizer_end(w->tokenizer);
	return *id >= 0 ? 0 : fail_sample(w->task, s, "its first token has nothing before it, and the tokenizer has no end of text to begin with");
}

/* Adds a question whose options are encoded in full [n], each with the context. */
static int add_question(struct task_work *w, int64_t i, const struct ids *context, const struct ids *full, int n, int64_t L)
{
	const struct sample *s = &w->task->samples.sample[i];
	int64_t first = INT64_MAX, longest = 0, shared = INT64_MAX;
	for (int c = 0; c < n; c++) {
		const int64_t scored = common_prefix(context, &full[c]), alike = common_prefix(&full[0], &full[c]);
		if (scored == full[c].count)
			return fail_sample(w->task, s, "option %d adds no token to its context", c + 1);
		first = scored < first ? scored : first;
		longest = full[c].count > longest ? full[c].count : longest;
		shared = alike < shared ? alike : shared;
		shared = full[c].count - 1 < shared ? full[c].count - 1 : shared;
	}
	/* An option's tokens may begin the sequence: then all of the question's begin with the end of a text. */
	int32_t begin;
	const bool bare = first == 0;
	if (bare && begin_token(w, s, &begin) < 0)
		return -1;
	const int64_t inputs = longest - 1 + bare, cut = inputs > L ? inputs - L : 0;
	if (first + bare - cut < 1)
		return fail_sample(w->task, s, "its options need %lld tokens from where they begin to differ from the context; the window has %lld: shorten them, "
				"or raise --seq-len", (long long)(longest - first), (long long)L);
	struct task_item *x = add_item(w, i);
	x->cut = cut > 0;
	x->num_shared = shared + bare - cut;
	if (bare)
		append_id(&w->ids, begin);
	append_ids(&w->ids, full[0].id + cut, shared - cut);
	for (int c = 0; c < n; c++) {
		add_branch(w, x, (struct task_branch){w->ids.count, full[c].count - shared, common_prefix(context, &full[c]) + bare - cut});
		append_ids(&w->ids, full[c].id + shared, full[c].count - shared);
	}
	return 0;
}

static int encode_question(struct task_work *w, int64_t i, struct encoder *e, int64_t L)
{
	const struct task *t = w->task;
	const struct sample *s = &t->samples.sample[i];
	struct text text = {0};
	struct ids context = {0}, *full = calloc(s->num_choices, sizeof *full);
	int rc = full ? encode_context(t, i, e, &text, &context) : fail("out of memory for %d options", s->num_choices);
	for (int c = 0; c < s->num_choices && rc == 0; c++)
		rc = encode_option(t, &s->choice[c], e, &text, &context, &full[c]);
	if (rc == 0)
		rc = add_question(w, i, &context, full, s->num_choices, L);
	for (int c = 0; full && c < s->num_choices; c++)
		free(full[c].id);
	free(full);
	free(context.id);
	free(text.data);
	return rc;
}

/* A document: the end of a text, then its tokens, each of which is scored once. The first window holds L inputs; each further one is as
 * full, and its last `stride` tokens are scored. */
static int encode_document(struct task_work *w, int64_t i, struct encoder *e, int64_t L)
{
	const struct text *text = &w->task->samples.sample[i].prompt;
	const int64_t stride = w->task->stride ? w->task->stride : L, begin = w->ids.count;
	int32_t before;
	if (begin_token(w, &w->task->samples.sample[i], &before) < 0)
		return -1;
	append_id(&w->ids, before);
	if (encode(e, text->data, text->size, true, &w->ids) < 0)
		return -1;
	const int64_t n = w->ids.count - begin - 1; /* tokens to score */
	for (int64_t done = 0, end; done < n; done = end) {
		end = done + (done ? stride : L);
		end = end < n ? end : n;
		struct task_item *x = add_item(w, i);
		const int64_t first = end > L ? end - L : 0;
		x->shared = begin + first, x->num_shared = end - first;
		x->cut = n > L;
		add_branch(w, x, (struct task_branch){begin + end, 1, done - first + 1});
	}
	return 0;
}

static int encode_prompt(struct task_work *w, int64_t i, struct encoder *e, int64_t L)
{
	struct text text = {0};
	struct ids context = {0};
	int rc = encode_context(w->task, i, e, &text, &context);
	int32_t begin;
	if (rc == 0 && !context.count && (rc = begin_token(w, &w->task->samples.sample[i], &begin)) == 0)
		append_id(&context, begin);
	if (rc == 0) {
		struct task_item *x = add_item(w, i);
		const int64_t room = L - w->task->max_tokens, cut = context.count > room ? context.count - room : 0;
		x->cut = cut > 0;
		x->num_shared = context.count - cut;
		append_ids(&w->ids, context.id + cut, x->num_shared);
		if (x->num_shared + w->task->max_tokens > w->longest)
			w->longest = x->num_shared + w->task->max_tokens;
	}
	free(context.id);
	free(text.data);
	return rc;
}

int task_encode(struct task_work *w, const struct task *task, const struct tokenizer *tokenizer, int64_t L)
{
	static int (*const encoders[])(struct task_work *, int64_t, struct encoder *, int64_t) = {encode_question, encode_document, encode_prompt};
	*w = (struct task_work){.task = task, .tokenizer = tokenizer};
	if (task->stride > L)
		return fail("task %s: stride is %lld; expected at most the window, %lld tokens", task->name, (long long)task->stride, (long long)L);
	if (task->type == TASK_EXACT_MATCH && task->max_tokens >= L)
		return fail("task %s: max_tokens is %d; expected less than the window, %lld tokens, to leave room for the prompt", task->name, task->max_tokens,
				(long long)L);
	struct encoder *e = encoder_open(tokenizer);
	int rc = 0;
	for (int64_t i = 0; i < task->num_samples && rc == 0; i++)
		rc = encoders[task->type](w, i, e, L);
	encoder_close(e);
	w->num_values = task->type == TASK_EXACT_MATCH ? w->num_items * (1 + task->max_tokens) : w->num_branches;
	w->value = calloc(w->num_values + 1, sizeof *w->value);
	return rc < 0 || w->value ? rc : fail("out of memory for the %lld scores of task %s", (long long)w->num_values, task->name);
}

void task_work_free(struct task_work *w)
{
	free(w->ids.id);
	free(w->item);
	free(w->branch);
	free(w->value);
	*w = (struct task_work){0};
}

/* A token of one of an item's sequences. */
static int32_t sequence_token(const struct task_work *w, const struct task_item *x, const struct task_branch *b, int64_t at)
{
	return w->ids.id[at < x->num_shared ? x->shared + at : b->rest + at - x->num_shared];
}

/* One pass of some items through the model: the next tokens of their sequences, one segment behind the other, and the rows of these that foretell
 * scored tokens. */
struct pass {
	struct segment *segment, *piece; /* [batch]; piece: those of a forward pass */
	int num_segments;
	int64_t tokens;              /* of the segments */
	struct row { int64_t row, at; const struct task_item *item; int branch; } *row; /* rising; the token after it is at + 1 of branch, or, if -1, of all */
	int64_t num_rows;
	size_t row_room;
	struct hit { int64_t row, value; double logit; } *hit;
	size_t hit_room;
};

static void add_segment(struct pass *p, struct kv_cache *cache, const int32_t *token, int64_t n)
{
	p->segment[p->num_segments++] = (struct segment){cache, token, n};
	p->tokens += n;
}

/* The last segment's rows for tokens `from` .. `end`-1 of the item's sequences; the segment ends with token end-1. */
static void add_rows(struct pass *p, const struct task_item *x, int branch, int64_t from, int64_t end)
{
	p->row = grow(p->row, p->num_rows, &p->row_room, end > from ? end - from : 0, sizeof *p->row);
	for (int64_t at = from; at < end; at++)
		p->row[p->num_rows++] = (struct row){p->tokens - (end - at), at, x, branch};
}

/* Adds to the values the log-probabilities of what follows each of n <= head_chunk() rows, whose results are those of acts.normed from `first` on. */
static void score_rows(struct task_work *w, struct model *m, struct pass *p, const struct row *row, int64_t n, int64_t first)
{
	struct activations *a = &m->acts;
	const int64_t V = m->config.vocab_size;
	double *loss = a->head_loss, *sum = loss + n;
	int32_t any[n]; /* a target, so that each row's sum is made */
	int64_t hits = 0;
	memset(any, 0, sizeof any);
	model_logits(m, a->head_logits, first, n);
	logits_max(a->head_max, a->head_logits, n, V);
	for (int64_t r = 0; r < n; r++) {
		const struct task_item *x = row[r].item;
		p->hit = grow(p->hit, hits, &p->hit_room, x->num_branches, sizeof *p->hit);
		for (int c = 0; c < x->num_branches; c++) {
			const struct task_branch *b = &w->branch[x->first_branch + c];
			if ((row[r].branch < 0 || row[r].branch == c) && row[r].at + 1 >= b->scored)
				p->hit[hits++] = (struct hit){r, x->first_branch + c,
						(double)a->head_logits[r * V + sequence_token(w, x, b, row[r].at + 1)] - a->head_max[r]};
		}
	}
	cross_entropy_forward(loss, sum, a->head_logits, a->head_max, any, 0, n, V);
	for (int64_t h = 0; h < hits; h++)
		w->value[p->hit[h].value] += p->hit[h].logit - log(sum[p->hit[h].row]);
}

/* Runs a pass in as many forward passes as the model's memory asks for, and makes it empty. */
static void run_pass(struct task_work *w, struct model *m, struct pass *p)
{
	const int64_t room = (int64_t)m->max_sequences * m->seq_len, H = m->config.hidden_size, C = head_chunk(m->config.vocab_size, 1);
	struct row *row = p->row, *end = p->row + p->num_rows;
	int64_t done = 0, used = 0; /* tokens; tokens of the segment in hand */
	for (int i = 0; done < p->tokens;) {
		int64_t tokens = 0, n = 0;
		int pieces = 0;
		while (i < p->num_segments && tokens < room) {
			const struct segment *s = &p->segment[i];
			const int64_t num = s->num_tokens - used < room - tokens ? s->num_tokens - used : room - tokens;
			p->piece[pieces++] = (struct segment){s->cache, s->token + used, num};
			tokens += num, used += num;
			if (used == s->num_tokens)
				i++, used = 0;
		}
		model_extend(m, p->piece, pieces);
		for (; row + n < end && row[n].row < done + tokens; n++) /* close up, for products of many rows */
			memmove(m->acts.normed + n * H, m->acts.normed + (row[n].row - done) * H, H * sizeof *m->acts.normed);
		for (int64_t first = 0; first < n; first += C)
			score_rows(w, m, p, row + first, n - first < C ? n - first : C, first);
		row += n, done += tokens;
	}
	p->num_segments = 0, p->num_rows = p->tokens = 0;
}

/* The log-likelihoods of n items: what the branches of each share goes through the model once, then its branches one after the other, each in
 * place of the one before. */
static void score_items(struct task_work *w, struct model *m, struct kv_cache *cache, const int64_t *list, int n, struct pass *p)
{
	int most = 0;
	for (int i = 0; i < n; i++) {
		const struct task_item *x = &w->item[list[i]];
		int64_t first = x->num_shared;
		for (int c = 0; c < x->num_branches; c++)
			first = w->branch[x->first_branch + c].scored - 1 < first ? w->branch[x->first_branch + c].scored - 1 : first;
		most = x->num_branches > most ? x->num_branches : most;
		cache[i].length = 0;
		add_segment(p, &cache[i], w->ids.id + x->shared, x->num_shared);
		add_rows(p, x, -1, first, x->num_shared);
	}
	run_pass(w, m, p);
	for (int c = 0; c < most; c++) {
		for (int i = 0; i < n; i++) {
			const struct task_item *x = &w->item[list[i]];
			const struct task_branch *b = &w->branch[x->first_branch + c];
			if (c >= x->num_branches || b->num_rest < 2)
				continue;
			const int64_t end = x->num_shared + b->num_rest - 1;
			cache[i].length = x->num_shared;
			add_segment(p, &cache[i], w->ids.id + b->rest, b->num_rest - 1);
			add_rows(p, x, c, b->scored - 1 > x->num_shared ? b->scored - 1 : x->num_shared, end);
		}
		run_pass(w, m, p);
	}
}

/* How far a task is. */
struct task_progress { const struct task_work *work; double start, shown; int64_t done, replies; };

static void show_progress(struct task_progress *p)
{
	if (!p || clock_seconds() - p->shown < (is_terminal(stderr) ? 1 : 30))
		return;
	char line[192], left[32];
	p->shown = clock_seconds();
	const double share = (double)p->done / p->work->num_items, seconds = p->shown - p->start;
	snprintf(line, sizeof line, "%.60s %.0f%%  %.3g samples/s  %s left", p->work->task->name, 100 * share, share * p->work->task->num_samples / seconds,
			p->done ? format_duration(left, seconds / share - seconds) : "?");
	print_status(stderr, line, false);
}

static int count_reply(void *context, const struct request *c)
{
	struct task_progress *p = context;
	p->done += c->ended != RUNNING;
	show_progress(p);
	return 0;
}

/* The replies to the prompts of this rank, greedy. */
static int reply_to_items(struct task_work *w, struct model *m, int batch, struct task_progress *progress)
{
	const struct group *data = &m->layout.data;
	const int max_tokens = w->task->max_tokens;
	struct generation_config g = {.max_tokens = max_tokens, .stop = w->task->stop, .batch = batch, .show = progress ? count_reply : NULL, .context = progress};
	struct request *list = calloc(w->num_items, sizeof *list);
	int n = 0, rc = 0;
	if (!list)
		return fail("out of memory for %lld replies", (long long)w->num_items);
	for (int64_t i = data->rank; i < w->num_items; i += data->size, n++) {
		append_ids(&list[n].ids, w->ids.id + w->item[i].shared, w->item[i].num_shared);
		list[n].num_prompt = w->item[i].num_shared;
		list[n].number = (uint32_t)i;
	}
	rc = generate(m, w->tokenizer, list, n, &g);
	for (int k = 0; k < n; k++) {
		double *value = w->value + list[k].number * (int64_t)(1 + max_tokens);
		value[0] = list[k].ids.count - list[k].num_prompt;
		for (int i = 0; i < value[0]; i++)
			value[1 + i] = list[k].ids.id[list[k].num_prompt + i];
		free(list[k].ids.id);
		free(list[k].text.data);
	}
	free(list);
	return rc;
}

/* The log-likelihoods of this rank's items, batch by batch. */
static int score_all_items(struct task_work *w, struct model *m, int batch, struct task_progress *progress)
{
	const struct group *data = &m->layout.data;
	struct pass pass = {.segment = calloc(batch, sizeof *pass.segment), .piece = calloc(batch, sizeof *pass.piece)};
	struct kv_cache *cache = calloc(batch, sizeof *cache);
	int64_t *list = calloc(batch, sizeof *list);
	int rc = pass.segment && pass.piece && cache && list ? 0 : fail("out of memory for a batch of %d", batch);
	for (int i = 0; i < batch && rc == 0; i++)
		rc = kv_cache_init(&cache[i], m, w->longest);
	for (int64_t i = 0; rc == 0 && i < w->num_items;) {
		int n = 0;
		for (; i < w->num_items && n < batch; i++)
			if (w->item[i].sample % data->size == data->rank)
				list[n++] = i;
		score_items(w, m, cache, list, n, &pass);
		if (progress)
			progress->done = i;
		show_progress(progress);
	}
	for (int i = 0; cache && i < batch; i++)
		kv_cache_free(&cache[i]);
	free(cache);
	free(list);
	free(pass.segment);
	free(pass.piece);
	free(pass.row);
	free(pass.hit);
	return rc;
}

int task_run(struct task_work *w, struct model *m, int batch)
{
	struct task_progress progress = {.work = w, .start = clock_seconds(), .shown = clock_seconds()};
	const bool shows = m->layout.world.rank == 0;
	int rc = (w->task->type == TASK_EXACT_MATCH ? reply_to_items : score_all_items)(w, m, batch, shows ? &progress : NULL);
	if (shows && is_terminal(stderr) && progress.shown > progress.start)
		fprintf(stderr, "\r\033[K");
	if (parallel_agree(rc) < 0)
		return -1;
	all_reduce_sum(&m->layout.data, TRAFFIC_STATISTICS, w->value, w->num_values); /* each is one rank's, and 0 elsewhere */
	for (int64_t i = 0; i < w->num_items; i++)
		for (int64_t b = w->item[i].first_branch; b < w->item[i].first_branch + w->item[i].num_branches; b++)
			if (!isfinite(w->value[b]))
				return fail_sample(w->task, &w->task->samples.sample[w->item[i].sample], "a log-likelihood is %g", w->value[b]);
	return 0;
}

/* Mean of n values by their sum and sum of squares; its standard error is their standard deviation (over n - 1) by the root of n. */
static struct score mean_score(const char *name, double sum, double squares, int64_t n)
{
	const double mean = sum / n;
	return (struct score){name, mean, n > 1 ? sqrt(fmax(squares - n * mean * mean, 0) / (n - 1) / n) : NAN};
}

/* The option with the highest score, the first among equals; counts it as a tie when there is another. */
static int best_option(const double *score, int n, int64_t *ties)
{
	int best = 0, equal = 0;
	for (int c = 1; c < n; c++)
		best = score[c] > score[best] ? c : best;
	for (int c = 0; c < n; c++)
		equal += score[c] == score[best];
	*ties += equal > 1;
	return best;
}

/* The scored tokens of a branch. */
static void copy_tokens(const struct task_work *w, const struct task_item *x, const struct task_branch *b, struct ids *out)
{
	for (int64_t at = b->scored; at < x->num_shared + b->num_rest; at++)
		append_id(out, sequence_token(w, x, b, at));
}

static void question_result(const struct task_work *w, const struct task_item *x, struct task_result *result, struct results *results, int64_t right[NUM_ACCURACIES])
{
	const struct sample *s = &w->task->samples.sample[x->sample];
	struct sample_result r = {.sample = s, .cut = x->cut};
	struct scored_text *text = calloc(s->num_choices, sizeof *text);
	double *score = calloc(s->num_choices, sizeof *score);
	struct ids tokens = {0};
	for (int c = 0; c < s->num_choices; c++) {
		const struct task_branch *b = &w->branch[x->first_branch + c];
		text[c] = (struct scored_text){w->value[x->first_branch + c], NULL, x->num_shared + b->num_rest - b->scored};
		copy_tokens(w, x, b, &tokens);
	}
	const int32_t *token = tokens.id;
	for (int c = 0; c < s->num_choices; token += text[c++].num_tokens)
		text[c].token = token;
	for (int k = 0; k < NUM_ACCURACIES; k++) {
		for (int c = 0; c < s->num_choices; c++)
			score[c] = text[c].log_likelihood / (k == ACCURACY_BYTES ? s->choice[c].size : k == ACCURACY_TOKENS ? (size_t)text[c].num_tokens : 1);
		r.prediction[k] = best_option(score, s->num_choices, &result->ties[k]);
		right[k] += r.prediction[k] == s->answer;
	}
	r.text = text;
	if (results)
		results_add(results, w->task, &r);
	free(text);
	free(score);
	free(tokens.id);
}

/* Words: runs of bytes that are no ASCII white space. */
static int64_t count_words(const struct text *t)
{
	int64_t n = 0;
	bool inside = false;
	for (size_t i = 0; i < t->size; i++) {
		const bool space = t->data[i] == ' ' || (t->data[i] >= '\t' && t->data[i] <= '\r');
		n += !space && !inside;
		inside = !space;
	}
	return n;
}

/* Perplexity by some unit, of which document i has unit[i]: e^r, r the sum of the losses over that of the units. The standard error of such a
 * ratio of sums over n documents is sqrt(n / (n - 1) sum (loss[i] - r unit[i])^2) / sum of the units; e^r multiplies it (delta method). */
static struct score ratio_score(const char *name, const double *loss, const double *unit, int64_t n, bool bits)
{
	double losses = 0, units = 0, squares = 0;
	for (int64_t i = 0; i < n; i++)
		losses += loss[i], units += unit[i];
	const double ratio = losses / units;
	for (int64_t i = 0; i < n; i++)
		squares += (loss[i] - ratio * unit[i]) * (loss[i] - ratio * unit[i]);
	const double error = n > 1 ? sqrt((double)n / (n - 1) * squares) / units : NAN;
	return bits ? (struct score){name, ratio / M_LN2, error / M_LN2} : (struct score){name, exp(ratio), exp(ratio) * error};
}

static void documents_result(const struct task_work *w, struct task_result *result, struct results *results)
{
	const struct task *t = w->task;
	const int64_t n = t->num_samples;
	double *loss = calloc(4 * n, sizeof *loss), *tokens = loss + n, *words = tokens + n, *bytes = words + n;
	for (int64_t i = 0, x = 0; i < n; i++) {
		struct sample_result r = {.sample = &t->samples.sample[i]};
		for (; x < w->num_items && w->item[x].sample == i; x++) {
			const struct task_branch *b = &w->branch[w->item[x].first_branch];
			loss[i] -= w->value[w->item[x].first_branch];
			tokens[i] += w->item[x].num_shared + b->num_rest - b->scored;
			r.cut = w->item[x].cut;
		}
		words[i] = r.words = count_words(&r.sample->prompt);
		bytes[i] = r.sample->prompt.size;
		r.text = &(struct scored_text){-loss[i], NULL, (int64_t)tokens[i]};
		result->cut += r.cut;
		result->tokens += (int64_t)tokens[i], result->words += r.words, result->bytes += (int64_t)bytes[i];
		if (results)
			results_add(results, t, &r);
	}
	result->score[0] = ratio_score("token_perplexity", loss, tokens, n, false);
	result->score[1] = ratio_score("word_perplexity", loss, words, n, false);
	result->score[2] = ratio_score("byte_perplexity", loss, bytes, n, false);
	result->score[3] = ratio_score("bits_per_byte", loss, bytes, n, true);
	result->num_scores = 4;
	free(loss);
}

static void reply_result(const struct task_work *w, const struct task_item *x, struct task_result *result, struct results *results, int64_t *right)
{
	const double *value = w->value + (x - w->item) * (1 + w->task->max_tokens);
	struct sample_result r = {.sample = &w->task->samples.sample[x->sample], .cut = x->cut};
	struct ids ids = {0};
	for (int i = 0; i < value[0]; i++) {
		append_id(&ids, (int32_t)value[1 + i]);
		tokenizer_decode(w->tokenizer, ids.id[i], false, &r.reply);
	}
	r.reply.size = find_stop(&r.reply, 0, &w->task->stop);
	r.text = &(struct scored_text){0, ids.id, ids.count};
	r.correct = task_reply_is_right(w->task, r.sample, &r.reply, &r.extracted, &r.found);
	*right += r.correct;
	result->unmatched += !r.found;
	if (results)
		results_add(results, w->task, &r);
	free(ids.id);
	free(r.reply.data);
	free(r.extracted.data);
}

void task_score(const struct task_work *w, struct task_result *result, struct results *results)
{
	static const char *const names[NUM_ACCURACIES] = {"accuracy", "accuracy_bytes", "accuracy_tokens"};
	const bool choice = w->task->type == TASK_MULTIPLE_CHOICE;
	int64_t right[NUM_ACCURACIES] = {0};
	*result = (struct task_result){.task = w->task};
	if (w->task->type == TASK_PERPLEXITY) {
		documents_result(w, result, results);
		return;
	}
	for (const struct task_item *x = w->item; x < w->item + w->num_items; x++) {
		(choice ? question_result : reply_result)(w, x, result, results, right);
		result->cut += x->cut;
	}
	result->num_scores = choice ? NUM_ACCURACIES : 1;
	for (int k = 0; k < result->num_scores; k++)
		result->score[k] = mean_score(choice ? names[k] : "exact_match", right[k], right[k], w->num_items);
}

void print_results(const struct task_result *result, int64_t count)
{
	printf("%-28s %-16s %8s  %-17s %12s %12s\n", "task", "type", "samples", "score", "value", "std. error");
	for (const struct task_result *r = result; r < result + count; r++) {
		static const char *const types[] = {"multiple choice", "perplexity", "exact match"};
		for (int k = 0; k < r->num_scores; k++) {
			if (k == 0)
				printf("%-28s %-16s %8lld  ", r->task->name, types[r->task->type], (long long)r->task->num_samples);
			else
				printf("%-28s %-16s %8s  ", "", "", "");
			printf("%-17s %12.6g ", r->score[k].name, r->score[k].value);
			if (isfinite(r->score[k].standard_error))
				printf("%12.3g\n", r->score[k].standard_error);
			else
				printf("%12s\n", "-");
		}
		if (r->cut)
			printf("  %s: %lld\n", r->task->type == TASK_PERPLEXITY ? "documents in several windows" : "contexts cut from the left to fit into the window",
					(long long)r->cut);
		if (r->unmatched)
			printf("  replies that the pattern of extract does not match: %lld\n", (long long)r->unmatched);
	}
}
