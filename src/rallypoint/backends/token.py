"""The shared token in a file: read at the start, and again when the file changes.

One token a line, blanks at the ends of a line do not count. The first is the one that this side sends; a server accepts
every one of them. So a token is replaced without a moment at which somebody is locked out: write the new one below the
old one for the servers, then put it first everywhere, then take the old one away.
"""

from __future__ import annotations

from pathlib import Path

from rallypoint.backends.tls import exposure, stamp_of
from rallypoint.errors import Rejected

MOST_TOKENS = 16
LONGEST_TOKEN = 8 * 1024
"""In bytes: a hello has to hold it."""


def read_tokens(path: str) -> tuple[str, ...]:
    """The tokens in a file, at least one. Rejected, with the file's name, if there is none to be had."""
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
        raise Rejected(f"token_file {path!r} holds {len(tokens)} tokens, one a line: {MOST_TOKENS} are the most")
    if max(len(token.encode()) for token in tokens) > LONGEST_TOKEN:
        raise Rejected(f"token_file {path!r} holds a token of more than {LONGEST_TOKEN} bytes: give a shorter one")
    return tokens


class TokenFile:
    """What the file held when it was last read with success."""

    def __init__(self, path: str) -> None:
        """Rejected if there is no token in it."""
        self.path = path
        self._stamp = stamp_of(path)
        self.tokens = read_tokens(path)

    @property
    def first(self) -> str:
        """The one to send."""
        return self.tokens[0]

    @property
    def has_changed(self) -> bool:
        """Whether the file is not the one that was read."""
        return stamp_of(self.path) != self._stamp

    def read_again(self) -> bool:
        """Whether the tokens are others now. Rejected, and nothing is changed, if there is none in the file."""
        self._stamp = stamp_of(self.path)
        before, self.tokens = self.tokens, read_tokens(self.path)
        return before != self.tokens

    def warnings(self) -> list[str]:
        """What an operator should know of the file."""
        return exposure("token_file", self.path)
