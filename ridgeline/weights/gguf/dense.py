"""Dense models in GGUF: Llama and its kin."""

from __future__ import annotations

from typing import Any

from ridgeline.weights.gguf.dialect import NORMS_AFTER, NORMS_BEFORE, Dialect
from ridgeline.weights.gguf.values import Values


def biases(values: Values) -> dict[str, Any]:
    tensors = values.gguf.tensors
    return {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_down.bias" in tensors}


def _phi3(values: Values) -> dict[str, Any]:
    return {
        "sliding_window": values.get("attention.sliding_window") or None,
        "original_max_position_embeddings": values.get(
            "rope.scaling.original_context_length", values["context_length"]
        ),
        "pad_token_id": None,
    }


def _olmo2(values: Values) -> dict[str, Any]:
    values.refuse_unless("attention.sliding_window", 0)  # OLMo 3 has windows, and this name in llama.cpp
    return {}


def granite(values: Values) -> dict[str, Any]:
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {**biases(values), **{ours: values[theirs] for ours, theirs in names.items()}}


DENSE = {
    "llama": Dialect("LlamaForCausalLM", NORMS_BEFORE, experts="MixtralForCausalLM", interleaved=True, config=biases),
    "qwen2": Dialect("Qwen2ForCausalLM", NORMS_BEFORE),
    "qwen3": Dialect("Qwen3ForCausalLM", NORMS_BEFORE),
    "phi3": Dialect("Phi3ForCausalLM", NORMS_BEFORE, config=_phi3),
    "olmo2": Dialect("Olmo2ForCausalLM", NORMS_AFTER, config=_olmo2),
    "smollm3": Dialect(
        "SmolLM3ForCausalLM",
        NORMS_BEFORE,
        interleaved=True,
        config=lambda values: {**biases(values), "no_rope_layer_interval": 4, "pad_token_id": None},
    ),
    "granite": Dialect("GraniteForCausalLM", NORMS_BEFORE, interleaved=True, config=granite),
}
