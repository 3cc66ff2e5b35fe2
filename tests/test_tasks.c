/*
 * test_tasks.c - scored evaluation: what a task file may say and with which words it is refused, how samples become
 * token sequences, and that their scores are those of plain loops, the same to the last bit however the work is cut.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "files/tokenizer.h"
#include "ling.h"
#include "commands/tasks.h"
#include "commands/scoring.h"
#include "commands/engine.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zlib.h>
#include <zstd.h>

#include "test.h"

#define assert_done(call) do { if ((call) < 0) fail_msg("%s", error_text); } while (0)

#define QUESTION "{\"q\": \"2+2=\", \"o\": [\" 3\", \" 4\"], \"a\": 1}\n"
#define CHOICE "- {name: c, type: multiple_choice, data: d.jsonl, prompt: \"{q}\", options: o, answer: a"
#define PROMPT "- {name: x, type: multiple_choice, data: d.jsonl, prompt: "
#define MATCH "- {name: m, type: exact_match, data: d.jsonl, prompt: \"{q}\", answer: a"
#define TEXT "- {name: p, type: perplexity, data: d.jsonl"

static int load(struct tasks *tasks, const char *yaml, const char *lines)
{
	put_string(at("d.jsonl"), lines);
	return tasks_load(tasks, put_string(at("t.yaml"), yaml));
}

static void load_ok(struct tasks *tasks, const char *yaml, const char *lines)
{
	assert_done(load(tasks, yaml, lines));
}

#define assert_text(found, expected) do { \
		assert_int_equal((found).size, strlen(expected)); \
		assert_memory_equal((found).data, expected, strlen(expected)); \
	} while (0)

/* ---------------------------------------------------------------------------------------------- task files */

static void test_templates(void **state)
{
	(void)state;
	struct tasks tasks;
	load_ok(&tasks, "- name: c\n  type: multiple_choice\n  data: d.jsonl\n"
			"  prompt: \"{{{q}}} {n} {r} {b}, {deep.list.1.x}{zero}:\"\n"
			"  options: deep.words\n  option: \" {option.t}/{q}\"\n  answer: deep.right\n  answer_form: number\n",
			"{\"q\": \"a\\u00e9\\nb\", \"n\": -7, \"r\": 0.1, \"b\": true, \"zero\": \"x\\u0000y\", "
			"\"deep\": {\"list\": [0, {\"x\": 3.0}], \"right\": \"2\","
			" \"words\": [{\"t\": \"A\"}, {\"t\": \"B\"}]}}\n");
	const struct sample *s = tasks.task[0].samples.sample;
	const char prompt[] = "{a\xc3\xa9\nb} -7 0.1 true, 3x\0y:";
	assert_int_equal(s->prompt.size, sizeof prompt - 1);
	assert_memory_equal(s->prompt.data, prompt, sizeof prompt - 1);
	assert_int_equal(s->num_choices, 2);
	assert_text(s->choice[0], " A/a\xc3\xa9\nb");
	assert_text(s->choice[1], " B/a\xc3\xa9\nb");
	assert_int_equal(s->answer, 1);
	assert_text(s->target, " B/a\xc3\xa9\nb");
	tasks_free(&tasks);
	/* .strip(): white space of Unicode too, and nothing but it; of an item's field; of a null */
	load_ok(&tasks, "- {name: c, type: multiple_choice, data: d.jsonl, "
			"prompt: \"|{q.strip()}|{n.strip()}|{e.strip()}\", options: o, "
			" option: \" {option.t.strip()}\", answer: a, on_null: empty}",
			"{\"q\": \"\\u3000\\t \\u00a0a  b\\u00e9\\u2009\\n\", \"n\": null, \"e\": \" \\u0085\", "
			"\"o\": [{\"t\": \" x \"}, {\"t\": \"\\u4f60\"}], \"a\": 1}");
	s = tasks.task[0].samples.sample;
	assert_text(s->prompt, "|a  b\xc3\xa9||");
	assert_text(s->choice[0], " x");
	assert_text(s->choice[1], " \xe4\xbd\xa0");
	tasks_free(&tasks);
	/* an integer of more than 64 bits, here and where nobody reads it */
	load_ok(&tasks, MATCH "}", "{\"q\": 123456789012345678901234567890, "
			"\"id\": 123456789012345678901234567890, \"a\": 1}");
	assert_text(tasks.task[0].samples.sample[0].prompt, "123456789012345678901234567890");
	tasks_free(&tasks);
}

static void test_answers(void **state)
{
	(void)state;
	static const struct { const char *form, *value; int answer; } cases[] = {
		{"index", "1", 1}, {"index", "\"0\"", 0}, {"number", "1", 0}, {"number", "2", 1}, {"letter", "\"B\"", 1},
		{"letter", "\" a \"", 0},
		{"text", "\"4\"", 1}, {"text", "\" 3\"", 0},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct tasks tasks;
		char yaml[256], line[128];
		snprintf(yaml, sizeof yaml, CHOICE ", answer_form: %s}", cases[i].form);
		snprintf(line, sizeof line, "{\"q\": \"\", \"o\": [\" 3\", \" 4\"], \"a\": %s}\n", cases[i].value);
		load_ok(&tasks, yaml, line);
		assert_int_equal(tasks.task[0].samples.sample[0].answer, cases[i].answer);
		tasks_free(&tasks);
	}
	/* Templates as options: the answer's text may be among them. */
	struct tasks tasks;
	load_ok(&tasks, PROMPT "x, options: [\" {good}\", ' no'], answer: a, answer_form: text}",
			"{\"good\": \"yes\", \"a\": \"no\"}\n\n{\"good\": \"no\", \"a\": \"no\"}");
	assert_int_equal(tasks.task[0].samples.count, 2);
	assert_int_equal(tasks.task[0].samples.sample[0].answer, 1);
	assert_int_equal(tasks.task[0].samples.sample[1].answer, 0); /* two are alike: the first */
	assert_int_equal(tasks.task[0].samples.sample[1].line, 3);
	tasks_free(&tasks);
}

/* Labels as answers: in a list of their own, or in the options. */
static void test_labels(void **state)
{
	(void)state;
	struct tasks tasks;
	load_ok(&tasks, PROMPT "x, options: c.text, answer: k, answer_form: label, labels: c.label}",
			"{\"c\": {\"text\": [\"w\", \"i\"], \"label\": [\"A\", \"B\"]}, \"k\": \"B\"}\n"
			"{\"c\": {\"text\": [\"w\", \"i\", \"j\"], \"label\": [\"1\", 2, \"3\"]}, \"k\": \" 2\"}\n");
	assert_int_equal(tasks.task[0].samples.sample[0].answer, 1);
	assert_int_equal(tasks.task[0].samples.sample[1].answer, 1);
	tasks_free(&tasks);
	load_ok(&tasks, PROMPT "x, options: q.c, option: \" {option.text}\", answer: k, answer_form: label, "
			"labels: \"{option.label}\"}",
			"{\"q\": {\"c\": [{\"text\": \"w\", \"label\": \"B\"}, {\"text\": \"i\", \"label\": \"A\"}]}, "
			"\"k\": \"A\"}\n");
	assert_int_equal(tasks.task[0].samples.sample[0].answer, 1);
	assert_text(tasks.task[0].samples.sample[0].target, " i");
	tasks_free(&tasks);
}

static void test_nulls(void **state)
{
	(void)state;
	static const char lines[] = "{\"q\": null, \"a\": 1}\n{\"q\": \"x\", \"a\": null}\n{\"q\": \"y\", \"a\": 3}\n";
	struct tasks tasks;
	load_ok(&tasks, MATCH ", on_null: skip, limit: 1}", lines);
	assert_int_equal(tasks.task[0].samples.count, 1);
	assert_int_equal(tasks.task[0].samples.skipped, 2);
	assert_int_equal(tasks.task[0].samples.sample[0].line, 3);
	tasks_free(&tasks);
	load_ok(&tasks, MATCH ", on_null: empty, limit: 1}", lines);
	assert_int_equal(tasks.task[0].samples.sample[0].prompt.size, 0);
	assert_int_equal(tasks.task[0].samples.skipped, 0);
	tasks_free(&tasks);
	/* an answer cannot be empty, one of a list neither; by default nothing may be null */
	static const struct { const char *task, *line; } bad[] = {
		{MATCH ", on_null: empty}", "{\"q\": \"x\", \"a\": null}\n"},
		{MATCH ", on_null: empty}", "{\"q\": \"x\", \"a\": [\"1\", null]}\n"},
		{CHOICE ", on_null: empty}", "{\"q\": \"x\", \"o\": [\"3\", \"4\"], \"a\": null}\n"},
		{CHOICE ", on_null: empty}", "{\"q\": \"x\", \"o\": [\"3\", null], \"a\": 0}\n"},
		{MATCH "}", "{\"q\": null, \"a\": \"1\"}\n"}, {CHOICE "}", "{\"q\": \"x\", \"o\": [\"3\", null], \"a\": 0}\n"},
	};
	for (int i = 0; i < COUNT(bad); i++) {
		assert_int_equal(load(&tasks, bad[i].task, bad[i].line), -1);
		expect_error(i == 3 ? "d.jsonl:1: option 2 is empty" : "d.jsonl:1: the field `|` is null; expected a string");
		tasks_free(&tasks);
	}
	/* in an option: an item of the list, a template of one, the list itself */
	static const char options[] = "{\"o\": [\"x\", null], \"y\": 1, \"a\": 0}\n{\"o\": null, \"y\": 1, \"a\": 0}\n"
			"{\"o\": [\"x\", \"y\"], \"y\": null, \"a\": 1}\n{\"o\": [\"x\", \"y\"], \"y\": 1, \"a\": 1}\n";
	load_ok(&tasks, PROMPT "x, options: o, option: \" {option}\", answer: a, on_null: skip}", options);
	assert_int_equal(tasks.task[0].samples.count, 2);
	assert_int_equal(tasks.task[0].samples.skipped, 2);
	assert_int_equal(tasks.task[0].samples.sample[0].line, 3);
	tasks_free(&tasks);
	load_ok(&tasks, PROMPT "x, options: [\" x\", \" {y}\"], answer: a, on_null: skip}", options);
	assert_int_equal(tasks.task[0].samples.count, 3);
	assert_int_equal(tasks.task[0].samples.sample[2].line, 4);
	tasks_free(&tasks);
	assert_int_equal(load(&tasks, PROMPT "x, options: o, option: \" {option}\", answer: a}", options), -1);
	assert_non_null(strstr(error_text, "d.jsonl:1: the field `option` is null"));
	tasks_free(&tasks);
}

/* Data as one JSON value: an array, an object, an array in an object; a byte order mark. */
static void test_values(void **state)
{
	(void)state;
	static const struct { const char *keys, *data; int count; } cases[] = {
		{"", "\n[{\"q\": 1,\n\"a\": 2}, {\"q\": 3, \"a\": 4}]\n", 2},
		{", limit: 1", "[{\"q\": 1, \"a\": 2}, {\"q\": 3, \"a\": 4}]", 1},
		{"", "{\n\t\"q\": 1,\n\t\"a\": 2\n}\n", 1},
		{", field: d.e", "{\"canary\": \"x\", \"d\": {\"e\": [{\"q\": 1, \"a\": 2}, {\"q\": 3, \"a\": 4}]}}", 2},
		{"", "\xef\xbb\xbf{\"q\": 1, \"a\": 2}\n{\"q\": 3, \"a\": 4}", 2},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct tasks tasks;
		char yaml[256];
		snprintf(yaml, sizeof yaml, MATCH "%s}", cases[i].keys);
		load_ok(&tasks, yaml, cases[i].data);
		assert_int_equal(tasks.task[0].samples.count, cases[i].count);
		assert_text(tasks.task[0].samples.sample[0].prompt, "1");
		if (cases[i].count > 1) {
			assert_text(tasks.task[0].samples.sample[1].prompt, "3");
			assert_int_equal(tasks.task[0].samples.sample[1].line, 2);
		}
		tasks_free(&tasks);
	}
}

/* The same samples from files that gzip or zstd has packed, under any name; damage and foreign formats have names. */
static void test_packed_data(void **state)
{
	(void)state;
	static const char lines[] = "\xef\xbb\xbf{\"q\": 1, \"a\": 2, \"p\": NaN}\n"
			"{\"q\": 3, \"a\": 4, \"p\": \"\\udc00\"}\n",
			array[] = "[{\"q\": 1, \"a\": 2, \"p\": 1e400},\n{\"q\": 3, \"a\": 4}]",
			object[] = "{\"f\": [{\"q\": 1, \"a\": 2}, {\"q\": 3, \"a\": 4}]}";
	static const struct { const char *name, *keys, *data; } cases[] = {
		{"d.jsonl", "", lines}, {"d.json", "", array}, {"d", "", lines}, {"d.jsonl", ", field: f", object},
		{"d.json", ", field: f", object},
	};
	static const char *const endings[] = {"", ".gz", ".zst", ".ZSTD"};
	struct tasks tasks;
	char yaml[PATH_LEN], data[PATH_LEN];
	uint8_t packed[1024];
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
		for (int k = 0; k < 4; k++) {
			const size_t n = strlen(cases[i].data);
			snprintf(data, sizeof data, "%s", at("%s%s", cases[i].name, endings[k]));
			snprintf(yaml, sizeof yaml, "- {name: m, type: exact_match, data: %s%s, prompt: \"{q}\", answer: a%s}",
					cases[i].name, endings[k], cases[i].keys);
			if (k == 1) {
				gzFile f = gzopen(data, "wb");
				assert_true(f && gzwrite(f, cases[i].data, n) == (int)n && gzclose(f) == Z_OK);
			} else
				put_file(data, k ? (void *)packed : (void *)cases[i].data,
						k ? ZSTD_compress(packed, sizeof packed, cases[i].data, n, 3) : n);
			assert_done(tasks_load(&tasks, put_string(at("t.yaml"), yaml)));
			assert_int_equal(tasks.task[0].samples.count, 2);
			assert_text(tasks.task[0].samples.sample[0].prompt, "1");
			assert_text(tasks.task[0].samples.sample[1].prompt, "3");
			tasks_free(&tasks);
		}
	gzFile f = gzopen(at("whole.gz"), "wb");
	assert_true(f && gzwrite(f, lines, sizeof lines - 1) > 0 && gzclose(f) == Z_OK);
	size_t n;
	uint8_t *whole = get_file(at("whole.gz"), &n);
	put_file(at("d.jsonl"), whole, n - 9);
	free(whole);
	assert_int_equal(tasks_load(&tasks, put_string(at("t.yaml"), MATCH "}")), -1);
	expect_error("d.jsonl: ends in the middle of what is packed|; task m names it");
	tasks_free(&tasks);
	assert_int_equal(load(&tasks, MATCH "}", "PAR1 and so on"), -1);
	expect_error("d.jsonl: is a Parquet file");
	tasks_free(&tasks);
}

static void test_bad_files(void **state)
{
	(void)state;
	static const struct { const char *yaml, *lines, *words[3]; } cases[] = {
		{"", QUESTION, {"t.yaml", "empty"}},
		{"[]", QUESTION, {"t.yaml:1", "at least one task"}},
		{"name: x", QUESTION, {"t.yaml:1", "list of tasks"}},
		{"- 3", QUESTION, {"t.yaml:1", "list of tasks"}},
		{"- {name: a\n\tb: c}", QUESTION, {"t.yaml:2", "bad YAML"}},
		{CHOICE ", promt: x}", QUESTION, {"t.yaml:1", "promt", "did you mean prompt"}},
		{CHOICE ", prompt: x}", QUESTION, {"t.yaml:1", "duplicate key prompt"}},
		{CHOICE ", limit: -1}", QUESTION, {"limit", "-1"}},
		{CHOICE ", chat: maybe}", QUESTION, {"chat", "maybe", "true or false"}},
		{CHOICE ", max_tokens: 3}", QUESTION, {"max_tokens", "multiple_choice", "no use"}},
		{CHOICE ", normalize: {strip: true}}", QUESTION, {"normalize", "no use"}},
		{TEXT ", prompt: x}", QUESTION, {"prompt", "perplexity", "no use"}},
		{TEXT ", examples: {count: 1}}", QUESTION, {"examples", "no use"}},
		{CHOICE ", examples: {seed: 1}}", QUESTION, {"t.yaml:1", "count", "missing"}},
		{CHOICE ", chat: true, separator: x}", QUESTION, {"separator", "chat"}},
		{"- {type: perplexity, data: d.jsonl}", QUESTION, {"t.yaml:1", "name", "missing"}},
		{"- {name: x, data: d.jsonl}", QUESTION, {"type", "missing"}},
		{"- {name: x, type: words, data: d.jsonl}", QUESTION,
			{"type", "words", "multiple_choice | perplexity | exact_match"}},
		{"\n- {name: x, type: multiple_choice, data: d.jsonl, options: o, answer: a}", QUESTION,
			{"t.yaml:2", "prompt", "missing"}},
		{"- {name: x, type: exact_match, data: d.jsonl, prompt: o}", QUESTION, {"answer", "missing"}},
		{CHOICE "}\n" CHOICE "}", QUESTION, {"t.yaml:2", "name", "twice"}},
		{PROMPT "\"{q\", options: o, answer: a}", QUESTION, {"prompt", "{field}"}},
		{PROMPT "\"q}\", options: o, answer: a}", QUESTION, {"prompt", "}}"}},
		{PROMPT "\"{}\", options: o, answer: a}", QUESTION, {"prompt", "{field}"}},
		{PROMPT "q, options: [x, '{'], answer: a}", QUESTION, {"options", "{field}"}},
		{PROMPT "q, options: [x, {y: z}], answer: a}", QUESTION, {"options", "mapping"}},
		{PROMPT "q, options: [], answer: a}", QUESTION, {"options", "empty list"}},
		{PROMPT "q, options: [x, y], option: z, answer: a}", QUESTION, {"option", "list of templates"}},
		{MATCH ", extract: \"(\"}", QUESTION, {"extract", "byte 1"}},
		{MATCH ", extract: \"a+\"}", QUESTION, {"extract", "group"}},
		{MATCH ", match: last}", QUESTION, {"match", "extract"}},
		{MATCH ", stop: [\"\"]}", QUESTION, {"stop"}},
		{CHOICE "}", "", {"d.jsonl", "no sample", "task c"}},
		{CHOICE "}", " \n\n", {"d.jsonl", "no sample"}},
		{CHOICE "}", QUESTION "{\"q\": }\n", {"d.jsonl:2", "bad JSON"}},
		{CHOICE "}", QUESTION "[1]\n", {"d.jsonl:2", "an array", "object"}},
		{CHOICE "}", QUESTION "{\"q\": 1, \"q\": 2}\n", {"d.jsonl:2", "duplicate"}},
		{CHOICE "}", "{\"o\": [\"a\", \"b\"], \"a\": 1}", {"d.jsonl:1", "`q`", "missing"}},
		{CHOICE "}", "{\"q\": [1], \"o\": [\"a\", \"b\"], \"a\": 1}", {"d.jsonl:1", "`q`", "an array"}},
		{CHOICE "}", "{\"q\": \"\", \"a\": 1}", {"d.jsonl:1", "`o`", "list of options"}},
		{CHOICE "}", "{\"q\": \"\", \"o\": [\"x\"], \"a\": 0}", {"d.jsonl:1", "1 option", "2 to"}},
		{CHOICE "}", "{\"q\": \"\", \"o\": [\"x\", {}], \"a\": 0}", {"d.jsonl:1", "`option`", "an object"}},
		{CHOICE "}", "{\"q\": \"\", \"o\": [\"x\", \"\"], \"a\": 0}", {"d.jsonl:1", "option 2 is empty"}},
		{CHOICE "}", "{\"q\": \"\", \"o\": [\"x\", \"y\"], \"a\": 2}", {"d.jsonl:1", "`a`", "0 to 1"}},
		{CHOICE "}", "{\"q\": \"\", \"o\": [\"x\", \"y\"], \"a\": -1}", {"d.jsonl:1", "\"-1\"", "0 to 1"}},
		{CHOICE "}", "{\"q\": \"\", \"o\": [\"x\", \"y\"], \"a\": \"\"}", {"d.jsonl:1", "`a`"}},
		{CHOICE "}", "{\"q\": \"\", \"o\": [\"x\", \"y\"]}", {"d.jsonl:1", "`a`", "missing"}},
		{CHOICE ", answer_form: number}", "{\"q\": \"\", \"o\": [\"x\", \"y\"], \"a\": 0}", {"d.jsonl:1", "1 to 2"}},
		{CHOICE ", answer_form: letter}", "{\"q\": \"\", \"o\": [\"x\", \"y\"], \"a\": \"c\"}",
			{"d.jsonl:1", "A to B"}},
		{CHOICE ", answer_form: text}", "{\"q\": \"\", \"o\": [\"x\", \"y\"], \"a\": \"z\"}",
			{"d.jsonl:1", "\"z\"", "text of one of the 2"}},
		{MATCH "}", "{\"q\": NaN, \"a\": 1}", {"d.jsonl:1", "`q` is NaN"}},
		{MATCH "}", "{\"q\": 1, \"a\": \"\\ud800\"}", {"d.jsonl:1", "half of a surrogate pair"}},
		{MATCH "}", "{\"q\": \"\", \"a\": []}", {"d.jsonl:1", "empty list"}},
		{MATCH "}", "{\"q\": \"\", \"a\": [\"x\", null]}", {"d.jsonl:1", "null"}},
		{MATCH ", extract_answer: \"#(.)\"}", "{\"q\": \"\", \"a\": \"x\"}", {"d.jsonl:1", "extract_answer"}},
		{MATCH "}", "{\"q\": null, \"a\": 1}", {"d.jsonl:1", "null", "on_null"}},
		{MATCH ", on_null: skip}", "{\"q\": null, \"a\": 1}", {"d.jsonl", "on_null is skip"}},
		{MATCH ", normalize: {ignore: \"(\"}}", QUESTION, {"normalize.ignore", "byte 1"}},
		{MATCH "}", "[{\"q\": 1, \"a\": 2}, 3]", {"record 2", "an integer"}},
		{MATCH "}", "[{\"q\": 1,\n \"a\": }]", {"d.jsonl:2", "bad JSON"}},
		{MATCH "}", "{\"canary\": 1, \"examples\": [{\"q\": 1, \"a\": 2}]}", {"`q`", "field: examples"}},
		{MATCH ", field: b}", "{\"canary\": 1}", {"`b` is missing", "array of samples"}},
		{MATCH ", field: b}", QUESTION QUESTION, {"d.jsonl", "no JSON object", "field"}},
		{MATCH ", examples: {choose: first}}", QUESTION, {"examples.choose", "count", "missing"}},
		{MATCH ", examples: {count: 1, choose: first, seed: 3}}", QUESTION, {"examples.seed", "choose: first"}},
		{CHOICE ", answer_form: label}", QUESTION, {"answer_form", "labels"}},
		{CHOICE ", labels: l}", QUESTION, {"labels", "answer_form: label"}},
		{CHOICE ", answer_form: label, labels: l}", "{\"q\": 1, \"o\": [1, 2], \"l\": [\"A\"], \"a\": \"A\"}",
			{"`l`", "2 options"}},
		{CHOICE ", answer_form: label, labels: l}", "{\"q\": 1, \"o\": [1, 2], \"l\": [3, 3], \"a\": 3}",
			{"same label"}},
		{CHOICE ", answer_form: label, labels: l}", "{\"q\": 1, \"o\": [1, 2], \"l\": [3, 4], \"a\": 5}",
			{"\"5\"", "label of one of the 2"}},
		{CHOICE ", group: g}\n" MATCH ", group: g}", QUESTION, {"t.yaml:2", "group", "one type"}},
		{TEXT "}", "{\"text\": \"\"}", {"d.jsonl:1", "empty"}},
		{TEXT ", text: \"{t}\"}", "{\"text\": \"x\"}", {"d.jsonl:1", "`t`", "missing"}},
		{"- {name: p, type: perplexity, data: none.jsonl}", "", {"none.jsonl", "No such file", "task p"}},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct tasks tasks;
		error_text[0] = 0;
		if (load(&tasks, cases[i].yaml, cases[i].lines) == 0)
			fail_msg("accepted: %s %s", cases[i].yaml, cases[i].lines);
		for (int w = 0; w < 3 && cases[i].words[w]; w++)
			if (!strstr(error_text, cases[i].words[w]))
				fail_msg("\"%s\" is not in: %s", cases[i].words[w], error_text);
		if (getenv("SHOW"))
			print_message("%s\n", error_text);
		tasks_free(&tasks);
	}
}

/* Data lie beside the task file, wherever ling was started. */
static void test_paths(void **state)
{
	(void)state;
	struct tasks tasks;
	assert_done(make_directories(at("sub/lines")));
	put_string(at("sub/lines/x.jsonl"), "{\"text\": \"abc\"}");
	put_string(at("sub/t.yaml"), "- {name: p, type: perplexity, data: lines/x.jsonl}");
	assert_done(tasks_load(&tasks, at("sub/t.yaml")));
	assert_text(tasks.task[0].samples.sample[0].prompt, "abc");
	tasks_free(&tasks);
	char yaml[PATH_LEN + 64];
	snprintf(yaml, sizeof yaml, "- {name: p, type: perplexity, data: %s}", at("sub/lines/x.jsonl"));
	assert_done(tasks_load(&tasks, put_string(at("t.yaml"), yaml)));
	tasks_free(&tasks);
}

/* ------------------------------------------------------------------------------------------------- replies */

static bool is_right(const char *keys, const char *answer, const char *reply, const char *extracted)
{
	struct tasks tasks;
	char yaml[512], line[256];
	struct text text = {0}, out = {0};
	bool found;
	snprintf(yaml, sizeof yaml, MATCH "%s}", keys);
	snprintf(line, sizeof line, "{\"q\": \"x\", \"a\": %s}", answer);
	load_ok(&tasks, yaml, line);
	text_append(&text, reply, strlen(reply));
	const bool right = task_reply_is_right(&tasks.task[0], tasks.task[0].samples.sample, &text, &out, &found);
	assert_int_equal(found, extracted != NULL);
	if (found)
		assert_string_equal(out.data ? out.data : "", extracted);
	free(text.data), free(out.data);
	tasks_free(&tasks);
	return right;
}

static void test_replies(void **state)
{
	(void)state;
	assert_true(is_right("", "\"12\"", " 12\n", "12"));
	assert_true(is_right("", "12", "12", "12"));
	assert_true(is_right("", "[\"a\", \"b\"]", "b", "b"));
	assert_false(is_right("", "\"12\"", "13", "13"));
	assert_false(is_right("", "\"12\"", "", ""));
	assert_false(is_right(", normalize: {strip: false}", "\"12\"", "12 ", "12 "));
	assert_false(is_right("", "\"Ab\"", "ab", "ab"));
	assert_true(is_right(", normalize: {lowercase: true}", "\"Ab\"", "aB", "ab"));
	assert_true(is_right(", normalize: {punctuation: false}", "\"1,200\"", "(1200).", "1200"));
	/* without punctuation, numbers stay what they are */
#define PLAIN ", normalize: {punctuation: false}"
	assert_false(is_right(PLAIN, "\"-3\"", "3", "3"));
	assert_true(is_right(PLAIN, "\"-3\"", "(-3).", "-3"));
	assert_false(is_right(PLAIN, "\"1.5\"", "15", "15"));
	assert_false(is_right(PLAIN, "\".5\"", "5", "5"));
	assert_false(is_right(PLAIN, "\"-$5\"", "$5", "5"));
	assert_false(is_right(PLAIN, "\"3/4\"", "34", "34"));
	assert_false(is_right(PLAIN, "\"10:30\"", "1030", "1030"));
	assert_false(is_right(PLAIN, "\"1,2\"", "12", "12"));
	assert_true(is_right(PLAIN, "\"1,234,567.5\"", "$1234567.5.", "1234567.5"));
	assert_true(is_right(PLAIN, "\"a-b, c.d... e\"", "ab cd e", "ab cd e"));
	/* numbers as numbers */
#define NUMBER ", normalize: {number: true}"
	static const struct { const char *answer, *reply, *plain; bool right; } numbers[] = {
		{"\"1003\"", "1,003", "1003", true}, {"\"1003\"", " $1,003.00. ", "1003", true},
		{"1003", "1003.5", "1003.5", false},
		{"\"-3\"", "3", "3", false}, {"-3", "\xe2\x88\x92" "3", "-3", true}, {"3", "+3", "3", true},
		{"15", "1.5", "1.5", false},
		{"0.5", ".50", "0.5", true}, {"50", "50%", "50", true}, {"\"0.5\"", "50%", "50", false},
		{"0", "-0.0", "0", true},
		{"\"-$5\"", "$-5.", "-5", true}, {"\"5 \u20ac\"", "\xe2\x82\xac" "5", "5", true},
		{"\"1e3\"", "1,000", "1000", true},
		{"\"2.5e-3\"", "0.0025", "0.0025", true}, {"120", "0120", "120", true}, {"\"1,2\"", "12", "12", false},
		{"\"12,34,567\"", "1234567", "1234567", false}, {"\"0,500\"", "500", "500", false}, {"\"x\"", "x", "x", true},
		{"\"1.2.3\"", "1.2.3", "1.2.3", true}, {"\"\"", "-", "-", false}, {"\"5 apples\"", "5", "5", false},
		{"\"9007199254740993\"", "9007199254740992", "9007199254740992", false},
		{"123456789012345678901234567890", "123,456,789,012,345,678,901,234,567,890.0",
			"123456789012345678901234567890", true},
	};
	for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
		if (is_right(NUMBER, numbers[i].answer, numbers[i].reply, numbers[i].plain) != numbers[i].right)
			fail_msg("%s and %s", numbers[i].answer, numbers[i].reply);
	assert_true(is_right(", normalize: {number: true, punctuation: false}", "\"(1,003.0)\"", "1003", "1003"));
	/* what is ignored */
	assert_true(is_right(", normalize: {ignore: [\",\", \"(?s).*#### \"]}",
			"\"1 and 2\\n#### 1,003\"", "1003", "1003"));
	assert_true(is_right(", normalize: {ignore: \"x*\"}", "\"a\\u00e9b\"", "xa\xc3\xa9xxb", "a\xc3\xa9" "b"));
	assert_true(is_right(", extract: \"is (\\\\d+)\"", "5", "one is 5, two is 6", "5"));
	assert_true(is_right(", extract: \"is (\\\\d+)\", match: last", "6", "one is 5, two is 6", "6"));
	assert_false(is_right(", extract: \"is (\\\\d+)\"", "5", "5", NULL));
	assert_true(is_right(", extract: \"#### (.*)\", extract_answer: \"#### (.*)\"",
			"\"2 and 3 #### 5\"", "so #### 5", "5"));
	/* of several groups the one that has something: lm-evaluation-harness's flexible-extract, and what it ignores */
#define FLEXIBLE ", match: last, extract: \"(-?[$0-9.,]{2,})|(-?[0-9]+)\", " \
	"extract_answer: \"#### (-?[0-9.,]+)\", normalize: {"
#define IGNORES "lowercase: true, ignore: [\",\", \"\\\\$\", \"(?s).*#### \", \"\\\\.$\"]}"
	assert_true(is_right(FLEXIBLE "number: true}", "\"3 and 2\\n#### 5\"", "12 of them, so 5 apples", "5"));
	assert_true(is_right(FLEXIBLE IGNORES, "\"#### 5\"", "12 of them, so 5 apples", "5"));
	assert_true(is_right(FLEXIBLE IGNORES, "\"#### 1,200\"", "It is 3, or $1,200.", "1200"));
	assert_false(is_right(FLEXIBLE IGNORES, "\"#### -12\"", "It is 12", "12"));
	assert_false(is_right(FLEXIBLE IGNORES, "\"#### 18\"", "It is 18.00", "18.00"));
	assert_true(is_right(FLEXIBLE "number: true}", "\"#### 18\"", "It is 18.00", "18"));
	/* a group that takes no part, an empty match, bytes that are no UTF-8 */
	assert_true(is_right(", extract: \"x|(y)\"", "\"y\"", "x y", "y"));
	assert_true(is_right(", extract: \"(z*)\", match: last", "\"\"", "\xe4\xbd\xa0zz", ""));
	assert_true(is_right(", extract: \"a(.)\"", "\"b\"", "\xff" "ab\x80", "b"));
	/* a pattern that would take for ever is one that does not match */
	assert_false(is_right(", extract: \"((a+)+)$\"", "\"a\"",
			"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", NULL));
}

/* --------------------------------------------------------------------------------------------------- models */

enum { WINDOW = 48, BATCH = 5, BYTES = 257 };

/* A model over bytes whose every part matters, and whose tokens depend on all before them. */
static void make_model_for(struct model *m, int tokens)
{
	const struct model_config c = {.hidden_size = 16, MODEL_DEFAULTS, .num_hidden_layers = 2, .num_attention_heads = 4,
		.num_key_value_heads = 2, .head_dim = 6, .vocab_size = 270, .num_experts = 6, .num_experts_per_tok = 2,
		.num_shared_experts = 1, .moe_intermediate_size = 8, .max_position_embeddings = 64, .norm_topk_prob = true,
		.norm_head = true, .rope_theta = 1e4,
		.rms_norm_eps = 1e-5, .initializer_range = 0.4};
	struct layout alone = layout_of_rank(0, 1, 1, 1);
	assert_done(model_init(m, &c, &alone, 1, tokens, EVALUATE));
	model_randomize(m, 7);
}

static void make_model(struct model *m)
{
	make_model_for(m, WINDOW);
}

/* The log-probabilities of tokens 1 .. n-1 of a sequence by one plain forward pass. */
static void plain_scores(struct model *m, const int32_t *token, int64_t n, double *score)
{
	const int64_t V = m->config.vocab_size;
	int32_t input[WINDOW] = {0};
	real *logits = calloc(WINDOW * V, sizeof *logits);
	assert_true(n - 1 <= WINDOW);
	memcpy(input, token, (n - 1) * sizeof *token);
	model_forward(m, input, 1, NULL, NULL);
	model_logits(m, logits, 0, WINDOW);
	for (int64_t i = 1; i < n; i++) {
		double sum = 0;
		for (int64_t v = 0; v < V; v++)
			sum += exp(logits[(i - 1) * V + v]);
		score[i] = logits[(i - 1) * V + token[i]] - log(sum);
	}
	free(logits);
}

/* A byte text as tokens, perhaps behind the end of a text. */
static int64_t bytes_of(int32_t *out, bool begin, const char *text)
{
	int64_t n = 0;
	if (begin)
		out[n++] = 256;
	for (; *text; text++)
		out[n++] = (uint8_t)*text;
	return n;
}

static double plain_option(struct model *m, bool begin, const char *context, const char *option)
{
	int32_t token[256];
	double score[256], sum = 0;
	char whole[256];
	snprintf(whole, sizeof whole, "%s%s", context, option);
	const int64_t n = bytes_of(token, begin, whole);
	plain_scores(m, token, n, score);
	for (int64_t i = n - strlen(option); i < n; i++)
		sum += score[i];
	return sum;
}

static const struct tokenizer *byte_tokenizer(void)
{
	static struct tokenizer *t;
	if (!t)
		t = tokenizer_open("byte");
	return t;
}

/* Options that share beginnings, and single tokens; empty contexts; a window that is too short. */
#define QUESTIONS \
	"{\"q\": \"The sky is\", \"o\": [\" blue\", \" black and wide\", \" b\", \" green\"], \"a\": 0}\n" \
	"{\"q\": \"\", \"o\": [\"x\", \"yes\"], \"a\": 1}\n" \
	"{\"q\": \"one\", \"o\": [\"A\", \"B\", \"C\"], \"a\": 2}\n" \
	"{\"q\": \"same\", \"o\": [\" twice\", \" twice\", \" thrice\"], \"a\": 1}\n" \
	"{\"q\": \"A context that does not fit into the window of tokens\", \"o\": [\" long\", \" longer\"], \"a\": 0}\n" \
	"{\"q\": \"k\", \"o\": [\"l\", \"lm\", \"lmn\", \"lmno\"], \"a\": 3}\n" \
	"{\"q\": \"last\", \"o\": [\" first\", \" next\"], \"a\": 0}\n"

static void test_questions(void **state)
{
	(void)state;
	struct model m;
	struct tasks tasks;
	struct task_work w;
	struct task_result result;
	make_model(&m);
	load_ok(&tasks, CHOICE "}", QUESTIONS);
	assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), WINDOW));
	assert_int_equal(w.num_contexts, 7);
	assert_int_equal(w.longest, WINDOW);
	assert_done(task_run(&w, &m, &(struct engine_options){.max_requests = BATCH}));
	const struct samples *s = &tasks.task[0].samples;
	double best[NUM_ACCURACIES] = {0};
	for (int64_t i = 0, b = 0; i < s->count; i++) {
		const struct sample *x = &s->sample[i];
		/* what is left of a context that does not fit: 48 inputs, and the last byte of the longest option */
		const char *context = x->prompt.data ? x->prompt.data : "";
		if (i == 4)
			context += x->prompt.size - (WINDOW + 1 - strlen(" longer"));
		double score[NUM_ACCURACIES][4];
		assert_int_equal(w.contexts[i].cut, i == 4);
		for (int c = 0; c < x->num_choices; c++, b++) {
			const double expected = plain_option(&m, i == 1, context, x->choice[c].data);
			if (!(fabs(w.log_likelihood[b] - expected) < 1e-4))
				fail_msg("question %d, option %d: %.9g, expected %.9g", (int)i, c, w.log_likelihood[b], expected);
			score[0][c] = w.log_likelihood[b];
			score[1][c] = score[2][c] = w.log_likelihood[b] / x->choice[c].size;
			score[3][c] = w.log_likelihood[b] / (x->choice[c].size - (*x->choice[c].data == ' '));
		}
		for (int k = 0; k < NUM_ACCURACIES; k++) {
			int top = 0;
			for (int c = 1; c < x->num_choices; c++)
				top = score[k][c] > score[k][top] ? c : top;
			best[k] += top == x->answer;
		}
	}
	const double *alike = w.log_likelihood + w.contexts[3].first_continuation;
	assert_true(alike[0] == alike[1]);
	task_score(&w, &result, NULL);
	assert_int_equal(result.cut, 1);
	for (int k = 0; k < NUM_ACCURACIES; k++) {
		const double p = best[k] / 7;
		assert_true(fabs(result.score[k].value - p) < 1e-12);
		assert_true(fabs(result.score[k].standard_error - sqrt(p * (1 - p) / 6)) < 1e-12);
	}
	task_work_free(&w);
	tasks_free(&tasks);
	model_free(&m);
}

/* What acc_norm divides by: characters, not bytes, and of the white space at the beginning all but one. */
static void test_acc_norm(void **state)
{
	(void)state;
	static const struct { const char *options[2]; double log_likelihood[2]; int best; } cases[] = {
		{{" \xc3\xa9\xe4\xbd\xa0", " abc"}, {-3, -4}, 1}, /* -3 / 2 and -4 / 3 */
		{{"  ab", " wxy"}, {-3, -3.6}, 0},                 /* -3 / 3 and -3.6 / 3 */
		{{" a", " abcd"}, {-1, -3}, 1},                    /* -1 / 1 and -3 / 4 */
		{{"\na", "abc"}, {-2, -4}, 1},                     /* -2 / 1 and -4 / 3 */
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		struct tasks tasks;
		struct task_work w;
		struct task_result result;
		char yaml[256];
		snprintf(yaml, sizeof yaml, PROMPT "x, options: [\"%s\", \"%s\"], answer: a}",
				*cases[i].options[0] == '\n' ? "\\na" : cases[i].options[0], cases[i].options[1]);
		load_ok(&tasks, yaml, cases[i].best ? "{\"a\": 1}" : "{\"a\": 0}");
		assert_text(tasks.task[0].samples.sample[0].choice[0], cases[i].options[0]);
		assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), WINDOW));
		memcpy(w.log_likelihood, cases[i].log_likelihood, sizeof cases[i].log_likelihood);
		task_score(&w, &result, NULL);
		assert_string_equal(result.score[3].name, "acc_norm");
		if (result.score[3].value != 1)
			fail_msg("case %d", (int)i);
		task_work_free(&w);
		tasks_free(&tasks);
	}
}

/* A byte-level BPE tokenizer without a regular expression, so that any pair may merge: 256 bytes, three merges,
 * <|endoftext|> as 259. */
static struct tokenizer *pair_tokenizer(void)
{
	char json[16384];
#define BYTE_LEVEL "{\"type\": \"ByteLevel\", \"add_prefix_space\": false, \"trim_offsets\": true, " \
	"\"use_regex\": false}"
	int n = sprintf(json, "{\"added_tokens\": [{\"id\": 259, \"content\": \"<|endoftext|>\", \"special\": true, "
			"\"single_word\": false, \"lstrip\": false, \"rstrip\": false, \"normalized\": false}], "
			"\"normalizer\": null, \"post_processor\": null, \"decoder\": " BYTE_LEVEL ", "
			"\"pre_tokenizer\": " BYTE_LEVEL ", "
			"\"model\": {\"type\": \"BPE\", \"merges\": [\"a b\", \"\\u0120 c\", \"ab \\u0120c\"], "
			"\"vocab\": {\"ab\": 256, \"\\u0120c\": 257, \"ab\\u0120c\": 258");
	for (int byte = 0, other = 256; byte < 256; byte++) { /* bytes that are no visible character stand as others */
		const bool visible = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
		n += sprintf(json + n, ", \"\\u%04x\": %d", visible ? byte : other++, byte);
	}
	sprintf(json + n, "}}}");
	struct tokenizer *t = tokenizer_open(put_string(at("tokenizer.json"), json));
	if (!t)
		fail_msg("%s", error_text);
	return t;
}

/* Where an option's first bytes merge with the context's last ones, its tokens are those that the context alone does
 * not begin with. */
static void test_merges(void **state)
{
	(void)state;
	enum { AB = 256, SPACE_C, AB_SPACE_C, END };
	static const struct { const char *context, *option; int num, scored; int32_t token[8]; } cases[] = {
		{"xa", "b", 2, 1, {'x', AB}}, {"xa", "d", 3, 2, {'x', 'a', 'd'}}, {"xa", "bb", 3, 1, {'x', AB, 'b'}},
		/* a space at the end of the context */
		{"x ", "cd", 3, 1, {'x', SPACE_C, 'd'}}, {"x ", "d", 3, 2, {'x', ' ', 'd'}},
		{"x ", "cc", 3, 1, {'x', SPACE_C, 'c'}},
		/* all of the context becomes a part of one token: then the end of a text stands before it */
		{"ab", " c", 2, 1, {END, AB_SPACE_C}}, {"ab", " d", 4, 2, {END, AB, ' ', 'd'}},
		{"ab", "b", 3, 2, {END, AB, 'b'}},
		{"", "ab", 2, 1, {END, AB}}, {"", "b", 2, 1, {END, 'b'}}, {"", "ba", 3, 1, {END, 'b', 'a'}},
	};
	struct tokenizer *t = pair_tokenizer();
	struct model m;
	make_model(&m);
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i += 3) { /* three options of one question */
		struct tasks tasks;
		struct task_work w;
		char line[256];
		snprintf(line, sizeof line, "{\"o\": [\"%s\", \"%s\", \"%s\"], \"q\": \"%s\", \"a\": 0}", cases[i].option,
				cases[i + 1].option, cases[i + 2].option,
				cases[i].context);
		load_ok(&tasks, CHOICE "}", line);
		assert_done(task_encode(&w, &tasks.task[0], t, WINDOW));
		assert_done(task_run(&w, &m, &(struct engine_options){.max_requests = BATCH}));
		for (int option = 0; option < 3; option++) {
			const struct task_context *x = w.contexts;
			const struct task_continuation *c = &w.continuations[option];
			double score[8], sum = 0;
			assert_int_equal(x->num_tokens + c->num_tokens, cases[i + option].num);
			for (int j = 0; j < cases[i + option].num; j++)
				assert_int_equal(w.ids.id[j < x->num_tokens ? x->begin + j : c->begin + j - x->num_tokens],
						cases[i + option].token[j]);
			assert_int_equal(c->first_scored, cases[i + option].scored);
			plain_scores(&m, cases[i + option].token, cases[i + option].num, score);
			for (int j = cases[i + option].scored; j < cases[i + option].num; j++)
				sum += score[j];
			assert_true(fabs(w.log_likelihood[option] - sum) < 1e-4);
		}
		task_work_free(&w);
		tasks_free(&tasks);
	}
	/* In chat form the option is a message, and never merges with what stands before it. */
	struct tasks tasks;
	struct task_work w;
	load_ok(&tasks, CHOICE ", chat: true}", "{\"q\": \"a\", \"o\": [\"b\", \"<|endoftext|>\"], \"a\": 0}");
	assert_done(task_encode(&w, &tasks.task[0], t, 60));
	assert_int_equal(w.contexts[0].num_tokens, strlen("<role>HUMAN</role>a<role>ASSISTANT</role>"));
	assert_int_equal(w.continuations[0].num_tokens, 1);
	assert_int_equal(w.continuations[1].num_tokens, strlen("<|endoftext|>")); /* ordinary text */
	assert_int_equal(w.continuations[1].first_scored, w.contexts[0].num_tokens);
	task_work_free(&w);
	tasks_free(&tasks);
	model_free(&m);
	tokenizer_close(t);
}

/* No bit of a score depends on the batch, or on whether what options share is computed once. */
static void test_bits(void **state)
{
	(void)state;
	struct model m;
	struct tasks tasks;
	struct task_work w, alone;
	make_model(&m);
	load_ok(&tasks, CHOICE "}", QUESTIONS);
	assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), WINDOW));
	assert_done(task_run(&w, &m, &(struct engine_options){.max_requests = BATCH}));
	for (int batch = 1; batch < BATCH; batch++) {
		assert_done(task_encode(&alone, &tasks.task[0], byte_tokenizer(), WINDOW));
		assert_done(task_run(&alone, &m, &(struct engine_options){.max_requests = batch}));
		assert_memory_equal(alone.log_likelihood, w.log_likelihood, w.num_continuations * sizeof *w.log_likelihood);
		task_work_free(&alone);
	}
	for (int tokens = 7; tokens < 500; tokens *= 8) { /* at a time: segments are cut, or all are together */
		struct model other;
		make_model_for(&other, tokens);
		assert_done(task_encode(&alone, &tasks.task[0], byte_tokenizer(), WINDOW));
		assert_done(task_run(&alone, &other, &(struct engine_options){.max_requests = BATCH}));
		assert_memory_equal(alone.log_likelihood, w.log_likelihood, w.num_continuations * sizeof *w.log_likelihood);
		task_work_free(&alone);
		model_free(&other);
	}
	/* each option with a context of its own, which is all of its sequence but the last token */
	int shared = 0;
	alone = (struct task_work){.task = w.task, .tokenizer = w.tokenizer};
	alone.contexts = calloc(w.num_continuations, sizeof *alone.contexts);
	alone.continuations = calloc(w.num_continuations, sizeof *alone.continuations);
	alone.log_likelihood = calloc(w.num_continuations, sizeof *alone.log_likelihood);
	for (const struct task_context *x = w.contexts; x < w.contexts + w.num_contexts; x++)
		for (int i = 0; i < x->num_continuations; i++) {
			const struct task_continuation *c = &w.continuations[x->first_continuation + i];
			const int64_t n = x->num_tokens + c->num_tokens, begin = alone.ids.count;
			append_ids(&alone.ids, w.ids.id + x->begin, x->num_tokens);
			append_ids(&alone.ids, w.ids.id + c->begin, c->num_tokens);
			alone.contexts[alone.num_contexts++] = (struct task_context){.begin = begin, .num_tokens = n - 1,
				.first_continuation = alone.num_continuations, .num_continuations = 1};
			alone.continuations[alone.num_continuations++] = (struct task_continuation){begin + n - 1, 1,
					c->first_scored};
			shared += x->num_continuations > 1 && x->num_tokens > 1;
		}
	assert_int_equal(alone.num_continuations, w.num_continuations);
	assert_int_equal(shared, 4 + 3 + 3 + 2 + 2);
	alone.longest = w.longest;
	assert_done(task_run(&alone, &m, &(struct engine_options){.max_requests = 3}));
	assert_memory_equal(alone.log_likelihood, w.log_likelihood, w.num_continuations * sizeof *w.log_likelihood);
	task_work_free(&alone);
	task_work_free(&w);
	tasks_free(&tasks);
	model_free(&m);
}

/* What is longer than the window, and what has nothing to begin with. */
static void test_windows(void **state)
{
	(void)state;
	struct tasks tasks;
	struct task_work w;
	load_ok(&tasks, CHOICE "}", QUESTION "{\"q\": \"ab\", \"o\": [\"123456789\", \"1\"], \"a\": 0}\n");
	assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), 9)); /* b12345678 foretells 123456789 */
	assert_true(w.contexts[1].cut);
	assert_int_equal(w.contexts[1].num_tokens, 1);
	assert_int_equal(w.continuations[w.contexts[1].first_continuation].first_scored, 1);
	task_work_free(&w);
	assert_int_equal(task_encode(&w, &tasks.task[0], byte_tokenizer(), 8), -1);
	assert_non_null(strstr(error_text, "d.jsonl:2"));
	assert_non_null(strstr(error_text, "9 tokens"));
	task_work_free(&w);
	tasks_free(&tasks);

	load_ok(&tasks, MATCH ", max_tokens: 6}", "{\"q\": \"abcdefgh\", \"a\": 1}");
	assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), 10));
	assert_true(w.contexts[0].cut);
	assert_int_equal(w.contexts[0].num_tokens, 4);
	assert_int_equal(w.ids.id[w.contexts[0].begin], 'e');
	task_work_free(&w);
	assert_int_equal(task_encode(&w, &tasks.task[0], byte_tokenizer(), 6), -1);
	assert_non_null(strstr(error_text, "max_tokens is 6"));
	task_work_free(&w);
	tasks_free(&tasks);

	load_ok(&tasks, TEXT ", stride: 9}", "{\"text\": \"abc\"}");
	assert_int_equal(task_encode(&w, &tasks.task[0], byte_tokenizer(), 8), -1);
	assert_non_null(strstr(error_text, "stride is 9"));
	task_work_free(&w);
	tasks_free(&tasks);
}

/* Documents: each token is scored once, with at least L - stride tokens before it but at the beginning; perplexities
 * and their errors by hand. */
static void test_documents(void **state)
{
	(void)state;
	static const char *const documents[] = {"One two  three.\n",
			"A longer document, which takes some windows of twenty tokens each.", "x"};
	static const int words[] = {3, 11, 1};
	enum { L = 20, N = 3 };
	struct model m;
	struct tasks tasks;
	struct task_work w;
	struct task_result result;
	make_model(&m);
	for (int stride = 20; stride >= 7; stride -= 13) {
		char yaml[128];
		snprintf(yaml, sizeof yaml, TEXT ", stride: %d}", stride);
		load_ok(&tasks, yaml, "{\"text\": \"One two  three.\\n\"}\n"
				"{\"text\": \"A longer document, which takes some windows of twenty tokens each.\"}\n"
				"{\"text\": \"x\"}\n");
		assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), L));
		assert_done(task_run(&w, &m, &(struct engine_options){.max_requests = BATCH}));
		task_score(&w, &result, NULL);
		double loss[N] = {0}, tokens = 0, count = 0, bytes = 0, total = 0;
		for (int i = 0; i < N; i++) {
			int32_t token[256];
			double score[256];
			const int64_t n = bytes_of(token, true, documents[i]) - 1;
			for (int64_t done = 0, end; done < n; done = end) {
				end = done + (done ? stride : L) < n ? done + (done ? stride : L) : n;
				const int64_t first = end > L ? end - L : 0;
				plain_scores(&m, token + first, end - first + 1, score);
				for (int64_t j = done + 1; j <= end; j++)
					loss[i] -= score[j - first];
			}
			tokens += n, bytes += n, count += words[i], total += loss[i];
		}
		assert_int_equal(result.tokens, (int)tokens);
		assert_int_equal(result.bytes, (int)bytes);
		assert_int_equal(result.words, (int)count);
		assert_int_equal(result.cut, 1);
		const double ratio[] = {total / tokens, total / count, total / bytes}, sum[] = {tokens, count, bytes};
		for (int k = 0; k < 3; k++) {
			double squares = 0;
			for (int i = 0; i < N; i++) {
				const double unit = k == 1 ? (double)words[i] : (double)strlen(documents[i]),
						d = loss[i] - ratio[k] * unit;
				squares += d * d;
			}
			const double error = sqrt(N / (N - 1.0) * squares) / sum[k];
			assert_true(fabs(log(result.score[k].value) - ratio[k]) < 1e-5);
			assert_true(fabs(result.score[k].standard_error / (exp(ratio[k]) * error) - 1) < 1e-4);
		}
		assert_true(fabs(result.score[3].value - ratio[2] / log(2)) < 1e-5);
		task_work_free(&w);
		tasks_free(&tasks);
	}
	model_free(&m);
}

/* Examples: as many as asked for, each once, never the sample itself, the same for the same seed; and how they are put
 * together. */
static void test_examples(void **state)
{
	(void)state;
	struct tasks tasks;
	struct task_work w;
	static const char lines[] = "{\"q\": \"a\", \"a\": 1}\n{\"q\": \"b\", \"a\": 2}\n"
			"{\"q\": \"c\", \"a\": 3}\n{\"q\": \"d\", \"a\": 4}\n";
	char *before = NULL;
	int differ = 0;
	for (int seed = 1; seed <= 20; seed++) {
		char yaml[256], *all = calloc(1, 256);
		snprintf(yaml, sizeof yaml, MATCH ", target: \"={a};\", separator: \"|\", max_tokens: 1, limit: 3, "
				"examples: {count: 2, seed: %d}}", seed);
		load_ok(&tasks, yaml, lines);
		assert_int_equal(tasks.task[0].num_samples, 3);
		assert_int_equal(tasks.task[0].samples.count, 4);
		assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), WINDOW));
		assert_int_equal(w.num_contexts, 3);
		for (int i = 0; i < 3; i++) {
			char text[32] = "";
			const struct task_context *x = &w.contexts[i];
			assert_int_equal(x->num_tokens, 11);
			for (int j = 0; j < 11; j++)
				text[j] = (char)w.ids.id[x->begin + j];
			/* two examples x=n;| and the prompt */
			for (int j = 0; j < 10; j += 5) {
				assert_memory_equal(text + j + 1, "=", 1);
				assert_memory_equal(text + j + 3, ";|", 2);
				assert_int_equal(text[j] - 'a', text[j + 2] - '1');
			}
			assert_int_equal(text[10], 'a' + i);
			assert_true(text[0] != text[10] && text[5] != text[10] && text[0] != text[5]);
			strcat(all, text);
		}
		if (before)
			differ += strcmp(before, all) != 0;
		free(before);
		before = all;
		task_work_free(&w);
		assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), WINDOW));
		for (int i = 0; i < 33; i++)
			assert_int_equal(w.ids.id[i], (uint8_t)all[i]);
		task_work_free(&w);
		tasks_free(&tasks);
	}
	free(before);
	assert_true(differ > 10);

	/* From another file that holds the sample too; too few of them. */
	put_string(at("e.jsonl"), "{\"q\": \"b\", \"a\": 2}\n{\"q\": \"a\", \"a\": 1}\n{\"q\": \"b\", \"a\": 2}\n");
	load_ok(&tasks, MATCH ", separator: \"\", max_tokens: 1, examples: {count: 2, data: e.jsonl}, limit: 1}", lines);
	assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), WINDOW));
	const int32_t expected[] = {'b', '2', 'b', '2', 'a'};
	assert_int_equal(w.ids.count, 5);
	assert_memory_equal(w.ids.id, expected, sizeof expected);
	task_work_free(&w);
	tasks_free(&tasks);
	/* the first ones, behind a fixed text; the sample itself is none of them */
	load_ok(&tasks, MATCH ", separator: \"|\", max_tokens: 1, examples: {count: 1, choose: first, text: \"T\"}, "
			"limit: 2}", lines);
	assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), WINDOW));
	static const char *const contexts[] = {"T|b2|a", "T|a1|b"};
	for (int i = 0; i < 2; i++) {
		assert_int_equal(w.contexts[i].text_size, 6);
		assert_memory_equal(w.texts.data + w.contexts[i].text, contexts[i], 6);
		for (int j = 0; j < 6; j++)
			assert_int_equal(w.ids.id[w.contexts[i].begin + j], contexts[i][j]);
	}
	task_work_free(&w);
	/* what is cut from a context is not in its text: 4 of 6 tokens remain */
	assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), 5));
	assert_int_equal(w.contexts[0].text_size, 4);
	assert_memory_equal(w.texts.data, "b2|a", 4);
	task_work_free(&w);
	tasks_free(&tasks);
	/* in chat form the tags are a part of it, where they are special tokens too */
	static const char in_chat[] = "<role>SYSTEM</role>T<role>HUMAN</role>b<role>ASSISTANT</role>2"
			"<role>HUMAN</role>a<role>ASSISTANT</role>";
	struct tokenizer *with_tags = tokenizer_open("tests/fixtures/tokenizer");
	assert_true(with_tags && tokenizer_id(with_tags, "<role>") >= 0);
	const struct tokenizer *const both[] = {byte_tokenizer(), with_tags};
	load_ok(&tasks, MATCH ", chat: true, max_tokens: 1, examples: {count: 1, choose: first, text: \"T\"}, limit: 1}",
			lines);
	for (int i = 0; i < 2; i++) {
		assert_done(task_encode(&w, &tasks.task[0], both[i], 300));
		assert_int_equal(w.contexts[0].text_size, strlen(in_chat));
		assert_memory_equal(w.texts.data + w.contexts[0].text, in_chat, strlen(in_chat));
		task_work_free(&w);
	}
	tokenizer_close(with_tags);
	tasks_free(&tasks);
	load_ok(&tasks, MATCH ", examples: {count: 4}, max_tokens: 1}", lines);
	assert_int_equal(task_encode(&w, &tasks.task[0], byte_tokenizer(), WINDOW), -1);
	assert_non_null(strstr(error_text, "d.jsonl:1"));
	assert_non_null(strstr(error_text, "only 3 other"));
	task_work_free(&w);
	tasks_free(&tasks);
}

/* Replies are greedy, end where they must, and depend on no batch. */
static void test_generation(void **state)
{
	(void)state;
	enum { MOST = 12 };
	struct model m;
	struct tasks tasks;
	struct task_work w, again;
	struct task_result result;
	make_model(&m);
	load_ok(&tasks, MATCH ", max_tokens: 12}",
			"{\"q\": \"abc\", \"a\": 1}\n{\"q\": \"\", \"a\": 1}\n"
			"{\"q\": \"Once upon\", \"a\": 1}\n{\"q\": \"z\", \"a\": 1}\n");
	assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), WINDOW));
	assert_int_equal(w.longest, 9 + MOST);
	assert_done(task_run(&w, &m, &(struct engine_options){.max_requests = 3}));
	const int64_t V = m.config.vocab_size;
	real *logits = calloc(WINDOW * V, sizeof *logits);
	for (int i = 0; i < 4; i++) {
		const double *reply = w.reply + i * (1 + MOST);
		int32_t token[WINDOW] = {0};
		const struct task_context *x = &w.contexts[i];
		memcpy(token, w.ids.id + x->begin, x->num_tokens * sizeof *token);
		int n = 0;
		for (; n < MOST; n++) {
			model_forward(&m, token, 1, NULL, NULL);
			model_logits(&m, logits, 0, WINDOW);
			const real *row = logits + (x->num_tokens + n - 1) * V;
			int best = 0;
			for (int v = 1; v < BYTES; v++) /* never an id of the padding */
				best = row[v] > row[best] ? v : best;
			if (best == 256)
				break;
			assert_int_equal((int)reply[1 + n], best);
			token[x->num_tokens + n] = best;
		}
		assert_int_equal((int)reply[0], n);
	}
	free(logits);
	for (int batch = 1; batch <= 4; batch++) {
		assert_done(task_encode(&again, &tasks.task[0], byte_tokenizer(), WINDOW));
		assert_done(task_run(&again, &m, &(struct engine_options){.max_requests = batch}));
		assert_memory_equal(again.reply, w.reply, w.num_contexts * (1 + MOST) * sizeof *w.reply);
		task_work_free(&again);
	}
	/* the first two bytes of a reply as a stop: it ends there and nothing is left of it */
	struct text stop = {0};
	for (int i = 1; i <= 2; i++)
		tokenizer_decode(byte_tokenizer(), (int32_t)w.reply[i], true, &stop);
	task_work_free(&w);
	if (memchr(stop.data, 0, 2))
		fail_msg("choose another model: its reply cannot be a stop");
	struct task *t = &tasks.task[0];
	t->stop.text = calloc(1, sizeof *t->stop.text);
	t->stop.text[0] = stop.data, t->stop.count = 1;
	t->samples.sample[0].choice[0].size = 0; /* the right answer is none */
	assert_done(task_encode(&w, t, byte_tokenizer(), WINDOW));
	assert_done(task_run(&w, &m, &(struct engine_options){.max_requests = 3}));
	assert_int_equal((int)w.reply[0], 2);
	task_score(&w, &result, NULL);
	assert_true(fabs(result.score[0].value - 0.25) < 1e-12);
	task_work_free(&w);
	tasks_free(&tasks);
	model_free(&m);
}

/* A limit counts samples; the lines between them that hold nothing do not count. */
static void test_limit(void **state)
{
	(void)state;
	struct tasks tasks;
	load_ok(&tasks, MATCH ", limit: 2}", "\n \n{\"q\": \"a\", \"a\": 1}\n\n\t\n{\"q\": \"b\", \"a\": 2}\n\n"
			"{\"q\": \"c\", \"a\": 3}\n");
	assert_int_equal(tasks.task[0].num_samples, 2);
	const struct sample *s = tasks.task[0].samples.sample;
	assert_text(s[0].prompt, "a");
	assert_text(s[1].prompt, "b");
	assert_true(s[0].line == 3 && s[1].line == 6);
	tasks_free(&tasks);
	load_ok(&tasks, MATCH ", limit: 4}", "\n{\"q\": \"a\", \"a\": 1}\n\n\n{\"q\": \"b\", \"a\": 2}\n");
	assert_int_equal(tasks.task[0].num_samples, 2); /* fewer than the limit: all */
	tasks_free(&tasks);
}

/* Numbers become text with the fewest digits that are the same number, wherever a template, an answer or an option
 * holds them. */
static void test_number_digits(void **state)
{
	(void)state;
	static const struct { const char *json, *text; } cases[] = {
		{"0.1", "0.1"}, {"2.5", "2.5"}, {"0.1234567", "0.1234567"}, {"3.14159265358979", "3.14159265358979"},
		{"0.30000000000000004", "0.30000000000000004"}, {"16777217", "16777217"}, {"16777217.5", "16777217.5"},
		{"123456789.123", "123456789.123"}, {"-0.001", "-0.001"}, {"1e300", "1e+300"},
		{"1.7976931348623157e308", "1.7976931348623157e+308"}, {"9007199254740993", "9007199254740993"},
		{"9223372036854775807", "9223372036854775807"}, {"-9223372036854775808", "-9223372036854775808"},
		{"5.0", "5"}, {"100000.0", "100000"}, {"1000000.0", "1000000"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		struct tasks tasks;
		char line[256];
		snprintf(line, sizeof line, "{\"q\": %s, \"a\": [%s, \"x\"]}\n", cases[i].json, cases[i].json);
		load_ok(&tasks, MATCH ", target: \"<{q}>\"}", line);
		const struct sample *s = tasks.task[0].samples.sample;
		assert_text(s->prompt, cases[i].text);
		assert_text(s->choice[0], cases[i].text);
		assert_true(s->target.size == strlen(cases[i].text) + 2);
		tasks_free(&tasks);
	}
}

/* The replies of examples: of a list of right answers the first alone, as a template the whole; and examples differ
 * from sample to sample, and in their order. */
static void test_examples_vary(void **state)
{
	(void)state;
	enum { N = 12 };
	struct tasks tasks;
	struct task_work w;
	char lines[N * 64] = "", *at_line = lines, seen[N][8];
	for (int i = 0; i < N; i++)
		at_line += sprintf(at_line, "{\"q\": \"%c\", \"a\": [\"%d\", \"wrong\", \"%d\"]}\n", 'a' + i, i % 10, i);
	load_ok(&tasks, MATCH ", separator: \"\", max_tokens: 1, examples: {count: 3}}", lines);
	assert_done(task_encode(&w, &tasks.task[0], byte_tokenizer(), WINDOW));
	int sets = 0;
	bool used[N] = {false};
	for (int i = 0; i < N; i++) {
		const struct task_context *x = &w.contexts[i];
		assert_int_equal(x->num_tokens, 7); /* three examples of a letter and a digit, and the prompt */
		for (int j = 0; j < 7; j++)
			seen[i][j] = (char)w.ids.id[x->begin + j];
		seen[i][6] = 0; /* the prompt itself is another in each sample */
		for (int j = 0; j < 6; j += 2) {
			assert_int_equal(seen[i][j + 1] - '0', (seen[i][j] - 'a') % 10);
			used[seen[i][j] - 'a'] = true;
		}
		int earlier = 0;
		while (earlier < i && strcmp(seen[earlier], seen[i]))
			earlier++;
		sets += earlier == i;
	}
	assert_true(sets >= N - 2);
	for (int i = 0; i < N; i++)
		assert_true(used[i]);
	task_work_free(&w);
	tasks_free(&tasks);
}

/* Of several stop texts the one that begins first in the text ends it, whatever their order and length. */
static void test_stops(void **state)
{
	(void)state;
	static const struct { const char *stops[3]; size_t from, end; } cases[] = {
		{{"gh", "cd", "ef"}, 0, 2}, {{"cd", "gh"}, 0, 2}, {{"gh"}, 0, 6}, {{"x", "y", "z"}, 0, 8},
		{{"bcdefgh", "c"}, 0, 1}, {{"c", "bcdefgh"}, 0, 1}, {{"cd", "gh"}, 3, 6}, {{"h", "a"}, 0, 0},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		const struct text text = {.data = (char *)"abcdefgh", .size = 8};
		struct strings stops = {.text = (char **)cases[i].stops};
		while (stops.count < 3 && cases[i].stops[stops.count])
			stops.count++;
		assert_int_equal(find_stop(&text, cases[i].from, &stops), cases[i].end);
	}
}

int main(void)
{
	kernels_init(false);
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(test_templates), cmocka_unit_test(test_answers), cmocka_unit_test(test_labels),
		cmocka_unit_test(test_nulls), cmocka_unit_test(test_values), cmocka_unit_test(test_packed_data),
		cmocka_unit_test(test_bad_files),
		cmocka_unit_test(test_paths),
		cmocka_unit_test(test_replies), cmocka_unit_test(test_questions),
		cmocka_unit_test(test_acc_norm), cmocka_unit_test(test_merges),
		cmocka_unit_test(test_bits), cmocka_unit_test(test_windows),
		cmocka_unit_test(test_documents), cmocka_unit_test(test_examples), cmocka_unit_test(test_generation),
		cmocka_unit_test(test_limit), cmocka_unit_test(test_number_digits), cmocka_unit_test(test_examples_vary),
		cmocka_unit_test(test_stops),
	};
	return cmocka_run_group_tests(tests, make_scratch, drop_scratch);
}
