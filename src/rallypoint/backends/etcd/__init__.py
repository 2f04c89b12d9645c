"""Backend `etcd`: a real etcd v3 cluster, over gRPC. Needs the extra `rallypoint[etcd]`; importing this package does
not.

`backend.py` is the contract; `cluster.py` gets a request to some endpoint and knows what an error means (`faults.py`);
`keeper.py` and `watcher.py` are the two streams that all sessions and watches of a process share; `words.py` says the
contract's words in etcd's; `rpc.proto` is the part of the protocol that is used.
"""
