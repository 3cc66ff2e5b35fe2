#!/bin/bash
# Compares the two ways of data.packing on conversations: `windows`, which cut a conversation wherever a window ends, and `documents`, which
# keep it whole. A third is between them: `masked`, windows with data.document_mask, where conversations are cut but see only themselves. Makes 10,000 conversations of log-normal lengths, in which the user tells several things about himself and then asks for each,
# and 500 more that no training sees. Trains a small model with each way and each seed on the same number of tokens, and evaluates all of them
# on the 500 in the same way: each conversation whole and alone. Prints how many conversations were cut, the share of tokens that are padding,
# the loss of the 500 conversations' answers for each seed, and the difference.
#
#   scripts/compare-packing.sh [--help]
#
# SEEDS   the seeds ("1 2 3")
# STEPS   steps of each training, of 1024 tokens (800)
#
# Some five minutes on two cores. Everything is left in build/compare-packing; run it again after an interruption and it goes on.
set -euo pipefail
cd "$(dirname "$0")/.."
[ $# -eq 0 ] || { sed -n '2,/^set/s/^# \?//p' "$0"; [ "$*" = --help ] && exit; exit 2; }
seeds=${SEEDS:-1 2 3}
steps=${STEPS:-800}
out=build/compare-packing
mkdir -p "$out"
make -s ling

perl - "$out" <<'PERL'
use strict;
use warnings;
my $out = shift;
my %values = (
	wear => "red blue green yellow white black brown pink", visit => "Anna Ben Clara David Emma Felix Greta Hugo",
	keep => "cats dogs horses goats parrots rabbits turtles hamsters", pick => "apples pears plums cherries lemons melons peaches figs",
	drink => "tea coffee milk water juice cider cocoa beer", grow => "oaks pines birches maples willows cedars elms beeches",
	use => "hammers saws drills axes spades rakes chisels files", play => "tennis chess golf judo hockey cards football polo",
	collect => "iron gold copper tin zinc silver lead nickel", eat => "bread rice soup pasta cheese beans salad cake",
	love => "Oslo Rome Paris Cairo Lima Delhi Quito Dakar", speak => "Greek Latin Hindi Polish Danish Korean Turkish Arabic");
$_ = [split ' '] for values %values;
# A small generator of our own, so that the text depends on no Perl: Knuth's MMIX, modulo 2^64, of which the upper bits are used.
my $state = 20100;
sub below { use integer; $state = $state * 6364136223846793005 + 1442695040888963407; return ($state >> 33 & 0x7fffffff) % $_[0]; }
sub uniform { return (1 + below(1000000)) / 1000001; }
sub normal { return sqrt(-2 * log uniform()) * cos(6.283185307179586 * uniform()); }
sub shuffled { my @a = @_; return map { splice @a, below(scalar @a), 1 } 1 .. @a; }
for my $file (["train", 10000], ["held-out", 500]) {
	open my $f, ">", "$out/$file->[0].jsonl" or die "$out/$file->[0].jsonl: $!\n";
	for (1 .. $file->[1]) {
		my $things; # how many are told and asked: log-normal, and a conversation fits in a window of 256 tokens
		do { $things = int(4.5 * exp(0.6 * normal()) + 0.5) } until $things >= 1 && $things <= 10;
		my @topics = (shuffled(sort keys %values))[0 .. $things - 1];
		my %told = map { $_ => $values{$_}[below(8)] } @topics;
		my $question = join " ", map { "I $_ $told{$_}." } @topics;
		my @messages;
		for (shuffled(@topics)) {
			push @messages, qq({"role": "user", "content": "$question What do I $_?"}), qq({"role": "assistant", "content": "You $_ $told{$_}."});
			$question = "Good.";
		}
		print $f '{"messages": [', join(", ", @messages), "]}\n";
	}
	close $f or die "$out/$file->[0].jsonl: $!\n";
}
PERL

cat >"$out/config.yaml" <<END
model:
  hidden_size: 128
  num_hidden_layers: 2
  num_attention_heads: 4
  num_key_value_heads: 4
  head_dim: 32
  vocab_size: 512
  num_experts: 8
  num_experts_per_tok: 2
  num_shared_experts: 1
  moe_intermediate_size: 32
  initializer_range: 0.02
  router: { balance_loss_coef: 0.015, balance_loss_scope: micro_batch, z_loss_coef: 1e-4 }
data:
  train: $out/train
  valid: off
  tokenizer: $out/tokenizer.json
  seq_len: 256
  shuffle: true
train: { steps: $steps, micro_batch: 4, batch: 4, grad_clip: 1.0 }
optimizer: { beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }
schedule: { peak_lr: 3e-3, warmup_steps: 30, decay: { steps: $((steps / 3)), shape: linear, final_lr: 0 } }
checkpoint: { every: 200, keep: 1 }
log: { every: 100 }
END
if [ ! -f "$out/held-out.idx" ]; then
	./ling train-tokenizer --vocab-size 512 --out "$out/tokenizer.json" "$out/train.jsonl"
	for part in train held-out; do
		./ling tokenize --tokenizer "$out/tokenizer.json" --out "$out/$part" "$out/$part.jsonl"
	done
fi

for seed in $seeds; do
	for way in windows masked documents; do
		run=$out/$way-$seed
		case $way in masked) keys="data.packing=windows data.document_mask=true" ;; *) keys=data.packing=$way ;; esac
		[ -f "$run.json" ] && continue
		echo
		echo "$way, seed $seed:"
		# shellcheck disable=SC2086 # words are meant to split
		./ling train "$out/config.yaml" $keys train.seed="$seed" train.output_dir="$run" | tee "$run.log"
		./ling eval "$run" --data "$out/held-out" --packing documents --seq-len 256 --json >"$run.json"
	done
done

# The table: shares from the line that ling prints of its training file, losses from ling eval.
loss() { sed 's/.*"loss": \([0-9.e-]*\).*/\1/' "$out/$1-$2.json"; }
echo
printf '%-10s %9s %16s  held-out loss of seeds %s\n' packing padding "documents cut" "$seeds"
for way in windows masked documents; do
	line=$(grep -h '^data.train: ' "$out/$way-${seeds%% *}.log" | head -n 1)
	padding=$(sed -n 's/.* \([0-9.]*%\) of the tokens are padding.*/\1/p' <<<"$line") # windows have none
	printf '%-10s %9s %16s ' $way "${padding:-0%}" "$(sed 's/.*: \([0-9]*\) of [0-9]* documents cut (\([0-9.]*%\)).*/\1 (\2)/' <<<"$line")"
	for seed in $seeds; do
		printf ' %.4f' "$(loss $way "$seed")"
	done
	echo
done
for way in windows masked; do
	for seed in $seeds; do
		echo "$(loss documents "$seed") $(loss $way "$seed")"
	done | awk -v way=$way '{ d = $1 - $2; sum += d; if (NR == 1 || d < least) least = d; if (NR == 1 || d > most) most = d }
		END { printf "documents - %s: mean %+.4f, from %+.4f to %+.4f\n", way, sum / NR, least, most }'
done
