#!/bin/bash
# Runs test programs: cmocka programs, and scripts that print cmocka's "[       OK ] name" and "[  FAILED  ] name" lines. Shows what
# failed, and ends with the line "N passed, N failed"; exit status 1 when something failed or a program did not finish.
set -u
export OMP_WAIT_POLICY=passive # the machine may be shared
# Tests may run as root, and in a container, where ranks may not read each other's memory.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl_vader_single_copy_mechanism=none
passed=0
failed=0
log=build/test.log
: >"$log"
for program in "$@"; do
	start=$SECONDS
	out=build/$(basename "$program").log
	"$program" >"$out" 2>&1
	status=$?
	cat "$out" >>"$log"
	ok=$(grep -c '^\[       OK \]' "$out")
	# cmocka names a failed test twice: at its place and in the list at the end.
	bad=$(grep '^\[  FAILED  \]' "$out" | grep -v 'test(s)' | sed 's/\[  FAILED  \] //; s/: .*//' | sort -u | wc -l)
	if [ "$bad" -gt 0 ] || [ $status -ne 0 ] || [ "$ok" -eq 0 ]; then
		[ "$bad" -eq 0 ] && bad=1 # it crashed, or ran nothing
		echo "---- $program: exit status $status"
		grep -v -E '^\[ RUN      \]|^\[       OK \]' "$out" | head -100
	fi
	passed=$((passed + ok))
	failed=$((failed + bad))
	echo "$program: $ok passed, $bad failed, $((SECONDS - start)) s"
done
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
