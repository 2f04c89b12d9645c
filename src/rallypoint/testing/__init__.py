"""The shipped testing kit, for this project and for projects that build on it. Only `rallypoint sim` imports it.

- `clock.ManualClock`: a monotonic clock that the test advances.
- `loop.run`: `asyncio.run` on virtual time: hours pass in milliseconds, and a deadlock is an error at once.
- `chaos.ChaosBackend`: wraps any backend and injects every fault that the contract allows.
- `exhaustive`: explores every order of events in tiny worlds with the real code; a broken guarantee comes with a trace.
- `cuttable`, `cells`, `disk`: backends, cells and disks whose faults a test controls.
- `checkers`: the guarantees, one class each.
- `sim`: large random worlds.
- `traces`: scenarios as text files.
- `conformance`: checks a backend, a cell, a store or a handler against its whole contract, in five lines.
"""
