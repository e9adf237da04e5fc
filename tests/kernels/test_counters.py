"""Counters of arrivals: launches behind each other share them, those that may run at the same time do not."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.base import counters as module
from ridgeline.kernels.base.counters import COUNTERS, counters, meeting

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kept", {})


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current stream and its capture, as launches see them."""
    found = [7, 0]
    monkeypatch.setattr(module, "_place", lambda device: tuple(found))
    return found


def test_launches_of_one_stream_have_the_same_zeros_again() -> None:
    first = counters(CPU, 7)
    assert len(first) == COUNTERS
    assert not first.any()
    first[3] = 5  # what a launch that ended badly would leave
    assert int(counters(CPU, COUNTERS)[3]) == 5
    with pytest.raises(ValueError, match=str(COUNTERS + 1)):
        counters(CPU, COUNTERS + 1)


def test_no_two_parts_share_memory_and_all_are_aligned_alike() -> None:
    parts = meeting(CPU)
    for each in parts:
        assert not each.any()
        assert (each.data_ptr() - parts.tiles.data_ptr()) % 64 == 0  # one kernel for each place
        each.fill_(-1)
        assert sum(bool(other.any()) for other in parts) == 1
        each.zero_()


def test_streams_and_captures_share_nothing(place: list[int]) -> None:
    seen = []
    for stream, capture in ((7, 0), (8, 0), (7, 1), (8, 2), (7, 3)):
        place[:] = stream, capture
        mine = counters(CPU, 1)
        assert counters(CPU, 1) is mine  # for the next launch there
        assert not mine.any()
        mine.fill_(1)
        seen.append(mine)
    place[:] = 7, 0
    assert counters(CPU, 1) is seen[0]  # behind a capture the stream has its own again
    assert len(module._kept) == 4  # of a stream's captures the last one's alone


@pytest.mark.gpu
def test_graphs_captured_in_one_stream_share_no_counters_and_begin_with_zeros() -> None:
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    graphs, places, copies = [], [], []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            mine = counters(device, 1)
            assert counters(device, 1).data_ptr() == mine.data_ptr()
            mine.add_(1)
            copies.append(mine.clone())
        graphs.append(graph)
        places.append(mine)
    with torch.cuda.stream(stream):
        assert counters(device, 1).data_ptr() not in {each.data_ptr() for each in places}
    assert places[0].data_ptr() != places[1].data_ptr()
    for _ in range(3):
        for graph in graphs:
            graph.replay()
    torch.cuda.synchronize()
    assert all(bool((each == 1).all()) for each in copies)
