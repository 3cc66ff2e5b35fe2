#!/bin/bash
# Spikes in real runs: bad data is skipped, tried again, taken or dropped alike on all layouts; a run that is stopped in the middle goes on as if
# it had not been; too many skips end it, or bring it back to a checkpoint; a new level is accepted.
. "$(dirname "$0")/check.sh"
ling=$root/ling # ranks wait for one another: the sanitizers would make these runs long, and MPI does not release all of its memory
export OMP_NUM_THREADS=1

# bad_data FILE WINDOW...: ids of a text of few words, with ids that are nowhere else in those windows; FROM- is all windows from that one on.
bad_data() {
	perl -e 'my ($out, @bad) = @ARGV; my ($L, $n, $from, %bad) = (16, 1200, 1200);
		for (@bad) { if (/(\d+)-$/) { $from = $1 } else { $bad{$_} = 1 } }
		srand(5);
		my @words = map { my $k = 2 + $_ % 4; [map { 97 + int rand 26 } 1..$k] } 1..12;
		my @ids;
		while (@ids < $n * $L + 1) { push @ids, @{$words[int rand 12]}, 32 }
		$#ids = $n * $L;
		for my $i (0..$#ids) { my $w = int($i / $L); $ids[$i] = 160 + ($i * 7 + $w) % 90 if $bad{$w} || $w >= $from }
		open my $f, ">", $out or die; binmode $f; print $f pack("S<*", @ids)' "$@"
}

settings() {
	tiny data.train="[{ path: $1, dtype: uint16 }]" data.shuffle=off train.steps=64 spikes.window=16 spikes.warmup=8 spikes.loss_threshold=6 \
		spikes.grad_threshold=12
}

# What was decided: kind, batch, step, samples, attempts.
decisions() { jq -c 'select(.kind | IN("skip", "retry", "drop", "level_shift", "rollback")) | [.kind, .batch, .step, .samples, .attempts]' "$1/events.jsonl"; }

# has_decisions RUN KIND N: there are at least N of a kind.
has_decisions() {
	local n
	n=$(decisions "$1" | grep -c "^\[\"$2\"")
	[ "$n" -ge "$3" ] || problem "$1: $n of $2, expected $3 at least: $(decisions "$1")"
}

# each_once RUN STEP: the samples that were drawn are those that were trained, dropped, passed over, or wait.
each_once() {
	local state=$1/step-$(printf %07d "$2")/trainer.json named
	json "$1/events.jsonl"
	named=$(jq -s '[.[] | select(.kind | IN("drop", "rollback")) | .samples[] | [.[0], range(.[1]; .[2] + 1)]] | map(.[0] as $file | .[1:][] | [$file, .])
		| unique | length' "$1/events.jsonl")
	jq -e --argjson named "$named" '.samples + $named + (.spikes.queue | length) == ([.sources[].taken] | add)' "$state" >/dev/null ||
		problem "$1: trained $(jq -c '[.samples, [.sources[].taken], (.spikes.queue | length)]' "$state"), named $named"
	[ "$(jq -c 'select(.kind == "stop") | [.waiting[] | .[2] - .[1] + 1] | add // 0' "$1/events.jsonl" | tail -n 1)" = \
		"$(jq '.spikes.queue | length' "$state")" ] || problem "$1: other samples wait than events.jsonl says"
}

# All layouts decide alike.
test_layouts() {
	bad_data bad.bin {133..139} {203..209} {273..279} {343..349}
	settings bad.bin
	expect 0 "" "$ling" train tiny.yaml train.output_dir=one
	has_decisions one skip 3
	has_decisions one retry 1
	each_once one 64
	expect 0 "" ranks 2 "$ling" train tiny.yaml train.output_dir=data
	expect 0 "" ranks 2 "$ling" train tiny.yaml train.output_dir=tensor parallel.tensor=2
	expect 0 "" ranks 3 "$ling" train tiny.yaml train.output_dir=expert parallel.expert=3
	local run
	for run in data tensor expert; do
		cmp -s <(decisions one) <(decisions $run) || problem "$run: $(diff <(decisions one) <(decisions $run))"
		each_once $run 64
	done
}

# Stopped and continued while samples wait, a run is the same to the bit.
test_continued() {
	settings bad.bin
	rm -rf parts
	local step
	for step in 20 21 29 30 31 64; do
		expect 0 "" "$ling" train tiny.yaml train.output_dir=parts train.stop_at_step=$step
	done
	grep -q '"waiting":\[\[' parts/events.jsonl || problem "no sample waited when the run was stopped"
	same one/step-0000064/model.safetensors parts/step-0000064/model.safetensors
	same one/step-0000064/optimizer.safetensors parts/step-0000064/optimizer.safetensors
	cmp -s <(steady one/metrics.jsonl) <(steady parts/metrics.jsonl) || problem "other metrics"
	cmp -s <(decisions one) <(decisions parts) || problem "$(diff <(decisions one) <(decisions parts))"
	cmp -s <(jq .spikes one/step-0000064/trainer.json) <(jq .spikes parts/step-0000064/trainer.json) || problem "another detector or queue"
}

# Without a spike, what is done with one makes no difference; and each action does what it says.
test_actions() {
	bad_data good.bin
	settings good.bin
	local action
	for action in off watch skip ladder; do
		expect 0 "" "$ling" train tiny.yaml train.steps=30 train.output_dir=good-$action spikes.action=$action
		same good-off/step-0000030/model.safetensors good-$action/step-0000030/model.safetensors
		[ -z "$(decisions good-$action)" ] || problem "$action: $(decisions good-$action)"
	done
	settings bad.bin
	expect 0 "" "$ling" train tiny.yaml train.output_dir=action-off spikes.action=off
	expect 0 "" "$ling" train tiny.yaml train.output_dir=watch spikes.action=watch
	same action-off/step-0000064/model.safetensors watch/step-0000064/model.safetensors
	grep -q '"kind":"spike"' watch/events.jsonl || problem "nothing was watched"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=skip spikes.action=skip
	has_decisions skip drop 3
	[ "$(decisions skip | grep -c retry)" = 0 ] || problem "tried again: $(decisions skip)"
	each_once skip 64
	expect 0 "" "$ling" plot one
	[ -s one/metrics.png ] || problem "no picture"
}

# A NaN or infinity on one rank of three is a spike on all.
test_one_rank() {
	settings good.bin
	expect 0 "" ranks 3 "$ling" train tiny.yaml train.steps=12 train.output_dir=bad-rank --inject nan@step=3,rank=1 --inject inf@step=5,rank=2
	[ "$(decisions bad-rank | grep -c '^\["skip"')" = 2 ] || problem "$(decisions bad-rank)"
	each_once bad-rank 12
	# Ling 2.0's expert bias stays as it is in a skipped step: in the next one it moves by less than twice the rate.
	expect 0 "" ranks 2 "$ling" train tiny.yaml train.steps=6 train.output_dir=bias model.architecture=BailingMoeV2ForCausalLM parallel.expert=2 \
		--inject nan@step=4,rank=1
	[ "$(decisions bias | grep -c '^\["skip"')" = 1 ] || problem "$(decisions bias)"
	jq -es '.[3].expert_bias as $after | .[2].expert_bias | to_entries | length > 0 and all(.[]; $after[.key] - .value | fabs < 2e-3)' bias/metrics.jsonl >out.txt ||
		problem "$(jq -c .expert_bias bias/metrics.jsonl)"
}

# A level that stays is accepted with the fifth batch.
test_level_shift() {
	bad_data shift.bin 210-
	settings shift.bin
	expect 0 "" "$ling" train tiny.yaml train.output_dir=shift
	has_decisions shift level_shift 1
	[ "$(decisions shift | grep -c '^\["skip"')" -le 4 ] || problem "skipped: $(decisions shift)"
	each_once shift 64
}

# Too many skips: the run ends with status 4 and saves nothing more, or goes back to a checkpoint from before the first of them.
test_go_back() {
	local windows
	mapfile -t windows < <(seq 210 244)
	bad_data stretch.bin "${windows[@]}"
	settings stretch.bin
	expect 4 "of the last 16 batches were skipped; spikes.max_skips allows 2" "$ling" train tiny.yaml train.output_dir=end spikes.action=skip spikes.max_skips=2 \
		checkpoint.every=10 checkpoint.keep=0
	[ "$(cd end && echo step-*)" = "step-0000010 step-0000020 step-0000030" ] || problem "saved $(ls end)"
	grep -q '"why":"go back"' end/events.jsonl || problem "$(tail -n 1 end/events.jsonl)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=back spikes.action=skip spikes.max_skips=2 spikes.rollback=1 checkpoint.every=10 checkpoint.keep=0
	has_decisions back rollback 1
	grep -q '"step":30,"kind":"rollback"' back/events.jsonl || problem "$(grep rollback back/events.jsonl)"
	each_once back 64
	[ "$(lines back/metrics.jsonl)" = 64 ] || problem "$(lines back/metrics.jsonl) lines of metrics"
	expect 0 "" ranks 3 "$ling" train tiny.yaml train.output_dir=back3 spikes.action=skip spikes.max_skips=2 spikes.rollback=1 checkpoint.every=10 checkpoint.keep=0
	cmp -s <(decisions back) <(decisions back3) || problem "$(diff <(decisions back) <(decisions back3))"
	# with no checkpoint from before, it ends
	expect 4 "There is no checkpoint from step" "$ling" train tiny.yaml train.output_dir=nowhere spikes.action=skip spikes.max_skips=2 spikes.rollback=1
	# a smaller checkpoint.keep must not matter, nor a later checkpoint that the trouble is in: it is removed
	rm -rf end
	expect 4 "" ranks 2 "$ling" train tiny.yaml train.output_dir=end spikes.action=skip spikes.max_skips=2
}

check layouts continued actions one_rank level_shift go_back
finish
