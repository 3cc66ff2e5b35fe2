#!/bin/bash
# What a command meets while it runs: files that others cut short, limits of sizes and of memory, outputs that cannot be written to.
. "$(dirname "$0")/check.sh"
export OMP_NUM_THREADS=1
ling=$root/ling # neither libraries that are loaded before, nor limits of address space, go with sanitizers
faults=$root/build/faults.so

seq 2000 | tr 1-5 'a-e' >text.txt
tiny train.steps=2 train.batch=4 >/dev/null
"$ling" tokenize --out text text.txt >/dev/null && "$ling" train tiny.yaml >/dev/null || exit 1
"$ling" train-tokenizer --vocab-size 266 --out words.json text.txt >/dev/null || exit 1
"$ling" convert-checkpoint run/step-0000002 m.gguf --no-tokenizer >/dev/null && "$ling" convert-checkpoint run/step-0000002 hf >/dev/null || exit 1
model=run/step-0000002

# nothing_left WHAT: there are no temporary files, and no locks.
nothing_left() {
	! compgen -G '*.tmp-*' >/dev/null && ! compgen -G '*.lock' >/dev/null && ! compgen -G '*/.tmp-*' >/dev/null ||
		problem "$1 left $(ls -A -d ./*.tmp-* ./*.lock ./*/.tmp-* 2>/dev/null)"
}

# cut FILE COMMAND...: FILE is cut to nothing as soon as the command has mapped it. The command names it and leaves no temporaries.
cut_file() {
	local file=$1
	shift
	cp "$file" kept
	expect 1 "$file: became shorter while it was read" timeout 20 env LD_PRELOAD="$faults" FAULT_CUT="/$file" "$ling" "$@"
	cp kept "$file"
	nothing_left "$*"
}

test_cut_files() {
	cut_file text.bin train tiny.yaml train.output_dir=other
	cut_file text.idx train tiny.yaml train.output_dir=other
	cut_file text.bin tokenize --decode text
	cut_file text.bin eval $model --data text --seq-len 16
	cut_file $model/model.safetensors generate $model --prompt a --max-tokens 2
	cut_file $model/model.safetensors convert-checkpoint $model new.gguf --no-tokenizer
	cut_file $model/model.safetensors convert-checkpoint $model new
	cut_file $model/optimizer.safetensors train tiny.yaml train.steps=3
	cut_file hf/model.safetensors convert-checkpoint hf new.gguf --no-tokenizer
	cut_file m.gguf convert-checkpoint m.gguf new
	cut_file words.json tokenize --tokenizer words.json --out new text.txt
	cut_file tiny.yaml train tiny.yaml
	cut_file run/metrics.jsonl plot run --out new.png
	[ ! -e new ] && [ ! -e new.gguf ] || problem "made $(ls -d new*)"
	# all ranks end
	ranks 2 env LD_PRELOAD="$faults" FAULT_CUT=/text.bin "$ling" train tiny.yaml train.output_dir=other >out.txt 2>err.txt
	[ $? = 1 ] && has err.txt 'text.bin: became shorter while it was read' || problem "2 ranks: $(head -c 400 err.txt)"
}

check cut_files
finish
