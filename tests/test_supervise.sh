#!/bin/bash
# ling supervise: kills, hangs, stops, going back and giving up, on one rank and on three. The supervisor is the build with sanitizers; the runs
# that it starts are of the release build, as many are started.
. "$(dirname "$0")/check.sh"
export OMP_NUM_THREADS=1
release=$root/ling
mpirun="mpirun -n 3 --oversubscribe --bind-to none"

# A rank of a run: its process number is in pid.RANK.
cat >rank.sh <<END
#!/bin/bash
echo \$\$ >pid.\${OMPI_COMM_WORLD_RANK:-0}
exec "$release" "\$@"
END
chmod +x rank.sh
head -c 640 "$root/LICENSE" >text.txt
"$release" tokenize --out text text.txt >/dev/null 2>&1 || exit 1
tiny train.micro_batch=1 train.batch=6 train.steps=80 checkpoint.every=3 log.every=50

supervisor=0
trap '[ $supervisor = 0 ] || kill -9 $supervisor 2>/dev/null; kill -9 $(cat pid.* 2>/dev/null) 2>/dev/null' EXIT

# supervise RUN OPTION... -- COMMAND...: begins to supervise a run in the background, and sets supervisor.
supervise() {
	local run=$1
	shift
	rm -f pid.*
	"$ling" supervise --run "$run" --pause 0.05 --grace 2 "$@" >out.txt 2>err.txt &
	supervisor=$!
}

# ended STATUS: waits for the supervisor's end.
ended() {
	local status
	wait $supervisor
	status=$?
	supervisor=0
	[ $status = "$1" ] || problem "exit status $status, expected $1: $(tail -n 5 err.txt)"
	! grep -q 'Sanitizer\|runtime error' err.txt || problem "$(head -c 2000 err.txt)"
}

# events RUN FILTER: of events.jsonl, which must be JSON lines.
events() { jq -r "$2" "$1/events.jsonl" 2>&1; }

# same_end UNDISTURBED RUN STEP: weights and moments bit for bit, and in the metrics each step once.
same_end() {
	local step file n=0
	step=$(printf 'step-%07d' "$3")
	for file in "$1/$step"/*.safetensors; do
		same "$file" "$2/$step/$(basename "$file")"
		n=$((n + 1))
	done
	[ $n -ge 2 ] || problem "$1 has no checkpoint of step $3"
	metric step "$2/metrics.jsonl" | cmp -s - <(seq "$3") || problem "$2: steps in the metrics: $(metric step "$2/metrics.jsonl" | tr '\n' ' ')"
	metric loss "$2/metrics.jsonl" | cmp -s - <(metric loss "$1/metrics.jsonl") || problem "$2: other losses"
}

# kills RUN RANKS N: kills a rank of a run that is slowed down N times, each time at a random moment some steps beyond what the run had reached before.
kills() {
	local i best=0
	for ((i = 0; i < $3; i++)); do
		wait_for_lines "$1/metrics.jsonl" $((best + 4))
		sleep 0.0$((RANDOM % 10))
		best=$(lines "$1/metrics.jsonl")
		kill -9 "$(cat pid.$((RANDOM % $2)))" 2>/dev/null
	done
}

test_kills_of_one_rank() {
	"$release" train tiny.yaml train.output_dir=whole1 >/dev/null 2>&1 || problem "the undisturbed run"
	supervise killed1 -- ./rank.sh train tiny.yaml train.output_dir=killed1 --inject slow@step=1,ms=10
	kills killed1 1 4
	ended 0
	same_end whole1 killed1 80
	[ "$(events killed1 'select(.kind == "crash") | .signal' | grep -c 9)" -ge 3 ] || problem "crashes: $(cat killed1/events.jsonl)"
	[ "$(events killed1 'select(.kind == "restart") | .restart' | tail -n 1)" = "$(events killed1 'select(.kind == "end") | .restarts')" ] ||
		problem "restarts: $(cat killed1/events.jsonl)"
	has out.txt "steps lost. Goodput" "crash at step" "training again after"
}

test_kills_of_three_ranks() {
	$mpirun "$release" train tiny.yaml train.output_dir=whole3 >/dev/null 2>&1 || problem "the undisturbed run"
	supervise killed3 --json -- $mpirun ./rank.sh train tiny.yaml train.output_dir=killed3 --inject slow@step=1,ms=10
	kills killed3 3 3
	ended 0
	same_end whole3 killed3 80
	json out.txt
	[ "$(jq '.status == 0 and .restarts >= 2 and .crashes == .restarts and .goodput > 0 and .goodput < 1 and
		([.incidents[].steps_lost] | add) == .steps_lost and all(.incidents[]; .detect_seconds < 10)' out.txt)" = true ] || problem "$(cat out.txt)"
}

# The steps take no time to speak of, and a second is ten of them and more.
test_stopped_in_a_step() {
	supervise stopped --hang-least 1 --hang-unseen 15 -- $mpirun ./rank.sh train tiny.yaml train.output_dir=stopped checkpoint.every=off train.steps=200
	wait_for_lines stopped/metrics.jsonl 5
	kill -STOP "$(cat pid.1)"
	ended 0
	grep -qE 'hang: rank 1 on [^ ]+ has been in .*(step [0-9]+) for [1-9][0-9]* s( without a sign)?; rank(s 0, 2 wait| 0 waits) in [a-z ]+ \(number [0-9]+\)' err.txt ||
		problem "$(grep supervise err.txt)"
	[ "$(events stopped 'select(.kind == "hang") | .ranks | map(.rank) | tostring')" = '[1]' ] || problem "$(cat stopped/events.jsonl)"
	metric step stopped/metrics.jsonl | cmp -s - <(seq 200) || problem "steps: $(metric step stopped/metrics.jsonl | tr '\n' ' ')"
	has out.txt "1 hang" "hang at step"
}

# phase RUN RANK: the number of the phase in which a rank is, as its heartbeat says; 5 is a save.
phase() { echo $(($(od -An -tu4 -j$((4096 * (1 + $2) + 48)) -N4 "$1/heartbeat") & 7)); }

test_stopped_in_a_save() {
	local tries=0 pid
	supervise saving --hang-least 1 --hang-unseen 3 -- $mpirun ./rank.sh train tiny.yaml train.output_dir=saving checkpoint.every=1 checkpoint.async=false train.steps=60
	wait_for_lines saving/metrics.jsonl 5
	pid=$(cat pid.1)
	while [ $tries -lt 1000 ]; do
		kill -STOP "$pid" || break
		[ "$(phase saving 1)" != 5 ] || break
		kill -CONT "$pid"
		tries=$((tries + 1))
	done
	ended 0
	grep -qE "hang: rank 1 on [^ ]+ has been in .*the save of step [0-9]+ for .*; process $pid of rank 1 is stopped" err.txt || problem "after $tries tries: $(grep supervise err.txt)"
	[ "$(events saving 'select(.kind == "hang") | .ranks[] | "\(.rank) \(.phase)"')" = "1 save" ] || problem "$(cat saving/events.jsonl)"
	metric step saving/metrics.jsonl | cmp -s - <(seq 60) || problem "steps: $(metric step saving/metrics.jsonl | tr '\n' ' ')"
}

# A supervisor that is killed: the run saves and ends, and the next supervisor waits for that and goes on.
test_killed_supervisor() {
	supervise orphan1 -- ./rank.sh train tiny.yaml train.output_dir=orphan1 train.steps=100000
	wait_for_lines orphan1/metrics.jsonl 20
	kill -9 $supervisor
	local tries=0
	while kill -0 "$(cat pid.0)" 2>/dev/null && [ $tries -lt 1000 ]; do sleep 0.01; tries=$((tries + 1)); done
	has out.txt "stopped after step"
	supervise orphan -- $mpirun ./rank.sh train tiny.yaml train.output_dir=orphan
	wait_for_lines orphan/metrics.jsonl 20
	expect 1 "supervise" "$ling" supervise --run orphan -- true # there is one already
	kill -9 $supervisor
	supervise orphan -- $mpirun ./rank.sh train tiny.yaml train.output_dir=orphan
	ended 0
	same_end whole3 orphan 80
	[ "$(events orphan 'select(.kind == "crash") | .kind' | wc -l)" = 0 ] || problem "$(cat orphan/events.jsonl)"
}

# As long as somebody else holds the directory, nothing is started there; for ever, that is an error.
test_held_directory() {
	mkdir -p held
	flock held sleep 3 &
	sleep 0.2
	expect 1 "" "$ling" supervise --run held --hang-unseen 0.1 -- touch started
	has err.txt "another ling train has been writing there"
	[ ! -e started ] || problem "it was started"
	expect 0 "" "$ling" supervise --run held -- touch started
	has err.txt "another ling train is writing in held; waiting for its end"
	wait
	[ -e started ] || problem "it was not started"
}

# TERM and USR1: the run saves, and the supervisor ends with 3; the same command goes on.
test_stop() {
	local signal ranks
	for signal in USR1 TERM; do
		rm -rf asked
		if [ $signal = TERM ]; then ranks=$mpirun; else ranks=; fi
		supervise asked -- $ranks ./rank.sh train tiny.yaml train.output_dir=asked
		wait_for_lines asked/metrics.jsonl 20
		kill -$signal $supervisor
		ended 3
		has out.txt "stopped after step"
		has err.txt "SIG$signal: the run saves and stops"
		[ "$(events asked 'select(.kind == "end") | .status')" = 3 ] || problem "$(cat asked/events.jsonl)"
	done
	supervise asked -- $mpirun ./rank.sh train tiny.yaml train.output_dir=asked
	ended 0
	same_end whole3 asked 80
	# the command itself ends with 3
	supervise asked1 -- ./rank.sh train tiny.yaml train.output_dir=asked1
	wait_for_lines asked1/metrics.jsonl 20
	kill -TERM "$(cat pid.0)"
	ended 3
}

# Exit status 4: from the checkpoint before; nothing is removed. Three times without progress is enough.
test_go_back() {
	expect 0 "" "$release" train tiny.yaml train.output_dir=back checkpoint.every=10 train.stop_at_step=20
	cat >once.sh <<-END
		#!/bin/bash
		[ -e went ] || { touch went; exit 4; }
		exec "$release" train tiny.yaml train.output_dir=back
	END
	chmod +x once.sh
	supervise back -- ./once.sh
	ended 0
	same_end whole1 back 80
	[ -e back/gone-back-step-0000020/trainer.json ] || problem "$(ls back)"
	has out.txt "continuing from back/step-0000010"
	[ "$(events back 'select(.kind == "restart") | "\(.from) \(.set_aside[0])"')" = "10 back/gone-back-step-0000020" ] || problem "$(cat back/events.jsonl)"
	supervise back -- sh -c 'exit 4'
	ended 4
	has err.txt "giving up: 3 starts in a row came no further than step 80"
	# further back each time
	[ "$(cd back && echo gone-back-* step-*)" = "gone-back-step-0000020 gone-back-step-0000078 gone-back-step-0000080 step-*" ] || problem "$(ls back)"
	# a run that comes as far as before, and again must go back: first to step 2, then to step 1
	expect 0 "" "$release" train tiny.yaml train.output_dir=deep checkpoint.every=1 checkpoint.keep=9 train.steps=3
	cat >deep.sh <<-END
		#!/bin/bash
		"$release" train tiny.yaml train.output_dir=deep checkpoint.every=1 checkpoint.keep=9 train.steps=3 && exit 4
	END
	chmod +x deep.sh
	supervise deep -- ./deep.sh
	ended 4
	[ "$(events deep 'select(.kind == "restart") | .from' | tr '\n' ' ')" = "2 1 " ] || problem "$(cat deep/events.jsonl)"
}

test_giving_up() {
	supervise nothing -- sh -c 'exit 1'
	ended 1
	has err.txt "giving up: 3 starts in a row came no further than step 0"
	[ "$(events nothing .kind | tr '\n' ' ')" = "crash restart crash restart crash giving_up end " ] || problem "$(cat nothing/events.jsonl)"
	supervise once --max-restarts 0 -- sh -c 'kill -SEGV $$'
	ended 1
	has err.txt "ended by signal 11" "--max-restarts"
	# what the command leaves behind is ended
	supervise left --max-restarts 0 -- sh -c 'setsid sleep 1000 & echo $! >sleeper; exit 1'
	ended 1
	! kill -0 "$(cat sleeper)" 2>/dev/null || problem "a process was left"
	# and one that hangs before it begins
	supervise hung --hang-unseen 0.5 --max-restarts 0 -- sh -c 'trap "" TERM; sleep 1000'
	ended 1
	has err.txt "hang: no rank has begun to train for"
}

# Two starts without a step: on fewer ranks.
test_fewer_ranks() {
	supervise fewer --fewer-ranks "false" --fewer-ranks "mpirun -n 2 --oversubscribe --bind-to none ./rank.sh train tiny.yaml train.output_dir=fewer" \
		-- sh -c 'exit 137'
	ended 0
	has err.txt "with false" "with mpirun -n 2" "signal 9"
	[ "$(events fewer .kind | grep -c crash)" = 4 ] || problem "$(cat fewer/events.jsonl)"
	[ -e fewer/step-0000080/model-00002-of-00002.safetensors ] || problem "$(ls fewer)"
}

test_wrong_use() {
	expect 2 "" "$ling" supervise
	expect 2 "no \`ling train CONFIG\`" "$ling" supervise -- ./other train tiny.yaml
	expect 2 "none.yaml" "$ling" supervise -- "$release" train none.yaml
	expect 2 "" "$ling" supervise --hang-factor 1 -- "$release" train tiny.yaml
	OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1 expect 2 "started by mpirun" "$ling" supervise -- "$release" train tiny.yaml
	# the command's own wrong use, and a command that is not there, are not tried again
	expect 2 "" "$ling" supervise --run wrong -- "$release" train none.yaml
	has err.txt "none.yaml" "not started again"
	expect 2 "" "$ling" supervise --run wrong -- ./not-there
	has err.txt "./not-there: cannot be started" "not started again"
	[ "$(events wrong .kind | tr '\n' ' ')" = "end end " ] || problem "$(cat wrong/events.jsonl)"
	# the run's directory is that of the config, whatever options of ling train there are
	expect 0 "" "$ling" supervise -- "$release" train tiny.yaml train.output_dir=found train.steps=3
	[ "$(events found .kind | tail -n 1)" = "end" ] || problem "$(ls found)"
}

check kills_of_one_rank kills_of_three_ranks stopped_in_a_step stopped_in_a_save killed_supervisor held_directory stop go_back giving_up fewer_ranks wrong_use
finish
