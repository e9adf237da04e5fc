"""PaddleOCR-VL: a small Llama whose positions have three axes, behind SigLIP's tower for pictures of any size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ModelSpec, NormSpec, RopeSpec, WeightMap
from ridgeline.core.specs.tower import ProjectorSpec, TowerSpec
from ridgeline.models.config import Config, head_width
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import changed, decoder_weights, llama_like
from ridgeline.models.names import named
from ridgeline.models.rope import axes
from ridgeline.models.siglip import DEFAULTS as SIGLIP_DEFAULTS
from ridgeline.models.siglip import siglip_tower, siglip_weights

TEXT = {
    **LLAMA_DEFAULTS,
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131072,
}
TOWER = {
    **SIGLIP_DEFAULTS,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 384,
    "patch_size": 14,
    "spatial_merge_size": 2,
}
VISION = "visual.vision_model"


class PaddleOCRVL:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config)
        own = values.section("text_config").entries or config  # the hub's files have no section
        text = Config({**own, "tie_word_embeddings": _tied(values, Config(own))}, TEXT)
        bias = text.boolean("use_bias")
        spec = llama_like("PaddleOCRVLForConditionalGeneration", text, attention_bias=bias, mlp_bias=bias)
        rope = spec.layers[0].attention.rope
        assert rope is not None
        turned = replace(rope, axes=axes(text, rope.rotary_dim // 2))
        tower = _tower(values.section("vision_config"), spec.hidden_size)
        unused = (*spec.unused, f"{VISION}.head.", f"{VISION}.embeddings.packing_position_embedding.")
        return replace(changed(spec, {"rope": turned}), tower=tower, unused=unused)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert spec.tower is not None
        maps = {"norm": "pre_norm", "up": "linear_1", "down": "linear_2"}
        return {
            **decoder_weights(spec),
            **siglip_weights(spec.tower, VISION),
            **named("tower.projector", "mlp_AR", maps, bias=True),
        }


def _tied(values: Config, text: Config) -> bool:
    """Return True if either of the configs ties the output layer. Without a word they are tied."""
    if all(each.raw("tie_word_embeddings") is None for each in (values, text)):
        return True
    return values.boolean("tie_word_embeddings") or text.boolean("tie_word_embeddings")


def _tower(vision: Config, outputs: int) -> TowerSpec:
    config = vision.filled(TOWER)
    width, merge = config.integer("hidden_size"), config.integer("spatial_merge_size")
    projector = ProjectorSpec(
        outputs=outputs, merge=merge, norm=NormSpec(kind="layer", eps=1e-5), hidden=width * merge**2
    )
    head_dim = head_width(config, "hidden_size", "num_attention_heads")
    if head_dim % 4:
        raise ModelLoadError(
            f"config.json has heads of {head_dim} in its tower; rows and columns need a multiple of 4."
        )
    theta = config.section("rope_parameters").number("rope_theta", config.number("rope_theta", 10_000.0))
    rope = RopeSpec(theta=theta, rotary_dim=head_dim)
    tower = siglip_tower(config, projector)
    layers = tuple(replace(each, mixer=replace(each.attention, rope=rope)) for each in tower.layers)
    assert tower.grid is not None
    return replace(tower, layers=layers, grid=replace(tower.grid, fit="corners"))
