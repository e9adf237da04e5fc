"""The cuts of latent attention that a sweep tries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from ridgeline.kernels.attention.latent.cases import LatentCase
from ridgeline.kernels.attention.latent.triton import latent_attention, schedule_of
from ridgeline.kernels.attention.paged.triton_common import Cut
from ridgeline.kernels.base.case import Cuts

FEW_HEADS = 16  # whose queries of one token fill a tile of the few
FEW_QUERIES = (
    Cut(16, 32, warps=4, stages=3),
    Cut(16, 64, warps=8, stages=3),
    Cut(16, 64, warps=8, stages=2),
)
MANY_QUERIES = (
    Cut(64, 32, warps=8, stages=2),
    Cut(64, 64, warps=8, stages=2),
    Cut(32, 64, warps=8, stages=3),
    Cut(32, 32, warps=8, stages=3),
)


def candidates(case: LatentCase) -> tuple[Cut, ...]:
    """Return cuts for a case: tiles of few queries where each row has one token of few heads."""
    decodes = all(new == 1 for new, _ in case.rows)
    return FEW_QUERIES if decodes and case.num_heads <= FEW_HEADS else MANY_QUERIES


def with_cut(cut: Cut) -> Callable[..., Any]:
    return partial(latent_attention, cut=cut)


def scheduled(case: LatentCase, given: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with the schedule, which the layers of a step share."""
    *tensors, batch = given
    return *tensors, replace(batch, schedule=schedule_of(tensors[0], tensors[1], batch))


OP_CUTS = {"latent_attention": Cuts(candidates, with_cut, interpreted=(Cut,), prepared=scheduled)}
