"""The store: revisioned keys, transactions, leases, watches. Pure: time is an argument, and nothing here does I/O.

`types` defines the values, `engine` the state machine, `leases`, `watches`, `dedupe` and `usage` its parts. `log` and
`snapshot_parts` are the formats of a server's files, `document` is a whole store as one value of bytes, `snapshot`
encodes a whole engine at once.
"""
