#!/bin/bash
# ling align: dumps of the same step from one rank and from four agree; a run that computes one thing differently is named at that operation; curves
# against a floor of perturbed runs; what is printed, and what is refused.
. "$(dirname "$0")/check.sh"
align=$ling
ling=$root/ling # ranks wait for one another: the sanitizers would make these runs long
export OMP_NUM_THREADS=1

"$ling" tokenize --tokenizer byte --out text "$root/README.md" >/dev/null || exit 1
tiny optimizer.eps=1e-8 model.use_bias=true train.steps=60 'train.dump={steps: [1, 2], dir: unused}'

# dump NAME KEY=VALUE...: a run of two steps, whose dumps are in NAME.dump.
dump() {
	local name=$1
	shift
	expect 0 "" "$ling" train tiny.yaml "train.output_dir=$name" "train.dump.dir=$name.dump" train.stop_at_step=2 "$@"
}

# named NAME "OPERATION": the run NAME first differs from the run `one` there.
named() {
	expect 1 "differ" "$align" align one.dump "$1.dump"
	grep -q "^first difference: $2" out.txt || problem "$1: no '$2' in: $(grep ^first out.txt)"
}

test_layouts() {
	dump one
	expect 0 "" ranks 4 "$ling" train tiny.yaml train.output_dir=four train.dump.dir=four.dump train.stop_at_step=2 parallel.tensor=2 \
		parallel.expert=2
	expect 0 "" "$align" align one.dump four.dump
	has out.txt "step 1: " "step 2: " "all within the tolerance" "A and B agree."
	expect 0 "" "$align" align one.dump/step-0000001.safetensors four.dump/step-0000001.safetensors --all
	has out.txt "model.layers.1.mlp.experts.5.up_proj.weight / gradient" "layer 1 / router / top-k (0 tokens choose others)"
}

# A change of the config is a bug of a known place.
test_named() {
	[ -d one.dump ] || dump one
	dump balance model.router.balance_loss_coef=0
	named balance "layer 1 / router / logits / gradient, step 1 (backward pass)"
	dump weights model.norm_topk_prob=false
	named weights "layer 0 / router / weights, step 1 (forward pass)"
	dump rope model.rope_theta=9e3
	named rope "layer 0 / attention / rope, step 1 (forward pass)"
	dump head model.norm_head=false
	named head "head / logits, step 1 (forward pass)"
	dump eps optimizer.eps=1e-4
	named eps "model.word_embeddings.weight / updated, step 1 (optimizer)"
	has out.txt "the last one that agrees: model.word_embeddings.weight / moment 2"
	dump seed train.seed=4
	named seed "embedding, step 1 (forward pass)"
}

test_json() {
	[ -d one.dump ] && [ -d balance.dump ] || { dump one && dump balance model.router.balance_loss_coef=0; }
	expect 1 "differ" "$align" align one.dump balance.dump --json
	json out.txt
	[ "$(jq -r '[.kind, .agree, .steps[0].first.operation, .steps[0].first.layer, .steps[0].first.pass] | @csv' out.txt)" = \
		'"dumps",false,"router / logits",1,"backward"' ] || problem "the result: $(head -c 500 out.txt)"
	expect 0 "" "$align" align one.dump balance.dump --json --tolerance 10
	jq -e .agree out.txt >/dev/null || problem "a wide tolerance does not pass"
}

test_curves() {
	local i
	expect 0 "" "$ling" train tiny.yaml train.output_dir=a train.dump=off
	for i in 1 2 3; do
		expect 0 "" "$ling" train tiny.yaml train.output_dir=floor$i train.dump=off train.perturb=$i
	done
	expect 0 "" ranks 2 "$ling" train tiny.yaml train.output_dir=ranks train.dump=off parallel.tensor=2
	expect 0 "" "$ling" train tiny.yaml train.output_dir=bug train.dump=off model.router.z_loss_coef=1e-3
	expect 0 "" "$align" align a ranks --floor floor1 floor2 floor3
	has out.txt "config: parallel.tensor is 1 in A, 2 in B" "no more than runs do whose first weights differ by rounding"
	expect 1 "a and bug differ" "$align" align a bug --floor floor1 floor2 --floor floor3
	has out.txt "config: model.router.z_loss_coef is 0.0001 in A, 0.001 in B" "by more than rounding explains"
	expect 0 "" "$align" align a ranks --floor floor1
	has out.txt "One run is a weak floor"
	expect 0 "" "$align" align a ranks --skip 50 --tolerance 1 --json
	json out.txt
	jq -e '.kind == "runs" and .series[0].steps == 10 and .agree' out.txt >/dev/null || problem "the result: $(cat out.txt)"
}

test_refused() {
	[ -d one.dump ] || dump one
	expect 1 "one.dump is a dump, and a-run is none" "$align" align one.dump a-run
	expect 1 "a-run: No such file" "$align" align a-run a-run
	expect 2 "--floor is for runs" "$align" align one.dump one.dump --floor x
	expect 2 "more than two words" "$align" align one.dump one.dump one.dump
	expect 2 "the floor says what passes" "$align" align a a --floor a --tolerance 1
	head -c 100000 one.dump/step-0000001.safetensors >short.safetensors
	expect 1 "short.safetensors: " "$align" align one.dump/step-0000001.safetensors short.safetensors
	cp one.dump/step-0000001.safetensors damaged.safetensors
	printf 'xxxx' | dd of=damaged.safetensors bs=1 seek=$(($(stat -c %s damaged.safetensors) - 40)) conv=notrunc status=none
	expect 1 "is damaged: checksum" "$align" align one.dump/step-0000001.safetensors damaged.safetensors
}

check layouts named json curves refused
finish
