"""The adapters that the worker knows by number. Their matrices lie in the host's memory, page-locked beside a GPU. If
there are more than that has room for, some are read from their folders again: those whose memory costs least to do
without (GreedyDual-Size, Cao and Irani, USITS 1997). An adapter that is used gets the rank clock + cost / size, the
lowest rank leaves, and the clock becomes its rank. So what was used lately outlives what was not, and of two that were
used alike the one stays whose bytes take longer to come back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from ridgeline.core.errors import ContractViolation, ModelLoadError
from ridgeline.core.plan.adapters import AdapterFacts
from ridgeline.parallel.mesh import Mesh
from ridgeline.weights.adapters.reader import ReadAdapter
from ridgeline.weights.folder import adapter_folder

READ_SECONDS, READ_RATE = 2e-3, 1e9  # to read a folder: what its size does not change, and bytes a second


class HostBounds(NamedTuple):
    """The most that the host's memory holds: so many adapters, and so many bytes of their matrices. None: any."""

    adapters: int | None = None
    num_bytes: int | None = None

    def exceeded(self, held: Collection[ReadAdapter]) -> bool:
        """Return True if these are too many. A single one never is."""
        if len(held) < 2:
            return False
        many = self.adapters is not None and len(held) > self.adapters
        return many or (self.num_bytes is not None and sum(each.nbytes for each in held) > self.num_bytes)


class AdapterStore:
    """Adapters of one model. Threads may add and remove while the worker's thread takes.

    read: returns what this process has of the adapter in a folder, which had a key before, or None. Raises
        ModelLoadError.
    ranks: those that divide the model. They take the same adapters in the same order, and each has its share.
    reads: of folders, so far.
    """

    def __init__(
        self,
        read: Callable[[Path, str | None], ReadAdapter],
        bounds: HostBounds = HostBounds(),
        ranks: Mesh | None = None,
    ) -> None:
        self._read_folder, self._bounds, self._ranks = read, bounds, ranks or Mesh()
        self._folders: dict[int, tuple[Path, str]] = {}  # and the content's key
        self._held: OrderedDict[int, ReadAdapter] = OrderedDict()
        self._rank: dict[int, float] = {}  # of those that are held
        self._clock = 0.0
        self._lock = Lock()
        self.reads = 0

    def add(self, number: int, folder: Path) -> AdapterFacts:
        """Read an adapter and know it by a number from now on. Raise ModelLoadError for one that cannot run."""
        folder = adapter_folder(folder)
        adapter = self._read(folder)
        with self._lock:
            self._folders[number] = folder, adapter.key
            self._keep(number, adapter)
        return AdapterFacts(adapter.key, adapter.rank, adapter.nbytes)

    def remove(self, number: int) -> None:
        """Forget an adapter, with which no request runs."""
        with self._lock:
            self._folders.pop(number, None)
            self._held.pop(number, None)
            self._rank.pop(number, None)

    def take(self, number: int) -> ReadAdapter:
        """Return an adapter. Raise ContractViolation for an unknown number, and ModelLoadError if its folder has other
        content by now. Either all ranks return or all raise, since one alone would wait for the others in the step."""
        if self._ranks.size == 1 or self._bounds == HostBounds():
            return self._taken(number)
        found: ReadAdapter | Exception
        try:
            found = self._taken(number)
        except Exception as error:
            found = error
        all_have = self._ranks.smallest(int(isinstance(found, ReadAdapter)))
        if isinstance(found, Exception):
            raise found
        if not all_have:
            raise ModelLoadError(f"another rank cannot read adapter {number} again; load the adapter again.")
        return found

    def _taken(self, number: int) -> ReadAdapter:
        with self._lock:
            if number in self._held:
                self._use(number)
                return self._held[number]
            if number not in self._folders:
                raise ContractViolation(f"a plan names adapter {number}, which the worker does not know.")
            folder, key = self._folders[number]
        adapter = self._read(folder, key)
        if adapter.key != key:
            raise ModelLoadError(f"{folder} has changed since it was loaded; load the adapter again.")
        with self._lock:
            self._keep(number, adapter)
        return adapter

    def _read(self, folder: Path, known: str | None = None) -> ReadAdapter:
        self.reads += 1
        return self._read_folder(folder, known)

    def _keep(self, number: int, adapter: ReadAdapter) -> None:
        self._held[number] = adapter
        self._use(number)
        while self._bounds.exceeded(self._held.values()):
            others = (each for each in self._held if each != number)
            leaves = min(others, key=self._rank.__getitem__)  # the first of equal ones was used before the others
            self._clock = max(self._clock, self._rank.pop(leaves))
            del self._held[leaves]

    def _use(self, number: int) -> None:
        """Rank an adapter as the one that was used last."""
        self._held.move_to_end(number)
        size = self._held[number].nbytes
        cost = READ_SECONDS + size / READ_RATE
        self._rank[number] = self._clock + cost / (1 if self._bounds.num_bytes is None else max(size, 1))
