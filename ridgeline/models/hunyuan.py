"""Hunyuan: Llama with norms on queries and keys behind their rotation, with or without mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, WeightMap
from ridgeline.models.config import Config, wrong
from ridgeline.models.experts import ExpertNames, expert_weights, mixture, routing, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Names, changed, decoder_weights, llama_like

DEFAULTS = {**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "num_shared_expert": 1, "moe_topk": 1}
SPELLINGS = {"num_experts_per_tok": "moe_topk", "n_shared_experts": "num_shared_expert"}
NAMES = Names(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm")
EXPERT_NAMES = ExpertNames(router="mlp.gate.wg", shared="mlp.shared_mlp")


class HunyuanDense:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _hunyuan("HunYuanDenseV1ForCausalLM", Config(config, DEFAULTS))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return decoder_weights(spec, NAMES)


class HunyuanMoe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config({**DEFAULTS, **_of_one_kind(config)}, spellings=SPELLINGS)
        experts = mixture(values, routing(values, renormalize=True))
        dense = _hunyuan("HunYuanMoEV1ForCausalLM", values)
        return with_experts(dense, dict.fromkeys(range(len(dense.layers)), experts))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        return expert_weights(spec, EXPERT_NAMES, NAMES)


def _hunyuan(architecture: str, config: Config) -> ModelSpec:
    scaling = "rope_parameters" if "rope_parameters" in config else "rope_scaling"
    rotation = config.section(scaling)
    if "alpha" in rotation:  # the base is that of a scaling by a constant, whatever the length
        if (rotation.raw("rope_type") or rotation.raw("type")) != "dynamic":
            raise wrong("alpha", rotation.raw("alpha"), "in a dynamic scaling")
        head = config.integer("head_dim") if "head_dim" in config else 0
        head = head or config.integer("hidden_size") // config.integer("num_attention_heads")
        if head <= 2:
            raise wrong("head_dim", head, "above 2 for a scaling by alpha")
        theta = (rotation if "rope_theta" in rotation else config).number("rope_theta")
        base = theta * rotation.number("alpha") ** (head / (head - 2))
        config = config.changed(rope_scaling=None, rope_parameters={"rope_type": "default", "rope_theta": base})
    spec = llama_like(architecture, config, attention_bias=config.boolean("attention_bias"), qk_norm=True)
    return changed(spec, {"qk_norm_behind": True})


def _of_one_kind(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with one number in place of a list with that of each layer. Raise ModelLoadError if they
    differ."""
    found = dict(config)
    for name in ("num_experts", "moe_topk", "num_shared_expert", "moe_intermediate_size"):
        if isinstance(value := found.get(name), list):
            if len(set(map(str, value))) != 1:
                raise ModelLoadError(f"config.json sets {name} to {str(value)[:80]}; all layers must have the same.")
            found[name] = value[0]
    if found.get("moe_intermediate_size") is None:
        found["moe_intermediate_size"] = found.get("intermediate_size")
    return found
