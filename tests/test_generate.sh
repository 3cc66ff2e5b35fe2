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

# An id or a list of ids ends a text by the model's own word: generation_config.json's, else config.json's.
test_end_ids() {
	rm -rf ends && mkdir ends && cp $model/config.json $model/model.safetensors ends
	local from="ends --tokenizer byte --prompt abc --max-tokens 12 --json"
	expect 0 "" "$ling" generate $from
	has out.txt '"text": "def \"ghijk\na", "prompt_tokens": 3, "tokens": 12, "finish": "length"'
	sed -i 's/"head_dim"/"eos_token_id": [999, 103], "head_dim"/' ends/config.json # 103: g
	expect 0 "" "$ling" generate $from
	has out.txt '"text": "def \"", "prompt_tokens": 3, "tokens": 5, "finish": "end"'
	echo '{"eos_token_id": [105, 10]}' >ends/generation_config.json # i, new line
	expect 0 "" "$ling" generate $from
	has out.txt '"text": "def \"gh", "prompt_tokens": 3, "tokens": 7, "finish": "end"'
	echo '{"eos_token_id": 102}' >ends/generation_config.json # f
	expect 0 "" "$ling" generate $from
	has out.txt '"text": "de", "prompt_tokens": 3, "tokens": 2, "finish": "end"'
	echo '{"eos_token_id": ["f"]}' >ends/generation_config.json
	expect 1 'generation_config.json: `eos_token_id` has' "$ling" generate $from
}

# rendered TEXT LEARNED [OPTIONS]: c.jsonl as tokens is TEXT, and the loss counts LEARNED.
rendered() {
	expect 0 "" "$ling" tokenize --tokenizer k --out c c.jsonl "${@:3}"
	expect 0 "" "$ling" tokenize --decode c --tokenizer k
	printf "$1" >want.txt
	same out.txt want.txt
	write_tokens learned 8 'S<' $(perl -e 'local $/; open A, "<:raw", "c.bin"; open B, "<:raw", "c.mask.bin"; my @mask = unpack "C*", <B>;
		my $i = 0; print join " ", grep { $mask[$i++] } unpack "S<*", <A>')
	expect 0 "" "$ling" tokenize --decode learned --tokenizer k
	[ "$(cat out.txt)" = "$2" ] || problem "learned: $(cat out.txt)"
}

# A conversation becomes what the model's own chat_template makes of it; the texts are those of Jinja.
test_chat_forms() {
	local ling1="{% for message in messages %}{% set role = message['role'] | lower %}{% if role == 'user' %}{% set role = 'HUMAN' %}{% endif %}\
{{ '<role>' + (role | upper) + '</role>' + message['content'] }}{% endfor %}{% if add_generation_prompt %}{{ '<role>ASSISTANT</role>' }}{% endif %}"
	local ling2="{% set thinking_option = 'off' %}{{- '<role>SYSTEM</role>' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n' }}\
{%- endif %}{{- 'detailed thinking ' + thinking_option + '<|role_end|>' }}{%- for message in messages %}{%- if message.role == 'user' %}\
{{- '<role>HUMAN</role>' + message.content + '<|role_end|>' }}{%- elif message.role == 'assistant' %}{{- '<role>ASSISTANT</role>' + message.content }}\
{{- '<|role_end|>' }}{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<role>ASSISTANT</role>' }}{%- endif %}"
	local chatml="{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
	expect 0 "" "$ling" train-tokenizer --vocab-size 270 --special '<|role_end|>' --special '<|im_start|>' --special '<|im_end|>' \
		--out k/tokenizer.json text.txt
	printf '%s\n' '{"messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}, {"role": "assistant", "content": "A"},
		{"role": "user", "content": "V"}, {"role": "assistant", "content": "B"}]}' | tr -d '\n' >c.jsonl
	local in_ling2='<role>SYSTEM</role>S\ndetailed thinking off<|role_end|><role>HUMAN</role>U<|role_end|><role>ASSISTANT</role>A<|role_end|>'
	in_ling2+='<role>HUMAN</role>V<|role_end|><role>ASSISTANT</role>B<|role_end|>'
	local in_chatml='<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n'
	in_chatml+='<|im_start|>user\nV<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n'
	expect 0 "" "$ling" tokenize --tokenizer k --out plain c.jsonl
	printf '%s' "$ling1" >k/chat_template.jinja
	expect 0 "" "$ling" tokenize --tokenizer k --out c c.jsonl
	same c.bin plain.bin # as without a template
	expect 0 "" "$ling" tokenize --decode c --tokenizer k
	has out.txt '<role>SYSTEM</role>S<role>HUMAN</role>U<role>ASSISTANT</role>A<role>HUMAN</role>V<role>ASSISTANT</role>B<|endoftext|>'
	printf '%s' "$ling2" >k/chat_template.jinja
	rendered "$in_ling2" 'A<|role_end|>B<|role_end|>'
	printf '%s' "$chatml" >k/chat_template.jinja
	rendered "$in_chatml" 'A<|im_end|>B<|im_end|>'
	rendered "$in_ling2" 'A<|role_end|>B<|role_end|>' --chat-form ling2
	rm k/chat_template.jinja
	rendered "$in_chatml" 'A<|im_end|>B<|im_end|>' --chat-form chatml
	# A system message is Ling 2.0's in any case.
	echo '{"messages": [{"role": "user", "content": "U"}, {"role": "assistant", "content": "A"}]}' >c.jsonl
	rendered '<role>SYSTEM</role>detailed thinking off<|role_end|><role>HUMAN</role>U<|role_end|><role>ASSISTANT</role>A<|role_end|>' \
		'A<|role_end|>' --chat-form ling2
	# In tokenizer_config.json, alone or by name; and what is none of the three.
	jq -n --arg t "$chatml" '{chat_template: [{name: "x", template: "y"}, {name: "default", template: $t}]}' >k/tokenizer_config.json
	rendered '<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n' 'A<|im_end|>'
	echo '{"chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"}' >k/tokenizer_config.json
	expect 1 "--chat-form" "$ling" tokenize --tokenizer k --out c c.jsonl
	expect 0 "" "$ling" tokenize --tokenizer k --out c c.jsonl --chat-form ling
	expect 0 "" "$ling" tokenize --tokenizer k --out c text.txt # no conversation
	expect 1 "ling2 or chatml" "$ling" tokenize --tokenizer k --out c c.jsonl --chat-form vicuna
	echo '{"messages": [{"role": "tool", "content": "U"}, {"role": "assistant", "content": "A"}]}' >c.jsonl
	expect 1 "the role is \`tool\`" "$ling" tokenize --tokenizer k --out c c.jsonl --chat-form ling2
	# generate: the template in the model's folder holds, whatever the tokenizer.
	rm -rf own && mkdir own && cp $model/config.json $model/model.safetensors own
	cp k/tokenizer_config.json own
	expect 1 "--chat-form" "$ling" generate own --tokenizer byte --prompt abc --chat
	expect 0 "" "$ling" generate own --tokenizer byte --prompt abc --max-tokens 1
	expect 0 "" "$ling" generate own --tokenizer byte --prompt abc --chat --chat-form ling --max-tokens 8 --json
	same out.txt chat.txt
	expect 1 "no token <|im_end|>" "$ling" generate own --tokenizer byte --prompt abc --chat --chat-form chatml
	expect 1 "--chat-form vicuna: expected" "$ling" generate own --tokenizer byte --prompt abc --chat --chat-form vicuna
	expect 2 "--chat-form goes with --chat" "$ling" generate own --tokenizer byte --prompt abc --chat-form ling
	# Whatever the name of the file, a reply ends with the token that ends a message.
	yes '{"messages": [{"role": "user", "content": "abc"}]}' | head -n 30 >many.jsonl
	cp many.jsonl many.ndjson
	expect 0 "" "$ling" generate own --tokenizer k --prompts many.jsonl --chat-form chatml --temperature 100 --json
	mv out.txt many.txt
	expect 0 "" "$ling" generate own --tokenizer k --prompts many.ndjson --chat-form chatml --temperature 100 --json
	same out.txt many.txt
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

check generate batches wrong_use chat variety end_ids chat_forms run_directory
finish
