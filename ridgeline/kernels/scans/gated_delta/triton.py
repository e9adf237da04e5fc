"""Delta rules on a GPU. The gated delta rule: rows of one token by one kernel, longer ones by two that take chunks.
Delta attention: the kernels of linear attention.

Legend: that of triton_prepare.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from ridgeline.kernels.base.launch import compute_capability, launch_options, num_multiprocessors, shared_memory
from ridgeline.kernels.scans.gated_delta import triton_step
from ridgeline.kernels.scans.gated_delta.op import NORM_EPS, DeltaInputs
from ridgeline.kernels.scans.gated_delta.plan import Gpu, Plan, choose
from ridgeline.kernels.scans.gated_delta.triton_chunks import _gated_delta_chunks
from ridgeline.kernels.scans.gated_delta.triton_prepare import CHUNK, _gated_delta_prepare
from ridgeline.kernels.scans.gated_delta.work import Work, run_on_hopper
from ridgeline.kernels.scans.linear_attention import triton as linear
from ridgeline.kernels.scans.linear_attention.triton_step import Rule
from ridgeline.kernels.scans.metadata import ScanMetadata

SHORT = 1  # rows of so many tokens go token by token, whatever else is in the step


def gated_delta(
    given: DeltaInputs,
    states_NGKV: Tensor,
    metadata: ScanMetadata,
    step_cut: triton_step.Cut = triton_step.CUT,
    plan: Plan | None = None,
) -> Tensor:
    o_TGV = _room(given)
    if metadata.tokens_each <= 1:
        triton_step.step(given, states_NGKV, metadata, o_TGV, SHORT, step_cut, metadata.tokens_each == 1)
    if metadata.tokens_each != 1:
        _in_chunks(given, states_NGKV, metadata, o_TGV, plan)
    return o_TGV


def gated_delta_in_order(given: DeltaInputs, states_NGKV: Tensor, metadata: ScanMetadata) -> Tensor:
    """Run all rows token by token, always in the same kernel: a row's bits do not depend on its chunks."""
    o_TGV = _room(given)
    triton_step.step(given, states_NGKV, metadata, o_TGV)
    return o_TGV


def delta_attention(given: DeltaInputs, states_NGKV: Tensor, metadata: ScanMetadata) -> Tensor:
    """Run linear attention's kernels, with the delta rule."""
    return linear.run(rule_of(given), states_NGKV, metadata)


def delta_attention_in_order(given: DeltaInputs, states_NGKV: Tensor, metadata: ScanMetadata) -> Tensor:
    """Run all rows token by token, always in the same kernel: a row's bits do not depend on its chunks."""
    return linear.run_in_order(rule_of(given), states_NGKV, metadata)


def rule_of(given: DeltaInputs) -> Rule:
    of_tokens = given.q_THK, given.k_THK, given.v_TGV, given.a
    return Rule(*of_tokens, given.scale, given.b_TG, given.log_rate_G, given.dt_bias, NORM_EPS)


def _room(given: DeltaInputs) -> Tensor:
    return torch.empty(given.v_TGV.shape, dtype=given.v_TGV.dtype, device=given.v_TGV.device)


def _in_chunks(
    given: DeltaInputs, states_NGKV: Tensor, metadata: ScanMetadata, o_TGV: Tensor, plan: Plan | None
) -> None:
    (value_heads, values), keys, device = o_TGV.shape[1:], given.k_THK.shape[2], o_TGV.device
    if given.q_THK.stride(0) != given.k_THK.stride(0):
        given = replace(given, q_THK=given.q_THK.contiguous(), k_THK=given.k_THK.contiguous())
    tokens, dtype = metadata.num_tokens, given.k_THK.dtype
    if plan is None:
        gpu = Gpu(compute_capability(device), num_multiprocessors(device), shared_memory(device))
        plan = choose(metadata.num_rows, tokens, value_heads, keys, values, dtype, gpu)
    solve_GTL, within_GTL = (torch.empty((value_heads, tokens, CHUNK), dtype=dtype, device=device) for _ in range(2))
    factors_GFT = torch.empty((value_heads, 4, tokens), dtype=torch.float32, device=device)
    work = Work(given, states_NGKV, metadata, o_TGV, solve_GTL, within_GTL, factors_GFT, SHORT)
    chunks = len(metadata.chunks(CHUNK).first_C)
    each = -(-chunks // plan.parts(tokens))
    for begin in range(0, chunks, each):
        _prepare(work, plan, begin, min(each, chunks - begin))
        if plan.hopper:
            run_on_hopper(work, plan, begin // each, each)
        else:
            _multiply(work, plan)


def _prepare(work: Work, plan: Plan, begin: int, number: int) -> None:
    """Compute of `number` chunks what needs no state. Behind the first part, one more program for each head waits for
    the kernel in front."""
    given, metadata, shape, device = work.given, work.metadata, work.shape, work.o_TGV.device
    limit = {"maxnreg": plan.registers} if plan.registers and compute_capability(device) >= (8, 0) else {}
    share = plan.share if shape["G"] // shape["H"] % plan.share == 0 else 1
    del shape["V"]
    of_tokens = given.q_THK, given.k_THK, given.a, given.b_TG
    _gated_delta_prepare[(shape["G"] // share, number + (begin > 0))](
        *of_tokens, given.log_rate_G, given.dt_bias, work.solve_GTL, work.within_GTL, work.factors_GFT,
        metadata.start_R1, *metadata.chunks(CHUNK).of_chunks, *(x_T.stride(0) for x_T in of_tokens),
        metadata.num_tokens, begin, given.scale, NORM_EPS, **shape, BK=triton.next_power_of_2(shape["K"]),
        PART=plan.block, SHARE=share, AHEAD=begin > 0, num_warps=plan.prepare_warps, **limit, **launch_options(device),
    )  # fmt: skip


def _multiply(work: Work, plan: Plan) -> None:
    """Run all chunks in order."""
    given, metadata, shape = work.given, work.metadata, work.shape
    _gated_delta_chunks[(triton.cdiv(shape["V"], plan.columns), shape["G"], metadata.num_rows)](
        given.q_THK, given.k_THK, given.v_TGV, work.solve_GTL, work.within_GTL, work.factors_GFT, work.states_NGKV,
        work.o_TGV, *metadata.of_rows, given.k_THK.stride(0), given.v_TGV.stride(0), work.states_NGKV.stride(0),
        metadata.num_tokens, **shape, BK=triton.next_power_of_2(shape["K"]), BV=plan.columns,
        STAGES=plan.stages, num_warps=plan.warps, **launch_options(work.o_TGV.device),
    )  # fmt: skip
