"""Detects the scheduler or MPI launcher that started a node, from the environment of its process. Pure.

It finds the endpoint, the number of nodes, this node's rank and the run id. Nothing is guessed: a value that the
environment does not contain is None, and `why` says what is missing. The environment and the names of the machine are
arguments; `rallypoint.integrations.detect_scheduler` passes those of this process.

If several launchers match, the one that started this process counts. The ones around it only contribute the endpoint:

1. mpirun or mpiexec, everywhere: inside of a Slurm job it starts one daemon on each node, some of them with srun, and
   the task numbers of those daemons are not the numbers of the processes;
2. Slurm, in a step of srun or in a batch script, even where srun speaks PMI, and even inside of a pod;
3. Kubernetes;
4. PMI or PMIx alone, which number processes and not nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.integrations.schedulers.detected import Detected
from rallypoint.integrations.schedulers.kubernetes import detect_kubernetes
from rallypoint.integrations.schedulers.mpi import detect_mpirun, detect_pmi
from rallypoint.integrations.schedulers.slurm import detect_slurm

__all__ = ["Detected", "detect"]


def detect(environ: Mapping[str, str], *, hostname: str | None = None, fqdn: str | None = None) -> Detected | None:
    """What the environment says about this node, or None if no known launcher started it.

    `hostname` and `fqdn` matter to Kubernetes only: without `fqdn` the endpoint is not known there, except in a JobSet.

    SettingsError if the launcher started this process several times on one node, or on only one node of several, or if
    a variable has an impossible value. Call this only for values that the user has not given.
    """
    return (
        detect_mpirun(environ)
        or detect_slurm(environ)
        or detect_kubernetes(environ, hostname, fqdn)
        or detect_pmi(environ)
    )
