"""Adapters on a GPU, in graphs, beside the same adapters on a CPU in float32: of linear layers, with magnitudes, and of
the tokens' table and the output layer. PEFT is the CPU's oracle (tests/test_lora.py); here none is needed."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ridgeline import LLM, LoRARequest, SamplingParams
from ridgeline.core.specs.model import ModelSpec
from ridgeline.text.outputs import RequestOutput
from ridgeline.weights.adapters.places import adaptable, expert_places, vocabulary_places, with_head
from ridgeline.weights.folder import EMBEDDED_MODEL
from ridgeline.weights.loader import empty_decoder, read_model_config
from tests import tiny_models

PROMPTS = ["def read_json(path):", "class LRUCache:\n    def __init__(self, size):", "import os\n", "try:\n    value"]
ALL = {"enable_lora_factors": True, "enable_lora_vocabulary": True}
# Log-probabilities of some thirty rounded results one behind the other, times eps and a hundred
NEAR = {"float32": 2e-3, "bfloat16": 0.5}
UNROUNDED = dict.fromkeys(("coded_linear", "grouped_gate_up", "grouped_down"), "reference")  # as GPUs multiply codes


def write_adapter(
    model: Path, folder: Path, seed: int, *, dora: bool = False, tables: bool = False, experts: bool = False
) -> Path:
    """Write an adapter of random numbers in PEFT's form, of all linear layers."""
    config = read_model_config(model)
    assert isinstance(config.spec, ModelSpec)
    places = dict(adaptable(config.spec, config.weights))
    if tables:
        found = vocabulary_places(empty_decoder(config.spec), with_head(config.weights))
        places |= {module: place for module, place in found.items() if place.source.name == f"{module}.weight"}
    if experts:
        found = expert_places(empty_decoder(config.spec), config.weights)
        places |= {module: place for module, place in found.items() if place.expert is not None}
    draw, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for module, place in places.items():
        embed = place.map.name == "embed"
        names = ("lora_embedding_A", "lora_embedding_B") if embed else ("lora_A.weight", "lora_B.weight")
        for name, shape in zip(names, ((8, place.map.inputs), (place.outputs, 8)), strict=True):
            tensors[f"base_model.model.{module}.{name}"] = 0.05 * torch.randn(shape, generator=draw)
        if dora:
            vector = 1 + 0.1 * torch.rand(place.outputs, generator=draw)
            tensors[f"base_model.model.{module}.lora_magnitude_vector"] = vector
    if tables:
        delta = 0.1 * torch.randn(2, config.spec.hidden_size, generator=draw)
        embed = next(module for module, place in places.items() if place.map.name == "embed")
        tensors[f"base_model.model.{embed}.token_adapter.trainable_tokens_delta"] = delta
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": sorted(places), "use_dora": dora}
    about |= {"trainable_token_indices": [40, 41]} if tables else {}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def run(
    device: str, dtype: str, folders: list[Path], prompts: list[Any], tokens: int, **settings: Any
) -> list[RequestOutput]:
    """Return the outputs of all prompts with no adapter, and with each."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_memory": 1 << 26, "max_model_len": 256}
    adapters = {"enable_lora": True, "max_loras": 3, **(settings or ALL)}
    named = [None, *(LoRARequest(folder.name, i, folder) for i, folder in enumerate(folders, 1))]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    with LLM(device=device, dtype=dtype, **limits, **adapters) as llm:
        return llm.generate(prompts, params, lora_request=named, use_tqdm=False)


def check(device: str, dtype: str, folder: Path) -> None:
    folders = [
        write_adapter(EMBEDDED_MODEL, folder / "plain", 0),
        write_adapter(EMBEDDED_MODEL, folder / "dora", 1, dora=True),
        write_adapter(EMBEDDED_MODEL, folder / "tables", 2, tables=True),
    ]
    compare(run(device, dtype, folders, PROMPTS, 12), folders, NEAR[dtype])


def compare(found: list[RequestOutput], folders: list[Path], near: float, **settings: Any) -> float:
    """Compare the log-probability of every token with that of a CPU in float32. Return the largest difference.

    With a quantization half of the tokens are as near as `near`, and none is farther than 20 times that: where
    activations are rounded to 8 bits, one bit of a sum may move a token by some hundredths.
    """
    texts: list[Any] = [{"prompt_token_ids": [*each.prompt_token_ids, *each.outputs[0].token_ids]} for each in found]
    apart: list[float] = []
    for ours, exact in zip(found, run("cpu", "float32", folders, texts, 1, **settings), strict=True):
        completion = ours.outputs[0]
        assert ours.prompt_logprobs is not None
        assert completion.logprobs is not None
        assert exact.prompt_logprobs is not None
        reported = [*ours.prompt_logprobs[1:], *completion.logprobs]
        for token, one, other in zip(exact.prompt_token_ids[1:], reported, exact.prompt_logprobs[1:], strict=True):
            assert one is not None
            assert other is not None
            apart.append(abs(one[token].logprob - other[token].logprob))
    rounds = settings.get("quantization") is not None
    assert statistics.median(apart) <= near
    assert max(apart) <= near * (20 if rounds else 1)
    return max(apart)


def check_experts(device: str, dtype: str, folder: Path, quantization: str | None) -> float:
    """Compare experts' adapters, and none, with a CPU's. Return the largest difference."""
    model = tiny_models.save("qwen3_moe", folder / "model", hidden_size=128, moe_intermediate_size=128, head_dim=64)
    folders = [write_adapter(model, folder / f"{seed}", seed, experts=True) for seed in range(3)]
    settings: dict[str, Any] = {"model": model, "skip_tokenizer_init": True, "enable_lora_experts": True}
    settings |= {"quantization": quantization}
    prompts: list[Any] = [{"prompt_token_ids": list(range(10 + n, 30 + 3 * n))} for n in range(4)]
    near = NEAR[dtype] if quantization is None else max(NEAR[dtype], 0.02)
    exact = settings | ({"kernels": UNROUNDED} if device == "cuda" else {})
    return compare(run(device, dtype, folders, prompts, 8, **settings), folders, near, **exact)


def test_the_check_finds_the_cpu_equal_to_itself_and_an_adapter_unlike_none(tmp_path: Path) -> None:
    check("cpu", "float32", tmp_path)
    plain, adapted = (
        run("cpu", "float32", [tmp_path / name] * 3, PROMPTS, 1)[3].prompt_logprobs for name in ("plain", "tables")
    )
    assert plain != adapted


@pytest.mark.parametrize("quantization", [None, "w4a16"])
def test_experts_are_those_of_a_cpu(quantization: str | None, tmp_path: Path) -> None:
    check_experts("cpu", "float32", tmp_path, quantization)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "w4a16", "fp8"])
def test_experts_on_a_gpu_are_those_of_a_cpu(quantization: str | None, tmp_path: Path) -> None:
    check_experts("cuda", "float32", tmp_path, quantization)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_on_a_gpu_are_those_of_a_cpu(dtype: str, tmp_path: Path) -> None:
    check("cuda", dtype, tmp_path)
