"""The cuts of Mamba-2's kernels that a sweep tries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.kernels.base.case import Cuts
from ridgeline.kernels.scans.ssd.cases import SsdCase
from ridgeline.kernels.scans.ssd.choose import Cut, choose
from ridgeline.kernels.scans.ssd.triton import ssd
from ridgeline.kernels.scans.ssd.triton_walk import Walk

WALKS = (Walk(), Walk(2048), Walk(8192), Walk(2048, 2))
LARGE = 128  # numbers of a state: beyond these a program of triton_products.py has too few registers


def candidates(case: SsdCase) -> list[Any]:
    """Return cuts for a case: walks for steps of one token, since only these take them."""
    if set(case.rows) == {1}:
        return list(WALKS)
    chosen = choose(case.heads, case.head_width, case.state_width)
    segments = [replace(chosen, segment=segment) for segment in (1024, 4096) if segment < max(case.rows)]
    shared = [replace(chosen, outputs="shared", warps=warps) for warps in (4, 8) if case.state_width <= LARGE]
    return list(dict.fromkeys((chosen, *segments, *shared)))


def with_cut(cut: Cut | Walk) -> Callable[..., Any]:
    return partial(ssd, cut=cut)


OP_CUTS = {"ssd": Cuts(candidates, with_cut, interpreted=(Walk,))}
