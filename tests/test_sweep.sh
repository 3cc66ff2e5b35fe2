#!/bin/bash
# ling sweep: the runs of a grid, kills, stops, failures, grids that change, hopeless runs. Grids are read by the build with sanitizers; what
# trains for longer, and the runs of a killed sweep, are of the release build.
. "$(dirname "$0")/check.sh"
export OMP_NUM_THREADS=1
release=$root/ling

head -c 2000 "$root/LICENSE" >text.txt
"$release" tokenize --out text text.txt >/dev/null 2>&1 || exit 1
tiny data.valid=text eval.max_windows=4 checkpoint.every=4 log.every=50

sweeper=0
trap '[ $sweeper = 0 ] || kill -9 $sweeper 2>/dev/null' EXIT # then its runs save and end

# grid NAME: writes NAME.yaml from standard input, with the base config tiny.yaml and output_dir NAME.
grid() {
	{ printf 'config: tiny.yaml\noutput_dir: %s\n' "$1"; cat; } >"$1.yaml"
}

# begin NAME OPTION...: begins a sweep of the release build in the background, and sets sweeper.
begin() {
	local name=$1
	shift
	"$release" sweep "$name.yaml" "$@" >out.txt 2>sweep.txt &
	sweeper=$!
}

# ended STATUS: waits for its end.
ended() {
	local status
	wait $sweeper
	status=$?
	sweeper=0
	[ $status = "$1" ] || problem "exit status $status, expected $1: $(tail -n 5 sweep.txt)"
}

# column TABLE NAME: the values of a column, a line each.
column() { awk -F '\t' -v name="$2" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) n = i; next } { print $n }' "$1"; }

# starts DIR...: how often `ling train` was started there.
starts() { cat "${@/%//output.log}" 2>/dev/null | grep -c '^\$ ling train'; }

# parameters KEY=VALUE...: of tests/tiny.yaml with these keys.
parameters() { "$release" info tiny.yaml "$@" --json | jq .parameters; }

test_grid() {
	grid made <<-END
		sizes:
		  hidden_size: [16, 32]
		  tokens_per_parameter: [1, 2.5]
		grid:
		  schedule.peak_lr: {from: 1e-3, to: 4e-3, steps: 3, scale: log}
		  train.batch: [{from: 2, to: 6, steps: 3}]
		  schedule.drops: off
		zip: [schedule.peak_lr, train.batch]
		seeds: [7, 18446744073709551615]
	END
	expect 0 "" "$ling" sweep made.yaml --dry-run --json
	json out.txt
	[ ! -e made ] || problem "the dry run has made a directory"
	[ "$(jq '.runs | length' out.txt)" = 24 ] || problem "$(jq '.runs | length' out.txt) runs"
	[ "$(jq -r '.runs[] | select(.run == "h32-l4-t2.5-peak_lr=0.002-batch=4-s7") | .keys | .["schedule.peak_lr"], .["train.batch"]' out.txt |
		tr '\n' ' ')" = "0.002 4 " ] || problem "keys: $(jq -c '.runs[].run' out.txt)"
	[ "$(jq '[.runs[].flops] == ([.runs[].flops] | sort)' out.txt)" = true ] || problem "not the least FLOPs first"
	local n
	n=$(jq '.runs[] | select(.run == "h32-l4-t2.5-peak_lr=0.002-batch=4-s7") | .parameters' out.txt)
	[ "$n" = "$(parameters model.hidden_size=32 model.num_hidden_layers=4 model.num_attention_heads=8 model.num_key_value_heads=4 \
		model.moe_intermediate_size=16)" ] || problem "h32 has $n parameters"
	# the length: as many tokens as 2.5 times the active parameters without embedding and head, in whole steps of 4 x 16
	[ "$(jq '.runs[] | select(.run == "h32-l4-t2.5-peak_lr=0.002-batch=4-s7") | .tokens == (((2.5 * .active_non_embedding) / 64 | ceil) * 64)
		and .seconds_left > 0 and .flops > 0' out.txt)" = true ] || problem "length: $(jq -c '.runs[]' out.txt | head -n 1)"
	expect 0 "" "$ling" sweep made.yaml --dry-run
	has out.txt "h16-l2-t1-peak_lr=0.001-batch=2-s7 " "waiting" "* active parameters without embedding and head" " left, without validations, at "
	# values that go together may be there again: two widths of one depth, one learning rate of both
	grid again <<-END
		sizes: {hidden_size: [16, 32, 32], num_hidden_layers: [2, 2, 3]}
		grid: {schedule.peak_lr: [1e-3, 1e-3, 2e-3]}
		zip: [sizes, schedule.peak_lr]
	END
	expect 0 "" "$ling" sweep again.yaml --dry-run --json
	[ "$(jq -r '.runs[].run' out.txt | tr '\n' ' ')" = "h16-l2-peak_lr=1e-3 h32-l2-peak_lr=1e-3 h32-l3-peak_lr=2e-3 " ] ||
		problem "values again: $(jq -c '.runs[].run' out.txt)"
	# layers and an aspect; heads that stay divisors; a dense model; the schedule keeps its shares
	tiny data.valid=text model.first_k_dense_replace=2 model.intermediate_size=20 schedule.warmup_steps=5 train.batch_warmup='{start: 2, increment: 1, tokens: 400}'
	grid depths <<-END
		sizes: {num_hidden_layers: {from: 1, to: 5, steps: 3}, aspect: 12, tokens_per_parameter: 1}
	END
	expect 0 "" "$ling" sweep depths.yaml --dry-run --json
	[ "$(jq -r '.runs[].run' out.txt | tr '\n' ' ')" = "h16-l1 h40-l3 h64-l5 " ] || problem "runs: $(jq -r '.runs[].run' out.txt)"
	[ "$(jq '.runs[1].parameters' out.txt)" = "$(parameters model.hidden_size=40 model.num_hidden_layers=3 model.num_attention_heads=10 \
		model.num_key_value_heads=5 model.moe_intermediate_size=24 model.intermediate_size=48 model.first_k_dense_replace=3)" ] || problem "h40"
	sed -i 's/from: 1, to: 5, steps: 3/text: 1/; s/{text: 1}/1/' depths.yaml
	expect 0 "" "$ling" sweep depths.yaml
	# the ramp of the batch and the warm-up have the same shares of the run as in the base config
	expect 0 "" "$release" train tiny.yaml train.output_dir=base
	jq -n --slurpfile run depths/run/events.jsonl --slurpfile base base/events.jsonl '[$run, $base] | map(.[0] | [
		.config.train.batch_warmup.tokens / .total_tokens, .config.schedule.warmup_steps / .total_steps]) |
		(.[0][0] / .[1][0] - 1 | fabs) < 0.05 and (.[0][1] - .[1][1] | fabs) < 0.02' >shares.txt
	[ "$(cat shares.txt)" = true ] || problem "the schedule has other shares: $(cat depths/run/events.jsonl)"
	tiny data.valid=text eval.max_windows=4 checkpoint.every=4 log.every=50
}

# refused TEXT <<END: a grid that is refused with that text.
refused() {
	grid bad
	expect 2 "$1" "$ling" sweep bad.yaml
	[ ! -e bad ] || problem "a directory was made for: $1"
}

test_refusals() {
	refused "bad.yaml:3: unknown key gird; did you mean grid?" <<<"gird: {}"
	refused "bad.yaml:3: unknown key schedule.peak_ir; did you mean schedule.peak_lr?" <<<"grid: {schedule.peak_ir: [1]}"
	refused "bad.yaml:4: schedule.peak_lr: found fast; expected a number" <<<$'grid:\n  schedule.peak_lr: [fast]'
	refused "bad.yaml:4: train.batch: found 0 (out of range); expected a whole number" <<<$'grid:\n  train.batch: [1, 0]'
	refused "bad.yaml:3: grid.steps: found 1" <<<"grid: {train.batch: {from: 1, to: 2, steps: 1}}"
	refused "bad.yaml:3: train.batch: found 2 twice" <<<"grid: {train.batch: {from: 1, to: 3, steps: 5}}"
	refused "bad.yaml:3: schedule.peak_lr: found a range from 0 to 1 on a log scale" <<<"grid: {schedule.peak_lr: {from: 0, to: 1, steps: 3, scale: log}}"
	refused "bad.yaml:3: data.packing: found a range" <<<"grid: {data.packing: {from: 0, to: 1, steps: 3}}"
	refused "bad.yaml:3: grid: the key steps is missing here" <<<"grid: {train.batch: {from: 1, to: 2}}"
	refused "bad.yaml:3: grid: found values without a key" <<<"grid: [1, 2]"
	refused "bad.yaml:3: grid: found train.seed; expected the list \`seeds\`" <<<"grid: {train.seed: [1]}"
	refused "bad.yaml:3: grid: found train.output_dir, which the sweep sets" <<<"grid: {train.output_dir: [a]}"
	refused "bad.yaml:4: grid: found model.hidden_size, which \`sizes\` sets" <<<$'sizes: {hidden_size: 16}\ngrid: {model.hidden_size: [8]}'
	refused "bad.yaml:4: grid: found train.steps, which sizes.tokens_per_parameter sets" <<<$'sizes: {tokens_per_parameter: 1}\ngrid: {train.steps: [8]}'
	refused "bad.yaml:3: sizes.tokens_per_parameter: found 0 (out of range)" <<<"sizes: {tokens_per_parameter: 0}"
	refused "bad.yaml:3: sizes: found 2 values of hidden_size and 1 of num_hidden_layers" <<<"sizes: {hidden_size: [16, 32], num_hidden_layers: [1]}"
	refused "bad.yaml:3: sizes.aspect: found without hidden_size" <<<"sizes: {aspect: 3}"
	refused "bad.yaml:4: zip: found 2 values of train.batch and 1 of train.steps" <<<$'grid: {train.batch: [1, 2], train.steps: [3]}\nzip: [train.batch, train.steps]'
	refused "bad.yaml:4: zip: found sizes; expected a key that has values" <<<$'grid: {train.batch: [1, 2]}\nzip: [train.batch, sizes]'
	refused "bad.yaml:3: stop_hopeless: the key margin is missing here" <<<"stop_hopeless: {after: 0.5}"
	refused "bad.yaml:4: train.batch: its values number 1 and 3 are the same, and so are" <<<$'sizes: {hidden_size: [16, 32, 48]}\ngrid: {train.batch: [1, 2, 1.0], schedule.peak_lr: [1e-3, 1e-3, 0.001]}\nzip: [train.batch, schedule.peak_lr]'
	refused "bad.yaml:3: sizes: found hidden_size 16 with 2 layers twice" <<<"sizes: {hidden_size: [16, 32, 16], num_hidden_layers: [2, 2, 2]}"
	refused "bad.yaml:3: train.batch: found 3.0 twice" <<<"grid: {train.batch: [3, 3.0]}"
	refused "bad.yaml:3: schedule.drops: found a?b (a control character)" <<<'grid: {schedule.drops: ["a\tb"]}'
	refused "bad.yaml: two runs have the name train=a_b" <<<"grid: {data.train: [a/b, a_b]}"
	refused "bad.yaml: run num_experts=1: ./tiny.yaml:10: model.num_experts_per_tok: found 2" <<<"grid: {model.num_experts: [1, 4]}"
	expect 2 "nothing.yaml: " "$ling" sweep nothing.yaml
	printf 'config: other.yaml\noutput_dir: bad\n' >bad.yaml
	expect 2 "bad.yaml:1: config: there is no file other.yaml in . or here" "$ling" sweep bad.yaml
	sed '/valid:/d' tiny.yaml >unvalidated.yaml
	printf 'config: unvalidated.yaml\noutput_dir: bad\n' >bad.yaml
	expect 2 "unvalidated.yaml: there is no data.valid" "$ling" sweep bad.yaml
}

test_results() {
	grid whole <<-END
		grid:
		  schedule.peak_lr: [1e-3, 1e-2]
		  model.num_experts_per_tok: [1, 2]
	END
	expect 0 "" "$ling" sweep whole.yaml --jobs 2 --every 0.2
	has err.txt "4 runs, of which 0 are finished; 2 at once, with 1 thread each" "run 1 of 4 begins: 20 steps" "done, validation loss" \
		"100% of the sweep"
	has out.txt "best: peak_lr=1e-2-num_experts_per_tok="
	[ "$(column whole/table.tsv model.num_experts_per_tok | tr '\n' ' ')" = "1 1 2 2 " ] || problem "column: $(cat whole/table.tsv)"
	[ "$(column whole/table.tsv learning_rate | tr '\n' ' ')" = "0.001 0.01 0.001 0.01 " ] || problem "rates: $(cat whole/table.tsv)"
	local run loss
	while read -r run loss; do
		[ "$loss" = "$(tail -n 1 "whole/$run/metrics.jsonl" | jq .valid_loss)" ] || problem "loss of $run: $loss"
	done < <(paste <(column whole/table.tsv run) <(column whole/table.tsv loss))
	expect 1 "found 1 of 1 points" "$release" fit whole/table.tsv # it reads the table, whose runs have one compute
	cp whole/table.tsv before.tsv
	expect 0 "" "$ling" sweep whole.yaml --json
	json out.txt
	same before.tsv whole/table.tsv
	[ "$(starts whole/*/)" = 4 ] || problem "finished runs were started again: $(starts whole/*/)"
	[ "$(jq -c '[.states.finished, .states.failed, ([.runs[] | select(.best_of_its_size)] | length)]' out.txt)" = "[4,0,1]" ] || problem "$(cat out.txt)"
	has err.txt "4 runs, of which 4 are finished"
}

# A run of the grid that is there already stays, whatever else changes; a name that has another config is refused.
test_changed_grid() {
	grid changed <<<"grid: {schedule.peak_lr: [1e-2]}"
	expect 0 "" "$ling" sweep changed.yaml
	has changed/table.tsv "run	"
	[ -d changed/run ] || problem "no directory run: $(ls changed)"
	grid changed <<<"grid: {schedule.peak_lr: [1e-2, 2e-2]}"
	expect 0 "" "$ling" sweep changed.yaml
	[ "$(column changed/table.tsv run | sort | tr '\n' ' ')" = "peak_lr=2e-2 run " ] || problem "runs: $(cat changed/table.tsv)"
	[ "$(starts changed/*/)" = 2 ] || problem "$(starts changed/*/) starts"
	grid changed <<<"grid: {schedule.peak_lr: [3e-2]}"
	expect 1 "changed/run: has a run with another config: schedule.peak_lr is 0.01 there and 0.03 in the grid" "$ling" sweep changed.yaml
	grid changed <<<$'grid: {schedule.peak_lr: [2e-2], checkpoint.keep: 1, optimizer.beta2: [0.95, 0.9]}'
	expect 0 "" "$ling" sweep changed.yaml
	[ "$(starts changed/*/)" = 3 ] || problem "$(starts changed/*/) starts: $(cat err.txt)"
}

# fails TEXT COMMAND...: a command that fails with that text as its last line, behind those of its progress.
fails() {
	local text=$1
	shift
	expect 1 "" "$@"
	[[ "$(tail -n 1 err.txt)" == "ling: $text"* ]] || problem "no '$text' in: $(tail -n 3 err.txt)"
}

test_failing_run() {
	grid failing <<<"grid: {data.train: [missing, text], schedule.peak_lr: [1e-2, 2e-2]}"
	fails "2 of 4 runs failed, the first of them train=missing-peak_lr=1e-2: " "$ling" sweep failing.yaml
	has err.txt "train=missing-peak_lr=2e-2: failed: " "missing"
	has out.txt "failed: train=missing-peak_lr=1e-2: " "best: train=text-peak_lr="
	[ "$(column failing/table.tsv loss | grep -c '^-$')" = 2 ] || problem "table: $(cat failing/table.tsv)"
	rm -rf failing
	fails "1 of 4 runs failed" "$ling" sweep failing.yaml --fail-fast
	[ "$(starts failing/*/)" = 1 ] || problem "--fail-fast: $(starts failing/*/) starts"
	# once its file is there, the same command trains it
	cp text.bin missing.bin && cp text.idx missing.idx
	expect 0 "" "$ling" sweep failing.yaml
	[ "$(column failing/table.tsv loss | grep -c '^[0-9]')" = 4 ] || problem "table: $(cat failing/table.tsv)"
}

# A run that is killed has failed; the sweep goes on, and the same command continues it.
test_killed_run() {
	grid killed <<<"grid: {schedule.peak_lr: [1e-2, 2e-2], train.steps: 200}"
	begin killed
	wait_for_lines killed/peak_lr=1e-2/metrics.jsonl 10
	kill -9 "$(pgrep -P $sweeper)"
	ended 1
	has sweep.txt "peak_lr=1e-2: failed: ended by signal 9 (Killed)" "peak_lr=2e-2: done"
	begin killed
	ended 0
	has sweep.txt "peak_lr=1e-2: run 1 of 2 begins: 200 steps" ", from step "
}

# Stops at random moments, of all kinds; the end is that of a sweep that was left alone, to the bit.
test_kills() {
	local i tries=0
	grid alone <<<"grid: {schedule.peak_lr: [1e-2, 2e-2, 3e-2], train.steps: 120}"
	sed 's/output_dir: alone/output_dir: kills/' alone.yaml >kills.yaml
	begin alone --jobs 2
	ended 0
	for ((i = 0; i < 5; i++)); do
		begin kills --jobs $((1 + i % 2))
		sleep "0.$((RANDOM % 6 + 3))"
		kill -9 $sweeper 2>/dev/null
		wait $sweeper 2>/dev/null
	done
	sweeper=0
	begin kills
	ended 0
	same alone/table.tsv kills/table.tsv
	for i in alone/*/step-0000120/model.safetensors; do
		same "$i" "kills/${i#alone/}"
		tries=$((tries + 1))
	done
	[ $tries = 3 ] || problem "$tries runs"
}

# A run that another process trains is waited for; two sweeps in one directory are refused; SIGTERM lets the runs save.
test_signals() {
	local holder tries=0
	grid signals <<<"grid: {schedule.peak_lr: [1e-2, 2e-2], train.steps: 300}"
	"$release" train tiny.yaml schedule.peak_lr=1e-2 train.steps=300 train.output_dir=signals/peak_lr=1e-2 >/dev/null 2>&1 &
	holder=$!
	wait_for_lines signals/peak_lr=1e-2/metrics.jsonl 10
	kill -STOP $holder
	begin signals --jobs 2
	wait_for_lines signals/peak_lr=2e-2/metrics.jsonl 10
	expect 1 "another ling sweep is at work in signals: " "$ling" sweep signals.yaml
	kill -TERM $sweeper
	ended 3
	has sweep.txt "SIGTERM: the runs save and stop" "peak_lr=2e-2: stopped at step "
	[ "$(column signals/table.tsv loss | tr '\n' ' ')" = "- - " ] || problem "table: $(cat signals/table.tsv)"
	# of this directory: another checkout may be tested at the same time
	[ "$(for i in $(pgrep -f "train.output_dir=signals/"); do [ "/proc/$i/cwd" -ef . ] && echo "$i"; done)" = $holder ] || problem "a run is left"
	begin signals
	while ! grep -q "another ling train is writing in signals/peak_lr=1e-2; waiting for its end" sweep.txt && [ $tries -lt 600 ]; do
		sleep 0.1
		tries=$((tries + 1))
	done
	[ "$(starts signals/*/)" = 2 ] || problem "the run that is held was started: $(cat sweep.txt)"
	kill -CONT $holder
	kill -USR1 $holder
	ended 0
	wait $holder
	[ "$(column signals/table.tsv loss | grep -c '^[0-9]')" = 2 ] || problem "table: $(cat signals/table.tsv)"
}

# The base config is read once: a run that would now be another one fails.
test_changed_base() {
	cp tiny.yaml base.yaml
	printf 'config: base.yaml\noutput_dir: moved\ngrid: {schedule.peak_lr: [1e-2, 2e-2], train.steps: 300}\n' >moved.yaml
	begin moved
	wait_for_lines moved/peak_lr=1e-2/metrics.jsonl 1
	echo 'optimizer: {beta2: 0.9}' >>base.yaml
	ended 1
	has sweep.txt "base.yaml: has changed since the sweep began: optimizer.beta2" "peak_lr=1e-2: done"
}

test_hopeless() {
	grid hopeless <<-END
		grid:
		  schedule.peak_lr: [1e-2, 9e-3, 1e-7]
		  train.steps: 300
		  train.batch: 2
		  eval.every: 50
		stop_hopeless: {margin: 0.2, after: 0.1, runs: 2}
	END
	begin hopeless
	ended 0
	has sweep.txt "peak_lr=1e-7: hopeless: validation loss" "it saves and stops" "peak_lr=1e-7: stopped as hopeless at step "
	[ "$(column hopeless/table.tsv loss | grep -c '^[0-9]')" = 2 ] || problem "table: $(cat hopeless/table.tsv)"
	[ "$(jq -c 'select(.kind == "hopeless") | [.margin, .median < .valid_loss]' hopeless/peak_lr=1e-7/events.jsonl)" = "[0.2,true]" ] || problem "no event"
	[ "$(tail -n 1 hopeless/peak_lr=1e-7/metrics.jsonl | jq '.step >= 50 and .step < 300')" = true ] || problem "stopped at the wrong step"
	begin hopeless
	ended 0
	has out.txt "hopeless"
	[ "$(starts hopeless/*/)" = 3 ] || problem "a hopeless run was started again"
	# without the rule it goes on, and its last validation counts
	sed -i /stop_hopeless/d hopeless.yaml
	begin hopeless
	ended 0
	[ "$(column hopeless/table.tsv loss | grep -c '^[0-9]')" = 3 ] || problem "table: $(cat hopeless/table.tsv)"
}

check grid refusals results changed_grid failing_run killed_run kills signals changed_base hopeless
finish
