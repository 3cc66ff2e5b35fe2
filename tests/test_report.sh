#!/bin/bash
# `ling report`: what is in the page, without a browser; and in one, where Chromium is installed.
. "$(dirname "$0")/check.sh"

# What no page may take for HTML.
evil='</script><script>document.title="owned"</script><!-- <img src=x onerror="document.title=1"> &lt; '\''"'

# make_run DIR STEPS [CODE]: a run whose step $s has the loss $s / 1000 unless CODE, in Perl, changes the line %m.
make_run() {
	mkdir -p "$1"
	perl -MJSON::PP -e 'my ($steps, $code) = @ARGV;
		my $change = eval "sub { my (\$s, \$m) = \@_; $code }" or die $@;
		for my $s (1 .. $steps) {
			my $m = {step => $s, samples => 8 * $s, tokens => 512 * $s, batch => $s <= $steps / 2 ? 4 : 8, loss => $s / 1000, balance_loss => 1.25,
				z_loss => 7, lr => 1e-4 * $s, grad_norm => 0.5, update_norm => 0.1, seconds => 0.5, tokens_per_second => 1024,
				expert_load => [1.5, 1 + $s / $steps]};
			$change->($s, $m);
			print JSON::PP->new->canonical->encode($m), "\n";
		}' "$2" "${3-}" >"$1/metrics.jsonl"
}

# The data of a page.
page_data() { perl -0777 -ne 'print $1 if m|<script type="application/json" id="data">(.*?)</script>|s' "$1"; }

# is FILE FILTER VALUE: what jq finds in the data of a page.
is() {
	local found
	found=$(page_data "$1" | jq -c "$2" 2>&1)
	[ "$found" = "$3" ] || problem "$1: $2 is $found; expected $3"
}

# events DIR LINE...: writes events.jsonl; each line lacks the time.
events() {
	local dir=$1
	shift
	printf '{"time":1764560000.5,%s}\n' "$@" >"$dir/events.jsonl"
}

# A run with everything that a page shows.
make_full() {
	make_run full 60 'if ($s % 20 == 0) { $m->{valid_loss} = 3 - $s / 100; $m->{valid} = {web => 3 - $s / 100, chat => 4 - $s / 100} }
		$m->{expert_counts} = [[10, 30, 20], [20, 20, 20]] if $s % 10 == 0;
		$m->{loss} = undef, $m->{nonfinite} = ["loss"] if $s == 31;
		$m->{tokens_per_second} = 2048 if $s > 40;'
	events full '"step":0,"kind":"start","batch":0,"flops_per_token":1e6,"peak_flops":4.096e9' \
		'"step":0,"kind":"validation","valid_loss":3.5,"valid":{"web":3.5,"chat":4.5}' \
		'"step":9,"kind":"skip","batch":9,"loss":0.055,"grad_norm":3,"samples":[[0,1]]' \
		'"step":19,"kind":"skip","batch":20,"loss":null' \
		'"step":25,"kind":"save","stall_seconds":1' \
		"\"step\":45,\"kind\":\"slow_rank\",\"rank\":2,\"host\":$(jq -n --arg e "$evil" '$e')" \
		'"step":50,"kind":"rollback","batch":52,"from_step":55'
	local step
	for step in 0 20 40; do
		jq -nc --arg e "$evil" --argjson s $step '{step: $s, prompt: "Once", text: (" upon " + $e + "\n" + ($s | tostring)), tokens: 5}'
	done >full/samples.jsonl
	mkdir -p full/step-0000060
	jq -n --arg e "$evil" '{config: {train: {output_dir: $e, grad_clip: 0.75}, schedule: {peak_lr: 3e-4, drops: []},
		model: {first_k_dense_replace: 1}}}' >full/step-0000060/trainer.json
	echo '{}' >full/step-0000060/config.json
}

# What is in the page, by another reader of its data.
test_structure() {
	make_full
	expect 0 "" "$ling" report full --out page.html
	has out.txt page.html
	page_data page.html >data.json
	json data.json
	is page.html '.runs | length' 1
	is page.html '.runs[0] | [.name, .directory, .steps, .bucket, .tokens, .seconds, .nonfinite]' '["full","full",60,1,30720,30,1]'
	is page.html '.runs[0].x | [.step[0], .end[-1], .tokens[9], .seconds[9]]' '[1,60,5120,5]'
	is page.html '.runs[0] | [.skipped, .state, .waiting]' '[2,"no heartbeat",null]'
	is page.html '.runs[0].series | keys' '["balance_loss","batch","grad_norm","loss","lr","peak_share","tokens_per_second","update_norm","z_loss"]'
	is page.html '.runs[0].series.loss | [.mean[0], .mean[59], .mean[30], .bad, has("low")]' '[0.001,0.06,null,[30],false]'
	is page.html '.runs[0].series.batch.mean | [.[29], .[30]]' '[4,8]'
	is page.html '.runs[0] | [.peak_share, .series.peak_share.mean[40], .tokens_per_second]' '[0.25,0.5,1024]'
	is page.html '.runs[0].valid | map([.name, .step, .mean])' \
		'[["validation",[0,20,40,60],[3.5,2.8,2.6,2.4]],["valid.web",[0,20,40,60],[3.5,2.8,2.6,2.4]],["valid.chat",[0,20,40,60],[4.5,3.8,3.6,3.4]]]'
	is page.html '.runs[0] | [.last_valid, .best_valid, .best_valid_step]' '[2.4,2.4,60]'
	is page.html '.runs[0].load | [.end[29], .layers[0][29], .layers[1][29]]' '[30,1.5,1.5]'
	is page.html '.runs[0].experts | [.experts, .step[0], .layers[0][0], .layers[1][5]]' '[3,10,[50,150,100],[100,100,100]]'
	is page.html '.runs[0].events | map([.step, .kind, .loss])' '[[9,"skip",0.055],[19,"skip",null],[45,"slow_rank",null],[50,"rollback",null]]'
	is page.html '.runs[0].events | map(has("loss"))' '[true,true,false,false]'
	is page.html '.runs[0].events[0] | [.time, .text]' '["2025-12-01 03:33:20","batch 9, loss 0.055, grad_norm 3, samples [[0,1]]"]'
	is page.html '.runs[0].other_events' '{"start":1,"validation":1,"save":1}'
	is page.html '.runs[0].samples | map(.step)' '[0,20,40]'
	is page.html '.runs[0] | [.clip, .first_layer, .config["schedule.peak_lr"], .config["schedule.drops"]]' '[0.75,1,"0.0003","[]"]'
	[ "$(grep -c '^<title>' page.html)" = 1 ] || problem "no title"
	! grep -o 'https\?:[^"'\'' ]*' page.html >found.txt || problem "the page refers to $(head -n 3 found.txt)"
	! grep -n 'innerHTML\|outerHTML\|insertAdjacent\|document\.write\|eval(' page.html >found.txt || problem "texts may become HTML: $(head -n 3 found.txt)"
}

# Foreign texts stay texts: in the data no tag and no comment can begin, and they come out as they were.
test_escaping() {
	make_full
	local name='<b>"&amp;'
	cp -r full "$name"
	expect 0 "" "$ling" report "$name" --out page.html
	page_data page.html >data.json
	! grep -q '<' data.json || problem "a < in the data: $(grep -o '.\{20\}<.\{20\}' data.json | head -n 1)"
	[ "$(grep -o '<script' page.html | wc -l)" = "$(grep -o '<script' "$root/commands/report_page.html" | wc -l)" ] || problem "another script"
	[ "$(grep -o '<!--' page.html | wc -l)" = 1 ] || problem "another comment"
	[ "$(jq -r '.runs[0].name' data.json)" = "$name" ] || problem "the name is $(jq '.runs[0].name' data.json)"
	[ "$(jq -r '.runs[0].samples[0].text' data.json)" = " upon $evil"$'\n'0 ] || problem "a sample is $(jq '.runs[0].samples[0]' data.json)"
	[ "$(jq -r '.runs[0].config["train.output_dir"]' data.json)" = "$evil" ] || problem "a config is $(jq '.runs[0].config' data.json)"
	[ "$(jq -r '.runs[0].events[2].text' data.json)" = "rank 2, host $evil" ] || problem "an event is $(jq '.runs[0].events[2]' data.json)"
	local odd
	# what a model without a thought may write
	echo '{"step":61,"prompt":"\u0000","text":"a\u0000\u0001b","tokens":4}' >>full/samples.jsonl
	expect 0 "" "$ling" report full --out page.html
	is page.html '.runs[0].samples[-1]' '{"step":61,"prompt":"\u0000","text":"a\u0000\u0001b"}'
	odd=$(not_utf8 odd)
	make_run "$odd" 3
	expect 0 "" "$ling" report "$odd" --out page.html
	is page.html '.runs[0].name' '"odd�"'
}

# A run of `ling train`: what it writes is what the page reads.
test_real() {
	head -c 4000 "$root/README.md" >text.txt
	expect 0 "" "$ling" tokenize --out text text.txt
	tiny train.steps=6 "data.valid={a: text, b: text}" eval.every=3 eval.at_start=true eval.max_windows=3 log.experts=2 "eval.samples=[The, '<b>']" eval.sample_tokens=4
	expect 0 "" "$ling" train tiny.yaml
	expect 0 "" "$ling" report run --out page.html
	is page.html '.runs[0].valid | map([.name, .step])' '[["validation",[0,3,6]],["valid.a",[0,3,6]],["valid.b",[0,3,6]]]'
	is page.html '.runs[0].experts | [.experts, .step, (.layers | length), (.layers[0][0] | add | . >= 598 and . <= 602)]' '[6,[2,4,6],2,true]'
	is page.html '.runs[0] | [.skipped, .state, .waiting]' '[0,"done",null]'
	is page.html '.runs[0] | [.traced_steps, .ranks, .clip, .config["train.seed"]]' '[6,1,1,"3"]'
	is page.html '.runs[0] | (([.operations[].seconds] | add) / .step_seconds) | . > 0.5 and . < 1.001' true
	is page.html '.runs[0].operations | map(select(.name == "attention / qkv") | .passes | map(.name))' '[["","backward","weight gradient"]]'
	is page.html '.runs[0].operations | map((.seconds - (.passes | map(.seconds) | add)) / .seconds | fabs < 1e-4) | all' true
	is page.html '.runs[0].series.peak_share.mean | length' 6
	is page.html '.runs[0].samples | map([.step, .prompt])' '[[0,"The"],[0,"<b>"],[3,"The"],[3,"<b>"],[6,"The"],[6,"<b>"]]'
	head -c 5000 run/trace/rank-0.trace >half && cp half run/trace/rank-0.trace
	expect 0 "" "$ling" report run --out page.html
	has err.txt "the page has no times of operations of this run"
	is page.html '.runs[0] | has("operations")' false
}

# No spike is lost, however many steps there are for a point, and no gap.
test_thinning() {
	make_run long 9973 '$m->{loss} = 2; $m->{loss} = 50 if $s == 5000; $m->{loss} = -3 if $s == 7001; $m->{loss} = 9 if $s == 9973;
		$m->{loss} = undef, $m->{nonfinite} = ["loss"] if $s == 42; $m->{expert_load}[0] = 30 if $s == 3333; $m->{expert_load}[1] = undef if $s == 6000;'
	expect 0 "" "$root/ling" report long --out page.html --points 100
	is page.html '.runs[0] | [.bucket, .steps, (.x.step | length), .x.step[1], .x.end[0], .x.end[-1]]' '[100,9973,100,101,100,9973]'
	is page.html '.runs[0].series.loss | [.high[49], .low[70], .high[99], (.high | map(select(. > 2)) | length), (.low | map(select(. < 2)) | length)]' '[50,-3,9,2,1]'
	is page.html '.runs[0].series.loss | [.bad, .mean[0], .mean[49], .mean[1]]' '[[0],2,2.48,2]'
	is page.html '.runs[0].load | [(.end | length), (.layers[0] | max), (.layers[0] | index(30)), (.layers[1] | map(. == null) | index(true))]' '[998,30,333,599]'
	expect 0 "" "$root/ling" report long --out page.html --points 20000
	is page.html '.runs[0] | [.bucket, (.series.loss.mean | max), (.x.step | length)]' '[1,50,9973]'
	expect 2 "" "$ling" report long --points 99
}

# Several runs, also of the same name, without a step, and with different configs.
test_several() {
	make_full
	make_run other/full 20 '$m->{loss} = 5'
	mkdir -p empty
	: >empty/metrics.jsonl
	expect 0 "" "$ling" report full other/full empty --out page.html
	is page.html '.runs | map([.name, .steps])' '[["full",60],["other/full",20],["empty",0]]'
	is page.html '.runs[1] | [.config, .events, .samples, has("valid"), has("experts"), .clip]' '[null,[],[],false,false,0]'
	expect 0 "" "$ling" report other/full
	[ "$(cat out.txt)" = other/full/report.html ] && [ -s other/full/report.html ] || problem "without --out: $(cat out.txt)"
}

# What cannot be read or written is an error, and the page that was there before stays.
test_errors() {
	make_full
	# counts that no run writes: an expert with more of them than the first one
	make_run uneven 9 '$m->{expert_counts} = $s < 9 ? [[], [1]] : [[1], [1]]'
	expect 0 "" "$ling" report uneven --out page.html
	make_run bad 3
	echo old >page.html
	expect 1 "nothere: " "$ling" report full nothere --out page.html
	expect 1 "step-0000060 is a checkpoint" "$ling" report full/step-0000060 --out page.html
	expect 2 "" "$ling" report --out page.html
	expect 1 "none/page.html" "$ling" report full --out none/page.html
	expect 1 "" "$ling" report full --out /dev/full
	has err.txt "/dev/full"
	expect 1 "Is a directory" "$ling" report full --out full
	echo '{"step":4' >>bad/metrics.jsonl
	echo '{"step":5}' >>bad/metrics.jsonl
	expect 1 "bad/metrics.jsonl:4" "$ling" report bad --out page.html
	sed -i 's/"prompt":"Once"/"prompt":7/; $s/.*/{"step"/' full/samples.jsonl
	expect 1 'full/samples.jsonl:1: `prompt` is' "$ling" report full --out page.html
	# no command writes over what the run needs
	local file
	mkdir -p full/trace && cp "$root/LICENSE" full/trace/rank-0.trace
	ln -sf full/metrics.jsonl link
	cp -r full untouched
	for file in full/metrics.jsonl ./full//events.jsonl full/samples.jsonl full/trace/rank-0.trace full/step-0000060/config.json link; do
		expect 1 "$file: belongs to the run in full, which would lose it" "$ling" report bad full --out $file
		expect 1 "$file: belongs to the run in full, which would lose it" "$ling" plot full --out $file
		expect 1 "$file: belongs to the run in full, which would lose it" "$ling" export full --csv $file
		expect 1 "$file: belongs to the run in full, which would lose it" "$ling" export full --expert-counts $file
		expect 1 "$file: belongs to the run in full, which would lose it" "$ling" trace full --perfetto $file
	done
	diff -r full untouched || problem "the run was changed"
	expect 2 "both to x.csv" "$ling" export full --csv x.csv --expert-counts x.csv
	[ "$(cat page.html)" = old ] || problem "the page was replaced"
	compgen -G 'page.html?*' >/dev/null && problem "left $(echo page.html?*)"
	# a line that the run is writing is not there yet
	make_full
	printf '{"step":60,"prom' >>full/samples.jsonl
	printf '{"step":61,"los' >>full/metrics.jsonl
	printf '{"step":61,"ki' >>full/events.jsonl
	expect 0 "" "$ling" report full --out page.html
	is page.html '.runs[0] | [.steps, (.samples | length)]' '[60,3]'
	expect 0 "" "$ling" report full --out /dev/stdout
	has out.txt "</html>"
}

# The program has the page of today.
test_build() {
	make_full
	(cd "$root" && make -n -W commands/report_page.html ling 2>&1) | grep -q 'commands/report\.c' || problem "make does not look at report_page.html"
	expect 0 "" "$root/ling" report full --out page.html
	diff <(sed 's|\(id="data">\).*\(</script>\)|\1@DATA@\2|' page.html) "$root/commands/report_page.html" >diff.txt ||
		problem "the page is not report_page.html: $(head -n 5 diff.txt)"
}

# In a real browser.
test_browser() {
	if ! command -v python3 >/dev/null || ! python3 -c 'import sys; sys.path.insert(0, sys.argv[1]); import browser; sys.exit(not browser.find())' "$root/tests"; then
		echo "not tested: there is no Chromium here, or no Python (apt-get install chromium python3)"
		return
	fi
	make_full
	make_run second 40 '$m->{loss} = 0.03; $m->{valid_loss} = 0.02 if $s == 20;'
	make_run long 100000 '$m->{loss} = 2 + 0.5 * (($s * 7919) % 1000) / 1000; $m->{loss} = 90 if $s == 77777; $m->{expert_load} = [(1.5) x 12];'
	local odd=${evil//\//|} # a path has no slash in it
	cp -r full "$odd"
	expect 0 "" "$ling" report full --out one.html
	expect 0 "" "$ling" report full second "$odd" --out several.html
	mkdir -p empty
	: >empty/metrics.jsonl
	make_run single 1
	make_run wild 9 '$m->{loss} = (0, -1, 1e300, 1e-300, undef, 2, 2, 2, undef)[$s - 1]; $m->{nonfinite} = ["loss"] if !defined $m->{loss};
		$m->{grad_norm} = undef, $m->{nonfinite} = ["grad_norm"] if $s != 5;'
	expect 0 "" "$ling" report single wild empty --out few.html
	expect 0 "" "$ling" report empty --out nothing.html
	expect 0 "" "$root/ling" report long --out long.html
	timeout -k 5 120 python3 "$root/tests/report_in_browser.py" one.html several.html few.html nothing.html long.html >browser.txt 2>&1 || problem "$(cat browser.txt)"
	grep '^long' browser.txt
}

check structure escaping real thinning several errors build browser
finish
