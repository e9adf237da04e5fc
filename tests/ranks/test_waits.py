"""Which rank waited for which: told by a group with a slow rank, and by notes made up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("msgspec")

from ridgeline import LLM
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.settings.config import LLMConfig
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.stamps import KINDS, SEGMENT, DeviceStamps, HostStamps, what
from ridgeline.ranks import recruits, waits
from ridgeline.ranks.leader import Group
from ridgeline.ranks.waits import Clocks, StepWaits, Waits, events_of, trace
from ridgeline_bench.profile.ranks import read, stragglers
from tests.driving import ask, rig
from tests.ranks.slow_rank import SLEEP

pytestmark = pytest.mark.usefixtures("forked_ranks")

SUM, GATHER = KINDS.index("all_reduce"), KINDS.index("all_gather")


def notes(*events: tuple[int, int, int], shift: int = 0, nbytes: int = 64) -> np.ndarray:
    """Notes of (kind, start, end), in the order of their times."""
    made = [(start + shift, what(kind, nbytes, end=False)) for kind, start, _ in events]
    made += [(end + shift, what(kind, nbytes, end=True)) for kind, _, end in events]
    return np.array(sorted(made), np.int64)


# ---- a group with a slow rank ----------------------------------------------------------------------------------------


def test_the_trace_and_the_figures_name_the_slow_rank(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recruits, "MODULE", "tests.ranks.slow_rank")
    monkeypatch.setattr(waits, "PERIOD", 0.0)
    folder = tmp_path / "traces"
    with rig(tiny_model("llama"), tensor_parallel_size=2, rank_trace_dir=str(folder)) as own:
        own.run(ask("one", [1, 2, 3], max_tokens=6), ask("other", [4, 5], max_tokens=6))
        group = own.worker
        assert isinstance(group, Group)
        layers = own.engine.layout.groups[0].layers
        fast, slow = group.figures().waits
        group.begin_trace()
        own.run(ask("third", [6, 7], max_tokens=3))
        files = group.end_trace()
    late = stragglers(read(files))[0]
    assert late.rank == "rank 1", "torch's own traces, which have nothing of the notes, name it too"
    assert late.caused > 1e6 * SLEEP
    assert fast.waited > slow.waited  # which waits too where others use the machine
    assert slow.caused > fast.caused + SLEEP
    assert fast.share > 0.3
    assert slow.share < 0.3
    traces = [json.loads(path.read_text()) for path in sorted(folder.glob("step-*.json"))]
    assert len(traces) >= 5
    blamed = Counter(made["otherData"]["waited_for_most"] for made in traces)
    assert blamed[1] > len(traces) / 2
    longest = json.loads(next(folder.glob("longest-*.json")).read_text())
    assert longest["otherData"]["waited_for_most"] == 1
    assert longest["otherData"]["clock_offsets_ns"] == [0, 0], "processes of one host have one clock"
    shown = [event for event in longest["traceEvents"] if event["ph"] == "X"]
    waiting = [e for e in shown if e["tid"] == 0 and e["name"] == "waits for rank 1" and e["dur"] > 5e5 * SLEEP]
    assert len(waiting) >= len(layers) - 1
    names = Counter((event["tid"], event["name"]) for event in shown)
    assert names[0, "segment"] == names[1, "segment"] >= 1
    sums = [name for name in ("all_reduce", "all_reduce_norm") if (0, name) in names]
    assert sum(names[0, name] for name in sums) == 2 * len(layers) + 1
    assert all(names[0, name] == names[1, name] for name in sums)
    assert min(event["ts"] for event in shown) == 0
    named = {event["args"]["name"] for event in longest["traceEvents"] if event["ph"] == "M"}
    assert named == {"rank 0", "rank 1"}


def test_one_device_has_nobody_to_wait_for(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with (
        pytest.raises(InvalidConfig, match="set tensor_parallel_size or pipeline_parallel_size too"),
        LLM(tiny_model("llama"), rank_trace_dir=str(tmp_path)),
    ):
        pass
    with pytest.raises(InvalidConfig, match="name of a folder"):
        LLMConfig(rank_trace_dir=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="name of a folder"):
        LLMConfig(tensor_parallel_size=2, rank_trace_dir="")
    (tmp_path / "file").touch()
    with pytest.raises(InvalidConfig, match="cannot be written"):
        Waits(2, tmp_path / "file" / "folder")


# ---- notes made up ---------------------------------------------------------------------------------------------------


def test_who_stays_shortest_came_last() -> None:
    """Rank 1 comes 30 later to the first sum, rank 0 comes 10 later to the second. A message takes 5."""
    clock = 1_000_000_007  # what one clock is ahead of the other; the verdict does not depend on it
    step = StepWaits.of(
        [
            notes((SEGMENT, 0, 100), (SUM, 10, 45), (SUM, 80, 85)),
            notes((SEGMENT, 0, 110), (SUM, 40, 45), (SUM, 70, 85), shift=clock),
        ]
    )
    assert step.waited_RC.tolist() == [[30, 0], [0, 10]]
    assert step.last_C.tolist() == [1, 0]
    assert step.seconds == [100e-9, 110e-9]
    assert [step.caused(rank) for rank in range(2)] == [10e-9, 30e-9]
    assert step.shifts(Clocks([0, clock - 50_000])) == [0, clock], "the ends say it better than a question did"
    assert step.shifts(Clocks([0, 0])) == [0, 0]
    shown = trace(step, step.shifts(Clocks([7, clock])), {})["traceEvents"]
    found = {(e["tid"], e["name"], e["ts"], e["dur"]) for e in shown if e["ph"] == "X" and "waits" in e["name"]}
    assert found == {(0, "waits for rank 1", 0.01, 0.03), (1, "waits for rank 0", 0.07, 0.01)}


def test_ranks_that_do_not_do_the_same_do_not_wait_for_each_other() -> None:
    stages = StepWaits.of([notes((SEGMENT, 0, 10), (SUM, 1, 2)), notes((SEGMENT, 0, 10), (GATHER, 1, 2))])
    assert stages.waited_RC.shape == (2, 0)
    received = StepWaits.of([notes((SEGMENT, 0, 10)), notes((SEGMENT, 0, 10), (KINDS.index("receive"), 1, 7))])
    assert received.waited_R.tolist() == [0, 6e-9], "who waits for a message waits, whoever sends it"
    assert [stages.caused(rank) for rank in range(2)] == [0, 0]
    assert len([e for e in trace(stages, [0, 0], {})["traceEvents"] if e["ph"] == "X"]) == 4


def test_half_a_note_is_left_out() -> None:
    whole = notes((SUM, 5, 9))
    assert [event[:] for event in events_of(whole)] == [(SUM, 64, 5, 9)]
    assert events_of(whole[:1]) == events_of(whole[1:]) == []
    assert events_of(np.zeros((0, 2), np.int64)) == []


def test_the_quickest_question_counts_and_small_differences_are_none() -> None:
    clocks = Clocks.of([(0, [1000, 90_000], 400), (1000, [1060, 91_020], 1100), (5000, [5000, 99_000], 9000)])
    assert clocks == Clocks([0, 91_020 - 1050], 50)
    assert clocks.drifting
    assert not Clocks([0, 0]).drifting


def test_shares_are_of_the_newest_steps_and_files_do_not_pile_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "PERIOD", 0.0)
    monkeypatch.setattr(waits, "NEWEST", 4)
    monkeypatch.setattr(waits, "KEPT", 3)
    own = Waits(2, tmp_path / "new" / "folder")
    for plan in range(8):
        late = 60 if plan < 4 else 10
        own.note(0, plan, notes((SEGMENT, 0, 100), (SUM, 0, late + 5)))
        assert len(own._open) == 1
        own.note(1, plan, notes((SEGMENT, 0, 100), (SUM, late, late + 5)))
        own.note(0, 100 + plan, None)  # of a plan that failed
        assert own._open == {}
    first, second = own.ranks()
    assert first.waited == pytest.approx((4 * 60 + 4 * 10) * 1e-9)
    assert first.share == pytest.approx(0.1)
    assert (second.waited, second.share) == (0, 0)
    assert second.caused == pytest.approx(first.waited)
    assert len(list((tmp_path / "new" / "folder").glob("step-*.json"))) == 3


def test_a_watched_axis_is_the_axis() -> None:
    class Doubles:
        rank, size = 0, 2

        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        def smallest(self, value: int) -> int:
            return value

    own, stamps = Doubles(), HostStamps()
    mesh = Mesh(tp=own)  # type: ignore[arg-type]
    assert mesh.watched(None) is mesh
    assert mesh.watched(stamps).stamps is stamps
    assert Mesh().watched(stamps).tp is Mesh().tp, "one rank waits for nobody"
    axis: Any = mesh.watched(stamps).tp
    assert (axis.rank, axis.size, axis.smallest(3)) == (0, 2, 3)
    for _ in range(2):
        assert axis.all_reduce(torch.ones(6)).tolist() == [2.0] * 6
    assert [(event.kind, event.nbytes) for event in events_of(stamps.take()())] == [(SUM, 24)] * 2
    assert len(stamps.take()()) == 0
    with pytest.raises(AttributeError):
        axis.nothing  # noqa: B018


def test_notes_of_a_device_come_in_order_however_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter a note's time is its number."""
    pytest.importorskip("triton")
    from ridgeline.kernels.base.launch import INTERPRETED
    from ridgeline.parallel import stamps

    if not INTERPRETED:
        pytest.skip("rounds on a CPU, in Triton's interpreter")
    monkeypatch.setattr(stamps, "ROOM", 5)
    own = DeviceStamps(torch.device("cpu"))
    for number in range(3):
        own.stamp(what(SUM, number, end=True))
    first = own.take()
    for number in range(3, 7):
        own.stamp(what(SUM, number, end=True))
    second = own.take()
    assert first()[:, 0].tolist() == [0, 1, 2]
    assert second()[:, 0].tolist() == [3, 4, 5, 6]
    for _ in range(8):
        own.stamp(what(GATHER, 1 << 33, end=False))
    notes_K2 = own.take()()
    assert notes_K2[:, 0].tolist() == [10, 11, 12, 13, 14], "the newest that there was room for"
    assert set(notes_K2[:, 1].tolist()) == {what(GATHER, 1 << 33, end=False)}
    assert own.now() == 15
