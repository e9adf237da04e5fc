"""The tables that name the module of each kind of mixer and feed-forward. A new kind is one file and one line here."""

from __future__ import annotations

from torch import nn

from ridgeline.core.registry import Registry
from ridgeline.core.specs.model import FeedForwardSpec, MixerSpec
from ridgeline.layers.build import Build

# Modules are made from (spec, model width, build) and called with (norm, x, residual, positions, the layer's state),
# and with the embedded tokens if the layer asks for them
MIXERS = Registry(
    "mixer",
    {
        "attention": "ridgeline.layers.attention:Attention",
        "cross_attention": "ridgeline.layers.cross_attention:CrossAttention",
        "latent_attention": "ridgeline.layers.latent_attention:LatentAttention",
        "glu_conv": "ridgeline.layers.encoder.conformer:GluConv",
        "near_attention": "ridgeline.layers.encoder.conformer:NearAttention",
        "short_conv": "ridgeline.layers.short_conv:ShortConv",
        "mamba": "ridgeline.layers.mamba:Mamba",
        "mamba2": "ridgeline.layers.mamba2:Mamba2",
        "side_by_side": "ridgeline.layers.side_by_side:SideBySide",
        "shared_block": "ridgeline.layers.shared_block:BehindSharedBlock",
        "gated_delta": "ridgeline.layers.gated_delta:GatedDelta",
        "linear_attention": "ridgeline.layers.linear_attention:LinearAttention",
        "lightning_attention": "ridgeline.layers.linear_attention:LightningAttention",
        "delta_attention": "ridgeline.layers.linear_attention:DeltaAttention",
        "time_mix": "ridgeline.layers.rwkv:TimeMix",
        "channel_mix": "ridgeline.layers.rwkv:ChannelMix",
    },
)

# Modules are made from (spec, model width, build) and called with (norm, x, residual, live), where `live` tells which
# tokens belong to a request
FEED_FORWARDS = Registry(
    "feed-forward", {"mlp": "ridgeline.layers.mlp:feed_forward", "experts": "ridgeline.layers.experts:Experts"}
)


def mixer(spec: MixerSpec, width: int, build: Build) -> nn.Module:
    """Return the module for `spec`. It returns (what it adds to the residual, the residual before it)."""
    made: nn.Module = MIXERS[spec.kind](spec, width, build)
    return made


def feed_forward(spec: FeedForwardSpec, width: int, build: Build) -> nn.Module:
    """Return the module for `spec`. It returns (what it adds to the residual, the residual before it)."""
    made: nn.Module = FEED_FORWARDS[spec.kind](spec, width, build)
    return made
