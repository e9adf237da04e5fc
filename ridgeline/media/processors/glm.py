"""GLM-4.1V to 4.6V: as Qwen's, with pixels counted over the frames of a patch, and whole seconds behind frames."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.media.layout import Layout, Piece
from ridgeline.media.processors.files import ModelFiles, whole
from ridgeline.media.processors.qwen import Qwen2VL, smart_resize_video


class Glm4v(Qwen2VL):
    """A picture counts as the frames that its patches span."""

    pixels = (112 * 112, 28 * 28 * 15000)
    video_pixels = (112 * 112, 28 * 28 * 2 * 30000)
    sampled = True

    def __init__(self, files: ModelFiles) -> None:
        super().__init__(files)
        self.marker = self.placeholder = files.token("image_token", "<|image|>")
        self.video_marker = files.token("video_token", "<|video|>")
        self.video_placeholder = self.placeholder

    def layout(self, height: int, width: int, pictures: int = 1, index: int = 0) -> Layout:
        span = self.patching.frames
        size = smart_resize_video(span, (height, width), self._factor, self._bounds, span)
        grid = (1, size[0] // self._factor, size[1] // self._factor)
        return self._files.layout([whole(*size)], [math.prod(grid)], grids=(grid,))

    def chosen(self, frames: int, fps: float) -> tuple[int, ...]:
        """Return the numbers of the frames that are seen: of each second, up to `max_duration`, beyond that evenly."""
        rate, wished = fps or self.video_rate, self.video_rate
        longest = int(self._files.clip.get("max_duration", 300))
        seconds, most = round((frames - 1) / rate) + 1, int(longest * wished)
        if seconds <= longest:
            places = [math.ceil(n * rate / wished) for n in range(max(int(seconds * wished), 1))]
        elif most >= frames:
            places = list(range(frames))
        else:
            places = [math.ceil(n * (seconds / max(most - 1, 1)) * rate) for n in range(max(most, 1))]
        found = tuple(dict.fromkeys(min(frames - 1, each) for each in places))
        return found + found[-1:] * (len(found) % 2)

    def video(self, times: Sequence[float], height: int, width: int, rate: float) -> Layout:
        span = self.patching.frames
        size = smart_resize_video(max(len(times), span), (height, width), self._factor, self._video_bounds, span)
        views = self._clips(len(times), size)
        rows, columns = size[0] // self._factor, size[1] // self._factor
        pieces: list[Piece] = []
        for view in views:
            pieces += ["<|begin_of_image|>", rows * columns, f"<|end_of_image|>{int(times[view.frames[0]])}"]
        return self._files.layout(views, pieces, grids=((1, rows, columns),) * len(views))
