"""Layers that wait in the host's memory and come to the device in every step: the same tokens as without, fewer bytes
on the device, and a rate that is printed beforehand."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.core.errors import InvalidConfig
from ridgeline.core.plan.sharding import with_cached_experts
from ridgeline.core.settings.cache import WeightsWanted
from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.footprint import parameters
from ridgeline.perf.hardware import find
from ridgeline.perf.planner import Deployment, NoRoom, Plan
from ridgeline.perf.precision import precision
from ridgeline.perf.streamed import (
    GIB,
    ExpertsBelow,
    LayersBelow,
    StreamedCost,
    cheaper,
    experts_below,
    layer_bytes,
    layers_below,
)
from ridgeline.weights.loader import read_model_config
from tests.driving import ask, rig
from tests.test_host_tier import AXES
from tests.weights.quantized_files import SCHEMES, quantize

MORE = ["qwen2", "gpt_oss", "mixtral", "qwen2_moe", "granite_hybrid_moe", "lfm2_moe", "falcon_h1", "rwkv", "gemma4"]
MORE += ["gemma4_moe", "deepseek_v32", "minicpm3", "kimi_linear", "qwen3_5_moe", "bamba", "falcon_mamba", "gpt2"]
MORE += ["neox", "glm4_moe", "qwen3_next", "granite_moe", "bloom", "olmo2"]
PROMPTS = [tuple((7 * k + n * n) % 90 + 1 for n in range(20)) for k in range(3)]
FAMILIES = [
    *("llama", "gemma2", "qwen3_moe", "deepseek_v3", "mixed", "mamba2", "qwen3_5", "jamba", "nemotron_h", "zamba2"),
    *(pytest.param(family, marks=pytest.mark.thorough) for family in MORE),
]
BF16 = precision("bfloat16")
LARGE = Path("benchmarks/models/llama-70b")
MIXTURE = Path("benchmarks/models/mixtral-8x7b")


def tokens(folder: Path, *, num_bytes: int | None = None, **settings: Any) -> list[list[int]]:
    """Return the tokens of the prompts. num_bytes: of the layers that wait."""
    with rig(folder, max_model_len=60, **settings) as own:
        streamed = own.runner.decoder.streamed
        assert (streamed is not None) == bool(settings.get("cpu_offload_gb"))
        if streamed is not None:
            assert num_bytes is None or streamed.num_bytes == num_bytes
            assert 0 < max(map(len, streamed._buffers)) < 1.1 * streamed.num_bytes
        found = own.run(*(ask(str(n), prompt, max_tokens=12) for n, prompt in enumerate(PROMPTS)))
        assert not own.errors
        return [found[str(n)].tokens for n in range(len(PROMPTS))]


def check(folder: Path, **settings: Any) -> None:
    want, model = tokens(folder, **settings), read_model_config(folder).spec
    for gib in (1e-9, 1.0):  # two layers, and as many as may
        size = layers_below(model, WeightsWanted(gib), precision("float32")).num_bytes
        assert tokens(folder, cpu_offload_gb=gib, num_bytes=size, **settings) == want


@pytest.fixture
def whole_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers wait as a whole, whatever that costs."""
    monkeypatch.setattr("ridgeline.assembly.choices.experts_below", lambda *arguments: None)


# Norms on both sides, a mixture, latents with a dense layer first, windows, states of several kinds with and
# without attention and experts, and blocks that layers share
@pytest.mark.few(6)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("whole_layers")
def test_layers_from_the_hosts_memory_give_the_same_tokens(family: str, tiny_model: Callable[[str], Path]) -> None:
    check(tiny_model(family), dtype="float32")


REFERENCE = dict.fromkeys(("coded_linear", "fp8_linear", "w8a8_linear"), "reference")  # others keep addresses


@pytest.mark.parametrize(
    ("family", "form"),
    [("llama", "gptq order"), ("llama", "fp8 blocks"), ("llama", "ct int8"), ("qwen3_moe", "ct nvfp4")],
)
def test_layers_in_the_forms_of_their_files_come_too(family: str, form: str, tmp_path: Path) -> None:
    """The bytes that a plan says are theirs, but for what belongs to a matrix as a whole."""
    folder, _ = quantize(family, SCHEMES[form], tmp_path / "model")
    settings = {"dtype": "float32", "kernels": REFERENCE}
    want = tokens(folder, **settings)
    for gib in (1e-9, 1.0):
        with rig(folder, max_model_len=60, cpu_offload_gb=gib, **settings) as own:
            assert own.runner.decoder.streamed is not None
            size = own.runner.decoder.streamed.num_bytes
        plain = layers_below(read_model_config(folder).spec, WeightsWanted(gib), precision("float32"))
        assert 0.1 * plain.num_bytes < size < 0.5 * plain.num_bytes
        assert tokens(folder, cpu_offload_gb=gib, **settings) == want


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"offload_group_size": 2}, 1 / 3),
        ({"offload_group_size": 3, "offload_num_in_group": 2, "offload_prefetch_step": 2}, 2 / 3),
        ({"offload_group_size": 1, "offload_prefetch_step": 9}, 1.0),
        ({"cpu_offload_gb": 1.0, "offload_params": ("self_attn", "mlp.experts")}, None),
        ({"offload_group_size": 1, "offload_params": "gate_proj"}, None),
    ],
)
def test_layers_wait_by_groups_and_weights_by_their_names(
    settings: dict[str, Any], share: float | None, tiny_model: Callable[[str], Path]
) -> None:
    folder = tiny_model("deepseek_v3")
    want = tokens(folder, dtype="float32")
    with rig(folder, max_model_len=60, dtype="float32", **settings) as own:
        streamed = own.runner.decoder.streamed
        assert streamed is not None
        spec = read_model_config(folder).spec
        sizes = [layer_bytes(spec, n, precision("float32")) for n in range(len(spec.layers))]
        size, last = settings.get("offload_group_size", 1), settings.get("offload_num_in_group", 1)
        waiting = [each for n, each in enumerate(sizes) if n % size >= size - last]
        assert len(waiting) == round(len(sizes) * (share or 1.0))
        assert len(streamed._buffers) == min(len(waiting), 1 + settings.get("offload_prefetch_step", 1))
        if share is None:
            assert 0 < streamed.num_bytes < sum(waiting)
        else:
            assert streamed.num_bytes == sum(waiting)
        found = own.run(*(ask(str(n), prompt, max_tokens=12) for n, prompt in enumerate(PROMPTS)))
        assert [found[str(n)].tokens for n in range(len(PROMPTS))] == want


@pytest.mark.parametrize("rounded", ["int8", "w4a16"])
def test_layers_that_are_rounded_at_the_start_come_too(rounded: str, tiny_model: Callable[[str], Path]) -> None:
    settings = {"dtype": "float32", "quantization": rounded}
    settings["kernels"] = {**REFERENCE, "int8_linear": "reference"}
    want = tokens(tiny_model("llama"), **settings)
    assert tokens(tiny_model("llama"), cpu_offload_gb=1.0, **settings) == want


@pytest.mark.parametrize("family", ["qwen3_moe", pytest.param("qwen3_5_moe", marks=pytest.mark.thorough)])
def test_experts_wait_one_by_one_where_that_costs_less(
    family: str, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ridgeline.perf.streamed.LOOK", 0.0)  # a tiny model's layers take no time
    monkeypatch.setattr("ridgeline.perf.bus.RATE", 1e3)
    folder = tiny_model(family)
    spec, exact = read_model_config(folder).spec, precision("float32")
    most = experts_below(spec, 0.0, exact)
    assert most is not None
    gib = 0.3 * sum(experts * each for experts, _, each in most.mixtures) / GIB
    want = tokens(folder, dtype="float32", max_num_seqs=1)
    with rig(folder, max_model_len=60, dtype="float32", max_num_seqs=1, cpu_offload_gb=gib) as own:
        assert own.runner.decoder.streamed is None
        caches = own.runner.decoder.expert_caches
        below = experts_below(spec, gib, exact)
        assert below is not None
        assert len(caches) == len(below.mixtures)
        assert sum(cache.nbytes for cache in caches) == below.slots * sum(each for _, _, each in below.mixtures)
        found = own.run(*(ask(str(n), prompt, max_tokens=12) for n, prompt in enumerate(PROMPTS)))
        assert [found[str(n)].tokens for n in range(len(PROMPTS))] == want
        assert not own.errors


def test_the_cheaper_of_layers_and_experts_waits() -> None:
    """One token chooses few experts, and many tokens all of them."""
    spec, exact = read_model_config(MIXTURE).spec, precision("bfloat16")
    whole, experts = layers_below(spec, WeightsWanted(30.0), exact), experts_below(spec, 30.0, exact)
    assert experts is not None
    assert experts.num_bytes >= 30 * GIB
    kept = parameters(with_cached_experts(spec, experts.slots)).total
    assert 2 * kept + experts.saved == 2 * parameters(spec).total
    rate = 50e9
    assert cheaper(whole, experts, 1, rate, 0.005) is experts
    assert cheaper(whole, experts, 4096, rate, 1.0) is whole
    assert cheaper(whole, None, 1, rate, 0.005) is whole
    rising = [experts.seconds(0.005, tokens, rate) for tokens in (1, 4, 16, 64, 256)]
    assert rising == sorted(rising)
    assert rising[-1] - 0.005 - 0.5e-3 * len(experts.mixtures) <= experts.num_bytes / rate * 1.001
    assert experts_below(spec, 1000.0, exact) is None
    assert experts_below(read_model_config(LARGE).spec, 1.0, exact) is None


@pytest.mark.parametrize("axis", AXES)
def test_each_rank_has_layers_of_its_own_below(axis: str, tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("deepseek_v3" if axis == AXES[1] else "mixed")  # four layers
    want = tokens(folder, dtype="float32")
    settings: dict[str, Any] = {axis: 2}
    with rig(folder, max_model_len=60, dtype="float32", cpu_offload_gb=1.0, **settings) as own:
        facts = own.engine._worker.all_facts  # type: ignore[attr-defined]
        assert all(each.below_bytes > 0 and each.copying > 0 for each in facts)
        found = own.run(*(ask(str(n), prompt, max_tokens=12) for n, prompt in enumerate(PROMPTS)))
        assert [found[str(n)].tokens for n in range(len(PROMPTS))] == want
        assert not own.errors


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_5"])
def test_ranks_of_other_families_have_layers_below(family: str, tiny_model: Callable[[str], Path]) -> None:
    test_each_rank_has_layers_of_its_own_below("tensor_parallel_size", tiny_model=lambda _: tiny_model(family))


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "qwen3_moe", "deepseek_v3", "qwen3_5", "jamba"])
@pytest.mark.usefixtures("whole_layers")
def test_layers_come_over_a_stream_of_their_own(family: str, tiny_model: Callable[[str], Path]) -> None:
    check(tiny_model(family), device="cuda", dtype="float32", enforce_eager=True)


def test_the_embedded_model_says_what_comes(caplog: pytest.LogCaptureFixture) -> None:
    """It has seven layers: one buffer serves four of them, and the other three."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    texts = []
    for gib in (0.0, 1.0):
        with caplog.at_level(logging.INFO, "ridgeline"), LLM(device="cpu", dtype="float32", cpu_offload_gb=gib) as llm:
            texts.append(llm.generate("The engine of a train", params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1]
    assert "of layers wait in the host's memory and come at" in caplog.text


@pytest.mark.parametrize(("gib", "count"), [(1e-9, 1), (1.5, 1), (1.7, 2), (3.5, 3), (20.0, 13), (1000.0, 80)])
def test_so_many_layers_wait_as_have_that_many_bytes(gib: float, count: int) -> None:
    model = read_model_config(LARGE).spec
    below = layers_below(model, WeightsWanted(gib), BF16)
    assert len(below.layers) == len(set(below.layers)) == count
    assert below.layers == tuple(sorted(below.layers))
    assert below.num_bytes >= min(gib, 127.0) * GIB
    gaps = {b - a for a, b in zip(below.layers, below.layers[1:], strict=False)}
    assert max(gaps, default=0) - min(gaps, default=0) <= 1, "spread evenly"
    assert below.saved == pytest.approx(below.num_bytes * max(0, count - 2) / count, rel=1e-3)


def test_a_plan_of_a_model_larger_than_the_device_has_its_rate() -> None:
    model, hardware = read_model_config(LARGE).spec, find("H100")
    assert hardware is not None
    wanted = Deployment(model=model, hardware=hardware, input=256, output=128)
    with pytest.raises(NoRoom):
        Plan(wanted)
    found = Plan(replace(wanted, cpu_offload_gb=90.0))
    below = layers_below(model, WeightsWanted(90.0), BF16)
    assert found.copying == below.num_bytes / (0.8 * (hardware.pcie or 0))
    assert found.weights < hardware.memory
    for point in found.points():
        assert point.step == pytest.approx(max(found.copying, point.decode.total))
        assert point.tokens_per_second <= 128 / 127 * point.batch / found.copying


def test_a_step_takes_as_long_as_the_slower_of_both() -> None:
    class Slow:
        def step_limit(self, shape: StepShape) -> float:
            return 0.25

    shape, layers = StepShape([1], [1], 1), LayersBelow((0, 1), 100, (2, 100))
    assert StreamedCost(Slow(), layers, 200.0).step_limit(shape) == 0.5
    assert StreamedCost(Slow(), layers, 1000.0).step_limit(shape) == 0.25
    experts = ExpertsBelow(2, 600, ((8, 2, 50.0), (8, 2, 50.0)))
    assert StreamedCost(Slow(), experts, 100.0).step_limit(shape) == pytest.approx(0.25 + 2 * 2 * 0.75 * 0.5 + 1e-3)


def test_what_cannot_wait_is_one_sentence(tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.assembly.choices.host_memory", lambda: 1000)
    with (
        pytest.raises(InvalidConfig, match="GiB are free; lower cpu_offload_gb"),
        rig(tiny_model("llama"), cpu_offload_gb=1.0),
    ):
        pass
    mixture = {"enable_expert_parallel": True}
    for other in ({"data_parallel_size": 2, **mixture}, {"moe_expert_cache_size": 2}, {"enable_lora": True}):
        with pytest.raises(InvalidConfig, match="do not go together"):
            LLMConfig(cpu_offload_gb=1.0, **other)  # type: ignore[arg-type]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"cpu_offload_gb": -1.0}, "must not be negative"),
        ({"cpu_offload_gb": 1.0, "offload_group_size": 2}, "both say which layers wait"),
        ({"offload_group_size": 2, "offload_num_in_group": 3}, "a group has offload_group_size 2 layers"),
        ({"offload_prefetch_step": 2}, "it is about layers in the host's memory; set cpu_offload_gb or offload_group"),
        ({"offload_backend": "disk"}, "unknown offload_backend 'disk'; use auto, prefetch or uva"),
    ]
    for settings, sentence in wrong:
        with pytest.raises(InvalidConfig, match=sentence):
            LLMConfig(**settings)
    named = {"offload_params": ("lm_head",), "offload_group_size": 1}
    with pytest.raises(InvalidConfig, match="no layer of this model has weights"), rig(tiny_model("llama"), **named):
        pass
