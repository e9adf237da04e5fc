"""The arguments of the step's ops, from flat lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.kernels.step.lookup.op import NotedTexts
from ridgeline.kernels.step.op import SlotAdvance, SlotDrafts, SlotTables, StepRows
from ridgeline.kernels.step.verify import DraftNodes, EmittedTokens


def inputs_of(flat: Sequence[Any]) -> tuple[StepRows, SlotTables, SlotDrafts]:
    """Return the arguments of `step_inputs`."""
    return StepRows(*flat[:3]), SlotTables(*flat[3:8]), SlotDrafts(*flat[8:])


def advance_of(flat: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of `step_advance`."""
    return *flat[:2], SlotAdvance(*flat[2:11]), *flat[11:]


def verify_of(flat: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of `step_verify`. The bits of trees and the paths come last, if at all."""
    nodes, emitted = DraftNodes(*flat[1:4], *flat[16:17]), EmittedTokens(*flat[13:16], *flat[17:18])
    return flat[0], nodes, SlotAdvance(*flat[4:13]), emitted


def noted_of(flat: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of `lookup_drafts` or `recent_drafts`."""
    return NotedTexts(*flat[:6]), *flat[6:]
