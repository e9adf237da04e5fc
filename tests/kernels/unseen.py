"""Cells of a paged cache that no query of a step sees, so that tests can fill them with what must not matter."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.kernels.attention.paged.cases import AttentionCase
from ridgeline.kernels.attention.paged.op import RaggedBatch


def seen_cells(case: AttentionCase, batch: RaggedBatch) -> Tensor:
    """Bool [N, P] over the blocks that the table can name: seen by a row that has tokens."""
    seen = torch.zeros(int(batch.block_table_SC.max()) + 1, case.block_size, dtype=torch.bool)
    table_SC = batch.block_table_SC.cpu().long()
    for slot, (new, length) in zip(batch.slots_R.tolist(), case.rows, strict=True):
        first = 0 if case.window is None else max(0, length - new - case.window + 1)
        position = torch.arange(first, length if new else first)
        seen[table_SC[slot, position // case.block_size], position % case.block_size] = True
    return seen


def cleared(case: AttentionCase, caches: list[Tensor], batch: RaggedBatch) -> list[Tensor]:
    """Keys and values with 0 in every cell that no row sees, as strided halves of one buffer."""
    return _filled(case, caches, batch, (0.0,))


def spoiled(case: AttentionCase, caches: list[Tensor], batch: RaggedBatch) -> list[Tensor]:
    """The same with NaN, inf and -inf by turns."""
    return _filled(case, caches, batch, (torch.nan, torch.inf, -torch.inf))


def _filled(case: AttentionCase, caches: list[Tensor], batch: RaggedBatch, values: tuple[float, ...]) -> list[Tensor]:
    seen = torch.zeros(caches[0].shape[0], case.block_size, dtype=torch.bool)
    known = seen_cells(case, batch)
    seen[: len(known)] = known
    turn = torch.arange(seen.numel()).view(seen.shape) % len(values)
    units = torch.stack(caches, 1)
    for i, value in enumerate(values):
        units.masked_fill_((~seen & (turn == i)).to(units.device)[:, None, None, :, None], value)
    return [units[:, 0], units[:, 1]]


def forgotten(case: AttentionCase, batch: RaggedBatch) -> RaggedBatch:
    """The batch with the null block, as the engine has it, wherever a row's window has passed."""
    table_SC = batch.block_table_SC.clone()
    for slot, (new, length) in zip(batch.slots_R.tolist(), case.rows, strict=True):
        if case.window is not None:
            table_SC[slot, : max(0, length - new - case.window + 1) // case.block_size] = 0
    return replace(batch, block_table_SC=table_SC)
