"""A tower's runs captured as CUDA graphs, one for each of a few numbers of patches: a run then costs the host one
launch and a few copies.

Views of several pictures run packed. A run of fewer patches is filled up with views that no request has: small ones,
or where all views have one size further ones of that. They see themselves alone, so no number of a picture depends on
them. As with steps, a run whose graph is not captured yet runs op by op what the graph will hold.

Legend:
    T  patches
    X  numbers of a patch
    L  vectors
    M  numbers of a vector
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.collector import no_garbage_collection
from ridgeline.core.specs.coded import CodedTowerSpec
from ridgeline.core.specs.queries import QueriesSpec
from ridgeline.core.specs.sam import SamTowerSpec
from ridgeline.core.specs.tiled import TiledTowerSpec
from ridgeline.core.specs.tower import TowerSpec
from ridgeline.kernels.base.launch import on_device
from ridgeline.layers.encoder.grids import Grid
from ridgeline.layers.encoder.laid import LaidAnew
from ridgeline.layers.encoder.tower import Tower
from ridgeline.worker.graphs import behind_the_current_stream, borrowed, record

logger = logging.getLogger(__name__)

PATCHES = 8192  # of the largest graph. Beyond it the device works longer than the host launches
SIZES = (256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 7168, PATCHES)
VIEWS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32)  # of one size, where towers see no others
FILLED = 128  # patches of a view that fills up, at most: what a program of attention takes
PER_VIEW = 64  # a graph has room for a view for each so many patches, and for a few more
FEW = 16


def captured_patches(spec: TowerSpec) -> int:
    """Return the patches of a tower's largest graph; 0: the tower runs op by op, since a run of it depends on more of
    its views than arrays."""
    if isinstance(spec, (TiledTowerSpec, CodedTowerSpec, SamTowerSpec)) or isinstance(spec.projector, QueriesSpec):
        return 0
    if spec.pooler is not None or spec.middle is not None or spec.covered:
        return 0
    if (spec.class_token and not alike(spec)) or (spec.grid is not None and spec.grid.fit == "means"):
        return 0
    if alike(spec):
        assert spec.grid is not None
        each = spec.grid.side**2
        return max((views * each for views in VIEWS if views * each <= PATCHES), default=0)
    return PATCHES


def alike(spec: TowerSpec) -> bool:
    """Return True if all views have as many patches."""
    return spec.grid is not None and spec.grid.fit == "own"


class TowerGraph:
    """A run over views of so many patches together. is_captured: it is replayed; otherwise it runs op by op."""

    is_captured = False

    def __init__(self, tower: Tower, patches_TX: Tensor, grids: Sequence[Grid]) -> None:
        """grids: views of as many patches as there are rows of patches_TX, the memory from which it reads."""
        most = len(grids) if alike(tower.spec) else len(patches_TX) // PER_VIEW + FEW
        self.tower, self._patches_TX = tower, patches_TX
        self._laid = LaidAnew(tower.spec, grids, most, patches_TX.device)
        self._vectors_LM: Tensor | None = None

    @property
    def patches(self) -> int:
        return len(self._patches_TX)

    def load(self, patches_TX: Tensor, grids: Sequence[Grid]) -> bool:
        """Bring views to the graph's memory, and the patches of the first of them. Those of the others stay what they
        are. Return False if there is no room for so many views, or for such long ones."""
        if not self._laid.load(grids):
            return False
        self._patches_TX[: len(patches_TX)].copy_(patches_TX)
        return True

    def capture(self, pool: Any) -> None:
        """Capture the run on the current stream. It first runs once, so that kernels are compiled and loaded. Raise
        RuntimeError if the graph has other bits than a run op by op of the same patches."""
        self._run()
        graph = torch.cuda.CUDAGraph()
        vectors_LM = borrowed(record(graph, pool, self._run))
        self._patches_TX.neg_()  # patches that no run has seen yet, which the graph must read
        want_LM = self._run()
        graph.replay()
        self._patches_TX.neg_()
        bits = torch.int32 if want_LM.dtype.itemsize == 4 else torch.int16
        if not torch.equal(vectors_LM.view(bits), want_LM.view(bits)):
            raise RuntimeError(f"the graph of a tower over {self.patches} patches has other bits than its run.")
        self._graph, self._vectors_LM, self.is_captured = graph, vectors_LM, True

    def vectors(self) -> Tensor:
        """Return the vectors of what was loaded, [L, M], which the next graph's replay may overwrite."""
        if not self.is_captured or self._vectors_LM is None:
            return self._run()
        self._graph.replay()
        return self._vectors_LM

    def _run(self) -> Tensor:
        return self.tower.run(self._patches_TX, self._laid.laid)


class TowerGraphs:
    """The graphs of a tower that has `captured_patches`.

    graphs: by their numbers of patches. most: those of the largest.
    missed: the graph of the last run, if that was not captured yet.
    """

    def __init__(self, tower: Tower, device: torch.device, pool: Any = None) -> None:
        self.tower, self._device, self._pool = tower, device, pool
        spec = tower.spec
        self.most = most = captured_patches(spec)
        memory_TX = torch.zeros(most, spec.patch_width, dtype=tower.dtype, device=device)
        self.graphs = {size: TowerGraph(tower, memory_TX[:size], own) for size, own in self._sizes(spec, most)}
        self.missed: TowerGraph | None = None
        self._left: list[TowerGraph] = []

    @staticmethod
    def _sizes(spec: TowerSpec, most: int) -> Iterator[tuple[int, list[Grid]]]:
        """Yield numbers of patches, with views of so many."""
        if alike(spec):
            assert spec.grid is not None
            grid = Grid(1, spec.grid.side, spec.grid.side)
            for views in VIEWS:
                if views * grid.patches <= most:
                    yield views * grid.patches, [grid] * views
            return
        for size in SIZES:
            whole = size // spec.merge**2 * spec.merge**2
            yield whole, list(fillers(whole, spec.merge))

    def find(self, grids: Sequence[Grid]) -> tuple[TowerGraph, list[Grid]] | None:
        """Return the smallest graph that holds views, and the views with which it is filled up; None: none does."""
        patches = sum(grid.patches for grid in grids)
        graph = next((each for size, each in self.graphs.items() if size >= patches), None)
        if graph is None:
            return None
        if alike(spec := self.tower.spec):
            assert spec.grid is not None
            side = spec.grid.side
            own = Grid(1, side, side)
            whole = [*grids, *[own] * ((graph.patches - patches) // own.patches)]
            return (graph, whole) if all(grid[:3] == own[:3] for grid in grids) else None
        return graph, [*grids, *fillers(graph.patches - patches, spec.merge)]

    def run(self, patches_TX: Tensor, grids: Sequence[Grid]) -> Tensor | None:
        """Return the vectors of views, [L, M], which the next graph's replay may overwrite; None: no graph holds
        them."""
        found = self.find(grids)
        if found is None:
            return None
        graph, whole = found
        if not graph.load(patches_TX, whole):
            return None
        if not graph.is_captured:
            self.missed = graph
        vectors_LM = graph.vectors()
        return vectors_LM[: len(vectors_LM) * len(patches_TX) // graph.patches]

    def capture(self) -> None:
        """Capture every graph, the largest first: smaller ones then fit into the memory that it used."""
        self.capture_later()
        while self._left:
            self.rest()

    def capture_later(self) -> None:
        """Leave all graphs to `capture_one` and `rest`."""
        self._left = self._ordered

    @property
    def _ordered(self) -> list[TowerGraph]:
        return [self.graphs[size] for size in sorted(self.graphs, reverse=True)]

    @property
    def left(self) -> int:
        """The number of graphs that are left."""
        return len(self._left)

    def rest(self) -> None:
        """Capture a graph that is left. No step may be between its segments."""
        if self._left:
            self.capture_one(self._left[0])

    def capture_behind(self) -> None:
        """Capture the graph that the last run missed, if it did."""
        graph, self.missed = self.missed, None
        if graph is not None and graph in self._left:
            self.capture_one(graph)

    @torch.inference_mode()
    def capture_one(self, graph: TowerGraph) -> None:
        """Capture this graph, which is left, behind all that was launched. The host waits for it, to compare bits."""
        self._left.remove(graph)
        try:
            with on_device(self._device), behind_the_current_stream(self._device), no_garbage_collection():
                graph.capture(self._pool)
        except RuntimeError as error:  # such as too little memory, or other bits: towers go on op by op
            logger.warning("%d sizes of pictures run without graphs: %s", len(self._left) + 1, error)
            self._left.clear()


def fillers(patches: int, merge: int) -> Iterator[Grid]:
    """Yield views of so many patches together, a multiple of merge x merge."""
    squares, each = patches // merge**2, max(1, FILLED // merge**2)
    for first in range(0, squares, each):
        yield Grid(1, merge, merge * min(each, squares - first))


def graphs_of(tower: object, device: torch.device, pool: Any) -> TowerGraphs | None:
    """Return the graphs of a tower, none of them captured, or None if it runs op by op."""
    if not isinstance(tower, Tower) or not captured_patches(tower.spec):
        return None
    return TowerGraphs(tower, device, pool)
