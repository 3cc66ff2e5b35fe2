#!/bin/bash
# Makes the samples of configs/tasks-wordnet.yaml from Debian's WordNet 3.0 (package wordnet-base, fetched and unpacked, not installed): which of
# four definitions a word has, the word for a definition, and entries as plain text. The same lines every time.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/data/wordnet
mkdir -p "$out"
dict=$out/package/usr/share/wordnet
if [ ! -f "$dict/data.noun" ]; then
	rm -rf "$out/package" && mkdir -p "$out/package"
	fetch='apt-get download -q wordnet-base'
	(cd "$out/package" && { $fetch || { { apt-get update -q || sudo apt-get update -q; } && $fetch; }; } && dpkg-deb -x wordnet-base_*.deb .) >"$out/fetch.log" 2>&1 ||
		{ echo "wordnet-base could not be fetched, see $out/fetch.log" >&2; exit 1; }
fi
perl - "$dict" "$out" <<'PERL'
use strict;
use warnings;
my ($dict, $out) = @ARGV;
my %part = (n => "noun", v => "verb", a => "adjective", s => "adjective", r => "adverb");
my (%topic, @entries, %senses);
for my $file (qw(noun verb adj adv)) {
	open my $in, "<", "$dict/data.$file" or die "$dict/data.$file: $!\n";
	while (<$in>) {
		next if /^ /; # the license
		my ($facts, $gloss) = split / \| /, $_, 2;
		my ($offset, $topic, $kind, undef, $word) = split / /, $facts;
		my ($definition) = $gloss =~ /^\s*(.*?)\s*(?:;\s*"|$)/; # up to the examples of use
		$word =~ s/\([a-z]+\)$//; # where an adjective stands
		$senses{lc $word}++;
		next if $word =~ /[^a-z]/ || length $definition < 20 || length $definition > 120 || $definition =~ /["\\\x00-\x1f]|\b\Q$word\E/;
		my $entry = {word => $word, part => $part{$kind}, topic => "$kind$topic", definition => $definition};
		push @entries, $entry;
		push @{$topic{"$kind$topic"}}, $entry;
	}
}
# A small generator of our own, so that the choice depends on no Perl: Lehmer's, modulo 2^31 - 1.
my $state = 20100;
sub below { $state = $state * 48271 % 2147483647; return $state % $_[0]; }
sub entry { my $i = below(scalar @entries); return splice @entries, $i, 1; } # each entry is used once

my %files = map { open my $f, ">", "$out/$_.jsonl.tmp" or die "$out/$_.jsonl.tmp: $!\n"; $_ => $f } qw(definitions words text);
for (my $n = 0; $n < 400;) {
	my $entry = entry();
	my $near = $topic{$entry->{topic}}; # wrong definitions are of the same topic: harder to tell
	next if $senses{$entry->{word}} > 1 || @$near < 20;
	my @options;
	while (@options < 3) {
		my $other = $near->[below(scalar @$near)];
		push @options, $other->{definition} unless grep { $_ eq $other->{definition} } $entry->{definition}, @options;
	}
	my $answer = below(4);
	splice @options, $answer, 0, $entry->{definition};
	my $list = join ", ", map { "\"$_\"" } @options; # nothing in the texts needs more
	print {$files{definitions}} qq({"word": "$entry->{word}", "part": "$entry->{part}", "definitions": [$list], "answer": $answer}\n);
	$n++;
}
for (my $n = 0; $n < 200;) {
	my $entry = entry();
	next if $senses{$entry->{word}} > 1;
	print {$files{words}} qq({"word": "$entry->{word}", "part": "$entry->{part}", "definition": "$entry->{definition}"}\n);
	$n++;
}
for (1 .. 100) {
	my @page = map { entry() } 1 .. 10;
	print {$files{text}} qq({"text": "), (map { "$_->{word} ($_->{part}): $_->{definition}.\\n" } @page), qq("}\n);
}
for (keys %files) {
	close $files{$_} or die "$out/$_.jsonl.tmp: $!\n";
	rename "$out/$_.jsonl.tmp", "$out/$_.jsonl" or die "$out/$_.jsonl: $!\n";
}
PERL
wc -l "$out"/*.jsonl
