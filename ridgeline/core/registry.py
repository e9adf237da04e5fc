"""Lazy registries: a name maps to "module:attribute", imported only when it is asked for.

Adding a model, a kernel or a policy is one file and one line in its table; importing the registry costs nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.core.errors import InvalidConfig


class Registry:
    """`Registry("scheduling policy", {"fcfs": "ridgeline.engine.policy.fcfs:FCFS"})["fcfs"]`."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self._kind = kind
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            known = ", ".join(sorted(self._entries))
            raise InvalidConfig(f"unknown {self._kind} {name!r}; known: {known}.")
        module, _, attribute = self._entries[name].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def register(self, name: str, target: str) -> None:
        """Add `name` → "module:attribute" (for extensions living outside this package)."""
        self._entries[name] = target
