"""Plans: what fits fits, what the SLOs forbid is not advised, and the verbs say so."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.cli.sizes import read_hardware
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import part_of
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import LayerSpec, ModelSpec
from ridgeline.kernels.base.cost import StepShape
from ridgeline.kernels.gemm.experts.cost import touched
from ridgeline.perf.calibration import Calibration, GemmRate, save
from ridgeline.perf.explain import Ran, explain_table, step_shape
from ridgeline.perf.footprint import active_parameters, kv_bytes, parameters
from ridgeline.perf.hardware import find
from ridgeline.perf.links import Line, Links, assumed
from ridgeline.perf.parts import Reach
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.roofline import Roofline, step_limit, step_ops
from ridgeline.worker.machine import device_name
from tests.perf.models import CONFIGS, spec
from tests.worker.test_memory import activation_bytes

H200 = find("H200").attained()
BASE = Deployment(model=spec("llama-8b"), hardware=H200, input=1024, output=256)
MIXTURE = replace(BASE, model=spec("qwen3-30b-a3b"))
CONFIG = str(CONFIGS / "llama-8b.json")


@pytest.fixture(autouse=True)
def _no_calibration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_what_is_promised_fits_and_one_more_does_not() -> None:
    plan = Plan(BASE)
    used = plan.weights + plan.activations + plan.max_requests * plan.kv_per_request
    assert used <= 0.9 * H200.memory < used + plan.kv_per_request
    assert plan.kv_per_request == 80 * 16 * 131072


def test_a_step_has_room_for_a_row_of_each_expert_of_a_token() -> None:
    """As much as the engine gives it."""
    plan, model = Plan(MIXTURE), MIXTURE.model
    assert plan.activations == activation_bytes(model, max_tokens=plan.chunk, max_seqs=256, device_type="cuda")
    assert plan.activations > plan.chunk * 8 * 4 * model.hidden_size  # the rows are half of it


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
    whole, part = parameters(BASE.model), parameters(part_of(BASE.model, 8))
    assert 8 * part.products == whole.products
    assert 8 * part.embed == whole.embed
    assert part_of(BASE.model, 16).layers[0].mixer.num_kv_heads == 1  # repeated on pairs of devices
    for tp in (3, 64):
        with pytest.raises(InvalidConfig, match=f"tensor_parallel_size {tp} does not divide"):
            part_of(BASE.model, tp)


def test_of_experts_every_matrix_is_divided() -> None:
    whole, part = (parameters(model) for model in (MIXTURE.model, part_of(MIXTURE.model, 4)))
    routers = 48 * 2048 * 128  # every device chooses by itself
    assert 4 * (part.products - routers) == whole.products - routers
    with pytest.raises(InvalidConfig, match="does not divide the model's 768 columns of an expert"):
        part_of(replace(MIXTURE.model, layers=_with_heads(MIXTURE.model, 5)), 5)


def _with_heads(model: ModelSpec, count: int) -> tuple[LayerSpec, ...]:
    mixer = replace(model.layers[0].attention, num_heads=count, num_kv_heads=count)
    return tuple(replace(layer, mixer=mixer) for layer in model.layers)


def test_experts_on_several_devices() -> None:
    """Qwen3-30B-A3B: 128 experts of 3 x 768 x 2048 in 48 layers, 30.5 billion parameters of which a token uses 3.3."""
    experts = 48 * 128 * 3 * 768 * 2048
    one, eight = Plan(replace(MIXTURE, ep=1)), Plan(replace(MIXTURE, ep=8))
    assert one.weights == 2 * parameters(MIXTURE.model).total == 2 * 30_532_122_624
    assert eight.weights == one.weights - 2 * experts * 7 // 8
    assert active_parameters(MIXTURE.model) == 30_532_122_624 - experts * 120 // 128
    assert active_parameters(MIXTURE.model) == pytest.approx(3.3e9, rel=0.02)
    # A token's row goes once to each other device that has one of its experts; drawn 100,000 times.
    chosen = np.random.default_rng(0).random((100_000, 128)).argpartition(8, axis=1)[:, :8]
    others = np.mean([len({expert // 16 for expert in token} - {0}) for token in chosen])
    assert eight.exchanged == pytest.approx(48 * 2048 * 2 * others, rel=5e-3)
    assert one.exchanged == 0
    # Nothing hides the exchange, and eight devices, which serve eight times the requests, reach most experts of all.
    shape = StepShape([1], [1152], 1)
    ops = step_ops(MIXTURE.model, shape, dtype="bfloat16", expert_devices=8)
    lines = (Line("all_to_all", "nccl", 8, 0.0, 7 / 8 / H200.interconnect),)
    at_once = Plan(replace(MIXTURE, ep=8, links=Links(device="no latency", lines=lines, source="")))
    assert at_once.point(1).step == pytest.approx(
        step_limit(ops, H200, "bfloat16") + 2 * eight.exchanged / H200.interconnect, rel=1e-6
    )
    assert at_once.point(1).tokens_per_second > 4 * one.point(1).tokens_per_second
    messages = 2 * 48 * assumed(H200).seconds("all_to_all", 8, 0)
    assert eight.point(1).decode.ep == pytest.approx(at_once.point(1).decode.ep / 0.63 + messages, rel=1e-6)
    for ep, model, sentence in (
        (3, MIXTURE.model, "ep 3 does not divide the model's 128 experts"),
        (2, BASE.model, "ep 2 is to divide experts, and the model has none"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            replace(MIXTURE, ep=ep, model=model)
    with pytest.raises(InvalidConfig, match="ep 2 is no multiple of tp 4"):
        replace(MIXTURE, ep=2, tp=4)


def test_experts_on_devices_that_share_them() -> None:
    """Against drawing: 5 tokens on each of 8 devices, which choose 8 of 128 experts. The first device has 16."""
    chosen = np.random.default_rng(0).random((4000, 40, 128)).argpartition(8, axis=-1)[..., :8].reshape(4000, -1)
    drawn = np.mean([len({expert for expert in step if expert < 16}) for step in chosen])
    mixture = MIXTURE.model.layers[0].feed_forward
    assert isinstance(mixture, ExpertsSpec)
    assert Reach(devices=8).experts(5, mixture) == pytest.approx(drawn, rel=5e-3)


@pytest.mark.parametrize(
    ("prompt", "answer", "size", "share", "said"),
    [
        (
            161,
            338,
            64,
            32 / (161 + 169 + 32),
            "8.8% of their room is empty ends of last blocks (--block-size 16: ",
        ),
        (1155, 211, 64, 32 / (1155 + 105.5 + 32), ""),
        (161, 338, 16, 8 / (161 + 169 + 8), ""),
        (40, 8, 16, 8 / (40 + 4 + 8), "15.4% of their room is empty ends of last blocks\n"),
    ],
)
def test_a_plan_says_what_blocks_waste_and_which_waste_less(
    prompt: int, answer: int, size: int, share: float, said: str
) -> None:
    """Half a block of the prompt and half of the answer; published lengths as in tests/engine/test_census.py."""
    asked = ["plan", str(CONFIGS / "qwen3-0.6b.json"), "--gpu", "H200", "--input", str(prompt), "--output", str(answer)]
    asked += ["--block-size", str(size)]
    assert json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)[0]["empty_share"] == pytest.approx(share)
    found = CliRunner().invoke(app, asked).stdout
    assert said in found if said else "empty ends" not in found


def test_the_verbs_know_the_hosts_memory() -> None:
    path, token = str(CONFIGS / "qwen3-0.6b.json"), 28 * 2 * 8 * 128 * 2  # bytes of a token's keys and values
    seconds = 1008 * token / (0.8 * 64e9)  # whole blocks of 1,010 tokens, over the bus that the maker states
    asked = ["plan", path, "--gpu", "H200", "--input", "1010", "--block-size", "16", "--kv-offloading-size", "2"]
    tier = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)[0]["host_tier"]
    assert (tier["blocks"], tier["tokens"], tier["load"]) == (2 * 2**30 // (16 * token), 1008, pytest.approx(seconds))
    assert (
        f"1,008 tokens of a prompt come from there in {1e3 * seconds:.3g} ms" in CliRunner().invoke(app, asked).stdout
    )
    without = json.loads(CliRunner().invoke(app, ["plan", path, "--gpu", "H200", "--json"]).stdout)[0]
    assert without["host_tier"] is None
    step = ["explain", path, "--gpu", "H200", "--loaded", "1008"]
    loads = json.loads(CliRunner().invoke(app, [*step, "--json"]).stdout)["loads"]
    assert loads == {"bytes": 1008 * token, "seconds": pytest.approx(seconds)}
    assert "1,008 cached tokens come from the host's memory" in CliRunner().invoke(app, step).stdout
    with pytest.raises(InvalidConfig, match="kv_offloading_size must be from 0"):
        app([*asked[:-1], "-1"], standalone_mode=False)


def test_the_verbs_know_experts() -> None:
    path = str(CONFIGS / "qwen3-30b-a3b.json")
    explained = CliRunner().invoke(app, ["explain", path, "--gpu", "H200", "--batch", "8"]).stdout
    assert "51.6 of 128 experts in each layer have tokens (uniform routing)" in explained
    for name in ("route", "grouped_gate_up", "grouped_down"):
        assert name in explained

    def limit(*more: str) -> float:
        found = CliRunner().invoke(app, ["explain", path, "--gpu", "H200", "--batch", "8", "--json", *more])
        return json.loads(found.stdout)["ops"][-1]["limit"]

    matrices = 48 * 3 * 768 * 2048 * 2 / 4.42e12  # one expert of each layer, read
    assert limit() - limit("--reached", "40") == pytest.approx((touched(8, 128, 8) - 40) * matrices)
    with pytest.raises(InvalidConfig, match="from 1 to 128"):
        app(["explain", path, "--gpu", "H200", "--reached", "200"], standalone_mode=False)
    with pytest.raises(InvalidConfig, match="has no experts"):
        app(["explain", CONFIG, "--gpu", "H200", "--reached", "2"], standalone_mode=False)
    planned = CliRunner().invoke(app, ["plan", path, "--gpu", "H200", "--ep", "8"]).stdout
    assert "30.5 billion parameters, of which a token uses 3.35 billion" in planned
    assert "each token is sent to its experts with 919 kB and comes back with as many" in planned
    record = json.loads(CliRunner().invoke(app, ["plan", path, "--gpu", "H200", "--ep", "8", "--json"]).stdout)[0]
    assert record["exchanged_bytes_per_token"] == pytest.approx(2 * 919e3, rel=1e-3)


def test_a_hybrids_state_is_told_and_counted_once_a_request() -> None:
    """24 layers of 32 states, 128 by 128 in float32, and 3 tokens of 8192 channels in bfloat16."""
    done = CliRunner().invoke(app, ["plan", str(CONFIGS / "qwen3.5-9b.json"), "--gpu", "H200", "--json"])
    [told] = json.loads(done.stdout)
    assert told["state_bytes_per_request"] == 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert told["kv_bytes_per_request"] == 1280 * told["kv_bytes_per_token"] + told["state_bytes_per_request"]
    assert "a state of 51.5 MB per request" in CliRunner().invoke(
        app, ["plan", str(CONFIGS / "qwen3.5-9b.json"), "--gpu", "H200"]
    ).stdout.replace("\n", " ")


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
    *rows, total = explain_table(BASE.model, shape, H200, Ran(dict.fromkeys(names, 1e-4)))
    assert total.measured == pytest.approx(1e-4 * sum(row.count for row in rows))
    assert total.attained == pytest.approx(total.limit / total.measured)
    *_, partial = explain_table(BASE.model, shape, H200, Ran({"qkv": 1e-4}))
    assert partial.measured is None


def test_explain_as_json() -> None:
    result = CliRunner().invoke(
        app, ["explain", CONFIG, "--gpu", "H200", "--batch", "256", "--context", "1088", "--json"]
    )
    record = json.loads(result.stdout)
    assert record["ops"][-1]["name"] == "total"
    assert record["ops"][-1]["limit"] == pytest.approx(0.01378, rel=1e-3)


def test_a_model_that_ships_is_found_by_its_name() -> None:
    result = CliRunner().invoke(app, ["explain", "embedded-moe", "--gpu", "H200", "--json"])
    assert "grouped_down" in {op["name"] for op in json.loads(result.stdout)["ops"]}


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
