# For the test scripts, which source it: `check NAME` runs the function test_NAME, which tells its problems, and prints cmocka's lines; the
# script ends with `exit $failures`.
problems=""
problem() { problems+="  $*"$'\n'; }

failures=0
check() {
	problems=""
	echo "[ RUN      ] $1"
	"test_$1"
	if [ -z "$problems" ]; then
		echo "[       OK ] $1"
	else
		printf '%s' "$problems"
		echo "[  FAILED  ] $1"
		failures=1
	fi
}

# expect STATUS TEXT COMMAND...: the exit status, and, if TEXT is not empty, one error line, which begins with "ling" and holds TEXT.
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

# The value of a key on each line of a JSON lines file.
metric() { sed -n "s/.*\"$1\": *\([^,}]*\).*/\1/p" "$2"; }

# Metrics less what a clock decides.
steady() { sed 's/"seconds": *[^,]*, *"tokens_per_second": *[^,]*, *//' "$1"; }
