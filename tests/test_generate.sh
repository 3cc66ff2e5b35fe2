#!/bin/bash
# ling generate as its user meets it, built with sanitizers: prompts from the command line and from files, its forms of
# output, wrong use.
. "$(dirname "$0")/check.sh"

# ---- a model that has learned one line, in which no character comes twice; its vocabulary has ids without tokens ----
for _ in {1..41}; do printf 'abcdef "ghijk\n'; done >text.txt
tiny model.hidden_size=32 model.head_dim=8 model.vocab_size=270 model.max_position_embeddings=64 model.num_experts=4 \
	model.moe_intermediate_size=16 model.rope_theta=600000 data.seq_len=40 data.shuffle=off train.steps=100 \
	train.micro_batch=4 train.batch=8 \
	schedule.warmup_steps=5 schedule.decay='{ steps: 40, shape: linear, final_lr: 1e-4 }'
model=run/step-0000100
printf 'abc\nf "gh\r\n\nabcdef "ghijk\ng\n' >prompts.txt
printf '{"prompt": "abc"}\n{"prompt": "f \\"gh", "id": 7}\n\n{"prompt": "abcdef \\"ghijk"}\n{"prompt": "g"}\n' \
	>prompts.jsonl

test_generate() {
	expect 0 "" "$ling" tokenize --out text text.txt
	expect 0 "" "$ling" train tiny.yaml
	expect 0 "" "$ling" generate $model --prompt "abc" --max-tokens 12
	[ "$(cat out.txt)" = "$(printf 'def "ghijk\na')" ] || problem "found: $(cat out.txt)"
	expect 0 "" "$ling" generate $model --prompt "abc" --max-tokens 12 --json
	[ "$(cat out.txt)" = \
		'{"prompt": 0, "text": "def \"ghijk\na", "prompt_tokens": 3, "tokens": 12, "finish": "length"}' ] ||
		problem "found: $(cat out.txt)"
	expect 0 "" "$ling" generate $model --prompt "abc" --stop 'hi' --json
	[ "$(cat out.txt)" = '{"prompt": 0, "text": "def \"g", "prompt_tokens": 3, "tokens": 8, "finish": "stop"}' ] ||
		problem "found: $(cat out.txt)"
	expect 0 "" "$ling" generate $model --prompt "abc" --stop 'hi'
	[ "$(cat out.txt)" = 'def "g' ] || problem "found: $(cat out.txt)"
	# The whole room that the model has, by default.
	expect 0 "" "$ling" generate $model --prompt "abc" --json
	grep -q '"tokens": 61, "finish": "length"' out.txt || problem "found: $(cat out.txt)"
	# An empty prompt is a document's beginning.
	expect 0 "" "$ling" generate $model --prompt "" --max-tokens 1 --json
	grep -q '"prompt_tokens": 1, "tokens": 1,' out.txt || problem "found: $(cat out.txt)"
}

test_batches() {
	local way drawn="--temperature 1.5 --seed 4"
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 20 --batch 1 --json
	cp out.txt greedy.txt
	[ "$(wc -l <greedy.txt)" = 4 ] || problem "expected 4 lines: $(cat greedy.txt)"
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 20 --batch 1 --json $drawn
	cp out.txt drawn.txt
	! cmp -s greedy.txt drawn.txt || problem "draws at temperature 1.5 are the most likely tokens"
	for way in "--batch 2" "--batch 3 --no-cache" "--batch 200"; do
		expect 0 "" "$ling" generate $model --prompts prompts.jsonl --max-tokens 20 --json $way
		same out.txt greedy.txt
		expect 0 "" "$ling" generate $model --prompts prompts.jsonl --max-tokens 20 --json $way $drawn
		same out.txt drawn.txt
	done
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 20 --json --temperature 1.5
	! cmp -s out.txt drawn.txt || problem "another seed, the same draws"
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 20 --json --temperature 1.5 --top-k 1
	same out.txt greedy.txt
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 20 --json --temperature 1.5 --top-p 1e-9
	same out.txt greedy.txt
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 3
	[ "$(sed -n 2p out.txt)$(sed -n 5p out.txt)" = defijk ] || problem "found: $(cat out.txt)"
	[ "$(grep -c '^==> prompt [1-4] <==$' out.txt)" = 4 ] || problem "found: $(cat out.txt)"
	# Ids that no token has are never drawn, however flat the distribution: each draw gives a byte, or ends.
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 50 --temperature 100 --json
	[ "$(wc -l <out.txt)" = 4 ] || problem "found: $(cat out.txt)"
	json out.txt
}

# refuse TEXT LINES: JSON lines as prompts, which are an error with that text
refuse() {
	printf "$2" >bad.jsonl
	expect 1 "$1" "$ling" generate $model --prompts bad.jsonl
}

test_wrong_use() {
	expect 2 "--prompt" "$ling" generate $model
	expect 2 "--prompt" "$ling" generate $model --prompt a --prompts prompts.txt
	expect 2 "--temperature" "$ling" generate $model --prompt a --top-k 3
	expect 2 "--temperature -1: expected a number from 0 to 100" "$ling" generate $model --prompt a --temperature -1
	expect 0 "" "$ling" generate $model --prompt a --temperature 0.0 --max-tokens 1
	expect 2 "--temperature nan" "$ling" generate $model --prompt a --temperature nan
	expect 2 "--top-p 0: expected a number above 0 and up to 1" \
		"$ling" generate $model --prompt a --temperature 1 --top-p 0
	expect 2 "--top-p 1.5" "$ling" generate $model --prompt a --temperature 1 --top-p 1.5
	expect 2 "--batch 0" "$ling" generate $model --prompt a --batch 0
	expect 2 "--seed -1: expected a whole number, at least 0" \
		"$ling" generate $model --prompt a --temperature 1 --seed -1
	expect 1 "nothere" "$ling" generate nothere --prompt a
	expect 1 "nothere.txt" "$ling" generate $model --prompts nothere.txt
	expect 1 "max_position_embeddings is 64" "$ling" generate $model --prompt "abc" --max-tokens 62
	expect 0 "" "$ling" generate $model --prompt "abc" --max-tokens 61
	expect 1 "prompt 1 has 64 tokens and 1 more" "$ling" generate $model --prompt "$(head -c 64 text.txt)"
	: >empty.txt
	expect 1 "no prompts" "$ling" generate $model --prompts empty.txt
	refuse "bad.jsonl:2: \`prompt\` is" '{"prompt": "a"}\n{"prompt": 3}\n'
	refuse "bad.jsonl:1" '{"prompt": "a", "messages": []}\n'
	refuse "bad.jsonl:1" '{"messages": []}\n'
	refuse "bad.jsonl:1: message 1: \`content\` is missing" '{"messages": [{"role": "user"}]}\n'
	refuse "nobody" '{"messages": [{"role": "nobody", "content": "x"}]}\n'
	refuse "bad.jsonl:1: bad JSON" '{"prompt": "a"\n'
	[ ! -s out.txt ] || problem "something was printed: $(cat out.txt)"
	# A directory without a word about its tokenizer, and a tokenizer with more ids than the model.
	rm -rf bare && mkdir bare && cp $model/config.json $model/model.safetensors bare
	expect 1 "--tokenizer" "$ling" generate bare --prompt a
	expect 0 "" "$ling" generate bare --prompt "abc" --max-tokens 6 --tokenizer byte
	[ "$(cat out.txt)" = 'def "g' ] || problem "found: $(cat out.txt)"
	if [ -c /dev/full ]; then
		"$ling" generate $model --prompt a >/dev/full 2>err.txt && problem "a full disk went unnoticed"
		grep -q "standard output" err.txt || problem "found: $(cat err.txt)"
	fi
}

test_chat() {
	expect 0 "" "$ling" generate $model --prompt "abc" --chat --max-tokens 8 --json
	cp out.txt chat.txt
	printf '{"messages": [{"role": "user", "content": "abc"}]}\n' >chat.jsonl
	expect 0 "" "$ling" generate $model --prompts chat.jsonl --max-tokens 8 --json
	same out.txt chat.txt
	# other forms of the same conversation
	printf '%s\n' '{"conversations": [{"from": "human", "value": "abc"}]}' >chat.jsonl
	expect 0 "" "$ling" generate $model --prompts chat.jsonl --max-tokens 8 --json
	same out.txt chat.txt
	printf '%s\n' '{"prompt": [{"role": "user", "content": [{"type": "text", "text": "abc"}]}], "completion": []}' >chat.jsonl
	expect 0 "" "$ling" generate $model --prompts chat.jsonl --max-tokens 8 --json
	same out.txt chat.txt
	grep -q '"prompt_tokens": 3,' chat.txt && problem "a message is no plain prompt"
	expect 0 "" "$ling" generate $model --prompt "<role>HUMAN</role>abc<role>ASSISTANT</role>" --max-tokens 8 --json
	same out.txt chat.txt
	# a reply that has begun is continued, and a system text goes first
	printf '%s\n' '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}' >begun.jsonl
	expect 0 "" "$ling" generate $model --prompts begun.jsonl --max-tokens 8 --json
	cp out.txt begun.txt
	expect 0 "" "$ling" generate $model --prompt "<role>HUMAN</role>a<role>ASSISTANT</role>bc" --max-tokens 8 --json
	same out.txt begun.txt
	printf '%s\n' '{"prompt": "a", "system": "b", "completion": "c"}' >system.jsonl
	expect 0 "" "$ling" generate $model --prompts system.jsonl --chat --max-tokens 1 --json
	cp out.txt system.txt
	expect 0 "" "$ling" generate $model --prompt "<role>SYSTEM</role>b<role>HUMAN</role>a<role>ASSISTANT</role>" --max-tokens 1 --json
	same out.txt system.txt
	expect 1 "expected --chat" "$ling" generate $model --prompts system.jsonl
	refuse "bad.jsonl:1: \`tools\` has no place" '{"messages": [{"role": "user", "content": "a"}], "tools": ["t"]}\n'
	refuse "bad.jsonl:1: found \`question\`; expected an object with one of" '{"question": "a"}\n'
}

# The same prompt twice in a file has draws of its own each time; the most likely tokens are the same.
test_variety() {
	printf 'abc\nabc\nabc\n' >same.txt
	expect 0 "" "$ling" generate $model --prompts same.txt --max-tokens 30 --temperature 1.5 --json
	[ "$(sed 's/"prompt": [0-9]*, //' out.txt | sort -u | wc -l)" = 3 ] || problem "the same draws: $(cat out.txt)"
	expect 0 "" "$ling" generate $model --prompts same.txt --max-tokens 30 --json
	[ "$(sed 's/"prompt": [0-9]*, //' out.txt | sort -u | wc -l)" = 1 ] || problem "other tokens: $(cat out.txt)"
	"$ling" generate $model --prompt abc --max-tokens 30 --temperature 1.5 --seed 1 --json | jq -r .text >seed1.txt
	"$ling" generate $model --prompt abc --max-tokens 30 --temperature 1.5 --seed 4294967297 --json | jq -r .text >other.txt
	! cmp -s seed1.txt other.txt || problem "a seed's upper half changes nothing"
}

# The directory of a run stands for its newest checkpoint, which a note names. Nothing in the run changes.
test_run_directory() {
	rm -rf seen && cp -r run seen
	mkdir seen/.tmp-step-0000200
	expect 0 "" "$ling" generate $model --prompt "abc" --max-tokens 12
	mv out.txt one.txt
	expect 0 "" "$ling" generate seen --prompt "abc" --max-tokens 12
	same out.txt one.txt
	has err.txt "note: seen is a run: taking its newest checkpoint, seen/step-0000100"
	[ -d seen/.tmp-step-0000200 ] || problem "a temporary directory of the run was removed"
	for command in "eval --data text --seq-len 40" info convert-checkpoint; do
		read -r command options <<<"$command"
		[ $command = convert-checkpoint ] && options=converted
		# shellcheck disable=SC2086 # words are meant to split
		expect 0 "" "$ling" $command seen $options
		has err.txt "taking its newest checkpoint, seen/step-0000100"
	done
	mkdir seen/step-0000200
	expect 1 "seen/step-0000200/trainer.json: cannot be read" "$ling" generate seen --prompt "abc"
	rm -rf seen/step-*
	expect 1 "seen is the directory of a run that has no checkpoint yet" "$ling" generate seen --prompt "abc"
	expect 1 "nothere/config.json: cannot open" "$ling" generate nothere --prompt "abc"
}

check generate batches wrong_use chat variety run_directory
finish
