#!/bin/bash
# ling trace: the traces of real runs, of one rank and of four: totals, a slow rank, trace events, who is in the way of the others. The command is
# the build with sanitizers; the runs are of the release build.
. "$(dirname "$0")/check.sh"
export OMP_NUM_THREADS=1
release=$root/ling
head -c 640 "$root/LICENSE" >text.txt
"$release" tokenize --out text text.txt >/dev/null 2>&1 || exit 1
tiny train.micro_batch=1 train.batch=8 train.steps=60 parallel.expert=2 log.every=50

# A rank of a run: its process number is in pid.RANK.
cat >rank.sh <<END
#!/bin/bash
echo \$\$ >pid.\${OMPI_COMM_WORLD_RANK:-0}
exec "$release" "\$@"
END
chmod +x rank.sh
trap 'kill -9 $(cat pid.* 2>/dev/null) 2>/dev/null' EXIT

# true_of FILE FILTER...: each jq filter must be true.
true_of() {
	local file=$1 filter
	shift
	for filter in "$@"; do
		[ "$(jq "$filter" "$file" 2>&1)" = true ] || problem "not so: $filter: $(head -c 3000 "$file")"
	done
}

# Two runs: of one rank; of four ranks, of which one sleeps 6.6 ms in each step.
"$release" train tiny.yaml train.output_dir=one parallel.expert=1 checkpoint.every=20 >/dev/null 2>&1 || exit 1
ranks 4 "$release" train tiny.yaml train.output_dir=four --inject slow@step=1,rank=2,ms=6.6 >/dev/null 2>&1 || exit 1

test_one_rank() {
	expect 0 "" "$ling" trace one
	has out.txt "1 rank, 60 steps" "the peak of rank 0 as measured when the run began: " "s per rank: " "attention / qkv, weight gradient" "GFLOP/s" "in no operation), "
	! grep -q collective out.txt || problem "collectives of one rank: $(cat out.txt)"
	expect 0 "" "$ling" trace one --steps 7 --json
	json out.txt
	true_of out.txt '.ranks == 1 and .steps == 60 and .waiting_share == 0 and .slowest == null' \
		'(.by_step | length) == 7 and .by_step[6].step == 60 and .by_step[0].step == 54' \
		'([.operations[] | .own_share] | add) + .no_operation_share | . > 0.999 and . < 1.001' \
		'[.operations[] | select(.operation == "attention / qkv") | .count] == [960, 960, 960]' \
		'[.operations[] | select(.operation == "head / logits") | .count] | length == 3 and (unique | length) == 1' \
		'[.operations[] | select(.operation == "reduction")] == []' \
		'all(.operations[]; .median_seconds <= .p99_seconds and .seconds >= 0)' \
		'.median_step_seconds > 0 and .seconds > 0'
	expect 0 "" "$ling" trace one --part save
	has out.txt "save / write"
	expect 0 "" "$ling" trace one --hang
	has out.txt "the run ended after step 60"
	expect 0 "" "$ling" trace one --hang --json
	true_of out.txt '.state == "ended" and .in_the_way == [] and .waiting == []'
	# the next start of the run, and the one before; a start without a trace
	rm -rf again
	cp -r one again
	expect 1 "again/trace-before: cannot open" "$ling" trace again --before
	expect 0 "" "$release" train tiny.yaml train.output_dir=again parallel.expert=1 train.steps=64
	expect 0 "" "$ling" trace again --json
	true_of out.txt '.steps == 4'
	expect 0 "" "$ling" trace again --before --json
	true_of out.txt '.steps == 60'
	# a start that does no step leaves both as they were: nothing is left to do; refused
	expect 0 "" "$release" train tiny.yaml train.output_dir=again parallel.expert=1 train.steps=64
	expect 1 "" "$release" train tiny.yaml train.output_dir=again parallel.expert=1 train.steps=70 model.vocab_size=999
	expect 0 "" "$ling" trace again --json
	true_of out.txt '.steps == 4'
	expect 0 "" "$ling" trace again --before --json
	true_of out.txt '.steps == 60'
	[ ! -e again/trace-oldest ] || problem "trace-oldest stays"
	expect 0 "" "$release" train tiny.yaml train.output_dir=again parallel.expert=1 train.steps=66 trace.events=0
	expect 1 "--before shows the start before" "$ling" trace again
	expect 0 "" "$ling" trace again --before --json
	true_of out.txt '.steps == 4'
}

test_slow_rank() {
	expect 0 "" "$ling" trace four --steps 30 --json
	json out.txt
	true_of out.txt '.ranks_read == 4 and .steps == 60' '.steadily_slow.rank == 2 and .steadily_slow.operation == "batch"' \
		'.steadily_slow.excess_seconds | . > 0.006 and . < 0.02' '.slowest.rank | . >= 0 and . < 4' \
		'[.by_step[] | select(.slowest_rank == 2)] | length > 8' \
		'[.collectives[].collective] | contains(["expert dispatch", "expert return", "gradients", "weights"])' \
		'(.own_share + .waiting_share) | . > 0.999 and . < 1.001' \
		'[.operations[] | select(.operation == "experts / dispatch") | .waiting_seconds] | add > 0' \
		'[.operations[] | select(.operation == "attention / norm" and .pass == "backward") | .waiting_seconds] == [0]' \
		'[.operations[] | select(.operation == "reduction") | .waiting_seconds] | add > 0'
	expect 0 "" "$ling" trace four
	has out.txt "4 ranks, 60 steps" "the slowest is rank" "steadily, by medians: rank 2 takes 6."
	expect 0 "" "$ling" trace four --rank 3
	has out.txt "the peak of rank 3 as measured"
	expect 0 "" "$ling" trace four --rank 3 --json
	true_of out.txt '.peak_flops > 1e8 and .peak_bandwidth > 1e8'
	true_of out.txt '.ranks_read == 1 and .ranks == 4 and .by_rank[0].rank == 3'
	expect 1 "no trace of rank 4" "$ling" trace four --rank 4
	# a step that is checked waits for it too, whoever comes to the check first; the check itself does not count
	ranks 2 "$release" train tiny.yaml train.output_dir=checked train.steps=4 health.every=1 --inject slow@step=1,rank=1,ms=50 >/dev/null 2>err.txt || problem "$(cat err.txt)"
	jq -es 'length == 4 and all(.seconds > 0.05)' checked/metrics.jsonl >/dev/null || problem "seconds of steps: $(metric seconds checked/metrics.jsonl | tr '\n' ' ')"
}

# Strict JSON; a name for each process and thread; slices in order, within each other or apart.
test_events() {
	expect 0 "" "$ling" trace four --perfetto events.json
	json events.json
	true_of events.json '[.traceEvents[] | select(.name == "process_name") | .args.name | sub(" on .*"; "")] == ["rank 0", "rank 1", "rank 2", "rank 3"]' \
		'[.traceEvents[] | select(.name == "thread_name") | "\(.pid) \(.tid)"] | length == 8 and (unique | length) == 8' \
		'[.traceEvents[] | select(.ph == "X" and (.name | startswith("step ")))] | length == 240' \
		'[.traceEvents[] | select(.ph == "X" and .name == "expert dispatch") | .args | select(.layer != null and .step > 0 and .bytes >= 0 and .arrived > 0)] | length > 100' \
		'[.traceEvents[] | select(.ph == "b")] | length > 0' \
		'([.traceEvents[] | select(.ph == "b") | .id2.local] | sort) == ([.traceEvents[] | select(.ph == "e") | .id2.local] | sort)'
	jq -r '.traceEvents[] | select(.ph == "X") | "\(.pid) \(.tid) \(.ts * 1000 | round) \(.dur * 1000 | round) \(.name)"' events.json |
		perl -ne 'my ($p, $t, $ts, $d, $name) = split " ", $_, 5; my $s = $open{"$p $t"} ||= []; my $end = $ts + $d; $n++;
			die "not in order: $_" if $ts < ($last{"$p $t"} // 0); $last{"$p $t"} = $ts;
			pop @$s while @$s && $s->[-1] <= $ts + 1; # a nanosecond for the rounding of doubles
			die "not within: $_" if @$s && $end > $s->[-1] + 1;
			push @$s, $end; $deep = @$s if @$s > $deep;
			END { die "$n slices, $deep deep\n" if $n < 10000 || $deep != 2 }' 2>perl.txt || problem "$(cat perl.txt)"
	"$ling" trace four --perfetto - | cmp - events.json || problem "--perfetto - is not standard output"
	[ ! -e ./- ] || problem "a file of the name -"
	expect 1 "none/events.json" "$ling" trace four --perfetto none/events.json
}

# stop_where RANK FILTER: stops a rank where its place fits the jq filter; sets pid.
stop_where() {
	local tries=0
	pid=$(cat "pid.$1")
	while [ $tries -lt 300 ]; do
		kill -STOP "$pid" || break
		expect 0 "" "$ling" trace hung --hang --json
		[ "$(jq ".places[$1] | $2" out.txt)" = true ] && return
		kill -CONT "$pid"
		sleep 0.0$((RANDOM % 5))
		tries=$((tries + 1))
	done
	problem "rank $1 was never there: $2: $(cat out.txt)"
}

# A rank is stopped in a step, in the exchange of experts and in a save; then one is killed.
test_in_the_way() {
	local pid launcher state
	rm -f pid.*
	mpirun -n 4 --oversubscribe --bind-to none ./rank.sh train tiny.yaml train.output_dir=hung train.steps=100000 checkpoint.every=1 checkpoint.async=false >hung.txt 2>&1 &
	launcher=$!
	wait_for_lines hung/metrics.jsonl 3
	look hung '.state == "goes on" and .ranks_read == 4 and .step >= 3'
	expect 0 "" "$ling" trace hung --hang
	has out.txt "the run goes on in step"
	expect 0 "" "$ling" trace hung --steps 3 # while it is being written
	expect 0 "" "$ling" trace hung --perfetto events.json
	json events.json

	stop_where 2 '.phase == "step" and .collective == null and .operation != null'
	look hung '.state == "stands still" and ([.in_the_way[].rank] == [2]) and ([.waiting[].rank] == [0, 1, 3])'
	expect 0 "" "$ling" trace hung --hang
	grep -qE "^rank 2 on [^ ]+ has been in [a-z_/, -]+( of layer [01])? of step [0-9]+ for [0-9]+ s; ranks? 0.*; process $pid of rank 2 is stopped" out.txt ||
		problem "$(cat out.txt)"
	kill -CONT "$pid"
	stop_where 1 '.phase == "step" and (.collective // "" | startswith("expert "))'
	look hung '.state == "stands still" and ([.in_the_way[].rank] == [1]) and (.text | test("rank 1 on .* has been in the wait for expert [a-z]+ .number [0-9]+. of layer [01] of step .* without a sign"))'
	kill -CONT "$pid"
	stop_where 3 '.phase == "save" or .phase == "write"'
	look hung '.state == "stands still" and ([.in_the_way[].rank] == [3]) and (.text | test("rank 3 on .* the save of step .*process [0-9]+ of rank 3 is stopped"))'
	kill -CONT "$pid"
	look hung '.state == "goes on"'

	# a killed rank, which the launcher does not notice yet; then the whole run
	kill -STOP $launcher
	pid=$(cat pid.0)
	kill -9 "$pid"
	look hung '.state == "stands still" and .in_the_way[0].rank == 0 and (.text | test("process [0-9]+ of rank 0 has ended"))'
	kill -CONT $launcher
	wait $launcher
	look hung '.state == "broke off"'
	state=$(jq -r .text out.txt)
	expect 0 "" "$ling" trace hung --hang
	has out.txt "the run broke off in step" "which is gone" "$state"
}

# A run of 40 ranks, made of the traces of four: the text names some, --json all.
test_many_ranks() {
	local i
	mkdir -p many/trace
	for i in $(seq 0 39); do
		perl -pe 'BEGIN { undef $/; binmode STDIN; binmode STDOUT; ($i) = shift @ARGV } substr($_, 32, 8) = pack("l<l<", $i, 40)' "$i" \
			<four/trace/rank-$((i % 4)).trace >many/trace/rank-$i.trace
	done
	expect 0 "" "$ling" trace many --steps 2
	has out.txt "40 ranks, 60 steps" "these are the 32 ranks with most own time of 40" "the slowest is rank 2 on"
	expect 0 "" "$ling" trace many --json
	true_of out.txt '.by_rank | length == 40'
	expect 0 "" "$ling" trace many --hang --json
	true_of out.txt '.state == "ended" and (.places | length == 40)'
}

test_wrong_use() {
	expect 2 "" "$ling" trace
	expect 2 "" "$ling" trace one --part nothing
	expect 2 "--hang goes alone" "$ling" trace one --hang --steps 3
	expect 2 "--perfetto writes all records" "$ling" trace one --perfetto events.json --json
	expect 1 "none/trace: cannot open: No such file or directory" "$ling" trace none
	has err.txt "trace.events"
	mkdir -p empty/trace
	expect 1 "empty/trace: no traces in it" "$ling" trace empty
	head -c 5000 one/trace/rank-0.trace >empty/trace/rank-0.trace
	expect 1 "empty/trace/rank-0.trace: " "$ling" trace empty
	head -c 5000 "$root/LICENSE" >empty/trace/rank-0.trace
	expect 1 "no trace file" "$ling" trace empty
	# a file of another start is left out
	rm -rf mixed
	cp -r four mixed
	cp one/trace/rank-0.trace mixed/trace/rank-1.trace
	expect 0 "" "$ling" trace mixed --json
	grep -q "warning: mixed/trace/rank-1.trace: .* rank 1 is left out" err.txt || problem "$(cat err.txt)"
	true_of out.txt '.ranks == 4 and .ranks_read == 3'
	rm mixed/trace/rank-0.trace
	expect 0 "" "$ling" trace mixed
	has out.txt "4 ranks"
}

check one_rank slow_rank events many_ranks in_the_way wrong_use
finish
