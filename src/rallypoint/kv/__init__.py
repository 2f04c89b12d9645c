"""What a store is: revisioned keys, transactions, leases, watches. Pure: time is an argument, nothing here does I/O.

`types` has the words, `engine` the state machine, `leases`, `watches` and `dedupe` its parts, `snapshot` its bytes.
"""
