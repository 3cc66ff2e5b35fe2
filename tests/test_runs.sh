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

# Named sets: valid_loss is the mean over all of their targets, as of a plain list of the files, and each set has its own. An evaluation
# before the first step is an event, and changes nothing else; it is not made again when the run goes on.
test_valid_sets() {
	local sets='data.valid={web: valid, code: [text, {path: valid}]}'
	expect 0 "" "$ling" train tiny.yaml train.output_dir=plain train.steps=4 eval.every=2 'data.valid=[valid, text, valid]'
	expect 0 "" "$ling" train tiny.yaml train.output_dir=sets train.steps=4 eval.every=2 eval.at_start=true train.stop_at_step=2 "$sets"
	grep -Eq '^step 0/4  valid [0-9.]+ \(web [0-9.]+, code [0-9.]+\)$' out.txt || problem "no validation at the start: $(cat out.txt)"
	grep -Eq '^step 2/4 .*  loss [0-9.]+  valid [0-9.]+ \(web [0-9.]+, code [0-9.]+\)  lr ' out.txt || problem "no sets: $(cat out.txt)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=sets train.steps=4 eval.every=2 eval.at_start=true "$sets"
	! grep -q '^step 0/' out.txt || problem "validated at the start again: $(cat out.txt)"
	cmp -s <(steady plain/metrics.jsonl) <(steady sets/metrics.jsonl | sed -E 's/, "valid": \{[^}]*\}//') ||
		problem "other metrics: $(steady plain/metrics.jsonl) $(steady sets/metrics.jsonl)"
	same plain/step-0000004/model.safetensors sets/step-0000004/model.safetensors
	same plain/step-0000004/optimizer.safetensors sets/step-0000004/optimizer.safetensors
	# the sets' losses by `ling eval`, and their mean
	expect 0 "" "$ling" eval sets/step-0000004 --data valid --seq-len 16 --json && cp out.txt web.txt
	expect 0 "" "$ling" eval sets/step-0000004 --data text --seq-len 16 --json
	jq -en --slurpfile web web.txt --slurpfile text out.txt --slurpfile m sets/metrics.jsonl 'def near(a; b): (a - b | fabs) < 1e-6;
		$web[0] as $w | $text[0] as $t | $m[-1] as $m | near($m.valid.web; $w.loss) and
		near($m.valid.code; ($w.loss * $w.tokens + $t.loss * $t.tokens) / ($w.tokens + $t.tokens)) and
		near($m.valid_loss; (2 * $w.loss * $w.tokens + $t.loss * $t.tokens) / (2 * $w.tokens + $t.tokens))' >/dev/null ||
		problem "means: $(cat web.txt out.txt; tail -n 1 sets/metrics.jsonl)"
	jq -es '[.[] | select(.kind == "validation")] | length == 1 and (.[0] | .step == 0 and .valid_loss > 5 and (.valid | keys_unsorted) == ["web", "code"])' \
		sets/events.jsonl >/dev/null || problem "events: $(cat sets/events.jsonl)"
}

# The tokens of each expert: k for each token of the batch; in each step, in every third, in none.
test_expert_counts() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=counts train.steps=6
	jq -es 'all(.[]; . as $m | .expert_counts | length == 2 and all(.[]; length == 6 and add == 7 * 16 * 2)) and
		all(.[]; [.expert_counts[] | max * 6 / add] as $load | [$load, .expert_load] | transpose | all(.[]; .[0] - .[1] | fabs < 1e-12))' \
		counts/metrics.jsonl >/dev/null || problem "counts: $(tail -n 1 counts/metrics.jsonl)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=third train.steps=6 log.experts=3
	[ "$(jq -c 'select(.expert_counts) | .step' third/metrics.jsonl | xargs)" = "3 6" ] || problem "every third: $(cat third/metrics.jsonl)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=never train.steps=6 log.experts=off
	! grep -q expert_counts never/metrics.jsonl || problem "off: $(cat never/metrics.jsonl)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=many train.steps=401 train.stop_at_step=7
	[ "$(jq -c 'select(.expert_counts) | .step' many/metrics.jsonl | xargs)" = "3 6" ] || problem "auto: $(cat many/metrics.jsonl)"
}

check exclusive second_signal stopped_validation same_command max_windows valid_sets expert_counts
finish
