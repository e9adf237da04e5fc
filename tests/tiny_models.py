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

_GEMMA: dict[str, Any] = {
    **_COMMON,
    "pad_token_id": None,
    "head_dim": 32,
    "query_pre_attn_scalar": 20,
    "sliding_window": WINDOW,
}

_GEMMA4: dict[str, Any] = {
    **_COMMON,
    "pad_token_id": None,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}

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
    "qwen2": (
        "Qwen2",
        {
            **_COMMON,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 1,
        },
    ),
    "gemma2": (
        "Gemma2",
        {**_GEMMA, "num_hidden_layers": 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    ),
    "gemma3": (
        "Gemma3",
        {
            **_GEMMA,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": (
        "Phi3",
        {
            **_COMMON,
            "num_hidden_layers": 2,
            "pad_token_id": None,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 256,
            "rope_scaling": {
                "type": "longrope",
                "attention_factor": 1.25,
                "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 2.5],
                "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
            },
        },
    ),
    "olmo2": ("Olmo2", {**_COMMON, "num_hidden_layers": 2}),
    "smollm3": (
        "SmolLM3",
        {
            **_COMMON,
            "pad_token_id": None,
            "num_hidden_layers": 4,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "no_rope_layers": [1, 0, 1, 0],
        },
    ),
    "neox": (
        "GPTNeoX",
        {
            **{name: value for name, value in _COMMON.items() if name != "num_key_value_heads"},
            "num_hidden_layers": 2,
            "rotary_pct": 0.5,
        },
    ),
    "granite": (
        "Granite",
        {
            **_COMMON,
            "num_hidden_layers": 2,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.5,
        },
    ),
    "bloom": (
        "Bloom",
        {
            "vocab_size": VOCAB,
            "hidden_size": 96,
            "n_layer": 2,
            "n_head": 6,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_QWEN3,
            "num_hidden_layers": 2,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_COMMON,
            "num_hidden_layers": 2,
            "head_dim": 16,
            "intermediate_size": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
        },
    ),
    "gemma4": ("Gemma4", {**_GEMMA4, "final_logit_softcapping": 8.0}),
    "gemma4_moe": (
        "Gemma4",
        {
            **_GEMMA4,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 2,
            "moe_intermediate_size": 48,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
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

EMBEDDED = {
    "gemma2": 1 / 16,
    "gemma3": 1 / 16,
    "gemma4": 1 / 8,
    "gemma4_moe": 1 / 8,
    "bloom": 4.0,
}  # these make their embeddings larger, or norm them
STORED_NAMES = {"lm_head.weight": "embed_out.weight"}  # of GPT-NeoX, as checkpoints have them
CONFIG_CLASSES = {"Gemma3": "Gemma3TextConfig", "Gemma4": "Gemma4TextConfig"}
FAMILIES = tuple(CONFIGS)


def build(family: str, **changes: Any) -> transformers.PreTrainedModel:
    """The oracle for `family` in float32, `changes` made to its config. The same numbers on every call."""
    kind, values = CONFIGS[family]
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    settings = getattr(transformers, CONFIG_CLASSES.get(kind, f"{kind}Config"))
    config = settings(**{**values, **changes}, attn_implementation="eager")  # the others leave soft caps out
    model = getattr(transformers, kind + head)(config).eval()
    generator = torch.Generator().manual_seed(sum(family.encode()))
    for name, parameter in model.named_parameters():
        mean = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0  # a norm's weight
        std = 0.3 if parameter.ndim == 2 and ("layers." in name or "h." in name) else 0.2
        if name.endswith(("embed_tokens.weight", "word_embeddings_layernorm.weight")):
            mean, std = mean * EMBEDDED.get(family, 1), std * EMBEDDED.get(family, 1)
        with torch.no_grad():
            parameter.normal_(mean, std, generator=generator)
    for scalar in scalars(model).values():
        scalar.fill_(0.75 + 0.5 * torch.rand((), generator=generator))
    return model


def scalars(model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Numbers of a checkpoint that are no parameters of the oracle."""
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("layer_scalar")}


def stored_name(model: transformers.PreTrainedModel, name: str) -> str:
    """A parameter's name in the checkpoint."""
    return STORED_NAMES.get(name, name) if model.config.model_type == "gpt_neox" else name


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
