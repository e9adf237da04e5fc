"""The copies behind verified drafts, in one launch for all layers of a cache group. The legend is that of keep.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.step.units import GroupUnits

BLOCK = 1024  # words of a program


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "num_logits_ptr"])
def _step_keep(
    slots_ptr, new_len_ptr, active_ptr, num_logits_ptr, kv_len_ptr, table_ptr, scratch_ptr, units_ptr,
    block_size, layer_step, stride_table, stride_scratch, stride_units,
    D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `step_keep`: a program copies some words of a row in one layer, for one draft after the other."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    before = tl.load(new_len_ptr + row) - tl.load(num_logits_ptr + row)
    kept = tl.where(tl.load(active_ptr + row) != 0, tl.load(kv_len_ptr + slot) - before, 0)
    for draft in range(D):
        position = before + 1 + draft
        ends = ((position + 1) % block_size == 0) | (draft + 2 == kept)
        if (draft + 1 < kept) & ends:
            target = tl.load(table_ptr + slot * stride_table + position // block_size).to(tl.int64)
            if target != 0:
                source = tl.load(scratch_ptr + draft * stride_scratch + row)
                from_ptr = units_ptr + (source + layer * layer_step) * stride_units + word
                to_ptr = units_ptr + (target + layer * layer_step) * stride_units + word
                tl.store(to_ptr, tl.load(from_ptr, mask=word < W), mask=word < W)


def step_keep(
    slots_R: Tensor,
    kv_len_R: Tensor,
    active_R: Tensor,
    num_logits_R: Tensor,
    kv_len_S: Tensor,
    scratch_DR: Tensor,
    units: GroupUnits,
) -> None:
    """Compute `keep.step_keep`."""
    units_NW, block_table_SC, block_size, layers, layer_step = units
    (drafts, rows), words = scratch_DR.shape, units_NW.shape[1]
    _step_keep[(rows, layers, triton.cdiv(words, BLOCK))](
        slots_R, kv_len_R, active_R, num_logits_R, kv_len_S, block_table_SC, scratch_DR, units_NW,
        block_size, layer_step, block_table_SC.stride(0), scratch_DR.stride(0), units_NW.stride(0),
        D=drafts, W=words, BLOCK=BLOCK, num_warps=4, **launch_options(slots_R.device),
    )  # fmt: skip


def _aot(drafts: int, words: int) -> AotKernel:
    kinds = {
        "slots_ptr": "*i32", "new_len_ptr": "*i64", "active_ptr": "*i1", "num_logits_ptr": "*i32",
        "kv_len_ptr": "*i64", "table_ptr": "*i32", "scratch_ptr": "*i64", "units_ptr": "*i64", "block_size": "i32:16",
        "layer_step": "i32", "stride_table": "i32:16", "stride_scratch": "i32", "stride_units": "i32",
    }  # fmt: skip
    constants: dict[str, int | None] = {"D": drafts, "W": words, "BLOCK": BLOCK}
    return AotKernel(_step_keep, kinds, constants, num_warps=4, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(5, 268288),)
