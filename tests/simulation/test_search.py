"""The search for settings: the fewest replicas that keep the bounds, by a fleet whose figures are a formula."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.errors import InvalidConfig
from ridgeline.simulation.figures import Bounds, FleetFigures
from ridgeline.simulation.search import SHARE, SettingSearch
from ridgeline.simulation.setup import Settings
from tests.command import run_here
from tests.simulation.fleets import MODELS, asked, run, small


@pytest.fixture(scope="module")
def figures() -> FleetFigures:
    return run(small(), asked([(0.01, 20, 3)] * 10), None, Bounds(ttft=9.0))[1]


@pytest.mark.parametrize("needed", [1, 2, 3, 5, 8, 11, 40])
def test_the_fewest_replicas_that_keep_the_bounds_are_found(needed: int, figures: FleetFigures) -> None:
    def simulate(settings: Settings, replicas: int) -> FleetFigures:
        share = min(1.0, replicas / needed)
        return replace(figures, requests=100, duration=1.0, goodput=100 * share)

    search = SettingSearch(simulate, {"policy": ["srpt"]}, 32)
    best = search.best(Settings())
    assert best.replicas == min(needed, 32)
    assert (best.share >= SHARE) is (needed <= 32)
    assert best.settings.policy == "fcfs", "another setting that brings nothing is not taken"
    assert len(search.trials) <= 16


def test_a_setting_is_changed_where_that_helps_and_skipped_where_the_model_does_not_fit(figures: FleetFigures) -> None:
    def simulate(settings: Settings, replicas: int) -> FleetFigures:
        if settings.max_num_seqs == 512:
            raise InvalidConfig("it does not fit.")
        good = 60 + 39 * (settings.max_num_seqs == 64) + (settings.itl_target == 0.0)
        return replace(figures, requests=100, duration=1.0, goodput=good)

    best = SettingSearch(simulate, {"itl_target": [0.0], "max_num_seqs": [512, 64, 128]}, 64).best(Settings())
    assert (best.replicas, best.settings.max_num_seqs, best.settings.itl_target) == (1, 64, 0.0)


def test_the_plan_of_a_trace_names_flags_and_replicas(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = ({"timestamp": 0.02 * n, "input_length": 300, "output_length": 20} for n in range(40))
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    plan = ("plan", MODELS / "qwen3-0.6b", "--gpu", "H200", "--trace", trace)
    ended = run_here(*plan, "--slo", "ttft=200,itl=20", "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    [found] = json.loads(ended.stdout)
    assert found["replicas"] == 1
    assert found["within"] == 1.0
    assert found["figures"]["completed"] == 40
    wrong = run_here(*plan)
    assert wrong.returncode == 2
    assert "name these with --slo" in wrong.stderr
    both = run_here(*plan, "--slo", "ttft=200", "--gpus", 4)
    assert "leave divisions, studies and --plot out" in both.stderr
