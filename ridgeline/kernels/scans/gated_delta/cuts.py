"""The cuts of the gated delta rule's kernels that a sweep tries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ridgeline.kernels.base.case import Cuts
from ridgeline.kernels.scans.gated_delta.cases import DeltaCase
from ridgeline.kernels.scans.gated_delta.plan import Plan
from ridgeline.kernels.scans.gated_delta.triton import gated_delta
from ridgeline.kernels.scans.gated_delta.triton_step import Cut

STEPS = tuple(Cut(*cut) for cut in ((32, 4), (32, 2), (16, 2), (16, 1), (64, 8), (64, 4), (128, 8)))
TRITON, HOPPER = Plan(64, 4, 3), Plan(64, 4, 3, hopper=True)
PORTABLE = (
    TRITON,
    TRITON._replace(block=2),  # the whole inverse at once
    TRITON._replace(block=32),  # halves of it
    TRITON._replace(registers=128),  # four programs a multiprocessor
    TRITON._replace(registers=0),  # no limit
    TRITON._replace(prepare_warps=8, registers=128),
)
ON_HOPPER = (
    HOPPER,
    HOPPER._replace(columns=128),
    HOPPER._replace(columns=128, share=2),  # heads of a key head together
    HOPPER._replace(part=1024),
    HOPPER._replace(part=2048),
    HOPPER._replace(part=4096),
    HOPPER._replace(part=2048, share=2),
    HOPPER._replace(segment=1024, carry_columns=128),
    HOPPER._replace(segment=8192, carry_columns=128),
    HOPPER._replace(columns=128, segment=4096),
    HOPPER._replace(columns=128, segment=4096, share=2),
)
WIDTH = 64  # of keys and values, at least: what the kernels for Hopper are written for
FEW_HEADS = 8  # with so few only what differs in the chunks' kernel is worth its compilation


def candidates(case: DeltaCase) -> list[Any]:
    """Return cuts for a case: those of steps for rows of one token, plans for others."""
    longest = max(case.rows)
    if longest <= 1:
        return list(STEPS)
    portable = PORTABLE if case.value_heads > FEW_HEADS else PORTABLE[:1]
    hopper = ON_HOPPER if min(case.key_width, case.value_width) >= WIDTH else ()
    # A segment or a part that no row is longer than changes nothing
    return [plan for plan in (*portable, *hopper) if max(plan.segment, plan.part) < longest]


def with_cut(cut: Plan | Cut) -> Callable[..., Any]:
    return partial(gated_delta, plan=cut) if isinstance(cut, Plan) else partial(gated_delta, step_cut=cut)


OP_CUTS = {"gated_delta": Cuts(candidates, with_cut, interpreted=(Cut,))}
