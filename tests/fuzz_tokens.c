/*
 * fuzz_tokens.c - libFuzzer target for tokens_open. The input: one byte of flags, one byte n, n bytes of .bin, and
 * the rest:
 * .idx, or the manifest of a good pair when bit 0 of the flags is set.
 */
#include "../data.c"

static char dir[] = "/tmp/fuzz_tokens.XXXXXX";
static char prefix[64];

static void put_file(const char *suffix, const void *data, size_t n)
{
	char path[PATH_LEN];
	FILE *f = path_suffix(path, prefix, suffix) < 0 ? NULL : fopen(path, "w");
	if (!f || fwrite(data, 1, n, f) != n || fclose(f) != 0)
		abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n)
{
	/* one document of three uint16 tokens */
	static const uint8_t idx[] = "MMIDIDX\0\0" "\1\0\0\0\0\0\0\0" "\10" "\1\0\0\0\0\0\0\0" "\2\0\0\0\0\0\0\0"
		"\3\0\0\0" "\0\0\0\0\0\0\0\0" "\0\0\0\0\0\0\0\0" "\1\0\0\0\0\0\0\0";
	static const uint8_t bin[] = {'h', 0, 'i', 0, 0, 1};
	if (!*prefix && (!mkdtemp(dir) || snprintf(prefix, sizeof prefix, "%s/t", dir) < 0))
		abort();
	if (n < 2)
		return 0;
	bool manifest = data[0] & 1;
	size_t bin_bytes = data[1] < n - 2 ? data[1] : n - 2;
	const uint8_t *rest = data + 2 + bin_bytes;
	size_t rest_bytes = n - 2 - bin_bytes;
	if (manifest) {
		put_file(".bin", bin, sizeof bin);
		put_file(".idx", idx, sizeof idx - 1);
		put_file(".json", rest, rest_bytes);
	} else {
		put_file(".bin", data + 2, bin_bytes);
		put_file(".idx", rest, rest_bytes);
	}
	struct tokens t;
	int vocab_size = data[0] & 2 ? 257 : INT32_MAX;
	if (tokens_open(&t, prefix, vocab_size) == 0) {
		int32_t ids[256];
		if (t.count > 256 || t.documents < 0)
			abort();
		tokens_read(&t, 0, t.count, ids);
		for (int64_t i = 0; i < t.count; i++)
			if (ids[i] < 0 || ids[i] >= vocab_size)
				abort();
	}
	tokens_close(&t);
	if (manifest) {
		char path[PATH_LEN];
		if (path_suffix(path, prefix, ".json") == 0)
			unlink(path);
	}
	return 0;
}
