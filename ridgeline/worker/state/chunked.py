"""Paged keys and values of attention inside chunks, such as Llama 4's.

A token sees only keys of its own chunk, and a chunk has whole blocks. So a row's tokens in one chunk are a row of their
own here, whose table begins with the chunk's first block and whose length counts from there. Attention then needs no
mask but the causal one, and each of its kernels serves.

Legend:
    S  slots
    C  columns of a block table
    T  tokens of the step
    R  rows
    J  chunks that a row may reach into
    B  blocks of a chunk
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.core.specs.state import ChunkedKVSpec
from ridgeline.worker.state.paged import PagedKV
from ridgeline.worker.state.states import DeviceRows


class ChunkedKV(PagedKV):
    """A `GroupState` whose tokens see keys of their own chunk."""

    def begin(self, rows: DeviceRows, block_table_SC: Tensor, place_T: Tensor) -> None:
        assert isinstance(self._spec, ChunkedKVSpec)
        super().begin(*by_chunk(rows, block_table_SC, self._spec.chunk, self._block_size), place_T)


def by_chunk(rows: DeviceRows, block_table_SC: Tensor, chunk: int, block_size: int) -> tuple[DeviceRows, Tensor]:
    """Return the rows cut at the multiples of `chunk`, and their block tables [rows, B], which begin there. Rows cannot
    have trees of drafts.

    The number of rows does not depend on the lengths, which the host need not know: rows without tokens make it up.
    """
    assert rows.tree is None
    if block_table_SC.shape[1] * block_size <= chunk:  # no request is longer
        return rows, block_table_SC
    alone = rows.tokens_each == 1
    count = 1 if alone else 1 - (1 - (rows.tokens_each or rows.num_tokens)) // chunk
    start_R, kv_len_R, device = rows.start_R1[:-1], rows.kv_len_R, rows.slots_R.device
    first_R = kv_len_R - rows.start_R1.diff()  # below 0 for a row that has stopped
    begin_RJ = first_R.clamp(min=0)[:, None] // chunk * chunk + chunk * torch.arange(count, device=device)
    end_RJ = torch.minimum(begin_RJ + chunk, kv_len_R[:, None])
    until_RJ = (end_RJ - first_R[:, None]).clamp(min=0)
    stops_RJ = start_R[:, None] + until_RJ
    start_R1 = torch.cat((rows.start_R1[:1], stops_RJ.flatten())).to(rows.start_R1.dtype)
    block_RJB = begin_RJ[..., None] // block_size + torch.arange(chunk // block_size, device=device)
    slots_RJB = rows.slots_R.long()[:, None, None].expand_as(block_RJB)
    table_SB = block_table_SC[slots_RJB, block_RJB.clamp(max=block_table_SC.shape[1] - 1)].flatten(0, 1)
    bound_R = rows.kv_bound_R
    cut = replace(
        rows,
        slots_R=torch.arange(len(table_SB), dtype=rows.slots_R.dtype, device=device),
        start_R1=start_R1,
        kv_len_R=(end_RJ - begin_RJ).clamp(min=0).flatten().to(kv_len_R.dtype),
        tokens_each=1 if alone else 0,
        prefix_4R=None,
        num_tokens_R=rows.num_tokens_R if alone else None,
        kv_bound_R=np.minimum(bound_R, chunk) if alone and bound_R is not None else None,
    )
    return cut, table_SB
