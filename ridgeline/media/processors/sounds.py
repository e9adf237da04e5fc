"""Sounds in prompts: Qwen2-Audio, and the models that take pictures as well."""

from __future__ import annotations

from ridgeline.core.errors import InvalidRequest
from ridgeline.kernels.base.sounds import HOP, RATE
from ridgeline.media.layout import Layout, Patching
from ridgeline.media.processors.files import ModelFiles
from ridgeline.media.processors.qwen import Qwen2VL

WINDOW = 30 * RATE  # samples that Whisper's encoder reads
LONGEST = 300 * RATE  # that Qwen-Omni hears


def sound_layout(files: ModelFiles, samples: int, most: int) -> Layout:
    """Return the part of a sound of so many samples: two frames become a position, and two positions a vector. Raise
    InvalidRequest for more samples than `most`, and for less than a vector."""
    if samples > most:
        raise InvalidRequest(
            f"a sound has {samples / RATE:.1f} s, and this model hears {most / RATE:g} s at most; cut it.",
            param="messages",
        )
    vectors = -(-samples // (2 * HOP)) // 2
    if not vectors:
        raise InvalidRequest(
            f"a sound has {samples} samples, which are too few; give at least 0.03 s.", param="messages"
        )
    return files.layout((), [vectors])


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

    def sound(self, samples: int) -> Layout:
        return sound_layout(self._files, samples, WINDOW)


class Qwen2_5Omni:
    """The thinker of Qwen2.5-Omni: pictures as Qwen2.5-VL has them, and sounds; no videos yet."""

    def __init__(self, files: ModelFiles) -> None:
        self._files, self._pictures = files, Qwen2VL(files)
        self.marker = self.placeholder = files.token("image_token", "<|IMAGE|>")
        self.sound_marker = self.sound_placeholder = files.token("audio_token", "<|AUDIO|>")
        self.patching = self._pictures.patching

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        return self._pictures.layout(height, width, pictures, index)

    def sound(self, samples: int) -> Layout:
        return sound_layout(self._files, samples, LONGEST)
