"""The shipped testing kit: what this project tests itself with, for whoever builds on it. Nothing imports it.

- `clock.ManualClock`: a monotonic clock that moves when it is told to.
- `loop.run`: like `asyncio.run`, on virtual time: hours pass in milliseconds, and a deadlock is an error at once.
- `chaos.ChaosBackend`: wraps any backend and does to its callers everything that the contract allows.
- `exhaustive`: every order of events in tiny worlds, with the real code; a broken guarantee comes with its trace.
- `conformance`: whether a backend keeps every promise of the contract, in five lines.
"""
