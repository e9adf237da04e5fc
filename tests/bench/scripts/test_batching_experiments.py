"""Experiments with batches: static and continuous ones, their crossover, and chunks of prompts beside decoding."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.hardware import Hardware
from ridgeline.worker.speculation.drafted import VerifiedDraws
from ridgeline.worker.speculation.lookup import Lookup
from ridgeline_bench.scripts import batch_sweep, batching, chunk_sizes, stacked_gains
from ridgeline_bench.scripts.driven import Driven, Wanted

OUTPUTS = [3, 9, 2, 4, 7, 1, 5, 5]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 8))
def test_least_steps_lie_between_what_tokens_need_and_what_static_batches_take(outputs: list[int], slots: int) -> None:
    continuous, static = batching.continuous_steps(outputs, slots), batching.static_steps(outputs, slots)
    assert max(*outputs, math.ceil(sum(outputs) / slots)) <= continuous <= static
    assert static <= math.ceil(len(outputs) / slots) * max(outputs)


def test_least_steps_of_an_example_by_hand() -> None:
    # Two slots, static: (3, 9), (2, 4), (7, 1), (5, 5). Continuously one runs 3, 2, 4, 7, and the other 9, 1, 5, 5
    assert batching.static_steps(OUTPUTS, 2) == 9 + 4 + 7 + 5
    assert batching.continuous_steps(OUTPUTS, 2) == 9 + 1 + 5 + 5


def test_the_engine_takes_no_fewer_steps_than_arithmetic_and_padding_is_thrown_away(driven: Driven) -> None:
    lines = {line["way"]: line for line in batching.bench(driven, count=27, length=6, mean=6)}
    useful = lines["continuous"]["mean_output"] * 27
    assert useful == sum(batching.lengths(27, 6))
    for line in lines.values():
        assert line["steps"] >= line["least_steps"] - 1, "the last step of one batch may be that of the next prompt"
    padded, static, continuous = (lines[name] for name in ("static, padded", "static", "continuous"))
    assert static["least_steps"] == padded["least_steps"] > continuous["least_steps"]
    assert continuous["steps"] < static["steps"]
    longest = [max(batching.lengths(27, 6)[n : n + 9]) for n in (0, 9, 18)]
    assert padded["wasted"] == pytest.approx(1 - useful / (9 * sum(longest)))
    assert static["wasted"] == continuous["wasted"] == 0


def test_lengths_have_the_mean_that_is_asked_for() -> None:
    drawn = batching.lengths(20_000, 128)
    assert statistics.fmean(drawn) == pytest.approx(128, rel=0.05)
    assert min(drawn) >= 1
    assert max(drawn) <= 8 * 128


def test_requests_that_come_later_are_answered_later(driven: Driven) -> None:
    prompts = driven.prompts(2, 5)
    run = driven.run([Wanted(prompts[0], 3), Wanted(prompts[1], 2, at=0.2)])
    first, second = run.answers
    assert (len(first.moments), len(second.moments)) == (3, 2)
    assert second.moments[0] >= 0.2
    assert second.first < second.moments[0]
    assert run.seconds == max(first.moments[-1], second.moments[-1])
    assert run.tokens == 5


# ---- the crossover ---------------------------------------------------------------------------------------------------


@given(st.floats(1e-4, 1.0), st.floats(1.5, 200.0))
def test_the_crossover_of_an_ideal_roofline_is_where_its_lines_meet(flat: float, at: float) -> None:
    times = {batch: max(flat, flat * batch / at) for batch in (1, 2, 8, 64, 512, 1024)}
    assert batch_sweep.crossover(times) == pytest.approx(at)


def test_times_that_do_not_grow_have_no_crossover() -> None:
    assert batch_sweep.crossover({1: 1.0, 8: 1.05, 64: 1.1}) is None


def test_the_planner_s_crossover_is_the_rate_over_the_bandwidth(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Products read 4 bytes a weight and do 2 FLOPs a weight and token, so they meet at 2 · rate / bandwidth tokens;
    # their inputs and outputs add bytes, so the crossover is somewhat later
    hardware = Hardware(
        name="made",
        memory=1e12,
        bandwidth=1e12,
        matrix={"float32": 5e12},
        interconnect=1e9,
        pcie=None,
        source="made up",
    )
    found = batch_sweep.limits(driven, hardware, [1, 2, 32], 16)
    assert found.tokens is not None
    assert 10 <= found.tokens <= 20
    assert found.seconds[1] < found.seconds[32]
    monkeypatch.setattr(batch_sweep, "hardware_of", lambda device: hardware)
    lines = list(batch_sweep.bench(driven, [1, 2, 8], context=4, length=8, tokens=4))
    assert [line["batch"] for line in lines] == [1, 2, 8]
    assert {line["planner_crossover"] for line in lines} == {batch_sweep.limits(driven, hardware, [1], 6).tokens}
    for line in lines:
        assert line["tokens_per_second"] == pytest.approx(1e3 * line["batch"] / line["step_ms"])
        assert 0 < line["limit_ms"] < line["step_ms"]
        assert 0 < line["ttft_ms"] <= line["ttft_last_ms"]


def test_the_picture_has_every_stored_point(tmp_path: Path) -> None:
    lines = [{"batch": b, "step_ms": 2.0 + b, "limit_ms": 1.0, "model": "m", "gpu": "g"} for b in (1, 2, 4)]
    batch_sweep.draw(lines, tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert text.count("<circle") == 2 * 2 * 3
    assert "measured: 6" in text


# ---- chunks -------------------------------------------------------------------------------------------------------


def test_small_chunks_take_the_steps_of_arithmetic_and_shorter_ones(driven: Driven) -> None:
    lines = list(chunk_sizes.bench(driven, [12, 64], decoding=4, prompts=2, length=120))
    assert [line["steps_of_a_prompt"] for line in lines] == [15, 2]
    # each of the four gets a token in every step of a prompt
    for line in lines:
        assert line["gaps"] >= 4 * 2 * line["steps_of_a_prompt"] - 4
        assert 0 < line["itl_p50_ms"] <= line["itl_p99_ms"] <= line["itl_max_ms"]


def test_a_chunk_without_room_for_a_prompt_is_refused(driven: Driven) -> None:
    with pytest.raises(InvalidConfig, match="no room beside 4"):
        next(chunk_sizes.bench(driven, [4], decoding=4, prompts=1, length=8))


# ---- quantization, continuous batching and speculation on top of each other -----------------------------------------


def test_steps_fall_as_batching_and_right_drafts_are_added(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((Lookup, "note"), (VerifiedDraws, "_draw_behind")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that what the script puts there goes again
    a = Namespace(model=str(folder), slots=3, requests=9, input=6, mean=8, right=1.0, drafts=3)
    outputs = batching.lengths(a.requests, a.mean)
    _, plain = stacked_gains.engine(a, "w8a8", 0)
    static, continuous = plain(False)[2], plain(True)[2]
    assert static >= batching.static_steps(outputs, 3)
    assert batching.continuous_steps(outputs, 3) <= continuous < static
    _, drafted = stacked_gains.engine(a, "w8a8", a.drafts)
    steps = drafted(True)[2]
    assert batching.continuous_steps([math.ceil(n / 4) for n in outputs], 3) <= steps < continuous
