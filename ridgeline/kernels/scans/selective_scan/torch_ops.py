"""The selective scan in plain torch, in float32: rows of one token all at once, longer ones by blocks of tokens.

What tokens do to the state is computed for a block at once, and so are the outputs. Between the two, each token is a
single fused multiply-add over all channels. (Blocks side by side would need every exponential twice, and these cost
more than anything else.)

Legend: that of op.py, and
    B  tokens of a block
    I  rows of one token
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.scans.metadata import Row, ScanMetadata
from ridgeline.kernels.scans.recurrence import Singles
from ridgeline.kernels.scans.selective_scan.op import ScanInputs

AT_ONCE = 1 << 20  # numbers of a block, 4 MiB: a few such tensors stay in a processor's cache


class _Numbers(NamedTuple):
    """The inputs in float32. added_TX: the sizes of steps times x."""

    step_TX: Tensor
    added_TX: Tensor
    rate_XS: Tensor
    b_TS: Tensor
    c_TS: Tensor


def selective_scan(given: ScanInputs, states_NXS: Tensor, metadata: ScanMetadata) -> Tensor:
    x, step_TX = given.x_TX.float(), given.step_TX(torch.float32)
    numbers = _Numbers(step_TX, step_TX * x, given.rate_XS.float(), given.b_TS.float(), given.c_TS.float())
    y_TX = x * given.skip_X.float()
    if len((singles := Singles.of(metadata)).row_D):
        _steps(numbers, states_NXS, singles, y_TX)
    for row in metadata.rows():
        if row.end - row.start > 1:
            _row(numbers, states_NXS, row, y_TX)
    return (y_TX if given.z_TX is None else y_TX * F.silu(given.z_TX.float())).to(given.x_TX.dtype)


def _steps(numbers: _Numbers, states_NXS: Tensor, singles: Singles, y_TX: Tensor) -> None:
    """Run rows of one token each."""
    (step_TX, added_TX, rate_XS, b_TS, c_TS), token_I = numbers, singles.token_D
    state_IXS = singles.begun(states_NXS).float()
    state_IXS *= (step_TX[token_I, :, None] * rate_XS).exp_()
    state_IXS.addcmul_(added_TX[token_I, :, None], b_TS[token_I, None])
    y_TX[token_I] += (state_IXS @ c_TS[token_I, :, None])[..., 0]
    singles.keep(states_NXS, state_IXS)


def _row(numbers: _Numbers, states_NXS: Tensor, row: Row, y_TX: Tensor) -> None:
    step_TX, added_TX, rate_XS, b_TS, c_TS = numbers
    size = max(1, AT_ONCE // rate_XS.numel())
    state_XS = torch.zeros_like(rate_XS) if row.fresh else states_NXS[row.reads].float()
    for begin in range(row.start, row.end, size):
        block = slice(begin, min(begin + size, row.end))
        left_BXS = (step_TX[block, :, None] * rate_XS).exp_()
        states_BXS = added_TX[block, :, None] * b_TS[block, None]
        for left, state in zip(left_BXS, states_BXS, strict=True):
            state_XS = state.addcmul_(left, state_XS)
        y_TX[block] += (states_BXS @ c_TS[block, :, None])[..., 0]
        if begin < row.start + row.mark <= block.stop:
            states_NXS[row.marked] = states_BXS[row.start + row.mark - begin - 1].to(states_NXS.dtype)
    states_NXS[row.writes] = state_XS.to(states_NXS.dtype)
