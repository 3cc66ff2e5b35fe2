/*
 * test_export.c - the metrics of a run as CSV and as TensorBoard's event files, to the byte.
 */
#define _GNU_SOURCE
#include "files/base.h"
#include "commands/export.h"
#include "commands/runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "test.h"

static const char metrics[] =
	"{\"step\": 1, \"samples\": 8, \"tokens\": 1024, \"batch\": 8, \"loss\": 3.5, \"balance_loss\": "
	"1.0, \"z_loss\": 0.1, \"lr\": 0.001, \"grad_norm\": null, \"update_norm\": 0.25, \"seconds\": "
	"0.5, \"tokens_per_second\": 2048.0, \"expert_load\": [1.5, 2.0], \"expert_counts\": [[3, 5], [6, "
	"2]], \"nonfinite\": [\"grad_norm\"]}\n"
	"{\"step\": 300, \"samples\": 16, \"tokens\": 2048, \"batch\": 8, \"loss\": 3.0000000000000004, "
	"\"balance_loss\": 1.0, \"z_loss\": 0.5, \"lr\": 1e-05, \"grad_norm\": 1e+20, \"update_norm\": "
	"0.25, \"seconds\": 0.25, \"tokens_per_second\": 4096.0, \"expert_load\": [1.5, 1.0], "
	"\"valid_loss\": 3.25, \"valid\": {\"a,\\\"b\\\"\": 3.0, \"chat x\": 3.5}}\n";
static const char events[] = "{\"time\": 1700000000.5, \"step\": 0, \"kind\": \"start\", \"batch\": 0}\n";

static struct run open_run(void)
{
	struct run r;
	assert_int_equal(mkdir(at("run"), 0700), 0);
	put_string(at("run/metrics.jsonl"), metrics);
	put_string(at("run/events.jsonl"), events);
	if (run_open(&r, at("run")) < 0)
		fail_msg("%s", error_text);
	return r;
}

/* What one of the three writes; *n bytes. The caller frees it. */
static char *written(void (*write_run)(FILE *f, const struct run *r), const struct run *r, size_t *n)
{
	char *out;
	FILE *f = open_memstream(&out, n);
	assert_non_null(f);
	write_run(f, r);
	assert_int_equal(fclose(f), 0);
	return out;
}

/* Absent fields are empty, nulls are NaN, and numbers have the digits that give them back. */
static void csv_has_a_field_for_every_member(void **state)
{
	(void)state;
	size_t n;
	struct run r = open_run();
	char *csv = written(export_csv, &r, &n);
	assert_string_equal(csv, "step,samples,tokens,batch,loss,balance_loss,z_loss,lr,grad_norm,update_norm,seconds,"
			"tokens_per_second,valid_loss,expert_load.0,expert_load.1,\"valid.a,\"\"b\"\"\",valid.chat x\n"
			"1,8,1024,8,3.5,1,0.1,0.001,NaN,0.25,0.5,2048,,1.5,2,,\n"
			"300,16,2048,8,3.0000000000000004,1,0.5,1e-05,1e+20,0.25,0.25,4096,3.25,1.5,1,3,3.5\n");
	free(csv);
	run_free(&r);
}

static void a_validation_before_the_first_step_is_a_line(void **state)
{
	(void)state;
	size_t n;
	struct run r = open_run();
	run_free(&r);
	put_string(at("run/events.jsonl"), "{\"step\": 0, \"kind\": \"validation\", \"valid_loss\": 9.5}\n");
	assert_int_equal(run_open(&r, at("run")), 0);
	char *csv = written(export_csv, &r, &n);
	/* the columns stand where they stand without it */
	assert_non_null(strstr(csv, "step,samples,tokens,batch,loss,"));
	assert_non_null(strstr(csv, "\n0,,,,,,,,,,,,9.5,,,,\n1,8,1024,"));
	free(csv);
	run_free(&r);
}

static void expert_counts_have_a_line_each(void **state)
{
	(void)state;
	size_t n;
	struct run r = open_run();
	char *csv = written(export_expert_counts, &r, &n);
	assert_string_equal(csv, "step,layer,expert,tokens\n1,0,0,3\n1,0,1,5\n1,1,0,6\n1,1,1,2\n");
	free(csv);
	run_free(&r);
}

/* These bytes were made from the same metrics with Google's protobuf library for Python, from TensorBoard's definition
 * of Event, and with its crc32c. */
static const char event_file[] =
	/* the version of the format */
	"\x18\x00\x00\x00\x00\x00\x00\x00\xa3\x7fK\"\x09\x00\x00@@\xfcT\xd9\x41\x1a\x0d\x62rain.Event:2\x1b\x85"
	".\xde"
	/* step 1 */
	"\xf3\x00\x00\x00\x00\x00\x00\x00\x0e\xcb\xb4\xab\x09\x00\x00@@\xfcT\xd9\x41\x10\x01*\xe5\x01\x0a\x0e"
	"\x0a\x07samples\x15\x00\x00\x00\x41\x0a\x0d\x0a\x06tokens\x15\x00\x00\x80\x44\x0a\x0c\x0a\x05\x62\x61t"
	"ch\x15\x00\x00\x00\x41\x0a\x0b\x0a\x04loss\x15\x00\x00`@\x0a\x13\x0a\x0c\x62\x61lance_loss\x15\x00\x00"
	"\x80\x3f\x0a\x0d\x0a\x06z_loss\x15\xcd\xcc\xcc=\x0a\x09\x0a\x02lr\x15o\x12\x83:\x0a\x10\x0a\x09grad_no"
	"rm\x15\x00\x00\xc0\x7f\x0a\x12\x0a\x0bupdate_norm\x15\x00\x00\x80>\x0a\x0e\x0a\x07seconds\x15\x00\x00"
	"\x00\x3f\x0a\x18\x0a\x11tokens_per_second\x15\x00\x00\x00\x45\x0a\x14\x0a\x0d\x65xpert_load/0\x15\x00"
	"\x00\xc0\x3f\x0a\x14\x0a\x0d\x65xpert_load/1\x15\x00\x00\x00@\x8f:C\xe8"
	/* step 300 */
	"0\x01\x00\x00\x00\x00\x00\x00\x93\xc5\x61\x87\x09\x00\x00P@\xfcT\xd9\x41\x10\xac\x02*\xa1\x02\x0a\x0e"
	"\x0a\x07samples\x15\x00\x00\x80\x41\x0a\x0d\x0a\x06tokens\x15\x00\x00\x00\x45\x0a\x0c\x0a\x05\x62\x61t"
	"ch\x15\x00\x00\x00\x41\x0a\x0b\x0a\x04loss\x15\x00\x00@@\x0a\x13\x0a\x0c\x62\x61lance_loss\x15\x00\x00"
	"\x80\x3f\x0a\x0d\x0a\x06z_loss\x15\x00\x00\x00\x3f\x0a\x09\x0a\x02lr\x15\xac\xc5'7\x0a\x10\x0a\x09grad"
	"_norm\x15\xecx\xad`\x0a\x12\x0a\x0bupdate_norm\x15\x00\x00\x80>\x0a\x0e\x0a\x07seconds\x15\x00\x00\x80"
	">\x0a\x18\x0a\x11tokens_per_second\x15\x00\x00\x80\x45\x0a\x14\x0a\x0d\x65xpert_load/0\x15\x00\x00\xc0"
	"\x3f\x0a\x14\x0a\x0d\x65xpert_load/1\x15\x00\x00\x80\x3f\x0a\x11\x0a\x0avalid_loss\x15\x00\x00P@\x0a"
	"\x12\x0a\x0bvalid/a,\"b\"\x15\x00\x00@@\x0a\x13\x0a\x0cvalid/chat_x\x15\x00\x00`@\x14\x33~-";

static void tensorboard_gets_the_known_bytes(void **state)
{
	(void)state;
	size_t n;
	struct run r = open_run();
	char *file = written(export_tensorboard, &r, &n);
	assert_int_equal(n, sizeof event_file - 1);
	for (size_t i = 0; i < n; i++)
		if (file[i] != event_file[i])
			fail_msg("byte %zu is %02x; expected %02x", i, (uint8_t)file[i], (uint8_t)event_file[i]);
	free(file);
	run_free(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		TEST(csv_has_a_field_for_every_member), TEST(a_validation_before_the_first_step_is_a_line),
		TEST(expert_counts_have_a_line_each), TEST(tensorboard_gets_the_known_bytes),
	};
	return cmocka_run_group_tests(tests, NULL, NULL);
}
