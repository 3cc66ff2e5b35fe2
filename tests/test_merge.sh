#!/bin/bash
# ling merge as its user meets it, built with sanitizers: what it prints and makes, what goes along, and what is refused.
. "$(dirname "$0")/check.sh"

head -c 3000 "$root/LICENSE" >text.txt
tiny model.vocab_size=262 train.steps=12 train.batch=2 checkpoint.every=4 checkpoint.keep=0
"$ling" tokenize --out text text.txt >/dev/null && "$ling" train tiny.yaml >/dev/null || exit 1
a=run/step-0000004 b=run/step-0000008 c=run/step-0000012

# merge OUT WORDS...: it works, and leaves nothing temporary.
merge() {
	expect 0 "" "$ling" merge "${@:2}" --out "$1"
	[ -z "$(find . -name '*.tmp-*' -o -name '*.lock')" ] || problem "left behind: $(find . -name '*.tmp-*' -o -name '*.lock')"
}

# refuse STATUS TEXT WORDS...: an error that holds TEXT, and nothing is made.
refuse() {
	expect "$1" "$2" "$ling" merge "${@:3}" --out refused
	[ ! -e refused ] && ! compgen -G 'refused.*' >/dev/null || problem "made something: $2"
	rm -rf refused
}

loss() { # loss MODEL
	"$ling" eval "$1" --data text --seq-len 16 --json 2>err.txt >out.txt || problem "eval $1: $(cat err.txt)"
	metric loss out.txt
}

# copy CHECKPOINT NAME: a copy in a directory of its own.
copy() {
	rm -rf "$2" && mkdir "$2" && cp -r "$1" "$2"
}

test_output() {
	merge m $a $b $c --decay linear
	[ "$(cat out.txt)" = "$(printf '  0.312500  %s\n  0.500000  %s\n  0.187500  %s\nm: 55 tensors, 6.53e-05 GB' $a $b $c)" ] || problem "found $(cat out.txt)"
	[ ! -s err.txt ] || problem "said: $(cat err.txt)"
	[ ! -e m/trainer.json ] && [ ! -e m/optimizer.safetensors ] || problem "more than the model: $(ls m)"
	jq -e --slurpfile a $a/trainer.json --slurpfile b $b/trainer.json --slurpfile c $c/trainer.json \
		'.checkpoint_merge == {decay: "linear", final: 0, checkpoints: [[$a[0], 0.3125], [$b[0], 0.5], [$c[0], 0.1875]] |
			map({step: .[0].step, tokens: .[0].tokens, weight: .[1], trainer_crc32: .[0].crc32})}' m/config.json >/dev/null ||
		problem "config.json: $(jq .checkpoint_merge m/config.json)"
	merge j run --last 3 --decay linear --json
	json out.txt
	jq -e --arg a $a --arg b $b --arg c $c '[.decay, .final, .tensors, .path, (.checkpoints[] | .step, .weight, .path)] ==
		["linear", 0, 55, "j", 4, 0.3125, $a, 8, 0.5, $b, 12, 0.1875, $c]' out.txt >/dev/null || problem "--json: $(cat out.txt)"
	same m/model.safetensors j/model.safetensors
	merge default $c $a $b
	same default/config.json m/config.json
	same default/model.safetensors m/model.safetensors
	awk -v x="$(loss m)" 'BEGIN { exit !(x > 1 && x < 6) }' || problem "the loss is $(loss m)"
	# all weight on one checkpoint: that checkpoint, and what convert-checkpoint makes of it
	merge one $a $c --weights 0,1
	same one/model.safetensors $c/model.safetensors
	[ "$(jq -c '.checkpoint_merge | [.decay, .final]' one/config.json)" = '[null,null]' ] || problem "config.json: $(cat one/config.json)"
	merge half $b $c --weights 0,3 --dtype bf16
	expect 0 "" "$ling" convert-checkpoint $c half2 --dtype bf16
	same half/model.safetensors half2/model.safetensors
	grep -q '"torch_dtype": "bfloat16"' half/config.json || problem "torch_dtype: $(grep dtype half/config.json)"
}

# The next run does not say of its weights that they were merged; a second merge says what it merged itself.
test_after_it() {
	merge start $b $c
	expect 0 "" "$ling" train tiny.yaml train.init_from=start train.output_dir=after
	[ "$(jq -c '[.checkpoint_merge, .eos_token_id]' after/step-0000012/config.json)" = '[null,null]' ] || problem "$(cat after/step-0000012/config.json)"
	expect 0 "" "$ling" convert-checkpoint start start.gguf --no-tokenizer
	expect 0 "" "$ling" convert-checkpoint start begun/step-0000000 --to checkpoint
	expect 0 "" "$ling" info start
}

# Tokenizer, chat template and other files, from the newest checkpoint; shards in the checkpoints change nothing.
test_files_go_along() {
	local name
	rm -rf m7 r7 && mkdir m7
	cp $c/config.json $c/model.safetensors m7
	expect 0 "" "$ling" train-tokenizer --vocab-size 262 --out m7/tokenizer.json text.txt
	echo '{"eos_token": "<|endoftext|>"}' >m7/tokenizer_config.json
	echo '{{ messages }}' >m7/chat_template.jinja
	expect 0 "" "$ling" tokenize --tokenizer m7 --out own text.txt
	expect 0 "" "$ling" train tiny.yaml train.batch=2 data.tokenizer=none data.train=own train.init_from=m7 train.steps=3 checkpoint.every=1 train.output_dir=r7
	merge m8 r7 --last 3
	for name in tokenizer.json tokenizer_config.json chat_template.jinja; do
		same m7/$name m8/$name
	done
	expect 0 "" "$ling" eval m8 --data own --seq-len 16
	[ ! -s err.txt ] || problem "a note: $(cat err.txt)"
}

test_refusals() {
	refuse 2 "one checkpoint; expected at least two" $a
	refuse 2 "--last: expected one word beside it" run run --last 2
	refuse 2 "--weights 1,2: expected 3 numbers" $a $b $c --weights 1,2
	refuse 2 "--weights 1,2,3,4: expected 3 numbers" $a $b $c --weights 1,2,3,4
	refuse 2 "--weights 1,x: expected 2 numbers" $a $b --weights 1,x
	refuse 2 "--weights 1,inf: expected 2 numbers" $a $b --weights 1,inf
	refuse 2 "their sum is 0; expected above 0" $a $b --weights 1,-1
	refuse 2 "--weights and --decay: expected one of them" $a $b --weights 1,1 --decay mean
	refuse 2 "--final is of a decay" $a $b --decay mean --final 0.1
	refuse 2 "--decay inverse_sqrt: --final is missing or 0" $a $b --decay inverse_sqrt
	refuse 2 "--final 1.5" $a $b --final 1.5
	refuse 2 "--decay sqrt" $a $b --decay sqrt
	expect 2 "--out" "$ling" merge $a $b
	refuse 1 "run/step-0000004/: the same checkpoint as run/step-0000004" $a $b $a/
	copy $b copied
	refuse 1 "copied/step-0000008: the same checkpoint as run/step-0000008" $a $b copied/step-0000008
	refuse 1 "nothere: cannot open" $a nothere
	refuse 1 "run: a run; expected checkpoints of it, such as run/step-0000012, or --last N" $a run
	expect 0 "" "$ling" convert-checkpoint $a hf
	refuse 1 "hf: has no trainer.json, so that it is no checkpoint" hf $b
	refuse 1 "text.txt: has no trainer.json" text.txt $b
	refuse 1 "run: --last 4, but it has 3 checkpoints; checkpoint.keep" run --last 4
	refuse 1 "empty: there is no checkpoint in it; expected the directory of a run" empty --last 2
	expect 1 "hf: is there already" "$ling" merge $a $b --out hf
	expect 1 "run/step-0000004: is there already" "$ling" merge $a $b --out $a
	# one that is being written, and one that is not whole
	rm -rf writing && mkdir writing && cp -r $a writing/.tmp-step-0000016 && cp -r $b writing
	refuse 1 "writing/.tmp-step-0000016: a checkpoint that is still being written" writing/step-0000008 writing/.tmp-step-0000016
	mkdir writing/step-0000016
	refuse 1 "writing/step-0000016: has no trainer.json" writing/step-0000008 writing/step-0000016
	refuse 1 "this newest checkpoint is not whole" writing --last 2
	# damage
	copy $b damaged && printf '\1' | dd of=damaged/step-0000008/model.safetensors bs=1 seek=$(($(wc -c <$b/model.safetensors) - 40)) conv=notrunc 2>/dev/null
	refuse 1 "is damaged" $a damaged/step-0000008
	refuse 1 "is damaged" $c damaged/step-0000008
	copy $b damaged && sed -i 's/"rope_theta": 10000.0/"rope_theta": 20000.0/' damaged/step-0000008/config.json
	refuse 1 "was changed after it was saved" $a damaged/step-0000008
	(ulimit -f 20 && trap '' XFSZ && exec "$ling" merge $a $b --out refused) >out.txt 2>err.txt
	[ $? = 1 ] || problem "exit status $?"
	has err.txt "cannot write"
	rm -rf writing
	[ ! -e refused ] && [ -z "$(find . -name '*.tmp-*' -o -name '*.lock')" ] || problem "a full disk left something behind"
}

# Ling 2.0: the expert bias is merged as the weights are, and stays float32. What MTP layers are trained with is no part of the model.
test_ling2() {
	local run=(train tiny.yaml train.output_dir=v2 model.architecture=BailingMoeV2ForCausalLM model.num_nextn_predict_layers=1) name=model.layers.0.mlp.gate.expert_bias
	expect 0 "" "$ling" "${run[@]}" train.stop_at_step=4
	expect 0 "" "$ling" "${run[@]}" train.steps=8 model.mtp_loss_scaling_factor=0.3
	merge v2-merged v2/step-0000004 v2/step-0000008 --decay mean --dtype bf16
	NAME=$name perl -0777 -e 'my @b = map { open my $f, "<:raw", "$_/model.safetensors" or die; $_ = <$f>; my $n = unpack "Q<";
			/"\Q$ENV{NAME}\E":\{"dtype": *"F32".*?"data_offsets": *\[(\d+), *(\d+)/s or die "$_: no float32 bias";
			[unpack "f<*", substr $_, 8 + $n + $1, $2 - $1] } @ARGV;
		@{$b[0]} == 6 && "@{$b[0]}" ne "@{$b[1]}" or die; abs($b[0][$_] + $b[1][$_] - 2 * $b[2][$_]) < 1e-9 or die "$_: @{$b[0]}; @{$b[1]}; @{$b[2]}" for 0 .. 5' \
		v2/step-0000004 v2/step-0000008 v2-merged 2>err.txt || problem "$(head -c 300 err.txt)"
	awk -v x="$(loss v2-merged)" 'BEGIN { exit !(x > 1 && x < 6) }' || problem "the loss is $(loss v2-merged)"
}

# Other models, runs and tokenizers.
test_others() {
	local other="tiny.yaml train.steps=4"
	expect 0 "" "$ling" train $other train.output_dir=other model.rope_theta=500
	refuse 1 "other/step-0000004: model.rope_theta is 500.0, in run/step-0000008 it is 10000.0; only checkpoints of one and the same model" $b other/step-0000004
	expect 0 "" "$ling" train $other train.output_dir=wider model.moe_intermediate_size=9
	refuse 1 "wider/step-0000004: model.moe_intermediate_size is 9" $b wider/step-0000004 --decay mean
	# another seed is another run: no decay, but a mean
	expect 0 "" "$ling" train $other train.output_dir=seed train.seed=5
	refuse 1 "of another run than seed/step-0000004 (by seed, steps and tokens); a decay goes along the steps of one run: expected --decay mean or --weights" $b seed/step-0000004
	merge seeds $b seed/step-0000004 --decay mean
	has err.txt "note: run/step-0000008 is of another run than seed/step-0000004"
	merge seeds2 seed/step-0000004 $a --weights 1,1
	merge seeds3 $a seed/step-0000004 --decay mean
	same seeds2/model.safetensors seeds3/model.safetensors
	# an archived checkpoint may be of the same run
	copy $a archive
	merge archived archive/step-0000004 $b
	has err.txt "note: archive/step-0000004 and run/step-0000008 are in two directories"
	merge unarchived $a $b
	same archived/model.safetensors unarchived/model.safetensors
	# tokenizers
	expect 0 "" "$ling" train-tokenizer --vocab-size 262 --out t/tokenizer.json text.txt
	expect 0 "" "$ling" tokenize --tokenizer t --out own text.txt
	expect 0 "" "$ling" train $other train.output_dir=ids data.tokenizer=t data.train=own
	refuse 1 "run/step-0000008: its tokenizer has the hash" ids/step-0000004 $b
}

# Where the rate was not constant, a note says so.
test_rates() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=wsd 'schedule.decay={steps: 6, shape: linear}' schedule.warmup_steps=5
	merge wsd1 wsd --last 3
	has err.txt "note: wsd/step-0000004: the learning rate still rose, until step 5" \
		"note: wsd/step-0000012: the learning rate falls already, from step 6 on; the weights are those for a constant one"
	merge wsd2 wsd --last 3 --decay mean
	[ ! -s err.txt ] || problem "said: $(cat err.txt)"
}

check output after_it files_go_along refusals ling2 others rates
finish
