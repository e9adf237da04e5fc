"""Where models' steps and memory cross, against arithmetic done by hand; the verb that shows it, with real steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline.assembly import assemble
from ridgeline.core.plan.step import Assign, StepPlan, StepResult
from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.models import model_config
from ridgeline.perf.crossover import CONTEXTS, Curve, crossing, crossings
from ridgeline.perf.hardware import find
from ridgeline.perf.precision import precision
from ridgeline.worker.graphs import Buckets
from ridgeline.worker.inputs import Shape
from ridgeline_bench.profile.contexts import _first, seconds_of
from ridgeline_bench.profile.made_plan import layout_for, made_plan
from tests.command import run_here

CONFIGS = Path(__file__).parent / "configs"


def curve(name: str, **options: object) -> Curve:
    spec = model_config(json.loads((CONFIGS / f"{name}.json").read_text())).spec
    fixed = {"hardware": find("H200"), "precision": precision("bfloat16"), "kv_dtype": "bfloat16"}
    return Curve(name=name, model=spec, **(fixed | options))  # type: ignore[arg-type]


def test_a_request_holds_keys_and_values_and_states() -> None:
    """Llama's 32 layers have 8 heads of 128; Qwen3.5's 8 layers of attention 4 heads of 256, and 24 layers a state of
    32 heads, 128 by 128 float32, with 3 tokens of 8192 channels; Falcon-Mamba's 64 layers 8192 channels of 16 float32
    and 3 tokens."""
    for context in (1, 16, 1000, 1 << 20):
        assert curve("llama-8b").held(context) == 2 * 32 * 8 * 128 * 2 * context
        states = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
        assert curve("qwen3.5-9b").held(context) == 2 * 8 * 4 * 256 * 2 * context + states
        assert curve("falcon-mamba-7b").held(context) == 64 * (8192 * 16 * 4 + 3 * 8192 * 2)


def test_they_cross_where_arithmetic_says() -> None:
    attention, hybrid, state = (curve(name) for name in ("llama-8b", "qwen3.5-9b", "falcon-mamba-7b"))
    found = {(one.name, other.name, what): at for one, other, what, at in crossings([attention, hybrid, state])}
    a_token = 2 * 32 * 8 * 128 * 2
    assert found["llama-8b", "falcon-mamba-7b", "held"] == state.held(1) // a_token + 1
    difference = a_token - 2 * 8 * 4 * 256 * 2
    assert found["llama-8b", "qwen3.5-9b", "held"] == (hybrid.held(1) - 2 * 8 * 4 * 256 * 2) // difference + 1
    at = found["llama-8b", "qwen3.5-9b", "step"]
    assert hybrid.step(at) < attention.step(at)
    assert hybrid.step(at - 1) >= attention.step(at - 1)
    assert not any(one == "falcon-mamba-7b" for one, _, _ in found), "a state that does not grow is never overtaken"


def test_more_requests_cross_earlier() -> None:
    """Weights are read once for all of them, and keys and values by each."""
    at = [dict_of(batch)["step"] for batch in (1, 16, 256)]
    assert at[0] > at[1] > at[2]


def dict_of(batch: int) -> dict[str, int]:
    pair = curve("llama-8b", batch=batch), curve("qwen3.5-9b", batch=batch)
    return {what: at for one, _, what, at in crossings(pair) if one.name == "llama-8b"}


def test_crossing_finds_the_first_context() -> None:
    assert crossing(lambda n: 3.0 * n, lambda n: 100 + n) == 51
    assert crossing(lambda n: 3.0 * n, lambda n: 100 + 3 * n) is None
    assert crossing(lambda n: 100 + n, lambda n: n, 1000) == 1


def test_points_fit_the_device() -> None:
    one = curve("llama-8b", chunk=2048).at(131_072)
    weights = 2 * 8_030_261_248
    assert one.requests == int((find("H200").memory * 0.9 - weights) // one.held)
    assert one.step_bytes == pytest.approx(weights - 2 * 128_256 * 4096 + one.held, rel=0.01)
    assert one.chunk > curve("llama-8b", chunk=2048).at(2048).chunk


def test_the_verb_tells_crossings_and_runs_real_steps(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    models = [tiny_model("llama"), tiny_model("qwen3_5"), tiny_model("mamba2")]
    measuring = ("--measure", "--device", "cpu", "--dtype", "float32", "--chunk", "32", "--batch", "2")
    done = run_here(
        *("crossover", *models, "--gpu", "H200", "--contexts", "16,100", "--json", *measuring),
        *("--plot", tmp_path / "plot.svg"),
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (tmp_path / "plot.svg").stat().st_size > 10_000
    for model in told["models"]:
        assert [point["context"] for point in model["points"]] == [16, 100]
        for point in model["points"]:
            assert point["step"] < point["measured"]["step"] < 5
            assert point["chunk"] < point["measured"]["chunk"] < 5
    assert {(each["what"], each["less"]) for each in told["crossings"]} >= {("held", models[2].name)}


def test_measured_steps_of_decoding_follow_one_another_as_in_service(tiny_model: Callable[[str], Path]) -> None:
    """The device gets tables with the first step alone, all steps fit a graph, and none waits for the host."""
    settings: dict[str, Any] = {"kv_cache_memory": 1 << 22, "max_num_seqs": 2, "skip_tokenizer_init": True}
    assembly = assemble(LLMConfig(model=str(tiny_model("qwen3_5")), device="cpu", dtype="float32", **settings))
    plans: list[StepPlan] = []
    submit, collect, flying = assembly.local.submit, assembly.local.collect, list[int]()

    def noting(plan: StepPlan) -> Any:
        plans.append(plan)
        return submit(plan)

    def counting() -> StepResult:
        flying.append(len(plans))
        return collect()

    assembly.local.submit = noting  # type: ignore[method-assign]
    assembly.local.collect = counting  # type: ignore[method-assign]
    try:
        seconds_of(assembly, StepShape([1, 1], [40, 25], 2), repeats=5)
        chunks_from = len(plans)
        seconds_of(assembly, StepShape([8], [40], 1), repeats=2)
    finally:
        assembly.engine.shutdown()
    steps = plans[:chunks_from]
    assert [len(plan.deltas) for plan in steps] == [2, 0, 0, 0, 0, 0]
    assert [plan.kv_bound_R.tolist() for plan in (steps[0], steps[-1])] == [[35, 20], [40, 25]]
    assert len({id(plan.rows) for plan in steps[1:]}) == 1
    buckets = Buckets(2, 16)
    assert {buckets.find(len(plan.rows), plan.num_tokens, plan.rows.tokens_each) for plan in steps} == {Shape(2, 2, 1)}
    assert flying == [6] * 6 + [7, 8, 9]


def test_steps_that_lead_to_a_measured_one_count_as_memory() -> None:
    """A window that begins some tokens earlier may need a block more."""
    attention = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    sizes = {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 100, "max_position_embeddings": 4096}
    form = {"model_type": "mistral", "sliding_window": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    spec = model_config({"architectures": ["MistralForCausalLM"], **form, **attention, **sizes}).spec
    for length in range(1, 100):
        first, spare = _first(StepShape([1] * 4, [length] * 4, 4), 7)
        plan = made_plan(spec, first, layout_for(spec, first, "float32", 16, spare), spare=spare)
        for delta in plan.deltas:
            assert isinstance(delta, Assign)
            for blocks in delta.blocks:
                assert len(blocks) > (max(first.kv_len_R) + spare - 1) // 16 >= (length - 1) // 16


def test_the_table_has_a_line_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    names = ["llama-8b", "qwen3.5-9b", "falcon-mamba-7b"]
    done = run_here("crossover", *(CONFIGS / f"{name}.json" for name in names), "--gpu", "H200", "--contexts", "1k,1M")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("falcon-mamba-7b") >= 3
    assert "1,048,576" in done.stdout
    assert "tokens on a step of qwen3.5-9b takes less time than one of llama-8b" in done.stdout
    assert len(CONTEXTS) == 11


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--contexts", "1x"), "'1x'"),
        (("--contexts", "0"), "'0'"),
        (("--contexts", "999999999999M"), "16M"),
        (("--batch", "0"), "batch must be at least 1"),
        (("--chunk", "0"), "chunk must be at least 1"),
        (("--utilization", "0"), "utilization"),
        (("--plot", "/nowhere/at/all.png"), "cannot be written"),
    ],
)
def test_mistakes_are_named(arguments: tuple[str, ...], complaint: str) -> None:
    done = run_here("crossover", CONFIGS / "llama-8b.json", "--gpu", "H200", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Traceback" not in done.stderr
