"""Rendezvous parameters as torch users know them: a few fixed ones and a dictionary of options."""

from __future__ import annotations

from typing import Any

from rallypoint.errors import SettingsError
from rallypoint.settings import parse_bool, parse_int
from rallypoint.urls import refusal


class RendezvousParameters:
    """The parameters of a handler; `config` holds every further keyword argument as given.

    Raises SettingsError, a ValueError, for an empty `backend` and for sizes that are not integers or not
    1 <= `min_nodes` <= `max_nodes`. The options in `config` are checked only when they are read.
    """

    def __init__(
        self,
        backend: str,
        endpoint: str,
        run_id: str,
        min_nodes: int,
        max_nodes: int,
        local_addr: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not backend:
            raise SettingsError(
                "the backend name is empty: name one, such as rallypoint", option="backend", value=backend
            )
        self.backend = backend
        self.endpoint = endpoint
        self.run_id = run_id
        self.min_nodes = parse_int("min_nodes", min_nodes)
        self.max_nodes = parse_int("max_nodes", max_nodes)
        self.config: dict[str, Any] = kwargs
        self.local_addr = local_addr
        if self.min_nodes < 1:
            raise refusal("min_nodes", min_nodes, "is not positive", "give 1 or more")
        if self.max_nodes < self.min_nodes:
            advice = f"give {self.min_nodes} or more"
            raise refusal("max_nodes", max_nodes, f"is below min_nodes={self.min_nodes}", advice)

    def get(self, key: str, default: Any = None) -> Any:
        """The option `key` as given, or `default`."""
        return self.config.get(key, default)

    def get_as_bool(self, key: str, default: bool | None = None) -> bool | None:
        """The option `key` as a boolean; None if it is absent or None. SettingsError if it is not a boolean."""
        value = self.get(key, default)
        return None if value is None else parse_bool(key, value)

    def get_as_int(self, key: str, default: int | None = None) -> int | None:
        """The option `key` as an integer; None if it is absent or None. SettingsError if it is not an integer."""
        value = self.get(key, default)
        return None if value is None else parse_int(key, value)
