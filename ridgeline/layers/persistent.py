"""A decoder as the persistent step takes it: the same spec and the same parameters, with other names.

The kernel and its task graph are in `kernels/step/persistent/`. No engine uses them yet.
"""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from ridgeline.core.errors import InvalidConfig
from ridgeline.core.specs.model import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, NormSpec
from ridgeline.kernels.step.persistent.shape import DenseShape
from ridgeline.kernels.step.persistent.tensors import LayerWeights, StepWeights
from ridgeline.layers.attention import Attention
from ridgeline.layers.decoder import Decoder
from ridgeline.layers.layer import Layer
from ridgeline.layers.linear import Linear
from ridgeline.layers.mlp import GatedMLP

# What the shape says. All else must be as it is by default
TAKEN = {
    ModelSpec: {
        "architecture", "vocab_size", "hidden_size", "layers", "final_norm", "max_position_embeddings",
        "context_limit", "tie_word_embeddings", "unused", "decoder_start", "output_rules",
    },
    LayerSpec: {"mixer", "feed_forward", "norm"},
    AttentionSpec: {"num_heads", "num_kv_heads", "head_dim", "scale", "qkv_bias", "qk_norm", "rope"},
    MLPSpec: {"intermediate_size"},
    NormSpec: {"eps"},
}  # fmt: skip


def shape_of(spec: ModelSpec) -> DenseShape:
    """Return the network's shape. Raises InvalidConfig for one that is not of Llama's kind, or whose layers differ."""
    first = spec.layers[0]
    attention, mlp = first.mixer, first.feed_forward
    if not isinstance(attention, AttentionSpec) or not isinstance(mlp, MLPSpec):
        raise InvalidConfig("the persistent step takes layers of attention and a gated feed-forward alone.")
    for part in (spec, first, attention, mlp, first.norm, spec.final_norm, *filter(None, (attention.qk_norm,))):
        _is_plain(part)
    if any(layer != first for layer in spec.layers):
        raise InvalidConfig("the persistent step takes layers that are all alike, and those of this model differ.")
    if spec.final_norm.eps != first.norm.eps:
        raise InvalidConfig(
            f"the persistent step has one eps, and this model's are {first.norm.eps} and {spec.final_norm.eps}."
        )
    return DenseShape(
        layers=len(spec.layers), width=spec.hidden_size, heads=attention.num_heads, kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim, rotated=attention.rope.rotary_dim if attention.rope else 0,
        inner=mlp.intermediate_size, vocabulary=spec.vocab_size, scale=attention.scale, eps=first.norm.eps,
        head_eps=attention.qk_norm.eps if attention.qk_norm else None, qkv_bias=attention.qkv_bias,
    )  # fmt: skip


def weights_of(decoder: Decoder) -> StepWeights:
    """Return the decoder's own tensors. Raises InvalidConfig if a weight has another form than plain numbers."""
    layers = [_weights_of(layer) for layer in decoder.layers if isinstance(layer, Layer)]
    mixer, norm = decoder.layers[0].mixer, decoder.final_norm
    if not isinstance(mixer, Attention) or mixer.rotary is None or norm is None:
        raise InvalidConfig("the persistent step takes attention with rotary positions alone.")
    return StepWeights(
        embedding_VM=decoder.embed.weight,
        layers=layers,
        norm_M=norm.weight,
        head_VM=_plain(decoder.unembed),
        cos_sin_ZY=mixer.rotary.cos_sin_ZY,
    )


def _is_plain(part: object) -> None:
    """Raise InvalidConfig if a part of a spec asks for more than the kernel knows."""
    taken = TAKEN[type(part)]
    for each in fields(part):  # type: ignore[arg-type]
        if each.name in taken or each.name == "kv_format":
            continue
        if (value := getattr(part, each.name)) != each.default:
            raise InvalidConfig(f"the persistent step does not know {each.name} {value!r} of {type(part).__name__}.")
    if isinstance(part, AttentionSpec) and (part.kv_format.dtype is not None or part.rope is None):
        raise InvalidConfig("the persistent step takes rotary positions, and a cache in the dtype of the weights.")


def _weights_of(layer: Layer) -> LayerWeights:
    mixer, feed = layer.mixer, layer.feed_forward
    assert isinstance(mixer, Attention)
    assert isinstance(feed, GatedMLP)
    assert layer.mixer_norm is not None
    assert layer.feed_forward_norm is not None
    return LayerWeights(
        mixer_norm_M=layer.mixer_norm.weight,
        qkv_XM=_plain(mixer.qkv),
        qkv_bias_X=mixer.qkv.bias,
        q_norm_D=mixer.q_norm.weight if mixer.q_norm else None,
        k_norm_D=mixer.k_norm.weight if mixer.k_norm else None,
        out_MI=_plain(mixer.out),
        feed_forward_norm_M=layer.feed_forward_norm.weight,
        gate_up_2FM=_plain(feed.gate_up),
        down_MF=_plain(feed.down),
    )


def _plain(linear: Linear) -> Tensor:
    """Return the weight of a linear map. Raises InvalidConfig if it is in another form."""
    if linear.weight is None:
        raise InvalidConfig("the persistent step takes plain weights alone, and this model's have another form.")
    return linear.weight
