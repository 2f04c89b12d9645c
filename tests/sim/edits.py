"""Temporary edits of single functions in the running program, for mutation tests."""

from __future__ import annotations
import __future__

import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True, slots=True)
class Edit:
    """A snippet of the source of a function or method, and its replacement."""

    owner: Any
    """A class or a module."""
    name: str
    old: str
    new: str

    def function(self) -> FunctionType:
        """The function to edit."""
        found = inspect.getattr_static(self.owner, self.name)
        found = found.fget if isinstance(found, property) else found
        assert isinstance(found, FunctionType), f"{self.name} is not a function"
        return found

    def code(self) -> CodeType:
        """The edited code. AssertionError unless the source contains the snippet exactly once."""
        function = self.function()
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(self.old) == 1, f"{function.__qualname__} has {source.count(self.old)} times: {self.old}"
        flags = __future__.annotations.compiler_flag
        edited = compile(source.replace(self.old, self.new), f"<{function.__qualname__}, edited>", "exec", flags)
        made: dict[str, Any] = {}
        exec(edited, dict(vars(sys.modules[function.__module__])), made)
        new = made[self.name]
        code = (new.fget if isinstance(new, property) else new).__code__
        assert isinstance(code, CodeType)
        return code


@contextmanager
def edited(*edits: Edit) -> Iterator[None]:
    """Apply the edits, at most one per function. The code objects are replaced, so that functions that were imported by
    name are edited, too."""
    changed: list[tuple[FunctionType, CodeType]] = []
    try:
        for edit in edits:
            function, code = edit.function(), edit.code()
            changed.append((function, function.__code__))
            function.__code__ = code
        yield
    finally:
        for function, code in reversed(changed):
            function.__code__ = code
