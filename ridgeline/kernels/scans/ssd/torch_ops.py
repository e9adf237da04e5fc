"""Mamba-2's recurrence in plain torch, in float32: rows of one token all at once, longer rows in chunks.

Within a chunk, outputs are products (see triton_chunks.py). All chunks of all rows are multiplied together, as many at
a time as memory allows; the states go from chunk to chunk in between.

Legend: that of op.py, and
    C  chunks
    Q  tokens of a chunk
    I  rows of one token
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import Row, ScanMetadata
from ridgeline.kernels.scans.recurrence import Singles
from ridgeline.kernels.scans.ssd.op import SsdInputs

CHUNK = 64
AT_ONCE = 1 << 24  # numbers of all tensors of some chunks, about: 64 MiB


class _Given(NamedTuple):
    x_THP: Tensor
    step_TH: Tensor
    rate_H: Tensor
    b_TGS: Tensor
    c_TGS: Tensor


class _Piece(NamedTuple):
    """A chunk, as numbers of the host. leaves: block ids that the state after it is stored in."""

    start: int
    length: int
    row: Row
    leaves: tuple[int, ...]


def ssd(given: SsdInputs, states_NHPS: Tensor, metadata: ScanMetadata) -> Tensor:
    x_THP, x_float, size = given.x_THP, given.x_THP.float(), given.b_TGS.shape[2]
    y_THP = x_float * given.skip_H.float()[:, None]
    numbers = _Given(
        x_float, given.step_TH(torch.float32), given.rate_H.float(), given.b_TGS.float(), given.c_TGS.float()
    )
    rows = list(metadata.rows())
    if len((singles := Singles.of(metadata)).row_D):
        _steps(numbers, states_NHPS, singles, y_THP)
    pieces = [piece for row in rows if row.end - row.start > 1 for piece in _pieces(row)]
    _, heads, width = x_THP.shape
    many = max(1, AT_ONCE // (heads * (2 * CHUNK * CHUNK + 2 * width * size + 3 * CHUNK * width)))
    state_HPS = torch.empty(0)
    for begin in range(0, len(pieces), many):
        state_HPS = _chunks(numbers, states_NHPS, pieces[begin : begin + many], state_HPS, y_THP)
    return y_THP.to(x_THP.dtype)


def _steps(given: _Given, states_NHPS: Tensor, singles: Singles, y_THP: Tensor) -> None:
    """Run rows of one token each."""
    token_I = singles.token_D
    x_IHP, step_IH, b_IGS, c_IGS = (v[token_I] for v in (given.x_THP, given.step_TH, given.b_TGS, given.c_TGS))
    share = x_IHP.shape[1] // b_IGS.shape[1]
    state_IHPS = singles.begun(states_NHPS).float()
    state_IHPS *= (step_IH * given.rate_H).exp()[:, :, None, None]
    state_IGhPS = state_IHPS.unflatten(1, (-1, share))
    state_IGhPS += (x_IHP * step_IH[:, :, None]).unflatten(1, (-1, share))[..., None] * b_IGS[:, :, None, None]
    y_THP[token_I] += (state_IGhPS @ c_IGS[:, :, None, :, None]).flatten(1, 2)[..., 0]
    singles.keep(states_NHPS, state_IHPS)


def _pieces(row: Row) -> list[_Piece]:
    """Return a row's chunks. A mark ends a chunk."""
    ends = {row.end: (row.writes,)}
    if row.mark:
        ends[row.start + row.mark] = (row.marked, *ends.get(row.start + row.mark, ()))
    pieces, start = [], row.start
    for end in sorted(ends):
        pieces += [_Piece(at, min(CHUNK, end - at), row, ()) for at in range(start, end, CHUNK)]
        pieces[-1] = pieces[-1]._replace(leaves=ends[end])
        start = end
    return pieces


def _chunks(given: _Given, states_NHPS: Tensor, pieces: list[_Piece], state_HPS: Tensor, y_THP: Tensor) -> Tensor:
    """Run some chunks, the first of which begins with `state_HPS` if it does not begin a row. Return the state after
    the last."""
    device, heads = y_THP.device, y_THP.shape[1]
    start_C, length_C = torch.tensor([(piece.start, piece.length) for piece in pieces], device=device).T
    i = torch.arange(CHUNK, device=device)
    exists_CQ = i < length_C[:, None]
    token_CQ = start_C[:, None] + torch.minimum(i, length_C[:, None] - 1)
    x_CHQP = given.x_THP[token_CQ].transpose(1, 2)
    step_CHQ = (given.step_TH[token_CQ] * exists_CQ[:, :, None]).transpose(1, 2)
    b_CGQS, c_CGQS = (v[token_CQ].transpose(1, 2) for v in (given.b_TGS, given.c_TGS))
    share = heads // b_CGQS.shape[1]
    log_CHQ = (step_CHQ * given.rate_H[:, None]).cumsum(2)
    causal_QQ = i[:, None] >= i
    left_CHQQ = (log_CHQ[..., :, None] - log_CHQ[..., None, :]).masked_fill_(~causal_QQ, -torch.inf).exp_()
    left_CHQQ *= step_CHQ[:, :, None]
    left_CHQQ.unflatten(1, (-1, share)).mul_((c_CGQS @ b_CGQS.mT)[:, :, None])
    y_CHQP = left_CHQQ @ x_CHQP
    weight_CHQ = step_CHQ * (log_CHQ[..., -1:] - log_CHQ).exp()
    x_CGhPQ = (x_CHQP * weight_CHQ[..., None]).mT.unflatten(1, (-1, share))
    added_CHPS = (x_CGhPQ.flatten(2, 3) @ b_CGQS).unflatten(2, (share, -1)).flatten(1, 2)
    kept_CH11 = log_CHQ[..., -1].exp()[..., None, None]
    before = []
    for index, piece in enumerate(pieces):
        if piece.start == piece.row.start:
            # A copy, since the block may be written before it is multiplied
            old_HPS = states_NHPS[piece.row.reads].to(torch.float32, copy=True)
            state_HPS = torch.zeros_like(old_HPS) if piece.row.fresh else old_HPS
        before.append(state_HPS)
        state_HPS = torch.addcmul(added_CHPS[index], kept_CH11[index], state_HPS)
        for block in piece.leaves:
            states_NHPS[block] = state_HPS.to(states_NHPS.dtype)
    before_CGhPS = torch.stack(before).unflatten(1, (-1, share))
    old_CGQhP = (c_CGQS @ before_CGhPS.flatten(2, 3).mT).unflatten(3, (share, -1))
    old_CHQP = old_CGQhP.transpose(2, 3).flatten(1, 2)
    y_CHQP.addcmul_(old_CHQP, log_CHQ.exp_()[..., None])
    y_THP[token_CQ[exists_CQ]] += y_CHQP.transpose(1, 2)[exists_CQ]
    return state_HPS
