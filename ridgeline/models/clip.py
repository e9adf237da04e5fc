"""CLIP's tower: a vision transformer with a class token and learned positions, as LLaVA and others have it."""

from __future__ import annotations

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.tower import GridSpec, ProjectorSpec, TowerSpec
from ridgeline.models.config import Config, check_colors, head_width
from ridgeline.models.names import named, square_patches

DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}

LAYER = {
    "mixer_norm": "layer_norm1",
    "mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "mixer.out": "self_attn.out_proj",
    "feed_forward_norm": "layer_norm2",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
}


def vit_layers(config: Config, norm: NormSpec, count: int) -> tuple[LayerSpec, ...]:
    """Return so many layers with LayerNorm before each part, biases everywhere, and attention both ways."""
    heads = config.integer("num_attention_heads")
    head_dim = head_width(config, "hidden_size", "num_attention_heads")
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        qkv_bias=True,
        out_bias=True,
        bidirectional=True,
    )
    mlp = MLPSpec(
        intermediate_size=config.integer("intermediate_size"),
        activation=config.ungated_activation("hidden_act"),
        gated=False,
        bias=True,
    )
    return (LayerSpec(mixer=attention, feed_forward=mlp, norm=norm),) * count


def checked_layers(config: Config, layers: int) -> int:
    """Return the number of layers up to the one whose output is taken, if a tower for colors has as many."""
    check_colors(config)
    if not 0 < layers <= config.integer("num_hidden_layers"):
        raise ModelLoadError(
            f"config.json takes the output of layer {layers} of a tower of {config.integer('num_hidden_layers')}."
        )
    return layers


def clip_tower(config: Config, projector: ProjectorSpec, layers: int) -> TowerSpec:
    """Return CLIP's tower up to one of its layers, and what projects the patches behind that one."""
    config = Config(config.entries, DEFAULTS)
    layers = checked_layers(config, layers)
    patch, side, width = config.integer("patch_size"), config.integer("image_size"), config.integer("hidden_size")
    norm = NormSpec(kind="layer", eps=config.number("layer_norm_eps"))
    return TowerSpec(
        width=width,
        patch_width=3 * patch**2,
        layers=vit_layers(config, norm, layers),
        projector=projector,
        class_token=True,
        grid=GridSpec(side=side // patch),
        embed_norm=norm,
    )


def clip_weights(tower: TowerSpec, theirs: str) -> WeightMap:
    """Return the weight map of CLIP's tower, whose tensors' names begin so."""
    found: WeightMap = {
        "tower.patch.weight": square_patches(tower, f"{theirs}.embeddings.patch_embedding.weight"),
        "tower.class_token": (Source(name=f"{theirs}.embeddings.class_embedding"),),
        "tower.positions": (Source(name=f"{theirs}.embeddings.position_embedding.weight"),),
    }
    found |= named("tower", theirs, {"embed_norm": "pre_layrnorm"}, bias=True)
    for index in range(len(tower.layers)):
        found |= named(f"tower.layers.{index}", f"{theirs}.encoder.layers.{index}", LAYER, bias=True)
    return found
