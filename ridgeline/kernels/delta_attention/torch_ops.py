"""Delta attention in plain torch: linear attention's chunks, with the delta rule. The legend is that of op.py."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gated_delta.op import log_decay, unit
from ridgeline.kernels.linear_attention.torch_ops import Tokens, in_chunks
from ridgeline.kernels.turns import Turns


def delta_attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    a_THK: Tensor,
    b_TH: Tensor,
    log_rate_H: Tensor,
    dt_bias_HK: Tensor,
    states_NHKV: Tensor,
    turns: Turns,
    scale: float,
) -> Tensor:
    decay_THK = log_decay(a_THK.float(), log_rate_H.float()[:, None], dt_bias_HK.float())
    each = (
        unit(q_THK.float()) * scale,
        unit(k_THK.float()),
        v_THV.float(),
        decay_THK,
        b_TH.float().sigmoid()[..., None],
    )
    return in_chunks(Tokens(*(x.transpose(0, 1) for x in each)), states_NHKV, turns).to(v_THV.dtype)
