#!/bin/bash
# Trains under Slurm. From the directory of ling, on a file system that all nodes share:
#
#   sbatch --nodes=16 scripts/launch-slurm.sh CONFIG.yaml [key.path=value ...]
#
# What stands below can be set on sbatch's command line too. When the time of the job is over before the run is, the run is saved, and the job
# goes back into the queue by itself; so it does after an end of the node that Slurm requeues jobs for. Submitted again, the run continues too.
#SBATCH --job-name=ling
#SBATCH --output=ling-%j.log
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2       # ranks: one a socket
#SBATCH --cpus-per-task=16        # the cores of a socket
#SBATCH --hint=nomultithread      # cores, not hyper-threads, which share their arithmetic units
#SBATCH --mem=0                   # all memory of the nodes
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@600         # ten minutes before the end all ranks save and stop
#SBATCH --requeue
#SBATCH --open-mode=append        # to the log of the time before
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: sbatch scripts/launch-slurm.sh CONFIG.yaml [key.path=value ...]" >&2; exit 2; }

export OMP_NUM_THREADS=$SLURM_CPUS_PER_TASK
# export OMPI_MCA_btl_tcp_if_include=ib0   # where nodes have several networks and some lead nowhere

# pmix is how Open MPI's ranks find each other (srun --mpi=list shows what there is). srun asks for the cores itself: newer ones do not
# inherit them from the job.
status=0
./ling supervise -- srun --mpi=pmix --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --cpu-bind=cores ./ling train "$@" || status=$?

# 3: stopped by a signal, and saved. Not after 1 or 4 (ling supervise has given up) and 2 (wrong use), which the next time would not change.
[ $status != 3 ] || scontrol requeue "$SLURM_JOB_ID"
exit $status
