"""Where a node runs, and what follows from it: the endpoint, the number of nodes, this node's rank and the run id.

Slurm, Kubernetes and MPI launchers tell it to every process they start, in the environment. Nothing here is guessed:
what is not said is None, and `why` says what is missing. Pure: the environment and the names of the machine are
arguments; `rallypoint.integrations.here` passes those of this process.

When several match, the launcher that started this process counts, and those around it only say where to meet:

1. mpirun or mpiexec, wherever it runs: inside of a Slurm job it starts one daemon a node, some of them by srun, and the
   numbers of those are not the numbers of the processes;
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
    """What the environment says about this node; None: nobody started it that tells anything.

    `hostname` and `fqdn` matter to Kubernetes only: without `fqdn` the endpoint is not known there, except in a JobSet.

    SettingsError if the process was started where a launcher does not belong (several times on one node, or on one node
    of several), or if a variable cannot be what its name says. Ask only for what the user has not said.
    """
    return (
        detect_mpirun(environ)
        or detect_slurm(environ)
        or detect_kubernetes(environ, hostname, fqdn)
        or detect_pmi(environ)
    )
