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
	local stop # of any length, its first byte that of any token
	for stop in d ghi 'f "g' 'def "ghijk'; do
		expect 0 "" "$ling" generate $model --prompt "abc" --stop "$stop" --json
		[ "$(jq -r '.text + "|" + .finish' out.txt)" = "$(x='def "ghijk' && printf %s "${x%%"$stop"*}")|stop" ] || problem "--stop $stop: $(cat out.txt)"
	done
	expect 0 "" "$ling" generate $model --prompt "abc" --stop 'hi'
	[ "$(cat out.txt)" = 'def "g' ] || problem "found: $(cat out.txt)"
	# The whole room that the model has, by default.
	expect 0 "" "$ling" generate $model --prompt "abc" --json
	grep -q '"tokens": 61, "finish": "length"' out.txt || problem "found: $(cat out.txt)"
	# Another prompt, which leaves less room, takes nothing from it; and may be appended.
	printf 'abc\n' >room.txt
	rm -f room.jsonl
	expect 0 "" "$ling" generate $model --prompts room.txt --out room.jsonl
	printf '%060d\n' 0 >>room.txt
	expect 0 "" "$ling" generate $model --prompts room.txt --out room.jsonl
	[ "$(jq .tokens room.jsonl | tr '\n' ' ')" = "61 4 " ] || problem "found: $(cat room.jsonl)"
	# An evaluation's windows have all of that room, and no more.
	expect 0 "" "$ling" eval $model --data text --seq-len 64 --max-windows 1
	expect 1 "--seq-len 65 is more than the model's max_position_embeddings, 64" "$ling" eval $model --data text --seq-len 65 --max-windows 1
	# An empty prompt is a document's beginning.
	expect 0 "" "$ling" generate $model --prompt "" --max-tokens 1 --json
	grep -q '"prompt_tokens": 1, "tokens": 1,' out.txt || problem "found: $(cat out.txt)"
}

# A byte order mark is no part of the first prompt.
test_mark() {
	local f
	for f in prompts.txt prompts.jsonl; do
		expect 0 "" "$ling" generate $model --prompts $f --max-tokens 5 --json
		cp out.txt plain.txt
		{ printf '\357\273\277' && cat $f; } >mark.${f#*.}
		expect 0 "" "$ling" generate $model --prompts mark.${f#*.} --max-tokens 5 --json
		same out.txt plain.txt
	done
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

# Prompts of mixed lengths: the results of each one alone and without a cache, whatever runs beside it and however small
# the memory for keys and values.
test_engine() {
	local i way
	for ((i = 0; i < 40; i++)); do
		printf '{"prompt": %s}\n' "$(head -c $((i * 37 % 55 + 1 + i % 3)) text.txt | tail -c $((i * 37 % 55 + 1)) | jq -Rs .)"
	done >mixed.jsonl
	expect 0 "" "$ling" generate $model --prompts mixed.jsonl --max-tokens 7 --json --batch 1 --no-cache
	cp out.txt alone.txt
	[ "$(wc -l <alone.txt)" = 40 ] || problem "expected 40 lines: $(cat alone.txt)"
	for way in "--batch 40" "--batch 40 --kv-tokens 256" "--batch 9 --kv-tokens 1 --no-prefix-sharing"; do
		expect 0 "" "$ling" generate $model --prompts mixed.jsonl --max-tokens 7 --json $way
		same out.txt alone.txt
	done
	OMP_NUM_THREADS=3 "$ling" generate $model --prompts mixed.jsonl --max-tokens 7 --json >out.txt 2>err.txt
	same out.txt alone.txt
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
	expect 2 "--kv-tokens 9223372036854775807: expected a whole number from 1 to 1000000000000" "$ling" generate $model --prompt a --kv-tokens 9223372036854775807
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
	refuse "bad.jsonl:1: message 1: \`role\` has a character \\u0000" '{"messages": [{"role": "user\\u0000x", "content": "x"}]}\n'
	refuse "bad.jsonl:1: bad JSON" '{"prompt": "a"\n'
	refuse "bad.jsonl:1: found \`max_new_tokens\`; expected none: the option --max-tokens is for all prompts" '{"prompt": "a", "max_new_tokens": 5}\n'
	refuse "the option --temperature is" '{"messages": [{"role": "user", "content": "a"}], "stop": null, "temperature": 0}\n'
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
	# what the loss counts does not matter here
	printf '%s\n' '{"messages": [{"role": "user", "content": "abc", "weight": 1}]}' >chat.jsonl
	expect 0 "" "$ling" generate $model --prompts chat.jsonl --max-tokens 8 --json
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

# A conversation's reply ends with the token that closes a message, whatever the name of the file; a text goes on.
test_chat_end() {
	local name
	rm -rf closes && mkdir closes && cp $model/config.json $model/model.safetensors closes
	# the bytes have the ids of the byte tokenizer, but h, in whose place there is the token
	perl -MJSON::PP -CO -e 'my ($n, %vocab) = 256; for (0 .. 255) {
			my $plain = $_ >= 33 && $_ <= 126 || $_ >= 161 && $_ != 173; $vocab{chr($plain ? $_ : $n++)} = $_ }
		@vocab{"h", "<|im_end|>", "<|endoftext|>", "<|im_start|>"} = (257, 104, 256, 258);
		my @added = map { { id => $$_[0], content => $$_[1], special => JSON::PP::true, map { $_ => JSON::PP::false }
			qw(single_word lstrip rstrip normalized) } } [104, "<|im_end|>"], [256, "<|endoftext|>"], [258, "<|im_start|>"];
		print JSON::PP->new->encode({version => "1.0", truncation => undef, padding => undef, added_tokens => \@added, normalizer => undef,
			pre_tokenizer => {type => "ByteLevel", add_prefix_space => JSON::PP::false, trim_offsets => JSON::PP::true, use_regex => JSON::PP::false},
			post_processor => undef, decoder => {type => "ByteLevel"}, model => {type => "BPE", vocab => \%vocab, merges => []}})' >closes/tokenizer.json
	echo '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "abcdef \"ghijk\nabc"}]}' >closing.jsonl
	cp closing.jsonl CLOSING.JSONL && cp closing.jsonl closing.ndjson && gzip -k closing.jsonl
	for name in closing.jsonl CLOSING.JSONL closing.ndjson closing.jsonl.gz; do
		expect 0 "" "$ling" generate closes --prompts $name --chat-form chatml --max-tokens 8 --json
		has out.txt '"text": "def \"g"' '"finish": "end"'
	done
	expect 0 "" "$ling" generate closes --prompt abc --max-tokens 8 --json
	has out.txt '"text": "def \"gi"' '"tokens": 8, "finish": "length"'
	expect 0 "" "$ling" generate closes --prompt abc --chat --chat-form chatml --max-tokens 30 --json
	grep -q '"finish": "end"' out.txt || problem "--chat: the reply goes on: $(cat out.txt)"
	# so it is in evaluations; and there too a list of ids ends any reply
	local reply
	reply=$(jq .text out.txt)
	echo '{"q": "abc", "a": "x"}' >closes.jsonl
	printf -- '- { name: %s, type: exact_match, data: closes.jsonl, prompt: "{q}", answer: a, max_tokens: 30, chat: %s }\n' in_chat true plain false >closes.yaml
	expect 0 "" "$ling" eval closes --tasks closes.yaml --chat-form chatml --out closed
	jq -se --argjson reply "$reply" 'map({(.task): .}) | add | .in_chat.reply == $reply and (.in_chat.tokens | length) < 30 and (.plain.tokens | length) == 30' \
		closed/samples.jsonl >/dev/null || problem "not $reply: $(cat closed/samples.jsonl)"
	echo '{"eos_token_id": [999, 103]}' >closes/generation_config.json # g
	expect 0 "" "$ling" eval closes --tasks closes.yaml --chat-form chatml --out closed
	jq -se 'map(select(.task == "plain")) | .[0].reply == "def \""' closed/samples.jsonl >/dev/null || problem "it did not end: $(cat closed/samples.jsonl)"
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
	# Each position has draws of its own: where all tokens are equally likely, many come.
	"$ling" generate $model --prompt abc --max-tokens 60 --temperature 100 --json >flat.txt
	jq -e '.tokens >= 30 and (.text | explode | unique | length) >= 10' flat.txt >/dev/null || problem "the same at each position: $(cat flat.txt)"
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
	# The same in other spellings; and what differs in one place: it is refused.
	local template
	printf '%s\n' '{%- for m in messages -%}' '<|im_start|>{{ m.role }}' '{{ m["content"] }}<|im_end|>' '{% endfor -%}' '{# one #}' \
		'{%- if add_generation_prompt -%}' '<|im_start|>assistant' '{% endif %}' >k/chat_template.jinja
	rendered '<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n' 'A<|im_end|>'
	printf '%s\n' '{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}' \
		'{%- for message in messages %}' "    {{- '<|im_start|>' ~ (message['role'] + \"\\n\") }}" '    {%- generation %}' \
		"    {{- message['content'] ~ '<|im_end|>\\n' -}}" '    {%- endgeneration %}' '{%- endfor %}' \
		"{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}" >k/chat_template.jinja
	rendered '<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n' 'A<|im_end|>'
	local change edits=("s/ + '.n'}}/}}/" "s/'role']/'role'] | upper/" "s/^/{{ '<s>' }}/" 's/$/ /' "s/'content'/'text'/" 's/n{% endif/n\\n{% endif/'
		"s/{{/{% if message.role != 'system' %}{{/" 's/.*/{{/' 's/.*/{%-/' "s/.*/{{ m['a/" 's/.*//')
	for template in "$chatml" "$ling1"; do
		for change in "${edits[@]}"; do
			sed "$change" <<<"$template" | tr -d '\n' >k/chat_template.jinja
			[ "$(cat k/chat_template.jinja)" != "$template" ] || continue
			expect 1 "makes none of the forms" "$ling" tokenize --tokenizer k --out c c.jsonl
		done
		edits=("s/content'] /content'] + eos_token /" 's/<.role>/&\\n/' 's/HUMAN/USER/' 's/lower/trim/' 's/$/{{ eos_token }}/')
	done
	for change in 's/|role_end|>. }}{%- elif/|role_end|>\\n'"' }}{%- elif/" 's/content + .*{%- endif %}{{-/content }}{%- endif %}{{-/' \
			's/<role>ASSISTANT<.role>. }}{%- endif/<role>ASSISTANT<\/role><think>'"' }}{%- endif/"; do
		sed "$change" <<<"$ling2" | tr -d '\n' >k/chat_template.jinja
		[ "$(cat k/chat_template.jinja)" != "$ling2" ] || problem "unchanged by $change"
		expect 1 "makes none of the forms" "$ling" tokenize --tokenizer k --out c c.jsonl
	done
	rm k/chat_template.jinja
	for template in '{"default": "x"}' 5 '[{"name": "tool_use", "template": "x"}]'; do
		echo "{\"chat_template\": $template}" >k/tokenizer_config.json
		expect 1 "expected a string, or a list" "$ling" tokenize --tokenizer k --out c c.jsonl
	done
	# In tokenizer_config.json, alone or by name; and what is none of the three.
	jq -n --arg t "$chatml" '{chat_template: [{name: "x", template: "y"}, {name: "default", template: $t}]}' >k/tokenizer_config.json
	rendered '<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n' 'A<|im_end|>'
	echo '{"chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"}' >k/tokenizer_config.json
	expect 1 "--chat-form" "$ling" tokenize --tokenizer k --out c c.jsonl
	expect 0 "" "$ling" tokenize --tokenizer k --out c c.jsonl --chat-form ling
	expect 0 "" "$ling" tokenize --tokenizer k --out c text.txt # no conversation
	expect 1 "ling2 or chatml" "$ling" tokenize --tokenizer k --out c c.jsonl --chat-form vicuna
	echo '{"messages": [{"role": "tool", "content": "U"}, {"role": "assistant", "content": "A"}]}' >c.jsonl
	printf '%s' "$ling2" >k/chat_template.jinja # this one has no place for it
	expect 1 "the role is \`tool\`" "$ling" tokenize --tokenizer k --out c c.jsonl
	rm k/chat_template.jinja
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

# Tools, calls, results and reasoning as Ling 2.0's template writes them; the texts are those of Jinja.
test_chat_tools() {
	local call='"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"x": 1e-7, "s": "a\"\n"}}}, {"name": "g", "arguments": "{}"}]'
	local tools='"tools": [{"type": "function", "function": {"name": "add", "parameters": {"x": {"minimum": 0.5}, "n\u00e9": [1, true, null]}}}, {"name": "g"}]'
	local user='{"role": "user", "content": "U"}' answer='{"role": "assistant", "content": "A"}' k=tools_k
	expect 0 "" "$ling" train-tokenizer --vocab-size 270 --special '<|role_end|>' --special '<think>' --special '</think>' --special '<tool_call>' \
		--out $k/tokenizer.json text.txt
	# shellcheck disable=SC2028 # the backslashes are JSON's
	echo '{'"$tools"', "messages": [{"role": "system", "content": "S"}, '"$user"', {"role": "assistant", "content": "<think>\nold\n</think>\n\nA", "weight": 0},
		{"role": "user", "content": "V"}, {"role": "assistant", "content": "B", "reasoning_content": "\nwhy\n", '"$call"'},
		{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"},
		{"role": "assistant", "content": null, "tool_calls": [{"name": "g", "arguments": {"e": {}}}]}, {"role": "tool", "content": "5"},
		{"role": "assistant", "content": "t</think>C"}]}' | tr -d '\n' >c.jsonl
	cat >want.txt <<-'END'
		<role>SYSTEM</role>S
		# Tools

		You may call one or more functions to assist with the user query.

		You are provided with function signatures within <tools></tools> XML tags:
		<tools>
		{"type": "function", "function": {"name": "add", "parameters": {"x": {"minimum": 0.5}, "né": [1, true, null]}}}
		{"name": "g"}
		</tools>

		For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
		<tool_call>
		{"name": <function-name>, "arguments": <args-json-object>}
		</tool_call>
		detailed thinking off<|role_end|><role>HUMAN</role>U<|role_end|><role>ASSISTANT</role>A<|role_end|><role>HUMAN</role>V<|role_end|><role>ASSISTANT</role>
		<think>
		why
		</think>

		B
		<tool_call>
		{"name": "add", "arguments": {"x": 1e-07, "s": "a\"\n"}}
		</tool_call>
		<tool_call>
		{"name": "g", "arguments": {}}
		</tool_call><|role_end|><role>OBSERVATION</role>
		<tool_response>
		3
		</tool_response>
		<tool_response>
		4
		</tool_response><|role_end|><role>ASSISTANT</role><tool_call>
		{"name": "g", "arguments": {"e": {}}}
		</tool_call><|role_end|><role>OBSERVATION</role>
		<tool_response>
		5
		</tool_response><|role_end|><role>ASSISTANT</role>
		<think>
		t
		</think>

		C<|role_end|>
	END
	perl -0pi -e 's/\n$//' want.txt
	expect 0 "" "$ling" tokenize --tokenizer $k --out c c.jsonl --chat-form ling2
	expect 0 "" "$ling" tokenize --decode c --tokenizer $k
	same out.txt want.txt
	# The same ids as those of the whole text: tags are tokens where the tokenizer has them.
	jq -Rs '{text: .}' -c want.txt >whole.jsonl
	expect 0 "" "$ling" tokenize --tokenizer $k --out whole whole.jsonl
	head -c -2 whole.bin | cmp -s - c.bin || problem "other ids than those of the whole text"
	# The loss counts what the assistant says, thinks and calls, and not the results.
	write_tokens learned 8 'S<' $(perl -e 'local $/; open A, "<:raw", "c.bin"; open B, "<:raw", "c.mask.bin"; my @mask = unpack "C*", <B>;
		my $i = 0; print join " ", grep { $mask[$i++] } unpack "S<*", <A>')
	expect 0 "" "$ling" tokenize --decode learned --tokenizer $k
	perl -0ne 's/^.*?V<\|role_end\|>//s; print join "", /<role>ASSISTANT<\/role>(.*?<\|role_end\|>)/gs' want.txt >want_learned.txt
	same out.txt want_learned.txt
	# Tools without a system message, also as a string.
	echo '{"tools": "[{\"name\": \"g\"}]", "messages": ['"$user, $answer"']}' >c.jsonl
	expect 0 "" "$ling" tokenize --tokenizer $k --out c c.jsonl --chat-form ling2
	expect 0 "" "$ling" tokenize --decode c --tokenizer $k
	has out.txt '<role>SYSTEM</role># Tools'
	has out.txt '{"name": "g"}'
	# A template has a place for tools if it writes them as that one does.
	printf '%s\n' "{# thinking_option = 'off' 'detailed thinking ' + thinking_option + '<|role_end|>' add_generation_prompt <role>SYSTEM</role> <role>HUMAN</role>" \
		"<role>ASSISTANT</role> <tools> tool | tojson '\\n</tools>\\n\\nFor each function call' <role>OBSERVATION</role> '\\n<tool_response>\\n' '\\n</tool_response>'" \
		"'<tool_call>\\n{\"name\": \"' tool_call.arguments | tojson '}\\n</tool_call>' ns.last_query_index" \
		"'\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') #}" \
		"{{- messages[0].content + '\\n' }}{% endif %}{% if add_generation_prompt %}{{- '<role>ASSISTANT</role>' }}{% endif %}" >$k/chat_template.jinja
	expect 0 "" "$ling" tokenize --tokenizer $k --out c c.jsonl
	sed -i 's/tool | tojson/tool/' $k/chat_template.jinja
	expect 1 "c.jsonl:1: \`tools\` has no place" "$ling" tokenize --tokenizer $k --out c c.jsonl
	echo '{"messages": ['"$user"', {"role": "assistant", "content": "t</think>A"}]}' >c.jsonl
	expect 1 "message 2: its content holds </think>, which the model's template takes apart" "$ling" tokenize --tokenizer $k --out c c.jsonl
	expect 0 "" "$ling" tokenize --tokenizer $k --out c c.jsonl --chat-form ling2
	# What that template would leave out, and what is no call.
	while IFS='|' read -r message text; do
		printf '%s\n' "$message" >c.jsonl
		expect 1 "$text" "$ling" tokenize --tokenizer $k --out c c.jsonl --chat-form ling2
	done <<-END
		{"tools": [{"name": "g", "n": [NaN]}], "messages": [$user, $answer]}|\`tools\`, tool 1: has a value that is NaN; expected JSON
		{"messages": [$user, {"role": "assistant", "tool_calls": [{"name": "g", "arguments": {"x": [1, 1e400]}}]}]}|\`arguments\` has a value that is too large a number, 1e400
		{"messages": [$user, {"role": "assistant", "content": "<think>t</think>A"}, $user, $answer]}|message 2: Ling 2.0's template leaves out the reasoning
		{"messages": [$user, {"role": "assistant", "content": "x<think>t</think>A"}]}|message 2: its content has text before <think>
		{"messages": [$user, {"role": "assistant", "content": "<think>t</think>A</think>"}]}|message 2: its content holds </think> twice
		{"messages": [$user, {"role": "assistant", "content": "A", "reasoning_content": ["t"]}]}|message 2: \`reasoning_content\` is an array
		{"messages": [$user, {"role": "assistant", "content": "A", "reasoning": "t"}]}|message 2: \`reasoning\` has no place
		{"messages": [{"role": "user", "content": "U", "reasoning_content": "t"}, $answer]}|message 1: \`reasoning_content\` has no place
		{"messages": [$user, {"role": "assistant", "content": "A", "tool_calls": {"name": "g"}}]}|message 2: \`tool_calls\` is an object
		{"messages": [$user, {"role": "assistant", "content": "A", "tool_calls": ["g"]}]}|message 2: \`tool_calls\`, call 1: is a string
		{"messages": [$user, {"role": "assistant", "content": "A", "tool_calls": [{"name": "g"}]}]}|call 1: \`arguments\` is missing
		{"messages": [$user, {"role": "assistant", "content": "A", "tool_calls": [{"function": {"arguments": {}}}]}]}|call 1: \`name\` is missing
		{"messages": [$user, {"role": "assistant", "content": null}]}|message 2: \`content\` is null
		{"messages": [$user, $answer], "tools": ["g"]}|tool 1: is a string; expected an object
		{"messages": [$user, $answer], "tools": {"g": 1}}|\`tools\` is an object; expected a list of objects
	END
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

# results FILE: the results of --out in the order of prompts and draws, without what they were made with.
results() { jq -cS 'del(.made_with)' "$1" | jq -cs 'sort_by(.prompt, .draw)[]'; }
# refuse_out TEXT [OPTIONS]: out.jsonl, which holds results of other prompts or options, is an error with that text, and stays as it is
refuse_out() {
	cp out.jsonl before.jsonl
	expect 1 "$1" "$ling" generate $model --prompts prompts.txt --max-tokens 20 --out out.jsonl "${@:2}"
	same out.jsonl before.jsonl
}

# --out: each result is appended when it is ready, and the same command adds what is missing.
test_out() {
	local drawn="--temperature 1.5 --seed 4 --n 6" pid
	rm -f out.jsonl whole.jsonl
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 20 --json
	jq -cS '.draw = 0' out.txt >want.txt
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 20 --out out.jsonl
	[ ! -s out.txt ] || problem "printed: $(cat out.txt)"
	json out.jsonl
	results out.jsonl >found.txt
	same found.txt want.txt
	cp out.jsonl all.jsonl
	expect 0 "" "$ling" generate $model --prompts prompts.jsonl --max-tokens 20 --out out.jsonl # the same prompts
	has err.txt "out.jsonl: 4 of 4 results are there"
	same out.jsonl all.jsonl
	# what is no result of this command
	local was="out.jsonl:1: was made otherwise: its \`options\` is \"--max-tokens 20 --temperature 0\", and that of this command \"--max-tokens"
	refuse_out "$was 20 --temperature 0.8 --seed 0\"; give --out another name" --temperature 0.8
	refuse_out "$was 20 --temperature 0.8 --seed 7 --top-k 3 --top-p 0.9\"" --temperature 0.8 --top-k 3 --top-p 0.9 --seed 7
	refuse_out "$was 21 --temperature 0\"" --max-tokens 21
	refuse_out "$was 20 --temperature 0 --logprobs --stop x y\"" --stop "x y" --logprobs
	sed '1s/c/d/; 2s/f/e/; 3s/k/i/; 4s/g/h/' prompts.txt >changed.txt
	refuse_out "was made otherwise: its \`prompt\` is \"" --prompts changed.txt
	! grep -q '"model": "00000000"' out.jsonl || problem "no checksum: $(head -n 1 out.jsonl)"
	sed -i '1s/"model": "[0-9a-f]*"/"model": "00000000"/' out.jsonl
	refuse_out "out.jsonl:1: was made otherwise: its \`model\` is \"00000000\", and that of this command"
	cp all.jsonl out.jsonl
	sed -n 2p all.jsonl >>out.jsonl
	refuse_out "is in the file twice"
	head -n 1 prompts.txt >fewer.txt
	cp all.jsonl out.jsonl
	refuse_out "and there are 1 prompts" --prompts fewer.txt
	for line in '{"prompt": 0, "text": "abc"}\n' '{"prompt": "abc"}\n' 'abc\n' '\n' 'a note' '{"prompt": 1, "draw": 0, "made_with": 3}\n' '[]\n'; do
		printf "$line" >out.jsonl
		refuse_out "out.jsonl:1: "
	done
	expect 1 "nothere/out.jsonl: cannot create" "$ling" generate $model --prompts prompts.txt --out nothere/out.jsonl
	# a line that an interruption has cut is computed again, wherever it was cut
	for cut in 1 5 40 100; do
		{ head -n 2 all.jsonl && sed -n 3p all.jsonl | head -c $cut; } >out.jsonl
		expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 20 --out out.jsonl --batch 1
		has err.txt "note: out.jsonl:3 is incomplete" "out.jsonl: 2 of 4 results are there"
		sort out.jsonl >found.txt
		sort all.jsonl >want.txt
		same found.txt want.txt
	done
	# killed in the middle, and continued
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 50 --out whole.jsonl $drawn
	[ "$(lines whole.jsonl)" = 24 ] || problem "$(lines whole.jsonl) lines"
	for after in 1 5 9; do
		rm -f part.jsonl
		"$ling" generate $model --prompts prompts.txt --max-tokens 50 --out part.jsonl $drawn --batch 3 2>/dev/null &
		pid=$!
		wait_for_lines part.jsonl $after
		kill -9 $pid
		wait $pid 2>/dev/null
		[ "$(lines part.jsonl)" -lt 24 ] || problem "it had ended"
		head -n 1 part.jsonl >first.txt
		expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 50 --out part.jsonl $drawn
		head -n 1 part.jsonl >found.txt
		same found.txt first.txt
		sort part.jsonl >found.txt
		sort whole.jsonl >want.txt
		same found.txt want.txt
	done
	# more draws, and fewer, of the same file
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 50 --out whole.jsonl $drawn --n 8
	[ "$(lines whole.jsonl)" = 32 ] || problem "$(lines whole.jsonl) lines"
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 50 --out whole.jsonl $drawn --n 2
	[ "$(lines whole.jsonl)" = 32 ] || problem "$(lines whole.jsonl) lines"
	# two at a time
	rm -f part.jsonl
	"$ling" generate $model --prompts prompts.txt --max-tokens 50 --out part.jsonl $drawn --n 40 2>/dev/null &
	pid=$!
	wait_for_lines part.jsonl 1
	expect 1 "part.jsonl" "$ling" generate $model --prompts prompts.txt --max-tokens 50 --out part.jsonl $drawn --n 40
	kill $pid
	wait $pid
	if [ -c /dev/full ]; then
		expect 1 "is no regular file" "$ling" generate $model --prompts prompts.txt --out /dev/full
	fi
	rm -f limited.jsonl
	expect 1 "limited.jsonl: cannot write" bash -c "ulimit -f 2; exec \"\$0\" \"\$@\"" "$ling" generate $model --prompts prompts.txt --max-tokens 50 --out limited.jsonl $drawn --n 40
	expect 0 "" "$ling" generate $model --prompts prompts.txt --max-tokens 50 --out limited.jsonl $drawn
	has err.txt "is incomplete"
}

# --n: several draws of a prompt; the first one is that of a single draw.
test_draws() {
	local drawn="--max-tokens 30 --temperature 1.5 --seed 4 --json"
	expect 0 "" "$ling" generate $model --prompts prompts.txt $drawn
	cp out.txt single.txt
	expect 0 "" "$ling" generate $model --prompts prompts.txt $drawn --n 5 --batch 7
	cp out.txt several.txt
	[ "$(jq -c '[.prompt, .draw]' several.txt | tr -d '\n')" = "$(for p in 0 1 2 3; do for d in 0 1 2 3 4; do printf '[%d,%d]' $p $d; done; done)" ] ||
		problem "found: $(cat several.txt)"
	jq -c 'select(.draw == 0) | del(.draw)' several.txt >found.txt
	jq -c . single.txt >want.txt
	same found.txt want.txt
	[ "$(jq -c 'select(.prompt == 0) | .text' several.txt | sort -u | wc -l)" = 5 ] || problem "the same draws: $(cat several.txt)"
	expect 0 "" "$ling" generate $model --prompts prompts.txt $drawn --n 5 --batch 1 --no-prefix-sharing
	same out.txt several.txt
	expect 0 "" "$ling" generate $model --prompts prompts.txt $drawn --n 3 # the first three
	jq -c 'select(.draw < 3)' several.txt >want.txt
	jq -c . out.txt >found.txt
	same found.txt want.txt
	expect 0 "" "$ling" generate $model --prompt abc --max-tokens 3 --temperature 1.5 --n 2
	[ "$(grep -c '^==> prompt 1, draw [12] <==$' out.txt)" = 2 ] || problem "found: $(cat out.txt)"
	expect 2 "--n goes with a --temperature above 0" "$ling" generate $model --prompt a --n 2
	expect 2 "--n 0: expected a whole number from 1 to 1000000" "$ling" generate $model --prompt a --n 0
}

# --logprobs: log softmax of the logits, as an evaluation of the same tokens has them.
test_logprobs() {
	local drawn
	for drawn in "" "--temperature 2 --top-k 5 --seed 1"; do
		expect 0 "" "$ling" generate $model --prompt "" --max-tokens 40 --json --logprobs $drawn
		cp out.txt scored.txt
		jq -e '(.ids | length) == .tokens and (.logprobs | length) == .tokens and (.logprobs | max) <= 0' scored.txt >/dev/null || problem "found: $(cat scored.txt)"
		write_tokens scored 8 'S<' 256 $(jq '.ids[]' scored.txt)
		expect 0 "" "$ling" eval $model --data scored --seq-len "$(jq .tokens scored.txt)" --json
		[ "$(jq -n --slurpfile a scored.txt --slurpfile b out.txt '($a[0].logprobs | add / length) + $b[0].loss | fabs < 1e-6')" = true ] ||
			problem "$(cat scored.txt) and $(cat out.txt)"
		expect 0 "" "$ling" generate $model --prompt "" --max-tokens 40 --json --logprobs --no-cache $drawn
		same out.txt scored.txt
		expect 0 "" "$ling" generate $model --prompt "" --max-tokens 40 --json $drawn
		jq -c 'del(.ids, .logprobs)' scored.txt >want.txt
		jq -c . out.txt >found.txt
		same found.txt want.txt
	done
	expect 2 "--logprobs goes with --json or --out" "$ling" generate $model --prompt a --logprobs
}

# On a terminal a line says each second how far it is, and the last one how much there was.
test_progress() {
	rm -f progress.jsonl
	timeout 60 script -qec "$ling generate $model --prompts prompts.txt --max-tokens 50 --temperature 100 --n 30 --batch 1 --out progress.jsonl" /dev/null </dev/null \
		>terminal.txt 2>&1 || problem "exit status $?: $(tail -c 300 terminal.txt)"
	perl -0777 -ne 'exit !(/generating: (\d+) of 120 done, ([\d.]+) tokens\/s in, ([\d.]+) out, (\d+)% of the memory for keys and values/ &&
		$2 > 0 && $3 > 0 && $4 > 0 && $4 <= 100)' terminal.txt || problem "found: $(head -c 500 terminal.txt | cat -v)"
	grep -aq "$((30 * $(jq -s 'map(select(.draw == 0) | .prompt_tokens) | add' progress.jsonl))) tokens in, $(jq -s 'map(.tokens) | add' progress.jsonl) out, " terminal.txt ||
		problem "found: $(tail -c 300 terminal.txt | cat -v)"
}

# - is the standard input.
test_standard_input() {
	local f
	for f in text:txt jsonl:jsonl; do
		expect 0 "" "$ling" generate $model --prompts prompts.${f#*:} --max-tokens 5 --json
		cp out.txt file.txt
		expect 0 "" "$ling" generate $model --prompts - --format ${f%:*} --max-tokens 5 --json <prompts.${f#*:}
		same out.txt file.txt
		gzip -c prompts.${f#*:} >packed
		expect 0 "" "$ling" generate $model --prompts packed --format ${f%:*} --max-tokens 5 --json
		same out.txt file.txt
	done
	expect 0 "" "$ling" generate $model --prompt 'f "gh' --max-tokens 5 --json
	cp out.txt file.txt
	printf 'f "gh' >input.txt
	expect 0 "" "$ling" generate $model --prompt - --max-tokens 5 --json <input.txt
	same out.txt file.txt
	printf 'f "gh\r\n' >input.txt
	expect 0 "" "$ling" generate $model --prompt - --max-tokens 5 --json <input.txt
	same out.txt file.txt
	printf 'f "gh\n\n' >input.txt # a line and an empty line
	expect 0 "" "$ling" generate $model --prompt - --max-tokens 5 --json <input.txt
	[ "$(jq .prompt_tokens out.txt)" = 6 ] || problem "found: $(cat out.txt)"
	expect 0 "" "$ling" generate $model --prompt - --max-tokens 1 --json </dev/null
	[ "$(jq .prompt_tokens out.txt)" = 1 ] || problem "found: $(cat out.txt)"
	expect 2 "add --format text or --format jsonl" "$ling" generate $model --prompts - <prompts.txt
	expect 2 "--format goes with --prompts" "$ling" generate $model --prompt - --format text <prompts.txt
	expect 1 "no prompts" "$ling" generate $model --prompts - --format text </dev/null
	# bytes that are not UTF-8 are bytes of a text, and no JSON
	printf 'ab\351\n' >input.txt
	expect 0 "" "$ling" generate $model --prompts - --format text --max-tokens 1 --json <input.txt
	[ "$(jq .prompt_tokens out.txt)" = 3 ] || problem "found: $(cat out.txt)"
	printf '{"prompt": "ab\351"}\n' >input.txt
	expect 1 "UTF-8" "$ling" generate $model --prompts - --format jsonl --max-tokens 1 --json <input.txt
}

check generate out draws logprobs progress standard_input mark batches engine wrong_use chat chat_end variety end_ids chat_forms chat_tools run_directory
finish
