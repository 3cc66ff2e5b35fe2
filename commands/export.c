/*
 * commands/export.c - `ling export`: the metrics of a run for other programs: CSV files, TensorBoard's event files.
 */
#define _GNU_SOURCE
#include "commands/export.h"

#include "files/base.h"

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define COUNTS "expert_counts." /* names of its columns begin so */

static bool is_count(const struct column *c)
{
	return !strncmp(c->name, COUNTS, strlen(COUNTS));
}

/* Whether a column has a value in a row, which *next then moves behind. *next: its first value of this row or a later
 * one. */
static bool take_value(const struct column *c, int *next, int row, double *value)
{
	if (*next == c->count || c->row[*next] != row)
		return false;
	*value = c->value[(*next)++];
	return true;
}

/* -- CSV -- */

/* With as few digits as give the same number again. */
static void write_number(FILE *f, double x)
{
	char text[32];
	if (isnan(x))
		strcpy(text, "NaN");
	else if (x == floor(x) && fabs(x) < 1e15)
		snprintf(text, sizeof text, "%.0f", x);
	else
		for (int digits = 15; snprintf(text, sizeof text, "%.*g", digits, x), digits < 17 && strtod(text, NULL) != x;)
			digits++;
	fputs(text, f);
}

/* In quotes where it must be. */
static void write_name(FILE *f, const char *name)
{
	if (!strpbrk(name, ",\"\r\n")) {
		fputs(name, f);
		return;
	}
	putc('"', f);
	for (; *name; name++)
		fputs(*name == '"' ? "\"\"" : (char[]){*name, 0}, f);
	putc('"', f);
}

/* The place of a column: those of one number as a line of the metrics has them, and all others behind them. */
static int place_of(const char *name)
{
	static const char *const names[] = {"step", "samples", "tokens", "batch", "loss", "mtp_loss", "balance_loss",
		"z_loss", "lr", "grad_norm", "update_norm", "seconds", "tokens_per_second", "save_seconds", "attempts",
		"valid_loss", "validation_stopped"};
	int i = 0;
	while (i < (int)(sizeof names / sizeof *names) && strcmp(name, names[i]))
		i++;
	return i;
}

/* For qsort: pointers to columns, in the order of the file. Of two that are behind, by name: expert_load.2 is before
 * expert_load.10. */
static int compare_columns(const void *a, const void *b)
{
	const struct column *x = *(const struct column *const *)a, *y = *(const struct column *const *)b;
	const int px = place_of(x->name), py = place_of(y->name);
	return px != py ? px - py : strverscmp(x->name, y->name);
}

void export_csv(FILE *f, const struct run *r)
{
	const struct column **columns = allocate(r->num_columns * sizeof *columns);
	int *next = allocate(r->num_columns * sizeof *next), n = 0;
	for (int i = 0; i < r->num_columns; i++)
		if (!is_count(&r->columns[i]))
			columns[n++] = &r->columns[i];
	if (n)
		qsort(columns, n, sizeof *columns, compare_columns);
	for (int i = 0; i < n; i++) {
		fputs(i ? "," : "", f);
		write_name(f, columns[i]->name);
	}
	putc('\n', f);
	for (int row = 0; row < r->count; row++) {
		for (int i = 0; i < n; i++) {
			double value;
			fputs(i ? "," : "", f);
			if (take_value(columns[i], &next[i], row, &value))
				write_number(f, value);
		}
		putc('\n', f);
	}
	free(next);
	free(columns);
}

void export_expert_counts(FILE *f, const struct run *r)
{
	int *next = allocate(r->num_columns * sizeof *next);
	fputs("step,layer,expert,tokens\n", f);
	for (int row = 0; row < r->count; row++)
		for (int i = 0; i < r->num_columns; i++) {
			int layer, expert;
			double value;
			if (sscanf(r->columns[i].name, COUNTS "%d.%d", &layer, &expert) == 2 &&
					take_value(&r->columns[i], &next[i], row, &value)) {
				fprintf(f, "%lld,%d,%d,", (long long)r->step[row], layer, expert);
				write_number(f, value);
				putc('\n', f);
			}
		}
	free(next);
}

/* -- TensorBoard -- */

/* CRC-32C, that of Castagnoli's polynomial 0x1edc6f41: what each byte does to the checksum. */
struct crc32c { uint32_t of_byte[256]; };

static struct crc32c crc32c_table(void)
{
	struct crc32c t;
	for (uint32_t i = 0; i < 256; i++) {
		t.of_byte[i] = i;
		for (int bit = 0; bit < 8; bit++) /* 0x82f63b78: the polynomial, its bits turned round */
			t.of_byte[i] = t.of_byte[i] >> 1 ^ (t.of_byte[i] & 1 ? 0x82f63b78 : 0);
	}
	return t;
}

/* Appends n bytes, at most 8, of a little-endian integer. */
static void put_integer(struct text *out, uint64_t x, int n)
{
	char bytes[8];
	for (int i = 0; i < n; i++)
		bytes[i] = (char)(x >> 8 * i);
	text_append(out, bytes, n);
}

/* The checksum of n bytes. It is stored rotated and with a constant added: so that one of data that hold checksums has
 * nothing special. */
static void put_checksum(struct text *out, const struct crc32c *table, const char *bytes, size_t n)
{
	uint32_t crc = UINT32_MAX;
	for (size_t i = 0; i < n; i++)
		crc = crc >> 8 ^ table->of_byte[(crc ^ (uint8_t)bytes[i]) & 255];
	crc = ~crc;
	put_integer(out, (uint32_t)((crc >> 15 | crc << 17) + 0xa282ead8), 4);
}

/* Writes a record: its length and the checksum of that, the data and the checksum of that. */
static void write_record(FILE *f, const struct crc32c *table, const struct text *data)
{
	struct text record = {0};
	put_integer(&record, data->size, 8);
	put_checksum(&record, table, record.data, 8);
	text_append(&record, data->data, data->size);
	put_checksum(&record, table, data->data, data->size);
	fwrite(record.data, 1, record.size, f);
	free(record.data);
}

/* The forms in which a protobuf message has a field. */
enum wire { WIRE_VARINT = 0, WIRE_64 = 1, WIRE_BYTES = 2, WIRE_32 = 5 };

static void put_varint(struct text *out, uint64_t x)
{
	for (; x > 127; x >>= 7)
		text_append(out, (char[]){(char)(x | 128)}, 1);
	text_append(out, (char[]){(char)x}, 1);
}

static void put_key(struct text *out, int field, enum wire wire)
{
	put_varint(out, field << 3 | wire);
}

static void put_bytes(struct text *out, int field, const char *bytes, size_t n)
{
	put_key(out, field, WIRE_BYTES);
	put_varint(out, n);
	text_append(out, bytes, n);
}

/* Event.wall_time, and Event.step unless it is 0. */
static void put_time(struct text *event, double time, int64_t step)
{
	uint64_t bits;
	memcpy(&bits, &time, sizeof bits);
	put_key(event, 1, WIRE_64);
	put_integer(event, bits, 8);
	if (step) {
		put_key(event, 2, WIRE_VARINT);
		put_varint(event, step);
	}
}

/* Adds a Summary.Value, of a tag and a float, to a Summary. */
static void put_value(struct text *summary, const char *tag, float x)
{
	struct text value = {0};
	uint32_t bits;
	memcpy(&bits, &x, sizeof bits);
	put_bytes(&value, 1, tag, strlen(tag));
	put_key(&value, 2, WIRE_32);
	put_integer(&value, bits, 4);
	put_bytes(summary, 1, value.data, value.size);
	free(value.data);
}

void export_tensorboard(FILE *f, const struct run *r)
{
	const struct crc32c table = crc32c_table();
	int *next = allocate(r->num_columns * sizeof *next);
	double *times = allocate(r->count * sizeof *times);
	struct text event = {0}, summary = {0};
	run_times(r, times);
	put_time(&event, r->count ? times[0] : 0, 0);
	put_bytes(&event, 3, "brain.Event:2", 13); /* Event.file_version */
	write_record(f, &table, &event);
	for (int row = 0; row < r->count; row++) {
		event.size = summary.size = 0;
		for (int i = 0; i < r->num_columns; i++) {
			const struct column *c = &r->columns[i];
			char tag[MAX_NAME];
			double value;
			if (is_count(c) || !strcmp(c->name, "step") || !take_value(c, &next[i], row, &value))
				continue;
			strcpy(tag, c->name);
			for (char *at = tag; *at; at++)
				*at = *at == '.' ? '/' : *at == ' ' ? '_' : *at;
			put_value(&summary, tag, (float)value);
		}
		put_time(&event, times[row], r->step[row]);
		put_bytes(&event, 5, summary.data, summary.size); /* Event.summary */
		write_record(f, &table, &event);
	}
	free(next), free(times), free(event.data), free(summary.data);
}

/* -- the command -- */

struct export_options { const char *csv, *expert_counts, *tensorboard; };

/* Writes a run to a new file, or with "-" to standard output. */
static int export_to(const struct run *r, const char *path, void (*write_run)(FILE *f, const struct run *r))
{
	struct new_file file;
	if (!strcmp(path, "-")) {
		write_run(stdout, r);
		return 0;
	}
	if (new_file_begin(&file, path) < 0)
		return -1;
	write_run(file.stream, r);
	return new_file_publish(&file, 0);
}

static int run_export(const struct command_line *line)
{
	const struct export_options *o = line->options;
	char path[PATH_LEN];
	struct run r;
	if (!o->csv && !o->expert_counts && !o->tensorboard) {
		set_error("nothing to write; expected --csv FILE, --expert-counts FILE or --tensorboard DIR");
		return EXIT_WRONG_USE;
	}
	if (o->csv && o->expert_counts && !strcmp(o->csv, o->expert_counts)) {
		set_error("--csv and --expert-counts are both to %s; expected another file for one of them",
				strcmp(o->csv, "-") ? o->csv : "standard output");
		return EXIT_WRONG_USE;
	}
	if ((o->csv && runs_check_output(line->words, 1, o->csv) < 0) ||
			(o->expert_counts && runs_check_output(line->words, 1, o->expert_counts) < 0))
		return EXIT_WORK_FAILED;
	if (run_open(&r, line->words[0]) < 0)
		return EXIT_WORK_FAILED;
	int rc = run_needs_steps(&r, "export");
	if (rc == 0 && o->csv)
		rc = export_to(&r, o->csv, export_csv);
	if (rc == 0 && o->expert_counts)
		rc = export_to(&r, o->expert_counts, export_expert_counts);
	/* Always the same name: TensorBoard would show what two files of a directory hold one above the other. */
	if (rc == 0 && o->tensorboard && (make_directories(o->tensorboard) < 0 ||
			path_join(path, o->tensorboard, "events.out.tfevents.0.ling") < 0 ||
			export_to(&r, path, export_tensorboard) < 0))
		rc = -1;
	run_free(&r);
	return rc < 0 ? EXIT_WORK_FAILED : EXIT_DONE;
}

static const struct command_option options[] = {
	TEXT_OPTION(export_options, csv, "csv", "FILE", "A CSV file with a line for each step (- for standard output)"),
	TEXT_OPTION(export_options, expert_counts, "expert-counts", "FILE", "A CSV file with the tokens of each expert, at "
			"the steps that counted them (- for standard output)"),
	TEXT_OPTION(export_options, tensorboard, "tensorboard", "DIR", "A directory for TensorBoard, with one event file"),
};

const struct command export_command = {
	.name = "export", .usage = "RUN_DIR", .min_words = 1, .max_words = 1,
	.help = "Write the metrics of a run for other programs.",
	.run = run_export, COMMAND_OPTIONS(export_options, options),
};
