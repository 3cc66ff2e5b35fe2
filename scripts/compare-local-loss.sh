#!/bin/bash
# Compares the loss of local SGD (parallel.sync=local, by steps) with that of training in step on the same tokens: the same small model, text
# and schedule, once in each way for each seed. Prints the loss of the validation at the end, for each seed, the means and the differences.
#
#   scripts/compare-local-loss.sh [--help]
#
# SEEDS     the seeds ("1 2 3")
# STEPS     of each run, of 2048 tokens (450)
# REPLICAS  ranks, each a replica, two to a core on two cores (4)
# PERIOD    local.steps (16)
# WARMUP    local.warmup_steps (STEPS * 3 / 20)
#
# The text is quickstart's: the Debian Reference in English and Chinese. Some five minutes on two cores. Everything is left in
# build/compare-local-loss; run it again, after an interruption or with other seeds or periods, and it takes only the steps that are missing.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || { sed -n '2,/^set/s/^# \?//p' "$0"; [ "$*" = --help ] && exit; exit 2; }
seeds=${SEEDS:-1 2 3}
steps=${STEPS:-450}
replicas=${REPLICAS:-4}
period=${PERIOD:-16}
warmup=${WARMUP:-$((steps * 3 / 20))}
out=build/compare-local-loss
mkdir -p "$out"
make -s ling
scripts/quickstart.sh --text
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none

cat >"$out/config.yaml" <<YAML
model:
  hidden_size: 96
  num_hidden_layers: 3
  num_attention_heads: 4
  num_key_value_heads: 2
  head_dim: 24
  vocab_size: 2048
  num_experts: 8
  num_experts_per_tok: 2
  num_shared_experts: 1
  moe_intermediate_size: 64
  norm_head: true
  router: { balance_loss_coef: 0.015, balance_loss_scope: micro_batch, z_loss_coef: 1e-4 }
data: { train: build/data/train, valid: build/data/valid, tokenizer: build/data/tokenizer.json, seq_len: 128, shuffle: true }
train: { steps: $steps, micro_batch: 4, batch: 16, grad_clip: 1.0 }
optimizer: { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
schedule: { peak_lr: 3e-3, warmup_steps: $((steps / 10)), decay: { steps: $((steps / 3)), shape: linear, final_lr: 1e-5 } }
eval: { every: off }
log: { every: 100 }
YAML

declare -A keys=([step]="" [local]="local.steps=$period local.warmup_steps=$warmup")
declare -A runs=([step]=$out/step-$steps-$replicas [local]=$out/local-$steps-$replicas-$period-$warmup) # and -SEED
for seed in $seeds; do
	for way in step local; do
		run=${runs[$way]}-$seed
		echo "$way, seed $seed:"
		# shellcheck disable=SC2086 # words are meant to split
		mpirun -n "$replicas" --oversubscribe --bind-to none --mca mpi_yield_when_idle 1 ./ling train "$out/config.yaml" \
			train.output_dir="$run" train.seed="$seed" parallel.sync=$way ${keys[$way]}
	done
done

# loss WAY SEED: that of the validation at the end.
loss() { jq -s 'map(select(.valid_loss)) | .[-1].valid_loss' "${runs[$1]}-$2/metrics.jsonl"; }
echo
echo "$replicas replicas, $steps steps of 2048 tokens; local: $warmup steps together, then periods of $period"
printf '%-6s %10s %10s %12s\n' seed "in step" local difference
for seed in $seeds; do
	echo "$seed $(loss step "$seed") $(loss local "$seed")"
done | awk '{ printf "%-6s %10.4f %10.4f %+12.4f\n", $1, $2, $3, $3 - $2; step += $2; local += $3 }
	END { printf "%-6s %10.4f %10.4f %+12.4f\n", "mean", step / NR, local / NR, (local - step) / NR }'
