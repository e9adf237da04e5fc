"""The cuts of Mamba's kernels that a sweep tries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ridgeline.kernels.base.case import Cuts
from ridgeline.kernels.scans.selective_scan.cases import SelectiveScanCase
from ridgeline.kernels.scans.selective_scan.triton import PROMPTS, selective_scan
from ridgeline.kernels.scans.selective_scan.triton_tiles import Tiles
from ridgeline.kernels.scans.selective_scan.triton_walk import LONG, Walk

WALKS = (Walk(), Walk(2048), Walk(8192), Walk(2048, 2))
TILES = (PROMPTS, Tiles(4, 16), Tiles(4, 32), LONG, Tiles(2, 16), Tiles(2, 8), Tiles(4, 4))


def candidates(case: SelectiveScanCase) -> list[Any]:
    """Return cuts for a case: walks of one token where no row has more, since only these steps take them."""
    return list(WALKS if set(case.rows) == {1} else TILES)


def with_cut(cut: Tiles | Walk) -> Callable[..., Any]:
    return partial(selective_scan, cut=cut)


OP_CUTS = {"selective_scan": Cuts(candidates, with_cut, interpreted=(Walk,))}
