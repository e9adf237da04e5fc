"""`ridgeline simulate`: the same seed gives the same bytes, and a mistake one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import run_here
from tests.simulation.fleets import MODELS

SMALL = ("simulate", MODELS / "qwen3-0.6b", "--gpu", "H200", "--max-model-len", "4096")
LOAD = ("--replicas", 2, "--rate", 60, "--requests", 50, "--seed", 3, "--slo", "ttft=200,itl=20")


def test_the_same_seed_gives_the_same_bytes_and_another_one_does_not() -> None:
    first, again = (run_here(*SMALL, *LOAD, "--policy", "fcfs", "--json") for _ in range(2))
    assert (first.returncode, first.stderr) == (0, "")
    assert first.stdout == again.stdout
    other = run_here(*SMALL, *LOAD, "--seed", 4, "--policy", "fcfs", "--json")
    assert other.stdout != first.stdout
    [found] = json.loads(first.stdout)["runs"]
    assert (found["completed"], found["failed"]) == (50, 0)
    assert 0 < found["goodput"] <= found["request_rate"]
    assert found["ttft"]["p50"] <= found["ttft"]["p99"]


def test_policies_and_rates_stand_side_by_side_and_in_a_picture(tmp_path: Path) -> None:
    several = ("--policy", "fcfs,priority", "--rate", "20,40", "--tenants", "a:3:0,b:1:1", "--price-per-hour", 3)
    ended = run_here(*SMALL, *LOAD, *several, "--plot", tmp_path / "runs.svg")
    assert ended.returncode == 0, ended.stderr
    for words in ("fcfs 20/s", "priority 40/s", "ttft of a, ms", "per million tokens", "cached prompt, of ideal"):
        assert words in ended.stdout
    drawn = (tmp_path / "runs.svg").read_text()
    assert drawn.startswith("<svg")
    assert "priority" in drawn


def test_traces_and_agents_are_workloads_too(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
    (tmp_path / "trace.jsonl").write_text("\n".join(json.dumps({**row, "timestamp": 100 * n}) for n in range(8)))
    ended = run_here(*SMALL, "--trace", tmp_path / "trace.jsonl", "--json")
    [found] = json.loads(ended.stdout)["runs"]
    assert found["completed"] == 8
    assert found["hit_rate"] == pytest.approx(found["ideal_hit_rate"], abs=0.01)
    more = ("--agents", 2, "--turns", 3, "--time-scale", 0.1, "--max-model-len", 40960, "--json")
    ended = run_here(*SMALL, *more)
    assert json.loads(ended.stdout)["runs"][0]["completed"] >= 6, ended.stderr


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--policy", "none"), "unknown scheduling policy 'none'"),
        (("--routing", "none"), "unknown routing rule 'none'"),
        (("--rate", "-1"), "--rate must be at least 1e-09, got '-1'"),
        (("--rate", "1e-300"), "--rate must be at least 1e-09, got '1e-300'"),
        (("--duration", "1e300"), "a run has at most 100,000,000 requests, and these are 1e+300; lower --requests"),
        (("--duration", "inf"), "a run has at most 100,000,000 requests, and these are inf"),
        (("--plot", "runs.bmp"), "a picture is .svg, .png, .pdf, and not .bmp: runs.bmp"),
        (("--rate", "fast"), "--rate needs numbers such as 1,2,4 or inf, got 'fast'"),
        (("--slo", "ttft=x"), "--slo needs NAME=MILLISECONDS"),
        (("--replicas", "0"), "replicas must be from 1 to 1024, got 0"),
        (("--fail", "1"), "--fail needs REPLICA@SECONDS:AWAY"),
        (("--autoscale", "x"), "--autoscale needs LEAST:REQUESTS[:START]"),
        (("--tenants", "a"), "--tenants needs NAME:SHARE[:PRIORITY]"),
        (("--tenants", "a:1e308,b:1e308"), "above 0 and at most 1e9, got 'a:1e308'"),
        (("--input-len", "100,1e300"), "must be a length, LOW:HIGH, or MEAN,DEVIATION"),
        (("--fail", "0@1:inf"), "inf"),
        (("--price-per-hour", "1e308"), "above 0 and at most 1e9, got 1e+308"),
        (("--trace", "/nowhere"), "cannot read the trace '/nowhere'"),
        (("--kv-tokens", "64"), "raise --kv-tokens or lower --max-model-len"),
        (("--input-len", "9000"), "more than the context of 4096; raise --max-model-len"),
        (("--price-per-hour", "-1"), "the price for an hour must be above 0"),
        (("--utilization", "1e-6"), "a simulated replica is one device: choose a larger --gpu"),
        (("--utilization", "0"), "utilization must be above 0"),
        (("--time-scale", "nan"), "--time-scale must be a number from 0"),
    ],
)
def test_a_mistake_is_one_sentence(flags: tuple[str, str], sentence: str) -> None:
    ended = run_here(*SMALL, *flags)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert sentence in ended.stderr
    assert ended.stderr.count("\n") == 1
