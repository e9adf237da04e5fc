"""EXAONE 4: norms on queries and keys, windows on most layers and no positions on the others.

The dense models have the norms of each part behind it. K-EXAONE, with mixtures of experts, has them before.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.experts import ExpertNames, corrected_routing, expert_weights, mixture, with_experts
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, changed, llama_like
from ridgeline.models.windows import pattern_windows, unrotated_without_window

DEFAULTS = {**LLAMA_DEFAULTS, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "sliding_window_pattern": 4}
MIXTURE_DEFAULTS = {
    **DEFAULTS,
    "sliding_window": 4096,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}

NAMES = ExpertNames(shared="mlp.shared_experts", correction="mlp.e_score_correction_bias")


class Exaone4:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return changed(_exaone("Exaone4ForCausalLM", Config(config, DEFAULTS)), norms="after")

    weights = staticmethod(Llama.weights)


class ExaoneMoe:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config({**MIXTURE_DEFAULTS, **config}, spellings={"n_shared_experts": "num_shared_experts"})
        experts = mixture(values, corrected_routing(values))
        spec = _exaone("ExaoneMoeForCausalLM", values)
        return with_experts(spec, dict.fromkeys(_sparse(values), experts))

    weights = staticmethod(
        partial(
            expert_weights, names=ExpertNames(shared="mlp.shared_experts", correction="mlp.e_score_correction_bias")
        )
    )


def _exaone(architecture: str, config: Config) -> ModelSpec:
    """Return the spec. A model without any window rotates all of its layers."""
    if isinstance(pattern := config.raw("sliding_window_pattern"), str):  # "LLLG": local, local, local, global
        if not pattern or set(pattern) != {"L", "G"} or not pattern.endswith("G") or pattern.count("G") > 1:
            raise config.wrong("sliding_window_pattern", pattern, "a number, or letters L with one G at the end")
        config = config.changed(sliding_window_pattern=len(pattern))
    windows = pattern_windows(config) if "sliding_window" in config else None
    spec = llama_like(architecture, config, qk_norm=True, windows=windows)
    return spec if windows is None else unrotated_without_window(spec)


def _sparse(config: Config) -> list[int]:
    """Return the layers that have experts."""
    count, types = config.integer("num_hidden_layers"), config.raw("mlp_layer_types")
    if types is None:
        return list(range(config.integer("first_k_dense_replace", at_least=0), count))
    if not isinstance(types, list) or len(types) != count or any(kind not in ("dense", "sparse") for kind in types):
        raise ModelLoadError(f"config.json sets mlp_layer_types; it must have {count} entries, each dense or sparse.")
    return [layer for layer, kind in enumerate(types) if kind == "sparse"]
