#!/bin/bash
# Saves: in a thread while training goes on, on a full disk, killed in the middle; damaged checkpoints; how often, and how many stay.
. "$(dirname "$0")/check.sh"

# run N [./limited] WORDS: ling train with these words, on N ranks: one of the build with sanitizers, several of the other, since MPI leaks.
run() {
	local n=$1
	shift
	local before=()
	[[ $1 == ./limited ]] && before=("$1") && shift
	if [ "$n" = 1 ]; then
		timeout -k 5 60 "${before[@]}" "$ling" train tiny.yaml "$@"
	else
		ranks "$n" "${before[@]}" "$root/ling" train tiny.yaml "$@"
	fi
}

head -c 3000 "$root/ling.h" >text.txt
"$ling" tokenize --tokenizer byte --out text text.txt >/dev/null 2>&1
tiny checkpoint.every=5 checkpoint.keep=0 train.batch=6

# events KIND RUN: the events of a kind.
events() { grep "\"kind\":\"$1\"" "$2/events.jsonl"; }

# steps RUN: the steps of its checkpoints, in one line.
steps() { (cd "$1" && echo step-*) | sed 's/step-0*//g'; }

# reference: the run that nothing disturbs.
reference() { [ -e whole ] || expect 0 "" "$ling" train tiny.yaml train.output_dir=whole; }

# same_end RUN [STEP]: the run ended with the weights, moments and metrics of `whole`.
same_end() {
	local kind step=step-00000${2:-20}
	for kind in model optimizer; do
		same "whole/$step/$kind.safetensors" "$1/$step/$kind.safetensors"
	done
	cmp -s <(steady whole/metrics.jsonl) <(steady "$1/metrics.jsonl") || problem "metrics of whole and $1 differ"
	[ -z "$(compgen -G "$1/.tmp-*")" ] || problem "left behind: $(ls -A "$1")"
}

# state FILE: a trainer.json less what two runs may differ in.
state() { jq -S 'del(.crc32, .config.checkpoint.async, .config.train.output_dir)' "$1"; }

# A thread writes the same bytes.
test_same_bytes() {
	local n file step
	for n in 1 3; do
		rm -rf thread direct
		run $n train.output_dir=thread checkpoint.async=true >out.txt 2>err.txt || problem "$(cat err.txt)"
		run $n train.output_dir=direct checkpoint.async=false >out.txt 2>err.txt || problem "$(cat err.txt)"
		[ "$(events save thread | jq -c .async | sort | uniq -c | tr -s ' \n' ' ')" = " 1 false 3 true " ] || problem "$n: $(events save thread)"
		[ "$(events save direct | jq -c .async | uniq)" = false ] || problem "$n: $(events save direct)"
		[ "$(steps thread)" = "5 10 15 20" ] && [ "$(steps direct)" = "5 10 15 20" ] || problem "$n: $(ls thread direct)"
		for step in thread/step-*; do
			[ "$(ls "$step")" = "$(ls "direct/${step#thread/}")" ] || problem "$n: other files in $step"
			for file in "$step"/*; do
				if [[ $file == */trainer.json ]]; then
					cmp -s <(state "$file") <(state "direct/${file#thread/}") || problem "$n: another state in $file"
				else
					same "$file" "direct/${file#thread/}"
				fi
			done
		done
		cmp -s <(steady thread/metrics.jsonl) <(steady direct/metrics.jsonl) || problem "$n: other metrics"
		# What training waited for is on the line of the next step.
		[ "$(jq -c 'select(.save_seconds > 0) | .step' thread/metrics.jsonl | tr '\n' ' ')" = "6 11 16 " ] || problem "$n: $(cat thread/metrics.jsonl)"
	done
}

# A save that is due while one is under way waits for it.
test_every_step() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=each checkpoint.every=1 checkpoint.async=true
	[ "$(events save each | jq .step | tr '\n' ' ')" = "$(echo $(seq 20)) " ] || problem "$(events save each)"
	[ "$(steps each)" = "$(echo $(seq 20))" ] || problem "$(steps each)"
	reference
	same_end each
}

test_keep() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=kept checkpoint.every=2 checkpoint.keep=1 checkpoint.keep_every=6 train.steps=15
	[ "$(steps kept)" = "6 12 15" ] || problem "$(steps kept)"
}

# Young's interval is printed, and followed.
test_auto() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=auto checkpoint.every=auto checkpoint.mtbf=1e-9 train.steps=40 checkpoint.keep=0
	has out.txt "checkpoints come every 1 steps: one costs "
	[ "$(steps auto | wc -w)" = 31 ] || problem "after 10 steps each one: $(steps auto)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=rare checkpoint.every=auto checkpoint.mtbf=1000 train.steps=40
	has out.txt "checkpoints come every "
	[ "$(steps rare)" = "10 40" ] || problem "$(steps rare)"
	expect 0 "" run 2 train.output_dir=auto2 checkpoint.every=auto checkpoint.mtbf=1e-9 train.steps=15 checkpoint.keep=0
	[ "$(steps auto2)" = "10 11 12 13 14 15" ] || problem "$(steps auto2)"
	expect 2 "whole number, at least 0, at most 1000000000000, or off, or auto" "$ling" train tiny.yaml checkpoint.every=often
}

# The bytes of ranks and hosts, four ranks on two hosts.
test_balance() {
	expect 0 "" run 4 train.output_dir=hosts checkpoint.hosts=2 train.steps=5
	local r bytes=()
	for r in 1 2 3 4; do
		bytes+=("$(cat hosts/step-0000005/{model,optimizer}-0000$r-of-00004.safetensors | wc -c)")
	done
	awk -v a="${bytes[0]}" -v b="${bytes[1]}" -v c="${bytes[2]}" -v d="${bytes[3]}" 'BEGIN { r = (a + b) / (c + d);
		exit !(r > 0.95 && r < 1.05 && a / b > 0.7 && a / b < 1.4 && c / d > 0.7 && c / d < 1.4) }' || problem "bytes of the ranks: ${bytes[*]}"
	[ "$(events save hosts | jq -c '.rank_bytes_max < 1.1 * .bytes / 4 and .rank_bytes_min > 0.9 * .bytes / 4')" = true ] || problem "$(events save hosts)"
	# Another number of ranks reads them.
	expect 0 "" "$ling" train tiny.yaml train.output_dir=hosts
	[ "$(steps hosts)" = "5 10 15 20" ] || problem "$(steps hosts)"
}

# A program that does not end when a file may not grow further, and whose process number is in pid.RANK.
cat >limited <<'END'
#!/bin/bash
trap '' XFSZ
echo $$ >"pid.${OMPI_COMM_WORLD_RANK-0}"
exec "$@"
END
chmod +x limited

# until_true COMMAND...: waits until the command succeeds, at the most half a minute.
until_true() {
	local tries=0
	until "$@" 2>/dev/null; do
		sleep 0.01
		[ $((tries++)) -lt 3000 ] || return 1
	done
}

# limit RANK BYTES: no file of that rank may grow beyond so many bytes, as if the disk were full; or `unlimited`.
limit() { prlimit --fsize="$2": --pid "$(cat "pid.$1")" || problem "no prlimit"; }

num_failed() { [ "$(events save_failed full | wc -l)" -ge "$1" ]; }
has_checkpoint() { compgen -G 'full/step-*' >/dev/null; }

# start_full N WORDS...: starts a long run in `full` in the background, and returns when it has done some steps.
start_full() {
	rm -rf full pid.*
	run "$1" ./limited train.output_dir=full train.steps=1000000 checkpoint.keep=2 log.every=1000 "${@:2}" >out.txt 2>err.txt &
	until_true grep -q '"step": 2,' full/metrics.jsonl || problem "it did not start: $(cat err.txt)"
}

# full_disk N RANK BYTES ASYNC: writing fails on one of N ranks in the middle of saves; then there is room again.
full_disk() {
	local status
	start_full "$1" checkpoint.every=20 checkpoint.async="$4"
	limit "$2" "$3"
	until_true num_failed 2 || problem "$*: no save has failed: $(cat err.txt)"
	limit "$2" unlimited
	rm -rf full/step-* # those from before it was full, so that a new one shows
	until_true has_checkpoint || problem "$*: no checkpoint"
	kill -USR1 "$(cat pid.0)"
	wait $!
	status=$?
	[ $status = 0 ] || [ $status = 3 ] || problem "$*: exit status $status: $(tail -n 3 err.txt)"
	grep -q "^ling: warning: step [0-9]*: the checkpoint was not saved: .*File too large.* Training goes on" err.txt || problem "$*: $(cat err.txt)"
	[ -z "$(compgen -G 'full/.tmp-*')" ] || problem "$*: left behind: $(ls -A full)"
	# Lines of metrics for which there was no room have waited.
	[ "$(lines full/metrics.jsonl)" = "$(tail -n 1 full/metrics.jsonl | jq .step)" ] || problem "$*: lines of metrics are missing"
}
test_full_disk() { full_disk 1 0 100000 true; full_disk 1 0 100000 false; }
test_full_disk_ranks() { full_disk 3 1 30000 true; full_disk 3 0 30000 false; }

# At the end of a run, or at a stop, there is no next try.
test_full_at_end() {
	local n old
	for n in 1 3; do
		start_full $n checkpoint.every=20
		until_true has_checkpoint
		limit $((n - 1)) 25000
		until_true num_failed 1
		old=$(steps full)
		kill -USR1 "$(cat pid.0)"
		wait $!
		[ $? = 1 ] || problem "$n: expected exit status 1"
		has err.txt "could not be saved: " "Lost is what was trained after step ${old##* }, the newest checkpoint" "the same command goes on from there"
		[ "$(steps full)" = "$old" ] && [ -z "$(compgen -G 'full/.tmp-*')" ] || problem "$n: $(ls -A full)"
		expect 0 "" run $n train.output_dir=full train.steps=$((${old##* } + 1))
		has out.txt "continuing from full/step-"
	done
}

# A disk that has no room for it: said before anything is written.
test_room() {
	mkdir -p small
	unshare -m true 2>/dev/null || return 0 # not allowed here
	cat >in_small <<'END'
mount -t tmpfs -o size=700k none small || exit 77
"$@"
status=$?
ls -A small/run | cat
exit $status
END
	unshare -m bash in_small true >/dev/null 2>&1
	[ $? = 77 ] && return
	expect 1 "step 20 could not be saved: " unshare -m bash in_small "$ling" train tiny.yaml train.output_dir=small/run checkpoint.every=off
	has err.txt "small/run: a checkpoint needs 0.001 GB, and 0.00" "GB are free on this disk"
	! grep -q '^[.]*[a-z]*-step-\|^step-' out.txt || problem "$(cat out.txt)"
}

# damage HOW FILE: cuts a byte off, flips a bit in the middle, or removes it.
damage() {
	local size
	size=$(stat -c %s "$2")
	case $1 in
	cut) truncate -s -1 "$2" ;;
	flip) perl -e 'open my $f, "+<", $ARGV[0] or die; seek $f, $ARGV[1], 0; read $f, my $x, 1; seek $f, $ARGV[1], 0; print $f chr(ord($x) ^ 1)' "$2" $((size / 2)) ;;
	gone) rm "$2" ;;
	esac
}

# A damaged newest checkpoint is named and set aside, and the run goes on from the one before, to the same end.
test_damage() {
	local how file name
	reference
	for file in whole/step-0000020/*; do
		for how in cut flip gone; do
			name=${file##*/}
			rm -rf hurt
			cp -r whole hurt
			rm -r hurt/step-0000005 hurt/step-0000010
			damage $how "hurt/step-0000020/$name"
			if [ $how = flip ]; then
				expect 1 "" "$ling" train tiny.yaml train.output_dir=hurt checkpoint.strict=true
				has err.txt "hurt/step-0000020: this newest checkpoint is damaged: hurt/step-0000020/$name" "checkpoint.strict=false"
				[ "$(steps hurt)" = "15 20" ] || problem "strict, $name: $(ls hurt)"
			fi
			expect 0 "" "$ling" train tiny.yaml train.output_dir=hurt
			has err.txt "the checkpoint of step 20 is damaged and is now hurt/damaged-step-0000020: hurt/step-0000020/$name"
			has out.txt "continuing from hurt/step-0000015"
			events checkpoint_damaged hurt | jq -e ".step == 20 and (.reason | contains(\"$name\"))" >/dev/null || problem "$how $name: $(cat hurt/events.jsonl)"
			same_end hurt
			[ -e hurt/damaged-step-0000020 ] || problem "$how $name: $(ls hurt)"
		done
	done
}

# Two damaged ones; all damaged; several ranks; other commands.
test_damage_more() {
	reference
	rm -rf hurt && cp -r whole hurt
	damage flip hurt/step-0000020/model.safetensors
	damage cut hurt/step-0000015/optimizer.safetensors
	run 3 train.output_dir=hurt checkpoint.every=off >out.txt 2>err.txt || problem "$(cat err.txt)"
	has out.txt "continuing from hurt/step-0000010"
	[ "$(steps hurt)" = "5 10 20" ] && [ -e hurt/damaged-step-0000015 ] && [ -e hurt/damaged-step-0000020 ] || problem "$(ls hurt)"

	rm -rf hurt && cp -r whole hurt
	rm -r hurt/step-0000005 hurt/step-0000010 hurt/step-0000015
	damage flip hurt/step-0000020/optimizer.safetensors
	expect 1 "hurt: none of its 1 checkpoints is whole; what is wrong with the newest: hurt/step-0000020/optimizer.safetensors" "$ling" train tiny.yaml \
		train.output_dir=hurt train.steps=30
	[ "$(steps hurt)" = 20 ] || problem "$(ls hurt)"
	same hurt/metrics.jsonl whole/metrics.jsonl
	damage flip hurt/step-0000020/model.safetensors
	expect 1 "model.safetensors" "$ling" eval hurt --data text --seq-len 16
	expect 1 "model.safetensors" "$ling" generate hurt --prompt abc
	# Damaged ones that were set aside, and nothing else: no run begins anew in silence, unless a supervisor has gone back to the beginning.
	cp -r hurt aside && mv aside/step-0000020 aside/damaged-step-0000020
	expect 1 "aside: its only checkpoints are 1 damaged ones, the newest damaged-step-0000020" "$ling" train tiny.yaml train.output_dir=aside
	same aside/metrics.jsonl whole/metrics.jsonl
	cp -r aside/damaged-step-0000020 aside/gone-back-step-0000015
	expect 0 "" "$ling" train tiny.yaml train.output_dir=aside train.stop_at_step=1
	# Another config is no damage.
	expect 1 "train.seed was 3 in the checkpoint, found 4" "$ling" train tiny.yaml train.output_dir=hurt train.seed=4
	[ "$(steps hurt)" = 20 ] || problem "$(ls hurt)"
}

# Killed while a thread writes: that checkpoint is lost, and nothing else.
test_killed() {
	local n i tries pid
	reference
	for n in 1 3; do
		rm -rf undisturbed
		run $n train.output_dir=undisturbed >out.txt 2>err.txt
		rm -rf killed
		for i in 1 2 3 4; do
			rm -f pid.*
			run $n ./limited train.output_dir=killed checkpoint.every=1 checkpoint.async=true >out.txt 2>err.txt &
			pid=$!
			tries=0
			# The more checkpoints there were, the later.
			until [ "$(compgen -G 'killed/step-*' | wc -l)" -ge $((3 * i)) ] && [ -n "$(compgen -G 'killed/.tmp-*')" ] || [ $((tries++)) -gt 2000 ]; do sleep 0.002; done
			kill -KILL "$(cat pid.$((n - 1)))" 2>/dev/null
			wait $pid && [ "$(steps killed | wc -w)" -lt 20 ] && problem "$n, $i: it was not killed"
		done
		expect 0 "" run $n train.output_dir=killed
		for i in killed/step-0000020/*.safetensors; do
			same "$i" "undisturbed/${i#killed/}"
		done
		cmp -s <(steady killed/metrics.jsonl) <(steady undisturbed/metrics.jsonl) || problem "$n: metrics differ"
		[ -z "$(compgen -G 'killed/.tmp-*')" ] || problem "$n: left behind: $(ls -A killed)"
		rm -rf undisturbed
	done
}

check same_bytes every_step keep auto balance full_disk full_disk_ranks full_at_end room damage damage_more killed
finish
