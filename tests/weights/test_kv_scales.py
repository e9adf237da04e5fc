"""Scales that a checkpoint brings for its KV cache: the cache that it then gets, beside transformers in float64 with
keys and values rounded by those scales; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from ridgeline.core.errors import ModelLoadError
from ridgeline.kernels.base.kv_format import kv_format
from ridgeline.weights.loader import check_files, read_model_config, with_cache
from tests import tiny_models
from tests.driving import ask, rig
from tests.test_kv_cache_dtype import prompt_logprobs

PROMPT = tuple(3 + (7 * i) % 90 for i in range(41))
SAYS_FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
CT = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["none"], "weights": None}}}
CACHE_ONLY: dict[str, Any] = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SAYS_FP8}
MODELOPT = {"quant_method": "modelopt", "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
K, V = 0.013, 0.004  # of the first layer; values beyond 448 times it are cut off


def e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest E4M3 numbers, ties to the even one, from the format's definition; larger ones become 448."""
    size = np.abs(x)
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(size, 1e-30))), -6) - 3)
    return np.sign(x) * np.minimum(np.round(size / step) * step, 448)


def int8(x: np.ndarray) -> np.ndarray:
    return np.clip(np.round(x), -127, 127)


class Rounded(DynamicCache):
    """transformers' cache with levels by layer: scales [layers, 2, heads]."""

    def __init__(self, scales: np.ndarray, levels: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__()
        self._scales, self._levels = scales, levels

    def update(self, keys: Tensor, values: Tensor, layer: int, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        kept = []
        for x, scale_H in zip((keys, values), self._scales[layer], strict=True):
            scale = scale_H[:, None, None]
            kept.append(torch.from_numpy(self._levels(x.numpy() / scale) * scale))
        return super().update(*kept, layer, *rest, **more)


def scales_of(heads: int, by_head: bool) -> np.ndarray:
    """Scales of two layers, all different, as float32 holds them."""
    each = np.array([[K, V], [2 * K, 3 * V]])[..., None] * (1 + 0.5 * by_head * np.arange(heads))
    return each.astype(np.float32).astype(np.float64)


def with_scales(folder: Path, scales: np.ndarray, spelling: str, by_head: bool, config: dict[str, Any]) -> Path:
    """Write the scales under names such as "self_attn.{}_scale" into a model's folder."""
    tensors = load_file(folder / "model.safetensors")
    for layer, (keys, values) in enumerate(scales):
        for which, own in (("k", keys), ("v", values)):
            name = f"model.layers.{layer}.self_attn.{spelling.format(which)}"
            tensors[name] = torch.tensor(own[:, None, None] if by_head else own[:1], dtype=torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return with_config(folder, config)


def with_config(folder: Path, config: dict[str, Any]) -> Path:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_models.build("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


CASES = {
    "compressed-tensors": ("llama", "{}_scale", False, CACHE_ONLY, "auto"),
    "heads": ("qwen3", "{}_scale", True, {**CT, "kv_cache_scheme": {**SAYS_FP8, "strategy": "attn_head"}}, "auto"),
    "int8": ("llama", "{}_scale", False, {**CT, "kv_cache_scheme": {**SAYS_FP8, "type": "int"}}, "auto"),
    "fused": ("phi3", "{}_scale", False, {**CT, "kv_cache_scheme": SAYS_FP8}, "auto"),
    "outputs": ("llama", "{0}_proj.output_scale", False, CT, "fp8"),
    "modelopt": ("llama", "{0}_proj.{0}_scale", False, MODELOPT, "auto"),
    "vllm": ("llama", "attn.{}_scale", False, CT, "fp8_e4m3"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", CASES)
def test_keys_and_values_are_rounded_by_the_scales_of_the_file(name: str, tmp_path: Path) -> None:
    family, spelling, by_head, config, wanted = CASES[name]
    oracle = tiny_models.build(family)
    oracle.save_pretrained(tmp_path)
    scales = scales_of(oracle.config.num_key_value_heads, by_head)
    with_scales(tmp_path, scales, spelling, by_head, config)
    oracle = oracle.double()
    ids = torch.tensor([PROMPT])

    def expected(cache: Any) -> Tensor:
        logprobs = oracle(ids, past_key_values=cache).logits[0].log_softmax(-1)
        return logprobs[torch.arange(len(PROMPT) - 1), ids[0, 1:]]

    exact = expected(DynamicCache())
    rounded = expected(Rounded(scales, int8 if name == "int8" else e4m3))
    with rig(tmp_path, kv_cache_dtype=wanted, kv_cache_memory=1 << 22) as own:
        found = torch.tensor(prompt_logprobs(own, [PROMPT]), dtype=torch.float64)
        assert own.runner.saturation.read() > 0
    assert (exact - rounded).abs().max() > 0.05  # rounding by other scales would show
    torch.testing.assert_close(found, rounded, rtol=2e-4, atol=2e-4)


def test_one_scale_for_both_is_each_ones(folder: Path) -> None:
    """As in vLLM's first FP8 checkpoints."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.{layer}.self_attn.kv_scale": torch.tensor(0.01 + layer) for layer in range(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with rig(with_config(folder, CT), kv_cache_dtype="fp8", kv_cache_memory=1 << 22) as own:
        found = torch.stack([layer.mixer.kv_scales for layer in own.runner.decoder.layers])
    assert torch.equal(found, torch.tensor([0.01, 1.01])[:, None, None].expand(2, 2, 2))


@pytest.mark.parametrize(
    ("config", "wanted", "got"),
    [
        ({"kv_cache_scheme": SAYS_FP8}, "auto", "fp8_e4m3 with scales of the model"),
        ({"kv_cache_scheme": SAYS_FP8}, "bfloat16", "bfloat16"),
        ({"kv_cache_scheme": SAYS_FP8}, "fp8", "fp8_e4m3 with scales of the model"),
        ({"kv_cache_scheme": SAYS_FP8}, "fp8_e5m2", "fp8_e5m2"),
        ({"kv_cache_scheme": SAYS_FP8}, "int8", "int8"),
        ({"kv_cache_scheme": {**SAYS_FP8, "type": "int"}}, "fp8", "fp8_e4m3"),
        ({"kv_cache_scheme": {**SAYS_FP8, "dynamic": True}}, "auto", "fp8_e4m3"),
        ({"kv_cache_scheme": "static"}, "auto", "fp8_e4m3 with scales of the model"),
        ({"kv_cache_quant_algo": "FP8"}, "auto", "fp8_e4m3 with scales of the model"),
        ({}, "auto", "None"),
        ({}, "fp8", "fp8_e4m3 with scales of the model"),
    ],
    ids=str,
)
def test_what_is_asked_for_comes_before_what_the_checkpoint_says(
    config: dict[str, Any], wanted: str, got: str, folder: Path
) -> None:
    with_scales(folder, scales_of(2, False), "{}_scale", False, {**CT, **config})
    model = read_model_config(folder)
    cached = with_cache(folder, model, kv_format(wanted))
    assert {str(layer.attention.kv_format) for layer in cached.spec.layers} == {got}
    if wanted == "auto":  # by the config alone, for random weights
        assert with_cache(folder, model, kv_format(wanted), files=False) == cached


def test_a_checkpoint_that_wants_fp8_without_scales_gets_scales_of_rows(folder: Path) -> None:
    with_config(folder, {**CT, "kv_cache_scheme": SAYS_FP8})
    cached = with_cache(folder, read_model_config(folder), kv_format("auto"))
    assert {layer.attention.kv_format.scales for layer in cached.spec.layers} == {"row"}


NAME = "model.layers.1.self_attn.v_scale"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (None, f"lacks {NAME}, though it has scales of the KV cache for other layers"),
        (torch.zeros(1), f"{NAME} holds 1 scales like 0.0; scales must be numbers above 0"),
        (torch.tensor([float("nan")]), f"{NAME} holds 1 scales like nan"),
        (torch.tensor([float("inf")]), f"{NAME} holds 1 scales like inf"),
        (torch.tensor([-1.0]), f"{NAME} holds 1 scales like -1.0"),
        (torch.tensor([1.0, 0.0]), f"{NAME} holds 1 scales like 0.0"),
        (torch.ones(3), rf"{NAME} of the shape \[3\] as F32; a KV cache's scale is a number, or one for each of the 2"),
        (torch.ones(1, dtype=torch.int32), f"{NAME} of the shape .* as I32"),
    ],
    ids=str,
)
def test_damaged_scales_are_refused_if_they_are_needed(damage: Tensor | None, sentence: str, folder: Path) -> None:
    with_scales(folder, scales_of(2, False), "{}_scale", False, {**CT, "kv_cache_scheme": SAYS_FP8})
    tensors = load_file(folder / "model.safetensors")
    del tensors[NAME]
    if damage is not None:
        tensors[NAME] = damage
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = read_model_config(folder)
    if damage is None or damage.shape not in ((1,), (2,)) or damage.dtype != torch.float32:
        with pytest.raises(ModelLoadError, match=sentence):  # by the headers
            check_files(folder, with_cache(folder, model, kv_format("auto")))
    with pytest.raises(ModelLoadError, match=sentence), rig(folder, kv_cache_memory=1 << 22):
        pass
    with rig(folder, kv_cache_dtype="int8", kv_cache_memory=1 << 22) as own:
        own.run(ask("a", PROMPT, max_tokens=1))


@pytest.mark.parametrize(
    "scheme",
    [{**SAYS_FP8, "num_bits": 4}, {**SAYS_FP8, "strategy": "channel"}, {**SAYS_FP8, "symmetric": False}, "int4", 7],
    ids=str,
)
def test_a_cache_that_we_have_not_is_refused_with_a_way_out(scheme: Any, folder: Path) -> None:
    with_config(folder, {**CT, "kv_cache_scheme": scheme})
    model = read_model_config(folder)
    with pytest.raises(ModelLoadError, match=r"wants a KV cache in .*, which we do not have; say with kv_cache_dtype"):
        with_cache(folder, model, kv_format("auto"))
    assert with_cache(folder, model, kv_format("bfloat16")).spec.layers[0].attention.kv_format.dtype == "bfloat16"
