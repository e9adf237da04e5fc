"""Zamba2: Mamba-2 without feed-forwards, in some layers behind blocks of attention that layers share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.mamba import Mamba2Spec
from ridgeline.core.specs.model import (
    ABSENT,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    NormSpec,
    Source,
    WeightMap,
)
from ridgeline.core.specs.shared import SharedBlockSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.names import mamba2, named, outer
from ridgeline.models.rope import rope
from ridgeline.models.selective import Mamba2Names, expanded, mamba2_of

DEFAULTS = {
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "hidden_size": 2560,
    "num_hidden_layers": 54,
    "num_attention_heads": 32,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "time_step_min": 0.001,
    "num_mem_blocks": 1,
    "adapter_rank": 128,
    "tie_word_embeddings": True,
}
LAYER_TYPES = {"mamba": False, "linear_attention": False, "hybrid": True}  # has a layer a shared block?
PUBLISHED_TYPES = [  # of configs that do not say
    *["mamba"] * 6, *(["hybrid"] + ["mamba"] * 5) * 6, "hybrid", *["mamba"] * 4, "hybrid", *["mamba"] * 3, "hybrid",
    *["mamba"] * 2,
]  # fmt: skip
LONG_CONTEXT = 16384  # of models with use_long_context
NAMES = Mamba2Names(heads="n_mamba_heads", head_dim="mamba_headdim", groups="mamba_ngroups")
GATED_NORM_EPS = 1e-5  # which the config does not say


class Zamba2:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        norm, width, bias = _norm(values), values.integer("hidden_size"), values.boolean("add_bias_linear")
        mamba, attention = _mamba(values), _attention(values)
        if not values.boolean("tie_word_embeddings"):
            raise wrong("tie_word_embeddings", False, "true, without which transformers does not share blocks either")
        adapts = values.boolean("use_shared_attention_adapter")
        if adapts and attention.num_kv_heads != attention.num_heads:
            needed = f"the {attention.num_heads} of num_attention_heads, since q and k have adapters"
            raise wrong("num_key_value_heads", attention.num_kv_heads, needed)
        size = values.integer("intermediate_size") if values.raw("intermediate_size") else 4 * width
        mlp = MLPSpec(intermediate_size=size, activation=values.activation("hidden_act"), bias=bias)
        blocks, rank = values.integer("num_mem_blocks"), values.integer("adapter_rank")
        layers, uses = list[LayerSpec](), 0
        for hybrid in _types(values):
            if not hybrid:
                layers.append(LayerSpec(mixer=mamba, feed_forward=ABSENT, norm=norm))
                continue
            mixer = SharedBlockSpec(
                block=uses % blocks,
                owner=uses < blocks,
                width=width,
                attention=attention,
                mlp=mlp,
                norm=norm,
                rank=rank,
                adapts_attention=adapts,
                mamba=mamba,
            )
            layers.append(LayerSpec(mixer=mixer, feed_forward=ABSENT, norm=norm, embedded=True))
            uses += 1
        return ModelSpec(
            architecture="Zamba2ForCausalLM",
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=tuple(layers),
            final_norm=norm,
            max_position_embeddings=LONG_CONTEXT
            if values.boolean("use_long_context")
            else values.integer("max_position_embeddings"),
            tie_word_embeddings=True,
            unused=tuple(
                f"model.layers.{index}.shared_transformer."
                for index, layer in enumerate(layers)
                if isinstance(layer.mixer, SharedBlockSpec) and not layer.mixer.owner
            ),
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found, owners, uses = outer(spec, "final_layernorm"), dict[int, str](), 0
        for index, layer in enumerate(spec.layers):
            ours, theirs, mixer = f"layers.{index}", f"model.layers.{index}", layer.mixer
            if isinstance(mixer, SharedBlockSpec):
                block = owners.setdefault(mixer.block, f"{theirs}.shared_transformer")
                found |= _shared(f"{ours}.mixer", block, mixer, uses)
                found |= named(f"{ours}.mixer", theirs, {"link": "linear"})
                theirs, mixer, uses = f"{theirs}.mamba_decoder", mixer.mamba, uses + 1
            assert isinstance(mixer, Mamba2Spec)
            found |= named(ours, theirs, {"mixer_norm": "input_layernorm"})
            found |= named(f"{ours}.mixer", f"{theirs}.mamba", {"mamba_in": "in_proj"}, bias=mixer.bias)
            found |= mamba2(f"{ours}.mixer", f"{theirs}.mamba", mixer)
        return found


def _shared(ours: str, theirs: str, spec: SharedBlockSpec, use: int) -> WeightMap:
    """Return the weight map of one layer's adapters, all of which the block's first layer holds by the number of the
    use, and of the block, if this layer is the first."""
    adapters = f"{theirs}.feed_forward.gate_up_proj_adapter_list.{use}"
    found = named(f"{ours}.mlp_adapter", adapters, {"down": "0", "up.0": "1"})
    if spec.adapts_attention:
        lists = [f"{theirs}.self_attn.linear_{each}_adapter_list.{use}" for each in "qkv"]
        found[f"{ours}.qkv_adapter.down.weight"] = tuple(Source(name=f"{each}.0.weight") for each in lists)
        for index, each in enumerate(lists):
            found |= named(f"{ours}.qkv_adapter.up", each, {str(index): "1"})
    if spec.owner:
        found |= named(f"{ours}.block", theirs, {"attention_norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"})
        modules = {"qkv": "q_proj k_proj v_proj", "out": "o_proj"}
        found |= named(f"{ours}.block.attention", f"{theirs}.self_attn", modules)
        modules = {"gate_up": "gate_up_proj", "down": "down_proj"}
        found |= named(f"{ours}.block.mlp", f"{theirs}.feed_forward", modules, bias=spec.mlp.bias)
    return found


def _types(config: Config) -> list[bool]:
    """Return for each layer whether it has a shared block."""
    count, types = config.integer("num_hidden_layers"), config.raw("layers_block_type")
    types = PUBLISHED_TYPES if types is None else types
    if not isinstance(types, list) or len(types) != count or any(kind not in LAYER_TYPES for kind in types):
        raise wrong("layers_block_type", types, f"{count} entries, each {' or '.join(LAYER_TYPES)}")
    return [LAYER_TYPES[kind] for kind in types]


def _norm(config: Config) -> NormSpec:
    return NormSpec(eps=config.number("rms_norm_eps"))


def _attention(config: Config) -> AttentionSpec:
    """Return the attention of a block, which reads vectors that are twice as wide as the model."""
    heads, width = config.integer("num_attention_heads"), 2 * config.integer("hidden_size")
    kv_heads = config.integer("num_key_value_heads") if "num_key_value_heads" in config else heads
    if width % heads or heads % kv_heads:
        raise ModelLoadError(
            f"config.json has {heads} attention heads and {kv_heads} key/value heads in blocks of width {width}; each "
            "must divide the one before."
        )
    head_dim = width // heads
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=(head_dim / 2) ** -0.5,
        rope=rope(config, head_dim) if config.boolean("use_mem_rope") else None,
    )


def _mamba(config: Config) -> Mamba2Spec:
    spec = mamba2_of(
        config,
        NormSpec(eps=GATED_NORM_EPS),
        names=NAMES,
        inner=expanded(config, "mamba_expand"),
        bias=config.boolean("add_bias_linear"),
        limits=(config.number("time_step_min"), inf),
    )
    return replace(spec, conv_bias=True)  # whatever the config says, as in transformers
