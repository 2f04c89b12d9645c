"""The shipped testing kit, for this project and for projects that build on it. No other package imports it.

- `clock.ManualClock`: a monotonic clock that the test advances.
- `loop.run`: `asyncio.run` on virtual time: hours pass in milliseconds, and a deadlock is an error at once.
- `chaos.ChaosBackend`: wraps any backend and injects every fault that the contract allows.
- `exhaustive`: explores every order of events in tiny worlds with the real code; a broken guarantee comes with a trace.
- `conformance`: checks a backend against the whole contract, in five lines.
"""
