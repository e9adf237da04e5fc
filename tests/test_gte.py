"""GTE's encoders, whose class no release of transformers has, against their equations in plain torch, float32: 1e-5 of
numbers of order one is a hundred roundings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from ridgeline import LLM
from ridgeline.core.errors import ModelLoadError
from tests.devices import DEVICES, placed

WIDTH, HEADS, INNER, LAYERS, LABELS = 60, 3, 52, 2, 3
PROMPTS = ([5], list(range(4, 60)), [9] * 40 + [3], [7, 8])
CONFIG: dict[str, Any] = {
    "architectures": ["NewModel"],
    "hidden_act": "gelu",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "max_position_embeddings": 120,
    "model_type": "new",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_theta": 500.0,
    "type_vocab_size": 1,
    "vocab_size": 67,
}
NTK = {"rope_scaling": {"type": "ntk", "factor": 8.0}}


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "embeddings.word_embeddings.weight": (67, WIDTH),
        "embeddings.token_type_embeddings.weight": (1, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,),
        "embeddings.LayerNorm.bias": (WIDTH,),
        "pooler.dense.weight": (WIDTH, WIDTH),
        "pooler.dense.bias": (WIDTH,),
    }
    for index in range(LAYERS):
        for name, shape in {
            "attention.qkv_proj.weight": (3 * WIDTH, WIDTH),
            "attention.qkv_proj.bias": (3 * WIDTH,),
            "attention.o_proj.weight": (WIDTH, WIDTH),
            "attention.o_proj.bias": (WIDTH,),
            "mlp.up_gate_proj.weight": (2 * INNER, WIDTH),
            "mlp.down_proj.weight": (WIDTH, INNER),
            "mlp.down_proj.bias": (WIDTH,),
            **{f"{norm}.{kind}": (WIDTH,) for norm in ("attn_ln", "mlp_ln") for kind in ("weight", "bias")},
        }.items():
            shapes[f"encoder.layer.{index}.{name}"] = shape
    return {name: 0.2 * torch.randn(shape, generator=generator) + ("N" in name) for name, shape in shapes.items()}


def rotated(x_HTD: Tensor, config: dict[str, Any]) -> Tensor:
    width, scaling = x_HTD.shape[-1], config.get("rope_scaling")
    factor = scaling["factor"] if scaling else 1.0
    inverse = (config["rope_theta"] * factor) ** -(torch.arange(0, width, 2) / width) / factor ** (2 / width)
    angle_TD = (torch.arange(x_HTD.shape[1])[:, None] * inverse).repeat(1, 2)
    first, second = x_HTD.chunk(2, -1)
    return x_HTD * angle_TD.cos() + torch.cat((-second, first), -1) * angle_TD.sin()


def states(tensors: dict[str, Tensor], config: dict[str, Any], ids: list[int]) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), tensors[f"{name}.weight"], tensors[f"{name}.bias"], 1e-12)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))

    x = tensors["embeddings.word_embeddings.weight"][ids] + tensors["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings.LayerNorm")
    for index in range(LAYERS):
        at = f"encoder.layer.{index}"
        heads = linear(x, f"{at}.attention.qkv_proj").view(len(ids), 3, HEADS, -1)
        q, k, v = heads.permute(1, 2, 0, 3)
        q, k = rotated(q, config), rotated(k, config)
        found = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        x = norm(x + linear(found.transpose(0, 1).flatten(1), f"{at}.attention.o_proj"), f"{at}.attn_ln")
        up, gate = linear(x, f"{at}.mlp.up_gate_proj").split(INNER, -1)
        x = norm(x + linear(F.gelu(gate) * up, f"{at}.mlp.down_proj"), f"{at}.mlp_ln")
    return x


def save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], device: str = "cpu") -> LLM:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    settings = {**placed(device), "max_num_seqs": 3, "debug_checks": True, "skip_tokenizer_init": True}
    return LLM(folder, dtype="float32", **settings)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("entries", [{}, NTK], ids=["plain", "ntk"])
def test_vectors_are_those_of_the_published_equations(entries: dict[str, Any], device: str, tmp_path: Path) -> None:
    tensors, config = weights(), {**CONFIG, **entries}
    with save(tmp_path, tensors, config, device) as llm:
        found = llm.embed([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
    for ids, result in zip(PROMPTS, found, strict=True):
        want = F.normalize(states(tensors, config, ids)[0], dim=0)
        assert result.outputs.embedding == pytest.approx(want.tolist(), abs=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_labels_are_those_of_the_published_head(device: str, tmp_path: Path) -> None:
    tensors = weights()
    labels = {"classifier.weight": torch.randn(LABELS, WIDTH), "classifier.bias": torch.randn(LABELS)}
    names = {str(index): str(index) for index in range(LABELS)}
    config = {**CONFIG, "architectures": ["NewForSequenceClassification"], "id2label": names}
    stored = {f"new.{name}": each for name, each in tensors.items()} | labels
    with save(tmp_path, stored, config, device) as llm:
        found = llm.classify([{"prompt_token_ids": ids} for ids in PROMPTS], use_tqdm=False)
    for ids, result in zip(PROMPTS, found, strict=True):
        first = states(tensors, config, ids)[0]
        pooled = torch.tanh(F.linear(first, tensors["pooler.dense.weight"], tensors["pooler.dense.bias"]))
        want = F.linear(pooled, labels["classifier.weight"], labels["classifier.bias"]).softmax(-1)
        assert result.outputs.probs == pytest.approx(want.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("entries", "told"),
    [
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type to 'rms_norm'; it must be 'layer_norm'"),
        ({"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.5}}, "mixed_b"),
    ],
)
def test_other_forms_are_refused_by_name(entries: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=told):
        save(tmp_path, weights(), {**CONFIG, **entries})
