"""Our own TCP protocol, without any I/O: bytes in, messages out, and back.

A connection begins with a greeting of fixed bytes from either side, then frames: a length and a msgpack document. The
first frame of a client is its hello, the first of the server its welcome or its refusal; after that, frames carry any
number of messages each.

- `frames`: greeting, framing, size limits.
- `messages`: what is said.
- `handshake`: versions, authentication, and what to tell a stranger.
"""
