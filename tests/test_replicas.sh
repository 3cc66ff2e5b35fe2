#!/bin/bash
# Inference on ranks that divide the model and the work: `ling eval` and `ling generate` with --tensor and --expert against one process, to
# the bit where only the data is divided.
. "$(dirname "$0")/check.sh"
ling=$root/ling
export OMP_NUM_THREADS=1

# RANKS,TENSOR,EXPERT of layouts that compute alike to the bit, in a line: the first of each has the fewest ranks.
layouts="1,1,1 2,1,1 4,1,1
2,2,1 4,2,1
2,1,2 4,1,2
4,2,2
4,1,4
4,4,2"

# ---- a model whose heads and experts 4 ranks can divide, and whose vocabulary they cannot divide evenly ----
head -c 3000 "$root/README.md" >text.txt
tiny model.initializer_range=0.2 model.max_position_embeddings=64 model.num_attention_heads=8 model.num_key_value_heads=4 \
	model.num_experts=8 train.micro_batch=4 train.batch=4
"$ling" tokenize --out text text.txt >/dev/null && "$ling" train tiny.yaml >/dev/null || exit 1
model=run/step-0000020

# on RANKS,TENSOR,EXPERT COMMAND...: runs a command of ling, which must succeed; what it prints goes to out.txt and err.txt.
on() {
	local n tensor expert launch=
	IFS=, read -r n tensor expert <<<"$1"
	shift
	[ "$n" = 1 ] || launch="ranks $n"
	$launch "$ling" "$@" --tensor "$tensor" --expert "$expert" >out.txt 2>err.txt ||
		problem "$n ranks, tensor $tensor, expert $expert: exit status $?: $* ($(head -c 600 err.txt))"
}

# near FILE FILE: the same JSON, but for numbers that are near.
near() {
	jq -n --slurpfile a "$1" --slurpfile b "$2" '
		def near($a; $b): ($a | type) == ($b | type) and
			if ($a | type) == "number" then ($a - $b | fabs) <= 1e-5 * ([($a | fabs), 1] | max)
			elif ($a | type) == "object" then ($a | keys) == ($b | keys) and all($a | keys[]; . as $k | near($a[$k]; $b[$k]))
			elif ($a | type) == "array" then ($a | length) == ($b | length) and all(range($a | length); . as $i | near($a[$i]; $b[$i]))
			else $a == $b end;
		near($a; $b)' >near.txt 2>&1
	[ "$(cat near.txt)" = true ] || problem "$1 and $2: $(head -c 300 near.txt) $(head -c 300 "$1") $(head -c 300 "$2")"
}

test_data() {
	local line layout first
	on 1,1,1 eval $model --data text --seq-len 15 --json
	cp out.txt alone.json
	while read -r line; do
		first=
		for layout in $line; do
			on "$layout" eval $model --data text --seq-len 15 --json
			near out.txt alone.json
			[ -n "$first" ] || cp out.txt first.json
			first=done
			same out.txt first.json
			case $layout in
			*,1,1) ! grep -q "^note.*sent" err.txt || problem "whole models send nothing: $(cat err.txt)" ;;
			*) has err.txt " ranks (" "rank 0 sent " "; it waited for others " ;;
			esac
		done
	done <<<"$layouts"
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
}

check data refused
finish
