/*
 * files/encoder.c - from text to token ids: encoding whole texts, texts in parts, and conversations.
 *
 * Text goes through stages. Each stage cuts its text and hands what it does not turn into ids to the next one:
 *   0                 added tokens in the text as it is
 *   1                 NFC, where the tokenizer has it
 *   2                 added tokens in that form
 *   3 .. 2 + splits   a regular expression each: what it matches, and what is between two matches
 * What the last stage hands on is a word; its bytes are merged.
 */
#define _GNU_SOURCE
#include "files/encoder.h"

#include "files/base.h"
#include "files/collections.h"
#include "files/tokenizer_json.h"
#include "files/unicode.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define MAX_WORD INT32_MAX     /* bytes */
#define SHORT_WORD 128         /* bytes; in a longer word the next pair is found by a heap, not by looking at all */
#define SHORT_BITS 7           /* SHORT_WORD = 2^SHORT_BITS */

#define CACHE_BITS 15
#define CACHED_BYTES 32
#define CACHED_IDS 7

struct cached_word {           /* 64 bytes: a line of the processor's cache */
	uint64_t text[CACHED_BYTES / 8]; /* zeros behind its end */
	int32_t id[CACHED_IDS];
	uint8_t size, count;         /* bytes; ids. size 0: none is here */
};

struct encoder {
	const struct tokenizer *tokenizer;
	const struct chat_form *form; /* NULL: the tokenizer's chat_template makes none that is known */
	bool has_tools;              /* see chat_has_tools */
	bool special;                /* of this call: special tokens are recognised */
	int32_t marks[4];            /* [num_marks] the form's tags and the end token: see added_at */
	int num_marks;
	bool counts_words;           /* see encoder_count_words */
	struct string_table words;
	struct cached_word *cache;   /* [2^CACHE_BITS] by hash; a word replaces the one that was there */
	struct text normal;          /* text in NFC */
	pcre2_match_data *match;
	pcre2_match_context *context;
	pcre2_jit_stack *stack;
};

/* -- chat forms: see encoder.h -- */

enum { NUM_CHAT_ROLES = 4, MAX_MARKS = 12, MAX_OUTLINES = 2 };
static const struct chat_form {
	const char *name;
	const char *open, *between, *close, *after; /* OPENroleBETWEENcontentCLOSEAFTER; without a close it is Ling's */
	const char *roles[NUM_CHAT_ROLES]; /* SYSTEM, HUMAN, ASSISTANT, TOOL; NULL: the form has no place for it */
	const char *system;          /* ends the first system message, which is there in any case; or NULL */
	/* a template makes this form if its outline (see template_outline) is one of these; or where there are none, if its
	 * outline has this end and this text, no text behind a CLOSE, and the template all of `has` and none of `lacks` */
	const char *outlines[MAX_OUTLINES], *outline_end, *outline_system, *has[MAX_MARKS], *lacks[MAX_MARKS];
} chat_forms[] = {
	{"ling", "<role>", "</role>", NULL, "", {"SYSTEM", "HUMAN", "ASSISTANT", "TOOL"}, NULL,
		.outlines = {
			"{for}{setrole=m.role|lower}{ifrole=='user'}{setrole='HUMAN'}{endif}{setrole=role|upper}"
			"<role>{role}</role>{m.content}{endfor}{ifadd_generation_prompt}<role>ASSISTANT</role>{endif}",
			"{for}{setrole=m.role|lower}{ifrole=='user'}{setrole='HUMAN'}{endif}"
			"<role>{role|upper}</role>{m.content}{endfor}{ifadd_generation_prompt}<role>ASSISTANT</role>{endif}"}},
	{"ling2", "<role>", "</role>", "<|role_end|>", "", {"SYSTEM", "HUMAN", "ASSISTANT", "OBSERVATION"},
		"detailed thinking off",
		{NULL}, "{ifadd_generation_prompt}<role>ASSISTANT</role>{endif}", "{messages[0].content}\n{endif}",
		{"<role>SYSTEM</role>", "<role>HUMAN</role>", "<role>ASSISTANT</role>", "<|role_end|>",
			"thinking_option = 'off'", "'detailed thinking ' + thinking_option + '<|role_end|>'",
					"add_generation_prompt"},
		{"<|im_", "bos_token"}},
	{"chatml", "<|im_start|>", "\n", "<|im_end|>", "\n", {"system", "user", "assistant", "tool"}, NULL,
		.outlines = {"{for}<|im_start|>{m.role}\n{m.content}<|im_end|>\n{endfor}"
			"{ifadd_generation_prompt}<|im_start|>assistant\n{endif}"}},
};
/* A template of ling2 has a place for tools and reasoning, and it is that of chat_encode_closed, if it has these. */
static const char *const tool_marks[] = {"<tools>", "tool | tojson", "</tools>\\n\\nFor each function call",
	"<role>OBSERVATION</role>", "\\n<tool_response>\\n", "\\n</tool_response>", "<tool_call>\\n{\"name\": \"",
	"tool_call.arguments | tojson", "}\\n</tool_call>", "ns.last_query_index",
	"\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n')"};
/* Tags that the form writes into a message, and which may be tokens. */
static const char *const message_tags[] = {"<think>", "</think>", "<tools>", "</tools>", "<tool_call>", "</tool_call>",
	"<tool_response>", "</tool_response>"};
enum { NUM_TOOL_MARKS = sizeof tool_marks / sizeof *tool_marks };
enum { NUM_MESSAGE_TAGS = sizeof message_tags / sizeof *message_tags };
enum { NUM_CHAT_FORMS = sizeof chat_forms / sizeof *chat_forms };

/* Appends a string of Jinja's, text[i] being its first quote, as the characters that it stands for. Returns the place
 * behind it, or n if it has no end. */
static size_t outline_string(const char *text, size_t i, size_t n, struct text *out)
{
	const char quote = text[i++];
	for (; i < n && text[i] != quote; i++) {
		char c = text[i];
		if (c == '\\' && i + 1 < n && strchr("n\\'\"", text[i + 1]))
			c = text[++i] == 'n' ? '\n' : text[i];
		text_append(out, &c, 1);
	}
	return i < n ? i + 1 : n;
}

/* Appends what stands in {{ }}, or with `statement` in {% %}. variable: the name of a message, see template_outline. */
static void outline_code(const char *code, size_t n, bool statement, struct text *variable, struct text *out)
{
	static const char ending[] = "inmessages";
	struct text piece = {0};
	text_append_string(&piece, "");
	for (size_t i = 0; i <= n; ) {
		const bool text = i < n && (code[i] == '\'' || code[i] == '"');
		const bool index = i + 1 < n && code[i] == '[' && (code[i + 1] == '\'' || code[i + 1] == '"');
		if (index || (text && statement)) { /* x['role'] is x.role */
			text_append_string(&piece, index ? "." : "'");
			i = outline_string(code, i + index, n, &piece);
			i += index && i < n && code[i] == ']';
			text_append_string(&piece, index ? "" : "'");
			continue;
		}
		if (i < n && !text && (statement || !strchr("+~", code[i]))) {
			if (!strchr(" \t\r\n()", code[i]))
				text_append(&piece, &code[i], 1);
			i++;
			continue;
		}
		if (statement && piece.size > 3 + sizeof ending - 1 && !memcmp(piece.data, "for", 3) &&
				!strcmp(piece.data + piece.size - (sizeof ending - 1), ending)) {
			variable->size = 0;
			text_append(variable, piece.data + 3, piece.size - 3 - (sizeof ending - 1));
			text_append(variable, ".", 1);
			piece.size = 3;
		}
		text_append(&piece, "", 0); /* sets its end */
		const char *name = variable->size ? strstr(piece.data, variable->data) : NULL;
		if (*piece.data && strcmp(piece.data, "generation") && strcmp(piece.data, "endgeneration")) {
			text_append_string(out, "{");
			text_append(out, piece.data, name ? (size_t)(name - piece.data) : strlen(piece.data));
			text_append_string(out, name ? "m." : ""), text_append_string(out, name ? name + variable->size : "");
			text_append_string(out, "}");
		}
		piece.size = 0;
		i = text ? outline_string(code, i, n, out) : i + 1;
	}
	free(piece.data);
}

/* What a template writes, in one spelling: its texts as they are, {value} and {statement} without blanks and
 * parentheses, `m` for a message. Blanks and new lines around them go where Hugging Face's settings of Jinja
 * (trim_blocks, lstrip_blocks) take them away. The caller frees the text. */
static char *template_outline(const char *template)
{
	static const char unset[] = "{ifnotadd_generation_promptisdefined}{setadd_generation_prompt=false}{endif}";
	struct text out = {0}, variable = {0};
	const size_t n = strlen(template);
	size_t literal = 0;          /* where in out the text begins that a {%- may still shorten */
	text_append_string(&out, ""), text_append_string(&variable, "");
	for (size_t i = 0; i < n; ) {
		const char kind = template[i] == '{' && i + 1 < n ? template[i + 1] : 0;
		if (kind != '{' && kind != '%' && kind != '#') {
			text_append(&out, &template[i++], 1);
			continue;
		}
		const char mark[] = {kind == '{' ? '}' : kind, '}', 0};
		const char *end = strstr(template + i + 2, mark);
		size_t begin = i + 2, stop = end ? (size_t)(end - template) : n;
		const bool strip = begin < stop && template[begin] == '-';
		const bool strip_behind = stop > begin && template[stop - 1] == '-';
		size_t left = out.size;
		while (left > literal && strchr(strip ? " \t\r\n" : kind == '{' ? "" : " \t", out.data[left - 1]))
			left--;
		if (strip || left == 0 || out.data[left - 1] == '\n')
			out.size = left;
		begin += begin < stop && strchr("-+", template[begin]), stop -= strip_behind && stop > begin;
		if (kind != '#')
			outline_code(template + begin, stop - begin, kind == '%', &variable, &out);
		literal = out.size;
		i = end ? (size_t)(end - template) + 2 : n;
		if (strip_behind)
			i += strspn(template + i, " \t\r\n");
		else if (kind != '{')
			i += template[i] == '\n';
	}
	if (out.size > literal && out.data[out.size - 1] == '\n')
		out.size--;
	text_append(&out, "", 0);
	free(variable.data);
	if (!strncmp(out.data, unset, strlen(unset)))
		memmove(out.data, out.data + strlen(unset), strlen(out.data + strlen(unset)) + 1);
	return out.data;
}

/* Whether a template makes a form. */
static bool template_fits(const char *template, const struct chat_form *f)
{
	bool fits = false;
	char *outline = template_outline(template);
	for (int k = 0; k < MAX_OUTLINES && f->outlines[k]; k++)
		fits |= !strcmp(outline, f->outlines[k]);
	if (f->outline_end) {
		const size_t n = strlen(outline), m = strlen(f->outline_end), close = strlen(f->close);
		fits = n >= m && !strcmp(outline + n - m, f->outline_end) && strstr(outline, f->outline_system);
		for (const char *at = outline; (at = strstr(at, f->close)); at += close)
			fits &= at[close] == '{'; /* no text follows */
	}
	free(outline);
	for (int k = 0; k < MAX_MARKS; k++)
		fits &= (!f->has[k] || strstr(template, f->has[k])) && (!f->lacks[k] || !strstr(template, f->lacks[k]));
	return fits;
}

/* The form that the user named, or that the tokenizer's template makes; NULL: none of them. */
static const struct chat_form *chat_form_of(const struct tokenizer *t)
{
	for (int i = 0; i < NUM_CHAT_FORMS; i++) {
		const struct chat_form *f = &chat_forms[i];
		if (t->chat_form ? !strcmp(t->chat_form, f->name) : !t->chat_template || template_fits(t->chat_template, f))
			return f;
	}
	return NULL;
}

int chat_form_choose(struct tokenizer *t, const char *name)
{
	if (!name)
		return 0;
	t->chat_form = name;
	return chat_form_of(t) ? 0 : fail("--chat-form %s: expected ling, ling2 or chatml", name);
}

void chat_end_append(const struct tokenizer *t, struct ids *out)
{
	const struct chat_form *f = chat_form_of(t);
	if (f && f->close && tokenizer_id(t, f->close) >= 0)
		append_id(out, tokenizer_id(t, f->close));
}

bool chat_closes(const struct encoder *e)
{
	return e->form && e->form->close;
}

bool chat_has_tools(const struct encoder *e)
{
	return e->has_tools;
}

struct encoder *encoder_open(const struct tokenizer *t)
{
	struct encoder *e = allocate(sizeof *e);
	e->tokenizer = t;
	e->form = chat_form_of(t);
	e->has_tools = e->form && e->form->system;
	for (int i = 0; i < NUM_TOOL_MARKS && !t->chat_form && t->chat_template; i++)
		e->has_tools &= strstr(t->chat_template, tool_marks[i]) != NULL;
	if (t->bytes_only)
		return e;
	const char *const tags[] = {e->form ? e->form->open : NULL, e->form && *e->form->between == '<' ? e->form->between
			: NULL, e->form ? e->form->close : NULL};
	for (int i = 0; i < 3; i++)
		if (tags[i] && tokenizer_id(t, tags[i]) >= 0)
			e->marks[e->num_marks++] = tokenizer_id(t, tags[i]);
	if (t->end >= 0)
		e->marks[e->num_marks++] = t->end;
	e->cache = aligned_alloc(sizeof *e->cache, sizeof *e->cache << CACHE_BITS);
	e->match = pcre2_match_data_create(1, NULL);
	e->context = pcre2_match_context_create(NULL);
	e->stack = pcre2_jit_stack_create(1 << 15, 1 << 24, NULL);
	if (!e->cache || !e->match || !e->context || !e->stack)
		out_of_memory(sizeof *e->cache << CACHE_BITS);
	memset(e->cache, 0, sizeof *e->cache << CACHE_BITS);
	pcre2_jit_stack_assign(e->context, NULL, e->stack);
	return e;
}

void encoder_close(struct encoder *e)
{
	if (!e)
		return;
	string_table_free(&e->words);
	free(e->cache), free(e->normal.data);
	pcre2_match_data_free(e->match);
	pcre2_match_context_free(e->context);
	pcre2_jit_stack_free(e->stack);
	free(e);
}

const struct tokenizer *encoder_tokenizer(const struct encoder *e)
{
	return e->tokenizer;
}

const struct string_table *encoder_count_words(struct encoder *e)
{
	e->counts_words = true;
	return &e->words;
}

/* -- merging: of all pairs of neighbours the one with the lowest rank becomes one token, of equals the leftmost; again
 *    and again -- */

/* Merges the n ids of a short word in place. Returns how many are left. */
static int merge_short(const struct tokenizer *t, int32_t *id, int n)
{
	/* of the pair that begins at each id: rank << SHORT_BITS | its place; NO_RANK: no merge, or the id is gone */
	uint32_t key[SHORT_WORD];
	uint8_t next[SHORT_WORD], previous[SHORT_WORD];
	const int count = n;
#define PAIR(at, left, right) do { \
		const uint32_t rank = find_merge(t, left, right)->rank; \
		key[at] = rank == NO_RANK ? NO_RANK : rank << SHORT_BITS | (at); \
	} while (0)
	for (int i = 0; i < n; i++) {
		next[i] = i + 1, previous[i] = i - 1;
		if (i + 1 < n)
			PAIR(i, id[i], id[i + 1]);
	}
	key[n - 1] = NO_RANK;
	for (;;) {
		uint32_t best = NO_RANK;
		for (int i = 0; i < count; i++)
			best = key[i] < best ? key[i] : best;
		if (best == NO_RANK)
			break;
		const int i = best & (SHORT_WORD - 1), gone = next[i];
		id[i] = t->merged[best >> SHORT_BITS];
		id[gone] = -1, key[gone] = NO_RANK;
		next[i] = next[gone];
		if (next[i] < count) {
			previous[next[i]] = i;
			PAIR(i, id[i], id[next[i]]);
		} else
			key[i] = NO_RANK;
		if (i)
			PAIR(previous[i], id[previous[i]], id[i]);
	}
#undef PAIR
	n = 0;
	for (int i = 0; i < count; i++)
		if (id[i] >= 0)
			id[n++] = id[i];
	return n;
}

static bool lower_key(const void *a, const void *b, const void *context)
{
	(void)context;
	return *(const uint64_t *)a < *(const uint64_t *)b;
}

/* merge_short for a word of any length. */
static int64_t merge_long(const struct tokenizer *t, int32_t *id, int32_t n)
{
	/* of each id; rank: of the pair that begins there */
	struct link { uint32_t rank; int32_t next, previous; } *link = allocate(n * sizeof *link);
	/* rank << 32 | place; a key whose rank is no longer that of its place is skipped when it comes up */
	uint64_t *heap = allocate(3 * (size_t)n * sizeof *heap), key;
	size_t count = 0;
	for (int32_t i = 0; i < n; i++) {
		link[i] = (struct link){i + 1 < n ? find_merge(t, id[i], id[i + 1])->rank : NO_RANK, i + 1, i - 1};
		key = (uint64_t)link[i].rank << 32 | i;
		if (link[i].rank != NO_RANK)
			heap_raise(heap, count++, sizeof key, &key, lower_key, NULL);
	}
	while (count) {
		const uint64_t top = heap[0], last = heap[--count];
		heap_sink(heap, 0, count, sizeof last, &last, lower_key, NULL);
		const int32_t i = (int32_t)top, gone = link[i].next;
		if (link[i].rank != top >> 32)
			continue;
		id[i] = t->merged[link[i].rank];
		id[gone] = -1, link[gone].rank = NO_RANK;
		link[i].next = link[gone].next;
		if (link[i].next < n)
			link[link[i].next].previous = i;
		for (int side = 0; side < 2; side++) { /* the pair that begins here, and the one that ends here */
			const int32_t left = side ? link[i].previous : i, right = left < 0 ? n : link[left].next;
			if (left < 0)
				continue;
			link[left].rank = right < n ? find_merge(t, id[left], id[right])->rank : NO_RANK;
			key = (uint64_t)link[left].rank << 32 | left;
			if (link[left].rank != NO_RANK)
				heap_raise(heap, count++, sizeof key, &key, lower_key, NULL);
		}
	}
	free(heap), free(link);
	int32_t kept = 0;
	for (int32_t i = 0; i < n; i++)
		if (id[i] >= 0)
			id[kept++] = id[i];
	return kept;
}

/* Appends the ids of a word that the cache does not hold. */
static int encode_new_word(const struct tokenizer *t, const char *word, size_t n, struct ids *out)
{
	if (n > MAX_WORD)
		return fail("a word of %zu bytes: expected at most %d bytes without a place where the tokenizer may cut", n,
				MAX_WORD);
	out->id = grow(out->id, out->count, &out->capacity, n, sizeof *out->id);
	int32_t *id = out->id + out->count;
	if (t->ignore_merges && (id[0] = find_text(t, word, n)) >= 0) {
		out->count++;
		return 0;
	}
	for (size_t i = 0; i < n; i++)
		id[i] = t->byte_id[(uint8_t)word[i]];
	out->count += n <= SHORT_WORD ? merge_short(t, id, n) : merge_long(t, id, n);
	return 0;
}

/* Appends the ids of a word of at least one byte, from the cache where it has them; or counts it. */
static int encode_word(struct encoder *e, const char *word, size_t n, struct ids *out)
{
	if (e->counts_words)
		return string_table_add(&e->words, word, n, 1) < 0 ? -1 : 0;
	if (n > CACHED_BYTES)
		return encode_new_word(e->tokenizer, word, n, out);
	uint64_t text[CACHED_BYTES / 8] = {0}, hash = n;
	memcpy(text, word, n);
	for (int i = 0; i < CACHED_BYTES / 8; i++)
		hash = (hash ^ text[i]) * 0x9E3779B97F4A7C15;
	struct cached_word *c = &e->cache[hash >> (64 - CACHE_BITS)];
	out->id = grow(out->id, out->count, &out->capacity, CACHED_IDS, sizeof *out->id);
	if (c->size != n || memcmp(c->text, text, sizeof text)) {
		const int64_t before = out->count;
		if (encode_new_word(e->tokenizer, word, n, out) < 0)
			return -1;
		if (out->count - before > CACHED_IDS)
			return 0;
		memcpy(c->text, text, sizeof text);
		c->size = n, c->count = out->count - before;
		memcpy(c->id, out->id + before, c->count * sizeof *c->id);
		return 0;
	}
	memcpy(out->id + out->count, c->id, sizeof c->id);
	out->count += c->count;
	return 0;
}

/* -- the stages -- */

/* What a stage finds next in its text. */
struct match {
	/* its bytes are text[begin .. end); nothing found: both are n; more text needed to decide: both are the place from
	 * which on it is needed */
	size_t begin, end;
	size_t next;                 /* where the search goes on */
	int32_t id;                  /* of an added token; else -1 */
};

/* Whether an added token is found in this call. Without special tokens a tag of the chat form and the end token are not
 * found either: many files do not call them special, and no content may be mistaken for a role or an end. */
static bool is_sought(const struct encoder *e, const struct added_token *a)
{
	bool mark = a->special;
	for (int i = 0; i < e->num_marks; i++)
		mark |= a->id == e->marks[i];
	return e->special || !mark;
}

/* The longest added token of list k that text begins with, or NULL. *more: text is the beginning of a longer one. */
static const struct added_token *added_at(const struct encoder *e, int k, const char *text, size_t n, bool *more)
{
	const struct added_token *list = e->tokenizer->added[k], *longest = NULL;
	int low = 0, high = e->tokenizer->num_added[k]; /* those that begin with text[0 .. depth) */
	size_t depth = 0;
	for (; low < high && depth < n; depth++) {
		const uint8_t c = text[depth];
		for (int side = 0; side < 2; side++) { /* the first with byte `depth` at least c; with more */
			int first = low, last = high;
			while (first < last) {
				const int middle = first + (last - first) / 2;
				if (list[middle].size > depth && (uint8_t)list[middle].text[depth] >= c + side)
					last = middle;
				else
					first = middle + 1;
			}
			*(side ? &high : &low) = first;
		}
		if (low < high && list[low].size == depth + 1 && is_sought(e, &list[low]))
			longest = &list[low];
	}
	*more = depth == n && low < high && list[high - 1].size > n;
	return longest;
}

/* Finds the leftmost added token of list k from byte `from` on, of several that begin there the longest; lstrip takes
 * nothing before byte `done`. A single_word token within a longer word is not found, but what begins inside it is not
 * found either, as in Hugging Face's library. Returns 1 when there is one, else 0. */
static int find_added(const struct encoder *e, int k, const char *text, size_t n, size_t from, size_t done,
		bool partial, struct match *m)
{
	const bool *begins = e->tokenizer->added_begin[k];
	int32_t c;
	for (size_t i = from; i < n; i++) {
		if (!begins[(uint8_t)text[i]])
			continue;
		bool more;
		const struct added_token *a = added_at(e, k, text + i, n - i, &more);
		if (more && partial) {
			*m = (struct match){i, i, i, -1};
			return 0;
		}
		if (!a)
			continue;
		const size_t begin = i, end = i + a->size;
		i = end - 1;
		if (a->single_word) {
			const size_t before = utf8_last(text, begin);
			if ((utf8_decode(text + before, begin - before, &c) && is_word(c)) ||
					(utf8_decode(text + end, n - end, &c) && is_word(c)))
				continue;
		}
		*m = (struct match){begin, end, end, a->id};
		while (a->lstrip && m->begin > done) {
			const size_t before = utf8_last(text, m->begin);
			if (!utf8_decode(text + before, m->begin - before, &c) || !is_space(c))
				break;
			m->begin = before;
		}
		for (int size; a->rstrip && (size = utf8_decode(text + m->end, n - m->end, &c)) && is_space(c); m->end += size)
			;
		return 1;
	}
	*m = (struct match){n, n, n, -1};
	return 0;
}

/* Finds what a regular expression matches from byte `from` on. Returns 1 when there is a match, 0 when not, -1 on
 * error. */
static int find_match(const struct encoder *e, const struct split *s, const char *text, size_t n, size_t from,
		bool partial, struct match *m)
{
	/* PCRE2's default limit of steps, which ends hopeless searches, and 16 steps for each byte: a run of spaces takes
	 * as many as it is long */
	const size_t steps = 10000000 + 16 * (n - from);
	pcre2_set_match_limit(e->context, steps < UINT32_MAX ? steps : UINT32_MAX);
	const uint32_t options = PCRE2_NO_UTF_CHECK | (partial ? PCRE2_PARTIAL_HARD : 0);
	const int rc = pcre2_match(s->code, (const uint8_t *)text, n, from, options, e->match, e->context);
	const size_t *at = pcre2_get_ovector_pointer(e->match);
	if (rc == PCRE2_ERROR_NOMATCH)
		*m = (struct match){n, n, n, -1};
	else if (rc == PCRE2_ERROR_PARTIAL)
		*m = (struct match){at[0], at[0], at[0], -1};
	else if (rc < 0) {
		char message[128] = "";
		pcre2_get_error_message(rc, (uint8_t *)message, sizeof message);
		return fail("the tokenizer's pattern %.100s: %s, in %zu bytes of text; expected text that it cuts into words: "
				"divide long runs of one character", s->pattern, message, n);
	} else {
		*m = (struct match){at[0], at[1], at[1], -1};
		int32_t c;
		if (at[0] == at[1]) /* an empty match cuts the text in two; the search goes on behind the next character */
			m->next += from < n ? utf8_decode(text + at[1], n - at[1], &c) : 1;
	}
	return rc >= 0;
}

static int64_t encode_stage(struct encoder *e, int stage, const char *text, size_t n, size_t stop, bool partial,
		struct ids *out);

/* The stage that brings text into NFC. A place in the NFC text has a known place in the original only if both texts
 * are equal, at the end, and at `stop` if the text may be cut there. If the next stages end at any other place, no ids
 * are appended and the result is 0. */
static int64_t encode_normalized(struct encoder *e, int stage, const char *text, size_t n, size_t stop, bool partial,
		struct ids *out)
{
	if (partial)
		n = nfc_last_cut(text, n);
	if (nfc_plain(text, n) == n)
		return encode_stage(e, stage + 1, text, n, stop, partial, out);
	int32_t c;
	const bool stops = stop < n && utf8_decode(text + stop, n - stop, &c) && nfc_begins(c);
	const size_t first = stops ? stop : n;
	e->normal.size = 0;
	bool changed = nfc_append(&e->normal, text, first);
	const size_t middle = e->normal.size;
	changed |= nfc_append(&e->normal, text + first, n - first);
	if (!changed)
		return encode_stage(e, stage + 1, text, n, stop, partial, out);
	const int64_t before = out->count;
	const size_t inner_stop = stops ? middle : SIZE_MAX;
	const int64_t done = encode_stage(e, stage + 1, e->normal.data, e->normal.size, inner_stop, partial, out);
	if (done < 0 || (size_t)done == e->normal.size)
		return done < 0 ? -1 : (int64_t)n;
	if (stops && (size_t)done == middle)
		return first;
	out->count = before;
	return 0;
}

/* encode_part for valid UTF-8, from one stage on. */
static int64_t encode_stage(struct encoder *e, int stage, const char *text, size_t n, size_t stop, bool partial,
		struct ids *out)
{
	const struct tokenizer *t = e->tokenizer;
	if (stage == 1 && t->nfc)
		return encode_normalized(e, stage, text, n, stop, partial, out);
	if (stage == 1)
		return encode_stage(e, stage + 1, text, n, stop, partial, out);
	if (stage == 3 + t->num_splits)
		return partial ? 0 : encode_word(e, text, n, out) < 0 ? -1 : (int64_t)n;
	const struct split *s = stage >= 3 ? &t->splits[stage - 3] : NULL;
	struct match m = {0};
	for (size_t done = 0;;) {
		const int found = s ? find_match(e, s, text, n, m.next, partial, &m)
			: find_added(e, stage / 2, text, n, m.next, done, partial, &m);
		if (found < 0)
			return -1;
		if (m.begin > done) {
			const size_t between = m.begin - done; /* bytes */
			const int64_t encoded = s && s->drop_rest ? (int64_t)between
				: encode_stage(e, stage + 1, text + done, between, stop - done, partial && !found, out);
			if (encoded < 0)
				return -1;
			done += encoded;
			if (done < m.begin || done >= stop)
				return done;
		}
		if (!found)
			return done;
		if (m.id >= 0)
			append_id(out, m.id);
		else if (m.end > m.begin && !s->drop_matches &&
				encode_stage(e, stage + 1, text + m.begin, m.end - m.begin, SIZE_MAX, false, out) < 0)
			return -1;
		done = m.end;
		if (done >= stop || m.next > n)
			return done;
	}
}

int64_t encode_part(struct encoder *e, const char *text, size_t n, size_t stop, bool partial, bool special,
		struct ids *out)
{
	const struct tokenizer *t = e->tokenizer;
	size_t done = 0;
	int32_t c;
	e->special = special;
	if (t->bytes_only) {
		n = n < stop ? n : stop;
		out->id = grow(out->id, out->count, &out->capacity, n, sizeof *out->id);
		for (size_t i = 0; i < n; i++)
			out->id[out->count++] = (uint8_t)text[i];
		return n;
	}
	if (!t->context_free) /* only the whole text at once */
		stop = partial ? 0 : SIZE_MAX;
	if (partial)
		n = utf8_whole(text, n);
	while (done < n && done < stop) {
		const size_t valid = utf8_valid(text + done, n - done);
		if (valid) {
			const bool last = done + valid == n;
			const int64_t encoded = encode_stage(e, 0, text + done, valid, stop - done, partial && last, out);
			if (encoded < (int64_t)valid)
				return encoded < 0 ? -1 : (int64_t)done + encoded;
		}
		done += valid;
		size_t invalid = 0;
		while (done + invalid < n && !utf8_decode(text + done + invalid, n - done - invalid, &c))
			invalid++;
		if (partial && done + invalid == n)
			break;
		if (invalid && done < stop && encode_word(e, text + done, invalid, out) < 0)
			return -1;
		done += done < stop ? invalid : 0;
	}
	return done;
}

int encode(struct encoder *e, const char *text, size_t n, bool special, struct ids *out)
{
	return encode_part(e, text, n, SIZE_MAX, false, special, out) < 0 ? -1 : 0;
}

/* -- the chat form -- */

const char *chat_role(const char *role)
{
	static const char *const roles[][2] = {{"system", "SYSTEM"}, {"developer", "SYSTEM"}, {"user", "HUMAN"},
		{"human", "HUMAN"}, {"assistant", "ASSISTANT"}, {"gpt", "ASSISTANT"}, {"tool", "TOOL"}};
	for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
		if (!strcasecmp(role, roles[i][0]))
			return roles[i][1];
	return NULL;
}

/* Appends a tag: its id, or the ids of its text where the tokenizer does not have it. */
static int chat_tag(struct encoder *e, const char *tag, struct ids *out)
{
	const int32_t id = tokenizer_id(e->tokenizer, tag);
	if (id < 0)
		return encode(e, tag, strlen(tag), false, out);
	append_id(out, id);
	return 0;
}

/* Appends what opens a message: its role between the tags. */
static int chat_opening(struct encoder *e, const char *role, struct ids *out)
{
	if (chat_tag(e, "<role>", out) < 0 || encode(e, role, strlen(role), false, out) < 0)
		return -1;
	return chat_tag(e, "</role>", out);
}

void append_loss_mask(struct text *loss_mask, const struct ids *ids, char value)
{
	while (loss_mask && loss_mask->size < (size_t)ids->count)
		text_append(loss_mask, &value, 1);
}

enum { SYSTEM, HUMAN, ASSISTANT, TOOL };

/* What is to be encoded together: contents, in which nothing is a tag, and what the form writes around them. */
struct message_writer {
	struct encoder *e;
	struct ids *out;
	struct text text;            /* not encoded yet */
};

static int writer_flush(struct message_writer *w)
{
	const int rc = w->text.size ? encode(w->e, w->text.data, w->text.size, false, w->out) : 0;
	w->text.size = 0;
	return rc;
}

/* Adds what the form writes: its tags are tokens where the tokenizer has them. */
static int write_form(struct message_writer *w, const char *text)
{
	while (*text) {
		int k = 0;
		while (k < NUM_MESSAGE_TAGS && (strncmp(text, message_tags[k], strlen(message_tags[k])) ||
				tokenizer_id(w->e->tokenizer, message_tags[k]) < 0))
			k++;
		if (k == NUM_MESSAGE_TAGS) {
			text_append(&w->text, text++, 1);
			continue;
		}
		if (writer_flush(w) < 0)
			return -1;
		append_id(w->out, tokenizer_id(w->e->tokenizer, message_tags[k]));
		text += strlen(message_tags[k]);
	}
	return 0;
}

/* Writes what opens a message. Nothing of a reply is encoded together with it, for it is generated behind that. */
static int write_opening(struct message_writer *w, int role)
{
	const struct chat_form *f = w->e->form;
	const bool tags = *f->between == '<';
	if (chat_tag(w->e, f->open, w->out) < 0)
		return -1;
	text_append_string(&w->text, f->roles[role]);
	if (!tags)
		text_append_string(&w->text, f->between);
	if ((tags || role == ASSISTANT) && writer_flush(w) < 0)
		return -1;
	return tags ? chat_tag(w->e, f->between, w->out) : 0;
}

/* Writes the end of the first system message. */
static int write_system_end(struct message_writer *w, const char *tools)
{
	if (tools && write_form(w, "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou "
			"are provided with function signatures within <tools></tools> XML tags:\n<tools>") < 0)
		return -1;
	if (tools)
		text_append_string(&w->text, tools);
	if (tools && write_form(w, "\n</tools>\n\nFor each function call, return a json object with function name and "
			"arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, "
			"\"arguments\": <args-json-object>}\n</tool_call>\n") < 0)
		return -1;
	return write_form(w, w->e->form->system);
}

/* A part of a text. */
struct span { const char *text; size_t n; };

/* Leaves out the new lines at the beginning, or at the end. */
static void strip_begin(struct span *s)
{
	while (s->n && *s->text == '\n')
		s->text++, s->n--;
}

static void strip_end(struct span *s)
{
	while (s->n && s->text[s->n - 1] == '\n')
		s->n--;
}

/* Parts a content that holds what was thought: <think>reasoning</think>answer. Number is the message's, for errors. */
static int split_reasoning(struct span *reasoning, struct span *content, int number)
{
	static const char begin[] = "<think>", end[] = "</think>";
	const char *close = memmem(content->text, content->n, end, strlen(end));
	if (!close)
		return 0;
	*reasoning = (struct span){content->text, close - content->text};
	content->text = close + strlen(end), content->n -= reasoning->n + strlen(end);
	if (memmem(content->text, content->n, end, strlen(end)))
		return fail("message %d: its content holds </think> twice, and Ling 2.0's template would leave out what is "
				"between; expected one, or `reasoning_content`", number);
	const char *open = memmem(reasoning->text, reasoning->n, begin, strlen(begin));
	const char *inside = open ? open + strlen(begin) : reasoning->text;
	for (const char *p = reasoning->text; open && p < open; p++)
		if (*p != '\n')
			return fail("message %d: its content has text before <think>, which Ling 2.0's template would leave out; "
					"expected <think> at the beginning", number);
	*reasoning = (struct span){inside, reasoning->text + reasoning->n - inside};
	if (memmem(reasoning->text, reasoning->n, begin, strlen(begin)))
		return fail("message %d: its content holds <think> twice, and Ling 2.0's template would leave out what is "
				"between; expected one, or `reasoning_content`", number);
	strip_end(reasoning), strip_begin(reasoning), strip_begin(content);
	return 0;
}

/* Writes a reply as Ling 2.0's template does. It leaves out the reasoning of a reply that a question follows; where the
 * loss counts that reply, that is an error. */
static int write_reply(struct message_writer *w, const struct message *m, int number, bool last_round, bool learned)
{
	struct span content = {m->content, m->content_size}, reasoning = {m->reasoning, m->reasoning_size};
	if (!w->e->has_tools && w->e->form->system && memmem(content.text, content.n, "</think>", 8))
		return fail("message %d: its content holds </think>, which the model's template takes apart; expected the "
				"answer alone", number);
	if (w->e->has_tools && !m->reasoning && split_reasoning(&reasoning, &content, number) < 0)
		return -1;
	if (reasoning.n && !last_round && learned)
		return fail("message %d: Ling 2.0's template leaves out the reasoning of a reply that another question "
				"follows; expected none, or \"weight\": 0 beside that reply, and each round that is to teach reasoning "
				"as the last one of a conversation", number);
	const bool said = content.n;
	if (reasoning.n && last_round) {
		strip_begin(&reasoning), strip_end(&reasoning), strip_begin(&content);
		if (write_form(w, "\n<think>\n") < 0)
			return -1;
		text_append(&w->text, reasoning.text, reasoning.n);
		if (write_form(w, "\n</think>\n\n") < 0)
			return -1;
	}
	text_append(&w->text, content.text, content.n);
	for (int i = 0; i < m->num_calls; i++) {
		if (write_form(w, said || i ? "\n<tool_call>\n" : "<tool_call>\n") < 0)
			return -1;
		text_append(&w->text, m->calls[i].data, m->calls[i].size);
		if (write_form(w, "\n</tool_call>") < 0)
			return -1;
	}
	return 0;
}

/* The number of a message's role, or -1 where the form has no place for it. */
static int role_number(const struct encoder *e, const struct message *m)
{
	static const char *const names[NUM_CHAT_ROLES] = {"SYSTEM", "HUMAN", "ASSISTANT", "TOOL"};
	const char *name = chat_role(m->role);
	int role = 0;
	while (name && role < NUM_CHAT_ROLES && strcmp(names[role], name))
		role++;
	return !name || role == NUM_CHAT_ROLES || (role == TOOL && e->form->system && !e->has_tools) ? -1 : role;
}

/* The index of the last message that is a question: a user's, but for results of tools that are written as one. */
static int last_question(const struct encoder *e, const struct message *messages, int n)
{
	static const char begin[] = "<tool_response>", end[] = "</tool_response>";
	for (int i = n - 1; i >= 0; i--) {
		const struct message *m = &messages[i];
		if (role_number(e, m) == HUMAN && (m->content_size < strlen(end) ||
				memcmp(m->content, begin, strlen(begin)) ||
				memcmp(m->content + m->content_size - strlen(end), end, strlen(end))))
			return i;
	}
	return n - 1;
}

/* chat_encode for these forms; w is empty. */
static int chat_encode_closed(struct message_writer *w, const struct message *messages, int n, bool reply,
		struct text *loss_mask)
{
	struct encoder *e = w->e;
	const struct chat_form *f = e->form;
	const int question = last_question(e, messages, n);
	const char *tools = n ? messages[0].tools : NULL;
	int role = -1;
	if (tokenizer_id(e->tokenizer, f->close) < 0)
		return fail("the tokenizer has no token %s; expected one, for it ends each message in the chat form %s",
				f->close, f->name);
	append_loss_mask(loss_mask, w->out, LOSS_NONE);
	if (f->system && (n == 0 || role_number(e, &messages[0]) != SYSTEM) && (write_opening(w, SYSTEM) < 0 ||
			write_system_end(w, tools) < 0 || writer_flush(w) < 0 || chat_tag(e, f->close, w->out) < 0))
		return -1;
	for (int i = 0; i < n; i++) {
		char shown[64];
		const struct message *m = &messages[i];
		const int before = role, next = i + 1 < n ? role_number(e, &messages[i + 1]) : -1;
		role = role_number(e, m);
		if (role < 0)
			return fail("message %d: the role is `%s`, for which the chat form %s has no place here; expected system, "
					"user%s or assistant", i + 1, printable(shown, m->role), f->name,
					f->system && !e->has_tools ? "" : ", tool");
		const bool results = role == TOOL && f->system;
		if (!(results && before == TOOL) && write_opening(w, role) < 0)
			return -1;
		append_loss_mask(loss_mask, w->out, LOSS_NONE);
		if (results && write_form(w, "\n<tool_response>\n") < 0)
			return -1;
		if (role == ASSISTANT) {
			if (write_reply(w, m, i + 1, i > question, loss_mask && !m->masked) < 0)
				return -1;
		} else
			text_append(&w->text, m->content, m->content_size);
		if (results && write_form(w, "\n</tool_response>") < 0)
			return -1;
		if (f->system && role == SYSTEM && i == 0 && (write_form(w, "\n") < 0 || write_system_end(w, tools) < 0))
			return -1;
		if (writer_flush(w) < 0)
			return -1;
		if (reply && role == ASSISTANT && i + 1 == n) /* the beginning of the reply */
			break;
		if (!(results && next == TOOL) && chat_tag(e, f->close, w->out) < 0)
			return -1;
		append_loss_mask(loss_mask, w->out, role == ASSISTANT && !m->masked ? LOSS_TOKEN : LOSS_NONE);
		if (*f->after && encode(e, f->after, strlen(f->after), false, w->out) < 0)
			return -1;
	}
	if (reply && role != ASSISTANT && write_opening(w, ASSISTANT) < 0)
		return -1;
	append_loss_mask(loss_mask, w->out, LOSS_NONE);
	return 0;
}

int chat_encode(struct encoder *e, const struct message *messages, int n, bool reply, struct ids *out,
		struct text *loss_mask)
{
	if (!e->form) {
		char template[64];
		return fail("the model's chat_template, `%s`, makes none of the forms that are known here; expected ling, "
				"ling2 or chatml; --chat-form names the one to use", printable(template, e->tokenizer->chat_template));
	}
	if (e->form->close) {
		struct message_writer w = {.e = e, .out = out};
		const int rc = chat_encode_closed(&w, messages, n, reply, loss_mask);
		free(w.text.data);
		return rc;
	}
	const int32_t end = tokenizer_end(e->tokenizer);
	bool replied = false, learned = false; /* the message before is the assistant's; and the loss counts it */
	append_loss_mask(loss_mask, out, LOSS_NONE);
	for (int i = 0; i < n; i++) {
		char shown[64];
		const char *role = chat_role(messages[i].role);
		const int64_t begin = out->count;
		if (!role)
			return fail("message %d: the role is `%s`; expected " CHAT_ROLES, i + 1,
					printable(shown, messages[i].role));
		if (chat_opening(e, role, out) < 0)
			return -1;
		append_loss_mask(loss_mask, out, LOSS_NONE);
		if (learned && end >= 0 && loss_mask && out->count > begin)
			loss_mask->data[begin] = LOSS_END;
		if (encode(e, messages[i].content, messages[i].content_size, false, out) < 0)
			return -1;
		replied = !strcmp(role, "ASSISTANT");
		learned = replied && !messages[i].masked;
		append_loss_mask(loss_mask, out, learned ? LOSS_TOKEN : LOSS_NONE);
	}
	if (reply && !replied) {
		if (chat_opening(e, "ASSISTANT", out) < 0)
			return -1;
		append_loss_mask(loss_mask, out, LOSS_NONE);
	} else if (!reply && replied) {
		if (end < 0)
			return fail("the tokenizer has no end token; expected one, for it ends the assistant's reply");
		append_id(out, end);
		append_loss_mask(loss_mask, out, learned ? LOSS_TOKEN : LOSS_NONE);
	}
	return 0;
}
