#!/bin/bash
# The program as its user meets it, built with sanitizers: short runs, stops and continuations, bad input, exit statuses.
. "$(dirname "$0")/check.sh"

# A checkpoint's state less what two runs may differ in, and the file's own checksum.
state() { sed 's/"output_dir": *"[^"]*"//; s/"stop_at_step": *[0-9]*//; /^  "crc32"/d' "$1/trainer.json"; }

same_run() { # same_run DIR DIR STEP: weights, optimizer, state and metrics bit for bit
	local step
	step=$(printf 'step-%07d' "$3")
	for file in model.safetensors optimizer.safetensors config.json; do
		cmp -s "$1/$step/$file" "$2/$step/$file" || problem "$1/$step/$file and $2/$step/$file differ"
	done
	cmp -s <(state "$1/$step") <(state "$2/$step") || problem "trainer.json of $1 and $2 differ"
	cmp -s <(steady "$1/metrics.jsonl") <(steady "$2/metrics.jsonl") || problem "metrics of $1 and $2 differ"
	[ "$(lines "$2/metrics.jsonl")" = "$3" ] || problem "$2/metrics.jsonl: expected one line for each of $3 steps"
}

# ---- data: 40 windows of 16 tokens, so that an epoch is 40 samples ----
head -c 640 "$root/ling.h" >text.txt
head -c 200 "$root/LICENSE" >valid.txt
tiny model.router='{ warmup_steps: 9 }' data.valid=valid train.batch_warmup='{ start: 2, increment: 2, tokens: 500 }' schedule.warmup_steps=5 \
	schedule.drops='[ { at: 0.5, factor: 0.5 } ]' schedule.decay='{ steps: 6, shape: 1-sqrt, final_lr: 1e-5 }' checkpoint.every=5 \
	checkpoint.keep=2 eval.every=4

test_tokenize() {
	expect 0 "" "$ling" tokenize --tokenizer byte --out text text.txt
	expect 0 "" "$ling" tokenize --out valid valid.txt
	[ "$(wc -c <text.bin)" = $((641 * 2)) ] || problem "text.bin: expected 641 tokens of 2 bytes"
	printf '{"text": "ab"}\n\n{"other": 1, "text": "c\\u00e9"}\n' >two.jsonl
	expect 0 "" "$ling" tokenize --out two two.jsonl
	[ "$(od -An -v -tu2 two.bin | tr -s ' \n' ' ')" = " 97 98 256 99 195 169 256 " ] || problem "two.bin: $(od -An -tu2 two.bin)"
	printf '{"text": "ab"}\n{"txt": "c"}\n' >bad.jsonl
	expect 1 "bad.jsonl:2" "$ling" tokenize --out bad bad.jsonl
	[ ! -e bad.bin ] || problem "bad.bin was left behind"
	echo '[{"text": "ab"}]' >other.json
	expect 1 "other.json: expected a JSON object at top level; if it is not a token file's manifest, move it away" "$ling" tokenize --out other two.jsonl
	expect 1 "nothere.txt" "$ling" tokenize --out bad nothere.txt
	expect 1 "directory" "$ling" tokenize --out bad .
	expect 1 "byte" "$ling" tokenize --tokenizer words --out bad text.txt
}

# Byte-level BPE: the data, the run and its checkpoints know the tokenizer by what it does, not by its place.
test_bpe() {
	local fixture="$root/tests/fixtures/tokenizer"
	expect 0 "" "$ling" train-tokenizer --vocab-size 300 --special '<x>' --out bpe/tokenizer.json text.txt two.jsonl
	expect 0 "" "$ling" tokenize --tokenizer bpe --out bpe/text text.txt
	expect 0 "" "$ling" tokenize --decode bpe/text
	same out.txt <(cat text.txt; printf '<|endoftext|>')
	OMP_NUM_THREADS=1 "$ling" tokenize --tokenizer bpe/tokenizer.json --out bpe/again text.txt >/dev/null 2>&1
	cmp -s bpe/text.bin bpe/again.bin || problem "bpe/text.bin: one thread makes others"
	printf 'a<x>b' >special.txt
	expect 0 "" "$ling" tokenize --tokenizer bpe --out bpe/special special.txt
	[ "$(od -An -v -tu2 bpe/special.bin | tr -s ' \n' ' ')" = " 64 299 65 296 " ] || problem "special.bin: $(od -An -tu2 bpe/special.bin)"
	expect 0 "" "$ling" tokenize --tokenizer bpe --special-as-text --out bpe/plain special.txt
	[ "$(wc -c <bpe/plain.bin)" -ge 12 ] || problem "a special token was recognised in a text with --special-as-text"

	sed 's/ vocab_size: .*/ vocab_size: 304/; s/ train: text/ train: bpe\/text/; /valid:/d; s/ tokenizer: byte/ tokenizer: bpe/; s/ steps: 20/ steps: 4/
		s/ output_dir: run/ output_dir: bpe\/run/; s/ decay: { steps: 6/ decay: { steps: 2/; /^eval:/,/^  every/d' tiny.yaml >bpe.yaml
	expect 0 "" "$ling" train bpe.yaml train.stop_at_step=2
	cmp -s bpe/tokenizer.json bpe/run/step-0000002/tokenizer.json || problem "the checkpoint does not carry the tokenizer"
	cp bpe/run/step-0000002/tokenizer.json kept.json
	echo >>bpe/run/step-0000002/tokenizer.json
	expect 1 "step-0000002/tokenizer.json: " "$ling" train bpe.yaml
	cp kept.json bpe/run/step-0000002/tokenizer.json
	expect 0 "" "$ling" train bpe.yaml
	expect 0 "" "$ling" eval bpe/run/step-0000004 --data bpe/text --seq-len 16 --json
	[ "$(metric bytes out.txt)" -gt "$(metric tokens out.txt)" ] || problem "bits per byte of BPE: $(cat out.txt)"
	expect 0 "" "$ling" tokenize --tokenizer bpe/run/step-0000004 --out bpe/again text.txt
	expect 0 "" "$ling" train bpe.yaml data.train=bpe/again train.output_dir=bpe/run2
	expect 1 "hash" "$ling" train bpe.yaml data.tokenizer="$fixture" model.vocab_size=500 train.output_dir=bpe/run3
	expect 1 "vocab_size" "$ling" train bpe.yaml model.vocab_size=299 train.output_dir=bpe/run3
	expect 1 "hash" "$ling" train bpe.yaml data.train=text train.output_dir=bpe/run3
	expect 1 "nowhere" "$ling" train bpe.yaml data.tokenizer=nowhere train.output_dir=bpe/run3

	cp bpe/tokenizer.json kept.json
	expect 1 "bpe/tokenizer.json: " "$ling" tokenize --tokenizer bpe --out bpe/tokenizer text.txt
	cmp -s bpe/tokenizer.json kept.json || problem "a token file's manifest replaced a tokenizer"
	[ ! -e bpe/tokenizer.bin ] || problem "bpe/tokenizer.bin was left behind"
	expect 1 "hash" "$ling" tokenize --decode bpe/text --tokenizer "$fixture"
	expect 1 "cannot open" "$ling" tokenize --decode nothing
	expect 2 "decode" "$ling" tokenize --decode bpe/text text.txt
	expect 2 "decode" "$ling" tokenize --decode bpe/text --out x
	expect 2 "vocab-size" "$ling" train-tokenizer --out x.json text.txt
	expect 2 "whole number" "$ling" train-tokenizer --vocab-size many --out x.json text.txt
	expect 1 "259" "$ling" train-tokenizer --vocab-size 100 --out x.json text.txt
	expect 1 "anchor" "$ling" train-tokenizer --vocab-size 300 --pattern '^x' --out x.json text.txt
	[ ! -e x.json ] || problem "x.json was left behind"
}

test_train() {
	expect 0 "" "$ling" train tiny.yaml
	[ -f run/step-0000020/model.safetensors ] || problem "no checkpoint of step 20"
	[ "$(ls -d run/step-* | wc -l)" = 2 ] || problem "expected two checkpoints: $(ls run)"
	[ "$(metric batch run/metrics.jsonl | sort -nu | tr '\n' ' ')" = "2 4 6 7 " ] ||
		problem "batches: $(metric batch run/metrics.jsonl | tr '\n' ' ')"
	[ "$(metric samples run/metrics.jsonl | tail -n 1)" -gt 80 ] || problem "the run should see three epochs"
	expect 0 "" "$ling" train tiny.yaml # nothing is left to do
	[ "$(lines run/metrics.jsonl)" = 20 ] || problem "a finished run was continued"
}

test_bit_equal() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=again
	same_run run again 20
}

# Across batch warmup, the drop and the decay of the learning rate, routing warmup and the ends of epochs.
test_stop_and_continue() {
	for stop in 1 7 10 19; do
		rm -rf stopped
		expect 0 "" "$ling" train tiny.yaml train.output_dir=stopped train.stop_at_step=$stop
		[ "$(lines stopped/metrics.jsonl)" = $stop ] || problem "did not stop at step $stop"
		expect 0 "" "$ling" train tiny.yaml train.output_dir=stopped
		same_run run stopped 20
	done
}

test_continue_plain() {
	local options="train.batch_warmup=off model.router.warmup_steps=off data.shuffle=false train.batch=5"
	expect 0 "" "$ling" train tiny.yaml $options train.output_dir=plain
	expect 0 "" "$ling" train tiny.yaml $options train.output_dir=plain7 train.stop_at_step=7
	expect 0 "" "$ling" train tiny.yaml $options train.output_dir=plain7
	same_run plain plain7 20
}

# Steps of a run that is stopped from outside: so many that it is not over before that.
long_steps=20

# A signal in the middle: saves, exit status 3, continues to the same end.
test_signals() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=undisturbed train.steps=$long_steps
	for signal in TERM INT; do
		rm -rf signalled
		# Background jobs of a script ignore SIGINT; the program must not inherit that.
		perl -e '$SIG{INT} = "DEFAULT"; exec @ARGV' \
			"$ling" train tiny.yaml train.output_dir=signalled train.steps=$long_steps >out.txt 2>err.txt &
		local pid=$!
		wait_for_lines signalled/metrics.jsonl 3
		kill -$signal $pid
		wait $pid
		local status=$?
		[ $status = 3 ] || problem "SIG$signal: exit status $status: $(cat err.txt)"
		grep -q "stopped after step" out.txt || problem "SIG$signal: $(tail -n 2 out.txt)"
		expect 0 "" "$ling" train tiny.yaml train.output_dir=signalled train.steps=$long_steps
		same_run undisturbed signalled $long_steps
	done
}

# kill -9: what was saved is whole, and every step stands in the metrics once.
test_kill() {
	rm -rf killed
	"$ling" train tiny.yaml train.output_dir=killed eval.every=1 train.steps=$long_steps >out.txt 2>err.txt &
	local pid=$!
	wait_for_lines killed/metrics.jsonl 6
	kill -9 $pid
	wait $pid 2>/dev/null
	[ $? = 137 ] || problem "the run was over before it was killed"
	printf '{"step": 9, "lo' >>killed/metrics.jsonl # a torn line
	expect 0 "" "$ling" train tiny.yaml train.output_dir=killed eval.every=1 train.steps=$long_steps
	expect 0 "" "$ling" train tiny.yaml train.output_dir=unharmed eval.every=1 train.steps=$long_steps
	same_run unharmed killed $long_steps
}

test_changed_config() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=changed train.stop_at_step=4
	expect 1 "model.num_experts" "$ling" train tiny.yaml train.output_dir=changed model.num_experts=8
	expect 1 "train.seed" "$ling" train tiny.yaml train.output_dir=changed train.seed=4
	expect 0 "" "$ling" train tiny.yaml train.output_dir=changed train.batch=4 train.batch_warmup=off
	grep -q "train.batch" out.txt || problem "a changed batch was not mentioned"
	# A run of so many tokens ends with them, whatever the batch becomes.
	local run="tiny.yaml train.output_dir=tokens train.batch_warmup=off train.steps=off train.tokens=1600 schedule.decay=off"
	expect 0 "" "$ling" train $run train.batch=2 train.stop_at_step=25
	expect 0 "" "$ling" train $run train.batch=5
	[ "$(metric tokens tokens/metrics.jsonl | tail -n 1)" = 1600 ] || problem "tokens at the end: $(tail -n 1 tokens/metrics.jsonl)"
}

# What a command does when a run is already further, finished, or begun from other weights: it says so.
test_said() {
	expect 0 "" "$ling" train tiny.yaml train.output_dir=said train.stop_at_step=9
	expect 0 "" "$ling" train tiny.yaml train.output_dir=said train.stop_at_step=5
	has out.txt "stopped at once: train.stop_at_step is 5, and 9 of 20 steps are done"
	[ "$(lines said/metrics.jsonl)" = 9 ] || problem "trained beyond stop_at_step: $(lines said/metrics.jsonl) steps"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=said train.stop_at_step=9 train.init_from=run/step-0000015 # the same: goes on
	has out.txt 'train.init_from: "" -> "run/step-0000015"; it is not read: the run goes on with the weights of its checkpoint'
	cmp -s run/step-0000020/model.safetensors said/step-0000020/model.safetensors || problem "another run"
	! grep -q "learning rate was" out.txt || problem "a rate that nothing raised: $(cat out.txt)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=said train.steps=40 train.stop_at_step=21
	has out.txt "the learning rate was 1.00e-05 at step 20 and is 1.00e-02 at step 21"
	[ "$(grep -n "learning rate was" out.txt | cut -d: -f1)" -lt "$(grep -n "^step 21/" out.txt | cut -d: -f1)" ] || problem "said too late: $(cat out.txt)"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=said train.steps=40 train.stop_at_step=22
	! grep -q "learning rate was" out.txt || problem "said again: $(cat out.txt)"
	# a rate that the warmup raises undoes nothing
	expect 0 "" "$ling" train tiny.yaml train.output_dir=warm train.stop_at_step=3
	expect 0 "" "$ling" train tiny.yaml train.output_dir=warm train.stop_at_step=4
	[ "$(metric lr warm/metrics.jsonl | sort -gu | wc -l)" = 4 ] || problem "no rising rates: $(metric lr warm/metrics.jsonl)"
	! grep -q "learning rate was" out.txt || problem "a rate that the warmup raised: $(cat out.txt)"
	# of a key given twice the last wins
	expect 0 "" "$ling" train tiny.yaml train.output_dir=nowhere train.output_dir=twice train.steps=20 train.steps=2
	[ "$(lines twice/metrics.jsonl)" = 2 ] && [ ! -e nowhere ] || problem "train.output_dir or train.steps given twice: $(ls -d nowhere twice)"
}

# The time left has validations apart: of 50 steps behind the first validation only one more is to come.
test_time_left() {
	perl -e 'print "all kinds of text " x 12000' >long.txt
	expect 0 "" "$ling" tokenize --out long long.txt
	local run="tiny.yaml data.valid=long data.seq_len=16 eval.max_windows=1500 train.output_dir=left train.steps=100 eval.every=50 checkpoint.every=off"
	expect 0 "" "$ling" train $run train.stop_at_step=49
	expect 0 "" "$ling" train $run train.stop_at_step=50
	local seconds=$(metric seconds left/metrics.jsonl | tail -n 1) left=$(sed -n 's/^step 50.* \([0-9:]*\) left.*/\1/p' out.txt | tail -n 1)
	awk -v left="$left" -v step="$seconds" 'BEGIN { n = split(left, part, ":"); for (i = 1; i <= n; i++) s = s * 60 + part[i]
		exit !(n > 1 && s < 50 * step + 30) }' || problem "$left left, steps of $seconds s: $(tail -n 3 out.txt)"
}

# output_dir moved, deleted or replaced under a run: the next save notices it, and nothing is lost that could be saved.
test_moved_directory() {
	local how run="tiny.yaml train.output_dir=here eval.every=1 train.steps=400 schedule.decay=off checkpoint.every=100 checkpoint.keep=0 log.every=1000"
	for how in move delete metrics replace; do
		rm -rf here there
		"$ling" train $run >out.txt 2>err.txt &
		local pid=$! status
		wait_for_lines here/metrics.jsonl 3
		case $how in
		move) mv here there ;;
		delete) mv here there && rm -r there ;;
		metrics) rm here/metrics.jsonl ;;
		replace) mv here there && rm -r there && mkdir here && echo other >here/metrics.jsonl ;;
		esac
		wait $pid
		status=$?
		[ $status = 1 ] || problem "$how: exit status $status"
		[ "$(grep -c '^ling' err.txt)" = 1 ] || problem "$how: $(cat err.txt)"
		case $how in
		move)
			has err.txt "here was moved to $folder/there while the run wrote to it; this step is saved there"
			[ -e there/step-0000100/trainer.json ] && [ ! -e here ] || problem "$how: $(ls -d here there/*)"
			expect 0 "" "$ling" train $run train.output_dir=there train.stop_at_step=101
			[ "$(lines there/metrics.jsonl)" = 101 ] || problem "$how: $(lines there/metrics.jsonl) steps" ;;
		delete | metrics)
			has err.txt "here/metrics.jsonl was deleted while the run wrote to it; this step is saved in here again"
			[ -e here/step-0000100/trainer.json ] || problem "$how: $(ls here)"
			expect 0 "" "$ling" train $run train.stop_at_step=101 ;;
		replace)
			has err.txt "here was deleted while the run wrote to it, and another run's files are in its place"
			[ "$(ls -A here)" = metrics.jsonl ] && [ "$(cat here/metrics.jsonl)" = other ] || problem "$how: $(ls -A here)" ;;
		esac
	done
}

# Weights to start from must be finite: the tensor is named.
test_not_finite_start() {
	local file
	rm -rf nan && cp -r run/step-0000020 nan && rm nan/trainer.json nan/optimizer.safetensors
	for value in '\0\0\300\177' '\0\0\200\377'; do
		cp run/step-0000020/model.safetensors nan/
		perl -MJSON::PP -e '
			open my $f, "+<:raw", "nan/model.safetensors"; read $f, my $n, 8; $n = unpack "Q<", $n; read $f, my $json, $n;
			my $t = decode_json($json); my $name = "model.layers.1.attention.dense.weight";
			seek $f, 8 + $n + $t->{$name}{data_offsets}[0] + 4 * (24 * 2 + 5), 0; print $f "'"$value"'"; close $f;
			$json =~ s/"__metadata__":\{.*?\}/q("__metadata__":{}) . " " x (length($&) - 17)/e;
			open $f, "+<:raw", "nan/model.safetensors"; seek $f, 8, 0; print $f $json'
		expect 1 "nan: tensor model.layers.1.attention.dense.weight has " "$ling" train tiny.yaml train.init_from=nan train.output_dir=from_nan
		has err.txt "at row 2, column 5; expected finite numbers"
		[ ! -e from_nan/metrics.jsonl ] || problem "it trained"
	done
}

# ~ is the shell's: a path that begins with it is refused, wherever it is given.
test_home_paths() {
	expect 2 "train.output_dir: found ~/run (only a shell expands ~" "$ling" train tiny.yaml 'train.output_dir=~/run'
	expect 2 "only a shell expands ~" "$ling" tokenize --out='~/text' text.txt
	grep -qF "only a shell expands ~" <("$ling" tokenize --out x '~/text.txt' 2>&1) || problem "a word: $("$ling" tokenize --out x '~/text.txt' 2>&1)"
	[ ! -e '~' ] || problem "a directory called ~ was made"
}

# What is not a directory but a GGUF file says how to make one.
test_gguf_paths() {
	printf 'GGUF\3\0\0\0' >model.gguf
	for command in "info model.gguf" "eval model.gguf --data valid --seq-len 16" "generate model.gguf --prompt a" \
		"train tiny.yaml model=model.gguf train.output_dir=g" "train tiny.yaml train.init_from=model.gguf train.output_dir=g"; do
		"$ling" $command >out.txt 2>err.txt && problem "accepted: $command"
		has err.txt "model.gguf: a GGUF file; expected a Hugging Face directory: make one with ling convert-checkpoint "
	done
}

# The data of a run are known by their content, not by their place.
test_changed_data() {
	cp text.bin moved.bin && cp text.idx moved.idx && cp text.json moved.json
	expect 0 "" "$ling" train tiny.yaml train.output_dir=data data.train=moved train.stop_at_step=4
	expect 0 "" "$ling" train tiny.yaml train.output_dir=data data.train=text
	same_run run data 20
	expect 0 "" "$ling" train tiny.yaml train.output_dir=data2 data.train=moved train.stop_at_step=4
	head -c 640 "$root/ling.c" >other.txt
	"$ling" tokenize --out moved other.txt >/dev/null 2>&1
	expect 1 "other tokens" "$ling" train tiny.yaml train.output_dir=data2 data.train=moved
	sed 's/"byte"/"bits"/; s/\("tokenizer_hash": "\)......../\100000000/' text.json >moved.json && cp text.bin moved.bin && cp text.idx moved.idx
	expect 1 "tokenizer" "$ling" train tiny.yaml train.output_dir=data3 data.train=moved
}

# Conversations: the loss counts for what the assistant says alone, and so do evaluations.
test_chat() {
	perl -e 'for (1 .. 40) { my $n = $_ * 7 % 23; print qq({"messages": [{"role": "user", "content": "what is $n?"}, ) .
		qq({"role": "assistant", "content": "it is ) . "x" x $n . qq("}]}\n) }' >chat.jsonl
	printf '{"prompt": "p", "completion": "c"}\n{"text": "ab"}\n' >>chat.jsonl
	expect 0 "" "$ling" tokenize --out chat chat.jsonl
	grep -q "42 documents, .*, loss on [0-9]* tokens" out.txt || problem "$(cat out.txt)"
	[ "$(wc -c <chat.mask.bin)" = $(($(wc -c <chat.bin) / 2)) ] || problem "the mask has $(wc -c <chat.mask.bin) bytes"
	printf '{"messages": [{"role": "user", "content": "x"}]}\n' >bad.jsonl
	expect 1 "bad.jsonl:1: no message is the assistant's" "$ling" tokenize --out bad bad.jsonl
	local chat="data.train=chat data.valid=chat data.document_mask=true data.packing=windows"
	expect 0 "" "$ling" train tiny.yaml $chat train.output_dir=chat
	expect 0 "" "$ling" train tiny.yaml $chat train.output_dir=chat7 train.stop_at_step=7
	expect 0 "" "$ling" train tiny.yaml $chat train.output_dir=chat7
	same_run chat chat7 20
	expect 0 "" "$ling" eval chat/step-0000020 --data chat --packing windows --seq-len 16 --document-mask --json
	[ "$(metric loss out.txt | cut -c 1-12)" = "$(metric valid_loss chat/metrics.jsonl | tail -n 1 | cut -c 1-12)" ] ||
		problem "eval $(cat out.txt) and $(tail -n 1 chat/metrics.jsonl)"
	local windows=$((($(wc -c <chat.mask.bin) - 1) / 16)) learned
	learned=$(tail -c +2 chat.mask.bin | head -c $((16 * windows)) | tr -d '\0' | wc -c)
	[ "$(metric tokens out.txt)" = "$learned" ] || problem "$learned targets are learned: $(cat out.txt)"
	expect 0 "" "$ling" eval chat/step-0000020 --data chat --packing windows --seq-len 100 --json
	local loss
	loss=$(metric loss out.txt)
	expect 0 "" "$ling" eval chat/step-0000020 --data chat --packing windows --seq-len 100 --json --document-mask
	[ "$(metric loss out.txt)" != "$loss" ] || problem "the mask of documents changes nothing"
	expect 1 "other tokens" "$ling" train tiny.yaml data.train=text data.document_mask=true data.packing=windows train.output_dir=chat7
	# a window in which nothing is learned
	printf '{"prompt": "%s", "completion": "c"}\n' "$(head -c 100 "$root/LICENSE" | tr -d '\n')" >nothing.jsonl
	expect 0 "" "$ling" tokenize --out nothing nothing.jsonl
	expect 1 "the loss counts for none of the tokens" "$ling" eval chat/step-0000020 --data nothing --seq-len 16 --max-windows 2
	expect 1 "the loss counts for none of the tokens in its 2 windows of 16" "$ling" train tiny.yaml data.train=chat data.valid=nothing data.seq_len=16 eval.max_windows=2 train.output_dir=chat8
	[ ! -e chat8 ] || problem "trained before it looked at what validates, or left the directory of a run that could not begin"
	mkdir own8 && expect 1 "nothere" "$ling" train tiny.yaml data.train=nothere train.output_dir=own8
	[ -d own8 ] || problem "removed a directory that it had not made"
	cp chat.bin unlearned.bin && cp chat.idx unlearned.idx && tr '\1' '\0' <chat.mask.bin >unlearned.mask.bin
	expect 1 "unlearned.bin: the loss counts for none of the tokens" "$ling" train tiny.yaml data.train=unlearned data.valid=chat train.output_dir=chat8
}

# A run without a tokenizer says so, and may get the one that made its data when it continues.
test_added_tokenizer() {
	cp text.bin unnamed.bin && cp text.idx unnamed.idx
	expect 0 "" "$ling" train tiny.yaml model.vocab_size=300 data.tokenizer=none train.output_dir=added train.stop_at_step=5
	has err.txt "note: without data.tokenizer the checkpoints have no tokenizer" "add data.tokenizer: byte"
	expect 0 "" "$ling" train tiny.yaml model.vocab_size=300 data.tokenizer=none train.output_dir=added train.stop_at_step=6
	[ ! -s err.txt ] || problem "a run that continues notes: $(cat err.txt)"
	expect 1 "text: made by tokenizer byte" "$ling" train tiny.yaml model.vocab_size=300 data.tokenizer=bpe train.output_dir=added
	expect 0 "" "$ling" train tiny.yaml model.vocab_size=300 train.output_dir=added
	has out.txt 'data.tokenizer: "none" -> "byte"'
	expect 1 'data.tokenizer was "byte" in the checkpoint' "$ling" train tiny.yaml model.vocab_size=300 data.tokenizer=bpe data.train=unnamed data.valid=off train.output_dir=added
	expect 0 "" "$ling" generate added --prompt a --max-tokens 1
	# data that does not say what made it
	expect 0 "" "$ling" train tiny.yaml model.vocab_size=300 data.tokenizer=none data.train=unnamed data.valid=off train.output_dir=unnamed train.stop_at_step=1
	has err.txt "add data.tokenizer: with the tokenizer that made the data"
	expect 1 "data.tokenizer was none in the checkpoint, found byte" "$ling" train tiny.yaml model.vocab_size=300 data.train=unnamed data.valid=off train.output_dir=unnamed
}

# Conversations are packed: whole documents in windows, with the same bits wherever the run stops, and each of them once an epoch.
test_packing() {
	local packed="data.train=chat data.valid=chat data.seq_len=40 train.batch=5"
	expect 0 "" "$ling" train tiny.yaml $packed train.output_dir=packed
	has out.txt "data.train: chat.bin: " " windows of 40 tokens, documents packed: " " of 42 documents cut" "padding" "data.valid: chat.bin: "
	local stop
	for stop in 3 13; do
		rm -rf packed7
		expect 0 "" "$ling" train tiny.yaml $packed train.output_dir=packed7 train.stop_at_step=$stop
		expect 0 "" "$ling" train tiny.yaml $packed train.output_dir=packed7
		same_run packed packed7 20
	done
	expect 0 "" "$ling" eval packed/step-0000020 --data chat --seq-len 40 --json
	[ "$(metric loss out.txt | cut -c 1-12)" = "$(metric valid_loss packed/metrics.jsonl | tail -n 1 | cut -c 1-12)" ] ||
		problem "eval $(cat out.txt) and $(tail -n 1 packed/metrics.jsonl)"
	# all but the first token of the one document that counts from its beginning
	[ "$(metric tokens out.txt)" = $(($(tr -d '\0' <chat.mask.bin | wc -c) - 1)) ] || problem "not each token that counts is a target: $(cat out.txt)"
	expect 0 "" "$ling" eval packed/step-0000020 --data chat --packing windows --seq-len 40 --json
	[ "$(metric loss out.txt | cut -c 1-12)" != "$(metric valid_loss packed/metrics.jsonl | tail -n 1 | cut -c 1-12)" ] || problem "packing changes nothing"
	# another packing is another run
	expect 1 "data.packing was \"auto\" in the checkpoint, found \"windows\"" "$ling" train tiny.yaml $packed train.output_dir=packed7 data.packing=windows train.steps=30
	expect 2 "data.document_mask: found false beside data.packing documents" "$ling" train tiny.yaml $packed train.output_dir=packed8 data.packing=documents data.document_mask=false
	expect 0 "" "$ling" train tiny.yaml $packed train.output_dir=packed8 data.document_mask=false train.steps=2 schedule.decay=off
	has out.txt "one after the other: " "data.packing documents would keep conversations whole"
	cp text.bin noindex.bin
	expect 1 "has no index that tells where documents begin, so they cannot be packed" "$ling" train tiny.yaml data.train='[{path: noindex.bin, dtype: uint16}]' \
		data.packing=documents train.output_dir=packed9
	expect 0 "" "$ling" train tiny.yaml data.packing=documents data.train=chat data.valid=off train.output_dir=packed9 train.steps=2 schedule.decay=off
}

# A blend stops and continues anywhere; its shares change only where the config says so, and then each file goes on from where it stood.
test_blend() {
	local blend=(data.train='[{path: text, weight: 3}, {path: valid, weight: 1}]')
	expect 0 "" "$ling" train tiny.yaml "${blend[@]}" train.output_dir=blend
	for stop in 1 8; do
		rm -rf blended
		expect 0 "" "$ling" train tiny.yaml "${blend[@]}" train.output_dir=blended train.stop_at_step=$stop
		expect 0 "" "$ling" train tiny.yaml "${blend[@]}" train.output_dir=blended
		same_run blend blended 20
	done
	local samples
	samples=$(sed -n 's/.*"source_samples": *\[\([^]]*\)\].*/\1/p' blend/metrics.jsonl | tail -n 1)
	[ "$samples" = "74, 25" ] || problem "samples of each file: $samples, of $(metric samples blend/metrics.jsonl | tail -n 1)"
	rm -rf blended
	expect 0 "" "$ling" train tiny.yaml "${blend[@]}" train.output_dir=blended train.stop_at_step=8
	local changed=(data.train='[{path: valid, weight: 1}, {path: text, weight: 1}, chat]')
	expect 1 "found 3 token files; the run of blended/step-0000008 has 2" "$ling" train tiny.yaml "${changed[@]}" train.output_dir=blended
	expect 1 "gives 50% of the samples" "$ling" train tiny.yaml data.train='[text, valid]' train.output_dir=blended
	expect 1 "set data.blend_from_step=8" "$ling" train tiny.yaml "${changed[@]}" train.output_dir=blended data.blend_from_step=7
	expect 0 "" "$ling" train tiny.yaml "${changed[@]}" train.output_dir=blended data.blend_from_step=8 train.stop_at_step=12
	grep -q "blend of data.train changes at step 8" out.txt || problem "$(cat out.txt)"
	expect 0 "" "$ling" train tiny.yaml "${changed[@]}" train.output_dir=blended data.blend_from_step=8
	# 20 samples before, 15 of text and 5 of valid; 79 after, a third from each file
	samples=$(sed -n 's/.*"source_samples": *\[\([^]]*\)\].*/\1/p' blended/metrics.jsonl | sed -n '8p;20p' | tr '\n' ' ')
	[ "$samples" = "15, 5 32, 41, 26 " ] || problem "samples of each file: $samples"
	# A change that leaves all as it was but the order of the list: a file keeps its place, and the order of its windows.
	rm -rf reordered
	expect 0 "" "$ling" train tiny.yaml train.output_dir=reordered data.train='[text, {path: valid, weight: 0}]' train.stop_at_step=8
	expect 0 "" "$ling" train tiny.yaml train.output_dir=reordered data.train='[{path: valid, weight: 0}, text]' data.blend_from_step=8
	cmp -s run/step-0000020/model.safetensors reordered/step-0000020/model.safetensors || problem "the order of the list changes the order of the data"
	# The same again, in one piece from the change on; weights that say the same in other words are the same.
	rm -rf changed2
	expect 0 "" "$ling" train tiny.yaml "${blend[@]}" train.output_dir=changed2 train.stop_at_step=8
	expect 0 "" "$ling" train tiny.yaml data.train='[{path: valid, weight: 7}, {path: text, weight: 7}, {path: chat, weight: 7}]' \
		train.output_dir=changed2 data.blend_from_step=8
	cmp -s blended/step-0000020/model.safetensors changed2/step-0000020/model.safetensors || problem "weights after the change differ"
}

# llm.c's files, bare ids, documents without an index, several files to validate on.
test_formats() {
	local small="data.seq_len=16 data.tokenizer=none data.valid=off train.steps=2 train.batch_warmup=off"
	perl -e 'print pack("l<256S<*", 20240520, 1, 70, (0) x 253, map { $_ * 3 % 11 } 1 .. 70)' >llmc.bin
	tail -c +1025 llmc.bin >bare.bin
	expect 0 "" "$ling" train tiny.yaml $small data.train=llmc.bin train.output_dir=f1
	expect 0 "" "$ling" train tiny.yaml $small data.train='[{path: bare.bin, dtype: uint16}]' train.output_dir=f2
	cmp -s f1/step-0000002/model.safetensors f2/step-0000002/model.safetensors || problem "the same ids train differently"
	expect 1 "a file of bare ids must be given with its type" "$ling" train tiny.yaml $small data.train=bare.bin train.output_dir=f3
	expect 1 "llmc.bin: has no index that tells where documents begin" "$ling" train tiny.yaml $small data.train=llmc.bin data.document_mask=on train.output_dir=f3
	expect 0 "" "$ling" train tiny.yaml $small data.train=llmc.bin data.document_mask=on data.document_token=0 train.output_dir=f3
	! cmp -s f1/step-0000002/model.safetensors f3/step-0000002/model.safetensors || problem "the mask of documents changes nothing"
	expect 0 "" "$ling" eval f3/step-0000002 --data bare.bin --dtype uint16 --seq-len 16 --json
	[ "$(metric tokens out.txt)" = 64 ] || problem "$(cat out.txt)"
	expect 0 "" "$ling" eval f3/step-0000002 --data bare.bin --dtype uint16 --seq-len 16 --json --document-mask --document-token 0
	[ "$(metric tokens out.txt)" = 59 ] || problem "five documents end in four windows: $(cat out.txt)"
	expect 1 "no index" "$ling" eval f3/step-0000002 --data bare.bin --dtype uint16 --seq-len 16 --document-mask
	expect 1 "document_token 99999 is outside the vocabulary" "$ling" eval f3/step-0000002 --data bare.bin --dtype uint16 --seq-len 16 --document-mask --document-token 99999
	expect 1 "document_token 99999 is outside the vocabulary" "$ling" train tiny.yaml $small data.train=llmc.bin data.document_mask=on data.document_token=99999 train.output_dir=f9
	expect 2 "--document-token" "$ling" eval f3/step-0000002 --data bare.bin --seq-len 16 --document-token -1
	expect 1 "uint99" "$ling" eval f3/step-0000002 --data bare.bin --dtype uint99 --seq-len 16
	expect 0 "" "$ling" train tiny.yaml train.output_dir=f4 data.valid='[valid, text]' train.steps=4 eval.every=off
	local first second
	expect 0 "" "$ling" eval f4/step-0000004 --data valid --seq-len 16 --json
	first=$(cat out.txt)
	expect 0 "" "$ling" eval f4/step-0000004 --data text --seq-len 16 --json
	second=$(cat out.txt)
	awk -v a="$first" -v b="$second" -v both="$(metric valid_loss f4/metrics.jsonl)" 'function value(s, key) {
			sub(".*\"" key "\": *", "", s); return s + 0 }
		BEGIN { m = value(a, "tokens"); n = value(b, "tokens"); exit !(n > m && m > 1 &&
			((value(a, "loss") * m + value(b, "loss") * n) / (m + n) / both - 1) ^ 2 < 1e-20) }' || problem "$first, $second, $(cat f4/metrics.jsonl)"
}

test_streams() {
	"$ling" train tiny.yaml train.output_dir=closed <&- >&- 2>&-
	[ $? = 0 ] || problem "closed standard files: exit status $?"
	[ "$(lines closed/metrics.jsonl)" = 20 ] && ! grep -v '^{' closed/metrics.jsonl >/dev/null || problem "$(head -n 3 closed/metrics.jsonl)"
	"$ling" train tiny.yaml train.output_dir=piped | head -n 1 >/dev/null
	[ "$(lines piped/metrics.jsonl)" = 20 ] || problem "a closed pipe ended the run after $(lines piped/metrics.jsonl) steps"
	if [ -c /dev/full ]; then
		"$ling" info tiny.yaml >/dev/full 2>err.txt
		[ $? = 1 ] || problem "a full standard output was not noticed"
		grep -q "standard output" err.txt || problem "$(cat err.txt)"
	fi
}

test_damaged_checkpoint() {
	local at=damaged/step-0000020
	for file in model.safetensors optimizer.safetensors config.json trainer.json; do
		rm -rf damaged && cp -r run damaged && rm -rf damaged/step-0000015
		printf '\1' | dd of=$at/$file bs=1 seek=$(($(wc -c <$at/$file) - 40)) conv=notrunc 2>/dev/null
		expect 1 "$at" "$ling" train tiny.yaml train.output_dir=damaged train.steps=22
		truncate -s -20 $at/$file
		expect 1 "$at" "$ling" train tiny.yaml train.output_dir=damaged train.steps=22
		rm $at/$file
		[ $file = trainer.json ] || expect 1 "$at" "$ling" train tiny.yaml train.output_dir=damaged train.steps=22
	done
}

# A run that diverges: shown, not hidden; it ends with an error, and what was saved is finite and stays.
test_not_finite() {
	local calm="tiny.yaml train.output_dir=wild schedule.decay=off schedule.warmup_steps=off schedule.drops=off train.grad_clip=off train.steps=1000 spikes.action=off"
	local wild="$calm schedule.peak_lr=50 optimizer.weight_decay=100"
	expect 0 "" "$ling" train $calm checkpoint.every=off train.stop_at_step=1
	expect 4 "not finite" "$ling" train $wild checkpoint.every=off
	tail -n 1 wild/metrics.jsonl | grep -q '"nonfinite"' || problem "last line: $(tail -n 1 wild/metrics.jsonl)"
	tail -n 1 wild/metrics.jsonl | grep -q ': *null' || problem "no null in: $(tail -n 1 wild/metrics.jsonl)"
	expect 0 "" "$ling" plot wild
	[ "$(ls -d wild/step-*)" = wild/step-0000001 ] || problem "checkpoints: $(ls -d wild/step-*)"
	expect 4 "not finite" "$ling" train $wild checkpoint.every=1
	local last
	last=$(ls -d wild/step-* | tail -n 1)
	for file in model optimizer; do
		perl -e 'binmode STDIN; local $/; $_ = <STDIN>; my $n = unpack("Q<", $_); for (unpack("V*", substr($_, 8 + $n))) {
			exit 1 if ($_ & 0x7f800000) == 0x7f800000 }' <"$last/$file.safetensors" || problem "$last/$file holds an infinity or NaN"
	done
}

test_two_at_once() {
	mkdir busy
	exec 9<busy
	flock -n 9
	expect 1 "another ling train" "$ling" train tiny.yaml train.output_dir=busy
	exec 9<&-
}

test_eval() {
	expect 0 "" "$ling" eval run/step-0000020 --data valid --seq-len 16
	expect 0 "" "$ling" eval run/step-0000020 --data valid --seq-len 16 --json
	[ "$(metric loss out.txt | cut -c 1-12)" = "$(metric valid_loss run/metrics.jsonl | tail -n 1 | cut -c 1-12)" ] ||
		problem "eval $(cat out.txt) and valid_loss $(metric valid_loss run/metrics.jsonl | tail -n 1)"
	[ "$(metric tokens out.txt)" = 192 ] || problem "200 bytes hold 12 windows of 16: $(cat out.txt)"
	expect 0 "" "$ling" eval run/step-0000020 --data valid --seq-len 17 --json
	expect 2 "--data is required" "$ling" eval run/step-0000020 --seq-len 16
	expect 2 "--seq-len is required" "$ling" eval run/step-0000020 --data valid
	expect 2 "" "$ling" eval run/step-0000020 --data valid --seq-len 0
	expect 2 "" "$ling" eval run/step-0000020 --data valid --seq-len 1e1
	expect 1 "config.json" "$ling" eval . --data valid --seq-len 16
	expect 1 "nothere" "$ling" eval run/step-0000020 --data nothere --seq-len 16
	expect 1 "max_position_embeddings" "$ling" eval run/step-0000020 --data valid --seq-len 16385
	# A directory whose config.json describes another model than its weights are.
	for change in num_hidden_layers:2:1:"not a part of the model" num_hidden_layers:2:3:missing num_experts:6:7:missing vocab_size:257:258:shape; do
		local key from to text
		IFS=: read -r key from to text <<<"$change"
		rm -rf other && mkdir other && cp run/step-0000020/*.safetensors other && rm other/optimizer.safetensors
		sed "s/\"$key\": $from/\"$key\": $to/" run/step-0000020/config.json >other/config.json
		expect 1 "$text" "$ling" eval other --data valid --seq-len 16
	done
	expect 2 "unexpected" "$ling" eval run/step-0000020 more --data valid --seq-len 16
}

# Six windows have the same loss alone and as the beginning of a longer file, to the last digit.
test_eval_batching() {
	expect 0 "" "$ling" eval run/step-0000020 --data valid --seq-len 16 --json --max-windows 6
	local part
	part=$(metric loss out.txt)
	head -c 97 valid.txt >six.txt && "$ling" tokenize --out six six.txt >/dev/null 2>&1
	expect 0 "" "$ling" eval run/step-0000020 --data six --seq-len 16 --json
	[ "$(metric loss out.txt)" = "$part" ] || problem "six windows alone: $(cat out.txt), as part of a file: $part"
}

test_data_edges() {
	local small="data.seq_len=16 data.tokenizer=none data.valid=off train.steps=2 train.batch_warmup=off"
	write_tokens short 8 'S<' $(seq 0 15)
	write_tokens one 8 'S<' $(seq 0 16)
	write_tokens outside 8 'S<' $(seq 0 20) 257 3
	write_tokens negative 4 'l<' $(seq 0 20) -1 3
	write_tokens wide 4 'l<' $(seq 65530 65560)
	expect 0 "" "$ling" train tiny.yaml $small train.output_dir=e0 schedule.warmup_steps=1 schedule.decay.steps=1
	! grep -q "does not reach" err.txt || problem "a note of a schedule that fits: $(cat err.txt)"
	expect 0 "" "$ling" train tiny.yaml $small train.output_dir=e00 schedule.warmup_steps=1 schedule.decay.steps=2
	grep -q "note: the run has 2 steps, fewer than .*: the learning rate does not reach schedule.peak_lr" err.txt || problem "no note: $(cat err.txt)"
	expect 1 "16 tokens are too few" "$ling" train tiny.yaml $small data.train=short train.output_dir=e1
	expect 0 "" "$ling" train tiny.yaml $small data.train=one train.output_dir=e2
	expect 1 "token 21" "$ling" train tiny.yaml $small data.train=outside train.output_dir=e3
	expect 1 "token 21" "$ling" train tiny.yaml $small data.train=negative train.output_dir=e4
	expect 0 "" "$ling" train tiny.yaml $small data.train=wide model.vocab_size=65561 train.output_dir=e5
	expect 1 "65560" "$ling" train tiny.yaml $small data.train=wide model.vocab_size=65560 train.output_dir=e6
	expect 1 "too few" "$ling" train tiny.yaml data.valid=short data.tokenizer=none train.output_dir=e7
}

test_init_from() {
	local fixture=$root/tests/fixtures/huggingface_shards
	write_tokens few 8 'S<' $(seq 0 32)
	expect 0 "" "$ling" train tiny.yaml train.output_dir=from train.init_from=run/step-0000020 train.stop_at_step=1
	expect 0 "" "$ling" train tiny.yaml train.output_dir=from2 train.init_from="$fixture" train.steps=2 data.tokenizer=none \
		data.train=few data.valid=off "model={hidden_size: 16, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, \
vocab_size: 33, num_experts: 6, num_experts_per_tok: 2, num_shared_experts: 2, moe_intermediate_size: 6, rope_theta: 10000}"
	# A run's directory stands for its newest checkpoint, when the run begins; the config keeps what was asked for.
	expect 0 "" "$ling" train tiny.yaml train.output_dir=from4 train.init_from=run train.stop_at_step=1
	has err.txt "note: run is a run: taking its newest checkpoint, run/step-0000020"
	cmp -s from/step-0000001/model.safetensors from4/step-0000001/model.safetensors || problem "other weights"
	[ "$(jq -r .config.train.init_from from4/step-0000001/trainer.json)" = run ] || problem "not as it was asked for"
	expect 0 "" "$ling" train tiny.yaml train.output_dir=from4 train.init_from=run train.stop_at_step=2
	! grep -q "run is a run\|train.init_from" out.txt err.txt || problem "read again, or a change that is none: $(cat out.txt err.txt)"
	expect 2 "run is the directory of a run; expected one of its checkpoints" "$ling" train tiny.yaml train.output_dir=from5 model=run
	mkdir bare && touch bare/metrics.jsonl
	expect 1 "bare is the directory of a run that has no checkpoint yet" "$ling" train tiny.yaml train.output_dir=from5 train.init_from=bare
	expect 1 "nothere" "$ling" train tiny.yaml train.output_dir=from3 train.init_from=nothere
	cp -r run/step-0000020 named && echo notes >"$(not_utf8 named/notes).txt"
	expect 1 "its name is not UTF-8, so that a checkpoint cannot hold it" "$ling" train tiny.yaml train.output_dir=from3 train.init_from=named
	expect 1 "its name is not UTF-8" "$ling" convert-checkpoint named made/step-0000000 --to checkpoint
	for change in num_experts=8 moe_intermediate_size=9 num_hidden_layers=1 rope_theta=77 norm_head=off rms_norm_eps=0.1 num_experts_per_tok=1 norm_topk_prob=off head_dim=12; do
		expect 1 "model.${change%=*}" "$ling" train tiny.yaml train.output_dir=from3 train.init_from=run/step-0000020 model.$change
	done
}

# Folders may have names that are not UTF-8. What is written there is JSON all the same, and is found again.
test_paths() {
	local odd step
	odd=$(not_utf8 odd)
	expect 0 "" "$ling" train-tokenizer --vocab-size 300 --out "$odd/bpe/tokenizer.json" text.txt
	cp text.txt "$odd"
	expect 0 "" "$ling" tokenize --tokenizer "$odd/bpe" --out "$odd/text" "$odd/text.txt"
	json "$odd/text.json"
	[ "$(jq .vocab_size "$odd/text.json")" = 300 ] || problem "no vocabulary: $(cat "$odd/text.json")"
	expect 0 "" "$ling" tokenize --decode "$odd/text" --tokenizer "$odd/bpe"
	same out.txt <(cat text.txt; printf '<|endoftext|>')
	expect 2 "UTF-8" "$ling" train tiny.yaml data.train="$odd/text" # YAML is UTF-8; a run may be in such a folder
	cp tiny.yaml "$odd" && cd "$odd" || return
	for step in 2 4; do
		expect 0 "" "$ling" train tiny.yaml data.valid=off data.tokenizer=bpe model.vocab_size=300 train.stop_at_step=$step
	done
	grep -q "continuing from" out.txt || problem "began again: $(cat out.txt)"
	cd .. || return
	json "$odd/run/step-0000004/trainer.json"
	json "$odd/run/metrics.jsonl"
	expect 0 "" "$ling" eval "$odd/run/step-0000004" --data "$odd/text" --seq-len 16 --json
	json out.txt
	expect 0 "" "$ling" info "$odd/run/step-0000004" --json
	json out.txt
	expect 0 "" "$ling" plot "$odd/run"
	[ -s "$odd/run/metrics.png" ] || problem "no plot"
}

test_usage() {
	expect 2 "unknown command trian; did you mean train?" "$ling" trian tiny.yaml
	expect 2 "unknown command qqqqqqq" "$ling" qqqqqqq
	! grep -q "did you mean" err.txt && [ "$(lines err.txt)" = 2 ] || problem "found: $(cat err.txt)"
	expect 2 "" "$ling"
	expect 0 "" "$ling" --help
	expect 0 "" "$ling" --version
	for command in train eval tokenize train-tokenizer convert-checkpoint merge info bench doctor plot export; do
		expect 0 "" "$ling" $command --help
		grep -q "Usage: ling $command" out.txt || problem "ling $command --help: $(head -n 1 out.txt)"
		case $command in bench | doctor) ;; *) expect 2 "" "$ling" $command ;; esac
		expect 2 "" "$ling" $command --no-such-option x
	done
	expect 0 "" "$ling" train --keys
	grep -q "schedule.peak_lr" out.txt || problem "train --keys: $(head -c 200 out.txt)"
	expect 2 "nothere.yaml" "$ling" train nothere.yaml
	expect 2 "directory" "$ling" train .
	expect 2 "hidden_size" "$ling" train tiny.yaml model.hiden_size=3
	expect 1 "tiny.yaml" "$ling" train tiny.yaml train.output_dir=tiny.yaml/x
	expect 2 "--out : expected a path, found nothing" "$ling" train-tokenizer --vocab-size 300 --out "" text.txt
	expect 2 "argument 1 is empty" "$ling" plot ""
	expect 2 "goes with --tokenizer alone" "$ling" tokenize --decode text --chat-form ling2
	expect 2 "go with --data" "$ling" eval run/step-0000020 --tasks tasks.yaml --packing windows
	write_tokens wide 8 'S<' 97 257
	expect 1 "wide.bin: token 1: id 257 is none of the 257 that byte has" "$ling" tokenize --decode wide --tokenizer byte
}

# A BLAS library whose products are wrong, as some are on new processors, is found before any training.
test_wrong_blas() {
	cat >wrong.c <<'END'
#define _GNU_SOURCE
#include <dlfcn.h>
typedef void gemm(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
void cblas_sgemm(int o, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b, int ldb, float beta,
		float *c, int ldc)
{
	((gemm *)dlsym(RTLD_NEXT, "cblas_sgemm"))(o, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
	c[(m - 1) * ldc + n - 1] *= 1.01f;
}
END
	gcc -shared -fPIC wrong.c -o wrong.so -ldl || problem "no wrong.so"
	expect 1 "wrong products" env LD_PRELOAD=$PWD/wrong.so LING_PRODUCTS=openblas "$root/ling" train tiny.yaml train.output_dir=wrong
	expect 1 "wrong products" env LD_PRELOAD=$PWD/wrong.so LING_PRODUCTS=openblas "$root/ling" eval run/step-0000020 --data valid --seq-len 16
	[ ! -e wrong/metrics.jsonl ] || problem "it trained"
	# where the library computes nothing, it is only told
	expect 0 "" env LD_PRELOAD=$PWD/wrong.so "$root/ling" eval run/step-0000020 --data valid --seq-len 16
	grep -q "^warning: OpenBLAS's .* wrong products" err.txt || problem "no warning: $(cat err.txt)"
	# a command line that is wrong, or asks for help, needs no library
	expect 2 "unexpected" "$root/ling" doctor now
	! grep -q "^note:" err.txt || problem "started again: $(cat err.txt)"
	expect 0 "" "$root/ling" bench --help
	[ ! -s err.txt ] || problem "bench --help: $(cat err.txt)"
	expect 1 "wrong products" env LD_PRELOAD=$PWD/wrong.so "$root/ling" doctor
	grep -q "^matmul .* ok$" out.txt || problem "no table: $(cat out.txt)"
}

test_doctor() {
	expect 0 "" "$root/ling" doctor
	[ "$(grep -c " ok$" out.txt)" -ge 14 ] || problem "operations: $(cat out.txt)"
	expect 0 "" env OMP_NUM_THREADS=500 mpirun --oversubscribe --bind-to none -n 1 "$root/ling" doctor
	grep -q "^! more threads than cores" out.txt || problem "threads: $(cat out.txt)"
	expect 0 "" "$root/ling" doctor --json
	[ "$(grep -o '"ok": true' out.txt | wc -l)" -ge 14 ] || problem "operations: $(cat out.txt)"
	# every kernel gives a wrong product where the library computes them all
	expect 1 "matmul is wrong" env LD_PRELOAD=$PWD/wrong.so LING_PRODUCTS=openblas "$root/ling" doctor --json
	grep -q '{"name": "matmul", "ok": false' out.txt || problem "operations: $(cat out.txt)"
}

test_info() {
	expect 0 "" "$ling" info "$root/configs/ling-lite.yaml" --json
	grep -q '"parameters": 16801974272, "active_parameters": 2753153024' out.txt || problem "Ling-Lite: $(head -c 200 out.txt)"
	expect 0 "" "$ling" info "$root/configs/ling-plus.yaml" --json
	grep -q '"parameters": 292540679424,' out.txt || problem "Ling-Plus: $(head -c 200 out.txt)"
	expect 0 "" "$ling" info "$root/configs/ling-plus-first-upload.yaml" --json
	grep -q '"parameters": 290602910976,' out.txt || problem "Ling-Plus, first upload: $(head -c 200 out.txt)"
	# The released files of Ling-flash-2.0 have so many numbers, 7936 of them in float32, the expert biases; of Ling-mini-2.0 the
	# report says 16.26 billion, 1.43 active, 789 million without embedding and head (of flash 6.1 and 4.8 billion).
	expect 0 "" "$ling" info "$root/configs/ling-flash-2.0.yaml" --json
	grep -q '"parameters": 102889705216, "active_parameters": 6152277760' out.txt || problem "Ling-flash-2.0: $(head -c 200 out.txt)"
	[ "$(jq '.active_parameters - .parts.embedding.active - .parts.head.active' out.txt)" = 4864626432 ] || problem "Ling-flash-2.0: $(cat out.txt)"
	# llama.cpp counts 999.705 billion when it loads Ling-1T.
	expect 0 "" "$ling" info "$root/configs/ling-1t.yaml" --json
	grep -q '"parameters": 999705328640, "active_parameters": 51054427136' out.txt || problem "Ling-1T: $(head -c 200 out.txt)"
	expect 0 "" "$ling" info "$root/configs/ling-mini-2.0.yaml" --json
	grep -q '"parameters": 16255643392, "active_parameters": 1432973056' out.txt || problem "Ling-mini-2.0: $(head -c 200 out.txt)"
	[ "$(jq '.active_parameters - .parts.embedding.active - .parts.head.active' out.txt)" = 789147392 ] || problem "Ling-mini-2.0: $(cat out.txt)"
	expect 0 "" "$ling" info run/step-0000020
	expect 0 "" "$ling" info tiny.yaml data.seq_len=32
	write_tokens few 8 'S<' $(seq 0 32)
	expect 1 "GB" "$ling" train tiny.yaml model="$root/configs/ling-plus.yaml" train.output_dir=huge data.train=few data.valid=off data.tokenizer=none
}

# report PROGRAM WORDS...: the command works, and what it prints with --json is JSON for another reader too.
report() {
	expect 0 "" "$@" --json
	json out.txt
}

# Reports with any bytes in a path: a quote, a backslash, a line break, and one that is not UTF-8.
test_reports() {
	local odd=$'odd "\\\n\351' shown='odd \"\\\n�'
	mkdir -p "$odd" && cp -r run/step-0000020 "$odd/model" && cp tiny.yaml "$odd/tiny.yaml" || problem "no $odd"
	printf '{"q": "a", "a": "b"}\n' >"$odd/a.jsonl"
	printf '%s\n' '- { name: task, type: exact_match, data: a.jsonl, prompt: "{q}", answer: a, max_tokens: 2 }' >"$odd/tasks.yaml"
	report "$ling" info "$odd/model"
	report "$ling" info "$odd/tiny.yaml"
	report "$ling" info "$odd/tiny.yaml" --ranks 2
	has out.txt '"layouts": [{"data": 2, "tensor": 1, "expert": 1,' '"smallest_layout": {'
	report "$ling" info "$odd/tiny.yaml" --ranks 2 --memory-per-node 1kB
	has out.txt '"layouts": [], "smallest_layout": {'
	report "$ling" eval "$odd/model" --data valid --seq-len 16
	report "$ling" eval "$odd/model" --tasks "$odd/tasks.yaml" --seq-len 16
	has out.txt "\"model\": \"$shown/model\"" "\"tasks_file\": \"$shown/tasks.yaml\""
	report "$ling" generate "$odd/model" --prompt a
	report "$ling" convert-checkpoint "$odd/model" "$odd/hf"
	has out.txt "\"path\": \"$shown/hf\""
	report "$ling" convert-checkpoint "$odd/model" "$odd/model.gguf" --no-tokenizer
	report "$ling" info "$odd/hf"
	report "$root/ling" bench "$odd/tiny.yaml"
	has out.txt "\"config\": \"$shown/tiny.yaml\""
	report "$root/ling" doctor
}

# How threads share the work: numbers between 0 and 1, all operations whose share is not small, as text too; and what is refused.
test_balance() {
	local n
	report "$ling" bench tiny.yaml --balance 3 --steps 2
	jq -e '.threads == 3 and .steps == 2 and .seconds > 0 and ([.balance_percent, .operations[].balance_percent, .operations[].share_percent] |
			all(. > 0 and . <= 100.001)) and ([.operations[].share_percent] | . == (sort | reverse) and (add - 100 | fabs) < 0.01) and
			([.operations[] | .operation + ", " + .pass] | length > 40 and unique == sort and contains(["experts / gate_up, weight gradient"]))' \
		out.txt >/dev/null || problem "$(cat out.txt)"
	# a mean of 3 threads is a third of the largest at least
	jq -e '[.operations[].balance_percent] | all(. >= 33.3)' out.txt >/dev/null || problem "$(cat out.txt)"
	expect 0 "" "$ling" bench tiny.yaml --balance 3 --steps 1
	n=$(grep -cE '^  [a-z].*[a-z] +[0-9]+\.[0-9]% +[0-9]+\.[0-9]%(  !)?$' out.txt)
	[ "$n" -ge 20 ] && [ "$n" -ge $(($(wc -l <out.txt) - 2)) ] || problem "$n operations: $(cat out.txt)"
	awk '/%/ && NF >= 3 && !/threads/ { share = $(NF - 1 - /!/) + 0; balance = $(NF - /!/) + 0; sum += share
			if (/!/ != (share > 2 && balance < 90) && share != 2.0 && balance != 90.0) exit 1 }
		END { exit sum < 98 || sum > 102 }' out.txt || problem "$(cat out.txt)"
	# with one thread, the largest is the mean
	report "$ling" bench tiny.yaml --balance 1 --steps 1
	jq -e '[.operations[].balance_percent] | all(. > 99.99 and . < 100.01)' out.txt >/dev/null || problem "$(cat out.txt)"
	for n in 0 -1 1025 2.5 x ""; do
		expect 2 "--balance" "$ling" bench tiny.yaml --balance "$n"
	done
	expect 2 "OMP_WAIT_POLICY is active" env OMP_WAIT_POLICY=active "$ling" bench tiny.yaml --balance 2
	expect 2 "GOMP_SPINCOUNT is infinity" env GOMP_SPINCOUNT=infinity "$ling" bench tiny.yaml --balance 2
	expect 1 "OpenMP gives 2 threads" env OMP_THREAD_LIMIT=2 "$ling" bench tiny.yaml --balance 3
	expect 2 "for one process" ranks 2 "$root/ling" bench tiny.yaml --balance 2
}

test_plot() {
	expect 0 "" "$ling" plot run
	[ "$(head -c 4 run/metrics.png | tail -c 3)" = PNG ] || problem "run/metrics.png is no PNG"
	expect 0 "" "$ling" plot run --out other.png
	cmp other.png run/metrics.png || problem "the same run, and another picture"
	mkdir -p again && cp -r run again/run
	for n in 1 2; do
		expect 0 "" "$ling" plot run again/run --x tokens --out $n.svg
		grep -q '^<svg .*width="1400"' $n.svg || problem "$n.svg: $(head -c 300 $n.svg)"
	done
	cmp 1.svg 2.svg || problem "the same runs, and another SVG"
	expect 2 "expected --out FILE" "$ling" plot run again/run
	expect 2 "9 runs: expected at most 8 for one picture" "$ling" plot run run run run run run run run run --out nine.png
	expect 2 "expected one of steps, tokens" "$ling" plot run --x time
	expect 1 "metrics.jsonl" "$ling" plot .
	expect 1 "nothere" "$ling" plot nothere
	expect 1 "nothere" "$ling" plot run nothere --out two.png
	expect 1 "is a checkpoint; expected the directory of its run: give run" "$ling" plot "$(ls -d run/step-* | tail -n 1)"
	mkdir -p empty && : >empty/metrics.jsonl
	expect 1 "no steps to draw" "$ling" plot run empty --out two.png
	[ ! -e two.png ] || problem "an error, and two.png"
}

test_export() {
	expect 0 "" "$ling" export run --csv metrics.csv --tensorboard deep/tb
	[ "$(wc -l <metrics.csv)" = $(($(wc -l <run/metrics.jsonl) + 1)) ] || problem "metrics.csv: $(head -c 400 metrics.csv)"
	[ "$(head -c 28 deep/tb/events.out.tfevents.0.ling | tail -c 5)" = brain ] || problem "deep/tb: $(ls deep/tb)"
	"$ling" export run --csv - >out.csv && cmp out.csv metrics.csv || problem "--csv - and --csv FILE differ"
	jq -r '[.step, .loss, .tokens] | @csv' run/metrics.jsonl >expected.csv
	awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next } { print $at["step"] "," $at["loss"] "," $at["tokens"] }' out.csv |
		jq -R -r 'split(",") | map(tonumber) | @csv' | cmp - expected.csv || problem "other numbers than in metrics.jsonl"
	expect 2 "expected --csv FILE" "$ling" export run
	expect 2 "both to standard output" "$ling" export run --csv - --expert-counts -
	expect 1 "has no metrics.jsonl" "$ling" export . --csv -
	expect 1 "nothere" "$ling" export run --csv nothere/a.csv
	expect 1 "metrics.csv" "$ling" export run --tensorboard metrics.csv
	"$ling" export run --csv - >/dev/full 2>err.txt
	[ $? = 1 ] && has err.txt "standard output" || problem "a full disk: $(cat err.txt)"
}

check tokenize train bpe added_tokenizer bit_equal stop_and_continue continue_plain signals kill changed_config said time_left \
	moved_directory not_finite_start home_paths gguf_paths changed_data chat packing blend formats \
	damaged_checkpoint not_finite two_at_once eval eval_batching data_edges init_from paths usage streams wrong_blas doctor info reports balance plot export

# What a user runs is the optimised program.
ling=$root/ling
long_steps=200
mkdir optimised && cp tiny.yaml text.* valid.* optimised && cd optimised || exit 1
# What a file holds is seen by its name and its bytes, and what is neither text nor JSON lines is refused by name.
test_input_forms() {
	local f kind
	printf '{"text": "hello one"}\n{"text": "hello two"}\n' >forms.jsonl
	expect 0 "" "$ling" tokenize --out right forms.jsonl
	cp forms.jsonl FORMS.JSONL && cp forms.jsonl forms.Ndjson && gzip -c forms.jsonl >forms.jsonl.gz
	printf '[{"text": "hello one"},\n {"text": "hello two"}]\n' >list.json
	{ printf '\357\273\277' && cat forms.jsonl; } >mark.jsonl
	{ head -1 forms.jsonl | gzip && tail -1 forms.jsonl | gzip; } >parts.ndjson.GZ
	# zstd by hand: a frame of one raw block (RFC 8878)
	perl -e 'local $/; open F, "<", "forms.jsonl"; $_ = <F>; my $n = length; print "\x28\xb5\x2f\xfd\x20", chr $n, substr(pack("V", $n << 3 | 1), 0, 3), $_' >forms.jsonl.zst
	cp forms.jsonl.zst forms.jsonl.ZSTD
	perl -e 'print "[", " " x 9000; print qq({"text": "hello one"},), "\n" x 9000, qq({"text": "hello two"}])' >long.json # longer than what is looked at first
	# zeros behind gzip that fill a block; a frame to skip in front, as pzstd writes it; a window of 256 MB
	{ cat forms.jsonl.gz && head -c 70000 /dev/zero; } >zeros.jsonl.gz
	{ printf '\120\052\115\030\004\0\0\0abcd' && cat forms.jsonl.zst; } >skip.jsonl.zst
	perl -e 'local $/; open F, "<", "forms.jsonl"; $_ = <F>; print "\x28\xb5\x2f\xfd\0\x90", substr(pack("V", length() << 3 | 1), 0, 3), $_' >wide.jsonl.zst
	for f in FORMS.JSONL forms.Ndjson forms.jsonl.gz list.json long.json mark.jsonl parts.ndjson.GZ forms.jsonl.zst forms.jsonl.ZSTD \
			zeros.jsonl.gz skip.jsonl.zst wide.jsonl.zst; do
		expect 0 "" "$ling" tokenize --out form "$f"
		same form.bin right.bin
		same form.idx right.idx
	done
	expect 0 "" "$ling" tokenize --out form --format jsonl - <forms.jsonl
	same form.bin right.bin
	# A pipe gives what is there, which may be less than what tells the packing.
	expect 0 "" "$ling" tokenize --out form --format jsonl - < <(head -c 1 forms.jsonl.gz; sleep 0.2; tail -c +2 forms.jsonl.gz)
	same form.bin right.bin
	printf '[{"text": "hello one", "id": 123456789012345678901}, {"text": "hello two"}]' >large.json
	expect 0 "" "$ling" tokenize --out form large.json
	same form.bin right.bin
	expect 1 "-: the standard input has no name" "$ling" tokenize --out form - <forms.jsonl
	for f in /dev/stdin /dev/fd/0; do
		expect 1 "$f: a device or a pipe has no name that tells what it is" "$ling" tokenize --out form $f <forms.jsonl
		expect 0 "" "$ling" tokenize --out form --format jsonl $f <forms.jsonl
		same form.bin right.bin
	done
	expect 0 "" "$ling" train-tokenizer --vocab-size 262 --out right-bpe.json forms.jsonl
	expect 0 "" "$ling" train-tokenizer --vocab-size 262 --out form-bpe.json forms.jsonl.gz
	same form-bpe.json right-bpe.json
	printf 'The' >plain.txt && printf '\357\273\277The' >mark.txt
	expect 0 "" "$ling" tokenize --out right plain.txt
	expect 0 "" "$ling" tokenize --out form mark.txt
	same form.bin right.bin

	rm -f refused.*
	for kind in 'PAR1x:a Parquet file' 'PK\003\004x:a zip archive' '!<arch>\nx:a .deb or ar' '\377\376a\000:text in UTF-16' '\376\377a:text in UTF-16' 'a\000b:binary' \
		'\351\350\340\371\351\350\340\371\351\350:mostly not UTF-8' '\3757zXZ\000:an xz file' '\004\042\115\030x:an lz4 file'; do
		printf "${kind%%:*}" >foreign.txt
		expect 1 "foreign.txt: is ${kind#*:}" "$ling" tokenize --out refused foreign.txt
		expect 1 "foreign.txt: is ${kind#*:}" "$ling" train-tokenizer --vocab-size 262 --out refused.json foreign.txt
	done
	tar -cf archive.txt plain.txt
	expect 1 "archive.txt: is a tar archive" "$ling" tokenize --out refused archive.txt
	printf 'version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n' >pointer.txt
	expect 1 "pointer.txt: is a pointer of Git LFS" "$ling" tokenize --out refused pointer.txt
	{ cat forms.jsonl.gz && head -c 9 /dev/zero && echo x; } >rest.jsonl.gz
	expect 1 "rest.jsonl.gz: cannot unpack" "$ling" tokenize --out refused rest.jsonl.gz
	# a quarter of the bytes may be in another encoding, and no more
	printf 'a\351b\351cdef' >quarter.txt
	expect 0 "" "$ling" tokenize --out form quarter.txt
	printf '\351a\351b\351cde' >more.txt
	expect 1 "more.txt: is mostly not UTF-8" "$ling" tokenize --out refused more.txt
	expect 0 "" "$ling" tokenize --out form --format text foreign.txt
	head -c 30 forms.jsonl.gz >cut.jsonl.gz
	expect 1 "cut.jsonl.gz: ends in the middle" "$ling" tokenize --out refused cut.jsonl.gz
	head -c 30 forms.jsonl.zst >cut.jsonl.zst
	expect 1 "cut.jsonl.zst: ends in the middle" "$ling" tokenize --out refused cut.jsonl.zst
	echo '{"text": "a"}' >object.json
	expect 1 "object.json: found an object; expected an array of records" "$ling" tokenize --out refused object.json
	printf '{"text": "a"}\n{"text": "b"}\n' >several.json
	printf '[\n{"text": "a"},\n{"text": 3}]\n' >record.json
	expect 1 "record.json: record 2: " "$ling" tokenize --out refused record.json
	expect 1 "several.json:2: bad JSON: end of file expected" "$ling" tokenize --out refused several.json
	has err.txt "a file with one record on a line is named .jsonl"
	! compgen -G 'refused*' >/dev/null || problem "made $(ls refused*)"
}

# Lines that cannot be used, and the member that holds the text.
test_bad_lines() {
	# what is no JSON costs nothing in a member that nobody reads, and is named in one that is read
	printf '{"text":"a","meta":{"score":NaN},"p":[1e400,-Infinity]}\n{"text":"b","x":"cut \\ud83d"}\n' >unread.jsonl
	expect 0 "" "$ling" tokenize --out unread --json unread.jsonl
	[ "$(cat out.txt)" = '{"path": "unread", "documents": 2, "tokens": 4, "bytes": 2, "loss_tokens": 4, "skipped_lines": 0}' ] ||
		problem "$(cat out.txt)"
	[ "$("$ling" tokenize --decode unread | tr -d '\0')" = "ab" ] || problem "$("$ling" tokenize --decode unread)"
	printf '[{"text":"a","meta":{"score":NaN},"id":99999999999999999999},\n{"text":"b","x":"\\ud83d"}]' >unread.json
	expect 0 "" "$ling" tokenize --out array unread.json
	same array.bin unread.bin
	printf '{"text":"cut \\ud83d"}\n{"text":"b"}\nnonsense\n{"body":"c"}\n' >read.jsonl
	expect 1 'read.jsonl:1: `text` is broken text, with half of a surrogate pair, \ud83d; expected a string; --skip-bad-lines' \
		"$ling" tokenize --out read read.jsonl
	expect 1 'read.jsonl:1: `text` is broken text' "$ling" train-tokenizer --vocab-size 262 --out read.json read.jsonl
	expect 0 "" "$ling" tokenize --out read --skip-bad-lines read.jsonl
	has out.txt "read: 1 documents, 2 tokens, 1 bytes, 3 bad lines skipped"
	[ "$(sed 's/: .*//' err.txt | tr '\n' ' ')" = "skipped skipped skipped 3 lines could not be used, and were skipped " ] || problem "$(cat err.txt)"
	has err.txt "skipped: read.jsonl:1: " "skipped: read.jsonl:3: bad JSON" "skipped: read.jsonl:4: found \`body\`"
	jq -e '.text_field == "text" and .skipped_lines == 3' read.json >/dev/null || problem "$(cat read.json)"
	expect 0 "" "$ling" train-tokenizer --vocab-size 262 --out bpe.json --skip-bad-lines --json read.jsonl
	jq -e '.vocab_size == 259 and .skipped_lines == 3 and .words == 1' out.txt >/dev/null || problem "$(cat out.txt)"
	has err.txt "3 lines could not be used"
	expect 1 "nothing to write" "$ling" tokenize --out none --skip-bad-lines --text-field nobody read.jsonl
	has err.txt "4 lines could not be used"
	# another member
	expect 0 "" "$ling" tokenize --out body --skip-bad-lines --text-field body --json read.jsonl
	[ "$(jq -c '[.documents, .skipped_lines]' out.txt)" = "[1,3]" ] || problem "$(cat out.txt)"
	[ "$(jq -r .text_field body.json)" = body ] || problem "$(cat body.json)"
	expect 1 'found `text`; expected one of a string `body`' "$ling" train-tokenizer --vocab-size 262 --out no.json --text-field body read.jsonl
	expect 1 "text.txt: is text; expected a file of JSON lines, to which --skip-bad-lines belongs" "$ling" tokenize --out no --skip-bad-lines text.txt
	expect 2 "decode" "$ling" tokenize --decode read --skip-bad-lines
	! compgen -G 'no[.n]*' >/dev/null || problem "made $(ls no*)"
}

check train bit_equal stop_and_continue signals kill input_forms bad_lines
finish
