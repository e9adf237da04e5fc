"""Traces of several processes on one time axis, made up: what is merged, which pauses are named, and who came last."""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.profile.flame import of_trace, svg
from ridgeline_bench.profile.ranks import bubbles, main, merge, read, report, stragglers
from ridgeline_bench.profile.trace import read_trace
from tests.chromium import CHROMIUM, FLAGS


def event(name: str, start: float, took: float, cat: str = "user_annotation", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": start, "dur": took}


def written(file: Path, base_ms: float, *events: dict[str, Any], **more: Any) -> Path:
    arrow = {"ph": "s", "id": 3, "pid": 7, "tid": 1, "ts": 1.0, "cat": "ac2g", "name": "ac2g"}
    named = {"ph": "M", "name": "process_name", "pid": 7, "ts": 0, "args": {"name": "python"}}
    facts = {"baseTimeNanoseconds": int(1e6 * base_ms), **more}
    file.write_text(json.dumps({**facts, "traceEvents": [named, arrow, *events]}))
    return file


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """A host, and two ranks whose clocks began 1 and 2 ms after it. Rank 1 comes 300 µs late to the first sum, rank 0
    comes 20 µs late to the second one; both pause for 400 µs, in which the host schedules."""
    host = written(
        tmp_path / "torch-host.json", 5.0, event("engine schedule", 2150, 380), event("engine submit", 0, 100)
    )
    zero = written(
        tmp_path / "torch-rank0.json", 6.0, event("segment", 0, 1100), event("all_reduce", 100, 350),
        event("segment", 1500, 200), event("all_reduce", 1620, 30),
    )  # fmt: skip
    one = written(
        tmp_path / "torch-rank1.json", 7.0, event("segment", -900, 1000), event("all_reduce", -600, 50),
        event("segment", 500, 300), event("all_reduce", 600, 50), event("gather_rows", 700, 10),
    )  # fmt: skip
    return [host, zero, one]


def test_ranks_have_one_time_axis(traces: list[Path]) -> None:
    processes = read(traces)
    assert [each.name for each in processes] == ["host", "rank 0", "rank 1"]
    assert [each.busy for each in processes[1:]] == [[(1000, 2100), (2500, 2700)], [(1100, 2100), (2500, 2800)]]
    made = merge(processes)["traceEvents"]
    begun = {(each["pid"], each["ts"]) for each in made if each.get("name") == "segment"}
    assert {when for _, when in begun} == {1000, 1100, 2500}
    names = {each["args"]["name"] for each in made if each.get("name") == "process_name"}
    assert names == {"host: python", "rank 0: python", "rank 1: python"}
    arrows = [each["id"] for each in made if each["ph"] == "s"]
    assert len(set(arrows)) == 3, "arrows of different processes are not one"


def test_ranks_of_two_folders_are_two_processes(traces: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    written(other / "torch-rank0.json", 6.0, event("segment", 0, 1100))
    processes = read([*traces, other / "torch-rank0.json"])
    assert [each.name for each in processes] == ["host", f"{tmp_path}/rank 0", "rank 1", f"{other}/rank 0"]
    assert len({each["pid"] for each in merge(processes)["traceEvents"]}) == 4
    with pytest.raises(InvalidConfig, match="is given twice"):
        read([*traces, traces[0]])


@pytest.mark.parametrize("base", [None, "soon", [1]])
def test_a_trace_without_a_clock_is_named(tmp_path: Path, base: Any) -> None:
    file = written(tmp_path / "a.json", 0.0, baseTimeNanoseconds=base)
    with pytest.raises(InvalidConfig, match=r"a\.json' does not say when its clock began"):
        read([file])


@pytest.mark.parametrize("wrong", [{"ts": None}, {"args": None, "name": "process_name", "ph": "M"}, {"pid": [1]}])
def test_an_event_that_is_none_is_told_and_so_is_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: dict[str, Any]
) -> None:
    file = written(tmp_path / "rank0.json", 0.0, event("segment", 0, 10), {"ph": "i", **wrong})
    fine = written(tmp_path / "rank1.json", 0.0, event("segment", 0, 10))
    for trace, out, said in (
        (file, tmp_path / "m.json", "rank 0 has an event"),
        (fine, tmp_path / "no" / "m", "No such"),
    ):
        monkeypatch.setattr("sys.argv", ["ranks", str(trace), "--out", str(out)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_a_rank_of_a_machine_called_host_is_a_rank(tmp_path: Path) -> None:
    """torch's own handler names files after machines."""
    [process] = read([written(tmp_path / "host7_123.pt.trace.json", 0.0, event("segment", 0, 10))])
    assert not process.is_host


def test_many_pauses_beside_many_ranges_take_no_product_of_both(tmp_path: Path) -> None:
    count = 20_000
    host = written(tmp_path / "host.json", 0.0, *(event("engine schedule", 30 * i, 10) for i in range(count)))
    rank = written(tmp_path / "rank0.json", 0.0, *(event("segment", 30 * i + 12, 17) for i in range(count)))
    processes = read([host, rank])
    started = time.process_time()
    found = bubbles(processes)
    assert len(found) == count - 1
    assert {(round(each.micros), each.host) for each in found} == {(13, "engine schedule")}
    assert time.process_time() - started < 5


def test_bubbles_and_stragglers_have_names(traces: list[Path]) -> None:
    processes = read(traces)
    found = bubbles(processes)
    assert [(each.rank, each.micros, each.host) for each in found] == [
        ("rank 0", 400, "engine schedule"), ("rank 1", 400, "engine schedule"),
    ]  # fmt: skip
    late, other = stragglers(processes)
    assert (late.rank, late.caused, late.waited, late.last) == ("rank 1", 300, 20, 1)
    assert late.longest == (300, "all_reduce 0", 1400)
    assert (other.rank, other.caused, other.last) == ("rank 0", 20, 1)
    assert "the straggler is rank 1: the others waited 0.30 ms for it" in report(processes)


def test_clocks_of_several_hosts_agree_where_collectives_end(traces: list[Path]) -> None:
    """Rank 1's clock is two minutes ahead."""
    ahead = json.loads(traces[2].read_text())
    ahead["baseTimeNanoseconds"] += 120_000_000_000
    traces[2].write_text(json.dumps(ahead))
    assert stragglers(read(traces))[0].caused > 1e8
    late = stragglers(read(traces, align=True))[0]
    assert (late.rank, round(late.caused)) == ("rank 1", 300)


def test_a_trace_without_a_beginning_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("[]")
    with pytest.raises(InvalidConfig, match="does not say when its clock began"):
        read([tmp_path / "old.json"])
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(InvalidConfig, match="is no trace"):
        read([tmp_path / "none.json"])


def test_a_flame_graph_of_a_trace(tmp_path: Path) -> None:
    file = written(
        tmp_path / "t.json", 0.0, event("segment forward", 0, 100), event("layer 0", 10, 60),
        event("aten::mm", 20, 30, "cpu_op"), event("layer 0", 200, 40, "gpu_user_annotation", 9),
        event("gemm", 205, 20, "kernel", 9), event("copy", 210, 10, "gpu_memcpy", 10),
    )  # fmt: skip
    stacks = of_trace(read_trace(file))
    host = ("host: thread 0", "segment forward")
    assert stacks == Counter({
        host: 40, (*host, "layer 0"): 30, (*host, "layer 0", "aten::mm"): 30, ("device", "layer 0"): 10,
        ("device", "layer 0", "gemm"): 20, ("device", "layer 0", "copy"): 10,
    })  # fmt: skip


@pytest.mark.thorough
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
def test_chromium_draws_a_flame_graph(tmp_path: Path) -> None:
    page = tmp_path / "flame.svg"
    page.write_text(svg(Counter({("host", "a<b>"): 3, ("device", "gemm"): 1}), "a & b", "µs"))
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280, check=False)
    assert "a&lt;b&gt;: 75.0%" in done.stdout
    assert "parsererror" not in done.stdout
