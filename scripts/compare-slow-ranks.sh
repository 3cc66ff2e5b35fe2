#!/bin/bash
# Compares training in step (parallel.sync=step) with local SGD (parallel.sync=local, a rank a replica), by steps and by seconds, when ranks
# are slow. Prints the steps that all ranks together take in a second, the ratio to training in step of the same round, and the range of both.
#
#   scripts/compare-slow-ranks.sh [--help]
#
# ROUNDS    each of the nine runs once in a round, in turn, so that a busy machine is busy for all (3)
# LENGTH    seconds of a run; then it is asked to stop, and by steps it still finishes its period (9)
# WORK_MS   what a step takes (50)
# SLOW      a slow step takes so many times as long (2.5)
# CHANCE    that a step of a rank is slow, in the case `random` (0.05)
# PERIOD    local.steps; local.seconds is PERIOD * WORK_MS (32)
#
# Eight ranks stand for eight machines, on two cores: the work of a step is a sleep of WORK_MS (--inject slow), beside which the steps of a tiny
# model take little time (`none`, the case without slow ranks, shows how little), and a rank that waits yields its core. The cases:
#   none     all steps of all ranks take WORK_MS
#   fixed    all steps of rank 3 take SLOW * WORK_MS
#   random   a step of any rank takes SLOW * WORK_MS with probability CHANCE; in one round the same steps of the same ranks in each run
#
# 95 seconds a round. Everything is left in build/compare-slow-ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || { sed -n '2,/^set/s/^# \?//p' "$0"; [ "$*" = --help ] && exit; exit 2; }
rounds=${ROUNDS:-3}
seconds=${LENGTH:-9}
work=${WORK_MS:-50}
chance=${CHANCE:-0.05}
period=${PERIOD:-32}
slow=$(awk "BEGIN { print $work * ${SLOW:-2.5} }")
period_seconds=$(awk "BEGIN { print $period * $work / 1000 }")
out=build/compare-slow-ranks
rm -rf "$out" && mkdir -p "$out"
make -s ling
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none

./ling tokenize --out "$out/text" docs/training.md >/dev/null
cat >"$out/config.yaml" <<YAML
model:
  hidden_size: 16
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 6
  vocab_size: 257
  num_experts: 6
  num_experts_per_tok: 2
  num_shared_experts: 1
  moe_intermediate_size: 8
data: { train: $out/text, tokenizer: byte, seq_len: 16, shuffle: true }
train: { steps: 1000000, micro_batch: 2, batch: 16 }
checkpoint: { every: off }
schedule: { peak_lr: 3e-3 }
spikes: { action: off }
YAML

declare -A keys=([step]="" [steps]="parallel.sync=local local.steps=$period" [seconds]="parallel.sync=local local.seconds=$period_seconds")

# run CASE WAY ROUND: trains, and appends the steps a second to a file of the case and the way. The time is that from the first step, where the
# ranks write their first `fault`, to the end of the last one, before it is saved. Of several faults of a kind the first in the list comes.
run() {
	local faults=() rank run=$out/run
	[ "$1" != fixed ] || faults=(--inject "slow@step=1,rank=3,ms=$slow")
	for rank in {0..7}; do
		[ "$1" != random ] || faults+=(--inject "slow@step=1,rank=$rank,probability=$chance,ms=$slow")
		faults+=(--inject "slow@step=1,rank=$rank,ms=$work")
	done
	rm -rf "$run"
	# shellcheck disable=SC2086 # words are meant to split
	timeout --foreground -s USR1 "$seconds" mpirun -n 8 --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 ./ling train \
		"$out/config.yaml" train.output_dir="$run" train.seed="$3" ${keys[$2]} "${faults[@]}" >"$out/log" 2>&1 || true
	jq -rs 'map(select(.kind == "fault").time)[0] as $begin | map(select(.kind == "save"))[-1] |
		.step / (.time - .stall_seconds - $begin)' "$run/events.jsonl" >>"$out/$1-$2" || { cat "$out/log"; exit 1; }
}

for ((round = 1; round <= rounds; round++)); do
	for case in none fixed random; do
		for way in step steps seconds; do
			run $case $way $round
		done
	done
	echo "round $round of $rounds is done" >&2
done

echo "8 ranks; a step takes $work ms, a slow one $slow ms; periods of $period steps, or of $period_seconds s; $rounds rounds"
printf '%-8s %-22s %26s   %s\n' "slow" "way" "steps a second" "beside training in step"
for case in none fixed random; do
	for way in step steps seconds; do
		paste "$out/$case-$way" "$out/$case-step" | awk -v case=$case -v way=$way '
			{ rate += $1; ratio += $1 / $2; r = $1 / $2
			  if (NR == 1 || $1 < low) low = $1; if (NR == 1 || $1 > high) high = $1
			  if (NR == 1 || r < least) least = r; if (NR == 1 || r > most) most = r }
			END { printf "%-8s %-22s %8.2f (%6.2f to %6.2f)", case, way == "step" ? "in step" : "local, by " way, rate / NR, low, high
			      if (way != "step") printf "   %+4.0f %% (%+.0f to %+.0f)", 100 * (ratio / NR - 1), 100 * (least - 1), 100 * (most - 1)
			      print "" }'
	done
done
