#!/bin/sh
# Installs what ling needs on Debian: compiler, libraries, and Open MPI, which asks for ssh even on one machine. With --tests also what the tests
# need: cmocka, jq as another reader of JSON, groff for the manual page, and clang with its OpenMP header and its libraries for sanitizers and fuzzing.
# Does nothing when all of it is there. (bash, perl, awk, gzip and cmp, which scripts use too, are part of every Debian system.)
set -eu
packages="gcc make libc6-dev libopenblas-dev libyaml-dev libjansson-dev libpcre2-dev libutf8proc-dev libpng-dev zlib1g-dev libzstd-dev libedit-dev libnlopt-dev libopenmpi-dev openmpi-bin
	openssh-client pkg-config"
case "$*" in
"") ;;
--tests) packages="$packages libcmocka-dev jq groff-base clang libomp-dev libclang-rt-dev" ;;
*)
	echo "usage: scripts/install-deps.sh [--tests]" >&2
	exit 2
	;;
esac

missing=""
for p in $packages; do
	dpkg-query -W -f '${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || missing="$missing $p"
done
[ -z "$missing" ] && exit 0

echo "installing:$missing"
if [ "$(id -u)" = 0 ]; then
	sudo=""
elif command -v sudo >/dev/null; then
	sudo="sudo"
else
	echo "not root, and no sudo here; ask an administrator to run: apt-get install$missing" >&2
	exit 1
fi
export DEBIAN_FRONTEND=noninteractive
install="$sudo apt-get install -y -q --no-install-recommends"
# shellcheck disable=SC2086 # words are meant to split
$install $missing >/dev/null 2>&1 || { $sudo apt-get update -q && $install $missing; }
