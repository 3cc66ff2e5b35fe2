#!/bin/bash
# The order of the sources: which file may include which, which library has one door, how long files and lines may be.
. "$(dirname "$0")/check.sh"
cd "$root" || exit 1

mapfile -t sources < <(printf '%s\n' *.c files/*.c model/*.c training/*.c commands/*.c)
mapfile -t headers < <(printf '%s\n' *.h files/*.h model/*.h training/*.h commands/*.h)
# What commands may use of other commands; main.c may use all, as it has the table of commands.
shared_by_commands="kv_pool prefix_tree engine replicas sampling generator line_reader result_lines samples scoring tasks self_check command options result match plot_canvas hang runs follow watched align_dumps align_runs scaling_runs scaling fit_picture child grid random_steps"

# The files of the guide in ling.h, the lowest first: the list behind "A file may use those above it".
mapfile -t order < <(awk '/A file may use those above it/ { list = 1; next }
	list && /^ \*   / { sub("/$", "", $2); print $2; found = 1 }
	found && !/^ \*   / { exit }' ling.h)

# place FILE: the position of a file in that list. A file that is a part of another, as files/tokenizer_pattern is of files/tokenizer, has its.
place() {
	local file=${1%.[ch]} i
	[[ $file == commands/* ]] && file=commands
	while :; do
		for i in "${!order[@]}"; do
			[ "${order[i]}" = "$file" ] && echo "$i" && return
		done
		[[ $file == *_* ]] || return 1
		file=${file%_*}
	done
}

# included FILE: the project's headers that a file includes, directly or through others.
included() {
	# shellcheck disable=SC2046 # words are meant to split
	${CC:-gcc} -std=c11 -I. $(pkg-config --cflags ompi-c) -MM "$1" | tr -d '\\' | tr ' ' '\n' | grep '\.[ch]$' | grep -vx "$1"
}

test_guide() {
	local file
	[ ${#order[@]} -ge 10 ] || problem "ling.h's guide has ${#order[@]} files: ${order[*]}"
	for file in "${sources[@]}" "${headers[@]}"; do
		place "$file" >/dev/null || problem "$file is not in ling.h's guide"
	done
	for file in "${order[@]}"; do
		[ "$file" = commands ] || [ -e "$file.h" ] || problem "ling.h's guide names $file, which is not there"
	done
}

test_arrows() {
	local file other mine theirs name
	for file in "${sources[@]}" "${headers[@]}"; do
		mine=$(place "$file") || continue
		for other in $(included "$file"); do
			[[ $other == *.h ]] || problem "$file includes $other"
			theirs=$(place "$other") || continue
			[ "$theirs" -le "$mine" ] || problem "$file includes $other, which is above it in ling.h's guide"
		done
		[[ $file == commands/* && $file != commands/main.c ]] || continue
		for name in $(sed -n 's|^#include "commands/\([a-z_]*\)\.h"|\1|p' "$file"); do
			[ "commands/$name" = "${file%.[ch]}" ] || [[ " $shared_by_commands " == *" $name "* ]] ||
				problem "$file includes another command, $name.h"
		done
	done
	other=$(grep -n '#include "[^"]*\.c"' "${sources[@]}" "${headers[@]}" tests/*.[ch])
	[ -z "$other" ] || problem "a .c file is included: $other"
}

test_headers() {
	local file
	for file in "${sources[@]}"; do
		[ $file = commands/main.c ] && continue # which has main() alone
		[ -e "${file%.c}.h" ] || problem "$file has no header"
		grep -q "^#include \"${file%.c}.h\"" "$file" || problem "$file does not include its header"
	done
	for file in "${headers[@]}"; do
		[ -e "${file%.h}.c" ] || [[ $file == *_internal.h ]] || problem "$file has no source"
		# shellcheck disable=SC2046
		${CC:-gcc} -std=c11 -D_GNU_SOURCE -I. $(pkg-config --cflags ompi-c) -fsyntax-only -x c "$file" 2>"$folder/errors.txt" ||
			problem "$file needs another before it: $(head -n 3 "$folder/errors.txt")"
	done
}

test_doors() {
	local library found most
	for library in cblas mpi yaml png pcre2 argp histedit nlopt; do
		found=$(grep -lE "^#include <$library\.h>" "${sources[@]}" "${headers[@]}" | tr '\n' ' ')
		most=1
		[ $library = pcre2 ] && most=2 # the words of a text, and the replies of a model
		[ "$(wc -w <<<"$found")" -le $most ] || problem "$library.h is included by $found"
	done
}

test_sizes() {
	local file long
	for file in "${sources[@]}" "${headers[@]}" tests/*.[ch]; do
		[ "$(wc -l <"$file")" -le 2500 ] || problem "$file has $(wc -l <"$file") lines; expected at most 2500"
	done
	long=$(long_lines)
	[ -z "$long" ] || problem "lines pass column 120: $long"
}

# Files that have lines that pass column 120, a tab going on to the next multiple of 4, and how many.
long_lines() {
	perl -CSD -ne '1 while s/\t/" " x (4 - $-[0] % 4)/e; chomp; $long{$ARGV}++ if length > 120;
		END { print map { " $_:$long{$_}" } sort keys %long }' "${sources[@]}" "${headers[@]}" tests/*.[ch]
}

check guide arrows headers doors sizes
finish
