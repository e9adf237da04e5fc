"""The cuts of the short convolution that a sweep tries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ridgeline.kernels.base.case import Cuts
from ridgeline.kernels.scans.causal_conv.cases import ConvCase
from ridgeline.kernels.scans.causal_conv.triton import Cut, causal_conv

CUTS = tuple(Cut(*cut) for cut in ((1024, 4, 32, 8), (1024, 4, 32, 4), (1024, 4, 64, 8), (512, 2, 32, 8)))


def candidates(case: ConvCase) -> list[Any]:
    """Return cuts for a case; a step of one token has its own."""
    return [] if set(case.rows) == {1} else list(CUTS)


def with_cut(cut: Cut) -> Callable[..., Any]:
    return partial(causal_conv, cut=cut)


OP_CUTS = {"causal_conv": Cuts(candidates, with_cut, interpreted=(Cut,))}
