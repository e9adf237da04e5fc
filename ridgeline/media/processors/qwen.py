"""Qwen2-VL, 2.5-VL and 3-VL: pictures of any size, patches in squares that become one token, videos as frames."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.media.layout import Layout, Patching, Piece, View
from ridgeline.media.processors.files import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    HALF,
    ModelFiles,
    patching,
    refuse_long,
    whole,
)
from ridgeline.media.processors.options import VIDEOS

QWEN2: dict[str, Any] = {"resample": BICUBIC, "image_mean": CLIP_MEAN, "image_std": CLIP_STD}
QWEN3: dict[str, Any] = {"resample": BICUBIC, "image_mean": HALF, "image_std": HALF}


class Qwen2VL:
    """Sides are multiples of 28 pixels, and the number of pixels is between two bounds."""

    defaults = QWEN2
    side = 14
    pixels = (56 * 56, 28 * 28 * 1280)
    video_pixels = (128 * 28 * 28, 28 * 28 * 768)
    sampled = False
    per_second = 0.0
    adjustable = VIDEOS

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        self.marker = self.placeholder = files.token("image_token", "<|image_pad|>")
        self.video_marker = self.video_placeholder = files.token("video_token", "<|video_pad|>")
        self._merge = int(files.image.get("merge_size", 2))
        side = int(files.image.get("patch_size", self.side))
        frames = int(files.image.get("temporal_patch_size", 2))
        self.patching: Patching = patching(files.image, self.defaults, side, frames=frames, merge=self._merge)
        self._factor = side * self._merge
        self._bounds = bounds(files.image, self.pixels)
        self._video_bounds = bounds(files.clip, self.video_pixels)
        self.video_rate, self.samples = files.video_rate, files.samples(self.sampled)

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        size = smart_resize(height, width, self._factor, self._bounds)
        grid = (1, size[0] // self._factor, size[1] // self._factor)
        return self._files.layout([whole(*size)], [math.prod(grid)], grids=(grid,))

    def chosen(self, frames: int, fps: float) -> tuple[int, ...]:
        """Return the numbers of the frames that are seen: 2 a second, evenly, in whole patches."""
        span, clip = self.patching.frames, self._files.clip
        most = min(int(clip.get("max_frames", 768)), frames) // span * span
        if clip.get("num_frames"):
            taken = min(round(int(clip["num_frames"]) / span) * span, frames)
        else:
            wanted = frames / fps * self.video_rate if fps else frames
            taken = math.floor(min(max(wanted, int(clip.get("min_frames", 4))), most) / span) * span
        taken = taken or min(span, frames)  # of fewer than a patch spans the last is seen again
        return tuple(int(each * frames / taken) for each in range(taken))

    def video(self, times: Sequence[float], height: int, width: int, rate: float) -> Layout:
        size = smart_resize(height, width, self._factor, self._video_bounds)
        views = self._clips(len(times), size)
        grid = (len(views), size[0] // self._factor, size[1] // self._factor)
        return self._files.layout(views, [math.prod(grid)], grids=(grid,), interval=self._interval(rate))

    def _clips(self, frames: int, size: tuple[int, int]) -> list[View]:
        """Return the views of frames, `Patching.frames` of them each. The last frame is seen again if need be."""
        span = self.patching.frames
        return [
            whole(*size, frames=tuple(min(start + each, frames - 1) for each in range(span)))
            for start in range(0, frames, span)
        ]

    def _interval(self, rate: float) -> float:
        """Return the distance of two patches in time on the first axis, at `tokens_per_second` (Qwen2.5)."""
        per_second = self._files.vision.get("tokens_per_second", self.per_second)
        return 1.0 if not per_second or rate <= 0 else float(per_second) * self.patching.frames / rate


class Qwen25VL(Qwen2VL):
    """Frames of a video are as far apart as their times: so many positions a second."""

    per_second = 4.0


class Qwen3VL(Qwen2VL):
    """Videos are pictures of two frames each, with the time written before each of them."""

    defaults = QWEN3
    side = 16
    pixels = (65536, 16777216)
    video_pixels = (128 * 32 * 32, 32 * 32 * 768)
    sampled = True

    def chosen(self, frames: int, fps: float) -> tuple[int, ...]:
        clip = self._files.clip
        wanted = int(frames / fps * self.video_rate) if fps else frames
        taken = min(max(wanted, int(clip.get("min_frames", 4))), int(clip.get("max_frames", 768)), frames)
        if clip.get("num_frames"):
            taken = min(int(clip["num_frames"]), frames)
        step = (frames - 1) / (taken - 1) if taken > 1 else 0.0
        return tuple(round(each * step) for each in range(taken))

    def video(self, times: Sequence[float], height: int, width: int, rate: float) -> Layout:
        span = self.patching.frames
        size = smart_resize_video(max(len(times), span), (height, width), self._factor, self._video_bounds, span)
        views = self._clips(len(times), size)
        rows, columns = size[0] // self._factor, size[1] // self._factor
        pieces: list[Piece] = []
        for view in views:
            seconds = (times[view.frames[0]] + times[view.frames[-1]]) / 2
            pieces += [f"<{seconds:.1f} seconds><|vision_start|>", rows * columns, "<|vision_end|>"]
        return self._files.layout(views, pieces, grids=((1, rows, columns),) * len(views))


def bounds(settings: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    """Return the least and largest number of pixels, in the two forms that the files have."""
    size = settings.get("size") or {}
    least = settings.get("min_pixels") or size.get("min_pixels") or size.get("shortest_edge") or default[0]
    most = settings.get("max_pixels") or size.get("max_pixels") or size.get("longest_edge") or default[1]
    return int(least), int(most)


def smart_resize(height: int, width: int, factor: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the size whose sides are multiples of `factor`, within the bounds, of about the picture's shape."""
    return _within(1, 1, (height, width), factor, bounds)


def smart_resize_video(
    frames: int, size: tuple[int, int], factor: int, bounds: tuple[int, int], span: int
) -> tuple[int, int]:
    """Return the size of each of so many frames, whose pixels are bounded together."""
    height, width = size
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    return _within(frames, round(frames / span) * span, (height, width), factor, bounds)


def _within(frames: int, counted: int, size: tuple[int, int], factor: int, bounds: tuple[int, int]) -> tuple[int, int]:
    """Return the size. counted: the frames, rounded to whole patches, which decide on the bounds."""
    height, width = size
    refuse_long(height, width)
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if counted * rows * columns > bounds[1]:
        shrink = math.sqrt((frames * height * width) / bounds[1])
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif counted * rows * columns < bounds[0]:
        grow = math.sqrt(bounds[0] / (frames * height * width))
        rows, columns = math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rows, columns
