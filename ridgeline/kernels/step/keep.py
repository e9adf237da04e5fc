"""States of constant size behind verified drafts: those that stay go to the blocks where later steps look for them.

A row that verifies drafts leaves the state behind its first token in its own block, as any row does. Behind each draft
it leaves one in a block of the scratch, since nobody knows yet which drafts are right. Once that is known, `step_keep`
copies what plain decoding would have left.

Legend:
    R  rows
    D  drafts of a row, at most
    S  slots
    C  columns of a block table
    N  block ids
    W  words of a unit
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ridgeline.core.cache_layout import NULL_BLOCK
from ridgeline.kernels.op import Implementation, Op, on_gpu


def step_keep(
    slots_R: Tensor,
    kv_len_R: Tensor,
    active_R: Tensor,
    num_logits_R: Tensor,
    kv_len_S: Tensor,
    block_table_SC: Tensor,
    block_size: int,
    scratch_DR: Tensor,
    units_NW: Tensor,
    layers: int,
    layer_step: int,
) -> None:
    """Copy the states that stay from the scratch to the rows' blocks, in all layers of a cache group; in place.

    A row had kv_len_R - num_logits_R tokens before its first one, and has kv_len_S now. The state behind its draft d
    lies in block scratch_DR[d, r]. Of the drafts that it keeps, the last one in each entry of the block table leaves
    its state in that entry's block. Rows that are not active, or verified nothing, change nothing.

    slots_R, kv_len_R, active_R: as of `step_inputs`. num_logits_R, kv_len_S: as of `step_verify`, behind it.
    scratch_DR: int64, blocks of no request.
    units_NW: the words of a unit by block id; those of layer l lie l * layer_step ids further.
    """
    before_R = kv_len_R - num_logits_R.long()
    slots_R = slots_R.long()
    kept_R = torch.where(active_R, kv_len_S[slots_R] - before_R, 0)
    column_D = 1 + torch.arange(len(scratch_DR), device=scratch_DR.device)
    position_RD = before_R[:, None] + column_D
    ends_RD = ((position_RD + 1) % block_size == 0) | (column_D + 1 == kept_R[:, None])
    entry_RD = (position_RD.clamp(min=0) // block_size).clamp(max=block_table_SC.shape[1] - 1)
    target_RD = block_table_SC[slots_R[:, None], entry_RD].long()
    target_RD = torch.where((column_D < kept_R[:, None]) & ends_RD, target_RD, NULL_BLOCK)
    ahead_L = torch.arange(layers, device=scratch_DR.device)[:, None] * layer_step
    for source_R, target_R in zip(scratch_DR, target_RD.unbind(1), strict=True):
        wanted_R = target_R != NULL_BLOCK
        source, target = ((ahead_L + ids_R[wanted_R]).flatten() for ids_R in (source_R, target_R))
        if len(source):
            units_NW.index_copy_(0, target, units_NW.index_select(0, source))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case for tests.

    kept: the tokens that each row keeps of its 1 + `drafts`; None is a row whose slot is stopped, and 0 one that
        verified nothing.
    lengths: the tokens before each row.
    shared: all entries of a row's table name one block.
    """

    kept: tuple[int | None, ...]
    lengths: tuple[int, ...]
    drafts: int = 3
    block_size: int = 16
    layers: int = 2
    words: int = 5
    shared: bool = False

    def inputs(self, device: torch.device) -> tuple[tuple, Tensor, Tensor]:
        """Return (arguments of `step_keep` up to the scratch, the scratch, all units)."""
        rows, columns = len(self.kept), 64 // self.block_size + 4
        places = torch.arange(rows * columns).view(rows, columns) // (columns if self.shared else 1)
        table_SC = torch.full((rows + 2, columns + 3), 10**9, dtype=torch.int32)[:, :columns]
        table_SC[1:-1] = 1 + places.int()
        scratch_DR = 1 + rows * columns + torch.arange(rows * self.drafts).view(self.drafts, rows)
        verify_R = torch.tensor([1 if kept == 0 else 1 + self.drafts for kept in self.kept], dtype=torch.int32)
        kept_R = torch.tensor([1 if kept in (0, None) else kept for kept in self.kept])
        active_R = torch.tensor([kept is not None for kept in self.kept])
        length_R = torch.tensor(self.lengths)
        kv_len_S = torch.zeros(rows + 2, dtype=torch.int64)
        kv_len_S[1:-1] = length_R + kept_R
        ids = 1 + rows * columns + rows * self.drafts
        units_NW = torch.arange(self.layers * ids * self.words).view(-1, self.words)
        slots_R, kv_len_R = 1 + torch.arange(rows).int(), torch.where(active_R, length_R + verify_R, 1)
        given = slots_R, kv_len_R, active_R, verify_R, kv_len_S
        table_SC = table_SC.to(device)
        return (*(part.to(device) for part in given), table_SC, self.block_size), scratch_DR.to(device), units_NW


CASES = (
    Case(kept=(4, 1, 2, None, 3, 0), lengths=(5, 16, 15, 20, 30, 9)),
    Case(kept=(4, 4, 3, 2), lengths=(1, 2, 3, 4), block_size=2),
    Case(kept=(4, 3, None, 2), lengths=(6, 7, 8, 9), block_size=1, layers=1, words=1500),
    Case(kept=(6, 5), lengths=(13, 14), drafts=5, shared=True),
)

STEP_KEEP = Op(
    "step_keep",
    step_keep,
    (
        Implementation("triton", "ridgeline.kernels.step.triton_keep:step_keep", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.keep:step_keep"),
    ),
)
