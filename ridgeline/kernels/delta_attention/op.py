"""The delta rule with a decay of each key channel, over rows of unlike lengths: Kimi's delta attention.

A state maps keys to values. Each token lets every channel of the state decay by itself, and then moves what the state
says about its key towards its value.

Kimi Team, "Kimi Linear", arXiv 2510.26692.

Legend:
    H  heads
    K  width of a query or key
    N  block ids
    R  rows
    T  tokens of the step
    V  width of a value
"""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.gated_delta.op import log_decay, unit
from ridgeline.kernels.op import Implementation, Op, on_gpu
from ridgeline.kernels.recurrence import decaying, recurrence
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
    """Return o_THV, dense and of v's dtype, and replace the rows' states.

    With q and k of length one, decay = exp(-exp(log_rate) · softplus(a + dt_bias)) and β = sigmoid(b), each token does

        S ← decay · S;    S ← S + k ⊗ β (v - Sᵀ k);    o = Sᵀ q · scale

    q_THK, k_THK, v_THV, a_THK: the numbers of a head, and the heads of a token, must lie side by side.
    states_NHKV: float32. It may be strided by block id.
    """
    q_THK, k_THK = unit(q_THK.double()), unit(k_THK.double())
    left_THK = log_decay(a_THK.double(), log_rate_H.double()[:, None], dt_bias_HK.double()).exp()
    rule = decaying(q_THK, k_THK, v_THV.double(), left_THK, scale, b_TH.double().sigmoid())
    return recurrence(rule, states_NHKV, turns, v_THV)


DELTA_ATTENTION = Op(
    "delta_attention",
    delta_attention,
    (
        Implementation("triton", "ridgeline.kernels.delta_attention.triton:delta_attention", on_gpu),
        Implementation("torch", "ridgeline.kernels.delta_attention.torch_ops:delta_attention"),
        Implementation("batch_invariant", "ridgeline.kernels.delta_attention.triton:delta_attention_in_order", on_gpu),
    ),
    matrix=True,
)
