#!/bin/bash
# eval.samples: prompts that each evaluation of a training run continues, into samples.jsonl. Each text is what `ling generate` makes of the
# checkpoint of that step, in one process and on several ranks; and training is what it is without.
. "$(dirname "$0")/check.sh"

head -c 6000 "$root/ling.h" >text.txt
"$ling" tokenize --out text text.txt >/dev/null 2>&1 || exit 1
tiny model.num_experts=8 train.batch=8 schedule.peak_lr=1e-3 data.valid=text eval.max_windows=20 train.steps=6 eval.every=3 checkpoint.every=3 checkpoint.keep=0
printf 'the model\nA file\nweights of\n' >prompts.txt
# the texts of the config, as `ling generate` can be given them with their numbers
texts='eval.samples=["The ", "/*\n *", ""]'
printf '{"prompt": "The "}\n{"prompt": "/*\\n *"}\n{"prompt": ""}\n' >texts.jsonl
samples=("$texts" eval.sample_file=prompts.txt eval.sample_tokens=30 eval.at_start=true)

# generated RUN STEP MODEL [OPTION...]: the samples of a step are what `ling generate` makes of that model.
generated() {
	local run=$1 step=$2 model=$3 file
	shift 3
	for file in texts.jsonl prompts.txt; do
		"$root/ling" generate "$model" --prompts $file --max-tokens 30 --json "$@" 2>err.txt || problem "generate: $(cat err.txt)"
	done | jq -c '[.text, .tokens]' >expected.txt
	jq -c "select(.step == $step) | [.text, .tokens]" "$run/samples.jsonl" >found.txt
	[ "$(lines found.txt)" = 6 ] || problem "$run, step $step: $(cat found.txt)"
	same expected.txt found.txt
}

test_texts() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=start train.steps=3 eval.every=off
	expect 0 "" "$ling" train tiny.yaml train.output_dir=one train.init_from=start/step-0000003 "${samples[@]}"
	[ "$(grep -c '^samples: one/samples.jsonl$' out.txt)" = 1 ] || problem "the samples are not named once: $(cat out.txt)"
	json one/samples.jsonl
	jq -es 'map(.step) == ([0, 3, 6] | map([., ., ., ., ., .]) | add) and ([.[].prompt] | unique | length == 6) and
		.[1].prompt == "/*\n *" and .[2].prompt == "" and .[3].prompt == "the model" and (map(.text) | unique | length > 6) and all(keys == ["prompt", "step", "text", "tokens"])' \
		one/samples.jsonl >/dev/null || problem "$(cat one/samples.jsonl)"
	generated one 0 start/step-0000003
	generated one 3 one/step-0000003
	generated one 6 one/step-0000006
	# drawn, with another seed in each step, which the lines name
	expect 0 "" "$ling" train tiny.yaml train.output_dir=drawn "${samples[@]}" eval.sample_temperature=0.8
	jq -es '[.[].seed] | length == 18 and (unique | length == 3)' drawn/samples.jsonl >/dev/null || problem "seeds: $(cat drawn/samples.jsonl)"
	for step in 3 6; do
		generated drawn $step drawn/step-000000$step --temperature 0.8 --seed "$(jq "select(.step == $step) | .seed" drawn/samples.jsonl | head -n 1)"
	done
}

# Weights, moments and metrics are those of a run without; samples alone, without data.valid, are evaluations too.
test_training_is_the_same() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=with train.recompute=layer "${samples[@]}"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=without train.recompute=layer
	same with/step-0000006/model.safetensors without/step-0000006/model.safetensors
	same with/step-0000006/optimizer.safetensors without/step-0000006/optimizer.safetensors
	cmp -s <(steady with/metrics.jsonl) <(steady without/metrics.jsonl) || problem "other metrics: $(steady with/metrics.jsonl)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=alone data.valid=off train.recompute=layer "${samples[@]}"
	same with/samples.jsonl alone/samples.jsonl
	same with/step-0000006/model.safetensors alone/step-0000006/model.safetensors
	! grep -q "valid_loss\|\"validation\"" alone/metrics.jsonl alone/events.jsonl || problem "validated: $(cat alone/metrics.jsonl)"
}

# Whatever interrupts a run, samples.jsonl is in the end that of a run that was not interrupted, and so is all else.
test_resume() {
	local all=("${samples[@]}" 'data.valid={a: text, b: [text]}' eval.sample_temperature=0.5 log.experts=2) pid
	expect 0 "" "$ling" train tiny.yaml train.output_dir=whole "${all[@]}"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=parts "${all[@]}" train.stop_at_step=1
	expect 0 "" "$ling" train tiny.yaml train.output_dir=parts "${all[@]}" train.stop_at_step=4
	echo '{"step": 5, "prompt": "of a step that is not saved", "text": "", "tokens": 0}' >>parts/samples.jsonl
	printf '{"step": 6, "prompt": "to' >>parts/samples.jsonl # torn
	expect 0 "" "$ling" train tiny.yaml train.output_dir=parts "${all[@]}" train.stop_at_step=5
	same <(jq -c 'select(.step < 5)' whole/samples.jsonl) <(jq -c . parts/samples.jsonl)
	expect 0 "" "$ling" train tiny.yaml train.output_dir=parts "${all[@]}"
	# killed, and begun again before there is a checkpoint
	expect 137 "" "$ling" train tiny.yaml train.output_dir=killed "${all[@]}" --inject kill@step=2
	[ "$(lines killed/samples.jsonl)" = 6 ] || problem "samples of the start: $(cat killed/samples.jsonl)"
	expect 137 "" "$ling" train tiny.yaml train.output_dir=killed "${all[@]}" --inject kill@step=5
	expect 0 "" "$ling" train tiny.yaml train.output_dir=killed "${all[@]}"
	local run
	for run in parts killed; do
		same whole/samples.jsonl $run/samples.jsonl
		cmp -s <(steady whole/metrics.jsonl) <(steady $run/metrics.jsonl) || problem "$run: other metrics: $(cat $run/metrics.jsonl)"
		same whole/step-0000006/model.safetensors $run/step-0000006/model.safetensors
		same whole/step-0000006/optimizer.safetensors $run/step-0000006/optimizer.safetensors
	done
}

# A stop ends the samples too, and the validation before them counts as stopped: the run that goes on makes up for both.
test_stopped() {
	local slow=('eval.samples=The ' data.valid=text eval.sample_tokens=3000 train.steps=4 eval.every=3 checkpoint.every=off) at pid
	expect 0 "" "$root/ling" train tiny.yaml train.output_dir=unhurried "${slow[@]}" eval.at_start=true
	for at in 0 3; do
		"$root/ling" train tiny.yaml train.output_dir=hurried "${slow[@]}" eval.at_start=true >first.txt 2>first-err.txt &
		pid=$!
		if [ $at = 3 ]; then wait_for_lines hurried/metrics.jsonl 2; else wait_for_lines first.txt 3; fi
		sleep 0.1
		kill -TERM $pid
		wait $pid
		[ $? = 3 ] || problem "step $at: $(cat first.txt first-err.txt)"
		[ "$(lines hurried/metrics.jsonl)" = $at ] || problem "step $at: $(lines hurried/metrics.jsonl) lines: $(cat first.txt)"
	done
	jq -es '.[-1] | .validation_stopped and (has("valid_loss") | not)' hurried/metrics.jsonl >/dev/null || problem "$(tail -n 1 hurried/metrics.jsonl)"
	expect 0 "" "$root/ling" train tiny.yaml train.output_dir=hurried "${slow[@]}" eval.at_start=true
	has out.txt "validating step 3, where the run was stopped"
	same unhurried/samples.jsonl hurried/samples.jsonl
	cmp -s <(steady unhurried/metrics.jsonl) <(steady hurried/metrics.jsonl) || problem "other metrics: $(cat hurried/metrics.jsonl)"
	same unhurried/step-0000004/model.safetensors hurried/step-0000004/model.safetensors
	# samples alone
	slow+=(data.valid=off)
	"$root/ling" train tiny.yaml train.output_dir=hurried2 "${slow[@]}" >first.txt 2>first-err.txt &
	pid=$!
	wait_for_lines hurried2/metrics.jsonl 2
	sleep 0.1
	kill -TERM $pid
	wait $pid
	[ $? = 3 ] || problem "samples alone: $(cat first.txt first-err.txt)"
	grep -q '"step": 3, .*"validation_stopped": true' hurried2/metrics.jsonl || problem "samples alone: $(cat hurried2/metrics.jsonl)"
	expect 0 "" "$root/ling" train tiny.yaml train.output_dir=hurried2 "${slow[@]}"
	same <(jq -c 'select(.step > 0)' unhurried/samples.jsonl) <(jq -c . hurried2/samples.jsonl)
	! grep -q valid hurried2/metrics.jsonl || problem "samples alone: $(cat hurried2/metrics.jsonl)"
}

# 4 ranks, tensor 2, expert 4, whose vocabularies and heads are shards. And the tokens of each expert are those of the whole batch.
test_ranks() {
	local ling=$root/ling temperature
	export OMP_NUM_THREADS=1
	for temperature in 0 0.8; do
		ranks 4 "$ling" train tiny.yaml train.output_dir=four$temperature parallel.tensor=2 parallel.expert=4 "${samples[@]}" \
			eval.sample_temperature=$temperature >out.txt 2>err.txt || problem "$(head -c 600 err.txt)"
		generated four$temperature 3 four$temperature/step-0000003 --temperature $temperature $(jq -r 'select(.step == 3 and .seed) | "--seed \(.seed)"' four$temperature/samples.jsonl | head -n 1)
	done
	generated four0 6 four0/step-0000006
	ranks 4 "$ling" train tiny.yaml train.output_dir=four-without parallel.tensor=2 parallel.expert=4 >out.txt 2>err.txt || problem "$(head -c 600 err.txt)"
	# in the trace: the chosen tokens are agreed on; attention to the cache has its work
	expect 0 "" "$ling" trace four-without --part evaluation --json
	cp out.txt without.txt
	expect 0 "" "$ling" trace four0 --part evaluation --json
	jq -e --slurpfile o without.txt '([.collectives[].collective] | contains(["agreement"])) and
		([.operations[] | select(.operation == "attention / core") | .rate * .own_seconds] | add) > 1.1 *
		([$o[0].operations[] | select(.operation == "attention / core") | .rate * .own_seconds] | add)' out.txt >/dev/null || problem "work: $(cat out.txt)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=alone1 "${samples[@]}"
	same <(jq -c 'select(.step == 0)' alone1/samples.jsonl) <(jq -c 'select(.step == 0)' four0/samples.jsonl)
	same <(head -n 1 alone1/metrics.jsonl | jq -c .expert_counts) <(head -n 1 four0/metrics.jsonl | jq -c .expert_counts)
	same four0/step-0000006/model-00001-of-00004.safetensors four-without/step-0000006/model-00001-of-00004.safetensors
	cmp -s <(steady four0/metrics.jsonl) <(steady four-without/metrics.jsonl) || problem "other metrics on 4 ranks"
}

# A continuation ends where the model's own files say so.
test_end_ids() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=ended train.steps=1 eval.every=off
	local id first=ended/step-0000001
	"$root/ling" generate $first --prompts prompts.txt --max-tokens 30 --json >plain.txt 2>err.txt
	id=$(jq -s '.[0].text | explode | map(select(. < 128))[2]' plain.txt)
	echo "{\"eos_token_id\": [$id]}" >$first/generation_config.json
	expect 0 "" "$ling" train tiny.yaml train.output_dir=ends train.init_from=$first "${samples[@]}"
	jq -es 'map(select(.step == 0)) | any(.tokens < 30)' ends/samples.jsonl >/dev/null || problem "no end: $(cat ends/samples.jsonl)"
	generated ends 0 $first
	generated ends 6 ends/step-0000006
	# conversations: the prompt is shown with its tags
	printf '{"messages": [{"role": "user", "content": "Who?"}]}\n{"prompt": "A"}\n' >talk.jsonl
	expect 0 "" "$ling" train tiny.yaml train.output_dir=talk train.init_from=$first eval.sample_file=talk.jsonl eval.sample_tokens=20
	"$root/ling" generate talk/step-0000003 --prompts talk.jsonl --max-tokens 20 --json 2>err.txt | jq -c '[.text, .tokens]' >expected.txt
	same expected.txt <(jq -c 'select(.step == 3) | [.text, .tokens]' talk/samples.jsonl)
	[ "$(jq -c 'select(.step == 3) | .prompt' talk/samples.jsonl | xargs)" = "<role>HUMAN</role>Who?<role>ASSISTANT</role> A" ] || problem "$(cat talk/samples.jsonl)"
}

test_refused() {
	expect 1 "eval.samples: the run has no tokenizer for its prompts" "$ling" train tiny.yaml train.output_dir=no data.tokenizer=none "$texts"
	expect 1 "eval.samples: prompt 2 has 5 tokens, and eval.sample_tokens is 64; together expected at most model.max_position_embeddings, which is 68" \
		"$ling" train tiny.yaml train.output_dir=no model.max_position_embeddings=68 "$texts"
	expect 1 "missing.txt: cannot open" "$ling" train tiny.yaml train.output_dir=no eval.sample_file=missing.txt
	expect 1 "eval.samples: keys and values of 2999999997 tokens take" \
		"$ling" train tiny.yaml train.output_dir=no model.max_position_embeddings=1000000000 eval.sample_tokens=999999990 'eval.samples=[a, b, "012345678"]'
	[ ! -e no ] || problem "a run that was refused left $(ls -A no)"
	expect 2 "eval.samples: found more than 32 items" "$ling" train tiny.yaml train.output_dir=no "eval.samples=[$(seq -s , 33)]"
	# what is wrong with samples.jsonl is found before the run goes on
	expect 0 "" "$ling" train tiny.yaml train.output_dir=bad "${samples[@]}" train.stop_at_step=4
	echo nonsense >>bad/samples.jsonl
	expect 1 "samples.jsonl: last line (mend or remove it)" "$ling" train tiny.yaml train.output_dir=bad "${samples[@]}"
}

check texts training_is_the_same resume stopped ranks end_ids refused
finish
