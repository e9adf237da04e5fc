"""What a profile says is what ran."""

from __future__ import annotations

import json
import re
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.core.errors import InvalidConfig
from ridgeline.kernels.base.op import Platform
from ridgeline.kernels.ops import OPS
from ridgeline.perf.bottleneck import Floors
from ridgeline.perf.hardware import FLOORS
from ridgeline.quantization import SCHEMES
from ridgeline_bench.named_kernels import labelled, title
from ridgeline_bench.profile.flame import Sampler, collapsed, svg
from ridgeline_bench.profile.memory import tensors
from ridgeline_bench.profile.ncu import described, hot_lines, parse, table
from ridgeline_bench.profile.profile import profile, summary
from ridgeline_bench.profile.ranges import named_ranges
from ridgeline_bench.profile.tables import OpLimit, merged, overlap
from tests.driving import Rig, ask, rig

PROMPT = tuple(range(5, 15))


def run(own: Rig) -> None:
    for name in ("a", "b"):
        own.engine.add(ask(name, PROMPT, max_tokens=6))
    while own.engine.has_work:
        own.engine.step()


def test_a_profile_of_a_run(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with rig(tiny_model("llama"), debug_checks=False) as own:
        limits = {"mixer_norm": OpLimit(1e-9, 1e-9), "qkv": OpLimit(2e-9, 0.0), "final_norm": OpLimit(1.0, 1.0)}
        limits["unembed"] = OpLimit(3.0, 0.0)
        report = profile(own.engine, own.worker, lambda: run(own), tmp_path, lambda shape: limits)
        steps = report.steps
        assert steps >= 6
        ops = {row.name: row for row in report.ops}
        assert ops["mixer_norm + qkv"].calls == 2 * steps  # two layers
        assert ops["final_norm + unembed"].calls == steps
        assert ops["mixer_norm + qkv"].limit == pytest.approx(steps * 3e-9)
        assert (ops["down"].limit, ops["down"].bound) == (None, "")
        assert ops["final_norm + unembed"].bound == "compute", "faster than its limit of four seconds a step"
        of_both = ops["mixer_norm + qkv"]
        short = of_both.seconds / of_both.calls <= 2 * FLOORS.launch
        assert of_both.bound == ("launch" if short else "kernel"), "its limit of 1.5 ns explains nothing"
        assert any(row.name in ("aten::mm", "aten::addmm") for row in report.kernels)
        assert 0 < report.headroom.elapsed <= report.wall
        assert sum(row.seconds for row in report.idle) < report.span
        trace = json.loads((tmp_path / "trace.json").read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert {
            "segment forward",
            "segment sample",
            "layer 0",
            "layer 1",
            "op mixer_norm + qkv",
            "engine schedule",
        } <= names
        weights = sum(p.untyped_storage().nbytes() for p in own.runner.decoder.parameters())
        alive = json.loads((tmp_path / "memory.json").read_text())["tensors"]
        assert sum(entry["bytes"] for entry in alive) > weights
        assert "engine:step" in (tmp_path / "stacks.txt").read_text()
        page = summary(report, "a run")
        assert "attention" in page
        calls = sum(row.calls for row in report.ops)
        shorter = sum(row.calls for row in report.ops if row.seconds / row.calls < 1e-3)
        told = (
            f"launch-bound without CUDA graphs: {shorter} of {calls} calls, which take less than a launch (1000.0 µs)"
        )
        assert told in summary(replace(report, floors=Floors(1e-3, 1e-6)), "a run")
        assert f" 0 of {calls} calls, which" in summary(replace(report, floors=Floors(1e-9, 1e-9)), "a run")
        assert re.search(r"final_norm \+ unembed .* compute$", page, re.MULTILINE)


def test_ranges_leave_no_trace(tiny_model: Callable[[str], Path]) -> None:
    with rig(tiny_model("llama")) as own:
        parts = (own.engine.scheduler, own.worker, own.runner, own.runner.decoder.ops, own.runner.decoder.layers[0])
        before = [dict(vars(part)) for part in parts]
        with named_ranges(own.engine, own.worker) as shapes:
            assert "forward" in vars(own.runner)
            run(own)
        after = [vars(part).keys() for part in parts]
        assert after[3] - before[3].keys() <= OPS.keys()  # functions of ops are kept from their first use on
        after[3] = before[3].keys()
        assert after == [part.keys() for part in before]
        assert not any(hasattr(value, "__wrapped__") for value in vars(parts[3]).values() if callable(value))
        assert all(vars(parts[3])[name] is value for name, value in before[3].items())
        assert len(shapes) == len(own.results)
        assert [int(n) for n in shapes[0].num_tokens_R] == [
            10,
            2,
        ]  # the second one found eight tokens of the first in the cache


@pytest.mark.parametrize("quantization", [n for n in SCHEMES if SCHEMES[n].supports(Platform(device_type="cpu"))])
def test_products_have_their_names_and_weights_their_memory_in_every_form(
    tiny_model: Callable[[str], Path], tmp_path: Path, quantization: str
) -> None:
    """Packed and rounded weights are no parameters, and only oneDNN can read the memory of some."""
    with rig(tiny_model("llama"), dtype="bfloat16", debug_checks=False, quantization=quantization) as own:
        report = profile(own.engine, own.worker, lambda: run(own), tmp_path)
        assert not own.errors
        calls = {row.name: row.calls for row in report.ops}
        assert calls["mixer_norm + qkv"] == calls["out"] == calls["down"] == 2 * report.steps
        assert calls["feed_forward_norm + gate_up + gated_activation"] == 2 * report.steps
        assert calls["final_norm + unembed"] == report.steps
        assert not {"linear", "norm_linear", "rms_norm", "gated_activation", f"{quantization}_linear"} & set(calls)
        alive = json.loads((tmp_path / "memory.json").read_text())["tensors"]
        assert sum(entry["bytes"] for entry in alive) > own.runner.decoder.weight_bytes


@pytest.mark.parametrize("quantization", ["plain", "int8"])
def test_a_mixtures_profile_says_what_routing_takes(
    tiny_model: Callable[[str], Path], tmp_path: Path, quantization: str
) -> None:
    with rig(tiny_model("qwen3_moe"), debug_checks=False, quantization=quantization) as own:
        layers = dict(own.runner.decoder.named_modules())
        before = layers["layers.0.feed_forward.gate_up"].matrices
        report = profile(own.engine, own.worker, lambda: run(own), tmp_path)
        assert not own.errors
        assert layers["layers.0.feed_forward.gate_up"].matrices is before
    calls = {row.name: row.calls for row in report.ops}
    assert calls["route"] == calls["grouped_gate_up"] == calls["grouped_down"] == 2 * report.steps
    assert not {"linear", "rms_norm", "gated_activation", "feed_forward_norm"} & set(calls)
    spent = {row.name: row.seconds for row in report.ops}
    share = 100 * spent["route"] / sum(spent.values())
    assert f"routing and permutation (route) {share:.1f} %, experts' products" in summary(report, "a run")


def test_the_sampler_sees_where_time_goes() -> None:
    def busy_one() -> None:
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            sum(range(100))

    with Sampler() as sampler:
        worker = threading.Thread(target=busy_one, name="busy")
        worker.start()
        worker.join()
    seen = Counter({stack: n for stack, n in sampler.stacks.items() if stack[0] == "busy"})
    inside = sum(n for stack, n in seen.items() if any(frame.endswith(":busy_one") for frame in stack))
    assert inside > 20
    assert inside > 0.9 * seen.total()


def test_a_flame_graph_is_valid_and_its_boxes_have_the_right_widths() -> None:
    stacks = Counter({("main", "a:<f>", "b:g"): 3, ("main", "a:<f>"): 1, ("main", "c:h&"): 4})
    root = ElementTree.fromstring(svg(stacks, "x < y"))
    space = "{http://www.w3.org/2000/svg}"
    boxes = {
        group.findtext(f"{space}title", "").partition(": ")[0]: float(group.find(f"{space}rect").get("width"))  # type: ignore[union-attr,arg-type]
        for group in root.iter(f"{space}g")
    }
    assert boxes == {"main": 1400.0, "a:<f>": 700.0, "b:g": 525.0, "c:h&": 700.0}
    assert collapsed(stacks).splitlines()[0] == "main;a:<f> 1"


def test_intervals() -> None:
    assert merged([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert overlap([(0, 3), (5, 8)], [(2, 6), (7, 20)]) == 1 + 1 + 1
    assert overlap([], [(0, 1)]) == 0


def test_tensors_are_counted_once_by_their_memory() -> None:
    kept = torch.zeros(1237, 11)
    view = kept[:5]
    found = [entry for entry in tensors(torch.device("cpu")) if entry["bytes"] == kept.nbytes]
    assert len(found) == 1
    assert found[0]["count"] == 1
    assert view.shape == (5, 11)


RAW = """==PROF== Connected
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes.sum.per_second","gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed","sm__warps_active.avg.pct_of_peak_sustained_active","l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio","smsp__average_warps_issue_stalled_selected_per_issue_active.ratio"
"","","usecond","Tbyte/s","%","%","sector","","inst","inst"
"0","gemv","12.5","3.9","81.2","45.0","400","100","9.1","1.0"
"1","spin_kernel","1","0","0","0","","","0.1","1.0"
"2","norm","2,000.0","0.5","10.0","20.0","","","0.1","1.0"
"""  # noqa: E501
SOURCE = """"Kernel Name","gemv"
"Address","Source","# Samples","stall_wait","stall_long_sb","stall_long_sb (Not Issued)"
"0x0","      FADD  R1, R2","30","24","6","6"
"0x10","      LDG R1","10","0","10","10"
"0x20","      EXIT","0","0","0","0"
"Kernel Name","norm"
"Address","Source","# Samples","stall_wait","stall_long_sb","stall_long_sb (Not Issued)"
"0x0","      BAR","5","5","0","0"
"""


def test_the_pages_of_nsight_compute() -> None:
    kernels = list(parse(RAW))
    assert [each.name for each in kernels] == ["gemv", "spin_kernel", "norm"]
    assert kernels[0].figures["ns"] == pytest.approx(12.5e3)
    assert kernels[0].figures["bytes a second"] == pytest.approx(3.9e12)
    assert [each.stall for each in kernels] == ["long_scoreboard"] * 3, "a warp that is issued does not wait"
    assert list(labelled(["first", "second"], kernels)) == [("first", kernels[0]), ("second", kernels[2])]
    longest, _, shortest = table(kernels).splitlines()[1:]
    assert longest.split()[:3] == ["norm", "2000.0", "1"]
    assert shortest.split()[0] == "spin_kernel"
    assert list(parse("==ERROR== no permission")) == []
    of_gemv, of_norm = hot_lines(SOURCE)
    assert [(line.text, line.at, line.share) for line in of_gemv] == [("FADD R1, R2", 0, 0.75), ("LDG R1", 16, 0.25)]
    assert list(of_gemv[0].stalls.items()) == [("wait", 0.8), ("long_sb", 0.2)]
    assert [line.text for line in of_norm] == ["BAR"]
    text = described(replace(kernels[0], lines=of_gemv))
    assert "4.0 sectors a load, no a store" in text
    assert "DRAM 81 %, L2 unknown" in text


def test_names_of_kernels() -> None:
    assert title("memory_bound:transpose-naive:256") == "memory_bound: transpose-naive, transpose, 256 MB"
    assert title("op:rms_norm:64x4096") == "rms_norm, 64x4096 +residual"
    for name, said in (("gemm", "is no kernel"), ("gemm:none", "no rung"), ("gemm:naive:1x", "no problem"),
                       ("op:none:1", "no op"), ("op:rms_norm:none", "no case")):  # fmt: skip
        with pytest.raises(InvalidConfig, match=said):
            title(name)


@pytest.mark.gpu
def test_a_profile_on_a_gpu_has_kernels_and_blocks(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with rig(tiny_model("llama"), device="cuda", debug_checks=False) as own:

        def anew() -> None:
            own.engine.scheduler.cache.forget_all()  # or the prompts would be found, and single tokens run
            run(own)

        report = profile(own.engine, own.worker, anew, tmp_path)
        assert report.kernels
        ops = {row.name: row for row in report.ops}
        products = ops["mixer_norm + qkv"], ops["down"]
        assert all(row.calls == 2 * report.steps and row.seconds > 1e-6 * row.calls for row in products)
        assert ops["attention"].seconds > 1e-6 * ops["attention"].calls
        assert report.memory["blocks"]
        assert sum(row.seconds for row in report.idle) < report.span
