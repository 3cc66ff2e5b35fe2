/* metrics.jsonl: written, read and continued after any interruption; what is not finite; what is refused. */
#define _GNU_SOURCE
#include "tests/test.h"

#include "data.h"

#include <unistd.h>

static struct metrics example_metrics(int64_t step, double *load)
{
	load[0] = 1.0 / 3 + step, load[1] = 2;
	return (struct metrics){.step = step, .samples = 8 * step, .tokens = 1 << step, .batch = 8,
			.loss = 5.0 / (3 + step),
		.balance_loss = 1.1, .z_loss = 1e-300, .lr = 1e-4 / 3, .grad_norm = 0.1, .update_norm = 0.01 / 3, .seconds = 1,
				.tokens_per_second = 1e6 / 7, .attempts = step == 3 ? 2 : 0,
		.num_layers = 2, .expert_load = load, .has_valid_loss = step == 2, .valid_loss = step == 2 ? 0.7 : 0};
}

static void write_metrics(int64_t after, int64_t first, int64_t last)
{
	double load[2];
	FILE *f = metrics_open(scratch, after, NULL);
	if (!f)
		fail_msg("%s", error_text);
	for (int64_t step = first; step <= last; step++) {
		struct metrics m = example_metrics(step, load);
		assert_int_equal(metrics_write(f, &m), 0);
	}
	assert_int_equal(fclose(f), 0);
}

/* The file must hold the steps 1 to last, exactly as written. */
static void check_metrics(int last)
{
	struct metrics *m;
	int n;
	double load[2];
	if (metrics_read(scratch, &m, &n) < 0)
		fail_msg("%s", error_text);
	assert_int_equal(n, last);
	for (int i = 0; i < n; i++) {
		struct metrics e = example_metrics(i + 1, load);
		assert_memory_equal(m[i].expert_load, load, sizeof load);
		e.expert_load = m[i].expert_load;
		assert_true(m[i].step == e.step && m[i].samples == e.samples && m[i].tokens == e.tokens &&
				m[i].batch == e.batch);
		assert_int_equal(m[i].attempts, e.attempts);
		assert_memory_equal(&m[i].loss, &e.loss, offsetof(struct metrics, attempts) - offsetof(struct metrics,
				loss));
		assert_int_equal(m[i].has_valid_loss, e.has_valid_loss);
		assert_same(m[i].valid_loss, e.valid_loss);
	}
	free(m);
}

static void metrics_resume(void **state)
{
	(void)state;
	char *path = at("metrics.jsonl");
	write_metrics(0, 1, 3);
	check_metrics(3);
	size_t n, whole;
	uint8_t *good = get_file(path, &n), *text;
	assert_int_equal(strncmp((char *)good,
			"{\"step\": 1, \"samples\": 8, \"tokens\": 2, \"batch\": 8, \"loss\": 1.25, "
			"\"balance_loss\": 1.1000000000000001, \"z_loss\": ", 110), 0);
	/* Resumed after any step, with the file torn at any byte: each step once, and the same bytes as never stopped. */
	for (int64_t step = 0; step <= 3; step++) {
		for (size_t cut = 0; cut <= n; cut++) {
			put_file(path, good, cut);
			size_t kept = 0, lines = 0;
			for (size_t i = 0; i < n && lines < (size_t)step; i++)
				if (good[i] == '\n' && ++lines && i <= cut) /* a line without its newline is whole too */
					kept = lines;
			if (cut && kept < (size_t)step) { /* lines are missing */
				char ends[128];
				snprintf(ends, sizeof ends, "metrics.jsonl: ends at step %zu, but the run goes on after step %lld",
						kept,
						(long long)step);
				assert_null(metrics_open(scratch, step, NULL));
				expect_error(ends);
				continue;
			}
			write_metrics(step, kept + 1, 3);
			text = get_file(path, &whole);
			if (whole != n || memcmp(text, good, n))
				fail_msg("step %d, cut %zu: %s", (int)step, cut, text);
			free(text);
		}
	}
	write_metrics(2, 3, 3);
	check_metrics(3);
	assert_null(metrics_open(scratch, 7, NULL));
	expect_error("metrics.jsonl: ends at step 3, but the run goes on after step 7; bring the missing lines back");
	check_metrics(3);
	write_metrics(0, 1, 2);
	check_metrics(2);
	free(good);
	put_string(path, "");
	check_metrics(0);
	unlink(path);
	struct metrics *m;
	int count;
	assert_int_equal(metrics_read(scratch, &m, &count), -1);
	expect_error("metrics.jsonl: cannot open");
	FILE *f = metrics_open(at("new/run"), 0, NULL);
	assert_non_null(f);
	fclose(f);
	assert_true(exists(at("new/run/metrics.jsonl")));
}

/* Named sets and the tokens of each expert: as they stand in the line, also where a validation is made up for. */
static void metrics_arrays(void **state)
{
	(void)state;
	double load[2];
	static const int64_t counts[] = {1, 2, 3, (int64_t)1 << 40, 0, 5};
	const struct valid_loss losses[] = {{"web", 2.5}, {"chat", NAN}};
	struct metrics m = example_metrics(1, load), *read;
	int n;
	m.num_experts = 3, m.expert_counts = counts, m.validation_stopped = true;
	FILE *f = metrics_open(scratch, 0, NULL);
	assert_int_equal(metrics_write(f, &m), 0);
	fclose(f);
	size_t size;
	char *text = (char *)get_file(at("metrics.jsonl"), &size);
	assert_non_null(strstr(text, "\"expert_load\": [1.3333333333333333, 2.0], \"expert_counts\": [[1, 2, 3], "
			"[1099511627776, 0, 5]], \"validation_stopped\": true}"));
	assert_true(metrics_lack_validation(scratch, 1));
	m.has_valid_loss = true, m.valid_loss = 2.25, m.num_valid_sets = 2, m.valid_losses = losses;
	assert_int_equal(metrics_set_validation(scratch, &m), 0);
	free(text);
	char *made_up = (char *)get_file(at("metrics.jsonl"), &size);
	assert_non_null(strstr(made_up, "\"valid_loss\": 2.25, \"valid\": {\"web\": 2.5, \"chat\": null}, "
			"\"nonfinite\": [\"valid\"]}\n"));
	/* the same as of a run that was not stopped */
	m.validation_stopped = false;
	f = metrics_open(scratch, 0, NULL);
	assert_int_equal(metrics_write(f, &m), 0);
	fclose(f);
	text = (char *)get_file(at("metrics.jsonl"), &size);
	assert_string_equal(text, made_up);
	free(text), free(made_up);
	assert_int_equal(metrics_read(scratch, &read, &n), 0);
	assert_true(n == 1 && read->valid_loss == 2.25 && !read->expert_counts && !read->valid_losses);
	free(read);
}

/* samples.jsonl: what a later step or a torn line left goes, and nothing else; half a line is never written. */
static void samples_lines(void **state)
{
	(void)state;
	char *path = at("samples.jsonl");
	const char *const first = "{\"step\": 0, \"text\": \"a\\n\"}\n{\"step\": 0}\n", *const third = "{\"step\": 3}\n",
			*const fifth = "{\"step\": 5}\n{\"step\": 5}\n";
	static const struct { int64_t cut; int lines; } cases[] = {{5, 5}, {4, 3}, {3, 3}, {2, 2}, {0, 2}, {-1, 0}};
	char expected[512], whole[256];
	snprintf(whole, sizeof whole, "%s%s%s", first, third, fifth);
	assert_int_equal(samples_cut(scratch, 0), 0); /* there is no file */
	assert_false(exists(path));
	for (int i = 0; i < COUNT(cases); i++)
		for (int torn = 0; torn < 2; torn++) {
			snprintf(expected, sizeof expected, "%s%s", whole, torn ? "{\"step\": 1" : "");
			put_string(path, expected);
			assert_int_equal(samples_cut(scratch, cases[i].cut), 0);
			char *end = strcpy(expected, whole);
			for (int line = 0; line < cases[i].lines; line++)
				end = strchr(end, '\n') + 1;
			*end = 0;
			size_t n;
			char *text = (char *)get_file(path, &n);
			assert_string_equal(text, expected);
			free(text);
		}
	unlink(path);
	assert_int_equal(samples_append(scratch, 0, first), 0);
	assert_int_equal(samples_append(scratch, 3, "{\"step\": 3, \"text\": \"written before a kill\"}\n"), 0);
	assert_int_equal(samples_append(scratch, 3, third), 0);
	limit_files(strlen(first) + strlen(third) + 15);
	assert_int_equal(samples_append(scratch, 5, fifth), -1);
	limit_files(RLIM_INFINITY);
	expect_error("samples.jsonl: cannot write: File too large");
	assert_int_equal(samples_append(scratch, 5, fifth), 0);
	size_t n;
	char *text = (char *)get_file(path, &n);
	assert_string_equal(text, whole);
	free(text);
	put_string(path, "{\"step\": 1}\nnonsense\n");
	assert_int_equal(samples_cut(scratch, 1), -1);
	expect_error("samples.jsonl: last line (mend or remove it): bad JSON");
	unlink(path);
}

static void metrics_nonfinite(void **state)
{
	(void)state;
	double load[2];
	struct metrics x = example_metrics(2, load), *m;
	x.loss = NAN, x.grad_norm = INFINITY, x.valid_loss = -INFINITY, load[0] = NAN, load[1] = INFINITY;
	FILE *f = metrics_open(scratch, 0, NULL);
	assert_int_equal(metrics_write(f, &x), 0);
	fclose(f);
	json_t *root = json_read(at("metrics.jsonl"));
	char *text = json_dumps(json_object_get(root, "nonfinite"), JSON_COMPACT);
	assert_string_equal(text, "[\"loss\",\"grad_norm\",\"expert_load\",\"valid_loss\"]");
	assert_true(json_is_null(json_object_get(root, "loss")));
	free(text);
	json_decref(root);
	int n;
	assert_int_equal(metrics_read(scratch, &m, &n), 0);
	assert_true(n == 1 && isnan(m->loss) && isnan(m->grad_norm) && isnan(m->valid_loss) && m->has_valid_loss);
	assert_true(isnan(m->expert_load[0]) && isnan(m->expert_load[1]) && m->lr == x.lr);
	free(m);
	f = fopen(at("full"), "w");
	limit_files(10);
	int rc = metrics_write(f, &x);
	limit_files(RLIM_INFINITY);
	assert_int_equal(rc, -1);
	expect_error("metrics.jsonl: cannot write: File too large");
	fclose(f);
}

static void metrics_broken(void **state)
{
	(void)state;
#define LINE(n) "{\"step\":" #n ",\"samples\":1,\"tokens\":1,\"batch\":1,\"loss\":1,\"balance_loss\":1," \
	"\"z_loss\":1,\"lr\":1," \
	"\"grad_norm\":1,\"seconds\":1,\"tokens_per_second\":1,\"expert_load\":[1,1]}\n"
	static const struct { const char *text, *error; } cases[] = {
		{LINE(1) "nonsense\n" LINE(2), "metrics.jsonl:2: bad JSON"},
		{LINE(1) "\n" LINE(2), "metrics.jsonl:2: bad JSON"},
		{LINE(1) "{\"step\":2}{}\n", "metrics.jsonl:2: bad JSON"},
		{LINE(1) "{\"step\":2,\n" LINE(3), "metrics.jsonl:2: bad JSON"},
		{LINE(1) "{\"step\":2,\"step\":3}\n", "metrics.jsonl:2: bad JSON: duplicate"},
		{LINE(1) "[2]\n", "metrics.jsonl:2: is an array"},
		{"{}\n", "metrics.jsonl:1: `step` is missing"},
		{"{\"step\":1.5}\n", "metrics.jsonl:1: `step` is a real number"},
		{"{\"step\":-1}\n", "metrics.jsonl:1: `step` is -1"},
		{LINE(2) LINE(2), "metrics.jsonl:2: step 2 after step 2"},
		{LINE(2) LINE(3) LINE(1), "metrics.jsonl:3: step 1 after step 3"},
		{LINE(1) "{\"step\":2}\n", "metrics.jsonl:2: `samples` is missing"},
		{"{\"step\":2,\"samples\":1,\"tokens\":1,\"batch\":4294967296}\n", "`batch` is 4294967296"},
		{"{\"step\":2,\"samples\":1,\"tokens\":1,\"batch\":1,\"loss\":\"x\"}\n", "`loss` is a string"},
		{LINE(1) LINE(2) "{\"step\":3,\"samples\":1,\"tokens\":1,\"batch\":1,"
			"\"loss\":1,\"balance_loss\":1,\"z_loss\":1,\"lr\":1,"
			"\"grad_norm\":1,\"seconds\":1,\"tokens_per_second\":1,\"expert_load\":[1,true]}\n",
			"metrics.jsonl:3: `expert_load` is true"},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		struct metrics *m;
		int n;
		put_string(at("metrics.jsonl"), cases[i].text);
		assert_int_equal(metrics_read(scratch, &m, &n), -1);
		expect_error(cases[i].error);
		assert_null(metrics_open(scratch, 1, NULL)); /* refuses what would not be read later */
		expect_error(cases[i].error);
	}
	struct metrics *m;
	int n;
	put_string(at("metrics.jsonl"), LINE(1) "{\"step\":2,\"sam"); /* while the run goes on */
	assert_int_equal(metrics_read(scratch, &m, &n), 0);
	assert_int_equal(n, 1);
	free(m);
}

/* The loss of MTP layers stands behind that of the model, where there are any. */
static void metrics_of_mtp(void **state)
{
	(void)state;
	double load[2];
	struct metrics m = example_metrics(1, load), *read;
	int n;
	m.num_mtp_layers = 2;
	m.mtp_loss = 2.5;
	char *line = metrics_line(&m);
	assert_non_null(strstr(line, "\"loss\": 1.25, \"mtp_loss\": 2.5, \"balance_loss\": "));
	put_string(at("metrics.jsonl"), line);
	free(line);
	assert_int_equal(metrics_read(scratch, &read, &n), 0);
	assert_true(n == 1 && read[0].loss == 1.25 && read[0].balance_loss == 1.1);
	free(read);
	m.mtp_loss = NAN;
	line = metrics_line(&m);
	assert_non_null(strstr(line, "\"mtp_loss\": null, "));
	assert_non_null(strstr(line, "\"nonfinite\": [\"mtp_loss\"]"));
	free(line);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(metrics_resume), TEST(metrics_arrays), TEST(samples_lines), TEST(metrics_nonfinite), TEST(metrics_broken),
		TEST(metrics_of_mtp),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
