#!/bin/bash
# Ranks that wait for one that is stopped: who is told, of whom, and when. Built with sanitizers and short limits
# (NOTICE_SECONDS and REPORT_SECONDS in the Makefile).
. "$(dirname "$0")/check.sh"
export OMP_NUM_THREADS=1 ASAN_OPTIONS=detect_leaks=0 # MPI leaves some

# Rank numbers come with their process numbers: pid.RANK.
cat >launch.sh <<END
#!/bin/bash
echo \$\$ >pid.\$OMPI_COMM_WORLD_RANK
exec "$ling" "\$@"
END
chmod +x launch.sh
head -c 640 "$root/LICENSE" >text.txt
"$ling" tokenize --out text text.txt >/dev/null 2>&1 || exit 1
tiny train.micro_batch=1 train.batch=6 train.steps=1000000 checkpoint.every=off

# Ends the ranks, also after a failed test.
pids=()
trap 'kill -9 "${pids[@]}" 2>/dev/null' EXIT

# waiting "RANK ..." TEXT: a run of three ranks in which these are stopped says one thing on standard error: TEXT, after
# two seconds or more. When they go on, so does the run, and it ends as it should.
waiting() {
	local stopped=$1 text=$2 run tries=0 earlier before rank status
	rm -rf waits pid.*
	mpirun -n 3 --oversubscribe --bind-to none ./launch.sh train tiny.yaml train.output_dir=waits >out.txt 2>err.txt &
	run=$!
	wait_for_lines waits/metrics.jsonl 5
	mapfile -t pids < <(cat pid.0 pid.1 pid.2)
	earlier=$(grep -c 'no sign of' err.txt) # none, unless the machine is so busy that a rank got no time
	for rank in $stopped; do kill -STOP "${pids[rank]}"; done
	while [ "$(grep -c 'no sign of' err.txt)" = "$earlier" ] && [ $tries -lt 1000 ]; do
		sleep 0.01
		tries=$((tries + 1))
	done
	sleep 0.7 # if others tell too, they do it about now
	grep 'no sign of' err.txt | tail -n +$((earlier + 1)) >told.txt
	grep -q "^ling: waiting for [1-9] s (.*): no sign of rank $text. It is still computing" told.txt ||
		problem "stopped $stopped, expected '$text': $(cat err.txt)"
	[ "$(lines told.txt)" = 1 ] || problem "stopped $stopped: told more than once: $(cat err.txt)"
	before=$(lines waits/metrics.jsonl)
	for rank in $stopped; do kill -CONT "${pids[rank]}"; done
	wait_for_lines waits/metrics.jsonl $((before + 5))
	kill -USR1 "$run"
	wait "$run"
	status=$?
	[ $status = 3 ] || problem "stopped $stopped: exit status $status: $(tail -n 3 err.txt)"
	pids=()
	grep -q 'stopped after step' out.txt || problem "stopped $stopped: $(tail -n 2 out.txt)"
}

host=$(uname -n)
test_last_rank() { waiting 2 "2 on $host"; } # rank 0 tells, and not rank 1 too
test_rank_0() { waiting 0 "0 on $host"; } # rank 1 tells
test_two_ranks() { waiting "0 2" "0 on $host, 2 on $host"; }

check last_rank rank_0 two_ranks
finish
