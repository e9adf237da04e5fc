"""DeciLM and Llama-Nemotron: Llama whose layers differ in their heads of keys and in width, or lack one of their parts.

An architecture search left in each layer what it is worth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.model import ABSENT, LayerSpec, ModelSpec
from ridgeline.models.config import Config
from ridgeline.models.llama import DEFAULTS as LLAMA_DEFAULTS
from ridgeline.models.llama import Llama, llama_like

MULTIPLE = 256  # of which a feed-forward's width is a multiple


class DeciLM:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, LLAMA_DEFAULTS)
        heads, count = values.integer("num_attention_heads"), values.integer("num_hidden_layers")
        blocks, groups = values.raw("block_configs"), values.raw("num_key_value_heads_per_layer")
        listed = groups if blocks is None else blocks
        if not isinstance(listed, list) or len(listed) != count:
            raise ModelLoadError(f"config.json has no block_configs of its {count} layers; a search made each of them.")
        width = values.integer("intermediate_size") if blocks is None else MULTIPLE
        plain = llama_like(
            "DeciLMForCausalLM", values.changed(num_key_value_heads=heads, intermediate_size=width),
            attention_bias=values.boolean("attention_bias"), mlp_bias=values.boolean("mlp_bias"),
        )  # fmt: skip
        layers = []
        for index, layer in enumerate(plain.layers):
            if blocks is None:
                layers.append(_grouped(layer, Config({"heads": groups[index]}).integer("heads"), index))
            else:
                layers.append(
                    _layer(layer, Config({"block": blocks[index]}).section("block"), plain.hidden_size, index)
                )
        return replace(plain, layers=tuple(layers))

    weights = staticmethod(Llama.weights)


def _layer(layer: LayerSpec, block: Config, width: int, index: int) -> LayerSpec:
    attention, ffn = block.section("attention", required=True), block.section("ffn", required=True)
    for part in (attention, ffn):
        part.refuse("replace_with_linear", "a layer has a part of its kind or none")
    for name in ("window_length", "num_sink_tokens", "sparsify"):
        attention.refuse(name, "a layer's attention sees everything")
    if attention.boolean("no_op"):
        layer = replace(layer, mixer=ABSENT)
    else:
        layer = _grouped(layer, layer.attention.num_heads // attention.integer("n_heads_in_group"), index)
    if ffn.boolean("no_op"):
        layer = replace(layer, feed_forward=ABSENT)
    else:
        size = ffn.integer("intermediate_size") if "intermediate_size" in ffn else _width(ffn.number("ffn_mult"), width)
        layer = replace(layer, feed_forward=replace(layer.mlp, intermediate_size=size))
    if layer.mixer is ABSENT and layer.feed_forward is ABSENT:
        raise ModelLoadError(
            f"config.json leaves layer {index} without attention and feed-forward; leave the layer out."
        )
    return layer


def _width(multiplier: float, width: int) -> int:
    size = int(2 * multiplier * width / 3)
    return size + -size % MULTIPLE


def _grouped(layer: LayerSpec, kv_heads: int, index: int) -> LayerSpec:
    heads = layer.attention.num_heads
    if kv_heads < 1 or heads % kv_heads:
        raise ModelLoadError(
            f"config.json gives layer {index} {kv_heads} heads of keys, which do not divide its {heads} heads."
        )
    return replace(layer, mixer=replace(layer.attention, num_kv_heads=kv_heads))
