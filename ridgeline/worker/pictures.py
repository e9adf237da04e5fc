"""A tower's work: pictures become patches, and patches vectors, on the device.

Legend:
    T  patches
    X  numbers of a patch
    L  vectors
    M  numbers of a vector
    R  lines of a grid of vectors
    C  columns of it, with the vector that ends a line
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from ridgeline.core.plan.octets import open_all
from ridgeline.core.plan.pictures import EncoderFigures, Pixels, ShownPictures
from ridgeline.core.plan.reserve import Reserved, StepSizes
from ridgeline.core.specs.coded import CodedTowerSpec
from ridgeline.core.specs.listener import ListenerSpec
from ridgeline.core.specs.tiled import TiledTowerSpec
from ridgeline.core.specs.tower import TowerSpec
from ridgeline.kernels.base.launch import on_device
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.pictures.views import Patching, View
from ridgeline.layers.encoder.coded import CodedTower
from ridgeline.layers.encoder.grids import Grid
from ridgeline.layers.encoder.sam import SamTower
from ridgeline.layers.encoder.tiled import TiledTower
from ridgeline.layers.encoder.tower import Tower
from ridgeline.worker.resampled import patches_of_views
from ridgeline.worker.stopwatch import Stopwatch
from ridgeline.worker.tower_graphs import TowerGraphs, captured_patches, graphs_of
from ridgeline.worker.upload import upload

PATCHES = 16384  # that the tower sees at once, if a step has fewer tokens: a picture of 3 million pixels
TOKEN_BYTES = 8  # of a picture that is tokens
STEPS_KEPT = 4  # so many steps' tokens may be vectors of pictures that are kept


def patches_at_once(sizes: StepSizes, tower: TowerSpec) -> int:
    """Return the number of patches that the tower sees at once, at most, and so those of the largest picture."""
    return max(PATCHES, sizes.max_tokens * tower.merge**2)


def vector_bytes(encoder: TowerSpec | ListenerSpec, sizes: StepSizes) -> int:
    """Return the bytes that a vector of a picture or a sound takes, or a token in its place."""
    return TOKEN_BYTES if isinstance(encoder, CodedTowerSpec) else encoder.outputs * sizes.itemsize


def bytes_kept(encoder: TowerSpec | ListenerSpec, sizes: StepSizes) -> int:
    """Return the bytes of vectors that are kept beside those that a step uses."""
    if sizes.kept_bytes is not None:
        return sizes.kept_bytes
    return STEPS_KEPT * sizes.max_tokens * vector_bytes(encoder, sizes)


@dataclass(frozen=True)
class TowerMemory:
    """The patches and activations of what the tower sees at once, and the vectors that are kept, with those of one more
    step. apart: the tower runs on another device, and its vectors alone are here."""

    tower: TowerSpec
    apart: bool = False

    def reserve(self, sizes: StepSizes) -> Reserved:
        patches = patches_at_once(sizes, self.tower)
        fresh = patches // self.tower.merge**2
        if (self.tower.newline or self.tower.ends) and self.tower.grid is not None:
            fresh += self.tower.merge * fresh // self.tower.grid.side  # a line has about as many patches
        kept = bytes_kept(self.tower, sizes) + max(fresh, sizes.max_tokens) * vector_bytes(self.tower, sizes)
        if isinstance(self.tower, TiledTowerSpec):  # which become keys and values at once
            kept = (fresh + self.tower.most_vectors) * self.tower.outputs * sizes.itemsize
        if self.apart:
            return Reserved(held=kept)
        if isinstance(self.tower, CodedTowerSpec):  # tokens are kept, and one picture runs at a time
            passing = self.tower.side**2 * self.tower.scratch() * sizes.itemsize
            passing += patches * self.tower.patch_width * (sizes.itemsize + 4)
            return Reserved(held=kept, passing=passing)
        each = self.tower.scratch() * sizes.itemsize + 4 * self.tower.patch_width
        if sizes.on_gpu:  # graphs hold what they read and their own intermediate tensors
            kept += captured_patches(self.tower) * each
        return Reserved(held=kept, passing=patches * each)


class Pictures:
    """The part of a worker that turns pictures into vectors. The tower may have a device of its own.

    device: where the vectors go.
    graphs: the tower's; None: it runs op by op.
    """

    def __init__(self, tower: Tower | TiledTower | CodedTower | SamTower, device: torch.device) -> None:
        self._tower, self._home = tower, device
        self._device = next(tower.parameters()).device
        self.graphs: TowerGraphs | None = None
        self.embeds = tower.spec.pooler is not None  # a picture's vector is its embedding, and stands for no token
        self._done, self._running = EncoderFigures(), deque[Stopwatch]()

    def capture(self, pool: Any, *, later: bool) -> None:
        """Capture the tower's graphs, if it can have some, in the memory that steps' graphs share. later: leave them
        to `rest` and `capture_behind` of theirs."""
        if self._device.type != self._home.type:  # a CPU's beside a GPU
            return
        with on_device(self._device):
            own_pool = pool if self._device == self._home else torch.cuda.graph_pool_handle()
            self.graphs = graphs_of(self._tower, self._device, own_pool)
            if self.graphs is not None:
                (self.graphs.capture_later if later else self.graphs.capture)()

    def encode(self, shown: Mapping[str, ShownPictures], stored: dict[str, Tensor], *, adapted: bool = False) -> None:
        """Store the vectors of pictures under their names, [L, M] each, or their tokens, int64 [L, 1]. Pictures that
        fit together run together. adapted: an adapter changes the tower, so no graph is replayed."""
        graphs = None if adapted else self.graphs
        for group in self._groups(shown, PATCHES if graphs is None else graphs.most):
            with on_device(self._device):
                watch = Stopwatch(self._device)
                with watch:
                    self._encode(group, stored, graphs)
            self._running.append(watch)
            patches = sum(map(self._run, group.values()))
            self._done = self.figures().plus(EncoderFigures(len(group), patches))

    @property
    def encoded(self) -> int:
        """The number of pictures so far."""
        return self._done.pictures

    def figures(self) -> EncoderFigures:
        """Return the work so far. Seconds are those of what the device has done."""
        while self._running and self._running[0].passed:
            self._done = self._done.plus(EncoderFigures(seconds=self._running.popleft().seconds()))
        return self._done

    def _encode(
        self, group: Mapping[str, ShownPictures], stored: dict[str, Tensor], graphs: TowerGraphs | None
    ) -> None:
        """Store the vectors of pictures that run together."""
        patches_TX = rows_of(group.values(), self._tower.ops, self._tower.dtype, self._device)
        if isinstance(self._tower, TiledTower):
            vectors_LM = self._tower(patches_TX, [each.tiling for each in group.values()])
        elif isinstance(self._tower, (CodedTower, SamTower)):
            vectors_LM = self._tower(patches_TX, [grid for each in group.values() for grid in each.grids])
        else:
            grids = [
                Grid(1, *grid, covered)
                for each in group.values()
                for grid, covered in zip(each.grids, each.covered, strict=True)
            ]
            replayed_LM = None if graphs is None else graphs.run(patches_TX, grids)
            texts = [each.text for each in group.values() for _ in each.views]
            vectors_LM = self._tower(patches_TX, grids, texts) if replayed_LM is None else replayed_LM
        counts = [
            len(each.views) if self.embeds else each.patches * len(vectors_LM) // len(patches_TX)
            for each in group.values()
        ]
        for (name, each), own_LM in zip(group.items(), vectors_LM.split(counts), strict=True):
            stored[name] = placed(own_LM, each, self._tower.endings).to(self._home)

    def _run(self, shown: ShownPictures) -> int:
        """Return the patches that run for a picture: a tiled tower runs all of its tiles."""
        spec = self._tower.spec
        return spec.tiles * spec.side**2 if isinstance(spec, TiledTowerSpec) else shown.patches

    def _groups(self, shown: Mapping[str, ShownPictures], most: int) -> Iterator[dict[str, ShownPictures]]:
        """Yield pictures that run together: a single one, or several of up to so many patches."""
        group: dict[str, ShownPictures] = {}
        for name, each in shown.items():
            alike = all(each.patching == one.patching for one in group.values())
            if group and (not alike or sum(map(self._run, (each, *group.values()))) > most):
                yield group
                group = {}
            group[name] = each
        if group:
            yield group


def placed(own_LM: Tensor, shown: ShownPictures, endings_LM: Tensor | None) -> Tensor:
    """Return a picture's vectors as they take places in a prompt, with those that end lines among them: -1 of its order
    is the last of these."""
    if shown.order is None:
        return own_LM.clone()
    ended_LM = own_LM if endings_LM is None else torch.cat((own_LM, endings_LM))
    found_LM = ended_LM[upload(np.array(shown.order, np.int64), ended_LM.device)]
    if shown.shrunk is None or endings_LM is None:
        return found_LM
    (rows, columns), size = shown.shrunk
    whole_LM, grid_LM = found_LM.split((len(found_LM) - rows * columns, rows * columns))
    grid_1MRC = grid_LM.unflatten(0, (rows, columns)).permute(2, 0, 1)[None]
    grid_RCM = interpolate(grid_1MRC, size, mode="bilinear")[0].permute(1, 2, 0)
    lines_RCM = torch.cat((grid_RCM, endings_LM[-1].expand(size[0], 1, -1)), dim=1)
    return torch.cat((whole_LM, lines_RCM.flatten(0, 1)))


def rows_of(shown: Iterable[ShownPictures], ops: Ops, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the patches of all views of these: [T, X]. They have one way to make patches."""
    pictures, views = list[Pixels](), list[View]()
    patching: Patching | None = None
    for each in shown:
        first, patching = len(pictures), each.patching
        pictures += each.pictures
        views += (view._replace(frames=tuple(first + frame for frame in view.frames)) for view in each.views)
    assert patching is not None
    open_all(pictures)
    octets = torch.empty(sum(each.num_bytes for each in pictures), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for picture, part in zip(pictures, octets.split([each.num_bytes for each in pictures]), strict=True):
        np.copyto(part.numpy(), picture.data)
    sizes = [(each.height, each.width) for each in pictures]
    return patches_of_views(ops, octets.to(device, non_blocking=True), sizes, views, patching, dtype)
