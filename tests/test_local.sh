#!/bin/bash
# Local SGD: the outer step beside synchronous SGD, resuming, uneven periods, replicas that are set aside.
. "$(dirname "$0")/check.sh"
ling=$root/ling
export OMP_NUM_THREADS=1

# train RANKS DIR OPTIONS...: a run of local SGD that must succeed; RUN is its program.
train() {
	local n=$1 out=$2
	shift 2
	ranks "$n" ${RUN:-"$ling"} train tiny.yaml train.output_dir="$out" "$@" >out.txt 2>err.txt ||
		problem "$n ranks, $out $*: exit status $?: $(head -c 600 err.txt)"
}

# tensors KIND DIR DIR TOLERANCE: the tensors of two checkpoints in the double build.
tensors() { "$root/build/compare_checkpoints_double" "$1" "" "$2" "$3" "$4" >compare.txt 2>&1 || problem "$2 and $3: $(cat compare.txt)"; }

# same DIR DIR STEP: the checkpoints of two runs, and their metrics but for the time.
same_run() {
	diff -rq "$1/step-$3" "$2/step-$3" -x trainer.json >diff.txt || problem "$(head -n 3 diff.txt)"
	cmp -s <(steady "$1/metrics.jsonl") <(steady "$2/metrics.jsonl") || problem "the metrics of $1 and $2 differ"
}

head -c 20000 "$root/LICENSE" >text.txt
tail -c 200 "$root/LICENSE" >valid.txt
"$ling" tokenize --out text text.txt >/dev/null && "$ling" tokenize --out valid valid.txt >/dev/null || exit 1
tiny train.batch=8 data.valid=valid model.num_experts=8
local="parallel.sync=local health.every=1 schedule.peak_lr=3e-3"

# One local step, outer rate 1, no momentum, no penalty: the mean of the replicas is a step of SGD on the whole batch.
test_is_synchronous_sgd() {
	local sgd="$root/build/train_sgd_double" layout
	local those=(train.grad_clip=off spikes.action=off train.steps=6 schedule.peak_lr=0.5 data.valid=off)
	local plain=(parallel.sync=local local.outer_lr=1 local.outer_momentum=0 local.penalty=false health.every=1)
	for layout in "" parallel.expert=2 parallel.tensor=2; do
		rm -rf sgd outer
		ranks 4 "$sgd" tiny.yaml train.output_dir=sgd "${those[@]}" $layout >out.txt 2>err.txt || problem "$(head -c 600 err.txt)"
		ranks 4 "$sgd" tiny.yaml train.output_dir=outer "${those[@]}" $layout "${plain[@]}" local.steps=1 >out.txt 2>err.txt ||
			problem "$(head -c 600 err.txt)"
		tensors model sgd/step-0000006 outer/step-0000006 1e-13
	done
	# Half the outer rate is half the rate.
	ranks 4 "$sgd" tiny.yaml train.output_dir=half "${those[@]}" $layout "${plain[@]}" local.steps=1 local.outer_lr=0.5 schedule.peak_lr=1 >out.txt 2>err.txt
	tensors model sgd/step-0000006 half/step-0000006 1e-13
	ranks 4 "$sgd" tiny.yaml train.output_dir=two "${those[@]}" $layout "${plain[@]}" local.steps=2 >out.txt 2>err.txt
	"$root/build/compare_checkpoints_double" model "" sgd/step-0000006 two/step-0000006 1e-3 >/dev/null 2>&1 && problem "two local steps are one"
}

# The expert bias is the mean of the replicas', whatever the outer step does to weights: after single steps of two replicas with rate u, each is a
# multiple of u / 2 / experts.
test_expert_bias() {
	train 4 bias $local local.steps=1 parallel.expert=2 train.steps=5 model.architecture=BailingMoeV2ForCausalLM model.norm_head=false \
		model.router.bias_update_rate=1e-2
	perl -MJSON::PP -e 'local $/; my $n = 0;
		for my $path (@ARGV) {
			open my $f, "<:raw", $path; my $bytes = <$f>; my $size = unpack "Q<", $bytes; my $header = decode_json(substr $bytes, 8, $size);
			for my $name (grep /expert_bias$/, keys %$header) {
				for my $b (unpack "f<*", substr $bytes, 8 + $size + $header->{$name}{data_offsets}[0], 4 * 8) {
					my $x = $b / 1e-2 * 16; $n += $x != 0;
					abs($x - sprintf "%.0f", $x) < 1e-3 && abs($b) <= 0.05 * 2 or die "$name: $b\n";
				}
			}
		}
		$n >= 8 or die "$n biases\n"' bias/step-0000005/model-*.safetensors 2>err.txt || problem "$(cat err.txt)"
}

# Steps of the warm-up are those of a run without replicas.
test_warmup() {
	RUN=$root/build/ling_double train 4 all parallel.expert=2 train.steps=5 schedule.peak_lr=3e-3
	RUN=$root/build/ling_double train 4 warm $local parallel.expert=2 train.steps=5 local.warmup_steps=5
	tensors model all/step-0000005 warm/step-0000005 1e-12
	grep -q '"replica1.exp_avg_sq.lm_head.weight"' warm/step-0000005/optimizer.safetensors.index.json || problem "no moments of replica 1"
}

test_resume() {
	local those="$local local.warmup_steps=4 local.steps=4 checkpoint.every=1 checkpoint.keep=0 eval.every=5 model.router.warmup_steps=12"
	train 4 straight $those parallel.expert=2
	grep -q '"set_aside"\|"synchronisation"' straight/events.jsonl || problem "no synchronisation"
	[ "$(grep -c '"valid_loss"' straight/metrics.jsonl)" = 4 ] || problem "not 4 evaluations"
	[ "$(cd straight && echo step-*)" = "step-0000001 step-0000002 step-0000003 step-0000004 step-0000008 step-0000012 step-0000016 step-0000020" ] ||
		problem "checkpoints: $(cd straight && echo step-*)"
	# Without anything to do at a synchronisation, the weights come with the next forward pass: the same bits.
	train 4 overlapped $those parallel.expert=2 checkpoint.every=8 eval.every=off health.every=off log.every=3
	# A line that was due in a period is not due again at its end.
	[ "$(sed -n 's|^step \([0-9]*\)/.*|\1|p' out.txt | tr '\n' ' ')" = "3 6 9 12 15 18 20 " ] || problem "lines: $(cat out.txt)"
	diff -rq straight/step-0000020 overlapped/step-0000020 -x trainer.json >diff.txt || problem "$(head -n 3 diff.txt)"
	train 4 stopped $those parallel.expert=2 train.stop_at_step=2
	train 4 stopped $those parallel.expert=2 train.stop_at_step=6 # in a period: it stops at its end
	grep -q 'stopped after step 8' out.txt || problem "not at the period's end: $(tail -n 1 out.txt)"
	train 4 stopped $those parallel.expert=2
	same_run straight stopped 0000020
	local fault
	for fault in kill@step=3,rank=1 kill@step=11,rank=3 kill@step=12,rank=2,during=save; do
		rm -rf killed
		ranks 4 "$ling" train tiny.yaml train.output_dir=killed $those parallel.expert=2 --inject $fault >out.txt 2>err.txt && problem "$fault: not killed"
		train 4 killed $those parallel.expert=2
		same_run straight killed 0000020
	done
	# In a synchronisation, when the norms are exchanged, and when the blocks are: at once, and with the next forward pass.
	local last like options
	while read -r fault last like options; do
		rm -rf killed
		ranks 4 "$ling" train tiny.yaml train.output_dir=killed $those parallel.expert=2 $options --inject $fault >out.txt 2>err.txt </dev/null &&
			problem "$fault: not killed"
		[ "$(metric step killed/metrics.jsonl | tail -n 1)" = $last ] || problem "$fault $options: after step $(tail -n 1 killed/metrics.jsonl)"
		[ "$(cd killed && echo step-* | tail -c 13)" = step-0000008 ] || problem "$fault $options: $(ls killed)"
		train 4 killed $those parallel.expert=2 $options </dev/null
		same_run $like killed 0000020
	done <<-END
		kill@step=12,rank=1,during=norms 11 straight
		kill@step=12,rank=2,during=synchronisation 11 straight
		kill@step=12,rank=2,during=synchronisation 12 overlapped checkpoint.every=8 eval.every=off health.every=off
	END
	expect 1 "there is no synchronisation: parallel.sync is step" "$ling" train tiny.yaml train.output_dir=refused --inject kill@step=3,during=norms
}

# MTP layers, whose blocks are the last ones: their weights too come with the next forward pass, which computes them, or, without the factor
# of their loss and in evaluation, does not.
test_mtp() {
	local factor those="$local local.steps=4 parallel.expert=2 train.steps=12 model.architecture=BailingMoeV2ForCausalLM
		model.first_k_dense_replace=1 model.intermediate_size=24 model.n_group=1 model.topk_group=1 model.num_nextn_predict_layers=2"
	for factor in 0.3 0; do
		rm -rf straight overlapped
		train 4 straight $those model.mtp_loss_scaling_factor=$factor checkpoint.every=4 eval.every=4
		train 4 overlapped $those model.mtp_loss_scaling_factor=$factor checkpoint.every=12 eval.every=off health.every=off
		diff -rq straight/step-0000012 overlapped/step-0000012 -x trainer.json >diff.txt || problem "factor $factor: $(head -n 3 diff.txt)"
		# When they are trained no more, not even the outer momentum moves them.
		train 4 overlapped $those model.mtp_loss_scaling_factor=0 train.steps=20 checkpoint.keep=0 eval.every=off
		"$root/build/compare_checkpoints" model model.layers.3. overlapped/step-0000012 overlapped/step-0000020 0 >compare.txt 2>&1 ||
			problem "factor $factor, then 0: $(cat compare.txt)"
	done
	"$root/build/compare_checkpoints" model model.layers.1. overlapped/step-0000012 overlapped/step-0000020 0 >compare.txt 2>&1 && problem "nothing moved"
}

# supervised RUN SECONDS OPTIONS...: 4 ranks, 2 replicas, whose hangs are to be found after so long; not started again. What it says is in said.txt.
supervised() {
	local out=$1 least=$2
	shift 2
	timeout -k 5 60 "$ling" supervise --run "$out" --grace 1 --max-restarts 0 --hang-least $least --hang-unseen 20 -- mpirun -n 4 --oversubscribe --bind-to none \
		"$ling" train tiny.yaml train.output_dir="$out" $local local.ranks=2 checkpoint.every=off eval.every=off health.every=off "$@" >printed.txt 2>said.txt
}

# A rank that is stopped is found where it is: in a period, in which the other replica goes on; in both parts of a synchronisation. The
# other replica may wait longer than that for a slow one.
test_hangs() {
	supervised period 6 local.steps=1000 train.steps=1000 --inject slow@step=1,ms=20 --inject stop@step=40,rank=3 &
	wait_for_lines period/metrics.jsonl 42
	for ((i = 0; i < 60; i++)); do
		sleep 0.2
		"$ling" watch period --once --json | jq -r ".runs[0].waiting" >watch.txt
		grep -q 'no progress' watch.txt && break
	done
	grep -qE 'no progress for [2-9] s: rank 3 on [^ ]+ has been in .*step 40 for [2-9] s.*; rank 2 waits in [a-z ]+ \(number [0-9]+\) of step 40; process [0-9]+ of rank 3 is stopped; the other replicas go on' watch.txt ||
		problem "$(cat watch.txt)"
	look period '.state == "stands still" and .replicas == 2 and .replicas_going_on == [0] and ([.in_the_way[].rank] == [3]) and
		([.waiting[].rank] == [2]) and ([.places[].replica] == [0, 0, 1, 1]) and (.text | test("process [0-9]+ of rank 3 is stopped; the other replicas go on"))'
	expect 0 "" "$ling" trace period --hang
	has out.txt "the run stands still, but for 1 of its 2 replicas: for " "rank 3 of replica 1 on "
	wait
	grep -qE 'hang: rank 3 on [^ ]+ has been in .*step 40 for [6-9] s( without a sign)?; rank 2 waits in [a-z ]+ \(number [0-9]+\) of .*step 40; process [0-9]+ of rank 3 is stopped; the other replicas go on' said.txt ||
		problem "$(grep supervise said.txt)"
	local last moment i
	last=$(metric step period/metrics.jsonl | tail -n 1)
	[ "$last" -gt 45 ] && [ "$last" -lt 1000 ] || problem "replica 0 at step $last"
	for moment in norms synchronisation; do
		# slow steps, so that the supervisor sees some before
		supervised $moment 2 local.steps=5 --inject slow@step=1,ms=150 --inject stop@step=15,rank=2,during=$moment &
		wait_for_lines $moment/metrics.jsonl 14
		look $moment '.state == "stands still" and .replicas_going_on == [] and ([.in_the_way[].rank] == [2]) and ([.waiting[].rank] == [0, 1, 3])'
		wait
		grep -qE 'hang: rank 2 on [^ ]+ has been in weights.* of step 1[56] for [1-9] s' said.txt || problem "$moment: $(grep supervise said.txt)"
		grep -qE 'process [0-9]+ of rank 2 is stopped' said.txt || problem "$moment: $(grep supervise said.txt)"
		[ "$(jq -r 'select(.kind == "hang") | .ranks | map(.rank) | tostring' $moment/events.jsonl)" = '[2]' ] || problem "$moment: $(cat $moment/events.jsonl)"
	done
	supervised slow 1 local.steps=20 train.steps=20 --inject slow@step=1,rank=2,ms=100 || problem "$(cat said.txt)"
	[ -s said.txt ] && grep -q hang said.txt && problem "$(grep hang said.txt)"
}

test_other_replicas() {
	local those="$local local.steps=4 checkpoint.keep=0"
	train 2 others $those train.stop_at_step=8
	train 4 others $those train.stop_at_step=16
	grep -q 'the checkpoint is of 2 replicas, and now there are 4' out.txt || problem "does not say so: $(cat out.txt)"
	train 2 others parallel.sync=step
	grep -q 'the checkpoint is of 4 replicas, and now there is 1' out.txt || problem "does not say so: $(cat out.txt)"
	[ "$(grep -c . others/metrics.jsonl)" = 20 ] || problem "not 20 steps"
}

# The mean of each of the 4 blocks is scaled down to the norm local.clip: so is what the synchronisation changes, as outer rate 1 and no
# momentum take it as it is.
test_clip() {
	train 2 clipped $local local.warmup_steps=4 local.steps=4 train.steps=8 checkpoint.every=4 checkpoint.keep=0 data.valid=off local.clip=0.01 \
		local.outer_lr=1 local.outer_momentum=0
	perl -e 'local $/;
		my ($a, $b) = map { [map { open my $f, "<:raw", $_ or die "$_: $!"; my $t = <$f>; unpack "f<*", substr $t, 8 + unpack "Q<", $t }
			sort glob "clipped/step-000000$_/model-*.safetensors"] } 4, 8;
		my $sum = 0;
		$sum += ($a->[$_] - $b->[$_]) ** 2 for 0 .. $#$a;
		printf "the norm is %.7f, expected 0.02\n", sqrt $sum if abs(sqrt($sum) - 0.02) > 1e-5;' >wrong.txt 2>&1
	[ ! -s wrong.txt ] || problem "$(cat wrong.txt)"
}

# By time: a slow replica takes fewer steps. Each sample is trained on once, also when the run goes on without replicas.
test_seconds() {
	train 2 seconds $local local.seconds=0.1 train.steps=60 train.stop_at_step=40 checkpoint.keep=0 --inject slow@step=1,rank=1,ms=30 \
		--inject slow@step=1,rank=0,ms=10
	local uneven step
	uneven=$(cd seconds && echo step-*)
	step=$((10#${uneven#step-}))
	train 2 seconds parallel.sync=step train.steps=60 checkpoint.keep=0 train.stop_at_step=$((step + 1))
	train 2 seconds parallel.sync=step train.steps=60 checkpoint.keep=0
	for step in $(cd seconds && echo step-*); do
		perl -MJSON::PP -e '
			my $t = decode_json(do { local $/; open my $f, "<", "seconds/$ARGV[0]/trainer.json"; <$f> });
			my $left = 0;
			$left += $_->[2] - $_->[1] + 1 for @{$t->{local}{pending}};
			print "$ARGV[0]: left $left\n";
			print "$ARGV[0] is wrong: taken $t->{sources}[0]{taken}, left $left, samples $t->{samples}\n" if $t->{sources}[0]{taken} - $left != $t->{samples};' "$step"
	done >left.txt 2>&1
	grep wrong left.txt && problem "$(cat left.txt)"
	grep -q ': left [1-9]' left.txt || problem "no sample waited: $(cat left.txt)"
	perl -MJSON::PP -e '
		my $t = decode_json(do { local $/; open my $f, "<", "seconds/$ARGV[0]/trainer.json"; <$f> });
		my $l = $t->{local};
		my ($a, $b) = @{$l->{counts}};
		print "counts $a, $b, carry $l->{carry}, step $t->{step}; " if $a + $b != 2 * $t->{step} + $l->{carry} || $t->{samples} != 4 * ($a + $b);
		print "counts $a, $b are even; " unless $a > 1.5 * $b;' "$uneven" >wrong.txt 2>&1
	[ ! -s wrong.txt ] || problem "$(cat wrong.txt)"
}

# The labels of a replica are random for one period, late in the run: blocks of it are set aside then, and none before.
test_poisoned() {
	local inject=() step
	for step in 197 198 199 200; do inject+=(--inject poison@step=$step,rank=3); done
	head -c 660 text.txt >few.txt # learnt by heart, so that other labels matter
	"$ling" tokenize --out few few.txt >/dev/null
	train 4 poisoned $local schedule.peak_lr=1e-2 data.train=few data.valid=off model.num_experts=6 train.batch=16 local.warmup_steps=140 \
		local.steps=4 train.steps=204 local.anomaly_warmup=5 local.anomaly_decay=0.8 local.anomaly_deviations=4 "${inject[@]}"
	grep '"synchronisation"' poisoned/events.jsonl | grep -o '"step":[0-9]*\|"blocks_set_aside":.*\]' | paste -d' ' - - >aside.txt
	[ "$(grep -c '"blocks_set_aside":\[0,0,0,0\]$' aside.txt)" -ge 14 ] || problem "$(cat aside.txt)"
	grep -q '"step":200 "blocks_set_aside":\[0,0,0,[1-4]\]' aside.txt || problem "not set aside: $(cat aside.txt)"
}

# The plan counts what parallel.reduce bf16 keeps of a rank's changes: 2 bytes for each of its weights, and of one more; AdamW's moments are 8.
test_plan() {
	local kind
	for kind in f32 bf16; do
		"$ling" info tiny.yaml --ranks 4 $local local.ranks=2 parallel.reduce=$kind --json >$kind.json 2>err.txt || problem "$(cat err.txt)"
	done
	jq -es '.[1].memory_bytes.reduction - .[0].memory_bytes.reduction == .[0].memory_bytes.optimizer / 4 + 2 and
		.[1].memory_bytes.total > .[0].memory_bytes.total' f32.json bf16.json >/dev/null || problem "$(cat f32.json bf16.json)"
}

# The benchmark is of the ranks of all replicas, each with its part of the batch.
test_bench() {
	ranks 2 "$ling" bench tiny.yaml parallel.sync=local --steps 1 --json >bench.json 2>err.txt || problem "$(cat err.txt)"
	jq -e '.ranks == 2 and (.tokens_per_second * .step_seconds / 128 - 1 | fabs) < 1e-6' bench.json >/dev/null || problem "$(cat bench.json)"
}

test_refused() {
	expect 1 "do not make two replicas" ranks 1 "$ling" train tiny.yaml train.output_dir=refused parallel.sync=local
	expect 1 "expected a multiple of the 3 replicas" ranks 3 "$ling" train tiny.yaml train.output_dir=refused parallel.sync=local
	expect 1 "3 ranks do not make two replicas or more of 2 ranks" ranks 3 "$ling" train tiny.yaml train.output_dir=refused parallel.sync=local parallel.expert=2
	expect 2 "expected watch or off" "$ling" train tiny.yaml train.output_dir=refused parallel.sync=local spikes.action=ladder
}

check is_synchronous_sgd expert_bias warmup resume mtp hangs clip other_replicas seconds poisoned plan bench refused
finish
