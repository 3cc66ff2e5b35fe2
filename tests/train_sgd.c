/*
 * train_sgd.c - what test_local.sh needs beside `ling train`: a training run whose optimizer is plain SGD.
 *
 *   train_sgd CONFIG.yaml [key.path=value ...]
 *
 * AdamW without decays, lr g / (|g| + eps), is SGD with the rate lr / eps where eps is far above every gradient,
 * farther than a config allows. The rate is schedule.peak_lr.
 */
#include "ling.h"
#include "training/start.h"
#include "training/loop.h"

#include <stdio.h>

int main(int argc, char **argv)
{
	static struct config c;
	struct trainer t;
	parallel_start();
	int rc = argc > 1 ? config_load(&c, argv[1], argc - 2, argv + 2, false) : -1;
	c.optimizer.beta1 = c.optimizer.beta2 = c.optimizer.weight_decay = 0;
	c.optimizer.eps = 1e20;
	c.schedule.peak_lr *= c.optimizer.eps;
	if (rc == 0 && (rc = trainer_init(&t, &c)) == 0) {
		rc = trainer_run(&t) == RUN_DONE ? 0 : -1;
		trainer_free(&t);
	}
	if (rc < 0)
		fprintf(stderr, "train_sgd: %s\n", error_text);
	parallel_stop(rc < 0);
	return rc < 0;
}
