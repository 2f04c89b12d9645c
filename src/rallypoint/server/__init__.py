"""The embedded server: the engine behind the TCP protocol, and the coordinators of its runs.

- `server`: all parts together, behind listening sockets. `process`: a server as a process of its own.
- `acceptor`, `connection`, `outbox`, `frame_splitting`: connections and their buffers.
- `admission/`: authentication of peers, limits, quotas.
- `clients`: clients with their sessions, and what the end of a connection means for them.
- `engine_host`: the engine on the clock of the event loop. `key_waits`, `observer_watches`: requests that wait for
  changes.
- `runs`, `local_backend`: the coordinators, and the backend that they use.
- `durability/`: a server that keeps its data on disk.
- `hosting`: a node that serves its run itself.
- `etcd_member`, `etcd_binary`: `rallypoint serve --engine etcd`.
"""
