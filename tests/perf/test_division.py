"""Models divided over devices: what a device holds adds up, what is sent is what the axis needs, and plans compare."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ridgeline.cli import app
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.stages import deal, stage_of
from ridgeline.core.specs.experts import ExpertsSpec
from ridgeline.core.specs.model import ModelSpec
from ridgeline.kernels.attention.paged.cost import visible
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.division import Divided, Division, _prompt, stages
from ridgeline.perf.divisions import compare, divisions, quickest
from ridgeline.perf.footprint import parameters, weight_bytes
from ridgeline.perf.hardware import find
from ridgeline.perf.links import Line, Links, assumed, bus_factor
from ridgeline.perf.parts import Reach
from ridgeline.perf.planner import Deployment, Plan
from ridgeline.perf.precision import precision
from ridgeline.perf.roofline import Roofline
from ridgeline.weights.loader import read_model_config
from tests import tiny_models
from tests.perf.models import CONFIGS, spec

H200 = find("H200").attained()
BF16 = precision("bfloat16")
LLAMA, MIXTURE = spec("llama-8b"), spec("qwen3-30b-a3b")
OPS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
CONFIG = str(CONFIGS / "llama-8b.json")


def links(alpha: float, rate: float = float("inf")) -> Links:
    """The same latency and bus bandwidth whatever the op and the number of ranks."""
    lines = [
        Line(op, "nccl", ranks, alpha, bus_factor(op, ranks) / rate if rate < float("inf") else 0.0)
        for op in OPS
        for ranks in (2, 4, 8)
    ]
    return Links(device="test", lines=tuple(lines), source="test")


def divided(model: str = "llama-8b", between: Links | None = None, **axes: int) -> Divided:
    return Divided(spec(model), Division(**axes), H200, between or links(0.0), BF16, "bfloat16")


@pytest.mark.parametrize("model", ["llama-8b", "qwen3-0.6b", "qwen3-30b-a3b"])  # the second has a tied table
@pytest.mark.parametrize("pp", [2, 3, 5])
def test_stages_hold_the_model_once(model: str, pp: int) -> None:
    whole, whose = spec(model), divided(model, pp=pp)
    assert [layer for stage in whose.stages for layer in stage.model.layers] == list(whole.layers)
    assert [len(stage.model.layers) for stage in whose.stages] == list(deal(whole, pp)), "as the engine deals them out"
    bytes_of = [weights - 2 * whole.hidden_size for weights in whose.weights]
    layer = (whose.weights[1] if pp > 2 else bytes_of[0]) / len(whose.stages[1].model.layers)
    assert max(bytes_of) - min(bytes_of) <= 2 * layer + twice_of(whole)
    norms = 2 * whole.hidden_size * (pp - 1)  # every stage's count has the final norm
    twice = 2 * whole.vocab_size * whole.hidden_size if whole.tie_word_embeddings else 0
    assert sum(whose.weights) == weight_bytes(whole, BF16) + norms + twice


def twice_of(model: ModelSpec) -> int:
    """Bytes of the table of tokens, which the first stage has besides."""
    return 2 * model.vocab_size * model.hidden_size


def test_ranks_of_every_axis_hold_their_share() -> None:
    whole = divided()
    layers = parameters(LLAMA).products
    assert divided(tp=4).weights[0] == pytest.approx(whole.weights[0] / 4, rel=1e-3)
    assert divided(cp=4).weights == whole.weights
    assert divided(tp=2, pp=2).weights[1] == pytest.approx(layers * 15 / 32 + LLAMA.vocab_size * 4096, rel=1e-3)
    kv = {"block_size": 16, "max_chunk": 64}
    staged = divided(pp=4)
    assert [staged.kv_per_token(stage) * 32 / whole.kv_per_token(0) for stage in range(4)] == list(deal(LLAMA, 4))
    for axes in ({"tp": 4}, {"cp": 4}):
        own = divided(**axes)
        assert own.kv_per_token(0) == whole.kv_per_token(0) / 4
        assert own.kv_per_request(0, 8192, **kv) == whole.kv_per_request(0, 8192, **kv) / 4
    assert divided(tp=16).kv_per_token(0) == whole.kv_per_token(0) / 8, "8 key heads are repeated on 16 devices"


def test_tp_makes_two_sums_a_layer_and_one_behind_the_embedding() -> None:
    own = divided(tp=2, between=links(1e-6))
    assert own.decode(8, 1000).tp == pytest.approx((2 * 32 + 1 + 1) * 1e-6), "and gathers candidates once"
    by_bytes = divided(tp=2, between=links(0.0, 1e9)).decode(8, 1000).tp
    sums = 65 * 8 * 4096 * 2 / 1e9  # 2 (n - 1) / n = 1
    assert sums < by_bytes < 1.01 * sums
    assert own.decode(8, 1000).compute == pytest.approx(
        Roofline(own.part, H200, "bfloat16").step_limit(StepShape(np.ones(8), np.full(8, 1000), 8))
    )
    stage = divided(tp=2, pp=2, between=links(1e-6))
    assert stage.decode(1, 1000).tp == pytest.approx(66e-6), "stages share them"


def test_pp_keeps_stages_full_if_there_are_requests_for_all() -> None:
    own = divided(pp=4, between=links(1e-6))
    stage = [own._stage(n, StepShape(np.ones(2), np.full(2, 1000), 2)).total for n in range(4)]
    eight = own.decode(8, 1000)
    assert eight.total == pytest.approx(4 * (max(stage) + 1e-6))
    assert own.idle(8, 1000) == pytest.approx(1 - sum(stage) / eight.total)
    one = own.decode(1, 1000)
    assert one.bubble == 0, "a request alone goes from stage to stage"
    assert one.pp == pytest.approx(3e-6)
    assert own.idle(1, 1000) == pytest.approx(3 / 4, abs=0.01)
    assert divided().idle(1, 1000) == 0


def test_a_prompt_in_stages_follows_the_formula() -> None:
    """m pieces through p stages take m + p - 1 turns of a stage (GPipe, Huang et al., arXiv 1811.06965)."""
    model = replace(LLAMA, layers=LLAMA.layers[:8], vocab_size=2)  # a head that costs nothing
    one, four = (Divided(model, Division(pp=pp), H200, links(0.0), BF16, "bfloat16") for pp in (1, 4))
    whole = one.prompt(4096, 512).total
    assert four.prompt(4096, 512).total == pytest.approx(whole * (8 + 3) / 8 / 4, rel=0.05)
    assert four.prompt(4096, 4096).total == pytest.approx(whole, rel=0.01), "one piece fills one stage at a time"


def test_ranks_of_cp_have_equal_parts_of_the_triangle() -> None:
    def pairs(shape: StepShape) -> float:
        return visible(np.asarray(shape.num_tokens_R), np.asarray(shape.kv_len_R), None, 0)[0]

    for tokens, length in ((8192, 8192), (1024, 8192)):
        whole = pairs(_prompt(tokens, length, 1))
        for cp in (2, 4):
            assert cp * pairs(_prompt(tokens, length, cp)) == pytest.approx(whole, rel=2e-3)
    ring = divided(cp=4, between=links(0.0, 1e9)).prompt(8192, 512).cp
    assert ring == pytest.approx(3 * 2048 * 131072 / 1e9), "keys and values of a quarter, three times"
    merges = divided(cp=4, between=links(1e-6)).decode(3, 8192)
    assert merges.cp == pytest.approx(32e-6)
    one = divided().decode(64, 32768).compute - divided().decode(64, 1).compute
    assert divided(cp=4).decode(64, 32768).compute - divided(cp=4).decode(64, 1).compute == pytest.approx(
        one / 4, rel=0.01
    )


def test_ranks_of_cp_tell_what_their_tokens_do_to_states() -> None:
    """However long the prompt is, beside keys and values of it."""
    model, between = spec("qwen3.5-9b"), links(0.0, 1e9)
    states = sum(each.unit_bytes(1, "float32") for layer in model.layers for each in layer.mixer.states if each.exact)
    keys = sum(each.token_bytes("bfloat16") for layer in model.layers for each in layer.mixer.states)
    for cp, tokens in ((2, 4096), (4, 4096), (4, 8192)):
        ring = divided("qwen3.5-9b", between, cp=cp).prompt(tokens, tokens).cp
        assert ring == pytest.approx((cp - 1) * (2 * states + keys * tokens / cp) / 1e9)
    assert divided("qwen3.5-9b", links(1e-6), cp=4).decode(3, 8192).cp == pytest.approx(8e-6), "its attention merges"


def test_ranks_and_stages_hold_their_share_of_states() -> None:
    whole, halves, stages = (divided("qwen3.5-9b", **axes) for axes in ({}, {"tp": 2}, {"pp": 2}))
    assert halves.state_per_request(0) == whole.state_per_request(0) / 2
    assert stages.state_per_request(0) + stages.state_per_request(1) == whole.state_per_request(0)


def test_sums_inside_of_mixers_are_counted() -> None:
    """Falcon-Mamba's layers have no feed-forward, and add up what steps, b and c are made of: 256 + 2 * 16 numbers."""
    hybrid = divided("qwen3.5-9b", links(1e-6), tp=2)
    assert hybrid.decode(8, 1000).tp == pytest.approx((2 * 32 + 1 + 1) * 1e-6)
    mamba = divided("falcon-mamba-7b", links(1e-6), tp=2)
    assert mamba.decode(8, 1000).tp == pytest.approx((2 * 64 + 1 + 1) * 1e-6)
    by_bytes = divided("falcon-mamba-7b", links(0.0, 1e9), tp=2).decode(8, 1000).tp
    sums = (65 * 4096 + 64 * (256 + 32)) * 8 * 2 / 1e9
    assert sums < by_bytes < 1.02 * sums


def test_whole_experts_on_the_ranks_of_tp_cost_the_same_sums_and_other_bytes() -> None:
    """Against drawing: 5 tokens choose 8 of 128 experts, of which a rank holds 32."""
    spread, whole = (divided("qwen3-30b-a3b", links(1e-6), tp=4, ep=ep) for ep in (1, 4))
    assert whole.division.devices == spread.division.devices == 4
    assert whole.weights == pytest.approx(spread.weights)
    assert whole.decode(5, 1000).tp == spread.decode(5, 1000).tp
    assert whole.decode(5, 1000).ep == 0
    mixture = whole.part.layers[0].feed_forward
    assert isinstance(mixture, ExpertsSpec)
    assert mixture.held == 32
    chosen = np.random.default_rng(0).random((4000, 5, 128)).argpartition(8, axis=-1)[..., :8].reshape(4000, -1)
    drawn = np.mean([len({expert for expert in step if expert < 32}) for step in chosen])
    assert Reach().experts(5, mixture) == pytest.approx(drawn, rel=0.01)
    assert Reach().used(mixture) == 2, "of eight pairs a quarter falls to a rank"
    two_groups = divided("qwen3-30b-a3b", links(1e-6), tp=2, ep=4)
    assert two_groups.decode(5, 1000).ep == pytest.approx(2 * 48 * 1e-6)
    assert two_groups.division.groups == 2


def test_what_does_not_divide_is_one_sentence() -> None:
    for axes, sentence in (
        ({"tp": 3}, "tp 3 does not divide the model's 32 attention heads"),
        ({"pp": 33}, "pp 33 is more than the model's 32 layers"),
        ({"ep": 2}, "ep 2 is to divide experts, and the model has none"),
        ({"tp": 4, "ep": 2}, "ep 2 is no multiple of tp 4"),
        ({"ep": 4, "cp": 2}, "cannot be planned together"),
        ({"cp": 0}, "cp must be at least 1"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            Division(**axes).part_of(LLAMA)
    with pytest.raises(InvalidConfig, match="ep 3 does not divide the model's 128 experts"):
        Division(ep=3).part_of(MIXTURE)


def test_every_division_of_the_devices_is_looked_at_once() -> None:
    found = list(divisions(4, experts=False))
    assert len(found) == len(set(found))
    for division, replicas in found:
        assert division.devices * replicas == 4
    axes = Counter((d.tp, d.pp, d.cp) for d, _ in found)
    wanted = [(tp, pp, cp) for tp in (1, 2, 4) for pp in (1, 2, 4) for cp in (1, 2, 4) if tp * pp * cp <= 4]
    assert set(axes) == {each for each in wanted if 1 in each[1:]}, "stages divide no tokens, here and in the engine"
    assert axes.total() == len(axes)
    mixture = [division for division, _ in divisions(4, experts=True)]
    assert {(d.tp, d.ep) for d in mixture} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 4)}
    assert len(mixture) == len(set(mixture))


def test_the_best_division_is_best_and_slow_links_change_it() -> None:
    base = Deployment(model=LLAMA, hardware=H200, input=1024, output=256, slo_itl=0.01)
    found = compare(base, 4)
    speeds = [each.tokens_per_second for each in found]
    assert speeds == sorted(speeds, reverse=True)
    assert found[0].best == Plan(replace(base, **vars(found[0].division))).best
    quick = quickest(found)
    assert quick is not None
    assert quick.division == Division(tp=4)
    slow = quickest(compare(replace(base, links=links(1e-3)), 4))
    assert slow is not None
    assert slow.division.tp == 1, "66 sums of a millisecond are no way to be quick"
    refused = compare(replace(base, model=spec("llama-3-70b"), slo_itl=None), 2)
    assert {each.name for each in refused if each.plan is None} == {"2 x one device", "cp 2"}
    assert all("remain for the KV cache" in each.why for each in refused if each.plan is None)


def test_the_verbs_compare_and_explain(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "150")

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, "--gpu", "H200"])
        assert done.exit_code == 0, done.output
        return done.stdout

    shown = run("plan", CONFIG, "--gpus", "2")
    assert "most tokens: 2 x one device" in shown
    assert "one request alone: tp 2" in shown
    assert "links assumed, not measured here" in shown
    (record,) = json.loads(run("plan", CONFIG, "--gpus", "2", "--json"))
    assert record["quickest"] == {"tp": 2, "pp": 1, "ep": 1, "cp": 1}
    assert {each["replicas"] for each in record["divisions"]} == {1, 2}
    assert "pp 2; links assumed" in run("plan", CONFIG, "--pp", "2")
    explained = run("explain", CONFIG, "--tp", "2", "--batch", "8")
    assert "one of 2 devices (tp 2)" in explained
    ops = {op["name"]: op for op in json.loads(run("explain", CONFIG, "--tp", "2", "--batch", "8", "--json"))["ops"]}
    assert (ops["all_reduce"]["count"], ops["all_reduce"]["bound"]) == (65, "link")
    limit = divided(tp=2, between=assumed(H200)).decode(8, 1024).total
    assert ops["total"]["limit"] == pytest.approx(limit, rel=1e-6)
    for arguments, sentence in (
        (["plan", CONFIG, "--gpus", "2", "--tp", "2"], "leave --tp, --pp, --ep and --cp out"),
        (["plan", str(CONFIGS / "llama-3-70b.json"), "--gpus", "1"], "no division of 1 devices works"),
        (["explain", CONFIG, "--tp", "2", "--measure"], "times the ops of one device"),
        (["explain", CONFIG, "--tp", "3"], "tp 3 does not divide"),
    ):
        with pytest.raises(InvalidConfig, match=sentence):
            app([*arguments, "--gpu", "H200"], standalone_mode=False)


def test_stages_of_a_part() -> None:
    assert [(stage.first, stage.last) for stage in stages(LLAMA, LLAMA, 3)] == [
        (True, False),
        (False, False),
        (False, True),
    ]


def test_stages_hold_and_hand_on_what_zamba_needs(tmp_path: Path) -> None:
    """Each stage that uses a block of shared weights has it, and the tokens as embedded go along."""
    tiny_models.save("zamba2", tmp_path)
    model, between = read_model_config(tmp_path).spec, links(0.0, 1e9)
    staged = Divided(model, Division(pp=2), H200, between, BF16, "bfloat16")
    held = [stage.model.layers for stage in staged.stages]
    counts = deal(model, 2)
    assert held == [stage_of(model, stage, counts).layers for stage in range(2)]
    assert sum(staged.weights) > weight_bytes(model, BF16) * 1.05
    assert staged.decode(1, 10).pp == pytest.approx(2 * model.hidden_size * 2 / 1e9)
