"""Dense models in GGUF: Llama and its kin."""

from __future__ import annotations

from typing import Any

from ridgeline.weights.gguf.dialect import NORMS_AFTER, NORMS_AROUND, NORMS_BEFORE, NORMS_BEHIND, Dialect, yarn
from ridgeline.weights.gguf.values import Values
from ridgeline.weights.gguf.windows import windows

_LARGE_EXAONE = 64  # layers


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
    """Return OLMo 2's entries, or those of OLMo 3, which has windows and the same name in llama.cpp."""
    if not values.get("attention.sliding_window"):
        return {}
    values.refuse_unless("rope.freq_base_swa", values.number("rope.freq_base", 10000.0))
    return {"architectures": ["Olmo3ForCausalLM"], **windows(values, every=4)}


def _qkv_biases(values: Values) -> dict[str, Any]:
    return {"attention_bias": values.has("attn_q.bias")}


def _seed_oss(values: Values) -> dict[str, Any]:
    return {**_qkv_biases(values), "attention_out_bias": values.has("attn_output.bias")}


def _exaone4(values: Values) -> dict[str, Any]:
    """Return EXAONE 4's entries. llama.cpp knows the larger one, which has windows, by its layers."""
    if not values.get("attention.sliding_window") and values.layers != _LARGE_EXAONE:
        return {"sliding_window": None}
    return {"sliding_window": 4096, **windows(values, every=4)}


def _glm4(values: Values) -> dict[str, Any]:
    if values.get("rope.dimension_sections") is not None:
        raise values.wrong(
            "rope.dimension_sections", values.get("rope.dimension_sections"), "positions of images do not run here"
        )
    return _qkv_biases(values)


def _minicpm(values: Values) -> dict[str, Any]:
    """Return MiniCPM's entries, which are those of Granite. Old files leave the scales out, and llama.cpp takes those
    of the first model."""
    return {
        **biases(values),
        "embedding_multiplier": values.get("embedding_scale", 12.0),
        "residual_multiplier": values.get("residual_scale", 1.4 / values.layers**0.5),
        "attention_multiplier": values.head_dim**-0.5,
        "logits_scaling": values.get("logit_scale", values.whole("embedding_length") / 256),
    }


def _mistral3(values: Values) -> dict[str, Any]:
    """Return the entries of Ministral 3, whose queries grow with their positions, or of Mistral 3."""
    found: dict[str, Any] = {**biases(values), "sliding_window": None}
    beta = values.number("attention.temperature_scale", 0.0)
    if values.get("rope.scaling.type") != "yarn" or not beta:
        return {**found, "architectures": ["MistralForCausalLM"]}
    scale = values.number("rope.scaling.yarn_log_multiplier", 0.0)
    rotation = {**yarn(values), "rope_theta": values.get("rope.freq_base", 10000.0), "llama_4_scaling_beta": beta}
    if scale:
        rotation |= {"mscale": 1.0, "mscale_all_dim": scale}
    return {**found, "rope_theta": None, "rope_scaling": None, "rope_parameters": rotation}


def granite(values: Values) -> dict[str, Any]:
    names = {
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "attention_multiplier": "attention.scale",
        "logits_scaling": "logit_scale",
    }
    return {**biases(values), **{ours: values[theirs] for ours, theirs in names.items()}}


def _deci(values: Values) -> dict[str, Any]:
    """Return DeciLM's entries. A layer without heads, or of width 0, lacks that part."""
    count = values.layers

    def each(name: str) -> list[int]:
        found = values.raw(name)
        numbers: list[int] = found if isinstance(found, list) else [found] * count
        if len(numbers) != count or any(type(number) is not int or number < 0 for number in numbers):
            raise values.wrong(name, found, f"it must be {count} whole numbers, so download the file again")
        return numbers

    blocks = []
    names = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    for heads, kv_heads, width in zip(*map(each, names), strict=True):
        if heads and not kv_heads:
            raise values.wrong(names[1], 0, "linear layers in place of attention do not run here")
        attention = {"n_heads_in_group": heads // kv_heads if heads else None, "no_op": not heads}
        blocks.append({"attention": attention, "ffn": {"intermediate_size": width or None, "no_op": not width}})
    return {**biases(values), "block_configs": blocks}


DENSE = {
    "deci": Dialect("DeciLMForCausalLM", NORMS_BEFORE, interleaved=True, config=_deci),
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
    "internlm2": Dialect("LlamaForCausalLM", NORMS_BEFORE, interleaved=True, config=biases),
    "exaone": Dialect("LlamaForCausalLM", NORMS_BEFORE, config=biases),
    "arcee": Dialect("ArceeForCausalLM", NORMS_BEFORE, interleaved=True, config=biases),
    "minicpm": Dialect("GraniteForCausalLM", NORMS_BEFORE, interleaved=True, config=_minicpm),
    "mistral3": Dialect("Ministral3ForCausalLM", NORMS_BEFORE, interleaved=True, config=_mistral3),
    "seed_oss": Dialect("SeedOssForCausalLM", NORMS_BEHIND, config=_seed_oss),
    "hunyuan-dense": Dialect("HunYuanDenseV1ForCausalLM", NORMS_BEFORE, config=_qkv_biases),
    "ernie4_5": Dialect(
        "Ernie4_5ForCausalLM", NORMS_BEFORE, config=lambda values: {"use_bias": values.has("attn_q.bias")}
    ),
    "chatglm": Dialect("GlmForCausalLM", NORMS_BEFORE, config=_qkv_biases),
    "glm4": Dialect("Glm4ForCausalLM", NORMS_AROUND, config=_glm4),
    "exaone4": Dialect("Exaone4ForCausalLM", NORMS_AFTER, config=_exaone4),
    "apertus": Dialect(
        "ApertusForCausalLM",
        {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
        config=_qkv_biases,
    ),
}
