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
