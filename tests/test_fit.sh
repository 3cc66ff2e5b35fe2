#!/bin/bash
# `ling fit`: on tables and on the directories of runs; what is held out, left out and refused.
. "$(dirname "$0")/check.sh"

# table NAME FILTER: makes NAME.tsv of the runs of a grid: 4 sizes x 4 numbers of tokens at one learning rate; at the best of each size 4
# more learning rates, and 2 more seeds of one; FILTER is a Perl condition that chooses the rows by $n, $d, $r, $s, $moe.
table() {
	perl -e 'my ($filter) = @ARGV; srand 5;
		print join("\t", qw(run parameters active_parameters non_embedding active_non_embedding tokens flops loss learning_rate batch_tokens
			seed activation_ratio granularity)), "\n";
		for my $moe (1, 0) { for my $n (1e6, 2e6, 5e6, 12e6) { for my $t (5, 10, 20, 40) { for my $r (0.25, 0.5, 1, 2, 4) { for my $s (1 .. 3) {
			my $d = $n * $t;
			next if ($r != 1 || !$moe) && $t != 20 || $s > 1 && ($n != 5e6 || $r != 1 || !$moe) || $r != 1 && !$moe;
			next unless eval $filter;
			my $c = 6 * $n * $d;
			my $noise = 0.001 * (rand() + rand() + rand() - 1.5) * 2;
			my $loss = (1.7 + ($moe ? 1 : 1.25) * (3e6 / $n) ** 0.34 + 1.5 * (3e7 / $d) ** 0.28 + 0.05 * log($r) ** 2) * exp($noise);
			printf "%s-%d-%d-%g-%d\t%d\t%d\t%d\t%d\t%d\t%.6g\t%.6f\t%.6g\t8192\t%d\t%g\t%s\n", $moe ? "moe" : "dense", $n / 1e6, $t, $r, $s,
				$moe ? 3 * $n : $n, $n, $moe ? 2.9 * $n : 0.9 * $n, 0.9 * $n, $d, $c, $loss, 3 * $c ** -0.15 * $r, $s,
				$moe ? 0.25 : 1, $moe ? 4 : "-";
		} } } } }' "$2" >"$1.tsv"
}

test_table() {
	table all 1
	expect 0 "" "$ling" fit all.tsv --json
	cp out.txt all.json
	json all.json
	# 16 points, 2 more seeds of 4 of them, 16 runs of other learning rates, 4 dense
	jq -e '.runs == 44 and .left_out == [] and .other_activation_ratio == 4 and .seed_noise.runs == 12 and .seed_noise.settings == 4 and
		(.seed_noise.percent > 0.005 and .seed_noise.percent < 0.5) and (.compute.draws | length) == 999' all.json >/dev/null || problem "$(head -c 600 all.json)"
	jq -e '.size | .points == 24 and .column == "active_parameters" and .parameters.E.low < 1.7 and .parameters.E.high > 1.7 and
		.parameters.a.low < 0.34 and .parameters.a.high > 0.34 and .parameters.b.low < 0.28 and .parameters.b.high > 0.28' all.json >/dev/null ||
		problem "size: $(jq -c .size.parameters all.json)"
	# the largest is 12e6 parameters and 40 tokens for each, and nothing else is within a tenth of its compute
	jq -e '[.compute, .size][].held_out | .run == "moe-12-40-1-1" and .without == [.run] and (.ratio - 2 | fabs) < 1e-6 and
		(.error - (.predicted - .loss) | fabs) < 1e-9 and (.percent - 100 * .error / .loss | fabs) < 1e-9' all.json | sort -u >out2.txt
	[ "$(cat out2.txt)" = true ] || problem "held out: $(jq -c '[.compute, .size][].held_out' all.json)"
	jq -e '.size.held_out | .low < .loss and .loss < .high and (.percent | fabs) < 0.5' all.json >/dev/null || problem "$(jq -c .size.held_out all.json)"
	# the law of the others does not know the run
	jq -e '.size.held_out.law.points == 23' all.json >/dev/null || problem "fitted to the held-out run"
	# the best learning rate is 3 C^-0.15; 0.1 is what the noise moves the lowest point of a quadratic by
	jq -e '.learning_rate | .points == 4 and (.exponent.value + 0.15 | fabs) < 0.02 and ([.optima[].method] | unique) == ["quadratic"]' all.json >/dev/null ||
		problem "$(jq -c .learning_rate all.json)"
	jq -e '.leverage.families | length == 1 and .[0].activation_ratio == 0.25 and (.[0].at | length) == 9 and ([.[0].at[] | .leverage > 1] | all)' all.json >/dev/null ||
		problem "$(jq -c .leverage all.json)"
	jq -e '[.not_fitted[].law] == ["batch"]' all.json >/dev/null || problem "$(jq -c .not_fitted all.json)"
	expect 0 "" "$ling" fit all.tsv
	has out.txt "L = E + A N^-a + B D^-b, 24 runs, N: active_parameters" "held out: moe-12-40-1-1, 3.456e+16 FLOPs, 2.00 times the largest of the others" \
		"noise between seeds" "best learning rate = " "efficiency leverage at activation ratio 0.25, granularity 4" "not fitted: batch"
	# names that agree in their first 100 bytes
	awk -F '\t' -v OFS='\t' 'NR > 1 { for (i = 0; i < 10; i++) $1 = "long-names-" $1 } { print }' all.tsv | sed 's/moe/\x01moe/' >long.tsv
	expect 0 "" "$ling" fit long.tsv --json --draws 99
	json out.txt
	[ "$(jq .runs out.txt)" = 44 ] || problem "long names: $(head -c 300 out.txt)"
	# the same again, for any number of threads; another seed gives other draws and the same law
	OMP_NUM_THREADS=1 expect 0 "" "$ling" fit all.tsv --json
	same out.txt all.json
	expect 0 "" "$ling" fit all.tsv --json --law size --seed 2 --draws 99
	[ "$(jq -c '.size.parameters.E.value, (.size.draws | length)' out.txt)" = "$(jq -c .size.parameters.E.value all.json)"$'\n'99 ] || problem "another seed: $(head -c 300 out.txt)"
	jq -e 'has("compute") | not' out.txt >/dev/null || problem "--law size fits the compute"
	# columns in another order, one of a key, comments and empty lines
	awk -F '\t' -v OFS='\t' 'NR == 2 { print "# a comment"; print "" } { for (i = NF; i > 0; i--) printf "%s\t", $i; print NR == 1 ? "schedule.warmup_steps" : 5 }' \
		all.tsv >turned.tsv
	expect 0 "" "$ling" fit turned.tsv --json
	same out.txt all.json
}

test_picture() {
	local name
	table all 1
	for name in png svg; do
		expect 0 "" "$ling" fit all.tsv --draws 99 --out fit.$name
		[ -s fit.$name ] || problem "no fit.$name"
	done
	has fit.svg "Loss by compute" "Loss by parameters and tokens" "Best learning rate by compute" "Efficiency leverage" "held out" "N = 12M" "training FLOPs"
	[ "$(head -c 8 fit.png | od -An -c | tr -d ' ')" = '211PNG\r\n032\n' ] || problem "fit.png is no PNG file"
	cp all.tsv kept.tsv
	expect 1 "is what the runs are read from" "$ling" fit all.tsv --out ./all.tsv
	same all.tsv kept.tsv
}

# refused TEXT LINES...: a table with the columns run, flops, loss and these lines is refused with TEXT.
refused() {
	local text=$1
	shift
	printf 'run\tflops\tloss\n' >bad.tsv
	printf '%b\n' "$@" >>bad.tsv
	expect 1 "$text" "$ling" fit bad.tsv
}

test_refused() {
	refused "expected points of at least 4 different computes, found 2 of 2 points" 'a\t1e15\t4' 'b\t2e15\t3.9'
	refused "the largest run, d, is held out, and the others are too few" 'a\t1e15\t4' 'b\t2e15\t3.9' 'c\t4e15\t3.8' 'd\t8e15\t3.7'
	refused "bad.tsv:2: loss \`-4\` of run a; expected a number above 0" 'a\t1e15\t-4'
	refused "bad.tsv:3: flops \`many\` of run b" 'a\t1e15\t4' 'b\tmany\t3'
	refused "two runs have the name a" 'a\t1e15\t4' 'a\t2e15\t3.9'
	refused "the runs a and b are the same but for the loss" 'a\t1e15\t4' 'b\t1e15\t3.9'
	refused "none of the 2 runs can be used: a: it has no loss" 'a\t1e15\t-' 'b\t2e15\tnan'
	refused "bad.tsv: has no run"
	printf 'run\tflops\n' >bad.tsv
	expect 1 "bad.tsv:1: has no column \`loss\`" "$ling" fit bad.tsv
	head -c 100 /dev/urandom >bad.tsv
	expect 1 "" "$ling" fit bad.tsv
	expect 1 "no such.tsv: No such file or directory; expected the directory of a run, or a table of runs" "$ling" fit "no such.tsv"
	expect 1 "has no metrics.jsonl" "$ling" fit .
	mkdir -p swept && cp all.tsv swept/table.tsv
	expect 1 "expected that of one run in it, or, for \`ling fit\`, swept/table.tsv" "$ling" fit swept
	expect 2 "" "$ling" fit
	expect 2 "" "$ling" fit all.tsv --law better
	# one size alone, and tokens in proportion to the size
	table one '$n == 1e6'
	expect 1 "of at least 3 different N and 3 different D" "$ling" fit one.tsv --law size
	table same '$n == 5e6 && $t == 20' # all of one compute
	expect 1 "expected points of at least 4 different computes, found 1 of 3 points" "$ling" fit same.tsv
	table line '$t == 20'
	expect 1 "and the others are too few: L = E + A C^-a" "$ling" fit line.tsv --law compute
	expect 1 "N and D of the" "$ling" fit line.tsv --law size
	table all 1
	cut -f 1-2,4-13 all.tsv >without.tsv
	expect 1 "\`active_parameters\` of run " "$ling" fit without.tsv --law size
	table dense '!$moe'
	expect 1 "expected runs of models with experts, of activation_ratio below 1, found none" "$ling" fit dense.tsv --law leverage
	table edge '$r >= 1' # the best learning rate is the smallest
	expect 0 "" "$ling" fit edge.tsv --draws 99 --law learning-rate
	has out.txt "best run, at the edge of the grid" "at 4 of 4 computes the best is at the edge of the grid"
	table sparse '$t == 20'
	sed 's/0.25\t4$/0.125\t4/;t;d' sparse.tsv | head -n 3 | sed 's/^/sparse-/; s/\t8192\t/\t4096\t/' >more.tsv
	cat more.tsv >>sparse.tsv # three runs of another activation ratio are too few for a law of theirs
	expect 0 "" "$ling" fit sparse.tsv --draws 99 --json --law leverage
	jq -e '.leverage.families | length == 2 and (map(has("law")) | sort == [false, true]) and (map(.why // "" | contains("at least 4")) | any)' out.txt >/dev/null ||
		problem "$(head -c 500 out.txt)"
	expect 1 "learning_rate: expected runs of at least 2 computes" "$ling" fit dense.tsv --law learning-rate
	# what cannot be used is left out, and said so
	table all 1
	printf 'diverged\t1e6\t1e6\t1e6\t1e6\t1e6\t1e12\tnan\t1\t8192\t1\t0.25\t4\n' >>all.tsv
	expect 0 "" "$ling" fit all.tsv --draws 99
	has out.txt "44 runs" "left out: diverged: it has no loss"
}

# Directories of runs: real ones, of different length and size; one that has not ended, one without validation, one whose loss is not finite.
test_directories() {
	local steps args=() i=0
	head -c 2000 "$root/ling.h" >text.txt
	tail -c 600 "$root/ling.h" >valid.txt
	expect 0 "" "$ling" tokenize --out text text.txt
	expect 0 "" "$ling" tokenize --out valid valid.txt
	tiny data.valid=valid train.batch=4
	for steps in 5 10 20 40 80 160; do
		expect 0 "" "$root/ling" train tiny.yaml train.output_dir=runs/$steps train.steps=$steps
		args+=(runs/$steps)
	done
	expect 0 "" "$root/ling" train tiny.yaml train.output_dir=runs/seed train.steps=40 train.seed=4 train.micro_batch=4 log.every=7
	expect 0 "" "$root/ling" train tiny.yaml train.output_dir=runs/stopped train.steps=40 train.stop_at_step=20
	expect 0 "" "$root/ling" train tiny.yaml train.output_dir=runs/blind train.steps=4 'data.valid=[]'
	expect 0 "" "$ling" fit "${args[@]}" runs/seed runs/stopped runs/blind --json --draws 99
	json out.txt
	jq -e '.runs == 7 and .seed_noise.runs == 2 and .seed_noise.settings == 1 and (.left_out | map(.run) == ["stopped", "blind"]) and
		.left_out[0].why == "it has not ended: step 20 of 40" and (.left_out[1].why | startswith("it was not validated")) and
		.compute.held_out.run == "160" and .compute.held_out.ratio == 2' out.txt >/dev/null || problem "$(head -c 1500 out.txt)"
	# loss and FLOPs are those of the run and of `ling info`
	cp out.txt fit.json
	expect 0 "" "$ling" info tiny.yaml --json
	jq -e --slurpfile fit fit.json --slurpfile metrics runs/160/metrics.jsonl '.flops_per_token * 160 * 4 * 16 == $fit[0].compute.held_out.flops and
		$fit[0].compute.held_out.loss == $metrics[-1].valid_loss' out.txt >/dev/null || problem "$(jq -c .compute.held_out fit.json) $(tail -n 1 runs/160/metrics.jsonl)"
	expect 1 "two runs have the name" "$ling" fit runs/5 runs/5
	cp -r runs/10 runs/copy
	expect 1 "the runs 10 and copy are the same but for the loss" "$ling" fit "${args[@]}" runs/copy
	expect 0 "" "$ling" tokenize --out other text.txt
	expect 0 "" "$root/ling" train tiny.yaml train.output_dir=runs/other train.steps=7 data.valid=other
	expect 1 "are of different texts" "$ling" fit "${args[@]}" runs/other
	sed '$s/"valid_loss": [0-9.e-]*/"valid_loss": null/' runs/copy/metrics.jsonl >m.jsonl && mv m.jsonl runs/copy/metrics.jsonl
	expect 0 "" "$ling" fit "${args[@]}" runs/copy --draws 99
	has out.txt "left out: copy: its validation loss is not finite" "held out: 160"
	expect 1 "belongs to the run in runs/5" "$ling" fit "${args[@]}" --out runs/5/metrics.jsonl
}

check table picture refused directories
finish
