"""Which etcd to run: finding the program, and judging its version."""

from __future__ import annotations

import re
import shutil
import subprocess

from rallypoint.errors import RallypointError

OLDEST = (3, 4)
CORRUPTING = ((3, 5, 0), (3, 5, 5))
"""From, to: these may lose or corrupt data when a member is killed."""
ASK_S = 20.0


class EtcdError(RallypointError):
    """An etcd cannot be run as asked; the text says why and what to do."""


def find_etcd(given: str | None) -> str:
    """The path of the program that was given, or the one in PATH. EtcdError that says how to get one."""
    found = shutil.which(given or "etcd")
    if found is not None:
        return found
    if given is not None:
        raise EtcdError(f"--etcd-binary {given}: there is no such program, or it may not be executed")
    raise EtcdError(
        "no etcd was found in PATH. Install it (Debian, Ubuntu: apt-get install etcd-server), or download a release "
        "from https://github.com/etcd-io/etcd/releases and say where it is with --etcd-binary"
    )


def check_version(binary: str, *, any_version: bool) -> str:
    """The version of a program that may be run. EtcdError for one that should not."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=ASK_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EtcdError(f"{binary} --version does not work: {error}") from error
    found = re.search(r"etcd Version: (\S+)", said)
    if found is None:
        raise EtcdError(f"{binary} is no etcd: asked for its version it says {said.strip()[:100]!r}")
    version = found[1]
    why = refused(version)
    if why is not None and not (any_version and why.startswith("etcd 3.5")):
        raise EtcdError(f"{binary}: {why}")
    return version


def refused(version: str) -> str | None:
    """Why an etcd of this version is not run; None: it is."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers[:2] < OLDEST:
        return f"etcd {version} is too old: 3.4 or newer is needed"
    first, last = CORRUPTING
    if first <= numbers <= last:
        return (
            f"etcd {version} can corrupt its data when it is killed (3.5.0 to 3.5.5 all can): use 3.5.6 or newer, or "
            f"3.4. To run it all the same, say --any-version"
        )
    return None
