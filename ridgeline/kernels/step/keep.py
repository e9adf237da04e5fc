"""States of constant size behind verified drafts: those that stay go to the blocks where later steps look for them.

A row that verifies drafts leaves the state behind its first token in its own block, as any row does. Behind each draft
it leaves one in a block of the scratch, since it is not known yet which drafts are right. Once that is known,
`step_keep` copies what plain decoding would have left.

Legend:
    R  rows
    D  drafts of a row, at most
    S  slots
    C  columns of a block table
    N  block ids
    W  words of a unit
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.kernels.base.limits import NULL_BLOCK
from ridgeline.kernels.base.op import Implementation, Op, on_gpu
from ridgeline.kernels.step.units import GroupUnits


def step_keep(
    slots_R: Tensor,
    kv_len_R: Tensor,
    active_R: Tensor,
    num_logits_R: Tensor,
    kv_len_S: Tensor,
    scratch_DR: Tensor,
    units: GroupUnits,
) -> None:
    """Copy the states that stay from the scratch to the rows' blocks, in all layers of a cache group; in place.

    A row had kv_len_R - num_logits_R tokens before its first one, and has kv_len_S now. The state behind its draft d
    lies in block scratch_DR[d, r]. Of the drafts that it keeps, the last one in each entry of the block table leaves
    its state in that entry's block. Rows that are not active, or verified nothing, change nothing.

    slots_R, kv_len_R, active_R: as of `step_inputs`. num_logits_R, kv_len_S: as of `step_verify`, behind it.
    scratch_DR: int64, blocks of no request.
    units: [N, W].
    """
    units_NW, block_table_SC, block_size, layers, layer_step = units
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


STEP_KEEP = Op(
    "step_keep",
    step_keep,
    (
        Implementation("triton", "ridgeline.kernels.step.triton_keep:step_keep", on_gpu),
        Implementation("torch", "ridgeline.kernels.step.keep:step_keep"),
    ),
)
