"""EnCodec: A codec of sounds, whose config.json becomes data here (Défossez et al., arXiv 2210.13438)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import ModelLoadError
from ridgeline.models.config import Config

DEFAULTS = {
    "target_bandwidths": [1.5, 3.0, 6.0, 12.0, 24.0],
    "sampling_rate": 24000,
    "audio_channels": 1,
    "num_residual_layers": 1,
    "upsampling_ratios": [8, 5, 4, 2],
    "norm_type": "weight_norm",
    "dilation_growth_rate": 2,
    "use_causal_conv": True,
    "pad_mode": "reflect",
    "num_lstm_layers": 2,
    "trim_right_ratio": 1.0,
    "codebook_size": 1024,
    "use_conv_shortcut": True,
}
ALONE: dict[str, Any] = {
    "model_type": "encodec",
    "audio_channels": 1,
    "norm_type": "weight_norm",
    "use_causal_conv": True,
    "pad_mode": "reflect",
    "trim_right_ratio": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class CodecSpec:
    """A codec: convolutions that halve the rate by `ratios` from the last to the first, an LSTM, and codebooks, each of
    which holds what those before it left over.

    Taps and channels of convolutions are those of the weights.

    rate: samples a second.
    residuals: blocks at each rate. growth: of the distance between the taps of each further block. shortcut: a block's
        input passes a convolution too.
    lstm_layers: of the LSTM at the lowest rate. codes: vectors of a codebook.
    bandwidths: that encoders may be asked for, in 1,000 bits a second.
    """

    rate: int
    ratios: tuple[int, ...]
    residuals: int
    growth: int
    shortcut: bool
    lstm_layers: int
    codes: int
    bandwidths: tuple[float, ...]

    @property
    def hop(self) -> int:
        """Samples of a frame."""
        return math.prod(self.ratios)

    @property
    def most_books(self) -> int:
        """The codebooks that the highest bandwidth needs."""
        return self.books(max(self.bandwidths))

    def books(self, bandwidth: float) -> int:
        """Return the codebooks that fit into a bandwidth, at least one."""
        frames = math.ceil(self.rate / self.hop)
        return max(1, int(bandwidth * 1000 / (math.log2(self.codes) * frames)))


def codec_spec(config: Mapping[str, Any]) -> CodecSpec:
    """Return config.json as data. Raise ModelLoadError for what does not run: other codecs, the form for 48 kHz, and
    convolutions that see later samples."""
    values = Config(config, DEFAULTS)
    for name, wanted in ALONE.items():
        if (found := values.raw(name)) != wanted:
            raise ModelLoadError(f"config.json sets {name} to {str(found)[:80]!r}; only EnCodec with {wanted!r} runs.")
    for name in ("normalize", "chunk_length_s"):
        values.refuse(name, "only the form for 24 kHz runs, which codes a sound as a whole")
    ratios, bandwidths = values.raw("upsampling_ratios"), values.raw("target_bandwidths")
    for name, listed in (("upsampling_ratios", ratios), ("target_bandwidths", bandwidths)):
        if not isinstance(listed, (list, tuple)) or not 0 < len(listed) <= 16:
            raise values.wrong(name, listed, "a list of 1 to 16 numbers")
    size = values.integer("codebook_size")
    if size & (size - 1):
        raise values.wrong("codebook_size", size, "a power of 2")
    return CodecSpec(
        rate=values.integer("sampling_rate"),
        ratios=tuple(Config({"ratio": each}).integer("ratio") for each in ratios),
        residuals=values.integer("num_residual_layers"),
        growth=values.integer("dilation_growth_rate"),
        shortcut=values.boolean("use_conv_shortcut"),
        lstm_layers=values.integer("num_lstm_layers"),
        codes=size,
        bandwidths=tuple(Config({"bandwidth": each}).number("bandwidth") for each in bandwidths),
    )
