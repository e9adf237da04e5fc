"""Streams of one process and of several that repeat their calls: what differs is counted, and what stalls is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.kernels.gemm.plain.cases import LinearCase
from ridgeline.kernels.gemm.plain.op import LINEAR
from ridgeline_bench.scripts import shared_gpu
from ridgeline_bench.scripts.shared_gpu import ComparedCall, StreamReport, load, run, units


class Pipe:
    """A connection whose other end says at once that all are ready."""

    def __init__(self) -> None:
        self.sent: list[list[StreamReport]] = []

    def send(self, told: list[StreamReport]) -> None:
        self.sent.append(told)

    def recv(self) -> None: ...


def test_each_stream_counts_its_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pipe: Any = Pipe()
    run(1, 2, 0.2, 30.0, True, pipe)
    for number, told in enumerate(pipe.sent[-1]):
        assert (told.process, told.stream, told.different) == (1, number, 0)
        assert told.graphs > 0
        assert told.launches == told.graphs * len(units(True))
        assert 0 < told.gap < 30


def test_a_result_that_differs_in_one_bit_is_found() -> None:
    call = ComparedCall((LINEAR, LinearCase(3, 64, 16)), torch.device("cpu"))
    assert not call.again()
    x = call._first[0]
    x.view(torch.int32)[2, 5] ^= 1
    assert call.again()
    x.view(torch.int32)[2, 5] ^= 1
    assert not call.again()


def test_a_stream_that_does_nothing_is_told() -> None:
    with pytest.raises(TimeoutError, match="process 0 has done nothing for -1 s"):
        load(1, 1, 60.0, patience=-1.0, quick=True)


def test_the_command_ends_with_what_it_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["shared_gpu", "--seconds", "5"])
    for different, code in ((0, 0), (2, 1)):
        found = [StreamReport(0, 0, 9, 90, 0, 0.5), StreamReport(0, 1, 9, 90, different, 0.25)]
        monkeypatch.setattr(shared_gpu, "load", lambda *_, found=found: found)
        with pytest.raises(SystemExit) as ended:
            shared_gpu.main()
        assert ended.value.code == code
        assert "500.0" in capsys.readouterr().out


@pytest.mark.gpu
def test_two_processes_share_a_gpu() -> None:
    """One stream each: programs of split products wait for each other, by counters that all streams share."""
    found = load(2, 1, 4.0, quick=True)
    assert len(found) == 2
    assert all(told.different == 0 and told.graphs > 20 for told in found), found
