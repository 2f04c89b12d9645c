"""Finding the etcd program to run, and checking its version."""

from __future__ import annotations

import re
import shutil
import subprocess

from rallypoint.errors import RallypointError

OLDEST = (3, 4)
CORRUPTING = ((3, 5, 0), (3, 5, 5))
"""The first and the last of the versions that may lose or corrupt data when a member is killed."""
VERSION_TIMEOUT_S = 20.0


class EtcdError(RallypointError):
    """An etcd cannot be run as requested; the text says why and what to do."""


def find_etcd(given: str | None) -> str:
    """The path of the given program, or of `etcd` in PATH. EtcdError if there is none."""
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
    """The version of a program. EtcdError if it must not be run."""
    try:
        output = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise EtcdError(f"{binary} --version does not work: {error}") from error
    found = re.search(r"etcd Version: (\S+)", output)
    if found is None:
        raise EtcdError(f"{binary} is no etcd: its --version prints {output.strip()[:100]!r}")
    version = found[1]
    why = refused(version)
    if why is not None and not (any_version and why.startswith("etcd 3.5")):
        raise EtcdError(f"{binary}: {why}")
    return version


def refused(version: str) -> str | None:
    """Why an etcd of this version is not run; None if it is."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
    if numbers[:2] < OLDEST:
        return f"etcd {version} is too old: 3.4 or newer is needed"
    first, last = CORRUPTING
    if first <= numbers <= last:
        return (
            f"etcd {version} can corrupt its data when it is killed (3.5.0 to 3.5.5 all can): use 3.5.6 or newer, or "
            f"3.4. To run it anyway, give --any-version"
        )
    return None
