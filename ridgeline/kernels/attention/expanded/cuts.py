"""The cuts of attention to expanded latents that a sweep tries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ridgeline.kernels.attention.expanded.cases import ExpandedCase
from ridgeline.kernels.attention.expanded.triton import expanded_attention
from ridgeline.kernels.attention.paged.triton_common import Cut
from ridgeline.kernels.base.case import Cuts

CUTS = (
    Cut(128, 64, warps=8, stages=3),
    Cut(128, 64, warps=8, stages=2),
    Cut(128, 128, warps=8, stages=2),
    Cut(64, 64, warps=4, stages=3),
    Cut(128, 32, warps=8, stages=4),
    Cut(128, 64, warps=4, stages=2),
)
WIDEST = 128  # of keys and values, beside which the stages of all of these fit


def candidates(case: ExpandedCase) -> tuple[Cut, ...]:
    return CUTS if max(case.key_dim, case.value_dim) <= WIDEST else ()


def with_cut(cut: Cut) -> Callable[..., Any]:
    return partial(expanded_attention, cut=cut)


OP_CUTS = {"expanded_attention": Cuts(candidates, with_cut, interpreted=(Cut,))}
