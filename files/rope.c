/*
 * files/rope.c - the rotary position embedding of a model's config: its frequencies, and their scaling.
 */
#define _GNU_SOURCE
#include "files/rope.h"

#include "files/config.h"

#include <math.h>

/* 0.1 mscale ln(factor) + 1; 1 where nothing is scaled. */
static double yarn_mscale(double factor, double mscale)
{
	return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

double rope_yarn_attention(double factor)
{
	return yarn_mscale(factor, 1);
}

double rope_attention_factor(const struct model_config *c)
{
	const struct rope_scaling *s = &c->rope_scaling;
	if (s->type != ROPE_YARN)
		return 1;
	if (s->attention_factor)
		return s->attention_factor;
	return s->mscale && s->mscale_all_dim ? yarn_mscale(s->factor, s->mscale) / yarn_mscale(s->factor,
			s->mscale_all_dim) : rope_yarn_attention(s->factor);
}

/* The index, not a whole number, of the frequency that turns `rotations` times over the original length:
 * length rope_theta^(-2 i / d) = 2 pi rotations. */
static double yarn_index(const struct model_config *c, double rotations)
{
	return rotary_dim(c) * log(c->rope_scaling.original_max_position_embeddings / (rotations * 2 * M_PI)) /
			(2 * log(c->rope_theta));
}

void rope_yarn_range(double range[2], const struct model_config *c)
{
	const struct rope_scaling *s = &c->rope_scaling;
	const double low = yarn_index(c, s->beta_fast), high = yarn_index(c, s->beta_slow);
	range[0] = fmax(s->truncate ? floor(low) : low, 0);
	range[1] = fmin(s->truncate ? ceil(high) : high, rotary_dim(c) - 1);
}

void rope_frequencies(double *frequency, const struct model_config *c, int64_t length)
{
	const struct rope_scaling *s = &c->rope_scaling;
	const int d = rotary_dim(c);
	double base = c->rope_theta, range[2] = {0};
	if (s->type == ROPE_DYNAMIC && length > s->original_max_position_embeddings)
		base *= pow(s->factor * length / s->original_max_position_embeddings - (s->factor - 1), d / (d - 2.0));
	if (s->type == ROPE_YARN) {
		rope_yarn_range(range, c);
		range[1] += range[0] == range[1] ? 0.001 : 0; /* so that it is no division by 0 */
	}
	for (int i = 0; i < d / 2; i++) {
		const double plain = pow(base, -2.0 * i / d);
		const double ramp = s->type == ROPE_YARN ? fmin(fmax((i - range[0]) / (range[1] - range[0]), 0), 1) : 0;
		frequency[i] = s->type == ROPE_LINEAR ? plain / s->factor : s->type == ROPE_YARN
				? plain * (1 - ramp) + plain / s->factor * ramp : plain;
	}
}
