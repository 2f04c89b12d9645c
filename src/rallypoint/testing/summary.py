"""Short texts for keys of a run and their values, for traces that people read and compare."""

from __future__ import annotations

import re

import msgspec

LEFT_OUT = {
    *("v", "id", "session", "addr", "pid", "local_id", "incarnation", "run_lease", "data_lease", "digest", "chunks"),
    *("term", "timing", "at", "formed_at", "kept_from", "run_ttl_s"),
}
"""Fields with random values, and fields that repeat the key or other fields."""
KEPT_IF_ZERO = {"closed", "rank"}


def key_summary(key: str) -> str:
    """The key without leading zeros in its numbers."""
    return "/".join(re.sub(r"^0+(?=\d)", "", part) if len(part) in (6, 12) else part for part in key.split("/"))


def value_summary(value: bytes) -> str:
    """The relevant fields of a record that are set; other values unchanged."""
    try:
        fields = msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return repr(value)
    if not isinstance(fields, dict):
        return repr(value)
    return ", ".join(_fields(fields)) or "-"


def _fields(fields: dict[str, object]) -> list[str]:
    shown = []
    for name, content in fields.items():
        if name in LEFT_OUT or (not content and name not in KEPT_IF_ZERO):
            continue
        if name == "members" and isinstance(content, list):
            shown.append("members " + " ".join(str(member[2]) for member in content))
        elif name == "events" and isinstance(content, list):
            shown.append("events " + " ".join(str(one["event"]["event"]) for one in content))
        elif isinstance(content, dict):
            shown += _fields(content)
        elif isinstance(content, bool):
            shown.append(name if content else f"not {name}")
        else:
            shown.append(f"{name} {content}")
    return shown
