"""The names of torchelastic, before it became a part of torch: aliases of their successors."""

from rallypoint.compat.rendezvous.api import RendezvousHandlerRegistry
from rallypoint.errors import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

RendezvousException = RendezvousError
RendezvousClosedException = RendezvousClosedError
RendezvousTimeoutException = RendezvousTimeoutError
RendezvousNonRetryableError = RendezvousError
RendezvousHandlerFactory = RendezvousHandlerRegistry
