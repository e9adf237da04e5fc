"""RWKV-4: weighted means over time, and mixtures of each token with the one before it.

A checkpoint may ask that the residual be halved after every few blocks, and with it what later blocks add. Nothing but
norms sees the residual, so all that changes is what their epsilon is beside it. We multiply the epsilon instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.specs.model import ABSENT, LayerSpec, MixerSpec, ModelSpec, NormSpec, Source, WeightMap
from ridgeline.core.specs.rwkv import ChannelMixSpec, TimeMixSpec
from ridgeline.models.config import Config, wrong
from ridgeline.models.names import named, single

DEFAULTS = {
    "vocab_size": 50277,
    "context_length": 1024,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "layer_norm_epsilon": 1e-5,
    "rescale_every": 6,
}
FINAL_EPSILON = 1e-5  # the last norm takes torch's, whatever config.json says
MOST_HALVINGS = 100


class Rwkv:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config, DEFAULTS)
        width, blocks = values.integer("hidden_size"), values.integer("num_hidden_layers")
        channels = values.integer("attention_hidden_size") if "attention_hidden_size" in values else width
        inner = values.integer("intermediate_size") if "intermediate_size" in values else 4 * width
        eps, every = values.number("layer_norm_epsilon"), _every(values)
        if blocks // every > MOST_HALVINGS:
            raise wrong("rescale_every", every, f"such that {blocks} layers halve at most {MOST_HALVINGS} times")
        mixers: list[MixerSpec] = [
            TimeMixSpec(width=width, channels=channels),
            ChannelMixSpec(width=width, channels=inner),
        ]
        return ModelSpec(
            architecture="RwkvForCausalLM",
            vocab_size=values.integer("vocab_size"),
            hidden_size=width,
            layers=tuple(
                LayerSpec(mixer=mixer, feed_forward=ABSENT, norm=_norm(eps, block // every))
                for block in range(blocks)
                for mixer in mixers
            ),
            final_norm=_norm(FINAL_EPSILON, blocks // every),
            max_position_embeddings=values.integer(
                "max_position_embeddings" if "max_position_embeddings" in values else "context_length"
            ),
            tie_word_embeddings=values.boolean("tie_word_embeddings"),
            embed_norm=_norm(eps, 0),
        )

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        found: WeightMap = {"embed.weight": (Source(name="rwkv.embeddings.weight"),)}
        if not spec.tie_word_embeddings:
            found["unembed.weight"] = (Source(name="head.weight"),)
        for ours, theirs in (("embed_norm", "blocks.0.pre_ln"), ("final_norm", "ln_out")):
            found |= single(ours, f"rwkv.{theirs}", {"weight": "weight", "bias": "bias"})
        for index, layer in enumerate(spec.layers):
            ours, theirs = f"layers.{index}", f"rwkv.blocks.{index // 2}"
            if isinstance(layer.mixer, TimeMixSpec):
                found |= named(ours, theirs, {"mixer_norm": "ln1"}, bias=True)
                ours, theirs = f"{ours}.mixer", f"{theirs}.attention"
                found |= named(ours, theirs, {"out": "output", "value": "value"})
                found |= single(ours, theirs, {"rate.log": "time_decay", "bonus": "time_first"})
                mixtures: tuple[str, ...] = ("key", "value", "receptance")
            else:
                found |= named(ours, theirs, {"mixer_norm": "ln2"}, bias=True)
                ours, theirs = f"{ours}.mixer", f"{theirs}.feed_forward"
                found |= named(ours, theirs, {"value": "value"})
                mixtures = ("key", "receptance")
            found |= named(ours, theirs, {"key": "key", "receptance": "receptance"})
            found[f"{ours}.shift.share"] = tuple(Source(name=f"{theirs}.time_mix_{name}") for name in mixtures)
        return found


def _every(config: Config) -> int:
    every = config.raw("rescale_every")
    if not isinstance(every, int) or isinstance(every, bool):
        raise wrong("rescale_every", every, "a whole number")
    return every if every > 0 else config.integer("num_hidden_layers") + 1


def _norm(eps: float, halvings: int) -> NormSpec:
    """Return the norm of a residual that has been halved so often, as one of the residual itself."""
    return NormSpec(kind="layer", eps=eps * 4.0**halvings)
