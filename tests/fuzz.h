/* What the fuzz programs share: a folder of their own in /tmp, and files in it. A failure ends the program, which is a
 * finding. */
#ifndef LING_FUZZ_H
#define LING_FUZZ_H

#include "files/base.h"

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

/* The path of a file in the folder, or of the folder itself if name is empty. It stays until eight more were asked
 * for. */
static inline char *fuzz_path(const char *name)
{
	static char folder[] = "/tmp/ling-fuzz-XXXXXX", paths[8][PATH_LEN];
	static int next;
	char *path = paths[next++ % 8];
	if (folder[sizeof folder - 2] == 'X' && !mkdtemp(folder))
		abort();
	if (snprintf(path, PATH_LEN, *name ? "%s/%s" : "%s", folder, name) >= PATH_LEN)
		abort();
	return path;
}

/* Writes a file; returns its path. */
static inline char *fuzz_file(const char *name, const void *data, size_t n)
{
	char *path = fuzz_path(name);
	FILE *f = fopen(path, "w");
	if (!f || fwrite(data, 1, n, f) != n || fclose(f) != 0)
		abort();
	return path;
}

#endif
