"""Qwen2.5-Omni: The thinker, which is Qwen2.5-VL that hears as well; it writes, and speaks nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ridgeline.core.specs.model import ModelSpec, Sines, Source, WeightMap
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.models.config import Config
from ridgeline.models.names import named
from ridgeline.models.qwen2_audio import listener_weights, whisper_listener
from ridgeline.models.qwen_vl import Qwen2_5VL

AUDIO = {"n_window": 100, "output_dim": 3584}
LISTENER = "audio_tower"
LONGEST = 300 * RATE // HOP  # frames of a sound


class Qwen2_5OmniThinker:
    """The thinker by itself. within: the beginning of its tensors' names."""

    name: ClassVar[str] = "Qwen2_5OmniThinkerForConditionalGeneration"
    within: ClassVar[str] = ""
    others: ClassVar[tuple[str, ...]] = ()

    @staticmethod
    def thinker(config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the thinker's part of a config."""
        return config

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        values = Config(cls.thinker(config))
        own = Qwen2_5VL.spec(values.entries)
        audio = Config(values.section("audio_config", required=True).entries, AUDIO)
        if (outputs := audio.integer("output_dim")) != own.hidden_size:
            raise audio.wrong("output_dim", outputs, f"the text model's {own.hidden_size}")
        window = audio.integer("n_window")
        listener = whisper_listener(audio, outputs)
        if not 0 < window <= listener.stem.positions:
            raise audio.wrong("n_window", window, f"from 1 to {listener.stem.positions}")
        listener = replace(listener, chunk=2 * window, sines=Sines(steps=listener.width // 2 - 1), longest=LONGEST)
        unused = (*own.unused, f"{cls.within}{LISTENER}.audio_bos_eos_token.", *cls.others)
        return replace(own, architecture=cls.name, listener=listener, unused=unused)

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        assert spec.listener is not None
        found = {
            **Qwen2_5VL.weights(spec),
            **listener_weights(spec.listener, LISTENER, "ln_post"),
            **named("listener", LISTENER, {"projector": "proj"}, bias=True),
        }
        return {name: tuple(part for each in sources for part in cls._stored(each)) for name, sources in found.items()}

    @classmethod
    def _stored(cls, source: Source) -> list[Source]:
        """Return the tensors that hold one of Qwen2.5-VL's: queries, keys and values of the tower are apart here."""
        names = [source.name]
        if source.name.startswith("visual.") and ".attn.qkv." in source.name:
            names = [source.name.replace(".attn.qkv.", f".attn.{part}.") for part in "qkv"]
        return [replace(source, name=f"{cls.within}{name}") for name in names]


class Qwen2_5Omni(Qwen2_5OmniThinker):
    """The thinker in a checkpoint with all parts."""

    name = "Qwen2_5OmniForConditionalGeneration"
    within = "thinker."
    others = ("talker.", "token2wav.")

    @staticmethod
    def thinker(config: Mapping[str, Any]) -> Mapping[str, Any]:
        return Config(config).section("thinker_config", required=True).entries


class Qwen2_5OmniModel(Qwen2_5Omni):
    """The same by the name that the first checkpoints have for it."""

    name = "Qwen2_5OmniModel"
