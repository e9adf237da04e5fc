"""Attention of ranks that divide the cached tokens between them, in steps whose tokens all of them run: each attends to
its own keys, and all add up all parts. It gives what one device gives. (divided_rounds.py has the steps in which ranks
divide the tokens too.)

Legend:
    T  tokens whose queries this rank has
    R  rows
    N  ranks
    H  query heads
    G  key/value heads
    D  head width
    P  tokens of a block that a rank holds
    C  columns of a block table
    S  slots
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.plan.stripes import held
from ridgeline.kernels.attention.paged.op import AttentionShape, RaggedBatch, Schedule, Softmax
from ridgeline.kernels.ops import Ops
from ridgeline.parallel.ring import Ring
from ridgeline.worker.state.states import DeviceRows


class KeptKeys(Protocol):
    """The things that one layer keeps of this rank's tokens."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors by block, which are alike."""

    def of(self, parts: Tensor) -> Self:
        """Return the same of other blocks, stacked as these tensors are."""


class Cached(NamedTuple):
    """One layer's keys and values on this rank, [blocks, G, P, D] each."""

    k_NGPD: Tensor
    v_NGPD: Tensor

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self

    def of(self, parts: Tensor) -> Cached:
        return Cached(parts[0], parts[1])


class Round(Protocol):
    """The attention of a step, for layers with the same heads and window."""

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: Any, softmax: Softmax) -> Tensor:
        """Return the attention of the rank's queries to all ranks' keys: [T, H, D]. This step's keys are cached
        already. cached: what the round's `Around` takes."""


class Rows(NamedTuple):
    """Rows on the device, as a `RaggedBatch` has them."""

    slots_R: Tensor
    start_R1: Tensor
    kv_len_R: Tensor


class Piece(NamedTuple):
    """Queries and the keys of one rank. first_R: as in `partial_attention`."""

    batch: RaggedBatch
    first_R: Tensor | None


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
        self, q_THD: Tensor, positions_T: Tensor, holder: int, cached: Any, piece: Piece, softmax: Softmax
    ) -> tuple[Tensor, Tensor]:
        """Return the attention to the keys of one rank, and the logarithms of its sums.

        From one key of a rank to its next there are N tokens, and the nearest one that a query sees may be up to N - 1
        tokens away. The second is the same for all keys, so it goes into the logarithm.
        """
        ranks, slopes_H = self.ring.size, softmax.slopes_H
        sloped = softmax if slopes_H is None else softmax._replace(slopes_H=slopes_H * ranks)
        out_THD, lse_TH = self.ops.partial_attention(
            q_THD, cached.k_NGPD, cached.v_NGPD, piece.batch, sloped, piece.first_R
        )
        if slopes_H is not None:
            lse_TH = lse_TH - slopes_H * ((positions_T - holder) % ranks)[:, None]
        return out_THD, lse_TH

    def piece(
        self,
        rows: Rows,
        first_R: Tensor | None,
        table_SC: Tensor,
        num_tokens: int,
        each: int = 0,
        lengths: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> Piece:
        """Return a batch for `part`. lengths: its tokens and keys by row, if the host knows them."""
        num_tokens_R, kv_bound_R = lengths or (None, None)
        batch = RaggedBatch(
            **rows._asdict(),
            block_table_SC=table_SC,
            tokens_each=each,
            num_tokens_R=num_tokens_R,
            kv_bound_R=kv_bound_R,
            schedule=self.schedule(rows, num_tokens, each),
        )
        return Piece(batch, first_R)

    def schedule(self, rows: Rows, num_tokens: int, each: int = 0, *, ranks: int = 1) -> Schedule | None:
        """Return the schedule of a batch. ranks: it has 1 / ranks of the heads, and blocks that are so many times as
        long, since it has all ranks' keys."""
        _, kv_heads, held_tokens, head_dim = self.cache_NGPD.shape
        like = self.cache_NGPD.new_empty(1, kv_heads // ranks, held_tokens * ranks, head_dim)
        of_layers = AttentionShape(
            num_tokens=num_tokens,
            tokens_each=each,
            num_heads=self.num_heads // ranks,
            num_kv_heads=kv_heads // ranks,
            window=self.window if ranks > 1 else None,
            cache_NGPD=like if self.plain else None,
            head_bytes=head_dim * like.element_size(),
        )
        return self.ops.attention_schedule(rows.start_R1, rows.kv_len_R, rows.slots_R, of_layers)


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
        self._piece = around.piece(parts, first_R, table_SC, rows.num_tokens, 1 if each == 1 else 0)

    def attend(self, q_THD: Tensor, positions_T: Tensor, cached: KeptKeys, softmax: Softmax) -> Tensor:
        ring = self._around.ring
        if self._order_T is not None:
            q_THD, positions_T = q_THD[self._order_T], positions_T[self._order_T]
        part = self._around.part(q_THD, positions_T, ring.rank, cached, self._piece, softmax)
        parts = unpack(ring.stacked(pack(*part)), part[0].shape[2])
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
