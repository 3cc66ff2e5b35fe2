# What the test scripts share. A script sources this file first: it is then in a folder of its own, build/scratch/SCRIPT, which is new and empty.
# It defines a function test_NAME for each test, which reports what is wrong with `problem`; runs them with `check NAME...`; and ends with
# `finish`. The lines printed are those of cmocka, for tests/run.sh. TESTS="NAME..." runs these tests alone.
set -u
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
root=$PWD
ling=$root/build/sanitize/ling # a script may choose another build
export ASAN_OPTIONS=detect_leaks=1:allocator_may_return_null=1
export OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive # the machine may be shared
# Tests may run as root, and in a container, where ranks may not read each other's memory.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
export OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,vader # what ranks of one machine need: the others cost time to start

folder=$root/build/scratch/$(basename "$0" .sh)
rm -rf "$folder" && mkdir -p "$folder" && cd "$folder" || exit 1

# ---- running tests ----

failures=0
problems=""
checked=" "
problem() { problems+="  $*"$'\n'; }

# check NAME...: runs the functions test_NAME.
check() {
	local name
	for name in "$@"; do
		checked+="$name "
		[[ " ${TESTS:-$name} " == *" $name "* ]] || continue
		problems=""
		echo "[ RUN      ] $name"
		"test_$name"
		if [ -z "$problems" ]; then
			echo "[       OK ] $name"
		else
			printf '%s' "$problems"
			echo "[  FAILED  ] $name"
			failures=1
		fi
	done
}

# Ends the script. A test that no `check` names has been forgotten, which is a failure.
finish() {
	local name
	for name in $(compgen -A function test_); do
		if [[ $checked != *" ${name#test_} "* ]]; then
			echo "  $name is defined, but not run"
			echo "[  FAILED  ] ${name#test_}"
			failures=1
		fi
	done
	exit $failures
}

# ---- commands ----

# expect STATUS TEXT COMMAND...: runs a command, whose output goes to out.txt and err.txt. Its exit status must be STATUS. If TEXT is not
# empty, there must be one error line, which begins with "ling" and holds TEXT.
expect() {
	local want=$1 text=$2 status
	shift 2
	"$@" >out.txt 2>err.txt
	status=$?
	[ $status = "$want" ] || problem "exit status $status, expected $want: $* ($(head -c 400 err.txt))"
	if [ -n "$text" ]; then
		grep -qF -- "$text" err.txt || problem "no '$text' in: $(head -c 400 err.txt)"
		[ "$(grep -c '^ling' err.txt)" = 1 ] || problem "expected one error line, found: $(head -c 400 err.txt)"
	fi
	! grep -q 'Sanitizer\|runtime error' err.txt || problem "$(head -c 2000 err.txt)"
}

# ranks N COMMAND...: runs a command on N ranks, which may be more than there are cores; ends it after a minute.
ranks() {
	local n=$1
	shift
	timeout -k 5 60 mpirun -n "$n" --oversubscribe --bind-to none "$@"
}

# wait_for_lines FILE N: waits until a run has written N lines, at the most half a minute.
wait_for_lines() {
	local tries=0
	while [ "$(lines "$1")" -lt "$2" ] && [ $tries -lt 3000 ]; do
		sleep 0.01
		tries=$((tries + 1))
	done
}

# look RUN FILTER: looks at who is in the way until the jq filter is true, half a minute at most.
look() {
	local tries=0
	while [ $tries -lt 200 ]; do
		expect 0 "" "$ling" trace "$1" --hang --json
		[ "$(jq "$2" out.txt)" = true ] && return
		tries=$((tries + 1))
		sleep 0.1
	done
	problem "not so: $2: $(cat out.txt)"
}

# ---- files to begin with ----

# tiny SECTION.KEY=VALUE...: writes tiny.yaml: tests/tiny.yaml with other values and further keys.
tiny() {
	perl -e 'my $yaml = do { local (@ARGV, $/) = shift; <> };
		for (@ARGV) {
			my ($section, $key, $value) = /^(\w+)\.(\w+)=(.*)/s or die "tiny: $_";
			$yaml =~ s/^$section:\n(?:  .*\n)*?\K  $key:.*\n//m;
			$yaml =~ s/^$section:\n\K/  $key: $value\n/m or $yaml .= "$section:\n  $key: $value\n";
		}
		print $yaml' "$root/tests/tiny.yaml" "$@" >tiny.yaml || exit 1
}

# write_tokens PREFIX DTYPE PACK IDS...: a Megatron token file of one document; DTYPE is Megatron's code, PACK Perl's.
write_tokens() {
	local prefix=$1 dtype=$2 pack=$3
	shift 3
	perl -e 'print pack(shift(@ARGV) . "*", @ARGV)' "$pack" "$@" >"$prefix.bin"
	perl -e 'print "MMIDIDX\0\0", pack("Q<CQ<Q<l<q<q<q<", 1, $ARGV[0], 1, 2, $ARGV[1], 0, 0, 1)' "$dtype" $# >"$prefix.idx"
}

# not_utf8 NAME: makes the folder NAME with a byte behind it that is not UTF-8 (Latin-1's e with an acute accent), and prints its path.
not_utf8() {
	mkdir -p "$1"$'\351'
	printf '%s\351' "$1"
}

# ---- what is in a file ----

lines() { if [ -f "$1" ]; then wc -l <"$1"; else echo 0; fi; }

# The value of a key on each line of a JSON lines file.
metric() { sed -n "s/.*\"$1\": *\([^,}]*\).*/\1/p" "$2"; }

# Metrics less what a clock decides.
steady() { sed 's/"seconds": *[^,]*, *"tokens_per_second": *[^,]*, *//; s/"save_seconds": *[^,]*, *//' "$1"; }

# has FILE TEXT...: the file holds each text.
has() {
	local file=$1 text
	shift
	for text in "$@"; do
		grep -qF -- "$text" "$file" || problem "no '$text' in $file: $(head -c 1500 "$file")"
	done
}

same() { cmp -s "$1" "$2" || problem "$1 and $2 differ"; }

# json FILE: one JSON value or several, as another reader sees them: UTF-8, and no NaN, which jq takes for a number.
json() {
	iconv -f UTF-8 -t UTF-8 "$1" >/dev/null 2>json.txt && jq -es 'length > 0 and ([.. | numbers | isnan] | any | not)' "$1" >/dev/null 2>json.txt ||
		problem "$1 is not JSON: $(cat json.txt): $(head -c 400 "$1")"
}
