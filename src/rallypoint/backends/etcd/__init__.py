"""Backend `etcd`: a real etcd v3 cluster, over gRPC. Needs the extra `rallypoint[etcd]`; importing this package does
not.

`backend.py` implements the contract; `cluster.py` sends a request to a working endpoint and fails over; `faults.py`
classifies etcd's errors; `keepalive_stream.py` and `watch_stream.py` are the two streams that all sessions and watches
of a process share; `conversion.py` converts between the contract's types and etcd's messages; `rpc.proto` is the part
of the protocol that is used.
"""
