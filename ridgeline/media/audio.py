"""A sound's file as one channel of float32 at a wanted rate, within bounds. It runs in a sealed process.

The channel is the mean of all. The resampler is FFmpeg's windowed sinc of 128 taps, whose error stays below
1e-4 of the amplitude up to 92 % of half the lower rate.

Legend:
    N  samples
    C  channels
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import av
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.resampler import AudioResampler

from ridgeline.media.bounds import BadMedia, MediaBounds
from ridgeline.media.container import HEARD, check_codec, opened

RESAMPLING = {"filter_size": "128", "cutoff": "0.98"}
LOUDEST = 2.0**16  # of files with numbers of floating point, which should stay in -1..1
BLOCK = 1 << 16  # samples that are resampled at a time
SCALES = {"u8": (128.0, 128.0), "s16": (0.0, 2.0**15), "s32": (0.0, 2.0**31), "flt": (0.0, 1.0), "dbl": (0.0, 1.0)}


def decode(data: Any, bounds: MediaBounds, rate: int | None = None) -> tuple[np.ndarray, int]:
    """Return samples_N, float32, and their rate: the wanted one, or the file's own. Raise BadMedia."""
    blocks: list[np.ndarray] = []
    with opened(data, "sound", bounds) as container:
        if not container.streams.audio:
            raise BadMedia("the file holds no sound; send one with a stream of sound.")
        stream = container.streams.audio[0]
        check_codec(stream, "sound", HEARD)
        _check(stream.codec_context.sample_rate, stream.codec_context.channels, bounds)
        own, sounds = _mono(_decoded(container, stream, bounds), bounds)
        wanted = rate or own
        for block in sounds if wanted == own else _resampled(sounds, own, wanted):
            blocks.append(block)
    if not sum(map(len, blocks)):
        raise BadMedia("the sound has no samples; send one that lasts.")
    samples_N = np.concatenate(blocks)
    if not np.abs(samples_N).max() <= LOUDEST:  # nor is it where one is no number
        raise BadMedia(f"the sound has samples that are no numbers of at most {LOUDEST:g}; write it as -1 … 1.")
    return samples_N, wanted


def _decoded(container: Any, stream: Any, bounds: MediaBounds) -> Iterator[AudioFrame]:
    for count, packet in enumerate(container.demux(stream)):
        if count > bounds.packets:
            raise BadMedia(f"the sound is cut into more than {bounds.packets} packets; send a shorter one.")
        yield from packet.decode()


def _check(rate: int, channels: int, bounds: MediaBounds) -> None:
    low, high = bounds.rates
    if not low <= rate <= high:
        raise BadMedia(f"the sound has {rate} samples a second; from {low} to {high} are taken.")
    if not 1 <= channels <= bounds.channels:
        raise BadMedia(f"the sound has {channels} channels, of at most {bounds.channels}; mix it down.")


def _mono(frames: Iterator[AudioFrame], bounds: MediaBounds) -> tuple[int, Iterator[np.ndarray]]:
    """Return the rate, and blocks of samples."""
    first = next(frames, None)
    if first is None:
        raise BadMedia("the sound has no samples; send one that lasts.")
    rate = first.sample_rate
    _check(rate, first.layout.nb_channels, bounds)

    def blocks() -> Iterator[np.ndarray]:
        found, count, total = [_channel(first)], first.samples, first.samples
        for frame in frames:
            if frame.sample_rate != rate or frame.layout.nb_channels > bounds.channels:
                raise BadMedia("the sound changes its rate or channels on the way; convert it to one.")
            found.append(_channel(frame))
            count, total = count + frame.samples, total + frame.samples
            if total > bounds.sound_seconds * rate:
                raise BadMedia(f"the sound lasts more than {bounds.sound_seconds} seconds; send a part of it.")
            if count >= BLOCK:
                yield np.concatenate(found)
                found, count = [], 0
        if found:
            yield np.concatenate(found)

    return rate, blocks()


def _channel(frame: AudioFrame) -> np.ndarray:
    """Return the mean of all channels, in -1..1."""
    numbers, channels = frame.to_ndarray(), frame.layout.nb_channels
    numbers_CN = numbers if frame.format.is_planar else numbers.reshape(-1, channels).T
    middle, scale = SCALES[frame.format.name.removesuffix("p")]
    mean = numbers_CN[0].astype(np.float64) if channels == 1 else numbers_CN.mean(axis=0, dtype=np.float64)
    return ((mean - middle) / scale).astype(np.float32)


def _resampled(blocks: Iterator[np.ndarray], rate: int, wanted: int) -> Iterator[np.ndarray]:
    resampler = AudioResampler(format="flt", layout="mono", rate=wanted, options=RESAMPLING)
    for block in blocks:
        frame = av.AudioFrame.from_ndarray(block[None], format="flt", layout="mono")
        frame.sample_rate = rate
        for made in resampler.resample(frame):
            yield made.to_ndarray()[0]
    for made in resampler.resample(None):
        yield made.to_ndarray()[0]
