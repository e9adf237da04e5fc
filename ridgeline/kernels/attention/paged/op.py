"""Paged attention over a ragged batch: every query attends to everything that is cached of its row.

Legend:
    T  tokens of the step
    R  rows
    S  slots
    N  cache blocks
    P  tokens per block
    H  query heads
    G  key/value heads
    D  head width
    L  distances of keys from queries
    C  columns of the block table
    I  items, stretches, and work items
    J  query tiles
    Q  queries of one row
    K  keys of one row
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.base import kv_cache
from ridgeline.kernels.base.kv_cache import KVScales
from ridgeline.kernels.base.op import Implementation, Op, on_cpu, on_gpu
from ridgeline.kernels.base.tree import Tree, sight


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step's attention cut into pieces of work. It is made on the device once, and all layers of a cache group share
    it.

    All tensors are int32 on the device. The tables are as long as they can ever need to be.

    items_I8: items, which are stretches of a short row's keys (split-KV). Each is (slot, first token, tokens, kv_len,
        first key, end key, first item of the row, items of the row). kv_len is 0 where there is no item.
    tiles_J4: query tiles of long rows. Each is (slot, first token, tokens, position of the first).
    counts_2: how many items and how many tiles there are.
    arrivals: zeros, one per item and key head, by which a row's last item is found.
    few: rows with up to so many tokens are cut into items.
    tile_tokens: the most tokens of a tile.
    window: the window that the schedule was made for.
    fixed: every row is cut into query tiles, however few its tokens, and all its keys are treated alike. So a query's
        result does not depend on what runs beside it.
    hopper: the long rows' work for hopper.py, in place of tiles, if that kernel is the faster one. (Beside tiles if it
        works on widened keys: the device decides then.)
    cascade: the work that short rows share; their items then begin where the shared keys end.
    trees: it serves batches with a `Tree`.
    """

    items_I8: Tensor
    tiles_J4: Tensor
    counts_2: Tensor
    arrivals: Tensor
    few: int
    tile_tokens: int
    window: int | None
    fixed: bool = False
    hopper: PrefillItems | None = None
    cascade: Cascade | None = None
    trees: bool = False


@dataclass(frozen=True, kw_only=True)
class Cascade:
    """Keys that several rows read together; see cascade.py. All tensors are int32 on the device.

    stretches_I6: (slot whose table names the blocks, rank of the gang's first row, rows of the gang, first key, end
        key, first part).
    count_1: how many stretches there are.
    members_R: the row's token by rank, or -1 if the row takes no part.
    positions_R: that token's position by rank, for layers with slopes only.
    rows_R4: by row, (tokens shared, its first part, distance from one of its parts to the next, number of its parts).
    items_I3: the last three of these, by item.
    queries: rows of a gang's matrix product.
    max_parts: the most parts that there can be.
    """

    stretches_I6: Tensor
    count_1: Tensor
    members_R: Tensor
    positions_R: Tensor | None
    rows_R4: Tensor
    items_I3: Tensor
    queries: int
    max_parts: int


@dataclass(frozen=True, kw_only=True)
class PrefillItems:
    """The long rows' work for hopper.py.

    table_I4: the entries, on the device; [I, 8] if some may be pieces of items.
    count_1: how many entries are filled, on the device.
    ticket_1: a counter on the device, 0 between launches.
    limit: a bound on the count that the host knows.
    queries: the most queries of an item; they are tokens times `pack` heads.
    merges_I4, merge_count_1: the items that are cut into pieces, and how many; see hopper_pieces.py. None: none may be.
    parts: the most pieces of all these items.
    certain: these items are all the work of long rows. Otherwise either they or the schedule's tiles run, as the device
        decides.
    """

    table_I4: Tensor
    count_1: Tensor
    ticket_1: Tensor
    limit: int
    queries: int
    pack: int
    merges_I4: Tensor | None = None
    merge_count_1: Tensor | None = None
    parts: int = 0
    certain: bool = True


@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """The queries that the rows bring, and the places of their keys.

    On the device (integers of 4 or 8 bytes):

    slots_R: the rows' slots.
    block_table_SC: block ids by slot.
    start_R1: the first query of each row, then T.
    kv_len_R: tokens in the cache after this step's were written. A row's queries are its last positions.
    schedule: the result of `schedule.make_schedule` for the same window and heads, if it was made already.

    On the host:

    tokens_each: how many tokens every row brings. 0: rows differ. Then a row may have none, and tokens from start_R1[R]
        on belong to no row; their outputs are undefined.
    num_tokens_R: how many tokens each row brings; None if the host cannot know (a captured graph).
    kv_bound_R: a bound on kv_len_R to size work by; None if the host cannot know.
    wide: memory of 16-bit keys and values [N, G, P, D] that an implementation may widen those of long rows into.
    derived: what an implementation has made of all this for the step's other layers, by a key of its own.
    tree: what queries see of their rows' newest keys, on the device, where rows verify trees of drafts or draft them.
        The queries' positions, and those of the keys that they see, are then those of the trees. None: queries see all
        keys before them, and positions are places.
    ahead_T: int32, on the device: how many of its row's keys behind its own a query sees too, as one of a picture does
        whose tokens see each other both ways. A window bounds only what lies before it. None: none. It excludes `tree`.

    Cells of the cache that none of a row's queries sees never influence the row's outputs, whatever they hold, NaN and
    inf included. These are the cells behind its last position or before its window, in blocks of other rows, in free
    blocks, and in the null block, to which rows that the device has stopped write. So a mask alone is not enough, since
    0 · NaN is NaN.
    """

    slots_R: Tensor
    block_table_SC: Tensor
    start_R1: Tensor
    kv_len_R: Tensor
    tokens_each: int
    num_tokens_R: np.ndarray | None = None
    kv_bound_R: np.ndarray | None = None
    schedule: Schedule | None = None
    wide: tuple[Tensor, Tensor] | None = None
    derived: dict[object, Any] = field(default_factory=dict, repr=False, compare=False)
    tree: Tree | None = None
    ahead_T: Tensor | None = None


class Softmax(NamedTuple):
    """A layer's treatment of its scores: softmax(scale · q kᵀ + mask).

    softcap: logits x become softcap · tanh(x / softcap), but sinks do not.
    sinks_H: one more logit per head, which takes its part of the softmax and carries no value.
    slopes_H: float32, the logits that a head loses per token of distance (ALiBi), after the cap.
    window: a query at position p sees positions max(0, p - window + 1) … p.
    bias_HL: float32, contiguous, what a head's logits gain at a distance of 0, 1, … tokens, after the cap; keys beyond
        the last of at least two distances gain as much as there. It takes the place of slopes.
    """

    scale: float
    softcap: float | None = None
    sinks_H: Tensor | None = None
    slopes_H: Tensor | None = None
    window: int | None = None
    bias_HL: Tensor | None = None


def by_distance(softmax: Softmax) -> tuple[Tensor | None, int]:
    """Return the table of what logits gain or lose by distance, and what kernels call `ALIBI`: True for slopes, the
    distances of a bias, and False for neither."""
    if softmax.bias_HL is not None:
        return softmax.bias_HL, softmax.bias_HL.shape[1]
    return softmax.slopes_H, softmax.slopes_H is not None


def paged_attention_reference(
    q_THD: Tensor,
    k_cache_NGPD: Tensor,
    v_cache_NGPD: Tensor,
    batch: RaggedBatch,
    softmax: Softmax,
    scales: KVScales | None = None,
) -> Tensor:
    """Return softmax(scale · q kᵀ + mask) v for every row on its own, computed in float32: [T, H, D] in q's dtype.

    With a tree a query sees none of the keys from its base on but those in its bits.

    scales: those of caches of 8 bits, and None for others.
    """
    scale, softcap, sinks_H, slopes_H, window, bias_HL = softmax
    out_THD = torch.empty_like(q_THD)
    num_kv_heads, block_size, head_dim = k_cache_NGPD.shape[1:]
    heads_per_kv = q_THD.shape[1] // num_kv_heads
    starts, lengths = batch.start_R1.tolist(), batch.kv_len_R.tolist()
    for row, slot in enumerate(batch.slots_R.tolist()):
        length, first, last = lengths[row], starts[row], starts[row + 1]
        blocks = batch.block_table_SC[slot, : -(-length // block_size)].long()
        k_NGPD, v_NGPD = kv_cache.taken(k_cache_NGPD, blocks), kv_cache.taken(v_cache_NGPD, blocks)
        k_NGPD = kv_cache.numbers(k_NGPD, scales.k_NGP[blocks] if scales else None, torch.float32)
        v_NGPD = kv_cache.numbers(v_NGPD, scales.v_NGP[blocks] if scales else None, torch.float32)
        k_GKD = k_NGPD.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :length]
        v_GKD = v_NGPD.transpose(0, 1).reshape(num_kv_heads, -1, head_dim)[:, :length]
        position_Q1 = torch.arange(length - (last - first), length, device=q_THD.device)[:, None]
        key_QK = torch.arange(length, device=q_THD.device)[None, :]  # their positions; without a tree alike for all
        ahead_Q1 = 0 if batch.ahead_T is None else batch.ahead_T[first:last, None]
        visible_QK = key_QK <= position_Q1 + ahead_Q1
        if batch.tree is not None:
            position_Q1 = batch.tree.positions_T[first:last, None]
            bits_T, base_T = batch.tree
            visible_QK, key_QK = sight(bits_T[first:last, None], base_T[first:last, None], key_QK)
        if window is not None:
            visible_QK &= key_QK > position_Q1 - window
        k_HKD, v_HKD = (x.repeat_interleave(heads_per_kv, dim=0) for x in (k_GKD, v_GKD))
        scores_HQK = scale * q_THD[first:last].float().transpose(0, 1) @ k_HKD.transpose(1, 2)
        if softcap is not None:
            scores_HQK = softcap * torch.tanh(scores_HQK / softcap)
        if slopes_H is not None:
            scores_HQK = scores_HQK + slopes_H[:, None, None] * (key_QK - position_Q1)
        if bias_HL is not None:
            scores_HQK = scores_HQK + bias_HL[:, (position_Q1 - key_QK).clamp(0, bias_HL.shape[1] - 1)]
        weights_HQK = softmax_with_sinks(scores_HQK.masked_fill(~visible_QK, -torch.inf), sinks_H)
        seen_HKD = v_HKD.masked_fill(~visible_QK.any(0)[None, :, None], 0)  # never let unwritten memory in
        out_THD[first:last] = (weights_HQK @ seen_HKD).transpose(0, 1).to(q_THD.dtype)
    return out_THD


def softmax_with_sinks(scores_HQK: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Return the softmax over the keys and, if there are sinks, the head's sink, without the sink's own weight. There
    may be more dimensions before the heads."""
    if sinks_H is None:
        return scores_HQK.softmax(-1)
    sinks_HQ1 = sinks_H.float()[:, None, None].expand(*scores_HQK.shape[:-1], 1)
    return torch.cat((scores_HQK, sinks_HQ1), -1).softmax(-1)[..., :-1]


class AttentionShape(NamedTuple):
    """The properties of the step, and of the layers that share a schedule, on which the schedule depends.

    num_tokens: T, padding included.
    tokens_each: as in `RaggedBatch`.
    cache_NGPD: one layer's keys, whose shape and type decide which kernel the long rows get.
    prefix_4R: int32, the rows that share their first blocks, in the form of cascade.py. It is not used with a window,
        nor where all rows bring more than one token.
    alibi: the layers have slopes, or biases by distance.
    head_bytes: the bytes of a key's head, by which tiles are made small enough for wide heads; 0 for the usual ones.
    item_queries: tokens times heads of a group that a program takes at most, where several share an item or a tile, as
        those of latents do; 0: each takes all of them.
    widened: these keys are converted copies of others, if they fit the memory; otherwise the long rows need `tiles_J4`.
    trees: the batch has a `Tree`.
    fixed: see `Schedule`.
    ahead: the batch has `ahead_T`.
    most_keys: a bound on a row's keys, that of its block table; 0: it is not known.
    """

    num_tokens: int
    tokens_each: int
    num_heads: int
    num_kv_heads: int
    window: int | None = None
    cache_NGPD: Tensor | None = None
    prefix_4R: Tensor | None = None
    alibi: bool = False
    head_bytes: int = 0
    item_queries: int = 0
    widened: bool = False
    trees: bool = False
    fixed: bool = False
    ahead: bool = False
    most_keys: int = 0


def no_schedule(start_R1: Tensor, kv_len_R: Tensor, slots_R: Tensor, shape: AttentionShape) -> Schedule | None:
    """Cut the step's attention into pieces of work. This reference returns None, for implementations that need no
    schedule."""
    return None


ATTENTION_SCHEDULE = Op(
    "attention_schedule",
    no_schedule,
    (
        Implementation("triton", "ridgeline.kernels.attention.paged.schedule:make_schedule", on_gpu),
        Implementation("batch_invariant", "ridgeline.kernels.attention.paged.schedule:fixed_schedule", on_gpu),
    ),
)
PAGED_ATTENTION = Op(
    "paged_attention",
    paged_attention_reference,
    (
        Implementation("triton", "ridgeline.kernels.attention.paged.triton:paged_attention", on_gpu),
        Implementation("sdpa", "ridgeline.kernels.attention.paged.torch_ops:paged_attention"),
        Implementation("fixed_tiles", "ridgeline.kernels.attention.paged.fixed_tiles:paged_attention", on_cpu),
    ),
    matrix=True,
)
