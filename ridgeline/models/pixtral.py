"""Pixtral's tower: gated layers with RMSNorm and without biases, which rotate by row and column."""

from __future__ import annotations

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, NormSpec, RopeSpec, WeightMap
from ridgeline.core.specs.tower import ProjectorSpec, TowerSpec
from ridgeline.models.config import Config, check_colors, head_width
from ridgeline.models.names import named, square_patches

DEFAULTS = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_channels": 3,
    "patch_size": 16,
    "hidden_act": "gelu",
}
EPS = 1e-5  # of all of its norms, whatever the config says

LAYER = {
    "mixer_norm": "attention_norm",
    "mixer.qkv": "attention.q_proj attention.k_proj attention.v_proj",
    "mixer.out": "attention.o_proj",
    "feed_forward_norm": "ffn_norm",
    "feed_forward.gate_up": "feed_forward.gate_proj feed_forward.up_proj",
    "feed_forward.down": "feed_forward.down_proj",
}


def pixtral_tower(vision: Config, projector: ProjectorSpec) -> TowerSpec:
    """Return the tower, whose last layer's output is projected."""
    config = vision.filled(DEFAULTS)
    check_colors(config)
    head_dim = head_width(config, "hidden_size", "num_attention_heads")
    if head_dim % 4:
        raise ModelLoadError(
            f"config.json has heads of {head_dim} in its tower; rows and columns need a multiple of 4."
        )
    heads, norm = config.integer("num_attention_heads"), NormSpec(eps=EPS)
    rotates = config.section("rope_parameters")
    theta = (rotates if "rope_theta" in rotates else config).number("rope_theta", 10_000.0)
    rope = RopeSpec(theta=theta, rotary_dim=head_dim)
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5, rope=rope, bidirectional=True
    )
    mlp = MLPSpec(intermediate_size=config.integer("intermediate_size"), activation=config.activation("hidden_act"))
    return TowerSpec(
        width=config.integer("hidden_size"),
        patch_width=3 * config.integer("patch_size") ** 2,
        layers=(LayerSpec(mixer=attention, feed_forward=mlp, norm=norm),) * config.integer("num_hidden_layers"),
        projector=projector,
        rope_apart=True,
        embed_norm=norm,
    )


def pixtral_weights(tower: TowerSpec, theirs: str) -> WeightMap:
    """Return the weight map of the tower, whose tensors' names begin so."""
    found: WeightMap = {"tower.patch.weight": square_patches(tower, f"{theirs}.patch_conv.weight")}
    found |= named("tower", theirs, {"embed_norm": "ln_pre"})
    for index in range(len(tower.layers)):
        found |= named(f"tower.layers.{index}", f"{theirs}.transformer.layers.{index}", LAYER)
    return found
