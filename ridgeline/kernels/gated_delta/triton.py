"""The gated delta rule on a GPU: rows of one token by one kernel, longer ones by two that take chunks.

Legend: that of triton_prepare.py.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ridgeline.kernels.gated_delta import triton_step
from ridgeline.kernels.gated_delta.op import NORM_EPS
from ridgeline.kernels.gated_delta.plan import Plan, choose
from ridgeline.kernels.gated_delta.triton_chunks import _gated_delta_chunks
from ridgeline.kernels.gated_delta.triton_prepare import CHUNK, _gated_delta_prepare
from ridgeline.kernels.gated_delta.work import Work, run_on_hopper
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
    (value_heads, values), keys, device = v_TGV.shape[1:], k_THK.shape[2], k_THK.device
    if q_THK.stride(0) != k_THK.stride(0):
        q_THK, k_THK = q_THK.contiguous(), k_THK.contiguous()
    plan = plan or choose(
        turns.num_rows, turns.num_tokens, value_heads, keys, values, k_THK.dtype, compute_capability(device),
        num_multiprocessors(device), shared_memory(device),
    )  # fmt: skip
    solve_GTL, within_GTL = (
        torch.empty((value_heads, turns.num_tokens, CHUNK), dtype=k_THK.dtype, device=device) for _ in range(2)
    )
    factors_GFT = torch.empty((value_heads, 4, turns.num_tokens), dtype=torch.float32, device=device)
    work = Work(q_THK, k_THK, v_TGV, solve_GTL, within_GTL, factors_GFT, states_NGKV, o_TGV, turns, SHORT)
    chunks = len(turns.chunks(CHUNK).first_C)
    each = -(-chunks // plan.parts(turns.num_tokens))
    for begin in range(0, chunks, each):
        _prepare(work, plan, (a_TG, b_TG, log_rate_G, dt_bias_G), scale, begin, min(each, chunks - begin))
        if plan.hopper:
            run_on_hopper(work, plan, begin // each, each)
        else:
            _multiply(work, plan)


def _prepare(work: Work, plan: Plan, gates: tuple[Tensor, ...], scale: float, begin: int, number: int) -> None:
    """Compute of `number` chunks what needs no state. Behind the first part, one more program for each head waits for
    the kernel in front."""
    (heads, keys), value_heads, device = work.k_THK.shape[1:], work.v_TGV.shape[1], work.k_THK.device
    (a_TG, b_TG, log_rate_G, dt_bias_G), chunks = gates, work.turns.chunks(CHUNK)
    limit = {"maxnreg": plan.registers} if plan.registers and compute_capability(device) >= (8, 0) else {}
    share = plan.share if value_heads // heads % plan.share == 0 else 1
    _gated_delta_prepare[(value_heads // share, number + (begin > 0))](
        work.q_THK, work.k_THK, a_TG, b_TG, log_rate_G, dt_bias_G, work.solve_GTL, work.within_GTL, work.factors_GFT,
        work.turns.start_R1, chunks.first_C, chunks.length_C, chunks.row_C,
        work.q_THK.stride(0), work.k_THK.stride(0), a_TG.stride(0), b_TG.stride(0), work.turns.num_tokens, begin,
        scale, NORM_EPS, H=heads, G=value_heads, K=keys, BK=triton.next_power_of_2(keys), L=CHUNK, PART=plan.block,
        SHORT=SHORT, SHARE=share, AHEAD=begin > 0, num_warps=plan.prepare_warps, **limit, **launch_options(device),
    )  # fmt: skip


def _multiply(work: Work, plan: Plan) -> None:
    """Run all chunks in order."""
    turns, (heads, keys), (value_heads, values) = work.turns, work.k_THK.shape[1:], work.v_TGV.shape[1:]
    _gated_delta_chunks[(triton.cdiv(values, plan.columns), value_heads, turns.num_rows)](
        work.q_THK, work.k_THK, work.v_TGV, work.solve_GTL, work.within_GTL, work.factors_GFT, work.states_NGKV,
        work.o_TGV, turns.start_R1, turns.reads_R, turns.writes_R, turns.fresh_R.view(torch.uint8), turns.marks_R,
        turns.marked_R, work.k_THK.stride(0), work.v_TGV.stride(0), work.states_NGKV.stride(0), turns.num_tokens,
        H=heads, G=value_heads, K=keys, V=values, BK=triton.next_power_of_2(keys), BV=plan.columns, L=CHUNK,
        SHORT=SHORT, STAGES=plan.stages, num_warps=plan.warps, **launch_options(work.k_THK.device),
    )  # fmt: skip
