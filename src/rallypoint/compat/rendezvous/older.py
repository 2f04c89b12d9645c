"""Names of the package before torch took it in. They mean what their successors mean."""

from rallypoint.compat.rendezvous.api import RendezvousHandlerRegistry
from rallypoint.errors import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

RendezvousException = RendezvousError
RendezvousClosedException = RendezvousClosedError
RendezvousTimeoutException = RendezvousTimeoutError
RendezvousNonRetryableError = RendezvousError
RendezvousHandlerFactory = RendezvousHandlerRegistry
