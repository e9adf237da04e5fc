"""Tiny random transformers models, saved as model folders: the oracle of every test that runs a model.

Norms and biases are random too, so that a swapped or forgotten tensor shows. Weights are spread widely, and layers
outweigh the embedding, so that greedy decoding does not repeat one token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 320
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

_QWEN3: dict[str, Any] = {**_COMMON, "head_dim": 32, "tie_word_embeddings": True}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_COMMON, "num_hidden_layers": 2}),
    "llama3": ("Llama", {**_COMMON, "num_hidden_layers": 2, "rope_parameters": _LLAMA3_ROPE, "head_dim": 32}),
    "qwen3": ("Qwen3", {**_QWEN3, "num_hidden_layers": 2}),
    "mistral": ("Mistral", {**_COMMON, "num_hidden_layers": 2, "sliding_window": WINDOW}),
    "mixed": (
        "Qwen3",
        {
            **_QWEN3,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt2": (
        "GPT2",
        {
            "vocab_size": VOCAB,
            "n_positions": 256,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
}

FAMILIES = tuple(CONFIGS)


def build(family: str, **changes: Any) -> transformers.PreTrainedModel:
    """The oracle for `family` in float32, `changes` made to its config. The same numbers on every call."""
    kind, values = CONFIGS[family]
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    config = getattr(transformers, f"{kind}Config")(**{**values, **changes})
    model = getattr(transformers, kind + head)(config).eval()
    generator = torch.Generator().manual_seed(sum(family.encode()))
    for name, parameter in model.named_parameters():
        mean = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0  # a norm's weight
        std = 0.3 if parameter.ndim == 2 and ("layers." in name or "h." in name) else 0.2
        with torch.no_grad():
            parameter.normal_(mean, std, generator=generator)
    return model


def save(family: str, folder: Path, **changes: Any) -> Path:
    """Save `build(family, **changes)` to `folder` as the hub would hold it."""
    build(family, **changes).save_pretrained(folder)
    return folder


def greedy(family: str, prompt: list[int], num_tokens: int) -> list[int]:
    """What transformers generates after `prompt` at temperature 0, end-of-sequence ids ignored."""
    ids = torch.tensor([prompt])
    output = build(family).generate(
        ids,
        attention_mask=torch.ones_like(ids),  # else it takes every pad id of the prompt for padding
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
