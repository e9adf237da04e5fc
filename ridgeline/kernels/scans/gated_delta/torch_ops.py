"""The gated delta rule in plain torch: rows of one token at once, longer ones in chunks.

Within a chunk the tokens' changes of the state depend on one another through a triangular system (the WY form of Yang
et al., arXiv 2406.06484, with decays as in arXiv 2412.06464). It is solved for all chunks of all rows at once. What is
left to do in order is a few products for each chunk.

Legend: that of op.py, and
    C  chunks
    D  rows of one token
    L  tokens of a chunk
    g  value heads of a key head
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.kernels.scans.gated_delta.op import DeltaInputs, unit
from ridgeline.kernels.scans.linear_attention.torch_ops import Tokens, in_chunks
from ridgeline.kernels.scans.metadata import ScanMetadata
from ridgeline.kernels.scans.recurrence import Singles

CHUNK = 64


class _Tokens(NamedTuple):
    """The numbers that the rule needs of each token, in float32. g_TG: the logarithm of the decay."""

    q_THK: Tensor
    k_THK: Tensor
    v_TGV: Tensor
    g_TG: Tensor
    beta_TG: Tensor

    @staticmethod
    def of(given: DeltaInputs) -> _Tokens:
        q_THK, k_THK = unit(given.q_THK.float()) * given.scale, unit(given.k_THK.float())
        g = given.log_decay_TGJ(torch.float32)
        g = g if given.a.dim() == 3 else g.squeeze(-1)
        return _Tokens(q_THK, k_THK, given.v_TGV.float(), g, given.b_TG.float().sigmoid())

    def taken(self, index: Tensor) -> _Tokens:
        return _Tokens(*(x[index] for x in self))


def delta_attention(given: DeltaInputs, states_NGKV: Tensor, metadata: ScanMetadata) -> Tensor:
    """Linear attention's chunks, with the delta rule."""
    q_THK, k_THK, v_THV, g_THK, beta_TH = _Tokens.of(given)
    each = q_THK, k_THK, v_THV, g_THK, beta_TH[..., None]
    return in_chunks(Tokens(*(x.transpose(0, 1) for x in each)), states_NGKV, metadata).to(given.v_TGV.dtype)


def gated_delta(given: DeltaInputs, states_NGKV: Tensor, metadata: ScanMetadata) -> Tensor:
    tokens, v_TGV = _Tokens.of(given), given.v_TGV
    o_TGV = torch.zeros_like(v_TGV, memory_format=torch.contiguous_format)
    singles = Singles.of(metadata)
    if len(singles.row_D):
        o_TGV[singles.token_D] = _step(tokens.taken(singles.token_D), states_NGKV, singles).to(o_TGV.dtype)
    if len(singles.row_D) < int((metadata.start_R1.diff() > 0).sum()):
        _chunked(tokens, states_NGKV, metadata, o_TGV)
    return o_TGV


def _step(tokens: _Tokens, states_NGKV: Tensor, singles: Singles) -> Tensor:
    """Return the outputs of the rows that have one token."""
    q_DHK, k_DHK, v_DGV, g_DG, beta_DG = tokens
    states_DGKV = singles.begun(states_NGKV).mul_(g_DG.exp()[..., None, None])
    share = v_DGV.shape[1] // k_DHK.shape[1]
    k_DGK = k_DHK.repeat_interleave(share, dim=1)
    both_DG2K = torch.stack((k_DGK, q_DHK.repeat_interleave(share, dim=1)), dim=2)
    known_DGV, read_DGV = (both_DG2K @ states_DGKV).unbind(2)
    moved_DGV = beta_DG[..., None] * (v_DGV - known_DGV)
    states_DGKV.addcmul_(k_DGK[..., None], moved_DGV[:, :, None])
    singles.keep(states_NGKV, states_DGKV)
    return read_DGV + both_DG2K.prod(2).sum(-1, keepdim=True) * moved_DGV


def _chunked(tokens: _Tokens, states_NGKV: Tensor, metadata: ScanMetadata, o_TGV: Tensor) -> None:
    """Run the rows that have more tokens than one."""
    longest = int(metadata.start_R1.diff().max())
    size = min(CHUNK, 1 << (longest - 1).bit_length())
    chunks, long_R = metadata.chunks(size), metadata.start_R1.diff() > 1
    wanted_C = torch.cat((long_R, long_R.new_zeros(1)))[chunks.row_C]
    length_C, place_L = chunks.length_C[wanted_C], torch.arange(size, device=wanted_C.device)
    token_CL = chunks.first_C[wanted_C, None] + place_L
    exists_CL = place_L < length_C[:, None]
    taken = tokens.taken(torch.where(exists_CL, token_CL, 0))
    heads = tokens.k_THK.shape[1]
    q, k, v, g, beta = (  # [C, H, 1, L, K] twice, [C, H, g, L, V], [C, H, g, L] twice; zeros where there is no token
        x.masked_fill(~exists_CL.view(*exists_CL.shape, *[1] * (x.dim() - 2)), 0)
        .transpose(1, 2)
        .unflatten(1, (heads, -1))
        for x in taken
    )
    total = g.cumsum(-1)
    later = torch.ones(size, size, dtype=torch.bool, device=g.device).triu_(1)
    fade = (total[..., :, None] - total[..., None, :]).masked_fill_(later, -torch.inf).exp_()
    keys = k.transpose(-1, -2)
    mixed = torch.cat((v, total.exp()[..., None] * k), -1) * beta[..., None]
    solved = torch.linalg.solve_triangular(k @ keys * fade * beta[..., None], mixed, upper=False, unitriangular=True)
    within = (q @ keys * fade).flatten(1, 2)
    values, weights = solved.flatten(1, 2).split((v.shape[-1], k.shape[-1]), -1)
    asked = (q * total.exp()[..., None]).flatten(1, 2)
    told = (k * (total[..., -1:] - total).exp()[..., None]).flatten(1, 2).transpose(-1, -2)
    left = total[..., -1].exp().flatten(1, 2)[..., None, None]
    out = torch.empty_like(values)
    chunk = 0
    for row in metadata.rows():
        if row.end - row.start == 1:
            continue
        state = states_NGKV[row.reads].clone() if not row.fresh else torch.zeros_like(states_NGKV[0])
        token = row.start
        while token < row.end:
            moved = values[chunk] - weights[chunk] @ state
            torch.baddbmm(asked[chunk] @ state, within[chunk], moved, out=out[chunk])
            state.mul_(left[chunk]).baddbmm_(told[chunk], moved)
            token, chunk = token + int(length_C[chunk]), chunk + 1
            if token - row.start == row.mark:
                states_NGKV[row.marked] = state
        states_NGKV[row.writes] = state
    o_TGV[token_CL[exists_CL]] = out.transpose(1, 2)[exists_CL].to(o_TGV.dtype)
