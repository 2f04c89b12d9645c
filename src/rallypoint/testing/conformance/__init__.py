"""Conformance: whether an implementation keeps every promise that the rest of the project relies on. Needs no pytest.

`backend` checks a backend against the contract in `rallypoint.backends.contract`, `store` the round's store on it, and
`handler` the blocking handler. `kit` is what the checks share.
"""
