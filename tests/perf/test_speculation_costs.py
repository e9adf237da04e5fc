"""What verifying drafts costs and brings, against simulation and the limits of whole steps."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.speculation import break_even, tokens_of_a_row, verifying
from tests.command import run_here

CONFIG = Path(__file__).parent / "configs" / "llama-8b.json"


class Line:
    """Steps that take as many seconds as this, whatever is cached."""

    def __init__(self, base: float, each: float) -> None:
        self._base, self._each = base, each

    def step_limit(self, shape: StepShape) -> float:
        return self._base + self._each * sum(shape.num_tokens_R)


@pytest.mark.parametrize(("share", "drafts"), [(0.0, 3), (0.5, 1), (0.7, 4), (0.95, 5), (1.0, 2)])
def test_a_row_brings_what_simulated_rows_bring(share: float, drafts: int) -> None:
    draw, total = random.Random(0), 0
    for _ in range(20_000):
        right = 0
        while right < drafts and draw.random() < share:
            right += 1
        total += 1 + right
    assert tokens_of_a_row(share, drafts) == pytest.approx(total / 20_000, rel=0.02)


def test_drafts_pay_from_where_they_bring_as_much_as_they_cost() -> None:
    for drafts in (1, 3, 7):
        for cost in (1.0, 1.3, 1.9):
            share = break_even(cost, drafts)
            assert share is not None
            assert tokens_of_a_row(share, drafts) == pytest.approx(cost, abs=1e-4)
        assert break_even(drafts + 1.01, drafts) is None


def test_free_tokens_always_pay_and_steps_of_nothing_but_tokens_never() -> None:
    for each in verifying(Line(1.0, 0.0), 100, [1, 4]):
        assert (each.cost, each.break_even) == (1.0, pytest.approx(0.0, abs=1e-5))
        assert each.speedups[0] == pytest.approx(tokens_of_a_row(0.6, each.drafts))
    for each in verifying(Line(0.0, 1.0), 100, [1, 4]):
        assert (each.cost, each.break_even) == (each.drafts + 1, pytest.approx(1.0))
        assert max(each.speedups) < 1


def test_the_command_tells_of_a_real_shape() -> None:
    asked = ["explain", str(CONFIG), "--gpu", "H200", "--drafts", "5"]
    found = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)["verifying"]
    told = {(each["batch"], each["drafts"]): each for each in found}
    assert told[1, 5]["cost"] < 1.06
    costs = [told[batch, 5]["cost"] for batch in (1, 8, 64, 256)]
    assert costs == sorted(costs)
    assert told[256, 5]["break_even"] > told[1, 5]["break_even"]
    assert "pays from" in CliRunner().invoke(app, asked).stdout
    for more in (("--tp", "2"), ("--batch", "8"), ("--reached", "4")):
        refused = run_here(*asked, *more)
        assert (refused.returncode, "leave the other options out" in refused.stderr) == (2, True)


def test_a_plan_tells_of_its_own_batches() -> None:
    asked = ["plan", str(CONFIG), "--gpu", "H200", "--drafts", "4"]
    (one,) = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    told = {(each["batch"], each["drafts"]): each for each in one["verifying"]}
    assert {batch for batch, _ in told} == {point["batch"] for point in one["points"]}
    assert {drafts for _, drafts in told} == {1, 2, 4}
    costs = [told[point["batch"], 4]["cost"] for point in one["points"]]
    assert costs == sorted(costs)
    assert "pays from" in CliRunner().invoke(app, asked).stdout
    refused = run_here(*asked, "--tp", "2")
    assert (refused.returncode, "leave the divisions out" in refused.stderr) == (2, True)
