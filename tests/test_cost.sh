#!/bin/bash
# `ling cost`: its arithmetic, on runs whose metrics are written here and on machines of a file; what is refused.
. "$(dirname "$0")/check.sh"

# number PATH: of the JSON in out.txt
number() { jq ".$1" out.txt; }
# is PATH VALUE: the number there is VALUE, to 1e-12 of it
is() {
	jq -e --argjson want "$2" "(.$1 / \$want - 1) | fabs < 1e-12" out.txt >/dev/null || problem "$1: expected $2, found $(number "$1"): $(cat out.txt)"
}

# step_line STEP SECONDS RATE: a line of the metrics
step_line() {
	printf '{"step": %d, "samples": %d, "tokens": %d, "batch": 100, "loss": 1, "balance_loss": 1, "z_loss": 1, "lr": 1, "grad_norm": 1, ' "$1" \
		$(($1 * 100)) $(($1 * 1000))
	printf '"seconds": %s, "tokens_per_second": %s, "expert_load": []}\n' "$2" "$3"
}

# A run of 13 steps of 1000 tokens: 3 slow ones, then 0.5 s each. It began at time 100, and saved at 110, after step 13: 3 x 1 + 10 x 0.5 = 8 s
# were steps.
make_run() {
	rm -rf run && mkdir run
	printf '{"time":%s,"step":0,"kind":"start","batch":0,"flops_per_token":2e6,"peak_flops":1e10,"config":{"data":{"seq_len":10},"train":{"steps":20,"tokens":0,"batch":100}}}\n' \
		100 >run/events.jsonl
	for i in {1..13}; do
		step_line "$i" $([ "$i" -le 3 ] && echo 1 1000 || echo 0.5 2000)
	done >run/metrics.jsonl
	printf '{"time":110,"step":13,"kind":"save"}\n' >>run/events.jsonl
}

# The first steps do not count in the rate, and do in the goodput.
test_run() {
	make_run
	expect 0 "" "$ling" cost run --tokens 7200000 --price 3 --watts 500 --kwh 0.5 --json
	is run.tokens_per_second 2000
	is run.first_step 4
	is run.last_step 13
	is run.goodput 0.8
	is flops 1.44e13
	is 'machines[0].mfu' 0.4
	is 'machines[0].hours' 1.25
	is 'machines[0].kwh' 0.625
	is 'machines[0].cost' 4.0625 # 1.25 hours of 3, and 0.625 kWh of 0.5
	is 'machines[0].cost_per_billion_tokens' 564.2361111111111
	expect 0 "" "$ling" cost run --tokens 7200000 --goodput 0.5 --json
	is 'machines[0].hours' 2
	expect 0 "" "$ling" cost run --json
	is tokens 20000 # 13 steps done, 7 to come
	expect 0 "" "$ling" cost run --tokens 1e9
	has out.txt "measured: 2000.0 tokens/s in steps 4 to 13" "40.0 % of the peak" "80.0 %" "7.2 days" "hours of a machine"
	# of a run that was continued only the newest start counts; without an event after it the goodput is not known
	printf '{"time":200,"step":13,"kind":"resume","batch":13}\n' >>run/events.jsonl
	expect 1 "since its newest start, at step 13, it has fewer than 6 steps" "$ling" cost run --json
	for i in {14..20}; do
		step_line "$i" 0.25 4000
	done >>run/metrics.jsonl
	expect 0 "" "$ling" cost run --json
	is run.tokens_per_second 4000
	is run.first_step 17
	[ "$(number run.goodput)" = null ] || problem "a goodput from nothing: $(cat out.txt)"
	is 'machines[0].goodput' 1
}

# The number of machines is in the time, and not in the cost. A machine that gives 1.25 times as many tokens for its price is 20 % cheaper.
test_machines() {
	printf -- '- {name: fast, count: 8, price: 20, rate: 1000, watts: 700}\n- {name: slow, price: 5, peak: 1e12, mfu: 0.5, goodput: 0.9, count: 64}\n' >machines.yaml
	expect 0 "" "$ling" cost tiny.yaml --machines machines.yaml --tokens 3.6e9 --json
	is 'machines[0].hours' 125
	is 'machines[0].machine_hours' 1000
	is 'machines[0].cost' 20000
	is 'machines[0].kwh' 700
	local flops rate
	flops=$(number flops_per_token)
	rate=$(jq -n "0.5e12 / $flops")
	is 'machines[1].rate' "$rate"
	is 'machines[1].machine_hours' "$(jq -n "3.6e9 / ($rate * 0.9) / 3600")"
	is 'break_even[] | select(.name == "slow") | .rate' "$(jq -n '1000 * 5 / 20 / 0.9')"
	is 'break_even[] | select(.name == "fast") | .rate' "$(jq -n "$rate * 0.9 * 4")"
	cp out.txt before.txt
	sed -i 's/count: 8/count: 16/' machines.yaml
	expect 0 "" "$ling" cost tiny.yaml --machines machines.yaml --tokens 3.6e9 --json
	is 'machines[0].hours' 62.5
	is 'machines[0].cost' 20000
	[ "$(jq -c .break_even out.txt)" = "$(jq -c .break_even before.txt)" ] || problem "the break-even depends on the number of machines"
	expect 0 "" "$ling" cost tiny.yaml --machines machines.yaml --tokens 3.6e9
	has out.txt "fast, 16 machines" "slow costs no more than fast from 277.8 tokens/s of a machine on"
	# with a run, a machine without a rate is the one that it ran on
	make_run
	printf -- '- {name: here, count: 2, price: 1}\n- {name: there, price: 3, rate: 5000}\n' >machines.yaml
	expect 0 "" "$ling" cost run --machines machines.yaml --tokens 7.2e6 --json
	is 'machines[0].rate' 1000
	is 'machines[0].mfu' 0.4
	is 'machines[0].machine_hours' 2.5 # at the goodput of the run
	is 'machines[1].goodput' 1
	# a real run, whose length the config has
	expect 0 "" "$ling" train tiny.yaml train.steps=12 train.output_dir=real
	expect 0 "" "$ling" cost real --json
	is tokens "$(jq -n '12 * 16 * 2')"
}

test_refused() {
	make_run
	expect 1 "tiny.yaml is a config, and how fast it trains is not known" "$ling" cost tiny.yaml
	expect 1 "nothere" "$ling" cost nothere
	expect 1 "run is the directory of a run, which has its config: expected no train.steps=5" "$ling" cost run train.steps=5
	expect 1 "the length of the run is not known; expected --tokens" "$ling" cost "$root/configs/ling-plus.yaml"
	expect 2 "--goodput 0: expected a number above 0 and up to 1" "$ling" cost run --goodput 0
	expect 2 "--tokens -1" "$ling" cost run --tokens -1
	expect 1 "expected them in machines.yaml" "$ling" cost run --machines machines.yaml --price 3
	refuse() { # refuse TEXT YAML
		printf '%b' "$2" >bad.yaml
		expect 1 "$1" "$ling" cost run --machines bad.yaml
	}
	refuse "bad.yaml:1: unknown key prize; did you mean price?" '- {name: a, prize: 3}\n'
	refuse "price: found -3" '- {name: a, price: -3}\n'
	refuse "mfu: found 1.5" '- {name: a, peak: 1e9, mfu: 1.5}\n'
	refuse "a: found both rate and mfu" '- {name: a, rate: 3, peak: 1e9, mfu: 0.5}\n'
	refuse "a: found mfu without peak" '- {name: a, mfu: 0.5}\n'
	refuse "a: found twice" '- {name: a, rate: 3}\n- {name: a, rate: 4}\n'
	refuse "bad.yaml:1: the key name is missing here" '- {rate: 3}\n'
	refuse "bad.yaml" ''
	printf -- '- {name: a, price: 3}\n' >bad.yaml
	expect 1 "a: how fast it is is not known; expected rate, or peak and mfu" "$ling" cost tiny.yaml --machines bad.yaml
	rm run/events.jsonl
	expect 1 "no event tells the FLOPs of a token" "$ling" cost run
}

printf 'a text of some bytes for the tiny model, which is trained here\n%.0s' {1..20} >text.txt
"$ling" tokenize --out text text.txt >/dev/null 2>&1 || exit 1
tiny train.batch=2
check run machines refused
finish
