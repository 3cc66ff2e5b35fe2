/*
 * files/rope.h - the rotary position embedding of a model's config: its frequencies, and their scaling.
 *
 * The first d = rotary_dim() elements of the key or query at position t are turned by the angles t * frequency[i],
 * i < d / 2; pairs are i and i + d / 2. Without scaling frequency[i] = rope_theta^(-2 i / d). docs/training.md has the
 * formulas of the kinds of scaling, which are those of transformers.
 */
#ifndef LING_FILES_ROPE_H
#define LING_FILES_ROPE_H

#include "files/config.h"

#include <stdint.h>

/* frequency [d / 2], in radians a position. length: of the sequences, in tokens. Only the kind dynamic depends on it,
 * where it is above original_max_position_embeddings. */
void rope_frequencies(double *frequency, const struct model_config *c, int64_t length);

/* What sines and cosines are multiplied by: 1, but for yarn. */
double rope_attention_factor(const struct model_config *c);

/* Of yarn: the indices i between which frequencies go over from those of the model (i <= range[0]) to those divided by
 * the factor (i >= range[1]). Where range[1] < range[0], as with very short original lengths, they are those that the
 * formula gives. */
void rope_yarn_range(double range[2], const struct model_config *c);

/* The attention factor that yarn has where the config names neither one nor mscale: 0.1 ln(factor) + 1. */
double rope_yarn_attention(double factor);

#endif
