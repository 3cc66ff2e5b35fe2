/* The rotary embedding and its scaling, against numbers that scripts/rope-reference.py computes from the papers
 * (tests/fixtures/rope.json); and its way through config.json and GGUF. */
#define _GNU_SOURCE
#include "tests/test.h"

#include "kernels.h"
#include "files/config.h"
#include "files/gguf.h"
#include "files/rope.h"

#include <math.h>

/* The config.json of a small model with these further members, which are taken over. */
static const char *write_config(json_t *members)
{
	json_t *root = json_pack("{s:i, s:i, s:i, s:i, s:i, s:i, s:i}", "hidden_size", 8, "num_hidden_layers", 1,
			"num_attention_heads", 2, "vocab_size", 9, "num_experts", 2, "num_experts_per_tok", 1,
			"moe_intermediate_size", 4);
	json_object_update_new(root, members);
	char *text = json_dumps(root, 0);
	put_string(at("config.json"), text);
	free(text);
	json_decref(root);
	return scratch;
}

/* Reads such a model. */
static struct model_config model_of(const char *members)
{
	struct model_config m;
	json_t *given = json_loads(members, 0, NULL);
	assert_non_null(given);
	if (config_from_huggingface(&m, write_config(given)) < 0)
		fail_msg("%s: %s", members, error_text);
	return m;
}

static void test_frequencies(void **state)
{
	(void)state;
	json_t *root = json_read("tests/fixtures/rope.json"), *cases = json_object_get(root, "cases"), *item;
	size_t n;
	assert_true(json_array_size(cases) >= 18);
	json_array_foreach(cases, n, item) {
		struct model_config m;
		json_t *members = json_deep_copy(item), *frequency = json_object_get(item, "frequency");
		const double attention = json_number_value(json_object_get(item, "attention_factor"));
		if (config_from_huggingface(&m, write_config(members)) < 0)
			fail_msg("case %zu: %s", n, error_text);
		const int d = rotary_dim(&m); /* the part of a head that turns */
		double ours[d / 2];
		real table[5 * d];
		rope_frequencies(ours, &m, json_integer_value(json_object_get(item, "length")));
		assert_int_equal(json_array_size(frequency), d / 2);
		for (int i = 0; i < d / 2; i++) {
			const double theirs = json_number_value(json_array_get(frequency, i));
			if (!(fabs(ours[i] / theirs - 1) < 1e-13))
				fail_msg("case %zu, frequency %d: %.17g, expected %.17g", n, i, ours[i], theirs);
		}
		if (!(fabs(rope_attention_factor(&m) / attention - 1) < 1e-14))
			fail_msg("case %zu: attention factor %.17g, expected %.17g", n, rope_attention_factor(&m), attention);
		rope_table(table, 5, d, ours, attention);
		for (int t = 0; t < 5; t++)
			for (int i = 0; i < d / 2; i++) {
				assert_true(table[t * d + i] == (real)(attention * cos(t * ours[i])));
				assert_true(table[t * d + d / 2 + i] == (real)(attention * sin(t * ours[i])));
			}
	}
	json_decref(root);
}

/* With a scale s, forward is s R x, and backward s R^T dy: <s R x, y> = <x, s R^T y>, and |s R x| = s |x|. */
static void test_scaled_rotation(void **state)
{
	(void)state;
	enum { L = 3, D = 4, N = L * 3 * D };
	real table[L * D], x[N], y[N], forward[N], backward[N];
	rope_table(table, L, D, (double[]){1, 0.3}, 1.5);
	for (int i = 0; i < N; i++)
		forward[i] = x[i] = (real)(i % 7 - 3), backward[i] = y[i] = (real)(i % 5 - 2);
	rope_forward(forward, table, NULL, L, L, 1, 1, D, D);
	rope_backward(backward, table, NULL, L, L, 1, 1, D, D);
	double left = 0, right = 0, size = 0, before = 0;
	for (int i = 0; i < N; i++) {
		if (i % (3 * D) >= 2 * D) { /* values are not turned */
			assert_true(forward[i] == x[i]);
			continue;
		}
		left += forward[i] * y[i], right += x[i] * backward[i];
		size += forward[i] * forward[i], before += x[i] * x[i];
	}
	assert_true(fabs(left - right) < 1e-4 && fabs(size / before - 2.25) < 1e-6);
}

/* The lengths that a model may have, and what follows from other keys. */
static void test_lengths(void **state)
{
	(void)state;
	const struct { const char *scaling; int longest, standard, original; double factor; } cases[] = {
		{"null", 64, 64, 0, 0},
		{"{\"type\": \"default\"}", 64, 64, 0, 0},
		{"{\"type\": \"linear\", \"factor\": 2.5}", 160, 160, 0, 2.5},
		{"{\"type\": \"dynamic\", \"factor\": 4}", 256, 64, 64, 4},
		{"{\"type\": \"yarn\", \"factor\": 4}", 256, 256, 64, 4},
		{"{\"type\": \"yarn\", \"factor\": 4, \"original_max_position_embeddings\": 16}", 64, 64, 16, 4},
		{"{\"type\": \"yarn\", \"original_max_position_embeddings\": 16}", 64, 64, 16, 4},
		{"{\"type\": \"yarn\", \"factor\": 2, \"original_max_position_embeddings\": 64}", 128, 128, 64, 2},
		{"{\"type\": \"linear\", \"factor\": 1e6}", 64000000, 64000000, 0, 1e6},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		char members[256];
		snprintf(members, sizeof members, "{\"max_position_embeddings\": 64, \"rope_scaling\": %s}", cases[i].scaling);
		const struct model_config m = model_of(members);
		if (longest_sequence(&m) != cases[i].longest || default_sequence(&m) != cases[i].standard ||
				m.rope_scaling.original_max_position_embeddings != cases[i].original ||
				m.rope_scaling.factor != cases[i].factor)
			fail_msg("%s: longest %d, by default %d, original %d, factor %g", cases[i].scaling, longest_sequence(&m),
					default_sequence(&m), m.rope_scaling.original_max_position_embeddings, m.rope_scaling.factor);
	}
}

/* A config.json keeps its rope_scaling as it was; without one to keep, what is written means the same. */
static void test_config_json(void **state)
{
	(void)state;
	static const char *const cases[] = {
		"{\"rope_scaling\": null}",
		"{\"rope_scaling\": {\"type\": \"default\", \"factor\": 1.0}}",
		"{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}",
		"{\"rope_scaling\": {\"rope_type\": \"dynamic\", \"factor\": 2.5, \"beta_fast\": null}}",
		"{\"rope_parameters\": {\"rope_type\": \"yarn\", \"factor\": 4.0, \"rope_theta\": 5e5, \"beta_fast\": 30, "
			"\"beta_slow\": 2, \"original_max_position_embeddings\": 4096, \"truncate\": false}}",
		"{\"rope_scaling\": {\"type\": \"yarn\", \"factor\": 4, \"attention_factor\": 1.25, \"mscale\": 0.707, "
			"\"mscale_all_dim\": 0.5}, \"max_position_embeddings\": 32768}",
		"{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}, \"rope_parameters\": {\"rope_type\": \"linear\", "
			"\"factor\": 2.0, \"rope_theta\": 1e4}}",
	};
	for (int i = 0; i < COUNT(cases); i++) {
		const struct model_config m = model_of(cases[i]);
		struct model_config again;
		json_t *base = json_read(at("config.json"));
		assert_int_equal(config_write(at("config.json"), &m, "float32", base, NULL), 0);
		json_t *written = json_read(at("config.json"));
		for (int j = 0; j < 2; j++) {
			const char *name = j ? "rope_parameters" : "rope_scaling";
			const json_t *before = json_object_get(base, name), *after = json_object_get(written, name);
			if (before ? !json_equal(before, after) : after != NULL)
				fail_msg("%s: %s has changed", cases[i], name);
		}
		json_decref(base);
		json_decref(written);
		for (int j = 0; j < 2; j++) {
			assert_int_equal(config_from_huggingface(&again, scratch), 0);
			assert_memory_equal(&again.rope_scaling, &m.rope_scaling, sizeof m.rope_scaling);
			assert_true(again.rope_theta == m.rope_theta);
			assert_int_equal(config_to_huggingface(&m, at("config.json")), 0);
		}
	}
}

/* A base that says something else is overwritten. */
static void test_other_base(void **state)
{
	(void)state;
	struct model_config m = model_of("{\"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}"), again;
	json_t *base = json_pack("{s:{s:s, s:i}}", "rope_parameters", "rope_type", "linear", "factor", 3);
	assert_int_equal(config_write(at("config.json"), &m, "float32", base, NULL), 0);
	json_decref(base);
	assert_int_equal(config_from_huggingface(&again, scratch), 0);
	assert_true(again.rope_scaling.factor == 2);
}

/* What the metadata of GGUF files says of scaling. */
static void test_gguf(void **state)
{
	(void)state;
	const struct { const char *scaling, *error; enum rope_type type; double factor, attention; } cases[] = {
		{"{\"type\": \"none\"}", NULL, ROPE_DEFAULT, 0, 1},
		{"{\"factor\": 1}", NULL, ROPE_DEFAULT, 0, 1},
		{"{\"type\": \"linear\", \"factor\": 2.5, \"finetuned\": true}", NULL, ROPE_LINEAR, 2.5, 1},
		{"{\"type\": \"yarn\", \"factor\": 4, \"original_context_length\": 64}", NULL, ROPE_YARN, 4,
			1.1386294361119891},
		{"{\"type\": \"yarn\", \"factor\": 4, \"yarn_ext_factor\": 1, \"yarn_beta_fast\": 32.0, "
			"\"yarn_beta_slow\": 1, \"yarn_attn_factor\": 1.13862944}", NULL, ROPE_YARN, 4, 1.1386294361119891},
		{"{\"type\": \"yarn\", \"factor\": 4, \"attn_factor\": 2, \"yarn_attn_factor\": 1.0}", NULL, ROPE_YARN, 4,
			2.2772589},
		{"{\"type\": \"longrope\"}",
			"`bailingmoe.rope.scaling.type` is longrope; expected none, linear or yarn", 0, 0, 0},
		{"{\"type\": 3}", "`bailingmoe.rope.scaling.type` is |expected a text", 0, 0, 0},
		{"{\"factor\": 2}", NULL, ROPE_LINEAR, 2, 1},
		{"{\"type\": \"none\", \"factor\": 2}", NULL, ROPE_DEFAULT, 0, 1},
		{"{\"type\": \"yarn\", \"factor\": 0.5}", "factor: found 0.5|at least 1", 0, 0, 0},
		{"{\"type\": \"linear\", \"factor\": \"2\"}", "factor` is |expected a number", 0, 0, 0},
		{"{\"type\": \"linear\", \"factor\": 2, \"attn_factor\": 2}", "attn_factor` is 2 beside the type linear", 0, 0,
			0},
		{"{\"type\": \"yarn\", \"factor\": 4, \"yarn_ext_factor\": 0}", "yarn_ext_factor` is 0; expected 1", 0, 0, 0},
		{"{\"type\": \"yarn\", \"factor\": 4, \"yarn_beta_fast\": 16}", "yarn_beta_fast` is 16; expected 32", 0, 0, 0},
		{"{\"type\": \"yarn\", \"factor\": 4, \"yarn_attn_factor\": 1.5}",
			"yarn_attn_factor` is 1.5; expected 1.138", 0, 0, 0},
		{"{\"type\": \"yarn\", \"factor\": 4, \"yarn_log_multiplier\": 0.1}", "yarn_log_multiplier` is not known", 0, 0,
			0},
	};
	static const struct { const char *name; int value; } sizes[] = {{"block_count", 1}, {"embedding_length", 8},
			{"attention.head_count", 2}, {"vocab_size", 9}, {"expert_count", 2}, {"expert_used_count", 1},
			{"expert_feed_forward_length", 4}, {"context_length", 256}};
	const struct tensors none = {.path = "x.gguf"};
	for (int i = 0; i < COUNT(cases); i++) {
		struct model_config m;
		char key[128];
		const char *name;
		json_t *metadata = json_pack("{s:s}", "general.architecture", "bailingmoe"), *value;
		for (int j = 0; j < COUNT(sizes); j++) {
			snprintf(key, sizeof key, "bailingmoe.%s", sizes[j].name);
			json_object_set_new(metadata, key, json_integer(sizes[j].value));
		}
		json_t *scaling = json_loads(cases[i].scaling, 0, NULL);
		json_object_foreach(scaling, name, value) {
			snprintf(key, sizeof key, "bailingmoe.rope.scaling.%s", name);
			json_object_set(metadata, key, value);
		}
		const int rc = gguf_config(&m, &none, metadata);
		if (rc != (cases[i].error ? -1 : 0))
			fail_msg("%s: %s", cases[i].scaling, rc < 0 ? error_text : "was taken");
		if (rc < 0)
			expect_error(cases[i].error);
		else if (m.rope_scaling.type != cases[i].type || m.rope_scaling.factor != cases[i].factor ||
				!(fabs(rope_attention_factor(&m) / cases[i].attention - 1) < 1e-7))
			fail_msg("%s: type %d, factor %g, attention factor %.9g", cases[i].scaling, m.rope_scaling.type,
					m.rope_scaling.factor, rope_attention_factor(&m));
		json_decref(scaling);
		json_decref(metadata);
	}
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(test_frequencies), TEST(test_scaled_rotation), TEST(test_lengths), TEST(test_config_json),
		TEST(test_other_base), TEST(test_gguf),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
