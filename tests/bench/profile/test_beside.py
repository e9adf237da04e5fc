"""Traces are read as torch counts them, and decode steps are what one trace has more than the other."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.engines import profiler
from ridgeline_bench.engines.sglang import SGLang
from ridgeline_bench.profile.beside import GRAPHS, LAUNCHES, WAITS, decode_steps, line, rows_more, table, totals
from ridgeline_bench.profile.tables import Row, kernel_rows
from ridgeline_bench.profile.trace import Kind, on_device, read_trace
from tests.command import run_here

STORED = Path(__file__).with_name("traces")  # of two products and a ReLU, two times and five times, on a CPU


def test_rows_are_those_that_torch_sums_itself(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    with profiler(cuda=False) as traced:
        for _ in range(3):
            with torch.profiler.record_function("a range"):
                model(torch.randn(4, 16)).softmax(-1)
    traced.export_chrome_trace(str(tmp_path / "trace.json"))
    events = read_trace(tmp_path / "trace.json")
    torchs = {e.key: (e.count, e.self_cpu_time_total) for e in traced.key_averages() if e.key != "a range"}
    assert {r.name: (r.calls, 1e6 * r.seconds) for r in kernel_rows(events, cuda=False)} == {
        name: (count, pytest.approx(micros, abs=0.1)) for name, (count, micros) in torchs.items()
    }
    assert Counter(e.name for e in events if e.kind is Kind.RANGE) == {"a range": 3}
    assert not on_device(events)


def test_decode_steps_of_a_stored_trace() -> None:
    side = decode_steps(STORED, {"prompts": (0.002, 0.0), "whole": (0.005, 0.0)}, engine="toy", version="1", steps=3)
    calls = {row.name: row.calls for row in side.rows}
    assert calls["aten::addmm"] == calls["aten::linear"] == 3 * 2
    assert calls["aten::relu"] == calls["aten::clamp_min"] == 3
    assert side.step == pytest.approx(0.001)
    assert not side.cuda
    assert side.totals.span == pytest.approx(side.totals.busy + side.totals.short + side.totals.long)
    whole = read_trace(STORED / "whole-0.json.gz")
    first = read_trace(STORED / "prompts-0.json.gz")
    inner = sum(e.own for e in whole if e.kind is Kind.OPERATOR) - sum(e.own for e in first if e.kind is Kind.OPERATOR)
    assert side.totals.busy == pytest.approx(inner / 1e6, rel=1e-6), "one thread: own times fill the work"


def event(cat: str, name: str, start: float, took: float, **others: object) -> dict[str, object]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": took, "pid": 0, "tid": 7, **others}


def gpu_trace(steps: int) -> list[dict[str, object]]:
    """A prompt's launch, then `steps` replays of a graph with two kernels, each with a copy back; as Kineto writes."""
    prompt = [
        event("cuda_runtime", "cudaLaunchKernel", 0, 5, tid=1),
        event("kernel", "gemm", 10, 100),
        event("gpu_memset", "Memset (Device)", 110, 10),
        event("Trace", "PyTorch Profiler (0)", 0, 1e6, pid="Spans"),
        event("python_function", "run.py: main", 0, 1e6, tid=1),
        {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 1, "ts": 0, "pid": 0, "tid": 1},
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
    ]
    decode = []
    for at in (200 + 100 * n for n in range(steps)):
        decode += [
            event("cuda_runtime", "cudaGraphLaunch", at - 10, 8, tid=1),
            event("gpu_user_annotation", "step", at, 70),
            event("kernel", "gemm", at, 40),
            event("kernel", "norm", at + 42, 20),  # 2 µs later
            event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", at + 60, 10),  # 2 µs before the norm ends
            event("cuda_runtime", "cudaEventSynchronize", at, 75, tid=1),
        ]
    return prompt + decode


def test_a_trace_with_kernels_by_hand_arithmetic(tmp_path: Path) -> None:
    for name, steps in (("prompts", 0), ("whole", 4)):
        written = json.dumps({"traceEvents": gpu_trace(steps)})
        (tmp_path / f"{name}-0.json").write_bytes(gzip.compress(written.encode()))
        disturbed = [event("kernel", "other", 1e4, 1.0), *gpu_trace(steps)]
        (tmp_path / f"{name}-1.json").write_text(json.dumps(disturbed))  # a list alone is Chrome's format too
    figures = {"prompts": (1e-3, 1e-4), "whole": (1.4e-3, 2e-4)}
    figures |= {"prompts, processor": (2e-3, 0.0), "whole, processor": (4e-3, 0.0)}
    side = decode_steps(tmp_path, figures, engine="toy", version="1", steps=4)
    assert side.cuda
    found = side.totals
    assert found.span == pytest.approx((570 - 10 - 110) / 1e6)  # to the last copy's end, less the prompt's 110 µs
    assert found.busy == pytest.approx(4 * 68e-6)
    assert found.short == pytest.approx(4 * 2e-6)
    assert (found.long_pauses, found.long) == (4, pytest.approx((80 + 3 * 30) * 1e-6))
    assert side.idle == pytest.approx(1 - 4 * 68 / 450)
    assert (found.kernels, found.copies) == (8, 4)
    assert found.calls == {LAUNCHES: 0, GRAPHS: 4, WAITS: 4}
    copy = "Memcpy DtoH (Device -> Pinned)"
    assert [(r.name, r.calls, round(1e6 * r.seconds, 3)) for r in side.rows] == [
        ("gemm", 4, 160), ("norm", 4, 80), (copy, 4, 40),
    ]  # fmt: skip
    kept = line(side, most=2)
    assert kept["step_ms"] == pytest.approx(0.1)
    assert kept["top"] == [["gemm", pytest.approx(0.04), 1.0], ["norm", pytest.approx(0.02), 1.0]]
    assert (kept["limit_ms"], kept["processor_ms"]) == (pytest.approx(0.025), pytest.approx(0.5))
    page = table([side, side], "a toy").splitlines()
    assert next(text for text in page if "limit" in text).split()[-2:] == ["0.025", "0.025"]
    assert page[0] == "a toy; a decode step"
    assert next(text for text in page if "graph launches" in text).split()[-2:] == ["1.0", "1.0"]
    assert next(text for text in page if text.startswith("  idle  ")).split() == ["idle", "39.6", "%", "39.6", "%"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50)), max_size=12), st.integers(0, 12))
def test_what_is_more_in_a_run_that_goes_on_is_what_came_after(calls: list[tuple[str, int]], cut: int) -> None:
    def rows(part: list[tuple[str, int]]) -> list[Row]:
        names = {name for name, _ in part}
        return [Row(n, float(sum(s for m, s in part if m == n)), sum(m == n for m, _ in part)) for n in names]

    more = {(row.name, row.seconds, row.calls) for row in rows_more(rows(calls[:cut]), rows(calls))}
    assert more == {(row.name, row.seconds, row.calls) for row in rows(calls[cut:])}


def test_a_copy_that_took_no_time_and_a_name_in_no_encoding_are_read(tmp_path: Path) -> None:
    copy = event("gpu_memcpy", "Memcpy HtoD", 5, 0, args={"bytes": 4, "memory bandwidth (GB/s)": "?"})
    text = json.dumps({"traceEvents": [copy, event("kernel", "gemm", 6, 2)]}).replace('"?"', "inf")
    (tmp_path / "trace.json").write_bytes(text.encode().replace(b"gemm", b"ge\xffmm\x01"))
    assert [(e.kind, e.elapsed) for e in read_trace(tmp_path / "trace.json")] == [(Kind.COPY, 0), (Kind.KERNEL, 2)]


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "\x1f\x8b"])
def test_what_is_no_trace_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidConfig, match="is no trace"):
        read_trace(path)


def test_an_engine_whose_work_cannot_be_seen_is_said(tmp_path: Path) -> None:
    for name in ("prompts", "whole"):
        (tmp_path / f"{name}-0.json").write_text('{"traceEvents": []}')
    assert totals([], cuda=True).span == 0
    with pytest.raises(InvalidConfig, match="the trace of toy has no kernel"):
        decode_steps(tmp_path, {"prompts": (0.0, 0.0), "whole": (1.0, 0.0)}, engine="toy", version="1", steps=1)


@pytest.mark.dealt
def test_both_engines_decode_with_the_products_that_they_have(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    """Two layers: ours has four products in each, transformers seven; both have one more for the scores."""
    done = run_here(
        "profile", tiny_model("llama"), "--peer", "transformers", "--device", "cpu", "--batch", "2", "--input", "5",
        "--output", "9", "--out", tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == (tmp_path / "summary.txt").read_text()
    own, peer = map(json.loads, (tmp_path / "profile.jsonl").read_text().splitlines())
    assert (own["engine"], peer["engine"]) == ("ridgeline", "transformers")
    for kept, products in ((own, 2 * 4 + 1), (peer, 2 * 7 + 1)):
        assert {name: calls for name, _, calls in kept["top"]}["aten::mm"] == products
        assert kept["kernels"] > products
        assert (kept["processor_ms"] > 0) != torch.cuda.is_available()
        assert kept["busy_ms"] + kept["short_pauses_ms"] + kept["long_pauses_ms"] == pytest.approx(kept["traced_ms"])
        assert kept["machine"]["torch"] == torch.__version__
        assert kept["options"]["output_len"] == 9


def test_sglang_traces_the_process_in_which_its_model_runs(tmp_path: Path) -> None:
    order: list[str] = []

    def start(*, output_dir: str, activities: list[str], with_stack: bool, record_shapes: bool) -> None:
        assert activities == ["CPU", "GPU"]
        assert not with_stack
        assert not record_shapes
        order.append(output_dir)

    def stop() -> None:  # as SGLang 0.5.17 names its file
        Path(order[0], "1790000000.0-TP-0.trace.json.gz").write_bytes(gzip.compress(json.dumps(gpu_trace(2)).encode()))
        order.append("stopped")

    own = SGLang.__new__(SGLang)
    own.engine = SimpleNamespace(start_profile=start, stop_profile=stop)
    own.trace(lambda: order.append("ran"), tmp_path / "whole-0.json")
    assert order[1:] == ["ran", "stopped"]
    assert not Path(order[0]).exists()
    assert totals(read_trace(tmp_path / "whole-0.json"), cuda=True).kernels == 1 + 2 * 2


@pytest.mark.gpu
def test_kernels_of_replayed_graphs_are_seen(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    done = run_here("profile", tiny_model("llama"), "--peer", "transformers", "--device", "cuda", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    own, peer = map(json.loads, (tmp_path / "profile.jsonl").read_text().splitlines())
    assert own["cuda"] is peer["cuda"] is True
    assert own["calls"][GRAPHS] >= 1 > peer["calls"][GRAPHS]
    assert own["kernels"] > own["calls"][LAUNCHES] + own["calls"][GRAPHS], "a graph's kernels, not its launch"
    assert 0 < own["busy_ms"] < own["traced_ms"]
    assert peer["calls"][LAUNCHES] > 2 * 7


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--peer", "nobody"], "nobody"),
        (["--peer", "transformers", "--ncu"], "leave out all else"),
        (["--peer", "transformers", "--output", "1"], "a second token"),
        (["--peer", "sglang"], "sglang cannot be imported"),
    ],
)
def test_mistakes_give_one_sentence(arguments: list[str], word: str, tmp_path: Path) -> None:
    done = run_here("profile", "", "--device", "cpu", "--out", tmp_path, *arguments)
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr
