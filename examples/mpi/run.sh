#!/bin/bash
# Starts one launcher on each of two machines with MPI: examples/mpi/run.sh openmpi|hydra
# docs/mpi.md lists the variables that each MPI launcher sets.
set -eu

hosts=node1,node2

case "${1:-openmpi}" in
openmpi)
    # The endpoint is detected: the machine of mpirun, which therefore must be one of the two hosts.
    exec mpirun --host "$hosts" --map-by ppr:1:node \
        rallypoint run --nproc-per-node=8 --max-restarts=3 train.py --epochs 10
    ;;
hydra)
    # MPICH, Intel MPI and MVAPICH do not provide an endpoint: use the first host.
    exec mpiexec -hosts "$hosts" -ppn 1 \
        rallypoint run --rdzv-endpoint="${hosts%%,*}" --rdzv-id="train-$$" --nproc-per-node=8 --max-restarts=3 train.py --epochs 10
    ;;
*)
    echo "usage: $0 openmpi|hydra" >&2
    exit 2
    ;;
esac
