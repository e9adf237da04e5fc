"""A step's bookkeeping, in one launch before the network, one more for each group of recurrent states, and two behind
it. The legend is that of op.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel
from ridgeline.kernels.base.launch import launch_options
from ridgeline.kernels.base.tree import Tree
from ridgeline.kernels.base.triton_math import popcount
from ridgeline.kernels.step.op import (
    HEADER,
    NO_DRAFTS,
    SlotAdvance,
    SlotDrafts,
    SlotTables,
    StepInputs,
    StepMetadata,
    StepRows,
)

TOGETHER = 4  # rows that a program advances
METADATA_ROWS = 32  # rows whose states a program looks up


# Arguments that are packed into one buffer begin at any multiple of 4 bytes: one compilation serves all alignments.
_PACKED_INPUTS = ["slots_ptr", "start_ptr", "override_ptr", "token_ids_ptr", "positions_ptr", "places_ptr", "last_ptr"]
_PACKED_TURNS = ["slots_ptr", "start_ptr", "last_ptr", "place_ptr", "marks_ptr", "writes_ptr", "marked_ptr"]
_PACKED_OUTCOME = ["token_ptr", "samples_ptr", "slots_ptr", "out_token_ptr", "out_finish_ptr"]


@triton.jit(do_not_specialize=["num_rows", "num_tokens"], do_not_specialize_on_alignment=_PACKED_INPUTS)
def _step_inputs(
    slots_ptr, start_ptr, override_ptr, kv_len_ptr, last_token_ptr, stopped_ptr,
    tables_ptr, stride_group, stride_slot,
    token_ids_ptr, positions_ptr, places_ptr, new_len_ptr, last_ptr, active_ptr, live_ptr,
    num_rows, num_tokens, drafts_ptr, stride_drafts, tree_ptr, stride_tree, base_ptr, out_bits_ptr, out_base_ptr,
    P: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, DRAFTS: tl.constexpr, NODES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute `step_inputs`. Program (r, c) takes every num_programs(1)-th block of row r's tokens, from the c-th on.
    Programs with r == num_rows take the tokens of no row. DRAFTS is how many drafts a slot has, or 0 without them.
    NODES is how many nodes its tree has, or 0 without trees. base_ptr may be None."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    owned = row < num_rows
    start = tl.load(start_ptr + row)
    end = num_tokens
    slot = tl.zeros((), tl.int64)
    length = tl.zeros((), tl.int64)
    last_token = tl.zeros((), tl.int64)
    passed = 0  # nodes of the row that have run before
    active = owned
    if owned:
        end = tl.load(start_ptr + row + 1)
        slot = tl.load(slots_ptr + row).to(tl.int64)
        active = tl.load(stopped_ptr + slot) == 0
        length = tl.load(kv_len_ptr + slot)
        last_token = tl.load(last_token_ptr + slot)
        if base_ptr is not None:
            passed = (length - tl.load(base_ptr + slot)).to(tl.int32)
        if tl.program_id(1) == 0:
            tl.store(active_ptr + row, active)
            new_len = tl.where(active, length + (end - start), 1)
            tl.store(new_len_ptr + row, tl.where(end > start, new_len, 0))
            tl.store(last_ptr + row, tl.where(end > start, end - 1, 0).to(tl.int64))
    for first in range(start + tl.program_id(1) * BLOCK, end, BLOCK * tl.num_programs(1)):
        token = first + tl.arange(0, BLOCK)
        mask = token < end
        given = tl.load(override_ptr + token, mask=token < tl.where(owned, end, start), other=-1).to(tl.int64)
        following = last_token
        if DRAFTS:
            offset = token - start + passed
            drafted = (offset > 0) & (given < 0) & (token < tl.where(owned, end, start))
            place = slot * stride_drafts + tl.minimum(offset, DRAFTS) - 1
            draft = tl.load(drafts_ptr + place, mask=drafted, other=0)
            following = tl.where(offset > 0, tl.maximum(draft, 0).to(tl.int64), last_token)
        tl.store(token_ids_ptr + token, tl.where(given >= 0, given, following), mask=mask)
        live = token < tl.where(active, end, start)
        tl.store(live_ptr + token, live, mask=mask)
        index = tl.where(live, length + (token - start), 0)
        position = index
        if NODES:
            inside = live & (given < 0) & (offset > 0)
            node_ptr = tree_ptr + slot * stride_tree + tl.minimum(offset, NODES - 1)
            bits = tl.load(node_ptr, mask=inside, other=1)
            base = tl.where(inside, length - passed, index)
            position = base + popcount(bits) - 1
            tl.store(out_bits_ptr + token, bits, mask=mask)
            tl.store(out_base_ptr + token, base, mask=mask)
        tl.store(positions_ptr + token, position, mask=mask)
        entry = slot * stride_slot + index // P
        for group in tl.static_range(GROUPS):
            block = tl.load(tables_ptr + group * stride_group + entry, mask=live, other=0).to(tl.int64)
            tl.store(places_ptr + group * num_tokens + token, block * P + index % P, mask=mask)


def inputs_config(rows: int, tokens: int) -> tuple[int, int]:
    """Return (BLOCK, programs per row). Short rows take one small block each; several programs share a long prompt."""
    if tokens <= 2 * rows:
        return 32, 1
    return 1024, max(1, min(16, tokens // 1024, 2048 // (rows + 1)))


def step_inputs(rows: StepRows, slots: SlotTables, drafts: SlotDrafts = NO_DRAFTS) -> StepInputs:
    """Compute `op.step_inputs`; the drafts of a slot are contiguous, and so are its nodes. Trees have drafts."""
    (slots_R, _, override_T), (drafts_SD, tree_SN, base_S), tables_ASC = rows, drafts, slots.block_tables_ASC
    groups, num_rows, tokens = len(tables_ASC), len(slots_R), len(override_T)
    of_tree = 0 if tree_SN is None else 2
    by_token = torch.empty(2 + groups + of_tree, tokens, dtype=torch.int64, device=slots_R.device)
    token_ids_T, positions_T, places_AT = by_token[0], by_token[1], by_token[2 : 2 + groups]
    tree = None if tree_SN is None else Tree(*by_token[-2:])
    kv_len_R, last_R = torch.empty(2, num_rows, dtype=torch.int64, device=slots_R.device)
    active_R = torch.empty(num_rows, dtype=torch.bool, device=slots_R.device)
    live_T = torch.empty(tokens, dtype=torch.bool, device=slots_R.device)
    block, programs = inputs_config(num_rows, tokens)
    _step_inputs[(num_rows + 1, programs)](
        *rows, *slots[:4], *tables_ASC.stride()[:2],
        token_ids_T, positions_T, places_AT, kv_len_R, last_R, active_R, live_T,
        num_rows, tokens, drafts_SD, 0 if drafts_SD is None else drafts_SD.stride(0),
        tree_SN, 0 if tree_SN is None else tree_SN.stride(0), base_S, *(tree or (None, None)),
        P=slots.block_size, GROUPS=groups, BLOCK=block, DRAFTS=0 if drafts_SD is None else drafts_SD.shape[1],
        NODES=0 if tree_SN is None else tree_SN.shape[1],
        num_warps=max(1, block // 128), **launch_options(slots_R.device),
    )  # fmt: skip
    return StepInputs(token_ids_T, positions_T, places_AT, kv_len_R, last_R, active_R, live_T, tree)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_PACKED_TURNS)
def _step_metadata(
    slots_ptr, start_ptr, kv_len_ptr, last_ptr, place_ptr, marks_ptr, table_ptr,
    reads_ptr, writes_ptr, fresh_ptr, kept_ptr, marked_ptr, num_rows, stride_slot,
    P: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `step_metadata`, ROWS rows per program."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    slot = tl.load(slots_ptr + row, mask=mask, other=0).to(tl.int64)
    count = tl.load(start_ptr + row + 1, mask=mask, other=0) - tl.load(start_ptr + row, mask=mask, other=0)
    kv_len = tl.load(kv_len_ptr + row, mask=mask, other=0)
    last = tl.load(last_ptr + row, mask=mask, other=0)
    before = kv_len - count
    writes = tl.load(place_ptr + last, mask=mask & (kv_len > 0), other=0) // P
    reads = tl.load(table_ptr + slot * stride_slot + tl.maximum(before - 1, 0) // P, mask=mask, other=0)
    mark = tl.zeros((ROWS,), tl.int32)
    if marks_ptr is not None:
        mark = tl.load(marks_ptr + row, mask=mask & (writes != 0), other=0)
    column = tl.maximum(before + mark - 1, 0) // P
    marked = tl.load(table_ptr + slot * stride_slot + column, mask=mask & (mark > 0), other=0)
    tl.store(reads_ptr + row, reads.to(tl.int64), mask=mask)
    tl.store(writes_ptr + row, writes, mask=mask)
    tl.store(fresh_ptr + row, before <= 0, mask=mask)
    tl.store(kept_ptr + row, mark, mask=mask)
    tl.store(marked_ptr + row, marked.to(tl.int64), mask=mask)


def step_metadata(
    slots_R: Tensor,
    start_R1: Tensor,
    kv_len_R: Tensor,
    last_R: Tensor,
    place_T: Tensor,
    marks_R: Tensor | None,
    block_table_SC: Tensor,
    block_size: int,
) -> StepMetadata:
    """Compute `op.step_metadata`; the null block is block 0."""
    rows, device = len(slots_R), slots_R.device
    reads_R, writes_R, marked_R = torch.empty(3, rows, dtype=torch.int64, device=device)
    fresh_R = torch.empty(rows, dtype=torch.bool, device=device)
    kept_R = torch.empty(rows, dtype=torch.int32, device=device)
    _step_metadata[(triton.cdiv(rows, METADATA_ROWS),)](
        slots_R, start_R1, kv_len_R, last_R, place_T, marks_R, block_table_SC,
        reads_R, writes_R, fresh_R, kept_R, marked_R, rows, block_table_SC.stride(0),
        P=block_size, ROWS=METADATA_ROWS, num_warps=1, **launch_options(device),
    )  # fmt: skip
    return StepMetadata(reads_R, writes_R, fresh_R, kept_R, marked_R)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=_PACKED_OUTCOME)
def _step_advance(
    token_ptr, samples_ptr, slots_ptr, new_len_ptr, active_ptr, stop_ids_ptr, max_len_ptr,
    kv_len_ptr, last_token_ptr, stopped_ptr, count_ptr, out_token_ptr, out_finish_ptr,
    num_rows, stop_stride, count_stride,
    E: tl.constexpr, STOPS: tl.constexpr, ROWS: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `step_advance`, ROWS rows per program. STOPS is a power of two that covers the E stop ids. Codes are
    those of `Finish`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    slot = tl.load(slots_ptr + row, mask=mask, other=0).to(tl.int64)
    token = tl.load(token_ptr + row, mask=mask, other=0).to(tl.int64)
    new_len = tl.load(new_len_ptr + row, mask=mask, other=0)
    active = mask & (tl.load(active_ptr + row, mask=mask, other=0) != 0)
    emits = active & (tl.load(samples_ptr + row, mask=mask, other=0) != 0)
    column = tl.arange(0, STOPS)[None, :]
    stop_ids = tl.load(
        stop_ids_ptr + slot[:, None] * stop_stride + column, mask=emits[:, None] & (column < E), other=-1
    )
    stops = tl.sum((stop_ids == token[:, None]).to(tl.int32), 1) > 0
    full = new_len + 1 >= tl.load(max_len_ptr + slot, mask=emits, other=0)
    finish = tl.where(emits, tl.where(token < 0, 3, tl.where(stops, 1, tl.where(full, 2, 0))), 0)
    tl.store(out_token_ptr + row, tl.where(emits, token, -1).to(tl.int32), mask=mask)
    tl.store(out_finish_ptr + row, finish.to(tl.int8), mask=mask)
    tl.store(kv_len_ptr + slot, new_len, mask=active & (new_len > 0))
    drawn = emits & (token >= 0)
    tl.store(last_token_ptr + slot, token, mask=drawn)
    tl.store(stopped_ptr + slot, (finish != 0).to(tl.int32), mask=emits & (finish != 0))
    if COUNT:
        tl.atomic_add(count_ptr + slot * count_stride + token, 1, mask=drawn, sem="relaxed")


def step_advance(
    token_R: Tensor, samples_R: Tensor, advance: SlotAdvance, out_token_R: Tensor, out_finish_R: Tensor
) -> None:
    rows, width, counts_SV = len(advance.slots_R), advance.stop_ids_SE.shape[1], advance.output_count_SV
    _step_advance[(triton.cdiv(rows, TOGETHER),)](
        token_R, samples_R, *advance, out_token_R, out_finish_R,
        rows, advance.stop_ids_SE.stride(0), 0 if counts_SV is None else counts_SV.stride(0),
        E=width, STOPS=triton.next_power_of_2(width), ROWS=TOGETHER, COUNT=counts_SV is not None,
        num_warps=1, **launch_options(token_R.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_bytes"])
def _step_post(
    packed_ptr, ring_ptr, turn_ptr, num_bytes, stride,
    KEPT: tl.constexpr, HEADER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `step_post` in one program: its end makes the writes visible to the host."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    turn = tl.load(turn_ptr)
    row_ptr = ring_ptr + turn % KEPT * stride
    for start in range(0, num_bytes, BLOCK):
        byte = start + tl.arange(0, BLOCK)
        inside = byte < num_bytes
        tl.store(row_ptr + HEADER + byte, tl.load(packed_ptr + byte, mask=inside, other=0), mask=inside)
    tl.store(row_ptr.to(tl.pointer_type(tl.int64)), turn)
    tl.debug_barrier()  # until every thread has read the turn
    tl.store(turn_ptr, turn + 1)


def step_post(packed_O: Tensor, ring_QO: Tensor, turn_1: Tensor) -> None:
    """Compute `op.step_post`. The host need not know the turn."""
    _step_post[(1,)](
        packed_O, ring_QO, turn_1, len(packed_O), ring_QO.stride(0),
        KEPT=len(ring_QO), HEADER=HEADER, BLOCK=512, num_warps=4, **launch_options(packed_O.device),
    )  # fmt: skip


def _aot_inputs(groups: int, rows: int, tokens: int, drafts: int = 0, *, tree: bool = False) -> AotKernel:
    block, _ = inputs_config(rows, tokens)
    signature = {"slots_ptr": "*i32", "start_ptr": "*i32", "override_ptr": "*i32"}
    signature |= {"kv_len_ptr": "*i64", "last_token_ptr": "*i64", "stopped_ptr": "*i32"}
    signature |= {"tables_ptr": "*i32", "stride_group": "i32", "stride_slot": "i32"}
    signature |= dict.fromkeys(("token_ids_ptr", "positions_ptr", "places_ptr", "new_len_ptr", "last_ptr"), "*i64")
    signature |= {"active_ptr": "*i1", "live_ptr": "*i1", "num_rows": "i32", "num_tokens": "i32"}
    constants: dict[str, int | None] = {"P": 16, "GROUPS": groups, "BLOCK": block, "DRAFTS": drafts}
    constants |= {"NODES": 1 + drafts if tree else 0}
    signature |= {"stride_drafts": "i32", "stride_tree": "i32"}
    of_tree = ("tree_ptr", "base_ptr", "out_bits_ptr", "out_base_ptr")
    if tree:
        signature |= dict.fromkeys(of_tree, "*i64")
    else:
        constants |= dict.fromkeys(of_tree)
    if drafts:
        signature["drafts_ptr"] = "*i32"
    else:
        constants["drafts_ptr"] = None
    return AotKernel(_step_inputs, signature, constants, num_warps=max(1, block // 128), hot=True, archs=ONE_OF_EACH)


def _aot_turns() -> AotKernel:
    kinds = {"slots_ptr": "*i32", "start_ptr": "*i32", "kv_len_ptr": "*i64", "last_ptr": "*i64", "place_ptr": "*i64"}
    kinds |= {"table_ptr": "*i32", "reads_ptr": "*i64", "writes_ptr": "*i64", "fresh_ptr": "*i1", "kept_ptr": "*i32"}
    kinds |= {"marked_ptr": "*i64", "num_rows": "i32", "stride_slot": "i32:16"}
    constants = {"marks_ptr": None, "P": 64, "ROWS": METADATA_ROWS}
    return AotKernel(_step_metadata, kinds, constants, num_warps=1, hot=True, archs=ONE_OF_EACH)


def _aot_advance(*, count: bool) -> AotKernel:
    kinds = {
        "token_ptr": "*i64", "samples_ptr": "*i1", "slots_ptr": "*i32", "new_len_ptr": "*i64", "active_ptr": "*i1",
        "stop_ids_ptr": "*i64", "max_len_ptr": "*i64", "kv_len_ptr": "*i64", "last_token_ptr": "*i64",
        "stopped_ptr": "*i32", "count_ptr": "*i32", "out_token_ptr": "*i32", "out_finish_ptr": "*i8",
        "num_rows": "i32", "stop_stride": "i32:16", "count_stride": "i32",
    }  # fmt: skip
    constants: dict[str, int | None] = {"E": 64, "STOPS": 64, "ROWS": TOGETHER, "COUNT": count}
    if not count:
        del kinds["count_ptr"]
        constants["count_ptr"] = None
    return AotKernel(_step_advance, kinds, constants, num_warps=1, hot=True, archs=ONE_OF_EACH)


def _aot_post() -> AotKernel:
    kinds = {"packed_ptr": "*u8", "ring_ptr": "*u8", "turn_ptr": "*i64", "num_bytes": "i32", "stride": "i32:16"}
    return AotKernel(
        _step_post, kinds, {"KEPT": 128, "HEADER": HEADER, "BLOCK": 512}, num_warps=4, hot=True, archs=ONE_OF_EACH
    )


AOT = (
    _aot_inputs(1, 256, 256),
    _aot_inputs(7, 8, 8192),
    _aot_inputs(1, 256, 1536, drafts=5),
    _aot_inputs(1, 16, 512, drafts=31, tree=True),
    _aot_advance(count=False),
    _aot_advance(count=True),
    _aot_post(),
    _aot_turns(),
)
