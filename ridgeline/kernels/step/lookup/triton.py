"""Prompt lookup in one launch: each program searches the text of one row, from its end to its beginning.

The program keeps the places of a block that match so far, and takes one more of the last tokens at a time until no
place is left or `longest` tokens match. A block that lies before another one must beat its best match, so ties go to
the latest place, and a match of `longest` tokens ends the search. Only places that still match are read again.

So a text takes one round for every BLOCK tokens. A round takes one reduction over the program for every length at which
some place matches, and one more. Meanwhile the next block's tokens are loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.step.lookup.op import NotedTexts

BLOCK = 4096  # places that a program looks at together
WARPS = 8


# Arguments that are packed into one buffer begin at any multiple of 4 bytes: one compilation serves all alignments.
@triton.jit(
    do_not_specialize=["shortest", "longest"],
    do_not_specialize_on_alignment=["out_token_ptr", "slots_ptr"],
)
def _lookup_drafts(
    out_token_ptr, slots_ptr, kv_len_ptr, max_len_ptr, stopped_ptr, text_ptr, drafts_ptr, shared_ptr,
    stride_out, stride_text, stride_drafts, shortest, longest,
    K: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, DRAFTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute `lookup_drafts` for one row. COLUMNS and DRAFTS are powers of two that cover the K columns and the D
    drafts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    emitted = tl.load(out_token_ptr + row * stride_out + column, mask=column < K, other=-1)
    count = tl.sum((emitted >= 0).to(tl.int32), 0)
    if count == 0:
        return
    slot = tl.load(slots_ptr + row).to(tl.int64)
    known = tl.load(kv_len_ptr + slot).to(tl.int32) + 1
    room = tl.load(max_len_ptr + slot).to(tl.int32) - known - 1
    wanted = tl.where(tl.load(stopped_ptr + slot) != 0, 0, tl.minimum(room, D))
    text_ptr += slot * stride_text
    tl.store(text_ptr + (known - count) + column, emitted, mask=column < count)
    tl.debug_barrier()  # other threads of the program read what some have written

    at = tl.arange(0, BLOCK)
    end = tl.where(wanted > 0, known - 1, 0)  # the last token's own place is no match
    begin = (end - 1) // BLOCK * BLOCK if end > 0 else -BLOCK
    newest = tl.load(text_ptr + known - 1)
    token = tl.load(text_ptr + begin + at, mask=(begin + at >= 0) & (begin + at < end), other=-1)
    best = shortest - 1
    found = 0  # the first token behind the best match
    while (begin >= 0) & (best < longest):
        place = begin + at
        matches = token == newest
        begin -= BLOCK
        token = tl.load(text_ptr + begin + at, mask=begin + at >= 0, other=-1)  # before the next round needs them
        latest = tl.max(tl.where(matches, place, -1), 0)
        length = 0
        while (latest >= 0) & (length < longest):
            length += 1
            found = tl.where(length > best, latest + 1, found)
            best = tl.maximum(best, length)
            before = tl.load(text_ptr + tl.maximum(known - 1 - length, 0))
            matches = matches & (place >= length)
            matches = matches & (tl.load(text_ptr + place - length, mask=matches, other=-1) == before)
            latest = tl.max(tl.where(matches, place, -1), 0)

    tl.store(shared_ptr + slot, tl.where(found > 0, best, 0))
    draft = tl.arange(0, DRAFTS)
    drafted = draft < tl.where(found > 0, wanted, 0)
    following = tl.load(text_ptr + found + draft % (known - found), mask=drafted, other=-1)
    tl.store(drafts_ptr + slot * stride_drafts + draft, following, mask=draft < D)


def lookup_drafts(noted: NotedTexts, drafts_SD: Tensor, shared_S: Tensor, shortest: int, longest: int) -> None:
    """Compute `op.lookup_drafts`. The rows of all tables are contiguous."""
    out_token_RK, text_SN = noted.out_token_RK, noted.text_SN
    (rows, columns), drafts = out_token_RK.shape, drafts_SD.shape[1]
    _lookup_drafts[(rows,)](
        *noted, drafts_SD, shared_S,
        out_token_RK.stride(0), text_SN.stride(0), drafts_SD.stride(0), shortest, longest,
        K=columns, COLUMNS=triton.next_power_of_2(columns), D=drafts, DRAFTS=triton.next_power_of_2(drafts),
        BLOCK=BLOCK, num_warps=WARPS, **launch_options(text_SN.device),
    )  # fmt: skip


def _aot(columns: int) -> AotKernel:
    kinds = {
        "out_token_ptr": "*i32", "slots_ptr": "*i32", "kv_len_ptr": "*i64", "max_len_ptr": "*i64",
        "stopped_ptr": "*i32", "text_ptr": "*i32", "drafts_ptr": "*i32", "shared_ptr": "*i32",
        "stride_out": "i32", "stride_text": "i32:16", "stride_drafts": "i32", "shortest": "i32", "longest": "i32",
    }  # fmt: skip
    constants = {"K": columns, "COLUMNS": triton.next_power_of_2(columns), "BLOCK": BLOCK}
    constants |= {"D": columns - 1, "DRAFTS": triton.next_power_of_2(columns - 1)}
    return AotKernel(_lookup_drafts, kinds, constants, num_warps=WARPS, hot=True, archs=ONE_OF_EACH)


AOT = (_aot(6), _aot(17))
