"""The moves behind verified trees, in one launch for all layers of a cache group. The legend is that of compact.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.step.units import GroupUnits

HELD = 4096  # words that a program holds at once
WARPS = 4


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "num_logits_ptr", "path_ptr"])
def _step_compact(
    slots_ptr, new_len_ptr, num_logits_ptr, path_ptr, table_ptr, units_ptr,
    block_size, layer_step, stride_path, stride_table, stride_unit, stride_part, stride_head, stride_token,
    K: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `step_compact`: a program moves some words of a row's tokens in one layer. COLUMNS is a power of two that
    covers the K columns. WORDS is how many words a token has.

    The place of a node may be that to which a later one goes. So a thread reads all words that it moves before it
    writes any; no other thread reads or writes these.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    path_ptr += tl.program_id(0) * stride_path
    column = tl.arange(0, COLUMNS)
    moves = tl.load(path_ptr + column, mask=column < K, other=-1) > column
    if tl.max(moves.to(tl.int32), 0) > 0:
        slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
        base = tl.load(new_len_ptr + tl.program_id(0)) - tl.load(num_logits_ptr + tl.program_id(0))
        table_ptr += slot * stride_table
        word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        head = word // W
        units_ptr += tl.program_id(1).to(tl.int64) * layer_step * stride_unit
        word_ptr = units_ptr + (head // HEADS * stride_part + head % HEADS * stride_head + word % W)
        words = ()
        for k in tl.static_range(1, K):
            node = tl.load(path_ptr + k)
            block = tl.load(table_ptr + (base + node) // block_size, mask=node > k, other=0).to(tl.int64)
            cell = block * stride_unit + (base + node) % block_size * stride_token
            found = tl.load(word_ptr + cell, mask=word < tl.where(node > k, WORDS, 0), other=0)
            words = words + (found,)  # type: ignore[assignment]  # noqa: RUF005 (the form that Triton knows)
        for k in tl.static_range(1, K):
            node = tl.load(path_ptr + k)
            block = tl.load(table_ptr + (base + k) // block_size, mask=node > k, other=0).to(tl.int64)
            cell = block * stride_unit + (base + k) % block_size * stride_token
            tl.store(word_ptr + cell, words[k - 1], mask=word < tl.where(node > k, WORDS, 0))


def step_compact(slots_R: Tensor, kv_len_R: Tensor, num_logits_R: Tensor, path_RK: Tensor, units: GroupUnits) -> None:
    """Compute `compact.step_compact`."""
    units_NJGPW, block_table_SC, block_size, layers, layer_step = units
    (rows, columns), (_, parts, heads, _, width) = path_RK.shape, units_NJGPW.shape
    words, padded = parts * heads * width, triton.next_power_of_2(columns)
    block = min(triton.next_power_of_2(words), max(1, HELD // padded))
    _step_compact[(rows, layers, triton.cdiv(words, block))](
        slots_R, kv_len_R, num_logits_R, path_RK, block_table_SC, units_NJGPW,
        block_size, layer_step, path_RK.stride(0), block_table_SC.stride(0), *units_NJGPW.stride()[:4],
        K=columns, COLUMNS=padded, HEADS=heads, W=width, WORDS=words,
        BLOCK=block, num_warps=WARPS, **launch_options(slots_R.device),
    )  # fmt: skip


def _aot(columns: int, heads: int, width: int, kind: str) -> AotKernel:
    """Return the entry for keys and values of so many heads."""
    padded, words = triton.next_power_of_2(columns), 2 * heads * width
    kinds = {
        "slots_ptr": "*i32", "new_len_ptr": "*i64", "num_logits_ptr": "*i32", "path_ptr": "*i32", "table_ptr": "*i32",
        "units_ptr": kind, "block_size": "i32:16", "layer_step": "i32", "stride_path": "i32", "stride_table": "i32:16",
        "stride_unit": "i32:16", "stride_part": "i32:16", "stride_head": "i32:16", "stride_token": "i32:16",
    }  # fmt: skip
    block = min(triton.next_power_of_2(words), HELD // padded)
    constants: dict[str, int | None] = {"K": columns, "COLUMNS": padded, "HEADS": heads, "W": width}
    constants |= {"WORDS": words, "BLOCK": block}
    return AotKernel(_step_compact, kinds, constants, num_warps=WARPS, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(7, 8, 32, "*i64"), _aot(17, 8, 16, "*i64"))
