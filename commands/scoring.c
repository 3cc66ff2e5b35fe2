/*
 * commands/scoring.c - scored evaluation: encodes a task's samples, runs them through the model, and computes the
 * scores.
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
#include "commands/replicas.h"
#include "commands/tasks.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The bytes of a text; those of an empty text, which may have no memory, are not NULL. */
static const char *text_bytes(const struct text *t)
{
	return t->data ? t->data : "";
}

static bool same_text(const struct text *a, const struct text *b)
{
	return a->size == b->size && (!a->size || !memcmp(a->data, b->data, a->size));
}

/* How many ids two lists have in common at their beginning. */
static int64_t common_prefix(const struct ids *a, const struct ids *b)
{
	int64_t n = 0;
	while (n < a->count && n < b->count && a->id[n] == b->id[n])
		n++;
	return n;
}

/* fail() with the file and line of a sample, and its task, before the message. */
__attribute__((format(printf, 3, 4)))
static int fail_sample(const struct task *t, const struct sample *s, const char *format, ...)
{
	char text[1024];
	va_list args;
	va_start(args, format);
	vsnprintf(text, sizeof text, format, args);
	va_end(args);
	return fail("%s:%s%lld: task %s: %s", t->data, t->samples.one_value ? " record " : "", (long long)s->line, t->name,
			text);
}

/* Memory of zeros for n elements, a number that the sizes of the task decide. NULL, with the error set, when there is
 * none. */
static void *task_memory(const struct task *t, const char *what, int64_t n, size_t size)
{
	void *memory = calloc(n ? n : 1, size);
	if (!memory)
		set_error("task %s: out of memory: %s need %.3g GB", t->name, what, (double)n * size / 1e9);
	return memory;
}

/* ------------------------------------------------------------------------------- samples as tokens */

/* chosen[examples.count] = the examples of sample i: the first ones, or drawn at random, by the seed and i alone. None
 * has the same prompt and target as the sample itself. */
static int choose_examples(const struct task *t, int64_t i, const struct sample **chosen)
{
	const struct samples *pool = t->pool.count ? &t->pool : &t->samples;
	const struct sample *own = &t->samples.sample[i];
	const struct random_stream order = {.seed = t->examples.seed, .purpose = RANDOM_EXAMPLES, .step = (uint32_t)i};
	int n = 0;
	for (int64_t j = 0; j < pool->count && n < t->examples.count; j++) {
		const bool first = t->examples.choose == CHOOSE_FIRST;
		const struct sample *s = &pool->sample[first ? j : (int64_t)random_permute(j, pool->count, &order)];
		if (!same_text(&s->prompt, &own->prompt) || !same_text(&s->target, &own->target))
			chosen[n++] = s;
	}
	if (n < t->examples.count)
		return fail_sample(t, own, "there are only %d other samples; expected at least examples.count, %d", n,
				t->examples.count);
	return 0;
}

/* The ids of the context of sample i: the text of examples.text, its examples and its prompt. Without the chat form,
 * also their text. */
static int encode_context(const struct task *t, int64_t i, struct encoder *e, struct text *text, struct ids *out)
{
	const int n = t->examples.count;
	const struct sample **example = allocate((n + 1) * sizeof *example);
	struct message *message = allocate((2 * n + 2) * sizeof *message);
	int messages = 0, rc = choose_examples(t, i, example);
	if (rc == 0 && t->examples.text) {
		message[messages++] = (struct message){.role = "system", .content = t->examples.text,
				.content_size = strlen(t->examples.text)};
		text_append_string(text, t->examples.text);
		text_append_string(text, t->separator);
	}
	if (rc == 0) {
		example[n] = &t->samples.sample[i];
		for (int j = 0; j <= n; j++) {
			const struct sample *s = example[j];
			message[messages++] = (struct message){.role = "user", .content = text_bytes(&s->prompt),
					.content_size = s->prompt.size};
			text_append(text, s->prompt.data, s->prompt.size);
			if (j == n)
				break;
			message[messages++] = (struct message){.role = "assistant", .content = text_bytes(&s->target),
					.content_size = s->target.size};
			text_append(text, s->target.data, s->target.size);
			text_append(text, t->separator, strlen(t->separator));
		}
		rc = t->chat ? chat_encode(e, message, messages, true, out, NULL)
				: encode(e, text_bytes(text), text->size, true, out);
	}
	free(example);
	free(message);
	return rc;
}

/* Keeps the text of the last context: `text`, from which `context` is encoded; in chat form, and where the first `cut`
 * of these tokens were cut, what the tokens stand for. */
static void keep_text(struct task_work *w, const struct text *text, const struct ids *context, int64_t cut)
{
	struct task_context *x = &w->contexts[w->num_contexts - 1];
	x->text = (int64_t)w->texts.size;
	if (!w->task->chat && !cut)
		text_append(&w->texts, text_bytes(text), text->size);
	for (int64_t i = cut; i < context->count && (w->task->chat || cut); i++)
		tokenizer_decode(w->tokenizer, context->id[i], true, &w->texts);
	x->text_size = (int64_t)w->texts.size - x->text;
}

/* The ids of a context, given as text and as ids, and an option after it. The two are encoded as one text, so tokens
 * may span the border between them; in chat form the option is a message of its own and is encoded alone, as in
 * training. */
static int encode_option(const struct task *t, const struct text *option, struct encoder *e, struct text *text,
		const struct ids *context, struct ids *out)
{
	if (t->chat) {
		append_ids(out, context->id, context->count);
		return encode(e, option->data, option->size, false, out);
	}
	const size_t n = text->size;
	text_append(text, option->data, option->size);
	const int rc = encode(e, text->data, text->size, true, out);
	text->size = n;
	return rc;
}

/* Adds a context of `sample` without tokens or continuations. The result is valid until the next one is added. */
static struct task_context *add_context(struct task_work *w, int64_t sample)
{
	w->contexts = grow(w->contexts, w->num_contexts, &w->contexts_capacity, 1, sizeof *w->contexts);
	struct task_context *x = &w->contexts[w->num_contexts++];
	*x = (struct task_context){.sample = sample, .begin = w->ids.count, .first_continuation = w->num_continuations};
	return x;
}

/* Adds a continuation to the last context, whose tokens must be known. */
static void add_continuation(struct task_work *w, struct task_context *x, struct task_continuation c)
{
	const int64_t inputs = x->num_tokens + c.num_tokens - 1;
	w->continuations = grow(w->continuations, w->num_continuations, &w->continuations_capacity, 1,
			sizeof *w->continuations);
	w->continuations[w->num_continuations++] = c;
	x->num_continuations++;
	w->longest = inputs > w->longest ? inputs : w->longest;
}

/* The end token, which stands before the first token of a sequence that nothing else stands before. */
static int begin_token(const struct task_work *w, const struct sample *s, int32_t *id)
{
	*id = tokenizer_end(w->tokenizer);
	if (*id < 0)
		return fail_sample(w->task, s, "its first token has nothing before it, and the tokenizer has no end token");
	return 0;
}

/* Adds sample i, a question: `context` are the ids of its context, `text`, encoded alone, full[n] those of the context
 * and each option. The ids of an option are those of full[c] from where it first differs from `context`. */
static int add_question(struct task_work *w, int64_t i, const struct text *text, const struct ids *context,
		const struct ids *full, int n, int64_t L)
{
	const struct sample *s = &w->task->samples.sample[i];
	int64_t first = INT64_MAX, longest = 0; /* the first place of a scored id; ids of the longest sequence */
	int64_t shared = INT64_MAX; /* ids that all sequences begin with, but at least one less than each has */
	for (int c = 0; c < n; c++) {
		const int64_t scored = common_prefix(context, &full[c]), alike = common_prefix(&full[0], &full[c]);
		if (scored == full[c].count)
			return fail_sample(w->task, s, "option %d adds no token to its context", c + 1);
		first = scored < first ? scored : first;
		longest = full[c].count > longest ? full[c].count : longest;
		shared = alike < shared ? alike : shared;
		shared = full[c].count - 1 < shared ? full[c].count - 1 : shared;
	}
	/* Where an option's ids begin the sequence, the end token stands before all sequences of the question. */
	int32_t begin = 0;
	const bool bare = first == 0;
	if (bare && begin_token(w, s, &begin) < 0)
		return -1;
	const int64_t inputs = longest - 1 + bare, cut = inputs > L ? inputs - L : 0;
	if (first + bare - cut < 1)
		return fail_sample(w->task, s,
				"its options need %lld tokens from where they begin to differ from the context; "
				"the window has %lld: shorten them, or raise --seq-len", (long long)(longest - first), (long long)L);
	struct task_context *x = add_context(w, i);
	x->cut = cut > 0;
	x->num_tokens = shared + bare - cut;
	keep_text(w, text, context, cut);
	if (bare)
		append_id(&w->ids, begin);
	append_ids(&w->ids, full[0].id + cut, shared - cut);
	for (int c = 0; c < n; c++) {
		const int64_t first_scored = common_prefix(context, &full[c]) + bare - cut;
		add_continuation(w, x, (struct task_continuation){w->ids.count, full[c].count - shared, first_scored});
		append_ids(&w->ids, full[c].id + shared, full[c].count - shared);
	}
	return 0;
}

/* Encodes sample i of a multiple choice task. */
static int encode_question(struct task_work *w, int64_t i, struct encoder *e, int64_t L)
{
	const struct task *t = w->task;
	const struct sample *s = &t->samples.sample[i];
	struct text text = {0};
	struct ids context = {0}, *full = allocate(s->num_choices * sizeof *full);
	int rc = encode_context(t, i, e, &text, &context);
	for (int c = 0; c < s->num_choices && rc == 0; c++)
		rc = encode_option(t, &s->choice[c], e, &text, &context, &full[c]);
	if (rc == 0)
		rc = add_question(w, i, &text, &context, full, s->num_choices, L);
	for (int c = 0; c < s->num_choices; c++)
		free(full[c].id);
	free(full);
	free(context.id);
	free(text.data);
	return rc;
}

/* Encodes sample i of a perplexity task: the end token, then the document's tokens, each of which is scored once. The
 * first window has L inputs and scores all its tokens; each further window has L inputs too, ends `stride` tokens
 * later, and scores only these. */
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
	const int64_t n = w->ids.count - begin - 1; /* tokens to score: 1 to n of the sequence, 0 being the end token */
	for (int64_t done = 0, end; done < n; done = end) {
		end = done + (done ? stride : L);
		end = end < n ? end : n;
		struct task_context *x = add_context(w, i);
		const int64_t first = end > L ? end - L : 0;
		x->begin = begin + first, x->num_tokens = end - first;
		x->cut = n > L;
		add_continuation(w, x, (struct task_continuation){begin + end, 1, done - first + 1});
	}
	return 0;
}

/* Encodes sample i of an exact match task. A prompt that leaves no room for max_tokens in the window loses its first
 * tokens. */
static int encode_prompt(struct task_work *w, int64_t i, struct encoder *e, int64_t L)
{
	struct text text = {0};
	struct ids context = {0};
	int rc = encode_context(w->task, i, e, &text, &context);
	int32_t begin;
	if (rc == 0 && !context.count && (rc = begin_token(w, &w->task->samples.sample[i], &begin)) == 0)
		append_id(&context, begin);
	if (rc == 0) {
		struct task_context *x = add_context(w, i);
		const int64_t room = L - w->task->max_tokens, cut = context.count > room ? context.count - room : 0;
		x->cut = cut > 0;
		x->num_tokens = context.count - cut;
		keep_text(w, &text, &context, cut);
		append_ids(&w->ids, context.id + cut, x->num_tokens);
		if (x->num_tokens + w->task->max_tokens > w->longest)
			w->longest = x->num_tokens + w->task->max_tokens;
	}
	free(context.id);
	free(text.data);
	return rc;
}

int task_encode(struct task_work *w, const struct task *task, const struct tokenizer *tokenizer, int64_t L)
{
	static int (*const encode_sample[])(struct task_work *, int64_t, struct encoder *, int64_t) = {
		[TASK_MULTIPLE_CHOICE] = encode_question,
		[TASK_PERPLEXITY] = encode_document,
		[TASK_EXACT_MATCH] = encode_prompt,
	};
	*w = (struct task_work){.task = task, .tokenizer = tokenizer};
	if (task->stride > L)
		return fail("task %s: stride is %lld; expected at most the window, %lld tokens", task->name,
				(long long)task->stride, (long long)L);
	if (task->type == TASK_EXACT_MATCH && task->max_tokens >= L)
		return fail("task %s: max_tokens is %d; expected less than the window, %lld tokens, to leave room for the "
				"prompt", task->name, task->max_tokens, (long long)L);
	struct encoder *e = encoder_open(tokenizer);
	int rc = 0;
	for (int64_t i = 0; i < task->num_samples && rc == 0; i++)
		rc = encode_sample[task->type](w, i, e, L);
	encoder_close(e);
	if (rc < 0)
		return -1;
	if (task->type == TASK_EXACT_MATCH) {
		w->reply = task_memory(task, "the replies", w->num_contexts, (1 + task->max_tokens) * sizeof *w->reply);
		return w->reply ? 0 : -1;
	}
	w->log_likelihood = task_memory(task, "the log-likelihoods", w->num_continuations, sizeof *w->log_likelihood);
	if (w->log_likelihood && task->type == TASK_PERPLEXITY) {
		w->documents = task_memory(task, "the losses of the documents", task->num_samples, 4 * sizeof *w->documents);
		return w->documents ? 0 : -1;
	}
	return w->log_likelihood ? 0 : -1;
}

void task_work_free(struct task_work *w)
{
	free(w->ids.id);
	free(w->texts.data);
	free(w->contexts);
	free(w->continuations);
	free(w->log_likelihood);
	free(w->reply);
	free(w->documents);
	*w = (struct task_work){0};
}

/* The token at a position, from 0, of the sequence of context x and its continuation c. */
static int32_t sequence_token(const struct task_work *w, const struct task_context *x,
		const struct task_continuation *c, int64_t position)
{
	return w->ids.id[position < x->num_tokens ? x->begin + position : c->begin + position - x->num_tokens];
}

/* ------------------------------------------------------------------------------------------ requests */

/* A task as requests of an engine: number i is that of continuation i or, for replies, of context i. */
struct task_requests {
	struct task_work *work;
	struct shared_work shared;   /* the contexts: the requests of one begin alike */
	struct request *list;        /* [num_continuations or num_contexts] */
	bool keeps;                  /* this rank is the one of its tensor group that keeps results */
	struct progress *progress;   /* of all ranks; or NULL */
	int64_t shown;               /* contexts that it has counted */
};

static bool has_replies(const struct task_work *w)
{
	return w->task->type == TASK_EXACT_MATCH;
}

/* Requests of a context. */
static int num_requests(const struct task_work *w, const struct task_context *x)
{
	return has_replies(w) ? 1 : x->num_continuations;
}

static void fill_request(struct request *r, const struct task_work *w, const struct task_context *x, int continuation)
{
	append_ids(&r->ids, w->ids.id + x->begin, x->num_tokens);
	if (has_replies(w)) {
		r->max_tokens = w->task->max_tokens;
		r->stop = &w->task->stop;
		r->ends = w->ends;
	} else {
		const struct task_continuation *c = &w->continuations[x->first_continuation + continuation];
		append_ids(&r->ids, w->ids.id + c->begin, c->num_tokens);
		r->score_from = c->first_scored;
	}
	r->num_prompt = r->ids.count;
}

/* Adds the requests of a context, see struct shared_work. */
static int add_requests(void *data, struct engine *e, int64_t number)
{
	struct task_requests *t = data;
	const struct task_work *w = t->work;
	const struct task_context *x = &w->contexts[number];
	for (int i = 0; i < num_requests(w, x); i++) {
		const int64_t place = has_replies(w) ? number : x->first_continuation + i;
		struct request *r = &t->list[place];
		r->number = (uint32_t)place;
		fill_request(r, w, x, i);
		if (engine_add(e, r) < 0)
			return -1;
	}
	return 0;
}

/* The engine's on_token: keeps the result of a request that has ended. */
static int keep_result(void *data, struct request *r)
{
	struct task_requests *t = data;
	struct task_work *w = t->work;
	if (!r->ended)
		return 0;
	for (int64_t i = 0; t->keeps && i < r->num_log_probs; i++)
		w->log_likelihood[r->number] += r->log_prob[i];
	if (has_replies(w) && t->keeps) {
		double *reply = w->reply + r->number * (int64_t)(1 + w->task->max_tokens);
		reply[0] = r->ids.count - r->num_prompt;
		for (int i = 0; i < reply[0]; i++)
			reply[1 + i] = r->ids.id[r->num_prompt + i];
	}
	request_free(r);
	progress(t->progress, t->shared.counter.next - t->shown);
	t->shown = t->shared.counter.next;
	return 0;
}

/* Computes the task together with the other ranks. */
static int run_requests(struct task_work *w, struct model *m, const struct engine_options *o)
{
	const bool shows = m->layout.all.rank == 0;
	const int64_t all = has_replies(w) ? w->num_contexts : w->num_continuations;
	struct task_requests t = {.work = w, .list = task_memory(w->task, "the requests", all, sizeof *t.list),
			.keeps = m->layout.tensor.rank == 0};
	t.shared = (struct shared_work){.count = w->num_contexts, .add = add_requests, .data = &t};
	struct engine_options options = *o;
	options.useful_tokens = all * w->longest;
	const double samples = w->num_contexts ? (double)w->task->num_samples / w->num_contexts : 0; /* in a context */
	struct progress p = progress_start(w->task->name, w->num_contexts, samples, "samples");
	t.progress = shows ? &p : NULL;
	options.on_token = keep_result;
	options.data = &t;
	struct engine *e = parallel_agree(t.list ? 0 : -1) < 0 ? NULL : engine_open(m, w->tokenizer, &options);
	const int rc = e ? shared_work_run(&t.shared, e, m, options.max_requests) : -1;
	engine_close(e);
	for (int64_t i = 0; t.list && i < all; i++)
		request_free(&t.list[i]);
	free(t.list);
	if (shows)
		progress_end(&p);
	return rc;
}

int task_run(struct task_work *w, struct model *m, const struct engine_options *o)
{
	if (parallel_agree(run_requests(w, m, o)) < 0)
		return -1;
	/* Every value is that of one rank, and 0 on the others. */
	if (has_replies(w)) {
		all_reduce_sum(&m->layout.all, TRAFFIC_STATISTICS, w->reply, w->num_contexts * (1 + w->task->max_tokens));
		return 0;
	}
	all_reduce_sum(&m->layout.all, TRAFFIC_STATISTICS, w->log_likelihood, w->num_continuations);
	for (const struct task_context *x = w->contexts; x < w->contexts + w->num_contexts; x++)
		for (int i = 0; i < x->num_continuations; i++) {
			const double value = w->log_likelihood[x->first_continuation + i];
			if (!isfinite(value))
				return fail_sample(w->task, &w->task->samples.sample[x->sample], "a log-likelihood is %g", value);
		}
	return 0;
}

/* ------------------------------------------------------------------------------------------- scores */

/* The mean of n values, from their sum and their sum of squares. Its standard error is sqrt(sum (x - mean)^2 / (n - 1)
 * / n). */
static struct score mean_score(const char *name, double sum, double squares, int64_t n)
{
	const double mean = sum / n;
	return (struct score){name, mean, n > 1 ? sqrt(fmax(squares - n * mean * mean, 0) / (n - 1) / n) : NAN};
}

/* The option with the highest score, the first among equals. Adds 1 to *ties when several have it. */
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

/* The text of a context, which task_work keeps. */
static struct text context_text(const struct task_work *w, const struct task_context *x)
{
	return (struct text){w->texts.data ? w->texts.data + x->text : NULL, (size_t)x->text_size, 0};
}

/* The characters of an option without one character of white space that it begins with: what lm-evaluation-harness
 * calls a choice, without its target_delimiter. Further white space is the choice's own. At least 1. */
static size_t count_characters(const struct text *t)
{
	size_t n = 0;
	const bool delimiter = t->size && (*t->data == ' ' || (*t->data >= '\t' && *t->data <= '\r'));
	for (size_t i = delimiter; i < t->size; i++)
		n += ((uint8_t)t->data[i] & 0xc0) != 0x80;
	return n ? n : 1;
}

/* The result of a question. Adds 1 to right[k] where the prediction of accuracy k is right. */
static void question_result(const struct task_work *w, const struct task_context *x, struct task_result *result,
		struct results *results, int64_t right[NUM_ACCURACIES])
{
	const struct sample *s = &w->task->samples.sample[x->sample];
	struct sample_result r = {.sample = s, .context = context_text(w, x), .cut = x->cut};
	struct scored_tokens *option = allocate(s->num_choices * sizeof *option);
	double *score = allocate(s->num_choices * sizeof *score);
	struct ids ids = {0}; /* the scored ids of all options */
	for (int i = 0; i < s->num_choices; i++) {
		const struct task_continuation *c = &w->continuations[x->first_continuation + i];
		const int64_t end = x->num_tokens + c->num_tokens;
		option[i] = (struct scored_tokens){w->log_likelihood[x->first_continuation + i], NULL, end - c->first_scored};
		for (int64_t position = c->first_scored; position < end; position++)
			append_id(&ids, sequence_token(w, x, c, position));
	}
	const int32_t *id = ids.id;
	for (int i = 0; i < s->num_choices; id += option[i++].num_tokens)
		option[i].id = id;
	for (int k = 0; k < NUM_ACCURACIES; k++) {
		for (int i = 0; i < s->num_choices; i++) {
			const size_t units = k == ACCURACY_BYTES ? s->choice[i].size
					: k == ACCURACY_TOKENS ? (size_t)option[i].num_tokens
					: k == ACCURACY_CHARACTERS ? count_characters(&s->choice[i]) : 1;
			score[i] = option[i].log_likelihood / units;
		}
		r.prediction[k] = best_option(score, s->num_choices, &result->ties[k]);
		right[k] += r.prediction[k] == s->answer;
	}
	r.scored = option;
	if (results)
		results_add(results, w->task, &r);
	free(option);
	free(score);
	free(ids.id);
}

/* The words of a text: the longest runs of bytes that are not ASCII white space. */
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

/* A perplexity, e^r, or with `bits` r / ln 2, where r = sum loss / sum unit over n documents, and unit[i] counts the
 * tokens, words or bytes of document i. The standard error of r is sqrt(n / (n - 1) sum (loss[i] - r unit[i])^2) / sum
 * unit; that of e^r is e^r times as large (delta method). */
static struct score ratio_score(const char *name, const double *loss, const double *unit, int64_t n, bool bits)
{
	double losses = 0, units = 0, squares = 0;
	for (int64_t i = 0; i < n; i++)
		losses += loss[i], units += unit[i];
	const double ratio = losses / units;
	for (int64_t i = 0; i < n; i++)
		squares += (loss[i] - ratio * unit[i]) * (loss[i] - ratio * unit[i]);
	const double error = n > 1 ? sqrt((double)n / (n - 1) * squares) / units : NAN;
	if (bits)
		return (struct score){name, ratio / M_LN2, error / M_LN2};
	return (struct score){name, exp(ratio), exp(ratio) * error};
}

/* The results of a perplexity task. */
static void documents_result(struct task_work *w, struct task_result *result, struct results *results)
{
	const struct task *t = w->task;
	const int64_t n = t->num_samples;
	double *loss = w->documents, *tokens = loss + n, *words = tokens + n, *bytes = words + n;
	memset(loss, 0, 2 * n * sizeof *loss);
	const struct task_context *x = w->contexts, *end = x + w->num_contexts;
	for (int64_t i = 0; i < n; i++) {
		struct sample_result r = {.sample = &t->samples.sample[i]};
		for (; x < end && x->sample == i; x++) { /* its windows, each with one continuation */
			const struct task_continuation *c = &w->continuations[x->first_continuation];
			loss[i] -= w->log_likelihood[x->first_continuation];
			tokens[i] += x->num_tokens + c->num_tokens - c->first_scored;
			r.cut = x->cut;
		}
		words[i] = r.words = count_words(&r.sample->prompt);
		bytes[i] = r.sample->prompt.size;
		r.scored = &(struct scored_tokens){-loss[i], NULL, (int64_t)tokens[i]};
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
}

/* The result of an exact match sample. Adds 1 to *right where the reply is right. */
static void reply_result(const struct task_work *w, const struct task_context *x, struct task_result *result,
		struct results *results, int64_t *right)
{
	const double *reply = w->reply + (x - w->contexts) * (1 + w->task->max_tokens);
	struct sample_result r = {.sample = &w->task->samples.sample[x->sample], .context = context_text(w, x),
		.cut = x->cut};
	struct ids ids = {0};
	for (int i = 0; i < reply[0]; i++) {
		append_id(&ids, (int32_t)reply[1 + i]);
		tokenizer_decode(w->tokenizer, ids.id[i], false, &r.reply);
	}
	r.reply.size = find_stop(&r.reply, 0, &w->task->stop);
	r.scored = &(struct scored_tokens){0, ids.id, ids.count};
	r.correct = task_reply_is_right(w->task, r.sample, &r.reply, &r.extracted, &r.matched);
	*right += r.correct;
	result->unmatched += !r.matched;
	if (results)
		results_add(results, w->task, &r);
	free(ids.id);
	free(r.reply.data);
	free(r.extracted.data);
}

void task_score(struct task_work *w, struct task_result *result, struct results *results)
{
	static const char *const names[NUM_ACCURACIES] = {"accuracy", "accuracy_bytes", "accuracy_tokens", "acc_norm"};
	const bool choice = w->task->type == TASK_MULTIPLE_CHOICE;
	int64_t right[NUM_ACCURACIES] = {0};
	*result = (struct task_result){.task = w->task};
	if (w->task->type == TASK_PERPLEXITY) {
		documents_result(w, result, results);
		return;
	}
	for (const struct task_context *x = w->contexts; x < w->contexts + w->num_contexts; x++) {
		(choice ? question_result : reply_result)(w, x, result, results, right);
		result->cut += x->cut;
	}
	result->num_scores = choice ? NUM_ACCURACIES : 1;
	for (int k = 0; k < result->num_scores; k++) /* each value is 0 or 1, its own square */
		result->score[k] = mean_score(choice ? names[k] : "exact_match", right[k], right[k], w->num_contexts);
}
