"""Delta attention on a GPU: linear attention's kernels, with the delta rule. The legend is that of op.py."""

from __future__ import annotations

from torch import Tensor

from ridgeline.kernels.linear_attention.triton import run, run_in_order
from ridgeline.kernels.linear_attention.triton_step import Rule
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
    return run(Rule(q_THK, k_THK, v_THV, a_THK, scale, b_TH, log_rate_H, dt_bias_HK), states_NHKV, turns)


def delta_attention_in_order(
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
    """Run all rows token by token, always in the same kernel: a row's bits do not depend on its chunks."""
    return run_in_order(Rule(q_THK, k_THK, v_THV, a_THK, scale, b_TH, log_rate_H, dt_bias_HK), states_NHKV, turns)
