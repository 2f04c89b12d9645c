"""Conformance suites: they check every promise that the rest of the project relies on. Need no pytest.

`backend` checks a backend against the contract in `rallypoint.backends.contract`, `store` the round's store on it, and
`handler` the blocking handler, `cell` a compare-and-set cell. `kit` is shared by the checks.
"""
