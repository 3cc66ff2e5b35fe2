/*
 * commands/align_dumps.h - two dumps of training steps beside each other: the first operation whose results differ.
 */
#ifndef LING_COMMANDS_ALIGN_DUMPS_H
#define LING_COMMANDS_ALIGN_DUMPS_H

#include <jansson.h>
#include <stdbool.h>

/* Whether `path` is a dump: a .safetensors file, or a directory of step-NNNNNNN.safetensors. */
bool is_dump(const char *path);

/* Compares two dumps, tensor by tensor, in the order in which the tensors lie in a's files; docs/align.md says what is
 * in a dump, and how routing is compared. tolerance: the largest relative L2 difference of a tensor that passes; 0: by
 * its type (DEFAULT_TOLERANCES), and ten times that after the first step that both have. Returns the result, whose
 * members are those that `ling align --json` prints, or NULL on error: nothing in common, a tensor with two shapes,
 * files that are no dumps. */
json_t *align_dumps(const char *a, const char *b, double tolerance);

/* What is the tolerance of which type: the coarser one of a pair decides. Of a 16-bit type, what its rounding does to
 * values that were computed in it. Integers must be equal. */
#define DEFAULT_TOLERANCES "1e-10 for F64, 1e-5 for F32, 2e-3 for F16, 1e-2 for BF16"

#endif
