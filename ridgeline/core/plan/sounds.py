"""Sounds that a recogniser of speech or a listener reads, and the rules of a recogniser's output."""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.core.plan.octets import SharedOctets
from ridgeline.core.specs.stem import STRIDE


@dataclass(frozen=True, kw_only=True)
class Waveform:
    """A window of sound, in the model's rate.

    samples: float32 in -1..1, little-endian, one channel, as octets; silence follows them up to the window's end.
    key: stands for the samples. Requests with equal keys (and equal salts) share what the encoder makes of them.
    """

    samples: SharedOctets
    key: bytes = b""

    def __len__(self) -> int:
        return self.samples.num_bytes // 4


@dataclass(frozen=True, kw_only=True)
class HeardSound:
    """A listener's input for a sound. samples: as of `Waveform`. frames: its length in hundredths of a second. vectors:
    that become of it. beside: pictures stand in its prompt too, for which the listener has another projector."""

    samples: SharedOctets
    frames: int
    vectors: int
    beside: bool = False

    @property
    def num_bytes(self) -> int:
        """The bytes of all samples."""
        return self.samples.num_bytes

    @property
    def sent_bytes(self) -> int:
        """The bytes that a message takes for it."""
        return self.samples.sent_bytes

    @property
    def patches(self) -> int:
        """The positions of the listener's layers."""
        return -(-self.frames // STRIDE)


@dataclass(frozen=True, kw_only=True)
class AlignedTokens:
    """The last tokens of a prompt, whose attention to the sound is reported.

    tokens: how many.
    frames: of the encoder's outputs, from the first on, those to which it is reported.
    heads: (layer, head) of those whose attention follows the sound; none: all of the upper half of the layers.
    """

    tokens: int
    frames: int
    heads: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SpeechRules:
    """The tokens that a recogniser of speech may write, as Whisper's own code has them.

    suppressed: ids that never come.
    not_first: ids that are not the first.
    timestamps: the first id of the times; all behind it are times too. 0: the output has no times, and no rule of
        these applies.
    no_timestamps: the id that says so, which never comes.
    end: the id that ends an output.
    latest: the output begins with a time of at most this number; None: with any.
    aligned: tokens of the prompt whose attention is reported; None: of none.
    """

    suppressed: tuple[int, ...] = ()
    not_first: tuple[int, ...] = ()
    timestamps: int = 0
    no_timestamps: int = 0
    end: int = 0
    latest: int | None = None
    aligned: AlignedTokens | None = None
