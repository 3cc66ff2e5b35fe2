#!/bin/bash
# Trains the same small model four times, to show what spikes.action is for: undisturbed, and three times on data of which seven batches are
# poisoned (their targets are random: --inject poison), with spikes.action off, skip and ladder. Draws each run, and prints the mean loss of
# the ten steps after each poisoned stretch and of the last thirty steps.
#
#   scripts/poisoned-run.sh [--help]
#
# The text is that of ling itself: its sources and documents. Gradients are not clipped, and the learning rate is high, so that a bad batch
# does harm. Some two minutes on two cores. Everything is left in build/poisoned-run.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || { sed -n '2,/^set/s/^# \?//p' "$0"; [ "$*" = --help ] && exit; exit 2; }
out=build/poisoned-run
mkdir -p "$out"
make -s ling

cat -- *.c files/*.c commands/*.c docs/*.md >"$out/text.txt"
./ling train-tokenizer --vocab-size 1024 --out "$out/tokenizer.json" "$out/text.txt" >/dev/null
./ling tokenize --tokenizer "$out/tokenizer.json" --out "$out/text" "$out/text.txt"
cat >"$out/run.yaml" <<YAML
model:
  hidden_size: 64
  num_hidden_layers: 3
  num_attention_heads: 4
  num_key_value_heads: 2
  vocab_size: 1024
  num_experts: 8
  num_experts_per_tok: 2
  num_shared_experts: 1
  moe_intermediate_size: 64
  rope_theta: 1e4
  initializer_range: 0.05
data:
  train: $out/text
  tokenizer: $out/tokenizer.json
  seq_len: 64
train:
  output_dir: $out/undisturbed
  steps: 600
  micro_batch: 16
  batch: 16
  grad_clip: off
schedule:
  peak_lr: 1e-2
  warmup_steps: 30
log:
  every: 600
YAML

poison=()
for step in 150 151 152 300 301 302 450; do
	poison+=(--inject "poison@step=$step")
done
rm -rf "$out"/{undisturbed,off,skip,ladder}
./ling train "$out/run.yaml" | tail -n 1
for action in off skip ladder; do
	./ling train "$out/run.yaml" train.output_dir="$out/$action" spikes.action=$action "${poison[@]}" | tail -n 1
done

# mean RUN FIRST LAST: the mean loss of these steps.
mean() { jq -s "map(select(.step >= $2 and .step <= $3) | .loss) | add / length | . * 1000 | round / 1000" "$out/$1/metrics.jsonl"; }
echo "loss of steps     153 to 162   303 to 312   451 to 460   571 to 600"
for run in undisturbed off skip ladder; do
	printf '%-16s  %10s   %10s   %10s   %10s\n' $run "$(mean $run 153 162)" "$(mean $run 303 312)" "$(mean $run 451 460)" "$(mean $run 571 600)"
	./ling plot "$out/$run" --out "$out/$run.png" >/dev/null
done
echo "pictures: $out/undisturbed.png off.png skip.png ladder.png"
