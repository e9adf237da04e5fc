"""The selected branch of native sparse attention: each query reads a few blocks of keys, all heads of a group the same.

With blocks of 64 tokens and heads of 128 channels a query and its group of heads read 32 KB for each block. With 16
blocks, 4 groups and 65,536 tokens these are 137 GB, and the second-level cache gives about 7.8 TB/s. So the work is
turned around, as in MoBA:

    lists     (block, query) pairs by block, for some thousands of queries of one group at a time (`LISTED`)
    chosen    a few queries of a list, rows are all their heads, meet the keys of the block, which are read once for 32
              queries. A pair leaves an output in the inputs' dtype, and the logarithm of its sum
    always    the blocks that every query reads, the first and its last two, are no lists: 4 queries side by side meet
              all three, and leave one part
    merge     a query's parts, weighted by their sums. The gates of all three branches come in here, so no branch is
              read twice

A pair moves 4 KB of queries, twice 4 KB of outputs and 1 KB of keys and values in place of 32 KB.

    backward  a query sums over its blocks, and a block over its list of queries (triton_gathered.py)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from ridgeline.kernels.attention.triton_gathered import gathered_gradients, listed
from ridgeline.kernels.attention.triton_sdpa import (
    EXACT,
    LOG2E,
    NOTHING,
    Tiles,
    add_tile,
    ahead_of_time,
    load_rows,
    output_products,
    strides_of,
)
from ridgeline.kernels.base.aot import AotKernel
from ridgeline.kernels.base.launch import compute_capability

LISTED = 8192  # queries of one group whose parts lie in memory at a time: 0.5 GB with 16 heads of 128 and 16 blocks
PARTS_BYTES = 1 << 30  # of parts at most, unless those of 64 queries are more
TOGETHER = 32  # queries of a list that a program reads a block for
REGISTERS = 168  # so that three programs of 16-bit numbers fit a multiprocessor; with Triton 3.6 nothing spills


class Branches(NamedTuple):
    """The other two branches, which are added to the selected one.

    coarse, near: outputs of the compressed branch (None: it has no keys) and of the window, [B, H, T, D].
    gates_BHT3: of the compressed, selected and window branch.
    """

    coarse: torch.Tensor | None
    near: torch.Tensor
    gates_BHT3: torch.Tensor


@triton.jit(do_not_specialize=["low", "begin_query"])
def _chosen_kernel(
    q_ptr, k_ptr, v_ptr, parts_ptr, logs_ptr, pairs_ptr, owner_ptr, first_ptr, begins_ptr,
    q_head, q_row, k_row, v_row, low, M, T, begin_query, together, scale,
    SELECTED: tl.constexpr, SLOTS: tl.constexpr, PER_GROUP: tl.constexpr, HEADS: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Some of the queries that chose one block, all heads of a group: parts [queries, SLOTS, PER_GROUP, D], logs
    [queries, SLOTS, PER_GROUP], of each query the first SELECTED slots.

    q_ptr: of the group's first head and the first query, begin_query. low: the number of the list of block 0, and M
    lists are these queries'. pairs, owner, first, begins: see `listed`, with tiles of `together` queries. MASKED: a
    query's own block may be among them.
    """
    tile = tl.load(first_ptr + low) + tl.program_id(0)
    owner = tl.load(owner_ptr + tile)
    if owner < low + M:
        QUERIES: tl.constexpr = ROWS // HEADS
        begin = tl.load(begins_ptr + owner) + (tile - tl.load(first_ptr + owner)) * together
        end = tl.minimum(begin + together, tl.load(begins_ptr + owner + 1))
        keys, channels = (owner - low) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
        k = load_rows(k_ptr, keys.to(tl.int64), channels, k_row, T, D, False, D == WIDTH)
        v = load_rows(v_ptr, keys.to(tl.int64), channels, v_row, T, D, False, D == WIDTH)
        within, head = tl.arange(0, ROWS) // HEADS, tl.arange(0, ROWS) % HEADS
        q_rows = q_ptr + head.to(tl.int64)[:, None] * q_head + channels[None, :]
        there = (begin + within < end) & (head < PER_GROUP)
        pair = tl.load(pairs_ptr + begin + within, mask=there, other=0)
        inside = there[:, None] & (channels[None, :] < D)
        q = tl.load(q_rows + (pair // SELECTED).to(tl.int64)[:, None] * q_row, mask=inside, other=0.0)
        for start in range(begin, end, QUERIES):
            following = start + QUERIES + within  # loaded beside the products
            there_next = (following < end) & (head < PER_GROUP)
            pair_next = tl.load(pairs_ptr + following, mask=there_next, other=0)
            inside = there_next[:, None] & (channels[None, :] < D)
            q_next = tl.load(q_rows + (pair_next // SELECTED).to(tl.int64)[:, None] * q_row, mask=inside, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=EXACT)
            if MASKED:
                scores = tl.where(keys[None, :] <= (begin_query + pair // SELECTED)[:, None], scores, NOTHING)
            top = tl.max(scores, 1) * scale
            weights = tl.exp2(scores * scale - top[:, None])
            total = tl.sum(weights, 1)
            out = tl.dot(weights.to(v.dtype), v, input_precision=EXACT) * (1.0 / total)[:, None]
            to = (pair + pair // SELECTED * (SLOTS - SELECTED)).to(tl.int64) * PER_GROUP + head
            tl.store(logs_ptr + to, top + tl.log2(total), mask=there)
            to = to[:, None] * D + channels[None, :]
            inside = there[:, None] & (channels[None, :] < D)
            tl.store(parts_ptr + to, out.to(parts_ptr.dtype.element_ty), mask=inside)
            q, pair, there = q_next, pair_next, there_next


@triton.jit
def _row_of(pointer, query, head, q_stride, h_stride, channels, inside):
    at = pointer + query.to(tl.int64)[:, None] * q_stride + head.to(tl.int64)[:, None] * h_stride + channels[None, :]
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["begin_query", "count"])
def _always_kernel(
    q_ptr, k_ptr, v_ptr, parts_ptr, logs_ptr, q_head, q_row, k_row, v_row, T, begin_query, count, scale,
    FIRST: tl.constexpr, LAST: tl.constexpr, SLOTS: tl.constexpr, PER_GROUP: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Neighbouring queries with the first and their last blocks, which leave a part in the last of a query's slots.
    Pointers are as in `_chosen_kernel`, for `count` queries."""
    rows, channels = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query, head = rows // HEADS, rows % HEADS
    there = (query < count) & (head < PER_GROUP)
    inside = there[:, None] & (channels[None, :] < D)
    at = query.to(tl.int64) * q_row + head.to(tl.int64) * q_head
    q = tl.load(q_ptr + at[:, None] + channels[None, :], mask=inside, other=0.0)
    position = begin_query + query
    top, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    last = (begin_query + tl.minimum((tl.program_id(0) * ROWS + ROWS - 1) // HEADS, count - 1)) // BLOCK
    oldest = tl.maximum((begin_query + tl.program_id(0) * ROWS // HEADS) // BLOCK - LAST + 1, 0)
    few = tl.minimum(oldest, FIRST)  # first blocks that are none of the last ones
    for i in range(few + last + 1 - oldest):
        block = tl.where(i < few, i, i - few + oldest)
        keys = block * BLOCK + tl.arange(0, BLOCK)
        k = load_rows(k_ptr, keys.to(tl.int64), channels, k_row, T, D, False, D == WIDTH)
        v = load_rows(v_ptr, keys.to(tl.int64), channels, v_row, T, D, False, D == WIDTH)
        scores = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
        seen = (keys[None, :] <= position[:, None]) & ((block < FIRST) | (block > position // BLOCK - LAST))[:, None]
        out, top, total = add_tile(out, top, total, tl.where(seen, scores, NOTHING), 1.0, v, True)
    to = (query.to(tl.int64) * SLOTS + SLOTS - 1) * PER_GROUP + head
    tl.store(logs_ptr + to, top + tl.log2(total), mask=there)
    out = (out * (1.0 / total)[:, None]).to(parts_ptr.dtype.element_ty)
    tl.store(parts_ptr + to[:, None] * D + channels[None, :], out, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _merge_kernel(
    parts_ptr, logs_ptr, chosen_ptr, out_ptr, own_ptr, log_ptr, coarse_ptr, near_ptr, gates_ptr,
    o_head, o_row, w_head, w_row, c_head, c_row, n_head, n_row, g_head, g_row, g_way, chosen_row, T, count,
    SELECTED: tl.constexpr, SLOTS: tl.constexpr, PER_GROUP: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sum of a query's parts, weighted by their sums of exponentials: `own`, and `log` of all these. out: own, or
    with `near` all branches times their gates. Slots behind the SELECTED ones are always filled.

    Pointers are those of the first head of a group and the first of `count` queries; own_ptr, coarse_ptr and all that
    belongs to gates may be None.
    """
    rows, channels = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    query, head = rows // HEADS, rows % HEADS
    there = (query < count) & (head < PER_GROUP)
    inside = there[:, None] & (channels[None, :] < D)
    chosen_ptr += query.to(tl.int64) * chosen_row
    first = query.to(tl.int64) * SLOTS
    top = tl.full([ROWS], NOTHING, tl.float32)
    for slot in tl.static_range(SLOTS):
        taken = there
        if slot < SELECTED:
            taken &= tl.load(chosen_ptr + slot, mask=there, other=-1) >= 0
        top = tl.maximum(top, tl.load(logs_ptr + (first + slot) * PER_GROUP + head, mask=taken, other=NOTHING))
    total, own = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
    for slot in tl.static_range(SLOTS):
        taken = there
        if slot < SELECTED:
            taken &= tl.load(chosen_ptr + slot, mask=there, other=-1) >= 0
        at = (first + slot) * PER_GROUP + head
        weight = tl.exp2(tl.load(logs_ptr + at, mask=taken, other=NOTHING) - top)
        part = tl.load(parts_ptr + at[:, None] * D + channels[None, :], mask=inside & taken[:, None], other=0.0)
        own += part.to(tl.float32) * weight[:, None]
        total += weight
    own *= (1.0 / total)[:, None]
    tl.store(log_ptr + head.to(tl.int64) * T + query, top + tl.log2(total), mask=there)
    if own_ptr is not None:
        at = own_ptr + head.to(tl.int64)[:, None] * w_head + query.to(tl.int64)[:, None] * w_row + channels[None, :]
        tl.store(at, own.to(own_ptr.dtype.element_ty), mask=inside)
    if near_ptr is not None:
        gates_ptr += head.to(tl.int64) * g_head + query.to(tl.int64) * g_row
        own *= tl.load(gates_ptr + g_way, mask=there, other=0.0).to(tl.float32)[:, None]
        gate = tl.load(gates_ptr + 2 * g_way, mask=there, other=0.0).to(tl.float32)
        own += _row_of(near_ptr, query, head, n_row, n_head, channels, inside) * gate[:, None]
        if coarse_ptr is not None:
            gate = tl.load(gates_ptr, mask=there, other=0.0).to(tl.float32)
            own += _row_of(coarse_ptr, query, head, c_row, c_head, channels, inside) * gate[:, None]
    at = out_ptr + head.to(tl.int64)[:, None] * o_head + query.to(tl.int64)[:, None] * o_row + channels[None, :]
    tl.store(at, own.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _selected_queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, log_ptr, delta_ptr, chosen_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    G, T, scale, natural,
    SELECTED: tl.constexpr, PER_GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradient of one query of one group, by its selected blocks; rows are as in `_selected_kernel`."""
    query, batch, group = tl.program_id(0), tl.program_id(1) // G, tl.program_id(1) % G
    rows, channels = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    heads, inside = group * PER_GROUP + rows, (rows[:, None] < PER_GROUP) & (channels[None, :] < D)
    at = q_ptr + batch.to(tl.int64) * q_batch + query.to(tl.int64) * q_row
    q = tl.load(at + heads[:, None].to(tl.int64) * q_head + channels[None, :], mask=inside, other=0.0)
    at = grad_ptr + batch.to(tl.int64) * g_batch + query.to(tl.int64) * g_row
    grad = tl.load(at + heads[:, None].to(tl.int64) * g_head + channels[None, :], mask=inside, other=0.0)
    row = (batch * G * PER_GROUP + heads).to(tl.int64) * T + query
    log = tl.load(log_ptr + row, mask=rows < PER_GROUP, other=float("inf"))
    delta = tl.load(delta_ptr + row, mask=rows < PER_GROUP, other=0.0)
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    chosen_ptr += (tl.program_id(1).to(tl.int64) * T + query) * SELECTED
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    for i in range(SELECTED):
        keys = tl.load(chosen_ptr + i) * BLOCK + tl.arange(0, BLOCK)
        seen = (keys <= query) & (keys >= 0)  # a block of -1 has none
        mask = seen[:, None] & (channels[None, :] < D)
        k = tl.load(k_ptr + keys[:, None].to(tl.int64) * k_row + channels[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + keys[:, None].to(tl.int64) * v_row + channels[None, :], mask=mask, other=0.0)
        weights = tl.exp2(tl.dot(q, tl.trans(k), input_precision=EXACT) * scale - log[:, None])
        weights = tl.where(seen[None, :], weights, 0.0)
        slopes = weights * (tl.dot(grad, tl.trans(v), input_precision=EXACT) - delta[:, None])
        dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision=EXACT)
    at = dq_ptr + row[:, None] * D + channels[None, :]
    tl.store(at, (dq * natural).to(dq_ptr.dtype.element_ty), mask=inside)


# ---- the function ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SelectedBlocks:
    """tokens: of a block. first, last: how many blocks of a text, and up to a query's own, every query reads (none, or
    last at least 1). In its choice they are in front; the same block is there once."""

    tokens: int
    first: int = 0
    last: int = 0


def forward(
    q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, chosen_BGTS: torch.Tensor,
    branches: Branches | None, blocks: SelectedBlocks, scale: float, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output, the selected branch's own (the same without other branches, and empty unless `keep`), and the
    logarithms to base 2 of its sums, float32, [B, H, T]."""
    (batch, heads, tokens, size), groups, device = q_BHTD.shape, k_BGTD.shape[1], q_BHTD.device
    chosen_BGTS = chosen_BGTS[..., blocks.first + blocks.last :]
    selected, per_group, width = chosen_BGTS.shape[-1], heads // groups, max(16, triton.next_power_of_2(size))
    padded, tiles = triton.next_power_of_2(per_group), chosen_tiles(width, q_BHTD.itemsize)
    rows = max(padded, tiles.rows)
    slots, always = selected + min(blocks.last, 1), {"FIRST": blocks.first, "LAST": blocks.last}
    out, log = torch.empty_like(q_BHTD), torch.empty((batch, heads, tokens), dtype=torch.float32, device=device)
    if not tokens:
        return out, out, log
    at_once = min(LISTED, tokens, max(64, PARTS_BYTES // (slots * per_group * size * q_BHTD.itemsize)))
    number, together = -(-tokens // blocks.tokens), max(TOGETHER, rows // padded)
    spans = -(-tokens // at_once)
    spans_BLTS = pad(chosen_BGTS, (0, 0, 0, spans * at_once - tokens), value=-1)
    lists = listed(spans_BLTS.reshape(batch, groups * spans, at_once, selected), number, together) if selected else ()
    own = torch.empty_like(out) if branches is not None and keep else None
    parts = torch.empty((at_once * slots * per_group, size), dtype=q_BHTD.dtype, device=device)
    logs = torch.empty(len(parts), dtype=torch.float32, device=device)
    coarse, near, gates = branches or (None, None, None)
    few = compute_capability(device) == (9, 0) and q_BHTD.itemsize == 2 and size <= 128
    limit = {"maxnreg": REGISTERS} if few else {}
    constants = {"SLOTS": slots, "PER_GROUP": per_group, "HEADS": padded, "D": size, "WIDTH": width}
    products = {"ROWS": rows, "BLOCK": blocks.tokens, **constants, **tiles.launch, **limit}
    for index in range(batch * groups * spans):
        (b, g), begin = divmod(index // spans, groups), index % spans * at_once
        of = (b, slice(g * per_group, (g + 1) * per_group), slice(begin, begin + at_once))
        q, k, v, count = q_BHTD[of], k_BGTD[b, g], v_BGTD[b, g], min(at_once, tokens - begin)
        strides = [*q.stride()[:2], k.stride(0), v.stride(0)]
        if selected:
            _chosen_kernel[(at_once * selected // together + number,)](
                q, k, v, parts, logs, *lists, *strides, index * number, number, tokens, begin, together,
                scale * LOG2E.value, SELECTED=selected, MASKED=blocks.last == 0, **products,
            )  # fmt: skip
        if blocks.last:
            _always_kernel[(triton.cdiv(count * padded, rows),)](
                q, k, v, parts, logs, *strides, tokens, begin, count, scale * LOG2E.value, **always, **products
            )
        given, gated = (
            [x if x is None else x[of] for x in (out, own, coarse, near)],
            None if gates is None else gates[of],
        )
        strides = [stride for x in given for stride in ((0, 0) if x is None else x.stride()[:2])]
        strides += (0, 0, 0) if gated is None else gated.stride()
        _merge_kernel[(triton.cdiv(count * padded, max(16, padded)),)](
            parts, logs, chosen_BGTS[b, g, begin:], *given[:2], log[of], *given[2:], gated, *strides,
            chosen_BGTS.stride(2), tokens, count, SELECTED=selected, ROWS=max(16, padded), **constants, num_warps=4,
        )  # fmt: skip
    return out, out if branches is None else own if own is not None else out[:0], log


def chosen_tiles(width: int, itemsize: int = 2) -> Tiles:
    """Return the tiles of the kernels for heads of so many channels, a power of 2; columns are a block's."""
    return Tiles(16, 64, 8, 1) if itemsize > 2 else Tiles(64, 64, 4, 1)


class _Selected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BHTD: Any, k_BGTD: Any, v_BGTD: Any, coarse: Any, near: Any, gates: Any, chosen_BGTS: Any,
        blocks: SelectedBlocks, scale: float,
    ) -> Any:  # fmt: skip
        chosen_BGTS = chosen_BGTS.contiguous()
        branches = None if near is None else Branches(coarse, near, gates)
        keep = any(ctx.needs_input_grad)
        out, own, log = forward(q_BHTD, k_BGTD, v_BGTD, chosen_BGTS, branches, blocks, scale, keep)
        ctx.save_for_backward(q_BHTD, k_BGTD, v_BGTD, coarse, near, gates, own, log, chosen_BGTS)
        ctx.block, ctx.scale = blocks.tokens, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_BHTD: Any) -> Any:
        q_BHTD, k_BGTD, v_BGTD, coarse, near, gates, own, log, chosen_BGTS = ctx.saved_tensors
        grad_BHTD = grad_BHTD if grad_BHTD.stride(-1) == 1 else grad_BHTD.contiguous()
        (batch, _, tokens, size), groups = q_BHTD.shape, k_BGTD.shape[1]
        of_branches: list[torch.Tensor | None] = [None, None, None]
        if near is not None:
            products = [
                torch.zeros_like(log) if x is None else output_products(x, grad_BHTD) for x in (coarse, own, near)
            ]
            of_branches = [
                None if coarse is None else (grad_BHTD * gates[..., 0, None]).to(coarse.dtype),
                (grad_BHTD * gates[..., 2, None]).to(near.dtype), torch.stack(products, -1).to(gates.dtype),
            ]  # fmt: skip
            grad_BHTD = (grad_BHTD * gates[..., 1, None]).to(q_BHTD.dtype)
        delta, dq = output_products(own, grad_BHTD), torch.empty(q_BHTD.shape, dtype=q_BHTD.dtype, device=q_BHTD.device)
        per_group = q_BHTD.shape[1] // groups
        _selected_queries_kernel[(tokens, batch * groups)](
            q_BHTD, k_BGTD, v_BGTD, grad_BHTD, dq, log, delta, chosen_BGTS,
            *strides_of(q_BHTD, k_BGTD, v_BGTD, grad_BHTD), groups, tokens, ctx.scale * LOG2E.value, ctx.scale,
            SELECTED=chosen_BGTS.shape[-1], PER_GROUP=per_group, ROWS=max(16, triton.next_power_of_2(per_group)),
            BLOCK=ctx.block, D=size, WIDTH=max(16, triton.next_power_of_2(size)), num_warps=4, num_stages=2,
        )  # fmt: skip
        blocks = -(-tokens // ctx.block)
        dk, dv = gathered_gradients(
            (q_BHTD, k_BGTD, v_BGTD), grad_BHTD, log, delta, chosen_BGTS, ctx.block, blocks, ctx.scale
        )
        return dq, dk, dv, *of_branches, None, None, None


def add_selected(
    q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor, chosen_BGTS: torch.Tensor,
    branches: Branches | None, blocks: SelectedBlocks, *, scale: float,
) -> torch.Tensor:  # fmt: skip
    """Return the attention of each query to the blocks chosen for its group, in causal order, and with `branches` the
    sum of all three times their gates: [B, H, T, D]. Gradients flow to all inputs but the choice.

    chosen_BGTS: the query's own block is among them, none lies behind it, and -1 is none.
    """
    given = branches or (None, None, None)
    out: torch.Tensor = _Selected.apply(q_BHTD, k_BGTD, v_BGTD, *given, chosen_BGTS, blocks, scale)
    return out


# ---- ahead of time --------------------------------------------------------------------------------------------------

_STRIDES = dict.fromkeys(
    (f"{x}_{which}" for x in ("q", "k", "v", "o", "w", "c", "n", "g") for which in ("head", "row", "batch")), "i32:16"
)
_TYPES: dict[str, str] = {
    **{f"{x}_ptr": "*bf16" for x in ("q", "k", "v", "parts", "out", "coarse", "near", "gates")},
    **dict.fromkeys(("logs_ptr", "log_ptr"), "*fp32"), "scale": "fp32", **_STRIDES, "g_row": "i32", "g_way": "i32",
    **dict.fromkeys(("pairs_ptr", "owner_ptr", "first_ptr", "begins_ptr", "chosen_ptr"), "*i32"),
    **dict.fromkeys(("low", "M", "T", "begin_query", "together", "count", "chosen_row"), "i32"),
}  # fmt: skip


def _entry(kernel: Any, tiles: Tiles, cores: str, registers: int | None = None, **constants: Any) -> AotKernel:
    given = {"SELECTED": 13, "SLOTS": 14, "FIRST": 1, "LAST": 2, "BLOCK": 64, "PER_GROUP": 16, "HEADS": 16}
    given |= {"ROWS": tiles.rows, "D": 128, "WIDTH": 128}
    constants |= {name: value for name, value in given.items() if name in kernel.arg_names}
    signature = {name: _TYPES[name] for name in kernel.arg_names if name not in constants}
    return AotKernel(
        kernel, signature, constants, tensor_cores=cores, hot=registers is None, archs=("sm_90",), registers=registers,
        **tiles.launch,
    )  # fmt: skip


AOT = (
    _entry(_chosen_kernel, chosen_tiles(128), "HGMMA", REGISTERS, MASKED=False),
    _entry(_always_kernel, chosen_tiles(128), "HGMMA", REGISTERS),
    _entry(_merge_kernel, Tiles(16, 0, 4, 3), "", own_ptr=None),
    ahead_of_time(
        _selected_queries_kernel, Tiles(16, 64, 4, 2), 128, "q k v grad dq !log !delta #chosen", "qkvg", "G T",
        "scale natural", archs=("sm_90",), SELECTED=16, PER_GROUP=16, BLOCK=64,
    ),
)  # fmt: skip
