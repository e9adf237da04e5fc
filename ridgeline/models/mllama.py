"""Llama 3.2 Vision: Llama with further layers, in which tokens attend to tiles of the pictures before them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import (
    AttentionSpec,
    CrossAttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    WeightMap,
)
from ridgeline.core.specs.tiled import TiledTowerSpec
from ridgeline.core.specs.tower import ProjectorSpec
from ridgeline.models.config import Config, check_colors, head_width, wrong
from ridgeline.models.llama import Llama, decoder_weights
from ridgeline.models.names import named, single, square_patches
from ridgeline.models.wrapped import text_config, text_weights

TEXT: dict[str, Any] = {  # what text_config leaves out
    "vocab_size": 128256,
    "hidden_size": 4096,
    "hidden_act": "silu",
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
CROSSING = [3, 8, 13, 18, 23, 28, 33, 38]
VISION: dict[str, Any] = {
    "hidden_size": 1280,
    "hidden_act": "gelu",
    "num_hidden_layers": 32,
    "num_global_layers": 8,
    "attention_heads": 16,
    "num_channels": 3,
    "intermediate_size": 5120,
    "image_size": 448,
    "patch_size": 14,
    "norm_eps": 1e-5,
    "max_num_tiles": 4,
}
TAPS = [3, 7, 15, 23, 30]
SHAPES = [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]]
EXTRA = 8  # rows of the embedding table behind the vocabulary
ENDS_EPS = 1e-5  # torch's own: that of the norms before and behind the tower's first layers

LAYER = {
    "mixer_norm": "input_layernorm",
    "mixer.out": "self_attn.o_proj",
    "mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
}
CROSSED = {
    "mixer.q": "cross_attn.q_proj",
    "mixer.kv": "cross_attn.k_proj cross_attn.v_proj",
    "mixer.out": "cross_attn.o_proj",
    "mixer.q_norm": "cross_attn.q_norm",
    "mixer.k_norm": "cross_attn.k_norm",
}
TABLES = {
    "class_token": "class_embedding",
    "positions": "gated_positional_embedding.embedding",
    "positions_gate": "gated_positional_embedding.gate",
    "tile_positions": "gated_positional_embedding.tile_embedding.weight",
    "before": "pre_tile_positional_embedding.embedding.weight",
    "before_gate": "pre_tile_positional_embedding.gate",
    "between": "post_tile_positional_embedding.embedding.weight",
    "between_gate": "post_tile_positional_embedding.gate",
}


class LlamaVision:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, {"image_token_index": TEXT["vocab_size"]})
        values.section("vision_config", required=True)
        text = text_config({**config, "text_config": {**TEXT, **config["text_config"]}})
        own = Llama.spec(text)
        tower = _tower(Config(config["vision_config"], VISION), own.hidden_size)
        row = values.integer("image_token_index")
        if not 0 <= row < own.vocab_size + EXTRA:
            raise wrong("image_token_index", row, f"below {own.vocab_size + EXTRA}, the rows of the embedding table")
        return replace(
            own,
            architecture="MllamaForConditionalGeneration",
            layers=_with_crossing(own, text.get("cross_attention_layers") or CROSSING, tower.most_vectors),
            tower=tower,
            extra_rows=EXTRA,
            picture_row=row,
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found: WeightMap = dict(decoder_weights(spec))
        for index, layer in enumerate(spec.layers):
            if layer.gated:
                ours, theirs = f"layers.{index}", f"model.layers.{index}"
                found |= named(ours, theirs, CROSSED)
                gates = {"mixer_gate": "cross_attn_attn_gate", "feed_forward_gate": "cross_attn_mlp_gate"}
                found |= single(ours, theirs, gates)
        found = text_weights(found, whole=True) | named(
            "tower.projector", "", {"down": "multi_modal_projector"}, bias=True
        )
        assert isinstance(spec.tower, TiledTowerSpec)
        return found | _tower_weights(spec.tower)


def _with_crossing(spec: ModelSpec, crossing: object, keys: int) -> tuple[LayerSpec, ...]:
    """Return the layers, of which those with these numbers attend to pictures instead."""
    layers, count = list(spec.layers), len(spec.layers)
    if not isinstance(crossing, list) or not all(isinstance(each, int) and 0 <= each < count for each in crossing):
        raise wrong("cross_attention_layers", crossing, f"a list of numbers of layers, each below {count}")
    for index in crossing:
        like = layers[index]
        attention = replace(like.attention, rope=None, qk_norm=like.norm)
        mixer = CrossAttentionSpec(attention=attention, pictures=keys)
        layers[index] = replace(like, mixer=mixer, gated=True)
    return tuple(layers)


def _tower(vision: Config, outputs: int) -> TiledTowerSpec:
    check_colors(vision)
    width, tiles, patch = vision.integer("hidden_size"), vision.integer("max_num_tiles"), vision.integer("patch_size")
    heads, head_dim = vision.integer("attention_heads"), head_width(vision, "hidden_size", "attention_heads")
    attention = AttentionSpec(
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, scale=head_dim**-0.5, bidirectional=True
    )
    mlp = MLPSpec(
        intermediate_size=vision.integer("intermediate_size"),
        activation=vision.ungated_activation("hidden_act"),
        gated=False,
        bias=True,
    )
    ends = NormSpec(kind="layer", eps=ENDS_EPS)
    layer = LayerSpec(mixer=attention, feed_forward=mlp, norm=NormSpec(kind="layer", eps=vision.number("norm_eps")))
    count = vision.integer("num_hidden_layers")
    taps = vision.raw("intermediate_layers_indices") or TAPS
    if not isinstance(taps, list) or not all(isinstance(each, int) and 0 <= each < count for each in taps):
        raise vision.wrong("intermediate_layers_indices", taps, f"a list of numbers of layers, each below {count}")
    if sorted(set(taps)) != taps:
        raise ModelLoadError(f"config.json has intermediate_layers_indices {taps}, which do not rise.")
    shapes = tuple((int(rows), int(columns)) for rows, columns in vision.raw("supported_aspect_ratios") or SHAPES)
    if any(not 0 < rows * columns <= tiles for rows, columns in shapes):
        raise vision.wrong("supported_aspect_ratios", list(shapes), f"shapes of 1 to {tiles} tiles")
    side = vision.integer("image_size") // patch
    return TiledTowerSpec(
        width=width,
        patch_width=3 * patch**2,
        layers=(layer,) * count,
        projector=ProjectorSpec(outputs=outputs),
        class_token=True,
        embed_norm=ends,
        final_norm=ends,
        tiles=tiles,
        side=side,
        shapes=shapes,
        global_layers=(replace(layer, gated=True),) * vision.integer("num_global_layers"),
        taps=tuple(taps),
    )


def _tower_weights(tower: TiledTowerSpec) -> WeightMap:
    found: WeightMap = {"tower.patch.weight": square_patches(tower, "vision_model.patch_embedding.weight")}
    found |= single("tower", "vision_model", TABLES)
    found |= named("tower", "vision_model", {"embed_norm": "layernorm_pre", "final_norm": "layernorm_post"}, bias=True)
    for name, stored, layers in (
        ("layers", "transformer", tower.layers),
        ("global_layers", "global_transformer", tower.global_layers),
    ):
        for index, layer in enumerate(layers):
            ours, theirs = f"tower.{name}.{index}", f"vision_model.{stored}.layers.{index}"
            biased = {key: part for key, part in LAYER.items() if not key.startswith("mixer.")}
            found |= named(ours, theirs, biased, bias=True)
            found |= named(ours, theirs, {key: part for key, part in LAYER.items() if key not in biased})
            if layer.gated:
                found |= single(ours, theirs, {"mixer_gate": "gate_attn", "feed_forward_gate": "gate_ffn"})
    return found
