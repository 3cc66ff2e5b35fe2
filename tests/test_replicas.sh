#!/bin/bash
# Inference on ranks that divide the model and the work: `ling eval` with --tensor and --expert against one process, to the bit where only the
# data is divided.
. "$(dirname "$0")/check.sh"
ling=$root/ling
export OMP_NUM_THREADS=1

# RANKS,TENSOR,EXPERT of layouts that compute alike to the bit, in a line: the first of each has the fewest ranks.
layouts="1,1,1 4,1,1
2,2,1 4,2,1
2,1,2 4,1,2
4,2,2
4,1,4
4,4,2"

# ---- a model whose heads and experts 4 ranks can divide, and whose vocabulary they cannot divide evenly ----
head -c 3000 "$root/README.md" >text.txt
tiny model.initializer_range=0.2 model.max_position_embeddings=400 model.num_attention_heads=8 model.num_key_value_heads=4 \
	model.num_experts=8 train.micro_batch=4 train.batch=4
"$ling" tokenize --out text text.txt >/dev/null && "$ling" train tiny.yaml >/dev/null || exit 1
model=run/step-0000020

# on RANKS,TENSOR,EXPERT COMMAND...: runs a command of ling, which must succeed; what it prints goes to out.txt and err.txt.
on() {
	local n tensor expert launch=
	IFS=, read -r n tensor expert <<<"$1"
	shift
	[ "$n" = 1 ] || launch="ranks $n"
	$launch "$ling" "$@" --tensor "$tensor" --expert "$expert" >out.txt 2>err.txt </dev/null || # a launcher would read what a loop reads
		problem "$n ranks, tensor $tensor, expert $expert: exit status $?: $* ($(head -c 600 err.txt))"
}

# near FILE FILE: the same JSON, but for numbers that are near.
near() {
	jq -n --slurpfile a "$1" --slurpfile b "$2" '
		# values that may have the same text, but for rounding
		def near($a; $b): ($a | type) == ($b | type) and
			if ($a | type) == "number" then ($a - $b | fabs) <= 1e-5 * ([($a | fabs), 1] | max)
			elif ($a | type) == "object" then ($a | keys) == ($b | keys) and all($a | keys[]; . as $k | near($a[$k]; $b[$k]))
			elif ($a | type) == "array" then ($a | length) == ($b | length) and all(range($a | length); . as $i | near($a[$i]; $b[$i]))
			else $a == $b end;
		near($a; $b)' >near.txt 2>&1
	[ "$(cat near.txt)" = true ] || problem "$1 and $2: $(head -c 300 near.txt) $(head -c 300 "$1") $(head -c 300 "$2")"
}

# ---- tasks of each kind, some with many samples ----
cat >tasks.yaml <<'END'
- { name: choice, type: multiple_choice, data: choice.jsonl, prompt: "{q} is", options: o, option: " {option}", answer: a,
    examples: { count: 1, seed: 5 }, separator: ". " }
- { name: text, type: perplexity, data: text.jsonl, text: "{body}" }
- { name: words, type: exact_match, data: words.jsonl, prompt: "{q}", answer: a, max_tokens: 9, stop: "e", extract: "(\\w)" }
END
for i in {1..20}; do printf '{"q": "night %d", "o": ["black", "blue", "as high as it is wide"], "a": %d}\n' $i $((i % 3)); done >choice.jsonl
printf '{"body": "the model and the trainer"}\n{"body": "%0100d"}\n' 7 >text.jsonl
for i in {1..17}; do printf '{"q": "%*s %d", "a": "y"}\n' $((i * 2)) the $i; done >words.jsonl

# same_layouts NEAR FILE COMMAND...: runs a command of ling in all layouts, which must write FILE: near what one process writes, by the function
# NEAR, and the same bits in layouts that differ in the number of replicas.
same_layouts() {
	local near=$1 file=$2 line layout first
	shift 2
	while read -r line; do
		first=
		for layout in $line; do
			rm -f "$file"
			on "$layout" "$@"
			[ -s "$file" ] || problem "$layout: no $file: $*"
			[ -n "$first" ] || cp "$file" first.txt
			first=done
			same "$file" first.txt
			[ "$layout" != 1,1,1 ] || cp "$file" alone.txt
			$near "$file" alone.txt
		done
	done <<<"$layouts"
}

test_data() {
	same_layouts near out.txt eval $model --data text --seq-len 15 --json
	has err.txt "note: 4 ranks (1 replica of data 1 x tensor 4, expert 2): rank 0 sent " "; it waited for others "
	on 4,1,1 eval $model --data text --seq-len 15 --json
	! grep -q "^note.*sent" err.txt || problem "whole models send nothing: $(cat err.txt)"
}

test_tasks() {
	same_layouts near results/samples.jsonl eval $model --tasks tasks.yaml --out results
	[ "$(wc -l <results/samples.jsonl)" = 39 ] || problem "samples: $(wc -l <results/samples.jsonl)"
	# a pool that holds only two sequences: requests give their memory back
	on 4,2,2 eval $model --tasks tasks.yaml --out small --kv-tokens 128 --batch 4
	on 4,2,2 eval $model --tasks tasks.yaml --out large
	same small/samples.jsonl large/samples.jsonl
	same small/results.json large/results.json
}

# The results of --out in the order of prompts and draws, without what they were made with.
results() { jq -cS 'del(.made_with)' "$1" | jq -cs 'sort_by(.prompt, .draw)[]'; }

# same_texts FILE FILE: almost all results have the same text. A few draws may fall between two tokens whose probabilities were rounded.
same_texts() {
	local others
	others=$(diff <(jq -c '[.prompt, .draw, .text]' "$1") <(jq -c '[.prompt, .draw, .text]' "$2") | grep -c '^<')
	[ "$(wc -l <"$1")" = "$(wc -l <"$2")" ] && [ "$others" -le 4 ] || problem "$others texts of $1 are not those of $2"
}

test_generate() {
	local drawn="--prompts words.txt --max-tokens 12 --temperature 1 --seed 3 --n 3"
	sed 's/.*"q": "\([^"]*\)".*/\1/' words.jsonl >words.txt
	same_layouts same_texts out.txt generate $model $drawn --json --logprobs
	[ "$(wc -l <out.txt)" = 51 ] || problem "results: $(wc -l <out.txt)"
	on 1,1,1 generate $model $drawn
	cp out.txt text.out
	on 4,1,1 generate $model $drawn
	same out.txt text.out
	# a single prompt, whose text is printed by rank 0 as it comes
	on 1,1,1 generate $model --prompt "the " --max-tokens 12
	cp out.txt one.out
	on 4,1,1 generate $model --prompt "the " --max-tokens 12
	same out.txt one.out
	# --out: a file that another number of ranks goes on with; another layout would round otherwise
	on 2,2,1 generate $model $drawn --out whole.jsonl
	results whole.jsonl >whole.txt
	head -n 20 whole.jsonl >part.jsonl
	on 4,2,1 generate $model $drawn --out part.jsonl
	has err.txt "part.jsonl: 20 of 51 results are there"
	results part.jsonl >part.txt
	same part.txt whole.txt
	cp part.jsonl before.jsonl
	on 4,2,1 generate $model $drawn --out part.jsonl
	same part.jsonl before.jsonl
	ranks 2 "$ling" generate $model $drawn --out part.jsonl >out.txt 2>err.txt && problem "another layout goes on with the file"
	grep -q '^ling: rank 0 on .*part.jsonl:1: was made otherwise: .* --tensor 2' err.txt || problem "$(cat err.txt)"
	[ "$(grep -c '^ling: ' err.txt)" = 1 ] || problem "expected one error line: $(cat err.txt)"
	ranks 2 "$ling" generate $model --prompts - --format text >out.txt 2>err.txt <words.txt && problem "standard input of several ranks"
	grep -q '^ling: with several ranks' err.txt || problem "$(cat err.txt)"
	# shellcheck disable=SC2016 # the shell of each rank expands it
	ranks 2 bash -c 'exec "$0" generate "$1" --prompt $OMPI_COMM_WORLD_RANK' "$ling" $model >out.txt 2>err.txt && problem "ranks with other prompts"
	grep -q "^ling: .*the prompts differs from rank 0's" err.txt || problem "$(cat err.txt)"
}

# The same with sanitizers; what MPI itself leaves behind does not count.
test_sanitized() {
	local ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 ling=$root/build/sanitize/ling
	on 4,2,4 eval $model --tasks tasks.yaml --out sanitized
	on 4,2,2 generate $model --prompts words.txt --max-tokens 4 --json --logprobs
	on 3,1,1 generate $model --prompts words.txt --max-tokens 4 --out sanitized.jsonl
	[ "$(wc -l <sanitized.jsonl)" = 17 ] || problem "results: $(wc -l <sanitized.jsonl)"
}

# An error that a single rank meets amid the work ends all, with its message alone; a rank that dies ends all.
test_faults() {
	local layout n tensor expert start i
	for i in {1..40}; do printf '{"q": "%0300d", "a": "y"}\n' $i; done >long.jsonl
	sed '1,3d; s/words.jsonl/long.jsonl/' tasks.yaml >long.yaml
	for layout in 2,1,1 4,2,1 4,1,4; do
		IFS=, read -r n tensor expert <<<"$layout"
		start=$SECONDS
		# shellcheck disable=SC2016 # the shell of each rank expands it
		KV='--kv-tokens 256' ranks "$n" bash -c '[ $OMPI_COMM_WORLD_RANK = 1 ] || KV=; exec "$0" "$@" $KV' \
			"$ling" eval $model --tasks long.yaml --tensor "$tensor" --expert "$expert" >out.txt 2>err.txt && problem "$layout: no error"
		grep -q '^ling: .*their keys and values need room for' err.txt || problem "$layout: $(cat err.txt)"
		[ "$(grep -c '^ling: ' err.txt)" = 1 ] || problem "$layout: expected one error line: $(cat err.txt)"
		[ ! -s out.txt ] || problem "$layout: a result in spite of the error: $(cat out.txt)"
		[ $((SECONDS - start)) -le 10 ] || problem "$layout: $((SECONDS - start)) seconds"
	done
	# rank 0 alone cannot print, while the other rank of its tensor group would take the next prompts
	start=$SECONDS
	# shellcheck disable=SC2016
	ranks 2 bash -c 'exec "$0" "$@" >/dev/full' "$ling" generate $model --prompt the --max-tokens 5 --temperature 1 --n 200 --batch 4 --tensor 2 \
		2>err.txt && problem "a full disk went unnoticed"
	grep -q '^ling: rank 0 on .*: cannot write to standard output' err.txt || problem "$(cat err.txt)"
	[ $((SECONDS - start)) -le 10 ] || problem "a full disk: $((SECONDS - start)) seconds"
	for i in {1..400}; do cat words.jsonl; done >many.jsonl
	sed 's/words.jsonl/many.jsonl/; s/max_tokens: 9, stop: "e"/max_tokens: 40/' tasks.yaml >many.yaml
	for layout in 4,2,2; do
		IFS=, read -r n tensor expert <<<"$layout"
		start=$SECONDS
		# shellcheck disable=SC2016
		ranks "$n" bash -c 'echo $$ >pid.$OMPI_COMM_WORLD_RANK; exec "$0" "$@"' "$ling" eval $model --tasks many.yaml --out killed --tensor "$tensor" \
			--expert "$expert" >out.txt 2>err.txt &
		sleep 3
		kill -9 "$(cat pid.3)" || problem "$layout: it was over too soon"
		wait $! && problem "$layout: exit status 0 with a rank killed"
		[ $((SECONDS - start)) -le 15 ] || problem "$layout: $((SECONDS - start)) seconds"
		[ ! -e killed/results.json ] || problem "$layout: results in spite of the end"
	done
}

test_refused() {
	expect 1 "--tensor and --expert divide the model among ranks" "$ling" eval $model --data text --seq-len 15 --tensor 2
	for words in "--tensor 3" "--tensor 8" "--expert 3"; do
		# shellcheck disable=SC2086
		ranks 4 "$ling" eval $model --data text --seq-len 15 $words >out.txt 2>err.txt && problem "4 ranks: $words"
		grep -q "^ling: $words\|^ling: ${words% *} is ${words#* }: it must divide the 4 ranks" err.txt || problem "$words: $(cat err.txt)"
		[ "$(grep -c '^ling' err.txt)" = 1 ] || problem "expected one error line: $(cat err.txt)"
	done
	# ranks that disagree
	# shellcheck disable=SC2016 # the shell of each rank expands it
	ranks 2 bash -c 'exec "$0" eval "$1" --data text --seq-len 15 --tensor $((1 + OMPI_COMM_WORLD_RANK))' "$ling" $model >out.txt 2>err.txt &&
		problem "ranks with other options"
	grep -q '^ling: .*--tensor or --expert differs' err.txt || problem "$(cat err.txt)"
	for words in "eval $model --data text --seq-len 1" "generate $model --prompt word --batch 3 --max-tokens 1"; do
		# shellcheck disable=SC2016,SC2086
		ranks 2 bash -c 'exec "$0" "${@:1:$#-1}" "${!#}$OMPI_COMM_WORLD_RANK"' "$ling" $words >out.txt 2>err.txt && problem "ranks with other options: $words"
		grep -q "^ling: .*the command line differs" err.txt || problem "$words: $(cat err.txt)"
	done
}

check data tasks generate sanitized faults refused
finish
