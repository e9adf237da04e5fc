"""The facts of an adapter, and the worker that holds adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from ridgeline.core.plan.request import Request


class AdapterFacts(NamedTuple):
    """An adapter that was read.

    key: names its content; a request's prefix keys need it.
    rank: the largest of its modules.
    num_bytes: of its matrices.
    """

    key: str
    rank: int
    num_bytes: int


class UsedAdapter(NamedTuple):
    """An adapter as requests name it: its number, and the key of its content."""

    number: int
    key: str

    def of(self, request: Request) -> Request:
        """Return a request that runs with the adapter."""
        return replace(request, adapter=self.number, prefix_keys=(*request.prefix_keys, self.key))


@runtime_checkable
class HoldsAdapters(Protocol):
    """A worker whose requests may run with adapters, which it knows by numbers from 1."""

    def add_adapter(self, number: int, folder: Path) -> AdapterFacts:
        """Read an adapter, so that plans may name it. Raise ModelLoadError for one that cannot run."""

    def remove_adapter(self, number: int) -> None:
        """Forget an adapter that no later plan names."""
