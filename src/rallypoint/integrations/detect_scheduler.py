"""Detects the scheduler that started this process, from its environment and the names of its machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

from rallypoint.integrations.schedulers import Detected, detect


def detect_scheduler(environ: Mapping[str, str] = os.environ) -> Detected | None:
    """What the environment of this process says about its node. Raises what `schedulers.detect` raises.

    The full name of the machine is looked up only inside of a pod, where /etc/hosts contains it.
    """
    fqdn = socket.getfqdn() if "KUBERNETES_SERVICE_HOST" in environ else None
    return detect(environ, hostname=socket.gethostname(), fqdn=fqdn)
