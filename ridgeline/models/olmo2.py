"""OLMo-2 and 3: Llama with norms after each part instead of before, and on all queries and all keys together.

OLMo-3 has a window on three of four layers. A scaling of the rotation is for the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.specs.model import ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, changed, llama_like
from ridgeline.models.windows import pattern_windows

DEFAULTS = {**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5}
DEFAULTS_3 = {**DEFAULTS, "rope_theta": 500_000.0, "sliding_window": 4096, "sliding_window_pattern": 4}


class Olmo2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        return _olmo("Olmo2ForCausalLM", Config(config, DEFAULTS), None)

    weights = staticmethod(Llama.weights)


class Olmo3:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS_3)
        if "rope_parameters" not in values:
            plain = {"rope_theta": values.number("rope_theta")}
            scaled = {**plain, **values.section("rope_scaling").entries}
            values = values.changed(rope_parameters={"full_attention": scaled, "sliding_attention": plain})
        # Here the context is the one after the scaling, not the one before it.
        spec = _olmo("Olmo3ForCausalLM", values, pattern_windows(values))
        return replace(spec, max_position_embeddings=values.integer("max_position_embeddings"))

    weights = staticmethod(Llama.weights)


def _olmo(architecture: str, config: Config, windows: list[int | None] | None) -> ModelSpec:
    bias = config.boolean("attention_bias")
    spec = llama_like(architecture, config, attention_bias=bias, qk_norm=True, windows=windows)
    return changed(spec, {"qk_norm_whole": True}, norms="after")
