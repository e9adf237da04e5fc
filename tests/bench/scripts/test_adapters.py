"""The cost of adapters: bytes by hand, an engine whose times are known, and ours on adapters that PEFT reads too."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ridgeline_bench import adapters as measuring
from ridgeline_bench.engines import Adapter, LoadOptions
from ridgeline_bench.engines.ridgeline import Ridgeline
from ridgeline_bench.scripts import adapters
from ridgeline_bench.scripts.adapters import SHAPES, adapter_bytes, predicted, written
from ridgeline_bench.workloads import Size

STEPS = {
    "task": "steps", "rank": 2, "rounds": 2, "batches": [1, 3], "input_len": 8, "different": 3, "context": 20,
    "steps": 4,
}  # fmt: skip
PAGES = {"task": "pages", "rank": 2, "rounds": 2, "held": 2}


def shape(name: str) -> dict[str, int]:
    return json.loads((SHAPES / name / "config.json").read_text())


def test_bytes_of_llamas_are_those_of_sums_by_hand() -> None:
    """8B: q and o 4096 + 4096, k and v 4096 + 1024, three of 4096 + 14336, in 32 layers; 1B's is 22.5 MB."""
    assert adapter_bytes(shape("llama-8b"), 16) == 2 * 16 * 32 * (2 * 8192 + 2 * 5120 + 3 * 18432)
    assert adapter_bytes(shape("llama-1b"), 16) == pytest.approx(22.5e6, rel=0.01)
    found = predicted(
        shape("llama-8b"), {"rank": 16, "batches": [1], "input_len": 0, "different": 64, "context": 1024, "steps": 0}
    )
    assert found["step of 1 with one"] == pytest.approx(83.9 / 15009, rel=0.001)
    assert found["step of 64 with 64"] == pytest.approx(64 * 83.9 / (15009 + 64 * 1024 * 0.131072), rel=0.001)


class Clock:
    """An engine with a device that has one adapter and a host that has three. Its times are sums that tests know."""

    def __init__(self) -> None:
        self.now, self.there, self.held = 0.0, 0, list[int]()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: Sequence[int],
        temperature: float,
        adapters: Sequence[Adapter] | None = None,
    ) -> list[int]:
        numbers = {each.number for each in adapters or ()}
        self.now += 1 + max_tokens[0] * (0.010 + 0.002 * len(numbers))
        if len(numbers) == 1 and {self.there} != numbers:
            [self.there] = numbers
            self.now += 0.005 if self.there in self.held else 0.030
            self.held = [*(each for each in self.held if each != self.there), self.there][-3:]
        return list(max_tokens)


def figures(engine: Clock, asked: dict[str, object], count: int, folder: Path) -> dict[str, float]:
    (folder / "adapter_model.safetensors").write_bytes(b"")
    found = measuring.measured(engine, Size(vocab_size=50), {**asked, "folders": [str(folder)] * count})
    return {metric.name: metric.value for metric in found}


def test_known_times_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Clock()
    monkeypatch.setattr(measuring.time, "perf_counter", lambda: engine.now)
    assert figures(engine, STEPS, 3, tmp_path) == pytest.approx({
        "step of 1 with one: none": 10, "step of 1 with one: adapters": 12, "step of 3 with one: none": 10,
        "step of 3 with one: adapters": 12, "step of 3 with 3: none": 10, "step of 3 with 3: adapters": 16,
    })  # fmt: skip
    found = figures(engine, PAGES, 6, tmp_path)
    assert found["request, adapter there"] == pytest.approx(1012)
    assert found["page-in from host"] == pytest.approx(5)
    assert found["page-in from disk"] == pytest.approx(30)


def test_our_engine_runs_adapters_that_peft_reads(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = json.loads((folder / "config.json").read_text())
    folders = written(tmp_path, config, 2, 3)
    numbers = [peft.load_peft_weights(each, device="cpu") for each in folders]
    assert sum(tensor.nbytes for tensor in numbers[0].values()) == adapter_bytes(config, 2)
    assert all((numbers[0][name] != numbers[1][name]).any() for name in numbers[0])
    assert peft.LoraConfig.from_pretrained(folders[0]).r == 2
    extra = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 2, "max_num_seqs": 3, "kv_cache_memory": 1 << 22}
    engine = Ridgeline(str(folder), LoadOptions(device="cpu", dummy=True, max_model_len=64, extra=extra))
    for asked, names in ((STEPS, 6), (PAGES, 4)):
        found = list(measuring.measured(engine, Size(vocab_size=300), {**asked, "folders": folders}))
        assert len(found) == names
    engine.close()


def test_vllm_gets_the_same_work_and_graphs_of_its_sizes(folder: Path, tmp_path: Path) -> None:
    """Our own settings of the engine are not the peer's."""
    a = adapters.Namespace(
        model=str(folder), paged=str(folder), only=["steps", "pages"], batches=[1, 4], input_len=8, different=2,
        context=16, rank=2, steps=3, rounds=1, quick=True, options={"kv_cache_memory": 1 << 22},
    )  # fmt: skip
    (_, steps), (_, pages) = adapters.jobs(a, tmp_path)
    assert steps.options.extra["max_num_seqs"] == 4
    peer = adapters.for_peer(steps, {"block_size": 32})
    assert (peer.engine, peer.adapters) == ("vllm", steps.adapters)
    assert peer.options.extra == {
        "enable_lora": True, "max_lora_rank": 2, "max_loras": 2, "max_cpu_loras": 2, "max_num_seqs": 4,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}, "block_size": 32,
    }  # fmt: skip
    assert adapters.for_peer(pages, {}).options.extra["enforce_eager"]
