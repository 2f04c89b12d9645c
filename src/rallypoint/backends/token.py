"""The file with the shared token: read at the start, and again when it changes.

One token per line; blanks around it are ignored. A client sends the first; a server accepts all of them. So a token can
be rotated without locking out any client: add the new one below the old one on the servers, then put it first
everywhere, then remove the old one.
"""

from __future__ import annotations

from pathlib import Path

from rallypoint.backends.tls import exposure, stamp_of
from rallypoint.errors import Rejected

MOST_TOKENS = 16
LONGEST_TOKEN = 8 * 1024
"""In bytes: it must fit into a hello."""


def read_tokens(path: str) -> tuple[str, ...]:
    """The tokens in a file, at least one. Rejected, with the file's name, if it has no valid tokens."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise Rejected(f"token_file {path!r} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise Rejected(f"token_file {path!r} is not text: {error.reason}") from error
    tokens = tuple(filter(None, map(str.strip, lines)))
    if not tokens:
        raise Rejected(f"token_file {path!r} is empty: write the token into it")
    if len(tokens) > MOST_TOKENS:
        raise Rejected(f"token_file {path!r} holds {len(tokens)} tokens, one a line: at most {MOST_TOKENS} are allowed")
    if max(len(token.encode()) for token in tokens) > LONGEST_TOKEN:
        raise Rejected(f"token_file {path!r} holds a token of more than {LONGEST_TOKEN} bytes: give a shorter one")
    return tokens


class TokenFile:
    """The tokens of a file as of the last successful read."""

    def __init__(self, path: str) -> None:
        """Rejected if the file has no valid tokens."""
        self.path = path
        self._stamp = stamp_of(path)
        self.tokens = read_tokens(path)

    @property
    def first(self) -> str:
        """The token to send."""
        return self.tokens[0]

    @property
    def has_changed(self) -> bool:
        """Whether the file has changed since it was read."""
        return stamp_of(self.path) != self._stamp

    def read_again(self) -> bool:
        """Whether the tokens have changed. Rejected, and the old ones are kept, if the file has no valid tokens."""
        self._stamp = stamp_of(self.path)
        before, self.tokens = self.tokens, read_tokens(self.path)
        return before != self.tokens

    def warnings(self) -> list[str]:
        """Warnings for the operator about the file."""
        return exposure("token_file", self.path)
