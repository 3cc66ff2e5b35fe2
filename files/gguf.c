/*
 * files/gguf.c - GGUF, llama.cpp's format: reading and writing, with its tokenizer and its config.
 *
 * A file is: magic, version (u32), number of tensors and of metadata entries (u64 each); of each entry key, type
 * (u32) and value; of each tensor name, dimensions (the innermost first), type, offset; then, aligned, the tensors'
 * bytes. A text is its length (u64) and its bytes.
 */
#define _GNU_SOURCE
#include "files/gguf.h"

#include "files/base.h"
#include "files/config.h"
#include "files/config_keys.h"
#include "files/rope.h"
#include "files/tensors.h"
#include "files/tokenizer_json.h"

#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define GGUF_MAX_ITEMS (1 << 24) /* of an array in the metadata: far beyond any vocabulary */

/* Bytes of a value of each type; of texts and arrays the least that there can be. */
static const int gguf_sizes[NUM_GGUF_TYPES] = {1, 1, 2, 2, 4, 4, 4, 1, 8, 12, 8, 8, 8};

/* Types of tensors by their number. */
#define NO UNKNOWN_DTYPE
static const struct { const char *name; enum dtype dtype; } ggml_types[] = {
	[0] = {"F32", F32}, [1] = {"F16", F16}, [2] = {"Q4_0", NO}, [3] = {"Q4_1", NO}, [6] = {"Q5_0", NO},
	[7] = {"Q5_1", NO}, [8] = {"Q8_0", NO}, [9] = {"Q8_1", NO}, [10] = {"Q2_K", NO}, [11] = {"Q3_K", NO},
	[12] = {"Q4_K", NO}, [13] = {"Q5_K", NO}, [14] = {"Q6_K", NO}, [15] = {"Q8_K", NO}, [16] = {"IQ2_XXS", NO},
	[17] = {"IQ2_XS", NO}, [18] = {"IQ3_XXS", NO}, [19] = {"IQ1_S", NO}, [20] = {"IQ4_NL", NO}, [21] = {"IQ3_S", NO},
	[22] = {"IQ2_S", NO}, [23] = {"IQ4_XS", NO}, [24] = {"I8", NO}, [25] = {"I16", NO}, [26] = {"I32", I32},
	[27] = {"I64", I64}, [28] = {"F64", F64}, [29] = {"IQ1_M", NO}, [30] = {"BF16", BF16}, [34] = {"TQ1_0", NO},
	[35] = {"TQ2_0", NO}, [39] = {"MXFP4", NO}, [40] = {"NVFP4", NO},
};
#undef NO
enum { NUM_GGML_TYPES = sizeof ggml_types / sizeof *ggml_types };

/* By enum architecture. */
static const char *const gguf_architectures[] = {"bailingmoe", "bailingmoe2"};

/* The keys there, behind "bailingmoe." or "bailingmoe2.", and where their values stand in a config.json. A few are not
 * the same number, or have another place there: see values_to_gguf and values_from_gguf. */
enum { OF_V1 = 1, OF_V2 = 2, OF_BOTH = OF_V1 | OF_V2, MAY_MISS = 4 };
static const struct { const char *name; enum gguf_type type; const char *member; int flags; } gguf_keys[] = {
	{"block_count", GGUF_U32, "num_hidden_layers", OF_BOTH}, /* with the MTP layers */
	{"context_length", GGUF_U32, "max_position_embeddings", OF_BOTH},
	{"embedding_length", GGUF_U32, "hidden_size", OF_BOTH},
	{"feed_forward_length", GGUF_U32, "intermediate_size", OF_BOTH},
	{"attention.head_count", GGUF_U32, "num_attention_heads", OF_BOTH},
	{"attention.head_count_kv", GGUF_U32, "num_key_value_heads", OF_BOTH},
	{"attention.key_length", GGUF_U32, "head_dim", OF_BOTH | MAY_MISS},
	{"attention.value_length", GGUF_U32, "head_dim", OF_BOTH | MAY_MISS},
	{"attention.layer_norm_rms_epsilon", GGUF_F32, "rms_norm_eps", OF_BOTH},
	{"rope.dimension_count", GGUF_U32, "head_dim", OF_V1},
	{"rope.dimension_count", GGUF_U32, "rotary_dim", OF_V2 | MAY_MISS},
	{"rope.freq_base", GGUF_F32, "rope_theta", OF_BOTH | MAY_MISS},
	{"vocab_size", GGUF_U32, "vocab_size", OF_BOTH | MAY_MISS},
	{"leading_dense_block_count", GGUF_U32, "first_k_dense_replace", OF_BOTH},
	{"expert_count", GGUF_U32, "num_experts", OF_BOTH},
	{"expert_used_count", GGUF_U32, "num_experts_per_tok", OF_BOTH},
	{"expert_feed_forward_length", GGUF_U32, "moe_intermediate_size", OF_BOTH},
	{"expert_shared_count", GGUF_U32, "num_shared_experts", OF_BOTH},
	{"expert_weights_norm", GGUF_BOOL, "norm_topk_prob", OF_BOTH | MAY_MISS},
	{"expert_weights_scale", GGUF_F32, "routed_scaling_factor", OF_V2 | MAY_MISS},
	{"expert_gating_func", GGUF_U32, "expert_gating_func", OF_V2},
	{"expert_group_count", GGUF_U32, "n_group", OF_V2 | MAY_MISS},
	{"expert_group_used_count", GGUF_U32, "topk_group", OF_V2 | MAY_MISS},
	{"expert_shared_feed_forward_length", GGUF_U32, "shared_width", OF_V2 | MAY_MISS},
	{"nextn_predict_layers", GGUF_U32, "num_nextn_predict_layers", OF_V2 | MAY_MISS},
};
enum { NUM_GGUF_KEYS = sizeof gguf_keys / sizeof *gguf_keys, GATING_SIGMOID = 2 };

/* Our own keys, behind "ling.": llama.cpp has none for them. So a model comes back from GGUF with what it had. */
static const struct { const char *member; enum gguf_type type; int flags; } own_keys[] = {
	{"initializer_range", GGUF_F32, OF_BOTH}, {"mtp_loss_scaling_factor", GGUF_F32, OF_V2},
	{"moe_router_enable_expert_bias", GGUF_BOOL, OF_V2},
};
enum { NUM_OWN_KEYS = sizeof own_keys / sizeof *own_keys };

/* Those of rope_scaling; the name in each architecture. */
enum {
	SCALING_TYPE, SCALING_FACTOR, SCALING_ORIGINAL,
	SCALING_ATTENTION,           /* the attention factor over yarn's own */
	SCALING_FINETUNED,           /* changes nothing */
	SCALING_EXTRAPOLATION,       /* 1: yarn as it is */
	/* Other converters write these three, but llama.cpp does not read them for this architecture, or for yarn. */
	SCALING_FAST, SCALING_SLOW, SCALING_YARN_ATTENTION,
	NUM_SCALING_KEYS
};
#define OF_EACH(name) {"bailingmoe.rope.scaling." name, "bailingmoe2.rope.scaling." name}
static const char *const scaling_keys[NUM_SCALING_KEYS][2] = {OF_EACH("type"), OF_EACH("factor"),
	OF_EACH("original_context_length"), OF_EACH("attn_factor"), OF_EACH("finetuned"), OF_EACH("yarn_ext_factor"),
	OF_EACH("yarn_beta_fast"), OF_EACH("yarn_beta_slow"), OF_EACH("yarn_attn_factor")};
#undef OF_EACH

/* Keys that bailingmoe may have with the value 0 or 1. Both values mean what a file without them means: a softmax over
 * one group of experts, whose weights are not scaled. */
static const char *const gguf_switches[] = {"expert_weights_scale", "expert_gating_func", "expert_group_count",
		"expert_group_used_count"};

const struct pre_tokenizers_row pre_tokenizers[] = {
	{"bailingmoe", LING_PATTERN_POSSESSIVE},
	{"bailingmoe", LING_PATTERN},
	{"gpt-2", NULL},
};
enum { NUM_PRE_TOKENIZERS = sizeof pre_tokenizers / sizeof *pre_tokenizers };

/* What Hugging Face and GGUF call the tokens that have a role. */
static const struct { const char *role, *gguf; } token_roles[] = {
	{"bos", "tokenizer.ggml.bos_token_id"}, {"eos", "tokenizer.ggml.eos_token_id"},
	{"unk", "tokenizer.ggml.unknown_token_id"}, {"sep", "tokenizer.ggml.seperator_token_id"},
	{"pad", "tokenizer.ggml.padding_token_id"},
};
enum { ROLE_BOS, ROLE_EOS, NUM_TOKEN_ROLES = sizeof token_roles / sizeof *token_roles };

const char *gguf_architecture(const struct model_config *m)
{
	return gguf_architectures[m->architecture];
}

/* The flag of the keys of an architecture. */
static int flag_of(enum architecture a)
{
	return a == BAILING_MOE ? OF_V1 : OF_V2;
}

/* -- reading -- */

struct cursor { const char *path; const uint8_t *at, *end; };

/* The next n bytes, NULL when there are fewer. */
static const uint8_t *take(struct cursor *c, uint64_t n)
{
	const uint8_t *bytes = c->at;
	if (n > (uint64_t)(c->end - c->at)) {
		fail("%s: ends within its header: %llu bytes expected, %lld left; the file is truncated", c->path,
				(unsigned long long)n, (long long)(c->end - c->at));
		return NULL;
	}
	c->at += n;
	return bytes;
}

/* Each reads the next integer. */
static int take_u32(struct cursor *c, uint32_t *out)
{
	const uint8_t *bytes = take(c, 4);
	if (bytes)
		memcpy(out, bytes, 4);
	return bytes ? 0 : -1;
}

static int take_u64(struct cursor *c, uint64_t *out)
{
	const uint8_t *bytes = take(c, 8);
	if (bytes)
		memcpy(out, bytes, 8);
	return bytes ? 0 : -1;
}

/* A text; `what` names it. NULL on error. */
static json_t *take_text(struct cursor *c, const char *what)
{
	uint64_t n;
	const uint8_t *bytes;
	if (take_u64(c, &n) < 0 || !(bytes = take(c, n)))
		return NULL;
	json_t *text = json_stringn((const char *)bytes, n);
	if (!text)
		fail("%s: %s is not UTF-8", c->path, what);
	return text;
}

/* A text that is a name: without a 0 in it. NULL on error. */
static json_t *take_name(struct cursor *c, const char *what)
{
	json_t *name = take_text(c, what);
	if (name && strlen(json_string_value(name)) == json_string_length(name))
		return name;
	if (name)
		fail("%s: %s has a 0 byte in it", c->path, what);
	json_decref(name);
	return NULL;
}

/* The double that the shortest decimal text of a float means, so that 1e-6 comes back as 1e-6. */
static double shortest_decimal(float value)
{
	char text[32];
	for (int digits = 6; digits <= 9; digits++) {
		snprintf(text, sizeof text, "%.*g", digits, value);
		if (strtof(text, NULL) == value)
			break;
	}
	return strtod(text, NULL);
}

/* A value of the metadata. NULL on error. */
static json_t *take_value(struct cursor *c, const char *key, uint32_t type)
{
	if (type == GGUF_TEXT)
		return take_text(c, key);
	const uint8_t *bytes = type < NUM_GGUF_TYPES ? take(c, gguf_sizes[type]) : NULL;
	if (type >= NUM_GGUF_TYPES)
		fail("%s: `%s` is of type %u; expected one of 0 to %d", c->path, key, type, NUM_GGUF_TYPES - 1);
	if (!bytes)
		return NULL;
	uint64_t n = 0;
	memcpy(&n, bytes + (type == GGUF_ARRAY ? 4 : 0), type == GGUF_ARRAY ? 8 : gguf_sizes[type]);
	json_t *value = NULL;
	double d;
	switch (type) {
	case GGUF_U8: case GGUF_U16: case GGUF_U32: return json_integer(n);
	case GGUF_I8: return json_integer((int8_t)n);
	case GGUF_I16: return json_integer((int16_t)n);
	case GGUF_I32: return json_integer((int32_t)n);
	case GGUF_BOOL: return json_boolean(n);
	case GGUF_U64: case GGUF_I64:
		if (type == GGUF_I64 || n <= INT64_MAX)
			return json_integer((int64_t)n);
		fail("%s: `%s` is %llu; expected less than 2^63", c->path, key, (unsigned long long)n);
		return NULL;
	case GGUF_F32: case GGUF_F64:
		memcpy(&d, &n, sizeof d);
		if (type == GGUF_F32)
			d = shortest_decimal(bits_to_float((uint32_t)n));
		if (!(value = json_real(d)))
			fail("%s: `%s` is %g; expected a finite number", c->path, key, d);
		return value;
	default: /* an array: the type and the number of its items */
		type = load_i32(bytes);
		if (type == GGUF_ARRAY || type >= NUM_GGUF_TYPES || n > GGUF_MAX_ITEMS ||
				n > (uint64_t)(c->end - c->at) / gguf_sizes[type]) {
			fail("%s: `%s` is an array of %llu items of type %u; expected one of known types, no longer than the file",
					c->path, key, (unsigned long long)n, type);
			return NULL;
		}
		value = json_array();
		for (uint64_t i = 0; i < n; i++) {
			json_t *item = take_value(c, key, type);
			if (!item) {
				json_decref(value);
				return NULL;
			}
			json_array_append_new(value, item);
		}
		return value;
	}
}

/* One entry of the metadata. */
static int take_entry(struct cursor *c, json_t *metadata)
{
	uint32_t type;
	json_t *name = take_name(c, "a key"), *value = NULL;
	const char *key = json_string_value(name);
	if (name && json_object_get(metadata, key))
		fail("%s: `%s` is there twice; expected it once", c->path, key);
	else if (name && take_u32(c, &type) == 0 && (value = take_value(c, key, type)))
		json_object_set(metadata, key, value);
	json_decref(name);
	json_decref(value);
	return value ? 0 : -1;
}

/* The place of one tensor. `names` has those that were read before, and keeps this one. */
static int take_tensor(struct cursor *c, struct tensor *t, json_t *names, const struct tensor_file *s)
{
	*t = (struct tensor){0};
	json_t *name = take_name(c, "a tensor's name");
	const char *text = json_string_value(name);
	uint32_t dimensions, type;
	uint64_t size, bytes = 1;
	int rc = name ? 0 : -1;
	if (rc == 0 && json_object_get(names, text))
		rc = fail("%s: tensor %.256s is there twice; expected it once", c->path, text);
	if (rc == 0)
		rc = take_u32(c, &dimensions);
	if (rc == 0 && (dimensions < 1 || dimensions > 4))
		rc = fail("%s: tensor %.256s has %u dimensions; expected 1 to 4", c->path, text, dimensions);
	if (rc == 0)
		t->num_dims = dimensions;
	for (int i = t->num_dims - 1; rc == 0 && i >= 0; i--) { /* the innermost dimension comes first */
		rc = take_u64(c, &size);
		if (rc == 0 && (size > INT64_MAX || __builtin_mul_overflow(bytes, size, &bytes) || bytes > INT64_MAX / 8))
			rc = fail("%s: tensor %.256s is too large for any file", c->path, text);
		t->shape[i] = rc == 0 ? size : 0;
	}
	if (rc == 0)
		rc = take_u32(c, &type) < 0 || take_u64(c, &t->begin) < 0 ? -1 : 0;
	if (rc == 0) {
		const bool known = type < NUM_GGML_TYPES && ggml_types[type].name;
		t->file = s;
		t->dtype = known ? ggml_types[type].dtype : UNKNOWN_DTYPE;
		t->dtype_name = known ? ggml_types[type].name : "unknown";
		if (t->begin > INT64_MAX)
			rc = fail("%s: tensor %.256s: offset %llu; expected one within the file", c->path, text,
					(unsigned long long)t->begin);
		t->end = t->begin + (t->dtype == UNKNOWN_DTYPE ? 0 : bytes * dtypes[t->dtype].size);
		json_object_set_new(names, text, json_null());
		t->name = json_object_iter_key(json_object_iter_at(names, text)); /* it lives as long as the object */
	}
	json_decref(name);
	return rc;
}

/* Checks that n tensors lie within a file's data, aligned, one behind the other. Sorts them by offset. */
static int tensors_placed(struct tensor *t, int n, const struct tensor_file *s, uint64_t data_size, uint64_t alignment)
{
	if (n)
		qsort(t, n, sizeof *t, by_offset);
	for (int i = 0; i < n; i++) {
		if (t[i].begin % alignment)
			return fail("%s: tensor %.256s: offset %llu; expected a multiple of %llu", s->path, t[i].name,
					(unsigned long long)t[i].begin, (unsigned long long)alignment);
		if (t[i].end > data_size)
			return fail("%s: tensor %.256s ends at data byte %llu, the file at %llu; the file is truncated", s->path,
					t[i].name, (unsigned long long)t[i].end, (unsigned long long)data_size);
		if (i && t[i].begin < t[i - 1].end)
			return fail("%s: tensors %.256s and %.256s overlap at data byte %llu", s->path, t[i - 1].name, t[i].name,
					(unsigned long long)t[i].begin);
	}
	return 0;
}

int gguf_open(struct tensors *w, const char *path)
{
	struct tensor_file *s = tensor_file_map(w, path);
	if (!s)
		return -1;
	struct cursor c = {path, s->map, s->map + s->size};
	uint32_t version = 0;
	uint64_t tensors = 0, entries = 0;
	int64_t alignment = GGUF_ALIGNMENT;
	if (s->size < 4 || memcmp(s->map, GGUF_MAGIC, 4))
		return fail("%s: no GGUF file: it does not begin with " GGUF_MAGIC "; expected one, or the directory of a "
				"Hugging Face model or a checkpoint", path);
	c.at += 4;
	if (take_u32(&c, &version) < 0)
		return -1;
	if (version < 2 || version > GGUF_VERSION)
		return fail("%s: GGUF version %u%s; expected 2 or 3", path, version,
				version > 0xffff ? " (a big-endian file)" : "");
	if (take_u64(&c, &tensors) < 0 || take_u64(&c, &entries) < 0)
		return -1;
	if (tensors > s->size / 32 || entries > s->size / 13) /* the least that each takes */
		return fail("%s: %llu tensors and %llu entries of metadata do not fit into its %zu bytes; the file is "
				"truncated or damaged", path, (unsigned long long)tensors, (unsigned long long)entries, s->size);
	json_t *metadata = json_object(), *names = json_object();
	s->header = json_pack("{s:o, s:o}", "metadata", metadata, "names", names);
	for (uint64_t i = 0; i < entries; i++)
		if (take_entry(&c, metadata) < 0)
			return -1;
	if (json_object_get(metadata, "general.alignment") &&
			field_int(metadata, path, "general.alignment", 8, 1 << 20, &alignment) < 0)
		return -1;
	if (alignment & (alignment - 1))
		return fail("%s: `general.alignment` is %lld; expected a power of 2", path, (long long)alignment);
	w->tensors = grow(w->tensors, w->count, &w->capacity, tensors + 1, sizeof *w->tensors); /* + 1: never NULL */
	for (uint64_t i = 0; i < tensors; i++)
		if (take_tensor(&c, &w->tensors[i], names, s) < 0)
			return -1;
	s->data_at = (c.at - s->map + alignment - 1) / alignment * alignment;
	if (tensors_placed(w->tensors, tensors, s, s->data_at > s->size ? 0 : s->size - s->data_at, alignment) < 0)
		return -1;
	w->count = tensors;
	if (w->count)
		qsort(w->tensors, w->count, sizeof *w->tensors, by_name);
	return 0;
}

/* Reads rope.scaling.* into a config.json's rope_scaling. */
static int scaling_from_gguf(json_t *config, const json_t *metadata, enum architecture a, const char *path)
{
	const json_t *value[NUM_SCALING_KEYS];
	for (int i = 0; i < NUM_SCALING_KEYS; i++) {
		const char *key = scaling_keys[i][a];
		value[i] = json_object_get(metadata, key);
		if (value[i] && i != SCALING_FINETUNED && (i == SCALING_TYPE ? !json_is_string(value[i])
				: !json_is_number(value[i])))
			return fail("%s: `%s` is %s; expected a %s", path, key, json_kind(value[i]), i == SCALING_TYPE ? "text"
					: "number");
	}
	const double factor = value[SCALING_FACTOR] ? json_number_value(value[SCALING_FACTOR]) : 1;
	/* without a type llama.cpp takes linear */
	const char *type = value[SCALING_TYPE] ? json_string_value(value[SCALING_TYPE]) : factor == 1 ? "none" : "linear";
	if (!strcmp(type, "none"))
		return 0;
	if (strcmp(type, "linear") && strcmp(type, "yarn"))
		return fail("%s: `%s` is %.40s; expected none, linear or yarn", path, scaling_keys[SCALING_TYPE][a], type);
	const bool yarn = !strcmp(type, "yarn");
	json_t *scaling = json_pack("{s:s, s:f}", "rope_type", type, "factor", factor);
	const json_t *attention = value[SCALING_ATTENTION];
	const double standard = yarn ? rope_yarn_attention(factor) : 1;
	const struct { int key; double expected, also; } unread[] = {{SCALING_FAST, 32, 32}, {SCALING_SLOW, 1, 1},
			{SCALING_YARN_ATTENTION, standard, 1}};
	if (value[SCALING_ORIGINAL] && yarn)
		json_object_set(scaling, "original_max_position_embeddings", (json_t *)value[SCALING_ORIGINAL]);
	if (yarn && attention && json_number_value(attention) != 1)
		json_object_set_new(scaling, "attention_factor", json_real(shortest_decimal((float)(standard *
				json_number_value(attention)))));
	json_object_set_new(config, "rope_scaling", scaling);
	if (!yarn && attention && json_number_value(attention) != 1)
		return fail("%s: `%s` is %g beside the type linear; expected 1", path, scaling_keys[SCALING_ATTENTION][a],
				json_number_value(attention));
	if (value[SCALING_EXTRAPOLATION] && json_number_value(value[SCALING_EXTRAPOLATION]) != yarn)
		return fail("%s: `%s` is %g; expected %d, for type %s", path, scaling_keys[SCALING_EXTRAPOLATION][a],
				json_number_value(value[SCALING_EXTRAPOLATION]), yarn, type);
	for (int i = 0; i < 3; i++) {
		const json_t *given = value[unread[i].key];
		const double number = given ? json_number_value(given) : unread[i].expected;
		if (number != unread[i].also && fabs(number - unread[i].expected) > 1e-6)
			return fail("%s: `%s` is %g; expected %g, for llama.cpp computes with that whatever it is, and the model's "
					"maker may have meant what is written: convert the Hugging Face model", path,
					scaling_keys[unread[i].key][a], number, unread[i].expected);
	}
	return 0;
}

/* Puts the number of a member in the place of the one that is there. */
static void set_integer(json_t *object, const char *member, json_int_t value)
{
	json_object_set_new(object, member, json_integer(value));
}

static json_int_t get_integer(const json_t *object, const char *member)
{
	return json_integer_value(json_object_get(object, member));
}

/* Whether a key of that type may have a value, whatever the type that it has in the file. */
static bool value_fits(enum gguf_type type, const json_t *value)
{
	if (type == GGUF_BOOL)
		return json_is_boolean(value);
	if (type == GGUF_F32)
		return json_is_number(value);
	return json_is_integer(value) && json_integer_value(value) >= 0 && json_integer_value(value) <= INT32_MAX;
}

/* Makes of the values of bailingmoe2's keys those of a config.json: what llama.cpp takes for keys that are not there,
 * and what it counts in another way. Fails for what it does not compute. */
static int values_from_gguf(json_t *config, const struct tensors *w)
{
	for (int i = 0; i < NUM_GGUF_KEYS; i++)
		if (gguf_keys[i].flags & OF_V2 && !(gguf_keys[i].flags & MAY_MISS) &&
				!json_object_get(config, gguf_keys[i].member))
			return fail("%s: the key `%s.%s` is missing", w->path, gguf_architectures[BAILING_MOE_V2],
					gguf_keys[i].name);
	const json_int_t gating = get_integer(config, "expert_gating_func"), layers = get_integer(config,
			"num_hidden_layers"), mtp = get_integer(config, "num_nextn_predict_layers"), width = get_integer(config,
			"moe_intermediate_size"), shared = get_integer(config, "shared_width");
	if (gating != GATING_SIGMOID)
		return fail("%s: `%s.expert_gating_func` is %lld; expected %d, a sigmoid", w->path,
				gguf_architectures[BAILING_MOE_V2], (long long)gating, GATING_SIGMOID);
	/* llama.cpp's loader takes the width of one shared expert, its converter writes that of all */
	if (shared && shared != width && shared != width * get_integer(config, "num_shared_experts"))
		return fail("%s: `%s.expert_shared_feed_forward_length` is %lld; expected that of an expert, %lld", w->path,
				gguf_architectures[BAILING_MOE_V2], (long long)shared, (long long)width);
	set_integer(config, "num_hidden_layers", layers - mtp);
	if (get_integer(config, "n_group") <= 1) {
		set_integer(config, "n_group", 1);
		set_integer(config, "topk_group", 1);
	} else if (!json_object_get(config, "topk_group"))
		return fail("%s: the key `%s.expert_group_used_count` is missing beside expert_group_count", w->path,
				gguf_architectures[BAILING_MOE_V2]);
	if (!json_number_value(json_object_get(config, "routed_scaling_factor")))
		set_integer(config, "routed_scaling_factor", 1);
	if (!json_object_get(config, "rope_theta"))
		set_integer(config, "rope_theta", 10000);
	if (!json_object_get(config, "head_dim"))
		set_integer(config, "head_dim", 0);
	bool biased = false;
	for (int i = 0; i < w->count; i++)
		biased |= has_suffix(w->tensors[i].name, ".exp_probs_b.bias");
	json_object_set_new(config, "moe_router_enable_expert_bias", json_boolean(biased));
	return 0;
}

int gguf_config(struct model_config *m, const struct tensors *w, const json_t *metadata)
{
	const char *name = field_text(metadata, w->path, "general.architecture"), *key;
	json_t *value, *splits = json_object_get(metadata, "split.count");
	enum architecture a = BAILING_MOE;
	if (!name)
		return -1;
	while (a <= BAILING_MOE_V2 && strcmp(name, gguf_architectures[a]))
		a++;
	if (a > BAILING_MOE_V2)
		return fail("%s: architecture `%.60s`; expected bailingmoe, which Ling-Lite and Ling-Plus are, or bailingmoe2, "
				"which Ling 2.0 is", w->path, name);
	if (splits && json_integer_value(splits) > 1)
		return fail("%s: one of %lld files of a split model; join them first (llama-gguf-split --merge)", w->path,
				(long long)json_integer_value(splits));
	json_t *config = json_pack("{s:[s], s:b, s:b, s:b, s:b, s:b}", "architectures", architecture_names[a],
			"norm_head", 0, "use_bias", 0, "use_qkv_bias", 0, "norm_topk_prob", 0, "tie_word_embeddings",
			!tensor_find(w, "output.weight"));
	json_t *found = json_object(); /* members that have been set */
	const size_t prefix = strlen(name) + 1;
	int rc = 0;
	json_object_foreach((json_t *)metadata, key, value) {
		if (rc < 0 || strncmp(key, name, prefix - 1) || key[prefix - 1] != '.')
			continue;
		bool known = false;
		for (int i = 0; i < NUM_SCALING_KEYS; i++)
			known |= !strcmp(key, scaling_keys[i][a]);
		for (int i = 0; i < 4 && a == BAILING_MOE; i++)
			if (!strcmp(key + prefix, gguf_switches[i])) {
				known = true;
				if (!json_is_number(value) || (json_number_value(value) != 0 && json_number_value(value) != 1))
					rc = fail("%s: `%s` is not 1; this program's models know no other value", w->path, key);
			}
		for (int i = 0; i < NUM_GGUF_KEYS && !rc; i++)
			if (gguf_keys[i].flags & flag_of(a) && !strcmp(key + prefix, gguf_keys[i].name)) {
				const char *member = gguf_keys[i].member;
				const json_t *before = json_object_get(found, member);
				if (!value_fits(gguf_keys[i].type, value))
					rc = fail("%s: `%s` is %s%s; expected %s", w->path, key, json_kind(value), json_is_integer(value)
							? " below 0 or above 2147483647" : "", gguf_keys[i].type == GGUF_BOOL ? "true or false"
							: gguf_keys[i].type == GGUF_F32 ? "a number" : "a whole number");
				else if (before && !json_equal(before, value))
					rc = fail("%s: `%s` gives another %s than a key before it; expected the same", w->path, key,
							member);
				json_object_set(found, member, value);
				known = true;
			}
		if (!known && !rc)
			rc = fail("%s: the key `%s` is not known: it may change what the model computes", w->path, key);
	}
	const json_t *tokens = json_object_get(metadata, "tokenizer.ggml.tokens");
	json_object_update(config, found);
	if (!json_object_get(config, "vocab_size") && tokens)
		set_integer(config, "vocab_size", json_array_size(tokens));
	if (!rc && a == BAILING_MOE_V2)
		rc = values_from_gguf(config, w);
	for (int i = 0; i < NUM_OWN_KEYS; i++) {
		char own[MAX_NAME];
		snprintf(own, sizeof own, "ling.%s", own_keys[i].member);
		if (own_keys[i].flags & flag_of(a) && (value = json_object_get(metadata, own)))
			json_object_set(config, own_keys[i].member, value);
	}
	if (!rc)
		rc = scaling_from_gguf(config, metadata, a, w->path);
	if (!rc)
		rc = config_from_json(m, config, w->path);
	if (!rc && a == BAILING_MOE && m->first_k_dense_replace)
		rc = fail("%s: `bailingmoe.leading_dense_block_count` is %d; expected 0, for llama.cpp computes no other "
				"models of this architecture", w->path, m->first_k_dense_replace);
	json_decref(found);
	json_decref(config);
	return rc;
}

json_t *pre_tokenizer_json(const char *pattern)
{
	json_t *bytes = json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space", 0, "trim_offsets", 1,
			"use_regex", !pattern);
	return !pattern ? bytes : json_pack("{s:s, s:[{s:s, s:{s:s}, s:s, s:b}, o]}", "type", "Sequence", "pretokenizers",
			"type", "Split", "pattern", "Regex", pattern, "behavior", "Isolated", "invert", 0, bytes);
}

/* Fills vocab and added, parts of a tokenizer.json, from the tokens of a GGUF file and their types. */
static int vocabulary_to_json(const char *path, const json_t *tokens, const json_t *types, json_t *vocab,
		json_t *added)
{
	const json_t *token;
	size_t id;
	json_array_foreach(tokens, id, token) {
		const char *text = json_string_value(token);
		const json_int_t type = json_integer_value(json_array_get(types, id));
		if (!text || strlen(text) != json_string_length(token))
			return fail("%s: `tokenizer.ggml.tokens` entry %zu is no plain text", path, id);
		if (type == TOKEN_CONTROL || type == TOKEN_USER_DEFINED)
			json_array_append_new(added, json_pack("{s:I, s:s, s:b, s:b, s:b, s:b, s:b}", "id", (json_int_t)id,
					"content", text, "single_word", 0, "lstrip", 0, "rstrip", 0, "normalized", 0, "special",
					type == TOKEN_CONTROL));
		else if (type == TOKEN_NORMAL && json_object_get(vocab, text))
			return fail("%s: token `%.60s` is there twice, the second time with id %zu", path, text, id);
		else if (type == TOKEN_NORMAL)
			json_object_set_new(vocab, text, json_integer(id));
		else if (type != TOKEN_UNUSED)
			return fail("%s: token %zu is of type %lld; expected 1, 3, 4 or 5 (normal, control, user-defined, unused)",
					path, id, (long long)type);
	}
	return 0;
}

int gguf_to_tokenizer(const json_t *metadata, const char *path, const char *dir)
{
	const char *model = field_text(metadata, path, "tokenizer.ggml.model"), *pre = NULL;
	if (!model)
		return -1;
	if (!strcmp(model, "no_vocab") || !strcmp(model, "none"))
		return 0;
	if (!strcmp(model, "gpt2") && !(pre = field_text(metadata, path, "tokenizer.ggml.pre")))
		return -1;
	int kind = 0;
	if (pre && !strcmp(pre, gguf_architectures[BAILING_MOE_V2])) /* the same pattern */
		pre = gguf_architectures[BAILING_MOE];
	while (pre && kind < NUM_PRE_TOKENIZERS && strcmp(pre, pre_tokenizers[kind].name))
		kind++;
	if (!pre || kind == NUM_PRE_TOKENIZERS)
		return fail("%s: a tokenizer of the kind %.40s %.40s; expected gpt2 with bailingmoe, bailingmoe2 or gpt-2; "
				"--no-tokenizer leaves it out", path, model, pre ? pre : "");
	const json_t *tokens = json_object_get(metadata, "tokenizer.ggml.tokens");
	const json_t *types = json_object_get(metadata, "tokenizer.ggml.token_type");
	json_t *merges = json_object_get(metadata, "tokenizer.ggml.merges");
	if (!json_is_array(tokens) || !json_is_array(types) || !json_is_array(merges) ||
			json_array_size(tokens) != json_array_size(types))
		return fail("%s: tokenizer.ggml.tokens, .token_type and .merges do not make a vocabulary: expected arrays, "
				"the first two equally long", path);

	json_t *vocab = json_object(), *added = json_array();
	json_t *byte_level = pre_tokenizer_json(NULL);
	json_t *tokenizer = json_pack("{s:s, s:n, s:n, s:O, s:n, s:o, s:O, s:O, s:{s:s, s:n, s:n, s:n, s:n, s:b, s:b, "
			"s:b, s:O, s:O}}", "version", "1.0", "truncation", "padding", "added_tokens", added, "normalizer",
			"pre_tokenizer", pre_tokenizer_json(pre_tokenizers[kind].pattern), "post_processor", byte_level, "decoder",
			byte_level, "model", "type", "BPE", "dropout", "unk_token", "continuing_subword_prefix",
			"end_of_word_suffix", "fuse_unk", 0, "byte_fallback", 0, "ignore_merges", 0, "vocab", vocab, "merges",
			merges);
	json_t *config = json_pack("{s:s, s:b}", "tokenizer_class", "PreTrainedTokenizerFast",
			"clean_up_tokenization_spaces", 0);
	char file[PATH_LEN], name[32];
	int rc = vocabulary_to_json(path, tokens, types, vocab, added);
	for (int i = 0; i < NUM_TOKEN_ROLES; i++) {
		const json_t *id = json_object_get(metadata, token_roles[i].gguf);
		json_t *token = json_is_integer(id) ? json_array_get(tokens, json_integer_value(id)) : NULL;
		snprintf(name, sizeof name, "%s_token", token_roles[i].role);
		if (token)
			json_object_set(config, name, token);
	}
	json_t *template = json_object_get(metadata, "tokenizer.chat_template");
	if (template)
		json_object_set(config, "chat_template", template);
	if (!rc)
		rc = path_join(file, dir, "tokenizer.json") < 0 ? -1 : json_write(file, tokenizer);
	if (!rc)
		rc = path_join(file, dir, "tokenizer_config.json") < 0 ? -1 : json_write(file, config);
	json_decref(byte_level);
	json_decref(vocab);
	json_decref(added);
	json_decref(tokenizer);
	json_decref(config);
	return rc;
}

/* -- writing -- */

void append_u32(struct text *out, uint32_t value)
{
	text_append(out, (const char *)&value, sizeof value);
}

void append_u64(struct text *out, uint64_t value)
{
	text_append(out, (const char *)&value, sizeof value);
}

void append_text(struct text *out, const char *text)
{
	append_u64(out, strlen(text));
	text_append(out, text, strlen(text));
}

/* Appends the key and type of an entry; the value must follow. */
static void begin_entry(struct metadata *m, const char *key, enum gguf_type type)
{
	append_text(&m->bytes, key);
	append_u32(&m->bytes, type);
	m->count++;
}

void entry_u32(struct metadata *m, const char *key, uint32_t value)
{
	begin_entry(m, key, GGUF_U32);
	append_u32(&m->bytes, value);
}

static void entry_f32(struct metadata *m, const char *key, float value)
{
	begin_entry(m, key, GGUF_F32);
	append_u32(&m->bytes, float_to_bits(value));
}

static void entry_bool(struct metadata *m, const char *key, bool value)
{
	begin_entry(m, key, GGUF_BOOL);
	text_append(&m->bytes, (const char *)&(uint8_t){value}, 1);
}

void entry_text(struct metadata *m, const char *key, const char *value)
{
	struct text valid = {0};
	text_append_utf8(&valid, value, strlen(value));
	begin_entry(m, key, GGUF_TEXT);
	append_text(&m->bytes, valid.data ? valid.data : "");
	free(valid.data);
}

/* Begins an array; its n items must follow. */
static void entry_array(struct metadata *m, const char *key, enum gguf_type type, uint64_t n)
{
	begin_entry(m, key, GGUF_ARRAY);
	append_u32(&m->bytes, type);
	append_u64(&m->bytes, n);
}

/* The entries of rope_scaling. Fails for what llama.cpp does not compute. */
static int scaling_to_gguf(struct metadata *m, const struct model_config *model, const char *path)
{
	const struct rope_scaling *s = &model->rope_scaling;
	const enum architecture a = model->architecture;
	double range[2];
	if (s->type == ROPE_DEFAULT)
		return 0;
	if (s->type == ROPE_DYNAMIC)
		return fail("%s: rope_scaling is of type dynamic, which llama.cpp's %s does not compute; expected linear, yarn "
				"or none", path, gguf_architectures[a]);
	entry_text(m, scaling_keys[SCALING_TYPE][a], s->type == ROPE_YARN ? "yarn" : "linear");
	entry_f32(m, scaling_keys[SCALING_FACTOR][a], s->factor);
	if (s->type == ROPE_LINEAR)
		return 0;
	rope_yarn_range(range, model);
	if (!s->truncate)
		return fail("%s: rope_scaling has truncate false, but llama.cpp always rounds; expected true", path);
	if (s->beta_fast != 32 || s->beta_slow != 1)
		return fail("%s: rope_scaling has beta_fast %g and beta_slow %g, but llama.cpp's %s knows only 32 and 1", path,
				s->beta_fast, s->beta_slow, gguf_architectures[a]);
	if (range[1] < range[0])
		return fail("%s: rope_scaling's original_max_position_embeddings, %d, is so short that llama.cpp scales other "
				"frequencies than transformers; expected more than 6", path,
				s->original_max_position_embeddings);
	entry_u32(m, scaling_keys[SCALING_ORIGINAL][a], s->original_max_position_embeddings);
	const double attention = rope_attention_factor(model) / rope_yarn_attention(s->factor);
	if (attention != 1)
		entry_f32(m, scaling_keys[SCALING_ATTENTION][a], attention);
	return 0;
}

/* Fails for a model that llama.cpp does not compute. */
static int check_computed(const struct model_config *c, const char *path)
{
	const bool v2 = c->architecture == BAILING_MOE_V2;
	const int width = c->num_attention_heads * c->head_dim;
	const char *name = gguf_architecture(c);
	const struct { const char *key; bool set; } refused[] = {{"use_bias", c->use_bias},
		{"use_qkv_bias", c->use_qkv_bias}, {"first_k_dense_replace", !v2 && c->first_k_dense_replace}};
	for (int i = 0; i < 3; i++)
		if (refused[i].set)
			return fail("%s: %s is set, which llama.cpp's %s does not compute; expected it off", path, refused[i].key,
					name);
	if (!c->num_shared_experts && c->first_k_dense_replace < c->num_hidden_layers + c->num_nextn_predict_layers)
		return fail("%s: num_shared_experts is 0, but llama.cpp's %s needs a shared expert", path, name);
	if (v2 && !c->use_qk_norm)
		return fail("%s: use_qk_norm is false, but llama.cpp's %s needs these norms", path, name);
	if (v2 && width != c->hidden_size)
		return fail("%s: num_attention_heads * head_dim is %d, but llama.cpp's %s takes it for hidden_size, which is "
				"%d", path, width, name, c->hidden_size);
	return 0;
}

/* The members of a config.json that gguf_keys name, as llama.cpp wants them. */
static json_t *values_to_gguf(const struct model_config *model)
{
	struct config c = {.model = *model};
	json_t *values = config_value(&c, "model");
	set_integer(values, "num_hidden_layers", model->num_hidden_layers + model->num_nextn_predict_layers);
	set_integer(values, "rotary_dim", rotary_dim(model));
	set_integer(values, "shared_width", model->moe_intermediate_size); /* its loader multiplies */
	set_integer(values, "expert_gating_func", GATING_SIGMOID);
	if (model->num_experts_per_tok == 1) /* a lone expert keeps its own weight */
		json_object_set_new(values, "norm_topk_prob", json_false());
	if (model->topk_group == model->n_group) { /* the same as no groups, and llama.cpp knows only that */
		set_integer(values, "n_group", 1);
		set_integer(values, "topk_group", 1);
	}
	return values;
}

/* Appends an entry with a member of an object. */
static void entry_member(struct metadata *m, const char *prefix, const char *name, enum gguf_type type,
		const json_t *value)
{
	char key[MAX_NAME];
	snprintf(key, sizeof key, "%s.%s", prefix, name);
	switch (type) {
	case GGUF_BOOL: entry_bool(m, key, json_is_true(value)); break;
	case GGUF_F32: entry_f32(m, key, json_number_value(value)); break;
	default: entry_u32(m, key, json_integer_value(value));
	}
}

int config_to_gguf(struct metadata *m, const struct model_config *model, const char *path)
{
	const int flag = flag_of(model->architecture);
	const char *name = gguf_architecture(model);
	if (check_computed(model, path) < 0)
		return -1;
	json_t *values = values_to_gguf(model);
	for (int i = 0; i < NUM_GGUF_KEYS; i++)
		if (gguf_keys[i].flags & flag)
			entry_member(m, name, gguf_keys[i].name, gguf_keys[i].type, json_object_get(values, gguf_keys[i].member));
	if (flag == OF_V1)
		entry_f32(m, "bailingmoe.expert_weights_scale", 1);
	for (int i = 0; i < NUM_OWN_KEYS; i++)
		if (own_keys[i].flags & flag)
			entry_member(m, "ling", own_keys[i].member, own_keys[i].type, json_object_get(values, own_keys[i].member));
	json_decref(values);
	return scaling_to_gguf(m, model, path);
}

/* llama.cpp's name for a pre_tokenizer of a model; NULL when it has none. */
static const char *pre_tokenizer_name(const json_t *found, const struct model_config *c)
{
	const char *name = NULL;
	for (int i = 0; i < NUM_PRE_TOKENIZERS && !name; i++) {
		/* trim_offsets does not change ids, so it is made equal; a missing use_regex means true. */
		json_t *ours = pre_tokenizer_json(pre_tokenizers[i].pattern), *theirs = json_deep_copy(found);
		json_t *parts = json_object_get(theirs, "pretokenizers");
		json_t *last = parts ? json_array_get(parts, json_array_size(parts) - 1) : theirs;
		json_object_set_new(last, "trim_offsets", json_true());
		if (!json_object_get(last, "use_regex"))
			json_object_set_new(last, "use_regex", json_true());
		if (json_equal(ours, theirs))
			name = pre_tokenizers[i].name;
		json_decref(ours);
		json_decref(theirs);
	}
	/* the same pattern, under the name of the architecture */
	return name && pre_tokenizers[0].name == name ? gguf_architecture(c) : name;
}

/* Places a token of tokenizer.json among the vocabulary's, of which each id has one text. */
static int place_token(const char *path, const char **texts, uint8_t *types, int vocab_size, const char *text,
		const json_t *id, int type)
{
	const json_int_t i = json_integer_value(id);
	if (!text || !json_is_integer(id) || i < 0 || i >= vocab_size)
		return fail("%s: token `%.60s` has the id %lld; expected 0 to %d, for the model's vocab_size is %d",
				path, text ? text : "", (long long)i, vocab_size - 1, vocab_size);
	if (texts[i] && strcmp(texts[i], text))
		return fail("%s: `%.60s` and `%.60s` both have the id %lld; expected one token for each", path, texts[i], text,
				(long long)i);
	texts[i] = text;
	types[i] = type;
	return 0;
}

/* Appends the merges, written as "a b" or as ["a", "b"]. */
static int merges_to_gguf(struct metadata *m, const json_t *merges, const char *path)
{
	const json_t *merge;
	size_t i;
	entry_array(m, "tokenizer.ggml.merges", GGUF_TEXT, json_array_size(merges));
	json_array_foreach(merges, i, merge) {
		const char *text = json_string_value(merge);
		const char *left = json_string_value(json_array_get(merge, 0)),
				*right = json_string_value(json_array_get(merge, 1));
		if (text)
			append_text(&m->bytes, text);
		else if (left && right && json_array_size(merge) == 2 && !strchr(left, ' ') && !strchr(right, ' ')) {
			append_u64(&m->bytes, strlen(left) + 1 + strlen(right));
			text_append(&m->bytes, left, strlen(left));
			text_append(&m->bytes, " ", 1);
			text_append(&m->bytes, right, strlen(right));
		} else
			return fail("%s: merge %zu is %s; expected \"a b\" or [\"a\", \"b\"]", path, i, json_kind(merge));
	}
	return 0;
}

/* The id of the token that tokenizer_config.json or else config.json names for a role; -1 when none does. */
static int64_t role_id(int role, const json_t *tokenizer_config, const json_t *config, const char **texts,
		int vocab_size)
{
	char name[32];
	snprintf(name, sizeof name, "%s_token", token_roles[role].role);
	const json_t *named = json_object_get(tokenizer_config, name);
	const char *text = json_string_value(json_is_object(named) ? json_object_get(named, "content") : named);
	snprintf(name, sizeof name, "%s_token_id", token_roles[role].role);
	const json_t *id = json_object_get(config, name);
	if (json_is_array(id))
		id = json_array_get(id, 0);
	if (!text && json_is_integer(id))
		return json_integer_value(id) < vocab_size ? json_integer_value(id) : -1;
	if (!text && role == ROLE_EOS)
		text = "<|endoftext|>";
	for (int i = 0; text && i < vocab_size; i++)
		if (texts[i] && !strcmp(texts[i], text))
			return i;
	return -1;
}

/* The roles of tokens and the chat template, from tokenizer_config.json where it is there and from config.json. */
static int roles_to_gguf(struct metadata *m, const char *dir, const json_t *config, const char **texts, int vocab_size)
{
	char path[PATH_LEN];
	int there = path_join(path, dir, "tokenizer_config.json") < 0 ? -1 : path_exists(path);
	json_t *tokenizer_config = there > 0 ? json_read(path) : NULL;
	if (there < 0 || (there && !tokenizer_config))
		return -1;
	for (int i = 0; i < NUM_TOKEN_ROLES; i++) {
		const int64_t id = role_id(i, tokenizer_config, config, texts, vocab_size);
		if (id >= 0)
			entry_u32(m, token_roles[i].gguf, id);
		else if (i == ROLE_EOS) {
			json_decref(tokenizer_config);
			return fail("%s: no token ends a text: no eos_token of tokenizer_config.json, eos_token_id of config.json "
					"or <|endoftext|> is in the vocabulary; name one, or llama.cpp would take token 11", dir);
		}
	}
	int rc = 0;
	entry_bool(m, "tokenizer.ggml.add_bos_token", json_is_true(json_object_get(tokenizer_config, "add_bos_token")));
	char *template;
	rc = chat_template_read(dir, &template);
	json_t *valid = template ? json_string(template) : NULL;
	if (template && !valid)
		rc = fail("%s/chat_template.jinja: is not UTF-8, as all texts of a GGUF file must be; expected a template "
				"in UTF-8", dir);
	else if (template)
		entry_text(m, "tokenizer.chat_template", template);
	json_decref(valid);
	free(template);
	json_decref(tokenizer_config);
	return rc;
}

/* The vocabulary and merges of a tokenizer.json. */
static int vocabulary_to_gguf(struct metadata *m, const json_t *root, const char *path, const char **texts,
		uint8_t *types, const struct model_config *c)
{
	const json_t *model = json_object_get(root, "model"), *kind = json_object_get(model, "type"), *added,
			*vocab = json_object_get(model, "vocab");
	const int vocab_size = c->vocab_size;
	json_t *id, *list = json_object_get(root, "added_tokens");
	const char *text, *pre = pre_tokenizer_name(json_object_get(root, "pre_tokenizer"), c);
	size_t i;
	if (kind && (!json_is_string(kind) || strcmp(json_string_value(kind), "BPE")))
		return fail("%s: the model is no BPE; llama.cpp takes it for %s only with --no-tokenizer", path,
				gguf_architecture(c));
	if (!pre)
		return fail("%s: llama.cpp knows the pre_tokenizers of Ling and of GPT-2, found another; --no-tokenizer "
				"leaves the tokenizer out", path);
	if (json_is_true(json_object_get(model, "ignore_merges")) || json_is_true(json_object_get(model, "byte_fallback")))
		return fail("%s: ignore_merges or byte_fallback is set, which llama.cpp has not for this pre_tokenizer; "
				"--no-tokenizer leaves the tokenizer out", path);
	if (!json_is_object(vocab) || !json_is_array(json_object_get(model, "merges")))
		return fail("%s: the model has no vocab and merges", path);
	if (json_is_object(json_object_get(root, "normalizer")))
		fprintf(stderr, "note: %s: llama.cpp does not normalise text: ids differ for text that the normalizer "
				"changes\n", path);
	json_object_foreach((json_t *)vocab, text, id)
		if (place_token(path, texts, types, vocab_size, text, id, TOKEN_NORMAL) < 0)
			return -1;
	json_array_foreach(list, i, added)
		if (place_token(path, texts, types, vocab_size, json_string_value(json_object_get(added, "content")),
				json_object_get(added, "id"),
				json_is_true(json_object_get(added, "special")) ? TOKEN_CONTROL : TOKEN_USER_DEFINED) < 0)
			return -1;
	entry_text(m, "tokenizer.ggml.model", "gpt2");
	entry_text(m, "tokenizer.ggml.pre", pre);
	entry_array(m, "tokenizer.ggml.tokens", GGUF_TEXT, vocab_size);
	for (int j = 0; j < vocab_size; j++) {
		char filler[32];
		snprintf(filler, sizeof filler, "[PAD%d]", j); /* each id of the model needs a token */
		append_text(&m->bytes, texts[j] ? texts[j] : filler);
	}
	entry_array(m, "tokenizer.ggml.token_type", GGUF_I32, vocab_size);
	for (int j = 0; j < vocab_size; j++)
		append_u32(&m->bytes, texts[j] ? types[j] : TOKEN_UNUSED);
	return merges_to_gguf(m, json_object_get(model, "merges"), path);
}

int tokenizer_to_gguf(struct metadata *m, const char *dir, const json_t *config, const struct model_config *model)
{
	const int vocab_size = model->vocab_size;
	char path[PATH_LEN];
	int there = path_join(path, dir, "tokenizer.json") < 0 ? -1 : path_exists(path);
	if (there == 0)
		return fail("%s: is not there, and llama.cpp needs it; put the model's tokenizer.json there, or leave the "
				"tokenizer out with --no-tokenizer", path);
	json_t *root = there < 0 ? NULL : json_read(path);
	if (!root)
		return -1;
	const char **texts = allocate(vocab_size * sizeof *texts);
	uint8_t *types = allocate(vocab_size);
	int rc = vocabulary_to_gguf(m, root, path, texts, types, model);
	if (!rc)
		rc = roles_to_gguf(m, dir, config, texts, vocab_size);
	free(texts);
	free(types);
	json_decref(root);
	return rc;
}
