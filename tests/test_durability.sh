#!/bin/bash
# What would be on disk after a power cut: the order of fsync, rename and unlink of each command that publishes files,
# as build/log_files.so writes it.
. "$(dirname "$0")/check.sh"
ling=$root/ling # a preloaded library and the sanitizers exclude each other
export LOG_FILES=$folder/calls.txt

# logged COMMAND...: a command that must succeed; its calls are in calls.txt.
logged() {
	rm -f calls.txt
	expect 0 "" env LD_PRELOAD="$root/build/log_files.so" "$@"
}

# order RULE PATH...: a rule about calls.txt, for each path, which the command has published:
#   file       the content is synced, then it gets its name, then the directory is synced
#   directory  the same for a directory, and each file in it is synced before that
#   last       the first path gets its name after all others, which are on disk by then
#   replaced   before any of the others gets its name, an old file of the first path is gone from the disk
order() {
	perl -e '
		my ($rule, @paths) = @ARGV;
		open my $log, "<", "calls.txt" or die "nothing was synced\n";
		my @calls = map { chomp; s#/\./#/#g; [split / /] } <$log>;
		sub parent { $_[0] =~ s#/[^/]*$##r }
		# the number of the first call from $from on that is @call; else the number of calls
		sub find { my ($from, @call) = @_;
			for ($from .. $#calls) { return $_ if "@{$calls[$_]}" eq "@call" } scalar @calls }
		# the number of the last call that gives a path its name
		sub named { my $at; for (0 .. $#calls) { $at = $_ if $calls[$_][0] eq "rename" && $calls[$_][2] eq $_[0] }
			defined $at ? $at : die "$_[0]: no rename gives it its name\n" }
		# a file, perhaps under the name that it had before, or a directory, after the last file got its name in it
		sub synced_before { my ($path, $at) = @_;
			my $from = 0;
			for (0 .. $at - 1) {
				next if $calls[$_][0] ne "rename";
				return synced_before($calls[$_][1], $_) if $calls[$_][2] eq $path;
				$from = $_ if parent($calls[$_][2]) eq $path;
			}
			find($from, "sync", $path) < $at or die "$path: is not synced before it is published\n" }
		for my $path (@paths) {
			my $at = named($path);
			my $from = $calls[$at][1];
			synced_before($from, $at);
			find($at, "sync", parent($path)) < @calls or die "$path: its directory is not synced after the rename\n";
			next unless $rule eq "directory";
			opendir my $d, $path or die "$path: $!\n";
			synced_before("$from/$_", $at) for grep { !/^\./ } readdir $d;
		}
		my ($first, @others) = @paths;
		my $last = named($first);
		for (@others) {
			next if $rule ne "last";
			named($_) < $last or die "$first: gets its name before $_\n";
			find(named($_), "sync", parent($_)) < $last or die "$first: gets its name before that of $_ is on disk\n";
		}
		if ($rule eq "replaced") {
			my ($gone) = grep { my $c = $calls[$_]; ($c->[0] eq "unlink" || $c->[0] eq "rename") && $c->[1] eq $first }
				0 .. $#calls;
			defined $gone or die "$first: the old one is not taken away\n";
			my $kept = find($gone, "sync", parent($first));
			$kept < named($_) or die "$_: gets its name while the old $first may still be on disk\n" for @others;
		}' "$@" 2>order.txt || problem "$1: $(cat order.txt): $(head -c 1500 calls.txt | sed "s#$folder/##g" | tr '\n' ';')"
}

head -c 640 "$root/ling.h" >text.txt
printf '{"prompt": "p", "completion": "c"}\n{"text": "ab"}\n' >chat.jsonl
tiny train.steps=3 train.batch_warmup=off checkpoint.every=1 checkpoint.keep=2

test_tokenize() {
	local f=$folder
	logged "$ling" tokenize --tokenizer byte --out text text.txt
	order last "$f/text.idx" "$f/text.bin" "$f/text.json"
	logged "$ling" tokenize --tokenizer byte --out chat chat.jsonl
	order last "$f/chat.idx" "$f/chat.bin" "$f/chat.mask.bin" "$f/chat.json"
	# in the place of old ones
	logged "$ling" tokenize --tokenizer byte --out chat chat.jsonl
	order last "$f/chat.idx" "$f/chat.bin" "$f/chat.mask.bin" "$f/chat.json"
	order replaced "$f/chat.idx" "$f/chat.bin" "$f/chat.mask.bin" "$f/chat.json"
}

test_train_tokenizer() {
	logged "$ling" train-tokenizer --vocab-size 300 --out bpe.json text.txt
	order file "$folder/bpe.json"
}

test_train() {
	local step=$folder/run/step-000000
	logged "$ling" train tiny.yaml
	order directory "${step}2" "${step}3"
	# No checkpoint is ahead of its metrics.
	awk '/^sync .*\/metrics.jsonl$/ { synced++ }
		/^rename .*\/step-[0-9]*$/ && $2 ~ /tmp/ { named++; if (synced < named) exit 1 }
		END { if (named != 3) exit 1 }' calls.txt || problem "metrics and checkpoints: $(cat calls.txt)"
	# An old checkpoint loses its name, on disk, before anything in it goes.
	awk -v run="$folder/run" '/^rename .*\/step-0000001 / { renamed = 1; gone = $3 "/" }
		renamed && $0 == "sync " run { safe = 1 }
		/^unlink/ && index($2, run "/step-") == 1 { print "removed under its name: " $2; exit 1 }
		gone && /^unlink/ && index($2, gone) == 1 { removed++; if (!safe) { print "removed too early: " $2; exit 1 } }
		END { if (!removed) print "nothing was removed" }' calls.txt >order.txt
	[ ! -s order.txt ] || problem "$(cat order.txt): $(cat calls.txt)"
}

# Each rank writes its part; all are on disk before the checkpoint gets its name.
test_train_ranks() {
	rm -f calls.txt
	ranks 2 -x LD_PRELOAD="$root/build/log_files.so" "$ling" train tiny.yaml train.output_dir=two train.steps=1 >out.txt 2>err.txt ||
		problem "2 ranks: $(head -c 400 err.txt)"
	[ -e two/step-0000001/model-00002-of-00002.safetensors ] || problem "no second part: $(ls two/step-0000001)"
	order directory "$folder/two/step-0000001"
}

test_convert() {
	local model=run/step-0000003
	logged "$ling" convert-checkpoint $model hf
	order directory "$folder/hf"
	logged "$ling" convert-checkpoint $model model.gguf --no-tokenizer
	order file "$folder/model.gguf"
	logged "$ling" convert-checkpoint hf again/step-0000000
	order directory "$folder/again/step-0000000"
}

test_plot() {
	logged "$ling" plot run
	order file "$folder/run/metrics.png"
}

test_eval() {
	printf '{"q": "a", "a": "b"}\n' >a.jsonl
	printf '%s\n' '- { name: task, type: exact_match, data: a.jsonl, prompt: "{q}", answer: a, max_tokens: 2 }' >tasks.yaml
	local r=$folder/results n
	for n in 1 2; do
		logged "$ling" eval run/step-0000003 --tasks tasks.yaml --seq-len 16 --out results
		order last "$r/results.json" "$r/samples.jsonl"
	done
	order replaced "$r/results.json" "$r/samples.jsonl"
}

# What is published may be read by whom the umask lets read it, as any file that a program makes.
test_modes() {
	local file
	rm -rf modes && mkdir modes
	(umask 027 && "$ling" tokenize --out modes/chat chat.jsonl && "$ling" train-tokenizer --vocab-size 300 --out modes/bpe.json text.txt &&
		"$ling" train tiny.yaml train.output_dir=modes/run && "$ling" plot modes/run &&
		"$ling" convert-checkpoint run/step-0000003 modes/hf &&
		"$ling" convert-checkpoint run/step-0000003 modes/model.gguf --no-tokenizer &&
		"$ling" eval run/step-0000003 --tasks tasks.yaml --seq-len 16 --out modes/results) >out.txt 2>err.txt || problem "$(cat err.txt)"
	[ "$(find modes -type f | wc -l)" -ge 15 ] || problem "files: $(find modes)"
	find modes -mindepth 1 \( -type f ! -perm 640 -o -type d ! -perm 750 \) -printf '%m %p\n' >modes.txt
	[ ! -s modes.txt ] || problem "modes: $(cat modes.txt)"
	[ -z "$(find . -name '*.tmp-*' -o -name '.tmp-*')" ] || problem "left behind: $(find . -name '*tmp-*')"
}

check tokenize train_tokenizer train train_ranks convert plot eval modes
finish
