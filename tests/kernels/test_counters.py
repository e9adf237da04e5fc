"""Counters of arrivals: launches of one stream share them, those of different streams do not."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.base import counters as module
from ridgeline.kernels.base.counters import COUNTERS, STREAMS, counters, zeros

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_rooms", {})


def test_one_stream_has_the_same_zeros_again_and_each_name_its_own() -> None:
    first = counters(CPU, 7)
    assert len(first) == COUNTERS
    assert not first.any()
    first[3] = 5  # what a launch that ended badly would leave
    assert int(counters(CPU, COUNTERS)[3]) == 5
    assert not zeros("other", CPU, 9, torch.int64).any()
    with pytest.raises(ValueError, match=str(COUNTERS + 1)):
        counters(CPU, COUNTERS + 1)


def test_streams_share_nothing_and_are_not_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, taken = torch.zeros(STREAMS, 4), dict[int, int]()
    module._rooms["some", CPU] = memory, taken
    seen = set()
    for stream in range(STREAMS):
        taken.pop(0, None)  # the place of the stream before goes to a stream of its own
        zeros("some", CPU, 4, torch.float32)[0] = stream + 1
        taken[stream + 1] = taken[0]
        seen.add(int(memory[stream, 0]))
    assert seen == set(range(1, STREAMS + 1))
    taken.pop(0)
    with pytest.raises(RuntimeError, match=f"more than {STREAMS} streams"):
        zeros("some", CPU, 4, torch.float32)


@pytest.mark.gpu
def test_a_graph_has_the_counters_of_the_stream_in_which_it_was_captured() -> None:
    device = torch.device("cuda")
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[0]), pytest.raises(RuntimeError, match="launch once before"):
        counters(device, 1)
    places = []
    for stream in streams:
        with torch.cuda.stream(stream):
            places.append(counters(device, 1).data_ptr())
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=streams[1]):
        captured = counters(device, 1).data_ptr()
        torch.zeros(1, device=device)
    assert places[0] != places[1] == captured
