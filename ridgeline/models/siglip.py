"""SigLIP's tower: a vision transformer with learned positions and no class token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import NormSpec, Source, WeightMap
from ridgeline.core.specs.tower import GridSpec, ProjectorSpec, TowerSpec
from ridgeline.models.clip import LAYER, checked_layers, vit_layers
from ridgeline.models.config import Config
from ridgeline.models.names import named, square_patches

DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}


def siglip_tower(
    vision: Config, projector: ProjectorSpec, layers: int | None = None, defaults: Mapping[str, Any] = DEFAULTS
) -> TowerSpec:
    """Return the tower up to one of its layers. layers: their number; None: all, and the norm behind them."""
    config = vision.filled(defaults)
    count = checked_layers(config, config.integer("num_hidden_layers") if layers is None else layers)
    patch, side = config.integer("patch_size"), config.integer("image_size")
    norm = NormSpec(kind="layer", eps=config.number("layer_norm_eps"))
    return TowerSpec(
        width=config.integer("hidden_size"),
        patch_width=3 * patch**2,
        patch_bias=True,
        layers=vit_layers(config, norm, count),
        projector=projector,
        grid=GridSpec(side=side // patch),
        final_norm=norm if layers is None else None,
    )


def siglip_weights(tower: TowerSpec, theirs: str) -> WeightMap:
    """Return the weight map of the tower, whose tensors' names begin so."""
    inner = f"{theirs}.embeddings"
    found: WeightMap = {
        "tower.patch.weight": square_patches(tower, f"{inner}.patch_embedding.weight"),
        "tower.patch.bias": (Source(name=f"{inner}.patch_embedding.bias"),),
        "tower.positions": (Source(name=f"{inner}.position_embedding.weight"),),
    }
    if tower.final_norm is not None:
        found |= named("tower", theirs, {"final_norm": "post_layernorm"}, bias=True)
    for index in range(len(tower.layers)):
        found |= named(f"tower.layers.{index}", f"{theirs}.encoder.layers.{index}", LAYER, bias=True)
    return found
