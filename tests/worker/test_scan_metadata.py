"""Rows cut into chunks: every token is in one, in order, and a mark ends one. And the blocks of rows of all kinds."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import Ops
from ridgeline.kernels.scans.metadata import ScanMetadata, rows_of
from ridgeline.worker.state.buffer import StateMemory
from ridgeline.worker.state.recurrent import Recurrent
from ridgeline.worker.state.states import DeviceRows
from tests.engine.layouts import layout_of


def pieces(length: int, mark: int, size: int) -> list[int]:
    """The lengths of a row's chunks, in order."""
    found = []
    for part in (mark, length - mark):
        found += [min(size, part - start) for start in range(0, part, size)]
    return found


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1)), min_size=1, max_size=6), st.sampled_from((1, 4, 16)))
def test_chunks_hold_every_token_once_and_end_at_marks(rows: list[tuple[int, float]], size: int) -> None:
    lengths = [length for length, _ in rows]
    marks = [int(length * share) for length, share in rows]
    metadata: ScanMetadata = rows_of(lengths, list(range(1, len(rows) + 1)), torch.device("cpu"))
    metadata = replace(metadata, marks_R=torch.tensor(marks, dtype=torch.int32))
    chunks = metadata.chunks(size)
    expected, token = [], 0
    for row, (length, mark) in enumerate(zip(lengths, marks, strict=True)):
        assert int(chunks.of_R1[row]) == len(expected)
        for count in pieces(length, mark, size):
            expected.append((token, count, row))
            token += count
    found = list(zip(chunks.first_C.tolist(), chunks.length_C.tolist(), chunks.row_C.tolist(), strict=True))
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {(0, 0, len(rows))}
    assert int(chunks.of_R1[-1]) == len(expected)


def test_rows_that_are_stopped_or_padded_write_no_state_and_keep_none() -> None:
    """Whatever mark they were given, and though a row without tokens has the last token of the row before it."""
    memory = StateMemory(layout_of(((None, 1), ("state", 2)), 4, 9), torch.device("cpu"))
    ops = Ops(Platform(device_type="cpu"))
    group = Recurrent(memory, 1, None, torch.float32, ops)  # type: ignore[arg-type]  # the model is not looked at
    # one token that decodes, one of a stopped row, a chunk from token 3 to 9 with a mark at 8, and no tokens at all
    rows = DeviceRows(
        slots_R=torch.tensor([0, 1, 2, 0], dtype=torch.int32),
        start_R1=torch.tensor([0, 1, 2, 8, 8], dtype=torch.int32),
        kv_len_R=torch.tensor([9, 1, 9, 0], dtype=torch.int32),
        last_R=torch.tensor([0, 1, 7, 7]),
        num_tokens=8,
        tokens_each=0,
        marks_R=torch.tensor([0, 1, 5, 3], dtype=torch.int32),
    )
    table_SC = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]], dtype=torch.int32)
    place_T = torch.tensor([13 * 4, 0, 31 * 4 + 3, *range(32 * 4, 32 * 4 + 4), 33 * 4])
    group.begin(rows, table_SC, place_T)
    metadata = group.metadata
    assert metadata.writes_R.tolist() == [13, 0, 33, 0]
    assert metadata.marks_R.tolist() == [0, 0, 5, 0]
    assert metadata.marked_R.tolist() == [0, 0, 32, 0]
    assert metadata.reads_R[[0, 2]].tolist() == [12, 31]
    assert metadata.fresh_R.tolist() == [False, True, False, True]
