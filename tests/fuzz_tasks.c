/*
 * fuzz_tasks.c - libFuzzer target for tasks. The first byte chooses: JSON lines for three fixed tasks, or a task file
 * for fixed lines. What is accepted must be sound, and give results that are JSON whatever the replies are.
 */
#define _GNU_SOURCE
#include "tests/fuzz.h"

#include "commands/tasks.h"

#include <jansson.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static const char yaml[] =
	"- {name: a, type: multiple_choice, data: d.jsonl, prompt: '{q.0.x}{n}', options: o, option: ' {option}{q}', "
			"answer: a, answer_form: letter,\n"
	"   examples: {count: 1}}\n"
	"- {name: b, type: multiple_choice, data: d.jsonl, prompt: '{q}', options: ['{x}', y], "
	"answer: a, answer_form: text}\n",
	texts[] = "- {name: c, type: perplexity, data: d.jsonl, text: '{{{text}}}'}\n",
	replies[] =
			"- {name: d, type: exact_match, data: d.jsonl, prompt: '{q}', answer: a, extract: '(\\w*?)\\b', "
			"extract_answer: '(.+)', match: last,\n"
	"   stop: [x, \"\\n\"], normalize: {lowercase: true, punctuation: false}}\n",
	lines[] = "{\"q\": \"sky\", \"o\": [\"blue\", \"green\"], \"a\": 1, \"text\": \"t\", "
		"\"list\": [{\"x\": \"B\"}]}\n";

static void check_result(struct results *r, const struct task *t, const struct sample *s, const struct text *reply)
{
	struct scored_tokens *scored = calloc(s->num_choices + 1, sizeof *scored);
	struct sample_result result = {.sample = s, .scored = scored};
	if (t->type == TASK_MULTIPLE_CHOICE && (s->answer < 0 || s->answer >= s->num_choices || s->num_choices < 2 ||
			!s->target.size))
		abort();
	if (t->type == TASK_EXACT_MATCH) {
		result.reply = *reply;
		result.correct = task_reply_is_right(t, s, &result.reply, &result.extracted, &result.matched);
		if (result.correct && !result.matched)
			abort();
	}
	results_add(r, t, &result);
	free(result.extracted.data);
	free(scored);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	if (size < 1)
		return 0;
	const int mode = *data++ % 4;
	size--;
	const char *task_file = fuzz_file("t.yaml", mode == 0 ? yaml : mode == 1 ? texts : mode == 2 ? replies :
			(const char *)data,
			mode == 0 ? sizeof yaml - 1 : mode == 1 ? sizeof texts - 1 : mode == 2 ? sizeof replies - 1 : size);
	fuzz_file("d.jsonl", mode == 3 ? (const uint8_t *)lines : data, mode == 3 ? sizeof lines - 1 : size);
	struct tasks tasks;
	error_text[0] = 0;
	if (tasks_load(&tasks, task_file) < 0) {
		if (!*error_text)
			abort();
		tasks_free(&tasks);
		return 0;
	}
	struct text reply = {0};
	struct task_result *result = calloc(tasks.count, sizeof *result);
	struct results *r = results_open(fuzz_path(""));
	int64_t count = 0;
	text_append(&reply, (const char *)data, size);
	for (int64_t i = 0; i < tasks.count; i++) {
		const struct task *t = &tasks.task[i];
		if (t->num_samples < 1 || t->num_samples > t->samples.count)
			abort();
		for (int64_t j = 0; j < t->num_samples; j++, count++)
			check_result(r, t, &t->samples.sample[j], &reply);
		result[i] = (struct task_result){.task = t, .num_scores = 1, .score = {{"x", NAN, 0}}};
	}
	const struct evaluation_facts facts = {"m", "t", 0, 1};
	json_t *report = results_report(&facts, result, tasks.count);
	if (!report || results_finish(r, report) < 0)
		abort();
	json_decref(report);
	FILE *f = fopen(fuzz_path("samples.jsonl"), "r");
	json_t *line;
	while (f && (line = json_loadf(f, JSON_DISABLE_EOF_CHECK | JSON_ALLOW_NUL, NULL)))
		json_decref(line), count--;
	if (!f || count || fclose(f))
		abort();
	free(reply.data);
	free(result);
	tasks_free(&tasks);
	return 0;
}
