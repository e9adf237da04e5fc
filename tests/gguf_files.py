"""Tiny transformers models as GGUF files, written with the gguf package as llama.cpp's conversion writes them.

Names come from the package's own map, so that ours are compared with something that is not ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests import gguf_families, gguf_near
from tests.tiny_models import as_stored

ARCHITECTURES = {
    **gguf_families.ARCHITECTURES,
    "llama": "llama",
    "llama3": "llama",
    "qwen2": "qwen2",
    "smollm3": "smollm3",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "olmoe": "olmoe",
}
# What the format cannot say: windows of some layers, scores scaled by something else than the heads' width.
CHANGES: dict[str, dict[str, Any]] = {
    **gguf_families.CHANGES,
    "qwen2": {"use_sliding_window": False},
    "smollm3": {"use_sliding_window": False, "sliding_window": None, "no_rope_layers": [1, 1, 1, 0]},
    "gemma2": {"query_pre_attn_scalar": 32},
    "gemma3": {"query_pre_attn_scalar": 32},
    "mixtral": {"sliding_window": None},
}
_OTHERS = {
    "gemma4_text": "gemma4",  # architectures whose names are not their config's
    "gemma3_text": "gemma3",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
    "glm4_moe": "glm4moe",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
    **dict.fromkeys(("granitemoe", "granitemoeshared"), "granitemoe"),
    "qwen2_moe": "qwen2moe",
    "qwen3_next": "qwen3next",
    "granitemoehybrid": "granitehybrid",
    "lfm2_moe": "lfm2moe",
    "falcon_mamba": "mamba",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
PERMUTED = ("llama", "smollm3", "granite", "granitemoe", "granitehybrid")
_IDS = {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}


def write(
    model: transformers.PreTrainedModel,
    path: Path,
    *,
    kinds: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
    part_tensors: int = 0,
    widened: bool = False,
    family: str = "",
) -> Path:
    """kinds: tensor name → type to store it as ("*" for all other matrices); float32 without. extra: more values.
    part_tensors: write several files, each with at most so many tensors, which get the format's names; 0: one file.
    widened: each tensor holds in float32 what it would stand for in its kind. family: one of `gguf_near`."""
    import gguf

    config, near = getattr(model.config, "text_config", model.config), gguf_near.FAMILIES.get(family)
    architecture = near.architecture if near else _OTHERS.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    if near or architecture in gguf_families.ARCHITECTURES.values():
        found = gguf_families.entries(config, architecture)
        found = gguf_near.entries(family, config, found) if near else found
        for name, value in ((name, value) for name, value in found.items() if value is not None):
            add(writer, f"{architecture}.{name}", value)
    else:
        _values(writer, config, architecture)
    for name, value in {**_IDS, **gguf_near.values(architecture, model), **(extra or {})}.items():
        add(writer, name, value)
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    permuted = near.permuted if near else architecture in PERMUTED
    stored = _stacked(as_stored(model, model.state_dict()))
    for theirs, weight in gguf_families.changed(config, architecture, stored):
        if theirs.endswith(("lm_head.weight", "embed_out.weight")) and config.tie_word_embeddings:
            continue
        base, _, kind = theirs.rpartition(".")
        known = names.get_name(base) or names.get_name(base.removeprefix("transformer."))
        name = theirs if theirs.startswith("blk.") else names.get_name(theirs) or f"{known}.{kind}"
        values = weight.float().numpy()
        if architecture in ("gemma2", "gemma3") and theirs.endswith("norm.weight"):
            values = values + 1
        if permuted and base.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if base.endswith("q_proj") else config.num_key_value_heads
            values = _permuted(values, heads)
        form = (kinds or {}).get(name, (kinds or {}).get("*", "F32")) if _is_matrix(name, values) else "F32"
        _tensor(writer, name, values, form, widened)
    for name, factors in _rope_factors(model).items():
        _tensor(writer, name, factors, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _is_matrix(name: str, values: np.ndarray) -> bool:
    """What a converter may quantize: small tensors stay as they are."""
    return values.ndim > 1 and not any(part in name for part in ("ssm_a", "ssm_d", "ssm_norm", "conv", "ffn_gate_inp"))


def _stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors, each matrix of all experts in one."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(re.sub(r"\.experts\.\d+\.", ".experts.", name), []).append(tensor)
    return {name: torch.stack(parts) if name not in tensors else parts[0] for name, parts in found.items()}


def dequantized(values: torch.Tensor, kind: str) -> torch.Tensor:
    """What the package makes of these values when it has quantized them."""
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values.numpy(), number), number))


def _values(writer: Any, config: Any, architecture: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(int(head_dim * (rope.get("partial_rotary_factor") or 1)))
    writer.add_vocab_size(config.vocab_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if hasattr(config, "num_experts_per_tok"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture == "gemma3":
        add(writer, "gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        writer.add_rope_scaling_type(_enum("LINEAR"))
        writer.add_rope_scaling_factor(rope["full_attention"]["factor"])
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
    if architecture == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)


def _enum(name: str) -> Any:
    import gguf

    return gguf.RopeScalingType[name]


def add(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        (writer.add_uint32 if value < 2**32 else writer.add_uint64)(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        writer.add_string(name, value)


def _tensor(writer: Any, name: str, values: np.ndarray, kind: str, widened: bool = False) -> None:
    import gguf

    number = gguf.GGMLQuantizationType[kind]
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:
        kind = "F32"  # as converters do
    if kind == "F32":
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
        return
    blocks = _k_blocks(name, values.shape, kind) if kind.endswith("_K") else None
    data = gguf.quants.quantize(np.ascontiguousarray(values), number) if blocks is None else blocks
    if widened:
        writer.add_tensor(name, gguf.quants.dequantize(data, number).astype(np.float32).reshape(values.shape))
    else:
        writer.add_tensor(name, data, raw_dtype=number)


def _k_blocks(name: str, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Random blocks, since the package only reads these kinds. Their scales make numbers of about 0.1."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = np.random.default_rng(sum(name.encode()))
    data = generator.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    places = {"Q4_K": (slice(0, 2), slice(2, 4)), "Q6_K": (slice(208, 210),)}[kind]
    for place in places:
        scales = generator.uniform(1e-4, 4e-4, data.shape[:-1]).astype(np.float16)
        data[..., place] = scales[..., None].view(np.uint8)
    return data.reshape(*shape[:-1], -1)


def _permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Pairs that rotate together made neighbours: row h·d + i·d/2 + j goes to h·d + 2·j + i."""
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _rope_factors(model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    rope = getattr(model.config, "rope_parameters", None) or {}
    full = rope.get("full_attention", {})
    if full.get("rope_type") == "proportional":  # a part of the full layers' pairs rotates; a large factor stops others
        wide = next(model.model.layers[-1].self_attn.q_norm.parameters()).numel()
        rotated = int(wide * full["partial_rotary_factor"] / 2)
        return {"rope_freqs.weight": np.array([1.0] * rotated + [1e30] * (wide // 2 - rotated), np.float32)}
    match rope.get("rope_type"):
        case "llama3":
            table = model.model.rotary_emb
            width = 2 * len(table.inv_freq)
            plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
            return {"rope_freqs.weight": (plain / table.inv_freq).numpy()}
        case "longrope":
            return {
                f"rope_factors_{which}.weight": np.array(rope[f"{which}_factor"], np.float32)
                for which in ("short", "long")
            }
    return {}
