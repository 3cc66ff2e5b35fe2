#!/bin/bash
# Commands that publish files, with a fault at every call that touches one: afterwards there is the old file, the new one, or none.
. "$(dirname "$0")/check.sh"
export OMP_NUM_THREADS=1
ling=$root/ling # sanitizers do not go with a library that is loaded before them
faults=$root/build/faults.so

printf '{"messages": [{"role": "user", "content": "%s"}, {"role": "assistant", "content": "%s"}]}\n' Hi Yes Why No >new.jsonl
echo "no loss mask here" >old.txt
seq 1000 | tr 1-5 'a-e' >words.txt
head -c 3000 "$root/LICENSE" >text.txt
tiny train.steps=2 train.batch=4 checkpoint.every=1 >/dev/null
"$ling" tokenize --out text text.txt >/dev/null && "$ling" train tiny.yaml >/dev/null || exit 1
model=run/step-0000002
mkdir older && head -1 run/metrics.jsonl >older/metrics.jsonl
printf '{ name: text, type: perplexity, data: %s.jsonl, text: "{body}" }\n' eval >entry.yaml
sed 's/^/- /' entry.yaml >tasks.yaml
printf '{"body": "the model and the trainer"}\n' >eval.jsonl
printf '{"body": "another"}\n{"body": "text"}\n' >other.jsonl
sed 's/eval.jsonl/other.jsonl/' tasks.yaml >other.yaml

# state: what of OUTPUTS there is, as one word; absent without the last of them.
state() {
	local all=($outputs) f
	[ -e "out/${all[-1]}" ] || { echo absent; return; }
	for f in "${all[@]}"; do
		# what a manifest says of times, and results of paths, is not the same in two runs
		if [ -d "out/$f" ]; then (cd "out/$f" && cat -- *.json *.safetensors); elif [ -e "out/$f" ]; then sed 's/"mtime[^,]*,//g' "out/$f"; else echo none; fi
	done | cksum
}

# faults NAME: runs new_NAME with a fault at every call, on nothing and on what old_NAME makes.
faults() {
	local name=$1 before mode old new now n status
	rm -rf out && mkdir out && "new_$name" >/dev/null 2>&1 || problem "$name: does not work"
	new=$(state)
	for before in absent old; do
		[ $before = absent ] || declare -F "old_$name" >/dev/null || continue # what is there is refused
		for mode in "" FAULT_KILL=1; do
			for ((n = 1; n < 400; n++)); do
				rm -rf out && mkdir out
				[ $before = absent ] || "old_$name" >/dev/null 2>&1
				old=$(state)
				"new_$name" LD_PRELOAD="$faults" FAULT_AT=$n $mode >out.txt 2>err.txt
				status=$?
				grep -q '^fault:' err.txt || break
				now=$(state)
				[ "$now" = "$old" ] || [ "$now" = "$new" ] || [ "$now" = absent ] ||
					problem "$name on $before, call $n: neither old nor new: $(cat err.txt)"
				if [ -z "$mode" ]; then
					[ "$now" != absent ] || [ $before = absent ] || problem "$name, call $n: the old file is gone: $(cat err.txt)"
					[ $status != 0 ] || [ "$now" = "$new" ] || problem "$name on $before, call $n: status 0 without a result: $(cat err.txt)"
					grep -q 'fault: \(unlink\|rmdir\)' err.txt || ! compgen -G 'out/*.tmp-*' >/dev/null ||
						problem "$name on $before, call $n: left $(ls out): $(cat err.txt)"
				elif [ $((n % 3)) = 0 ] && [ "$now" = absent ]; then # the next run is not hindered, and clears up
					"new_$name" >/dev/null 2>err.txt || problem "$name after a kill at call $n: $(cat err.txt)"
					! compgen -G 'out/*.tmp-*' >/dev/null && ! compgen -G 'out/*.lock' >/dev/null ||
						problem "$name after a kill at call $n: $(ls out)"
				fi
			done
			[ $n -gt 8 ] && [ $n -lt 400 ] || problem "$name: $n calls"
		done
	done
}

old_tokenize() { "$ling" tokenize --out out/x old.txt; }
new_tokenize() { env "$@" "$ling" tokenize --out out/x new.jsonl; }
test_tokenize() { outputs="x.bin x.mask.bin x.idx" faults tokenize; }

old_vocabulary() { "$ling" train-tokenizer --vocab-size 262 --out out/t.json words.txt; }
new_vocabulary() { env "$@" "$ling" train-tokenizer --vocab-size 266 --out out/t.json words.txt; }
test_vocabulary() { outputs="t.json" faults vocabulary; }

new_directory() { env "$@" "$ling" convert-checkpoint $model out/hf; }
test_directory() { outputs="hf" faults directory; }

new_gguf() { env "$@" "$ling" convert-checkpoint $model out/m.gguf --no-tokenizer; }
test_gguf() { outputs="m.gguf" faults gguf; }

new_checkpoint() { env "$@" "$ling" convert-checkpoint $model out/step-0000000 --to checkpoint; }
test_checkpoint() { outputs="step-0000000" faults checkpoint; }

new_merge() { env "$@" "$ling" merge run/step-0000001 $model --out out/hf; }
test_merge() { outputs="hf" faults merge; }

old_plot() { "$ling" plot older --out out/p.png; }
new_plot() { env "$@" "$ling" plot run --out out/p.png; }
test_plot() { outputs="p.png" faults plot; }

old_eval() { "$ling" eval $model --tasks other.yaml --out out; }
new_eval() { env "$@" "$ling" eval $model --tasks tasks.yaml --out out; }
test_eval() { outputs="samples.jsonl results.json" faults eval; }

# Two at once: the second one says who holds the name, and what is there is whole.
test_two_at_once() {
	local pid
	mkfifo pipe
	"$ling" tokenize --out two pipe >/dev/null 2>first.txt &
	pid=$!
	exec 7>pipe # the first one has opened its input, and so its outputs
	expect 1 "two.bin: process $pid on" "$ling" tokenize --out two old.txt
	echo first >&7
	exec 7>&-
	wait $pid || problem "the first one: $(cat first.txt)"
	[ "$("$ling" tokenize --decode two)" = "first" ] || problem "two: $("$ling" tokenize --decode two)"
	[ "$(ls two.*)" = "$(printf 'two.bin\ntwo.idx\ntwo.json')" ] || problem "left: $(ls two.*)"
}

# A file that is cut short while it is read is an error, plain or packed, also where what is left is whole in itself.
test_cut_short() {
	local file
	perl -e 'print "{\"text\": \"", "x" x 50, "\"}\n" for 1 .. 4096' >cut.jsonl # lines of 64 bytes: cut between two of them
	gzip -1 -c <(perl -e 'srand 1; print "{\"text\": \"", rand, "\"}\n" for 1 .. 40000') >cut.jsonl.gz
	# two zstd frames (RFC 8878) of 65,536 bytes, each one raw block: cut between them
	perl -e 'print "\x28\xb5\x2f\xfd\0\x50", substr(pack("V", 65527 << 3 | 1), 0, 3), "{\"text\": \"", "x" x 65514, "\"}\n" for 1, 2' >cut.jsonl.zst
	for file in cut.jsonl cut.jsonl.gz cut.jsonl.zst; do
		[ "$(stat -c %s $file)" -gt 100000 ] || problem "$file: $(stat -c %s $file) bytes"
		expect 0 "" "$ling" tokenize --out whole $file
		cp $file again && expect 1 "was cut short while it was read: it had $(stat -c %s $file) bytes, 65536 could be read" \
			env LD_PRELOAD="$faults" FAULT_SHRINK=$file "$ling" tokenize --out cut $file
		has err.txt "$file: was cut short"
		cp again $file && expect 1 "the standard input: was cut short" \
			env LD_PRELOAD="$faults" FAULT_SHRINK=$file "$ling" tokenize --out cut --format jsonl - <$file
		cp again $file && expect 1 "$file: was cut short" \
			env LD_PRELOAD="$faults" FAULT_SHRINK=$file "$ling" train-tokenizer --vocab-size 262 --out cut.json $file
	done
	! compgen -G 'cut.[bim]*' >/dev/null && [ ! -e cut.json ] || problem "made $(ls cut.*)"
}

# stopped NAME: begins new_NAME in a new `out` and waits until it stands still before its first rename; `first` and `pid` are its processes.
stopped() {
	local tries=0
	rm -rf out && mkdir out
	"new_$1" LD_PRELOAD="$faults" FAULT_STOP=rename >first.txt 2>&1 &
	first=$!
	while ! pid=$(cat out/*.lock 2>/dev/null | sed -n '1s/^process \([0-9]*\) on .*/\1/p') || ! grep -qs '^State:.T' "/proc/$pid/status"; do
		tries=$((tries + 1))
		[ $tries -lt 1000 ] || { problem "$1: no lock: $(ls out) $(cat first.txt)"; break; }
		sleep 0.01
	done
}

# at_once NAME OUTPUT...: of two new_NAME at once, which make these in `out`, the second one says who holds the name; it
# changes nothing for the first one, which stands still just before a rename and then makes what it makes alone.
at_once() {
	local name=$1 outputs="${*:2}" pid first want
	rm -rf out && mkdir out
	"new_$name" >/dev/null 2>&1 || problem "$name: does not work"
	want=$(state)
	stopped "$name"
	expect 1 "process $pid on" "new_$name"
	[ "$(state)" = absent ] || problem "$name: there is a result of the second one: $(ls out)"
	kill -CONT "$pid"
	wait $first || problem "$name, the first one: $(cat first.txt)"
	[ "$(state)" = "$want" ] || problem "$name: not what one alone makes: $(ls out)"
	! compgen -G 'out/*.tmp-*' >/dev/null && ! compgen -G 'out/*.lock' >/dev/null || problem "$name: left $(ls out)"
}

test_two_of_each() {
	at_once vocabulary t.json
	at_once tokenize x.bin x.mask.bin x.idx
	at_once directory hf
	at_once gguf m.gguf
	at_once checkpoint step-0000000
	at_once eval samples.jsonl results.json
}

# A signal ends a command, which leaves nothing behind; a set of files that is being published is whole before.
test_signals() {
	local name signal first pid status outputs="x.bin x.mask.bin x.idx" want
	for name in vocabulary directory gguf checkpoint plot; do
		for signal in 15 1; do
			stopped $name
			kill -$signal "$pid" && kill -CONT "$pid"
			wait "$first" 2>/dev/null
			status=$?
			[ $status = $((128 + signal)) ] && [ -z "$(ls -A out)" ] || problem "$name, signal $signal: status $status, left $(ls -A out)"
		done
	done
	rm -rf out && mkdir out && new_tokenize >/dev/null 2>&1
	want=$(state)
	stopped tokenize
	kill -TERM "$pid" && kill -CONT "$pid"
	wait "$first" 2>/dev/null
	status=$?
	[ $status = 143 ] && [ "$(state)" = "$want" ] || problem "tokenize while it publishes: status $status, $(ls out)"
	! compgen -G 'out/*.tmp-*' >/dev/null && ! compgen -G 'out/*.lock' >/dev/null || problem "tokenize: left $(ls out)"
	rm -rf out && mkdir out
	mkfifo text.pipe
	"$ling" tokenize --out out/x text.pipe >/dev/null 2>&1 &
	first=$!
	exec 7>text.pipe
	kill -TERM "$first"
	wait "$first" 2>/dev/null
	status=$?
	exec 7>&-
	[ $status = 143 ] && [ -z "$(ls -A out)" ] || problem "tokenize while it reads: status $status, left $(ls -A out)"
	# what is ignored stays so
	(trap '' HUP && exec "$ling" tokenize --out out/x text.pipe) >/dev/null 2>first.txt &
	first=$!
	exec 7>text.pipe
	kill -HUP "$first"
	echo text >&7
	exec 7>&-
	wait "$first" || problem "a signal that is ignored ended it: $(cat first.txt)"
}

# A link in place of an output is replaced, and what it points to stays.
test_links() {
	mkdir -p sd other && echo victim >other/victim
	ln -s ../other/x.idx sd/p.idx && ln -s ../other/victim sd/p.bin
	expect 0 "" "$ling" tokenize --out sd/p old.txt
	expect 0 "" "$ling" tokenize --decode sd/p
	[ "$(cat other/victim)" = victim ] && [ "$(ls other)" = victim ] && [ ! -L sd/p.idx ] && [ ! -L sd/p.bin ] || problem "$(ls -l sd other)"
}

# The reason of a failed write is that of the write.
test_no_room() {
	seq 100000 >big.txt
	(ulimit -f 64 && trap '' XFSZ && exec "$ling" tokenize --out limited big.txt) >out.txt 2>err.txt
	[ $? = 1 ] && has err.txt "limited.bin: cannot write: File too large"
	! compgen -G 'limited*' >/dev/null || problem "left $(ls limited*)"
	expect 1 "/dev/full: cannot write: No space left on device" "$ling" plot run --out /dev/full
	expect 1 "/dev/full: cannot write: No space left on device" "$ling" train-tokenizer --vocab-size 266 --out /dev/full words.txt
}

check tokenize vocabulary directory gguf checkpoint merge plot eval two_at_once two_of_each signals cut_short links no_room
finish
