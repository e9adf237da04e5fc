"""Linear attention in plain torch, in chunks, with or without the delta rule. It has gradients.

Within a chunk the product of a token with an earlier one is weighted, in each channel, by the decays between the two.
If the decays are counted from a point between the two, no factor is above one. For tokens of different blocks this
point is the beginning of the later token's block. Tokens of one block are compared one by one.

Legend: that of op.py, and
    B  blocks of a chunk
    L  tokens of a chunk
    l  tokens of a block
    r  rows that have a chunk
    J  numbers of a token's decay: K, or 1
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.kernels.scans.linear_attention.op import LinearInputs
from ridgeline.kernels.scans.metadata import Row, ScanMetadata

CHUNK = 64
BLOCK = 16


class Tokens(NamedTuple):
    """The tokens' queries, keys, values and decays in float32, with heads first, and the strengths of a delta rule;
    beta_HT1: None: there is none."""

    q_HTK: Tensor
    k_HTK: Tensor
    v_HTV: Tensor
    decay_HTJ: Tensor
    beta_HT1: Tensor | None = None

    def taken(self, token_rL: Tensor, exists_rL: Tensor) -> Tokens:
        """Return some tokens, [r, H, L, …], with zeros where there is none."""
        q, k, v, decay = (_taken(x, token_rL, exists_rL) for x in self[:4])
        return Tokens(q, k, v, decay, None if self.beta_HT1 is None else _taken(self.beta_HT1, token_rL, exists_rL))


def _taken(x_HTK: Tensor, token_rL: Tensor, exists_rL: Tensor) -> Tensor:
    return x_HTK[:, token_rL].transpose(0, 1).masked_fill(~exists_rL[:, None, :, None], 0)


class Piece(NamedTuple):
    """A chunk of a row's tokens. marks: its last token is at the row's mark."""

    first: int
    length: int
    marks: bool


def linear_attention(given: LinearInputs, states_NHKV: Tensor, metadata: ScanMetadata) -> Tensor:
    q_THK, k_THK, v_THV, decay = given.q_THK * given.scale, given.k_THK, given.v_THV, given.decay
    decay = decay.expand(len(k_THK), -1) if decay.dim() == 1 else decay
    decay_THJ = decay if decay.dim() == 3 else decay[:, :, None]
    tokens = Tokens(*(x.float().transpose(0, 1) for x in (q_THK, k_THK, v_THV, decay_THJ)))
    return in_chunks(tokens, states_NHKV, metadata).to(v_THV.dtype)


def in_chunks(tokens: Tokens, states_NHKV: Tensor, metadata: ScanMetadata) -> Tensor:
    """Return o_THV in float32, and replace the rows' states. Rows that have a chunk left run it together."""
    places, outputs = [], []
    cut = sorted((_pieces(row), row) for row in metadata.rows())
    for _, some in groupby(cut, lambda each: each[1].end - each[1].start > 1):  # single tokens need no filling up
        rows = sorted(some, key=lambda each: -len(each[0]))
        state_rHKV = _begun([row for _, row in rows], states_NHKV)
        for turn in range(len(rows[0][0])):
            now = [(pieces[turn], row) for pieces, row in rows if turn < len(pieces)]
            token_rL, exists_rL = _places([piece for piece, _ in now], metadata.start_R1.device)
            o_rHLV, new_rHKV = _chunk(tokens.taken(token_rL, exists_rL), state_rHKV[: len(now)])
            state_rHKV = new_rHKV if len(now) == len(rows) else torch.cat((new_rHKV, state_rHKV[len(now) :]))
            places.append(token_rL[exists_rL])
            outputs.append(o_rHLV.transpose(1, 2)[exists_rL])
            for (piece, row), new_HKV in zip(now, new_rHKV.detach(), strict=True):
                if piece.marks:
                    states_NHKV[row.marked] = new_HKV
        states_NHKV[[row.writes for _, row in rows]] = state_rHKV.detach()
    o_THV = tokens.v_HTV.new_zeros(tokens.v_HTV.transpose(0, 1).shape)
    return o_THV.index_copy(0, torch.cat(places), torch.cat(outputs)) if places else o_THV


def _pieces(row: Row) -> list[Piece]:
    marks = (row.start + row.mark) if row.mark else row.start
    ends = [*range(row.start + CHUNK, marks, CHUNK), marks, *range(marks + CHUNK, row.end, CHUNK), row.end]
    starts = [row.start, *ends[:-1]]
    cuts = zip(starts, ends, strict=True)
    return [Piece(first, end - first, bool(row.mark) and end == marks) for first, end in cuts if first < end]


def _begun(rows: list[Row], states_NHKV: Tensor) -> Tensor:
    fresh = torch.tensor([row.fresh for row in rows], device=states_NHKV.device)
    states_rHKV = states_NHKV[[row.reads for row in rows]].float()
    return states_rHKV.masked_fill(fresh[:, None, None, None], 0)


def _places(pieces: list[Piece], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tokens of chunks, and which of them exist: [r, L] each, L being whole blocks or less than one."""
    longest = max(piece.length for piece in pieces)
    size = longest if longest <= BLOCK else -(-longest // BLOCK) * BLOCK
    first_r1 = torch.tensor([piece.first for piece in pieces], device=device)[:, None]
    exists_rL = torch.arange(size, device=device) < torch.tensor([p.length for p in pieces], device=device)[:, None]
    return torch.where(exists_rL, first_r1 + torch.arange(size, device=device), 0), exists_rL


def _chunk(tokens: Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs of a chunk of each row, [r, H, L, V], and the states behind it."""
    q, k, v, decay, beta = tokens
    total = decay.cumsum(-2)
    within = met(q, k, decay)
    if beta is not None:  # what the chunk's tokens change depends on one another: see Yang et al., arXiv 2406.06484
        system = (met(k, k, decay) * beta).tril(-1)
        asked = beta * (v - (k * total.exp()) @ state)
        v = torch.linalg.solve_triangular(system, asked, upper=False, unitriangular=True)
    out = within @ v + (q * total.exp()) @ state
    return out, state * total[..., -1:, :].mT.exp() + (k * after(decay).exp()).mT @ v


def after(decay: Tensor) -> Tensor:
    """Return the sums of the decays behind each token: exact where little decays, which a difference of sums is not."""
    return F.pad(decay[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)


def met(q: Tensor, k: Tensor, decay: Tensor) -> Tensor:
    """Return the products of queries with keys of the same token or earlier ones, faded: [..., L, L].

    decay: [..., L, J], that of each token.
    """
    length = q.shape[-2]
    if decay.shape[-1] == 1:
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        total = decay.cumsum(-2)
        return q @ k.mT * (total - total.mT).masked_fill(later, -torch.inf).exp()
    size = min(BLOCK, length)
    blocks = length // size
    q_Bl, k_Bl, decay_Bl = (x.unflatten(-2, (blocks, size)) for x in (q, k, decay))
    since_Bl = decay_Bl.cumsum(-2)
    whole_B = since_Bl[..., -1, :].cumsum(-2)
    between_BB = F.pad(whole_B, (0, 0, 1, -1))[..., :, None, :] - whole_B[..., None, :, :]
    later = torch.ones(blocks, blocks, dtype=torch.bool, device=q.device).triu_()[..., None]
    left_BBl = between_BB.masked_fill(later, -torch.inf)[..., None, :] + after(decay_Bl)[..., None, :, :, :]
    far_BL = (k_Bl[..., None, :, :, :] * left_BBl.exp()).flatten(-3, -2)
    far = (q_Bl * since_Bl.exp()) @ far_BL.mT
    later = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)[..., None]
    fade_Bll = (since_Bl[..., :, None, :] - since_Bl[..., None, :, :]).masked_fill(later, -torch.inf).exp()
    near_Bll = (q_Bl[..., :, None, :] * k_Bl[..., None, :, :] * fade_Bll).sum(-1)
    same_B1B1 = torch.eye(blocks, device=q.device)[:, None, :, None]
    return (far.unflatten(-1, (blocks, size)) + near_Bll[..., None, :] * same_B1B1).flatten(-2).flatten(-3, -2)
