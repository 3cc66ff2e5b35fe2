#!/bin/bash
# rope_scaling from the config to the files: trained, continued, evaluated, generated with, converted.
. "$(dirname "$0")/check.sh"

head -c 4000 "$root/LICENSE" >text.txt
"$ling" tokenize --out text text.txt >/dev/null || exit 1
tiny model.max_position_embeddings=32 model.initializer_range=0.3 model.rope_theta=10000 data.seq_len=64 train.steps=4 train.batch=4 train.micro_batch=2

declare -A kinds=([linear]='{type: linear, factor: 2}' [dynamic]='{type: dynamic, factor: 2}' [yarn]='{type: yarn, factor: 2, beta_fast: 4}')

loss() { metric loss "$1" | cut -d, -f1; }

# Each kind trains windows that are longer than the original; a run that was stopped and continued has the same bits, and not another scaling.
test_train() {
	local kind
	expect 2 "data.seq_len: found 64; expected at most model.max_position_embeddings, which is 32" "$ling" train tiny.yaml train.output_dir=refused
	for kind in linear dynamic yarn; do
		expect 0 "" "$ling" train tiny.yaml train.output_dir=$kind model.rope_scaling="${kinds[$kind]}"
		expect 0 "" "$ling" train tiny.yaml train.output_dir=$kind-2 model.rope_scaling="${kinds[$kind]}" train.stop_at_step=2
		expect 1 "model.rope_scaling.factor was 2.0 in the checkpoint, found 3.0" "$ling" train tiny.yaml train.output_dir=$kind-2 \
			model.rope_scaling="${kinds[$kind]/factor: 2/factor: 3}"
		expect 0 "" "$ling" train tiny.yaml train.output_dir=$kind-2 model.rope_scaling="${kinds[$kind]}"
		cmp -s $kind/step-0000004/model.safetensors $kind-2/step-0000004/model.safetensors || problem "$kind: continued, it has other weights"
		[ "$(jq -r .rope_scaling.type $kind/step-0000004/config.json)" = $kind ] || problem "$(cat $kind/step-0000004/config.json)"
	done
	! cmp -s linear/step-0000004/model.safetensors yarn/step-0000004/model.safetensors || problem "linear is yarn"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=plain data.seq_len=32
	[ "$(jq .rope_scaling plain/step-0000004/config.json)" = null ] || problem "$(cat plain/step-0000004/config.json)"
	# a run may extend weights without scaling, but not forget the scaling that weights have
	expect 0 "" "$ling" train tiny.yaml train.output_dir=extended train.init_from=plain/step-0000004 model.rope_scaling="${kinds[yarn]}"
	expect 1 'model.rope_scaling.type is "yarn", the config asks for "default"' "$ling" train tiny.yaml train.output_dir=forgotten data.seq_len=32 \
		train.init_from=yarn/step-0000004
	expect 0 "" "$ling" info yarn/step-0000004
}

# The loss of the same weights: each kind its own, the same for any batch; dynamic changes nothing up to the original length.
test_eval() {
	local kind batch one plain seen=" "
	cp -r plain/step-0000004 weights
	plain=$("$ling" eval weights --data text --seq-len 32 --json 2>/dev/null)
	for kind in linear dynamic yarn; do
		jq --argjson s "{\"type\": \"$kind\", \"factor\": 2}" '.rope_scaling = $s' plain/step-0000004/config.json >weights/config.json
		one=
		for batch in 1 7; do
			expect 0 "" "$ling" eval weights --data text --seq-len 64 --json --batch $batch
			[ -n "$one" ] || one=$(cat out.txt)
			[ "$(cat out.txt)" = "$one" ] || problem "$kind: $(cat out.txt) with --batch $batch, $one with 1"
		done
		[[ $seen != *" $(loss out.txt) "* ]] || problem "$kind has the loss of another kind: $seen"
		seen+="$(loss out.txt) "
		expect 0 "" "$ling" eval weights --data text --seq-len 32 --json
		[ $kind = dynamic ] && [ "$(cat out.txt)" != "$plain" ] && problem "dynamic at the original length: $(cat out.txt), $plain without scaling"
		[ $kind != dynamic ] && [ "$(cat out.txt)" = "$plain" ] && problem "$kind changes nothing at the original length"
		expect 1 "--seq-len 65 is more than the model's max_position_embeddings, 64, with rope_scaling" "$ling" eval weights --data text --seq-len 65
	done
}

# What is generated beyond the original length does not depend on caches, batches or the other prompts.
test_generate() {
	local kind length
	printf 'abc\nThe \nA longer beginning of a text\n' >prompts.txt
	for kind in linear dynamic yarn; do
		length=
		[ $kind = dynamic ] && length="--seq-len 60"
		expect 0 "" "$ling" generate $kind/step-0000004 --prompts prompts.txt --max-tokens 30 --json $length
		cp out.txt all.txt
		expect 0 "" "$ling" generate $kind/step-0000004 --prompts prompts.txt --max-tokens 30 --json $length --batch 1 --no-cache
		[ "$(jq -S -c 'del(.seconds)' out.txt)" = "$(jq -S -c 'del(.seconds)' all.txt)" ] || problem "$kind: $(diff out.txt all.txt | head -n 5)"
		expect 0 "" "$ling" generate $kind/step-0000004 --prompt "The " --max-tokens 30 --json $length
		[ "$(jq -c .text out.txt)" = "$(sed -n 2p all.txt | jq -c .text)" ] || problem "$kind: alone $(cat out.txt), among others $(sed -n 2p all.txt)"
		expect 1 "--seq-len 65 is more than the model's longest sequence, 64" "$ling" generate $kind/step-0000004 --prompt a --seq-len 65
	done
	expect 1 "max_position_embeddings is 32" "$ling" generate dynamic/step-0000004 --prompt "The " --max-tokens 30
	expect 1 "--seq-len is 40" "$ling" generate dynamic/step-0000004 --prompt "The " --max-tokens 40 --seq-len 40
}

# Through a checkpoint and through GGUF, the config keeps the scaling, and the loss its bits.
test_convert() {
	local before
	jq '.rope_scaling = {"type": "yarn", "factor": 2.0, "mscale": 0.5, "mscale_all_dim": 0.25, "truncate": false}' plain/step-0000004/config.json >config.json
	rm -rf weights && cp -r plain/step-0000004 weights && cp config.json weights && rm -f weights/trainer.json weights/optimizer.safetensors
	expect 0 "" "$ling" convert-checkpoint weights as/step-0000000
	expect 0 "" "$ling" convert-checkpoint as/step-0000000 again
	[ "$(jq -c .rope_scaling again/config.json)" = "$(jq -c .rope_scaling config.json)" ] || problem "$(jq -c .rope_scaling again/config.json)"
	expect 1 "truncate false, but llama.cpp always rounds" "$ling" convert-checkpoint weights no.gguf --fold-norm-head --no-tokenizer
	jq '.rope_scaling = {"type": "yarn", "factor": 2.0}' config.json >weights/config.json
	expect 0 "" "$ling" convert-checkpoint weights folded --fold-norm-head
	expect 0 "" "$ling" eval folded --data text --seq-len 64 --json --tokenizer byte
	before=$(cat out.txt)
	expect 0 "" "$ling" convert-checkpoint weights yarn.gguf --fold-norm-head --no-tokenizer
	expect 0 "" "$ling" convert-checkpoint yarn.gguf back --no-tokenizer
	expect 0 "" "$ling" eval back --data text --seq-len 64 --json --tokenizer byte
	[ "$(cat out.txt)" = "$before" ] || problem "through GGUF $(cat out.txt), was $before"
}

check train eval generate convert
finish
