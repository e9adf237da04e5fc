"""Patches: pixels of decoded pictures, resized, cropped, normalised, and cut into the rows that a tower reads.

Legend:
    O  octets of all pictures, one picture after the other, each [height, width, 3]
    N  patches of all views
    P  numbers of a patch
    H  rows of pixels
    W  pixels in a row
    C  red, green, blue
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ridgeline.kernels.base.op import Implementation, Op, on_cpu, on_gpu
from ridgeline.kernels.pictures.patches.tables import (
    BITS,
    HALF,
    OUTSIDE,
    AxisTaps,
    ResizeStage,
    inner,
    numbers,
    stages,
    taps,
)
from ridgeline.kernels.pictures.views import RGB, Box, Filter, Patching, View


def patches(
    pixels_O: Tensor, sizes: Sequence[tuple[int, int]], views: Sequence[View], patching: Patching, dtype: torch.dtype
) -> Tensor:
    """Return the patches of views, one view after the other: [N, P] of `dtype`.

    pixels_O: uint8. sizes: (height, width) of each picture in it. A view's `frames` count these.

    Resizing equals PIL's of 8 bits, bit for bit: first along one axis, then along the other, each rounded to uint8.
    Pixels become numbers as transformers' processors make them with numpy, and then have `dtype`.
    """
    pictures = split(pixels_O, sizes)
    found = [seen(pictures, view, patching, _resized) for view in views]
    return torch.cat([cut(one_FHWC, patching, dtype) for one_FHWC in found])


def split(pixels_O: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the pictures: [H, W, C] each."""
    parts = pixels_O.split([3 * height * width for height, width in sizes])
    return [part.view(height, width, 3) for part, (height, width) in zip(parts, sizes, strict=True)]


def seen(pictures: Sequence[Tensor], view: View, patching: Patching, resize: object) -> Tensor:
    """Return the frames of a view, resized by `resize`: [frames, H, W, C] of int16, with OUTSIDE where nothing is."""
    frames = []
    for number in view.frames:
        x_HWC = pictures[number]
        steps = stages(view, (x_HWC.shape[0], x_HWC.shape[1]))
        for step in steps:
            inside = window_inside(step)
            x_HWC = resize(boxed(x_HWC, step.box, view.fill), step, inside, patching.filter)  # type: ignore[operator]
        frames.append(filled(x_HWC, steps[-1].window, inside, view.fill))
    return torch.stack(frames)


def boxed(x_HWC: Tensor, box: Box, fill: RGB | None) -> Tensor:
    """Return a box of a picture, with the color outside."""
    inside = inner(box, x_HWC.shape[0], x_HWC.shape[1])
    part_HWC = x_HWC[inside.top : inside.top + inside.rows, inside.left : inside.left + inside.columns]
    if inside == box:
        return part_HWC
    return _in(part_HWC, box, inside, x_HWC.new_tensor(fill or (0, 0, 0)))


def filled(x_HWC: Tensor, window: Box, inside: Box, fill: RGB | None) -> Tensor:
    """Return a window as int16, of which `x_HWC` is the part inside."""
    x_HWC = x_HWC.to(torch.int16)
    if inside == window:
        return x_HWC
    return _in(x_HWC, window, inside, x_HWC.new_tensor(fill if fill is not None else (OUTSIDE,) * 3))


def _in(part_HWC: Tensor, box: Box, inside: Box, color_C: Tensor) -> Tensor:
    whole_HWC = color_C.expand(box.rows, box.columns, 3).contiguous()
    top, left = inside.top - box.top, inside.left - box.left
    whole_HWC[top : top + inside.rows, left : left + inside.columns] = part_HWC
    return whole_HWC


def window_inside(step: ResizeStage) -> Box:
    """Return the part of a stage's window that the resized picture covers."""
    return inner(step.window, step.height, step.width)


def cut(x_FHWC: Tensor, patching: Patching, dtype: torch.dtype) -> Tensor:
    """Return the patches of frames of pixels: [N, P]. One frame stands for all that a patch spans."""
    table = torch.from_numpy(numbers(patching).T.copy()).to(x_FHWC.device, dtype).flatten()
    x = x_FHWC.int() + torch.arange(3, device=x_FHWC.device, dtype=torch.int32) * (OUTSIDE + 1)
    merge, rows, columns = patching.merge, patching.rows, patching.columns
    down, across = x.shape[1] // (rows * merge), x.shape[2] // (columns * merge)
    x = x.view(-1, down, merge, rows, across, merge, columns, 3)
    frames_at = 4 if patching.channels_last else 5
    x = x.permute((1, 4, 2, 5, 0, 3, 6, 7) if patching.channels_last else (1, 4, 2, 5, 7, 0, 3, 6))
    found = table.index_select(0, x.flatten()).view(x.shape)
    shape = [*x.shape[:frames_at], patching.frames, *x.shape[frames_at + 1 :]]
    return found.expand(shape).reshape(-1, patching.width)


def _resized(x_HWC: Tensor, step: ResizeStage, inside: Box, filter: Filter) -> Tensor:
    """Return the rows and columns inside of a resized box. float64 holds all sums exactly."""
    across = _matrix(taps(step.box.columns, step.width, filter), step.box.columns, inside.left, inside.columns)
    down = _matrix(taps(step.box.rows, step.height, filter), step.box.rows, inside.top, inside.rows)
    passes = [("qw,hwc->hqc", across), ("qh,hwc->qwc", down)]
    x = x_HWC.double()
    for sums, weights in reversed(passes) if step.columns_first else passes:
        x = torch.floor((torch.einsum(sums, weights.to(x.device), x) + HALF) / (1 << BITS)).clamp(0, 255)
    return x.to(torch.uint8)


def _matrix(axis: AxisTaps, old: int, start: int, count: int) -> Tensor:
    """Return the weights as a matrix: [count, old] float64."""
    first, weights = axis.first_Q[start : start + count], axis.weights_QK[start : start + count]
    found = np.zeros((count, old + weights.shape[1]))
    found[np.arange(count)[:, None], first[:, None] + np.arange(weights.shape[1])] = weights
    return torch.from_numpy(found[:, :old])


PATCHES = Op(
    "patches",
    patches,
    (
        Implementation("triton", "ridgeline.kernels.pictures.patches.triton:patches", on_gpu),
        Implementation("torch", "ridgeline.kernels.pictures.patches.torch_ops:patches", on_cpu),
    ),
)
