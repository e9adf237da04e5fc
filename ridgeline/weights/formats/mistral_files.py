"""Mistral's own form of a folder, in Hugging Face's words: `params.json` as a config.json, and the names of the tensors
in `consolidated*.safetensors`.

It is read where there is no config.json beside it, as for Mistral Large 3. Models without latent attention store their
queries and keys in another order there; those come with a config.json too, and are read by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.weights.formats.json_file import read_json

PARAMS = "params.json"
WEIGHTS = "consolidated.safetensors"

_ENTRIES = {
    **{"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"},
    **{"n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps"},
    **{"vocab_size": "vocab_size", "q_lora_rank": "q_lora_rank", "kv_lora_rank": "kv_lora_rank"},
    **{"qk_rope_head_dim": "qk_rope_head_dim", "qk_nope_head_dim": "qk_nope_head_dim", "v_head_dim": "v_head_dim"},
    **{"activation": "hidden_act", "tied_embeddings": "tie_word_embeddings", "dtype": "dtype"},
    "max_position_embeddings": "max_position_embeddings",
}
_MIXTURE = {
    **{"num_experts": "n_routed_experts", "num_experts_per_tok": "num_experts_per_tok"},
    **{"num_shared_experts": "n_shared_experts", "expert_hidden_dim": "moe_intermediate_size"},
    **{"first_k_dense_replace": "first_k_dense_replace", "route_every_n": "moe_layer_freq"},
    **{"num_expert_groups": "n_group", "num_expert_groups_per_tok": "topk_group"},
    "routed_scale": "routed_scaling_factor",
}
_YARN = {"factor": "factor", "beta": "beta_fast", "alpha": "beta_slow"}
_DEFAULTS = {"dtype": "bfloat16", "max_position_embeddings": 128_000, "bos_token_id": 1, "eos_token_id": 2}
_ORIGINAL = "original_max_position_embeddings"

_WORDS = {
    **{"tok_embeddings": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm", "output": "lm_head"},
    **{"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attention": "self_attn"},
    **{"wq": "q_proj", "wq_a": "q_a_proj", "q_a_norm": "q_a_layernorm", "wq_b": "q_b_proj", "wo": "o_proj"},
    **{"wkv_a_with_mqa": "kv_a_proj_with_mqa", "kv_a_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj"},
    **{"feed_forward": "mlp", "gate": "mlp.gate", "experts": "mlp.experts", "shared_experts": "mlp.shared_experts"},
    **{"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
    **{"qscale_weight": "weight_scale", "qscale_act": "input_scale"},
}
_TOWERS = ("vision_encoder.", "vision_language_adapter.", "patch_merger.", "pre_mm_projector_norm.")


def folder_config(folder: Path, *, required: bool = False) -> dict[str, Any]:
    """Return the entries of a folder's config.json, or those that its params.json says in other words; {} if it has
    neither and none is required. Raise ModelLoadError."""
    if not (folder / "config.json").exists() and (folder / PARAMS).exists():
        return config_of_params(read_json(folder / PARAMS, required=True))
    return read_json(folder / "config.json", required=required)


def config_of_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that says what params.json does. Raise ModelLoadError for what is read only from Hugging
    Face's files."""
    mixture, yarn, growth = (_section(params, name) for name in ("moe", "yarn", "llama_4_scaling"))
    if not mixture.get("num_shared_experts") or "kv_lora_rank" not in params:
        raise ModelLoadError(
            f"{PARAMS} without a config.json beside it is read for models with latent attention and shared experts "
            "(Mistral Large 3, Mistral 4); take config.json and model.safetensors of the same model."
        )
    config = {theirs: params[ours] for ours, theirs in _ENTRIES.items() if ours in params}
    config |= {theirs: mixture[ours] for ours, theirs in _MIXTURE.items() if ours in mixture}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": params.get("rope_theta", 10000.0)}
    if yarn:
        rope |= {"rope_type": "yarn", "attention_factor": 1.0}
        rope |= {theirs: yarn[ours] for ours, theirs in _YARN.items() if ours in yarn}
        if yarn.get("apply_scale", True):
            rope["mscale_all_dim"] = 1.0
    if growth:
        rope["llama_4_scaling_beta"] = growth.get("beta")
    contexts = [section[_ORIGINAL] for section in (yarn, growth) if _ORIGINAL in section]
    if any(each != contexts[0] for each in contexts):
        raise ModelLoadError(f"{PARAMS} has two values of {_ORIGINAL}, {contexts}; they must be equal.")
    if contexts:
        rope[_ORIGINAL] = contexts[0]
    quantized = _quantization(_section(params, "quantization"))
    named = {"architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4", "rope_interleave": True}
    return {**_DEFAULTS, **config, **named, "rope_parameters": rope, **quantized}


def _quantization(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the quantization config of a config.json. Raise ModelLoadError for formats that we do not read."""
    if not said:
        return {}
    if str(said.get("quant_method")).replace("_", "-") == "compressed-tensors":
        return {"quantization_config": {**said, "quant_method": "compressed-tensors"}}
    activations = said.get("qscheme_act", "TENSOR")
    if said.get("qformat_weight") != "fp8_e4m3" or activations not in ("TENSOR", "NO_SCALES"):
        raise ModelLoadError(
            f"{PARAMS} has a quantization that is not read ({str(dict(said))[:120]}); known are fp8_e4m3 with "
            "qscheme_act TENSOR or NO_SCALES, and compressed-tensors."
        )
    scheme = "static" if activations == "TENSOR" else "dynamic"
    return {"quantization_config": {"quant_method": "fp8", "activation_scheme": scheme}}


def _section(params: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = params.get(name) or {}
    if not isinstance(found, Mapping):
        raise ModelLoadError(f"{PARAMS} sets {name} to {repr(found)[:80]}; it must be an object.")
    return found


def tensor_name(name: str) -> str | None:
    """Return the name that Hugging Face's files give to a tensor of Mistral's, or None for one of no use: of the tower
    for images, or a scale of a quantized cache."""
    if name.startswith(_TOWERS) or "_fake_quantizer." in name:
        return None
    return ".".join(_WORDS.get(word, word) for word in name.split("."))
