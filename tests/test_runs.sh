#!/bin/bash
# Runs and what comes to them from outside: another run in the same directory, a second signal, the same command again;
# and that validation is of the windows that were asked for.
. "$(dirname "$0")/check.sh"

head -c 640 "$root/ling.h" >text.txt
head -c 200 "$root/LICENSE" >valid.txt
"$ling" tokenize --out text text.txt >/dev/null 2>&1 && "$ling" tokenize --out valid valid.txt >/dev/null 2>&1 || exit 1
tiny

# A run that goes on until it is told to stop holds its directory against a second one, which touches nothing; whoever
# comes after the first has ended may have it.
test_exclusive() {
	"$ling" train tiny.yaml train.output_dir=busy train.steps=1000000 >first.txt 2>first-err.txt &
	local pid=$! before after
	wait_for_lines busy/metrics.jsonl 3
	expect 1 "another ling train is writing there" timeout 20 "$ling" train tiny.yaml train.output_dir=busy train.steps=1000000
	expect 1 "another ling train is writing there" timeout 20 "$ling" train tiny.yaml train.output_dir=./busy/ train.steps=1000000
	before=$(lines busy/metrics.jsonl)
	wait_for_lines busy/metrics.jsonl $((before + 3))
	kill -TERM $pid
	wait $pid
	[ $? = 3 ] || problem "the first run was disturbed: $(cat first-err.txt)"
	after=$(lines busy/metrics.jsonl)
	[ "$(metric step busy/metrics.jsonl | sort -nu | wc -l)" = "$after" ] || problem "steps written twice"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=busy train.steps=1000000 train.stop_at_step=$((after + 2))
	[ "$(lines busy/metrics.jsonl)" = $((after + 2)) ] || problem "it did not go on from step $after: $(tail -n 1 out.txt)"
	# killed, a run holds nothing
	"$ling" train tiny.yaml train.output_dir=busy train.steps=1000000 >first.txt 2>first-err.txt &
	pid=$!
	wait_for_lines busy/metrics.jsonl $((after + 4))
	kill -9 $pid
	wait $pid 2>/dev/null
	expect 0 "" "$ling" train tiny.yaml train.output_dir=busy train.steps=1000000 train.stop_at_step=$((after + 6))
}

# stopped_in_validation STEP: the run `halted` is told to stop in the validation of a step, and does not wait for it.
stopped_in_validation() {
	local pid
	# shellcheck disable=SC2086 # words are meant to split
	"$root/ling" train tiny.yaml train.output_dir=halted $slow >first.txt 2>first-err.txt &
	pid=$!
	wait_for_lines halted/metrics.jsonl $(($1 - 1))
	sleep 0.5
	kill -TERM $pid
	wait $pid
	[ $? = 3 ] || problem "step $1: $(cat first-err.txt)"
	[ "$(lines halted/metrics.jsonl)" = "$1" ] || problem "$(lines halted/metrics.jsonl) lines; expected $1"
	jq -es '(.[-1] | .validation_stopped and (has("valid_loss") | not)) and ([.[:-1][] | select(.validation_stopped)] | length == 0)' \
		halted/metrics.jsonl >/dev/null || problem "step $1: $(tail -n 1 halted/metrics.jsonl)"
}

# A stop ends a validation too. The run that goes on makes up for it, so that its metrics are those of one that was not stopped.
test_stopped_validation() {
	local slow="train.steps=6 eval.every=4 data.valid=slow checkpoint.every=off" i
	for ((i = 0; i < 20; i++)); do cat "$root/ling.h"; done | head -c 150000 >slow.txt
	expect 0 "" "$ling" tokenize --out slow slow.txt
	# shellcheck disable=SC2086 # words are meant to split
	expect 0 "" "$root/ling" train tiny.yaml train.output_dir=whole $slow
	[ "$(grep -c valid_loss whole/metrics.jsonl)" = 2 ] || problem "validations: $(cat whole/metrics.jsonl)"
	rm -rf halted
	stopped_in_validation 4
	has first.txt "stopped after step 4 of 6 and saved; the same command continues"
	# stopped again before it is made up for, then in the last one
	"$root/ling" train tiny.yaml train.output_dir=halted $slow >first.txt 2>first-err.txt &
	local pid=$!
	for ((i = 0; i < 100; i++)); do grep -q "validating step 4" first.txt && break; sleep 0.05; done
	kill -TERM $pid
	wait $pid
	[ $? = 3 ] || problem "$(cat first-err.txt)"
	has first.txt "stopped before the validation of step 4 was complete; the same command continues"
	stopped_in_validation 6
	has first.txt "validating step 4, where the run was stopped"
	has first.txt "stopped after step 6 of 6 and saved; the same command continues"
	# shellcheck disable=SC2086 # words are meant to split
	expect 0 "" "$root/ling" train tiny.yaml train.output_dir=halted $slow
	has out.txt "nothing is left to do: 6 of 6 steps are done"
	cmp -s <(steady whole/metrics.jsonl) <(steady halted/metrics.jsonl) || problem "other metrics: $(cat halted/metrics.jsonl)"
	cmp -s whole/step-0000006/model.safetensors halted/step-0000006/model.safetensors || problem "other weights"
	cmp -s whole/step-0000006/optimizer.safetensors halted/step-0000006/optimizer.safetensors || problem "other moments"
	! compgen -G 'halted/metrics.jsonl?*' >/dev/null || problem "left $(ls halted)"
	expect 0 "" "$root/ling" train tiny.yaml train.output_dir=halted $slow
	! grep -q validating out.txt || problem "validated again: $(cat out.txt)"
}

# The first signal waits for the end of the step, which takes minutes here; a second one does not.
test_second_signal() {
	local signal pid start status
	for signal in TERM INT HUP USR1; do
		rm -rf long
		# Background jobs of a script ignore SIGINT; the program must not inherit that.
		perl -e '$SIG{INT} = "DEFAULT"; exec @ARGV' \
			"$ling" train tiny.yaml train.output_dir=long train.batch=200000 train.batch_warmup=off >out.txt 2>err.txt &
		pid=$!
		wait_for_lines out.txt 2 # the run has been set up
		sleep 0.3
		kill -$signal $pid
		sleep 0.3
		kill -0 $pid 2>/dev/null || problem "the first SIG$signal ended the program: $(cat out.txt err.txt)"
		start=$SECONDS
		kill -$signal $pid
		(sleep 10; kill -9 $pid) >/dev/null 2>&1 & # not for minutes
		wait $pid 2>/dev/null
		status=$?
		kill $! 2>/dev/null
		[ $status = $((128 + $(kill -l $signal))) ] || problem "a second SIG$signal: exit status $status"
		[ $((SECONDS - start)) -le 3 ] || problem "a second SIG$signal: $((SECONDS - start)) seconds"
		[ "$(lines long/metrics.jsonl)" = 0 ] || problem "the step was over before"
		[ -z "$(compgen -G 'long/step-*')" ] || problem "a checkpoint of no step: $(ls long)"
	done
}

# "The same command continues": also a command that says where to stop.
test_same_command() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=straight
	local again
	for again in 7 20; do
		expect 0 "" "$ling" train tiny.yaml train.output_dir=parts train.stop_at_step=7
		[ "$(lines parts/metrics.jsonl)" = $again ] || problem "expected step $again: $(tail -n 1 out.txt)"
		if [ $again = 7 ]; then has out.txt "stopped after step 7 of 20 and saved; the same command continues"; fi
	done
	same straight/step-0000020/model.safetensors parts/step-0000020/model.safetensors
	expect 0 "" "$ling" train tiny.yaml train.output_dir=parts train.stop_at_step=7
	has out.txt "nothing is left to do"
}

# eval.max_windows: the first so many windows of each file, and no more; at most those that there are.
test_max_windows() {
	local n
	for n in 1 3 12 13; do
		expect 0 "" "$ling" train tiny.yaml train.output_dir=windows$n train.steps=2 data.valid=valid eval.max_windows=$n
		expect 0 "" "$ling" eval windows$n/step-0000002 --data valid --seq-len 16 --max-windows $n --json
		[ "$(metric tokens out.txt)" = $((n > 12 ? 192 : 16 * n)) ] || problem "$n windows: $(cat out.txt)"
		[ "$(metric loss out.txt | cut -c 1-12)" = "$(metric valid_loss windows$n/metrics.jsonl | tail -n 1 | cut -c 1-12)" ] ||
			problem "$n windows: eval $(cat out.txt), training $(tail -n 1 windows$n/metrics.jsonl)"
		metric valid_loss windows$n/metrics.jsonl
	done >losses.txt
	[ "$(sort -u losses.txt | wc -l)" = 3 ] || problem "losses of 1, 3, 12 and 13 of 12 windows: $(cat losses.txt)"
}

check exclusive second_signal stopped_validation same_command max_windows
finish
