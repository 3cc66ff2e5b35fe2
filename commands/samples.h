/*
 * commands/samples.h - eval.samples: prompts that each evaluation of a training run continues, into RUN/samples.jsonl.
 *
 * A text is what `ling generate` writes behind the same prompt with the checkpoint of that step, at most
 * eval.sample_tokens tokens of it. Each line: {"step": updates done, "prompt": "...", "text": "...", "tokens": how
 * many}, and with a temperature "seed", which is a function of train.seed and the step.
 */
#ifndef LING_COMMANDS_SAMPLES_H
#define LING_COMMANDS_SAMPLES_H

#include "ling.h"

/* Reads the prompts and the tokenizer of a run, and sets t->write_samples; does nothing where there are no prompts.
 * Fails without a tokenizer, with a prompt that is too long, and where the keys and values of the prompts do not fit
 * into memory beside the training. Collective. */
int sampler_open(struct trainer *t);
void sampler_close(struct trainer *t); /* without a sampler it does nothing */

#endif
