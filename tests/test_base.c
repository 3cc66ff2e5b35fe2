/* What every other file stands on: new files that appear whole or not at all, JSON with all that foreign files hold.
 * */
#define _GNU_SOURCE
#include "tests/test.h"

#include "commands/train.h"
#include "files/base.h"
#include "files/unicode.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Fails unless a file holds this text; NULL: unless it is not there. */
static void assert_holds(const char *path, const char *text)
{
	const uint8_t *data;
	size_t n;
	if (!text) {
		assert_int_equal(path_exists(path), 0);
		return;
	}
	assert_int_equal(map_file(path, &data, &n), 0);
	if (n != strlen(text) || memcmp(data ? data : (const uint8_t *)"", text, n))
		fail_msg("%s holds %.*s; expected %s", path, (int)n, (const char *)data, text);
	unmap_file(data, n);
}

/* Starts a new file that holds this text. */
static void begin(struct new_file *file, const char *path, const char *text)
{
	if (new_file_begin(file, path) < 0)
		fail_msg("%s", error_text);
	fputs(text, file->stream);
}

/* Until it is published there is the old file. Meanwhile there can be no other; what a killed one left is removed. */
static void one_new_file(void **state)
{
	(void)state;
	struct new_file a, b;
	struct stat st;
	const char *path = put_string(at("x"), "old");
	assert_int_equal(chmod(path, 0600), 0);
	const mode_t mask = umask(027);
	const char *left = put_string(at("x.tmp-0123abcd"), "of a killed run");
	const char *other = put_string(at("x.tmp-0123abc"), "is not ours"), *lock = put_string(at("x.lock"), "killed");
	assert_int_equal(mkdir(at("x.tmp-89abcdef"), 0777), 0);
	begin(&a, path, "first");
	umask(mask);
	assert_int_equal(path_exists(left) + path_exists(at("x.tmp-89abcdef")), 0);
	assert_int_equal(path_exists(other), 1);
	assert_int_equal(unlink(other), 0);
	assert_int_equal(new_file_begin(&b, path), -1);
	char holder[64];
	snprintf(holder, sizeof holder, "x: process %ld on |is writing it; wait", (long)getpid());
	expect_error(holder);
	assert_int_equal(path_exists(a.temporary), 1);
	assert_holds(path, "old");
	assert_int_equal(new_file_publish(&a, 0), 0);
	assert_holds(path, "first");
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0640);
	begin(&b, path, "second");
	assert_int_equal(new_file_close(&b, 0), 0);
	assert_holds(b.temporary, "second");
	assert_holds(path, "first");
	assert_int_equal(new_file_publish(&b, 0), 0);
	assert_holds(path, "second");
	assert_int_equal(path_exists(lock), 0);

	begin(&a, path, "third");
	new_file_abandon(&a);
	begin(&a, path, "fourth");
	assert_int_equal(new_file_publish(&a, -1), -1); /* what the caller did has failed */
	assert_holds(path, "second");
	assert_false(holds_temporary(scratch));
	a = (struct new_file){0};
	new_file_abandon(&a);
}

static void new_file_without_room(void **state)
{
	(void)state;
	struct new_file a;
	const char *path = put_string(at("x"), "old");
	char text[20000], long_path[PATH_LEN + 8];
	memset(text, 'a', sizeof text), text[sizeof text - 1] = 0;
	limit_files(10000);
	begin(&a, path, text);
	const int rc = new_file_publish(&a, 0);
	limit_files(RLIM_INFINITY);
	assert_int_equal(rc, -1);
	expect_error("/x: cannot write: File too large: files are limited to 10000 bytes here");
	assert_holds(path, "old");
	assert_int_equal(new_file_begin(&a, at("nowhere/x")), -1);
	expect_error("nowhere/x: cannot create: No such file");
	/* no room for what is behind a temporary name */
	memset(long_path, 'a', sizeof long_path), long_path[PATH_LEN - 4] = 0;
	assert_int_equal(new_file_begin(&a, long_path), -1);
	expect_error("path longer than 1023 bytes");
	assert_int_equal(new_file_begin(&a, scratch), -1);
	expect_error("Is a directory");
	assert_int_equal(mkdir(at("x.lock"), 0777), 0);
	assert_int_equal(new_file_begin(&a, path), -1);
	expect_error("/x.lock: is a directory; expected a lock file");
	assert_int_equal(rmdir(at("x.lock")), 0);
	assert_false(holds_temporary(scratch));
}

/* Links, pipes and devices stay what they are. */
static void new_files_behind_links(void **state)
{
	(void)state;
	struct new_file a;
	struct stat st;
	char plain[PATH_LEN], link[PATH_LEN];
	assert_int_equal(mkdir(at("d"), 0777), 0);
	strcpy(plain, at("d/plain")), strcpy(link, at("link"));
	assert_int_equal(symlink("d/plain", link), 0);
	for (int i = 0; i < 2; i++) { /* to nowhere, to a file */
		begin(&a, link, i ? "two" : "one");
		assert_int_equal(new_file_publish(&a, 0), 0);
		assert_holds(plain, i ? "two" : "one");
		assert_true(lstat(link, &st) == 0 && S_ISLNK(st.st_mode));
	}
	begin(&a, "/dev/null", "text");
	assert_int_equal(new_file_publish(&a, 0), 0);
	assert_true(stat("/dev/null", &st) == 0 && S_ISCHR(st.st_mode));
	assert_int_equal(mkfifo(at("fifo"), 0666), 0);
	const int reader = open(at("fifo"), O_RDONLY | O_NONBLOCK);
	char text[8] = "";
	begin(&a, at("fifo"), "text");
	assert_int_equal(new_file_publish(&a, 0), 0);
	assert_int_equal(read(reader, text, sizeof text), 4);
	assert_string_equal(text, "text");
	close(reader);
}

static void begin_member(struct new_file *file, const char *path, const char *text)
{
	if (new_member_begin(file, path) < 0)
		fail_msg("%s", error_text);
	fputs(text, file->stream);
}

/* Files that belong together: the last one is there only beside all others of its set. */
static void a_set_of_new_files(void **state)
{
	(void)state;
	struct new_file set[3];
	char path[3][PATH_LEN];
	for (int i = 0; i < 3; i++) /* names that are links, to a file or to nowhere, are replaced themselves */
		strcpy(path[i], at("%d", i));
	const char *victim = put_string(at("victim"), "victim");
	assert_int_equal(symlink("victim", path[0]), 0);
	assert_int_equal(symlink("nowhere", path[1]), 0);
	assert_int_equal(mkfifo(path[2], 0666), 0);
	for (int round = 0; round < 2; round++) { /* all three; then the second one is not part of the set */
		for (int i = 0; i < 3; i++)
			begin_member(&set[i], path[i], round ? "new" : "old");
		if (round)
			new_file_abandon(&set[1]);
		assert_int_equal(new_files_publish(set, 3, 0), 0);
		for (int i = 0; i < 3; i++)
			assert_holds(path[i], !round ? "old" : i == 1 ? NULL : "new");
	}
	for (int i = 0; i < 3; i++)
		begin_member(&set[i], path[i], "never");
	assert_int_equal(new_files_publish(set, 3, -1), -1);
	assert_holds(path[0], "new");
	assert_holds(path[2], "new");

	/* An error between: the old set is back. */
	for (int i = 0; i < 3; i++)
		begin_member(&set[i], path[i], "newer");
	assert_int_equal(mkdir(path[1], 0777), 0);
	assert_int_equal(new_files_publish(set, 3, 0), -1);
	expect_error("/1: cannot replace: Is a directory");
	assert_holds(path[0], "new");
	assert_holds(path[2], "new");
	assert_holds(victim, "victim");
	assert_false(holds_temporary(scratch));
}

/* Integers beyond 64 bits, wherever they stand: in a line they are the string of their digits, in a file real numbers.
 * */
static void large_integers(void **state)
{
	(void)state;
	static const struct { const char *text, *line, *file; } cases[] = { /* file NULL: an error */
		{"{\"a\":9223372036854775807,\"b\":-9223372036854775808}",
			"{\"a\":9223372036854775807,\"b\":-9223372036854775808}",
			"{\"a\":9223372036854775807,\"b\":-9223372036854775808}"},
		{"{\"a\":9223372036854775808,\"b\":-9223372036854775809,\"c\":9007199254740993}",
			"{\"a\":\"9223372036854775808\",\"b\":\"-9223372036854775809\",\"c\":9007199254740993}",
			"{\"a\":9223372036854775808.0,\"b\":-9223372036854775808.0,\"c\":9007199254740993}"},
		{"{\"model_max_length\":1000000000000000019884624838656}",
			"{\"model_max_length\":\"1000000000000000019884624838656\"}",
			"{\"model_max_length\":1e30}"},
		{"{\"a\\\"9999999999999999999999\":[99999999999999999999,\"\\\\\",123456789012345678901.5,1e2]}",
			"{\"a\\\"9999999999999999999999\":[\"99999999999999999999\",\"\\\\\",123456789012345678901.5,1e2]}",
			"{\"a\\\"9999999999999999999999\":[1e20,\"\\\\\",123456789012345678901.5,1e2]}"},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		json_t *line = json_line("here", cases[i].text, strlen(cases[i].text)),
				*file = json_read(put_string(at("x.json"), cases[i].text));
		json_t *line_expected = json_loads(cases[i].line, 0, NULL), *file_expected = json_loads(cases[i].file, 0,
				NULL);
		assert_true(line && file && json_equal(line, line_expected) && json_equal(file, file_expected));
		json_decref(line), json_decref(file), json_decref(line_expected), json_decref(file_expected);
	}
	/* 400 digits are more than a double holds; a leading 0 and a number cut off are no numbers. */
	char digits[408] = "{\"a\":";
	memset(digits + 5, '7', 400), strcpy(digits + 405, "}");
	json_t *line = json_line("here", digits, strlen(digits));
	assert_int_equal(json_string_length(json_object_get(line, "a")), 400);
	json_decref(line);
	assert_null(json_read(put_string(at("x.json"), digits)));
	expect_error("x.json:1: bad JSON: real number overflow");
	static const struct { const char *text, *error; } bad[] = {
		{"{\"a\":99999999999999999999", "here: bad JSON"},
		{"{\"b\":99999999999999999999,\"a\":0123456789012345678901}", "here: bad JSON"},
		{"{\"a\":99999999999999999999,\"a\":1}", "here: bad JSON: duplicate"}, {"{\"a\":1,\"a\":1}", "duplicate"},
		{"[99999999999999999999]", "here: is an array"},
		{"{\"a\":-}", "bad JSON"}, {"{\"a\":01e999}", "bad JSON"}, {"", "bad JSON"},
		{"99", "here: bad JSON"},
	};
	for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
		assert_null(json_line("here", bad[i].text, strlen(bad[i].text)));
		expect_error(bad[i].error);
	}
}

/* What other programs write although it is no JSON costs its own member alone, and is named there. */
static void not_json(void **state)
{
	(void)state;
	static const struct { const char *value, *kind; } cases[] = {
		{"NaN", "NaN"}, {"Infinity", "Infinity"}, {"-Infinity", "-Infinity"},
		{"1e400", "too large a number, 1e400"}, {"-1.5E+999", "too large a number, -1.5E+999"},
		{"\"x\\ud83d\"", "broken text, with half of a surrogate pair, \\ud83d"},
		{"\"\\uDE00\\ud83d\\ude00\"", "broken text, with half of a surrogate pair, \\uDE00"},
		{"\"\\ud83d\\ud83d\\ude00\"", "broken text, with half of a surrogate pair, \\ud83d"},
		{"\"\\ud83d", NULL},
		{"\"a\xe9z\"", "broken text, not UTF-8 at its byte 0xe9"},
		{"\"\xed\xa0\x80\"", "broken text, not UTF-8 at its byte 0xed"},
		{"nan", NULL}, {"NaNs", NULL}, {"-NaN", NULL}, {"+Infinity", NULL}, {"1e400e5", NULL}, {"\"\\x\"", NULL},
		{"\"\\\\ud83d NaN 1e400\"", "a string"}, {"\"\\ud83d\\ude00\"", "a string"}, {"1e-400", "a real number"},
		{"[1,\"]\",{}]", "an array"}, {"{\"b\":NaN}", "an object"}, {"99999999999999999999", "a string"},
	};
	char text[256];
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		/* before and behind it: strings that look like it, a key with a half, an integer that is too large */
		snprintf(text, sizeof text, "{\"t\":\"NaN \\\" 1e400\",\"v\": %s ,"
				"\"\\ud801\" :[NaN,1],\"\\ud802\":\"e\",\"z\":\"\\u00e9\"}",
				cases[i].value);
		json_t *line = json_line("here", text, strlen(text));
		assert_int_equal(line != NULL, cases[i].kind != NULL);
		if (!line)
			continue;
		assert_string_equal(json_kind(json_object_get(line, "v")), cases[i].kind);
		assert_string_equal(json_string_value(json_object_get(line, "t")), "NaN \" 1e400");
		assert_string_equal(json_string_value(json_object_get(line, "z")), "\xc3\xa9");
		assert_string_equal(json_string_value(json_object_get(line, "\xef\xbf\xbd" "d802")), "e");
		assert_int_equal(json_integer_value(json_at(line, "\xef\xbf\xbd" "d801.1")), 1);
		assert_int_equal(json_object_size(line), 5);
		json_decref(line);
	}
	/* A member that is read. */
	json_t *line = json_line("here", "{\"n\":NaN}", 9);
	int64_t n;
	assert_null(field_text(line, "here", "n"));
	expect_error("here: `n` is NaN; expected a string");
	assert_int_equal(field_int(line, "here", "n", 0, 9, &n), -1);
	expect_error("here: `n` is NaN; expected an integer");
	json_decref(line);
	/* A file of the program's own has no such values. */
	assert_null(json_read(put_string(at("x.json"), "{\"a\":NaN}")));
	expect_error("x.json:1: bad JSON");
}

/* Bytes that are not UTF-8 are written as JSON that can be read. */
static void foreign_bytes(void **state)
{
	(void)state;
	static const struct { const char *bytes; size_t n; const char *json; } cases[] = {
		{"", 0, "\"\""}, {"a\0b", 3, "\"a\\u0000b\""},
		{"\xc3\xa9/\xf0\x9f\x98\x80", 7, "\"\xc3\xa9/\xf0\x9f\x98\x80\""}, {"\xff\xfe", 2, "\"\\ufffd\\ufffd\""},
		{"x\xe4\xb8", 3, "\"x\\ufffd\\ufffd\""}, {"\xc0\xaf\xed\xa0\x80\xf4\x90\x80\x80", 9,
			"\"\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\\ufffd\""},
	};
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
		json_t *made = json_bytes(cases[i].bytes, cases[i].n), *expected = json_loads(cases[i].json,
				JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
		assert_true(json_equal(made, expected));
		json_decref(made), json_decref(expected);
	}
}

static uint32_t next_numbers[4]; /* what getrandom gives next, in place of a random number, down to the first 0 */
static void (*at_random)(void);  /* called then */

ssize_t getrandom(void *out, size_t n, unsigned flags)
{
	if (n != sizeof *next_numbers || !*next_numbers)
		return syscall(SYS_getrandom, out, n, flags);
	memcpy(out, next_numbers, n);
	memmove(next_numbers, next_numbers + 1, sizeof next_numbers - n);
	if (at_random)
		at_random();
	return n;
}

/* Puts something under the temporary names 1, 2 and 3 of the file x, as somebody else may do at any time. */
static void plant(void)
{
	put_string(at("x.tmp-00000001"), "of another");
	assert_true(symlink("victim", at("x.tmp-00000002")) == 0 || errno == EEXIST);
	assert_true(symlink("nowhere", at("x.tmp-00000003")) == 0 || errno == EEXIST);
}

/* What has a temporary name already is left alone, and never written through: another name is taken. */
static void planted_names(void **state)
{
	(void)state;
	struct new_file file;
	char path[PATH_LEN], victim[PATH_LEN];
	strcpy(path, at("x")), strcpy(victim, put_string(at("victim"), "victim"));
	at_random = plant;
	for (int directory = 0; directory < 2; directory++) {
		memcpy(next_numbers, (uint32_t[]){1, 2, 3, 4}, sizeof next_numbers);
		if (directory)
			assert_int_equal(new_directory_begin(&file, path), 0);
		else
			begin_member(&file, path, "ours");
		assert_string_equal(file_name(file.temporary), "x.tmp-00000004");
		next_numbers[0] = 0;
		assert_int_equal(directory ? (new_file_abandon(&file), 0) : new_file_publish(&file, 0), 0);
		assert_holds(path, "ours");
		assert_holds(victim, "victim");
		assert_holds(at("x.tmp-00000001"), "of another");
		assert_false(exists(at("nowhere")));
	}
	at_random = NULL;
	/* A lock is never what a link points to. */
	assert_int_equal(symlink("victim", at("y.lock")), 0);
	assert_int_equal(new_file_begin(&file, at("y")), -1);
	expect_error("y.lock: is a link; expected a lock file: remove it");
	assert_holds(victim, "victim");
	assert_int_equal(symlink("nowhere", at("z.lock")), 0);
	assert_int_equal(new_file_begin(&file, at("z")), -1);
	assert_false(exists(at("nowhere")));
}

static int flock_error; /* errno of flock, or 0: it works */
/* A lock file that its holder removes, and lets go, just before the next flock; somebody else makes it anew. */
static const char *lock_to_remove;

int flock(int fd, int operation)
{
	if (lock_to_remove) {
		assert_int_equal(unlink(lock_to_remove), 0);
		put_string(lock_to_remove, "process 2");
	}
	lock_to_remove = NULL;
	if (!flock_error)
		return syscall(SYS_flock, fd, operation);
	errno = flock_error;
	return -1;
}

/* Only a lock that is held means that somebody else trains. */
static void locks(void **state)
{
	(void)state;
	const int fd = lock_directory(at("run"));
	assert_true(fd >= 0);
	assert_int_equal(lock_directory(at("run")), -1);
	expect_error("run: another ling train is writing there");
	close(fd);
	flock_error = ENOLCK;
	assert_int_equal(lock_directory(at("run")), -1);
	flock_error = 0;
	expect_error("run: cannot lock: No locks available");
	const int again = lock_directory(at("run"));
	assert_true(again >= 0);
	close(again);

	/* A lock on a file that has lost its name locks nobody out: it is taken on the file that has the name. */
	struct new_file a, b;
	char path[PATH_LEN], lock[PATH_LEN];
	strcpy(path, at("x")), strcpy(lock, put_string(at("x.lock"), "process 1"));
	lock_to_remove = lock;
	begin(&a, path, "text");
	assert_int_equal(new_file_begin(&b, path), -1);
	expect_error("is writing it");
	assert_int_equal(new_file_publish(&a, 0), 0);
	assert_holds(path, "text");
	/* Without locks, two have names of their own, and the last one wins. */
	flock_error = ENOLCK;
	begin(&a, path, "a");
	begin(&b, path, "b");
	assert_int_equal(new_file_publish(&b, 0), 0);
	assert_int_equal(new_file_publish(&a, 0), 0);
	flock_error = 0;
	assert_holds(path, "a");
	assert_false(exists(at("x.lock")) || holds_temporary(scratch));
}

static void paths(void **state)
{
	(void)state;
	char out[PATH_LEN], name[PATH_LEN + 8];
	memset(name, 'n', sizeof name), name[PATH_LEN - 1] = 0;
	assert_int_equal(path_copy(out, name), 0);
	assert_string_equal(out, name);
	assert_int_equal(path_suffix(out, name, "x"), -1);
	expect_error("nx: path longer than 1023 bytes");
	assert_int_equal(path_join(out, "d", name), -1);
	expect_error("d/nnn|path longer than 1023 bytes");
	name[PATH_LEN - 1] = 'n', name[PATH_LEN] = 0;
	assert_int_equal(path_copy(out, name), -1);
	expect_error("path longer than 1023 bytes");
	assert_int_equal(make_directories(name), -1);
	expect_error("path longer than 1023 bytes");
	assert_string_equal(file_name("a/b"), "b");
	assert_string_equal(file_name("b"), "b");
	assert_string_equal(file_name("a/"), "");
	assert_true(has_suffix("a.bin", ".bin") && !has_suffix(".bin", ".bin") && !has_suffix("bin", ".bin") &&
			!has_suffix("a.bin2", ".bin"));
}

/* Elsewhere than on a terminal progress is a plain line every half minute. */
static void progress_in_lines(void **state)
{
	(void)state;
	double now = clock_seconds();
	struct progress p = {.what = "tokenize", .total = 400, .scale = 0.01, .unit = "hundreds", .started = now - 40,
			.shown = now - 40};
	fflush(stderr);
	int saved = dup(2), file = open(at("err"), O_WRONLY | O_CREAT, 0666);
	dup2(file, 2);
	progress(&p, 100);
	progress(&p, 100); /* too soon */
	p.shown -= 31;
	progress(&p, 300); /* more than the files held at first */
	dup2(saved, 2);
	close(saved), close(file);
	size_t n;
	char *text = (char *)get_file(at("err"), &n);
	assert_string_equal(text, "tokenize: 25%  0.025 hundreds/s  2:00 left\ntokenize: 5 hundreds  0.125 hundreds/s\n");
	free(text);
}

/* Text of any bytes as a JSON string, and what of it may be shown while it goes on. */
static void text_as_json(void **state)
{
	(void)state;
	static const struct { const char *text; size_t size; const char *json; size_t whole; } cases[] = {
		{"", 0, "\"\"", 0}, {"a\"b\\c/", 6, "\"a\\\"b\\\\c/\"", 6},
		{"\n\t\0\x1f\x7f", 5, "\"\\u000a\\u0009\\u0000\\u001f\x7f\"", 5},
		{"\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80", 9, "\"\xc3\xa9\xe4\xb8\xad\xf0\x9f\x98\x80\"", 9},
		{"x\xe4\xb8", 3, "\"x\\ufffd\\ufffd\"", 1}, {"x\xf0\x9f\x98", 4, "\"x\\ufffd\\ufffd\\ufffd\"", 1},
		{"x\xc3", 2, "\"x\\ufffd\"", 1},
		{"\xff\x80y", 3, "\"\\ufffd\\ufffdy\"", 3}, {"\xed\xa0\x80", 3, "\"\\ufffd\\ufffd\\ufffd\"", 3},
		{"\xc0\xaf", 2, "\"\\ufffd\\ufffd\"", 2},
	};
	for (int i = 0; i < COUNT(cases); i++) {
		json_t *read = json_loads(cases[i].json, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL),
				*made = json_bytes(cases[i].text, cases[i].size);
		assert_true(read && json_equal(read, made));
		assert_int_equal(utf8_whole(cases[i].text, cases[i].size), cases[i].whole);
		json_decref(read);
		json_decref(made);
	}
}

/* Writes a file and the directories that it needs. */
static void put_deep(const char *path, const char *text)
{
	char parent[PATH_LEN];
	parent_of(parent, path);
	assert_int_equal(make_directories(parent), 0);
	put_string(path, text);
}

/* The smallest limit on the way from a process's control group to the root counts, in both versions of control groups.
 * */
static void memory_limits(void **state)
{
	(void)state;
	const double machine = usable_memory(at("nothing"));
	assert_true(machine == (double)sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE));
	put_deep(at("v2/proc/self/cgroup"), "0::/box/inner\n");
	put_deep(at("v2/sys/fs/cgroup/box/inner/memory.max"), "max\n");
	assert_true(usable_memory(at("v2")) == machine);
	put_deep(at("v2/sys/fs/cgroup/box/memory.max"), "3000000\n");
	assert_true(usable_memory(at("v2")) == 3000000);
	put_deep(at("v2/sys/fs/cgroup/box/inner/memory.max"), "4000000\n");
	assert_true(usable_memory(at("v2")) == 3000000);
	put_deep(at("v2/sys/fs/cgroup/memory.max"), "2000000\n"); /* where a container sees its own group as the root */
	assert_true(usable_memory(at("v2")) == 2000000);
	put_deep(at("v1/proc/self/cgroup"), "5:cpu,cpuacct:/other\n4:hugetlb,memory:/docker/0123\n0::/\n");
	put_deep(at("v1/sys/fs/cgroup/memory/docker/0123/memory.limit_in_bytes"), "9223372036854771712\n");
	put_deep(at("v1/sys/fs/cgroup/memory/other/memory.limit_in_bytes"), "1000000\n");
	assert_true(usable_memory(at("v1")) == machine);
	put_deep(at("v1/sys/fs/cgroup/memory/memory.limit_in_bytes"), "5000000\n");
	assert_true(usable_memory(at("v1")) == 5000000);
}

/* The CRC-32 that zip and PNG have; no bytes change nothing, wherever they are. */
static void checksums(void **state)
{
	(void)state;
	const uint8_t *digits = (const uint8_t *)"123456789";
	assert_int_equal(crc_of(0, digits, 9), 0xcbf43926);
	assert_int_equal(crc_of(crc_of(0, digits, 4), digits + 4, 5), 0xcbf43926);
	assert_int_equal(crc_of(0xcbf43926, digits, 0), 0xcbf43926);
	assert_int_equal(crc_of(0xcbf43926, NULL, 0), 0xcbf43926);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(one_new_file), TEST(new_file_without_room), TEST(new_files_behind_links), TEST(a_set_of_new_files),
		TEST(planted_names), TEST(large_integers), TEST(not_json),
		TEST(foreign_bytes), TEST(locks), TEST(paths),
		TEST(progress_in_lines), TEST(text_as_json), TEST(memory_limits), TEST(checksums),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
