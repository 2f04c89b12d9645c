"""The key-value stores for user code: one implementation of the calls, an async API and a blocking one."""

from rallypoint.store.async_store import AsyncStore as AsyncStore
from rallypoint.store.blocking import Store as Store
