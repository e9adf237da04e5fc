"""Qwen2.5-Omni and Qwen3-Omni: The thinkers, which are Qwen2.5-VL and Qwen3-VL that hear as well, and speak nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ridgeline.core.specs.listener import LONGEST_SOUND, ListenerSpec
from ridgeline.core.specs.model import ModelSpec, Sines, Source, WeightMap
from ridgeline.core.specs.stem import HALVINGS, TAPS, GridStem
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.models.config import Config
from ridgeline.models.names import named
from ridgeline.models.qwen2_audio import listener_weights, whisper_listener
from ridgeline.models.qwen3_moe import Qwen3Moe
from ridgeline.models.qwen_vl import Qwen2_5VL, Qwen3VLMoe, qwen3_tower_weights

AUDIO = {"n_window": 100, "output_dim": 3584}
AUDIO_3 = {
    "n_window": 50,
    "n_window_infer": 800,
    "output_dim": 2048,
    "downsample_hidden_size": 480,
    "num_mel_bins": 128,
    "max_source_positions": 1500,
}
MERGERS_3 = {
    "model.visual.": "visual.",
    "deepstack_merger_list.": "merger_list.",
    ".norm.": ".ln_q.",
    ".linear_fc1.": ".mlp.0.",
    ".linear_fc2.": ".mlp.2.",
}
LISTENER = "audio_tower"
LONGEST = LONGEST_SOUND * RATE // HOP  # frames of a sound


class Qwen2_5OmniThinker:
    """The thinker by itself, or in a checkpoint with all parts. within: the beginning of its tensors' names."""

    name: ClassVar[str] = "Qwen2_5OmniThinkerForConditionalGeneration"
    within: ClassVar[str] = ""
    others: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def spec(cls, config: Mapping[str, Any]) -> ModelSpec:
        values = Config(config).section("thinker_config", required=True) if cls.within else Config(config)
        own = cls.seeing(values.entries)
        listener = cls.listener(values.section("audio_config", required=True))
        if listener.outputs != own.hidden_size:
            raise values.wrong("output_dim", listener.outputs, f"the text model's {own.hidden_size}")
        unused = (*own.unused, f"{cls.within}{LISTENER}.audio_bos_eos_token.", *cls.others)
        return replace(own, architecture=cls.name, listener=listener, unused=unused)

    @staticmethod
    def seeing(config: Mapping[str, Any]) -> ModelSpec:
        """Return the thinker without its listener."""
        return Qwen2_5VL.spec(config)

    @staticmethod
    def listener(config: Config) -> ListenerSpec:
        audio = Config(config.entries, AUDIO)
        found, window = whisper_listener(audio, audio.integer("output_dim")), audio.integer("n_window")
        if not 0 < window <= found.stem.positions:
            raise audio.wrong("n_window", window, f"from 1 to {found.stem.positions}")
        return replace(found, chunk=2 * window, sines=_sines(found), longest=LONGEST)

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


class Qwen2_5OmniModel(Qwen2_5Omni):
    """The same by the name that the first checkpoints have for it."""

    name = "Qwen2_5OmniModel"


class Qwen3OmniThinker(Qwen2_5OmniThinker):
    """Qwen3-Omni's thinker by itself."""

    name = "Qwen3OmniMoeThinkerForConditionalGeneration"

    @staticmethod
    def seeing(config: Mapping[str, Any]) -> ModelSpec:
        return Qwen3VLMoe.spec(config)

    @staticmethod
    def listener(config: Config) -> ListenerSpec:
        audio = Config(config.entries, AUDIO_3)
        found, chunk = whisper_listener(audio, audio.integer("output_dim")), 2 * audio.integer("n_window")
        window = audio.integer("n_window_infer")
        stem = GridStem(
            bands=found.stem.bands,
            positions=found.stem.positions,
            channels=(audio.integer("downsample_hidden_size"),) * HALVINGS,
        )
        if not 0 < stem.positions_of(chunk) <= stem.positions:
            raise audio.wrong("n_window", chunk // 2, f"at least 1, and of at most {stem.positions} positions")
        if window < chunk:
            raise audio.wrong("n_window_infer", window, f"at least a chunk of {chunk} frames")
        return replace(
            found,
            stem=stem,
            chunk=chunk,
            window=window // chunk,
            sines=_sines(found),
            longest=LONGEST,
            pooled=1,
            hidden=found.width,
        )

    @classmethod
    def weights(cls, spec: ModelSpec) -> WeightMap:
        assert spec.listener is not None
        found = {**Qwen3Moe.weights(spec), **_named_as_mergers(qwen3_tower_weights(spec))}
        found |= listener_weights(spec.listener, LISTENER, "ln_post", keys=True)
        for n in range(HALVINGS):
            theirs = f"{LISTENER}.conv2d{n + 1}"
            found[f"listener.stem.convs.{n}.weight"] = (Source(name=f"{theirs}.weight", kernel=(TAPS, TAPS)),)
            found[f"listener.stem.convs.{n}.bias"] = (Source(name=f"{theirs}.bias"),)
        found |= named("listener.stem", LISTENER, {"out": "conv_out"})
        found |= named("listener", LISTENER, {"up": "proj1", "projector": "proj2"}, bias=True)
        return {name: tuple(part for each in sources for part in cls._stored(each)) for name, sources in found.items()}

    @classmethod
    def _stored(cls, source: Source) -> list[Source]:
        return [replace(source, name=f"{cls.within}{source.name}")]


class Qwen3Omni(Qwen3OmniThinker):
    """Qwen3-Omni's thinker in a checkpoint with all parts."""

    name = "Qwen3OmniMoeForConditionalGeneration"
    within = "thinker."
    others = ("talker.", "code2wav.")


def _sines(listener: ListenerSpec) -> Sines:
    return Sines(steps=listener.width // 2 - 1)


def _named_as_mergers(weights: WeightMap) -> WeightMap:
    """Return the weight map of Qwen3-VL's tower by the names that it has here."""

    def renamed(source: Source) -> Source:
        name = source.name
        for ours, theirs in MERGERS_3.items():
            if ours == "model.visual." or ".merger" in name or "merger_list" in name:
                name = name.replace(ours, theirs)
        return replace(source, name=name)

    return {name: tuple(map(renamed, sources)) for name, sources in weights.items()}
