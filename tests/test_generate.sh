#!/bin/bash
# ling generate as its user meets it, built with sanitizers: prompts from the command line and from files, its forms of
# output, wrong use. Prints cmocka's lines for tests/run.sh.
set -u
ling=$PWD/build/sanitize/ling
root=$PWD
dir=build/generate
export OMP_NUM_THREADS=2
export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1
. tests/check.sh
rm -rf "$dir" && mkdir -p "$dir" && cd "$dir" || exit 1

same() { cmp -s "$1" "$2" || problem "$1 and $2 differ"; }

# ---- a model that has learned one line, in which no character comes twice; its vocabulary has ids without a token ----
for _ in {1..41}; do printf 'abcdef "ghijk\n'; done >text.txt
cat >tiny.yaml <<'YAML'
model: { hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 270, max_position_embeddings: 64,
         num_experts: 4, num_experts_per_tok: 2, num_shared_experts: 1, moe_intermediate_size: 16, initializer_range: 0.05 }
data: { train: text, tokenizer: byte, seq_len: 40, shuffle: off }
train: { output_dir: run, seed: 3, steps: 100, micro_batch: 4, batch: 8 }
schedule: { peak_lr: 1e-2, warmup_steps: 5, decay: { steps: 40, shape: linear, final_lr: 1e-4 } }
YAML
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
		'{"prompt": 0, "text": "def \"ghijk\u000aa", "prompt_tokens": 3, "tokens": 12, "finish": "length"}' ] ||
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
	[ "$(grep -c '^==> prompt [0-3] <==$' out.txt)" = 4 ] || problem "found: $(cat out.txt)"
	# Ids that no token has are never drawn, however flat the distribution: each draw gives a byte, or ends.
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 50 --temperature 100 --json
	[ "$(wc -l <out.txt)" = 4 ] || problem "found: $(cat out.txt)"
	perl -MJSON::PP -ne 'decode_json($_)' out.txt || problem "not JSON: $(cat out.txt)"
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
	expect 2 "--temperature -1" "$ling" generate $model --prompt a --temperature -1
	expect 2 "--temperature nan" "$ling" generate $model --prompt a --temperature nan
	expect 2 "--top-p 1.5" "$ling" generate $model --prompt a --temperature 1 --top-p 1.5
	expect 2 "--batch 0" "$ling" generate $model --prompt a --batch 0
	expect 2 "--seed -1" "$ling" generate $model --prompt a --temperature 1 --seed -1
	expect 1 "step-NNNNNNN" "$ling" generate run --prompt a
	expect 1 "nothere" "$ling" generate nothere --prompt a
	expect 1 "nothere.txt" "$ling" generate $model --prompts nothere.txt
	expect 1 "max_position_embeddings is 64" "$ling" generate $model --prompt "abc" --max-tokens 62
	expect 0 "" "$ling" generate $model --prompt "abc" --max-tokens 61
	expect 1 "64 tokens and 1 more" "$ling" generate $model --prompt "$(head -c 64 text.txt)"
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
	grep -q '"prompt_tokens": 3,' chat.txt && problem "a message is no plain prompt"
	expect 0 "" "$ling" generate $model --prompt "<role>HUMAN</role>abc<role>ASSISTANT</role>" --max-tokens 8 --json
	same out.txt chat.txt
}

for name in generate batches wrong_use chat; do
	check $name
done
exit $failures
