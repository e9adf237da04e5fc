"""Plans: what fits fits, what the SLOs forbid is not advised, and the verbs say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.cli.sizes import read_hardware
from ridgeline.core.errors import InvalidConfig
from ridgeline.perf.calibration import Calibration, GemmRate, save
from ridgeline.perf.explain import explain_table, step_shape
from ridgeline.perf.footprint import kv_bytes, parameters
from ridgeline.perf.hardware import find
from ridgeline.perf.planner import Deployment, Plan, shard
from ridgeline.perf.roofline import Roofline
from ridgeline.worker.machine import device_name
from tests.perf.models import CONFIGS, spec

H200 = find("H200").attained()
BASE = Deployment(model=spec("llama-8b"), hardware=H200, input=1024, output=256)
CONFIG = str(CONFIGS / "llama-8b.json")


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_promised_fits_and_one_more_does_not() -> None:
    plan = Plan(BASE)
    used = plan.weights + plan.activations + plan.max_requests * plan.kv_per_request
    assert used <= 0.9 * H200.memory < used + plan.kv_per_request
    assert plan.kv_per_request == 80 * 16 * 131072


def test_the_best_batch_meets_the_slos_and_the_next_does_not() -> None:
    plan = Plan(replace(BASE, slo_itl=0.02, slo_ttft=0.1))
    assert plan.best is not None
    assert plan.meets(plan.best)
    assert not plan.meets(plan.point(plan.best.batch + 1))
    assert Plan(replace(BASE, slo_itl=1e-4)).best is None


def test_the_largest_chunk_keeps_the_step_within_the_itl() -> None:
    plan = Plan(replace(BASE, slo_itl=0.02))
    assert plan.best is not None
    assert plan.largest_chunk is not None
    assert (
        plan._mixed(plan.best.batch, plan.largest_chunk) <= 0.02 < plan._mixed(plan.best.batch, plan.largest_chunk + 1)
    )


def test_products_cross_over_near_the_ridge() -> None:
    """Two FLOPs per weight of two bytes: at the ridge's number of tokens, and a little more for activations."""
    crossover = Plan(BASE).crossover
    assert crossover is not None
    assert H200.ridge("bfloat16") < crossover < 1.1 * H200.ridge("bfloat16")


def test_cost_is_price_over_throughput() -> None:
    point = Plan(replace(BASE, price_per_hour=3.6, tp=2)).point(8)
    assert point.cost_per_million == pytest.approx(2 * 3.6 / 3600 / point.tokens_per_second * 1e6)


def test_shards_hold_the_whole_model() -> None:
    whole, part = parameters(BASE.model), parameters(shard(BASE.model, 8))
    assert 8 * part.products == whole.products
    assert 8 * part.embed == whole.embed
    assert shard(BASE.model, 16).layers[0].mixer.num_kv_heads == 1  # repeated on pairs of devices
    for tp in (3, 64):
        with pytest.raises(InvalidConfig, match=f"tp {tp} does not divide"):
            shard(BASE.model, tp)


def test_communication_makes_two_devices_less_than_twice_as_fast() -> None:
    one, two = (Plan(replace(BASE, tp=tp)).point(1).step for tp in (1, 2))
    assert one / 2 < two < one


def test_a_window_bounds_the_cache() -> None:
    model = spec("sliding")
    assert kv_bytes(model, 10_000, "bfloat16", block_size=16, max_chunk=64) == kv_bytes(
        model, 20_000, "bfloat16", block_size=16, max_chunk=64
    )


@pytest.mark.parametrize(
    "wrong", [{"input": 0}, {"tp": 0}, {"utilization": 1.5}, {"slo_itl": -1.0}, {"price_per_hour": 0.0}]
)
def test_wrong_deployments_are_refused(wrong: dict) -> None:
    with pytest.raises(InvalidConfig, match=str(next(iter(wrong)))):
        replace(BASE, **wrong)


def test_a_model_too_large_says_what_is_missing() -> None:
    with pytest.raises(InvalidConfig, match=r"0\.0 GB per device remain .* raise --tp"):
        Plan(replace(BASE, hardware=find("TPU-v5e")))


def test_the_table_adds_up() -> None:
    shape = step_shape(64, 1024, 512)
    *rows, total = explain_table(BASE.model, shape, H200)
    assert total.limit == pytest.approx(Roofline(BASE.model, H200, "bfloat16").step_limit(shape))
    assert sum(row.share for row in rows) == pytest.approx(1)
    assert sum(row.bytes for row in rows) == total.bytes
    assert total.measured is None


def test_measured_times_stand_beside_the_limit() -> None:
    shape = step_shape(64, 1024)
    names = [row.name for row in explain_table(BASE.model, shape, H200)][:-1]
    *rows, total = explain_table(BASE.model, shape, H200, dict.fromkeys(names, 1e-4))
    assert total.measured == pytest.approx(1e-4 * sum(row.count for row in rows))
    assert total.attained == pytest.approx(total.limit / total.measured)
    *_, partial = explain_table(BASE.model, shape, H200, {"qkv": 1e-4})
    assert partial.measured is None


def test_explain_as_json() -> None:
    result = CliRunner().invoke(
        app, ["explain", CONFIG, "--gpu", "H200", "--batch", "256", "--context", "1088", "--json"]
    )
    record = json.loads(result.stdout)
    assert record["ops"][-1]["name"] == "total"
    assert record["ops"][-1]["limit"] == pytest.approx(0.01378, rel=1e-3)


def test_the_cpu_is_this_machines_by_its_calibration() -> None:
    assert read_hardware("cpu", datasheet=False) == find("CPU")
    gemm = (GemmRate(64, 64, 64, "float32", 3e11),)
    save(Calibration(device=device_name(torch.device("cpu")), read=33e9, date="2026-11-21", gemm=gemm))
    mine = read_hardware("cpu", datasheet=False)
    assert (mine.bandwidth, mine.rate("float32"), mine.unsure) == (33e9, 3e11, ("memory", "interconnect"))
    assert read_hardware("cpu", datasheet=True) == find("CPU")
    small = str(CONFIGS / "qwen3-0.6b.json")
    for verb in ("explain", "plan"):
        result = CliRunner().invoke(app, [verb, small, "--gpu", "CPU", "--dtype", "float32"])
        assert "33 GB/s, 300 GFLOP/s in float32" in result.stdout


def test_plan_as_json_and_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "plan.png"
    arguments = ["plan", CONFIG, "--gpu", "H200,MI300X", "--price-per-hour", "3", "--plot", str(picture), "--json"]
    first, second = json.loads(CliRunner().invoke(app, arguments).stdout)
    assert (first["hardware"], second["hardware"]) == ("H200", "MI300X")
    assert first["best"]["batch"] == first["max_requests"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_both_verbs_print_tables() -> None:
    for verb, word in (("explain", "gate_up"), ("plan", "largest batch")):
        result = CliRunner().invoke(app, [verb, CONFIG, "--gpu", "H200"])
        assert result.exit_code == 0
        assert word in result.stdout


def test_mistakes_are_one_sentence() -> None:
    for arguments, sentence in (
        (["explain", CONFIG, "--gpu", "H201"], "unknown hardware 'H201'"),
        (["explain", CONFIG, "--gpu", "H200", "--dtype", "fp7"], "unknown dtype 'fp7'"),
        (["plan", CONFIG, "--gpu", "H200", "--tp", "3"], "tp 3 does not divide"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            app(arguments, standalone_mode=False)
