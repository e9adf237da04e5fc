"""The workloads ask for exactly what the published figures of peers were measured with."""

from __future__ import annotations

import hashlib
import json

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline_bench.workloads import TOKEN_RANGE, Phase, Size, Workload, uniform, workloads

# SHA-256 of the JSON of [prompts, tokens asked for], of the vLLM script the anchors were measured with.
PUBLISHED = {
    ("W1", "rep0"): "b7484b670f494b19",
    ("W1", "rep1"): "7573caa38149f608",
    ("W2", "first0"): "b727aef5431d1606",
    ("W2", "all0"): "db36ae9903bcec68",
    ("W2", "first1"): "1a159bd8bfecc7c5",
    ("W2", "all1"): "1ca68ae0d6c712b1",
    ("W3-b8", "steps"): "40998f2a2390a45b",
    ("W3-b64", "steps"): "b07f51db94e44879",
    ("W3-b256", "steps"): "58b8a4f3fc59ed78",
    ("W4-1x1024", "rep0"): "7472c37e7211f624",
    ("W4-1x1024", "rep1"): "27de35e7727bd38f",
    ("W4-1x1024", "rep2"): "e8a35f6c79f044ac",
    ("W4-1x8192", "rep0"): "3d253e2b4738a4a8",
    ("W4-1x8192", "rep2"): "40905d14ed0485e5",
    ("W4-1x30000", "rep1"): "0052b704ef1cb94a",
    ("W4-8x8192", "rep0"): "959b512321d4aa47",
    ("W4-8x8192", "rep2"): "10d07557fbc0c4de",
    ("W5", "all"): "65ad2df5d22652cc",
}


def digest(phase: Phase) -> str:
    return hashlib.sha256(json.dumps([phase.prompts, phase.max_tokens]).encode()).hexdigest()[:16]


def test_full_size_workloads_are_the_published_ones() -> None:
    made = {(w.name, p.name): digest(p) for w in workloads([], Size()) for p in w.phases}
    assert {key: made[key] for key in PUBLISHED} == PUBLISHED


def only(name: str, size: Size = Size(scale=0.02)) -> Workload:
    (workload,) = workloads([name], size)
    return workload


@pytest.mark.parametrize(
    ("name", "times", "expected"),
    [
        ("W2", {"first0": 1.0, "all0": 6.0, "first1": 2.0, "all1": 12.0}, {"tpot": 1000.0, "ttft": 1000.0}),
        ("W3-b64", {"cold": 9.0, "steps": 5.0, "first": 2.0}, {"step b64": 1000.0}),
        ("W4-1x8192", {"rep0": 3.0, "rep1": 0.5, "rep2": 1.0}, {"prefill 1x8192": 500.0}),
        ("W5", {"all": 2.0}, {"output": 5.0}),
    ],
)
def test_metrics_follow_from_times(name: str, times: dict[str, float], expected: dict[str, float]) -> None:
    """At 2 %: W2 runs 5 steps, W3 3, W5 has 10 requests of one token."""
    assert {m.name: m.value for m in only(name).metrics(times)} == pytest.approx(expected)


def test_mixed_throughput_is_all_tokens_over_all_time() -> None:
    workload = only("W1")
    tokens = [sum(phase.max_tokens) for phase in workload.phases]
    (metric,) = workload.metrics({"rep0": 1.0, "rep1": 3.0})
    assert metric.value == sum(tokens) / 4
    assert metric.samples == (tokens[0], tokens[1] / 3)


def test_ids_stay_within_a_small_vocabulary_and_the_anchors_range() -> None:
    small = {i for w in workloads(["W2"], Size(vocab_size=50)) for p in w.phases for ids in p.prompts for i in ids}
    assert max(small) == 49
    large = [i for p in only("W2", Size(vocab_size=200_000)).phases for ids in p.prompts for i in ids]
    assert max(large) < TOKEN_RANGE


def test_uniform_counts_both_directions() -> None:
    workload = uniform(4, 10, 5, Size(vocab_size=9))
    rates = {m.name: m.value for m in workload.metrics({"all": 2.0})}
    assert rates == {"output": 10.0, "total": 30.0, "requests": 2.0}
    assert workload.longest == 15


@pytest.mark.parametrize("name", ["W6", "W3-b9", "w1"])
def test_unknown_workloads_are_named(name: str) -> None:
    with pytest.raises(InvalidConfig, match=name):
        list(workloads([name], Size(scale=0.01)))


@pytest.mark.parametrize("scale", [0.0, -1.0, 1.5, float("nan")])
def test_scale_must_be_a_share(scale: float) -> None:
    with pytest.raises(InvalidConfig, match="scale"):
        Size(scale=scale)
