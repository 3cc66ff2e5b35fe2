/*
 * files/config_keys.h - tables of keys: structures whose fields a user sets in YAML or on the command line.
 *
 * A table describes every key of a structure: path, type, range, default, meaning. Reading, defaults, error messages,
 * the hint for a misspelt key and JSON all come from it; a new key is a field of the structure and a line of the
 * table. A config has a table (files/config.c), and so has a task file (commands/tasks.c).
 */
#ifndef LING_FILES_CONFIG_KEYS_H
#define LING_FILES_CONFIG_KEYS_H

#include "files/base.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ------------------------------------------------------------------------------------------------- the table */

enum key_type {               /* the field is */
	T_SECTION,                 /* none: keys lie in it */
	T_LIST,                    /* an array in the structure, whose items have keys of their own */
	T_INT, T_INT64, T_UINT64, T_DOUBLE, T_BOOL,
	T_TEXT,                    /* char [size] */
	T_ENUM,                    /* an int, the index of a name */
	T_STRING,                  /* char *, to be released with free() */
	T_STRINGS,                 /* struct strings */
};

enum key_flags {
	REQUIRED = 1,              /* must be given */
	NEEDED = 2,                /* must be given where its optional section, or its list item, is */
	NONE = 4,                  /* `off` is allowed: 0, "", no section, no items */
	ABOVE = 8,                 /* min itself is not allowed */
	BELOW = 16,                /* max itself is not allowed */
	ITEM = 32,                 /* belongs to an item of a T_LIST */
	OR_PATH = 64,              /* of a T_TEXT with names: any other text too, as a path */
	AUTO = 128,                /* of a T_INT64: `auto` is allowed: AUTO_VALUE */
	ITSELF = 256,              /* of an item's key: its value may stand for the item, and for a list of one item */
	ANY_TEXT = 512,            /* of a T_TEXT: it may be "", and have control characters, such as a new line */
	ONE_ITEM = 1024,           /* of a T_LIST: the mapping of an item may stand for a list of that item alone */
	OWN_FLAG = 2048,           /* this and all higher bits mean what the owner of the table says */
};

enum { AUTO_VALUE = -1 };

struct key {
	const char *name;          /* dotted path */
	enum key_type type;
	size_t offset, size;       /* of the field in the structure; bytes */
	double min, max;           /* of a number, included; of a T_LIST, max is the largest number of items */
	int flags;
	const char *fallback;      /* default, as a user would write it; NULL: 0 */
	const char *help;
	const char *const *names;  /* the values of a T_ENUM, or the only ones of a T_TEXT (but see OR_PATH); then NULL */
	const char *alias;         /* another spelling of the path, or NULL */
	const char *or_name;       /* of a section: what a name in its place stands for, in words; see load_named */
	const char *class_fallback; /* for the owner of the table: the default of a Hugging Face class where it differs, */
	const char *v2_fallback;   /* and that of its second version */
	size_t item, count;        /* of a T_LIST: bytes of an item; offset of the number of items, an int */
	/* Of a T_LIST in whose place may be a mapping of names to such lists: what a name is of; offset of its text in the
	 * first item, which is "" in a plain list; bytes of it, at most MAX_GROUP. Else NULL and 0. */
	const char *group;
	size_t group_offset, group_size;
	size_t line;               /* of a T_LIST: offset in the first item of an int, its line in the file; 0: none */
};
enum { MAX_GROUP = 64 };

/* Lines of a table. `more` are further fields of struct key. */
#define KEY_OF(structure, path, kind, low, high, flag_bits, standard, meaning, ... /* more */) \
	{.name = #path, .type = kind, .offset = offsetof(structure, path), .size = sizeof ((structure *)0)->path, \
	 .min = low, .max = high, .flags = flag_bits, .fallback = standard, .help = meaning, __VA_ARGS__}
#define LIST_OF(structure, path, number, most, flag_bits, standard, meaning, ... /* more */) \
	{.name = #path, .type = T_LIST, .offset = offsetof(structure, path), .size = sizeof ((structure *)0)->path, \
	 .max = most, .flags = flag_bits, .fallback = standard, .help = meaning, \
	 .item = sizeof ((structure *)0)->path[0], .count = offsetof(structure, number), __VA_ARGS__}
#define GROUPS_OF(structure, path, member) .group = #member, .group_offset = offsetof(structure, path[0].member), \
	.group_size = sizeof ((structure *)0)->path[0].member
#define LINE_OF(structure, path, member) .line = offsetof(structure, path[0].member)
#define ITEM_KEY_OF(structure, path, member, kind, low, high, flag_bits, standard, meaning, ... /* more */) \
	{.name = #path "." #member, .type = kind, .offset = offsetof(structure, path[0].member), \
	 .size = sizeof ((structure *)0)->path[0].member, \
	 .min = low, .max = high, .flags = (flag_bits) | ITEM, .fallback = standard, .help = meaning, __VA_ARGS__}
#define SECTION(path, flag_bits, meaning, ... /* more */) \
	{.name = path, .type = T_SECTION, .flags = flag_bits, .help = meaning, __VA_ARGS__}

struct loader;
struct place {                /* where a key was given */
	const char *source;        /* file name or the command line's text; NULL: nowhere */
	int line;                  /* from 1; or one of these: */
};
enum { WHOLE_FILE = 0, COMMAND_LINE = -1 };

struct key_table {
	const struct key *keys;
	int num_keys;              /* at most MAX_KEYS */
	const char *whole;         /* what messages call the whole, such as "config" */
	/* Reads what stands for a section's mapping when a name is given in its place: for sections with or_name. */
	int (*load_named)(struct loader *l, const struct key *section, const char *name, struct place at);
};
enum { MAX_KEYS = 160 };

/* The key of that path or alias; "" is the whole, a section. NULL when there is none. */
const struct key *find_key(const struct key_table *t, const char *path);

/* Whether `path` lies in a section, at any depth. */
bool is_inside(const char *section, const char *path);

/* The last part of a dotted path. */
const char *leaf_of(const char *path);

/* What a key's value may be, in words. */
const char *describe_key(char out[256], const struct key_table *t, const struct key *k);

/* ---------------------------------------------------------------------------------------------------- values */

/* Converts text and stores it in the field of a key that is no section, list or T_STRINGS; `shift` bytes further, for
 * an item of a list. `plain`: the text was written without quotes. Returns NULL when done; else what is wrong ("" when
 * the expected type says it all), and nothing is stored. */
const char *store_text(void *structure, const struct key *k, size_t shift, const char *text, bool plain);

/* Sets the field of a key to its default. Sections and keys of list items are left alone. */
void set_default(void *structure, const struct key *k);

/* The value of key k as JSON: an object for a section, an array for a T_LIST. The caller owns it. Not for tables with
 * T_STRING or T_STRINGS. */
json_t *key_to_json(const struct key_table *t, const void *structure, const struct key *k);

/* --------------------------------------------------------------------------------------------------- reading */

struct loader {               /* reads values into one structure */
	const struct key_table *table;
	void *structure;
	void *context;             /* of load_named */
	const char *path;          /* the file that messages about the whole name */
	bool leaf_names;           /* messages name keys without their section */
	struct place places[MAX_KEYS]; /* of each key of the table */
	size_t shift;              /* of the list item that is being read */
	struct yaml_text *text;    /* that is being read */
};

/* Starts to read; `path` must live as long as l. Every field gets its default. */
void loader_init(struct loader *l, const struct key_table *t, void *structure, const char *path);

/* Reads the YAML file l->path. */
int load_file(struct loader *l);

/* Reads one "key.path=value" of the command line. A section that is given so replaces the one that was read before. */
int load_override(struct loader *l, const char *argument);

/* Notes that key k is given at that place. Twice is an error, but for a key of the file that the command line gives
 * again. */
int claim_key(struct loader *l, const struct key *k, struct place at);

/* Whether the key of that path, which the table has, was given. */
bool key_given(const struct loader *l, const char *name);

/* Fails when a key that must be given was not. `section`: the only one of which keys are required, or NULL. */
int check_required(const struct loader *l, const char *section);

/* Reads a YAML file that is a list of mappings, each of which the table describes. */
struct list_reader {
	const char *items, *item;  /* in words: many, and one */
	void *(*add)(void *list);  /* adds a structure, all 0, and returns it */
	/* Is called when the keys of the structure, which begin at `at`, are read. */
	int (*check)(const struct loader *l, void *list, void *added, struct place at);
	void *list;
};
int load_list_file(const struct key_table *t, const char *path, const struct list_reader *r);

/* fail(), with a place in front. */
int fail_at(struct place at, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* fail() for a path that no key of the table has: with the key that was meant, or all keys of its section. */
int fail_unknown(const struct key_table *t, struct place at, const char *path);

/* fail(), with a key in front and the place where it was given, or else the file. */
int fail_key(const struct loader *l, const char *name, const char *format, ...) __attribute__((format(printf, 3, 4)));

#endif
