"""Mamba-2's recurrence in plain torch, in float32: rows of one token all at once, longer rows in chunks. It has
gradients.

Within a chunk, outputs are products (see triton_chunks.py). All chunks of all rows are multiplied together, as many at
a time as memory allows. In between the states go from chunk to chunk, those of all rows together.

Legend: that of op.py, and
    C  chunks: the first of every row, then the second of those that have one, and so on
    L  rows of several tokens, the longest first
    Q  tokens of a chunk
    I  rows of one token
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import Row, ScanMetadata
from ridgeline.kernels.scans.recurrence import Singles
from ridgeline.kernels.scans.ssd.op import SsdInputs

CHUNK = 64
AT_ONCE = {"cpu": 1 << 24, "cuda": 1 << 28}  # numbers of all tensors of some chunks, about: 64 MiB and 1 GiB


class _Given(NamedTuple):
    x_THP: Tensor
    step_TH: Tensor
    rate_H: Tensor
    b_TGS: Tensor
    c_TGS: Tensor


class _Piece(NamedTuple):
    """A chunk, as numbers of the host. row: its row's place among L. leaves: block ids that the state after it is
    stored in."""

    start: int
    length: int
    row: int
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
    long = sorted((row for row in rows if row.end - row.start > 1), key=lambda row: -len(_pieces(row, 0)))
    if not long:
        return y_THP.to(x_THP.dtype)
    each = [_pieces(row, place) for place, row in enumerate(long)]
    pieces = [piece for depth in zip_longest(*each) for piece in depth if piece is not None]
    _, heads, width = x_THP.shape
    numbers_each = heads * (2 * CHUNK * CHUNK + 2 * width * size + 3 * CHUNK * width)
    many = max(1, AT_ONCE.get(x_THP.device.type, AT_ONCE["cpu"]) // numbers_each)
    fresh_L111 = torch.tensor([row.fresh for row in long], device=x_THP.device)[:, None, None, None]
    # Indexing copies, since a block may be written before its old state is multiplied
    state_LHPS = states_NHPS[[row.reads for row in long]].float().masked_fill(fresh_L111, 0)
    for begin in range(0, len(pieces), many):
        state_LHPS = _chunks(numbers, states_NHPS, pieces[begin : begin + many], state_LHPS, y_THP)
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


def _pieces(row: Row, place: int) -> list[_Piece]:
    """Return a row's chunks. A mark ends a chunk."""
    ends = {row.end: (row.writes,)}
    if row.mark:
        ends[row.start + row.mark] = (row.marked, *ends.get(row.start + row.mark, ()))
    pieces, start = [], row.start
    for end in sorted(ends):
        pieces += [_Piece(at, min(CHUNK, end - at), place, ()) for at in range(start, end, CHUNK)]
        pieces[-1] = pieces[-1]._replace(leaves=ends[end])
        start = end
    return pieces


def _chunks(given: _Given, states_NHPS: Tensor, pieces: list[_Piece], state_LHPS: Tensor, y_THP: Tensor) -> Tensor:
    """Run some chunks, of which a row's first begins with its state in `state_LHPS`. Return the states after them."""
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
    products_CG1QQ = (c_CGQS @ b_CGQS.mT)[:, :, None]
    if left_CHQQ.requires_grad:  # the exponentials are needed again
        left_CHQQ = left_CHQQ * step_CHQ[:, :, None]
        left_CHQQ = (left_CHQQ.unflatten(1, (-1, share)) * products_CG1QQ).flatten(1, 2)
    else:
        left_CHQQ *= step_CHQ[:, :, None]
        left_CHQQ.unflatten(1, (-1, share)).mul_(products_CG1QQ)
    y_CHQP = left_CHQQ @ x_CHQP
    weight_CHQ = step_CHQ * (log_CHQ[..., -1:] - log_CHQ).exp()
    x_CGhPQ = (x_CHQP * weight_CHQ[..., None]).mT.unflatten(1, (-1, share))
    added_CHPS = (x_CGhPQ.flatten(2, 3) @ b_CGQS).unflatten(2, (share, -1)).flatten(1, 2)
    kept_CH11 = log_CHQ[..., -1].exp()[..., None, None]
    before = []
    for begin, end in _depths(pieces):
        rows = slice(pieces[begin].row, pieces[end - 1].row + 1)
        before.append(state_LHPS[rows])
        after_lHPS = torch.addcmul(added_CHPS[begin:end], kept_CH11[begin:end], before[-1])
        every = len(after_lHPS) == len(state_LHPS)
        state_LHPS = after_lHPS if every else torch.cat((state_LHPS[: rows.start], after_lHPS, state_LHPS[rows.stop :]))
        for piece, after_HPS in zip(pieces[begin:end], after_lHPS.detach(), strict=True):
            for block in piece.leaves:
                states_NHPS[block] = after_HPS.to(states_NHPS.dtype)
    before_CGhPS = torch.cat(before).unflatten(1, (-1, share))
    old_CGQhP = (c_CGQS @ before_CGhPS.flatten(2, 3).mT).unflatten(3, (share, -1))
    old_CHQP = old_CGQhP.transpose(2, 3).flatten(1, 2)
    y_CHQP.addcmul_(old_CHQP, log_CHQ.exp_()[..., None])
    y_THP[token_CQ[exists_CQ]] += y_CHQP.transpose(1, 2)[exists_CQ]
    return state_LHPS


def _depths(pieces: list[_Piece]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of chunks that run together: those of rows that follow each other."""
    begin = 0
    for index in range(1, len(pieces) + 1):
        if index == len(pieces) or pieces[index].row <= pieces[index - 1].row:
            yield begin, index
            begin = index
