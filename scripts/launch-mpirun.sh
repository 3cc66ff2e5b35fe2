#!/bin/bash
# Trains on the ranks of one machine, or of several that ssh reaches, by Open MPI's mpirun, which `ling supervise` starts again, from the newest
# checkpoint, when a rank dies or hangs:
#
#   RANKS=2 scripts/launch-mpirun.sh CONFIG.yaml [key.path=value ...]
#
# RANKS           all ranks (2)
# RANKS_PER_NODE  those on a machine (all). One rank a socket, or one for each group of cores that share memory, is a good start.
# CORES           cores of a rank (this machine's cores over RANKS_PER_NODE). More ranks than cores are slow, but allowed, to try a layout.
# HOSTFILE        names of the machines, one a line; ling, the data and train.output_dir must have the same paths on all: a shared file system
# NETWORK         interface or network for TCP, such as eth1 or 10.1.0.0/16; needed where machines have several and some lead nowhere
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,/^set/s/^# \?//p' "$0" >&2; exit 2; }
ling=$(cd "$(dirname "$0")/.." && pwd)/ling

ranks=${RANKS:-2}
per_node=${RANKS_PER_NODE:-$ranks}
here=$(lscpu -p=core,socket | grep -v '^#' | sort -u | wc -l) # cores, not hyper-threads, which share their arithmetic units
cores=${CORES:-$((here / per_node))}

if [ "$cores" -ge 1 ]; then
	# Without PE= and --bind-to, mpirun binds each of two ranks to one core, and all their threads with it.
	place=(--map-by "ppr:$per_node:node:PE=$cores" --bind-to core)
else
	cores=1
	place=(--map-by "ppr:$per_node:node" --oversubscribe --bind-to none)
fi
export OMP_NUM_THREADS=$cores

options=()
[ -z "${HOSTFILE:-}" ] || options+=(--hostfile "$HOSTFILE")
[ -z "${NETWORK:-}" ] || options+=(--mca btl_tcp_if_include "$NETWORK" --mca oob_tcp_if_include "$NETWORK")
[ "$(id -u)" != 0 ] || options+=(--allow-run-as-root) # in a container

# After Ctrl-C or SIGTERM mpirun alone would kill the ranks within a second; ling supervise lets them finish the step, save and end. A second one
# kills. Exit status: 0 done, 3 stopped and saved (the same command continues), 1 and 4 given up, 2 wrong use.
exec "$ling" supervise -- mpirun -n "$ranks" "${place[@]}" -x OMP_NUM_THREADS "${options[@]}" "$ling" train "$@"
