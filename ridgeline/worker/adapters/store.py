"""The adapters that the worker knows by number. Their matrices lie in the host's memory, page-locked beside a GPU. If
there are more than that has room for, those that were used least lately are read from their folders again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock

import torch

from ridgeline.core.errors import ContractViolation, ModelLoadError
from ridgeline.core.plan.adapters import AdapterFacts
from ridgeline.weights.adapters.places import ModulePlace
from ridgeline.weights.adapters.reader import ReadAdapter, read_adapter


class AdapterStore:
    """Adapters of one model. Threads may add and remove while the worker's thread takes.

    places: of the model's modules. most: how many the host's memory holds; None: all.
    reads: of folders, so far.
    """

    def __init__(
        self,
        places: Mapping[str, ModulePlace],
        *,
        most_rank: int,
        dtype: torch.dtype,
        pinned: bool = False,
        most: int | None = None,
    ) -> None:
        self._places, self._most_rank, self._dtype, self._pinned, self._most = places, most_rank, dtype, pinned, most
        self._folders: dict[int, tuple[Path, str]] = {}  # and the content's key
        self._held: OrderedDict[int, ReadAdapter] = OrderedDict()
        self._lock = Lock()
        self.reads = 0

    def add(self, number: int, folder: Path) -> AdapterFacts:
        """Read an adapter and know it by a number from now on. Raise ModelLoadError for one that cannot run."""
        adapter = self._read(folder)
        with self._lock:
            self._folders[number] = folder, adapter.key
            self._keep(number, adapter)
        rank = max(len(pair.down_RI) for pair in adapter.pairs)
        return AdapterFacts(adapter.key, rank, adapter.nbytes)

    def remove(self, number: int) -> None:
        """Forget an adapter, with which no request runs."""
        with self._lock:
            self._folders.pop(number, None)
            self._held.pop(number, None)

    def take(self, number: int) -> ReadAdapter:
        """Return an adapter. Raise ContractViolation for an unknown number, and ModelLoadError if its folder has other
        content by now."""
        with self._lock:
            if number in self._held:
                self._held.move_to_end(number)
                return self._held[number]
            if number not in self._folders:
                raise ContractViolation(f"a plan names adapter {number}, which the worker does not know.")
            folder, key = self._folders[number]
        adapter = self._read(folder)
        if adapter.key != key:
            raise ModelLoadError(f"{folder} has changed since it was loaded; load the adapter again.")
        with self._lock:
            self._keep(number, adapter)
        return adapter

    def _read(self, folder: Path) -> ReadAdapter:
        self.reads += 1
        adapter = read_adapter(folder, self._places, most_rank=self._most_rank, dtype=self._dtype)
        if not self._pinned:
            return adapter
        pairs = (
            each._replace(down_RI=each.down_RI.pin_memory(), up_OR=each.up_OR.pin_memory()) for each in adapter.pairs
        )
        return replace(adapter, pairs=tuple(pairs))

    def _keep(self, number: int, adapter: ReadAdapter) -> None:
        self._held[number] = adapter
        self._held.move_to_end(number)
        while self._most is not None and len(self._held) > self._most:
            self._held.popitem(last=False)
