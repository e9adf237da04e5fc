"""Linear attention on a GPU: rows of one token by one kernel, longer ones by kernels that take chunks.

Legend: that of triton_prepare.py.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ridgeline.kernels.base.launch import launch_options, num_multiprocessors
from ridgeline.kernels.scans.linear_attention import triton_step
from ridgeline.kernels.scans.linear_attention.op import LinearInputs, by_channel
from ridgeline.kernels.scans.linear_attention.triton_chunks import Cut, _linear_attention_chunks, choose
from ridgeline.kernels.scans.linear_attention.triton_prepare import (
    CHUNK,
    PART,
    _delta_attention_solve,
    _linear_attention_prepare,
)
from ridgeline.kernels.scans.linear_attention.triton_step import Rule
from ridgeline.kernels.scans.metadata import ScanMetadata

SHORT = 1  # rows of so many tokens go token by token, whatever else is in the step
STAGES = 2  # chunks that are asked for at once


def linear_attention(given: LinearInputs, states_NHKV: Tensor, metadata: ScanMetadata) -> Tensor:
    return run(rule_of(given), states_NHKV, metadata)


def linear_attention_in_order(given: LinearInputs, states_NHKV: Tensor, metadata: ScanMetadata) -> Tensor:
    """Run all rows token by token, always in the same kernel: a row's bits do not depend on its chunks."""
    return run_in_order(rule_of(given), states_NHKV, metadata)


def rule_of(given: LinearInputs) -> Rule:
    return Rule(given.q_THK, given.k_THK, given.v_THV, by_channel(given.decay, given.k_THK), given.scale)


def run(
    rule: Rule,
    states_NHKV: Tensor,
    metadata: ScanMetadata,
    step_cut: triton_step.Cut = triton_step.CUT,
    chunks_cut: Cut | None = None,
) -> Tensor:
    """Return o_THV, and replace the rows' states."""
    o_THV = torch.empty(rule.v_THV.shape, dtype=rule.v_THV.dtype, device=rule.v_THV.device)
    if metadata.tokens_each <= 1:
        triton_step.step(rule, states_NHKV, metadata, o_THV, SHORT, step_cut, metadata.tokens_each == 1)
    if metadata.tokens_each != 1:
        _in_chunks(rule, states_NHKV, metadata, o_THV, chunks_cut)
    return o_THV


def run_in_order(rule: Rule, states_NHKV: Tensor, metadata: ScanMetadata) -> Tensor:
    """Return o_THV, and replace the rows' states, token by token."""
    o_THV = torch.empty(rule.v_THV.shape, dtype=rule.v_THV.dtype, device=rule.v_THV.device)
    triton_step.step(rule, states_NHKV, metadata, o_THV)
    return o_THV


def _in_chunks(rule: Rule, states_NHKV: Tensor, metadata: ScanMetadata, o_THV: Tensor, cut: Cut | None) -> None:
    q_THK, k_THK, v_THV, delta = rule.q_THK, rule.k_THK, rule.v_THV, rule.beta_TH is not None
    (heads, keys), values, device, dtype = k_THK.shape[1:], v_THV.shape[2], k_THK.device, k_THK.dtype
    chunks, shape, options = metadata.chunks(CHUNK), rule.shape, launch_options(device)
    number = len(chunks.first_C)
    squares = (number, heads, CHUNK, CHUNK)
    within_CHLL = torch.empty(squares, dtype=dtype, device=device)
    asked_THK, told_THK = (torch.empty(k_THK.shape, dtype=dtype, device=device) for _ in range(2))
    leaves_CHK = torch.empty((number, heads, keys), dtype=torch.float32, device=device)
    system_CHLL = solve_CHLL = known_THK = None
    if delta:
        system_CHLL = torch.empty(squares, dtype=torch.float32, device=device)
        solve_CHLL, known_THK = torch.empty_like(within_CHLL), torch.empty_like(asked_THK)
    of_q, of_k, _, *of_rule = rule.strides
    del shape["V"]
    _linear_attention_prepare[(number, heads, CHUNK // PART)](
        q_THK, k_THK, rule.fade_THK, rule.beta_TH, rule.log_rate_H, rule.dt_bias_HK,
        within_CHLL, system_CHLL, asked_THK, told_THK, known_THK, leaves_CHK,
        metadata.start_R1, *chunks.of_chunks, of_q, of_k, *of_rule, rule.scale, rule.norm_eps,
        **shape, L=CHUNK, PART=PART, SHORT=SHORT, num_warps=8, **options,
    )  # fmt: skip
    if delta:
        _delta_attention_solve[(number, heads)](
            system_CHLL, solve_CHLL, rule.beta_TH, metadata.start_R1, *chunks.of_chunks,
            of_rule[-1], H=heads, L=CHUNK, PART=PART, SHORT=SHORT, num_warps=8, **options,
        )  # fmt: skip
    cut = cut or choose(metadata.num_rows, heads, values, num_multiprocessors(device))
    _linear_attention_chunks[(triton.cdiv(values, cut.columns), heads, metadata.num_rows)](
        asked_THK, told_THK, known_THK, v_THV, within_CHLL, solve_CHLL, leaves_CHK, states_NHKV, o_THV,
        *metadata.of_rows, chunks.of_R1, v_THV.stride(0), states_NHKV.stride(0),
        H=heads, K=keys, V=values, BK=shape["BK"], BV=cut.columns, L=CHUNK, DELTA=delta, SHORT=SHORT,
        STAGES=STAGES, num_warps=cut.warps, **options,
    )  # fmt: skip
