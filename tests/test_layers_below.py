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
from ridgeline.core.settings.config import LLMConfig
from ridgeline.kernels.base.cost import StepShape
from ridgeline.perf.footprint import parameters
from ridgeline.perf.hardware import find
from ridgeline.perf.planner import Deployment, NoRoom, Plan
from ridgeline.perf.streamed import GIB, StreamedCost, layers_below
from ridgeline.weights.loader import read_model_config
from tests.driving import ask, rig

PROMPTS = [tuple((7 * k + n * n) % 90 + 1 for n in range(20)) for k in range(3)]
LARGE = Path("benchmarks/models/llama-70b")


def tokens(folder: Path, **settings: Any) -> list[list[int]]:
    with rig(folder, max_model_len=60, **settings) as own:
        streamed = own.runner.decoder.streamed
        assert (streamed is not None) == bool(settings.get("cpu_offload_gb"))
        if streamed is not None:
            for buffer in streamed._buffers[1:]:
                assert buffer.numel() < streamed.num_bytes
        found = own.run(*(ask(str(n), prompt, max_tokens=12) for n, prompt in enumerate(PROMPTS)))
        assert not own.errors
        return [found[str(n)].tokens for n in range(len(PROMPTS))]


def check(folder: Path, **settings: Any) -> None:
    want = tokens(folder, **settings)
    for gib in (1e-9, 1.0):  # two layers, and as many as may
        assert tokens(folder, cpu_offload_gb=gib, **settings) == want


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_layers_from_the_hosts_memory_give_the_same_tokens(family: str, tiny_model: Callable[[str], Path]) -> None:
    check(tiny_model(family), dtype="float32")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_layers_come_over_a_stream_of_their_own(family: str, tiny_model: Callable[[str], Path]) -> None:
    check(tiny_model(family), device="cuda", dtype="float32", enforce_eager=True)


def test_the_embedded_model_says_what_comes(caplog: pytest.LogCaptureFixture) -> None:
    """It has seven layers, of which one must stay for an even number."""
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    texts = []
    for gib in (0.0, 1.0):
        with caplog.at_level(logging.INFO, "ridgeline"), LLM(device="cpu", dtype="float32", cpu_offload_gb=gib) as llm:
            texts.append(llm.generate("The engine of a train", params, use_tqdm=False)[0].outputs[0].text)
    assert texts[0] == texts[1]
    assert "of layers wait in the host's memory and come at" in caplog.text


@pytest.mark.parametrize(("gib", "count"), [(1e-9, 2), (3.0, 2), (3.5, 4), (20.0, 14), (1000.0, 80)])
def test_so_many_layers_wait_as_have_that_many_bytes(gib: float, count: int) -> None:
    model = read_model_config(LARGE).spec
    below = layers_below(model, gib, 2)
    assert len(below.layers) == len(set(below.layers)) == count
    assert below.layers == tuple(sorted(below.layers))
    assert below.num_bytes >= min(gib, 127.0) * GIB
    gaps = {b - a for a, b in zip(below.layers, below.layers[1:], strict=False)}
    assert max(gaps) - min(gaps) <= 1, "spread evenly"
    whole, kept = parameters(model).total, parameters(below.on_device(model)).total
    assert 2 * (whole - kept) == pytest.approx(below.num_bytes * (count - 2) / count, rel=1e-3)


def test_a_plan_of_a_model_larger_than_the_device_has_its_rate() -> None:
    model, hardware = read_model_config(LARGE).spec, find("H100")
    assert hardware is not None
    wanted = Deployment(model=model, hardware=hardware, input=256, output=128)
    with pytest.raises(NoRoom):
        Plan(wanted)
    found = Plan(replace(wanted, cpu_offload_gb=90.0))
    below = layers_below(model, 90.0, 2)
    assert found.copying == below.num_bytes / (0.8 * (hardware.pcie or 0))
    assert found.weights < hardware.memory
    for point in found.points():
        assert point.step == pytest.approx(max(found.copying, point.decode.total))
        assert point.tokens_per_second <= 128 / 127 * point.batch / found.copying


def test_a_step_takes_as_long_as_the_slower_of_both() -> None:
    class Slow:
        def step_limit(self, shape: StepShape) -> float:
            return 0.25

    shape = StepShape([1], [1], 1)
    assert StreamedCost(Slow(), 0.5).step_limit(shape) == 0.5
    assert StreamedCost(Slow(), 0.1).step_limit(shape) == 0.25


def test_what_cannot_wait_is_one_sentence(tiny_model: Callable[[str], Path]) -> None:
    with (
        pytest.raises(InvalidConfig, match="attention and dense feed-forwards"),
        rig(tiny_model("deepseek_v3"), cpu_offload_gb=1.0),
    ):
        pass
    for other in ({"tensor_parallel_size": 2}, {"quantization": "int8"}, {"enable_lora": True}):
        with pytest.raises(InvalidConfig, match="do not go together"):
            LLMConfig(cpu_offload_gb=1.0, **other)  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match="must not be negative"):
        LLMConfig(cpu_offload_gb=-1.0)
