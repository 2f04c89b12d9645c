"""Conformance: whether an implementation keeps every promise that the rest of the project relies on. Needs no pytest.

`backend` checks a backend against the contract in `quorate.backends.contract`. `kit` is what the checks share.
"""
