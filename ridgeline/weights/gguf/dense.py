"""Dense models in GGUF: Llama and its kin."""

from __future__ import annotations

from typing import Any

from ridgeline.weights.gguf.dialect import NORMS_AFTER, NORMS_BEFORE, NORMS_BOTH, Dialect
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


def granite(values: Values) -> dict[str, Any]:
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {**biases(values), **{ours: values[theirs] for ours, theirs in names.items()}}


def _gemma2(values: Values) -> dict[str, Any]:
    return {
        **_gemma(values, largest=46),
        "attn_logit_softcapping": values.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": values.get("final_logit_softcapping", 30.0),
    }


def _gemma3(values: Values) -> dict[str, Any]:
    return {
        **_gemma(values, largest=62),
        "final_logit_softcapping": values.get("final_logit_softcapping"),
        "rope_local_base_freq": values.get("rope.freq_base_swa", 10000.0),
    }


def _gemma(values: Values, largest: int) -> dict[str, Any]:
    """Return Gemma's entries.

    The largest model of a generation, which is known by its number of layers, scales scores by the model's width
    divided by its heads, and not by the width of a head. The file does not say so, and llama.cpp decides in the same
    way.
    """
    is_largest = values["block_count"] == largest
    width = values.shared_width if is_largest else values.head_dim
    config = {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": values.get("attention.sliding_window"),
        "query_pre_attn_scalar": width,
    }
    pattern = values.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        config["layer_types"] = ["sliding_attention" if window else "full_attention" for window in pattern]
    return config


DENSE = {
    "llama": Dialect("LlamaForCausalLM", NORMS_BEFORE, experts="MixtralForCausalLM", interleaved=True, config=biases),
    "qwen2": Dialect("Qwen2ForCausalLM", NORMS_BEFORE),
    "qwen3": Dialect("Qwen3ForCausalLM", NORMS_BEFORE),
    "gemma2": Dialect("Gemma2ForCausalLM", NORMS_BOTH, config=_gemma2),
    "gemma3": Dialect("Gemma3ForCausalLM", NORMS_BOTH, config=_gemma3),
    "phi3": Dialect("Phi3ForCausalLM", NORMS_BEFORE, config=_phi3),
    "olmo2": Dialect("Olmo2ForCausalLM", NORMS_AFTER),
    "granite": Dialect("GraniteForCausalLM", NORMS_BEFORE, interleaved=True, config=granite),
}
