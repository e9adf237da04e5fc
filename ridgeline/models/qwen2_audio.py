"""Qwen2-Audio: Qwen2 with Whisper's encoder, whose outputs become tokens by a linear map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.core.specs.listener import ListenerSpec
from ridgeline.core.specs.model import LayerSpec, ModelSpec, Source, WeightMap
from ridgeline.core.specs.stem import STRIDE, TAPS, SoundStem
from ridgeline.models.bart import FED, SELF, side_attention, side_mlp
from ridgeline.models.config import Config
from ridgeline.models.llama import decoder_weights
from ridgeline.models.names import named
from ridgeline.models.qwen2 import Qwen2
from ridgeline.models.whisper import MOST_BANDS, NORM, biasless
from ridgeline.models.wrapped import text_config, text_weights

AUDIO = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "activation_function": "gelu",
    "max_source_positions": 1500,
}
LISTENER = "audio_tower"


class Qwen2Audio:
    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config)
        text = values.section("text_config", required=True)
        if (kind := text.raw("model_type")) not in (None, "qwen2"):
            raise ModelLoadError(f"config.json has a Qwen2-Audio of {kind!r}, of which only Qwen2 runs here.")
        own = Qwen2.spec(text_config(config))
        listener = whisper_listener(values.section("audio_config", required=True), own.hidden_size)
        return replace(own, architecture="Qwen2AudioForConditionalGeneration", listener=listener)

    @staticmethod
    def weights(spec: ModelSpec) -> WeightMap:
        assert spec.listener is not None
        return {
            **text_weights(decoder_weights(spec), whole=True),
            **listener_weights(spec.listener, LISTENER, "layer_norm"),
            **named("listener", "multi_modal_projector", {"projector": "linear"}, bias=True),
        }


def whisper_listener(config: Config, outputs: int) -> ListenerSpec:
    """Return Whisper's encoder as a listener of windows. outputs: the numbers of a vector."""
    values = Config(config.entries, AUDIO)
    bands = values.integer("num_mel_bins")
    if bands > MOST_BANDS:
        raise values.wrong("num_mel_bins", bands, f"at most {MOST_BANDS}")
    if values.boolean("scale_embedding"):
        raise values.wrong("scale_embedding", True, "false, as in every one of these models")
    attention = replace(side_attention(values, "encoder"), bidirectional=True)
    layer = LayerSpec(mixer=attention, feed_forward=side_mlp(values, "encoder"), norm=NORM)
    stem = SoundStem(bands=bands, positions=values.integer("max_source_positions"))
    return ListenerSpec(
        stem=stem,
        width=values.integer("d_model"),
        layers=(layer,) * values.integer("encoder_layers"),
        norm=NORM,
        outputs=outputs,
        longest=stem.positions * STRIDE,
    )


def listener_weights(spec: ListenerSpec, theirs: str, norm: str, *, keys: bool = False) -> WeightMap:
    """Return the weight map of such a listener, whose tensors' names begin so, without its projector. norm: the name of
    the last norm. keys: maps to keys have biases, and the stem is of another kind."""
    found = named("listener", theirs, {"norm": norm}, bias=True)
    for conv in () if keys else ("conv1", "conv2"):
        found[f"listener.stem.{conv}.weight"] = (Source(name=f"{theirs}.{conv}.weight", kernel=(TAPS,)),)
        found[f"listener.stem.{conv}.bias"] = (Source(name=f"{theirs}.{conv}.bias"),)
    if spec.sines is None:
        found["listener.stem.positions"] = (Source(name=f"{theirs}.embed_positions.weight"),)
    layer = {"mixer_norm": "self_attn_layer_norm", **SELF, "feed_forward_norm": "final_layer_norm", **FED}
    for index in range(len(spec.layers)):
        found |= named(f"listener.layers.{index}", f"{theirs}.layers.{index}", layer, bias=True)
    if keys:
        return found
    return {name: tuple(biasless(each, spec.width) for each in sources) for name, sources in found.items()}
