"""What the KV cache may take, and what is said where it is too little."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ridgeline.core.config import LLMConfig
from ridgeline.core.errors import InvalidConfig
from ridgeline.defaults import choose_dtype
from ridgeline.models import model_config
from ridgeline.worker import memory
from tests.damaged_files import config_of

GB = 10**9
SPEC = model_config(config_of("LlamaForCausalLM")).spec


def plan(config: LLMConfig, device: str, *, weights: int = 0, loaded: bool = True, longest: int = 64) -> int:
    return memory.plan_memory(
        SPEC,
        config,
        torch.device(device),
        dtype="float32",
        weights=weights,
        loaded=loaded,
        longest=longest,
        max_seqs=2,
        max_chunk=16,
    ).max_model_len


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GB, of which this process holds 16, and others 56."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (8 * GB, 80 * GB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 16 * GB)


@pytest.mark.usefixtures("gpu")
def test_a_full_gpu_is_told_apart_from_a_large_model() -> None:
    with pytest.raises(InvalidConfig) as caught:
        plan(LLMConfig(gpu_memory_utilization=0.9), "cuda:0")
    words = str(caught.value)
    for part in ("has 0 B", "80.00 GB on cuda:0", "8.00 GB are free", "16.00 GB hold", "56.00 GB are in other use"):
        assert part in words
    assert "keeps 8.00 GB back" in words
    assert "activations take" in words
    assert words.index("end what else runs there") < words.index("lower max_model_len")
    assert plan(LLMConfig(gpu_memory_utilization=0.95), "cuda:0") == 64


@pytest.mark.usefixtures("gpu")
def test_weights_that_are_not_loaded_yet_are_counted() -> None:
    config = LLMConfig(gpu_memory_utilization=0.95)  # leaves 4 GB
    assert plan(config, "cuda:0", weights=3 * GB, loaded=False) == 64
    with pytest.raises(InvalidConfig, match=r"the weights 5\.00 GB"):
        plan(config, "cuda:0", weights=5 * GB, loaded=False)


def test_kv_cache_memory_that_is_too_small_is_named_itself() -> None:
    with pytest.raises(InvalidConfig, match=r"has 9\.00 KB.*that is kv_cache_memory; raise it.*lower max_model_len to"):
        plan(LLMConfig(kv_cache_memory=9000, max_model_len=64), "cpu")


def test_a_cpu_without_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_host_memory", lambda: 4 * GB)
    monkeypatch.setattr(memory, "activation_bytes", lambda *_, **__: 3 * GB)
    with pytest.raises(InvalidConfig, match=r"4\.00 GB are free on this machine, of which it may use half"):
        plan(LLMConfig(), "cpu")


def test_tables_of_every_rotation_are_counted() -> None:
    """Gemma 3 has two."""
    two = model_config(config_of("Gemma3ForCausalLM")).spec
    more = memory.weight_bytes(two, dtype_bytes=4, positions=1001) - memory.weight_bytes(
        two, dtype_bytes=4, positions=1
    )
    assert more == 1000 * 2 * 8 * 4


@pytest.mark.parametrize("has", [False, True])
def test_the_dtype_is_chosen_with_a_reason(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: has)
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_dtype("auto", "bfloat16", cpu).name == ("bfloat16" if has else "float32")
    assert ("has no instructions" in choose_dtype("auto", "bfloat16", cpu).why) is not has
    assert choose_dtype("auto", "bfloat16", gpu) == ("bfloat16", "the checkpoint's own")
    assert choose_dtype("auto", "float32", cpu) == ("float32", "the checkpoint's own")
    assert choose_dtype("bfloat16", "float32", cpu) == ("bfloat16", "it was asked for")


def test_the_choice_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from ridgeline import LLM
    from tests.damaged_files import write_base

    with caplog.at_level("INFO", logger="ridgeline"):
        LLM(write_base("LlamaForCausalLM", tmp_path / "model"), device="cpu", kv_cache_memory=1 << 20).shutdown()
    assert "computing in float32 on cpu: the checkpoint's own" in caplog.text
