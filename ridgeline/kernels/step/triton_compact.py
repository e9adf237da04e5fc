"""The moves behind verified trees, in one launch for all layers of a cache group. The legend is that of compact.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.launch import launch_options

HELD = 4096  # words that a program holds at once


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "num_logits_ptr", "path_ptr"])
def _step_compact(
    slots_ptr, new_len_ptr, num_logits_ptr, path_ptr, table_ptr, units_ptr,
    block_size, layer_step, stride_path, stride_table, stride_unit, stride_part, stride_head, stride_token,
    K: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, W: tl.constexpr, WORDS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `step_compact`: a program moves some words of a row's tokens in one layer. It has read all of them before
    it writes any. COLUMNS is a power of two that covers the K columns. WORDS is how many words a token has."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    node = tl.load(path_ptr + row * stride_path + column, mask=column < K, other=-1)
    moves = node > column
    if tl.max(moves.to(tl.int32), 0) > 0:
        slot = tl.load(slots_ptr + row).to(tl.int64)
        base = tl.load(new_len_ptr + row) - tl.load(num_logits_ptr + row)
        ahead = tl.program_id(1).to(tl.int64) * layer_step
        word = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        head = word // W
        inner = head // HEADS * stride_part + head % HEADS * stride_head + word % W
        inside = moves[:, None] & (word < WORDS)[None, :]
        table_ptr += slot * stride_table
        source, target = base + node, base + column
        from_id = tl.load(table_ptr + source // block_size, mask=moves, other=0) + ahead
        to_id = tl.load(table_ptr + target // block_size, mask=moves, other=0) + ahead
        from_ptr = units_ptr + from_id * stride_unit + source % block_size * stride_token
        to_ptr = units_ptr + to_id * stride_unit + target % block_size * stride_token
        words = tl.load(from_ptr[:, None] + inner[None, :], mask=inside, other=0)
        tl.debug_barrier()  # a node's place may be that to which another one goes
        tl.store(to_ptr[:, None] + inner[None, :], words, mask=inside)


def step_compact(
    slots_R: Tensor,
    kv_len_R: Tensor,
    num_logits_R: Tensor,
    path_RK: Tensor,
    block_table_SC: Tensor,
    block_size: int,
    units_NJGPW: Tensor,
    layers: int,
    layer_step: int,
) -> None:
    """Compute `compact.step_compact`."""
    (rows, columns), (_, parts, heads, _, width) = path_RK.shape, units_NJGPW.shape
    words, padded = parts * heads * width, triton.next_power_of_2(columns)
    block = min(triton.next_power_of_2(words), max(1, HELD // padded))
    _step_compact[(rows, layers, triton.cdiv(words, block))](
        slots_R, kv_len_R, num_logits_R, path_RK, block_table_SC, units_NJGPW,
        block_size, layer_step, path_RK.stride(0), block_table_SC.stride(0), *units_NJGPW.stride()[:4],
        K=columns, COLUMNS=padded, HEADS=heads, W=width, WORDS=words,
        BLOCK=block, num_warps=4, **launch_options(slots_R.device),
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
    return AotKernel(_step_compact, kinds, constants, num_warps=4, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(7, 8, 32, "*i64"), _aot(17, 8, 16, "*i64"))
