"""MPI launchers: Open MPI (mpirun, prterun), Hydra (MPICH, Intel MPI, MVAPICH), and others with PMI or PMIx. Pure.

They number processes, not nodes. The two are the same only with one process a node; anything else is an error here.
None of them says where rank 0 runs. Sometimes the machine of mpirun itself is known.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from rallypoint.integrations.schedulers import slurm
from rallypoint.integrations.schedulers.detected import Detected, Environ, check_rank, number, text_of, wrong_start

OPEN_MPI, MVAPICH, HYDRA, PMI, PMIX = "open mpi", "mvapich", "hydra", "pmi", "pmix"

_PRRTE_NAMESPACE = re.compile(r"prterun-(.+)-\d+@\d+")
_ORTE_ADDRESSES = re.compile(r"tcp://([^:/\[\]]+):\d+|tcp6://\[([^\]]+)\]:\d+")
NO_ENDPOINT = "the endpoint is unknown: give --rdzv-endpoint"


@dataclass(frozen=True, slots=True)
class _Family:
    """The variables that a launcher sets, and the command that starts one process a node."""

    source: str
    rank: str
    size: str
    local_rank: str
    local_size: str
    once: str


_FAMILIES = (
    _Family(
        OPEN_MPI,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "mpirun --map-by ppr:1:node",
    ),
    _Family(
        MVAPICH,
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        "mpiexec -ppn 1",
    ),
    _Family(HYDRA, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "mpiexec -ppn 1"),
)


def detect_mpirun(environ: Environ) -> Detected | None:
    """What mpirun or mpiexec says; None if it did not start this process (srun may have, with PMI).

    SettingsError if it started several processes on this node.
    """
    family = next((one for one in _FAMILIES if _is_there(environ, one)), None)
    if family is None:
        return None
    rank, size = number(environ, family.rank), number(environ, family.size)
    check_rank(rank, size, family.rank, family.size)
    local_size = number(environ, family.local_size)
    local_rank = number(environ, family.local_rank) or 0
    if (local_size or 1) > 1 or local_rank > 0:
        raise wrong_start(
            family.local_size if local_size is not None else family.local_rank,
            str(local_size if local_size is not None else local_rank),
            f"{family.source} started this launcher several times on one node, and {slurm.ONCE}",
            f"start it with {family.once} rallypoint run --nproc-per-node=8 ...",
        )
    endpoint, endpoint_why = _endpoint(environ, family, size)
    why = f"{family.rank}={rank}, {family.size}={size}, one process a node; {endpoint_why}"
    return Detected(family.source, endpoint, size, rank, _run_id(environ, family), why)


def detect_pmi(environ: Environ) -> Detected | None:
    """A process manager that gives only the number of this process, from which nothing follows about nodes."""
    for source, rank, size in ((PMI, "PMI_RANK", "PMI_SIZE"), (PMIX, "PMIX_RANK", "PMIX_SIZE")):
        process = number(environ, rank)
        if process is not None:
            count = number(environ, size)
            one = count == 1
            why = f"{rank}={process}, {size}={count}, and the number of processes a node is unknown; {NO_ENDPOINT}"
            return Detected(source, "localhost" if one else None, 1 if one else None, 0 if one else None, None, why)
    return None


def _is_there(environ: Environ, family: _Family) -> bool:
    """Whether this launcher started the process. Only Hydra sets the local rank: srun with PMI sets PMI_RANK, too."""
    return all(text_of(environ, name) is not None for name in (family.rank, family.size, family.local_rank))


def _endpoint(environ: Environ, family: _Family, size: int | None) -> tuple[str | None, str]:
    """The endpoint, or None, and a phrase about its source for `why`."""
    if size == 1:
        return "localhost", "there is one node"
    job, node_list = slurm.job_id(environ), text_of(environ, "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if job is not None and node_list is not None:
        # Not the step's list: that one is of the daemons, and the machine of mpirun has no daemon.
        return slurm.endpoint(node_list, job), f"the first of SLURM_JOB_NODELIST={node_list}"
    if family.source != OPEN_MPI:
        return None, NO_ENDPOINT
    if text_of(environ, "KUBERNETES_SERVICE_HOST") is not None:
        return None, f"mpirun usually runs in a separate pod, and {NO_ENDPOINT}"
    if (match := _PRRTE_NAMESPACE.fullmatch(environ.get("PMIX_NAMESPACE", ""))) is not None:
        return match[1], "the machine of mpirun, from PMIX_NAMESPACE: if it runs no node, give --rdzv-endpoint"
    address = _only_address(environ.get("OMPI_MCA_orte_hnp_uri", ""))
    if address is not None:
        return address, "the machine of mpirun, from OMPI_MCA_orte_hnp_uri: if it runs no node, give --rdzv-endpoint"
    return None, NO_ENDPOINT


def _only_address(uri: str) -> str | None:
    """The address of mpirun's machine if there is exactly one.

    Of several, one may exist on every machine (such as a container bridge), and there is no way to tell.
    """
    addresses = [text for match in _ORTE_ADDRESSES.finditer(uri) for text in (match[1] or match[2]).split(",")]
    found = []
    for text in addresses:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:
            return None
        if not address.is_loopback and not address.is_link_local:
            found.append(address)
    if len(found) != 1:
        return None
    return f"[{found[0]}]" if found[0].version == 6 else str(found[0])


def _run_id(environ: Environ, family: _Family) -> str | None:
    """A run id that is unique to this call of mpirun and the same on all nodes; None if there is no such value."""
    job = slurm.job_id(environ)
    launch = text_of(environ, "PMIX_NAMESPACE") if family.source == OPEN_MPI else text_of(environ, "I_MPI_HYDRA_UUID")
    if job is None:
        return None if launch is None else f"mpi-{launch}"
    if launch is not None:
        return f"{slurm.run_id(environ, job, None)}-{launch}"
    # Hydra starts its proxies, one on each node, with a single srun.
    step = number(environ, "SLURM_STEP_ID", "SLURM_STEPID")
    return None if step is None else slurm.run_id(environ, job, step)
