#!/bin/bash
# Measures evaluation and generation on this machine.
#
#   scripts/measure-inference.sh PART...
#
# speed     a model of the shape of configs/bench.yaml, float32, and the same in llama.cpp (node-llama-cpp from npm, without a GPU, with as many
#           threads): prompts (16 of 512 tokens), the share of the machine's peak; the loss over windows of 512 tokens; one stream of new
#           tokens, 32, and 128. The peak is measured just before and after, see `ling bench`. Rounds in turn: some 30 s each, ROUNDS of them.
# shared    32 prompts of 2,716 tokens that share the first 2,700, 16 new tokens each: as it is, with --no-prefix-sharing, and, where BEFORE
#           names another ling, with that one. Some 30 s, and 30 s more with BEFORE.
# mixed     REQUESTS requests, whose prompts and new tokens have log-normal lengths, with keys and values of 8,192 tokens: beside as many at
#           once as would fit if each reserved the longest length. Some 3 minutes.
# examples  a task of the form of configs/tasks/gsm8k.yaml, with 8 examples and SAMPLES samples: with and without sharing. Some 2 minutes.
# long      the time and the memory of prompts of 8192, 32768 and 65536 tokens; a model of 2 layers. Some 1 minute.
#
# ROUNDS    rounds of speed (5); the others have one
# REQUESTS  (500)
# SAMPLES   (50)
# BEFORE    another ling to compare with, such as that of an earlier commit
# PACKAGES  a folder with node_modules, to which npm adds node-llama-cpp if it is not there (build/measure-inference)
#
# The times are those of two cores without other work. Models are kept in build/measure-inference, 1.3 GB. It needs what
# scripts/install-deps.sh --tests installs.
set -euo pipefail
cd "$(dirname "$0")/.."
[[ $# -gt 0 && $1 != --help ]] || { sed -n '2,/^set/s/^# \?//p' "$0" | sed '$d'; [ "$*" = --help ] && exit; exit 2; }
rounds=${ROUNDS:-5}
requests=${REQUESTS:-500}
samples=${SAMPLES:-50}
out=build/measure-inference
packages=${PACKAGES:-$out}
make -s ling build/measure_inference
measure=build/measure_inference
mkdir -p "$out" "$packages"

# model NAME key=value ...: makes a model in float32 with random weights.
model() {
	local name=$out/$1
	shift
	[ -d "$name" ] && return
	rm -rf "$name-bf16"
	scripts/make-random-ling "$name-bf16" initializer_range=0.02 "$@" >/dev/null
	./ling train-tokenizer --vocab-size 8192 --out "$name-bf16/tokenizer.json" README.md docs/*.md 2>/dev/null >&2
	./ling convert-checkpoint "$name-bf16" "$name" --dtype f32 >/dev/null
	rm -rf "$name-bf16"
}
bench() {
	model bench num_hidden_layers=4 hidden_size=512 num_attention_heads=8 num_key_value_heads=2 head_dim=64 num_experts=64 num_experts_per_tok=6 \
		num_shared_experts=2 moe_intermediate_size=352 vocab_size=8192 max_position_embeddings=8192
}
# field NAME JSON: a number of a JSON object.
field() { sed -n "s/.*\"$1\": *\(-\?[0-9.e+-]*\).*/\1/p" <<<"$2"; }
# fields FORMAT JSON NAME...: some of them, printed.
fields() {
	local format=$1 json=$2 name
	local -a values=()
	shift 2
	for name; do values+=("$(field "$name" "$json")"); done
	# shellcheck disable=SC2059 # it is a format
	printf "$format\n" "${values[@]}"
}
# same COUNT PROMPT NEW SHARED: as many lines of requests.
same() { perl -e 'print "@ARGV[1 .. 3]\n" x $ARGV[0]' "$@"; }
# seconds FILE COMMAND...: how long it takes; FILE gets what it prints.
seconds() {
	local file=$1 begin
	shift
	begin=$(date +%s.%N)
	"$@" >"$file"
	perl -e 'printf "%.1f\n", $ARGV[0] - $ARGV[1]' "$(date +%s.%N)" "$begin"
}

speed() {
	bench
	[ -f $out/bench.gguf ] || ./ling convert-checkpoint $out/bench $out/bench.gguf --dtype f32 >/dev/null
	[ -d "$packages/node_modules/node-llama-cpp" ] || (cd "$packages" && { [ -f package.json ] || echo '{"private": true}' >package.json; } &&
		npm install --ignore-scripts --no-audit --no-fund --loglevel=error node-llama-cpp@3.22.1 >&2)
	cat >"$packages/llama.mjs" <<'END'
// llama.mjs MODEL.gguf THREADS: prints tokens per second of llama.cpp as JSON.
import {getLlama} from "node-llama-cpp";
const threads = Number(process.argv[3]);
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: threads});
const model = await llama.loadModel({modelPath: process.argv[2]});
const random = n => Array.from({length: n}, () => Math.floor(Math.random() * 6000));
const seconds = () => performance.now() / 1000;
async function run(streams, prompt, fresh) {
	const context = await model.createContext({contextSize: prompt + fresh + 1, sequences: streams, batchSize: 2048,
		threads: {ideal: threads, min: threads}});
	const all = Array.from({length: streams}, () => context.getSequence());
	const warm = all[0];
	await warm.evaluateWithoutGeneratingNewTokens(random(8));
	await warm.clearHistory();
	let begin = seconds();
	await Promise.all(all.map(s => s.evaluateWithoutGeneratingNewTokens(random(prompt))));
	const prompts = streams * prompt / (seconds() - begin);
	begin = seconds();
	await Promise.all(all.map(async s => {
		let n = 0;
		if (fresh)
			for await (const token of s.evaluate(random(1), {temperature: 0, yieldEogToken: true}))
				if (++n === fresh)
					break;
	}));
	const rate = streams * fresh / (seconds() - begin);
	await context.dispose();
	return [prompts, rate];
}
const [prompts] = await run(16, 512, 0), [, one] = await run(1, 64, 128), [, many] = await run(32, 64, 32);
console.log(JSON.stringify({prompts, one, many}).replaceAll(":", ": "));
process.exit(0);
END
	perl -e 'srand 1; print pack "v*", map { int rand 6000 } 0 .. 32 * 512' >$out/windows.ids
	local threads ling many more one eval theirs memory
	threads=$(field threads "$(same 1 8 1 0 | $measure $out/bench products=0)")
	: >$out/speed.txt
	for ((i = 0; i < rounds; i++)); do
		ling=$(same 16 512 1 0 | $measure $out/bench sharing=0)
		one=$(same 1 64 128 0 | $measure $out/bench)
		many=$(same 32 64 128 0 | $measure $out/bench)
		more=$(same 128 64 64 0 | $measure $out/bench at_once=128)
		memory=$(./ling doctor --json 2>/dev/null)
		eval=$($measure $out/bench windows=$out/windows.ids 2>/dev/null)
		theirs=$(cd "$packages" && node llama.mjs "$OLDPWD/$out/bench.gguf" "$threads")
		echo "$(field prompt_tokens_per_second "$ling") $(field roof_percent "$ling") $(field tokens_per_second "$eval") $(field roof_percent "$eval")" \
			"$(field new_tokens_per_second "$one") $(field new_tokens_per_second "$many")" \
			"$(field prompts "$theirs") $(field one "$theirs") $(field many "$theirs") $(field roof_gflops "$ling") $(field new_tokens_per_second "$more") $(field memory_gb_per_second "$memory")" | tee -a $out/speed.txt >&2
	done
	perl -e '
		my @rows = map { [split] } <STDIN>;
		sub say_range { my ($name, $format, $f) = @_; my @v = sort { $a <=> $b } map { $f->(@$_) } @rows;
			printf "%-46s $format ($format to $format)\n", $name, $v[@v / 2], $v[0], $v[-1]; }
		say_range("peak, GFLOP/s", "%.0f", sub { $_[9] });
		say_range("prompts, tokens/s", "%.0f", sub { $_[0] });
		say_range("  of the peak, %", "%.1f", sub { $_[1] });
		say_range("  llama.cpp, tokens/s", "%.0f", sub { $_[6] });
		say_range("  ling / llama.cpp", "%.2f", sub { $_[0] / $_[6] });
		say_range("loss over windows, tokens/s", "%.0f", sub { $_[2] });
		say_range("  of the peak, %", "%.1f", sub { $_[3] });
		say_range("one stream, new tokens/s", "%.1f", sub { $_[4] });
		# A token reads 6 of 64 experts and the rest of 4 layers, 20.0 MB each, and the head, 16.8 MB.
		say_range("  of the memory, as ling doctor measures it, %", "%.0f", sub { 100 * 0.097 * $_[4] / $_[11] });
		say_range("  llama.cpp", "%.1f", sub { $_[7] });
		say_range("  ling / llama.cpp", "%.2f", sub { $_[4] / $_[7] });
		say_range("32 streams, new tokens/s", "%.0f", sub { $_[5] });
		say_range("  llama.cpp", "%.0f", sub { $_[8] });
		say_range("  ling / llama.cpp", "%.2f", sub { $_[5] / $_[8] });
		say_range("  32 streams / one", "%.1f", sub { $_[5] / $_[4] });
		say_range("128 streams, new tokens/s", "%.0f", sub { $_[10] });
		say_range("  128 streams / one", "%.1f", sub { $_[10] / $_[4] });' <$out/speed.txt
}

shared() {
	bench
	perl -e 'srand 1; sub text { join "", map { chr(97 + int rand 26) } 1 .. $_[0] } my $s = text(2700); print $s, text(16), "\n" for 1 .. 32' >$out/shared.txt
	local now alone before command=(generate "$out/bench" --tokenizer byte --prompts "$out/shared.txt" --max-tokens 16 --batch 32)
	now=$(seconds $out/shared-now ./ling "${command[@]}")
	alone=$(seconds $out/shared-alone ./ling "${command[@]}" --no-prefix-sharing)
	cmp $out/shared-now $out/shared-alone
	echo "32 prompts with 2,700 tokens in common: $now s; --no-prefix-sharing: $alone s"
	[ -n "${BEFORE:-}" ] || return 0
	before=$(seconds $out/shared-before "$BEFORE" "${command[@]}")
	cmp $out/shared-now $out/shared-before
	echo "$BEFORE: $before s"
}

mixed() {
	bench
	perl -e 'srand 1; sub normal { sqrt(-2 * log(1 - rand)) * cos(6.283185307 * rand) }
		sub size { my ($median, $most) = @_; my $n = int($median * exp(0.8 * normal())); $n < 1 ? 1 : $n > $most ? $most : $n }
		printf "%d %d 0\n", size(96, 768), size(48, 384) for 1 .. shift' "$requests" >$out/mixed.txt
	local pool=8192 longest report at_once
	longest=$(awk '{ n = $1 + $2; m = n > m ? n : m } END { print m }' $out/mixed.txt)
	awk '{ p += $1; n += $2 } END { printf "%d requests, %d tokens in prompts, %d new ones; ", NR, p, n }' $out/mixed.txt
	echo "the longest has $longest, and there is room for $pool"
	for at_once in 256 $((pool / longest)); do
		report=$($measure $out/bench products=0 sharing=0 pool=$pool at_once=$at_once <$out/mixed.txt)
		echo "$at_once at once: $report" >&2
		fields "at most $at_once at once: %.1f s, %d new tokens; %d ran at once, %.1f in the mean; %.0f%% of the pool in use; \
%d times one gave its memory back, %d tokens computed again; %d rows copied; %.1f free ranges, the longest %.0f%% of them" "$report" seconds tokens_out \
			most_running mean_running mean_used_percent preemptions tokens_recomputed copied mean_free_ranges mean_longest_percent
	done
}

examples() {
	bench
	perl -e 'srand 1; my @who = qw(Anna Ben Clara David Emma Felix Greta Hugo); my @what = qw(apples books coins eggs marbles pens shells stamps);
		open my $f, ">", "$ARGV[0]/train.jsonl" or die; open my $g, ">", "$ARGV[0]/test.jsonl" or die;
		for my $i (1 .. 200 + $ARGV[1]) {
			my ($w, $o, $t) = ($who[rand 8], $what[rand 8], $what[rand 8]); my ($n, $k, $p) = (2 + int rand 40, 2 + int rand 9, 2 + int rand 9);
			my ($sum, $all) = ($n * $k, $n * $k * $p);
			printf {$i > 200 ? $g : $f} qq({"question": "$w packs $n boxes with $k $o each. Every one of the $o is sold for $p $t, and the $t are put ) .
				qq(into one bag. How many $t are in the bag?", "answer": "$w has $n * $k = <<$n*$k=$sum>>$sum $o.\\nFor them there are $sum * $p = ) .
				qq(<<$sum*$p=$all>>$all $t.\\n#### $all"}\n);
		}' $out "$samples"
	sed -n '/^- name/,$p' configs/tasks/gsm8k.yaml | sed "s|data: .*/\(t[a-z]*.jsonl\)\(.*\)|data: \1\2|; s/count: 5/count: 8, choose: first/; s/max_tokens: 256/max_tokens: 64/" >$out/gsm8k.yaml
	local option name
	for option in "" --no-prefix-sharing; do
		name=$out/examples$option
		rm -rf "$name"
		# shellcheck disable=SC2086 # none or one
		echo "8 examples, $samples samples, ${option:-with sharing}: $(seconds "$name.txt" ./ling eval $out/bench --tokenizer byte --tasks $out/gsm8k.yaml \
			--out "$name" --batch 16 $option 2>/dev/null) s"
	done
	cmp $out/examples/samples.jsonl $out/examples--no-prefix-sharing/samples.jsonl
	cmp $out/examples/results.json $out/examples--no-prefix-sharing/results.json
	echo "the same results, byte for byte"
}

long() {
	local n report
	model long num_hidden_layers=2 hidden_size=128 num_attention_heads=4 num_key_value_heads=2 head_dim=32 num_experts=8 num_experts_per_tok=2 \
		num_shared_experts=1 moe_intermediate_size=64 vocab_size=8192 max_position_embeddings=65792
	for n in 8192 32768 65536; do
		report=$(same 1 $n 16 0 | $measure $out/long products=0)
		fields "a prompt of $n tokens: %.1f s, at most %.0f MB" "$report" prompt_seconds most_memory_mb
	done
}

for part; do
	[[ " speed shared mixed examples long " = *" $part "* ]] || { echo "$0: $part: no such part" >&2; exit 2; }
done
for part; do "$part"; done
