/*
 * fuzz_safetensors.c - libFuzzer target for what tensors_open, tensors_read and checkpoint_read_state read.
 * The input's first byte chooses the file that the rest becomes; the others of its directory are good.
 */
#define _GNU_SOURCE
#include "tests/fuzz.h"

#include "files/config.h"
#include "files/tensors.h"
#include "files/safetensors.h"
#include "files/checkpoint.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <unistd.h>

/* Reads every tensor that is not too large, as it is and with a wrong shape. */
static void read_weights(void)
{
	static real out[1 << 16];
	struct tensors *w = tensors_open(fuzz_path(""), "model");
	for (int i = 0; w && i < tensors_count(w); i++) {
		const struct tensor *t = tensor_find(w, tensors_name(w, i));
		if (!t)
			abort();
		uint64_t bytes = t->end - t->begin;
		struct named_tensor a = {t->name, t->shape[0], 0, out};
		if (t->num_dims == 2)
			a.cols = t->shape[1];
		if (bytes < sizeof out / 8) {
			tensors_read(w, &a);
			a.rows++;
			tensors_read(w, &a);
			tensors_read_range(w, t->name, a.rows - 1, a.cols, 1, bytes / 4, out);
			tensors_read_range(w, t->name, a.rows - 1, a.cols, 1, a.rows - 2, out);
			tensor_verify(&w->tensors[i]);
			tensors_read_int(w, t->name, bytes / 4, (int32_t *)out);
			tensors_read_int(w, t->name, bytes / 8, (int32_t *)out);
		}
	}
	tensors_close(w);
}

/* trainer.json: its checksum is made right first, or no wrong field would ever be looked at; those of the other files
 * too when asked for. */
static void read_trainer(const uint8_t *data, size_t n, bool seal_files)
{
	static struct config c;
	double mean[2], std[2];
	struct trainer_state s = {.num_layers = 2, .router_mean = mean, .router_std = std};
	json_t *root = json_loadb((const char *)data, n, JSON_REJECT_DUPLICATES, NULL);
	char name[64];
	const char *path = fuzz_file("trainer.json", data, n);
	if (json_is_object(root)) {
		json_t *files = json_object();
		for (int i = 0; checkpoint_file_name(name, i, 1); i++) {
			int64_t size;
			uint32_t crc;
			if (checkpoint_file_crc(fuzz_path(""), name, &size, &crc) < 0)
				abort();
			json_object_set_new(files, name, json_pack("{s:I, s:o}", "size", (json_int_t)size, "crc32",
					crc_to_json(crc)));
		}
		if (seal_files)
			json_object_set(root, "files", files);
		json_decref(files);
		json_object_set_new(root, "crc32", crc_to_json(trainer_crc(root)));
		json_write(path, root);
	}
	json_decref(root);
	FILE *notes = fopen("/dev/null", "w");
	checkpoint_read_state(fuzz_path(""), &c, &s, notes);
	fclose(notes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	static bool ready;
	if (!ready) {
		real a[2] = {1, 2};
		char name[64];
		if (safetensors_write(fuzz_path("a.safetensors"), &(struct named_tensor){"a", 2, 0, a}, 1) < 0 ||
				safetensors_write(fuzz_path("b.safetensors"), &(struct named_tensor){"b", 1, 2, a}, 1) < 0)
			abort();
		for (int i = 0; checkpoint_file_name(name, i, 1); i++)
			fuzz_file(name, "any bytes", 9);
		ready = true;
	}
	if (!n)
		return 0;
	int kind = *data++ % 4;
	switch (kind) {
	case 0:
		fuzz_file("model.safetensors", data, n - 1);
		read_weights();
		break;
	case 1:
		fuzz_file("model.safetensors.index.json", data, n - 1);
		read_weights();
		unlink(fuzz_path("model.safetensors.index.json"));
		break;
	default:
		read_trainer(data, n - 1, kind == 2);
	}
	return 0;
}
