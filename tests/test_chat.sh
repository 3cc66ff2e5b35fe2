#!/bin/bash
# `ling chat`, built with sanitizers: conversations from a pipe, its commands, what is refused; and what a terminal shows.
. "$(dirname "$0")/check.sh"
train=$root/ling # the same program, faster

# ---- a model that has learned two conversations by heart, with characters of several bytes; one that never ends ----
printf '%s\n' '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "xyé"}, {"role": "user", "content": "b"},
	{"role": "assistant", "content": "漢w"}]}' '{"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "pq"}]}' |
	tr -d '\n\t' | sed 's/},{/}, {/; s/}{/}\n{/; s/$/\n/' >talks.jsonl
chat() { "$ling" chat talker "$@"; }

test_trained() {
	local i
	for i in $(seq 20); do cat talks.jsonl; done >many.jsonl
	expect 0 "" "$ling" train-tokenizer --vocab-size 270 --out k/tokenizer.json talks.jsonl
	expect 0 "" "$ling" tokenize --tokenizer k --out talks many.jsonl
	tiny model.hidden_size=32 model.head_dim=8 model.vocab_size=280 model.max_position_embeddings=64 model.num_experts=4 model.moe_intermediate_size=16 \
		data.train=talks data.tokenizer=k data.seq_len=32 data.packing=documents data.document_mask=true train.steps=120 train.micro_batch=4 train.batch=8 \
		schedule.warmup_steps=5 schedule.decay='{ steps: 40, shape: linear, final_lr: 1e-4 }' train.output_dir=talker
	expect 0 "" "$train" train tiny.yaml
	for i in {1..41}; do printf 'abcdef "ghijk\n'; done >text.txt
	expect 0 "" "$ling" tokenize --out text text.txt
	tiny model.hidden_size=32 model.head_dim=8 model.vocab_size=270 model.max_position_embeddings=100000 model.num_experts=4 model.moe_intermediate_size=16 \
		model.rope_theta=600000 data.seq_len=40 data.shuffle=off train.steps=60 train.micro_batch=4 train.batch=8 train.output_dir=endless
	expect 0 "" "$train" train tiny.yaml
}

# Several rounds; each reply is the one that `ling generate` gives to the saved conversation.
test_rounds() {
	rm -f saved.jsonl
	printf 'a\nb\n/save saved.jsonl\n\r\n/reset\n  \nc\n/save saved.jsonl\na\r\nb' >input.txt
	expect 0 "" chat <input.txt
	printf '%s\n' xyé 漢w pq >want.txt
	head -n 3 out.txt >found.txt
	same found.txt want.txt
	[ "$(lines out.txt)" = 5 ] || problem "found: $(cat out.txt)"
	json saved.jsonl
	cat saved.jsonl >found.txt
	same found.txt talks.jsonl
	expect 0 "" "$ling" tokenize --tokenizer k --out again saved.jsonl
	jq -c '.messages |= .[:-1]' saved.jsonl >asked.jsonl
	expect 0 "" "$ling" generate talker --prompts asked.jsonl --json
	[ "$(jq -r .text out.txt)" = "$(printf '%s\n' 漢w pq)" ] || problem "found: $(cat out.txt)"
	# drawn replies too, and a seed gives the same ones again
	printf 'a\nb\n/save drawn.jsonl\n' >input.txt
	rm -f drawn.jsonl
	expect 0 "" chat --temperature 3 --seed 5 --max-tokens 9 <input.txt
	cp out.txt drawn.txt
	expect 0 "" chat --temperature 3 --seed 5 --max-tokens 9 <input.txt
	same out.txt drawn.txt
	expect 0 "" chat --temperature 3 --seed 6 --max-tokens 9 <input.txt
	! cmp -s out.txt drawn.txt || problem "another seed, the same replies"
	head -n 1 drawn.jsonl | jq -c '.messages |= .[:-1]' >asked.jsonl
	expect 0 "" "$ling" generate talker --prompts asked.jsonl --json --temperature 3 --seed 5 --max-tokens 9
	[ "$(jq .text out.txt)" = "$(head -n 1 drawn.jsonl | jq '.messages[-1].content')" ] || problem "found: $(cat out.txt)"
	# what is printed is UTF-8, whatever tokens were drawn
	printf 'a\n/reset\nb\n/reset\nc\n' >input.txt
	expect 0 "" chat --temperature 100 --seed 3 <input.txt
	iconv -f UTF-8 -t UTF-8 out.txt >found.txt || problem "not UTF-8: $(cat -v out.txt)"
	grep -q � out.txt || problem "no byte that is no character: $(cat -v out.txt)"
}

# A system message goes first, as in a file.
test_system() {
	rm -f saved.jsonl
	printf 'a\n/system S é\n/save saved.jsonl\n/reset\nc\n/save saved.jsonl\n/system\n/reset\na\n/save saved.jsonl\n' >input.txt
	expect 0 "" chat --max-tokens 5 <input.txt
	[ "$(jq -c '.messages | map(.role)' saved.jsonl | tr '\n' ' ')" = '["system","user","assistant"] ["system","user","assistant"] ["user","assistant"] ' ] ||
		problem "found: $(cat saved.jsonl)"
	[ "$(jq -r '.messages[0].content' saved.jsonl | head -n 1)" = "S é" ] || problem "found: $(cat saved.jsonl)"
	sed -n 2p saved.jsonl | jq -c '.messages |= .[:-1]' >asked.jsonl
	sed -n 2p out.txt >reply.txt
	expect 0 "" "$ling" generate talker --prompts asked.jsonl --max-tokens 5
	same out.txt reply.txt
	printf '{"text": "x"}' >saved.jsonl # a line without an end
	printf 'c\n/save saved.jsonl  \n' >input.txt
	expect 0 "" chat --max-tokens 5 --system "S é" <input.txt
	same out.txt reply.txt
	[ "$(jq -c '.messages | length' saved.jsonl | tr '\n' ' ')" = '0 3 ' ] || problem "found: $(cat saved.jsonl)"
}

# A byte order mark at the beginning is no part of the first line, be it a message or a command.
test_mark() {
	rm -f saved.jsonl
	printf '\357\273\277a\n/save saved.jsonl\n' >input.txt
	expect 0 "" chat --max-tokens 1 <input.txt
	[ "$(jq -r '.messages[0].content' saved.jsonl)" = a ] || problem "found: $(cat saved.jsonl)"
	printf '\357\273\277/system S\na\n/save saved.jsonl\n' >input.txt
	expect 0 "" chat --max-tokens 1 <input.txt
	[ "$(jq -r '.messages[0].content' saved.jsonl | tail -n 1)" = S ] || problem "found: $(cat saved.jsonl)"
}

# Of a conversation for which the disk has no room, no part stays in the file.
test_full_disk() {
	printf '{"text": "%0990d"}\n' 0 >saved.jsonl
	cp saved.jsonl before.jsonl
	printf 'a\n/save saved.jsonl\n' >input.txt
	(ulimit -f 1 && trap '' XFSZ && exec "$ling" chat talker --max-tokens 5) <input.txt >out.txt 2>err.txt
	[ $? = 1 ] && has err.txt "line 2: saved.jsonl: cannot write: No space left" || problem "found: $(cat err.txt)"
	same saved.jsonl before.jsonl
}

# refuse TEXT INPUT [OPTIONS]: these lines are an error with that text
refuse() {
	printf "$2" >input.txt
	expect 1 "$1" chat "${@:3}" <input.txt
}

test_refused() {
	refuse "standard input, line 2: the text is not UTF-8 from byte 3 on" 'a\nab\351c\n'
	refuse "line 1: /foo: no such command; /help" '/foo\n'
	refuse "line 1: /savex y: no such command" '/savex y\n'
	refuse "line 1: there is nothing to save yet" '/save x.jsonl\n'
	[ ! -e x.jsonl ] || problem "an empty conversation was saved"
	refuse "line 2: /save: expected the name of a .jsonl file" 'a\n/save\n'
	refuse "line 2: /save x.txt: expected the name of a .jsonl file" 'a\n/save x.txt\n'
	refuse "line 2: nothere/x.jsonl: cannot write" 'a\n/save nothere/x.jsonl\n'
	refuse "only a shell expands ~" 'a\n/save ~/x.jsonl\n'
	refuse "/reset has no argument" '/reset now\n'
	refuse "a command has no byte 0" '/save x\0.jsonl\n'
	# the model has 64 positions
	refuse "line 1: the conversation has" "$(head -c 70 /dev/zero | tr '\0' z)\n"
	has err.txt "and there is room for 64 (the model's positions): nothing was sent; /save keeps the conversation, /reset begins another"
	refuse "there is room for 20 (--seq-len)" "$(head -c 30 /dev/zero | tr '\0' z)\n" --seq-len 20
	expect 1 "--seq-len 65 is more than the model's longest sequence, 64" chat --seq-len 65 <input.txt
	expect 2 "--temperature" chat --top-k 3 <input.txt
	expect 2 "--temperature" chat --seed 3 <input.txt
	expect 2 "--temperature 101: expected a number from 0 to 100" chat --temperature 101 <input.txt
	expect 2 "--top-p 0: expected a number above 0 and up to 1" chat --temperature 1 --top-p 0 <input.txt
	expect 2 "--top-k 0: expected a whole number" chat --temperature 1 --top-k 0 <input.txt
	expect 2 "--max-tokens 0: expected a whole number" chat --max-tokens 0 <input.txt
	expect 2 "--kv-tokens 0: expected a whole number" chat --kv-tokens 0 <input.txt
	expect 1 "--chat-form vicuna: expected" chat --chat-form vicuna <input.txt
	expect 1 "no token <|im_end|>" chat --chat-form chatml <input.txt
	expect 1 "not UTF-8" chat --system $'\351' <input.txt
	expect 1 "nothere" "$ling" chat nothere <input.txt
	expect 2 "too few arguments" "$ling" chat
	# a / at the beginning of a message
	rm -f saved.jsonl
	printf '//a/\n/save saved.jsonl\n/quit\n/foo\n' >input.txt
	expect 0 "" chat --max-tokens 5 <input.txt
	[ "$(jq -r '.messages[0].content' saved.jsonl)" = "/a/" ] || problem "found: $(cat saved.jsonl)"
	[ "$(lines out.txt)" = 1 ] || problem "found: $(cat out.txt)"
	printf 'a\n/help\n' >input.txt
	expect 0 "" chat --max-tokens 1 <input.txt
	has err.txt "cut after 1 tokens (--max-tokens)" "  /save FILE.jsonl"
	: >input.txt
	expect 0 "" chat <input.txt
	[ ! -s out.txt ] || problem "found: $(cat out.txt)"
	if [ -c /dev/full ]; then
		echo a | "$ling" chat talker >/dev/full 2>err.txt && problem "a full disk went unnoticed"
		has err.txt "standard output"
	fi
}

# The conversation grows to the end: nothing of it is left out.
test_long() {
	yes a | head -n 30 >input.txt
	sed -i '3i /save long.jsonl' input.txt
	rm -f long.jsonl
	expect 1 "room for 64 (the model's positions): nothing was sent" chat <input.txt
	[ "$(jq '.messages | length' long.jsonl)" = 4 ] || problem "found: $(cat long.jsonl)"
	# where the memory for keys and values is what ends first
	head -c 400 /dev/zero | tr '\0' z >input.txt
	expect 0 "" "$ling" chat endless --kv-tokens 512 <input.txt
	has err.txt "cut: the conversation has as many tokens as there is room for, 512; /save keeps it, /reset begins another"
	printf '\nz\n' >>input.txt
	expect 1 "line 2: the conversation has" "$ling" chat endless --kv-tokens 512 <input.txt
	has err.txt "and there is room for 512 (--kv-tokens): nothing was sent"
}

# ---- on a terminal ----

# open_terminal COMMAND: runs a shell command in a terminal; type_keys types there, and terminal.txt is what it shows.
# The shell is bash: it ends by a Ctrl-C only when its command did, while dash always does.
open_terminal() {
	rm -f keys terminal.txt && mkfifo keys
	SHELL=/bin/bash timeout 60 script -qefc "$1" terminal.txt <keys >/dev/null 2>&1 &
	exec 7>keys
}
type_keys() { printf "$1" >&7; }
# shows TEXT N: waits until the terminal has shown the text N times; when it does not, ends what runs there.
shows() {
	local tries=0
	until [ "$(grep -aoF -- "$1" terminal.txt 2>/dev/null | wc -l)" -ge "$2" ]; do
		sleep 0.02
		tries=$((tries + 1))
		[ $tries -lt 1000 ] && kill -0 $! 2>/dev/null && continue
		problem "'$1' is not shown $2 times: $(tail -c 1000 terminal.txt | cat -v)"
		kill $! 2>/dev/null
		return
	done
}
# close_terminal: waits for the command's end; its exit status must be 0.
close_terminal() {
	wait $! || problem "exit status $?: $(tail -n 5 terminal.txt)"
	exec 7>&-
	! grep -qa 'Sanitizer\|runtime error' terminal.txt || problem "$(cat -v terminal.txt)"
}

test_terminal() {
	rm -f saved.jsonl
	open_terminal "$ling chat talker; stty -a"
	shows '> ' 1
	type_keys 'x\177a\r' # a key that deletes
	shows 'xyé' 1 && shows '> ' 2
	type_keys 'garbage\003' # the line is given up
	shows '[/quit or Ctrl-D ends the program]' 1 && shows '> ' 3
	type_keys 'b\r'
	shows '漢w' 1
	type_keys '/reset\r'
	shows '[a new conversation]' 1
	type_keys '\033[A\033[A\033[A\r' # up, to `a`
	shows 'xyé' 2
	type_keys '/foo\r' # no end
	shows '[/foo: no such command; ' 1
	type_keys 'q\303\251\351q\r'
	type_keys '/save saved.jsonl\r'
	shows 'saved.jsonl has one more line]' 1
	type_keys '\004'
	close_terminal
	[ "$(jq -c '.messages[0:2]' saved.jsonl)" = '[{"role":"user","content":"a"},{"role":"assistant","content":"xyé"}]' ] || problem "found: $(cat saved.jsonl)"
	# what was said before is not computed again
	perl -ne 'exit 1 if /(\d+) tokens in, (\d+) of them computed before; (\d+) out/ && $1 > $2 && $2 > 20 && $3 > 8' terminal.txt &&
		problem "what was computed again: $(cat -v terminal.txt)"
	grep -qa ' icanon' terminal.txt && grep -qa ' echo ' terminal.txt || problem "the terminal is not as before: $(cat -v terminal.txt)"
}

# Ctrl-C ends a reply, not the program; what is there stays in the conversation.
test_interrupted() {
	rm -f saved.jsonl
	open_terminal "$ling chat endless"
	shows '> ' 1
	type_keys 'abc\r'
	shows 'ghijk' 1
	type_keys '\003'
	shows '[stopped; what is there stays in the conversation]' 1
	type_keys '\003'
	shows '[/quit or Ctrl-D ends the program]' 1
	type_keys '/save saved.jsonl\r'
	shows 'saved.jsonl has one more line]' 1
	type_keys '/quit\r'
	close_terminal
	[ "$(jq '.messages | length' saved.jsonl)" = 2 ] || problem "found: $(head -c 300 saved.jsonl)"
	jq -e '.messages[1].content | test("ghijk")' saved.jsonl >/dev/null || problem "found: $(head -c 300 saved.jsonl)"
	# before there is anything of a reply
	open_terminal "$ling chat endless --system $(head -c 40000 /dev/zero | tr '\0' z)"
	shows '> ' 1
	type_keys 'abc\r'
	sleep 0.2
	type_keys '\003'
	shows '[stopped before the reply began; your message is taken back]' 1
	type_keys '/save saved.jsonl\r'
	shows '[there is nothing to save yet]' 1
	type_keys '\004'
	close_terminal
	# a control character of a reply does not reach the terminal; from a pipe the program ends as others do
	open_terminal "$ling chat endless --temperature 100 --max-tokens 300"
	shows '> ' 1
	type_keys 'abc\r'
	shows '> ' 2
	type_keys '\004'
	close_terminal
	tr -d '\n' <terminal.txt | sed 's/.*> abc//; s/> .*//' | LC_ALL=C grep -qa $'[\001-\010\016-\037]' && problem "control characters: $(cat -v terminal.txt)"
	yes abc | head -n 50 | timeout -s INT 2 "$ling" chat endless >out.txt 2>err.txt
	[ $? = 124 ] || problem "SIGINT: status $?: $(cat err.txt)"
}

check trained rounds system mark full_disk refused long terminal interrupted
finish
