#!/bin/bash
# `ling watch`: runs of one and two ranks that train, end, go on, hang and die; what a terminal shows.
. "$(dirname "$0")/check.sh"
export OMP_NUM_THREADS=1 LC_ALL=C.UTF-8 TERM=xterm
train=$root/ling # sanitizers take what MPI keeps for leaks

seq 2000 | tr 1-5 'a-e' >text.txt
"$ling" tokenize --out text text.txt >/dev/null || exit 1
tiny train.output_dir=one data.valid=text eval.every=10 eval.max_windows=4
"$train" train tiny.yaml >/dev/null || exit 1
cp -r one damaged && sed -i '5s/.*/{"step": 5, /' damaged/metrics.jsonl

# state RUN JQ: what JQ makes of the state of a run.
state() { "$ling" watch "$1" --once --json 2>/dev/null | jq -r ".runs[0] | $2"; }

# wait_for_state RUN JQ: waits until the state of a run is so, at the most half a minute.
wait_for_state() {
	local tries
	for ((tries = 0; tries < 150; tries++)); do
		[ "$(state "$1" "$2")" = true ] && return
		sleep 0.2
	done
	problem "$1 is never: $2: $(state "$1" .)"
}

# Everything in a directory, with times.
listing() { find "$1" -printf '%p %s %T@ %C@\n' | sort; }

# A run that ended: what is printed is what its files hold; watching writes nothing.
test_ended() {
	listing one >before.txt
	expect 0 "" "$ling" watch one --once
	has out.txt "one  done  step 20/20 100%" "valid $(printf %.4f "$(tail -n 1 one/metrics.jsonl | jq .valid_loss)") at step 20" \
		"loss $(printf %.4f "$(tail -n 1 one/metrics.jsonl | jq .loss)")  █" "saved step 20"
	cp out.txt once.txt
	expect 0 "" "$ling" watch one --once --json
	json out.txt
	jq -e --slurpfile m one/metrics.jsonl '.runs[0] as $r | $m[-1] as $l | $r.step == 20 and $r.total_steps == 20 and $r.loss == $l.loss and
		$r.lr == $l.lr and $r.grad_norm == $l.grad_norm and $r.tokens == $l.tokens and $r.total_tokens == $l.tokens and $r.ended and
		$r.state == "done" and $r.problem == null and $r.waiting == null and $r.seconds_left == null and $r.ranks == 1 and
		$r.loss_curve == [$m[].loss] and $r.incidents == []' out.txt >/dev/null || problem "wrong state: $(cat out.txt)"
	# losses that are further apart than the largest number
	mkdir -p far && jq -c '.loss = (if .step % 2 == 0 then 1.7e308 else -1.7e308 end)' one/metrics.jsonl >far/metrics.jsonl
	expect 0 "" "$ling" watch far --once
	has out.txt "  ▁█▁█▁█▁█▁█▁█▁█▁█▁█▁█"
	expect 0 "" "$ling" watch one # without a terminal, it ends at once
	[ "$(lines out.txt)" = 1 ] && has out.txt "one: done  step 20/20 100%  loss" || problem "$(cat out.txt)"
	listing one >after.txt
	same before.txt after.txt
}

# The peak and its share: in the events, on the progress line, and in the state; the same FLOPs as `ling bench` counts.
test_peak() {
	tiny train.output_dir=peak
	"$ling" train tiny.yaml >train.txt 2>err.txt || problem "$(cat err.txt)"
	grep -q '^step 20/20.* tokens/s  [0-9]*% of peak  0:00 left$' train.txt || problem "$(tail -n 2 train.txt)"
	jq -es '.[0] | .kind == "start" and .peak_flops > 1e8 and .flops_per_token > 0 and .ranks == 1 and .threads == 1 and .total_steps == 20 and
		.total_tokens == 2240' peak/events.jsonl >/dev/null || problem "$(head -n 1 peak/events.jsonl)"
	[ "$(jq -s '.[0].flops_per_token | round' peak/events.jsonl)" = "$("$ling" info tiny.yaml --json | jq '.flops_per_token')" ] ||
		problem "FLOPs of a token: $(head -n 1 peak/events.jsonl) $("$ling" info tiny.yaml --json)"
	# what was said last is the share of that
	[ "$(jq -s --slurpfile e peak/events.jsonl '.[-1].tokens_per_second * $e[0].flops_per_token / $e[0].peak_flops * 1e9 | round' peak/metrics.jsonl)" = \
		"$(state peak '.peak_share * 1e9 | round')" ] || problem "share: $(state peak .peak_share)"
	# under a limit of memory it is not measured
	(ulimit -v 300000 && exec "$train" train tiny.yaml train.output_dir=limited) >train.txt 2>err.txt || problem "limited: $(cat err.txt)"
	! grep -q 'of peak' train.txt || problem "$(tail -n 2 train.txt)"
	[ "$(jq -s '.[0] | .peak_flops == null and has("peak_flops")' limited/events.jsonl)" = true ] || problem "$(head -n 1 limited/events.jsonl)"
	[ "$(state limited '.peak_share == null and .state == "done"')" = true ] || problem "$(state limited .)"
}

# Two ranks: watched from before the run is there to its end.
test_two_ranks() {
	tiny train.output_dir=two train.steps=60 checkpoint.every=20 data.valid=text eval.every=20
	timeout --foreground 60 "$ling" watch two one --every 0.1 >watch.txt 2>watch.err &
	local watch=$!
	wait_for_lines watch.txt 2
	ranks 2 "$train" train tiny.yaml --inject slow@step=1,rank=1,ms=20 >train.txt 2>err.txt || problem "$(cat err.txt)"
	wait $watch
	[ $? = 0 ] || problem "watch: $(cat watch.err)"
	has watch.txt "two: no such directory yet" "one: done  step 20/20" "two: done  step 60/60 100%"
	[ "$(grep -c '^two: training' watch.txt)" -ge 1 ] || problem "no step was seen: $(cat watch.txt)"
	sed -n 's/^two: [a-z ]*  step \([0-9]*\).*/\1/p' watch.txt >steps.txt
	sort -n -c steps.txt 2>/dev/null || problem "the steps do not rise: $(cat steps.txt)"
	[ "$(state two '.ranks == 2 and .saved_step == 60 and .valid_step == 60 and (.time.groups | keys | length) > 3 and .time.waiting > 0 and
		((.time.groups | add) + .time.waiting - 1 | fabs) < 1e-6 and .time.slowest_rank == 1 and .time.slowest_over_mean > 1.2')" = true ] || problem "$(state two .)"
	"$ling" watch two --once >out.txt
	has out.txt "  time  " "  2 ranks, rank 1 is the slowest: it works "
}

# A run that is stopped and goes on, from an earlier checkpoint: the metrics are cut while they are followed.
test_continued() {
	tiny train.output_dir=again train.steps=30 checkpoint.every=10
	"$ling" train tiny.yaml train.stop_at_step=20 >train.txt 2>err.txt || problem "$(cat err.txt)"
	rm -r again/step-0000020
	timeout --foreground 60 "$ling" watch again --every 0.1 --keep >watch.txt 2>&1 &
	local watch=$!
	wait_for_lines watch.txt 1
	"$ling" train tiny.yaml train.stop_at_step=15 >train.txt 2>err.txt || problem "$(cat err.txt)"
	"$ling" train tiny.yaml >train.txt 2>err.txt || problem "$(cat err.txt)"
	wait_for_state again '.step == 30 and .state == "done"'
	sleep 0.3
	kill -TERM $watch
	wait $watch
	[ $? = 0 ] || problem "watch: $(cat watch.txt)"
	has watch.txt "again: done  step 20/30 67%" "again: step 10: resume" "again: step 15: resume" "again: done  step 30/30 100%"
	jq -s '[.[].loss]' again/metrics.jsonl >losses.txt
	state again .loss_curve | jq . >curve.txt
	same losses.txt curve.txt
}

# A rank that is stopped is named; when the processes are gone, the run has died.
test_stopped_rank() {
	local pids job
	tiny train.output_dir=hung train.steps=1000
	ranks 2 "$train" train tiny.yaml --inject stop@step=20,rank=1 >train.txt 2>err.txt &
	job=$!
	wait_for_state hung '.waiting != null'
	"$ling" watch hung --once >out.txt
	has out.txt "hung  training  step 19/1000" "! no progress for " "rank 1 on " "is stopped" "rank 0"
	state hung .waiting | grep -q 'rank 1 on .* has been in .*; rank 0 waits in [a-z]* .*process [0-9]* of rank 1 is stopped' ||
		problem "$(state hung .waiting)"
	mapfile -t pids < <(state hung .waiting | sed -n 's/.*process \([0-9]*\) of rank 1.*/\1/p')
	kill -9 "${pids[@]}" # then mpirun ends the other one
	wait $job
	wait_for_state hung '.state == "died" and .ended'
	expect 1 "hung: died" timeout 20 "$ling" watch hung
	has out.txt "hung: died  step 19/1000" "without an end; at their last sign rank 1 on "
	state hung .waiting | grep -q 'rank 1 on .* has been in .*; rank 0 waits in [a-z]* .*process [0-9]* of rank 1 is gone' ||
		problem "$(state hung .waiting)"
	# so it stands in the report
	expect 0 "" "$ling" report hung --out page.html
	[ "$(perl -0777 -ne 'print $1 if m|id="data">(.*?)</script>|s' page.html | jq -c '.runs[0] | [.state, (.waiting | test("rank 1 on .* has been in"))]')" = '["died",true]' ] ||
		problem "the report does not say that the run died"
}

# What cannot be watched, or not yet.
test_refused() {
	expect 1 "nowhere: there is no such directory" "$ling" watch nowhere --once
	mkdir -p empty && expect 1 "empty: there is no run in it" "$ling" watch empty --once
	mkdir -p dumps && echo 1 >dumps/step-0000001.safetensors
	expect 1 "dumps: there is no run in it" "$ling" watch dumps --once
	expect 1 "dumps: there is no run in it, but other files" timeout 20 "$ling" watch dumps one
	has out.txt "dumps: no run" "one: done"
	expect 2 "one/step-0000020 is a checkpoint; expected the directory of its run: give one" "$ling" watch one/step-0000020
	expect 2 "text.txt is no directory" "$ling" watch one text.txt
	expect 2 "--json prints the state once; give it with --once" "$ling" watch one --json
	expect 2 "" "$ling" watch
	expect 2 "" "$ling" watch one --every 0
	expect 1 "damaged/metrics.jsonl:5: bad JSON" "$ling" watch damaged --once
	has out.txt "damaged  done  step 4/20" "! damaged/metrics.jsonl:5: bad JSON"
	cp -r one worse
	head -c 100 /dev/urandom >worse/heartbeat
	printf '{"step": 5, "kind": 7}\n' >>worse/events.jsonl
	expect 1 "kind" "$ling" watch worse --once
	cp -r one old && rm -r old/heartbeat old/events.jsonl old/trace # as an earlier version left it
	expect 0 "" "$ling" watch old --once
	has out.txt "old  no heartbeat  step 20"
}

# screen SIZE... <OUTPUT: a terminal of COLUMNSxROWS, which has the next size each time that it is cleared. Prints what it shows when the
# program leaves it, and what is wrong: lines that would wrap or scroll, and what is left of an earlier picture.
screen() {
	perl -CSD -e 'my @sizes = map { [split /x/] } @ARGV; @ARGV = ();
		my ($columns, $rows) = @{$sizes[0]}; my ($row, $column, $picture, $clears, @cells, $on) = (0, 0, 0, 0);
		local $/; $_ = <STDIN>;
		while (/\G(?:\e\[(\??)([0-9]*)([A-Za-z])|(.))/gs) {
			my ($private, $number, $what, $sign) = ($1, $2, $3, $4);
			if ($private) { # modes
				last if $number == 1049 && $what eq "l";
			} elsif (!defined $what) {
				if ($sign eq "\r") { $column = 0; }
				elsif ($sign eq "\n") { print "SCROLLED\n" if ++$row >= $rows; }
				elsif (ord $sign < 32 || (ord $sign >= 127 && ord $sign < 160)) { print "CONTROL ", ord $sign, "\n"; }
				else {
					print "WRAPPED at $row: $sign\n" if $column >= $columns;
					$cells[$row][$column++] = [$sign, $picture];
				}
			} elsif ($what eq "K") {
				$#{$cells[$row]} = $column - 1 if $cells[$row] && @{$cells[$row]} > $column;
			} elsif ($what eq "J" && $number eq "2") {
				@cells = ();
				($columns, $rows) = @{shift @sizes} if @sizes;
				$picture++;
			} elsif ($what eq "J") {
				$#{$cells[$row]} = $column - 1 if $cells[$row] && @{$cells[$row]} > $column;
				$#cells = $row if @cells > $row + 1;
			} elsif ($what eq "H") {
				if ($row || $column) {
					for my $r (0 .. $#cells) { for my $c (@{$cells[$r] || []}) {
						print "LEFT OVER in $r: $c->[0]\n" if $c && $c->[1] < $picture;
					} }
					$picture++;
				}
				($row, $column) = (0, 0);
			} else { print "UNKNOWN $what\n"; }
		}
		print join("", map { $_ ? $_->[0] : " " } @{$_ || []}), "\n" for @cells;
	' -- "$@"
}

# in_terminal COMMAND: runs a shell command in a terminal.
in_terminal() {
	timeout 60 script -qec "$1" /dev/null </dev/null >terminal.txt 2>&1
}

test_terminal() {
	local size columns rows wrong
	# runs with a long name, and with incidents whose texts are longer than any line
	cp -r one "a-run-with-a-name-that-is-longer-than-a-narrow-terminal-has-columns"
	cp -r one many
	for i in $(seq 30); do
		printf '{"time": 1, "step": %d, "kind": "save_failed", "reason": "%s"}\n' $i "no room $(printf '\\u001b[31m äöü\\u009b %.0s' $(seq 40))"
	done >>many/events.jsonl
	for size in 100x30 80x24 40x10 24x5 10x3 60x1 5x2; do
		columns=${size%x*} rows=${size#*x}
		in_terminal "stty cols $columns rows $rows; $ling watch a-run* many one damaged --keep --every 0.1 & sleep 0.7; kill -TERM \$!; wait \$!" ||
			problem "$size: status $?: $(tail -c 300 terminal.txt)"
		screen $size <terminal.txt >screen.txt
		wrong=$(grep -E '^(WRAPPED|SCROLLED|CONTROL|LEFT|UNKNOWN)' screen.txt | head -n 3)
		[ -z "$wrong" ] || problem "$size: $wrong"
		has terminal.txt $'\033[?1049h\033[?25l\033[?7l' $'\033[?7h\033[?25h\033[?1049l' # as it was before
		[ "$(wc -L <screen.txt)" -lt $columns ] && [ "$(lines screen.txt)" -le $rows ] || problem "$size: $(cat screen.txt)"
		[ $rows -lt 2 ] || [ $columns -lt 40 ] || has screen.txt "ling watch  "
		[ $size != 100x30 ] || has screen.txt "a-run-with-a-name-that-is-longer-than-a-narrow-terminal-has-columns  done  step 20/20" "many  done" "  loss " \
			"one  done  step 20/20 100%" "damaged  done  step 4/20" "  ! damaged/metrics.jsonl:5: bad JSON" "step 30: save failed, no room ?[31m äöü? ?[31m"
	done
	# while a run trains, lines change; and the size does
	tiny train.output_dir=live train.steps=400 data.valid=text eval.every=50 eval.max_windows=4 spikes.action=off
	in_terminal "stty cols 90 rows 20; $ling watch live --every 0.1 --keep & watch=\$!; $train train tiny.yaml >train.txt 2>&1; stty cols 50 rows 8; sleep 0.5
		kill -TERM \$watch; wait \$watch" || problem "live: status $?: $(tail -c 300 terminal.txt)"
	screen 90x20 50x8 <terminal.txt >screen.txt
	wrong=$(grep -E '^(WRAPPED|SCROLLED|CONTROL|LEFT|UNKNOWN)' screen.txt | head -n 3)
	[ -z "$wrong" ] || problem "live: $wrong"
	[ "$(grep -c -a "ling watch  " terminal.txt)" -ge 3 ] || problem "live: drawn $(grep -c -a "ling watch  " terminal.txt) times"
	[ "$(grep -a -o '\[2J' terminal.txt | wc -l)" -ge 2 ] || problem "live: the new size was not noticed"
	# what stays on the terminal is the last state
	tail -n 8 terminal.txt >tail.txt
	has tail.txt "live  done  step 400/400 100%"
}

check ended peak two_ranks continued stopped_rank refused terminal
finish
