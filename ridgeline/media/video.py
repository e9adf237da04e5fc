"""A video's file as frames that are chosen of it, within bounds. It runs in a sealed process.

All packets are read first, since files lie about how many frames they have. Then only those stretches between key
frames are decoded that hold a chosen frame.

Legend:
    F  frames
    H  rows of pixels
    W  pixels in a row
    C  red, green, blue
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from ridgeline.media.bounds import BadMedia, MediaBounds
from ridgeline.media.container import PICTURED, check_codec, opened

Choose = Callable[[int, float], Sequence[int]]  # of the number of frames and frames a second, to indices in order
Room = Callable[[Sequence[int]], np.ndarray]


class Frames(NamedTuple):
    """frames_FHWC: uint8, in memory that was given. times_F: seconds from the first frame of the file. fps: the file's
    own frames a second."""

    frames_FHWC: np.ndarray
    times_F: np.ndarray
    fps: float


def decode(data: Any, bounds: MediaBounds, room: Room, choose: Choose) -> Frames:
    """Return the frames that `choose` names. Raise BadMedia."""
    with opened(data, "video", bounds) as container:
        if not container.streams.video:
            raise BadMedia("the file holds no pictures; send one with a stream of video.")
        stream = container.streams.video[0]
        check_codec(stream, "video", PICTURED)
        _check(stream.codec_context.width, stream.codec_context.height, bounds)
        packets = _packets(container, stream, bounds)
        times, fps = _times(packets, stream)
        wanted = _checked(choose(len(times), fps), len(times), bounds)
        found = _fill(_decoded(stream.codec_context, packets, times, wanted), wanted, bounds, room)
    scale = float(stream.time_base or 1)
    seconds = [(times[index] - times[0]) * scale for index in wanted[: len(found)]]
    return Frames(found, np.array(seconds), fps)


def _check(width: int, height: int, bounds: MediaBounds) -> None:
    if width <= 0 or height <= 0:
        raise BadMedia(f"the video has {width} by {height} pixels; send one that has at least one.")
    if width * height > bounds.frame_pixels:
        raise BadMedia(
            f"the video's frames have {width} by {height} pixels, of at most {bounds.frame_pixels}; send smaller ones."
        )


def _packets(container: Any, stream: Any, bounds: MediaBounds) -> list[Any]:
    """Return all packets of the stream that hold something, with a time each."""
    found: list[Any] = []
    for packet in container.demux(stream):
        if not packet.size:
            continue
        if len(found) >= bounds.packets:
            raise BadMedia(f"the video has more than {bounds.packets} frames; send a part of it.")
        found.append(packet)
    if not found:
        raise BadMedia("the video has no frames; send one that lasts.")
    if any(packet.pts is None for packet in found):  # then frames come in the order of packets
        step = int(1 / (stream.time_base * stream.average_rate)) if stream.average_rate and stream.time_base else 1
        for index, packet in enumerate(found):
            packet.pts = packet.dts = index * max(1, step)
    return found


def _times(packets: list[Any], stream: Any) -> tuple[list[int], float]:
    """Return the times of all frames, in units of the stream, and its frames a second."""
    times = sorted({packet.pts for packet in packets if not packet.is_discard})
    if not times:
        raise BadMedia("the video has no frames that are shown; send one that lasts.")
    span = (times[-1] - times[0]) * float(stream.time_base or 1)
    fps = float(stream.average_rate or 0) or ((len(times) - 1) / span if span > 0 else 0.0)
    return times, fps


def _checked(wanted: Sequence[int], total: int, bounds: MediaBounds) -> list[int]:
    if len(wanted) > bounds.frames:
        raise BadMedia(f"{len(wanted)} frames of the video are wanted, of at most {bounds.frames}; ask for fewer.")
    if not wanted or min(wanted) < 0 or max(wanted) >= total or list(wanted) != sorted(wanted):
        raise BadMedia(f"the frames that are wanted are not in the order of a video of {total} frames.")
    return list(wanted)


def _decoded(context: Any, packets: list[Any], times: list[int], wanted: list[int]) -> Iterator[tuple[int, Any]]:
    """Yield the wanted frames with their indices, in order, each once."""
    index_of = {time: index for index, time in enumerate(times)}
    left = set(wanted)
    for stretch in _stretches(packets, {times[index] for index in left}):
        for packet in [*stretch, None]:
            for frame in context.decode(packet):
                index = index_of.get(frame.pts)
                if index in left:
                    left.discard(index)
                    yield index, frame
        if not left:
            return
        context.flush_buffers()


def _stretches(packets: list[Any], wanted: set[int]) -> Iterator[list[Any]]:
    """Yield runs of packets that begin with a key frame, and hold all that the wanted frames are made of. Frames before
    a key frame in time, and after it in the file, are made of the run before, too."""
    runs: list[list[Any]] = [[]]
    for packet in packets:
        if packet.is_keyframe and runs[-1]:
            runs.append([])
        runs[-1].append(packet)
    needed = [any(packet.pts in wanted for packet in run) for run in runs]
    leading = [any(packet.pts in wanted and packet.pts < run[0].pts for packet in run) for run in runs]
    joined: list[Any] = []
    for index, run in enumerate(runs):
        after = index + 1 < len(runs) and leading[index + 1]
        if needed[index] or after:
            joined += run
        elif joined:
            yield joined
            joined = []
    if joined:
        yield joined


def _fill(decoded: Iterator[tuple[int, VideoFrame]], wanted: list[int], bounds: MediaBounds, room: Room) -> np.ndarray:
    places: dict[int, list[int]] = {}
    for place, index in enumerate(wanted):
        places.setdefault(index, []).append(place)
    frames_FHWC, filled, reformatter = np.empty((0, 0, 0, 3), np.uint8), 0, VideoReformatter()
    for index, frame in decoded:
        _check(frame.width, frame.height, bounds)
        pixels = _pixels(frame, reformatter)
        if not filled:
            height, width, _ = pixels.shape
            if len(wanted) * pixels.size > bounds.clip_bytes:
                raise BadMedia(
                    f"{len(wanted)} frames of {width} by {height} pixels are more than {bounds.clip_bytes} bytes; ask "
                    "for fewer frames, or send smaller ones."
                )
            frames_FHWC = room((len(wanted), height, width, 3))
        if pixels.shape != frames_FHWC.shape[1:]:
            raise BadMedia("the video's frames change their size on the way; convert them to one.")
        for place in places[index]:
            frames_FHWC[place] = pixels
            filled += 1
    if filled < len(wanted):
        raise BadMedia(f"only {filled} of {len(wanted)} frames of the video could be decoded; send it anew.")
    return frames_FHWC


def _pixels(frame: VideoFrame, reformatter: VideoReformatter) -> np.ndarray:
    """Return the frame in RGB, turned as its file says."""
    pixels = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
    return np.rot90(pixels, k=(frame.rotation // 90) % 4)
