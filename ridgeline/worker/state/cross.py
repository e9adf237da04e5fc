"""Paged keys and values of encoders' outputs, to which all tokens of a request attend.

They are written by the first step of a request (`worker/encoding.py`), and only read by others. A query sees all of
them, wherever it stands, so each token of a step is a row of one token whose cache ends with the encoder input.

Legend:
    T  tokens: of the step, or of encoder inputs
    R  rows
    S  slots
    C  columns of a block table
    H  query heads
    F  keys of a slot: frames of a sound
    G  key/value heads
    D  head width
    X  columns of a projection: H D of queries, 2 G D of keys and values
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ridgeline.core.plan.crossed import MOST_PICTURES, MOST_RUNS
from ridgeline.core.specs.model import AttentionSpec
from ridgeline.kernels.attention.paged.op import RaggedBatch, Softmax
from ridgeline.kernels.base.kv_cache import numbers, taken
from ridgeline.kernels.small.rotary.op import Projected
from ridgeline.worker.state.paged import PagedKV, PagedLayer, Scheduled
from ridgeline.worker.state.states import DeviceRows

MOST_ROWS = 1024  # that a schedule has: its pieces are counted with work that grows by the square of the rows
BEHIND = 2**31 - 1  # a place that no token has


class CrossKV(PagedKV):
    """A `GroupState` whose keys and values are those of encoder inputs.

    length_S: tokens of each slot's encoder input, at least 1, so that attention is always defined. The
        part that encodes sets it before the first step.
    passes: the step's rows, at most MOST_ROWS together, each with the schedules of their own.
    """

    length_S: Tensor
    position_T: Tensor
    passes: list[dict[Scheduled, RaggedBatch]]
    seen_T1: Tensor | None = None
    table_SC: Tensor

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        self.table_SC = block_table_SC
        slots_T, start_T1, position_T = rows.slots_R, rows.start_R1, rows.kv_len_R - 1
        if rows.tokens_each != 1:
            token_T = torch.arange(rows.num_tokens + 1, dtype=torch.int32, device=slots_T.device)
            row_T = torch.searchsorted(rows.start_R1[1:], token_T[:-1], right=True).clamp(max=len(slots_T) - 1)
            position_T = token_T[:-1] + (rows.kv_len_R - rows.start_R1[1:])[row_T]
            slots_T, start_T1 = slots_T[row_T], token_T
        row_T, length_T, block_table_SC = self._keys_of(slots_T.long(), position_T, block_table_SC)
        self.passes = []
        for first in range(0, max(len(row_T), 1), MOST_ROWS):
            own_T = row_T[first : first + MOST_ROWS]
            part = DeviceRows(
                slots_R=own_T,
                start_R1=start_T1[: len(own_T) + 1],
                kv_len_R=length_T[first : first + MOST_ROWS],
                last_R=start_T1[: len(own_T)],
                num_tokens=len(own_T),
                tokens_each=1,
            )
            super().begin(part, block_table_SC, place_T)
            self.passes.append(self.batches)

    def _keys_of(self, slot_T: Tensor, position_T: Tensor, block_table_SC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each token of the step the row of a block table that names its keys, and the number of these, and
        that table."""
        return slot_T.int(), self.length_S[slot_T], block_table_SC

    def place(self, slot_T: Tensor, position_T: Tensor, block_table_SC: Tensor) -> None:
        """Say where the encoder inputs go that are stored next, by the slot and the position of each token."""
        block_T = block_table_SC[slot_T, position_T // self._block_size].long()
        self.place_T, self.position_T = block_T * self._block_size + position_T % self._block_size, position_T

    def layer(self, index: int) -> CrossLayer:
        return CrossLayer(self, self._ways[index], *self.views[index], self.scales[index])


class SeenKeys:
    """The places of the keys of each slot's pictures, on the device.

    Legend:
        S  slots
        U  pictures
        N  runs of them
        C  columns of a block table

    token_SU: int32, the place of each picture in the prompt; behind all tokens where there is none.
    length_SU, run_SU: int32, the keys that tokens see from this picture on, and the run whose keys these are.
    tables: int32 [S * N, C] for each cache group of such keys, the blocks of each run.
    """

    def __init__(self, slots: int, columns: int, groups: int, device: torch.device) -> None:
        self.token_SU, self.length_SU, self.run_SU = (
            torch.full((slots, MOST_PICTURES), filled, dtype=torch.int32, device=device) for filled in (BEHIND, 1, 0)
        )
        size = slots * MOST_RUNS, columns
        self.tables = [torch.zeros(size, dtype=torch.int32, device=device) for _ in range(groups)]


class SeenKV(CrossKV):
    """A `GroupState` whose keys and values are those of pictures. seen: set before the first step, as the number of
    its own table there."""

    seen: SeenKeys
    number: int

    def _keys_of(self, slot_T: Tensor, position_T: Tensor, block_table_SC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.seen
        index_T = (seen.token_SU[slot_T] <= position_T[:, None]).sum(1) - 1
        self.seen_T1 = (index_T >= 0)[:, None]
        which = slot_T, index_T.clamp(min=0)
        row_T = slot_T * MOST_RUNS + seen.run_SU[which]
        length_T = torch.where(index_T >= 0, seen.length_SU[which], 1)
        return row_T.int(), length_T.int(), seen.tables[self.number]


class CrossLayer(PagedLayer):
    """The encoder's keys and values of one layer, a `layers.cross_attention.AttendsAcross`."""

    _group: CrossKV
    watch: Callable[[Tensor, float], None] | None = None  # sees each step's queries, and the scale of their scores

    @property
    def seen_T1(self) -> Tensor | None:
        return self._group.seen_T1

    def attend(self, q_TX: Tensor, softmax: Softmax) -> Tensor:  # type: ignore[override]
        """Return the attended heads, [T, H * D]."""
        group = self._group
        q_THD = q_TX.view(len(q_TX), self._way.num_heads, -1)
        if self.watch is not None:
            self.watch(q_THD, softmax.scale)
        parts = zip(q_THD.split(MOST_ROWS), (batches[self._way] for batches in group.passes), strict=True)
        each = [
            group.ops.paged_attention(part_THD, self._k, self._v, batch, softmax, self._scales)
            for part_THD, batch in parts
        ]
        return (each[0] if len(each) == 1 else torch.cat(each)).flatten(1)

    def keys(self, slot: int, length: int) -> Tensor:
        """Return a slot's first keys in the step that has begun: float32 [G, F, D]."""
        block_C = self._group.table_SC[slot, : -(-length // self._k.shape[2])].long()
        scale_CGP = None if self._scales is None else self._scales.k_NGP[block_C]
        k_CGPD = numbers(taken(self._k, block_C), scale_CGP, torch.float32)
        return k_CGPD.transpose(0, 1).flatten(1, 2)[:, :length]

    def write(self, kv_TX: Tensor, spec: AttentionSpec) -> None:
        """Store keys and values where the group was told to."""
        group, heads = self._group, spec.num_kv_heads
        kkv_TX = torch.cat((kv_TX[:, : spec.kv_size], kv_TX), dim=-1)  # the op wants queries too
        projected = Projected(
            kkv_TX, None, None, 0.0, None, group.position_T, self._k, self._v, group.place_T, heads, heads, False,
            self._scales,
        )  # fmt: skip
        group.ops.rope_kv(projected)
