"""What tests of recurrent ops have in common: an op run on a copy of its states, and what it may change there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import ScanMetadata

Case = tuple[Any, Tensor, ScanMetadata]  # an op's inputs, its states, and the rows


class Ran(NamedTuple):
    """The outputs of the rows' tokens, and the states by block id, without the null block."""

    out: Tensor
    states: Tensor


def ran(op: Callable[..., Tensor], inputs: Case) -> Ran:
    """Run an op on a copy of its states. They lie in wider units."""
    given, before, metadata = inputs
    units = torch.full((len(before), before[0].numel() + 16), torch.nan, dtype=before.dtype, device=before.device)
    kept = units[:, : before[0].numel()].view(before.shape)
    kept.copy_(before)
    out = op(given, kept, metadata)
    assert bool(units[:, before[0].numel() :].isnan().all())
    return Ran(out[: int(metadata.start_R1[-1])], kept[1:])


def spoiled(given: Any, tokens: slice) -> Any:
    """Return inputs of which those of some tokens are NaN."""
    inputs_T = [x_T.clone() for x_T in given.by_token.values()]
    for x_T in inputs_T:
        x_T[tokens] = torch.nan
    return given.replaced(inputs_T)


def assert_other_blocks_are_left_alone(before: Tensor, after: Ran, metadata: ScanMetadata) -> None:
    written = {int(x) for x in (*metadata.writes_R, *metadata.marked_R)}
    others = [block for block in range(1, len(before)) if block not in written]
    assert others
    torch.testing.assert_close(
        after.states[[block - 1 for block in others]], before[others], rtol=0, atol=0, equal_nan=True
    )


def in_steps(run: Callable[..., Tensor], inputs: Case, size: int) -> tuple[Tensor, Tensor]:
    """Run the first row in steps of so many tokens, each behind a row of another request."""
    given, before, metadata = inputs
    start, end = (int(x) for x in metadata.start_R1[:2])
    states, outs = before.clone(), []
    for first in range(start, end, size):
        tokens = torch.tensor([end, *range(first, min(first + size, end))])  # the next row's first token, then these
        now = replace(
            metadata,
            start_R1=torch.tensor([0, 1, len(tokens)], dtype=torch.int32),
            reads_R=metadata.reads_R[[1, 0]],
            writes_R=metadata.writes_R[[1, 0]],
            fresh_R=metadata.fresh_R[[1, 0]] & (first == start),
            marks_R=torch.zeros(2, dtype=torch.int32),
            marked_R=torch.zeros(2, dtype=torch.int64),
            num_tokens=len(tokens),
            tokens_each=1 if len(tokens) == 2 else 0,
            _chunks={},
        )
        outs.append(run(given.at(tokens), states, now)[1:])
    return torch.cat(outs), states[metadata.writes_R[0]]
