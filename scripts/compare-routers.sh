#!/bin/bash
# Two ways to balance experts, on the quickstart's text: the first Ling's balance loss, and the expert bias of Ling 2.0; each with its whole
# model, at half the quickstart's width, for each of SEEDS. Prints the validation loss and the load of each layer, and draws the first seed's two
# runs to OUT. Needs jq; the text comes with `scripts/quickstart.sh --text`.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=build/compare-routers
half=(model.hidden_size=128 model.num_attention_heads=4 model.moe_intermediate_size=64 model.num_key_value_heads=2 log.experts=10)
mkdir -p "$folder"
for seed in ${SEEDS:-1 2}; do
	./ling train configs/quickstart.yaml "${half[@]}" train.seed="$seed" train.output_dir="$folder/balance-loss-$seed" >/dev/null
	./ling train configs/quickstart-2.0.yaml "${half[@]}" train.seed="$seed" train.output_dir="$folder/expert-bias-$seed" >/dev/null
	for run in balance-loss expert-bias; do
		jq -rs --arg name "$run, seed $seed" '([.[] | select(.valid_loss)] | last.valid_loss) as $loss | .[-50:] as $last |
			"\($name): validation loss \($loss * 1e4 | round / 1e4); load by layer, largest over mean, mean of 50 steps:" +
			([range($last[0].expert_load | length) as $l | " \([$last[].expert_load[$l]] | add / length * 1e3 | round / 1e3)"] | add)' \
			"$folder/$run-$seed/metrics.jsonl"
	done
done
first=${SEEDS:-1}
./ling plot "$folder/balance-loss-${first%% *}" "$folder/expert-bias-${first%% *}" --out "${OUT:-docs/routers.png}" >/dev/null
