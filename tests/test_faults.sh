#!/bin/bash
# Faults to order (--inject) and what finds them: each kind of fault on 1 and 3 ranks; replicas that differ, on several layouts; slow ranks.
. "$(dirname "$0")/check.sh"
ling=$root/ling
export OMP_NUM_THREADS=1

head -c 640 "$root/ling.h" >text.txt
"$ling" tokenize --out text text.txt >/dev/null 2>&1 || exit 1
tiny train.steps=10

# train RANKS DIR STATUS OPTIONS...: a run, which must end with that exit status; one rank is a process without a launcher, built with sanitizers.
# STATUS "killed": as by SIGKILL.
train() {
	local n=$1 out=$2 want=$3 launch=$root/build/sanitize/ling status
	shift 3
	[ "$n" = 1 ] || launch="ranks $n $ling"
	$launch train tiny.yaml train.output_dir="$out" "$@" >out.txt 2>err.txt
	status=$?
	[ $status = "$want" ] || { [ "$want" = killed ] && [ $status -gt 128 ]; } ||
		problem "$n ranks, $out $*: exit status $status, expected $want: $(head -c 600 err.txt)"
}

# whole N: the run whole-N on N ranks, to which nothing happens.
whole() { [ -e "whole-$1" ] || train "$1" "whole-$1" 0 checkpoint.every=2; }

# event DIR KIND FILTER: what jq's FILTER makes of the events of a kind.
event() { jq -c "select(.kind == \"$2\") | $3" "$1/events.jsonl"; }

# is WHAT FOUND EXPECTED
is() { [ "$2" = "$3" ] || problem "$1: $2; expected $3"; }

same_files() { # DIR DIR STEP: the weights and moments of two runs on the same layout
	local file
	for file in "$1/step-$3"/*.safetensors; do
		same "$file" "$2/step-$3/$(basename "$file")"
	done
}

test_refused() {
	expect 2 "--inject burn@step=3: there is no such kind; expected KIND@step=N" "$ling" train tiny.yaml --inject burn@step=3
	expect 2 "--inject kill@step=0: step is a whole number from 1" "$ling" train tiny.yaml --inject nan@step=3 --inject kill@step=0
	expect 2 "--inject kill@step=1,rank=1: there is no rank 1; expected 0 to 0" "$ling" train tiny.yaml --inject kill@step=1,rank=1
	[ ! -e run ] || problem "a refused run has begun: $(ls run)"
}

# A fault that kills a run comes once: the same command then goes on, and ends with the weights of a run that nothing happened to.
test_kill() {
	local n
	for n in 1 3; do
		set -- checkpoint.every=2 checkpoint.async=false --inject "kill@step=6,rank=$((n - 1))" --inject kill@step=8,during=save
		whole $n
		train $n "killed-$n" killed "$@"
		is "event" "$(event "killed-$n" fault '[.fault, .rank, .at_step, .step]')" "[\"kill@step=6,rank=$((n - 1))\",$((n - 1)),6,5]"
		is "checkpoint" "$(basename "$(ls -d "killed-$n"/step-* | tail -n 1)")" step-0000004
		train $n "killed-$n" killed "$@"
		is "event" "$(event "killed-$n" fault '[.fault, .rank, .at_step, .step]' | tail -n 1)" '["kill@step=8,during=save",0,8,8]'
		is "checkpoint" "$(basename "$(ls -d "killed-$n"/step-* | tail -n 1)")" step-0000006
		train $n "killed-$n" 0 "$@"
		same_files "whole-$n" "killed-$n" 0000010
	done
}

# stopped RANK: waits until that rank of the run stands still, and tells it to go on.
stopped() {
	local pid tries=0
	until [ -s "pid.$1" ] && pid=$(cat "pid.$1") && grep -q '^State:.T' "/proc/$pid/status" || [ $tries -ge 400 ]; do
		sleep 0.05
		tries=$((tries + 1))
	done
	grep -q '^State:.T' "/proc/$pid/status" || problem "rank $1 is not stopped: $(grep State "/proc/$pid/status")"
	[ "$(lines stopped/metrics.jsonl)" -ge $(($2 - 1)) ] && [ "$(lines stopped/metrics.jsonl)" -le "$2" ] ||
		problem "$(lines stopped/metrics.jsonl) steps; expected $2 or one less"
	kill -CONT "$pid"
}

# A rank that is stopped stands still, in the step or in the middle of a file of a checkpoint, and goes on where it was when it is told to.
test_stop() {
	local run
	cat >launch.sh <<-END
		#!/bin/bash
		echo \$\$ >pid.\$OMPI_COMM_WORLD_RANK
		exec "$ling" "\$@"
	END
	chmod +x launch.sh
	whole 3
	ranks 3 ./launch.sh train tiny.yaml train.output_dir=stopped checkpoint.every=6 --inject stop@step=4,rank=2 \
		--inject stop@step=6,rank=1,during=save >out.txt 2>err.txt &
	run=$!
	stopped 2 3
	stopped 1 7 # the others may be in the next step
	wait $run || problem "exit status $?: $(head -c 600 err.txt)"
	is "steps" "$(lines stopped/metrics.jsonl)" 10
	is "event" "$(event stopped fault '[.rank, .step]' | tr '\n' ' ')" '[2,3] [1,6] '
	is "checkpoints" "$(cd stopped && echo step-*)" "step-0000006 step-0000010"
	same_files whole-3 stopped 0000010
}

# No room for a checkpoint: the older ones stay, the next one is tried as planned, and training is not disturbed.
test_diskfull() {
	local n
	for n in 1 3; do
		whole $n
		train $n "full-$n" 0 checkpoint.every=2 checkpoint.keep=0 --inject diskfull@step=4,rank=$((n - 1)) --inject diskfull@step=8
		is "faults" "$(event "full-$n" fault '[.rank, .step]' | tr '\n' ' ')" "[$((n - 1)),4] [0,8] "
		is "failed" "$(event "full-$n" save_failed .step | tr '\n' ' ')" "4 8 "
		is "checkpoints" "$(cd "full-$n" && echo step-*)" "step-0000002 step-0000006 step-0000010"
		same_files "whole-$n" "full-$n" 0000010
	done
}

# What is not finite on one rank is skipped by all.
test_not_finite() {
	local n
	for n in 1 3; do
		train $n "nan-$n" 0 --inject nan@step=3,rank=$((n - 1)) --inject inf@step=5
		is "faults" "$(event "nan-$n" fault '[.rank, .step]' | tr '\n' ' ')" "[$((n - 1)),2] [0,4] "
		is "skipped" "$(event "nan-$n" skip '[.step, .grad_norm]' | tr '\n' ' ')" '[2,null] [4,null] '
		is "steps" "$(lines "nan-$n/metrics.jsonl")" 10
	done
}

# The targets of a poisoned batch are the same random ones on each layout, and when the run is started again.
test_poison() {
	local n
	for n in 1 3; do
		whole $n
		train $n "poison-$n" 0 spikes.action=off --inject poison@step=3
		[ -z "$(comm -3 <(metric loss "whole-$n/metrics.jsonl" | head -n 2) <(metric loss "poison-$n/metrics.jsonl" | head -n 2))" ] ||
			problem "the steps before differ"
		is "event" "$(event "poison-$n" fault '[.step, .samples]')" '[2,[[0,14,20]]]'
	done
	awk 'NR == FNR { a[FNR] = $1; next } { d = $1 - a[FNR]; if (d * d > 1e-8) print FNR, $1, a[FNR] }' \
		<(metric loss poison-1/metrics.jsonl) <(metric loss poison-3/metrics.jsonl) >differ.txt
	[ ! -s differ.txt ] || problem "other targets on 3 ranks: $(cat differ.txt)"
	awk 'NR == FNR { a[FNR] = $1; next } FNR == 3 && $1 < a[FNR] + 0.05' <(metric loss whole-1/metrics.jsonl) \
		<(metric loss poison-1/metrics.jsonl) | grep -q . && problem "the targets are not random: $(metric loss poison-1/metrics.jsonl)"
	train 1 again killed spikes.action=off checkpoint.every=2 --inject poison@step=3 --inject kill@step=4
	train 1 again 0 spikes.action=off checkpoint.every=2 --inject poison@step=3 --inject kill@step=4
	same_files poison-1 again 0000010
}

# flipped DIR NAMED: the last bit that was turned is found, in the tensor and on the ranks that the event names.
flipped() {
	is "$1: tensors" "$(event "$1" replicas_differ '[.ranks[].tensors[]] | unique' | tail -n 1)" "[$(event "$1" fault .tensor | tail -n 1)]"
	is "$1: ranks" "$(event "$1" replicas_differ '[.ranks[].rank]' | tail -n 1)" "$2"
	grep -q "^ling: step [0-9]*: replicas differ: rank [0-9]* on .* differs in $(event "$1" fault .tensor | tail -n 1 | tr -d '"')[.;]" err.txt ||
		problem "$1: $(head -c 600 err.txt)"
}

# A bit that is turned in a weight is found before the update, and the step is not taken; when the run goes on, it ends as it should have.
test_flip() {
	local every="health.every=1 checkpoint.every=1"
	whole 3
	set -- --inject flip@step=3,rank=1 --inject flip@step=5,rank=2,during=update --inject flip@step=8
	# shellcheck disable=SC2086 # words are meant to split
	{
		train 3 flip-3 4 $every "$@"
		flipped flip-3 '[1]'
		is "steps" "$(ls -d flip-3/step-* | tail -n 1)" flip-3/step-0000002
		train 3 flip-3 4 $every "$@"
		flipped flip-3 '[2]'
		train 3 flip-3 4 $every "$@"
		flipped flip-3 '[0]'
		train 3 flip-3 0 $every "$@"
		same_files whole-3 flip-3 0000010
		# of two replicas nobody knows which one is wrong
		train 2 flip-2 4 $every --inject flip@step=4,rank=1
		flipped flip-2 '[0,1]'
		# ranks that hold other experts, heads and parts of the vocabulary have other replicas: ranks 1 and 3, or both
		train 4 flip-4 4 $every parallel.tensor=2 parallel.expert=2 --inject flip@step=2,rank=3 --inject flip@step=3,rank=2
		[[ $(event flip-4 replicas_differ '[.ranks[].rank]') =~ ^(\[1,3\]|\[3\])$ ]] || problem "$(cat flip-4/events.jsonl)"
		train 4 flip-4 4 $every parallel.tensor=2 parallel.expert=2 --inject flip@step=2,rank=3 --inject flip@step=3,rank=2
		[[ $(event flip-4 replicas_differ '[.ranks[].rank]' | tail -n 1) =~ ^(\[0,2\]|\[2\])$ ]] || problem "$(cat flip-4/events.jsonl)"
		is "tensors" "$(event flip-4 replicas_differ '.ranks[0].tensors[]')" "$(event flip-4 fault .tensor)"
	}
}

# Looking for sick machines changes nothing, neither in weights nor in what the metrics say was sent.
test_health_changes_nothing() {
	local layout n
	for layout in "1" "4 parallel.tensor=2 parallel.expert=2"; do
		n=${layout%% *}
		# shellcheck disable=SC2086 # words are meant to split
		{
			train "$n" "healthy-$n" 0 health.every=1 model.router.warmup_steps=4 train.recompute=layer ${layout#?}
			train "$n" "unwatched-$n" 0 health.every=off model.router.warmup_steps=4 train.recompute=layer ${layout#?}
		}
		same_files "healthy-$n" "unwatched-$n" 0000010
		cmp -s <(steady "healthy-$n/metrics.jsonl") <(steady "unwatched-$n/metrics.jsonl") ||
			problem "$n ranks: other metrics: $(diff <(steady "healthy-$n/metrics.jsonl") <(steady "unwatched-$n/metrics.jsonl") | head -n 4)"
		is "events" "$(jq -r .kind "healthy-$n/events.jsonl" | tr '\n' ' ')" "start save stop "
	done
}

# A rank that takes longer than the others is named, once; ranks that are alike are not. All sleep in each step, so that what else the machine
# does counts little.
test_slow() {
	train 3 slow 0 train.steps=110 --inject slow@step=1,rank=0,ms=20 --inject slow@step=20,rank=1,ms=60 --inject slow@step=1,rank=2,ms=20
	is "slow" "$(event slow slow_rank '[.step, .rank, .ratio > 1.6 and .ratio < 3.2, .expected_loss > 0.3]')" '[100,1,true,true]'
	has err.txt "rank 1 on $(uname -n) is slow: it computes "
	is "fault" "$(event slow fault '[.rank, .step]' | tr '\n' ' ')" "[0,0] [2,0] [1,19] "
	train 3 even 0 train.steps=110 --inject slow@step=1,rank=0,ms=15 --inject slow@step=1,rank=1,ms=15 --inject slow@step=1,rank=2,ms=15
	is "slow" "$(event even slow_rank .)" ""
}

check refused kill stop diskfull not_finite poison flip health_changes_nothing slow
finish
