"""The sounds of Phi-4-multimodal: a conformer, whose outputs become tokens by two linear maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.conformer import GluConvSpec
from ridgeline.core.specs.listener import LONGEST_SOUND, ListenerSpec
from ridgeline.core.specs.model import (
    ABSENT,
    AttentionSpec,
    LayerSpec,
    MLPSpec,
    NormSpec,
    Relative,
    Source,
    WeightMap,
)
from ridgeline.core.specs.spectra import PHI_4
from ridgeline.core.specs.stem import TAPS, GridStem
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.models.config import Config
from ridgeline.models.names import named

AUDIO: dict[str, Any] = {
    **{"hidden_size": 1024, "intermediate_size": 1536, "num_blocks": 24, "num_attention_heads": 16},
    **{"ext_pw_out_channel": 1024, "depthwise_separable_out_channel": 1024, "nemo_conv_channels": 1024},
    **{"kernel_size": 3, "input_size": 80, "time_reduction": 8, "bias_max_distance": 1000},
}
ALONE: dict[str, Any] = {  # what every one of these models has
    **dict.fromkeys(("activation", "conv_activation", "conv_glu_type"), "swish"),
    **{"nemo_activation": "relu", "chunk_size": -1, "depthwise_multiplier": 1, "bias_symmetric": False},
    "downsample_rate": 1,
}
PARTS = 4  # layers of ours that are one of the checkpoint's: feed-forward, attention, convolution, feed-forward
ROW = 500  # positions that layers see together
NORM = NormSpec(kind="layer", eps=1e-5)
ATTENTION = {
    "mixer_norm": "layer_norm_att",
    "mixer.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "mixer.out": "self_attn.o_proj",
}
CONVOLUTION = {"mixer_norm": "conv.layer_norm"}
POINTWISE = {  # maps that are stored as convolutions of one tap
    "mixer.glu_in": "conv.glu.ext_pw_conv_1d",
    "mixer.pointwise": "conv.dw_sep_conv_1d.pw_conv",
    "mixer.out": "conv.ext_pw_conv_1d",
}


def phi4_listener(config: Config, outputs: int) -> ListenerSpec:
    """Return the listener. outputs: the numbers of a vector."""
    values = config.filled({**AUDIO, **ALONE})
    for name, wanted in ALONE.items():
        if (found := values.raw(name)) != wanted:
            raise ModelLoadError(f"config.json sets {name} to {str(found)[:80]!r}; only Phi-4 with {wanted!r} runs.")
    width, heads = values.integer("hidden_size"), values.integer("num_attention_heads")
    shrinks, distance = values.integer("time_reduction", at_least=2), values.integer("bias_max_distance")
    if shrinks & (shrinks - 1) or shrinks > 64:
        raise values.wrong("time_reduction", shrinks, "a power of 2, and at most 64")
    for name in ("ext_pw_out_channel", "depthwise_separable_out_channel"):
        if values.integer(name) != width:
            raise values.wrong(name, values.integer(name), f"{width}, as hidden_size")
    if width % heads:
        raise values.wrong("hidden_size", width, f"a multiple of the {heads} of num_attention_heads")
    stem = GridStem(
        bands=values.integer("input_size"),
        positions=ROW,
        channels=(values.integer("nemo_conv_channels"),) * (shrinks.bit_length() - 1),
        spectra=PHI_4.with_bands(values.integer("input_size")),
        activation="relu",
        out_bias=True,
        separable=True,
        frames_first=True,
        standardized=True,
    )
    return ListenerSpec(
        stem=stem,
        width=width,
        layers=tuple(
            layer for n in range(values.integer("num_blocks")) for layer in _layers(values, width, heads, distance, n)
        ),
        norm=None,
        outputs=outputs,
        longest=LONGEST_SOUND * RATE // HOP,
        row=ROW,
        pooled=1,
        block=PARTS,
        block_norm=NORM,
        hidden=outputs,
        apart=True,
    )


def _layers(values: Config, width: int, heads: int, distance: int, index: int) -> tuple[LayerSpec, ...]:
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        scale=(width // heads) ** -0.5,
        qkv_bias=True,
        out_bias=True,
        bidirectional=True,
        relative=Relative(buckets=2 * distance, distance=distance, single=True),
        relative_owner=index == 0,
    )
    convolution = GluConvSpec(
        channels=width,
        length=values.integer("kernel_size"),
        gate="silu",
        pointwise=True,
        shifted=True,
        bias=True,
    )
    mlp = MLPSpec(intermediate_size=values.integer("intermediate_size"), bias=True)
    fed = LayerSpec(mixer=ABSENT, feed_forward=mlp, norm=NORM, residual_multiplier=0.5)
    mixers = (attention, convolution)
    return (fed, *(LayerSpec(mixer=each, feed_forward=ABSENT, norm=NORM) for each in mixers), fed)


def phi4_listener_weights(listener: ListenerSpec, theirs: str) -> WeightMap:
    """Return the weight map of the listener, whose tensors' names begin so."""
    encoder = f"{theirs}.encoder"
    found: WeightMap = {
        "listener.stem.mean": (Source(name=f"{encoder}.encoder_embedding.global_mean"),),
        "listener.stem.factor": (Source(name=f"{encoder}.encoder_embedding.global_invstd"),),
        "listener.layers.1.mixer.position_bias.weight": (
            Source(name=f"{encoder}.relative_attention_bias_layer.bias_values.weight"),
        ),
    }
    assert isinstance(listener.stem, GridStem)
    for n in range(len(listener.stem.channels)):
        ours, number = f"listener.stem.convs.{n}", max(0, 3 * n - 1)
        found |= _kernels(ours, f"{encoder}.embed.conv", {"": str(number)}, (TAPS, TAPS))
        if n:
            found |= _kernels(ours, f"{encoder}.embed.conv", {"point": str(number + 1)}, (1, 1))
    found |= named("listener.stem", f"{encoder}.embed", {"out": "out"}, bias=True)
    for ours, kind in (("listener", "speech"), ("listener.beside", "vision_speech")):
        maps = {"up": f"up_proj_for_{kind}", "projector": f"down_proj_for_{kind}"}
        found |= named(ours, theirs, maps, bias=True)
    mixers = (layer.mixer for layer in listener.layers)
    length = next(each.length for each in mixers if isinstance(each, GluConvSpec))
    for block in range(len(listener.layers) // PARTS):
        found |= _block_weights(block, length, f"{encoder}.encoders.{block}")
    return found


def _block_weights(block: int, length: int, theirs: str) -> WeightMap:
    first, attention, convolution, last = (f"listener.layers.{PARTS * block + part}" for part in range(PARTS))
    found = named(attention, theirs, ATTENTION, bias=True) | named(convolution, theirs, CONVOLUTION, bias=True)
    found |= named("listener.norms", theirs, {str(block): "layer_norm"}, bias=True)
    found |= _kernels(convolution, theirs, POINTWISE, (1,))
    taps = f"{theirs}.conv.dw_sep_conv_1d.dw_conv"
    found[f"{convolution}.mixer.conv.weight"] = (Source(name=f"{taps}.weight", kernel=(length,)),)
    found[f"{convolution}.mixer.conv.bias"] = (Source(name=f"{taps}.bias"),)
    found[f"{convolution}.mixer.shift"] = tuple(
        Source(name=f"{theirs}.conv.glu.b{number}", row=1, kernel=(1,)) for number in (1, 2)
    )
    for ours, name in ((first, "feed_forward_in"), (last, "feed_forward_out")):
        maps = {"feed_forward_norm": "layer_norm", "feed_forward.down": "down_proj"}
        found |= named(ours, f"{theirs}.{name}", maps, bias=True)
        for kind in ("weight", "bias"):  # which are stored with the gate behind
            both = Source(name=f"{theirs}.{name}.gate_up_proj.{kind}", heads=1, shares=(1, 1), backwards=True)
            found[f"{ours}.feed_forward.gate_up.{kind}"] = (both,)
    return found


def _kernels(ours: str, theirs: str, names: Mapping[str, str], kernel: tuple[int, ...]) -> WeightMap:
    """Return the weight map of maps with biases that are stored as convolutions."""
    found = WeightMap()
    for name, stored in names.items():
        inside = f"{ours}.{name}" if name else ours
        found[f"{inside}.weight"] = (Source(name=f"{theirs}.{stored}.weight", kernel=kernel),)
        found[f"{inside}.bias"] = (Source(name=f"{theirs}.{stored}.bias"),)
    return found
