"""Sounds in prompts: Qwen2-Audio, and the models that take pictures as well."""

from __future__ import annotations

from ridgeline.core.errors import InvalidConfig, InvalidRequest
from ridgeline.core.specs.listener import LONGEST_SOUND
from ridgeline.core.specs.spectra import GEMMA_3N
from ridgeline.core.specs.stem import halved
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.media.layout import Layout, Patching
from ridgeline.media.processors.files import ModelFiles, check_spectra
from ridgeline.media.processors.qwen import Qwen2VL, Qwen3VL

SPECTRA_3N: dict[str, object] = {
    **{
        "sampling_rate": RATE,
        "fft_length": GEMMA_3N.transformed,
        "fft_overdrive": True,
        "frame_length": GEMMA_3N.frame,
    },
    **{
        "frame_length": GEMMA_3N.frame,
        "frame_length_ms": 32.0,
        "hop_length": HOP,
        "hop_length_ms": 10.0,
        "min_frequency": GEMMA_3N.lowest,
    },
    **{"max_frequency": GEMMA_3N.highest, "preemphasis": GEMMA_3N.preemphasis, "preemphasis_htk_flavor": True},
    **{"mel_floor": GEMMA_3N.floor, "dither": 0.0, "input_scale_factor": 1.0},
    **{"per_bin_mean": None, "per_bin_stddev": None},
}
WINDOW = 30 * RATE  # samples that Whisper's encoder reads


def sound_layout(files: ModelFiles, samples: int, most: int, chunk: int = 0) -> Layout:
    """Return the part of a sound of so many samples. Raise InvalidRequest for more samples than `most`, and for less
    than a vector.

    chunk: frames that are halved three times, which are a vector each then; 0: frames are halved, and two positions are
        a vector.
    """
    check_length(samples, most)
    frames = -(-samples // HOP)
    vectors = -(-frames // 2) // 2
    if chunk:
        whole, rest = divmod(frames, chunk)
        vectors = whole * halved(chunk) + halved(rest)
    return files.layout((), [some(vectors, samples)])


def check_length(samples: int, most: int) -> None:
    """Raise InvalidRequest for a sound of more samples than `most`."""
    if samples > most:
        raise InvalidRequest(
            f"a sound has {samples / RATE:.1f} s, and this model hears {most / RATE:g} s at most; cut it.",
            param="messages",
        )


def some(vectors: int, samples: int) -> int:
    """Return the vectors of a sound. Raise InvalidRequest if there are none."""
    if not vectors:
        raise InvalidRequest(
            f"a sound has {samples} samples, which are too few; give 0.03 s or more.", param="messages"
        )
    return vectors


class Qwen2Audio:
    """A model that hears and sees nothing. The template writes what stands around a sound.

    patching: of no picture.
    """

    patching = Patching("bicubic", 1.0, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), 1, 1)

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("audio_token", "<|AUDIO|>")
        self.sound_marker = self.sound_placeholder = self.marker

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        raise InvalidRequest("this model sees no pictures; leave them out.", param="messages")

    def sound(self, samples: int, pictures: int = 0) -> Layout:
        return sound_layout(self._files, samples, WINDOW)


class Gemma3nSounds(Qwen2Audio):
    """Gemma 3n, whose pictures are not seen. Every sound has as many vectors; one more stands for the token behind
    them, whose embedding is one of sounds too."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self.marker = self.placeholder = files.token("audio_token", "<audio_soft_token>")
        self.sound_marker = self.sound_placeholder = self.marker
        self._begin = files.token("boa_token", "<start_of_audio>")
        config = files.config
        bands = (config.get("audio_config") or {}).get("input_feat_size", GEMMA_3N.bands)
        check_spectra(files.heard, {**SPECTRA_3N, "feature_size": bands})
        self._vectors = int(config.get("audio_soft_tokens_per_image") or 188)
        if (said := files.processor.get("audio_seq_length", self._vectors)) != self._vectors:
            raise InvalidConfig(
                f"audio_seq_length is {str(said)[:80]} in processor_config.json, and the model makes {self._vectors} "
                "vectors of a sound (audio_soft_tokens_per_image in config.json); make them equal."
            )

    def sound(self, samples: int, pictures: int = 0) -> Layout:
        check_length(samples, WINDOW)
        some(GEMMA_3N.frames_of(samples), samples)
        return self._files.layout((), [f"\n\n{self._begin}", self._vectors + 1, "\n\n"])


class Qwen2_5Omni:
    """The thinker of Qwen2.5-Omni: pictures as Qwen2.5-VL has them, and sounds; no videos yet."""

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self._pictures: Qwen2VL = Qwen2VL(files)
        self.marker = self.placeholder = files.token("image_token", "<|IMAGE|>")
        self.sound_marker = self.sound_placeholder = files.token("audio_token", "<|AUDIO|>")
        self.patching = self._pictures.patching

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        return self._pictures.layout(height, width, pictures, index)

    def sound(self, samples: int, pictures: int = 0) -> Layout:
        return sound_layout(self._files, samples, LONGEST_SOUND * RATE)


class Qwen3Omni(Qwen2_5Omni):
    """The thinker of Qwen3-Omni: pictures as Qwen3-VL has them, and sounds."""

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self._pictures = Qwen3VL(files)
        self.marker = self.placeholder = files.token("image_token", "<|image_pad|>")
        self.sound_marker = self.sound_placeholder = files.token("audio_token", "<|audio_pad|>")
        self.patching = self._pictures.patching
        thinker = files.config.get("thinker_config") or files.config
        self._chunk = 2 * int((thinker.get("audio_config") or {}).get("n_window", 50))

    def sound(self, samples: int, pictures: int = 0) -> Layout:
        return sound_layout(self._files, samples, LONGEST_SOUND * RATE, self._chunk)
