"""BLIP-2: OPT behind a vision transformer, of which learned queries (a Q-Former) make 32 vectors of a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import (
    ABSENT,
    CrossAttentionSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    Source,
    WeightMap,
    attention_of,
)
from ridgeline.core.specs.queries import QueriesSpec
from ridgeline.core.specs.tower import GridSpec, TowerSpec
from ridgeline.models.clip import vit_layers
from ridgeline.models.config import Config
from ridgeline.models.names import named, square_patches
from ridgeline.models.opt import OPT
from ridgeline.models.wrapped import text_weights

TEXT: dict[str, Any] = {  # OPT's own
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
}
VISION: dict[str, Any] = {
    "hidden_size": 1408,
    "intermediate_size": 6144,
    "num_hidden_layers": 39,
    "num_attention_heads": 16,
    "image_size": 224,
    "patch_size": 14,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-6,
    "qkv_bias": True,
}
QFORMER: dict[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "cross_attention_frequency": 2,
    "encoder_hidden_size": 1408,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
LAYER = {
    "mixer_norm": "layer_norm1",
    "mixer.qkv": "self_attn.qkv",
    "mixer.out": "self_attn.projection",
    "feed_forward_norm": "layer_norm2",
    "feed_forward.up": "mlp.fc1",
    "feed_forward.down": "mlp.fc2",
}
FED = {
    "feed_forward.up": "intermediate_query.dense",
    "feed_forward.down": "output_query.dense",
    "feed_forward_post_norm": "output_query.LayerNorm",
}


class Blip2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, {"num_query_tokens": 32})
        text = values.section("text_config", required=True)
        if (kind := text.raw("model_type") or "opt") != "opt":
            raise ModelLoadError(f"config.json has a BLIP-2 of {kind!r}, of which only OPT runs here.")
        own = OPT.spec({**TEXT, **text.entries})
        return replace(own, architecture="Blip2ForConditionalGeneration", tower=blip_tower(values, own.hidden_size))

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert spec.tower is not None
        return text_weights(OPT.weights(spec), whole=True) | blip_weights(spec.tower, "qformer.layernorm")


def blip_tower(values: Config, outputs: int, *, reads: bool = False) -> TowerSpec:
    """Return the tower with its Q-Former. outputs: the numbers of a vector. reads: the Q-Former reads the prompt."""
    vision = Config({**VISION, **values.section("vision_config").entries})
    queries = Config({**QFORMER, **values.section("qformer_config").entries})
    if not vision.boolean("qkv_bias"):
        raise vision.wrong("qkv_bias", False, "true, as in every BLIP-2")
    norm = NormSpec(kind="layer", eps=vision.number("layer_norm_eps"))
    width, patch = vision.integer("hidden_size"), vision.integer("patch_size")
    if queries.integer("encoder_hidden_size") != width:
        raise queries.wrong("encoder_hidden_size", queries.integer("encoder_hidden_size"), f"{width}, the tower's")
    return TowerSpec(
        width=width,
        patch_width=3 * patch**2,
        layers=vit_layers(vision, norm, vision.integer("num_hidden_layers")),
        projector=_queries(queries, values.integer("num_query_tokens"), width, outputs, reads),
        patch_bias=True,
        class_token=True,
        grid=GridSpec(side=vision.integer("image_size") // patch),
        final_norm=norm,
    )


def blip_weights(tower: TowerSpec, query_norm: str) -> WeightMap:
    """Return the weight map of the tower with its Q-Former. query_norm: the name of the norm of the queries."""
    embedded, patch = "vision_model.embeddings", "vision_model.embeddings.patch_embedding"
    found: WeightMap = {
        "tower.patch.weight": square_patches(tower, f"{patch}.weight"),
        "tower.patch.bias": (Source(name=f"{patch}.bias"),),
        "tower.class_token": (Source(name=f"{embedded}.class_embedding", row=2),),
        "tower.positions": (Source(name=f"{embedded}.position_embedding", row=1),),
        "tower.projector.queries": (Source(name="query_tokens", row=1),),
    }
    found |= named("tower", "vision_model", {"final_norm": "post_layernorm"}, bias=True)
    for index in range(len(tower.layers)):
        found |= named(f"tower.layers.{index}", f"vision_model.encoder.layers.{index}", LAYER, bias=True)
    ends = {"query_norm": query_norm, "down": "language_projection"}
    return found | named("tower.projector", "", ends, bias=True) | _query_weights(tower)


def _query_weights(tower: TowerSpec) -> WeightMap:
    assert isinstance(tower.projector, QueriesSpec)
    found, theirs = WeightMap(), -1
    for index, layer in enumerate(tower.projector.query_layers):
        across = isinstance(layer.mixer, CrossAttentionSpec)
        theirs += layer.mixer is not ABSENT and not across
        stored = "crossattention" if across else "attention"
        own = f"{stored}.attention"
        names = {"mixer.out": f"{stored}.output.dense", "mixer_post_norm": f"{stored}.output.LayerNorm"}
        if layer.mixer is ABSENT:
            names = {}
        elif across:
            names |= {"mixer.q": f"{own}.query", "mixer.kv": f"{own}.key {own}.value"}
        else:
            names |= {"mixer.qkv": f"{own}.query {own}.key {own}.value"}
        names |= {} if layer.feed_forward is ABSENT else FED
        found |= named(f"tower.projector.layers.{index}", f"qformer.encoder.layer.{theirs}", names, bias=True)
    return found


def _queries(config: Config, queries: int, read: int, outputs: int, reads: bool) -> QueriesSpec:
    """Return the Q-Former. Each of the checkpoint's layers that sees patches is two of ours, and of one that reads the
    prompt each is, since its tokens have feed-forwards of their own."""
    norm = NormSpec(kind="layer", eps=config.number("layer_norm_eps"))
    [alone] = vit_layers(config, norm, 1)
    alone = replace(alone, norms="around")
    attention = attention_of(alone.mixer)
    assert attention is not None
    crossing = replace(attention, bidirectional=False)
    across = replace(alone, mixer=CrossAttentionSpec(attention=crossing, read_width=read))
    fed = replace(alone, mixer=ABSENT)
    pair = (replace(alone, feed_forward=ABSENT), across)
    single = (replace(alone, feed_forward=ABSENT), fed) if reads else (alone,)
    every, layers = config.integer("cross_attention_frequency"), tuple[LayerSpec, ...]()
    count = config.integer("num_hidden_layers")
    for index in range(count):
        layers += single if index % every else pair
    return QueriesSpec(
        outputs=outputs,
        queries=queries,
        query_width=config.integer("hidden_size"),
        query_layers=layers,
        query_norm=norm,
        words=config.integer("vocab_size") if reads else 0,
        places=config.integer("max_position_embeddings") if reads else 0,
        word_layers=(fed,) * count if reads else (),
    )
