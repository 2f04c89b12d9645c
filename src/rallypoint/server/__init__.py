"""The embedded server: the engine behind our wire protocol, with the coordinator of each of its runs inside.

- `engine_host`: the engine on this process's clock, and who is told of changes.
- `clients`: which client has which sessions on which connection; what a closed connection means for them.
- `connection`: one TCP connection: handshake, frames, bounded buffers.
- `local`: the backend contract inside the server's own process, for its coordinators.
- `runs`: the coordinators, and what is done for a run while its sessions live.
- `server`: all of it together, on a listening socket.
- `hosting`: who serves when nobody was told to: whoever can bind the endpoint.
"""
