"""The selective scan in plain torch, in float32: rows of one token all at once, longer ones by blocks of tokens.

What tokens do to the state is computed for a block at once, and so are the outputs. Between the two, each token is a
single fused multiply-add over all channels. (Blocks side by side would need every exponential twice, and these cost
more than anything else.)

Legend: that of op.py, and
    B  tokens of a block
    I  rows of one token
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.turns import Row, Turns

AT_ONCE = 1 << 20  # numbers of a block, 4 MiB: a few such tensors stay in a processor's cache


def selective_scan(
    x_TX: Tensor,
    dt_TX: Tensor,
    rate_XS: Tensor,
    b_TS: Tensor,
    c_TS: Tensor,
    skip_X: Tensor,
    dt_bias_X: Tensor | None,
    z_TX: Tensor | None,
    states_NXS: Tensor,
    turns: Turns,
) -> Tensor:
    x, b_TS, c_TS, rate_XS = x_TX.float(), b_TS.float(), c_TS.float(), rate_XS.float()
    step_TX = F.softplus(dt_TX.float() if dt_bias_X is None else dt_TX.float() + dt_bias_X.float())
    added_TX = step_TX * x
    y_TX = x * skip_X.float()
    rows = list(turns.rows())
    if single := [row for row in rows if row.end - row.start == 1]:
        _steps(step_TX, added_TX, rate_XS, b_TS, c_TS, states_NXS, single, y_TX)
    for row in rows:
        if row.end - row.start > 1:
            _row(step_TX, added_TX, rate_XS, b_TS, c_TS, states_NXS, row, y_TX)
    return (y_TX if z_TX is None else y_TX * F.silu(z_TX.float())).to(x_TX.dtype)


def _steps(
    step_TX: Tensor, added_TX: Tensor, rate_XS: Tensor, b_TS: Tensor, c_TS: Tensor,
    states_NXS: Tensor, rows: list[Row], y_TX: Tensor,
) -> None:  # fmt: skip
    """Run rows of one token each."""
    device = y_TX.device
    token_I, reads_I, writes_I = torch.tensor([(r.start, r.reads, r.writes) for r in rows], device=device).T
    fresh_I = torch.tensor([row.fresh for row in rows], device=device)
    state_IXS = states_NXS[reads_I].masked_fill_(fresh_I[:, None, None], 0).float()
    state_IXS *= (step_TX[token_I, :, None] * rate_XS).exp_()
    state_IXS.addcmul_(added_TX[token_I, :, None], b_TS[token_I, None])
    y_TX[token_I] += (state_IXS @ c_TS[token_I, :, None])[..., 0]
    states_NXS[writes_I] = state_IXS.to(states_NXS.dtype)
    for index, row in enumerate(rows):
        if row.mark:
            states_NXS[row.marked] = state_IXS[index].to(states_NXS.dtype)


def _row(
    step_TX: Tensor, added_TX: Tensor, rate_XS: Tensor, b_TS: Tensor, c_TS: Tensor,
    states_NXS: Tensor, row: Row, y_TX: Tensor,
) -> None:  # fmt: skip
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
