"""The gated delta rule on a GPU: rows of one token by one kernel, longer ones by two that take chunks.

Legend: that of triton_prepare.py.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ridgeline.kernels.gated_delta import segments, triton_step
from ridgeline.kernels.gated_delta.op import NORM_EPS
from ridgeline.kernels.gated_delta.plan import Plan, choose
from ridgeline.kernels.gated_delta.triton_chunks import _gated_delta_chunks
from ridgeline.kernels.gated_delta.triton_prepare import CHUNK, _gated_delta_prepare
from ridgeline.kernels.launch import compute_capability, launch_options, num_multiprocessors, shared_memory
from ridgeline.kernels.turns import Turns

SHORT = 1  # rows of so many tokens go token by token, whatever else is in the step


def gated_delta(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    a_TG: Tensor,
    b_TG: Tensor,
    log_rate_G: Tensor,
    dt_bias_G: Tensor,
    states_NGKV: Tensor,
    turns: Turns,
    scale: float,
    step_cut: triton_step.Cut = triton_step.CUT,
    plan: Plan | None = None,
) -> Tensor:
    o_TGV = torch.empty(v_TGV.shape, dtype=v_TGV.dtype, device=v_TGV.device)
    of_heads = q_THK, k_THK, v_TGV, a_TG, b_TG, log_rate_G, dt_bias_G, states_NGKV, turns, scale, o_TGV
    if turns.tokens_each <= 1:
        triton_step.step(*of_heads, longest=SHORT, cut=step_cut, single=turns.tokens_each == 1)
    if turns.tokens_each != 1:
        _in_chunks(*of_heads, plan)
    return o_TGV


def gated_delta_in_order(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    a_TG: Tensor,
    b_TG: Tensor,
    log_rate_G: Tensor,
    dt_bias_G: Tensor,
    states_NGKV: Tensor,
    turns: Turns,
    scale: float,
) -> Tensor:
    """Run all rows token by token, always in the same kernel: a row's bits do not depend on its chunks."""
    o_TGV = torch.empty(v_TGV.shape, dtype=v_TGV.dtype, device=v_TGV.device)
    triton_step.step(
        q_THK, k_THK, v_TGV, a_TG, b_TG, log_rate_G, dt_bias_G, states_NGKV, turns, scale, o_TGV
    )  # fmt: skip
    return o_TGV


def _in_chunks(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TGV: Tensor,
    a_TG: Tensor,
    b_TG: Tensor,
    log_rate_G: Tensor,
    dt_bias_G: Tensor,
    states_NGKV: Tensor,
    turns: Turns,
    scale: float,
    o_TGV: Tensor,
    plan: Plan | None,
) -> None:
    (heads, keys), (value_heads, values), device = k_THK.shape[1:], v_TGV.shape[1:], k_THK.device
    if q_THK.stride(0) != k_THK.stride(0):
        q_THK, k_THK = q_THK.contiguous(), k_THK.contiguous()
    tokens, chunks = turns.num_tokens, turns.chunks(CHUNK)
    capability = compute_capability(device)
    plan = plan or choose(
        turns.num_rows, tokens, value_heads, keys, values, k_THK.dtype, capability, num_multiprocessors(device),
        shared_memory(device),
    )  # fmt: skip
    solve_GTL, within_GTL = (
        torch.empty((value_heads, tokens, CHUNK), dtype=k_THK.dtype, device=device) for _ in range(2)
    )
    factors_GFT = torch.empty((value_heads, 4, tokens), dtype=torch.float32, device=device)
    options = launch_options(device)
    limit = {"maxnreg": plan.registers} if plan.registers and capability >= (8, 0) else {}
    _gated_delta_prepare[(value_heads, len(chunks.first_C))](
        q_THK, k_THK, a_TG, b_TG, log_rate_G, dt_bias_G, solve_GTL, within_GTL, factors_GFT,
        turns.start_R1, chunks.first_C, chunks.length_C, chunks.row_C,
        q_THK.stride(0), k_THK.stride(0), a_TG.stride(0), b_TG.stride(0), tokens, scale, NORM_EPS,
        H=heads, G=value_heads, K=keys, BK=triton.next_power_of_2(keys), L=CHUNK, PART=plan.part, SHORT=SHORT,
        num_warps=plan.prepare_warps, **limit, **options,
    )  # fmt: skip
    of_chunks = (
        q_THK, k_THK, v_TGV, solve_GTL, within_GTL, factors_GFT, states_NGKV, o_TGV,
        turns.start_R1, turns.reads_R, turns.writes_R, turns.fresh_R.view(torch.uint8), turns.marks_R, turns.marked_R,
    )  # fmt: skip
    numbers = k_THK.stride(0), v_TGV.stride(0), states_NGKV.stride(0), tokens
    shape = {"H": heads, "G": value_heads, "K": keys, "V": values, "L": CHUNK, "SHORT": SHORT, "STAGES": plan.stages}
    if not plan.hopper:
        _gated_delta_chunks[(triton.cdiv(values, plan.columns), value_heads, turns.num_rows)](
            *of_chunks, *numbers, BK=triton.next_power_of_2(keys), BV=plan.columns, **shape,
            num_warps=plan.warps, **options,
        )  # fmt: skip
        return
    from ridgeline.kernels.gated_delta import hopper_chunks

    kernel, tiles = hopper_chunks.gated_delta_hopper_chunks, values // plan.columns
    if not plan.segment:
        kernel[(tiles, value_heads, turns.num_rows)](
            *of_chunks, None, None, None, None, *numbers, RUN=hopper_chunks.ROWS, **shape,
            C=plan.columns, num_warps=plan.columns // 16, **options,
        )  # fmt: skip
        return
    parts = turns.chunks(plan.segment)
    number, all_tiles = len(parts.first_C), (values + keys) // plan.columns
    carried_DGCK = torch.empty((number, value_heads, values + keys, keys), dtype=torch.float32, device=device)
    table = parts.first_C, parts.length_C, parts.row_C, carried_DGCK
    kernel[(all_tiles, value_heads, number)](
        *of_chunks,
        *table,
        *numbers,
        RUN=hopper_chunks.CARRIES,
        **shape,
        C=plan.columns,
        num_warps=plan.columns // 16,
        **options,
    )
    segments._gated_delta_carry[(values // segments.COLUMNS, value_heads, turns.num_rows)](
        carried_DGCK, states_NGKV, turns.start_R1, turns.reads_R, turns.fresh_R.view(torch.uint8), parts.of_R1,
        states_NGKV.stride(0), G=value_heads, K=keys, V=values, BV=segments.COLUMNS, SHORT=SHORT,
        num_warps=segments.WARPS, **options,
    )  # fmt: skip
    kernel[(tiles, value_heads, number)](
        *of_chunks,
        *table,
        *numbers,
        RUN=hopper_chunks.OUTPUTS,
        **shape,
        C=plan.columns,
        num_warps=plan.columns // 16,
        **options,
    )
