"""The classes of what bounds an op, on an H200 whose floors were measured."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.bottleneck import UNEXPLAINED, Floors, bottleneck
from ridgeline.perf.calibration import Calibration
from ridgeline.perf.explain import ExplainRow, Ran, explain_table, step_shape
from ridgeline.perf.hardware import find
from tests.perf.models import CONFIGS, spec

H200 = find("H200").attained()
FLOORS = Floors(launch=5e-6, latency=1e-6)


def rows(model: str, shape: StepShape, *, eager: bool = False) -> dict[str, ExplainRow]:
    return {row.name: row for row in explain_table(spec(model), shape, H200, Ran(eager=eager))}


def test_one_request_of_a_small_model_by_hand() -> None:
    """Qwen3-0.6B: a norm of 1024 values moves 4 kB, a nanosecond; its qkv 8.4 MB, 1.9 µs; down 6.3 MB, 1.4 µs."""
    found = rows("qwen3-0.6b", step_shape(1, 128))
    assert found["qkv"].bytes / found["qkv"].count == pytest.approx(2 * 1024 * 4096, rel=0.01)
    assert found["qkv"].limit / 28 == pytest.approx(8.4e6 / 4.42e12, rel=0.01)
    assert (found["qkv"].bound, found["down"].bound, found["unembed"].bound) == ("memory", "memory", "memory")
    for name in ("mixer_norm", "rope", "attention", "gated_activation"):
        assert found[name].limit / found[name].count < 1.02e-6
        assert found[name].bound == "latency"
    # Without graphs a launch takes 4.8 µs, and only the output layer (311 MB) is worth one.
    eager = rows("qwen3-0.6b", step_shape(1, 128), eager=True)
    assert {row.bound for name, row in eager.items() if name not in ("unembed", "total")} == {"launch"}
    assert eager["unembed"].bound == "memory"
    assert eager["total"].bound == "launch"
    assert found["total"].limit == eager["total"].limit, "the limit is that of the roofs either way"


def test_large_steps_are_bound_by_their_roofs() -> None:
    decode, prompt = rows("llama-8b", step_shape(256, 4096)), rows("llama-8b", step_shape(0, 0, 8192))
    assert (decode["attention"].bound, decode["total"].bound) == ("memory", "memory")
    assert (prompt["gate_up"].bound, prompt["attention"].bound, prompt["total"].bound) == ("compute",) * 3
    assert prompt["mixer_norm"].bound == "memory"


@given(st.floats(1e-9, 1e-2), st.floats(1e-9, 1e-2), st.sampled_from(["memory", "compute"]), st.booleans())
def test_a_class_is_that_of_the_largest_time(limit: float, measured: float, roof: str, eager: bool) -> None:
    floor, least = ("launch", 5e-6) if eager else ("latency", 1e-6)
    assert bottleneck(limit, roof, FLOORS, eager=eager) == (roof if limit >= least else floor)
    found = bottleneck(limit, roof, FLOORS, eager=eager, measured=measured)
    assert (found == roof) == (measured <= 2 * limit)
    assert (found == UNEXPLAINED) == (measured > 2 * limit and measured > 2 * least)


def test_measured_times_are_explained_or_not() -> None:
    shape = step_shape(1, 128)
    measured = {"mixer_norm": 1.9e-6, "qkv": 2.5e-6, "down": 9e-6}
    found = {row.name: row.bound for row in explain_table(spec("qwen3-0.6b"), shape, H200, Ran(measured))}
    assert (found["mixer_norm"], found["qkv"], found["down"]) == ("latency", "memory", UNEXPLAINED)


def test_floors_are_those_of_a_calibration() -> None:
    own = H200.with_calibration(Calibration(device="x", read=4e12, date="", launch=7e-6, graph_node=2e-6))
    assert own.floors == (7e-6, 2e-6)
    assert H200.with_calibration(Calibration(device="x", read=4e12, date="")).floors == H200.floors
    assert find("CPU").eager
    assert not H200.eager


def test_the_verb_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["explain", str(CONFIGS / "qwen3-0.6b.json"), "--gpu", "H200", "--batch", "1", "--context", "128"]
    assert "255 of 340 calls are latency-bound: their work takes less than the shortest kernel (1.02 µs)" in (
        CliRunner().invoke(app, arguments).stdout
    )
    assert "339 of 340 calls are launch-bound: their work takes less than a launch by the host (4.80 µs)" in (
        CliRunner().invoke(app, [*arguments, "--eager"]).stdout
    )
    record = json.loads(CliRunner().invoke(app, [*arguments, "--eager", "--json"]).stdout)
    assert record["ops"][-1]["bound"] == "launch"
