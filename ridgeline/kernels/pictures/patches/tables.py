"""The tables of a resize, as PIL has them: the pixels that a new pixel is made of, and their weights. Free of torch.

Legend:
    Q  new pixels along an axis
    K  taps: the old pixels that a new one may be made of
    C  red, green, blue
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ridgeline.kernels.pictures.views import Box, Filter, Patching, View

BITS = 22  # of the fraction of a weight
HALF = 1 << (BITS - 1)
OUTSIDE = 256  # stands for a pixel that is outside after numbers are normalised


class AxisTaps(NamedTuple):
    """The pixels `first_Q` … `first_Q` + K - 1 of the old ones make a new pixel; those past the last have weight 0.

    first_Q: int32. weights_QK: int32, in units of 2**-BITS; they sum to about 1.
    """

    first_Q: np.ndarray
    weights_QK: np.ndarray


class ResizeStage(NamedTuple):
    """A resize of `box` to height x width, of which the rows and columns of `window` are wanted."""

    box: Box
    height: int
    width: int
    window: Box

    @property
    def columns_first(self) -> bool:
        """True if the height changes before the width. Pillow does so from 13 on, for pictures that lose far more of
        their height; the order decides on the roundings between the two."""
        lost = self.box.rows - self.height
        return lost > 0 and lost > 2 * (self.box.columns - self.width)


def triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1.0 - np.abs(x), 0.0)


def cubic(x: np.ndarray) -> np.ndarray:
    """Return Keys' cubic, with the slope -1/2."""
    x, a = np.abs(x), -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def lanczos(x: np.ndarray) -> np.ndarray:
    return np.where((x >= -3.0) & (x < 3.0), _sinc(x) * _sinc(x / 3), 0.0)


def box(x: np.ndarray) -> np.ndarray:
    return np.where((x > -0.5) & (x <= 0.5), 1.0, 0.0)


def hamming(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    return np.where(x < 1.0, _sinc(x) * (0.54 + 0.46 * np.cos(np.pi * x)), 0.0)


def _sinc(x: np.ndarray) -> np.ndarray:
    x = np.where(x == 0, 1e-30, x) * np.pi
    return np.sin(x) / x


# The function of a filter, and how far it reaches from its middle
FILTERS: dict[Filter, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "bilinear": (triangle, 1.0),
    "bicubic": (cubic, 2.0),
    "lanczos": (lanczos, 3.0),
    "box": (box, 0.5),
    "hamming": (hamming, 1.0),
}


@lru_cache(maxsize=128)  # of up to a megabyte and a half each, for the longest pictures
def taps(old: int, new: int, filter: Filter) -> AxisTaps:
    """Return the taps of an axis of `old` pixels that becomes `new`.

    The filter is widened where the axis shrinks. Weights are rounded as PIL's of 8 bits are. An axis that keeps its
    length is taken as it is. `nearest` takes the pixel in the middle.
    """
    if old == new:
        return AxisTaps(np.arange(new, dtype=np.int32), np.full((new, 1), 1 << BITS, np.int32))
    if filter == "nearest":
        step = old / new
        middle_Q = np.add.accumulate(np.concatenate([[step * 0.5], np.full(new - 1, step)]))
        first_Q = np.minimum(middle_Q.astype(np.int32), old - 1)
        return AxisTaps(first_Q, np.full((new, 1), 1 << BITS, np.int32))
    function, reach = FILTERS[filter]
    scale = old / new
    wide = max(scale, 1.0)
    support = reach * wide
    center_Q = (np.arange(new) + 0.5) * scale
    first_Q = np.maximum(np.trunc(center_Q - support + 0.5), 0).astype(np.int32)
    end_Q = np.minimum(np.trunc(center_Q + support + 0.5), old).astype(np.int32)
    number_QK = first_Q[:, None] + np.arange(math.ceil(support) * 2 + 1)
    exact_QK = function((number_QK - center_Q[:, None] + 0.5) * (1.0 / wide))
    exact_QK = np.where(number_QK < end_Q[:, None], exact_QK, 0.0)
    total_Q = np.add.accumulate(exact_QK, axis=1)[:, -1]  # in PIL's order
    exact_QK = exact_QK / np.where(total_Q == 0, 1.0, total_Q)[:, None]
    weights_QK = np.trunc(exact_QK * (1 << BITS) + np.where(exact_QK < 0, -0.5, 0.5)).astype(np.int32)
    used = max(1, int((end_Q - first_Q).max()))
    return AxisTaps(first_Q, np.ascontiguousarray(weights_QK[:, :used]))


def stages(view: View, size: tuple[int, int]) -> tuple[ResizeStage, ...]:
    """Return the resizes of a view of a picture of `size` (height, width), one after the other."""
    found, around = [], view.box or Box(0, 0, *size)
    for height, width in view.via:
        found.append(ResizeStage(around, height, width, Box(0, 0, height, width)))
        around = Box(0, 0, height, width)
    return (*found, ResizeStage(around, view.height, view.width, view.window))


def inner(box: Box, height: int, width: int) -> Box:
    """Return the part of a box that is inside a picture."""
    top, left = min(max(box.top, 0), height), min(max(box.left, 0), width)
    bottom, right = min(max(box.top + box.rows, top), height), min(max(box.left + box.columns, left), width)
    return Box(top, left, bottom - top, right - left)


@lru_cache(maxsize=64)
def numbers(patching: Patching) -> np.ndarray:
    """Return the number for each value of a pixel: [257, C] float32, rounded where transformers rounds. The last is
    OUTSIDE, zero."""
    scaled = (np.arange(256, dtype=np.float64) * patching.scale).astype(np.float32)
    mean_C, std_C = np.array(patching.mean, np.float32), np.array(patching.std, np.float32)
    return np.concatenate([(scaled[:, None] - mean_C) / std_C, np.zeros((1, 3), np.float32)])


def patches_of(view: View, patching: Patching) -> int:
    """Return the number of rows that a view becomes."""
    return (view.window.rows // patching.rows) * (view.window.columns // patching.columns)
