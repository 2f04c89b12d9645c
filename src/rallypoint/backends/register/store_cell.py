"""A cell in one key of a `torch.distributed.Store`, or of any other object with its `get` and `compare_set`.

Reading a key of such a store blocks until it exists, so the key is created first, with the value NOTHING. Values are
text, so the content is base64; the token is that text, which requires that no two contents are equal: those of
`rallypoint.kv.document` never are.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from typing import Protocol

from rallypoint.errors import RendezvousConnectionError, RendezvousStateError, SettingsError

NOTHING = "rallypoint-nothing-yet"
"""Not base64, so it differs from every content."""
KEY = "rallypoint.register."


class TextStore(Protocol):
    """The methods of a store that are used."""

    def get(self, key: str, /) -> bytes: ...

    def compare_set(self, key: str, expected_value: str, desired_value: str, /) -> bytes: ...


class StoreCell:
    """A cell in the key of a run. The stores of all nodes must be connected with each other."""

    name = "store"

    def __init__(self, store: TextStore, run_id: str) -> None:
        if not run_id:
            raise SettingsError("the run id must not be empty", option="run_id", value=run_id)
        self._store = store
        self._key = KEY + run_id
        self._is_made = False

    def get_state(self) -> tuple[bytes, bytes] | None:
        """The content and its token; None: nothing yet."""
        self._make()
        return self._read(self._call("get"))

    def set_state(self, state: bytes, token: object = None) -> tuple[bytes, bytes, bool] | None:
        """Write if `token` is current (None: the cell is empty); the content afterwards, and whether it was written."""
        self._make()
        if token is not None and not isinstance(token, bytes):
            found = self.get_state()
            return None if found is None else (*found, False)
        text = b64encode(state).decode()
        found = self._read(self._call("compare_set", NOTHING if token is None else token.decode("latin-1"), text))
        return None if found is None else (*found, found[0] == state)

    def _make(self) -> None:
        if not self._is_made:
            self._call("compare_set", "", NOTHING)
            self._is_made = True

    def _call(self, verb: str, *values: str) -> bytes:
        try:
            return bytes(getattr(self._store, verb)(self._key, *values))
        except (ValueError, RuntimeError, OSError) as error:
            raise RendezvousConnectionError(f"the store could not be reached: {error}") from error

    def _read(self, text: bytes) -> tuple[bytes, bytes] | None:
        if text == NOTHING.encode():
            return None
        try:
            return b64decode(text, validate=True), text
        except binascii.Error as error:
            raise RendezvousStateError(
                f"key {self._key!r} of the store was not written by Rallypoint (it begins with {text[:16]!r}): use "
                f"another run id or store",
                key=self._key,
            ) from error
