#!/bin/bash
# One launcher on each of two machines, started by MPI: examples/mpi/run.sh openmpi|hydra
# docs/mpi.md says what each launcher tells its processes, and what it does not.
set -eu

hosts=node1,node2

case "${1:-openmpi}" in
openmpi)
    # Where to meet is known from mpirun: on this machine, which therefore has to be one of the two.
    exec mpirun --host "$hosts" --map-by ppr:1:node \
        rallypoint run --nproc-per-node=8 --max-restarts=3 train.py --epochs 10
    ;;
hydra)
    # MPICH, Intel MPI and MVAPICH do not tell where to meet: the first host is as good as any.
    exec mpiexec -hosts "$hosts" -ppn 1 \
        rallypoint run --rdzv-endpoint="${hosts%%,*}" --rdzv-id="train-$$" --nproc-per-node=8 --max-restarts=3 train.py --epochs 10
    ;;
*)
    echo "usage: $0 openmpi|hydra" >&2
    exit 2
    ;;
esac
