/*
 * training/start.c - making a trainer: new, or continued from a checkpoint.
 */
#define _GNU_SOURCE
#include "training/start.h"

#include "files/base.h"
#include "files/heartbeat.h"
#include "files/trace.h"
#include "kernels.h"
#include "parallel.h"
#include "files/config.h"
#include "data.h"
#include "model/parameters.h"
#include "model/memory.h"
#include "model/weight_files.h"
#include "model/weights.h"
#include "training/events.h"
#include "training/saving.h"
#include "training/spikes.h"
#include "training/faults.h"
#include "training/local_sgd.h"
#include "ling.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

int trainer_open_events(struct trainer *t)
{
	return is_rank0(t) && t->events.fd < 0 ? events_open(&t->events, t->config.train.output_dir) : 0;
}

/* Takes what the run must remember of spikes from the state that was read from checkpoint `dir`. A state without it
 * leaves all empty. */
static int spikes_from_json(struct trainer *t, const char *dir)
{
	const json_t *state = t->state.spikes;
	char where[PATH_LEN + 32];
	int64_t taken[MAX_SOURCES], rollbacks = 0;
	snprintf(where, sizeof where, "%s/trainer.json: spikes", dir);
	for (int i = 0; i < t->state.num_sources; i++)
		taken[i] = t->state.sources[i].taken;
	spike_detector_clear(&t->spikes);
	t->retry.count = 0;
	if (state && (spike_detector_from_json(&t->spikes, state, where) < 0 || retry_queue_from_json(&t->retry,
			json_object_get(state, "queue"), where, t->state.num_sources, taken, t->state.batches) < 0 ||
			field_int(state, where, "rollbacks", 0, INT32_MAX, &rollbacks) < 0))
		return -1;
	t->rollbacks = (int)rollbacks;
	return 0;
}

/* Decides whether saves may go on while training does: whether there is memory for the copy. Fails when there is none
 * for the changes of parallel.reduce bf16. */
static int init_saver(struct trainer *t)
{
	const struct config *c = &t->config;
	const struct layout *l = &t->model.layout;
	struct memory_plan plan;
	if (plan_memory(&plan, &c->model, l, c->train.micro_batch, c->data.seq_len, c->train.recompute) < 0)
		return -1;
	plan.reduction += c->parallel.reduce == REDUCE_BF16 ? plan.changes : 0;
	const double without = planned_bytes(&plan) + plan.balanced_arrivals,
			share = usable_memory("") / parallel_local_ranks(), machine = fmin(share, process_memory());
	if (planned_bytes(&plan) > share) /* model_init has counted all but the changes */
		return fail("parallel.reduce is bf16: the changes of the weights take %.3f GB, and all of training %.3f GB; "
				"%.3f GB may be used here: set it to f32, or take more ranks", plan.changes / 1e9,
				planned_bytes(&plan) / 1e9, share / 1e9);
	const bool fits = without + plan.copy <= machine;
	const bool wanted = c->checkpoint.every && c->checkpoint.async != ASYNC_FALSE;
	if (wanted && !fits && c->checkpoint.async == ASYNC_TRUE)
		return fail("checkpoint.async is true: the copy that is written while training goes on takes %.1f GB beside "
				"the %.1f GB of training, and %.1f GB may be used here: set it to auto or false, or take more ranks",
				plan.copy / 1e9, without / 1e9, machine / 1e9);
	return saver_init(&t->saver, &t->model.table, c, wanted && fits);
}

int trainer_allocate(struct trainer *t, const struct config *c)
{
	const int layers = num_layers(&c->model);
	*t = (struct trainer){.config = *c, .events.fd = -1, .faults.log.fd = -1, .saved_step = -1};
	run_length(c, 0, 0, &t->steps, &t->tokens);
	const int replicas = count_replicas(c, parallel_size(), c->parallel.tensor, c->parallel.expert);
	if (parallel_agree(replicas < 0 ? -1 : layout_check(c->model.num_attention_heads, c->model.num_key_value_heads,
			c->model.vocab_size, c->model.num_experts, parallel_size() / replicas, c->parallel.tensor,
			c->parallel.expert, "parallel.")) < 0)
		return -1;
	struct layout layout = layout_of_replica(parallel_rank(), parallel_size(), replicas, c->parallel.tensor,
			c->parallel.expert);
	layout_connect(&layout);
	trace_replica(layout.replicas.rank);
	if (parallel_rank() == 0)
		warn_of_idle_ranks(layout.data.size * replicas, c->train.batch, c->train.micro_batch,
				c->train.batch_warmup.tokens ? c->train.batch_warmup.start : c->train.batch);
	int rc = model_init(&t->model, &c->model, &layout, c->train.micro_batch, c->data.seq_len, c->train.recompute);
	if (rc == 0)
		rc = gradient_reduction_init(&t->reduction, &t->model.table, c->parallel.reduce == REDUCE_BF16);
	if (rc == 0)
		rc = local_sgd_init(&t->local, &t->model.table, &c->local);
	if (rc == 0)
		rc = step_sums_init(&t->sums, &c->model);
	if (rc == 0)
		rc = init_saver(t);
	if (rc == 0)
		rc = spike_detector_init(&t->spikes, &c->spikes);
	struct parameter_count count[NUM_PARAMETER_PARTS + 1];
	if (rc == 0)
		rc = count_parameters(count, &t->flops_per_token, &c->model, c->data.seq_len);
	const int64_t sequences = rc == 0 ? own_micro_batches(t, c->train.batch).num * c->train.micro_batch : 0;
	const size_t tokens = sequences * c->data.seq_len;
	t->state.num_layers = layers;
	t->state.router_mean = calloc(layers, sizeof(double));
	t->state.router_std = calloc(layers, sizeof(double));
	t->synchronisation.norm = calloc(replicas, sizeof(double));
	t->synchronisation.set_aside = calloc(replicas, sizeof(int));
	t->expert_load = calloc(layers, sizeof(double));
	t->expert_bias = calloc(layers, sizeof(double));
	t->expert_counts = calloc((size_t)layers * c->model.num_experts + 1, sizeof *t->expert_counts);
	t->valid_losses = calloc(c->data.num_valid + 1, sizeof *t->valid_losses);
	t->length = calloc(sequences, sizeof(int32_t));
	t->input = calloc(tokens, sizeof(int32_t));
	t->target = calloc(tokens, sizeof(int32_t));
	t->samples = calloc(c->train.batch, sizeof *t->samples);
	const bool documents = c->data.document_mask || c->data.packing != PACKING_WINDOWS; /* trainer_start may free it */
	t->document = documents ? calloc(tokens, sizeof(int32_t)) : NULL;
	if (rc == 0 && (!t->synchronisation.norm || !t->synchronisation.set_aside || !t->state.router_mean ||
			!t->state.router_std || !t->expert_load || !t->expert_bias || !t->expert_counts || !t->valid_losses ||
			!t->length || !t->input || !t->target || !t->samples || (documents && !t->document)))
		rc = fail("out of memory for the %zu tokens that a rank has of a batch of %d x %d", tokens, c->train.batch,
				c->data.seq_len);
	if (parallel_agree(rc) < 0) {
		trainer_free(t);
		return -1;
	}
	for (int l = 0; l < layers; l++)
		t->state.router_std[l] = 1;
	for (int64_t i = 0; i < sequences; i++)
		t->length[i] = c->data.seq_len;
	return 0;
}

void trainer_free(struct trainer *t)
{
	blend_close(&t->train);
	for (int i = 0; i < MAX_SOURCES; i++)
		tokens_close(&t->valid[i]);
	gradient_reduction_free(&t->reduction);
	saver_free(&t->saver);
	free(t->unwritten.data);
	model_free(&t->model);
	model_files_free(&t->files);
	free(t->sums.values);
	free(t->state.router_mean);
	free(t->state.router_std);
	free(t->expert_load);
	free(t->expert_bias);
	free(t->expert_counts);
	free(t->valid_losses);
	free(t->input);
	free(t->target);
	free(t->document);
	free(t->length);
	free(t->samples);
	dump_close(t->dump);
	retry_queue_free(&t->retry);
	spike_detector_free(&t->spikes);
	json_decref(t->state.spikes);
	json_decref(t->state.local);
	local_sgd_free(&t->local);
	free(t->synchronisation.norm);
	free(t->synchronisation.set_aside);
	events_close(&t->events);
	faults_free(&t->faults);
	slow_ranks_free(&t->slow_ranks);
	*t = (struct trainer){.events.fd = -1, .faults.log.fd = -1};
}

static int open_data_files(struct trainer *t)
{
	const struct config *c = &t->config;
	struct data_options o;
	int rc = data_options_init(&o, c, t->tokenizer);
	if (rc == 0)
		rc = blend_open(&t->train, c, &o);
	for (int i = 0; i < c->data.num_valid && rc == 0; i++)
		rc = open_data(&t->valid[i], &c->data.valid[i], &o, c->eval.max_windows);
	return rc;
}

/* Finds the tokenizer of the run, and reads what goes along into its checkpoints, from the checkpoint `dir` that the
 * run continues from or, where that is "", from `start`, the directory of init_from, whose config.json must describe
 * the same model. */
static int take_along(struct trainer *t, const char *dir, const char *start)
{
	struct config *c = &t->config;
	const char *from = *dir ? dir : start;
	const bool named = strcmp(c->data.tokenizer, "none");
	struct tokenizer *theirs;
	int rc = path_copy(t->tokenizer, c->data.tokenizer);
	if (!*from || rc < 0)
		return rc;
	struct model_config described;
	if (!*dir && config_from_huggingface(&described, from) < 0) {
		char reason[sizeof error_text];
		memcpy(reason, error_text, sizeof reason);
		return fail("train.init_from: %s", reason);
	}
	if (!*dir && config_check_init(&described, &c->model, from) < 0)
		return -1;
	if (is_rank0(t))
		rc = model_files_read(&t->files, from);
	t->state.files = &t->files;
	if (rc == 0 && named && !*dir && is_rank0(t))
		model_files_compare_tokenizer(&t->files, c->data.tokenizer, from);
	if (rc < 0 || named)
		return rc;
	const int found = tokenizer_find(&theirs, from, NULL);
	if (found < 0 && is_rank0(t)) /* perhaps one that ling does not read: then only data that names none is right */
		fprintf(stderr, "note: the tokenizer of %s cannot be compared with that of the data: %s\n", from, error_text);
	if (found > 0 && tokenizer_hash(theirs) == byte_tokenizer_hash())
		rc = path_copy(c->data.tokenizer, BYTE_TOKENIZER) < 0 ? -1 : path_copy(t->tokenizer, BYTE_TOKENIZER);
	else if (found > 0)
		rc = path_copy(t->tokenizer, from);
	tokenizer_close(theirs);
	return rc;
}

/* Names the samples that wait, but whose files are in the blend no more. */
static int drop_lost(struct trainer *t, const int *index)
{
	struct batch_sample *lost = allocate(t->retry.count * sizeof *lost);
	const int64_t n = retry_queue_remap(&t->retry, index, lost);
	const int rc = parallel_agree(n ? trainer_open_events(t) : 0);
	if (n && rc == 0 && is_rank0(t)) {
		json_t *list = samples_to_json(lost, n);
		char *text = json_text(list, JSON_COMPACT);
		printf("%lld samples that were to be tried again are dropped, their files are in data.train no more; file, "
				"first and last number: %s\n", (long long)n, text);
		free(text);
		event_write(&t->events, t->state.step, "drop", json_pack("{s:I, s:s, s:o}", "batch",
				(json_int_t)t->state.batches, "why", "their files left the blend", "samples", list));
	}
	free(lost);
	return rc;
}

int trainer_load(struct trainer *t, const char *dir, FILE *notes)
{
	struct model *m = &t->model;
	FILE *nowhere = notes ? NULL : fopen("/dev/null", "w");
	int index[MAX_SOURCES], rc = notes || nowhere ? 0 : fail("/dev/null: %s", strerror(errno));
	if (rc == 0)
		rc = checkpoint_read_state(dir, &t->config, &t->state, notes ? notes : nowhere);
	if (nowhere)
		fclose(nowhere);
	if (rc == 1)
		rc = blend_check_tokenizer(&t->train, t->config.data.tokenizer, dir);
	if (rc == 0)
		rc = spikes_from_json(t, dir);
	if (rc == 0)
		rc = local_sgd_from_json(&t->local, t->state.local, dir, t->state.num_sources);
	if (parallel_agree(rc) < 0)
		return -1;
	if (!t->state.num_sources) /* the checkpoint is a converted model, which has seen no data: any data is right */
		blend_begin(&t->train, &t->config, &t->state);
	else if ((rc = blend_resume(&t->train, &t->config, &t->state, dir, index)) < 0 || drop_lost(t, index) < 0)
		return -1;
	if (t->state.num_sources)
		local_sgd_remap(&t->local, index);
	if (rc == 1 && notes)
		printf("the blend of data.train changes at step %lld\n", (long long)t->state.step);
	if (load_moments(&m->table, &m->global, dir, m->exp_avg, m->exp_avg_sq, t->local.momentum) < 0 ||
			load_weights(m, dir, DO_NOT_VERIFY) < 0)
		return -1;
	t->saved_step = t->state.step;
	run_length(&t->config, t->state.step, t->state.tokens, &t->steps, &t->tokens);
	return 0;
}

/* Continues from a checkpoint. */
static int resume(struct trainer *t, const char *dir)
{
	if (trainer_load(t, dir, is_rank0(t) ? stdout : NULL) < 0)
		return -1;
	if (is_rank0(t))
		printf("continuing from %s\n", dir);
	const int before = t->state.local ? (int)json_integer_value(json_object_get(t->state.local, "replicas")) : 1;
	if (is_rank0(t) && before != t->model.layout.replicas.size)
		printf("the checkpoint is of %d replica%s, and now there %s %d: each takes its moments of AdamW from one of "
				"them, in turn\n", before, before > 1 ? "s" : "", t->model.layout.replicas.size > 1 ? "are" : "is",
				t->model.layout.replicas.size);
	return 0;
}

/* Opens the data, on which the ranks must agree. Then sets the weights: from the checkpoint `dir` or, where that is
 * "", from init_from or at random. */
static int trainer_start(struct trainer *t, const char *dir)
{
	const struct config *c = &t->config;
	char start[PATH_LEN] = ""; /* the config keeps init_from as it was asked for, to compare it */
	int rc = 0;
	if ((!*dir && *c->train.init_from && find_model(start, c->train.init_from) < 0) ||
			parallel_agree(take_along(t, dir, start)) < 0)
		return -1;
	/* Rank 0 first: it may have to examine all of the files, and leaves what it found for the others. */
	if (parallel_agree(is_rank0(t) ? open_data_files(t) : 0) < 0 ||
			parallel_agree(is_rank0(t) ? 0 : open_data_files(t)) < 0)
		return -1;
	for (int i = 0; i < t->train.num_files; i++)
		if (parallel_same(t->train.files[i].crc32, "data.train") < 0)
			return -1;
	for (int i = 0; i < c->data.num_valid; i++)
		if (parallel_same(t->valid[i].crc32, "data.valid") < 0)
			return -1;
	if (!blend_has_documents(&t->train)) {
		free(t->document);
		t->document = NULL;
	}
	if (is_rank0(t) && (print_windows("data.train", t->train.files, c->data.num_train, c->data.seq_len) < 0 ||
			print_windows("data.valid", t->valid, c->data.num_valid, c->data.seq_len) < 0))
		rc = -1;
	if (parallel_agree(rc) < 0)
		return -1;
	blend_begin(&t->train, c, &t->state);
	if (*dir)
		return resume(t, dir);
	struct tokenizer *theirs;
	if (is_rank0(t) && !strcmp(t->tokenizer, "none") && (!*start || tokenizer_find(&theirs, start, NULL) == 0))
		blend_note_tokenizer(&t->train);
	if (*start && model_load(&t->model, start) < 0)
		return -1;
	if (!*start)
		model_randomize(&t->model, c->train.seed);
	if (c->train.perturb)
		model_perturb(&t->model, c->train.perturb);
	return 0;
}

int trainer_init(struct trainer *t, const struct config *c)
{
	char dir[PATH_LEN];
	const struct layout all = layout_of_rank(parallel_rank(), parallel_size(), 1, 1);
	uint32_t program = 0;
	int rc = file_crc32("/proc/self/exe", &program);
	if (rc == 0 && all.world.rank == 0)
		rc = checkpoint_clean(c->train.output_dir);
	if (parallel_agree(rc < 0 ? -1 : 0) < 0 || parallel_same(program, "the program") < 0 ||
			parallel_same(config_crc32(c), "the config") < 0 || trainer_allocate(t, c) < 0)
		return -1;
	rc = checkpoint_choose(c, &t->model.table, &t->events, INT64_MAX, dir);
	if (rc >= 0)
		rc = trainer_start(t, dir);
	if (rc < 0)
		trainer_free(t);
	return rc;
}
