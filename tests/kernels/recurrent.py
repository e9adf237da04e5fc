"""What tests of recurrent ops have in common: an op run on a copy of its states, and what it may change there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.turns import Turns


class Ran(NamedTuple):
    """The outputs of the rows' tokens, and the states by block id, without the null block."""

    out: Tensor
    states: Tensor


def ran(op: Callable[..., Tensor], inputs: tuple[Any, ...], states: int) -> Ran:
    """Run an op on a copy of its states, which are its argument number `states`. They lie in wider units, and the
    memory that the op is given for its results holds NaN."""
    turns = next(x for x in inputs if isinstance(x, Turns))
    given = inputs[states]
    units = torch.full((len(given), given[0].numel() + 16), torch.nan, dtype=given.dtype, device=given.device)
    kept = units[:, : given[0].numel()].view(given.shape)
    kept.copy_(given)
    out = op(*inputs[:states], kept, *inputs[states + 1 :])
    assert bool(units[:, given[0].numel() :].isnan().all())
    return Ran(out[: int(turns.start_R1[-1])], kept[1:])


def assert_other_blocks_are_left_alone(before: Tensor, after: Ran, turns: Turns) -> None:
    written = {int(x) for x in (*turns.writes_R, *turns.marked_R)}
    others = [block for block in range(1, len(before)) if block not in written]
    assert others
    torch.testing.assert_close(
        after.states[[block - 1 for block in others]], before[others], rtol=0, atol=0, equal_nan=True
    )
