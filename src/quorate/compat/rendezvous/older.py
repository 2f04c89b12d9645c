"""Names of the package before torch took it in. They mean what their successors mean."""

from quorate.compat.rendezvous.api import RendezvousHandlerRegistry
from quorate.errors import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

RendezvousException = RendezvousError
RendezvousClosedException = RendezvousClosedError
RendezvousTimeoutException = RendezvousTimeoutError
RendezvousNonRetryableError = RendezvousError
RendezvousHandlerFactory = RendezvousHandlerRegistry
