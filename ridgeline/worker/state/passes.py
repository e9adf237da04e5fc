"""Steps whose rows verify drafts, for states that every token replaces: one token of each such row after the other.

The state in front of a row is read from its block, and that behind its first token goes to the block of that token, as
in plain decoding. The state behind each draft is written to a block of the scratch, from which the next pass reads it.

Legend:
    N  blocks of scratch
    R  rows
    D  drafts of a row, at most
    T  tokens of the step
    r  rows of a pass, or their tokens
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.scans.metadata import Pass, Passes, ScanMetadata
from ridgeline.kernels.step.op import StepMetadata
from ridgeline.worker.state.states import DeviceRows

Index = slice | Tensor


def scratch_of(scratch_N: Tensor, drafts: int, rows: int) -> Tensor:
    """Return the blocks behind the drafts of so many rows. [D, R]"""
    return scratch_N[: drafts * rows].view(drafts, rows)


def pass_by_pass(rows: DeviceRows, find: Callable[..., StepMetadata], scratch_N: Tensor) -> ScanMetadata:
    """Return the metadata of a step whose rows verify drafts. find: `step_metadata` of the step's rows, which lacks
    start_R1, kv_len_R, last_R and marks_R."""
    num_rows, device = len(rows.slots_R), rows.slots_R.device
    one_R1 = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
    behind_R = rows.start_R1.diff() - 1  # tokens behind a row's first one
    begun = find(one_R1, rows.kv_len_R - behind_R, rows.start_R1[:-1].long(), None)
    first = ScanMetadata(one_R1, *begun, num_tokens=num_rows, tokens_each=1)
    if rows.verify_R is None:
        each = rows.tokens_each
        picked: list[tuple[Index, Index]] = [(slice(None), slice(column, None, each)) for column in range(each)]
        columns = _columns(first, picked, scratch_of(scratch_N, each - 1, num_rows))
        return replace(first, passes=Passes(tuple(columns)))
    assert rows.num_tokens_R is not None
    counts_R, verify_R = rows.num_tokens_R, rows.verify_R
    start_R, most = counts_R.cumsum() - counts_R, int(counts_R[verify_R].max())
    rows_of = [np.flatnonzero(verify_R & (counts_R > column)) for column in range(most)]
    tokens_of = [start_R[row_r] + column for column, row_r in enumerate(rows_of)]
    picked = [(_on(row_r, device), _on(token_r, device)) for row_r, token_r in zip(rows_of, tokens_of, strict=True)]
    parts = _columns(first, picked, scratch_of(scratch_N, most - 1, num_rows))
    if not verify_R.all():
        found = find(rows.start_R1, rows.kv_len_R, rows.last_R, rows.marks_R)
        token_r = np.flatnonzero(np.repeat(~verify_R, counts_R))
        tokens_of, parts = [token_r, *tokens_of], [_others(found, rows, token_r), *parts]
    place_T = np.argsort(np.concatenate(tokens_of))
    return replace(first, passes=Passes(tuple(parts), _on(place_T, device)))


def _columns(first: ScanMetadata, picked: list[tuple[Index, Index]], scratch_DR: Tensor) -> list[Pass]:
    """Return the passes of rows that verify. picked: the rows of each, and their tokens. first: where the first tokens
    of all rows read and write."""
    blocks = [first.reads_R, first.writes_R, *scratch_DR]  # in front of the first token, and behind each
    found = []
    for column, (row, token) in enumerate(picked):
        # Behind the first token of a row that the device has stopped nothing was kept
        fresh_R = first.fresh_R if column < 2 else torch.zeros_like(first.fresh_R)
        by_row = (blocks[column], blocks[column + 1], fresh_R, first.marks_R, first.marked_R)
        reads_r, writes_r, fresh_r, marks_r, marked_r = (part_R[row] for part_R in by_row)
        count = len(reads_r)
        metadata = ScanMetadata(first.start_R1[: count + 1], reads_r, writes_r, fresh_r, marks_r, marked_r, count, 1)
        found.append(Pass(token, metadata))
    return found


def _others(found: StepMetadata, rows: DeviceRows, token_r: np.ndarray) -> Pass:
    """Return the pass of the rows that verify nothing, which have these tokens. found: the blocks of all rows."""
    assert rows.num_tokens_R is not None
    assert rows.verify_R is not None
    device, row_r = rows.slots_R.device, np.flatnonzero(~rows.verify_R)
    counts_r = rows.num_tokens_R[row_r]
    start_r1, index_r = _on(np.concatenate(([0], counts_r.cumsum())), device).int(), _on(row_r, device)
    reads_r, writes_r, fresh_r, marks_r, marked_r = (part_R[index_r] for part_R in found)
    each = int((counts_r == 1).all())
    metadata = ScanMetadata(start_r1, reads_r, writes_r, fresh_r, marks_r, marked_r, len(token_r), each)
    return Pass(_on(token_r, device), metadata)


def _on(values: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(device)
