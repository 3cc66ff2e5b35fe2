#!/bin/bash
# Kills runs at random moments, many times, and compares what they end with: not a part of the test suite.
#
#   tests/kill_many.sh [KILLS]        200 kills: half of them on one rank, half on three
#
# A run saves after every third step, so that many kills meet a save; `ling supervise` starts it again. When all kills are done,
# the run may go on to its end. Then weights and moments must be those of a run that was never disturbed, bit for bit, and its metrics must have
# each step once, with the same loss. Exit status 0 when they are.
set -u
cd "$(dirname "$0")/.." || exit 1
kills=${1:-200}
ling=$PWD/ling
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader
rm -rf build/scratch/kill_many && mkdir -p build/scratch/kill_many && cd build/scratch/kill_many || exit 1

cat >rank.sh <<END
#!/bin/bash
echo \$\$ >pid.\${OMPI_COMM_WORLD_RANK:-0}.new && mv pid.\${OMPI_COMM_WORLD_RANK:-0}.new pid.\${OMPI_COMM_WORLD_RANK:-0}
exec "$ling" "\$@"
END
chmod +x rank.sh
head -c 640 ../../../LICENSE >text.txt
"$ling" tokenize --out text text.txt >/dev/null 2>&1 || exit 1
sed 's/steps: 20/steps: 100/; s/micro_batch: 2/micro_batch: 5/; s/batch: 7/batch: 60/' ../../../tests/tiny.yaml >tiny.yaml
printf 'checkpoint:\n  every: 3\nlog:\n  every: 1000\n' >>tiny.yaml

lines() { if [ -f "$1" ]; then wc -l <"$1"; else echo 0; fi; }
# The phase of a rank as its heartbeat says: 5 is a save.
phase() { echo $(($(od -An -tu4 -j$((4096 * (1 + $2) + 48)) -N4 "$1/heartbeat" 2>/dev/null) & 7)); }
failed=0
wrong() { echo "  WRONG: $*"; failed=1; }

# The run has about so many steps for each kill, and some more: 4 must pass between two, so that there is progress.
for ranks in 1 3; do
	n=$((kills / 2))
	[ $ranks = 1 ] || n=$((kills - n))
	steps=$((8 * n + 40))
	command=(./rank.sh)
	[ $ranks = 1 ] || command=(mpirun -n "$ranks" --oversubscribe --bind-to none ./rank.sh)
	run=killed$ranks whole=whole$ranks
	"${command[@]}" train tiny.yaml train.steps=$steps train.output_dir=$whole >/dev/null 2>&1 || wrong "the undisturbed run of $ranks"
	begin=$SECONDS
	rm -f pid.*
	"$ling" supervise --run $run --pause 0.01 --grace 5 --max-restarts 1000000 --json -- "${command[@]}" train tiny.yaml train.steps=$steps \
		train.output_dir=$run >$run.json 2>$run.err &
	supervisor=$!
	best=0 done=0 saves=0
	while [ $done -lt $n ] && kill -0 $supervisor 2>/dev/null; do
		while [ "$(lines $run/metrics.jsonl)" -lt $((best + 4)) ] && kill -0 $supervisor 2>/dev/null; do sleep 0.005; done
		sleep 0.0$((RANDOM % 10))$((RANDOM % 10))
		best=$(lines $run/metrics.jsonl)
		victim=$((RANDOM % ranks))
		pid=$(cat pid.$victim 2>/dev/null) || continue
		# stopped first, so that what is looked at is where it is killed
		kill -STOP "$pid" 2>/dev/null || continue
		if [ "$(phase $run $victim)" = 5 ] || compgen -G "$run/.tmp-step-*" >/dev/null; then saves=$((saves + 1)); fi
		kill -KILL "$pid" 2>/dev/null && done=$((done + 1))
	done
	wait $supervisor
	status=$?
	[ $status = 0 ] || wrong "exit status $status: $(tail -n 3 $run.err)"
	[ $done = "$n" ] || wrong "$done kills of $n"
	step=$(printf 'step-%07d' $steps)
	for file in $whole/"$step"/*.safetensors; do
		cmp -s "$file" "$run/$step/$(basename "$file")" || wrong "$run/$step/$(basename "$file") differs"
	done
	cmp -s <(jq .step $run/metrics.jsonl) <(seq $steps) || wrong "$run/metrics.jsonl has not each step once"
	cmp -s <(jq '[.step, .samples, .tokens, .loss, .grad_norm]' -c $run/metrics.jsonl) <(jq '[.step, .samples, .tokens, .loss, .grad_norm]' -c $whole/metrics.jsonl) ||
		wrong "$run/metrics.jsonl has other numbers than $whole's"
	echo "$ranks rank(s): $done kills, $saves of them while a checkpoint was written, $steps steps, $((SECONDS - begin)) s: $(jq -c 'del(.incidents)' $run.json)"
done
[ $failed = 0 ] && echo "all equal"
exit $failed
