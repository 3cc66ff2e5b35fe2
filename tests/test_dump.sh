#!/bin/bash
# Dumps of several ranks: each layout's against one process; training is the same to the bit with and without; skipped batches; whose file it is.
# And train.perturb, alike on all layouts, at the start of a run alone.
. "$(dirname "$0")/check.sh"
export OMP_NUM_THREADS=1

# build float|double: the program and the tool of a build.
build() {
	[ "$1" = double ] && ling=$root/build/ling_double compare=$root/build/compare_checkpoints_double
	[ "$1" = float ] && ling=$root/ling compare=$root/build/compare_checkpoints
}

# train RANKS DIR OPTIONS...: a run of two steps that must succeed; one rank is a process without a launcher.
train() {
	local n=$1 out=$2 launch=
	shift 2
	[ "$n" = 1 ] || launch="ranks $n"
	rm -rf "$out"
	$launch "$ling" train tiny.yaml train.output_dir="$out" train.stop_at_step=2 "$@" >out.txt 2>err.txt ||
		problem "$n ranks, $out $*: exit status $?: $(head -c 600 err.txt)"
	! grep -q "not dumped" err.txt || problem "$n ranks, $out $*: $(head -c 600 err.txt)"
}

# equal TOLERANCE "RANKS,TENSOR,EXPERT ..." OPTIONS...: the dumps of both steps of one process and of these layouts.
equal() {
	local tolerance=$1 those=$2 n tensor expert step
	shift 2
	rm -rf one-dump
	train 1 one train.dump='{steps: [1, 2], dir: one-dump}' "$@"
	for layout in $those; do
		IFS=, read -r n tensor expert <<<"$layout"
		rm -rf dump
		train "$n" many train.dump='{steps: [1, 2], dir: dump}' "$@" parallel.tensor="$tensor" parallel.expert="$expert"
		for step in 1 2; do
			"$compare" dump "" one-dump/step-000000$step.safetensors dump/step-000000$step.safetensors "$tolerance" >compare.txt 2>&1 ||
				problem "$layout, step $step, $*: $(head -n 3 compare.txt) $(tail -n 1 compare.txt)"
		done
	done
}

# ---- data: windows of 16 tokens, and conversations, with padding and targets that do not count ----
build float
head -c 640 "$root/LICENSE" >text.txt
perl -e 'for (1 .. 30) { my $n = $_ * 7 % 23; print qq({"prompt": ") . "question $n " x ($_ % 5 + 1) . qq(", "completion": ") . "x" x $n . qq("}\n) }' >chat.jsonl
"$ling" tokenize --out text text.txt >/dev/null && "$ling" tokenize --out chat chat.jsonl >/dev/null || exit 1
tiny model.num_attention_heads=8 model.num_key_value_heads=4 model.num_experts=8 model.intermediate_size=24 schedule.peak_lr=1e-3 \
	schedule.warmup_steps=5 model.router='{ balance_loss_scope: micro_batch, z_loss_coef: 1e-2, balance_loss_coef: 0.1 }'
everything="model.use_bias=true model.use_qkv_bias=true model.first_k_dense_replace=1 model.router.balance_loss_scope=sequence
	model.router.warmup_steps=15 data.seq_len=15 model.num_hidden_layers=3"

# The batch of 7 sequences in micro-batches of 2, the last one short; of 1, with all that a model can have; and of 4, which leaves ranks idle.
test_layouts_in_double() {
	build double
	equal 1e-11 "4,2,4 4,2,2 4,1,4 4,4,1"
	equal 1e-11 "4,2,4 4,2,2" train.micro_batch=1 $everything train.recompute=attention
	equal 1e-11 "4,1,2 3,1,1" train.micro_batch=4 model.tie_word_embeddings=true train.recompute=layer train.batch_warmup='{start: 2, increment: 5, tokens: 40}'
	equal 1e-11 "4,2,2" train.micro_batch=1 data.train=chat data.seq_len=60
	equal 1e-11 "4,4,4" train.batch=1 train.micro_batch=1 data.seq_len=3 # more ranks than tokens
	equal 1e-11 "4,2,4 4,4,2" model.architecture=BailingMoeV2ForCausalLM model.n_group=4 model.topk_group=2 model.first_k_dense_replace=1 \
		model.num_nextn_predict_layers=2 train.micro_batch=1 data.seq_len=15 train.recompute=layer
}

test_layouts_in_float() {
	build float
	equal 1e-5 "4,2,4 4,2,2"
}

# With a dump and without one, training is the same to the bit, its metrics too.
test_bits() {
	build float
	local layout
	for layout in 1,1,1 4,2,4; do
		IFS=, read -r n tensor expert <<<"$layout"
		rm -rf dump
		train "$n" with train.dump='{steps: [1, 2], dir: dump}' parallel.tensor="$tensor" parallel.expert="$expert"
		train "$n" without parallel.tensor="$tensor" parallel.expert="$expert"
		diff -rq with/step-0000002 without/step-0000002 -x trainer.json >diff.txt || problem "$layout: $(head -n 3 diff.txt)"
		cmp -s <(steady with/metrics.jsonl | sed 's/"save_seconds.*//; s/"slowest.*//') <(steady without/metrics.jsonl | sed 's/"save_seconds.*//; s/"slowest.*//') ||
			problem "$layout: other metrics: $(diff <(steady with/metrics.jsonl) <(steady without/metrics.jsonl) | head -c 600)"
		[ -s dump/step-0000001.safetensors ] && [ -s dump/step-0000002.safetensors ] || problem "$layout: no dumps: $(ls dump)"
	done
}

# A skipped batch has a dump of its own, and the batch that is trained in its place one under the step's name.
test_skipped() {
	build float
	rm -rf dump
	expect 0 "" ranks 4 "$ling" train tiny.yaml train.output_dir=skips parallel.tensor=2 parallel.expert=4 train.stop_at_step=3 \
		train.dump='{steps: [2], dir: dump}' --inject nan@step=2,rank=3
	[ "$(ls dump | tr '\n' ' ')" = "step-0000002-skipped-0000002.safetensors step-0000002.safetensors " ] || problem "$(ls dump)"
	[ "$(jq -s 'map(select(.kind == "skip")) | length' skips/events.jsonl)" = 1 ] || problem "$(cat skips/events.jsonl)"
	"$compare" dump embedding dump/step-0000002{,-skipped-0000002}.safetensors 0 >compare.txt && problem "the same batch: $(cat compare.txt)"
	grep -q '^[0-9]* and [0-9]* tensors' compare.txt || problem "as many tensors without the update: $(cat compare.txt)"
}

# The run that continues replaces its own files; another one is refused before it trains.
test_whose_file() {
	build float
	local before dump='train.dump={steps: [1, 2], dir: dump}'
	rm -rf dump
	train 1 mine "$dump" train.stop_at_step=1
	[ "$(ls dump)" = step-0000001.safetensors ] || problem "$(ls dump)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=mine train.stop_at_step=2 "$dump"
	before=$(stat -c %i dump/step-0000002.safetensors)
	rm -rf mine/step-*
	train 1 rest "$dump" train.dump=off # nothing is written, so nothing is in the way
	expect 0 "" "$ling" train tiny.yaml train.output_dir=mine train.stop_at_step=2 "$dump"
	[ "$(stat -c %i dump/step-0000002.safetensors)" != "$before" ] || problem "the run's own file was not replaced"
	expect 1 "step-0000001.safetensors is there already, and is not this run's" "$ling" train tiny.yaml train.output_dir=other "$dump"
	[ "$(lines other/metrics.jsonl)" = 0 ] || problem "it has trained"
	expect 1 "train.dump.dir" ranks 2 "$ling" train tiny.yaml train.output_dir=other "$dump"
}

# A weight moves by one unit in the last place, on every layout alike; a run that continues, or was not asked to, does not move.
test_perturb() {
	build float
	local still="schedule.peak_lr=1e-30 schedule.warmup_steps=off $everything"
	train 1 plain $still train.stop_at_step=1
	train 1 moved $still train.stop_at_step=1 train.perturb=7
	"$compare" model "" plain/step-0000001 moved/step-0000001 1.2e-7 >compare.txt || problem "moved by more: $(cat compare.txt)"
	"$compare" model "" plain/step-0000001 moved/step-0000001 1e-8 >compare.txt && problem "not moved: $(cat compare.txt)"
	train 4 moved-4 $still train.stop_at_step=1 train.perturb=7 parallel.tensor=2 parallel.expert=2
	same plain/step-0000001/config.json moved-4/step-0000001/config.json
	"$compare" model "" moved/step-0000001 moved-4/step-0000001 0 >compare.txt || problem "other weights on 4 ranks: $(cat compare.txt)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=moved $still train.stop_at_step=2 train.perturb=8
	has out.txt "train.perturb: 7 -> 8; it is not read"
	"$compare" model "" moved/step-0000001 moved/step-0000002 0 >compare.txt || problem "moved again: $(cat compare.txt)"
	train 1 from $still train.stop_at_step=1 train.init_from=plain/step-0000001 train.perturb=7
	"$compare" model "" moved/step-0000001 from/step-0000001 0 >compare.txt || problem "init_from: $(cat compare.txt)"
}

check layouts_in_double layouts_in_float bits skipped whose_file perturb
finish
