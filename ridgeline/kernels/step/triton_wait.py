"""The tokens of a plain step that wait for a draft network, in one launch. The legend is that of wait.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.step.wait import KeptFeatures, WaitingTokens

BLOCK = 4096  # numbers of a feature that a program moves at once: 16 bytes a thread and load


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "token_ptr", "live_ptr", "feature_ptr"])
def _step_wait(
    slots_ptr, token_ptr, live_ptr, feature_ptr, waiting_ptr, before_ptr, count_ptr, kept_ptr, known_ptr, drafts_ptr,
    stride_waiting, stride_feature, stride_before,
    M: tl.constexpr, D: tl.constexpr, DRAFTS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `step_wait`: a program has a row, so no other one reads the count that it raises."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    draft = tl.arange(0, DRAFTS)
    tl.store(drafts_ptr + slot * D + draft, tl.full([DRAFTS], -1, tl.int32), mask=draft < D)
    if tl.load(live_ptr + row) != 0:
        count = tl.load(count_ptr + slot)
        place = count % (stride_waiting - 1)
        waits = count >= 0
        if KEPT:
            waits = tl.load(known_ptr + slot) != 0
        for first in range(0, M, BLOCK):
            column = first + tl.arange(0, BLOCK)
            there = column < M
            feature = tl.load(feature_ptr + row * stride_feature + column, mask=there)
            before = feature
            if KEPT:
                before = tl.load(kept_ptr + slot * M + column, mask=there)
                tl.store(kept_ptr + slot * M + column, feature, mask=there)
            if waits:
                tl.store(before_ptr + slot * stride_before + place * M + column, before, mask=there)
        if KEPT:
            tl.store(known_ptr + slot, True)
        if waits:
            tl.store(waiting_ptr + slot * stride_waiting + place, tl.load(token_ptr + row).to(tl.int32))
            tl.store(count_ptr + slot, count + 1)


def step_wait(
    slots_R: Tensor,
    token_R: Tensor,
    live_R: Tensor,
    feature_RM: Tensor | None,
    waiting: WaitingTokens,
    kept: KeptFeatures | None,
) -> None:
    """Compute `wait.step_wait`."""
    token_SB, before_SBM, count_S, drafts_SD = waiting
    drafts = drafts_SD.shape[1]
    width = 0 if before_SBM is None else before_SBM.shape[2]
    feature, before = (token_R, token_SB) if feature_RM is None or before_SBM is None else (feature_RM, before_SBM)
    feature_SM, known_S = (before, live_R) if kept is None else kept
    _step_wait[(len(slots_R),)](
        slots_R, token_R, live_R, feature, token_SB, before, count_S, feature_SM, known_S, drafts_SD,
        token_SB.stride(0), feature.stride(0), before.stride(0),
        M=width, D=drafts, DRAFTS=triton.next_power_of_2(drafts), KEPT=kept is not None, BLOCK=BLOCK, num_warps=8,
        **launch_options(slots_R.device),
    )  # fmt: skip


def _aot(width: int, *, kept: bool) -> AotKernel:
    kinds = {
        "slots_ptr": "*i32", "token_ptr": "*i64", "live_ptr": "*i1", "feature_ptr": "*bf16", "waiting_ptr": "*i32",
        "before_ptr": "*bf16", "count_ptr": "*i64", "kept_ptr": "*bf16", "known_ptr": "*i1", "drafts_ptr": "*i32",
        "stride_waiting": "i32",
        "stride_feature": "i32:16", "stride_before": "i32:16",
    }  # fmt: skip
    constants: dict[str, int | None] = {"M": width, "D": 5, "DRAFTS": 8, "KEPT": kept, "BLOCK": BLOCK}
    return AotKernel(_step_wait, kinds, constants, num_warps=8, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(12288, kept=True),)
