#!/bin/bash
# What `make install` puts beside the program: the manual page and the completion for bash. And the image that the Dockerfile makes.
. "$(dirname "$0")/check.sh"

# complete WORD...: prints what bash would offer for the last word of a command line.
complete_words() {
	ling=$ling bash -c 'source completion && COMP_WORDS=("$@") && COMP_CWORD=$(($# - 1)) && _ling && echo "${COMPREPLY[*]}"' bash "$@"
}

# offers "WORDS" WORD...
offers() {
	local want=$1 found
	shift
	found=$(complete_words "$@")
	[ "$found" = "$want" ] || problem "'$*' completes to '$found'; expected '$want'"
}

# The page names every command and option of the help, and roff has no complaint.
test_manual() {
	local command option n=0
	expect 0 "" "$ling" --man
	mv out.txt ling.1
	groff -man -ww -b -z -Tutf8 ling.1 >roff.txt 2>&1 || problem "groff: $(cat roff.txt)"
	[ ! -s roff.txt ] || problem "groff: $(head -n 5 roff.txt)"
	groff -man -rLL=400n -Tascii -P-cbou ling.1 >page.txt 2>/dev/null
	"$ling" --help | sed -n 's/^  ling \([a-z-]*\) .*/\1/p' | sort -u >commands.txt
	[ "$(lines commands.txt)" -ge 10 ] || problem "commands: $(cat commands.txt)"
	while read -r command; do
		grep -q "^ *ling $command\b" page.txt || problem "no ling $command in the page"
		for option in $("$ling" "$command" --help 2>/dev/null | grep -oE '^ *(-[?V], )?--[a-z-]+' | grep -oE -- '--[a-z-]+$' | grep -vE -- '--(help|usage|version)'); do
			grep -qE -- "^ *$option\b" page.txt || problem "no $option of ling $command in the page"
			n=$((n + 1))
		done
	done <commands.txt
	[ $n -ge 30 ] || problem "only $n options"
	grep -qF "byte, or a tokenizer.json (default: the model's own)" page.txt || problem "an option's help is not in the page"
	! grep -q '\\[a-z(&]' page.txt || problem "an escape is printed: $(grep -m 3 '\\[a-z(&]' page.txt)"
}

test_completion() {
	expect 0 "" "$ling" --completion
	mv out.txt completion
	[ "$(bash -c 'source ./completion && complete -p ling')" = "complete -o default -F _ling ling" ] || problem "complete -p"
	offers "train train-tokenizer trace" ling tr
	offers "--version" ling --v
	offers "--top-k --top-p" ling generate runs/quickstart --top
	offers "hf checkpoint gguf" ling convert-checkpoint a b --to ""
	offers "gguf" ling convert-checkpoint a b --to g
	offers "bf16" ling convert-checkpoint a b --dtype = b
	offers "f32 bf16 f16" ling convert-checkpoint a b --dtype =
	offers "" ling generate runs # then bash offers files
	offers "" ling nothing --j
}

test_files() {
	local stage=$folder/stage
	make -s -C "$root" install DESTDIR="$stage" PREFIX=/opt/ling || problem "make install"
	[ "$("$stage/opt/ling/bin/ling" --version)" = "$("$ling" --version)" ] || problem "ling --version"
	"$root/ling" --man | cmp -s - "$stage/opt/ling/share/man/man1/ling.1" || problem "the manual page"
	"$root/ling" --completion | cmp -s - "$stage/opt/ling/share/bash-completion/completions/ling" || problem "the completion"
	make -s -C "$root" uninstall DESTDIR="$stage" PREFIX=/opt/ling || problem "make uninstall"
	[ -z "$(find "$stage" -type f)" ] || problem "left: $(find "$stage" -type f)"
}

# The Dockerfile installs the package of every shared library that ling asks for, and the Kubernetes file names paths that the image has.
test_image() {
	cd "$root" || return
	local library package path n=0
	while read -r library path; do
		path=$(readlink -f "$path")
		package=$(dpkg -S "$path" "${path#/usr}" 2>/dev/null | head -n 1 | sed "s/:.*//")
		[ "$package" = libc6 ] || grep -qwF -- "$package" Dockerfile || problem "the Dockerfile lacks $package, which has $library"
		n=$((n + 1))
	done < <(ldd ling | grep -wF -f <(readelf -d ling | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p') | sed -n 's/^\s*\(\S*\) => \(\S*\) .*/\1 \2/p')
	[ $n -ge 8 ] || problem "only $n libraries"
	for path in /home/ling/.ssh /etc/ssh/sshd_ling; do
		grep -qF "$path" Dockerfile && grep -qF "$path" scripts/launch-kubernetes.yaml || problem "$path is not in both files"
	done
	grep -q 'PREFIX=/usr/local$' Dockerfile && grep -q ' /usr/local/bin/ling$' scripts/launch-kubernetes.yaml || problem "ling's place"
	grep -q 'useradd .*-u 1000 .*ling' Dockerfile && [ "$(grep -c 'runAsUser: 1000' scripts/launch-kubernetes.yaml)" = 2 ] || problem "ling's user"
}

check manual completion files image
finish
