"""Drafts from recent outputs, in two launches: one program notes what rows emitted, and a program for each row drafts.

Entries are noted before any is read, so that drafts do not depend on the order of programs. Within the first launch all
places are emptied before one is written: then the largest of the step's entries stays, by atomic operations, and none
of an earlier step.

The hash of an n-gram is a polynomial, so that of the next one takes one product, whatever n is. A chain of drafts is as
many reads one behind the other, each from a random place of the table.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.step.lookup import recent
from ridgeline.kernels.step.lookup.op import NotedTexts

LANES = 512  # tokens that are noted together: those of most steps, and as many as fit into registers
WARPS = 8
BASE, MIX = tl.constexpr(recent.BASE), tl.constexpr(recent.MIX)


@triton.jit
def _mixed(polynomial, salt):
    """Return the hash of n-grams, of whose tokens the polynomial is made."""
    key = polynomial ^ salt.to(tl.uint64, bitcast=True)
    key = (key ^ (key >> 31)) * MIX
    key = (key ^ (key >> 27)) * MIX
    return key ^ (key >> 33)


@triton.jit
def _check(key):
    """Return the part of a hash that an entry holds."""
    return ((key >> 32) & 0x7FFFFFFF).to(tl.int64) << 32


# As in triton.py: arguments that are packed into one buffer begin at any multiple of 4 bytes.
@triton.jit(
    do_not_specialize=["rows", "length", "last_place"],
    do_not_specialize_on_alignment=["out_token_ptr", "slots_ptr"],
)
def _note_recent(
    out_token_ptr, slots_ptr, kv_len_ptr, text_ptr, salt_ptr, next_ptr,
    stride_out, stride_text, rows, length, last_place,
    K: tl.constexpr, LANES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Note all emitted tokens."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for writes in tl.static_range(2):
        for begin in range(0, rows * K, LANES):
            lane = begin + tl.arange(0, LANES)
            row, column = lane // K, lane % K
            here = row < rows
            count = tl.zeros((LANES,), tl.int32)
            for other in range(K):
                emitted = tl.load(out_token_ptr + row * stride_out + other, mask=here, other=-1)
                count += (emitted >= 0).to(tl.int32)
            here = here & (column < count)
            slot = tl.load(slots_ptr + row, mask=here, other=0).to(tl.int64)
            place = tl.load(kv_len_ptr + slot, mask=here, other=0).to(tl.int32) + 1 - count + column
            here = here & (place >= length)
            text = text_ptr + slot * stride_text + place
            polynomial = tl.zeros((LANES,), tl.uint64)
            for back in range(length, 0, -1):
                token = tl.load(text - back, mask=here, other=0)
                polynomial = polynomial * BASE + token.to(tl.uint64)
            key = _mixed(polynomial, tl.load(salt_ptr + slot, mask=here, other=0))
            entry = next_ptr + (key & last_place).to(tl.int64)
            if writes:
                token = tl.load(text, mask=here, other=0)
                tl.atomic_max(entry, _check(key) | token.to(tl.int64), mask=here)
            else:
                tl.atomic_min(entry, tl.full((LANES,), -1, tl.int64), mask=here)
        tl.debug_barrier()  # every place is empty before one is written


@triton.jit(
    do_not_specialize=["length", "last_place"],
    do_not_specialize_on_alignment=["out_token_ptr", "slots_ptr"],
)
def _recent_drafts(
    out_token_ptr, slots_ptr, kv_len_ptr, max_len_ptr, stopped_ptr, text_ptr, shared_ptr, salt_ptr, next_ptr,
    drafts_ptr, stride_out, stride_text, stride_drafts, length, last_place,
    D: tl.constexpr, DRAFTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Draft what follows one row. DRAFTS is a power of two that covers the D drafts."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    known = tl.load(kv_len_ptr + slot).to(tl.int32) + 1
    room = tl.minimum(tl.load(max_len_ptr + slot).to(tl.int32) - known - 1, D)
    asks = (tl.load(out_token_ptr + row * stride_out) >= 0) & (tl.load(stopped_ptr + slot) == 0)
    asks = asks & (tl.load(shared_ptr + slot) < length) & (known >= length)
    wanted = tl.where(asks, room, 0)
    if wanted <= 0:
        return
    gram_ptr = text_ptr + slot * stride_text + known - length
    salt = tl.load(salt_ptr + slot)
    polynomial = tl.zeros((), tl.uint64)
    power = tl.full((), 1, tl.uint64)  # by which the first token of an n-gram is multiplied
    for at in range(length):
        polynomial = polynomial * BASE + tl.load(gram_ptr + at).to(tl.uint64)
        power = tl.where(at > 0, power * BASE, power)
    draft = tl.arange(0, DRAFTS)
    drafts = tl.full((DRAFTS,), -1, tl.int32)
    count = 0
    while count < wanted:
        key = _mixed(polynomial, salt)
        entry = tl.load(next_ptr + (key & last_place).to(tl.int64))
        found = (entry >= 0) & ((entry >> 32 << 32) == _check(key))
        token = (entry & 0x7FFFFFFF).to(tl.int32)
        drafts = tl.where((draft == count) & found, token, drafts)
        # The n-gram's first token leaves it: one of the text, or a draft once the chain is longer than an n-gram
        first = tl.load(gram_ptr + tl.minimum(count, length - 1))
        first = tl.where(count < length, first, tl.sum(tl.where(draft == count - length, drafts, 0), 0))
        polynomial = (polynomial - first.to(tl.uint64) * power) * BASE + token.to(tl.uint64)
        count = tl.where(found, count + 1, D)
    replaced = tl.where(tl.max(drafts, 0) >= 0, D, 0)
    tl.store(drafts_ptr + slot * stride_drafts + draft, drafts, mask=draft < replaced)


def recent_drafts(
    noted: NotedTexts, shared_S: Tensor, salt_S: Tensor, next_H: Tensor, drafts_SD: Tensor, length: int
) -> None:
    """Compute `recent.recent_drafts`. The rows of all tables are contiguous."""
    out_token_RK, slots_R, kv_len_S, _, _, text_SN = noted
    (rows, columns), drafts = out_token_RK.shape, drafts_SD.shape[1]
    options = launch_options(slots_R.device)
    _note_recent[(1,)](
        out_token_RK, slots_R, kv_len_S, text_SN, salt_S, next_H,
        out_token_RK.stride(0), text_SN.stride(0), rows, length, len(next_H) - 1,
        K=columns, LANES=LANES, num_warps=WARPS, **options,
    )  # fmt: skip
    _recent_drafts[(rows,)](
        *noted, shared_S, salt_S, next_H, drafts_SD,
        out_token_RK.stride(0), text_SN.stride(0), drafts_SD.stride(0), length, len(next_H) - 1,
        D=drafts, DRAFTS=triton.next_power_of_2(drafts), num_warps=1, **options,
    )  # fmt: skip


def _aot(columns: int) -> list[AotKernel]:
    tables = {"out_token_ptr": "*i32", "slots_ptr": "*i32", "kv_len_ptr": "*i64"}
    note = {**tables, "text_ptr": "*i32", "salt_ptr": "*i64", "next_ptr": "*i64", "stride_out": "i32",
            "stride_text": "i32:16", "rows": "i32", "length": "i32", "last_place": "i32"}  # fmt: skip
    draft = {**tables, "max_len_ptr": "*i64", "stopped_ptr": "*i32", "text_ptr": "*i32", "shared_ptr": "*i32",
             "salt_ptr": "*i64", "next_ptr": "*i64", "drafts_ptr": "*i32", "stride_out": "i32",
             "stride_text": "i32:16", "stride_drafts": "i32", "length": "i32", "last_place": "i32"}  # fmt: skip
    noting = {"K": columns, "LANES": LANES}
    drafting = {"D": columns - 1, "DRAFTS": triton.next_power_of_2(columns - 1)}
    return [
        AotKernel(_note_recent, note, noting, num_warps=WARPS, hot=True, archs=ONE_OF_EACH),
        AotKernel(_recent_drafts, draft, drafting, num_warps=1, hot=True, archs=ONE_OF_EACH),
    ]


AOT = tuple(_aot(6))
