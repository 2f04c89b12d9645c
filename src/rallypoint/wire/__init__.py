"""The TCP protocol of the embedded server, without I/O: bytes to messages, and messages to bytes.

Both sides first send a fixed greeting, then frames: a length and a msgpack document. The first frame of a client is its
hello, the first of the server its welcome or its refusal; each later frame carries any number of messages.

- `frames`: greeting, framing, size limits.
- `messages`: the messages.
- `handshake`: versions, authentication, and replies to clients of other protocols.
"""
