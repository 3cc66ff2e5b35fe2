#!/bin/bash
# Runs test programs, several at a time: cmocka programs, and scripts that print cmocka's "[       OK ] name" and "[  FAILED  ] name" lines.
#
#   tests/run.sh PROGRAM[:CORES]...
#
# A program takes one core, or CORES when it has several threads or ranks that compute; together they take no more than the machine has, and a
# program that wants more than that runs alone. Results are shown in the order of the arguments, as soon as they are there: what failed, and one
# line for each program. The last line is "N passed, N failed". The exit status is 1 when a test failed, or a program failed, printed no test,
# or was ended because it ran for 10 minutes.
set -u
export OMP_WAIT_POLICY=passive # the machine may be shared
export OMP_NUM_THREADS=2 # so that results do not depend on the machine; scripts set their own
cores=$(env -u OMP_NUM_THREADS nproc) # which would obey it
most_seconds=600
log=build/test.log
: >"$log"

programs=()
wanted=() # cores of a program
for argument in "$@"; do
	programs+=("${argument%:*}")
	[[ $argument == *:* ]] && n=${argument##*:} || n=1
	wanted+=($((n < cores ? n : cores)))
done

passed=0
failed=0
output() { echo "build/$(basename "${programs[$1]}").log"; }

# report I: program I has ended.
report() {
	local out ok bad
	out=$(output "$1")
	cat "$out" >>"$log"
	ok=$(grep -c '^\[       OK \]' "$out")
	# cmocka names a failed test twice: at its place and in the list at the end.
	bad=$(grep '^\[  FAILED  \]' "$out" | grep -v 'test(s)' | sed 's/\[  FAILED  \] //; s/: .*//' | sort -u | wc -l)
	if [ "$bad" -gt 0 ] || [ "${status[$1]}" -ne 0 ] || [ "$ok" -eq 0 ]; then
		[ "$bad" -eq 0 ] && bad=1 # it crashed, or ran nothing
		echo "---- ${programs[$1]}: exit status ${status[$1]}"
		grep -v -E '^\[ RUN      \]|^\[       OK \]' "$out" | head -100
	fi
	passed=$((passed + ok))
	failed=$((failed + bad))
	echo "${programs[$1]}: $ok passed, $bad failed, ${seconds[$1]} s"
}

declare -A running=() # from process id to the number of a program
status=()  # the exit status of each program that has ended
started=() # when each began, and how long it took
seconds=()
taken=0    # cores in use
shown=0    # programs reported

# Waits until a program ends, and reports all that can be reported in order.
wait_for_one() {
	local pid i code
	wait -n -p pid
	code=$?
	i=${running[$pid]}
	status[i]=$code
	unset "running[$pid]"
	seconds[i]=$((SECONDS - started[i]))
	taken=$((taken - wanted[i]))
	while [ -n "${status[shown]-}" ]; do
		report $shown
		shown=$((shown + 1))
	done
}

trap 'kill "${!running[@]}" 2>/dev/null; exit 1' INT TERM
for ((next = 0; next < ${#programs[@]}; next++)); do
	while [ $((taken + wanted[next])) -gt "$cores" ]; do
		wait_for_one
	done
	started[next]=$SECONDS
	timeout -k 10 $most_seconds "${programs[next]}" >"$(output $next)" 2>&1 &
	running[$!]=$next
	taken=$((taken + wanted[next]))
done
while [ $shown -lt ${#programs[@]} ]; do
	wait_for_one
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
