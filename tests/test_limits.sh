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
	cp text.bin kept # all ranks end
	ranks 2 env LD_PRELOAD="$faults" FAULT_CUT=/text.bin "$ling" train tiny.yaml train.output_dir=other >out.txt 2>err.txt
	[ $? = 1 ] && has err.txt 'text.bin: became shorter while it was read' || problem "2 ranks: $(head -c 400 err.txt)"
	cp kept text.bin
}

# Files may have at most N kB (ulimit -f): the write fails, says so, and what was there before is still there.
limited() {
	local kilobytes=$1 text=$2
	shift 2
	(ulimit -f "$kilobytes" && exec timeout 20 "$ling" "$@") >out.txt 2>err.txt
	[ $? = 1 ] && has err.txt "$text" "raise that with ulimit -f" || problem "$*: $(head -c 400 err.txt)"
	nothing_left "$*"
}

test_file_sizes() {
	seq 100000 >long.txt
	printf '{"body": "%s"}\n' $(seq 400) >eval.jsonl
	echo '- { name: text, type: perplexity, data: eval.jsonl, text: "{body}" }' >tasks.yaml
	echo old | tee new.bin new.idx old.png old.json >/dev/null
	limited 64 "new.bin: cannot write: File too large" tokenize --out new long.txt
	[ "$(cat new.bin new.idx)" = "$(printf 'old\nold')" ] || problem "the old token files are not there"
	rm new.*
	limited 1 "old.png: cannot write: File too large" plot run --out old.png
	limited 1 "old.json: cannot write: File too large" train-tokenizer --vocab-size 300 --out old.json text.txt
	[ "$(cat old.png old.json)" = "$(printf 'old\nold')" ] || problem "the old files are not there"
	limited 8 "cannot write: File too large" convert-checkpoint $model new
	limited 8 "cannot write: File too large" convert-checkpoint $model new.gguf --no-tokenizer
	limited 8 "cannot write: File too large" convert-checkpoint hf step-0000000 --to checkpoint
	limited 8 "samples.jsonl: cannot write: File too large" eval $model --tasks tasks.yaml --out results
	limited 8 "cannot write: File too large" train tiny.yaml train.output_dir=small
	[ ! -e new ] && [ ! -e new.gguf ] && [ ! -e step-0000000 ] && [ ! -e small/step-0000002 ] || problem "made $(ls -d new* step* small/step*)"
	(ulimit -f 1 && exec "$ling" train tiny.yaml train.output_dir=metrics train.steps=12) >out.txt 2>err.txt
	[ $? = 1 ] && has err.txt "metrics.jsonl: cannot write: File too large" || problem "metrics: $(head -c 400 err.txt)"
}

# A limit of memory gives an error that says what is needed, before OpenBLAS or a thread meets it.
test_memory_limits() {
	local kilobytes limit
	for limit in -v -d; do
		for command in "train tiny.yaml train.output_dir=limited" "eval $model --data text --seq-len 16" "generate $model --prompt a" doctor "bench tiny.yaml"; do
			(ulimit $limit 100000 && OMP_NUM_THREADS=2 exec timeout 20 "$ling" $command) >out.txt 2>err.txt
			[ $? = 1 ] && grep -q '^ling: this process needs [0-9]* MB of memory for OpenBLAS and 2 threads, and has [0-9]* MB' err.txt ||
				problem "ulimit $limit, $command: $(head -c 400 err.txt)"
		done
		(ulimit $limit 150000 && exec timeout 20 "$ling" info tiny.yaml) >out.txt 2>err.txt || problem "ulimit $limit, info: $(head -c 400 err.txt)"
	done
	for kilobytes in 70000 180000 200000 230000; do
		(ulimit -v $kilobytes && exec timeout 20 "$ling" train tiny.yaml train.output_dir=limited) >out.txt 2>err.txt
		case $? in
		0) ;;
		1) grep -q '^ling: .* need.*\(MB\|GB\)' err.txt || problem "$kilobytes kB: $(head -c 400 err.txt)" ;;
		*) problem "$kilobytes kB: status $?: $(head -c 400 err.txt)" ;;
		esac
	done
	for kilobytes in 150000 300000; do # rank 1 alone
		ranks 2 bash -c '[ $OMPI_COMM_WORLD_RANK = 0 ] || ulimit -v '$kilobytes'; exec "$@"' - "$ling" train tiny.yaml train.output_dir=limited >out.txt 2>err.txt
		[ $? = 1 ] && grep -q '^ling: rank 1.*: this process needs [0-9]* MB of memory for MPI, OpenBLAS and 1 thread, and has' err.txt ||
			problem "rank 1, $kilobytes kB: $(head -c 400 err.txt)"
	done
}

# Without memory, from the N-th allocation on, a command ends with an error, and nothing temporary is left. What comes before the 40th is
# the libraries' start.
test_no_memory() {
	local command n status
	for command in "tokenize --out new text.txt" "train-tokenizer --vocab-size 262 --out new.json text.txt" "convert-checkpoint $model new" \
			"convert-checkpoint $model new.gguf --no-tokenizer" "plot run --out new.png" "eval $model --tasks tasks.yaml --out results" \
			"train tiny.yaml train.output_dir=new"; do
		status=1
		for ((n = 40; n < 100000; n += 1 + n / 2)); do
			rm -rf new new.* results
			env LD_PRELOAD="$faults" FAULT_MEMORY=$n "$ling" $command >out.txt 2>err.txt
			status=$?
			[ $status = 0 ] && break
			[ $status -le 2 ] && [ -s err.txt ] || problem "$command, allocation $n: status $status: $(head -c 400 err.txt)"
			nothing_left "$command, allocation $n"
		done
		[ $status = 0 ] || problem "$command: always without memory"
	done
}

# Whatever prints and ends with 0 must have printed.
test_full_output() {
	local command
	for command in --version --help --man --completion "train --help" "info --version" "info tiny.yaml" "info $model --json" "train --keys" "tokenize --decode text" \
			"generate $model --prompt a --max-tokens 1" "eval $model --data text --seq-len 16"; do
		"$ling" $command >/dev/full 2>err.txt
		[ $? = 1 ] && [ "$(cat err.txt)" = "ling: cannot write to standard output: No space left on device" ] ||
			problem "$command: $(head -c 400 err.txt)"
	done
}

# A rank whose command line ends it, or that runs another command, ends the job: the others would wait for it.
test_other_command_line() {
	local other
	for other in "train --help" "train --no-such-option" "eval $model --data text --seq-len 16"; do
		ranks 1 "$ling" train tiny.yaml train.output_dir=other : -n 1 "$ling" $other >out.txt 2>err.txt
		[ $? != 0 ] && [ $? != 124 ] && grep -q '^ling: rank 1.*\(ends with its command line, and others go on\|the command differs from rank 0\)' err.txt ||
			problem "$other: $(head -c 400 err.txt)"
	done
	ranks 2 "$ling" train --help >out.txt 2>err.txt || problem "--help on both: $(head -c 400 err.txt)"
}

check cut_files file_sizes memory_limits no_memory full_output other_command_line
finish
