"""Four ways in which ranks that divide the cached tokens attend together. All of them give what one device gives.

Together    every rank has all queries. Each attends to its own keys, and all add up all parts.
Keys        a rank has its own queries. Keys and values go around, while each rank attends to those at hand (ring
            attention, arXiv 2310.01889).
Queries     a rank has its own queries. They visit all ranks' keys, and the parts come back.
Heads       a rank has its own queries. They are exchanged for those of all tokens, but of some heads; so are keys and
            values (Ulysses, arXiv 2309.14509).

`perf/context.py` says which of the last three moves the fewest bytes.

Legend:
    T  tokens whose queries this rank has
    R  rows
    N  ranks
    H  query heads
    G  key/value heads
    D  head width
    P  tokens of a block that a rank holds
    B  blocks of the step's rows
    C  columns of a block table
    S  slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.stripes import held
from ridgeline.kernels.attention.op import RaggedBatch, Schedule
from ridgeline.kernels.ops import Ops
from ridgeline.parallel.ring import Ring
from ridgeline.worker.share import Share
from ridgeline.worker.state.states import DeviceRows
from ridgeline.worker.upload import upload


class Softmax(NamedTuple):
    """A layer's treatment of its scores; see `paged_attention`."""

    scale: float
    softcap: float | None = None
    sinks_H: Tensor | None = None
    slopes_H: Tensor | None = None


class Cached(NamedTuple):
    """One layer's keys and values on this rank, [blocks, G, P, D] each."""

    k_NGPD: Tensor
    v_NGPD: Tensor


class Round(Protocol):
    """The attention of a step, for layers with the same heads and window."""

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: Cached, softmax: Softmax) -> Tensor:
        """Return what the rank's queries see of all ranks' keys: [T, H, D]. This step's keys are cached already."""


@dataclass(frozen=True)
class Around:
    """The things that all rounds of a group of layers are made of.

    window: as in `paged_attention`.
    cache_NGPD: one layer's keys on this rank.
    plain: scores are neither capped nor lowered by distance.
    """

    ring: Ring
    ops: Ops
    num_heads: int
    window: int | None
    cache_NGPD: Tensor
    plain: bool = True

    def part(
        self, q_THD: Tensor, positions_T: Tensor, holder: int, cached: Cached, piece: Piece, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """Return the attention to the keys of one rank, and the logarithms of its sums.

        From one key of a rank to its next there are N tokens, and the nearest one that a query sees may be up to N - 1
        tokens away. The second is the same for all keys, so it goes into the logarithm.
        """
        ranks, slopes_H = self.ring.size, softmax.slopes_H
        out_THD, lse_TH = self.ops.partial_attention(
            q_THD,
            *cached,
            piece.batch,
            scale=softmax.scale,
            first_R=piece.first_R,
            softcap=softmax.softcap,
            slopes_H=None if slopes_H is None else slopes_H * ranks,
        )
        if slopes_H is not None:
            lse_TH = lse_TH - slopes_H * ((positions_T - holder) % ranks)[:, None]
        return out_THD, lse_TH

    def schedule(self, rows: Rows, num_tokens: int, each: int = 0, *, ranks: int = 1) -> Schedule | None:
        """Return the schedule of a batch. ranks: it has 1 / ranks of the heads, and blocks that are so many times as
        long, since it has all ranks' keys."""
        _, kv_heads, held_tokens, head_dim = self.cache_NGPD.shape
        like = self.cache_NGPD.new_empty(1, kv_heads // ranks, held_tokens * ranks, head_dim)
        return self.ops.attention_schedule(
            rows.start_R1,
            rows.kv_len_R,
            rows.slots_R,
            num_tokens=num_tokens,
            tokens_each=each,
            num_heads=self.num_heads // ranks,
            num_kv_heads=kv_heads // ranks,
            window=self.window if ranks > 1 else None,
            cache_NGPD=like if self.plain else None,
            head_bytes=head_dim * like.element_size(),
        )


class Rows(NamedTuple):
    """Rows on the device, as a `RaggedBatch` has them."""

    slots_R: Tensor
    start_R1: Tensor
    kv_len_R: Tensor


class Piece(NamedTuple):
    """Queries and the keys of one rank. first_R: as in `partial_attention`."""

    batch: RaggedBatch
    first_R: Tensor | None


def _piece(around: Around, rows: Rows, first_R: Tensor | None, table_SC: Tensor, num_tokens: int, each: int) -> Piece:
    schedule = around.schedule(rows, num_tokens, each)
    batch = RaggedBatch(**rows._asdict(), block_table_SC=table_SC, tokens_each=each, schedule=schedule)
    return Piece(batch, first_R)


def pack(out_THD: Tensor, lse_TH: Tensor) -> Tensor:
    """Return both in one tensor, which costs one message: [T, H, D + a little]."""
    return torch.cat((out_THD, lse_TH[..., None].contiguous().view(out_THD.dtype)), -1)


def unpack(parts: Tensor | Sequence[Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the parts' outputs [N, T, H, D] and logarithms [N, T, H]."""
    packed = parts if isinstance(parts, Tensor) else torch.stack(list(parts))
    wide = torch.promote_types(packed.dtype, torch.float32)
    return packed[..., :head_dim], packed[..., head_dim:].view(wide)[..., 0]


class Together:
    """The round of a step whose tokens all ranks run. It is made on the device, so a captured graph can hold it."""

    def __init__(self, around: Around, rows: DeviceRows, table_SC: Tensor) -> None:
        self._around, self._order_T = around, None
        ring, window, each = around.ring, around.window, rows.tokens_each
        if each == 1:
            kv_len_R, first_R = held(rows.kv_len_R, ring.rank, ring.size), None
            if window is not None:
                first_R = held(rows.kv_len_R - window, ring.rank, ring.size)
            parts = Rows(rows.slots_R, rows.start_R1, kv_len_R)
        else:
            parts, first_R, self._order_T = _by_rank(ring, rows, window)
            self._back_T = self._order_T.argsort()
        self._piece = _piece(around, parts, first_R, table_SC, rows.num_tokens, 1 if each == 1 else 0)

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: Cached, softmax: Softmax) -> Tensor:
        ring = self._around.ring
        if self._order_T is not None:
            q_THD, positions_T = q_THD[self._order_T], positions_T[self._order_T]
        part = self._around.part(q_THD, positions_T, ring.rank, cached, self._piece, softmax)
        parts = unpack(ring.stacked(pack(*part)), q_THD.shape[2])
        out_THD = self._around.ops.merge_attention(*parts, softmax.sinks_H)
        return out_THD if self._order_T is None else out_THD[self._back_T]


def _by_rank(ring: Ring, rows: DeviceRows, window: int | None) -> tuple[Rows, Tensor | None, Tensor]:
    """Return rows of which each has tokens of one rank only, since these see keys of another in regular steps: rows R *
    N. Also the first keys that they see, and the tokens in their order (tokens of no row last)."""
    ranks, num_rows, device = ring.size, len(rows.slots_R), rows.slots_R.device
    rank_N = torch.arange(ranks, device=device)
    count_R = rows.start_R1.diff().long()
    end_R1 = rows.kv_len_R.long()[:, None]
    start_R1 = end_R1 - count_R[:, None]
    count_RN = (end_R1 + ranks - 1 - rank_N) // ranks - (start_R1 + ranks - 1 - rank_N) // ranks  # held, by rank
    position_RN = start_R1 + (rank_N - start_R1) % ranks  # of the first token of each
    kv_len_RN = held(position_RN + 1, ring.rank, ranks) + count_RN - 1
    kv_len_RN = torch.where(count_RN > 0, kv_len_RN, 0).clamp(min=0)
    first_RN = None if window is None else held(position_RN - window + 1, ring.rank, ranks)

    token_T = torch.arange(rows.num_tokens, device=device)
    row_T = torch.searchsorted(rows.start_R1[1:].long(), token_T, right=True)
    row_T, real_T = row_T.clamp(max=num_rows - 1), row_T < num_rows
    position_T = start_R1[row_T, 0] + token_T - rows.start_R1[row_T]
    key_T = torch.where(real_T, row_T * ranks + position_T % ranks, num_rows * ranks)
    begin_R1 = torch.cat((count_RN.new_zeros(1), count_RN.flatten().cumsum(0)))
    parts = Rows(rows.slots_R.repeat_interleave(ranks), begin_R1, kv_len_RN.flatten())
    return parts, None if first_RN is None else first_RN.flatten(), key_T.argsort(stable=True)


class Blocks:
    """The blocks that a step's rows can see, and how they lie beside each other in a piece.

    id_B: their ids. lowest_R: the number of a row's first key among its rank's.
    """

    def __init__(self, share: Share, slots_R: Tensor, table_SC: Tensor, held_tokens: int, window: int | None) -> None:
        size = held_tokens * share.ranks
        first_R = np.zeros_like(share.end_R)
        if window is not None:
            first_R = np.maximum(share.end_R - share.num_tokens_R - window + 1, 0) // size
        count_R = -(-share.end_R // size) - first_R
        row_B = np.repeat(np.arange(len(count_R)), count_R)
        begin_R = np.cumsum(count_R) - count_R
        column_B = np.arange(count_R.sum()) - np.repeat(begin_R - first_R, count_R)
        device = slots_R.device
        self.id_B = table_SC[slots_R[upload(row_B, device)].long(), upload(column_B, device)].long()
        columns = -(-int(count_R.max(initial=1)) // 16) * 16  # a multiple that kernels are compiled for
        table_RC = begin_R[:, None] + np.arange(columns)
        self.table_RC = upload(np.minimum(table_RC, max(0, len(row_B) - 1)).astype(np.int32), device)
        self.slots_R = torch.arange(len(count_R), dtype=torch.int32, device=device)
        self.lowest_R = first_R * held_tokens

    def taken(self, cached: Cached) -> Tensor:
        """Return a layer's keys and values: [2, B, G, P, D]."""
        return torch.stack([cache.index_select(0, self.id_B) for cache in cached])


class Keys:
    """Keys and values go around."""

    def __init__(self, around: Around, share: Share, blocks: Blocks) -> None:
        self._around, self._blocks, self._pieces = around, blocks, {}
        own, device = share.rank, blocks.id_B.device
        count_R = share.count_NR[own]
        start_R1 = upload(np.append(0, np.cumsum(count_R)), device)
        for holder in range(share.ranks):
            kv_len_R, first_R = _seen(share, own, holder, around.window)
            kv_len_R = np.maximum(kv_len_R - np.where(count_R > 0, blocks.lowest_R, 0), 0)
            first = None if first_R is None else upload(first_R - blocks.lowest_R, device)
            rows = Rows(blocks.slots_R, start_R1, upload(kv_len_R, device))
            self._pieces[holder] = _piece(around, rows, first, blocks.table_RC, share.num_tokens, 0)

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: Cached, softmax: Softmax) -> Tensor:
        ring, parts = self._around.ring, []
        at_hand = self._blocks.taken(cached)
        for turn in range(ring.size):
            holder = (ring.rank - turn) % ring.size
            passing = ring.passed_on(at_hand) if turn + 1 < ring.size else None
            near = Cached(at_hand[0], at_hand[1])
            parts.append(self._around.part(q_THD, positions_T, holder, near, self._pieces[holder], softmax))
            at_hand = passing.wait() if passing is not None else at_hand
        outs, lses = zip(*parts, strict=True)
        return self._around.ops.merge_attention(torch.stack(outs), torch.stack(lses), softmax.sinks_H)


class Queries:
    """Queries visit all ranks' keys."""

    def __init__(self, around: Around, share: Share, rows: DeviceRows, table_SC: Tensor) -> None:
        self._around, self._counts = around, share.count_N.tolist()
        device, slots_R = table_SC.device, rows.slots_R[: len(share.end_R)]
        seen = [_seen(share, asker, share.rank, around.window) for asker in range(share.ranks)]
        parts = Rows(
            slots_R.repeat(share.ranks),
            upload(np.append(0, np.cumsum(share.count_NR.flatten())), device),
            upload(np.concatenate([kv_len_R for kv_len_R, _ in seen]), device),
        )
        first_R = None
        if around.window is not None:
            first_R = upload(np.concatenate([first_R for _, first_R in seen if first_R is not None]), device)
        self._piece = _piece(around, parts, first_R, table_SC, sum(self._counts), 0)

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: Cached, softmax: Softmax) -> Tensor:
        ring = self._around.ring
        shapes = [(count, *q_THD.shape[1:]) for count in self._counts]
        visitors_THD = torch.cat(ring.exchanged([q_THD] * ring.size, shapes))
        asked_T = positions_T
        if softmax.slopes_H is not None:
            asked_T = torch.cat(ring.exchanged([positions_T] * ring.size, [(count,) for count in self._counts]))
        answers = pack(*self._around.part(visitors_THD, asked_T, ring.rank, cached, self._piece, softmax))
        parts = ring.exchanged(answers.split(self._counts), [(len(q_THD), *answers.shape[1:])] * ring.size)
        return self._around.ops.merge_attention(*unpack(parts, q_THD.shape[2]), softmax.sinks_H)


class Heads:
    """Every rank attends for some heads, with the queries and the keys of all tokens in their order."""

    def __init__(self, around: Around, share: Share, blocks: Blocks) -> None:
        self._around, self._share, self._blocks = around, share, blocks
        ring, device = around.ring, blocks.id_B.device
        self._counts = share.count_N.tolist()
        self._back_T = upload(np.argsort(share.order_T), device)
        self._order_T = upload(share.order_T, device)
        kv_len_R = share.end_R - blocks.lowest_R * ring.size
        rows = Rows(
            blocks.slots_R,
            upload(np.append(0, np.cumsum(share.num_tokens_R)), device),
            upload(kv_len_R, device),
        )
        schedule = around.schedule(rows, len(share.order_T), ranks=ring.size)
        self._batch = RaggedBatch(
            **rows._asdict(), block_table_SC=blocks.table_RC, tokens_each=0, num_tokens_R=share.num_tokens_R,
            kv_bound_R=kv_len_R, schedule=schedule,
        )  # fmt: skip

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: Cached, softmax: Softmax) -> Tensor:
        ring, (num_tokens, num_heads, head_dim) = self._around.ring, q_THD.shape
        heads, mine = num_heads // ring.size, slice(ring.rank * num_heads // ring.size, None)
        asked = ring.exchanged(q_THD.split(heads, 1), [(count, heads, head_dim) for count in self._counts])
        k_NGPD, v_NGPD = self._gathered(self._blocks.taken(cached))
        out_THD = self._around.ops.paged_attention(
            torch.cat(asked)[self._back_T],
            k_NGPD,
            v_NGPD,
            self._batch,
            scale=softmax.scale,
            window=self._around.window,
            sinks_H=None if softmax.sinks_H is None else softmax.sinks_H[mine][:heads],
            softcap=softmax.softcap,
            slopes_H=None if softmax.slopes_H is None else softmax.slopes_H[mine][:heads],
        )
        answers = out_THD[self._order_T].split(self._counts)
        return torch.cat(ring.exchanged(answers, [(num_tokens, heads, head_dim)] * ring.size), 1)

    def _gathered(self, own: Tensor) -> Tensor:
        """Return all tokens' keys and values of this rank's heads, in the order of the tokens: [2, B, G / N, P * N,
        D]."""
        ring = self._around.ring
        parts = own.split(own.shape[2] // ring.size, 2)
        got = ring.exchanged(parts, [tuple(parts[0].shape)] * ring.size)
        return torch.stack(got, 4).flatten(3, 4)


def _seen(share: Share, asker: int, holder: int, window: int | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return how many keys of one rank the last query of another sees in each row, and the first key that its first
    query sees, if there is a window."""
    ranks, count_R = share.ranks, share.count_NR[asker]
    position_R = share.first_NR[asker] * ranks + asker  # of the first query
    kv_len_R = np.where(count_R > 0, held(position_R + 1, holder, ranks) + count_R - 1, 0)
    return kv_len_R, None if window is None else held(position_R - window + 1, holder, ranks)
