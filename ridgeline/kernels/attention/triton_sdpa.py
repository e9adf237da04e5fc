"""Attention of whole sequences in Triton, forward and backward: FlashAttention-2 with every mask as an interval.

Each query sees the keys of one interval, whose ends never decrease from a query to the next. Causal order, a window to
either side and documents in one sequence all are such masks, alone and together (`KeyMasks.intervals`). A tile of
queries then meets three ranges of key tiles: the first and the last have a mask to apply, those between them have none,
and all others are never read. A tile of keys finds its queries in the same way, for the backward pass. In float32 the
three are one loop, with a mask: no matrix units multiply, so a mask costs little beside products, and their unrolled
code takes long to compile.

    forward       a program a tile of queries: keys and values pass by once, with the running maximum and sum of each
                  query's scores. It leaves the output and the logarithm of the sum (Dao, FlashAttention-2, 2023).
    backward      scores are computed again from that logarithm. `_keys_kernel` has a tile of keys and sums over
                  queries, `_queries_kernel` has a tile of queries and sums over keys. So no sum needs atomics, and
                  gradients are the same to the bit in every run. On Hopper `hopper_gradients.py` needs five products
                  in place of these seven, and has atomic sums: it is taken unless torch is to be deterministic.

Scores are exponents of 2, so the logarithm of 2 is in the scale. A query that sees no key gives 0 and has no gradient.
A sink, one more score for each head that has no value, is where the running maximum and sum begin; the backward pass
knows it by the logarithm alone.

With `skip_below` a tile of keys is left out behind its scores where each of them weighs too little beside the largest
one so far: its values are not read (BLASST, 2025).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ridgeline.kernels.attention import hopper_gradients
from ridgeline.kernels.base.aot import ONE_OF_EACH, AotKernel

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))
EXACT = tl.constexpr("ieee")  # products of float32; others have one precision


@dataclass(frozen=True)
class KeyMasks:
    """The keys that a query sees. Queries are the last of the keys' positions.

    causal: no key behind the query.
    window: at most so many keys before the query, and as many behind it where causal is off; None: all.
    documents_K: the document of every key, ascending; queries see keys of their own document alone. int, 1-D.
    """

    causal: bool = True
    window: int | None = None
    documents_K: torch.Tensor | None = None

    def intervals(self, queries: int, keys: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the first key that each query sees and the one behind the last. int32, [queries] each.

        Raises ValueError for a negative window, and for documents that do not ascend or are not one a key.
        """
        at_Q = torch.arange(keys - queries, keys, device=device)
        first_Q, behind_Q = torch.zeros_like(at_Q), torch.full_like(at_Q, keys)
        if self.causal:
            behind_Q = at_Q + 1
        if self.window is not None:
            if self.window < 0:
                raise ValueError(f"a window is at least 0 keys, got {self.window}.")
            first_Q = at_Q - self.window
            behind_Q = torch.minimum(behind_Q, at_Q + self.window + 1)
        if self.documents_K is not None:
            if self.documents_K.shape != (keys,) or bool((self.documents_K.diff() < 0).any()):
                shape = tuple(self.documents_K.shape)
                raise ValueError(f"documents are one ascending number for each of {keys} keys, got shape {shape}.")
            own_Q = self.documents_K.to(device)[at_Q.clamp(min=0)].contiguous()
            inside_K = self.documents_K.to(device).contiguous()
            first_Q = torch.maximum(first_Q, torch.searchsorted(inside_K, own_Q))
            behind_Q = torch.minimum(behind_Q, torch.searchsorted(inside_K, own_Q, right=True))
        first_Q = first_Q.clamp(0, keys)
        return first_Q.int(), torch.maximum(behind_Q.clamp(0, keys), first_Q).int()


def sdpa_reference(
    q_BHQD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    masks: KeyMasks = KeyMasks(),
    *,
    scale: float | None = None,
    slopes_H: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the result of `sdpa` from its definition: all scores at once, in the inputs' dtype."""
    heads, groups, queries, keys = q_BHQD.shape[1], k_BGKD.shape[1], q_BHQD.shape[2], k_BGKD.shape[2]
    k_BHKD, v_BHKD = (each.repeat_interleave(heads // groups, 1) for each in (k_BGKD, v_BGKD))
    scores_BHQK = q_BHQD @ k_BHKD.mT * (scale if scale is not None else q_BHQD.shape[-1] ** -0.5)
    at_K = torch.arange(keys, device=q_BHQD.device)
    if slopes_H is not None:
        far_QK = at_K - at_K[keys - queries :, None]
        scores_BHQK = scores_BHQK + slopes_H[:, None, None].to(scores_BHQK) * far_QK
    first_Q, behind_Q = masks.intervals(queries, keys, q_BHQD.device)
    seen_QK = (at_K >= first_Q[:, None]) & (at_K < behind_Q[:, None])
    scores_BHQK = scores_BHQK.masked_fill(~seen_QK, -math.inf)
    if sinks_H is not None:
        sinks_BHQ1 = sinks_H.to(scores_BHQK)[:, None, None].expand(len(q_BHQD), -1, queries, 1)
        return torch.softmax(torch.cat([scores_BHQK, sinks_BHQ1], -1), -1)[..., :keys] @ v_BHKD
    weights_BHQK = torch.softmax(scores_BHQK, -1)
    return torch.where(seen_QK, weights_BHQK, 0.0) @ v_BHKD  # a query that sees nothing has weights of NaN


# ---- kernels --------------------------------------------------------------------------------------------------------


@triton.jit
def load_rows(pointer, rows, channels, stride, count, D: tl.constexpr, WHOLE: tl.constexpr, EVEN_D: tl.constexpr):
    """Load rows of a matrix; 0 beyond its last row, unless WHOLE says that there are none, and beyond D channels."""
    at = pointer + rows[:, None] * stride + channels[None, :]
    if WHOLE and EVEN_D:
        return tl.load(at)
    if EVEN_D:
        return tl.load(at, mask=rows[:, None] < count, other=0.0)
    return tl.load(at, mask=(rows[:, None] < count) & (channels[None, :] < D), other=0.0)


@triton.jit
def tile_scores(q, k, queries, keys, offset, first, behind, scale, slope, ALIBI: tl.constexpr, MASKED: tl.constexpr):
    """Return the scores of a tile as exponents of 2, -inf for keys that a query does not see."""
    found = tl.dot(q, tl.trans(k), input_precision=EXACT) * scale
    if ALIBI:
        found += slope * (keys[None, :] - queries[:, None] - offset).to(tl.float32)
    if MASKED:
        found = tl.where((keys[None, :] >= first[:, None]) & (keys[None, :] < behind[:, None]), found, NOTHING)
    return found


@triton.jit
def add_tile(out, top, total, scores, scale, v, MASKED: tl.constexpr):
    """Add a tile of keys to each query's output, maximum and sum. scores * scale: exponents of 2, which a fused
    instruction scales and subtracts from. MASKED: a query may have seen no key so far."""
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    shift = tl.where(higher == NOTHING, 0.0, higher) if MASKED else higher
    weights = tl.exp2(scores * scale - shift[:, None])
    kept = tl.exp2(top - shift)
    out = tl.dot(weights.to(v.dtype), v, out * kept[:, None], input_precision=EXACT)
    return out, higher, total * kept + tl.sum(weights, 1)


@triton.jit
def whole_rows(out, top, total):
    """Return the outputs of queries that have seen all their keys, 0 for those without, and the logarithms to base 2 of
    their sums, inf for those without: weights of inf are 0."""
    seen = total > 0
    out = out * tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)[:, None]
    return out, tl.where(seen, top + tl.log2(tl.where(seen, total, 1.0)), float("inf"))


@triton.jit
def _key_ranges(first_ptr, behind_ptr, tile, Q, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (begin, whole, ragged, end) of the keys that a tile of queries sees. From whole to ragged, which are whole
    tiles of keys, every query sees every key. Before and behind them there is a mask."""
    last = tl.minimum(tile * ROWS + ROWS, Q) - 1
    begin = tl.load(first_ptr + tile * ROWS) // COLUMNS * COLUMNS
    whole = tl.cdiv(tl.load(first_ptr + last), COLUMNS) * COLUMNS
    end = tl.load(behind_ptr + last)
    ragged = tl.maximum(tl.load(behind_ptr + tile * ROWS) // COLUMNS * COLUMNS, whole)
    whole, ragged = tl.minimum(whole, end), tl.minimum(ragged, end)
    return begin, whole, whole + (ragged - whole) // COLUMNS * COLUMNS, end


@triton.jit
def _gather(
    out, top, total, q, k_ptr, v_ptr, k_stride, v_stride, queries, offset, first, behind, begin, end, K, scale, slope,
    least, ALIBI: tl.constexpr, MASKED: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Let a tile of queries meet the keys from begin to end. least: the logarithm of `skip_below`, or None."""
    channels = tl.arange(0, WIDTH)
    for start in range(begin, end, COLUMNS):
        keys = start + tl.arange(0, COLUMNS)
        k = load_rows(k_ptr, keys, channels, k_stride, K, D, not MASKED, D == WIDTH)
        if least is not None:
            scores = tile_scores(q, k, queries, keys, offset, first, behind, scale, slope, ALIBI, MASKED)
            if tl.max((tl.max(scores, 1) > top + least).to(tl.int32), 0) > 0:
                v = load_rows(v_ptr, keys, channels, v_stride, K, D, not MASKED, D == WIDTH)
                out, top, total = add_tile(out, top, total, scores, 1.0, v, MASKED)
        else:
            v = load_rows(v_ptr, keys, channels, v_stride, K, D, not MASKED, D == WIDTH)
            if MASKED or ALIBI:
                scores = tile_scores(q, k, queries, keys, offset, first, behind, scale, slope, ALIBI, MASKED)
                out, top, total = add_tile(out, top, total, scores, 1.0, v, MASKED)
            else:
                scores = tl.dot(q, tl.trans(k), input_precision=EXACT)
                out, top, total = add_tile(out, top, total, scores, scale, v, False)
    return out, top, total


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, log_ptr, first_ptr, behind_ptr, slopes_ptr, sinks_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    H, PER_GROUP, Q, K, scale, least,
    ALIBI: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of queries of one head. Tiles with the most keys, the last ones, begin first."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    queries, channels = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    q_ptr += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    k_ptr += batch.to(tl.int64) * k_batch + (head // PER_GROUP).to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + (head // PER_GROUP).to(tl.int64) * v_head
    there = queries < Q
    first = tl.load(first_ptr + queries, mask=there, other=0)
    behind = tl.load(behind_ptr + queries, mask=there, other=0)
    begin, whole, ragged, end = _key_ranges(first_ptr, behind_ptr, tile, Q, ROWS, COLUMNS)
    if k_ptr.dtype.element_ty == tl.float32:
        whole = end
    slope = tl.load(slopes_ptr + head) * LOG2E if ALIBI else 0.0
    q = load_rows(q_ptr, queries, channels, q_row, Q, D, False, D == WIDTH)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    if sinks_ptr is not None:
        top, total = tl.zeros([ROWS], tl.float32) + tl.load(sinks_ptr + head) * LOG2E, tl.full([ROWS], 1.0, tl.float32)
    else:
        top, total = tl.full([ROWS], NOTHING, tl.float32), tl.zeros([ROWS], tl.float32)
    out, top, total = _gather(
        out, top, total, q, k_ptr, v_ptr, k_row, v_row, queries, K - Q, first, behind, begin, whole, K, scale, slope,
        least, ALIBI, True, COLUMNS, D, WIDTH,
    )  # fmt: skip
    if k_ptr.dtype.element_ty != tl.float32:
        out, top, total = _gather(
            out, top, total, q, k_ptr, v_ptr, k_row, v_row, queries, K - Q, first, behind, whole, ragged, K, scale,
            slope, least, ALIBI, False, COLUMNS, D, WIDTH,
        )  # fmt: skip
        out, top, total = _gather(
            out, top, total, q, k_ptr, v_ptr, k_row, v_row, queries, K - Q, first, behind, ragged, end, K, scale,
            slope, least, ALIBI, True, COLUMNS, D, WIDTH,
        )  # fmt: skip
    out, log = whole_rows(out, top, total)
    tl.store(log_ptr + (batch * H + head).to(tl.int64) * Q + queries, log, mask=there)
    at = (
        out_ptr
        + batch.to(tl.int64) * o_batch
        + head.to(tl.int64) * o_head
        + queries[:, None] * o_row
        + channels[None, :]
    )
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=there[:, None] & (channels[None, :] < D))


@triton.jit
def products_kernel(out_ptr, grad_ptr, delta_ptr, o_batch, o_head, o_row, g_batch, g_head, g_row, H, Q,
                     ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """The product of each output with its gradient: the sum of a query's weights times their gradients."""
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    queries, channels = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    out_ptr += batch.to(tl.int64) * o_batch + head.to(tl.int64) * o_head
    grad_ptr += batch.to(tl.int64) * g_batch + head.to(tl.int64) * g_head
    out = load_rows(out_ptr, queries, channels, o_row, Q, D, False, D == WIDTH).to(tl.float32)
    grad = load_rows(grad_ptr, queries, channels, g_row, Q, D, False, D == WIDTH).to(tl.float32)
    tl.store(delta_ptr + (batch * H + head).to(tl.int64) * Q + queries, tl.sum(out * grad, 1), mask=queries < Q)


@triton.jit
def _give_keys(
    dk, dv, k, v, q_ptr, grad_ptr, log_ptr, delta_ptr, first_ptr, behind_ptr, q_row, g_row, keys, offset,
    begin, end, Q, scale, slope,
    ALIBI: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Let a tile of keys meet the queries from begin to end of one head."""
    channels = tl.arange(0, WIDTH)
    for start in range(begin, end, ROWS):
        queries = start + tl.arange(0, ROWS)
        there = queries < Q
        q = load_rows(q_ptr, queries, channels, q_row, Q, D, not MASKED, D == WIDTH)
        grad = load_rows(grad_ptr, queries, channels, g_row, Q, D, not MASKED, D == WIDTH)
        log = tl.load(log_ptr + queries, mask=there, other=float("inf"))
        delta = tl.load(delta_ptr + queries, mask=there, other=0.0)
        scores = tl.dot(k, tl.trans(q), input_precision=EXACT) * scale
        if ALIBI:
            scores += slope * (keys[:, None] - queries[None, :] - offset).to(tl.float32)
        weights = tl.exp2(scores - log[None, :])
        if MASKED:
            first = tl.load(first_ptr + queries, mask=there, other=0)
            behind = tl.load(behind_ptr + queries, mask=there, other=0)
            seen = (keys[:, None] >= first[None, :]) & (keys[:, None] < behind[None, :])
            weights = tl.where(seen, weights, 0.0)
        dv = tl.dot(weights.to(grad.dtype), grad, dv, input_precision=EXACT)
        slopes = weights * (tl.dot(v, tl.trans(grad), input_precision=EXACT) - delta[None, :])
        dk = tl.dot(slopes.to(q.dtype), q, dk, input_precision=EXACT)
    return dk, dv


@triton.jit
def _keys_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dk_ptr, dv_ptr, log_ptr, delta_ptr, first_ptr, behind_ptr, ranges_ptr, slopes_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    H, G, Q, K, scale, natural,
    ALIBI: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values of one group: sums over the queries of all its heads."""
    tile = tl.program_id(0)
    batch, group = tl.program_id(1) // G, tl.program_id(1) % G
    keys, channels = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    k_ptr += batch.to(tl.int64) * k_batch + group.to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + group.to(tl.int64) * v_head
    k = load_rows(k_ptr, keys, channels, k_row, K, D, False, D == WIDTH)
    v = load_rows(v_ptr, keys, channels, v_row, K, D, False, D == WIDTH)
    begin, whole = tl.load(ranges_ptr + tile * 4), tl.load(ranges_ptr + tile * 4 + 1)
    ragged, end = tl.load(ranges_ptr + tile * 4 + 2), tl.load(ranges_ptr + tile * 4 + 3)
    if k_ptr.dtype.element_ty == tl.float32:
        whole = end
    dk, dv = tl.zeros([COLUMNS, WIDTH], tl.float32), tl.zeros([COLUMNS, WIDTH], tl.float32)
    for within in range(H // G):
        head = group * (H // G) + within
        q_own = q_ptr + batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
        g_own = grad_ptr + batch.to(tl.int64) * g_batch + head.to(tl.int64) * g_head
        logs = log_ptr + (batch * H + head).to(tl.int64) * Q
        deltas = delta_ptr + (batch * H + head).to(tl.int64) * Q
        slope = tl.load(slopes_ptr + head) * LOG2E if ALIBI else 0.0
        dk, dv = _give_keys(
            dk, dv, k, v, q_own, g_own, logs, deltas, first_ptr, behind_ptr, q_row, g_row, keys, K - Q,
            begin, whole, Q, scale, slope, ALIBI, True, ROWS, D, WIDTH,
        )  # fmt: skip
        if k_ptr.dtype.element_ty != tl.float32:
            dk, dv = _give_keys(
                dk, dv, k, v, q_own, g_own, logs, deltas, first_ptr, behind_ptr, q_row, g_row, keys, K - Q,
                whole, ragged, Q, scale, slope, ALIBI, False, ROWS, D, WIDTH,
            )  # fmt: skip
            dk, dv = _give_keys(
                dk, dv, k, v, q_own, g_own, logs, deltas, first_ptr, behind_ptr, q_row, g_row, keys, K - Q,
                ragged, end, Q, scale, slope, ALIBI, True, ROWS, D, WIDTH,
            )  # fmt: skip
    own = (batch * G + group).to(tl.int64) * K * D
    at, inside = own + keys[:, None] * D + channels[None, :], (keys[:, None] < K) & (channels[None, :] < D)
    tl.store(dk_ptr + at, (dk * natural).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _give_queries(
    dq, q, grad, log, delta, k_ptr, v_ptr, k_row, v_row, queries, offset, first, behind, begin, end, K, scale, slope,
    ALIBI: tl.constexpr, MASKED: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    channels = tl.arange(0, WIDTH)
    for start in range(begin, end, COLUMNS):
        keys = start + tl.arange(0, COLUMNS)
        k = load_rows(k_ptr, keys, channels, k_row, K, D, not MASKED, D == WIDTH)
        v = load_rows(v_ptr, keys, channels, v_row, K, D, not MASKED, D == WIDTH)
        scores = tile_scores(q, k, queries, keys, offset, first, behind, scale, slope, ALIBI, MASKED)
        weights = tl.exp2(scores - log[:, None])
        slopes = weights * (tl.dot(grad, tl.trans(v), input_precision=EXACT) - delta[:, None])
        dq = tl.dot(slopes.to(k.dtype), k, dq, input_precision=EXACT)
    return dq


@triton.jit
def _queries_kernel(
    q_ptr, k_ptr, v_ptr, grad_ptr, dq_ptr, log_ptr, delta_ptr, first_ptr, behind_ptr, slopes_ptr,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    H, PER_GROUP, Q, K, scale, natural,
    ALIBI: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries of one head."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    queries, channels = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    q_ptr += batch.to(tl.int64) * q_batch + head.to(tl.int64) * q_head
    grad_ptr += batch.to(tl.int64) * g_batch + head.to(tl.int64) * g_head
    k_ptr += batch.to(tl.int64) * k_batch + (head // PER_GROUP).to(tl.int64) * k_head
    v_ptr += batch.to(tl.int64) * v_batch + (head // PER_GROUP).to(tl.int64) * v_head
    there = queries < Q
    row = (batch * H + head).to(tl.int64) * Q
    log = tl.load(log_ptr + row + queries, mask=there, other=float("inf"))
    delta = tl.load(delta_ptr + row + queries, mask=there, other=0.0)
    first = tl.load(first_ptr + queries, mask=there, other=0)
    behind = tl.load(behind_ptr + queries, mask=there, other=0)
    begin, whole, ragged, end = _key_ranges(first_ptr, behind_ptr, tile, Q, ROWS, COLUMNS)
    if k_ptr.dtype.element_ty == tl.float32:
        whole = end
    slope = tl.load(slopes_ptr + head) * LOG2E if ALIBI else 0.0
    q = load_rows(q_ptr, queries, channels, q_row, Q, D, False, D == WIDTH)
    grad = load_rows(grad_ptr, queries, channels, g_row, Q, D, False, D == WIDTH)
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    dq = _give_queries(
        dq, q, grad, log, delta, k_ptr, v_ptr, k_row, v_row, queries, K - Q, first, behind, begin, whole, K, scale,
        slope, ALIBI, True, COLUMNS, D, WIDTH,
    )  # fmt: skip
    if k_ptr.dtype.element_ty != tl.float32:
        dq = _give_queries(
            dq, q, grad, log, delta, k_ptr, v_ptr, k_row, v_row, queries, K - Q, first, behind, whole, ragged, K,
            scale, slope, ALIBI, False, COLUMNS, D, WIDTH,
        )  # fmt: skip
        dq = _give_queries(
            dq, q, grad, log, delta, k_ptr, v_ptr, k_row, v_row, queries, K - Q, first, behind, ragged, end, K,
            scale, slope, ALIBI, True, COLUMNS, D, WIDTH,
        )  # fmt: skip
    at = dq_ptr + (row + queries)[:, None] * D + channels[None, :]
    tl.store(at, (dq * natural).to(dq_ptr.dtype.element_ty), mask=there[:, None] & (channels[None, :] < D))


# ---- the function ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """The shape of a launch's tiles. rows: queries; columns: keys."""

    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def launch(self) -> dict[str, int]:
        return {"num_warps": self.warps, "num_stages": self.stages}


TILES = {  # the fastest of seven each on an H200, causal, 8,192 tokens (h200-whole-attention.jsonl)
    ("forward", 64): Tiles(64, 128, 4, 3),
    ("forward", 128): Tiles(128, 128, 8, 3),
    ("keys", 64): Tiles(32, 128, 4, 2),
    ("keys", 128): Tiles(64, 128, 8, 2),
    ("queries", 64): Tiles(64, 64, 4, 2),
    ("queries", 128): Tiles(128, 64, 8, 3),
    ("near", 64): Tiles(64, 64, 4, 3),  # two programs on a multiprocessor: each has few steps, and waits at both ends
    ("near", 128): Tiles(64, 64, 4, 3),
}
NEAR = 1024  # keys of an interval


def tiles_of(kernel: str, width: int, itemsize: int = 2) -> Tiles:
    """Return the tiles of a kernel ("forward", "near" for the same with narrow intervals, "keys" or "queries") for
    heads of so many channels, a power of 2.

    In float32 no matrix units multiply. A product's code then has an instruction for each multiplication of a thread,
    and operands in registers: these tiles spill none on sm_90, and each compiles within seconds."""
    if itemsize > 2:
        own, passing = 32 if width <= 128 else 16, 32 if width <= 64 else 16
        return Tiles(passing, own, 8, 1) if kernel == "keys" else Tiles(own, passing, 8, 1)
    if width > 128:
        return Tiles(64, 32, 4, 2) if kernel in ("forward", "near") else Tiles(32, 32, 4, 1)
    return TILES[kernel, max(width, 64)]


def strides_of(*tensors: torch.Tensor) -> list[int]:
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def _ranges(first_Q: torch.Tensor, behind_Q: torch.Tensor, keys: int, rows: int, columns: int) -> torch.Tensor:
    """Compute `ranges_of`. Begin and whole lie at borders of tiles of rows."""
    low_T = torch.arange(0, keys, columns, device=first_Q.device, dtype=torch.int32)
    high_T = (low_T + columns).clamp(max=keys)
    begin_T = torch.searchsorted(behind_Q, low_T, right=True)  # the first query whose interval ends behind low
    end_T = torch.searchsorted(first_Q, high_T)  # the first whose interval begins at or behind high
    sees_T = torch.searchsorted(behind_Q, high_T)  # from here on intervals end at or behind high
    loses_T = torch.searchsorted(first_Q, low_T, right=True)  # from here on they begin behind low
    begin_T = begin_T // rows * rows
    whole_T = torch.maximum(torch.minimum(-(-sees_T // rows) * rows, end_T), begin_T)
    full_T = (torch.minimum(loses_T, end_T) - whole_T).clamp(min=0) // rows * rows
    return torch.stack([begin_T, whole_T, whole_T + full_T, end_T], 1).int().contiguous()


class Intervals(tuple[torch.Tensor, torch.Tensor]):
    """The intervals of queries (`KeyMasks.intervals`) for several layers, which find the ranges of tiles once."""

    found: dict[tuple[int, int, int], torch.Tensor]

    def __new__(cls, ends: Sequence[torch.Tensor]) -> Intervals:
        first_Q, behind_Q = ends
        made = super().__new__(cls, (first_Q, behind_Q))
        made.found = {}
        return made


def ranges_of(intervals: tuple[torch.Tensor, torch.Tensor], keys: int, rows: int, columns: int) -> torch.Tensor:
    """Return for each tile of `columns` keys the queries that see some of it, and those that see all of it, in tiles of
    `rows`: begin, whole, ragged, end. int32, [tiles, 4]."""
    if not isinstance(intervals, Intervals):
        return _ranges(*intervals, keys, rows, columns)
    key = keys, rows, columns
    if key not in intervals.found:
        intervals.found[key] = _ranges(*intervals, keys, rows, columns)
    return intervals.found[key]


def attend_intervals(
    q_BHQD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    intervals: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    of_heads: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    skip_below: float | None = None,
    widest: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention of queries to the keys of their intervals, and the logarithm to base 2 of each one's sum of
    exponentials, float32, [B, H, Q]; inf for a query without keys and sink, whose output is 0.

    intervals: as of `KeyMasks.intervals`. of_heads: slopes_H and sinks_H (float32), as `sdpa` has them, and skip_below.
    widest: a bound of the intervals' keys, if one is known; it chooses the tiles.
    """
    out_BHQD = torch.empty(q_BHQD.shape, dtype=q_BHQD.dtype, device=q_BHQD.device)
    return out_BHQD, _attend(out_BHQD, (q_BHQD, k_BGKD, v_BGKD), intervals, scale, of_heads, skip_below, widest)


def _attend(
    out_BHQD: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    intervals: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    of_heads: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    skip_below: float | None = None,
    widest: int | None = None,
) -> torch.Tensor:
    """Compute `attend_intervals` into a tensor whose channels lie side by side. Return the logarithms."""
    q_BHQD, k_BGKD, v_BGKD = qkv
    batch, heads, queries, size = q_BHQD.shape
    groups, keys = k_BGKD.shape[1:3]
    log_BHQ = torch.empty((batch, heads, queries), dtype=torch.float32, device=q_BHQD.device)
    width = max(16, triton.next_power_of_2(size))
    near = widest is not None and widest <= NEAR
    tiles, (slopes_H, sinks_H) = tiles_of("near" if near else "forward", width, q_BHQD.itemsize), of_heads
    _forward_kernel[(triton.cdiv(queries, tiles.rows), batch * heads)](
        q_BHQD, k_BGKD, v_BGKD, out_BHQD, log_BHQ, *intervals, slopes_H, sinks_H,
        *strides_of(q_BHQD, k_BGKD, v_BGKD, out_BHQD), heads, heads // groups, queries, keys, scale * LOG2E.value,
        None if skip_below is None else math.log2(skip_below),
        ALIBI=slopes_H is not None, ROWS=tiles.rows, COLUMNS=tiles.columns, D=size, WIDTH=width, **tiles.launch,
    )  # fmt: skip
    return log_BHQ


class WholeAttention(torch.autograd.Function):
    """`attend_intervals` with gradients of q, k, v and sinks; none flow from the logarithms."""

    @staticmethod
    def forward(
        ctx: Any, q_BHQD: Any, k_BGKD: Any, v_BGKD: Any, sinks_H: Any, intervals: Any, slopes_H: Any, scale: float,
        widest: int | None = None,
    ) -> Any:  # fmt: skip
        out_BHQD = torch.empty_like(
            q_BHQD
        )  # as queries lie: what follows takes heads of a token side by side as they are
        log_BHQ = _attend(out_BHQD, (q_BHQD, k_BGKD, v_BGKD), intervals, scale, (slopes_H, sinks_H), widest=widest)
        ctx.save_for_backward(q_BHQD, k_BGKD, v_BGKD, sinks_H, out_BHQD, log_BHQ, slopes_H)
        ctx.scale, ctx.intervals = scale, intervals
        ctx.mark_non_differentiable(log_BHQ)
        return out_BHQD, log_BHQ

    @staticmethod
    def backward(ctx: Any, grad_BHQD: Any, _: Any) -> Any:
        q_BHQD, k_BGKD, v_BGKD, sinks_H, out_BHQD, log_BHQ, slopes_H = ctx.saved_tensors
        grad_BHQD = grad_BHQD if grad_BHQD.stride(-1) == 1 else grad_BHQD.contiguous()
        delta_BHQ = output_products(out_BHQD, grad_BHQD)
        found = interval_gradients(
            (q_BHQD, k_BGKD, v_BGKD), grad_BHQD, log_BHQ, delta_BHQ, ctx.intervals, ctx.scale, slopes_H
        )
        dsinks_H = None if sinks_H is None else sink_gradients(sinks_H, log_BHQ, delta_BHQ)
        return *found, dsinks_H, None, None, None, None


def output_products(out_BHQD: torch.Tensor, grad_BHQD: torch.Tensor) -> torch.Tensor:
    """Return the product of each output with its gradient, float32, [B, H, Q]. Channels lie side by side in both."""
    batch, heads, queries, size = out_BHQD.shape
    delta_BHQ = torch.empty((batch, heads, queries), dtype=torch.float32, device=out_BHQD.device)
    products_kernel[(triton.cdiv(queries, 64), batch * heads)](
        out_BHQD, grad_BHQD, delta_BHQ, *strides_of(out_BHQD, grad_BHQD), heads, queries,
        ROWS=64, D=size, WIDTH=max(16, triton.next_power_of_2(size)),
    )  # fmt: skip
    return delta_BHQ


def interval_gradients(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_BHQD: torch.Tensor,
    log_BHQ: torch.Tensor,
    delta_BHQ: torch.Tensor,
    intervals: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    slopes_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v by the keys of intervals.

    log_BHQ, delta_BHQ: of `attend_intervals` and `output_products`; where a query sees other keys besides, of all.
    """
    if slopes_H is None and not torch.are_deterministic_algorithms_enabled() and hopper_gradients.supports(*qkv):
        return atomic_gradients(qkv, grad_BHQD, log_BHQ, delta_BHQ, intervals, scale)
    return ordered_gradients(qkv, grad_BHQD, log_BHQ, delta_BHQ, intervals, scale, slopes_H)


def atomic_gradients(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_BHQD: torch.Tensor,
    log_BHQ: torch.Tensor,
    delta_BHQ: torch.Tensor,
    intervals: tuple[torch.Tensor, torch.Tensor],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `interval_gradients` on Hopper, in five products with atomic sums."""
    keys, size = qkv[1].shape[2:]
    ranges_N4 = ranges_of(intervals, keys, hopper_gradients.rows_of(size), hopper_gradients.KEYS)
    return hopper_gradients.gradients(qkv, grad_BHQD, log_BHQ, delta_BHQ, intervals, ranges_N4, scale)


def ordered_gradients(
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    grad_BHQD: torch.Tensor,
    log_BHQ: torch.Tensor,
    delta_BHQ: torch.Tensor,
    intervals: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    slopes_H: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute `interval_gradients` in seven products, with the same bits in every run."""
    q_BHQD, k_BGKD, v_BGKD = qkv
    batch, heads, queries, size = q_BHQD.shape
    groups, keys = k_BGKD.shape[1:3]
    width = max(16, triton.next_power_of_2(size))
    dq_BHQD = torch.empty((batch, heads, queries, size), dtype=q_BHQD.dtype, device=q_BHQD.device)
    dk_BGKD, dv_BGKD = (torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in (k_BGKD, v_BGKD))
    strides = strides_of(q_BHQD, k_BGKD, v_BGKD, grad_BHQD)
    common = {"ALIBI": slopes_H is not None, "D": size, "WIDTH": width}
    tiles = tiles_of("keys", width, q_BHQD.itemsize)
    _keys_kernel[(triton.cdiv(keys, tiles.columns), batch * groups)](
        q_BHQD, k_BGKD, v_BGKD, grad_BHQD, dk_BGKD, dv_BGKD, log_BHQ, delta_BHQ, *intervals,
        ranges_of(intervals, keys, tiles.rows, tiles.columns), slopes_H, *strides,
        heads, groups, queries, keys, scale * LOG2E.value, scale,
        ROWS=tiles.rows, COLUMNS=tiles.columns, **common, **tiles.launch,
    )  # fmt: skip
    tiles = tiles_of("queries", width, q_BHQD.itemsize)
    _queries_kernel[(triton.cdiv(queries, tiles.rows), batch * heads)](
        q_BHQD, k_BGKD, v_BGKD, grad_BHQD, dq_BHQD, log_BHQ, delta_BHQ, *intervals, slopes_H, *strides,
        heads, heads // groups, queries, keys, scale * LOG2E.value, scale,
        ROWS=tiles.rows, COLUMNS=tiles.columns, **common, **tiles.launch,
    )  # fmt: skip
    return dq_BHQD, dk_BGKD, dv_BGKD


def sink_gradients(sinks_H: torch.Tensor, log_BHQ: torch.Tensor, delta_BHQ: torch.Tensor) -> torch.Tensor:
    """Return the gradients of sinks, [H]: a sink has no value, so its gradient is its weight times -delta, where delta
    is the product of each output with its gradient."""
    weights_BHQ = torch.exp2(sinks_H[:, None] * LOG2E.value - log_BHQ)
    return -(weights_BHQ * delta_BHQ).sum((0, 2))


def check_same_length(q_BHTD: torch.Tensor, k_BGTD: torch.Tensor, v_BGTD: torch.Tensor) -> None:
    """Raise ValueError unless there are as many queries as keys, in heads that fit each other."""
    (batch, heads, length, size), groups = q_BHTD.shape, k_BGTD.shape[1]
    if k_BGTD.shape != v_BGTD.shape or k_BGTD.shape != (batch, groups, length, size) or heads % groups or size > 256:
        shapes = ", ".join(str(tuple(each.shape)) for each in (q_BHTD, k_BGTD, v_BGTD))
        raise ValueError(f"q is [B, H, T, D], k and v are [B, G, T, D], G divides H, D is at most 256; got {shapes}.")


def sdpa(
    q_BHQD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    masks: KeyMasks = KeyMasks(),
    *,
    scale: float | None = None,
    slopes_H: torch.Tensor | None = None,
    sinks_H: torch.Tensor | None = None,
    skip_below: float | None = None,
) -> torch.Tensor:
    """Return the attention of whole sequences, [batch, heads, queries, channels]; gradients flow to q, k, v and sinks.

    q_BHQD: queries, the last of the keys' positions.
    k_BGKD, v_BGKD: keys and values; H is a multiple of G. All have one dtype, and at most 256 channels a head.
    scale: of scores, above 0 (default: channels ** -0.5).
    slopes_H: ALiBi's slope for each head, float32; no gradient flows to it.
    sinks_H: one more score for each head, which takes its part of the softmax and has no value. float32.
    skip_below: the values of a tile of keys are left out where all its weights are below this share of the largest
        weight so far, between 0 and 1. The result is then an approximation, without gradients.

    Raises ValueError for shapes that do not fit, and for a share that is none or would need gradients.
    """
    (batch, heads, _, size), (groups, keys) = q_BHQD.shape, k_BGKD.shape[1:3]
    if k_BGKD.shape != v_BGKD.shape or k_BGKD.shape != (batch, groups, keys, size) or heads % groups:
        shapes = ", ".join(str(tuple(each.shape)) for each in (q_BHQD, k_BGKD, v_BGKD))
        raise ValueError(f"q is [B, H, Q, D] and k and v are [B, G, K, D], where G divides H; got {shapes}.")
    if scale is not None and scale <= 0:
        raise ValueError(f"a scale is above 0, got {scale}.")
    if q_BHQD.shape[2] > keys or size > 256:
        raise ValueError(
            f"there are {q_BHQD.shape[2]} queries of {keys} keys, with heads of {size} channels (most: 256)."
        )
    if sinks_H is not None and sinks_H.shape != (heads,):
        raise ValueError(f"sinks are one number for each of {heads} heads, got shape {tuple(sinks_H.shape)}.")
    q_BHQD, k_BGKD, v_BGKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHQD, k_BGKD, v_BGKD))
    intervals = masks.intervals(q_BHQD.shape[2], keys, q_BHQD.device)
    scale = size**-0.5 if scale is None else scale
    sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
    if skip_below is None:
        out_BHQD, _ = WholeAttention.apply(q_BHQD, k_BGKD, v_BGKD, sinks_H, intervals, slopes_H, scale)
        return out_BHQD
    if not 0 < skip_below < 1:
        raise ValueError(f"skip_below is a share between 0 and 1, got {skip_below}.")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHQD, k_BGKD, v_BGKD)):
        raise ValueError("attention that leaves tiles out has no gradients; call it within torch.no_grad().")
    return attend_intervals(q_BHQD, k_BGKD, v_BGKD, intervals, scale, (slopes_H, sinks_H), skip_below)[0]


# ---- ahead of time --------------------------------------------------------------------------------------------------

_STRIDES = ("batch", "head", "row")


def _signature(pointers: str, kind: str, strides: str, counts: str, floats: str) -> dict[str, str]:
    """Return the types of a launch. pointers: names, where `!` marks float32 and `#` int32."""
    marks = {"!": "*fp32", "#": "*i32"}
    found = {f"{name.lstrip('!#')}_ptr": marks.get(name[0], f"*{kind}") for name in pointers.split()}
    found |= {f"{name}_{what}": "i32:16" for name in strides for what in _STRIDES}
    return found | dict.fromkeys(counts.split(), "i32") | dict.fromkeys(floats.split(), "fp32")


def ahead_of_time(
    kernel: Any, tiles: Tiles, size: int, pointers: str, strides: str, counts: str, floats: str,
    *, archs: tuple[str, ...] = ONE_OF_EACH, kind: str = "bf16", **constants: Any,
) -> AotKernel:  # fmt: skip
    """Return a kernel to compile for heads of `size` channels. The texts are names of its arguments. In float32 (kind
    "fp32") it must not spill."""
    sizes = {"ROWS": tiles.rows, "COLUMNS": tiles.columns, "D": size, "WIDTH": size}
    constants |= {name: value for name, value in sizes.items() if name in kernel.arg_names}
    signature, exact = _signature(pointers, kind, strides, counts, floats), kind == "fp32"
    cores = "" if exact else "HGMMA" if tiles.rows > 16 else "HMMA"
    return AotKernel(kernel, signature, constants, tensor_cores=cores, hot=exact, archs=archs, **tiles.launch)


_FORWARD = "q k v out !log #first #behind"
_PLAIN: dict[str, Any] = {"sinks_ptr": None, "least": None}
_KEYS = "q k v grad dk dv !log !delta #first #behind #ranges"
_QUERIES = "q k v grad dq !log !delta #first #behind"
AOT = (
    *(
        ahead_of_time(kernel, tiles_of(which, size), size, *names, slopes_ptr=None, ALIBI=False, **constants)
        for kernel, which, size, constants, *names in (
            (_forward_kernel, "forward", 128, _PLAIN, _FORWARD, "qkvo", "H PER_GROUP Q K", "scale"),
            (_keys_kernel, "keys", 128, {}, _KEYS, "qkvg", "H G Q K", "scale natural"),
            (_queries_kernel, "queries", 128, {}, _QUERIES, "qkvg", "H PER_GROUP Q K", "scale natural"),
        )
    ),
    ahead_of_time(
        _keys_kernel, tiles_of("keys", 256, 4), 256, _KEYS, "qkvg", "H G Q K", "scale natural", archs=("sm_90",),
        kind="fp32", slopes_ptr=None, ALIBI=False,
    ),
    ahead_of_time(
        _forward_kernel, tiles_of("forward", 64), 64, f"{_FORWARD} !sinks", "qkvo", "H PER_GROUP Q K", "scale least",
        archs=("sm_90",), slopes_ptr=None, ALIBI=False,
    ),
)  # fmt: skip
