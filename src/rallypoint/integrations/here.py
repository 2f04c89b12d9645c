"""`hosts.detect` for this very process: its environment, and the names of its machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from rallypoint.integrations.hosts import Detected, detect


def detect_here(environ: Mapping[str, str] = os.environ) -> Detected | None:
    """What the environment of this process says about it. Raises what `hosts.detect` raises.

    The full name of the machine is asked for only inside of a pod, where the file of hosts has it.
    """
    fqdn = socket.getfqdn() if "KUBERNETES_SERVICE_HOST" in environ else None
    return detect(environ, hostname=socket.gethostname(), fqdn=fqdn)
