#!/bin/bash
# `ling plan`: the model that a law makes best in a time on this machine; its config trains as it says; what is refused.
. "$(dirname "$0")/check.sh"

# A law: L = 2 + 40 / N^0.3 + 60 / D^0.3, from a table.
table() {
	printf 'run\tactive_non_embedding\ttokens\tflops\tloss\tlearning_rate\tbatch_tokens\n'
	local n t
	for n in 1000 4000 16000 64000; do
		for t in 1 4 16; do
			awk -v n=$n -v t=$t 'BEGIN { printf "n%d-t%d\t%d\t%d\t%g\t%.6f\t0.003\t%d\n", n, t, n, t * n, 6 * n * n * t, 2 + 40 / n ^ 0.3 + 60 / (n * t) ^ 0.3, 32 }'
		done
	done
}
table >table.tsv
"$root/ling" fit table.tsv --json --size active_non_embedding --draws 100 >fit.json 2>/dev/null || exit 1
for i in {1..60}; do printf 'line %d of a text that a small model is to learn\n' "$i"; done >text.txt
"$ling" tokenize --out text text.txt >/dev/null 2>&1 || exit 1
tiny data.valid=text train.batch=2 schedule.warmup_steps=2
plan() { "$root/ling" plan --config tiny.yaml --fit fit.json --hours 0.001 "$@"; }

test_best() {
	expect 0 "" plan --json --tokens 1e12
	json out.txt
	# the best is the one of the lowest loss, which is the law's; the tokens are what the time allows
	jq -e '(.candidates | min_by(.loss)) == .best' out.txt >/dev/null || problem "not the best: $(cat out.txt)"
	jq -e '.candidates[] | (.tokens / (.tokens_per_second * 3.6 * 0.9) - 1) | fabs < 1e-3' out.txt | grep -q false && problem "tokens: $(cat out.txt)"
	jq -e '.candidates | length > 4 and .[-1].loss > min_by(.loss).loss' out.txt >/dev/null || problem "not enough: $(cat out.txt)"
	jq -e '.interval.low <= .best.loss and .best.loss <= .interval.high' out.txt >/dev/null || problem "interval: $(cat out.txt)"
	# no more than so many readings of the text
	expect 0 "" plan --json --tokens 1000 --epochs 2
	jq -e 'all(.candidates[]; .tokens <= 2000) and .best.epochs == 2' out.txt >/dev/null || problem "epochs: $(cat out.txt)"
	# the text of the config is the default, and bytes are turned into its tokens
	expect 0 "" plan --json
	[ "$(jq .text_tokens out.txt)" = "$(jq .tokens text.json)" ] || problem "text: $(jq .text_tokens out.txt)"
	expect 0 "" plan --json --text 1e6
	jq -e --argjson t "$(jq '1e6 * .tokens / .bytes' text.json)" '(.text_tokens - $t) | fabs <= 1' out.txt >/dev/null || problem "text: $(jq .text_tokens out.txt)"
}

# The config that it writes is whole, and trains so many tokens; what the base config has stays.
test_config() {
	expect 0 "" plan --tokens 3000 --out made.yaml optimizer.beta2=0.97 'data.valid={a: text, b: text}'
	has out.txt "expected loss" "made.yaml: a config that is ready to train"
	has made.yaml "# Made by" "  beta2: 0.97"
	expect 0 "" "$ling" train made.yaml train.output_dir=made train.micro_batch=2
	[ "$(tail -n 1 made/metrics.jsonl | jq .tokens)" -ge "$(sed -n 's/^  tokens: //p' made.yaml)" ] || problem "tokens: $(tail -n 1 made/metrics.jsonl)"
	jq -e '.config.schedule.warmup_steps >= 1 and .config.model.num_experts == 6 and .config.optimizer.beta2 == 0.97 and (.config.data.valid | keys == ["a", "b"])' \
		made/step-*/trainer.json >/dev/null || problem "config: $(cat made.yaml)"
	expect 1 "made.yaml: cannot write: File exists" plan --tokens 3000 --out made.yaml
	# what is printed is a config too
	expect 0 "" plan --tokens 3000
	sed -n '/^# Made/,$p' out.txt >printed.yaml
	expect 0 "" "$ling" info printed.yaml
}

test_refused() {
	expect 2 "--hours" "$ling" plan
	expect 2 "--hours 0: expected a number above 0" "$ling" plan --hours 0
	expect 1 "--tokens and --text say the same" plan --tokens 5 --text 5
	expect 1 "trains on 20 tokens, less than one step of 32; expected more time, more text or a smaller train.batch" plan --tokens 5
	expect 1 "in 1e-12 hours and 4 readings" "$ling" plan --config tiny.yaml --fit fit.json --hours 1e-12
	expect 1 "nothere.json" plan --fit nothere.json
	echo '{"runs": []}' >bad.json
	expect 1 "bad.json" plan --fit bad.json
	expect 1 "nothere.yaml" "$ling" plan --hours 1 --config nothere.yaml
	expect 1 "unknown key train.stepz" plan train.stepz=4
	expect 1 "nothere.json" plan data.train=nothere
	expect 1 "expected no mpirun" mpirun -n 2 --oversubscribe "$root/ling" plan --config tiny.yaml --fit fit.json --hours 1
}

check best config refused
finish
